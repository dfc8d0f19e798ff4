"""Which text a step trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, MismatchError
from holdfast_trainer.train.data import BatchSampler, Corpus, epoch_order, read_corpus


def corpus_of(text: bytes) -> Corpus:
    tokens = np.frombuffer(text, dtype=np.uint8)
    return Corpus(tokens=tokens, num_files=1, fingerprint=text.hex()[:32], source="a test")


def sampler_of(text: bytes, *, seed: int = 1, seq_len: int = 4, rows: int = 8) -> BatchSampler:
    return BatchSampler(corpus_of(text), seed=seed, seq_len=seq_len, global_batch_size=rows)


TEXT = bytes(range(256)) * 2


@given(
    seed=st.integers(0, 99),
    num_shares=st.sampled_from([1, 2, 3, 4, 6, 12]),
    step=st.integers(0, 40),
    seq_len=st.integers(1, 40),
)
@settings(deadline=None, max_examples=60)
def test_shares_of_any_layout_make_the_same_batch(
    seed: int, num_shares: int, step: int, seq_len: int
) -> None:
    whole = sampler_of(TEXT, seed=seed, seq_len=seq_len, rows=12)
    parts = sampler_of(TEXT, seed=seed, seq_len=seq_len, rows=12)
    for _ in range(step):
        whole.advance()
        parts.advance()
    shares = [parts.rows(index=index, num_shares=num_shares) for index in range(num_shares)]
    assert np.array_equal(np.concatenate(shares), whole.rows())
    assert whole.rows().shape == (12, seq_len + 1)


def test_an_epoch_visits_every_window_once_and_epochs_differ() -> None:
    sampler = sampler_of(TEXT, seq_len=8, rows=9)  # 63 windows: 7 batches
    epochs = []
    for _ in range(2):
        rows = []
        for _ in range(7):
            rows += [row.tobytes() for row in sampler.rows()]
            sampler.advance()
        epochs.append(rows)
    tokens = np.frombuffer(TEXT, dtype=np.uint8).astype(np.int64)
    expected = sorted(tokens[8 * i : 8 * i + 9].tobytes() for i in range(63))
    assert sorted(epochs[0]) == expected
    assert sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_a_batch_may_cross_the_end_of_an_epoch() -> None:
    sampler = sampler_of(TEXT, seq_len=64, rows=5)  # 7 windows
    sampler.advance()
    order = [*epoch_order(7, seed=1, epoch=0)[5:], *epoch_order(7, seed=1, epoch=1)[:3]]
    expected = [list(TEXT[64 * i : 64 * i + 65]) for i in order]
    assert sampler.rows().tolist() == expected


def test_the_order_is_frozen() -> None:
    # Stored positions mean something only as long as the order never changes.
    assert epoch_order(8, seed=1, epoch=0).tolist() == [4, 6, 7, 2, 3, 0, 5, 1]
    assert epoch_order(8, seed=1, epoch=1).tolist() != epoch_order(8, seed=2, epoch=1).tolist()


def test_a_position_is_restored() -> None:
    ours, other = sampler_of(TEXT), sampler_of(TEXT)
    for _ in range(3):
        ours.advance()
    other.load_state_dict(ours.state_dict())
    assert np.array_equal(ours.rows(), other.rows())
    ours.advance()
    assert not np.array_equal(ours.rows(), other.rows())


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (sampler_of(TEXT[1:]), "--data"),
        (sampler_of(TEXT, seq_len=5), "--seq-len 5"),
        (sampler_of(TEXT, seed=2), "--seed 2"),
    ],
)
def test_a_position_in_other_data_is_refused_unless_allowed(other: BatchSampler, word: str) -> None:
    sampler = sampler_of(TEXT)
    sampler.advance()
    with pytest.raises(MismatchError, match=word):
        sampler.load_state_dict(other.state_dict())
    assert sampler.num_samples == 8
    other.advance()
    other.advance()
    sampler.load_state_dict(other.state_dict(), allow_other=True)
    assert sampler.num_samples == 16


def test_text_shorter_than_a_row_is_refused() -> None:
    assert sampler_of(b"12345", seq_len=4).num_windows == 1
    with pytest.raises(ConfigError, match="--seq-len 5"):
        sampler_of(b"12345", seq_len=5)


def test_files_and_directories_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_bytes(b"bb")
    (tmp_path / "d" / "a.txt").write_bytes(b"a")
    (tmp_path / "d" / "sub" / "c").write_bytes(b"c")
    (tmp_path / "d" / ".hidden").write_bytes(b"no")
    (tmp_path / "d" / "empty").write_bytes(b"")
    (tmp_path / "z.txt").write_bytes(b"z")
    corpus = read_corpus([tmp_path / "z.txt", tmp_path / "d"])
    assert corpus.tokens.tobytes() == b"z\0a\0bb\0c\0"
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "1").write_bytes(b"z")
    (tmp_path / "moved" / "2").write_bytes(b"a\0bb\0c")
    same = read_corpus([tmp_path / "moved"])
    assert same.fingerprint == corpus.fingerprint
    (tmp_path / "z.txt").write_bytes(b"y")
    assert read_corpus([tmp_path / "z.txt", tmp_path / "d"]).fingerprint != corpus.fingerprint


def test_missing_and_empty_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_corpus([tmp_path / "nothing"])
    with pytest.raises(ConfigError, match="--data PATH"):
        read_corpus([tmp_path])


def test_the_default_is_the_standard_library_without_packages() -> None:
    corpus = read_corpus()
    assert corpus.nbytes > 5_000_000
    assert b"class OrderedDict(dict):" in corpus.tokens.tobytes()
    assert b"import pytest\n" not in corpus.tokens.tobytes()

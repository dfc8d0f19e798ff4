"""Rows with and without images, and which of them a step trains on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from holdfast.errors import ConfigError, MismatchError
from holdfast_trainer.models.config import IMAGE_TOKEN
from holdfast_trainer.train import digits as module
from holdfast_trainer.train.digits import Digits, DigitSampler, make_digits, read_digits


@pytest.fixture(scope="module")
def digits() -> Digits:
    return read_digits()


def sampler_of(digits: Digits, *, seed: int = 1, seq_len: int = 40) -> DigitSampler:
    return DigitSampler(digits, seed=seed, seq_len=seq_len, global_batch_size=8, patch_size=2)


def test_every_image_is_trained_on_or_held_out(digits: Digits) -> None:
    images = [row for row in digits.train if row.image is not None]
    assert (len(images), len(digits.held_out)) == (1498, 299)
    seen = {row.image.tobytes() for row in images if row.image is not None}
    held = {row.image.tobytes() for row in digits.held_out if row.image is not None}
    assert not seen & held
    assert {row.answer.split(b",")[0] for row in digits.held_out} == {
        *(b"zero", b"one", b"two", b"three", b"four", b"five", b"six", b"seven"),
        *(b"eight", b"nine"),
    }


def test_rows_show_patches_then_the_prompt_and_train_the_answer(digits: Digits) -> None:
    chosen = [digits.train[0], digits.train[-1], digits.train[1]]
    batch = sampler_of(digits).collate(chosen)
    for number, row in enumerate(chosen):
        count = batch.counts[number]
        ids = [*batch.tokens[number], batch.targets[number][-1]]
        text = row.prompt + row.answer
        assert ids[:count] == [IMAGE_TOKEN] * count
        assert bytes(ids[count : count + len(text)]) == text
        assert not any(ids[count + len(text) :])
        trained = batch.targets[number][batch.weights[number] > 0]
        assert bytes(trained.tolist()) == row.answer
        word = batch.targets[number][batch.words[number]]
        assert bytes(word.tolist()) == row.answer[: row.num_word_bytes]
        assert batch.weights[number].mean() == pytest.approx(1.0)
    assert batch.counts[1] == 0
    assert len(batch.patches) == 2


def test_patches_are_what_has_ink_and_where_it_is(digits: Digits) -> None:
    row = digits.train[3]
    assert row.image is not None
    batch = sampler_of(digits).collate([row])
    drawn = np.zeros((8, 8), dtype=np.float32)
    for patch, (y, x) in zip(batch.patches[0], batch.places[0], strict=True):
        drawn[2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = patch.reshape(2, 2)
    assert np.array_equal(drawn, row.image)
    assert 7 <= batch.counts[0] < 16


def test_shares_are_the_batch_and_batches_have_uneven_images(digits: Digits) -> None:
    sampler = sampler_of(digits)
    whole = sampler.batch()
    shares = [sampler.batch(index=index, num_shares=4) for index in range(4)]
    assert np.array_equal(np.concatenate([share.tokens for share in shares]), whole.tokens)
    assert np.array_equal(np.concatenate([share.counts for share in shares]), whole.counts)
    assert sum(len(share.patches) for share in shares) == len(whole.patches)
    assert len(set(whole.counts)) > 2
    sampler.advance()
    assert not np.array_equal(sampler.batch().tokens, whole.tokens)


def test_a_position_belongs_to_its_rows_and_order(digits: Digits) -> None:
    sampler = sampler_of(digits)
    sampler.advance()
    state = sampler.state_dict()
    again = sampler_of(digits)
    again.load_state_dict(state)
    assert np.array_equal(again.batch().tokens, sampler.batch().tokens)
    with pytest.raises(MismatchError, match="--seed 1"):
        sampler_of(digits, seed=2).load_state_dict(state)
    changed = replace(digits.train[0], answer=b"another.\n")
    other = sampler_of(make_digits([changed, *digits.train[1:]], held_out=digits.held_out))
    with pytest.raises(MismatchError, match="other rows"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_other=True)
    assert other.num_samples == 8


def test_rows_that_are_too_long_are_refused(digits: Digits) -> None:
    with pytest.raises(ConfigError, match="--seq-len 30: the longest row"):
        sampler_of(digits, seq_len=30)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast-trainer\[multimodal\]'"):
        read_digits()

"""A multimodal model under any placement trains like one process."""

from __future__ import annotations

import pytest

from holdfast_trainer.train.digits import DigitSampler
from tests.harness import run_ranks
from trainer.tests.train.multimodal_runs import (
    EXPERTS,
    SGD,
    Seen,
    make_rows,
    train_alone,
    train_together,
)

NUM_STEPS = 4


def compare(num_ranks: int, words: str, *, bound: float = 1e-9) -> list[Seen]:
    """Run both, and find every loss, norm and parameter of every rank equal."""
    digits = make_rows()
    words = f"{SGD} {words}"
    (alone,) = run_ranks(1, train_alone, digits, words, NUM_STEPS, init=False).results
    together = run_ranks(num_ranks, train_together, digits, words, NUM_STEPS).results
    assert alone.losses[0] > alone.losses[-1]
    names: set[str] = set()
    for seen in together:
        assert seen.losses == pytest.approx(alone.losses, abs=bound), words
        assert seen.norms == pytest.approx(alone.norms, abs=bound), words
        names |= set(seen.tensors)
        gaps = {
            name: (value - alone.tensors[name]).abs().max().item()
            for name, value in seen.tensors.items()
        }
        assert {name: gap for name, gap in gaps.items() if not gap <= bound} == {}, words
    assert names == set(alone.tensors)
    return together


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--tp 2", marks=pytest.mark.slow),
        "--vision-tp 2 --language-first --tp 2 --projector-on language",
        pytest.param("--colocated --tp 2", marks=pytest.mark.slow),
        pytest.param(f"--ep 2 {EXPERTS}", marks=pytest.mark.slow),
        pytest.param("--pp 2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_four_ranks_train_like_one_process(words: str) -> None:
    """M1, M12: losses, the norm of all modules and every parameter, under SGD."""
    compare(4, words)


PLACEMENTS = (
    "--cp 2 --cp-attention ring --projector-on language",
    "--pp 2 --pp-schedule gpipe --colocated --vision-tp 2",
    "--pp 2 --pp-schedule zero-bubble --stages-per-rank 2 --num-layers 4",
    f"--colocated --tp 2 --ep 4 --expt-tp 1 {EXPERTS} --zero 2 --micro-batch-size 2",
    f"--vision-tp 2 --ep 2 --expt-tp 1 {EXPERTS} --mixers sa --state-dim 4 --zero 2",
    "--vision-mixers sa --vision-layers 2 --vision-tp 2 --tp 2",
    "--freeze-vision --tp 2",
    "--vision-ranks 3 --global-batch-size 6 --micro-batch-size 2 --projector-on language",
)
MORE_PLACEMENTS = (
    "--cp 2",
    "--tp 2 --language-first",
    "--pp 2 --language-first --projector-on language",
    "--pp 2 --pp-schedule zbv --stages-per-rank 2 --num-layers 4",
    "--pp 2 --pp-schedule interleaved --stages-per-rank 2 --num-layers 4",
    f"--colocated --tp 2 --ep 2 {EXPERTS} --vision-tp 4",
    "--vision-ranks 1 --dp 3 --global-batch-size 6",
)


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, marks=pytest.mark.slow) for words in PLACEMENTS[::2]),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (*PLACEMENTS[1::2], *MORE_PLACEMENTS)
        ),
    ],
)
def test_other_placements_train_like_one_process(words: str) -> None:
    """M1, M7, M9, M12."""
    compare(4, words)


@pytest.mark.slow
def test_ranks_without_any_image_train_like_one_process() -> None:
    """M10, M16: with few images in eight rows many data ranks have none."""
    words = f"{SGD} --colocated --tp 2"
    digits = make_rows(num_images=7, num_texts=14)
    sampler = DigitSampler(digits, seed=1, seq_len=24, global_batch_size=8, patch_size=2)
    num_empty = 0
    for _ in range(NUM_STEPS):
        num_empty += sum(
            not sampler.batch(index=index, num_shares=4).counts.any() for index in range(4)
        )
        sampler.advance()
    assert num_empty > NUM_STEPS
    (alone,) = run_ranks(1, train_alone, digits, words, NUM_STEPS, init=False).results
    for seen in run_ranks(4, train_together, digits, words, NUM_STEPS).results:
        assert seen.losses == pytest.approx(alone.losses, abs=1e-9)
        assert seen.norms == pytest.approx(alone.norms, abs=1e-9)

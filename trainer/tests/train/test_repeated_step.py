"""A step can be computed again after its gradients were dropped, to bitwise the same result."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.parallel import ProcessGroups
from holdfast_trainer.train.base import BaseTrainer
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks
from trainer.tests.train import multimodal_runs
from trainer.tests.train.test_resume import config_of, tensors, text, whole, workplace

__all__ = ["workplace"]

NUM_STEPS = 2
EXPERTS = "--num-layers 2 --feeds de --num-experts 4 --expert-dim 16"
DROPOUT = "--dropout 0.2"
RUNS = (
    (2, f"{DROPOUT} --micro-batch-size 2"),
    (2, f"{DROPOUT} --zero 1 --bucket-nbytes 4000 --micro-batch-size 2"),
    (2, f"{DROPOUT} --zero 2 --bucket-nbytes 4000 --micro-batch-size 2"),
    (2, f"{DROPOUT} --fsdp optim --micro-batch-size 2"),
    (2, f"{DROPOUT} --fsdp optim_grads_params --micro-batch-size 2"),
    (2, f"{DROPOUT} --pp 2 --num-layers 2"),
    (2, f"{DROPOUT} --pp 2 --num-layers 2 --pp-schedule gpipe --zero 1"),
    (2, f"{DROPOUT} --pp 2 --num-layers 4 --pp-schedule interleaved --stages-per-rank 2"),
    (2, f"{DROPOUT} --pp 2 --num-layers 4 --pp-schedule zbv --stages-per-rank 2 --zero 1"),
    (4, f"{DROPOUT} --pp 2 --num-layers 2 --no-tied-head --fsdp optim_grads"),
    (2, f"{EXPERTS} --ep 2 --zero 1 --precision bf16"),
    (2, f"{EXPERTS} --ep 2 --precision fp16"),
    (2, f"{EXPERTS} --ep 2 --fsdp optim_grads_params --precision fp16"),
    (2, "--num-layers 2 --mixers sa --state-dim 4 --tp 2 --zero 2 --precision fp16"),
    (4, "--num-layers 2 --mixers sa --state-dim 4 --cp 2 --zero 1 --precision bf16"),
)

FIRST = (RUNS[0], RUNS[2], RUNS[4], RUNS[7], RUNS[8], RUNS[12], RUNS[14])
"""Each way to reduce, pipelines, experts with a loss scale, and a state space over ranks."""


def generators() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(states: tuple[object, ...]) -> None:
    python, numpy, own = states
    random.setstate(python)  # type: ignore[arg-type]
    np.random.set_state(numpy)  # type: ignore[arg-type]
    assert isinstance(own, Tensor)
    torch.set_rng_state(own)


class Twice:
    """Around a trainer's forward and backward: computes each step `num_times` times."""

    def __init__(self, trainer: BaseTrainer, *, num_times: int) -> None:
        self._once = trainer.forward_backward
        self._trainer = trainer
        self._num_times = num_times
        self.shares: list[list[float]] = []
        """What `gradient_share` gave in each computation, by step."""
        self.losses: list[list[bytes]] = []

    def __call__(self, rows: object) -> Tensor | None:
        before = generators()
        shares, losses = [], []
        for number in range(self._num_times):
            if number:
                self._trainer.drop_gradients()
                restore(before)
                rows = self._trainer.step_rows()
            result = self._once(rows)
            # Reduced before they are dropped in the first computation only: a fault in a loss is
            # seen before reductions are finished, and one in a gradient after.
            if number != 1:
                shares.append(self._trainer.gradient_share())
            losses.append(b"" if result is None else result.numpy().tobytes())
        self.shares.append(shares)
        self.losses.append(losses)
        return result


def run_steps(trainer: BaseTrainer, *, num_times: int) -> Twice:
    computed = Twice(trainer, num_times=num_times)
    trainer.forward_backward = computed  # type: ignore[method-assign]
    for _ in range(NUM_STEPS):
        trainer.train_step()
    return computed


def once_and_again(rank: RankContext, directory: str, words: str) -> None:
    seen = []
    config = config_of(*words.split())
    for num_times in (1, 3):
        with (
            ProcessGroups.create(config.check(world_size=rank.num_ranks)) as groups,
            Trainer(config, groups=groups, corpus=text(directory)) as trainer,
        ):
            computed = run_steps(trainer, num_times=num_times)
            seen.append((tensors(trainer, whole), generators()[2], computed))
    (once, drawn, _), (again, drawn_again, computed) = seen
    for name, value in once.items():
        assert value.numpy().tobytes() == again[name].numpy().tobytes(), name
    assert torch.equal(drawn, drawn_again)  # type: ignore[arg-type]
    for values in (*computed.shares, *computed.losses):
        assert len(set(values)) == 1


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        pytest.param(
            *run, id=run[1], marks=pytest.mark.slow if run in FIRST else pytest.mark.nightly
        )
        for run in RUNS
    ],
)
def test_a_step_that_was_computed_again_changes_no_bit(
    workplace: object, num_ranks: int, words: str
) -> None:
    run_ranks(num_ranks, once_and_again, str(workplace), words)


def multimodal_once_and_again(rank: RankContext, words: str) -> None:
    seen = []
    config = multimodal_runs.config_of(words)
    for num_times in (1, 3):
        with multimodal_runs.open_run(
            config, multimodal_runs.make_rows(), rank.num_ranks
        ) as trainer:
            computed = run_steps(trainer, num_times=num_times)
            seen.append((multimodal_runs.whole_parameters(trainer), computed))
    (once, _), (again, computed) = seen
    for name, value in once.items():
        assert value.numpy().tobytes() == again[name].numpy().tobytes(), name
    for values in (*computed.shares, *computed.losses):
        assert len(set(values)) == 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("--colocated", marks=pytest.mark.slow),
        pytest.param("--vision-tp 1 --zero 2", marks=pytest.mark.slow),
        "--colocated --precision fp16",
    ],
)
def test_a_step_of_several_modules_can_be_computed_again(words: str) -> None:
    run_ranks(2, multimodal_once_and_again, words)


@pytest.mark.parametrize(
    "words",
    [
        *("--zero 1", "--precision fp16 --tp 2"),
        *(pytest.param(words, marks=pytest.mark.slow) for words in ("", "--fsdp optim")),
    ],
)
def test_the_squares_of_all_shares_are_that_of_the_norm(workplace: object, words: str) -> None:
    results = run_ranks(2, shares_and_norm, str(workplace), words).results
    norm = results[0][1]
    assert sum(share**2 for share, _ in results) == pytest.approx(norm**2, rel=1e-12)


def shares_and_norm(rank: RankContext, directory: str, words: str) -> tuple[float, float]:
    config = config_of(*words.split())
    with (
        ProcessGroups.create(config.check(world_size=rank.num_ranks)) as groups,
        Trainer(config, groups=groups, corpus=text(directory)) as trainer,
    ):
        computed = Twice(trainer, num_times=1)
        trainer.forward_backward = computed  # type: ignore[method-assign]
        norm = trainer.train_step().grad_norm
        return computed.shares[0][0], norm

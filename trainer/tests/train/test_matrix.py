"""What one layout saved, another loads: bitwise, and training continues the same.

Layouts stand in rings, in which each loads what its neighbours saved. A fingerprint knows nothing
of sharding, so one comparison with the fingerprints that the save had is the proof of a load. That
any pair of placements fits together is proved without processes, in the property tests of plans
and read plans.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast import Checkpointer
from holdfast.format.manifest import Manifest
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.parallel import Layout, ProcessGroups
from holdfast.storage import PosixStorage
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks

SAVED_AT = 2
MODEL = (
    "--num-layers 4 --mixers sa --feeds de --model-dim 32 --num-heads 4 --num-experts 4 "
    "--expert-dim 16 --state-dim 4 --seq-len 16 --global-batch-size 8 --lr 1e-2 --steps 8 "
    "--optimizer adamw --deterministic"
)
LAYOUTS = (
    (1, ""),
    (2, "--tp 2"),
    (2, "--pp 2"),
    (4, "--tp 2 --ep 2"),
    (4, "--cp 2 --ep 2 --expt-tp 1"),
    (4, "--pp 2 --ep 2 --pp-schedule interleaved --stages-per-rank 2"),
    (4, "--pp 2 --tp 2 --stage-layers 3 1"),
    (8, "--tp 2 --cp 2 --pp 2 --ep 2 --zero 1 --bucket-nbytes 20000"),
    (8, "--ep 4 --order dp-ep-tp-cp-pp --zero 2 --bucket-nbytes 3000"),
    (4, "--pp 2 --ep 2 --zero 1 --bucket-nbytes 5000"),
    (2, "--zero 1"),
)
LOSS_BOUND = 1e-5
"""Rounding of two float32 steps, the experts' discrete choices included."""


STRIDES = (1,)
"""How far apart in the list are those who save and who load: each layout does both."""
MORE_STRIDES = (1, 2, 3, 4, 5)
FEW = tuple(LAYOUTS[number] for number in (0, 5, 3, 9, 7, 8))
"""With stages that alternate, experts, and sharded optimizers; an axis alone is nightly."""


def rings(num_layouts: int, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs of the saving and the loading layout, by number."""
    strides = tuple({stride % num_layouts or 1 for stride in strides})
    return [((i - stride) % num_layouts, i) for stride in strides for i in range(num_layouts)]


def config_of(words: str) -> TrainConfig:
    return parse([*MODEL.split(), *words.split()])


def loads(
    rank: RankContext,
    directory: str,
    layouts: tuple[tuple[int, str], ...],
    strides: tuple[int, ...],
    timeout_s: float,
) -> dict[tuple[int, int], tuple[float, float]]:
    """Save under each layout; load in rings, save what was loaded, train a step.

    Returns loss and gradient norm of the step after each save and each load, by the number of the
    saving and the loading layout, of those that this rank took part in.
    """
    corpus = read_corpus([Path(directory) / "text"])
    control = dist.new_group(list(range(rank.num_ranks)))
    losses = {}
    trainers: dict[int, tuple[ProcessGroups, TrainConfig]] = {}
    for number, (num_ranks, words) in enumerate(layouts):
        if rank.rank < num_ranks:
            config = config_of(words)
            layout = config.check(world_size=num_ranks).to_dict()
            # Ranks meet by name, and not all of them take part in every layout.
            # Ranks of few layouts wait for those of many.
            groups = ProcessGroups.create(
                Layout.from_dict({**layout, "name": f"{number}"}), timeout_s=timeout_s
            )
            trainers[number] = groups, config
            with Trainer(config, groups=groups, corpus=corpus) as trainer:
                for _ in range(SAVED_AT):
                    trainer.train_step()
                save(trainer, groups, f"{directory}/{number}")
                metrics = trainer.train_step()
                losses[number, number] = (metrics.loss, metrics.grad_norm)
    dist.barrier(group=control)
    for saved, number in rings(len(layouts), strides):
        if number in trainers:
            groups, config = trainers[number]
            with Trainer(config, groups=groups, corpus=corpus) as trainer:
                state = trainer.state()
                del state["rng"]
                with Checkpointer(f"{directory}/{saved}", groups=groups) as checkpointer:
                    checkpointer.load(state)
                trainer.schedule.apply()
                save(trainer, groups, f"{directory}/{saved}-{number}")
                metrics = trainer.train_step()
                losses[saved, number] = (metrics.loss, metrics.grad_norm)
    for groups, _ in trainers.values():
        groups.close()
    return losses


def save(trainer: Trainer, groups: ProcessGroups, directory: str) -> None:
    state = trainer.state()
    del state["rng"]
    with Checkpointer(directory, groups=groups, fingerprints=True) as checkpointer:
        checkpointer.save(trainer.progress.step, state)


def manifest(directory: Path) -> Manifest:
    with Snapshot.open(PosixStorage(directory), step_dir(SAVED_AT)) as snapshot:
        return snapshot.manifest


def tensors(found: Manifest) -> dict[str, tuple[str, tuple[int, ...], str | None]]:
    """Dtype, shape and fingerprint of every tensor; the fingerprint knows nothing of sharding."""
    return {info.key: (info.dtype, tuple(info.shape), info.fingerprint) for info in found.tensors}


def check(
    tmp_path: Path,
    layouts: tuple[tuple[int, str], ...],
    *,
    strides: tuple[int, ...] = STRIDES,
    timeout_s: float,
) -> None:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope", "storm"], k=4000)
    (tmp_path / "text").write_text(" ".join(words))
    num_ranks = max(count for count, _ in layouts)
    arguments = (str(tmp_path), layouts, strides, timeout_s)
    results = run_ranks(num_ranks, loads, *arguments, timeout_s=timeout_s).results
    for saved, number in rings(len(layouts), strides):
        original = manifest(tmp_path / f"{saved}")
        again = manifest(tmp_path / f"{saved}-{number}")
        expected = tensors(original)
        assert len(expected) > 50
        assert all(mark is not None for _, _, mark in expected.values())
        assert tensors(again) == expected, f"{layouts[saved]} under {layouts[number]}"
        for part in ("scheduler", "progress"):
            assert again.parts[part] == original.parts[part]
    everywhere = {pair: losses for found in results for pair, losses in found.items()}
    expected_pairs = {*rings(len(layouts), strides), *((i, i) for i in range(len(layouts)))}
    assert everywhere.keys() == expected_pairs
    for found in results:
        for pair, losses in found.items():
            assert losses == everywhere[pair], "ranks of one run report the same"
    for (saved, number), losses in everywhere.items():
        for ours, theirs in zip(losses, everywhere[saved, saved], strict=True):
            assert abs(ours - theirs) < LOSS_BOUND * theirs, (layouts[saved], layouts[number])


@pytest.mark.slow
def test_layouts_load_what_others_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(tmp_path, FEW, timeout_s=280)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_layout_loads_what_many_others_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(tmp_path, LAYOUTS, strides=MORE_STRIDES, timeout_s=800)

"""The reference trainer under any order of ranks (G3), and eight ranks that resume (E15)."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.parallel import ProcessGroups
from holdfast.storage import PosixStorage
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks

WORDS = (
    "--num-layers 2 --model-dim 16 --num-heads 4 --seq-len 8 --global-batch-size 8 "
    "--warmup-steps 3 --lr 1e-2 --steps 20 --deterministic --dropout 0.1"
)
ORDERS = ("tp-cp-ep-dp-pp", "tp-pp-dp", "pp-dp-tp")
SIZES = ("--tp 2", "--pp 2")
SAVED_AT = 3
NUM_MORE = 2


def config_of(*words: str) -> TrainConfig:
    return parse([*WORDS.split(), *(part for word in words for part in word.split())])


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope", "storm"], k=2000)
    (tmp_path / "text").write_text(" ".join(words))
    return tmp_path


def ordered(context: RankContext, directory: str) -> dict[str, list[float]]:
    """Each half of eight ranks trains each layout: the upper half starts at rank 4."""
    half = context.rank // 4
    corpus = read_corpus([Path(directory) / "text"])
    found = {}
    for sizes in SIZES:
        for order in ORDERS:
            if half == 0 and order != ORDERS[0]:
                continue
            config = config_of(sizes, "--order", order)
            layout = dataclasses.replace(
                config.check(world_size=4), ranks=range(4 * half, 4 * half + 4), name=f"half{half}"
            )
            with (
                ProcessGroups.create(layout) as groups,
                Trainer(config, groups=groups, corpus=corpus) as trainer,
            ):
                steps = [trainer.train_step() for _ in range(SAVED_AT)]
                place = f"{directory}/{sizes}/{half} {order}"
                with Checkpointer(place, groups=groups, fingerprints=True) as checkpointer:
                    checkpointer.save(SAVED_AT, trainer.state())
                found[f"{sizes} {half} {order}"] = [
                    number for step in steps for number in (step.loss, step.grad_norm)
                ]
    return found


def content(root: Path) -> dict[str, object]:
    """Every tensor by key, dtype, shape and fingerprint, and the values of the run."""
    with Snapshot.open(PosixStorage(root), step_dir(SAVED_AT)) as snapshot:
        manifest = snapshot.manifest
    tensors = {i.key: (i.dtype, tuple(i.shape), i.fingerprint) for i in manifest.tensors}
    assert all(mark is not None for *_, mark in tensors.values())
    return {**tensors, **{part: manifest.parts[part] for part in ("scheduler", "progress")}}


@pytest.mark.slow
def test_orders_and_spans_change_neither_losses_nor_checkpoints(workplace: Path) -> None:
    """G3: three orders on ranks 4 to 7, beside the default order on ranks 0 to 3."""
    results = run_ranks(8, ordered, str(workplace), timeout_s=280).results
    for sizes in SIZES:
        first = f"{sizes} 0 {ORDERS[0]}"
        for order in ORDERS:
            for rank in range(4, 8):
                assert results[rank][f"{sizes} 1 {order}"] == results[0][first], order
        whole = content(workplace / sizes / f"0 {ORDERS[0]}")
        assert len(whole) > 20
        for order in ORDERS:
            found = content(workplace / sizes / f"1 {order}")
            assert found.keys() == whole.keys()
            for key, value in whole.items():
                assert found[key] == value, (order, key)


LAYOUT = ("--tp 2 --pp 2",)
OTHERS = (("--tp 4",), ("--pp 2 --cp 2",))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(
    context: RankContext, directory: str, resumes: bool
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train to step 3, save, and two steps on; or load, and the same two steps."""
    where = "--load" if resumes else "--save"
    config = config_of(*LAYOUT, where, f"{directory}/run")
    corpus = read_corpus([Path(directory) / "text"])
    with (
        ProcessGroups.create(config.check(world_size=8)) as groups,
        Trainer(config, groups=groups, corpus=corpus) as trainer,
    ):
        if resumes:
            trainer.resume()
        else:
            for _ in range(SAVED_AT):
                trainer.train_step()
            trainer.save()
        assert trainer.progress.step == SAVED_AT
        metrics = [trainer.train_step() for _ in range(NUM_MORE)]
        numbers = [n for m in metrics for n in (m.loss, m.grad_norm, m.lr)]
        weights = {name: local(p) for name, p in trainer.model.module.named_parameters()}
        return numbers, weights, [random.random(), torch.rand(()).item()]


def reload(context: RankContext, directory: str) -> None:
    """Load under other layouts, and save again with fingerprints, which know no layout."""
    corpus = read_corpus([Path(directory) / "text"])
    for number, words in enumerate((LAYOUT, *OTHERS)):
        config = config_of(*words)
        with (
            ProcessGroups.create(config.check(world_size=8)) as groups,
            Trainer(config, groups=groups, corpus=corpus) as trainer,
        ):
            state = trainer.state()
            del state["rng"]
            Checkpointer(f"{directory}/run", groups=groups).load(state, step=SAVED_AT)
            with Checkpointer(
                f"{directory}/{number}", groups=groups, fingerprints=True
            ) as checkpointer:
                checkpointer.save(SAVED_AT, state)


@pytest.mark.slow
def test_eight_ranks_go_on_bitwise_and_load_under_other_layouts(workplace: Path) -> None:
    """E15."""
    first = run_ranks(8, run, str(workplace), False, timeout_s=200).results
    second = run_ranks(8, run, str(workplace), True, timeout_s=200).results
    for ours, theirs in zip(first, second, strict=True):
        assert theirs[0] == ours[0]
        assert theirs[2] == ours[2]
        assert theirs[1].keys() == ours[1].keys()
        for name, value in ours[1].items():
            assert torch.equal(theirs[1][name], value), name
    run_ranks(8, reload, str(workplace), timeout_s=250)
    whole = content(workplace / "0")
    for number in range(1, 1 + len(OTHERS)):
        assert content(workplace / f"{number}") == whole, OTHERS[number - 1]

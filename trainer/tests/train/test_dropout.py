"""Dropout under another layout than the one saved: replicated weights stay replicated (O6)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast import RNG, Checkpointer, LoadReport
from holdfast.errors import PlanError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.command import parse
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks

MODEL = (
    "--num-layers 1 --model-dim 32 --num-heads 4 --seq-len 16 --global-batch-size 4 --lr 1e-2 "
    "--steps 90 --dropout 0.3 --deterministic "
)
EXPERTS = MODEL + "--feeds e --num-experts 4 --expert-dim 16 "


def chain(
    rank: RankContext, directory: str, model: str, legs: tuple[tuple[int, str], ...]
) -> dict[int, tuple[float, str, str]]:
    """Train a step under each layout in turn, each from what the one before saved."""
    corpus = read_corpus([Path(directory) / "text"])
    everyone = dist.new_group(list(range(rank.num_ranks)))
    seen = {}
    for number, (num_ranks, words) in enumerate(legs):
        if rank.rank < num_ranks:
            config = parse([*model.split(), *words.split()])
            fields = config.check(world_size=num_ranks).to_dict()
            layout = Layout.from_dict({**fields, "name": f"{number}"})
            with (
                ProcessGroups.create(layout) as groups,
                Trainer(config, groups=groups, corpus=corpus) as trainer,
                Checkpointer(f"{directory}/checkpoints", groups=groups) as checkpointer,
            ):
                report = LoadReport(step=0, path="")
                if number:
                    report = checkpointer.load(trainer.state(), step=number)
                    trainer.schedule.apply()
                loss = trainer.train_step().loss
                trainer.update.synchronize()
                checkpointer.save(trainer.progress.step, trainer.state(), check_replicas=True)
                assert trainer.progress.step == number + 1
                kept, dropped = ",".join(report.kept), ",".join(report.dropped)
                seen[number] = loss, kept, dropped
        dist.barrier(group=everyone)
    return seen


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope", "storm"], k=2000)
    (tmp_path / "text").write_text(" ".join(words))
    return tmp_path


@pytest.mark.parametrize(
    ("model", "legs"),
    [
        (MODEL, ((1, ""), (2, "--tp 2"), (4, "--tp 4"), (4, "--tp 2"), (1, ""))),
        pytest.param(
            EXPERTS,
            ((1, ""), (2, "--ep 2"), (4, "--tp 2 --ep 2"), (4, "--tp 2 --cp 2")),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            EXPERTS,
            ((2, "--cp 2"), (4, "--cp 2 --tp 2 --expt-tp 1 --ep 2"), (4, "--tp 4 --zero 1")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tensor", "experts", "context"],
)
@pytest.mark.slow
def test_replicas_stay_equal_under_more_tensor_ranks(
    workplace: Path, model: str, legs: tuple[tuple[int, str], ...]
) -> None:
    """(10): each save compares the bytes of all replicas, and would raise PlanError."""
    most = max(count for count, _ in legs)
    results = run_ranks(most, chain, str(workplace), model, legs, timeout_s=200).results
    for seen in results:
        for leg, (loss, _, _) in seen.items():
            assert loss == results[0][leg][0]
    if legs[1][1] == "--tp 2":
        # Nothing stays fresh, as long as only tp changes; the fourth leg has a second data rank.
        assert [results[1][leg][1] for leg in (1, 2)] == ["", ""]
        assert results[3][3][1] == "rng[cp=0,dp=1,pp=0]"
        assert results[0][4][2] == "rng[cp=0,dp=1,pp=0]"


def drift(rank: RankContext, directory: str) -> str:
    """What comes of streams that tensor ranks do not share."""
    corpus = read_corpus([Path(directory) / "text"])
    config = parse([*MODEL.split(), "--tp", "2"])
    with (
        ProcessGroups.create(config.check(world_size=2)) as groups,
        Trainer(config, groups=groups, corpus=corpus) as trainer,
        Checkpointer(f"{directory}/checkpoints", groups=groups) as checkpointer,
    ):
        torch.manual_seed(rank.rank)
        with pytest.raises(PlanError) as stopped:
            checkpointer.save(1, {"rng": trainer.state()["rng"]})
        trainer.train_step()
        state = {**trainer.state(), "rng": RNG()}
        with pytest.raises(PlanError):
            checkpointer.save(2, state, check_replicas=True)
        return str(stopped.value)


def test_the_comparison_of_replicas_would_see_a_drift(workplace: Path) -> None:
    for said in run_ranks(2, drift, str(workplace)).results:
        assert "rng[cp=0,dp=0,pp=0].torch" in said

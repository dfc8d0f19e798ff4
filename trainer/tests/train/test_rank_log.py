"""What each rank logs of its saves and loads next to the checkpoints."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.command import parse
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks

WORDS = "--num-layers 1 --model-dim 16 --num-heads 2 --seq-len 8 --global-batch-size 4 "
WORDS += "--save-interval 1"


def train(context: RankContext, directory: str, *words: str) -> None:
    config = parse([*WORDS.split(), *words, "--data", f"{directory}/text"])
    layout = Layout(tp=2) if context.num_ranks == 2 else Layout()
    with ProcessGroups.create(layout, backend="gloo") as groups:
        corpus = read_corpus(config.data.data)
        with Trainer(config, groups=groups, corpus=corpus) as trainer:
            trainer.run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope"], k=2000)
    (tmp_path / "text").write_text(" ".join(words))
    return tmp_path


def test_every_rank_logs_its_saves_and_loads(workplace: Path) -> None:
    """Phases of both kinds of saves; of a load the bytes of each file, which add up."""
    run = str(workplace / "run")
    outcome = run_ranks(2, train, str(workplace), "--save", run, "--steps", "2")
    assert not outcome.failed
    more = ("--save", run, "--load", run, "--steps", "3", "--async-save")
    run_ranks(2, train, str(workplace), *more)
    for rank in range(2):
        events = lines(Path(run) / "events" / f"{rank:05d}.jsonl")
        kinds = [(event["event"], event["step"]) for event in events]
        assert kinds == [("save", 1), ("save", 2), ("load", 2), ("save", 3)]
        assert {event["rank"] for event in events} == {rank}
        assert {event["axes"]["tp"] for event in events} == {2}
        assert {"stage", "write", "commit", "total"} <= events[0]["phases"].keys()
        assert "stall" in events[3]["phases"]
        load = events[2]
        assert sum(load["nbytes_by_file"].values()) == load["nbytes_read"] > 0
        assert set(load["nbytes_by_file"]) <= {f"data/{n:05d}.safetensors" for n in range(2)}
        assert load["num_opens"] == len(load["nbytes_by_file"])


def test_nothing_is_logged_unasked(workplace: Path) -> None:
    """Without the option, or without its own directory, and for the library alone."""
    run = workplace / "run"
    run_ranks(2, train, str(workplace), "--save", str(run), "--steps", "1", "--no-rank-log")
    assert (run / "iter_0000001").is_dir()
    assert not (run / "events").exists()

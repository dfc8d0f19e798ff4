"""What is reported of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.errors import StorageError
from holdfast_trainer.train.config import LogConfig
from holdfast_trainer.train.metrics import Reporter, StepMetrics, readable_nbytes


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=2.5,
        lr=1e-3,
        weight_decay=0.1,
        grad_norm=0.75,
        num_tokens=1000,
        seconds=0.5,
    )


def test_every_step_is_a_json_line_and_some_are_shown(tmp_path: Path) -> None:
    said = io.StringIO()
    path = tmp_path / "new" / "events.jsonl"
    for steps in (range(1, 4), range(4, 8)):
        console = Console(file=said, highlight=False, soft_wrap=True)
        reporter = Reporter(LogConfig(log_interval=3, jsonl=path), num_steps=7, console=console)
        with reporter:
            for step in steps:
                reporter.step(metrics(step))
                # Readable at once: the file of a killed run ends with its last step.
                assert json.loads(path.read_text().splitlines()[-1])["step"] == step
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5, 6, 7]
    assert {event["event"] for event in events} == {"step"}
    assert (events[0]["loss"], events[0]["grad_norm"]) == (2.5, 0.75)
    assert events[0]["tokens_per_s"] == 2000
    lines = said.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    for word in ("loss 2.5000", "lr 1.00e-03", "norm 0.750", "tokens/s   2,000"):
        assert word in lines[0]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--jsonl"):
        Reporter(LogConfig(jsonl=tmp_path / "file" / "events.jsonl"), num_steps=1)


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = LogConfig(tensorboard=tmp_path / "tb")
    with Reporter(log, num_steps=1, console=Console(file=io.StringIO())) as reporter:
        reporter.step(metrics(1))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.5)]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5 TB")]
)
def test_bytes_are_readable(nbytes: float, text: str) -> None:
    assert readable_nbytes(nbytes) == text

"""Faults in the reference trainer: each gets its verdict, and no bit of the training changes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from holdfast.arrays.boxes import Box
from holdfast.cli.main import main as holdfast
from holdfast.errors import ConfigError, DriftError
from holdfast.format.names import list_steps, step_dir
from holdfast.format.reader import Snapshot
from holdfast.optim import LossScaler
from holdfast.parallel import ProcessGroups
from holdfast.rerun import ErrorInjector, read_report
from holdfast.rerun.injection import point_of
from holdfast.rerun.journal import Journal
from holdfast.storage import PosixStorage
from holdfast_trainer.command import main, parse
from holdfast_trainer.train.config import CheckpointConfig, LogConfig
from holdfast_trainer.train.loop import Trainer
from holdfast_trainer.train.metrics import Reporter
from holdfast_trainer.train.rerun import RerunExit
from holdfast_trainer.train.resume import (
    checkpoint_to_load,
    fault_checkpoints,
    step_to_load,
)
from tests.harness import RankContext, run_ranks
from trainer.tests.launches import LAUNCHED
from trainer.tests.train import multimodal_runs
from trainer.tests.train.test_resume import config_of, tensors, text, whole, workplace

__all__ = ["workplace"]

STEPS = 6
AT = 4
"""The step with the fault."""
VALIDATE = "--rerun-mode validate_results"
EXPERTS = "--num-layers 2 --feeds de --num-experts 4 --expert-dim 16"
DROPOUT = "--dropout 0.2"
LAYOUTS = (
    (2, f"{DROPOUT} --micro-batch-size 2"),
    (2, f"{DROPOUT} --zero 2 --bucket-nbytes 4000 --async-save --save-interval 1"),
    (2, f"{DROPOUT} --fsdp optim_grads_params --save-interval 1"),
    (2, f"{DROPOUT} --pp 2 --num-layers 4 --pp-schedule interleaved --stages-per-rank 2 --zero 1"),
    (2, f"{EXPERTS} --ep 2 --zero 1 --precision bf16 --async-save"),
    (2, "--num-layers 2 --mixers sa --state-dim 4 --tp 2 --precision bf16"),
)


def injection(kind: str, points: list[str], *, hits: str) -> tuple[str, str]:
    """A seed, and flags that with it spoil an activation at one point and none of the others."""
    rate = len(points)
    for seed in range(1, 10_000):
        injector = ErrorInjector(rate, seed=seed)
        if [point for point in points if injector.is_hit(point)] == [hits]:
            flags = f"--error-injection-rate {rate} --error-injection-type {kind}"
            return f"--seed {seed}", f"{VALIDATE} {flags}"
    raise AssertionError(f"no seed hits {hits} alone")


def points_of(num_ranks: int, axis: str) -> list[str]:
    """Each step on each rank of a layout of one axis, see `point_of`."""
    ranks = [
        ",".join(f"{name}={rank if name == axis else 0}" for name in ("cp", "dp", "pp", "tp"))
        for rank in range(num_ranks)
    ]
    return [point_of(step, rank) for step in range(1, STEPS + 1) for rank in ranks]


def bad_activation(kind: str, words: str, *, num_ranks: int = 2) -> tuple[str, str]:
    """Seed and flags for a spoiled activation at step `AT` on the last rank."""
    axis = next((name for name in ("tp", "pp") if f"--{name} 2" in words), "dp")
    points = points_of(num_ranks, axis)
    (hit,) = [p for p in points if p.startswith(point_of(AT, ""))][-1:]
    return injection(kind, points, hits=hit)


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Name this rank's device; without a trace, for the next job of a live rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_DEVICE", name)
        yield


def run_once(directory: str, words: str, device: str) -> tuple[int, dict[str, Tensor]]:
    """One start of a run: its exit code, and whole parameters and moments at its end.

    Args:
        directory: with the text to train on.
        words: options.
        device: of every rank, or a letter for each of several.
    """
    own = device[dist.get_rank() % len(device)]
    config = config_of("--steps", str(STEPS), *words.split())
    with (
        on_device(own),
        ProcessGroups.create(config.check(world_size=dist.get_world_size())) as groups,
        Trainer(config, groups=groups, corpus=text(directory)) as trainer,
    ):
        try:
            trainer.run()
        except RerunExit as end:
            return end.exit_code, {}
        return 0, tensors(trainer, whole)


def starts(
    rank: RankContext, directory: str, words: str, kind: str, devices: tuple[str, ...]
) -> tuple[list[int], bool]:
    """Exit codes of starts on these devices, and whether the last is as if nothing had been."""
    save = f"{directory}/ck"
    seed, flags = bad_activation(kind, words)
    words = f"--save-interval 2 {words} {seed}"
    _, expected = run_once(directory, f"{words} --save {directory}/good", "a")
    faulty = f"{words} {flags} --save {save} --load {save}"
    codes, last = [], {}
    for device in devices:
        code, last = run_once(directory, faulty, device)
        codes.append(code)
    is_same = last.keys() == expected.keys() and all(
        last[name].numpy().tobytes() == value.numpy().tobytes() for name, value in expected.items()
    )
    return codes, is_same


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        # The verdict of data ranks, of ZeRO and of tensor ranks is in the tests below, too.
        pytest.param(*each, id=each[1], marks=pytest.mark.slow)
        for each in LAYOUTS
    ],
)
def test_a_broken_device_is_named_and_training_goes_on_bitwise(
    workplace: Path, num_ranks: int, words: str
) -> None:
    results = run_ranks(
        num_ranks, starts, str(workplace), words, "persistent_error", ("a", "b", "b")
    ).results
    assert results == [([16, 18, 0], True)] * num_ranks
    verdicts = [each for each in read_report(workplace / "ck/rerun") if each["event"] == "verdict"]
    (verdict,) = verdicts
    assert verdict["verdict"] == "persistent_error"
    assert verdict["step"] == AT
    assert len(verdict["devices"]) == 1
    assert [each["device"] for each in verdict["convicted"]] == ["a"]


@pytest.mark.parametrize(
    ("kind", "devices", "codes"),
    [
        pytest.param("transient_error", "aa", [17, 0], marks=pytest.mark.slow),
        pytest.param("correct_result", "abb", [16, 19, 0], marks=pytest.mark.slow),
        # The scheduler gives the same device each time: an end after so many starts.
        ("persistent_error --rerun-max-restarts 2", "aaaa", [16, 16, 20, 0]),
    ],
)
def test_each_kind_of_fault_has_its_exit_code(
    workplace: Path, kind: str, devices: str, codes: list[int]
) -> None:
    results = run_ranks(2, starts, str(workplace), "--zero 1", kind, tuple(devices)).results
    assert results == [(codes, True)] * 2
    left = fault_checkpoints(workplace / "ck")
    # A transient error leaves nothing behind; others leave the state at the start of the step.
    assert left.exists() == (kind != "transient_error")
    if left.exists():
        assert list_steps(PosixStorage(left)) == [AT - 1]


@pytest.mark.parametrize(
    ("kind", "code", "convicted", "words"),
    [
        pytest.param("persistent_error", 18, ["b"], DROPOUT, marks=pytest.mark.slow),
        ("correct_result", 19, [], "--zero 1 --precision bf16"),
    ],
)
def test_another_data_replica_tells_without_a_restart(
    workplace: Path, kind: str, code: int, convicted: list[str], words: str
) -> None:
    """On devices of its own; the next start continues from the state before the step."""
    results = run_ranks(2, starts, str(workplace), words, kind, ("ab", "ac")).results
    assert results == [([code, 0], True)] * 2
    events = read_report(workplace / "ck/rerun")
    (verdict,) = [each for each in events if each["event"] == "verdict"]
    assert (verdict["verdict"], verdict["step"]) == (kind, AT)
    assert [each["device"] for each in verdict["convicted"]] == convicted
    assert "second_opinion" in [each["event"] for each in events]
    # It was in an activation: the reduced gradients of both ranks are bad, and all ranks feed them.
    calls = [(each["rank"], each["call"]) for each in events[0]["values"]]
    assert {(0, "gradient"), (1, "gradient"), (1, "loss")} == set(calls)
    assert {each["verdict"] for each in verdict["values"]} == {kind}


@pytest.mark.parametrize(
    "words",
    [pytest.param("--pp 2 --num-layers 2", marks=pytest.mark.slow), "--tp 2 --num-layers 1"],
)
@pytest.mark.slow
def test_a_device_is_convicted_only_once_the_others_are_cleared(
    workplace: Path, words: str
) -> None:
    """The same devices in another order were good, which clears neither in its first role."""
    devices = ("ab", "ba", "ac", "ac")
    results = run_ranks(2, starts, str(workplace), words, "persistent_error", devices).results
    assert results == [([16, 16, 18, 0], True)] * 2
    (verdict,) = [e for e in read_report(workplace / "ck/rerun") if e["event"] == "verdict"]
    assert [each["device"] for each in verdict["convicted"]] == ["b"]


def multimodal_starts(rank: RankContext, directory: str, words: str) -> tuple[list[int], bool]:
    """Exit codes of three starts with a persistent error, and whether the end is as without."""
    save = f"{directory}/ck"
    points = points_of(rank.num_ranks, "dp")
    hit = next(p for p in points if p.startswith(point_of(AT, "")))
    seed, flags = injection("persistent_error", points, hits=hit)
    words = f"{words} {seed}"
    faulty = f"{words} {flags} --save {save} --load {save}"
    codes, seen = [], []
    for device, chosen in (("a", words), ("a", faulty), ("b", faulty), ("b", faulty)):
        config = multimodal_runs.config_of(f"{chosen} --steps {STEPS}")
        rows = multimodal_runs.make_rows()
        with (
            on_device(device),
            multimodal_runs.open_run(config, rows, rank.num_ranks) as trainer,
        ):
            try:
                trainer.run()
                codes.append(0)
            except RerunExit as end:
                codes.append(end.exit_code)
            seen.append(multimodal_runs.whole_parameters(trainer))
    same = [torch.equal(value, seen[-1][name]) for name, value in seen[0].items()]
    return codes, all(same)


@pytest.mark.parametrize(
    "words", [pytest.param(f"--colocated {DROPOUT}", marks=pytest.mark.slow), "--zero 2"]
)
def test_a_model_of_several_modules_goes_on_bitwise(tmp_path: Path, words: str) -> None:
    results = run_ranks(2, multimodal_starts, str(tmp_path), words).results
    assert results == [([0, 16, 18, 0], True)] * 2


# ---- one process ----


def drifting(rank: RankContext, directory: str, words: str) -> tuple[str, str, bool]:
    """A bit of one rank flips; what its save raises, the notes, and whether a restart mends it."""
    batch = "--global-batch-size 6 --check-replicas-every 1 --save-interval 2"
    _, expected = run_once(directory, f"{batch} {words} --save {directory}/good", "a")
    words = f"{batch} {words} --save {directory}/ck"
    config = config_of("--steps", str(STEPS), *words.split())
    notes, first = StringIO(), rank.rank == 0
    console = Console(file=notes, width=1000)
    with (
        on_device(f"gpu{rank.rank}"),
        ProcessGroups.create(config.check(world_size=dist.get_world_size())) as groups,
        Trainer(
            config,
            groups=groups,
            corpus=text(directory),
            reporter=Reporter(LogConfig(), num_steps=STEPS, console=console) if first else None,
        ) as trainer,
    ):
        after_step = trainer.after_step

        def flip(step: int) -> None:
            after_step(step)
            if (step, rank.rank) == (AT, 1):
                weight = next(iter(trainer.model.module.parameters()))
                weight.detach().view(torch.int32).view(-1)[7] ^= 1

        trainer.after_step = flip  # type: ignore[method-assign]
        with pytest.raises(DriftError) as stopped:
            trainer.run()
    _, last = run_once(directory, f"{words} --load {directory}/ck", "a")
    is_same = last.keys() == expected.keys() and all(
        last[name].numpy().tobytes() == value.numpy().tobytes() for name, value in expected.items()
    )
    return str(stopped.value), notes.getvalue(), is_same


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(VALIDATE, marks=pytest.mark.slow),
        pytest.param(f"--async-save {DROPOUT}", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_whose_replicas_drift_is_named_with_its_device(workplace: Path, words: str) -> None:
    """Wrong but finite values: the save fails, and the checkpoint before brings back the run."""
    for message, notes, is_same in run_ranks(3, drifting, str(workplace), words).results:
        assert "odd ones by majority: [1]" in message
        assert ("gpu1) holds other bytes" in notes) == ("saved step" in notes)
        assert is_same
    events = [each for each in read_report(workplace / "ck/rerun") if each["event"] == "drift"]
    (event,) = events
    assert [(each["rank"], each["device"]) for each in event["values"]] == [(1, "gpu1")]


@pytest.fixture
def alone(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*LAUNCHED, "HOLDFAST_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(workplace)
    return workplace


def train(words: str, *, save_interval: int = 1) -> int:
    small = "--num-layers 1 --model-dim 16 --num-heads 2 --seq-len 16 --global-batch-size 4"
    return main(
        [
            *(*small.split(), *words.split(), "--data", "text", "--device", "cpu"),
            *("--steps", str(STEPS), "--save-interval", str(save_interval)),
        ]
    )


def one_bad_loss(kind: str) -> str:
    points = points_of(1, "dp")
    return " ".join(injection(kind, points, hits=points[AT - 1]))


def stored(directory: Path, step: int) -> dict[str, bytes]:
    """The bytes of every tensor of parameters and moments."""
    values = {}
    with Snapshot.open(PosixStorage(directory), step_dir(step)) as snapshot:
        for info in snapshot.manifest.tensors:
            if info.key.startswith(("model", "optimizer")):
                box = Box((0,) * len(info.shape), tuple(info.shape))
                out = bytearray(4 * box.numel)
                snapshot.read_box(info.key, box, memoryview(out))
                values[info.key] = bytes(out)
    return values


def position(directory: Path) -> object:
    """Finished steps and consumed rows at the end of a run."""
    with Snapshot.open(PosixStorage(directory), step_dir(STEPS)) as snapshot:
        return snapshot.read_values("progress")


def test_a_fault_checkpoint_leaves_the_good_one_of_its_step_alone(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(f"--save ck {one_bad_loss('persistent_error')}") == 16
    assert list_steps(PosixStorage(alone / "ck")) == [1, 2, AT - 1]
    assert stored(alone / "ck", AT - 1) == stored(fault_checkpoints(alone / "ck"), AT - 1)
    assert holdfast(["verify", "ck"]) == 0
    monkeypatch.setenv("HOLDFAST_DEVICE", "another")
    capfd.readouterr()
    assert train(f"--save ck --load ck {one_bad_loss('persistent_error')}") == 18
    shown = capfd.readouterr()
    assert f"continuing from the state that a fault has left at step {AT - 1}" in shown.out
    (line,) = [line for line in shown.err.splitlines() if "exit code 18" in line]
    assert "a persistent error" in line
    assert "--load ck" in line


def test_a_disabled_machine_goes_on_from_a_fault_and_stores_nothing_of_it(alone: Path) -> None:
    bad = one_bad_loss("correct_result")
    seed = bad.partition(VALIDATE)[0]
    assert train(f"--save good {seed}") == 0
    assert train(f"--save ck {bad}", save_interval=100) == 16
    assert train(f"--save ck --load ck {seed}") == 0
    assert stored(alone / "ck", STEPS) == stored(alone / "good", STEPS)
    with Snapshot.open(PosixStorage(alone / "ck"), step_dir(STEPS)) as snapshot:
        assert not [info.key for info in snapshot.manifest.tensors if "rerun" in info.key]


def test_a_damaged_fault_checkpoint_is_one_of_the_fallbacks(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = one_bad_loss("correct_result")
    seed = bad.partition(VALIDATE)[0]
    assert train(f"--save good {seed}") == 0
    assert train(f"--save ck {bad}", save_interval=2) == 16
    fault = fault_checkpoints(alone / "ck") / step_dir(AT - 1)
    for file in (fault / "data").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1
        file.write_bytes(content)
    capsys.readouterr()
    assert train(f"--save ck --load ck {seed}") == 2
    assert "add --max-fallbacks 1, or remove ck/rerun/checkpoints" in capsys.readouterr().err
    assert train(f"--save ck --load ck {seed} {VALIDATE} --max-fallbacks 1") == 0
    shown = capsys.readouterr().out
    assert f"the state at step {AT - 1} that a fault has left was given up" in shown
    assert "loaded step 2 from ck" in shown
    assert stored(alone / "ck", STEPS) == stored(alone / "good", STEPS)


def test_a_step_that_begins_differently_is_no_rerun_of_it(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the stored streams or optimizer a good value would say nothing of the device."""
    bad = one_bad_loss("persistent_error")
    assert train(f"--save ck {bad}") == 16
    monkeypatch.setenv("HOLDFAST_DEVICE", "another")
    assert train(f"--save ck --load ck {bad} --no-load-rng") != 18
    assert not [each for each in read_report(alone / "ck/rerun") if each["event"] == "verdict"]


def prove_bad(directory: Path) -> None:
    """Put a verdict on the data of step `AT` into the report of a machine."""
    fields = {"job": "first", "step": AT, "fault": "1", "exit_code": 19, "values": []}
    Journal(directory).append("verdict", {**fields, "verdict": "correct_result"})


def test_a_step_whose_data_was_proved_bad_is_passed_over(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prove_bad(alone / "ck/rerun")
    words = f"--save ck --jsonl log --rerun-skip-rejected {VALIDATE}"
    assert train(words) == 0
    assert f"step {AT} is left out" in capsys.readouterr().out
    # Its rows are consumed, and nothing is updated: the next step has the rows of its number.
    assert stored(alone / "ck", AT) == stored(alone / "ck", AT - 1)
    assert stored(alone / "ck", AT + 1) != stored(alone / "ck", AT)
    steps = [
        each
        for each in map(json.loads, Path("log").read_text().splitlines())
        if each["event"] == "step"
    ]
    assert [each["step"] for each in steps if each.get("skipped")] == [AT]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    rates = [each["lr"] for each in steps]
    assert rates[AT - 1] == rates[AT]
    assert train("--save good") == 0
    assert position(alone / "ck") == position(alone / "good")


def test_determinism_is_reported_and_training_is_the_same(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(f"--save good {DROPOUT}") == 0
    words = "--rerun-mode report_determinism_stats --rerun-report-interval 2"
    capsys.readouterr()
    assert train(f"--save ck {words} {DROPOUT}") == 0
    assert "two runs of each step, compared" in capsys.readouterr().out
    assert stored(alone / "ck", STEPS) == stored(alone / "good", STEPS)
    reports = [each for each in read_report(alone / "ck/rerun") if each["event"] == "determinism"]
    assert len(reports) == STEPS // 2
    for name in ("loss", "gradient"):
        assert reports[-1]["calls"][name]["num_identical"] == STEPS


def test_a_step_whose_fault_was_the_correct_result_is_passed_over_at_the_next_start(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest state is that of the fault, whose verdict is known: going on is not rerunning."""
    bad = one_bad_loss("correct_result")
    words = f"--save ck --load ck --rerun-skip-rejected {bad}"
    assert train(words, save_interval=100) == 16
    monkeypatch.setenv("HOLDFAST_DEVICE", "another")
    assert train(words, save_interval=100) == 19
    capsys.readouterr()
    assert train(f"{words} --jsonl log", save_interval=100) == 0
    assert f"step {AT} is left out" in capsys.readouterr().out
    steps = list(map(json.loads, Path("log").read_text().splitlines()))
    seen = [(each["step"], each.get("skipped", False)) for each in steps if each["event"] == "step"]
    assert seen == [(step, step == AT) for step in range(AT, STEPS + 1)]
    seed = bad.partition(VALIDATE)[0]
    prove_bad(alone / "good/rerun")
    assert train(f"--save good --rerun-skip-rejected {seed} {VALIDATE}") == 0
    assert position(alone / "ck") == position(alone / "good")
    assert stored(alone / "ck", STEPS) == stored(alone / "good", STEPS)


@pytest.mark.parametrize("is_at_minimum", [False, True])
def test_an_overflow_is_a_fault_only_at_the_smallest_loss_scale(
    workplace: Path, is_at_minimum: bool
) -> None:
    words = f"--precision fp16 --save {workplace}/ck {VALIDATE}"
    config = config_of(*words.split())
    config.check(world_size=1)
    with (
        ProcessGroups.single() as groups,
        Trainer(config, groups=groups, corpus=text(str(workplace))) as trainer,
    ):
        assert trainer.scaler is not None
        trainer.train_step()
        if is_at_minimum:
            trainer.scaler.load_state_dict({"scale": LossScaler().minimum, "num_good_steps": 0})
        next(iter(trainer.model.module.parameters())).data[0] = math.inf
        if is_at_minimum:
            with pytest.raises(RerunExit) as caught:
                trainer.train_step()
            assert caught.value.exit_code == 21  # the infinity was there before the step
        else:
            assert trainer.train_step().skipped


def test_a_state_that_was_bad_before_its_step_is_blamed_on_no_device(workplace: Path) -> None:
    """D20: moments that an update has spoiled: their checkpoint is passed over, and saved over."""
    words = f"--save {workplace}/ck --load {workplace}/ck --save-interval 1 {VALIDATE}"
    config = config_of(*words.split())
    config.check(world_size=1)
    with ProcessGroups.single() as groups:
        with Trainer(config, groups=groups, corpus=text(str(workplace))) as trainer:
            trainer.train_step()
            trainer.save()
            trainer.train_step()
            optimizer: Any = trainer.update.optimizer
            moments = next(iter(getattr(optimizer, "optimizer", optimizer).state.values()))
            moments["exp_avg"].view(-1)[0] = math.nan
            trainer.save()
        with (
            Trainer(config, groups=groups, corpus=text(str(workplace))) as trainer,
            pytest.raises(RerunExit) as caught,
        ):
            trainer.run()
        assert caught.value.exit_code == 21
        assert str(caught.value).startswith("step 3: the state was bad before the step")
        assert "an earlier step" in caught.value.advice(workplace / "ck")
        checkpoint = config.checkpoint
        begin = checkpoint_to_load(checkpoint)
        assert begin is not None
        assert (begin.step, begin.is_fault, begin.left_out) == (1, False, (2,))
        with Trainer(config, groups=groups, corpus=text(str(workplace))) as trainer:
            trainer.run()
            assert trainer.progress.step == config.steps
        begin = checkpoint_to_load(checkpoint)
        assert begin is not None
        assert (begin.step, begin.left_out) == (config.steps, ())
        # Every checkpoint is spoiled: nothing is started without a word.
        events = [{"event": "verdict", "step": n, "verdict": "spoiled_state"} for n in range(400)]
        lines = "".join(f"{json.dumps(each)}\n" for each in events)
        (workplace / "ck/rerun/report.jsonl").write_text(lines)
        with pytest.raises(ConfigError, match="every checkpoint is not finite"):
            checkpoint_to_load(checkpoint)


def test_the_newest_of_good_and_fault_checkpoints_is_loaded(alone: Path) -> None:
    assert train(f"--save ck {one_bad_loss('persistent_error')}", save_interval=2) == 16
    ck = alone / "ck"
    begin = checkpoint_to_load(CheckpointConfig(load=ck, save=ck))
    assert begin is not None
    assert begin.is_fault
    assert begin.step == AT - 1
    assert begin.root(ck) == fault_checkpoints(ck)
    # Another one is meant: it is loaded, into its own directory.
    assert step_to_load(CheckpointConfig(load=ck, load_step=2)) == 2
    assert step_to_load(CheckpointConfig(load=ck, finetune=True)) == 2
    for config in (
        CheckpointConfig(save=ck),
        CheckpointConfig(load=ck, load_step=2, save=ck),
    ):
        with pytest.raises(
            ConfigError, match=f"holds the state of a fault at step {AT - 1}|step 2"
        ):
            step_to_load(config)
    # Once training has passed it, the good one is newer.
    seed = one_bad_loss("persistent_error").partition(VALIDATE)[0]
    assert train(f"--save ck --load ck {seed}") == 0
    begin = checkpoint_to_load(CheckpointConfig(load=ck))
    assert begin is not None
    assert not begin.is_fault
    assert begin.step == STEPS


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (VALIDATE, "add --save DIR"),
        ("--save a --rerun-skip-rejected", "add --rerun-mode validate_results"),
        ("--save a --error-injection-rate 5", "add --rerun-mode validate_results"),
        ("--save a --rerun-tolerance 0.1", "add --rerun-mode validate_results"),
        ("--rerun-mode report_determinism_stats --error-injection-rate 5", "leave it out"),
        (f"--save a {VALIDATE} --rerun-spike-factor 0.5", "set it above 1"),
        (f"--save a {VALIDATE} --rerun-max-restarts 0", "--rerun-max-restarts"),
        ("--check-replicas-every 2", "add --save DIR"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(words: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(words.split()).check(world_size=1)

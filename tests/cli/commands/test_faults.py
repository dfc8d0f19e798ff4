"""`holdfast faults`: a run's faults by device, and the exit code of its newest job."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import ProcessGroups
from holdfast.cli.commands.faults import ADVICE
from holdfast.rerun import ExitCode
from holdfast.storage import PosixStorage
from tests.cli.conftest import CommandResult, Holdfast, at_step
from tests.format.making import make, sample_tensors, write
from tests.rerun.test_machine import Loop

NOW = 1_700_000_000.0


def place(device: str, rank: int = 0) -> dict[str, Any]:
    """The place of a rank; `device` is "HOST DEVICE"."""
    host, name = device.split()
    return {"rank": rank, "coordinate": f"dp={rank}", "host": host, "device": name}


def places(*devices: str) -> list[dict[str, Any]]:
    return [place(device, rank) for rank, device in enumerate(devices)]


class Report:
    """A report of a machine, event by event."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.path = run / "rerun" / "report.jsonl"
        self.path.parent.mkdir(parents=True)
        self.time = NOW

    def add(self, event: str, job: str, fault: str = "", **fields: Any) -> None:
        self.time += 1
        common = {"time": self.time, "machine": "rerun", "job": job, "step": 5}
        record = {"event": event, **common, **({"fault": fault} if fault else {}), **fields}
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def bad_twice(self, job: str, fault: str, *devices: str) -> None:
        """A value of the first device, fed by all of them, is bad in two runs of a step."""
        fed_by = places(*devices)
        value = {**fed_by[0], "call": "loss", "occurrence": 0, "value": "nan"}
        self.add("rejected", job, fault, values=[{**value, "fed_by": fed_by}])
        self.recheck("rerun_in_place", job, fault, devices, devices, verdict=None)

    def recheck(
        self,
        event: str,
        job: str,
        fault: str,
        first: tuple[str, ...],
        now: tuple[str, ...],
        *,
        verdict: str | None,
    ) -> list[dict[str, Any]]:
        value = {
            **place(now[0]),
            "call": "loss",
            "first_host": place(first[0])["host"],
            "first_device": place(first[0])["device"],
            "first_fed_by": places(*first),
            "fed_by": places(*now),
            "outcome": "good" if verdict else "reproduced",
            "verdict": verdict,
        }
        self.add(event, job, fault, values=[value])
        return [value]

    def judge(self, job: str, fault: str, verdict: str, code: int | None, **fields: Any) -> None:
        self.add("verdict", job, fault, verdict=verdict, exit_code=code, **fields)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "run")


def save(run: Path, step: int, created: str) -> None:
    """A good checkpoint of a run."""
    made = at_step(make(sample_tensors(), parts={"model": {}}), step)
    made.manifest = msgspec.structs.replace(made.manifest, created=created)
    write(PosixStorage(run), made)


def counts(result: CommandResult) -> dict[str, tuple[int, int, int, int]]:
    """Convicted, suspected, odd one and transient, by "HOST DEVICE"."""
    return {
        f"{each['host']} {each['device']}": (
            each["num_convicted"], each["num_suspected"], each["num_odd"], each["num_transient"],
        )
        for each in result.json["devices"]
    }  # fmt: skip


def lines(result: CommandResult) -> list[tuple[str, list[str], int | None]]:
    return [
        (
            each["verdict"],
            [f"{device['host']} {device['device']}" for device in each["devices"]],
            each["exit_code"],
        )
        for each in result.json["faults"]
    ]


def test_devices_add_up_over_jobs(holdfast: Holdfast, report: Report) -> None:
    """Who was convicted, suspected, odd, or had a transient error; an acquitted one counts none."""
    report.bad_twice("job1", "f1", "h1 A", "h1 B")
    assert holdfast("faults", report.run).code == 16
    result = holdfast("faults", report.run, "--json")
    assert lines(result) == [("open", ["h1 A", "h1 B"], 16)]
    assert counts(result) == {"h1 A": (0, 1, 0, 0), "h1 B": (0, 1, 0, 0)}
    report.add("restart", "job2", "f1", number=1, places=places("h1 C", "h1 B"))
    assert holdfast("faults", report.run).code == 16  # it died before a verdict
    first, now = ("h1 A", "h1 B"), ("h1 C", "h1 B")
    values = report.recheck(
        "rerun_from_checkpoint", "job2", "f1", first, now, verdict="persistent_error"
    )
    report.judge(
        "job2", "f1", "persistent_error", 18,
        devices=["h1, A"], convicted=[{"host": "h1", "device": "A"}], suspects=[], values=values,
    )  # fmt: skip
    result = holdfast("faults", report.run, "--json")
    assert (result.code, result.json["exit_code"]) == (18, 18)
    assert result.json["next"] == "take h1, A out of service, start again"
    assert counts(result) == {"h1 A": (1, 0, 0, 0)}
    report.add("dropped", "job3", "f1", why="its verdict is known")
    assert holdfast("faults", report.run).code == 0
    values = report.recheck(
        "rerun_in_place", "job3", "f2", ("h1 B",), ("h1 B",), verdict="transient_error"
    )
    report.judge("job3", "f2", "transient_error", None, values=values)
    report.add("drift", "job3", message="…", values=places("h1 B"))
    report.add("vouch", "job3", pairs=[places("h1 A", "h1 B")], disagree=[], odd=[])
    report.add("vouch", "job3", disagree=[places("h1 A", "h1 B")], odd=places("h1 A"))
    report.add("vouch", "job3", disagree=[[places("h1 C"), places("h1 D")]], odd=[])
    result = holdfast("faults", report.run, "--json")
    assert (result.code, result.json["exit_code"], result.json["next"]) == (0, 0, "")
    assert list(counts(result).items()) == [("h1 A", (1, 0, 1, 0)), ("h1 B", (0, 0, 1, 1))]
    assert lines(result) == [
        ("persistent_error", ["h1 A"], 18),
        ("transient_error", ["h1 B"], None),
        ("drift", ["h1 B"], None),
        ("vouch", ["h1 A"], None),
        ("vouch", ["h1 C", "h1 D"], None),
    ]
    assert [device["time"] - NOW for device in result.json["devices"]] == [11, 9]
    shown = holdfast("faults", report.run).out
    assert "take it out of service" in shown
    assert shown.rstrip().endswith("5 faults; nothing to do now")


@pytest.mark.parametrize("code", [17, 18, 19, 20, 21])
def test_the_exit_code_is_that_of_the_last_decision(
    holdfast: Holdfast, report: Report, code: int
) -> None:
    """Until a later job has recorded anything, or a later step was saved after it."""
    verdicts = {17: "transient_error", 18: "persistent_error", 19: "correct_result",
                20: "undecided", 21: "spoiled_state"}  # fmt: skip
    report.judge("job1", "f0", "transient_error", None)
    assert holdfast("faults", report.run).code == 0
    report.judge("job1", "f1", verdicts[code], code)
    for directory in (report.run, report.path.parent):
        assert holdfast("faults", directory).code == code
        result = holdfast("faults", directory, "--json")
        assert (result.code, result.json["exit_code"]) == (code, code)
        assert result.json["next"]
    save(report.run, 5, "2030-01-01T00:00:00Z")  # the step itself, as it was before
    save(report.run, 6, "2020-01-01T00:00:00Z")  # of a run that started from an older step
    assert holdfast("faults", report.run).code == code
    save(report.run, 7, "2030-01-01T00:00:00Z")
    assert holdfast("faults", report.run).code == 0
    assert holdfast("faults", report.path.parent).code == 0
    report.judge("job2", "f2", verdicts[code], code)
    report.time = 2e9
    report.judge("job2", "f2", verdicts[code], code)
    assert holdfast("faults", report.run).code == code
    report.add("determinism", "job3", num_steps=100, calls={})
    assert holdfast("faults", report.run).code == 0


def test_every_exit_code_has_its_advice() -> None:
    """The command has no torch, so it has the codes as numbers."""
    assert {int(code) for code in ExitCode} <= set(ADVICE)


def test_a_fault_that_stays_undecided(holdfast: Holdfast, report: Report) -> None:
    """It lies between the devices of its last rerun, or those that the verdict names."""
    report.bad_twice("job1", "f1", "h1 A", "h1 B")
    report.add("restart", "job2", "f1", number=3, places=places("h1 B", "h1 A"))
    report.judge("job2", "f1", "undecided", 20, values=[])
    report.bad_twice("job3", "f2", "h1 A", "h1 B", "h1 C")
    named = [{"host": "h1", "device": "B"}, {"host": "h1", "device": "C"}]
    report.judge("job3", "f2", "undecided", None, suspects=named, values=[])
    result = holdfast("faults", report.run, "--json")
    assert result.code == 0
    assert counts(result) == {"h1 B": (0, 2, 0, 0), "h1 A": (0, 1, 0, 0), "h1 C": (0, 1, 0, 0)}


def test_a_second_opinion_and_what_is_open_after_a_verdict(
    holdfast: Holdfast, report: Report
) -> None:
    """A verdict that is null leaves it open; a transient value of it counts all the same."""
    report.bad_twice("job1", "f1", "h1 A", "h1 B")
    values = report.recheck(
        "second_opinion", "job1", "f1", ("h1 A", "h1 B"), ("h1 C", "h1 D"), verdict=None
    )
    other = {**values[0], "first_fed_by": places("h1 E"), "verdict": "transient_error"}
    report.add("rerun_from_checkpoint", "job2", "f1", values=[*values, other])
    suspects = [{"host": "h1", "device": "B"}]
    report.judge("job2", "f1", None, 16, suspects=suspects)  # type: ignore[arg-type]
    result = holdfast("faults", report.run, "--json")
    assert result.code == 16
    assert lines(result) == [("open", ["h1 B"], 16)]
    assert counts(result) == {"h1 B": (0, 1, 0, 0), "h1 E": (0, 0, 0, 1)}


def test_the_values_that_are_closest_to_a_fault_count(holdfast: Holdfast, report: Report) -> None:
    """A gradient that all ranks feed is bad with each loss: it blames no further device."""
    loss = {**place("h1 B"), "first_fed_by": places("h1 B"), "verdict": None}
    gradient = {**place("h1 A"), "first_fed_by": places("h1 A", "h1 B", "h1 C"), "verdict": None}
    report.add("rerun_in_place", "job1", "f1", values=[gradient, loss, gradient])
    result = holdfast("faults", report.run, "--json")
    assert counts(result) == {"h1 B": (0, 1, 0, 0)}
    values = [{**each, "verdict": "transient_error"} for each in (gradient, loss, gradient)]
    report.judge("job2", "f1", "transient_error", 17, values=values)
    assert counts(holdfast("faults", report.run, "--json")) == {"h1 B": (0, 0, 0, 1)}


def test_reports_of_older_versions(holdfast: Holdfast, report: Report) -> None:
    """Values without `fed_by`: their own device, or the first one, is the set."""
    mine = {**place("h1 A"), "call": "loss", "value": "nan"}
    rechecked = {**place("h2 B"), "first_host": "h1", "first_device": "A", "first_rank": 0}
    report.add("rejected", "job1", "f1", values=[mine])
    assert lines(holdfast("faults", report.run, "--json")) == [("unfinished", ["h1 A"], None)]
    assert holdfast("faults", report.run, "--json").json["devices"] == []
    twice = {**rechecked, **place("h1 A"), "outcome": "reproduced", "verdict": None}
    report.add("rerun_in_place", "job1", "f1", values=[twice])
    result = holdfast("faults", report.run, "--json")
    assert (result.code, counts(result)) == (16, {"h1 A": (0, 1, 0, 0)})
    values = [{**rechecked, "outcome": "good", "verdict": "persistent_error"}]
    report.judge("job2", "f1", "persistent_error", 18, devices=["h1, A (rank 0)"], values=values)
    result = holdfast("faults", report.run, "--json")
    assert (result.code, counts(result)) == (18, {"h1 A": (1, 0, 0, 0)})


def test_a_fault_that_a_run_could_not_run_again(holdfast: Holdfast, report: Report) -> None:
    report.bad_twice("job1", "f1", "h1 A")
    report.add("dropped", "job2", "f1", why="the run continues at step 9")
    result = holdfast("faults", report.run, "--json")
    assert result.json["devices"][0]["time"] == NOW + 2  # of the rerun
    assert (result.code, lines(result)) == (0, [("dropped", ["h1 A"], 16)])
    assert counts(result) == {"h1 A": (0, 1, 0, 0)}


def test_one_device_under_two_names_of_its_host(holdfast: Holdfast, report: Report) -> None:
    """A UUID is a device whatever the host is called; `cpu` and an index are another on each."""
    for number, device in enumerate(
        ("h1 GPU-7", "h2 GPU-7", "h1 cpu", "h2 cpu", "h1 xpu:0", "h2 xpu:0")
    ):
        report.add("rerun_in_place", f"job{number}", f"f{number}", values=[place(device)])
    result = holdfast("faults", report.run, "--json")
    assert counts(result) == {
        "h2 GPU-7": (0, 2, 0, 0),
        "h1 cpu": (0, 1, 0, 0),
        "h1 xpu:0": (0, 1, 0, 0),
        "h2 cpu": (0, 1, 0, 0),
        "h2 xpu:0": (0, 1, 0, 0),
    }


def test_what_a_dying_process_has_left(holdfast: Holdfast, report: Report) -> None:
    """A torn line is passed over, fields that are missing do no harm, other lines are refused."""
    report.bad_twice("job1", "f1", "h1 A")
    with report.path.open("a") as file:
        file.write('{"event": "verd')
    assert holdfast("faults", report.run).code == 16
    with report.path.open("a") as file:
        file.write("\n")
        for event in ("rejected", "rerun_in_place", "verdict", "drift", "vouch", "diagnostics"):
            file.write(json.dumps({"event": event}) + "\n")
            file.write(json.dumps({"event": event, "fault": "f9", "values": [None, {}]}) + "\n")
        file.write(json.dumps({"event": "drift", "values": {}, "time": 1e300}) + "\n")
    assert holdfast("faults", report.run).code == 16
    assert holdfast("faults", report.run, "--json").code == 16
    with report.path.open("a") as file:
        file.write("skip 17\n")
    result = holdfast("faults", report.run)
    assert result.code == 2
    assert "line" in result.err
    assert "skip 17" in result.err


def test_a_directory_without_faults_and_one_of_something_else(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    save(tmp_path / "run", 5, "2020-01-01T00:00:00Z")
    result = holdfast("faults", tmp_path / "run")
    assert (result.code, result.out) == (0, f"no faults in {tmp_path / 'run'}\n")
    assert holdfast("faults", tmp_path / "run", "--json").json["faults"] == []
    (tmp_path / "other").mkdir()
    for words in ([tmp_path / "other"], [tmp_path / "missing"], [], [tmp_path, "x"]):
        result = holdfast("faults", *words)
        assert (result.code, result.out) == (2, "")
        assert result.err.count("\n") == 1


def test_diagnostics_are_shown_with_their_device(holdfast: Holdfast, report: Report) -> None:
    report.add("drift", "job1", message="…", values=places("h1 A"))
    results = [{"host": "h1", "device": "A", "rank": 0, "text": "matmul differs \x1b[31m"}]
    report.add("diagnostics", "job1", results=results)
    assert "h1, A: matmul differs \\x1b[31m\n" in holdfast("faults", report.run).out
    (device,) = holdfast("faults", report.run, "--json").json["devices"]
    assert device["diagnostics"] == ["matmul differs \x1b[31m"]


def test_the_faults_of_a_machine(holdfast: Holdfast, tmp_path: Path) -> None:
    """What a machine writes is what the command reads: open, then a verdict, then it goes on."""
    with ProcessGroups.single() as groups:
        loop = Loop(groups, tmp_path, device="A")
        loop.run(5, {2: [math.nan, math.nan]})
        loop.save_fault()
        result = holdfast("faults", tmp_path, "--json")
        assert (result.code, lines(result)) == (16, [("open", ["h A"], 16)])
        again = Loop(groups, tmp_path, device="B")
        again.load(again.machine.checkpoints)
        again.run(5)
        result = holdfast("faults", tmp_path, "--json")
        assert (result.code, lines(result)) == (18, [("persistent_error", ["h A"], 18)])
        assert counts(result) == {"h A": (1, 0, 0, 0)}
        third = Loop(groups, tmp_path, device="B")
        third.load(third.machine.checkpoints)
        third.run(5)
        assert holdfast("faults", tmp_path).code == 0


def test_no_torch(report: Report) -> None:
    """A scheduler's host has none."""
    report.bad_twice("job1", "f1", "h1 A")
    program = (
        "import sys\n"
        "from holdfast.cli.main import main\n"
        f"code = main(['faults', {os.fspath(report.run)!r}])\n"
        "sys.exit('torch' if 'torch' in sys.modules else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    assert done.returncode == 16, done.stderr

"""What jobs do at one directory, one after the other, against a plain account of it.

A history (`histories.py`) is one process over months. Here it is jobs of one to three ranks, each
resumed under another size, with other retention and other structures, ended by hand or by SIGKILL,
and the `holdfast` command in a process of its own, before, after and during their saves. A job is a
script that a seed draws; its ranks write down what each line of it has answered, and after the job
the account is compared with the answers and with the directory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import holdfast
from holdfast import (
    Checkpointer,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepTagged,
    KeepWithin,
    Layout,
    PendingSave,
    PosixStorage,
    ProcessGroups,
    Sharded,
)
from holdfast.errors import HoldfastError
from holdfast.format.names import LATEST, list_steps, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.retention.tags import list_tags
from holdfast.writer.leftovers import repair
from tests.checkpoint.histories import Run
from tests.crash.common import leftovers
from tests.harness import RankContext, run_ranks

STEPS = range(1, 8)
_ROOM = str(Path(holdfast.__file__).parent)
_KEEPS: Mapping[str, Any] = {
    "all": None,
    "last": KeepLast(1) | KeepTagged(),
    "two": KeepLast(2) | KeepTagged(),
    "every": KeepEvery(2) | KeepTagged(),
    "best": KeepBest("values.version", 1, "min") | KeepTagged(),
    "within": KeepWithin(1e-6) | KeepTagged(),
}


# What a version is made of


@dataclass(frozen=True)
class Structure:
    """The part `shards` of a version, which changes from one to the next."""

    name: str
    dtype: torch.dtype
    num_rows: int

    @classmethod
    def of(cls, version: int) -> Structure:
        """Most have the first form; some are renamed, of another type, or grown."""
        return cls(
            name="lines" if version % 6 == 1 else "rows",
            dtype=torch.float32 if version % 6 == 3 else torch.float64,
            num_rows=24 if version % 6 == 5 else 12,
        )

    def refuses(self, stored: Structure, *, options: Mapping[str, Any]) -> bool:
        """Return True if a load of this one from that one is an error."""
        if self.name != stored.name:
            return not options.get("allow_missing")  # a plain tree is given what it lacks
        if self.num_rows != stored.num_rows:
            return True
        return self.dtype != stored.dtype and not options.get("cast")


def shards_of(version: int, structure: Structure, index: int, size: int) -> dict[str, object]:
    """What the rank at `index` of `size` holds of the part `shards` of a version."""
    whole = torch.arange(structure.num_rows * 3).reshape(-1, 3).to(structure.dtype) + version
    rows = structure.num_rows // size
    local = whole.narrow(0, rows * index, rows).clone()
    return {structure.name: Sharded(local, (structure.num_rows, 3), dims={0: "dp"})}


# One rank of a job


@dataclass(frozen=True)
class Options:
    """How the checkpointer of a job is made."""

    keeps: str
    staging_buffers: int
    ckpt_format: str
    relative: bool


class Rank:
    """Follows the script of a job, and writes down what each line has answered."""

    def __init__(self, context: RankContext, root: str, log: str, options: Options) -> None:
        self.context = context
        self.run = Run()
        self.log = Path(f"{log}.{context.rank}")
        self.pending: dict[int, PendingSave] = {}
        layout = Layout(dp=context.num_ranks)
        self.groups = ProcessGroups.create(layout, timeout_s=30)
        self.root = root
        self.checkpointer = Checkpointer(
            os.path.relpath(root) if options.relative else root,
            groups=self.groups,
            settle_s=20.0,
            deadline_s=20.0,
            staging_buffers=options.staging_buffers,
            retention=_KEEPS[options.keeps],
            ckpt_format=options.ckpt_format,  # type: ignore[arg-type]
        )
        self.commands: list[subprocess.Popen[str]] = []

    def follow(self, script: list[tuple[Any, ...]]) -> None:
        for number, (verb, *words) in enumerate(script):
            answer: Any
            try:
                answer = getattr(self, verb)(*words)
            except (HoldfastError, KeyboardInterrupt) as error:
                answer = {"error": type(error).__name__, "says": str(error)}
            self.note(number, answer)

    def note(self, number: int, answer: object) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps([number, answer]) + "\n")

    def state(self, version: int, structure: Structure | None = None) -> dict[str, object]:
        structure = structure or Structure.of(version)
        index, size = self.context.rank, self.context.num_ranks
        return {**self.run.state(), "shards": shards_of(version, structure, index, size)}

    # Lines of a script

    def save(self, step: int, version: int, overwrite: bool) -> dict[str, Any]:
        self.run.become(version)
        state = self.state(version)
        self.checkpointer.save(step, state, overwrite=overwrite, metadata={"v": version})
        return {}

    def save_async(
        self, step: int, version: int, overwrite: bool, stage: Any, number: int, busy: Any
    ) -> dict[str, Any]:
        self.run.become(version)
        pending = self.checkpointer.save_async(
            step,
            self.state(version),
            overwrite=overwrite,
            stage=stage,
            when_busy=busy,
            metadata={"v": version},
        )
        if pending.skipped:
            return {"skipped": True}
        self.pending[number] = pending
        pending.staged()
        self.run.become(-1)
        return {}

    def land(self, number: int, timeout: float | None) -> dict[str, Any]:
        pending = self.pending.get(number)
        if pending is None:
            return {"skipped": True}
        if timeout is not None:
            with contextlib.suppress(HoldfastError):
                pending.result(timeout)
        pending.result(60)
        return {}

    def load(self, step: int | None, like: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load into the structure of version `like`."""
        self.run.become(-1)
        structure = Structure.of(like)
        state = {**self.state(-1, structure), "values": {}}
        report = self.checkpointer.load(state, step=step, **options)
        version = self.run.prove(report.values["values"])
        assert report.metadata == {"v": version}
        stored = Structure.of(version)
        index, size = self.context.rank, self.context.num_ranks
        if stored.name == structure.name:
            truth = shards_of(version, stored, index, size)[stored.name]
            got = state["shards"][structure.name]  # type: ignore[index]
        else:
            truth = shards_of(version, stored, 0, 1)[stored.name]
            got = Sharded(report.values["shards"][stored.name], (stored.num_rows, 3), offset=(0, 0))  # type: ignore[index]
        assert torch.equal(got.local, truth.local.to(got.local.dtype))  # type: ignore[attr-defined]
        return {"step": report.step, "version": version}

    def load_all(self, step: int | None) -> dict[str, Any]:
        report = self.checkpointer.load_all(step=step)
        version = report.values["values"]["version"]
        structure = Structure.of(version)
        truth = shards_of(version, structure, 0, 1)[structure.name].local  # type: ignore[attr-defined]
        assert list(report.values["shards"]) == [structure.name]
        assert torch.equal(report.values["shards"][structure.name], truth)
        return {"step": report.step, "version": version}

    def look(self) -> dict[str, Any]:
        return {"steps": self.checkpointer.steps(), "latest": self.checkpointer.latest()}

    def command(self, words: list[str]) -> dict[str, Any]:
        """The command, by another process, while all ranks wait for it."""
        answer = {}
        if self.context.rank == 0:
            answer = ended(start(words))
        self.groups.control.barrier(phase="command")
        return answer

    def begin(self, words: list[str]) -> dict[str, Any]:
        """The command, by another process, while what follows is done."""
        if self.context.rank == 0:
            self.commands.append(start(words))
        return {}

    def end(self) -> dict[str, Any]:
        return ended(self.commands.pop(0)) if self.commands else {}

    def interrupt(self, rank: int, lines: int, verb: str, *words: Any) -> dict[str, Any]:
        """A line that Ctrl-C ends on one rank."""
        with counted_lines(lines if rank == self.context.rank else 0, _raise):
            answer: dict[str, Any] = getattr(self, verb)(*words)
        return answer

    def die(self, ranks: list[int], lines: int, with_writer: bool, verb: str, *words: Any) -> None:
        """A line in which ranks are killed, at one of its lines of code or right after it."""

        def kill() -> None:
            writer = self.checkpointer.stats.writer_pid
            if with_writer and writer is not None:
                os.kill(writer, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        is_doomed = self.context.rank in ranks
        with counted_lines(lines if is_doomed else 0, kill):
            try:
                getattr(self, verb)(*words)
            finally:
                if is_doomed:
                    kill()

    def close(self) -> dict[str, Any]:
        self.checkpointer.close()
        self.checkpointer.close()
        return {}

    def use(self) -> dict[str, Any]:
        """After `close`, a checkpointer looks and loads; what it makes is given back again."""
        return {"steps": self.checkpointer.steps()}

    def finish(self, is_lost: bool) -> dict[str, Any]:
        """End; lost: without `close`, as a loop that an exception has left."""
        if is_lost:
            for each in self.pending.values():
                with contextlib.suppress(HoldfastError):
                    each.result(60)
            del self.checkpointer
            self.pending.clear()
            gc.collect()
        else:
            try:
                self.checkpointer.close()
            finally:
                self.groups.close()
            return {}
        self.groups.close()
        return {}


def _raise() -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def counted_lines(count: int, then: Callable[[], None]) -> Iterator[None]:
    """In the body, do something at one line of the library's code; never with 0."""
    left = count
    has_begun = False

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left, has_begun
        name = frame.f_code.co_filename
        if not name.startswith(_ROOM) or name.endswith("guard.py"):
            has_begun = has_begun or name.endswith("guard.py")
            return trace if name.endswith("guard.py") else None
        if not has_begun:  # what makes the state is not yet an operation of all ranks
            return None
        if event == "line":
            left -= 1
            if left == 0:
                then()
        return trace

    before = sys.gettrace()
    if count:
        sys.settrace(trace)
    try:
        yield
    finally:
        if count:
            sys.settrace(before)


def start(words: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    return {"code": process.returncode, "out": out, "err": err}


def held() -> dict[str, int]:
    """What a process may leave behind: descriptors, threads, shared memory."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "memfds": Path("/proc/self/maps").read_text().count("memfd:"),
    }


def job(
    context: RankContext, root: str, log: str, options: Options, script: list[tuple[Any, ...]],
    is_lost: bool,
) -> dict[str, Any]:  # fmt: skip
    before = held()
    rank = Rank(context, root, log, options)
    rank.follow(script)
    try:
        answer = rank.finish(is_lost)
    except HoldfastError as error:
        answer = {"error": type(error).__name__, "says": str(error)}
    rank.note(len(script), answer)
    del rank
    gc.collect()
    return {"before": before, "after": held()}


# The account


Answers = list[dict[str, Any] | None]
"""What each rank has answered to a line; None of a rank that was ended before."""


@dataclass
class Account:
    """What each step may hold, and which tags there are."""

    may_be: dict[int, set[int | None]] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)

    def of(self, step: int) -> set[int | None]:
        return self.may_be.setdefault(step, {None})

    def possible(self) -> list[int]:
        return sorted(step for step, versions in self.may_be.items() if versions != {None})

    def certain(self) -> list[int]:
        return sorted(step for step, versions in self.may_be.items() if None not in versions)

    def retain(self, keeps: str, *, saved: int | None = None) -> None:
        """What a policy lets go of may have gone."""
        possible = self.possible()
        counts = {"last": 1, "two": 2}
        for step in possible[:-1]:
            is_kept = {
                "all": True,
                "every": step % 2 == 0,
                # The best of what may be there is known only if nothing is open.
                "best": False,
                "within": False,
            }.get(keeps, step in possible[-counts.get(keeps, 0) :])
            if not is_kept and step not in self.tags.values() and step != saved:
                self.may_be[step].add(None)

    def narrow(self, found: Mapping[int, int]) -> None:
        for step in {*self.may_be, *found}:
            version = found.get(step)
            assert version in self.of(step), f"step {step} is {version}, not of {self.of(step)}"
            self.may_be[step] = {version}


class Jobs:
    """One directory, and the jobs and commands that a seed draws for it."""

    def __init__(self, place: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.place = place
        self.root = place / "run"
        self.account = Account()
        self.version = 0
        self.number = 0
        self.log: list[str] = []
        self.open_prunes: list[str] = []

    def go(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            self.job()
            self.settle()
            for _ in range(self.random.choice([0, 1, 2])):
                self.between()
                self.settle()

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def step(self) -> int:
        return self.random.choice(STEPS)

    # Drawing

    def job(self) -> None:
        chance = self.random
        self.number += 1
        size = chance.choice([1, 1, 2, 2, 3])
        options = Options(
            keeps=chance.choice(["all", "all", *_KEEPS]),
            staging_buffers=chance.choice([1, 2]),
            ckpt_format=chance.choice(["holdfast", "holdfast", "torch_dist"]),
            relative=chance.random() < 0.2,
        )
        script: list[tuple[Any, ...]] = [("look",)]
        flights: list[int] = []
        begun = 0
        for _ in range(chance.choice([2, 4, 6])):
            kind = chance.choices(
                ["save", "async", "land", "load", "all", "look", "command", "begin", "interrupt"],
                [4, 5, 3, 3, 1, 2, 2, 2, 2],
            )[0]
            if kind == "save":
                script.append(self.a_save())
            elif kind == "async":
                flights.append(len(script))
                script.append(self.a_save_async(len(script)))
            elif kind == "land" and flights:
                line = flights.pop(chance.randrange(len(flights)))
                script.append(("land", line, chance.choice([None, None, 0.0, 0.01])))
            elif kind == "load":
                script.append(self.a_load())
            elif kind == "all":
                script.append(("load_all", chance.choice([None, self.step()])))
            elif kind == "look":
                script.append(("look",))
            elif kind == "command":
                script.append(("command", self.a_command()))
            elif kind == "begin":
                script.append(("begin", self.a_command(changes_tags=False)))
                begun += 1
            elif kind == "interrupt":
                lines = int(10 ** chance.uniform(0.5, 3.7))
                what = self.a_save() if chance.random() < 0.6 else self.a_load()
                script.append(("interrupt", chance.randrange(size), lines, *what))
        script += [("end",)] * begun
        is_killed = chance.random() < 0.35
        if is_killed:
            ranks = chance.choice([list(range(size)), [chance.randrange(size)]])
            lines = int(10 ** chance.uniform(0.5, 4))
            number = len(script)
            what = chance.choice([self.a_save(), self.a_save_async(number), self.a_load()])
            script.append(("die", ranks, lines, chance.random() < 0.5, *what))
        elif chance.random() < 0.6:
            script += [("land", line, None) for line in flights] + [("close",), ("use",)]
        is_lost = chance.random() < 0.2
        self.log.append(f"job {self.number} of {size} {options} lost={is_lost}")
        self.log += [f"  {line}" for line in script]
        log = str(self.place / f"answers{self.number}")
        outcome = run_ranks(
            size, job, str(self.root), log, options, script, is_lost,
            expect_failure=is_killed, timeout_s=120,
        )  # fmt: skip
        answers = self.read(log, size, len(script) + 1)
        self.judge(options, script, answers)
        if is_killed:
            for error in outcome.errors:
                assert error is None or not error.timed_out, error
        else:
            for result in outcome.results if not is_lost else ():
                for what, count in result["after"].items():
                    assert count <= result["before"][what] + 2, (what, result)

    def a_save(self) -> tuple[Any, ...]:
        return ("save", self.step(), self.next_version(), self.random.random() < 0.6)

    def a_save_async(self, number: int) -> tuple[Any, ...]:
        chance = self.random
        stage = chance.choice(["at once", "lazily"])
        return (
            "save_async", self.step(), self.next_version(), chance.random() < 0.7, stage, number,
            chance.choice(["wait", "wait", "skip"]),
        )  # fmt: skip

    def a_load(self) -> tuple[Any, ...]:
        chance = self.random
        options: dict[str, Any] = {}
        for name, value in (
            ("ignore_unexpected", chance.choice([True, ["shards.*"]])),
            ("allow_missing", ["shards.*"]),
            ("cast", True),
            ("exchange", True),
        ):
            if chance.random() < 0.4:
                options[name] = value
        step = chance.choice([None, None, self.step()])
        return ("load", step, chance.randrange(self.version + 1), options)

    def a_command(self, *, changes_tags: bool = True) -> list[str]:
        chance, root = self.random, str(self.root)
        new = str(self.place / f"made{chance.random()}")
        keep = chance.choice([["--keep-last", "1"], ["--keep-last", "2"], ["--keep-every", "2"]])
        words = [
            ["ls", root, "--json"],
            ["show", root, "--json"],
            ["verify", root],
            ["verify", root, "--step", str(self.step())],
            ["diff", root, root],
            ["prune", root, *keep, "--keep-tagged", "--yes", "--json"],
            ["repair", root, "--json"],
            ["copy", root, new, "--verify"],
            ["convert", root, new, "--to", "holdfast"],
            ["convert", root, new, "--to", "dcp"],
            ["export", root, "--tensor", "shards.*", "--to", new],
        ]
        if changes_tags:
            words += [
                ["tag", root, str(self.step()), chance.choice("ab"), "--json"],
                ["tag", root, "--remove", chance.choice("ab"), "--json"],
            ]
        return chance.choice(words)

    # Judging

    def read(self, log: str, size: int, num_lines: int) -> list[Answers]:
        answers: list[Answers] = [[None] * size for _ in range(num_lines)]
        for rank in range(size):
            with contextlib.suppress(FileNotFoundError):
                for line in Path(f"{log}.{rank}").read_text().splitlines():
                    number, answer = json.loads(line)
                    answers[number][rank] = answer
        return answers

    def judge(
        self, options: Options, script: list[tuple[Any, ...]], answers: list[Answers]
    ) -> None:
        flights: dict[int, tuple[int, int]] = {}
        overlapping: set[int] = set()
        commands: list[tuple[list[str], Answers]] = []
        account = self.account
        has_flown = False
        may_have_failed = any(
            answer is not None and "error" in answer
            for line, answer_s in zip(script, answers, strict=False)
            if line[0] == "land"
            for answer in answer_s
        ) or any(line[0] == "interrupt" for line in script)

        def retained(saved: int | None = None) -> None:
            account.retain(options.keeps, saved=None if has_flown else saved)
            for words, _ in commands:
                self.prune(words)

        for line, given in zip([*script, ("finish",)], answers, strict=True):
            self.log.append(f"    {line[0]} -> {str(given)[:400]}")
            verb, *words = line
            whole = [each for each in given if each is not None]
            kinds = {each.get("error") for each in whole}
            if verb not in ("command", "begin", "end", "die", "interrupt"):
                assert len(kinds) <= 1, f"ranks differ: {given}"
            for each in whole:
                if "error" in each and each["error"] != "KeyboardInterrupt":
                    assert each["says"], given
                    assert "Traceback" not in each["says"], given
            failed = kinds != {None}
            if verb in ("interrupt", "die"):
                is_kill = verb == "die"
                verb, *words = words[3 if is_kill else 2 :]
                if verb in ("save", "save_async"):
                    step, version = words[:2]
                    before = set(account.of(step))
                    if (
                        not is_kill
                        and not failed
                        and not any(f[0] == step for f in flights.values())
                    ):
                        account.may_be[step] = {version}
                    else:
                        account.may_be[step] = before | {version}
                    retained()
                if is_kill:
                    for step, version in flights.values():
                        account.of(step).add(version)
                continue
            if verb == "save":
                step, version, overwrite = words
                others = {n for n, f in flights.items() if f[0] == step}
                overlapping |= others
                if not failed:
                    assert overwrite or others or None in account.of(step), line
                    account.may_be[step] = {version} if not others else account.of(step) | {version}
                    retained(step)
                else:
                    assert (
                        others or may_have_failed or (not overwrite and account.of(step) != {None})
                    ), (line, given)
            elif verb == "save_async":
                step, version, overwrite, _, number, _ = words
                others = {n for n, f in flights.items() if f[0] == step}
                if failed:
                    assert (
                        others or may_have_failed or (not overwrite and account.of(step) != {None})
                    ), (line, given)
                elif not whole[0].get("skipped"):
                    overlapping |= others | ({number} if others else set())
                    flights[number] = (step, version)
                    has_flown = True
                    account.of(step).add(version)
                    retained()
            elif verb in ("land", "close", "finish"):
                landed = [words[0]] if verb == "land" else list(flights)
                for number in landed:
                    if number not in flights:
                        continue
                    step, version = flights.pop(number)
                    if verb == "land" and not failed:
                        if number not in overlapping:
                            account.may_be[step] = {version}
                    elif verb == "land" and number not in overlapping:
                        account.of(step).discard(version)
                        account.may_be[step] = account.of(step) or {None}
                    retained()
            elif verb in ("load", "load_all"):
                self.judge_load(line, whole, failed=failed, calm=not flights)
            elif verb in ("look", "use"):
                for each in whole:
                    steps = each["steps"]
                    assert {*account.certain()} <= {*steps} <= {*account.possible()}, (
                        each, account.may_be)  # fmt: skip
                    if "latest" in each and steps:
                        assert each["latest"] is not None
            elif verb == "command":
                self.judge_command(words[0], whole[0] if whole else None, calm=not flights)
            elif verb == "begin":
                commands.append((words[0], given))
                self.prune(words[0])
            elif verb == "end":
                self.prune(commands[0][0])
                self.judge_command(commands.pop(0)[0], whole[0] if whole else None, calm=False)
            for words_, _ in commands:
                self.prune(words_)

    def judge_load(
        self, line: tuple[Any, ...], whole: list[dict[str, Any]], *, failed: bool, calm: bool
    ) -> None:
        account = self.account
        step = line[1]
        steps = [step] if step is not None else account.possible()
        if failed:
            says = whole[0]
            if says["error"] == "StorageError":
                assert all(None in account.of(each) for each in steps), (line, whole)
            else:
                assert line[0] == "load", whole
                assert says["error"] == "MismatchError", whole
                stored = {v for each in steps for v in account.of(each) if v is not None}
                like = Structure.of(line[2])
                assert any(like.refuses(Structure.of(v), options=line[3]) for v in stored), whole
            return
        assert len({(each["step"], each["version"]) for each in whole}) <= 1, whole
        for each in whole:
            assert each["version"] in account.of(each["step"]), (line, each, account.may_be)
            assert step in (None, each["step"])
            if step is None and calm:
                assert each["step"] >= max(account.certain(), default=0)
            if line[0] == "load":
                stored_one = Structure.of(each["version"])
                assert not Structure.of(line[2]).refuses(stored_one, options=line[3]), (line, each)

    def prune(self, words: list[str]) -> None:
        if words[0] == "prune":
            keep = {"1": "last", "2": "two"}[words[3]] if words[2] == "--keep-last" else "every"
            self.account.retain(keep)

    def judge_command(self, words: list[str], answer: dict[str, Any] | None, *, calm: bool) -> None:
        self.log.append(f"    $ {' '.join(words)} -> {str(answer)[:300]}")
        account = self.account
        if answer is None:
            return
        code, out, err = answer["code"], answer["out"], answer["err"]
        assert "Traceback" not in err, err
        assert len(err.splitlines()) <= 2, err
        verb = words[0]
        if verb == "prune":
            self.prune(words)
        if verb == "tag" and "--remove" in words:
            name = words[words.index("--remove") + 1]
            assert (code == 0) == (name in account.tags), (words, answer)
            account.tags.pop(name, None)
            return
        if verb == "tag":
            step, name = int(words[2]), words[3]
            if code == 0:
                account.tags[name] = step
                if calm:
                    account.of(step).discard(None)
            else:
                assert None in account.of(step), (words, answer)
            return
        if verb in ("ls", "prune", "repair"):
            is_there = self.root.is_dir()
            assert code == 0 or not is_there or not account.certain(), (words, answer)
            if verb == "ls" and code == 0 and calm:
                steps = {each["step"] for each in json.loads(out)["steps"]}
                assert {*account.certain()} <= steps <= {*account.possible()}, (steps, account)
            return
        if "--step" in words:
            step = int(words[words.index("--step") + 1])
            assert code == (0 if None not in account.of(step) else code), (words, answer)
            assert code in (0, 2), answer
            return
        assert code == 0 or not account.certain(), (words, answer)
        if code != 0:
            return
        if verb in ("copy", "convert") and "dcp" not in words:
            found = stored(Path(words[2]))
            ((step, version),) = found.items()
            assert version in account.of(step) or not calm

    # Between jobs

    def between(self) -> None:
        kind = self.random.choice(["command", "command", "rename", "copy", "link", "aside", "gone"])
        self.log.append(f"between: {kind}")
        if kind == "command":
            words = self.a_command()
            self.judge_command(words, ended(start(words)), calm=True)
            return
        if not self.root.is_dir():
            return
        if kind == "rename":
            away = self.place / f"renamed{self.random.random()}"
            os.rename(self.root, away)
            self.root = away
        elif kind == "copy":  # the run goes on in the copy
            copy = self.place / f"copy{self.random.random()}"
            subprocess.run(["cp", "-r", str(self.root), str(copy)], check=True)
            shutil.rmtree(self.root)
            self.root = copy
        elif kind == "link" and not self.root.is_symlink():
            away = self.place / f"linked{self.random.random()}"
            os.rename(self.root, away)
            self.root.symlink_to(away)
        elif kind in ("aside", "gone") and self.account.possible():
            step = self.random.choice(self.account.possible())
            if kind == "aside":
                os.rename(self.root / step_dir(step), self.root / f"{step_dir(step)}.bak")
                shutil.rmtree(self.root / f"{step_dir(step)}.bak")
            else:
                shutil.rmtree(self.root / step_dir(step))
            self.account.may_be[step] = {None}

    def settle(self) -> None:
        """Wait for writers that outlived their job, and compare the directory with the account."""
        if not self.root.is_dir():
            assert not self.account.certain()
            return
        with Checkpointer(self.root, settle_s=30.0) as checkpointer:
            checkpointer.latest()
        found = stored(self.root)
        self.account.narrow(found)
        storage = PosixStorage(self.root)
        assert list_tags(storage) == self.account.tags
        fates = repair(storage, alive_s=0.0)
        assert not [each for each in fates if each.fate == "kept"], fates
        self.account.narrow(stored(self.root))
        left = [name for name in leftovers(self.root) if not name.startswith("tags")]
        assert left == [], left
        if found:
            assert (self.root / LATEST).read_text().strip() == str(max(found))


def stored(root: Path) -> dict[int, int]:
    """Step -> its version, each verified and loaded whole."""
    found: dict[int, int] = {}
    storage = PosixStorage(root)
    for step in list_steps(storage):
        assert verify_snapshot(storage, step_dir(step)) == []
        with Checkpointer(root, settle_s=0.0) as checkpointer:
            report = checkpointer.load_all(step=step)
        version = report.values["values"]["version"]
        structure = Structure.of(version)
        whole = shards_of(version, structure, 0, 1)[structure.name].local  # type: ignore[attr-defined]
        assert torch.equal(report.values["shards"][structure.name], whole)
        model = report.values["model"]
        assert all(each.unique().tolist() == [version] for each in model.values())
        found[step] = version
    return found


def follow(place: Path, seed: int, num_jobs: int) -> None:
    """Draw and judge; a failure names the seed and what was done."""
    place.mkdir()
    jobs = Jobs(place, seed)
    try:
        jobs.go(num_jobs)
    except BaseException as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(jobs.log))
        raise

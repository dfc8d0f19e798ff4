"""O8: what goes wrong on one rank, at any line of a save or load, is raised on all of them."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import (
    RNG,
    Checkpointer,
    Layout,
    OptimizerState,
    PerRank,
    ProcessGroups,
    Sharded,
    Stored,
)
from holdfast.checkpoint.plan import planner as local_module
from holdfast.checkpoint.plan.rank_plan import LocalState
from holdfast.errors import ConfigError, HoldfastError, MismatchError, PlanError, StorageError
from holdfast.format.values import Codecs
from holdfast.storage import PosixStorage
from holdfast.writer import job
from holdfast.writer.memory import SharedMemory
from holdfast.writer.records import DoneRecord
from tests.checkpoint.common import assert_equal, full, make_state, wait
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(dp=2)
ROOM = Path(holdfast.__file__).parent
Place = tuple[str, int]


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


class Injected(Exception):
    """What the tests raise where nobody expects it."""


class Tracer:
    """Sees the lines of some rooms that this thread runs; may raise where it first meets one.

    By its place and not by its number among all: a rank that waits longer runs more lines.
    """

    def __init__(self, error: BaseException | None = None, at: Place | None = None) -> None:
        self.places: list[Place] = []
        self.entries: list[int] = []
        """Indices in `places` of the first line after a function was entered."""
        self.has_raised = False
        self._error, self._at = error, at

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith((f"{ROOM}/checkpoint/", f"{ROOM}/state/")):
            return None
        if frame.f_code.co_name in ("timed", "lasting"):  # around the guard: they read the clock
            return None
        if event == "call":
            # The next line that this thread runs in these rooms is the first one of the function.
            self.entries.append(len(self.places))
        if event == "line":
            self.places.append((name, frame.f_lineno))
            if self.places[-1] == self._at and not self.has_raised:
                assert self._error is not None
                self.has_raised = True
                raise self._error
        return self

    def run(self, action: Callable[[], Any]) -> Any:
        """Call `action`, watched."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return action()
        finally:
            sys.settrace(before)


def every_line(tracer: Tracer) -> list[Place]:
    """Each line in checkpoint/, and one in four of state/, as they were first met."""
    lines = list(dict.fromkeys(tracer.places))
    of_state = [line for line in lines if "/state/" in line[0]]
    return [line for line in lines if line not in of_state] + of_state[::4]


def every_function(tracer: Tracer) -> list[Place]:
    """The first line of each function of both rooms: as its caller sees it, it raises at once."""
    entries = (number for number in tracer.entries if number < len(tracer.places))
    return list(dict.fromkeys(tracer.places[number] for number in entries))


PLACES = {"lines": every_line, "functions": every_function}


class Bench:
    """One rank of a pair that saves and loads again and again."""

    def __init__(self, context: RankContext, root: str, groups: ProcessGroups) -> None:
        self.rank, self.groups = context.rank, groups
        self.layout = groups.layout
        self.checkpointer = Checkpointer(root, groups=groups, deadline_s=30)
        self.step = 0
        torch.manual_seed(0)
        self.model = nn.Linear(512, 512)
        """Large enough to be copied later by a lazy save."""
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.weight.grad = torch.ones(512, 512)
        self.optimizer.step()

    def state(self, *, extra: bool = False) -> dict[str, object]:
        """The truth; `extra`: with one tensor more, so that all is planned again."""
        state = make_state(self.layout, self.rank) | {"rng": RNG()}
        if extra:
            state["extra"] = {"t": full("extra", (3,))}
        return state

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def operation(self, name: str) -> Callable[[], Any]:
        """What is injected into, with everything made that it takes; at the next step."""
        made = self._blank() if "load" in name else self.state(extra="planned" in name)
        step, checkpointer = self.next_step(), self.checkpointer
        if "lazily" in name:
            made |= {
                "model": self.model,
                "optimizer": OptimizerState(self.optimizer, self.model),
            }
        return {
            "save": lambda: checkpointer.save(step, made),
            "save, planned": lambda: checkpointer.save(step, made),
            "async": lambda: checkpointer.save_async(step, made),
            "async, planned": lambda: checkpointer.save_async(step, made),
            "async, lazily": lambda: checkpointer.save_async(step, made, stage="lazily"),
            "prepare": lambda: checkpointer.prepare(made),
            "load": lambda: checkpointer.load(made),
            "load, fallback": lambda: checkpointer.load(made, max_fallbacks=None),
        }[name]

    def _blank(self) -> dict[str, object]:
        return make_state(self.layout, self.rank, blank=True) | {"rng": RNG()}

    def check(self) -> None:
        """A clean save and load work, and what is loaded is right, bit for bit."""
        report = self.checkpointer.save(self.next_step(), self.state())
        blank = self._blank()
        assert self.checkpointer.load(blank).step == self.step
        assert_equal(blank, self.layout, self.rank)
        if self.rank == 0:
            # Hundreds of steps in one directory would be listed by every operation. The newest
            # five stay: what other ranks may still look at, and what `fallback` may go back to.
            for old in sorted(Path(report.path).parent.glob("iter_*"))[:-5]:
                shutil.rmtree(old)

    def meet(self, operation: str, tracer: Tracer | None) -> tuple[str, str]:
        """Run it, with a fault of this rank or none: how it ended here, and the text."""
        action = self.operation(operation)
        try:
            found = tracer.run(action) if tracer is not None else action()
            if operation.startswith("async"):
                found.result(60)
        except HoldfastError as caught:
            return "raised", str(caught)
        except KeyboardInterrupt as caught:
            return "interrupted", str(caught)
        return "done", ""


def inject(
    context: RankContext,
    root: str,
    operations: list[str],
    places: str,
    step: int,
    kind: type[BaseException],
) -> dict[str, Counter[str]]:
    """A fault at every `step`-th place of each operation, on each rank in turn; all checked."""
    found: dict[str, Counter[str]] = {}
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=30) as groups:
        bench = Bench(context, root, groups)
        bench.check()
        for number, operation in enumerate(operations):
            counter = found.setdefault(operation, Counter())
            for victim in range(context.num_ranks):
                bench.check()
                tracer = Tracer()
                result = tracer.run(bench.operation(operation))
                if operation.startswith("async"):
                    result.result(60)
                lines = PLACES[places](tracer)[(number + victim) % step :: step]
                share = groups.control.all_gather(repr(lines).encode(), phase="test: lines")
                for at in eval(share[victim]):
                    bench.check()
                    fault = Tracer(kind("injected"), at) if context.rank == victim else None
                    ended = bench.meet(operation, fault)
                    judge(bench, operation, victim, fault, ended, counter)
        bench.check()
        bench.checkpointer.close()
    return found


def judge(
    bench: Bench,
    operation: str,
    victim: int,
    fault: Tracer | None,
    ended: tuple[str, str],
    counter: Counter[str],
) -> None:
    """All ranks raised the same; or a save was complete before the fault."""
    where = fault.places[-1] if fault is not None and fault.has_raised else None
    mine = repr((*ended, where)).encode()
    ends = [eval(end) for end in bench.groups.control.all_gather(mine, phase="test: ends")]
    kinds = [kind for kind, _, _ in ends]
    if ends[victim][2] is None:  # a path of a rank that waits, or of a first call
        assert set(kinds) == {"done"}, ends
        counter["not reached"] += 1
        return
    if "done" not in kinds:
        assert all("injected" in text for _, text, _ in ends), (operation, ends)
        counter["raised"] += 1
        return
    if operation.startswith("save"):  # keeping the plan follows the commit, and is only logged
        assert ends[victim][2][0].endswith(("kept_plans.py", "planner.py", "saver.py")), ends
        assert set(kinds) == {"done"}, ends
        assert bench.checkpointer.latest() == bench.step
        counter["after the commit"] += 1
        return
    assert operation.startswith("async"), (operation, ends)
    assert {kind for rank, kind in enumerate(kinds) if rank != victim} == {"done"}, ends
    assert bench.checkpointer.latest() == bench.step
    counter["complete"] += 1


ALL = [
    "save",
    "save, planned",
    "async",
    "async, planned",
    "async, lazily",
    "prepare",
    "load",
    "load, fallback",
]


def _assert_met(results: list[dict[str, Counter[str]]], operations: list[str]) -> None:
    for found in results:
        assert list(found) == operations
        for operation, counter in found.items():
            assert counter["raised"] > 0, found
            assert counter["complete"] <= counter["raised"] / 3, (operation, counter)
            assert counter["not reached"] <= counter["raised"] / 20 + 2, (operation, counter)


@pytest.mark.parametrize("step", [2393, pytest.param(197, marks=pytest.mark.slow)])
def test_a_fault_at_a_sample_of_lines_reaches_both_ranks(tmp_path: Path, step: int) -> None:
    results = run_ranks(
        2, inject, str(tmp_path), ALL, "lines", step, Injected, timeout_s=280
    ).results
    _assert_met(results, ALL)


@pytest.mark.parametrize("step", [3607, pytest.param(307, marks=pytest.mark.slow)])
def test_an_interrupt_reaches_all_of_three_ranks(tmp_path: Path, step: int) -> None:
    """KeyboardInterrupt stays what it is on its own rank; the others say who was interrupted."""
    operations = ["save", "async, planned", "load"]
    results = run_ranks(
        3, inject, str(tmp_path), operations, "lines", step, KeyboardInterrupt, timeout_s=280
    ).results
    _assert_met(results, operations)


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        # Every seventh on each rank, so that the ranks have other functions.
        *(pytest.param(each, 7, marks=pytest.mark.slow) for each in ("async", "load")),
        *(pytest.param(each, 1, marks=pytest.mark.nightly) for each in ALL),
    ],
)
def test_a_fault_in_every_function_reaches_both_ranks(
    tmp_path: Path, operation: str, step: int
) -> None:
    results = run_ranks(
        2, inject, str(tmp_path), [operation], "functions", step, Injected, timeout_s=280
    ).results
    _assert_met(results, [operation])


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("operation", ALL)
def test_a_fault_at_every_line_reaches_both_ranks(tmp_path: Path, operation: str) -> None:
    results = run_ranks(
        2, inject, str(tmp_path), [operation], "lines", 1, Injected, timeout_s=7000
    ).results
    _assert_met(results, [operation])


def _finished(saved: holdfast.SaveReport | holdfast.PendingSave) -> holdfast.SaveReport:
    return saved.result(60) if isinstance(saved, holdfast.PendingSave) else saved


class Odd:
    """A stateful object that raises where it is asked, on one rank."""

    def __init__(self, error: BaseException | None, *, at_load: bool = False) -> None:
        self.error, self.at_load = error, at_load

    def state_dict(self) -> dict[str, object]:
        if self.error is not None and not self.at_load:
            raise self.error
        return {"n": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if self.error is not None and self.at_load:
            raise self.error


Wrong = tuple[str, tuple[Any, ...], dict[str, Any], str]


def wrong_calls() -> list[Wrong]:
    """Method, arguments, keywords of one rank that are wrong; what all ranks are to read of it."""
    state = {"t": {"x": torch.ones(3)}, "o": Odd(None)}
    wrong: list[Wrong] = []
    for method in ("save", "save_async"):
        wrong += [
            (method, (10**30, state), {}, "10**18"),
            (method, (-1, state), {}, "10**18"),
            (method, ("x", state), {}, "step must be an integer in [0, 10**18)"),
            (method, (True, state), {}, "step must be an integer in [0, 10**18)"),
            (
                method,
                (9, state),
                {"overwrite": "yes"},
                "overwrite must be True or False, got 'yes'",
            ),
            (
                method,
                (9, state),
                {"check_replicas": None},
                "check_replicas must be True or False, got None",
            ),
            (method, (9, [1]), {}, "got list"),
            (method, (9, {"": 1}), {}, "part name"),
            (method, (9, state | {"z": object()}), {}, "z"),
            (method, (9, state), {"unknown": 1}, "unknown"),
            (method, (), {}, "missing"),
            (
                method,
                (9, state | {"o": Odd(MemoryError("no more"))}),
                {},
                "state part 'o': MemoryError: no more",
            ),
            (method, (9, state | {"o": Odd(KeyboardInterrupt())}), {}, "KeyboardInterrupt"),
            (method, (9, state | {"o": Odd(SystemExit(3))}), {}, "SystemExit: 3"),
            (method, (8, state), {}, "disagree on step"),
            (method, (9, state), {"overwrite": True}, "disagree on overwrite"),
        ]
    wrong += [
        (
            "save_async",
            (9, state),
            {"when_busy": "x"},
            "when_busy must be 'wait' or 'skip'",
        ),
        ("prepare", (3,), {}, "got int"),
        ("load", (state,), {"step": "x"}, "step must be an integer in [0, 10**18)"),
        ("load", (state,), {"step": 0}, "disagree on step"),
        ("load", (state,), {"exchange": False}, "disagree on exchange"),
        ("load", (state,), {"verify": False}, "disagree on verify"),
        ("load", (state,), {"cast": 1}, "cast must be True or False, got 1"),
        (
            "load",
            (state,),
            {"max_fallbacks": -1},
            "max_fallbacks must be an integer of at least 0, got -1",
        ),
        (
            "load",
            (state,),
            {"max_fallbacks": "x"},
            "max_fallbacks must be an integer of at least 0, got 'x'",
        ),
        ("load", (state,), {"max_fallbacks": None}, "disagree on max_fallbacks"),
        ("load", (state,), {"max_fallbacks": 2}, "disagree on max_fallbacks"),
        ("load", (state,), {"step": 10**30}, "10**18"),
        ("load", (state,), {"step": -1}, "10**18"),
        ("load", (state,), {"allow_missing": [3]}, "allow_missing"),
        (
            "load",
            (state,),
            {"allow_missing": 3},
            "allow_missing must be a pattern or several, got 3",
        ),
        ("load", (state,), {"allow_dropped": [3]}, "allow_dropped"),
        (
            "load",
            (state,),
            {"allow_dropped": None},
            "allow_dropped must be a pattern or several, got None",
        ),
        ("load", (None,), {}, "load(None)"),
        (
            "load",
            (state | {"o": Odd(OSError("gone"), at_load=True)},),
            {},
            "state part 'o': OSError: gone",
        ),
        ("load", (state | {"o": Odd(KeyboardInterrupt(), at_load=True)},), {}, "KeyboardInterrupt"),
    ]
    return wrong


def call_wrongly(context: RankContext, root: str, victim: int) -> list[str]:
    """Each wrong call on one rank, a right one on the other; then a right one on both."""
    found = []
    right: dict[str, tuple[Any, ...]] = {}
    state = {"t": {"x": torch.ones(3)}, "o": Odd(None)}
    with ProcessGroups.create(LAYOUT, timeout_s=30) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(0, state)
        right = {"save": (9, state), "save_async": (9, state), "prepare": (state,)}
        right["load"] = (state,)
        for number, (method, args, keywords, text) in enumerate(wrong_calls(), start=10):
            call = getattr(checkpointer, method)
            if context.rank != victim:
                args, keywords = right[method], {}
            with pytest.raises((HoldfastError, KeyboardInterrupt, SystemExit)) as caught:
                call(*args, **keywords)
            if isinstance(caught.value, HoldfastError):
                assert text in str(caught.value), (number, text, str(caught.value))
                assert "disagree" in text or f"rank {victim}: " in str(caught.value)
            else:
                assert context.rank == victim
                assert type(caught.value).__name__ in text
            assert checkpointer.latest() == (number - 1 if number > 10 else 0)
            report = checkpointer.save(number, state)
            assert report.path.endswith(f"{number:07d}")
            found.append(type(caught.value).__name__)
        # Two ranks fail in two places: both are listed.
        broken = state | {"o": Odd(ValueError("here"))}
        with pytest.raises(HoldfastError) as both:
            checkpointer.save(*((200, broken) if context.rank else ("x", state)))
        assert "2 of 2 ranks failed" in str(both.value)
        assert "rank 0: step must be" in str(both.value)
        assert "rank 1: state part 'o': ValueError: here" in str(both.value)
        with pytest.raises(PlanError, match="disagree on kind"):
            (checkpointer.save if context.rank else checkpointer.save_async)(300, state)
        checkpointer.save_async(301, state).result(60)
        leave_on_one_rank(checkpointer, is_victim=context.rank == victim)
        checkpointer.close()
    return found


def leave_on_one_rank(checkpointer: Checkpointer, *, is_victim: bool) -> None:
    """What only one of the ranks that ask for a part would leave, before a target is touched."""
    torch.manual_seed(0)
    checkpointer.save(302, {"m": nn.Linear(2, 1)})
    target = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(target.weight)
    with pytest.raises(MismatchError, match=r"2 of 2 ranks failed[\s\S]*does not ask for: m.bias"):
        checkpointer.load({"m": target}, ignore_unexpected=["m.bias"] if is_victim else ["other"])
    assert not target.weight.any()
    checkpointer.load({"m": target}, ignore_unexpected=["m.bias"] if is_victim else True)
    assert target.weight.any()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_wrong_arguments_of_one_rank_are_raised_on_both(tmp_path: Path, victim: int) -> None:
    """E9: before a target is touched on any of them."""
    first, second = run_ranks(2, call_wrongly, str(tmp_path), victim, timeout_s=280).results
    assert len(first) == len(wrong_calls())
    for mine, theirs in ((first, second) if victim == 0 else (second, first),):
        for one, other in zip(mine, theirs, strict=True):
            assert one == other or (one in ("KeyboardInterrupt", "SystemExit"))


def test_a_lone_process_raises_errors_of_the_hierarchy(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match=r"^step must be an integer in \[0, 10\*\*18\), got 1000"):
        checkpointer.save(10**30, {})
    with pytest.raises(HoldfastError, match="ValueError: odd") as caught:
        checkpointer.save(1, {"o": Odd(ValueError("odd"))})
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save_async(1, {"o": Odd(KeyboardInterrupt())})
    checkpointer.save(1, {"o": Odd(None)})
    with pytest.raises(HoldfastError, match="OSError: gone"):
        checkpointer.load({"o": Odd(OSError("gone"), at_load=True)})
    assert checkpointer.steps() == [1]


def hear(context: RankContext, root: str) -> None:
    """A save that fails at its commit, and every choice of ranks that call `result`."""
    own = {"v": {"rank": context.rank}}  # values differ: refused when it is committed
    good: dict[str, object] = {"t": {"x": torch.ones(4)}}
    with ProcessGroups.create(LAYOUT, timeout_s=30) as groups:
        for number, callers in enumerate([(0, 1), (0,), (1,), ()]):
            for closing in (False, True):
                step = 10 * number + 5 * closing
                checkpointer = Checkpointer(root, groups=groups)
                pending = checkpointer.save_async(step, good | own)
                wait(pending)
                mine = context.rank in callers
                if mine:
                    with pytest.raises(PlanError, match=r"v\.rank"):
                        pending.result(60)
                groups.control.barrier(phase="test: result")
                if not closing and len(callers) < 2:
                    with pytest.raises(PlanError, match=r"v\.rank"):
                        checkpointer.save(step, good)
                if closing and not mine:
                    with pytest.raises(PlanError, match=r"v\.rank"):
                        checkpointer.close()
                    checkpointer.close()
                if not closing:
                    checkpointer.save_async(step, good).result(60)
                    assert checkpointer.latest() == step
                checkpointer.close()
                groups.control.barrier(phase="test: closed")


def test_each_failure_is_raised_once_to_each_rank(tmp_path: Path) -> None:
    """By `result`, or else by the next save on all ranks together, or else by `close`."""
    run_ranks(2, hear, str(tmp_path), timeout_s=120)


def test_all_failures_of_two_buffers_are_raised_together(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, staging_buffers=2)
    state = {"t": {"x": torch.ones(4)}}
    first, second = checkpointer.save_async(1, state), checkpointer.save_async(2, state)
    for pending in (first, second):
        wait(pending)
        pending._save.failure = StorageError(f"no step {pending.step}")
    with pytest.raises(StorageError, match=r"2 earlier saves failed: no step 1; no step 2"):
        checkpointer.save(3, state)
    checkpointer.save(3, state)
    checkpointer.close()


def hold_different_plans(context: RankContext, root: str) -> list[bool]:
    planned = []
    with ProcessGroups.create(LAYOUT) as groups, Checkpointer(root, groups=groups) as checkpointer:
        state = make_state(LAYOUT, context.rank)
        planned.append(checkpointer.save(1, state).planned)
        plans = checkpointer._saver._handshake.planner._plans
        for step, save in ((2, checkpointer.save), (4, checkpointer.save_async)):
            if context.rank == 1:
                # A plan that fits this rank and is not the one that the others hold.
                object.__setattr__(plans[False], "plan_digest", "f" * 32)
            planned.append(_finished(save(step, state)).planned)
            planned.append(checkpointer.save(step + 1, state).planned)
            plans = checkpointer._saver._handshake.planner._plans
        blank = make_state(LAYOUT, context.rank, blank=True)
        checkpointer.load(blank)
        assert_equal(blank, LAYOUT, context.rank)
        assert checkpointer.stats.num_plans == 3
    return planned


def test_ranks_with_different_plans_plan_again(tmp_path: Path) -> None:
    results = run_ranks(2, hold_different_plans, str(tmp_path)).results
    assert results == [[True, True, False, True, False]] * 2


def write_under_another_plan(context: RankContext, root: str) -> list[str]:
    said = []
    make = job.DoneRecord

    def lie(**fields: Any) -> DoneRecord:
        return make(**{**fields, "plan_digest": "0" * 32})

    with ProcessGroups.create(LAYOUT) as groups:
        # A thread writes where no other process can: the lie is in this process.
        storage = Unshared(root)
        checkpointer = Checkpointer(storage, groups=groups, deadline_s=30)
        state = make_state(LAYOUT, context.rank)
        checkpointer.save(1, state)
        for step, save in ((2, checkpointer.save), (3, checkpointer.save_async)):
            with pytest.MonkeyPatch.context() as patch:
                if context.rank == 1:
                    patch.setattr(job, "DoneRecord", lie)
                with pytest.raises(PlanError) as caught:
                    _finished(save(step, state))
            said.append(str(caught.value))
            assert checkpointer.steps() == [1]
        checkpointer.save(4, state)
        checkpointer.close()
    return said


def test_a_record_written_under_another_plan_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, write_under_another_plan, str(tmp_path)).results:
        assert len(said) == 2
        assert all(f"wrote under plan {'0' * 32}" in text for text in said)


class Clones:
    """Gives tensors and an array made again each time, as many state_dicts do."""

    def __init__(self, num: int) -> None:
        self.tensors = {f"t{i}": torch.full((i % 3, 2), float(i)) for i in range(num)}
        self.count = 0

    def state_dict(self) -> dict[str, object]:
        self.count += 1
        self.tensors["t1"].fill_(self.count)
        cloned: dict[str, object] = {key: t.clone() for key, t in self.tensors.items()}
        return cloned | {"array": self.tensors["t2"].numpy().copy(), "n": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def _planner(root: Path) -> local_module.Planner:
    return local_module.Planner(
        PosixStorage(root), ProcessGroups.single(), codecs=Codecs(), block_nbytes=1 << 20
    )


def test_fresh_tensors_of_equal_structure_keep_table_and_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, clones and arrays made again for each save: nothing is tabled or signed again."""
    calls: Counter[str] = Counter()
    for name in ("claims_of", "encode_claims", "signature", "digest128"):
        whole = getattr(local_module, name)

        def counted(*args: Any, name: str = name, whole: Any = whole, **keywords: Any) -> Any:
            calls[name] += 1
            return whole(*args, **keywords)

        monkeypatch.setattr(local_module, name, counted)
    model = {f"w{i}": torch.zeros(3) for i in range(50)}
    clones = Clones(9)
    state: dict[str, object] = {"model": model, "rng": RNG(), "loader": clones}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        once = calls.copy()
        assert once["claims_of"] == 1
        for step in range(1, 5):
            torch.rand(step)
            torch_state = torch.get_rng_state()
            save = checkpointer.save if step % 2 else checkpointer.save_async
            assert not _finished(save(step, state)).planned
            found = checkpointer.load({"loader": Stored(), "rng": Stored()}, step=step).values
            loader: Any = found["loader"]
            assert loader["n"] == clones.count
            assert torch.equal(loader["t1"], torch.full((1, 2), float(clones.count)))
            assert torch.equal(torch_state, torch.get_rng_state())
        assert calls == once
        assert (checkpointer.stats.num_plans, checkpointer.stats.num_allocations) == (1, 1)
        clones.tensors["t5"] = clones.tensors["t5"].double()
        assert checkpointer.save(9, state).planned
        assert calls["claims_of"] == 2


def test_what_is_used_again_is_what_would_be_made_again(tmp_path: Path) -> None:
    """Over many small changes of structure and memory, with and without the save before."""
    generator = torch.Generator().manual_seed(7)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    shapes = [(), (3,), (0, 2), (2, 2), (4, 3)]
    tree: dict[str, object] = {}
    planner = _planner(tmp_path)
    before: LocalState | None = None
    num_kept = 0
    for _ in range(400):
        key = f"k{draw(6)}"
        dtype = (torch.float32, torch.int64)[draw(2)]
        match draw(5):
            case 0:
                tree[key] = torch.rand(shapes[draw(5)], generator=generator).to(dtype)
            case 1:
                tree.pop(key, None)
            case 2:
                rows = draw(3)
                tree[key] = Sharded(torch.rand(2, 2), (4, 2), offset=(rows, 0), over=("dp",))
            case 3:
                tree[key] = PerRank({"t": torch.rand(shapes[draw(5)], generator=generator)})
            case _:
                tree = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
        state: dict[str, object] = {"part": dict(tree)}
        found = planner.flatten(state)
        fresh = _planner(tmp_path).flatten(state)
        num_kept += before is not None and found.table is before.table
        assert found.signature == fresh.signature
        assert found.names == fresh.names
        assert found.rows == fresh.rows
        assert found.values == fresh.values
        assert found.table.names == fresh.table.names
        sources = [[each.source(i) for i in range(len(each.rows))] for each in (found, fresh)]
        assert [t.data_ptr() for t in sources[0]] == [t.data_ptr() for t in sources[1]]
        assert [t.shape for t in sources[0]] == [t.shape for t in sources[1]]
        before = found
    assert 50 < num_kept < 400


def test_memory_half_laid_out_is_not_used(tmp_path: Path) -> None:
    """A staging memory that grew when the save failed is given to the writer again."""
    small = {"t": {"x": torch.ones(10)}}
    large = {"t": {"x": torch.full((100_000,), 7.0)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(1, small).result(60)
        whole = SharedMemory.reserve

        def failing(memory: SharedMemory, nbytes: int) -> memoryview:
            view = whole(memory, nbytes)
            memory.num_allocations -= 1  # as if interrupted just before it was counted
            del view
            raise MemoryError("interrupted")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedMemory, "reserve", failing)
            pending = checkpointer.save_async(2, large)
        with pytest.raises(StorageError, match="interrupted"):
            pending.result(60)
        checkpointer.save_async(3, large).result(60)
        blank = {"t": {"x": torch.zeros(100_000)}}
        assert checkpointer.load(blank).step == 3
        assert torch.equal(blank["t"]["x"], large["t"]["x"])

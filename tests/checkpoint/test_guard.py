"""O8: what goes wrong on one rank, at any line of a save or load, is raised on all of them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import holdfast
from holdfast import RNG, Checkpointer, Layout, PerRank, ProcessGroups, Sharded, Stored
from holdfast.checkpoint import local as local_module
from holdfast.checkpoint.stage import Arena
from holdfast.errors import ConfigError, HoldfastError, PlanError, StorageError
from holdfast.writer.records import DoneRecord
from holdfast.writer.write import WriteJob
from tests.checkpoint.common import assert_equal, full, make_state
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(dp=2)
ROOM = Path(holdfast.__file__).parent
Place = tuple[str, int]


class Injected(Exception):
    """What the tests raise where nobody expects it."""


class Tracer:
    """Sees the lines of some rooms that this thread runs; may raise at one of them."""

    def __init__(self, error: BaseException | None = None, at: int = -1) -> None:
        self.places: list[Place] = []
        self._error, self._at = error, at

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith((f"{ROOM}/checkpoint/", f"{ROOM}/state/")):
            return None
        if event == "line":
            self.places.append((name, frame.f_lineno))
            if len(self.places) - 1 == self._at:
                assert self._error is not None
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


def first_events(places: list[Place], *, step: int, offset: int) -> list[int]:
    """For each line its first event: all of checkpoint/, one in four of state/; of those a part."""
    first: dict[Place, int] = {}
    for number, place in enumerate(places):
        first.setdefault(place, number)
    of_state = [n for (name, _), n in first.items() if "/state/" in name]
    ours = [n for (name, _), n in first.items() if "/state/" not in name]
    return sorted(ours[offset::step] + of_state[offset :: 4 * step])


class Bench:
    """One rank of a pair that saves and loads again and again."""

    def __init__(self, context: RankContext, root: str, groups: ProcessGroups) -> None:
        self.rank, self.groups = context.rank, groups
        self.layout = groups.layout
        self.checkpointer = Checkpointer(root, groups=groups, deadline_s=30)
        self.step = 0

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
        return {
            "save": lambda: checkpointer.save(step, made),
            "save, planned": lambda: checkpointer.save(step, made),
            "async": lambda: checkpointer.save_async(step, made),
            "async, planned": lambda: checkpointer.save_async(step, made),
            "prepare": lambda: checkpointer.prepare(made),
            "load": lambda: checkpointer.load(made),
            "load, fallback": lambda: checkpointer.load(made, fallback=True),
        }[name]

    def _blank(self) -> dict[str, object]:
        return make_state(self.layout, self.rank, blank=True) | {"rng": RNG()}

    def check(self) -> None:
        """A clean save and load work, and what is loaded is right, bit for bit."""
        self.checkpointer.save(self.next_step(), self.state())
        blank = self._blank()
        assert self.checkpointer.load(blank).step == self.step
        assert_equal(blank, self.layout, self.rank)

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
    context: RankContext, root: str, operations: list[str], step: int, kind: type[BaseException]
) -> dict[str, Counter[str]]:
    """Every `step`-th line of each operation on each rank in turn; what was found, all checked."""
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
                events = first_events(tracer.places, step=step, offset=(number + victim) % step)
                share = groups.control.all_gather(repr(events).encode(), phase="test: events")
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
    """All ranks raised the same; or an asynchronous save was complete before the fault."""
    mine = repr((*ended, fault.places[-1] if fault is not None else "")).encode()
    ends = [eval(end) for end in bench.groups.control.all_gather(mine, phase="test: ends")]
    kinds = [kind for kind, _, _ in ends]
    if "done" not in kinds:
        assert all("injected" in text for _, text, _ in ends), (operation, ends)
        counter["raised"] += 1
        return
    assert operation.startswith("async"), (operation, ends)
    assert {kind for rank, kind in enumerate(kinds) if rank != victim} == {"done"}, ends
    assert bench.checkpointer.latest() == bench.step
    counter["complete"] += 1


ALL = ["save", "save, planned", "async", "async, planned", "prepare", "load", "load, fallback"]


def _assert_met(results: list[dict[str, Counter[str]]], operations: list[str]) -> None:
    for found in results:
        assert list(found) == operations
        for operation, counter in found.items():
            assert counter["raised"] > 0, found
            assert counter["complete"] <= 0.1 * counter.total(), (operation, counter)


def test_a_fault_at_a_sample_of_lines_reaches_both_ranks(tmp_path: Path) -> None:
    results = run_ranks(2, inject, str(tmp_path), ALL, 61, Injected, timeout_s=280).results
    _assert_met(results, ALL)


def test_an_interrupt_reaches_all_of_three_ranks(tmp_path: Path) -> None:
    """KeyboardInterrupt stays what it is on its own rank; the others say who was interrupted."""
    operations = ["save", "async, planned", "load"]
    results = run_ranks(
        3, inject, str(tmp_path), operations, 149, KeyboardInterrupt, timeout_s=280
    ).results
    _assert_met(results, operations)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("operations", [ALL[:2], ALL[2:4], ALL[4:]], ids=str)
def test_a_fault_at_every_line_reaches_both_ranks(tmp_path: Path, operations: list[str]) -> None:
    results = run_ranks(2, inject, str(tmp_path), operations, 1, Injected, timeout_s=1400).results
    _assert_met(results, operations)

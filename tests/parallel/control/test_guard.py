"""The guard over every kind of call: who fails, where, how often, and what goes on after it."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from holdfast.errors import (
    CorruptionError,
    DeadlineError,
    GroupError,
    HoldfastError,
    PlanError,
    StorageError,
)
from holdfast.parallel import Control, Layout, ProcessGroups
from holdfast.parallel.control.guard import Guard
from tests.harness import RankContext, run_ranks

Step = Callable[[Control, int], Any]

STEPS: dict[str, Step] = {
    "agree": lambda c, n: c.agree(None, phase="p", payload=b"x" * n),
    "all_gather": lambda c, n: c.all_gather(b"x" * n, phase="p"),
    "gather": lambda c, n: c.gather(b"x" * n, phase="p"),
    "scatter": lambda c, n: c.scatter([b"y" * n] * c.size if c.index == 0 else None, phase="p"),
    "broadcast": lambda c, n: c.broadcast(b"z" * n if c.index == 0 else None, phase="p"),
    "barrier": lambda c, n: c.barrier(phase="p"),
    "exchange": lambda c, n: c.exchange([], [], phase="p"),
}


def still_well(control: Control) -> None:
    assert control.all_gather(b"%d" % control.index, phase="well") == [
        b"%d" % i for i in range(control.size)
    ]


def every_call(context: RankContext) -> int:
    num = 0
    with ProcessGroups.create(Layout(dp=3), names=[], timeout_s=20) as groups:
        control = groups.control
        for (name, step), victim, long in itertools.product(STEPS.items(), range(3), (False, True)):
            text = f"{name} " + ("long " * 400 if long else "")

            def body(step: Step = step, victim: int = victim, text: str = text) -> str:
                control.agree(None, phase="first")
                if context.rank == victim:
                    raise ValueError(text)
                step(control, 2000 if long else 5)  # noqa: B023
                return "done"

            with pytest.raises(HoldfastError) as caught:
                Guard(control, "op").run(body)
            assert str(caught.value) == (
                f"1 of 3 ranks failed (p):\nrank {victim}: ValueError: {text}"
            )
            assert isinstance(caught.value.__cause__, ValueError) == (context.rank == victim)
            still_well(control)
            num += 1
        others(control, context.rank)
    return num


def others(control: Control, rank: int) -> None:
    """Failures of several, after the last call, on all ranks, of interrupts, and nested ones."""

    def raising(error: BaseException | None) -> None:
        if error is not None:
            raise error

    undone: list[int] = []
    guard = Guard[None](control, "op", undo=lambda: undone.append(1))
    with pytest.raises(StorageError, match=r"2 of 3 ranks failed \(op: end\):\nrank 0: a\nrank 2:"):
        guard.run(lambda: raising([StorageError("a"), None, PlanError("b")][rank]))
    with pytest.raises(PlanError, match=r"3 of 3 ranks failed \(op\):\nranks 0-2: same"):
        guard.run(lambda: raising(PlanError("same")))
    kind = KeyboardInterrupt if rank == 1 else HoldfastError
    with pytest.raises(kind, match=r"^$" if rank == 1 else "rank 1: KeyboardInterrupt"):
        guard.run(lambda: raising(KeyboardInterrupt() if rank == 1 else None))
    assert undone == [1, 1, 1]
    still_well(control)

    # An error that left an inner guard on all ranks leaves the outer one unchanged ...
    inner, outer = Guard[None](control, "in"), Guard[None](control, "out")
    with pytest.raises(PlanError) as caught:
        outer.run(lambda: inner.run(lambda: raising(PlanError("x") if rank == 2 else None)))
    assert str(caught.value) == "1 of 3 ranks failed (in: end):\nrank 2: x"
    still_well(control)

    # ... and a rank that fails while it handles that reaches the ones that go on.
    def handling() -> None:
        try:
            inner.run(lambda: raising(PlanError("x") if rank == 2 else None))
        except PlanError:
            raising(MemoryError("in the handler") if rank == 0 else None)
        control.agree(None, phase="go on")

    with pytest.raises(HoldfastError, match=r"\(go on\):\nrank 0: MemoryError: in the handler"):
        outer.run(handling)
    still_well(control)

    # A rank that fails before it enters an inner guard ends what the others do in theirs, and they
    # cannot go on as if only that had failed.
    def attempts() -> None:
        for number in range(3):
            raising(PlanError("between") if rank == 1 and number == 1 else None)
            try:
                inner.run(lambda: control.barrier(phase="within"))
            except PlanError:
                continue

    with pytest.raises(PlanError) as caught:
        outer.run(attempts)
    assert str(caught.value) == "1 of 3 ranks failed (within):\nrank 1: between"
    still_well(control)

    # Without an end: what comes after the last call is this rank's own to tell.
    rescued = Guard[str](
        control,
        "free",
        is_complete=lambda answers: "last" in answers,
        rescue=lambda e: f"saved {e}",
    )

    def to_the_end() -> str:
        control.agree(None, phase="last")
        raising(ValueError("late") if rank == 1 else None)
        return "done"

    before = control.num_collectives
    assert rescued.run(to_the_end) == ("saved late" if rank == 1 else "done")
    assert control.num_collectives == before + 1
    still_well(control)


def test_a_failure_fits_every_call() -> None:
    assert run_ranks(3, every_call, timeout_s=120).results == [len(STEPS) * 6] * 3


def leave_midway(context: RankContext) -> float:
    """One rank is interrupted where the others wait for its bytes."""
    with ProcessGroups.create(Layout(dp=2), names=[], timeout_s=30) as groups:
        control = groups.control
        control.barrier(phase="begin")
        began = time.monotonic()
        if context.rank == 1:
            with pytest.MonkeyPatch.context() as patch:

                def interrupted(*_: Any) -> None:
                    raise KeyboardInterrupt

                patch.setattr(control._transport, "send", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    Guard(control, "op").run(lambda: control.gather(b"x" * 5000, phase="tables"))
        else:
            with pytest.raises(DeadlineError, match=r"'tables'.*a connection broke.*\[1\]"):
                Guard(control, "op").run(lambda: control.gather(b"x" * 5000, phase="tables"))
        seconds = time.monotonic() - began
        with pytest.raises(GroupError, match="cannot be used any more"):
            Guard(control, "op").run(lambda: control.barrier(phase="after"))
        return seconds


def test_a_rank_interrupted_within_a_call_is_not_waited_for() -> None:
    assert max(run_ranks(2, leave_midway, timeout_s=60).results) < 20


class Repeated:
    """An operation whose first run fails, and what one rank does when the others begin it again."""

    def __init__(self, control: Control, first: list[BaseException | None]) -> None:
        self.control, self.first, self.num_runs, self.num_asked = control, first, 0, 0
        self.asking: list[BaseException | None] = [None] * control.size

    def body(self) -> int:
        self.num_runs += 1
        self.control.barrier(phase="within")
        error = self.first[self.control.index] if self.num_runs == 1 else None
        if error is not None:
            raise error
        self.control.agree(None, phase="done")
        return self.num_runs

    def again(self, error: BaseException) -> bool:
        self.num_asked += 1
        own = self.asking[self.control.index]
        if own is not None:
            raise own
        if not isinstance(error, CorruptionError):
            return False
        return self.control.agree(None, phase="again?", payload=b"1")[0] == b"1"

    def run(self) -> int:
        return Guard[int](self.control, "op", retry_if=self.again).run(self.body)


def begin_again(context: RankContext) -> float:
    """Whatever a rank meets while the others ask whether to begin again, nobody waits for it."""
    began = time.monotonic()
    rank = context.rank
    with ProcessGroups.create(Layout(dp=2), names=[], timeout_s=20) as groups:
        control = groups.control
        damaged = CorruptionError("damaged")
        for first in ([damaged, None], [None, damaged], [damaged, damaged]):
            assert Repeated(control, first).run() == 2
            still_well(control)

        refused = Repeated(control, [None, PlanError("no")])
        with pytest.raises(PlanError, match=r"^1 of 2 ranks failed \(done\):\nrank 1: no$"):
            refused.run()
        assert (refused.num_runs, refused.num_asked) == (1, 1)
        still_well(control)

        # One is interrupted while the other meets what could be begun again.
        case = Repeated(control, [damaged, KeyboardInterrupt()])
        with pytest.raises(KeyboardInterrupt if rank == 1 else HoldfastError) as caught:
            case.run()
        assert rank == 1 or "rank 1: KeyboardInterrupt" in str(caught.value)
        assert case.num_runs == 1
        still_well(control)

        # One fails, or is interrupted, while it is asked whether to begin again.
        for error in (StorageError("gone"), KeyboardInterrupt(), MemoryError("no more")):
            for victim in range(2):
                case = Repeated(control, [damaged, None])
                case.asking[victim] = error
                with pytest.raises((HoldfastError, KeyboardInterrupt)):
                    case.run()
                assert case.num_runs == 1
                still_well(control)

        # In the end it is not begun again any more.
        never = Repeated(control, [])
        never.body = lambda: control.fail(damaged, phase="p")  # type: ignore[method-assign]
        with pytest.raises(CorruptionError, match="damaged"):
            never.run()
        assert never.num_asked == 7
        still_well(control)
    return time.monotonic() - began


def test_an_operation_is_begun_again_on_all_ranks_or_on_none() -> None:
    assert max(run_ranks(2, begin_again, timeout_s=100).results) < 20


def test_an_operation_within_itself_is_refused() -> None:
    for again in (None, lambda error: False):
        guard = Guard[None](Control.single(), "op", retry_if=again)
        with pytest.raises(HoldfastError, match="op is called from within itself"):
            guard.run(partial(guard.run, lambda: None))
        guard.run(lambda: None)


def test_a_lone_process_raises_its_own_error() -> None:
    guard = Guard[None](Control.single(), "op")

    def raising(error: BaseException) -> None:
        raise error

    own = PlanError("hole in w")
    with pytest.raises(PlanError) as caught:
        guard.run(lambda: raising(own))
    assert caught.value is own
    with pytest.raises(HoldfastError, match=r"^op: KeyError: 'w'$"):
        guard.run(lambda: raising(KeyError("w")))
    with pytest.raises(SystemExit):
        guard.run(lambda: raising(SystemExit(1)))


class _Interrupt:
    """Interrupts a guard before its line of a number."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("control/guard.py"):
            return None
        self.lines += event == "line"
        if event == "line" and self.lines == self.at:
            raise KeyboardInterrupt
        return self


def test_an_interrupt_before_the_body_leaves_the_guard_closed() -> None:
    """O8: at one line it left it open, and every later save was refused as one within itself."""
    guard: Guard[int] = Guard(Control.single(), "save")
    before = sys.gettrace()
    for at in range(1, 30):
        interrupt = _Interrupt(at)
        sys.settrace(interrupt)
        try:
            guard.run(lambda: sys.settrace(before) or 7)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert guard.run(lambda: 8) == 8
        if interrupt.lines < at:
            return
    pytest.fail("the body was never reached")

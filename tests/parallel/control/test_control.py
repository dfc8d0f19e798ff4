"""Agreement over the layout's ranks: what arrives, what it costs, what it says when it fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import DeadlineError, GroupError, HoldfastError, PlanError, StorageError
from holdfast.parallel import Control, Layout, ProcessGroups
from holdfast.parallel.control.control import FRAME_NBYTES, INLINE_NBYTES
from tests.harness import RankContext, run_ranks

LATE_S = 0.5
"""The deadline of a call in which a rank is missing; ranks make themselves ready before it."""
RANKS = (3, 1, 4, 2)  # not ascending, and without rank 0, which takes no part


def payload(index: int, nbytes: int) -> bytes:
    return bytes((index * 31 + i) % 251 for i in range(nbytes))


def cost(control: Control, action: Callable[[], Any]) -> tuple[int, int]:
    before = control.num_collectives, control.nbytes_sent
    action()
    return control.num_collectives - before[0], control.nbytes_sent - before[1]


def agreeing(rank: RankContext) -> dict[str, Any]:
    if rank.rank not in RANKS:
        return {}
    with ProcessGroups.create(Layout(dp=4, ranks=RANKS), names=[], timeout_s=20) as groups:
        control = groups.control
        check_payloads(control)
        reports = check_errors(control)
        reports["costs"] = costs(control)
        return reports


def check_payloads(control: Control) -> None:
    index = control.index
    assert control.ranks == RANKS
    assert RANKS[index] == control.rank
    assert control.coordinator == 3
    assert control.is_coordinator == (control.rank == 3)
    for sizes in [
        (0, 0, 0, 0),
        (1, 0, 7, 3),
        (512, 512, 0, 1),
        (513, 0, 5, 100_000),
        (0, 9, 0, 600),
        (5, 3_000_000, 7_000_000, 1),  # more than any socket holds
    ]:
        everything = [payload(i, nbytes) for i, nbytes in enumerate(sizes)]
        mine = everything[index]
        assert control.all_gather(mine, phase="a") == everything
        assert control.agree(None, phase="b", payload=mine) == everything
        assert control.gather(mine, phase="c") == (everything if index == 0 else None)
        assert control.scatter(everything if index == 0 else None, phase="d") == mine
        assert control.broadcast(mine if index == 0 else None, phase="e") == everything[0]
        control.barrier(phase="f" * 300)


def check_errors(control: Control) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    index = control.index

    def report(case: str, action: Callable[[], Any]) -> None:
        with pytest.raises(HoldfastError) as caught:
            action()
        cause = type(caught.value.__cause__).__name__
        reports[case] = (type(caught.value).__name__, str(caught.value), cause)

    error: Exception | None = None
    if index in (1, 3):
        error = StorageError("disk full") if index == 1 else PlanError("hole in w")
    report("two errors", lambda: control.agree(error, phase="save 7", payload=b"x"))
    foreign = KeyError("w") if index == 2 else None
    report("foreign", lambda: control.agree(foreign, phase="save 8"))
    long = GroupError("long " * 5000) if index == 0 else None
    report("long", lambda: control.agree(long, phase="save 9", payload=b"y" * 2000))
    phase = "plan" if index == 2 else "save 10"
    report("phases", lambda: control.all_gather(b"z" * 5000, phase=phase))
    operation = control.barrier if index < 2 else lambda phase: control.gather(b"", phase=phase)
    report("operations", lambda: operation(phase="save 11"))
    tail = "x" * 120 + str(index // 2)  # differs beyond what the frame shows
    report("long phases", lambda: control.barrier(phase=tail))
    report("scatter", lambda: control.scatter([b""] if index == 0 else None, phase="s"))
    report("broadcast", lambda: control.broadcast(b"" if index == 2 else None, phase="s"))
    assert control.all_gather(b"%d" % index, phase="still well") == [b"0", b"1", b"2", b"3"]
    return reports


def costs(control: Control) -> dict[str, tuple[int, int]]:
    small, large = b"x" * INLINE_NBYTES, b"x" * (INLINE_NBYTES + 1)
    return {
        "agree small": cost(control, lambda: control.agree(None, phase="p", payload=small)),
        "agree large": cost(control, lambda: control.agree(None, phase="p", payload=large)),
        "all_gather small": cost(control, lambda: control.all_gather(small, phase="p")),
        "all_gather large": cost(control, lambda: control.all_gather(large, phase="p")),
        "barrier": cost(control, lambda: control.barrier(phase="p")),
        "broadcast small": cost(
            control, lambda: control.broadcast(small if control.index == 0 else None, phase="p")
        ),
        "gather small": cost(control, lambda: control.gather(small, phase="p")),
    }


def test_payloads_errors_and_costs() -> None:
    results = run_ranks(5, agreeing).results[1:]
    for rank, reports in enumerate(results, start=1):
        kind, text, cause = reports["two errors"]
        assert kind == "StorageError"
        assert text == "2 of 4 ranks failed (save 7):\nrank 1: disk full\nrank 2: hole in w"
        assert cause == {1: "StorageError", 2: "PlanError"}.get(rank, "NoneType")
        assert reports["foreign"][:2] == (
            "HoldfastError",
            "1 of 4 ranks failed (save 8):\nrank 4: KeyError: 'w'",
        )
        assert reports["long"][0] == "GroupError"
        assert 4000 < len(reports["long"][1]) < 5000
        for case, parts in {
            "phases": ["ranks 3, 1, 2 in phase 'save 10' (all_gather", "rank 4 in phase 'plan'"],
            "operations": ["ranks 3, 1 in phase 'save 11' (barrier", "ranks 4, 2 in phase 'save 1"],
            "long phases": ["are out of sync: ranks 3, 1 in phase 'xxx", "ranks 4, 2 in"],
            "scatter": ["rank 3: scatter needs 4 payloads at the coordinator, got 1"],
            "broadcast": ["rank 3: broadcast takes a payload", "rank 4: broadcast takes a payload"],
        }.items():
            assert reports[case][0] == "GroupError"
            for part in parts:
                assert part in reports[case][1], reports[case][1]
        one = (1, FRAME_NBYTES)
        two = (2, FRAME_NBYTES + INLINE_NBYTES + 1)
        assert reports["costs"] == {
            "agree small": one,
            "agree large": two,
            "all_gather small": one,
            "all_gather large": two,
            "barrier": one,
            "broadcast small": one,
            "gather small": one,
        }


def lost(rank: RankContext) -> dict[str, tuple[str, str, float]]:
    from torch import distributed as dist

    reports = {}

    def meet(case: str, missing: int, action: Callable[[Control], Any], leave: Any) -> None:
        with ProcessGroups.create(Layout(dp=4, name=case), names=[], timeout_s=60) as groups:
            control = groups.control
            control.barrier(phase="warm up")
            if rank.rank == missing:
                leave()  # returns when the others have raised
                return
            control.timeout_s = LATE_S
            started = time.monotonic()
            with pytest.raises(HoldfastError) as caught:
                action(control)
            seconds = time.monotonic() - started
            reports[case] = (type(caught.value).__name__, str(caught.value), seconds)
            control.timeout_s = 60
            started = time.monotonic()
            with pytest.raises(GroupError, match="failed earlier and cannot be used"):
                control.barrier(phase="afterwards")
            assert time.monotonic() - started < 30, "it waits for nothing"
            dist.barrier()

    meet("late", 2, lambda c: c.agree(None, phase="save 3"), dist.barrier)
    with ProcessGroups.create(Layout(dp=4, name="last"), names=[], timeout_s=60) as groups:
        control = groups.control
        control.all_gather(b"", phase="plan")
        if rank.rank == 0:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(HoldfastError) as caught:
            control.all_gather(b"x" * 1000, phase="save 4")
        seconds = time.monotonic() - started
        reports["killed"] = (type(caught.value).__name__, str(caught.value), seconds)
    return reports


def test_who_does_not_come_is_named_with_phase_and_last_sight() -> None:
    outcome = run_ranks(4, lost, timeout_s=60, expect_failure=True)
    assert outcome.failed == [0]
    killed = outcome.errors[0]
    assert killed is not None
    assert killed.signal == signal.SIGKILL
    for rank in (1, 2, 3):
        reports = outcome.results[rank]
        if rank != 2:
            kind, text, seconds = reports["late"]
            assert kind == DeadlineError.__name__
            assert "Phase 'save 3' (collective 2 of layout 'late')" in text
            # The first rank whose time is over closes its connections, for the others to see.
            assert f"not complete after {LATE_S:g} s" in text or "a connection broke" in text
            assert "ranks [2] did not arrive, last seen in rank 2: phase 'warm up' (coll" in text
            assert 0.9 * LATE_S < seconds < 30
        kind, text, seconds = reports["killed"]
        assert kind == DeadlineError.__name__
        assert "Phase 'save 4' (collective 2 of layout 'last'): a connection broke" in text
        assert "ranks [0] did not arrive, last seen in rank 0: phase 'plan' (collective 1)" in text
        assert seconds < 30
    times = [outcome.results[rank]["killed"][2] for rank in (1, 2, 3)]
    assert max(times) - min(times) < 15, "who is not next to the dead rank waited on"


def stopped_in_a_transfer(rank: RankContext) -> tuple[str, object]:
    """Rank 2 stops before it sends; rank 0 has its bytes, and works on; rank 1 waits."""
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = PrefixStore("over", _get_default_store())
    with ProcessGroups.create(Layout(dp=3), names=[], timeout_s=60) as groups:
        control = groups.control
        control.barrier(phase="warm up")
        sent, expected = memoryview(b"x" * 1000), memoryview(bytearray(1000))
        control.agree(None, phase="plan")
        # As `exchange`, whose agreement has ended on all ranks when one of them stops.
        transport = control._transport
        assert transport is not None
        transport.extend(LATE_S)
        error: Any = None
        if rank.rank == 1:
            with pytest.raises(DeadlineError) as caught:
                transport.exchange([(0, sent)], [(2, expected)])
            error = caught.value
            store.set("raised", "")
        elif rank.rank == 0:
            transport.exchange([], [(1, expected)])
        store.wait(["raised"])
        return str(error), getattr(error, "details", {}).get("missing_ranks")


def test_a_rank_that_stops_in_a_transfer_is_named_alone() -> None:
    """Not beside ranks that have all their bytes, and have no reason to report."""
    text, missing = run_ranks(3, stopped_in_a_transfer, fresh=True).results[1]
    assert missing == [2], text
    assert "ranks [2] have not reported since" in text


def test_one_process_agrees_with_itself() -> None:
    control = Control.single(rank=5)
    assert (control.ranks, control.rank, control.index, control.size) == ((5,), 5, 0, 1)
    assert control.is_coordinator
    large = b"x" * 2000
    for data in (b"", b"y", large):
        assert control.all_gather(data, phase="p") == [data]
        assert control.gather(data, phase="p") == [data]
        assert control.scatter([data], phase="p") == data
        assert control.broadcast(data, phase="p") == data
        assert control.agree(None, phase="p", payload=data) == [data]
    control.barrier(phase="p")
    assert (control.num_collectives, control.nbytes_sent) == (0, 0)
    own = PlanError("hole in w")
    with pytest.raises(PlanError) as caught:
        control.agree(own, phase="p")
    assert caught.value is own
    with pytest.raises(HoldfastError, match=r"^p: ValueError: bad$") as foreign:
        control.agree(ValueError("bad"), phase="p")
    assert isinstance(foreign.value.__cause__, ValueError)
    for wrong in (
        lambda: control.scatter([b"", b""], phase="p"),
        lambda: control.scatter(None, phase="p"),
        lambda: control.broadcast(None, phase="p"),
    ):
        with pytest.raises(GroupError, match="rank 5: "):
            wrong()
    with pytest.raises(GroupError, match="need a communicator"):
        Control(None, ranks=(0, 1), rank=0, timeout_s=1)

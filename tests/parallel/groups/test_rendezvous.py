"""What meeting costs as ranks are added, who is named when it fails, who shares: G4, G9, G11."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from bench.groups import Counted, CountingStore, count_creation
from holdfast.errors import DeadlineError, GroupError, HoldfastError, LayoutError
from holdfast.parallel import Layout, ProcessGroups
from holdfast.parallel.groups.launches import LaunchRecorder
from holdfast.parallel.groups.rendezvous import Rendezvous
from tests.harness import RankContext, run_ranks


def test_no_rank_asks_more_of_the_store_where_there_are_more_ranks() -> None:
    few, many = (run_ranks(n, count_creation, []).results for n in (8, 16))

    def highest(counted: list[Counted], quantity: str) -> int:
        return max(getattr(c, quantity) for c in counted)

    def mean(counted: list[Counted], quantity: str) -> float:
        return sum(getattr(c, quantity) for c in counted) / len(counted)

    # One request a rank would be 8 more. The first and the last rank to arrive make a few more
    # than the others. Twice as many ranks are one round more: an address to ask for, and two
    # connections.
    assert highest(many, "requests") <= highest(few, "requests") + 4
    assert mean(many, "requests") < mean(few, "requests") + 2
    assert mean(many, "nbytes") < mean(few, "nbytes") * 1.1
    assert highest(few, "descriptors") == 1 + 2 * 3
    assert highest(many, "descriptors") == 1 + 2 * 4


# Rendezvous alone: ranks are threads over one store, which is quick and has no other cost.


def in_threads(
    ranks: range, body: Callable[[Rendezvous], Any], *, timeout_s: float = 10
) -> tuple[dict[int, str], dict[int, int]]:
    """What each rank raises, and how many requests it makes."""
    from torch.distributed import HashStore

    shared = HashStore()
    errors: dict[int, str] = {}
    requests: dict[int, int] = {}

    def run(rank: int) -> None:
        store = CountingStore(shared)
        rendezvous = Rendezvous(
            store,
            layout_name="model",
            purpose="create",
            ranks=ranks,
            rank=rank,
            timeout_s=timeout_s,
        )
        try:
            body(rendezvous)
        except HoldfastError as error:
            errors[rank] = f"{type(error).__name__}: {error}"
        except SystemExit:
            errors[rank] = "left"
        requests[rank] = store.num_requests

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 5)
        assert not thread.is_alive()
    return errors, requests


def agreeing(rendezvous: Rendezvous) -> None:
    rendezvous.propose("the same", content="")
    rendezvous.finish("made", None)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 40])
def test_agreement_costs_the_same_for_any_number_of_ranks(num_ranks: int) -> None:
    errors, requests = in_threads(range(num_ranks), agreeing)
    assert errors == {}
    assert max(requests.values()) <= 25  # first and last at once, and what they look up
    assert num_ranks < 40 or sorted(requests.values())[num_ranks // 2] == 2 + 2 * 5


def test_only_one_rank_reads_what_the_others_propose() -> None:
    def body(rendezvous: Rendezvous) -> None:
        rendezvous.propose("odd" if rendezvous.rank == 7 else "even", content="")

    errors, requests = in_threads(range(40), body)
    assert len(set(errors.values())) == 1
    assert errors[0].startswith("LayoutError: Ranks [7] disagree with the others")
    assert "; ranks 7: odd" in errors[0]
    assert max(requests.values()) <= 12  # all entries are read with one request


def test_a_failure_of_every_rank_reads_as_one_however_many_there_are() -> None:
    def body(rendezvous: Rendezvous) -> None:
        rendezvous.propose("the same", content="", error=GroupError("no such device"))

    ranks = range(10**20, 10**20 + 200)  # their numbers alone are longer than a record holds
    errors, _ = in_threads(ranks, body, timeout_s=30)
    (text,) = set(errors.values())
    assert text.startswith("GroupError: 200 of 200 ranks failed")
    assert text.endswith("199: no such device")


def test_missing_ranks_are_looked_for_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rendezvous._absent

    def absent(self: Rendezvous, missing: Any, stage: str) -> str:
        time.sleep(1)  # long enough for the time of all others to be over
        return real(self, missing, stage)

    monkeypatch.setattr(Rendezvous, "_absent", absent)

    def body(rendezvous: Rendezvous) -> None:
        if rendezvous.rank not in (3, 5):
            rendezvous.propose("the same", content="")
        else:
            time.sleep(3)
            rendezvous.propose(
                "the same", content=""
            )  # too late: it fails with the others, at once

    errors, requests = in_threads(range(20), body, timeout_s=1)
    assert set(errors) == {*range(20)}  # the last to come finds a verdict, and does not set it
    assert len(set(errors.values())) == 1
    assert errors[3].startswith("DeadlineError: Rank ")
    assert (
        "ranks [3, 5] did not arrive (rank 3: create layout 'model' (time 1); rank 5" in errors[3]
    )
    counts = sorted(requests.values())
    assert counts[-1] >= 20  # the one that looks
    assert counts[-2] <= 15  # the first to arrive, which announces the list


def test_the_reason_may_be_with_those_who_have_arrived() -> None:
    def body(rendezvous: Rendezvous) -> None:
        rendezvous.propose("the same", content="")
        if rendezvous.rank == 0:
            raise SystemExit
        error = GroupError("no such device") if rendezvous.rank == 1 else None
        rendezvous.finish("made", error)

    errors, _ = in_threads(range(4), body, timeout_s=1)
    assert errors[1] == "GroupError: no such device"  # at once
    for rank in (2, 3):
        assert "rank 1: no such device" in errors[rank]
        assert "ranks [0] did not arrive" in errors[rank]


def test_a_report_that_does_not_come_is_made_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that was to name the missing ones ends before it has done so."""
    from holdfast.parallel.groups import rendezvous as module

    monkeypatch.setattr(module, "_REPORT_WAIT_S", 0.3)
    real, left = Rendezvous._absent, threading.Lock()

    def absent(self: Rendezvous, missing: Any, stage: str) -> str:
        if left.acquire(blocking=False):
            raise SystemExit
        return real(self, missing, stage)

    monkeypatch.setattr(Rendezvous, "_absent", absent)

    def body(rendezvous: Rendezvous) -> None:
        if rendezvous.rank != 2:
            rendezvous.propose("the same", content="")

    errors, _ = in_threads(range(4), body, timeout_s=0.5)
    texts = sorted(errors.values())
    assert texts[-1] == "left"
    assert len(texts) == 3
    assert all("ranks [2] did not arrive" in text for text in texts[:-1])


# Real processes.


def dying(rank: RankContext) -> tuple[str, str, float]:
    """The last rank to arrive ends before it has compared."""

    def die(self: Rendezvous, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 2:
            patch.setattr(Rendezvous, "_judge", die)
            time.sleep(1)
        started = time.monotonic()
        try:
            ProcessGroups.create(Layout(dp=4), timeout_s=3)
        except HoldfastError as error:
            return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def test_the_last_to_arrive_is_named_if_it_does_not_go_on() -> None:
    outcome = run_ranks(4, dying, timeout_s=60, expect_failure=True)
    assert outcome.failed == [2]
    for rank in (0, 1, 3):
        kind, text, seconds = outcome.results[rank]
        assert kind == DeadlineError.__name__
        assert "all ranks arrived, but rank 2, the last of them, did not continue" in text
        assert seconds < 30


def overlapping(rank: RankContext, order: str) -> str:
    """Two lists of ranks that share one, of which neither counts on all of the other."""
    is_odd = rank.rank == 0
    store = c10d._get_default_store()
    announce = Rendezvous._announce

    def announce_and_say_so(self: Rendezvous, text: str) -> None:
        announce(self, text)
        store.set("rank 0 has announced", "")

    if order == "odd list last" and is_odd:
        store.wait(["rank 1 is through", "rank 2 is through"])
    if order == "odd list first" and not is_odd:
        store.wait(["rank 0 has announced"])
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if is_odd:
            patch.setattr(Rendezvous, "_announce", announce_and_say_so)
        try:
            with ProcessGroups.create(
                Layout(dp=2, ranks=(0, 1) if is_odd else (1, 2)), timeout_s=60
            ):
                store.set(f"rank {rank.rank} is through", "")
        except LayoutError as error:
            assert time.monotonic() - started < 30, "a disagreement is not a matter of waiting"
            return str(error)
    return ""


@pytest.mark.parametrize("order", ["odd list first", "together", "odd list last"])
def test_lists_of_ranks_that_overlap_are_noticed_at_once(order: str) -> None:
    """Ranks whose list is complete may be through before another list is known; no rank waits."""
    first, *others = run_ranks(3, overlapping, order).results
    # Whichever of ranks 1 and 2 announced their list, and whoever looked first.
    assert "Ranks [0] disagree with ranks 1, 2, so no rank may create layout 'model'" in first
    assert "rank 0 counts on ranks 1 for layout" in first
    allowed = {
        "odd list first": [[first, first]],
        "together": [[first, first], ["", ""]],
        "odd list last": [["", ""]],
    }
    assert others in allowed[order]


# Equal lists of ranks share a communicator, but for those along data ranks.


def sharing(rank: RankContext) -> int:
    import torch
    from torch import distributed as dist

    before = len(c10d._world.pg_map)
    with ProcessGroups.create(Layout(tp=2, dp=2, pp=2)) as groups:
        made = len(c10d._world.pg_map) - before
        held = {name: groups.group(name) for name in groups.held()}
        for same in (("tp", "tp_cp", "expt_tp", "tp_ep"), ("pp", "embd"), ("mp", "tp_ep_pp")):
            assert len({id(held.pop(name)) for name in same}) == 1
        assert set(held) == {"dp", "dp_cp", "expt_dp", "dp_cp_ag", "expt_dp_ag"}
        assert len({id(group) for group in held.values()}) == 5
        assert len({tuple(groups.ranks(name)) for name in held}) == 1
        mine = groups.clone("tp_cp", purpose="mine")
        assert mine is not groups.group("tp")
        with LaunchRecorder(groups) as recorder:
            for name in ("tp_cp", "mine", "embd", "dp_cp", "expt_dp_ag"):
                dist.all_reduce(torch.ones(1), group=groups.group(name))
        purposes = [launch.purpose for launch in recorder.launches]
        assert purposes == ["tp", "mine", "pp", "dp_cp", "expt_dp_ag"]
        # Gradients of experts and others are complete in another order on every rank.
        names = ["dp", "dp_cp", "expt_dp", "dp_cp_ag", "expt_dp_ag"]
        values = {name: torch.full((1 + i,), 10.0**i) for i, name in enumerate(names)}
        in_order = names if groups.index("dp") == 0 else names[::-1]
        works = [dist.all_reduce(values[n], group=held[n], async_op=True) for n in in_order]
        for work in works:
            work.wait()
        assert [float(v[0]) for v in values.values()] == [2.0 * 10.0**i for i in range(5)]
    assert len(c10d._world.pg_map) == before
    return made


def test_equal_lists_of_ranks_share_a_communicator_unless_data_travels_on_it() -> None:
    assert run_ranks(8, sharing).results == [8] * 8  # 4 lists of ranks

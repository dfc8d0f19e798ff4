"""A store whose host is cut off: requests to it are never answered, and no rank waits for that."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
from torch import distributed as dist

from bench.groups import CountingStore
from holdfast.errors import HoldfastError
from holdfast.parallel import bounded_store
from holdfast.parallel.bounded_store import BoundedStore, StoreSilentError
from holdfast.parallel.control.transport import Transport
from holdfast.parallel.groups.rendezvous import Rendezvous

DEADLINE_S = 1.0
NEVER_S = 60.0
"""A rank that has not ended by then waits without a limit, however busy the machine is."""


class SilentStore(CountingStore):
    """Answers so many requests, and no more."""

    def __init__(self, store: dist.Store, *, num_answers: int, over: threading.Event) -> None:
        super().__init__(store)
        self._num_answers = num_answers
        self._over = over

    def _count(self, *passed: Any) -> None:
        super()._count(*passed)
        if self.num_requests > self._num_answers:
            self._over.wait()
            raise RuntimeError("the test is over")

    def get(self, key: str) -> bytes:
        self._count(key)
        return self._store.get(key)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._count(key)
        return self._store.compare_set(key, expected, desired)


class Run:
    """Two ranks that agree by a store, after which rank 0 waits for a message that never comes.

    The store answers rank 0 a number of times.
    """

    def __init__(self, num_answers: int, over: threading.Event) -> None:
        shared = dist.HashStore()
        self.silent = SilentStore(shared, num_answers=num_answers, over=over)
        self.said = ["", ""]
        self._transports: list[Transport] = []
        self.threads = [
            threading.Thread(target=self._rank, args=(rank, store), daemon=True)
            for rank, store in enumerate((self.silent, CountingStore(shared)))
        ]
        for thread in self.threads:
            thread.start()

    def _rank(self, rank: int, store: dist.Store) -> None:
        try:
            meeting = Rendezvous(
                store, layout_name="m", purpose="create", ranks=(0, 1), rank=rank,
                timeout_s=DEADLINE_S,
            )  # fmt: skip
            meeting.propose("the same", content="")
            meeting.finish("made", None)
            limited = BoundedStore.of(store, limit_s=DEADLINE_S)
            transport = Transport(ranks=(0, 1), rank=rank, store=limited, name="m")
            self._transports.append(transport)
            if rank == 0:
                transport.start(1, "load: find", DEADLINE_S)
                transport.receive([(1, 8)])
        except HoldfastError as error:
            self.said[rank] = f"{type(error).__name__}: {error}"


def test_a_store_that_stops_at_any_request_ends_every_rank() -> None:
    """R7: each rank ends, and says what it waited for, whichever request is not answered."""
    over = threading.Event()
    first = Run(1000, over)
    for thread in first.threads:
        thread.join(NEVER_S)
    total = first.silent.num_requests
    assert "ranks [1] did not arrive" in first.said[0]
    assert 15 < total < 40
    runs = [Run(number, over) for number in range(total)]
    try:
        for number, run in enumerate(runs):
            for thread in run.threads:
                thread.join(NEVER_S)
                assert not thread.is_alive(), f"request {number} has no limit"
            words = run.said[0]
            assert words.startswith(("GroupError", "DeadlineError")), f"{number}: {words}"
            assert any(
                what in words for what in ("Rank 0", "rank 0", "Phase 'load: find'", "address")
            ), words
            assert any(what in words for what in ("store", "did not arrive", "no connection")), (
                words
            )
            if run.said[1]:
                named = ("rank 0", "ranks [0]", "did not continue")
                assert any(name in run.said[1] for name in named), run.said[1]
    finally:
        over.set()


def test_what_is_given_up_costs_one_limit_and_the_store_may_recover() -> None:
    """R7: requests behind a silent one fail at once; afterwards the store is used again."""
    over = threading.Event()
    store = BoundedStore(SilentStore(dist.HashStore(), num_answers=0, over=over), limit_s=0.2)
    with pytest.raises(StoreSilentError, match="has not answered for"):
        store.set("a", "b")
    for _ in range(3):
        with pytest.raises(StoreSilentError, match="silent since an earlier request"):
            store.prefixed("c").add("n", 1)
    over.set()
    store._line._given_up.is_over.wait(NEVER_S)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="the test is over"):
        store.check(["a"])


def test_what_is_posted_waits_for_nothing_and_comes_in_order() -> None:
    """A silent store takes no more than a few; what comes later is after them."""
    store = BoundedStore(dist.HashStore())
    for number in range(100):
        store.prefixed("c").post("n", f"{number}")
    store.set("c/last", "set")
    assert store.get("c/last") == b"set"
    assert int(store.get("c/n")) > 0
    over = threading.Event()
    silent = BoundedStore(SilentStore(dist.HashStore(), num_answers=0, over=over), limit_s=0.2)
    for _ in range(1000):
        silent.post("a", "b")
    assert silent._line._requests.qsize() < 100
    with pytest.raises(StoreSilentError, match="has not answered for"):
        silent.set("a", "b")
    over.set()


def test_the_collector_does_not_wait_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait in the middle of a collection lets another thread start a second one: a crash."""
    monkeypatch.setattr(bounded_store, "_GRACE_S", 60.0)
    is_open, has_begun = threading.Event(), threading.Event()

    class SlowStore(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            has_begun.set()
            is_open.wait(120)

    cycle: list[Any] = [BoundedStore(SlowStore())]
    cycle.append(cycle)
    cycle[0].post("key", "value")
    assert has_begun.wait(60)
    began = time.monotonic()
    del cycle
    gc.collect()
    assert time.monotonic() - began < 30
    is_open.set()


class LosingStore(CountingStore):
    """Does not take the first note of a rank."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.num_lost = 0

    def _count(self, *passed: Any) -> None:
        if passed and str(passed[0]).startswith("note/") and not self.num_lost:
            self.num_lost += 1
            raise RuntimeError("the store was busy")
        super()._count(*passed)


def test_a_note_that_the_store_did_not_take_is_left_again() -> None:
    """I1: by it a rank that looks knows that this one will never launch what it waits for."""
    shared = dist.HashStore()
    losing = LosingStore(shared)
    transports = [
        Transport(ranks=(0, 1), rank=rank, store=store, name="m")
        for rank, store in enumerate((shared, losing))
    ]
    transports[1].call_in_long_waits(lambda phase: transports[1].note(1, phase))

    def wait(rank: int) -> None:
        transports[rank].start(1, "save", NEVER_S)
        transports[rank].all_gather(b"x", 8)

    waiting = threading.Thread(target=wait, args=(1,), daemon=True)
    waiting.start()
    until = time.monotonic() + NEVER_S / 2
    while transports[0].noted(1, 1) is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert (transports[0].noted(1, 1), losing.num_lost) == ("save", 1)
    wait(0)
    waiting.join(NEVER_S)
    assert not waiting.is_alive()

"""Small tensors over sockets of their own: late and lost ranks, other lengths."""

from __future__ import annotations

import pytest

from holdfast import DeadlineError, GroupError, Layout, ProcessGroups
from tests.harness import RankContext, run_ranks

LIMIT_S = 2.0


def exchanging(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=3)) as groups:
        direct = groups.direct()
        assert direct is groups.direct()
        arriving = {rank: bytearray(1 << 20) for rank in range(3) if rank != context.rank}

        def exchange(nbytes: int = 1 << 20) -> None:
            memory = [(rank, memoryview(each)[:nbytes]) for rank, each in arriving.items()]
            direct.exchange(memoryview(bytes([context.rank]) * nbytes), memory, what="the test")

        for _ in range(3):
            exchange()
            assert all(set(each) == {rank} for rank, each in arriving.items())
        direct._timeout_s = LIMIT_S  # the barrier at the end has longer
        if context.rank:
            with pytest.raises(DeadlineError, match="the test did not complete") as caught:
                exchange(8)
            waited_s = caught.value.details["waited_s"]
            assert isinstance(waited_s, float)
            assert waited_s < 10 * LIMIT_S
            # no later one waits
            with pytest.raises(DeadlineError, match="cannot start: an earlier exchange failed"):
                exchange(8)
        groups.control.barrier(phase="end")
        groups.close()
        with pytest.raises(DeadlineError, match="cannot start"):
            exchange(8)
        with pytest.raises(GroupError):
            groups.direct()


def test_a_rank_that_does_not_come_breaks_the_exchange_once() -> None:
    run_ranks(3, exchanging)


def of_other_lengths(context: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        mine, memory = bytes(8 + context.rank), bytearray(8 + context.rank)
        with pytest.raises(DeadlineError, match="bytes, expected"):
            groups.direct().exchange(
                memoryview(mine), [(1 - context.rank, memoryview(memory))], what="the test"
            )
        groups.control.barrier(phase="end")


def test_messages_of_other_lengths_are_refused() -> None:
    run_ranks(2, of_other_lengths)


def test_one_process_exchanges_with_no_other() -> None:
    with pytest.raises(GroupError, match="of one process"):
        ProcessGroups.single().direct()

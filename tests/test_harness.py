"""The harness itself: results, errors, signals and deadlines are reported, nothing hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from holdfast.errors import LayoutError
from tests.harness import RankContext, run_ranks


def _sum(rank: RankContext, amount: int) -> tuple[int, str, int]:
    import torch
    from torch import distributed as dist

    print("hello from", rank.rank)
    value = torch.tensor([rank.rank + amount])
    dist.all_reduce(value)
    return int(value.item()), os.environ["COLOUR"], torch.get_num_threads()


def _all_ways_to_fail(rank: RankContext) -> int:
    if rank.rank == 1:
        raise LayoutError("no such axis")
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 3:
        os._exit(7)
    if rank.rank == 4:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
        time.sleep(600)
    return rank.rank


def test_results_come_back_in_rank_order() -> None:
    outcome = run_ranks(3, _sum, 10, env={"COLOUR": "blue"})
    assert outcome.results == [(33, "blue", 1)] * 3
    assert outcome.errors == [None] * 3
    assert outcome.outputs[2] == "hello from 2\n"


def test_every_failure_is_reported_and_nothing_is_left_behind() -> None:
    outcome = run_ranks(5, _all_ways_to_fail, init=False, timeout_s=3, expect_failure=True)
    assert outcome.results[0] == 0
    assert outcome.failed == [1, 2, 3, 4]
    raised, killed, exited, late = outcome.errors[1:]
    assert raised is not None
    assert killed is not None
    assert exited is not None
    assert late is not None
    assert isinstance(raised.exception, LayoutError)
    assert raised.message == "no such axis"
    assert "_all_ways_to_fail" in raised.traceback
    assert (killed.type_name, killed.signal) == ("Killed", signal.SIGKILL)
    assert exited.message == "ended by exit code 7 before it reported"
    assert late.timed_out
    assert "_all_ways_to_fail" in late.traceback
    grandchild = int(outcome.outputs[4].split()[0])
    time.sleep(0.2)
    stat = f"/proc/{grandchild}/stat"
    state = open(stat).read().split()[2] if os.path.exists(stat) else "gone"  # noqa: SIM115
    assert state in ("gone", "Z")


def test_a_failure_that_nobody_expected_raises_with_every_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: LayoutError: no such axis.*Traceback"):
        run_ranks(2, _all_ways_to_fail, init=False)

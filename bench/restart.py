"""A restart right after a save on the same host: images kept in memory against the page cache.

Four ranks save with `keep_image_s` and end. Four new ones load: Holdfast out of the images, DCP out
of the page cache, which its buffered save has left full. The floor is a memcpy of the rank's bytes
in memory that was touched before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from bench import rivals
from bench.floor import FloorMemory
from bench.ranks import RankContext, run_ranks
from bench.results import AHEAD_OF_DCP, BenchResults, Target
from bench.sharded import KEPT, TIMEOUT_S
from bench.states import DenseSpec, dense_state, digests, local_nbytes, local_tensors
from bench.timing import Measured, Series, interleave, slowest, timed, values_of
from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.writer.kept_images import end_keepers

BAR = 1.3
"""Of a memcpy."""
_LAYOUT = Layout(tp=2, dp=2)
_KEEP_S = 600.0
_SETTLE_S = 120.0
_HOLDFAST, _DCP, _FLOOR = "holdfast load from images", "dcp.load", "memcpy"


def measure(
    results: BenchResults, case: str, *, spec: DenseSpec, repeats: int, scratch: Path
) -> None:
    """Run the case on real processes and add its row.

    Args:
        results: gets the row.
        case: the first column of the table.
        spec: the state.
        repeats: rounds after the warm-up.
        scratch: a directory in which `sharded.measure` has left DCP's checkpoint.
    """
    root = scratch / "restarted"
    try:
        truth = run_ranks(4, _save, spec, root, timeout_s=TIMEOUT_S).results
        loaded = run_ranks(
            4, _restart, spec, repeats, truth, root, scratch, timeout_s=TIMEOUT_S
        ).results
    finally:
        end_keepers()
    series = slowest(loaded)
    results.compare(
        case, "load, restart right after a save", unit="ms", scale=1e3,
        holdfast=values_of(series, _HOLDFAST),
        floors={_FLOOR: values_of(series, _FLOOR)},
        dcp={_DCP: values_of(series, _DCP)},
        targets=(Target(against="floor", bound=BAR), AHEAD_OF_DCP),
    )  # fmt: skip


def _save(_: RankContext, spec: DenseSpec, root: Path) -> list[int]:
    """Save once and end; the digests of what this rank holds."""
    with ProcessGroups.create(_LAYOUT) as groups:
        state = dense_state(groups, spec)
        with Checkpointer(root, groups=groups, keep_image_s=_KEEP_S) as checkpointer:
            checkpointer.save_async(KEPT, state).result()
        return digests(state)


def _restart(
    context: RankContext,
    spec: DenseSpec,
    repeats: int,
    truth: list[list[int]],
    root: Path,
    scratch: Path,
) -> Series:
    """All arms in turns, once the images are there.

    Raises:
        AssertionError: A load read storage, or brought back other values than were saved.
    """
    with ProcessGroups.create(_LAYOUT) as groups:
        state = dense_state(groups, spec, blank=True)
        memory = FloorMemory(local_nbytes(state))
        theirs = rivals.Dcp(scratch, rivals.dcp_state(state, groups))
        with Checkpointer(root, groups=groups, keep_image_s=_KEEP_S) as checkpointer:
            end = time.monotonic() + _SETTLE_S
            while checkpointer.load(state).job.nbytes_read:
                if time.monotonic() > end:
                    raise AssertionError("no image was kept")
                time.sleep(0.1)
            arms: dict[str, Callable[[int], Measured]] = {
                _FLOOR: lambda _: timed(memory.copy),
                _HOLDFAST: lambda _: timed(lambda: checkpointer.load(state)),
                _DCP: lambda _: theirs.load(theirs.path(KEPT)),
            }
            series = interleave(arms, repeats=repeats, before_each=dist.barrier)
            for tensor in local_tensors(state):
                tensor.zero_()
            report = checkpointer.load(state)
        if report.job.nbytes_read or digests(state) != truth[context.rank]:
            raise AssertionError("a load read storage, or what it loaded is not what was saved")
        return series

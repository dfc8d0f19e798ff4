"""A state that all ranks hold, loaded with and without exchange, on one host and on two.

The second host is this one under another name (`HOLDFAST_HOST_ID`): between the two go sockets,
and the page cache, though they share it, is taken for two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from bench import rivals
from bench.floor import drop_pages
from bench.ranks import RankContext, run_ranks
from bench.results import AHEAD_OF_DCP, BenchResults, Target
from bench.sharded import TIMEOUT_S, RankMeasurements
from bench.states import digests, local_tensors
from bench.timing import Measured, interleave, median_of, slowest, values_of
from holdfast import Checkpointer, Layout, ProcessGroups

NUM_RANKS = 8
_NUM_TENSORS = 64
_KEPT = 1
_CACHES = ("warm", "cold")
_WAYS: dict[str, Any] = {"auto": "auto", "on": True, "off": False}


def measure(results: BenchResults, *, megabytes: int, repeats: int, scratch: Path) -> None:
    """Load `megabytes` MiB into each of eight ranks."""
    for name, hosts in (("one host", "aaaaaaaa"), ("two hosts", "aaaabbbb")):
        args = (hosts, megabytes, repeats, scratch)
        ranks = run_ranks(NUM_RANKS, _load, *args, timeout_s=TIMEOUT_S).results
        _report(results, f"replicated {megabytes} MiB, {name}", ranks, megabytes)


def _load(
    context: RankContext, hosts: str, megabytes: int, repeats: int, scratch: Path
) -> RankMeasurements:
    """All arms in turns, warm and cold."""
    os.environ["HOLDFAST_HOST_ID"] = hosts[context.rank]
    torch.set_num_threads(1)
    with ProcessGroups.create(Layout(dp=NUM_RANKS)) as groups:
        numel = max(megabytes * (1 << 20) // 4 // _NUM_TENSORS, 1)
        state = {"replicated": _tensors(groups, numel)}
        truth = digests(state)
        theirs = rivals.Dcp(scratch, rivals.dcp_state(state, groups))
        with Checkpointer(scratch / "holdfast", groups=groups) as checkpointer:
            is_first = not theirs.path(_KEPT).exists()
            groups.control.barrier(phase="look")
            if is_first:
                checkpointer.save(_KEPT, state)
                theirs.save(_KEPT)
            arms: dict[str, Callable[[int], Measured]] = {
                **{
                    way: partial(_counted, checkpointer, state, exchange=value)
                    for way, value in _WAYS.items()
                },
                "dcp.load": lambda _: theirs.load(theirs.path(_KEPT)),
            }
            series: dict[str, list[Measured]] = {}
            for cache in _CACHES:
                before = partial(_prepare, groups, scratch, is_cold=cache == "cold")
                rounds = interleave(arms, repeats=repeats, before_each=before, warm_ups=1)
                series |= {f"{cache} {arm}": rounds[arm] for arm in arms}
            for arm in (*_WAYS, "dcp.load"):
                for tensor in local_tensors(state):
                    tensor.zero_()
                groups.control.barrier(phase="compare")
                arms[arm](0)
                if digests(state) != truth:
                    raise AssertionError(f"{arm}: what was loaded is not what was saved")
    return RankMeasurements(series=series, counted={})


def _tensors(groups: ProcessGroups, numel: int) -> dict[str, DTensor]:
    mesh = groups.mesh("dp")
    return {
        f"w{i}": DTensor.from_local(
            torch.full((numel,), float(i + 1)), mesh, [Replicate()], run_check=False
        )
        for i in range(_NUM_TENSORS)
    }


def _counted(
    checkpointer: Checkpointer, state: dict[str, Any], _: int, *, exchange: Any
) -> Measured:
    report = checkpointer.load(state, step=_KEPT, exchange=exchange)
    return {"seconds": report.seconds, "read": float(report.job.nbytes_read)}


def _prepare(groups: ProcessGroups, scratch: Path, *, is_cold: bool) -> None:
    """Before each arm: all pages of all files are in the page cache, or none."""
    groups.control.barrier(phase="before")
    if groups.rank == 0:
        if is_cold:
            drop_pages(scratch)
        else:
            for path in scratch.rglob("*"):
                if path.is_file():
                    with path.open("rb", buffering=0) as file:
                        while file.read(1 << 24):
                            pass
    groups.control.barrier(phase="prepared")


def _report(
    results: BenchResults, case: str, ranks: list[RankMeasurements], megabytes: int
) -> None:
    series = slowest([each.series for each in ranks])
    for cache in _CACHES:
        for way in _WAYS:
            results.compare(
                case, f"load, {cache}, exchange={way}", unit="ms", scale=1e3,
                holdfast=values_of(series, f"{cache} {way}"),
                dcp={"dcp.load": values_of(series, f"{cache} dcp.load")},
                targets=(AHEAD_OF_DCP,) if way == "auto" else (),
            )  # fmt: skip
        better = min(median_of(series, f"{cache} {way}") for way in ("on", "off"))
        ratio = median_of(series, f"{cache} auto") / better
        bound = (Target(against="value", bound=1.05),)
        results.state(case, f"{cache}, auto / better of on, off", ratio, unit="x", targets=bound)
        share = median_of(series, f"{cache} auto", "read") / (megabytes << 20)
        results.state(case, f"{cache}, bytes read by the job, auto", share, unit="x")
    for way, bar in (("on", 1.0), ("off", float(NUM_RANKS))):
        share = median_of(series, f"warm {way}", "read") / (megabytes << 20)
        bound = (Target(against="value", bound=bar),)
        results.state(case, f"bytes read by the job, {way}", share, unit="x", targets=bound)

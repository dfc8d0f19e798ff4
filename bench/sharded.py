"""Cases on a sharded state of four ranks: saves, loads, loads under other layouts, memory, balance.

Loads are measured twice: warm, with every byte in the page cache, and cold, after the pages of all
files were dropped (`posix_fadvise`, DONTNEED, file by file; the cache of the disk or of the virtual
machine's host is not reached).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench import probes, rivals
from bench.floor import FloorMemory, drop_pages, has_direct_io, write_file
from bench.ranks import RankContext, run_ranks
from bench.results import AHEAD_OF_DCP, BenchResults, Target
from bench.states import DenseSpec, dense_state, digests, local_nbytes, local_tensors
from bench.timing import (
    Measured,
    Series,
    interleave,
    median_of,
    phases_of,
    slowest,
    timed,
    values_of,
)
from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.format.names import step_dir

KEPT = 90000
"""Number of the checkpoints that the loads read."""
TIMEOUT_S = 1800.0

_DEFAULTS, _ALONE, _DCP = "holdfast load", "holdfast load alone", "dcp.load"
_SAVED_ON = Layout(tp=2, dp=2)
_LOADED_ON = {
    "load, same layout": _SAVED_ON,
    "load to TP4": Layout(tp=4),
    "load to TP1 x DP2": Layout(dp=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What a case has to reach, as multiples of the better floor."""

    save: float
    """A durable save."""
    load: float
    """A load under the same layout with the default settings, from a warm page cache."""
    stall: float = 1.15
    """The stall of an asynchronous save."""
    async_save: float | None = None
    """An asynchronous save until it is durable; None for no bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurements:
    """What one rank of a run measured."""

    series: Series
    counted: dict[str, float]
    digests: list[int] = field(default_factory=list)
    """Of the tensors that the rank holds."""


def measure(
    results: BenchResults,
    case: str,
    *,
    spec: DenseSpec,
    bars: Bars,
    repeats: int,
    scratch: Path,
    counts_memory: bool = False,
) -> None:
    """Run the case on real processes and add its rows.

    Args:
        results: gets the rows.
        case: the first column of the table.
        spec: the state.
        bars: of the rows.
        repeats: rounds after the warm-up.
        scratch: an empty directory.
        counts_memory: measure memory and balance, too.
    """
    saved = run_ranks(4, _save, spec, repeats, counts_memory, scratch, timeout_s=TIMEOUT_S).results
    _report_saves(results, case, saved, bars)
    _report_balance(results, case, saved, scratch)
    for name, layout in _LOADED_ON.items():
        truth = [each.digests for each in saved] if layout is _SAVED_ON else None
        loaded = run_ranks(
            layout.world_size, _load, layout, spec, repeats, truth, scratch, timeout_s=TIMEOUT_S
        ).results
        bar = bars.load if layout is _SAVED_ON else None
        _report_loads(results, case, name, loaded, bar)
    if counts_memory:
        _report_memory(results, [each.counted for each in saved])


def _barrier() -> None:
    dist.barrier()


class Holdfast:
    """Holdfast's arms on one state."""

    def __init__(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        self._checkpointer = checkpointer
        self._state = state

    def save(self, number: int) -> Measured:
        """`save`: seconds until durable, and of each phase."""
        began = time.perf_counter()
        report = self._checkpointer.save(number, self._state)
        durable = time.perf_counter() - began
        return {"durable": durable} | _phases(report.seconds)

    def save_async(self, number: int) -> Measured:
        """`save_async`: seconds until the caller continues, until durable, and of each phase."""
        began = time.perf_counter()
        pending = self._checkpointer.save_async(number, self._state)
        stall = time.perf_counter() - began
        report = pending.result()
        durable = time.perf_counter() - began
        return {"stall": stall, "durable": durable} | _phases(report.seconds)

    def load(self, step: int, **options: Any) -> Measured:
        """`load` into the state; also the bytes read, as the kernel counts them."""
        before = probes.nbytes_read()
        measured = timed(lambda: self._checkpointer.load(self._state, step=step, **options))
        return measured | {"read": float(probes.nbytes_read() - before)}


def _phases(seconds: Mapping[str, float]) -> Measured:
    return {f"phase {name}": value for name, value in seconds.items()}


# Saves


def _save(
    context: RankContext, spec: DenseSpec, repeats: int, counts_memory: bool, scratch: Path
) -> RankMeasurements:
    """All ways to save, in turns; leaves one checkpoint of each kind for the loads."""
    with ProcessGroups.create(_SAVED_ON) as groups:
        state = dense_state(groups, spec)
        with Checkpointer(scratch / "holdfast", groups=groups) as checkpointer:
            counted = _first_save(checkpointer, state)
            memory = FloorMemory(int(counted["assigned"]))
            ours = Holdfast(checkpointer, state)
            theirs = rivals.Dcp(scratch, rivals.dcp_state(state, groups))
            arms: dict[str, Callable[[int], Measured]] = {
                **floor_writes(memory, scratch, context.rank),
                "holdfast async": ours.save_async,
                "holdfast": ours.save,
                **theirs.save_arms(),
                **theirs.async_arms(),
            }
            arms = {n: _swept(a, scratch, context.rank) for n, a in arms.items()}
            before = checkpointer.stats.num_allocations, probes.num_descriptors()
            ours_alone = {name: arms[name] for name in ("holdfast async", "holdfast")}
            interleave(ours_alone, repeats=1, before_each=_barrier, first=70000)
            after = checkpointer.stats.num_allocations, probes.num_descriptors()
            counted["allocations"], counted["descriptors"] = (
                float(b - a) for a, b in zip(before, after, strict=True)
            )
            series = interleave(arms, repeats=repeats, before_each=_barrier)
            if counts_memory:
                counted |= _memory_of_async(ours, theirs, scratch, context.rank)
            ours.save(KEPT)
            theirs.save(KEPT)
            theirs.close()
        return RankMeasurements(series=series, counted=counted, digests=digests(state))


def _first_save(checkpointer: Checkpointer, state: dict[str, Any]) -> Measured:
    """The first asynchronous save: what it costs in memory in addition to the state."""
    probes.forget_peak()
    before = probes.resident_nbytes()
    report = checkpointer.save_async(1, state).result()
    peak = probes.resident_nbytes("VmHWM") - before
    writer = checkpointer.stats.writer_pid
    private = probes.resident_nbytes("RssAnon", writer) if writer is not None else 0
    return {
        "assigned": float(report.nbytes),
        "unique": float(report.total_nbytes),
        "first stall": report.seconds["stall"],
        "peak": float(peak),
        "writer private": float(private),
    }


def _memory_of_async(ours: Holdfast, theirs: rivals.Dcp, scratch: Path, rank: int) -> Measured:
    """Peak resident memory over what was there before one more asynchronous save."""
    counted: Measured = {}
    for name, arm in (("peak holdfast", ours.save_async), ("peak dcp", theirs.save_async)):
        _barrier()
        probes.forget_peak()
        before = probes.resident_nbytes()
        arm(80000)
        counted[name] = float(probes.resident_nbytes("VmHWM") - before)
        _sweep(scratch, rank)
    return counted


def floor_writes(
    memory: FloorMemory, scratch: Path, rank: int
) -> dict[str, Callable[[int], Measured]]:
    """Name -> the floor of a stall, and of a durable save in each way of writing."""

    def write(number: int, *, direct: bool) -> Measured:
        path = scratch / f"floor-{number:05d}-{rank}"
        return timed(lambda: memory.write(path, direct=direct), "durable")

    arms: dict[str, Callable[[int], Measured]] = {
        "memcpy": lambda _: timed(memory.copy, "stall"),
        "write, buffered": partial(write, direct=False),
    }
    if has_direct_io(scratch):
        arms["write, direct"] = partial(write, direct=True)
    return arms


def floor_reads(memory: FloorMemory, path: Path) -> dict[str, Callable[[int], Measured]]:
    """Name -> the floor of a load, in each way of reading."""

    def read(_: int, *, direct: bool) -> Measured:
        return timed(lambda: memory.read(path, direct=direct))

    arms: dict[str, Callable[[int], Measured]] = {"read, buffered": partial(read, direct=False)}
    if has_direct_io(path.parent):
        arms["read, direct"] = partial(read, direct=True)
    return arms


def _swept(arm: Callable[[int], Measured], scratch: Path, rank: int) -> Callable[[int], Measured]:
    """The same arm, with all files it wrote removed afterwards, outside its time."""

    def act(number: int) -> Measured:
        measured = arm(number)
        _sweep(scratch, rank)
        return measured

    return act


def _sweep(scratch: Path, rank: int) -> None:
    """Remove what an arm has written; collective."""
    _barrier()
    if rank == 0:
        for path in [
            *scratch.glob("floor-*"),
            *scratch.glob("dcp-*"),
            *scratch.glob("holdfast/[!.]*"),  # all but the root's id
        ]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    _barrier()


# Loads


def _load(
    context: RankContext,
    layout: Layout,
    spec: DenseSpec,
    repeats: int,
    truth: list[list[int]] | None,
    scratch: Path,
) -> RankMeasurements:
    """All ways to load into a blank state of a layout, warm and cold.

    Raises:
        AssertionError: Holdfast and DCP bring back different values, or others than were saved.
    """
    with ProcessGroups.create(layout) as groups:
        state = dense_state(groups, spec, blank=True)
        nbytes = local_nbytes(state)
        # Ranks that hold the same bytes read the same file, so that the disk holds each byte once.
        path = scratch / f"floor-read-{groups.index('tp')}"
        if groups.index("dp") == 0:
            write_file(path, nbytes)
        _barrier()
        theirs = rivals.Dcp(scratch, rivals.dcp_state(state, groups))
        with Checkpointer(scratch / "holdfast", groups=groups) as checkpointer:
            ours = Holdfast(checkpointer, state)
            arms: dict[str, Callable[[int], Measured]] = {
                **floor_reads(FloorMemory(nbytes), path),
                _DEFAULTS: lambda _: ours.load(KEPT),
                _ALONE: lambda _: ours.load(KEPT, exchange=False),
                _DCP: lambda _: _load_dcp(theirs),
            }
            warm = interleave(arms, repeats=repeats, before_each=_barrier)
            drop = partial(_drop_pages, scratch, context.rank)
            cold = interleave(arms, repeats=repeats, before_each=drop, warm_ups=0)
            seen = [_digests_of_load(arms[arm], state) for arm in (_DEFAULTS, _ALONE, _DCP)]
    if seen != [truth[context.rank] if truth is not None else seen[0]] * len(seen):
        raise AssertionError("what was loaded is not what was saved, or not the same in all arms")
    _barrier()
    if context.rank == 0:
        for file in scratch.glob("floor-read-*"):
            file.unlink()
    series = warm | {f"cold {name}": rounds for name, rounds in cold.items()}
    return RankMeasurements(series=series, counted={"needed": float(nbytes)})


def _load_dcp(theirs: rivals.Dcp) -> Measured:
    before = probes.nbytes_read()
    measured = theirs.load(theirs.path(KEPT))
    return measured | {"read": float(probes.nbytes_read() - before)}


def _drop_pages(scratch: Path, rank: int) -> None:
    _barrier()
    if rank == 0:
        drop_pages(scratch)
    _barrier()


def _digests_of_load(arm: Callable[[int], Measured], state: dict[str, Any]) -> list[int]:
    """Return what an arm brings back into tensors that were zero before."""
    for tensor in local_tensors(state):
        tensor.zero_()
    _barrier()
    arm(0)
    return digests(state)


# Rows


def _report_saves(
    results: BenchResults, case: str, saved: list[RankMeasurements], bars: Bars
) -> None:
    """A row for each thing that a save is waited for."""
    series = slowest([each.series for each in saved])

    def arms(prefix: str, quantity: str) -> dict[str, list[float]]:
        return {n: values_of(series, n, quantity) for n in series if n.startswith(prefix)}

    sync = arms("dcp.save", "durable")
    writes = arms("write, ", "durable")
    for name, arm, quantity, floors, dcp, bar in (
        ("save, durable", "holdfast", "durable", writes, sync, bars.save),
        ("async save, stall", "holdfast async", "stall", arms("memcpy", "stall"),
         arms("dcp.async_save", "stall"), bars.stall),
        ("async save, until durable", "holdfast async", "durable", writes,
         arms("dcp.async_save", "durable"), bars.async_save),
    ):  # fmt: skip
        results.compare(
            case, name, unit="ms", scale=1e3, holdfast=values_of(series, arm, quantity),
            floors=floors, dcp=dcp, targets=_targets(bar),
        )  # fmt: skip
    for arm in ("holdfast async", "holdfast"):
        results.phases[f"{case}: {arm}"] = phases_of(series, arm)


def _targets(bar: float | None) -> tuple[Target, ...]:
    """A bar against the floor, if there is one, and that against DCP, which every row has."""
    if bar is None:
        return (AHEAD_OF_DCP,)
    return Target(against="floor", bound=bar), AHEAD_OF_DCP


def _report_loads(
    results: BenchResults,
    case: str,
    name: str,
    loaded: list[RankMeasurements],
    bar: float | None,
) -> None:
    """Rows of one layout: with defaults and without exchange, warm and cold; bytes read.

    Only a load under the layout of the save has a bar: a multiple of the floor, and at most 5 %
    more than without exchange, as all ranks are on one host.
    """
    series = slowest([each.series for each in loaded])
    for prefix, cache in (("", "warm"), ("cold ", "cold")):
        floors = {
            arm: values_of(series, arm) for arm in series if arm.startswith(f"{prefix}read, ")
        }
        for arm, what in ((_DEFAULTS, "defaults"), (_ALONE, "exchange=False")):
            is_barred = arm == _DEFAULTS and cache == "warm"
            results.compare(
                case, f"{name}, {cache}, {what}", unit="ms", scale=1e3,
                holdfast=values_of(series, prefix + arm), floors=floors,
                dcp={_DCP: values_of(series, prefix + _DCP)},
                targets=_targets(bar if is_barred else None),
            )  # fmt: skip
        if bar is not None:
            ratio = median_of(series, prefix + _DEFAULTS) / median_of(series, prefix + _ALONE)
            targets = (Target(against="value", bound=1.05),) if cache == "warm" else ()
            name_of_ratio = f"{name}, {cache}, defaults / exchange=False"
            results.state(case, name_of_ratio, ratio, unit="x", targets=targets)
    needed = sum(each.counted["needed"] for each in loaded)
    total = {
        arm: sum(median_of(each.series, arm, "read") for each in loaded)
        for arm in (_DEFAULTS, _DCP)
    }
    results.state(
        case, f"{name}, bytes read / needed", total[_DEFAULTS] / needed, unit="x", floor=1.0,
        dcp=total[_DCP] / needed, targets=(Target(against="value", bound=1.25),),
    )  # fmt: skip


def _report_memory(results: BenchResults, counts: list[dict[str, float]]) -> None:
    """Return what saves allocate, of the rank that needs the most."""
    worst = {name: max(each[name] for each in counts) for name in counts[0]}
    zero = (Target(against="value", bound=0),)
    state = partial(results.state, "memory")
    state("staging allocations after the first save", worst["allocations"], unit="", targets=zero)
    state("descriptors opened after the first save", worst["descriptors"], unit="", targets=zero)
    buffer = worst["assigned"]
    state("first save: peak / staging buffer", worst["peak"] / buffer, unit="x",
          targets=(Target(against="value", bound=1.15),))  # fmt: skip
    state("steady save: peak / staging buffer", worst["peak holdfast"] / buffer, unit="x",
          dcp=worst["peak dcp"] / buffer)  # fmt: skip
    state("writer process, private", worst["writer private"] / 1e6, unit="MB")
    state("first stall (allocates)", worst["first stall"] * 1e3, unit="ms")


def _report_balance(
    results: BenchResults, case: str, saved: list[RankMeasurements], scratch: Path
) -> None:
    """Return how evenly the ranks write, and how much more than each byte once."""
    kept, theirs = scratch / "holdfast" / step_dir(KEPT), scratch / f"dcp-{KEPT}"
    ours = sorted((kept / "data").iterdir())
    num_ranks = len(saved)
    results.state(
        case, "bytes written, max / mean", _imbalance(ours, num_ranks), unit="x",
        dcp=_imbalance(sorted(theirs.glob("*.distcp")), num_ranks),
        targets=(Target(against="value", bound=1.02),),
    )  # fmt: skip
    unique = saved[0].counted["unique"]
    results.state(
        case, "bytes written / unique", _tree_nbytes(kept) / unique, unit="x", floor=1.0,
        dcp=_tree_nbytes(theirs) / unique, targets=(Target(against="value", bound=1.02),),
    )  # fmt: skip


def _imbalance(files: list[Path], num_ranks: int) -> float:
    sizes = [path.stat().st_size for path in files]
    return max(sizes) * num_ranks / sum(sizes)


def _tree_nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

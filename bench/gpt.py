"""Cases on a sharded GPT: stall, save, load, load under another layout, memory, balance."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import probes, rivals
from bench.floor import FloorMemory, has_direct_writes
from bench.results import BenchResults, Target
from bench.states import GptSize, gpt_size, gpt_state, local_nbytes, local_tensors
from bench.timing import Measured, Series, interleave, median_of, slowest, timed, values_of
from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.format.names import step_dir
from tests.harness import RankContext, run_ranks

KEPT = 90000
"""Number of the checkpoints that the loads read."""
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurements:
    """What one rank of a run measured."""

    series: Series
    counted: dict[str, float]


def measure(results: BenchResults, *, megabytes: int, repeats: int, scratch: Path) -> None:
    """Run the cases on real processes and add their rows."""
    size = gpt_size(megabytes)
    saved = run_ranks(4, _save_and_load, size, repeats, scratch, timeout_s=TIMEOUT_S).results
    _report_saves(results, saved, scratch)
    _report_load(results, "load, same layout", saved, Target(against="floor", bound=1.15))
    for layout in (Layout(tp=4), Layout(dp=2)):
        loaded = run_ranks(
            layout.world_size, _reshard, layout, size, repeats, scratch, timeout_s=TIMEOUT_S
        )
        name = "TP4" if layout.tp == 4 else "TP1 x DP2"
        _report_load(results, f"load, TP2 x DP2 to {name}", loaded.results, None)


def _barrier() -> None:
    dist.barrier()


def _save_and_load(
    context: RankContext, size: GptSize, repeats: int, scratch: Path
) -> RankMeasurements:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        state = gpt_state(groups, size)
        counted: dict[str, float] = {"local": local_nbytes(state)}
        with Checkpointer(scratch / "holdfast", groups=groups) as checkpointer:
            counted |= _first_save(checkpointer, state)
            memory = FloorMemory(int(counted["assigned"]))
            ours = Holdfast(checkpointer, state, scratch / "holdfast")
            theirs = rivals.Dcp(scratch, state)
            floor = _floor_arms(memory, scratch, context.rank)
            arms: dict[str, Callable[[int], Measured]] = {
                **floor,
                "holdfast async": ours.save_async,
                "holdfast": ours.save,
                rivals.SYNC: theirs.save,
                rivals.SYNC_CACHED: partial(theirs.save, cached=True),
                rivals.ASYNC: theirs.save_async,
                rivals.ASYNC_CACHED: partial(theirs.save_async, cached=True),
            }
            arms = {n: _swept(a, scratch, context.rank) for n, a in arms.items()}
            before = checkpointer.stats.num_allocations, probes.num_descriptors()
            saves = interleave(arms, repeats=repeats, before_each=_barrier)
            after = checkpointer.stats.num_allocations, probes.num_descriptors()
            counted["allocations"], counted["descriptors"] = (
                float(b - a) for a, b in zip(before, after, strict=True)
            )
            counted |= _memory_of_async(ours, theirs, scratch, context.rank)
            ours.save(KEPT)
            theirs.save(KEPT)
        loads = _loads(groups, size, state, repeats, scratch, context.rank)
    return RankMeasurements(series={**saves, **loads.series}, counted={**counted, **loads.counted})


def _first_save(checkpointer: Checkpointer, state: dict[str, object]) -> Measured:
    """The first asynchronous save: what it costs in memory beyond the state."""
    probes.forget_peak()
    before = probes.resident_nbytes()
    pending = checkpointer.save_async(1, state)
    report = pending.result()
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


class Holdfast:
    """Holdfast's arms on one state."""

    def __init__(self, checkpointer: Checkpointer, state: dict[str, object], root: Path) -> None:
        self._checkpointer = checkpointer
        self._state = state
        self.root = root

    def save(self, number: int) -> Measured:
        """`save`: seconds until durable, and of each phase."""
        report = None

        def act() -> None:
            nonlocal report
            report = self._checkpointer.save(number, self._state)

        measured = timed(act, "durable")
        seconds = dict(report.seconds) if report is not None else {}
        return measured | {f"phase {name}": value for name, value in seconds.items()}

    def save_async(self, number: int) -> Measured:
        """`save_async`: seconds until the caller goes on, until durable, and of each phase."""
        measured: Measured = {}
        done: dict[str, float] = {}

        def act() -> None:
            pending = None

            def start() -> None:
                nonlocal pending
                pending = self._checkpointer.save_async(number, self._state)

            measured.update(timed(start, "stall"))
            if pending is not None:
                done.update(pending.result().seconds)

        durable = timed(act, "durable")
        return measured | durable | {f"phase {name}": value for name, value in done.items()}

    def load(self, step: int, *, exchange: bool = True) -> Measured:
        """`load` into the state; also the bytes needed and read."""
        began = probes.nbytes_read()
        report = None

        def act() -> None:
            nonlocal report
            report = self._checkpointer.load(self._state, step=step, exchange=exchange)

        measured = timed(act)
        if report is None:
            return measured
        return measured | {
            "needed": float(report.nbytes_needed),
            "read": float(probes.nbytes_read() - began),
            "reported": float(report.nbytes_read),
        }


def _floor_arms(
    memory: FloorMemory, scratch: Path, rank: int
) -> dict[str, Callable[[int], Measured]]:
    def write(number: int, *, direct: bool) -> Measured:
        path = scratch / f"floor-{number:05d}-{rank}"
        return timed(lambda: memory.write(path, direct=direct), "durable")

    arms: dict[str, Callable[[int], Measured]] = {
        "memcpy": lambda _: timed(memory.copy, "stall"),
        "write, buffered": partial(write, direct=False),
    }
    if has_direct_writes(scratch):
        arms["write, direct"] = partial(write, direct=True)
    return arms


def _swept(arm: Callable[[int], Measured], scratch: Path, rank: int) -> Callable[[int], Measured]:
    """The same arm, with all files it wrote removed afterwards, outside its time."""

    def act(number: int) -> Measured:
        measured = arm(number)
        _sweep(scratch, rank)
        return measured

    return act


def _sweep(scratch: Path, rank: int) -> None:
    _barrier()
    if rank == 0:
        for path in [*scratch.glob("floor-*"), *scratch.glob("dcp-*"), *scratch.glob("holdfast/*")]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    _barrier()


def _loads(
    groups: ProcessGroups,
    size: GptSize,
    truth: dict[str, object] | None,
    repeats: int,
    scratch: Path,
    rank: int,
) -> RankMeasurements:
    """Loads into blank states of this layout; the last ones are compared."""
    state, other = (gpt_state(groups, size, blank=True) for _ in range(2))
    nbytes = local_nbytes(state)
    memory = FloorMemory(nbytes)
    path = scratch / f"floor-read-{rank}"
    memory.write(path, direct=False)
    theirs = rivals.Dcp(scratch, other)
    with Checkpointer(scratch / "holdfast", groups=groups) as checkpointer:
        ours = Holdfast(checkpointer, state, scratch / "holdfast")

        def load_dcp(_: int) -> Measured:
            before = probes.nbytes_read()
            measured = theirs.load(theirs.path(KEPT))
            return measured | {"read": float(probes.nbytes_read() - before)}

        arms: dict[str, Callable[[int], Measured]] = {
            "read and hash": lambda _: timed(lambda: memory.read_and_hash(path)),
            "holdfast load": lambda _: ours.load(KEPT),
            "holdfast load alone": lambda _: ours.load(KEPT, exchange=False),
            "dcp.load": load_dcp,
        }
        series = interleave(arms, repeats=repeats, before_each=_barrier)
    for mine, his in zip(local_tensors(state), local_tensors(other), strict=True):
        if not torch.equal(mine, his):
            raise AssertionError("Holdfast and DCP loaded different values")
    if truth is not None:
        for mine, true in zip(local_tensors(state), local_tensors(truth), strict=True):
            if not torch.equal(mine, true):
                raise AssertionError("what was loaded is not what was saved")
    path.unlink()
    return RankMeasurements(series=series, counted={"needed by load": float(nbytes)})


def _reshard(
    context: RankContext, layout: Layout, size: GptSize, repeats: int, scratch: Path
) -> RankMeasurements:
    with ProcessGroups.create(layout) as groups:
        return _loads(groups, size, None, repeats, scratch, context.rank)


def _report_saves(results: BenchResults, saved: list[RankMeasurements], scratch: Path) -> None:
    series = slowest([each.series for each in saved])
    dcp_async = (rivals.ASYNC, rivals.ASYNC_CACHED)
    results.compare(
        "stall", "async, steady state", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast async", "stall"),
        floors={"memcpy": values_of(series, "memcpy", "stall")},
        dcp={arm: values_of(series, arm, "stall") for arm in dcp_async},
        target=Target(against="floor", bound=1.15),
    )  # fmt: skip
    writes = [arm for arm in series if arm.startswith("write, ")]
    floors = {arm: values_of(series, arm, "durable") for arm in writes}
    dcp_sync = (rivals.SYNC, rivals.SYNC_CACHED)
    results.compare(
        "save", "durable", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast", "durable"), floors=floors,
        dcp={arm: values_of(series, arm, "durable") for arm in dcp_sync},
        target=Target(against="floor", bound=1 / 0.9),
    )  # fmt: skip
    results.compare(
        "save", "async, until durable", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast async", "durable"), floors=floors,
        dcp={arm: values_of(series, arm, "durable") for arm in dcp_async},
        target=Target(against="floor", bound=1 / 0.9),
    )  # fmt: skip
    for arm in ("holdfast async", "holdfast"):
        results.phases[arm] = {
            name.removeprefix("phase "): median_of(series, arm, name)
            for name in series[arm][0]
            if name.startswith("phase ")
        }
    _report_counts(results, saved, scratch)


def _report_counts(results: BenchResults, saved: list[RankMeasurements], scratch: Path) -> None:
    counts = [each.counted for each in saved]

    def worst(name: str) -> float:
        return max(each[name] for each in counts)

    zero = Target(against="value", bound=0)
    state = results.state
    state("memory", "staging allocations after the first save", worst("allocations"), unit="",
          target=zero)  # fmt: skip
    state("memory", "descriptors opened after the first save", worst("descriptors"), unit="",
          target=zero)  # fmt: skip
    arena = worst("assigned")
    state("memory", "first save: peak over arena", worst("peak") / arena, unit="x",
          target=Target(against="value", bound=1.15))  # fmt: skip
    state("memory", "steady save: peak over arena", worst("peak holdfast") / arena, unit="x",
          dcp=worst("peak dcp") / arena)  # fmt: skip
    state("memory", "writer process, private", worst("writer private") / 1e6, unit="MB")
    state("memory", "first stall (allocates)", worst("first stall") * 1e3, unit="ms")
    unique = worst("unique")
    kept = scratch / "holdfast" / step_dir(KEPT)
    ours = sorted((kept / "data").iterdir())
    theirs = sorted((scratch / f"dcp-{KEPT}").glob("*.distcp"))
    num_ranks = len(saved)
    state("balance", "bytes written, max / mean", _imbalance(ours, num_ranks), unit="x",
          dcp=_imbalance(theirs, num_ranks),
          target=Target(against="value", bound=1.02))  # fmt: skip
    state("balance", "bytes written / unique", _tree_nbytes(kept) / unique, unit="x", floor=1.0,
          dcp=_tree_nbytes(scratch / f"dcp-{KEPT}") / unique,
          target=Target(against="value", bound=1.01))  # fmt: skip


def _imbalance(files: list[Path], num_ranks: int) -> float:
    sizes = [path.stat().st_size for path in files]
    return max(sizes) * num_ranks / sum(sizes)


def _tree_nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _report_load(
    results: BenchResults, case: str, loaded: list[RankMeasurements], target: Target | None
) -> None:
    series = slowest([each.series for each in loaded])
    for arm, what in (("holdfast load alone", "no exchange"), ("holdfast load", "exchange")):
        results.compare(
            case, f"warm page cache, {what}", unit="ms", scale=1e3,
            holdfast=values_of(series, arm),
            floors={"read and hash": values_of(series, "read and hash")},
            dcp={"dcp.load": values_of(series, "dcp.load")}, target=target,
        )  # fmt: skip
    needed = sum(each.counted["needed by load"] for each in loaded)
    total: dict[str, Any] = {
        arm: sum(median_of(each.series, arm, "read") for each in loaded)
        for arm in ("holdfast load", "dcp.load")
    }
    results.state(
        case, "bytes read / needed", total["holdfast load"] / needed, unit="x", floor=1.0,
        dcp=total["dcp.load"] / needed, target=Target(against="value", bound=1.25),
    )  # fmt: skip

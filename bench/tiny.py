"""Cases on many tiny tensors: cost of each, and of planning them again and again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench import rivals
from bench.floor import FloorMemory
from bench.gpt import TIMEOUT_S, Holdfast, RankMeasurements
from bench.results import BenchResults, Target
from bench.states import local_nbytes, local_tensors, sharded_tiny_state, tiny_state
from bench.timing import Measured, interleave, median_of, slowest, timed, values_of
from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.format.names import step_dir
from tests.harness import RankContext, run_ranks

KEPT = 90000
_STEADY_RANKS = 2


def measure(results: BenchResults, *, num_tensors: int, repeats: int, scratch: Path) -> None:
    """One process saves and loads `num_tensors` plain tensors of 64 to 256 bytes."""
    result = run_ranks(1, _tiny, num_tensors, repeats, scratch, init=False, timeout_s=TIMEOUT_S)
    rank = result.results[0]
    series, counted = rank.series, rank.counted
    per = 1e6 / num_tensors
    at_most = Target(against="value", bound=20)
    floors = {arm: values_of(series, arm) for arm in ("write", "read")}
    for name, arm, quantity, floor, dcp in (
        ("save, a tensor", "holdfast", "durable", "write", {rivals.SYNC: "durable"}),
        ("stall, a tensor", "holdfast async", "stall", "memcpy", {rivals.ASYNC: "stall"}),
        ("load, a tensor", "holdfast load", "seconds", "read", {"dcp.load": "seconds"}),
    ):
        best = floors.get(floor) or values_of(series, "memcpy")
        results.compare(
            "tiny tensors", name, unit="µs", scale=per,
            holdfast=values_of(series, arm, quantity), floors={floor: best},
            dcp={each: values_of(series, each, of) for each, of in dcp.items()}, target=at_most,
        )  # fmt: skip
    results.state(
        "tiny tensors", "stored in addition to the payload, a tensor", counted["extra"], unit="B",
        dcp=counted["extra dcp"], target=Target(against="value", bound=160),
    )  # fmt: skip
    for arm in ("holdfast", "holdfast async"):
        results.phases[f"tiny tensors: {arm}"] = {
            name.removeprefix("phase "): median_of(series, arm, name)
            for name in series[arm][0]
            if name.startswith("phase ")
        }


def _tiny(context: RankContext, num_tensors: int, repeats: int, scratch: Path) -> RankMeasurements:
    del context
    state, blank = tiny_state(num_tensors), tiny_state(num_tensors)
    nbytes = local_nbytes(state)
    memory = FloorMemory(nbytes)
    for tensor in local_tensors(blank):
        tensor.zero_()
    theirs, loaded = (rivals.Dcp(scratch, each, alone=True) for each in (state, blank))
    root = scratch / "holdfast-tiny"
    floor_file = scratch / "floor-tiny"
    memory.write(floor_file, direct=False)

    def write(number: int) -> Measured:
        return timed(lambda: memory.write(scratch / f"floor-tiny-{number}", direct=False))

    with Checkpointer(root) as checkpointer:
        ours = Holdfast(checkpointer, state, root)
        into = Holdfast(checkpointer, blank, root)
        ours.save(KEPT)
        theirs.save(KEPT)
        arms: dict[str, Callable[[int], Measured]] = {
            "memcpy": lambda _: timed(memory.copy),
            "write": write,
            "read": lambda _: timed(lambda: memory.read_and_hash(floor_file)),
            "holdfast": ours.save,
            "holdfast async": ours.save_async,
            "holdfast load": lambda _: into.load(KEPT),
            rivals.SYNC: theirs.save,
            rivals.ASYNC: theirs.save_async,
            "dcp.load": lambda _: loaded.load(theirs.path(KEPT)),
        }
        series = interleave(arms, repeats=repeats, before_each=partial(_sweep, scratch))
    for mine, true in zip(local_tensors(blank), local_tensors(state), strict=True):
        if not torch.equal(mine, true):
            raise AssertionError("what was loaded is not what was saved")
    extra = {
        name: (sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) - nbytes) / num_tensors
        for name, path in (("extra", root / step_dir(KEPT)), ("extra dcp", theirs.path(KEPT)))
    }
    return RankMeasurements(series=series, counted=extra)


def _sweep(scratch: Path) -> None:
    """Remove the files of earlier calls, except those that are loaded."""
    for path in scratch.glob("floor-tiny-*"):
        path.unlink()
    for pattern in ("dcp-*", "holdfast-tiny/iter_*"):
        for path in scratch.glob(pattern):
            if not path.name.endswith(str(KEPT)):
                shutil.rmtree(path)


def measure_steady(results: BenchResults, *, num_tensors: int, repeats: int, scratch: Path) -> None:
    """Planning in steady state: `num_tensors` DTensors on each of two ranks."""
    ranks = run_ranks(
        _STEADY_RANKS, _steady, num_tensors, repeats, scratch, timeout_s=TIMEOUT_S
    ).results
    series = slowest([rank.series for rank in ranks])
    plan = [
        measured["phase flatten"] + measured["phase plan"] for measured in series["holdfast async"]
    ]
    results.compare(
        "steady state", f"flatten, sign, agree: {num_tensors} tensors a rank", unit="ms",
        scale=1e3, holdfast=plan, floors={"16-byte reduction": values_of(series, "collective")},
        target=Target(against="value", bound=50),
    )  # fmt: skip
    results.compare(
        "steady state", f"stall: {num_tensors} tensors a rank", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast async", "stall"),
        dcp={
            arm: values_of(series, arm, "stall") for arm in (rivals.ASYNC, rivals.ASYNC_CACHED)
        },
    )  # fmt: skip
    results.state(
        "steady state", "collectives a save", max(r.counted["collectives"] for r in ranks),
        unit="", floor=1, target=Target(against="value", bound=1),
    )  # fmt: skip
    results.phases["steady state"] = {
        name.removeprefix("phase "): median_of(series, "holdfast async", name)
        for name in series["holdfast async"][0]
        if name.startswith("phase ")
    }


def _steady(
    context: RankContext, num_tensors: int, repeats: int, scratch: Path
) -> RankMeasurements:
    layout = Layout(dp=_STEADY_RANKS)
    with ProcessGroups.create(layout) as groups:
        state = sharded_tiny_state(groups, num_tensors)
        root = scratch / "holdfast-steady"
        word = torch.zeros(2, dtype=torch.int64)
        theirs = rivals.Dcp(scratch, state)
        with Checkpointer(root, groups=groups) as checkpointer:
            ours = Holdfast(checkpointer, state, root)
            ours.save_async(1)
            counts: list[int] = []

            def save(number: int) -> Measured:
                before = groups.control.num_collectives
                measured = ours.save_async(number)
                counts.append(groups.control.num_collectives - before)
                return measured

            def before_each() -> None:
                dist.barrier()
                if context.rank == 0:
                    for pattern in ("dcp-*", "holdfast-steady/iter_*"):
                        for path in scratch.glob(pattern):
                            shutil.rmtree(path)
                dist.barrier()

            arms: dict[str, Callable[[int], Measured]] = {
                "collective": lambda _: timed(lambda: dist.all_reduce(word)),
                "holdfast async": save,
                rivals.ASYNC: theirs.save_async,
                rivals.ASYNC_CACHED: partial(theirs.save_async, cached=True),
            }
            series = interleave(arms, repeats=repeats, before_each=before_each, first=1)
    return RankMeasurements(series=series, counted={"collectives": float(max(counts))})

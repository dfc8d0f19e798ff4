"""Cases on many tiny tensors: cost of each, and of planning them again and again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench import rivals
from bench.floor import FloorMemory, write_file
from bench.ranks import RankContext, run_ranks
from bench.results import AHEAD_OF_DCP, BenchResults, Target
from bench.sharded import (
    TIMEOUT_S,
    Holdfast,
    RankMeasurements,
    floor_reads,
    floor_writes,
)
from bench.states import digests, local_nbytes, local_tensors, sharded_tiny_state, tiny_state
from bench.timing import Measured, interleave, phases_of, slowest, timed, values_of
from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.checkpoint.save.handshake import AgreedSave, Handshake
from holdfast.format.names import step_dir

KEPT = 90000
_STEADY_RANKS = 2


def measure(results: BenchResults, *, num_tensors: int, repeats: int, scratch: Path) -> None:
    """One process saves and loads `num_tensors` plain tensors of 64 to 256 bytes."""
    result = run_ranks(1, _tiny, num_tensors, repeats, scratch, init=False, timeout_s=TIMEOUT_S)
    rank = result.results[0]
    series, counted = rank.series, rank.counted

    def arms(prefix: str, quantity: str) -> dict[str, list[float]]:
        return {n: values_of(series, n, quantity) for n in series if n.startswith(prefix)}

    for name, arm, quantity, floor, dcp in (
        ("save, a tensor", "holdfast", "durable", "write, ", "dcp.save"),
        ("stall, a tensor", "holdfast async", "stall", "memcpy", "dcp.async_save"),
        ("load, a tensor", "holdfast load", "seconds", "read, ", "dcp.load"),
    ):
        results.compare(
            "tiny tensors", name, unit="µs", scale=1e6 / num_tensors,
            holdfast=values_of(series, arm, quantity), floors=arms(floor, quantity),
            dcp=arms(dcp, quantity), targets=(Target(against="value", bound=20), AHEAD_OF_DCP),
        )  # fmt: skip
    results.state(
        "tiny tensors", "stored in addition to the payload, a tensor", counted["extra"], unit="B",
        dcp=counted["extra dcp"], targets=(Target(against="value", bound=160),),
    )  # fmt: skip
    for arm in ("holdfast", "holdfast async"):
        results.phases[f"tiny tensors: {arm}"] = phases_of(series, arm)


def _tiny(context: RankContext, num_tensors: int, repeats: int, scratch: Path) -> RankMeasurements:
    """All arms in turns, in one process."""
    del context
    state, blank = tiny_state(num_tensors), tiny_state(num_tensors)
    nbytes = local_nbytes(state)
    memory = FloorMemory(nbytes)
    for tensor in local_tensors(blank):
        tensor.zero_()
    theirs, loaded = (
        rivals.Dcp(scratch, rivals.dcp_state(each, None), alone=True) for each in (state, blank)
    )
    root = scratch / "holdfast-tiny"
    floor_file = scratch / "read-tiny"
    write_file(floor_file, nbytes)

    with Checkpointer(root) as checkpointer:
        ours, into = Holdfast(checkpointer, state), Holdfast(checkpointer, blank)
        ours.save(KEPT)
        theirs.save(KEPT)
        arms: dict[str, Callable[[int], Measured]] = {
            **floor_writes(memory, scratch, 0),
            **floor_reads(memory, floor_file),
            "holdfast": ours.save,
            "holdfast async": ours.save_async,
            "holdfast load": lambda _: into.load(KEPT),
            **theirs.save_arms(),
            **theirs.async_arms(),
            "dcp.load": lambda _: loaded.load(theirs.path(KEPT)),
        }
        series = interleave(arms, repeats=repeats, before_each=partial(_sweep, scratch))
        theirs.close()
    if digests(blank) != digests(state):
        raise AssertionError("what was loaded is not what was saved")
    extra = {
        name: (sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) - nbytes) / num_tensors
        for name, path in (("extra", root / step_dir(KEPT)), ("extra dcp", theirs.path(KEPT)))
    }
    return RankMeasurements(series=series, counted=extra)


def _sweep(scratch: Path) -> None:
    """Remove the files of earlier calls, except those that are loaded."""
    for path in scratch.glob("floor-*"):
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
    what = f"flatten, sign, agree: {num_tensors:,} tensors a rank, RNG()"
    results.compare(
        "steady state", what, unit="ms", scale=1e3, holdfast=plan,
        floors={"16-byte reduction": values_of(series, "collective")},
    )  # fmt: skip
    results.compare(
        "steady state", f"CPU time of {what}", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast async", "agree cpu"),
        targets=(Target(against="value", bound=20),),
    )  # fmt: skip
    results.compare(
        "steady state", f"stall: {num_tensors:,} tensors a rank, RNG()", unit="ms", scale=1e3,
        holdfast=values_of(series, "holdfast async", "stall"),
        dcp={
            arm: values_of(series, arm, "stall") for arm in series if arm.startswith("dcp.")
        },
        targets=(AHEAD_OF_DCP,),
    )  # fmt: skip
    results.state(
        "steady state", "collectives a save", max(r.counted["collectives"] for r in ranks),
        unit="", floor=1, targets=(Target(against="value", bound=1),),
    )  # fmt: skip
    results.phases["steady state"] = phases_of(series, "holdfast async")


@contextmanager
def _cpu_of_agreements() -> Iterator[list[float]]:
    """Yield a list that gets the CPU seconds of the calling thread in all that precedes staging."""
    seconds: list[float] = []
    agree = Handshake.agree

    def timed_agree(*args: Any, **options: Any) -> AgreedSave:
        began = time.thread_time()
        agreed = agree(*args, **options)
        seconds.append(time.thread_time() - began)
        return agreed

    with patch.object(Handshake, "agree", timed_agree):
        yield seconds


def _steady(
    context: RankContext, num_tensors: int, repeats: int, scratch: Path
) -> RankMeasurements:
    """Saves of an unchanged structure in turns, and the collectives of each."""
    layout = Layout(dp=_STEADY_RANKS)
    with ProcessGroups.create(layout) as groups:
        state = sharded_tiny_state(groups, num_tensors)
        root = scratch / "holdfast-steady"
        word = torch.zeros(2, dtype=torch.int64)
        theirs = rivals.Dcp(scratch, rivals.dcp_state(state, groups))
        with Checkpointer(root, groups=groups) as checkpointer:
            ours = Holdfast(checkpointer, state)
            ours.save_async(1)
            counts: list[int] = []

            def save(number: int) -> Measured:
                before = groups.control.num_collectives
                with _cpu_of_agreements() as seconds:
                    measured = ours.save_async(number)
                counts.append(groups.control.num_collectives - before)
                return measured | {"agree cpu": sum(seconds)}

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
                **theirs.async_arms(),
            }
            series = interleave(arms, repeats=repeats, before_each=before_each, first=1)
            theirs.close()
    return RankMeasurements(series=series, counted={"collectives": float(max(counts))})

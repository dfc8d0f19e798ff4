"""The stall of a lazily staged save next to a memcpy: `python -m bench.lazy`.

The ranks hold parameters and Adam's moments as DTensors, split over all of them. In turns within
one run: a memcpy of a rank's bytes, an asynchronous save that copies them before it returns, and
one that lets them be copied later. After each save comes a step, whose time has the wait for what
is not copied yet; a step without a save before it is the third column's measure. The copy takes a
core while the caller continues: without `--ranks` there is a spare one for each rank.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from bench.floor import FloorMemory
from bench.ranks import RankContext, run_ranks
from bench.states import step_of
from bench.timing import Measured, Series, interleave, median_of, slowest, timed
from holdfast import Checkpointer, KeepLast, Layout, OptimizerState, ProcessGroups

MEMCPY, AT_ONCE, LAZILY, NO_SAVE = "memcpy", "at once", "lazily", "no save"
BAR = 0.1


def measure(
    context: RankContext, directory: str, num_layers: int, width: int, num_rounds: int
) -> tuple[Series, int]:
    """One rank: all arms in turns; and its bytes."""
    with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
        mesh = groups.mesh("dp")
        torch.manual_seed(context.rank)
        model = nn.ParameterList(
            DTensor.from_local(torch.randn(width // context.num_ranks, width), mesh, [Shard(0)])
            for _ in range(num_layers)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        step = step_of(model, optimizer)
        step()
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        with Checkpointer(directory, groups=groups, retention=KeepLast(1)) as checkpointer:
            checkpointer.prepare(state)
            nbytes = checkpointer.save_async(0, state, stage="lazily").result().nbytes
            memory = FloorMemory(nbytes)

            def saved(stage: str) -> Callable[[int], Measured]:
                def arm(number: int) -> Measured:
                    began, cpu = time.perf_counter(), time.process_time()
                    pending = checkpointer.save_async(number + 1, state, stage=stage)
                    stall = time.perf_counter() - began
                    step()
                    total = time.perf_counter() - began
                    cpu = time.process_time() - cpu
                    pending.result()
                    durable = time.perf_counter() - began
                    return {"stall": stall, "step": total - stall, "cpu": cpu, "durable": durable}

                return arm

            def plain(number: int) -> Measured:
                del number
                cpu = time.process_time()
                measured = timed(step, "step")
                return measured | {"cpu": time.process_time() - cpu}

            arms: dict[str, Callable[[int], Measured]] = {
                MEMCPY: lambda _: timed(memory.copy, "stall"),
                AT_ONCE: saved("at once"),
                LAZILY: saved("lazily"),
                NO_SAVE: plain,
            }
            series = interleave(arms, repeats=num_rounds, before_each=dist.barrier)
        return series, nbytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lazy", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small: a check, no claim")
    parser.add_argument("--ranks", type=int, help="by default half as many as there are cores")
    options = parser.parse_args(arguments)
    num_cores = os.cpu_count() or 1
    num_ranks = options.ranks or max(num_cores // 2, 1)
    num_layers, width, rounds = (4, 1024, 2) if options.quick else (24, 2048, 9)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        results = run_ranks(
            num_ranks, measure, directory, num_layers, width, rounds, timeout_s=900
        ).results
    series = slowest([each for each, _ in results])
    floor = median_of(series, MEMCPY, "stall")
    table = Table(
        "", "stall, ms", "x memcpy", "step after it, ms", "CPU of both, ms", "durable, ms",
        title=f"{sum(n for _, n in results) / 1e9:.2f} GB, {num_ranks} ranks on "
        f"{num_cores} cores",
    )  # fmt: skip
    for name in (MEMCPY, AT_ONCE, LAZILY, NO_SAVE):
        row = [name]
        for quantity in ("stall", "ratio", "step", "cpu", "durable"):
            if quantity == "ratio":
                has = "stall" in series[name][0]
                row.append(f"{median_of(series, name, 'stall') / floor:.3f}" if has else "")
            else:
                has = quantity in series[name][0]
                row.append(f"{median_of(series, name, quantity) * 1e3:.1f}" if has else "")
        table.add_row(*row)
    Console(width=110).print(table)
    is_met = median_of(series, LAZILY, "stall") <= BAR * floor
    Console().print(f"Bar: a lazy stall of at most {BAR} x memcpy: {'met' if is_met else 'missed'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

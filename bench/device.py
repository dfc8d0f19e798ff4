"""Saves and loads of one CUDA device next to a plain copy and to DCP: `python -m bench.device`.

One rank holds a model and Adam's moments on its device. In turns within one run: a copy of the
bytes to page-locked memory and back, saves of ours (synchronous, asynchronous, lazily staged) and
loads, and the same by DCP. After each asynchronous save comes a step, whose time has the wait for
what is not copied yet. "stream" is how long the device is kept from the work that follows the call.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from bench.ranks import RankContext, run_ranks
from bench.states import step_of
from bench.timing import Measured, Series, interleave, median_of
from holdfast import Checkpointer, KeepLast, Layout, OptimizerState, ProcessGroups

COPY, COPY_BACK = "copy to page-locked memory", "copy from page-locked memory"
SYNC, AT_ONCE, LAZILY, LOAD = "save", "save_async", "save_async, lazily", "load"
DCP_SYNC, DCP_ASYNC, DCP_LOAD = "dcp.save", "dcp.async_save", "dcp.load"
QUANTITIES = ("call", "stream", "step", "done")
FLOORS = {LOAD: COPY_BACK, DCP_LOAD: COPY_BACK, COPY_BACK: COPY_BACK}


def measure(
    context: RankContext, directory: str, num_layers: int, width: int, num_rounds: int
) -> tuple[Series, int]:
    """The rank: all arms in turns; and its bytes."""
    device = torch.device("cuda", context.rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    step = step_of(model, optimizer)
    step()
    state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
    root = Path(directory)

    def theirs() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    with (
        ProcessGroups.create(Layout(dp=1)) as groups,
        Checkpointer(root / "own", groups=groups, retention=KeepLast(1)) as checkpointer,
    ):
        nbytes = checkpointer.save(0, state).nbytes
        dcp.save(theirs(), checkpoint_id=root / "dcp")
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

        def asynchronous(start: Callable[[int], Callable[[], object]]) -> Callable[[int], Measured]:
            """An asynchronous save and a step after it."""

            def arm(number: int) -> Measured:
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                marks[0].record()
                began = time.perf_counter()
                result = start(number)
                call = time.perf_counter() - began
                marks[1].record()
                step()
                torch.cuda.synchronize()
                total = time.perf_counter() - began
                result()
                done = time.perf_counter() - began
                stream = marks[0].elapsed_time(marks[1]) / 1e3
                return {"call": call, "stream": stream, "step": total - call, "done": done}

            return arm

        def finished(action: Callable[[int], object]) -> Callable[[int], Measured]:
            def arm(number: int) -> Measured:
                began = time.perf_counter()
                action(number)
                torch.cuda.synchronize()
                return {"call": time.perf_counter() - began}

            return arm

        def place(number: int) -> Path:
            shutil.rmtree(root / f"dcp{number - 2 * len(arms)}", ignore_errors=True)
            return root / f"dcp{number}"

        arms: Mapping[str, Callable[[int], Measured]] = {
            COPY: finished(lambda _: target.copy_(source)),
            COPY_BACK: finished(lambda _: source.copy_(target)),
            SYNC: finished(lambda n: checkpointer.save(n, state)),
            AT_ONCE: asynchronous(lambda n: checkpointer.save_async(n, state).result),
            LAZILY: asynchronous(
                lambda n: checkpointer.save_async(n, state, stage="lazily").result
            ),
            LOAD: finished(lambda _: checkpointer.load(state)),
            DCP_SYNC: finished(lambda n: dcp.save(theirs(), checkpoint_id=place(n))),
            DCP_ASYNC: asynchronous(
                lambda n: dcp.async_save(theirs(), checkpoint_id=place(n)).result  # type: ignore[union-attr]
            ),
            DCP_LOAD: finished(lambda _: dcp.load(theirs(), checkpoint_id=root / "dcp")),
        }
        series = interleave(arms, repeats=num_rounds, before_each=torch.cuda.synchronize)
    dist.barrier()
    return series, nbytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0, or 2 without a device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.device", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small: a check, no claim")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="where to save")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        Console().print("bench.device needs a CUDA device")
        return 2
    num_layers, width, rounds = (4, 1024, 2) if options.quick else (24, 2048, 6)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        (result,) = run_ranks(
            1, measure, directory, num_layers, width, rounds, timeout_s=900
        ).results
    series, nbytes = result
    table = Table(
        "",
        *(f"{name}, ms" for name in QUANTITIES),
        "call: x copy",
        title=f"{nbytes / 1e9:.2f} GB, {torch.cuda.get_device_name()}",
    )
    for name in series:
        cells = [
            f"{median_of(series, name, quantity) * 1e3:.1f}" if quantity in series[name][0] else ""
            for quantity in QUANTITIES
        ]
        floor = median_of(series, FLOORS.get(name, COPY), "call")
        table.add_row(name, *cells, f"{median_of(series, name, 'call') / floor:.3f}")
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

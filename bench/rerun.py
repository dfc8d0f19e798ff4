"""What a rerun machine costs while nothing is wrong: `python -m bench.rerun`.

Two data ranks train the same model in turns within one run: without a machine, with a disabled one,
with one that validates the loss of each microbatch, and with one whose word the optimizer's own sum
carries. All others are compared with the first. Besides, it prints the collectives of a step beyond
those, and the bytes of kept batches.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.ranks import RankContext, run_ranks
from bench.timing import Measured, Series, interleave, median_of, slowest, timed
from holdfast import Layout, ProcessGroups, ShardedOptimizer
from holdfast.optim.norms import LayoutSum
from holdfast.rerun import NotFinite, ReplayableBatches, Replayed, RerunMachine

PLAIN, DISABLED, VALIDATING = "no machine", "disabled", "validate_results"
CARRIED = "validate_results, veto"
"""What ranks reject is carried by the optimizer's own sum."""
WIDTHS = {"small": 256, "medium": 384, "large": 1024}
"""Of the model of each case: 8 linear layers of so many columns."""
NUM_MICROBATCHES = 4
ROWS = 64


def measure(context: RankContext, directory: str, width: int, num_rounds: int) -> Series:
    """One rank: all arms in turns."""
    del context
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with ProcessGroups.create(Layout(dp=2)) as groups:
        arms = {
            name: _arm(groups, name, Path(directory) / name, width)
            for name in (PLAIN, DISABLED, VALIDATING, CARRIED)
        }
        return interleave(arms, repeats=num_rounds, before_each=dist.barrier, warm_ups=3)


def _batches(width: int) -> Iterator[torch.Tensor]:
    """The same rows again and again, each time as a new tensor."""
    rows = torch.randn(ROWS, width)
    while True:
        yield rows.clone()


class _Sums:
    """Counts the sums of a few numbers over all ranks."""

    def __init__(self) -> None:
        self.count = 0
        sum_up = LayoutSum.__call__

        def counted(total: LayoutSum, values: Sequence[float], *, what: str) -> list[float]:
            self.count += 1
            return sum_up(total, values, what=what)

        LayoutSum.__call__ = counted  # type: ignore[method-assign]


def _arm(
    groups: ProcessGroups, name: str, directory: Path, width: int
) -> Callable[[int], Measured]:
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(width, width), nn.BatchNorm1d(width))]
    model = nn.Sequential(*layers)
    optimizer = ShardedOptimizer(
        model,
        model.parameters(),
        make=partial(torch.optim.AdamW, lr=1e-4),
        groups=groups,
        over="dp_cp",
        divisor=2,
    )
    mode = DISABLED if name in (PLAIN, DISABLED) else VALIDATING
    machine = RerunMachine(
        groups, mode=mode, directory=directory, replayed=Replayed(modules=[model])
    )
    batches = machine.replayable(_batches(width))
    steps = itertools.count()
    sums = _Sums()

    def forward_backward(*, validates: bool) -> None:
        for number in range(NUM_MICROBATCHES):
            with optimizer.microbatch(is_last=number == NUM_MICROBATCHES - 1):
                loss = model(next(batches)).square().mean()
                loss.backward()
            value = loss.item()
            if validates:
                machine.validate("loss", value, NotFinite())

    def step() -> None:
        if name == PLAIN:
            forward_backward(validates=False)
        else:
            for _ in machine.attempts(next(steps), batches):
                forward_backward(validates=True)
                if name == CARRIED:
                    optimizer.step(max_norm=1.0, veto=machine)
        if name != CARRIED:
            optimizer.step(max_norm=1.0)

    def measured(number: int) -> Measured:
        del number
        before, began = groups.control.num_collectives + sums.count, time.process_time()
        result = timed(step)
        result["cpu"] = time.process_time() - began
        kept = batches.kept_nbytes if isinstance(batches, ReplayableBatches) else 0
        result["collectives"] = groups.control.num_collectives + sums.count - before
        return result | {"kept": float(kept)}

    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rerun", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: a check, no claim")
    options = parser.parse_args(arguments)
    table = Table(
        "model", "machine", "step, ms", "ratio", "CPU, ms", "ratio", "collectives", "kept, kB"
    )
    for label, width in WIDTHS.items():
        if options.quick and label != "small":
            continue
        rounds = 3 if options.quick else 90
        with tempfile.TemporaryDirectory() as directory:
            results = run_ranks(2, measure, directory, width, rounds, timeout_s=900).results
        series = slowest(results)
        plain, plain_cpu = median_of(series, PLAIN), median_of(series, PLAIN, "cpu")
        usual = median_of(series, PLAIN, "collectives")
        for name in series:
            seconds, cpu = median_of(series, name), median_of(series, name, "cpu")
            table.add_row(
                label, name, f"{seconds * 1e3:.2f}", f"{seconds / plain:.3f}",
                f"{cpu * 1e3:.2f}", f"{cpu / plain_cpu:.3f}",
                f"{median_of(series, name, 'collectives') - usual:.0f}",
                f"{median_of(series, name, 'kept') / 1e3:.0f}",
            )  # fmt: skip
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A training step with a sharded optimizer next to DDP's, on two ranks: `python -m bench.step`.

Both train the same model with the same torch optimizer, in turns within one run. A block of steps
is timed, parameters in flight at its end waited for. Medians over the blocks, of the slower rank;
"fast" is what a tenth of the blocks do better than, which a machine with other work disturbs least.
"Faults" are pages of memory that a step touches for the first time since the allocator got them
from the kernel, which takes longer than what most of them are needed for.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.ranks import RankContext, run_ranks
from bench.results import BenchResults, Target
from bench.timing import Measured, Series, interleave, median_of, slowest, values_of
from holdfast import Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer
from holdfast.parallel.groups.launches import LaunchRecorder

NUM_RANKS = 2
NUM_ROWS = 8
DDP = "DDP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of linear layers, and how often to step it."""

    num_layers: int
    width: int
    num_blocks: int
    steps_a_block: int
    bounds: tuple[float, float]
    """At most so many times DDP's time: with overlap, without."""


CASES: Mapping[str, Case] = {
    "50 thousand parameters": Case(
        num_layers=12, width=64, num_blocks=300, steps_a_block=5, bounds=(1.2, 1.2)
    ),
    "50 million parameters": Case(
        num_layers=12, width=2048, num_blocks=15, steps_a_block=3, bounds=(0.65, 1.0)
    ),
}
QUICK: Mapping[str, Case] = {
    "50 thousand parameters": replace(CASES["50 thousand parameters"], num_blocks=2)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """What one rank measured, and what it launched in one step, by arm."""

    series: Series
    launches: dict[str, Counter[str]]


def net_of(case: Case) -> nn.Sequential:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    layers = (nn.Linear(case.width, case.width) for _ in range(case.num_layers))
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


adamw = partial(torch.optim.AdamW, lr=1e-3)


def measure(context: RankContext, case: Case) -> RankSteps:
    """One rank: blocks of steps with DDP, with overlap and without, in turns.

    Raises:
        AssertionError: The arms have trained to different parameters.
    """
    with ProcessGroups.create(Layout(dp=context.num_ranks)) as groups:
        x = torch.randn(NUM_ROWS, case.width)
        nets = {arm: net_of(case) for arm in (DDP, "overlap", "no overlap")}
        steps = {
            DDP: (_ddp(nets[DDP], x), _nothing),
            "overlap": _sharded(nets["overlap"], x, groups, overlap=True),
            "no overlap": _sharded(nets["no overlap"], x, groups, overlap=False),
        }
        launches = {}
        for name, (step, finish) in steps.items():
            step()
            finish()
            before = groups.direct().num_exchanges
            with LaunchRecorder(groups) as recorder:
                step()
                finish()
            launches[name] = Counter(f"{each.op} {each.purpose}" for each in recorder.launches)
            # Over sockets of their own, which torch does not see.
            launches[name]["direct"] = groups.direct().num_exchanges - before
        arms = {name: partial(_block, case, *each) for name, each in steps.items()}
        series = interleave(arms, repeats=case.num_blocks, before_each=dist.barrier)
        for arm, net in nets.items():
            pairs = zip(nets[DDP].parameters(), net.parameters(), strict=True)
            if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs):
                raise AssertionError(f"{arm}: other parameters than those of DDP")
    return RankSteps(series=series, launches=launches)


def _block(
    case: Case, step: Callable[[], object], finish: Callable[[], object], _: int
) -> Measured:
    """Seconds, seconds of CPU time and page faults of a step, from a block of them."""
    faults = _num_faults()
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(case.steps_a_block):
        step()
    finish()
    return {
        "seconds": (time.perf_counter() - began) / case.steps_a_block,
        "cpu": (time.process_time() - began_cpu) / case.steps_a_block,
        "faults": (_num_faults() - faults) / case.steps_a_block,
    }


def _num_faults() -> int:
    """Return how many pages the kernel has given to this process so far, without reading a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _nothing() -> None:
    """Return what finishes a block of DDP's steps."""


def _ddp(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """A step."""
    net = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = adamw(net.parameters())

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded(
    net: nn.Module, x: Tensor, groups: ProcessGroups, *, overlap: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step, and what waits until its parameters have arrived."""
    optimizer = ShardedOptimizer(
        net,
        net.parameters(),
        make=adamw,
        groups=groups,
        over="dp_cp",
        divisor=groups.size("dp_cp"),
        overlap=overlap,
    )

    def step() -> None:
        with optimizer.microbatch(is_last=True):
            net(x).square().mean().backward()
        optimizer.step()

    return step, optimizer.synchronize


def _times(series: Series, arm: str) -> tuple[float, float, float]:
    """Milliseconds a step: the median, the fastest tenth of the blocks, the median of CPU time."""
    fast = statistics.quantiles(values_of(series, arm), n=10)[0]
    seconds = (median_of(series, arm), fast, median_of(series, arm, "cpu"))
    return seconds[0] * 1e3, seconds[1] * 1e3, seconds[2] * 1e3


def add_rows(results: BenchResults, *, cases: Mapping[str, Case]) -> None:
    """Two rows of `python -m bench` for each case; the floor's column has the time of DDP."""
    for label, case in cases.items():
        ranks = run_ranks(NUM_RANKS, measure, case, timeout_s=900).results
        series = slowest([rank.series for rank in ranks])
        for arm, bound in zip(("overlap", "no overlap"), case.bounds, strict=True):
            results.compare(
                "a training step (floor: DDP)", f"{label}, {arm}", unit="ms", scale=1e3,
                holdfast=values_of(series, arm), floors={DDP: values_of(series, DDP)},
                targets=(Target(against="floor", bound=bound),),
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0 if every bar is met."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--only", choices=[name.split()[1] for name in CASES])
    options = parser.parse_args(arguments)
    table = Table(
        "parameters", "arm", "ms", "x DDP", "bar", "fast ms", "x DDP", "CPU ms", "x DDP", "faults",
        "launched",
    )  # fmt: skip
    is_met = True
    for label, case in CASES.items():
        if options.only not in (None, label.split()[1]):
            continue
        ranks = run_ranks(NUM_RANKS, measure, case, timeout_s=900).results
        series = slowest([rank.series for rank in ranks])
        bars = dict(zip((DDP, "overlap", "no overlap"), (None, *case.bounds), strict=True))
        for arm, bar in bars.items():
            ours, theirs = _times(series, arm), _times(series, DDP)
            ratios = [mine / their for mine, their in zip(ours, theirs, strict=True)]
            is_met &= bar is None or ratios[0] <= bar
            cells = [f"{x:.2f}" for pair in zip(ours, ratios, strict=True) for x in pair]
            cells.insert(2, f"{bar}" if bar else "")
            cells.append(f"{median_of(series, arm, 'faults'):,.0f}")
            launched = ", ".join(f"{n} {what}" for what, n in ranks[0].launches[arm].items() if n)
            table.add_row(label.removesuffix(" parameters"), arm, *cells, launched)
    Console(width=160).print(table)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A step of a fully sharded model next to bare FSDP2's: `python -m bench.fsdp`.

Three arms train the same model with the same torch optimizer, in turns within one run: torch's
`fully_shard` on the main communicator, with `clip_grad_norm_`; `fully_shard_model` on groups
without `_ag` clones, so on one communicator, too; and on groups with them. All three measure the
norm of the gradient and clip, and launch the same numbers of gathers and reductions, which is
checked. Blocks of steps are timed, the slower rank counts. The bar is on the CPU time that the
library adds where both use one communicator, as the median of the ratios of a round's two blocks.

Runs on GPUs (NCCL) where each rank gets one, otherwise on the CPU (gloo). `--picture FILE` draws
the order of launches instead, from a recording.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from bench.fsdp_picture import draw, record
from bench.ranks import RankContext, give_back_large_blocks, run_ranks
from bench.timing import Measured, Series, interleave, median_of, slowest, values_of
from holdfast import Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.parallel.groups.launches import Launch, LaunchRecorder

BARE, ONE, TWO = "FSDP2", "one communicator", "two communicators"
COMMUNICATORS: Mapping[str, tuple[str, ...] | None] = MappingProxyType(
    {ONE: ("dp", "dp_cp", "expt_dp"), TWO: None}
)
"""Names of the groups of an arm; None: those that a layout has by default, clones included."""
BAR = 1.03
"""At most so many times bare FSDP2's CPU time, on one communicator."""
MAX_NORM = 1.0
NUM_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of linear layers, and how often to step it."""

    num_layers: int
    width: int
    num_blocks: int
    steps_a_block: int


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "24 parameters": Case(num_layers=12, width=64, num_blocks=100, steps_a_block=3),
        "200 parameters": Case(num_layers=100, width=64, num_blocks=20, steps_a_block=1),
        "24 parameters, 5 million elements": Case(
            num_layers=12, width=640, num_blocks=40, steps_a_block=2
        ),
        "24 parameters, 50 million elements": Case(
            num_layers=12, width=2048, num_blocks=15, steps_a_block=2
        ),
    }
)
QUICK: Mapping[str, Case] = MappingProxyType(
    {"24 parameters": replace(CASES["24 parameters"], num_blocks=2, steps_a_block=1)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """What one rank measured, and the launches of one step, by arm."""

    series: Series
    launches: dict[str, list[Launch]]
    device: str


class Layer(nn.Module):
    """A unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> the same shape."""
        return torch.tanh(self.linear(x))


adamw = partial(torch.optim.AdamW, lr=1e-3)


def net_of(case: Case, device: torch.device) -> nn.Sequential:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(case.width) for _ in range(case.num_layers))).to(device)


def pick_device(context: RankContext) -> torch.device:
    """A GPU for each rank if there are as many, otherwise the CPU."""
    if torch.cuda.device_count() < context.num_ranks:
        return torch.device("cpu")
    torch.cuda.set_device(context.rank)
    return torch.device("cuda", context.rank)


def measure(context: RankContext, case: Case) -> RankSteps:
    """One rank: blocks of steps of each arm in turns.

    Raises:
        AssertionError: The arms have trained to different parameters, or launch other numbers of
            gathers or reductions.
    """
    give_back_large_blocks()
    device = pick_device(context)
    backend = "nccl" if device.type == "cuda" else "gloo"
    x = torch.randn(NUM_ROWS, case.width, device=device)
    nets = {arm: net_of(case, device) for arm in (BARE, ONE, TWO)}
    groups = {
        arm: ProcessGroups.create(
            Layout(dp=context.num_ranks, name=arm), names=names, backend=backend
        )
        for arm, names in COMMUNICATORS.items()
    }
    try:
        steps = {BARE: _bare(nets[BARE], x, groups[ONE])}
        steps |= {arm: _sharded(nets[arm], x, each) for arm, each in groups.items()}
        launches = {}
        for arm, step in steps.items():
            step()
            with LaunchRecorder(groups[TWO if arm == TWO else ONE]) as recorder:
                step()
            launches[arm] = list(recorder.launches)
        _check_launches(launches)
        arms = {arm: partial(_block, case, step, device) for arm, step in steps.items()}
        series = interleave(arms, repeats=case.num_blocks, before_each=dist.barrier)
        _check_equal(nets)
    finally:
        for each in groups.values():
            each.close()
    return RankSteps(series=series, launches=launches, device=device.type)


def _check_launches(launches: Mapping[str, Sequence[Launch]]) -> None:
    """AssertionError unless all arms gather and reduce equally often in a step."""
    counts = {
        arm: {op: sum(each.op == op for each in found) for op in ("all_gather", "reduce_scatter")}
        for arm, found in launches.items()
    }
    if any(count != counts[BARE] for count in counts.values()):
        raise AssertionError(f"the arms launch different numbers: {counts}")


def _check_equal(nets: Mapping[str, nn.Module]) -> None:
    """AssertionError unless all arms have trained to the same shards."""
    for arm, net in nets.items():
        for ours, theirs in zip(net.parameters(), nets[BARE].parameters(), strict=True):
            mine, expected = (each.to_local() for each in (ours, theirs))  # type: ignore[attr-defined]
            if not torch.allclose(mine, expected, rtol=1e-3, atol=1e-4):
                raise AssertionError(f"{arm}: other parameters than those of FSDP2")


def _block(case: Case, step: Callable[[], object], device: torch.device, _: int) -> Measured:
    """Seconds and seconds of CPU time of a step, from a block of them."""
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(case.steps_a_block):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "seconds": (time.perf_counter() - began) / case.steps_a_block,
        "cpu": (time.process_time() - began_cpu) / case.steps_a_block,
    }


def _bare(net: nn.Sequential, x: Tensor, groups: ProcessGroups) -> Callable[[], object]:
    """A step of torch's own."""
    mesh = groups.mesh("dp_cp")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = adamw(net.parameters())

    def step() -> None:
        net(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sharded(net: nn.Sequential, x: Tensor, groups: ProcessGroups) -> Callable[[], object]:
    """A step of the library's."""
    sharded = fully_shard_model(net, groups, experts=(), units=net)
    optimizer = adamw(net.parameters())

    def step() -> None:
        with sharded.microbatch(is_last=True):
            net(x).square().mean().backward()
        sharded.step(optimizer, max_norm=MAX_NORM)

    return step


def trace_text(launches: Sequence[Launch]) -> str:
    """The launches in order, repeats counted: `3 all_gather a, 2 x (reduce_scatter b, ...)`."""
    runs = [(name, len(list(same))) for name, same in groupby(_name(each) for each in launches)]
    words = [f"{count} {name}" if count > 1 else name for name, count in runs]
    pairs = groupby(zip(words[1::2], words[2::2], strict=False))
    found = words[:1]
    for pair, same in pairs:
        count, text = len(list(same)), ", ".join(pair)
        found.append(f"{count} x ({text})" if count > 1 else text)
    return ", ".join(found + (words[-1:] if len(words) % 2 == 0 else []))


def _name(launch: Launch) -> str:
    return f"{launch.op} {launch.purpose}"


def ratios_of(series: Series, arm: str) -> tuple[float, float, float]:
    """Times of an arm as multiples of bare FSDP2's: median, fastest tenth, CPU time.

    The last is the median of the ratios within a round, which the machine disturbs alike.
    """
    medians = (median_of(series, arm), median_of(series, BARE))
    fast = [min_tenth(values_of(series, each)) for each in (arm, BARE)]
    cpu = [values_of(series, each, "cpu") for each in (arm, BARE)]
    pairs = [own / bare for own, bare in zip(*cpu, strict=True)]
    return medians[0] / medians[1], fast[0] / fast[1], statistics.median(pairs)


def min_tenth(values: Sequence[float]) -> float:
    """Return what a tenth of the values are below."""
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0 if the bar is met, or was not measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fsdp", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a check, no claim")
    parser.add_argument("--ranks", type=int, default=2, help="processes; GPUs if there are")
    parser.add_argument("--only", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the launch order")
    options = parser.parse_args(arguments)
    if options.picture:
        options.picture.write_text(draw(record()))
        return 0
    console, is_met = Console(width=140), True
    table = Table("model", "arm", "ms", "x FSDP2", "fast, x", "CPU, x", "bar")
    traces: dict[str, str] = {}
    for label, case in (QUICK if options.quick else CASES).items():
        if options.only not in (None, label):
            continue
        ranks = run_ranks(options.ranks, measure, case, timeout_s=900).results
        series = slowest([rank.series for rank in ranks])
        for arm in (BARE, ONE, TWO):
            ratios = ratios_of(series, arm)
            is_met &= arm != ONE or ratios[2] <= BAR
            table.add_row(
                label, arm, f"{median_of(series, arm) * 1e3:.2f}",
                *(f"{ratio:.3f}" for ratio in ratios), f"{BAR}" if arm == ONE else "",
            )  # fmt: skip
            traces[arm] = trace_text(ranks[0].launches[arm])
        table.title = f"a step on {options.ranks} ranks ({ranks[0].device})"
    console.print(table)
    for arm, trace in traces.items():
        console.print(f"[bold]{arm}[/], one step: {trace}", highlight=False)
    return 0 if is_met or options.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())

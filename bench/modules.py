"""What several modules cost next to bare messages and separate steps: `python -m bench.modules`.

Four ranks, an encoder on two data ranks and a language model on two tensor ranks. Two pairs of arms
take turns within one run:

- *exchange*: activations forward and gradients back, by `Bridge`, and by bare `isend` and `irecv`
  of the same tensors between the same ranks, whose sizes every rank knows beforehand;
- *step*: `MultiModuleOptimizer.step`, and each module's `ShardedOptimizer.step` by itself, which
  measures its own norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.ranks import RankContext, run_ranks
from bench.timing import Series, interleave, median_of, slowest, timed
from holdfast import Layout, ModuleGroups, ModuleLayouts, MultiModuleOptimizer, ShardedOptimizer
from holdfast.bridge import Bridge, BridgePlan

BRIDGE, BARE = "Bridge", "bare messages"
ONE_STEP, OWN_STEPS = "MultiModuleOptimizer", "each module by itself"
PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"exchange": (BRIDGE, BARE), "step": (ONE_STEP, OWN_STEPS)}
)
"""What is compared with what."""
NUM_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes, and how often to measure."""

    num_tokens: int
    """Of each sample."""
    width: int
    num_rounds: int


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "64 kB": Case(num_tokens=32, width=64, num_rounds=150),
        "4 MB": Case(num_tokens=256, width=512, num_rounds=60),
        "64 MB": Case(num_tokens=2048, width=1024, num_rounds=15),
    }
)
"""By bytes that a step of all samples sends forward (8 samples in float32), each once."""


def layouts_of() -> ModuleLayouts:
    """Encoder and language model on their own ranks."""
    return ModuleLayouts(
        {"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))},
        edges=[("vision", "language")],
    )


def measure(context: RankContext, case: Case) -> Series:
    """One rank: all arms in turns."""
    del context
    with ModuleGroups.create(layouts_of()) as groups:
        arms: dict[str, Callable[[], object]] = {
            BRIDGE: _with_bridge(groups, case),
            BARE: _bare(groups, case),
            ONE_STEP: _one_step(groups, case.width),
            OWN_STEPS: _own_steps(groups, case.width),
        }
        return interleave(
            {name: lambda _, arm=arm: timed(arm) for name, arm in arms.items()},  # type: ignore[misc]
            repeats=case.num_rounds,
            before_each=dist.barrier,
            warm_ups=2,
        )


def _with_bridge(groups: ModuleGroups, case: Case) -> Callable[[], object]:
    bridge = Bridge(groups, "vision", "language")
    counts = [case.num_tokens] * (NUM_SAMPLES // 2)
    given = torch.randn(sum(counts), case.width, requires_grad=True)

    def exchange() -> None:
        given.grad = None
        bridged = bridge(given, counts) if groups.has("vision") else bridge()
        bridged.backward(None if bridged.tokens is None else torch.ones_like(bridged.tokens))

    return exchange


def _bare(groups: ModuleGroups, case: Case) -> Callable[[], object]:
    rank = groups.rank
    plan = BridgePlan(groups.layouts["vision"], groups.layouts["language"])
    group = groups.edge("vision", "language").group("dp")
    shape = (case.num_tokens * NUM_SAMPLES // 2, case.width)

    def exchange() -> None:
        for messages in (plan.activations, plan.gradients):
            works = []
            for each in messages:
                if rank == each.giver:
                    works.append(dist.isend(torch.ones(shape), each.taker, group=group))
                elif rank == each.taker:
                    works.append(dist.irecv(torch.empty(shape), each.giver, group=group))
            for work in works:
                if work is not None:
                    work.wait()

    return exchange


def _optimizers(groups: ModuleGroups, width: int) -> tuple[dict[str, nn.Module], dict[str, object]]:
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, object] = {}
    for name in groups.modules:
        torch.manual_seed(0)
        models[name] = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        optimizers[name] = ShardedOptimizer(
            models[name],
            models[name].parameters(),
            make=partial(torch.optim.AdamW, lr=1e-4),
            groups=groups[name],
            over="dp_cp",
            divisor=2,
            name=name,
        )
    return models, optimizers


def _one_step(groups: ModuleGroups, width: int) -> Callable[[], object]:
    models, optimizers = _optimizers(groups, width)
    together = MultiModuleOptimizer(groups, optimizers)  # type: ignore[arg-type]
    x = torch.randn(8, width)

    def step() -> None:
        with together.microbatch(is_last=True):
            for model in models.values():
                model(x).square().mean().backward()
        together.step(max_norm=1.0)

    return step


def _own_steps(groups: ModuleGroups, width: int) -> Callable[[], object]:
    models, optimizers = _optimizers(groups, width)
    x = torch.randn(8, width)

    def step() -> None:
        for name, model in models.items():
            optimizer = optimizers[name]
            assert isinstance(optimizer, ShardedOptimizer)
            with optimizer.microbatch(is_last=True):
                model(x).square().mean().backward()
            optimizer.step(max_norm=1.0)

    return step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.modules", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a check, no claim")
    options = parser.parse_args(arguments)
    table = Table("activations", "what", "ours, ms", "compared with", "ms", "ratio")
    for label, case in CASES.items():
        if options.quick and label != "64 kB":
            continue
        used = replace(case, num_rounds=3) if options.quick else case
        series = slowest(run_ranks(4, measure, used, timeout_s=900).results)
        for what, (ours, other) in PAIRS.items():
            mine, theirs = median_of(series, ours), median_of(series, other)
            table.add_row(
                label, f"{what}, {ours}", f"{mine * 1e3:.2f}", other, f"{theirs * 1e3:.2f}",
                f"{mine / theirs:.2f}",
            )  # fmt: skip
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

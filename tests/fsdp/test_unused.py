"""Parameters that no rank uses in a step have no gradient, in torch's own step, too."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from holdfast import Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from tests.fsdp.common import STRATEGIES
from tests.harness import RankContext, run_ranks


class Branching(nn.Module):
    """A layer of which a letter each chooses a part; one part's gradient is -0.0 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.ones(1))  # one row: the other ranks have none
        self.nothing = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, parts: str) -> Tensor:
        x = torch.tanh(self.up(x))
        if "b" in parts:
            x = x + self.branch(x)
        if "g" in parts:
            x = x * self.gain
        if "n" in parts:
            x = x + (self.nothing * -0.0).sum() * x.detach().square()
        return x


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Branching(), Branching()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, parts: str) -> Tensor:
        x = self.layers[0](x, parts)
        if "1" in parts:
            x = self.layers[1](x, parts)
        loss: Tensor = self.head(x).square().mean()
        return loss


Parts = tuple[str, str]
"""Those that the last rank uses, and the other ranks."""
STEPS: tuple[tuple[Parts, ...], ...] = (
    (("bgn", "bgn"), ("1bgn", "1bgn")),  # a layer that has not run before the second microbatch
    (("", "b"),),
    (("1", "1"), ("1g", "1")),  # in the second microbatch, on one rank
    (("", ""), ("", "")),
    (("1", "1n"), ("", "")),
    (("bg1", "bg1"), ("n", "n")),
)


Found = tuple[list[Tensor], list[bool]]
"""Values of the parameters after a step, and before it, for each, if it has a gradient."""


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, ways: tuple[str, ...]) -> Found:
    """Step as plain loops do."""
    has_gradient = [p.grad is not None for p in model.parameters()]
    if "clips" in ways:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad(set_to_none="zeros" not in ways)
    return [p.detach().clone() for p in model.parameters()], has_gradient


def rows(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(2, 4, generator=generator)


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def in_one_process(kind: str, ways: tuple[str, ...], num_ranks: int) -> list[Found]:
    model = Branches()
    optimizer = make(kind, model)
    found = []
    for step, microbatches in enumerate(STEPS):
        model.head.requires_grad_(step > 0)
        for number, parts in enumerate(microbatches):
            if "forgets" in ways:
                optimizer.zero_grad()
            for rank in range(num_ranks):
                used = parts[rank < num_ranks - 1]
                (model(rows(step, number, rank), used) / num_ranks).backward()
        found.append(take_step(optimizer, model, ways))
    return found


def train(
    context: RankContext, layout: dict[str, int], cases: list[tuple[str, Any, tuple[str, ...]]]
) -> list[str]:
    wrong = []
    size = context.num_ranks
    with ProcessGroups.create(Layout(**cast("dict[str, Any]", layout))) as groups:
        for kind, strategy, ways in cases:
            expected = in_one_process(kind, ways, size)
            model = Branches()
            sharded = fully_shard_model(
                model,
                groups,
                experts=(),
                units=model.layers,
                strategy=strategy,
                outer_reduction="microbatch" if "outer" in ways else "step",
                precision=PRECISIONS.get(ways),
            )
            optimizer = make(kind, model)
            for step, microbatches in enumerate(STEPS):
                model.head.requires_grad_(step > 0)
                for number, parts in enumerate(microbatches):
                    if "forgets" in ways:
                        optimizer.zero_grad()
                    given = rows(step, number, context.rank), parts[context.rank < size - 1]
                    if "plain" in ways:
                        model(*given).backward()
                        continue
                    with sharded.microbatch(is_last=number == len(microbatches) - 1):
                        model(*given).backward()
                values, has_gradient = take_step(optimizer, model, ways)
                if has_gradient != expected[step][1]:
                    wrong.append(f"{kind} {strategy} {ways} step {step}: gradients {has_gradient}")
                shards = cast("list[DTensor]", values)
                pairs = zip(shards, expected[step][0], strict=True)
                gap = max(float((p.full_tensor() - whole).abs().max()) for p, whole in pairs)
                if not gap < (0.1 if ways in PRECISIONS else 1e-6):
                    wrong.append(f"{kind} {strategy} {ways} step {step}: off by {gap}")
    return wrong


PRECISIONS: dict[tuple[str, ...], torch.dtype | MixedPrecisionPolicy] = {
    ("bfloat16",): torch.bfloat16,
    ("float16",): MixedPrecisionPolicy(param_dtype=torch.float16),
    ("float16", "float64"): MixedPrecisionPolicy(torch.float16, torch.float64),
}
WAYS: tuple[tuple[str, ...], ...] = (
    (),
    ("clips",),
    ("plain", "clips"),
    ("zeros",),
    ("outer",),
    ("forgets",),
    *PRECISIONS,
)


def test_a_parameter_that_no_rank_uses_stays_as_it_is_in_steps_of_the_torch_optimizer() -> None:
    """F10: it had a gradient of zeros, so that momentum and decay moved it.

    Where others had waited for the last microbatch, in a wider dtype, FSDP2 refused these zeros.
    A layer that the first microbatch leaves out failed with AttributeError in that backward.
    What is frozen in the first forward, and thawed later, failed in its first reduction.
    """
    cases = [("sgd", "optim", ("bfloat16",))]
    for wrong in run_ranks(2, train, {"dp": 2}, cases).results:
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 3}, {"dp": 2, "replicas": 2}, {"dp": 4, "replicas": 2}])
def test_unused_parameters_in_all_strategies_and_layouts(layout: dict[str, int]) -> None:
    """F10: with and without contexts, clipping, gradients that are cleared, other precisions."""
    kinds = itertools.cycle(("sgd", "adamw"))
    pairs = [*itertools.product(STRATEGIES, WAYS)][1 :: layout["dp"] + 2]
    cases = [(kind, *pair) for kind, pair in zip(kinds, pairs, strict=False)]
    for wrong in run_ranks(layout["dp"], train, layout, cases).results:
        assert wrong == []

"""Parameters that no rank uses in a step have no gradient, in torch's own step, too."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

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
    (("1bgn", "1bgn"), ("1bgn", "1bgn")),
    (("", "b"),),
    (("1", "1"), ("1g", "1")),  # in the second microbatch, on one rank
    (("", ""), ("", "")),
    (("1", "1n"), ("", "")),
    (("bg1", "bg1"), ("n", "n")),
)


def take_step(optimizer: torch.optim.Optimizer, model: nn.Module, ways: tuple[str, ...]) -> None:
    """Step as plain loops do."""
    if "clips" in ways:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad(set_to_none="zeros" not in ways)


def rows(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(2, 4, generator=generator)


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


def in_one_process(kind: str, ways: tuple[str, ...], num_ranks: int) -> list[list[Tensor]]:
    model = Branches()
    optimizer = make(kind, model)
    values = []
    for step, microbatches in enumerate(STEPS):
        for number, parts in enumerate(microbatches):
            for rank in range(num_ranks):
                used = parts[rank < num_ranks - 1]
                (model(rows(step, number, rank), used) / num_ranks).backward()
        take_step(optimizer, model, ways)
        values.append([p.detach().clone() for p in model.parameters()])
    return values


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
            )
            optimizer = make(kind, model)
            for step, microbatches in enumerate(STEPS):
                for number, parts in enumerate(microbatches):
                    given = rows(step, number, context.rank), parts[context.rank < size - 1]
                    if "plain" in ways:
                        model(*given).backward()
                        continue
                    with sharded.microbatch(is_last=number == len(microbatches) - 1):
                        model(*given).backward()
                take_step(optimizer, model, ways)
                found: list[Any] = [*model.parameters()]
                pairs = zip(found, expected[step], strict=True)
                gap = max(float((p.full_tensor() - whole).abs().max()) for p, whole in pairs)
                if not gap < 1e-6:
                    wrong.append(f"{kind} {strategy} {ways} step {step}: off by {gap}")
                    break
    return wrong


WAYS: tuple[tuple[str, ...], ...] = ((), ("clips",), ("plain", "clips"), ("zeros",), ("outer",))


def test_a_parameter_that_no_rank_uses_stays_as_it_is_in_steps_of_the_torch_optimizer() -> None:
    """F10: it had a gradient of zeros, so that momentum and decay moved it."""
    cases = [("adamw", "optim_grads_params", ("plain", "clips")), ("sgd", "no_shard", ())]
    for wrong in run_ranks(2, train, {"dp": 2}, cases).results:
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"dp": 3}, {"dp": 2, "replicas": 2}, {"dp": 4, "replicas": 2}, {"dp": 1, "cp": 2}]
)
def test_unused_parameters_in_all_strategies_and_layouts(layout: dict[str, int]) -> None:
    """F10: with and without contexts, clipping, zeroed gradients and a sum in each microbatch."""
    cases = [*itertools.product(("sgd",), STRATEGIES, WAYS)]
    num_ranks = layout["dp"] * layout.get("cp", 1)
    for wrong in run_ranks(num_ranks, train, layout, cases).results:
        assert wrong == []

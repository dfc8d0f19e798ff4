"""Gradients of the same losses have one divisor in all modules, whatever their widths (M19)."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Bridge, Layout, ModuleGroups, ModuleLayouts
from holdfast.errors import ConfigError
from holdfast.optim import MultiModuleOptimizer, ShardedOptimizer
from holdfast.optim.divisors import refuse_unequal_divisors
from tests.harness import RankContext, run_ranks

NUM_ROWS, WIDTH = 8, 3
WIDTHS = [(1, 2), (2, 1), (4, 2)]
MORE_WIDTHS = [(2, 2), (2, 4), (1, 4)]
sgd = functools.partial(torch.optim.SGD, lr=0.1)


def net(name: str) -> nn.Linear:
    torch.manual_seed(len(name))
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def rows_of(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64)


def row_losses(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().sum(1)


def truth(frozen: str, steps: int) -> dict[str, nn.Linear]:
    """One process: the mean over all rows."""
    models = {name: net(name) for name in ("vision", "language")}
    trained = [p for name, m in models.items() if name != frozen for p in m.parameters()]
    optimizer = sgd(trained)
    for step in range(steps):
        row_losses(models["language"](models["vision"](rows_of(step)))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return models


def layouts_of(widths: tuple[int, int], *, is_colocated: bool) -> ModuleLayouts:
    source, destination = widths
    if is_colocated:
        size = max(widths)
        layouts = {
            "vision": Layout(dp=source, tp=size // source),
            "language": Layout(dp=destination, tp=size // destination),
        }
    else:
        layouts = {
            "vision": Layout(dp=source),
            "language": Layout(dp=destination, ranks=range(source, source + destination)),
        }
    name = f"{widths} {is_colocated}"
    return ModuleLayouts(layouts, edges=[("vision", "language")], name=name)


class Run:
    """Both modules with these divisors; None for one that is not trained."""

    def __init__(self, groups: ModuleGroups, bridge: Any, divisors: dict[str, int | None]):
        self.groups, self.bridge = groups, bridge
        self.models = {name: net(name) for name in groups.modules}
        self.optimizer = MultiModuleOptimizer(
            groups,
            {
                name: None
                if (divisor := divisors[name]) is None
                else ShardedOptimizer(
                    model,
                    model.parameters(),
                    make=sgd,
                    groups=groups[name],
                    over="dp_cp",
                    divisor=divisor,
                    elementwise=True,
                )
                for name, model in self.models.items()
            },
        )
        for name, model in self.models.items():
            model.requires_grad_(divisors[name] is not None)

    def forward(
        self, step: int, *, is_sum: bool = False, is_detached: bool = False
    ) -> tuple[Tensor, int | None]:
        """Return this rank's loss with the anchor, and the rows of the loss."""
        groups, tokens, counts, num_rows = self.groups, None, None, None
        loss = torch.zeros((), dtype=torch.float64)
        if groups.has("vision"):
            own = groups["vision"]
            tokens = self.models["vision"](rows_of(step).chunk(own.size("dp"))[own.index("dp")])
            counts = [1] * len(tokens)
            if is_detached:
                loss, tokens = loss + row_losses(tokens).mean(), tokens.detach()
        bridged = self.bridge(tokens, counts)
        if bridged.tokens is not None:
            losses = row_losses(self.models["language"](bridged.tokens))
            num_rows = len(losses)
            loss = loss + (losses.sum() if is_sum else losses.mean())
        return loss + bridged.anchor, num_rows

    def backward(self, step: int, **options: bool) -> int | None:
        """Return the rows of this rank's loss."""
        with self.optimizer.microbatch(is_last=True):
            loss, num_rows = self.forward(step, **options)
            loss.backward()  # type: ignore[no-untyped-call]
        return num_rows

    def difference(self, expected: dict[str, nn.Linear]) -> float:
        self.optimizer.synchronize()
        return max(
            float((one - other).detach().abs().max())
            for name, model in self.models.items()
            for one, other in zip(model.parameters(), expected[name].parameters(), strict=True)
        )


def geometry(groups: ModuleGroups, widths: tuple[int, int]) -> list[str]:
    """Train with every choice of divisors; the errors."""
    bridge, errors = Bridge(groups, "vision", "language"), []
    for frozen, divisors in (
        ("", {"vision": widths[1], "language": widths[1]}),
        ("language", {"vision": widths[1], "language": None}),
        ("vision", {"vision": None, "language": widths[1]}),
    ):
        run = Run(groups, bridge, divisors)
        run.backward(0)
        run.optimizer.step()
        assert run.difference(truth(frozen, 1)) < 1e-12, (widths, frozen)
    own = dict(zip(("vision", "language"), widths, strict=True))
    untrained: dict[str, int | None] = {**own, "language": None}
    for divisors in (own, untrained):
        run = Run(groups, bridge, divisors)
        if own["vision"] not in ({1, own["language"]} if divisors is untrained else {widths[1]}):
            run.backward(0)
            with pytest.raises(ConfigError) as caught:
                run.optimizer.step()
            errors.append(str(caught.value))
        assert run.difference(truth("", 0)) == 0
        # The next step works, with any divisors.
        run.optimizer.step(num_tokens=run.backward(0, is_sum=True))
        frozen = "language" if divisors is untrained else ""
        assert run.difference(truth(frozen, 1)) < 1e-12, (widths, divisors)
    # A gradient that does not come over the bridge is of no one else's losses.
    run = Run(groups, bridge, own)
    run.backward(0, is_detached=True)
    run.optimizer.step()
    return errors


def geometries(context: RankContext, all_widths: list[tuple[int, int]]) -> dict[str, list[str]]:
    errors = {}
    for widths in all_widths:
        for is_colocated in (False, True):
            layouts = layouts_of(widths, is_colocated=is_colocated)
            if context.rank in layouts.union.ranks:
                with ModuleGroups.create(layouts) as groups:
                    errors[layouts.name] = geometry(groups, widths)
    return errors


@pytest.mark.parametrize(
    "all_widths",
    [
        pytest.param(WIDTHS, marks=pytest.mark.slow),
        pytest.param(MORE_WIDTHS, marks=pytest.mark.nightly),
    ],
)
def test_the_divisor_of_all_modules_is_the_number_of_losses(
    all_widths: list[tuple[int, int]],
) -> None:
    """M19: means and sums of losses, disjoint and colocated; others are refused on all ranks."""
    results = run_ranks(6, geometries, all_widths).results
    for widths in all_widths:
        for is_colocated in (False, True):
            name = f"{widths} {is_colocated}"
            first, *others = [result[name] for result in results if name in result]
            assert all(other == first for other in others)
            source, destination = widths
            is_wrong = source != destination
            assert len(first) == is_wrong + (is_wrong and source != 1)
            for text in first:
                assert f"'language' is divided by {source} in 'vision'" in text
                assert f"divisor={destination}, the data ranks of 'language'" in text
            if is_wrong:
                assert f", by {destination} in 'language'." in first[0]


@pytest.mark.parametrize(
    ("divisors", "edges", "named"),
    [
        ({"a": 2, "b": 1, "c": 1}, [], None),
        ({"a": 2, "b": 1, "c": 1}, [("a", "b")], "'b' is divided by 2 in 'a', by 1 in 'b'."),
        # Over a module that is not trained, and to one.
        ({"a": 2, "c": 1}, [("a", "b"), ("b", "c")], "'c' is divided by 2 in 'a', by 1 in 'c'."),
        ({"a": 4}, [("a", "b"), ("b", "c")], "'c' is divided by 4 in 'a'."),
        ({"a": 1}, [("a", "b"), ("b", "c")], None),
        # Two that one feeds, and two that feed one.
        ({"b": 2, "c": 1}, [("a", "b"), ("a", "c")], None),
        ({"a": 2, "b": 2, "c": 1}, [("a", "b"), ("a", "c")], "'c' is divided by 2 in 'a'"),
        ({"a": 2, "b": 1}, [("a", "c"), ("b", "c")], "'c' is divided by 2 in 'a', by 1 in 'b'."),
        ({"a": 2, "b": 2, "c": 2}, [("a", "c"), ("b", "c")], None),
    ],
)
def test_modules_that_get_gradients_of_the_same_losses_are_compared(
    divisors: dict[str, int], edges: list[tuple[str, str]], named: str | None
) -> None:
    layouts = {name: Layout(dp=2) for name in "abc"}
    if named is None:
        refuse_unequal_divisors(layouts, divisors, edges=edges, name="optimizer")
    else:
        with pytest.raises(ConfigError, match=re.escape(named)):
            refuse_unequal_divisors(layouts, divisors, edges=edges, name="optimizer")

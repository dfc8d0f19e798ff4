"""Gradients that no step has used when a checkpoint is made."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.integrations.gradients import (
    GradientWatch,
    empty_gradients,
    gradients_of,
    gradients_part,
    unused_gradients,
)
from tests.harness import RankContext, run_ranks


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A module after one backward, and its optimizer."""
    module = torch.nn.Linear(3, 2)
    module(torch.full((1, 3), float(seed))).sum().backward()
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_gradient_is_used_until_it_changes() -> None:
    """However it was set to zero, and where the memory of a used one is another's now."""
    module, optimizer = trained(1)
    parameters = dict(module.named_parameters())
    assert sorted(unused_gradients(parameters)) == ["bias", "weight"]  # not watched
    watch = GradientWatch([optimizer])
    optimizer.step()
    assert not unused_gradients(parameters)
    module.bias.grad.add_(1.0)
    assert [*unused_gradients(parameters)] == ["bias"]
    optimizer.step()
    optimizer.zero_grad()
    assert not unused_gradients(parameters)
    module(torch.ones(1, 3)).sum().backward()
    assert sorted(unused_gradients(parameters)) == ["bias", "weight"]
    optimizer.step()
    watch.close()
    module(torch.ones(1, 3)).sum().backward()
    assert sorted(unused_gradients(parameters)) == ["bias", "weight"]


def _named(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(module.named_parameters())


def save(context: RankContext, root: str) -> list[bool]:
    """Save other gradients on each rank, and load them."""
    module, _ = trained(1 + context.rank)
    if context.rank:
        module.bias.grad = None  # of which its rows had no use
    before = {name: each.clone() for name, each in gradients_of(_named(module)).items()}
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        parameters = _named(module)
        checkpointer.save(1, {"gradients": gradients_part(unused_gradients(parameters))})
        template = gradients_part(empty_gradients(parameters, before))
        checkpointer.load({"gradients": template})
    return [torch.equal(each, before[name]) for name, each in gradients_of(_named(module)).items()]


def test_each_rank_has_its_own_and_another_number_their_mean(tmp_path: Path) -> None:
    """X27. DDP sums accumulated gradients at the step, and divides them by the ranks."""
    assert run_ranks(2, save, str(tmp_path)).results == [[True, True], [True]]
    module = torch.nn.Linear(3, 2)
    gradients = empty_gradients(dict(module.named_parameters()), ["weight", "bias"])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load({"gradients": gradients_part(gradients)})
    assert module.weight.grad.tolist() == [[1.5] * 3] * 2
    assert module.bias.grad.tolist() == [0.5, 0.5]

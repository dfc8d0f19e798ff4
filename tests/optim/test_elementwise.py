"""Optimizers that join elements are found out, whatever they are called; the others are not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import ConfigError, ProcessGroups
from holdfast.optim import ShardedOptimizer


class Lion(torch.optim.Optimizer):
    """Signs of an average: elementwise, and not of torch."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        average.lerp_(g, 1 - group["beta"])
        p.sub_(average.sign(), alpha=group["lr"])


class Trust(Lion):
    """LAMB's ratio under a name that nobody has heard of."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.sub_(g * (p.norm() / (g.norm() + 1e-6)), alpha=group["lr"])


class Clipping(Lion):
    """Clips over all of its tensors: pieces on two ranks have two norms."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class ForeachNorm(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        tensors = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms = torch._foreach_norm([p.grad for p in tensors])
        torch._foreach_div_([p.grad for p in tensors], norms)
        super().step()


class Blockwise(Lion):
    """8-bit state in blocks of 256, for tensors of 4096 elements and more."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.numel() < 4096:
            return super().update(p, g, state, group)
        flat = g.flatten()
        blocks = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
        state["absmax"] = blocks.abs().amax(1)
        scale = state["absmax"][:, None].clamp(min=1e-12)
        rounded = (blocks / scale * 127).round() / 127 * scale
        p.sub_(rounded.flatten()[: p.numel()].view_as(p), alpha=group["lr"])
        return None


class Factored(Lion):
    """Only where there are two dims: pieces have one."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.ndim == 2:
            g = g / g.square().mean(0, keepdim=True).sqrt().clamp(min=1e-6)
        super().update(p, g, state, group)


class DecayMatrices(Lion):
    """Decays by the number of dims, which pieces do not have."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.ndim > 1:
            p.mul_(0.9)
        super().update(p, g, state, group)


class RowState(Lion):
    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        state["counts"] = torch.ones(3)
        super().update(p, g, state, group)


class Noisy(Lion):
    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.add_(torch.randn_like(p), alpha=group["lr"])
        random.random()
        np.random.rand()


class Distance(Lion):
    """One step size for all, estimated from all, as D-adaptation does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = max(
                [group.get("d", 1e-3)] + [float(p.grad.abs().sum()) for p in group["params"]]
            )
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


class NeedsClosure(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class MyLBFGS(torch.optim.LBFGS):
    pass


class MyAdafactor(torch.optim.Adafactor):
    pass


ELEMENTWISE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "lr 0": partial(torch.optim.SGD, lr=0.0),
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.0)),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "no eps": partial(torch.optim.Adam, eps=0.0),
}
JOINING: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "trust": (Trust, "Trust .*does not update elements one by one"),
    "lr 0": (partial(Trust, lr=0.0), "Trust .*does not update elements one by one"),
    "clipping": (Clipping, "Clipping .*does not update elements one by one"),
    "foreach norm": (ForeachNorm, "does not update elements one by one"),
    "blockwise": (Blockwise, "Blockwise"),
    "factored": (Factored, "does not update elements one by one"),
    "decay": (DecayMatrices, "does not update elements one by one"),
    "row state": (RowState, r"keeps 'counts' of shape \[3\]"),
    "noisy": (Noisy, "draws random numbers"),
    "distance": (Distance, "does not update elements one by one"),
    "closure": (NeedsClosure, "a trial that .*closure.*elementwise=True"),
    "lbfgs": (lambda g: MyLBFGS(g[0]["params"]), r"MyLBFGS \(a LBFGS\) does not"),
    "adafactor": (MyAdafactor, r"MyAdafactor \(a Adafactor\) does not"),
}


def built(make: Callable[..., torch.optim.Optimizer], **options: Any) -> ShardedOptimizer:
    net = nn.Linear(3, 2)
    groups = options.pop("parameters", None) or [{"params": list(net.parameters())}]
    if callable(groups):
        groups = groups(net)
    return ShardedOptimizer(
        net, groups, make=make, groups=ProcessGroups.single(), over="dp_cp", divisor=1, **options
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_taken(name: str) -> None:
    torch.manual_seed(0)
    optimizer = built(ELEMENTWISE[name])
    for entries in optimizer.inner.state.values():  # the trial was made with others
        assert entries["step"] == 0


@pytest.mark.parametrize("name", JOINING)
def test_optimizers_that_join_elements_are_refused(name: str) -> None:
    make, message = JOINING[name]
    with pytest.raises(ConfigError, match=message):
        built(make)


def test_a_word_is_enough() -> None:
    for name in ("trust", "closure", "adafactor"):
        assert built(JOINING[name][0], elementwise=True).inner.param_groups


def test_the_trial_leaves_no_trace() -> None:
    net = nn.Linear(3, 2)
    weights = [p.clone() for p in net.parameters()]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    for make in (Noisy, Lion):
        with contextlib.suppress(ConfigError):
            ShardedOptimizer(
                net, net.parameters(), make=make, groups=ProcessGroups.single(), over="dp_cp",
                divisor=1,
            )  # fmt: skip
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(weights[0], net.weight)
    assert torch.equal(weights[1], net.bias)


def by_option(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Joins elements only where a group says so."""
    kind = Trust if any(group.get("trusted") for group in groups) else Lion
    assert len(groups) == 2
    assert all("trusted" in group for group in groups)
    return kind(groups)


def test_the_trial_uses_the_options_of_the_groups() -> None:
    def groups(trusted: bool) -> Callable[[nn.Linear], list[dict[str, Any]]]:
        return lambda net: [
            {"params": [net.weight], "trusted": False},
            {"params": [net.bias], "trusted": trusted},
        ]

    built(by_option, parameters=groups(False))
    with pytest.raises(ConfigError, match="one by one"):
        built(by_option, parameters=groups(True))


def test_many_groups_are_tried_once_each_kind() -> None:
    made: list[int] = []

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        made.append(len(groups))
        return torch.optim.AdamW(groups)

    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    groups = [{"params": [p], "weight_decay": p.ndim * 0.1} for p in net.parameters()]
    ShardedOptimizer(net, groups, make=make, groups=ProcessGroups.single(), over="dp_cp", divisor=1)
    assert made == [40, 2, 2, 2]


def test_make_has_to_take_the_tensors_it_is_given() -> None:
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ConfigError, match="other tensors than make was called with"):
        built(lambda groups: strange)
    with pytest.raises(ConfigError, match="has to be a torch optimizer of the 1 groups"):
        built(lambda groups: torch.optim.SGD([*groups, {"params": []}], lr=0.1))

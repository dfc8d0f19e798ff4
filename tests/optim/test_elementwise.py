"""Optimizers that join elements are found out, whatever they are called; the others are not."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast import ConfigError, HoldfastError, Layout, ProcessGroups
from holdfast.optim import ReducedOptimizer, ShardedOptimizer
from tests.harness import RankContext, run_ranks


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


class MatrixState(Lion):
    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.ndim > 1:
            state["rows"] = torch.zeros_like(p)
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


class Prodigy(Lion):
    """One step size for all, which grows only while gradients point the same way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            d = group.setdefault("d", 1e-6)
            top, bottom = group.get("top", 0.0), 0.0
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["start"], state["sum"] = p.clone(), torch.zeros_like(p)
                top += d * float((p.grad * (state["start"] - p)).sum())
                state["sum"].add_(p.grad, alpha=d)
                bottom += float(state["sum"].abs().sum())
                p.sub_(p.grad.sign(), alpha=d * group["lr"])
            group["top"] = top
            group["d"] = max(d, top / bottom if bottom else d)


class Late(Trust):
    """Joins elements after some steps only."""

    after = 20

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        state["step"] = state.get("step", 0) + 1
        kind = Trust if state["step"] > self.after else Lion
        kind.update(self, p, g, state, group)


class OnlyLarge(Trust):
    """Joins elements of large matrices only."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        (Trust if p.numel() > 8192 else Lion).update(self, p, g, state, group)


class Steep(Lion):
    """Clips by its own norm, where that is large."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        norm = float(g.norm())
        super().update(p, g, state, group)
        if norm > 1e4:
            p.mul_(0.5)


class Tiny(Lion):
    """Stops where the gradient vanishes as a whole."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if float(g.norm()) > 2e-5:
            super().update(p, g, state, group)


class Preconditioned(Lion):
    """Shampoo's and Muon's kind: matrices are multiplied."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.ndim == 2 and g.abs().sum() > 0:
            left = state.setdefault("left", torch.eye(len(p)))
            left.addmm_(g, g.T)
            g = torch.linalg.solve(left, g)
        super().update(p, g, state, group)


class Adan(Lion):
    """Averages of gradients and of their differences: elementwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state.update(last=g.clone(), a=torch.zeros_like(p), b=torch.zeros_like(p))
            state.update(c=torch.zeros_like(p), step=torch.zeros(()))
        state["step"] += 1
        change = g - state["last"]
        state["last"].copy_(g)
        state["a"].lerp_(g, 0.02)
        state["b"].lerp_(change, 0.08)
        state["c"].lerp_((g + change).square(), 0.01)
        p.sub_((state["a"] + state["b"]) / (state["c"].sqrt() + 1e-8), alpha=group["lr"])


class SignSGD(Lion):
    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.sub_(g.sign(), alpha=group["lr"])


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
    "adan": Adan,
    "sign": SignSGD,
    "no eps": partial(torch.optim.Adam, eps=0.0),
}
JOINING: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "trust": (Trust, "Trust .*does not update elements one by one"),
    "lr 0": (partial(Trust, lr=np.float32(0)), "Trust .*does not update elements one by one"),
    "clipping": (Clipping, "Clipping .*does not update elements one by one"),
    "foreach norm": (ForeachNorm, "does not update elements one by one"),
    "blockwise": (Blockwise, "Blockwise"),
    "factored": (Factored, "does not update elements one by one"),
    "decay": (DecayMatrices, "does not update elements one by one"),
    "row state": (RowState, r"keeps 'counts' of shape \[3\]"),
    "matrix state": (MatrixState, "MatrixState keeps 'rows' only for some tensors"),
    "noisy": (Noisy, "draws random numbers"),
    "distance": (Distance, "does not update elements one by one"),
    "prodigy": (partial(Prodigy, lr=1.0), "Prodigy does not update elements one by one"),
    "late": (Late, "Late does not update elements one by one"),
    "only large": (OnlyLarge, "OnlyLarge does not update elements one by one"),
    "steep": (Steep, "Steep does not update elements one by one"),
    "tiny": (Tiny, "Tiny does not update elements one by one"),
    "preconditioned": (Preconditioned, "Preconditioned does not update elements one by one"),
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
    refused = pytest.raises(ConfigError, match="draws random numbers")
    for make, expected in ((Noisy, refused), (Lion, contextlib.nullcontext())):
        with torch.device("meta"), expected:  # nor does it depend on torch.set_default_device
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
    assert made == [40] + [2] * 3


class LateSGD(torch.optim.SGD):
    """A subclass of a class that is known, which is not, although its `step` is torch's."""

    def _init_group(self, *args: Any) -> Any:
        join_late(self)
        return super()._init_group(*args)


def join_late(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Join elements of each tensor after some steps, of which a short trial makes fewer."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            state["calls"] = state.get("calls", 0) + 1
            if state["calls"] > Late.after:
                with torch.no_grad():
                    p.sub_(p.mean())


def hooked(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_post_hook(join_late)
    return optimizer


def replaced(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.SGD(groups, lr=0.1)
    own = optimizer.step
    optimizer.step = lambda closure=None: [own(closure), join_late(optimizer)][0]
    return optimizer


@pytest.mark.parametrize("way", ["subclass", "hook", "every hook", "object", "class", "function"])
def test_classes_of_torch_that_were_changed_are_found_out(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: only code that is torch's own is known to update elements one by one."""
    makes: dict[str, Any] = {"subclass": LateSGD, "hook": hooked, "object": replaced}
    own = torch.optim.SGD.step

    @wraps(own)
    def joining(self: Any, closure: Any = None) -> Any:
        own(self, closure)
        join_late(self)

    def centred(params: list[Tensor], gradients: list[Tensor], *_: Any, **__: Any) -> None:
        for p, gradient in zip(params, gradients, strict=True):
            p.sub_(gradient - gradient.mean())

    if way == "class":
        vars(joining).pop("hooked", None)  # so torch puts its own wrapper around it once more
        monkeypatch.setattr(torch.optim.SGD, "step", joining)
    if way == "function":  # one that `step` calls, so in the first steps of any trial
        monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", centred)
    handle = register_optimizer_step_post_hook(join_late) if way == "every hook" else None
    try:
        with pytest.raises(ConfigError, match="SGD does not update elements one by one"):
            built(makes.get(way, torch.optim.SGD))
    finally:
        if handle is not None:
            handle.remove()


def test_make_has_to_take_the_tensors_it_is_given() -> None:
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ConfigError, match="other tensors than make was called with"):
        built(lambda groups: strange)
    with pytest.raises(ConfigError, match="has to be a torch optimizer of the 1 groups"):
        built(lambda groups: torch.optim.SGD([*groups, {"params": []}], lr=0.1))


class OwnShape(Lion):
    """Joins elements of one shape, which only this model has."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if p.ndim == 2 and p.shape[1] == 17:
            g = g - g.mean()
        super().update(p, g, state, group)


def test_the_trial_uses_the_shapes_of_the_model() -> None:
    """S3."""
    built(OwnShape)
    net = nn.Linear(17, 5)
    with pytest.raises(ConfigError, match="OwnShape does not update elements one by one"):
        ShardedOptimizer(
            net, net.parameters(), make=OwnShape, groups=ProcessGroups.single(), over="dp_cp",
            divisor=1,
        )  # fmt: skip


class PerTensor(Lion):
    """Keeps a scale of each parameter, of which each shard makes its own."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        step = state["step"] = state.get("step", 0) + 1
        state["scale"] = g.norm() if step > 2 else torch.ones(())
        p.sub_(g / state["scale"], alpha=group["lr"])


def parted(context: RankContext) -> list[tuple[int, str]]:
    """The step at which each optimizer is refused that joins elements against its declaration."""
    found = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for make in (partial(Prodigy, lr=1.0), PerTensor, Adan, torch.optim.AdamW):
            torch.manual_seed(3)
            net = nn.Linear(7, 3)
            optimizer = ShardedOptimizer(
                net, net.parameters(), make=make, groups=groups, over="dp_cp", divisor=2,
                elementwise=True, align_nbytes=4,
            )  # fmt: skip
            number, message = 0, ""
            while number < 6 and not message:
                number += 1
                with optimizer.microbatch(is_last=True):
                    net(torch.arange(7.0)).square().sum().backward()
                try:
                    optimizer.step()
                except ConfigError as error:
                    message = str(error)
            found.append((number, message))

        def step() -> None:
            net(torch.arange(7.0)).square().sum().backward()
            optimizer.step()

        def count_on_rank_1() -> None:
            for state in optimizer.inner.state.values():
                state["step"] += context.rank

        one_fails = mock.patch.object(optimizer.inner, "step", side_effect=OSError)
        failed = pytest.raises(HoldfastError, match="rank 1: OSError")
        with failed, one_fails if context.rank else contextlib.nullcontext():
            step()
        with pytest.raises(ConfigError, match=r"in 'step' .* update before this one has failed"):
            step()
        count_on_rank_1()  # as a load of the last checkpoint
        step()
        count_on_rank_1()
        with pytest.raises(ConfigError, match=r"in 'step' .* joins elements"):
            step()
        torch.manual_seed(3)
        whole = ReducedOptimizer(Prodigy(nn.Linear(7, 3).parameters()), groups)
        for p in whole.parameters():
            p.grad = torch.full_like(p, 1.0 + context.rank)  # as if nothing had reduced it
        whole.step()  # from a start at which no estimate has moved yet
        for p in whole.parameters():
            p.grad = torch.full_like(p, 1.0 + context.rank)
        with pytest.raises(ConfigError, match="ranks differ in 'top' of parameter group 0"):
            whole.step()
    return found


def test_shards_that_part_are_named_at_the_step_in_which_they_do() -> None:
    """I5, M15: a trial cannot show everything, a declaration may be wrong, an update may fail."""
    first, second = run_ranks(2, parted).results
    assert first == second
    (_, prodigy), (step, tensor), *honest = first
    assert "ranks differ in 'top' of parameter group 0 after the update" in prodigy
    assert "on rank 0; " in prodigy
    assert step == 3
    assert "ranks differ in 'scale' of the state of weight after the update" in tensor
    assert "keep its parameters whole" in tensor
    assert honest == [(6, ""), (6, "")]

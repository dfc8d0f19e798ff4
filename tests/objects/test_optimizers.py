"""Every torch optimizer, with every setting that changes what it keeps (row O1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import Checkpointer, PlacementError
from tests.objects.optimizers import Make, assert_kept, net, parts, train, words

O = torch.optim  # noqa: E741


def of(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


def matrices(kind: Any, **options: Any) -> Make:
    return lambda model: kind([p for p in model.parameters() if p.ndim == 2], **options)


def two_groups(kind: Any, **options: Any) -> Make:
    def make(model: nn.Module) -> Any:
        decayed = [p for p in model.parameters() if p.ndim == 2]
        plain = [p for p in model.parameters() if p.ndim != 2]
        groups = [
            {"params": plain, "weight_decay": 0.0, "name": "plain"},
            {"params": decayed, "weight_decay": 0.1, "lr": 0.05, "note": None},
        ]
        return kind(groups, **options)

    return make


def tensor_lr(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), lr=torch.tensor(0.01), **options)


TORCH: dict[str, Make] = {
    "sgd": of(O.SGD, lr=0.1),
    "momentum": of(O.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "momentum in groups": two_groups(O.SGD, lr=0.1, momentum=0.9),
    "adam": of(O.Adam, lr=0.01),
    "adam foreach": of(O.Adam, lr=0.01, foreach=True),
    "adam fused": of(O.Adam, lr=0.01, fused=True),
    "adam capturable": of(O.Adam, lr=0.01, capturable=False, differentiable=False),
    "adam tensor lr": tensor_lr(O.Adam, foreach=False),
    "adam tensor lr fused": tensor_lr(O.Adam, fused=True),
    "adamw amsgrad": of(O.AdamW, lr=0.01, amsgrad=True),
    "adamw groups": two_groups(O.AdamW, lr=0.01),
    "adamw tensor betas": of(
        O.AdamW, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "adagrad": of(O.Adagrad, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "adadelta": of(O.Adadelta, lr=0.5),
    "adamax": of(O.Adamax, lr=0.01),
    "nadam": of(O.NAdam, lr=0.01, decoupled_weight_decay=True),
    "radam": of(O.RAdam, lr=0.01),
    "rprop": of(O.Rprop, lr=0.01),
    "rmsprop": of(O.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "asgd": of(O.ASGD, lr=0.01, t0=2),
    "adafactor": of(O.Adafactor, lr=0.01),
    "lbfgs": of(O.LBFGS, lr=0.1, history_size=4, max_iter=3),
    "lbfgs wolfe": of(O.LBFGS, lr=0.1, history_size=3, max_iter=4, line_search_fn="strong_wolfe"),
    "muon": matrices(O.Muon, lr=0.01),
}
COMPLEX = ("sgd", "momentum", "adam", "adamw amsgrad", "adagrad", "rmsprop")


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_optimizer_is_kept(tmp_path: Path, name: str) -> None:
    assert_kept(tmp_path, net, TORCH[name])


@pytest.mark.parametrize("name", ["momentum", "adamw amsgrad", "adafactor", "nadam", "muon"])
def test_it_is_kept_in_bf16(tmp_path: Path, name: str) -> None:
    assert_kept(tmp_path, partial(net, dtype=torch.bfloat16), TORCH[name])


@pytest.mark.parametrize("name", COMPLEX)
def test_it_is_kept_for_complex_parameters(tmp_path: Path, name: str) -> None:
    assert_kept(tmp_path, partial(net, dtype=torch.complex64), TORCH[name])


def test_sparse_adam_is_kept(tmp_path: Path) -> None:
    assert_kept(tmp_path, words, of(O.SparseAdam, lr=0.1))


def test_it_is_kept_before_the_first_step(tmp_path: Path) -> None:
    """Going back to a step without moments leaves none."""
    for number, name in enumerate(("momentum", "adam", "adagrad", "lbfgs")):
        assert_kept(tmp_path / str(number), net, TORCH[name], steps=0)


class Wide(torch.optim.Optimizer):
    """Momentum in float32, whatever the parameter's dtype, and all that torch's form can hold."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("global", {"steps": 0, "norms": [torch.zeros(2)]})  # type: ignore[call-overload]
        count["steps"] += 1
        count["norms"] = [*count["norms"][-2:], torch.full((2,), float(count["steps"]))]
        for group in self.param_groups:
            group["d"] = group.get("d", 1.0) * 1.25
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                wide = state.setdefault("wide", torch.zeros(p.shape, dtype=torch.float32))
                history = state.setdefault("history", [])
                state["history"] = [*history[-1:], p.grad.float().mean()]
                state.setdefault("nested", {})["count"] = len(history)
                wide.mul_(0.9).add_(p.grad.float())
                scale = 1 / (1 + count["norms"][-1].sum())
                p.add_((-group["lr"] * group["d"] * scale * wide).to(p.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_belongs_to_no_parameter_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_kept(tmp_path, partial(net, dtype=dtype), of(Wide))


class Aliased(torch.optim.Optimizer):
    """Keeps moments that are views of one buffer, or the parameter's own memory, or expanded."""

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        if not self.state[params[0]]:
            flat = torch.zeros(sum(p.numel() for p in params))
            pieces = flat.split([p.numel() for p in params])
            for p, piece in zip(params, pieces, strict=True):
                self.state[p]["moment"] = piece.view(p.shape)
                if self.how == "parameter":
                    self.state[p]["updated"] = p.data
                if self.how == "expanded":
                    self.state[p]["scale"] = torch.ones(1).expand(p.shape)
            if self.how == "buffer":
                self.state[params[0]]["all"] = flat
        for p in params:
            state = self.state[p]
            state["moment"].mul_(0.9).add_(p.grad)
            state.get("updated", p).sub_(state["moment"] * state.get("scale", 1.0) * 0.1)
        if self.how == "buffer":
            self.state[params[0]]["all"].mul_(0.5)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("buffer", r"optimizer\.state\.scale\.moment and .*\.all: .*share memory"),
        ("parameter", r"optimizer\.state\.\S+\.updated: .* is the memory of model\.\S+ itself"),
        ("pieces", ""),
        ("expanded", ""),
    ],
)
def test_state_that_a_load_would_untie_is_refused(tmp_path: Path, how: str, why: str) -> None:
    """R2: before, a fresh optimizer had two memories for one, and its next steps were others."""
    make = of(Aliased, how=how)
    if not why:
        assert_kept(tmp_path, net, make)
        return
    for order in (("model", "optimizer"), ("optimizer", "model")):
        model = net(0)
        optimizer = make(model)
        train(model, optimizer, range(1))
        state = parts(model, optimizer)
        with pytest.raises(PlacementError, match=why):
            Checkpointer(tmp_path).save(1, {name: state[name] for name in order})


class Rotating(torch.optim.Optimizer):
    """As SOAP: steps in a basis of eigenvectors, which are in columns; another view has gaps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                made = torch.linalg.eigh(p.grad.T @ p.grad + torch.eye(p.shape[1])).eigenvectors
                state |= {
                    "bases": [made, p.grad.T.contiguous()],
                    "moment": torch.zeros(p.T.shape).T,
                }
                state |= {"same": state["bases"][0], "gaps": torch.ones(3, 4)[:, ::2]}
                state |= {"turned": torch.ones(3, 4), "count": 0}
            assert not state["bases"][0].is_contiguous()
            assert not state["moment"].is_contiguous()
            assert state["bases"][1].is_contiguous()
            assert state["same"] is state["bases"][0]
            assert state["turned"].is_contiguous() is (state["count"] <= 4)
            state["count"] += 1
            if state["count"] == 5:
                state["turned"] = state["turned"].T.contiguous().T
            state["moment"].mul_(0.9).add_(p.grad)
            p.sub_((state["moment"] @ state["bases"][0] @ state["bases"][0].T) * 0.1)


class Turning(Rotating):
    """Its state is tensors alone, the first of them in columns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"moment": torch.zeros(p.T.shape).T, "mean": torch.zeros(p.shape)}
            assert not state["moment"].is_contiguous()
            assert state["mean"].is_contiguous()
            state["moment"].mul_(0.9).add_(p.grad)
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_((state["moment"] @ state["moment"].T @ state["mean"]) * 0.1)


class RotatingByForm(Rotating):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 33, bias=False), nn.Tanh(), nn.Linear(33, 3, bias=False))


@pytest.mark.parametrize("kind", [Rotating, RotatingByForm, Turning])
def test_the_memory_order_of_state_is_kept(tmp_path: Path, kind: Any) -> None:
    """O1: products of matrices in another order of memory round otherwise."""
    assert_kept(tmp_path, wide, of(kind))


def with_hooks(model: nn.Module) -> Any:
    """Hooks that add what is in no attribute of torch's, and take it back."""
    optimizer = Wide(model.parameters())
    extra: dict[str, Any] = {"calls": 0, "average": torch.zeros(3)}

    def before(_: Any, args: Any, kwargs: Any) -> None:
        extra["calls"] += 1
        extra["average"] = extra["average"] * 0.5 + extra["calls"]

    def stated(_: Any, form: dict[str, Any]) -> dict[str, Any]:
        return {**form, "extra": {**extra, "average": extra["average"].clone()}}

    def taken(_: Any, form: dict[str, Any]) -> dict[str, Any]:
        extra.update(form["extra"])
        return {"state": form["state"], "param_groups": form["param_groups"]}

    optimizer.register_step_pre_hook(before)
    optimizer.register_state_dict_post_hook(stated)
    optimizer.register_load_state_dict_pre_hook(taken)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_are_used(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where torch's own load casts float32 state to bf16: it is back in float32."""
    assert_kept(tmp_path, partial(net, dtype=dtype), with_hooks)


class Averaging(torch.optim.AdamW):
    """Overrides both methods: an average of the weights, and a counter, in attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.count = 0
        self.average: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        held = [p.detach().float() for group in self.param_groups for p in group["params"]]
        self.average = [
            a * 0.5 + p for a, p in zip(self.average or [p * 0 for p in held], held, strict=True)
        ]
        with torch.no_grad():
            for group in self.param_groups:
                for i, p in enumerate(group["params"]):
                    p.add_((1e-3 * self.average[i] * self.count).to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count, "average": list(self.average)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        form = dict(state_dict)
        self.count, self.average = form.pop("count"), list(form.pop("average"))
        super().load_state_dict(form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overridden_methods_are_used(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_kept(tmp_path, partial(net, dtype=dtype), of(Averaging))


class ByItself(O.Adam):
    """Loads by its own method, which is torch's."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [O.Adam, ByItself])
def test_groups_that_share_a_learning_rate_get_each_its_own(kind: Any, tmp_path: Path) -> None:
    """O1: torch builds them with one tensor, in which the last group's value stayed for all."""
    model = net(0)
    groups = [{"params": [each]} for each in model.parameters()]
    built = [kind([dict(group) for group in groups], lr=torch.tensor(0.5)) for _ in range(2)]
    built[0].param_groups[-1]["lr"] = torch.tensor(0.25)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, parts(model, built[0]))
    checkpointer.load(parts(model, built[1]))
    rates = [group["lr"].item() for group in built[1].param_groups]
    assert rates == [*[0.5] * (len(rates) - 1), 0.25]


def test_shared_buffers_in_groups_stay_shared(tmp_path: Path) -> None:
    """Views of one buffer are views of it after a load; a scheduler's tensor is the same tensor."""

    def make(model: nn.Module) -> Any:
        optimizer = O.SGD(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        buffer = torch.zeros(2, 3)
        optimizer.param_groups[0] |= {"buffer": buffer, "views": [buffer[0], buffer[1]]}
        optimizer.register_step_post_hook(lambda *_: [buffer.add_(1), None][1])
        return optimizer

    assert_kept(tmp_path, net, make)
    model = net(7)
    optimizer = make(model)
    held = dict(optimizer.param_groups[0])
    Checkpointer(tmp_path).load(parts(model, optimizer), step=1)
    group = optimizer.param_groups[0]
    assert group["buffer"] is held["buffer"]
    assert group["lr"] is held["lr"]
    assert group["views"][1].data_ptr() == group["buffer"][1].data_ptr()
    assert group["buffer"].sum() == 18
    train(model, optimizer, range(1))
    assert group["views"][1].sum() == 12

"""Odd modules: what they hold is not what their state dict shows, or not in the same form."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

WIDTH = 6


class Fused(nn.Module):
    """One weight, shown as three by hooks (as torchtitan's fused attention does)."""

    copies = True

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.norm = nn.Parameter(torch.empty(WIDTH))
        self.register_state_dict_post_hook(type(self).split)
        self.register_load_state_dict_pre_hook(type(self).fuse)

    def split(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        whole = state.pop(f"{prefix}wqkv")
        for name, piece in zip("qkv", whole.detach().chunk(3), strict=True):
            state[f"{prefix}w{name}"] = piece.clone() if self.copies else piece

    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}wqkv"] = torch.cat([state.pop(f"{prefix}w{name}") for name in "qkv"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.wqkv.T).chunk(3, dim=-1)
        return q * torch.sigmoid(k) + v * self.norm


class FusedViews(Fused):
    """As `Fused`, and what it shows are views of the weight."""

    copies = False


class ViewsAlone(FusedViews):
    """Views, and nothing that would take them back: filling them fills the weight."""

    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in "qkv":
            state.pop(f"{prefix}w{name}")


class Splits(nn.Module):
    """Three weights, shown as one."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkv":
            self.register_parameter(name, nn.Parameter(torch.empty(WIDTH, WIDTH)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}qkv"] = torch.cat([self.q, self.k, self.v]).detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            for name, piece in zip("qkv", state[f"{prefix}qkv"].chunk(3), strict=True):
                getattr(self, name).copy_(piece)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.q + torch.sin(x @ self.k) * (x @ self.v)


class Clones(nn.Linear):
    """Shows copies under the names of its tensors."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in self.named_parameters():
            destination[f"{prefix}{name}"] = value.detach().clone()


class Scaled(nn.Linear):
    """Shows twice its weight, takes half of it back."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(self.double)
        self.register_load_state_dict_pre_hook(self.halve)

    @staticmethod
    def double(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2

    @staticmethod
    def halve(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class Renamed(nn.Linear):
    """Its hooks rename; the tensors are its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(self.out)
        self.register_load_state_dict_pre_hook(self.back)

    @staticmethod
    def out(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        weight, bias = state.pop(f"{prefix}weight"), state.pop(f"{prefix}bias")
        state[f"{prefix}bias"], state[f"{prefix}weight"] = weight, bias  # exchanged, even

    @staticmethod
    def back(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        bias, weight = state[f"{prefix}weight"], state[f"{prefix}bias"]
        state[f"{prefix}bias"], state[f"{prefix}weight"] = bias, weight


class Transposed(nn.Linear):
    """Shows its weight transposed, as a view."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Replaces(nn.Linear):
    """Makes new parameters when it loads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            setattr(self, name, nn.Parameter(state[f"{prefix}{name}"].detach().clone()))


class ExtraTensor(nn.Linear):
    """Keeps something that is neither parameter nor buffer; `kind` says how it hands it out."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind
        self.scale = torch.zeros(2)  # another shape and dtype than what is loaded

    def get_extra_state(self) -> Any:
        kind = self.kind
        if kind == "tensor":
            return self.scale
        if kind == "array":
            return self.scale.numpy()
        if kind == "dict":
            return {"scale": self.scale, "deep": [{"again": self.scale * 3}], "n": 7, "none": None}
        if kind == "bytes":
            return self.scale.numpy().tobytes()
        if kind == "stream":
            stream = io.BytesIO()
            stream.write(self.scale.numpy().tobytes())
            return stream
        return [self.scale.tolist(), "text"]

    def set_extra_state(self, state: Any) -> None:
        kind = self.kind
        if kind == "stream":
            assert isinstance(state, io.BytesIO)
            state = state.getvalue()
        if kind in ("bytes", "stream"):
            self.scale = torch.frombuffer(bytearray(state), dtype=torch.float64)
        elif kind == "array":
            self.scale = torch.from_numpy(state)
        elif kind == "dict":
            assert state["n"] == 7
            assert torch.equal(state["deep"][0]["again"], state["scale"] * 3)
            self.scale = state["scale"]
        elif kind == "tensor":
            self.scale = state
        else:
            self.scale = torch.tensor(state[0], dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.sum().to(x.dtype)


class Observer(nn.Module):
    """Buffers of shape (0,) that take the shape of what is loaded, as torch.ao's do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("none", None)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.low = self.low.new_empty(state[f"{prefix}low"].shape)
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.low.sum()


class Container(nn.Module):
    """Overrides both methods, with names, nesting and values of its own (GAN trainers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(WIDTH, WIDTH)
        self.critic = nn.Linear(WIDTH, WIDTH)
        self.rounds = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {
            "G": {name: value.clone() for name, value in self.generator.state_dict().items()},
            "D": self.critic.state_dict(),
            "rounds": self.rounds,
        }

    def load_state_dict(self, state: Any) -> None:
        self.generator.load_state_dict(state["G"])
        self.critic.load_state_dict(state["D"])
        self.rounds = state["rounds"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(x) * self.critic(x) + self.rounds


class Plain(nn.Linear):
    """Overrides `state_dict` without torch's arguments; its tensors come detached."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Inner(nn.Module):
    """Inside of another module torch calls its `state_dict`, and not its `load_state_dict`.

    It takes what it loads out of the state dict, and writes past torch's counter of writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False):
        destination = {} if destination is None else destination
        destination[f"{prefix}packed"] = torch.cat([self.lin.weight, self.lin.bias[:, None]], 1)
        destination[f"{prefix}packed"] = destination[f"{prefix}packed"].detach()
        return destination

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        packed = state.pop("packed")
        self.lin.weight.data.copy_(packed[:, :-1])
        self.lin.bias.data.copy_(packed[:, -1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class Proxy(nn.Module):
    """Forwards attributes to the module inside; no wrapper, its name stays in the names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Fused()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Tied(nn.Module):
    """One weight under two names, one of them shown by a hook as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("gone", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Live(nn.Linear):
    """Shows a tensor that lives in a plain attribute, and has no way to take it back."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = torch.zeros(WIDTH)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Filled(nn.Module):
    """A weight that a load hook writes past torch's counter of versions.

    The hook uses up what it reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}rows"] = self.w.detach().clone()
        destination[f"{prefix}order"] = io.BytesIO(bytes(range(WIDTH)))
        destination[f"{prefix}facts"] = {"width": WIDTH}

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        order, width = list(state[f"{prefix}order"].read()), state[f"{prefix}facts"].pop("width")
        self.w.data[order] = state[f"{prefix}rows"].reshape(-1, width)[order]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def ema() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(Fused())


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    )
    return made.eval()


def old_norm() -> nn.Module:
    return spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()


ODD: dict[str, Callable[[], nn.Module]] = {
    "fused": Fused,
    "fused views": FusedViews,
    "views alone": ViewsAlone,
    "splits": Splits,
    "clones": Clones,
    "scaled": Scaled,
    "renamed": Renamed,
    "transposed": Transposed,
    "replaces": Replaces,
    **{
        f"extra {kind}": (lambda kind=kind: ExtraTensor(kind))
        for kind in ("tensor", "array", "dict", "bytes", "stream", "list")
    },
    "observer": Observer,
    "container": Container,
    "plain": Plain,
    "inner": lambda: nn.Sequential(Inner(), nn.Linear(WIDTH, WIDTH)),
    "proxy": Proxy,
    "tied": Tied,
    "live": Live,
    "filled": Filled,
    "ema": ema,
    "scripted": scripted,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval(),
    "spectral, old": old_norm,
    "compiled": lambda: torch.compile(nn.Sequential(Fused()), backend="eager"),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).eval(),
}

ROOTS = ("container", "plain")
"""What torch supports at the root only."""


def randomise(module: nn.Module, seed: int) -> None:
    """Other values in every parameter, buffer and odd attribute."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
            if tensor.is_floating_point():
                values = torch.rand(tensor.shape, generator=generator) + 0.5
                tensor.copy_(values)
        for inner in module.modules():
            if isinstance(inner, ExtraTensor):
                inner.scale = torch.rand(3, generator=generator, dtype=torch.float64)
            if isinstance(inner, Live):
                inner.scale.copy_(torch.rand(WIDTH, generator=generator))
            if isinstance(inner, Observer):
                inner.low = torch.rand(4, generator=generator)
            if isinstance(inner, Container):
                inner.rounds = seed

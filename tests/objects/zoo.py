"""Odd modules, optimizers and stateful objects, as users bring them; each with a training step.

Everything is small and deterministic: a builder's `seed` decides the initial values, the number of
a step decides its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH = 6
Build = Callable[[], nn.Module]


class FusedAttention(nn.Module):
    """Keeps one fused weight, and shows three under the names of its checkpoint format."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._fuse)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.wqkv.T).chunk(3, dim=-1)
        return x + self.out(torch.sigmoid(q * k) * v)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        for name, piece in zip("qkv", state.pop(f"{prefix}wqkv").chunk(3), strict=True):
            state[f"{prefix}w{name}.weight"] = piece

    @staticmethod
    def _fuse(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}wq.weight" in state:
            pieces = [state.pop(f"{prefix}w{name}.weight") for name in "qkv"]
            state[f"{prefix}wqkv"] = torch.cat(pieces)


class FusedFromParts(nn.Module):
    """Keeps three weights, and shows their concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(2, WIDTH)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat(list(self.parts)).mean()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}fused"] = torch.cat([p.detach() for p in self.parts])

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            for part, rows in zip(self.parts, state.pop(f"{prefix}fused").chunk(3), strict=True):
                part.copy_(rows)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        prefix = options.get("prefix", "")
        for number in range(3):
            found.pop(f"{prefix}parts.{number}", None)
        return found


class Transposed(nn.Module):
    """Shows its weight transposed and on its own memory, as some inference formats want it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach().t().clone()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state[f"{prefix}weight"].t())


class Cloned(nn.Module):
    """Overrides `state_dict` with copies, so that what is shown is never what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        prefix = options.get("prefix", "")
        for name in [f"{prefix}inner.weight", f"{prefix}inner.bias"]:
            found[name] = found[name].detach().clone()
        return found


class Calibrated(nn.Module):
    """Scales by an extra state that is a tensor, whose shape grows with use."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.history = torch.rand(2)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.history = torch.cat([self.history, x.detach().abs().max()[None]])
        return x * self.weight / (1 + self.history.sum())

    def get_extra_state(self) -> Any:
        if self.form == "tensor":
            return self.history
        if self.form == "bytes":
            return self.history.numpy().tobytes()
        return {"history": self.history, "count": len(self.history), "tags": ("a", 1)}

    def set_extra_state(self, state: Any) -> None:
        if self.form == "tensor":
            self.history = state.clone()
        elif self.form == "bytes":
            self.history = torch.frombuffer(bytearray(state), dtype=torch.float32).clone()
        else:
            assert state["count"] == len(state["history"])
            assert state["tags"] == ("a", 1)
            self.history = state["history"].clone()


class Growing(nn.Module):
    """A buffer that is empty at first and of another shape after use; loading replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean()[None]])
        return x * self.weight + self.seen.sum()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = state[f"{prefix}seen"].new_empty(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Rotating(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).real


class Scalar(nn.Module):
    """A 0-d parameter, an empty one, one of other strides, one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.short = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.empty.sum()) @ self.strided + self.short.float()


class Tied(nn.Module):
    """Two names for one weight: the same object, or two objects over the same memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if how == "object":
            self.second.weight = self.first.weight
        else:
            self.second.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Recurrent(nn.Module):
    """An LSTM, whose weights torch keeps in flat memory as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Dictionaries(nn.Module):
    """Parameters in dicts and lists, one of which nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b.c": None})
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by_name["a"] * self.frozen


def _pruned() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return prune.random_unstructured(layer, "weight", amount=0.3)


MODULES: dict[str, Build] = {
    "plain": partial(nn.Linear, WIDTH, WIDTH),
    "batch norm": partial(nn.BatchNorm1d, WIDTH),
    "batch norm without statistics": partial(nn.BatchNorm1d, WIDTH, track_running_stats=False),
    "fused attention": FusedAttention,
    "fused from parts": FusedFromParts,
    "transposed": Transposed,
    "cloned": Cloned,
    "extra state tensor": partial(Calibrated, "tensor"),
    "extra state bytes": partial(Calibrated, "bytes"),
    "extra state dict": partial(Calibrated, "dict"),
    "growing buffer": Growing,
    "complex": Rotating,
    "scalar": Scalar,
    "tied": partial(Tied, "object"),
    "tied data": partial(Tied, "data"),
    "recurrent": Recurrent,
    "dictionaries": Dictionaries,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "pruned": _pruned,
    "compiled": lambda: torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"),
}


class Head(nn.Module):
    """The drawn modules in a row, bounded in between so that nothing overflows."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "adam capturable lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "nadam": partial(torch.optim.NAdam, lr=1e-3, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
    "lbfgs": partial(torch.optim.LBFGS, lr=1e-1, max_iter=3, history_size=2),
}


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, start_factor=0.5, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9),
        ],
        milestones=[2],
    ),
    "plateau": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5),
}


def average_of(model: nn.Module) -> AveragedModel:
    """An exponential average beside the model."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=False)


def batches(step: int, count: int) -> Iterator[Tensor]:
    """The batches of `count` steps from `step` on."""
    for number in range(step, step + count):
        generator = torch.Generator().manual_seed(1000 + number)
        yield torch.randn(5, WIDTH, generator=generator)

"""Optimizers that hold optimizers, as people's training code writes them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer


class Container(Optimizer, Stateful):
    """One optimizer for each part of a model; states them flat, by parameter name."""

    def __init__(self, parts: list[nn.Module], kind: Any, **options: Any) -> None:
        self.parts = parts
        self.optimizers: list[Optimizer] = []
        everything: list[nn.Parameter] = []
        for part in parts:
            mine = [p for p in part.parameters() if p.requires_grad]
            self.optimizers.append(kind(mine, **options))
            everything += mine
        Optimizer.__init__(self, everything, options)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        read = functools.partial(get_optimizer_state_dict, options=options)
        return {k: v for sd in map(read, self.parts, self.optimizers) for k, v in sd.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        write = functools.partial(
            set_optimizer_state_dict,
            optim_state_dict=state_dict,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        list(map(write, self.parts, self.optimizers))


class InBackward(Container):
    """One optimizer for each parameter, which steps as soon as its gradient is there."""

    def __init__(self, parts: list[nn.Module], kind: Any, **options: Any) -> None:
        self.parts = []
        self.optimizers = []
        by_parameter: dict[Tensor, Optimizer] = {}
        for part in parts:
            for p in part.parameters():
                by_parameter[p] = kind([p], **options)
                self.parts.append(part)

        def hook(p: Tensor) -> None:
            by_parameter[p].step()
            by_parameter[p].zero_grad()

        for p in by_parameter:
            p.register_post_accumulate_grad_hook(hook)
        self.optimizers = list(by_parameter.values())
        Optimizer.__init__(self, list(by_parameter), options)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the hooks have done it."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the hooks have done it."""


class Silent(Container):
    """Forgets to say what the optimizers inside hold: both methods are torch's."""

    state_dict = Optimizer.state_dict  # type: ignore[assignment]
    load_state_dict = Optimizer.load_state_dict  # type: ignore[assignment]


class Listing(Optimizer):
    """Muon for matrices and AdamW for the rest; states a list of torch's forms."""

    def __init__(self, module: nn.Module) -> None:
        matrices = [p for p in module.parameters() if p.ndim == 2]
        rest = [p for p in module.parameters() if p.ndim != 2]
        self.named = {
            "muon": torch.optim.Muon(matrices, lr=0.01),
            "adam": torch.optim.AdamW(rest, lr=0.01),
        }
        super().__init__(matrices + rest, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.named.values():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.named.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, optimizer in self.named.items():
            optimizer.load_state_dict(state_dict[name])


class Sharpness(Optimizer):
    """SAM as it is usually written: shares its groups with a base optimizer, not its state."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.detach().clone()
                    p.add_(group["rho"] * p.grad)
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Lookahead(Optimizer):
    """Slow weights beside a fast optimizer; delegates groups, and states both."""

    def __init__(self, optimizer: Optimizer, k: int = 2) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.counter = optimizer, k, 0
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.counter += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.counter % self.k == 0:
                    slow.lerp_(p.detach(), 0.5)
                    p.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        slow = {
            (id_, i): self.state[p]["slow"]
            for i, group in enumerate(self.param_groups)
            for id_, p in enumerate(group["params"])
            if p in self.state
        }
        return {"fast": fast, "slow": slow, "counter": self.counter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counter = state_dict["counter"]
        self.optimizer.load_state_dict(state_dict["fast"])
        self.param_groups = self.optimizer.param_groups
        self.state = defaultdict(dict)
        for (id_, i), slow in state_dict["slow"].items():
            self.state[self.param_groups[i]["params"][id_]]["slow"] = slow


class Delegating(Optimizer):
    """A wrapper of an unknown package that hands everything on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Scaled:
    """No torch optimizer at all: float32 copies of the parameters, a scale, and one inside."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.wide = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.optimizer = torch.optim.SGD(self.wide, lr=0.1, momentum=0.9)
        self.scale = 1024.0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self, closure: Any = None) -> None:
        for p, w in zip(self.params, self.wide, strict=True):
            w.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        self.scale *= 1.5
        for p, w in zip(self.params, self.wide, strict=True):
            p.data.copy_(w)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "wide": [w.detach() for w in self.wide],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for w, value in zip(self.wide, state_dict["wide"], strict=True):
            w.data.copy_(value)

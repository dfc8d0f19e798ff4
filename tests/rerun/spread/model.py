"""A small model in float64, parallel by hand, with a place for a fault in each of its tensors.

One layer on each pipeline stage. A layer is a mean over the sequence (all-gather over
context ranks), a column- and row-split linear (all-reduce over tensor ranks), and with experts an
exchange of tokens. Every tensor passes a *site*: a name, and a probe that may spoil one element of
it, forward or backward. What the spoilt element does to the values of other ranks is up to the
computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from holdfast import Layout, PerRank, ProcessGroups, Sharded, Union
from tests.rerun.spread.collectives import (
    CopyToTensorRanks,
    ExchangeTokens,
    MeanOverContext,
    SumOverTensorRanks,
    receive,
    send,
    summed,
)

WIDTH, INNER, TOKENS = 4, 4, 4
RATE, MOMENTUM = 0.01, 0.9

Probe = Callable[[str, Tensor], Tensor]
"""Returns the tensor that passes a site, or a spoilt copy of it."""


class _Site(Function):
    """Shows a tensor to the probe on its way forward, and its gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, probe: Probe, site: str) -> Tensor:
        ctx.probe, ctx.site = probe, site
        return probe(f"{site}, forward", value).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.probe(f"{ctx.site}, backward", gradient), None, None


class Model(nn.Module):
    """One rank's part of the model.

    Args:
        groups: of the layout.
        seed: of the weights.
        probe: of the sites.
    """

    def __init__(self, groups: ProcessGroups, *, seed: int, probe: Probe) -> None:
        super().__init__()
        self.groups = groups
        self.probe = probe
        num_stages, self.stage = groups.size("pp"), groups.index("pp")
        self.is_first, self.is_last = self.stage == 0, self.stage == num_stages - 1
        self.has_experts = groups.layout.ep > 1
        self.splits: dict[str, tuple[tuple[int, ...], dict[int, str]]] = {}
        """By parameter: global shape, and the axis over which a dim is split."""
        self.weights = nn.ParameterDict()
        mine = parameters_of(groups.layout, groups.rank)
        generator = torch.Generator().manual_seed(seed)
        for name, shape, split in self._shapes():
            whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
            if name in mine:
                for dim, axis in split.items():
                    whole = whole.chunk(groups.size(axis), dim)[groups.index(axis)]
                self.weights[name] = nn.Parameter(whole.clone())
                self.splits[name] = shape, split
        # It follows the inputs of this rank's own batches: a second opinion has to bring it along.
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)

    def _shapes(self) -> list[tuple[str, tuple[int, ...], dict[int, str]]]:
        shapes: list[tuple[str, tuple[int, ...], dict[int, str]]] = []
        shapes.append(("embed", (WIDTH, WIDTH), {}))
        for i in range(self.groups.size("pp")):
            shapes.append((f"layer{i}_context", (WIDTH, WIDTH), {}))
            shapes.append((f"layer{i}_column", (WIDTH, INNER), {1: "tp"}))
            shapes.append((f"layer{i}_row", (INNER, WIDTH), {0: "tp"}))
            if self.has_experts:
                rows = WIDTH * self.groups.layout.ep
                shapes.append((f"layer{i}_expert", (rows, WIDTH), {0: "ep"}))
        shapes.append(("head", (WIDTH, 1), {}))
        return shapes

    def at(self, site: str, value: Tensor) -> Tensor:
        """Pass a site."""
        passed: Tensor = _Site.apply(value, self.probe, site)
        return passed

    def weight(self, name: str) -> Tensor:
        """A weight as this device computes with it."""
        return self.at(f"weight {name}", self.weights[name])

    def run(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Run a microbatch forward and backward; gradients are added up in the parameters.

        Returns:
            On the last stage the loss, on the first the norm of the embedded inputs, which no other
            device has had a part in.
        """
        received: Tensor | None = None
        embedded: Tensor | None = None
        if self.is_first:
            noise = torch.rand(TOKENS, WIDTH, dtype=torch.float64)
            x = self.at("embedded", (inputs + 0.1 * noise) @ self.weight("embed"))
            embedded = x.detach().norm()
        else:
            received = receive((TOKENS, WIDTH), self.groups, by=-1).requires_grad_()
            x = self.at("received", received)
        self.seen.copy_(0.5 * self.seen + 0.5 * x.detach().mean(0))
        x = x + 0.1 * self.seen.clone()
        x = self._layer(x)
        loss: Tensor | None = None
        if self.is_last:
            predicted = x @ self.weight("head")
            loss = self.at("loss", (predicted - targets).square().mean())
            loss.backward()
        else:
            sent = self.at("sent", x)
            send(sent.detach(), self.groups, by=1)
            gradient = receive((TOKENS, WIDTH), self.groups, by=1)
            sent.backward(self.probe("gradient received, forward", gradient))
        if received is not None:
            assert received.grad is not None
            send(received.grad, self.groups, by=-1)
        return (None if loss is None else loss.detach()), embedded

    def _layer(self, x: Tensor) -> Tensor:
        groups, name = self.groups, f"layer{self.stage}"
        mean = MeanOverContext.apply(x.mean(0), groups)
        x = x + self.at(f"{name} gathered", mean) @ self.weight(f"{name}_context")
        hidden = CopyToTensorRanks.apply(x, groups) @ self.weight(f"{name}_column")
        hidden = self.at(f"{name} hidden", hidden + 0.1 * hidden.square())
        part = self.at(f"{name} part", hidden @ self.weight(f"{name}_row"))
        x = x + self.at(f"{name} reduced", SumOverTensorRanks.apply(part, groups))
        if self.has_experts:
            tokens = self.at(f"{name} dispatched", ExchangeTokens.apply(x, groups))
            tokens = tokens @ self.weight(f"{name}_expert")
            x = x + self.at(f"{name} combined", ExchangeTokens.apply(tokens, groups))
        return self.at(f"{name} output", x)

    def gradients(self) -> dict[str, Tensor]:
        """What the runs since the last `zero_grad` have added up, before data ranks are joined."""
        found: dict[str, Tensor] = {}
        for name, each in self.weights.items():
            assert each.grad is not None
            found[name] = self.probe(f"summed {name}, forward", each.grad)
        return found

    def reduced(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients of all data ranks; experts have fewer of these."""
        found: dict[str, Tensor] = {}
        for axes, of_experts in (("dp_cp", False), ("expt_dp", True)):
            mine = {k: each for k, each in gradients.items() if ("expert" in k) == of_experts}
            if not mine:
                continue
            flat = torch.cat([each.flatten() for each in mine.values()])
            whole = summed(flat, self.groups, axes) / self.groups.size("dp_cp")
            parts = whole.split([each.numel() for each in mine.values()])
            for (name, each), part in zip(mine.items(), parts, strict=True):
                found[name] = self.probe(f"reduced {name}, forward", part.view_as(each))
        return {name: found[name] for name in gradients}


def sites_of(layout: Layout, rank: int) -> list[str]:
    """The sites of a rank at which a fault shows in some value of the same step."""
    stage = layout.coordinate(rank)["pp"]
    is_first, is_last = stage == 0, stage == layout.pp - 1
    names = ["embedded", "weight embed"] if is_first else ["received"]
    kinds = ["gathered", "hidden", "part", "reduced", "output"]
    kinds += ["dispatched", "combined"] if layout.ep > 1 else []
    names += [f"layer{stage} {kind}" for kind in kinds]
    names += [f"weight {each}" for each in parameters_of(layout, rank) if "layer" in each]
    names += ["weight head", "loss"] if is_last else ["sent"]
    sites = [f"{name}, {way}" for name in names for way in ("forward", "backward")]
    sites += [] if is_last else ["gradient received, forward"]
    return sites + [f"summed {each}, forward" for each in parameters_of(layout, rank)]


def parameters_of(layout: Layout, rank: int) -> list[str]:
    """The parameters of a rank."""
    stage = layout.coordinate(rank)["pp"]
    kinds = ["context", "column", "row"] + (["expert"] if layout.ep > 1 else [])
    names = ["embed"] if stage == 0 else []
    names += [f"layer{stage}_{kind}" for kind in kinds]
    return names + (["head"] if stage == layout.pp - 1 else [])


class Trainer:
    """The model with its optimizer, and its part of a checkpoint.

    Args:
        model: one rank's part.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        for each in model.parameters():
            # From the start, so that a load has something to fill.
            self.optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each)

    def step(self, gradients: dict[str, Tensor]) -> None:
        """Update the parameters; a fault may be in the update, or in what it leaves behind."""
        weights = self.model.weights
        for name, each in weights.items():
            each.grad = gradients[name]
        self.optimizer.step()
        with torch.no_grad():
            for name, each in weights.items():
                momentum = self.optimizer.state[each]["momentum_buffer"]
                momentum.copy_(self.model.probe(f"momentum {name}, forward", momentum))
                each.copy_(self.model.probe(f"updated {name}, forward", each))

    def state(self) -> dict[str, object]:
        """The part of a checkpoint."""
        model = self.model
        weights, momenta = {}, {}
        for name, each in model.weights.items():
            shape, split = model.splits[name]
            momentum = self.optimizer.state[each]["momentum_buffer"]
            weights[name] = Sharded(each.detach(), shape, dims=split)
            momenta[name] = Sharded(momentum, shape, dims=split)
        buffers = {"seen": model.seen}
        return {"weights": Union(weights), "momenta": Union(momenta), "buffers": PerRank(buffers)}

    def bits(self) -> dict[str, bytes]:
        """Everything that is trained on this rank, to be compared bit by bit."""
        found = {}
        for name, each in self.model.weights.items():
            momentum = self.optimizer.state[each]["momentum_buffer"]
            found[name] = each.detach().numpy().tobytes() + momentum.numpy().tobytes()
        found["seen"] = self.model.seen.numpy().tobytes()
        return found


def norm(tensors: dict[str, Tensor]) -> float:
    """The norm of several tensors together."""
    return math.sqrt(sum(float(each.square().sum()) for each in tensors.values()))

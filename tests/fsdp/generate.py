"""Models made from a seed: nested, shared, tied, frozen, odd, skipped, with experts of any name."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.common import ROWS, WIDTH, Specialists, plain


class Leaf(nn.Module):
    """Odd shapes, maybe two dtypes, buffers, an empty and an unused parameter."""

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        hidden = random.choice((13, 5, 2, 1))
        self.up = nn.Parameter(torch.empty(hidden, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, hidden))
        self.bias = nn.Parameter(torch.empty(WIDTH), requires_grad=random.random() < 0.7)
        self.wide: nn.Parameter | None = None
        if random.random() < 0.4:
            self.wide = nn.Parameter(torch.empty(WIDTH, 1, dtype=torch.float64))
        if random.random() < 0.3:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if random.random() < 0.3:
            self.unused = nn.Parameter(torch.empty(7, 2))
        self.register_buffer("fixed", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ plain(self.up).T)
        out = hidden @ plain(self.down).T + plain(self.bias) * self.scratch
        if self.wide is not None:
            out = out + (x.double() @ plain(self.wide)).to(x.dtype)
        return out


class Reader(nn.Module):
    """Reads the weight of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ plain(self.book.weight).T)


class Hooked(nn.Linear):
    """Adds what is no tensor to its state dict (`note`)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.marker = nn.Parameter(torch.empty(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) + plain(self.marker).sum()


def note(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict hook that adds what is no tensor."""
    del module, metadata
    state[f"{prefix}noted"] = "by a hook"


class Block(nn.Module):
    """Parts in a row, one of them maybe twice, one maybe only in even steps."""

    def __init__(self, parts: list[nn.Module], *, random: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.order = list(range(len(parts)))
        if random.random() < 0.5:
            self.order.append(random.choice(self.order))  # a module used twice
        self.rare = random.choice(self.order) if random.random() < 0.4 else None
        self.recomputed = random.random() < 0.3
        self.seldom = nn.Parameter(torch.empty(5, WIDTH))  # used where row 1 of a step is

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        step = int(rows.min()) // ROWS
        if bool((rows % ROWS == 1).any()):
            x = x + (rows % ROWS == 1)[:, None] * plain(self.seldom).sum(dim=0)
        for number in self.order:
            if number == self.rare and step % 2:
                continue
            part = self.parts[number]
            if isinstance(part, Specialists | Block):
                x = x + 0.5 * part(x, rows)
            elif self.recomputed:
                x = x + 0.5 * checkpoint(part, x, use_reentrant=False)
            else:
                x = x + 0.5 * part(x)
        return x


class Generated(nn.Module):
    """Blocks around a table that is used at both ends."""

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, WIDTH))
        self.blocks = nn.ModuleList(self._block(random, depth=0) for _ in range(3))

    def _block(self, random: random.Random, *, depth: int) -> Block:
        parts: list[nn.Module] = [Leaf(random)]
        for _ in range(random.randint(1, 3)):
            kinds = ["leaf", "reader", "hooked", "bank"] + ["block"] * (depth == 0)
            kind = random.choice(kinds)
            if kind == "block":
                parts.append(self._block(random, depth=1))
            else:
                made = {"leaf": lambda: Leaf(random), "reader": Reader, "hooked": Hooked,
                        "bank": Specialists}[kind]()  # fmt: skip
                parts.append(made)
        return Block(parts, random=random)

    def forward(self, rows: Tensor) -> Tensor:
        """The loss of each row, (rows,)."""
        x = plain(self.table)[rows % 7]
        for block in self.blocks:
            x = block(x, rows)
        scores = x @ plain(self.table).T
        return (scores - torch.sin(rows)[:, None].to(x.dtype)).square().mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is declared of it."""

    model: Generated
    units: list[nn.Module]
    experts: list[nn.Module | nn.Parameter] = field(default_factory=list)


def generate(seed: int) -> Case:
    """The same model and declarations for the same seed."""
    chance = random.Random(seed)
    model = Generated(chance)
    leaves = [each for each in model.modules() if isinstance(each, Leaf)]
    if len(leaves) > 1 and chance.random() < 0.6:  # a tie, maybe between units
        first, second = chance.sample(leaves, 2)
        second.bias = first.bias
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    if chance.random() < 0.3:  # a module at two places
        leaf = leaves[0]
        blocks[-1].parts.append(leaf)
        blocks[-1].order.append(len(blocks[-1].parts) - 1)
    units: list[nn.Module] = [each for each in blocks if chance.random() < 0.8]
    units += [each for each in leaves if chance.random() < 0.3]
    units += [
        each
        for each in model.modules()
        if isinstance(each, Hooked | Specialists) and chance.random() < 0.3
    ]
    for each in model.modules():
        if isinstance(each, Hooked):
            each._register_state_dict_hook(note)
    if chance.random() < 0.3:  # a block that is not trained
        for parameter in chance.choice(blocks).parameters():
            parameter.requires_grad_(False)
    experts: list[nn.Module | nn.Parameter] = []
    for each in model.modules():
        if isinstance(each, Specialists):
            experts.append(each if chance.random() < 0.5 else each.mix)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(value * 0.2)
    return Case(model=model, units=units, experts=experts)

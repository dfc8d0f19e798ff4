"""Models made from a seed: nested, shared, tied, frozen, odd, skipped, with experts of any name."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS = 48
"""Rows of a step: 1, 2, 3, 4, 6 and 8 data ranks have as many each."""
WIDTH = 6
NUM_SPECIALISTS = 4
_OTHER = {
    torch.float32: torch.float64,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}


Norm = Literal["weight", "weight by a hook", "spectral"]
NORMS: tuple[Norm, ...] = ("weight", "weight by a hook", "spectral")
"""The last one has buffers."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a model may have, which depends on the ways that are to hold it."""

    dtype: torch.dtype = torch.float32
    has_tp: bool = False
    """True if it has layers for tensor parallelism."""
    has_experts: bool = True
    is_odd: bool = False
    """True if it may have scalars, complex values and rows that the tensor ranks share unevenly."""
    is_small: bool = False
    norm: Norm | None = None
    """If it may have layers with computed weights, what computes them."""
    has_running: bool = False
    """True if it may have layers whose forwards in training write to buffers."""
    is_reentrant: bool = False
    """True if what computes activations again does so by the older one of torch's two ways."""


def whole(value: Tensor) -> Tensor:
    """Return all of a parameter, differentiably.

    Ranks of `tp` compute the same. Those of `ep` and `expt_tp` may have other rows, depending on
    the order of axes, so gradients from all of them add up (see `Specialists.share`).
    """
    if not isinstance(value, DTensor):
        return value
    names = value.device_mesh.mesh_dim_names or ()
    gathered = value.redistribute(placements=[Replicate()] * len(names))
    return gathered.to_local(
        grad_placements=[Partial() if name in ("ep", "expt_tp") else Replicate() for name in names]
    )


class Leaf(nn.Module):
    """Odd shapes, maybe two dtypes, buffers, an empty and an unused parameter."""

    scratch: Tensor

    def __init__(self, chance: random.Random, traits: Traits) -> None:
        super().__init__()
        hidden = chance.choice((13, 5, 2, 1))
        self.up = nn.Parameter(torch.empty(hidden, WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, hidden))
        self.bias = nn.Parameter(torch.empty(WIDTH), requires_grad=chance.random() < 0.7)
        self.wide: nn.Parameter | None = None
        self.gain: nn.Parameter | None = None
        self.phase: nn.Parameter | None = None
        if chance.random() < 0.4:
            self.wide = nn.Parameter(torch.empty(WIDTH, 1, dtype=_OTHER[traits.dtype]))
        if chance.random() < 0.3:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if chance.random() < 0.3:
            self.unused = nn.Parameter(torch.empty(7, 2))
        if traits.is_odd:
            self.gain = nn.Parameter(torch.empty(()))
            if chance.random() < 0.3 and traits.dtype != torch.bfloat16:
                twice = {torch.float32: torch.complex64, torch.float64: torch.complex128}
                self.phase = nn.Parameter(torch.empty(3, WIDTH, dtype=twice[traits.dtype]))
        self.register_buffer("fixed", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ whole(self.up).T)
        out = hidden @ whole(self.down).T + whole(self.bias) * self.scratch
        if self.wide is not None:
            wide = whole(self.wide)
            out = out + (x.to(wide.dtype) @ wide).to(x.dtype)
        if self.gain is not None:
            out = out * (1 + whole(self.gain))
        if self.phase is not None:
            phase = whole(self.phase)
            out = out + (torch.exp(1j * x) @ phase.T).abs().square().mean(dim=1, keepdim=True)
        return out


class Reader(nn.Module):
    """Reads the weight of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ whole(self.book.weight).T)


class Hooked(nn.Linear):
    """Has an entry in its state dict that is not a tensor (`note`)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.marker = nn.Parameter(torch.empty(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ whole(self.weight).T) + whole(self.marker).sum()


def note(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state dict hook that adds an entry that is not a tensor."""
    del module, metadata
    state[f"{prefix}noted"] = "by a hook"


class Wide(nn.Module):
    """A column- and a row-wise layer, as torch's own tensor parallelism cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Normed(nn.Module):
    """A layer whose weight torch computes in each forward, from parameters and maybe buffers."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        if norm == "weight by a hook":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.layer: nn.Module = nn.utils.weight_norm(layer)
        elif norm == "weight":
            self.layer = parametrizations.weight_norm(layer)
        else:
            self.layer = parametrizations.spectral_norm(layer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Running(nn.Module):
    """Follows its weight by buffers, as batch norms follow their input, which ranks share."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        weight = whole(self.weight)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(weight.mean(dim=0), 0.2)
                self.count.add_(1)
        return torch.tanh(x @ weight.T) + self.mean.clone()


class Specialists(nn.Module):
    """Row r goes through specialist r % 4: experts in all but name."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(NUM_SPECIALISTS, WIDTH, WIDTH))
        self.share = 1.0
        """Ranks of one `tp` have the same rows, which count once."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        mix = whole(self.mix)
        mix = mix * self.share + mix.detach() * (1 - self.share)
        return torch.tanh(torch.bmm(x[:, None], mix[rows % NUM_SPECIALISTS])[:, 0])


class Block(nn.Module):
    """Parts in a row, one of them maybe twice, one maybe only in even steps."""

    def __init__(
        self, parts: list[nn.Module], *, chance: random.Random, is_reentrant: bool
    ) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.parts = nn.ModuleList(parts)
        self.order = list(range(len(parts)))
        if chance.random() < 0.5:
            self.order.append(chance.choice(self.order))  # a module used twice
        self.rare = chance.choice(self.order) if chance.random() < 0.4 else None
        self.recomputed = chance.random() < 0.3
        self.seldom = nn.Parameter(torch.empty(5, WIDTH))  # used by row 1 of a step alone

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        step = int(rows.min()) // ROWS
        if bool((rows % ROWS == 1).any()):
            x = x + (rows % ROWS == 1)[:, None] * whole(self.seldom).sum(dim=0)
        for number in self.order:
            if number == self.rare and step % 2:
                continue
            part = self.parts[number]
            if isinstance(part, Specialists | Block):
                x = x + 0.5 * part(x, rows)
            elif self.recomputed:
                x = x + 0.5 * checkpoint(part, x, use_reentrant=self.is_reentrant)
            else:
                x = x + 0.5 * part(x)
        return x


class Generated(nn.Module):
    """Blocks around a table that is used at both ends."""

    def __init__(self, chance: random.Random, traits: Traits) -> None:
        super().__init__()
        self.traits = traits
        self.table = nn.Parameter(torch.empty(7, WIDTH))
        self.blocks = nn.ModuleList(
            self._block(chance, depth=int(traits.is_small))
            for _ in range(2 if traits.is_small else 3)
        )

    def _block(self, chance: random.Random, *, depth: int) -> Block:
        makers: dict[str, Callable[[], nn.Module]] = {
            "leaf": lambda: Leaf(chance, self.traits),
            "reader": Reader,
            "hooked": Hooked,
        }
        if self.traits.has_experts:
            makers["specialists"] = Specialists
        if self.traits.norm is not None:
            makers["normed"] = partial(Normed, self.traits.norm)
        if self.traits.has_running:
            makers["running"] = Running
        if self.traits.has_tp:
            makers["wide"] = Wide
        if depth == 0:
            makers["block"] = lambda: self._block(chance, depth=1)
        parts: list[nn.Module] = [Leaf(chance, self.traits)]
        count = 1 if self.traits.is_small else chance.randint(1, 3)
        parts += [makers[chance.choice([*makers])]() for _ in range(count)]
        return Block(parts, chance=chance, is_reentrant=self.traits.is_reentrant)

    def forward(self, rows: Tensor, probe: Tensor | None = None) -> Tensor:
        """Return the loss of each row, (rows,); a probe is added to the input, (rows, WIDTH)."""
        x = whole(self.table)[rows % 7]
        if probe is not None:
            x = x + probe
        for block in self.blocks:
            x = block(x, rows)
        scores = x @ whole(self.table).T
        return (scores - torch.sin(rows)[:, None].to(x.dtype)).square().mean(dim=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what is declared of it."""

    model: Generated
    units: list[nn.Module]
    experts: list[nn.Module | nn.Parameter] = field(default_factory=list)


def generate(seed: int, traits: Traits = Traits(), *, values: int | None = None) -> Case:
    """Make the same model and declarations for the same seed; `values` is the seed of values."""
    chance = random.Random(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(traits.dtype)
    try:
        model = Generated(chance, traits)
    finally:
        torch.set_default_dtype(before)
    leaves = [each for each in model.modules() if isinstance(each, Leaf)]
    if len(leaves) > 1 and chance.random() < 0.6:  # a tie, maybe between units
        first, second = chance.sample(leaves, 2)
        second.bias = first.bias
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    if chance.random() < 0.3:  # a module at two places
        blocks[-1].parts.append(leaves[0])
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
            each._register_state_dict_hook(note)  # type: ignore[no-untyped-call]
    if chance.random() < 0.3:  # a block that is not trained
        for parameter in chance.choice(blocks).parameters():
            parameter.requires_grad_(False)
    experts: list[nn.Module | nn.Parameter] = []
    for each in model.modules():
        if isinstance(each, Specialists):
            experts.append(each if chance.random() < 0.5 else each.mix)
    generator = torch.Generator().manual_seed(seed if values is None else values)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = torch.complex128 if parameter.is_complex() else torch.float64
            value = torch.randn(parameter.shape, generator=generator, dtype=wide) * 0.2
            parameter.copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith(("._u", "._v")):  # drawn, and not by a seed
                value = torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.copy_(nn.functional.normalize(value, dim=0))
    return Case(model=model, units=units, experts=experts)

"""Trial that an optimizer updates elements one by one: a whole and its two pieces must agree."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError

_SHAPES = ((130,), (67, 3), (5, 8, 16), (40, 500))
"""Whole parameters of the trial: of 1 to 3 dims; the last one has several blocks of any kind."""
_CUTS = (64, 128, 640, 6464)
"""Elements of each first piece: multiples of 64, so that vector units see the same lanes.

A piece as large as the whole leaves nothing for the other.
"""
_MAX_OWN = 3
"""Shapes of the user's own parameters that are tried, too: the largest ones."""
_MAX_NUMEL = 1 << 14
"""The largest number of elements tried; dims of a larger shape are halved."""
_REGIMES: Mapping[str, tuple[tuple[int, float, float], ...]] = MappingProxyType(
    {
        # Step sizes that are learned (Prodigy, D-Adaptation) grow only along a common direction.
        "correlated": ((36, 1.0, 0.9),),
        # RAdam changes its formula at the sixth step, Lookahead synchronizes at the sixth.
        "varied": ((8, 1.0, 0.0), (6, 1e4, 0.0), (6, 1e-6, 0.0), (10, 1.0, 0.5)),
    }
)
"""Runs from the start: phases of so many steps, with gradients of a size and of a correlation."""
_REGIMES_OF_KNOWN: Mapping[str, tuple[tuple[int, float, float], ...]] = MappingProxyType(
    {"varied": ((2, 1.0, 0.0), (1, 1e4, 0.0), (1, 1e-6, 0.0))}
)
"""In place of these for a class whose code is known: what a later step does is known, too."""
_MAX_GROUPS = 8
"""If there are more, groups with the same settings are tried once."""


class _NotElementwise(Exception):
    """An optimizer joins elements; the text says how."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An optimizer and the tensors it updates: one for each shape and group, or None."""

    optimizer: torch.optim.Optimizer
    tensors: list[Tensor | None]


def check_elementwise(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    listed: Sequence[Mapping[str, Any]],
    *,
    like: Sequence[Tensor],
    shapes: Iterable[Sequence[int]] = (),
    name: str,
    is_known: bool = False,
) -> None:
    """Raise ConfigError unless an optimizer of `make` updates pieces of tensors like the whole.

    Three more optimizers are made of the same groups: of some parameters each, of fixed shapes and
    of the user's own, and of their first and their other elements, as two ranks would hold them.
    All take some dozens of steps with the same gradients, in several regimes: of common direction,
    large, tiny. Parameters and state have to be the same bits, and state tensors to have one
    element for each of the parameter's, or be scalars. That detects norms, factored or blockwise
    state, random numbers, learned step sizes and whatever else joins elements in those steps. A
    trial cannot show what an optimizer does later, or with other sizes; scalars are compared
    between ranks in every step for that (`scalars.py`). Random states are restored, and the real
    optimizer is not touched.

    Args:
        make: gives an optimizer for parameter groups.
        listed: the parameter groups, whose settings are used (a learning rate of 0 is replaced).
        like: one tensor for each kind (dtype, device) that the optimizer updates.
        shapes: of the user's parameters.
        name: the optimizer's, for messages.
        is_known: the code of its step is known to update elements one by one
            (`steps_as_torch_wrote_it`), so four steps have to show that nothing else does.

    Cost: about a tenth of a second, a hundredth if known, and memory of some MiB; no collective.
    """
    if len(listed) > _MAX_GROUPS:
        listed = list({_settings(group): group for group in listed}.values())
    try:
        with random_states_kept(like[0].device), torch.enable_grad():
            cuts = dict(zip(_SHAPES, _CUTS, strict=True)) | _own_cuts(shapes)
            for kind in {(t.dtype, t.device): t for t in like}.values():
                for phases in (_REGIMES_OF_KNOWN if is_known else _REGIMES).values():
                    _try(make, listed, like=kind, cuts=cuts, phases=phases)
    except _NotElementwise as reason:
        raise ConfigError(
            f"optimizer '{name}': {reason}, so parts of a tensor would not be updated like the "
            f"whole. Take an optimizer that updates elements one by one, or keep its parameters "
            f"whole, in a ReducedOptimizer of a ChainedOptimizer; if you are sure that this one "
            f"does, pass ShardedOptimizer(..., elementwise=True)"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"optimizer '{name}': a trial that it updates elements one by one failed in a step on "
            f"small tensors ({type(error).__name__}: {error}); if you are sure that it does, "
            f"pass ShardedOptimizer(..., elementwise=True)"
        ) from error


def _settings(group: Mapping[str, Any]) -> str:
    return repr(sorted((k, repr(v)) for k, v in group.items() if k != "params"))


def _own_cuts(shapes: Iterable[Sequence[int]]) -> dict[tuple[int, ...], int]:
    """Return the largest of some shapes, made small enough, and where each is cut."""
    largest = sorted({tuple(shape) for shape in shapes}, key=lambda s: (-math.prod(s), s))
    cuts = {}
    for shape in largest[:_MAX_OWN]:
        dims = list(shape)
        while math.prod(dims) > _MAX_NUMEL:
            longest = dims.index(max(dims))
            dims[longest] = -(-dims[longest] // 2)
        numel = math.prod(dims)
        if numel:
            cuts[tuple(dims)] = max(64, numel // 2 // 64 * 64)
    return cuts


def _try(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    listed: Sequence[Mapping[str, Any]],
    *,
    like: Tensor,
    cuts: Mapping[tuple[int, ...], int],
    phases: Sequence[tuple[int, float, float]],
) -> None:
    """Run one regime; raise _NotElementwise at the first step that shows that elements are joined.

    Args:
        make: as for `check_elementwise`.
        listed: as there.
        like: has the dtype and the device.
        cuts: shapes, and the number of elements of the first piece of each.
        phases: of the regime, see `_REGIMES`.
    """
    num_groups = len(listed)
    generator = torch.Generator("cpu").manual_seed(20)
    at = [cut for cut in cuts.values() for _ in listed]
    values = [_random(shape, generator, like) for shape in cuts for _ in listed]
    directions = [_random(shape, generator, like) for shape in cuts for _ in listed]
    pieces = [(v.flatten()[:cut], v.flatten()[cut:]) for v, cut in zip(values, at, strict=True)]
    whole = make_trial(make, listed, [v.clone() for v in values])
    first, second = (
        make_trial(make, listed, [pair[i].clone() if pair[i].numel() else None for pair in pieces])
        for i in range(2)
    )
    kind = type(whole.optimizer).__name__
    # A few are enough, with changing signs: to draw numbers takes longer than to step.
    noises = [[_random(tuple(v.shape), generator, like) for v in values] for _ in range(3)]
    steps = [phase[1:] for phase in phases for _ in range(phase[0])]
    for number, (size, correlation) in enumerate(steps):
        apart = (1 - correlation) * (-1) ** (number // 2)
        gradients = [
            size * (correlation * d + apart * n)
            for d, n in zip(directions, noises[number % 3], strict=True)
        ]
        before = torch.get_rng_state()
        take_step(whole, gradients)
        if not torch.equal(before, torch.get_rng_state()):
            raise _NotElementwise(f"{kind} draws random numbers, which differ between pieces")
        take_step(first, [g.flatten()[:cut] for g, cut in zip(gradients, at, strict=True)])
        take_step(second, [g.flatten()[cut:] for g, cut in zip(gradients, at, strict=True)])
        for position, tensor in enumerate(whole.tensors):
            parts = (first.tensors[position], second.tensors[position])
            if tensor is None or not _same(tensor, [t for t in parts if t is not None]):
                where = f" (group {position % num_groups})" if num_groups > 1 else ""
                raise _NotElementwise(f"{kind}{where} does not update elements one by one")
    for position in range(len(values)):
        _compare_state(whole, (first, second), position, kind=kind)


def _random(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Return values of both signs, with some zeros, that grow a thousandfold to the last one."""
    dtype = torch.complex64 if like.is_complex() else torch.float32
    value = torch.randn(shape, generator=generator, dtype=dtype, device="cpu").flatten()
    value *= torch.logspace(-2, 1, value.numel(), device="cpu")
    value[5::17] = 0
    return value.view(shape).to(dtype=like.dtype, device=like.device)


def make_trial(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    listed: Sequence[Mapping[str, Any]],
    values: Sequence[Tensor | None],
) -> Trial:
    """Return an optimizer of `make` over some values, in groups with the settings of `listed`."""
    tensors = [None if v is None else nn.Parameter(v) for v in values]
    groups = [
        {**group, "params": [t for t in tensors[i :: len(listed)] if t is not None]}
        for i, group in enumerate(listed)
    ]
    optimizer = make(groups)
    train: Any = getattr(optimizer, "train", None)
    if callable(train):  # schedule-free optimizers step only in that mode
        train()
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor) and not bool(rate > 0):
            group["lr"] = torch.full_like(rate, 0.01)
        elif isinstance(rate, Real) and not float(rate) > 0:
            group["lr"] = 0.01
    return Trial(optimizer, list(tensors))


def take_step(trial: Trial, gradients: Sequence[Tensor]) -> None:
    """Step with one gradient for each of the tensors."""
    for tensor, gradient in zip(trial.tensors, gradients, strict=True):
        if tensor is not None:
            tensor.grad = gradient.reshape(tensor.shape).clone()
    trial.optimizer.step()


def _compare_state(whole: Trial, parts: Sequence[Trial], position: int, *, kind: str) -> None:
    """Raise _NotElementwise for an entry that is neither one value per element nor a scalar."""
    tensor = whole.tensors[position]
    entries = {} if tensor is None else whole.optimizer.state.get(tensor, {})
    held = [(part, part.tensors[position]) for part in parts]
    pieces = [
        (piece, part.optimizer.state.get(piece, {})) for part, piece in held if piece is not None
    ]
    for entry, value in entries.items():
        if any(entry not in state for _, state in pieces):
            raise _NotElementwise(f"{kind} keeps '{entry}' only for some tensors")
        if not isinstance(value, Tensor):
            continue
        for piece, state in pieces:
            if state[entry].ndim and state[entry].shape != piece.shape:
                raise _NotElementwise(
                    f"{kind} keeps '{entry}' of shape {list(state[entry].shape)} for "
                    f"{piece.numel()} elements"
                )
        of_pieces = [state[entry] for _, state in pieces]
        is_scalar = [part.ndim == 0 for part in of_pieces]
        same = (
            all(torch.equal(part, value) for part in of_pieces)
            if value.ndim == 0 and all(is_scalar)
            else not any(is_scalar) and _same(value, of_pieces)
        )
        if not same:
            raise _NotElementwise(f"{kind} computes another '{entry}' for pieces of a tensor")


def _same(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return True if the parts, joined, equal the whole; NaN equals NaN."""
    whole_again = torch.cat([part.detach().flatten() for part in parts])
    flat = whole.detach().flatten()
    if whole_again.shape != flat.shape or whole_again.dtype != flat.dtype:
        return False
    return torch.equal(whole_again, flat) or bool(
        ((whole_again == flat) | (whole_again.isnan() & flat.isnan())).all()
    )


@contextlib.contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore, on exit, every generator that code may draw from without naming it."""
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        if drawn is not None:
            numpy.random.set_state(drawn)

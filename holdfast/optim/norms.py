"""Norm and zeros of the whole gradient, each element counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast._torch import DTENSOR_SPECS, local_tensor, scale_each
from holdfast.errors import ConfigError, DeadlineError
from holdfast.optim import collectives
from holdfast.optim.plain_shards import PlainShards, Shards
from holdfast.parallel import Layout, ProcessGroups

_CHUNK = 1 << 20
"""Elements that are widened at a time, which bounds the extra memory to 8 MiB."""
_FEW = 256
"""Elements of a row that are added up on the host, where an addition costs less than an operation
on tensors."""
_WORD = 1 << 32
_WORLD = ("tp", "dp_cp", "pp")
"""Groups that one after the other reach every rank of a layout exactly once."""
_mesh_of, _placements_of = DTENSOR_SPECS


class GradientPart(NamedTuple):
    """The part of some gradients on this rank, and the number of ranks that hold the same part.

    A tuple, since a step makes one for each parameter.
    """

    local: Tensor
    """Of any shape, without padding except zeros that `num_padding` counts."""
    num_copies: int
    num_padding: int = 0
    num_unused: int = 0
    """Elements of parameters without a gradient, which are not in `local`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The 2-norm of all gradients together; the same value on every rank."""

    value: float
    """The norm; NaN if a rank holds an infinity or a NaN, infinite beyond about 1e154."""
    bad_ranks: tuple[int, ...]
    """Global ranks that hold an infinity or a NaN, ascending."""
    num_zeros: int | None
    """Elements that are exactly zero, each counted once; None if not requested.

    A trained parameter that nothing used has a gradient of zeros.
    """

    @property
    def is_finite(self) -> bool:
        """True if every element is, and the sum of their squares is in the range of a float64."""
        return math.isfinite(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSums:
    """Sums of the gradients over all ranks of one layout; equal on all ranks."""

    square: float
    """Sum of the squares of all elements, without those of `bad_ranks`."""
    num_zeros: int
    """Elements that are exactly zero; 0 if they were not counted."""
    bad_ranks: tuple[int, ...]
    """Global ranks that hold an infinity or a NaN, ascending."""


def _num_copies(parameter: Tensor, *, groups: ProcessGroups, num_parts: int = 1) -> int:
    """Return the number of ranks of the layout that hold each element of a parameter.

    A DTensor declares that, and is assumed to be replicated over the ranks of its pipeline stages
    that its mesh leaves out; a plain tensor is assumed to be on every rank of its stage.

    Args:
        parameter: or its gradient.
        groups: of the module.
        num_parts: into which ranks of a stage have cut a plain tensor, see `PlainShards`.
    """
    layout = groups.layout
    stage = layout.size("tp-cp-dp")
    if not isinstance(parameter, DTensor):
        return stage // num_parts
    mesh = parameter.device_mesh
    here = set(layout.group("tp-cp-dp", groups.rank))
    on_stage = len(here.intersection(mesh.mesh.flatten().tolist()))
    copies = stage // on_stage
    for dim, placement in enumerate(parameter.placements):
        if placement.is_partial():
            raise ConfigError(
                f"a gradient of shape {list(parameter.shape)} is a sum not yet reduced "
                f"({parameter.placements}); redistribute it before its norm is taken"
            )
        if placement.is_replicate():
            copies *= mesh.size(dim)
    return copies


class CopyCounts:
    """Counts the ranks that hold a parameter once for all that are placed alike.

    Args:
        groups: of the module.
        num_parts: gives for a plain parameter into how many parts ranks of a stage have cut it.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        num_parts: Callable[[nn.Parameter], int] = lambda _: 1,
    ) -> None:
        self._groups = groups
        self._num_parts = num_parts
        self._known: dict[object, tuple[int, object]] = {}
        """Counts, each with the mesh, whose identity is in the key."""

    def of(self, placed: Iterable[tuple[nn.Parameter, Tensor]]) -> list[int]:
        """Return the copies of parameters, each with a tensor that is placed as it is.

        Of all at once: a call for each costs more than the answer.
        """
        counts = []
        key: object
        for parameter, like in placed:
            mesh, num_parts = None, 1
            if isinstance(like, DTensor):
                mesh = _mesh_of(like)
                key = (id(mesh), _placements_of(like))
            else:
                key = num_parts = self._num_parts(parameter)
            known = self._known.get(key)
            if known is None:
                known = _num_copies(like, groups=self._groups, num_parts=num_parts), mesh
                self._known[key] = known
            counts.append(known[0])
        return counts


@torch.no_grad()
def gradient_parts(parameters: Iterable[nn.Parameter], *, copies: CopyCounts) -> list[GradientPart]:
    """Return the parts of gradients in `.grad`, which are reduced.

    A trained parameter without a gradient is a part of zeros. In buckets and in shards an unused
    parameter is seen as zeros, and every kind of optimizer counts the same.

    Args:
        parameters: of this rank.
        copies: of the module; it may be kept between steps.

    Raises:
        ConfigError: A DTensor gradient is a sum not yet reduced.
    """
    placed: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            placed.append((parameter, gradient))
        elif parameter.requires_grad:
            placed.append((parameter, parameter))
    parts = []
    for (parameter, like), count in zip(placed, copies.of(placed), strict=True):
        local = local_tensor(like) if isinstance(like, DTensor) else like
        if like is parameter:
            none = local.new_empty(0)
            parts.append(GradientPart(local=none, num_copies=count, num_unused=local.numel()))
        else:
            if local.layout is not torch.strided:
                local = local.to_dense()
            parts.append(GradientPart(local=local, num_copies=count))
    return parts


class LayoutSum:
    """Sums a few numbers over all ranks of a layout, to the same bits on every rank.

    Args:
        groups: the layout, and its communicators `tp`, `dp_cp` and `pp` if they have several ranks.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.layout = groups.layout
        self.rank = groups.rank
        names = [name for name in _WORLD if groups.size(name) > 1]
        groups.require(*names)
        members = [groups.group(name) for name in names]
        self._steps = [(group, collectives.flag_device(group)) for group in members]
        self.is_on_host = all(device.type == "cpu" for _, device in self._steps)

    def __call__(self, values: Sequence[float], *, what: str) -> list[float]:
        """Return the sum of each value over the ranks, in float64; as many values on every rank.

        Cost: one all-reduce over each of the communicators.
        """
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        for group, device in self._steps:
            total = total.to(device)
            try:
                work = collectives.all_reduce(total, group)
            except RuntimeError as error:  # a connection that broke earlier is seen here
                raise DeadlineError(f"{what} cannot start: {error}") from error
            collectives.wait(work, what)
        sums: list[float] = total.tolist()
        return sums


class NormTerms:
    """The numbers of each rank whose sums are the `GradientSums` of one layout.

    They may be part of one sum with those of other layouts: a rank that is not in this layout, or
    has nothing to add, contributes zeros.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._unit = 2 * layout.world_size
        """A multiple of any number of copies, so that counts of zeros stay whole numbers."""
        self.size = 3 + layout.world_size
        """Number of the numbers."""

    def of(self, parts: Iterable[GradientPart], *, rank: int, count_zeros: bool) -> list[float]:
        """Return the numbers of a rank; raise ConfigError if copies do not divide the ranks."""
        flags = [0.0] * self._layout.world_size
        square, zeros = _local_sums(
            parts, layout=self._layout, unit=self._unit, count_zeros=count_zeros
        )
        if not math.isfinite(square):
            square, flags[self._layout.ranks.index(rank)] = 0.0, 1.0
        # A float64 holds integers up to 2**53: two words keep the sum exact for any model.
        return [square, *divmod(zeros, _WORD), *flags]

    def read(self, sums: Sequence[float]) -> GradientSums:
        """Return what the sums of all ranks' numbers mean."""
        square, high, low, *flags = sums
        bad = tuple(sorted(r for r, f in zip(self._layout.ranks, flags, strict=True) if f))
        zeros = (int(high) * _WORD + int(low)) // self._unit
        return GradientSums(square=square, num_zeros=zeros, bad_ranks=bad)


@torch.no_grad()
def _local_sums(
    parts: Iterable[GradientPart], *, layout: Layout, unit: int, count_zeros: bool
) -> tuple[float, int]:
    """Return this rank's sum of squares, and `unit` times its zeros, divided by the copies.

    Everything is computed where the gradients are, and read from each device once.
    """
    zeros = 0
    tensors: dict[tuple[torch.device, int], list[Tensor]] = {}
    for part in parts:
        if part.num_copies < 1 or unit % part.num_copies:
            raise ConfigError(f"{part.num_copies} copies do not divide the ranks of {layout}")
        if part.local.numel():
            tensors.setdefault((part.local.device, part.num_copies), []).append(part.local)
        if count_zeros:
            here = part.local.numel() - part.num_padding + part.num_unused
            zeros += here * (unit // part.num_copies)
    numbers: dict[torch.device, list[Tensor]] = {}
    weights: dict[torch.device, list[int]] = {}
    for (device, copies), members in tensors.items():
        numbers.setdefault(device, []).append(_square(members) / copies)
        if count_zeros:
            counts = torch.stack([torch.count_nonzero(each) for each in members])
            numbers[device].append(counts.sum().double())  # exact up to 2**53
            weights.setdefault(device, []).append(unit // copies)
    square = 0.0
    for device, sums in numbers.items():
        values: list[float] = torch.stack(sums).tolist()
        if count_zeros:
            zeros -= sum(
                int(n) * weight for n, weight in zip(values[1::2], weights[device], strict=True)
            )
            values = values[::2]
        square += sum(values)
    return square, zeros


@torch.no_grad()
def sums_of_shares(
    shares: Tensor, *, ranks: Sequence[int], padding: Sequence[int], count_zeros: bool
) -> GradientSums:
    """Return the sums of gradients of which this rank has every rank's share, the rows of a tensor.

    Every rank computes them from equal shares, to the same bits: elements are added one by one, in
    an order that depends on their number alone, as that of a BLAS or of `Tensor.sum` does not.

    Args:
        shares: a row for each rank.
        ranks: that own the shares.
        padding: elements of each share that belong to no parameter, and are zero.
        count_zeros: if not, they are taken for 0.
    """
    parts = _reals(shares).view(len(ranks), -1) if shares.is_complex() else shares
    wide = parts.to(torch.float64, copy=True)  # `double()` of float64 is the tensor itself
    wide.mul_(wide)
    while (width := wide.shape[1]) > _FEW:
        half = width // 2
        if width % 2:
            wide[:, 0].add_(wide[:, -1])
        wide = wide[:, :half].add_(wide[:, half : 2 * half])
    squares = [sum(row) for row in wide.tolist()]
    bad = [not math.isfinite(square) for square in squares]
    num_zeros = 0
    if count_zeros:
        num_zeros = shares.numel() - sum(padding) - int(torch.count_nonzero(shares))
    return GradientSums(
        square=sum(square for square, is_bad in zip(squares, bad, strict=True) if not is_bad),
        num_zeros=num_zeros,
        bad_ranks=tuple(sorted(r for r, is_bad in zip(ranks, bad, strict=True) if is_bad)),
    )


def share_square(parts: Iterable[GradientPart], *, layout: Layout) -> float:
    """Return what this rank adds to the square of the norm; not finite if an element is not.

    Cost: reads this rank's parts once; no collective.
    """
    square, _ = _local_sums(parts, layout=layout, unit=2 * layout.world_size, count_zeros=False)
    return square


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    *,
    groups: ProcessGroups,
    count_zeros: bool = False,
    shards: Shards | None = None,
) -> GradientNorm:
    """Measure the gradients in `.grad`, which are reduced already: their exact norm.

    A plain parameter is taken for the same on all ranks of its pipeline stage, which is not checked
    here; those of which ranks hold shards are declared in `shards`, as for a `ReducedOptimizer`.

    Each rank adds the squares of what it holds, divided by the number of copies; the sum runs in
    float64 over the whole layout. Non-finite values travel as one flag per rank, because a maximum
    on gloo can lose a NaN and a sum cannot say where it came from. Of a complex gradient the norm
    is that of its real and imaginary parts.

    Raises:
        ConfigError: A gradient is a sum not yet reduced, or `shards` does not fit.

    Cost: collective over the layout; one sum of 3 + world size numbers; at most 16 MiB of extra
    memory.
    """
    terms = NormTerms(groups.layout)
    parameters = list(parameters)
    cut = PlainShards(shards, parameters, groups=groups, over=None, who="gradient_norm")
    parts = gradient_parts(parameters, copies=CopyCounts(groups, num_parts=cut.num_parts))
    mine = terms.of(parts, rank=groups.rank, count_zeros=count_zeros)
    sums = terms.read(LayoutSum(groups)(mine, what="the sum of the norms of all ranks' gradients"))
    return GradientNorm(
        value=math.nan if sums.bad_ranks else math.sqrt(sums.square),
        bad_ranks=sums.bad_ranks,
        num_zeros=sums.num_zeros if count_zeros else None,
    )


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients in `.grad`, in place."""
    if factor == 1.0:
        return
    gradients = (p.grad for p in parameters if p.grad is not None)
    # Of a DTensor its elements: the operations of DTensors cost far more than the multiplication.
    scale_each([local_tensor(g) if isinstance(g, DTensor) else g for g in gradients], factor)


def _square(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of tensors on one device, in float64, on that device.

    Small ones are joined, as many as fit in a chunk, since each operation costs the host time. All
    chunks are widened into one buffer: memory of some MiB that is new for each chunk is new to the
    kernel, too, and touching it first took seven times as long as the squares.
    """
    flats = [_reals(each) if each.is_complex() else each.reshape(-1) for each in tensors]
    numels = [*map(Tensor.numel, flats)]
    room = min(_CHUNK, sum(numels))
    wide = torch.empty(room, dtype=torch.float64, device=flats[0].device)
    sums = [_dot(chunk, wide) for chunk in _chunks(flats, numels)]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _reals(local: Tensor) -> Tensor:
    """Return a complex tensor as a row of real numbers: |z|² is the sum of two squares."""
    return torch.view_as_real(local.reshape(-1).resolve_conj()).reshape(-1)


def _chunks(flats: Iterable[Tensor], numels: Iterable[int]) -> Iterator[Tensor]:
    """Yield rows cut or joined to at most `_CHUNK` elements."""
    small: list[Tensor] = []
    room = _CHUNK
    for flat, numel in zip(flats, numels, strict=True):
        if numel > _CHUNK:
            yield from torch.split(flat, _CHUNK)
            continue
        if numel > room:
            yield torch.cat(small)
            small, room = [], _CHUNK
        small.append(flat)
        room -= numel
    if small:
        yield torch.cat(small) if len(small) > 1 else small[0]


def _dot(flat: Tensor, buffer: Tensor) -> Tensor:
    """Return the sum of squares of a row, which is widened into the start of `buffer`."""
    wide = buffer[: flat.numel()].copy_(flat)
    return wide.dot(wide)

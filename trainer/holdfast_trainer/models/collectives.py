"""Collectives that autograd runs through, each over one explicit group.

Each function states what happens to values forward and to gradients backward. On
an axis of one rank every one of them returns its argument itself: no copy, no node in the graph.
Elsewhere all ranks of the axis call the same functions in the same order, forward and backward,
with tensors that differ in the named dimension only; an operand that needs a gradient on one rank
needs one on all. They can be differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import GroupError
from holdfast.parallel import ProcessGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One named group as a module sees it: how many ranks, and which of them this one is."""

    name: str
    """Name of the group in the layout, for messages."""
    size: int
    """Number of ranks in the group."""
    index: int
    """This rank's position in the group."""
    ranks: tuple[int, ...]
    """The group's global ranks, by index."""
    _group: ProcessGroup | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, groups: ProcessGroups, name: str) -> Axis:
        """The axis `name` of this rank; GroupError if it has several ranks and no communicator."""
        ranks = groups.ranks(name)
        return cls(
            name=name,
            size=len(ranks),
            index=ranks.index(groups.rank),
            ranks=ranks,
            _group=groups.group(name) if len(ranks) > 1 else None,
        )

    @property
    def group(self) -> ProcessGroup:
        """The communicator; GroupError for an axis of one rank, which has none."""
        if self._group is None:
            raise GroupError(
                f"Axis {self.name!r} of rank {self.ranks[self.index]} has one rank and no "
                "communicator; nothing has to be sent over it."
            )
        return self._group


def split_sizes(length: int, *, num_parts: int) -> tuple[int, ...]:
    """The lengths into which `split_dim` cuts a dimension: even, the longer ones first."""
    share, rest = divmod(length, num_parts)
    return tuple(share + (part < rest) for part in range(num_parts))


def copy_to(x: Tensor, *, axis: Axis) -> Tensor:
    """Use one value for different computations on the ranks.

    Forward nothing; backward an all-reduce adds the ranks' gradients.
    """
    return _apply(x, _keep, _sum, axis=axis)


def reduce_from(x: Tensor, *, axis: Axis) -> Tensor:
    """Add the ranks' parts of a value that all of them use for the same computation.

    Forward an all-reduce; backward nothing: each rank's gradient is that of the sum.
    """
    return _apply(x, _sum, _keep, axis=axis)


def sum_over(x: Tensor, *, axis: Axis) -> Tensor:
    """Add the ranks' parts of a value that each of them uses in its own loss.

    Forward an all-reduce; backward another, because a part contributes to every rank's loss.
    """
    return _apply(x, _sum, _sum, axis=axis)


def split_dim(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """Give each rank its part, by `split_sizes`, of a value that is equal on all ranks.

    Forward a view, which may be empty; backward an all-gather, so that every rank has the
    gradient of the whole.
    """
    dim = dim % x.dim()
    sizes = split_sizes(x.shape[dim], num_parts=axis.size)
    return _apply(x, _cut, _gather, axis=axis, dim=dim, sizes=sizes)


def gather_dim(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the ranks' parts to a value that all use for the same computation.

    Backward each rank keeps its part of its own gradient.

    Args:
        x: this rank's part.
        axis: the ranks.
        dim: the dimension in which the parts follow each other.
        sizes: the length of each rank's part, by index.

    Cost: an all-gather of `axis.size` x the longest part; backward nothing is sent.
    """
    dim = dim % x.dim()
    _check_own(x, axis=axis, dim=dim, sizes=sizes)
    return _apply(x, _gather, _cut, axis=axis, dim=dim, sizes=sizes)


def gather_sum(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the ranks' parts to a value that each uses for its own computation.

    Backward the ranks' gradients are added. Arguments as those of `gather_dim`.

    Cost: an all-gather, backward a reduce-scatter, both of `axis.size` x the longest part.
    """
    dim = dim % x.dim()
    _check_own(x, axis=axis, dim=dim, sizes=sizes)
    return _apply(x, _gather, _scatter, axis=axis, dim=dim, sizes=sizes)


def scatter_sum(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Add the ranks' values and give each rank its part of the sum.

    Arguments as those of `gather_dim`, but `x` is as long as all parts together.

    Cost: a reduce-scatter, backward an all-gather, both of `axis.size` x the longest part.
    """
    dim = dim % x.dim()
    _check_sizes(x, axis=axis, dim=dim, sizes=sizes)
    return _apply(x, _scatter, _gather, axis=axis, dim=dim, sizes=sizes)


def all_to_all(x: Tensor, *, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send consecutive runs of rows (dim 0) to the ranks of the axis, and receive theirs, by index.

    Backward sends every row's gradient back.

    Args:
        x: the rows, those for the first rank first.
        axis: the ranks.
        send: how many rows go to each rank, by index; zeros are allowed.
        receive: how many come from each; what one rank sends to another is what that receives.

    Returns:
        `sum(receive)` rows.
    """
    _check_sizes(x, axis=axis, dim=0, sizes=send)
    if len(receive) != axis.size or (axis.size == 1 and receive[0] != send[0]):
        raise GroupError(
            f"all_to_all over {axis.name!r} of {axis.size} ranks cannot receive {list(receive)}: "
            f"one number of rows is needed for each rank, and from itself what it sends itself."
        )
    return _apply(x, _exchange, _return, axis=axis, send=send, receive=receive)


class _LinearPair(torch.autograd.Function):
    """A linear map and its transpose, given as functions."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise GroupError("A collective of a model can be differentiated once, not twice.")
        return ctx.step(gradient), None, None


def _apply(
    x: Tensor,
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    *,
    axis: Axis,
    **parts: Any,
) -> Tensor:
    """One of the functions below each way, with the same arguments; nothing on one rank."""
    if axis.size == 1:
        return x
    both = (partial(function, axis=axis, **parts) for function in (forward, backward))
    return cast("Tensor", _LinearPair.apply(x, *both))  # type: ignore[no-untyped-call]


def _keep(x: Tensor, *, axis: Axis) -> Tensor:
    del axis
    return x.view_as(x)


def _sum(x: Tensor, *, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _cut(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])


def _gather(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """All parts along `dim`; shorter ones are sent padded, because gloo needs equal sizes."""
    longest = max(sizes)
    part = _padded(x.movedim(dim, 0), longest)
    whole = part.new_empty((axis.size * longest, *part.shape[1:]))
    gather = _torch_function("all_gather_single", before="all_gather_into_tensor")
    gather(whole, part.contiguous(), group=axis.group)
    if dim == 0 and min(sizes) == longest:
        return whole
    parts = torch.split(whole, longest) if longest else [whole] * axis.size
    return torch.cat(
        [part[:size].movedim(0, dim) for part, size in zip(parts, sizes, strict=True)], dim=dim
    )


def _scatter(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum along `dim`; shorter parts are sent padded to the longest."""
    longest = max(sizes)
    rows = x.movedim(dim, 0)
    if min(sizes) < longest:
        rows = torch.cat([_padded(part, longest) for part in torch.split(rows, list(sizes))])
    own = rows.new_empty((longest, *rows.shape[1:]))
    scatter = _torch_function("reduce_scatter_single", before="reduce_scatter_tensor")
    scatter(own, rows.contiguous(), group=axis.group)
    return own[: sizes[axis.index]].movedim(0, dim).contiguous()


def _exchange(x: Tensor, *, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=axis.group)
    return received


def _return(x: Tensor, *, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    return _exchange(x, axis=axis, send=receive, receive=send)


def _torch_function(name: str, *, before: str) -> Callable[..., object]:
    """A function that torch.distributed had under another name before torch 2.13."""
    function: Callable[..., object] = getattr(dist, name if hasattr(dist, name) else before)
    return function


def _padded(rows: Tensor, length: int) -> Tensor:
    missing = length - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _check_sizes(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> None:
    if len(sizes) != axis.size or min(sizes) < 0 or sum(sizes) != x.shape[dim]:
        raise GroupError(
            f"Parts of {list(sizes)} do not cut dim {dim} of a tensor of shape {list(x.shape)} "
            f"for the {axis.size} ranks of axis {axis.name!r}: give one length for each, with "
            f"sum {x.shape[dim]}."
        )


def _check_own(x: Tensor, *, axis: Axis, dim: int, sizes: Sequence[int]) -> None:
    if len(sizes) != axis.size or min(sizes) < 0 or sizes[axis.index] != x.shape[dim]:
        raise GroupError(
            f"Parts of {list(sizes)} on dim {dim} are not what the {axis.size} ranks of axis "
            f"{axis.name!r} have: index {axis.index} has a tensor of shape {list(x.shape)}."
        )

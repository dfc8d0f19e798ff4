"""Causal attention over the shards of a sequence, on one explicit axis of ranks.

Later positions look at more keys, so a sequence cut into equal runs would leave the last rank with
most of the work. Here it is cut into 2 x `axis.size` chunks, and the rank at index i holds chunks
i and 2 x `axis.size` - 1 - i, in that order: all ranks then have equal work, in the whole and in
every step round the ring (the zigzag split of Zhu's ring-flash-attention, Llama 3's as well).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from holdfast.errors import ConfigError, GroupError
from holdfast.reference.models.collectives import Axis, gather_sum


def positions(num_positions: int, *, axis: Axis, device: torch.device | None = None) -> Tensor:
    """The global positions that this rank holds of a sequence, in the order in which it does.

    Returns `num_positions / axis.size` int64. Raises ConfigError if the sequence does not divide
    into 2 x `axis.size` chunks (any length will do on an axis of one rank).
    """
    return take_positions(torch.arange(num_positions, device=device), axis=axis, dim=0)


def take_positions(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """This rank's positions of a tensor that has all of them along `dim`; one copy.

    On an axis of one rank the tensor itself. ConfigError if its length does not divide. Its
    gradient is that of this rank's positions only; nothing is sent.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis=axis, dim=dim)
    return torch.cat((chunks[axis.index], chunks[-1 - axis.index]), dim=dim)


def restore_order(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """Whole sequences in their own order, from all ranks' shards joined by index along `dim`.

    The inverse of `shard_order`; one copy, and none on an axis of one rank.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis=axis, dim=dim)
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim=dim)


def shard_order(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """All ranks' shards joined by index, from whole sequences in their own order along `dim`.

    The inverse of `restore_order`; one copy, and none on an axis of one rank.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis=axis, dim=dim)
    ordered = [chunk for i in range(axis.size) for chunk in (chunks[i], chunks[-1 - i])]
    return torch.cat(ordered, dim=dim)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    axis: Axis,
    variant: Literal["gather", "ring"],
) -> Tensor:
    """Causal softmax attention of this rank's positions to all positions before them.

    Args:
        query: (rows, heads, local positions, head_dim), positions as `positions` says.
        key: the same shape, the same positions.
        value: the same shape, the same positions.
        axis: the ranks that hold the sequence; all of them make the same calls in the same order.
        variant: how keys and values meet queries; see below.

    "gather" is one all-gather of keys and values, and backward one reduce-scatter of their
    gradients. It holds those of the whole sequence, and a mask of one byte for each of them and
    each query of a chunk.

    "ring" sends keys and values round in `axis.size` - 1 messages, each under way while the block
    before it is used; backward once more, followed by as many messages of their gradients in
    float32 or wider. It holds at most two blocks of other ranks (backward two sums of gradients as
    well) and the scores of one, and computes in float32 or wider, under autocast as well.

    Over several ranks either can be differentiated once.

    Returns:
        The shape and type of `query`. On an axis of one rank, torch's attention; nothing is sent.

    Raises:
        ConfigError: an unknown variant, unequal shapes, or local positions that are not two equal
            chunks.
    """
    _check(query, key, value, axis=axis, variant=variant)
    if axis.size == 1:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    if variant == "gather":
        return _attend_to_gathered(query, key, value, axis=axis)
    return cast("Tensor", _RingAttention.apply(query, key, value, axis))  # type: ignore[no-untyped-call]


def _check(query: Tensor, key: Tensor, value: Tensor, *, axis: Axis, variant: str) -> None:
    if variant not in ("gather", "ring"):
        raise ConfigError(
            f"Attention over {axis.name!r} has no variant {variant!r}: it is 'gather' or 'ring'."
        )
    shapes = [list(tensor.shape) for tensor in (query, key, value)]
    if query.dim() != 4 or shapes[1:] != shapes[:1] * 2:
        raise ConfigError(
            f"Queries, keys and values of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}: "
            f"attention over {axis.name!r} takes three equal ones, "
            f"(rows, heads, local positions, head_dim)."
        )
    if axis.size > 1 and query.shape[2] % 2:
        raise ConfigError(
            f"{query.shape[2]} positions on each rank of {axis.name!r}: each holds two equal "
            f"chunks; give sequences whose length is a multiple of {2 * axis.size}."
        )


def _chunks(x: Tensor, *, axis: Axis, dim: int) -> tuple[Tensor, ...]:
    num_chunks = 2 * axis.size
    length = x.shape[dim]
    if length == 0 or length % num_chunks:
        raise ConfigError(
            f"A sequence of {length} positions does not divide into 2 x {axis.size} equal chunks "
            f"for the ranks of {axis.name!r}: give sequences whose length is a multiple of "
            f"{num_chunks}, or set another --{axis.name}."
        )
    return torch.split(x, length // num_chunks, dim=dim)


def _attend_to_gathered(query: Tensor, key: Tensor, value: Tensor, *, axis: Axis) -> Tensor:
    """Each of the two query chunks against the keys up to its own end."""
    size = query.shape[2] // 2
    own = torch.stack((key, value)).unsqueeze(0)
    shards = gather_sum(own, axis=axis, dim=0, sizes=[1] * axis.size).unbind(0)
    halves = [torch.split(shard, size, dim=-2) for shard in shards]
    chunks = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
    places = (axis.index, 2 * axis.size - 1 - axis.index)
    keys, values = torch.cat(chunks[: places[1] + 1], dim=-2).unbind(0)
    mixed = []
    for place, part in zip(places, torch.split(query, size, dim=2), strict=True):
        seen = (place + 1) * size
        mask = torch.ones(size, seen, dtype=torch.bool, device=query.device)
        mixed.append(
            functional.scaled_dot_product_attention(
                part,
                keys[..., :seen, :],
                values[..., :seen, :],
                attn_mask=mask.tril(seen - size),
            )
        )
    return torch.cat(mixed, dim=2)


class _RingAttention(torch.autograd.Function):
    """Attention with keys and values that go round a ring (Liu, Zaharia, Abbeel 2023)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, log_sum = _ring_forward(query, key, value, axis=axis)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.axis = axis
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise GroupError(
                "Ring attention can be differentiated once, not twice: leave out create_graph."
            )
        query, key, value, out, log_sum = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            gradients = _ring_backward(
                query, key, value, out=out, log_sum=log_sum, gradient=gradient, axis=ctx.axis
            )
        return *gradients, None


def _ring_forward(
    query: Tensor, key: Tensor, value: Tensor, *, axis: Axis
) -> tuple[Tensor, Tensor]:
    """The mixed values, and the logarithm of each softmax's denominator in float32 or wider."""
    wide = _wide(query)
    scaled = query.to(wide) / math.sqrt(query.shape[3])
    total = torch.zeros_like(scaled)
    log_sum = scaled.new_full((*scaled.shape[:3], 1), -math.inf)
    block = _Travelling(torch.stack((key, value)), axis=axis, tag=0)
    for step in range(axis.size):
        if step + 1 < axis.size:
            block.depart()
        for part in _parts(step, axis=axis, num_local=query.shape[2]):
            mine = (slice(None), slice(None), part.queries)
            _add_softmax(
                total[mine], log_sum[mine], scaled=scaled[mine], block=block.here, part=part
            )
        if step + 1 < axis.size:
            block.arrive()
    return total.to(query.dtype), log_sum


def _add_softmax(
    total: Tensor, log_sum: Tensor, *, scaled: Tensor, block: Tensor, part: _Part
) -> None:
    """Extend the softmax over the keys so far by the part's, in place.

    Two softmaxes over different keys join as their mean, weighted with their denominators.
    """
    keys, values = block[..., part.keys, :].to(total.dtype)
    scores = _scores(scaled, keys, is_causal=part.is_causal)
    here = scores.logsumexp(dim=-1, keepdim=True)
    mixed = scores.sub_(here).exp_() @ values
    both = torch.logaddexp(log_sum, here)
    total.mul_((log_sum - both).exp_()).add_(mixed.mul_((here - both).exp_()))
    log_sum.copy_(both)


def _ring_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Tensor,
    log_sum: Tensor,
    gradient: Tensor,
    axis: Axis,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values go round again; the sum of their gradients follows one rank behind.

    A block's own rank keeps its own part. The next rank begins the sum that travels, and the last
    one sends it home.
    """
    wide = log_sum.dtype
    scaled = query.to(wide) / math.sqrt(query.shape[3])
    gradient = gradient.to(wide)
    shares = (gradient * out.to(wide)).sum(dim=-1, keepdim=True)
    query_gradient = torch.zeros_like(scaled)
    block = _Travelling(torch.stack((key, value)), axis=axis, tag=0)
    own = torch.zeros_like(block.here, dtype=wide)
    sums = _Travelling(torch.zeros_like(own), axis=axis, tag=1)
    for step in range(axis.size):
        if step + 1 < axis.size:
            block.depart()
        parts = []
        for part in _parts(step, axis=axis, num_local=query.shape[2]):
            mine = (slice(None), slice(None), part.queries)
            parts.append(
                _softmax_gradients(
                    query_gradient[mine],
                    gradient=gradient[mine],
                    log_sum=log_sum[mine],
                    shares=shares[mine],
                    scaled=scaled[mine],
                    block=block.here,
                    part=part,
                )
            )
        if step > 1:
            sums.arrive()
        _add_and_drop(sums.here if step else own, parts)
        if step:
            sums.depart()
        if step + 1 < axis.size:
            block.arrive()
    sums.arrive()
    of_keys, of_values = own.add_(sums.here)
    query_gradient.div_(math.sqrt(query.shape[3]))
    return query_gradient.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype)


def _softmax_gradients(
    query_gradient: Tensor,
    *,
    gradient: Tensor,
    log_sum: Tensor,
    shares: Tensor,
    scaled: Tensor,
    block: Tensor,
    part: _Part,
) -> tuple[slice, Tensor, Tensor]:
    """Add to the gradients of scaled queries; return those of the part's keys and values.

    `shares` is the sum of gradient x output over head_dim, which is also that of the gradients of
    all weights, each times its weight (Dao et al. 2022, B.2).
    """
    keys, values = block[..., part.keys, :].to(log_sum.dtype)
    weights = _scores(scaled, keys, is_causal=part.is_causal).sub_(log_sum).exp_()
    of_scores = (gradient @ values.mT).sub_(shares).mul_(weights)
    query_gradient.add_(of_scores @ keys)
    return part.keys, of_scores.mT @ scaled, weights.mT @ gradient


def _add_and_drop(total: Tensor, parts: list[tuple[slice, Tensor, Tensor]]) -> None:
    """Add gradients of parts of a block to those of the whole, and let their memory go."""
    while parts:
        held, of_keys, of_values = parts.pop()
        total[0, :, :, held].add_(of_keys)
        total[1, :, :, held].add_(of_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Local queries that see some of a block's keys: all of them alike, or as a triangle."""

    queries: slice
    keys: slice
    is_causal: bool


def _parts(step: int, *, axis: Axis, num_local: int) -> Iterator[_Part]:
    """What this rank's queries see of the block that started `step` ranks before it.

    Of an earlier rank's chunks, all queries see the first and none the last; of a later rank's,
    the second half of the queries sees both. What nobody sees is not computed.
    """
    source = axis.index - step
    first, last = slice(0, num_local // 2), slice(num_local // 2, num_local)
    every = slice(0, num_local)
    if step == 0:
        yield _Part(queries=first, keys=first, is_causal=True)
        yield _Part(queries=last, keys=first, is_causal=False)
        yield _Part(queries=last, keys=last, is_causal=True)
    elif source >= 0:
        yield _Part(queries=every, keys=first, is_causal=False)
    else:
        yield _Part(queries=last, keys=every, is_causal=False)


def _scores(scaled: Tensor, keys: Tensor, *, is_causal: bool) -> Tensor:
    scores = scaled @ keys.mT
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, x.dtype)


class _Travelling:
    """A tensor on its way round the ring, in two buffers: one here, one arriving.

    Between `depart` and `arrive` the tensor here may be read, not written.
    """

    __slots__ = ("_axis", "_messages", "_other", "_tag", "here")

    def __init__(self, own: Tensor, *, axis: Axis, tag: int) -> None:
        """`own` is contiguous and becomes one of the buffers; `tag` tells apart two that travel."""
        self.here = own
        self._other: Tensor | None = None
        self._axis = axis
        self._tag = tag
        self._messages: list[dist.Work] = []

    def depart(self) -> None:
        """Begin to send what is here to the next rank, and to receive from the one before."""
        if self._other is None:
            self._other = torch.empty_like(self.here)
        axis = self._axis
        after = axis.ranks[(axis.index + 1) % axis.size]
        before = axis.ranks[axis.index - 1]
        self._messages = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.here, after, group=axis.group, tag=self._tag),
                dist.P2POp(dist.irecv, self._other, before, group=axis.group, tag=self._tag),
            ]
        )

    def arrive(self) -> None:
        """Wait for both messages; what has come is here from now on."""
        for message in self._messages:
            message.wait()
        if self._other is not None:
            self.here, self._other = self._other, self.here

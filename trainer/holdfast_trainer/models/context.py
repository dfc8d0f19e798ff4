"""Causal attention over the shards of a sequence, on one explicit axis of ranks.

Later positions look at more keys, so a sequence cut into equal runs would leave the last rank with
most of the work. Here it is cut into 2 x `axis.size` chunks, and the rank at index i holds chunks
i and 2 x `axis.size` - 1 - i, in that order: all ranks then have equal work, in total and in
every step around the ring (the zigzag split of Zhu's ring-flash-attention, Llama 3's as well).
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
from holdfast_trainer.models.collectives import Axis, gather_sum


def positions(num_positions: int, *, axis: Axis, device: torch.device | None = None) -> Tensor:
    """The global positions of a sequence that this rank holds, in its order.

    Returns:
        (num_positions / axis.size,) int64.

    Raises:
        ConfigError: the axis has several ranks, and 2 x `axis.size` does not divide the sequence.
    """
    return take_positions(torch.arange(num_positions, device=device), axis=axis, dim=0)


def take_positions(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """This rank's positions of a tensor that has all of them along one dim.

    The gradient is that of this rank's positions only; nothing is sent.

    Args:
        x: any tensor.
        axis: the ranks that hold the sequence.
        dim: the dim of positions.

    Raises:
        ConfigError: the length does not divide.

    Cost: one copy; none on an axis of one rank, which gets the tensor itself.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis=axis, dim=dim)
    return torch.cat((chunks[axis.index], chunks[-1 - axis.index]), dim=dim)


def restore_order(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """Whole sequences in their own order, from all ranks' shards joined by index along `dim`.

    The inverse of `shard_order`.

    Cost: one copy; none on an axis of one rank.
    """
    if axis.size == 1:
        return x
    chunks = _chunks(x, axis=axis, dim=dim)
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim=dim)


def shard_order(x: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """All ranks' shards joined by index, from whole sequences in their own order along `dim`.

    The inverse of `restore_order`.

    Cost: one copy; none on an axis of one rank.
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
        variant: how keys and values reach the queries; see below.

    "gather" is one all-gather of keys and values, and backward one reduce-scatter of their
    gradients. It holds those of the whole sequence, and a mask of one byte for each of them and
    each query of a chunk.

    "ring" passes keys and values around in `axis.size` - 1 messages, each in flight while the
    previous block is used; backward passes them again, followed by as many messages of their
    gradients in float32 or wider. It holds at most two blocks of other ranks (backward two sums of
    gradients as well) and the scores of one, and computes in float32 or wider, under autocast as
    well.

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
    """Refuse operands that `causal_attention` does not take."""
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
    """A sequence in 2 x `axis.size` equal chunks; ConfigError when it does not divide."""
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
    first, last = axis.index, 2 * axis.size - 1 - axis.index
    keys, values = torch.cat(chunks[: last + 1], dim=-2).unbind(0)
    mixed = []
    for chunk, queries in zip((first, last), torch.split(query, size, dim=2), strict=True):
        num_keys = (chunk + 1) * size
        mask = torch.ones(size, num_keys, dtype=torch.bool, device=query.device)
        mixed.append(
            functional.scaled_dot_product_attention(
                queries,
                keys[..., :num_keys, :],
                values[..., :num_keys, :],
                attn_mask=mask.tril(num_keys - size),
            )
        )
    return torch.cat(mixed, dim=2)


class _RingAttention(torch.autograd.Function):
    """Attention with keys and values passed around a ring (Liu, Zaharia, Abbeel 2023)."""

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
    block = _RingBuffer(torch.stack((key, value)), axis=axis, tag=0)
    for step in range(axis.size):
        if step + 1 < axis.size:
            block.start()
        for tile in _tiles(step, axis=axis, num_local=query.shape[2]):
            mine = (slice(None), slice(None), tile.queries)
            _add_softmax(
                total[mine], log_sum[mine], scaled=scaled[mine], block=block.current, tile=tile
            )
        if step + 1 < axis.size:
            block.wait()
    return total.to(query.dtype), log_sum


def _add_softmax(
    total: Tensor, log_sum: Tensor, *, scaled: Tensor, block: Tensor, tile: _Tile
) -> None:
    """Extend the softmax over the keys so far by those of a tile, in place.

    Two softmaxes over different keys join as their mean, weighted with their denominators.
    """
    keys, values = block[..., tile.keys, :].to(total.dtype)
    scores = _scores(scaled, keys, is_causal=tile.is_causal)
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
    """Keys and values go around again; the sum of their gradients follows one rank behind.

    The rank that owns a block keeps its own share of the gradient. The next rank starts the sum,
    every rank adds its share, and the last one sends it back to the owner.
    """
    wide = log_sum.dtype
    scaled = query.to(wide) / math.sqrt(query.shape[3])
    gradient = gradient.to(wide)
    shares = (gradient * out.to(wide)).sum(dim=-1, keepdim=True)
    query_gradient = torch.zeros_like(scaled)
    block = _RingBuffer(torch.stack((key, value)), axis=axis, tag=0)
    own = torch.zeros_like(block.current, dtype=wide)
    sums = _RingBuffer(torch.zeros_like(own), axis=axis, tag=1)
    for step in range(axis.size):
        if step + 1 < axis.size:
            block.start()
        shares_of_block = []
        for tile in _tiles(step, axis=axis, num_local=query.shape[2]):
            mine = (slice(None), slice(None), tile.queries)
            shares_of_block.append(
                _softmax_gradients(
                    query_gradient[mine],
                    gradient=gradient[mine],
                    log_sum=log_sum[mine],
                    shares=shares[mine],
                    scaled=scaled[mine],
                    block=block.current,
                    tile=tile,
                )
            )
        if step > 1:
            sums.wait()
        _add_and_free(sums.current if step else own, shares_of_block)
        if step:
            sums.start()
        if step + 1 < axis.size:
            block.wait()
    sums.wait()
    of_keys, of_values = own.add_(sums.current)
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
    tile: _Tile,
) -> tuple[slice, Tensor, Tensor]:
    """Add to the gradients of scaled queries; return those of the tile's keys and values.

    Args:
        query_gradient: of the tile's queries, added to in place.
        gradient: of the output.
        log_sum: the logarithm of each softmax's denominator.
        shares: the sum of gradient x output over head_dim, which is also that of the gradients of
            all weights, each times its weight (Dao et al. 2022, B.2).
        scaled: queries / sqrt(head_dim).
        block: keys and values of the rank whose turn it is.
        tile: which of them.
    """
    keys, values = block[..., tile.keys, :].to(log_sum.dtype)
    weights = _scores(scaled, keys, is_causal=tile.is_causal).sub_(log_sum).exp_()
    of_scores = (gradient @ values.mT).sub_(shares).mul_(weights)
    query_gradient.add_(of_scores @ keys)
    return tile.keys, of_scores.mT @ scaled, weights.mT @ gradient


def _add_and_free(total: Tensor, tiles: list[tuple[slice, Tensor, Tensor]]) -> None:
    """Add gradients of tiles to those of the whole block, and free their memory."""
    while tiles:
        keys, of_keys, of_values = tiles.pop()
        total[0, :, :, keys].add_(of_keys)
        total[1, :, :, keys].add_(of_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Local queries that attend to some of a block's keys: to all of them, or as a triangle."""

    queries: slice
    keys: slice
    is_causal: bool


def _tiles(step: int, *, axis: Axis, num_local: int) -> Iterator[_Tile]:
    """The parts of the scores with the block of the rank `step` before this one that are needed.

    Two ranks, four chunks of one position each; rank 0 holds chunks 0 and 3, rank 1 chunks 1, 2:

        rank  step  keys of  queries x keys that attend          yields
        0     0     rank 0   0 x 0, 3 x 0, 3 x 3                 two triangles and a square
        0     1     rank 1   3 x 1, 3 x 2 (0 is before both)     last queries x every key
        1     0     rank 1   1 x 1, 2 x 1, 2 x 2                 two triangles and a square
        1     1     rank 0   1 x 0, 2 x 0 (3 is after both)      every query x first keys

    Tiles without any position that attends are never computed.
    """
    source = axis.index - step
    first, last = slice(0, num_local // 2), slice(num_local // 2, num_local)
    every = slice(0, num_local)
    if step == 0:
        yield _Tile(queries=first, keys=first, is_causal=True)
        yield _Tile(queries=last, keys=first, is_causal=False)
        yield _Tile(queries=last, keys=last, is_causal=True)
    elif source >= 0:
        yield _Tile(queries=every, keys=first, is_causal=False)
    else:
        yield _Tile(queries=last, keys=every, is_causal=False)


def _scores(scaled: Tensor, keys: Tensor, *, is_causal: bool) -> Tensor:
    """Products of queries and keys, minus infinity if a causal tile is masked."""
    scores = scaled @ keys.mT
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums: float32 or wider."""
    return torch.promote_types(torch.float32, x.dtype)


class _RingBuffer:
    """A tensor passed around the ring, in two buffers: the current one and the one coming in.

    Between `start` and `wait` the current tensor may be read, not written.
    """

    __slots__ = ("_axis", "_incoming", "_messages", "_tag", "current")

    def __init__(self, own: Tensor, *, axis: Axis, tag: int) -> None:
        """`own` is contiguous and becomes a buffer; `tag` is unique per tensor in flight."""
        self.current = own
        self._incoming: Tensor | None = None
        self._axis = axis
        self._tag = tag
        self._messages: list[dist.Work] = []

    def start(self) -> None:
        """Begin to send the current tensor to the next rank and to receive the previous one's."""
        if self._incoming is None:
            self._incoming = torch.empty_like(self.current)
        axis = self._axis
        after = axis.ranks[(axis.index + 1) % axis.size]
        before = axis.ranks[axis.index - 1]
        self._messages = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.current, after, group=axis.group, tag=self._tag),
                dist.P2POp(dist.irecv, self._incoming, before, group=axis.group, tag=self._tag),
            ]
        )

    def wait(self) -> None:
        """Wait for both messages; the tensor received becomes the current one."""
        for message in self._messages:
            message.wait()
        if self._incoming is not None:
            self.current, self._incoming = self._incoming, self.current

"""The agreement of an edge's ranks before anything is sent: one small header of each rank.

Every rank has the headers of all, so a mistake of one is the same error on all of them, and the
sizes of all messages are known before the first is started.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from holdfast.bridge.bridge_plan import BridgePlan
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, shorten_ranks, values_by_rank

DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
"""The dtypes of activations, by their name in a header."""


class Given(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The samples that a rank with the source's last stage gives."""

    dtype: str
    features: tuple[int, ...]
    """Shape of one token."""
    num_samples: int
    num_tokens: tuple[int, ...]
    """Tokens of each part of the samples."""
    counts_digest: bytes
    """Of the tokens of each sample, so that replicas with other samples are noticed."""
    needs_gradient: bool

    @property
    def samples_of_part(self) -> int:
        """Samples in each of the equal parts."""
        return self.num_samples // len(self.num_tokens)


class Header(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The statement of every rank of the edge."""

    has_gradients: bool
    """True if autograd is on."""
    given: Given | None
    """None on a rank without the source's last stage."""

    def encode(self) -> bytes:
        """Msgpack; some hundred bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """Inverse of `encode`."""
        return decode_msgpack_as(data, cls)


def checked_counts(counts: Sequence[int] | Tensor, *, where: str) -> list[int]:
    """Return the number of tokens of each sample; ConfigError if they are not numbers.

    Args:
        counts: whole numbers >= 0, one per sample.
        where: module and rank, for messages.
    """
    listed = counts.tolist() if isinstance(counts, Tensor) else counts
    try:
        numbers = [operator.index(count) for count in listed]
    except TypeError:
        got = repr(counts)
        if isinstance(counts, Tensor):
            got = f"a tensor of {counts.dtype} with shape {tuple(counts.shape)}"
        raise ConfigError(f"{where}: counts must be integers, one per sample; got {got}.") from None
    negative = [i for i, count in enumerate(numbers) if count < 0]
    if negative:
        i = negative[0]
        raise ConfigError(f"{where}: sample {i} has {numbers[i]} tokens; counts must be >= 0.")
    return numbers


def describe_given(
    tokens: Tensor, counts: Sequence[int], *, num_parts: int, destination: str, where: str
) -> Given:
    """Return the samples that a rank gives; ConfigError if tokens and counts do not fit each other.

    Args:
        tokens: (sum(counts), *features).
        counts: tokens of each sample.
        num_parts: equal parts into which the samples are to be cut.
        destination: the module that takes them, for messages.
        where: module and rank, for messages.
    """
    name = str(tokens.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"{where}: tokens are of {tokens.dtype}; activations are of {', '.join(DTYPES)}."
        )
    if tokens.dim() < 1 or tokens.shape[0] != sum(counts):
        raise ConfigError(
            f"{where}: counts of {len(counts)} samples add up to {sum(counts)} tokens, but tokens "
            f"has shape {tuple(tokens.shape)}. Its first dim is the packed tokens of all samples."
        )
    if len(counts) % num_parts:
        raise ConfigError(
            f"{where}: {len(counts)} samples cannot be shared out equally over the {num_parts} "
            f"data ranks of {destination!r} that take them (remainder {len(counts) % num_parts}). "
            f"Give each data rank a multiple of {num_parts} samples; samples may have 0 tokens."
        )
    length = len(counts) // num_parts
    return Given(
        dtype=name,
        features=tuple(tokens.shape[1:]),
        num_samples=len(counts),
        num_tokens=tuple(sum(counts[i * length : (i + 1) * length]) for i in range(num_parts)),
        counts_digest=hashlib.blake2b(repr(list(counts)).encode(), digest_size=8).digest(),
        needs_gradient=tokens.requires_grad and torch.is_grad_enabled(),
    )


def check_headers(
    headers: Mapping[int, Header], plan: BridgePlan, *, edge: tuple[str, str]
) -> dict[int, Given]:
    """Return the samples of each rank with the source's last stage; ConfigError if they do not fit.

    Headers are the same on all ranks, and so is the error.

    Args:
        headers: of all ranks of the edge, by rank.
        plan: whose ranks they are.
        edge: source and destination module, for messages.
    """
    source, destination = edge
    given = {rank: each.given for rank, each in headers.items() if each.given is not None}
    where = f"Module {source!r} -> {destination!r}"
    _check_equal(given, lambda each: each.dtype, "tokens of different dtype", where)
    _check_equal(given, lambda each: each.features, "tokens with different features", where)
    for dp, by_cp in enumerate(plan.givers):
        replicas = {rank: given[rank] for by_tp in by_cp for rank in by_tp}
        of = f"{where}, data rank {dp} of {source!r}"
        _check_equal(replicas, lambda each: each.num_samples, "different numbers of samples", of)
        _check_equal(
            replicas,
            lambda each: (each.num_tokens, each.counts_digest.hex()),
            "different counts of tokens (of each part, digest of all)",
            of,
        )
        _check_equal(
            replicas, lambda each: each.needs_gradient, "a gradient needed on some of them only", of
        )
    without = [rank for rank, header in headers.items() if not header.has_gradients]
    needing = [rank for rank, each in given.items() if each.needs_gradient]
    if without and needing:
        raise ConfigError(
            f"{where}: ranks {shorten_ranks(needing)} need the gradient of their tokens, but ranks "
            f"{shorten_ranks(without)} run without autograd (torch.no_grad), so that no backward "
            f"would reach them. Call the bridge under no_grad on all ranks, or on none."
        )
    return given


def _check_equal(
    given: Mapping[int, Given], value_of: Callable[[Given], object], what: str, where: str
) -> None:
    """Raise a ConfigError that names the ranks of each value, unless all ranks have the same."""
    values = {rank: value_of(each) for rank, each in given.items()}
    if len({*values.values()}) > 1:
        raise ConfigError(f"{where}: {what}: {values_by_rank(values)}.")

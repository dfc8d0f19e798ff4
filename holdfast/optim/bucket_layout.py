"""Positions of parameters in flat buckets, and the elements each rank updates; torch-free.

A bucket is a row of elements, cut into equal shares, one for each rank of a group. Each parameter
is whole in one bucket, so that the parameter's own memory can be a view of it; its elements may
belong to several ranks. Between parameters and at the end there is padding, which is zero, belongs
to no parameter and is never stored. The end padding may be larger than a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpan:
    """The elements [start, start + numel) of a bucket, which are one parameter."""

    item: int
    """Position in the list of sizes that was packed."""
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element behind the parameter."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSpan:
    """The elements [start, stop) of one parameter that are in one share."""

    start: int
    stop: int
    offset: int
    """Of the first of them, in the share."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """One bucket: its parameters in order, and the size of a share; all in elements."""

    spans: tuple[ParameterSpan, ...]
    share: int
    num_shares: int

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.share * self.num_shares

    def owned(self, span: ParameterSpan, index: int) -> OwnedSpan | None:
        """Return the elements of a parameter that are in share `index`, or None.

        A parameter without elements has an empty span in every share, so that its state is kept.

        Two parameters of 5 and 4 elements, aligned to 2, in a bucket of 3 shares of 4:

            element of the bucket   0  1  2  3 | 4  5  6  7 | 8  9 10 11
            of parameter            a0 a1 a2 a3| a4 -  b0 b1| b2 b3 -  -
            owned(a, 0)             start=0 stop=4 offset=0
            owned(a, 1)             start=4 stop=5 offset=0
            owned(b, 1)             start=0 stop=2 offset=2
        """
        first = index * self.share
        if span.numel == 0:
            return OwnedSpan(start=0, stop=0, offset=0)
        lo, hi = max(span.start, first), min(span.stop, first + self.share)
        if lo >= hi:
            return None
        return OwnedSpan(start=lo - span.start, stop=hi - span.start, offset=lo - first)

    def padding(self, index: int) -> int:
        """Return the number of elements of share `index` that belong to no parameter."""
        owned = (self.owned(span, index) for span in self.spans)
        return self.share - sum(each.numel for each in owned if each is not None)


def lay_out(
    sizes: Sequence[int], *, num_shares: int, limit: int, align: int = 1
) -> tuple[BucketLayout, ...]:
    """Pack consecutive sizes into buckets of at most `limit` elements, or of one larger parameter.

    The same arguments give the same buckets on every rank.

    Args:
        sizes: number of elements of each parameter.
        num_shares: number of ranks, each of which owns one share.
        limit: the most elements of a bucket.
        align: every parameter and every share starts at a multiple of this many elements.

    Raises:
        ConfigError: A number is below 1.
    """
    if min(num_shares, limit, align) < 1:
        raise ConfigError(
            f"buckets need num_shares, limit and align of at least 1, got {num_shares}, {limit}, "
            f"{align}"
        )
    layouts: list[BucketLayout] = []
    spans: list[ParameterSpan] = []
    end = 0
    for item, numel in enumerate(sizes):
        start = round_up(end, align)
        if spans and start + numel > limit:
            layouts.append(_close(spans, end, num_shares=num_shares, align=align))
            spans, start = [], 0
        spans.append(ParameterSpan(item=item, start=start, numel=numel))
        end = start + numel
    if spans:
        layouts.append(_close(spans, end, num_shares=num_shares, align=align))
    return tuple(layouts)


def _close(
    spans: Sequence[ParameterSpan], end: int, *, num_shares: int, align: int
) -> BucketLayout:
    share = round_up(-(-end // num_shares), align)
    return BucketLayout(spans=tuple(spans), share=share, num_shares=num_shares)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below a value."""
    return -(-value // multiple) * multiple

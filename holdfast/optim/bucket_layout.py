"""How parameters lie in flat buckets, and which elements are whose. Pure arithmetic, torch-free.

A bucket is a row of elements, cut into equal shares, one for each rank of a group. Each parameter
lies whole in one bucket, so that the parameter's own memory can be a view of it; its elements may
belong to several ranks. Between parameters and at the end there is padding, which is zero, belongs
to no parameter and is never stored. The end padding may be larger than a share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one parameter lies: elements [start, start + numel) of its bucket."""

    item: int
    """Position in the list of sizes that was packed."""
    start: int
    numel: int

    @property
    def stop(self) -> int:
        """First element behind the parameter."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The elements of one parameter that lie in one share.

    `start`, `stop`: of the parameter. `offset`: of the first of them, in the share.
    """

    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One bucket: its slots in order, and the size of a share; all in elements."""

    slots: tuple[Slot, ...]
    share: int
    num_shares: int

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.share * self.num_shares

    def run(self, slot: Slot, index: int) -> Run | None:
        """The elements of a slot that lie in share `index`; None where there are none.

        A parameter without elements has an empty run in every share, so that its state is kept.
        """
        first = index * self.share
        if slot.numel == 0:
            return Run(start=0, stop=0, offset=0)
        lo, hi = max(slot.start, first), min(slot.stop, first + self.share)
        if lo >= hi:
            return None
        return Run(start=lo - slot.start, stop=hi - slot.start, offset=lo - first)


def pack(
    sizes: Sequence[int], *, num_shares: int, limit: int, align: int = 1
) -> tuple[Packing, ...]:
    """Consecutive sizes into buckets of at most `limit` elements, or of one larger parameter.

    Every parameter and every share begins at a multiple of `align` elements. Raises ConfigError
    for numbers below 1. The same arguments give the same buckets on every rank.
    """
    if min(num_shares, limit, align) < 1:
        raise ConfigError(
            f"buckets need num_shares, limit and align of at least 1, got {num_shares}, {limit}, "
            f"{align}"
        )
    packings: list[Packing] = []
    slots: list[Slot] = []
    end = 0
    for item, numel in enumerate(sizes):
        start = _round_up(end, align)
        if slots and start + numel > limit:
            packings.append(_close(slots, end, num_shares=num_shares, align=align))
            slots, start = [], 0
        slots.append(Slot(item=item, start=start, numel=numel))
        end = start + numel
    if slots:
        packings.append(_close(slots, end, num_shares=num_shares, align=align))
    return tuple(packings)


def _close(slots: Sequence[Slot], end: int, *, num_shares: int, align: int) -> Packing:
    share = _round_up(-(-end // num_shares), align)
    return Packing(slots=tuple(slots), share=share, num_shares=num_shares)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

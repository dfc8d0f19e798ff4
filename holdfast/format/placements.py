"""How the boxes of a tensor follow from coordinates on its layout, as the manifest has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class CutInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A dim that is cut over a group or axis of the layout, as `torch.chunk` cuts."""

    dim: int
    axis: str
    is_strided: bool = False
    """Whether each of the pieces that the later cuts of this dim give is cut, and not the whole:
    torch's `_StridedShard`."""


class PlacementInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the boxes that a rank holds of a tensor follow from its coordinates on the layout.

    Which ranks hold a tensor at all is not part of it: that is in the index, box by box.
    """

    kind: Literal["whole", "cut", "runs", "per_coordinate", "irregular"]
    """One box; what `cuts` leave; runs of elements of that; a tensor for each coordinate, named in
    its key; boxes that follow from no coordinates that are stored."""
    cuts: tuple[CutInfo, ...] = ()
    """In the order in which they are made."""
    over: str = ""
    """Of runs: ranks that differ along this group or axis hold other runs, of lengths that depend
    on what else is in the same buffer."""

    @classmethod
    def of(cls, cuts: Iterable[CutInfo]) -> PlacementInfo:
        """The placement of a tensor that is cut like this, or whole without cuts."""
        cuts = tuple(cuts)
        return cls(kind="cut", cuts=cuts) if cuts else WHOLE

    def runs_over(self, axis: str) -> PlacementInfo:
        """The placement of runs of what ranks hold by this one."""
        if self.kind == "irregular":
            return self
        return PlacementInfo(kind="runs", cuts=self.cuts, over=axis)


WHOLE = PlacementInfo(kind="whole")
PER_COORDINATE = PlacementInfo(kind="per_coordinate")
IRREGULAR = PlacementInfo(kind="irregular")

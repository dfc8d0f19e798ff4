"""Records of a checkpoint that one rank holds: what catalogs and conversions have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import IntArray
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import LayoutInfo

ONE_RANK = LayoutInfo(name="model", axes={}, order="", ranks=[0])
"""The layout of what was not saved by ranks."""


def index_of_one_rank(
    boxes: BoxTable,
    itemsizes: Sequence[int],
    *,
    file: Sequence[int],
    start: Sequence[int],
    copy: IntArray | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
) -> ChunkIndex:
    """Return the index of chunks that rank 0 holds.

    Args:
        boxes: Of the rows.
        itemsizes: Bytes of an element of each tensor, by the numbers in `boxes`.
        file: Of each row.
        start: Of each row.
        copy: Of each row; None if there are only primaries.
        blocks: The digests of each row; None for none.
    """
    zeros = np.zeros(len(boxes), dtype=np.int64)
    counts = zeros if blocks is None else np.array(list(map(len, blocks)), dtype=np.int64)
    words = [word for row in blocks or () for word in row]
    return ChunkIndex(
        tensor=boxes.tensor,
        offset=boxes.offset,
        extent=boxes.extent,
        file=np.array(file, dtype=np.int64),
        start=np.array(start, dtype=np.int64),
        nbytes=boxes.numel() * np.array(itemsizes, dtype=np.int64)[boxes.tensor],
        copy=zeros if copy is None else copy,
        holders=zeros,
        holder_ptr=np.array([0, 1], dtype=np.int64),
        holder=np.array([0], dtype=np.int64),
        digest_ptr=np.append(0, np.cumsum(counts)),
        digest=np.array(words, dtype=np.uint64),
    )

"""Records of a checkpoint that one rank holds: what catalogs and conversions have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.types import IntArray
from holdfast.foreign.catalog import Catalog
from holdfast.format.digest import digest128
from holdfast.format.index import ChunkIndex
from holdfast.format.manifest import (
    WHOLE,
    FileInfo,
    IndexInfo,
    LayoutInfo,
    Manifest,
    PlacementInfo,
    TensorInfo,
    Totals,
)

_ONE_RANK = LayoutInfo(name="model", axes={}, order="", ranks=[0])
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


def file_of_one_rank(name: str, nbytes: int, header: bytes) -> FileInfo:
    """Return the record of a data file that rank 0 has written; nothing but a header is added."""
    return FileInfo(
        name=name,
        nbytes=nbytes,
        header_nbytes=len(header),
        header_digest=digest128(header),
        writer=0,
        coordinate={},
    )


def manifest_of(
    catalog: Catalog,
    files: Sequence[FileInfo],
    index: ChunkIndex,
    data: bytes,
    *,
    step: int,
    created: str,
    block_nbytes: int,
    cut: Sequence[PlacementInfo] = (),
    holdfast: str = "",
    torch: str = "",
) -> Manifest:
    """Return the manifest of a catalog whose chunks rank 0 holds.

    Args:
        catalog: The checkpoint.
        files: Its data files, by the numbers in the index.
        index: Of its chunks.
        data: The index as bytes.
        step: Of training.
        created: Of the checkpoint, ISO 8601 UTC.
        block_nbytes: Bytes for each digest; 0 without digests.
        cut: The placement of tensors of several chunks; none if all are stored whole.
        holdfast: Version of the writer.
        torch: Likewise.
    """
    return Manifest(
        step=step,
        save_id=digest128(catalog.identity)[:12],
        created=created,
        holdfast=holdfast,
        torch=torch,
        layouts=[_ONE_RANK],
        signature=digest128(catalog.identity),
        block_nbytes=block_nbytes,
        placements=[WHOLE, *cut],
        tensors=[
            TensorInfo(
                key=tensor.key,
                dtype=tensor.dtype,
                shape=list(tensor.shape),
                placement=len(cut) if len(tensor.chunks) > 1 else 0,
            )
            for tensor in catalog.tensors.values()
        ],
        parts=dict(catalog.parts),
        files=[*files],
        index=IndexInfo(nbytes=len(data), digest=digest128(data), num_rows=index.num_rows),
        totals=Totals(
            num_tensors=len(catalog.tensors),
            nbytes=catalog.nbytes,
            stored_nbytes=int(index.nbytes.sum()),
        ),
        metadata=dict(catalog.metadata),
        versions=catalog.versions,
        kinds=catalog.kinds,
    )

"""What the ranks of a load request: the message of one rank, and the boxes of all as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.arrays.box_table import (
    BoxTable,
    concatenate,
    enumerate_ranges,
    pad_shapes,
    unique_boxes,
)
from holdfast.arrays.packed_ints import PackedBoxes, pack_boxes, squeeze, unpack_boxes, unsqueeze
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.load.per_rank import TakenLabels
from holdfast.errors import CorruptionError
from holdfast.format.manifest import Manifest
from holdfast.state.coordinates import ConsistencyCheck
from holdfast.state.match.result import TensorRequest


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank requests, sent to all ranks.

    Args:
        used: By stored part (or path of one's branch, see `FromPart`) a bit for each stored entry,
            1 where the rank requests it; None for a part of which it loads everything.
        boxes: See `encode_boxes`.
        host: The machine it runs on.
        taken: What it takes of values per coordinate.
        claims: What has to be equal on several ranks after the load.
    """

    used: dict[str, bytes | None]
    boxes: bytes
    host: str
    taken: list[TakenLabels] = []
    claims: list[ConsistencyCheck] = []


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRequests:
    """The boxes that all ranks request, each once.

    Args:
        boxes: (n) distinct boxes, none empty, of at least one dim.
        rank_ptr: (n + 1,) box i is requested by `rank[rank_ptr[i]:rank_ptr[i + 1]]`.
        rank: Positions of ranks, ascending for each box.
    """

    boxes: BoxTable
    rank_ptr: IntArray
    rank: IntArray


def gather_requests(tables: Sequence[BoxTable]) -> tuple[ReadRequests, list[IntArray]]:
    """The boxes of all ranks, each once; and for each rank the number of each of its boxes.

    Empty boxes have number -1 and are requested by no rank. Example, box numbers in brackets:

        rank    its boxes                   numbers
        0       a [0], b [1]                0, 1
        1       b [1], empty                1, -1
        2       b [1], a [0], a [0]         1, 0, 0

    So `rank_ptr` is 0, 2, 5 and `rank` is 0, 2, 0, 1, 2.
    """
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    rank, _ = enumerate_ranges(sizes)
    everything = concatenate(tables)
    is_filled: BoolArray = np.all(everything.extent > 0, axis=1)
    boxes, number = unique_boxes(everything.take(is_filled))
    numbers = np.full(len(everything), -1, dtype=np.int64)
    numbers[is_filled] = number
    # (box, rank) as one number, so that one sort removes repetitions and groups by box.
    num_ranks = max(len(tables), 1)
    pairs = np.unique(number * num_ranks + rank[is_filled])
    pointers = np.searchsorted(pairs // num_ranks, np.arange(len(boxes) + 1))
    requests = ReadRequests(boxes=boxes, rank_ptr=pointers, rank=pairs % num_ranks)
    return requests, np.split(numbers, np.cumsum(sizes)[:-1])


def requested_boxes(requests: Sequence[TensorRequest], manifest: Manifest) -> BoxTable:
    """The boxes of one rank's requests, one row for each of their local tensors, in order."""
    shapes = [info.shape for info in manifest.tensors]
    num_dims = max(1, max(map(len, shapes), default=1))
    counts = np.fromiter((len(each.locals) for each in requests), np.int64, len(requests))
    tensors = np.fromiter((each.tensor for each in requests), np.int64, len(requests))
    tensor = np.repeat(tensors, counts)
    offset = np.zeros((len(tensor), num_dims), dtype=np.int64)
    extent = pad_shapes(shapes, num_dims)[tensor]
    # Most requests are for whole tensors: only the others need a step of their own.
    first = (np.cumsum(counts) - counts).tolist()
    cut = [(row + i, box) for each, row in zip(requests, first, strict=True)
           for i, box in enumerate(each.boxes or ())]  # fmt: skip
    if cut:
        rows = [row for row, _ in cut]
        offset[rows] = pad_shapes([box.offset for _, box in cut], num_dims, fill=0)
        extent[rows] = pad_shapes([box.shape for _, box in cut], num_dims)
    return BoxTable(tensor=tensor, offset=offset, extent=extent)


def encode_boxes(boxes: BoxTable) -> bytes:
    """Boxes in few bytes: packed columns, compressed; some bytes a box."""
    return squeeze(msgspec.msgpack.encode(pack_boxes(boxes)))


def decode_boxes(data: bytes) -> BoxTable:
    """Inverse of `encode_boxes`; CorruptionError for anything else."""
    try:
        return unpack_boxes(msgspec.msgpack.decode(unsqueeze(data), type=PackedBoxes))
    except (ValueError, msgspec.DecodeError) as error:
        raise CorruptionError("the request of another rank arrived damaged") from error

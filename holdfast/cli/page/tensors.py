"""The tensors of a checkpoint as compact data for the script: each distinct placement once."""

from __future__ import annotations

from holdfast.arrays.distinct import distinct
from holdfast.cli.support.holders import SavedPlacement, parts_of, placement_in_words
from holdfast.cli.support.locality import num_copies
from holdfast.errors import clean

_MAX_BOXES = 96
"""Boxes of one placement that are drawn and listed."""
_MAX_BOXES_IN_ALL = 60_000
"""Boxes on the page; placements after these keep their first ones."""
_FEW = 8


def tensor_data(saved: SavedPlacement) -> dict[str, object]:
    """Return what the script shows of the tensors.

    `tensors` has `[key, part, placement, holders, copies, nbytes]` of each: positions in the other
    lists, and the most times that one of its chunks is stored. A placement is
    `[dtype, shape, boxes, number of boxes, writers]` with boxes `[offset, extent, writer]`.
    """
    parts = parts_of(saved.manifest)
    part_names = list(saved.manifest.parts)
    if any(info.key not in parts for info in saved.manifest.tensors):
        part_names.append("")
    part_at = {part: i for i, part in enumerate(part_names)}
    placements: dict[tuple[object, ...], int] = {}
    boxes: list[object] = []
    holders: dict[tuple[str, str], int] = {}
    copies = num_copies(saved)[1].tolist()
    rows, left = [], _MAX_BOXES_IN_ALL
    for number, info in enumerate(saved.manifest.tensors):
        at = slice(*saved.ptr[number : number + 2].tolist())
        ndim = len(info.shape)
        offset, extent = saved.boxes.offset[at, :ndim], saved.boxes.extent[at, :ndim]
        writer = saved.writer[at]
        key = (info.dtype, tuple(info.shape), offset.tobytes(), extent.tobytes(), writer.tobytes())
        if key not in placements:
            placements[key] = len(boxes)
            count = min(len(writer), _MAX_BOXES if left > 0 else _FEW)
            left -= count
            listed = [
                [offset[i].tolist(), extent[i].tolist(), int(writer[i])] for i in range(count)
            ]
            writers = distinct(writer).tolist()
            boxes.append([info.dtype, list(info.shape), listed, len(writer), writers])
        words, meaning = placement_in_words(saved.placement(number))
        basis = (clean(words), clean(meaning))
        rows.append(
            [
                clean(info.key), part_at[parts.get(info.key, "")], placements[key],
                holders.setdefault(basis, len(holders)), copies[number], info.nbytes,
            ]
        )  # fmt: skip
    return {
        "parts": [clean(part) for part in part_names],
        "placements": boxes,
        "holders": [list(each) for each in holders],
        "tensors": rows,
    }

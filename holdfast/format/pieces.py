"""Cutting a box into pieces that fit a buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdfast.arrays.boxes import Box
from holdfast.errors import PlanError


def split_box(box: Box, *, max_numel: int) -> Iterator[Box]:
    """Boxes of at most `max_numel` elements that tile `box`, in row-major order.

    Each piece is one run of the box's row-major elements, each begins where the one before ends.
    An empty box has no pieces.
    """
    if max_numel < 1:
        raise PlanError(f"a piece of at most {max_numel} elements cannot be")
    if box.numel == 0:
        return
    dim, inner = box.ndim, 1
    while dim and inner * box.shape[dim - 1] <= max_numel:
        dim -= 1
        inner *= box.shape[dim]
    if dim == 0:
        yield box
        return
    step = max_numel // inner
    first, count = box.offset[dim - 1], box.shape[dim - 1]
    tail_offset, tail_shape = box.offset[dim:], box.shape[dim:]
    outer = (
        range(o, o + s) for o, s in zip(box.offset[: dim - 1], box.shape[: dim - 1], strict=True)
    )
    ones = (1,) * (dim - 1)
    for head in itertools.product(*outer):
        for start in range(0, count, step):
            yield Box(
                (*head, first + start, *tail_offset),
                (*ones, min(step, count - start), *tail_shape),
            )

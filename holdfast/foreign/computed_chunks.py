"""The chunks of an expression: ranges of files where it has them, else boxes that are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.boxes import Box, split_box
from holdfast.foreign.catalog import Chunk, OpenFiles, fill_flat
from holdfast.foreign.tensor_expressions import Expression, ExpressionPart, bytes_of

_CHUNK_NBYTES = 4 << 20
"""Computed chunks are cut down to this size: a part of a tensor costs a part of the work."""
_CHUNK_NBYTES_MIN = 512 << 10
"""Down to this size they are cut until each dim has eight parts."""
_CUTS = 8
_PIECE_NBYTES = 4 << 20
"""Bytes that are computed at once."""


@dataclass(frozen=True, slots=True)
class ComputedBytes:
    """The payload of a box that is computed when it is read."""

    expression: Expression
    box: Box
    file: str
    order: int

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Compute the bytes; any range of them, in pieces of some MiB.

        Raises:
            StorageError: A file cannot be read.
            CorruptionError: It is not what the checkpoint states.
            PlacementError: A value does not fit the type it is cast to.
        """
        itemsize = self.expression.itemsize

        def read(box: Box, piece: memoryview) -> None:
            at = 0
            for part in split_box(box, max_numel=max(_PIECE_NBYTES // itemsize, 1)):
                offset = tuple(a + b for a, b in zip(part.offset, self.box.offset, strict=True))
                values = self.expression.read(Box(offset, part.shape), files)
                data = bytes_of(np.ascontiguousarray(values))
                piece[at : at + len(data)] = data
                at += len(data)

        fill_flat(out, start=start, shape=self.box.shape, itemsize=itemsize, read=read)


def chunks_of(expression: Expression) -> tuple[Chunk, ...]:
    """Return chunks that tile an expression.

    Cost: linear in the chunks of its sources; nothing is read.
    """
    return tuple(chunk for piece in expression.pieces() for chunk in _chunks(piece, expression))


def _chunks(piece: ExpressionPart, expression: Expression) -> Iterator[Chunk]:
    if piece.payload is not None:
        yield Chunk(piece.box, piece.payload)
        return
    largest = max(_CHUNK_NBYTES // expression.itemsize, 1)
    fine = max(_CHUNK_NBYTES_MIN // expression.itemsize, 1)
    for box in grid(piece.box, max_numel=largest, fine_numel=fine):
        yield Chunk(box, ComputedBytes(expression, box, piece.file, piece.order))


def grid(box: Box, *, max_numel: int, fine_numel: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `max_numel` elements, in equal numbers along its dims.

    A part of the tensor along any dim then overlaps about the same part of the boxes. Each time
    the dim with the fewest cuts is halved, of equals the first. Boxes of more than `fine_numel`
    elements are cut until there are eight along each dim.
    """
    if not box.numel:
        return
    cuts = [1] * box.ndim
    while True:
        numel = math.prod(-(-n // c) for n, c in zip(box.shape, cuts, strict=True))
        able = [dim for dim, size in enumerate(box.shape) if cuts[dim] < size]
        is_coarse = numel > fine_numel and any(cuts[dim] < _CUTS for dim in able)
        if not able or (numel <= max_numel and not is_coarse):
            break
        dim = min(able, key=lambda dim: (cuts[dim], dim))
        cuts[dim] = min(2 * cuts[dim], box.shape[dim])
    steps = [-(-n // c) for n, c in zip(box.shape, cuts, strict=True)]
    starts = [range(0, n, step) for n, step in zip(box.shape, steps, strict=True)]
    for at in itertools.product(*starts):
        yield Box(
            tuple(o + a for o, a in zip(box.offset, at, strict=True)),
            tuple(min(step, n - a) for step, n, a in zip(steps, box.shape, at, strict=True)),
        )

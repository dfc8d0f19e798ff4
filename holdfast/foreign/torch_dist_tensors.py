"""Tensors as Megatron's `torch_dist` stores them: flattened ranges, and copies under own names.

Before 0.14 the optimizer's tensors are stored as *flattened ranges*: of a tensor [X, Y] in a grid
of blocks [x, y] the file has [X / x, Y / y, x * y], cut along the last dim. Copies of one tensor on
several ranks of tensor parallelism may be stored as `<name>.__tp_replica_<r>`, one key each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.errors import CorruptionError
from holdfast.foreign.catalog import (
    CatalogTensor,
    Chunk,
    OpenFiles,
    TensorReader,
    part_of,
    pieces_of,
    read_flat,
)

_COPY = re.compile(r"(.+)\.__tp_replica_([0-9]{1,9})", re.ASCII)
_PIECE_NBYTES = 8 << 20
_MAX_NAMED = 3


# ---- flattened ranges ----


def unflattened(tensor: CatalogTensor, shape: Sequence[int]) -> CatalogTensor | None:
    """Return a tensor of flattened ranges in its own shape; None if the shape is not its own.

    Args:
        tensor: As it is stored: a grid of blocks, and the elements of each block.
        shape: What it was before.

    Cost: linear in the chunks; each becomes at most two boxes per dim.
    """
    *grid, numel = tensor.shape
    if len(grid) != len(shape):
        return None
    if any(not n or size % n for size, n in zip(shape, grid, strict=True)):
        return None
    block = tuple(size // n for size, n in zip(shape, grid, strict=True))
    if Box((0,) * len(block), block).numel != numel:
        return None
    chunks: list[Chunk] = []
    for chunk in tensor.chunks:
        if not tensor.whole.contains(chunk.box) or any(n != 1 for n in chunk.box.shape[:-1]):
            return None
        at = [i * n for i, n in zip(chunk.box.offset[:-1], block, strict=True)]
        first, done = chunk.box.offset[-1], 0
        for box in flat_range_boxes(block, first, first + chunk.box.shape[-1]):
            offset = tuple(a + o for a, o in zip(at, box.offset, strict=True))
            start, nbytes = done * tensor.itemsize, box.numel * tensor.itemsize
            payload = part_of(chunk.payload, start=start, nbytes=nbytes)
            chunks.append(Chunk(Box(offset, box.shape), payload))
            done += box.numel
    return replace(tensor, shape=tuple(shape), chunks=tuple(chunks))


# ---- copies ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Tensors by name, copies joined.

    Args:
        tensors: One per name; a box that several equal copies have is there several times.
        drift: Which copies differ, and where; empty if all are equal.
    """

    tensors: dict[str, CatalogTensor]
    drift: str


def join_copies(
    tensors: Mapping[str, CatalogTensor],
    files: OpenFiles,
    *,
    once: Callable[[str, Callable[[], str]], str],
) -> Joined:
    """Join the copies of each tensor, and compare them.

    Args:
        tensors: By name, each copy with the suffix of its own.
        files: To compare them.
        once: Returns the result of a comparison, given its name, from this or another rank.

    Raises:
        CorruptionError: Copies have other types or shapes, or a number is there twice.
        StorageError: A file cannot be read.

    Cost: reads every tensor that has copies as often as it has copies.
    """
    copies: dict[str, dict[int, CatalogTensor]] = {}
    for name, tensor in tensors.items():
        match = _COPY.fullmatch(name)
        base, number = (name, -1) if match is None else (match[1], int(match[2]))
        known = copies.setdefault(base, {})
        if number in known:
            raise CorruptionError(f"copy {number} of {base!r} is there twice")
        known[number] = tensor
    joined: dict[str, CatalogTensor] = {}
    drifts: list[str] = []
    for name, by_number in copies.items():
        ordered = [replace(by_number[r], key=name) for r in sorted(by_number)]
        drift = once(f"copies of {name}", partial(_compare, name, ordered, files))
        if drift:
            drifts.append(drift)
        # Ranks read any copy of those that are equal; of others all must read the same one.
        joined[name] = ordered[0] if drift else _join(ordered)
    more = f"; and of {len(drifts) - _MAX_NAMED} more" if len(drifts) > _MAX_NAMED else ""
    return Joined(tensors=joined, drift="; ".join(drifts[:_MAX_NAMED]) + more)


def _join(copies: Sequence[CatalogTensor]) -> CatalogTensor:
    """Return one tensor with the chunks of all copies that are cut like the first."""
    if len(copies) == 1:
        return copies[0]
    boxes = {chunk.box for chunk in copies[0].chunks}
    alike = [each for each in copies if {chunk.box for chunk in each.chunks} == boxes]
    return replace(copies[0], chunks=tuple(chunk for each in alike for chunk in each.chunks))


def _compare(name: str, copies: Sequence[CatalogTensor], files: OpenFiles) -> str:
    """Return where the first two copies differ; empty if all are equal."""
    first = copies[0]
    for other in copies[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise CorruptionError(
                f"{name!r}: one copy is {first.dtype} {list(first.shape)} in "
                f"{files.describe(_file_of(first))}, another is {other.dtype} "
                f"{list(other.shape)} in {files.describe(_file_of(other))}"
            )
        at = _first_difference(first, other, files)
        if at is not None:
            places = [files.describe(_file_of(each, at)) for each in (first, other)]
            return (
                f"the stored copies of {name!r} differ at {list(at)}: "
                f"one is in {places[0]}, one is in {places[1]}"
            )
    return ""


def _first_difference(
    first: CatalogTensor, other: CatalogTensor, files: OpenFiles
) -> tuple[int, ...] | None:
    """Return the place of the first element that differs; None if all are equal."""
    readers = [TensorReader(first, files), TensorReader(other, files)]
    for start, nbytes in pieces_of(first, max_nbytes=_PIECE_NBYTES):
        pieces = [bytearray(nbytes), bytearray(nbytes)]
        for reader, piece in zip(readers, pieces, strict=True):
            read_flat(reader, memoryview(piece), start=start)
        if pieces[0] != pieces[1]:
            at = next(i for i, (a, b) in enumerate(zip(*pieces, strict=True)) if a != b)
            element = (start + at) // first.itemsize
            return next(iter(flat_range_boxes(first.shape, element, element + 1))).offset
    return None


def _file_of(tensor: CatalogTensor, at: tuple[int, ...] | None = None) -> str:
    """Return the file that has an element of a tensor, or its first file; empty if none has."""
    point = None if at is None else Box(at, (1,) * len(at))
    for chunk in tensor.chunks:
        if point is None or chunk.box.contains(point):
            return chunk.payload.file
    return ""

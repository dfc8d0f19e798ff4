"""Tensors that are made of other tensors: sliced, joined, permuted, cast, evaluated box by box.

An expression knows its type and shape, and reads any box of itself by reading the boxes that it
needs of its sources. Nothing is computed before it is read. Elements are moved as raw bytes; only a
cast looks at what they mean.

`pieces` tells where parts of an expression lie in files as they are: a renamed, joined, stacked or
split tensor remains ranges of the files it came from. What has no such range is evaluated.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.arrays.boxes import Box, contiguous_start, flat_range_boxes, span_in
from holdfast.arrays.types import AnyArray
from holdfast.errors import MismatchError, PlacementError
from holdfast.foreign.catalog import (
    CatalogTensor,
    OpenFiles,
    Payload,
    TensorReader,
    part_of,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.elements import FLOATS, decode_elements, encode_floats

_RUN_NBYTES = 16 << 10
"""Runs shorter than this are evaluated together and not read one by one, if there are many."""
_MANY_RUNS = 16


@dataclass(frozen=True, slots=True)
class ExpressionPart:
    """A box of an expression; with the payload that has exactly its elements, or to be evaluated.

    `file` and `order` are of the payload that it was made from.
    """

    box: Box
    payload: Payload | None
    file: str
    order: int


class Expression(ABC):
    """A tensor that is made of others: element type, shape, and how to read a box of it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def raw(self) -> np.dtype[np.generic]:
        """The numpy type in which elements are moved: their bytes, whatever they mean."""
        return raw_dtype(self.itemsize)

    @abstractmethod
    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Return the elements of a box, in its shape, as raw elements.

        Raises:
            StorageError: A file cannot be read.
            CorruptionError: Some elements are in no chunk.
            PlacementError: A value does not fit the type it is cast to.

        Cost: some copies of the box, and at most about twice its bytes (or 64 KiB for each run)
        read from files.
        """

    @abstractmethod
    def pieces(self) -> list[ExpressionPart]:
        """Return boxes that tile the expression, with their payload where one has them as is."""


def raw_dtype(itemsize: int) -> np.dtype[np.generic]:
    """Return the numpy type of raw elements of that size."""
    return np.dtype(f"<u{itemsize}" if itemsize <= 8 else f"V{itemsize}")


def bytes_of(array: AnyArray) -> memoryview:
    """Return the bytes of a contiguous array, writable where it is."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


def dim_of(dim: int, ndim: int) -> int:
    """Return a dim counted from the front; MismatchError if the tensor does not have it."""
    if not -ndim <= dim < ndim:
        raise MismatchError(f"there is no dim {dim} of a tensor with {ndim} dims")
    return dim % ndim


class SourceTensor(Expression):
    """A tensor of a catalog."""

    def __init__(self, tensor: CatalogTensor) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self._chunks = tensor.primaries()

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Return the elements of a box from the chunks that have them."""
        out: AnyArray = np.empty(box.shape, dtype=self.raw)
        TensorReader(self.tensor, files, self._chunks).read_box(box, bytes_of(out))
        return out

    def pieces(self) -> list[ExpressionPart]:
        """Return the chunks."""
        return [
            ExpressionPart(c.box, c.payload, c.payload.file, c.payload.order) for c in self._chunks
        ]


class SliceDim(Expression):
    """The entries [start, start + size) along one dim."""

    def __init__(self, inner: Expression, *, dim: int, start: int, size: int) -> None:
        self.inner, self.dim, self.start = inner, dim, start
        self.dtype = inner.dtype
        self.shape = (*inner.shape[:dim], size, *inner.shape[dim + 1 :])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the box further on."""
        return self.inner.read(_shifted(box, self.dim, self.start), files)

    def pieces(self) -> list[ExpressionPart]:
        """Return what the inner pieces have of the entries."""
        before = self.inner.pieces()
        whole = _shifted(_whole(self.shape), self.dim, self.start)
        parts = [part for piece in before for part in _cut(piece, whole, self.itemsize)]
        moved = [replace(part, box=_shifted(part.box, self.dim, -self.start)) for part in parts]
        return _not_too_many(moved, before, self)


class Concat(Expression):
    """Several tensors, one after the other along one dim; other dims and types are equal."""

    def __init__(self, inners: Sequence[Expression], *, dim: int) -> None:
        self.inners, self.dim = tuple(inners), dim
        self.dtype = inners[0].dtype
        sizes = [inner.shape[dim] for inner in inners]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        shape = inners[0].shape
        self.shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read what the box has of each tensor."""
        out: AnyArray = np.empty(box.shape, dtype=self.raw)
        for inner, start in zip(self.inners, self._starts, strict=True):
            common = box.intersect(_shifted(_whole(inner.shape), self.dim, start))
            if common is not None:
                values = inner.read(_shifted(common, self.dim, -start), files)
                out[common.relative_to(box.offset)] = values
        return out

    def pieces(self) -> list[ExpressionPart]:
        """Return the pieces of all, moved to their place."""
        return [
            replace(piece, box=_shifted(piece.box, self.dim, start))
            for inner, start in zip(self.inners, self._starts, strict=True)
            for piece in inner.pieces()
        ]


class Zeros(Expression):
    """Nothing but zeros: as another tensor, but `size` entries along one dim."""

    def __init__(self, like: Expression, *, dim: int, size: int) -> None:
        self.dtype = like.dtype
        self.shape = (*like.shape[:dim], size, *like.shape[dim + 1 :])
        self._like = like

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Make the zeros; nothing is read."""
        return np.zeros(box.shape, dtype=self.raw)

    def pieces(self) -> list[ExpressionPart]:
        """Return one piece, in the file of the other tensor."""
        last = self._like.pieces()[-1]
        return [ExpressionPart(_whole(self.shape), None, last.file, last.order)]


class Permute(Expression):
    """The dims in another order: dim i of the result is dim `dims[i]` of the source."""

    def __init__(self, inner: Expression, *, dims: Sequence[int]) -> None:
        self.inner, self.dims = inner, tuple(dims)
        self.dtype = inner.dtype
        self.shape = tuple(inner.shape[dim] for dim in dims)

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the box with its dims in the source's order."""
        back = [self.dims.index(dim) for dim in range(box.ndim)]
        inner = Box(tuple(box.offset[i] for i in back), tuple(box.shape[i] for i in back))
        return self.inner.read(inner, files).transpose(self.dims)

    def pieces(self) -> list[ExpressionPart]:
        """Return the inner pieces; those of one row or column stay as they are."""
        return [self._permuted(piece) for piece in self.inner.pieces()]

    def _permuted(self, piece: ExpressionPart) -> ExpressionPart:
        box = piece.box
        moving = [dim for dim in self.dims if box.shape[dim] != 1]
        result = Box(
            tuple(box.offset[dim] for dim in self.dims), tuple(box.shape[dim] for dim in self.dims)
        )
        payload = piece.payload if moving == sorted(moving) else None
        return replace(piece, box=result, payload=payload)


class ExpandDim(Expression):
    """One more dim, of size 1, before dim `dim`."""

    def __init__(self, inner: Expression, *, dim: int) -> None:
        self.inner, self.dim = inner, dim
        self.dtype = inner.dtype
        self.shape = (*inner.shape[:dim], 1, *inner.shape[dim:])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the box without the dim."""
        return self.inner.read(_without(box, self.dim), files).reshape(box.shape)

    def pieces(self) -> list[ExpressionPart]:
        """Return the inner pieces with the dim."""
        return [
            replace(piece, box=_with(piece.box, self.dim, [0], [1]))
            for piece in self.inner.pieces()
        ]


class DropDim(Expression):
    """Without a dim of size 1."""

    def __init__(self, inner: Expression, *, dim: int) -> None:
        self.inner, self.dim = inner, dim
        self.dtype = inner.dtype
        self.shape = (*inner.shape[:dim], *inner.shape[dim + 1 :])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the box with the dim."""
        return self.inner.read(_with(box, self.dim, [0], [1]), files).reshape(box.shape)

    def pieces(self) -> list[ExpressionPart]:
        """Return the inner pieces without the dim."""
        return [
            replace(piece, box=_without(piece.box, self.dim))
            for piece in self.inner.pieces()
            if piece.box.shape[self.dim]
        ]


class SplitDim(Expression):
    """One dim as several, of the given sizes, row-major: heads by width of a head."""

    def __init__(self, inner: Expression, *, dim: int, sizes: Sequence[int]) -> None:
        self.inner, self.dim, self.sizes = inner, dim, tuple(sizes)
        self.dtype = inner.dtype
        self.shape = (*inner.shape[:dim], *sizes, *inner.shape[dim + 1 :])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the range of the one dim, or ranges of it where they are far apart."""
        if not box.numel:
            return np.empty(box.shape, dtype=self.raw)
        dims = slice(self.dim, self.dim + len(self.sizes))
        part = Box(box.offset[dims], box.shape[dims])
        first, span = span_in(part, _whole(self.sizes))
        inner = _with(_without(box, self.dim, len(self.sizes)), self.dim, [first], [span])
        if span == part.numel:
            return self.inner.read(inner, files).reshape(box.shape)
        if span <= 2 * part.numel:
            index = np.arange(math.prod(self.sizes)).reshape(self.sizes)
            chosen = index[part.relative_to((0,) * part.ndim)].reshape(-1) - first
            values = self.inner.read(inner, files).take(chosen, axis=self.dim)
            return values.reshape(box.shape)
        dim = next(dim for dim in range(dims.start, dims.stop) if box.shape[dim] > 1)
        parts = (_narrowed(box, dim, box.offset[dim] + i, 1) for i in range(box.shape[dim]))
        return np.concatenate([self.read(each, files) for each in parts], axis=dim)

    def pieces(self) -> list[ExpressionPart]:
        """Return each inner piece as the boxes that its range of the dim is."""
        before = self.inner.pieces()
        return _not_too_many(
            [part for piece in before for part in self._split(piece)], before, self
        )

    def _split(self, piece: ExpressionPart) -> Iterator[ExpressionPart]:
        start = piece.box.offset[self.dim]
        for part in flat_range_boxes(self.sizes, start, start + piece.box.shape[self.dim]):
            inner = _narrowed(piece.box, self.dim, start, part.numel)
            for each in _cut(piece, inner, self.itemsize):
                box = _with(_without(each.box, self.dim), self.dim, part.offset, part.shape)
                yield replace(each, box=box)
            start += part.numel


class MergeDims(Expression):
    """`count` consecutive dims from `dim` on as one, row-major; undoes `SplitDim`."""

    def __init__(self, inner: Expression, *, dim: int, count: int) -> None:
        self.inner, self.dim, self.count = inner, dim, count
        self.dtype = inner.dtype
        self.sizes = inner.shape[dim : dim + count]
        self.shape = (*inner.shape[:dim], math.prod(self.sizes), *inner.shape[dim + count :])

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the boxes that the range of the dim is."""
        out: AnyArray = np.empty(box.shape, dtype=self.raw)
        start = box.offset[self.dim]
        at = 0
        for part in flat_range_boxes(self.sizes, start, start + box.shape[self.dim]):
            inner = _with(_without(box, self.dim), self.dim, part.offset, part.shape)
            target = out[(*(slice(None),) * self.dim, slice(at, at + part.numel))]
            target[...] = self.inner.read(inner, files).reshape(target.shape)
            at += part.numel
        return out

    def pieces(self) -> list[ExpressionPart]:
        """Return each inner piece as the ranges of the one dim that it is."""
        before = self.inner.pieces()
        return _not_too_many(
            [part for piece in before for part in self._merged(piece)], before, self
        )

    def _merged(self, piece: ExpressionPart) -> Iterator[ExpressionPart]:
        dims = slice(self.dim, self.dim + self.count)
        part = Box(piece.box.offset[dims], piece.box.shape[dims])
        if not part.numel:
            return
        start = contiguous_start(part, _whole(self.sizes))
        if start is not None:
            box = _with(_without(piece.box, self.dim, self.count), self.dim, [start], [part.numel])
            yield replace(piece, box=box)
            return
        dim = next(dim for dim in range(dims.start, dims.stop) if piece.box.shape[dim] > 1)
        for i in range(piece.box.shape[dim]):
            inner = _narrowed(piece.box, dim, piece.box.offset[dim] + i, 1)
            for each in _cut(piece, inner, self.itemsize):
                yield from self._merged(each)


class Cast(Expression):
    """The values in another float type; see `encode_floats`."""

    def __init__(self, inner: Expression, *, dtype: str, saturate: bool, name: str) -> None:
        for each in (inner.dtype, dtype):
            if each not in FLOATS:
                raise PlacementError(
                    f"tensor {name!r}: a cast from {inner.dtype} to {dtype} is none between the "
                    f"float types {' '.join(FLOATS)}"
                )
        self.inner, self.dtype, self.shape = inner, dtype, inner.shape
        self._saturate, self._name = saturate, name

    def read(self, box: Box, files: OpenFiles) -> AnyArray:
        """Read the box and cast it; PlacementError, with the tensor's name, if a value is lost."""
        values = np.ascontiguousarray(self.inner.read(box, files))
        numbers = decode_elements(bytes_of(values), self.inner.dtype)
        try:
            data = encode_floats(numbers, self.dtype, saturate=self._saturate)
        except PlacementError as error:
            raise PlacementError(f"tensor {self._name!r}, {box}: {error}") from None
        return np.frombuffer(data, dtype=self.raw).reshape(box.shape)

    def pieces(self) -> list[ExpressionPart]:
        """Return the inner pieces, to be evaluated."""
        return [replace(piece, payload=None) for piece in self.inner.pieces()]


def _whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _shifted(box: Box, dim: int, by: int) -> Box:
    return Box((*box.offset[:dim], box.offset[dim] + by, *box.offset[dim + 1 :]), box.shape)


def _narrowed(box: Box, dim: int, start: int, size: int) -> Box:
    """Return the box with another range along one dim."""
    return _with(_without(box, dim), dim, [start], [size])


def _without(box: Box, dim: int, count: int = 1) -> Box:
    """Return the box without `count` dims from `dim` on."""
    return Box(
        (*box.offset[:dim], *box.offset[dim + count :]),
        (*box.shape[:dim], *box.shape[dim + count :]),
    )


def _with(box: Box, dim: int, offset: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box with more dims before `dim`."""
    return Box(
        (*box.offset[:dim], *offset, *box.offset[dim:]),
        (*box.shape[:dim], *shape, *box.shape[dim:]),
    )


def _cut(piece: ExpressionPart, box: Box, itemsize: int) -> list[ExpressionPart]:
    """Return what a piece has of a box: its runs where they are long or few, else to evaluate."""
    common = piece.box.intersect(box)
    if common is None:
        return []
    if piece.payload is None:
        return [replace(piece, box=common)]
    start = contiguous_start(common, piece.box)
    if start is not None:
        payload = part_of(piece.payload, start=start * itemsize, nbytes=common.numel * itemsize)
        return [replace(piece, box=common, payload=payload)]
    num_runs, depth = 1, 0
    while contiguous_start(_first_of(common, depth), piece.box) is None:
        num_runs *= common.shape[depth]
        depth += 1
    if num_runs > _MANY_RUNS and common.numel // num_runs * itemsize < _RUN_NBYTES:
        return [replace(piece, box=common, payload=None)]
    dim = next(dim for dim, size in enumerate(common.shape) if size > 1)
    parts = (_narrowed(common, dim, common.offset[dim] + i, 1) for i in range(common.shape[dim]))
    return [each for part in parts for each in _cut(piece, part, itemsize)]


def _first_of(box: Box, depth: int) -> Box:
    """Return the first entry of the first `depth` dims."""
    return Box(box.offset, (*(1,) * depth, *box.shape[depth:]))


def _not_too_many(
    after: list[ExpressionPart], before: Sequence[ExpressionPart], expression: Expression
) -> list[ExpressionPart]:
    """Return one piece, to be evaluated, in place of very many small ones that a step has made."""
    if len(after) <= max(_MANY_RUNS, len(before)):
        return after
    nbytes = math.prod(expression.shape) * expression.itemsize
    if nbytes // len(after) >= _RUN_NBYTES:
        return after
    return [ExpressionPart(_whole(expression.shape), None, after[0].file, after[0].order)]

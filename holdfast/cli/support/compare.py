"""Comparing two checkpoints: trees of values, and tensors piece by piece across layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.boxes import split_box
from holdfast.arrays.types import AnyArray, FloatArray
from holdfast.cli.support.elements import read_box
from holdfast.errors import HoldfastError
from holdfast.format.dtypes import DTYPES
from holdfast.format.elements import decode_elements
from holdfast.format.reader import Snapshot
from holdfast.format.values import (
    MAPPINGS,
    SCALARS,
    SETS,
    Node,
    attributes_of,
    decode_tree,
    is_container,
    is_tensor,
    join_path,
    members,
    node_bytes,
    shorten,
    tag_of,
    wrapped,
)

_PIECE_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """One value that differs, or that one side lacks: `in_a` and `in_b` say which have it."""

    path: str
    a: Node
    b: Node
    in_a: bool = True
    in_b: bool = True


@dataclass(slots=True, kw_only=True)
class TensorDifference:
    """How one tensor differs; the numbers are of `b - a`, in float64.

    `num_differing`: elements beyond the tolerance. `max_abs` and `norm` (L2) are over all elements
    whose difference is finite; `num_undefined` counts those where it is not (nan, infinity).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    num_differing: int = 0
    num_undefined: int = 0
    max_abs: float = 0.0
    norm: float = 0.0


def value_differences(a: Mapping[str, Node], b: Mapping[str, Node]) -> Iterator[ValueDifference]:
    """Every value that differs between two trees of parts, by path."""
    yield from _members(dict(a), dict(b), "")


def in_words(node: Node) -> str:
    """A value on one short line."""
    if is_tensor(node):
        return f"tensor {node['k']}"
    if tag_of(node) in SCALARS:
        try:
            return shorten(repr(decode_tree(node)))
        except HoldfastError:
            pass
    if isinstance(node, str):
        return shorten(repr(node))
    return shorten(node_bytes(node).decode())


def _members(a: Mapping[str, Node], b: Mapping[str, Node], path: str) -> Iterator[ValueDifference]:
    """The differences of two mappings, by the path of their members."""
    for name in {**a, **b}:
        below = join_path(path, name)
        if name in a and name in b:
            yield from _differences(a[name], b[name], below)
        else:
            yield ValueDifference(
                path=below, a=a.get(name), b=b.get(name), in_a=name in a, in_b=name in b
            )


def _differences(a: Node, b: Node, path: str) -> Iterator[ValueDifference]:
    """The differences of two nodes at one path."""
    if node_bytes(a) == node_bytes(b):
        return
    if isinstance(a, list | dict) and type(a) is type(b) and tag_of(a) == tag_of(b):
        # Other attributes, as of another codec, are another value; of a mapping they are members.
        is_one_kind = tag_of(a) in MAPPINGS or _attributes(a) == _attributes(b)
        if is_one_kind and wrapped(a) is not a:
            yield from _differences(wrapped(a), wrapped(b), path)
            return
        if is_one_kind and is_container(a) and tag_of(a) not in SETS:
            yield from _members(_table(a), _table(b), path)
            return
    yield ValueDifference(path=path, a=a, b=b)


def _attributes(node: Node) -> dict[str, Node]:
    """Return what a node with a tag states besides its members."""
    return attributes_of(node) if isinstance(node, dict) and tag_of(node) is not None else {}


def _table(node: Node) -> dict[str, Node]:
    """The members of a container by name, and what else is stated of a mapping."""
    if tag_of(node) in MAPPINGS:
        return _attributes(node) | {in_words(key): child for key, child in members(node)}
    return {str(name): child for name, child in members(node)}


def compare_tensors(
    a: Snapshot,
    b: Snapshot,
    key: str,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    advance: Callable[[int], object],
) -> TensorDifference | None:
    """Return how a tensor differs, of equal dtype and shape in any layouts; None if it does not.

    Args:
        a: one checkpoint.
        b: the other one.
        key: the tensor, which both have.
        rtol: elements count as equal when |a - b| <= atol + rtol * |b|.
        atol: the same; where both are 0, equal bytes are equal.
        advance: called with the bytes of `a` read since the last call.

    Raises:
        CorruptionError: one of the two is damaged.

    Cost: reads both sides once, in pieces of the chunks of `a`; some tens of MiB of memory.
    """
    info = a.tensor(key)
    max_numel = _PIECE_NBYTES // DTYPES[info.dtype].itemsize
    result = TensorDifference(key=key, dtype=info.dtype, shape=tuple(info.shape))
    squares = 0.0
    rows = a.rows_of(key)
    for row in rows[a.index.copy[rows] == 0].tolist():
        for box in split_box(a.index.box(row, ndim=len(info.shape)), max_numel=max_numel):
            data = [read_box(side, key, box) for side in (a, b)]
            advance(len(data[0]))
            if data[0] == data[1]:
                continue
            raw = [np.frombuffer(side, dtype=np.uint8).reshape(box.numel, -1) for side in data]
            unequal = (raw[0] != raw[1]).any(axis=1)
            one, two = (decode_elements(side, info.dtype)[unequal] for side in data)
            with np.errstate(invalid="ignore", over="ignore"):
                distance = _distance(one, two)
                finite = distance[np.isfinite(distance)]
                result.num_undefined += len(distance) - len(finite)
                result.max_abs = max(result.max_abs, float(finite.max(initial=0.0)))
                squares += float((finite**2).sum())
                result.num_differing += len(one)
                if rtol or atol:
                    result.num_differing -= _num_close(one, two, distance, rtol, atol)
    result.norm = math.sqrt(squares)
    return result if result.num_differing else None


def _num_close(a: AnyArray, b: AnyArray, distance: FloatArray, rtol: float, atol: float) -> int:
    """Return how many elements are within the tolerance."""
    size = np.abs(b.astype(np.complex128 if b.dtype.kind == "c" else np.float64))
    # Without the zero, rtol * inf would make every finite value close to an infinity.
    bound = atol + rtol * np.where(np.isfinite(size), size, 0)
    return int(((distance <= bound) | (np.isnan(size) & np.isnan(np.abs(a)))).sum())


def _distance(a: AnyArray, b: AnyArray) -> FloatArray:
    """|b - a| of each element; exact for integers before it is rounded to float64."""
    if a.dtype.kind in "iu":
        # max - min always fits the unsigned type of the same width, even where b - a overflows.
        wide = np.dtype(np.uint64 if a.dtype.kind == "u" else np.int64)
        high, low = (m.astype(wide).view(np.uint64) for m in (np.maximum(a, b), np.minimum(a, b)))
        return (high - low).astype(np.float64)
    if a.dtype.kind == "c":
        magnitude: FloatArray = np.abs(b.astype(np.complex128) - a.astype(np.complex128))
        return magnitude
    return np.abs(b.astype(np.float64) - a.astype(np.float64))

"""Where the elements of local tensors lie in memory, as columns: each tensor is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from holdfast._torch import form_check
from holdfast.arrays.types import BoolArray, IntArray

_NUM_CACHED = 256
"""Of so many tensors the objects stay in the cache of a core."""
_IS_PLAIN: tuple[Callable[[Any], Any], ...] = (
    attrgetter("is_cpu"),
    torch.Tensor.is_contiguous,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)
_ALL: tuple[Callable[[Any], Any], ...] = (
    torch.Tensor.data_ptr,
    attrgetter("nbytes"),
    attrgetter("dtype"),
    *_IS_PLAIN,
)


class TensorMemory:
    """The memory of some local tensors, as columns in their order.

    Args:
        tensors: (n) the local tensors.
        address: (n,) what is known already of these, see the properties.
        is_plain: (n,) the same.
        forms: an object that stays the same as long as each tensor has its dtype, shape, strides
            and device; None if nothing is known.

    Cost: of each property, some tenths of a microsecond a tensor, once.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        address: IntArray | None = None,
        is_plain: BoolArray | None = None,
        forms: object = None,
    ) -> None:
        self.tensors = tensors
        self.forms = forms
        # Into the places of the cached properties.
        if address is not None:
            self.address = address
        if is_plain is not None:
            self.is_plain = is_plain

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.tensors)

    def look(self) -> None:
        """Work all properties out at once: each tensor is fetched from memory once, not four times.

        Where one of the tensors has no address nothing is done.
        """
        columns: tuple[list[Any], ...] = tuple([] for _ in _ALL)
        try:
            _ask(self.tensors, _ALL, columns)
        except RuntimeError:  # of a sparse tensor: who asks for that property meets the error
            return
        address, nbytes, self.dtypes, *is_plain = columns
        self.address = np.array(address, dtype=np.int64)
        self.nbytes = np.array(nbytes, dtype=np.int64)
        self.is_plain = _all_plain(is_plain)

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The element type of each."""
        return list(map(attrgetter("dtype"), self.tensors))

    @cached_property
    def address(self) -> IntArray:
        """(n,) of the first element."""
        return np.fromiter(map(torch.Tensor.data_ptr, self.tensors), np.int64, len(self.tensors))

    @cached_property
    def nbytes(self) -> IntArray:
        """(n,) of the elements."""
        return np.fromiter(map(attrgetter("nbytes"), self.tensors), np.int64, len(self.tensors))

    @cached_property
    def is_plain(self) -> BoolArray:
        """(n,) whether it is contiguous host memory whose bytes are those to store.

        A conjugated or negated view has other elements than bytes.
        """
        return plain_ones(self.tensors)

    @cached_property
    def is_all_plain(self) -> bool:
        """Whether all of them are plain."""
        return bool(self.is_plain.all())

    def is_whole(self) -> bool:
        """Return True if all are plain and lie within their storages; False may mean either.

        Cost: 0.2 µs a tensor in addition to the properties.
        """
        if not self.is_all_plain:
            return False
        offset: list[int | torch.SymInt] = []
        room: list[int] = []
        for where in runs(len(self.tensors)):
            some = self.tensors[where]
            offset += map(torch.Tensor.storage_offset, some)
            room += map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, some))
        # A tensor is not asked for what its dtype tells.
        sizes = {dtype: dtype.itemsize for dtype in set(self.dtypes)}
        itemsize = np.array(list(map(sizes.__getitem__, self.dtypes)), dtype=np.int64)
        ends = np.array(offset, dtype=np.int64) * itemsize + self.nbytes
        is_inside = (ends <= np.array(room, dtype=np.int64)) & (self.address != 0)
        return bool((is_inside | (self.nbytes == 0)).all())


def plain_ones(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Return which tensors are plain, see `TensorMemory.is_plain`."""
    columns: tuple[list[Any], ...] = ([], [], [], [])
    _ask(tensors, _IS_PLAIN, columns)
    return _all_plain(columns)


def runs(num: int) -> list[slice]:
    """Return the positions of `num` tensors, a few at a time, which stay in the cache together."""
    return [slice(first, first + _NUM_CACHED) for first in range(0, num, _NUM_CACHED)]


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor's first element; 0 if it has none, or none is known."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except (RuntimeError, ValueError):
        return list(map(_address, tensors))


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, ValueError):  # sparse and lazy tensors
        return 0


def _ask(
    tensors: Sequence[torch.Tensor],
    questions: Sequence[Callable[[Any], Any]],
    columns: Sequence[list[Any]],
) -> None:
    """Append the answers of all tensors to each question, in its column."""
    for where in runs(len(tensors)):
        some = tensors[where]
        for column, question in zip(columns, questions, strict=True):
            column += map(question, some)


def _all_plain(columns: Sequence[list[bool]]) -> BoolArray:
    """Return which tensors are plain, by the answers to `_IS_PLAIN`."""
    is_cpu, is_contiguous, is_conj, is_neg = (np.array(each, dtype=np.bool_) for each in columns)
    is_plain: BoolArray = is_cpu & is_contiguous & ~(is_conj | is_neg)
    return is_plain


class Forms:
    """The forms of tensors of plain type: dtype, device, shape, strides, kind of memory.

    Args:
        tensors: In order.

    Attributes:
        is_plain: (n,) whether each is plain, see `TensorMemory.is_plain`.

    Cost: a microsecond a tensor; to look at others after that, a third of it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._are_alike = [form_check(tensors[where]) for where in runs(len(tensors))]
        self.is_plain = plain_ones(tensors)

    def are_of(self, tensors: Sequence[torch.Tensor], where: slice) -> bool:
        """Return True if other tensors have the forms of one of `runs`; False may mean either."""
        are_alike = self._are_alike[where.start // _NUM_CACHED]
        return are_alike is not None and are_alike(tensors)

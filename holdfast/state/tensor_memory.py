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


def plain_ones(tensors: Sequence[torch.Tensor]) -> BoolArray:
    """Return which tensors are plain, see `TensorMemory.is_plain`."""
    columns: tuple[list[Any], ...] = ([], [], [], [])
    # A few at a time, so that a tensor is in the cache for all questions.
    for first in range(0, len(tensors), _NUM_CACHED):
        some = tensors[first : first + _NUM_CACHED]
        for column, question in zip(columns, _IS_PLAIN, strict=True):
            column += map(question, some)
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
        self._are_alike = form_check(tensors)
        self.is_plain = plain_ones(tensors)

    def are_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return True if other tensors have these forms, one by one; False may mean either."""
        return self._are_alike is not None and self._are_alike(tensors)

"""Marks in a reduction that tell ranks which parameters none of them has used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, compress
from operator import not_
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

_TINY = 1e-30
"""A collective that divides makes -0.0 of negative numbers far smaller than this one."""


class UseMarks:
    """Tells ranks, in a reduction that they make anyway, which parameters none of them has used.

    FSDP2 reduces zeros for a parameter that a rank has not used. If no rank has, the sum is zeros,
    too, with which momentum and decay move a value that one process leaves alone; and a sum of
    zeros may as well be a gradient. So the first element of each parameter's part is -0.0 in what a
    rank gives that has not used it, and never -0.0 in what another one gives: a sum is -0.0 only
    where each of its terms is. Each rank reads its own part. That of a rank without rows is
    padding, which has a first element, too.

    Cost: one operation on an element a parameter, in each reduction.
    """

    def __init__(self) -> None:
        self.answer: Tensor | None = None
        """First elements of what was not used here; None if no collective was made."""
        self._pattern: tuple[object, ...] = ()
        self._used = self._unused = torch.empty(0, dtype=torch.int64, device="cpu")
        """First elements in a rank's part of what is given."""
        self._zeros = torch.empty(0, device="cpu")
        self._is_written = False

    def start(self, sizes: Sequence[int], used: Sequence[bool], *, device: torch.device) -> None:
        """Prepare the marks of a reduction: elements of each parameter in a rank's part."""
        self.answer, self._is_written = None, False
        pattern = (*sizes, *used)
        if pattern != self._pattern:
            self._pattern = pattern
            firsts = [*accumulate(sizes, initial=0)][:-1]
            unused = [*map(not_, used)]
            self._used, self._unused = (
                torch.tensor([*compress(firsts, each)], dtype=torch.int64, device=device)
                for each in (used, unused)
            )

    def write(self, given: Tensor, *, num_parts: int, op: Any) -> None:
        """Write the marks into what this rank gives to the first collective of a reduction."""
        if self._is_written:
            return
        self._is_written = True
        parts = _real(given).view(num_parts, -1)
        if self._unused.numel():
            parts.index_fill_(1, self._unused, -0.0)
        if not self._used.numel():
            return
        if op == dist.ReduceOp.SUM:
            zeros = self._zeros
            shape = (num_parts, self._used.numel())
            if zeros.shape != shape or zeros.dtype != parts.dtype or zeros.device != parts.device:
                self._zeros = zeros = parts.new_zeros(shape)
            parts.index_add_(1, self._used, zeros)
        else:
            firsts = parts.index_select(1, self._used)
            parts.index_copy_(1, self._used, firsts.masked_fill(firsts.abs() < _TINY, 0.0))

    def read(self, reduced: Tensor) -> None:
        """Keep the marks in this rank's part of a sum, before anything divides it."""
        if self._unused.numel():
            self.answer = _real(reduced).index_select(0, self._unused)

    def read_after(self, work: dist.Work | None, reduced: Tensor) -> dist.Work | None:
        """Return work of which a wait reads the marks, if there is anything to read."""
        if work is None or not self._unused.numel():
            return work
        return _ReadWork(work, lambda: self.read(reduced))


class _ReadWork(dist.Work):
    """A collective whose result is read after a wait for it."""

    def __init__(self, work: dist.Work, read: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._read = read

    def wait(self, *timeout: Any) -> bool:
        is_done = self._work.wait(*timeout)
        self._read()
        return is_done


def are_unused(answer: Tensor) -> list[bool]:
    """Return for each mark if it is -0.0. Waits for the device."""
    flags: list[bool] = (torch.signbit(answer) & (answer == 0)).tolist()
    return flags


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor)[..., 0] if tensor.is_complex() else tensor

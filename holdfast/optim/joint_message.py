"""Some numbers and a tensor of each rank, in one message to every other one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.optim.bucket_layout import round_up
from holdfast.parallel import ProcessGroups

_ALIGN = 64
"""Bytes: what is packed together starts at a multiple of a cache line."""


class JointMessage:
    """All-gathers some numbers and a flat tensor of each rank, in one message.

    Args:
        groups: that have the ranks.
        ranks: between which; this one is among them.
        num_numbers: in float64.
        numel: of the tensor, which is on the host.
        dtype: of the tensor.

    Cost: memory for all ranks' messages.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        ranks: Sequence[int],
        num_numbers: int,
        numel: int,
        *,
        dtype: torch.dtype,
    ) -> None:
        self._direct = groups.direct()
        start = round_up(num_numbers * 8, _ALIGN)
        row = start + round_up(numel * dtype.itemsize, _ALIGN)
        rows = torch.zeros(len(ranks), row, dtype=torch.uint8, device="cpu")
        first = start // dtype.itemsize
        self.tensors = rows.view(dtype)[:, first : first + numel]
        """Those of each rank, in order."""
        self._numbers = rows.view(torch.float64)[:, :num_numbers]
        memory = {rank: rows[i].numpy().data for i, rank in enumerate(ranks)}
        index = ranks.index(groups.rank)
        self._mine = self._numbers[index], self.tensors[index], memory.pop(groups.rank)
        self._others = list(memory.items())

    def exchange(self, numbers: Sequence[float], tensor: Tensor, *, what: str) -> None:
        """Send this rank's to all others, whose replace what came before; wait.

        Raises:
            DeadlineError: It names `what`.
        """
        own_numbers, own_tensor, memory = self._mine
        own_numbers.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu"))
        own_tensor.copy_(tensor)
        self._direct.exchange(memory, self._others, what=what)

    def sum_numbers(self) -> list[float]:
        """Return the sum of each number over the ranks, to the same bits on all of them."""
        return [sum(each) for each in zip(*self._numbers.tolist(), strict=True)]

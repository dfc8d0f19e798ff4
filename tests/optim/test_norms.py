"""The norm is read from a device once, whatever the number of parameters; in chunks it is exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import ProcessGroups
from holdfast.optim import gradient_norm, norms

_MAKES_MEMORY = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.empty.memory_format,
)


class Reads(TorchDispatchMode):
    """Counts values that the host reads from a tensor, new tensors, and notes the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self.num_wide = 0
        """New tensors of several float64, without the one in which the sums of chunks are."""
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        result = func(*args, **(kwargs or {}))
        if func in _MAKES_MEMORY:
            self.largest = max(self.largest, result.numel())
            self.num_wide += result.dtype is torch.float64 and result.numel() > 1
        return result


def parameters_of(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for each in found:
        each.grad = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(dtype)
    return found


def test_a_norm_is_one_read_and_needs_a_chunk_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_CHUNK", 16)
    groups = ProcessGroups.single()
    for sizes in ([3], [5] * 7, [16, 1, 15, 2, 40, 0, 3, 33], [100], [17, 16, 15]):
        parameters = parameters_of(sizes)
        parameters[0].grad.reshape(-1)[:2] = 0  # type: ignore[union-attr]
        flat = torch.cat([p.grad.double() for p in parameters])  # type: ignore[union-attr]
        for count in (False, True):
            with Reads() as reads:
                found = gradient_norm(parameters, groups=groups, count_zeros=count)
            assert reads.num == 0, sizes  # one list of all sums is read instead
            assert reads.largest <= 16, sizes
            assert reads.num_wide == 1, sizes  # memory that is new is slow to touch
            assert found.value == pytest.approx(math.sqrt(float(flat.dot(flat))), rel=1e-15)
            assert found.num_zeros == (2 if count else None)
        for bad in (math.nan, math.inf, -math.inf):
            parameters[-1].grad.reshape(-1)[-1] = bad  # type: ignore[union-attr]
            found = gradient_norm(parameters, groups=groups)
            assert math.isnan(found.value)
            assert found.bad_ranks == (0,)


def test_dtypes_are_widened_before_they_are_squared() -> None:
    """In half precision squares of these overflow, and in float32 their sum loses digits."""
    mixed = [
        *parameters_of([4], torch.float16),
        *parameters_of([4], torch.bfloat16),
        *parameters_of([4], torch.float64),
    ]
    mixed[0].grad.fill_(60000)  # type: ignore[union-attr]
    mixed[2].grad.fill_(1 + 2**-40)  # type: ignore[union-attr]
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in mixed))  # type: ignore[union-attr]
    found = gradient_norm(mixed, groups=ProcessGroups.single())
    assert found.value == pytest.approx(expected, rel=1e-15)

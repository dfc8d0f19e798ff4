"""The private names of torch that the trainer needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

__all__ = ["HashStore", "is_view", "parameter_table"]


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """Return the module's own table of parameters, in which views may stand in their places."""
    return module._parameters


def is_view(tensor: Tensor) -> bool:
    """Return True if the tensor is a view of another one, as autograd sees it."""
    return tensor._is_view()

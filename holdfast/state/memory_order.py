"""The memory order of an optimizer's tensors.

What eigenvectors, factors and other results of linear algebra return is often column-major, and a
product of matrices of another order rounds otherwise: a run that continues would drift from the
one that was saved. So the order of what an optimizer holds is stored and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.format.values import key_name
from holdfast.state.traits import PLAIN


def unusual_orders(entries: object, parameter: torch.Tensor) -> dict[str, list[int]]:
    """Return the memory order of each tensor whose order does not follow from its shape.

    Args:
        entries: State of one parameter.
        parameter: Whose order tensors of its shape have; others are contiguous.

    Returns:
        Path inside of the entries -> dims, outermost first. Tensors with gaps, sparse ones and
        DTensors are left out.
    """
    if _are_contiguous(entries, parameter):
        return {}
    orders: dict[str, list[int]] = {}

    def visit(path: str, tensor: torch.Tensor) -> torch.Tensor:
        order = _order(tensor)
        if order is not None and not _has_order(tensor, _usual(tensor, parameter)):
            orders[path] = order
        return tensor

    map_tensors(entries, visit)
    return orders


def in_orders(entries: Any, orders: Mapping[str, list[int]], parameter: torch.Tensor) -> Any:
    """Return the entries with every tensor in its order; the same tensor where it has it.

    Args:
        entries: Loaded state of one parameter.
        orders: What `unusual_orders` returned at the save.
        parameter: As there.
    """
    if not orders and _are_contiguous(entries, parameter):
        return entries
    made: dict[int, torch.Tensor] = {}  # what was one tensor stays one

    def visit(path: str, tensor: torch.Tensor) -> torch.Tensor:
        order = orders.get(path) or _usual(tensor, parameter)
        if _order(tensor) is None or len(order) != tensor.ndim or _has_order(tensor, order):
            return tensor
        if id(tensor) not in made:
            inverse = sorted(range(len(order)), key=order.__getitem__)
            made[id(tensor)] = tensor.permute(order).contiguous().permute(inverse)
        return made[id(tensor)]

    return map_tensors(entries, visit)


def map_tensors(
    tree: Any, visit: Callable[[str, torch.Tensor], torch.Tensor], path: str = ""
) -> Any:
    """Return a tree with what `visit` makes of its tensors, by path inside of the tree.

    Only dicts, lists and tuples are looked into; other containers stay as they are.
    """
    if isinstance(tree, torch.Tensor):
        return visit(path, tree)
    if type(tree) is dict:
        return {k: map_tensors(v, visit, f"{path}.{key_name(k)}") for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(v, visit, f"{path}.{i}") for i, v in enumerate(tree))
    return tree


def _are_contiguous(entries: Any, parameter: torch.Tensor) -> bool:
    """Return True for a dict of contiguous tensors, as the parameter is: nearly every one.

    DTensors are left out on both sides of a checkpoint, so they may be among them.
    """
    if type(entries) is not dict:
        return False
    for each in (*entries.values(), parameter):
        kind = type(each)
        if kind is DTensor:
            continue
        if kind not in PLAIN or each.layout is not torch.strided or not each.is_contiguous():
            return False
    return True


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dims of a dense tensor, outermost in memory first; None for any other."""
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        return None
    if hasattr(tensor, "__tensor_flatten__"):  # several tensors in the place of one
        return None
    steps = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -steps[dim])
    return order if _has_order(tensor, order) else None


def _has_order(tensor: torch.Tensor, order: list[int]) -> bool:
    """Return True if a tensor is dense and has that order; dims of one element have any place."""
    return tensor.permute(order).is_contiguous()


def _usual(tensor: torch.Tensor, parameter: torch.Tensor) -> list[int]:
    """Return the order that a load gives a tensor if none is stored."""
    is_alike = tensor.shape == parameter.shape
    return (_order(parameter) if is_alike else None) or list(range(tensor.ndim))

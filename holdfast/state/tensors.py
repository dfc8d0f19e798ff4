"""Small questions about tensors: what this rank holds, which bytes, which tensors a tree has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.format.digest import digest128


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, detached."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a rank's elements in row-major order, as a 1-d uint8 tensor."""
    local = local_of(tensor)
    if local.layout is not torch.strided:
        local = local.to_dense()
    flat = local.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single element is contiguous whatever its stride says, but no view as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """XXH3-128 of a rank's elements; empty for a tensor without data (lazy, meta)."""
    if is_lazy(tensor) or tensor.is_meta:
        return ""
    return digest128(element_bytes(tensor).cpu().numpy().data)


def tensors_of(tree: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree of mappings and sequences, with their paths."""
    yield from instances_in(tree, torch.Tensor)


def instances_in(tree: object, kinds: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The objects of some types in a tree of mappings and sequences, with their paths."""
    children: Iterable[tuple[object, object]] = ()
    if isinstance(tree, kinds):
        yield path, tree
    elif isinstance(tree, Mapping):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    for name, child in children:
        yield from instances_in(child, kinds, f"{path}.{name}" if path else str(name))


def equal_trees(one: object, other: object) -> bool:
    """Whether two trees are equal, tensors by dtype and value; NaN equals NaN.

    Of DTensors only dtype and shape are compared, so that there are no collectives.
    """
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return False
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if isinstance(one, DTensor) or isinstance(other, DTensor):
            return True
        same = one.to(other.device) == other
        return bool((same | ((one != one) & (other != other)).to(same.device)).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal_trees(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal_trees, one, other))
    return bool(one == other) or (one != one and other != other)

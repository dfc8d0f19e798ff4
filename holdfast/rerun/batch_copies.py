"""Copies of batches that share no memory with them, and no more of it than a batch shows."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.rerun.sparse_tensors import is_sparse, is_strided, like_with_members, members_of

_ALIGNMENT = 16
"""Bytes; a multiple of every element's size, so that offsets stay whole numbers of elements."""
_SCALARS = frozenset((int, float, bool, complex, type(None)))
_PLAIN_CONTAINERS = frozenset((dict, list, tuple))
_NOT_PLAIN: Any = object()
_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)


def copy_batch(batch: Any) -> Any:
    """A deep copy of a batch: of its type, dtypes, devices, pinning and `requires_grad`.

    A tensor that is a view of a larger one costs what it shows, not what it is a view of. Tensors
    that overlap within the batch overlap in the copy. NumPy arrays that are views of one another
    become separate arrays, as `copy.deepcopy` makes them.

    Raises:
        ConfigError: For a batch that cannot be copied: a tensor with a backward, an open file, a
            lock, a generator. It names the type and the fix.

    Cost: time and memory of the batch; on a CUDA device nothing is waited for.
    """
    with suppress(RecursionError):
        plain = _copy_of_plain(batch, set())
        if plain is not _NOT_PLAIN:
            return plain
    with torch.no_grad():
        memo = _copies_of_tensors(list(_copied_here(batch)))
    try:
        return copy.deepcopy(batch, memo)
    except Exception as error:
        raise ConfigError(
            f"a batch of type {type(batch).__qualname__} cannot be copied for a rerun: "
            f"{type(error).__name__}: {error}; yield tensors, arrays and plain values, and open "
            f"files or other resources after the batch is taken"
        ) from error


def _copy_of_plain(batch: Any, seen: set[int]) -> Any:
    """A copy of separate plain tensors in plain containers; _NOT_PLAIN for any other batch.

    Most batches are that, and the general way takes ten times as long for a small one.

    Args:
        batch: or a part of it.
        seen: addresses of containers and of tensors' memory so far: what is there twice has to be
            there twice in the copy.
    """
    kind = type(batch)
    if kind in _SCALARS or kind is str or kind is bytes:
        return batch
    if kind is torch.Tensor:
        if batch.grad_fn is not None or not _is_plain(batch):
            return _NOT_PLAIN
        address = batch.untyped_storage().data_ptr()
        if address in seen:
            return _NOT_PLAIN
        seen.add(address)
        clone = _pinned_like(batch, batch.detach().clone())
        return clone.requires_grad_() if batch.requires_grad else clone
    if kind not in _PLAIN_CONTAINERS or id(batch) in seen:
        return _NOT_PLAIN
    seen.add(id(batch))
    if kind is dict and not all(type(name) is str or type(name) is int for name in batch):
        return _NOT_PLAIN
    members = [_copy_of_plain(each, seen) for each in (batch.values() if kind is dict else batch)]
    if any(each is _NOT_PLAIN for each in members):
        return _NOT_PLAIN
    return dict(zip(batch, members, strict=True)) if kind is dict else kind(members)


def batch_nbytes(batch: Any) -> int:
    """Bytes of the tensors, arrays and texts of a batch, memory that several share once."""
    storages: dict[tuple[torch.device, int], int] = {}
    nbytes = 0
    for value in _walk(batch):
        if isinstance(value, torch.Tensor):
            for each in members_of(value) if is_sparse(value) else (value,):
                try:
                    storage = each.untyped_storage()
                    storages[storage.device, storage.data_ptr()] = storage.nbytes()
                except (NotImplementedError, RuntimeError):  # other tensors of tensors
                    nbytes += each.numel() * each.element_size()
        elif isinstance(value, np.ndarray):
            nbytes += value.nbytes
        elif isinstance(value, str | bytes | bytearray):
            nbytes += len(value)
    return nbytes + sum(storages.values())


def _walk(batch: Any) -> Iterator[Any]:
    """Every object in a batch that can be reached through containers and attributes, once."""
    seen: set[int] = set()
    # Objects that only exist while they are looked at would give their ids to others.
    alive: list[Any] = []
    waiting: deque[Any] = deque([batch])
    while waiting:
        value = waiting.popleft()
        if type(value) in _SCALARS or id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        alive.append(value)
        yield value
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            waiting.extend(value)
        if isinstance(value, torch.Tensor | np.ndarray | str | bytes):
            continue
        waiting.extend(getattr(value, "__dict__", {}).values())
        for cls in type(value).__mro__:
            names = cls.__dict__.get("__slots__", ())
            names = (names,) if isinstance(names, str) else names
            waiting.extend(getattr(value, name) for name in names if hasattr(value, name))


def _copied_here(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch that do not copy themselves. ConfigError for one with a backward."""
    for value in _walk(batch):
        if not isinstance(value, torch.Tensor):
            continue
        if value.grad_fn is not None:
            raise ConfigError(
                f"a batch holds a tensor of shape {tuple(value.shape)} with a backward "
                f"({type(value.grad_fn).__name__}), which cannot be run twice: yield "
                f"tensor.detach(), and compute what needs gradients in the model"
            )
        if type(value) is torch.Tensor and (_is_plain(value) or not is_strided(value)):
            yield value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a box of memory and nothing more."""
    return (
        is_strided(tensor)
        and not (tensor.is_meta or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.grad is None
        and not tensor.__dict__
    )


def _copies_of_tensors(tensors: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Copies by the id of each tensor; what overlaps in memory overlaps again."""
    members = {id(each): members_of(each) for each in tensors if is_sparse(each)}
    boxes = [each for each in tensors if is_strided(each)]
    boxes += [each for of_one in members.values() for each in of_one]
    parts: dict[int, torch.Tensor] = {}
    for cluster in _clusters(boxes):
        parts.update(_copy_cluster(cluster))
    copies: dict[int, Any] = {}
    for tensor in tensors:
        if is_strided(tensor):
            copies[id(tensor)] = parts[id(tensor)]
            continue
        if is_sparse(tensor):
            clone = like_with_members(tensor, [parts[id(each)] for each in members[id(tensor)]])
        else:
            clone = tensor.detach().clone()
        clone.__dict__.update(copy.deepcopy(tensor.__dict__))
        copies[id(tensor)] = clone.requires_grad_(tensor.requires_grad)
    return copies


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size


def _clusters(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors whose bytes overlap, directly or through others."""
    by_storage: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.untyped_storage().data_ptr()
        by_storage.setdefault(key, []).append(tensor)
    for sharing in by_storage.values():
        cluster: list[torch.Tensor] = []
        end = 0
        for tensor in sorted(sharing, key=_span):
            start, stop = _span(tensor)
            if cluster and start >= end:
                yield cluster
                cluster, end = [], 0
            cluster.append(tensor)
            end = max(end, stop)
        yield cluster


def _copy_cluster(cluster: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies by the id of each tensor, as the memo of a deep copy has them."""
    if len(cluster) == 1:
        tensor = cluster[0]
        clone = _pinned_like(tensor, tensor.detach().clone())
        return {id(tensor): clone.requires_grad_(tensor.requires_grad)}
    first = cluster[0]
    spans = [_span(tensor) for tensor in cluster]
    low = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    high = max(stop for _, stop in spans)
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    raw.set_(first.untyped_storage(), low, (high - low,), (1,))
    storage = _pinned_like(first, raw.clone()).untyped_storage()
    copies = {}
    for tensor, (start, _) in zip(cluster, spans, strict=True):
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        view.set_(storage, (start - low) // tensor.element_size(), tensor.size(), tensor.stride())
        copies[id(tensor)] = view.requires_grad_(tensor.requires_grad)
    return copies


def _pinned_like(tensor: torch.Tensor, clone: torch.Tensor) -> torch.Tensor:
    """The clone, in pinned memory where the tensor is."""
    if tensor.device.type != "cpu" or not torch.cuda.is_available() or not tensor.is_pinned():
        return clone
    return clone.pin_memory()

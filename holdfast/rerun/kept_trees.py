"""The form in which the machine keeps a tree: plain values, and tensors that a save finds.

    keep_tree(batch)  ->  a tree of values that JSON can hold, and of tensors with their own memory
    revive_tree(kept) ->  the batch again, each time in new memory

A batch, a suspect value, a buffer: each is kept in this form from the moment it is taken, in the
process and in a checkpoint. A state flattens it as it flattens any other tree, so its tensors are
leaves with keys and digests. `holdfast.format.values` walks containers and types that a user has
registered; this file adds the properties that a tensor has besides its elements:

    {"$": "tensor", "v": memory, "dtype", "device", "kind", "offset", "shape", "strides"}
    {"$": "array", "v": memory, …, "code": the dtype of NumPy if the tensor does not imply it}
    {"$": "text", "v": memory, …, "type": str, bytes or bytearray}: long ones, not for a manifest
    {"$": "sparse", "layout", "shape", "is_coalesced", "kind", "members": [memory and view of each]}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast._torch import sparse_members
from holdfast.arrays.boxes import strided_span
from holdfast.arrays.intervals import overlapping
from holdfast.errors import ConfigError, CorruptionError, PlacementError
from holdfast.format.values import Codecs, Node, decode_tree, encode_tree, leaf_node, tag_of
from holdfast.state.tensor_elements import (
    NAME_TO_TORCH,
    TORCH_TO_NAME,
    array_tensor,
    dtype_name,
    instances_in,
    tensor_array,
)

_ALIGNMENT = 16
"""Bytes; a multiple of the size of every element, so that offsets stay whole elements.

The largest element is complex128. A cluster starts at such a multiple of its storage, whatever
dtypes its views have, and each view counts its offset in its own elements.
"""
_LONG_TEXT = 1024
"""Texts and bytes of at least this length become tensors: a JPEG would bloat the manifest."""
_TEXTS = (str, bytes, bytearray)
_SPARSE_LAYOUTS = {
    str(layout).removeprefix("torch."): layout
    for layout in (
        torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc,
    )
}  # fmt: skip
_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def keep_tree(tree: object, *, path: str, codecs: Codecs) -> Node:
    """Return a tree in the form that is kept; it shares no memory with the original.

    Tensors keep dtype, strides, device type and `requires_grad`. Those that overlap in memory
    overlap again when they are revived. A view of a larger tensor costs only the elements that it
    shows. Objects other than tensors that occur twice are kept twice.

    Args:
        tree: a batch, or anything else.
        path: its name, for messages.
        codecs: the types beyond the built-in ones.

    Raises:
        ConfigError: a value cannot be kept; the message names its place, its type and the fix.

    Cost: time and memory of the tree; it does not wait for a CUDA device.
    """
    if isinstance(tree, torch.Tensor) and _is_simple(tree, codecs):
        return _simple_node(tree)
    keeper = _Keeper(codecs)
    try:
        node = encode_tree(tree, path=path, codecs=codecs, on_leaf=keeper.leaf)
    except PlacementError as error:
        # A batch has no markers, so the advice of the walk to use one would not help here.
        reason = error.details.get("without_markers", error)
        raise ConfigError(
            f"this cannot be kept for a rerun: {reason}. Codecs are passed to RerunMachine and "
            f"ReplayableBatches (codecs=…)"
        ) from error
    with torch.no_grad():
        keeper.copy_memory()
    # The keys that a save will give them. It would refuse two that are the same, but only when the
    # fault has happened.
    names = Counter(name for name, _ in instances_in(node, torch.Tensor, path))
    name, number = names.most_common(1)[0] if names else ("", 0)
    if number > 1:
        raise ConfigError(
            f"this cannot be kept for a rerun: two of its tensors would have the key {name!r} (is "
            f"there a name with a dot in it, or a number and the same number as text?); rename one"
        )
    return node


def revive_tree(node: Any, *, path: str, codecs: Codecs) -> Any:
    """Return a kept tree as it was, in new memory; it can be revived any number of times.

    Tensors of a CUDA device are put on the current one, or on the host without CUDA.

    Raises:
        CorruptionError: `keep_tree` does not return such a node.
        MismatchError: a dataclass, enum or codec is not registered here, or has changed.
    """
    with torch.no_grad():
        return decode_tree(node, path=path, codecs=codecs, on_leaf=_Reviver().leaf)


def is_strided(tensor: torch.Tensor) -> bool:
    """Return True if offset and strides tell where in one storage the elements are."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has a layout of indices and values."""
    return tensor.layout in _SPARSE_LAYOUTS.values()


def members_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and, last, the values of a sparse tensor, detached, in its memory."""
    detached = tensor.detach()
    if detached.layout is torch.sparse_coo:
        # The public methods refuse a tensor that is not coalesced.
        return [*sparse_members(detached)]
    if detached.layout in _COLUMNS:
        return [detached.ccol_indices(), detached.row_indices(), detached.values()]
    return [detached.crow_indices(), detached.col_indices(), detached.values()]


class _Keeper:
    """One walk over a tree.

    Phase 1: `leaf` makes a node for each tensor, and notes which view of which storage it is.
    Phase 2: `copy_memory` copies the memory, when all views of each storage are known.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._views: list[tuple[torch.Tensor, dict[str, Any]]] = []
        """Each tensor and its node. The tensors stay alive: a freed one could give its address to
        the next, which would pass for a view of the same storage."""

    def leaf(self, path: str, value: object) -> Node:
        """Return the node of a tensor, an array or a long text; None for anything else."""
        if isinstance(value, _TEXTS):
            if type(value) not in _TEXTS or len(value) < _LONG_TEXT:
                return None
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            raw = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
            return self._view(path, raw, leaf_node("text", type=type(value).__name__))
        if not isinstance(value, torch.Tensor | np.ndarray):
            return None
        if self._codecs.codec_for(type(value)) is not None:
            return None
        if isinstance(value, np.ndarray):
            tensor, code = array_tensor(path, value)
            return self._view(path, tensor, leaf_node("array", code=code))
        _check_plain(path, value)
        if not is_sparse(value):
            return self._view(path, value, leaf_node("tensor", kind=_kind_of(value)))
        members = members_of(value)
        return leaf_node(
            "sparse",
            kind=_kind_of(value),
            layout=str(value.layout).removeprefix("torch."),
            shape=list(value.shape),
            is_coalesced=value.layout is torch.sparse_coo and value.is_coalesced(),
            members=[self._view(path, each, {}) for each in members],
        )

    def _view(self, path: str, tensor: torch.Tensor, node: dict[str, Any]) -> dict[str, Any]:
        """Return a node that `copy_memory` completes.

        Raises:
            PlacementError: the dtype has no name.
        """
        plain = tensor.detach().resolve_conj().resolve_neg()
        node["dtype"] = dtype_name(plain.dtype, key=path)
        node["device"] = plain.device.type
        self._views.append((plain, node))
        return node

    def copy_memory(self) -> None:
        """Copy the bytes that the tensors show, and complete their nodes."""
        for cluster in _clusters(self._views):
            if len(cluster) == 1:
                ((tensor, node),) = cluster
                # A clone is dense, in the order of the strides (channels last stays so).
                clone = tensor.clone()
                is_flat = clone.is_contiguous()
                memory = clone if is_flat else clone.as_strided((clone.numel(),), (1,))
                _complete(node, memory, offset=0, like=clone)
                continue
            low = min(span_of(tensor)[0] for tensor, _ in cluster) // _ALIGNMENT * _ALIGNMENT
            high = max(span_of(tensor)[1] for tensor, _ in cluster)
            first = cluster[0][0]
            raw = torch.empty(0, dtype=torch.uint8, device=first.device)
            raw.set_(first.untyped_storage(), low, (high - low,), (1,))
            memory = raw.clone()
            if all(tensor.dtype == first.dtype for tensor, _ in cluster):
                memory = memory.view(first.dtype)
            for tensor, node in cluster:
                offset = (span_of(tensor)[0] - low) // tensor.element_size()
                _complete(node, memory, offset=offset, like=tensor)


class _Reviver:
    """One revival: memory is copied once, however many tensors are views of it."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def leaf(self, path: str, node: dict[str, Any]) -> object:
        """Return the tensor, array or text of a node that `_Keeper` has made."""
        try:
            return self._leaf(path, node)
        except (RuntimeError, AttributeError, IndexError) as error:  # from torch, of odd numbers
            raise ValueError(str(error)) from error

    def _leaf(self, path: str, node: dict[str, Any]) -> object:
        tag = tag_of(node)
        if tag == "array":
            return tensor_array(self._view(node), node["code"], path=path)
        if tag == "text":
            data = self._view(node).numpy().tobytes()
            if node["type"] == "str":
                return data.decode("utf-8", "surrogatepass")
            return {"bytes": bytes, "bytearray": bytearray}[node["type"]](data)
        if tag == "tensor":
            tensor = self._view(node)
        elif tag == "sparse":
            tensor = _sparse_tensor(node, [self._view(each) for each in node["members"]])
        else:
            raise CorruptionError(f"{path}: {tag!r} is not a tag of kept trees")
        if node["kind"] == "parameter":
            return nn.Parameter(tensor, requires_grad=True)
        if node["kind"] == "frozen parameter":
            return nn.Parameter(tensor, requires_grad=False)
        return tensor.requires_grad_(node["kind"] == "requires grad")

    def _view(self, node: dict[str, Any]) -> torch.Tensor:
        """Return a tensor as a view of a copy of its memory."""
        memory = node["v"]
        if id(memory) not in self._copies:
            copy = memory.clone()
            # A load puts every tensor on the host.
            is_elsewhere = node["device"] == "cuda" and copy.device.type == "cpu"
            self._copies[id(memory)] = (
                copy.cuda() if is_elsewhere and torch.cuda.is_available() else copy
            )
        copy = self._copies[id(memory)]
        dtype, shape, strides = NAME_TO_TORCH[node["dtype"]], node["shape"], node["strides"]
        offset = node["offset"]
        if len(shape) != len(strides) or min([*shape, *strides, offset]) < 0:
            raise ValueError(f"shape {shape}, strides {strides} and offset {offset}")
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=copy.device)
        end = offset + strided_span(shape, strides)
        # `set_` would enlarge the memory, with elements that nobody has written.
        if end * dtype.itemsize > copy.untyped_storage().nbytes():
            raise ValueError(f"element {end} is behind the end of the memory")
        tensor = torch.empty(0, dtype=dtype, device=copy.device)
        return tensor.set_(copy.untyped_storage(), offset, shape, strides)


def _is_simple(tensor: torch.Tensor, codecs: Codecs) -> bool:
    """Return True for a tensor that needs none of the cases below, as most batches are."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.requires_grad or tensor.is_meta or tensor.is_conj() or tensor.is_neg())
        and tensor.dtype in TORCH_TO_NAME
        and tensor.is_contiguous()
        and not tensor.__dict__
        and tensor.grad is None
        and codecs.codec_for(torch.Tensor) is None
    )


def _simple_node(tensor: torch.Tensor) -> Node:
    """Return the node that `_Keeper` would make of a simple tensor."""
    node = leaf_node(
        "tensor", kind="plain", dtype=TORCH_TO_NAME[tensor.dtype], device=tensor.device.type
    )
    clone = tensor.clone()
    _complete(node, clone, offset=0, like=clone)
    return node


def _complete(
    node: dict[str, Any], memory: torch.Tensor, *, offset: int, like: torch.Tensor
) -> None:
    """Note in a node which view of the memory its tensor is; `offset` is in its elements."""
    node |= {
        "v": memory,
        "offset": offset,
        "shape": list(like.shape),
        "strides": list(like.stride()),
    }


def _sparse_tensor(node: dict[str, Any], members: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sparse tensor of its members; RuntimeError if indices are out of range."""
    layout, shape = _SPARSE_LAYOUTS[node["layout"]], tuple(node["shape"])
    if layout is torch.sparse_coo:
        indices, values = members
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=node["is_coalesced"], check_invariants=True
        )
    compressed, plain, values = members
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=True
    )


def _kind_of(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor: a parameter or not, with or without a gradient."""
    if type(tensor) is nn.Parameter:
        return "parameter" if tensor.requires_grad else "frozen parameter"
    return "requires grad" if tensor.requires_grad else "plain"


def _check_plain(path: str, tensor: torch.Tensor) -> None:
    """Raise PlacementError if a tensor has properties that its elements do not tell."""
    if tensor.grad_fn is not None:
        raise PlacementError(
            f"{path}: a tensor of shape {list(tensor.shape)} has a backward "
            f"({type(tensor.grad_fn).__name__}), which cannot run twice; yield tensor.detach(), "
            f"and compute what needs gradients in the model"
        )
    problem = ""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        problem = f"of type {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif not (is_strided(tensor) or is_sparse(tensor)):
        problem = "that is nested" if tensor.is_nested else f"of layout {tensor.layout}"
    elif tensor.is_meta or tensor.is_quantized:
        problem = "without data" if tensor.is_meta else f"of dtype {tensor.dtype}"
    elif tensor.__dict__ or tensor.grad is not None:
        what = "a gradient" if tensor.grad is not None else f"attributes {sorted(tensor.__dict__)}"
        problem = f"with {what}"
    if problem:
        raise PlacementError(
            f"{path}: a tensor {problem} cannot be kept, because its elements alone do not restore "
            f"it; yield plain tensors and convert them in the step, or register a Codec for its "
            f"type"
        )


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    return start, start + strided_span(tensor.shape, tensor.stride()) * size


def _clusters(
    views: Sequence[tuple[torch.Tensor, dict[str, Any]]],
) -> Iterator[list[tuple[torch.Tensor, dict[str, Any]]]]:
    """Yield groups of tensors whose bytes overlap, directly or through others, with their nodes."""
    by_storage: dict[tuple[torch.device, int], list[tuple[torch.Tensor, dict[str, Any]]]] = {}
    for tensor, node in views:
        key = tensor.device, tensor.untyped_storage().data_ptr()
        by_storage.setdefault(key, []).append((tensor, node))
    for sharing in by_storage.values():
        yield from overlapping(sharing, span=lambda view: span_of(view[0]))

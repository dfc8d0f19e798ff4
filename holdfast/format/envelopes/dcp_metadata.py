"""The objects of a PyTorch DCP directory: flat names of a state, and what `.metadata` says of it.

Dicts are flattened as `flatten_state_dict` does it, and the paths are in the metadata, so that
PyTorch loads parts, shards and the whole dict alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.arrays.boxes import Box
from holdfast.errors import PlanError
from holdfast.format.envelopes.pickle_output import Global, Made, Pairs
from holdfast.format.envelopes.plain_values import TensorRef
from holdfast.format.envelopes.torch_archive import torch_dtype

METADATA_FILE = ".metadata"
EMPTY_DICTS = "holdfast_empty_dicts"
"""Attribute of the metadata: the flat names of empty dicts."""
_VERSION = "1.0.0"
_MODULE = "torch.distributed.checkpoint.metadata"

Path = tuple[str | int, ...]


class FlatTree:
    """Flattens values as PyTorch does.

    Args:
        notes: Get what is written in another form, or left out.
        is_strict: Refuse two names that are one when they are joined with dots, and make items of
            empty dicts in lists; else of equal names the second is left out.

    Attributes:
        items: Tensors and values by flat name.
        paths: By flat name the path in the dict, of empty dicts too.
        empty: Flat names of empty dicts that are not items.
    """

    def __init__(self, notes: list[str], *, is_strict: bool = True) -> None:
        self._notes = notes
        self._is_strict = is_strict
        self.items: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.empty: list[str] = []

    def add(self, path: Path, value: Any) -> None:
        """Add a value and what is below it."""
        shown = ".".join(map(str, path))
        if isinstance(value, tuple | deque) and has_tensors(value):
            kind = type(value).__name__
            self._notes.append(f"{shown} is a {kind} with tensors: it is written as a list")
            value = list(value)
        if isinstance(value, dict):
            self._add_dict(path, value, shown)
        elif isinstance(value, list) and not _is_leaf(value):
            for i, item in enumerate(value):
                self.add((*path, i), item)
        else:
            self._add_item(path, value, shown)

    def _add_item(self, path: Path, value: Any, shown: str) -> None:
        """Add a tensor, or a value that is one item."""
        if self._is_free(path, shown):
            self.items[shown] = value
            self.paths[shown] = path

    def _is_free(self, path: Path, shown: str) -> bool:
        """Return True if no other path has the name; PlanError if one has and that is refused."""
        if shown not in self.paths:
            return True
        problem = f"{shown!r} would be there twice: as {self.paths[shown]} and as {path}"
        if self._is_strict:
            raise PlanError(f"{problem}; rename one")
        self._notes.append(f"{problem}; the second is left out")
        return False

    def _add_dict(self, path: Path, value: dict[Any, Any], shown: str) -> None:
        if type(value) is not dict:
            attached = ", ".join(getattr(value, "__dict__", ()))
            lost = f" without its {attached}" if attached else ""
            self._notes.append(
                f"{shown} is of type {type(value).__name__}: it is written as a dict{lost}"
            )
        if not all(type(key) is str for key in value):
            self._notes.append(f"{shown} has keys that are not strings: they become strings")
        if not value and path and self._is_free(path, shown):
            self._add_empty(path, shown)
        for key, member in value.items():
            below = (*path, key if type(key) is str else str(key))
            name = f"{shown}.{key}" if path else str(key)
            if type(member) is TensorRef and name not in self.paths:
                self.items[name] = member
                self.paths[name] = below
            else:
                self.add(below, member)

    def _add_empty(self, path: Path, shown: str) -> None:
        """Add an empty dict, which PyTorch does not store."""
        self.paths[shown] = path
        if self._is_strict and not all(type(step) is str for step in path):
            # An item of its own: without it, what is behind it in the list would have no place.
            self.items[shown] = {}
            self._notes.append(
                f"{shown} is an empty dict in a list: PyTorch may not load a state with one, and "
                f"not what it has saved of it either ('Missing key')"
            )
        else:
            # Not an item: where the state dict to fill has an empty dict, PyTorch would take the
            # checkpoint for one of a release before 2.4, and look for other names.
            self.empty.append(shown)
            self._notes.append(
                f"{shown} is an empty dict, which PyTorch does not store: what it loads without a "
                f"state dict to fill, as dcp_to_torch_save does, lacks it"
            )


def _is_leaf(value: list[Any]) -> bool:
    """Return True for a list that is one value: it has neither tensors nor dicts."""
    return not any(
        isinstance(item, dict | TensorRef)
        or (isinstance(item, list) and not _is_leaf(item))
        or has_tensors(item)
        for item in value
    )


def has_tensors(value: Any) -> bool:
    """Return True if a tensor is in a value."""
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(has_tensors, value))
    return isinstance(value, TensorRef)


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as the metadata has it: element type (`DTYPES`), shape, and boxes of its chunks."""

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item and where it lies; a value has no box."""

    key: str
    box: Box | None
    number: int
    file: str
    start: int
    nbytes: int


def _made(name: str, state: Any, *, module: str = _MODULE, is_shared: bool = False) -> Made:
    return Made(by=Global(module, name), is_new=True, state=state, is_shared=is_shared)


class _Shared:
    """Descriptions that come again and again, each made once: the metadata stays small."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, ...], Made] = {}
        self._properties: dict[str, Made] = {}

    def size(self, numbers: tuple[int, ...]) -> Made:
        """Describe a `torch.Size`."""
        made = self._sizes.get(numbers)
        if made is None:
            made = Made(by=Global("torch", "Size"), args=(numbers,), is_shared=True)
            self._sizes[numbers] = made
        return made

    def properties(self, dtype: str) -> Made:
        """Describe the properties of tensors of a type."""
        made = self._properties.get(dtype)
        if made is None:
            strided = Made(by=Global("torch.serialization", "_get_layout"), args=("torch.strided",))
            contiguous = Made(by=Global(_MODULE, "_MEM_FORMAT_ENCODING"), args=(0,))
            state = (torch_dtype(dtype), strided, False, contiguous, False)
            made = _made("TensorProperties", state, is_shared=True)
            self._properties[dtype] = made
        return made


def metadata_of(
    paths: Mapping[str, Path],
    tensors: Mapping[str, DescribedTensor],
    stored: Sequence[StoredItem],
    empty: Sequence[str] = (),
) -> Made:
    """Describe the object in `.metadata`.

    Args:
        paths: By flat name the path in the dict, of tensors and of values.
        tensors: By flat name what is a tensor.
        stored: Where everything lies.
        empty: Flat names of empty dicts, which `paths` has, too: for our own reader, in an
            attribute that PyTorch does not look at, as it does not at paths without an item.

    Cost: linear in the number of items.
    """
    shared, without = _Shared(), set(empty)
    items = {
        key: _tensor(tensors[key], shared)
        if key in tensors
        else _made("BytesStorageMetadata", None)
        for key in paths
        if key not in without
    }
    state: dict[str, Any] = {
        "state_dict_metadata": items,
        "planner_data": dict(paths),
        "storage_data": Pairs([(_index(each, shared), _place(each)) for each in stored]),
        "storage_meta": _made(
            "StorageMeta", {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
        ),
        "version": _VERSION,
    }
    if empty:
        state[EMPTY_DICTS] = list(empty)
    return _made("Metadata", state)


def _tensor(tensor: DescribedTensor, shared: _Shared) -> Made:
    chunks = [
        _made(
            "ChunkStorageMetadata",
            {"offsets": shared.size(box.offset), "sizes": shared.size(box.shape)},
        )
        for box in tensor.boxes
    ]
    state = {
        "properties": shared.properties(tensor.dtype),
        "size": shared.size(tensor.shape),
        "chunks": chunks,
    }
    return _made("TensorStorageMetadata", state)


def _index(item: StoredItem, shared: _Shared) -> Made:
    state: dict[str, Any] = {"fqn": item.key, "index": None}
    if item.box is not None:
        offset = shared.size(item.box.offset)
        state = {"fqn": item.key, "index": item.number, "offset": offset}
    return _made("MetadataIndex", state)


def _place(item: StoredItem) -> Made:
    state = {
        "relative_path": item.file,
        "offset": item.start,
        "length": item.nbytes,
    }
    return _made("_StorageInfo", state, module="torch.distributed.checkpoint.filesystem")

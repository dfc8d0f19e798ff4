"""Flattening a state: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._torch import local_tensor, spec_of, storage_id
from holdfast.errors import HoldfastError, PlacementError
from holdfast.format.values import (
    Codecs,
    Node,
    encode_tree,
    is_like_a_tag,
    is_unicode,
    per_rank_node,
    tag_of,
    tensor_node,
    transient_node,
    union_node,
)
from holdfast.parallel.layout import Layout
from holdfast.state.coordinates import coordinate_label
from holdfast.state.leaves import FlatState, ReplicaSets, TensorLeaf, held_tensor, tensor_leaf
from holdfast.state.markers import (
    FlatShard,
    Marked,
    OnLayout,
    Padded,
    PerRank,
    Replicated,
    Sharded,
    Stored,
    Transient,
    Union,
)
from holdfast.state.matcher import LocalMemory, TensorRequest
from holdfast.state.module_state import ModuleState
from holdfast.state.optimizer_state import OptimizerState
from holdfast.state.parts import (
    Part,
    TreePart,
    check_part_name,
    is_last,
    is_left_out,
    part_of,
)
from holdfast.state.rng import refuse_shared_streams
from holdfast.state.shared_memory import files_mapped_twice, shared_memory
from holdfast.state.tensor_elements import array_tensor, memory_key
from holdfast.state.unfinished import refuse_unfinished

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_TENSORS = (torch.Tensor, *get_args(Marked))
_NONE: Any = None
"""A leaf that is still to be made."""
_MAX_NAMED = 5
_MAX_MARKERS = 50
"""How deep PerRank and Union may be nested, to see a cycle through them."""


class LeafCache:
    """What the last pass over a state has met, so that unchanged tensors cost little.

    What a tensor claims is taken from the last pass where its key, traits and layout are the same,
    whatever object or memory it is now: a state made again for each save is as good as one that
    stays.
    """

    def __init__(self) -> None:
        self.last = _Pass()


class _Pass:
    """What one pass has met, as columns."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.traits: list[object] = []
        """Everything that decides what is claimed of each tensor, see `_traits`."""
        self.layouts: list[Layout] = []
        self.leaves: dict[str, TensorLeaf] = {}
        self.addresses: list[int] = []
        self.memory: dict[str, object] = {}
        """Of each tensor whose leaf has views of it, see `memory_key`."""
        self.meshes: dict[int, DeviceMesh] = {}
        """Kept, so that no other mesh has the `id` of one of the last pass."""
        self.structure = object()


def flatten_state(
    state: Mapping[str, object],
    *,
    layout: Layout,
    rank: int,
    codecs: Codecs,
    cache: LeafCache | None = None,
) -> FlatState:
    """Flatten a state on one rank.

    Keys are full paths, part name first, joined by dots. A tensor met again is stored once, under
    the key it was met by first: the same object, or another one of the same memory, shape, strides
    and dtype (`.data` ties, fresh views). Modules and the named parts of optimizers are unions:
    ranks may hold different members of them. Random streams come last, so that they hold what other
    parts draw meanwhile.

    Args:
        cache: Of an earlier call with the same layout and rank; brought up to date.

    Raises:
        PlacementError: Naming the path, for a value that cannot be stored, two entries with one
            key, or a bad placement.
        ConfigError: For a bad part name, and for a part in the middle of a step.

    Cost: no collectives, no tensor bytes copied.
    """
    flattener = _Flattener(
        layout=layout, rank=rank, codecs=codecs, before=(cache or LeafCache()).last
    )
    nodes: dict[str, object] = {}
    # The sort is stable: parts keep the user's order, but for random streams at the end.
    entries = [(name, value) for name, value in state.items() if not is_left_out(value)]
    refuse_shared_streams({n: v.value if isinstance(v, OnLayout) else v for n, v in entries})
    for name, value in sorted(entries, key=lambda item: is_last(item[1])):
        check_part_name(name)
        home = value.own_layout if isinstance(value, OnLayout) else layout
        if rank not in home.ranks:
            raise PlacementError(
                f"state part '{name}': rank {rank} is not in {home}; ranks outside of a part's "
                f"layout leave it out of their state"
            )
        try:
            part = part_of(name, value.value if isinstance(value, OnLayout) else value)
            refuse_unfinished(part, operation="save")
            tree = _declared_tree(part)
        except HoldfastError as error:
            raise type(error)(f"state part '{name}': {error}", details=error.details) from error
        except Exception as error:
            error.add_note(f"state part '{name}'")
            raise
        flattener.layout = home
        num_before = flattener.num_met
        nodes[name] = flattener.encode(tree, path=name)
        if not isinstance(part, ModuleState | OptimizerState):
            flattener.refuse_attributes(since=num_before)
        if isinstance(part, TreePart | ModuleState):
            forms = part.forms if isinstance(part, ModuleState) else ()
            flattener.fills_in_place(since=num_before, but_for={f"{name}.{form}" for form in forms})
    made, tensors = flattener.finish()
    if cache is not None:
        cache.last = made
    return FlatState(
        leaves=made.leaves,
        tensors=tensors,
        labels=flattener.labels,
        nodes={name: nodes[name] for name in state if name in nodes},
        structure=made.structure,
    )


def _declared_tree(part: Part) -> object:
    """Return the part's tree; the dicts by name of a module or an optimizer are declared as unions.

    Ranks of other pipeline stages hold other parameters; what several hold must still be equal.
    """
    if isinstance(part, ModuleState):
        return Union(part.tree())
    return _optimizer_union(part.tree()) if isinstance(part, OptimizerState) else part.tree()


def _optimizer_union(tree: Mapping[str, Any]) -> Union:
    """Return the tree of an optimizer and of those inside it, with its dicts declared as unions."""
    declared = {key: Union(each) if type(each) is dict else each for key, each in tree.items()}
    if "inner" in tree:
        inner = {path: _optimizer_union(each) for path, each in tree["inner"].items()}
        declared["inner"] = Union(inner)
    return Union(declared)


class _Flattener:
    """One pass over a state; lives as long as the pass."""

    def __init__(self, *, layout: Layout, rank: int, codecs: Codecs, before: _Pass) -> None:
        self.layout = layout
        """Of the part that is being flattened."""
        self._before = before
        self._rank = rank
        self._codecs = codecs
        self._num_markers = 0
        self.labels: dict[str, tuple[tuple[int, int], ...]] = {}
        """Of each path inside of `PerRank`, where coordinates stand in it: position and length."""
        self._open: tuple[tuple[int, int], ...] = ()
        # What was met, in order: path, tensor or marker, the node that refers to it, layout.
        self._paths: list[str] = []
        self._objects: list[Any] = []
        self._nodes: list[dict[str, Node]] = []
        self._layouts: list[Layout] = []
        self._filled: set[str] = set()
        """Paths of what a load fills in place."""

    def encode(self, tree: object, *, path: str) -> Node:
        return encode_tree(tree, path=path, codecs=self._codecs, on_leaf=self._on_leaf)

    def refuse_attributes(self, *, since: int) -> None:
        """Raise PlacementError for tensors with attributes that a load could not make again.

        Modules and optimizers keep the objects that they have.
        """
        for path, obj in zip(self._paths[since:], self._objects[since:], strict=True):
            if type(obj) in _PLAIN:
                continue
            tensor = obj if isinstance(obj, torch.Tensor) else held_tensor(obj)
            kind = type(tensor)
            is_own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            if kind not in _PLAIN and not is_own and vars(tensor):
                raise PlacementError(
                    f"{path}: a {kind.__name__} is more than its elements "
                    f"({', '.join(sorted(vars(tensor)))}), which would be lost; save "
                    f"it.as_subclass(torch.Tensor) and the rest as values of their own"
                )

    @property
    def num_met(self) -> int:
        """How many tensors were met so far."""
        return len(self._paths)

    def fills_in_place(self, *, since: int, but_for: set[str]) -> None:
        """Note that a load fills the tensors that were met last in place.

        Args:
            since: How many were met before them.
            but_for: Paths of those that it does not.
        """
        self._filled.update(path for path in self._paths[since:] if path not in but_for)

    def _on_leaf(self, path: str, obj: object) -> Node | None:
        if isinstance(obj, _TENSORS):
            return self._add(path, obj, "tensor")
        if type(obj) is dict:
            return self._dict_node(path, obj)
        if isinstance(obj, np.ndarray) and self._codecs.codec_for(type(obj)) is None:
            return self._array_node(path, obj)
        if isinstance(obj, PerRank):
            axes = tuple(obj.axes)
            label = coordinate_label(self.layout, self._rank, axes, path=path)
            outside, self._open = self._open, (*self._open, (len(path) + 1, len(label)))
            inner = self._encode_marked(obj.tree, path=f"{path}[{label}]")
            self._open = outside
            return per_rank_node(sorted(axes), {label: inner})
        if isinstance(obj, Union):
            inner = self._encode_marked(obj.mapping, path=path)
            if not isinstance(inner, dict) or tag_of(inner) in ("codec", "dataclass"):
                raise PlacementError(
                    f"{path}: Union takes a dict, OrderedDict, Counter or defaultdict, not a "
                    f"{type(obj.mapping).__name__}"
                )
            return union_node(inner)
        if isinstance(obj, Transient):
            return transient_node()
        if isinstance(obj, Stored):
            raise PlacementError(f"{path}: Stored() asks a load for what is there; nothing to save")
        if isinstance(obj, nn.Module | OptimizerState | torch.optim.Optimizer):
            raise PlacementError(
                f"{path}: a {type(obj).__name__} inside of a tree is not flattened; make it a "
                f"part of its own, as in {{'{path.rpartition('.')[2]}': ...}}, or several modules "
                f"one part by nn.ModuleDict or nn.ModuleList"
            )
        return None

    def _encode_marked(self, tree: object, *, path: str) -> Node:
        """Return the node of what a marker wraps, for which the walk starts again."""
        if self._num_markers >= _MAX_MARKERS:
            raise PlacementError(
                f"{path[:80]}…: more than {_MAX_MARKERS} PerRank and Union inside each other; a "
                f"tree that contains itself cannot be stored"
            )
        self._num_markers += 1
        node = self.encode(tree, path=path)
        self._num_markers -= 1
        return node

    def _array_node(self, path: str, array: np.ndarray) -> Node:
        """Return the node of a NumPy array, with its dtype if the tensor's does not tell it."""
        tensor, dtype = array_tensor(path, array)
        node = self._add(path, tensor, "array")
        if dtype is not None:
            node["d"] = dtype
        return node

    def _dict_node(self, path: str, obj: dict[Any, Any]) -> Node | None:
        """Return the node of a dict that has only text keys and tensors; None for any other."""
        if set(map(type, obj)) != {str}:
            return None
        if not all(issubclass(kind, _TENSORS) for kind in set(map(type, obj.values()))):
            return None
        if not all(map(str.isascii, obj)) or any(map(is_like_a_tag, obj)):
            return None
        paths = [f"{path}.{key}" for key in obj]
        nodes: list[dict[str, Node]] = list(map(tensor_node, paths))
        self._paths += paths
        self._objects += obj.values()
        self._nodes += nodes
        self._layouts += [self.layout] * len(paths)
        if self._open:
            self.labels.update(dict.fromkeys(paths, self._open))
        return dict(zip(obj, nodes, strict=True))

    def _add(self, path: str, obj: torch.Tensor | Marked, tag: str) -> dict[str, Node]:
        """Return the node of a tensor, which refers to its key or, after `_tie`, to another's."""
        node = tensor_node(path, tag=tag)
        self._paths.append(path)
        self._objects.append(obj)
        self._nodes.append(node)
        self._layouts.append(self.layout)
        if self._open:
            self.labels[path] = self._open
        return node

    def finish(self) -> tuple[_Pass, dict[str, Any]]:
        """Return the pass, for the next one, and each tensor or marker by key.

        Raises:
            PlacementError: For a tensor that cannot be stored, and for two of one key.
        """
        addresses = self._tie()
        before, made = self._before, _Pass()
        made.keys, made.layouts = self._paths, self._layouts
        tensors = dict(zip(made.keys, self._objects, strict=True))
        if len(tensors) < len(made.keys):
            key = next(key for key, number in Counter(made.keys).items() if number > 1)
            raise PlacementError(
                f"{key}: two tensors of the state have this key (a name with a dot in it, or a "
                f"number and the same number as text?); rename one"
            )
        made.traits = _all_traits(self._objects, made.meshes)
        columns = (made.keys, made.traits, made.layouts)
        last = (before.keys, before.traits, before.layouts)
        again: list[str] = []
        if columns == last:
            made.leaves, made.structure = before.leaves.copy(), before.structure
        else:
            known = {key: facts for key, *facts in zip(*last, strict=True)}
            again = [key for key, *facts in zip(*columns, strict=True) if known.get(key) != facts]
            made.leaves = {key: before.leaves.get(key, _NONE) for key in made.keys}
        made.memory = {key: each for key, each in before.memory.items() if key in tensors}
        # Views of a tensor are of the memory that it had.
        again += [
            key
            for key, each in made.memory.items()
            if memory_key(held_tensor(tensors[key])) != each
        ]
        self._make_again(again, made, tensors)
        made.addresses = addresses
        if columns != last or addresses != before.addresses:
            _refuse_shared_memory({key: tensors[key] for key in made.keys if key in self._filled})
        return made, tensors

    def _make_again(self, keys: list[str], made: _Pass, tensors: dict[str, Any]) -> None:
        """Make the leaves of some tensors.

        Tensors that are held whole and have the same traits are alike in everything but the key.
        """
        if not keys:
            return
        facts = dict(zip(made.keys, zip(made.traits, made.layouts, strict=True), strict=True))
        replica_sets: ReplicaSets = {}
        alike: dict[object, TensorLeaf] = {}
        for key in keys:
            _check_key(key)
            obj, (traits, layout) = tensors[key], facts[key]
            name = (traits, id(layout)) if isinstance(obj, torch.Tensor) and traits else None
            leaf = alike.get(name)
            if leaf is not None:
                made.leaves[key] = leaf._replace(key=key)
                continue
            leaf = tensor_leaf(
                obj, key=key, layout=layout, rank=self._rank, replica_sets=replica_sets
            )
            made.memory.pop(key, None)
            if name is not None and _is_whole(leaf, obj):
                leaf = alike[name] = leaf._replace(locals=())
            else:
                made.memory[key] = memory_key(held_tensor(obj))
            made.leaves[key] = leaf

    def _tie(self) -> list[int]:
        """Let nodes of tensors that were met before refer to the first one's key.

        Returns:
            The address of each tensor that is left.
        """
        addresses = list(map(_address, self._objects))
        counts = Counter(addresses)
        if len(counts) == len(addresses) and 0 not in counts:
            return addresses
        keys: dict[object, str] = {}
        tied: set[int] = set()
        for i, address in enumerate(addresses):
            if address and counts[address] == 1:
                continue
            obj, path = self._objects[i], self._paths[i]
            identity = _identity(obj)
            names: list[object] = [id(obj)] if identity is None else [id(obj), identity]
            known = next((keys[name] for name in names if name in keys), None)
            if known is None:
                keys.update(dict.fromkeys(names, path))
            else:
                self._nodes[i]["k"] = known
                tied.add(i)
        if tied:
            for column in (self._paths, self._objects, self._layouts, addresses):
                column[:] = [each for i, each in enumerate(column) if i not in tied]
        return addresses


def _refuse_shared_memory(tensors: Mapping[str, Any]) -> None:
    """Raise PlacementError for tensors that a load into this very state would refuse.

    Cost: a sort of their addresses.
    """
    requests = [
        TensorRequest(path=key, tensor=i, boxes=None, locals=(held_tensor(each).detach(),))
        for i, (key, each) in enumerate(tensors.items())
    ]
    if LocalMemory(requests).is_disjoint() and not files_mapped_twice():
        return
    sentences = shared_memory(requests)
    if sentences:
        raise PlacementError(
            f"{'; '.join(sentences[:_MAX_NAMED])}. Saved like this, the checkpoint could not be "
            f"loaded into the state that it is of"
        )


def _check_key(path: str) -> None:
    """Raise PlacementError for a path that cannot be a key."""
    if path == "__metadata__":
        raise PlacementError("the key '__metadata__' is reserved by safetensors; rename it")
    if not path.isascii() and not is_unicode(path):
        raise PlacementError(
            f"{path!r}: a tensor's key must be text that UTF-8 can hold; it has a lone "
            f"surrogate; rename it"
        )


def _is_whole(leaf: TensorLeaf, obj: object) -> bool:
    """Return True if the leaf of a tensor is just what the tensor holds, in one piece."""
    return isinstance(obj, torch.Tensor) and [box.shape for box in leaf.boxes] == [
        tuple(held_tensor(obj).shape)
    ]


def _address(obj: Any) -> int:
    """Return the address of a tensor's first element; 0 if it has none or if it cannot be known."""
    try:
        return (obj if type(obj) in _PLAIN else held_tensor(obj)).data_ptr()
    except (RuntimeError, ValueError):  # sparse and lazy tensors
        return 0


def _all_traits(objects: list[Any], meshes: dict[int, DeviceMesh]) -> list[object]:
    """Return the traits of each tensor or marker."""
    try:
        return [
            (each.dtype, each.shape, each.layout, each.is_meta)
            if type(each) in _PLAIN
            else _traits(each, meshes)
            for each in objects
        ]
    except RuntimeError:  # a nested tensor, which has no shape
        return [_traits(each, meshes) for each in objects]


def _traits(obj: Any, meshes: dict[int, DeviceMesh]) -> object:
    """Everything that decides what a tensor or marker claims, but for its key and layout.

    A mesh is compared by identity, since another one of the same ranks may have other
    communicators; placements by type, too, since some of different types are equal. None for a
    tensor that has no shape; its leaf is refused.
    """
    if isinstance(obj, DTensor):
        local, spec = local_tensor(obj), spec_of(obj)
        placements, mesh = spec.placements, spec.mesh
        meshes[id(mesh)] = mesh
        return (
            obj.dtype, obj.shape, id(mesh), placements, *map(type, placements),
            type(local), local.dtype, local.shape,
        )  # fmt: skip
    if isinstance(obj, torch.Tensor):
        if is_lazy(obj) or obj.is_nested:
            return None
        plain = (obj.dtype, obj.shape, obj.layout, obj.is_meta)
        # A class that answers for its tensors is refused by its name; any other one is like plain.
        is_own = type(obj).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        return (*plain, type(obj)) if is_own else plain
    if isinstance(obj, Sharded):
        dims = None if obj.dims is None else tuple(obj.dims.items())
        return "sharded", _traits(obj.local, meshes), obj.shape, dims, obj.offset, obj.over
    if isinstance(obj, FlatShard):
        like = _traits(obj.like, meshes)
        return "flat", _traits(obj.local, meshes), like, obj.start, obj.over
    if isinstance(obj, Padded):
        return "padded", _traits(obj.value, meshes), obj.shape
    return "replicated", _traits(obj.local, meshes)


def _identity(obj: Any) -> object:
    """Return what two tensors share if they are one: memory, form and placement.

    None for a run of a flat bucket, which is the same only as the same object: runs are empty on
    some ranks, and then alike. Empty shards are the same only as the same tensor: in a bucket they
    start at one offset, although other ranks have elements of both. Tensors without elements have
    no memory; two of them are one if their storages are, on all ranks alike.
    """
    inner = obj.value if isinstance(obj, Padded) else obj
    if isinstance(inner, FlatShard):
        return None
    local = held_tensor(inner)
    is_shard = isinstance(inner, Sharded) or (isinstance(inner, DTensor) and inner.numel() > 0)
    is_empty_shard = is_shard and local.numel() == 0
    where = id(local) if is_empty_shard else _known_memory(local)
    placed = local if isinstance(inner, Replicated) else inner
    return where and (where, _traits(placed, {}), obj.shape if inner is not obj else None)


def _known_memory(tensor: torch.Tensor) -> object:
    """Return where a tensor's elements are; None if that cannot be known."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None  # refused when its leaf is made
    if tensor.numel() == 0:
        return storage_id(tensor), tensor.storage_offset(), tensor.stride(), tensor.device
    return memory_key(tensor)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without a collection of cyclic garbage in the body, which makes many objects and no cycles.

    A full collection of a training process takes a tenth of a second and more.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

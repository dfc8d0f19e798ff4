"""Flattening a state: parts -> tensors by key, and a tree of values that refers to them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._torch import storage_id
from holdfast.errors import HoldfastError, PlacementError
from holdfast.format.values import (
    Codecs,
    Node,
    are_plain_keys,
    encode_tree,
    is_unicode,
    per_rank_node,
    tag_of,
    tensor_node,
    transient_node,
    union_node,
)
from holdfast.parallel.layout import Layout
from holdfast.state.coordinates import coordinate_label
from holdfast.state.data_positions import unstored_orders
from holdfast.state.leaves import FlatState, ReplicaSets, TensorLeaf, held_tensor, tensor_leaf
from holdfast.state.markers import (
    FlatShard,
    Marked,
    Padded,
    PerRank,
    Pieces,
    Replicated,
    Sharded,
    Stored,
    Transient,
    Union,
)
from holdfast.state.matcher import LocalMemory, TensorRequest
from holdfast.state.module_state import ModuleState
from holdfast.state.optimizer_forms import shown_form
from holdfast.state.optimizer_state import OptimizerState
from holdfast.state.parts import (
    Part,
    StateEntry,
    StatefulPart,
    TreePart,
    entries_of,
    is_last,
    part_of,
)
from holdfast.state.plain_attributes import PlainAttributes
from holdfast.state.rng import RNG
from holdfast.state.shared_memory import (
    are_of_no_file,
    is_expanded,
    missing_memory,
    shared_memory,
)
from holdfast.state.tensor_elements import array_tensor, memory_key
from holdfast.state.tensor_memory import addresses_of
from holdfast.state.traits import PLAIN, Traits, held_tensors, traits_of
from holdfast.state.unfinished import refuse_unfinished

_TENSORS = (torch.Tensor, *get_args(Marked))
_PLAIN_KINDS = frozenset((str, bytes, list, tuple))
"""Types that are neither tensors nor markers."""
_OF_ONE_BOX = (torch.Tensor, Pieces, Sharded)
"""What may hold just one box, as it is."""
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
        self.attributes = PlainAttributes()
        self.unstored: list[str] = []
        """Attributes that have changed, found by passes that failed: the next result names them."""
        self.orders: set[str] = set()
        """Paths of the orders of data that were named as not stored."""


class _Pass:
    """What one pass has met, as columns."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.traits = Traits([], [])
        self.layouts: list[Layout] = []
        self.leaves: dict[str, TensorLeaf] = {}
        self.filled: list[str] = []
        """Keys of what a load fills in place."""
        self.addresses: list[int] = []
        """Of the memory of each of these."""
        self.strides: list[tuple[int, ...]] = []
        """The same."""
        self.memory: dict[str, object] = {}
        """Of each tensor whose leaf has views of it, see `memory_key`."""
        self.branches: dict[str, _Branch] = {}
        """By path, the dicts of tensors; none if nodes refer to other tensors' keys."""
        self.structure = object()


class _Branch(NamedTuple):
    """A dict that has only text keys and tensors: its keys, and paths and nodes of the tensors."""

    names: list[str]
    paths: list[str]
    nodes: dict[str, Node]


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
    cache = cache or LeafCache()
    flattener = _Flattener(layout=layout, rank=rank, codecs=codecs, before=cache.last)
    orders: dict[str, str] = {}
    nodes: dict[str, object] = {}
    versions: dict[str, Mapping[str, int]] = {}
    kinds: dict[str, Mapping[str, str]] = {}
    # The sort is stable: parts keep the user's order, but for random streams at the end.
    entries = entries_of(state, layout)
    for name, (home, _, value) in sorted(entries.items(), key=lambda e: is_last(e[1].value)):
        if rank not in home.ranks:
            raise PlacementError(
                f"state part '{name}': rank {rank} is not in {home}; ranks outside of a part's "
                f"layout leave it out of their state"
            )
        part = part_of(name, value)
        try:
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
        if isinstance(part, OptimizerState | StatefulPart) and (noted := part.kinds()):
            kinds[name] = noted
        if isinstance(part, StatefulPart):
            orders |= unstored_orders(part.owner, name, kept=_streams_in(entries))
        if isinstance(part, OptimizerState):
            if part.is_live:
                flattener.notes_state(f"{name}.state.", since=num_before)
            cache.unstored += cache.attributes.look_at_optimizers(
                name, part.torch_optimizers(), shown_form
            )
        if isinstance(part, ModuleState):
            flattener.notes_module(since=num_before)
            versions[name] = part.versions
            shown = cast(Union, tree).mapping
            of_code = {form: shown[form] for form in part.forms}
            cache.unstored += cache.attributes.look(name, part.module, of_code)
    made, objects, held, addresses = flattener.finish()
    cache.last = made
    unstored, cache.unstored = cache.unstored, []
    orders = {path: why for path, why in orders.items() if path not in cache.orders}
    cache.orders |= orders.keys()
    return FlatState(
        leaves=made.leaves,
        keys=made.keys,
        objects=objects,
        held=held,
        addresses=addresses,
        forms=made.traits.forms,
        labels=flattener.labels,
        nodes={name: nodes[name] for name in state if name in nodes},
        versions=versions,
        kinds=kinds,
        structure=made.structure,
        unstored=unstored,
        unstored_orders=orders,
    )


def _streams_in(entries: Mapping[str, StateEntry]) -> Iterator[object]:
    """Yield the generators behind the random streams of a state."""
    for entry in entries.values():
        if isinstance(entry.value, RNG):
            yield from entry.value.streams().values()


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
        self._nodes: list[Any] = []
        self._layouts: list[Layout] = []
        self._branches: dict[str, _Branch] = {}
        self._is_filled: list[bool] = []
        """Whether a load fills each in place; the last ones may be left out."""
        self._module_ranges: list[range] = []
        self._state_ranges: list[range] = []
        """Positions of what is a module's, and of what is the state of an optimizer."""
        self._state_prefixes: list[str] = []

    def encode(self, tree: object, *, path: str) -> Node:
        return encode_tree(tree, path=path, codecs=self._codecs, on_leaf=self._on_leaf)

    def refuse_attributes(self, *, since: int) -> None:
        """Raise PlacementError for tensors with attributes that a load could not make again.

        Modules and optimizers keep the objects that they have.
        """
        objects = self._objects[since:]
        kinds = set(map(type, objects))
        harmless = {k for k in kinds if k in PLAIN or (issubclass(k, torch.Tensor) and _is_own(k))}
        if harmless == kinds:
            return
        for path, obj in zip(self._paths[since:], objects, strict=True):
            if type(obj) in harmless:
                continue
            tensor = obj if isinstance(obj, torch.Tensor) else held_tensor(obj)
            kind = type(tensor)
            if kind not in PLAIN and not _is_own(kind) and vars(tensor):
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
        self._is_filled += [False] * (since - len(self._is_filled))
        if but_for:
            self._is_filled += [path not in but_for for path in self._paths[since:]]
        else:
            self._is_filled += [True] * (self.num_met - since)

    def notes_module(self, *, since: int) -> None:
        """Note that the tensors that were met last are a module's."""
        self._module_ranges.append(range(since, self.num_met))

    def notes_state(self, prefix: str, *, since: int) -> None:
        """Note which of the tensors that were met last are the state of an optimizer.

        A load fills those that the optimizer has in place, and makes the others.

        Args:
            prefix: Of their paths; they are the first ones.
            since: How many tensors were met before.
        """
        stop = bisect_left(
            self._paths, True, lo=since, key=lambda path: not path.startswith(prefix)
        )
        self._is_filled += [False] * (since - len(self._is_filled)) + [True] * (stop - since)
        self._state_ranges.append(range(since, stop))
        self._state_prefixes.append(prefix)

    def _refuse_tied_state(self, *positions: int) -> None:
        """Raise PlacementError if one of two tied tensors is a module's and the other is state."""
        of_modules, of_states = (
            [at for at in positions if any(at in each for each in ranges)]
            for ranges in (self._module_ranges, self._state_ranges)
        )
        if of_modules and of_states:
            raise PlacementError(
                f"{self._paths[of_states[0]]}: this state of an optimizer is the memory of "
                f"{self._paths[of_modules[0]]} itself; in an optimizer that has not stepped a load "
                f"would make other memory for it, and the two would part. Let the optimizer keep a "
                f"copy, or update the parameter that it has"
            )

    def _on_leaf(self, path: str, obj: object) -> Node | None:
        if type(obj) is dict:
            return self._dict_node(path, obj)
        kind = type(obj)
        if kind in _PLAIN_KINDS:
            return None
        if isinstance(obj, _TENSORS):
            return self._add(path, obj, "tensor")
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
            if self._open:
                raise PlacementError(
                    f"{path}: PerRank takes values, not a {kind.__name__}, which a load has to "
                    f"fill; make the part an object of yours whose state_dict() returns "
                    f"PerRank(....state_dict()) and whose load_state_dict() passes it on"
                )
            raise PlacementError(
                f"{path}: a {kind.__name__} inside of a tree is not flattened; make it a part of "
                f"its own, as in {{'{path.rpartition('.')[2]}': ...}}, or several modules one part "
                f"by nn.ModuleDict or nn.ModuleList"
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
        kinds = set(map(type, obj.values()))
        if not (kinds <= PLAIN or all(issubclass(kind, _TENSORS) for kind in kinds)):
            return None
        names = list(obj)
        branch = self._before.branches.get(path)
        if branch is None or branch.names != names:
            if not are_plain_keys(names):
                return None
            paths = [f"{path}.{name}" for name in names]
            nodes = dict(zip(names, map(tensor_node, paths), strict=True))
            branch = _Branch(names, paths, cast(dict[str, Node], nodes))
        self._branches[path] = branch
        self._paths += branch.paths
        self._objects += obj.values()
        self._nodes += branch.nodes.values()
        self._layouts += [self.layout] * len(names)
        if self._open:
            self.labels.update(dict.fromkeys(branch.paths, self._open))
        return branch.nodes

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

    def finish(self) -> tuple[_Pass, list[Any], list[torch.Tensor], list[int]]:
        """Return the pass, for the next one; each tensor or marker, what it holds, and the address
        of that.

        Raises:
            PlacementError: For a tensor that cannot be stored, and for two of one key.
        """
        before, made = self._before, _Pass()
        again = self._look_again()
        if again is not None:
            held, addresses = again
        else:
            held = held_tensors(self._objects)
            addresses = addresses_of(held)
        if self._tie(held, addresses):
            again = self._look_again()
        objects = self._objects
        made.keys, made.layouts, made.branches = self._paths, self._layouts, self._branches
        made.memory = before.memory
        changed: list[str] = []
        if again is not None:
            made.traits = before.traits
            made.leaves, made.structure = before.leaves, before.structure
        else:
            _refuse_equal_keys(made.keys)
            made.traits = Traits(objects, held)
            is_same = (made.keys, made.layouts) == (before.keys, before.layouts)
            if is_same and made.traits.same_as(before.traits):
                made.traits.expect_again(objects, held)
            else:
                changed = self._changed(made, before)
            if is_same and not changed:
                made.structure = before.structure
            made.leaves = {key: before.leaves.get(key, _NONE) for key in made.keys}
        if changed or before.memory:
            tensors = dict(zip(made.keys, objects, strict=True))
            made.leaves = dict(made.leaves)
            made.memory = {key: each for key, each in before.memory.items() if key in tensors}
            # Views of a tensor are of the memory that it had.
            moved = [key for key, each in made.memory.items() if _memory(tensors[key]) != each]
            self._make_again([*changed, *moved], made, tensors)
        made.filled = list(compress(made.keys, self._is_filled))
        made.addresses = list(compress(addresses, self._is_filled))
        made.strides = before.strides
        if again is None:
            made.strides = [*map(torch.Tensor.stride, compress(held, self._is_filled))]
        # Memory that was looked at before, by tensors of the same form, has not changed.
        is_known = made.structure is before.structure and made.filled == before.filled
        is_known &= made.strides == before.strides
        if not is_known or made.addresses != before.addresses:
            _refuse_missing_memory(made.keys, held)
            filled = list(compress(held, self._is_filled))
            _refuse_shared_memory(made.filled, filled, made_again=tuple(self._state_prefixes))
        elif len(made.filled) < len(made.keys):  # what is not filled in place is new at each save
            num_noted = len(self._is_filled)
            others = [not each for each in self._is_filled] + [True] * (len(held) - num_noted)
            _refuse_missing_memory(list(compress(made.keys, others)), list(compress(held, others)))
        return made, objects, held, addresses

    def _look_again(self) -> tuple[list[torch.Tensor], list[int]] | None:
        """Return what the tensors hold and where, if they are those of the pass before."""
        before = self._before
        if (self._paths, self._layouts) != (before.keys, before.layouts):
            return None
        return before.traits.look_again(self._objects)

    @staticmethod
    def _changed(made: _Pass, before: _Pass) -> list[str]:
        """Return the keys of all tensors that the pass before did not meet with these traits."""
        last = zip(before.keys, before.traits.of_each(), before.layouts, strict=True)
        known = {key: facts for key, *facts in last}
        now = zip(made.keys, made.traits.of_each(), made.layouts, strict=True)
        return [key for key, *facts in now if known.get(key) != facts]

    def _make_again(self, keys: list[str], made: _Pass, tensors: dict[str, Any]) -> None:
        """Make the leaves of some tensors.

        Those of which all that is held is stored as one box, and that have the same traits, are
        alike in everything but the key.
        """
        if not keys:
            return
        columns = zip(made.traits.of_each(), made.layouts, strict=True)
        facts = dict(zip(made.keys, columns, strict=True))
        replica_sets = ReplicaSets()
        alike: dict[object, TensorLeaf] = {}
        for key in keys:
            _check_key(key)
            obj, (traits, layout) = tensors[key], facts[key]
            name = (traits, id(layout)) if isinstance(obj, _OF_ONE_BOX) and traits else None
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
                made.memory[key] = _memory(obj)
            made.leaves[key] = leaf

    def _tie(self, held: list[torch.Tensor], addresses: list[int]) -> bool:
        """Let nodes of tensors that were met before refer to the first one's key.

        Args:
            held: What each tensor holds; those that were met before are removed.
            addresses: The same.

        Returns:
            True if there are any.
        """
        distinct = set(addresses)
        if len(distinct) == len(addresses) and 0 not in distinct:
            return False
        counts = Counter(addresses)
        met: dict[object, int] = {}
        tied: set[int] = set()
        for i, address in enumerate(addresses):
            if address and counts[address] == 1:
                continue
            obj = self._objects[i]
            identity = _identity(obj)
            names: list[object] = [id(obj)] if identity is None else [id(obj), identity]
            known = next((met[name] for name in names if name in met), None)
            if known is None:
                met.update(dict.fromkeys(names, i))
            else:
                self._refuse_tied_state(known, i)
                self._nodes[i]["k"] = self._paths[known]
                tied.add(i)
        if tied:
            # The nodes may be those of the pass before, which stays the last one if this one fails.
            self._branches, self._before.branches = {}, {}
            for column in (self._paths, self._objects, self._layouts, self._is_filled, held,
                           addresses):  # fmt: skip
                column[:] = [each for i, each in enumerate(column) if i not in tied]
        return bool(tied)


def _refuse_equal_keys(keys: Sequence[str]) -> None:
    """Raise PlacementError if two tensors have one key."""
    if len(set(keys)) < len(keys):
        key = next(key for key, number in Counter(keys).items() if number > 1)
        raise PlacementError(
            f"{key}: two tensors of the state have this key (a name with a dot in it, or a "
            f"number and the same number as text?); rename one"
        )


def _requests(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[TensorRequest]:
    """Return local tensors as what a load into this very state would fill."""
    return [
        TensorRequest(path=key, tensor=i, boxes=None, locals=(each,))
        for i, (key, each) in enumerate(zip(keys, tensors, strict=True))
    ]


def _refuse_missing_memory(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raise PlacementError for local tensors of which some elements are nowhere.

    Cost: a microsecond for each.
    """
    sentences = missing_memory(_requests(keys, tensors))
    if sentences:
        raise PlacementError("; ".join(sentences[:_MAX_NAMED]))


def _refuse_shared_memory(
    keys: Sequence[str], tensors: Sequence[torch.Tensor], *, made_again: tuple[str, ...]
) -> None:
    """Raise PlacementError for local tensors that a load into this very state would refuse.

    Args:
        keys: Of the tensors.
        tensors: What a load fills in place.
        made_again: Prefixes of keys that a load may make memory for; expanded ones lose nothing.

    Cost: a sort of their addresses.
    """
    requests = _requests(keys, tensors)
    if LocalMemory(requests).is_disjoint() and are_of_no_file(tensors):
        return
    requests = [
        each
        for each, local in zip(requests, tensors, strict=True)
        if not (each.path.startswith(made_again) and is_expanded(local))
    ]
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
    return isinstance(obj, _OF_ONE_BOX) and [box.shape for box in leaf.boxes] == [
        tuple(held_tensor(obj).shape)
    ]


def _is_own(kind: type[torch.Tensor]) -> bool:
    """Return True if a class of tensors answers for its tensors."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _memory(obj: Any) -> object:
    """Return where the views of a leaf lie."""
    if isinstance(obj, Pieces):
        return tuple(map(memory_key, obj.locals))
    return memory_key(held_tensor(obj))


def _identity(obj: Any) -> object:
    """Return what two tensors share if they are one: memory, form and placement.

    None for pieces, of which there are several, and for a run of a flat bucket, which are the same
    only as the same object: runs are empty on some ranks, and then alike. Empty shards are the same
    only as the same tensor: in a bucket they start at one offset, although other ranks have
    elements of both. Tensors without elements have no memory; two of them are one if their storages
    are, on all ranks alike.
    """
    inner = obj.value if isinstance(obj, Padded) else obj
    if isinstance(inner, FlatShard | Pieces):
        return None
    local = held_tensor(inner)
    is_shard = isinstance(inner, Sharded) or (isinstance(inner, DTensor) and inner.numel() > 0)
    is_empty_shard = is_shard and local.numel() == 0
    where = id(local) if is_empty_shard else _known_memory(local)
    placed = local if isinstance(inner, Replicated) else inner
    return where and (where, traits_of(placed, {}), obj.shape if inner is not obj else None)


def _known_memory(tensor: torch.Tensor) -> object:
    """Return where a tensor's elements are; None if that cannot be known."""
    if is_lazy(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return None  # refused when its leaf is made
    if tensor.numel() == 0:
        return storage_id(tensor), tensor.storage_offset(), tensor.stride(), tensor.device
    return memory_key(tensor)

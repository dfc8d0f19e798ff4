"""Match what a load requests with what a checkpoint stores, before any target is touched.

In come the user's templates and the stored trees; out come requests for tensors and one list of
everything that does not fit: missing, mismatched in shape, dtype or kind. After the tensors have
been read, `Matcher.build` makes the loaded trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, repeat
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast._torch import DTENSOR_PLACED, local_tensor, spec_of
from holdfast.arrays.boxes import Box
from holdfast.errors import HoldfastError, MismatchError
from holdfast.format.values import (
    Codecs,
    decode_tree,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    key_name,
    keys_of_tensors,
    mapping_of,
    sequence_of,
    tag_of,
    tensor_keys,
)
from holdfast.parallel.layout import Layout
from holdfast.state.coordinates import (
    ConsistencyCheck,
    PerRankIn,
    PerRankSource,
    coordinate_label,
    fill_from_merged,
    find_source,
    matches,
    stored_trees,
)
from holdfast.state.leaves import ReplicaSets, clip_leaf, padding_views, tensor_leaf
from holdfast.state.markers import (
    Fresh,
    Marked,
    Padded,
    PerRank,
    PerRankValues,
    Pieces,
    Stored,
    Transient,
    Union,
    as_loaded,
)
from holdfast.state.registered_types import PLAIN_VALUES, RegisteredTypes
from holdfast.state.stored import (
    Members,
    Token,
    key_token,
    leaf_paths,
    members_of,
    only_names,
    stored_kind,
    used_paths,
)
from holdfast.state.tensor_elements import TORCH_TO_NAME, refused_cast, tensor_array, torch_dtype
from holdfast.state.tensor_memory import TensorMemory, runs
from holdfast.state.traits import PLAIN, PLAIN_FORMS, held_tensors


class TensorRequest(NamedTuple):
    """One tensor of a load request and what it fills on this rank."""

    path: str
    """In the state."""
    tensor: int
    """Position of the stored tensor in the checkpoint's table."""
    boxes: tuple[Box, ...] | None
    """The boxes that are filled, in coordinates of the stored tensor; None: the whole."""
    locals: tuple[torch.Tensor, ...]
    """The memory of each box; a single tensor where `boxes` is None."""
    is_fresh: bool = False
    """True if the memory was made for this load, so that nothing else refers to it."""


class PerRankUse(NamedTuple):
    """A stored value per coordinate that a request met, and what this rank takes of it."""

    path: str
    node: Any
    labels: tuple[str, ...]
    may_drop: bool


@dataclass(slots=True)
class MatchResult:
    """All differences between a request and a checkpoint, and what is read, on one rank."""

    tensors: list[TensorRequest] = field(default_factory=list)
    """The tensors to fill, in the order of the request; one met again has nothing to fill."""
    missing: list[str] = field(default_factory=list)
    """Paths that are requested and not stored."""
    mismatched: list[str] = field(default_factory=list)
    """One sentence for each difference in shape, dtype or kind."""
    may_be_padding: bool = False
    """True if a difference in shape may be one of padding that is not declared."""
    cast: list[str] = field(default_factory=list)
    """Paths of tensors that are converted."""
    kept: list[str] = field(default_factory=list)
    """Paths of values per rank whose local value stays by their policy."""
    allowed: list[str] = field(default_factory=list)
    """Paths that are absent with the caller's consent."""
    fresh: list[str] = field(default_factory=list)
    """Paths that start fresh with the caller's consent."""
    unagreed: list[str] = field(default_factory=list)
    """Path and reason of each thing that would start fresh without consent."""
    touched: set[str] = field(default_factory=set)
    """Stored leaf paths that the request uses."""
    cleared: list[TensorRequest] = field(default_factory=list)
    """Padding that is set to zero in the end."""
    per_rank_uses: list[PerRankUse] = field(default_factory=list)
    """The values per coordinate that are requested."""
    checks: list[ConsistencyCheck] = field(default_factory=list)
    """Values that must be equal on several ranks after the load."""
    dropped: list[str] = field(default_factory=list)
    """Stored entries of this rank's coordinate that nothing here can take."""

    @property
    def fits(self) -> bool:
        """Return True if nothing differs but by consent."""
        return not (self.missing or self.mismatched or self.unagreed)


class LocalMemory(TensorMemory):
    """The memory of the local tensors of some requests, in order.

    Args:
        requests: What a load fills, in order.

    Attributes:
        request: (n,) the position of the request of each tensor.
    """

    def __init__(self, requests: Sequence[TensorRequest]) -> None:
        locals_ = list(map(attrgetter("locals"), requests))
        super().__init__(list(chain.from_iterable(locals_)))
        counts = np.fromiter(map(len, locals_), np.int64, len(requests))
        self.request = np.repeat(np.arange(len(requests)), counts)

    def is_disjoint(self) -> bool:
        """Return True if all are plain and no two have a byte in common; False may mean either."""
        self.look()
        if not self.is_all_plain:
            return False
        order = np.argsort(self.address, kind="stable")
        order = order[self.nbytes[order] > 0]
        start = self.address[order]
        return bool((start[1:] >= (start + self.nbytes[order])[:-1]).all())


_MIN_COLUMNAR = 16
"""With fewer entries, a dict is matched entry by entry as fast."""
LocalTarget = tuple[str, tuple[int, ...], tuple[Box, ...] | None, tuple[torch.Tensor, ...]]
"""Dtype name, global shape, boxes (None: the whole), and what is filled."""

StoredTensors = Mapping[str, tuple[str, tuple[int, ...]]]


class Matcher:
    """Matches templates against stored nodes on one rank, then builds the loaded trees.

    Args:
        tensors: Key -> (dtype name, global shape) of the checkpoint, in the order of its table.
        layout: Of the ranks; see `move_to`.
        rank: This one.
        codecs: The user's types.
        allow_missing: Patterns (`fnmatch`) of paths that may be absent.
        cast: Whether another stored dtype is accepted.
    """

    def __init__(
        self,
        *,
        tensors: StoredTensors,
        layout: Layout,
        rank: int,
        codecs: Codecs,
        allow_missing: Sequence[str] = (),
        cast: bool = False,
    ) -> None:
        self._tensors = tensors
        self._positions = dict(zip(tensors, count()))
        self._layout = layout
        self._rank = rank
        self._codecs = codecs
        self._allow_missing = allow_missing
        self._cast = cast
        self._scope = ""
        self._fresh: dict[tuple[str, str], torch.Tensor] = {}
        self._sources: dict[int, str] = {}
        self._targets = LocalTargets(rank)
        self._registered = RegisteredTypes(codecs)
        self._closed = False
        self._may_leave: Sequence[str] = ()
        self._left_paths: set[str] = set()
        self.has_left = False
        self._per_rank_sources: dict[str, PerRankSource] = {}
        self.result = MatchResult(cleared=self._targets.cleared)

    def move_to(
        self,
        layout: Layout,
        *,
        scope: str = "",
        closed: bool = False,
        may_leave: Sequence[str] = (),
    ) -> None:
        """Match and build another part from here on.

        Args:
            layout: What the part lives on.
            scope: A name for a request that takes what another one may take, too; tensors that are
                made for a load are shared within a scope only.
            closed: Whether stored entries that the template does not name are left out; otherwise
                they are requested, too.
            may_leave: Patterns of those that are left out of a mapping with targets even so, if
                they have tensors. `has_left` is then True.
        """
        self._layout, self._scope, self._closed = layout, scope, closed
        self._may_leave, self.has_left = may_leave, False

    def may_miss(self, path: str) -> bool:
        """Return True if the caller allowed this path to be absent."""
        return matches(path, self._allow_missing)

    def match(self, template: object, node: Any, path: str) -> None:
        """Record what the template asks for and whether the stored node has it."""
        if type(template) is dict:
            self._match_mapping(template, node, path)
        elif type(template) in PLAIN_VALUES:
            self._match_value(template, node, path)
        elif isinstance(template, Stored):
            self._request_all(node, path, all_ranks=template.all_ranks)
        elif isinstance(template, Transient):
            self.result.touched.update(leaf_paths(node, path, self._codecs))
        elif isinstance(template, PerRank):
            self._match_per_rank(template, node, path)
        elif isinstance(template, torch.Tensor | Marked):
            self._match_tensor(template, node, path)
        elif isinstance(template, Union):
            self._match_mapping(template.mapping, node, path)
        elif type(template) not in (list, tuple) and (inner := self._fields(template)) is not None:
            self._match_registered(template, inner, node, path)
        elif isinstance(template, Mapping):
            self._match_mapping(template, node, path)
        elif self._is_filled_sequence(template):
            self._match_sequence(template, node, path)
        else:
            self._match_value(template, node, path)

    def build(self, template: object, node: Any, path: str) -> Any:
        """Return the loaded tree of a template whose targets are filled; set padding to zero."""
        if type(template) is dict and is_plain_dict(node) and template.keys() == node.keys():
            kinds = set(map(type, template.values()))
            if kinds <= PLAIN or all(issubclass(kind, torch.Tensor) for kind in kinds):
                return mapping_of(
                    node, dict(zip(node, map(template.__getitem__, node), strict=True))
                )
        if isinstance(template, Transient):
            return template.value
        if isinstance(template, PerRank):
            return self._build_per_rank(template, node, path)
        if isinstance(template, torch.Tensor):
            return template
        if isinstance(template, Marked):
            self._targets.clear_padding(template)
            return unmarked(template)
        if isinstance(template, Stored):
            return self._decode(node, path, all_ranks=template.all_ranks)
        if isinstance(template, Union):
            template = template.mapping
        inner = self._fields(template)
        if inner is not None:
            return self._build_registered(template, inner, node, path)
        named = members_of(node, self._codecs) if isinstance(template, Mapping) else None
        if isinstance(template, Mapping) and named is not None:
            return self._build_mapping(template, named, node, path)
        if self._is_filled_sequence(template):
            pairs = zip(cast(Sequence[object], template), items_of(node) or (), strict=True)
            built = [self.build(t, child, f"{path}.{i}") for i, (t, child) in enumerate(pairs)]
            return sequence_of(node, built)
        return self._decode(node, path)

    def _fields(self, template: object) -> object | None:
        """Return the fields of a registered object if a load fills tensors in it; else None."""
        inner = self._registered.fields_of(template)
        return inner if inner is not None and self._registered.holds_tensors(inner) else None

    def _is_filled_sequence(self, template: object) -> bool:
        """Return True if a template is a sequence with tensors to fill."""
        is_sequence = isinstance(template, list | tuple | deque)
        return is_sequence and self._registered.holds_tensors(template)

    def _build_mapping(
        self, template: Mapping[Any, object], named: Members, node: Any, path: str
    ) -> Any:
        """Return a mapping of the stored type and order; entries that are not stored come last."""
        own = {
            name if type(name) is str else key_token(name, self._codecs): name for name in template
        }
        built: dict[Any, Any] = {}
        for stored, (name, child) in named.items():
            if stored in own:
                value = template[own[stored]]
                if not isinstance(value, torch.Tensor):
                    here = name if type(name) is str else key_name(name)
                    value = self.build(value, child, f"{path}.{here}")
                built[name] = value
            elif not self._closed and (here := f"{path}.{key_name(name)}") not in self._left_paths:
                built[name] = self._decode(child, here)
        left = {name: template[name] for token, name in own.items() if token not in named}
        if left:
            built |= self._left(left, path)
        return mapping_of(node, built)

    def _build_registered(self, template: object, inner: Any, node: Any, path: str) -> Any:
        """Return a dataclass or a codec's type, made of its fields as they were loaded."""
        if tag_of(node) == "codec":
            built = self.build(inner, node["v"], path)
        else:
            built = {
                name: self.build(value, node["v"][name], f"{path}.{name}")
                for name, value in inner.items()
            }
        return self._registered.made_of(template, built, path)

    def _match_value(self, template: object, node: Any, path: str) -> None:
        """Match a value without tensors: the stored one replaces it."""
        if not isinstance(node, dict | list):
            self.result.touched.add(path)
        elif tag_of(node) == "tensor":
            kind = f"a value ({type(template).__name__})"
            self._other_kind(path, kind, node, hint="; ask for it with Stored()")
        else:
            self._request_all(node, path)

    def _match_mapping(self, template: Mapping[Any, object], node: Any, path: str) -> None:
        """Match the entries of a mapping with the stored ones, by name."""
        if (
            type(template) is dict
            and len(template) >= _MIN_COLUMNAR
            and is_plain_dict(node)
            and self._match_dict(template, node, path)
        ):
            return
        named = members_of(node, self._codecs)
        if named is None:
            if any(self._registered.holds_tensors(v) for v in template.values()):
                self._other_kind(path, "a mapping", node)
            else:
                self._request_all(node, path)
            return
        if not named:
            self.result.touched.add(path)
        tokens: set[Token | None] = set()
        token: Token | None
        for name, child in template.items():
            if type(name) is str:
                token, here = name, f"{path}.{name}"
            else:
                token, here = key_token(name, self._codecs), f"{path}.{key_name(name)}"
            tokens.add(token)
            if token is not None and token in named:
                stored = named[token][1]
                if isinstance(child, torch.Tensor):
                    self._match_tensor(child, stored, here)
                else:
                    self.match(child, stored, here)
            elif not isinstance(child, Transient):
                self._miss(here, child)
        rest = [member for token, member in named.items() if token not in tokens]
        if rest:
            self._refuse_equal_keys(template, rest, path)
        self._request_rest(template, rest, path)

    def _match_dict(self, template: dict[Any, object], node: dict[str, Any], path: str) -> bool:
        """Match a dict of tensors, or of dicts of tensors, with the stored one by columns.

        Returns:
            False if something does not fit, or is of another kind: then nothing has been done.
        """
        names, targets = list(template), list(template.values())
        if set(map(type, names)) != {str}:
            return False
        paths, nodes = [f"{path}.{name}" for name in names], list(map(node.get, names))
        if set(map(type, targets)) == {dict}:
            inner = _members_of_both(targets, nodes, paths)
            if inner is None:
                return False
            targets, nodes, paths = inner
        keys = keys_of_tensors(nodes)
        ids = list(map(id, targets))
        if keys is None or len(set(ids)) < len(ids) or not self._sources.keys().isdisjoint(ids):
            return False
        held = self._targets.local_targets(targets, paths, self._layout)
        if held is None:
            return False
        forms, locals_ = held
        stored = list(map(self._tensors.get, keys))
        # Many tensors have few forms: each pair of a target's and a stored one is compared once.
        # (Equal stored ones are one object, or few.)
        pairs = list(zip(map(id, forms), map(id, stored), strict=True))
        distinct = dict(zip(pairs, count()))
        cast: set[tuple[int, int]] = set()
        for pair, i in distinct.items():
            (target_dtype, target_shape, _), info = forms[i], stored[i]
            if info is None or info[1] != target_shape:
                return False
            if info[0] != target_dtype:
                if self._refused_cast(info[0], target_dtype):
                    return False
                cast.add(pair)
        result = self.result
        result.touched.update(paths)
        self._sources.update(zip(ids, keys, strict=True))
        if cast:
            result.cast += [p for p, pair in zip(paths, pairs, strict=True) if pair in cast]
        positions = map(self._positions.__getitem__, keys)
        boxes = map(itemgetter(2), forms)
        columns = zip(paths, positions, boxes, locals_, repeat(False), strict=False)
        result.tensors += map(partial(tuple.__new__, TensorRequest), columns)
        if len(node) > len(names):
            rest = [member for member in node.items() if member[0] not in template]
            self._request_rest(template, rest, path)
        return True

    def _request_rest(
        self, template: Mapping[Any, object], rest: Sequence[tuple[Any, Any]], path: str
    ) -> None:
        """Request stored entries that a mapping does not name, or leave them."""
        if self._closed or not rest:
            return
        # A mapping without targets, such as an empty one, stands for whatever is stored.
        may_leave = self._may_leave if self._registered.holds_tensors(template) else ()
        for name, node in rest:
            here = f"{path}.{key_name(name)}"
            if (
                may_leave
                and any(tensor_keys(node))
                and all(matches(each, may_leave) for each in leaf_paths(node, here, self._codecs))
            ):
                self._left_paths.add(here)
                self.has_left = True
            else:
                self._request_all(node, here)

    def _refuse_equal_keys(
        self, template: Mapping[Any, object], rest: Sequence[tuple[Any, Any]], path: str
    ) -> None:
        """Note that the state has 1 and the checkpoint True: no dict can hold both."""
        for name, _ in rest:
            if type(name) is not str and name in template:
                own = next(key for key in template if key == name)
                self.result.mismatched.append(
                    f"{path}: the state has the key {own!r} ({type(own).__name__}), the checkpoint "
                    f"{name!r} ({type(name).__name__}); Python treats them as equal, but they "
                    f"are not the same: use the stored type"
                )

    def _match_registered(self, template: object, inner: Any, node: Any, path: str) -> None:
        """Match a dataclass or a codec's type that holds tensors, field by field."""
        tag, kind = self._registered.tag_and_name(template)
        if tag_of(node) != tag or node.get("n") != kind:
            self._other_kind(path, f"a {kind}", node)
        elif tag == "codec":
            self.match(inner, node["v"], path)
        elif set(node["v"]) != set(inner):
            self._request_all(node, path)  # which says how the definition has changed
        else:
            for name, value in inner.items():
                self.match(value, node["v"][name], f"{path}.{name}")
        self.result.touched.update(leaf_paths(node, path, self._codecs))

    def _match_sequence(self, template: Any, node: Any, path: str) -> None:
        """Match the items of a sequence with the stored ones, by position."""
        children = items_of(node)
        if children is None or len(children) != len(template):
            self._other_kind(path, f"a sequence of {len(template)}", node)
            return
        for i, (item, child) in enumerate(zip(template, children, strict=True)):
            self.match(item, child, f"{path}.{i}")

    def _match_per_rank(self, template: PerRank, node: Any, path: str) -> None:
        """Match the value of this rank with what is stored per coordinate."""
        if not is_per_rank(node):
            kind = f"a value per {','.join(template.axes)}"
            self._other_kind(path, kind, node, hint="; ask for it without PerRank")
            return
        source = find_source(template, node, layout=self._layout, rank=self._rank, path=path)
        if source.problem is not None:
            self.result.mismatched.append(source.problem)
            return
        self._per_rank_sources[path] = source
        result, here = self.result, f"{path}[{source.here}]"
        result.per_rank_uses.append(
            PerRankUse(path, node, source.labels, template.surplus == "drop")
        )
        result.touched.update(used_paths(node, path, source.names, self._codecs))
        result.checks += source.checks
        result.kept += [f"{here}.{name}" if name else here for name in source.kept]
        result.dropped += [f"{here}.{name}" for name in source.dropped]
        for name in source.missing:
            self._keep_or_miss(f"{path}.{name}")
        if source.is_merged or source.is_picked:
            for label in source.labels:
                self._request_all(only_names(node["v"][label], source.names), f"{path}[{label}]")
        elif source.labels:
            label = source.labels[0]
            self.match(template.tree, node["v"][label], f"{path}[{label}]")
        elif template.missing == "keep":
            result.kept.append(here)
        else:
            self._keep_or_miss(here)

    def _other_kind(self, path: str, kind: str, node: Any, *, hint: str = "") -> None:
        """Note that the state and the checkpoint have things of different kinds at a path."""
        self.result.mismatched.append(
            f"{path}: the state has {kind} here, the checkpoint {stored_kind(node)}{hint}"
        )

    def _keep_or_miss(self, path: str) -> None:
        """Something per rank is not stored: it stays as it is if the caller allows that."""
        (self.result.kept if self.may_miss(path) else self.result.missing).append(path)

    def _build_per_rank(self, template: PerRank, node: Any, path: str) -> Any:
        """Return this rank's value, picked or merged as its policy says."""
        source = self._per_rank_sources[path]
        if source.is_merged or source.is_picked:
            trees = {
                label: self._decode(only_names(node["v"][label], source.names), f"{path}[{label}]")
                for label in source.labels
            }
            if not source.is_merged or template.merge is None:
                return trees
            try:
                merged = template.merge(trees)
            except HoldfastError:
                raise
            except Exception as error:
                raise MismatchError(
                    f"{path}: merge of {len(trees)} stored values failed: {error!r}"
                ) from error
            return fill_from_merged(template.tree, merged, path, registered=self._registered)
        if not source.labels and isinstance(template, PerRankIn):
            return template.local
        if not source.labels:
            return None if isinstance(template.tree, Stored) else unmarked(template.tree)
        label = source.labels[0]
        return self.build(template.tree, node["v"][label], f"{path}[{label}]")

    def _match_tensor(self, template: torch.Tensor | Marked, node: Any, path: str) -> None:
        """Request a stored tensor for a target, unless they differ in kind, shape or dtype."""
        target = self._targets.local_target(template, path, self._layout)
        target_dtype, target_shape, boxes, locals_ = target
        if not is_tensor(node):
            self._other_kind(path, "a tensor", node)
            return
        key, result = node["k"], self.result
        dtype, shape = self._tensors[key]
        result.touched.add(path)
        # One target may be met under several names, but then they must be one stored tensor.
        source = self._sources.get(id(template))
        if source is None:
            self._sources[id(template)] = key
        if source is not None and source != key:
            result.mismatched.append(
                f"{path}: the state ties this tensor to the one stored as {source}, the checkpoint "
                f"holds them as two; untie them for the load, or ask for one of them alone"
            )
        elif shape != target_shape:
            result.mismatched.append(shape_mismatch(template, path, target_shape, shape))
            may_be = not isinstance(template, Padded) and len(shape) == len(target_shape)
            result.may_be_padding |= may_be
        elif dtype != target_dtype and (why := self._refused_cast(dtype, target_dtype)):
            result.mismatched.append(
                f"{path}: the state's dtype is {target_dtype}, the checkpoint's {dtype}; {why}"
            )
        else:
            if dtype != target_dtype:
                result.cast.append(path)
            if source is not None:
                boxes, locals_ = (), ()
            result.tensors.append(TensorRequest(path, self._positions[key], boxes, locals_))

    def _refused_cast(self, stored: str, held: str) -> str:
        """Return why a stored dtype does not go into a target's; empty if it does."""
        why = refused_cast(stored, held)
        if why:
            return f"{why}; load it with Stored() and convert it explicitly"
        return "" if self._cast else "pass cast=True to convert"

    def _left(self, template: Mapping[Any, object], path: str) -> dict[Any, object]:
        """Return the entries of a template that stay, because nothing is stored for them."""
        left: dict[Any, object] = {}
        for name, child in template.items():
            here = f"{path}.{key_name(name)}"
            inner = child.mapping if isinstance(child, Union) else child
            if isinstance(inner, Fresh) and not self.may_miss(here):
                continue
            left[name] = self._left(inner, here) if type(inner) is dict else unmarked(inner)
        return left

    def _miss(self, path: str, template: object) -> None:
        """Report something requested that is not stored, below a consent or without."""
        if isinstance(template, Fresh):
            if self.may_miss(path):
                self.result.fresh.append(path)
            elif template.is_required:
                self.result.unagreed.append(f"{path} ({template.why})")
        elif self.may_miss(path):
            self.result.allowed.append(path)
        elif isinstance(template, Union):
            self._miss(path, template.mapping)
        elif isinstance(template, Mapping) and template:
            for name, child in template.items():
                self._miss(f"{path}.{key_name(name)}", child)
        else:
            self.result.missing.append(path)

    def _request_all(self, node: Any, path: str, *, all_ranks: bool = False) -> None:
        """Request everything under a node; tensors get new memory, each one once.

        Args:
            all_ranks: Whether of values per rank all are requested, not only this rank's own.
        """

        def request(where: str, inner: dict[str, Any]) -> object:
            if is_tensor(inner):
                self._request_new(str(inner["k"]), where)
            elif is_per_rank(inner) and all_ranks:
                self.result.per_rank_uses.append(PerRankUse(where, inner, tuple(inner["v"]), False))
                for label, child in inner["v"].items():
                    self._request_all(child, f"{where}[{label}]", all_ranks=True)
            elif is_per_rank(inner):
                _, trees = stored_trees(inner, path=where)
                label = self._own_label(inner, where)
                is_there = label in trees
                self.result.per_rank_uses.append(
                    PerRankUse(where, inner, (label,) if is_there else (), False)
                )
                if is_there:
                    self._request_all(trees[label], f"{where}[{label}]")
                else:
                    self._keep_or_miss(f"{where}[{label}]")
            return None

        decode_tree(node, path=path, codecs=self._codecs, on_leaf=request, run_codecs=False)
        self.result.touched.update(leaf_paths(node, path, self._codecs))

    def _request_new(self, key: str, path: str) -> None:
        """Request a stored tensor into new memory, once."""
        if (self._scope, key) in self._fresh:
            return
        dtype, shape = self._tensors[key]
        # Not zeros: a load fills every element, or nothing gets this memory.
        target = torch.empty(shape, dtype=torch_dtype(dtype))
        self._fresh[self._scope, key] = target
        self.result.tensors.append(TensorRequest(path, self._positions[key], None, (target,), True))

    def _decode(self, node: Any, path: str, *, all_ranks: bool = False) -> Any:
        """Return the stored value, with the tensors requested for it in place."""
        if not isinstance(node, dict | list):
            return node

        def value(where: str, inner: dict[str, Any]) -> object:
            if tag_of(inner) == "tensor":
                return self._fresh[self._scope, str(inner["k"])]
            if tag_of(inner) == "array":
                return tensor_array(
                    self._fresh[self._scope, str(inner["k"])], inner.get("d"), path=where
                )
            if is_per_rank(inner) and all_ranks:
                values = {
                    label: self._decode(child, f"{where}[{label}]", all_ranks=True)
                    for label, child in inner["v"].items()
                }
                return PerRankValues(axes=tuple(inner["axes"]), values=values)
            if is_per_rank(inner):
                label = self._own_label(inner, where)
                return self._decode(inner["v"].get(label), f"{where}[{label}]")
            return None

        return decode_tree(node, path=path, codecs=self._codecs, on_leaf=value)

    def _own_label(self, node: Mapping[str, Any], path: str) -> str:
        """Return this rank's coordinate as a stored value per rank names it."""
        return coordinate_label(self._layout, self._rank, tuple(node["axes"]), path=path)


def _members_of_both(
    templates: Sequence[Any], nodes: Sequence[Any], paths: Sequence[str]
) -> tuple[list[object], list[Any], list[str]] | None:
    """Return the members of some dicts, each with its stored node and its path.

    None if one of the dicts is empty or has other keys than text, or is not stored as a plain dict
    of just its keys.
    """
    targets: list[object] = []
    stored: list[Any] = []
    below: list[str] = []
    for template, node, path in zip(templates, nodes, paths, strict=True):
        if set(map(type, template)) != {str} or not is_plain_dict(node):
            return None
        if template.keys() != node.keys():
            return None
        targets += template.values()
        stored += map(node.__getitem__, template)
        below += [f"{path}.{name}" for name in template]
    return targets, stored, below


class LocalTargets:
    """The targets of one load on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._replica_sets = ReplicaSets()
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._paddings: dict[int, tuple[torch.Tensor, ...]] = {}
        self.cleared: list[TensorRequest] = []
        """The padding that is set to zero in the end."""

    def clear_padding(self, template: Marked) -> None:
        """Set the padding of a target to zero, if it has any."""
        for view in self._paddings.get(id(template), ()):
            view.zero_()

    def local_target(
        self, template: torch.Tensor | Marked, path: str, layout: Layout
    ) -> LocalTarget:
        """Return what this rank holds of a tensor: its leaf, for a fraction of the cost.

        Plain tensors are whole. A DTensor with the mesh, placements and shape of one met before
        has the boxes of that one.
        """
        if isinstance(template, torch.Tensor) and _is_readable(template):
            dtype = TORCH_TO_NAME.get(template.dtype)
            if dtype is not None:
                return dtype, template.shape, None, (template,)
        like: tuple[object, ...] | None = None
        if type(template) is DTensor:
            # The attributes themselves: the properties of a DTensor cost several times as much.
            local, spec = local_tensor(template), spec_of(template)
            shape = template.shape if spec.tensor_meta is None else spec.tensor_meta.shape
            order = getattr(spec, "shard_order", None)
            placements = (spec.placements, order, *map(type, spec.placements))
            like = (id(spec.mesh), placements, shape, local.shape)
            boxes = self._boxes.get(like)
            dtype = TORCH_TO_NAME.get(local.dtype)
            if boxes is not None and dtype is not None and _is_readable(local):
                return dtype, shape, boxes, (local,)
        leaf = tensor_leaf(
            template.value if isinstance(template, Padded) else template,
            key=path,
            layout=layout,
            rank=self._rank,
            replica_sets=self._replica_sets,
        )
        if isinstance(template, Padded):
            if id(template) not in self._paddings:
                views = self._paddings[id(template)] = padding_views(leaf, template.shape)
                self.cleared.append(TensorRequest(f"the padding of {path}", -1, None, views))
            leaf = clip_leaf(leaf, template.shape)
        if like is not None and len(leaf.boxes) == 1 and leaf.boxes[0].shape == like[3]:
            self._boxes[like] = leaf.boxes
        return leaf.dtype, leaf.shape, leaf.boxes, leaf.locals

    def local_targets(
        self, templates: Sequence[Any], paths: Sequence[str], layout: Layout
    ) -> tuple[list[_Form], list[tuple[torch.Tensor, ...]]] | None:
        """Return `local_target` of many tensors: the form of each, and what is filled.

        Those that are alike in everything that their form follows from have one form. None if they
        have to be looked at one by one: there is another one than of a plain type, a DTensor or
        pieces that are one, or one that cannot be filled as it is.
        """
        kinds = set(map(type, templates))
        if not kinds <= _COLUMNAR:
            return None
        if Pieces in kinds and any(
            len(each.locals) > 1 for each in templates if type(each) is Pieces
        ):
            return None
        held: list[torch.Tensor] = []
        # The first one of each body stands for all.
        known: dict[object, int] = {}
        firsts: list[int] = []
        placements: dict[object, object] = {}
        try:
            # A few at a time, which are in the cache from the first question to the last.
            for where in runs(len(templates)):
                some = templates[where]
                held_now = held_tensors(some)
                if not set(map(type, held_now)) <= PLAIN:
                    return None
                held += held_now
                bodies = _bodies(some, held_now, placements)
                firsts += map(known.setdefault, bodies, count(where.start))
            forms: dict[int, _Form] = {}
            for first in known.values():
                target = self.local_target(templates[first], paths[first], layout)
                dtype, shape, boxes, locals_ = target
                if boxes is None:
                    is_whole = locals_[0] is held[first]
                else:
                    is_whole = [box.shape for box in boxes] == [tuple(held[first].shape)]
                if not is_whole:
                    return None
                forms[first] = (dtype, shape, boxes)
        except (AttributeError, HoldfastError, RuntimeError):
            return None  # a nested tensor has no shape; what is refused is refused with its path
        return list(map(forms.__getitem__, firsts)), list(zip(held, strict=True))


def _bodies(
    templates: Sequence[Any], held: Sequence[torch.Tensor], known: dict[object, object]
) -> Iterable[object]:
    """Return what the form of each of some tensors follows from: plain ones, DTensors, one piece.

    Args:
        templates: Of the caller.
        held: What they hold on this rank.
        known: The placements so far, for the next call: equal ones become one object.

    Raises:
        AttributeError: A DTensor does not know its shape.
    """
    forms: Iterable[object] = map(PLAIN_FORMS, held)
    kinds = list(map(type, templates))
    if Pieces in kinds:
        forms = [
            (form, each.offsets, each.shape) if type(each) is Pieces else form
            for form, each in zip(forms, templates, strict=True)
        ]
    if DTensor not in kinds:
        return forms
    dtensors = [each for each in templates if type(each) is DTensor]
    meshes, placements, shapes = zip(*map(DTENSOR_PLACED, dtensors), strict=True)
    # Placements of other types may be equal to one of these.
    is_plain = set(map(type, chain.from_iterable(placements))) <= {Replicate, Shard}
    first = placements[0]
    same: Iterable[object]
    # Most are equal to the first: a comparison costs less than a hash.
    if is_plain and all(map(eq, placements, repeat(first))):
        same = repeat(known.setdefault(first, first))
    else:
        named = [each if is_plain else (each, *map(type, each)) for each in placements]
        same = map(known.setdefault, named, placements)
    placed = zip(map(id, meshes), map(id, same), shapes, strict=False)
    if len(dtensors) == len(kinds):
        return zip(forms, placed, strict=True)
    return [
        (form, next(placed)) if kind is DTensor else form
        for form, kind in zip(forms, kinds, strict=True)
    ]


_Form = tuple[str, tuple[int, ...], tuple[Box, ...] | None]
"""Dtype name, global shape and boxes of a target, see `LocalTarget`."""
_COLUMNAR = PLAIN | {DTensor, Pieces}


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return True if `tensor_leaf` takes a plain tensor."""
    # Of a plain type it is neither lazy nor a subclass: what is left of `unreadable`.
    if type(tensor) not in PLAIN:
        return False
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_quantized or tensor.is_meta)


def shape_mismatch(
    template: torch.Tensor | Marked, path: str, held: tuple[int, ...], stored: tuple[int, ...]
) -> str:
    """In words: the state and the checkpoint differ in shape."""
    message = f"{path}: the state's shape is {list(held)}, the checkpoint's {list(stored)}"
    if isinstance(template, Padded):
        return (
            f"{message}; the state's is declared as the real one of {list(template.padded_shape)}"
        )
    return message


def unmarked(template: object) -> object:
    """Return a template for which nothing is stored as plain tensors and values."""
    if isinstance(template, Marked):
        return as_loaded(template)
    if isinstance(template, Union):
        return unmarked(template.mapping)
    if type(template) is dict:
        return {name: unmarked(child) for name, child in template.items()}
    return template

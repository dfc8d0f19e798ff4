"""Matching a load request with a checkpoint's tree, before any target is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import CorruptionError
from holdfast.format.values import Codecs, decode_tree
from holdfast.geometry import Box
from holdfast.parallel.layout import Layout
from holdfast.state.flatten import coordinate_label
from holdfast.state.markers import Fresh, Marked, Padded, PerRank, Stored, Transient
from holdfast.state.padding import clip_leaf, padding_views
from holdfast.state.placement import Domains, is_tensor_like, tensor_leaf
from holdfast.state.torch_dtypes import TORCH_TO_NAME, torch_dtype

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Held = tuple[str, tuple[int, ...], tuple[Box, ...] | None, tuple[torch.Tensor, ...]]
"""Dtype name, global shape, boxes (None: the whole), and what is filled."""
StoredTensors = Mapping[str, tuple[str, tuple[int, ...]]]


class Wanted(NamedTuple):
    """One tensor of a request and what fills it on this rank.

    `path`: in the state. `tensor`: position of the stored one in the checkpoint's table. `locals`:
    what is filled, one for each of `boxes`; a single one for the whole where `boxes` is None.
    `is_fresh`: memory made for this load, which nobody else knows.
    """

    path: str
    tensor: int
    boxes: tuple[Box, ...] | None
    locals: tuple[torch.Tensor, ...]
    is_fresh: bool = False


@dataclass(slots=True)
class MatchResult:
    """What a request and a checkpoint have to do with each other, on one rank.

    `wanted`: the tensors to fill, in the order of the request; one met again has nothing to fill.
    `missing`: paths asked for and not stored. `mismatched`: one sentence for each difference in
    shape, dtype or kind. `cast`: keys that are converted. `kept`: per-rank paths whose local value
    stays by their policy. `allowed`: paths absent by the caller's leave. `fresh`: what starts fresh
    by the caller's leave. `unagreed`: what would start fresh without it, path and reason.
    `touched`: stored leaf paths that the request uses.
    """

    wanted: list[Wanted] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    unagreed: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)


def entries(node: Any) -> Mapping[Any, Any] | None:
    """The children of a stored dict by key (whatever its keys' types), or None for no dict."""
    if not isinstance(node, dict):
        return None
    tag = node.get("$")
    if tag is None:
        return node
    if tag not in ("dict", "odict"):
        return None
    try:
        return {decode_tree(name): child for name, child in node["v"]}
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"the checkpoint holds a malformed {tag}: {error!r}") from error


def items(node: Any) -> list[Any] | None:
    """The children of a stored list or tuple, or None for anything else."""
    if isinstance(node, list):
        return node
    if _tag(node) != "tuple":
        return None
    if not isinstance(node.get("v"), list):
        raise CorruptionError("the checkpoint holds a malformed tuple")
    children: list[Any] = node["v"]
    return children


def leaf_paths(node: Any, path: str) -> list[str]:
    """The paths of everything under a node, dict keys and list positions joined by dots."""
    found: list[str] = []
    _add_leaf_paths(node, path, found)
    return found


def _add_leaf_paths(node: Any, path: str, found: list[str]) -> None:
    if not isinstance(node, dict | list):
        found.append(path)
        return
    if isinstance(node, dict) and node.get("$") == "per_rank":
        for label, child in node["v"].items():
            _add_leaf_paths(child, f"{path}[{label}]", found)
        return
    named = entries(node)
    if named is None:
        named = dict(enumerate(items(node) or ()))
    if not named:
        found.append(path)
    for name, child in named.items():
        if isinstance(child, dict) and child.get("$") == "tensor":
            found.append(f"{path}.{name}")
        else:
            _add_leaf_paths(child, f"{path}.{name}", found)


class Matcher:
    """Matches templates against stored nodes on one rank, then builds the loaded trees.

    `tensors`: key -> (dtype name, global shape) of the checkpoint, in the order of its table.
    `allow_missing`: patterns (`fnmatch`) of paths that may be absent. `cast`: whether another
    stored dtype is accepted.
    """

    def __init__(
        self,
        *,
        tensors: StoredTensors,
        layout: Layout,
        rank: int,
        codecs: Codecs,
        allow_missing: tuple[str, ...] = (),
        cast: bool = False,
    ) -> None:
        self._tensors = tensors
        self._positions = {key: i for i, key in enumerate(tensors)}
        self._layout = layout
        self._rank = rank
        self._codecs = codecs
        self._allow_missing = allow_missing
        self._cast = cast
        self._fresh: dict[str, torch.Tensor] = {}
        self._domains: Domains = {}
        self._sources: dict[int, str] = {}
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._paddings: dict[int, tuple[torch.Tensor, ...]] = {}
        self.result = MatchResult()

    def move_to(self, layout: Layout) -> None:
        """What follows lives on this layout."""
        self._layout = layout

    def may_miss(self, path: str) -> bool:
        """Whether the caller allowed this path to be absent."""
        return any(fnmatchcase(path, pattern) for pattern in self._allow_missing)

    def match(self, template: object, node: Any, path: str) -> None:
        """Record what the template asks for and whether the stored node has it."""
        if isinstance(template, Stored):
            self._want_all(node, path)
        elif isinstance(template, Transient):
            self.result.touched.update(leaf_paths(node, path))
        elif isinstance(template, PerRank):
            self._match_per_rank(template, node, path)
        elif is_tensor_like(template):
            self._match_tensor(template, node, path)
        elif isinstance(template, Mapping):
            self._match_mapping(template, node, path)
        elif isinstance(template, list | tuple) and _holds_tensors(template):
            self._match_sequence(template, node, path)
        else:
            self._match_value(template, node, path)

    def build(self, template: object, node: Any, path: str, *, closed: bool) -> Any:
        """The loaded tree for a template whose targets have been filled; sets padding to zero.

        `closed`: stored entries that the template does not name are left out.
        """
        if isinstance(template, Transient):
            return template.value
        if isinstance(template, PerRank):
            label = self._label(template, path)
            inner = node["v"].get(label) if _tag(node) == "per_rank" else None
            if inner is None:
                return None if isinstance(template.tree, Stored) else template.tree
            return self.build(template.tree, inner, f"{path}[{label}]", closed=closed)
        if isinstance(template, torch.Tensor):
            return template
        if isinstance(template, Marked):
            for view in self._paddings.get(id(template), ()):
                view.zero_()
            return template.local
        named = entries(node)
        if isinstance(template, Mapping) and named is not None:
            found = {
                name: template[name]
                if name in template and type(template[name]) in _PLAIN
                else self.build(template[name], child, f"{path}.{name}", closed=closed)
                if name in template
                else self._decode(child, f"{path}.{name}")
                for name, child in named.items()
                if name in template or not closed
            }
            return found | self._left(template, path, found)
        if isinstance(template, list | tuple) and _holds_tensors(template):
            built = [
                self.build(t, child, f"{path}.{i}", closed=closed)
                for i, (t, child) in enumerate(zip(template, items(node) or (), strict=True))
            ]
            return built if isinstance(template, list) else tuple(built)
        return self._decode(node, path)

    def _match_mapping(self, template: Mapping[Any, object], node: Any, path: str) -> None:
        named = entries(node)
        if named is None:
            if any(_holds_tensors(v) for v in template.values()):
                self.result.mismatched.append(
                    f"{path}: the state has a mapping here, the checkpoint {_kind(node)}"
                )
            else:
                self._want_all(node, path)
            return
        if not named:
            self.result.touched.add(path)
        for name, child in template.items():
            here = f"{path}.{name}"
            if name in named:
                if type(child) in _PLAIN and isinstance(child, torch.Tensor):
                    self._match_tensor(child, named[name], here)
                else:
                    self.match(child, named[name], here)
            elif not isinstance(child, Transient):
                self._miss(here, child)

    def match_rest(self, template: object, node: Any, path: str) -> None:
        """For an open part: ask for the stored entries that the template did not name."""
        named = entries(node)
        if isinstance(template, Mapping) and named is not None:
            for name, child in named.items():
                if name in template:
                    if type(template[name]) in _PLAIN:
                        continue
                    self.match_rest(template[name], child, f"{path}.{name}")
                else:
                    self._want_all(child, f"{path}.{name}")

    def _match_sequence(self, template: Any, node: Any, path: str) -> None:
        children = items(node)
        if children is None or len(children) != len(template):
            self.result.mismatched.append(
                f"{path}: the state has a sequence of {len(template)} here, the checkpoint "
                f"{_kind(node)}"
            )
            return
        for i, (item, child) in enumerate(zip(template, children, strict=True)):
            self.match(item, child, f"{path}.{i}")

    def _match_value(self, template: object, node: Any, path: str) -> None:
        if _tag(node) == "tensor":
            self.result.mismatched.append(
                f"{path}: the state has a value ({type(template).__name__}) here, the checkpoint "
                f"a tensor; ask for it with Stored()"
            )
            return
        self._want_all(node, path)

    def _match_per_rank(self, template: PerRank, node: Any, path: str) -> None:
        if _tag(node) != "per_rank" or sorted(node["axes"]) != sorted(template.axes):
            self.result.mismatched.append(
                f"{path}: the state has a value per {','.join(template.axes)} here, the checkpoint "
                f"{_kind(node)}"
            )
            return
        self.result.touched.update(leaf_paths(node, path))
        label = self._label(template, path)
        here = f"{path}[{label}]"
        if label in node["v"]:
            self.match(template.tree, node["v"][label], here)
        elif template.missing == "keep" or self.may_miss(here):
            self.result.kept.append(here)
        else:
            self.result.missing.append(here)

    def _match_tensor(self, template: torch.Tensor | Marked, node: Any, path: str) -> None:
        held_dtype, held_shape, boxes, locals_ = self._held(template, path)
        if _tag(node) not in ("tensor", "array"):
            self.result.mismatched.append(
                f"{path}: the state has a tensor here, the checkpoint {_kind(node)}"
            )
            return
        key = node["k"]
        dtype, shape = self._tensors[key]
        self.result.touched.add(path)
        is_new = id(template) not in self._sources
        source = self._sources.setdefault(id(template), key)
        if source != key:
            self.result.mismatched.append(
                f"{path}: the state ties this tensor to the one stored as {source}, the checkpoint "
                f"holds them as two"
            )
            return
        if shape != held_shape:
            self.result.mismatched.append(_other_shape(template, path, held_shape, shape))
        elif dtype != held_dtype and not self._cast:
            self.result.mismatched.append(
                f"{path}: the state's dtype is {held_dtype}, the checkpoint's {dtype}; "
                f"pass cast=True to convert"
            )
        else:
            if dtype != held_dtype:
                self.result.cast.append(path)
            position = self._positions[key]
            if not is_new:
                boxes, locals_ = (), ()
            self.result.wanted.append(Wanted(path, position, boxes, locals_))

    def _held(self, template: torch.Tensor | Marked, path: str) -> _Held:
        """What this rank holds of a tensor; equal to its leaf, which costs several times as much.

        Plain tensors are whole. A DTensor with the mesh, placements and shape of one met before
        has the boxes of that one.
        """
        if type(template) in _PLAIN and isinstance(template, torch.Tensor):
            dtype = TORCH_TO_NAME.get(template.dtype)
            if dtype is not None and _is_readable(template):
                return dtype, tuple(template.shape), None, (template,)
        like: tuple[object, ...] | None = None
        if type(template) is DTensor:
            local = template._local_tensor
            like = (id(template.device_mesh), template.placements, template.shape, local.shape)
            boxes = self._boxes.get(like)
            dtype = TORCH_TO_NAME.get(local.dtype)
            if boxes is not None and dtype is not None and _is_readable(local):
                return dtype, tuple(template.shape), boxes, (local,)
        leaf = tensor_leaf(
            template.value if isinstance(template, Padded) else template,
            key=path,
            layout=self._layout,
            rank=self._rank,
            domains=self._domains,
        )
        if isinstance(template, Padded):
            self._paddings[id(template)] = padding_views(leaf, template.shape)
            leaf = clip_leaf(leaf, template.shape)
        if like is not None and len(leaf.boxes) == 1 and leaf.boxes[0].shape == like[3]:
            self._boxes[like] = leaf.boxes
        return leaf.dtype, leaf.shape, leaf.boxes, leaf.locals

    def _left(self, template: Mapping[Any, object], path: str, found: Mapping[Any, object]) -> Any:
        """What stays of a template for which nothing is stored, besides what was found."""
        left: dict[Any, object] = {}
        for name, child in template.items():
            here = f"{path}.{name}"
            if name in found or (isinstance(child, Fresh) and not self.may_miss(here)):
                continue
            left[name] = self._left(child, here, {}) if type(child) is dict else _unmarked(child)
        return left

    def _miss(self, path: str, template: object) -> None:
        if isinstance(template, Fresh):
            if self.may_miss(path):
                self.result.fresh.append(path)
            elif template.is_required:
                self.result.unagreed.append(f"{path} ({template.why})")
        elif self.may_miss(path):
            self.result.allowed.append(path)
        elif isinstance(template, Mapping) and template:
            for name, child in template.items():
                self._miss(f"{path}.{name}", child)
        else:
            self.result.missing.append(path)

    def _want_all(self, node: Any, path: str) -> None:
        """Ask for everything under a node; tensors get new memory, each one once."""

        def want(where: str, inner: dict[str, Any]) -> object:
            if inner["$"] in ("tensor", "array"):
                self._want_new(str(inner["k"]), where)
            elif inner["$"] == "per_rank":
                label = self._own_label(inner, where)
                if label in inner["v"]:
                    self._want_all(inner["v"][label], where)
            return None

        decode_tree(node, path=path, codecs=self._codecs, on_leaf=want)
        self.result.touched.update(leaf_paths(node, path))

    def _want_new(self, key: str, path: str) -> None:
        if key in self._fresh:
            return
        dtype, shape = self._tensors[key]
        target = torch.zeros(shape, dtype=torch_dtype(dtype))
        self._fresh[key] = target
        self.result.wanted.append(Wanted(path, self._positions[key], None, (target,), True))

    def _decode(self, node: Any, path: str) -> Any:
        def value(where: str, inner: dict[str, Any]) -> object:
            if inner["$"] == "tensor":
                return self._fresh[str(inner["k"])]
            if inner["$"] == "array":
                return self._fresh[str(inner["k"])].numpy()
            if inner["$"] == "per_rank":
                return self._decode(inner["v"].get(self._own_label(inner, where)), where)
            return None

        return decode_tree(node, path=path, codecs=self._codecs, on_leaf=value)

    def _own_label(self, node: Mapping[str, Any], path: str) -> str:
        return coordinate_label(self._layout, self._rank, tuple(node["axes"]), path=path)

    def _label(self, template: PerRank, path: str) -> str:
        return coordinate_label(self._layout, self._rank, tuple(template.axes), path=path)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether `tensor_leaf` has nothing to say against a plain tensor."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
        and type(tensor) in _PLAIN
    )


def _unmarked(template: object) -> object:
    """What stays of a template for which nothing is stored: the tensors as they are."""
    return template.local if isinstance(template, Marked) else template


def _other_shape(
    template: torch.Tensor | Marked, path: str, held: tuple[int, ...], stored: tuple[int, ...]
) -> str:
    """In words: the state and the checkpoint differ in shape, and whether padding may be why."""
    said = f"{path}: the state's shape is {list(held)}, the checkpoint's {list(stored)}"
    if isinstance(template, Padded):
        return f"{said}; the state's is declared as the real one of {list(template.padded_shape)}"
    if len(held) == len(stored):
        said += (
            "; if they differ by padding alone, declare the real shape where it is saved and where "
            "it is loaded: declare_padding(module, name, shape), Padded(value, shape)"
        )
    return said


def _tag(node: Any) -> str | None:
    return node.get("$") if isinstance(node, Mapping) else None


def _kind(node: Any) -> str:
    tag = _tag(node)
    if tag == "per_rank":
        return f"a value per {','.join(node['axes'])}"
    if tag is not None:
        return f"a {tag}"
    if isinstance(node, dict):
        return "a mapping"
    return f"a list of {len(node)}" if isinstance(node, list) else f"a {type(node).__name__}"


def _holds_tensors(tree: object) -> bool:
    if is_tensor_like(tree) or isinstance(tree, PerRank | Stored | Transient | np.ndarray):
        return True
    if isinstance(tree, Mapping):
        return any(_holds_tensors(child) for child in tree.values())
    if isinstance(tree, list | tuple):
        return any(_holds_tensors(child) for child in tree)
    return False

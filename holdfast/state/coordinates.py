"""Values per coordinate: whose value a rank takes, what no rank takes, what has to be equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from holdfast.errors import CorruptionError, LayoutError, MismatchError, PlacementError
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES, Layout
from holdfast.state.markers import Marked, PerRank, Union
from holdfast.state.registered_types import RegisteredTypes
from holdfast.state.tensor_elements import instances_in


class ConsistencyCheck(NamedTuple):
    """A value that all ranks of one `label` must have alike after the load."""

    what: str
    """Path of the value."""
    along: str
    """The axes along which it is shared, for people."""
    label: str
    digest: str
    """Of the value, or a name for where it comes from."""
    is_certain: bool
    """True if a difference is an error."""


@dataclass(slots=True, kw_only=True)
class PerRankSource:
    """The stored coordinates from which one rank takes its value."""

    labels: tuple[str, ...] = ()
    """Stored coordinates whose trees it reads."""
    here: str = ""
    """Its own coordinate, along the axes that are stored."""
    is_merged: bool = False
    """True if `merge` makes the value of all trees by label."""
    is_picked: bool = False
    """True if the owner gets all trees by label."""
    problem: str | None = None
    """One sentence, if the request cannot be met."""
    names: frozenset[str] | None = None
    """The entries that are used, if not all are."""
    kept: tuple[str, ...] = ()
    """Entries that keep their local value; "" for all of them."""
    missing: tuple[str, ...] = ()
    """Entries that are requested and not stored."""
    dropped: tuple[str, ...] = ()
    """Entries that nothing here can take."""
    checks: list[ConsistencyCheck] = field(default_factory=list)
    """Values that must be equal on several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRankRequest:
    """A rank that requests a value per coordinate, and what is stored of it."""

    path: str
    layout: Layout
    rank: int
    axes: tuple[str, ...]
    """The axes that the stored value has."""
    stored: Mapping[str, Any]
    """Label -> node."""

    @property
    def here(self) -> str:
        """This rank's label along the stored axes."""
        return coordinate_label(self.layout, self.rank, self.axes, path=self.path)


@dataclass(frozen=True, slots=True, eq=False)
class PickedPerRank(PerRank):
    """A value per coordinate whose owner picks the stored coordinates that a rank takes."""

    pick: Callable[[PerRankRequest], PerRankSource] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SomePerRank(PerRank):
    """A dict per coordinate of which the owner gets some entries, by label."""

    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class PerRankIn(PerRank):
    """A marker in the state of an object, which gets `local` back if its value stays."""

    local: object = None


def parse_label(label: str) -> dict[str, int]:
    """Return the coordinates of a checked label: "dp=1,tp=0" -> {dp: 1, tp: 0}."""
    pairs = (pair.split("=") for pair in label.split(","))
    return {axis: int(index) for axis, index in pairs}


def stored_trees(node: Any, *, path: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the axes and the nodes by label of a stored value per coordinate."""
    axes, trees = node.get("axes"), node.get("v")
    if not isinstance(axes, list) or not isinstance(trees, dict) or not trees:
        raise CorruptionError(f"{path}: the checkpoint holds a malformed value per coordinate")
    for label in trees:
        try:
            is_right = sorted(parse_label(label)) == sorted(map(str, axes))
        except ValueError:
            is_right = False
        if not is_right:
            raise CorruptionError(f"{path}: {label!r} is not a coordinate along {', '.join(axes)}")
    return tuple(axes), trees


def find_source(
    marker: PerRank, node: Any, *, layout: Layout, rank: int, path: str
) -> PerRankSource:
    """Return which of the stored trees a rank takes under the policy of its marker."""
    axes, trees = stored_trees(node, path=path)
    if isinstance(marker, PickedPerRank) and marker.pick is not None:
        return marker.pick(
            PerRankRequest(path=path, layout=layout, rank=rank, axes=axes, stored=trees)
        )
    here = coordinate_label(layout, rank, marker.axes, path=path)
    short = _by_label_along(marker.axes, axes, trees)
    if marker.merge is not None:
        mine = {coordinate_label(layout, r, marker.axes, path=path) for r in layout.ranks}
        if short is None or set(short) != mine:
            labels = _in_order(trees, [axis for axis in marker.axes if axis in axes])
            return PerRankSource(labels=labels, here=here, is_merged=True)
    if short is None:
        return PerRankSource(here=here, problem=_other_axes(marker, axes, trees, path=path))
    labels = (short[here],) if here in short else ()
    if isinstance(marker, SomePerRank) and labels:
        return PerRankSource(labels=labels, here=here, is_picked=True, names=marker.names)
    return PerRankSource(labels=labels, here=here)


def _by_label_along(
    requested: Sequence[str], axes: Sequence[str], trees: Mapping[str, Any]
) -> dict[str, str] | None:
    """Return the stored label for each label along the requested axes; None if that is ambiguous.

    A stored axis that is not requested may be left out if it has one coordinate only.
    """
    if set(requested) == set(axes):
        return {label: label for label in trees}
    extra = set(axes) - set(requested)
    if not set(requested) <= set(axes):
        return None
    result: dict[str, str] = {}
    beyond: set[tuple[int, ...]] = set()
    for label in trees:
        at = parse_label(label)
        beyond.add(tuple(at[axis] for axis in sorted(extra)))
        result[",".join(f"{axis}={at[axis]}" for axis in sorted(requested))] = label
    return result if len(beyond) == 1 else None


def _other_axes(
    marker: PerRank, axes: Sequence[str], trees: Mapping[str, Any], *, path: str
) -> str:
    """Return why a value per other axes than the requested ones cannot be taken, in words."""
    message = (
        f"{path}: the state has a value per {','.join(marker.axes)} here, the checkpoint a value "
        f"per {','.join(axes)}"
    )
    more = sorted(set(axes) - set(marker.axes))
    if set(marker.axes) <= set(axes):
        message += f", and {len(trees)} of them, so that it is not clear which to take along {more}"
    return (
        f"{message}; ask for it with axes={tuple(axes)}, or make one of what is stored: "
        f"PerRank(..., merge=callable)"
    )


def _in_order(labels: Iterable[str], axes: Sequence[str]) -> tuple[str, ...]:
    """Return labels by ascending coordinates, the first of `axes` most significant."""

    def position(label: str) -> tuple[int, ...]:
        at = parse_label(label)
        return tuple(at[axis] for axis in (*axes, *sorted(set(at) - set(axes))))

    return tuple(sorted(labels, key=position))


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return True if a path, with or without the coordinate it ends in, fits a pattern (`fnmatch`).

    A pattern that is the path itself fits, too, though brackets mean something else in patterns.
    """
    names = {path, path[: path.rindex("[")]} if path.endswith("]") and "[" in path else {path}
    return any(
        name == pattern or fnmatchcase(name, pattern) for name in names for pattern in patterns
    )


def fill_from_merged(template: Any, merged: Any, path: str, *, registered: RegisteredTypes) -> Any:
    """Return a merged tree in which the template's own tensors are filled.

    Raises:
        MismatchError: One of them would be left as it was, or filled with rounded values.
    """
    fill = partial(fill_from_merged, registered=registered)
    if isinstance(template, Union):
        template = template.mapping
    target = template.local if isinstance(template, Marked) else template
    if isinstance(target, torch.Tensor):
        if not isinstance(merged, torch.Tensor) or merged.shape != target.shape:
            result = list(merged.shape) if isinstance(merged, torch.Tensor) else merged
            raise MismatchError(
                f"{path}: merge returned {result!r} for a tensor of shape {list(target.shape)}"
            )
        with torch.no_grad():
            if not _fits(merged, target.dtype):
                raise MismatchError(
                    f"{path}: merge returned {merged.dtype} values that a {target.dtype} tensor "
                    f"cannot hold; let it return {target.dtype}"
                )
            target.copy_(merged)
        return target
    if isinstance(template, Mapping) and type(merged) is dict:
        for name in template:
            if name not in merged:
                _refuse_tensors(template[name], f"{path}.{name}")
        return {
            name: fill(template[name], child, f"{path}.{name}") if name in template else child
            for name, child in merged.items()
        }
    if type(template) in (list, tuple) and type(merged) is type(template):
        pairs = enumerate(zip_longest(template, merged))
        filled = [fill(old, new, f"{path}.{i}") for i, (old, new) in pairs]
        return type(merged)(filled[: len(merged)])
    inner = registered.fields_of(template)
    if inner is not None and type(merged) is type(template):
        return registered.made_of(template, fill(inner, registered.fields_of(merged), path), path)
    _refuse_tensors(template if inner is None else inner, path)
    return merged


def _fits(merged: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if every value of the tensor is one of that dtype."""
    if merged.dtype == dtype:
        return True
    if merged.is_complex() and not dtype.is_complex:
        return False
    held = merged.detach()
    # Floats are compared in the widest type, integers in their own, which float64 does not hold.
    wide = torch.complex128 if held.is_complex() else torch.float64
    exact = wide if held.is_complex() or held.is_floating_point() else held.dtype
    held, back = held.to(exact), held.to(dtype).to(exact)
    same = held == back
    if exact is wide:
        same |= held.isnan() & back.isnan()
    return bool(same.all())


def _refuse_tensors(template: object, path: str) -> None:
    """Raise MismatchError if the template has a tensor, which nothing fills."""
    for where, _ in instances_in(template, torch.Tensor | Marked, path):
        raise MismatchError(
            f"{where}: merge returned nothing for this tensor of the marker's tree, which would "
            f"stay as it was; return one, or leave it out of the tree"
        )


def coordinate_label(layout: Layout, rank: int, axes: Iterable[str], *, path: str) -> str:
    """Return this rank's coordinates along `axes` as text: `cp=0,dp=1,pp=0,tp=1`."""
    known = layout.coordinates(rank)
    # Sorted, so that the label does not depend on the order in which axes were declared.
    named = sorted(axes)
    unknown = [axis for axis in named if axis not in known]
    if not unknown:
        return ",".join(f"{axis}={known[axis]}" for axis in named)
    if set(unknown) <= set(EXPERT_AXES):
        raise LayoutError(
            f"{path}: PerRank axes {unknown} are of the expert view, which {layout} does not have; "
            f"its axes are {', '.join(DENSE_AXES)}"
        )
    raise PlacementError(
        f"{path}: PerRank axes {unknown} are not axes of layout '{layout.name}', which has "
        f"{', '.join(sorted(known))}"
    )

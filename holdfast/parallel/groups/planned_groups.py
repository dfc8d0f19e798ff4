"""What a layout plans: the groups to make, the ranks of supplied ones, the grid of a mesh.

Answers for one rank, from the layout alone: nothing is sent and no communicator is made.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.errors import GroupError, HoldfastError, LayoutError
from holdfast.parallel.groups import _torch
from holdfast.parallel.layout import CLONED, GROUP_NAMES, Layout, runs_along_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group that the ranks of a layout make."""

    ranks: tuple[int, ...]
    """The ordered ranks of this rank's group; empty on a rank that is in none of this name."""
    twin: str | None
    """The group planned before it whose communicator it shares; None if it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator and its verified members, in order."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    axes: str
    """The group of the layout whose members these are; for a clone that of its source."""


def plan_groups(
    layout: Layout, names: Iterable[str] | None, *, rank: int
) -> dict[str, PlannedGroup]:
    """Return the groups to make, in the order in which every rank makes them.

    Groups with equal lists of ranks share a communicator, unless they are over data ranks or
    clones. They have equal lists on every member, so all members share it.

    Args:
        layout: plans the ranks of each group.
        names: the groups to make; by default every named group, the `_intra` and `_inter` slices
            only if the layout has replicas. Groups of one rank are left out.
        rank: the rank to plan for.

    Raises:
        GroupError: A name is unknown, or a clone is made without its source.
    """
    chosen = _default_names(layout) if names is None else _resolve_names(layout, names)
    planned: dict[str, PlannedGroup] = {}
    sharing: dict[tuple[int, ...], str] = {}
    for name in chosen:
        if name == "control":
            raise GroupError("'control' is always made: it is available as groups.control.")
        try:
            size = layout.size(name)
        except LayoutError as error:
            raise GroupError(f"Cannot create {name!r}: {error}") from None
        if size == 1:
            continue
        source = CLONED.get(name)
        if source is not None and source not in chosen:
            raise GroupError(f"{name!r} is a clone of {source!r}: create {source!r} with it.")
        ranks = layout.group(name, rank) if layout.has_group(name, rank) else ()
        first = name if runs_along_data(name) else sharing.setdefault(ranks, name)
        planned[name] = PlannedGroup(ranks=ranks, twin=None if first == name else first)
    return planned


def describe(layout: Layout, names: Sequence[str], backend: str) -> tuple[str, str]:
    """Return what all ranks must propose alike: a line for messages, and the whole content."""
    text = f"{layout}, groups {', '.join(names) or 'none'} ({backend})"
    content = {"layout": layout.to_dict(), "names": list(names), "backend": backend}
    return text, json.dumps(content, sort_keys=True)


def check_supplied(
    layout: Layout, supplied: Mapping[str, ProcessGroup], *, rank: int
) -> dict[str, Communicator]:
    """Return each supplied communicator with its ranks; GroupError lists every wrong one."""
    held: dict[str, Communicator] = {}
    errors = []
    for key in _in_order(supplied):
        name, group = key, supplied[key]
        try:
            if name == "control":
                raise GroupError("is made here and never supplied")
            name = layout.resolve(key)
            planned = layout.group(name, rank)
            _check_ranks(group, planned)
            if name in held and held[name].group is not group:
                raise GroupError(
                    f"is the group {name!r}, for which another communicator was supplied, too"
                )
            twin = held.get(CLONED.get(name) or "")
            if twin is not None and twin.group is group and len(planned) > 1:
                raise GroupError(f"must be another communicator than {twin.axes!r}")
            held[name] = Communicator(group=group, ranks=planned, axes=name)
        except HoldfastError as error:
            errors.append(f"{key!r} {error}")
    if errors:
        raise GroupError(
            f"Supplied groups do not fit {layout} on rank {rank}: {'; '.join(errors)}."
        )
    return held


def names_on_every_rank(layout: Layout, supplied: Iterable[str]) -> list[str]:
    """Return the supplied groups that every rank must supply, by the layout's names for them."""
    names = {resolved(layout, name) for name in supplied}
    return sorted(names - {"embd", "pos_embd"})  # some stages have none to supply


def resolved(layout: Layout, name: str) -> str:
    """Return the layout's name of a group; a name that the layout refuses as it is."""
    try:
        return layout.resolve(name)
    except LayoutError:
        return name


def plan_grid(layout: Layout, axes: Mapping[str, str], *, rank: int) -> IntArray:
    """Return the ranks reached from `rank` by walking each group in turn, one dim for each.

    `DeviceMesh.from_group` takes any groups for any table of ranks, so this check is ours: every
    line along a dim is the group of its members. Then no rank is in the grid twice, since its place
    along each dim is its index in that group.

    Args:
        layout: plans the groups.
        axes: the axes that each group of the mesh runs along, by its name, slowest first.
        rank: a member of all of these groups.

    Raises:
        GroupError: The groups do not form a grid.
    """
    sizes = [layout.size(each) for each in axes.values()]
    ranks = []
    for place in itertools.product(*map(range, sizes)):
        at = rank
        for each, index in zip(axes.values(), place, strict=True):
            at = layout.group(each, at)[index]
        ranks.append(at)
    grid = np.array(ranks, dtype=np.int64).reshape(sizes)
    for dim, each in enumerate(axes.values()):
        lines = np.moveaxis(grid, dim, -1).reshape(-1, sizes[dim]).tolist()
        if any(tuple(line) != layout.group(each, line[0]) for line in lines):
            raise GroupError(
                f"Groups {', '.join(axes)} of {layout} do not form a grid of "
                f"{' x '.join(map(str, sizes))} = {len(ranks)} ranks: they share an axis, or "
                "belong to different views."
            )
    return grid


def _default_names(layout: Layout) -> list[str]:
    """Return the groups that are made if no names are given, as far as the layout has them."""
    return [
        name
        for name in GROUP_NAMES
        if (layout.replicas > 1 or not name.removesuffix("_ag").endswith(("_intra", "_inter")))
        and (layout.has_expert_view or not layout.is_expert_group(name))
    ]


def _resolve_names(layout: Layout, names: Iterable[str]) -> list[str]:
    """Return the chosen groups by the layout's names, in the order of creation."""
    try:
        return _in_order({layout.resolve(name) for name in names})
    except LayoutError as error:
        raise GroupError(f"Cannot create groups: {error}") from None


def _in_order(names: Iterable[str]) -> list[str]:
    """Return names in the order of creation; groups named by their axes come last."""
    place = {name: index for index, name in enumerate(GROUP_NAMES)}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))


def _check_ranks(group: object, planned: tuple[int, ...]) -> None:
    """Raise GroupError with both lists unless a supplied communicator has the planned ranks."""
    try:
        actual = _torch.group_ranks(group)
    except GroupError as error:
        raise GroupError(f"{error}; planned are ranks {list(planned)}") from None
    if actual == list(planned):
        return
    missing = sorted(set(planned) - set(actual))
    extra = sorted(set(actual) - set(planned))
    if missing or extra:
        how = f"missing {missing}, extra {extra}"
    else:
        how = "the same ranks in another order, and shards are cut by position"
    raise GroupError(f"has ranks {actual}, but planned are {list(planned)}: {how}")

"""Several modules, each with its own layout, and the edges along which they feed each other.

A model of several modules (a vision encoder, a projector, a language model) is trained on ranks
that each have one module (*disjoint* spans) or several (*colocated*: equal spans). This is data,
like a single layout, and is checked before any communicator is made. It needs no torch.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from holdfast.errors import LayoutError, shorten_ranks
from holdfast.parallel.layout import Layout, digest_of

_UNNAMED = "model"
"""The default name of a layout."""
_UNNAMED_MODULES = "modules"
"""The default name of module layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRole:
    """The place of a rank in one module."""

    module: str
    """The module's name."""
    coordinates: Mapping[str, int]
    """The rank's coordinates in the module's layout, in every view that it has."""
    is_first_stage: bool
    """True if the rank has the module's first pipeline stage, which receives from other modules."""
    is_last_stage: bool
    """True if the rank has the last pipeline stage, whose result is sent."""


class ModuleLayouts(Mapping[str, Layout]):
    """The layouts of all modules by name, and the edges along which activations flow.

        layouts = ModuleLayouts(
            {"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))},
            edges=[("vision", "language")],
        )

    Pure data: equal ones have equal digests. Communicators are made in the order of the mapping. A
    layout without a name takes the module's, prefixed with `name` if that is given.

    Args:
        layouts: by module name. Two modules are on the same ranks or share no rank.
        edges: (source, destination) pairs of modules. One of the two data widths divides the
            other, so that each data rank of one side exchanges with whole data ranks of the other.
        ranks: every rank that must have a module; by default the range from the lowest to the
            highest rank of any module. Other ranks of the job take no part.
        name: for messages. Ranks find each other by it, so if one program has several module
            layouts, each needs its own.

    Raises:
        LayoutError: `layouts` is empty; a module's name is not an identifier; spans overlap without
            being equal; ranks are in no module; two layouts have the same name; an edge names an
            unknown module, is given twice, is part of a cycle, or joins data widths of which
            neither divides the other. The message has the spans.
    """

    __slots__ = ("_layouts", "edges", "name", "union")

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        *,
        edges: Iterable[tuple[str, str]] = (),
        ranks: Sequence[int] | None = None,
        name: str = _UNNAMED_MODULES,
    ) -> None:
        """Check and store; see the class."""
        if not layouts:
            raise LayoutError(
                "No modules were given: pass at least one layout, by its module's name."
            )
        for module in layouts:
            _check_name(module)
        self.name = name
        prefix = "" if name == _UNNAMED_MODULES else f"{name}: "
        self._layouts = {m: _named(layouts[m], m, prefix=prefix) for m in layouts}
        self._check_names_of_layouts()
        self._check_spans()
        self.union = self._make_union(ranks)
        """The layout of all ranks, by number: what agreement and a checkpoint of all run on."""
        self.edges: tuple[tuple[str, str], ...] = tuple(map(_checked_edge, edges))
        """(source, destination) pairs, in the order given."""
        self._check_edges()

    def __getitem__(self, module: str) -> Layout:
        """Return the layout of a module; LayoutError, not a KeyError, for an unknown one."""
        try:
            return self._layouts[module]
        except KeyError:
            raise LayoutError(
                f"Unknown module {module!r} of {self.name!r}; the modules are {self._spans()}."
            ) from None

    def __contains__(self, module: object) -> bool:
        """Return True if there is a module of this name."""
        return module in self._layouts

    def __iter__(self) -> Iterator[str]:
        """Iterate over the modules' names, in order."""
        return iter(self._layouts)

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._layouts)

    def __eq__(self, other: object) -> bool:
        """Return True if names, layouts, their order and edges are equal."""
        return isinstance(other, ModuleLayouts) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        """Return the hash of the digest."""
        return hash(self.digest())

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """Return the modules that a rank has, in order; empty for a rank of no module."""
        return tuple(module for module, layout in self.items() if rank in layout.ranks)

    def roles_of(self, rank: int) -> dict[str, ModuleRole]:
        """Return the role of a rank in each module that it has."""
        roles = {}
        for module in self.modules_of(rank):
            layout = self[module]
            coordinates = layout.coordinates(rank)
            roles[module] = ModuleRole(
                module=module,
                coordinates=coordinates,
                is_first_stage=coordinates["pp"] == 0,
                is_last_stage=coordinates["pp"] == layout.pp - 1,
            )
        return roles

    def are_colocated(self, one: str, other: str) -> bool:
        """Return True if two modules are on the same ranks; otherwise they share no rank."""
        return set(self[one].ranks) == set(self[other].ranks)

    def of_edge(self, edge: tuple[str, str]) -> Layout:
        """Return the layout of all ranks of both modules of an edge, by number, as data ranks."""
        source, destination = edge
        ranks = sorted({*self[source].ranks, *self[destination].ranks})
        return Layout(dp=len(ranks), ranks=ranks, name=f"{self.name}: {source} -> {destination}")

    def to_dict(self) -> dict[str, Any]:
        """Return every field as JSON-able values; `from_dict` is the inverse."""
        return {
            "name": self.name,
            "ranks": list(self.union.ranks),
            "layouts": [[module, layout.to_dict()] for module, layout in self.items()],
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModuleLayouts:
        """Return the module layouts of such a `to_dict`; LayoutError for other fields."""
        known = {"name", "ranks", "layouts", "edges"}
        if set(values) != known:
            raise LayoutError(
                f"Not the fields of module layouts: {sorted(values)}; expected {sorted(known)}."
            )
        return cls(
            {module: Layout.from_dict(layout) for module, layout in values["layouts"]},
            edges=[(source, destination) for source, destination in values["edges"]],
            ranks=values["ranks"],
            name=values["name"],
        )

    def digest(self) -> str:
        """Return 32 hex digits, equal exactly for equal module layouts."""
        return digest_of(self.to_dict())

    def __repr__(self) -> str:
        """Show name, modules with their layouts, and edges."""
        arrows = "".join(f", {source} -> {destination}" for source, destination in self.edges)
        return f"ModuleLayouts({self.name!r}: {'; '.join(map(str, self.values()))}{arrows})"

    def _spans(self) -> str:
        """Return each module's ranks, for messages."""
        return ", ".join(f"{m!r} on ranks {shorten_ranks(o.ranks)}" for m, o in self.items())

    def _check_names_of_layouts(self) -> None:
        """Raise LayoutError if two layouts have the same name: ranks find each other by it."""
        seen: dict[str, str] = {}
        for module, layout in self.items():
            if layout.name == self.name:
                raise LayoutError(
                    f"The layout of module {module!r} has the name of all modules together, "
                    f"{self.name!r}. Give the module layouts another name with name=."
                )
            if layout.name in seen:
                raise LayoutError(
                    f"The layouts of modules {seen[layout.name]!r} and {module!r} have the same "
                    f"name, {layout.name!r}. Leave the name out, or give each its own."
                )
            seen[layout.name] = module

    def _check_spans(self) -> None:
        """Raise LayoutError if two modules share some of their ranks, but not all."""
        for (one, first), (other, second) in combinations(self.items(), 2):
            shared = set(first.ranks) & set(second.ranks)
            if shared and not set(first.ranks) == set(second.ranks):
                raise LayoutError(
                    f"Modules {one!r} on ranks {shorten_ranks(first.ranks)} and {other!r} on ranks "
                    f"{shorten_ranks(second.ranks)} share ranks {shorten_ranks(sorted(shared))}, "
                    f"but not all. Put two modules on the same ranks, or on different ones."
                )

    def _make_union(self, ranks: Sequence[int] | None) -> Layout:
        """Return the layout of all ranks; LayoutError if one has no module or is not in `ranks`."""
        held = sorted({rank for layout in self.values() for rank in layout.ranks})
        expected = list(range(held[0], held[-1] + 1)) if ranks is None else sorted(set(ranks))
        idle = sorted(set(expected) - set(held))
        if idle:
            raise LayoutError(
                f"Ranks {shorten_ranks(idle)} have no module: {self._spans()}. Give them one, or "
                f"list the ranks that take part with ranks=."
            )
        stray = sorted(set(held) - set(expected))
        if stray:
            raise LayoutError(
                f"Ranks {shorten_ranks(stray)} have a module, but are not among ranks="
                f"{shorten_ranks(expected)}: {self._spans()}. Add them to ranks=."
            )
        return Layout(dp=len(held), ranks=held, name=self.name)

    def _check_edges(self) -> None:
        """Raise LayoutError for edges that nothing can flow along."""
        for edge in self.edges:
            for module in edge:
                if module not in self._layouts:
                    raise LayoutError(
                        f"Edge {edge[0]} -> {edge[1]}: unknown module {module!r}; the modules are "
                        f"{self._spans()}."
                    )
            source, destination = self[edge[0]], self[edge[1]]
            if source.dp % destination.dp and destination.dp % source.dp:
                raise LayoutError(
                    f"Edge {edge[0]} -> {edge[1]}: neither data width divides the other: "
                    f"dp={source.dp} of {source} and dp={destination.dp} of {destination}."
                )
            if self.edges.count(edge) > 1:
                raise LayoutError(f"Edge {edge[0]} -> {edge[1]} is given twice.")
        order = graphlib.TopologicalSorter[str]()
        for source_name, destination_name in self.edges:
            order.add(destination_name, source_name)
        try:
            order.prepare()
        except graphlib.CycleError as error:
            circle = " -> ".join(error.args[1])
            raise LayoutError(
                f"The edges {circle} form a cycle, so no module could run first."
            ) from None


def _check_name(module: object) -> None:
    """Raise LayoutError unless a name can start the names of a checkpoint's parts."""
    if not isinstance(module, str) or not module.isidentifier():
        raise LayoutError(
            f"A module's name starts its keys in checkpoints, so it must be a Python identifier, "
            f"got {module!r}."
        )


def _checked_edge(edge: object) -> tuple[str, str]:
    """Return a pair of names; LayoutError for anything else, such as one pair instead of a list."""
    match edge:
        case (str(source), str(destination)):
            return source, destination
    raise LayoutError(
        f"An edge is a pair of modules, (source, destination), and edges= is a list of edges; "
        f"got {edge!r} as an edge."
    )


def _named(layout: Layout, module: str, *, prefix: str) -> Layout:
    """Return the layout under the module's name, unless it has its own."""
    if not isinstance(layout, Layout):
        raise LayoutError(f"Module {module!r}: expected a Layout, got {layout!r}.")
    if layout.name != _UNNAMED:
        return layout
    return Layout.from_dict({**layout.to_dict(), "name": prefix + module})

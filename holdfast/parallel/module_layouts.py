"""Several modules, each with a layout of its own, and which of them feed which. Torch-free.

A model of several modules (a vision encoder, a projector, a language model) is trained on ranks
that each have one module (*disjoint* spans) or several (*colocated*: equal spans). Which is which
is data, like a single layout, and is checked before any communicator is made.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from holdfast.errors import LayoutError
from holdfast.parallel.layout import Layout
from holdfast.parallel.ranks import shorten_ranks

_UNNAMED = "model"
"""What a layout is called that was not given a name."""
_UNNAMED_MODULES = "modules"
"""The same of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRole:
    """What a rank is to one module."""

    module: str
    """The module's name."""
    coordinates: Mapping[str, int]
    """The rank's coordinates in the module's layout, of both views where it has both."""
    is_first_stage: bool
    """Whether it has the module's first pipeline stage, which takes what other modules send."""
    is_last_stage: bool
    """Whether it has the last pipeline stage, whose result is sent."""


class ModuleLayouts(Mapping[str, Layout]):
    """The layouts of all modules by name, and the edges along which activations flow.

        layouts = ModuleLayouts(
            {"vision": Layout(dp=2), "language": Layout(tp=2, ranks=(2, 3))},
            edges=[("vision", "language")],
        )

    Pure data: equal ones have equal digests. The order of the modules is that of the mapping; it
    decides the order in which communicators are made. A layout that was not given a name takes
    the module's, behind `name` where that was given.

    Args:
        layouts: by module name. Two modules are on the same ranks or have none in common.
        edges: (source, destination) pairs of modules; the data widths of the two divide each
            other, so that every data rank of the one side has to do with whole data ranks of the
            other.
        ranks: every rank that has to have a module; by default the range from the lowest to the
            highest rank of any. Ranks of the job outside of it take no part.
        name: for messages; where one program has several module layouts, ranks find each other by
            it, so each needs its own.

    Raises:
        LayoutError: There are no modules; a name cannot begin keys of a checkpoint; spans overlap
            without being equal; ranks are in no module; two layouts have one name; an edge names
            an unknown module, is there twice, is part of a cycle, or joins data widths of which
            neither divides the other. The spans are in the message.
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
            raise LayoutError("There are no modules: give at least one layout by its module's name")
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
        """The layout of a module; LayoutError, which is no KeyError, for an unknown one."""
        try:
            return self._layouts[module]
        except KeyError:
            raise LayoutError(
                f"There is no module {module!r} in {self.name!r}; there are {self._spans()}."
            ) from None

    def __contains__(self, module: object) -> bool:
        """Whether there is a module of this name."""
        return module in self._layouts

    def __iter__(self) -> Iterator[str]:
        """The modules' names, in order."""
        return iter(self._layouts)

    def __len__(self) -> int:
        """How many modules there are."""
        return len(self._layouts)

    def __eq__(self, other: object) -> bool:
        """Whether names, layouts, their order and edges are equal."""
        return isinstance(other, ModuleLayouts) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        """Of the digest."""
        return hash(self.digest())

    def modules_of(self, rank: int) -> tuple[str, ...]:
        """The modules that a rank has, in order; none for a rank of no module."""
        return tuple(module for module, layout in self.items() if rank in layout.ranks)

    def roles_of(self, rank: int) -> dict[str, ModuleRole]:
        """What a rank is to each module that it has."""
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
        """Whether two modules are on the same ranks; otherwise they have none in common."""
        return set(self[one].ranks) == set(self[other].ranks)

    def of_edge(self, edge: tuple[str, str]) -> Layout:
        """Return the layout of all ranks of both modules of an edge, by number, as data ranks."""
        source, destination = edge
        ranks = sorted({*self[source].ranks, *self[destination].ranks})
        return Layout(dp=len(ranks), ranks=ranks, name=f"{self.name}: {source} -> {destination}")

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON-able values; `from_dict` is the inverse."""
        return {
            "name": self.name,
            "ranks": list(self.union.ranks),
            "layouts": [[module, layout.to_dict()] for module, layout in self.items()],
            "edges": [list(edge) for edge in self.edges],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModuleLayouts:
        """The module layouts whose `to_dict` this is; LayoutError for other fields."""
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
        """32 hex digits, equal exactly for equal module layouts."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        """Name, modules with their layouts, edges."""
        arrows = "".join(f", {source} -> {destination}" for source, destination in self.edges)
        return f"ModuleLayouts({self.name!r}: {'; '.join(map(str, self.values()))}{arrows})"

    def _spans(self) -> str:
        """Each module's ranks, for messages."""
        return ", ".join(f"{m!r} on ranks {shorten_ranks(o.ranks)}" for m, o in self.items())

    def _check_names_of_layouts(self) -> None:
        """LayoutError for two layouts of one name: ranks find each other by it."""
        seen: dict[str, str] = {}
        for module, layout in self.items():
            if layout.name == self.name:
                raise LayoutError(
                    f"The layout of module {module!r} has the name of all modules together, "
                    f"{self.name!r}; give the module layouts another with name=."
                )
            if layout.name in seen:
                raise LayoutError(
                    f"Modules {seen[layout.name]!r} and {module!r} have layouts of one name, "
                    f"{layout.name!r}; leave the name out, or give each its own."
                )
            seen[layout.name] = module

    def _check_spans(self) -> None:
        """LayoutError for two modules that share some ranks, but not all."""
        for (one, first), (other, second) in combinations(self.items(), 2):
            shared = set(first.ranks) & set(second.ranks)
            if shared and not set(first.ranks) == set(second.ranks):
                raise LayoutError(
                    f"Modules {one!r} on ranks {shorten_ranks(first.ranks)} and {other!r} on ranks "
                    f"{shorten_ranks(second.ranks)} share ranks {shorten_ranks(sorted(shared))}, "
                    f"but not all: put two modules on the same ranks, or on ranks of their own."
                )

    def _make_union(self, ranks: Sequence[int] | None) -> Layout:
        """The layout of all ranks; LayoutError where some have no module, or were not expected."""
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
                f"{shorten_ranks(expected)}: {self._spans()}."
            )
        return Layout(dp=len(held), ranks=held, name=self.name)

    def _check_edges(self) -> None:
        """LayoutError for edges that nothing can flow along."""
        for edge in self.edges:
            for module in edge:
                if module not in self._layouts:
                    raise LayoutError(
                        f"Edge {edge[0]} -> {edge[1]}: there is no module {module!r}; there are "
                        f"{self._spans()}."
                    )
            source, destination = self[edge[0]], self[edge[1]]
            if source.dp % destination.dp and destination.dp % source.dp:
                raise LayoutError(
                    f"Edge {edge[0]} -> {edge[1]}: neither of the data widths divides the other, "
                    f"dp={source.dp} of {source} and dp={destination.dp} of {destination}."
                )
            if self.edges.count(edge) > 1:
                raise LayoutError(f"Edge {edge[0]} -> {edge[1]} is there twice.")
        order = graphlib.TopologicalSorter[str]()
        for source_name, destination_name in self.edges:
            order.add(destination_name, source_name)
        try:
            order.prepare()
        except graphlib.CycleError as error:
            circle = " -> ".join(error.args[1])
            raise LayoutError(
                f"The edges {circle} form a cycle: no module could be the first to run."
            ) from None


def _check_name(module: object) -> None:
    """LayoutError unless a name can be the beginning of a checkpoint's part names."""
    if not isinstance(module, str) or not module.isidentifier():
        raise LayoutError(
            f"A module's name is the beginning of its keys in checkpoints: {module!r} is not "
            f"letters, digits and underscores."
        )


def _checked_edge(edge: object) -> tuple[str, str]:
    """A pair of names; LayoutError for anything else, such as one pair in place of a list."""
    if isinstance(edge, str) or not isinstance(edge, Sequence) or len(edge) != 2:
        raise LayoutError(
            f"An edge is a pair of modules, (source, destination), and edges= a list of them; got "
            f"{edge!r} as an edge."
        )
    source, destination = edge
    return source, destination


def _named(layout: Layout, module: str, *, prefix: str) -> Layout:
    """The layout under the module's name, unless it was given one."""
    if not isinstance(layout, Layout):
        raise LayoutError(f"Module {module!r}: a {type(layout).__name__} is no Layout.")
    if layout.name != _UNNAMED:
        return layout
    return Layout.from_dict({**layout.to_dict(), "name": prefix + module})

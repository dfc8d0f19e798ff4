"""The communicators of several modules on one rank, and those along the edges between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import GroupError, LayoutError
from holdfast.parallel.control.control import Control
from holdfast.parallel.groups import building
from holdfast.parallel.groups.building import Communicators
from holdfast.parallel.groups.process_groups import ProcessGroups
from holdfast.parallel.layout import Layout
from holdfast.parallel.module_layouts import ModuleLayouts, ModuleRole
from holdfast.parallel.ranks import disagreement, shorten_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

K = TypeVar("K")
V = TypeVar("V")


class ModuleGroups:
    """`ProcessGroups` of every module that this rank has; use it as a context manager.

        with ModuleGroups.create(layouts) as groups:
            vision = groups["vision"] if groups.has("vision") else None
            checkpointer = Checkpointer(root, groups=groups.union)

    Made by `create`. A module that this rank does not have is an error by name, never None.
    """

    __slots__ = ("_edges", "_modules", "_stack", "layouts", "rank", "union")

    def __init__(
        self,
        layouts: ModuleLayouts,
        union: ProcessGroups,
        *,
        modules: Mapping[str, ProcessGroups],
        edges: Mapping[tuple[str, str], ProcessGroups],
        stack: contextlib.ExitStack,
    ) -> None:
        """Not for callers: use `create`."""
        self.layouts = layouts
        self.union = union
        """The groups of all ranks together: agreement, sums over all modules, checkpoints."""
        self.rank: int = union.rank
        self._modules = dict(modules)
        self._edges = dict(edges)
        self._stack = stack

    @classmethod
    def create(
        cls,
        layouts: ModuleLayouts,
        *,
        names: Mapping[str, Iterable[str]] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        rank: int | None = None,
        store: Store | None = None,
    ) -> ModuleGroups:
        """Make the communicators of all modules; called by all ranks of `layouts.union`.

        In one order on every rank: those of the union, of the modules in their order, of the edges
        in theirs. A rank makes only those it is a member of. What was made when one of the ranks
        fails is destroyed on all.

        Args:
            layouts: the modules, equal on all ranks.
            names: the groups to make, by module; by default those that `ProcessGroups.create` makes
                by itself, also for a module that is left out. LayoutError for other modules.
            backend, timeout_s, rank, store: as for `ProcessGroups.create`.

        Raises:
            PlanError: Ranks have different module layouts; they are named, on all ranks.
            HoldfastError: What `ProcessGroups.create` raises, on all ranks.

        Cost: that of `ProcessGroups.create` for the union, each module and each edge of this rank;
        three collectives of `control`.
        """
        create = partial(
            building.create, backend=backend, timeout_s=timeout_s, rank=rank, store=store
        )
        with contextlib.ExitStack() as stack:

            def opened(comms: Communicators) -> ProcessGroups:
                return stack.enter_context(ProcessGroups(comms))

            union = opened(create(layouts.union, names=("dp_cp",)))
            _compare(layouts, names or {}, union.control)
            create = partial(create, scope=union._comms.prefix)
            # Agreed after each, so that no rank waits for one that has failed in another module.
            modules = _agreed(
                union.control,
                "modules",
                lambda: {
                    module: opened(create(layouts[module], names=(names or {}).get(module)))
                    for module in layouts.modules_of(union.rank)
                },
            )
            edges = _agreed(
                union.control,
                "edges",
                lambda: {
                    edge: opened(create(ends, names=("dp",)))
                    for edge in layouts.edges
                    if union.rank in (ends := edge_layout(layouts, edge)).ranks
                },
            )
            return cls(layouts, union, modules=modules, edges=edges, stack=stack.pop_all())

    @property
    def control(self) -> Control:
        """Agreement between all ranks of all modules."""
        return self.union.control

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that this rank has, in order."""
        return tuple(self._modules)

    @property
    def roles(self) -> dict[str, ModuleRole]:
        """What this rank is to each module that it has."""
        return self.layouts.roles_of(self.rank)

    def has(self, module: str) -> bool:
        """Whether this rank has the module; LayoutError for one that there is not."""
        return self.rank in self.layouts[module].ranks

    def __getitem__(self, module: str) -> ProcessGroups:
        """The groups of a module; GroupError on a rank without it, saying where it is."""
        layout = self.layouts[module]
        if module not in self._modules:
            here = ", ".join(map(repr, self._modules)) or "none"
            raise GroupError(
                f"Rank {self.rank} does not have module {module!r}, which is on ranks "
                f"{shorten_ranks(layout.ranks)}; it has {here}. Ask has({module!r}) first."
            )
        return self._modules[module]

    def edge(self, source: str, destination: str) -> ProcessGroups:
        """The groups (`dp` alone) of all ranks of both modules of an edge, by number.

        GroupError for an edge that the layouts do not have, or on a rank of neither module.
        """
        if (source, destination) not in self.layouts.edges:
            known = ", ".join(f"{a} -> {b}" for a, b in self.layouts.edges) or "none"
            raise GroupError(
                f"There is no edge {source} -> {destination}; there are {known}. Edges are given "
                f"to ModuleLayouts(edges=...)."
            )
        if (source, destination) not in self._edges:
            raise GroupError(
                f"Rank {self.rank} has neither {source!r} nor {destination!r}: no edge between "
                f"them reaches it."
            )
        return self._edges[source, destination]

    def close(self) -> None:
        """Destroy what was created here, newest first; nothing happens the second time."""
        self._stack.close()

    def __enter__(self) -> ModuleGroups:
        """Return itself; leaving closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, whether or not the body raised."""
        self.close()

    def __repr__(self) -> str:
        """Layouts, rank, and the modules here."""
        return f"ModuleGroups({self.layouts!r}, rank {self.rank}, with {', '.join(self._modules)})"


def edge_layout(layouts: ModuleLayouts, edge: tuple[str, str]) -> Layout:
    """All ranks of both ends of an edge, by number, as data ranks."""
    source, destination = edge
    ranks = sorted({*layouts[source].ranks, *layouts[destination].ranks})
    return Layout(dp=len(ranks), ranks=ranks, name=f"{layouts.name}: {source} -> {destination}")


def _agreed(control: Control, what: str, make: Callable[[], dict[K, V]]) -> dict[K, V]:
    """What is made on this rank, once all ranks have made theirs; what one raises, all raise."""
    failure: Exception | None = None
    made: dict[K, V] = {}
    try:
        made = make()
    except Exception as error:
        failure = error
    control.agree(failure, phase=f"groups of all {what}")
    return made


def _compare(layouts: ModuleLayouts, names: Mapping[str, Iterable[str]], control: Control) -> None:
    """PlanError on all ranks where they were given different module layouts.

    LayoutError, on all too, where one rank chooses the groups of a module that there is not.
    """
    failure: LayoutError | None = None
    try:
        for module in names:
            _ = layouts[module]
    except LayoutError as error:
        failure = error
    rows = control.agree(failure, phase="compare module layouts", payload=layouts.digest().encode())
    texts = [row.decode() for row in rows]
    if len(set(texts)) > 1:
        raise disagreement("module groups", "the module layouts", texts, ranks=control.ranks)

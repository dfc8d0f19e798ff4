"""The communicators of several modules on one rank, and those along the edges between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch.distributed.distributed_c10d import Store

from holdfast.errors import GroupError, HoldfastError, disagreement, shorten_ranks
from holdfast.parallel.control.control import Control
from holdfast.parallel.control.guard import Guard
from holdfast.parallel.groups.crossings import Crossings
from holdfast.parallel.groups.process_groups import DATA_TIMEOUT_S, ProcessGroups
from holdfast.parallel.module_layouts import ModuleLayouts, ModuleRole


class ModuleGroups:
    """The `ProcessGroups` of every module on this rank; use it as a context manager.

        with ModuleGroups.create(layouts) as groups:
            vision = groups["vision"] if groups.has("vision") else None
            checkpointer = Checkpointer(root, groups=groups.union)

    Made by `create`. A module that this rank does not have is an error by name, never None. All
    else is asked of a module's groups, or of those of the union.
    """

    __slots__ = ("_edges", "_modules", "crossings", "layouts", "rank", "union")

    def __init__(self, layouts: ModuleLayouts, union: ProcessGroups) -> None:
        """Not for callers: use `create`."""
        self.layouts = layouts
        self.union = union
        """The groups of all ranks together: agreement, sums over all modules, checkpoints."""
        self.rank: int = union.rank
        self.crossings = Crossings(
            (edge for edge in layouts.edges if self.rank in layouts.of_edge(edge).ranks),
            union.control,
        )
        """What bridges have in progress; a step looks at it."""
        self._modules: dict[str, ProcessGroups] = {}
        self._edges: dict[tuple[str, str], ProcessGroups] = {}

    @classmethod
    def create(
        cls,
        layouts: ModuleLayouts,
        *,
        names: Mapping[str, Iterable[str]] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        data_timeout_s: float = DATA_TIMEOUT_S,
        rank: int | None = None,
        store: Store | None = None,
    ) -> ModuleGroups:
        """Make the communicators of all modules; called by all ranks of `layouts.union`.

        A rank makes only those it is a member of. If one rank fails, what was made is destroyed on
        all.

        Args:
            layouts: the modules, equal on all ranks.
            names: the groups to make, by module; for a module that is left out, those that
                `ProcessGroups.create` makes by default. LayoutError for unknown modules.
            backend, timeout_s, data_timeout_s, rank, store: as for `ProcessGroups.create`.

        Raises:
            PlanError: Ranks have different module layouts; they are named, on all ranks.
            HoldfastError: What `ProcessGroups.create` raises, on all ranks.

        Cost: that of `ProcessGroups.create` for the union, each module and each edge of this rank;
        three collectives of `control`.
        """
        create = partial(
            ProcessGroups.create,
            backend=backend,
            timeout_s=timeout_s,
            data_timeout_s=data_timeout_s,
            rank=rank,
            store=store,
        )
        union = create(layouts.union, names=("dp_cp",))
        union.module_layouts = layouts
        groups = cls(layouts, union)
        guard = Guard[None](union.control, "create module groups")
        try:
            # A module may have been on other ranks before, so its creations are counted in this
            # union alone.
            guard.run(partial(groups._make, names or {}, partial(create, scope=union._prefix)))
        except BaseException:
            groups.close()
            raise
        return groups

    def _make(
        self, names: Mapping[str, Iterable[str]], create: Callable[..., ProcessGroups]
    ) -> None:
        """Make the groups of this rank's modules, then of its edges, in the order of the layouts.

        One order on all ranks, and agreement after each kind: no rank waits for one that failed in
        another module, or that waits for it.
        """
        control = self.control
        # Phase 1: compare the layouts.
        for module in names:
            _ = self.layouts[module]  # LayoutError for an unknown one
        rows = control.agree(
            None, phase="compare module layouts", payload=self.layouts.digest().encode()
        )
        if len(set(rows)) > 1:
            digests = [row.decode() for row in rows]
            raise disagreement("module groups", "the module layouts", digests, ranks=control.ranks)
        # Phase 2: the modules.
        for module in self.layouts.modules_of(self.rank):
            self._modules[module] = create(self.layouts[module], names=names.get(module))
            control.cuts.add(self._modules[module])  # a step is one of all modules
        control.agree(None, phase="groups of all modules")
        # Phase 3: the edges. The guard's end follows, where all ranks learn if one failed.
        for edge in self.layouts.edges:
            if self.rank in (ends := self.layouts.of_edge(edge)).ranks:
                self._edges[edge] = create(ends, names=("dp",))
                control.cuts.add(self._edges[edge])
                control.take_within(self._edges[edge].control)

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
        """The role of this rank in each module that it has."""
        return self.layouts.roles_of(self.rank)

    def has(self, module: str) -> bool:
        """Return True if this rank has the module; LayoutError for an unknown one."""
        return self.rank in self.layouts[module].ranks

    def __getitem__(self, module: str) -> ProcessGroups:
        """Return the groups of a module; on a rank without it, GroupError says where it is."""
        layout = self.layouts[module]
        if module not in self._modules:
            here = ", ".join(map(repr, self._modules)) or "no module"
            raise GroupError(
                f"Rank {self.rank} does not have module {module!r}, which is on ranks "
                f"{shorten_ranks(layout.ranks)}; it has {here}. Ask has({module!r}) first."
            )
        return self._modules[module]

    def edge(self, source: str, destination: str) -> ProcessGroups:
        """Return the groups of all ranks of an edge's two modules: `dp` alone, ranks by number.

        Raises:
            GroupError: The layouts have no such edge, or this rank has neither module.
        """
        if (source, destination) not in self.layouts.edges:
            known = ", ".join(f"{a} -> {b}" for a, b in self.layouts.edges) or "none"
            raise GroupError(
                f"Unknown edge {source} -> {destination}; the edges are: {known}. Edges are given "
                f"to ModuleLayouts(edges=...)."
            )
        if (source, destination) not in self._edges:
            raise GroupError(
                f"Rank {self.rank} has neither {source!r} nor {destination!r}, so it is not on the "
                f"edge between them."
            )
        return self._edges[source, destination]

    def fail(self, error: BaseException, *, phase: str, is_known: bool = False) -> BaseException:
        """Make all ranks raise, in whichever call of the union or of an edge each of them waits.

        Every rank of the union has to come here, or to a call of `union.loop_control` in which it
        receives the error, and then here with `is_known`. Afterwards all ranks are in step for the
        next call of each.

        Args:
            error: why this rank cannot continue.
            phase: the place in the program, for messages.
            is_known: True if all ranks have raised it in a call of `union.loop_control`.

        Returns:
            The error of all ranks.

        Cost: one collective of `union.loop_control`, and one of each edge here, at once.
        """
        crossings = self.crossings
        controls = [
            each.control for edge, each in self._edges.items() if edge not in crossings.failed
        ]
        if not is_known:
            if crossings.failed:  # all ranks of an edge have it: the cause is with one of them
                self.union.loop_control.shared_error = error
            controls.append(self.union.loop_control)
        # In threads, since the next call of each of the other ranks may be of any of them.
        with ThreadPoolExecutor(len(controls) or 1) as pool:
            raised = list(pool.map(partial(_failed, error=error, phase=phase), controls))
        crossings.failed.clear()
        return error if is_known else raised[-1]

    def close(self) -> None:
        """Destroy what was created here, newest first; a second call does nothing."""
        for groups in reversed([self.union, *self._modules.values(), *self._edges.values()]):
            groups.close()

    def __enter__(self) -> ModuleGroups:
        """Return these groups; leaving the context closes them."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close, whether or not the body raised."""
        self.close()

    def __getattr__(self, name: str) -> object:
        """Refuse, and name what to pass to code that takes the groups of one layout."""
        raise AttributeError(
            f"ModuleGroups has no attribute {name!r}. To what takes the groups of one layout, pass "
            f"those of a module, groups[module], or of all ranks together, groups.union."
        )

    def __repr__(self) -> str:
        """Show layouts, rank, and the modules here."""
        return f"ModuleGroups({self.layouts!r}, rank {self.rank}, with {', '.join(self._modules)})"


def _failed(control: Control, *, error: BaseException, phase: str) -> BaseException:
    """Return what all ranks of a control raise for an error of this one."""
    if control.is_broken:
        return error
    try:
        with control.in_step():
            control.fail(error, phase=phase)
    except HoldfastError as shared:
        return shared

"""Makes communicators: created, adopted, cloned.

The order of creation is the same on every rank (control first, then the order of `GROUP_NAMES`),
and a rank makes only the communicators it is a member of. So no rank can wait for one that waits
for it, and ranks outside the layout take no part.

Groups with equal lists of ranks share a communicator, held under each of their names, unless one
of them is over data ranks (`runs_along_data`) or a clone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import GroupError, HoldfastError, LayoutError
from holdfast.parallel.control.control import Control
from holdfast.parallel.control.transport import Transport
from holdfast.parallel.groups import _torch
from holdfast.parallel.groups.rendezvous import Proposal, Rendezvous
from holdfast.parallel.layout import CLONED, GROUP_NAMES, Layout, runs_along_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """A communicator and its verified members, in order."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    axes: str
    """The group of the layout whose members these are; a clone's is its source's."""


@dataclass(slots=True, kw_only=True)
class Communicators:
    """Every communicator of one layout on one rank, and those it has to destroy, newest first."""

    layout: Layout
    rank: int
    control: Control
    held: dict[str, Communicator] = field(default_factory=dict)
    owned: list[ProcessGroup] = field(default_factory=list)
    singles: dict[str, ProcessGroup] = field(default_factory=dict)
    """Communicators of this rank only, for mesh dimensions of size 1."""
    store: Store | None = None
    timeout_s: float = 60.0
    backend: str = ""
    prefix: str = ""
    """Starts the names of the communicators made here; unique to one rendezvous of the layout."""
    has_meshes: bool = False
    """Whether a device mesh was made of them."""

    def make(self, ranks: Sequence[int], name: str, backend: str | None = None) -> ProcessGroup:
        """A new communicator, owned here."""
        if self.store is None:
            raise GroupError(f"{name!r} needs torch.distributed; these groups are of one process.")
        group = _torch.new_group(
            ranks,
            name=f"{self.prefix}/{name}/{ranks[0]}",
            backend=backend or self.backend,
            timeout_s=self.timeout_s,
            store=self.store,
        )
        self.owned.append(group)
        actual = tuple(_torch.group_ranks(group))
        if actual != tuple(ranks):
            raise GroupError(f"Communicator {name!r} has ranks {actual}, not {tuple(ranks)}.")
        return group

    def destroy(self) -> None:
        """Destroy everything owned and forget everything held."""
        self.held.clear()
        self.singles.clear()
        self.control.close()
        self.destroy_newest(len(self.owned))
        if self.has_meshes:
            _torch.forget_meshes()

    def destroy_newest(self, count: int) -> None:
        """Destroy the last `count` communicators made here."""
        for _ in range(count):
            _torch.destroy(self.owned.pop())


def create(
    layout: Layout,
    *,
    names: Iterable[str] | None,
    backend: str | None,
    timeout_s: float,
    rank: int | None,
    store: Store | None,
    scope: str = "",
) -> Communicators:
    """See `ProcessGroups.create`.

    `scope` names what the layout is one of, where ranks count how often they made it within that
    alone: a module may have been on other ranks before.
    """
    comms = _start(layout, rank, backend, timeout_s, store)
    # Phase 1, plan: all that is asked of the layout, on this rank alone.
    planned: dict[str, tuple[int, ...]] = {}
    chosen: list[str] = []
    error: Exception | None = None
    try:
        chosen = _names_to_create(layout, None if names is None else list(names))
        planned = {
            n: layout.group(n, comms.rank) for n in chosen if layout.has_group(n, comms.rank)
        }
    except HoldfastError as raised:
        error = raised
    proposal = _proposal(layout, chosen, comms.backend)
    if comms.store is None:  # one process: it has no communicator to make, and no other to meet
        if error is not None:
            raise error
        return comms
    # Phase 2, meet: nothing is made before all ranks propose the same.
    rendezvous = _rendezvous_on(comms, "create", layout.ranks, scope=scope)
    rendezvous.propose(proposal, error)
    comms.prefix = f"{rendezvous.prefix}/{layout.digest()[:8]}"
    # Phase 3, make: in one order, and on all ranks or on none.
    _make_together(rendezvous, lambda: _make_planned(comms, planned), undo=comms.destroy)
    return comms


def _make_planned(comms: Communicators, planned: Mapping[str, tuple[int, ...]]) -> None:
    """Make the control and the communicators of the planned groups, clones after their sources."""
    comms.control = _make_control(comms)
    shared: dict[tuple[int, ...], ProcessGroup] = {}
    for name, ranks in planned.items():
        if runs_along_data(name):
            group = comms.make(ranks, name)
        elif ranks in shared:  # then on its other members, too: their groups are this one
            group = shared[ranks]
        else:
            group = shared[ranks] = comms.make(ranks, name)
        comms.held[name] = Communicator(group=group, ranks=ranks, axes=name)


def adopt(
    layout: Layout,
    supplied: Mapping[str, ProcessGroup],
    *,
    timeout_s: float,
    rank: int | None,
    store: Store | None,
) -> Communicators:
    """See `ProcessGroups.adopt`."""
    comms = _start(layout, rank, None, timeout_s, store)
    if comms.store is None and not supplied:
        return comms
    rendezvous = _rendezvous_on(comms, "adopt groups for", layout.ranks)
    error: Exception | None = None
    try:
        comms.held = _check_supplied(layout, supplied, comms.rank)
        comms.backend = next((_torch.backend_of(h.group) for h in comms.held.values()), "gloo")
    except HoldfastError as raised:
        error = raised
    everywhere = sorted(_names_on_every_rank(layout, supplied))
    rendezvous.propose(_proposal(layout, everywhere, "supplied"), error)
    rendezvous.finish("compared", _compare_communicators(comms, rendezvous))
    comms.prefix = f"{rendezvous.prefix}/{layout.digest()[:8]}"

    def make_control() -> None:
        comms.control = _make_control(comms)

    _make_together(rendezvous, make_control, undo=comms.destroy)
    return comms


def clone(
    comms: Communicators, name: str, source: ProcessGroup, *, purpose: str, error: Exception | None
) -> ProcessGroup:
    """See `ProcessGroups.clone`."""
    ranks = tuple(_torch.group_ranks(source))
    scope = _torch.group_name(source)  # the groups along an axis do not concern each other
    rendezvous = _rendezvous_on(comms, f"clone {name!r} as {purpose!r} of", ranks, scope=scope)
    text = f"clone of {name!r}, ranks {list(ranks)}"
    rendezvous.propose(Proposal(text=text, content=scope), error)
    num_owned = len(comms.owned)
    _make_together(
        rendezvous,
        lambda: comms.make(ranks, f"{purpose}-{rendezvous.number}", _torch.backend_of(source)),
        undo=lambda: comms.destroy_newest(len(comms.owned) - num_owned),
    )
    axes = comms.held[name].axes
    comms.held[purpose] = Communicator(group=comms.owned[-1], ranks=ranks, axes=axes)
    return comms.owned[-1]


def _own_rank(layout: Layout, rank: int | None) -> int:
    """This process's rank in the layout, checked against torch.distributed's."""
    if rank is None and layout.world_size == 1 and not _torch.is_initialized():
        return layout.ranks[0]
    own = _torch.default_rank() if _torch.is_initialized() or rank is None else rank
    if rank is not None and rank != own:
        raise GroupError(f"Rank {rank} was given, but torch.distributed says rank {own}.")
    if own not in layout.ranks:
        raise LayoutError(f"Rank {own} is not in {layout}: only its own ranks make its groups.")
    return own


def _start(
    layout: Layout, rank: int | None, backend: str | None, timeout_s: float, store: Store | None
) -> Communicators:
    """Return communicators of which none is made yet; without a store in a process on its own."""
    own = _own_rank(layout, rank)
    comms = Communicators(
        layout=layout,
        rank=own,
        # Until the ranks have agreed: a process on its own keeps it.
        control=Control(None, ranks=(own,), rank=own, timeout_s=timeout_s, name=layout.name),
        timeout_s=timeout_s,
    )
    if layout.world_size > 1 or _torch.is_initialized():
        _torch.default_rank()  # GroupError unless torch.distributed is initialised
        comms.store = _torch.default_store() if store is None else store
        comms.backend = backend or _torch.default_backend()
    return comms


def _rendezvous_on(
    comms: Communicators, purpose: str, ranks: Sequence[int], *, scope: str = ""
) -> Rendezvous:
    """The next agreement on a purpose."""
    if comms.store is None:
        raise GroupError(f"Cannot {purpose} {comms.layout}: these groups are of one process.")
    return Rendezvous(
        comms.store,
        layout_name=comms.layout.name,
        purpose=purpose,
        ranks=ranks,
        rank=comms.rank,
        timeout_s=comms.timeout_s,
        scope=scope,
    )


def _proposal(layout: Layout, names: Sequence[str], backend: str) -> Proposal:
    """What all ranks of the layout have to propose alike."""
    content = {"layout": layout.to_dict(), "names": list(names), "backend": backend}
    return Proposal(
        text=f"{layout}, groups {', '.join(names) or 'none'} ({backend})",
        content=json.dumps(content, sort_keys=True),
    )


def _make_together(
    rendezvous: Rendezvous, make: Callable[[], object], *, undo: Callable[[], None]
) -> None:
    """Run `make` on every rank; if it fails on any, undo it and raise on all."""
    failure: Exception | None = None
    try:
        try:
            make()
        except Exception as raised:
            failure = raised
        rendezvous.finish("made", failure)
    except BaseException:
        undo()
        raise


def _make_control(comms: Communicators) -> Control:
    """The control of the layout, on connections of its own; that of one rank is there already."""
    ranks, name = comms.layout.ranks, comms.layout.name
    if len(ranks) == 1 or comms.store is None:
        return comms.control
    transport = Transport(
        ranks=ranks,
        rank=comms.rank,
        store=_torch.prefix_store(f"{comms.prefix}/control", comms.store),
        name=name,
    )
    return Control(transport, ranks=ranks, rank=comms.rank, timeout_s=comms.timeout_s, name=name)


def _names_to_create(layout: Layout, names: Sequence[str] | None) -> list[str]:
    """The groups to make, in the order in which every rank makes them."""
    if names is None:
        chosen = [name for name in GROUP_NAMES if _is_default(layout, name)]
    else:
        try:
            resolved = {layout.resolve(name) for name in names}
        except LayoutError as error:
            raise GroupError(f"Cannot create groups: {error}") from None
        chosen = sorted(resolved, key=lambda n: (_creation_order(n), n))
    names_in_order = []
    for name in chosen:
        if name == "control":
            raise GroupError("'control' is always made, and available as groups.control.")
        source = CLONED.get(name)
        try:
            has_several = layout.size(name) > 1
        except LayoutError as error:
            raise GroupError(f"Cannot create {name!r}: {error}") from None
        if has_several and source is not None and source not in chosen:
            raise GroupError(f"{name!r} is a clone of {source!r}, which has to be created with it.")
        if has_several:
            names_in_order.append(name)
    return names_in_order


def _is_default(layout: Layout, name: str) -> bool:
    """Whether a group is made unless names are given."""
    is_slice = name.removesuffix("_ag").endswith(("_intra", "_inter"))
    is_absent = layout.is_expert_group(name) and not layout.has_expert_view
    return (layout.replicas > 1 or not is_slice) and not is_absent


def _creation_order(name: str) -> int:
    """Where a group is in the order of creation; groups by their axes come last."""
    return GROUP_NAMES.index(name) if name in GROUP_NAMES else len(GROUP_NAMES)


def _check_supplied(
    layout: Layout, supplied: Mapping[str, ProcessGroup], rank: int
) -> dict[str, Communicator]:
    """Each supplied communicator with its ranks; GroupError listing every one that is wrong."""
    held: dict[str, Communicator] = {}
    errors = []
    for key in sorted(supplied, key=lambda n: (_creation_order(n), n)):
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
                raise GroupError(f"has to be another communicator than {twin.axes!r}")
            held[name] = Communicator(group=group, ranks=planned, axes=name)
        except HoldfastError as error:
            errors.append(f"{key!r} {error}")
    if errors:
        raise GroupError(
            f"Supplied groups do not fit {layout} on rank {rank}: {'; '.join(errors)}."
        )
    return held


def _names_on_every_rank(layout: Layout, supplied: Iterable[str]) -> set[str]:
    """The supplied groups that every rank has to supply, by the layout's names for them."""
    names = set()
    for name in supplied:
        try:
            names.add(layout.resolve(name))
        except LayoutError:
            names.add(name)
    return names - {"embd", "pos_embd"}  # not every stage has one to supply


def _check_ranks(group: object, planned: tuple[int, ...]) -> None:
    """GroupError with both lists unless a supplied communicator has the planned ranks."""
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


def _compare_communicators(comms: Communicators, rendezvous: Rendezvous) -> GroupError | None:
    """The error of a group whose members supplied different communicators over its ranks.

    Cost: for each group two requests, and one stage.
    """
    own = {name: _torch.group_name(held.group) for name, held in comms.held.items()}
    tallies = {name: f"{name}/{comms.held[name].ranks[0]}/{own[name]}" for name in own}
    for tally in tallies.values():
        rendezvous.tally(tally, 1)
    rendezvous.finish("communicators", None, report=json.dumps(own))
    for name, held in comms.held.items():
        if rendezvous.tally(tallies[name], 0) != len(held.ranks):
            theirs = {r: json.loads(rendezvous.report_of(r, "communicators")) for r in held.ranks}
            others = [rank for rank, names in theirs.items() if names.get(name) != own[name]]
            return GroupError(
                f"Group {name!r} (ranks {list(held.ranks)}): ranks {others} supplied another "
                f"communicator than rank {comms.rank} (or none): they would wait for each other."
            )
    return None

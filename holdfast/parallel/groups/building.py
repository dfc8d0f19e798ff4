"""How communicators come to be: created, adopted, cloned.

The order of creation is the same on every rank (control first, then the order of `GROUP_NAMES`),
and a rank makes only the communicators it is a member of. So no rank can wait for one that waits
for it, and ranks outside the layout take no part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import GroupError, HoldfastError, LayoutError
from holdfast.parallel.control.control import Control
from holdfast.parallel.control.transport import Transport
from holdfast.parallel.group_names import GROUP_NAMES, clone_source
from holdfast.parallel.groups import _torch
from holdfast.parallel.groups.rendezvous import Proposal, Rendezvous
from holdfast.parallel.layout import Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A communicator and its verified members, in order."""

    group: ProcessGroup
    ranks: tuple[int, ...]
    axes: str
    """The group of the layout whose members these are; a clone's is its source's."""


@dataclass(slots=True, kw_only=True)
class Built:
    """What one rank has of one layout; `owned` is destroyed in the end, newest first."""

    layout: Layout
    rank: int
    control: Control
    held: dict[str, Held] = field(default_factory=dict)
    owned: list[ProcessGroup] = field(default_factory=list)
    alone: dict[str, ProcessGroup] = field(default_factory=dict)
    """Communicators of this rank only, for mesh dimensions of size 1."""
    store: Store | None = None
    timeout_s: float = 60.0
    backend: str = ""
    prefix: str = ""
    """Unique to this meeting of this layout's ranks; starts the names of its communicators."""
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
        found = tuple(_torch.group_ranks(group))
        if found != tuple(ranks):
            raise GroupError(f"Communicator {name!r} has ranks {found}, not {tuple(ranks)}.")
        return group

    def destroy(self) -> None:
        """Destroy everything owned and forget everything held."""
        self.held.clear()
        self.alone.clear()
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
) -> Built:
    """See `ProcessGroups.create`."""
    asked = None if names is None else list(names)
    rank = _own_rank(layout, rank)
    if layout.world_size == 1 and not _torch.is_initialized():
        _wanted(layout, asked)
        return _alone(layout, rank, timeout_s)
    built = _start(layout, rank, backend, timeout_s, store)
    meeting = _meet(built, "create")
    wanted: list[str] = []
    error: Exception | None = None
    try:
        wanted = _wanted(layout, asked)
    except HoldfastError as raised:
        error = raised
    meeting.propose(_proposal(layout, wanted, built.backend), error)
    built.prefix = f"{meeting.prefix}/{layout.digest()[:8]}"

    def fill() -> None:
        built.control = _make_control(built)
        for name in wanted:
            if layout.has_group(name, rank):
                source = built.held.get(clone_source(name) or "")
                ranks = layout.group(name, rank) if source is None else source.ranks
                built.held[name] = Held(group=built.make(ranks, name), ranks=ranks, axes=name)

    _conclude(built, meeting, fill)
    return built


def adopt(
    layout: Layout,
    supplied: Mapping[str, ProcessGroup],
    *,
    timeout_s: float,
    rank: int | None,
    store: Store | None,
) -> Built:
    """See `ProcessGroups.adopt`."""
    rank = _own_rank(layout, rank)
    if layout.world_size == 1 and not _torch.is_initialized() and not supplied:
        return _alone(layout, rank, timeout_s)
    built = _start(layout, rank, None, timeout_s, store)
    meeting = _meet(built, "adopt groups for")
    error: Exception | None = None
    try:
        built.held = _verified(layout, supplied, rank)
        built.backend = next((_torch.backend_of(h.group) for h in built.held.values()), "gloo")
    except HoldfastError as raised:
        error = raised
    everywhere = sorted(_names_of_all(layout, supplied))
    meeting.propose(_proposal(layout, everywhere, "supplied"), error)
    meeting.conclude("compared", _flaw_of_communicators(built, meeting))
    built.prefix = f"{meeting.prefix}/{layout.digest()[:8]}"

    def fill() -> None:
        built.control = _make_control(built)

    _conclude(built, meeting, fill)
    return built


def clone(
    built: Built, name: str, source: ProcessGroup, *, purpose: str, error: Exception | None
) -> ProcessGroup:
    """See `ProcessGroups.clone`."""
    ranks = tuple(_torch.group_ranks(source))
    if built.store is None:
        raise GroupError(f"Cannot clone {name!r}: these groups are of one process.")
    meeting = Rendezvous(
        built.store,
        layout_name=built.layout.name,
        purpose=f"clone {name!r} as {purpose!r} of",
        ranks=ranks,
        rank=built.rank,
        timeout_s=built.timeout_s,
    )
    text = f"clone of {name!r}, ranks {list(ranks)}"
    meeting.propose(Proposal(text=text, content=_torch.group_name(source)), error)
    failure: Exception | None = None
    num_owned = len(built.owned)
    try:
        built.make(ranks, f"{purpose}-{meeting.number}", _torch.backend_of(source))
    except Exception as raised:
        failure = raised
    try:
        meeting.conclude("made", failure)
    except BaseException:
        built.destroy_newest(len(built.owned) - num_owned)
        raise
    axes = built.held[name].axes
    built.held[purpose] = Held(group=built.owned[-1], ranks=ranks, axes=axes)
    return built.owned[-1]


def _own_rank(layout: Layout, rank: int | None) -> int:
    if rank is None and layout.world_size == 1 and not _torch.is_initialized():
        return layout.ranks[0]
    own = _torch.default_rank() if _torch.is_initialized() or rank is None else rank
    if rank is not None and rank != own:
        raise GroupError(f"Rank {rank} was given, but torch.distributed says rank {own}.")
    if own not in layout.ranks:
        raise LayoutError(f"Rank {own} is not in {layout}: only its own ranks make its groups.")
    return own


def _alone(layout: Layout, rank: int, timeout_s: float) -> Built:
    control = Control(None, ranks=(rank,), rank=rank, timeout_s=timeout_s, name=layout.name)
    return Built(layout=layout, rank=rank, control=control, timeout_s=timeout_s)


def _start(
    layout: Layout, rank: int, backend: str | None, timeout_s: float, store: Store | None
) -> Built:
    _torch.default_rank()
    return Built(
        layout=layout,
        rank=rank,
        control=Control.single(rank=rank, name=layout.name),  # until the ranks have met
        store=_torch.default_store() if store is None else store,
        timeout_s=timeout_s,
        backend=backend or _torch.default_backend(),
    )


def _meet(built: Built, purpose: str) -> Rendezvous:
    if built.store is None:
        raise GroupError(f"There is no store to {purpose} {built.layout} over.")
    return Rendezvous(
        built.store,
        layout_name=built.layout.name,
        purpose=purpose,
        ranks=built.layout.ranks,
        rank=built.rank,
        timeout_s=built.timeout_s,
    )


def _proposal(layout: Layout, names: Sequence[str], backend: str) -> Proposal:
    content = {"layout": layout.to_dict(), "names": list(names), "backend": backend}
    return Proposal(
        text=f"{layout}, groups {', '.join(names) or 'none'} ({backend})",
        content=json.dumps(content, sort_keys=True),
    )


def _conclude(built: Built, meeting: Rendezvous, fill: Callable[[], None]) -> None:
    """Run `fill` on every rank; if it fails on any, destroy what was made and raise on all."""
    failure: Exception | None = None
    try:
        try:
            fill()
        except Exception as raised:
            failure = raised
        meeting.conclude("made", failure)
    except BaseException:
        built.destroy()
        raise


def _make_control(built: Built) -> Control:
    layout, rank = built.layout, built.rank
    link = None
    if layout.world_size > 1 and built.store is not None:
        built.make(layout.ranks, "control", "gloo")
        link = Transport(
            built.owned.pop(),  # the link owns it from here
            ranks=layout.ranks,
            rank=rank,
            store=_torch.prefix_store(f"{built.prefix}/marks", built.store),
            timeout_s=built.timeout_s,
            name=layout.name,
        )
    return Control(link, ranks=layout.ranks, rank=rank, timeout_s=built.timeout_s, name=layout.name)


def _wanted(layout: Layout, names: Sequence[str] | None) -> list[str]:
    """The groups to make, in the order in which every rank makes them."""
    if names is None:
        chosen = [name for name in GROUP_NAMES if _is_default(layout, name)]
    else:
        try:
            resolved = {layout.resolve(name) for name in names}
        except LayoutError as error:
            raise GroupError(f"Cannot create groups: {error}") from None
        chosen = sorted(resolved, key=lambda n: (_place(n), n))
    wanted = []
    for name in chosen:
        if name == "control":
            raise GroupError("'control' is always made, and asked for as groups.control.")
        source = clone_source(name)
        try:
            several = layout.size(name) > 1
        except LayoutError as error:
            raise GroupError(f"Cannot create {name!r}: {error}") from None
        if several and source is not None and source not in chosen:
            raise GroupError(f"{name!r} is a clone of {source!r}, which has to be created with it.")
        if several:
            wanted.append(name)
    return wanted


def _is_default(layout: Layout, name: str) -> bool:
    """Whether a group is made unless names are given."""
    is_slice = name.removesuffix("_ag").endswith(("_intra", "_inter"))
    is_absent = layout.is_expert_group(name) and not layout.has_expert_view
    return (layout.replicas > 1 or not is_slice) and not is_absent


def _place(name: str) -> int:
    return GROUP_NAMES.index(name) if name in GROUP_NAMES else len(GROUP_NAMES)


def _verified(layout: Layout, supplied: Mapping[str, ProcessGroup], rank: int) -> dict[str, Held]:
    """Each supplied communicator with its ranks; GroupError listing every one that is wrong."""
    held: dict[str, Held] = {}
    flaws = []
    for given in sorted(supplied, key=lambda n: (_place(n), n)):
        name, group = given, supplied[given]
        try:
            if name == "control":
                raise GroupError("is made here and never supplied")
            name = layout.resolve(given)
            planned = layout.group(name, rank)
            _check_ranks(group, planned)
            if name in held and held[name].group is not group:
                raise GroupError(
                    f"is the group {name!r}, for which another communicator was supplied, too"
                )
            twin = held.get(clone_source(name) or "")
            if twin is not None and twin.group is group and len(planned) > 1:
                raise GroupError(f"has to be another communicator than {twin.axes!r}")
            held[name] = Held(group=group, ranks=planned, axes=name)
        except HoldfastError as error:
            flaws.append(f"{given!r} {error}")
    if flaws:
        raise GroupError(f"Supplied groups do not fit {layout} on rank {rank}: {'; '.join(flaws)}.")
    return held


def _names_of_all(layout: Layout, supplied: Iterable[str]) -> set[str]:
    """The supplied groups that every rank has to supply, by the layout's names for them."""
    names = set()
    for name in supplied:
        try:
            names.add(layout.resolve(name))
        except LayoutError:
            names.add(name)
    return names - {"embd", "pos_embd"}  # not every stage has one to supply


def _check_ranks(group: object, planned: tuple[int, ...]) -> None:
    try:
        found = _torch.group_ranks(group)
    except GroupError as error:
        raise GroupError(f"{error}; planned are ranks {list(planned)}") from None
    if found == list(planned):
        return
    missing = sorted(set(planned) - set(found))
    extra = sorted(set(found) - set(planned))
    if missing or extra:
        how = f"missing {missing}, extra {extra}"
    else:
        how = "the same ranks in another order, and shards are cut by position"
    raise GroupError(f"has ranks {found}, but planned are {list(planned)}: {how}")


def _flaw_of_communicators(built: Built, meeting: Rendezvous) -> GroupError | None:
    """What is wrong where members of a group supplied several communicators over its ranks."""
    mine = {name: _torch.group_name(held.group) for name, held in built.held.items()}
    shared = meeting.share("communicators", json.dumps(mine))
    theirs = dict(zip(meeting.ranks, map(json.loads, shared), strict=True))
    for name, held in built.held.items():
        others = [rank for rank in held.ranks if theirs[rank].get(name) != mine[name]]
        if others:
            return GroupError(
                f"Group {name!r} (ranks {list(held.ranks)}): ranks {others} supplied another "
                f"communicator than rank {built.rank} (or none), so they would wait for each other."
            )
    return None

"""The communicators of a layout: made once, verified, owned, never looked up in a global."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from holdfast.arguments import check_number
from holdfast.errors import GroupError, HoldfastError, LayoutError
from holdfast.parallel.bounded_store import BoundedStore
from holdfast.parallel.control.control import Control
from holdfast.parallel.control.direct import Direct
from holdfast.parallel.control.transport import Transport
from holdfast.parallel.groups import _torch
from holdfast.parallel.groups.launch_order import LaunchOrder
from holdfast.parallel.groups.planned_groups import (
    Communicator,
    PlannedGroup,
    check_supplied,
    describe,
    names_on_every_rank,
    plan_grid,
    plan_groups,
    resolved,
)
from holdfast.parallel.groups.rendezvous import Rendezvous
from holdfast.parallel.layout import CLONED, Layout
from holdfast.parallel.module_layouts import ModuleLayouts

DATA_TIMEOUT_S = 600.0
"""The limit of collectives by default: ten minutes, torch's own for NCCL, with every backend."""

_CURRENT: ContextVar[ProcessGroups] = ContextVar("holdfast_process_groups")


def current_groups() -> ProcessGroups:
    """Return the groups of the innermost `as_default()` of this context; GroupError outside one."""
    groups = _CURRENT.get(None)
    if groups is None:
        raise GroupError(
            "No process groups were given, and there is no default here. Pass groups=..., or wrap "
            "the calls in `with groups.as_default():`."
        )
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _InCommon:
    """What groups of the same ranks on the same communicators have in common on this rank."""

    numbers: Counter[str] = field(default_factory=Counter)
    """The last one of each kind, see `ProcessGroups.next_number`."""
    controls: list[Control] = field(default_factory=list)
    """Of open groups, as something was first built on them; in one order on all ranks."""
    interrupts: dict[object, BaseException] = field(default_factory=dict)
    """What has left a microbatch on this rank alone, by what knows how to tell the other ranks."""


class ProcessGroups:
    """Every communicator of one layout on one rank; use it as a context manager.

    Made by `create`, `adopt` or `single`. A missing group is an error by name: it is never None,
    never size 1, never the default world. Groups are looked up with `group("tp")`; there are no
    attributes named after groups to probe. Leaving the context destroys what was created here;
    adopted communicators stay the caller's.
    """

    __slots__ = (
        "__weakref__",
        "_backend",
        "_common",
        "_data_timeout_s",
        "_direct",
        "_has_meshes",
        "_held",
        "_is_closed",
        "_is_complete",
        "_orders",
        "_owned",
        "_prefix",
        "_singles",
        "_store",
        "_timeout_s",
        "control",
        "layout",
        "module_layouts",
        "rank",
        "reducing",
    )

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int,
        timeout_s: float = 60.0,
        data_timeout_s: float = DATA_TIMEOUT_S,
        backend: str = "",
        store: BoundedStore | None = None,
    ) -> None:
        """Not for callers: use `create`, `adopt` or `single`."""
        self.layout = layout
        self.module_layouts: ModuleLayouts | None = None
        """The modules whose union this is; None if all ranks have one model on `layout`."""
        self.rank = rank
        # This rank's alone until all ranks have met; one process keeps it.
        self.control = Control(
            None, ranks=(rank,), rank=rank, timeout_s=timeout_s, name=layout.name
        )
        self._held: dict[str, Communicator] = {}
        self._owned: list[ProcessGroup] = []
        """What was made here and is destroyed here, oldest first."""
        self._singles: dict[str, ProcessGroup] = {}
        """Communicators of this rank alone, for mesh dims of size 1."""
        self._store = store
        """Where ranks meet; None in a process without torch.distributed."""
        self._backend = backend
        self._timeout_s = timeout_s
        self._data_timeout_s = data_timeout_s
        self._prefix = ""
        """Starts the names of the communicators made here; unique to this meeting of the ranks."""
        self._direct: Direct | None = None
        self._has_meshes = False
        # Of the process: other groups may hold the same communicators, as adopted ones do.
        self.reducing: list[Any] = _torch.kept_in_process("reducing", list)
        """What reduces gradients on communicators during a backward, while it does. Gradients come
        in another order on each rank, so of two on one communicator only one may."""
        self._orders: MutableMapping[ProcessGroup, LaunchOrder] = _torch.kept_in_process(
            "orders", WeakKeyDictionary
        )
        self._common: _InCommon | None = None
        self._is_closed = False
        self._is_complete = False

    @classmethod
    def create(
        cls,
        layout: Layout,
        *,
        names: Iterable[str] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        data_timeout_s: float = DATA_TIMEOUT_S,
        rank: int | None = None,
        store: Store | None = None,
        scope: str = "",
    ) -> ProcessGroups:
        """Make the communicators of `layout`; called by all of its ranks, and by no other.

        All ranks compare layouts before anything is made. If one rank fails, what was made is
        destroyed on all.

        Args:
            layout: the ranks and axes. Ranks find each other under its name and a count of the
                calls under it: layouts of different ranks in one program need different names.
            names: the groups to make; by default every named group of several ranks, the `_intra`
                and `_inter` slices only if the layout has replicas.
            backend: of the communicators; by default the default group's.
            timeout_s: bounds every stage here and later calls of `control`: how long agreement
                waits for a rank, between steps.
            data_timeout_s: bounds collectives of the communicators made here, and the agreements
                of a step: how long ranks wait for one that is late in a forward, a backward or an
                update. A rank that is later is named on the others, after at most twice that.
            rank: this process's global rank, checked against torch.distributed's.
            store: where ranks find each other; by default the default group's.
            scope: calls are counted within it, so that a layout may be on other ranks in another
                scope. `ModuleGroups` gives its modules one.

        Raises:
            LayoutError: Ranks have different layouts; they are named, on all ranks. Or the layout
                has ranks that do not exist.
            DeadlineError: Ranks did not arrive; they are named, on all others.
            GroupError: Names are unknown, or torch.distributed is not initialised.

        Cost: some twenty requests of this rank to the store, however many ranks there are; and the
        communicators. Groups with equal lists of ranks share one, unless they are over data ranks
        or clones. `control` connects two ranks when one first sends to the other.
        """
        groups = cls._start(
            layout,
            rank=rank,
            backend=backend,
            limits_s=(timeout_s, data_timeout_s),
            store=store,
        )
        # Phase 1, plan: which groups, asked of the layout on this rank alone.
        planned: dict[str, PlannedGroup] = {}
        error: Exception | None = None
        try:
            planned = plan_groups(layout, names, rank=groups.rank)
        except HoldfastError as raised:
            error = raised
        proposal = describe(layout, list(planned), groups._backend)
        if groups._store is None:  # one process: it makes no communicator and meets no rank
            if error is not None:
                raise error
            return groups
        # Phase 2, meet: all ranks propose the same before there is a communicator. A rank whose
        # plan failed proposes, too, so that the others raise its error and not a timeout.
        rendezvous = groups._meet("create", proposal, error, scope=scope)
        # Phase 3, make: in one order, and on all ranks or on none.
        _make_together(rendezvous, lambda: groups._make_planned(planned), undo=groups.close)
        return groups

    @classmethod
    def adopt(
        cls,
        layout: Layout,
        supplied: Mapping[str, ProcessGroup],
        *,
        timeout_s: float = 60.0,
        data_timeout_s: float = DATA_TIMEOUT_S,
        rank: int | None = None,
        store: Store | None = None,
    ) -> ProcessGroups:
        """Take communicators that the caller made, after checking each against the layout.

        Only the control communicator is made here, and nothing supplied is ever destroyed here.

        Args:
            layout: what the communicators are checked against.
            supplied: live communicators by group name. Each has exactly the ranks that the layout
                plans for its name, in that order, and is the same one on all of its members.
            timeout_s: as for `create`.
            data_timeout_s: as for `create`, of agreements and clones; give what the communicators
                were made with.
            rank: as for `create`.
            store: as for `create`.

        Raises:
            GroupError: On all ranks of the layout, if those of any rank do not fit; the message
                has both lists of ranks.
            LayoutError: As for `create`.
            DeadlineError: As for `create`.

        Cost: some thirty requests of this rank to the store and two for each name, however many
        ranks there are; and the communicator of `control`, as for `create`.
        """
        groups = cls._start(
            layout,
            rank=rank,
            backend=None,
            limits_s=(timeout_s, data_timeout_s),
            store=store,
        )
        if groups._store is None and not supplied:
            return groups
        # Phase 1, check: each communicator against the layout, on this rank alone.
        error: Exception | None = None
        try:
            groups._held = check_supplied(layout, supplied, rank=groups.rank)
        except HoldfastError as raised:
            error = raised
        backends = [_torch.backend_of(each.group) for each in groups._held.values()]
        groups._backend = backends[0] if backends else "gloo"
        # Phase 2, meet: all ranks supply the same names, and members the same communicators.
        proposal = describe(layout, names_on_every_rank(layout, supplied), "supplied")
        rendezvous = groups._meet("adopt groups for", proposal, error)
        rendezvous.finish("compared", _compare_communicators(groups, rendezvous))
        # Phase 3, make: the control alone.
        _make_together(rendezvous, groups._make_control, undo=groups.close)
        return groups

    @classmethod
    def single(cls, name: str = "model", *, rank: int = 0) -> ProcessGroups:
        """Return the groups of one process by itself; torch.distributed is not needed."""
        return cls(Layout(name=name, ranks=(rank,)), rank=rank)

    def group(self, name: str) -> ProcessGroup:
        """Return the communicator `name`; GroupError says why if this rank does not hold it."""
        self._check_open()
        held = self._find(name)
        if held is not None:
            return held.group
        raise GroupError(self._why_absent(name))

    def has(self, name: str) -> bool:
        """Return True if this rank holds a communicator `name`; GroupError for an unknown name."""
        self._check_open()
        if self._find(name) is not None:
            return True
        self._refuse_unknown(name)
        return False

    def held(self) -> tuple[str, ...]:
        """Return the names of all communicators that this rank holds, clones included."""
        self._check_open()
        return tuple(self._held)

    def size(self, name: str) -> int:
        """Return the number of ranks in the group, whether or not it has a communicator."""
        held = self._find(name)
        return self.layout.size(name) if held is None else len(held.ranks)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ordered ranks of this rank's group, whether or not it has a communicator."""
        held = self._find(name)
        return self.layout.group(name, self.rank) if held is None else held.ranks

    def index(self, name: str) -> int:
        """Return this rank's position in the group, whether or not it has a communicator."""
        return self.ranks(name).index(self.rank)

    def require(self, *names: str) -> None:
        """Raise GroupError for those of `names` that have several ranks and no communicator."""
        self._check_open()
        missing = [name for name in names if self._is_missing(name)]
        if missing:
            listed = "; ".join(self._why_absent(name) for name in missing)
            raise GroupError(f"Groups {', '.join(missing)} are missing. {listed}")

    def require_complete(self) -> None:
        """Raise GroupError for axes of several ranks that no communicator here runs along.

        The axes are tp, cp, dp and pp, and with experts (ep > 1, or expt_tp other than tp) also
        ep, expt_tp and expt_dp. A communicator of another name with the same ordered ranks
        counts: `dp_cp` is `dp` if cp is 1.
        """
        self._check_open()
        if self._is_complete:  # and stays so: communicators are added, never dropped
            return
        axes = ["tp", "cp", "dp", "pp"]
        if self.layout.has_experts:
            axes += ["ep", "expt_tp", "expt_dp"]
        covered = {held.ranks for held in self._held.values()}
        missing = [a for a in axes if self._is_missing(a) and self.ranks(a) not in covered]
        if missing:
            sizes = ", ".join(f"{axis} (size {self.size(axis)})" for axis in missing)
            raise GroupError(
                f"{self.layout} uses axes that no communicator was supplied for: {sizes}. Rank "
                f"{self.rank} holds {self._listed()}. Supply the missing ones: without them a "
                "shard could pass for the whole."
            )
        self._is_complete = True

    def clone(self, name: str, *, purpose: str) -> ProcessGroup:
        """Make a second communicator with the ordered members of `name`, held as `purpose`.

        The members are those of the existing communicator; nothing is derived from the layout.
        Called by all members of that group and by no other rank. A clone that exists already
        because it is made by default (`dp_cp_ag` of `dp_cp`) is returned as it is.

        Raises:
            GroupError: On all members, if they disagree or `purpose` is taken.
            DeadlineError: On all members, if one does not arrive.

        Cost: a dozen requests of this rank to the store, one communicator.
        """
        source = self.group(name)
        name = resolved(self.layout, name)
        held = self._held.get(purpose)
        if held is not None and CLONED.get(purpose) == name and held.group is not source:
            return held.group
        error: Exception | None = None
        if held is not None:
            error = GroupError(f"Rank {self.rank} already holds a communicator {purpose!r}.")
        elif CLONED.get(purpose) != name:
            with contextlib.suppress(LayoutError):
                self.layout.size(purpose)
                error = GroupError(
                    f"{purpose!r} is a group of the layout, not a clone of {name!r}."
                )
        ranks = tuple(_torch.group_ranks(source))
        scope = _torch.group_name(source)  # the groups along an axis do not concern each other
        rendezvous = self._rendezvous(f"clone {name!r} as {purpose!r} of", ranks, scope=scope)
        rendezvous.propose(f"clone of {name!r}, ranks {list(ranks)}", content=scope, error=error)
        num_owned = len(self._owned)
        _make_together(
            rendezvous,
            lambda: self._make(ranks, f"{purpose}-{rendezvous.number}", _torch.backend_of(source)),
            undo=lambda: self._destroy_newest(len(self._owned) - num_owned),
        )
        made = self._owned[-1]
        self._held[purpose] = Communicator(group=made, ranks=ranks, axes=self._held[name].axes)
        return made

    def mesh(self, *names: str, device_type: str | None = None) -> DeviceMesh:
        """Return the DeviceMesh with one dim per name, on exactly these communicators.

        Args:
            names: groups, the slowest dim first. A group of one rank gets its own communicator,
                owned here.
            device_type: by default "cuda" for NCCL communicators and "cpu" otherwise.

        Raises:
            GroupError: A communicator is missing, or the groups do not form a grid: two share an
                axis, or are of different views.

        Cost: no communication.
        """
        self._check_open()
        given, names = names, tuple(resolved(self.layout, name) for name in names)
        if not names or len(set(names)) != len(names):
            raise GroupError(f"A mesh needs one or more different groups, got {list(given)}.")
        self.require(*given)
        held = {name: self._held.get(name) for name in names}
        axes = {name: name if each is None else each.axes for name, each in held.items()}
        grid = plan_grid(self.layout, axes, rank=self.rank)
        groups = [self._alone(n) if each is None else each.group for n, each in held.items()]
        self._has_meshes = True
        return _torch.device_mesh(
            groups, grid.tolist(), names=names, device_type=device_type, mark=self._prefix
        )

    @contextlib.contextmanager
    def as_default(self) -> Iterator[ProcessGroups]:
        """Let calls inside omit the groups: `current_groups()` returns these.

        Other threads and tasks are not affected.
        """
        self._check_open()
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def launch_order(self, communicator: ProcessGroup) -> LaunchOrder:
        """Return the order of launches on a communicator: one for all that note theirs.

        Also for those of other `ProcessGroups` that hold it.
        """
        if communicator not in self._orders:
            self._orders[communicator] = LaunchOrder(is_shared=communicator.size() > 1)
        return self._orders[communicator]

    def uncompared_orders(self) -> dict[str, int]:
        """Return a digest of the launches that ranks have not compared, by communicator.

        Of all communicators of this process that are not destroyed, those of other `ProcessGroups`,
        too. Ranks that have one in common have equal digests of it unless they launched unlike.
        """
        return {key: each.digest(each.unsaved) for key, each in self._orders_by_key().items()}

    def uncompared_launches(self, key: str) -> list[str] | None:
        """Return what `uncompared_orders` has a digest of, in words; None where it has not."""
        order = self._orders_by_key().get(key)
        return None if order is None else order.names(order.unsaved)

    def _orders_by_key(self) -> dict[str, LaunchOrder]:
        """Return the orders of all communicators, by names equal on all ranks.

        They are short, since a save sends them in its first message.
        """
        return {
            blake2b(_torch.group_name(communicator).encode(), digest_size=6).hexdigest(): order
            for communicator, order in [*self._orders.items()]
            if order.is_shared and _torch.is_alive(communicator)
        }

    def next_number(self, kind: str) -> int:
        """Return 1, 2, ... for each kind: equal on all ranks for what they do in the same order.

        Counted together with other groups of the same ranks that have adopted these communicators,
        or given them: collectives of both may meet.
        """
        numbers = self._in_common().numbers
        numbers[kind] += 1
        return numbers[kind]

    def last_number(self, kind: str) -> int:
        """Return what `next_number` has returned last; 0 if nothing."""
        return self._in_common().numbers[kind]

    @property
    def loop_control(self) -> Control:
        """Agreement in the middle of a step: of all groups of these ranks on these communicators.

        A rank that takes what is on two of them in another order would wait for the others in
        another `control`. The one of the groups that came first and are open; with its limits.
        """
        controls = self._in_common().controls
        return controls[0] if controls else self.control

    @property
    def untold_interrupts(self) -> dict[object, BaseException]:
        """Interrupts of this rank that the others wait to hear of over `loop_control`.

        By what lets them know; of microbatches within one another the inner one first, as the other
        ranks leave them.
        """
        return self._in_common().interrupts

    def _in_common(self) -> _InCommon:
        """Return what all groups of these ranks on these communicators have in common."""
        if self._common is None:
            kept: MutableMapping[ProcessGroup, dict[frozenset[int], _InCommon]]
            kept = _torch.kept_in_process("common", WeakKeyDictionary)
            ranks = frozenset(self.layout.ranks)
            by_ranks = [kept.setdefault(each.group, {}) for each in self._held.values()]
            known = (each[ranks] for each in by_ranks if ranks in each)
            self._common = next(known, None) or _InCommon()
            self._common.controls.append(self.control)
            for each in by_ranks:
                each.setdefault(ranks, self._common)
        return self._common

    def direct(self) -> Direct:
        """Return what exchanges small tensors on the host with other ranks of the layout.

        Made at the first call, which is not collective; GroupError in one process.
        """
        self._check_open()
        if self._direct is None:
            if self._store is None:
                raise GroupError("These groups are of one process: it exchanges with no other.")
            self._direct = Direct(
                ranks=self.layout.ranks,
                rank=self.rank,
                store=self._store.prefixed(f"{self._prefix}/direct"),
                timeout_s=max(self._timeout_s, self._data_timeout_s),
            )
        return self._direct

    def cut(self, reason: str) -> None:
        """End the waits of other ranks for this one, whose collectives it does not come to.

        Communicators of gloo are broken on all their ranks then, adopted ones, too. So steps are
        refused for that reason.
        """
        self.control.reason_cut = reason
        for held in self._held.values():
            _torch.cut(held.group)
        if self._direct is not None:
            self._direct.close()

    def close(self) -> None:
        """Destroy the communicators created here; a second call does nothing.

        Nor does one in a process that was forked from this one: they are its parent's.
        """
        if self.control.is_forked:
            return
        self._is_closed = True
        if self._common is not None and self.control in self._common.controls:
            self._common.controls.remove(self.control)
        self._held.clear()
        self._singles.clear()
        self.control.close()
        if self._direct is not None:
            self._direct.close()
        self._destroy_newest(len(self._owned))
        if self._has_meshes:
            _torch.forget_meshes()

    def __enter__(self) -> ProcessGroups:
        """Return these groups; leaving the context closes them."""
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        """Close, whether or not the body raised."""
        self.close()

    def __getattr__(self, name: str) -> object:
        """Refuse: communicators come from `group(name)`, so that probing cannot half succeed."""
        raise AttributeError(
            f"ProcessGroups has no attribute {name!r}. A communicator is looked up with "
            f"group({name!r}); has({name!r}) tells if this rank holds it."
        )

    def __repr__(self) -> str:
        """Show layout, rank and held names."""
        return f"ProcessGroups({self.layout}, rank {self.rank}, holding {self._listed()})"

    def _check_open(self) -> None:
        """Raise GroupError after `close`."""
        if self._is_closed:
            raise GroupError(f"The process groups of {self.layout} are closed.")

    @classmethod
    def _start(
        cls,
        layout: Layout,
        *,
        rank: int | None,
        backend: str | None,
        limits_s: tuple[float, float],
        store: Store | None,
    ) -> ProcessGroups:
        """Return groups that hold no communicator yet, for this process's rank of the layout."""
        timeout_s, data_timeout_s = (
            check_number(limit_s, name=name, above=0, is_finite=True)
            for limit_s, name in zip(limits_s, ("timeout_s", "data_timeout_s"), strict=True)
        )
        is_alone = layout.world_size == 1 and not _torch.is_initialized()
        own = layout.ranks[0] if rank is None else rank
        if not is_alone:
            own = _torch.default_rank()  # GroupError unless torch.distributed is initialised
        if rank is not None and rank != own:
            raise GroupError(f"Rank {rank} was given, but torch.distributed says rank {own}.")
        if own not in layout.ranks:
            raise LayoutError(f"Rank {own} is not in {layout}: only its own ranks make its groups.")
        if is_alone:
            return cls(layout, rank=own, timeout_s=timeout_s, data_timeout_s=data_timeout_s)
        num_processes, needed = _torch.default_world_size(), max(layout.ranks) + 1
        if needed > num_processes:
            raise LayoutError(
                f"{layout} needs {needed} processes, and {num_processes} run: start {needed} "
                f"(torchrun --nproc-per-node), or make the layout of dist.get_world_size()"
            )
        return cls(
            layout,
            rank=own,
            timeout_s=timeout_s,
            data_timeout_s=data_timeout_s,
            backend=backend or _torch.default_backend(),
            store=BoundedStore.of(
                _torch.default_store() if store is None else store, limit_s=timeout_s
            ),
        )

    def _meet(
        self, purpose: str, proposal: tuple[str, str], error: Exception | None, *, scope: str = ""
    ) -> Rendezvous:
        """Return the meeting of all ranks, once they have proposed the same."""
        rendezvous = self._rendezvous(purpose, self.layout.ranks, scope=scope)
        text, content = proposal
        rendezvous.propose(text, content=content, error=error)
        self._prefix = f"{rendezvous.prefix}/{self.layout.digest()[:8]}"
        return rendezvous

    def _rendezvous(self, purpose: str, ranks: Sequence[int], *, scope: str) -> Rendezvous:
        """Return the next agreement of ranks on a purpose."""
        if self._store is None:
            raise GroupError(f"Cannot {purpose} {self.layout}: these groups are of one process.")
        return Rendezvous(
            self._store,
            layout_name=self.layout.name,
            purpose=purpose,
            ranks=ranks,
            rank=self.rank,
            timeout_s=self._timeout_s,
            scope=scope,
        )

    def _make_planned(self, planned: Mapping[str, PlannedGroup]) -> None:
        """Make the control and the communicators of the planned groups.

        The order is the same on every rank, and a rank makes only the communicators it is a member
        of. So no rank can wait for one that waits for it, and other ranks take no part.
        """
        self._make_control()
        for name, each in planned.items():
            if not each.ranks:  # a pipeline's interior stage is in no `embd`
                continue
            if each.twin is None:
                group = self._make(each.ranks, name)
            else:
                group = self._held[each.twin].group
            self._held[name] = Communicator(group=group, ranks=each.ranks, axes=name)

    def _make_control(self) -> None:
        """Connect the control of the layout; that of one rank is there already."""
        ranks = self.layout.ranks
        if len(ranks) == 1 or self._store is None:
            return
        self.control = Control(
            Transport(
                ranks=ranks,
                rank=self.rank,
                store=self._store.prefixed(f"{self._prefix}/control"),
                name=self.layout.name,
            ),
            ranks=ranks,
            rank=self.rank,
            timeout_s=self._timeout_s,
            data_timeout_s=self._data_timeout_s,
            name=self.layout.name,
        )
        self.control.cuts.add(self)

    def _make(self, ranks: Sequence[int], name: str, backend: str | None = None) -> ProcessGroup:
        """Make a communicator that is owned here."""
        if self._store is None:
            raise GroupError(f"{name!r} needs torch.distributed; these groups are of one process.")
        group = _torch.new_group(
            ranks,
            name=f"{self._prefix}/{name}/{ranks[0]}",
            backend=backend or self._backend,
            timeout_s=self._timeout_s,
            data_timeout_s=self._data_timeout_s,
            store=self._store,
        )
        self._owned.append(group)
        actual = tuple(_torch.group_ranks(group))
        if actual != tuple(ranks):
            raise GroupError(f"Communicator {name!r} has ranks {actual}, not {tuple(ranks)}.")
        return group

    def _alone(self, name: str) -> ProcessGroup:
        """Return a communicator of this rank alone, for a group of one rank."""
        if name not in self._singles:
            self._singles[name] = self._make((self.rank,), f"{name}-alone")
        return self._singles[name]

    def _destroy_newest(self, count: int) -> None:
        """Destroy the last `count` communicators made here."""
        for _ in range(count):
            _torch.destroy(self._owned.pop())

    def _find(self, name: str) -> Communicator | None:
        """Return the communicator of this name, or of the group that the name is an alias of."""
        held = self._held
        return held[name] if name in held else held.get(resolved(self.layout, name))

    def _refuse_unknown(self, name: str) -> None:
        """Raise GroupError if the layout has no group of this name."""
        try:
            self.layout.size(name)
        except LayoutError as error:
            raise GroupError(f"{name!r} is not a group. {error}") from None

    def _is_missing(self, name: str) -> bool:
        """Return True if this rank's group has several ranks and no communicator here."""
        if self._find(name) is not None:
            return False
        self._refuse_unknown(name)
        return self.layout.has_group(name, self.rank) and self.layout.size(name) > 1

    def _why_absent(self, name: str) -> str:
        """Return why this rank has no communicator of this name, for messages."""
        self._refuse_unknown(name)
        if name == "control":
            return "'control' is not a group to look up: ranks agree through groups.control."
        if not self.layout.has_group(name, self.rank):
            where = "not the first" if resolved(self.layout, name) == "pos_embd" else "an interior"
            return f"Rank {self.rank} is {where} stage: it is in no {name!r} group."
        if self.layout.size(name) == 1:
            return (
                f"Group {name!r} of {self.layout} has size 1 and needs no communicator. Leave out "
                f"what communicates where groups.size({name!r}) is 1; for a class that wants a "
                f"group all the same (DDP), groups.mesh({name!r}).get_group() is one of any size."
            )
        return (
            f"Group {name!r} (ranks {list(self.ranks(name))}) was not created on rank {self.rank}; "
            f"it holds {self._listed()}."
        )

    def _listed(self) -> str:
        """Return the names held, for messages."""
        return ", ".join(self._held) or "no communicator"


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
    except BaseException:  # an interrupt, too: no rank keeps communicators that others have not
        undo()
        raise


def _compare_communicators(groups: ProcessGroups, rendezvous: Rendezvous) -> GroupError | None:
    """Return the error of a group whose members supplied different communicators over its ranks.

    Cost: for each group two requests, and one stage.
    """
    held = groups._held
    own = {name: _torch.group_name(each.group) for name, each in held.items()}
    # One count for each communicator of a group: it reaches the number of the group's ranks only if
    # all of them supplied this one.
    tallies = {name: f"{name}/{held[name].ranks[0]}/{own[name]}" for name in own}
    for tally in tallies.values():
        rendezvous.tally(tally, 1)
    rendezvous.finish("communicators", None, report=json.dumps(own))
    for name, each in held.items():
        if rendezvous.tally(tallies[name], 0) != len(each.ranks):
            theirs = {r: json.loads(rendezvous.report_of(r, "communicators")) for r in each.ranks}
            others = [rank for rank, names in theirs.items() if names.get(name) != own[name]]
            return GroupError(
                f"Group {name!r} (ranks {list(each.ranks)}): ranks {others} supplied another "
                f"communicator than rank {groups.rank}, or none: they would wait for each other."
            )
    return None

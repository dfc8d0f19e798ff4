"""The communicators of a layout: made once, verified, owned, never looked up in a global."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING

from holdfast.errors import GroupError, LayoutError
from holdfast.parallel.control.control import Control
from holdfast.parallel.groups import building
from holdfast.parallel.groups.building import Communicator, Communicators
from holdfast.parallel.layout import CLONED, Layout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

_CURRENT: ContextVar[ProcessGroups] = ContextVar("holdfast_process_groups")


def current_groups() -> ProcessGroups:
    """The groups of the innermost `as_default()` of this context; GroupError outside of one."""
    groups = _CURRENT.get(None)
    if groups is None:
        raise GroupError(
            "No process groups were given, and none are the default here. Pass groups=..., or wrap "
            "the calls in `with groups.as_default():`."
        )
    return groups


class ProcessGroups:
    """Every communicator of one layout on one rank; use it as a context manager.

    Made by `create`, `adopt` or `single`. A missing group is an error by name: it is never None,
    never size 1, never the default world. Groups are looked up with `group("tp")`; there are no
    attributes named after groups to probe. Leaving the context destroys what was created here;
    adopted communicators stay the caller's.
    """

    __slots__ = ("_closed", "_comms", "_is_complete", "control", "layout", "rank")

    def __init__(self, comms: Communicators) -> None:
        """Not for callers: use `create`, `adopt` or `single`."""
        self.layout: Layout = comms.layout
        self.rank: int = comms.rank
        self.control: Control = comms.control
        self._comms = comms
        self._closed = False
        self._is_complete = False

    @classmethod
    def create(
        cls,
        layout: Layout,
        *,
        names: Iterable[str] | None = None,
        backend: str | None = None,
        timeout_s: float = 60.0,
        rank: int | None = None,
        store: Store | None = None,
    ) -> ProcessGroups:
        """Make the communicators of `layout`; called by all of its ranks, and by no other.

        Before anything is made all ranks compare layouts; what was made when one of them fails is
        destroyed.

        Args:
            layout: the ranks and axes. Ranks find each other under its name and a count of the
                calls under it: layouts of different ranks in one program need different names.
            names: the groups to make; by default every named group of more than one rank, the
                `_intra` and `_inter` slices only if the layout has replicas.
            backend: of the communicators; by default the default group's.
            timeout_s: bounds every stage here and every later call of `control`.
            rank: this process's global rank, checked against torch.distributed's.
            store: where ranks find each other; by default the default group's.

        Raises:
            LayoutError: Ranks have different layouts; they are named, on all ranks.
            DeadlineError: Ranks did not arrive; they are named, on all others.
            GroupError: Names are unknown, or torch.distributed is not initialised.

        Cost: some twenty requests of this rank to the store, however many ranks there are; and the
        communicators, of which groups with equal lists of ranks share one, unless they are over
        data ranks or clones. That of `control` connects two ranks when they first send.
        """
        return cls(
            building.create(
                layout,
                names=names,
                backend=backend,
                timeout_s=timeout_s,
                rank=rank,
                store=store,
            )
        )

    @classmethod
    def adopt(
        cls,
        layout: Layout,
        supplied: Mapping[str, ProcessGroup],
        *,
        timeout_s: float = 60.0,
        rank: int | None = None,
        store: Store | None = None,
    ) -> ProcessGroups:
        """Take communicators that the caller made, after checking each against the layout.

        Nothing is made but the control communicator; nothing supplied is ever destroyed here.

        Args:
            layout: what the communicators are checked against.
            supplied: live communicators by group name, each with exactly the ranks that the layout
                plans for its name, in that order, and the same one on all of its members.
            timeout_s: as for `create`.
            rank: as for `create`.
            store: as for `create`.

        Raises:
            GroupError: On all ranks of the layout, if any rank's do not fit; with both lists.
            LayoutError: As for `create`.
            DeadlineError: As for `create`.

        Cost: some thirty requests of this rank to the store and two for each name, however many
        ranks there are; and the communicator of `control`, as for `create`.
        """
        return cls(building.adopt(layout, supplied, timeout_s=timeout_s, rank=rank, store=store))

    @classmethod
    def single(cls, name: str = "model", *, rank: int = 0) -> ProcessGroups:
        """The groups of one process on its own; torch.distributed is not needed."""
        layout = Layout(name=name, ranks=(rank,))
        return cls(
            Communicators(layout=layout, rank=rank, control=Control.single(rank=rank, name=name))
        )

    def group(self, name: str) -> ProcessGroup:
        """The communicator `name`; GroupError if there is none, saying why and what there is."""
        self._check_open()
        held = self._held(name)
        if held is not None:
            return held.group
        raise GroupError(self._why_absent(name))

    def has(self, name: str) -> bool:
        """Whether this rank holds a communicator `name`; GroupError for a name that cannot be."""
        self._check_open()
        if self._held(name) is not None:
            return True
        self._is_known(name, or_raise=True)
        return False

    def held(self) -> tuple[str, ...]:
        """The names of all communicators that this rank holds, clones included."""
        self._check_open()
        return tuple(self._comms.held)

    def size(self, name: str) -> int:
        """Number of ranks in the group, whether or not it has a communicator."""
        held = self._held(name)
        return self.layout.size(name) if held is None else len(held.ranks)

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ordered ranks of this rank's group, whether or not it has a communicator."""
        held = self._held(name)
        return self.layout.group(name, self.rank) if held is None else held.ranks

    def index(self, name: str) -> int:
        """This rank's position in the group, whether or not it has a communicator."""
        return self.ranks(name).index(self.rank)

    def require(self, *names: str) -> None:
        """GroupError naming every one of `names` that has several ranks and no communicator."""
        self._check_open()
        missing = [name for name in names if self._is_missing(name)]
        if missing:
            listed = "; ".join(self._why_absent(name) for name in missing)
            raise GroupError(f"Groups {', '.join(missing)} are missing. {listed}")

    def require_complete(self) -> None:
        """GroupError naming every axis of several ranks that no communicator here runs along.

        The axes are tp, cp, dp and pp, and with experts (ep > 1, or expt_tp other than tp) also
        ep, expt_tp and expt_dp. A communicator of another name with the same ordered ranks
        counts: `dp_cp` is `dp` where cp is 1.
        """
        self._check_open()
        if self._is_complete:  # and stays so: communicators are added, but none is dropped
            return
        axes = ["tp", "cp", "dp", "pp"]
        if self.layout.has_experts:
            axes += ["ep", "expt_tp", "expt_dp"]
        covered = {held.ranks for held in self._comms.held.values()}
        missing = [a for a in axes if self._is_missing(a) and self.ranks(a) not in covered]
        if missing:
            sizes = ", ".join(f"{axis} (size {self.size(axis)})" for axis in missing)
            raise GroupError(
                f"{self.layout} uses axes that no communicator was supplied for: {sizes}. Rank "
                f"{self.rank} has {self._listed()}. Supply the missing ones: without them a shard "
                "could pass for the whole."
            )
        self._is_complete = True

    def clone(self, name: str, *, purpose: str) -> ProcessGroup:
        """A second communicator with the ordered members of `name`, held as `purpose`.

        The members are those of the existing communicator; nothing is derived from the layout.
        Called by all members of that group; no other rank takes part. A clone that exists already
        because it is made by default (`dp_cp_ag` of `dp_cp`) is returned as it is.

        Raises:
            GroupError: On all members, where they disagree or `purpose` is taken.
            DeadlineError: On all members, where one does not arrive.

        Cost: a dozen requests of this rank to the store, one communicator.
        """
        source = self.group(name)
        name = self._resolved(name)
        held = self._comms.held.get(purpose)
        is_default = held is not None and CLONED.get(purpose) == name
        if held is not None and is_default and held.group is not source:
            return held.group
        error: Exception | None = None
        if purpose in self._comms.held:
            error = GroupError(f"There is a communicator {purpose!r} already on rank {self.rank}.")
        elif CLONED.get(purpose) != name and self._is_known(purpose, or_raise=False):
            error = GroupError(f"{purpose!r} is a group of the layout, not a clone of {name!r}.")
        return building.clone(self._comms, name, source, purpose=purpose, error=error)

    def mesh(self, *names: str, device_type: str | None = None) -> DeviceMesh:
        """The DeviceMesh with one dimension per name, on exactly these communicators.

        Args:
            names: groups, the slowest dimension first. A group of one rank gets a communicator of
                its own, owned here.
            device_type: by default "cuda" for NCCL communicators and "cpu" otherwise.

        Raises:
            GroupError: A communicator is missing, or the groups do not form a grid (two that share
                an axis, dense with expert).

        Cost: no communication.
        """
        self._check_open()
        if not names or len(set(names)) != len(names):
            raise GroupError(f"A mesh needs one or more different groups, got {list(names)}.")
        self.require(*names)
        names = tuple(self._resolved(name) for name in names)
        from holdfast.parallel.groups import meshes

        return meshes.mesh(self._comms, names, device_type)

    @contextlib.contextmanager
    def as_default(self) -> Iterator[ProcessGroups]:
        """Let calls inside omit the groups: `current_groups()` returns these.

        A context variable: other threads and tasks are not touched.
        """
        self._check_open()
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def close(self) -> None:
        """Destroy the communicators created here; nothing happens the second time."""
        self._closed = True
        self._comms.destroy()

    def __enter__(self) -> ProcessGroups:
        """Return itself; leaving closes it."""
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, whether or not the body raised."""
        self.close()

    def __getattr__(self, name: str) -> object:
        """Refuse: communicators come from `group(name)`, so that probing cannot half succeed."""
        raise AttributeError(
            f"ProcessGroups has no attribute {name!r}; a communicator is looked up with "
            f"group({name!r}), and whether it is there with has({name!r})."
        )

    def __repr__(self) -> str:
        """Layout, rank and held names."""
        return f"ProcessGroups({self.layout}, rank {self.rank}, holding {self._listed()})"

    def _check_open(self) -> None:
        """GroupError after `close`."""
        if self._closed:
            raise GroupError(f"The process groups of {self.layout} are closed.")

    def _held(self, name: str) -> Communicator | None:
        """The communicator of this name, or of the group that it is another name of."""
        held = self._comms.held
        return held[name] if name in held else held.get(self._resolved(name))

    def _resolved(self, name: str) -> str:
        """The layout's name of a group; one that is unknown, or that the layout refuses, as is."""
        try:
            return self.layout.resolve(name)
        except LayoutError:
            return name

    def _is_known(self, name: str, *, or_raise: bool) -> bool:
        """Whether the layout has a group of this name; if not, GroupError where asked for."""
        try:
            self.layout.size(name)
        except LayoutError as error:
            if or_raise:
                raise GroupError(f"{name!r} is not a group. {error}") from None
            return False
        return True

    def _is_missing(self, name: str) -> bool:
        """Whether a group of several ranks, this rank among them, has no communicator here."""
        if self._held(name) is not None:
            return False
        self._is_known(name, or_raise=True)
        return self.layout.has_group(name, self.rank) and self.layout.size(name) > 1

    def _why_absent(self, name: str) -> str:
        """Why this rank has no communicator of this name, for messages."""
        self._is_known(name, or_raise=True)
        if name == "control":
            return "'control' is no group to use: agreement goes through groups.control."
        if not self.layout.has_group(name, self.rank):
            where = "not the first" if self._resolved(name) == "pos_embd" else "an interior"
            return f"Rank {self.rank} is {where} stage: it is in no {name!r} group."
        if self.layout.size(name) == 1:
            return f"Group {name!r} of {self.layout} has size 1 and needs no communicator."
        return (
            f"Group {name!r} (ranks {list(self.ranks(name))}) was not created on rank {self.rank}; "
            f"there is {self._listed()}."
        )

    def _listed(self) -> str:
        """The names held, for messages."""
        return ", ".join(self._comms.held) or "no communicator"

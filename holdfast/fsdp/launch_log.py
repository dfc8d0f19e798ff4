"""The collectives of a sharded model on one rank: launched here in FSDP2's place, and noted.

After an error on some ranks all compare what they have launched, and complete it; so every gather
and reduction of every unit goes through the objects of this file. FSDP2 takes them where it has
hooks for them (`_torch.log_launches`), but for `LoggedSums`, which stands for a communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from holdfast._torch import mark_launch
from holdfast.optim.collectives import uninterrupted
from holdfast.optim.microbatches import Look
from holdfast.parallel.groups.launch_order import LaunchOrder, LaunchProgress, OrderMark


class GatherOn:
    """All-gathers on a second communicator of the same ranks, so that none waits for a reduction.

    On the CPU it is always asynchronous, whatever FSDP2 requests: without streams, only that makes
    it run concurrently with the computation. FSDP2 waits before it reads.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_on_host: bool) -> None:
        self.group = group
        self._is_on_host = is_on_host

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the gathered tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Launch it; `group` is the main communicator, which is not used."""
        del group
        work: dist.Work | None = dist.all_gather_single(
            output_tensor, input_tensor, group=self.group, async_op=async_op or self._is_on_host
        )
        return work


class UnitLaunch(NamedTuple):
    """A collective of a unit; a tuple, since each launch makes one."""

    operation: Literal["all-gather", "reduce-scatter", "all-reduce"]
    group: dist.ProcessGroup
    numel: int
    """Elements that this rank gives."""
    dtype: torch.dtype
    device: torch.device
    source: int = -1
    """What is gathered or reduced, see `LaunchOrder.add`; -1 where only bytes are known."""

    @classmethod
    def of(
        cls, described: Sequence[Any], group: dist.ProcessGroup, device: torch.device
    ) -> UnitLaunch:
        """Return the collective that `describe` was called on, on a rank of this group."""
        operation, numel, dtype = described
        return cls(
            operation=operation,
            group=group,
            numel=numel,
            dtype=getattr(torch, dtype),
            device=device,
        )

    def repeat(self) -> dist.Work | None:
        """Make such a collective, from zeros."""
        given = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        size = self.group.size()
        work: dist.Work | None
        if self.operation == "all-gather":
            out = given.new_empty(self.numel * size)
            work = dist.all_gather_single(out, given, group=self.group, async_op=True)
        elif self.operation == "reduce-scatter" and not can_watch(self.group, self.device):
            out = given.new_empty(self.numel // size)
            work = dist.reduce_scatter_single(out, given, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(given, group=self.group, async_op=True)
        return work

    def describe(self) -> tuple[str, int, str]:
        """Return what ranks compare."""
        return self.operation, self.numel, str(self.dtype).removeprefix("torch.")


Launched = tuple[LaunchOrder, int]
"""Where something was launched: the order, and how many launches it had then; 0 for all of them."""
_GROUP = itemgetter(1)
"""Of what `LaunchLog` notes of a launch."""
_LOOK_AFTER = tuple(timedelta(seconds=each) for each in (0.1, 0.2, 0.5))
"""A wait looks after these times whether another rank has failed, and then every last of them.

A look is one request to the store, some 0.1 ms.
"""


class LaunchLog:
    """The collectives that all units of a model launch on this rank, in their order.

    On the host this rank waits for them here, and looks meanwhile, if `look` is set, whether
    another rank has failed, which will never come. A device waits by itself.

    A communicator pairs the launches of its ranks by their order alone. So ranks compare orders: if
    one gathers a unit where another gathers one of the same size, both get wrong weights. The other
    unit may be one of another model, so the order is one of all models on the communicator.

    Args:
        order_of: returns the order of launches on a communicator.
    """

    def __init__(self, order_of: Callable[[dist.ProcessGroup], LaunchOrder]) -> None:
        self._order_of = order_of
        self._orders: dict[str, tuple[LaunchOrder, OrderMark]] = {}
        """By communicator of several ranks, and up to where this model has compared it."""
        self._sources: dict[LaunchOrder, list[int]] = {}
        """Numbers of what this model launches."""
        self._is_mixed = False
        """True if the comparison has failed."""
        self._noted: list[tuple[Any, ...]] = []
        """The fields of each `UnitLaunch` from the last `start` to the last `stop`."""
        self.look: Look | None = None
        """Raises if another rank has failed."""
        self.note: Callable[[tuple[Any, ...]], None] = self._count
        """Takes the fields of the `UnitLaunch` that this rank makes; a method in C if possible."""
        self._counts: dict[dist.ProcessGroup, int] = {}
        """Launches but for those noted."""
        self._pending: dict[dist.Work, Launched] = {}
        """Those on the host that nothing has waited for to the end."""
        self._waited: Launched | None = None
        """What this rank has waited in for long, if it still does."""

    @property
    def launches(self) -> list[UnitLaunch]:
        """From the last `start` to the last `stop`."""
        return [UnitLaunch(*fields) for fields in self._noted]

    def start(self) -> None:
        """Forget the launches, and note those that follow; counts stay."""
        self._counts = dict(self.counts())
        self._noted = []
        self.note = self._noted.append

    def stop(self) -> None:
        """Only count the launches that follow: an evaluation may be long."""
        self.note = self._count

    def counts(self) -> Mapping[dist.ProcessGroup, int]:
        """Return the number of launches on each communicator since the model was sharded."""
        counts = Counter(self._counts)
        counts.update(map(_GROUP, self._noted))
        return counts

    def expect(self, group: dist.ProcessGroup) -> None:
        """Count the launches on a communicator, also while there are none."""
        if group in self._counts:
            return
        self._counts[group] = 0
        order = self._order_of(group)
        if order.is_shared:
            self._orders[str(group.group_name)] = order, order.mark()

    def add_source(self, group: dist.ProcessGroup, what: str) -> tuple[int, LaunchOrder]:
        """Return the number of what is launched on a communicator, and the order that notes it."""
        order = self._order_of(group)
        user = self._orders[str(group.group_name)][1].number if order.is_shared else 1
        number = order.add(what if user == 1 else f"{what} of sharded model {user}")
        self._sources.setdefault(order, []).append(number)
        return number, order

    def name_on(self, group: dist.ProcessGroup) -> str:
        """Return a name of this model on a communicator of several ranks; equal on all of them."""
        name = str(group.group_name)
        return f"{name}/{self._orders[name][1].number}"

    def launches_on(self, group: dist.ProcessGroup) -> bool:
        """Return True if units launch collectives on a communicator."""
        return group in self._counts

    def groups(self) -> Iterable[dist.ProcessGroup]:
        """Return the communicators on which units launch collectives."""
        return self._counts.keys()

    def orders(self) -> Mapping[str, int]:
        """Return a digest of the order of uncompared launches, by communicator.

        Those of one rank are left out: nothing can part on them.
        """
        return {name: order.digest(mark) for name, (order, mark) in self._orders.items()}

    def has_uncompared(self) -> bool:
        """Return True if there were launches that ranks have not compared."""
        return any(order.has_uncompared(mark) for order, mark in self._orders.values())

    def uncompared_on(self, name: str) -> list[str]:
        """Return what was gathered or reduced and is not compared; only the last if it is long."""
        order, mark = self._orders[name]
        return order.names(mark)

    def progress(self) -> list[LaunchProgress]:
        """Return how far uncompared launches have come on each communicator of several ranks."""
        groups = {str(group.group_name): group for group in self._counts}
        return [
            order.progress(
                mark,
                communicator=name,
                ranks=dist.get_process_group_ranks(groups[name]),
                waited=self._waited[1] if self._waited and self._waited[0] is order else 0,
            )
            for name, (order, mark) in self._orders.items()
        ]

    def end_comparison(self, *, is_same: bool) -> None:
        """Note that ranks have compared the orders."""
        self._is_mixed = not is_same
        for order, mark in self._orders.values() if is_same else ():
            order.note_compared(mark)

    def forget_orders(self, *, is_completed: bool) -> None:
        """Compare what follows alone; on all ranks.

        Args:
            is_completed: True after an error in a microbatch, whose launches all ranks have
                completed. Other models on the communicator need not compare how far each came.
        """
        for order, mark in self._orders.values():
            if is_completed and not self._is_mixed:
                order.take_back(mark, self._sources[order])
            order.forget(mark)
        self._is_mixed = False

    def fold_orders(self) -> None:
        """Keep less of a long evaluation; called in the same place on all ranks."""
        for order, _ in self._orders.values():
            order.fold()

    def _count(self, fields: tuple[Any, ...]) -> None:
        self._counts[fields[1]] += 1

    def launch(
        self,
        fields: tuple[Any, ...],
        order: LaunchOrder,
        launch: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Note a collective and launch it; on the host no interrupt comes in between.

        Args:
            fields: of its `UnitLaunch`, the number of its source last.
            order: of its communicator.
            launch: starts it; in C on the host.
            arguments: of `launch`.
        """
        notes = (self.note, fields), (order.note, fields[-1])
        *_, work = uninterrupted((*notes, (launch, *arguments)))
        return work

    def watched(self, work: dist.Work, order: LaunchOrder) -> WatchedWork:
        """Return work on the host, the last in an order, that is waited for here."""
        self._pending[work] = order, order.num_launches()
        return WatchedWork(work, self)

    def wait(self, work: dist.Work, last_in: LaunchOrder | None = None) -> None:
        """Wait for a collective on the host, and look meanwhile.

        Args:
            work: one that `watched` has taken, or that was just launched.
            last_in: the order of one that was just launched.
        """
        if last_in is not None:
            self._pending[work] = last_in, 0
        look = self.look
        if look is not None:
            waited_s = 0.0
            for limit in chain(_LOOK_AFTER, repeat(_LOOK_AFTER[-1])):
                try:
                    work.wait(limit)
                except RuntimeError:
                    if work.is_completed():
                        break
                    waited_s += limit.total_seconds()
                    launched = self._pending.get(work)
                    if launched is not None and not launched[1]:  # nothing was launched since
                        launched = launched[0], launched[0].num_launches()
                    self._waited = launched
                    try:
                        look(waited_s)
                    finally:
                        self._waited = None
                else:  # most often: no other call, of which each takes a lock
                    self._pending.pop(work, None)
                    return
        self._pending.pop(work, None)
        work.wait()  # raises if it has failed

    def repeat(self, launches: Sequence[UnitLaunch]) -> list[dist.Work]:
        """Make collectives like these, from zeros, without waiting for them."""
        self._noted += launches
        return [work for each in launches if (work := each.repeat()) is not None]

    def take_pending(self) -> list[dist.Work]:
        """Return the collectives on the host that nothing has waited for, and forget them."""
        pending = [*self._pending]
        self._pending.clear()
        return pending


class WatchedWork(dist.Work):
    """A collective on the host; a wait for it ends if another rank has failed."""

    def __init__(self, work: dist.Work, log: LaunchLog) -> None:
        super().__init__()
        self._work = work
        self._log = log

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it, see `LaunchLog.wait`."""
        del timeout  # that of the communicator counts
        self._log.wait(self._work)
        return True


class Logged:
    """Makes a collective in the place of another object of FSDP2, and notes it."""

    def __init__(
        self,
        inner: Any,
        log: LaunchLog,
        *,
        over: dist.ProcessGroup,
        source: str,
        is_watched: bool,
    ) -> None:
        self._inner = inner
        self._log = log
        self._source, self._order = log.add_source(over, source)
        self._is_watched = is_watched
        self.allocate = inner.allocate


class LoggedGather(Logged):
    """Gathers as another object of FSDP2 does, and notes it.

    On the host the communicator is called without torch.distributed's functions around it, which
    cost as much as the launch.
    """

    def __init__(self, inner: Any, log: LaunchLog, **settings: Any) -> None:
        super().__init__(inner, log, **settings)
        self._apart: dist.ProcessGroup | None = inner.group if isinstance(inner, GatherOn) else None
        self._options = AllgatherOptions()
        self._options.asyncOp = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Note it and launch it."""
        over = self._apart or group
        given = input_tensor
        fields = ("all-gather", over, given.numel(), given.dtype, given.device, self._source)
        if not self._is_watched:
            inner = partial(self._inner, async_op=async_op)
            work: dist.Work | None = self._log.launch(
                fields, self._order, inner, output_tensor, input_tensor, group
            )
            return work
        gather = over.all_gather_single
        launched = self._log.launch(
            fields, self._order, gather, output_tensor, input_tensor, self._options
        )
        if async_op or self._apart is not None:
            return self._log.watched(launched, self._order)
        self._log.wait(launched, self._order)
        return None


class LoggedReduction(Logged):
    """Reduces and scatters as another object of FSDP2 does, and notes it.

    Gloo makes a reduce-scatter of a copy, an all-reduce and another copy, and a wait for it cannot
    be given up. So where waits are watched it is the all-reduce, in place: FSDP2 does not need what
    it gave any more.
    """

    def __init__(self, inner: Any, log: LaunchLog, **settings: Any) -> None:
        super().__init__(inner, log, **settings)
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = True

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Note it and launch it."""
        given = input_tensor
        fields = ("reduce-scatter", group, given.numel(), given.dtype, given.device, self._source)
        if not self._is_watched:
            inner = partial(self._inner, async_op=async_op)
            work: dist.Work | None = self._log.launch(
                fields, self._order, inner, output_tensor, input_tensor, group, op
            )
            return work
        mark_launch(input_tensor, "reduce_scatter")
        self._options.reduceOp = op
        launched = self._log.launch(
            fields, self._order, group.allreduce, [input_tensor], self._options
        )
        self._log.wait(launched, self._order)
        numel = output_tensor.numel()
        output_tensor.copy_(input_tensor.narrow(0, group.rank() * numel, numel))
        return None


class LoggedSums:
    """A communicator on which FSDP2 makes its all-reduces, which are noted.

    It is equal to the communicator: where an all-reduce raises, torch looks that up, and would
    raise another error if it was not found.
    """

    def __init__(
        self, group: dist.ProcessGroup, log: LaunchLog, *, source: str, is_watched: bool
    ) -> None:
        self._group = group
        self._log = log
        self._source, self._order = log.add_source(group, source)
        self._is_watched = is_watched

    def __eq__(self, other: object) -> bool:
        """Return True for what stands for the same communicator, and for that itself."""
        return self is other or other is self._group

    def __hash__(self) -> int:
        """Return that of the communicator."""
        return hash(self._group)

    def size(self) -> int:
        """Return the number of ranks."""
        return self._group.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work | None:
        """Note an all-reduce and launch it; torch's `all_reduce` calls it and waits."""
        given = tensors[0]
        group, source = self._group, self._source
        fields = ("all-reduce", group, given.numel(), given.dtype, given.device, source)
        work = self._log.launch(fields, self._order, group.allreduce, tensors, options)
        return self._log.watched(work, self._order) if self._is_watched else work


def can_watch(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if a wait for a collective can be given up: on the host, over gloo."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"

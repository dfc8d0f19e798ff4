"""Moves gradients from autograd into buckets, and from buckets into shares."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from holdfast.errors import ConfigError
from holdfast.optim import collectives
from holdfast.optim.buckets import Bucket
from holdfast.optim.in_flight import (
    BUCKETED,
    BucketedShare,
    GradientHook,
    HeldHook,
    change_class,
    gradient_of,
    write_gradient,
)
from holdfast.optim.shard_groups import ShardGroups

Stage = Literal[1, 2]
_MAX_IN_FLIGHT = 2
"""Whole gradient buckets under reduction at a time in stage 2, which bounds its memory."""


@dataclass(eq=False)
class Slot(GradientHook):
    """A parameter's place in the buckets, and the state of its gradient in this step."""

    name: str
    """The optimizer's."""
    reducer: GradientReducer
    parameter: nn.Parameter
    bucket: Bucket
    position: int
    """Of the bucket."""
    number: int
    """In the bucket."""
    is_used: bool = False
    """True if there was a gradient: on this rank, after `exchange_used` on any that shares it."""
    is_missing: bool = True
    """True until the gradient of this microbatch comes."""
    kind: type[Tensor] | None = None
    """The parameter's own class while it has a class of `BUCKETED`."""
    share: Tensor | None = None
    """The elements that this rank updates, which `param_groups` shows."""

    def watch(self, share: Tensor) -> None:
        """Notice reads of `.grad` of the share, too, while that of the parameter is noticed."""
        untyped: Any = share
        untyped._post_accumulate_grad_hooks = OrderedDict({0: HeldHook(self)})
        self.share = share

    def on_made(self, parameter: Tensor) -> None:
        """Move the gradient that autograd has put into `.grad` into its bucket."""
        gradient = gradient_of(parameter)
        if gradient is not None:
            self.reducer.on_gradient(self, gradient)

    def on_read(self) -> None:
        """Raise or warn."""
        self.reducer.gradient_read(self)

    def on_clear(self) -> None:
        """Raise."""
        self.reducer.gradient_forgotten(self)


class Reducing(Protocol):
    """What reduces gradients during a backward; see `ProcessGroups.reducing`."""

    def reduces_on(self, group: dist.ProcessGroup) -> bool:
        """Return True if it may launch reductions on a communicator in a backward from now on."""

    def launch_late(self, *, within: str) -> bool:
        """Launch none before its microbatch is left; return False if it cannot wait."""


def share_backward(
    reducing: Sequence[Reducing], groups: Iterable[dist.ProcessGroup], *, who: str
) -> bool:
    """Have what reduces on some communicators do so late; return True if some cannot.

    Raises:
        ConfigError: It has launched some in its microbatch already.
    """
    others = [each for each in reducing if any(map(each.reduces_on, groups))]
    can_wait = [each.launch_late(within=who) for each in others]  # each of them
    return not all(can_wait)


class GradientReducer:
    """Takes the gradient of each parameter as backward makes it, and reduces full buckets.

    Buckets are launched in their order, never out of it, so that all ranks make the same
    collectives whatever order their gradients come in. That holds for one reducer on a
    communicator: of several microbatches within one another the innermost launches while gradients
    come, and each other one when it is left. One *round* reduces every bucket once. Stage 1 makes
    one round a step, stage 2 one a microbatch. With `is_joint` a round launches nothing: the step
    exchanges what it has filled (`joint.py`).

    Args:
        buckets: hold the parameters, in the order in which they are reduced.
        shard_groups: over which communicators.
        stage: 1 or 2, see `ShardedOptimizer`.
        divisor: the sum of gradients is divided by it.
        names: of the parameters, for messages.
        name: the optimizer's.
        reducing: what is in a microbatch, on this and other communicators.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        shard_groups: ShardGroups,
        stage: Stage,
        divisor: int,
        names: dict[nn.Parameter, str],
        name: str,
        reducing: list[Reducing],
    ) -> None:
        self._reducing = reducing
        self._buckets = buckets
        self._shard_groups = shard_groups
        self._stage = stage
        self.divisor = divisor
        self._names = names
        self.name = name
        self.slots = [
            Slot(name, self, parameter, bucket, position, number)
            for position, bucket in enumerate(buckets)
            for number, parameter in enumerate(bucket.parameters)
        ]
        """One for each trained parameter, bucket by bucket."""
        self._next = 0
        self.num_launched = 0
        """Reductions of buckets since the start; equal on all ranks between two steps."""
        self.is_joint = False
        """True if the step exchanges whole gradients, so that none is reduced before (`joint.py`).
        """
        self._is_late = False
        """True if this microbatch launches at its end: another one is within it."""
        self.is_apart = False
        """True if the gradients of this step are reduced all the same: the norm was asked for."""
        self.turns: list[int] = []
        """The numbers of what was reduced before this step, see `Stepper.turns`."""
        self._num_missing = [len(bucket.parameters) for bucket in buckets]
        self._is_eager = False
        self._owes_round = False
        """True from the start of a microbatch that reduces until all of its round is launched."""
        self._is_inside = False
        self._is_reduced = False
        self.is_finished = False
        """True if shares hold the averaged gradients of this step."""
        self._handles: list[RemovableHandle] = [
            cast("Any", slot.parameter).register_post_accumulate_grad_hook(HeldHook(slot))
            for slot in self.slots
        ]
        self._has_warned = False

    @property
    def owes_reductions(self) -> bool:
        """True if `finish` launches some; equal on all ranks."""
        groups = self._shard_groups
        is_launched = self._is_reduced and not self.is_joint
        if self.is_finished or (is_launched and groups.between is None and groups.tied is None):
            return False
        return any(each is not None for each in (groups.reduce, groups.between, groups.tied))

    @property
    def had_last_microbatch(self) -> bool:
        """True if the step need not reduce what a microbatch would have reduced."""
        return self._is_reduced

    @property
    def is_in_step(self) -> bool:
        """True from the first gradient or microbatch of a step to `drop`."""
        return (
            self._is_inside
            or self._is_reduced
            or any(s.is_used or gradient_of(s.parameter) is not None for s in self.slots)
        )

    def close(self) -> None:
        """Remove the hooks; after `drop`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Enter around the backward of one microbatch; the last one reduces during it.

        Raises:
            ConfigError: Within another one, or after the last one of a step.
        """
        if self._is_inside:
            raise ConfigError(
                "microbatch(...) inside of microbatch(...): leave the first one first"
            )
        if self._is_reduced:
            raise ConfigError(
                "a microbatch after the last one of this step: its gradients would be lost; call "
                "step() or drop_gradients() first"
            )
        try:
            self._share_backward()
            self._is_inside = True
            for slot in self.slots:
                slot.is_missing = True
            self._num_missing = [len(bucket.parameters) for bucket in self._buckets]
            self._is_eager = self._owes_round = is_last or self._stage == 2
            yield
            if self._is_eager:
                self._refuse_unordered()
                with torch.no_grad():
                    self._finish_round()
                self._is_reduced = is_last
            if is_last:
                for slot in self.slots:
                    if slot.kind is None:
                        self._mark_bucketed(slot)
        finally:
            if self in self._reducing:  # unless it has not come so far
                self._reducing.remove(self)
            self._is_eager = self._is_inside = False

    def _share_backward(self) -> None:
        """Let the microbatches that this one is entered in launch when they are left.

        All ranks leave them in one order, and this one first. During a backward they would take
        turns as gradients come, which is in another order on each rank (an expert without tokens, a
        branch taken first), and one's sum would meet the other's. A fully sharded model reduces
        during the backward in any case, so next to one this one is late, too.

        Raises:
            ConfigError: Another one has launched some in this microbatch already.
        """
        group = self._shard_groups.reduce
        groups = () if group is None else (group,)
        self._is_late = share_backward(self._reducing, groups, who=f"optimizer '{self.name}'")
        self._reducing.append(self)

    def reduces_on(self, group: dist.ProcessGroup) -> bool:
        return group is self._shard_groups.reduce

    def launch_late(self, *, within: str) -> bool:
        if self._next and not self._is_late:
            raise ConfigError(
                f"{within}: microbatch(...) after a backward within that of optimizer "
                f"'{self.name}', on the same communicator: enter both before the backward, or "
                f"leave one first"
            )
        self._is_late = True
        return True

    def _refuse_unordered(self) -> None:
        """Raise ConfigError if a microbatch within this one, which launches first, is not left."""
        group = self._shard_groups.reduce
        entered = [
            each
            for each in self._reducing
            if isinstance(each, GradientReducer) and group is not None and each.reduces_on(group)
        ]
        if entered and entered[-1] is not self:
            raise ConfigError(
                f"optimizer '{self.name}': its microbatch(...) is left before that of optimizer "
                f"'{entered[-1].name}' within it, on the same communicator: leave the inner one "
                f"first"
            )

    @torch.no_grad()
    def take_all(self) -> None:
        """Take the gradients that are not in buckets yet; launch the buckets not launched yet."""
        if self._is_inside:
            raise ConfigError(
                "step() inside of microbatch(...), which still takes gradients: leave the "
                "context first"
            )
        if not self._is_reduced:
            self._finish_round()
        self._is_reduced = True
        self._take_rest()  # raises for any that came late: its bucket has been reduced

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is not reduced yet and wait; then shares hold the averaged gradients.

        A second call in the same step does nothing. Every rank makes the same calls.

        Cost: a reduce-scatter per bucket not launched yet, and with hybrid sharding or tied stages
        an all-reduce per bucket.
        """
        if self.is_finished:
            return
        self.take_all()
        self._finish_reductions()
        if self.divisor != 1:
            for bucket in self._buckets:
                bucket.gradient.div_(self.divisor)

    def whole_gradient(self, bucket: Bucket) -> Tensor:
        """Return this rank's gradients, for an exchange by which all ranks reduce them."""
        self._is_reduced = True
        self.num_launched += 1
        return bucket.whole_gradient()

    def take_reduced(self, bucket: Bucket, shares: Tensor, *, index: int) -> None:
        """Divide the sum of all ranks' gradients, and take this rank's share, a row of it."""
        if self.divisor != 1:
            shares.div_(self.divisor)
        bucket.take_reduced(shares[index])
        self.is_finished = True

    @torch.no_grad()
    def join_microbatch(self) -> None:
        """Launch the reductions of a microbatch that are missing after it failed on this rank.

        It waits for none of them: the other ranks may be in a bridge, and come to theirs only when
        this one has let them know. Cost: memory of a whole gradient, at stage 2, too.
        """
        if self._owes_round:
            self._launch_rest(waits=False)

    @torch.no_grad()
    def join(self) -> None:
        """Make the remaining collectives of this step's reductions, without taking more gradients.

        For a rank that has failed: no rank uses its shares, and no rank waits for it.

        Cost: as `finish`.
        """
        if self.is_finished:
            return
        if not self._is_reduced:
            self._launch_rest()
        self._is_reduced = True
        self._finish_reductions()

    def drop(self) -> None:
        """Forget all gradients, and get ready for the next step."""
        for bucket in self._buckets:
            bucket.drop_gradients()
        self.show_gradients()
        for slot in self.slots:
            write_gradient(slot.parameter, None)
            slot.is_used = False
        self._next = 0
        self._is_reduced = self.is_finished = self._owes_round = self.is_apart = False
        self.turns = []

    def show_gradients(self) -> None:
        """Give parameters their own class back: from here on reading `.grad` is harmless."""
        for slot in self.slots:
            if slot.kind is not None:
                change_class(slot.parameter, slot.kind)
                slot.kind = None
                if slot.share is not None:
                    slot.share.__class__ = Tensor
        self._has_warned = False

    def on_gradient(self, slot: Slot, gradient: Tensor) -> None:
        """Move a gradient that autograd has made into its bucket, and launch full buckets."""
        self._take(slot, gradient)
        if slot.kind is None:
            self._mark_bucketed(slot)
        if self._is_eager:
            if slot.is_missing:
                slot.is_missing = False
                self._num_missing[slot.position] -= 1
            if not self._is_late:
                while self._next < len(self._buckets) and not self._num_missing[self._next]:
                    self._launch_next()

    def _take(self, slot: Slot, gradient: Tensor) -> None:
        """Move a gradient into its bucket."""
        if self._is_reduced or slot.position < self._next:
            raise ConfigError(
                f"{self._names[slot.parameter]}: a gradient came after its bucket was reduced, and "
                f"would be lost. Make one backward call in each microbatch(...), mark only the "
                f"last one is_last=True, and step() before the next. (A model in "
                f"DistributedDataParallel is reduced twice: take it out of that, the sharded "
                f"optimizer reduces gradients itself. torch.utils.checkpoint makes a backward for "
                f"each place of a parameter that is used at several: pass use_reentrant=False)"
            )
        write_gradient(slot.parameter, None)
        slot.is_used = True
        if gradient.requires_grad:  # of a backward with create_graph
            gradient = gradient.detach()
        if isinstance(gradient, DTensor):
            gradient = self._local(slot.parameter, gradient)
        slot.bucket.add_gradient(slot.number, gradient)

    def _take_rest(self) -> None:
        """Move gradients into buckets that were put into `.grad` without autograd's hooks."""
        for slot in self.slots:
            gradient = gradient_of(slot.parameter)
            if gradient is not None:
                self._take(slot, gradient)

    def _local(self, parameter: nn.Parameter, gradient: DTensor) -> Tensor:
        """Return this rank's gradient, placed like the parameter except for what is still reduced.

        Autograd may produce another placement than the parameter's (a sum not yet reduced over
        tensor ranks, or a whole if the parameter is split); it is redistributed here.
        """
        if not isinstance(parameter, DTensor):
            return gradient.full_tensor()
        mesh = parameter.device_mesh
        pairs = zip(gradient.placements, parameter.placements, strict=True)
        placements = [
            of_gradient if self._adds_up(mesh, dim) else of_parameter
            for dim, (of_gradient, of_parameter) in enumerate(pairs)
        ]
        if placements != list(gradient.placements):
            gradient = gradient.redistribute(placements=placements)
        return gradient.to_local()

    def _adds_up(self, mesh: DeviceMesh, dim: int) -> bool:
        """Return True if the reduction, not autograd, adds gradients up along a dim of a mesh."""
        names = mesh.mesh_dim_names or ()
        if names and names[dim] in ("embd", self._shard_groups.over):
            return True
        along = mesh.get_group(dim)
        return set(dist.get_process_group_ranks(along)) <= self._shard_groups.data_ranks

    def _mark_bucketed(self, slot: Slot) -> None:
        """Make reading `.grad` an error or a warning, to the end of the step.

        It is None, as if backward had found no gradient: torch's `clip_grad_norm_` would return 0
        and clip nothing. Parameters of users' own classes stay as they are.
        """
        slot.bucket.finish_gather()
        kind = type(slot.parameter)
        if kind in BUCKETED:
            slot.kind = kind
            change_class(slot.parameter, BUCKETED[kind])
            if slot.share is not None:
                slot.share.__class__ = BucketedShare

    def gradient_read(self, slot: Slot) -> None:
        """Raise or warn before `.grad` of a marked parameter is read.

        Outside of `microbatch` it is a warning, once a step: a schedule may read `.grad` before it
        adds to it.
        """
        if self._is_reduced or self._is_inside:
            raise ConfigError(self._where_gradients_are(slot))
        if gradient_of(slot.parameter) is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._where_gradients_are(slot), RuntimeWarning, stacklevel=4)

    def gradient_forgotten(self, slot: Slot) -> None:
        """Raise before `.grad` of a marked parameter is cleared, which would forget nothing."""
        raise ConfigError(self._where_gradients_are(slot))

    def _where_gradients_are(self, slot: Slot) -> str:
        return (
            f"{self._names[slot.parameter]}: its gradient is in the sharded optimizer's buckets, "
            f".grad is None; functions that read .grad (torch.nn.utils.clip_grad_norm_, norms for "
            f"logs) would find nothing. Clip with step(max_norm=...), which returns the norm; "
            f"forget gradients with zero_grad() of the optimizer"
        )

    def _finish_round(self) -> None:
        """Launch every bucket not launched yet, with what is in `.grad`, in order."""
        self._take_rest()
        self._launch_rest()

    def _launch_rest(self, *, waits: bool = True) -> None:
        while self._next < len(self._buckets):
            self._launch_next(waits=waits)
        self._owes_round = False  # first: an interrupt between the two would owe a second round
        self._next = 0

    def _finish_reductions(self) -> None:
        """Wait for all reductions of the step; then shares hold the sums of all ranks."""
        if self.is_joint:
            for bucket in self._buckets:
                self._launch(bucket, following=self._next)
        for bucket in self._buckets:
            bucket.finish_reduction()
        self._sum_between()
        self.is_finished = True

    def _launch_next(self, *, waits: bool = True) -> None:
        if waits and self._stage == 2 and self._next >= _MAX_IN_FLIGHT:
            self._buckets[self._next - _MAX_IN_FLIGHT].finish_reduction()
        if self.is_joint:
            self._next += 1
        else:
            self._launch(self._buckets[self._next], following=self._next + 1)

    def _launch(self, bucket: Bucket, *, following: int) -> None:
        counts = {"num_launched": self.num_launched + 1, "_next": following}
        bucket.launch_reduction(notes=[(setattr, self, *each) for each in counts.items()])

    def _sum_between(self) -> None:
        """Add shares up over the groups that hold the same: hybrid slices, tied stages."""
        filled = [bucket for bucket in self._buckets if bucket.gradient.numel()]
        tied = [bucket for bucket in filled if bucket.is_tied]
        for group, buckets, what in (
            (self._shard_groups.between, filled, "between hybrid slices"),
            (self._shard_groups.tied, tied, "of a tied embedding"),
        ):
            if group is not None:
                works = [collectives.all_reduce(bucket.gradient, group) for bucket in buckets]
                for work in works:
                    collectives.wait(work, f"the reduction of gradients {what}")

    def exchange_used(self) -> None:
        """Find the parameters that got a gradient on any rank; the update leaves out the others.

        Cost: an all-reduce of one number per parameter over the ranks that share them.
        """
        tied = [slot for slot in self.slots if slot.bucket.is_tied]
        for group, slots in (
            (self._shard_groups.reduce, self.slots),
            (self._shard_groups.between, self.slots),
            (self._shard_groups.tied, tied),
        ):
            # In this order: what one slice has used counts for the other stage of a tied embedding.
            flags = [slot.is_used for slot in slots]
            counts = collectives.count_ranks(flags, group, what="the exchange of used parameters")
            for slot, count in zip(slots, counts, strict=True):
                slot.is_used = count > 0

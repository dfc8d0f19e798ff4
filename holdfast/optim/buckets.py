"""Buckets: flat memory that parameters are views of, their gradients, and one collective each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast._torch import local_tensor, num_storage_uses
from holdfast.errors import ConfigError, DeadlineError
from holdfast.optim import collectives
from holdfast.optim.bucket_layout import BucketLayout, OwnedSpan, lay_out
from holdfast.optim.collectives import Call, Pending, uninterrupted
from holdfast.optim.in_flight import (
    Hiding,
    set_storage,
    storage_of,
)
from holdfast.optim.joint_message import JointMessage
from holdfast.optim.shard_groups import ShardGroups
from holdfast.state.tensor_elements import local_of

_MEMORY = (Tensor.data_ptr, Tensor.stride, Tensor.numel, attrgetter("dtype"))
"""Functions that tell the memory of a tensor; of one without gaps the last two tell its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """The parameters of one bucket, in order, and their positions in it."""

    parameters: tuple[nn.Parameter, ...]
    layout: BucketLayout
    is_tied: bool
    """True if ranks of two pipeline stages share the parameters."""


class Bucket:
    """Some parameters of this rank as views of one flat tensor, and their gradients in another.

    `values`: the parameters, in their dtype; after an all-gather equal on all ranks of the group.
    `main`: the share that this rank updates: a view of `values`, or for parameters narrower than
    float32 a separate float32 copy. `gradient`: this rank's share of the reduced gradients, in
    float32 or wider. Padding is zero everywhere and always.

    Memory per rank: the parameters, a share of gradients and, with `keeps_whole`, whole gradients;
    without it whole gradients live from the first one of a microbatch to the end of its reduction.
    """

    def __init__(self, plan: BucketPlan, *, shard_groups: ShardGroups, keeps_whole: bool) -> None:
        """Move the parameters into the bucket; their values do not change, no collective."""
        self.parameters = plan.parameters
        self.layout = plan.layout
        self.is_tied = plan.is_tied
        self._shard_groups = shard_groups
        self._keeps_whole = keeps_whole
        first = local_of(self.parameters[0])
        self.values = torch.zeros(self.layout.numel, dtype=first.dtype, device=first.device)
        self._has_dtensors = any(isinstance(each, DTensor) for each in self.parameters)
        self._classes = [type(parameter) for parameter in self.parameters]
        # Any thread may read a parameter in flight (autograd's, a data loader's), and waits for its
        # bucket by this lock. Reentrant: to show parameters is to touch them.
        self._lock = threading.RLock()
        self._views = [self._make_view(i) for i in range(len(self.parameters))]
        # As it is now: what moves a storage (`share_memory_`) moves all that are views of it.
        self._memory = [list(map(of, self._views)) for of in _MEMORY]
        self._hiding: Hiding | None = None
        self.owned = tuple(
            self.layout.owned(span, shard_groups.index) for span in self.layout.spans
        )
        start = shard_groups.index * self.layout.share
        end = start + self.layout.share
        self.share = self.values[start:end]
        wide = torch.promote_types(torch.float32, first.dtype)
        self.main = self.share if wide == first.dtype else self.share.to(wide)
        self.gradient = torch.zeros(self.layout.share, dtype=wide, device=first.device)
        self._unreduced: Tensor | None = None
        self._targets: list[Tensor] = []
        if keeps_whole:
            self._use_unreduced(self.gradient if shard_groups.num_shares == 1 else None)
        self._arrived: set[int] = set()
        self._is_summed = False
        self._is_reducing = False
        self._reducing: Pending | None = None
        self._partial: Tensor | None = None
        self._gathering: Pending | None = None
        """A gather that was started and has not been waited for."""
        self._failure: Exception | None = None
        self._is_finishing = False
        """True while parameters are shown, which tools that trace may read then: nothing waits."""
        self._num_own_uses = self._num_uses = 0
        # The same memory as another storage: a backend's thread may keep a reference to what it
        # gathered for a while after the wait, which `num_storage_uses` would count as a view.
        as_bytes = self.values.view(torch.uint8)
        self._for_gather = torch.utils.dlpack.from_dlpack(as_bytes).view(self.values.dtype)
        self._share_for_gather = self._for_gather[start:end]

    @property
    def has_main(self) -> bool:
        """True if the main parameters are a copy, not the parameters themselves."""
        return self.main is not self.share

    def all_owned(self) -> Iterator[tuple[nn.Parameter, OwnedSpan]]:
        """Yield the parameters of which this rank updates elements, and which elements."""
        for parameter, owned in zip(self.parameters, self.owned, strict=True):
            if owned is not None:
                yield parameter, owned

    def check_views(self, names: Mapping[nn.Parameter, str]) -> None:
        """Raise ConfigError that names a parameter whose memory is not in the bucket any more."""
        held: Sequence[Tensor] = self.parameters
        if self._has_dtensors:
            held = [local_tensor(p) if isinstance(p, DTensor) else p for p in self.parameters]
        # By loops in C, as every step asks.
        now = [list(map(of, held)) for of in _MEMORY]
        if now == self._memory:
            return
        looks = zip(zip(*now, strict=True), zip(*self._memory, strict=True), strict=True)
        changed = next(number for number, (look, before) in enumerate(looks) if look != before)
        raise ConfigError(
            f"{names[self.parameters[changed]]}: its memory was replaced or reshaped after the "
            f"sharded optimizer was built (a module.to(...) or an assignment?); change the model "
            f"first, then build the optimizer"
        )

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, adding to what came before."""
        if self._is_reducing:
            self.finish_reduction()  # it still reads the memory
        if self._unreduced is None:
            self._use_unreduced(None)
        target = self._targets[number]
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if number in self._arrived:
            target.add_(gradient)
        else:
            target.copy_(gradient)
            self._arrived.add(number)

    def whole_gradient(self) -> Tensor:
        """Return the gradients that have arrived, and zeros for missing ones; not reduced.

        An earlier reduction of the same step is waited for first.
        """
        self.finish_reduction()
        unreduced = self._use_unreduced(None) if self._unreduced is None else self._unreduced
        # The memory is used again in every step: what no gradient overwrites is from the last one.
        if len(self._arrived) < len(self._targets):
            for number in set(range(len(self._targets))).difference(self._arrived):
                self._targets[number].zero_()
        return unreduced

    def take_reduced(self, share: Tensor) -> None:
        """Take this rank's share of the gradients, which others have reduced."""
        self._arrived.clear()
        self.gradient.copy_(share)
        self._is_summed = True

    def launch_reduction(self, *, notes: Sequence[Call]) -> None:
        """Start reducing the gradients that have arrived; a missing one counts as zero.

        An earlier reduction of the same step is waited for first. Cost: one reduce-scatter.

        Args:
            notes: calls to make with the launch, see `collectives.reduce_scatter`.
        """
        unreduced = self.whole_gradient()
        self._arrived.clear()
        self._is_reducing = True
        if self._shard_groups.reduce is None or self.layout.share == 0:
            if unreduced is not self.gradient:
                self._partial = unreduced
            uninterrupted(notes)
            return
        # If `gradient` holds the sum of earlier microbatches, the result must not overwrite it.
        out = self.gradient if not self._is_summed else torch.empty_like(self.gradient)
        self._partial = out if self._is_summed else None
        collectives.reduce_scatter(
            out,
            unreduced,
            self._shard_groups.reduce,
            keep=partial(setattr, self, "_reducing"),
            notes=notes,
        )

    def finish_reduction(self) -> None:
        """Wait for a reduction in progress, if there is one, and add it to the share's sum."""
        if not self._is_reducing:
            return
        self._is_reducing = False
        if self._reducing is not None:
            collectives.wait(
                self._reducing, f"the reduction of gradients over {self._shard_groups.over!r}"
            )
            self._reducing = None
        if self._partial is not None:
            if self._is_summed:
                self.gradient.add_(self._partial)
            else:
                self.gradient.copy_(self._partial)
            self._partial = None
        self._is_summed = True
        if not self._keeps_whole:
            self._unreduced, self._targets = None, []

    def drop_gradients(self) -> None:
        """Forget all gradients, and get ready for the next step."""
        self.finish_reduction()
        self._arrived.clear()
        self._is_summed = False
        if not self._keeps_whole:
            self._unreduced, self._targets = None, []

    def launch_gather(self) -> None:
        """Round the main parameters into this rank's share, and start gathering all shares.

        An earlier gather is waited for. `count_writes` has been called before. Cost: one
        all-gather.
        """
        self.finish_gather()
        self._num_uses = num_storage_uses(self.values)
        self.round_main()
        if self._shard_groups.gather is not None and self.layout.share > 0:
            # Not `values`: torch would count a change of the parameters when the gather ends, and
            # a graph that saved them after the step would be called stale.
            self._gathering = collectives.all_gather(
                self._for_gather, self._share_for_gather, self._shard_groups.gather
            )

    def gather_with(self, message: JointMessage, numbers: Sequence[float], *, what: str) -> None:
        """Gather all shares of updated parameters with all ranks' numbers, in one message; wait.

        Cost: a message of one share to and from each other rank.
        """
        self.finish_gather()
        self.round_main()
        try:
            message.exchange(numbers, self._share_for_gather, what=what)
        except DeadlineError as error:
            self._failure = error  # of every later read: the other shares are missing
            raise
        self._for_gather.view(message.tensors.shape).copy_(message.tensors)

    def hide(self, *, num_other_uses: int) -> bool:
        """Make every read of the parameters wait for the gather.

        Each parameter gets a class that waits (`in_flight_class`).

        Args:
            num_other_uses: the number of known views of the memory that are read only after
                `synchronize`.

        Returns:
            False, with nothing changed, if other code holds a view of the memory or the class of a
            parameter cannot be exchanged.
        """
        if self._gathering is None:
            return True
        if self._num_uses > self._num_own_uses + num_other_uses:
            return False
        with self._lock:
            try:
                if self._hiding is None:
                    self._hiding = Hiding(
                        self.parameters, self._classes, self._views, finish=self.finish_gather
                    )
                self._hiding.hide()
            except (TypeError, RuntimeError):
                if self._hiding is not None:
                    self._hiding.show()
                return False
        return True

    def finish_gather(self) -> None:
        """Wait until the parameters are whole; a second call does nothing.

        A gather that failed fails again at every later call, and for every reader.
        """
        if self._gathering is None and self._failure is None:
            return
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._gathering is None or self._is_finishing:
                return
            self._is_finishing = True
            try:
                self._wait_and_show(self._gathering)
            finally:
                self._is_finishing = False
            self._gathering = None

    def give_up_gather(self, error: DeadlineError) -> None:
        """Treat a hidden gather in progress as failed with `error`: readers raise, none waits."""
        if self._gathering is not None and self._failure is None:
            self._failure = error
            collectives.give_up(self._gathering)

    def _wait_and_show(self, gathering: Pending) -> None:
        try:
            collectives.wait(
                gathering, f"the gathering of parameters over {self._shard_groups.over!r}"
            )
        except Exception as error:
            self._failure = error
            raise
        if self._hiding is not None:
            self._hiding.show()

    def take_written_values(self) -> None:
        """Set main parameters that do not round to the parameters of this rank's share.

        So writes to parameters since the last step (clipped weights, a loaded model) count, and all
        others keep the bits that parameters have no room for.
        """
        if self.has_main:
            _follow(self.main, self.share)

    @torch.no_grad()
    def round_main(self) -> None:
        """Set the parameters of this rank's share to the main ones, rounded."""
        if self.has_main:
            self.share.copy_(self.main)

    def refresh_main(self, number: int, *, exactly: bool) -> None:
        """Set main parameters from the parameter, which was loaded or assigned to.

        Args:
            number: of the parameter.
            exactly: set all of them, not only those that do not round to the parameter's values.
        """
        owned = self.owned[number]
        if owned is None or not self.has_main:
            return
        rounded = self.share[owned.offset : owned.offset + owned.numel]
        main = self.main[owned.offset : owned.offset + owned.numel]
        if exactly:
            main.copy_(rounded)
        else:
            _follow(main, rounded)

    def set_own_uses(self) -> None:
        """Count the present references to the memory as those of the bucket and its optimizer."""
        self._num_own_uses = num_storage_uses(self.values)

    def _make_view(self, number: int) -> Tensor:
        parameter, span = self.parameters[number], self.layout.spans[number]
        local = storage_of(parameter)
        view = self.values[span.start : span.stop].view(local.shape)
        view.copy_(local)
        set_storage(parameter, view)
        return view

    def _use_unreduced(self, memory: Tensor | None) -> Tensor:
        """Use memory for whole gradients, by default new memory of zeros."""
        if memory is None:
            memory = torch.zeros(
                self.layout.numel, dtype=self.gradient.dtype, device=self.values.device
            )
        self._unreduced = memory
        self._targets = [
            memory[span.start : span.stop].view(view.shape)
            for span, view in zip(self.layout.spans, self._views, strict=True)
        ]
        return memory


def _follow(main: Tensor, rounded: Tensor) -> None:
    """Set the elements of `main` that do not round to those of `rounded`."""
    written = main.to(rounded.dtype) != rounded
    if bool(written.any()):
        main[written] = rounded[written].to(main.dtype)


def plan_buckets(
    parameters: Sequence[nn.Parameter],
    *,
    num_shares: int,
    bucket_nbytes: int,
    align_nbytes: int,
    axes: Callable[[nn.Parameter], tuple[str, ...]] = lambda _: (),
) -> list[BucketPlan]:
    """Assign parameters to buckets, in the order in which backward is expected to fill them.

    One bucket holds parameters of only one dtype, device and *pattern of replication*. So ranks
    that hold the same parameters (of one tensor-parallel group, or the two stages of a tied
    embedding) cut them the same way, whatever else they hold.

    Args:
        parameters: the trained ones, in the model's order.
        num_shares: ranks that hold one share of each bucket.
        bucket_nbytes: bytes of gradient; a larger parameter has its own bucket.
        align_nbytes: parameters and shares start at multiples of this many bytes of parameter.
        axes: gives the axes along which a plain parameter is cut.
    """
    kinds: dict[tuple[object, ...], list[nn.Parameter]] = {}
    order = {id(p): i for i, p in enumerate(reversed(parameters))}
    # torch computes the ranks of a mesh again at each read.
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, DTensor)}
    ranks_of = {key: tuple(mesh.mesh.flatten().tolist()) for key, mesh in meshes.items()}
    for parameter in reversed(parameters):
        local = local_of(parameter)
        kind: tuple[object, ...] = (local.dtype, local.device, axes(parameter))
        if isinstance(parameter, DTensor):
            replicated = tuple(placement.is_replicate() for placement in parameter.placements)
            kind += (ranks_of[id(parameter.device_mesh)], replicated)
        kinds.setdefault(kind, []).append(parameter)
    plans = []
    for members in kinds.values():
        first = local_of(members[0])
        wide = torch.promote_types(torch.float32, first.dtype)
        layouts = lay_out(
            [local_of(p).numel() for p in members],
            num_shares=num_shares,
            limit=max(bucket_nbytes // wide.itemsize, 1),
            align=max(align_nbytes // first.element_size(), 1),
        )
        for layout in layouts:
            inside = tuple(members[span.item] for span in layout.spans)
            tied = isinstance(inside[0], DTensor) and _is_tied(inside[0])
            plans.append(BucketPlan(parameters=inside, layout=layout, is_tied=tied))
    return sorted(plans, key=lambda plan: max(order[id(p)] for p in plan.parameters))


def _is_tied(parameter: DTensor) -> bool:
    """Return True if the stages at both ends of the pipeline hold the same elements of it."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if "embd" not in names:
        return False
    dim = names.index("embd")
    return mesh.size(dim) > 1 and parameter.placements[dim].is_replicate()

"""Buckets: flat memory that parameters are views of, their gradients, and one collective each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError
from holdfast.optim import shard_groups
from holdfast.optim.bucket_layout import Packing, Run, pack
from holdfast.optim.in_flight import (
    change_class,
    num_uses,
    pending_class,
    placeholder,
    set_storage,
    storage_of,
)
from holdfast.optim.shard_groups import ShardGroups
from holdfast.state.tensors import local_of

if TYPE_CHECKING:
    from torch.distributed import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Parameters that go into one bucket, in order, and how they lie there."""

    parameters: tuple[nn.Parameter, ...]
    packing: Packing
    is_tied: bool
    """Whether ranks of two pipeline stages share the parameters."""


class Bucket:
    """Some parameters of this rank as views of one flat tensor, and their gradients beside.

    `values`: the parameters, in their dtype; after an all-gather equal on all ranks of the group.
    `main`: what this rank updates, one share: a view of `values`, or for parameters narrower than
    float32 a float32 copy of its own. `gradient`: this rank's share of the reduced gradients, in
    float32 or wider. Padding is zero everywhere and always.

    Memory per rank: the parameters, a share of gradients and, with `keeps_whole`, whole gradients;
    without it whole gradients live from the first one of a microbatch to the end of its reduction.
    """

    def __init__(self, plan: BucketPlan, *, shard_groups: ShardGroups, keeps_whole: bool) -> None:
        """Move the parameters into the bucket; their values do not change, no collective."""
        self.parameters = plan.parameters
        self.packing = plan.packing
        self.is_tied = plan.is_tied
        self._shard_groups = shard_groups
        self._keeps_whole = keeps_whole
        first = local_of(self.parameters[0])
        self.values = torch.zeros(self.packing.numel, dtype=first.dtype, device=first.device)
        self._classes = [type(parameter) for parameter in self.parameters]
        self._pending: dict[type[Tensor], type[Tensor]] = {}
        self._lock = threading.RLock()
        self._views = [self._move_in(i) for i in range(len(self.parameters))]
        begin = shard_groups.index * self.packing.share
        self.share = self.values[begin : begin + self.packing.share]
        wide = torch.promote_types(torch.float32, first.dtype)
        self.main = self.share if wide == first.dtype else self.share.to(wide)
        self.gradient = torch.zeros(self.packing.share, dtype=wide, device=first.device)
        self._whole: Tensor | None = None
        if keeps_whole:
            self._whole = self.gradient if shard_groups.num_shares == 1 else self._new_whole()
        self._arrived: set[int] = set()
        self._is_summed = False
        self._is_reducing = False
        self._reducing: Work | None = None
        self._partial: Tensor | None = None
        self._gathering: Work | None = None
        self._failure: Exception | None = None
        self._is_hidden = False
        self._num_own_uses = self._num_uses = 0
        # The same memory as another storage: a backend's thread may hold on to what it gathered
        # for a while after the wait, and would be counted as somebody's view (`num_uses`).
        as_bytes = self.values.view(torch.uint8)
        self._for_gather = torch.utils.dlpack.from_dlpack(as_bytes).view(self.values.dtype)

    @property
    def is_in_flight(self) -> bool:
        """Whether a gather is going on that nobody has waited for."""
        return self._gathering is not None

    @property
    def has_main(self) -> bool:
        """Whether the main parameters are a copy, not the parameters themselves."""
        return self.main is not self.share

    def run(self, number: int) -> Run | None:
        """Which elements of a parameter this rank updates."""
        return self.packing.run(self.packing.slots[number], self._shard_groups.index)

    def check_views(self, names: Sequence[str]) -> None:
        """ConfigError naming a parameter whose memory is not the bucket any more."""
        for parameter, view, name in zip(self.parameters, self._views, names, strict=True):
            held = storage_of(parameter)
            if held.data_ptr() != view.data_ptr() or held.dtype != view.dtype:
                raise ConfigError(
                    f"{name}: its memory was replaced after the sharded optimizer was built (a "
                    f"module.to(...) or an assignment?); move the model first, then build the "
                    f"optimizer"
                )

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        """Take the local gradient of a parameter, adding to what came before.

        A reduction under way still reads the memory: it is waited for.
        """
        self.finish_reduction()
        if self._whole is None:
            self._whole = self._new_whole()
        slot = self.packing.slots[number]
        place = self._whole[slot.start : slot.stop].view(self._views[number].shape)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if number in self._arrived:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self._arrived.add(number)

    def launch_reduction(self) -> None:
        """Start reducing what has arrived; parameters without a gradient count as zero.

        An earlier reduction of the same step is waited for first.
        """
        self.finish_reduction()
        if self._whole is None:
            self._whole = self._new_whole()
        for number, slot in enumerate(self.packing.slots):
            if number not in self._arrived:
                self._whole[slot.start : slot.stop].zero_()
        self._arrived.clear()
        self._is_reducing = True
        if self._shard_groups.reduce is None or self.packing.share == 0:
            if self._whole is not self.gradient:
                self._partial = self._whole
            return
        out = self.gradient if not self._is_summed else torch.empty_like(self.gradient)
        self._partial = out if self._is_summed else None
        self._reducing = shard_groups.reduce_scatter(out, self._whole, self._shard_groups.reduce)

    def finish_reduction(self) -> None:
        """Wait for a reduction under way and add it to the share's sum; else nothing happens."""
        if not self._is_reducing:
            return
        self._is_reducing = False
        if self._reducing is not None:
            shard_groups.wait(
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
            self._whole = None

    def drop_gradients(self) -> None:
        """Forget all gradients; the next step begins."""
        self.finish_reduction()
        self._arrived.clear()
        self._is_summed = False
        if not self._keeps_whole:
            self._whole = None

    def launch_gather(self) -> None:
        """Round the main parameters into this rank's share, and start gathering all shares.

        An earlier gather is waited for. `update` has counted the change for autograd already.
        """
        self.finish_gather()
        self._num_uses = num_uses(self.values)
        if self.has_main:
            self.share.copy_(self.main)
        if self._shard_groups.gather is not None and self.packing.share > 0:
            # its version counter is not the parameters'
            begin = self._shard_groups.index * self.packing.share
            share = self._for_gather[begin : begin + self.packing.share]
            self._gathering = shard_groups.all_gather(
                self._for_gather, share, self._shard_groups.gather
            )

    def hide(self, *, num_other_uses: int) -> bool:
        """Keep everybody from the parameters until the gather is done; whether that worked.

        Whoever reads one waits for the gather (`pending_class`). False, and nothing is changed,
        where somebody holds a view of the memory, or a parameter's class cannot be exchanged.
        `num_other_uses`: how many views are known, and read only after `synchronize`.
        """
        if self._gathering is None:
            return True
        if self._num_uses > self._num_own_uses + num_other_uses:
            return False
        with self._lock:
            self._is_hidden = True
            try:
                for parameter, kind, view in zip(
                    self.parameters, self._classes, self._views, strict=True
                ):
                    if kind not in self._pending:
                        self._pending[kind] = pending_class(kind, self.finish_gather)
                    set_storage(parameter, placeholder(view))
                    change_class(parameter, self._pending[kind])
            except (TypeError, RuntimeError):
                self._uncover()
                return False
        return True

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Wait for the parameters to be whole; nothing happens the second time.

        A gather that failed fails again at every later call, and for every reader.
        """
        if self._gathering is None and self._failure is None:
            return
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._gathering is None:
                return
            try:
                shard_groups.wait(
                    self._gathering, f"the gathering of parameters over {self._shard_groups.over!r}"
                )
            except Exception as error:
                self._failure = error
                raise
            self._uncover()
            self._gathering = None

    def count_change(self) -> None:
        """Have autograd know that parameters change: a graph that saved them is stale."""
        for parameter in self.parameters:
            torch.autograd.graph.increment_version([parameter, storage_of(parameter)])

    def follow_parameters(self) -> None:
        """Set main parameters that do not round to what this rank's share of parameters holds.

        So what was written to parameters since the last step (clipped weights, a loaded model)
        counts, and the others keep the bits that parameters have no room for.
        """
        if self.has_main:
            written = self.main.to(self.share.dtype) != self.share
            if bool(written.any()):
                self.main[written] = self.share[written].to(self.main.dtype)

    def refresh_main(self, number: int, *, exactly: bool) -> None:
        """Set main parameters from the parameter, which was loaded or changed by hand.

        `exactly`: all of them; otherwise only those that do not round to what the parameter holds.
        """
        run = self.run(number)
        if run is None or not self.has_main:
            return
        held = self.share[run.offset : run.offset + run.numel]
        main = self.main[run.offset : run.offset + run.numel]
        if exactly:
            main.copy_(held)
        else:
            main.copy_(torch.where(main.to(held.dtype) == held, main, held.to(main.dtype)))

    def count_uses(self) -> None:
        """Take what holds on to the memory now for this bucket's own and its optimizer's."""
        self._num_own_uses = num_uses(self.values)

    def _uncover(self) -> None:
        """Give parameters their class and their memory back."""
        if self._is_hidden:
            for parameter, kind, view in zip(
                self.parameters, self._classes, self._views, strict=True
            ):
                change_class(parameter, kind)
                set_storage(parameter, view)
            self._is_hidden = False

    def _move_in(self, number: int) -> Tensor:
        parameter, slot = self.parameters[number], self.packing.slots[number]
        local = storage_of(parameter)
        view = self.values[slot.start : slot.stop].view(local.shape)
        view.copy_(local)
        set_storage(parameter, view)
        return view

    def _new_whole(self) -> Tensor:
        return torch.zeros(self.packing.numel, dtype=self.gradient.dtype, device=self.values.device)


def plan_buckets(
    parameters: Sequence[nn.Parameter], *, num_shares: int, bucket_nbytes: int, align_nbytes: int
) -> list[BucketPlan]:
    """Parameters into buckets, in the order in which backward is expected to fill them.

    One bucket holds parameters of one dtype, device and *pattern of replication* only. So ranks
    that hold the same parameters (of one tensor-parallel group, or the two stages of a tied
    embedding) cut them alike, whatever else they hold. `bucket_nbytes`: of gradient; a larger
    parameter has a bucket of its own. `align_nbytes`: what parameters and shares begin at multiples
    of, in bytes of parameter.
    """
    kinds: dict[tuple[object, ...], list[nn.Parameter]] = {}
    order = {id(p): i for i, p in enumerate(reversed(parameters))}
    for parameter in reversed(parameters):
        kinds.setdefault(_kind(parameter), []).append(parameter)
    plans = []
    for members in kinds.values():
        first = local_of(members[0])
        wide = torch.promote_types(torch.float32, first.dtype)
        packings = pack(
            [local_of(p).numel() for p in members],
            num_shares=num_shares,
            limit=max(bucket_nbytes // wide.itemsize, 1),
            align=max(align_nbytes // first.element_size(), 1),
        )
        for packing in packings:
            inside = tuple(members[slot.item] for slot in packing.slots)
            tied = isinstance(inside[0], DTensor) and _is_tied(inside[0])
            plans.append(BucketPlan(parameters=inside, packing=packing, is_tied=tied))
    return sorted(plans, key=lambda plan: max(order[id(p)] for p in plan.parameters))


def _kind(parameter: nn.Parameter) -> tuple[object, ...]:
    local = local_of(parameter)
    kind: tuple[object, ...] = (local.dtype, local.device)
    if isinstance(parameter, DTensor):
        kind += tuple(parameter.device_mesh.mesh.flatten().tolist())
        kind += tuple(placement.is_replicate() for placement in parameter.placements)
    return kind


def _is_tied(parameter: DTensor) -> bool:
    """Whether the stages at both ends of the pipeline hold the same elements of it."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if "embd" not in names:
        return False
    dim = names.index("embd")
    return mesh.size(dim) > 1 and parameter.placements[dim].is_replicate()

"""Every private name of torch's FSDP2 that this package needs, in one place.

`fully_shard` alone is insufficient: it puts all parameters of a unit into one group, refuses two
dtypes in it, does not join a parameter that is tied between units, and accepts no custom all-gather
if a unit has several groups. Its pieces do all of that, so units are made of these.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from holdfast._torch import has_unreduced, whole_gradient
from holdfast.errors import ConfigError
from holdfast.fsdp.launch_log import (
    GatherOn,
    LaunchLog,
    LoggedGather,
    LoggedReduction,
    LoggedSums,
    can_watch,
)
from holdfast.optim.in_flight import (
    BUCKETED,
    GradientHook,
    HeldHook,
    change_class,
    gradient_hook,
    gradient_of,
    write_gradient,
)
from holdfast.optim.left_gradients import LeftGradients

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
        TrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    _IDLE, _SHARDED = TrainingState.IDLE, ShardedState.SHARDED
    _UNSHARDED = ShardedState.UNSHARDED
    _BACKWARD = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
    _IS_KNOWN = hasattr(FSDPState(), "_fsdp_param_groups") and hasattr(
        FSDPModule, "reset_iter_state"
    )
except ImportError:  # an older torch, or a newer one that has moved them
    _IS_KNOWN = False
    FSDPParamGroup = object  # type: ignore[misc, assignment]


_MARKS = ("_is_param", "_fsdp_orig_uid")
"""Attributes of parameters that are torch's own."""


def check_version() -> None:
    """Raise ConfigError if this torch's FSDP2 does not have the pieces used here."""
    if not _IS_KNOWN:
        raise ConfigError(
            f"fully_shard_model needs FSDP2 as torch 2.13 has it; this is torch "
            f"{torch.__version__}. Install torch 2.13, or use holdfast.ShardedOptimizer"
        )


def is_sharded_module(module: nn.Module) -> bool:
    """Return True if this module is already a unit of FSDP2."""
    return isinstance(module, FSDPModule)


def mesh_info(mesh: DeviceMesh, *, shards: bool) -> Any:
    """Describe a mesh to FSDP2: (replicas, shards), only shards, or only replicas."""
    if not shards:
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    if mesh.ndim == 2:
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return FSDPMeshInfo(mesh, shard_mesh_dim=0)


def log_launches(group: Any, log: LaunchLog, *, name: str) -> None:
    """Note all collectives of a group of parameters from now on; `name` tells it from others."""
    if isinstance(group.mesh_info, FSDPMeshInfo):
        gather, over = group._all_gather_comm, group._reduce_scatter_process_group
        is_watched = can_watch(over, group.device)
        gathers_on = gather.group if isinstance(gather, GatherOn) else over
        log.expect(gathers_on)
        log.expect(over)
        group._all_gather_comm = LoggedGather(
            gather,
            log,
            over=gathers_on,
            source=f"the gather of {name}",
            is_watched=is_watched,
        )
        group._reduce_scatter_comm = LoggedReduction(
            group._reduce_scatter_comm,
            log,
            over=over,
            source=f"the reduction of {name}",
            is_watched=is_watched,
        )
    if isinstance(group.mesh_info, DDPMeshInfo):
        between = group.mesh_info.replicate_process_group
        log.expect(between)
        group.sums = LoggedSums(
            between,
            log,
            source=f"the sum between replicas of {name}",
            is_watched=can_watch(between, group.device),
        )


class PendingGradient(GradientHook):
    """The gradient of a parameter that is not reduced yet, so that its shard has none.

    `zero_grad` of an optimizer or a module, which would forget nothing, forgets this one, too.
    """

    name = "a sharded model"

    def __init__(self, group: ParameterGroup, member: Any) -> None:
        self._group = group
        self._member = member

    def on_read(self) -> None:
        """Raise ConfigError: what is read is None, as if there were no gradient."""
        raise ConfigError(
            f"the gradient of a parameter of shape {list(self._member.sharded_param.shape)} is not "
            f"reduced yet, and its .grad is None: read it after the backward of the last "
            f"microbatch, microbatch(is_last=True). (What torch.utils.checkpoint computes again in "
            f"a backward of its own may come too late: pass use_reentrant=False)"
        )

    def on_clear(self) -> None:
        """Forget it."""
        self._group.forget(self._member)

    def on_zero(self) -> None:
        """Make it zeros, which a step uses: with momentum and decay, for example."""
        self._group.make_zero(self._member)


class _InTrainingState:
    """Gives a group another training state for a while, in a third of FSDP2's own time for that."""

    __slots__ = ("_before", "_group")

    def __init__(self, group: Any, training_state: Any) -> None:
        self._group, self._before = group, group._training_state
        group._training_state = training_state

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._group._training_state = self._before


class UseCounts:
    """Tells ranks, in a reduction that they make anyway, which parameters none of them has used.

    To FSDP2 it is one more parameter: the gradient of each rank has 1 for what this rank has used,
    and 0 for the rest. However the reduction divides, a result is 0 only if all ranks gave 0.

    Args:
        num_members: parameters that may be reduced with it.
        num_parts: of the reduction.
        device: of the gradients.
    """

    # What FSDP2 reads of a parameter that it reduces.
    fsdp_placement = Shard(0)
    offload_to_cpu = False
    contiguous_sharded_stride = (1,)
    _post_accumulate_grad_hooks = None

    def __init__(self, *, num_members: int, num_parts: int, device: torch.device) -> None:
        # What follows in a buffer keeps its alignment.
        self.size = -(-num_members // _ALIGNMENT) * _ALIGNMENT
        self.sharded_size = torch.Size([self.size])
        self.sharded_param = self._unsharded_param = self
        """Of which FSDP2 asks `grad`, and if it is there."""
        self.grad: torch.Tensor | None = None
        """What FSDP2 gives as the reduced gradient."""
        self.unsharded_accumulated_grad: torch.Tensor | None = None
        self.unsharded_accumulated_grad_data: torch.Tensor | None = None
        """What is reduced, where FSDP2 takes it."""
        self._num_parts = num_parts
        self._device = device
        self._used: list[bool] = []
        self._dtype: torch.dtype | None = None

    def give(self, used: list[bool], dtype: torch.dtype) -> None:
        """Set what this rank gives to the next reduction."""
        if used != self._used or dtype is not self._dtype:
            part = [*map(float, used), *repeat(0.0, self.size - len(used))]
            is_pinned = self._device.type == "cuda"  # the host does not wait for the copy then
            one = torch.tensor(part, dtype=dtype, device="cpu", pin_memory=is_pinned)
            given = one.to(self._device, non_blocking=True).repeat(self._num_parts)
            self.unsharded_accumulated_grad_data = given
            self._used, self._dtype = used, dtype
        self.unsharded_accumulated_grad, self.grad = self.unsharded_accumulated_grad_data, None

    def take(self) -> list[complex] | None:
        """Return for each parameter 0 if no rank has used it; None if nothing was reduced.

        Waits for the device.
        """
        result: list[complex] | None = None if self.grad is None else self.grad.tolist()
        return result

    # ---- for FSDP2 ----

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Do nothing: it has one gradient."""

    def to_sharded_dtensor(self, reduced: torch.Tensor) -> torch.Tensor:
        """Return a reduced gradient as it is."""
        return reduced


_ALIGNMENT = 16
"""Elements, which are at least 16 bytes: what NCCL copies at once."""
_Base: Any = FSDPParamGroup


class ParameterGroup(_Base):  # type: ignore[misc]
    """Parameters of a unit, whole in the model's places only while code of the model runs.

    Otherwise shards are there, even while whole parameters are kept: what is written to, frozen or
    read is what stays. FSDP2 leaves whole ones until it frees them.

    A gradient that waits for its reduction is at a whole parameter, which no optimizer knows. Until
    the next backward its shard has a class that notices `zero_grad`.
    """

    fsdp_params: list[Any]
    _partial_reduce_output: torch.Tensor | None
    is_aside = False
    """True while whole parameters are kept, and shards are in their places."""
    is_compared = False
    """True if whole parameters that are aside are known to be those of the shards."""
    agree: Callable[[], None]
    """Sets `trains` to what is trained now, once all ranks have changed it."""
    opened: list[tuple[int, int]] | None = None
    """Versions of the shards when `unshard()` put whole parameters into the model's places, for any
    code to see, and until they end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: dict[Any, tuple[int, int]] = {}
        """Parameters that got a gradient; see `UnitGuard`."""
        self.names: list[str] = []
        """Of the parameters in the model."""
        self.trains = trained(self)
        """Whether each is trained, as ranks have agreed; see `TrainedParameters`."""
        self._has_outer = isinstance(self.mesh_info, DDPMeshInfo)
        """True if gradients are summed between slices, or whole ones between ranks."""
        self._has_trained = self._owes = False
        """True if there was a backward since the last step, and if gradients of the last one are
        not reduced, or are summed in a slice only."""
        self._trained_before: set[Any] = set()
        """Members that some backward since the last step was to train before `trains` changed."""
        self._owed_before: set[Any] = set()
        """Those of them whose gradients are not reduced, or are summed in a slice only."""
        self._versions: list[tuple[int, int]] | None = None
        """Those of the shards before whole parameters were gathered from them in a forward."""
        self.sums: LoggedSums | None = None
        """Makes all-reduces, if this group has any."""
        self._pending: dict[Any, tuple[PendingGradient, RemovableHandle]] = {}
        """Members whose shards have a class that notices `zero_grad`."""
        self._counts = UseCounts(
            num_members=len(self.fsdp_params), num_parts=num_shards(self), device=self.device
        )
        self._unused: set[Any] = set()
        """Members without a gradient before this backward, which this rank has not used."""
        self._unwatched = {True, False}
        """Whether the first forward with gradients, and that without, are still to be watched."""

    @property
    def _all_reduce_process_group(self) -> Any:
        return super()._all_reduce_process_group if self.sums is None else self.sums

    def _init_mp_dtypes(self) -> None:
        """FSDP2 calls it before the first forward, and leaves out a group that is frozen then."""
        super()._init_mp_dtypes()
        first = self.fsdp_params[0]  # all of a group have the same dtype
        self._orig_dtype, self._reduce_dtype = first.orig_dtype, first.reduce_dtype

    def change_trained(self) -> None:
        """Note that all ranks train what this one trains now."""
        before = self._agreed()
        if self._has_trained:
            self._trained_before |= before
        if self._owes:
            self._owed_before |= before
        self.trains = trained(self)

    def _agreed(self) -> set[Any]:
        return {
            each
            for each, is_trained in zip(self.fsdp_params, self.trains, strict=True)
            if is_trained
        }

    def trained_in_step(self) -> set[Any]:
        """Return members that a backward since the last step was to train; on all ranks alike."""
        return self._trained_before | self._agreed() if self._has_trained else self._trained_before

    def _owed(self) -> set[Any]:
        return self._owed_before | self._agreed() if self._owes else self._owed_before

    def use_training_state(self, training_state: Any) -> _InTrainingState:
        """FSDP2 enters it around each gather ahead."""
        return _InTrainingState(self, training_state)

    def wait_for_unshard(self) -> None:
        """FSDP2 calls it before each forward and backward, and for `unshard()`."""
        if self._training_state is _IDLE:
            self.opened = versions_of_shards(self)
        super().wait_for_unshard()
        if self.is_aside:
            for member in self.fsdp_params:
                member.to_unsharded()
            self.is_aside = False

    def enter_forward(self) -> bool:
        """Return True if whole parameters are kept; else a forward gathers the shards of now."""
        if self._unwatched and torch.is_grad_enabled() in self._unwatched:
            self.post_forward = self._watch_forward
        if [*map(_IS_TRAINED, self.fsdp_params)] != self.trains and torch.is_grad_enabled():
            self.agree()
        if self._sharded_state is _UNSHARDED:
            return True
        self._versions = [*map(_SHARD_VERSIONS, self.fsdp_params)]
        return False

    def is_written(self) -> bool:
        """Return True if shards were written since, but for writes that count no version."""
        return self._versions is not None and versions_of_shards(self) != self._versions

    def put_aside(self) -> None:
        """Put shards into the places of whole parameters that are kept."""
        if self._sharded_state is _UNSHARDED and not self.is_aside:
            is_lost = self._is_lost()
            for member in self.fsdp_params:
                member._setattr_on_modules(member.sharded_param)
            self.is_aside, self.is_compared = True, False
            if is_lost:
                _refuse_lost()

    def _to_sharded(self) -> None:
        if self.fsdp_params[-1] is self._counts:  # the reduction has taken it
            del self.fsdp_params[-1]
        is_lost = self.opened is not None and self._is_lost()
        super()._to_sharded()
        self.is_aside = False
        if is_lost:
            _refuse_lost()

    def _is_lost(self) -> bool:
        """Return True if whole parameters were written after `unshard()`, and end now.

        Where shards were written nothing tells whether whole ones were, too.
        """
        opened, self.opened = self.opened, None
        return (
            opened is not None
            and is_whole(self)
            and opened == versions_of_shards(self)
            and is_stale(self)
        )

    def _watch_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Compare whole parameters with the shards after the first forwards.

        It is `post_forward` of this object only then: a frame less in all other forwards.

        What code of the model writes through `.data` is lost, and counts no version. A model that
        does that mostly does it always, so the first forward shows it.
        """
        is_in_forward = self._training_state is TrainingState.FORWARD
        if is_in_forward and torch.is_grad_enabled() in self._unwatched:
            self._unwatched.discard(torch.is_grad_enabled())
            del self.post_forward
            if is_whole(self) and not self.is_written() and is_stale(self):
                raise ConfigError(
                    "parameters were written by code of the model in a forward, maybe through "
                    ".data; that changed a whole copy, which is thrown away. Write to parameters "
                    "outside of the model's forward"
                )
        return super().post_forward(module, args, output)

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        """FSDP2 calls it before autograd adds to gradients.

        Raises:
            ConfigError: Shards were written since the forward, which autograd cannot see.
        """
        # As `is_written`, without its frames.
        if (
            self._sharded_state is not _UNSHARDED
            and self._versions is not None
            and [*map(_SHARD_VERSIONS, self.fsdp_params)] != self._versions
        ):
            raise ConfigError(
                "parameters of the sharded model were written between a forward and its backward, "
                "which would use other weights than the forward: write before the forward, or "
                "after the backward"
            )
        if self.used:
            self.forget_cleared()
        if self._pending:
            self.unmark()
        super().pre_backward(default_prefetch, *unused)

    def post_backward(self, *unused: Any) -> None:
        """FSDP2 calls it to reduce gradients, also of units without a backward."""
        if self.used:
            self.forget_cleared()
        if self._pending:
            self.unmark()
        if [*map(_IS_TRAINED, self.fsdp_params)] != self.trains:
            self.agree()
        members, dtype = self.fsdp_params, None
        # Cheaper than a hook at each parameter that autograd has given a gradient.
        for member, gradient in zip(members, self._whole_gradients(), strict=False):
            if gradient is not None:
                self.used[member] = _SHARD_VERSIONS(member)
                dtype = gradient.dtype
        if not self.reduce_grads:
            dtype = None
        elif dtype is None or self._owes or self._owed_before:
            self._take_part()
            dtype = self._dtype_to_reduce()
        self._has_trained = True
        self._owes = not self.reduce_grads or (self._has_outer and not self.all_reduce_grads)
        if self._owed_before and not self._owes:
            self._owed_before.clear()
        if dtype is None:
            # FSDP2 fails to keep gradients of a group that has not run in any forward yet.
            if self.reduce_grads or _whole_of(members[0]) is not None:
                super().post_backward(*unused)
            return
        used = [*map(self.used.__contains__, members)]
        if self._unused or False in used:
            self._unused = {
                each
                for each, is_used in zip(members, used, strict=True)
                if not is_used and (each in self._unused or gradient_of(each.sharded_param) is None)
            }
        self._counts.give(used, dtype)
        self.fsdp_params = [*members, self._counts]
        try:
            super().post_backward(*unused)
        finally:
            self.fsdp_params = members

    def finalize_backward(self) -> None:
        """FSDP2 calls it at the end of a backward."""
        super().finalize_backward()
        waits = self._partial_reduce_output is not None or not self.reduce_grads
        for member, gradient in zip(self.fsdp_params, self._whole_gradients(), strict=False):
            if gradient is not None:  # came after the reduction
                self.used[member] = _SHARD_VERSIONS(member)
                waits = True
        if self._unused:
            self._remove_unused()
        self._counts.grad = None  # a view of all reduced gradients
        if self._sharded_state is _UNSHARDED:
            self.put_aside()
        if waits:
            self.mark()

    def _whole_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of whole parameters; nothing before these are made, all at once."""
        try:
            return [*map(_WHOLE_GRADIENT, self.fsdp_params)]
        except AttributeError:
            return []

    def _dtype_to_reduce(self) -> torch.dtype | None:
        """Return the dtype of the gradients that wait for a reduction; None if there is nothing."""
        for member in self.fsdp_params:
            whole = _whole_of(member)
            waiting = whole_gradient(member)
            if waiting is None and whole is not None and whole.requires_grad:
                waiting = whole  # FSDP2 reduces zeros
            if waiting is not None:
                return waiting.dtype
        return None

    def _remove_unused(self) -> None:
        """Leave what no rank has used without a gradient, as one process does.

        FSDP2 gives it zeros, by which momentum and decay would move it. All ranks that hold a part
        of a parameter have the same count. What is used later in the step gets its gradient then.

        Cost: waits for the device.
        """
        counts = self._counts.take()
        for member, count in zip(self.fsdp_params, counts or (), strict=False):
            if member in self._unused and not count:
                write_gradient(member.sharded_param, None)
        self._unused.clear()

    def _take_part(self) -> None:
        """Take part in reductions of what was trained and is frozen since, and in their dtype.

        FSDP2 reduces what this rank has a gradient for, and zeros only for what is trained now:
        ranks without a gradient for what was frozen, as those whose rows reached no such expert,
        would reduce less than the others. Gradients that have waited may be wider than those of the
        last microbatch, and than FSDP2's zeros; it refuses to reduce both at once.
        """
        waiting = [each.unsharded_accumulated_grad for each in self.fsdp_params]
        dtype = next((each.dtype for each in waiting if each is not None), None)
        owed = self._owed()
        for member in self.fsdp_params:
            whole = _whole_of(member)
            if whole is None:
                continue
            is_owed = member in owed and not member.sharded_param.requires_grad
            has_zeros = is_owed or (dtype is not None and whole.requires_grad)
            if has_zeros and whole_gradient(member) is None:
                zeros = torch.zeros_like(whole, dtype=dtype)
                member.unsharded_accumulated_grad = zeros.detach()
            elif dtype is not None:
                member.accumulate_unsharded_grad_if_needed()
                member.to_accumulated_grad_if_needed()

    def drop_gradients(self) -> None:
        """Forget gradients: reduced ones, whole ones, and sums within a slice; and their owners."""
        if self._pending:
            self.unmark()
        self.used.clear()
        self._has_trained = self._owes = False
        for rare in (self._unused, self._trained_before, self._owed_before):
            if rare:
                rare.clear()
        self._partial_reduce_output = None
        for each in self.fsdp_params:
            each.sharded_param.grad = None
            each.unsharded_accumulated_grad = None
        for each, gradient in zip(self.fsdp_params, self._whole_gradients(), strict=False):
            if gradient is not None:
                each._unsharded_param.grad = None

    def summed_sizes(self) -> dict[Any, int]:
        """Return the elements of each parameter that the sum in a slice has a part of, in order."""
        owed = self._owed()
        members = [each for each in self.fsdp_params if _IS_TRAINED(each) or each in owed]
        sizes = {each: each._sharded_param_data.numel() for each in members}
        return {**sizes, self._counts: self._counts.size}

    def mark(self) -> None:
        """Notice from now on if a gradient that waits is to be forgotten."""
        if self._pending:
            return
        summed = {} if self._partial_reduce_output is None else self.summed_sizes()
        for member in self.fsdp_params:
            shard = member.sharded_param
            kind = BUCKETED.get(type(shard))
            if kind is not None and (member in summed or whole_gradient(member) is not None):
                hook = PendingGradient(self, member)
                # Not by the method, which takes no hook for what is frozen by now.
                hooks = shard._post_accumulate_grad_hooks
                if hooks is None:
                    hooks = shard._post_accumulate_grad_hooks = OrderedDict()
                handle = RemovableHandle(hooks)
                hooks[handle.id] = HeldHook(hook)
                self._pending[member] = hook, handle
                change_class(shard, kind)

    def unmark(self) -> None:
        """Give shards their own class back."""
        if self._pending:
            for member, (_, handle) in self._pending.items():
                handle.remove()
                change_class(member.sharded_param, DTensor)
            self._pending.clear()

    def forget(self, member: Any) -> None:
        """Forget the gradient of one parameter that waits; its shard has none."""
        member.unsharded_accumulated_grad = None
        if hasattr(member, "_unsharded_param"):
            member._unsharded_param.grad = None
        _, handle = self._pending.pop(member)
        handle.remove()
        change_class(member.sharded_param, DTensor)
        if not self._pending:
            self._partial_reduce_output = None
        elif self._partial_reduce_output is not None:
            self._part_of_sum(member).zero_()
            self._part_of_sum(self._counts)[self.fsdp_params.index(member)] = 0
        self.used.pop(member, None)

    def make_zero(self, member: Any) -> None:
        """Make zeros of the gradient of one parameter that waits."""
        waiting = whole_gradient(member)
        if waiting is not None:
            waiting.zero_()
        if self._partial_reduce_output is not None:
            self._part_of_sum(member).zero_()

    def forget_cleared(self) -> None:
        """Forget that parameters got a gradient which was cleared since, as by `zero_grad`."""
        used = self.used
        if not used or self._partial_reduce_output is not None:
            return
        for member in self.fsdp_params:
            has_none = member in used and gradient_of(member.sharded_param) is None
            if has_none and whole_gradient(member) is None:
                del used[member]

    def _part_of_sum(self, member: Any) -> torch.Tensor:
        """Return the part of what is summed in a slice that is of one parameter."""
        summed = self._partial_reduce_output
        assert summed is not None
        sizes = self.summed_sizes()
        if member not in sizes or sum(sizes.values()) != summed.numel():
            raise ConfigError(
                "zero_grad: parameters of the sharded model were frozen or thawed since their "
                "gradients were summed; forget gradients with drop_gradients() of it on all ranks"
            )
        first = sum([*sizes.values()][: [*sizes].index(member)])
        return summed.narrow(0, first, sizes[member])


def _refuse_lost() -> None:
    raise ConfigError(
        "a whole parameter is not that of its shards any more when it is thrown away after "
        "unshard(): what was written to it (model.parameters() were whole ones) is lost; what "
        "functions over lists (torch._foreach_*), which count no write, have written to shards "
        "stays. Write to model.parameters() while the model is sharded"
    )


def has_reduced_gradient(member: Any) -> bool:
    """Return True if a shard has a gradient."""
    return gradient_of(member.sharded_param) is not None


def has_gradient(group: Any, member: Any) -> bool:
    """Return True if there is a gradient of a parameter, reduced or not."""
    return (
        gradient_of(member.sharded_param) is not None
        or whole_gradient(member) is not None
        or group._partial_reduce_output is not None
    )


def regathers(state: Any) -> bool:
    """Return True if a unit frees all whole parameters after its forward."""
    return all(group._reshard_after_forward for group in state._fsdp_param_groups)


def becomes_stale(group: Any) -> bool:
    """Return True if whole parameters come back from aside and are not those of the shards."""
    if not group.is_aside or group.is_compared or is_in_backward(group):
        return False
    group.is_compared = not is_stale(group)
    return not group.is_compared


def is_stale(group: Any) -> bool:
    """Return True if this rank's part of whole parameters is not what its shards would give.

    Written shards show so in whatever way they were written. Bits are compared, so NaN is equal.

    Cost: reads this rank's shards, and as much of the whole ones; on a GPU it waits for the device.
    """
    size, index = num_shards(group), 0
    if size > 1:
        index = group.mesh_info.shard_mesh_rank
    pairs = []
    for member in group.fsdp_params:
        shard = member._sharded_param_data
        if shard.numel() and len(member.all_gather_outputs) == 1:
            own = member.all_gather_outputs[0].view(size, -1)[index]
            pairs.append((_bits(own), _bits(shard.to(own.dtype))))
    if group.device.type == "cpu":
        return not all(torch.equal(own, shard) for own, shard in pairs)
    return bool(pairs) and bool(torch.stack([(a != b).any() for a, b in pairs]).any())


_INTEGERS: Mapping[int, torch.dtype] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Return integers of the same bits, in as few elements as possible."""
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 else _INTEGERS[flat.itemsize])


def make_unit(
    module: nn.Module, *, mesh: DeviceMesh, precision: MixedPrecisionPolicy, regathers: bool
) -> None:
    """Make a module a unit of FSDP2 that has no parameters yet."""
    everything = set(module.parameters())
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=regathers,
        mp_policy=precision,
        ignored_params=everything,
    )
    _keep_attributes(module)


def _keep_attributes(module: nn.Module) -> None:
    """Keep the attributes of DTensor parameters in `to`, `half` and their kin.

    These swap a DTensor with a new one, which has none. They read `.grad` of each parameter after
    they have converted those before it, so gradients that would be refused are looked for first.
    """

    def apply(new: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        plain: Any = type(module)._apply
        for below in module.parameters(recurse):
            if isinstance(gradient_hook(below), PendingGradient):
                raise ConfigError(
                    f"the gradient of a parameter of shape {list(below.shape)} is not reduced "
                    f"yet, and would not be converted or moved with it: convert or move the model "
                    f"between steps, or forget gradients first; nothing was changed"
                )
        places = [
            (each._parameters, key, dict(vars(parameter)))
            for each in (module.modules() if recurse else (module,))
            for key, parameter in each._parameters.items()
            if parameter is not None
        ]
        result: nn.Module = plain(module, new, recurse)
        for table, key, attributes in places:
            parameter = table[key]
            if parameter is not None:
                _add_attributes(attributes, parameter)
        return result

    vars(module)["_apply"] = apply


def _add_attributes(attributes: dict[str, Any], parameter: nn.Parameter) -> None:
    own = vars(parameter)
    skip = {*own, *_MARKS}
    own.update({name: each for name, each in attributes.items() if name not in skip})


def carry_over(old: nn.Parameter, new: nn.Parameter) -> None:
    """Give a parameter the attributes and the hooks of the one that it replaces.

    A hook's handle removes it from both.
    """
    _add_attributes(vars(old), new)
    hooks: Any = old._backward_hooks
    if hooks:
        new._backward_hooks = hooks


def call_after_gradients(parameter: nn.Parameter, hook: Callable[[Any], object]) -> None:
    """Have autograd call a hook with a parameter that has got a gradient."""
    if parameter.requires_grad:
        untyped: Any = parameter
        untyped.register_post_accumulate_grad_hook(hook)


def hooks_of(parameter: nn.Parameter) -> Any:
    """Return what `register_hook` has kept at a parameter, to be given to `call_hooks`."""
    return parameter._backward_hooks


def call_hooks(whole: nn.Parameter, hooks: Any) -> None:
    """Have autograd call hooks with the gradient of a whole parameter."""
    whole._backward_hooks = hooks


def with_hooks(group: Any) -> list[nn.Parameter]:
    """Return those of the parameters, as the optimizer sees them, that may have hooks."""
    shards = map(_SHARD, group.fsdp_params)
    return [p for p in shards if p._backward_hooks or p._post_accumulate_grad_hooks]


def has_hooks_after_gradients(parameter: nn.Parameter) -> bool:
    """Return True if `register_post_accumulate_grad_hook` was called at a parameter."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(
        isinstance(each, HeldHook) and isinstance(each.hook, PendingGradient | LeftGradients | None)
        for each in hooks.values()
    )


def add_parameters(
    unit: nn.Module,
    parameters: Sequence[nn.Parameter],
    *,
    info: Any,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    regathers: bool,
) -> Any:
    """Shard parameters, wherever below the unit they are registered, as one group of the unit."""
    state = state_of(unit)
    group = ParameterGroup(
        list(parameters),
        state._modules,  # the same object for all groups of a unit: torch tells units by it
        info,
        info if regathers and isinstance(info, FSDPMeshInfo) else None,
        device,
        None,
        precision,
        OffloadPolicy(),
    )
    state._fsdp_param_groups.append(group)
    for old, new in zip(parameters, sharded_all(group.fsdp_params), strict=True):
        _add_attributes(vars(old), new)
    return group


def set_reduction(group: Any, *, divisor: int) -> None:
    """Divide the sum of gradients by `divisor`, and reduce also what a rank did not use.

    If each rank holds all of a parameter, FSDP2 divides by a factor once, twice or three times,
    depending on the dtype and on `force_sum_reduction_for_comms` (`foreach_reduce`). So it is given
    the factor 1 then, and a hook after the reduction divides.
    """
    is_cut = num_shards(group) > 1
    group.gradient_divide_factor = float(divisor) if is_cut else 1.0
    group.force_sum_reduction_for_comms = True
    if not is_cut and divisor > 1:
        group._all_reduce_hook = Divide(divisor)
    # A parameter that some ranks did not use would otherwise be left out of their collective.
    group.reduce_scatter_unused_params = True


class Divide:
    """Divides reduced gradients in place."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor

    def __call__(self, reduced: torch.Tensor) -> None:
        """Divide; FSDP2 calls it on a stream other than the one that the memory is from."""
        if reduced.is_cuda:
            reduced.record_stream(torch.cuda.current_stream())
        reduced.div_(self._divisor)


def reduction_of(group: Any) -> tuple[object, ...]:
    """Return what `set_reduction` has set."""
    return (
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        group._all_reduce_hook,
        group.reduce_scatter_unused_params,
    )


def set_gather(group: Any, gather: GatherOn) -> None:
    """Gather the parameters of a group by `gather`."""
    group._all_gather_comm = gather


def gather_of(group: Any) -> object:
    """Return what gathers the parameters of a group."""
    return group._all_gather_comm


def reduced_over(group: Any) -> list[dist.ProcessGroup]:
    """Return the communicators on which the gradients of a group are reduced."""
    info = group.mesh_info
    over = [info.shard_process_group] if isinstance(info, FSDPMeshInfo) else []
    return over + ([info.replicate_process_group] if isinstance(info, DDPMeshInfo) else [])


def num_shards(group: Any) -> int:
    """Return the number of shards that the parameters of a group are cut into."""
    return group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1


def state_of(unit: nn.Module) -> Any:
    """Return FSDP2's state of a unit."""
    module: Any = unit
    return module._get_fsdp_state()


def param_groups(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit."""
    groups: list[Any] = state._fsdp_param_groups
    return groups


def members(group: Any) -> list[Any]:
    """Return the parameters of a group as FSDP2 keeps them; they stay the same objects."""
    result: list[Any] = group.fsdp_params
    return result


def sharded(member: Any) -> nn.Parameter:
    """Return a parameter as the optimizer sees it."""
    parameter: nn.Parameter = member.sharded_param
    return parameter


_SHARD = attrgetter("sharded_param")
_IS_TRAINED = attrgetter("sharded_param.requires_grad")


def trained(group: Any) -> list[bool]:
    """Return for each parameter of a group if it is trained."""
    return [*map(_IS_TRAINED, group.fsdp_params)]


def sharded_all(members: Iterable[Any]) -> list[nn.Parameter]:
    """Return parameters as the optimizer sees them."""
    return [*map(_SHARD, members)]


def whole_parameters(group: Any) -> list[nn.Parameter]:
    """Return whole parameters; FSDP2 makes them once, at the first use, and then all of a group."""
    return [each._unsharded_param for each in group.fsdp_params]


_LOCAL = attrgetter("sharded_param._local_tensor")
_STORAGE: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]


class Places:
    """Where modules have the parameters of a unit, which FSDP2 only writes to after it is set up.

    It puts parameters of its own there, so one that is assigned, or removed, would be gone in the
    next forward. An assignment to `.data` of a DTensor torch ignores: only the storage of its empty
    outside changes, which nothing reads.
    """

    def __init__(self, unit: nn.Module, groups: Iterable[Any]) -> None:
        self._members: list[Any] = [each for group in groups for each in group.fsdp_params]
        self._owners: list[tuple[nn.Module, str, Any]] = []
        for member in self._members:
            info = member._module_info
            modules = (info.module, *info.shared_modules)
            names = (info.param_name, *info.shared_param_names)
            self._owners += [(m, n, member) for m, n in zip(modules, names, strict=True)]
        self.tables = [module._parameters for module, _, _ in self._owners]
        self.keys = [key for _, key, _ in self._owners]
        self.held = [member for _, _, member in self._owners]
        self._names = {module: name for name, module in unit.named_modules()}
        self._inner = [*map(id, map(_LOCAL, self._members))]
        self._shards = self._refer()
        self._outsides = self._look_outside()

    def changed(self) -> str | None:
        """Return which parameter is not that of FSDP2 any more, and what was done to it.

        Cost: 0.5 microseconds a parameter.
        """
        # By loops in C first, as every forward asks.
        there = map(dict.get, self.tables, self.keys)
        if not all(map(is_, there, map(_SHARD, self.held))):
            for module, key, member in self._owners:
                now = module._parameters.get(key)
                if now is None or (
                    now is not member.sharded_param and now is not _whole_of(member)
                ):
                    state = "is not there any more" if now is None else "is another one"
                    return f"parameter '{self._name(module, key)}' {state} since fully_shard_model"
        inner = [*map(id, map(_LOCAL, self._members))]
        outsides = [*map(_STORAGE, map(_SHARD, self._members))]
        if inner == self._inner and outsides == self._outsides:
            return None
        for i, member in enumerate(self._members):
            what: str | None = None
            shard = member.sharded_param._local_tensor
            # FSDP2 looks at the dtype for the last time in the first forward.
            known = getattr(member, "orig_dtype", shard.dtype)
            if shard.dtype != known:
                what = f"was converted from {known} to {shard.dtype} after the first forward"
            # FSDP2 gathers from memory that it takes from the shard when the model is converted.
            elif _STORAGE(shard) != _STORAGE(member._sharded_param_data):
                what = "was swapped with another tensor (torch.utils.swap_tensors)"
            # A conversion of the model gives it another shard, too.
            elif outsides[i] != self._outsides[i] and self._shards[i]() is shard:
                what = "was assigned to through .data, which torch ignores for a DTensor"
            if what is not None:
                info = member._module_info
                return f"parameter '{self._name(info.module, info.param_name)}' {what}"
        self._inner, self._outsides, self._shards = inner, outsides, self._refer()
        return None

    def accept_ignored(self) -> None:
        """Forget assignments to `.data`, which have changed nothing."""
        self._outsides = self._look_outside()

    def _refer(self) -> list[weakref.ref[torch.Tensor]]:
        return [*map(weakref.ref, map(_LOCAL, self._members))]

    def _look_outside(self) -> list[int]:
        return [*map(_STORAGE, map(_SHARD, self._members))]

    def _name(self, module: nn.Module, key: str) -> str:
        place = self._names.get(module, "")
        return f"{place}.{key}" if place else key


def _whole_of(member: Any) -> nn.Parameter | None:
    """Return the whole parameter; FSDP2 makes it at its first use."""
    whole: nn.Parameter | None = getattr(member, "_unsharded_param", None)
    return whole


def is_whole(group: Any) -> bool:
    """Return True if the whole parameters of a group are kept at this moment."""
    return bool(group._sharded_state is _UNSHARDED)


VERSION = attrgetter("_version")
"""Returns the count of writes to a tensor, but for those through `.data`."""
_SHARD_VERSIONS = attrgetter("sharded_param._version", "sharded_param._local_tensor._version")


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Count the writes to each tensor, but for those through `.data`."""
    return [*map(VERSION, tensors)]


def version_of(member: Any) -> tuple[int, int]:
    """Count the writes to the shard of one parameter of FSDP2, in both ways."""
    counts: tuple[int, int] = _SHARD_VERSIONS(member)
    return counts


def versions_of_shards(group: Any) -> list[tuple[int, int]]:
    """Count the writes to each shard of a group, through DTensors and to its elements."""
    return [*map(_SHARD_VERSIONS, group.fsdp_params)]


def set_microbatch(
    groups: Iterable[Any], *, reduces: bool, reduces_outer: bool, reshards: bool
) -> None:
    """Choose what the next backward does with groups; torch's setters walk all modules instead."""
    for group in groups:
        group.reduce_grads = reduces
        group.all_reduce_grads = reduces and reduces_outer
        group.reshard_after_backward = reshards


def put_aside_if_idle(groups: Iterable[Any]) -> None:
    """Put shards in the parameters' places in all groups that are not in a backward.

    A forward within a backward is one that recomputes what the backward needs.
    """
    for group in groups:
        if group._sharded_state is _UNSHARDED and group._training_state not in _BACKWARD:
            group.put_aside()


def reshard_idle(groups: Iterable[Any]) -> None:
    """Free whole parameters, if there are any, so that what comes next reads the shards."""
    for group in groups:
        if group._sharded_state is not _SHARDED and group._training_state is _IDLE:
            group.reshard()


def is_in_backward(group: Any) -> bool:
    """Return True if a group is in a backward."""
    return group._training_state in _BACKWARD


def is_idle(group: Any) -> bool:
    """Return True if a group is neither in a forward nor in a backward."""
    return bool(group._training_state is _IDLE)


def is_interrupted(state: Any) -> bool:
    """Return True if an error left a unit in the middle of a forward or a backward."""
    # A backward that failed before it reached a unit has its callback waiting.
    if state._training_state is not _IDLE or state._state_ctx.post_backward_final_callback_queued:
        return True
    return not all(map(is_idle, state._fsdp_param_groups))


def reset(root: nn.Module) -> None:
    """Make all units below `root` ready for a forward, after one that an error has ended.

    Whole parameters are freed, and gradients that are not in shards are forgotten.
    """
    # A unit that is called by itself, and not within the model, is a root of its own.
    for unit in root.modules():
        if isinstance(unit, FSDPModule) and state_of(unit)._is_root:
            unit.reset_iter_state()


_STATE = attrgetter("_training_state")
_CALLBACK = attrgetter("_state_ctx.post_backward_final_callback_queued")
_SETTINGS = attrgetter(
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "_all_reduce_hook",
    "reduce_scatter_unused_params",
    "_all_gather_comm",
)
_HOOKS = attrgetter("sharded_param._backward_hooks")
_HOOKS_AFTER = attrgetter("sharded_param._post_accumulate_grad_hooks")
_SUMMED = attrgetter("_partial_reduce_output")
_ACCUMULATED = attrgetter("unsharded_accumulated_grad")
_WHOLE_GRADIENT = attrgetter("_unsharded_param.grad")
_WHOLE_VERSION = attrgetter("_unsharded_param._version")


class AllUnits:
    """All units of a model, about which a step asks some times: by a few loops in C.

    A call for each unit costs more than what it asks. Where an answer is not that all is as it was
    when each unit was asked by itself, each has to be asked again.

    Args:
        states: FSDP2's, of all units.
        places: of the same units.
    """

    def __init__(self, states: Sequence[Any], places: Sequence[Places]) -> None:
        self.groups: list[Any] = [group for each in states for group in each._fsdp_param_groups]
        self.members: list[Any] = [each for group in self.groups for each in group.fsdp_params]
        self._states = states
        self._working = [*states, *self.groups]
        self._used = [*{id(group.used): group.used for group in self.groups}.values()]
        self._settings = [*map(_SETTINGS, self.groups)]
        self._tables = [table for each in places for table in each.tables]
        self._keys = [key for each in places for key in each.keys]
        self._held = [member for each in places for member in each.held]
        self._inner: list[int] = []
        self._outsides: list[int] = []
        self._whole_versions: list[int] = []

    def is_idle(self) -> bool:
        """Return True if no unit is in a forward or a backward, or was left in one by an error."""
        is_idle = all(map(is_, map(_STATE, self._working), repeat(_IDLE)))
        return is_idle and not any(map(_CALLBACK, self._states))

    def is_as_set_up(self) -> bool:
        """Return True if reductions and gathers are, and no shard has a hook of whatever kind."""
        return (
            [*map(_SETTINGS, self.groups)] == self._settings
            and not any(map(_HOOKS, self.members))
            and not any(map(_HOOKS_AFTER, self.members))
        )

    def is_in_place(self) -> bool:
        """Return True if all parameters are those that `note_places` has noted; see `Places`."""
        there = map(dict.get, self._tables, self._keys)
        return (
            all(map(is_, there, map(_SHARD, self._held)))
            and [*map(id, map(_LOCAL, self.members))] == self._inner
            and [*map(_STORAGE, map(_SHARD, self.members))] == self._outsides
        )

    def note_places(self) -> None:
        """Note where parameters are: each unit was asked."""
        self._inner = [*map(id, map(_LOCAL, self.members))]
        self._outsides = [*map(_STORAGE, map(_SHARD, self.members))]

    def is_written(self) -> bool:
        """Return True unless whole parameters are known to be as `note_writes` has noted."""
        try:
            return [*map(_WHOLE_VERSION, self.members)] != self._whole_versions
        except AttributeError:  # some unit has not run yet
            return True

    def note_writes(self) -> None:
        """Note the versions of whole parameters: each unit was asked."""
        wholes = [_whole_of(member) for member in self.members]
        self._whole_versions = [each._version for each in wholes if each is not None]

    def has_unreduced(self) -> bool:
        """Return True if gradients, whole or summed in a slice, wait for a reduction."""
        is_none = all(map(is_, map(_SUMMED, self.groups), repeat(None))) and all(
            map(is_, map(_ACCUMULATED, self.members), repeat(None))
        )
        try:
            return not is_none or not all(
                map(is_, map(_WHOLE_GRADIENT, self.members), repeat(None))
            )
        except AttributeError:  # some unit has not run yet
            return any(map(has_unreduced, self.groups))

    def used(self) -> list[Any]:
        """Return the members that got a gradient which was not cleared since."""
        used = [*chain.from_iterable(self._used)]
        if not all(map(is_not, map(gradient_of, map(_SHARD, used)), repeat(None))):
            for group in self.groups:
                group.forget_cleared()
            used = [*chain.from_iterable(self._used)]
        return used

    def leave(self) -> None:
        """Put shards in the parameters' places: code outside of the model runs next."""
        for group in self.groups:
            if group._sharded_state is _UNSHARDED:
                group.put_aside()
        if self.has_unreduced():
            for group in self.groups:
                if has_unreduced(group):
                    group.mark()


def has_other_sum(group: Any) -> bool:
    """Return True if the sum in a slice has no part of what would be added to it now."""
    summed = group._partial_reduce_output
    if summed is None:
        return False
    return bool(sum(group.summed_sizes().values()) != summed.numel())


AHEAD = attrgetter("_states_to_forward_prefetch")
"""Returns the units that are gathered while one computes its forward: see `set_ahead`."""


def set_ahead(state: Any, ahead: list[Any]) -> None:
    """Choose the units to gather while this one computes its forward."""
    state._states_to_forward_prefetch = ahead


def set_behind(state: Any, behind: list[Any]) -> None:
    """Choose the units to gather while this one computes its backward.

    FSDP2 chooses if it is empty: the unit that ran before, of which it leaves out all but one of
    the groups if this unit has a single one.
    """
    state._states_to_backward_prefetch = behind


def ran(state: Any, *, first: int = 0) -> list[Any]:
    """Return groups in the order in which their forwards ended, since the last backward."""
    order: list[Any] = state._comm_ctx.post_forward_order[first:]
    return order


def num_ran(state: Any) -> int:
    """Return the number of forwards of groups since the last backward."""
    return len(getattr(state._comm_ctx, "post_forward_order", ()))  # not before the first forward


def forget_ran(state: Any, *, first: int) -> None:
    """Forget forwards that no backward follows, which FSDP2 would keep until there is one."""
    order = state._comm_ctx.post_forward_order
    for group in order[first:]:
        if group._post_forward_indices:
            group._post_forward_indices.pop()
    del order[first:]


_WITH_STORAGE = (torch.Tensor, nn.Parameter)
"""Classes of tensors that have their elements in a storage of their own or another one's."""


def freed_output(output: Any) -> torch.Tensor | None:
    """Return a tensor in the output of a module whose memory was freed, if there is one."""
    for each in (output,) if type(output) is torch.Tensor else tree_leaves(output):
        # A computed tensor has memory of its own: only a parameter, or a view, may have lost it.
        may_be_freed = type(each) in _WITH_STORAGE and (each.grad_fn is None or each._is_view())
        if (
            may_be_freed
            and each.layout is torch.strided
            and each.numel()
            and each.untyped_storage().size() == 0
        ):
            freed: torch.Tensor = each
            return freed
    return None


def drop_ahead(state: Any) -> None:
    """Forget what was gathered of a unit that did not run: later it would be out of date."""
    for group in state._fsdp_param_groups:
        result, group._all_gather_result = group._all_gather_result, None
        if result is None:
            continue
        if result.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()


def reduce_last_first(root: nn.Module) -> None:
    """Have a backward end with the reductions that autograd has not begun, the last unit's first.

    These are of units that no gradient has come to, or none of whose inputs needs one, which may be
    so on some ranks only. FSDP2 would begin with the model's own parameters, so ranks would reduce
    in different orders; autograd comes to the units in this one.
    """
    state = state_of(root)
    state._lazy_init()
    state._state_ctx.all_states.reverse()


def prepare_for_inference(root: nn.Module, states: Iterable[Any]) -> None:
    """Allocate whole parameters outside of inference mode, so that autograd can use them later.

    FSDP2 allocates them in the first forward and keeps them. Allocated in inference mode they are
    useless for every training that follows.
    """
    with torch.inference_mode(False), torch.no_grad():
        state_of(root)._lazy_init()
        for state in states:
            for group in state._fsdp_param_groups:
                for member in group.fsdp_params:
                    if hasattr(member, "_unsharded_param"):
                        continue
                    shard = member._sharded_param_data
                    member.init_all_gather_outputs(
                        [shard.numel()],
                        [member.param_dtype or shard.dtype],
                        num_shards(group),
                        group.device,
                    )
                    member.init_unsharded_param()
                    member.free_unsharded_param()


def is_meta(state: Any) -> bool:
    """Return True if a shard of a unit has no memory yet."""
    return any(
        member.sharded_param.is_meta
        for group in state._fsdp_param_groups
        for member in group.fsdp_params
    )


def replace_tensors(model: nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put a new tensor in place of each parameter and buffer, as `nn.Module.to` does."""
    module: Any = model
    module._apply(new)


def explain(error: RuntimeError) -> None:
    """Add to an error of torch in a microbatch what a sharded model has to do with it."""
    text = str(error)
    for part, note in _NOTES.items():
        if part in text:
            error.add_note(note)


_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "mixed torch.Tensor and DTensor": (
            "In a fully sharded model the parameters of a unit are whole only while its forward or "
            "backward runs, and shards (DTensors) otherwise. Code that uses a weight of a unit "
            "belongs in the forward of that unit, or leave its module out of units="
        ),
        "storage of size 0": (
            "In a fully sharded model the whole parameters of a unit are freed after its forward, "
            "and gathered for its backward when the gradient of its output arrives. So all that "
            "the loss depends on has to be in the output of the unit, as tensors in tuples, lists, "
            "dicts or dataclasses: return what is kept in attributes (an auxiliary loss), or leave "
            "this module out of units=; strategy='optim' frees nothing before the step. A loss "
            "that contains gradients (create_graph=True) needs parameters after a backward that "
            "has freed them: train it with a ShardedOptimizer"
        ),
    }
)
"""By a part of torch's text."""

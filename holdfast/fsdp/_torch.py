"""Every private name of torch's FSDP2 that this package needs, in one place.

`fully_shard` alone is insufficient: it puts all parameters of a unit into one group, refuses two
dtypes in it, does not join a parameter that is tied between units, and accepts no custom all-gather
if a unit has several groups. Its pieces do all of that, so units are made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from holdfast.errors import ConfigError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    _IS_KNOWN = hasattr(FSDPState(), "_fsdp_param_groups") and hasattr(
        FSDPModule, "reset_iter_state"
    )
except ImportError:  # an older torch, or a newer one that has moved them
    _IS_KNOWN = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLaunch:
    """A collective of a unit."""

    operation: Literal["all-gather", "reduce-scatter", "all-reduce"]
    group: dist.ProcessGroup
    numel: int
    """Elements that this rank gives."""
    dtype: torch.dtype
    device: torch.device

    def repeat(self) -> dist.Work | None:
        """Make such a collective, from zeros."""
        given = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        size = self.group.size()
        work: dist.Work | None
        if self.operation == "all-gather":
            out = given.new_empty(self.numel * size)
            work = dist.all_gather_single(out, given, group=self.group, async_op=True)
        elif self.operation == "reduce-scatter":
            out = given.new_empty(self.numel // size)
            work = dist.reduce_scatter_single(out, given, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(given, group=self.group, async_op=True)
        return work


class LaunchLog:
    """The collectives that all units of a model launch on this rank, in their order."""

    def __init__(self) -> None:
        self.launches: list[UnitLaunch] = []
        """Since the last `restart`."""
        self._counts: dict[dist.ProcessGroup, int] = {}

    def restart(self) -> None:
        """Forget the launches; counts stay."""
        self.launches = []

    def counts(self) -> Mapping[dist.ProcessGroup, int]:
        """Return the number of launches on each communicator since the model was sharded."""
        return self._counts

    def add(
        self,
        operation: Literal["all-gather", "reduce-scatter", "all-reduce"],
        given: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        """Note a launch of this rank."""
        self._counts[group] = self._counts.get(group, 0) + 1
        self.launches.append(
            UnitLaunch(
                operation=operation,
                group=group,
                numel=given.numel(),
                dtype=given.dtype,
                device=given.device,
            )
        )

    def repeat(self, launches: Sequence[UnitLaunch]) -> list[dist.Work]:
        """Make collectives like these, from zeros, without waiting for them."""
        works = []
        for each in launches:
            self.launches.append(each)
            self._counts[each.group] = self._counts.get(each.group, 0) + 1
            work = each.repeat()
            if work is not None:
                works.append(work)
        return works


class Logged:
    """Makes a collective as another object of FSDP2 does, and notes it."""

    def __init__(
        self, inner: Any, log: LaunchLog, operation: Literal["all-gather", "reduce-scatter"]
    ) -> None:
        self._inner = inner
        self._log = log
        self._operation = operation
        self.allocate = inner.allocate

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **options: Any,
    ) -> dist.Work | None:
        """Note it and launch it."""
        used = self._inner.group if isinstance(self._inner, GatherOn) else group
        self._log.add(self._operation, input_tensor, used)
        work: dist.Work | None = self._inner(output_tensor, input_tensor, group, *args, **options)
        return work


class LoggedSum:
    """Notes an all-reduce, after which FSDP2 calls it, and then calls another hook."""

    def __init__(
        self, inner: Callable[[torch.Tensor], None] | None, group: dist.ProcessGroup, log: LaunchLog
    ) -> None:
        self._inner = inner
        self._group = group
        self._log = log

    def __call__(self, reduced: torch.Tensor) -> None:
        """Note it."""
        self._log.add("all-reduce", reduced, self._group)
        if self._inner is not None:
            self._inner(reduced)


def log_launches(group: Any, log: LaunchLog) -> None:
    """Note all collectives of a group of parameters from now on."""
    group._all_gather_comm = Logged(group._all_gather_comm, log, "all-gather")
    group._reduce_scatter_comm = Logged(group._reduce_scatter_comm, log, "reduce-scatter")
    if isinstance(group.mesh_info, DDPMeshInfo):
        between = group.mesh_info.replicate_process_group
        group._all_reduce_hook = LoggedSum(group._all_reduce_hook, between, log)


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

    These swap a DTensor with a new one, which has none.
    """

    def apply(new: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        plain: Any = type(module)._apply
        places = [
            (below._parameters, key, dict(vars(parameter)))
            for below in (module.modules() if recurse else (module,))
            for key, parameter in below._parameters.items()
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


def hooks_of(parameter: nn.Parameter) -> Any:
    """Return what `register_hook` has kept at a parameter, to be given to `call_hooks`."""
    return parameter._backward_hooks


def call_hooks(whole: nn.Parameter, hooks: Any) -> None:
    """Have autograd call hooks with the gradient of a whole parameter."""
    whole._backward_hooks = hooks


def has_hooks_after_gradients(parameter: nn.Parameter) -> bool:
    """Return True if `register_post_accumulate_grad_hook` was called at a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


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
    group = FSDPParamGroup(
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
    for old, new in zip(parameters, sharded_parameters(group), strict=True):
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
    if not is_cut:
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


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    """Return the parameters of a group as the optimizer sees them."""
    return [each.sharded_param for each in group.fsdp_params]


def whole_parameters(group: Any) -> list[nn.Parameter]:
    """Return whole parameters; FSDP2 makes them once, at the first use, and then all of a group."""
    return [each._unsharded_param for each in group.fsdp_params]


def is_whole(group: Any) -> bool:
    """Return True if the whole parameters of a group are kept at this moment."""
    whole: bool = group.is_unsharded
    return whole


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Count the writes to each tensor, but for those through `.data`."""
    return [each._version for each in tensors]


def version_of(member: Any) -> tuple[int, int]:
    """Count the writes to the shard of one parameter of FSDP2, in both ways."""
    return (member.sharded_param._version, member._sharded_local_tensor._version)


def num_writes_of_shards(group: Any) -> int:
    """Count the writes to the shards of a group, through DTensors and to their elements."""
    result = 0
    for each in group.fsdp_params:
        parameter = each.sharded_param
        result += parameter._version + parameter._local_tensor._version
    return result


def set_microbatch(
    groups: Iterable[Any], *, reduces: bool, reduces_outer: bool, reshards: bool
) -> None:
    """Choose what the next backward does with groups; torch's setters walk all modules instead."""
    for group in groups:
        group.reduce_grads = reduces
        group.all_reduce_grads = reduces and reduces_outer
        group.reshard_after_backward = reshards


def is_idle(group: Any) -> bool:
    """Return True if a group is neither in a forward nor in a backward."""
    name: str = group._training_state.name
    return name == "IDLE"


def is_interrupted(state: Any) -> bool:
    """Return True if an error left a unit in the middle of a forward or a backward."""
    return (
        state._training_state.name != "IDLE"
        or not all(map(is_idle, state._fsdp_param_groups))
        # A backward that failed before it reached a unit.
        or state._state_ctx.post_backward_final_callback_queued
    )


def reset(root: nn.Module) -> None:
    """Make all units below `root` ready for a forward, after one that an error has ended.

    Whole parameters are freed, and gradients that are not in shards are forgotten.
    """
    # A unit that is called by itself, and not within the model, is a root of its own.
    for unit in root.modules():
        if isinstance(unit, FSDPModule) and state_of(unit)._is_root:
            unit.reset_iter_state()


def has_unreduced(group: Any) -> bool:
    """Return True if gradients of a group, whole or summed in a slice, wait for a reduction."""
    return group._partial_reduce_output is not None or any(
        each.unsharded_accumulated_grad is not None
        or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
        for each in group.fsdp_params
    )


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


def drop_gradients(group: Any) -> None:
    """Forget the gradients of a group: reduced ones, whole ones, and sums within a slice."""
    group._partial_reduce_output = None
    for each in group.fsdp_params:
        each.sharded_param.grad = None
        each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def on_gradient(whole: nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
    """Call a function whenever autograd has added to the gradient of a whole parameter."""
    parameter: Any = whole
    parameter.register_post_accumulate_grad_hook(call)


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

"""Every private name of torch's FSDP2 that this package needs, in one place.

`fully_shard` alone is insufficient: it puts all parameters of a unit into one group, refuses two
dtypes in it, does not join a parameter that is tied between units, and accepts no custom all-gather
if a unit has several groups. Its pieces do all of that, so units are made of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        self._group = group
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
            output_tensor, input_tensor, group=self._group, async_op=async_op or self._is_on_host
        )
        return work


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
    state = _state(unit)
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


def param_groups(unit: nn.Module) -> list[Any]:
    """Return the groups of parameters of a unit."""
    groups: list[Any] = _state(unit)._fsdp_param_groups
    return groups


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    """Return the parameters of a group as the optimizer sees them."""
    return [each.sharded_param for each in group.fsdp_params]


def whole_parameters(group: Any) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield (parameter of FSDP2, whole tensor); the latter is made once, at the first use."""
    for each in group.fsdp_params:
        if hasattr(each, "_unsharded_param"):
            yield each, each._unsharded_param


def is_whole(group: Any) -> bool:
    """Return True if the whole parameters of a group are kept at this moment."""
    whole: bool = group.is_unsharded
    return whole


def version(tensor: torch.Tensor) -> int:
    """Count the writes to a tensor, but for those through `.data`."""
    return tensor._version


def versions(group: Any) -> list[tuple[int, int]]:
    """Count the writes to each shard of a group: through the DTensor, and to its elements."""
    return [
        (each.sharded_param._version, each._sharded_local_tensor._version)
        for each in group.fsdp_params
    ]


def set_microbatch(root: nn.Module, *, reduces: bool, reduces_outer: bool, reshards: bool) -> None:
    """Choose what the next backward does, for all units below `root`."""
    unit: Any = root
    unit.set_requires_gradient_sync(reduces)
    unit.set_requires_all_reduce(reduces and reduces_outer)
    unit.set_reshard_after_backward(reshards)


def is_idle(group: Any) -> bool:
    """Return True if a group is neither in a forward nor in a backward."""
    name: str = group._training_state.name
    return name == "IDLE"


def is_interrupted(unit: nn.Module) -> bool:
    """Return True if an error left a unit in the middle of a forward or a backward."""
    state = _state(unit)
    shared = state._state_ctx
    return (
        state._training_state.name != "IDLE"
        or not all(map(is_idle, state._fsdp_param_groups))
        # A backward that failed before it reached a unit.
        or shared.post_backward_final_callback_queued
    )


def reset(root: nn.Module) -> None:
    """Make all units below `root` ready for a forward, after one that an error has ended.

    Whole parameters are freed, and gradients that are not in shards are forgotten.
    """
    unit: Any = root
    unit.reset_iter_state()


def has_unreduced(group: Any) -> bool:
    """Return True if gradients of a group, whole or summed in a slice, wait for a reduction."""
    return group._partial_reduce_output is not None or any(
        each.unsharded_accumulated_grad is not None
        or (hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None)
        for each in group.fsdp_params
    )


def _state(unit: nn.Module) -> Any:
    module: Any = unit
    return module._get_fsdp_state()


def set_prefetch(unit: nn.Module, *, ahead: list[nn.Module], behind: list[nn.Module]) -> None:
    """Choose the units to gather while this one computes; FSDP2 chooses if `behind` is empty."""
    module: Any = unit
    module.set_modules_to_forward_prefetch(ahead)
    module.set_modules_to_backward_prefetch(behind)


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


def replace_tensors(model: nn.Module, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put a new tensor in place of each parameter and buffer, as `nn.Module.to` does."""
    module: Any = model
    module._apply(new)

"""Every private name of torch that several rooms need, in one place.

A new version of torch is tried against this file, `parallel/groups/_torch.py` (communicators) and
`fsdp/_torch.py` (FSDP2); `tests/test_structure.py` finds a private name anywhere else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# ---- DTensors ----


local_tensor: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""Returns the tensor that a DTensor holds on this rank.

`to_local` is an operation of autograd, and waits for what is still gathered.
"""


def local_tensors(tensors: Iterable[DTensor]) -> list[Tensor]:
    """Return `local_tensor` of each, by a loop in C."""
    return list(map(local_tensor, tensors))


DTENSOR_FORMS = attrgetter("dtype", "shape", "_local_tensor.dtype", "_local_tensor.shape")
"""Dtype and global shape of a DTensor, dtype and shape of what it holds on this rank."""
DTENSOR_PLACED = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta.shape")
"""Mesh, placements and global shape of a DTensor; AttributeError if it does not state its shape."""
DTENSOR_SPECS = (attrgetter("_spec.mesh"), attrgetter("_spec.placements"))
"""Mesh and placements of a DTensor, each by its own loop."""


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Have a DTensor hold another tensor of its local shape."""
    tensor._local_tensor = local


def local_tensor_slot() -> Any:
    """Return the descriptor of the slot that holds the local tensor, for a class in its place."""
    return DTensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Return mesh, placements and global shape; the public properties cost far more."""
    return tensor._spec


# ---- Modules: tables that named_parameters() and its kin read, None included ----


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own table of parameters; script modules have a mapping of their own."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own table of buffers."""
    return module._buffers


def registered_in(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers registered in a module itself, by attribute."""
    result = dict(module._parameters.items()) | dict(module._buffers.items())
    return {name: value for name, value in result.items() if value is not None}


def module_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own table of modules inside."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the module's set of buffers that no state dict has (persistent=False)."""
    names: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    return names


class _Registrations:
    """How many tensors and modules have been registered with any module in this process."""

    def __init__(self) -> None:
        self.count = 0
        self.is_counting = False

    def start(self) -> None:
        """Count from now on; torch has a hook for each kind."""
        if not self.is_counting:
            register_module_buffer_registration_hook(self._add)
            register_module_parameter_registration_hook(self._add)
            register_module_module_registration_hook(self._add)
            self.is_counting = True

    def _add(self, *arguments: object) -> None:
        del arguments  # module, name, and what was registered under it
        self.count += 1


_REGISTRATIONS = _Registrations()


def registrations() -> int:
    """Return a number that changes when a tensor or a module is registered with any module.

    It starts with the first call. A write to a module's own tables is not counted.
    """
    _REGISTRATIONS.start()
    return _REGISTRATIONS.count


def watch_forwards(look: Callable[[nn.Module], object]) -> Callable[[], None]:
    """Call a function with every module of this process before its forward, until stopped.

    Returns:
        A function that stops it.
    """

    def before(module: nn.Module, inputs: object) -> None:
        del inputs
        look(module)

    return register_module_forward_pre_hook(before).remove


def give_metadata(state_dict: Mapping[str, object], metadata: object) -> None:
    """Give a state dict the versions of modules that `state_dict()` has put at it."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


def module_version(module: nn.Module) -> int:
    """Return the version of a module's class, which torch notes in its state dict."""
    version = getattr(module, "_version", 1)
    return version if isinstance(version, int) else 1


def has_unreduced_gradients(module: nn.Module) -> bool:
    """Return True if FSDP2 keeps gradients of a module elsewhere than in `.grad`.

    With `set_requires_gradient_sync(False)` they wait, whole, for a backward that reduces them;
    with `set_requires_all_reduce(False)` they are reduced over one of two mesh dims.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    states = [each._get_fsdp_state() for each in module.modules() if isinstance(each, kind)]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", ()) or [state._fsdp_param_group]
        if group is not None
    ]
    return any(map(has_unreduced, groups))


def has_unreduced(group: Any) -> bool:
    """Return True if gradients of a group of FSDP2, whole or partly summed, are not reduced yet."""
    if group._partial_reduce_output is not None:
        return True
    for member in group.fsdp_params:  # noqa: SIM110  (a generator costs more than this)
        if whole_gradient(member) is not None:
            return True
    return False


def whole_gradient(member: Any) -> Tensor | None:
    """Return the gradient at a whole parameter of FSDP2, which no shard has got yet."""
    whole = getattr(member, "_unsharded_param", None)
    gradient: Tensor | None = member.unsharded_accumulated_grad
    return gradient if gradient is not None or whole is None else whole.grad


# ---- Memory ----


def storage_id(tensor: Tensor) -> int:
    """Return a number that only tensors of one storage share; unlike an address, never 0."""
    return int(tensor.untyped_storage()._cdata)


def num_storage_uses(tensor: Tensor) -> int:
    """Return how many tensors and other objects refer to the memory of a tensor."""
    untyped: Any = torch._C
    return int(untyped._storage_Use_Count(tensor.untyped_storage()._cdata))


def write_counter(tensor: Tensor) -> int:
    """Return autograd's counter of writes to a tensor in place."""
    return tensor._version


def count_writes(parameters: Sequence[Tensor]) -> None:
    """Let autograd know that parameters were written, so that a graph that saved them is stale.

    Functions over lists of DTensors (`foreach=True`) and collectives count nothing themselves.
    """
    local = [local_tensor(each) for each in parameters if isinstance(each, DTensor)]
    torch.autograd.graph.increment_version([*parameters, *local])


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function once the backward that runs is over, with all its hooks; not after an error.

    To be called from a hook in that backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def copy_each(
    targets: Sequence[Tensor], sources: Sequence[Tensor], *, non_blocking: bool = False
) -> None:
    """Copy many tensors by one call; on a device, by a few kernels."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=non_blocking)


def scale_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply many tensors in place by one call; on a device, by a few kernels."""
    plain = [each for each in tensors if not (each.is_conj() or each.is_sparse)]
    if plain:
        torch._foreach_mul_(plain, factor)
    if len(plain) < len(tensors):
        for each in tensors:
            if each.is_conj() or each.is_sparse:
                each.mul_(factor)


def sparse_members(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a COO tensor; the public methods want it coalesced."""
    return tensor._indices(), tensor._values()


def form_check(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """Return a function that tells by one call whether as many tensors are like these.

    Alike in type, dtype, device, shape, strides, and in being dense, conjugated, negated and
    trained; it is False, too, where one tensor comes twice or the thread is in another mode (of
    inference). It holds none of the tensors. None if this torch has no such call, or another.
    """
    try:
        probe = torch.zeros(2, 3)
        is_like = _guard([probe])
        others = (probe.double(), torch.zeros(3, 2), torch.zeros(3, 2).T, probe.to_sparse())
        if not is_like(torch.ones(2, 3)) or any(map(is_like, others)):
            return None
        check = _guard(tensors)
        if not check(*tensors):
            return None
    except (AttributeError, RuntimeError, SystemError, TypeError):
        return None
    num = len(tensors)
    return lambda others: len(others) == num and check(*others)


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what code compiled for some tensors is guarded by: a function of others."""
    guards: Any = torch._C._dynamo.guards
    sizes, strides = ([list(each(tensor)) for tensor in tensors] for each in (_SIZE, _STRIDE))
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


_SIZE, _STRIDE = torch.Tensor.size, torch.Tensor.stride


# ---- Calls ----


def mark_eager(function: Any) -> Any:
    """Have torch.compile neither trace a function or a class's calls, nor what they call.

    While compiled code runs, the compiler looks at every Python function that is called in between,
    such as a hook and what the hook calls, and reads what it finds there, parameters in flight
    included. Costs nothing in eager mode.
    """
    function._torchdynamo_disable = True
    call = function.__call__ if isinstance(function, type) else function
    compiler: Any = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):  # torch 2.7
        skip = compiler._FrameAction.SKIP
        compiler.set_code_exec_strategy(call.__code__, compiler._FrameExecStrategy(skip, skip))
    return function


def without_torch_function() -> AbstractContextManager[None]:
    """Enter to call a function on subclasses of tensors as if they were plain."""
    return torch._C.DisableTorchFunctionSubclass()


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's positional arguments."""
    return [each.name for each in operator._schema.arguments]


# ---- Data loaders ----


def loader_iterator(loader: Any) -> object:
    """Return the iterator that a loader with persistent workers keeps; None before its first."""
    return loader._iterator


def start_iterator(loader: Any) -> None:
    """Make the iterator that a loader with persistent workers keeps."""
    loader._iterator = loader._get_iterator()


# ---- Communicators ----

_DERIVED = ("_AllreduceUpcastHookState", "DefaultState", "LowPrecisionState")
"""Classes of torch whose objects hold only how a communication hook was set up."""


def hook_states(module: nn.Module) -> list[tuple[str, object]]:
    """Return communication hooks of DDP or FSDP1 that have a state of their own, by name."""
    held: Any = module
    pairs = list(vars(held).get("_comm_hooks", ()))
    pairs.append((vars(held).get("_comm_hook"), vars(held).get("_comm_hook_state")))
    return [
        (getattr(hook, "__qualname__", type(hook).__name__), state)
        for hook, state in pairs
        if not (state is None or isinstance(state, dist.ProcessGroup))
        and type(state).__name__ not in _DERIVED
    ]


_TIMED_OUT = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d+)")
"""Milliseconds that a backend waited, in the texts of gloo and NCCL."""


def lost_after_s(error: BaseException) -> float | None:
    """Return how long a failed collective waited for other ranks, as far as its error says.

    None for any other error. Gloo raises a bare RuntimeError, so its text is all that there is.
    """
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    if not (isinstance(error, dist.DistError) or "/gloo/" in text):
        return None
    waited = _TIMED_OUT.search(text)
    return 0.0 if waited is None else int(waited[1]) / 1000


def mark_launch(given: Tensor, operation: str) -> None:
    """Let recorders of launches know what a collective over a tensor is for."""
    given._launched_as = operation  # type: ignore[attr-defined]


def launched_as(given: Tensor) -> str | None:
    """Return what `mark_launch` has noted."""
    operation: str | None = getattr(given, "_launched_as", None)
    return operation


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step of an optimizer runs hooks: its own, or those of all optimizers."""
    tables: tuple[Mapping[int, object], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(tables)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know of a step that was not made by the optimizer's own `step`.

    They count calls of it, and warn if there was no call before theirs.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]

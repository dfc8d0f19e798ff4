"""torchtitan's own trainer on CPUs, over gloo and torch 2.13.

Importing this module, before torchtitan, is all. It answers what the trainer asks of an accelerator
and of a newer torch, and stands for modules that nothing in the tests calls; the trainer, its
models, parallelisms and checkpoint managers are torchtitan's.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.pipelining import schedules
from torch.nn.attention import flex_attention

_DEVICE = types.ModuleType("device_of_cpu")
_DEVICE.__dict__.update(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda *_: None,
    get_device_name=lambda *_: "cpu",
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda *_: None,
    empty_cache=lambda: None,
    memory_stats=lambda *_: {},
)
_NOT_CALLED = (
    "torchtitan.distributed.minimal_async_ep.kernels",  # imports triton
    "datasets",
    "datasets.distributed",
)


def _as_device(torch_of: Any) -> None:
    """Let the CPU be the accelerator; its attention has no kernel there that goes backwards."""
    module_of = torch_of._get_device_module
    torch_of._get_available_device_type = lambda: "cpu"
    torch_of._get_device_module = lambda kind: _DEVICE if kind == "cpu" else module_of(kind)
    flex_attention._validate_device = lambda *_: None
    torch.compiler.set_stance("force_eager")


def _over_gloo(divide_factors: Any) -> None:
    """Let gradients be summed and then divided, in place of one operation that NCCL alone has."""

    def factors(shards: Any, replicas: Any, dtype: Any, _: str, factor: Any, __: bool) -> Any:
        return divide_factors(shards, replicas, dtype, "cpu", factor, True)

    _fsdp_collectives._get_gradient_divide_factors = factors


def _newer_torch() -> None:
    """Let pipelines take batches that are split already, and groups a timeout."""

    def step(
        self: Any,
        *,
        arg_mbs: Any,
        kwarg_mbs: Any,
        target_mbs: Any,
        losses: Any,
        return_outputs: bool,
        loss_kwargs: Any,
    ) -> None:
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        batches = arg_mbs or [()] * len(kwarg_mbs)
        self._step_microbatches(
            batches, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )

    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        schedule.step = step
    dist.set_timeout = lambda timeout, group: None


for _name in _NOT_CALLED:
    _module: Any = types.ModuleType(_name)
    _module.__getattr__ = lambda name: None
    sys.modules[_name] = _module
_as_device(torch._utils)
_over_gloo(_fsdp_collectives._get_gradient_divide_factors)
_newer_torch()

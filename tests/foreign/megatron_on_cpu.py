"""Runs Megatron-core on CPU over gloo, to write checkpoints as it writes them.

Megatron asks CUDA for its device and its streams even where every tensor is on the CPU.
`megatron_on_cpu` answers these calls in this process, and only while its block runs: the current
device is the CPU, `.cuda()` is the tensor itself, and the type of a tensor reads as that of a GPU.
Nothing of what saves a checkpoint is touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _type_as_on_gpu(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    made = _TYPE(self, *args, **options)
    if not isinstance(made, str) or "cuda" in made:  # asked twice, from inside of torch
        return made
    return made.replace("torch.", "torch.cuda.", 1)


_TYPE = torch.Tensor.type


class _CudaIsCpu(TorchFunctionMode):
    """Makes tensors on the CPU where `device="cuda"` is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer for CUDA alone: who uses it sets up Megatron's groups."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    with contextlib.ExitStack() as stack:
        stack.enter_context(_CudaIsCpu())
        for target, value in {
            "torch.cuda.current_device": lambda: "cpu",
            "torch.cuda.synchronize": lambda *_: None,
            "torch.cuda.empty_cache": lambda: None,
            "torch.Tensor.cuda": lambda self, *_, **__: self,
            "torch.Tensor.type": _type_as_on_gpu,
        }.items():
            stack.enter_context(mock.patch(target, value))
        if not hasattr(
            moe_utils, "te_general_gemm"
        ):  # without Transformer Engine it is not defined
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        tensor_parallel.random.initialize_rng_tracker()
        tracker = tensor_parallel.random.get_cuda_rng_tracker()
        stack.enter_context(mock.patch.object(tracker, "fork", _fork_nothing))
        yield


@contextlib.contextmanager
def megatron_on_cpu(**sizes: int) -> Iterator[None]:
    """Answer for CUDA, and set up Megatron's groups.

    Args:
        sizes: Arguments of `initialize_model_parallel`, such as `tensor_model_parallel_size`.
    """
    from megatron.core import parallel_state

    with cuda_on_cpu():
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def _fork_nothing(*_: object) -> Iterator[None]:
    yield

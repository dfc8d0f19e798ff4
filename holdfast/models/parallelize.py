"""A GPT split over the tensor axis and repeated over the data axis of given groups.

The tensor axis is torch's own: `parallelize_module` with column- and row-wise styles and a
vocabulary-parallel embedding and head. The data axis is explicit: gradients are averaged over the
`dp_cp` communicator after backward, in flat buckets, by `ParallelGPT.reduce_gradients`.

Every parameter is a DTensor on the mesh (`dp_cp`, `tp`): it says itself that it is repeated over
data ranks, and how it lies on the tensor axis. The computation needs the tensor axis only, so
`ParallelGPT.forward` hands the modules a view of each parameter on the `tp` mesh alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.func import functional_call

from holdfast.models.config import GPTConfig, check_layout
from holdfast.models.gpt import GPT, initial_parameter
from holdfast.parallel import ProcessGroups

BUCKET_NBYTES = 32 * 2**20
"""Bytes of gradient that go into one all-reduce; more saves calls, less saves memory."""


class ParallelGPT:
    """A GPT on the groups of a layout: forward, the loss's context, and gradient averaging.

    `module` is the `nn.Module` to optimise and to checkpoint; its parameter names are those of the
    model in one process. On a layout of one rank its parameters are plain tensors, otherwise
    DTensors on `groups.mesh("dp_cp", "tp")`.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        groups: ProcessGroups,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Build and initialise the local part; no collective.

        Args:
            config: sizes of the model; heads and MLP width must divide by the tensor axis.
            groups: needs `tp` and `dp_cp` where they are larger than 1.
            seed: parameters are a function of (seed, name) and nothing else.
            device: where parameters live; default the CPU.

        Raises:
            ConfigError: the model cannot be split over this layout.
            GroupError: a communicator is missing.

        Memory: this rank's parameters, and one full parameter at a time on the CPU.
        """
        check_layout(config, layout=groups.layout)
        self.groups = groups
        self.device = device or torch.device("cpu")
        self._is_split = groups.layout.world_size > 1
        self._vocab_is_split = groups.size("tp") > 1 and config.vocab_size % groups.size("tp") == 0
        with torch.device("meta"):
            self.module = GPT(config)
        if self._is_split:
            groups.require("tp", "dp_cp")
            self._mesh = groups.mesh("dp_cp", "tp")
            self._tp_mesh = groups.mesh("tp")
            if groups.size("tp") > 1:
                plan = _tensor_plan(config, vocab_is_split=self._vocab_is_split)
                parallelize_module(self.module, self._tp_mesh, plan, src_data_rank=None)
        self._initialise(config, seed=seed)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss per token, (rows, positions) float32, of this data rank's rows, as a plain tensor.

        Cost: two all-reduces over `tp` per block, and three small ones for the loss.
        """
        losses = functional_call(self.module, self._views(), (tokens, targets))
        return _local(losses)

    def loss_context(self) -> AbstractContextManager[None]:
        """What forward *and backward* must run in, so that split logits are never gathered."""
        # torch annotates loss_parallel as a plain generator
        return (
            cast("AbstractContextManager[None]", loss_parallel())
            if self._vocab_is_split
            else nullcontext()
        )

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average every parameter's gradient over `dp_cp`, in place.

        A parameter that got no gradient on this rank counts as zero, so that all ranks take part
        in the same collectives. Cost: one all-reduce and one copy in and out per 32 MiB of local
        gradient, in float32 or wider.
        """
        num_copies = self.groups.size("dp_cp")
        if num_copies == 1:
            return
        group = self.groups.group("dp_cp")
        for parameter in self.module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [_local(cast("Tensor", p.grad)) for p in self.module.parameters()]
        wide = torch.promote_types(torch.float32, gradients[0].dtype)
        for bucket in _buckets(gradients, limit_nbytes=BUCKET_NBYTES):
            flat = torch.cat([gradient.reshape(-1).to(wide) for gradient in bucket])
            dist.all_reduce(flat, group=group)
            flat.div_(num_copies)
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _initialise(self, config: GPTConfig, *, seed: int) -> None:
        """Replace each meta parameter by its real local part, declared on the whole mesh."""
        for module_name, module in self.module.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                key = f"{module_name}.{name}" if module_name else name
                full = initial_parameter(
                    key, shape=tuple(parameter.shape), config=config, seed=seed
                )
                value = self._declare(full, placement=_tp_placement(parameter))
                module.register_parameter(name, nn.Parameter(value))

    def _declare(self, full: Tensor, *, placement: Placement) -> Tensor:
        if not self._is_split:
            return full.to(self.device)
        local = full
        if placement.is_shard():
            # src_data_rank=None: every rank drew the same value, so nothing is sent.
            cut = distribute_tensor(full, self._tp_mesh, [placement], src_data_rank=None)
            local = cut.to_local().clone()
        return DTensor.from_local(
            local.to(self.device), self._mesh, [Replicate(), placement], run_check=False
        )

    def _views(self) -> dict[str, Tensor]:
        """Parameters as the computation wants them: split ones on the `tp` mesh, others plain.

        Autograd runs through the view, so gradients arrive at the declared parameters; over
        `dp_cp` they are this rank's own until `reduce_gradients`.
        """
        if not self._is_split:
            return {}
        views = {}
        for name, parameter in self.module.named_parameters():
            declared = cast("DTensor", parameter)
            placement = declared.placements[1]
            local = declared.to_local()
            views[name] = (
                DTensor.from_local(local, self._tp_mesh, [placement], run_check=False)
                if placement.is_shard()
                else local
            )
        return views


def _tensor_plan(config: GPTConfig, *, vocab_is_split: bool) -> dict[str, ParallelStyle]:
    """Which module is split how over the tensor axis (Shoeybi et al. 2019).

    The residual stream stays plain and equal on all tensor ranks. Inputs of a block's half become
    DTensors once, at its door, so that the gradients of its two or three column-wise matrices are
    added before they are reduced.
    """
    plan: dict[str, ParallelStyle] = {}
    for index in range(config.num_layers):
        attn, mlp = f"blocks.{index}.attn", f"blocks.{index}.mlp"
        plan[attn] = PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        )
        plan[mlp] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
        for name in ("query", "key", "value"):
            plan[f"{attn}.{name}"] = ColwiseParallel()
        plan[f"{attn}.out"] = RowwiseParallel()
        for name in ("gate", "up") if config.mlp == "swiglu" else ("up",):
            plan[f"{mlp}.{name}"] = ColwiseParallel()
        plan[f"{mlp}.down"] = RowwiseParallel()
    if vocab_is_split:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = _head_style(config)
    return plan


def _head_style(config: GPTConfig) -> ParallelStyle:
    if not config.tied_head:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Replicate(), None),
        output_layouts=Shard(-1),
        desired_output_layouts=Shard(-1),
        use_local_output=False,
    )


def _tp_placement(parameter: Tensor) -> Placement:
    return parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(tensors: list[Tensor], *, limit_nbytes: int) -> Iterator[list[Tensor]]:
    """Consecutive runs of tensors of at most `limit_nbytes` together, or of one larger tensor."""
    bucket: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if bucket and nbytes + tensor.nbytes > limit_nbytes:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(tensor)
        nbytes += tensor.nbytes
    if bucket:
        yield bucket

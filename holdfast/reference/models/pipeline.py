"""The pipeline axis: torch's schedules on the `pp` communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from holdfast.reference.models.stages import Stage

if TYPE_CHECKING:
    from holdfast.reference.models.parallelize import ParallelGPT


class PipelineRunner:
    """The stages of one rank under one schedule, for batches of one size.

    `sizes`: rows, positions of a whole row, microbatches. Shapes of what travels between stages
    are fixed by them, so nothing is asked of the neighbours.
    """

    def __init__(self, owner: ParallelGPT, *, sizes: tuple[int, ...]) -> None:
        """Make the stages and their schedule; no collective."""
        self.sizes = sizes
        self._factor = 1.0 / sizes[0]
        rows, num_positions, num_microbatches = sizes
        groups = owner.groups
        self._has_first = any(stage.is_first for stage in owner.stages)
        self._has_last = owner.has_losses
        micro_rows, local = rows // num_microbatches, num_positions // groups.size("cp")
        between = _between(owner, micro_rows, local)
        stages = [
            PipelineStage(
                _StageModule(owner, stage),
                stage.index,
                stage.num_stages,
                owner.device,
                input_args=_entering(micro_rows, local) if stage.is_first else between,
                output_args=_leaving(owner, micro_rows, local) if stage.is_last else between,
                group=groups.group("pp"),
            )
            for stage in owner.stages
        ]
        kind: Any = get_schedule_class(owner.pipeline.torch_name)
        one = owner.pipeline.takes_one_stage
        self._schedule = kind(
            stages[0] if one else stages,
            n_microbatches=num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def step(
        self, tokens: Tensor, targets: Tensor, *, loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of all microbatches; gradients are multiplied by `loss_scale`.

        Returns:
            (rows, local positions) losses per token and (rows,) balance losses, without gradient;
            empty where the last stage is not.
        """
        self._factor = loss_scale / self.sizes[0]
        entering = (tokens,) if self._has_first else ()
        leaving = {"target": targets, "targets": targets} if self._has_last else {}
        output = self._schedule.step(*entering, **leaving)
        if output is None:
            return tokens.new_empty((0, tokens.shape[1]), dtype=torch.float64), tokens.new_empty(
                0, dtype=torch.float64
            )
        losses, balance = output
        return losses.detach(), balance.detach()

    def _loss(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """What backward starts from, of one microbatch; the losses were made with the targets."""
        del target
        losses, balance = output
        return (losses.mean(dim=1) + balance).sum() * self._factor


class _StageModule(nn.Module):
    """One stage as torch's pipelining wants it: a module that owns its parameters."""

    def __init__(self, owner: ParallelGPT, stage: Stage) -> None:
        super().__init__()
        self._owner = owner
        self._stage = stage
        model = owner.module
        self.blocks = nn.ModuleDict(
            {str(layer): model.blocks[str(layer)] for layer in stage.layers}
        )
        if stage.is_first or (stage.is_last and owner.config.tied_head):
            self.embed = model.embed
        if stage.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(
        self, x: Tensor, balance: Tensor | None = None, *, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stage on one microbatch; only the last one looks at `targets`."""
        if balance is not None:
            balance = cast("Tensor", _DenseGradient.apply(balance))  # type: ignore[no-untyped-call]
        return self._owner.run_stage(self._stage, x, balance, targets)


class _DenseGradient(torch.autograd.Function):
    """Nothing forward; backward a contiguous gradient, the only kind that can be sent.

    The gradient of a sum is one number seen many times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()  # a view would be refused as a result of the stage

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _entering(rows: int, num_positions: int) -> tuple[Tensor, ...]:
    """What the first stage takes: token ids. Shapes only, as in the next two."""
    return (torch.empty((rows, num_positions), dtype=torch.int64, device="meta"),)


def _between(owner: ParallelGPT, rows: int, num_positions: int) -> tuple[Tensor, ...]:
    """What goes from one stage to the next: the residual stream and the balance losses."""
    dtype = next(owner.module.parameters()).dtype
    wide = torch.promote_types(torch.float32, dtype)
    stream = (rows, num_positions, owner.config.model_dim)
    return (
        torch.empty(stream, dtype=dtype, device="meta", requires_grad=True),
        torch.empty((rows,), dtype=wide, device="meta", requires_grad=True),
    )


def _leaving(owner: ParallelGPT, rows: int, num_positions: int) -> tuple[Tensor, ...]:
    """What the last stage gives: losses per token and per row."""
    wide = torch.promote_types(torch.float32, next(owner.module.parameters()).dtype)
    return (
        torch.empty((rows, num_positions), dtype=wide, device="meta", requires_grad=True),
        torch.empty((rows,), dtype=wide, device="meta", requires_grad=True),
    )

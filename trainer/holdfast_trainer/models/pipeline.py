"""The pipeline axis: torch's schedules on the `pp` communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.context import take_positions
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.stages import Pipeline, Stage

RunStage = Callable[
    [Stage, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    tuple[Tensor, Tensor],
]
"""Runs a stage on its input, the balance losses so far, the targets with their weights, and what
takes the places of images; see `GPT.forward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Whole rows, with every position; see `ParallelGPT.forward_backward`."""

    tokens: Tensor
    """(rows, positions)."""
    targets: Tensor
    """(rows, positions)."""
    weights: Tensor | None
    """(rows, positions)."""
    images: Tensor | None
    """(rows, positions, model_dim)."""

    def chunk(self, count: int) -> Iterator[Rows]:
        """Equal runs of rows, in order."""
        for part in torch.arange(len(self.tokens)).chunk(count):
            run = slice(int(part[0]), int(part[-1]) + 1)
            yield Rows(
                tokens=self.tokens[run],
                targets=self.targets[run],
                weights=None if self.weights is None else self.weights[run],
                images=None if self.images is None else self.images[run],
            )

    def take_positions(self, axis: Axis) -> Rows:
        """The same rows with this rank's positions, without images: they are cut as leaves."""
        return Rows(
            tokens=take_positions(self.tokens, axis=axis, dim=1),
            targets=take_positions(self.targets, axis=axis, dim=1),
            weights=(
                None if self.weights is None else take_positions(self.weights, axis=axis, dim=1)
            ),
            images=None,
        )


class ImageLeaves:
    """What takes the places of images, microbatch by microbatch, and collects its gradient.

    Torch's schedules clear the gradients of a stage's inputs and look for none in the first one.
    So the graph starts at leaves of our own, and what made the images gets the gradient later.
    """

    def __init__(self, axis: Axis) -> None:
        """Collect nothing yet; `axis` has the positions."""
        self._axis = axis
        self._leaves: list[Tensor] = []

    def take(self, images: Tensor | None) -> Tensor | None:
        """The next microbatch's images as a leaf, this rank's positions of it."""
        if images is None or not torch.is_grad_enabled():
            return None if images is None else take_positions(images, axis=self._axis, dim=1)
        leaf = images.detach().requires_grad_()
        self._leaves.append(leaf)
        return take_positions(leaf, axis=self._axis, dim=1)

    def gradient(self) -> Tensor | None:
        """The gradient of all images so far, which are then forgotten; None if there were none."""
        leaves, self._leaves = self._leaves, []
        if not leaves:
            return None
        return torch.cat(
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        )


class AroundMicrobatch(Protocol):
    """Makes a context for the forward and backward of one microbatch."""

    def __call__(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context; `is_last`: no other microbatch follows in this step."""
        ...


class PipelineRunner:
    """The stages of one rank under one schedule, for batches of one size."""

    def __init__(
        self,
        model: GPT,
        stages: Sequence[Stage],
        *,
        run_stage: RunStage,
        pipeline: Pipeline,
        groups: ProcessGroups,
        device: torch.device,
        sizes: tuple[int, int, int],
        around: AroundMicrobatch | None = None,
        has_backward: bool = True,
    ) -> None:
        """Make torch's stages and their schedule; no collective.

        Args:
            model: this rank's layers.
            stages: this rank's stages.
            run_stage: computes one of them.
            pipeline: the schedule.
            groups: needs `pp`.
            device: where the layers are.
            sizes: rows, positions of a whole row, microbatches. They determine the shapes that are
                sent between stages, so no rank has to ask another for them.
            around: entered around each backward, with whether it is the stage's last one.
            has_backward: whether steps learn.
        """
        self.sizes = sizes
        self._context = Axis.of(groups, "cp")
        self.leaves = ImageLeaves(self._context)
        """The images of the last step, with their gradient, on ranks with the first stage."""
        self._factor = 1.0 / sizes[0]
        rows, num_positions, num_microbatches = sizes
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)
        shape = (rows // num_microbatches, num_positions // groups.size("cp"))
        tokens, stream, losses = _signatures(model, shape)
        parts = [
            _make_stage(
                _StageModule(model, stage, run_stage, self.leaves),
                stage.index,
                stage.num_stages,
                device,
                input_args=tokens if stage.is_first else stream,
                output_args=losses if stage.is_last else stream,
                group=groups.group("pp"),
                around=around,
            )
            for stage in stages
        ]
        schedule_class: Any = get_schedule_class(pipeline.torch_name)
        self._schedule = schedule_class(
            parts[0] if pipeline.takes_one_stage else parts,
            n_microbatches=num_microbatches,
            loss_fn=self._loss if has_backward else None,
            scale_grads=False,
        )

    def step(self, rows: Rows, *, loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Forward and, where it learns, backward of all microbatches.

        Args:
            rows: tokens and images for the first stage, targets and weights for the last one.
            loss_scale: what gradients are multiplied by; losses are not.

        Returns:
            (rows, local positions) losses per token and (rows,) balance losses, without gradient;
            empty on ranks without the last stage.
        """
        self._factor = loss_scale / self.sizes[0]
        local = rows.take_positions(self._context)
        inputs = (local.tokens,) if self._has_first else ()
        # `target` is what torch passes to the loss function, the rest what stages receive.
        options = {"target": local.targets, "targets": local.targets} if self._has_last else {}
        if self._has_last and local.weights is not None:
            options["weights"] = local.weights
        if self._has_first and rows.images is not None:
            options["images"] = rows.images.detach()
        output = self._schedule.step(*inputs, **options)
        if output is None:
            shape = (0, local.tokens.shape[1])
            empty = torch.empty(shape, dtype=torch.float64, device=local.tokens.device)
            return empty, empty[:, 0]
        losses, balance = output
        return losses.detach(), balance.detach()

    def _loss(self, output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """The scalar that backward starts from; the stage has already used the targets."""
        del target
        losses, balance = output
        return (losses.mean(dim=1) + balance).sum() * self._factor


class _StageInContext(PipelineStage):
    """A stage whose backwards run in a context, such as one that reduces gradients in the last."""

    around: AroundMicrobatch

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Return what a schedule calls for each microbatch: it knows which one is the last."""
        with self.around(is_last=last_backward):
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )


def _make_stage(*args: Any, around: AroundMicrobatch | None, **kwargs: Any) -> PipelineStage:
    """A stage of torch's, with a context around each backward if there is one."""
    if around is None:
        return PipelineStage(*args, **kwargs)
    stage = _StageInContext(*args, **kwargs)
    stage.around = around
    return stage


class _StageModule(nn.Module):
    """One stage as torch's pipelining requires it: a module that owns its parameters."""

    def __init__(self, model: GPT, stage: Stage, run_stage: RunStage, leaves: ImageLeaves) -> None:
        super().__init__()
        self._leaves = leaves
        self._stage = stage
        self._run_stage = run_stage
        self.blocks = nn.ModuleDict(
            {str(layer): model.blocks[str(layer)] for layer in stage.layers}
        )
        if stage.is_first or (stage.is_last and model.config.tied_head):
            self.embed = model.embed
        if stage.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(
        self,
        x: Tensor,
        balance: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        images: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stage on one microbatch.

        Only the last one looks at `targets` and `weights`, only the first one at `images`.
        """
        if balance is not None:
            balance = cast("Tensor", _DenseGradient.apply(balance))  # type: ignore[no-untyped-call]
        placed = self._leaves.take(images) if self._stage.is_first else None
        return self._run_stage(self._stage, x, balance, targets, weights, placed)


class _DenseGradient(torch.autograd.Function):
    """The identity forward; backward a contiguous gradient, the only kind that can be sent.

    The gradient of a sum is an expanded scalar, with strides of zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()  # a view would be refused as a result of the stage

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def _signatures(model: GPT, shape: tuple[int, int]) -> list[tuple[Tensor, ...]]:
    """Return what the first stage takes, what stages pass on, and what the last returns; on meta.

    That is token ids, then the residual stream with the balance losses of each row, then losses
    per token with the balance losses.

    Args:
        model: says the width and the dtype.
        shape: rows and local positions of a microbatch.
    """
    dtype = next(model.parameters()).dtype
    wide = torch.promote_types(torch.float32, dtype)
    with torch.device("meta"):
        balance = torch.empty(shape[0], dtype=wide, requires_grad=True)
        stream = torch.empty((*shape, model.config.model_dim), dtype=dtype, requires_grad=True)
        losses = torch.empty(shape, dtype=wide, requires_grad=True)
        return [(torch.empty(shape, dtype=torch.int64),), (stream, balance), (losses, balance)]

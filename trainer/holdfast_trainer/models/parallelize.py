"""A GPT on the groups of a layout: every axis at once.

The tensor axis of the dense layers is torch's own: `parallelize_module` with column- and row-wise
styles and a vocabulary-parallel embedding and head. Experts, state space and attention over a
context axis have their groups as constructor arguments. The pipeline is
`torch.distributed.pipelining` on the `pp` communicator. The data axis is explicit: see
`reduce_gradients`. Which rank has what of each parameter is declared in `split.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    loss_parallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from holdfast.parallel import ProcessGroups
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.config import GPTConfig, check_layout
from holdfast_trainer.models.gpt import GPT
from holdfast_trainer.models.gradients import reduce_gradients
from holdfast_trainer.models.pipeline import AroundMicrobatch, ImageLeaves, PipelineRunner, Rows
from holdfast_trainer.models.split import SplitModule, plan_blocks
from holdfast_trainer.models.stages import Pipeline, Stage, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """The losses of one pass over a data rank's rows, in their order; float64, without gradient.

    Under a context axis they are means over this rank's positions. On stages other than the last
    they are empty.
    """

    loss: Tensor
    """(rows,) mean cross entropy of each row."""
    balance: Tensor
    """(rows,) balance loss of each row; 0 in a model without experts."""
    image_gradient: Tensor | None = None
    """(rows, positions, model_dim): the gradient of the images that were given, on ranks with the
    first stage; under a context axis zero at positions of other ranks."""


class ParallelGPT(SplitModule[GPT]):
    """A GPT on the groups of a layout.

    `module` is the `nn.Module` to optimise and to checkpoint: the layers this rank has, under their
    names in the whole model. On a layout of one rank its parameters are plain tensors, otherwise
    DTensors.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        groups: ProcessGroups,
        seed: int = 0,
        device: torch.device | None = None,
        pipeline: Pipeline | None = None,
        variant: Variant = "gather",
        autocast: torch.dtype | None = None,
    ) -> None:
        """Build and initialise the local part; no collective.

        Args:
            config: sizes of the model.
            groups: needs a communicator for every axis larger than 1 (`dp_cp` for the data axis).
            seed: parameters are a function of (seed, name) and nothing else.
            device: where parameters live; default the CPU.
            pipeline: how the model is split over `pp`; default: one even stage per rank, 1F1B.
            variant: how attention works over a context axis: keys and values gathered, or passed
                around a ring.
            autocast: dtype of matrix products; absent: that of the parameters.

        Raises:
            ConfigError: the model cannot be split over this layout.
            GroupError: a communicator is missing.

        Cost: memory of this rank's parameters, and of one full parameter at a time on the CPU.
        """
        check_layout(config, layout=groups.layout)
        self.config = config
        self.pipeline = pipeline or Pipeline()
        pp, tp = groups.size("pp"), groups.size("tp")
        self._all_stages = self.pipeline.stages(num_layers=config.num_layers, pp=pp)
        self.stages: tuple[Stage, ...] = tuple(
            stage
            for stage in self._all_stages
            if self.pipeline.owner(stage.index, pp=pp) == groups.index("pp")
        )
        self._vocab_is_split = tp > 1 and config.vocab_size % tp == 0
        self._context = Axis.of(groups, "cp")
        self._in_hits = False
        self._runners: dict[tuple[int, int, int, bool], PipelineRunner] = {}
        with torch.device("meta"):
            module = GPT(config, groups=groups, stages=self.stages, variant=variant)
        ties_stages = pp > 1 and config.tied_head and not self.pipeline.is_v_shaped
        super().__init__(
            module,
            groups=groups,
            blocks=config,
            plan=_tensor_plan(module, vocab_is_split=self._vocab_is_split),
            seed=seed,
            device=device,
            autocast=autocast,
            tied=("embed.weight",) if ties_stages else (),
        )

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        images: Tensor | None = None,
        num_microbatches: int = 1,
        loss_scale: float = 1.0,
        around: AroundMicrobatch | None = None,
    ) -> RowLosses:
        """Add the gradient of the mean loss of these rows to every parameter.

        Args:
            tokens: (rows, positions) of whole rows, equal on all ranks of one data share.
            targets: the same shape.
            weights: the same shape: what the loss of each token is multiplied by; absent: 1.
            images: (rows, positions, model_dim), on ranks with the first stage: what takes the
                places of `IMAGE_TOKEN`; equal on all ranks of one data share. Its own graph is not
                looked at: the gradient is in the result.
            num_microbatches: equal parts that the rows are cut into; a pipeline runs them in its
                schedule's order and takes the same sizes in every call.
            loss_scale: what gradients are multiplied by, for float16; losses are not.
            around: entered around forward and backward of each microbatch, with whether it is the
                last. Under a pipeline, whose schedule mixes them, it is entered around backward
                alone, and only after `view_in_units`; the first call's counts for all.

        Returns:
            The losses of each row; empty if the last stage is not on this rank.
        """
        rows = Rows(tokens=tokens, targets=targets, weights=weights, images=images)
        if self.groups.size("pp") > 1:
            runner = self._runner(rows, num_microbatches, around if self._has_units else None)
            with self._loss_context():
                per_token, balance = runner.step(rows, loss_scale=loss_scale)
            return RowLosses(
                loss=per_token.double().mean(dim=1),
                balance=balance.double(),
                image_gradient=runner.leaves.gradient(),
            )
        losses, balances, leaves = [], [], ImageLeaves(self._context)
        for number, part in enumerate(rows.chunk(num_microbatches), start=1):
            context = (
                nullcontext() if around is None else around(is_last=number == num_microbatches)
            )
            with context, self._loss_context():
                per_token, balance = self._run_whole(part, leaves)
                total = (per_token.mean(dim=1) + balance).sum() * (loss_scale / len(tokens))
                total.backward()  # type: ignore[no-untyped-call]
            losses.append(per_token.detach().double().mean(dim=1))
            balances.append(balance.detach().double())
        return RowLosses(
            loss=torch.cat(losses), balance=torch.cat(balances), image_gradient=leaves.gradient()
        )

    @torch.no_grad()
    def find_hits(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        images: Tensor | None = None,
        num_microbatches: int = 1,
    ) -> Tensor:
        """Return which targets are the most likely token at their position; without dropout.

        Args:
            tokens: as for `forward_backward`, like the rest.
            targets: see there.
            images: see there.
            num_microbatches: see there.

        Returns:
            (rows, local positions) of 0 and 1, positions as `take_positions` cuts them; empty
            if the last stage is not on this rank.
        """
        rows = Rows(tokens=tokens, targets=targets, weights=None, images=images)
        with self._evaluating():
            if self.groups.size("pp") > 1:
                return self._runner(rows, num_microbatches, None).step(rows, loss_scale=1.0)[0]
            return self._run_whole(rows, ImageLeaves(self._context))[0]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Let stages return hits, without dropout."""
        self._in_hits = True
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()
            self._in_hits = False

    def _loss_context(self) -> AbstractContextManager[None]:
        """The context for forward *and backward* in which split logits are never gathered."""
        # torch annotates loss_parallel as a plain generator
        return (
            cast("AbstractContextManager[None]", loss_parallel())
            if self._vocab_is_split
            else nullcontext()
        )

    def reduce_gradients(self) -> None:
        """Make every gradient that of the mean loss over all data ranks. Collective."""
        reduce_gradients(self.module.parameters(), groups=self.groups)

    def run_stage(
        self,
        stage: Stage,
        x: Tensor,
        balance: Tensor | None,
        targets: Tensor | None,
        weights: Tensor | None = None,
        images: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One stage on this rank's own parameters; see `GPT.forward`."""
        out, balance = self.run(
            x,
            balance,
            stage=stage,
            targets=targets,
            weights=weights,
            images=images,
            in_hits=self._in_hits,
        )
        return _local(out), _local(balance)

    def _run_whole(self, rows: Rows, leaves: ImageLeaves) -> tuple[Tensor, Tensor]:
        """All layers on this rank's positions."""
        images = leaves.take(rows.images)
        local = rows.take_positions(self._context)
        return self.run_stage(
            self._all_stages[0], local.tokens, None, local.targets, local.weights, images
        )

    def _runner(
        self, rows: Rows, num_microbatches: int, around: AroundMicrobatch | None
    ) -> PipelineRunner:
        """The pipeline's schedule for these sizes; another one where nothing is learnt."""
        sizes = (*rows.tokens.shape, num_microbatches)
        key = (*sizes, self._in_hits)
        if key not in self._runners:
            self._runners = {k: v for k, v in self._runners.items() if k[3] != self._in_hits}
            self._runners[key] = PipelineRunner(
                self.module,
                self.stages,
                run_stage=self.run_stage,
                pipeline=self.pipeline,
                groups=self.groups,
                device=self.device,
                sizes=sizes,
                around=around,
                has_backward=not self._in_hits,
            )
        return self._runners[key]


def _tensor_plan(module: GPT, *, vocab_is_split: bool) -> dict[str, ParallelStyle]:
    """Return how each dense module is split over the tensor axis."""
    plan = plan_blocks(module.blocks, config=module.config)
    if vocab_is_split and hasattr(module, "embed"):
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if vocab_is_split and hasattr(module, "head"):
        plan["head"] = _head_style(module.config)
    return plan


def _head_style(config: GPTConfig) -> ParallelStyle:
    """Return how the output head is split over the vocabulary; if tied, as the embedding is."""
    if not config.tied_head:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return PrepareModuleInputOutput(
        input_layouts=(Replicate(), None),
        desired_input_layouts=(Replicate(), None),
        output_layouts=Shard(-1),
        desired_output_layouts=Shard(-1),
        use_local_output=False,
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

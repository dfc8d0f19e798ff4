"""A GPT on the groups of a layout: every axis at once.

The tensor axis of the dense layers is torch's own: `parallelize_module` with column- and row-wise
styles and a vocabulary-parallel embedding and head. Experts, state space and attention over a
context axis have their groups as constructor arguments. The pipeline is
`torch.distributed.pipelining` on the `pp` communicator. The data axis is explicit: see
`reduce_gradients`.

Every parameter is a DTensor that declares its placement on the ranks that have it: dense ones on
the mesh (`dp_cp`, `tp`), experts on (`expt_dp`, `ep`, `expt_tp`), and an embedding that the first
and the last stage share on (`embd`, `dp_cp`, `tp`). The computation needs only a part of that, so
modules run on a view of each parameter: on the `tp` mesh alone, or its plain local part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
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

from holdfast.parallel import ProcessGroups
from holdfast.reference.models.collectives import Axis
from holdfast.reference.models.config import GPTConfig, check_layout
from holdfast.reference.models.context import take_positions
from holdfast.reference.models.gpt import GPT, initial_parameter
from holdfast.reference.models.gradients import reduce_gradients
from holdfast.reference.models.pipeline import AroundMicrobatch, PipelineRunner
from holdfast.reference.models.stages import Pipeline, Stage, Variant

DENSE_MESH = ("dp_cp", "tp")
TIED_MESH = ("embd", "dp_cp", "tp")
EXPERT_MESH = ("expt_dp", "ep", "expt_tp")


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


class ParallelGPT:
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
        self.groups = groups
        self.device = device or torch.device("cpu")
        self.autocast = autocast
        self.pipeline = pipeline or Pipeline()
        pp, tp = groups.size("pp"), groups.size("tp")
        self._all_stages = self.pipeline.stages(num_layers=config.num_layers, pp=pp)
        self.stages: tuple[Stage, ...] = tuple(
            stage
            for stage in self._all_stages
            if self.pipeline.owner(stage.index, pp=pp) == groups.index("pp")
        )
        self._is_split = groups.layout.world_size > 1
        self._vocab_is_split = tp > 1 and config.vocab_size % tp == 0
        self._context = Axis.of(groups, "cp")
        with torch.device("meta"):
            self.module = GPT(config, groups=groups, stages=self.stages, variant=variant)
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        if self._is_split:
            groups.require("tp", "dp_cp", "pp")
            if tp > 1:
                plan = _tensor_plan(self.module, vocab_is_split=self._vocab_is_split)
                parallelize_module(self.module, self._mesh("tp"), plan, src_data_rank=None)
        self._initialise(seed=seed)
        self._runner: PipelineRunner | None = None
        self._has_units = False

    @property
    def ties_stages(self) -> bool:
        """Whether the first and the last rank of a pipeline each have the embedding."""
        return (
            self.groups.size("pp") > 1 and self.config.tied_head and not self.pipeline.is_v_shaped
        )

    def forward_backward(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        num_microbatches: int = 1,
        loss_scale: float = 1.0,
        around: AroundMicrobatch | None = None,
    ) -> RowLosses:
        """Add the gradient of the mean loss of these rows to every parameter.

        Args:
            tokens: (rows, positions) of whole rows, equal on all ranks of one data share.
            targets: the same shape.
            num_microbatches: equal parts that the rows are cut into; a pipeline runs them in its
                schedule's order and takes the same sizes in every call.
            loss_scale: what gradients are multiplied by, for float16; losses are not.
            around: entered around forward and backward of each microbatch, with whether it is the
                last. Under a pipeline, whose schedule mixes them, it is entered around backward
                alone, and only after `view_in_units`; the first call's counts for all.

        Returns:
            The losses of each row; empty where the last stage is not on this rank.
        """
        if self.groups.size("pp") > 1:
            return self._forward_backward_pipeline(
                tokens,
                targets,
                num_microbatches,
                loss_scale,
                around=around if self._has_units else None,
            )
        losses, balances = [], []
        batches = zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
        for number, (batch, labels) in enumerate(batches, start=1):
            context = (
                nullcontext() if around is None else around(is_last=number == num_microbatches)
            )
            with context, self._loss_context():
                per_token, balance = self._run_whole(batch, labels)
                total = (per_token.mean(dim=1) + balance).sum() * (loss_scale / len(tokens))
                total.backward()  # type: ignore[no-untyped-call]
            losses.append(per_token.detach().double().mean(dim=1))
            balances.append(balance.detach().double())
        return RowLosses(loss=torch.cat(losses), balance=torch.cat(balances))

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

    def view_in_units(self, units: Sequence[nn.Module]) -> None:
        """From now on, make the views of parameters when the unit around them runs.

        For a model whose parameters are gathered and freed unit by unit (`fully_shard_model`):
        before a unit runs its parameters are not there to be viewed.

        Args:
            units: modules of `module`, none inside of another; it is itself one for all the rest.
        """
        splits_itself = _names_with_splits(self.module)
        names = {module: prefix for prefix, module in self.module.named_modules()}
        for unit in (self.module, *units):
            others = {inner for each in units if each is not unit for inner in each.modules()}
            places = [
                (module, name, f"{names[module]}.{name}" in splits_itself)
                for module in unit.modules()
                if module not in others
                for name in module._parameters
            ]
            _run_on_views(unit, places, view=self._view)
        self._has_units = True

    def run_stage(
        self, stage: Stage, x: Tensor, balance: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One stage on this rank's own parameters; see `GPT.forward`."""
        options = {"stage": stage, "targets": targets}
        with self._autocast():
            out, balance = (
                self.module(x, balance, **options)
                if self._has_units
                else functional_call(self.module, self._views(), (x, balance), options)
            )
        return _local(out), _local(balance)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _run_whole(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.run_stage(
            self._all_stages[0],
            take_positions(tokens, axis=self._context, dim=1),
            None,
            take_positions(targets, axis=self._context, dim=1),
        )

    def _forward_backward_pipeline(
        self,
        tokens: Tensor,
        targets: Tensor,
        num_microbatches: int,
        loss_scale: float,
        *,
        around: AroundMicrobatch | None,
    ) -> RowLosses:
        """The same through the pipeline's schedule, which is made again when the sizes change."""
        sizes = (len(tokens), tokens.shape[1], num_microbatches)
        if self._runner is None or self._runner.sizes != sizes:
            self._runner = PipelineRunner(
                self.module,
                self.stages,
                run_stage=self.run_stage,
                pipeline=self.pipeline,
                groups=self.groups,
                device=self.device,
                sizes=sizes,
                around=around,
            )
        with self._loss_context():
            losses, balance = self._runner.step(
                take_positions(tokens, axis=self._context, dim=1),
                take_positions(targets, axis=self._context, dim=1),
                loss_scale=loss_scale,
            )
        return RowLosses(loss=losses.double().mean(dim=1), balance=balance.double())

    def _mesh(self, *names: str) -> DeviceMesh:
        if names not in self._meshes:
            self._meshes[names] = self.groups.mesh(*names)
        return self._meshes[names]

    def _initialise(self, *, seed: int) -> None:
        """Replace each meta parameter by its real local part, declared on the whole mesh."""
        for module_name, module in self.module.named_modules():
            splits: Mapping[str, Mapping[int, str]] = getattr(module, "SPLITS", {})
            for name, parameter in list(module.named_parameters(recurse=False)):
                key = f"{module_name}.{name}" if module_name else name
                full = initial_parameter(
                    key, shape=tuple(parameter.shape), config=self.config, seed=seed
                )
                axes = _axes_of(parameter, splits.get(name, {}))
                value = self._declare(key, full, axes)
                module.register_parameter(name, nn.Parameter(value))

    def _declare(self, key: str, full: Tensor, axes: Mapping[int, str]) -> Tensor:
        """This rank's part of a parameter whose dims are split over the axes named."""
        if not self._is_split:
            return full.to(self.device)
        names: tuple[str, ...] = DENSE_MESH
        if key == "embed.weight" and self.ties_stages:
            names = TIED_MESH
        elif not set(axes.values()) <= {"tp"}:
            names = EXPERT_MESH
        local = full
        dims = {axis: dim for dim, axis in axes.items()}
        placements: list[Placement] = []
        for axis in names:
            if axis not in dims:
                placements.append(Replicate())
                continue
            dim = dims[axis]
            size = local.shape[dim] // self.groups.size(axis)
            local = local.narrow(dim, self.groups.index(axis) * size, size)
            placements.append(Shard(dim))
        return DTensor.from_local(
            local.clone().to(self.device), self._mesh(*names), placements, run_check=False
        )

    def _views(self) -> dict[str, Tensor]:
        """Parameters as the computation needs them, by name."""
        if not self._is_split:
            return {}
        own = _names_with_splits(self.module)
        return {
            name: self._view(parameter, splits_itself=name in own)
            for name, parameter in self.module.named_parameters()
        }

    def _view(self, parameter: Tensor, *, splits_itself: bool) -> Tensor:
        """A parameter as the computation needs it: a split dense one on `tp`, others plain.

        Autograd runs through the views, so gradients arrive at the declared parameters. Until they
        are reduced they are those of this rank's rows only.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        local, placement = parameter.to_local(), parameter.placements[-1]
        if splits_itself or not placement.is_shard():
            return local
        return DTensor.from_local(local, self._mesh("tp"), [placement], run_check=False)


def _run_on_views(
    unit: nn.Module, places: Sequence[tuple[nn.Module, str, bool]], *, view: Callable[..., Tensor]
) -> None:
    """Let the forward of a module compute with views of parameters, below its own hooks.

    Args:
        unit: the module.
        places: module, attribute and whether the module splits itself, of each parameter.
        view: makes the view of a parameter.
    """
    forward = unit.forward

    def on_views(*args: Any, **kwargs: Any) -> Any:
        declared = [module._parameters[name] for module, name, _ in places]
        try:
            for (module, name, splits_itself), parameter in zip(places, declared, strict=True):
                value: Any = view(parameter, splits_itself=splits_itself)
                module._parameters[name] = value
            # FSDP2 warns of views, on which its hooks do not hold: what is passed through, losses.
            return tuple(t.clone() if t._is_view() else t for t in forward(*args, **kwargs))
        finally:
            for (module, name, _), parameter in zip(places, declared, strict=True):
                module._parameters[name] = parameter

    unit.forward = on_views


def _names_with_splits(module: nn.Module) -> set[str]:
    """Parameters of modules that split themselves and so compute with plain tensors."""
    return {
        f"{prefix}.{name}"
        for prefix, inner in module.named_modules()
        if hasattr(inner, "SPLITS")
        for name, _ in inner.named_parameters()
    }


def _axes_of(parameter: Tensor, splits: Mapping[int, str]) -> Mapping[int, str]:
    """Dim -> axis, as the module declares or as torch's tensor parallelism has split it."""
    if isinstance(parameter, DTensor):
        placement = parameter.placements[0]
        return {placement.dim: "tp"} if isinstance(placement, Shard) else {}
    return splits


def _tensor_plan(module: GPT, *, vocab_is_split: bool) -> dict[str, ParallelStyle]:
    """How each dense module is split over the tensor axis (Shoeybi et al. 2019).

    The residual stream stays plain and equal on all tensor ranks. The input of attention or
    MLP becomes a DTensor once, before its two or three column-wise matrices, so that their
    gradients are added up before the one all-reduce.
    """
    config = module.config
    plan: dict[str, ParallelStyle] = {}
    for layer in module.blocks:
        attn, mlp = f"blocks.{layer}.attn", f"blocks.{layer}.mlp"
        if config.mixer(int(layer)) == "a":
            plan[attn] = PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
            )
            for name in ("query", "key", "value"):
                plan[f"{attn}.{name}"] = ColwiseParallel()
            plan[f"{attn}.out"] = RowwiseParallel()
        if config.feed(int(layer)) == "d":
            plan[mlp] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
            for name in ("gate", "up") if config.mlp == "swiglu" else ("up",):
                plan[f"{mlp}.{name}"] = ColwiseParallel()
            plan[f"{mlp}.down"] = RowwiseParallel()
    if vocab_is_split and hasattr(module, "embed"):
        plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    if vocab_is_split and hasattr(module, "head"):
        plan["head"] = _head_style(config)
    return plan


def _head_style(config: GPTConfig) -> ParallelStyle:
    """How the output head is split over the vocabulary; a tied one takes the embedding's shard."""
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

"""A module on the groups of a layout: which rank has what of each parameter.

Every parameter is a DTensor that declares its placement on the ranks that have it: dense ones on
the mesh (`dp_cp`, `tp`), experts on (`expt_dp`, `ep`, `expt_tp`), and an embedding that the first
and the last stage share on (`embd`, `dp_cp`, `tp`). The computation needs only a part of that, so
modules run on a view of each parameter: on the `tp` mesh alone, or its plain local part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.func import functional_call

from holdfast.parallel import ProcessGroups
from holdfast_trainer._torch import is_view, parameter_table
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.gpt import initial_parameter

DENSE_MESH = ("dp_cp", "tp")
TIED_MESH = ("embd", "dp_cp", "tp")
EXPERT_MESH = ("expt_dp", "ep", "expt_tp")

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class SplitModule(Generic[ModuleT]):
    """A module whose parameters are split over the groups of a layout.

    `module` is the `nn.Module` to optimise and to checkpoint. On a layout of one rank its
    parameters are plain tensors, otherwise DTensors.
    """

    def __init__(
        self,
        module: ModuleT,
        *,
        groups: ProcessGroups,
        blocks: GPTConfig,
        plan: Mapping[str, ParallelStyle],
        seed: int,
        device: torch.device | None = None,
        autocast: torch.dtype | None = None,
        scope: str = "",
        tied: Collection[str] = (),
    ) -> None:
        """Split the module and initialise the local part; no collective.

        Args:
            module: on meta, in its whole shapes.
            groups: needs a communicator for every axis larger than 1 (`dp_cp` for the data axis).
            blocks: sizes, for initial values.
            plan: how dense modules are split over the tensor axis.
            seed: parameters are a function of (seed, scope, name) and nothing else.
            device: where parameters live; default the CPU.
            autocast: dtype of matrix products; absent: that of the parameters.
            scope: name before those of parameters, so that two modules start with other values.
            tied: parameters that the first and the last rank of a pipeline each have.

        Raises:
            GroupError: a communicator is missing.

        Cost: memory of this rank's parameters, and of one full parameter at a time on the CPU.
        """
        self.module = module
        self.groups = groups
        self.device = device or torch.device("cpu")
        self.autocast = autocast
        self._blocks = blocks
        self._tied = frozenset(tied)
        self._is_split = groups.layout.world_size > 1
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        if self._is_split:
            groups.require("tp", "dp_cp", "pp")
            if groups.size("tp") > 1:
                parallelize_module(module, self._mesh("tp"), dict(plan), src_data_rank=None)
        self._initialise(seed=seed, scope=scope)
        self._has_units = False

    def run(self, *args: Any, **options: Any) -> Any:
        """The module's forward on this rank's own parameters, under `autocast`."""
        with self._autocast():
            if self._has_units:
                return self.module(*args, **options)
            return functional_call(self.module, self._views(), args, options)

    def view_in_units(self, units: Sequence[nn.Module]) -> None:
        """From now on, make the views of parameters when the unit around them runs.

        For a model whose parameters are gathered and freed unit by unit (`fully_shard_model`):
        before a unit runs its parameters are not there to be viewed.

        Args:
            units: modules of `module`, none inside of another; it is itself one for all the rest.
        """
        splits_itself = _names_with_splits(self.module)
        whole: nn.Module = self.module
        names = {module: prefix for prefix, module in self.module.named_modules()}
        for unit in (whole, *units):
            others = {inner for each in units if each is not unit for inner in each.modules()}
            places = [
                (module, name, f"{names[module]}.{name}" in splits_itself)
                for module in unit.modules()
                if module not in others
                for name in parameter_table(module)
            ]
            _run_on_views(unit, places, view=self._view)
        self._has_units = True

    def _autocast(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def _mesh(self, *names: str) -> DeviceMesh:
        if names not in self._meshes:
            self._meshes[names] = self.groups.mesh(*names)
        return self._meshes[names]

    def _initialise(self, *, seed: int, scope: str) -> None:
        """Replace each meta parameter by its real local part, declared on the whole mesh."""
        for module_name, module in self.module.named_modules():
            splits: Mapping[str, Mapping[int, str]] = getattr(module, "SPLITS", {})
            for name, parameter in list(module.named_parameters(recurse=False)):
                key = f"{module_name}.{name}" if module_name else name
                full = initial_parameter(
                    scope + key, shape=tuple(parameter.shape), config=self._blocks, seed=seed
                )
                axes = _axes_of(parameter, splits.get(name, {}))
                value = self._declare(key, full, axes)
                module.register_parameter(name, nn.Parameter(value))

    def _declare(self, key: str, full: Tensor, axes: Mapping[int, str]) -> Tensor:
        """This rank's part of a parameter whose dims are split over the axes named."""
        if not self._is_split:
            return full.to(self.device)
        names: tuple[str, ...] = DENSE_MESH
        if key in self._tied:
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
        declared = [parameter_table(module)[name] for module, name, _ in places]
        try:
            for (module, name, splits_itself), parameter in zip(places, declared, strict=True):
                value: Any = view(parameter, splits_itself=splits_itself)
                parameter_table(module)[name] = value
            # FSDP2 warns of views, on which its hooks do not hold: what is passed through, losses.
            return tuple(t.clone() if is_view(t) else t for t in forward(*args, **kwargs))
        finally:
            for (module, name, _), parameter in zip(places, declared, strict=True):
                parameter_table(module)[name] = parameter

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


def plan_blocks(blocks: Iterable[str], *, config: GPTConfig) -> dict[str, ParallelStyle]:
    """Return how the dense modules of blocks are split over the tensor axis (Shoeybi et al. 2019).

    The residual stream stays plain and equal on all tensor ranks. The input of attention or
    MLP becomes a DTensor once, before its two or three column-wise matrices, so that their
    gradients are added up before the one all-reduce.

    Args:
        blocks: numbers of layers, as they are in the names of modules.
        config: what is in each layer.
    """
    plan: dict[str, ParallelStyle] = {}
    for layer in blocks:
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
    return plan

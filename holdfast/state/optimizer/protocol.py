"""How an optimizer holds parameters: whole, or as flat runs of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import MismatchError, PlacementError
from holdfast.state.markers import FlatShard
from holdfast.state.match.stored import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldParameter:
    """One parameter as an optimizer holds it on this rank."""

    parameter: nn.Parameter
    """The model's parameter, which gives the name."""
    group: int
    """Position in the optimizer's `param_groups`."""
    optimizer: torch.optim.Optimizer
    """The torch optimizer that keeps the state, under the tensor `updated`."""
    updated: torch.Tensor | None
    """The parameter itself, or this rank's run of its elements; None where it has none."""
    start: int = 0
    """First element of the run in the row-major local tensor of the parameter."""
    over: str | None = None
    """The group along which ranks hold other runs; None: the parameter is held whole."""
    is_main: bool = False
    """Whether `updated` is a copy in a wider dtype than the parameter's, which is stored too."""
    markers: dict[str, FlatShard] = field(default_factory=dict)
    """Markers of earlier saves by entry: the same objects as long as the tensors are the same."""

    def stored_form(self, entry: str, value: object) -> object:
        """What is saved for an entry of the state; PlacementError for one that is not elementwise.

        Tensors of the run's shape are stored in the parameter's coordinates, 0-d ones as they are.
        """
        if self.over is None or self.updated is None:
            return value
        if not isinstance(value, torch.Tensor):
            if _holds_tensors(value):
                raise PlacementError(
                    f"optimizer entry '{entry}' is a {type(value).__name__} that holds tensors; "
                    f"only elementwise optimizers can be sharded by elements"
                )
            return value
        if value.ndim == 0:
            return value
        if value.shape != self.updated.shape:
            raise PlacementError(
                f"optimizer entry '{entry}' has shape {list(value.shape)}, not that of the run it "
                f"belongs to ({list(self.updated.shape)}); only elementwise optimizers can be "
                f"sharded by elements"
            )
        return self.marker(entry, value)

    def marker(self, entry: str, run: torch.Tensor) -> FlatShard:
        """The marker of a run of this parameter; the same object for the same tensor."""
        held = self.markers.get(entry)
        if held is None or held.local is not run:
            held = FlatShard(run, self.start, self.parameter.detach(), self.over or "")
            self.markers[entry] = held
        return held

    def target(
        self,
        entry: str,
        stored: StoredTensor,
        *,
        on_device: bool,
        real_shape: tuple[int, ...] | None = None,
    ) -> object:
        """Memory for a stored entry: placed like what is held, where it has the parameter's shape.

        `real_shape`: the parameter's without padding, where that is declared.
        Step counters stay whole on the host (on the parameter's device for fused and capturable
        optimizers), as torch keeps them.
        """
        parameter = self.parameter
        device = local_of(parameter).device
        if entry != "step" and self._is_elementwise(stored.shape, real_shape):
            if self.over is None:
                return torch.zeros_like(
                    parameter.detach(), dtype=stored.dtype, memory_format=torch.preserve_format
                )
            numel = 0 if self.updated is None else self.updated.numel()
            return self.marker(entry, torch.zeros(numel, dtype=stored.dtype, device=device))
        if self.over is not None and stored.shape != ():
            raise MismatchError(
                f"{stored.key} has shape {list(stored.shape)}, the parameter "
                f"{list(parameter.shape)}: a sharded optimizer takes elementwise state only; if "
                f"they differ by padding alone, declare it: declare_padding(module, name, shape)"
            )
        where = device if on_device or entry != "step" else torch.device("cpu")
        return torch.zeros(stored.shape, dtype=stored.dtype, device=where)

    def _is_elementwise(self, shape: tuple[int, ...], real_shape: tuple[int, ...] | None) -> bool:
        """Whether a stored entry of this shape has one element for each of the parameter's.

        Where padding is declared, an entry of another size counts, so that it is refused as one of
        another real shape; one of a factored state has a dim of 1 where the parameter has more.
        """
        whole = tuple(self.parameter.shape)
        if real_shape is None:
            return shape == whole
        return shape == real_shape or (
            len(shape) == len(whole)
            and all(n > 1 or most <= 1 for n, most in zip(shape, whole, strict=True))
        )


@runtime_checkable
class PartitionedOptimizer(Protocol):
    """What `OptimizerState` asks of an optimizer that is no `torch.optim.Optimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of all groups, in a fixed order; setting an entry changes the group."""
        ...

    def held_parameters(self) -> Sequence[HeldParameter]:
        """Every parameter, also those of which this rank holds nothing; the same objects always."""
        ...

    def num_groups(self) -> dict[str, int]:
        """How many of the groups belong to which optimizer, by its name."""
        ...

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How each optimizer is sharded, for people: stored, never needed to load."""
        ...

    def synchronize(self) -> None:
        """Wait for everything under way that writes to parameters."""
        ...

    def begin_load(self, *, with_main: bool) -> None:
        """A load of the state begins; `with_main`: it brings main parameters."""
        ...

    def finish_load(self, *, with_main: bool) -> None:
        """State, and main parameters if any, are in place; the same call on every rank."""
        ...


class WholeOptimizer:
    """A `torch.optim.Optimizer` seen as a `PartitionedOptimizer` that partitions nothing.

    Also for whatever has its `param_groups`, `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups."""
        return self._optimizer.param_groups

    def held_parameters(self) -> Sequence[HeldParameter]:
        """Each parameter, held whole."""
        return [
            HeldParameter(parameter=p, group=i, optimizer=self._optimizer, updated=p)
            for i, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
        ]

    def num_groups(self) -> dict[str, int]:
        """Nothing: groups are found by their members."""
        return {}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """Nothing is sharded."""
        return {}

    def synchronize(self) -> None:
        """Nothing is under way."""

    def begin_load(self, *, with_main: bool) -> None:
        """Nothing to prepare."""

    def finish_load(self, *, with_main: bool) -> None:
        """Nothing to follow up."""


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without a gradient."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found

"""What the checkpoint asks of an optimizer: its parameters, whole or sharded by elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.state.markers import FlatShard

NOT_STORED = ("params", "param_names")
"""Entries of a parameter group that are no hyperparameters: parameters, and torch's names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizerParameter:
    """One parameter as an optimizer updates it on this rank."""

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

    def marker(self, entry: str, run: torch.Tensor) -> FlatShard:
        """The marker of a run of this parameter; the same object for the same tensor."""
        marker = self.markers.get(entry)
        if marker is None or marker.local is not run:
            marker = FlatShard(run, self.start, self.parameter.detach(), self.over or "")
            self.markers[entry] = marker
        return marker


@runtime_checkable
class PartitionedOptimizer(Protocol):
    """What `OptimizerState` asks of an optimizer that is no `torch.optim.Optimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of all groups, in a fixed order; setting an entry changes the group."""

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter, also those of which this rank holds nothing; the same objects always."""

    def num_groups(self) -> dict[str, int]:
        """How many of the groups belong to which optimizer, by its name; none to be checked."""
        return {}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """How each optimizer is sharded, for people: stored, never needed to load."""
        return {}

    def synchronize(self) -> None:
        """Wait for every operation in flight that writes to parameters."""

    def begin_load(self, *, with_main: bool) -> None:
        """Prepare for a load of the state.

        Args:
            with_main: Whether the checkpoint has main parameters.
        """

    def finish_load(self, *, with_main: bool) -> None:
        """Follow up a load: state, and main parameters if any, are in place.

        Args:
            with_main: Whether main parameters were loaded; the same on every rank.
        """


@runtime_checkable
class OptimizersByModule(Protocol):
    """Optimizers of several modules that step as one; each is stored under its module's name."""

    def optimizers_by_module(self) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizer of each module on this rank."""

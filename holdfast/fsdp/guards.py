"""Traps of FSDP2 that give wrong weights without an error; here each is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.fsdp import _torch


class UnitGuard:
    """Watches one unit: whole weights must be those of its shards, the reduction as set up.

    FSDP2 keeps whole weights after `set_reshard_after_backward(False)`, and those of a root after a
    forward without backward. A step, a load or any other write then changes only the shards, and
    the next forward computes with the old weights; the loss never changes.

    Cost: some microseconds a forward and parameter.
    """

    def __init__(self, unit: nn.Module, *, name: str) -> None:
        self._name = name or "(the model)"
        self._unit = unit
        self.groups: list[Any] = _torch.param_groups(unit)
        self._reductions = [_torch.reduction_of(group) for group in self.groups]
        self._gathers = [_torch.gather_of(group) for group in self.groups]
        self._versions: list[list[tuple[int, int]]] = [[] for _ in self.groups]
        self._whole_versions: dict[nn.Parameter, int] = {}
        self._hooked: set[nn.Parameter] = set()
        self._used: list[Any] = []
        # The first is before FSDP2's own hook, the second after it.
        unit.register_forward_pre_hook(self._before_gather, prepend=True)
        unit.register_forward_pre_hook(self._after_gather)

    def check_settings(self) -> None:
        """Raise ConfigError if the reduction of this unit is not what the layout says."""
        reductions = [_torch.reduction_of(group) for group in self.groups]
        if reductions != self._reductions:
            raise ConfigError(
                f"unit '{self._name}': its gradient divisor, or how its gradients are reduced, was "
                f"changed after fully_shard_model (from {self._reductions} to {reductions}); the "
                f"layout gives the divisor. Leave set_gradient_divide_factor, "
                f"set_force_sum_reduction_for_comms and set_reduce_scatter_unused_params alone, "
                f"and scale the loss if you want other gradients"
            )
        if any(
            now is not then
            for now, then in zip(
                (_torch.gather_of(group) for group in self.groups), self._gathers, strict=True
            )
        ):
            raise ConfigError(
                f"unit '{self._name}': its all-gather was replaced after fully_shard_model; "
                f"parameters are gathered on the communicators of the groups it was given"
            )

    def check_weights(self) -> None:
        """Raise ConfigError if shards were written while whole weights of them were kept.

        Or if a whole weight was written, which is a copy that is thrown away. A write through
        `.data` leaves no trace.
        """
        for whole, version in self._whole_versions.items():
            if _torch.version(whole) != version:
                self._whole_versions.clear()
                raise ConfigError(
                    f"unit '{self._name}': a parameter of shape {list(whole.shape)} was written "
                    f"between a forward and its backward or the next step; that changed a whole "
                    f"copy, which is thrown away. Write to parameters after a step, after a "
                    f"forward under torch.no_grad(), or after reshard() of the sharded model"
                )
        for group, versions in zip(self.groups, self._versions, strict=True):
            if _torch.is_whole(group) and versions and _torch.versions(group) != versions:
                raise ConfigError(
                    f"unit '{self._name}': its parameters were changed (a step, a load) while "
                    f"whole copies of the old ones were kept, which the next forward would use. "
                    f"Put each backward into microbatch(is_last=...), whose last one frees them; "
                    f"or call set_reshard_after_backward(True) before the last backward; or "
                    f"reshard() on the unit before parameters are changed"
                )

    def check_ended(self) -> None:
        """Raise ConfigError if an error ended a forward or a backward of this unit.

        FSDP2 would not reduce, or not gather, this unit in the steps that follow.
        """
        if self.is_interrupted():
            raise ConfigError(
                f"unit '{self._name}': an error ended its last forward or backward, so its "
                f"gradients are incomplete; after such an error call drop_gradients() of the "
                f"sharded model on all ranks, and repeat the step"
            )

    def is_interrupted(self) -> bool:
        """Return True if an error left this unit in the middle of a forward or a backward."""
        return _torch.is_interrupted(self._unit)

    def has_unreduced(self) -> bool:
        """Return True if gradients of this unit wait for a reduction."""
        return any(map(_torch.has_unreduced, self.groups))

    def used(self) -> set[nn.Parameter]:
        """Return the parameters, as the optimizer sees them, that got a gradient in this unit."""
        return {member.sharded_param for member in self._used}

    def forget_used(self) -> None:
        """Forget which parameters got a gradient."""
        self._used.clear()

    def reshard(self) -> None:
        """Free whole weights, if there are any, so that what comes next reads the shards."""
        for group in self.groups:
            if _torch.is_idle(group):
                group.reshard()

    def _before_gather(self, module: nn.Module, args: Any) -> None:
        """Check whole weights before their first use in a forward."""
        del module, args
        self.check_weights()
        for number, group in enumerate(self.groups):
            if not _torch.is_whole(group):
                self._versions[number] = _torch.versions(group)

    def _after_gather(self, module: nn.Module, args: Any) -> None:
        """Note which parameters get a gradient; FSDP2 creates the whole one at its first use."""
        del module, args
        for group in self.groups:
            for member, whole in _torch.whole_parameters(group):
                self._whole_versions[whole] = _torch.version(whole)
                if whole in self._hooked or not whole.requires_grad:
                    continue
                self._hooked.add(whole)
                _torch.on_gradient(whole, self._note_use(member))

    def _note_use(self, member: Any) -> Callable[[torch.Tensor], None]:
        def note(whole: torch.Tensor) -> None:
            del whole
            self._used.append(member)

        return note

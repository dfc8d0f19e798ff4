"""Traps of FSDP2 that give wrong weights without an error; here each is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from holdfast._torch import has_unreduced, mark_eager
from holdfast.errors import ConfigError
from holdfast.fsdp import _torch
from holdfast.fsdp.prefetch import Prefetch


class UnitGuard:
    """Watches one unit: whole weights must be those of its shards, the reduction as set up.

    FSDP2 keeps whole weights after `set_reshard_after_backward(False)`, and those of a root after a
    forward without backward. A step, a load or any other write then changes only the shards, and
    the next forward computes with the old weights; the loss never changes.

    Cost: less than a microsecond a forward and parameter.

    `hooks` are those that users have registered at the parameters before they were sharded.
    """

    def __init__(
        self,
        unit: nn.Module,
        *,
        name: str,
        hooks: Mapping[Any, Any],
        prefetch: Prefetch,
    ) -> None:
        self._name = name or "(the model)"
        self._place = f"unit '{self._name}'"
        self.state: Any = _torch.state_of(unit)
        self.groups: list[Any] = _torch.param_groups(self.state)
        self._hooks = hooks
        self._prefetch = prefetch
        self.places = _torch.Places(unit, self.groups)
        self._reductions = [_torch.reduction_of(group) for group in self.groups]
        self._gathers = [_torch.gather_of(group) for group in self.groups]
        self.units: Sequence[UnitGuard] = (self,)
        """Guards of all units of the model."""
        self._wholes: list[nn.Parameter] = []
        self._whole_versions: list[int] = []
        self._unhooked: list[tuple[Any, nn.Parameter]] = []
        """Whole parameters that users' hooks are not at yet: frozen ones."""
        self._used: dict[Any, tuple[int, int]] = {}
        """Parameters that got a gradient, with the versions of their shards then."""
        for group in self.groups:
            group.used = self._used
        # The first is before FSDP2's own hook, the second after it.
        unit.register_forward_pre_hook(self._before_gather, prepend=True)
        self._after_gathers = unit.register_forward_pre_hook(self._after_gather)
        # After FSDP2's own, which frees whole parameters, or leaves them until the backward.
        unit.register_forward_hook(
            self._check_output if _torch.regathers(self.state) else self._after_forward
        )

    def check_settings(self) -> None:
        """Raise ConfigError if the reduction of this unit is not what the layout says."""
        reductions = [*map(_torch.reduction_of, self.groups)]
        if reductions != self._reductions:
            raise ConfigError(
                f"unit '{self._name}': its gradient divisor, or how its gradients are reduced, was "
                f"changed after fully_shard_model (from {self._reductions} to {reductions}); the "
                f"layout gives the divisor. Leave set_gradient_divide_factor, "
                f"set_force_sum_reduction_for_comms and set_reduce_scatter_unused_params alone, "
                f"and scale the loss if you want other gradients"
            )
        if [*map(_torch.gather_of, self.groups)] != self._gathers:
            raise ConfigError(
                f"unit '{self._name}': its all-gather was replaced after fully_shard_model; "
                f"parameters are gathered on the communicators of the groups it was given"
            )
        for group in self.groups:
            for parameter in _torch.with_hooks(group):
                check_hooks(parameter, where=self._place)

    def check_places(self) -> None:
        """Raise ConfigError if the model has another parameter now, or one of another dtype."""
        changed = self.changed()
        if changed is not None:
            for unit in self.units:  # one refusal tells of all that was ignored so far
                unit.places.accept_ignored()
            raise ConfigError(
                f"{changed}; training would not use it. Change the model before fully_shard_model, "
                f"and choose the dtype of the computation by precision=; after it write values in "
                f"place (parameter.copy_(...)) or by load_state_dict"
            )

    def changed(self) -> str | None:
        """Return which parameter of this unit was replaced since the model was sharded."""
        changed = self.places.changed()
        return None if changed is None else f"unit '{self._name}': {changed}"

    def check_weights(self, group: Any) -> None:
        """Raise ConfigError if shards were written while whole weights of them are kept.

        Writes through `.data`, by NumPy or by other programs count no version, so what was aside is
        compared with the shards.
        """
        if group.is_written() or _torch.becomes_stale(group):
            raise ConfigError(
                f"unit '{self._name}': its parameters were changed (a step, a load) while "
                f"whole copies of the old ones were kept, which the next forward would use. "
                f"Put each backward into microbatch(is_last=...), whose last one frees them; "
                f"or call set_reshard_after_backward(True) before the last backward; or "
                f"reshard() on the unit before parameters are changed"
            )

    def check_writes(self) -> None:
        """Raise ConfigError if a whole weight was written, which is a copy that is thrown away."""
        lost = self.lost_write()
        if lost is not None:
            for unit in self.units:  # one refusal tells of all that was written so far
                unit._whole_versions = _torch.versions(unit._wholes)
            raise ConfigError(f"{lost}. Write to parameters outside of the model's forward")

    def lost_write(self) -> str | None:
        """Return what was written to a whole copy since the last refusal."""
        versions = _torch.versions(self._wholes)
        if versions == self._whole_versions:
            return None
        differ = zip(self._wholes, versions, self._whole_versions, strict=True)
        shape = next(list(whole.shape) for whole, now, then in differ if now != then)
        return (
            f"unit '{self._name}': a parameter of shape {shape} was written by code of the model "
            f"in a forward or a backward; that changed a whole copy, which is thrown away"
        )

    def check_after_error(self) -> None:
        """Raise ConfigError if whole copies that an error has left in the places were written.

        An error in a microbatch leaves none there. `check_writes` does not see `.data`, so bits are
        compared; only after an error. Where shards were written nothing tells of the copies.
        """
        for group in self.groups:
            is_open = _torch.is_whole(group) and not group.is_aside and not group.is_written()
            if is_open and _torch.is_stale(group):
                raise ConfigError(
                    f"unit '{self._name}': parameters were written after an error outside of "
                    f"microbatch(...), which had left whole copies in their places; what was "
                    f"written to these is lost, and what functions over lists (torch._foreach_*), "
                    f"which count no write, have written to shards stays. Write after "
                    f"drop_gradients()"
                )

    def refuse_interrupted(self) -> NoReturn:
        """Raise ConfigError: an error ended a forward or a backward of this unit.

        FSDP2 would not reduce, or not gather, this unit in the steps that follow.
        """
        raise ConfigError(
            f"unit '{self._name}': an error ended its last forward or backward, so its "
            f"gradients are incomplete; after such an error call drop_gradients() of the "
            f"sharded model on all ranks, and repeat the step"
        )

    def is_whole(self) -> tuple[bool, ...]:
        """Return for each group of parameters if whole ones are kept at this moment."""
        return tuple(map(_torch.is_whole, self.groups))

    def has_unreduced(self) -> bool:
        """Return True if gradients of this unit wait for a reduction."""
        return any(map(has_unreduced, self.groups))

    def has_gradients(self) -> bool:
        """Return True if there are gradients of this unit, reduced or not."""
        return any(
            _torch.has_gradient(group, member)
            for group in self.groups
            for member in _torch.members(group)
        )

    def has_unused_gradients(self) -> bool:
        """Return True if the unit has gradients, and no shard was written since they came."""
        pending = [each for each in self._used if _torch.has_reduced_gradient(each)]
        return bool(pending) and all(_torch.version_of(m) == self._used[m] for m in pending)

    @mark_eager
    def _check_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Refuse parameters as outputs: they are freed, and reading them may end the process."""
        del module, args
        freed = _torch.freed_output(output)
        if freed is not None:
            raise ConfigError(
                f"unit '{self._name}' returns a parameter, or a view of one, of shape "
                f"{list(freed.shape)}, whose whole copy is freed at the end of the unit's forward. "
                f"Return a copy (.clone()), or leave this module out of units="
            )

    @mark_eager
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put shards in the places of parameters that are kept, if the unit is called alone."""
        del module, args, output
        if not self._prefetch.is_running:
            _torch.put_aside_if_idle(self.groups)

    @mark_eager
    def _before_gather(self, module: nn.Module, args: Any) -> None:
        """Check whole weights before their first use in a forward."""
        del module, args
        if self.places.changed() is not None:
            self.check_places()
        if [*map(_torch.VERSION, self._wholes)] != self._whole_versions:
            self.check_writes()
        for group in self.groups:
            if group.enter_forward():
                self.check_weights(group)
        self._prefetch.before(self.state)

    @mark_eager
    def _after_gather(self, module: nn.Module, args: Any) -> None:
        """Watch whole parameters; FSDP2 creates them at their first use."""
        del module, args
        if not self._wholes:
            for group in self.groups:
                wholes = _torch.whole_parameters(group)
                self._wholes += wholes
                for member, whole in zip(_torch.members(group), wholes, strict=True):
                    _torch.carry_over(_torch.sharded(member), whole)
                    if member in self._hooks:
                        self._unhooked.append((member, whole))
            self._whole_versions = _torch.versions(self._wholes)
        if self._unhooked:
            self._pass_hooks()
        if not self._unhooked:
            self._after_gathers.remove()  # nothing is left to do

    def _pass_hooks(self) -> None:
        """Have users' hooks called with gradients of whole parameters; frozen ones have none."""
        frozen = []
        for member, whole in self._unhooked:
            if whole.requires_grad:
                _torch.call_hooks(whole, self._hooks[member])
            else:
                frozen.append((member, whole))
        self._unhooked = frozen


def check_hooks(parameter: nn.Parameter, *, where: str) -> None:
    """Raise ConfigError for hooks at a sharded parameter, which autograd never calls."""
    if _torch.hooks_of(parameter) or _torch.has_hooks_after_gradients(parameter):
        raise ConfigError(
            f"{where}: a hook was registered at a parameter of shape {list(parameter.shape)} after "
            f"fully_shard_model; autograd would never call it, because gradients are those of a "
            f"whole copy. Remove it, and call register_hook before fully_shard_model, which has "
            f"it called with the whole gradient of this rank; or read parameter.grad after the "
            f"last backward, which is the reduced shard"
        )

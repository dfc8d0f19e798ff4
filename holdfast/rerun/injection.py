"""Deliberate errors, to try out everything from a bad activation to a verdict.

A real fault is in what a device computes. It shows in a value that is validated, on this rank or,
through a collective or a pipeline, on another one. So an injected error is in an activation;
without modules to spoil, in a value.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from holdfast.arguments import check_choice, check_int
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.values import Value

ErrorKind = Literal["correct_result", "transient_error", "persistent_error"]
"""The verdict that an injected error should get."""
_CAN_BE_NAN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class ErrorInjector:
    """Spoils one element of an activation now and then, as a fault of the given kind would.

    The seed alone decides which step on which coordinate is hit, in which module and element, so a
    rerun or another process hits the same ones. It is the first forward of the module in a run of
    the step. A loop calls nothing: the machine does.

    Args:
        rate: one of `rate` steps of each rank is hit on average; 0 for none.
        kind: "transient_error": bad in the first run only, once. "persistent_error": bad whenever
            the device is the one on which the step was bad first. "correct_result": bad everywhere.
        seed: of the choice.
        modules: of this rank, whose outputs may be spoiled; their hooks must be called, so of a
            compiled model pass what `torch.compile` has returned. Without any, the first value
            that is validated in a run is replaced by NaN, and nothing of the training is spoiled.

    Raises:
        ConfigError: `rate` is not an integer of at least 0, or `kind` is unknown.

    Cost: nothing in a run that is not hit.
    """

    def __init__(
        self,
        rate: int,
        kind: ErrorKind = "transient_error",
        *,
        seed: int = 0,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        """Start without any injected error."""
        self.rate = check_int(rate, name="ErrorInjector: rate", least=0)
        check_choice(kind, name="ErrorInjector: kind", choices=get_args(ErrorKind))
        self.kind = kind
        self.seed = seed
        self.modules = tuple(modules)
        self._devices: dict[str, DeviceIdentity] = {}
        """The device of the first error, by point."""
        self._settled: set[str] = set()
        self._armed: tuple[str, DeviceIdentity] | None = None
        """Point and device of the run that is to be hit, until it is."""
        self._hook: RemovableHandle | None = None

    def is_hit(self, point: str) -> bool:
        """Return True if the seed chooses a point, see `point_of`."""
        return self.rate > 0 and self._draw(point) % self.rate == 0

    def begin_run(
        self, *, step: int, coordinate: str, is_rerun: bool, device: DeviceIdentity
    ) -> None:
        """Prepare the error of a run of a step, if it is to have one.

        Args:
            step: its number.
            coordinate: of the rank whose batches this run computes on.
            is_rerun: True unless the step runs for the first time, in this process and all others.
            device: of this process.
        """
        self.end_run()
        point = point_of(step, coordinate)
        if not self._is_bad(point, step=step, is_rerun=is_rerun, device=device):
            return
        self._armed = point, device
        if self.modules:
            number = self._draw(f"{point}:module") % len(self.modules)
            self._hook = self.modules[number].register_forward_hook(self._spoil)

    def end_run(self) -> None:
        """End the run: nothing is spoiled until the next one begins."""
        self._armed = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def injected(self, value: Value) -> Value:
        """Return a validated value, or NaN in its place if there is no module to spoil."""
        if self._armed is None or self.modules:
            return value
        self._strike()
        return (math.nan,) * len(value) if isinstance(value, tuple) else math.nan

    def leave_out(self, points: Iterable[str]) -> None:
        """Leave points alone from now on: their errors have been judged."""
        self._settled.update(points)

    def state_dict(self) -> dict[str, Any]:
        """Return the injected errors as plain values."""
        return {
            "devices": {point: each.to_dict() for point, each in self._devices.items()},
            "settled": sorted(self._settled),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned; points that are settled here stay settled."""
        self._devices = {
            point: DeviceIdentity.from_dict(each) for point, each in state["devices"].items()
        }
        self._settled |= set(state["settled"])

    def _is_bad(self, point: str, *, step: int, is_rerun: bool, device: DeviceIdentity) -> bool:
        """Return True if a run is to have an error."""
        can_start = point not in self._settled and self.is_hit(point)
        if self.kind == "correct_result":
            return can_start
        if can_start and not is_rerun and point not in self._devices:
            return True
        if self.kind == "transient_error":
            return False
        # A broken device is broken for the batches of other ranks, too.
        return any(
            first.is_same(device)
            for each, first in self._devices.items()
            if each.startswith(point_of(step, "")) and each not in self._settled
        )

    def _spoil(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """Return the spoiled output of a module: a forward hook."""
        del module, inputs
        if self._armed is None:
            return None
        point, _ = self._armed
        spoiled = _spoiled(output, number=self._draw(f"{point}:element"))
        if spoiled is not None:
            self._strike()
        return spoiled

    def _strike(self) -> None:
        """Note that the run has had its error."""
        assert self._armed is not None
        point, device = self._armed
        self._devices.setdefault(point, device)
        self._armed = None

    def _draw(self, text: str) -> int:
        """Return a number that only the seed and a text decide."""
        digest = hashlib.blake2b(f"{self.seed}:{text}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def point_of(step: int, coordinate: str) -> str:
    """Return the name of one step on one rank."""
    return f"{step}:{coordinate}"


def _spoiled(output: Any, *, number: int) -> Any | None:
    """Return a copy of an output with NaN in its first floating-point tensor.

    None if it has none. Gradients flow through it as through the output.
    """
    if isinstance(output, torch.Tensor):
        return _spoiled_tensor(output, number=number)
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        members = output.items()
    elif isinstance(output, tuple | list):
        members = enumerate(output)
    for key, member in members:
        spoiled = _spoiled(member, number=number)
        if spoiled is not None:
            return _with_member(output, key, spoiled)
    return None


def _with_member(output: Any, key: Any, member: object) -> Any:
    """Return a copy of a container with another member in the place of one."""
    if not isinstance(output, tuple):
        changed = copy.copy(output)
        changed[key] = member
        return changed
    members = [*output[:key], member, *output[key + 1 :]]
    is_named = hasattr(output, "_fields")
    return type(output)(*members) if is_named else type(output)(members)


def _spoiled_tensor(tensor: torch.Tensor, *, number: int) -> torch.Tensor | None:
    """Return a tensor with NaN in one element that this rank has; None if it has none."""
    if isinstance(tensor, DTensor):
        local = _spoiled_tensor(tensor.to_local(), number=number)
        if local is None:
            return None
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    if tensor.dtype not in _CAN_BE_NAN or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if not tensor.numel():
        return None
    is_spoiled = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    is_spoiled[number % tensor.numel()] = True
    return tensor.masked_fill(is_spoiled.view(tensor.shape), math.nan)

"""Deliberate errors, to try out everything from a rejected value to a verdict."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch

from holdfast.arguments import check_choice, check_int
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.values import Value

ErrorKind = Literal["correct_result", "transient_error", "persistent_error"]
"""The verdict that an injected error should get."""


class ErrorInjector:
    """Replaces a validated value by NaN now and then, as a fault of the given kind would.

    The seed alone decides which call of which step on which coordinate is hit, so a rerun or
    another process hits the same ones. Only the value that is validated changes, never the training
    itself.

    Args:
        rate: one of `rate` validation calls is hit on average; 0 for none.
        kind: "transient_error": bad in the first run only, once. "persistent_error": bad whenever
            the device is the one on which it was bad first. "correct_result": bad everywhere.
        seed: of the choice.

    Raises:
        ConfigError: `rate` is not an integer of at least 0, or `kind` is unknown.
    """

    def __init__(self, rate: int, kind: ErrorKind = "transient_error", *, seed: int = 0) -> None:
        """Start without any injected error."""
        self.rate = check_int(rate, name="ErrorInjector: rate", least=0)
        check_choice(kind, name="ErrorInjector: kind", choices=get_args(ErrorKind))
        self.kind = kind
        self.seed = seed
        self._devices: dict[str, DeviceIdentity] = {}
        self._settled: set[str] = set()

    def is_hit(self, point: str) -> bool:
        """Return True if the seed chooses a point."""
        if self.rate == 0:
            return False
        digest = hashlib.blake2b(f"{self.seed}:{point}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.rate == 0

    def injected(
        self, point: str, *, is_rerun: bool, device: DeviceIdentity, value: Value
    ) -> Value:
        """Return the value, or NaN of the same shape.

        Args:
            point: names the call, the step and the rank's coordinate, see `point_of`.
            is_rerun: True if the step runs again.
            device: of this process.
            value: the value that was computed.
        """
        if point in self._settled or not self.is_hit(point):
            return value
        if self.kind == "transient_error":
            if is_rerun or point in self._devices:
                return value
            self._devices[point] = device
        elif self.kind == "persistent_error":
            first = self._devices.setdefault(point, device)
            if not first.is_same(device):
                return value
        return _bad(value)

    def begin_run(
        self, *, step: int, coordinate: str, is_rerun: bool, device: DeviceIdentity
    ) -> None:
        """A run of a step begins."""
        self.is_rerun = is_rerun

    def end_run(self) -> None:
        """A run of a step ends."""

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


def point_of(step: int, coordinate: str, call: str, occurrence: int) -> str:
    """Return the name of one validation call of one rank in one step."""
    return f"{step}:{coordinate}:{call}:{occurrence}"


def _bad(value: Value) -> Value:
    """Return NaN in the form of a value."""
    if not isinstance(value, torch.Tensor):
        return math.nan
    is_inexact = value.is_floating_point() or value.is_complex()
    dtype = value.dtype if is_inexact else torch.float64
    if value.layout is torch.sparse_coo:
        stored = min(1, value.numel())
        first = torch.zeros((value.sparse_dim(), stored), dtype=torch.int64, device=value.device)
        dense = value.shape[value.sparse_dim() :]
        nan = torch.full((stored, *dense), math.nan, dtype=dtype, device=value.device)
        return torch.sparse_coo_tensor(
            first, nan, value.shape, is_coalesced=True, check_invariants=True
        )
    return value.detach().clone().to(dtype).fill_(math.nan)

"""The device that a process computes on, in a form that two processes can compare."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

DEVICE_VARIABLE = "HOLDFAST_DEVICE"
"""Environment variable that names the device of a process, for hosts that hide its identity."""
_CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """A device that values are computed on.

    Args:
        host: name of the host.
        uuid: of the device, from the driver or from `HOLDFAST_DEVICE`; "cpu" for the processors of
            the host.
    """

    host: str
    uuid: str

    @classmethod
    def of(cls, device: torch.device | None = None) -> DeviceIdentity:
        """Return the identity of a device of this process.

        Args:
            device: default: the current CUDA device if there is one, else the CPU.

        The environment variable `HOLDFAST_DEVICE` overrides it: for virtual machines that hide
        their devices, and to try things out on a single device.
        """
        host = socket.gethostname()
        named = os.environ.get(DEVICE_VARIABLE, "")
        if named:
            return cls(host=host, uuid=named)
        if device is None:
            has_cuda = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else None
        if device is None or device.type != "cuda":
            return cls(host=host, uuid=_CPU if device is None else device.type)
        return cls(host=host, uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}")

    @classmethod
    def from_dict(cls, data: Mapping[str, str]) -> DeviceIdentity:
        """Return the identity that `to_dict` has written."""
        return cls(host=data["host"], uuid=data["uuid"])

    def to_dict(self) -> dict[str, str]:
        """Return host and uuid as plain text, for JSON."""
        return {"host": self.host, "uuid": self.uuid}

    @property
    def key(self) -> str:
        """A text that is equal for two identities exactly if they are of one device.

        A uuid identifies a device whatever the host is called: containers change the names of
        hosts. "cpu" is not such a uuid, so processors are the same only if their hosts are.
        """
        return f"{self.host}: {self.uuid}" if self.uuid == _CPU else self.uuid

    def is_same(self, other: DeviceIdentity) -> bool:
        """Return True if both are one device."""
        return self.key == other.key

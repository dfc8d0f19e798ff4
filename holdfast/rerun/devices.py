"""The device that a process computes on, in a form that two processes can compare."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.arguments import check_instance
from holdfast.errors import ConfigError
from holdfast.format.rerun_report import device_key

DEVICE_VARIABLE = "HOLDFAST_DEVICE"
"""Environment variable that names the device of a process, for hosts that hide its identity."""
_MASKS = {"xpu": "ZE_AFFINITY_MASK", "hpu": "HABANA_VISIBLE_MODULES"}
"""Environment variables that renumber the devices of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """A device that values are computed on.

    Args:
        host: name of the host.
        uuid: of the device, from the driver or from `HOLDFAST_DEVICE`. Accelerators other than CUDA
            devices have their index on the host ("xpu:0"), and "cpu" is all processors of the host.
    """

    host: str
    uuid: str

    @classmethod
    def of(cls, device: torch.device | DeviceIdentity | None = None) -> DeviceIdentity:
        """Return the identity of a device of this process.

        Args:
            device: default: the current device of the accelerator if there is one, else the CPU.
                An identity is returned as it is.

        The environment variable `HOLDFAST_DEVICE` overrides it: for virtual machines that hide
        their devices, and to try things out on a single device. A list ("A,B") has a name for each
        process of the host, by the `LOCAL_RANK` that launchers set.

        Raises:
            ConfigError: such a list has no name for this process, or `device` is something else.
        """
        if isinstance(device, DeviceIdentity):
            return device
        if device is not None:
            check_instance(device, name="device", kind=torch.device)
        host = socket.gethostname()
        named = _name_of_process(os.environ.get(DEVICE_VARIABLE, ""))
        if named:
            return cls(host=host, uuid=named)
        device = device or _current_device()
        if device.type == "cpu":
            return cls(host=host, uuid="cpu")
        if device.type == "cuda":
            return cls(host=host, uuid=f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return cls(host=host, uuid=f"{device.type}:{_index_on_host(device)}")

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
        hosts. "cpu" and an index are not such a uuid, so these are the same only on one host.
        """
        return device_key(self.host, self.uuid)

    def is_same(self, other: DeviceIdentity) -> bool:
        """Return True if both are one device, see `key`."""
        return self.key == other.key


def _name_of_process(named: str) -> str:
    """Return the name of this process's device in `HOLDFAST_DEVICE`; empty if that is not set."""
    names = [each.strip() for each in named.split(",")]
    if len(names) == 1:
        return named
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not local_rank.isdecimal() or int(local_rank) >= len(names) or not names[int(local_rank)]:
        raise ConfigError(
            f"{DEVICE_VARIABLE}={named} has no device for LOCAL_RANK={local_rank!r}: give one name "
            f"for each process of the host, or one for all of them"
        )
    return names[int(local_rank)]


def _current_device() -> torch.device:
    """Return the current device of the accelerator of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    # Backends of other packages register themselves there, whatever they are called.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type)


def _index_on_host(device: torch.device) -> str:
    """Return the number that the host has for a device, also if this process sees a part of them.

    A launcher may give each process one device, which is then number 0 in each of them.
    """
    index = _current_index() if device.index is None else device.index
    seen = [each.strip() for each in os.environ.get(_MASKS.get(device.type, ""), "").split(",")]
    return seen[index] if index < len(seen) and seen[index] else str(index)


def _current_index() -> int:
    """Return the index of the current device of the accelerator; 0 without one."""
    accelerator = torch.accelerator
    if not accelerator.is_available():
        return 0
    # torch 2.6 has another name for it.
    current = getattr(accelerator, "current_device_index", None) or accelerator.current_device_idx
    return int(current())

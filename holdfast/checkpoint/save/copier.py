"""Copying from devices into staging memory: one copier per device, behind one small protocol.

A copier orders itself after what the caller has enqueued, enqueues copies that run on their own,
and in the end holds the caller until its bytes are in place.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context of the process


class Mark(Protocol):
    """A point in a copier's work; a `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything before it is in place."""

    def synchronize(self) -> None:
        """Return when everything before it is in place."""


class Copier(Protocol):
    """Copies tensors of one device into host memory. Used by one thread."""

    def begin(self) -> None:
        """Order the copies that follow after everything the caller has enqueued so far."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Enqueue copies of equal shapes and dtypes; the mark is behind them."""

    def finish(self) -> None:
        """Return when every copy is in place; what the caller enqueues next comes after them."""


class _Done:
    """The mark of a copier that has copied when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class HostCopier:
    """Copies in the calling thread: one `torch._foreach_copy_`, in place when it returns."""

    def begin(self) -> None:
        """Nothing to wait for."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Copy now."""
        torch._foreach_copy_(list(targets), list(sources))
        return _Done()

    def finish(self) -> None:
        """Nothing is under way."""


class CudaCopier:
    """Copies from one CUDA device on a stream of its own.

    The side stream waits for the caller's current stream, so that the copies see what was computed
    before; `finish` lets the caller's stream wait for them and then holds the calling thread until
    they are done. Holding the thread is the safe choice: afterwards every stream and the host may
    change or free the sources. Returning at once would spare the host the length of the copies,
    but only streams that were told to wait would be held from overwriting what is still being
    read. Sources need no `record_stream`: the caller has them until `finish` returns.

    Cost: strided sources take a contiguous copy on the device, one after another.
    `cuda`: the module `torch.cuda`, or what stands in for it.
    """

    def __init__(self, device: torch.device, *, cuda: Any = None) -> None:
        self._device = device
        self._cuda = torch.cuda if cuda is None else cuda
        self._stream = self._cuda.Stream(device=device)

    def begin(self) -> None:
        """The side stream waits for the caller's current stream."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Enqueue on the side stream; asynchronous where the targets are page-locked."""
        with self._cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            event: Mark = self._stream.record_event()
        return event

    def finish(self) -> None:
        """The caller's stream waits for the side stream, then the caller does."""
        self._cuda.current_stream(self._device).wait_stream(self._stream)
        self._stream.synchronize()


def make_copier(device: torch.device) -> Copier:
    """The copier for a device; one that is neither CUDA nor host is copied from by the caller."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class Copiers:
    """The copiers of one checkpointer, each made when its device is first met."""

    def __init__(self, make: Callable[[torch.device], Copier] = make_copier) -> None:
        self._make = make
        self._made: dict[torch.device, Copier] = {}

    def of(self, device: torch.device) -> Copier:
        """The copier of a device, always the same one."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]


class PageLock(Protocol):
    """Keeps host memory from being moved, so that a device can copy into it by itself."""

    def lock(self, address: int, nbytes: int) -> str:
        """Page-lock memory; empty if that was done, else why it was refused."""

    def unlock(self, address: int) -> None:
        """Undo `lock`; needed before the memory is unmapped."""


class CudaPageLock:
    """`cudaHostRegister`, which works on memory files, too. `cuda`: as for `CudaCopier`."""

    def __init__(self, *, cuda: Any = None) -> None:
        self._cuda: types.ModuleType | Any = torch.cuda if cuda is None else cuda

    def lock(self, address: int, nbytes: int) -> str:
        """See `PageLock.lock`; pages that were never touched are taken now."""
        runtime = self._cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(code) == 0:
            return ""
        # The runtime remembers its last error and would report it at the next kernel's launch.
        with suppress(RuntimeError):
            self._cuda.synchronize()
            torch.zeros(1, device="cuda")
        return f"{runtime.cudaGetErrorString(code)} (error {int(code)})"

    def unlock(self, address: int) -> None:
        """See `PageLock.unlock`; a runtime that is shut down already is let be."""
        with suppress(RuntimeError):
            self._cuda.cudart().cudaHostUnregister(address)

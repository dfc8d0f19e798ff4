"""Where loaded bytes go: host memory directly, anything else through a host copy of one box."""

from __future__ import annotations

import threading

import numpy as np
import torch

from holdfast.checkpoint.load.transfers import Part
from holdfast.checkpoint.save.staging import tensor_bytes
from holdfast.format.blocks import element_of


class Target:
    """One box of one tensor that a load fills, from pieces that arrive in any order.

    Contiguous host memory of the stored dtype is written in place. Anything else (another device,
    strides, a dtype to convert to) gets a host buffer with the first piece and is copied to, and
    the buffer given back, with the last. Pieces may come from several threads; no byte twice.
    """

    __slots__ = ("_left", "_lock", "_stored", "_tensor", "_view", "is_direct", "is_touched", "path")

    def __init__(self, tensor: torch.Tensor, *, path: str, stored: torch.dtype) -> None:
        self.path = path
        self.is_touched = False
        self._tensor = tensor
        self._stored = stored
        self._view: memoryview | None = None
        self._left = 0
        self.is_direct = (
            tensor.is_cpu
            and tensor.dtype == stored
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )
        if not self.is_direct:
            self._left = tensor.numel() * stored.itemsize
            self._lock = threading.Lock()

    def region(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the box to write to; call `done` with their number after it."""
        view = self._view
        if view is None:
            view = self._open()
        self.is_touched = True
        return view[start:stop]

    def done(self, nbytes: int) -> None:
        """So many bytes of a target that is not direct have been written."""
        if self.is_direct:
            return
        with self._lock:
            self._left -= nbytes
            if self._left:
                return
        self._finish()

    def put(self, start: int, data: memoryview) -> None:
        """Write a run of bytes at byte `start` of the box."""
        self.region(start, start + len(data))[:] = data
        if not self.is_direct:
            self.done(len(data))

    def put_part(self, part: Part, values: np.ndarray, itemsize: int) -> None:
        """Write the elements of a part, an array of its shape as `element_of` makes it."""
        element, tail = element_of(itemsize)
        view = self._view if self._view is not None else self._open()
        self.is_touched = True
        shape = tuple(self._tensor.shape)
        shape += (1,) * (len(part.target) - len(shape))
        np.frombuffer(view, dtype=element).reshape(shape + tail)[part.target] = values
        self.done(values.nbytes)

    def _open(self) -> memoryview:
        if self.is_direct:
            self._view = tensor_bytes(self._tensor)
            return self._view
        with self._lock:
            if self._view is None:
                nbytes = self._tensor.numel() * self._stored.itemsize
                self._view = memoryview(bytearray(nbytes))
            return self._view

    @torch.no_grad()
    def _finish(self) -> None:
        if self._view is None:
            return
        host = torch.frombuffer(self._view, dtype=self._stored).view(self._tensor.shape)
        self._tensor.copy_(host)
        self._view = None

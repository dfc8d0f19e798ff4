"""Where loaded bytes go: host memory directly, anything else through a host copy of one box."""

from __future__ import annotations

import threading

import torch

from holdfast.arrays.types import AnyArray
from holdfast.checkpoint.save.staging import tensor_bytes
from holdfast.format.byte_ranges import StridedCopy, elements


class Target:
    """One box of one tensor that a load fills, from pieces that arrive in any order.

    Contiguous host memory of the stored dtype is written in place. Anything else (another device,
    strides, a dtype to convert to) gets a host buffer with the first piece; with the last one the
    buffer is copied to the tensor and freed. Several threads may write, each byte once.

    Args:
        tensor: What to fill.
        path: Its path in the state, for messages.
        stored: The dtype in the checkpoint.

    Cost: a host buffer of the box's stored bytes where it cannot be written in place.
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
        # Direct targets need no count of what is left: a load has many, and each lock costs.
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
        """So many bytes have been written to a region; the last ones fill the tensor."""
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

    def put_strided(self, copy: StridedCopy, values: AnyArray, itemsize: int) -> None:
        """Write `values`, an array of the copy's extent as `elements` makes it, to their place."""
        view = self._view if self._view is not None else self._open()
        self.is_touched = True
        # Overlaps have the index's dims, which a tensor may have fewer of.
        shape = tuple(self._tensor.shape)
        shape += (1,) * (len(copy.target) - len(shape))
        elements(view, 0, shape, itemsize)[copy.target] = values
        self.done(values.nbytes)

    def _open(self) -> memoryview:
        if self.is_direct:
            # Two threads may do this at once: both views are of the same memory.
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

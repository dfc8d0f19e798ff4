"""The targets of a load, and how they are filled.

One target requested twice for one stored tensor (a tie) is filled once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import AnyArray, IntArray
from holdfast.format.byte_ranges import StridedCopy, elements
from holdfast.format.manifest import TensorInfo
from holdfast.state.matcher import LocalMemory, TensorRequest
from holdfast.state.tensor_elements import TORCH_TO_NAME, torch_dtype


class Target:
    """One box of one tensor that a load fills, from pieces that arrive in any order.

    Contiguous host memory of the stored dtype is written in place. Anything else (another device,
    strides, a dtype to convert to) gets a host buffer with the first piece; with the last one the
    buffer is copied to the tensor and freed. Several threads may write, each byte once.

    Args:
        tensor: What to fill.
        path: Its path in the state, for messages.
        stored: Name of the dtype in the checkpoint.

    Cost: a host buffer of the box's stored bytes if it cannot be written in place.
    """

    __slots__ = ("_left", "_lock", "_stored", "_tensor", "_view", "is_direct", "is_touched", "path")

    def __init__(self, tensor: torch.Tensor, *, path: str, stored: str) -> None:
        self.path = path
        self.is_touched = False
        self._tensor = tensor
        self._view: memoryview | None = None
        self._left = 0
        self.is_direct = (
            tensor.is_cpu
            and TORCH_TO_NAME.get(tensor.dtype) == stored
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )
        # Direct targets need no count of what is left: a load has many, and each lock costs.
        if not self.is_direct:
            self._stored = torch_dtype(stored)
            self._left = tensor.numel() * self._stored.itemsize
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
        """The memory that pieces are written to."""
        if self.is_direct:
            # Two threads may do this at once: both views are of the same memory.
            nbytes = self._tensor.numel() * self._tensor.element_size()
            self._view = memory_at(self._tensor.data_ptr(), nbytes)
            return self._view
        with self._lock:
            if self._view is None:
                nbytes = self._tensor.numel() * self._stored.itemsize
                self._view = memoryview(bytearray(nbytes))
            return self._view

    def _finish(self) -> None:
        """Copy the buffer, which is full, to the tensor."""
        if self._view is None:
            return
        host = torch.frombuffer(self._view, dtype=self._stored).view(self._tensor.shape)
        # The mode is each thread's own, and only inside of it an inference tensor can be written.
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            self._tensor.copy_(host)
        self._view = None


def memory_at(address: int, nbytes: int) -> memoryview:
    """Memory of this process, which the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def make_targets(
    requests: Sequence[TensorRequest],
    memory: LocalMemory,
    numbers: IntArray,
    stored: Sequence[TensorInfo],
) -> dict[int, list[Target]]:
    """Return what to fill with each requested box, by its number.

    Args:
        requests: Of this rank.
        memory: Their local tensors.
        numbers: (n,) of the box of each local tensor; -1 for those that need no target.
        stored: The tensors of the checkpoint.
    """
    targets: dict[int, list[Target]] = {}
    for i in np.flatnonzero(numbers >= 0).tolist():
        request = requests[int(memory.request[i])]
        target = Target(memory.tensors[i], path=request.path, stored=stored[request.tensor].dtype)
        targets.setdefault(int(numbers[i]), []).append(target)
    return targets


def without_ties(requests: Sequence[TensorRequest]) -> list[TensorRequest]:
    """The requests with each target filled once, however often it is requested.

    A target is the same if memory, shape, strides, dtype, stored tensor and box are: `.data` ties
    and fresh views. (An object that is met twice has been left out by the matcher.)
    """
    # Hardly a state has ties: without them distinct addresses are all there is to check.
    addresses = [local.data_ptr() for entry in requests for local in entry.locals]
    if len(set(addresses)) == len(addresses):
        return list(requests)
    seen: set[object] = set()
    kept: list[TensorRequest] = []
    for entry in requests:
        if entry.is_fresh or not entry.locals:
            kept.append(entry)
            continue
        boxes = entry.boxes or [
            Box((0,) * local.ndim, tuple(local.shape)) for local in entry.locals
        ]
        new = []
        for i, (box, local) in enumerate(zip(boxes, entry.locals, strict=True)):
            name = (entry.tensor, box, local.device, local.data_ptr(), local.shape, local.stride(),
                    local.dtype, local.is_conj(), local.is_neg())  # fmt: skip
            if local.numel() == 0 or name not in seen:
                new.append(i)
                seen.add(name)
        if len(new) == len(entry.locals):
            kept.append(entry)
            continue
        kept.append(
            entry._replace(
                boxes=tuple(boxes[i] for i in new),
                locals=tuple(entry.locals[i] for i in new),
            )
        )
    return kept

"""The targets of a load, and how they are filled.

One target requested twice for one stored tensor (a tie) is filled once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.arrays.boxes import Box, flat_range_boxes
from holdfast.arrays.memory import memory_at
from holdfast.arrays.types import AnyArray, BoolArray, IntArray
from holdfast.format.byte_ranges import StridedCopy, elements
from holdfast.format.manifest import TensorInfo
from holdfast.state.matcher import LocalMemory, TensorRequest
from holdfast.state.tensor_elements import TORCH_TO_NAME, torch_dtype


class Target:
    """One box of one tensor that a load fills, from pieces that arrive in any order.

    Contiguous host memory of the stored dtype is written in place, byte by byte. Anything else
    (another device, strides, a dtype to convert to) is written by torch, piece by piece, from the
    buffer that a piece was read to: that is in the cache, and memory of the size of the tensor
    would be new to the kernel, which costs more than the copy. Only what arrives in many small
    pieces is gathered in a buffer of its own, because each copy by torch, or to a device, costs as
    much as some ten KiB do. Several threads may write, each byte once.

    Args:
        tensor: What to fill.
        path: Its path in the state, for messages.
        stored: Name of the dtype in the checkpoint.
        is_gathered: Whether its pieces are small; of no account if it can be written in place.

    Cost: a host buffer of the box's stored bytes if it is gathered.
    """

    __slots__ = (
        "_is_gathered", "_left", "_lock", "_stored", "_tensor", "_view", "is_direct", "is_touched",
        "path",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, *, path: str, stored: str, is_gathered: bool = False
    ) -> None:
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
        self._is_gathered = is_gathered and not self.is_direct
        if not self.is_direct:
            self._stored = torch_dtype(stored)
        # Others need no count of what is left: a load has many, and each lock costs.
        if self._is_gathered:
            self._left = tensor.numel() * self._stored.itemsize
            self._lock = threading.Lock()

    def region(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the box to write to, if it is direct."""
        view = self._view
        if view is None:
            view = self._open()
        self.is_touched = True
        return view[start:stop]

    def put(self, start: int, data: memoryview) -> None:
        """Write a run of bytes at byte `start` of the box."""
        if not self.is_direct and not self._is_gathered:
            self._copy_run(start, data)
            return
        self.region(start, start + len(data))[:] = data
        if self._is_gathered:
            self._count(len(data))

    def put_strided(self, copy: StridedCopy, values: AnyArray, itemsize: int) -> None:
        """Write `values`, an array of the copy's extent as `elements` makes it, to their place."""
        # Overlaps have the index's dims, which a tensor may have fewer of.
        shape = tuple(self._tensor.shape)
        ndim = len(shape)
        shape += (1,) * (len(copy.target) - ndim)
        if not self.is_direct and not self._is_gathered:
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            self._copy_boxes(data, shape[:ndim], [(copy.target[:ndim], copy.extent[:ndim])])
            return
        view = self._view if self._view is not None else self._open()
        self.is_touched = True
        elements(view, 0, shape, itemsize)[copy.target] = values
        if self._is_gathered:
            self._count(values.nbytes)

    def _open(self) -> memoryview:
        """The memory that bytes are written to."""
        if self.is_direct:
            # Two threads may do this at once: both views are of the same memory.
            nbytes = self._tensor.numel() * self._tensor.element_size()
            self._view = memory_at(self._tensor.data_ptr(), nbytes)
            return self._view
        with self._lock:
            if self._view is None:
                nbytes = self._tensor.numel() * self._stored.itemsize
                self._view = np.empty(nbytes, dtype=np.uint8).data
            return self._view

    def _count(self, nbytes: int) -> None:
        """So many bytes have been gathered; with the last ones the buffer goes to the tensor."""
        with self._lock:
            self._left -= nbytes
            if self._left:
                return
        if self._view is not None:
            self._copy_run(0, self._view)
            self._view = None

    def _copy_run(self, start: int, data: memoryview) -> None:
        """Have torch write a run of bytes of the box."""
        size, tensor = self._stored.itemsize, self._tensor
        # Contiguous memory has no rows: one copy in place of up to three.
        shape = (tensor.numel(),) if tensor.is_contiguous() else tuple(tensor.shape)
        origin = (0,) * len(shape)
        boxes = flat_range_boxes(shape, start // size, (start + len(data)) // size)
        self._copy_boxes(data, shape, [(box.relative_to(origin), box.shape) for box in boxes])

    def _copy_boxes(
        self,
        data: memoryview,
        shape: tuple[int, ...],
        boxes: Sequence[tuple[tuple[slice, ...], tuple[int, ...]]],
    ) -> None:
        """Have torch write elements to boxes of the tensor, one box after another.

        Args:
            data: The elements.
            shape: That of the tensor in which the boxes are.
            boxes: Place and shape of each.
        """
        self.is_touched = True
        host = torch.frombuffer(data, dtype=self._stored)
        # The mode is each thread's own, and only inside of it an inference tensor can be written.
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            target, at = self._tensor.view(shape), 0
            for place, extent in boxes:
                numel = math.prod(extent)
                target[place].copy_(host[at : at + numel].view(extent))
                at += numel


def takes_as_it_is(targets: Sequence[Target]) -> bool:
    """Return True if a run of bytes can be read or received straight into its only target."""
    return len(targets) == 1 and targets[0].is_direct


def make_targets(
    requests: Sequence[TensorRequest],
    memory: LocalMemory,
    numbers: IntArray,
    stored: Sequence[TensorInfo],
    *,
    is_gathered: BoolArray,
) -> dict[int, list[Target]]:
    """Return what to fill with each requested box, by its number.

    Args:
        requests: Of this rank.
        memory: Their local tensors.
        numbers: (n,) of the box of each local tensor; -1 for those that need no target.
        stored: The tensors of the checkpoint.
        is_gathered: (boxes,) whether the pieces of each box are small.
    """
    targets: dict[int, list[Target]] = {}
    for i in np.flatnonzero(numbers >= 0).tolist():
        request, number = requests[int(memory.request[i])], int(numbers[i])
        target = Target(
            memory.tensors[i],
            path=request.path,
            stored=stored[request.tensor].dtype,
            is_gathered=bool(is_gathered[number]),
        )
        targets.setdefault(number, []).append(target)
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

"""The targets of a load: how they are filled, and which share memory, before a byte is written.

Two stored tensors loaded into one memory would overwrite each other: the later one would stay, and
the report would call both loaded. One target requested twice for one stored tensor (a tie) is
filled once.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import AnyArray, IntArray
from holdfast.format.byte_ranges import StridedCopy, elements
from holdfast.state.matcher import TensorRequest
from holdfast.state.tensor_elements import TORCH_TO_NAME, torch_dtype

_MAX_RUNS = 1 << 22
"""Up to so many contiguous runs of strided targets are compared one by one, beyond it by a map."""


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
    requests: Sequence[TensorRequest], numbers: Sequence[int], stored: Sequence[str]
) -> dict[int, list[Target]]:
    """Return what to fill with each requested box, by its number.

    Args:
        requests: Of this rank.
        numbers: Of the box of each local tensor of the requests, in order; -1 for those that need
            no target.
        stored: Dtype name of each tensor of the checkpoint.
    """
    targets: dict[int, list[Target]] = {}
    number = iter(numbers)
    for request in requests:
        for local in request.locals:
            box = next(number)
            if box >= 0:
                target = Target(local, path=request.path, stored=stored[request.tensor])
                targets.setdefault(box, []).append(target)
    return targets


_Owned = tuple[int, torch.Tensor]
"""A local tensor and the position of its request."""


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


def shared_memory(requests: Sequence[TensorRequest]) -> list[str]:
    """A sentence for each pair of targets with bytes in common, and for each expanded one.

    Exact for any strides.

    Args:
        requests: As `without_ties` returns them.

    Cost: a sort of the targets' byte ranges; if ranges of strided targets overlap, another one
    of their contiguous runs, and beyond some millions of these one byte for each element between
    the first and the last.
    """
    sentences: list[str] = []
    by_device: dict[torch.device, list[_Owned]] = {}
    for number, entry in enumerate(requests):
        if entry.is_fresh:
            continue
        for local in entry.locals:
            if local.numel() == 0:
                continue
            if not local.is_contiguous() and any(
                step == 0 and size > 1
                for step, size in zip(local.stride(), local.shape, strict=True)
            ):
                sentences.append(_message_of_one(entry.path))
                continue
            by_device.setdefault(local.device, []).append((number, local))
    for owned in by_device.values():
        for one, other in _overlapping([tensor for _, tensor in owned]):
            first, second = sorted((owned[one][0], owned[other][0]))
            sentences.append(
                _message_of_one(requests[first].path)
                if first == second
                else _message_of_two(requests[first], requests[second])
            )
    return sentences


def _message_of_one(path: str) -> str:
    """The sentence for a tensor whose elements share memory."""
    return (
        f"{path}: several elements of the state's tensor share memory (an expanded or overlapping "
        f"view), so that no load can fill them; give it its own memory with .clone()"
    )


def _message_of_two(one: TensorRequest, other: TensorRequest) -> str:
    """The sentence for two tensors that share memory."""
    return (
        f"{one.path} and {other.path}: the state's tensors share memory, and the checkpoint has a "
        f"tensor for each, so that one would overwrite the other; give one of them memory of its "
        f"own, or ask for one alone"
    )


def _overlapping(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Pairs of positions, at least one for each set of tensors with common bytes.

    Example, contiguous tensors by bytes:

        position    bytes       reach before    cluster
        0           [0, 40)     -               0
        1           [32, 48)    40              0: begins before 40, so 0 and 1 overlap
        2           [48, 64)    48              1: alone
        3           [80, 96)    64              2: alone
        4           [96, 99)    96              3: alone
    """
    start = np.array([each.data_ptr() for each in tensors], dtype=np.int64)
    stop = start + np.array([_span(each) for each in tensors], dtype=np.int64)
    # `reach` is where everything up to a tensor ends, by first byte: one pass finds neighbours.
    order = np.lexsort((stop, start))
    reach = np.maximum.accumulate(stop[order])
    # A cluster starts where everything before has ended; within one, ranges overlap.
    first = np.flatnonzero(np.concatenate([[True], start[order][1:] >= reach[:-1]]))
    sizes = np.diff(first, append=len(order))
    strided = np.array([not each.is_contiguous() for each in tensors], dtype=np.bool_)[order]
    pairs: list[tuple[int, int]] = []
    # Nearly all targets are contiguous and alone: only the other clusters are looked at.
    for cluster in np.flatnonzero((sizes > 1) | np.logical_or.reduceat(strided, first)).tolist():
        members = order[first[cluster] : first[cluster] + sizes[cluster]]
        if strided[first[cluster] : first[cluster] + sizes[cluster]].any():
            # Byte ranges may overlap although elements do not: two columns of one matrix, say.
            pair = _common_bytes([tensors[i] for i in members.tolist()])
        else:
            ends = np.maximum.accumulate(stop[members])[:-1]
            second = int(np.flatnonzero(start[members[1:]] < ends)[0]) + 1
            pair = (int(np.argmax(stop[members[:second]])), second)
        if pair is not None:
            pairs.append((int(members[pair[0]]), int(members[pair[1]])))
    return pairs


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element past the last."""
    size = tensor.element_size()
    if tensor.is_contiguous():
        return tensor.numel() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * size


def _common_bytes(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return two tensors (or one, twice) that have a byte in common; None if no two have."""
    runs = [_runs_of(each) for each in tensors]
    if sum(math.prod(n for n, _ in outer) for _, outer in runs) > _MAX_RUNS:
        return _common_bytes_by_map(tensors)
    # Every contiguous run of every tensor, as (start, length, tensor): sorted, two neighbours meet
    # if any two do.
    starts, lengths, owners = [], [], []
    for owner, (tensor, (nbytes, outer)) in enumerate(zip(tensors, runs, strict=True)):
        first: IntArray = np.array([tensor.data_ptr()], dtype=np.int64)
        for count, step in outer:
            first = (first[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
        starts.append(first)
        lengths.append(np.full(len(first), nbytes, dtype=np.int64))
        owners.append(np.full(len(first), owner, dtype=np.int64))
    start, owner_of = np.concatenate(starts), np.concatenate(owners)
    order = np.argsort(start, kind="stable")
    start, owner_of = start[order], owner_of[order]
    stop = start + np.concatenate(lengths)[order]
    reach = np.maximum.accumulate(stop)
    bad = np.flatnonzero(start[1:] < reach[:-1])
    if len(bad) == 0:
        return None
    second = int(bad[0]) + 1
    first_run = int(np.argmax(stop[:second]))
    return int(owner_of[first_run]), int(owner_of[second])


def _runs_of(tensor: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of a contiguous run, and (count, step in bytes) of each dim over the runs."""
    size = tensor.element_size()
    dims = sorted(
        (step * size, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    nbytes = size
    outer: list[tuple[int, int]] = []
    for step, n in dims:
        # Dims from the smallest step on join the run as long as there is no gap.
        if step == nbytes and not outer:
            nbytes *= n
        else:
            outer.append((n, step))
    return nbytes, outer


def _common_bytes_by_map(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Like `_common_bytes`, with a map of the memory between the first and the last element.

    Its memory is one byte for each unit that all addresses and sizes are multiples of.
    """
    base = min(each.data_ptr() for each in tensors)
    end = max(each.data_ptr() + _span(each) for each in tensors)
    unit = math.gcd(
        *(each.element_size() for each in tensors),
        *(each.data_ptr() - base for each in tensors),
    )
    taken = torch.zeros((end - base) // unit, dtype=torch.uint8)
    views: list[torch.Tensor] = []
    num_taken = 0
    for number, tensor in enumerate(tensors):
        per = tensor.element_size() // unit
        view = taken.as_strided(
            (*tensor.shape, per),
            (*(step * per for step in tensor.stride()), 1),
            (tensor.data_ptr() - base) // unit,
        )
        if view.any():
            # Some earlier one has marked it; which one is found by marking each alone.
            return next(i for i, other in enumerate(views) if _meet(other, view, taken)), number
        view.fill_(1)
        num_taken += view.numel()
        views.append(view)
        if not tensor.is_contiguous() and int(taken.sum(dtype=torch.int64)) != num_taken:
            return number, number  # fewer bytes are marked than its elements have
    return None


def _meet(one: torch.Tensor, other: torch.Tensor, taken: torch.Tensor) -> bool:
    """Return True if two views of the map have an element in common; clear the map."""
    taken.zero_()
    one.fill_(1)
    return bool(other.any())

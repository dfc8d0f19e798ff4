"""Which tensors of a state share memory, of those that a load fills in place.

Two stored tensors loaded into one memory would overwrite each other: the later one would stay, and
the report would call both loaded. So a load refuses such targets before a byte is written, and a
save refuses what such a load would be of.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from holdfast.arrays.boxes import strided_span
from holdfast.arrays.types import IntArray
from holdfast.state.matcher import LocalMemory, TensorRequest

_MAX_RUNS = 1 << 22
"""Up to so many contiguous runs of strided targets are compared one by one, beyond it by a map."""
_MAX_ASKED = 4096
"""Of more tensors it takes longer to ask each for its storage than to read all mappings."""
_MAPS = Path("/proc/self/maps")
_SHARED_FILE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S{3}s ([0-9a-f]+) (\S+) ([1-9]\d*)", re.MULTILINE
)
"""A line of it about a shared mapping of a file: addresses, offset, device, inode."""

_Owned = tuple[int, torch.Tensor]
"""A local tensor and the position of its request."""


class _Mapping(NamedTuple):
    """A range of addresses at which a file is mapped, so that writes to it reach the file."""

    start: int
    stop: int
    file: tuple[bytes, bytes]
    offset: int

    @property
    def file_stop(self) -> int:
        """Byte of the file past the mapping."""
        return self.offset + self.stop - self.start


def files_mapped_twice() -> list[_Mapping]:
    """Return by address where bytes of a file are mapped more than once; Linux alone tells.

    Cost: reads one line for each mapping of the process.
    """
    try:
        lines = _MAPS.read_bytes()
    except OSError:
        return []
    by_file: dict[tuple[bytes, bytes], list[_Mapping]] = {}
    # A process has a thousand mappings, and nearly all are private.
    for line in _SHARED_FILE.finditer(lines):
        start, stop, offset = (int(line[i], 16) for i in (1, 2, 3))
        file = (line[4], line[5])
        by_file.setdefault(file, []).append(_Mapping(start, stop, file, offset))
    return sorted(each for group in by_file.values() for each in _in_common(group))


def are_of_no_file(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if no two host tensors are mappings of one range of a file; False: they may be.

    Memory that torch has allocated itself can be resized, and is not a mapping of a file that is
    mapped elsewhere, too. What it was given cannot: arrays, files, memory of another process.

    Cost: a fifth of a microsecond a tensor; where that does not tell, `files_mapped_twice`.
    """
    if len(tensors) <= _MAX_ASKED:
        try:
            storages = map(torch.Tensor.untyped_storage, tensors)
            if all(map(torch.UntypedStorage.resizable, storages)):
                return True
        except (NotImplementedError, RuntimeError, TypeError):  # of a tensor without a storage
            pass
    return not files_mapped_twice()


def _in_common(mappings: Sequence[_Mapping]) -> list[_Mapping]:
    """Return those of one file that have a byte of it in common with another one.

    Rings of the kernel are mapped in two parts, which have none.
    """
    shared: set[_Mapping] = set()
    ordered = sorted(mappings, key=lambda each: each.offset)
    longest: _Mapping | None = None
    for each in ordered:
        if longest is not None and each.offset < longest.file_stop:
            shared |= {longest, each}
        if longest is None or each.file_stop > longest.file_stop:
            longest = each
    return [each for each in mappings if each in shared]


def _mapped_in_common(requests: Sequence[TensorRequest]) -> list[str]:
    """Return a sentence for pairs of targets at other addresses that are one range of a file."""
    mappings = files_mapped_twice()
    if not mappings:
        return []
    starts = [each.start for each in mappings]
    ranges: dict[tuple[bytes, bytes], list[tuple[int, int, int, TensorRequest]]] = {}
    for entry in requests:
        for local in entry.locals:
            if not local.is_cpu or not local.numel() or entry.is_fresh:
                continue
            address = local.data_ptr()
            at = bisect_right(starts, address) - 1
            if at >= 0 and address < mappings[at].stop:
                first = address - mappings[at].start + mappings[at].offset
                place = (first, first + span_nbytes(local), mappings[at].start, entry)
                ranges.setdefault(mappings[at].file, []).append(place)
    sentences = []
    for places in ranges.values():
        places.sort(key=lambda place: place[:3])
        last = places[0]
        for place in places[1:]:
            # Those of one mapping have addresses that say it.
            if place[0] < last[1] and place[2] != last[2]:
                sentences.append(
                    f"{last[3].path} and {place[3].path}: the state's tensors are two mappings of "
                    f"one file, and the checkpoint has a tensor for each, so that one would "
                    f"overwrite the other; map the file once, or give one of them memory of its own"
                )
            last = max(last, place, key=lambda each: each[1])
    return sentences


def missing_memory(
    requests: Sequence[TensorRequest], memory: LocalMemory | None = None
) -> list[str]:
    """A sentence for each local tensor of which elements lie outside of its storage.

    Args:
        requests: Of the tensors.
        memory: Theirs, if it is known already.

    A storage that was freed or cut (`untyped_storage().resize_`, with which wrappers free weights
    between two uses) leaves its tensors their shapes: their elements would be whatever lies there.

    Cost: a microsecond for each; a third of it with `memory`.
    """
    if memory is not None and memory.is_whole():
        return []
    return [
        f"{entry.path}: the state's tensor of shape {list(local.shape)} has no memory for its "
        f"elements any more: its storage was freed or cut to {_storage_nbytes(local)} bytes; have "
        f"its owner gather or allocate it before"
        for entry in requests
        if not entry.is_fresh
        for local in entry.locals
        if _lacks_memory(local)
    ]


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor reaches beyond its storage, or has elements and no address."""
    if tensor.numel() == 0 or tensor.is_meta:
        return False
    end = tensor.storage_offset() * tensor.element_size() + span_nbytes(tensor)
    return end > _storage_nbytes(tensor) or tensor.data_ptr() == 0


def _storage_nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def shared_memory(requests: Sequence[TensorRequest]) -> list[str]:
    """A sentence for each pair of targets with bytes in common, and for each expanded one.

    Exact for any strides, also where a file is mapped twice.

    Args:
        requests: As `without_ties` returns them.

    Cost: a sort of the targets' byte ranges; if ranges of strided targets overlap, another one
    of their contiguous runs, and beyond some millions of these one byte for each element between
    the first and the last.
    """
    sentences = _mapped_in_common(requests)
    by_device: dict[torch.device, list[_Owned]] = {}
    for number, entry in enumerate(requests):
        if entry.is_fresh:
            continue
        for local in entry.locals:
            if local.numel() == 0:
                continue
            if is_expanded(local):
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


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return True if all elements along a dim are one."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return False
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return any(step == 0 and size > 1 for step, size in steps)


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
    stop = start + np.array([span_nbytes(each) for each in tensors], dtype=np.int64)
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


def span_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element past the last."""
    size = tensor.element_size()
    if tensor.is_contiguous():
        return tensor.numel() * size
    return strided_span(tensor.shape, tensor.stride()) * size


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
    end = max(each.data_ptr() + span_nbytes(each) for each in tensors)
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

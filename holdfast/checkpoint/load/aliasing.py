"""Targets of a load that share memory: found before any byte is written.

Two stored tensors loaded into one memory would overwrite each other, the one that comes last would
be there, and the report would call both of them loaded. What is one and the same target of one
stored tensor (a tie) is filled once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.arrays.boxes import Box
from holdfast.state.match.result import TensorRequest

_MAX_RUNS = 1 << 22
"""Up to so many contiguous runs of strided targets are compared one by one, beyond it by a map."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Target:
    """One piece of memory to be filled: `entry` is a position in the request."""

    entry: int
    tensor: torch.Tensor
    is_strided: bool


def without_ties(wanted: Sequence[TensorRequest]) -> list[TensorRequest]:
    """The request with each target filled once, however often it asks for it.

    A target is the same if memory, shape, strides, dtype, stored tensor and box are: `.data` ties
    and fresh views, as the same object met again already is.
    """
    places = [local.data_ptr() for entry in wanted for local in entry.locals]
    if len(set(places)) == len(places):
        return list(wanted)
    seen: set[object] = set()
    kept: list[TensorRequest] = []
    for entry in wanted:
        if entry.is_fresh or not entry.locals:
            kept.append(entry)
            continue
        boxes = entry.boxes or [_whole(local) for local in entry.locals]
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


def shared_memory(wanted: Sequence[TensorRequest]) -> list[str]:
    """One sentence for each pair of targets found that have bytes in common, and for each that
    has some of its own twice (an expanded tensor).

    `wanted`: as `without_ties` gives it. Exact for any strides. Cost: a sort of the targets' byte
    ranges; where ranges of strided targets overlap, another one of their contiguous runs, and
    beyond some millions of these one byte for each element between the first and the last.
    """
    sentences: list[str] = []
    by_device: dict[torch.device, list[_Target]] = {}
    for number, entry in enumerate(wanted):
        if entry.is_fresh:
            continue
        for local in entry.locals:
            if local.numel() == 0:
                continue
            is_strided = not local.is_contiguous()
            if is_strided and any(
                step == 0 and size > 1
                for step, size in zip(local.stride(), local.shape, strict=True)
            ):
                sentences.append(_said_of_one(entry.path))
                continue
            by_device.setdefault(local.device, []).append(_Target(number, local, is_strided))
    for targets in by_device.values():
        for one, other in _overlapping(targets):
            first, second = sorted((targets[one].entry, targets[other].entry))
            sentences.append(
                _said_of_one(wanted[first].path)
                if first == second
                else _said_of_two(wanted[first], wanted[second])
            )
    return sentences


def _whole(local: torch.Tensor) -> Box:
    return Box((0,) * local.ndim, tuple(local.shape))


def _said_of_one(path: str) -> str:
    return (
        f"{path}: several elements of the state's tensor share memory (an expanded or overlapping "
        f"view), so that no load can fill them; give it memory of its own with .clone()"
    )


def _said_of_two(one: TensorRequest, other: TensorRequest) -> str:
    return (
        f"{one.path} and {other.path}: the state's tensors share memory, and the checkpoint has a "
        f"tensor for each, so that one would overwrite the other; give one of them memory of its "
        f"own, or ask for one alone"
    )


def _overlapping(targets: Sequence[_Target]) -> list[tuple[int, int]]:
    """Pairs of positions, at least one for each set of targets with common bytes."""
    start = np.array([each.tensor.data_ptr() for each in targets], dtype=np.int64)
    stop = start + np.array([_span(each) for each in targets], dtype=np.int64)
    order = np.lexsort((stop, start))
    reach = np.maximum.accumulate(stop[order])
    # A cluster begins where everything before has ended; within one, ranges overlap.
    first = np.flatnonzero(np.concatenate([[True], start[order][1:] >= reach[:-1]]))
    sizes = np.diff(first, append=len(order))
    strided = np.array([each.is_strided for each in targets], dtype=np.bool_)[order]
    found: list[tuple[int, int]] = []
    # Nearly all targets are contiguous and alone: only the other clusters are looked at.
    for cluster in np.flatnonzero((sizes > 1) | np.logical_or.reduceat(strided, first)).tolist():
        members = order[first[cluster] : first[cluster] + sizes[cluster]]
        inside = [targets[i] for i in members.tolist()]
        if any(each.is_strided for each in inside):
            pair = _exactly(inside)
        else:
            ends = np.maximum.accumulate(stop[members])[:-1]
            second = int(np.flatnonzero(start[members[1:]] < ends)[0]) + 1
            pair = (int(np.argmax(stop[members[:second]])), second)
        if pair is not None:
            found.append((int(members[pair[0]]), int(members[pair[1]])))
    return found


def _span(target: _Target) -> int:
    """Bytes from the first to behind the last element."""
    tensor, size = target.tensor, target.tensor.element_size()
    if not target.is_strided:
        return tensor.numel() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * step for n, step in steps)) * size


def _exactly(targets: Sequence[_Target]) -> tuple[int, int] | None:
    """Two of the targets (or one, twice) that have a byte in common; None where there are none."""
    runs = [_runs_of(each.tensor) for each in targets]
    if sum(math.prod(n for n, _ in outer) for _, outer in runs) > _MAX_RUNS:
        return _by_map(targets)
    starts, lengths, owners = [], [], []
    for owner, (target, (nbytes, outer)) in enumerate(zip(targets, runs, strict=True)):
        first: _Ints = np.array([target.tensor.data_ptr()], dtype=np.int64)
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
        if step == nbytes and not outer:
            nbytes *= n
        else:
            outer.append((n, step))
    return nbytes, outer


def _by_map(targets: Sequence[_Target]) -> tuple[int, int] | None:
    """As `_exactly`, with a map of the memory between the first and the last element."""
    base = min(each.tensor.data_ptr() for each in targets)
    end = max(each.tensor.data_ptr() + _span(each) for each in targets)
    unit = math.gcd(
        *(each.tensor.element_size() for each in targets),
        *(each.tensor.data_ptr() - base for each in targets),
    )
    taken = torch.zeros((end - base) // unit, dtype=torch.uint8)
    views: list[torch.Tensor] = []
    num_taken = 0
    for number, target in enumerate(targets):
        tensor, per = target.tensor, target.tensor.element_size() // unit
        view = taken.as_strided(
            (*tensor.shape, per),
            (*(step * per for step in tensor.stride()), 1),
            (tensor.data_ptr() - base) // unit,
        )
        if view.any():
            return next(i for i, other in enumerate(views) if _meet(other, view, taken)), number
        view.fill_(1)
        num_taken += view.numel()
        views.append(view)
        if target.is_strided and int(taken.sum(dtype=torch.int64)) != num_taken:
            return number, number  # it takes fewer bytes than it has
    return None


def _meet(one: torch.Tensor, other: torch.Tensor, taken: torch.Tensor) -> bool:
    taken.zero_()
    one.fill_(1)
    return bool(other.any())

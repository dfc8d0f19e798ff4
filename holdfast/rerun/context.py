"""What a machine keeps in a checkpoint: one tensor of bytes a rank, of the same key and shape.

bytes of a record
8       magic, "HFRERUN1"
8       bytes of the head, little-endian
8       bytes of the kept data
...     head: msgpack, see `Head`
...     kept data: the suspect values and the batches of the step, see `KeptData`
...     zeros, up to the shape
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.errors import CorruptionError
from holdfast.parallel.layout import Layout
from holdfast.rerun.attempt import Call, Suspect
from holdfast.state.coordinates import PerRankRequest, PerRankSource, parse_label
from holdfast.state.markers import coordinate_label

_MAGIC = b"HFRERUN1"
_PREFIX_NBYTES = len(_MAGIC) + 16
_MIN_CAPACITY = 1 << 16
_MAX_RESERVED_NBYTES = 1 << 22
"""Kept batches beyond this are not reserved for: a fault checkpoint has a larger record then."""


class SuspectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A suspect value, but for the value itself."""

    call: str
    occurrence: int
    why: str
    fatal: bool
    tolerance: float

    @classmethod
    def of(cls, call: Call, suspect: Suspect) -> SuspectRecord:
        """The record of a suspect; `FaultRecord.with_values` is the way back."""
        return cls(
            call=call.name,
            occurrence=call.occurrence,
            why=suspect.why,
            fatal=suspect.fatal,
            tolerance=suspect.tolerance,
        )


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pending fault as one rank knows it.

    Args:
        fault: its id, the same on all ranks.
        step: that was bad.
        rank, coordinate, host, device: of the rank that has written this.
        suspects: the values of this rank that were bad twice.
        has_batches: whether the batches of the step are kept; without, the loop takes none from
            the machine.
    """

    fault: str
    step: int
    rank: int
    coordinate: str
    host: str
    device: str
    suspects: list[SuspectRecord]
    has_batches: bool

    def with_values(self, values: Sequence[Any]) -> dict[Call, Suspect]:
        """The suspects with their values, by call."""
        return {
            Call(each.call, each.occurrence): Suspect(
                value=value, why=each.why, fatal=each.fatal, tolerance=each.tolerance
            )
            for each, value in zip(self.suspects, values, strict=True)
        }


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says besides kept data.

    Args:
        learned: what rules have learned, see `Learned.state_dict`.
        injector: see `ErrorInjector.state_dict`; None without one.
        statistics: see `DeterminismStatistics.state_dict`.
        fault: the pending one.
    """

    learned: dict[str, Any] = {}
    injector: dict[str, Any] | None = None
    statistics: dict[str, Any] = {}
    fault: FaultRecord | None = None


class RecordSlot:
    """The size of a machine's record: chosen by the first save, kept while what is stored fits."""

    def __init__(self) -> None:
        self._capacity = 0

    def fill(self, head: Head, kept: bytes, *, reserve: Callable[[], int]) -> torch.Tensor:
        """The record as a tensor of the slot's size.

        Args:
            head: what it says.
            kept: kept data; empty without a pending fault.
            reserve: the bytes that kept data would need now; called where the size is chosen.
        """
        body = msgspec.msgpack.encode(head)
        used = _PREFIX_NBYTES + len(body) + len(kept)
        if self._capacity < used or not self._capacity:
            requested = reserve()
            reserved = requested if requested <= _MAX_RESERVED_NBYTES else 0
            # The head twice: what rules have learned grows over the first steps.
            needed = max(used, _PREFIX_NBYTES + 2 * len(body) + reserved)
            self._capacity = max(_MIN_CAPACITY, 1 << (needed - 1).bit_length())
        record = np.zeros(self._capacity, dtype=np.uint8)
        lengths = len(body).to_bytes(8, "little") + len(kept).to_bytes(8, "little")
        data = b"".join((_MAGIC, lengths, body, kept))
        record[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return torch.from_numpy(record)


def read_record(record: torch.Tensor) -> tuple[Head, bytes]:
    """Head and kept data of a record.

    Raises:
        CorruptionError: it is none of this form, or of a newer one.
    """
    data = record.contiguous().numpy().tobytes()
    size = int.from_bytes(data[8:16], "little")
    num_kept = int.from_bytes(data[16:24], "little")
    end = _PREFIX_NBYTES + size + num_kept
    if data[:8] != _MAGIC or len(data) < end:
        raise CorruptionError(
            f"the rerun machine's record begins with {data[:8]!r}, which this version does not know"
        )
    try:
        head = msgspec.msgpack.decode(data[_PREFIX_NBYTES : _PREFIX_NBYTES + size], type=Head)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"the rerun machine's record is damaged: {error}") from error
    return head, data[_PREFIX_NBYTES + size : end]


def pick_records(request: PerRankRequest) -> tuple[PerRankSource, bool]:
    """Which records a rank reads, and whether it is its own.

    Under another layout it is one of each pipeline stage.

    Contexts of faults are no use under another layout, but what rules have learned is.
    """
    here = request.here
    if is_of_layout(request.stored, layout=request.layout, axes=request.axes, path=request.path):
        return PerRankSource(labels=(here,), here=here, is_picked=True), True
    first: dict[int, tuple[list[int], str]] = {}
    for label in request.stored:
        at = parse_label(label)
        stage = at.get("pp", 0)
        order = [at[axis] for axis in sorted(at) if axis != "pp"], label
        first[stage] = min(first.get(stage, order), order)
    labels = tuple(label for _, (_, label) in sorted(first.items()))
    return PerRankSource(labels=labels, here=here, is_picked=True), False


def is_of_layout(
    labels: Mapping[str, Any], *, layout: Layout, axes: Sequence[str], path: str
) -> bool:
    """Whether these are the labels of all ranks of a layout."""
    mine = {coordinate_label(layout, rank, axes, path=path) for rank in layout.ranks}
    return set(labels) == mine

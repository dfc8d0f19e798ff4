"""What a save in progress has on storage: plan, done-records, failure records, heartbeats.

They are sufficient to finish a save, or to name what is missing of it, without any of the processes
that began it. The heartbeats prevent that it is taken for abandoned while one of these still works:
a small file for each rank of a save that lasts, among the leases of readers and not in the save's
directory, which may not exist yet, and becomes the checkpoint.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray, WordArray
from holdfast.errors import CorruptionError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import LayoutInfo
from holdfast.format.names import parse_saving_dir, step_dir, unclaimed
from holdfast.format.versions import DEFAULT_LEASE_S, LEASES_DIR, renewed_ago_s
from holdfast.storage import Storage

PLAN_FILE = "plan/plan.msgpack"
HEADER_FILE = "plan/header.msgpack"
ALIVE_FILE = "plan/alive"
FAILED_FILE = "failed.msgpack"
DONE_DIR = "done"
HEARTBEAT_S = 2.0
_DIGEST_NBYTES = 32
_HEARTBEAT_NBYTES = 64
_HEARTBEAT = re.compile(r"iter_[0-9]{7,18}\.save-([0-9A-Za-z_]{1,64})-[0-9]{5,}", re.ASCII)
T = TypeVar("T")


def done_file(position: int) -> str:
    """Path of a rank's done-record inside the directory of the save."""
    return f"{DONE_DIR}/{position:05d}.msgpack"


def failed_file(position: int) -> str:
    """Path of the failure record of a rank that could not write."""
    return f"{DONE_DIR}/{position:05d}.failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPlan:
    """What all ranks together write, as arrays.

    Tensors are numbered by position in `keys`. Rows are ordered by file, then by place in the
    file; a row is one stored copy of one box. `ranks`: every rank that takes part, in control
    order; `writers[file]` is the position in `ranks` of the file's writer. `check_*`: boxes that
    several ranks hold without a declaration; all holders of one `check_group` must report equal
    digests.
    """

    signature: str
    block_nbytes: int
    layouts: tuple[LayoutInfo, ...]
    ranks: tuple[int, ...]
    coordinates: tuple[dict[str, int], ...]
    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor_layouts: tuple[int, ...]
    writers: tuple[int, ...]
    row_tensor: IntArray
    row_file: IntArray
    row_offset: IntArray
    row_extent: IntArray
    row_copy: IntArray
    check_group: IntArray
    check_position: IntArray
    check_tensor: IntArray

    @property
    def row_nbytes(self) -> IntArray:
        """Payload bytes of each row."""
        if self.num_rows == 0:
            return np.zeros(0, dtype=np.int64)
        itemsize = np.array([DTYPES[name].itemsize for name in self.dtypes], dtype=np.int64)
        numel: IntArray = self.row_extent.prod(axis=1, dtype=np.int64)
        return numel * itemsize[self.row_tensor]

    @property
    def total_nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return int(self.row_nbytes[self.row_copy == 0].sum())

    @property
    def num_rows(self) -> int:
        """Stored copies of chunks."""
        return len(self.row_tensor)


_COLUMNS = (
    "row_tensor",
    "row_file",
    "row_offset",
    "row_extent",
    "row_copy",
    "check_group",
    "check_position",
    "check_tensor",
)


class _PlanWire(msgspec.Struct, frozen=True, kw_only=True):
    signature: str
    block_nbytes: int
    layouts: tuple[LayoutInfo, ...]
    ranks: tuple[int, ...]
    coordinates: tuple[dict[str, int], ...]
    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor_layouts: tuple[int, ...]
    writers: tuple[int, ...]
    columns: dict[str, bytes]
    widths: dict[str, int]


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """A plan, and the bytes that `encode_plan` makes of it."""

    plan: CommitPlan
    data: bytes


def encode_plan(plan: CommitPlan) -> bytes:
    """The plan as bytes with a digest at the end."""
    values = {
        name: getattr(plan, name) for name in _PlanWire.__struct_fields__ if hasattr(plan, name)
    }
    columns = {name: np.ascontiguousarray(getattr(plan, name)) for name in _COLUMNS}
    wire = _PlanWire(
        **values,
        columns={name: column.tobytes() for name, column in columns.items()},
        widths={name: column.shape[1] for name, column in columns.items() if column.ndim == 2},
    )
    return seal(msgspec.msgpack.encode(wire))


def decode_plan(data: bytes, *, where: str) -> CommitPlan:
    """The plan of `encode_plan`; CorruptionError naming `where` for anything else."""
    wire = unseal(data, _PlanWire, where=where)
    values = {
        name: getattr(wire, name)
        for name in _PlanWire.__struct_fields__
        if name not in ("columns", "widths")
    }
    if wire.block_nbytes < 1:
        raise CorruptionError(f"{where}: {wire.block_nbytes} bytes per digest cannot be")
    try:
        for name in _COLUMNS:
            column = np.frombuffer(wire.columns[name], dtype=np.int64)
            width = wire.widths.get(name)
            # Not -1: where no tensor has a dim, the width is 0 and says nothing of the rows.
            num_rows = len(values.get("row_tensor", ()))
            values[name] = column if width is None else column.reshape(num_rows, width)
        return CommitPlan(**values)
    except (KeyError, ValueError) as error:
        raise CorruptionError(f"{where}: not a save plan: {error}") from error


class SaveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two saves under one plan.

    `metadata`: the JSON of `format.metadata.encode_metadata`.
    """

    step: int
    save_id: str
    created: str
    holdfast: str
    torch: str
    overwrite: bool
    metadata: bytes = b""


class DoneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's record that its bytes are on storage: lengths and digests of all of them.

    `starts`, `digest_ptr`, `digests`, `checks`: little-endian 64-bit columns. `lanes`: two words of
    fingerprint per row, or none. `values`: the rank's
    encoded tree, part name -> node, as JSON.
    """

    position: int
    plan_digest: str
    save_id: str
    file: str | None
    nbytes: int
    header_nbytes: int
    header_digest: str
    starts: bytes
    row_nbytes: bytes
    digest_ptr: bytes
    digests: bytes
    checks: bytes
    lanes: bytes
    values: bytes


def seal(payload: bytes) -> bytes:
    """Payload followed by its digest."""
    return payload + digest128(payload).encode()


def unseal(data: bytes, kind: type[T], *, where: str) -> T:
    """Decode sealed bytes as `kind`; CorruptionError naming `where` if any byte changed."""
    payload, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    if digest128(payload).encode() != digest:
        raise CorruptionError(f"{where}: the record's digest does not match its bytes")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"{where}: not a {kind.__name__}: {error}") from error


def column(values: Sequence[int] | IntArray | WordArray) -> bytes:
    """Little-endian 64-bit bytes of a column of integers; the sign is the reader's matter."""
    array = np.asarray(values)
    if array.dtype != np.uint64:
        array = array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


class Heartbeat:
    """A context manager: while it is open, a thread renews this rank's heartbeat on storage.

    Every two seconds; nothing is written in the first two, in which the directory itself is young
    enough. A storage that cannot be written to is tried again at the next beat.

    Args:
        directory: of the save.
        position: of the rank in the plan.
    """

    def __init__(self, storage: Storage, directory: str, *, position: int) -> None:
        self._storage = storage
        self._directory = directory
        step, save_id = parse_saving_dir(directory) or (0, "")
        self._path = f"{LEASES_DIR}/{step_dir(step)}.save-{unclaimed(save_id)}-{position:05d}"
        self._stop = threading.Event()
        self._is_resting = False
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop, and remove the heartbeat."""
        self._stop.set()
        self._thread.join()

    def rest(self) -> None:
        """This rank has written its share: from now on it beats only where the committer cannot.

        So a save whose committer is gone is finished without waiting for ranks that wait for it.
        """
        self._is_resting = True

    def _run(self) -> None:
        is_written = False
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(StorageError):
                if self._is_resting and self._storage.exists(f"{self._directory}/{ALIVE_FILE}"):
                    break
                self._storage.make_dir(LEASES_DIR, durable=False)
                now = f"{time.time():.3f}".encode()
                is_written = True
                self._storage.replace_file(self._path, now, durable=False)
        if is_written:
            with suppress(StorageError):
                self._storage.remove_tree(self._path)


def silent_s(storage: Storage, directory: str) -> float:
    """Seconds since the last heartbeat of any process of a save.

    That is: since it made or changed the directory, began to commit, or renewed its heartbeat; each
    by the storage's clock, or the process's own, whichever is less.
    """
    parsed = parse_saving_dir(directory)
    save_id = unclaimed(parsed[1]) if parsed is not None else ""
    paths = [f"{directory}/{ALIVE_FILE}"] if storage.exists(f"{directory}/{ALIVE_FILE}") else []
    paths += [path for path, of in _heartbeats(storage) if of == save_id]
    least = storage.age_s(directory)
    for path in paths:
        try:
            data = storage.read(path, nbytes=min(storage.size(path), _HEARTBEAT_NBYTES))
            least = min(least, renewed_ago_s(storage, path, stamp=_time_in(data)))
        except StorageError:
            if storage.exists(path):
                raise
    return least


def clear_heartbeats(storage: Storage) -> None:
    """Remove the heartbeats of processes that have long been gone."""
    for path, _ in _heartbeats(storage):
        with suppress(StorageError):
            if storage.age_s(path) > DEFAULT_LEASE_S:
                storage.remove_tree(path)


def _heartbeats(storage: Storage) -> list[tuple[str, str]]:
    """Path and save id of every heartbeat."""
    names = storage.list(LEASES_DIR) if storage.is_dir(LEASES_DIR) else []
    matches = [(name, _HEARTBEAT.fullmatch(name)) for name in names]
    return [(f"{LEASES_DIR}/{name}", match[1]) for name, match in matches if match is not None]


def _time_in(data: bytes) -> float | None:
    try:
        return float(data)
    except ValueError:
        return None

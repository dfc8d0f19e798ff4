"""The records of a save: a writer's job, and on storage the plan, done-records and heartbeats.

The records on storage are sufficient to finish a save, or to name what it lacks, without any of the
processes that started it. While one of these works, its heartbeat shows that the save is not
abandoned. A heartbeat is a small file for each rank of a save that lasts. It lies among the leases
of readers and not in the directory of the save, which may not exist yet, and which becomes the
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from holdfast.arrays.types import IntArray, WordArray
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import CorruptionError, ErrorRecord, StorageError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.envelopes.torch_dist import MetadataMemo
from holdfast.format.manifest import Envelope, LayoutInfo, ManifestTexts, PlacementInfo, TensorInfo
from holdfast.format.names import parse_saving_dir, step_dir, unclaimed
from holdfast.format.values import Node
from holdfast.format.versions import DEFAULT_LEASE_S, LEASES_DIR, renewed_ago_s
from holdfast.storage import Storage
from holdfast.storage.reading import read_at_most

PLAN_FILE = "plan/plan.msgpack"
HEADER_FILE = "plan/header.msgpack"
ALIVE_FILE = "plan/alive"
FAILED_FILE = "failed.msgpack"
DONE_DIR = "done"
MAX_RECORD_NBYTES = 1 << 27
"""Largest plan or done-record that is read back: of more than a million rows."""
_DIGEST_NBYTES = 32
_HEARTBEAT_NBYTES = 64
_HEARTBEAT = re.compile(r"iter_[0-9]{7,18}\.save-([0-9A-Za-z_]{1,64})-[0-9]{5,}", re.ASCII)
_MAX_PART_NBYTES = 4 << 20
_MAX_TENSORS = 100_000

Supplied = Sequence[tuple[str, bytes]]
"""Encoded tree of a part by the label of each rank that supplies it."""
T = TypeVar("T")


def done_file(position: int) -> str:
    """Return the path of a rank's done-record inside the directory of the save."""
    return f"{DONE_DIR}/{position:05d}.msgpack"


def missing_ranks(names: Iterable[str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose done-record is not among the names in `DONE_DIR`."""
    present = {f"{DONE_DIR}/{name}" for name in names}
    return [rank for position, rank in enumerate(ranks) if done_file(position) not in present]


def heartbeat_file(step: int, save_id: str, position: int) -> str:
    """Return the path of a rank's heartbeat from the root of the storage."""
    return f"{LEASES_DIR}/{step_dir(step)}.save-{unclaimed(save_id)}-{position:05d}"


class _PlanTables(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The part of a plan about ranks and tensors.

    Args:
        ranks: Every rank that takes part, in control order.
        coordinates: The coordinate of each rank on its layout.
        keys, dtypes, shapes, tensor_layouts: One entry for each tensor.
        placements: The distinct placements; `tensor_placements` has the position of each tensor's.
        writers: For each file, the position of its writer in `ranks`.
        envelope: Of the data files.
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
    placements: tuple[PlacementInfo, ...]
    tensor_placements: tuple[int, ...]
    writers: tuple[int, ...]
    envelope: Envelope = "safetensors"


class CommitPlan(_PlanTables, frozen=True, kw_only=True, eq=False):
    """Everything that the ranks write together, as arrays.

    A row is one stored copy of one box. Rows are ordered by file, then by place in the file.

    Args:
        row_*: (n,) or (n, dims) per row: position in `keys`, number of the file, offset, extent,
            number of the copy, and number of the set of ranks that hold the box.
        holder_ptr, holder: The sets of holders; see `ChunkIndex`.
        check_*: (m,) boxes that several ranks hold without a declaration, one row for each holder.
            All holders of one `check_group` must report equal digests.
    """

    row_tensor: IntArray
    row_file: IntArray
    row_offset: IntArray
    row_extent: IntArray
    row_copy: IntArray
    row_holders: IntArray
    holder_ptr: IntArray
    holder: IntArray
    check_group: IntArray
    check_position: IntArray
    check_tensor: IntArray

    @property
    def row_nbytes(self) -> IntArray:
        """(n,) payload bytes of each row."""
        if len(self.row_tensor) == 0:
            return np.zeros(0, dtype=np.int64)
        itemsize = np.array([DTYPES[name].itemsize for name in self.dtypes], dtype=np.int64)
        numel: IntArray = self.row_extent.prod(axis=1, dtype=np.int64)
        return numel * itemsize[self.row_tensor]

    @property
    def total_nbytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return int(self.row_nbytes[self.row_copy == 0].sum())

    @property
    def copies_nbytes(self) -> int:
        """Bytes of all copies beyond the first."""
        return int(self.row_nbytes[self.row_copy != 0].sum())


_TABLES = _PlanTables.__struct_fields__
_COLUMNS = tuple(name for name in CommitPlan.__struct_fields__ if name not in _TABLES)


class _PlanWire(_PlanTables, frozen=True, kw_only=True, eq=False, omit_defaults=True):
    """An encoded plan: columns of 64-bit integers, and the widths of columns with two dims."""

    columns: dict[str, bytes]
    widths: dict[str, int]


class PlanMemo:
    """What commits by one plan have in common: proven and made once; at most tens of megabytes.

    Saves of an unchanged structure differ in digests and in few values. Everything here is taken
    again only where all that it was made of is the same, byte by byte or as the same object. It
    lives in the process that commits the saves. Each attribute is replaced as a whole, so that two
    commits at a time do each other no harm.

    Attributes:
        metadata: Of files for other programs.
        texts: Of manifests.
        proven: All that an index was proven with, but for the plan: see `assemble`.
    """

    def __init__(self) -> None:
        self.metadata = MetadataMemo()
        self.texts = ManifestTexts(max_tensors=_MAX_TENSORS)
        self.proven: object = None
        self._tensors: list[TensorInfo] | None = None
        self._parts: dict[str, tuple[Supplied, Node]] = {}

    def tensors(self, make: Callable[[], list[TensorInfo]]) -> list[TensorInfo]:
        """Return the plan's tensors without fingerprints: one list for all commits."""
        tensors = self._tensors
        if tensors is None:
            tensors = make()
            if len(tensors) <= _MAX_TENSORS:
                self._tensors = tensors
        return tensors

    def part(self, name: str, supplied: Supplied, merge: Callable[[], Node]) -> Node:
        """Return the merged tree of a part: the last one's object, if ranks supply the same."""
        last = self._parts.get(name)
        if last is not None and last[0] == supplied:
            return last[1]
        node = merge()
        if sum(map(len, {data for _, data in supplied})) <= _MAX_PART_NBYTES:
            self._parts[name] = (supplied, node)
        else:
            self._parts.pop(name, None)
        return node


@dataclass(frozen=True, slots=True)
class EncodedPlan:
    """A plan, its bytes from `encode_plan`, their digest, and what saves by it have in common."""

    plan: CommitPlan
    data: bytes
    digest: str
    memo: PlanMemo = field(default_factory=PlanMemo, compare=False)


def encode_plan(plan: CommitPlan) -> EncodedPlan:
    """Encode a plan as sealed bytes."""
    columns = {name: np.ascontiguousarray(getattr(plan, name)) for name in _COLUMNS}
    wire = _PlanWire(
        **{name: getattr(plan, name) for name in _TABLES},
        columns={name: column.tobytes() for name, column in columns.items()},
        widths={name: column.shape[1] for name, column in columns.items() if column.ndim == 2},
    )
    data = seal(msgspec.msgpack.encode(wire))
    return EncodedPlan(plan, data, digest128(data))


def decode_plan(data: bytes, *, where: str) -> EncodedPlan:
    """Decode the bytes of `encode_plan`; CorruptionError naming `where` for any others."""
    wire = unseal(data, _PlanWire, where=where)
    values = {name: getattr(wire, name) for name in _TABLES}
    if wire.block_nbytes < 1:
        raise CorruptionError(
            f"{where}: the plan states {wire.block_nbytes} bytes per digest, at least 1 is needed"
        )
    try:
        for name in _COLUMNS:
            column = np.frombuffer(wire.columns[name], dtype=np.int64)
            width = wire.widths.get(name)
            # Not -1: if no tensor has a dim, the width is 0, and the rows cannot be computed.
            num_rows = len(values.get("row_tensor", ()))
            values[name] = column if width is None else column.reshape(num_rows, width)
        return EncodedPlan(CommitPlan(**values), data, digest128(data))
    except (KeyError, ValueError) as error:
        raise CorruptionError(f"{where}: this is not a save plan: {error}") from error


class SaveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that differ between two saves under one plan.

    Args:
        created: Time in ISO 8601, UTC.
        holdfast, torch: Versions.
        overwrite: True if it may replace a checkpoint of the step.
        metadata: The JSON of `encode_metadata`; empty for none.
        on_drift: "raise" or "warn", if copies of one box differ.
        replaces: Save id of the version that the step had when the save began, which a repair may
            replace by this one; empty for none. None if it is not known.
    """

    step: int
    save_id: str
    created: str
    holdfast: str
    torch: str
    overwrite: bool
    metadata: bytes = b""
    on_drift: str = "raise"
    replaces: str | None = None


class RowBox(msgspec.Struct, frozen=True, array_like=True):
    """The box of a row's chunk, with element type and global shape of its tensor."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


class PlannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's data file as planned, the same in each save under a plan.

    Args:
        name: Path inside the directory of the save; None for a rank that writes no tensor.
        header_nbytes: Bytes around the payload: its header with padding, or what is around chunks.
        starts: int64 column: byte at which each row's payload starts in the image, in plan order.
        row_nbytes: int64 column: length of each row's payload.
    """

    name: str | None = None
    header_nbytes: int = 0
    starts: bytes = b""
    row_nbytes: bytes = b""


class WriteJob(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of a save.

    Args:
        directory: Directory of the save in progress.
        position: Position of the rank in the plan.
        rank: Global rank, for messages.
        header: The facts that distinguish this save from others under the plan.
        plan_digest: Digest of the plan; empty if the save failed before it had one.
        block_nbytes: Bytes per digest.
        deadline_s: Seconds for the whole save, from the start of the writing.
        file: Places of the rows in the image.
        checks: uint64 column: digests of the boxes that this rank must vouch for.
        values: The rank's encoded tree as JSON.
        row_boxes: One per row if fingerprints are stored, else empty.
        root: Id of the root that the save belongs to; empty if it is not known.
    """

    directory: str
    position: int
    rank: int
    header: SaveHeader
    plan_digest: str
    block_nbytes: int
    deadline_s: float
    file: PlannedFile = PlannedFile()
    checks: bytes = b""
    values: bytes = b""
    row_boxes: tuple[RowBox, ...] = ()
    root: str = ""


class KeepImage(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: what a staging buffer holds, to be kept when the trainer has gone.

    It says nothing about whether the save was or will be committed.

    Args:
        buffer: Number of the staging buffer.
        nbytes: Of the data file, which its first bytes are.
        step: Of the save.
        save_id: Of the save.
        file: Name of the data file in the checkpoint.
        keep_s: Seconds to keep it.
    """

    buffer: int
    nbytes: int
    step: int
    save_id: str
    file: str
    keep_s: float


class SaveOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a save as one rank's writer saw it; `error` is None for success.

    `began` is when the job started, by `time.monotonic`, which trainer and writer share. `requests`
    are those of the job, by kind, if the storage counts them.
    """

    save_id: str
    directory: str
    error: ErrorRecord | None = None
    began: float = 0.0
    write_s: float = 0.0
    commit_s: float = 0.0
    requests: dict[str, int] = {}


class DoneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's record that its bytes are on storage: all their lengths and digests.

    Args:
        file, header_nbytes, starts, row_nbytes: As in `PlannedFile`.
        nbytes: Size of the file.
        digest_ptr: int64 column: start of each row's digests.
        digests: uint64 column: one digest for each block.
        checks, values: As in `WriteJob`.
        lanes: uint64 column: two words of fingerprint per row; or empty.
        requests: What this rank has asked of storage until then, by kind, if that is counted.
        stamp: Of the file; see `file_stamp`. None if it is not known.
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
    requests: dict[str, int] = {}
    stamp: tuple[int, int] | None = None


def seal(payload: bytes) -> bytes:
    """Return the payload followed by its digest."""
    return payload + digest128(payload).encode()


def unseal(data: bytes, kind: type[T], *, where: str) -> T:
    """Decode sealed bytes as `kind`; CorruptionError naming `where` if any byte changed."""
    payload, digest = data[:-_DIGEST_NBYTES], data[-_DIGEST_NBYTES:]
    if digest128(payload).encode() != digest:
        raise CorruptionError(f"{where}: the record's digest does not match its bytes")
    try:
        return decode_msgpack_as(payload, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptionError(f"{where}: this is not a {kind.__name__}: {error}") from error


def read_sealed(storage: Storage, path: str, kind: type[T]) -> T:
    """Read and decode a sealed file; CorruptionError naming it if any byte changed."""
    return unseal(read_record(storage, path), kind, where=storage.describe(path))


def read_record(storage: Storage, path: str) -> bytes:
    """Read a record of a save; CorruptionError, without reading it, if it is larger than any."""
    if not hasattr(storage, "read_at_most"):
        nbytes = storage.size(path)
        if nbytes <= MAX_RECORD_NBYTES:
            return storage.read(path, nbytes=nbytes)
    else:
        data = read_at_most(storage, path, MAX_RECORD_NBYTES + 1)
        if (nbytes := len(data)) <= MAX_RECORD_NBYTES:
            return data
    raise CorruptionError(
        f"{storage.describe(path)}: {nbytes} bytes exceed the limit of {MAX_RECORD_NBYTES} for "
        f"a record of a save"
    )


def column(values: Sequence[int] | IntArray | WordArray) -> bytes:
    """Return a column of integers as little-endian 64-bit bytes, signed or unsigned."""
    array = np.asarray(values)
    if array.dtype != np.uint64:
        array = array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def silent_s(storage: Storage, directory: str) -> float:
    """Return the seconds since the last heartbeat of any process of a save.

    A change of the directory and the start of the commit count as heartbeats. Each age is by the
    storage's clock or the process's own, whichever is less.
    """
    parsed = parse_saving_dir(directory)
    save_id = unclaimed(parsed[1]) if parsed is not None else ""
    paths = [f"{directory}/{ALIVE_FILE}"] if storage.exists(f"{directory}/{ALIVE_FILE}") else []
    paths += [path for path, of in _heartbeats(storage) if of == save_id]
    least = storage.age_s(directory)
    for path in paths:
        try:
            data = read_at_most(storage, path, _HEARTBEAT_NBYTES)
            least = min(least, renewed_ago_s(storage, path, stamp=_time_in(data)))
        except StorageError:
            if storage.exists(path):
                raise
    return least


def clear_heartbeats(storage: Storage) -> None:
    """Remove the heartbeats of processes that died long ago."""
    for path, _ in _heartbeats(storage):
        with suppress(StorageError):
            if storage.age_s(path) > DEFAULT_LEASE_S:
                storage.remove_tree(path)


def _heartbeats(storage: Storage) -> list[tuple[str, str]]:
    """Return path and save id of every heartbeat."""
    names = storage.list(LEASES_DIR) if storage.is_dir(LEASES_DIR) else []
    matches = [(name, _HEARTBEAT.fullmatch(name)) for name in names]
    return [(f"{LEASES_DIR}/{name}", match[1]) for name, match in matches if match is not None]


def _time_in(data: bytes) -> float | None:
    """Return the time in a heartbeat; None if it is damaged."""
    try:
        return float(data)
    except ValueError:
        return None

"""A plan kept beside the checkpoints, so that the first save of a later run need not plan anew.

What is read back is believed in nothing. Each rank takes its own share from the plan's rows and its
own chunk table, never from the note itself, and proves what concerns it: that its tensors are the
plan's, that every box it is to write is its own, and that every box it holds is written by itself,
by a rank that its placement declares to hold the same, or under a comparison by content. The
coordinator proves that the rows tile every tensor. What all ranks have proven is a right plan,
whoever wrote it; anything else is planned anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable, pad_shapes
from holdfast.arrays.boxes import Box
from holdfast.arrays.packed_ints import MAX_NBYTES, pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.arrays.tiling import check_tilings
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.plan.claims import UNDECLARED, RankClaims, decode_names
from holdfast.checkpoint.plan.make_plan import RankShare
from holdfast.errors import HoldfastError
from holdfast.format.digest import digest128
from holdfast.storage import Storage
from holdfast.writer.records import CommitPlan, decode_plan, seal

PLANS_DIR = ".plans"
_VERSION = 1
_MAX_FILES = 16
_STALE_S = 60.0


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """The file: a plan's bytes, and what is not in them."""

    version: int
    plan: bytes
    signatures: tuple[str, ...]
    compare_all: bool
    check_offset: bytes
    check_extent: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a plan is kept with: every rank's signature, and the box of each of its checks."""

    signatures: tuple[str, ...]
    compare_all: bool
    check_offset: IntArray
    check_extent: IntArray

    @classmethod
    def make(
        cls,
        plan: CommitPlan,
        tables: Sequence[RankClaims],
        assignments: Sequence[RankShare],
        signatures: tuple[str, ...],
        *,
        compare_all: bool,
    ) -> PlanRecord:
        """The record of a plan that was just made from these tables."""
        shape = (len(plan.check_group), plan.row_offset.shape[1])
        offset, extent = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        order = np.argsort(plan.check_position, kind="stable")
        ends = np.searchsorted(plan.check_position[order], np.arange(len(tables) + 1))
        for position, (table, assignment) in enumerate(zip(tables, assignments, strict=True)):
            at = order[ends[position] : ends[position + 1]]
            width = table.offset.shape[1]
            offset[at, :width] = table.offset[assignment.checks]
            extent[at, :width] = table.extent[assignment.checks]
        return cls(
            signatures=signatures, compare_all=compare_all, check_offset=offset, check_extent=extent
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """A plan read back, not yet proven: the plan, its bytes, its record; `digest`: of all that."""

    plan: CommitPlan
    encoded: bytes
    record: PlanRecord
    digest: str


def sign_all(signatures: Sequence[str]) -> str:
    """The signature of the whole structure, from those of all ranks in order."""
    return digest128("\0".join(signatures).encode())


def plan_name(options: Sequence[str], *, compare_all: bool) -> str:
    """Where the plan of a layout and its options is kept: one file for each such choice."""
    words = [*options, "all" if compare_all else "undeclared", str(_VERSION)]
    return f"{PLANS_DIR}/{digest128(chr(0).join(words).encode())}.msgpack"


def keep_plan(storage: Storage, name: str, encoded: bytes, record: PlanRecord) -> None:
    """Leave a plan for later runs, in place of the last one of that name. StorageError if it fails.

    At most 16 are kept. Cost: one small file, compressed; called when a checkpoint is committed.
    """
    note = _Note(
        version=_VERSION,
        plan=encoded,
        signatures=record.signatures,
        compare_all=record.compare_all,
        check_offset=pack_ints(record.check_offset),
        check_extent=pack_ints(record.check_extent),
    )
    storage.make_dir(PLANS_DIR, durable=False)  # sealed, and only a help: may be lost
    storage.replace_file(name, seal(squeeze(msgspec.msgpack.encode(note))), durable=False)
    paths = [f"{PLANS_DIR}/{each}" for each in storage.list(PLANS_DIR)]
    by_age = sorted((storage.age_s(path), path) for path in paths if path != name)
    for number, (age_s, path) in enumerate(by_age, start=2):
        unnamed = path.startswith(f"{PLANS_DIR}/.tmp-") and age_s > _STALE_S
        if unnamed or number > _MAX_FILES:
            storage.remove_tree(path)


def read_plan(storage: Storage, name: str) -> KeptPlan | None:
    """The plan of that name, or None where there is none that can be read."""
    with suppress(HoldfastError, msgspec.DecodeError, LookupError, ValueError, OverflowError):
        if not storage.exists(name) or storage.size(name) > MAX_NBYTES:
            return None
        data = storage.read(name)
        payload, digest = data[:-32], data[-32:]
        if digest128(payload).encode() != digest:
            return None
        note = msgspec.msgpack.decode(unsqueeze(payload), type=_Note)
        if note.version != _VERSION:
            return None
        plan = decode_plan(note.plan, where=name)
        shape = (len(plan.check_group), plan.row_offset.shape[1])
        return KeptPlan(
            plan=plan,
            encoded=note.plan,
            digest=digest.decode(),
            record=PlanRecord(
                signatures=note.signatures,
                compare_all=note.compare_all,
                check_offset=unpack_ints(note.check_offset).reshape(shape),
                check_extent=unpack_ints(note.check_extent).reshape(shape),
            ),
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """This rank, as far as a kept plan must fit it.

    `position`: in `ranks`, the control group's; `coordinates`: of all of them. `compare_all`:
    declared replicas are to be compared, too.
    """

    position: int
    ranks: tuple[int, ...]
    coordinates: tuple[dict[str, int], ...]
    signature: str
    table: RankClaims
    block_nbytes: int
    compare_all: bool


def prove_plan(kept: KeptPlan, holder: Holder, *, tiling: bool) -> RankShare | None:
    """This rank's share of a kept plan, or None unless all that concerns the rank is proven.

    `tiling`: prove, too, that the rows tile every tensor, which one rank must do.
    Cost: no collectives; O(rows) vector work.
    """
    try:
        return _Proof(kept, holder).run(tiling=tiling)
    except (_Unfit, HoldfastError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


class _Unfit(Exception):
    """The plan is not the one for this state."""


def _need(holds: object) -> None:
    if not holds:
        raise _Unfit


class _Proof:
    """One rank's proof of one plan."""

    def __init__(self, kept: KeptPlan, holder: Holder) -> None:
        self._plan = kept.plan
        self._record = kept.record
        self._holder = holder
        self._table = holder.table
        self._num_dims = kept.plan.row_offset.shape[1]
        self._rows = BoxTable(
            tensor=kept.plan.row_tensor, offset=kept.plan.row_offset, extent=kept.plan.row_extent
        )

    def run(self, *, tiling: bool) -> RankShare:
        self._same_question()
        self._well_formed()
        numbers = self._same_tensors()
        own = BoxTable(
            tensor=numbers[self._table.tensor], offset=self._table.offset, extent=self._table.extent
        ).padded(self._num_dims)
        if tiling:
            self._tiles()
        checks, vouched = self._checks(own)
        self._written_rightly(own, vouched)
        file, rows, cuts = self._own_rows(own)
        return RankShare(file=file, rows=rows, cuts=cuts, checks=checks)

    def _same_question(self) -> None:
        """The plan was made for these ranks, options and structures."""
        plan, record, holder = self._plan, self._record, self._holder
        _need(plan.ranks == holder.ranks and plan.coordinates == holder.coordinates)
        _need(plan.block_nbytes == holder.block_nbytes)
        _need(record.compare_all == holder.compare_all)
        _need(len(record.signatures) == len(holder.ranks))
        _need(record.signatures[holder.position] == holder.signature)
        _need(plan.signature == sign_all(record.signatures))

    def _well_formed(self) -> None:
        """Every number is one of something that is there; nothing is there for nothing."""
        plan = self._plan
        num_rows, num_checks = len(plan.row_tensor), len(plan.check_group)
        for name in ("row_file", "row_offset", "row_extent", "row_copy"):
            _need(len(getattr(plan, name)) == num_rows)
        for name in ("check_position", "check_tensor"):
            _need(len(getattr(plan, name)) == num_checks)
        _need(plan.row_extent.shape == plan.row_offset.shape)
        _need(self._num_dims >= max(map(len, plan.shapes), default=0))
        _need(self._num_dims >= self._table.offset.shape[1])
        _need(len(set(plan.keys)) == len(plan.keys) == len(plan.dtypes) == len(plan.shapes))
        _need(len(plan.tensor_layouts) == len(plan.keys))
        _all_used(plan.row_tensor, len(plan.keys))
        _all_used(plan.row_file, len(plan.writers))
        _all_used(np.array(plan.tensor_layouts, dtype=np.int64), len(plan.layouts))
        writers = np.array(plan.writers, dtype=np.int64)
        _need((np.diff(writers) > 0).all())
        _within(writers, len(plan.ranks))
        _within(plan.check_position, len(plan.ranks))
        _within(plan.check_tensor, len(plan.keys))
        _need((plan.row_copy == 0).all())
        _need((np.diff(plan.row_file) >= 0).all())

    def _same_tensors(self) -> IntArray:
        """For each tensor of this rank its number in the plan, where it is the same tensor."""
        plan, names = self._plan, decode_names(self._table.names)
        numbers = {key: number for number, key in enumerate(plan.keys)}
        found = []
        for key, dtype, shape, home in zip(
            names.keys, names.dtypes, names.shapes, names.homes, strict=True
        ):
            number = numbers[key]
            _need(plan.dtypes[number] == dtype and plan.shapes[number] == shape)
            _need(plan.layouts[plan.tensor_layouts[number]] == names.layouts[home])
            found.append(number)
        return np.array(found, dtype=np.int64)

    def _tiles(self) -> None:
        _need(not check_tilings(self._rows, self._plan.shapes))

    def _checks(self, own: BoxTable) -> tuple[IntArray, set[tuple[int, int]]]:
        """This rank's rows to vouch for; and (row, position) of all that vouch with it.

        All members of a group must vouch for one and the same box.
        """
        plan, record = self._plan, self._record
        boxes = BoxTable(
            tensor=plan.check_tensor, offset=record.check_offset, extent=record.check_extent
        )
        group = plan.check_group
        columns = np.column_stack([boxes.tensor, boxes.offset, boxes.extent])
        order = np.lexsort((plan.check_position, group))
        same = group[order][1:] == group[order][:-1]
        _need((columns[order][1:] == columns[order][:-1])[same].all())
        _need((np.diff(plan.check_position[order]) > 0)[same].all())
        mine = np.flatnonzero(plan.check_position == self._holder.position)
        rows = own.find(boxes.take(mine))
        _need((rows >= 0).all())
        row_of = dict(zip(group[mine].tolist(), rows.tolist(), strict=True))
        ours = np.isin(group, group[mine])
        members = zip(group[ours].tolist(), plan.check_position[ours].tolist(), strict=True)
        vouched = {(row_of[number], position) for number, position in members}
        return rows, vouched

    def _written_rightly(self, own: BoxTable, vouched: set[tuple[int, int]]) -> None:
        """Every box that this rank holds is written by one who has the right to."""
        plan = self._plan
        sizes = pad_shapes(plan.shapes, self._num_dims)
        _need((own.offset >= 0).all() and (own.extent >= 0).all())
        _need((own.stop <= sizes[own.tensor]).all())
        writers = np.array(plan.writers, dtype=np.int64)[plan.row_file]
        exact = self._rows.find(own)
        pairs = np.column_stack([np.arange(len(exact)), writers[exact]])[exact >= 0]
        held = [pairs]
        held += [self._pieces(own, row, writers) for row in np.flatnonzero(exact < 0).tolist()]
        self._judge(np.concatenate(held), vouched)

    def _pieces(self, own: BoxTable, row: int, writers: IntArray) -> IntArray:
        """(row, writer) of the plan's rows that share an element with a box: they must fill it."""
        rows, low, high = self._rows, own.offset[row], own.stop[row]
        shared = rows.tensor == own.tensor[row]
        shared &= (rows.offset < high).all(axis=1) & (rows.stop > low).all(axis=1)
        parts = rows.take(shared)
        _need((parts.offset >= low).all() and (parts.stop <= high).all())
        _need(parts.numel().sum() == own.extent[row].prod())
        return np.array([(row, w) for w in np.unique(writers[shared]).tolist()], dtype=np.int64)

    def _judge(self, held: IntArray, vouched: set[tuple[int, int]]) -> None:
        """Each writer of each of this rank's boxes: itself, a declared replica, or compared."""
        holder, table = self._holder, self._table
        others = held[held[:, 1] != holder.position]
        replica_set = table.replica_set[others[:, 0]]
        trusted = np.zeros(len(others), dtype=np.bool_)
        for number, writer in np.unique(
            np.column_stack([replica_set, others[:, 1]]), axis=0
        ).tolist():
            if number == UNDECLARED:
                continue
            rank, said = holder.ranks[writer], table.replica_sets[number]
            _need(rank in said.replicas or rank not in said.span)
            if rank in said.replicas and not holder.compare_all:
                trusted |= (replica_set == number) & (others[:, 1] == writer)
        for row, writer in others[~trusted].tolist():
            _need((row, writer) in vouched)

    def _own_rows(self, own: BoxTable) -> tuple[int, IntArray, dict[int, Box]]:
        """The rows that this rank writes, found in its own table: whole boxes, or parts of them."""
        plan = self._plan
        if self._holder.position not in plan.writers:
            return -1, np.zeros(0, dtype=np.int64), {}
        file = plan.writers.index(self._holder.position)
        mine = np.flatnonzero(plan.row_file == file)
        parts = self._rows.take(mine)
        rows = own.find(parts)
        cuts = {}
        for place in np.flatnonzero(rows < 0).tolist():
            around = own.tensor == parts.tensor[place]
            around &= (own.offset <= parts.offset[place]).all(axis=1)
            around &= (parts.stop[place] <= own.stop).all(axis=1)
            _need((parts.extent[place] > 0).all() and around.any())
            rows[place] = int(np.flatnonzero(around)[0])
            cuts[place] = parts.box(place, ndim=len(plan.shapes[parts.tensor[place]]))
        return file, rows, cuts


def _all_used(values: IntArray, count: int) -> None:
    """The numbers 0 to `count` - 1, each of them at least once."""
    _need(np.array_equal(np.unique(values), np.arange(count)))


def _within(values: IntArray, count: int) -> None:
    _need(not len(values) or 0 <= int(values.min()) <= int(values.max()) < count)

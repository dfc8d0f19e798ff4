"""A rank's share of a plan, and planning together: tables to the coordinator, shares back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from holdfast.arrays.boxes import Box
from holdfast.arrays.packed_ints import pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.arrays.types import IntArray
from holdfast.checkpoint.plan.cache import (
    Holder,
    PlanRecord,
    plan_name,
    prove_plan,
    read_plan,
    sign_all,
)
from holdfast.checkpoint.plan.claims import (
    RankClaims,
    claims_message,
    decode_claims,
    read_claims_messages,
    signature,
)
from holdfast.checkpoint.plan.make_plan import RankShare, make_plan
from holdfast.checkpoint.save.local_state import LocalState, choices
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.image import Image, ImageEntry, chunk_name, layout_image
from holdfast.parallel import ProcessGroups
from holdfast.state.torch_dtypes import TORCH_TO_NAME
from holdfast.storage import Storage
from holdfast.writer.job import RowBox
from holdfast.writer.records import CommitPlan, EncodedPlan, encode_plan


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers one rank when it has planned."""

    plan_digest: str
    file: int
    rows: bytes
    cuts: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    checks: bytes
    total_nbytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A plan as one rank keeps it between saves.

    `signature`, `table`: the structure it was made for. `compare_all`: declared replicas are
    compared, too. `token`: equal on ranks that hold this very plan, made or read back in the same
    way. `file`: number of this rank's data file, -1 for none. `rows`, `checks`: rows of
    its chunk table to write and to vouch for; `cuts`: places in `rows` of which only a part is
    written, and which part of the row's tensor. `names`: of its chunks. `image`: the data file's
    layout, `row_nbytes`, `row_boxes`: of its rows. `total_nbytes`, `num_tensors`: of the whole
    checkpoint. `commit`: the whole plan and its bytes, `record`: what a later run needs to use it
    again; both on the coordinator only.
    """

    signature: str
    table: RankClaims
    compare_all: bool
    plan_digest: str
    token: str
    file: int
    rows: tuple[int, ...]
    cuts: tuple[tuple[int, tuple[slice, ...]], ...]
    checks: tuple[int, ...]
    names: tuple[str, ...]
    image: Image
    row_nbytes: IntArray
    row_boxes: tuple[RowBox, ...]
    total_nbytes: int
    num_tensors: int
    commit: EncodedPlan | None
    record: PlanRecord | None

    def sources(self, local: LocalState) -> list[torch.Tensor]:
        """The tensor to write for each row, in plan order; views, nothing is copied.

        The state is compared with the one the plan was made for, whatever the signatures say:
        PlanError naming the first difference.
        """
        if local.table is not self.table:
            _refuse_another(self.table, local.table)
        found = [local.sources[row] for row in self.rows]
        for place, where in self.cuts:
            found[place] = found[place][where]
        return found


def plan_together(
    local: LocalState,
    *,
    groups: ProcessGroups,
    names: Sequence[str],
    block_nbytes: int,
    compare_all: bool,
) -> RankPlan:
    """Gather all tables, prove and elect on the coordinator, take this rank's share.

    `names`: digest of every rank's names, from the opening of the save: each distinct one is sent
    once. `compare_all`: declared replicas are compared by content, too.

    Collective. Raises PlanError on all ranks, naming key, box and ranks. Cost: one gather of the
    tables, one scatter of the shares, O(rows) vector work on the coordinator.
    """
    control = groups.control
    sends_names = list(names).index(local.names) == control.index
    message = claims_message(local.encoded, local.table.names if sends_names else None)
    gathered = control.gather(message, phase="save: tables")
    shares: list[bytes] | None = None
    commit: EncodedPlan | None = None
    record: PlanRecord | None = None
    if gathered is not None:
        commit, record, shares = _plan_all(
            gathered, groups=groups, block_nbytes=block_nbytes, compare_all=compare_all
        )
    data = control.scatter(shares, phase="save: shares")
    share = msgspec.msgpack.decode(unsqueeze(data), type=_Share)
    return rank_plan(
        local,
        RankShare(
            file=share.file,
            rows=unpack_ints(share.rows),
            cuts={index: Box(offset, shape) for index, offset, shape in share.cuts},
            checks=unpack_ints(share.checks),
        ),
        plan_digest=share.plan_digest,
        token=share.plan_digest,
        compare_all=compare_all,
        total_nbytes=share.total_nbytes,
        num_tensors=share.num_tensors,
        commit=commit,
        record=record,
    )


def plan_again(
    local: LocalState,
    *,
    storage: Storage,
    groups: ProcessGroups,
    block_nbytes: int,
    compare_all: bool,
) -> RankPlan | None:
    """This rank's share of the plan that an earlier run left, or None where it has none that fits.

    The plan may be used where all ranks come back with one `token`; see `reuse` for what is proven.
    No collectives. Cost: one small file read, O(rows) vector work.
    """
    control = groups.control
    name = plan_name(choices(groups, block_nbytes), compare_all=compare_all)
    kept = read_plan(storage, name)
    if kept is None:
        return None
    holder = Holder(
        position=control.index,
        ranks=control.ranks,
        coordinates=coordinates_of(groups),
        signature=local.signature,
        table=local.table,
        block_nbytes=block_nbytes,
        compare_all=compare_all,
    )
    assignment = prove_plan(kept, holder, tiling=control.is_coordinator)
    if assignment is None:
        return None
    return rank_plan(
        local,
        assignment,
        plan_digest=digest128(kept.encoded),
        token=kept.digest,
        compare_all=compare_all,
        total_nbytes=total_nbytes(kept.plan),
        num_tensors=len(kept.plan.keys),
        commit=EncodedPlan(kept.plan, kept.encoded) if control.is_coordinator else None,
        record=kept.record if control.is_coordinator else None,
    )


def _plan_all(
    messages: Sequence[bytes], *, groups: ProcessGroups, block_nbytes: int, compare_all: bool
) -> tuple[EncodedPlan, PlanRecord, list[bytes]]:
    ranks = groups.control.ranks
    encoded_tables, names = read_claims_messages(messages, ranks)
    options = choices(groups, block_nbytes)
    signatures = tuple(signature(data, choices=options) for data in encoded_tables)
    tables = [
        decode_claims(data, rank=rank, names=names)
        for data, rank in zip(encoded_tables, ranks, strict=True)
    ]
    plan, assignments = make_plan(
        tables,
        ranks=ranks,
        coordinates=coordinates_of(groups),
        compare_all=compare_all,
        signature=sign_all(signatures),
        block_nbytes=block_nbytes,
    )
    encoded = encode_plan(plan)
    digest = digest128(encoded)
    total = total_nbytes(plan)
    record = PlanRecord.make(plan, tables, assignments, signatures, compare_all=compare_all)
    return (
        EncodedPlan(plan, encoded),
        record,
        [
            _encode_share(each, digest, total_nbytes=total, num_tensors=len(plan.keys))
            for each in assignments
        ],
    )


def coordinates_of(groups: ProcessGroups) -> tuple[dict[str, int], ...]:
    """The coordinates of every rank, in the order of the control group."""
    layout = groups.layout
    return tuple(layout.coordinates(rank) for rank in groups.control.ranks)


def total_nbytes(plan: CommitPlan) -> int:
    """Bytes of all tensors of a plan, each counted once."""
    return int(plan.row_nbytes[plan.row_copy == 0].sum())


def _encode_share(
    assignment: RankShare, plan_digest: str, *, total_nbytes: int, num_tensors: int
) -> bytes:
    share = _Share(
        plan_digest=plan_digest,
        file=assignment.file,
        rows=pack_ints(assignment.rows),
        cuts=tuple((index, box.offset, box.shape) for index, box in assignment.cuts.items()),
        checks=pack_ints(assignment.checks),
        total_nbytes=total_nbytes,
        num_tensors=num_tensors,
    )
    return squeeze(msgspec.msgpack.encode(share))


def rank_plan(
    local: LocalState,
    assignment: RankShare,
    *,
    plan_digest: str,
    token: str,
    compare_all: bool,
    total_nbytes: int,
    num_tensors: int,
    commit: EncodedPlan | None,
    record: PlanRecord | None,
) -> RankPlan:
    """What a rank keeps of a plan, from its share: names and places of its chunks, its image."""
    rows = tuple(assignment.rows.tolist())
    offsets, extents = local.table.offset.tolist(), local.table.extent.tolist()
    entries, row_boxes, row_nbytes = [], [], []
    for place, row in enumerate(rows):
        key, source = local.keys[row], local.sources[row]
        shape = local.flat.leaves[key].shape
        ndim = len(shape)
        offset, extent = tuple(offsets[row][:ndim]), tuple(extents[row][:ndim])
        if place in assignment.cuts:
            offset, extent = assignment.cuts[place].offset, assignment.cuts[place].shape
        name = chunk_name(key, offset=offset, shape=extent, global_shape=shape)
        dtype = TORCH_TO_NAME[source.dtype]
        row_boxes.append(RowBox(dtype=dtype, shape=shape, offset=offset, extent=extent))
        entries.append(ImageEntry(name=name, dtype=dtype, shape=extent))
        row_nbytes.append(int(np.prod(extent, dtype=np.int64)) * source.element_size())
    return RankPlan(
        signature=local.signature,
        table=local.table,
        compare_all=compare_all,
        plan_digest=plan_digest,
        token=token,
        file=assignment.file,
        rows=rows,
        cuts=tuple(
            (index, box.relative_to(tuple(offsets[rows[index]][: box.ndim])))
            for index, box in assignment.cuts.items()
        ),
        checks=tuple(assignment.checks.tolist()),
        names=tuple(entry.name for entry in entries),
        image=layout_image(entries),
        row_nbytes=np.array(row_nbytes, dtype=np.int64),
        row_boxes=tuple(row_boxes),
        total_nbytes=total_nbytes,
        num_tensors=num_tensors,
        commit=commit,
        record=record,
    )


def _refuse_another(planned: RankClaims, found: RankClaims) -> None:
    """PlanError unless two tables claim the same boxes of the same tensors in the same order."""
    if planned.names != found.names:
        raise PlanError(
            "the state's keys, dtypes, shapes or layouts are not those that this save was planned "
            "for"
        )
    columns = ("tensor", "offset", "extent", "replica_set")
    same = all(np.array_equal(getattr(planned, n), getattr(found, n)) for n in columns)
    if not same or planned.replica_sets != found.replica_sets:
        raise PlanError(
            "the boxes that this rank holds, or who holds them beside it, are not those that this "
            "save was planned for"
        )

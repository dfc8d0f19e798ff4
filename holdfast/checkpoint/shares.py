"""Planning together: all tables to the coordinator, each rank's share back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.local import LocalState
from holdfast.checkpoint.plan import Assignment, make_plan
from holdfast.checkpoint.table import decode_table
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.image import Image, ImageEntry, chunk_name, layout_image
from holdfast.parallel import ProcessGroups
from holdfast.state.torch_dtypes import TORCH_TO_NAME
from holdfast.writer.records import CommitPlan, encode_plan
from holdfast.writer.write import RowPlace


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers one rank when it has planned."""

    plan_digest: str
    file: int
    rows: bytes
    checks: bytes
    total_nbytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A plan as one rank keeps it between saves.

    `signature`: the structure it was made for. `file`: number of this rank's data file, -1 for
    none. `rows`, `checks`: rows of its chunk table to write and to vouch for; `names`: of its
    chunks. `image`: the data file's layout, `row_nbytes`, `places`: of its rows. `total_nbytes`,
    `num_tensors`: of the whole checkpoint.
    `commit`: the whole plan and its bytes, on the coordinator only.
    """

    signature: str
    plan_digest: str
    file: int
    rows: tuple[int, ...]
    checks: tuple[int, ...]
    names: tuple[str, ...]
    image: Image
    row_nbytes: npt.NDArray[np.int64]
    places: tuple[RowPlace, ...]
    total_nbytes: int
    num_tensors: int
    commit: tuple[CommitPlan, bytes] | None


def plan_together(
    local: LocalState, *, groups: ProcessGroups, block_nbytes: int, compare_all: bool
) -> RankPlan:
    """Gather all tables, prove and elect on the coordinator, take this rank's share.

    `compare_all`: declared replicas are compared by content, too.

    Collective. Raises PlanError on all ranks, naming key, box and ranks. Cost: one gather of the
    tables, one scatter of the shares, O(rows) vector work on the coordinator.
    """
    control = groups.control
    gathered = control.gather(local.encoded, phase="save: tables")
    shares: list[bytes] | None = None
    commit: tuple[CommitPlan, bytes] | None = None
    error: Exception | None = None
    if gathered is not None:
        try:
            commit, shares = _plan_all(
                gathered, groups=groups, block_nbytes=block_nbytes, compare_all=compare_all
            )
        except Exception as caught:
            error = caught
            shares = [b""] * control.size
    data = control.scatter(shares, phase="save: shares")
    if not data:
        control.agree(error, phase="save: plan")
        raise PlanError("the coordinator could not plan the save")
    return _take_share(local, msgspec.msgpack.decode(data, type=_Share), commit)


def _plan_all(
    tables: Sequence[bytes], *, groups: ProcessGroups, block_nbytes: int, compare_all: bool
) -> tuple[tuple[CommitPlan, bytes], list[bytes]]:
    layout, ranks = groups.layout, groups.control.ranks
    plan, assignments = make_plan(
        [decode_table(data, rank=rank) for data, rank in zip(tables, ranks, strict=True)],
        ranks=ranks,
        coordinates=[
            {**layout.coordinate(rank), **layout.expert_coordinate(rank)} for rank in ranks
        ],
        compare_all=compare_all,
        signature=digest128("".join(digest128(data) for data in tables).encode()),
        block_nbytes=block_nbytes,
    )
    encoded = encode_plan(plan)
    digest = digest128(encoded)
    total = int(plan.row_nbytes[plan.row_copy == 0].sum())
    return (plan, encoded), [
        _encode_share(each, digest, total_nbytes=total, num_tensors=len(plan.keys))
        for each in assignments
    ]


def _encode_share(
    assignment: Assignment, plan_digest: str, *, total_nbytes: int, num_tensors: int
) -> bytes:
    return msgspec.msgpack.encode(
        _Share(
            plan_digest=plan_digest,
            file=assignment.file,
            rows=assignment.rows.astype(np.int64).tobytes(),
            checks=assignment.checks.astype(np.int64).tobytes(),
            total_nbytes=total_nbytes,
            num_tensors=num_tensors,
        )
    )


def _take_share(
    local: LocalState, share: _Share, commit: tuple[CommitPlan, bytes] | None
) -> RankPlan:
    rows = tuple(np.frombuffer(share.rows, dtype=np.int64).tolist())
    offsets = local.table.offset.tolist()
    entries, places = [], []
    for row in rows:
        key, source = local.keys[row], local.sources[row]
        shape = tuple(source.shape)
        name = chunk_name(
            key,
            offset=offsets[row][: len(shape)],
            shape=shape,
            global_shape=local.flat.leaves[key].shape,
        )
        places.append(
            RowPlace(
                dtype=TORCH_TO_NAME[source.dtype],
                shape=local.flat.leaves[key].shape,
                offset=tuple(offsets[row][: len(shape)]),
                extent=shape,
            )
        )
        entries.append(ImageEntry(name=name, dtype=TORCH_TO_NAME[source.dtype], shape=shape))
    return RankPlan(
        signature=local.signature,
        plan_digest=share.plan_digest,
        file=share.file,
        rows=rows,
        checks=tuple(np.frombuffer(share.checks, dtype=np.int64).tolist()),
        names=tuple(entry.name for entry in entries),
        image=layout_image(entries),
        row_nbytes=np.array([local.sources[r].nbytes for r in rows], dtype=np.int64),
        places=tuple(places),
        total_nbytes=share.total_nbytes,
        num_tensors=share.num_tensors,
        commit=commit,
    )

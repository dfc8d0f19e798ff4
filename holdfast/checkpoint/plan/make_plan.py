"""The plan of a save, from the claims of all ranks: proof, writers, and each rank's share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.arrays.boxes import Box
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.checkpoint.plan.assign_writers import HeldBoxes, assign_writers
from holdfast.checkpoint.plan.claims import RankClaims
from holdfast.checkpoint.plan.copies import stored_boxes
from holdfast.checkpoint.plan.proof import (
    AllClaims,
    distinct_boxes,
    join_claims,
    prove_exact_cover,
    prove_replicas,
)
from holdfast.format.manifest import Envelope
from holdfast.format.stored_copies import CopyPolicy
from holdfast.writer.records import CommitPlan


class RankShare(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The share of one rank in a plan; sent to it as it is."""

    file: int
    """Number of its data file, -1 for none."""
    rows: tuple[int, ...]
    """Rows of its own claims that it writes, in plan order."""
    cuts: dict[int, Box]
    """Index in `rows` -> what it writes of that row, in the tensor's coordinates; others whole."""
    checks: tuple[int, ...]
    """Rows of its own claims whose digest it reports for a comparison, in plan order."""


def make_plan(
    claims: Sequence[RankClaims],
    *,
    ranks: Sequence[int],
    coordinates: Sequence[dict[str, int]],
    signature: str,
    block_nbytes: int,
    compare_all: bool = False,
    copies: CopyPolicy | None = None,
    envelope: Envelope = "safetensors",
) -> tuple[CommitPlan, list[RankShare]]:
    """Prove ownership and assign the writers of every box, balanced by true bytes.

    Proven: one dtype and shape per key, an exact cover by its boxes, no contradicting holders.
    Replicas that nothing declares are compared by content, as whole boxes.

    Args:
        claims: Of all ranks, in control order.
        ranks: Whose claims they are.
        coordinates: Of each rank on its layout, by axis.
        signature: Of the structure on all ranks.
        block_nbytes: Bytes per digest.
        compare_all: Compare declared replicas, too, to find a rank with wrong memory.
        copies: What is stored more than once.
        envelope: Of the data files.

    Raises:
        PlanError: Naming key, box and ranks.

    Cost: O(rows) vector work, and the assignment of writers.
    """
    joined = join_claims(claims, ranks)
    held = distinct_boxes(joined, num_ranks=len(ranks))
    prove_exact_cover(joined, held, ranks)
    compare = prove_replicas(joined, held, ranks)
    check_group, check_row = _checked(held, held.num_holders > 1 if compare_all else compare)
    row, offset, extent, copy = _written(joined, held, ranks, copies or CopyPolicy())
    writers, file = np.unique(joined.position[row], return_inverse=True)
    plan = CommitPlan(
        signature=signature,
        block_nbytes=block_nbytes,
        layouts=joined.names.layouts,
        ranks=tuple(ranks),
        coordinates=tuple(coordinates),
        keys=joined.names.keys,
        dtypes=joined.names.dtypes,
        shapes=joined.names.shapes,
        tensor_layouts=joined.names.homes,
        placements=joined.names.placements,
        tensor_placements=joined.names.placed,
        writers=tuple(writers.tolist()),
        envelope=envelope,
        row_tensor=joined.tensor[row],
        row_file=file,
        row_offset=offset,
        row_extent=extent,
        row_copy=copy,
        **_holders(held, ranks, row),
        check_group=check_group,
        check_position=joined.position[check_row],
        check_tensor=joined.tensor[check_row],
    )
    return plan, _shares(joined, plan, row, check_row)


def _written(
    claims: AllClaims, boxes: HeldBoxes, ranks: Sequence[int], copies: CopyPolicy
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Boxes to write, by writer, tensor and offset: row of the claims, offset, extent, copy."""
    held, within, copy, has_copies = stored_boxes(claims, boxes, ranks, copies)
    pieces = assign_writers(held, is_whole=has_copies)
    row = held.row[held.holder_ptr[pieces.box] + pieces.holder]
    offset = claims.offset[row] + within[pieces.box] + pieces.offset
    # Rows of a file lie in the order of tensors and offsets, whatever order the claims came in.
    order = np.lexsort((*offset.T[::-1], claims.tensor[row], claims.position[row]))
    return row[order], offset[order], pieces.extent[order], copy[pieces.box][order]


def _holders(held: HeldBoxes, ranks: Sequence[int], row: IntArray) -> dict[str, IntArray]:
    """Who holds the box that each written row is, or is a piece or a copy of.

    Args:
        held: The distinct boxes of the claims.
        ranks: Whose claims they are, by position.
        row: (n,) the row of the claims that each is written from.

    Returns:
        The columns of the plan: (n,) number of its set of holders, (sets + 1,) where the ranks of
        each set start, and the ranks.
    """
    number, of_set, position = held.holder_sets()
    box = np.zeros(len(held.row), dtype=np.int64)
    box[held.row] = np.repeat(np.arange(len(held.nbytes)), held.num_holders)
    rank = np.array(ranks, dtype=np.int64)[position]
    num_sets = int(of_set[-1]) + 1 if len(of_set) else 0
    # Positions ascend within a set; ranks need not.
    return {
        "row_holders": number[box[row]],
        "holder_ptr": np.searchsorted(of_set, np.arange(num_sets + 1)),
        "holder": rank[np.lexsort((rank, of_set))],
    }


def _checked(held: HeldBoxes, compare: BoolArray) -> tuple[IntArray, IntArray]:
    """(group, row of the claims) of every holder of a box that is compared by content."""
    box = np.repeat(np.arange(len(compare)), held.num_holders)
    chosen = compare[box]
    return box[chosen], held.row[chosen]


def _shares(
    claims: AllClaims, plan: CommitPlan, row: IntArray, check_row: IntArray
) -> list[RankShare]:
    """Return the share of each rank in the plan, in the order of ranks."""
    num_ranks = len(plan.ranks)
    rows = _split(claims.local[row], claims.position[row], num_ranks)
    checks = _split(claims.local[check_row], plan.check_position, num_ranks)
    cuts: list[dict[int, Box]] = [{} for _ in range(num_ranks)]
    position = claims.position[row]
    # Rows lie rank by rank, so that a row number minus the first of its rank is the index in
    # `rows`.
    first = np.searchsorted(position, np.arange(num_ranks))
    # A row that is smaller than the claim that it is taken from is cut.
    for i in np.flatnonzero((plan.row_extent != claims.extent[row]).any(axis=1)).tolist():
        # Columns are as wide as the widest tensor; what is beyond this one's dims is padding.
        ndim = len(plan.shapes[plan.row_tensor[i]])
        box = Box(
            tuple(plan.row_offset[i, :ndim].tolist()), tuple(plan.row_extent[i, :ndim].tolist())
        )
        cuts[position[i]][i - int(first[position[i]])] = box
    file_of = {writer: file for file, writer in enumerate(plan.writers)}
    return [
        RankShare(file=file_of.get(p, -1), rows=rows[p], cuts=cuts[p], checks=checks[p])
        for p in range(num_ranks)
    ]


def _split(values: IntArray, position: IntArray, num_ranks: int) -> list[tuple[int, ...]]:
    """The values of each rank, in their order."""
    # Stable, since the order within a rank is the order of its file.
    order = np.argsort(position, kind="stable")
    ends = np.searchsorted(position[order], np.arange(1, num_ranks))
    return [tuple(part.tolist()) for part in np.split(values[order], ends)]

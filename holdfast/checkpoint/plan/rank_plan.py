"""The state that one rank brings to a plan, and the share that it takes from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.arrays.types import IntArray
from holdfast.checkpoint.plan.claims import ClaimedRows, RankClaims
from holdfast.checkpoint.plan.make_plan import RankShare
from holdfast.errors import PlanError
from holdfast.format.envelopes import layout_in
from holdfast.format.index import Image, ImageEntry, chunk_name
from holdfast.format.manifest import Envelope
from holdfast.format.names import data_file
from holdfast.state.leaves import FlatState
from holdfast.state.tensor_elements import TORCH_TO_NAME
from holdfast.state.tensor_memory import TensorMemory
from holdfast.writer.records import EncodedPlan, PlannedFile, RowBox, column


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """One rank's state, flattened for a save."""

    flat: FlatState
    table: RankClaims
    """The claims of the rank."""
    rows: ClaimedRows
    """The place of the tensor of each row of `table`."""
    held: IntArray
    """(n,) of each row of `table`: position in `flat.held` of what it is the whole of, or -1."""
    encoded: bytes
    """The table's bytes."""
    names: str
    """Digest of the table's names."""
    signature: str
    """Digest of everything that decides what is stored and by whom."""
    values: bytes
    """The encoded tree as JSON, which is not planned and may change with every save."""

    def source(self, row: int) -> torch.Tensor:
        """The tensor of a row of `table`."""
        return self.flat.local(*self.rows[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """A plan as one rank keeps it between saves."""

    signature: str
    """Of the structure that it was made for."""
    tensors: str
    """Digest of the rank's names in that structure."""
    claims: bytes
    """The rank's encoded claims in that structure."""
    compare_all: bool
    """True if declared replicas are compared, too."""
    plan_digest: str
    """Equal on ranks that hold the same plan."""
    kept: str
    """Digest of the file that the plan was found in; empty if the ranks have made it together."""
    file: PlannedFile
    """This rank's data file, without a name if the rank writes no file."""
    rows: tuple[int, ...]
    """Rows of its claims that it writes, in plan order."""
    cuts: tuple[tuple[int, tuple[slice, ...]], ...]
    """Index in `rows` and slices of those rows of which only a part is written."""
    checks: tuple[int, ...]
    """Rows of its claims whose digests it reports."""
    names: tuple[str, ...]
    """Of the chunks that it writes."""
    image: Image
    """Layout of its data file."""
    row_boxes: tuple[RowBox, ...]
    """The box of its tensor that each row of `rows` is."""
    total_nbytes: int
    """Of the whole checkpoint, each tensor once."""
    copies_nbytes: int
    """Of the whole checkpoint, what copies add."""
    num_tensors: int
    """Of the whole checkpoint."""
    commit: EncodedPlan | None
    """The plan of all ranks; on the coordinator only."""

    @property
    def identity(self) -> str:
        """What all ranks have to agree on before its use: that they hold the same plan."""
        return f"{self.plan_digest} {self.kept}"

    def sources(self, local: LocalState) -> TensorMemory:
        """The tensor to write for each row, in plan order; views, nothing is copied.

        The state is compared with the one the plan was made for, whatever the signatures are.

        Raises:
            PlanError: The state is another one.
        """
        if (local.names, local.encoded) != (self.tensors, self.claims):
            what = "the boxes that this rank holds, or which ranks hold them too,"
            if local.names != self.tensors:
                what = "the state's keys, dtypes, shapes or layouts"
            raise PlanError(f"{what} are not those that this save was planned for")
        held = local.held[np.array(self.rows, dtype=np.int64)]
        if not self.cuts and (held >= 0).all():
            known = local.flat.memory(held)
            if known is not None:
                return known
        sources = local.flat.locals([local.rows[row] for row in self.rows])
        for index, where in self.cuts:
            sources[index] = sources[index][where]
        return TensorMemory(sources)


def rank_plan(
    local: LocalState,
    share: RankShare,
    *,
    plan_digest: str,
    compare_all: bool,
    total_nbytes: int,
    copies_nbytes: int,
    num_tensors: int,
    commit: EncodedPlan | None,
    kept: str,
    envelope: Envelope = "safetensors",
) -> RankPlan:
    """Return what a rank keeps of a plan: names and boxes of its chunks, and its image."""
    offsets, extents = local.table.offset.tolist(), local.table.extent.tolist()
    entries, row_boxes, row_nbytes, cuts = [], [], [], []
    for index, row in enumerate(share.rows):
        (key, _), source = local.rows[row], local.source(row)
        shape = local.flat.leaves[key].shape
        ndim = len(shape)
        offset, extent = tuple(offsets[row][:ndim]), tuple(extents[row][:ndim])
        if index in share.cuts:
            # A cut is in the tensor's coordinates; slices of the row's source start at its box.
            base, (offset, extent) = offset, (share.cuts[index].offset, share.cuts[index].shape)
            starts = [o - b for o, b in zip(offset, base, strict=True)]
            cut = tuple(slice(s, s + e) for s, e in zip(starts, extent, strict=True))
            cuts.append((index, cut))
        name = chunk_name(key, offset=offset, shape=extent, global_shape=shape)
        dtype = TORCH_TO_NAME[source.dtype]
        row_boxes.append(RowBox(dtype=dtype, shape=shape, offset=offset, extent=extent))
        entries.append(ImageEntry(name=name, dtype=dtype, shape=extent))
        row_nbytes.append(math.prod(extent) * source.element_size())
    image = layout_in(envelope, entries)
    writes = share.file >= 0
    return RankPlan(
        signature=local.signature,
        tensors=local.names,
        claims=local.encoded,
        compare_all=compare_all,
        plan_digest=plan_digest,
        kept=kept,
        file=PlannedFile(
            name=data_file(share.file, envelope=envelope) if writes else None,
            header_nbytes=image.envelope_nbytes if writes else 0,
            starts=column(image.starts),
            row_nbytes=column(row_nbytes),
        ),
        rows=share.rows,
        cuts=tuple(cuts),
        checks=share.checks,
        names=tuple(entry.name for entry in entries),
        image=image,
        row_boxes=tuple(row_boxes),
        total_nbytes=total_nbytes,
        copies_nbytes=copies_nbytes,
        num_tensors=num_tensors,
        commit=commit,
    )

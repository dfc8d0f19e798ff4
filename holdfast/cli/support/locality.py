"""Where the bytes lie that each rank needs under the saved layout, and which are stored twice.

From manifest and index alone, no data file is opened; who needs what is inferred
(`cli/support/holders.py`). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import unique_boxes
from holdfast.arrays.types import BoolArray, IntArray
from holdfast.cli.support.holders import BASES, SavedPlacement, kind_of, parts_of

_MAX_KINDS = 12
"""Kinds of tensors of one part that are listed each; names of plain dicts may all differ."""
OTHER_KINDS = "(other names)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocality:
    """Where the bytes lie that one rank needs; all counted once, as whole chunks."""

    rank: int
    own_nbytes: int
    """In the file that the rank wrote itself."""
    other_nbytes: int
    """In files of other ranks alone."""
    unsure_nbytes: int
    """Of `other_nbytes`: of tensors whose holders are not sure."""
    perhaps_nbytes: int
    """Not counted above: of tensors whose holders are not sure; the rank may need them, too."""
    num_files: int
    """Data files to open for all of it, its own included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKind:
    """The copies of all tensors of one part with one last name."""

    part: str
    kind: str
    num_tensors: int
    nbytes: int
    """Of all tensors once."""
    stored_nbytes: int
    """With all copies."""
    min_copies: int
    max_copies: int
    """Times that a chunk is stored, the least and the most."""

    @property
    def extra_nbytes(self) -> int:
        """What the copies beyond the first take."""
        return self.stored_nbytes - self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BasisCount:
    """How many tensors have holders that are known in one way, and their bytes."""

    basis: str
    meaning: str
    num_tensors: int
    nbytes: int


def rank_localities(saved: SavedPlacement) -> Iterator[RankLocality]:
    """One for each rank of the saved layouts, ascending.

    A chunk that is stored several times is counted once, where a load prefers to read it: in the
    rank's own file, else in one that it opens anyway, else in that of the primary.
    """
    nbytes = saved.index.nbytes[saved.rows]
    is_unsure = np.array([not holders.is_sure for holders in saved.holders], dtype=np.bool_)
    is_unsure = is_unsure[saved.boxes.tensor] if len(is_unsure) else np.zeros(0, dtype=np.bool_)
    writers = np.array([file.writer for file in saved.manifest.files], dtype=np.int64)
    copies = _copies(saved)
    for rank in saved.ranks:
        needed = saved.is_held(rank)
        file = saved.index.file[saved.rows]
        mine = writers[copies[:, 1]] == rank if len(copies) else np.zeros(0, dtype=np.bool_)
        # A rank stores copies of what it holds, whatever else is inferred.
        needed[copies[mine, 0]] = True
        file[copies[mine, 0]] = copies[mine, 1]
        _prefer_open(file, copies, needed, is_own=writers == rank)
        is_own = writers[file] == rank if len(file) else needed
        other = needed & ~is_own
        yield RankLocality(
            rank=rank,
            own_nbytes=int(nbytes[needed & is_own].sum()),
            other_nbytes=int(nbytes[other].sum()),
            unsure_nbytes=int(nbytes[other & is_unsure].sum()),
            perhaps_nbytes=int(nbytes[~needed & is_unsure].sum()),
            num_files=len(np.unique(file[needed])),
        )


def _prefer_open(file: IntArray, copies: IntArray, needed: BoolArray, *, is_own: BoolArray) -> None:
    """Move chunks that are not in the rank's own file to files that it opens for others anyway."""
    if not len(copies):
        return
    once = needed.copy()
    once[copies[:, 0]] = False
    is_open = is_own.copy()
    is_open[file[once]] = True
    for primary, other in copies[needed[copies[:, 0]]].tolist():
        if not is_open[file[primary]] and is_open[other]:
            file[primary] = other


def _copies(saved: SavedPlacement) -> IntArray:
    """(m, 2) of each further copy: the number of its primary, and the copy's file."""
    rows = np.flatnonzero((saved.index.copy != 0) & (saved.index.nbytes > 0))
    table = saved.index.take(rows).padded(1)
    return np.column_stack([saved.boxes.find(table), saved.index.file[rows]])


def stored_kinds(saved: SavedPlacement) -> list[StoredKind]:
    """Copies by part and kind, in the order of the manifest; rare names of a part are summed up."""
    tensors = saved.manifest.tensors
    parts = parts_of(saved.manifest)
    keys = [(parts.get(info.key, ""), kind_of(info.key)) for info in tensors]
    kinds: dict[str, set[str]] = {}
    for part, kind in keys:
        kinds.setdefault(part, set()).add(kind)
    keys = [(p, k if len(kinds[p]) <= _MAX_KINDS else OTHER_KINDS) for p, k in keys]
    stored = np.bincount(saved.index.tensor, saved.index.nbytes, len(tensors)).astype(np.int64)
    least, most = num_copies(saved)
    groups: dict[tuple[str, str], list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return [
        StoredKind(
            part=part,
            kind=kind,
            num_tensors=len(numbers),
            nbytes=sum(tensors[number].nbytes for number in numbers),
            stored_nbytes=int(stored[numbers].sum()),
            min_copies=int(least[numbers].min()),
            max_copies=int(most[numbers].max()),
        )
        for (part, kind), numbers in groups.items()
    ]


def num_copies(saved: SavedPlacement) -> tuple[IntArray, IntArray]:
    """(tensors,) the least and the most times that a chunk of each is stored."""
    index, num_tensors = saved.index, len(saved.manifest.tensors)
    boxes, number = unique_boxes(index.take(np.flatnonzero(index.nbytes > 0)).padded(1))
    counts = np.bincount(number, minlength=len(boxes))
    least = np.full(num_tensors, np.iinfo(np.int64).max)
    most = np.zeros(num_tensors, dtype=np.int64)
    np.minimum.at(least, boxes.tensor, counts)
    np.maximum.at(most, boxes.tensor, counts)
    return np.minimum(least, most), most


def basis_counts(saved: SavedPlacement) -> list[BasisCount]:
    """How the holders of the tensors are known: the ways that occur, in the order of `BASES`."""
    groups: dict[str, list[int]] = {}
    for number, holders in enumerate(saved.holders):
        groups.setdefault(holders.basis, []).append(number)
    tensors = saved.manifest.tensors
    return [
        BasisCount(
            basis=basis,
            meaning=meaning,
            num_tensors=len(groups[basis]),
            nbytes=sum(tensors[number].nbytes for number in groups[basis]),
        )
        for basis, meaning in BASES.items()
        if basis in groups
    ]

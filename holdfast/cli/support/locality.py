"""Where the bytes lie that each rank needs under the saved layout, and which are stored twice.

From manifest and index alone: no data file is opened. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.box_table import unique_boxes
from holdfast.arrays.distinct import distinct
from holdfast.arrays.types import IntArray
from holdfast.cli.support.holders import SavedPlacement, kind_of, parts_of, placement_in_words

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
    num_files: int
    """Data files to open for all of it, its own included."""
    nbytes_by_part: dict[str, int]
    """Part of the state -> bytes, of all parts in the order of the manifest; "" has what no part
    refers to, if there is any."""


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
        """Return what the copies beyond the first take."""
        return self.stored_nbytes - self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCount:
    """How many tensors are placed in one way, and their bytes."""

    placement: str
    meaning: str
    num_tensors: int
    nbytes: int


def rank_localities(saved: SavedPlacement) -> Iterator[RankLocality]:
    """One for each rank of the saved layouts, ascending.

    A chunk that is stored several times is counted once, in the file that a load reads it from.
    """
    index = saved.index
    writers = np.array([file.writer for file in saved.manifest.files], dtype=np.int64)
    parts = parts_of(saved.manifest)
    of_tensor = [parts.get(info.key, "") for info in saved.manifest.tensors]
    names = list(dict.fromkeys([*saved.manifest.parts, *of_tensor]))
    number_of = {name: number for number, name in enumerate(names)}
    part = np.array([number_of[name] for name in of_tensor], dtype=np.int64)
    for rank in saved.ranks:
        rows = saved.rows_read(rank)
        is_own = writers[index.file[rows]] == rank
        by_part = np.zeros(len(names), dtype=np.int64)
        np.add.at(by_part, part[index.tensor[rows]], index.nbytes[rows])
        yield RankLocality(
            rank=rank,
            own_nbytes=int(index.nbytes[rows[is_own]].sum()),
            other_nbytes=int(index.nbytes[rows[~is_own]].sum()),
            num_files=len(distinct(index.file[rows])),
            nbytes_by_part=dict(zip(names, by_part.tolist(), strict=True)),
        )


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


def placement_counts(saved: SavedPlacement) -> list[PlacementCount]:
    """Return how the tensors are placed, in the order of the manifest's placements."""
    nbytes: dict[int, list[int]] = {number: [] for number in range(len(saved.manifest.placements))}
    for info in saved.manifest.tensors:
        nbytes[info.placement].append(info.nbytes)
    counts = []
    for placement, sizes in zip(saved.manifest.placements, nbytes.values(), strict=True):
        words, meaning = placement_in_words(placement)
        if sizes:
            counts.append(
                PlacementCount(
                    placement=words, meaning=meaning, num_tensors=len(sizes), nbytes=sum(sizes)
                )
            )
    return counts

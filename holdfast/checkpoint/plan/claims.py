"""Claims: which boxes of which tensors one rank holds, and the signature of that structure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.arrays.packed_ints import (
    MAX_NBYTES,
    PackedBoxes,
    pack_boxes,
    pack_ints,
    squeeze,
    unpack_boxes,
    unpack_ints,
    unsqueeze,
)
from holdfast.arrays.types import IntArray
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.manifest import PER_COORDINATE, LayoutInfo, PlacementInfo
from holdfast.parallel.layout import Layout
from holdfast.parallel.rank_ranges import RankRanges
from holdfast.state.leaves import FlatState, ReplicaSet

UNDECLARED = -1
"""In place of a number: of the replica set of a box, or the placement of a tensor, that this rank
does not declare."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankClaims(BoxTable):
    """The holdings of one rank: a row for each box, `tensor` numbered as in `names`."""

    # As bytes, because most ranks have the same names: equal ones are compared and sent by digest,
    # and decoded once.
    names: bytes
    """Encoded `TensorNames`; equal bytes on ranks that hold the same tensors."""
    labels: tuple[str, ...] = ()
    """The coordinates of this rank that stand in its keys."""
    replica_set: IntArray
    """(n,) position in `replica_sets`, or UNDECLARED."""
    replica_sets: tuple[ReplicaSet, ...]


class TensorNames(msgspec.Struct, frozen=True):
    """Keys, dtypes, global shapes of tensors, the layouts they live on, and their placements there.

    `homes[i]` is the position in `layouts` of tensor i's layout, `placed[i]` that in `placements`
    of how its boxes follow from coordinates, or UNDECLARED on a rank that holds none of it. Keys of
    values per coordinate are without the coordinates, so that ranks which differ in these alone
    have equal names: `places[i]` is where in key i which of the rank's labels is inserted, in
    order.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[LayoutInfo, ...]
    homes: tuple[int, ...]
    placements: tuple[PlacementInfo, ...]
    placed: tuple[int, ...]
    places: dict[int, tuple[tuple[int, int], ...]] = msgspec.field(default_factory=dict)

    def key(self, number: int, labels: Sequence[str]) -> str:
        """The key of a tensor on the rank with these labels."""
        key = self.keys[number]
        for position, label in reversed(self.places.get(number, ())):
            key = key[:position] + labels[label] + key[position:]
        return key


_ClaimsMessage = tuple[
    str, tuple[str, ...], PackedBoxes, bytes, tuple[tuple[RankRanges, RankRanges], ...]
]
"""Digest of the names, labels, boxes with distances in place of tensor numbers, replica set of each
row, replicas and span of each replica set."""


ClaimedRows = list[tuple[str, int]]
"""Of each row of the claims: key of the leaf, and which of its local tensors the row is of."""


def claims_of(flat: FlatState) -> tuple[RankClaims, ClaimedRows]:
    """Return what a flattened state claims, and where the tensor of each row is."""
    leaves = list(flat.leaves.values())
    layouts: dict[Layout, int] = {}
    labels: dict[str, int] = {}
    places: dict[int, tuple[tuple[int, int], ...]] = {}
    keys = [leaf.key for leaf in leaves]
    for number, key in enumerate(keys if flat.labels else ()):
        if key in flat.labels:
            keys[number], places[number] = _without_labels(key, flat.labels[key], labels)
    placements: dict[PlacementInfo, int] = {}
    # `homes` before `layouts`, `placed` before `placements`: working them out fills the dicts.
    names = TensorNames(
        keys=tuple(keys),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        shapes=tuple(leaf.shape for leaf in leaves),
        homes=tuple(layouts.setdefault(leaf.layout, len(layouts)) for leaf in leaves),
        layouts=tuple(layout.to_info() for layout in layouts),
        placed=_number_placements([leaf.placement for leaf in leaves], places, placements),
        placements=tuple(placements),
        places=places,
    )
    replica_sets: dict[ReplicaSet, int] = {}
    tensor: list[int] = []
    boxes: list[Box] = []
    replica_set: list[int] = []
    rows: ClaimedRows = []
    for number, leaf in enumerate(leaves):
        declared = UNDECLARED
        # Numbered in the order of first use, so that equal states give equal bytes, hence
        # signatures.
        if leaf.replica_set is not None:
            declared = replica_sets.setdefault(leaf.replica_set, len(replica_sets))
        is_empty = 0 in leaf.shape
        for i, box in enumerate(leaf.boxes):
            # Boxes without elements are left out, unless the whole tensor has none: it is stored
            # all the same, and somebody must write its (empty) chunk.
            if is_empty or 0 not in box.shape:
                tensor.append(number)
                boxes.append(box)
                replica_set.append(declared)
                rows.append((leaf.key, i))
    # As wide as this rank's tensors need; ranks with other tensors may have other widths.
    num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
    table = BoxTable.from_boxes(tensor, boxes, num_dims=num_dims)
    claims = RankClaims(
        tensor=table.tensor,
        offset=table.offset,
        extent=table.extent,
        names=msgspec.msgpack.encode(names),
        labels=tuple(labels),
        replica_set=np.array(replica_set, dtype=np.int64),
        replica_sets=tuple(replica_sets),
    )
    return claims, rows


def _number_placements(
    declared: Sequence[PlacementInfo | None],
    labelled: Collection[int],
    placements: dict[PlacementInfo, int],
) -> tuple[int, ...]:
    """The number of each tensor's placement; UNDECLARED on a rank that is not on its mesh."""
    return tuple(
        UNDECLARED
        if each is None
        else placements.setdefault(PER_COORDINATE if i in labelled else each, len(placements))
        for i, each in enumerate(declared)
    )


def _without_labels(
    key: str, spans: Sequence[tuple[int, int]], labels: dict[str, int]
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """A key without coordinates, and where which label is inserted; `labels` are numbered."""
    where: list[tuple[int, int]] = []
    removed = 0
    for start, length in spans:
        label = key[start - removed : start - removed + length]
        key = key[: start - removed] + key[start - removed + length :]
        where.append((start - removed, labels.setdefault(label, len(labels))))
        removed += length
    return key, tuple(where)


def encode_claims(claims: RankClaims) -> bytes:
    """The claims as bytes, with only the digest of their names; equal claims give equal bytes."""
    message: _ClaimsMessage = (
        digest128(claims.names),
        claims.labels,
        # Mostly ascending by one: distances compress to almost nothing.
        pack_boxes(replace(claims, tensor=np.diff(claims.tensor, prepend=0))),
        pack_ints(claims.replica_set),
        tuple(
            (RankRanges.of(each.replicas), RankRanges.of(each.span)) for each in claims.replica_sets
        ),
    )
    return msgspec.msgpack.encode(message)


def decode_claims(data: bytes, *, rank: int, names: Mapping[str, bytes]) -> RankClaims:
    """The claims of `encode_claims`.

    Args:
        data: What the rank sent.
        rank: Who sent it, for messages.
        names: Encoded names by digest, of all ranks.

    Raises:
        PlanError: The bytes are not claims, or their names are missing; the rank is named.
    """
    try:
        digest, labels, packed, replica_set, replica_sets = decode_msgpack_as(data, _ClaimsMessage)
        boxes = unpack_boxes(packed)
        return RankClaims(
            tensor=np.cumsum(boxes.tensor),
            offset=boxes.offset,
            extent=boxes.extent,
            names=names[digest],
            labels=labels,
            replica_set=unpack_ints(replica_set),
            replica_sets=tuple(ReplicaSet(*each) for each in replica_sets),
        )
    except (LookupError, ValueError) as error:
        raise PlanError(f"rank {rank} sent claims that cannot be read: {error!r}") from error


def claims_message(encoded: bytes, names: bytes | None) -> bytes:
    """Return the message to the coordinator: the encoded claims, and the names if asked for.

    Ranks with equal names send them once: `names` is None on all of them but one.

    Cost: at most 8 bytes for each number that does not fit fewer, before compression; typically
    below 10 bytes a row.
    """
    return squeeze(msgspec.msgpack.encode((encoded, names or b"")))


def read_claims_messages(
    messages: Sequence[bytes], ranks: Sequence[int], *, max_nbytes: int = MAX_NBYTES
) -> tuple[list[bytes], dict[str, bytes]]:
    """The encoded claims of all ranks, and the names by digest; of `max_nbytes` at most together.

    Raises:
        PlanError: A message is not one of `claims_message`; its sender is named.
    """
    claims: list[bytes] = []
    names: dict[str, bytes] = {}
    for rank, data in zip(ranks, messages, strict=True):
        try:
            plain = unsqueeze(data, max_nbytes=max_nbytes)
            own, own_names = decode_msgpack_as(plain, tuple[bytes, bytes])
        except ValueError as error:
            raise PlanError(f"rank {rank} sent claims that cannot be read: {error}") from error
        claims.append(own)
        max_nbytes = max(max_nbytes - len(plain), 1)  # 0 would mean no limit
        # Filed by what the bytes hash to here, not by what the sender says: names cannot be mixed
        # up.
        if own_names:
            names[digest128(own_names)] = own_names
    return claims, names


def decode_names(names: bytes) -> TensorNames:
    """Keys, dtypes and shapes of claims."""
    return decode_msgpack_as(names, TensorNames)


def signature(encoded: bytes, *, choices: Sequence[str]) -> str:
    """The structure signature of one rank: 32 hexadecimal digits.

    Covers everything that decides what is stored and by whom: the encoded claims (names by digest:
    keys, dtypes, shapes, layouts; boxes, replica sets) and `choices` (layout and storage options).
    """
    # The claims are hashed first, so that a choice cannot be mistaken for a part of them.
    return digest128("\0".join([digest128(encoded), *choices]).encode())

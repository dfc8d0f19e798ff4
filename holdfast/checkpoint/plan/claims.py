"""Claims: which boxes of which tensors one rank holds, and the signature of that structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.arrays.packed_ints import (
    PackedBoxes,
    pack_boxes,
    pack_ints,
    squeeze,
    unpack_boxes,
    unpack_ints,
    unsqueeze,
)
from holdfast.arrays.types import IntArray
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.manifest import LayoutInfo
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, ReplicaSet, TensorLeaf

UNDECLARED = -1
"""Number of the replica set of a box whose placement nothing declares."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankClaims(BoxTable):
    """What one rank holds: a row for each box, `tensor` numbered as in `names`."""

    # As bytes, because most ranks have the same names: equal ones are compared and sent by digest,
    # and decoded once.
    names: bytes
    """Encoded `TensorNames`; equal bytes on ranks that hold the same tensors."""
    replica_set: IntArray
    """(n,) position in `replica_sets`, or UNDECLARED."""
    replica_sets: tuple[ReplicaSet, ...]


class TensorNames(msgspec.Struct, frozen=True):
    """Keys, dtypes, global shapes of tensors, and the layouts they live on.

    `homes[i]` is the position in `layouts` of tensor i's layout.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[LayoutInfo, ...]
    homes: tuple[int, ...]


_ClaimsMessage = tuple[str, PackedBoxes, bytes, tuple[ReplicaSet, ...]]
"""Digest of the names, boxes, replica set of each row, replica sets."""


def claims_of(flat: FlatState) -> tuple[RankClaims, list[torch.Tensor]]:
    """What a flattened state claims, and the local tensor behind each row."""
    leaves = list(flat.leaves.values())
    layouts: dict[Layout, int] = {}
    # `homes` goes before `layouts`: working it out is what fills the dict.
    names = TensorNames(
        keys=tuple(leaf.key for leaf in leaves),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        shapes=tuple(leaf.shape for leaf in leaves),
        homes=tuple(layouts.setdefault(leaf.layout, len(layouts)) for leaf in leaves),
        layouts=tuple(layout_info(layout) for layout in layouts),
    )
    replica_sets: dict[ReplicaSet, int] = {}
    tensor: list[int] = []
    boxes: list[Box] = []
    replica_set: list[int] = []
    sources: list[torch.Tensor] = []
    for number, leaf in enumerate(leaves):
        declared = UNDECLARED
        # Numbered in the order of first use, so that equal states give equal bytes, hence
        # signatures.
        if leaf.replica_set is not None:
            declared = replica_sets.setdefault(leaf.replica_set, len(replica_sets))
        for box, local in claimed_boxes(leaf):
            tensor.append(number)
            boxes.append(box)
            replica_set.append(declared)
            sources.append(local)
    # As wide as this rank's tensors need; ranks with other tensors may have other widths.
    num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
    table = BoxTable.from_boxes(tensor, boxes, num_dims=num_dims)
    claims = RankClaims(
        tensor=table.tensor,
        offset=table.offset,
        extent=table.extent,
        names=msgspec.msgpack.encode(names),
        replica_set=np.array(replica_set, dtype=np.int64),
        replica_sets=tuple(replica_sets),
    )
    return claims, sources


def claimed_boxes(leaf: TensorLeaf) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a leaf that get a row, with their local tensors.

    Boxes without elements are left out, unless the whole tensor has none: it is stored all the
    same, and somebody must write its (empty) chunk.
    """
    pairs = zip(leaf.boxes, leaf.locals, strict=True)
    is_empty = 0 in leaf.shape
    return [(box, local) for box, local in pairs if is_empty or 0 not in box.shape]


def same_claims(one: TensorLeaf, other: TensorLeaf) -> bool:
    """Whether two leaves have the same rows in the claims, whatever memory they are of."""
    return (
        one.key == other.key
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.replica_set == other.replica_set
        # Identity first: leaves that are made again mostly share these objects.
        and (one.boxes is other.boxes or one.boxes == other.boxes)
        and (one.layout is other.layout or one.layout == other.layout)
    )


def layout_info(layout: Layout) -> LayoutInfo:
    """A layout as the manifest keeps it."""
    # Spelled out, because the manifest keeps them: a new field of `Layout` must not change the
    # format by itself.
    names = ("tp", "cp", "ep", "dp", "pp", "expt_tp", "replicas")
    axes = {name: getattr(layout, name) for name in names}
    return LayoutInfo(name=layout.name, axes=axes, order=layout.order, ranks=list(layout.ranks))


def encode_claims(claims: RankClaims) -> bytes:
    """The claims as bytes, with only the digest of their names; equal claims give equal bytes."""
    message: _ClaimsMessage = (
        digest128(claims.names),
        pack_boxes(claims),
        pack_ints(claims.replica_set),
        claims.replica_sets,
    )
    return msgspec.msgpack.encode(message)


def decode_claims(data: bytes, *, rank: int, names: Mapping[str, bytes]) -> RankClaims:
    """The claims of `encode_claims`.

    Args:
        data: What the rank sent.
        rank: Who sent it, for messages.
        names: Encoded names by digest, of all ranks.

    Raises:
        PlanError: The bytes are no claims, or their names are missing; the rank is named.
    """
    try:
        digest, packed, replica_set, replica_sets = msgspec.msgpack.decode(
            data, type=_ClaimsMessage
        )
        boxes = unpack_boxes(packed)
        return RankClaims(
            tensor=boxes.tensor,
            offset=boxes.offset,
            extent=boxes.extent,
            names=names[digest],
            replica_set=unpack_ints(replica_set),
            replica_sets=replica_sets,
        )
    except (msgspec.DecodeError, LookupError, ValueError) as error:
        raise PlanError(f"rank {rank} sent claims that cannot be read: {error!r}") from error


def claims_message(encoded: bytes, names: bytes | None) -> bytes:
    """What a rank sends to the coordinator: its encoded claims, and its names if it is to.

    Ranks with equal names send them once: `names` is None on all of them but one.

    Cost: at most 8 bytes for each number that does not fit fewer, before compression; typically
    below 10 bytes a row.
    """
    return squeeze(msgspec.msgpack.encode((encoded, names or b"")))


def read_claims_messages(
    messages: Sequence[bytes], ranks: Sequence[int]
) -> tuple[list[bytes], dict[str, bytes]]:
    """The encoded claims of all ranks, and the names by digest.

    Raises:
        PlanError: A message is not one of `claims_message`; its sender is named.
    """
    claims: list[bytes] = []
    names: dict[str, bytes] = {}
    for rank, data in zip(ranks, messages, strict=True):
        try:
            own, own_names = msgspec.msgpack.decode(unsqueeze(data), type=tuple[bytes, bytes])
        except (msgspec.DecodeError, ValueError) as error:
            raise PlanError(f"rank {rank} sent claims that cannot be read: {error}") from error
        claims.append(own)
        # Filed by what the bytes hash to here, not by what the sender says: names cannot be mixed
        # up.
        if own_names:
            names[digest128(own_names)] = own_names
    return claims, names


def decode_names(names: bytes) -> TensorNames:
    """Keys, dtypes and shapes of claims."""
    return msgspec.msgpack.decode(names, type=TensorNames)


def signature(encoded: bytes, *, choices: Sequence[str]) -> str:
    """The structure signature of one rank: 32 hexadecimal digits.

    Covers everything that decides what is stored and by whom: the encoded claims (names by digest:
    keys, dtypes, shapes, layouts; boxes, replica sets) and `choices` (layout and storage options).
    """
    # The claims are hashed first, so that a choice cannot be mistaken for a part of them.
    return digest128("\0".join([digest128(encoded), *choices]).encode())

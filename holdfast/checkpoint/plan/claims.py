"""Chunk tables: what one rank holds, as arrays, and the signature of that structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast.arrays.packed_ints import pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.manifest import LayoutInfo
from holdfast.parallel.layout import Layout
from holdfast.state.leaves import FlatState, ReplicaSet, TensorLeaf

UNDECLARED = -1
"""Replica set of a row whose placement nothing declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """One rank's claim: rows of boxes it holds.

    `names`: encoded keys, dtypes and shapes of its tensors; equal bytes on ranks that hold the same
    tensors. `tensor` (n,): position in those. `offset`, `extent` (n, d): the box, padded with 0
    and 1 behind the tensor's dims. `replica_set` (n,): position in `replica_sets`, or UNDECLARED.
    """

    names: bytes
    tensor: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    extent: npt.NDArray[np.int64]
    replica_set: npt.NDArray[np.int64]
    replica_sets: tuple[ReplicaSet, ...]


class TensorNames(msgspec.Struct, frozen=True):
    """Keys, dtypes, global shapes of the tensors of one rank, and the layouts they live on.

    `homes[i]` is the position in `layouts` of tensor i's layout.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[LayoutInfo, ...]
    homes: tuple[int, ...]


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    names: str
    num_dims: int
    tensor: bytes
    offset: bytes
    extent: bytes
    replica_set: bytes
    replica_sets: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A table on its way to the coordinator; `names` are empty where another rank sends them."""

    table: bytes
    names: bytes


def chunk_table(flat: FlatState) -> tuple[ChunkTable, list[torch.Tensor]]:
    """The table of a taken-apart state, and the tensor that holds each row.

    Boxes without elements have no row, unless their tensor has none either.
    """
    leaves = list(flat.leaves.values())
    num_dims = max((len(leaf.shape) for leaf in leaves), default=0)
    layouts: dict[Layout, int] = {}
    homes = tuple(layouts.setdefault(leaf.layout, len(layouts)) for leaf in leaves)
    names = TensorNames(
        keys=tuple(leaf.key for leaf in leaves),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        shapes=tuple(leaf.shape for leaf in leaves),
        layouts=tuple(layout_info(layout) for layout in layouts),
        homes=homes,
    )
    replica_sets: dict[ReplicaSet, int] = {}
    tensor: list[int] = []
    offset: list[tuple[int, ...]] = []
    extent: list[tuple[int, ...]] = []
    replica_set: list[int] = []
    sources: list[torch.Tensor] = []
    zeros, ones = (0,) * num_dims, (1,) * num_dims
    for number, leaf in enumerate(leaves):
        ndim = len(leaf.shape)
        hollow = 0 in leaf.shape
        where = (
            UNDECLARED
            if leaf.replica_set is None
            else replica_sets.setdefault(leaf.replica_set, len(replica_sets))
        )
        for box, local in zip(leaf.boxes, leaf.locals, strict=True):
            if 0 in box.shape and not hollow:
                continue
            tensor.append(number)
            offset.append(box.offset + zeros[ndim:])
            extent.append(box.shape + ones[ndim:])
            replica_set.append(where)
            sources.append(local)
    table = ChunkTable(
        names=msgspec.msgpack.encode(names),
        tensor=np.array(tensor, dtype=np.int64),
        offset=np.array(offset, dtype=np.int64).reshape(len(tensor), num_dims),
        extent=np.array(extent, dtype=np.int64).reshape(len(tensor), num_dims),
        replica_set=np.array(replica_set, dtype=np.int64),
        replica_sets=tuple(replica_sets),
    )
    return table, sources


def claims_the_same(was: TensorLeaf, leaf: TensorLeaf) -> bool:
    """Whether two leaves have the same rows in a table, whatever memory they are of."""
    return (
        was.key == leaf.key
        and was.dtype == leaf.dtype
        and was.shape == leaf.shape
        and was.replica_set == leaf.replica_set
        and (was.boxes is leaf.boxes or was.boxes == leaf.boxes)
        and (was.layout is leaf.layout or was.layout == leaf.layout)
    )


def row_locals(leaf: TensorLeaf) -> list[torch.Tensor]:
    """The local tensors of a leaf that have a row: those with elements, or all of a hollow one."""
    hollow = 0 in leaf.shape
    return [
        local
        for box, local in zip(leaf.boxes, leaf.locals, strict=True)
        if hollow or 0 not in box.shape
    ]


def layout_info(layout: Layout) -> LayoutInfo:
    """A layout as the manifest keeps it."""
    names = ("tp", "cp", "ep", "dp", "pp", "expt_tp", "replicas")
    axes = {name: getattr(layout, name) for name in names}
    return LayoutInfo(name=layout.name, axes=axes, order=layout.order, ranks=list(layout.ranks))


def encode_table(table: ChunkTable) -> bytes:
    """The table as bytes, with the digest of its names for them; equal tables give equal bytes."""
    return msgspec.msgpack.encode(
        _Wire(
            names=digest128(table.names),
            num_dims=table.offset.shape[1],
            tensor=pack_ints(table.tensor),
            offset=pack_ints(table.offset),
            extent=pack_ints(table.extent),
            replica_set=pack_ints(table.replica_set),
            replica_sets=tuple((d.replicas, d.span) for d in table.replica_sets),
        )
    )


def decode_table(data: bytes, *, rank: int, names: Mapping[str, bytes]) -> ChunkTable:
    """The table of `encode_table`; PlanError naming the rank for anything else.

    `names`: encoded names by digest, of all ranks.
    """
    try:
        wire = msgspec.msgpack.decode(data, type=_Wire)
        tensor = unpack_ints(wire.tensor)
        num_rows = len(tensor)
        return ChunkTable(
            names=names[wire.names],
            tensor=tensor,
            offset=unpack_ints(wire.offset).reshape(num_rows, wire.num_dims),
            extent=unpack_ints(wire.extent).reshape(num_rows, wire.num_dims),
            replica_set=unpack_ints(wire.replica_set),
            replica_sets=tuple(ReplicaSet(replicas=r, span=s) for r, s in wire.replica_sets),
        )
    except (msgspec.DecodeError, LookupError, ValueError) as error:
        raise PlanError(f"rank {rank} sent a chunk table that cannot be read: {error!r}") from error


def table_message(encoded: bytes, names: bytes | None) -> bytes:
    """What a rank sends to the coordinator: its encoded table; its names, unless another does.

    Cost: at most 8 bytes for each number that does not fit fewer, before compression; typically
    below 10 bytes a row.
    """
    return squeeze(msgspec.msgpack.encode(_Message(encoded, names if names is not None else b"")))


def read_messages(
    messages: Sequence[bytes], ranks: Sequence[int]
) -> tuple[list[bytes], dict[str, bytes]]:
    """The encoded tables of all ranks, and the names by digest; PlanError naming a bad sender."""
    tables: list[bytes] = []
    names: dict[str, bytes] = {}
    for rank, data in zip(ranks, messages, strict=True):
        try:
            message = msgspec.msgpack.decode(unsqueeze(data), type=_Message)
        except (msgspec.DecodeError, ValueError) as error:
            raise PlanError(f"rank {rank} sent a table that cannot be read: {error}") from error
        tables.append(message.table)
        if message.names:
            names[digest128(message.names)] = message.names
    return tables, names


def decode_names(names: bytes) -> TensorNames:
    """Keys, dtypes and shapes of a table."""
    return msgspec.msgpack.decode(names, type=TensorNames)


def signature(encoded: bytes, *, choices: Sequence[str]) -> str:
    """The structure signature of one rank: 32 hexadecimal digits.

    Covers everything that decides what is stored and by whom: the encoded table (by the digest of
    its names: keys, dtypes, shapes, layouts; boxes, replica claims) and `choices` (layout and
    storage options).
    """
    return digest128("\0".join([digest128(encoded), *choices]).encode())

"""This rank's state, taken apart for a save: leaves, chunk table, signature, encoded values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch

from holdfast.checkpoint.table import ChunkTable, chunk_table, encode_table, signature
from holdfast.format.digest import digest128
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.state.flatten import LeafCache, flatten_state
from holdfast.state.leaves import FlatState


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """One rank's part of a save.

    `sources[i]`, `keys[i]`: tensor and key of row i of `table`. `encoded`: the table's bytes.
    `names`: digest of its names. `signature`: digest of everything that decides what is stored and
    by whom. `values`: the encoded tree as JSON, which is not planned and may change with every
    save.
    """

    flat: FlatState
    table: ChunkTable
    sources: list[torch.Tensor]
    keys: list[str]
    encoded: bytes
    names: str
    signature: str
    values: bytes


def take_apart(
    state: Mapping[str, object],
    *,
    groups: ProcessGroups,
    codecs: Codecs,
    block_nbytes: int,
    cache: LeafCache,
    before: LocalState | None,
) -> LocalState:
    """Flatten the state on this rank. No collectives, no tensor bytes copied.

    `cache`, `before`: of the save before; where every leaf is the one that was there, its table
    and signature are, too.
    """
    flat = flatten_state(state, layout=groups.layout, rank=groups.rank, codecs=codecs, cache=cache)
    if before is not None and _same_leaves(before.flat, flat):
        return replace(before, flat=flat, values=msgspec.json.encode(flat.nodes))
    table, sources = chunk_table(flat)
    keys = list(flat.leaves)
    encoded = encode_table(table)
    return LocalState(
        flat=flat,
        table=table,
        sources=sources,
        keys=[keys[number] for number in table.tensor.tolist()],
        encoded=encoded,
        names=digest128(table.names),
        signature=signature(encoded, choices=choices(groups, block_nbytes)),
        values=msgspec.json.encode(flat.nodes),
    )


def choices(groups: ProcessGroups, block_nbytes: int) -> list[str]:
    """What a signature covers beside the table: the layout, and bytes per digest."""
    return [groups.layout.digest(), str(block_nbytes)]


def _same_leaves(before: FlatState, now: FlatState) -> bool:
    """Whether two states have the very same leaves, in the same order."""
    old, new = before.leaves.values(), now.leaves.values()
    return len(old) == len(new) and all(map(operator.is_, old, new))

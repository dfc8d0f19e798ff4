"""This rank's state, taken apart for a save: leaves, chunk table, signature, encoded values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from holdfast.checkpoint.plan.claims import (
    RankClaims,
    claimed_boxes,
    claims_of,
    encode_claims,
    same_claims,
    signature,
)
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
    table: RankClaims
    sources: list[torch.Tensor]
    keys: list[str]
    encoded: bytes
    names: str
    signature: str
    values: bytes


def flatten_local_state(
    state: Mapping[str, object],
    *,
    groups: ProcessGroups,
    codecs: Codecs,
    block_nbytes: int,
    cache: LeafCache,
    previous: LocalState | None,
) -> LocalState:
    """Flatten the state on this rank. No collectives, no tensor bytes copied.

    `cache`, `before`: of the save before; where every leaf is the one that was there, or one of
    other memory that claims the same, its table and signature are, too.
    """
    flat = flatten_state(state, layout=groups.layout, rank=groups.rank, codecs=codecs, cache=cache)
    sources = _same_sources(previous, flat) if previous is not None else None
    if previous is not None and sources is not None:
        values = msgspec.json.encode(flat.nodes)
        return replace(previous, flat=flat, sources=sources, values=values)
    table, sources = claims_of(flat)
    keys = list(flat.leaves)
    encoded = encode_claims(table)
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


def _same_sources(previous: LocalState, now: FlatState) -> list[torch.Tensor] | None:
    """The tensor of each row, where the leaves claim what those of the save before did; else None.

    Leaves made again (a random stream's state, a clone in a `state_dict`) are compared by what the
    table is made from: key, dtype, shape, boxes, replica set and layout. Cost: a comparison of
    identities for each leaf, and a few of numbers for each one made again.
    """
    old, new = previous.flat.leaves.values(), now.leaves.values()
    if len(old) != len(new):
        return None
    again = [
        (number, was, leaf)
        for number, (was, leaf) in enumerate(zip(old, new, strict=True))
        if was is not leaf
    ]
    if not again:
        return previous.sources
    if not all(same_claims(was, leaf) for _, was, leaf in again):
        return None
    numbers = np.array([number for number, _, _ in again], dtype=np.int64)
    begins = np.searchsorted(previous.table.tensor, numbers).tolist()
    sources = previous.sources.copy()
    for (_, _, leaf), begin in zip(again, begins, strict=True):
        rows = [local for _, local in claimed_boxes(leaf)]
        sources[begin : begin + len(rows)] = rows
    return sources

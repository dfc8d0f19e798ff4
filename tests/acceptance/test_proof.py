"""Proof of a plan over 1,024 ranks (K7), and of what was written against the plan (P1)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from holdfast import Checkpointer, HoldfastError, Layout, PlanError, ProcessGroups
from holdfast.checkpoint.plan.claims import RankClaims, decode_names
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.state.leaves import ReplicaSet
from holdfast.writer import commit
from holdfast.writer.records import DoneRecord
from tests.checkpoint.common import assert_equal, make_state
from tests.checkpoint.plan.test_proof import synthetic
from tests.harness import RankContext, run_ranks

NUM_RANKS = 1024
NUM_TENSORS = 100
SHARDS = 512
VICTIM = 700
"""The rank whose claim is spoilt; it holds shard 188, as rank 188 does."""
NUMBER = 55
KEY = f"model.layers.{NUMBER}.weight"

Spoil = Callable[[list[RankClaims]], None]


@pytest.fixture(scope="module")
def tables() -> list[RankClaims]:
    """Row shards on 512 ranks, each with one declared replica."""
    return synthetic(NUM_RANKS, NUM_TENSORS, replicas=2)


def prove(tables: list[RankClaims]) -> None:
    layout = Layout(dp=NUM_RANKS)
    make_plan(
        tables,
        ranks=layout.ranks,
        coordinates=[layout.coordinate(rank) for rank in layout.ranks],
        signature="0" * 32,
        block_nbytes=1 << 20,
    )


def without(tables: list[RankClaims], rank: int) -> None:
    table = tables[rank]
    keep = np.arange(NUM_TENSORS) != NUMBER
    tables[rank] = dataclasses.replace(
        table, tensor=table.tensor[keep], offset=table.offset[keep],
        extent=table.extent[keep], replica_set=table.replica_set[keep],
    )  # fmt: skip


def gap(tables: list[RankClaims]) -> None:
    """Neither holder claims the shard."""
    without(tables, VICTIM)
    without(tables, VICTIM - SHARDS)


def gap_of_one_row(tables: list[RankClaims]) -> None:
    """Both holders claim all rows of the shard but the last: at most 64 elements are missing."""
    for rank in (VICTIM, VICTIM - SHARDS):
        extent = tables[rank].extent.copy()
        extent[NUMBER, 0] -= 1
        tables[rank] = dataclasses.replace(tables[rank], extent=extent)


def overlap(tables: list[RankClaims]) -> None:
    """One holder claims one row more, which another shard has."""
    extent = tables[VICTIM].extent.copy()
    extent[NUMBER, 0] += 1
    tables[VICTIM] = dataclasses.replace(tables[VICTIM], extent=extent)


def out_of_bounds(tables: list[RankClaims]) -> None:
    offset = tables[VICTIM].offset.copy()
    offset[NUMBER, 0] += 1 << 40
    tables[VICTIM] = dataclasses.replace(tables[VICTIM], offset=offset)


def duplicate_owner(tables: list[RankClaims]) -> None:
    """A rank says that the shard is its alone; another one holds the same box."""
    replica_set = tables[VICTIM].replica_set.copy()
    replica_set[NUMBER] = 1
    alone = ReplicaSet(replicas=(VICTIM,), span=tuple(range(NUM_RANKS)))
    tables[VICTIM] = dataclasses.replace(
        tables[VICTIM], replica_set=replica_set, replica_sets=(*tables[VICTIM].replica_sets, alone)
    )


def named(tables: list[RankClaims], *, dtype: str | None = None, grow: int = 0) -> None:
    found = decode_names(tables[VICTIM].names)
    dtypes, shapes = list(found.dtypes), list(found.shapes)
    if dtype is not None:
        dtypes[NUMBER] = dtype
    shapes[NUMBER] = (shapes[NUMBER][0] + grow, shapes[NUMBER][1])
    names = msgspec.structs.replace(found, dtypes=tuple(dtypes), shapes=tuple(shapes))
    tables[VICTIM] = dataclasses.replace(tables[VICTIM], names=msgspec.msgpack.encode(names))


def shape_mismatch(tables: list[RankClaims]) -> None:
    named(tables, grow=1)


def wrong_dtype(tables: list[RankClaims]) -> None:
    """Of the same size: no length tells."""
    named(tables, dtype="I32")


FAULTS: dict[Spoil, tuple[str, ...]] = {
    gap: ("no rank holds",),
    gap_of_one_row: ("no rank holds",),
    overlap: ("more than one declared shard covers", "700"),
    out_of_bounds: ("out of the tensor", "700"),
    duplicate_owner: ("two ranks claim to own one box", "rank 700", "188", "x"),
    shape_mismatch: ("rank 700", "rank 0"),
    wrong_dtype: ("rank 700", "I32", "F32"),
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_a_wrong_claim_among_a_thousand_ranks_is_named_in_seconds(
    tables: list[RankClaims], spoil: Spoil
) -> None:
    """K7: 102,400 claims of which one or two are wrong."""
    spoilt = list(tables)
    spoil(spoilt)
    began = time.process_time()
    with pytest.raises(PlanError) as caught:
        prove(spoilt)
    assert time.process_time() - began < 20
    message = str(caught.value)
    assert KEY in message
    # Nothing else is accused: 99 tensors are right.
    assert "model.layers.5.weight" not in message
    assert "model.layers.56.weight" not in message
    for word in FAULTS[spoil]:
        if word == "x":  # the box itself: 7 rows a shard
            rows = 1 + NUMBER % 7
            assert f"[{188 * rows}:{189 * rows}, 0:64]" in message
        else:
            assert word in message


def test_a_thousand_ranks_that_are_right_are_proven(tables: list[RankClaims]) -> None:
    began = time.process_time()
    prove(tables)
    assert time.process_time() - began < 20


def _cut(data: bytes, words: int = 1) -> bytes:
    return data[: -8 * words]


def _add(data: bytes, amount: int) -> bytes:
    column = np.frombuffer(data, dtype=np.int64).copy()
    column[-1] += amount
    return column.tobytes()


Lie = Callable[[DoneRecord], DoneRecord]
LIES: dict[str, Lie] = {
    "a chunk less": lambda r: msgspec.structs.replace(
        r, starts=_cut(r.starts), row_nbytes=_cut(r.row_nbytes), digest_ptr=_cut(r.digest_ptr)
    ),
    "a shorter chunk": lambda r: msgspec.structs.replace(r, row_nbytes=_add(r.row_nbytes, -4)),
    "a longer chunk": lambda r: msgspec.structs.replace(r, row_nbytes=_add(r.row_nbytes, 4)),
    "no digests": lambda r: msgspec.structs.replace(r, digest_ptr=bytes(len(r.digest_ptr))),
    "a digest less": lambda r: msgspec.structs.replace(r, digests=_cut(r.digests)),
    "another file": lambda r: msgspec.structs.replace(r, file="data/00009.safetensors"),
    "no file": lambda r: msgspec.structs.replace(r, file=None),
    "beyond the file": lambda r: msgspec.structs.replace(r, starts=_add(r.starts, 1 << 40)),
    "a shorter file": lambda r: msgspec.structs.replace(r, nbytes=r.nbytes - 1),
    "another plan": lambda r: msgspec.structs.replace(r, plan_digest="0" * 32),
    "another save": lambda r: msgspec.structs.replace(r, save_id="0" * 12),
    "a check less": lambda r: msgspec.structs.replace(r, checks=_cut(r.checks)),
}
"""What one rank's record says instead of the truth."""


def lied_to(context: RankContext, root: str) -> dict[str, str]:
    """Saves in which the record of rank 1 lies; what every rank is told."""
    said = {}
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        state = make_state(layout, context.rank)
        state["model"].mapping["plain"] = torch.arange(3)  # type: ignore[attr-defined]
        checkpointer.save(1, state)
        read_sealed = commit.read_sealed
        for name, lie in LIES.items():

            def lying(storage: Any, path: str, kind: type[Any], *, lie: Lie = lie) -> Any:
                record = read_sealed(storage, path, kind)
                is_spoilt = isinstance(record, DoneRecord) and record.position == 1
                return lie(record) if is_spoilt else record

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(commit, "read_sealed", lying)
                try:
                    checkpointer.save(2, state)
                except HoldfastError as error:
                    said[name] = str(error)
            assert checkpointer.steps() == [1], name
        checkpointer.save(3, state)
        target = make_state(layout, context.rank, blank=True)
        target["model"].mapping["plain"] = torch.zeros(3, dtype=torch.int64)  # type: ignore[index]
        assert checkpointer.load(target).step == 3
        del target["model"].mapping["plain"]  # type: ignore[attr-defined]
        assert_equal(target, layout, context.rank)
    return said


def test_no_save_succeeds_whose_records_are_not_the_plan(tmp_path: Path) -> None:
    """P1: key, box, length and digest of everything written, against the plan, on all ranks."""
    for said in run_ranks(4, lied_to, str(tmp_path)).results:
        assert said.keys() == LIES.keys()
        assert "rank 1" in said["a chunk less"]
        assert "was planned with" in said["a shorter chunk"]
    assert not list(tmp_path.glob(".saving*"))

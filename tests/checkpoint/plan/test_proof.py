"""The plan on virtual ranks: each element has one writer; every wrong claim is found (A8, K7)."""

from __future__ import annotations

import dataclasses
import math
import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Codecs, Layout, LayoutError, PlanError, Replicated, Sharded
from holdfast.checkpoint.plan.claims import (
    RankClaims,
    TensorNames,
    claims_of,
    decode_claims,
    decode_names,
    encode_claims,
)
from holdfast.checkpoint.plan.make_plan import RankShare, make_plan
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import WHOLE
from holdfast.state import flatten_state
from holdfast.state.leaves import ReplicaSet
from holdfast.writer.records import CommitPlan, decode_plan, encode_plan

SHAPES = {"a": (7, 4), "b": (4, 6), "c": (3,), "d": (2, 3, 5)}


def virtual_state(layout: Layout, rank: int, axes: dict[str, dict[int, str]]) -> dict[str, object]:
    tree: dict[str, object] = {"norm": Replicated(torch.zeros(5)), "plain": torch.zeros(2)}
    for key, dims in axes.items():
        shape = list(SHAPES[key])
        for dim, axis in dims.items():
            members = layout.group(axis, rank)
            size = -(-shape[dim] // len(members))
            start = min(size * members.index(rank), shape[dim])
            shape[dim] = min(size, shape[dim] - start)
        tree[key] = Sharded(torch.zeros(shape), SHAPES[key], dims=dims)
    for layer in range(layout.coordinate(rank)["pp"], 4, layout.pp):
        tree[f"layer{layer}"] = torch.zeros(3, 3)
    return {"m": tree}


def tables_of(layout: Layout, axes: dict[str, dict[int, str]]) -> list[RankClaims]:
    tables = []
    for rank in layout.ranks:
        state = virtual_state(layout, rank, axes)
        flat = flatten_state(state, layout=layout, rank=rank, codecs=Codecs())
        table = claims_of(flat)[0]
        names = {digest128(table.names): table.names}
        tables.append(decode_claims(encode_claims(table), rank=rank, names=names))
    return tables


def plan_of(layout: Layout, tables: list[RankClaims]) -> tuple[CommitPlan, list[RankShare]]:
    plan, assignments = make_plan(
        tables,
        ranks=layout.ranks,
        coordinates=[layout.coordinate(rank) for rank in layout.ranks],
        signature="0" * 32,
        block_nbytes=1 << 20,
    )
    return decode_plan(encode_plan(plan).data, where="plan").plan, assignments


def check_cover(plan: CommitPlan) -> None:
    """Brute force: paint every row, each element exactly once."""
    for number, shape in enumerate(plan.shapes):
        paint = np.zeros(shape, dtype=int)
        for row in np.flatnonzero(plan.row_tensor == number):
            offset, extent = plan.row_offset[row], plan.row_extent[row]
            where = [slice(o, o + e) for o, e in zip(offset, extent, strict=True)]
            paint[tuple(where[: len(shape)])] += 1
        assert (paint == 1).all(), plan.keys[number]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = {axis: draw(st.sampled_from([1, 2, 4])) for axis in ("tp", "pp", "dp", "ep")}
    world = sizes["tp"] * sizes["pp"] * sizes["dp"]
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    start = draw(st.integers(0, 40))
    ranks = draw(st.permutations(range(start, start + world)))
    try:
        return Layout(**sizes, order=order, ranks=ranks)
    except LayoutError:
        sizes["ep"] = 1
        return Layout(**sizes, ranks=ranks)


@given(layouts(), st.data())
@settings(max_examples=60, deadline=None)
def test_each_element_has_exactly_one_writer(layout: Layout, data: st.DataObject) -> None:
    if layout.world_size > 16:
        return
    axes: dict[str, dict[int, str]] = {}
    for key, shape in SHAPES.items():
        view = data.draw(st.sampled_from([["tp", "dp"], ["ep", "expt_dp"], ["dp_cp"]]))
        chosen = data.draw(st.permutations(view))[: len(shape)]
        axes[key] = dict(enumerate(chosen))
    plan, assignments = plan_of(layout, tables_of(layout, axes))
    check_cover(plan)
    assert sum(len(a.rows) for a in assignments) == len(plan.row_tensor)
    holders = set(plan.check_tensor.tolist())
    # Replication is declared within a stage; across stages it is compared.
    assert (plan.keys.index("m.norm") in holders) == (layout.pp > 1)
    if layout.world_size > 1:
        assert plan.keys.index("m.plain") in holders


LAYOUT = Layout(tp=2, dp=2, pp=2)
AXES = {"a": {0: "tp"}, "b": {1: "dp", 0: "tp"}, "c": {0: "dp"}, "d": {2: "tp"}}


def row_of(table: RankClaims, key: str) -> int:
    number = decode_names(table.names).keys.index(key)
    return int(np.flatnonzero(table.tensor == number)[0])


@pytest.mark.parametrize("key", ["m.a", "m.b", "m.c", "m.d"])
@pytest.mark.parametrize("fault", ["drop", "shift", "grow", "stray", "rival", "shape", "dtype"])
def test_every_wrong_claim_is_found_and_named(key: str, fault: str) -> None:
    """Mutations of one rank's table: gap, overlap, out of bounds, two owners, shape, dtype."""
    tables = tables_of(LAYOUT, AXES)
    victim = 3
    table = tables[victim]
    row = row_of(table, key)
    offset, extent, names = table.offset.copy(), table.extent.copy(), table.names
    keep = np.ones(len(table.tensor), dtype=bool)
    replica_sets, replica_set = table.replica_sets, table.replica_set.copy()
    dim = {"m.a": 0, "m.b": 1, "m.c": 0, "m.d": 2}[key]
    if fault == "drop":
        # Every replica of the box drops it; else another holder would write it, rightly.
        pass
    elif fault == "shift":
        offset[row, dim] = 1 if offset[row, dim] == 0 else offset[row, dim] - 1
    elif fault == "grow":
        offset[row], extent[row, : len(SHAPES[key[2:]])] = 0, SHAPES[key[2:]]
    elif fault == "stray":
        offset[row, dim] += 100
    elif fault == "rival":
        replica_sets = (*replica_sets, ReplicaSet(replicas=(3,), span=LAYOUT.ranks))
        replica_set[row] = len(replica_sets) - 1
    else:
        encoded = names.replace(b"F32", b"F16", 1) if fault == "dtype" else None
        if encoded is None:
            tensor = table.tensor.copy()
            tables[victim] = dataclasses.replace(table, tensor=tensor, names=_reshaped(names, key))
        else:
            tables[victim] = dataclasses.replace(table, names=encoded)
        with pytest.raises(PlanError, match=r"rank 3"):
            plan_of(LAYOUT, tables)
        return
    if fault == "drop":
        box = (offset[row].tolist(), extent[row].tolist())
        for position, each in enumerate(tables):
            mine = row_of(each, key)
            if (each.offset[mine].tolist(), each.extent[mine].tolist()) == box:
                keep = np.ones(len(each.tensor), dtype=bool)
                keep[mine] = False
                tables[position] = dataclasses.replace(
                    each, tensor=each.tensor[keep], offset=each.offset[keep],
                    extent=each.extent[keep], replica_set=each.replica_set[keep],
                )  # fmt: skip
    else:
        tables[victim] = dataclasses.replace(
            table, offset=offset, extent=extent, replica_set=replica_set, replica_sets=replica_sets
        )
    with pytest.raises(PlanError) as caught:
        plan_of(LAYOUT, tables)
    assert key in str(caught.value)
    if fault != "drop":
        assert "3" in str(caught.value).split("held by ranks")[-1]


def _reshaped(names: bytes, key: str) -> bytes:
    found = decode_names(names)
    number = found.keys.index(key)
    shapes = list(found.shapes)
    shapes[number] = tuple(n + 1 for n in shapes[number])
    return msgspec.msgpack.encode(msgspec.structs.replace(found, shapes=tuple(shapes)))


def synthetic(num_ranks: int, num_tensors: int, replicas: int) -> list[RankClaims]:
    """Row-sharded tensors over groups of ranks, replicated `replicas` times."""
    shards = num_ranks // replicas
    keys = tuple(f"model.layers.{i}.weight" for i in range(num_tensors))
    shapes = tuple((shards * (1 + i % 7), 64) for i in range(num_tensors))
    names = msgspec.msgpack.encode(
        TensorNames(
            keys=keys,
            dtypes=("F32",) * num_tensors,
            shapes=shapes,
            layouts=(Layout().to_info(),),
            homes=(0,) * num_tensors,
            placements=(WHOLE,),
            placed=(0,) * num_tensors,
        )
    )
    rows = np.array([1 + i % 7 for i in range(num_tensors)], dtype=np.int64)
    tables = []
    for rank in range(num_ranks):
        shard = rank % shards
        same = tuple(range(shard, num_ranks, shards))
        tables.append(
            RankClaims(
                names=names,
                tensor=np.arange(num_tensors, dtype=np.int64),
                offset=np.stack([rows * shard, np.zeros_like(rows)], axis=1),
                extent=np.stack([rows, np.full_like(rows, 64)], axis=1),
                replica_set=np.zeros(num_tensors, dtype=np.int64),
                replica_sets=(ReplicaSet(replicas=same, span=tuple(range(num_ranks))),),
            )
        )
    return tables


def test_writers_are_balanced_by_true_bytes() -> None:
    layout = Layout(dp=16)
    plan, _ = plan_of(layout, synthetic(16, 200, replicas=4))
    load = np.zeros(16)
    itemsize = [DTYPES[name].itemsize for name in plan.dtypes]
    for row in range(len(plan.row_tensor)):
        nbytes = math.prod(plan.row_extent[row].tolist()) * itemsize[plan.row_tensor[row]]
        load[plan.writers[plan.row_file[row]]] += nbytes
    assert load.max() / load.mean() < 1.02


def test_a_thousand_ranks_are_planned_in_seconds() -> None:
    """K7: 1,024 virtual ranks x 200 tensors, sharded and replicated; and a hole in it is found."""
    layout = Layout(dp=1024)
    tables = synthetic(1024, 200, replicas=2)
    began = time.perf_counter()
    plan_of(layout, tables)
    assert time.perf_counter() - began < 20
    broken = tables[700]
    offset = broken.offset.copy()
    offset[55, 0] += 1
    tables[700] = dataclasses.replace(broken, offset=offset)
    with pytest.raises(PlanError, match=r"model\.layers\.55\.weight"):
        plan_of(layout, tables)

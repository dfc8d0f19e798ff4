"""What planning 100,000 shards costs the coordinator: bytes, memory, time (E20)."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.scale import Resumed, claims_messages, simulated_layout, simulated_tables
from holdfast import (
    RNG,
    Checkpointer,
    Codecs,
    Layout,
    PerRank,
    PlanError,
    ProcessGroups,
    Sharded,
)
from holdfast.arrays.packed_ints import pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.checkpoint.plan.claims import (
    claims_message,
    claims_of,
    decode_claims,
    decode_names,
    encode_claims,
    read_claims_messages,
)
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.parallel.control.control import FRAME_NBYTES
from holdfast.parallel.rank_ranges import RankRanges
from holdfast.state import flatten_state
from tests.harness import RankContext, run_ranks

SIZES = [2_500, pytest.param(25_000, marks=pytest.mark.slow)]
"""Tensors in four shards each. What is bounded is bounded for each row, so few show it, too."""
ROW_NBYTES = 64
"""The stated bound: what the coordinator receives for each row, names aside."""
NAME_NBYTES = 128
"""And for each tensor, once whatever the number of ranks: key, dtype, shape."""


def _many(rank: int, num_tensors: int) -> dict[str, object]:
    """Shards of uneven sizes at offsets that do not repeat."""
    state = {}
    for i in range(num_tensors):
        rows = 1 + i * 31 % 97
        state[f"model.layers.{i}.weight"] = Sharded(
            torch.zeros(rows, 3), (4 * rows, 3), offset=(rank * rows, 0), over=("dp",)
        )
    return {"m": state}


def _plan(context: RankContext, root: str, num_tensors: int) -> tuple[int, int, int, float]:
    """Bytes sent for the plan; collectives and bytes of a save after it; seconds to plan."""
    with (
        ProcessGroups.create(Layout(dp=4)) as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        control, state = groups.control, _many(context.rank, num_tensors)
        sent, began = control.nbytes_sent, time.perf_counter()
        checkpointer.prepare(state)
        seconds = time.perf_counter() - began
        planned, before = control.nbytes_sent - sent, control.num_collectives
        again = control.nbytes_sent
        pending = checkpointer.save_async(1, state)
        found = control.num_collectives - before, control.nbytes_sent - again
        assert not pending.result(120).planned
        assert checkpointer.stats.num_plans == 1
        return planned, *found, seconds


@pytest.mark.parametrize("num_tensors", SIZES)
def test_a_hundred_thousand_shards_on_four_ranks(tmp_path: Path, num_tensors: int) -> None:
    results = run_ranks(4, _plan, str(tmp_path / "many"), num_tensors, timeout_s=280).results
    received = sum(nbytes for nbytes, *_ in results[1:])
    assert received <= ROW_NBYTES * 3 * num_tensors + 64 * FRAME_NBYTES
    # Names do not travel from every rank: what the others send is far below their names alone.
    assert received < 3 * num_tensors * len("m.model.layers.12345.weight")
    assert max(seconds for *_, seconds in results) < 120
    few = run_ranks(4, _plan, str(tmp_path / "few"), 10).results
    for (_, collectives, nbytes, _), (_, few_collectives, few_nbytes, _) in zip(
        results, few, strict=True
    ):
        assert collectives == few_collectives == 2  # the second one is of a new root
        assert nbytes == few_nbytes <= 2 * FRAME_NBYTES


@pytest.mark.parametrize("num_tensors", SIZES)
def test_the_bound_holds_on_virtual_ranks_and_memory_is_linear(num_tensors: int) -> None:
    """All four messages, of shards that nothing repeats in; the plan's peak memory a row."""
    layout = Layout(dp=4)
    tables = [
        claims_of(
            flatten_state(_many(rank, num_tensors), layout=layout, rank=rank, codecs=Codecs())
        )[0]
        for rank in layout.ranks
    ]
    encoded = [encode_claims(table) for table in tables]
    messages = [
        claims_message(data, tables[0].names if rank == 0 else None)
        for rank, data in enumerate(encoded)
    ]
    names_nbytes = len(messages[0]) - len(messages[1])
    assert names_nbytes <= NAME_NBYTES * num_tensors
    assert sum(map(len, messages)) - names_nbytes <= ROW_NBYTES * 4 * num_tensors
    # Before compression, too, which a coordinator must not have to trust in.
    assert max(map(len, encoded)) <= ROW_NBYTES * num_tensors
    tracemalloc.start()
    began = time.perf_counter()
    received, names = read_claims_messages(messages, layout.ranks)
    plan, _ = make_plan(
        [decode_claims(data, rank=r, names=names) for r, data in enumerate(received)],
        ranks=layout.ranks, coordinates=[layout.coordinate(r) for r in layout.ranks],
        signature="0" * 32, block_nbytes=1 << 20,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan.row_tensor) == 4 * num_tensors
    assert peak <= 1024 * len(plan.row_tensor)
    assert seconds < 60


@pytest.mark.parametrize("span", [0, 255, 256, 65_535, 65_536, 1 << 31, 1 << 62])
@pytest.mark.parametrize("low", [0, -1, 10**9])
def test_columns_are_as_narrow_as_they_can_be(span: int, low: int) -> None:
    values = np.array([low, low + span, low], dtype=np.int64)
    data = pack_ints(values)
    assert unpack_ints(data).tolist() == values.tolist()
    size = next(size for size in (1, 2, 4, 8) if span < 1 << (8 * size))
    assert len(data) <= 9 + 3 * size
    assert unpack_ints(pack_ints(np.zeros(0, dtype=np.int64))).tolist() == []


def test_messages_that_are_none_are_refused_by_rank() -> None:
    for wrong in (b"", b"\x03" + bytes(8), b"\x02" + bytes(9)):
        with pytest.raises(ValueError, match=r"column|multiple"):
            unpack_ints(wrong)
    good = squeeze(bytes(1000))
    assert unsqueeze(good) == bytes(1000)
    for bad in (good[:-1], good + b"x", b"x" + good, b""):
        with pytest.raises(ValueError, match="compressed"):
            unsqueeze(bad)
    with pytest.raises(PlanError, match="rank 7"):
        read_claims_messages([good], [7])
    with pytest.raises(PlanError, match="rank 7"):
        decode_claims(b"x", rank=7, names={})
    table = claims_of(
        flatten_state({"m": {"x": torch.ones(1)}}, layout=Layout(), rank=0, codecs=Codecs())
    )[0]
    with pytest.raises(PlanError, match="rank 7"):
        decode_claims(encode_claims(table), rank=7, names={})


def test_a_resumed_rank_reads_what_is_its_own(tmp_path: Path) -> None:
    """Its share, and 72 bytes for each rank; what it keeps in memory is of that size."""
    found = {}
    for num_ranks in (64, 512):
        layout = simulated_layout(num_ranks)
        messages = claims_messages(simulated_tables(layout, 200))
        directory = tmp_path / str(num_ranks)
        directory.mkdir()
        resumed = Resumed(layout, messages, 200, directory)
        peak = resumed.peak_nbytes()
        found[num_ranks] = resumed.nbytes_read, peak
    assert found[512][0] - found[64][0] <= 72 * (512 - 64)
    assert found[512][1] <= found[64][1] + 8 * 72 * (512 - 64)


def test_random_streams_on_thousands_of_ranks() -> None:
    """Values per rank stay out of the names: each of 2,048 ranks sends 2 kB at most."""
    layout = simulated_layout(2048)
    tables = simulated_tables(layout, 1000)
    assert len({table.names for table in tables}) == layout.pp
    messages = claims_messages(tables)
    assert sum(map(len, messages)) <= 2048 * len(messages)
    # All but one of each stage send no names, and less than a byte a row.
    assert sorted(map(len, messages))[-layout.pp - 1] <= 1024
    received, names = read_claims_messages(messages, layout.ranks)
    for rank in (0, 1, 777, 2047):
        table = decode_claims(received[rank], rank=rank, names=names)
        found = decode_names(table.names)
        keys = [found.key(number, table.labels) for number in range(len(found.keys))]
        at = layout.coordinate(rank)
        label = ",".join(f"{axis}={at[axis]}" for axis in sorted(at))
        streams = [key for key in keys if key.startswith("rng")]
        assert len(streams) >= 3
        assert all(key.startswith(f"rng[{label}].") for key in streams)
        assert np.array_equal(table.offset, tables[rank].offset)
        assert np.array_equal(table.tensor, tables[rank].tensor)
        for one, other in zip(table.replica_sets, tables[rank].replica_sets, strict=True):
            assert (list(one.replicas), list(one.span)) == (
                list(other.replicas), list(other.span),
            )  # fmt: skip


def _with_and_without_streams(context: RankContext, root: str) -> tuple[int, int]:
    sent = []
    with ProcessGroups.create(Layout(dp=4)) as groups:
        for name, more in (("without", {}), ("with", {"rng": RNG(), "own": PerRank(_own())})):
            state = {**_many(context.rank, 200), **more}
            with Checkpointer(f"{root}/{name}", groups=groups) as checkpointer:
                before = groups.control.nbytes_sent
                checkpointer.save(1, state)
                sent.append(groups.control.nbytes_sent - before)
                found = checkpointer.load({"own": PerRank(_own())} if more else {})
                assert not more or found.values["own"]["a"][0].tolist() == [0.0, 1.0, 2.0]
    return sent[0], sent[1]


def _own() -> dict[str, object]:
    """Values per rank, one of them with a value per rank inside."""
    return {"a": [torch.arange(3.0)], "b": PerRank({"c": torch.ones(2)}, axes=("dp",))}


def test_random_streams_are_no_names_of_every_rank(tmp_path: Path) -> None:
    """Counted on real ranks: what a rank sends for its streams is a label and a few numbers."""
    results = run_ranks(4, _with_and_without_streams, str(tmp_path)).results
    for without, with_streams in results[1:]:
        assert with_streams - without <= 256


ranges = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4)), max_size=4)


@given(start=st.integers(0, 50), steps=ranges, extra=st.sets(st.integers(0, 300), max_size=5))
def test_ranges_are_the_ranks_they_were_made_of(
    start: int, steps: list[tuple[int, int]], extra: set[int]
) -> None:
    """Products of ranges, and any others: members, number and order, against a plain list."""
    ranks = {start}
    for stride, count in steps:
        ranks = {rank + i * stride for rank in ranks for i in range(count)}
    expected = sorted(ranks | extra)
    found = RankRanges.of(expected)
    assert list(found) == expected
    assert len(found) == len(expected)
    assert [rank for rank in range(-3, max(expected) + 9) if rank in found] == expected
    assert found == RankRanges.of(tuple(expected))
    assert hash(found) == hash(RankRanges.of(expected))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=RankRanges) == found


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "pp-dp-tp-cp", "dp-tp-pp-cp"])
def test_groups_of_a_layout_are_one_block(order: str) -> None:
    """However many ranks: a group along any axes is a base and a step for each level."""
    layout = Layout(tp=4, cp=2, dp=16, pp=8, order=order)
    for axes in ("tp", "dp", "pp", "tp-dp", "tp-cp-dp", "dp-pp", "tp-pp", "tp-cp-dp-pp"):
        found = RankRanges.of(sorted(layout.group(axes, 517)))
        assert list(found) == sorted(layout.group(axes, 517))
        assert len(found.bases) == 1
        assert len(found.steps) <= 4

"""What planning 100,000 shards costs the coordinator: bytes, memory, time (E20)."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Checkpointer, Codecs, Layout, PlanError, ProcessGroups, Sharded
from holdfast.arrays.packed_ints import pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.checkpoint.plan.claims import (
    claims_message,
    claims_of,
    decode_claims,
    encode_claims,
    read_claims_messages,
)
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.parallel.control.control import FRAME_NBYTES
from holdfast.state import flatten_state
from tests.harness import RankContext, run_ranks

NUM_TENSORS = 25_000
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


def test_a_hundred_thousand_shards_on_four_ranks(tmp_path: Path) -> None:
    results = run_ranks(4, _plan, str(tmp_path / "many"), NUM_TENSORS, timeout_s=280).results
    received = sum(nbytes for nbytes, *_ in results[1:])
    assert received <= ROW_NBYTES * 3 * NUM_TENSORS + 64 * FRAME_NBYTES
    # Names do not travel from every rank: what the others send is far below their names alone.
    assert received < 3 * NUM_TENSORS * len("m.model.layers.12345.weight")
    assert max(seconds for *_, seconds in results) < 120
    few = run_ranks(4, _plan, str(tmp_path / "few"), 10).results
    for (_, collectives, nbytes, _), (_, few_collectives, few_nbytes, _) in zip(
        results, few, strict=True
    ):
        assert collectives == few_collectives == 1
        assert nbytes == few_nbytes <= 2 * FRAME_NBYTES


def test_the_bound_holds_on_virtual_ranks_and_memory_is_linear() -> None:
    """All four messages, of shards that nothing repeats in; the plan's peak memory a row."""
    layout = Layout(dp=4)
    tables = [
        claims_of(
            flatten_state(_many(rank, NUM_TENSORS), layout=layout, rank=rank, codecs=Codecs())
        )[0]
        for rank in layout.ranks
    ]
    encoded = [encode_claims(table) for table in tables]
    messages = [
        claims_message(data, tables[0].names if rank == 0 else None)
        for rank, data in enumerate(encoded)
    ]
    names_nbytes = len(messages[0]) - len(messages[1])
    assert names_nbytes <= NAME_NBYTES * NUM_TENSORS
    assert sum(map(len, messages)) - names_nbytes <= ROW_NBYTES * 4 * NUM_TENSORS
    # Before compression, too, which a coordinator must not have to trust in.
    assert max(map(len, encoded)) <= ROW_NBYTES * NUM_TENSORS
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
    assert plan.num_rows == 4 * NUM_TENSORS
    assert peak <= 1024 * plan.num_rows
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

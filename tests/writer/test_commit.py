"""The commit puts the records of many ranks together in time that is linear in ranks and rows."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from bench import scale
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.errors import DriftError, HoldfastError, PlanError
from holdfast.format.manifest import encode_manifest
from holdfast.format.names import data_file
from holdfast.writer.commit import assemble, build_index, compare_checks
from holdfast.writer.records import CommitPlan, DoneRecord, PlanMemo, column

_ROWS_A_RANK = 256
_CHECKS_A_RANK = 64


@cache
def _save_of(num_ranks: int) -> tuple[CommitPlan, list[DoneRecord]]:
    """A plan and the records of all ranks; each two neighbours hold some boxes undeclared."""
    layout = scale.simulated_layout(num_ranks)
    plan, _ = make_plan(
        scale.simulated_tables(layout, _ROWS_A_RANK),
        ranks=layout.ranks,
        coordinates=[layout.coordinate(rank) for rank in layout.ranks],
        signature="0" * 32,
        block_nbytes=1 << 20,
    )
    position = np.repeat(np.arange(num_ranks), _CHECKS_A_RANK)
    group = np.arange(len(position)) % _CHECKS_A_RANK + position // 2 * _CHECKS_A_RANK
    plan = msgspec.structs.replace(
        plan, check_position=position, check_group=group, check_tensor=np.zeros_like(group)
    )
    records = scale.records_of(plan, scale.index_of(plan))
    checks = group.reshape(num_ranks, -1).astype(np.uint64)
    return plan, [
        msgspec.structs.replace(record, checks=column(own))
        for record, own in zip(records, checks, strict=True)
    ]


def _build(plan: CommitPlan, records: list[DoneRecord]) -> None:
    files = [data_file(number) for number in range(len(plan.writers))]
    build_index(plan, records, files, planned=plan.row_nbytes)


@pytest.mark.parametrize("function", [_build, compare_checks])
def test_four_times_the_ranks_take_about_four_times_as_long(
    function: Callable[[CommitPlan, list[DoneRecord]], None],
) -> None:
    """A pass over all rows for each rank took 10 times as long, and seconds at 2,048 ranks."""
    saves = {num_ranks: _save_of(num_ranks) for num_ranks in (512, 2048)}
    seconds = dict.fromkeys(saves, float("inf"))
    for _ in range(7):
        for num_ranks, save in saves.items():
            began = time.process_time()
            function(*save)
            seconds[num_ranks] = min(seconds[num_ranks], time.process_time() - began)
    assert seconds[2048] < 7 * seconds[512], seconds


def test_the_index_is_what_the_records_state() -> None:
    plan, records = _save_of(16)
    expected = scale.index_of(plan)
    files = [data_file(number) for number in range(len(plan.writers))]
    index = build_index(plan, records, files, planned=plan.row_nbytes)
    for name in ("tensor", "file", "start", "nbytes", "digest_ptr", "digest"):
        np.testing.assert_array_equal(getattr(index, name), getattr(expected, name))


def test_rows_in_another_order_than_the_files_are_refused() -> None:
    """Digests are joined file by file: in another order they would be those of other rows."""
    plan, records = _save_of(4)
    plan = msgspec.structs.replace(plan, row_file=plan.row_file[::-1].copy())
    with pytest.raises(PlanError, match="order of its files"):
        _build(plan, records)


def test_a_digest_in_the_record_of_another_rank_is_refused() -> None:
    """As many digests as planned in all, but not of each file."""
    plan, records = _save_of(4)
    records = records.copy()
    records[1] = msgspec.structs.replace(records[1], digests=records[1].digests + bytes(8))
    records[2] = msgspec.structs.replace(records[2], digests=records[2].digests[8:])
    with pytest.raises(PlanError, match=r"rank 1.*lacks block digests"):
        _build(plan, records)


def test_the_ranks_of_a_box_that_differs_are_named() -> None:
    plan, records = _save_of(8)
    records = records.copy()
    checks = np.frombuffer(records[5].checks, dtype=np.uint64).copy()
    checks[7] += 1
    records[5] = msgspec.structs.replace(records[5], checks=checks.tobytes())
    with pytest.raises(DriftError, match=r"different bytes on ranks 4 \| ranks 5") as raised:
        compare_checks(plan, records)
    (key,) = raised.value.details["keys"]
    assert f"{key}: different bytes" in str(raised.value)


def _values(plan: CommitPlan, rank: int, draw: random.Random) -> bytes:
    """What a rank supplies: a tree of tensors, values, and streams of its own."""
    tensors: dict[str, Any] = {key: {"$": "tensor", "k": f"model.{key}"} for key in plan.keys[:20]}
    if draw.random() < 0.2:
        tensors["more"] = draw.choice(["tensor", None, {"$": "tensor", "k": "elsewhere"}])
    streams = {"$": "per_rank", "a": ["dp"], "v": {f"dp={rank}": draw.randrange(3)}}
    parts = {"model": tensors, "values": {"step": draw.randrange(2)}, "rng": streams}
    return json.dumps(parts).encode()[: draw.choice([-1] + [10**6] * 30)]


def _changed(plan: CommitPlan, record: DoneRecord, draw: random.Random) -> DoneRecord:
    """Return the record of another save of the same plan; some have what no such save has."""
    num_rows = len(record.starts) // 8
    digests = np.frombuffer(record.digests, dtype=np.uint64) + np.uint64(draw.randrange(9))
    record = msgspec.structs.replace(record, digests=digests.tobytes())
    starts = np.frombuffer(record.starts, dtype=np.int64).copy()
    starts[draw.randrange(num_rows)] += draw.choice([8, -8])
    damage = draw.choice([
        {"starts": starts.tobytes()},
        {"nbytes": record.nbytes + 8},
        {"header_nbytes": record.header_nbytes + 8},
        {"lanes": draw.randbytes(16 * num_rows)},
    ])  # fmt: skip
    return msgspec.structs.replace(record, **damage) if draw.random() < 0.05 else record


def test_a_commit_that_knows_the_last_ones_makes_and_refuses_what_another_does() -> None:
    """Saves of one plan in a row, some of them impossible: the same bytes, or the same error."""
    plan, records = _save_of(4)
    refused = 0
    for seed in range(4):
        draw, memo = random.Random(seed), PlanMemo()
        for step in range(20):
            # Of equal trees on all ranks, now and then but for one.
            seeds = [draw.randrange(4)] * len(records)
            if draw.random() < 0.2:
                seeds[draw.randrange(len(seeds))] += 1
            save = [
                msgspec.structs.replace(
                    _changed(plan, record, draw),
                    values=_values(plan, rank, random.Random(seeds[rank])),
                )
                for rank, record in enumerate(records)
            ]
            header = msgspec.structs.replace(scale.HEADER, step=step)
            results = [_committed(plan, save, header, each) for each in (memo, PlanMemo())]
            assert results[0] == results[1], (seed, step)
            refused += isinstance(results[0][0], str)
    assert 5 < refused < 60, refused


def _committed(
    plan: CommitPlan, records: list[DoneRecord], header: Any, memo: PlanMemo
) -> tuple[object, ...]:
    """Return index and manifest as they would be written, or the error."""
    try:
        index, manifest, _ = assemble(plan, records, header, memo=memo)
        return index, encode_manifest(manifest, texts=memo.texts)
    except HoldfastError as error:
        return type(error).__name__, str(error)

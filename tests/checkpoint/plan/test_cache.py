"""A plan kept by an earlier run is used again exactly where it is right (C9)."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from holdfast import (
    Checkpointer,
    Layout,
    PosixStorage,
    ProcessGroups,
    Replicated,
    Sharded,
    Stored,
    Union,
)
from holdfast.arrays.packed_ints import pack_ints, squeeze, unsqueeze
from holdfast.checkpoint.plan.claims import (
    claims_message,
    decode_claims,
    decode_names,
    encode_claims,
    read_claims_messages,
)
from holdfast.checkpoint.plan.kept_plans import PLANS_DIR, VERSION, PlanNotes
from holdfast.checkpoint.plan.planner import Planner, Rejected
from holdfast.checkpoint.plan.rank_plan import RankPlan
from holdfast.errors import PlanError
from holdfast.format.stored_copies import CopyPolicy
from holdfast.format.values import Codecs
from holdfast.format.verifier import verify_snapshot
from holdfast.writer.records import seal
from tests.checkpoint.common import assert_equal, make_state, plan_notes
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(tp=2, dp=2)
_BIG = (70_001, 3)  # 840 kB on every rank, alone of its size: it is cut


def _state(layout: Layout, rank: int, *, blank: bool = False) -> dict[str, object]:
    state = make_state(layout, rank, blank=blank)
    big = torch.arange(_BIG[0] * _BIG[1], dtype=torch.float32).reshape(_BIG)
    return state | {"big": {"embedding": Replicated(torch.zeros_like(big) if blank else big)}}


def _first_run(context: RankContext, root: str) -> int:
    with ProcessGroups.create(LAYOUT) as groups, Checkpointer(root, groups=groups) as checkpointer:
        checkpointer.save_async(1, _state(LAYOUT, context.rank)).result(60)
        checkpointer.save(2, _state(LAYOUT, context.rank), check_replicas=True)
        return checkpointer.stats.num_plans


Calls = list[tuple[str, bool, int, int]]


def _resumed(context: RankContext, root: str) -> Calls:
    """Load and go on, with each kind of first save: what it planned, and what it said to others."""
    calls: Calls = []
    rank = context.rank
    with ProcessGroups.create(LAYOUT) as groups:
        control = groups.control
        for step, what in enumerate(("async", "sync", "async, compared", "prepared"), start=3):
            with Checkpointer(root, groups=groups) as checkpointer:
                target = _state(LAYOUT, rank, blank=True)
                checkpointer.load(target)
                assert_equal(target, LAYOUT, rank)
                state = _state(LAYOUT, rank)
                if what == "prepared":
                    checkpointer.prepare(state)
                for again in range(2):
                    before, sent = control.num_collectives, control.nbytes_sent
                    if what == "sync":
                        planned = checkpointer.save(10 * step + again, state).planned
                        after = control.num_collectives, control.nbytes_sent
                    else:
                        pending = checkpointer.save_async(
                            10 * step + again, state, check_replicas="compared" in what
                        )
                        after = control.num_collectives, control.nbytes_sent
                        planned = pending.result(60).planned
                    calls.append((what, planned, after[0] - before, after[1] - sent))
                assert checkpointer.stats.num_plans == 0
                checkpointer.load(target)
                assert_equal(target, LAYOUT, rank)
                big = target["big"]
                assert isinstance(big, dict)
                truth = _state(LAYOUT, rank)["big"]
                assert isinstance(truth, dict)
                assert torch.equal(big["embedding"].local, truth["embedding"].local)
    return calls


def _other_world(context: RankContext, root: str, dp: int, tp: int) -> list[bool]:
    layout = Layout(tp=tp, dp=dp)
    with ProcessGroups.create(layout) as groups, Checkpointer(root, groups=groups) as checkpointer:
        target = _state(layout, context.rank, blank=True)
        del target["own"]
        checkpointer.load(target, step=2)
        assert_equal(target, layout, context.rank)
        state = _state(layout, context.rank)
        return [checkpointer.save(step, state, overwrite=True).planned for step in (200, 201)]


def test_the_first_save_of_a_later_run_needs_no_planning(tmp_path: Path) -> None:
    """C9, E18: in new processes, sync and async: no plan, and not one collective or byte more."""
    assert run_ranks(4, _first_run, str(tmp_path)).results == [2] * 4
    kept = {p.name: p.read_bytes() for p in (tmp_path / PLANS_DIR).iterdir()}
    assert len(kept) == 2
    for calls in run_ranks(4, _resumed, str(tmp_path)).results:
        for (what, planned, num, nbytes), second in zip(calls[::2], calls[1::2], strict=True):
            assert not planned, what
            assert num == (3 if what == "sync" else 1), what
            assert (what, planned, num, nbytes) == second
    assert {p.name: p.read_bytes() for p in (tmp_path / PLANS_DIR).iterdir()} == kept
    storage = PosixStorage(tmp_path)
    for step in Checkpointer(tmp_path).steps():
        assert verify_snapshot(storage, f"iter_{step:07d}") == []
    cut = [name for name in _chunk_names(tmp_path / "iter_0000030") if name.startswith("big.")]
    assert len(cut) > 1
    # Another layout, another world: planned, and kept beside.
    for dp, tp in ((4, 1), (2, 1)):
        for planned in run_ranks(dp * tp, _other_world, str(tmp_path), dp, tp).results:
            assert planned == [True, False]
    assert len(list((tmp_path / PLANS_DIR).iterdir())) == 4


def _chunk_names(directory: Path) -> list[str]:
    names = []
    for path in sorted((directory / "data").iterdir()):
        data = path.read_bytes()
        header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
        names += [name for name in header if name != "__metadata__"]
    return names


Maker = Callable[[int], dict[str, object]]


def _base(rank: int) -> dict[str, object]:
    rows = torch.arange(6.0).reshape(2, 3) + 10 * rank
    return {
        "a": Sharded(rows, (4, 3), dims={0: "dp"}),
        "b": Sharded(rows + 100, (4, 3), dims={0: "dp"}),
        "norm": Replicated(torch.arange(4.0)),
        "plain": torch.arange(5.0),
    }


def _changes() -> Iterator[tuple[str, Maker]]:
    def wide(rank: int) -> Sharded:
        return Sharded(torch.full((2, 5), float(rank)), (4, 5), dims={0: "dp"})

    def half(rank: int) -> Sharded:
        return Sharded(torch.full((2, 3), float(rank)).half(), (4, 3), dims={0: "dp"})

    def swapped(rank: int) -> Sharded:
        rows = torch.full((2, 3), float(rank))
        return Sharded(rows, (4, 3), offset=(2 - 2 * rank, 0), over=("dp",))

    yield "shape", lambda rank: _base(rank) | {"b": wide(rank)}
    yield "dtype", lambda rank: _base(rank) | {"b": half(rank)}
    yield "split", lambda rank: _base(rank) | {"b": swapped(rank)}
    yield "key", lambda rank: {"c" if k == "a" else k: v for k, v in _base(rank).items()}
    yield "order", lambda rank: dict(reversed(_base(rank).items()))
    yield "claim", lambda rank: _base(rank) | {"norm": torch.arange(4.0)}
    yield "on one rank", lambda rank: _base(rank) | ({"z": torch.ones(2)} if rank else {})


def _changed(context: RankContext, root: str, notes: str) -> dict[str, list[bool]]:
    """Each change against the plan of the unchanged state: whether the saves planned."""
    found = {}
    rank = context.rank
    with ProcessGroups.create(Layout(dp=2)) as groups:

        def run(name: str, make: Maker, *, block_nbytes: int = 1 << 20) -> None:
            groups.control.barrier(phase="test: before")
            if rank == 0:
                shutil.rmtree(Path(root) / PLANS_DIR, ignore_errors=True)
                shutil.copytree(notes, Path(root) / PLANS_DIR)
            groups.control.barrier(phase="test: notes in place")
            with Checkpointer(root, groups=groups, block_nbytes=block_nbytes) as checkpointer:
                found[name] = [
                    checkpointer.save(i, {"m": Union(make(rank))}, overwrite=True).planned
                    for i in (1, 2)
                ]
                loaded = checkpointer.load({"m": Stored()}).values["m"]
                assert isinstance(loaded, dict)
                for key, value in make(rank).items():
                    assert isinstance(value, torch.Tensor | Sharded | Replicated)
                    _compare(value, loaded[key], rank, key)

        run("nothing", _base)
        for name, make in _changes():
            run(name, make)
        run("block size", _base, block_nbytes=1 << 19)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:  # one rank cannot read it: none uses it
                patch.setattr(Planner, "_plan_again", lambda *arguments: Rejected("unread"))
            run("unread on one rank", _base)
    return found


def _compare(value: torch.Tensor | Sharded | Replicated, got: object, rank: int, key: str) -> None:
    assert isinstance(got, torch.Tensor)
    local = value if isinstance(value, torch.Tensor) else value.local
    if isinstance(value, Sharded):
        start = value.offset[0] if value.offset is not None else 2 * rank
        got = got[start : start + 2]
    assert got.dtype == local.dtype
    assert torch.equal(got, local), key


def _keep_base(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups, Checkpointer(root, groups=groups) as saver:
        saver.save(0, {"m": _base(context.rank)})


def test_any_change_since_is_planned_anew(tmp_path: Path) -> None:
    run_ranks(2, _keep_base, str(tmp_path))
    shutil.copytree(tmp_path / PLANS_DIR, tmp_path / "notes")
    for found in run_ranks(2, _changed, str(tmp_path), str(tmp_path / "notes")).results:
        assert found.pop("nothing") == [False, False]
        assert len(found) == 9
        assert all(planned == [True, False] for planned in found.values()), found


# What follows changes what is kept, with all digests made good.

Claims = list[bytes]


def _edits(good: Claims) -> Iterator[tuple[str, Claims]]:
    """Claims of a run of two ranks that are not theirs, each of which could be planned."""
    ranks = range(len(good))
    encoded, names = read_claims_messages(good, ranks)
    tables = [decode_claims(e, rank=r, names=names) for r, e in zip(ranks, encoded, strict=True)]

    def message(rank: int, **fields: object) -> bytes:
        table = msgspec_replace(tables[rank], **fields)
        return claims_message(encode_claims(table), table.names if names_sent[rank] else None)

    names_sent = [msgspec.msgpack.decode(unsqueeze(each))[1] != b"" for each in good]
    a = decode_names(tables[0].names).keys.index("m.a")
    yield "the ranks trade all claims", [good[1], good[0]]
    yield "a rank is gone", good[:1]
    yield "a rank more", [*good, good[1]]
    yield "no ranks", []
    yield "not claims", [b"x", good[1]]
    yield "not the other's claims", [good[0], b""]
    for rank in ranks:
        table = tables[rank]
        moved = table.offset.copy()
        moved[table.tensor == a] = tables[1 - rank].offset[table.tensor == a]
        edited = {
            "one box is the other's": message(rank, offset=moved),
            "what was compared is declared": message(rank, replica_set=table.replica_set * 0),
            "rows gone": message(
                rank, tensor=table.tensor[:-1], offset=table.offset[:-1],
                extent=table.extent[:-1], replica_set=table.replica_set[:-1],
            ),
        }  # fmt: skip
        for what, data in edited.items():
            yield f"{what} (rank {rank})", [data if r == rank else good[r] for r in ranks]
    other = tables[0].names.replace(b"m.norm", b"m.mron")
    assert other != tables[0].names
    yield "another key", [
        claims_message(encode_claims(msgspec_replace(table, names=other)), other)
        for table in tables
    ]  # fmt: skip


def msgspec_replace(table: object, **fields: object) -> object:
    return dataclasses.replace(table, **fields)  # type: ignore[type-var]


def _with_header(data: bytes, **fields: object) -> bytes:
    """The file with other fields in its header."""
    end = int.from_bytes(data[:8], "little") + 8
    names = ("version", "encoded", "shares", "share_nbytes", "claims_nbytes", "claims")
    header = dict(zip(names, msgspec.msgpack.decode(data[8 : end - 32]), strict=True)) | fields
    sealed = seal(msgspec.msgpack.encode([*header.values()]))
    return len(sealed).to_bytes(8, "little") + sealed + data[end:]


def _made_of(claims: Claims, good: PlanNotes) -> bytes:
    """A file of other claims, with the shares of the good ones; all its digests are right."""
    try:
        encoded, _ = read_claims_messages(claims, range(len(claims)))
    except PlanError:
        encoded = list(good.encoded)
    num = len(claims)
    shares = [*good.shares, *good.shares][:num]
    return PlanNotes(claims, [*encoded, *encoded][:num], shares).encode()[0]


def _file_of(header: bytes) -> bytes:
    sealed = seal(header)
    return len(sealed).to_bytes(8, "little") + sealed


def _tampered(context: RankContext, root: str) -> list[tuple[str, bool, bool]]:
    """Whether the first save planned, and left the file as a run of its own leaves it."""
    found = []
    rank = context.rank
    with ProcessGroups.create(Layout(dp=2)) as groups:
        path = next((Path(root) / PLANS_DIR).iterdir())
        good = path.read_bytes()
        notes = plan_notes(good)
        assert notes.encode()[0] == good
        first, second = notes.shares
        foreign = [*_edits([*notes.claims])]
        cases = [("as it was", good)]
        cases += [(what, _made_of(claims, notes)) for what, claims in foreign]
        cases += [
            # Each rank finds the claims that it has made, and whatever share fits the header.
            (f"{what}, by ranks as they are",
             PlanNotes(claims, notes.encoded, notes.shares).encode()[0])
            for what, claims in foreign if len(claims) == 2
        ]  # fmt: skip
        cases += [
            ("shares trade", dataclasses.replace(notes, shares=[second, first]).encode()[0]),
            ("one share twice", dataclasses.replace(notes, shares=[first, first]).encode()[0]),
            ("no share", dataclasses.replace(notes, shares=[first, b""]).encode()[0]),
            ("a share of another kind",
             dataclasses.replace(notes, shares=[first, squeeze(b"x")]).encode()[0]),
            ("a share that is not the header's", good.replace(second, first, 1)
             if len(first) == len(second) else good.replace(second, bytes(len(second)), 1)),
            ("a header beyond the file", (1 << 40).to_bytes(8, "little") + good[8:]),
            ("lengths below zero", _with_header(good, share_nbytes=pack_ints(np.array([-1, 9])))),
        ]  # fmt: skip
        cases += [
            ("another version", _with_header(good, version=VERSION + 1)),
            ("cut short", good[: len(good) // 2]),
            ("a bit", good[:40] + bytes([good[40] ^ 1]) + good[41:]),
            ("a bit of the claims", good[:-40] + bytes([good[-40] ^ 1]) + good[-39:]),
            ("something behind it", good + b"x"),
            ("another type", _file_of(msgspec.msgpack.encode({"version": VERSION}))),
            ("empty", b""),
        ]
        for what, data in cases:
            groups.control.barrier(phase="test: before")
            if rank == 0:
                path.write_bytes(data)
            groups.control.barrier(phase="test: edited")
            with Checkpointer(root, groups=groups) as checkpointer:
                report = checkpointer.save(1, {"m": _base(rank)}, overwrite=True)
                loaded = checkpointer.load({"m": Stored()}, step=1).values["m"]
                assert isinstance(loaded, dict)
                for key, value in _base(rank).items():
                    assert isinstance(value, torch.Tensor | Sharded | Replicated)
                    _compare(value, loaded[key], rank, key)
            groups.control.barrier(phase="test: kept")
            found.append((what, report.planned, path.read_bytes() == good))
    return found


def test_kept_claims_that_are_not_the_ranks_own_are_planned_over(tmp_path: Path) -> None:
    """Whoever wrote them, with digests made good: the checkpoint is right, the file is replaced."""
    run_ranks(2, _keep_base, str(tmp_path))
    for found in run_ranks(2, _tampered, str(tmp_path)).results:
        assert found[0] == ("as it was", False, True)
        assert len(found) > 20
        for what, planned, replaced in found[1:]:
            assert planned, what
            assert replaced, what


def test_a_rejected_plan_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"t": {"x": torch.ones(3)}}
    with caplog.at_level(logging.INFO, logger="holdfast"):
        Checkpointer(tmp_path).save(1, state)
        assert all("is a new root" in each for each in caplog.messages), "there was none"
        caplog.clear()
        Checkpointer(tmp_path).save(2, state)
        assert not caplog.messages, "it was used"
        Checkpointer(tmp_path).save(3, {"t": {"x": torch.ones(4)}})
        assert len(caplog.messages) == 1
        assert "is not used: what rank 0 holds has changed" in caplog.messages[0]
        caplog.clear()
        path = next((tmp_path / PLANS_DIR).iterdir())
        path.write_bytes(b"x")
        Checkpointer(tmp_path).save(4, state)
        assert "is not used: it cannot be read: a header of 120 bytes" in caplog.messages[0]


def test_lookup_gives_a_plan_or_the_reason(tmp_path: Path) -> None:
    def new_planner(copies: CopyPolicy | None = None) -> Planner:
        groups = ProcessGroups.single()
        storage = PosixStorage(tmp_path)
        return Planner(storage, groups, codecs=Codecs(), block_nbytes=4096, copies=copies)

    planner = new_planner()
    local = planner.flatten({"t": {"x": torch.ones(3)}})
    other = planner.flatten({"t": {"x": torch.ones(4)}})
    assert planner.lookup(local, compare_all=False) == Rejected("no plan is kept")
    assert planner.lookup(local, compare_all=False) == Rejected("no plan was made yet")
    plan, notes = planner.plan_together(local, names=[local.names], compare_all=False)
    planner.add(plan, notes)
    assert planner.lookup(local, compare_all=False) is plan
    changed = Rejected("the structure of the state has changed")
    assert planner.lookup(other, compare_all=False) == changed
    assert isinstance(planner.lookup(local, compare_all=True), Rejected)
    planner.keep(plan)
    again = new_planner().lookup(local, compare_all=False)
    assert isinstance(again, RankPlan)
    assert (again.plan_digest, again.rows) == (plan.plan_digest, plan.rows)
    assert again.commit is not None
    assert plan.commit is not None
    assert again.commit.data == plan.commit.data
    planner.clear()
    assert isinstance(planner.lookup(local, compare_all=False), Rejected)
    # One file for each policy of copies: runs of different ones leave each other's alone.
    dp = partial(CopyPolicy, axes=("dp",))
    policies = [None, dp(), dp(max_fraction=0.5), dp(max_nbytes=4096), dp(max_nbytes=0)]
    paths = {new_planner(each).path(compare_all=False) for each in policies}
    assert len(paths) == len(policies)


def test_few_plans_are_kept_and_no_unnamed_files(tmp_path: Path) -> None:
    (tmp_path / PLANS_DIR).mkdir()
    stale = tmp_path / PLANS_DIR / ".tmp-old"
    stale.write_bytes(b"")
    os.utime(stale, (1, 1))
    for number in range(20):
        block_nbytes, all_too = 4096 << number // 2, bool(number % 2)
        with Checkpointer(tmp_path, block_nbytes=block_nbytes) as checkpointer:
            checkpointer.save(number, {"t": torch.ones(2)}, check_replicas=all_too)
    assert len(list((tmp_path / PLANS_DIR).iterdir())) == 16
    assert not stale.exists()


def test_a_lone_process_uses_its_plan_again(tmp_path: Path) -> None:
    state = {"t": {"x": torch.ones(3), "y": torch.arange(4)}}
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, state).planned
        assert not checkpointer.save(2, state).planned
    for step, planned in ((3, False), (4, False)):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.load(state)
            assert checkpointer.save(step, state).planned is planned


def test_a_kept_plan_is_not_written_again(tmp_path: Path) -> None:
    """Only a plan that no file holds is written: not by steady saves, and not by a later run."""
    touched: list[str] = []

    def watch(operation: str, path: str, start: int, nbytes: int) -> None:
        del start, nbytes
        if path.startswith(PLANS_DIR) and operation != "read":
            touched.append(operation)

    state = {"t": {"x": torch.ones(3), "y": torch.arange(4)}}
    with Checkpointer(PosixStorage(tmp_path, observer=watch)) as checkpointer:
        checkpointer.save(1, state)
        assert touched.count("replace") == 1
        touched.clear()
        checkpointer.save(2, state)
        checkpointer.save_async(3, state).result()
        checkpointer.save(4, state)
    assert touched == []
    with Checkpointer(PosixStorage(tmp_path, observer=watch)) as checkpointer:
        assert not checkpointer.save(5, state).planned
        state["t"]["x"] = torch.ones(5)
        assert touched == []
        checkpointer.save(6, state)
    assert touched.count("replace") == 1

"""Copies of replicated tensors with real ranks: stored per TP rank, read from near, all equal."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import (
    Checkpointer,
    CorruptionError,
    Layout,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Replicated,
    Sharded,
)
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.writer.leftovers import repair
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

ROWS = 64
STEP = "iter_0000001"
NORMS = ("norm", "router.bias.__tp_replica_0")
"""Replicated over everything; one has a name that other tools give to copies."""


def state_of(layout: Layout, rank: int, *, blank: bool = False) -> dict[str, Any]:
    """Two linears cut over TP and two replicated tensors; NaN where blank."""
    tensors: dict[str, Any] = {}
    tp, index = layout.tp, layout.coordinates(rank)["tp"]
    for name in ("up", "down"):
        size = ROWS // tp
        local = full(name, (ROWS, 32))[size * index : size * (index + 1)].clone()
        tensors[name] = Sharded(
            local.fill_(float("nan")) if blank else local, (ROWS, 32), {0: "tp"}
        )
    for name in NORMS:
        local = full(name, (33,))
        tensors[name] = Replicated(local.fill_(float("nan")) if blank else local)
    return {"model": tensors}


def check(state: dict[str, Any], layout: Layout, rank: int) -> None:
    """Every element is the one that was saved."""
    expected = state_of(layout, rank)["model"]
    for name, value in state["model"].items():
        assert torch.equal(value.local, expected[name].local), name


class OpenedFiles(PosixStorage):
    """Notes which data files are read."""

    def __init__(self, root: str | Path) -> None:
        self.opened: Counter[str] = Counter()
        super().__init__(Path(root), observer=self._observe)

    def _observe(self, operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "read" and "/data/" in path:
            self.opened[path.rpartition("/")[2]] += nbytes


def _save(
    groups: ProcessGroups, layout: Layout, rank: int, root: str, axes: tuple[str, ...]
) -> int:
    """Save twice in the background, the second time under the plan of the first."""
    with Checkpointer(root, groups=groups, replicate_over=axes) as checkpointer:
        for step in (1, 2):
            report = checkpointer.save_async(step, state_of(layout, rank)).result()
        assert not report.planned
        return report.copies_nbytes


def _load(
    groups: ProcessGroups, layout: Layout, rank: int, root: str, exchange: bool | str
) -> tuple[set[str], int]:
    """Load into NaN, with copies asked for at saves; the files read, and opens of the job."""
    storage = OpenedFiles(root)
    state = state_of(layout, rank, blank=True)
    with Checkpointer(storage, groups=groups, replicate_over=("tp",)) as checkpointer:
        report = checkpointer.load(state, step=1, exchange=exchange)
    check(state, layout, rank)
    assert report.missing == report.unexpected == report.replaced == ()
    assert report.num_opens == len(storage.opened)
    return set(storage.opened), report.job.num_opens


def rows_of(root: Path, key: str) -> list[tuple[int, int, dict[str, int]]]:
    """(copy, writer, its coordinates) of each stored chunk of a tensor."""
    with Snapshot.open(PosixStorage(root), STEP) as snapshot:
        files = snapshot.manifest.files
        return [
            (int(snapshot.index.copy[row]), files[file].writer, files[file].coordinate)
            for row in snapshot.rows_of(key).tolist()
            for file in [int(snapshot.index.file[row])]
        ]


MODES = (True, False, "auto")


def _locality(
    context: RankContext, root: str
) -> dict[str, tuple[int, dict[Any, tuple[set[str], int]]]]:
    """Save with copies and without; bytes of copies, and what each way of loading opens."""
    layout = Layout(tp=4, dp=2)
    found = {}
    with ProcessGroups.create(layout) as groups:
        for name, axes in (("with", ("tp",)), ("without", ())):
            extra = _save(groups, layout, context.rank, f"{root}/{name}", axes)
            found[name] = (
                extra,
                {how: _load(groups, layout, context.rank, f"{root}/{name}", how) for how in MODES},
            )
    return found


def test_one_copy_lies_in_a_file_of_each_tp_rank(tmp_path: Path) -> None:
    """B1, B2, P7: four copies for TP4, in files of four coordinates; loads read what is near."""
    results = run_ranks(8, _locality, str(tmp_path)).results
    nbytes = sum(full(name, (33,)).nbytes for name in NORMS)
    for name, extra in (("with", 3 * nbytes), ("without", 0)):
        assert {result[name][0] for result in results} == {extra}
        with Snapshot.open(PosixStorage(tmp_path / name), STEP) as snapshot:
            totals = snapshot.manifest.totals
            assert totals.stored_nbytes - totals.nbytes == extra
        for key in NORMS:
            stored = sorted(rows_of(tmp_path / name, f"model.{key}"), key=lambda row: row[0])
            assert [copy for copy, *_ in stored] == list(range(4 if extra else 1))
            assert len({place["tp"] for *_, place in stored}) == len(stored)
        assert {copy for copy, *_ in rows_of(tmp_path / name, "model.up")} == {0}
        for how in MODES:
            opens = [len(result[name][1][how][0]) for result in results]
            assert {result[name][1][how][1] for result in results} == {sum(opens)}
    for rank, result in enumerate(results):
        loads = result["with"][1]
        own, twin = (f"{number:05d}.safetensors" for number in (rank, (rank + 4) % 8))
        assert loads[True] == ({own}, 8)
        # Without exchange a copy is taken from a file that the rank opens anyway.
        assert loads[False][0] <= {own, twin}
        assert loads["auto"] == loads[False]
    assert results[0]["with"][1][False][1] < results[0]["without"][1][False][1]


def _crossed(context: RankContext, root: str) -> None:
    """Load what TP4 saved with copies and without, under this many ranks."""
    os.environ["HOLDFAST_HOST_ID"] = "aabbccdd"[context.rank]
    for sizes in ({"tp": 4, "dp": 2}, {"tp": 2, "dp": 4}, {"tp": 8}):
        layout = Layout(**sizes, name=f"tp{sizes['tp']}")
        with ProcessGroups.create(layout) as groups:
            for name in ("with", "without"):
                for how in MODES:
                    _load(groups, layout, context.rank, f"{root}/{name}", how)


def _save_both(context: RankContext, root: str) -> None:
    layout = Layout(tp=4)
    with ProcessGroups.create(layout) as groups:
        for name, axes in (("with", ("tp",)), ("without", ())):
            _save(groups, layout, context.rank, f"{root}/{name}", axes)


def test_copies_are_loaded_under_any_layout_and_none_are_needed(tmp_path: Path) -> None:
    """B3, B4, B5: with copies or without, under TP1, TP2, TP4, TP8; targets are NaN before."""
    run_ranks(4, _save_both, str(tmp_path))
    run_ranks(8, _crossed, str(tmp_path))
    for name in ("with", "without"):
        state = state_of(Layout(), 0, blank=True)
        report = Checkpointer(tmp_path / name, replicate_over=("tp",)).load(state)
        check(state, Layout(), 0)
        assert report.step == 2


def _two_checkpoints(context: RankContext, root: str) -> set[str]:
    """Load checkpoints of four and of two writers in turns; what was read of the latter."""
    layout, half = Layout(tp=4), Layout(tp=2, name="half")
    storage = OpenedFiles(root)
    with (
        ProcessGroups.create(layout) as groups,
        Checkpointer(storage, groups=groups, replicate_over="tp") as checkpointer,
    ):
        checkpointer.save(1, state_of(layout, context.rank))
        if context.rank < 2:
            with ProcessGroups.create(half) as two, Checkpointer(root, groups=two) as other:
                other.save(9, state_of(half, context.rank))
        groups.control.barrier(phase="test")
        for step in (1, 9, 1, 9):
            storage.opened.clear()
            state = state_of(layout, context.rank, blank=True)
            checkpointer.load(state, step=step, exchange=True)
            check(state, layout, context.rank)
        return set(storage.opened)


def test_the_readers_of_one_checkpoint_are_not_those_of_another(tmp_path: Path) -> None:
    """B11: one checkpointer loads checkpoints of other writers, each from its own files."""
    for opened in run_ranks(4, _two_checkpoints, str(tmp_path)).results:
        assert opened <= {"00000.safetensors", "00001.safetensors"}


def _optimizer(context: RankContext, root: str) -> None:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        norm = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        shard = torch.nn.Parameter(torch.ones(16, 8, dtype=torch.bfloat16))
        module = torch.nn.Module()
        module.register_parameter("norm", norm)
        module.register_parameter("up", shard)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        optimizer.zero_grad()
        ((norm.float().sum() + shard.float().sum()) ** 2).backward()
        optimizer.step()
        moments = {
            name: {
                "exp_avg": optimizer.state[p]["exp_avg"],
                "main": p.detach().float(),
                # Made by a transform: a fused tensor of what the rank holds.
                "fused": torch.cat([p.detach().reshape(-1)] * 3),
            }
            for name, p in module.named_parameters()
        }
        state = {
            "norm": {key: Replicated(value) for key, value in moments["norm"].items()},
            "up": {
                "exp_avg": Sharded(moments["up"]["exp_avg"], (32, 8), {0: "tp"}),
            },
        }
        with Checkpointer(root, groups=groups, replicate_over=("tp",)) as checkpointer:
            checkpointer.save(1, {"optimizer": state})


def test_moments_and_what_a_transform_made_have_copies_too(tmp_path: Path) -> None:
    """B7: whatever is replicated over TP; nothing that is cut along it."""
    run_ranks(4, _optimizer, str(tmp_path))
    for name in ("exp_avg", "main", "fused"):
        assert len(rows_of(tmp_path, f"optimizer.norm.{name}")) == 2
    assert [copy for copy, *_ in rows_of(tmp_path, "optimizer.up.exp_avg")] == [0, 0]


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _drifting(context: RankContext, root: str) -> list[str]:
    """Rank 1's replica differs; what raises, and what is logged."""
    log = _Log()
    logging.getLogger("holdfast").addHandler(log)
    layout = Layout(tp=2)
    said = []
    with ProcessGroups.create(layout) as groups:
        state = state_of(layout, context.rank) | {"other": {"x": torch.ones(3)}}
        if context.rank == 1:
            state["model"]["norm"].local[7] += 1
        for kind in ("save", "save_async"):
            checkpointer = Checkpointer(root, groups=groups, replicate_over="tp")
            save = getattr(checkpointer, kind)
            with pytest.raises(PlanError, match=r"model\.norm.*copies differ") as caught:
                save(1, state) if kind == "save" else save(1, state).result()
            checkpointer.close()
            said.append(str(caught.value))
            assert checkpointer.latest() is None
        with (
            pytest.raises(PlanError, match="replicate_over=tp"),
            Checkpointer(
                root, groups=groups, replicate_over="tp" if context.rank else ()
            ) as checkpointer,
        ):
            checkpointer.save(1, state)
        with Checkpointer(
            root, groups=groups, replicate_over="tp", on_drift="warn"
        ) as checkpointer:
            checkpointer.save(1, state)
            blank = state_of(layout, context.rank, blank=True)
            log.lines.clear()
            checkpointer.load(blank)
            check(blank, layout, context.rank)
            said += log.lines
        for exchange in (True, False):
            blank = state_of(layout, context.rank, blank=True)
            with pytest.raises(CorruptionError, match="copies differ") as damaged:
                Checkpointer(root, groups=groups).load(blank, exchange=exchange)
            said.append(str(damaged.value))
            # What is not asked for is not in the way.
            Checkpointer(root, groups=groups).load({"other": {"x": torch.zeros(3)}})
    return said


def test_copies_that_differ_are_found_at_save_load_and_verify(tmp_path: Path) -> None:
    """Drift: nothing is committed, or loaded, unless asked; files and ranks are named."""
    for said in run_ranks(2, _drifting, str(tmp_path)).results:
        assert len(said) == 5
        for message in said:
            assert "data/00000.safetensors of rank 0; data/00001.safetensors of rank 1" in message
        assert "the first copy is loaded" in said[2]
    (damage,) = verify_snapshot(PosixStorage(tmp_path), STEP)
    assert "model.norm" in damage.what
    assert "copies differ" in damage.what


def _looks_late(context: RankContext, root: str) -> str:
    """Rank 0 removes what the failed save has left while rank 1's writer is stopped."""
    layout = Layout(tp=2)
    with ProcessGroups.create(layout) as groups:
        state = state_of(layout, context.rank)
        if context.rank == 1:
            state["model"]["norm"].local[7] += 1
        with Checkpointer(root, groups=groups, replicate_over="tp") as checkpointer:
            checkpointer.prepare(state)
            writer = checkpointer.stats.writer_pid
            assert writer is not None
            if context.rank == 0:
                os.kill(writer, signal.SIGSTOP)
            pending = checkpointer.save_async(1, state)
            if context.rank == 1:
                while pending.phase != "committing":
                    time.sleep(0.01)
                os.kill(writer, signal.SIGSTOP)
            groups.control.barrier(phase="all bytes are written")
            if context.rank == 0:
                os.kill(writer, signal.SIGCONT)
                while not pending.done():
                    time.sleep(0.01)
                (leftover,) = repair(PosixStorage(root))
                assert leftover.fate == "removed"
            groups.control.barrier(phase="the record of the failure is gone")
            if context.rank == 1:
                os.kill(writer, signal.SIGCONT)
            with pytest.raises(PlanError, match="copies differ") as caught:
                pending.result()
    return str(caught.value)


def test_a_rank_that_looks_after_a_failed_save_was_removed_names_its_cause(tmp_path: Path) -> None:
    first, second = run_ranks(2, _looks_late, str(tmp_path)).results
    assert second == f"rank 0: {first}"


def _harm(root: Path, step: int, files: tuple[int, ...]) -> None:
    """Flip a bit of the norm in each of these files."""
    directory = f"iter_{step:07d}"
    with Snapshot.open(PosixStorage(root), directory) as snapshot:
        index, infos = snapshot.index, snapshot.manifest.files
        for row in snapshot.rows_of("model.norm").tolist():
            if int(index.file[row]) in files:
                path = root / directory / infos[int(index.file[row])].name
                content = bytearray(path.read_bytes())
                content[int(index.start[row]) + 5] ^= 4
                path.write_bytes(content)


def _damaged(context: RankContext, root: str) -> tuple[int, int]:
    """One copy of a norm is damaged, then all of them are: replaced copies, and warnings."""
    log = _Log()
    logging.getLogger("holdfast").addHandler(log)
    layout = Layout(tp=2)
    num_replaced = 0
    with ProcessGroups.create(layout) as groups:
        _save(groups, layout, context.rank, root, ("tp",))
        if context.rank == 0:
            _harm(Path(root), 1, (1,))
            _harm(Path(root), 2, (0, 1))
        groups.control.barrier(phase="test")
        for how in (False, True):
            state = state_of(layout, context.rank, blank=True)
            report = Checkpointer(root, groups=groups).load(state, step=1, exchange=how)
            check(state, layout, context.rank)
            num_replaced += len(report.replaced)
        warnings = sum("replaced by good ones" in line for line in log.lines)
        with pytest.raises(CorruptionError, match=r"model\.norm"):
            Checkpointer(root, groups=groups).load(
                state_of(layout, context.rank, blank=True), step=2
            )
    return num_replaced, warnings


def test_a_damaged_copy_is_replaced_by_the_other(tmp_path: Path) -> None:
    """B8: with copies as a save makes them; all damaged fails on all ranks."""
    results = run_ranks(2, _damaged, str(tmp_path)).results
    assert sum(replaced for replaced, _ in results) >= 1
    assert all(replaced == warnings for replaced, warnings in results)

"""Two grids in one checkpoint, and replicas that drift (rows A5, A10, P4, M4)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from holdfast import (
    RNG,
    Checkpointer,
    Layout,
    OnLayout,
    PendingSave,
    PlacementError,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Replicated,
    SaveReport,
)
from holdfast.format.reader import Snapshot
from tests.checkpoint.common import assert_equal, make_state
from tests.format.fingerprints import snapshot_fingerprints
from tests.harness import RankContext, run_ranks

LEFT = {"tp": 2, "dp": 2, "ranks": (0, 1, 2, 3), "name": "vision"}
RIGHT = {"tp": 4, "ranks": (4, 5, 6, 7), "name": "language"}


def _two_grids(context: RankContext, root: str) -> list[object]:
    rank = context.rank
    mine = Layout(**(LEFT if rank < 4 else RIGHT))  # type: ignore[arg-type]
    union = Layout(dp=8, name="union")
    messages: list[object] = []
    with ProcessGroups.create(mine) as groups, ProcessGroups.create(union) as both:
        checkpointer = Checkpointer(root, groups=both)

        def named(state: dict[str, object]) -> dict[str, object]:
            """Equal inner names under the module's own name; an RNG entry on each side."""
            del state["values"]
            parts: dict[str, object] = {
                f"{mine.name}.{part}": OnLayout(groups, value) for part, value in state.items()
            }
            return {**parts, "rng": RNG(), f"{mine.name} rng": OnLayout(mine, RNG())}

        torch.manual_seed(10 + rank)
        checkpointer.save(1, named(make_state(mine, rank)))
        draws = torch.rand(4)
        checkpointer.save_async(2, named(make_state(mine, rank))).result(60)
        for step in (1, 2):
            target = make_state(mine, rank, blank=True)
            report = checkpointer.load(named(dict(target)), step=step)
            assert_equal(target, mine, rank)
            messages.append(sorted(report.not_requested))
        checkpointer.load({"rng": RNG()}, step=1)
        assert torch.equal(torch.rand(4), draws)

        # Without the module's name both grids claim one set of keys: refused before any byte.
        clash = make_state(mine, rank)
        began = time.monotonic()
        with pytest.raises(PlanError) as caught:
            checkpointer.save(3, {"model": OnLayout(groups, clash["model"])})
        assert time.monotonic() - began < 30
        messages.append(str(caught.value))
        if rank == 0:
            with pytest.raises(PlacementError, match="leave it out"):
                Checkpointer(f"{root}/x", groups=ProcessGroups.single()).save(
                    1,
                    {"m": OnLayout(Layout(**RIGHT), {})},  # type: ignore[arg-type]
                )
        assert checkpointer.steps() == [1, 2]
    return messages


def test_two_disjoint_grids_share_one_checkpoint(tmp_path: Path) -> None:
    """A5, M4: one commit, no collision, each loads its own; equal names are an error."""
    for rank, messages in enumerate(run_ranks(8, _two_grids, str(tmp_path)).results):
        other = "language" if rank < 4 else "vision"
        assert all(f"{other}.model" in names for names in messages[:2])  # type: ignore[operator]
        clash = messages[2]
        assert isinstance(clash, str)
        assert "model.norm" in clash
        assert "vision" in clash
        assert "language" in clash
    assert not list(tmp_path.glob(".saving*"))


def _finished(saved: SaveReport | PendingSave) -> SaveReport:
    return saved.result(60) if isinstance(saved, PendingSave) else saved


def _drift(context: RankContext, root: str) -> list[str]:
    layout = Layout(dp=4)
    messages = []
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        tensor = torch.arange(1000, dtype=torch.float32)
        state = {"m": {"norm": Replicated(tensor)}}
        checkpointer.save(1, state, check_replicas=True)
        if context.rank == 2:
            tensor.view(torch.int32)[500] ^= 1
        checkpointer.save(2, state)  # a declaration is trusted while the check is off
        for save in (checkpointer.save, checkpointer.save_async):
            with pytest.raises(PlanError) as caught:
                _finished(save(3, state, check_replicas=True))
            messages.append(str(caught.value))
            if save == checkpointer.save_async:
                checkpointer.save(4, state)  # every rank has raised the failure already
        with pytest.raises(PlanError, match="disagree on check_replicas"):
            checkpointer.save(5, state, check_replicas=context.rank == 0)
        assert checkpointer.latest() == 4
        checkpointer.save(6, state)
    return messages


def test_a_replica_that_differs_by_one_bit_is_named(tmp_path: Path) -> None:
    """A10 (iii), P4: with the check on, key, ranks, and by majority the odd one."""
    for messages in run_ranks(4, _drift, str(tmp_path)).results:
        for message in messages:
            assert "m.norm" in message
            assert "majority: [2]" in message


def _save_with_prints(context: RankContext, root: str, tp: int) -> None:
    layout = Layout(tp=tp, dp=4 // tp)
    with (
        ProcessGroups.create(layout) as groups,
        Checkpointer(root, groups=groups, fingerprints=True) as checkpointer,
    ):
        state = make_state(layout, context.rank)
        del state["own"]
        checkpointer.save(1, state)
        checkpointer.save_async(2, state).result(60)


def test_fingerprints_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    """P3: equal in the manifests of two layouts, and equal to those of the bytes read back."""
    found = []
    for tp in (2, 4):
        run_ranks(4, _save_with_prints, str(tmp_path / str(tp)), tp)
        storage = PosixStorage(tmp_path / str(tp))
        for name in ("iter_0000001", "iter_0000002"):
            with Snapshot.open(storage, name) as snapshot:
                stored = {info.key: info.fingerprint for info in snapshot.manifest.tensors}
                assert snapshot_fingerprints(snapshot) == stored
                found.append(stored)
    assert all(stored == found[0] for stored in found)
    assert len(set(found[0].values())) == len(found[0])

"""Checkpoints of fully sharded models load into every other way to hold them: K1, K3, K8, F10."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast import Checkpointer
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.fsdp.ways import WAYS, Job, Way, make_groups
from tests.harness import RankContext, run_ranks

TRAINED = 2


def keys(root: str, step: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, but for the main parameters of ZeRO."""
    with Snapshot.open(PosixStorage(Path(root)), step_dir(step)) as snapshot:
        tensors = snapshot.manifest.tensors
        return {t.key: t.shape for t in tensors if not t.key.startswith("optimizer.main.")}


def bitwise(found: dict[str, Tensor], expected: dict[str, Tensor], where: object) -> None:
    """Equal names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
    for name, value in found.items():
        other = expected[name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), (where, name)
        assert torch.equal(
            value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        ), (where, name)


def make_truth(root: str, rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """Train one process; rank 0 saves it as step 0. What it holds, and its losses."""
    groups = make_groups(Way())
    assert groups is not None
    job = Job(Way(), groups)
    job.train(steps=TRAINED)
    if rank == 0:
        Checkpointer(root, groups=groups).save(0, job.state())
    return job.held(), job.losses()


def load_bare(root: str, step: int, *, widened: bool = False) -> dict[str, Tensor]:
    """What a model that never heard of FSDP2 has after a load; `widened`: by ZeRO, to float32."""
    groups = make_groups(Way())
    assert groups is not None
    job = Job(Way(), groups, seed=9)
    report = Checkpointer(root, groups=groups).load(job.state(), step=step, cast=widened)
    assert (report.missing, report.unexpected) == ((), ())
    assert widened or report.cast == ()
    return job.held()


def every_way(context: RankContext, root: str, names: list[str]) -> list[str]:
    """Each way loads the bare checkpoint, saves it, trains on, saves, and the next one loads."""
    truth, losses = make_truth(root, context.rank)
    torch.distributed.barrier()
    before: tuple[int, dict[str, Tensor]] = (0, truth)
    done = []
    for number, name in enumerate(names):
        way = WAYS[name]
        groups = make_groups(way)
        shared: list[object] = [None]
        if groups is not None:
            with groups:
                checkpointer = Checkpointer(root, groups=groups)
                job = Job(way, groups, seed=5)
                checkpointer.load(job.state(), step=0, cast=bool(way.zero))
                assert not (job.losses() - losses).abs().max() > 1e-5, name
                checkpointer.save(3 * number + 1, job.state())
                check_holds(job, truth, name)
                # a twin, in which state for other steps and whole weights are alive already
                twin = Job(way, groups, seed=6)
                twin.losses()
                step, expected = before
                checkpointer.load(twin.state(), step=step, cast=bool(way.zero))
                check_holds(twin, expected, (name, "loads", step))
                if way.strategy is not None:
                    job.train(first=TRAINED)
                    checkpointer.save(3 * number + 2, job.state())
                    shared = [job.held()]
            done.append(name)
        if way.strategy is not None:
            first = way.layout.get("ranks", (0,))[0]
            torch.distributed.broadcast_object_list(shared, src=first)
            before = (3 * number + 2, shared[0])  # type: ignore[assignment]
        torch.distributed.barrier()
        if context.rank == number % 4:
            loaded = load_bare(root, 3 * number + 1, widened=bool(way.zero))
            bitwise(loaded, truth, name)
            assert keys(root, 3 * number + 1) == keys(root, 0), name
            if way.strategy is not None:
                bitwise(load_bare(root, 3 * number + 2), before[1], (name, "trained"))
    return done


def check_holds(job: Job, expected: dict[str, Tensor], where: object) -> None:
    """What a job holds is what was loaded; sharded state is proved by saving it again."""
    found = job.held()
    if job.way.zero:
        expected = {name: expected[name] for name in found}
    bitwise(found, expected, where)


FIRST = ["dp4 optim_grads_params", "hybrid ep2", "zero1"]
OTHERS = [
    "dp4 no_shard",
    "dp4 ep2 optim",
    "permuted",
    "cp2",
    "compiled",
    "checkpointed",
    "zero2 tp2",
]
"""Each strategy, axis and wrapping that the first ones leave out."""


def check_ways(tmp_path: Path, names: list[str]) -> None:
    done = run_ranks(4, every_way, str(tmp_path), names, timeout_s=280).results
    for name in names:
        assert any(name in each for each in done), name


@pytest.mark.slow
def test_any_way_loads_what_another_saved(tmp_path: Path) -> None:
    """K1, K3, K8, F10, E7: bare, strategies, experts, replicas, tensor parallelism, ZeRO."""
    check_ways(tmp_path, FIRST)


@pytest.mark.slow
def test_other_ways_load_what_the_one_before_saved(tmp_path: Path) -> None:
    """K1, K3, K8, F10, E7: wrapped layers and ranks in other orders included."""
    check_ways(tmp_path, OTHERS)


@pytest.mark.nightly
def test_every_way_loads_what_the_one_before_saved(tmp_path: Path) -> None:
    """K1, K3, K8, F10, E7: all of them."""
    check_ways(tmp_path, list(WAYS))

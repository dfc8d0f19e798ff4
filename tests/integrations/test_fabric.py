"""Lightning Fabric: killed at any step, a run goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.forks import ForkServer
from tests.integrations.kills import (
    Resumed,
    beside_a_shorter_one,
    check_four_ranks,
    check_kills,
    check_loop_within_a_loop,
    check_refused_loops,
    check_shorter_loader,
    check_variant,
    in_two_loops,
    kill_at_step_of,
    killed_once,
    leaves_early,
    many_kills,
    on_four_ranks,
    resumed_by,
    served_by,
    straight_of,
    with_workers_that_stay,
    within_a_loop,
)
from tests.integrations.pages import program_of

PROGRAM = program_of("lightning", "fabric")
EPOCHS, STEPS = 3, 30
KILL = kill_at_step_of("lightning_fabric.wrappers", "_FabricOptimizer")

server = served_by("lightning_fabric", "holdfast.integrations.fabric")
straight = straight_of(PROGRAM, EPOCHS, f"step {STEPS}, loss ")
resumed = resumed_by(killed_once(PROGRAM, EPOCHS, KILL))


@pytest.mark.slow
@pytest.mark.parametrize("at", [6, pytest.param(11, marks=pytest.mark.nightly)])
def test_killed_and_resumed_bitwise(resumed: Resumed, straight: list[str], at: int) -> None:
    """In the middle of an epoch, and right after the end of one."""
    assert resumed(at) == straight


@many_kills
def test_killed_at_random_steps(resumed: Resumed, straight: list[str], num_kills: int) -> None:
    check_kills(resumed, straight, num_kills, first=3, stop=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 8])
def test_a_loop_that_seeds_and_leaves_its_epochs(
    server: ForkServer, tmp_path: Path, at: int
) -> None:
    """X20. Right after a save at the end of an epoch that was left, and within the next one."""
    saved = "    checkpoints.save(overwrite=True)\ncheckpoints.close()"
    program = leaves_early(PROGRAM.replace("checkpoints.close()", saved), "seed_everything")
    kill = KILL.format(at=at, rank=0)
    check_variant(server, tmp_path, program, kill=kill, epochs=EPOCHS)


TWO_LOOPS = in_two_loops(PROGRAM, "fabric.setup_dataloaders")


@pytest.mark.slow
def test_an_epoch_of_two_loops_of_fabric(server: ForkServer, tmp_path: Path) -> None:
    """X28. Within the second loop of an epoch."""
    check_variant(server, tmp_path, TWO_LOOPS, kill=KILL.format(at=13, rank=0), epochs=2)


@pytest.mark.slow
def test_loops_of_fabric_that_would_train_again_are_refused(
    server: ForkServer, tmp_path: Path
) -> None:
    """X28. Or that would pass over what is left of the saved one."""
    check_refused_loops(server, tmp_path, TWO_LOOPS, kill=KILL.format(at=13, rank=0))


@pytest.mark.slow
def test_a_loader_of_fabric_that_has_ended_beside_a_longer_one(
    server: ForkServer, tmp_path: Path
) -> None:
    """X28."""
    program = beside_a_shorter_one(PROGRAM, "fabric.setup_dataloaders")
    check_shorter_loader(server, tmp_path, program, kill=KILL.format(at=18, rank=0))


@pytest.mark.slow
def test_a_loop_of_fabric_within_a_loop(server: ForkServer, tmp_path: Path) -> None:
    """X28."""
    program = within_a_loop(PROGRAM, "fabric.setup_dataloaders")
    kill = KILL.format(at=13, rank=0)
    check_loop_within_a_loop(server, tmp_path, program, every="every=2", kill=kill)


SHARDED = """
import os
from torch.distributed.fsdp import fully_shard
from lightning_fabric.strategies import ModelParallelStrategy
def shard(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])
size = int(os.environ["WORLD_SIZE"])
sharded = dict(strategy=ModelParallelStrategy(shard, size, 1))
""" + (
    PROGRAM.replace("Fabric(", "Fabric(**sharded, ")
    .replace(
        "model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))",
        "model = fabric.setup(model)\n"
        "optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))",
    )
    .replace("p.double()", "p.full_tensor().double()")
)


@on_four_ranks(PROGRAM, SHARDED, nightly="DDP")
def test_four_ranks_bitwise_and_then_two(server: ForkServer, tmp_path: Path, program: str) -> None:
    check_four_ranks(
        server,
        tmp_path,
        program,
        silent=("loss {loss.item():.17g}, ", ""),
        every=("every=2", "every=5"),
        kill=KILL,
        steps=5,
    )


@pytest.mark.slow
def test_workers_that_stay_from_epoch_to_epoch(server: ForkServer, tmp_path: Path) -> None:
    """A run that starts them again draws no other order of the data."""
    program = with_workers_that_stay(PROGRAM)
    check_variant(server, tmp_path, program, kill=KILL.format(at=13, rank=0), epochs=EPOCHS)


def test_gradients_that_are_accumulated_go_on(server: ForkServer, tmp_path: Path) -> None:
    """X27. Every second batch is saved, and every third makes a step.

    X20. Values of the state are put into it.
    """
    step = "        optimizer.step()\n        optimizer.zero_grad()\n"
    third = "".join(f"    {line}\n" for line in step.splitlines())
    third = "        if checkpoints.step % 3 == 2:\n" + third
    counted = '        state["seen"] += 1\n        state["losses"].append(loss.item())\n'
    accumulated = PROGRAM.replace(step, third + counted)
    accumulated = accumulated.replace('optimizer": optimizer}', 'optimizer": optimizer, **values}')
    accumulated = accumulated.replace("state = {", 'values = {"seen": 0, "losses": []}\nstate = {')
    accumulated += (
        "print(state['seen'], state['losses'], [p.tolist() for p in model.parameters()])\n"
    )
    check_variant(server, tmp_path, accumulated, kill=KILL.format(at=3, rank=0), epochs=2)


OTHER_LOADERS = """
import sys, torch
from lightning_fabric import Fabric
from holdfast.errors import MismatchError
from holdfast.integrations.fabric import FabricCheckpoints
fabric = Fabric(accelerator="cpu", devices=1)
def made(num_loaders, **state):
    data = torch.arange(8.0).reshape(4, 2)
    loaders = [torch.utils.data.DataLoader(data) for _ in range(num_loaders)]
    loaders = [fabric.setup_dataloaders(each) for each in loaders]
    state["model"] = fabric.setup_module(torch.nn.Linear(2, 2))
    checkpoints = FabricCheckpoints(fabric, sys.argv[1], state, loaders=loaders)
    return checkpoints, loaders, state
checkpoints, loaders, state = made(2, counts={"b": 1, "a": 2})
for _ in zip(*loaders):
    checkpoints.after_step(every=0)
    if checkpoints.step == 2:
        checkpoints.save().result()
seen = []
for num_loaders in range(4):
    head = fabric.setup_module(torch.nn.Linear(2, 1))
    checkpoints, loaders, state = made(num_loaders, counts={"a": 0, "b": 0}, head=head)
    try:
        checkpoints.load(allow_missing=("head*", "fabric.loaders.2*"))
        assert [*state["counts"].items()] == [("b", 1), ("a", 2)]
        seen += [len(list(each)) for each in loaders]
        checkpoints.after_step(every=0)
    except MismatchError as error:
        seen.append(str(error)[19:69])
print(seen)
"""


def test_other_loaders_and_more_modules_than_were_saved(server: ForkServer, tmp_path: Path) -> None:
    """X20. What the load agrees to begins anew. Without any loader a program may only evaluate."""
    fewer = "the checkpoint has the places of 2 loaders, and th"
    lines = server.lines(OTHER_LOADERS, tmp_path, directory=tmp_path)
    assert lines == [str([fewer, fewer, 2, 2, 2, 2, 4])]


def test_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    plain = PROGRAM.replace("loaders=[loader]", "loaders=[torch.utils.data.DataLoader([1])]")
    ends = server.run(plain, tmp_path, 1, directory=tmp_path)
    assert "takes a DataLoader that fabric.setup_dataloaders returned" in ends[0].output
    named = PROGRAM.replace("state = {", 'state = {"rng": {"drawn": 1}, ')
    ends = server.run(named, tmp_path, 1, directory=tmp_path)
    assert "an entry of the state named 'rng'" in ends[0].output


IN_A_BUCKET = """
import torch
from lightning_fabric import Fabric
from holdfast.integrations.fabric import FabricCheckpoints
starts = []
for start in (0, 1):
    state = {"weight": torch.full((1,), 1.0 - start)}
    fabric = Fabric(accelerator="cpu", devices=1)
    checkpoints = FabricCheckpoints.resume(fabric, "memory://bucket/run", state)
    starts.append((checkpoints.step, state["weight"].item()))
    checkpoints.step += 1
    checkpoints.save()
    checkpoints.close()
print(starts)
"""


def test_a_run_in_a_bucket_is_resumed(server: ForkServer, tmp_path: Path) -> None:
    """X20. It began again, and replaced the checkpoints of the run before."""
    pytest.importorskip("obstore")
    assert server.lines(IN_A_BUCKET, directory=tmp_path) == ["[(0, 1.0), (1, 1.0)]"]


CLOSED = PROGRAM.replace(
    "checkpoints.close()",
    "from holdfast import GroupError, StorageError\n"
    "def close_of_a_failed_save(close=checkpoints.checkpointer.close):\n"
    "    close()\n"
    "    raise StorageError('the save failed')\n"
    "checkpoints.checkpointer.close = close_of_a_failed_save\n"
    "try:\n"
    "    checkpoints.close()\n"
    "    raise AssertionError('nothing was raised')\n"
    "except StorageError:\n"
    "    pass\n"
    "try:\n"
    "    checkpoints.checkpointer.groups.has('dp')\n"
    "    raise AssertionError('the groups are open')\n"
    "except GroupError as error:\n"
    "    assert 'are closed' in str(error), error\n",
)


def test_communicators_are_destroyed_also_if_a_save_has_failed(
    server: ForkServer, tmp_path: Path
) -> None:
    """`close` raises what failed, and gives back what it has made."""
    server.lines(CLOSED, tmp_path / "run", 1, directory=tmp_path)

"""Accelerate: killed at any step, a run goes on as if it had not been."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import Checkpointer, PerRankValues
from holdfast.state.tensor_elements import equal_trees
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
    killed_once,
    leaves_early,
    many_kills,
    on_four_ranks,
    resumed_by,
    served_by,
    straight_of,
    within_a_loop,
)
from tests.integrations.pages import program_of

PROGRAM = program_of("transformers", "accelerate")
EPOCHS, STEPS = 3, 18
KILL = """
import os, signal
from accelerate.scheduler import AcceleratedScheduler
count, step = 0, AcceleratedScheduler.step
def kill(self, *args, **named):
    global count
    count += self.gradient_state.sync_gradients
    if count == {at} and rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **named)
AcceleratedScheduler.step = kill
"""

server = served_by(
    "accelerate", "torchdata.stateful_dataloader", "holdfast.integrations.accelerate"
)
straight = straight_of(PROGRAM, EPOCHS, f"step {STEPS}, loss ")
resumed = resumed_by(killed_once(PROGRAM, EPOCHS, KILL))


@pytest.mark.slow
@pytest.mark.parametrize("at", [5, 13])
def test_killed_and_resumed_bitwise(resumed: Resumed, straight: list[str], at: int) -> None:
    """In the middle of an epoch, and right after the end of one."""
    assert resumed(at) == straight


@many_kills
def test_killed_at_random_steps(resumed: Resumed, straight: list[str], num_kills: int) -> None:
    check_kills(resumed, straight, num_kills, first=3, stop=STEPS)


BESIDES = PROGRAM.replace(
    "checkpoints = ",
    "other = accelerator.prepare(torch.utils.data.DataLoader(Samples(), batch_size=5))\n"
    "def again_and_again():\n"
    "    while True:\n"
    "        yield from other\n"
    "others = again_and_again()\n"
    "checkpoints = ",
).replace("for batch in loader:", "for batch, _ in zip(loader, others):")


@pytest.mark.parametrize(
    ("program", "at"),
    [
        pytest.param(leaves_early(PROGRAM, "set_seed"), 5, marks=pytest.mark.slow, id="left"),
        pytest.param(leaves_early(PROGRAM, "set_seed"), 8, id="seeded"),
        pytest.param(BESIDES, 10, id="besides"),
    ],
)
def test_a_loop_that_seeds_and_leaves_its_epochs(
    server: ForkServer, tmp_path: Path, program: str, at: int
) -> None:
    """X20. After an epoch that was left, within the next, and beside an endless loader."""
    kill = KILL.format(at=at, rank=0)
    check_variant(server, tmp_path, program, kill=kill, epochs=EPOCHS)


TWO_LOOPS = in_two_loops(PROGRAM, "accelerator.prepare")


@pytest.mark.parametrize("at", [8, pytest.param(11, marks=pytest.mark.slow)])
def test_an_epoch_of_two_loops(server: ForkServer, tmp_path: Path, at: int) -> None:
    """X28. Within the second loop of an epoch, and at its end."""
    check_variant(server, tmp_path, TWO_LOOPS, kill=KILL.format(at=at, rank=0), epochs=2)


def test_loops_that_would_train_again_or_not_at_all_are_refused(
    server: ForkServer, tmp_path: Path
) -> None:
    """X28."""
    check_refused_loops(server, tmp_path, TWO_LOOPS, kill=KILL.format(at=9, rank=0))


@pytest.mark.slow
def test_a_loader_that_has_ended_beside_a_longer_one(server: ForkServer, tmp_path: Path) -> None:
    """X28."""
    program = beside_a_shorter_one(PROGRAM, "accelerator.prepare")
    check_shorter_loader(server, tmp_path, program, kill=KILL.format(at=12, rank=0))


@pytest.mark.slow
def test_a_loop_within_a_loop(server: ForkServer, tmp_path: Path) -> None:
    """X28."""
    program, kill = within_a_loop(PROGRAM, "accelerator.prepare"), KILL.format(at=8, rank=0)
    check_loop_within_a_loop(server, tmp_path, program, every="every=2", kill=kill)


BETWEEN = """
import os, sys, torch
from accelerate import Accelerator
from holdfast.integrations.accelerate import AccelerateCheckpoints
root, last = sys.argv[1], sys.argv[2]
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.arange(8.0).view(4, 2))
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
checkpoints = AccelerateCheckpoints.resume(accelerator, root, every=1)
num_batches = 0
for epoch in range(checkpoints.epoch, 2):
    for batch in loader:
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_batches += 1
        saved = checkpoints.after_step()
        if last == "in the pass" and checkpoints.step == 4:
            saved.result()
            os._exit(0)
    if last == "behind it":
        checkpoints.save().result()
        os._exit(0)
checkpoints.close()
print(f"{num_batches} batches, step {checkpoints.step}")
"""


ADVERSARIES = """
import sys
import torch
from accelerate import Accelerator
from holdfast.integrations.accelerate import AccelerateCheckpoints

torch.manual_seed(1)
nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in nets]
loader = torch.utils.data.DataLoader(torch.arange(24.0).view(6, 4), batch_size=1, shuffle=True)
accelerator = Accelerator(cpu=True)
*nets, first, second, loader = accelerator.prepare(*nets, *optimizers, loader)
checkpoints = AccelerateCheckpoints.resume(accelerator, sys.argv[1], every=1)
for epoch in range(checkpoints.epoch, int(sys.argv[2])):
    for batch in loader:
        for optimizer in (second, first):
            accelerator.backward(nets[1](nets[0](batch)).square().mean())
            optimizer.step()
            optimizer.zero_grad()  # the other net keeps the gradients of this backward
        saved = checkpoints.after_step()
        if len(sys.argv) > 3 and checkpoints.step == 4:
            saved.result()
            sys.exit()
checkpoints.close()
print([p.tolist() for net in nets for p in net.parameters()])
"""


def test_gradients_that_no_step_has_used_go_on(server: ForkServer, tmp_path: Path) -> None:
    """X27. Of two models with a step each, the backward of one leaves some in the other."""
    straight = server.lines(ADVERSARIES, tmp_path / "a", 2, directory=tmp_path)
    server.lines(ADVERSARIES, tmp_path / "b", 2, "stop", directory=tmp_path)
    assert server.lines(ADVERSARIES, tmp_path / "b", 2, directory=tmp_path) == straight


def test_a_save_behind_a_pass_that_a_load_has_ended(server: ForkServer, tmp_path: Path) -> None:
    """X20. Its batches are no longer those of the pass in progress: the next pass is whole."""
    for last in ("in the pass", "behind it"):
        ends = server.run(BETWEEN, tmp_path / "run", last, directory=tmp_path)
        assert ends[0].code == 0, ends[0].output
    lines = server.lines(BETWEEN, tmp_path / "run", "of all", directory=tmp_path)
    assert lines == ["4 batches, step 8"]


SHARDED = """
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
def sharded(accelerator):
    # Accelerate itself shards on accelerators only; its classes do so on CPUs as well.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator
""" + (
    PROGRAM.replace("accelerator = Accelerator(", "accelerator = sharded(Accelerator(")
    .replace("accumulation_steps=2)", "accumulation_steps=2))")
    .replace("p.double()", "p.full_tensor().double()")
)


@on_four_ranks(PROGRAM, SHARDED, nightly="DDP")
def test_four_ranks_bitwise_and_then_two(server: ForkServer, tmp_path: Path, program: str) -> None:
    check_four_ranks(
        server,
        tmp_path,
        program,
        silent=("loss {loss.item():.17g}, ", ""),
        every=("every=2", "every=3"),
        kill=KILL,
        steps=3,
    )


WHOLE = """
import sys, os, torch, holdfast
from accelerate import Accelerator
from accelerate.utils import set_seed
from holdfast.integrations.accelerate import AccelerateCheckpoints
set_seed(int(sys.argv[3]))
class Counter:
    def __init__(self): self.seen = int(sys.argv[3])
    def state_dict(self): return {"seen": self.seen}
    def load_state_dict(self, state): self.seen = state["seen"]
one, two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
optimizers = [torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9),
              torch.optim.Adam(two.parameters(), lr=0.0)]
loaders = [torch.utils.data.DataLoader(torch.arange(64.0).view(8, 8), batch_size=2, shuffle=True)
           for _ in range(2)]
accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(one, two, *optimizers, *loaders)
counter = Counter()
accelerator.register_for_checkpointing(counter)
checkpoints = AccelerateCheckpoints(accelerator, sys.argv[1])
if sys.argv[2] == "save":
    for a, b in zip(*prepared[4:]):
        prepared[1](prepared[0](a + b)).mean().backward()
        for each in prepared[2:4]:
            each.step()
        counter.seen += 1
        if counter.seen == 3 + int(sys.argv[3]):
            break
        checkpoints.after_step()
        if counter.seen == 2 + int(sys.argv[3]):
            checkpoints.save().result()
else:
    checkpoints.load(2)
    checkpoints.step = 3
    checkpoints.save().result()
checkpoints.close()
print("good", counter.seen)
"""


def plain(tree: Any) -> Any:
    """A loaded tree with values per rank as dicts, and arrays as lists."""
    if isinstance(tree, PerRankValues):
        tree = dict(tree.values)
    if isinstance(tree, np.ndarray):
        return tree.tolist()
    return {name: plain(each) for name, each in tree.items()} if isinstance(tree, dict) else tree


def test_saved_loaded_saved_without_a_difference(server: ForkServer, tmp_path: Path) -> None:
    """Two models, two optimizers over them, two loaders side by side, a registered object.

    A program that lacks one of the loaders does not load it.
    """
    server.lines(WHOLE, tmp_path / "a", "save", 1, directory=tmp_path)
    one = WHOLE.replace("*loaders)", "loaders[0])")
    ends = server.run(one, tmp_path / "a", "load", 5, directory=tmp_path)
    assert "has the places of 2 loaders, and the program has 1 loader now" in ends[0].output
    assert server.lines(WHOLE, tmp_path / "a", "load", 5, directory=tmp_path) == ["good 3"]
    with Checkpointer(tmp_path / "a") as checkpointer:
        trees = [dict(checkpointer.load_all(step=step).values) for step in (2, 3)]
    assert [tree.pop("accelerator")["step"] for tree in trees] == [2, 3]
    for part, tree in trees[0].items():
        assert equal_trees(plain(tree), plain(trees[1][part])), part


LIMITED = """
import sys, torch
from pathlib import Path
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from holdfast.integrations.accelerate import AccelerateCheckpoints
from holdfast.retention.tags import set_tag
project = ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(2, 2))
checkpoints = AccelerateCheckpoints(accelerator, sys.argv[1])
for checkpoints.step in range(4):
    checkpoints.save().result()
    if checkpoints.step == 1:
        set_tag(checkpoints.checkpointer.storage, "best", step=1)
checkpoints.close()
print(checkpoints.checkpointer.steps())
"""


def test_a_tagged_step_stays_whatever_the_limit(server: ForkServer, tmp_path: Path) -> None:
    assert server.lines(LIMITED, tmp_path / "run", directory=tmp_path) == ["[1, 3]"]


@pytest.mark.slow
def test_epochs_are_those_of_the_loader_in_training(server: ForkServer, tmp_path: Path) -> None:
    """Not of the one that was prepared first, with a pass before the first step."""
    first = "held = accelerator.prepare(torch.utils.data.DataLoader(Samples(), batch_size=8))\n"
    evaluated = re.sub("model, optimizer, scheduler, loader =", first + r"\g<0>", PROGRAM)
    early = "if checkpoints.step == 0:\n    sum(each.sum() for each in held)\n"
    evaluated = evaluated.replace("for epoch in range(", early + "for epoch in range(")
    check_variant(server, tmp_path, evaluated, kill=KILL.format(at=8, rank=0), epochs=EPOCHS)


def test_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    """A save between microbatches, on one rank alone; a batch size at which no batch begins."""
    sync = "accelerator.gradient_state._set_sync_gradients(accelerator.is_main_process)"
    early = PROGRAM.replace("checkpoints.after_step()", f"{sync}; checkpoints.save()")
    ends = server.run(early, tmp_path / "a", 1, directory=tmp_path, num_ranks=2)
    assert all("are being accumulated, and would be lost" in each.output for each in ends)
    server.run(PROGRAM, tmp_path / "b", 3, directory=tmp_path, prelude=KILL.format(at=3, rank=0))
    first = SHARDED.replace(
        "checkpoints =", "plugin.fsdp_version = 1\nsharded(accelerator)\ncheckpoints ="
    )
    ends = server.run(first, tmp_path / "c", 1, directory=tmp_path, num_ranks=2)
    assert "does not support FSDP of version 1" in ends[0].output
    other = re.sub("batch_size=2", "batch_size=3", PROGRAM)
    ends = server.run(other, tmp_path / "b", 3, directory=tmp_path)
    assert "at sample 8 of epoch 0, which is not a multiple of its 3 samples" in ends[0].output

"""Lightning's Trainer: killed at any step, a run goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Checkpointer
from tests.integrations.forks import ForkServer
from tests.integrations.kills import (
    Resumed,
    check_four_ranks,
    check_kills,
    check_variant,
    killed_once,
    many_kills,
    on_four_ranks,
    resumed_by,
    served_by,
    straight_of,
    with_workers_that_stay,
)
from tests.integrations.pages import program_of

pytestmark = pytest.mark.slow  # the import of the package alone takes seconds

PROGRAM = program_of("lightning", "trainer")
EPOCHS, STEPS = 3, 30
KILL = """
import os, signal
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
advance_end = _TrainingEpochLoop.on_advance_end
def kill(self, *args):
    if self.global_step == {at} and rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    return advance_end(self, *args)
_TrainingEpochLoop.on_advance_end = kill
"""

server = served_by("lightning.pytorch", "holdfast.integrations.lightning")
straight = straight_of(PROGRAM, EPOCHS, f"step {STEPS}, loss ")
resumed = resumed_by(killed_once(PROGRAM, EPOCHS, KILL))


@pytest.mark.parametrize("at", [5, pytest.param(11, marks=pytest.mark.nightly)])
def test_killed_and_resumed_bitwise(resumed: Resumed, straight: list[str], at: int) -> None:
    """In the middle of an epoch, and right after the end of one."""
    assert resumed(at) == straight


@many_kills
def test_killed_at_random_steps(resumed: Resumed, straight: list[str], num_kills: int) -> None:
    check_kills(resumed, straight, num_kills, first=3, stop=STEPS)


def test_workers_that_stay_from_epoch_to_epoch(server: ForkServer, tmp_path: Path) -> None:
    """A run that starts them again draws no other order of the data; those of a validation, too."""
    program = with_workers_that_stay(PROGRAM)
    program = program.replace(
        "batch_size=4", "batch_size=4, num_workers=1, persistent_workers=True"
    )
    check_variant(server, tmp_path, program, kill=KILL.format(at=13, rank=0), epochs=EPOCHS)


def test_a_validation_within_an_epoch_is_made_once(server: ForkServer, tmp_path: Path) -> None:
    """A save that is due right before it is made after it, with the draws that it has made."""
    often = PROGRAM.replace("logger=False", "val_check_interval=4, logger=False")
    check_variant(server, tmp_path, often, kill=KILL.format(at=5, rank=0), epochs=EPOCHS)


IN_A_BUCKET = """try:
    HoldfastCheckpoint("s3://bucket/run")
except Exception as error:
    print(error)"""


def test_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    """A start beside another run's checkpoints, arguments without a meaning, other strategies."""
    server.lines(PROGRAM, tmp_path / "a", 1, directory=tmp_path)
    new = PROGRAM.replace(', ckpt_path="last"', "")
    ends = server.run(new, tmp_path / "a", 1, directory=tmp_path)
    assert "this run does not continue from them" in ends[0].output
    named = PROGRAM.replace("every_n_train_steps=2", "save_top_k=1, filename='best'")
    named = named.replace("checkpoints =", f"{IN_A_BUCKET}\ncheckpoints =")
    ends = server.run(named, tmp_path / "b", 1, directory=tmp_path)
    assert "s3://bucket/run: Lightning finds checkpoints by its own look" in ends[0].output
    assert "filename, save_top_k have no meaning here" in ends[0].output
    fsdp1 = "strategy=type('FSDPStrategy', (DDPStrategy,), {})()"  # its own needs an accelerator
    other = PROGRAM.replace("logger=False", f"logger=False, {fsdp1}")
    other = "from lightning.pytorch.strategies import DDPStrategy\n" + other
    ends = server.run(other, tmp_path / "b", 1, directory=tmp_path)
    assert "not FSDPStrategy" in ends[0].output
    alone = PROGRAM.replace('int(os.environ.get("WORLD_SIZE", "1"))', "1")
    ends = server.run(alone, tmp_path / "c", 1, directory=tmp_path, num_ranks=2)
    assert "the framework runs each by itself" in ends[0].output


def test_what_a_hook_raises_on_one_rank_every_rank_raises(
    server: ForkServer, tmp_path: Path
) -> None:
    """O8. While it adds to the checkpoint: the other rank learns the reason, and does not wait."""
    hook = (
        "    def on_save_checkpoint(self, checkpoint):\n"
        "        if self.global_rank == 1:\n"
        "            raise ValueError('no room')\n\n"
        "    def training_step"
    )
    program = PROGRAM.replace("    def training_step", hook)
    ends = server.run(program, tmp_path / "a", 1, directory=tmp_path, num_ranks=2)
    assert all("ValueError: no room" in each.output for each in ends)


SHARDED = """
import os
from torch.distributed.fsdp import fully_shard
from lightning.pytorch.strategies import ModelParallelStrategy
size = int(os.environ["WORLD_SIZE"])
sharded = dict(strategy=ModelParallelStrategy(size, 1))
""" + (
    PROGRAM.replace("logger=False", "logger=False, **sharded")
    .replace(
        "    def training_step",
        "    def configure_model(self):\n"
        "        fully_shard(self.layers, mesh=self.device_mesh['data_parallel'])\n\n"
        "    def training_step",
    )
    .replace(
        'print(f"step',
        # After a validation FSDP2 leaves whole parameters in their places; a state dict is sharded.
        'whole = [each.full_tensor() for each in model.state_dict().values()]\nprint(f"step',
    )
    .replace("p in model.parameters()", "p in whole")
    .replace("loss {model.loss.item():.17g}, ", "")
)


@on_four_ranks(PROGRAM, SHARDED, nightly="DDP")
def test_four_ranks_bitwise_and_then_two(server: ForkServer, tmp_path: Path, program: str) -> None:
    check_four_ranks(
        server,
        tmp_path,
        program,
        silent=("loss {model.loss.item():.17g}, ", ""),
        every=("every_n_train_steps=2", "every_n_train_steps=5"),
        kill=KILL,
        steps=5,
    )


ZOO = """
import sys, datetime, torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging, Timer
from holdfast.integrations.lightning import HoldfastCheckpoint
root, steps = sys.argv[1], int(sys.argv[2])
seed_everything(1, verbose=False)
class Data(LightningDataModule):
    seen = 0
    def train_dataloader(self):
        rows = torch.randn(20, 4)
        return [torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, num_workers=workers)
                for workers in (0, 1)]
    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(4, 4))
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]
class Pair(LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.one, self.two = torch.nn.Linear(width, 4), torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        self.trainer.datamodule.seen += 1
        loss = self.two(self.one(batch[0] + batch[1])).square().mean()
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)
    def validation_step(self, batch, index):
        self.log("held_out", torch.tensor(1.0))
    def configure_optimizers(self):
        return [torch.optim.Adam(self.one.parameters(), 1e-2),
                torch.optim.SGD(self.two.parameters(), 1e-2)]
stopping = EarlyStopping("held_out", patience=3)
timer = Timer(datetime.timedelta(days=1))
model, data = Pair(), Data()
trainer = Trainer(callbacks=[stopping, timer, HoldfastCheckpoint(root, every_n_train_steps=6)],
                  max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
                  enable_model_summary=False, log_every_n_steps=1)
trainer.fit(model, datamodule=data, ckpt_path="last")
print(f"step {trainer.global_step} seen {data.seen} waited {stopping.wait_count} weights "
      f"{sum(p.double().abs().sum().item() for p in model.parameters()):.17g}")
"""


def test_callbacks_data_modules_and_several_of_everything(
    server: ForkServer, tmp_path: Path
) -> None:
    """Two optimizers by hand, two loaders (one with workers), early stopping, a timer."""
    straight = server.lines(ZOO, tmp_path / "a", 48, directory=tmp_path)
    server.lines(ZOO, tmp_path / "b", 30, directory=tmp_path)
    assert server.lines(ZOO, tmp_path / "b", 48, directory=tmp_path) == straight
    with Checkpointer(tmp_path / "b") as checkpointer:
        assert checkpointer.steps()[:2] == [6, 12]


def test_averaged_weights_go_on_as_they_were(server: ForkServer, tmp_path: Path) -> None:
    """Its hook puts averages in the place of the module's weights, and takes them from there."""
    averaged = PROGRAM.replace("callbacks=[", "callbacks=[EMAWeightAveraging(decay=0.5), ")
    averaged = "from lightning.pytorch.callbacks import EMAWeightAveraging\n" + averaged
    straight = server.lines(averaged, tmp_path / "a", EPOCHS, directory=tmp_path)
    kill = KILL.format(at=14, rank=0)
    resumed = server.lines_after_kill(averaged, tmp_path / "b", EPOCHS, kill=kill, num_ranks=1)
    assert resumed == straight


BEST = """
scores = checkpoints.best_k_models
best = {os.path.basename(each) for each in sorted(scores, key=scores.get)[:2]}
kept = {each for each in os.listdir(sys.argv[1]) if each.startswith("iter_")}
print(len(scores), "made, kept are the best and the newest:", kept == best | {"iter_0000025"})
"""


def test_the_best_checkpoints_are_kept(server: ForkServer, tmp_path: Path) -> None:
    """X29. By a value of which each rank has logged its own; arguments as a command line passes."""
    best = PROGRAM.replace(
        "every_n_train_steps=2",
        'monitor="noise", save_last=None, every_n_epochs=1, '
        'retention=KeepBest("lightning.metrics.noise", 2)',
    )
    best = "from holdfast import KeepBest\n" + best + BEST
    lines = server.lines(best, tmp_path / "a", 5, directory=tmp_path, num_ranks=2)
    assert lines[0] == "5 made, kept are the best and the newest: True"


def test_a_step_saved_again_between_module_and_optimizers(
    server: ForkServer, tmp_path: Path
) -> None:
    """O9. The module is loaded long before the optimizers: both are of the version at the start."""
    straight = server.lines(PROGRAM, tmp_path / "a", 2, directory=tmp_path)
    server.lines(PROGRAM, tmp_path / "b", 1, directory=tmp_path)
    other = PROGRAM.replace("seed_everything(1", "seed_everything(2")
    server.lines(other, tmp_path / "c", 1, directory=tmp_path)
    replaced = """
import os
from holdfast.integrations.lightning import HoldfastCheckpoint
start = HoldfastCheckpoint.on_train_start
def replace(self, *args):
    os.rename("b/iter_0000010", "old")
    os.rename("c/iter_0000010", "b/iter_0000010")
    return start(self, *args)
HoldfastCheckpoint.on_train_start = replace
"""
    named: dict[str, Any] = {"directory": tmp_path, "prelude": replaced}
    assert server.lines(PROGRAM, tmp_path / "b", 2, **named) == straight


def test_schedules_follow_groups_in_another_order(server: ForkServer, tmp_path: Path) -> None:
    """R1. Lightning restores schedules itself, by the positions of groups."""
    groups = """[{"params": self.layers[2].parameters(), "lr": 0.1},
                  {"params": self.layers[0].parameters(), "lr": 0.001}]"""
    rates = PROGRAM.replace("self.parameters(), lr", f"{groups}, lr").replace(
        "CosineAnnealingLR(optimizer, 20)", "LambdaLR(optimizer, lambda step: 0.9**step)"
    )
    straight = server.lines(rates, tmp_path / "a", 2, directory=tmp_path)
    server.lines(rates, tmp_path / "b", 1, directory=tmp_path)
    turned = rates.replace(groups, f"{groups}[::-1]")
    assert server.lines(turned, tmp_path / "b", 2, directory=tmp_path) == straight


def test_samplers_have_the_seed_of_the_saved_run(server: ForkServer, tmp_path: Path) -> None:
    """X20. Those of loaders that are made for each epoch, from a seed in the environment."""
    each = PROGRAM.replace("logger=False", "reload_dataloaders_every_n_epochs=1, logger=False")
    named: dict[str, Any] = {"directory": tmp_path, "num_ranks": 2}
    straight = server.lines(each, tmp_path / "a", EPOCHS, **named)
    server.lines(each, tmp_path / "b", 1, **named)
    other = each.replace("seed_everything(1", "seed_everything(2")
    assert server.lines(other, tmp_path / "b", EPOCHS, **named) == straight


def test_a_second_fit_goes_on_or_is_refused(server: ForkServer, tmp_path: Path) -> None:
    """X22. From a step of the second one, where the first has nothing left to train.

    Without a checkpoint of its own it trained on with counters alone: an empty epoch, silently.
    """
    second = "trainer.fit_loop.max_epochs = 3\ntrainer.fit(model, train, held_out, "
    program = PROGRAM.replace("\nprint(f", f'\n{second}ckpt_path="last")\nprint(f')
    check_variant(server, tmp_path, program, kill=KILL.format(at=14, rank=0), epochs=1)
    longer = second.replace("= 3", "= 4")
    without = PROGRAM.replace("\nprint(f", f"\n{longer})\nprint(f")
    ends = server.run(without, tmp_path / "a", 3, directory=tmp_path)
    assert "had nothing left to train" in ends[0].output


def test_more_patience_lets_a_stopped_run_go_on(server: ForkServer, tmp_path: Path) -> None:
    """X22. Lightning restores the patience of the saved run: a program could not give it more."""
    stops = 'callbacks=[EarlyStopping("noise", patience=2, min_delta=1e9), '
    program = PROGRAM.replace("callbacks=[", stops).replace("loss {model.loss.item():.17g}, ", "")
    program = "from lightning.pytorch.callbacks import EarlyStopping\n" + program
    stopped = server.lines(program, tmp_path / "a", 9, directory=tmp_path)
    assert stopped[0].startswith("step 30, ")
    assert server.lines(program, tmp_path / "a", 9, directory=tmp_path) == stopped
    patient = program.replace("patience=2", "patience=3")
    straight = server.lines(patient, tmp_path / "b", 9, directory=tmp_path)
    assert straight[0].startswith("step 40, ")
    assert server.lines(patient, tmp_path / "a", 9, directory=tmp_path) == straight


def test_what_is_frozen_now_is_named(server: ForkServer, tmp_path: Path) -> None:
    """By the program itself, whose reasons no checkpoint has; Lightning trains on silently."""
    server.lines(PROGRAM, tmp_path / "a", 1, directory=tmp_path)
    frozen = PROGRAM.replace(
        "trainer.fit(", "model.layers[0].requires_grad_(False)\ntrainer.fit(", 1
    )
    ends = server.run(frozen, tmp_path / "a", 2, directory=tmp_path)
    assert "trained when the checkpoint was saved, and frozen now: layers.0.bias" in ends[0].output


def test_a_module_with_more_than_was_saved(server: ForkServer, tmp_path: Path) -> None:
    """It is refused by name, unless the module asks for no strict loading."""
    silent = PROGRAM.replace("loss {model.loss.item():.17g}, ", "")
    saved = server.lines(silent, tmp_path / "a", 1, directory=tmp_path)
    strict = silent.replace(
        "trainer.fit(model, train,",
        "model.more = torch.nn.Linear(2, 2)\n"
        "torch.nn.init.zeros_(model.more.weight)\n"
        "torch.nn.init.zeros_(model.more.bias)\n"
        "trainer.validate(model,",
    )
    ends = server.run(strict, tmp_path / "a", 1, directory=tmp_path)
    assert "asks for: model.more.weight, model.more.bias" in ends[0].output
    lenient = strict.replace("model.more =", "model.strict_loading = False\nmodel.more =")
    lines = server.lines(lenient, tmp_path / "a", 1, directory=tmp_path)
    assert lines[0].partition("weights")[2] == saved[0].partition("weights")[2]


def test_on_another_number_of_ranks(server: ForkServer, tmp_path: Path) -> None:
    """By value: two ranks with half the batch have the weights of one, and train on."""
    silent = PROGRAM.replace("loss {model.loss.item():.17g}, ", "")
    one = server.lines(silent, tmp_path, 1, directory=tmp_path)
    halved = silent.replace("batch_size=2", "batch_size=1")
    assert server.lines(halved, tmp_path, 1, directory=tmp_path, num_ranks=2) == one * 2
    lines = server.lines(halved, tmp_path, 2, directory=tmp_path, num_ranks=2)
    assert lines[0].startswith("step 20, weights")
    assert lines[0] == lines[1]


OWN_STATE = PROGRAM.replace(
    "train = torch.utils.data.DataLoader(Samples(), batch_size=2, shuffle=True)",
    """from torchdata.stateful_dataloader import StatefulDataLoader
ranks, rank = (int(os.environ.get(*each)) for each in (("WORLD_SIZE", "1"), ("RANK", "0")))
split = torch.utils.data.DistributedSampler(Samples(), ranks, rank)
drawn = torch.utils.data.RandomSampler(Samples(), generator=torch.Generator().manual_seed(1))
train = [StatefulDataLoader(Samples(), batch_size=2, shuffle=True),
         StatefulDataLoader(Samples(), batch_size=2, sampler=split),
         StatefulDataLoader(Samples(), batch_size=2, sampler=drawn)]""",
).replace("self.layers(batch).square", "self.layers(sum(batch)).square")


def test_loaders_with_a_state_of_their_own_on_two_ranks(server: ForkServer, tmp_path: Path) -> None:
    """X20. Their state counts samples, and has no order; on other shares the count is no place.

    They were trained in another order after a resume: some twice, others never.
    """
    named: dict[str, Any] = {"directory": tmp_path, "num_ranks": 2}
    straight = server.lines(OWN_STATE, tmp_path / "a", 2, **named)
    kill = KILL.format(at=9, rank=0)
    assert server.run(OWN_STATE, tmp_path / "b", 2, prelude=kill, **named)[0].code == -9
    ends = server.run(OWN_STATE, tmp_path / "b", 2, directory=tmp_path)
    assert "one of 2 shares of the data, and here there are 1" in ends[0].output
    assert server.lines(OWN_STATE, tmp_path / "b", 2, **named) == straight


def test_an_epoch_of_such_loaders_begins_on_more_ranks(server: ForkServer, tmp_path: Path) -> None:
    """The end of a longer pass is no place in theirs: it failed inside of the loader."""
    server.lines(OWN_STATE, tmp_path / "a", 1, directory=tmp_path)
    lines = server.lines(OWN_STATE, tmp_path / "a", 2, directory=tmp_path, num_ranks=2)
    assert all(each.startswith("step 15, ") for each in lines)


def test_a_file_of_lightnings_own_needs_nothing_of_ours(server: ForkServer, tmp_path: Path) -> None:
    """Written in a run with Holdfast, read by one without, by Lightning's safe default."""
    saved = PROGRAM + "trainer.save_checkpoint('own.ckpt')\n"
    server.lines(saved, tmp_path / "a", 1, directory=tmp_path)
    alone = PROGRAM.replace("callbacks=[checkpoints],", "enable_checkpointing=False,")
    alone = alone.replace('"last"', '"own.ckpt"')
    assert server.lines(alone, "none", 2, directory=tmp_path)[0].startswith("step 20")
    assert server.lines(
        PROGRAM.replace('"last"', '"own.ckpt"'), tmp_path / "b", 2, directory=tmp_path
    )[0].startswith("step 20")

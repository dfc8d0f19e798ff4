"""torchtitan: its own trainer and debug models under a manager of ours, killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from tests.integrations.forks import TITAN_PYTHON, ForkServer
from tests.integrations.kills import KILL_AT_ADAMW, check_killed_often, many_kills
from tests.integrations.pages import program_of

PROGRAM = program_of("torchtitan", "torchtitan")
STEPS = 4

pytestmark = pytest.mark.skipif(
    not TITAN_PYTHON.exists(), reason="torchtitan is not installed: make test-integrations"
)
ALONE = """
import os
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "0"}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(
        "tests.integrations.titan_on_cpu",
        "torchtitan.trainer",
        "torchtitan.models.llama3.config_registry",
        "torchtitan.models.deepseek_v3.config_registry",
        "holdfast.integrations.torchtitan",
        python=TITAN_PYTHON,
    )
    yield server
    server.close()


FSDP, TP, PP, CP, EP = "", "tensor=2", "pipeline=2", "context=2", "expert=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "degrees"),
    [("llama3", FSDP), ("llama3", TP), ("llama3", PP), ("llama3", CP), ("deepseek_v3", EP)],
)
def test_killed_and_resumed_bitwise_and_on_another_layout(
    server: ForkServer, tmp_path: Path, model: str, degrees: str
) -> None:
    """Two ranks; what one rank loads of it, and saves again, is the same to the last byte."""
    words = (model, *degrees.split())
    ranks: dict[str, Any] = {"directory": tmp_path, "num_ranks": 2}
    backend = 'spmd_backend="partial_dtensor"'
    program = PROGRAM.replace(backend, f'{backend}, pipeline_parallel_schedule="Interleaved1F1B"')
    straight = server.lines(program, tmp_path / "straight", STEPS, *words, **ranks)
    # Interleaved pipelines have two optimizers on each rank.
    kill = KILL_AT_ADAMW.format(at=6 if degrees == PP else 3, rank=1)
    run = tmp_path / "run"
    assert server.lines_after_kill(program, run, STEPS, *words, kill=kill, num_ranks=2) == straight
    alone = server.lines(ON_ANOTHER, run, STEPS, model, directory=tmp_path, prelude=ALONE)
    assert alone == [f"step {STEPS}"]
    step = f"iter_{STEPS:07d}"
    pair = [str(run / name / step) for name in ("checkpoint", "again")]
    for part in ("model", "optimizer"):
        assert main(["diff", *pair, "--tensor", f"{part}.*"]) == 0


ON_ANOTHER = (
    PROGRAM[: PROGRAM.index("trainer = config.build()")]
    + """
config.checkpoint.exclude_from_loading = ["dataloader"]
trainer = config.build()
trainer.checkpointer.load()
trainer.checkpointer.close()
config.checkpoint.folder = "again"
again = config.checkpoint.build(
    dataloader=trainer.dataloader, model_parts=trainer.model_parts, optimizers=trainer.optimizers,
    lr_schedulers=trainer.lr_schedulers, states={"train_state": trainer}, sd_adapter=None,
    base_folder=folder)
again.save(trainer.step, last_step=True)
again.close()
print(f"step {trainer.step}")
"""
)


@many_kills
def test_killed_at_random_steps(server: ForkServer, tmp_path: Path, num_kills: int) -> None:
    check_killed_often(server, PROGRAM, tmp_path, "llama3", num_kills=num_kills, num_ranks=2)


MANAGERS = (
    PROGRAM[: PROGRAM.index("config.checkpoint =")]
    + """
import itertools
from pathlib import Path
from safetensors.torch import load_file
from torchtitan.components.checkpointer import CheckpointManager
from holdfast import HoldfastError
from holdfast.retention.tags import set_tag
from holdfast.storage import PosixStorage

config.checkpoint.enable = False
trainer = config.build()
adapter = config.model_spec.state_dict_adapter(trainer.model_config, None)
count = itertools.count()

def manager(name=None, of=HoldfastManager, states=(), **options):
    options = {"enable": True, "interval": 1, "last_save_model_only": False, **options}
    return of.Config(folder=name or f"folder{next(count)}", **options).build(
        dataloader=trainer.dataloader, model_parts=trainer.model_parts,
        optimizers=trainer.optimizers, lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer, **dict(states)}, sd_adapter=adapter,
        base_folder=folder)

def set_to(value):
    trainer.step = value
    trainer.lr_schedulers.schedulers[0].last_epoch = value
    with torch.no_grad():
        for number, weight in enumerate(trainer.model_parts[0].parameters()):
            weight.fill_(value + number)

def values():
    weight = next(trainer.model_parts[0].parameters())
    return trainer.step, trainer.lr_schedulers.schedulers[0].last_epoch, int(weight.flatten()[0])

def loaded(made, step=-1):
    set_to(90)
    assert made.load(step)
    made.close()
    return values()

def saved(made, steps, last=None):
    for step in steps:
        set_to(step)
        made.save(step, last_step=step == last)
    made.close()
    return Path(made.folder)

def steps_in(path):
    return sorted(each.name for each in path.iterdir() if each.name[:5] in ("iter_", "step-"))

for mode in ("disabled", "async", "async_with_pinned_mem"):
    saved(manager(mode, async_mode=mode, keep_latest_k=2), (1, 2, 3))
    assert loaded(manager(mode)) == (3, 3, 3)
    assert steps_in(Path(folder, mode)) == ["iter_0000002", "iter_0000003"]
assert loaded(manager("async"), 2) == (2, 2, 2)
kept = manager("tagged", keep_latest_k=2)
set_to(1)
kept.save(1)
set_tag(PosixStorage(kept.folder), "best", step=1)
assert steps_in(saved(kept, (2, 3, 4))) == [f"iter_000000{step}" for step in (1, 3, 4)]
assert loaded(manager("async", exclude_from_loading=["train_state", "lr_scheduler"])) == (90, 90, 3)
saved(manager("async", load_only=True), (4,))
assert len(steps_in(Path(folder, "async"))) == 2
saved(manager("every3", interval=3, enable_first_step_checkpoint=True), range(1, 8))
assert steps_in(Path(folder, "every3")) == [f"iter_000000{step}" for step in (1, 3, 6)]
saved(manager("seed", create_seed_checkpoint=True), (0,), last=0)
assert loaded(manager("seed")) == (90, 90, 0)

run = str(Path(folder, "async"))
assert loaded(manager(initial_load_path=run)) == (90, 90, 3)
assert loaded(manager(initial_load_path=run + "/iter_0000002")) == (90, 90, 2)
full = {"initial_load_model_only": False}
assert loaded(manager(initial_load_path=run, **full)) == (3, 3, 3)
assert loaded(manager("every3", initial_load_path=run)) == (6, 6, 6)

hf = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
ours = saved(manager("ours", **hf), (4, 5), last=5)
assert steps_in(ours) == ["iter_0000004", "step-5"]
theirs = saved(manager("theirs", CheckpointManager, **hf), (5,), last=5)
pair = [load_file(root / "step-5" / "model-00001-of-00001.safetensors") for root in (ours, theirs)]
assert pair[0].keys() == pair[1].keys()
assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])
hf = {"initial_load_path": str(ours / "step-5"), "initial_load_in_hf": True}
assert loaded(manager(**hf)) == (90, 90, 5)

def refused(words, call, *args, **options):
    try:
        call(*args, **options)
    except HoldfastError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {words}")

refused("does not support a remote checkpoint.folder", manager, "s3://bucket/run")
refused("does not support a state named 'rng'", manager, states={"rng": trainer})
wrong = manager("async", exclude_from_loading=["loader"])
refused("exclude_from_loading: ['loader'] is not a state", wrong.load)
wrong.close()
wrong = manager(initial_load_path=run, initial_load_in_hf=True)
refused("is a checkpoint of Holdfast", wrong.load)
wrong.close()
wrong = manager("async")
refused("99", wrong.load, 99)
wrong.close()
print("ok")
"""
)


@pytest.mark.slow
def test_each_setting_of_the_manager(server: ForkServer, tmp_path: Path) -> None:
    """Supported as torchtitan means it, or refused by name; its own export, equal to its own."""
    lines = server.lines(
        MANAGERS, tmp_path / "run", STEPS, "llama3", directory=tmp_path, prelude=ALONE
    )
    assert lines == ["ok"]

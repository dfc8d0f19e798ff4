"""The Trainer of Hugging Face: killed at any step, it goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.integrations.forks import ForkServer
from tests.integrations.kills import (
    Resumed,
    check_four_ranks,
    check_kills,
    many_kills,
    on_four_ranks,
    resumed_by,
    served_by,
    straight_of,
)
from tests.integrations.pages import program_of

pytestmark = pytest.mark.slow  # the import of the package alone takes seconds

PROGRAM = program_of("transformers", "trainer")
STEPS = 33
KILL = """
import os, signal
from transformers.trainer_callback import DefaultFlowCallback
step_end = DefaultFlowCallback.on_step_end
def kill(self, args, state, control, **named):
    if state.global_step == {at} and rank == {rank}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step_end(self, args, state, control, **named)
DefaultFlowCallback.on_step_end = kill
"""

_SHARDS = """
from accelerate.state import AcceleratorState, DistributedType
# Accelerate itself shards on accelerators only; its classes do so on CPUs as well.
AcceleratorState.distributed_type = property(lambda self: DistributedType.FSDP, lambda *_: None)
make = AcceleratorState.__init__
def make_sharded(self, *args, fsdp_plugin=None, **named):
    make(self, *args, **named)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
AcceleratorState.__init__ = make_sharded
"""

server = served_by(
    "transformers.trainer",
    "transformers.models.llama",
    "peft",
    "torchdata.stateful_dataloader",
    "holdfast.integrations.transformers",
)
straight = straight_of(PROGRAM, 3, f"step {STEPS}, losses [")


def sharded(program: str) -> str:
    """The program with FSDP of the Trainer: `fsdp=True`."""
    layers = "'transformer_layer_cls_to_wrap': 'LlamaDecoderLayer'"
    config = f"fsdp=True, fsdp_config={{{layers}}}"
    program = program.replace("use_cpu=True", f"use_cpu=True, {config}")
    whole = "getattr(p, 'full_tensor', lambda p=p: p)().double()"
    return _SHARDS + program.replace("p.double()", whole)


@resumed_by
def resumed(server: ForkServer, root: Path, at: int) -> list[str]:
    """What a run prints that is killed once, and started again: with another seed of its data."""
    kill, other = KILL.format(at=at, rank=0), PROGRAM.replace("use_cpu=", "data_seed=7, use_cpu=")
    named: dict[str, Any] = {"directory": root.parent}
    ends = server.run(PROGRAM, root, 3, prelude=kill, **named)
    assert ends[0].code == -9, ends[0].output[-2000:]
    return server.lines(other, root, 3, **named)


@pytest.mark.parametrize("at", [7, pytest.param(22, marks=pytest.mark.nightly)])
def test_killed_and_resumed_bitwise(resumed: Resumed, straight: list[str], at: int) -> None:
    """In the middle of an epoch, and at its end, with draws of the dataset and dropout."""
    assert resumed(at) == straight


DRAWS = """
class Draws(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **named):
        torch.rand(())
"""


def test_a_callback_that_draws_as_an_epoch_begins(server: ForkServer, tmp_path: Path) -> None:
    """X20. From a save between two epochs its draws count, as in a run that was not stopped."""
    program = PROGRAM.replace("TrainingArguments, set", "TrainerCallback, TrainingArguments, set")
    program = program.replace("\n\narguments =", f"\n{DRAWS}\narguments =")
    program = program.replace("eval_dataset=Samples()", "eval_dataset=Samples(), callbacks=[Draws]")
    straight = server.lines(program, tmp_path / "a", 3, directory=tmp_path)
    waits = "import __main__; __main__.checkpoints.last_save.result(60); os.kill"  # of step 22
    kill = KILL.format(at=23, rank=0).replace("os.kill", waits)
    root = tmp_path / "b"
    assert server.lines_after_kill(program, root, 3, kill=kill, num_ranks=1) == straight


def test_the_best_step_is_saved_when_its_epoch_has_ended(
    server: ForkServer, tmp_path: Path
) -> None:
    """X20. An evaluation in the last step of an epoch asks for it; the logs follow at the end."""
    program = PROGRAM.replace('eval_strategy="epoch", save_steps=2', 'eval_strategy="steps"')
    program = program.replace(
        "logging_steps=3",
        'eval_steps=11, save_strategy="best", metric_for_best_model="eval_loss", '
        'logging_strategy="epoch"',
    )
    straight = server.lines(program, tmp_path / "a", 3, directory=tmp_path)
    waits = "import __main__; __main__.checkpoints.last_save.result(60); os.kill"
    kill = KILL.format(at=24, rank=0).replace("os.kill", waits)
    assert server.lines_after_kill(program, tmp_path / "b", 3, kill=kill, num_ranks=1) == straight


@many_kills
def test_killed_at_random_steps(resumed: Resumed, straight: list[str], num_kills: int) -> None:
    check_kills(resumed, straight, num_kills, first=3, stop=STEPS)


@on_four_ranks(PROGRAM, sharded(PROGRAM), nightly="FSDP2")
def test_four_ranks_bitwise_and_then_two(server: ForkServer, tmp_path: Path, program: str) -> None:
    check_four_ranks(
        server,
        tmp_path,
        program,
        silent=("", ""),
        every=("save_steps=2", "save_steps=6"),
        kill=KILL,
        steps=6,
    )


ADAPTED = """
import sys, torch, peft
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, set_seed
from transformers import Trainer, TrainingArguments
from holdfast.integrations.transformers import HoldfastCallback
root, mode = sys.argv[1], sys.argv[2]
set_seed(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config)
if "full" not in mode:
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"])
    model = peft.get_peft_model(model, lora)
tokens = [torch.arange(12) * i % 64 for i in range(16)]
data = [{"input_ids": each, "labels": each} for each in tokens]
arguments = TrainingArguments(
    output_dir=root, max_steps=8 if "stop" not in mode else 4, per_device_train_batch_size=2,
    eval_strategy="steps", eval_steps=1, save_steps=2, save_total_limit=1, logging_steps=1,
    eval_on_start="full" not in mode, load_best_model_at_end="full" not in mode,
    metric_for_best_model="eval_loss",
    lr_scheduler_type="constant", learning_rate=1e-9 if "full" not in mode else 1e-2,
    use_cpu=True, report_to=[], disable_tqdm=True)
stopping = [EarlyStoppingCallback(6, 10.0)] if "full" not in mode else []
trainer = Trainer(
    model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=stopping)
if "native" not in mode:
    HoldfastCallback.attach(trainer)
trainer.train(resume_from_checkpoint=True if "resume" in mode else None)
patience = [c.early_stopping_patience_counter for c in trainer.callback_handler.callbacks
            if isinstance(c, EarlyStoppingCallback)]
weights = sum(p.double().abs().sum().item() for p in model.parameters())
first = next(each["loss"] for each in trainer.state.log_history if "loss" in each)
print(f"step {trainer.state.global_step} patience {patience} first {first} weights {weights:.17g}")
"""


SAVED_AGAIN = """
import os
from holdfast.integrations.transformers import HoldfastCallback
begin = HoldfastCallback.on_train_begin
def replace(self, *args, **named):
    os.rename("b/holdfast/iter_0000004", "old")
    os.rename("c/holdfast/iter_0000004", "b/holdfast/iter_0000004")
    begin(self, *args, **named)
    with self._running().one_version():
        pass  # the lease is given back, and not held for the whole training
HoldfastCallback.on_train_begin = replace
"""


def test_a_run_that_was_stopped_early_stays_stopped(server: ForkServer, tmp_path: Path) -> None:
    """X20. Until it has more patience; its callbacks are where they were, ours behind them."""
    stops = "eval_dataset=Samples(), callbacks=[EarlyStoppingCallback(2, 1e9)]"
    program = PROGRAM.replace("eval_dataset=Samples()", stops).replace(
        'eval_strategy="epoch"',
        'eval_strategy="steps", eval_steps=2, metric_for_best_model="eval_loss"',
    )
    program = "from transformers import EarlyStoppingCallback\n" + program
    last = "{type(trainer.callback_handler.callbacks[-1]).__name__} at the end"
    program = program.replace(
        "{trainer.state.global_step},", f"{{trainer.state.global_step}}, {last},"
    )
    stopped = server.lines(program, tmp_path / "a", 3, directory=tmp_path)
    assert stopped[0].startswith("step 6, HoldfastCallback at the end, ")
    assert server.lines(program, tmp_path / "a", 3, directory=tmp_path) == stopped
    patient = program.replace("(2, 1e9)", "(3, 1e9)")
    straight = server.lines(patient, tmp_path / "b", 3, directory=tmp_path)
    assert straight[0].startswith("step 8, HoldfastCallback at the end, ")
    assert server.lines(patient, tmp_path / "a", 3, directory=tmp_path) == straight


def test_adapters_callbacks_and_the_trainers_own_files(server: ForkServer, tmp_path: Path) -> None:
    """PEFT, patience of early stopping, the best model, rotation, `resume_from_checkpoint=True`.

    A resume does not evaluate at its start, which would cost patience. O9: the Trainer takes its
    counters long before its weights, and a step that is saved again in between changes neither.
    """
    straight = server.lines(ADAPTED, tmp_path / "a", "new", directory=tmp_path)
    assert "step 7 patience [6]" in straight[0]  # stopped early, by all six
    server.lines(ADAPTED, tmp_path / "b", "stop", directory=tmp_path)
    other = ADAPTED.replace("set_seed(1)", "set_seed(2)")
    server.lines(other, tmp_path / "c", "stop", directory=tmp_path)
    named: dict[str, Any] = {"directory": tmp_path, "prelude": SAVED_AGAIN}
    assert server.lines(ADAPTED, tmp_path / "b", "resume", **named) == straight
    folders = sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*"))
    assert len(folders) <= 2  # the newest and the best
    assert (tmp_path / "b" / folders[-1] / "adapter_model.safetensors").is_file()
    kept = [path.name for path in (tmp_path / "b" / "holdfast").glob("iter_*")]
    assert kept == ["iter_0000006"]


_BEST = ', load_best_model_at_end="full" not in mode'
_FROZEN = "model = peft.get_peft_model(model, lora)"
_HALF = "\n    [p.requires_grad_(False) for n, p in model.named_parameters() if 'lora_A' in n]"
_RANKED = """
from transformers import TrainerCallback
class Ranks(TrainerCallback):
    def on_optimizer_step(self, args, state, control, model=None, **named):
        model.base_model.update_and_allocate(state.global_step)
trainer.add_callback(Ranks())
if "native" """


_MERGED = """
from transformers import TrainerCallback
class Merges(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **named):
        for layer in model.modules():
            if state.global_step in (3, 5) and hasattr(layer, "merged_adapters"):
                layer.merge()
                layer.merged_adapters.clear()
                layer.reset_lora_parameters("default", True)
        if state.global_step == 3:
            with torch.no_grad():  # a write that no sample of a large weight sees
                model.base_model.model.lm_head.weight[0, 1].add_(1.0)
trainer.add_callback(Merges())
if "native" """


_WRITTEN = """
from transformers import TrainerCallback
class Writes(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **named):
        weight = model.base_model.model.model.layers[0].mlp.down_proj.weight
        if state.global_step == 3 and args.process_index == 0:
            weight.data.to_local()[0, 0] += 1.0
trainer.add_callback(Writes())
if "native" """


@pytest.mark.parametrize(
    "last_ranks",
    [
        None,
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow, id="averages"),
        pytest.param(3, marks=pytest.mark.slow, id="pattern"),
    ],
)
def test_adapters_with_more_than_what_is_trained(
    server: ForkServer, tmp_path: Path, last_ranks: int | None
) -> None:
    """X20. Half of each adapter is random and frozen; ReLoRA merges; AdaLoRA masks by averages.

    The resumed run begins with other adapters.
    """
    program = ADAPTED.replace("1e-9", "1e-2")
    if last_ranks is None:
        program = program.replace(_FROZEN, _FROZEN + _HALF)
    elif last_ranks == 0:
        program = program.replace('if "native" ', _MERGED.lstrip("\n"))
        program = program.replace("vocab_size=64", "vocab_size=640")
    else:
        config = f"AdaLoraConfig(init_r=4, target_r=2, tinit=1, tfinal={last_ranks}, total_step=7, "
        program = program.replace("LoraConfig(r=4, lora_dropout=0.1, ", config)
        program = program.replace('if "native" ', _RANKED.lstrip("\n"))
        # PEFT cannot load weights from before a pruning; the best may be such, by a rounding.
        program = program.replace(_BEST, "")
    straight = server.lines(program, tmp_path / "a", "new", directory=tmp_path)
    server.lines(program, tmp_path / "b", "stop", directory=tmp_path)
    other = program.replace("    lora = ", "    set_seed(2)\n    lora = ")
    assert server.lines(other, tmp_path / "b", "resume", directory=tmp_path) == straight
    with Snapshot.open(PosixStorage(tmp_path / "b" / "holdfast"), step_dir(6)) as saved:
        base = {key for key in saved.keys if "base_layer" in key or "lm_head" in key}
        assert len(base) == (3 if last_ranks == 0 else 0)  # two that are merged, and the head


RANKED = """
import sys, torch, peft
root, seed, framework = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(1)
layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
ranks = peft.AdaLoraConfig(
    init_r=6, target_r=2, tinit=2, tfinal=4, total_step=40, target_modules=["0"])
torch.manual_seed(seed)
model = peft.get_peft_model(torch.nn.Sequential(*layers), ranks)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-1)
data = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
if framework == "accelerate":
    from accelerate import Accelerator
    from holdfast.integrations.accelerate import AccelerateCheckpoints
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpoints = AccelerateCheckpoints.resume(accelerator, root)
else:
    from lightning_fabric import Fabric
    from holdfast.integrations.fabric import FabricCheckpoints
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer}
    checkpoints = FabricCheckpoints.resume(fabric, root, state, loaders=[loader])
for epoch in range(checkpoints.epoch, 3):
    for batch in loader:
        model(batch).square().mean().backward()
        optimizer.step()
        model.base_model.update_and_allocate(checkpoints.step)
        optimizer.zero_grad()
        checkpoints.after_step(**({} if framework == "accelerate" else {"every": 0}))
        if checkpoints.step == 5 and seed == 1:
            checkpoints.save().result()
            if "stop" in sys.argv:
                sys.exit()
checkpoints.close()
averages = model.base_model.rankallocator.exp_avg_ipt
print([p.tolist() for p in [*model.parameters(), *averages.values()]])
"""


@pytest.mark.parametrize("framework", ["accelerate", "fabric"])
def test_adapters_with_other_ranks_outside_of_the_trainer(
    server: ForkServer, tmp_path: Path, framework: str
) -> None:
    """X20. AdaLoRA decides by averages which ranks to mask."""
    straight = server.lines(RANKED, tmp_path / "a", 1, framework, directory=tmp_path)
    server.lines(RANKED, tmp_path / "b", 1, framework, "stop", directory=tmp_path)
    assert server.lines(RANKED, tmp_path / "b", 2, framework, directory=tmp_path) == straight


def test_adapters_on_a_sharded_base_model(server: ForkServer, tmp_path: Path) -> None:
    """X20. Sharded by FSDP2, one shard changed as the run goes on; resumed whole."""
    program = ADAPTED.replace("1e-9", "1e-2").replace(_BEST, "")
    program = program.replace('if "native" ', _WRITTEN.lstrip("\n"))
    shards = sharded(program)
    named: dict[str, Any] = {"directory": tmp_path, "num_ranks": 2}
    straight = server.lines(shards, tmp_path / "a", "new", **named)
    server.lines(shards, tmp_path / "b", "stop", **named)
    other = shards.replace("set_seed(1)", "set_seed(2)")
    ends = server.run(other, tmp_path / "b", "resume", **named)
    assert "other weights than the one that the saved adapters were" in ends[0].output
    assert server.lines(program, tmp_path / "b", "resume", **named) == straight


def test_adapters_of_another_base_model_are_refused(server: ForkServer, tmp_path: Path) -> None:
    """X20. PiSSA takes what it gives to an adapter, some of it drawn, from the base model."""
    program = ADAPTED.replace("r=4, ", 'r=4, init_lora_weights="pissa_niter_1", ')
    server.lines(program, tmp_path / "a", "stop", directory=tmp_path)
    other = program.replace("    lora = ", "    set_seed(2)\n    lora = ")
    ends = server.run(other, tmp_path / "a", "resume", directory=tmp_path)
    assert "other weights than the one that the saved adapters were" in ends[0].output
    assert "q_proj.base_layer.weight" in ends[0].output


@pytest.mark.parametrize("last", [pytest.param(5, marks=pytest.mark.nightly), 6])
def test_data_without_a_length_goes_on_in_a_later_pass(
    server: ForkServer, tmp_path: Path, last: int
) -> None:
    """X20. From the end of a pass, which a save does not see yet, and within the next one.

    The Trainer itself would pass over all steps in the first pass, which is shorter.
    """
    stream = (
        "class Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n"
        "        yield from data[:10]\n"
        "arguments ="
    )
    program = ADAPTED.replace("arguments =", stream).replace(
        "dataset=data,", "dataset=Stream(),", 1
    )
    program = program.replace("LlamaConfig(vocab", "LlamaConfig(attention_dropout=0.1, vocab")
    program = program.replace("save_steps=2", f"save_steps={last}")
    straight = server.lines(program, tmp_path / "a", "full", directory=tmp_path)
    # Killed, and not stopped: the last step of a run is its last batch, as a save sees it.
    waits = "import __main__; __main__.trainer.callback_handler.callbacks[-1].last_save.result(60)"
    kill = KILL.format(at=last + 1, rank=0).replace("os.kill", f"{waits}; os.kill")
    ends = server.run(program, tmp_path / "b", "full", directory=tmp_path, prelude=kill)
    assert ends[0].code == -9, ends[0].output[-2000:]
    assert server.lines(program, tmp_path / "b", "full resume", directory=tmp_path) == straight


def test_a_run_of_the_trainers_own_goes_on_here(server: ForkServer, tmp_path: Path) -> None:
    """Its folder is resumed from as ever; what is saved from then on is Holdfast's."""
    straight = server.lines(ADAPTED, tmp_path / "a", "full", directory=tmp_path)
    server.lines(ADAPTED, tmp_path / "b", "full native stop", directory=tmp_path)
    assert server.lines(ADAPTED, tmp_path / "b", "full resume", directory=tmp_path) == straight
    model = tmp_path / "b" / "checkpoint-8"
    check = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(model)!r})
print(f"{{sum(p.double().abs().sum().item() for p in model.parameters()):.17g}}")
"""
    weights = server.lines(check, directory=tmp_path)[0]
    assert straight[0].endswith(weights)


KILL_BEFORE_COMMIT = """
import os
from holdfast.integrations.transformers import HoldfastCallback
HoldfastCallback.on_save = lambda *args, **named: os.kill(os.getpid(), 9)
"""


def test_a_folder_of_weights_alone_is_not_resumed_from(server: ForkServer, tmp_path: Path) -> None:
    """X20. The Trainer writes it before the save here is committed, and would begin an optimizer.

    With the root in `output_dir` itself, the step of such a folder is found, too.
    """
    named: dict[str, Any] = {"directory": tmp_path}
    killed = server.run(ADAPTED, tmp_path / "a", "full", prelude=KILL_BEFORE_COMMIT, **named)
    assert killed[0].code == -9, killed[0].output[-2000:]
    by_path = ADAPTED.replace("True if", "root + '/checkpoint-2' if")
    for program in (ADAPTED, by_path):
        ends = server.run(program, tmp_path / "a", "full resume", **named)
        assert "checkpoint-2 has weights and no optimizer" in ends[0].output
    beside = by_path.replace("attach(trainer)", "attach(trainer, root)").replace(
        "limit=1", "limit=9"
    )
    straight = server.lines(beside, tmp_path / "b", "full", **named)
    server.lines(beside, tmp_path / "c", "full stop", **named)
    assert server.lines(beside, tmp_path / "c", "full resume", **named) == straight


def test_ranks_that_look_at_other_roots_are_refused(server: ForkServer, tmp_path: Path) -> None:
    """X20. What one rank alone would resume from, or not begin beside, is an error of both."""
    server.lines(ADAPTED, tmp_path / "a", "full stop", directory=tmp_path)
    named: dict[str, Any] = {"directory": tmp_path, "num_ranks": 2}
    own_root = "attach(trainer, root + '/holdfast' + os.environ['RANK'].replace('{}', ''))"
    program = "import os\n" + ADAPTED
    for rank, words, why in (
        (1, "full", "has checkpoints, the newest of step 4"),
        (0, "full resume", "the first rank resumes from no checkpoint of"),
    ):
        one = program.replace("attach(trainer)", own_root.format(rank))
        one = one.replace("True if", f"root + '/holdfast{1 - rank}/iter_0000004' if")
        ends = server.run(one, tmp_path / "a", words, **named)
        assert all(why in each.output for each in ends), [each.output[-2000:] for each in ends]


def test_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    """A start beside another run's checkpoints; another batch size. Fewer rows are named.

    With as many batches, of other rows.
    """
    server.lines(ADAPTED, tmp_path, "full stop", directory=tmp_path)
    ends = server.run(ADAPTED, tmp_path, "full", directory=tmp_path)
    assert "this run does not continue from them" in ends[0].output
    larger = ADAPTED.replace("train_batch_size=2", "train_batch_size=4")
    ends = server.run(larger, tmp_path, "full resume", directory=tmp_path)
    assert "with 2 samples a step; this Trainer" in ends[0].output
    fewer = ADAPTED.replace("range(16)", "range(15)")
    ends = server.run(fewer, tmp_path, "full resume", directory=tmp_path)
    assert "within a pass over 16 rows" in ends[0].output
    workers = "dataloader_num_workers=1, dataloader_persistent_workers=True, use_cpu=True"
    kept = PROGRAM.replace("use_cpu=True", workers)
    ends = server.run(kept, tmp_path / "kept", 1, directory=tmp_path)
    assert "does not support dataloader_persistent_workers" in ends[0].output
    first = "trainer.accelerator.state.fsdp_plugin.fsdp_version = 1\ncheckpoints ="
    for program, why in [
        (sharded(ADAPTED), "load_best_model_at_end under FSDP"),
        (sharded(PROGRAM).replace("checkpoints =", first), "FSDP of version 1"),
    ]:
        ends = server.run(program, tmp_path / "fsdp", 1, directory=tmp_path, num_ranks=2)
        assert f"does not support {why}" in ends[0].output
    in_time = PROGRAM.replace("use_cpu=True", "enable_jit_checkpoint=True, use_cpu=True")
    ends = server.run(in_time, tmp_path / "in-time", 1, directory=tmp_path)
    assert "does not support enable_jit_checkpoint" in ends[0].output


def test_on_another_number_of_ranks(server: ForkServer, tmp_path: Path) -> None:
    """By value: two ranks with half the accumulation go on where one was."""
    one = ADAPTED.replace("logging_steps=1", "logging_steps=1, gradient_accumulation_steps=2")
    straight = server.lines(one, tmp_path / "a", "full", directory=tmp_path)
    server.lines(one, tmp_path / "b", "full stop", directory=tmp_path)
    lines = server.lines(ADAPTED, tmp_path / "b", "full resume", directory=tmp_path, num_ranks=2)
    numbers = [float(line.rsplit(" ", 1)[1]) for line in (*straight, *lines)]
    assert numbers == pytest.approx([numbers[0]] * 3, rel=1e-5)


EXPORTED = """
import sys, torch
from transformers import AutoModelForCausalLM
from holdfast.cli.main import main
root, folder = sys.argv[1:]
model.eval()
prompt = torch.tensor([[3, 14, 15], [9, 26, 5]])
words = ["--to", "huggingface", "--config-from", f"{root}/checkpoint-33"]
assert main(["convert", f"{root}/holdfast", folder, *words]) == 0
there = AutoModelForCausalLM.from_pretrained(folder)
how = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
here, read = (each.generate(prompt, **how).tolist() for each in (model, there))
assert here == read, (here, read)
assert all(map(torch.equal, model.state_dict().values(), there.state_dict().values()))
print("tokens", len(set(here[0] + here[1])))
"""


def test_a_trained_model_is_exported_and_generates_the_same(
    server: ForkServer, tmp_path: Path
) -> None:
    """One command makes a folder for `from_pretrained` of the newest step."""
    words = PROGRAM.replace("float(sys.argv[2])", "3").replace("save_steps=2", "save_steps=11")
    lines = server.lines(
        words + EXPORTED, tmp_path / "run", tmp_path / "folder", directory=tmp_path
    )
    assert int(lines[0].removeprefix("tokens ")) > 4

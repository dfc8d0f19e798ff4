"""`--fsdp`: one process's training in shards, whose checkpoints are those of any other run."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from holdfast import Checkpointer
from holdfast.errors import ConfigError, FaultError
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.parallel import Layout, ProcessGroups
from holdfast.storage import PosixStorage
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks
from trainer.tests.train.test_matrix import check
from trainer.tests.train.test_resume import tensors, whole

MODEL = (
    "--num-layers 2 --feeds de --model-dim 32 --num-heads 4 --num-experts 4 --expert-dim 16 "
    "--seq-len 16 --global-batch-size 8 --micro-batch-size 2 --lr 1e-2 --steps 10 --deterministic "
)
NUM_STEPS = 2
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LAYOUTS = (
    "",
    "--tp 2",
    "--tp 4",
    "--ep 2",
    "--ep 4",
    "--cp 2",
    "--cp 2 --cp-attention ring --ep 2 --expt-tp 1",
    "--tp 2 --ep 2 --expt-tp 1",
    "--ep 2 --expt-tp 2 --order dp-cp-tp-ep-pp",
    "--mixers sa --tp 2 --state-dim 4 --state-groups 2",
    "--no-tied-head --pp 2",
    "--no-tied-head --pp 2 --tp 2 --pp-schedule gpipe",
    "--no-tied-head --pp 2 --ep 2",
)


def config_of(words: str) -> TrainConfig:
    return parse([*MODEL.split(), *words.split()])


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope", "storm"], k=4000)
    (tmp_path / "text").write_text(" ".join(words))
    return tmp_path


def curve(words: str, *, groups: ProcessGroups, directory: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    corpus = read_corpus([Path(directory) / "text"])
    with Trainer(config_of(words), groups=groups, corpus=corpus) as trainer:
        metrics = [trainer.train_step() for _ in range(NUM_STEPS)]
    return [(each.loss, each.grad_norm) for each in metrics]


def curves(
    rank: RankContext, directory: str, cases: tuple[str, ...]
) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for number, words in enumerate(cases):
        fields = config_of(words).check(world_size=rank.num_ranks).to_dict()
        layout = Layout.from_dict({**fields, "name": f"{number}"})
        with ProcessGroups.create(layout, timeout_s=120) as groups:
            found[words] = curve(words, groups=groups, directory=directory)
    return found


def check_curves(workplace: Path, cases: tuple[tuple[str, str, str], ...]) -> None:
    """Each (layout, strategy, optimizer) has the losses and norms of one process."""
    words = [f"{layout} --optimizer {kind} --fsdp {strategy}" for layout, strategy, kind in cases]
    results = run_ranks(4, curves, str(workplace), tuple(words), timeout_s=280).results
    truths: dict[str, list[tuple[float, float]]] = {}
    for (layout, _, kind), case in zip(cases, words, strict=True):
        # The model, without the axes: a state space or an untied head is another model.
        alone = f"--optimizer {kind}"
        if "--mixers" in layout:
            alone += " --mixers sa --state-dim 4 --state-groups 2"
        if "--no-tied-head" in layout:
            alone += " --no-tied-head"
        if alone not in truths:
            truths[alone] = curve(alone, groups=ProcessGroups.single(), directory=str(workplace))
        for found in results:
            assert found[case] == results[0][case]
        for ours, theirs in zip(results[0][case], truths[alone], strict=True):
            assert abs(ours[0] - theirs[0]) < 1e-6, case
            assert abs(ours[1] - theirs[1]) < 1e-5, case


@pytest.mark.parametrize(
    ("shift", "every"),
    [
        pytest.param(0, 3, marks=pytest.mark.slow),
        *(pytest.param(shift, 1, marks=pytest.mark.nightly) for shift in range(4)),
    ],
)
def test_every_layout_trains_as_one_process(workplace: Path, shift: int, every: int) -> None:
    """F1, F2: dense layers and experts. SGD shows a wrong divisor, AdamW does not.

    All strategies on all layouts: tests/campaign, with smaller models.
    """
    pairs = [(n, STRATEGIES[(n + shift) % 4]) for n in range(0, len(LAYOUTS), every)]
    assert {strategy for _, strategy in pairs} == {*STRATEGIES}
    kinds = {n: "adamw" if n == 3 else "sgd" for n, _ in pairs}
    check_curves(workplace, tuple((LAYOUTS[n], strategy, kinds[n]) for n, strategy in pairs))


@pytest.mark.slow
def test_its_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    """K1, K8: saved and loaded, both ways; keys and bytes are the same whatever shards them."""
    layouts = (
        (4, "--tp 2 --ep 2 --expt-tp 1 --fsdp optim_grads_params"),
        (2, "--zero 1 --bucket-nbytes 5000"),
        (1, ""),
    )
    check(tmp_path, layouts, timeout_s=200)


@pytest.mark.nightly
def test_every_strategy_loads_what_layouts_saved(tmp_path: Path) -> None:
    """K1, K8."""
    layouts = (
        (4, "--tp 2 --fsdp optim"),
        (4, "--cp 2 --ep 2 --expt-tp 1 --fsdp optim_grads"),
        (2, "--ep 2 --fsdp no_shard"),
        (4, "--pp 2 --fsdp optim_grads_params"),
        (2, "--pp 2"),
    )
    untied = tuple((num_ranks, f"--no-tied-head {words}") for num_ranks, words in layouts)
    check(tmp_path, untied, timeout_s=280)


def keys(rank: RankContext, directory: str) -> dict[str, list[str]]:
    """Keys on disk of a checkpoint after one step."""
    found = {}
    corpus = read_corpus([Path(directory) / "text"])
    for words in ("none", "--fsdp optim_grads_params", "--zero 1"):
        config = config_of(words.replace("none", ""))
        where = f"{directory}/{words}"
        with (
            ProcessGroups.create(config.check(world_size=2)) as groups,
            Trainer(config, groups=groups, corpus=corpus) as trainer,
            Checkpointer(where, groups=groups) as checkpointer,
        ):
            trainer.train_step()
            state = trainer.state()
            del state["rng"]
            checkpointer.save(1, state)
            groups.control.barrier(phase="saved")
            with Snapshot.open(PosixStorage(Path(where)), step_dir(1)) as snapshot:
                found[words] = sorted(info.key for info in snapshot.manifest.tensors)
    return found


@pytest.mark.slow
def test_keys_on_disk_are_those_of_the_bare_model(workplace: Path) -> None:
    """K8: parameters and moments, after a step."""
    for found in run_ranks(2, keys, str(workplace)).results:
        assert found["none"] == found["--fsdp optim_grads_params"] == found["--zero 1"]
        assert "model.blocks.1.moe.router" in found["none"]


FLAGS = "--tp 2 --fsdp optim_grads_params --replicate-over tp --max-copy-fraction 9 --dropout 0.2 "


def stopped_and_resumed(rank: RankContext, directory: str, precision: str) -> dict[str, bool]:
    """Whether a resumed run has the losses, norms and bits of the one that went on."""
    del rank
    corpus = read_corpus([Path(directory) / "text"])
    config = config_of(f"{FLAGS} --precision {precision} --clip-grad 0.5 --save {directory}/ck")
    with ProcessGroups.create(config.check(world_size=4)) as groups:
        with Trainer(config, groups=groups, corpus=corpus) as trainer:
            for _ in range(2):
                trainer.train_step()
            trainer.save()
            ours = [trainer.train_step() for _ in range(2)]
            expected = tensors(trainer, whole)
        config = config_of(f"{FLAGS} --precision {precision} --clip-grad 0.5 --load {directory}/ck")
        with Trainer(config, groups=groups, corpus=corpus) as trainer:
            trainer.resume()
            theirs = [trainer.train_step() for _ in range(2)]
            found = tensors(trainer, whole)
            sharded = trainer.model.module.get_parameter("blocks.0.mlp.up.weight")
            assert isinstance(sharded, DTensor)
            share = sharded.to_local().numel() / sharded.numel()
    return {
        "losses": [(m.loss, m.grad_norm) for m in ours] == [(m.loss, m.grad_norm) for m in theirs],
        "bits": found.keys() == expected.keys()
        and all(torch.equal(found[name], expected[name]) for name in expected),
        "clipped": all(m.grad_norm > 0.5 for m in ours),
        "in shards": share == 0.25,  # tp * dp
        "moments": "blocks.0.mlp.up.weight.exp_avg" in expected,
    }


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.nightly)])
def test_a_resumed_run_is_the_run_that_was_not_stopped(workplace: Path, precision: str) -> None:
    """With dropout, clipping, copies for each tensor rank, and products in bfloat16."""
    for found in run_ranks(4, stopped_and_resumed, str(workplace), precision).results:
        assert found == dict.fromkeys(found, True)


def faults(rank: RankContext, directory: str) -> dict[str, object]:
    """A loss scale that no float16 holds, then a weight that is not a number on one rank."""
    corpus = read_corpus([Path(directory) / "text"])
    config = config_of("--precision fp16 --fsdp optim_grads_params")
    found: dict[str, object] = {}
    with ProcessGroups.create(config.check(world_size=2)) as groups:
        with Trainer(config, groups=groups, corpus=corpus) as trainer:
            assert trainer.scaler is not None
            trainer.scaler.load_state_dict({"scale": 2.0**24, "num_good_steps": 5})
            before = tensors(trainer, whole)
            first = trainer.train_step()
            after = tensors(trainer, whole)
            found["left out"] = (first.skipped, first.loss_scale, math.isnan(first.grad_norm))
            found["kept"] = all(torch.equal(before[name], after[name]) for name in before)
            num_more = 0
            while trainer.train_step().skipped:
                num_more += 1
            found["steps"] = trainer.schedule.num_steps
            moved = tensors(trainer, whole)["norm.weight"]
            found["moved"] = not torch.equal(before["norm.weight"], moved)
        config = config_of("--fsdp optim_grads")
        with Trainer(config, groups=groups, corpus=corpus) as trainer:
            trainer.train_step()
            if rank.rank == 1:
                with torch.no_grad():
                    weight = trainer.model.module.get_parameter("blocks.0.mlp.up.weight")
                    assert isinstance(weight, DTensor)
                    weight.to_local()[0, 0] = math.nan
            try:
                trainer.train_step()
            except FaultError as error:
                found["fault"] = f"{trainer.progress.step}: {error}"
    return found


@pytest.mark.slow
def test_overflow_and_faults_are_of_all_ranks(workplace: Path) -> None:
    for found in run_ranks(2, faults, str(workplace)).results:
        assert str(found.pop("fault")).startswith("1: step 2: the loss is nan")
        assert found == {
            "left out": (True, 2.0**24, True), "kept": True, "steps": 1, "moved": True
        }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "num_ranks", "message"),
    [
        ("--fsdp optim --zero 1", 2, "both shard the optimizer's state; leave --zero out"),
        ("--fsdp optim_grads", 1, "has no other rank to shard over: leave it out"),
        ("--fsdp no_shard --pp 2", 2, "set --no-tied-head, or use --zero 1"),
        (
            "--fsdp optim --no-tied-head --pp 2 --pp-schedule zero-bubble",
            2,
            "set --pp-schedule 1f1b or gpipe",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    words: str, num_ranks: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(words).check(world_size=num_ranks)


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="optim_grads_params"):
        config_of("--fsdp everything")

"""A run that is stopped and resumed is the run that was not."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import Checkpointer
from holdfast.errors import MismatchError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from holdfast_trainer.train.data import Corpus, read_corpus
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks

SAVED_AT = 2
NUM_MORE = 2
WORDS = (
    "--num-layers 1 --model-dim 32 --num-heads 4 --seq-len 16 --global-batch-size 8 "
    "--warmup-steps 3 --end-weight-decay 0.3 --lr 1e-2 --min-lr 1e-3 "
    "--steps 11 --save-interval 5 --deterministic"
)


@dataclass
class Seen:
    """What one rank saw of a run."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    """Local parts of parameters and moments."""
    draws: list[float]
    step: int
    loaded: dict[str, Tensor]
    """Whole tensors right after the start."""


def config_of(*words: str) -> TrainConfig:
    return parse([*WORDS.split(), *words])


def text(directory: str) -> Corpus:
    return read_corpus([Path(directory) / "text"])


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["held", "fast", "anchor", "rope", "storm"], k=4000)
    (tmp_path / "text").write_text(" ".join(words))
    return tmp_path


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def tensors(trainer: Trainer, take: Any) -> dict[str, Tensor]:
    found = {}
    trainer.update.synchronize()
    for name, parameter in trainer.model.module.named_parameters():
        found[name] = take(parameter)
    for name, state in moments(trainer).items():
        found |= {f"{name}.{entry}": take(value) for entry, value in state.items()}
    return found


def moments(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's entries by parameter: whole, or this rank's runs."""
    names = {p: name for name, p in trainer.model.module.named_parameters()}
    optimizer = trainer.update.optimizer
    if not hasattr(optimizer, "optimizer_parameters"):
        return {names[p]: dict(state) for p, state in optimizer.state.items()}
    return {
        names[held.parameter]: dict(held.optimizer.state[held.updated])
        for held in optimizer.optimizer_parameters()
        if held.updated is not None and held.updated in held.optimizer.state
    }


def watch(trainer: Trainer, *, num_steps: int) -> Seen:
    loaded = tensors(trainer, whole)
    metrics = [trainer.train_step() for _ in range(num_steps)]
    return Seen(
        losses=[m.loss for m in metrics],
        norms=[m.grad_norm for m in metrics],
        state=tensors(trainer, local),
        draws=[random.random(), float(np.random.random()), torch.rand(()).item()],
        step=trainer.progress.step,
        loaded=loaded,
    )


def uninterrupted(
    rank: RankContext, directory: str, dropout: str, words: tuple[str, ...] = ()
) -> Seen:
    """Train, save on the way, and continue."""
    config = config_of("--tp", "2", "--save", f"{directory}/ck", "--dropout", dropout, *words)
    with (
        ProcessGroups.create(config.check(world_size=4)) as groups,
        Trainer(config, groups=groups, corpus=text(directory)) as trainer,
    ):
        for _ in range(SAVED_AT):
            trainer.train_step()
        trainer.save()
        return watch(trainer, num_steps=NUM_MORE)


def resumed(
    rank: RankContext,
    directory: str,
    dropout: str,
    tps: tuple[int, ...],
    num_steps: int,
    micro: int,
    words: tuple[str, ...] = (),
) -> list[Seen]:
    """Load under each tensor size and continue."""
    found = []
    for tp in tps:
        load = ("--load", f"{directory}/ck", "--dropout", dropout, *words)
        config = config_of("--tp", str(tp), *load)
        config = replace(config, data=replace(config.data, micro_batch_size=micro))
        with (
            ProcessGroups.create(config.check(world_size=4)) as groups,
            Trainer(config, groups=groups, corpus=text(directory)) as trainer,
        ):
            trainer.resume()
            found.append(watch(trainer, num_steps=num_steps))
    return found


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("--zero 1 --bucket-nbytes 9000", marks=pytest.mark.slow),
        "--zero 2 --precision fp16 --micro-batch-size 2",
    ],
)
def test_the_same_layout_resumes_bitwise(workplace: Path, words: str) -> None:
    given, micro = tuple(words.split()), 2 if "micro" in words else 0
    first = run_ranks(4, uninterrupted, str(workplace), "0.1", given).results
    second = run_ranks(4, resumed, str(workplace), "0.1", (2,), NUM_MORE, micro, given).results
    for rank, (ours, (theirs,)) in enumerate(zip(first, second, strict=True)):
        assert theirs.losses == ours.losses, rank
        assert theirs.norms == ours.norms, rank
        assert theirs.draws == ours.draws, rank
        assert theirs.step == ours.step == SAVED_AT + NUM_MORE
        assert theirs.state.keys() == ours.state.keys()
        for name, value in ours.state.items():
            assert theirs.state[name].dtype == value.dtype
            assert torch.equal(theirs.state[name], value), (rank, name)
        assert any(name.endswith(".exp_avg_sq") for name in ours.state)
    # All ranks report one loss; data ranks draw differently, tensor ranks 0 and 1 alike.
    assert all(seen.losses == first[0].losses for seen in first)
    assert first[0].draws == first[1].draws != first[2].draws == first[3].draws


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 4])
def test_another_layout_loads_the_same_bits_and_trains_alike(workplace: Path, tp: int) -> None:
    first = run_ranks(4, uninterrupted, str(workplace), "0.0").results
    second = run_ranks(4, resumed, str(workplace), "0.0", (tp,), NUM_MORE, 2).results
    for run, others in zip(first, second, strict=True):
        for other in others:  # their micro-batches are others, too
            assert other.loaded.keys() == run.loaded.keys()
            assert all(torch.equal(other.loaded[name], run.loaded[name]) for name in run.loaded)
            gaps = np.abs(np.subtract(other.losses, run.losses))
            assert gaps.max() < 1e-4
            assert other.losses[0] == pytest.approx(run.losses[0], abs=1e-6)


def choices(rank: RankContext, directory: str) -> dict[str, Any]:
    """What each flag of a load leaves out, in its own process."""
    saved = config_of("--save", f"{directory}/ck")
    groups = ProcessGroups.single()
    corpus = text(directory)
    with Trainer(saved, groups=groups, corpus=corpus) as trainer:
        for _ in range(SAVED_AT):
            trainer.train_step()
        random.random()
        trainer.save()
        weight = local(trainer.model.module.norm.weight)
        lr = trainer.schedule.lr
        draw = random.random()
    seen: dict[str, Any] = {"weight": weight, "lr": lr, "draw": draw}
    for flag in ("", "--no-load-optim", "--no-load-scheduler", "--no-load-rng", "--finetune"):
        words = ["--load", f"{directory}/ck", *([flag] if flag else [])]
        trainer = Trainer(config_of(*words), groups=groups, corpus=corpus)
        fresh_draw = random.random()
        trainer = Trainer(config_of(*words), groups=groups, corpus=corpus)
        trainer.resume()
        seen[flag] = {
            "weight": local(trainer.model.module.norm.weight),
            "has_moments": bool(moments(trainer)),
            "lr": trainer.schedule.lr,
            "group_lr": trainer.update.optimizer.param_groups[0]["lr"],
            "step": trainer.progress.step,
            "samples": trainer.sampler.num_samples,
            "drew_stored": random.random() == draw,
            "fresh": fresh_draw,
        }
    return seen


def test_each_flag_leaves_out_what_it_names(workplace: Path) -> None:
    (seen,) = run_ranks(1, choices, str(workplace), init=False).results
    fresh_lr = 1e-2 / 3
    everything = {
        "has_moments": True,
        "lr": seen["lr"],
        "group_lr": seen["lr"],
        "step": SAVED_AT,
        "samples": SAVED_AT * 8,
        "drew_stored": True,
    }
    expected = {
        "": everything,
        "--no-load-optim": everything | {"has_moments": False},
        "--no-load-scheduler": everything | {"lr": fresh_lr, "group_lr": fresh_lr},
        "--no-load-rng": everything | {"drew_stored": False},
        "--finetune": {
            "has_moments": False,
            "lr": fresh_lr,
            "group_lr": fresh_lr,
            "step": 0,
            "samples": 0,
            "drew_stored": False,
        },
    }
    assert not torch.equal(seen["weight"], torch.ones_like(seen["weight"]))
    for flag, wanted in expected.items():
        found = seen[flag]
        assert torch.equal(found["weight"], seen["weight"]), flag
        assert {name: found[name] for name in wanted} == wanted, flag


def test_saving_without_parts_and_loading_without_them(workplace: Path) -> None:
    groups = ProcessGroups.single()
    corpus = text(str(workplace))
    before = torch.random.get_rng_state()
    config = config_of("--save", f"{workplace}/ck", "--no-save-optim", "--no-save-rng")
    with Trainer(config, groups=groups, corpus=corpus) as trainer:
        trainer.train_step()
        trainer.save()
    strict = config_of("--load", f"{workplace}/ck")
    with pytest.raises(MismatchError, match="optimizer"):
        Trainer(strict, groups=groups, corpus=corpus).resume()
    loose = config_of("--load", f"{workplace}/ck", "--no-load-optim", "--no-load-rng")
    trainer = Trainer(loose, groups=groups, corpus=corpus)
    trainer.resume()
    assert trainer.progress.step == 1
    torch.random.set_rng_state(before)


def test_a_resume_waits_for_what_a_killed_run_has_saved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer may commit while the new run looks, which would then save that step again."""
    groups = ProcessGroups.single()
    before = torch.random.get_rng_state()
    config = config_of("--save", f"{workplace}/ck", "--load", f"{workplace}/ck")
    corpus = text(str(workplace))
    with Trainer(config, groups=groups, corpus=corpus) as trainer:
        for _ in range(2):
            trainer.train_step()
            trainer.save()
    late = (workplace / "ck" / "iter_0000002").rename(workplace / "late")
    latest = Checkpointer.latest

    def commit_and_look(checkpointer: Checkpointer) -> int | None:
        late.rename(workplace / "ck" / "iter_0000002")
        return latest(checkpointer)

    monkeypatch.setattr(Checkpointer, "latest", commit_and_look)
    trainer = Trainer(config, groups=groups, corpus=corpus)
    trainer.resume()
    assert trainer.progress.step == 2
    torch.random.set_rng_state(before)


def test_other_text_is_refused_on_resume_unless_allowed(workplace: Path) -> None:
    groups = ProcessGroups.single()
    before = torch.random.get_rng_state()
    config = config_of("--save", f"{workplace}/ck")
    with Trainer(config, groups=groups, corpus=text(str(workplace))) as trainer:
        trainer.train_step()
        trainer.save()
    (workplace / "text").write_text("something else " * 500)
    other = text(str(workplace))
    load = config_of("--load", f"{workplace}/ck")
    with pytest.raises(MismatchError, match="trained on other text"):
        Trainer(load, groups=groups, corpus=other).resume()
    allowed = replace(load, data=replace(load.data, allow_other_data=True))
    trainer = Trainer(allowed, groups=groups, corpus=other)
    trainer.resume()
    assert trainer.sampler.num_samples == 8
    torch.random.set_rng_state(before)


def ordered(rank: RankContext, directory: str) -> list[list[float]]:
    """The same logical run with ranks placed in two ways."""
    found = []
    for order in ("tp-cp-ep-dp-pp", "dp-tp"):
        config = config_of("--tp", "2", "--order", order, "--dropout", "0.1")
        layout: Layout = config.check(world_size=4)
        with (
            ProcessGroups.create(layout) as groups,
            Trainer(config, groups=groups, corpus=text(directory)) as trainer,
        ):
            found.append([trainer.train_step().loss for _ in range(2)])
    return found


@pytest.mark.slow
def test_the_order_of_ranks_changes_nothing(workplace: Path) -> None:
    for one, other in run_ranks(4, ordered, str(workplace)).results:
        assert one == other

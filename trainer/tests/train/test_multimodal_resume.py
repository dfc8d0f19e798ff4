"""A multimodal run that is stopped and resumed, there or elsewhere, is the run that was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.errors import MismatchError
from holdfast_trainer.train.digits import Digits
from holdfast_trainer.train.multimodal import MultimodalTrainer
from tests.harness import RankContext, run_ranks
from trainer.tests.train.multimodal_runs import (
    EXPERTS,
    config_of,
    make_rows,
    open_run,
    whole_parameters,
)

SAVED_AT = 3
LAST = 6
ADAM = "--lr 1e-2 --min-lr 1e-3 --end-weight-decay 0.3 --clip-grad 0.5"
DROPOUT = "--dropout 0.2 --vision-dropout 0.3"


@dataclass
class Seen:
    """What one rank saw from the resume, or the step of it, on."""

    steps: list[tuple[float, float, float]] = field(default_factory=list)
    """Loss, learning rate and norm."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Whole parameters and moments at the step of the resume."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Local parameters, moments and random streams at the end."""
    progress: dict[str, object] = field(default_factory=dict)


def local_state(trainer: MultimodalTrainer) -> dict[str, Tensor]:
    """Everything of this rank that training changes."""
    trainer.synchronize()
    result: dict[str, Tensor] = {}
    for module, split in trainer.model.modules.items():
        names = {p: name for name, p in split.module.named_parameters()}
        for parameter, name in names.items():
            value = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            result[f"{module}.{name}"] = value.detach().clone()
        update = trainer.updates[module]
        for member in () if update is None else update.optimizer_parameters():
            if member.updated is not None:
                for entry, value in member.optimizer.state[member.updated].items():
                    key = f"{module}.{names[member.parameter]}.{entry}"
                    result[key] = torch.as_tensor(value).detach().clone()
        result[f"{module}.rng"] = trainer.streams[module]._states()["torch"].clone()  # type: ignore[union-attr]
    return result


def run_steps(trainer: MultimodalTrainer, seen: Seen, *, until: int) -> None:
    while trainer.progress.step < until:
        metrics = trainer.train_step()
        seen.steps.append((metrics.loss, metrics.lr, metrics.grad_norm))


def uninterrupted(rank: RankContext, directory: str, digits: Digits, words: str) -> Seen:
    seen = Seen()
    with open_run(config_of(ADAM, words, f"--save {directory}"), digits, rank.num_ranks) as trainer:
        run_steps(trainer, Seen(), until=SAVED_AT)
        trainer.save()
        seen.before = whole_parameters(trainer)
        run_steps(trainer, seen, until=LAST)
        seen.state = local_state(trainer)
        seen.progress = trainer.progress.state_dict()
    return seen


def resumed(rank: RankContext, directory: str, digits: Digits, words: str) -> Seen:
    seen = Seen()
    with open_run(config_of(ADAM, words, f"--load {directory}"), digits, rank.num_ranks) as trainer:
        trainer.resume()
        assert trainer.progress.step == SAVED_AT
        seen.before = whole_parameters(trainer)
        run_steps(trainer, seen, until=LAST)
        seen.state = local_state(trainer)
        seen.progress = trainer.progress.state_dict()
    return seen


def check_bitwise(directory: Path, words: str, *, num_ranks: int = 4) -> None:
    digits = make_rows()
    arguments = (str(directory / "ck"), digits, words)
    first = run_ranks(num_ranks, uninterrupted, *arguments).results
    second = run_ranks(num_ranks, resumed, *arguments).results
    for ours, theirs in zip(first, second, strict=True):
        assert theirs.steps == ours.steps, words
        assert len(ours.steps) == LAST - SAVED_AT
        assert theirs.progress == ours.progress
        assert theirs.state.keys() == ours.state.keys()
        different = [n for n, v in ours.state.items() if not torch.equal(theirs.state[n], v)]
        assert different == [], words
        assert any(name.endswith(".exp_avg_sq") for name in ours.state)
    # Dropout was really drawn, and by each module on its own.
    names = {name for seen in first for name in seen.state if name.endswith(".rng")}
    assert names == {"vision.rng", "projector.rng", "language.rng"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        f"--tp 2 {DROPOUT}",
        pytest.param(f"--language-first --ep 2 {EXPERTS} {DROPOUT}", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_is_the_run_itself(tmp_path: Path, words: str) -> None:
    """M1, M2, M20: the encoder on rank 0, and the language model on rank 0."""
    check_bitwise(tmp_path, words)


@pytest.mark.parametrize(
    "words",
    [
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                f"--cp 2 --language-first --vision-tp 2 {DROPOUT}",
                "--tp 2 --precision fp16 --freeze-vision",
            )
        ),
        *(
            pytest.param(words, marks=pytest.mark.nightly)
            for words in (
                f"--pp 2 {DROPOUT}",
                f"--tp 2 --projector-on language --zero 2 {DROPOUT}",
                f"--tp 2 --language-first {DROPOUT}",
                f"--ep 2 {EXPERTS} {DROPOUT}",
                f"--cp 2 {DROPOUT}",
                f"--colocated --tp 2 --vision-tp 4 {DROPOUT}",
                "--tp 2 --precision fp16",
                "--tp 2 --freeze-vision",
            )
        ),
    ],
)
def test_other_resumed_runs_are_the_runs_themselves(tmp_path: Path, words: str) -> None:
    """M1, M2, M9, M14, M20."""
    check_bitwise(tmp_path, words)


MOVES = (
    # from, to
    ("--tp 2", "--tp 2 --vision-tp 2"),
    ("--tp 2 --vision-tp 2", "--colocated --tp 2"),
    ("--tp 2", "--language-first --tp 2 --projector-on language"),
    ("--pp 2", "--colocated --tp 2 --vision-tp 4"),
    (f"--ep 2 {EXPERTS}", f"--colocated --tp 2 {EXPERTS}"),
)


def check_moved(directory: Path, before: str, after: str, *, bound: float = 2e-4) -> None:
    """The same bits right after the load, and the same run but for rounding."""
    digits = make_rows()
    first = run_ranks(4, uninterrupted, str(directory / "ck"), digits, before).results
    second = run_ranks(4, resumed, str(directory / "ck"), digits, after).results
    whole = {name: value for seen in first for name, value in seen.before.items()}
    loaded = {name: value for seen in second for name, value in seen.before.items()}
    assert loaded.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(loaded[name], value), name
    for seen in second:
        assert seen.steps[0] == pytest.approx(first[0].steps[0], rel=1e-5)
        for ours, theirs in zip(first[0].steps, seen.steps, strict=True):
            assert theirs == pytest.approx(ours, rel=bound)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MOVES[:1])
def test_a_run_goes_on_after_its_encoder_moved(tmp_path: Path, before: str, after: str) -> None:
    """M7: an encoder of two data ranks becomes one of two tensor ranks."""
    check_moved(tmp_path, before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in MOVES[1:3]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in MOVES[3:]),
    ],
)
def test_a_run_goes_on_after_other_moves(tmp_path: Path, before: str, after: str) -> None:
    """M7: disjoint to colocated, the projector to other ranks, pipeline to one stage."""
    check_moved(tmp_path, before, after)


def thaw(rank: RankContext, directory: str, digits: Digits) -> tuple[str, list[str]]:
    """What is said of an encoder that was frozen when it was saved and is not any more."""
    frozen = config_of(ADAM, f"--save {directory} --tp 2 --freeze-vision")
    with open_run(frozen, digits, rank.num_ranks) as trainer:
        start = whole_parameters(trainer)
        run_steps(trainer, Seen(), until=SAVED_AT)
        trainer.save()
        end = whole_parameters(trainer)
    changed = [name for name in start if not torch.equal(start[name], end[name])]
    message = ""
    with open_run(config_of(ADAM, f"--load {directory} --tp 2"), digits, rank.num_ranks) as trainer:
        try:
            trainer.resume()
        except MismatchError as error:
            message = str(error)
    asked = config_of(ADAM, f"--load {directory} --tp 2 --fresh-vision-optim")
    with open_run(asked, digits, rank.num_ranks) as trainer:
        trainer.resume()
        run_steps(trainer, Seen(), until=SAVED_AT + 2)
    return message, changed


@pytest.mark.slow
def test_an_encoder_begins_to_learn_only_when_asked_to(tmp_path: Path) -> None:
    """M9: a frozen encoder has no optimizer state; its absence is an error by default."""
    for message, changed in run_ranks(4, thaw, str(tmp_path / "ck"), make_rows()).results:
        assert "vision.optimizer" in message
        assert not any(name.startswith("vision.") for name in changed)
    assert any(name.startswith("language.") for name in changed)

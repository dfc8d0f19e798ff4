"""`--init-from`: a run starts with the weights of a checkpoint in any format that is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.cli.main import main
from holdfast.errors import ConfigError, MismatchError
from holdfast.parallel import ProcessGroups
from holdfast_trainer.train.loop import Trainer
from tests.harness import RankContext, run_ranks
from trainer.tests.train.test_resume import config_of, tensors, text, whole, workplace

__all__ = ["workplace"]


def start(rank: RankContext, directory: str, runs: list[list[str]]) -> list[dict[str, Tensor]]:
    """The whole weights that each of these runs starts with, and the loss of its first step."""
    found = []
    for words in runs:
        config = config_of(*words)
        with (
            ProcessGroups.create(config.check(world_size=rank.num_ranks)) as groups,
            Trainer(config, groups=groups, corpus=text(directory)) as trainer,
        ):
            trainer.resume()
            weights = tensors(trainer, whole)
            weights["began at"] = torch.tensor(trainer.progress.step)
            found.append({**weights, "loss": torch.tensor(trainer.train_step().loss)})
            if config.checkpoint.save is not None:
                trainer.save()
    return found


@pytest.mark.slow
def test_weights_of_hugging_face_under_other_layouts(workplace: Path) -> None:
    """A run's weights in Llama's names, and back into runs of other layouts, bit by bit."""
    run, folder = workplace / "run", workplace / "hf"
    run_ranks(1, start, str(workplace), [["--save", str(run)]], init=False)
    words = ["convert", run, folder, "--to", "huggingface", "--map", "gpt-to-llama-hf"]
    assert main([*map(str, words)]) == 0
    own = ["--load", str(run), "--finetune"]
    new = ["--init-from", str(folder), "--init-map", "llama-hf-to-gpt"]
    (first,) = run_ranks(1, start, str(workplace), [own], init=False).results[0]
    for layout in (["--tp", "2", "--zero", "1"], ["--fsdp", "optim_grads_params"]):
        (found,) = run_ranks(4, start, str(workplace), [[*new, *layout]]).results[0]
        loss, expected = found.pop("loss"), dict(first)
        assert found["began at"] == 0
        assert not any(name.endswith("exp_avg") for name in found)
        torch.testing.assert_close(loss, expected.pop("loss"), rtol=1e-5, atol=1e-5)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), layout


def test_a_restart_takes_its_own_checkpoint_and_a_wrong_map_is_refused(workplace: Path) -> None:
    run = workplace / "run"
    words = ["--save", str(run), "--load", str(run)]
    run_ranks(1, start, str(workplace), [words], init=False)
    again = ["--load", str(run), "--init-from", str(run)]
    ((found,),) = run_ranks(1, start, str(workplace), [again], init=False).results
    assert found["began at"] == 1
    wrong = ["--init-from", str(run), "--init-map", "llama-hf-to-gpt"]
    outcome = run_ranks(1, start, str(workplace), [wrong], init=False, expect_failure=True)
    assert outcome.errors[0] is not None
    assert outcome.errors[0].type_name == MismatchError.__name__


def test_options_without_a_meaning_are_refused() -> None:
    for words, why in (
        (["--init-map", "x"], "--init-map has no meaning without --init-from"),
        (["--init-from", "x", "--load", "y", "--exit-on-missing-checkpoint"], "leave one of them"),
    ):
        with pytest.raises(ConfigError, match=why):
            config_of(*words).check(world_size=1)

"""Arguments of `holdfast train`: a mistake is one clear line, and every number is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.support.arguments import options_of
from holdfast.errors import ConfigError, HoldfastError
from holdfast_trainer.command import main, parse
from holdfast_trainer.train.config import TrainConfig

MISTAKES: list[tuple[str, str]] = [
    ("--lrr 3", "unknown option --lrr; did you mean --lr"),
    ("-lr 3", "unknown option -lr; did you mean --lr?"),
    ("--lr", "--lr needs a number after it"),
    ("--lr x", "--lr needs a number, not 'x'"),
    ("--steps 1.5", "--steps needs a whole number, not '1.5'"),
    ("--optimizer adamv", "needs adamw or sgd, not 'adamv'; did you mean adamw?"),
    ("--zero 7", "--zero needs 0, 1 or 2, not '7'"),
    ("--save=", "--save is empty"),
    ("--finetune=yes", "--finetune takes no value"),
    ("dnese", "unknown preset 'dnese': did you mean dense?"),
    ("--steps 3 moe", "unexpected 'moe': a preset or a CONFIG.toml comes first"),
    ("bad.toml", "bad.toml: Expected `float`, got `str` - at `$.optim.lr`"),
    ("key.toml", "unknown key 'lrr'; did you mean 'lr'?"),
    ("nan.toml", "--lr is nan; set it to 0 or a positive number"),
    ("--nproc 2 --lr inf", "--lr is inf"),
    ("--nproc 2 --lrr 3", "unknown option --lrr"),
]


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[optim]\nlr = 'high'\n")
    (tmp_path / "key.toml").write_text("[optim]\nlrr = 1\n")
    (tmp_path / "nan.toml").write_text("[optim]\nlr = nan\n")


@pytest.mark.parametrize(("words", "part"), MISTAKES)
def test_a_mistake_is_one_line(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith("holdfast: error: ")
    assert result.err.count("\n") == 1
    assert result.err.isascii()
    assert part in result.err


def numeric_options() -> list[tuple[str, type]]:
    return [(o.shown, o.kind) for o in options_of(TrainConfig) if o.kind in (int, float)]


@pytest.mark.parametrize(("name", "kind"), numeric_options())
def test_every_number_is_checked_by_name(name: str, kind: type) -> None:
    """Neither infinities nor negative or absurd numbers get through any option, nor a traceback."""
    odd = ["-1", "1" + "0" * 30] + (["inf", "-inf", "nan", "1e30"] if kind is float else [])
    needs_load = ["--load", "x"] if name == "--load-step" else []
    experts = ["--feeds", "e", "--mixers", "s"]
    for word in odd:
        with pytest.raises(HoldfastError) as caught:
            parse([*experts, *needs_load, name, word]).check(world_size=1)
        assert name in str(caught.value), word


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("--lr 3e-4", "optim.lr", 3e-4),
        ("--lr=1e-3", "optim.lr", 1e-3),
        ("--lr .01", "optim.lr", 0.01),
        ("--lr 1", "optim.lr", 1.0),
        ("--steps 1e5", "steps", 100_000),
        ("--steps 100_000", "steps", 100_000),
        ("--global_batch_size 8", "data.global_batch_size", 8),
        ("--stage-layers 2 3", "layout.stage_layers", (2, 3)),
        ("--dp None", "layout.dp", None),
        ("--dp=2", "layout.dp", 2),
        ("--zero 2", "optim.zero", 2),
        ("--no-save-rng", "checkpoint.save_rng", False),
        ("--no-save-rng --save-rng", "checkpoint.save_rng", True),
        ("--no-async-save", "checkpoint.async_save", False),
        ("--seed 1 --seed 2", "seed", 2),
        ("--save -- ", "checkpoint.save", "refused"),
    ],
)
def test_what_people_type_is_understood(words: str, field: str, value: object) -> None:
    if value == "refused":
        with pytest.raises(ConfigError, match="--save needs a path"):
            parse(words.split())
        return
    found: object = parse(words.split())
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_a_flag_undoes_what_a_file_sets(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[checkpoint]\nasync_save = true\nsave_rng = false\n")
    both = parse(["run.toml", "--no-async-save", "--save-rng"]).checkpoint
    assert (both.async_save, both.save_rng) == (False, True)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    result = capsys.readouterr()
    assert result.err == ""
    assert "usage: holdfast train" in result.out
    assert "{None}" not in result.out
    # An option and its opposite are on one line, so that the text fits both.
    assert not [line for line in result.out.splitlines() if line.strip().startswith("--no-")]


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast_trainer", "--help"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(theirs)
    assert done.returncode == 0
    assert done.stderr == ""

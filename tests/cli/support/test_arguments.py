"""Wrong arguments: one clear line and exit code 2, the same on a terminal and through a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import VERBS, main
from holdfast.cli.support.arguments import options_of, parse_arguments
from holdfast.errors import ConfigError, HoldfastError
from holdfast_trainer.command import parse
from holdfast_trainer.train.config import TrainConfig
from tests.cli.terminal import on_terminal

MISTAKES: list[tuple[str, str]] = [
    ("train --lrr 3", "unknown option --lrr; did you mean --lr"),
    ("train -lr 3", "unknown option -lr; did you mean --lr?"),
    ("train --lr", "--lr needs a number after it"),
    ("train --lr x", "--lr needs a number, not 'x'"),
    ("train --steps 1.5", "--steps needs a whole number, not '1.5'"),
    ("train --optimizer adamv", "needs adamw or sgd, not 'adamv'; did you mean adamw?"),
    ("train --zero 7", "--zero needs 0, 1 or 2, not '7'"),
    ("train --save=", "--save is empty"),
    ("train --finetune=yes", "--finetune takes no value"),
    ("train dnese", "unknown preset 'dnese': did you mean dense?"),
    ("train --steps 3 moe", "unexpected 'moe': a preset or a CONFIG.toml comes first"),
    ("train bad.toml", "bad.toml: Expected `float`, got `str` - at `$.optim.lr`"),
    ("train key.toml", "unknown key 'lrr'; did you mean 'lr'?"),
    ("train nan.toml", "--lr is nan; set it to 0 or a positive number"),
    ("train --nproc 2 --lr inf", "--lr is inf"),
    ("train --nproc 2 --lrr 3", "unknown option --lrr"),
    ("ls a b", "unexpected 'b': only ROOT is taken"),
    ("ls --jsno", "did you mean --json?"),
    ("show", "missing PATH (A checkpoint, or a directory of checkpoints"),
    ("show --step x .", "--step needs a whole number, not 'x'"),
    ("verify", "missing PATH"),
    ("diff a", "missing B (The other one)"),
    ("export a", "missing --tensor (The key of a tensor"),
    ("prune --keep-best a:min b", "missing ROOT: --keep-best took all words after it"),
    ("repair --dry", "did you mean --dry-run?"),
    ("tag . 3x", "STEP needs a whole number, not '3x'"),
    ("trian", "unknown command 'trian'; did you mean 'train'?"),
]

DRIVER = """
import json, os, sys
from holdfast.cli.main import main
for words, changes in json.load(open(sys.argv[1])):
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    sys.stdout.flush()
    print("\\x1e", code, flush=True)
"""


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[optim]\nlr = 'high'\n")
    (tmp_path / "key.toml").write_text("[optim]\nlrr = 1\n")
    (tmp_path / "nan.toml").write_text("[optim]\nlr = nan\n")


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words.split()) == 2, words
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith("holdfast: error: ")
    assert result.err.count("\n") == 1
    assert result.err.isascii()
    return result.err


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_reads_what_a_pipe_reads(
    width: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One process on a pseudo-terminal makes every mistake, in each environment."""
    expected, cases = [], []
    for words, part in MISTAKES:
        line = refusal(words, capsys)
        assert part in line, line
        for changes in (
            {"NO_COLOR": None, "COLUMNS": None, "FORCE_COLOR": None},
            {"NO_COLOR": "1", "COLUMNS": None},
            {"NO_COLOR": None, "COLUMNS": "60"},
            {"NO_COLOR": None, "COLUMNS": None, "FORCE_COLOR": "1"},
        ):
            cases.append((words.split(), changes))
            expected.append(line)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "driver.py").write_text(DRIVER)
    env = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
    code, result = on_terminal(
        [sys.executable, "driver.py", "cases.json"], width=width, env=env, cwd=tmp_path
    )
    assert code == 0, result
    answers = result.split("\x1e 2\n")
    assert answers.pop() == ""
    assert answers == expected


def test_the_command_itself_on_a_terminal(tmp_path: Path) -> None:
    env = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "holdfast.cli.main", "show", "--stpe", "3", "x"]
    line = "holdfast: error: unknown option --stpe; did you mean --step? See `holdfast show --help`"
    assert on_terminal(command, width=40, env=env, cwd=tmp_path) == (2, line + "\n")


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


def test_words_after_two_dashes_are_no_options() -> None:
    from holdfast.cli.commands.ls import Args

    args = parse_arguments(Args, ["--json", "--", "-odd"], prog="holdfast ls", about="")
    assert args == Args(root=Path("-odd"), json=True)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_command(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    result = capsys.readouterr()
    assert result.err == ""
    assert f"usage: holdfast {verb}" in result.out
    assert "{None}" not in result.out
    lines = [line.strip("│ ") for line in result.out.splitlines()]
    for line in lines:  # an option and its opposite are on one line, so that the text fits both
        if line.startswith("--no-"):
            raise AssertionError(line)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["ls"], ["nothing"]])
def test_a_reader_that_leaves_early_is_no_error(words: list[str], tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *words],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    os.close(theirs)
    assert done.returncode == (2 if words == ["nothing"] else 0)
    assert ("unknown command" in done.stderr) if words == ["nothing"] else done.stderr == ""

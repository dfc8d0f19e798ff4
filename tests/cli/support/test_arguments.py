"""Wrong arguments: one clear line and exit code 2, the same on a terminal and through a pipe."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from holdfast.cli.main import VERBS, main
from holdfast.cli.support.arguments import parse_arguments
from holdfast.errors import ConfigError
from tests.cli.terminal import on_terminal

MISTAKES: list[tuple[str, str]] = [
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


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words.split()) == 2, words
    result = capsys.readouterr()
    assert result.out == ""
    assert result.err.startswith("holdfast: error: ")
    assert result.err.count("\n") == 1
    assert result.err.isascii()
    return result.err


@pytest.mark.parametrize(
    "width", [40, *(pytest.param(width, marks=pytest.mark.slow) for width in (80, 200))]
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Part of a command line of several dataclasses."""

    lr: float = 1e-2
    """Learning rate."""
    sizes: tuple[int, ...] = ()
    """Several numbers."""
    width: int | None = None
    """A number that may be absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command line with everything that options can be."""

    model: Model = field(default_factory=Model)
    num_steps: int = 10
    """Steps."""
    kind: Literal["adamw", "sgd"] = "adamw"
    """One of two words."""
    zero: Literal[0, 1, 2] = 0
    """One of three numbers."""
    save: Path | None = None
    """A directory."""
    keep: bool = True
    """A flag that is set."""
    asynchronous: bool = False
    """A flag that is not."""


def parse(words: str, *, default: Run | None = None) -> Run:
    return parse_arguments(
        Run, words.split(), prog="run", about="Runs.", default=default or Run(), has_pairs=True
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--lrr 3", "unknown option --lrr; did you mean --lr"),
        ("-lr 3", "unknown option -lr; did you mean --lr?"),
        ("--lr", "--lr needs a number after it"),
        ("--lr x", "--lr needs a number, not 'x'"),
        ("--num-steps 1.5", "--num-steps needs a whole number, not '1.5'"),
        ("--kind adamv", "needs adamw or sgd, not 'adamv'; did you mean adamw?"),
        ("--zero 7", "--zero needs 0, 1 or 2, not '7'"),
        ("--save=", "--save is empty"),
        ("--save -- ", "--save needs a path"),
        ("--save=~/ck", "'~/ck': only a shell makes a home directory of ~"),
        ("--keep=yes", "--keep takes no value"),
        ("--num-steps 3 moe", "unexpected 'moe'"),
        ("--keep -1", "unexpected '-1'"),
        ("--x_y=1", "unknown option --x_y"),
        ("--save= --save=ck", "--save is empty"),
        ("--lr x --lr 1", "--lr needs a number, not 'x'"),
    ],
)
def test_a_mistake_is_refused_by_name(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        parse(words)


@pytest.mark.parametrize("word", ["--lr 3", "--sav=a b", "-x y"])
@pytest.mark.parametrize("before", ["--save", "--keep", "--sizes 1"])
def test_options_in_quotes_are_not_a_value(before: str, word: str) -> None:
    """`--save "$OPTIONS"` must not make a directory of that name."""
    with pytest.raises(ConfigError, match="unknown option"):
        parse_arguments(Run, [*before.split(), word], prog="run", about="", default=Run())


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--lr 3e-4", "model.lr", 3e-4),
        ("--lr=1e-3", "model.lr", 1e-3),
        ("--lr .01", "model.lr", 0.01),
        ("--lr 1", "model.lr", 1.0),
        ("--lr -1", "model.lr", -1.0),
        ("--lr -1e-3", "model.lr", -1e-3),
        ("--lr -inf", "model.lr", -math.inf),
        ("--num-steps 1e5", "num_steps", 100_000),
        ("--num-steps 100_000", "num_steps", 100_000),
        ("--num_steps 8", "num_steps", 8),
        ("--sizes 2 3", "model.sizes", (2, 3)),
        ("--sizes -1e3 2 -3", "model.sizes", (-1000, 2, -3)),
        ("--width None", "model.width", None),
        ("--width=2", "model.width", 2),
        ("--zero 2", "zero", 2),
        ("--no-keep", "keep", False),
        ("--no-keep --keep", "keep", True),
        ("--no-asynchronous", "asynchronous", False),
        ("--num-steps 1 --num-steps 2", "num_steps", 2),
    ],
)
def test_what_people_type_is_understood(words: str, name: str, value: object) -> None:
    found: object = parse(words)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    assert found == value
    assert type(found) is type(value)


def test_options_keep_what_the_default_sets() -> None:
    default = Run(keep=False, asynchronous=True, model=Model(lr=0.5))
    found = parse("--keep --no-asynchronous --width 3", default=default)
    assert found == Run(model=Model(lr=0.5, width=3))


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


@pytest.mark.parametrize("words", [["--help"], ["view", "--help"], ["ls"], ["nothing"]])
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

"""What a person sees: large trees, directories of runs, names that match nothing, refusals."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.support.keys import select_keys
from holdfast.cli.support.steps import find_runs
from holdfast.errors import ConfigError
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast, at_step
from tests.format.making import make, sample_tensors, write

WEIGHT = {"$": "tensor", "k": "model.weight"}
NORM = {"$": "tensor", "k": "model.norm"}


def checkpoint(path: Path, parts: dict[str, Any], step: int = 7) -> Path:
    write(PosixStorage(path), at_step(make(sample_tensors(), parts=parts), step))
    return path


def tree(holdfast: Holdfast, path: Path, part: str) -> list[str]:
    result = holdfast("show", path, "--values", "--part", part)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line == part or line.startswith(f"{part}:"))
    return [line.rstrip() for line in lines[start:]]


def test_tensors_are_summed_up_in_the_tree_of_values(holdfast: Holdfast, tmp_path: Path) -> None:
    place = checkpoint(
        tmp_path / "run",
        {
            "model": {"weight": WEIGHT, "norm": NORM},
            "alone": [WEIGHT, {"deep": [NORM]}],
            "mixed": {"weight": WEIGHT, "step": 3, "moments": {"a": [WEIGHT, NORM]}},
            "ranks": {"$": "per_rank", "axes": ["dp"], "v": {"dp=0": {"here": NORM, "n": 1}}},
        },
    )
    assert tree(holdfast, place, "model") == ["model: 2 tensors, 158 B"]
    assert tree(holdfast, place, "alone") == ["alone: 2 tensors, 158 B"]
    assert tree(holdfast, place, "mixed") == [
        "mixed",
        "├── weight: tensor F32 5 x 7, stored as model.weight",
        "├── step: 3",
        "└── moments: 2 tensors, 158 B",
    ]
    assert tree(holdfast, place, "ranks")[1:] == [
        "└── dp=0: dict of 2",
        "    ├── here: tensor BF16 9, stored as model.norm",
        "    └── n: 1",
    ]


def test_many_values_never_flood_the_screen(holdfast: Holdfast, tmp_path: Path) -> None:
    place = checkpoint(
        tmp_path / "run",
        {
            "long": {"seen": list(range(5000)), "odd": [{"$": "float", "v": "nan"}] * 900},
            "rows": {"table": [[1, 2.5, 3]] * 4000, "cube": [[[1, 2]] * 3] * 2},
            "ragged": {"of": [[i] * (i % 3 + 1) for i in range(3000)]},
            "many": {f"name{i}": i for i in range(3000)},
            "tensors": {"n": 1} | {f"name{i}": WEIGHT for i in range(500)},
            "pairs": {"$": "dict", "v": [[i, {"x": i}] for i in range(3000)]},
            "model": {},
        },
    )
    first = ", ".join(map(str, range(20)))
    long = tree(holdfast, place, "long")
    assert long[1].startswith(f"├── seen: list of 5,000: [{first}, ")
    assert long[2].startswith("└── odd: list of 900: [nan, nan, ")
    assert all(line.endswith(", …]") for line in long[1:])
    rows = tree(holdfast, place, "rows")
    assert len(rows) == 3
    assert rows[1].startswith("├── table: numbers 4000 x 3: [[1, 2.5, 3]")
    assert rows[2].startswith("└── cube: numbers 2 x 3 x 2: ")
    for part in ("ragged", "many", "tensors", "pairs"):
        lines = tree(holdfast, place, part)
        assert len(lines) < 100, part
        assert "more" in lines[-1], part
        assert all(len(line) < 200 for line in lines)
    assert "… and 461 more, 461 tensors, 140 B in them" in tree(holdfast, place, "tensors")[-1]
    # A program gets everything.
    found = holdfast("show", place, "--values", "--json").json["values"]
    assert len(found["many"]) == 3000


def test_a_directory_of_runs_names_them(holdfast: Holdfast, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    checkpoint(runs / "a", {"model": {}}, step=0)
    checkpoint(runs / "b" / "ck", {"model": {}}, step=5)
    checkpoint(runs / "b" / "ck", {"model": {}}, step=120)
    (runs / "c").mkdir()
    (runs / "notes.txt").write_text("x")
    assert find_runs(runs) == [runs / "a", runs / "b" / "ck"]
    result = holdfast("ls", runs)
    assert result.code == 0
    assert "2 runs" in result.out
    rows = [line.split() for line in result.out.splitlines() if str(runs) in line][1:3]
    assert rows == [[str(runs / "a"), "1", "0"], [str(runs / "b" / "ck"), "2", "120"]]
    assert f"`holdfast ls {runs / 'a'}`" in result.out
    found = holdfast("ls", runs, "--json").json
    assert [run["latest"] for run in found["runs"]] == [0, 120]
    assert holdfast("ls", runs / "a", "--json").json["runs"] == []
    for words in (
        ["show", runs], ["verify", runs], ["diff", runs, runs], ["tag", runs], ["repair", runs],
        ["prune", runs, "--keep-last", "1"], ["export", runs, "--tensor", "*", "--to", "x"],
    ):  # fmt: skip
        result = holdfast(*words)
        assert result.code == 2, words
        assert f"name one of them ({runs / 'a'}, {runs / 'b' / 'ck'})" in result.err


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("embed", "; the pattern '*embed*' matches model.embed.weight and 1 more"),
        ("EMBED", "; the pattern '*embed*' matches model.embed.weight and 1 more"),
        ("head", "; the pattern '*head*' matches model.head.weight"),
        ("*.head", "; the pattern '*.head*' matches model.head.weight"),
        ("model.head.wieght", "; did you mean model.head.weight"),
        ("*embd*", "; did you mean '*embed*'?"),
        ("*xyzzy*", "; there are model.embed.weight, optimizer.embed.weight.exp_avg, "),
    ],
)
def test_a_name_that_matches_nothing_gets_a_hint(pattern: str, hint: str) -> None:
    keys = ["model.embed.weight", "optimizer.embed.weight.exp_avg", "model.head.weight"]
    with pytest.raises(ConfigError) as caught:
        select_keys(pattern, keys)
    assert hint in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        select_keys(pattern, [])
    assert str(caught.value) == f"no tensor matches {pattern!r}"


def test_hints_are_the_same_in_all_commands(holdfast: Holdfast, tmp_path: Path, root: Path) -> None:
    hint = "no tensor matches 'norm'; the pattern '*norm*' matches model.norm"
    for words in (
        ["show", root, "--tensor", "norm"],
        ["diff", root, root, "--tensor", "norm"],
        ["export", root, "--tensor", "norm", "--to", tmp_path / "x.safetensors"],
    ):
        result = holdfast(*words)
        assert (result.code, hint in result.err) == (2, True), result.err
    assert holdfast("show", root, "--tensor", "*norm*").code == 0


def test_what_may_not_be_read_is_one_line(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def forbidden(self: Path, **kwargs: Any) -> os.stat_result:
        if self == root:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return stat(self, **kwargs)

    monkeypatch.setattr(Path, "stat", forbidden)
    for verb in ("ls", "show", "verify", "tag", "repair"):
        result = holdfast(verb, root)
        assert result.code == 2
        assert result.err == f"holdfast: error: {root} cannot be examined: Permission denied\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_leave_the_exit_code(root: Path, closed: str) -> None:
    """As of a scheduler that gives none: 1 would say that what is stored is damaged."""
    line = f'"$0" -m holdfast prune "$1" --keep-last 1 --dry-run {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable, str(root)], check=False, timeout=240)
    assert done.returncode == 0


def test_an_answer_that_never_comes_removes_nothing(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", gone)
    for stream in ("sys.stdin.isatty", "sys.stdout.isatty"):
        monkeypatch.setattr(stream, lambda: True, raising=False)
    result = holdfast("prune", root, "--keep-last", "1")
    assert result.code == 0, result.err
    assert "nothing was removed" in result.out
    assert (root / "iter_0000005").is_dir()


def test_ctrl_c_is_a_word_and_130(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.commands.verify.verify_snapshot", interrupted)
    result = holdfast("verify", root)
    assert (result.code, result.err) == (130, "holdfast: interrupted\n")


def test_control_characters_in_names_never_reach_the_terminal(
    holdfast: Holdfast, tmp_path: Path, root: Path
) -> None:
    """T5."""
    result = holdfast("show", tmp_path / "a\x1b[31mb\udcff")
    assert result.code == 2
    assert "\x1b" not in result.err
    assert "a\\x1b[31mb\\udcff does not exist" in result.err
    runs = tmp_path / "runs\x1b[31m"
    shutil.copytree(root, runs / "run\x1b[31m")
    run, out = runs / "run\x1b[31m", tmp_path / "out\x1b[31m"
    words: list[list[object]] = [
        ["ls", runs], ["ls", run], ["show", run], ["verify", run], ["diff", run, run],
        ["tag", run], ["faults", run], ["repair", run, "--dry-run"], ["prune", run, "--after", "9"],
        ["copy", run, out / "copy"], ["copy", run, out / "copy"],
        ["export", run, "--tensor", "model.norm", "--to", out / "x.safetensors"],
        ["convert", run, out / "x.pt", "--to", "torch_save"],
        ["prune", run, "--keep-last", "1", "--dry-run"], ["verify", out / "x.pt"],
    ]  # fmt: skip
    for command in words:
        result = holdfast(*command)
        assert "\x1b" not in result.out + result.err, command

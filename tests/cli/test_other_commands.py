"""Commands of other distributions: found by their entry points, and only when they are needed."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import holdfast.cli.commands.ls  # noqa: F401 - before the path to it is gone
from holdfast.cli.main import VERBS, main

MODULE = """
def greet(words):
    print("hello", *words)
    if words == ["fail"]:
        raise RuntimeError("no such greeting")
    if words == ["import"]:
        import greetings_that_nobody_has.polite
    return 7
"""


ROOT = Path(__file__).parents[2]


def _without(option: str) -> set[str]:
    """Return the commands that lack this option."""
    modules = {verb: import_module(f"holdfast.cli.commands.{verb}") for verb in VERBS}
    return {
        verb
        for verb, module in modules.items()
        if option not in {field.name for field in dataclasses.fields(module.Args)}
    }


def test_the_documents_name_every_command_and_those_without_an_option() -> None:
    """Prevents a command that no page lists, and a script that counts on a missing `--json`."""
    readme, operations, guide = (
        (ROOT / page).read_text() for page in ("README.md", "docs/operations.md", "docs/guide.md")
    )
    block = readme.split("## The command\n")[1].split("```")[1]
    listed = set(re.findall(r"^holdfast (\w+)", block, re.MULTILINE))
    assert listed | set(re.findall(r"also: (\w+)", block)) == {*VERBS, "train"}

    def named(page: str, sentence: str) -> set[str]:
        (found,) = re.findall(sentence, page)
        return set(re.findall(r"`(\w+)`", found))

    assert named(readme, r"All but ([^.;]*) take `--json`") == _without("json") | {"train"}
    assert named(operations, r"all but ([^.;]*) take `--json`") == _without("json")
    assert named(operations, r"([^.;]*) have `--dry-run`") == set(VERBS) - _without("dry_run")
    offline = named(guide.replace("`holdfast ls`", "`ls`"), r"([^.]*) work in one process, without")
    assert offline == set(VERBS) - {"view"}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only directory where distributions are looked for; empty."""
    entry_points()  # what finding them needs is imported
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def install(site: Path, *, command: str) -> None:
    """Put a distribution there as an installer does: a module and its metadata."""
    (site / "greeting_of_a_test.py").write_text(MODULE)
    metadata = site / "greeting_of_a_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: greeting-of-a-test\nVersion: 1.0\nSummary: say hello\n"
    )
    (metadata / "entry_points.txt").write_text(
        f"[holdfast.commands]\n{command} = greeting_of_a_test:greet\n"
    )


def test_an_installed_command_gets_the_words_and_gives_the_exit_code(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, command="greet")
    assert main(["greet", "a", "--b"]) == 7
    assert capsys.readouterr().out == "hello a --b\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "  greet    say hello" in shown
    assert len([line for line in shown if line.startswith("  ")]) == len(VERBS) + 1


def test_a_program_that_fails_never_says_that_something_stored_is_damaged(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, command="greet")
    with pytest.raises(SystemExit, match="2"):
        main(["greet", "fail"])
    shown = capsys.readouterr().err
    assert "RuntimeError: no such greeting" in shown
    assert shown.splitlines()[-1].startswith("holdfast: error: ")
    assert main(["greet", "import"]) == 2
    assert capsys.readouterr().err == (
        "holdfast: error: this needs the package greetings_that_nobody_has, which is not "
        "installed: pip install greetings_that_nobody_has\n"
    )


def test_a_command_of_another_distribution_does_not_replace_ours(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, command="ls")
    assert main(["ls", str(site)]) == 0
    assert "hello" not in capsys.readouterr().out
    assert main(["--help"]) == 0
    assert "say hello" not in capsys.readouterr().out


def test_train_says_how_to_install_it(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "moe"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("holdfast: error: holdfast train: ")
    assert "pip install ./trainer" in line
    assert line.count("\n") == 1
    assert main(["--help"]) == 0
    assert "  train" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("trian", "did you mean 'train'?"),
        ("gret", "did you mean 'greet'?"),
        ("frobnicate", "there are ls, show, verify"),
    ],
)
def test_an_unknown_word_is_a_mistake(
    word: str, part: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, command="greet")
    assert main([word]) == 2
    assert part in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    helped = capsys.readouterr().out
    assert all(f"  {verb} " in helped for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("holdfast 0.")


def test_the_command_of_one_interpreter(tmp_path: Path) -> None:
    """Several environments have a script of one name; `python -m holdfast` says which is meant."""
    missing = [sys.executable, "-m", "holdfast", "show", str(tmp_path / "none")]
    done = subprocess.run(missing, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: error: ")


def test_our_own_commands_look_for_no_others(tmp_path: Path) -> None:
    """Reading the metadata of every installed distribution takes longer than `holdfast ls`."""
    code = (
        "import sys\n"
        "from holdfast.cli.main import main\n"
        f"main(['--version']); main(['ls', {str(tmp_path)!r}])\n"
        "sys.exit(bool({'importlib.metadata', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

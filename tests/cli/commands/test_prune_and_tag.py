"""`holdfast prune` and `holdfast tag` as a person and as a script use them."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.commands import ls
from holdfast.cli.page import history
from holdfast.cli.page.history import read_history
from holdfast.cli.page.run_events import RunLog
from holdfast.format.names import list_steps
from holdfast.format.versions import read_lease
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast, at_step
from tests.format.making import make, sample_tensors, write
from tests.retention.common import damage, fill, put, steps_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    storage = fill(tmp_path / "run", [10, 20, 30, 40])
    storage.make_dir(".saving-iter_0000050-ab")
    return storage.root


def steps(root: Path) -> list[int]:
    return steps_of(PosixStorage(root))


def test_prune_says_what_stays_and_goes_and_does_it(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("prune", root, "--keep-last", "1", "--keep-every", "20", "--yes")
    assert (result.code, result.err) == (0, "")
    rows = {line.split()[0]: line for line in result.out.splitlines() if line[:4].strip().isdigit()}
    assert "goes" in rows["10"]
    assert "20 B" in rows["10"]
    assert "stays" in rows["20"]
    assert "every 20 steps" in rows["20"]
    assert "the newest sound checkpoint; one of the last 1; every 20 steps" in rows["40"]
    assert "removed 2 checkpoints, 40 B" in result.out
    assert steps(root) == [20, 40]
    assert (root / ".saving-iter_0000050-ab").is_dir()


def test_a_dry_run_removes_nothing(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("prune", root, "--keep-last", "1", "--dry-run")
    assert result.code == 0
    assert "goes" in result.out
    assert "removed" not in result.out
    found = holdfast("prune", root, "--keep-last", "1", "--dry-run", "--json").json
    assert [item["step"] for item in found["remove"]] == [10, 20, 30]
    assert found["removed"] == []
    assert found["newest_sound"] == 40
    assert steps(root) == [10, 20, 30, 40]


def test_what_a_run_has_given_up_goes(holdfast: Holdfast, root: Path) -> None:
    """Steps above the one that a run went back to, tagged ones too; `latest` follows."""
    assert holdfast("tag", root, "40", "best").code == 0
    kept = holdfast("prune", root, "--after", "5", "--yes")
    assert (kept.code, steps(root)) == (0, [10, 20, 30, 40])  # nothing to go back to
    assert "no checkpoint up to step 5 proves sound" in kept.out
    result = holdfast("prune", root, "--after", "25", "--yes")
    rows = {line.split()[0]: line for line in result.out.splitlines() if line[:4].strip().isdigit()}
    assert "above step 25, though tagged best" in rows["40"]
    assert "the newest sound checkpoint; not above step 25" in rows["20"]
    assert "removed 2 checkpoints, 40 B" in result.out
    assert steps(root) == [10, 20]
    assert holdfast("tag", root, "--json").json["tags"] == {}  # it would name the next step 40
    assert holdfast("prune", root, "--after", "20", "--keep-last", "1", "--yes").code == 0
    assert steps(root) == [20]
    assert "--after is -1" in holdfast("prune", root, "--after", "-1").err


def test_without_a_person_to_ask_nothing_goes(holdfast: Holdfast, root: Path) -> None:
    for words, why in (((), "there is no terminal to ask on"), (("--json",), "--json does not")):
        result = holdfast("prune", root, "--keep-last", "1", *words)
        assert result.code == 2
        assert "--yes" in result.err
        assert f"3 checkpoints would be removed, but {why}" in result.err
    assert steps(root) == [10, 20, 30, 40]
    assert holdfast("prune", root, "--keep-last", "9").code == 0  # there is nothing to ask


@pytest.mark.parametrize(("answer", "left"), [("n", 4), ("", 4), ("yes", 1), ("Y", 1)])
def test_a_person_is_asked(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        return answer

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", reply)
    assert holdfast("prune", root, "--keep-last", "1").code == 0
    assert asked == ["remove 3 checkpoints, 60 B? [y/N] "]
    assert len(steps(root)) == left


def test_prune_by_metric_time_and_tag(holdfast: Holdfast, tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, 0.9)):
        put(storage, step, progress={"loss": loss})
    assert holdfast("tag", tmp_path, 1, "first").code == 0

    def kept(*words: str) -> list[str]:
        return list(holdfast("prune", tmp_path, *words, "--dry-run", "--json").json["keep"])

    assert kept("--keep-best", "progress.loss:min:2") == ["2", "3", "4"]
    assert kept("--keep-best", "progress.loss:max") == ["4"]
    assert kept("--keep-best", "progress.loss:min", "progress.loss:max:2") == ["1", "2", "4"]
    assert kept("--keep-tagged") == ["1", "4"]
    assert kept("--keep-within", "90s") == ["4"]
    assert kept("--keep-within", "9999w") == ["1", "2", "3", "4"]
    result = holdfast("prune", tmp_path, "--keep-last", "1", "--dry-run")
    assert "no policy keeps it, though tagged first" in result.out


def test_what_is_read_or_damaged_is_left_and_said(holdfast: Holdfast, root: Path) -> None:
    """O10: that a step is damaged is the exit code, also if all that was to go has gone."""
    damage(root, 40, "index")
    assert holdfast("prune", root, "--keep-last", "9", "--dry-run").code == 1
    assert holdfast("prune", root, "--after", "30", "--dry-run").code == 0  # the damaged one goes
    with read_lease(PosixStorage(root), "iter_0000010"):
        result = holdfast("prune", root, "--keep-last", "1", "--yes")
    assert result.code == 1
    assert "left alone" in result.out
    assert "damaged" in result.out
    assert "step 10 was left: being read by process" in result.out
    assert "removed 1 checkpoint, 20 B" in result.out
    assert steps(root) == [10, 30, 40]


def test_a_failure_is_said_and_is_no_damage(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O10."""
    remove = PosixStorage.remove_tree

    def fail(self: PosixStorage, path: str, **options: Any) -> None:
        if path == "iter_0000020":
            raise OSError("no permission")
        remove(self, path, **options)

    monkeypatch.setattr(PosixStorage, "remove_tree", fail)
    result = holdfast("prune", root, "--keep-last", "1", "--yes")
    assert result.code == 2
    assert "step 20 could not be removed: no permission" in result.out
    assert steps(root) == [20, 40]


def test_tags(holdfast: Holdfast, root: Path) -> None:
    assert "no tags" in holdfast("tag", root).out
    result = holdfast("tag", root, 20, "best")
    assert result.code == 0
    assert "best" in result.out
    assert holdfast("tag", root, 30, "v1.0", "--json").json["tags"] == {"best": 20, "v1.0": 30}
    assert holdfast("prune", root, "--keep-tagged", "--yes").code == 0
    assert steps(root) == [20, 30, 40]
    assert holdfast("tag", root, "--remove", "best", "--json").json["tags"] == {"v1.0": 30}
    assert holdfast("prune", root, "--keep-last", "1", "--yes").code == 0
    assert "not there any more" in holdfast("tag", root).out


def test_mistakes_are_one_line_and_code_2(holdfast: Holdfast, root: Path) -> None:
    cases: list[tuple[list[object], str]] = [
        (["prune", root], "say what to keep"),
        (["prune", root, "--keep-last", "0"], "--keep-last is 0"),
        (["prune", root, "--keep-within", "7 days"], "7d"),
        (["prune", root, "--keep-within", "0d"], "positive"),
        (["prune", root, "--keep-best", "loss"], "path:min:N"),
        (["prune", root, "--keep-best", "loss:least:1"], "path:min:N"),
        (["prune", root, "--keep-best", "loss:min:x"], "path:min:N"),
        (["prune", root / "nothing", "--keep-last", "1"], "does not exist"),
        (["prune", root / "iter_0000010", "--keep-last", "1"], "the directory that holds them"),
        (["tag", root / "iter_0000010"], "the directory that holds them"),
        (["tag", root, 20], "NAME"),
        (["tag", root, 77, "x"], "no committed step 77; it has 10, 20, 30, 40"),
        (["tag", root, 20, "a/b"], "must be 1 to 100"),
        (["tag", root, "--remove", "x"], "no tag 'x'"),
        (["tag", root, 20, "--remove", "x"], "by its name"),
    ]
    for words, text in cases:
        result = holdfast(*words)
        assert result.code == 2, words
        assert text in result.err, (words, result.err)
        assert result.err.count("\n") == 1
        assert result.out == ""
    assert steps(root) == [10, 20, 30, 40]


def test_a_step_that_is_not_there_hides_no_older_ones(holdfast: Holdfast, tmp_path: Path) -> None:
    """Of many steps a refusal names the newest; it read as if there were no others."""
    for step in range(1, 11):
        write(PosixStorage(tmp_path), at_step(make(sample_tensors()), step))
    result = holdfast("tag", tmp_path, 77, "x")
    assert result.code == 2
    assert "it has 3, 4, 5, 6, 7, 8, 9, 10, and 2 older ones" in result.err


def test_what_is_damaged_ends_every_command_with_its_code(
    holdfast: Holdfast, root: Path, tmp_path: Path
) -> None:
    """O10: by which a script calls for another copy. Of `faults` the code is about the run."""
    data = next((root / "iter_0000040/data").iterdir())
    data.write_bytes(data.read_bytes()[:-1] + b"\x77")
    (root / "iter_0000030/manifest.json").write_bytes(b"{}")
    assert holdfast("tag", root, "40", "best").code == 0
    (root / "tags/best").write_bytes(b"one\n")
    archive = tmp_path / "other.pt"
    archive.write_bytes(b"PK\x03\x04" + bytes(60))
    (root / "rerun").mkdir()
    (root / "rerun/report.jsonl").write_bytes(b"damaged\n{}\n")
    out, page = tmp_path / "out", tmp_path / "page.html"
    commands: list[list[object]] = [
        ["verify", archive], ["show", archive], ["convert", archive, out, "--to", "holdfast"],
        ["copy", root, out], ["show", root, "--step", "30"],
        ["view", root, "--step", "30", "--out", page],
        ["diff", root / "iter_0000040", root / "iter_0000030"],
        ["export", root, "--tensor", "*", "--to", tmp_path / "all.safetensors"],
        ["tag", root], ["prune", root, "--keep-last", "1", "--yes"], ["faults", root],
    ]  # fmt: skip
    for command in commands:
        result = holdfast(*command)
        assert result.code == (2 if command[0] == "faults" else 1), (command, result.err)
        assert result.err.count("\n") == 1, command
    assert not list(tmp_path.glob("out/iter_*"))
    assert steps(root) == [10, 20, 30, 40]


@pytest.mark.parametrize(("code", "ends_with"), [(errno.ETIMEDOUT, 2), (errno.EIO, 1)])
def test_a_read_that_says_nothing_of_the_bytes_is_no_damage(
    holdfast: Holdfast,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    ends_with: int,
) -> None:
    """O10, P27."""
    read = os.preadv

    def fail(fd: int, buffers: Any, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/data/" in path or "iter_0000010/manifest" in path:
            raise OSError(code, os.strerror(code))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    out = tmp_path / "out"
    for command in (["verify", root], ["export", root, "--tensor", "*", "--to", out / "x"]):
        assert holdfast(*command).code == ends_with, command
    state = {2: "unreadable", 1: "damaged"}[ends_with]
    listed = holdfast("ls", root)
    assert listed.code == ends_with
    assert [line.split()[:2] for line in listed.out.splitlines() if os.strerror(code) in line] == [
        ["10", state]
    ]
    assert {each.state for each in read_history(PosixStorage(root), RunLog()).steps} == {
        "kept", "not finished", state,
    }  # fmt: skip


def test_a_step_removed_during_a_list_is_no_damage(
    holdfast: Holdfast, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P27: a removal at the same time looks like one, and no program is told of damage."""
    steps_at_first, names = list_steps(PosixStorage(root)), PosixStorage(root).list("")
    monkeypatch.setattr(PosixStorage, "list", lambda self, path: names)
    for module in (ls, history):
        monkeypatch.setattr(module, "list_steps", lambda _: steps_at_first)
    PosixStorage(root).remove_tree("iter_0000010")
    result = holdfast("ls", root, "--json")
    assert (result.code, [each["step"] for each in result.json["steps"]]) == (0, [20, 30, 40])
    assert "iter_0000010" not in [each["name"] for each in result.json["uncommitted"]]
    steps = {each.step: each.state for each in read_history(PosixStorage(root), RunLog()).steps}
    assert (steps[10], steps[20]) == ("removed", "kept")


def test_the_verbs_never_import_torch(root: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from holdfast.cli.main import main\n"
        f"root = {str(root)!r}\n"
        f"to = {str(tmp_path / 'x.safetensors')!r}\n"
        "for words in (['diff', root, root], ['tag', root], ['export', root, '--tensor', 'w',\n"
        "              '--to', to], ['prune', root, '--keep-last', '1', '--yes']):\n"
        "    assert main(words) == 0, words\n"
        "heavy = {'torch', 'safetensors.torch', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr

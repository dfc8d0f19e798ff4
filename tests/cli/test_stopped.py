"""Commands that write and are stopped or killed: nothing is left, or the next one removes it.

Prevents that a stopped conversion of a terabyte fills a disk, and no command mentions it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.storage import PosixStorage
from holdfast.storage.unnamed import unnamed
from tests.cli.conftest import Holdfast

_SCRIPT = """
import os, signal, sys, time
from holdfast.cli.commands import export
from holdfast.cli.main import main
from holdfast.foreign import output
from holdfast.writer import copying

# Whoever runs the tests in the background, or by nohup, has these ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

def stop(*args, **kwargs):
    for _ in range(2):  # as timeout(1) does
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    time.sleep(60)

output._Copier.prove = export._copy = copying.annotate = stop
sys.exit(main(sys.argv[2:]))
"""


def stopped(by: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A command that gets a signal when it has written something."""
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, by, *map(str, words)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, list[object]]:
    """Commands that write to the folder `out`."""
    out = tmp_path / "out"
    out.mkdir()
    source = tmp_path / "x.safetensors"
    save_file({"weight": np.arange(9.0)}, source)
    return {
        "folder": ["convert", source, out / "hf", "--to", "huggingface"],
        "step": ["convert", source, out, "--to", "holdfast"],
        "file": ["export", source, "--tensor", "*", "--to", out / "all.safetensors"],
    }


def test_a_copy_that_was_stopped_is_continued(
    commands: dict[str, list[object]], tmp_path: Path, holdfast: Holdfast
) -> None:
    assert holdfast(*commands["step"]).code == 0
    words = ["copy", tmp_path / "out", tmp_path / "copy"]
    done = stopped("SIGTERM", *words)
    assert done.returncode == 128 + 15
    assert "the same command continues there, and `holdfast repair` removes it\n" in done.stderr
    leases, left = names(tmp_path / "copy")
    assert not names(tmp_path / "copy" / leases)
    os.utime(tmp_path / "copy" / left, (0, 0))  # not of the last half second
    done = holdfast(*words)
    assert (done.code, done.err) == (0, "")
    assert "0 B of it now: an earlier copy was continued" in done.out


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "by"), [("folder", "SIGTERM"), ("step", "SIGHUP"), ("file", "SIGINT")]
)
def test_a_signal_leaves_nothing(
    kind: str, by: str, commands: dict[str, list[object]], tmp_path: Path
) -> None:
    done = stopped(by, *commands[kind])
    code, word = (130, "interrupted") if by == "SIGINT" else (128 + 15, f"stopped by {by}")
    assert done.returncode == (129 if by == "SIGHUP" else code)
    assert done.stderr == f"holdfast: {word}\n"
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_a_killed_command_left_is_removed_by_the_next(
    kind: str, commands: dict[str, list[object]], tmp_path: Path, holdfast: Holdfast
) -> None:
    assert stopped("SIGKILL", *commands[kind]).returncode == -9
    (left,) = names(tmp_path / "out")
    os.utime(tmp_path / "out" / left, (0, 0))  # not of the last half second
    target = "hf" if kind == "folder" else "all.safetensors"
    with unnamed(PosixStorage(tmp_path / "out"), target, is_dir=True):  # a process is at work
        done = holdfast(*commands[kind])
        assert done.code == 0, done.err
        assert f"{left} was left by a command that was killed, and is removed\n" in done.err
        assert done.err.count("\n") == 1
        assert len(names(tmp_path / "out")) == 2
        (tmp_path / "out" / target).rename(tmp_path / "first")
    assert names(tmp_path / "out") == [target]


def test_repair_leaves_a_conversion_at_work_alone(
    commands: dict[str, list[object]], tmp_path: Path, holdfast: Holdfast
) -> None:
    """However long ago it began: only its lock says that it is alive."""
    out = tmp_path / "out"
    with unnamed(PosixStorage(out), "other", is_dir=True) as path:
        os.utime(out / path, (0, 0))
        result = holdfast("repair", out)
        assert "a process has it locked" in result.out
        assert (out / path).is_dir()
    assert stopped("SIGKILL", *commands["step"]).returncode == -9
    (left,) = [name for name in names(out) if name.startswith(".tmp-")]
    os.utime(out / left, (0, 0))
    assert "it never got its name" in holdfast("repair", out).out
    assert left not in names(out)

"""`holdfast train` as a person uses it: real processes, real files, one line for a mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_trainer.command import main
from holdfast_trainer.train.launch_environment import LaunchEnvironment
from trainer.tests.launches import SMALL, TORCHRUN, TRAIN, environment, run, run_on_ranks

pytestmark = pytest.mark.usefixtures("unlaunched")


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake gets, from this process."""
    assert main(words) == 2
    result = capsys.readouterr()
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("holdfast: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "result"),
    [
        ("--nproc 4 --tp 3", "4 ranks cannot be divided by"),
        ("--nproc 4 --tp 2 --dp 4", "world_size is 4"),
        ("--nproc 4 --order tp-xx-dp", "xx"),
        ("--nproc 4 --pp 4 --num-layers 3", "--pp"),
        ("--nproc 2 --data nothing", "--data nothing: no such file or directory"),
        ("--nproc 2 --load nothing", "--load nothing: no such directory"),
        ("--load .", "not a checkpoint directory"),
        ("--load empty --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint"),
        ("--save text/below", "--save text/below: cannot be written"),
        ("nothing.toml", "nothing.toml"),
        ("--tpp 2", "--tp"),
        ("--keep-every 10", "--keep-last"),
        ("--keep-last -1", "--keep-last is -1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: str, result: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert result in refusal(words.split(), capsys)


def test_half_of_a_launchers_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE" in refusal([], capsys)


def test_nproc_under_another_launcher_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave --nproc out" in refusal(["--nproc", "2"], capsys)
    # The other ranks of the machine leave the line to the first.
    monkeypatch.setenv("RANK", "1")
    assert main(["--nproc", "2"]) == 2
    assert capsys.readouterr().err == ""


def test_a_launchers_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LaunchEnvironment.from_environment() == LaunchEnvironment()
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    environment = LaunchEnvironment.from_environment()
    assert (environment.rank, environment.world_size, environment.local_rank) == (5, 8, 1)
    assert environment.is_launched
    assert not environment.is_ours
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "holdfast-1234")
    assert LaunchEnvironment.from_environment().is_ours


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    helped = capsys.readouterr().out
    assert "--exit-on-missing-checkpoint" in helped
    assert "Tensor axis: ranks that share each layer's matrices." in helped


def test_answers_that_need_no_torch_do_not_import_it() -> None:
    code = (
        "import sys, holdfast_trainer.command as m\n"
        "m.main(['--nproc', '4', '--tp', '3'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def steps_of(path: Path) -> dict[int, float]:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}


@pytest.mark.slow
def test_train_save_and_resume_by_itself_and_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--data", "text", "--save", "ck", "--save-interval", "2"]
    first = run([*words, "--nproc", "2", "--tp", "2", "--steps", "3", "--jsonl", "a.jsonl"])
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert "step 3/3  loss" in first.stdout
    assert "saved step 2" in first.stdout
    assert "saved step 3" in first.stdout
    second = run([*words, "--steps", "5", "--load", "ck", "--jsonl", "a.jsonl"], launcher=TORCHRUN)
    assert second.returncode == 0, second.stderr
    assert "loaded step 3 from ck" in second.stdout
    assert "the schedule continues as the checkpoint's: decay_steps 3 (not 5)" in second.stdout
    words = [*SMALL, "--data", "text", "--decay-steps", "3"]
    assert main([*words, "--steps", "5", "--jsonl", "b.jsonl"]) == 0, capsys.readouterr()
    ours, theirs = steps_of(tmp_path / "a.jsonl"), steps_of(tmp_path / "b.jsonl")
    assert list(ours) == list(theirs) == [1, 2, 3, 4, 5]
    assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-5


@pytest.mark.slow
def test_a_failure_inside_of_the_processes_is_one_line_too(tmp_path: Path) -> None:
    words = [*SMALL, "--data", "text"]
    saved = run_on_ranks(2, [*words, "--steps", "2", "--save", "ck"], directory=tmp_path)
    assert saved.codes == [0, 0]
    other = run([*words, "--nproc", "2", "--steps", "4", "--load", "ck", "--num-layers", "2"])
    assert other.returncode == 2
    assert other.stderr.count("\n") == 1
    assert other.stderr.startswith("holdfast: error: ")
    assert "model.blocks.1." in other.stderr
    (data,) = (tmp_path / "ck" / "iter_0000002" / "data").glob("00000*")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    broken = run_on_ranks(2, [*words, "--steps", "4", "--load", "ck"], directory=tmp_path)
    assert broken.codes == [2, 2]
    assert broken.printed.count("holdfast: error: ") == 1
    assert "00000.safetensors" in broken.printed.splitlines()[-1]
    assert "Traceback" not in broken.printed


def lines(path: Path) -> Iterator[dict[str, object]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_a_line(tmp_path: Path) -> None:
    words = [*SMALL, "--data", "text", "--nproc", "2", "--steps", "100000"]
    parent = subprocess.Popen(
        [*TRAIN, *words, "--jsonl", "a.jsonl"],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not list(lines(tmp_path / "a.jsonl")):
            time.sleep(0.1)
        listed = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        workers = [int(pid) for pid in listed if b"RANK=1\0" in environment_of(int(pid))]
        os.kill(workers[0], signal.SIGKILL)
        _, result = parent.communicate(timeout=240)
    finally:
        parent.kill()
    assert parent.returncode == 1
    assert result.splitlines() == ["holdfast: error: rank 1 was killed by SIGKILL"]
    assert not [pid for pid in listed if Path(f"/proc/{pid}/status").exists()]


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_asynchronous_saves_with_retention_go_on_like_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint of an asynchronous run is that of a synchronous one, byte for byte."""
    for name, extra in (("sync", []), ("async", ["--async-save"])):
        words = [*SMALL, "--data", "text", "--steps", "6", "--save-interval", "1"]
        assert main([*words, "--save", name, "--keep-last", "2", *extra]) == 0
        assert "saved step 6" in capsys.readouterr().out
    for name in ("sync", "async"):
        assert [p.name for p in sorted((tmp_path / name).glob("iter_*"))] == [
            "iter_0000005",
            "iter_0000006",
        ]
    for file in ("data/00000.safetensors", "index.safetensors"):
        one = (tmp_path / "sync" / "iter_0000006" / file).read_bytes()
        assert one == (tmp_path / "async" / "iter_0000006" / file).read_bytes()

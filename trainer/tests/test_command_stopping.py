"""A run that is asked to stop, loses its reader, or finds its newest checkpoint damaged."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from holdfast import Moment, SavePolicy
from holdfast.cli.main import main as holdfast
from holdfast.format.names import list_steps
from holdfast.format.verifier import verify_snapshot
from holdfast.parallel import ProcessGroups
from holdfast.storage import PosixStorage
from holdfast_trainer.command import main, parse
from holdfast_trainer.train.config import LogConfig
from holdfast_trainer.train.data import read_corpus
from holdfast_trainer.train.loop import Trainer
from holdfast_trainer.train.metrics import Reporter
from holdfast_trainer.train.stopping import StopDir
from tests.harness import RankContext, run_ranks, wait_until
from trainer.tests.launches import SMALL, TORCHRUN, TRAIN, environment

pytestmark = pytest.mark.usefixtures("unlaunched")

ENDLESS = [*SMALL, "--data", "text", "--steps", "1000000", "--log-interval", "10"]


class StopsAfter(SavePolicy):
    """Asks for a stop, on this rank, once it has been looked at so often."""

    decided_by = "any rank"
    stop = True

    def __init__(self, num_looks: int, number: int) -> None:
        self._left, self._number = num_looks, number

    def __repr__(self) -> str:
        return "StopsAfter()"

    def vote(self, moment: Moment) -> int:
        self._left -= 1
        return self._number if self._left < 0 else 0


def stopped_rank(rank: RankContext, directory: str, words: tuple[str, ...]) -> tuple[int, int]:
    """Only the last rank is asked; what all of them answer, and the step they ended at."""
    config = parse([*SMALL, "--steps", "50", "--save-interval", "3", *words])
    with ProcessGroups.create(config.check(world_size=2)) as groups:
        number = signal.SIGTERM if rank.rank == 1 else 0
        trainer = Trainer(
            config,
            groups=groups,
            corpus=read_corpus([Path(directory) / "text"]),
            stop=StopsAfter(4, number),
        )
        with trainer:
            return trainer.run(), trainer.progress.step


@pytest.mark.parametrize(
    "extra",
    [pytest.param((), marks=pytest.mark.slow), ("--async-save", "--lazy-staging", "--tp", "2")],
)
def test_one_rank_that_is_asked_stops_all_at_one_saved_step(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    words = ("--save", str(tmp_path / "ck"), *extra)
    answers = run_ranks(2, stopped_rank, str(tmp_path), words).results
    assert answers == [(signal.SIGTERM, 4)] * 2
    store = PosixStorage(tmp_path / "ck")
    assert list_steps(store) == [3, 4]
    assert verify_snapshot(store, "iter_0000004") == []


@pytest.mark.parametrize("is_sent_first", [False, True])
def test_a_launchers_signal_reaches_a_process_once_however_early(
    tmp_path: Path, is_sent_first: bool
) -> None:
    """A second one would end it at once."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        if is_sent_first:
            StopDir(tmp_path).send(signal.SIGUSR1)
        with StopDir(tmp_path).enlisted():
            assert seen == [signal.SIGUSR1] * is_sent_first
            StopDir(tmp_path).send(signal.SIGUSR1)
            StopDir(tmp_path).send(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_stop_saves_once_and_not_before_anything_was_trained(tmp_path: Path) -> None:
    words = [*SMALL, "--steps", "50", "--save-interval", "3", "--save", "ck"]
    corpus = read_corpus([tmp_path / "text"])
    with ProcessGroups.single() as groups:
        for looks, extra, steps in ((0, [], []), (3, [], [3]), (0, ["--load", "ck"], [3])):
            config = parse([*words, *extra])
            config.check(world_size=1)
            stop = StopsAfter(looks, signal.SIGINT)
            with Trainer(config, groups=groups, corpus=corpus, stop=stop) as trainer:
                assert trainer.run() == signal.SIGINT
            saved = list_steps(PosixStorage(tmp_path / "ck")) if (tmp_path / "ck").exists() else []
            assert saved == steps


def test_saved_is_printed_when_it_is_committed_and_soon_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line, the step is on disk; and the line does not wait for the next save."""
    seen: list[tuple[int, list[int]]] = []
    config = parse(
        [*SMALL, "--steps", "30", "--save-interval", "20", "--save", "ck", "--async-save"]
    )
    config.check(world_size=1)

    class Watching(Reporter):
        def note(self, text: str, *, style: str = "") -> None:
            if text.startswith("saved step"):
                seen.append((trainer.progress.step, list_steps(PosixStorage(tmp_path / "ck"))))

    def until_committed(metrics: object) -> None:
        if trainer.progress.step >= 22:
            wait_until(lambda: trainer._pending is None or trainer._pending[0].done())

    reporter = Watching(LogConfig(log_interval=1000), num_steps=30)
    monkeypatch.setattr(reporter, "step", until_committed)
    with (
        ProcessGroups.single() as groups,
        Trainer(
            config, groups=groups, corpus=read_corpus([tmp_path / "text"]), reporter=reporter
        ) as trainer,
    ):
        trainer.save()  # with the start of the writer, which is not the fault of later saves
        trainer._finish_save()
        trainer.run()
    assert [steps for _, steps in seen] == [[0], [0, 20], [0, 20, 30]]
    assert 20 <= seen[1][0] < 30


def start(words: Sequence[str], *, launcher: Sequence[str] = TRAIN) -> subprocess.Popen[str]:
    """A run that has printed its first step."""
    process = subprocess.Popen(
        [*launcher, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "loss" in line:
            break
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def terminated(
    context: RankContext, directory: str, words: list[str], at: str = "loss"
) -> tuple[int, str]:
    """Be sent SIGTERM with the first step that is printed; the exit code, and what was printed.

    Or with the first line that has the word `at`.
    """
    del context
    os.chdir(directory)

    class Signalling(io.StringIO):
        def write(self, text: str) -> int:
            if at in text and at not in self.getvalue():
                os.kill(os.getpid(), signal.SIGTERM)
            return super().write(text)

    with redirect_stdout(Signalling()) as out:
        code = main(words)
    return code, out.getvalue()


@pytest.mark.parametrize(
    ("words", "saved"),
    [
        (["--save", "ck"], "there was nothing to save yet"),
        ([], "nothing of it is saved; --save DIR does"),
    ],
)
def test_sigterm_before_the_first_step(tmp_path: Path, words: list[str], saved: str) -> None:
    """A run with --save was told to add it."""
    run = ([*ENDLESS, *words], "parameters on")
    outcome = run_ranks(1, terminated, str(tmp_path), *run, init=False, env=environment())
    assert outcome.results[0][0] == 128 + signal.SIGTERM
    assert f"holdfast: stopped by SIGTERM after step 0: {saved}" in outcome.outputs[0].splitlines()


def test_sigterm_saves_and_says_what_is_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ENDLESS, "--save", "ck", "--save-interval", "100000", "--async-save"]
    outcome = run_ranks(1, terminated, str(tmp_path), words, init=False, env=environment())
    ((code, out),), (err,) = outcome.results, outcome.outputs
    assert code == 128 + signal.SIGTERM, err
    (step,) = list_steps(PosixStorage(tmp_path / "ck"))
    assert f"saved step {step}: " in out
    assert err.splitlines() == [
        "holdfast: SIGTERM: stopping after this step; once more leaves at once",
        f"holdfast: stopped by SIGTERM after step {step}: step {step} is safe in ck; "
        f"--load ck continues from it",
    ]
    assert main([*ENDLESS[:-4], "--steps", str(step + 1), "--load", "ck"]) == 0
    assert f"loaded step {step} from ck" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_leaves_stops_the_run_at_a_saved_step(tmp_path: Path) -> None:
    process = start([*ENDLESS, "--save", "ck", "--save-interval", "100000"])
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(60) == 128 + signal.SIGPIPE, err
    (step,) = list_steps(PosixStorage(tmp_path / "ck"))
    assert f"stopped by SIGPIPE after step {step}: step {step} is safe in ck" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_our_launcher_stops_all_ranks_at_a_saved_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = start([*ENDLESS, "--nproc", "2", "--save", "ck", "--save-interval", "100000"])
    process.send_signal(number)
    code, _, err = end(process)
    assert code == 128 + number, err
    (step,) = list_steps(PosixStorage(tmp_path / "ck"))
    assert f"stopped by {number.name} after step {step}: step {step} is safe in ck" in err
    assert err.count("\n") == 2


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    process = start([*ENDLESS, "--nproc", "2", "--save", "ck", "--save-interval", "3"])
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in listed if b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(workers) == 2
    # A rank that stands still keeps all of them from the next step boundary.
    os.kill(int(workers[1]), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "once more leaves at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == 128 + signal.SIGINT, err
    newest = list_steps(PosixStorage(tmp_path / "ck"))[-1]
    assert f"left at once by SIGINT: step {newest} is safe in ck" in err.splitlines()[-1]
    assert not [pid for pid in workers if Path(f"/proc/{pid}/status").exists()]


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """They stop as for SIGTERM, without the store that was the launcher's."""
    process = start([*ENDLESS, "--nproc", "2", "--save", "ck", "--save-interval", "100000"])
    process.kill()
    assert process.stderr is not None
    err = process.stderr.read()  # ends with the last process that has it
    (step,) = list_steps(PosixStorage(tmp_path / "ck"))
    assert verify_snapshot(PosixStorage(tmp_path / "ck"), f"iter_{step:07d}") == []
    assert f"stopped by SIGTERM after step {step}: step {step} is safe in ck" in err


@pytest.mark.slow
def test_sigterm_under_torchrun(tmp_path: Path) -> None:
    process = start(
        [*ENDLESS, "--save", "ck", "--save-interval", "100000", "--async-save"], launcher=TORCHRUN
    )
    process.send_signal(signal.SIGTERM)
    _, out, err = end(process)
    (step,) = list_steps(PosixStorage(tmp_path / "ck"))
    assert f"saved step {step}: " in out
    assert f"stopped by SIGTERM after step {step}: step {step} is safe in ck" in err


def damage(directory: Path) -> None:
    (data,) = (directory / "data").glob("00000*")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)


def test_fallback_goes_back_trains_on_and_saves_over_what_was_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--data", "text", "--save-interval", "2"]
    assert main([*words, "--save", "whole", "--steps", "6"]) == 0
    assert main([*words, "--save", "ck", "--steps", "4", "--decay-steps", "6"]) == 0
    damage(tmp_path / "ck" / "iter_0000004")
    go_on = [*words, "--save", "ck", "--load", "ck", "--steps", "6"]
    capsys.readouterr()
    assert main(go_on) == 2
    assert main([*go_on, "--max-fallbacks", "1"]) == 0
    result = " ".join(capsys.readouterr().out.split())
    assert "step 4 is damaged (tensor " in result
    assert "was given up loaded step 2 from ck" in result
    store = PosixStorage(tmp_path / "ck")
    assert list_steps(store) == [2, 4, 6]
    for name in ("iter_0000004", "iter_0000006"):
        assert verify_snapshot(store, name) == []
        assert holdfast(["diff", f"ck/{name}", f"whole/{name}"]) == 0


def test_fallback_does_not_run_into_steps_of_another_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--data", "text", "--save-interval", "2", "--steps", "4"]
    for name in ("from", "to"):
        assert main([*words, "--save", name]) == 0
    damage(tmp_path / "from" / "iter_0000004")
    capsys.readouterr()
    assert (
        main([*words, "--load", "from", "--save", "to", "--max-fallbacks", "1", "--steps", "6"])
        == 2
    )
    assert "--save to already holds step 4" in capsys.readouterr().err.splitlines()[-1]
    assert main([*words, "--load", "from", "--load-step", "4", "--max-fallbacks", "1"]) == 2
    assert "--max-fallbacks with --load-step 4" in capsys.readouterr().err
    assert main([*words, "--max-fallbacks", "1"]) == 2
    assert "--max-fallbacks has no meaning without --load" in capsys.readouterr().err


def test_what_a_run_does_not_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--data", "text", "--steps", "2"]
    assert main(words) == 0
    assert "nothing of this run is saved: --save DIR does" in capsys.readouterr().out
    assert main([*words, "--save", "ck"]) == 0
    assert "nothing of this run" not in capsys.readouterr().out
    assert main([*words, "--save", "ck", "--load", "ck"]) == 0
    assert "step 2 of 2: nothing is left to train" in capsys.readouterr().out
    assert main([*words, "--save", "ck", "--lazy-staging"]) == 2
    assert "--lazy-staging has no meaning without --async-save" in capsys.readouterr().err
    for flag in (
        "--async-save",
        "--keep-image-s=9",
        "--keep-last=2",
        "--no-save-optim",
        "--no-save-rng",
    ):
        assert main([*words, flag]) == 2
        assert "has no meaning without --save" in capsys.readouterr().err

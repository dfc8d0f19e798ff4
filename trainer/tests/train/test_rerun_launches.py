"""Faults over real launches: exit codes of our own launcher and of torchrun, another layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.format.names import list_steps
from holdfast.rerun import read_report
from holdfast.storage import PosixStorage
from trainer.tests.launches import TORCHRUN, run, run_on_ranks
from trainer.tests.train.test_rerun import (
    AT,
    DROPOUT,
    STEPS,
    VALIDATE,
    injection,
    points_of,
    stored,
)
from trainer.tests.train.test_resume import workplace

__all__ = ["workplace"]

SMALL = (
    "--num-layers 1 --model-dim 16 --num-heads 2 --seq-len 16 --global-batch-size 4 --data text "
    f"--device cpu --steps {STEPS} --save-interval 1 {DROPOUT} --deterministic"
)

pytestmark = pytest.mark.slow


def bad_loss(kind: str) -> tuple[str, str]:
    """Seed and flags for a bad loss at step `AT` on rank 1 of two data ranks."""
    points = points_of(2, "dp")
    return injection(kind, points, hits=points[2 * AT - 1])


def words_of(*texts: str) -> list[str]:
    return [word for text in (SMALL, *texts) for word in text.split()]


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def exit_codes(text: str) -> list[int]:
    """Those of the processes that torchrun lists."""
    return [int(code) for code in re.findall(r"^ +exitcode +: (-?\d+)", text, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    ("kind", "devices", "codes", "how"),
    [
        ("transient_error", "aa", [17, 0], "--async-save"),
        ("persistent_error", "abb", [16, 18, 0], "--async-save"),
        ("correct_result", "abb", [16, 19, 0], ""),
    ],
)
def test_every_verdict_is_an_exit_code_and_training_goes_on_bitwise(
    workplace: Path, kind: str, devices: str, codes: list[int], how: str
) -> None:
    """One code comes out of our launcher, which hands on any; the others need no launcher."""
    seed, flags = bad_loss(kind)
    good = words_of(seed, "--save good")
    assert run_on_ranks(2, good, directory=workplace, HOLDFAST_DEVICE="a").codes == [0, 0]
    words = words_of(seed, flags, how, "--save ck --load ck")
    for device, code in zip(devices, codes, strict=True):
        if code != 18:
            ended = run_on_ranks(2, words, directory=workplace, HOLDFAST_DEVICE=device)
            assert ended.codes == [code, code], ended.printed
            continue
        launched = run(["--nproc", "2", *words], directory=workplace, HOLDFAST_DEVICE=device)
        assert launched.returncode == code, launched.stdout + launched.stderr
        assert len(lines_with(launched.stderr, f"holdfast: exit code {code}: ")) == 1
        assert "Traceback" not in launched.stderr
    assert stored(workplace / "ck", STEPS) == stored(workplace / "good", STEPS)
    assert list_steps(PosixStorage(workplace / "ck")) == list(range(1, STEPS + 1))
    verdicts = [each for each in read_report(workplace / "ck/rerun") if each["event"] == "verdict"]
    assert [(each["verdict"], each["step"]) for each in verdicts] == [(kind, AT)]


def test_under_torchrun_every_process_ends_with_the_code(workplace: Path) -> None:
    words = words_of(*bad_loss("persistent_error"), "--save ck")
    ended = run(words, launcher=TORCHRUN, directory=workplace, HOLDFAST_DEVICE="a")
    assert exit_codes(ended.stderr) == [16, 16], ended.stderr
    assert len(lines_with(ended.stderr, "holdfast: exit code 16: ")) == 1


def test_another_layout_drops_the_fault_with_one_message_and_goes_on(workplace: Path) -> None:
    seed, flags = bad_loss("persistent_error")
    words = words_of(seed, flags, "--save ck")
    assert run_on_ranks(2, words, directory=workplace, HOLDFAST_DEVICE="a").codes == [16, 16]
    words = words_of(seed, VALIDATE, "--save ck --load ck")
    ended = run_on_ranks(1, words, directory=workplace, HOLDFAST_DEVICE="a")
    assert ended.codes == [0], ended.printed
    assert len(lines_with(ended.printed, "under another layout")) == 1
    assert list_steps(PosixStorage(workplace / "ck"))[-1] == STEPS


def test_the_good_checkpoint_is_there_when_the_fault_save_dies(workplace: Path) -> None:
    """Both are of one step; the fault's own directory is not committed yet."""
    seed, flags = bad_loss("correct_result")
    words = words_of(seed, flags, "--save ck")
    assert run_on_ranks(2, words, directory=workplace, HOLDFAST_DEVICE="a").codes == [16, 16]
    faults = workplace / "ck/rerun/checkpoints"
    (faults / f"iter_{AT - 1:07d}").rename(faults / f".saving-iter_{AT - 1:07d}-abc")
    words = words_of(seed, "--save ck --load ck")
    ended = run_on_ranks(2, words, directory=workplace, HOLDFAST_DEVICE="a")
    assert ended.codes == [0, 0], ended.printed
    assert f"loaded step {AT - 1} from ck" in ended.printed

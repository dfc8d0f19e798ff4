"""The trainer as it is installed: `holdfast train` is there where its distribution is."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
TRAINER = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which the trainer's wheel is installed, and imported before any other copy."""
    pytest.importorskip("hatchling")
    made, site = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("site")
    program = f"from hatchling.build import build_wheel; build_wheel({str(made)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=TRAINER, check=True, timeout=240)
    (wheel,) = made.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    path = os.pathsep.join([str(site), str(TRAINER.parent)])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    return {k: v for k, v in os.environ.items() if k not in names} | {"PYTHONPATH": path}


def test_holdfast_train_is_the_trainer(environment: dict[str, str], tmp_path: Path) -> None:
    words = [*HOLDFAST, "train", "--nproc", "4", "--tp", "3"]
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "4 ranks cannot be divided by" in done.stderr
    helped = subprocess.run(
        [*HOLDFAST, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert "  train    train the reference model" in helped.stdout

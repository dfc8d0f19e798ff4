"""The programs of docs/rerun.md."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.errors import DriftError
from holdfast.format.names import list_steps
from holdfast.rerun import State
from holdfast.storage import PosixStorage

PAGE = Path(__file__).parent.parent / "docs" / "rerun.md"


def on_device(step: int, loss: float) -> float:
    """What a device computes that is broken at one step."""
    return math.nan if (step, os.environ["HOLDFAST_DEVICE"]) == (13, "A") else loss


def run(program: str) -> dict[str, Any]:
    """What a start of a program leaves; `code` is how it ended."""
    names: dict[str, Any] = {"__name__": "program", "code": 0, "on_device": on_device}
    try:
        exec(compile(program, str(PAGE), "exec"), names)
    except SystemExit as ended:
        names["code"] = ended.code
    return names


def test_the_programs_run_and_a_fault_is_judged_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are printed, and with a NaN in the data, and one of a device."""
    program, _, guarded_save = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    bad = program.replace("float(n))", "float('nan') if n == 13 else float(n))")
    assert bad != program

    def start(directory: str, device: str, text: str) -> dict[str, Any]:
        (tmp_path / directory).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / directory)
        monkeypatch.setenv("HOLDFAST_DEVICE", device)
        return run(text)

    plain = start("plain", "A", program)
    assert (plain["code"], plain["step"]) == (0, 19)
    with Checkpointer(tmp_path / "compared", check_replicas_every=1) as checkpointer:
        names = plain | {"checkpointer": checkpointer, "DriftError": DriftError}
        exec(compile(guarded_save, str(PAGE), "exec"), names)
        assert checkpointer.steps() == [19]

    first = start("everywhere", "A", bad)
    assert (first["code"], first["progress"]) == (16, {"step": 13})
    assert first["machine"].state is State.WILL_RERUN_FROM_CHECKPOINT
    faults = PosixStorage(tmp_path / "everywhere" / "checkpoints" / "rerun" / "checkpoints")
    assert list_steps(faults) == [13]
    assert start("everywhere", "B", bad)["code"] == 19

    faulty = program.replace('"loss", loss.item()', '"loss", on_device(step, loss.item())')
    assert faulty != program
    codes = [start("device", device, faulty)["code"] for device in "ABB"]
    assert codes == [16, 18, 0]
    checkpoint = tmp_path / "device" / "checkpoints"
    assert list_steps(PosixStorage(checkpoint)) == [10, 20]
    again = start("device", "B", program)
    for name, value in plain["model"].state_dict().items():
        assert torch.equal(again["model"].state_dict()[name], value)

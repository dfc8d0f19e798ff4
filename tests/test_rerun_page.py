"""The program of docs/rerun.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.format.names import list_steps
from holdfast.rerun import State
from holdfast.storage import PosixStorage

PAGE = Path(__file__).parent.parent / "docs" / "rerun.md"


def test_the_program_runs_and_its_fault_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is printed, and with a data set whose eleventh batch gives NaN."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(program, str(PAGE), "exec"), names)
    assert names["step"] == 19
    assert names["machine"].decision.exit_code is None  # type: ignore[attr-defined]
    bad = program.replace("float(i)", "float('nan') if i == 10 else float(i)")
    assert bad != program
    with pytest.raises(SystemExit) as ended:
        exec(compile(bad, str(PAGE), "exec"), names)
    assert ended.value.code == 16
    assert names["machine"].state is State.WILL_RERUN_FROM_CHECKPOINT  # type: ignore[attr-defined]
    faults = PosixStorage(tmp_path / "checkpoints" / "rerun" / "checkpoints")
    assert list_steps(faults) == [10]

"""The programs of docs/rerun.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import Checkpointer
from holdfast.errors import DriftError
from holdfast.format.names import list_steps
from holdfast.rerun import State
from holdfast.storage import PosixStorage

PAGE = Path(__file__).parent.parent / "docs" / "rerun.md"


def test_the_programs_run_and_a_fault_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are printed, and with a data set whose eleventh batch gives NaN."""
    program, guarded_save = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(program, str(PAGE), "exec"), names)
    assert names["step"] == 19
    assert names["machine"].decision.exit_code is None  # type: ignore[attr-defined]
    with Checkpointer(tmp_path / "compared", check_replicas_every=1) as checkpointer:
        names |= {"checkpointer": checkpointer, "DriftError": DriftError}
        exec(compile(guarded_save, str(PAGE), "exec"), names)
        assert checkpointer.steps() == [19]
    bad = program.replace("float(i)", "float('nan') if i == 10 else float(i)")
    assert bad != program
    with pytest.raises(SystemExit) as ended:
        exec(compile(bad, str(PAGE), "exec"), names)
    assert ended.value.code == 16
    assert names["machine"].state is State.WILL_RERUN_FROM_CHECKPOINT  # type: ignore[attr-defined]
    faults = PosixStorage(tmp_path / "checkpoints" / "rerun" / "checkpoints")
    assert list_steps(faults) == [10]

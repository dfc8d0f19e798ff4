"""The program and the picture of docs/multi-module.md."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import RankContext, run_ranks
from tools.draw_modules import draw, panels

PAGE = Path(__file__).parent.parent / "docs" / "multi-module.md"


def program() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def run_program(context: RankContext, directory: str, text: str) -> tuple[float, list[str]]:
    """The norm of the last step, and what this rank loaded."""
    del context
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "program", "report": None}
    exec(compile(text, str(PAGE), "exec"), names)
    report = names["report"]
    return names["outcome"].norm, [] if report is None else list(report.loaded)


@pytest.mark.slow
def test_the_program_goes_on_where_it_ended_also_on_other_ranks(tmp_path: Path) -> None:
    interrupted = program().replace("+ 1, 4)", "+ 1, 3)")
    assert interrupted != program()
    colocated = program().replace(", ranks=(2, 3)", "")
    assert colocated != program()

    def norms(name: str, text: str, num_ranks: int = 4) -> list[tuple[float, list[str]]]:
        (tmp_path / name).mkdir(exist_ok=True)
        return run_ranks(num_ranks, run_program, str(tmp_path / name), text).results

    whole = norms("whole", program())
    assert len({norm for norm, _ in whole}) == 1
    assert whole[0][0] > 0
    assert not any(loaded for _, loaded in whole)
    norms("resumed", interrupted)
    shutil.copytree(tmp_path / "resumed", tmp_path / "moved")
    resumed = norms("resumed", program())
    assert {norm for norm, _ in resumed} == {norm for norm, _ in whole}
    for rank, (_, loaded) in enumerate(resumed):
        assert f"{'vision' if rank < 2 else 'language'}.model.0.weight" in loaded
        assert not any(name.startswith("language" if rank < 2 else "vision") for name in loaded)
    for norm, _ in norms("moved", colocated, 2):
        assert norm == pytest.approx(whole[0][0], rel=1e-6)


def test_the_picture_is_that_of_the_plans() -> None:
    assert (PAGE.parent / "assets" / "modules.svg").read_text() == draw(panels())

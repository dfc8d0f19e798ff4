"""The program and the picture of docs/multi-module.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.harness import RankContext, run_ranks
from tools.draw_modules import draw, panels

PAGE = Path(__file__).parent.parent / "docs" / "multi-module.md"


def program() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def run_program(context: RankContext, directory: str) -> tuple[float, list[str]]:
    """The norm of the last step, and what all ranks loaded."""
    del context
    os.chdir(directory)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(program(), str(PAGE), "exec"), names)
    report = names["report"]
    return names["outcome"].norm, list(report.loaded)  # type: ignore[attr-defined]


def test_the_program_runs_and_each_rank_loads_its_module(tmp_path: Path) -> None:
    results = run_ranks(4, run_program, str(tmp_path)).results
    assert len({norm for norm, _ in results}) == 1
    assert results[0][0] > 0
    for rank, (_, loaded) in enumerate(results):
        assert f"{'vision' if rank < 2 else 'language'}.model.0.weight" in loaded
        assert not any(name.startswith("language" if rank < 2 else "vision") for name in loaded)


def test_the_picture_is_that_of_the_plans() -> None:
    assert (PAGE.parent / "assets" / "modules.svg").read_text() == draw(panels())

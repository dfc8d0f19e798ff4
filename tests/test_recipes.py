"""Each recipe runs as printed, and goes on after a stop as if there had been none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import programs

PAGE = Path(__file__).parent.parent / "docs" / "recipes.md"
PROGRAMS = dict(
    re.findall(
        r"<!-- recipe: (\w+) begin -->\n```python\n(.*?)```\n<!-- recipe: \w+ end -->",
        PAGE.read_text(),
        re.DOTALL,
    )
)
STEPS = 8


def launch(name: str, num_ranks: int, root: Path, steps: int) -> list[str]:
    """The last line that each rank prints."""
    outputs = programs.launch(
        PROGRAMS[name], root, steps, num_ranks=num_ranks, directory=root.parent
    )
    return [re.findall(r"step \d+, loss .*", text)[-1] for text in outputs]


def test_the_page_has_the_recipes_that_people_ask_for() -> None:
    assert set(PROGRAMS) == {"ddp", "fsdp2", "ema", "gan", "two_modules", "lora", "loader"}
    assert PAGE.read_text().count("```python") == len(PROGRAMS)  # no program that nobody runs


@pytest.mark.slow  # an example of the same kind is in the short tests
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_goes_on_after_a_stop_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    if name == "loader":
        pytest.importorskip("torchdata")
    straight = launch(name, 2, tmp_path / "straight", STEPS)
    assert all(line.startswith(f"step {STEPS}, loss ") for line in straight)
    launch(name, 2, tmp_path / "stopped", STEPS // 2)
    assert launch(name, 2, tmp_path / "stopped", STEPS) == straight


FIRST = ("fsdp2", "ema", "two_modules")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FIRST else pytest.mark.nightly)
        for name in PROGRAMS
        if name != "loader"
    ],
)
def test_a_recipe_goes_on_with_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    for num_ranks, steps in ((2, 4), (3, 8), (2, 12)):
        lines = launch(name, num_ranks, tmp_path, steps)
        assert [line.startswith(f"step {steps}, loss ") for line in lines] == [True] * num_ranks
    assert all((tmp_path / f"iter_{step:07d}").is_dir() for step in (4, 8, 12))


def test_a_loader_goes_on_where_all_ranks_together_were(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    before = launch("loader", 2, tmp_path, STEPS // 2)
    last = max(int(line.rsplit(" ", 1)[1]) for line in before)
    after = launch("loader", 1, tmp_path, STEPS)
    # One rank takes 4 batches of 2 samples, none of them seen before and none left out.
    assert int(after[0].rsplit(" ", 1)[1]) == last + 4 * 2

"""Generated programs of irregular steps equal one process, or raise on all ranks by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.campaign.actions import (
    FAULTS,
    FORMS,
    WRITES,
    Action,
    AddGroup,
    Formed,
    Microbatch,
    Move,
    Write,
)
from tests.campaign.programs import STRATEGIES, draw_irregular
from tests.campaign.runs import run_irregular_programs
from tests.harness import run_ranks

Ends = Counter[tuple[str, str, str]]


def check(tmp_path: Path, seeds: Iterable[int], *, num_ranks: int) -> Ends:
    """Run programs; `python -m tests.campaign --irregular --ranks N SEED` runs one of them again.

    Returns how their actions ended, by way and action.
    """
    arguments = str(tmp_path), list(seeds)
    outcome = run_ranks(num_ranks, run_irregular_programs, *arguments, timeout_s=500)
    assert sorted({wrong for found in outcome.results for wrong in found.wrong}) == []
    ends: Ends = Counter()
    for found in outcome.results:
        ends += found.ends
    return ends


def share_of_values(ends: Ends) -> float:
    """Return the share of the actions that could have values and were not refused."""
    values = sum(count for (*_, end), count in ends.items() if end == "value")
    return values / sum(count for (*_, end), count in ends.items() if end != "fault")


# One rank takes less than a tenth of a second for each. Thousands are slow or nightly.
@pytest.mark.parametrize(("num_ranks", "count"), [(1, 20), (2, 4)])
def test_any_actions_equal_one_process_or_raise_by_name(
    tmp_path: Path, num_ranks: int, count: int
) -> None:
    """I1: losses, outputs, norms and weights after errors, writes, evaluations, saves, loads."""
    ends = check(tmp_path, range(count), num_ranks=num_ranks)
    assert share_of_values(ends) > 0.8, ends


@pytest.mark.parametrize(
    ("num_ranks", "first", "count"),
    [
        *[pytest.param(1, first, 300, marks=pytest.mark.slow) for first in range(1000, 2800, 300)],
        *[pytest.param(*each, marks=pytest.mark.slow)
          for each in ((2, 1000, 150), (3, 1000, 20), (4, 1000, 30))],
        *[pytest.param(*each, marks=pytest.mark.nightly)
          for each in ((2, 1150, 150), (2, 1300, 150), (2, 1450, 150), (3, 1020, 80),
                       (4, 1030, 75), (4, 1105, 75), (4, 1180, 75))],
    ],
)  # fmt: skip
def test_two_thousand_programs_of_actions(
    tmp_path: Path, num_ranks: int, first: int, count: int
) -> None:
    """I1: as above; and what may be refused has been."""
    ends = check(tmp_path, range(first, first + count), num_ranks=num_ranks)
    assert share_of_values(ends) > 0.8, ends
    if num_ranks == 1:
        refused = {end for *_, end in ends} - {"value", "fault"}
        assert {"no gradient", "not reduced", "after the last"} <= refused


def test_the_programs_have_everything_that_they_are_about() -> None:
    programs = [draw_irregular(seed, num_ranks=4) for seed in range(1000, 1090)]
    ways = [program.ways[-1] for program in programs]
    assert any(
        way.layout != program.ways[0].layout for way, program in zip(ways, programs, strict=True)
    )
    assert {way.kind for way in ways} == {"plain", "zero", "chained", "fsdp"}
    assert {way.options["strategy"] for way in ways if way.kind == "fsdp"} == {*STRATEGIES}
    sharded = {
        (way.options["stage"], way.options["overlap"]) for way in ways if "stage" in way.options
    }
    assert len(sharded) == 4
    for axis in ("dp", "cp", "tp", "ep", "replicas"):
        assert any(way.layout.get(axis, 1) > 1 for way in ways), axis
    actions = [
        (program.ways[-1].kind, action)
        for program in (draw_irregular(seed, num_ranks=1) for seed in range(1000, 2800))
        for action in program.ways[-1].actions
    ]
    done = Counter((kind, type(action)) for kind, action in actions)
    # Buckets hold parameters: a model moves, and gets other ones, before its sharded optimizer is
    # built.
    for each in (Move, AddGroup):
        assert {kind for kind, action in done if action is each} == {"plain", "fsdp"}
    assert len(done) == 4 * len(Action.__args__) - 4
    assert min(done.values()) >= 3
    assert {way.has_tensor_rates for way in ways} == {True, False}
    writes = {(kind, each.how) for kind, each in actions if isinstance(each, Write)}
    assert len(writes) == 4 * len(WRITES)
    forms = {(kind, each.form) for kind, each in actions if isinstance(each, Formed)}
    assert len(forms) == 4 * len(FORMS)
    faults = {(kind, each.fault) for kind, each in actions if isinstance(each, Microbatch)}
    assert len(faults) == 4 * (1 + len(FAULTS))

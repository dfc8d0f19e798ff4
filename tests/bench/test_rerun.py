"""The benchmark of the rerun machine runs, and counts what a step sends."""

from __future__ import annotations

import re

import pytest

from bench import rerun


@pytest.mark.slow
def test_a_step_without_a_fault_sends_one_sum_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    arms = ((rerun.PLAIN, 0), (rerun.DISABLED, 0), (rerun.VALIDATING, 1), (rerun.CARRIED, 0))
    for name, count in arms:
        row = rf"small +│ {name} +│ [\d.]+ +│ [\d.]+ +│ [\d.]+ +│ [\d.]+ +│ {count} +│ (\d+)"
        (kept,) = re.findall(row, shown)
        assert (int(kept) > 0) is (name in (rerun.VALIDATING, rerun.CARRIED))

"""The benchmark of the rerun machine runs, and counts what a step sends."""

from __future__ import annotations

import re

import pytest

from bench import rerun


def test_a_step_without_a_fault_sends_one_collective(capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    for name, count in ((rerun.PLAIN, 0), (rerun.DISABLED, 0), (rerun.VALIDATING, 1)):
        row = rf"small +│ {name} +│ [\d.]+ +│ [\d.]+ +│ {count} +│ (\d+)"
        (kept,) = re.findall(row, shown)
        assert (int(kept) > 0) is (name == rerun.VALIDATING)

"""The benchmark of several modules runs on tiny sizes and prints every pair."""

from __future__ import annotations

import re

import pytest

from bench import modules


def test_it_measures_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert modules.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    for what, (ours, other) in modules.PAIRS.items():
        row = rf"{what}, {ours} +│ +[\d.]+ +│ {other} +│ +[\d.]+ +│ +[\d.]+"
        assert re.search(row, shown), what

"""The benchmark of foreign formats runs on tiny sizes and prints every pair."""

from __future__ import annotations

import re

import pytest

from bench import foreign


def test_it_measures_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreign.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    for ours, theirs in (
        ("load from DCP", "dcp.load"),
        ("load from a folder", "safetensors"),
        ("convert", "copy"),
    ):
        assert re.search(rf"{ours} +│ +[\d.]+ +│ +[\d.]+ +│ {theirs} ", shown), ours

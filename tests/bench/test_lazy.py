"""The benchmark of lazy saves runs on tiny sizes and prints every arm."""

from __future__ import annotations

import re

import pytest

from bench import lazy


@pytest.mark.slow
def test_it_measures_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    assert lazy.main(["--quick", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    for name in (lazy.MEMCPY, lazy.AT_ONCE, lazy.LAZILY):
        assert re.search(rf"{name} +│ +[\d.]+ +│ +[\d.]+ ", shown), name
    assert "Bar: " in shown

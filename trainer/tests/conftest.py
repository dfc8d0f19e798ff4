"""The examples that the library's tests draw are drawn here, too, in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.conftest  # noqa: F401
from trainer.tests.launches import LAUNCHED


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a text to train on, in a process that no launcher has started."""
    for name in (*LAUNCHED, "HOLDFAST_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hold fast " * 400)
    return tmp_path

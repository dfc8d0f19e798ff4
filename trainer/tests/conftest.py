"""What holds for the library's tests (drawn examples, a small heap) holds here, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import pytest_runtest_teardown

__all__ = ["pytest_runtest_teardown"]


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a text to train on, in a process that no launcher has started."""
    # Imports torch: pytest's first process, which runs no test, would wait for it.
    from trainer.tests.launches import LAUNCHED

    for name in (*LAUNCHED, "HOLDFAST_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hold fast " * 400)
    return tmp_path

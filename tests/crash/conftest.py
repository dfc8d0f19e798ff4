"""Places to save to: in memory, and on file systems of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.mounts import Mounts

_SHM = Path("/dev/shm")


@pytest.fixture
def fast_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: syncs cost nothing, kills are the same."""
    if not (_SHM.is_dir() and os.access(_SHM, os.W_OK)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=_SHM) as name:
        yield Path(name)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Mounts that are undone after the test; skips without the right to mount."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with Mounts(tmp_path / "mounts") as made:
        yield made

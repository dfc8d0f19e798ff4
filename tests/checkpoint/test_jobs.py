"""A directory is what its jobs say, whatever they and the command do in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.jobs import follow


def test_a_directory_is_what_its_jobs_say(tmp_path: Path) -> None:
    """P2, P6, O8: a job whose ranks are all killed within a save, and one that goes on."""
    follow(tmp_path / "jobs", 10, 2)


@pytest.mark.slow
def test_directories_are_what_their_jobs_say(tmp_path: Path) -> None:
    """P2, P6, O8: with prunes, tags, repairs and copies by another process during saves."""
    for seed in range(100, 104):
        follow(tmp_path / str(seed), seed, 2)

"""A directory of checkpoints is what the reports say, whatever people do with it in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.histories import History


def follow(place: Path, seed: int, num_actions: int, *, own_process: bool) -> None:
    place.mkdir()
    history = History(place, seed, own_process=own_process)
    try:
        history.go(num_actions)
    except BaseException as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(history.log))
        raise


@pytest.mark.parametrize("seed", range(4))
def test_a_directory_is_what_its_history_says(tmp_path: Path, seed: int) -> None:
    """O8, E12, E14: saves, loads, retention and tags between interrupts, full disks and moves."""
    follow(tmp_path / "history", seed, 25, own_process=False)


@pytest.mark.parametrize(
    ("own_process", "seeds"),
    [
        pytest.param(False, range(1000, 1008), marks=pytest.mark.slow),
        pytest.param(True, range(1000, 1002), marks=pytest.mark.slow),
        pytest.param(False, range(1008, 1080), marks=pytest.mark.nightly),
        pytest.param(True, range(1002, 1016), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_long_histories(tmp_path: Path, own_process: bool, seeds: range) -> None:
    """P2, P14, R6: with writer processes that are killed, too."""
    for seed in seeds:
        follow(tmp_path / str(seed), seed, 40, own_process=own_process)

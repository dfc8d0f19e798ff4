"""Processes that die between the detection of a fault and the end of the step that runs again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rerun.spread.kills import Killed, play_killed
from tests.rerun.spread.scenario import KINDS

_KINDS = KINDS[:4]


def _kill(root: Path, *, seed: int, layout: str, num_kills: int) -> int:
    """Play jobs until so many of their processes were killed; return the number of kills."""
    jobs: list[Killed] = []
    while sum(job.num_kills for job in jobs) < num_kills and len(jobs) < num_kills:
        number = seed + len(jobs)
        options = {"layouts": (layout,), "kinds": _KINDS}
        job = play_killed(root / str(number), number, options, num_kills=4)
        assert not job.wrong, f"seed {number}: {job.wrong}"
        jobs.append(job)
    kills = sum(job.num_kills for job in jobs)
    after = sum(job.num_after_restart for job in jobs)
    print(
        f"{len(jobs)} jobs, {sum(job.num_launches for job in jobs)} launches, {kills} kills, "
        f"{after} of them after a start from a fault checkpoint"
    )
    assert num_kills < 100 or 0 < after < kills
    return kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "num_kills"),
    [
        pytest.param("alone", 8, marks=pytest.mark.slow),
        pytest.param("DP2", 3, marks=pytest.mark.slow),
        pytest.param("alone", 170, marks=pytest.mark.nightly),
        pytest.param("TP2", 15, marks=pytest.mark.nightly),
        pytest.param("DP2", 15, marks=pytest.mark.nightly),
    ],
)
def test_many_kills_between_detection_and_replay(
    fast_dir: Path, layout: str, num_kills: int
) -> None:
    """D9: the same bits as without fault and kills, no batch lost or used twice.

    At random instants (nightly two hundred in all), of one process or both of two.
    """
    assert _kill(fast_dir, seed=100, layout=layout, num_kills=num_kills) >= num_kills

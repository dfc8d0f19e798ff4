"""Faults that spread through a parallel model are blamed on the right device, or on none.

One seed again, with words: `python -m tests.rerun.spread SEED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rerun.spread.campaign import complaints, play, summary
from tests.rerun.spread.scenario import KINDS, OF_ONE_DEVICE, WITH_REPLICA

_PERMANENT = KINDS[1:4]


def _campaign(root: Path, seeds: Sequence[int]) -> None:
    findings = play(root, seeds)
    print(summary(findings))
    assert not complaints(findings), complaints(findings)
    verdicts = {verdict for each in findings for verdict in each.verdicts}
    assert verdicts >= {
        "transient_error",
        "persistent_error",
        "correct_result",
        "spoiled_state",
    }


def _second_opinions(root: Path, seeds: range) -> None:
    findings = play(
        root,
        seeds,
        max_starts=1,
        layouts=WITH_REPLICA,
        kinds=_PERMANENT,
        programs=("plain", "local"),
    )
    print(summary(findings))
    assert not complaints(findings), complaints(findings)
    for each in findings:
        assert each.num_opinions == 1, str(each.scenario)
        is_told = each.scenario.layout_name in OF_ONE_DEVICE or each.scenario.kind == "data"
        if is_told:
            (verdict,) = each.verdicts
            truth = "correct_result" if each.scenario.kind == "data" else "persistent_error"
            assert verdict == truth, str(each.scenario)


@pytest.mark.slow
def test_a_sample_of_spreading_faults(fast_dir: Path) -> None:
    """D7, D8, D9, D19: no false blame, no false clearance, the same bits as without the fault."""
    _campaign(fast_dir, (2, 3, 5, 7, 9))  # each verdict, and one that stays undecided


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1000, 1008), marks=pytest.mark.slow, id="8"),
        pytest.param(range(1008, 1460), marks=pytest.mark.nightly, id="452"),
    ],
)
def test_many_spreading_faults(fast_dir: Path, seeds: range) -> None:
    """D7, D8, D9, D19: several turns through all layouts."""
    _campaign(fast_dir, seeds)


def test_a_device_is_cleared_only_in_the_role_that_it_had(fast_dir: Path) -> None:
    """D8: a broken one that is right as another rank still is the suspect as the first."""
    layouts = ("TP2", "PP2", "CP2", "EP2")
    findings = play(fast_dir, (2, 18), layouts=layouts, kinds=("persistent in its role",))
    assert not complaints(findings), complaints(findings)


def test_a_second_opinion_tells_within_the_step(fast_dir: Path) -> None:
    """D23: a replica of one device convicts it at once; any two replicas prove data bad."""
    _second_opinions(fast_dir, range(2))


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_hundred_second_opinions(fast_dir: Path) -> None:
    """D23: a hundred of a hundred are right."""
    _second_opinions(fast_dir, range(1000, 1105))

"""What each keep policy keeps, seen in the plan of a removal."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.policies.keep import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepTagged,
    KeepWithin,
)
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import set_tag
from holdfast.storage import PosixStorage
from tests.retention.common import fill, is_whole, put, steps_of, trash


def test_the_last_and_every_mth_stay(tmp_path: Path) -> None:
    storage = fill(tmp_path, range(10, 130, 10))
    plan = plan_retention(storage, KeepLast(2) | KeepEvery(50))
    assert plan.keep == {
        50: "every 50 steps",
        100: "every 50 steps",
        110: "one of the last 2",
        120: "the newest sound checkpoint; one of the last 2",
    }
    assert [removal.step for removal in plan.remove] == [10, 20, 30, 40, 60, 70, 80, 90]
    assert all(removal.stored_nbytes == 20 for removal in plan.remove)
    assert steps_of(storage) == list(range(10, 130, 10))  # planning removes nothing
    result = apply_retention(storage, plan)
    assert result.removed == [10, 20, 30, 40, 60, 70, 80, 90]
    assert not result.spared
    assert not result.failed
    assert steps_of(storage) == [50, 100, 110, 120]
    assert all(is_whole(storage, step) for step in (50, 100, 110, 120))
    assert trash(storage) == []
    assert storage.list(".reading") == []


def test_what_was_saved_lately_stays(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    now = datetime(2026, 5, 1, tzinfo=UTC)
    ages = {1: timedelta(days=8), 2: timedelta(days=7), 3: timedelta(hours=1), 4: timedelta(-1)}
    for step, age in ages.items():
        put(storage, step, created=(now - age).isoformat())
    put(storage, 5, created=(now - timedelta(days=99)).isoformat().removesuffix("+00:00"))
    plan = plan_retention(storage, KeepWithin(7 * 86400), now=now)
    assert plan.keep == {
        2: "younger than 7 d", 3: "younger than 7 d", 4: "younger than 7 d",
        5: "the newest sound checkpoint",
    }  # fmt: skip
    put(storage, 0, created="yesterday")
    plan = plan_retention(storage, KeepWithin(60), now=now)
    assert "'yesterday' cannot be read" in plan.keep[0]


@pytest.mark.parametrize(("mode", "best"), [("min", [4, 3]), ("max", [1, 2])])
def test_the_best_by_a_metric_stay(tmp_path: Path, mode: str, best: list[int]) -> None:
    storage = PosixStorage(tmp_path)
    nan, inf = {"$": "float", "v": "nan"}, {"$": "float", "v": "inf"}
    for step, loss in enumerate([9.0, 8, 1.5, 1.5, nan, True, "0", None, inf], start=1):
        put(storage, step, progress={"eval": [{"loss": loss}]})
    put(storage, 20, progress={"other": 0})
    plan = plan_retention(storage, KeepBest("progress.eval.0.loss", 2, mode))  # type: ignore[arg-type]
    if mode == "max":
        best = [9, 1]
    assert [step for step, why in plan.keep.items() if "best" in why] == sorted(best)
    assert "best 1 by progress.eval.0.loss" in plan.keep[best[0]]
    assert set(plan.keep) == {*best, 20}


def test_a_run_that_diverged_is_never_the_best(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    for step, loss in enumerate([{"$": "float", "v": "nan"}, 2.0, 1.0, 3.0]):
        put(storage, step, progress={"loss": loss})
    for mode, best in (("min", 2), ("max", 3)):
        plan = plan_retention(storage, KeepBest("progress.loss", 1, mode))  # type: ignore[arg-type]
        assert set(plan.keep) == {best, 3}


def test_a_misspelt_metric_costs_nothing(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3])
    plan = plan_retention(storage, KeepBest("progress.los", 1))
    assert plan.remove == ()
    assert "no checkpoint has a number at 'progress.los'" in plan.keep[1]


def test_tagged_steps_stay(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2, 3, 4])
    set_tag(storage, "release-1.0", step=1)
    set_tag(storage, "best", step=2)
    assert set(plan_retention(storage, KeepTagged()).keep) == {1, 2, 4}
    for names in (("release-*",), "release-*", "release-1.0", ["release-?.0"]):
        assert set(plan_retention(storage, KeepTagged(names)).keep) == {1, 4}
    assert plan_retention(storage, KeepTagged()).keep[1] == "tagged release-1.0"


@pytest.mark.parametrize(
    "make",
    [lambda: KeepLast(0), lambda: KeepEvery(0), lambda: KeepWithin(0), lambda: KeepWithin(
        float("nan")), lambda: KeepBest("x", 0), lambda: KeepBest("x", 1, "least"),  # type: ignore[arg-type]
     lambda: KeepLast(True), lambda: KeepBest(5), lambda: KeepTagged(5), lambda: KeepTagged([5])],  # type: ignore[arg-type, list-item]
)  # fmt: skip
def test_policies_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]

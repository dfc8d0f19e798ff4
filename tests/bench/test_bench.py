"""The benchmark harness runs whole on tiny sizes, and says what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import report, scale, tiny
from bench.__main__ import main
from bench.results import BenchResults, Row, Target
from bench.timing import interleave, slowest
from holdfast.checkpoint.plan.make_plan import make_plan


def test_every_arm_runs_once_a_round_in_turning_order_and_warm_ups_are_dropped() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Callable[[int], dict[str, float]]:
        def act(number: int) -> dict[str, float]:
            calls.append((name, number))
            return {"seconds": float(number)}

        return act

    series = interleave({"a": arm("a"), "b": arm("b")}, repeats=3, before_each=lambda: None)
    assert [name for name, _ in calls] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [m["seconds"] for m in series["a"]] == [4, 5, 8]
    other = {"a": [{"seconds": 5.0}] * 3, "b": [{"seconds": 0.0}] * 3}
    assert [m["seconds"] for m in slowest([series, other])["a"]] == [5, 5, 8]


@pytest.mark.parametrize(
    ("against", "bound", "met"),
    [
        ("floor", 2.0, True),
        ("floor", 1.9, False),
        ("dcp", 0.5, True),
        ("dcp", 0.4, False),
        ("value", 4.0, True),
        ("value", 3.9, False),
    ],
)
def test_a_target_is_met_at_its_bound_and_missed_above(
    against: str, bound: float, met: bool
) -> None:
    row = Row(
        case="c", name="n", unit="ms", holdfast=4.0, floor=2.0, dcp=8.0,
        target=Target(against=against, bound=bound),  # type: ignore[arg-type]
    )  # fmt: skip
    assert row.met is met


def test_the_best_arm_of_dcp_and_of_the_floor_is_what_counts() -> None:
    results = BenchResults()
    results.compare(
        "case", "name", unit="ms", scale=10, holdfast=[3, 1, 2],
        floors={"slow": [9, 9, 9], "fast": [1, 1, 7]}, dcp={"x": [8, 8, 8], "y": [4, 5, 4]},
    )  # fmt: skip
    row = results.rows[0]
    assert (row.holdfast, row.floor, row.dcp, row.dcp_arm) == (20, 10, 40, "y")
    assert (row.to_floor, row.to_dcp) == (2, 0.5)


def test_the_boxes_of_simulated_ranks_cover_their_tensors() -> None:
    layout = scale.simulated_layout(32)
    tables = scale.simulated_tables(layout, 40)
    plan, assignments = make_plan(
        tables,
        ranks=layout.ranks,
        coordinates=[layout.coordinate(rank) for rank in layout.ranks],
        signature="0" * 32,
        block_nbytes=1 << 20,
    )
    assert plan.num_rows == 32 * 40
    assert [len(each.rows) for each in assignments] == [40] * 32


def test_tiny_tensors_end_to_end_with_a_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(results: BenchResults, scratch: Path) -> None:
        tiny.measure(results, num_tensors=50, repeats=1, scratch=scratch)

    monkeypatch.setattr("bench.__main__.cases", lambda **_: {"tiny": measure})
    out = tmp_path / "out"
    assert main(["--quick", "--out", str(out)]) == 0
    document = json.loads((out / "bench.json").read_text())
    names = {row["name"] for row in document["rows"]}
    assert {"save, a tensor", "load, a tensor"} <= names
    for row in document["rows"]:
        assert row["holdfast"] > 0
        assert row["dcp"] > 0
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "tmp").exists(), "scratch files were left behind"

    for row in document["rows"]:
        row["to_floor"] = row["to_floor"] and row["to_floor"] * 1e6
    before = tmp_path / "baseline.json"
    before.write_text(json.dumps(document))
    baseline = report.read_baseline(before)
    assert baseline.keys() == {f"{row['case']}: {row['name']}" for row in document["rows"]}
    capsys.readouterr()
    assert main(["--quick", "--out", str(out), "--baseline", str(before)]) == 0
    printed = capsys.readouterr().out
    assert "change" in printed
    assert "-100%" in printed

"""The benchmark harness runs whole on tiny sizes, and says what it measured."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from bench import report, scale, step, tiny
from bench.__main__ import cases, main
from bench.floor import FloorMemory, drop_pages, has_direct_io, write_file
from bench.results import BenchResults, Row, Target
from bench.timing import interleave, slowest
from holdfast import RNG, Codecs
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.state import flatten_state


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


@pytest.mark.parametrize("num_arms", [1, 2, 3, 4, 6])
def test_arms_follow_each_other_equally_often(num_arms: int) -> None:
    names = [str(i) for i in range(num_arms)]
    calls: list[str] = []

    def arm(name: str) -> Callable[[int], dict[str, float]]:
        def act(_: int) -> dict[str, float]:
            calls.append(name)
            return {}

        return act

    arms = {name: arm(name) for name in names}
    interleave(arms, repeats=num_arms, before_each=lambda: None, warm_ups=0)
    rounds = [calls[i : i + num_arms] for i in range(0, len(calls), num_arms)]
    for place in zip(*rounds, strict=True):
        assert sorted(place) == names
    followers = Counter(pair for each in rounds for pair in pairwise(each))
    if num_arms % 2 == 0:
        assert set(followers.values()) == {1}
        assert len(followers) == num_arms * (num_arms - 1)


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
        targets=(Target(against=against, bound=bound),),  # type: ignore[arg-type]
    )  # fmt: skip
    assert row.met is met
    assert f"{'met' if met else 'missed'}[/]" in report.targets_text(row)


def test_the_best_arm_of_dcp_and_of_the_floor_is_what_counts() -> None:
    results = BenchResults()
    results.compare(
        "case", "name", unit="ms", scale=10, holdfast=[3, 1, 2],
        floors={"slow": [9, 9, 9], "fast": [1, 1, 7]}, dcp={"x": [8, 8, 8], "y": [4, 5, 4]},
    )  # fmt: skip
    row = results.rows[0]
    assert (row.holdfast, row.floor, row.floor_arm) == (20, 10, "fast")
    assert (row.dcp, row.dcp_arm) == (40, "y")
    assert (row.to_floor, row.to_dcp) == (2, 0.5)


def test_the_floor_reads_what_it_wrote_in_both_ways(tmp_path: Path) -> None:
    for nbytes in (1, 4096, (17 << 20) + 5):
        memory = FloorMemory(nbytes)
        for direct in (False, True) if has_direct_io(tmp_path) else (False,):
            path = tmp_path / f"{nbytes}-{direct}"
            memory.write(path, direct=direct)
            assert path.stat().st_size >= nbytes
            memory.read(path, direct=direct)
            with pytest.raises(OSError, match="short read"):
                FloorMemory(2 * nbytes + 4096).read(path, direct=direct)
    write_file(tmp_path / "file", nbytes)
    assert (tmp_path / "file").stat().st_size == nbytes
    memory.read(tmp_path / "file", direct=False)


def num_pages_in_memory(path: Path) -> int:
    """How many pages of a file the page cache holds (`mincore`).

    A read with RWF_NOWAIT is not a way to see it: it starts to read ahead, and finds its own pages
    where the disk is quick.
    """
    nbytes = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY) as view:
        start = ctypes.c_char.from_buffer(view)
        rc = libc.mincore(ctypes.byref(start), ctypes.c_size_t(nbytes), pages)
        del start  # a mapping that is looked at cannot be closed
    assert rc == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages)


def test_dropped_pages_are_read_from_the_disk_again(tmp_path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True)
    if kind.stdout.strip() in ("tmpfs", "ramfs"):
        pytest.skip("a file system without a disk")
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "file"
    path.write_bytes(b"x" * (1 << 20))

    assert num_pages_in_memory(path) == (1 << 20) // mmap.PAGESIZE
    drop_pages(tmp_path)
    assert num_pages_in_memory(path) == 0
    assert path.read_bytes() == b"x" * (1 << 20)


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
    streams = flatten_state({"rng": RNG()}, layout=layout, rank=0, codecs=Codecs()).leaves
    num_rows = 40 + len(streams)
    assert len(plan.row_tensor) == 32 * num_rows
    assert [len(each.rows) for each in assignments] == [num_rows] * 32


@pytest.mark.slow
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


@pytest.mark.nightly
def test_a_quick_run_measures_every_case_and_every_bar(tmp_path: Path) -> None:
    """Holdfast and DCP bring back what was saved, in all arms, or the run ends with an error."""
    out = tmp_path / "out"
    assert main(["--quick", "--out", str(out)]) == 0
    document = json.loads((out / "bench.json").read_text())
    rows = {(row["case"], row["name"]): row for row in document["rows"]}
    dense = [case for case, _ in rows if case.startswith("dense")]
    assert len(set(dense)) == 2
    for case in {*dense, "100 small tensors"}:
        for name in (
            "save, durable",
            "async save, stall",
            "async save, until durable",
            *(
                f"{load}, {cache}, {how}"
                for load in ("load, same layout", "load to TP4", "load to TP1 x DP2")
                for cache in ("warm", "cold")
                for how in ("defaults", "exchange=False")
            ),
        ):
            row = rows[case, name]
            assert min(row["holdfast"], row["floor"], row["dcp"]) > 0
            assert {"against": "dcp", "bound": 1.0} in [
                {key: bar[key] for key in ("against", "bound")} for bar in row["targets"]
            ]
        stall = rows[case, "async save, stall"]["samples"]
        assert {arm for arm in stall if arm.startswith("dcp.")} == {
            "dcp.async_save",
            "dcp.async_save, cached plan and staging",
            "dcp.async_save, process, cached plan and staging",
        }
        warm = rows[case, "load, same layout, warm, defaults"]
        assert [bar["against"] for bar in warm["targets"]] == ["floor", "dcp"]
        assert "read, buffered" in warm["samples"]
        ratio = rows[case, "load, same layout, warm, defaults / exchange=False"]
        assert ratio["targets"][0]["bound"] == 1.05
    for hosts in ("one host", "two hosts"):
        case = f"replicated 8 MiB, {hosts}"
        assert rows[case, "bytes read by the job, on"]["holdfast"] == 1.0
        assert rows[case, "bytes read by the job, off"]["holdfast"] == 8.0
        for cache in ("warm", "cold"):
            assert rows[case, f"{cache}, auto / better of on, off"]["targets"][0]["bound"] == 1.05
            assert rows[case, f"load, {cache}, exchange=auto"]["dcp"] > 0
    steps = [name for case, name in rows if case.startswith("a training step")]
    assert len(steps) == 2
    assert set(document["curves"]) == {"scale"}
    assert not (tmp_path / "tmp").exists(), "scratch files were left behind"
    assert set(cases(quick=True, megabytes=None, repeats=None)) == {
        "large", "medium", "small", "replicated", "tiny", "steady", "training", "scale",
    }  # fmt: skip


def test_a_sharded_step_is_measured_next_to_ddp(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_layers": 2, "width": 4, "num_blocks": 3, "steps_a_block": 1}
    for bound, code in ((1e9, 0), (1e-9, 1)):
        case = step.Case(**shape, bounds=(bound, bound))
        monkeypatch.setattr(step, "CASES", {"40 tiny parameters": case})
        assert step.main([]) == code
        printed = capsys.readouterr().out
        for arm in ("DDP", "overlap", "no overlap"):
            assert arm in printed
        assert "2 direct" in printed  # all the messages of a small model's step

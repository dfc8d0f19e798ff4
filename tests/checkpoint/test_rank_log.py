"""The log that each rank keeps of its saves and loads, as `holdfast view` reads it."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import pytest

from holdfast import Checkpointer, Layout, LoadReport, ProcessGroups, RankLog
from holdfast.cli.page.run_events import read_run_log
from tests.checkpoint.common import make_state
from tests.harness import RankContext, run_ranks

LAYOUT = Layout(tp=2)


def save_and_load(context: RankContext, directory: str, log_in: str | None) -> None:
    with ProcessGroups.create(LAYOUT) as groups, Checkpointer(directory, groups=groups) as saver:
        log = RankLog(log_in, groups=groups)
        began = time.time()
        log.save(saver.save(3, make_state(LAYOUT, context.rank)), began=began)
        log.save(saver.save_async(4, make_state(LAYOUT, context.rank)).result(), began=began + 1)
        log.load(saver.load(make_state(LAYOUT, context.rank, blank=True)), began=began + 2)


def test_what_ranks_log_is_what_view_reads(tmp_path: Path) -> None:
    """Of each rank two saves with their phases and a load whose bytes by file add up."""
    run_ranks(2, save_and_load, str(tmp_path), str(tmp_path))
    log = read_run_log(tmp_path)
    assert (log.num_files, log.num_unreadable) == (2, 0)
    assert [save.step for save in log.saves] == [3, 4]
    for save in log.saves:
        assert [rank.rank for rank in save.ranks] == [0, 1]
        assert save.axes["tp"] == 2
        for rank in save.ranks:
            assert {"flatten", "stage", "write", "commit"} <= rank.phases.keys()
            assert 0 < rank.nbytes < rank.total_nbytes
            assert rank.starts.keys() == rank.phases.keys()
            assert all(start >= 0 for start in rank.starts.values())
            ends = {name: rank.starts[name] + rank.phases[name] for name in rank.phases}
            assert rank.starts["commit"] >= ends["write"] - 1e-5
            assert rank.starts["flatten"] < rank.starts["plan"] < rank.starts["stage"]
            if "total" in rank.phases:  # the write surrounds the staging, and all is in the call
                assert rank.starts["write"] <= rank.starts["stage"]
                assert ends["stage"] <= ends["write"] + 1e-5
                assert rank.began + rank.phases["total"] <= rank.time + 1e-2
            else:  # the writer starts when its job is submitted, by one clock of two processes
                assert ends["stage"] <= rank.starts["submit"] <= rank.starts["write"] + 1e-5
    assert all("total" in rank.phases for rank in log.saves[0].ranks)
    assert all("stall" in rank.phases for rank in log.saves[1].ranks)
    (load,) = log.loads
    assert (load.step, load.path) == (4, log.saves[1].path)
    for rank in load.ranks:
        assert sum(rank.nbytes_by_file.values()) == rank.nbytes_read > 0
        assert set(rank.nbytes_by_file) <= {f"data/{n:05d}.safetensors" for n in range(2)}


def test_lines_of_the_form_that_the_page_documents_are_read(tmp_path: Path) -> None:
    """Those of `docs/view.md`; a line that is cut off or of another kind is counted, not fatal."""
    page = (Path(__file__).parents[2] / "docs/view.md").read_text()
    lines = page.split("```json\n")[1].split("```")[0].splitlines()
    assert len(lines) == 2
    (tmp_path / "events").mkdir()
    more = [json.dumps({"event": "step", "rank": 3, "step": 1, "began": 1.0}), lines[0][:-20]]
    (tmp_path / "events/00003.jsonl").write_text("\n".join(lines + more))
    log = read_run_log(tmp_path)
    (save,), (load,) = log.saves, log.loads
    assert save.ranks[0].phases["write"] == 0.013
    assert load.ranks[0].nbytes_by_file == {"data/00003.safetensors": 694916}
    assert log.num_unreadable == 2


@pytest.mark.parametrize("log_in", [None, "text"])
def test_a_log_that_is_not_written_ends_no_run(tmp_path: Path, log_in: str | None) -> None:
    """A full disk on one rank would otherwise leave the others waiting."""
    (tmp_path / "text").write_text("in the way")
    place = None if log_in is None else str(tmp_path / log_in)
    outcome = run_ranks(2, save_and_load, str(tmp_path / "run"), place)
    for output in outcome.outputs:
        assert output.count("no longer logged") == (0 if log_in is None else 1)
    assert not (tmp_path / "run/events").exists()


def test_a_line_that_a_full_disk_cuts_is_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that takes only a part of a line took the rest of it silently, and spoiled the next.

    The limit of the size of files stands in for the disk: both let a write end early.
    """
    log = RankLog(tmp_path, groups=ProcessGroups.single())
    log.load(LoadReport(step=1, path="p"), began=1.0)
    (path,) = (tmp_path / "events").iterdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        log.load(LoadReport(step=2, path="p"), began=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.load(LoadReport(step=3, path="p"), began=3.0)
    assert [len(each) > 20 for each in path.read_bytes().split(b"\n")] == [True, False]
    assert caplog.text.count("no longer logged") == 1


def _log_without_experts(context: RankContext, directory: str) -> None:
    layout = Layout(cp=2, pp=2, order="tp-dp-pp-cp-ep")
    assert not layout.has_expert_view
    with ProcessGroups.create(layout) as groups, Checkpointer(directory, groups=groups) as saver:
        log = RankLog(directory, groups=groups)
        log.save(saver.save(1, {"t": {"step": 1}}), began=time.time())


def test_a_layout_without_an_expert_view_is_logged_too(tmp_path: Path) -> None:
    run_ranks(4, _log_without_experts, str(tmp_path))
    (save,) = read_run_log(tmp_path).saves
    assert save.axes == {"tp": 1, "cp": 2, "ep": 1, "dp": 1, "pp": 2, "expt_tp": 1}

"""The benchmark of fully sharded models runs on tiny sizes; its picture is what is recorded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from bench import fsdp
from bench.fsdp_picture import COMPUTE, GATHER, REDUCE, Event, draw, record, waits
from holdfast.parallel.groups.launches import Launch

PICTURE = Path(holdfast.__file__).parents[1] / "docs/assets/fsdp-launches.svg"


@pytest.mark.slow
def test_it_measures_every_arm_and_prints_what_was_launched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fsdp.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    for arm in (fsdp.BARE, fsdp.ONE, fsdp.TWO):
        # A column is as wide as its longest number: spaces follow a shorter one.
        assert re.search(rf"{arm} +│ +[\d.]+ +│ +[\d.]+ +│", shown), arm
    traces = [part.split() for part in shown.split("one step: ")[1:]]
    assert len(traces) == 3
    assert ["dp_cp_ag," in words for words in traces] == [False, False, True]


def test_a_trace_counts_repeats() -> None:
    names = ["all_gather"] * 3 + ["reduce_scatter", "all_gather"] * 2 + ["reduce_scatter"]
    launches = [
        Launch(order=i, op=name, purpose="x", ranks=(0, 1), nbytes=1)
        for i, name in enumerate(names)
    ]
    assert fsdp.trace_text(launches) == (
        "3 all_gather x, 2 x (reduce_scatter x, all_gather x), reduce_scatter x"
    )
    assert fsdp.trace_text(launches[:1]) == "all_gather x"
    assert fsdp.trace_text([]) == ""


def test_the_picture_in_the_documents_is_what_is_recorded() -> None:
    """F4, F7: gathers next to reductions on two communicators, behind them on one."""
    traces = record()
    one, two = traces["one communicator"], traces["two communicators"]
    assert {event.row for event in one} == {COMPUTE, "dp_cp"}
    assert any(waits(one))
    assert {(event.what, event.row) for event in two if event.row != COMPUTE} == {
        (GATHER, "dp_cp_ag"),
        (REDUCE, "dp_cp"),
    }
    assert not any(waits(two))
    for events in (one, two):
        for layer in ("2", "3", "4"):
            ahead = Event(what=GATHER, unit=str(int(layer) - 1), row=events[0].row)
            reduced = Event(what=REDUCE, unit=layer, row="dp_cp")
            # The last one: the first is of forward.
            latest = max(i for i, event in enumerate(events) if event == ahead)
            assert latest < events.index(reduced), layer
    assert PICTURE.read_text() == draw(traces), (
        "draw it again: python -m bench.fsdp --picture docs/assets/fsdp-launches.svg"
    )

"""Irregular runs of several modules equal one process, or raise on all ranks, and go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import RankContext, run_ranks
from tests.modules.irregular import KINDS, Attempts, Do, Microbatch, draw, run_program


def _run(context: RankContext, root: str, seeds: list[int]) -> Counter[str]:
    ends: Counter[str] = Counter()
    for seed in seeds:
        ends += run_program(draw(seed, num_ranks=context.num_ranks), f"{root}/{seed}")
    return ends


def test_irregular_programs_of_several_modules(tmp_path: Path) -> None:
    """I1, I3: a call that one module refuses, buckets that wait for a bridge, unused tokens.

    D5: the batches of a fault are not those of modules on other ranks.
    """
    for ends in run_ranks(4, _run, str(tmp_path), [113, 121]).results:
        assert ends["refused"]
        assert ends["fault"]


@pytest.mark.parametrize("num_ranks", [4, 2])
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([4, 28, 201, *range(100, 112)], marks=pytest.mark.slow, id="some"),
        pytest.param(range(112, 130), marks=pytest.mark.nightly, id="others"),
    ],
)
def test_many_irregular_programs_of_several_modules(
    tmp_path: Path, num_ranks: int, seeds: Sequence[int]
) -> None:
    """I1, I3."""
    for ends in run_ranks(num_ranks, _run, str(tmp_path), [*seeds], timeout_s=300).results:
        assert ends["refused"] > 3
        assert ends["fault"] > 3


def test_the_programs_have_everything() -> None:
    programs = [draw(seed, num_ranks=4) for seed in range(300)]
    assert {spec.kind for each in programs for spec in each.specs.values()} == {*KINDS}
    assert {len(each.specs) for each in programs} == {2, 3, 4}
    for kind in KINDS:
        specs = [spec for each in programs for spec in each.specs.values() if spec.kind == kind]
        assert {spec.foreach for spec in specs} == {False, True}
    dtypes = [len({spec.dtype for spec in each.specs.values()}) for each in programs]
    assert {*dtypes} == {1, 2}
    actions = [action for each in programs for action in each.actions]
    assert {action.what for action in actions if isinstance(action, Do)} == {
        "clear", "drop", "evaluate", "freeze", "load", "look", "move", "save", "set", "step",
        "swap", "thaw", "write",
    }  # fmt: skip
    attempts = [action for action in actions if isinstance(action, Attempts)]
    assert {each.num_bad for each in attempts} == {0, 1, 2}
    for name in ("has_veto", "drops_before", "restarts_elsewhere"):
        assert {getattr(each, name) for each in attempts if each.num_bad > 1} == {False, True}
    microbatches = [action for action in actions if isinstance(action, Microbatch)]
    microbatches += [inner for each in attempts for inner in each.microbatches]
    assert {each.does for each in microbatches} == {"all", "forward", "nothing", "no_grad"}
    assert {each.form for each in microbatches} == {"", "evaluated", "cleared"}
    places = {each.fault[1] for each in microbatches if each.fault is not None}
    assert places == {
        "in forward", "before backward", "in backward", "in recompute", "after backward"
    }  # fmt: skip
    assert any(isinstance(a, Do) and a.what == "load" and a.how == "first" for a in actions)
    for name in ("left_out", "twice", "fault", "nan"):
        assert any(getattr(each, name) for each in microbatches), name
    assert any(not sum(each.counts) for each in microbatches)

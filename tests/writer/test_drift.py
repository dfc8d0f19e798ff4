"""The odd ranks of an error about replicas, as values and in its message."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import DriftError, ErrorRecord, PlanError, joined_error
from holdfast.writer.commit import describe_drift, odd_ranks


def _by_content(contents: list[int]) -> list[list[int]]:
    ranks = defaultdict(list)
    for rank, content in enumerate(contents):
        ranks[content].append(rank)
    return list(ranks.values())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
@example([0, 0, 0, 1, 1, 1])
@example([0, 1, 1, 1, 1, 0, 1, 1])
def test_the_odd_ranks_are_those_that_most_others_contradict(contents: list[int]) -> None:
    """P4: they arrive on every rank with the error, as values."""
    holders = _by_content(contents)
    error = DriftError(describe_drift(holders), details={"odd_ranks": odd_ranks(holders)})
    carried = joined_error({0: ErrorRecord.of(error)}, num_ranks=2, phase="commit")
    assert type(carried) is DriftError
    assert isinstance(carried, PlanError)
    counts = sorted(map(len, holders), reverse=True)
    if len(counts) == 1 or counts[0] == counts[1]:
        assert carried.details["odd_ranks"] == []
        assert "odd ones" not in str(carried)
    else:
        usual = max(holders, key=len)
        assert carried.details["odd_ranks"] == sorted({*range(len(contents))} - {*usual})
        assert "odd ones by majority" in str(carried)


def test_one_odd_rank_of_many_is_named_although_long_messages_are_cut_off() -> None:
    """Ten thousand ranks, of which the even ones hold one thing and one holds a third."""
    holders = [[r for r in range(10_000) if r != 7777 and r % 500], [7777]]
    sentences = "; ".join(f"layers.{i}.norm.weight: {describe_drift(holders)}" for i in range(5))
    assert "odd ones by majority: [7777]" in ErrorRecord.of(DriftError(sentences)).message

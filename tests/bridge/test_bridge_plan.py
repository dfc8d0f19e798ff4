"""The plan of an edge against its definition, rank by rank and sample by sample (M16)."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.bridge.bridge_plan import BridgePlan, Message
from holdfast.errors import LayoutError
from holdfast.parallel.layout import Layout
from tests.bridge.steps import random_layout

WIDTHS = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 4), (4, 2), (6, 2), (3, 3), (1, 4)]


def random_ends(seed: int) -> tuple[Layout, Layout]:
    """Two layouts whose data widths divide each other: on the same ranks, or on disjoint ones."""
    choose = random.Random(seed)
    widths = choose.choice(WIDTHS)
    num_ranks = [dp * choose.choice((1, 2, 3, 4, 6)) for dp in widths]
    if choose.random() < 0.5:
        num_ranks = [max(widths) * choose.choice((1, 2, 4))] * 2
        spans = [range(5, 5 + num_ranks[0])] * 2
    else:
        spans = [range(num_ranks[0]), range(num_ranks[0], sum(num_ranks))]
    source, destination = (
        random_layout(choose, span, dp) for span, dp in zip(spans, widths, strict=True)
    )
    return source, destination


def of_stage(layout: Layout, stage: int) -> dict[int, dict[str, int]]:
    """The ranks of a stage and their coordinates."""
    at = {rank: layout.coordinate(rank) for rank in layout.ranks}
    return {rank: place for rank, place in at.items() if place["pp"] == stage}


def samples(dp: int, num_ranks: int, num_samples: int) -> set[int]:
    """The contiguous block of a data rank."""
    each = num_samples // num_ranks
    return set(range(dp * each, (dp + 1) * each))


def load(messages: Iterable[Message]) -> Counter[int]:
    """How many messages each rank sends to others."""
    return Counter(m.giver for m in messages if m.giver != m.taker)


@given(st.integers(0, 10**9))
def test_every_rank_takes_its_samples_once_from_a_rank_that_has_them(seed: int) -> None:
    """Forward and backward, for random layouts of both ends."""
    source, destination = random_ends(seed)
    plan = BridgePlan(source, destination)
    num_samples = source.dp * destination.dp
    givers, takers = of_stage(source, source.pp - 1), of_stage(destination, 0)
    num_pieces = len(plan.pieces)
    piece = [samples(i, num_pieces, num_samples) for i in range(num_pieces)]
    for rank, at in takers.items():
        taken = [m for m in plan.activations if m.taker == rank]
        order = [sample for m in taken for sample in sorted(piece[m.piece])]
        assert order == sorted(samples(at["dp"], destination.dp, num_samples))
        for m in taken:
            held = samples(givers[m.giver]["dp"], source.dp, num_samples)
            assert piece[m.piece] <= held
            own = samples(givers[rank]["dp"], source.dp, num_samples) if rank in givers else set()
            assert (m.giver == rank) == (piece[m.piece] <= own)
    for rank, at in givers.items():
        taken = [m for m in plan.gradients if m.taker == rank]
        order = [(sample, m.cp) for m in taken for sample in sorted(piece[m.piece])]
        assert len(order) == len(set(order))
        held = samples(at["dp"], source.dp, num_samples)
        assert set(order) == {(s, cp) for s in held for cp in range(destination.cp)}
        assert [m.piece for m in taken] == sorted(m.piece for m in taken)
        for first, second in itertools.pairwise(taken):
            assert first.piece < second.piece or first.cp < second.cp
        for m in taken:
            there = takers[m.giver]
            assert there["cp"] == m.cp
            assert piece[m.piece] <= samples(there["dp"], destination.dp, num_samples)
            own = takers.get(rank)
            has_it = own is not None and (own["dp"], own["cp"]) == (there["dp"], there["cp"])
            assert (m.giver == rank) == has_it
    assert {m.taker for m in plan.activations} == set(takers)
    assert {m.taker for m in plan.gradients} == set(givers)


@given(st.integers(0, 10**9))
def test_replicas_send_equally_often(seed: int) -> None:
    """What a rank does not have itself comes from the replicas in turns."""
    source, destination = random_ends(seed)
    plan = BridgePlan(source, destination)
    sent = load(plan.activations)
    for dp in range(source.dp):
        each = [sent[rank] for by_tp in plan.givers[dp] for rank in by_tp]
        assert max(each) - min(each) <= 1
    sent = load(plan.gradients)
    for by_cp in plan.takers:
        for by_tp in by_cp:
            each = [sent[rank] for rank in by_tp]
            assert max(each) - min(each) <= 1


@given(st.integers(0, 10**9))
def test_two_ranks_exchange_at_most_one_piece_in_each_direction(seed: int) -> None:
    """Which is why the order of messages between two ranks is never in question."""
    source, destination = random_ends(seed)
    plan = BridgePlan(source, destination)
    for messages in (plan.activations, plan.gradients):
        assert max(Counter((m.giver, m.taker) for m in messages).values()) == 1


def test_widths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"dp=2 .* dp=3 "):
        BridgePlan(Layout(dp=2), Layout(dp=3, ranks=(2, 3, 4)))


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, holdfast.bridge as b; b.BridgePlan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""A mistake, a missing rank or a dead one at either end is an error on every rank of the edge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Replicate

from holdfast.bridge import Bridge, Bridged, parcels
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.parallel import Layout, ModuleGroups, ModuleLayouts
from tests.harness import RankContext, run_ranks

LAYOUTS = ModuleLayouts(
    {"vision": Layout(tp=2), "language": Layout(dp=2, ranks=(2, 3))},
    edges=[("vision", "language")],
)
GOOD = (torch.ones(4, 3), [1, 3])
COUNTED = (torch.ones(4, 3), torch.tensor([1, 3]))
MISTAKES: dict[str, tuple[int, Any, list[str]]] = {
    "counts do not add up": (
        1,
        (torch.ones(5, 3), [1, 3]),
        [
            "1 of 4 ranks failed (forward 1 of vision -> language): rank 1:",
            "Module 'vision' on rank 1: counts of 2 samples add up to 4 tokens",
            "shape (5, 3)",
        ],
    ),
    "no dim of tokens": (0, (torch.ones(()), [1]), ["'vision' on rank 0", "shape ()"]),
    "samples cannot be shared out": (
        0,
        (torch.ones(4, 3), [1, 2, 1]),
        ["'vision' on rank 0: 3 samples cannot be shared out", "2 data ranks of 'language'"],
    ),
    "another dtype": (
        1,
        (torch.ones(4, 3).double(), [1, 3]),
        ["'vision' -> 'language': tokens of different dtype: float32 on rank 0; float64 on rank 1"],
    ),
    "another width": (
        1,
        (torch.ones(4, 5), [1, 3]),
        ["tokens with different features: (3,) on rank 0; (5,) on rank 1"],
    ),
    "another number of samples": (
        1,
        (torch.ones(4, 3), [1, 3, 0, 0]),
        ["data rank 0 of 'vision': different numbers of samples: 2 on rank 0; 4 on rank 1"],
    ),
    "other samples": (1, (torch.ones(4, 3), [3, 1]), ["different counts of tokens", "on rank 1"]),
    "other samples of the same sums": (
        1,
        (torch.ones(4, 3), [1, 0, 1, 2]),
        ["different counts of tokens", "on rank 1"],
    ),
    "a gradient on one replica": (
        0,
        (torch.ones(4, 3, requires_grad=True), [1, 3]),
        ["a gradient needed on some of them only: True on rank 0; False on rank 1"],
    ),
    "no tokens": (0, (None, [1, 3]), ["'vision' on rank 0", "got NoneType and list"]),
    "no counts": (1, (torch.ones(4, 3), None), ["'vision' on rank 1", "got Tensor and NoneType"]),
    "a list of tokens": (1, ([1.0], [1]), ["'vision' on rank 1", "got list and list"]),
    "tokens where there are none": (
        3,
        (torch.ones(4, 3), [1, 3]),
        ["'vision' on rank 3: the bridge to 'language' got tokens", "call it without"],
    ),
    "counts where there are no tokens": (
        2,
        (None, [1, 3]),
        ["'vision' on rank 2: the bridge to 'language' got tokens or counts", "call it without"],
    ),
    "whole numbers as tokens": (
        1,
        (torch.ones(4, 3, dtype=torch.int64), [1, 3]),
        ["'vision' on rank 1: tokens are of torch.int64"],
    ),
    "tokens in two parts": (
        1,
        (torch.ones(4, 3).to_sparse(), [1, 3]),
        ["'vision' on rank 1: tokens are a Tensor of layout torch.sparse_coo", "to_dense()"],
    ),
    "declared tokens": (
        1,
        (torch.ones(4, 3), [1, 3]),
        ["'vision' on rank 1: tokens are a DTensor of layout", "full_tensor()"],
    ),
    "fractions as counts": (1, (torch.ones(4, 3), [1.0, 3.0]), ["rank 1: counts must be integers"]),
    "a float tensor as counts": (
        0,
        (torch.ones(4, 3), torch.tensor([1.0, 3.0])),
        ["rank 0: counts must be integers", "torch.float32"],
    ),
    "a matrix of counts": (0, (torch.ones(4, 3), torch.ones(1, 2).int()), ["shape (1, 2)"]),
    "one count for all": (0, (torch.ones(4, 3), torch.tensor(4)), ["torch.int64 with shape ()"]),
    "less than nothing": (0, (torch.ones(4, 3), [5, -1]), ["rank 0: sample 1 has -1 tokens"]),
}
SAME_SUMS = {"other samples of the same sums": (torch.ones(4, 3), [0, 1, 2, 1])}
"""What the other replica gives where that is not `GOOD`."""


def caught(action: Callable[[], Any]) -> tuple[str, str]:
    """Class and text of what an action raises."""
    try:
        action()
    except HoldfastError as error:
        return type(error).__name__, " ".join(str(error).split())
    return "", ""


def mistakes(rank: RankContext) -> list[tuple[str, str]]:
    """The error of each mistake on this rank; after each one a forward that works."""
    texts = []
    with ModuleGroups.create(LAYOUTS) as groups:
        for name, (wrong, arguments, _) in MISTAKES.items():
            bridge = Bridge(groups, "vision", "language")
            good = SAME_SUMS.get(name, GOOD) if groups.has("vision") else (None, None)
            chosen = arguments if rank.rank == wrong else good
            if name == "declared tokens" and rank.rank == wrong:
                mesh = groups["vision"].mesh("tp")
                chosen = (DTensor.from_local(chosen[0], mesh, [Replicate()]), chosen[1])
            texts.append(caught(lambda b=bridge, c=chosen: b(*c)))
            bridged = bridge(*(COUNTED if groups.has("vision") else (None, None)))
            if bridged.tokens is not None:
                assert bridged.tokens.shape == ((1, 3), (3, 3))[rank.rank - 2]
    return texts


def test_a_mistake_on_one_rank_is_raised_on_all() -> None:
    """Naming rank and module; all ranks are in step for the next forward."""
    for texts in run_ranks(4, mistakes).results:
        for (name, text), (mistake, (_, _, parts)) in zip(texts, MISTAKES.items(), strict=True):
            assert name == "ConfigError", (mistake, text)
            for part in parts:
                assert part in text, (mistake, part, text)


def no_grad_on_one(rank: RankContext) -> tuple[str, str]:
    with ModuleGroups.create(LAYOUTS) as groups:
        bridge = Bridge(groups, "vision", "language")
        with torch.set_grad_enabled(rank.rank != 2):
            tokens = torch.ones(4, 3, requires_grad=True)
            return caught(lambda: bridge(*((tokens, [1, 3]) if rank.rank < 2 else ())))


def test_evaluation_on_some_ranks_only_is_refused() -> None:
    """The backward would wait for them."""
    for name, text in run_ranks(4, no_grad_on_one).results:
        assert name == "ConfigError"
        assert "ranks 0, 1 need the gradient" in text
        assert "ranks 2 run without autograd" in text


# Backwards.

TO_REPLICAS = ModuleLayouts(
    {"vision": Layout(), "language": Layout(tp=2, ranks=(1, 2))},
    edges=[("vision", "language")],
)


def crossed(rank: RankContext, bridge: Bridge) -> Bridged:
    if rank.rank == 0:
        return bridge(torch.ones(4, 3, requires_grad=True), [1, 3])
    return bridge()


def backwards(rank: RankContext) -> dict[str, tuple[str, str]]:
    """What each wrong backward raises here."""
    texts = {}
    with ModuleGroups.create(TO_REPLICAS) as groups:
        bridge = Bridge(groups, "vision", "language")
        own = torch.ones(4, 3) if rank.rank else None
        wrong: dict[str, dict[int, Any]] = {
            "shape": {1: torch.ones(3, 4)},
            "dtype": {2: torch.ones(4, 3).double()},
            "device": {1: torch.ones(4, 3, device="meta")},
            "nothing taken": {0: torch.ones(4, 3)},
            "one replica": {2: None},
        }
        for name, by_rank in wrong.items():
            bridged = crossed(rank, bridge)
            gradient = by_rank.get(rank.rank, own)
            texts[name] = caught(lambda b=bridged, g=gradient: b.backward(g))
        bridged = crossed(rank, bridge)
        if rank.rank == 1:
            texts["forward again"] = caught(bridge)
        else:
            texts["forward again"] = caught(lambda: bridged.backward(own))
        tokens = torch.ones(4, 3, requires_grad=True) if rank.rank == 0 else None
        bridged = bridge(tokens, [1, 3]) if tokens is not None else bridge()
        bridged.backward(own if own is None else own.to_sparse())
        assert tokens is None or torch.equal(tokens.grad, torch.ones(4, 3))
    return texts


def test_a_wrong_backward_is_raised_on_all() -> None:
    """With the rank's name, and no gradient passes for another."""
    for texts in run_ranks(3, backwards).results:
        kind, text = texts["shape"]
        assert kind == "ConfigError"
        assert "'language' on rank 1: the gradient is a Tensor of torch.float32 on cpu" in text
        assert "with shape (3, 4)" in text
        assert "on rank 1: the gradient is a Tensor of torch.float32 on meta" in texts["device"][1]
        assert "torch.float64" in texts["dtype"][1]
        assert "'language' on rank 2" in texts["dtype"][1]
        assert "'language' on rank 0 took no tokens" in texts["nothing taken"][1]
        kind, text = texts["one replica"]
        assert kind == "GroupError"
        assert "replicas 1, 2 of 'language' only ranks 1 have a gradient" in text
        kind, text = texts["forward again"]
        assert kind == "GroupError"
        assert "rank 1 in phase 'forward 7 of vision -> language'" in text
        assert "ranks 0, 2 in phase 'backward 6 of vision -> language'" in text


def no_edge(rank: RankContext) -> list[tuple[str, str]]:
    layouts = ModuleLayouts(
        {"vision": Layout(), "language": Layout(ranks=(1,)), "speech": Layout(ranks=(2,))},
        edges=[("vision", "language")],
    )
    with ModuleGroups.create(layouts) as groups:
        return [
            caught(lambda: Bridge(groups, "language", "vision")),
            caught(lambda: Bridge(groups, "vision", "language")),
        ]


def test_a_bridge_needs_an_edge_and_one_of_its_modules() -> None:
    results = run_ranks(3, no_edge).results
    for (kind, text), _ in results:
        assert kind == "GroupError"
        assert "Unknown edge language -> vision" in text
    assert [kind for _, (kind, _) in results] == ["", "", "GroupError"]


# Ranks that do not answer.


LATE_S = 3.0
"""The deadline when a rank does not answer; what the others do in it takes some milliseconds."""


def dies(rank: RankContext, victim: int, moment: str) -> tuple[str, str, float]:
    """What this rank raises when the victim dies or stops, and how long it took."""
    store = PrefixStore("over", _get_default_store())
    others = [f"{other}" for other in range(rank.num_ranks) if other != victim]
    with ModuleGroups.create(LAYOUTS, timeout_s=60) as groups:
        bridge = Bridge(groups, "vision", "language")
        is_victim = rank.rank == victim
        groups.edge("vision", "language").control.data_timeout_s = LATE_S
        groups.edge("vision", "language").control.timeout_s = LATE_S / 2

        def end(*_: Any, **__: Any) -> None:
            if moment == "stops in a message":
                store.wait(others)  # until they have raised
            os._exit(3)

        leaf = torch.ones(4, 3, requires_grad=True)
        arguments = (leaf, [1, 3]) if groups.has("vision") else ()
        if is_victim and moment == "before the forward":
            end()
        if is_victim and "message" in moment:
            parcels.dist.batch_isend_irecv = end
        started = time.monotonic()
        try:
            bridged = bridge(*arguments)
            if is_victim:
                end()
            bridged.backward(None if bridged.tokens is None else torch.ones_like(bridged.tokens))
        except DeadlineError as error:
            store.set(f"{rank.rank}", "raised")
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", 0.0


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("before the forward", 3),
        ("in a message", 0),
        ("before the backward", 3),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("before the forward", 0), ("in a message", 3), ("before the backward", 0))
        ),
    ],
)
def test_a_dead_rank_is_named_on_all_others(victim: int, moment: str) -> None:
    """Within the deadline, wherever it died; no rank hangs, and none goes on without it."""
    outcome = run_ranks(4, dies, victim, moment, expect_failure=True, timeout_s=60)
    assert outcome.failed == [victim]
    for rank, result in enumerate(outcome.results):
        if rank != victim:
            kind, text, seconds = result
            assert kind == "DeadlineError", (rank, text)
            assert f"rank {victim} " in text or f"ranks [{victim}]" in text, text
            assert seconds < 30


def test_a_rank_that_stops_in_the_middle_is_named_in_time() -> None:
    """It has agreed to the forward, and sends nothing: the wait itself has a deadline."""
    outcome = run_ranks(4, dies, 3, "stops in a message", expect_failure=True, timeout_s=60)
    assert outcome.failed == [3]
    results = [result for result in outcome.results if result is not None]
    assert [kind for kind, _, _ in results] == ["DeadlineError"] * 3
    texts = [text for _, text, _ in results]
    assert all("rank 3" in text or "ranks [3]" in text for text in texts), texts
    assert any("forward 1 of vision -> language, on rank" in text for text in texts)
    assert any("to rank 3 (language) did not complete" in text for text in texts)
    assert all(seconds < 30 for _, _, seconds in results)

"""A forward over a bridge without its backward is refused by name, on all ranks (I1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast import Bridge, Layout, ModuleGroups, ModuleLayouts
from holdfast.errors import ConfigError
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.test_divisors import Run, truth

DIVISORS: dict[str, int | None] = {"vision": 1, "language": 1}


def forgotten(context: RankContext, is_colocated: bool) -> list[str]:
    """Each way to leave a forward without a backward, and a good step after it."""
    language = Layout(tp=2) if is_colocated else Layout(ranks=(2,))
    layouts = ModuleLayouts(
        {"vision": Layout(dp=2), "language": language, "other": Layout(ranks=(3,))}
        if not is_colocated
        else {"vision": Layout(dp=2), "language": language},
        edges=[("vision", "language")],
    )
    errors = []
    if context.rank not in layouts.union.ranks:
        return []
    with ModuleGroups.create(layouts) as groups:
        has_edge = groups.has("vision") or groups.has("language")
        bridge: Any = Bridge(groups, "vision", "language") if has_edge else None
        run = Run(groups, bridge, {**DIVISORS, "other": None})

        def train() -> None:
            if has_edge:
                run.backward(0)
            run.optimizer.step()

        for case in ("step", "dropped", "evaluated"):
            if has_edge:
                with torch.set_grad_enabled(case != "evaluated"):
                    run.forward(1)
            work = run.optimizer.unfinished_work()
            assert (work is not None) == (has_edge and case != "evaluated")
            assert not has_edge or bridge.unfinished_work() == work
            if case == "step":
                with pytest.raises(ConfigError) as caught:
                    train()
                errors.append(str(caught.value))
            if case == "dropped":
                run.optimizer.drop_gradients()
            assert run.optimizer.unfinished_work() is None
        # A batch may be dropped between a forward and its backward, as by `zero_grad`.
        train()
        assert run.optimizer.unfinished_work() is None
        assert not has_edge or run.difference(truth("", 1)) < 1e-12
    return errors


@pytest.mark.parametrize("is_colocated", [False, True])
def test_a_forward_over_a_bridge_without_its_backward_is_refused(is_colocated: bool) -> None:
    """I1: named on all ranks, also on those of no edge; the next step equals one process."""
    results = run_ranks(2 if is_colocated else 4, forgotten, is_colocated).results
    first, *others = results
    assert all(other == first for other in others)
    (text,) = first
    assert "1 forward over the bridge vision -> language waits for a backward" in text
    assert "drop_gradients() on all ranks" in text

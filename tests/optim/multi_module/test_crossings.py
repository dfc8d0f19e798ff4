"""A forward over a bridge without its backward is refused by name, on all ranks (I1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Bridge, Checkpointer, Layout, ModuleGroups, ModuleLayouts, OptimizerState
from holdfast.errors import ConfigError, HoldfastError
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.test_divisors import Run, net, row_losses, rows_of, sgd, truth

DIVISORS: dict[str, int | None] = {"vision": 1, "language": 1}


def forgotten(context: RankContext, is_colocated: bool, root: str) -> list[str]:
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
            with run.optimizer.microbatch(is_last=True):
                if has_edge:
                    run.forward(0)[0].backward()  # type: ignore[no-untyped-call]
            run.optimizer.step()

        for case in ("step", "dropped", "evaluated"):
            if has_edge:
                with torch.set_grad_enabled(case != "evaluated"):
                    run.forward(1)
            work = run.optimizer.unfinished_work()
            assert (work is not None) == (has_edge and case != "evaluated")
            assert not has_edge or bridge.unfinished_work() == work
            state = {
                name: OptimizerState(optimizer, run.models[name])
                for name, optimizer in run.optimizer.optimizers_by_module().items()
            }
            checkpointer = Checkpointer(root, groups=groups.union)
            if case == "evaluated":
                checkpointer.save(1, state)
            else:
                with pytest.raises(HoldfastError, match="over the bridge vision -> language waits"):
                    checkpointer.save(1, state)
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
def test_a_forward_over_a_bridge_without_its_backward_is_refused(
    tmp_path: Path, is_colocated: bool
) -> None:
    """I1, I3: by a step and a save, on all ranks, also on those of no edge; then as one process."""
    results = run_ranks(2 if is_colocated else 4, forgotten, is_colocated, str(tmp_path)).results
    first, *others = results
    assert all(other == first for other in others)
    (text,) = first
    assert "1 forward over the bridge vision -> language waits for a backward" in text
    assert "drop_gradients() on all ranks" in text


class Trouble(Exception):
    """Raised by a test's model."""


def boom(*_: object) -> None:
    raise Trouble("boom")


def in_trouble(context: RankContext, is_colocated: bool) -> list[str]:
    """A microbatch that fails on one rank, in a module's forward or backward, and a good step."""
    layouts = ModuleLayouts(
        {"vision": Layout(dp=2), "language": Layout(dp=2), "more": Layout(dp=2)}
        if is_colocated
        else {
            "vision": Layout(dp=2),
            "language": Layout(ranks=(2,)),
            "more": Layout(ranks=(3,)),
        },
        edges=[("vision", "language"), ("language", "more")],
    )
    divisors: dict[str, int | None] = dict.fromkeys(layouts, layouts["more"].dp)
    errors = []
    with ModuleGroups.create(layouts, timeout_s=30) as groups:
        bridges = {e: Bridge(groups, *e) for e in layouts.edges if any(map(groups.has, e))}
        run = Run(groups, None, divisors)

        def microbatch(step: int, *, is_last: bool) -> None:
            with run.optimizer.microbatch(is_last=is_last):
                tokens = counts = None
                anchors = torch.zeros((), dtype=torch.float64)
                for (source, _), bridge in bridges.items():
                    if source == "vision" and groups.has(source):
                        own = groups[source]
                        tokens = rows_of(step).chunk(own.size("dp"))[own.index("dp")]
                    if groups.has(source) and tokens is not None:
                        tokens = run.models[source](tokens)
                        counts = [1] * len(tokens)
                    bridged = bridge(tokens, counts) if groups.has(source) else bridge()
                    anchors = anchors + bridged.anchor
                    tokens = bridged.tokens
                if groups.has("more"):
                    anchors = anchors + row_losses(run.models["more"](tokens)).mean() / 2
                anchors.backward()  # type: ignore[no-untyped-call]

        for module, layout in layouts.items():
            for hook in ("register_forward_hook", "register_full_backward_pre_hook"):
                for at in (0, 1):
                    is_here = context.rank == layout.ranks[-1]
                    handle = getattr(run.models[module], hook)(boom) if is_here else None
                    if at:
                        if handle is not None:
                            handle.remove()
                        microbatch(1, is_last=False)
                        if is_here:
                            handle = getattr(run.models[module], hook)(boom)
                    # Where it occurred it keeps its type.
                    with pytest.raises(Trouble if is_here else HoldfastError) as caught:
                        microbatch(1, is_last=bool(at))
                    if handle is not None:
                        handle.remove()
                    text = str(caught.value)
                    assert "boom" in text
                    assert is_here or f"rank {layout.ranks[-1]}" in text
                    errors.append(text)
                    if at and "forward" in hook:
                        with pytest.raises(ConfigError, match="a microbatch has failed"):
                            run.optimizer.step()
                    else:
                        run.optimizer.drop_gradients()
        for is_last in (False, True):
            microbatch(0, is_last=is_last)
        run.optimizer.step()
        models = {name: net(name) for name in layouts}
        trained = [p for model in models.values() for p in model.parameters()]
        outputs = models["more"](models["language"](models["vision"](rows_of(0))))
        row_losses(outputs).mean().backward()
        sgd(trained).step()
        assert run.difference(models) < 1e-12
    return errors


@pytest.mark.parametrize("is_colocated", [False, True])
def test_an_error_on_one_rank_is_raised_on_all_and_training_goes_on(is_colocated: bool) -> None:
    """I1: also on ranks that wait in another bridge, and that have finished the microbatch."""
    first, *others = run_ranks(2 if is_colocated else 4, in_trouble, is_colocated).results
    assert all(len(other) == len(first) == 12 for other in others)

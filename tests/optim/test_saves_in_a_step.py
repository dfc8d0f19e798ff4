"""Saves and loads in the middle of a step, by every kind of optimizer: I3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer, ConfigError, GroupError, Layout, OptimizerState, ProcessGroups
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import Spec, layouts_of, rows_of, train_module
from tests.optim.test_settings import SIZES, SOME, Alone

BUCKETED = ("sharded", "chained")


def accumulate(alone: Alone, number: int, *, is_last: bool, inside: Any = None) -> None:
    """One microbatch."""
    with alone.around(is_last=is_last):
        train_module(alone.trained, rows_of(number, "one"))
        if inside is not None:
            inside()


def a_step(alone: Alone, look: Callable[[str], None]) -> None:
    """A step of two microbatches; `look` is called at each place between two steps' ends."""
    accumulate(alone, 1, is_last=False, inside=lambda: look("inside"))
    look("between microbatches")
    accumulate(alone, 2, is_last=True)
    look("before the step")
    stepper: Any = alone.trained.stepper
    stepper.share_norm()
    look("in the step")
    alone.call()


def attempts(context: RankContext, kind: str, root: str) -> dict[str, list[str]]:
    """What saves and loads in the middle of a step said, by place."""
    layouts = layouts_of({"one": Spec(sizes=SIZES)})
    create: Any = ModuleGroups.create if kind == "modules" else ProcessGroups.create
    told: dict[str, list[str]] = {}
    with ExitStack() as stack:
        groups = stack.enter_context(create(layouts if kind == "modules" else Layout(**SIZES)))
        undisturbed, alone = Alone(kind, groups), Alone(kind, groups)
        model, own = alone.trained.model, getattr(groups, "union", groups)
        state = {"optimizer": OptimizerState(alone.optimizer, model), "model": model}
        checkpointer = stack.enter_context(Checkpointer(root, groups=own))
        for each in (undisturbed, alone):
            each.step(0)
        checkpointer.save(0, state)

        def look(place: str) -> None:
            for call in (lambda: checkpointer.save(9, state), lambda: checkpointer.load(state)):
                try:
                    call()
                except ConfigError as error:
                    told.setdefault(place, []).append(str(error))

        # A plain optimizer's gradients are plain tensors until its step has begun.
        a_step(undisturbed, lambda place: None)
        a_step(alone, look if kind != "reduced" else (lambda p: p == "in the step" and look(p)))
        assert checkpointer.latest() == 0
        ours, theirs = alone.values(), undisturbed.values()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        checkpointer.save(1, state)
        if kind in BUCKETED:
            calls: list[Callable[[], object]] = [
                lambda: checkpointer.save(2, state),
                lambda: accumulate(alone, 3, is_last=False),
            ]
            with pytest.raises(GroupError, match="out of sync"):
                calls[context.rank]()
            look("on one rank")
            if context.rank:
                with pytest.raises(ConfigError, match="not one of all ranks"):
                    accumulate(alone, 3, is_last=False)
        if kind == "fsdp":  # a step of the plain optimizer is a step, too
            accumulate(alone, 3, is_last=True)
            look("before a plain step")
            alone.optimizer.step()
            checkpointer.save(2, state)
            checkpointer.load(state)
        # Last, as it breaks the groups.
        refuse_after_an_interrupt(undisturbed, checkpointer)
        # What the refusal says to do.
        groups_again = stack.enter_context(
            create(layouts if kind == "modules" else Layout(**SIZES))
        )
        again = Alone(kind, groups_again)
        model_again = again.trained.model
        with Checkpointer(root, groups=getattr(groups_again, "union", groups_again)) as reader:
            reader.load(
                {"optimizer": OptimizerState(again.optimizer, model_again), "model": model_again},
                step=1,
            )
        loaded = again.values()
        assert all(torch.equal(loaded[name], ours[name]) for name in ours)
        again.step(3)
    return told


def refuse_after_an_interrupt(alone: Alone, checkpointer: Checkpointer) -> None:
    """Interrupt an update on all ranks, when each has updated what is its own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    optimizer: Any = alone.optimizer
    for inner in getattr(optimizer, "inners", [optimizer]):
        inner.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        alone.step(4)
    model = alone.trained.model
    state = {"optimizer": OptimizerState(optimizer, model), "model": model}
    for call in (lambda: alone.step(5), lambda: checkpointer.save(9, state)):
        with pytest.raises(ConfigError, match="the groups and the model again, and load the last"):
            call()


@pytest.mark.parametrize("kind", SOME)
def test_a_save_or_load_in_the_middle_of_a_step_is_refused(kind: str, tmp_path: Path) -> None:
    """I3: by name, with what to do; the step then ends as if there had been no attempt."""
    first, second = run_ranks(2, attempts, kind, str(tmp_path)).results
    places = ["inside", "between microbatches", "before the step", "in the step"]
    places = places[-1:] if kind == "reduced" else places
    more = {"fsdp": ["before a plain step"]} | {key: ["on one rank"] for key in BUCKETED}
    for told in (first, second):
        assert list(told) == places + more.get(kind, [])
        for save, load in told.values():
            assert "save in the middle of a step would lose its work" in save
            assert "load in the middle of a step would be mixed with its work" in load
            assert "drop_gradients()" in save
            assert "step()" in save or "an error ended the last microbatch" in save

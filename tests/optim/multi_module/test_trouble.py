"""Trouble on any single rank of any module is that of all: not finite, a failed phase, scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.errors import ConfigError, HoldfastError
from holdfast.optim import LossScaler, MultiModuleOptimizer, StepOutcome
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import (
    Spec,
    Trained,
    Twin,
    build,
    layouts_of,
    momentum,
    rows_of,
    whole_values,
)

SPECS: dict[str, dict[str, Spec]] = {
    "disjoint": {
        "vision": Spec(sizes={"dp": 2, "ep": 2, "ranks": (2, 3)}, kind="fsdp"),
        "language": Spec(sizes={"tp": 2, "ranks": (0, 1)}, kind="chained"),
    },
    "colocated": {
        "vision": Spec(sizes={"dp": 4}, options={"stage": 2}),
        "speech": Spec(sizes={"dp": 4}, kind="frozen"),
        "language": Spec(sizes={"dp": 2, "pp": 2}, kind="reduced", empty_stages=(1,)),
        "other": Spec(sizes={"dp": 2, "cp": 2, "ep": 2}, kind="chained"),
    },
}
VALUES = (math.nan, math.inf, -math.inf)


class Run:
    """All modules of this rank, and steps of them."""

    def __init__(self, groups: ModuleGroups, specs: Mapping[str, Spec], **options: Any) -> None:
        self.groups = groups
        self.specs = specs
        self.modules: dict[str, Trained] = build(groups, specs, make=momentum)
        self.optimizer = MultiModuleOptimizer(
            groups, {name: each.stepper for name, each in self.modules.items()}, **options
        )

    def backward(
        self, number: int, *, scale: float = 1.0, skip: str = "", contexts: bool = True
    ) -> None:
        around = self.optimizer.microbatch(is_last=True) if contexts else nullcontext()
        with around:
            for name, each in self.modules.items():
                each.is_active = skip not in (name, "*")
                loss = each.loss(rows_of(number, name))
                if loss.requires_grad and each.is_active:
                    torch.autograd.backward(loss * scale)

    def step(
        self, number: int, *, skip: str = "", contexts: bool = True, **options: Any
    ) -> StepOutcome:
        scaler: Any = options.get("scaler")
        if isinstance(scaler, dict):
            scaler = next(iter(scaler.values()), None)
        scale = 1.0 if scaler is None else scaler.scale
        self.backward(number, scale=scale, skip=skip, contexts=contexts)
        return self.optimizer.step(**options)

    def values(self) -> dict[str, dict[str, Tensor]]:
        self.optimizer.synchronize()
        return {name: whole_values(each.model) for name, each in self.modules.items()}


@contextmanager
def runs(**options: Any) -> Iterator[Iterator[tuple[str, Run]]]:
    """A run for each of the mixes."""

    def each() -> Iterator[tuple[str, Run]]:
        for mix, specs in SPECS.items():
            with ModuleGroups.create(layouts_of(specs, tag=f"{mix}: ")) as groups:
                yield mix, Run(groups, specs, **options)

    yield each()


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(one[m][name], other[m][name]) for m in one for name in one[m])


def plain(outcome: StepOutcome) -> str:
    return repr(asdict(outcome))  # a NaN does not equal itself


def poisoned(context: RankContext) -> list[Any]:
    report: list[Any] = []
    with runs() as mixes:
        for mix, run in mixes:
            scaler = LossScaler(initial=2.0**40, growth_interval=1000)
            assert not run.step(0, scaler=scaler).skipped
            before = run.values()
            cases = [
                (module, rank, VALUES[(rank + i) % 3])
                for module, spec in SPECS[mix].items()
                if spec.kind != "frozen"
                for i, rank in enumerate(run.groups.layouts[module].ranks)
                if run.groups.layouts[module].coordinates(rank)["pp"] not in spec.empty_stages
            ]
            for number, (module, rank, value) in enumerate(cases):
                with poison(run, module, value, here=rank == context.rank):
                    outcome = run.step(number, scaler=scaler, max_norm=1.0)
                assert outcome.skipped
                assert math.isnan(outcome.norm)
                assert not outcome.clipped
                assert outcome.bad_modules == (module,)
                assert set(outcome.bad_ranks) <= set(run.groups.layouts[module].ranks)
                assert outcome.bad_ranks
                for name, norm in outcome.module_norms.items():
                    assert math.isnan(norm) == (name == module)
                report.append((plain(outcome), scaler.scale))
            assert scaler.scale == 2.0 ** (40 - len(cases))
            assert equal(before, run.values())
            good = run.step(1, scaler=scaler)
            assert not good.skipped
            assert math.isfinite(good.norm)
            report.append(plain(good))
    return report


@contextmanager
def poison(run: Run, module: str, value: float, *, here: bool) -> Iterator[None]:
    """A number that is not finite comes into gradients of a module on one rank."""
    if here:
        run.modules[module].model.poison = value
    yield
    if here:
        run.modules[module].model.poison = None


@pytest.mark.slow
def test_a_value_that_is_not_finite_on_any_rank_of_any_module_stops_all() -> None:
    """M13, M14: one decision before any scale is updated; no module goes on alone."""
    first, *others = run_ranks(4, poisoned).results
    assert len(first) > 10
    assert all(other == first for other in others)


PHASES = ("gradients", "update")


def failing(context: RankContext) -> list[str]:
    """Every module's update, or its phase before, on each of its ranks in turn."""
    report = []
    with runs() as mixes:
        for _, run in mixes:
            run.step(0)
            for number, module in enumerate(run.groups.layouts):
                if run.specs[module].kind == "frozen":
                    continue
                for index, rank in enumerate(run.groups.layouts[module].ranks):
                    # In turn: each module and, over the modules, each rank fails in both.
                    phase = PHASES[(number + index) % 2]
                    before = run.values()
                    with (
                        broken(run, module, phase, here=rank == context.rank),
                        pytest.raises(HoldfastError) as caught,
                    ):
                        # Without contexts it is `step` that reduces, where a rank is missing.
                        run.step(1, contexts=phase == "update")
                    text = str(caught.value)
                    assert f"rank {rank}: module '{module}'" in text
                    assert phase in text
                    assert "boom" in text
                    if phase == "gradients":
                        assert equal(before, run.values())
                    report.append(text)
                    assert not run.step(2).skipped
            report.append(plain(run.step(3)))
    return report


@contextmanager
def broken(run: Run, module: str, phase: str, *, here: bool) -> Iterator[None]:
    """One rank's update raises, or what it does before its gradients are reduced."""
    if not here:
        yield
        return
    each = run.modules[module]
    stepper: Any = each.stepper
    owner = stepper["expert"] if each.spec.kind == "chained" else stepper
    if phase == "update":
        inner = getattr(owner, "inner", run.optimizer[module])
        handle = inner.register_step_pre_hook(boom)
        yield
        handle.remove()
        return
    target, name = {
        "fsdp": (each.sharded, "check_optimizer"),
        "reduced": (owner, "_reduce"),
    }.get(each.spec.kind, (getattr(owner, "_watch", None), "check"))
    was = getattr(target, name)

    def fail(*args: object) -> None:
        if each.spec.kind == "reduced":  # after its collectives, which nothing here can make up for
            was()
        boom()

    setattr(target, name, fail)
    yield
    setattr(target, name, was)


def boom(*_: object) -> None:
    raise OSError("boom")


@pytest.mark.slow
def test_a_failure_of_one_rank_in_any_phase_is_raised_on_all_and_the_next_step_works() -> None:
    """M15: also before gradients are reduced, where the module's other ranks are on their way."""
    first, *others = run_ranks(4, failing).results
    assert len(first) == 18
    assert all(other == first for other in others)


NUM_OWN = 3
"""Microbatches of a module in a step."""


def in_own_microbatches(
    context: RankContext, modules: Mapping[str, Trained], number: int, fault: tuple[Any, ...] = ()
) -> dict[str, str]:
    """A step's microbatches, entered for each module alone; what they raised, by module.

    `fault` is a rank, the module and the microbatch in which it fails, and the place.
    """
    raised: dict[str, str] = {}
    for name, each in modules.items():
        entry: Any = each.sharded or each.stepper
        try:
            for part, rows in enumerate(rows_of(number, name).chunk(NUM_OWN)):
                place = fault[3] if fault[:3] == (context.rank, name, part) else ""
                with entry.microbatch(is_last=part == NUM_OWN - 1):
                    if place == "forward":
                        boom()
                    loss = each.loss(rows) / NUM_OWN
                    if place == "backward":
                        loss = Failing.apply(loss)
                    torch.autograd.backward(loss)
                    if place == "end":
                        boom()
        except (OSError, HoldfastError) as error:
            raised[name] = f"{type(error).__name__}: {error}"
    return raised


class Failing(torch.autograd.Function):
    """The same values; the backward raises when it is half done."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        boom()


def alone(context: RankContext) -> list[str]:
    """An error of one rank in a microbatch of one module, entered for that module alone."""
    report = []
    specs = {
        "whole": Spec(sizes={"dp": 2}, kind="fsdp"),
        "shares": Spec(sizes={"dp": 2}, options={"stage": 2}),
        "once": Spec(sizes={"dp": 2}),
        "both": Spec(sizes={"dp": 2}, kind="chained", options={"stage": 2}),
    }
    places = ("forward", "backward", "end")
    twin = Twin(specs)
    with ModuleGroups.create(layouts_of(specs)) as groups:
        modules = build(groups, specs)
        optimizer = MultiModuleOptimizer(groups, {n: m.stepper for n, m in modules.items()})
        assert in_own_microbatches(context, modules, 0) == {}
        optimizer.step()
        twin.step({name: rows_of(0, name) for name in specs})
        for step, (part, name) in enumerate(product(range(NUM_OWN), specs)):
            culprit, place = step % 2, places[(part + step) % 3]
            raised = in_own_microbatches(context, modules, 1, (culprit, name, part, place))
            assert [*raised] == [name]
            if context.rank == culprit:
                assert raised[name] == "OSError: boom"
            else:
                assert f"rank {culprit}: OSError: boom" in raised[name]
            with pytest.raises(ConfigError, match=f"module '{name}': an error ended") as refused:
                optimizer.step()
            report.append(str(refused.value))
            assert in_own_microbatches(context, modules, step) == {}
            outcome = optimizer.step()
            expected = twin.step({name: rows_of(step, name) for name in specs})
            assert outcome.norm == pytest.approx(expected[""])
            optimizer.synchronize()
            assert twin.difference(modules) < 1e-6
    return report


@pytest.mark.slow
def test_an_error_in_the_microbatch_of_one_module_is_raised_on_its_ranks() -> None:
    """M15: the module's ranks raise at once, the step of all modules refuses, and the next works.

    Before, reductions of the microbatches that followed on the other ranks waited until the limit.
    """
    first, other = run_ranks(2, alone, timeout_s=45).results
    assert first == other


def scalers(context: RankContext) -> list[Any]:
    report: list[Any] = []
    with runs() as mixes:
        for mix, run in mixes:
            trained = [m for m, spec in SPECS[mix].items() if spec.kind != "frozen"]
            own = {m: LossScaler(initial=64.0, growth_interval=2) for m in trained}
            culprit = run.groups.layouts["vision"].ranks[1]
            with poison(run, "vision", math.inf, here=context.rank == culprit):
                run.step(0, scaler=own)
            assert [each.scale for each in own.values()] == [32.0] * len(own)
            for number in range(2):
                run.step(number, scaler=own)
            assert [each.scale for each in own.values()] == [64.0] * len(own)
            before = run.values()
            # Scales that are out of sync, of modules on one rank or of ranks, stop all ranks.
            apart: dict[str, LossScaler] = dict(own)
            if context.rank == 0:
                apart[run.groups.modules[-1]] = LossScaler(initial=2.0)
                if len(trained) > len(run.groups.modules):
                    apart = {m: LossScaler(initial=2.0) for m in trained}
            for given in (apart, None if context.rank == 3 else own):
                with pytest.raises(ConfigError, match="scale") as caught:
                    run.step(3, scaler=given)
                report.append(str(caught.value))
            one = LossScaler(initial=2.0 if context.rank == 1 else 4.0)
            with pytest.raises(ConfigError, match=r"4 on ranks 0, ?2.*; 2 on rank 1"):
                run.step(3, scaler=one)
            assert one.scale in (2.0, 4.0)
            assert all(each.scale == 64.0 for each in own.values())
            assert equal(before, run.values())
            run.step(4, scaler=own)
            report.append(run.optimizer.group_modules == ())
    return report


@pytest.mark.slow
def test_scales_stay_equal_over_modules_and_differing_ones_stop_all() -> None:
    """M14: scalers of all modules get one decision; before it, different scales are an error."""
    first, *others = run_ranks(4, scalers).results
    assert all(other == first for other in others)


def settings(context: RankContext) -> list[str]:
    """What is wrong on one rank, or on all, is raised on all, and nothing is updated."""
    report = []
    with runs() as mixes:
        for mix, run in mixes:
            run.step(0)
            before = run.values()
            odd = context.rank == 2
            for options, match in (
                ({"max_norm": 1.0 if odd else 2.0}, r"differ in max_norm: 2 on ranks 0"),
                (
                    {"max_norm": -1.0 if odd else 2.0},
                    r"rank 2: max_norm must be a number of at",
                ),
                ({"count_zeros": odd}, "differ in count_zeros"),
                ({"scaler": {}} if odd else {}, "rank 2: scaler has no LossScaler"),
                (
                    {"scaler": SimpleNamespace(scale=1.0)} if odd else {},
                    "rank 2: .*not a LossS",
                ),
                ({"closure": print} if odd else {}, r"rank 2: step\(closure\)"),
            ):
                with pytest.raises(HoldfastError, match=match) as caught:
                    run.step(1, **options)
                report.append(str(caught.value))
            with pytest.raises(ConfigError, match=r"no parameter of 'vision'.*got a gradient"):
                run.step(7, skip="*")
            assert equal(before, run.values())
            inactive = run.step(5, skip="vision")
            assert inactive.inactive_modules == ("vision",)
            assert inactive.module_norms["vision"] == 0.0
            now = run.values()
            assert equal({"vision": before.get("vision", {})}, {"vision": now.get("vision", {})})
            assert not run.step(6).skipped
            report.append(mix)
    return report


def test_settings_that_are_wrong_on_one_rank_are_refused_on_all() -> None:
    """Different limits would clip differently and make copies of parameters differ."""
    first, *others = run_ranks(4, settings).results
    assert all(other == first for other in others)

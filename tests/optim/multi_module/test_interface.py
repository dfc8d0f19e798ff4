"""What is refused when it is built, schedulers, and the state of each module (M3)."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, StepLR

from holdfast import Checkpointer, MismatchError, OptimizerState
from holdfast.errors import ConfigError, GroupError, LayoutError
from holdfast.optim import (
    ChainedOptimizer,
    MultiModuleOptimizer,
    ReducedOptimizer,
    ShardedOptimizer,
    Stepper,
)
from holdfast.parallel import ModuleGroups
from holdfast.state import OnLayout
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import (
    Spec,
    Trained,
    build,
    layouts_of,
    momentum,
    rows_of,
    sgd,
    train_module,
)

SPECS = {
    "vision": Spec(sizes={"dp": 2, "ep": 2, "ranks": (0, 1)}, kind="chained"),
    "speech": Spec(sizes={"dp": 1, "ranks": (2,)}, kind="frozen"),
    "language": Spec(sizes={"dp": 2, "ranks": (3, 4)}, kind="reduced"),
}


def one_step(optimizer: MultiModuleOptimizer, modules: dict[str, Trained], step: int) -> Any:
    with optimizer.microbatch(is_last=True):
        for name, each in modules.items():
            train_module(each, rows_of(step, name))
    return optimizer.step()


def refused(context: RankContext) -> list[str]:
    """Each case is wrong on one rank, and an error on all."""
    report = []
    with ModuleGroups.create(layouts_of(SPECS)) as groups:
        modules = build(groups, SPECS)
        good: dict[str, Any] = {name: each.stepper for name, each in modules.items()}
        (own,) = groups.modules
        plain = torch.optim.SGD([{"params": []}], lr=0.1)

        def wrong(rank: int, entries: dict[str, Any], match: str, **options: Any) -> None:
            given = entries if context.rank == rank else good
            with pytest.raises((ConfigError, LayoutError), match=match) as caught:
                MultiModuleOptimizer(groups, given, **options)
            report.append(str(caught.value))

        wrong(0, {}, "rank 0: no optimizer for module 'vision', which this rank has")
        wrong(0, good | {"language": None}, "rank 0: an optimizer for module 'language', which")
        wrong(
            3,
            {own: plain},
            r"rank 3: module 'language': a SGD cannot step with other.*ReducedOptimizer",
        )
        wrong(
            1, {own: None}, r"'vision': ranks 1 differ from rank 0 in kind of optimizer: None inst"
        )
        wrong(
            4,
            {own: ReducedOptimizer(plain, groups[own], divisor=2)},
            "module 'language': ranks 4 differ from rank 3 in parameters: 0 param",
        )
        wrong(
            4,
            {own: ReducedOptimizer(plain, groups[own])},
            "module 'language': ranks 4 differ from rank 3 in divisor: 1 instead of 2",
        )
        wrong(
            3, {own: ReducedOptimizer(plain, groups.union)}, "module 'language': its optimizer is "
        )
        wrong(-1, good, "Unknown module 'ear'", loss_module="ear")
        optimizer = MultiModuleOptimizer(groups, good)
        other = next(name for name in SPECS if name != own)
        with pytest.raises(GroupError, match=f"does not have module '{other}'"):
            optimizer[other]
        if own == "speech":
            with pytest.raises(ConfigError, match="'speech' is not trained"):
                optimizer["speech"]
        hint = r"OptimizerState\(optimizer\["
        with pytest.raises(ConfigError, match=hint):
            optimizer.state_dict()
        with pytest.raises(ConfigError, match=hint):
            optimizer.load_state_dict({})
        with pytest.raises(ConfigError, match=hint):
            OptimizerState(optimizer, modules[own].model)
        with pytest.raises(ConfigError, match="cannot be"):
            copy.deepcopy(optimizer)
        optimizer.close()
        with pytest.raises(ConfigError, match=r"ranks 0-4: .*: it is closed"):
            optimizer.step()
    return report


def test_what_is_wrong_on_one_rank_is_refused_on_all() -> None:
    first, *others = run_ranks(5, refused).results
    assert all(other == first for other in others)


def shared_parameter(context: RankContext) -> None:
    """Two modules of one rank that would update the same parameter."""
    specs = {"one": Spec(sizes={"dp": 2}, kind="reduced"), "two": Spec(sizes={"dp": 2})}
    with ModuleGroups.create(layouts_of(specs)) as groups:
        modules = build(groups, specs)
        both = ReducedOptimizer(
            sgd([{"params": list(modules["two"].model.parameters())}]), groups["one"]
        )
        with pytest.raises(ConfigError, match="in the optimizers of modules 'one' and 'two'"):
            MultiModuleOptimizer(groups, {"one": both, "two": modules["two"].stepper})


def test_a_parameter_belongs_to_one_module() -> None:
    run_ranks(2, shared_parameter)


def schedules(context: RankContext) -> dict[str, list[float]]:
    """One scheduler over all modules, then one per module; torch warns of neither."""
    rates: dict[str, list[float]] = {}
    with ModuleGroups.create(layouts_of(SPECS)) as groups, warnings.catch_warnings():
        warnings.simplefilter("error")
        modules = build(groups, SPECS)
        optimizer = MultiModuleOptimizer(
            groups, {name: each.stepper for name, each in modules.items()}
        )
        assert set(optimizer.group_modules) == {m for m in groups.modules if m != "speech"}
        assert len(optimizer.group_modules) == len(optimizer.param_groups)
        by_module: dict[str, Any] = {"vision": lambda n: 0.5**n, "language": lambda n: 0.1**n}
        over_all = LambdaLR(optimizer, [by_module[m] for m in optimizer.group_modules])
        one_step(optimizer, modules, 0)
        over_all.step()
        for module, group in zip(optimizer.group_modules, optimizer.param_groups, strict=True):
            rates.setdefault(module, []).append(group["lr"])
        own = [
            StepLR(optimizer[m], step_size=1, gamma=0.5) for m in optimizer.optimizers_by_module()
        ]
        one_step(optimizer, modules, 1)
        for each in own:
            each.step()
        for module, group in zip(optimizer.group_modules, optimizer.param_groups, strict=True):
            rates[module].append(group["lr"])
        records = optimizer.sharding_records()
        assert set(records) == set(optimizer.optimizers_by_module())
        if "vision" in records:
            assert records["vision"]["expert"]["type"] == "parameter_coordinates"
        optimizer.zero_grad()
    return rates


def test_one_scheduler_or_one_per_module() -> None:
    results = run_ranks(5, schedules).results
    assert results[0]["vision"] == pytest.approx([0.05, 0.05, 0.025, 0.025])
    assert results[2] == {}
    assert results[3]["language"] == pytest.approx([0.01, 0.005])


def moments(each: Trained) -> dict[str, Tensor]:
    """This rank's momentum, by inner optimizer and position."""
    if each.spec.kind == "reduced":
        optimizers = {"": each.stepper.optimizer}  # type: ignore[union-attr]
    else:
        chained: Any = each.stepper
        optimizers = {name: chained[name].inner for name in ("dense", "expert")}
    return {
        f"{name}.{number}": entries["momentum_buffer"].clone()
        for name, inner in optimizers.items()
        for number, entries in enumerate(inner.state.values())
    }


def state_of(groups: ModuleGroups, modules: dict[str, Trained], optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, each in modules.items():
        state[f"{name}.model"] = OnLayout(groups[name], each.model)
        if each.stepper is not None:
            state[f"{name}.optimizer"] = OnLayout(
                groups[name], OptimizerState(optimizer[name], each.model)
            )
    return state


def regrouped(each: Trained) -> Stepper:
    """A module's optimizer with another number of groups than `Trained` makes."""
    named = dict(each.model.named_parameters())
    experts = [p for name, p in named.items() if name.endswith("experts")]
    dense = [p for name, p in named.items() if not name.endswith("experts")]
    groups_of_experts: list[dict[str, Any]] = [{"params": experts}, {"params": []}]
    options: dict[str, Any] = {"make": momentum, "groups": each.groups, "divisor": 2}
    return ChainedOptimizer(
        {
            "dense": ShardedOptimizer(each.model, dense, over="dp_cp", name="dense", **options),
            "expert": ShardedOptimizer(
                each.model,
                groups_of_experts,
                over="expt_dp",
                name="expert",
                **options,
            ),
        }
    )


def saved(context: RankContext, root: str) -> None:
    """Each inner optimizer gets back its own; another number of groups is named."""
    specs = SPECS | {"language": Spec(sizes={"dp": 2, "ep": 2, "ranks": (4, 3)}, kind="chained")}
    with ModuleGroups.create(layouts_of(specs)) as groups:
        modules = build(groups, specs, make=momentum)
        optimizer = MultiModuleOptimizer(groups, {n: m.stepper for n, m in modules.items()})
        for step in range(2):
            one_step(optimizer, modules, step)
        checkpointer = Checkpointer(root, groups=groups.union)
        checkpointer.save(1, state_of(groups, modules, optimizer))
        expected = {n: moments(m) for n, m in modules.items() if m.stepper is not None}
        one_step(optimizer, modules, 5)
        checkpointer.load(state_of(groups, modules, optimizer))
        for name, values in expected.items():
            actual = moments(modules[name])
            assert actual.keys() == values.keys()
            assert all(torch.equal(actual[key], values[key]) for key in values)
        optimizer.close()
        entries = {n: m.stepper for n, m in modules.items()}
        if groups.has("language"):
            entries["language"] = regrouped(modules["language"])
        other = MultiModuleOptimizer(groups, entries)
        with pytest.raises(
            MismatchError,
            match=r"language\.optimizer: optimizer 'expert' has 2 parameter groups, .* has 1",
        ):
            checkpointer.load(state_of(groups, modules, other))


def test_state_of_each_inner_optimizer_comes_back_under_its_module(tmp_path: Path) -> None:
    """M3."""
    run_ranks(5, saved, str(tmp_path))


def unreduced(context: RankContext) -> None:
    """A gradient that one of two data ranks has was not reduced: no rank may use it."""
    specs = {"one": Spec(sizes={"dp": 2}, kind="reduced"), "two": Spec(sizes={"dp": 2})}
    with ModuleGroups.create(layouts_of(specs)) as groups:
        modules = build(groups, specs)
        parameters = list(modules["one"].model.parameters())
        inner = sgd([{"params": parameters}])
        optimizer = MultiModuleOptimizer(
            groups,
            {"one": ReducedOptimizer(inner, groups["one"]), "two": modules["two"].stepper},
        )
        before = [p.detach().clone() for p in parameters]
        for parameter in parameters[context.rank :]:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ConfigError, match=r"module 'one': .*on 1 of the 2 ranks of 'dp_cp'"):
            optimizer.step()
        assert all(torch.equal(p, was) for p, was in zip(parameters, before, strict=True))
        assert all(p.grad is None for p in parameters)


def test_a_plain_optimizer_refuses_gradients_that_only_some_ranks_have() -> None:
    run_ranks(2, unreduced)

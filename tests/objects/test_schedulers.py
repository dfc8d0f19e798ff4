"""Schedulers, scalers and clients of optimizers: kept, and in step with the optimizer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

from holdfast import Checkpointer, MismatchError, OptimizerState, Stored
from tests.objects.optimizers import differences, net, train


class Ramp:
    """A rule with a memory of its own."""

    def __init__(self, rate: float) -> None:
        self.rate, self.calls = rate, 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 / (1.0 + self.rate * epoch + 0.01 * self.calls)


def chained(o: Any) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(o, factor=0.5, total_iters=2), schedules.ExponentialLR(o, gamma=0.9)],
        optimizer=o,
    )


def sequence(o: Any) -> Any:
    first = schedules.LinearLR(o, start_factor=0.1, total_iters=2)
    return schedules.SequentialLR(o, [first, schedules.CosineAnnealingLR(o, 9)], milestones=[2])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2, gamma=0.5),
    "multi step": lambda o: schedules.MultiStepLR(o, [1, 2, 2, 5], gamma=0.5),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "lambda with memory": lambda o: schedules.LambdaLR(o, [Ramp(0.1), Ramp(0.5)]),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, Ramp(0.2)),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=[0.2, 0.3], total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=2, mode="exp_range"),
    "cosine restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "polynomial": lambda o: schedules.PolynomialLR(o, 8, power=2),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5, mode="max"),
    "chained": chained,
    "sequence": sequence,
    "swa": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "adam tensor lr": lambda groups: Adam(groups, lr=torch.tensor(0.1), foreach=False),
}


class Run:
    """Model, optimizer of two groups, and a scheduler. `places`: the groups in another order."""

    def __init__(self, seed: int, name: str, kind: str, places: Sequence[int] = (0, 1)) -> None:
        self.model = net(seed)
        parameters = list(self.model.parameters())
        groups: list[Any] = [
            {"params": parameters[:2]},
            {"params": parameters[2:], "lr": 0.05 if kind == "sgd" else torch.tensor(0.05)},
        ]
        if len(places) > 2:  # the second group cut in two
            groups.append({**groups[1], "params": groups[1]["params"].pop()})
        groups = [groups[place] for place in places]
        self.optimizer = KINDS[kind](groups)
        self.scheduler = SCHEDULES[name](self.optimizer)
        self.rates: list[list[float]] = []

    def go_on(self, steps: range) -> None:
        def then(loss: float) -> None:
            plateau = isinstance(self.scheduler, schedules.ReduceLROnPlateau)
            self.scheduler.step(loss) if plateau else self.scheduler.step()
            self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])

        train(self.model, self.optimizer, steps, then=then)

    def state(self, order: tuple[str, ...] = ("model", "optimizer", "scheduler")) -> dict[str, Any]:
        parts = {
            "model": self.model,
            "optimizer": OptimizerState(self.optimizer, self.model),
            "scheduler": self.scheduler,
        }
        return {name: parts[name] for name in order}

    def everything(self) -> Any:
        weights = self.model.state_dict()
        return copy.deepcopy(
            (weights, self.optimizer.state_dict(), self.scheduler.state_dict(), self.rates[-3:])
        )


def stored(root: Path, step: int) -> Any:
    asked = {"model": Stored(), "optimizer": Stored(), "scheduler": Stored()}
    return dict(Checkpointer(root).load(asked, step=step).values)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "sgd") for name in SCHEDULES),
        *((name, "adam tensor lr") for name in ("multi step", "sequence")),
        *(
            pytest.param(name, "adam tensor lr", marks=pytest.mark.slow)
            for name in SCHEDULES
            if name not in ("multi step", "sequence")
        ),
    ],
)
def test_a_scheduler_is_kept(tmp_path: Path, name: str, kind: str) -> None:
    """In whatever order the parts stand, into a fresh run and into one further on."""
    if kind == "adam tensor lr" and name in ("cyclic", "one cycle"):
        pytest.skip("cycles a momentum that Adam with a tensor learning rate shares")
    run = Run(0, name, kind)
    run.go_on(range(4))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, run.state())
    at_save = run.everything()[:3]
    run.go_on(range(4, 7))
    orders = list(itertools.permutations(("model", "optimizer", "scheduler")))
    # The order is of parts, and not of the kind of a learning rate: one is enough for a tensor.
    numbered = [*enumerate(orders[::2])] if kind == "sgd" else [(1, orders[3])]
    for number, order in numbered:
        twin = Run(number + 1, name, kind)
        twin.go_on(range(30, 30 + 3 * (number % 2)))
        groups = list(twin.optimizer.param_groups)
        checkpointer.load(twin.state(order), step=1)
        assert all(a is b for a, b in zip(groups, twin.optimizer.param_groups, strict=True))
        assert not list(differences(at_save, (*twin.everything()[:3],)))
        checkpointer.save(2 + number, twin.state())
        assert not list(differences(stored(tmp_path, 1), stored(tmp_path, 2 + number)))
        twin.go_on(range(4, 7))
        assert not list(differences(run.everything(), twin.everything()))


def rates_by_name(run: Run) -> dict[str, float]:
    """The learning rate of each parameter."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    groups = run.optimizer.param_groups
    return {names[p]: float(group["lr"]) for group in groups for p in group["params"]}


RULES: dict[str, Callable[[Any], Any]] = {
    "rules of each group": lambda o: schedules.LambdaLR(
        o, [partial(pow, 0.9) for _ in o.param_groups]
    ),
    "one cycle of each group": lambda o: schedules.OneCycleLR(
        o, max_lr=[2 * float(group["lr"]) for group in o.param_groups], total_steps=20
    ),
    "plateau by group": lambda o: schedules.ReduceLROnPlateau(
        o, patience=0, factor=0.5, mode="max",
        min_lr=[0.3 * float(group["lr"]) for group in o.param_groups],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["cosine restarts", "polynomial", "cyclic", "chained", "sequence", "swa", *RULES]
)
def test_a_schedule_follows_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """R1: its values are by position, and the groups of the resumed program in another order."""
    if kind == "adam tensor lr" and "cycl" in name:
        pytest.skip("cycles a momentum that Adam with a tensor learning rate shares")
    for rule, make in RULES.items():
        monkeypatch.setitem(SCHEDULES, rule, make)
    run = Run(0, name, kind)
    run.go_on(range(4))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, run.state())
    run.go_on(range(4, 9))
    for places, order in {
        (1, 0): ("model", "optimizer", "scheduler"),
        (2, 0, 1): ("scheduler", "model", "optimizer"),
    }.items():
        twin = Run(1, name, kind, places)
        if name == "rules of each group" and len(places) > 2:
            with pytest.raises(MismatchError, match="lr_lambdas: stored is a sequence of 2"):
                checkpointer.load(twin.state(order), step=1)
            continue
        checkpointer.load(twin.state(order), step=1)
        assert twin.scheduler.get_last_lr() == [g["lr"] for g in twin.optimizer.param_groups]
        twin.go_on(range(4, 9))
        assert rates_by_name(twin) == rates_by_name(run)
        assert not list(differences(run.model.state_dict(), twin.model.state_dict()))


class Floors(schedules.ExponentialLR):
    """A schedule with a value for each group that only its class knows."""

    def __init__(self, optimizer: Any) -> None:
        self.floors = [float(group["lr"]) / 2 for group in optimizer.param_groups]
        super().__init__(optimizer, 0.9)


@pytest.mark.parametrize("name", ["lambda with memory", "floors"])
def test_values_of_groups_that_cannot_follow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """R1: what rules keep, and lists of a class of the user's."""
    monkeypatch.setitem(SCHEDULES, "floors", Floors)
    run = Run(0, name, "sgd")
    run.go_on(range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, run.state())
    with pytest.raises(MismatchError, match=r"scheduler\.\w+: .* group 0 .* was group 1 of the s"):
        checkpointer.load(Run(1, name, "sgd", places=(1, 0)).state())
    checkpointer.load(Run(1, name, "sgd").state())


def test_a_group_that_is_new_has_the_values_of_its_schedule(tmp_path: Path) -> None:
    """R1, O4: by consent, as the group itself."""
    run = Run(0, "cosine restarts", "sgd")
    run.optimizer.param_groups.pop()
    run.scheduler = SCHEDULES["cosine restarts"](run.optimizer)
    run.go_on(range(2))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, run.state())
    twin = Run(1, "cosine restarts", "sgd", places=(1, 0))
    with pytest.raises(MismatchError, match=r"optimizer\.groups\.0"):
        checkpointer.load(twin.state())
    checkpointer.load(twin.state(), allow_missing=["optimizer.groups.0", "optimizer.state.*"])
    assert twin.scheduler.base_lrs == [0.05, 0.1]
    run.go_on(range(2, 6))
    twin.go_on(range(2, 6))
    first = "first.weight"
    assert rates_by_name(twin)[first] == rates_by_name(run)[first]
    assert rates_by_name(twin)["second.bias"] == pytest.approx(rates_by_name(run)[first] / 2)


def inverse_root(epoch: int, *, warmup: int) -> float:
    return min((epoch + 1) / warmup, (warmup / (epoch + 1)) ** 0.5)


def of_function(o: Any, warmup: int) -> Any:
    return schedules.LambdaLR(o, lambda epoch: inverse_root(epoch, warmup=warmup))


def of_partial(o: Any, warmup: int) -> Any:
    return schedules.LambdaLR(o, [lambda _: 1.0, partial(inverse_root, warmup=warmup)])


def of_cycle(o: Any, warmup: int) -> Any:
    rule = partial(inverse_root, warmup=warmup)
    return schedules.CyclicLR(o, 0.01, 0.1, 3, scale_fn=rule, scale_mode="iterations")


class Warmup:
    """Has the rule as a method, and is callable itself; counts the calls."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.calls = warmup, 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return inverse_root(epoch, warmup=self.warmup)

    def of_epoch(self, epoch: int) -> float:
        return self(epoch)


def in_sequence(o: Any, warmup: int) -> Any:
    parts = [of_function(o, warmup), schedules.ConstantLR(o), of_partial(o, warmup)]
    return schedules.SequentialLR(o, parts, milestones=[2, 3])


def in_chain(o: Any, warmup: int) -> Any:
    parts = [of_function(o, warmup), schedules.ExponentialLR(o, gamma=0.9)]
    return schedules.ChainedScheduler(parts, optimizer=o)


class Wrapped:
    """As a framework wraps a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict
        self.step = scheduler.step


FUNCTIONS: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "function": (of_function, ""),
    "partial": (of_partial, ""),
    "cycle": (of_cycle, ""),
    "method": (lambda o, warmup: schedules.LambdaLR(o, Warmup(warmup).of_epoch), ""),
    "object in a partial": (lambda o, warmup: schedules.LambdaLR(o, partial(Warmup(warmup))), ""),
    "sequence": (in_sequence, "._schedulers.0"),
    "chain": (in_chain, "._schedulers.0"),
    "wrapped": (lambda o, warmup: Wrapped(of_partial(o, warmup)), ".scheduler"),
}


@pytest.mark.parametrize("kind", ["sgd", pytest.param("adam tensor lr", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_schedule_by_another_function_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
) -> None:
    """R1: no checkpoint has the function; the same one is silent, in whatever order."""
    make, path = FUNCTIONS[name]
    for steps in (0, 2, 5):
        for warmup in (10, 20):
            monkeypatch.setitem(SCHEDULES, "made", partial(make, warmup=warmup))
            run = Run(0, "made", kind)
            if warmup == 10:
                run.go_on(range(steps))
                Checkpointer(tmp_path).save(steps, run.state())
            for order in (("model", "optimizer", "scheduler"), ("scheduler", "model", "optimizer")):
                report = Checkpointer(tmp_path).load(run.state(order), step=steps)
                named = report.other_rates
                is_other = warmup == 20 and (name, steps) != ("cycle", 0)  # there it scales nothing
                assert (f"scheduler{path}" in named) == is_other, (steps, named)
                assert ("other rates" in report.summary()) == bool(named) == bool(caplog.records)
                assert report.of("scheduler").other_rates == named
                caplog.clear()


def test_the_object_of_a_rule_is_left_as_it_is(tmp_path: Path) -> None:
    """R1: a load asks for the rate of the last epoch, which is no call of the loop."""
    rules = [Warmup(10) for _ in range(3)]
    optimizer = SGD(net(0).parameters(), lr=0.1)
    parts = [schedules.LambdaLR(optimizer, rule) for rule in (rules[0].of_epoch, partial(rules[1]))]
    parts.append(schedules.CyclicLR(optimizer, 0.01, 0.1, 3, scale_fn=rules[2].of_epoch))
    state = {"scheduler": schedules.ChainedScheduler(parts, optimizer=optimizer)}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    before = [rule.calls for rule in rules]
    optimizer.param_groups[0]["momentum"] = 0.123
    checkpointer.load(state)
    assert optimizer.param_groups[0]["momentum"] == 0.123
    assert [rule.calls for rule in rules] == before


def test_a_gradient_scaler_is_kept(tmp_path: Path) -> None:
    def grown(steps: int) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        model = net(0)
        optimizer = SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            loss = model(torch.ones(2, 6)).square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                next(model.parameters()).grad[0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler

    checkpointer = Checkpointer(tmp_path)
    scaler = grown(6)
    checkpointer.save(1, {"scaler": scaler})
    for steps in (0, 1, 4):
        other = grown(steps)
        checkpointer.load({"scaler": other}, step=1)
        assert not list(differences(scaler.state_dict(), other.state_dict()))
        assert other.get_scale() == scaler.get_scale() == 16.0


def test_a_swa_model_beside_its_optimizer_is_kept(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Any, Any, Any, Any]:
        model = net(seed)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, AveragedModel(model), SWALR(optimizer, swa_lr=0.02)

    def go_on(run: tuple[Any, Any, Any, Any], steps: range) -> None:
        model, optimizer, average, scheduler = run
        for step in steps:
            train(model, optimizer, range(step, step + 1))
            average.update_parameters(model)
            scheduler.step()

    def state(run: tuple[Any, Any, Any, Any]) -> dict[str, object]:
        model, optimizer, average, scheduler = run
        held = OptimizerState(optimizer, model)
        return {"model": model, "optimizer": held, "average": average, "scheduler": scheduler}

    def everything(run: tuple[Any, Any, Any, Any]) -> Any:
        return [copy.deepcopy(each.state_dict()) for each in run]

    run, twin = made(0), made(1)
    go_on(run, range(3))
    Checkpointer(tmp_path).save(1, state(run))
    Checkpointer(tmp_path).load(state(twin))
    go_on(run, range(3, 6))
    go_on(twin, range(3, 6))
    assert not list(differences(everything(run), everything(twin)))

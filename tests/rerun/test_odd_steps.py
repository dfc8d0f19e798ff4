"""Steps that are not plain: sources that draw random numbers, steps that were left, modes."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import random
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from holdfast import (
    RNG,
    ChainedOptimizer,
    Checkpointer,
    ProcessGroups,
    ReducedOptimizer,
    ShardedOptimizer,
)
from holdfast.errors import ConfigError, CorruptionError, MismatchError
from holdfast.rerun import (
    DeviceIdentity,
    Limits,
    NotFinite,
    Rejects,
    Replayed,
    RerunMachine,
    Spike,
    State,
    read_report,
)
from holdfast.state.rng import accessors
from tests.rerun.job import SavedLoop, load_entry, save_entry
from tests.rerun.threads import ThreadGroups, run_threads


class Augmented(Dataset[torch.Tensor]):
    """Rows that are made of draws from every global stream, as an augmentation makes them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(torch.rand(())), np.random.rand(), random.random()])


def shuffled() -> Iterator[torch.Tensor]:
    """The batches of a loader that shuffles and augments in this process, epoch after epoch."""
    loader = DataLoader(Augmented(), batch_size=2, shuffle=True)
    while True:
        yield from loader


def numbered(first: int = 0) -> Iterator[torch.Tensor]:
    for number in itertools.count(first):
        yield torch.full((2, 4), float(number))


def adam(model: nn.Module, groups: ProcessGroups) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sharded(
    model: nn.Module, groups: ProcessGroups, *, stage: int = 1, parameters: Any = None
) -> ShardedOptimizer:
    parameters = list(model.parameters()) if parameters is None else parameters
    make = partial(torch.optim.Adam, lr=0.01)
    return ShardedOptimizer(
        model, parameters, make=make, groups=groups, over="dp_cp", divisor=1, stage=stage,
        name="rest", elementwise=True,
    )  # fmt: skip


def reduced(model: nn.Module, groups: ProcessGroups) -> ReducedOptimizer:
    return ReducedOptimizer(adam(model, groups), groups, name="all")


def chained(model: nn.Module, groups: ProcessGroups) -> ChainedOptimizer:
    *rest, last = model.parameters()
    whole = ReducedOptimizer(torch.optim.Adam([last], lr=0.01), groups, name="last")
    return ChainedOptimizer({"last": whole, "rest": sharded(model, groups, parameters=rest)})


class OfClass(nn.Parameter):
    """A parameter of a class of the user's."""


def adam_of_class(model: nn.Module, groups: ProcessGroups) -> torch.optim.Optimizer:
    layer: Any = model[3]
    layer.weight = OfClass(layer.weight.detach())
    return adam(model, groups)


class Loop(SavedLoop):
    """A loop whose model has dropout and running statistics."""

    def __init__(
        self,
        groups: ProcessGroups,
        root: Path,
        *,
        device: str = "A",
        layer: nn.Module | None = None,
        hooks: Sequence[Any] = (),
        streams: Sequence[RNG] = (),
        make: Callable[[nn.Module, ProcessGroups], Any] | None = None,
        is_given: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.groups = groups
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
        )
        if layer is not None:
            self.model.append(layer)
        self.optimizer = (make or adam)(self.model, groups)
        self.at_end: Callable[[], object] = lambda: None
        """Called at the end of each run."""
        self.update: Callable[[], object] = lambda: self.optimizer.step()
        """Called after the runs of a step."""
        if is_given:
            options["optimizers"] = [self.optimizer]
        self.lines: list[str] = []
        self.machine = RerunMachine(
            groups,
            directory=root / "rerun",
            replayed=Replayed(modules=[self.model], hooks=hooks, streams=streams),
            device=DeviceIdentity(host="h", uuid=device),
            note=self.lines.append,
            **options,
        )
        optimizer: Any = self.optimizer
        self.drop_gradients = getattr(optimizer, "drop_gradients", None) or optimizer.zero_grad
        self.step = 0
        self.taken: list[torch.Tensor] = []

    @property
    def first_numbers(self) -> list[int]:
        return [int(each[0, 0]) for each in self.taken]

    def run(
        self,
        until: int,
        batches: Any,
        *,
        bad: tuple[int, int] | None = None,
        num_bad: int = 1,
        left_in: int | None = None,
        drops_before: bool = False,
        drop: Callable[[], object] | None = None,
    ) -> None:
        """Run to a step.

        Args:
            until: the step.
            batches: two microbatches a step.
            bad: step and microbatch whose loss is NaN.
            num_bad: in how many runs.
            left_in: a run of the first step that an exception leaves, which is caught.
            drops_before: gradients, before the attempts and not in each.
            drop: how gradients are dropped; default: by the optimizer.
        """
        was_left = False
        while self.step < until:
            if drops_before and not was_left:
                self.drop_gradients()
            try:
                for number in self.machine.attempts(self.step, batches):
                    if not drops_before:
                        (drop or self.drop_gradients)()
                    taken = []
                    for microbatch in range(2):
                        batch = next(batches)
                        taken.append(batch.clone())
                        loss = self.model(batch).square().mean()
                        loss.backward()
                        batch.fill_(-1)
                        if left_in == number:
                            raise MemoryError
                        is_bad = (self.step, microbatch) == bad and number < num_bad
                        value = math.nan if is_bad else loss.item()
                        self.machine.validate("loss", value, NotFinite(), fatal=False)
                    self.at_end()
            except MemoryError:
                left_in, was_left = None, True
                continue
            was_left = False
            if self.machine.decision.exit_code is not None:
                return
            self.taken += taken
            self.update()
            self.step += 1

    def save(self, root: Path) -> None:
        with Checkpointer(root, groups=self.groups) as checkpointer:
            checkpointer.save(self.step, self.state(), overwrite=True)

    def load(self, root: Path) -> None:
        with Checkpointer(root, groups=self.groups) as checkpointer:
            self.step = checkpointer.load(self.state()).values["progress"]["step"]


def same(first: Loop, second: Loop) -> bool:
    pairs = [(first.taken, second.taken)]
    pairs.append(([*first.model.state_dict().values()], [*second.model.state_dict().values()]))
    return all(len(one) == len(other) and all(map(torch.equal, one, other)) for one, other in pairs)


def with_fault(groups: ProcessGroups, root: Path, *, is_rewound: bool) -> Path:
    """Where the checkpoint of a fault in step 1 is, whose batches are 2 and 3."""
    loop = Loop(groups, root)
    batches = loop.machine.replayable(numbered(), is_rewound=is_rewound)
    loop.run(2, batches, bad=(1, 0), num_bad=2)
    assert loop.machine.decision.exit_code == 16
    loop.save(loop.machine.checkpoints)
    return loop.machine.checkpoints


@pytest.mark.parametrize("bad", [(0, 0), (1, 1), (3, 0)])
def test_a_source_that_draws_random_numbers_is_not_replayed_without_its_draws(
    groups: ProcessGroups, tmp_path: Path, bad: tuple[int, int]
) -> None:
    """D7, D9: masks of a rerun are those of the run, here and in the process after a restart."""
    good = Loop(groups, tmp_path / "good")
    good.run(5, good.machine.replayable(shuffled()))
    transient = Loop(groups, tmp_path / "transient")
    transient.run(5, transient.machine.replayable(shuffled()), bad=bad)
    assert same(good, transient)
    source = shuffled()
    broken = Loop(groups, tmp_path / "broken")
    broken.run(5, broken.machine.replayable(source), bad=bad, num_bad=2)
    assert broken.machine.decision.exit_code == 16
    broken.save(broken.machine.checkpoints)
    after = Loop(groups, tmp_path / "broken", device="B")
    after.load(broken.machine.checkpoints)
    after.taken = broken.taken
    after.run(5, after.machine.replayable(source))  # behind the batches of the step
    assert same(good, after)


class Remembers(nn.Module):
    """Scales by what earlier runs have left in attributes, and caches what each run would make."""

    def __init__(self, num_early: int) -> None:
        super().__init__()
        self.num_early = num_early
        self.num_runs = self.num_late = 0
        self.queue: list[float] = []
        self.cache: dict[int, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        self.queue = [*self.queue[-2:], float(x.detach().mean())]
        self.cache.setdefault(len(x), 1.0)
        self.num_late = max(0, self.num_runs - self.num_early)
        return x * (1 + self.num_late + sum(self.queue))


@pytest.mark.parametrize(
    "hooked", [(), ("num_runs", "num_late"), ("num_runs", "num_late", "queue")]
)
def test_attributes_that_a_rerun_does_not_bring_back_are_named(
    groups: ProcessGroups, tmp_path: Path, hooked: tuple[str, ...]
) -> None:
    """D7: in the second step, without a fault, and those that change later in a rerun."""

    def run(name: str, **fault: Any) -> Loop:
        layer = Remembers(num_early=4)
        hook = (lambda: {each: vars(layer)[each] for each in hooked}, layer.__dict__.update)
        loop = Loop(groups, tmp_path / name, layer=layer, hooks=[hook])
        loop.run(2, loop.machine.replayable(numbered()))
        loop.run(5, loop.machine.replayable(numbered(4)), **fault)
        return loop

    good, transient = run("good"), run("transient", bad=(3, 1))
    missing = [each for each in ("num_runs", "queue") if each not in hooked]
    for loop in (good, transient):
        named = [re.findall(r"4\.(\w+)", line) for line in loop.lines if "step 1" in line]
        assert named == [missing] * bool(missing)
        assert "cache" not in "".join(loop.lines)
    late = [line for line in transient.lines if "4.num_late" in line]
    assert ["step 3" in line for line in late] == ([] if hooked else [True])
    assert same(good, transient) == (not missing)


class Noise(nn.Module):
    """Adds noise of a generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.Generator().manual_seed(1),
            "numpy": lambda: np.random.default_rng(1),
            "python": lambda: random.Random(1),
        }
        self.draws = {kind: make[kind]()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.draws.values():
            is_torch = isinstance(each, torch.Generator)
            x = x + (torch.rand((), generator=each) if is_torch else each.random())
        return x


@pytest.mark.parametrize("given", ["", "streams", "hooks"])
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_generator_that_a_rerun_does_not_bring_back_is_named(
    groups: ProcessGroups, tmp_path: Path, kind: str, given: str
) -> None:
    """D7: a module's own, which is neither in streams nor in hooks, in one line."""

    def run(name: str, **fault: Any) -> Loop:
        layer = Noise(kind)
        (each,) = layer.draws.values()
        one = accessors(each)
        hooks = [(one.get, one.put)] if given == "hooks" else []
        streams = [RNG(generators=layer.draws)] if given == "streams" else []
        loop = Loop(groups, tmp_path / name, layer=layer, hooks=hooks, streams=streams)
        loop.run(4, loop.machine.replayable(numbered()), **fault)
        return loop

    good, transient = run("good"), run("transient", bad=(2, 1))
    for loop in (good, transient):
        named = [line for line in loop.lines if f"4.draws.{kind}" in line and "step 1" in line]
        assert len(named) == (not given)
    assert same(good, transient) == bool(given)


def test_data_that_is_bad_is_told_from_a_device_under_random_draws(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D8: with other masks the value would be another one, and device A would be convicted."""

    def run(machine: RerunMachine, source: Iterator[torch.Tensor]) -> list[float]:
        values = []
        batches = machine.replayable(source)
        for _ in machine.attempts(0, batches):
            values.append(float(next(batches).sum() * torch.rand(())))
            machine.validate("loss", values[-1], Rejects(lambda value: value > 0, "positive"))
        return values

    torch.manual_seed(0)
    source = shuffled()
    first = Loop(groups, tmp_path)
    one, again = run(first.machine, source)
    assert (one, first.machine.decision.exit_code) == (again, 16)
    first.save(first.machine.checkpoints)
    second = Loop(groups, tmp_path, device="B")
    second.load(first.machine.checkpoints)
    assert run(second.machine, source) == [one]
    assert second.machine.decision.exit_code == 19


OPTIMIZERS: dict[str, Callable[[nn.Module, ProcessGroups], Any]] = {
    "plain": adam,
    "of a class": adam_of_class,
    "sharded": sharded,
    "sharded gradients": partial(sharded, stage=2),
    "chained": chained,
}


@pytest.mark.parametrize("left_in", [None, 0, 1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_of_the_run_before_are_not_added_to(
    groups: ProcessGroups, tmp_path: Path, kind: str, left_in: int | None
) -> None:
    """D7: by a loop that drops them before its attempts, in a rerun and after it has left one."""
    make = OPTIMIZERS[kind]
    good = Loop(groups, tmp_path / "good", make=make)
    good.run(3, good.machine.replayable(numbered()))
    loop = Loop(groups, tmp_path / "loop", make=make, is_given=True)
    batches = loop.machine.replayable(numbered())
    loop.run(3, batches, bad=(0, 1), drops_before=True, left_in=left_in)
    assert same(good, loop)


@pytest.mark.parametrize("what", ["a parameter", "a module"])
def test_a_parameter_that_came_after_the_first_step_is_one_of_the_model(
    groups: ProcessGroups, tmp_path: Path, what: str
) -> None:
    """D7: its gradients of the run before are dropped, and a write inside of a step is refused."""
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(numbered())
    loop.run(1, batches)
    layer: Any = loop.model[3]
    if what == "a module":
        loop.model[3] = layer = copy.deepcopy(layer)
    else:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    loop.drop_gradients()
    layer.zero_grad()
    grads = []
    for number in loop.machine.attempts(1, batches):
        loop.model(next(batches)).mean().backward()
        grads.append(layer.weight.grad.clone())
        value = math.nan if number == 0 else 1.0
        loop.machine.validate("loss", value, NotFinite(), fatal=False)
    assert torch.equal(*grads)
    runs = iter(loop.machine.attempts(2, batches))
    next(runs)
    layer.weight.detach().add_(1)
    with pytest.raises(ConfigError, match=r"inside the loop.*3\.weight"):
        next(runs)


@pytest.mark.parametrize("left_in", [None, 0])
@pytest.mark.parametrize("make", [adam, reduced])
@pytest.mark.parametrize("drops", ["no", "but one", "to zero", "past autograd"])
def test_gradients_of_the_steps_before_are_not_in_an_update_twice(
    groups: ProcessGroups, tmp_path: Path, drops: str, make: Any, left_in: int | None
) -> None:
    """D7: a loop that accumulates over steps is refused, and one that zeroes them is not.

    A parameter that no optimizer has does not count.
    """
    is_stray = drops == "but one"
    is_known = make is not adam or left_in is None
    make = partial(without_first, make) if is_stray else make
    good = Loop(groups, tmp_path / "good", make=make)
    good.run(3, good.machine.replayable(numbered()))
    loop = Loop(groups, tmp_path / "loop", make=make, is_given=is_known)
    batches = loop.machine.replayable(numbered())

    def drop() -> None:
        for each in [*loop.model.parameters()][is_stray:]:
            if each.grad is not None and is_stray:
                each.grad = None
            if each.grad is not None and drops == "to zero":
                each.grad.zero_()
            if each.grad is not None and drops == "past autograd":
                each.grad.data.zero_()

    bad = (1, 0) if left_in is None else None
    loop.run(1, batches)
    for each in loop.model.parameters():
        each.grad = torch.ones_like(each)
    if drops == "no":
        with pytest.raises(ConfigError, match=r"were there before the step \(0.bias, .*were still"):
            loop.run(3, batches, bad=bad, left_in=left_in, drop=drop)
    else:
        loop.run(3, batches, bad=bad, left_in=left_in, drop=drop)
        assert same(good, loop)


def without_first(make: Any, model: nn.Module, groups: ProcessGroups) -> Any:
    """An optimizer that does not have the first parameter, which has gradients all the same."""
    first, *rest = model.parameters()
    first.grad = torch.ones_like(first)
    return make(nn.ParameterList(rest), groups)


class Scheduled(Loop):
    """A loop that steps a schedule inside of its attempts.

    Args:
        how: what brings it back, or that it is stepped after an update only.
    """

    def __init__(self, groups: ProcessGroups, root: Path, *, how: str) -> None:
        group: dict[str, Any] = {}
        counts = [0]
        hook: Any = (lambda: dict(group, params=[]), lambda saved: group.update(lr=saved["lr"]))
        other: Any = (counts.copy, lambda saved: None)
        hooks = {"a hook": [hook], "another hook": [other]}.get(how, [])
        make = reduced if "veto" in how else adam
        super().__init__(groups, root, make=make, is_given=True, hooks=hooks)
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        group.update(inner.param_groups[0])
        inner.param_groups[0] = group

        def schedule() -> None:
            if how == "by a new setting":
                group[f"scale {len(group)}"] = 0.5
            else:
                group["lr"] *= 0.5

        def step() -> None:
            if not self.optimizer.step(veto=self.machine).vetoed or how == "after a veto":
                schedule()

        self.at_end = schedule
        if "veto" in how:
            self.at_end, self.update = step, lambda: None


@pytest.mark.parametrize(
    ("how", "refused_at"),
    [
        ("in any step", 0),
        ("by a new setting", 0),
        ("another hook", 1),
        ("after a veto", 1),
        ("a hook", None),
        ("unless there was a veto", None),
    ],
)
def test_a_schedule_is_not_stepped_twice(
    groups: ProcessGroups, tmp_path: Path, how: str, refused_at: int | None
) -> None:
    """D7: hyperparameters that a run has changed are those of the start again, or it is refused."""
    loop = Scheduled(groups, tmp_path / "loop", how=how)
    batches = loop.machine.replayable(numbered())
    if refused_at is not None:
        with pytest.raises(
            ConfigError, match=r"hyperparameters have changed.*(lr|scale \d+) of group 0"
        ):
            loop.run(3, batches, bad=(1, 0))
        assert loop.step == refused_at
        return
    loop.run(3, batches, bad=(1, 0))
    good = Scheduled(groups, tmp_path / "good", how=how)
    good.run(3, good.machine.replayable(numbered()))
    assert same(good, loop)


@pytest.mark.parametrize("kind", ["sharded", "sharded gradients", "chained"])
def test_a_fault_is_kept_without_the_gradients_of_its_runs(
    groups: ProcessGroups, tmp_path: Path, kind: str
) -> None:
    """D1: buckets that hold them are no reason to refuse the save that the machine asks for."""
    make = OPTIMIZERS[kind]
    good = Loop(groups, tmp_path / "good", make=make)
    good.run(3, good.machine.replayable(numbered()))
    loop = Loop(groups, tmp_path / "loop", make=make, is_given=True)
    loop.run(3, loop.machine.replayable(numbered()), bad=(1, 0), num_bad=2)
    assert loop.machine.decision.save
    loop.save(loop.machine.checkpoints)
    again = Loop(groups, tmp_path / "loop", make=make, is_given=True, device="B")
    again.load(loop.machine.checkpoints)
    again.run(3, again.machine.replayable(numbered(4)))
    again.taken = loop.taken + again.taken
    assert same(good, again)


@pytest.mark.parametrize("mode", ["validate_results", "report_determinism_stats"])
def test_gradients_in_buckets_of_an_unknown_optimizer_are_not_added_to(
    groups: ProcessGroups, tmp_path: Path, mode: str
) -> None:
    """D7: where only the loop can drop them, it has done so when the rerun comes to the model."""
    for drops_before in (False, True):
        loop = Loop(groups, tmp_path / str(drops_before), make=sharded, mode=mode)
        batches = loop.machine.replayable(numbered())
        if not drops_before:
            loop.run(3, batches, bad=(1, 0))
            continue
        with pytest.raises(ConfigError, match=r"run before were in buckets.*optimizers="):
            loop.run(3, batches, bad=(1, 0), drops_before=True)


class ByHand(nn.Module):
    """An average of a weight, written past autograd's counter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mean = nn.Parameter(model.get_parameter("0.weight").detach().clone())

    def update_parameters(self, model: nn.Module) -> None:
        self.mean.data.mul_(0.5).add_(model.get_parameter("0.weight").data)


class Replaces(nn.Module):
    """An average in a buffer that is another tensor after each update."""

    mean: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def update_parameters(self, model: nn.Module) -> None:
        self.mean = self.mean * 0.5 + model.get_parameter("3.bias").detach()


class InAttributes(nn.Module):
    """A metric whose states no table of modules has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.mean = torch.zeros(1)

    def update_parameters(self, model: nn.Module) -> None:
        self.mean = self.mean * 0.5 + model.get_parameter("3.bias").detach()

    def get_extra_state(self) -> torch.Tensor:
        return self.mean

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.mean = state


@pytest.mark.parametrize("saved", ["", "live", "copied"])
@pytest.mark.parametrize("kind", [AveragedModel, ByHand, Replaces, InAttributes])
def test_a_module_that_is_not_known_and_that_a_run_changes_is_named(
    groups: ProcessGroups, tmp_path: Path, kind: Any, saved: str
) -> None:
    """D7: once, in the second step, without a fault; not if a hook brings it back."""

    def run(name: str, **fault: Any) -> tuple[Loop, dict[str, torch.Tensor]]:
        average: nn.Module

        def save() -> dict[str, torch.Tensor]:
            return (
                copy.deepcopy(average.state_dict()) if saved == "copied" else average.state_dict()
            )

        hooks = [(save, lambda state: average.load_state_dict(state))]
        loop = Loop(groups, tmp_path / name, hooks=hooks if saved else [])
        average = kind(loop.model)
        loop.at_end = lambda: average.update_parameters(loop.model)  # type: ignore[operator]
        loop.run(5, loop.machine.replayable(numbered()), **fault)
        return loop, average.state_dict()

    (good, means), (transient, others) = run("good"), run("transient", bad=(3, 1))
    pairs = [(means[name], others[name]) for name in means]
    assert all(torch.equal(one, other) for one, other in pairs) == bool(saved)
    for loop in (good, transient):
        named = [line for line in loop.lines if "that the machine does not know" in line]
        assert len(named) == (not saved)
        assert all("step 1" in line and f"({kind.__name__}: " in line for line in named)


class Guarded(nn.Linear):
    """A module whose own way to its parameters is not for everyone, at any time."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a look at the modules of the process runs code of theirs")

    named_buffers = named_parameters


@pytest.mark.parametrize("mode", ["validate_results", "report_determinism_stats"])
def test_modules_that_a_run_frees_or_makes_are_left_alone(
    groups: ProcessGroups, tmp_path: Path, mode: str
) -> None:
    """D7: the look keeps nothing alive, runs no code of modules, and reads no memory that is gone.

    It is made once where each step runs twice.
    """
    loop = Loop(groups, tmp_path, mode=mode)
    guarded, freed = Guarded(2, 2), nn.Linear(80, 80)
    deleted = [nn.Linear(2, 2) for _ in range(6)]
    alive: list[bool] = []
    made: list[nn.Module] = []

    def at_end() -> None:
        freed.weight.untyped_storage().resize_(0)
        ref = weakref.ref(deleted.pop().weight)
        alive.append(ref() is not None)
        made.append(nn.Linear(2, 2))

    loop.at_end = at_end
    with mock.patch.object(gc, "get_objects", wraps=gc.get_objects) as walk:
        loop.run(3, loop.machine.replayable(numbered()))
    assert guarded.weight.numel() == 4
    assert not any("that the machine does not know" in line for line in loop.lines), loop.lines
    assert set(alive) == {False}
    assert walk.call_count == 1


@pytest.mark.parametrize("left_in", [0, 1])
def test_a_step_that_was_left_starts_as_it_did(
    groups: ProcessGroups, tmp_path: Path, left_in: int
) -> None:
    """D7: with its buffers and streams, not its batches alone; a rejected value is named."""
    good = Loop(groups, tmp_path / "good")
    good.run(3, good.machine.replayable(shuffled()))
    loop = Loop(groups, tmp_path / "left")
    loop.run(3, loop.machine.replayable(shuffled()), left_in=left_in, bad=(0, 0))
    assert same(good, loop)
    fresh = Loop(groups, tmp_path / "fresh")
    for _ in fresh.machine.attempts(0):
        fresh.machine.validate("norm", math.nan, NotFinite())
        break
    assert not fresh.lines
    fresh.run(1, fresh.machine.replayable(shuffled()))
    assert "'norm' on rank 0 was rejected" in "".join(fresh.lines)


def test_a_step_that_was_left_may_start_again_on_another_iterator(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D7: which has not taken anything in the step, and does not repeat what it gave before."""
    machine = Loop(groups, tmp_path).machine
    own, other = machine.replayable(itertools.count()), machine.replayable(itertools.count(10))
    for step, batches in ((0, other), (1, own), (1, other)):
        for _ in machine.attempts(step, batches):
            taken = next(batches)
            if batches is own:
                break
    assert taken == 11


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_function_that_fails_on_one_rank_as_it_restores_is_an_error_on_all(
    tmp_path: Path, fails_at: int
) -> None:
    """D24: in place, before another replica's step, and after it; none waits for the others."""

    def start(groups: ThreadGroups) -> str:
        restored: list[object] = []

        def restore(state: object) -> None:
            restored.append(state)
            if groups.rank and len(restored) == fails_at:
                raise OSError("the cache is gone")

        machine = RerunMachine(
            groups,  # type: ignore[arg-type]
            directory=tmp_path,
            replayed=Replayed(modules=[nn.BatchNorm1d(1)], rng=False, hooks=[(dict, restore)]),
            device=DeviceIdentity(host="h", uuid=str(groups.rank)),
            note=lambda line: None,
        )
        batches = machine.replayable(itertools.repeat((1.0, torch.empty(0))))
        for _ in machine.attempts(0, batches):
            usual = next(batches)[0] + groups.rank
            machine.validate("loss", usual, Spike(num_samples=1, window=1), local=True)
        try:
            for _ in machine.attempts(1, batches):
                next(batches)
                machine.validate("loss", math.nan, NotFinite(), local=True)
        except ConfigError as error:
            next(iter(machine.attempts(2, batches)))
            assert machine.learned.of("loss") == [usual]  # and not what the other replica has
            return str(error)
        return "no error"

    for said in run_threads(2, start):
        assert "cannot be brought back: OSError: the cache is gone" in said


def test_batches_of_a_fault_that_one_rank_cannot_take_are_refused_on_all(tmp_path: Path) -> None:
    """D24: no rank begins the step that another one has not begun."""

    def run(groups: ThreadGroups, entry: Any, wraps: bool, mode: str = "validate_results") -> Any:
        machine = RerunMachine(
            groups,  # type: ignore[arg-type]
            mode=mode,
            directory=tmp_path,
            replayed=Replayed(rng=False),
            device=DeviceIdentity(host="h", uuid=str(groups.rank)),
            note=lambda line: None,
        )
        if entry is not None:
            load_entry(machine, entry)
        batches = itertools.repeat(1.0)
        given = machine.replayable(batches) if wraps else batches
        try:
            for _ in machine.attempts(0, given):
                next(given)
                machine.validate("loss", math.nan, NotFinite())
        except (ConfigError, CorruptionError) as error:
            return str(error)
        return save_entry(machine)

    entries = run_threads(2, lambda groups: run(groups, None, True))
    for said in run_threads(2, lambda groups: run(groups, entries[groups.rank], not groups.rank)):
        assert "rank 1" in said
        assert "pass machine.replayable" in said
    entries[1]["fault"]["batches"] = [{}]
    for mode in ("validate_results", "report_determinism_stats"):
        for said in run_threads(2, lambda groups: run(groups, entries[groups.rank], True, mode)):  # noqa: B023
            assert "rank 1: the kept batches" in said


@pytest.mark.parametrize("is_there", [True, False])
def test_a_buffer_that_one_rank_cannot_keep_is_refused_on_all(
    tmp_path: Path, is_there: bool
) -> None:
    """D24: in the first step, or in that of a fault, and not by a wait of the others."""

    def body(groups: ThreadGroups) -> str:
        layer = nn.Linear(1, 1)
        odd = torch.nested.nested_tensor([torch.ones(1)]) if groups.rank else torch.ones(1)
        layer.register_buffer("odd", odd if is_there else torch.ones(1), persistent=False)
        machine = RerunMachine(
            groups,  # type: ignore[arg-type]
            directory=tmp_path,
            replayed=Replayed(modules=[layer], rng=False),
            note=lambda line: None,
        )
        if not is_there:
            [None for _ in machine.attempts(0)]
            layer.register_buffer("odd", odd, persistent=False)
        value = 1.0 if is_there else math.nan
        with pytest.raises(ConfigError) as refused:
            [machine.validate("loss", value, NotFinite()) for _ in machine.attempts(1)]
        return str(refused.value)

    for said in run_threads(2, body):
        assert "rank 1: this cannot be kept for a rerun: buffer 'odd' of a Linear" in said


@pytest.mark.parametrize("make", [adam, sharded])
def test_a_save_or_load_inside_of_the_attempts_of_a_step_is_refused(
    groups: ProcessGroups, tmp_path: Path, make: Callable[[nn.Module, ProcessGroups], Any]
) -> None:
    """D7: the step may run again, and its update may have been left out; later it is as any."""
    loop = Loop(groups, tmp_path, make=make, is_given=True)
    batches = loop.machine.replayable(numbered())
    loop.run(1, batches)
    loop.save(tmp_path / "good")

    for number in loop.machine.attempts(1, batches):
        loop.optimizer.zero_grad()
        loss = loop.model(next(batches)).square().mean()
        loss.backward()
        loop.machine.validate("loss", math.nan if number == 0 else loss.item(), NotFinite())
        if make is sharded:
            loop.optimizer.step(veto=loop.machine)  # type: ignore[call-arg]
        else:
            loop.optimizer.zero_grad()
        with Checkpointer(tmp_path / "inside", groups=groups) as checkpointer:
            for state in (loop.state(), {"model": loop.model}):
                with pytest.raises(ConfigError, match=r"save in the middle.*attempts of step 1"):
                    checkpointer.save(2, state)
        with pytest.raises(ConfigError, match=r"load in the middle.*attempts of step 1"):
            loop.load(tmp_path / "good")
    loop.save(tmp_path / "good")
    disabled = Loop(groups, tmp_path / "disabled", mode="disabled")
    for _ in disabled.machine.attempts(0):
        disabled.save(tmp_path / "disabled")


def test_a_step_that_is_saved_as_it_was_left_is_named(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D7: in one line, since its batches are in no checkpoint; not once it has run again."""
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(numbered())
    with contextlib.suppress(MemoryError):
        for _ in loop.machine.attempts(0, batches):
            next(batches)
            raise MemoryError
    loop.save(tmp_path / "good")
    (line,) = loop.lines
    assert "step 0 is saved as the loop has left it" in line
    loop.run(1, batches)
    loop.save(tmp_path / "good")
    assert loop.lines == [line]


@pytest.mark.parametrize("is_rewound", [False, True])
def test_a_rerun_from_a_checkpoint_that_was_left_loses_no_batch(
    groups: ProcessGroups, tmp_path: Path, is_rewound: bool
) -> None:
    """D9: what the source repeats is passed over once, however often the step starts."""
    faults = with_fault(groups, tmp_path, is_rewound=is_rewound)
    loop = Loop(groups, tmp_path, device="B", limits=Limits(max_restarts=1))
    loop.load(faults)
    source = numbered(2 if is_rewound else 4)
    loop.run(3, loop.machine.replayable(source, is_rewound=is_rewound), left_in=0)
    assert loop.machine.decision.exit_code is None  # D10: it is one start
    assert loop.first_numbers == [2, 3, 4, 5]


@pytest.mark.parametrize("is_rewound", [False, True])
def test_the_batches_of_a_fault_are_used_in_every_mode(
    groups: ProcessGroups, tmp_path: Path, is_rewound: bool
) -> None:
    """D21: also if a save comes between the load and the step."""
    faults = with_fault(groups, tmp_path, is_rewound=is_rewound)
    first = 2 if is_rewound else 4
    for mode in ("validate_results", "disabled", "report_determinism_stats"):
        loaded = Loop(groups, tmp_path, mode=mode)
        loaded.load(faults)
        again = tmp_path / mode
        if mode != "report_determinism_stats":
            loaded.machine.replayable(numbered(first), is_rewound=is_rewound)
        loaded.save(again)
        with Checkpointer(again, groups=groups) as checkpointer:
            plain = loaded.state(has_machine=False)
            if is_rewound:
                checkpointer.load(plain)
            else:
                with pytest.raises(MismatchError, match=r"'rerun'.*batches of that step"):
                    checkpointer.load(plain)
        loop = Loop(groups, tmp_path, mode=mode)
        loop.load(again)
        if not is_rewound:
            with pytest.raises(ConfigError, match=r"pass machine\.replayable"):
                next(iter(loop.machine.attempts(1, numbered(first))))
        loop.run(3, loop.machine.replayable(numbered(first), is_rewound=is_rewound))
        assert loop.first_numbers == [2, 3, 4, 5], mode


def test_an_iterator_of_an_evaluation_is_not_that_of_the_step(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D21: whichever was wrapped last, the batches of the fault are those that steps take."""
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(numbered())
    loop.machine.replayable(numbered(), is_rewound=True)
    loop.run(2, batches, bad=(1, 0), num_bad=2)
    loop.save(loop.machine.checkpoints)
    with (
        Checkpointer(loop.machine.checkpoints, groups=groups) as checkpointer,
        pytest.raises(MismatchError, match=r"'rerun'.*batches of that step"),
    ):
        checkpointer.load(loop.state(has_machine=False))


@pytest.mark.parametrize("mode", ["validate_results", "report_determinism_stats"])
@pytest.mark.parametrize("others", ["forgotten", "second", "new"])
def test_batches_of_an_iterator_that_the_step_was_not_given_are_not_repeated(
    groups: ProcessGroups, tmp_path: Path, others: str, mode: str
) -> None:
    """D6: the rerun would run on the next ones, and bad data end as a transient error."""
    machine = Loop(groups, tmp_path, mode=mode).machine
    evaluated, own, second = (machine.replayable(numbered()) for _ in range(3))

    def run(step: int, *taken_from: Any, given: Any = own, num_bad: int = 0) -> None:
        next(evaluated)  # between two steps
        for number in machine.attempts(step, given):
            value = sum(float(next(each()).sum()) for each in taken_from)
            value = math.nan if number < num_bad else value
            machine.validate("loss", value, NotFinite(), fatal=False)

    run(0, lambda: own, num_bad=1)
    settings: dict[str, Any] = {"given": None} if others == "forgotten" else {}
    sources = {
        "forgotten": (lambda: own,),
        "second": (lambda: own, lambda: second),
        "new": (lambda: own, lambda: machine.replayable(numbered())),
    }[others]
    if mode == "validate_results":
        run(1, *sources, **settings)
    with pytest.raises(ConfigError, match=r"step 2.*was not given.*zip"):
        run(2, *sources, **settings, num_bad=1)


def test_two_compared_runs_are_of_one_state_and_hide_nothing(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D13: an update between them is refused; what is rejected or observed is passed on."""
    loop = Loop(groups, tmp_path, mode="report_determinism_stats")
    batches = loop.machine.replayable(numbered())
    loop.run(2, batches, bad=(1, 1), num_bad=2)
    assert "'loss' on rank 0" in loop.lines[-1]
    loop.machine.observe("update", math.nan, NotFinite())
    loop.run(3, batches)
    (event,) = read_report(tmp_path / "rerun")
    assert (event["event"], event["values"][0]["call"]) == ("observed", "update")
    loop.machine.observe("update", math.inf, NotFinite())
    loop.machine.close()
    assert "after step 2: 'update' on rank 0" in loop.lines[-1]

    def steps_inside() -> None:
        for _ in loop.machine.attempts(3, batches):
            loop.model(next(batches)).mean().backward()
            loop.optimizer.step()

    with pytest.raises(ConfigError, match=r"inside the loop.*0.weight"):
        steps_inside()


def test_a_disabled_machine_takes_a_veto_in_each_step(groups: ProcessGroups) -> None:
    """D4: a loop whose optimizer asks it runs as with any other machine."""
    machine = RerunMachine(groups, mode="disabled")
    for step in range(2):
        for _ in machine.attempts(step):
            machine.validate("loss", 1.0, NotFinite())
            assert not machine.vetoes()
            machine.take_decision(False)  # what `step(veto=machine)` does


@pytest.mark.parametrize("broken", [0, 1])
def test_an_entry_that_one_rank_cannot_read_stops_no_other(tmp_path: Path, broken: int) -> None:
    """D3: the fault is dropped on all ranks, which would wait for one another otherwise."""

    def body(groups: ThreadGroups) -> tuple[list[int], list[str]]:
        lines: list[str] = []

        def start(device: str) -> RerunMachine:
            return RerunMachine(
                groups,  # type: ignore[arg-type]
                directory=tmp_path,
                replayed=Replayed(rng=False),
                device=DeviceIdentity(host="h", uuid=f"{device}{groups.rank}"),
                note=lines.append,
            )

        first = start("A")
        batches = first.replayable(range(9))
        for _ in first.attempts(0, batches):
            value = math.nan if groups.rank == 0 else float(next(batches))
            first.validate("loss", value, NotFinite(), local=True)
        entry = save_entry(first)
        if groups.rank == broken:
            entry["version"] = 99
        second = start("B")
        load_entry(second, entry)
        batches, taken = second.replayable(range(1, 9)), []
        for step in range(2):
            for _ in second.attempts(step, batches):
                taken.append(next(batches))
                second.validate("loss", 1.0, NotFinite(), local=True)
        assert second.state is State.NOT_RUNNING_YET
        return taken, lines

    rows = run_threads(2, body)
    assert rows[broken][0] == [1, 2]
    assert rows[1][1] == []
    unread, dropped = rows[0][1][-2:]
    assert "cannot be read" in unread
    assert "is dropped: the ranks have loaded different faults" in dropped

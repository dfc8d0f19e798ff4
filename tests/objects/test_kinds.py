"""States that fit objects of another class: a load takes them, and names the class."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.optim import SGD, Adam, AdamW, RAdam
from torch.optim import lr_scheduler as schedules
from torch.utils.data import Dataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Checkpointer, FromPart, Layout, OptimizerState, ProcessGroups
from holdfast.cli.main import main
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.optim import ChainedOptimizer, ShardedOptimizer
from tests.harness import RankContext, run_ranks
from tests.objects.optimizers import net, train


class Sign(SGD):
    """Entries of SGD, and another update."""


class Around(torch.optim.Optimizer):
    """Steps another optimizer, whose state and groups it shows as its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Numbers(Dataset[int]):
    """Ten."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Others(Numbers):
    """Other ones, as many."""


class Backwards(SequentialSampler):
    """As many, in another order."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(10))


class Count:
    """A state of one number."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Sum(Count):
    """The same entry."""


class Late(Count):
    """Something else is to be set up before it answers."""

    @property
    def scheduler(self) -> Any:
        raise RuntimeError("not set up")


def momentum(kind: Any) -> Callable[[Any], Any]:
    return lambda groups: kind(groups, lr=0.1, momentum=0.9)


def adam(kind: Any, **settings: Any) -> Callable[[Any], Any]:
    return lambda groups: kind(groups, lr=0.1, **settings)


def scheduled(make: Callable[[Any], Any], kind: Any = SGD) -> Any:
    return make(kind(net(0).parameters(), lr=0.1))


def chain(second: Any) -> Any:
    def make(o: Any) -> Any:
        parts = [schedules.ConstantLR(o), second(o)]
        return schedules.SequentialLR(o, parts, milestones=[2])

    return make


def exponential(o: Any) -> Any:
    return schedules.ExponentialLR(o, 0.9)


def stepped(o: Any) -> Any:
    return schedules.StepLR(o, 3)


def loader(data: Any = Numbers, **settings: Any) -> Any:
    return StatefulDataLoader(data(), batch_size=2, **settings)


OPTIMIZERS = [
    (adam(Adam), adam(RAdam), "optimizer.groups.0", "radam:RAdam takes .*adam:Adam"),
    (adam(AdamW), adam(Adam), "optimizer.groups.0", "adam:Adam takes .*adamw:AdamW"),
    (momentum(SGD), momentum(Sign), "optimizer.groups.0", "Sign takes .*sgd:SGD"),
    (
        lambda groups: Around(momentum(SGD)(groups)),
        lambda groups: Around(momentum(Sign)(groups)),
        "optimizer.inner.inner",
        "Sign takes .*sgd:SGD",
    ),
    (adam(Adam), adam(Adam, fused=True), "", ""),
]
OBJECTS = [
    (scheduled(stepped), scheduled(exponential), "part", "Exponen.* takes .*StepLR"),
    (
        scheduled(chain(stepped)),
        scheduled(chain(exponential)),
        "part._schedulers.1",
        "Exponen.* takes .*StepLR",
    ),
    (
        scheduled(exponential),
        AcceleratedScheduler(scheduled(exponential), [scheduled(lambda o: o)]),
        "",
        "",
    ),
    (loader(), loader(Others), "part.dataset", "Others takes .*Numbers"),
    (
        loader(sampler=SequentialSampler(Numbers())),
        loader(sampler=Backwards(Numbers())),
        "part.sampler",
        "Backwards takes .*SequentialSampler",
    ),
    (Count(), Sum(), "part", "Sum takes .*Count"),
    (Late(), Late(), "", ""),
    (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", 2.0), "", ""),
]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2]}, {"params": parameters[2:]}]


def spoken(caplog: pytest.LogCaptureFixture) -> str:
    """Return what was logged since the last call."""
    text = " ".join(each.getMessage() for each in caplog.records)
    caplog.clear()
    return text


def test_an_optimizer_of_another_class_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R1: its entries fit, and it continues by another rule; the same class is silent."""
    checkpointer = Checkpointer(tmp_path)
    for saved, loaded, path, words in OPTIMIZERS:
        model, twin = net(0), net(1)
        optimizer = saved(groups_of(model))
        train(model, optimizer, range(2))
        checkpointer.save(1, {"optimizer": OptimizerState(optimizer, model)}, overwrite=True)
        for make, expected in ((loaded, path), (saved, "")):
            other = OptimizerState(make(groups_of(twin)[::-1]), twin)
            report = checkpointer.load({"optimizer": other})
            assert report.other_kinds == ((expected,) if expected else ())
            assert ("of another class" in report.summary()) == bool(expected)
            text = spoken(caplog)
            assert re.search(words, text) if expected else not text


def test_an_object_of_another_class_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R1: schedules, chained ones, too, what a loader reads, and a user's own classes."""
    checkpointer = Checkpointer(tmp_path)
    for saved, loaded, path, words in OBJECTS:
        checkpointer.save(1, {"part": saved}, overwrite=True)
        report = checkpointer.load({"part": loaded})
        assert report.other_kinds == ((path,) if path else ())
        text = spoken(caplog)
        assert re.search(words, text) if path else not text


def test_classes_are_kept_by_a_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R1: and compared; where none is noted nothing is said."""
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.save(1, {"count": Count()})
    checkpointer.save(2, {"count": Sum()})
    one, other = (f"{tmp_path}/run/iter_000000{step}" for step in (1, 2))
    assert main(["diff", one, other]) == 1
    assert "$kinds.count.(root)" in capsys.readouterr().out
    assert main(["convert", one, f"{tmp_path}/converted", "--to", "holdfast"]) == 0
    report = checkpointer.load({"at": FromPart("count", Sum())}, source=tmp_path / "converted")
    assert report.other_kinds == ("at",)
    path = Path(one) / "manifest.json"
    manifest = decode_manifest(path.read_bytes())
    path.write_bytes(encode_manifest(msgspec.structs.replace(manifest, kinds=None)))
    assert not Checkpointer(tmp_path / "run").load({"count": Sum()}, step=1).other_kinds


def chained(model: nn.Module, groups: ProcessGroups, *kinds: Any) -> OptimizerState:
    parts = zip(("a", "b"), model.children(), kinds, strict=True)
    return OptimizerState(
        ChainedOptimizer(
            {
                name: ShardedOptimizer(
                    model,
                    inner.parameters(),
                    make=momentum(kind),
                    groups=groups,
                    name=name,
                    over="dp_cp",
                    divisor=2,
                )
                for name, inner, kind in parts
            }
        ),
        model,
    )


def of_two_ranks(context: RankContext, root: str) -> list[tuple[str, ...]]:
    """Sharded optimizers of two classes, and an object of another class on each rank."""
    kinds = (Count, Sum)
    model, twin = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        saved = chained(model, groups, SGD, Sign)
        checkpointer.save(1, {"optimizer": saved, "count": kinds[context.rank]()})
        return [
            checkpointer.load({"optimizer": state, "count": kinds[1 - context.rank]()})
            .of_all_ranks(groups.control)
            .other_kinds
            for state in (saved, chained(twin, groups, Sign, SGD))
        ]


@pytest.mark.slow
def test_ranks_note_the_classes_of_their_own(tmp_path: Path) -> None:
    """R1: by group of a chained optimizer; of what is of another class on each rank, all."""
    swapped = ("optimizer.groups.0", "optimizer.groups.1")
    assert run_ranks(2, of_two_ranks, str(tmp_path)).results == [[(), swapped]] * 2

"""What modules keep outside of parameters and buffers is named when training changes it."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import (
    Checkpointer,
    ModuleState,
    OptimizerState,
    PlacementError,
    declare_padding,
)


@dataclass
class Stats:
    """A record of the user's."""

    seen: int = 0
    owner: Stats | None = None

    def __post_init__(self) -> None:
        self.owner = self


class Pair(NamedTuple):
    """A named tuple of the user's."""

    number: int
    tensor: torch.Tensor


class Net(nn.Module):
    """Attributes of every kind; `changes` is what a step does to them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0)
        self.norm = nn.utils.weight_norm(nn.Linear(2, 2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.width, self.rate, self.name = 2, 0.5, "net"
        self.calls, self.is_ready = 0, False
        self.queue: deque[torch.Tensor] = deque(maxlen=4)
        self.messages: dict[int, list[torch.Tensor]] = {1: []}
        self.tables = {"layer": {"keys": torch.zeros(2)}}
        self.calls_of: defaultdict[str, int] = defaultdict(lambda: 0)
        self.stats, self.space = Stats(), SimpleNamespace(calls=0)
        self.pair = Pair(0, torch.zeros(2))
        self.table = torch.arange(4.0)
        self.history = np.zeros(3)
        self.alias = self.linear.weight.detach()
        self.loss: torch.Tensor | None = None
        self.kept = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"kept": self.kept}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.kept = state["kept"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        self.cache = y.detach().sum(0)
        self.loss = y.sum()
        self.kept += 1
        return y


def counts(net: Net) -> None:
    net.calls += 1


def is_initialised(net: Net) -> None:
    net.is_ready = True


def queues(net: Net) -> None:
    net.queue.append(torch.ones(2))


def sends(net: Net) -> None:
    net.messages[1].append(torch.ones(2))


def writes(net: Net) -> None:
    net.table[0] += 1


def replaces(net: Net) -> None:
    net.table = net.table + 1


def records(net: Net) -> None:
    net.history[1] += 1


def fills(net: Net) -> None:
    net.tables["layer"]["keys"] += 1


def tallies(net: Net) -> None:
    net.calls_of["forward"] += 1


def notes(net: Net) -> None:
    net.stats.seen += 1


def spaces(net: Net) -> None:
    net.space.calls += 1


def pairs(net: Net) -> None:
    net.pair.tensor.add_(1)


def anneals(net: Net) -> None:
    net.dropout.p += 0.125


def only_trains(net: Net) -> None:
    with torch.no_grad():
        net.linear.weight += 1


def step(net: Net, changes: Callable[[Net], None]) -> None:
    net(torch.ones(1, 2)).sum().backward()
    changes(net)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (counts, ["calls"]), (is_initialised, ["is_ready"]), (queues, ["queue"]),
        (sends, ["messages"]), (writes, ["table"]), (replaces, ["table"]),
        (records, ["history"]), (fills, ["tables"]), (tallies, ["calls_of"]), (notes, ["stats"]),
        (spaces, ["space"]), (pairs, ["pair"]), (anneals, ["dropout.p"]), (only_trains, []),
    ],
)  # fmt: skip
def test_what_changes_and_is_not_stored_is_named_once(
    changes: Callable[[Net], None],
    names: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Settings, aliases, computed tensors, declared caches and extra state are not (O14).

    A save that is refused in between names nothing, and takes no name from the next one.
    """
    net = Net()
    state = {"model": nn.Sequential(net), "part": ModuleState(nn.Linear(1, 1))}
    reports = []
    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "holdfast"):
        for number in range(4):
            reports.append(checkpointer.save(number, state))
            step(net, changes)
            if number == 0:
                declare_padding(net, "cache", (1,))
                with pytest.raises(PlacementError, match="meta device"):
                    checkpointer.save(9, {**state, "bad": torch.zeros(1, device="meta")})
    paths = [f"model.0.{name}" for name in names]
    assert [list(report.unstored) for report in reports] == [[], paths, [], []]
    messages = [record.message for record in caplog.records if "no state dict" in record.message]
    assert len(messages) == len(names)
    assert all(path in messages[0] for path in paths)


class Counting(torch.optim.SGD):
    """Counts its steps in attributes, of which the groups and the state show some."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model.parameters(), **options)
        self.num_steps, self.shown, self.cut = 0, 0, 3
        self.mean, self.kept = torch.zeros(2), torch.zeros(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_steps += 1
        self.shown += 1
        self.mean += 1
        self.kept += 1
        for group in self.param_groups:
            group["shown"] = self.shown
            self.state[group["params"][0]] |= {"kept": self.kept, "other": self.num_steps}


class Stating(Counting):
    """States what the class before loses."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": {"n": self.num_steps, "mean": self.mean}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = dict(state)
        self.num_steps, self.mean = own.pop("more").values()
        super().load_state_dict(own)


@pytest.mark.parametrize(
    ("kind", "names"), [(Counting, ["num_steps", "mean"]), (Stating, []), (torch.optim.AdamW, [])]
)
def test_what_an_optimizer_changes_and_does_not_store_is_named_once(
    kind: Any, names: list[str], tmp_path: Path
) -> None:
    """O14."""
    model = nn.Linear(2, 2)
    optimizer = kind(model) if issubclass(kind, Counting) else kind(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"optimizer": OptimizerState(optimizer, model), "schedule": schedule}
    reports = []
    with Checkpointer(tmp_path) as checkpointer:
        for number in range(4):
            reports.append(checkpointer.save(number, state))
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            schedule.step()
    paths = [f"optimizer.{name}" for name in names]
    assert [list(report.unstored) for report in reports] == [[], paths, [], []]


def test_a_metric_inside_of_a_module_is_named_unless_it_is_persistent(tmp_path: Path) -> None:
    """Its sums are stored if the user says so; without, torch drops them (O14)."""
    import torchmetrics  # seconds, which a worker without this test need not spend

    with Checkpointer(tmp_path) as checkpointer:
        for number, is_persistent in enumerate((False, True)):
            net = nn.Sequential(nn.Linear(2, 2), torchmetrics.MeanMetric())
            net[1].persistent(is_persistent)
            checkpointer.save(10 * number, {"model": net})
            net[1].update(torch.ones(3))
            unstored = set(checkpointer.save(10 * number + 1, {"model": net}).unstored)
            assert ("model.1._update_count" in unstored) == (number == 0)
            assert ("model.1.mean_value" in unstored) is not is_persistent


def make_total() -> nn.Module:
    """A metric: its hash, as that of every metric, is made of the states, which it replaces."""
    import torchmetrics

    class Total(torchmetrics.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, x: torch.Tensor) -> None:
            self.total = self.total + x.sum()

        def compute(self) -> torch.Tensor:
            return self.total

    return Total()


def test_a_module_whose_hash_changes_is_the_same_module(tmp_path: Path) -> None:
    """O14."""
    net = nn.Sequential(nn.Linear(2, 2), make_total())
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": net})
        net[1].update(torch.ones(3))
        assert "model.1.total" in checkpointer.save(2, {"model": net}).unstored


def test_a_module_made_again_and_its_wrappers_are_not_compared(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for number in range(3):
            net = Net()
            net.calls = number
            report = checkpointer.save(number, {"model": torch.compile(net, backend="eager")})
            assert not report.unstored

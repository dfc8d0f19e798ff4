"""A small training job whose faults are known: what a machine says of it can be compared.

Each rank has parameters of its own and takes batches from an endless stream. A fault makes one
validated value and its gradient NaN (or a spike, where it is the correct result). Launches follow
one another as a scheduler would start them, until the last step or an end of another kind.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast import RNG, OptimizerState
from holdfast.rerun import (
    DeviceIdentity,
    Limits,
    NotFinite,
    Rejects,
    RejectsAny,
    Replayed,
    RerunMachine,
    read_report,
)
from tests.rerun.threads import ThreadGroups, each, run_threads

NUM_STEPS = 5
NUM_MICROBATCHES = 2
SPIKE = 1e6
RULE = RejectsAny(NotFinite(), Rejects(lambda value: value > SPIKE / 2, "is a spike"))


class SavedLoop:
    """What a loop with a machine saves, and loads."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    machine: RerunMachine
    step: int

    def state(self, *, has_machine: bool = True) -> dict[str, object]:
        state: dict[str, object] = {
            "model": self.model,
            "optimizer": OptimizerState(self.optimizer, self.model),
            "rng": RNG(),
            "progress": {"step": self.step},
        }
        return state | {"rerun": self.machine} if has_machine else state


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a job, and whose it is."""

    kind: str
    """transient_error, persistent_error or correct_result."""
    rank: int = 0
    step: int = 2
    microbatch: int = 0
    fatal: bool = True


@dataclass(slots=True, kw_only=True)
class Saved:
    """A checkpoint of all ranks, in memory."""

    step: int = 0
    ranks: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Launch:
    """How one start of the job ended."""

    exit_code: int | None
    verdict: str | None
    params: list[torch.Tensor]
    consumed: list[list[int]]


class Job:
    """A job on threads, its checkpoints and its launches.

    Args:
        directory: of the machine.
        size: ranks.
        faults: of the hardware and the data.
        save_interval: steps between good checkpoints.
        limits: of the machine.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 1,
        faults: Sequence[Fault] = (),
        save_interval: int = 2,
        limits: Limits | None = None,
    ) -> None:
        self.directory = directory
        self.size = size
        self.faults = faults
        self.save_interval = save_interval
        self.limits = limits or Limits()
        self.saved: Saved | None = None
        self.fault_save: Saved | None = None
        self.launches: list[Launch] = []
        self._has_struck: set[int] = set()
        self._struck_on: dict[int, str] = {}

    def launch(self, devices: Sequence[str]) -> Launch:
        """Start the job on these devices, from the newest checkpoint."""
        source = self.saved
        if self.fault_save is not None and (source is None or self.fault_save.step >= source.step):
            source = self.fault_save
        rows = run_threads(self.size, lambda groups: self._run(groups, devices, source))
        saves = {step: [row[1][step] for row in rows] for step in rows[0][1]}
        for step, ranks in saves.items():
            self.saved = Saved(step=step, ranks=ranks)
        if rows[0][2] is not None:
            self.fault_save = Saved(step=rows[0][2]["step"], ranks=[row[2] for row in rows])
        exit_code, verdict = each([row[0] for row in rows])
        launch = Launch(
            exit_code=exit_code,
            verdict=verdict,
            params=[row[3] for row in rows],
            consumed=[row[4] for row in rows],
        )
        self.launches.append(launch)
        return launch

    def run(self, devices: Iterator[Sequence[str]]) -> Launch:
        """Launch until nothing asks for another start."""
        for _ in range(10):
            launch = self.launch(next(devices))
            if launch.exit_code != 16:
                return launch
        raise AssertionError("the job asks for another start for ever")

    def verdicts(self) -> list[str]:
        """The final verdicts of the report, in order."""
        return [
            event["verdict"] for event in read_report(self.directory) if event["event"] == "verdict"
        ]

    def _value(self, rank: int, step: int, microbatch: int, *, runs: int, device: str) -> str:
        """Whether a computation is hit: "good", "nan" or "spike"."""
        for number, fault in enumerate(self.faults):
            if (fault.rank, fault.step, fault.microbatch) != (rank, step, microbatch):
                continue
            if fault.kind == "correct_result":
                return "spike"
            if fault.kind == "transient_error" and number not in self._has_struck:
                self._has_struck.add(number)
                return "nan"
            is_here = self._struck_on.setdefault(number, device) == device
            if fault.kind == "persistent_error" and is_here:
                return "nan"
        return "good"

    def _run(
        self, groups: ThreadGroups, devices: Sequence[str], source: Saved | None
    ) -> tuple[Any, dict[int, Any], Any, torch.Tensor, list[int]]:
        """The job on one rank."""
        rank = groups.rank
        machine = RerunMachine(
            groups,  # type: ignore[arg-type]
            directory=self.directory,
            replayed=Replayed(rng=False),
            device=DeviceIdentity(host="host", uuid=devices[rank]),
            limits=self.limits,
            note=lambda text: None,
        )
        params = torch.zeros(3, dtype=torch.float64)
        step, position = 0, 0
        if source is not None:
            mine = source.ranks[rank]
            step, position = mine["step"], mine["position"]
            params.copy_(mine["params"])
            load_entry(machine, mine["entry"])
        consumed: list[int] = []

        def source_of_batches() -> Iterator[torch.Tensor]:
            for index in itertools.count(position):
                consumed.append(index)
                yield torch.tensor(float(index), dtype=torch.float64)

        batches = machine.replayable(source_of_batches())
        saves: dict[int, Any] = {}
        runs = 0
        while step < NUM_STEPS:
            grad = torch.zeros_like(params)
            for _ in machine.attempts(step, batches):
                runs += 1
                grad.zero_()
                for microbatch in range(NUM_MICROBATCHES):
                    batch = next(batches)
                    kind = self._value(rank, step, microbatch, runs=runs, device=devices[rank])
                    loss = float(batch + params.sum())
                    gradient = batch * 0.1 + params * 0.01 + rank
                    if kind == "nan":
                        loss, gradient = float("nan"), gradient * float("nan")
                    if kind == "spike":
                        loss = SPIKE + loss
                    batch.fill_(-1)  # a program may do as it likes with its batch
                    fatal = any(
                        f.fatal
                        for f in self.faults
                        if (f.rank, f.step, f.microbatch) == (rank, step, microbatch)
                    )
                    machine.validate("loss", loss, RULE, fatal=fatal)
                    grad += gradient
            decision = machine.decision
            if decision.exit_code is not None:
                entry = save_entry(machine)
                # The stream goes on behind the batches of the step, which the machine has kept.
                here = {
                    "step": step,
                    "position": position + len(consumed),
                    "params": params.clone(),
                    "entry": entry,
                }
                verdict = None if decision.verdict is None else decision.verdict.value
                fault = here if decision.save else None
                return (int(decision.exit_code), verdict), saves, fault, params, consumed
            params -= 0.01 * grad
            step += 1
            if step % self.save_interval == 0:
                saves[step] = {
                    "step": step,
                    "position": position + len(consumed),
                    "params": params.clone(),
                    "entry": save_entry(machine),
                }
        return (None, None), saves, None, params, consumed


def save_entry(machine: RerunMachine) -> dict[str, Any]:
    """What a checkpoint would hold of a machine."""
    return copy.deepcopy(machine.tree().tree)  # type: ignore[attr-defined, no-any-return]


def load_entry(machine: RerunMachine, entry: dict[str, Any]) -> None:
    """What a load under the same layout does."""
    machine.restore({"here": copy.deepcopy(entry)})

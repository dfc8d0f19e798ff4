"""Plays scenarios on the ranks of one set of processes: a start is a machine of its own.

Everything but the end of processes is real: collectives, checkpoints, loads. The record of a job
has what the ranks did, for an oracle that trusts nothing that the machine says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import RNG, Checkpointer, ProcessGroups
from holdfast.rerun import (
    DeviceIdentity,
    NotFinite,
    Rejects,
    RejectsAny,
    Replayed,
    RerunMachine,
    read_report,
)
from tests.harness import RankContext
from tests.rerun.spread.model import TOKENS, WIDTH, Model, Trainer, norm
from tests.rerun.spread.scenario import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    SPIKE,
    Scenario,
    Scheduler,
    draw,
    host_of,
)
from tests.rerun.spread.strikes import Strikes

_LARGE = 1e6


def _is_large(value: Any) -> bool:
    return bool(abs(value) > _LARGE)


RULE = RejectsAny(NotFinite(), Rejects(_is_large, "is a spike"))
MAX_STARTS = 16


@dataclass(kw_only=True)
class Run:
    """One run of a step on one rank."""

    step: int
    replica: int = -1
    """The data rank whose batches it took."""
    indices: list[int] = field(default_factory=list)
    """Of these batches."""
    values: list[tuple[str, int, bool, str]] = field(default_factory=list)
    """Of each validated value: name, occurrence, whether it is bad, and who feeds it."""
    num_strikes: int = 0


@dataclass(kw_only=True)
class Start:
    """One start of a job on one rank."""

    devices: list[str]
    first_step: int = 0
    runs: list[Run] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    """Steps whose update was made, with the last run of the step."""
    skipped: list[int] = field(default_factory=list)
    exit_code: int | None = None
    verdict: str | None = None
    save: bool = False
    messages: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """What the report has of it; on the first rank only."""


@dataclass(kw_only=True)
class Record:
    """What one rank saw of a job."""

    starts: list[Start] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What is not as in a job without the fault, at the end."""


class Job:
    """A job on one rank, through all of its starts.

    Args:
        scenario: what happens.
        groups: of its layout.
        root: of its checkpoints and its report.
        undisturbed: how jobs end without a fault, by what they compute; filled as needed.
    """

    def __init__(
        self,
        scenario: Scenario,
        groups: ProcessGroups,
        root: Path,
        undisturbed: dict[Any, dict[str, bytes]],
    ) -> None:
        self._undisturbed = undisturbed
        self.scenario = scenario
        self.groups = groups
        self.root = root
        self.scheduler = Scheduler(scenario)
        self.strikes = Strikes(scenario, groups.rank)
        self.record = Record()
        self.machine: RerunMachine | None = None
        """Of the start that runs; None in a job without one."""
        self.current: Start | None = None
        at = scenario.layout.coordinate(groups.rank)
        self.replica, self._context = at["dp"], at["cp"]

    def play(self, *, max_starts: int = MAX_STARTS) -> Record:
        """Start the job until it ends by itself, or so many times."""
        for _ in range(max_starts):
            start = self.start(list(self.scheduler.now))
            if self.groups.rank == self.groups.layout.ranks[0]:
                before = sum(len(each.events) for each in self.record.starts)
                start.events = self._events()[before:]
            self.record.starts.append(start)
            if start.exit_code is None:
                self._compare()
                return self.record
            shared = [start.events]
            dist.broadcast_object_list(shared, src=self.groups.layout.ranks[0])
            self.scheduler.move(start.exit_code, convicted_by(shared[0] or []))
        if max_starts == MAX_STARTS:
            self.record.wrong.append(f"the job has not ended after {MAX_STARTS} starts")
        return self.record

    def _events(self) -> list[dict[str, Any]]:
        directory = self.root / "rerun"
        return read_report(directory) if (directory / "report.jsonl").exists() else []

    def _begin(self) -> Trainer:
        """A new trainer; streams and weights are those of a first start."""
        strikes = self.strikes
        strikes.step = strikes.microbatch = -1
        torch.manual_seed(1000 * self.scenario.content_seed + 10 * self.replica + self._context)
        return Trainer(Model(self.groups, seed=self.scenario.content_seed, probe=strikes))

    def start(self, devices: list[str]) -> Start:
        """Start the job on these devices, by rank, from the newest checkpoint."""
        groups, scenario = self.groups, self.scenario
        start = self.current = Start(devices=devices)
        self.strikes.devices = devices
        trainer = self._begin()
        device = devices[groups.rank]
        self.trainer = trainer
        machine = self.machine = RerunMachine(
            groups,
            directory=self.root / "rerun",
            replayed=Replayed(modules=[trainer.model]),
            device=DeviceIdentity(host=host_of(device), uuid=device),
            optimizers=[trainer.optimizer],
            skip_rejected=True,
            note=start.messages.append,
        )
        self._progress: dict[str, int] = {"step": 0, "position": 0}
        with (
            Checkpointer(machine.checkpoints, groups=groups) as faults,
            Checkpointer(self.root / "good", groups=groups) as good,
        ):
            self._resume(faults, good)
            position = self._progress["position"]
            if scenario.is_rewound:
                position = self._progress["step"] * NUM_MICROBATCHES
            self._taken = position
            batches = machine.replayable(self._source(), is_rewound=scenario.is_rewound)
            start.first_step = self._progress["step"]
            for step in range(self._progress["step"], NUM_STEPS):
                self.strikes.step = step
                if machine.skips(step):
                    for _ in range(NUM_MICROBATCHES):
                        next(batches)
                    start.skipped.append(step)
                else:
                    self._step(step, batches, start)
                decision = machine.decision
                if decision.verdict is not None:
                    start.verdict = decision.verdict.value
                if decision.exit_code is not None:
                    start.exit_code, start.save = int(decision.exit_code), decision.save
                    self._progress |= {"step": step, "position": self._taken}
                    if decision.save:
                        faults.save(step, self._state(), overwrite=True)
                    break
                self._progress |= {"step": step + 1, "position": self._taken}
                if step + 1 < NUM_STEPS and (step + 1) % scenario.save_interval == 0:
                    good.save(step + 1, self._state(), overwrite=True)
        return start

    def _state(self) -> dict[str, object]:
        return {
            **self.trainer.state(),
            "rng": RNG(),
            "progress": self._progress,
            "rerun": self.machine,
        }

    def _resume(self, faults: Checkpointer, good: Checkpointer) -> None:
        """Load the checkpoint that the machine names."""
        assert self.machine is not None
        point = self.machine.resume_point(good, faults)
        if point is not None:
            source, step = point
            assert isinstance(source, Checkpointer)
            loaded: Any = source.load(self._state(), step=step).values["progress"]
            self._progress = dict(loaded)

    def _source(self) -> Iterator[dict[str, Tensor]]:
        for index in itertools.count(self._taken):
            self._taken += 1
            yield self._batch(index)

    def _batch(self, index: int) -> dict[str, Tensor]:
        """The batch of this data and context rank; bad in one of its elements if so drawn."""
        scenario = self.scenario
        number = ((scenario.content_seed * 100 + index) * 10 + self.replica) * 10 + self._context
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        targets = torch.randn(TOKENS, 1, generator=generator, dtype=torch.float64)
        at = scenario.layout.coordinate(scenario.rank)
        is_bad = (
            scenario.kind == "data"
            and index == scenario.step * NUM_MICROBATCHES + scenario.microbatch
            and (self.replica, self._context) == (at["dp"], at["cp"])
        )
        if is_bad:
            bad = {"nan": torch.nan, "inf": torch.inf, "spike": SPIKE}[scenario.spoil]
            inputs.view(-1)[int(scenario.element * inputs.numel())] = bad
        where = torch.tensor([self.replica, index])
        return {"inputs": inputs, "targets": targets, "where": where}

    def _step(self, step: int, batches: Any, start: Start) -> None:
        """One step of training, as often as the machine asks for it."""
        machine, trainer = self.machine, self.trainer
        assert machine is not None
        gradients: dict[str, Tensor] = {}
        for number in machine.attempts(step, batches):
            if number:
                self.strikes.end_run()
            self.strikes.num = 0
            trainer.optimizer.zero_grad()
            run = Run(step=step)
            start.runs.append(run)
            gradients = self._run(run, batches)
            run.num_strikes = self.strikes.num
        if machine.decision.exit_code is None:
            if self.scenario.program != "reduced":
                gradients = trainer.model.reduced(gradients)
            trainer.step(gradients)
            start.applied.append(step)
        self.strikes.end_run()

    def _run(self, run: Run, batches: Any) -> dict[str, Tensor]:
        """All microbatches; the gradients, reduced over data ranks if the program does that."""
        model, strikes = self.trainer.model, self.strikes
        for microbatch in range(NUM_MICROBATCHES):
            batch = next(batches)
            replica, index = batch["where"].tolist()
            run.replica = strikes.replica = replica
            run.indices.append(index)
            strikes.microbatch = microbatch
            loss, embedded = model.run(batch["inputs"], batch["targets"])
            batch["inputs"].fill_(torch.nan)  # a program may do as it likes with its batch
            if embedded is not None and self.scenario.program == "local":
                self._validate(run, "embedded", embedded.item(), local=True)
            if loss is not None:
                self._validate(run, "loss", loss.item(), fatal=self.scenario.fatal)
        gradients = model.gradients()
        self._validate(run, "gradient", norm(gradients))
        if self.scenario.program == "reduced":
            gradients = model.reduced(gradients)
            self._validate(run, "reduced", norm(gradients), fed_by="all")
        return gradients

    def _validate(
        self,
        run: Run,
        name: str,
        value: float,
        *,
        fatal: bool = True,
        local: bool = False,
        fed_by: str | None = None,
    ) -> None:
        occurrence = sum(each[0] == name for each in run.values)
        is_bad = not abs(value) <= _LARGE
        fed = "local" if local else fed_by or "replica"
        run.values.append((name, occurrence, is_bad, fed))
        if self.machine is None:
            return
        self.machine.validate(name, value, RULE, fatal=fatal, local=local, fed_by=fed_by)

    def _compare(self) -> None:
        """Compare with a job of the same batches without a machine, on devices that are right."""
        last = self.trainer.bits()
        skipped = tuple(sorted({step for start in self.record.starts for step in start.skipped}))
        scenario = self.scenario
        bad = (scenario.step, scenario.microbatch, scenario.rank, scenario.spoil, scenario.element)
        key = (
            scenario.layout_name,
            scenario.content_seed,
            skipped,
            scenario.kind == "data" and bad,
        )
        if key not in self._undisturbed:
            self._undisturbed[key] = self.run_undisturbed(skipped)
        mine = self._undisturbed[key]
        self.record.wrong += [
            f"rank {self.groups.rank}: {name} has other bits than without the fault"
            for name in mine
            if mine[name] != last[name]
        ]

    def run_undisturbed(self, skipped: tuple[int, ...]) -> dict[str, bytes]:
        """Return the bits of a whole job on devices that are right, without a machine."""
        self.strikes.devices = ["whole"] * len(self.scheduler.now)
        trainer = self.trainer = self._begin()
        self.machine = None
        self._taken = 0
        batches = self._source()
        for step in range(NUM_STEPS):
            self.strikes.step = step
            if step in skipped:
                next(batches), next(batches)
                continue
            trainer.optimizer.zero_grad()
            gradients = self._run(Run(step=step), batches)
            if self.scenario.program != "reduced":
                gradients = trainer.model.reduced(gradients)
            trainer.step(gradients)
        return trainer.bits()


def convicted_by(events: list[dict[str, Any]]) -> list[str]:
    """Return the devices that the verdicts among some events blame."""
    found: dict[str, None] = {}
    for event in events:
        if event["event"] == "verdict":
            for each in event["convicted"]:
                found[each["device"]] = None
    return list(found)


def play_all(
    context: RankContext, root: str, seeds: list[int], max_starts: int, options: dict[str, Any]
) -> list[Record]:
    """Play the scenarios of some seeds, whose layouts have as many ranks as there are here."""
    records = []
    with ExitStack() as stack:
        made: dict[str, ProcessGroups] = {}
        undisturbed: dict[Any, dict[str, bytes]] = {}
        for seed in seeds:
            scenario = draw(seed, **options)
            print(scenario, flush=True)  # shown if a rank is late or fails
            layout = scenario.layout
            if scenario.layout_name not in made:
                made[scenario.layout_name] = stack.enter_context(
                    ProcessGroups.create(layout, timeout_s=20, data_timeout_s=20)
                )
            groups = made[scenario.layout_name]
            job = Job(scenario, groups, Path(root) / str(seed), undisturbed)
            try:
                records.append(job.play(max_starts=max_starts))
            except BaseException as error:
                error.add_note(f"in {scenario}, start {len(job.record.starts)}")
                raise
    return records

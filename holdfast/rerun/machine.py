"""The rerun machine: runs a step again where a value of it was rejected, and says what it was."""

from __future__ import annotations

import logging
import operator
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.arguments import check_int
from holdfast.errors import ConfigError, FaultError, HoldfastError
from holdfast.format.names import FAULT_CHECKPOINTS
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import DENSE_AXES
from holdfast.parallel.ranks import disagreement
from holdfast.rerun.attempt import Compare
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.evidence import Place
from holdfast.rerun.injection import ErrorInjector, point_of
from holdfast.rerun.journal import Journal
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import Rule
from holdfast.rerun.states import Limits, Mode
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.steps import RUNNING, MachineSteps
from holdfast.rerun.tracker import Tracker
from holdfast.rerun.values import Value, plain_value
from holdfast.state.markers import coordinate_label


class RerunMachine(MachineSteps):
    """Runs a step again where a value of it was rejected, and tells what the fault was.

        machine = RerunMachine(groups, directory="ckpt/rerun", replayed=Replayed(modules=[model]))
        batches = machine.replayable(loader)
        for step in range(first, last):
            for _ in machine.attempts(step, batches):
                optimizer.zero_grad()
                loss = forward_backward(model, next(batches))
                machine.validate("loss", loss, NotFinite())
            if machine.decision.exit_code is not None:
                ...  # save if machine.decision.save, then sys.exit(machine.decision.exit_code)
            optimizer.step()

    It belongs to one model and its groups; several machines in one process know nothing of each
    other. It is a part of the state (`{"rerun": machine}`) that a checkpoint may lack. Making one
    is collective.

    Args:
        groups: of the model; their control carries what the ranks tell each other.
        mode: see `Mode`.
        directory: where the report is, and fault checkpoints go; one for each machine. Needed in
            mode `validate_results`.
        replayed: what is brought back before a rerun; default: the global random streams.
        name: of the machine, in messages.
        device: of this process; default: from its current device, see `DeviceIdentity`.
        limits: after how many tries it gives up.
        tracker: a file of rejected steps: one that was rejected in two jobs on the same rank is
            skipped from then on (`skips`).
        injector: makes values bad, to try everything out.
        report_every: steps between two reports on determinism.
        codecs: for batches of a user's own types.
        note: takes each line for the person, on the coordinator; default: a logged warning.

    Raises:
        ConfigError: an argument is wrong, or ranks have different ones; on all ranks.
        StorageError: the tracker's file cannot be read; on all ranks.

    Cost: in a step without a rejected value one small collective, and what `Replayed.take` and
    keeping the batches take; nothing while disabled.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        mode: Mode | str = Mode.VALIDATE_RESULTS,
        directory: str | os.PathLike[str] | None = None,
        replayed: Replayed | None = None,
        name: str = "rerun",
        device: DeviceIdentity | torch.device | None = None,
        limits: Limits | None = None,
        tracker: str | os.PathLike[str] | None = None,
        injector: ErrorInjector | None = None,
        report_every: int = 100,
        codecs: Codecs | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        error: HoldfastError | None = None
        known = Mode.DISABLED
        try:
            known = _parse_mode(mode)
            if known is Mode.VALIDATE_RESULTS and directory is None:
                raise ConfigError(
                    f"RerunMachine(mode='{known.value}') needs directory=: where the report is, "
                    f"and a fault checkpoint goes"
                )
            check_int(report_every, name="RerunMachine: report_every", least=1)
        except HoldfastError as reason:
            error = reason
        super().__init__(
            groups,
            mode=known,
            injector=injector,
            note=note or logging.getLogger("holdfast").warning,
        )
        self.name = name
        self.directory = None if directory is None else Path(directory)
        self.device = device if isinstance(device, DeviceIdentity) else DeviceIdentity.of(device)
        self._replayed = replayed if replayed is not None else Replayed()
        self._limits = limits or Limits()
        self._report_every = report_every
        self._codecs = codecs if codecs is not None else Codecs()
        self._journal = None if self.directory is None else Journal(self.directory)
        self._tracker = None if tracker is None else Tracker(Path(tracker))
        self._coordinate = coordinate_label(groups.layout, groups.rank, DENSE_AXES, path=name)
        self._reset()
        self._meet(error)

    @property
    def checkpoints(self) -> Path:
        """The directory of fault checkpoints, an ordinary root of checkpoints of its own.

        Raises:
            ConfigError: the machine has no directory.
        """
        if self.directory is None:
            raise ConfigError("a machine without directory= has no fault checkpoints")
        return self.directory / FAULT_CHECKPOINTS

    def replayable(
        self, source: Iterable[Any], *, is_rewound: bool = False
    ) -> ReplayableBatches | Iterator[Any]:
        """An iterator of the same batches that the machine can rewind; see `ReplayableBatches`.

        Args:
            source: of batches, endless or not.
            is_rewound: whether the source, in a run that was resumed, starts again with the first
                batch of the next step, whatever had been taken when the state was saved: one whose
                position is the number of finished steps. The batches of a rerun step, which the
                checkpoint holds, are then passed over in it.

        While the machine is disabled it is a plain iterator.
        """
        if self.mode is Mode.DISABLED:
            return iter(source)
        self._batches = ReplayableBatches(source, codecs=self._codecs, is_rewound=is_rewound)
        return self._batches

    def skips(self, step: int) -> bool:
        """Whether the tracker says that a step is not to be trained on.

        Its batches are to be taken and left. A step that a pending fault is about is run until the
        fault has its verdict; what `replayable` returned gives the batches that were kept then.
        """
        step = _checked_step(step)
        if step not in self._skipped:
            return False
        fault = self.fault
        if fault is None or fault.step != step:
            return True
        if fault.fault not in self._judged:
            return False
        if not self._is_left:
            self._replay_kept(fault, self._kept, self._batches)
            self._is_left = True
        return True

    def attempts(self, step: int, batches: object = None) -> Iterator[int]:
        """The runs of a step: one, and further ones where a value was rejected. Collective.

        Before each further one random streams, buffers and hooks are what they were before the
        first, and `batches` starts again with the first batch of the step. Gradients are the
        caller's: drop them at the beginning of each run. After the last run `decision` says what to
        do. Where a checkpoint with a pending fault was loaded, the first step is the one that was
        bad, on the batches that were kept.

        Args:
            step: its number, a whole one of at most 63 bits; the same on all ranks.
            batches: what the step takes batches from: `replayable(...)`. Another iterator will do
                until a value is rejected. None where the step's data does not come from an
                iterator: then each run of the step, also after a restart, must use the same.

        Yields:
            The number of the run, from 0.

        Raises:
            ConfigError: `step` is no such number. On all ranks: a step with a rejected value whose
                batches cannot be taken again, or a loop that goes on after an exit code.
            FaultError: in mode `report_determinism_stats`, on all ranks, for a fatal value that is
                rejected in both runs.
        """
        step = _checked_step(step)
        is_wrapped = batches is None or isinstance(batches, ReplayableBatches)
        if self.mode is Mode.REPORT_DETERMINISM_STATS and not is_wrapped:
            raise ConfigError(
                f"step {step}: every step runs twice in mode '{self.mode.value}', on the same "
                f"batches, but `attempts` was given a {type(batches).__name__}: give it "
                f"machine.replayable(iterator)"
            )
        if not self._begin(step, batches):
            return
        number = 0
        yield number
        while self._conclude():
            number += 1
            yield number

    def validate(
        self,
        name: str,
        value: Value,
        rule: Rule,
        *,
        fatal: bool = True,
        tolerance: float = 0.0,
        compare: Compare | None = None,
    ) -> None:
        """Validate a value of the step that runs; local to this rank.

        Validate what a rank has computed itself, before it is reduced over ranks: afterwards all
        ranks have the same bad value, and nobody knows whose it was.

        Args:
            name: of the value; a name may be used several times in a step, in the same order.
            value: a number, an array or a tensor; the rule, the comparison and the report get what
                `plain_value` makes of it: of a DTensor what this rank has.
            rule: what is rejected.
            fatal: whether the run ends once the fault has its verdict; otherwise it goes on.
            tolerance: the largest relative difference of two values that count as the same; above 0
                where runs of a step are not bitwise equal by nature.
            compare: computes the relative difference of two values, 0.0 for the same; default
                `relative_difference`.

        Raises:
            FaultError: on this rank, for a fatal rejected value of a disabled machine.
            ConfigError: outside of `attempts`, the value is none that can be looked at, or another
                argument is not of its kind.

        Cost: that of the rule; reading a tensor of a GPU waits for it.
        """
        if self.mode is not Mode.DISABLED and self.state not in RUNNING:
            raise ConfigError(
                f"validate({name!r}) outside of a run: call it inside `for _ in "
                f"machine.attempts(step, batches)`"
            )
        _check_call(name, rule, tolerance)
        value = plain_value(value)
        call = self._attempt.next_call(name)
        if self._injector is not None:
            value = self._injected(call, value)
        why = rule.rejects(value, self.learned.of(name))
        if why is not None and not isinstance(why, str):
            raise ConfigError(
                f"validate({name!r}): {type(rule).__name__}.rejects returned {why!r}; it returns "
                f"None, or in words why the value is rejected"
            )
        if self.mode is Mode.DISABLED:
            self._refuse_when_disabled(name, why, fatal=fatal)
        else:
            self._attempt.take(
                call, value, why, fatal=bool(fatal), tolerance=float(tolerance), compare=compare
            )
        if why is None:
            self.learned.accept(name, value, window=rule.window)

    def close(self) -> None:
        """Forget kept batches; a machine needs no other end."""
        self._batches = None

    def record_drift(self, error: BaseException) -> None:
        """Record in the report that ranks hold other bytes than their replicas do. Collective.

        For the DriftError of a save that compares replicas, and the CorruptionError of a load of
        copies that differ: evidence of a device that computes wrong values without NaN or Inf.

        Args:
            error: what was raised. Its `details["odd_ranks"]` are recorded with host and device.

        Raises:
            StorageError: the report cannot be written; on all ranks.
        """
        places = {place.rank: place for place in self._places}
        ranks = error.details.get("odd_ranks", ()) if isinstance(error, HoldfastError) else ()
        named = [msgspec.structs.asdict(places[rank]) for rank in ranks if rank in places]
        self._record("drift", {"message": str(error), "values": named})
        for place in named:
            self._say(
                f"rank {place['rank']} ({place['host']}, {place['device']}) holds other bytes than "
                f"its replicas"
            )

    def report_statistics(self) -> None:
        """Report how far two runs of the same step have differed so far. Collective.

        Mode `report_determinism_stats` calls it every `report_every` steps. The report gets an
        event `determinism`, the person a table.
        """
        payload = msgspec.json.encode(self.statistics.report())
        rows = self.groups.control.all_gather(payload, phase=f"{self.name}: determinism")
        merged = DeterminismStatistics.merged([msgspec.json.decode(row) for row in rows])
        self._record("determinism", {"num_steps": self._num_compared, "calls": merged.report()})
        self._say(f"step {self._step}: two runs of each step, compared\n{merged.table()}")

    def _refuse_when_disabled(self, name: str, why: str | None, *, fatal: bool) -> None:
        """What a disabled machine does with a rejected value: an error, or a line."""
        if why is None:
            return
        text = f"step {self._step}: '{name}' on rank {self.groups.rank} was rejected: {why}"
        if fatal:
            raise FaultError(
                f"{text}; no rerun machine is enabled that could say whose fault it is"
            )
        self._note(text)

    def _meet(self, error: HoldfastError | None) -> None:
        """Compare arguments with the other ranks, and learn where they run. Collective."""
        control = self.groups.control
        skipped: list[int] = []
        judged: list[str] = []
        faults: list[str] = []
        try:
            if control.is_coordinator and error is None:
                skipped = sorted(self._tracker.steps_to_skip()) if self._tracker else []
                judged, faults = self._read_judged()
        except HoldfastError as reason:
            error = reason
        place = Place(
            rank=self.groups.rank,
            coordinate=self._coordinate,
            host=self.device.host,
            device=self.device.uuid,
        )
        settings = {
            "mode": self.mode.value,
            "name": self.name,
            "limits": repr(self._limits),
            "report_every": str(self._report_every),
            "directory": "None" if self.directory is None else "given",
            "tracker": "None" if self._tracker is None else "given",
        }
        message = _Meeting(settings, uuid.uuid4().hex[:16], place, skipped, judged, faults)
        rows = control.agree(error, phase="RerunMachine", payload=msgspec.msgpack.encode(message))
        met = [msgspec.msgpack.decode(row, type=_Meeting) for row in rows]
        for name, value in met[0].settings.items():
            if any(each.settings[name] != value for each in met):
                values = [each.settings[name] for each in met]
                raise ConfigError(
                    str(disagreement("RerunMachine", name, values, ranks=control.ranks))
                )
        self._job = met[0].job
        self._places = [each.place for each in met]
        self._skipped = frozenset(met[0].skipped)
        self._judged = set(met[0].faults)
        if self._injector is not None:
            self._injector.leave_out(met[0].judged)

    def _read_judged(self) -> tuple[list[str], list[str]]:
        """Of the verdicts in the report: where their values were, and the ids of the faults.

        Errors are not injected there again, and a step of such a fault may be skipped; without an
        injector and a tracker nothing is read.
        """
        if self._journal is None or (self._injector is None and self._tracker is None):
            return [], []
        verdicts = [event for event in self._journal.events() if event["event"] == "verdict"]
        points = [
            point_of(event["step"], each["coordinate"], each["call"], each["occurrence"])
            for event in verdicts
            for each in event["values"]
        ]
        return points, [str(event["fault"]) for event in verdicts]


class _Meeting(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others when machines are made."""

    settings: dict[str, str]
    job: str
    place: Place
    skipped: list[int]
    judged: list[str]
    faults: list[str]


def _checked_step(step: object) -> int:
    """The number of a step as Python's own; ConfigError for what is no whole number."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(step, bool) or abs(number) >= 2**63:
        raise ConfigError(
            f"a step is a whole number of at most 63 bits, not {step!r} of type "
            f"{type(step).__name__}"
        )
    return number


def _check_call(name: object, rule: object, tolerance: float) -> None:
    """ConfigError, at once, for what could not be recorded or used once a value is rejected."""
    if not isinstance(name, str):
        raise ConfigError(f"validate({name!r}): a name is a text, the same in each step")
    is_rule = callable(getattr(rule, "rejects", None)) and hasattr(rule, "window")
    if not is_rule or isinstance(rule, type):
        fix = "; wrap a function: Rejects(function, message)" if callable(rule) else ""
        raise ConfigError(f"validate({name!r}): a {type(rule).__name__} is no rule{fix}")
    if not tolerance >= 0:
        raise ConfigError(f"validate({name!r}): tolerance={tolerance!r} is no number from 0 on")


def _parse_mode(mode: Mode | str) -> Mode:
    """The mode of this name."""
    try:
        return Mode(mode)
    except ValueError as error:
        known = ", ".join(each.value for each in Mode)
        raise ConfigError(f"RerunMachine(mode={mode!r}): it is one of {known}") from error

"""The rerun machine: the interface for a training loop, and a part of the state.

A loop asks `attempts` for the runs of a step, shows its values to `validate`, and does what
`decision` says. `course.py` has everything that follows from a rejected value; `team.py` has the
messages between ranks and the report.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.arguments import check_callable, check_instance, check_int
from holdfast.errors import ConfigError, CorruptionError, FaultError, HoldfastError
from holdfast.format.names import FAULT_CHECKPOINTS
from holdfast.format.values import Codecs
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import DENSE_AXES
from holdfast.rerun.attempt import Call, Compare, check_call, checked_step
from holdfast.rerun.course import Course
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.entry import Entry, PendingFault, pick_entries
from holdfast.rerun.injection import ErrorInjector
from holdfast.rerun.journal import Journal
from holdfast.rerun.places import FedBy
from holdfast.rerun.reactions import Diagnose, OnVerdict, Reactions
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import Learned, Rule
from holdfast.rerun.states import (
    Decision,
    Limits,
    Mode,
    Policy,
    State,
)
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.team import Root, Team
from holdfast.rerun.training_state import TrainingState
from holdfast.rerun.values import Value, host_value, local_value
from holdfast.rerun.vouching import Compute, Vouching
from holdfast.state import OptionalPart, Stored, StoredPart
from holdfast.state.coordinates import PerRankRequest, PerRankSource, PickedPerRank
from holdfast.state.markers import PerRank
from holdfast.state.unfinished import set_worker

_LAST_STARTED: ContextVar[weakref.ref[RerunMachine]] = ContextVar("holdfast_rerun_machine")
"""The machine that has started a step last, in this context: a step inside of it is refused."""


class RerunMachine(OptionalPart):
    """Runs a step again if a value was rejected, and finds out what the fault was.

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

    A step has five phases, in this order: `attempts` starts it; `validate` takes the values of each
    run; at the end of a run all ranks report; a rerun is judged; a value that was bad twice is kept
    for a rerun in another process. `course.py` names the method of each.

    A machine belongs to one model and its groups; several machines in one process know nothing of
    each other. It is a part of the state (`{"rerun": machine}`) that a checkpoint may lack. The
    constructor is collective.

    Args:
        groups: of the model; their control carries the messages between the ranks.
        mode: see `Mode`.
        directory: of the report and of fault checkpoints; one for each machine. Required in mode
            `validate_results`.
        replayed: restores what a run changes before a rerun; default: the global random streams.
        name: of the machine, in messages.
        device: of this process; default: its current device, see `DeviceIdentity`.
        limits: numbers of reruns and restarts after which the machine gives up.
        policy: which verdicts on a fatal value end the run; default: all.
        optimizers: of the model. With the parameters of the modules in `replayed` their state is
            looked at, to tell a fault that is older than its step.
        second_opinion: True to let another data replica run what was bad twice, where one has
            devices of its own; its parameters are compared first.
        skip_rejected: True to skip a step from then on (see `skips`) if, by the report, its data
            was proved bad: the same value on two sets of devices that have none in common.
        injector: makes values bad, to try everything out.
        report_every: steps between two reports on determinism.
        codecs: for batches of a user's own types.
        note: takes each line for the person, on the coordinator; default: a logged warning.
        on_verdict: is called on all ranks with each verdict, as it is in the report.
        diagnose: is called on ranks that feed a value that was bad twice, to test their device; the
            report gets what it returns.

    Raises:
        ConfigError: an argument is wrong, or ranks have different ones; on all ranks.
        StorageError, CorruptionError: the report cannot be read; on all ranks.

    Cost: in a step without a rejected value one sum of 8 bytes (none if the optimizer's own sum
    carries it: `step(veto=machine)`), the cost of `Replayed.take`, and a copy of the batches;
    nothing while disabled. At the first step one pass over parameters and optimizer states.
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
        policy: Policy | None = None,
        optimizers: Sequence[Any] = (),
        second_opinion: bool = True,
        skip_rejected: bool = False,
        injector: ErrorInjector | None = None,
        report_every: int = 100,
        codecs: Codecs | None = None,
        note: Callable[[str], None] | None = None,
        on_verdict: OnVerdict | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.groups = groups
        self.name = name
        self.directory = None if directory is None else Path(directory)
        self.device = DeviceIdentity(host="", uuid="")
        self.mode = Mode.DISABLED
        self._injector = injector
        self._batches: object = None
        """The last iterator that `replayable` has returned."""
        self._is_inside = False
        """True while a loop is inside of `attempts`."""
        self._is_own_layout = True
        self._is_left = False
        """True if the step of the fault is skipped, and its kept batches are replayed."""
        self._loaded_need = ""
        """Why a load without a machine would have lost something of what was loaded."""
        limits, policy = limits or Limits(), policy or Policy()
        is_known = replayed is not None
        replayed = replayed if replayed is not None else Replayed()
        self._streams = replayed.streams
        # A rank with a wrong argument still meets the others, which would wait for it otherwise.
        error: HoldfastError | None = None
        try:
            self.device = DeviceIdentity.of(device)
            self.mode = _check_settings(
                mode, directory=directory, report_every=report_every, skip_rejected=skip_rejected
            )
            # What only a fault uses, too: it may come after weeks.
            check_instance(limits, name="RerunMachine: limits", kind=Limits)
            check_instance(policy, name="RerunMachine: policy", kind=Policy)
            check_callable(note, name="RerunMachine: note")
            check_callable(on_verdict, name="RerunMachine: on_verdict")
            check_callable(diagnose, name="RerunMachine: diagnose")
            state = TrainingState(replayed.modules, optimizers)
        except HoldfastError as reason:
            error, state = reason, TrainingState(())
        self._course = Course(
            Team(
                groups,
                name=name,
                device=self.device,
                journal=None if self.directory is None else Journal(self.directory),
                note=note or logging.getLogger("holdfast").warning,
                modules=replayed.modules,
            ),
            mode=self.mode,
            replayed=replayed,
            limits=limits,
            policy=policy,
            state=state,
            asks_replicas=bool(second_opinion),
            codecs=codecs if codecs is not None else Codecs(),
            report_every=report_every,
            checkpoints=None if self.directory is None else self.checkpoints,
            reactions=Reactions(
                injector=injector,
                on_verdict=on_verdict,
                diagnose=diagnose,
                watches_buffers=self.mode is Mode.VALIDATE_RESULTS and not is_known,
            ),
        )
        for module in replayed.modules:
            set_worker(self, on=module)
        self._vouching = Vouching(self._course.team, replayed=replayed, codecs=self._course.codecs)
        settings = {
            "mode": self.mode.value,
            "name": name,
            "limits": repr(limits),
            "policy": repr(policy),
            "second_opinion": str(bool(second_opinion)),
            "on_verdict": "None" if on_verdict is None else "given",
            "diagnose": "None" if diagnose is None else "given",
            "report_every": str(report_every),
            "directory": "None" if directory is None else "given",
            "skip_rejected": str(skip_rejected),
        }
        self._past = self._course.team.meet(error, settings=settings)
        self._course.judged.update(self._past.faults)
        self._course.spoiled.update(self._past.spoiled)
        if injector is not None:
            injector.leave_out(self._past.points)
        self._skipped = frozenset(self._past.skipped if skip_rejected else ())

    @property
    def decision(self) -> Decision:
        """The instruction for the loop after the runs of a step; the same on all ranks."""
        return self._course.decision

    @property
    def state(self) -> State:
        """The current state of the machine."""
        return self._course.state

    @property
    def fault(self) -> PendingFault | None:
        """The fault that waits for a verdict, with this rank's part of it."""
        return self._course.fault

    @property
    def learned(self) -> Learned:
        """Magnitudes of accepted values, which rules look at."""
        return self._course.learned

    @property
    def statistics(self) -> DeterminismStatistics:
        """Differences between two runs of each step, on this rank."""
        return self._course.statistics

    @property
    def checkpoints(self) -> Path:
        """The directory of fault checkpoints, an ordinary root of checkpoints.

        Raises:
            ConfigError: the machine has no directory.
        """
        if self.directory is None:
            raise ConfigError(
                "this machine has no fault checkpoints: it was made without directory="
            )
        return self.directory / FAULT_CHECKPOINTS

    @property
    def spoiled_steps(self) -> frozenset[int]:
        """Steps whose state was bad before they ran, by the report of earlier jobs."""
        return frozenset(self._past.spoiled)

    def resume_point(self, good: Root, faults: Root) -> tuple[Root, int] | None:
        """Return the checkpoint to continue from, and its step; None if there is none. Collective.

        The newest one, and of equal steps that which a fault has left. Left out are steps whose
        state was not finite, and a fault checkpoint whose fault is over.

        Args:
            good: the `Checkpointer` of ordinary checkpoints.
            faults: that of `checkpoints`.

        Raises:
            StorageError: a root cannot be read; on all ranks.
        """
        return self._course.team.resume_point(good=good, faults=faults, past=self._past)

    def replayable(self, source: Iterable[Any], *, is_rewound: bool = False) -> ReplayableBatches:
        """Return an iterator of the same batches that the machine can rewind.

        See `ReplayableBatches`. While the machine is disabled nothing is kept; it only starts with
        the batches of a fault that a checkpoint holds.

        Args:
            source: of batches, endless or not.
            is_rewound: True if the source of a resumed run starts with the first batch of the next
                step, however many had been taken when the state was saved: its position is the
                number of finished steps. The batches of a rerun step, which the checkpoint holds,
                are then passed over in the source.
        """
        self._batches = ReplayableBatches(
            source,
            codecs=self._course.codecs,
            is_rewound=is_rewound,
            keeps=self.mode is not Mode.DISABLED,
            streams=self._streams,
        )
        self._course.iterators[self._batches] = 0
        return self._batches

    def skips(self, step: int, batches: object = None) -> bool:
        """Return True if a step is bad wherever it runs, and must not be trained on.

        Take its batches, and do not use them. The step of a pending fault is run until the fault
        has its verdict; the iterator from `replayable` then returns the kept batches.

        Args:
            step: its number.
            batches: the iterator that `attempts` gets. Only needed if there are several, as for an
                evaluation.

        Raises:
            ConfigError: the kept batches could be those of several iterators.
        """
        step = checked_step(step)
        if step not in self._skipped:
            return False
        fault = self.fault
        if fault is None or fault.step != step:
            return True
        if fault.fault not in self._course.judged:
            return False
        if not self._is_left:
            if batches is None and fault.batches and len(self._course.iterators) > 1:
                raise ConfigError(
                    f"skips({step}): the checkpoint holds the batches of that step, and the "
                    f"program has {len(self._course.iterators)} iterators of machine.replayable; "
                    f"pass that of the step: machine.skips(step, batches)"
                )
            fault.replay_batches(self._batches if batches is None else batches)
            self._is_left = True
        return True

    def attempts(self, step: int, batches: object = None) -> Iterator[int]:
        """Yield once for each run of a step: more than once if a value was rejected. Collective.

        Before each further run random streams, buffers and hooks are restored to what they were
        before the first one, and `batches` starts again with the first batch of the step. Drop the
        gradients at the start of each run: the machine does not know them. After the last run
        `decision` says what to do. If a checkpoint with a pending fault was loaded, the first step
        is the one that was bad, on the batches that were kept.

        Args:
            step: its number, an integer of 64 bits; the same on all ranks.
            batches: the iterator from `replayable` that the step takes batches from, and no other
                one: `zip` several sources into one. Another iterator is accepted until a value is
                rejected. None if the step's data does not come from an iterator: then each run of
                the step, even after a restart, must use the same data.

        Yields:
            The number of the run, from 0.

        Raises:
            ConfigError: `step` is not an integer of 64 bits. On all ranks: a value was rejected and
                the batches of the step cannot be taken again, or the loop continues after an exit
                code.
            FaultError: in mode `report_determinism_stats`, on all ranks: a fatal value is rejected
                in the second run.
        """
        step = checked_step(step)
        is_wrapped = batches is None or isinstance(batches, ReplayableBatches)
        if self.mode is Mode.REPORT_DETERMINISM_STATS and not is_wrapped:
            raise ConfigError(
                f"step {step}: every step runs twice in mode '{self.mode.value}', on the same "
                f"batches, but `attempts` was given a {type(batches).__name__}; pass "
                f"machine.replayable(iterator)"
            )
        self._refuse_nested(step)
        if not self._course.begin(step, batches):
            return
        if self.mode is not Mode.DISABLED:
            _LAST_STARTED.set(weakref.ref(self))
        self._is_inside = True
        try:
            number = 0
            yield number
            while self._course.conclude():
                number += 1
                yield number
        finally:  # a loop that is left by an exception or a `break` closes this generator
            self._is_inside = False

    def _refuse_nested(self, step: int) -> None:
        """Raise ConfigError inside of the attempts of another machine.

        A rerun of that one would start another step of this one, on its next batches.
        """
        started = _LAST_STARTED.get(None)
        other = None if started is None else started()
        if other is not None and other is not self and other._is_inside:
            raise ConfigError(
                f"step {step} of machine '{self.name}' was started inside of the attempts of "
                f"machine '{other.name}', whose rerun would start another step here, on the next "
                f"batches; run the attempts of both one after the other, and step both optimizers "
                f"after them"
            )

    def unfinished_work(self) -> str | None:
        """Return what a save or load inside of the loop over attempts would lose.

        The step may run again, and its update is not made yet or was left out. See
        `state.unfinished`.
        """
        if not self._is_inside or self.mode is Mode.DISABLED:
            return None
        return (
            f"RerunMachine ({self.name}) is inside of the attempts of step {self._course.step}, "
            f"which may run again; end the loop over attempts first"
        )

    # Phase 2: it runs

    def validate(
        self,
        name: str,
        value: object,
        rule: Rule,
        *,
        fatal: bool = True,
        tolerance: float = 0.0,
        compare: Compare | None = None,
        fed_by: FedBy = None,
        local: bool = False,
    ) -> None:
        """Validate a value of the step that runs; local to this rank.

        Validate a value before it is reduced over data replicas: the fewer devices feed it, the
        sooner one can be blamed.

        Args:
            name: of the value; a name may be used several times in a step, in the same order.
            value: a number, or an array or tensor of at most 64 elements; of a DTensor this rank's
                part counts. The rule, the comparison and the report get floats, see `host_value`.
            rule: decides whether the value is rejected.
            fatal: True to end the run once the fault has its verdict; otherwise it continues.
            tolerance: the largest relative difference of two values that count as the same; above 0
                if runs of a step are not bitwise equal by nature.
            compare: computes the relative difference of two values, 0.0 if they are the same;
                default `relative_difference`.
            fed_by: the ranks whose work the value depends on; a verdict is about their devices.
                Default: this rank's model replica (along `tp`, `cp`, `pp`, with experts `ep` and
                `expt_tp`; and the ranks that parameters are fully sharded over). "all" for a value
                that was reduced over all ranks, axes of the layout ("tp-cp"), or ranks.
            local: True if it depends on this rank alone, as an activation before any collective.

        Raises:
            FaultError: on this rank: the machine is disabled, and a fatal value is rejected.
            ConfigError: the call is outside of `attempts`, the value cannot be validated, or
                another argument is wrong.

        Cost: that of the rule. Values on a device are read together, at the end of the run.
        """
        course = self._course
        if self.mode is not Mode.DISABLED and not course.is_running:
            raise ConfigError(
                f"validate({name!r}) was called outside of a run; call it inside `for _ in "
                f"machine.attempts(step, batches)`"
            )
        if course.has_voted:
            raise ConfigError(
                f"validate({name!r}) was called after the step of the optimizer, which has carried "
                f"this rank's word already; validate before it"
            )
        tolerance = check_call(name, rule, tolerance, compare)
        if local or fed_by is not None:
            fed_by = course.team.feeders.of([self.groups.rank] if local else fed_by)
        value = local_value(value) if isinstance(value, torch.Tensor) else host_value(value)
        call = course.attempt.next_call(name)
        judge = partial(
            self._judge, call, rule=rule, fatal=bool(fatal), tolerance=tolerance, compare=compare,
            fed_by=fed_by,
        )  # fmt: skip
        if not isinstance(value, torch.Tensor):
            judge(value)
        elif value.device.type == "cpu" or self.mode is Mode.DISABLED:
            judge(host_value(value))
        else:
            course.attempt.judge_later(value, judge)

    def _judge(
        self,
        call: Call,
        value: Value,
        *,
        rule: Rule,
        fatal: bool,
        tolerance: float,
        compare: Compare | None,
        fed_by: FedBy,
    ) -> None:
        """Apply the rule to a value on the host; see `validate`."""
        course = self._course
        if self._injector is not None:
            value = self._injector.injected(value)
        why = self._reason(call.name, value, rule)
        if self.mode is not Mode.DISABLED:
            course.attempt.take(
                call, value, why, fatal=fatal, tolerance=tolerance, compare=compare,
                feeders=lambda: (course.team.here, course.team.fed_by(fed_by)),
            )  # fmt: skip
        elif why is not None:
            self._refuse_when_disabled(call.name, why, fatal=fatal)
        if why is None:
            self.learned.accept(call.name, value, window=rule.window)

    def _reason(self, name: str, value: Value, rule: Rule) -> str | None:
        """Return why a rule rejects a value; None if it accepts it."""
        why = rule.rejects(value, self.learned.of(name))
        if why is None:
            return None
        if not isinstance(why, str):
            raise ConfigError(
                f"validate({name!r}): {type(rule).__name__}.rejects returned {why!r}; return "
                f"None, or a text that says why the value is rejected"
            )
        # It goes to other ranks and into the report, whatever is in it.
        return why.encode(errors="backslashreplace").decode()

    def vetoes(self) -> bool:
        """Return True if this rank does not want the step that runs to be updated.

        For `step(veto=machine)` of the optimizers of `holdfast.optim`, inside the loop over
        attempts, as its last call: the optimizer's own sum over all ranks carries the word, and the
        machine makes no collective of its own.
        """
        return self._course.vetoes()

    def take_decision(self, vetoed: bool) -> None:
        """Take from an optimizer whether any rank has vetoed, see `vetoes`."""
        self._course.take_decision(vetoed)

    def observe(
        self, name: str, value: object, rule: Rule, *, fed_by: FedBy = "all", local: bool = False
    ) -> None:
        """Look at a value between steps, such as the norm of an update; local to this rank.

        No step can be run again to tell what it was: the report of the next step has it as
        `observed`, and the run continues. Arguments are those of `validate`.

        Raises:
            ConfigError: an argument is wrong, or a step runs.
        """
        course = self._course
        if course.is_running:
            raise ConfigError(f"observe({name!r}) was called inside of a step; call validate")
        check_call(name, rule, 0.0)
        ranks = course.team.feeders.of([self.groups.rank] if local else fed_by)
        value = host_value(value)
        why = self._reason(name, value, rule)
        if why is None:
            self.learned.accept(name, value, window=rule.window)
            self.learned.commit()
        elif self.mode is Mode.DISABLED:
            self._refuse_when_disabled(name, why, fatal=False)
        else:
            course.observations.add(name, value, why, course.team.fed_by(ranks))

    def vouch(self, step: int, batch: object, compute: Compute, *, every: int = 100) -> None:
        """Let another data replica vouch for this one, every so many steps. Collective then.

        Two replicas compute the gradients of one microbatch and compare digests of them: a device
        that computes wrong but finite values is noticed. Pairs rotate; if two disagree, all
        replicas compute that microbatch, and a majority names the odd one. Call it between steps.

        Args:
            step: the same on all ranks.
            batch: a microbatch of this rank.
            compute: returns the gradients of a microbatch, before any reduction over replicas; it
                runs under the random streams and buffers of the other replica, and leaves
                parameters as they are. The same on equal inputs, bit by bit.
            every: number of steps between two rounds.

        Raises:
            DriftError: on all ranks: replicas disagree. The report has it as `vouch`.
            ConfigError: an argument is wrong; on all ranks, if a batch cannot be sent.
            HoldfastError: on all ranks: `compute` has failed on some. Streams and buffers are those
                of this replica again.

        Cost: nothing in other steps. In a round the gradients of a microbatch, three small
        collectives, and a message with the microbatch to the other replica. Nothing with one
        replica.
        """
        step = checked_step(step)
        every = check_int(every, name="vouch: every", least=1)
        if self._course.is_running:
            raise ConfigError(f"vouch was called inside of step {step}; call it between steps")
        if self.mode is not Mode.DISABLED and step % every == 0:
            self._vouching.compare(step, step // every, batch, compute)

    @property
    def has_entry(self) -> bool:
        """True unless the machine is disabled, and holds no batches that only a fault has kept."""
        return self.mode is not Mode.DISABLED or bool(self._needed())

    @property
    def is_loaded(self) -> bool:
        """True: a disabled machine takes the batches that only a fault's checkpoint has."""
        return True

    def tree(self) -> object:
        """Return this rank's entry, see `Entry`."""
        if self._course.is_running:  # and not inside of attempts: that is refused
            self._course.team.note(
                f"step {self._course.step} is saved as the loop has left it: random streams and "
                f"buffers are those of its middle, and a source that saves its position continues "
                f"behind the batches that it has taken. Run it again before a save, or go back to "
                f"the checkpoint before"
            )
        injector = self._injector
        entry = Entry(
            learned=self.learned.state_dict(),
            injector=None if injector is None else injector.state_dict(),
            statistics=self.statistics.state_dict(),
            fault=self.fault,
            needed=self._needed(),
            modules=self._course.team.modules,
        )
        return PerRank(entry.tree(), axes=DENSE_AXES, missing="keep", surplus="drop")

    def _needed(self) -> str:
        """Return why a load without a machine would lose something; empty if it would not."""
        if self.fault is None or not self.fault.batches or self._is_left:
            return ""
        # Those that steps take: a loop may have wrapped others since, for an evaluation.
        batches = self._course.batches or self._batches
        if not isinstance(batches, ReplayableBatches):
            return self._loaded_need  # the loop has not come to its batches yet
        if batches.is_rewound:
            return ""
        return (
            f"it holds a pending fault of step {self.fault.step} and the batches of that step, "
            f"which its source has passed"
        )

    def template(self, stored: StoredPart) -> object:
        """Request the entry of this rank, or those that another layout can learn from."""
        del stored

        def pick(request: PerRankRequest) -> PerRankSource:
            modules = self._course.team.modules
            source, self._is_own_layout = pick_entries(request, modules=modules)
            return source

        return PickedPerRank(Stored(), axes=DENSE_AXES, missing="keep", surplus="drop", pick=pick)

    def restore(self, tree: object) -> None:
        """Take the entries that were loaded.

        Under another layout only what rules have learned is taken, and a pending fault is dropped
        with one message. An entry that cannot be read is ignored, with one message too: a run never
        fails to resume because of its machine.
        """
        if not isinstance(tree, Mapping):
            return
        self._course.expect_fault()
        self._course.forget_fault()
        self._is_left, self._loaded_need = False, ""
        try:
            entries = [Entry.of(each) for each in tree.values()]
            if not self._is_own_layout:
                self._take_learned(entries)
                return
            (entry,) = entries
            self.learned.load_state_dict(entry.learned)
            self.statistics.load_state_dict(entry.statistics)
            if self._injector is not None and entry.injector is not None:
                self._injector.load_state_dict(entry.injector)
        except (CorruptionError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._course.team.say(
                f"the machine's entry in the checkpoint cannot be read, and is ignored: "
                f"{type(error).__name__}: {error}"
            )
            self._course.expect_fault(unreadable=f"{type(error).__name__}: {error}")
            return
        if entry.fault is None:
            return
        self._loaded_need = entry.needed
        if self.mode is Mode.VALIDATE_RESULTS:
            self._course.load_fault(entry.fault)
            return
        # No verdict, but no batch is lost either.
        self._course.fault = entry.fault
        if self.mode is not Mode.DISABLED:
            self._course.team.say(
                f"the checkpoint holds a pending fault of step {entry.fault.step}; in mode "
                f"{self.mode.value} the step runs on its batches, and gets no verdict"
            )

    def _take_learned(self, entries: list[Entry]) -> None:
        """Take what rules have learned on other coordinates, and drop the fault."""
        learned: dict[str, Any] = {}
        for entry in entries:
            learned = entry.learned | learned
        self.learned.load_state_dict(learned)
        faults = [entry.fault for entry in entries if entry.fault is not None]
        if not faults:
            return
        text = (
            f"the checkpoint holds a pending fault of step {faults[0].step} under another layout, "
            f"whose ranks do not exist here: it is dropped, and the run continues"
        )
        if faults[0].batches is not None:
            text += (
                " (a source of batches that has saved its position continues behind those of the "
                "step; one that counts finished steps starts with them)"
            )
        self._course.team.say(text)

    def report_statistics(self) -> None:
        """Report the differences between two runs of each step so far. Collective.

        Mode `report_determinism_stats` calls it every `report_every` steps. The report gets an
        event `determinism`, and the person gets a table.
        """
        self._course.report_statistics()

    def record_drift(self, error: BaseException) -> None:
        """Record in the report that ranks hold other bytes than their replicas. Collective.

        Call it for the DriftError of a save that compares replicas, and for the CorruptionError of
        a load of copies that differ: a device may compute wrong values without NaN or Inf.

        Args:
            error: the error. Its `details["odd_ranks"]` are recorded with host and device.

        Raises:
            StorageError: the report cannot be written; on all ranks.
        """
        places = self._course.team.by_rank
        ranks = error.details.get("odd_ranks", ()) if isinstance(error, HoldfastError) else ()
        named = [msgspec.structs.asdict(places[rank]) for rank in ranks if rank in places]
        self._course.record("drift", message=str(error), values=named)
        for place in named:
            self._course.team.say(
                f"rank {place['rank']} ({place['host']}, {place['device']}) holds other bytes than "
                f"its replicas"
            )

    def _refuse_when_disabled(self, name: str, why: str, *, fatal: bool) -> None:
        """Raise FaultError for a fatal value that a disabled machine rejects; else pass a line."""
        text = f"step {self._course.step}: '{name}' on rank {self.groups.rank} was rejected: {why}"
        if fatal:
            raise FaultError(f"{text}; enable the rerun machine to find out what the fault is")
        self._course.team.note(text)

    def close(self) -> None:
        """Forget kept batches; pass a line for what was observed after the last step."""
        self._batches = None
        for words in self._course.observations.take_unreported():
            self._course.team.note(f"after step {self._course.step}: {words}; no step has followed")


def _check_settings(
    mode: Mode | str, *, directory: object, report_every: object, skip_rejected: bool
) -> Mode:
    """Return the mode; raise ConfigError if it is unknown or other arguments do not fit it."""
    try:
        known = Mode(mode)
    except ValueError as error:
        modes = ", ".join(each.value for each in Mode)
        raise ConfigError(f"RerunMachine(mode={mode!r}): it is one of {modes}") from error
    if known is Mode.VALIDATE_RESULTS and directory is None:
        raise ConfigError(
            f"RerunMachine(mode='{known.value}') needs directory=, for the report and for fault "
            f"checkpoints"
        )
    if skip_rejected and directory is None:
        raise ConfigError("RerunMachine(skip_rejected=True) needs directory=, for the report")
    check_int(report_every, name="RerunMachine: report_every", least=1)
    return known

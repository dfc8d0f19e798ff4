"""The step of every optimizer, phase by phase, for one module or for several at once."""

from __future__ import annotations

import contextlib
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import ParamSpec, Protocol, TypeVar

import msgspec
import torch
from torch import nn

from holdfast._torch import mark_stepped
from holdfast.errors import ConfigError, DeadlineError, ErrorRecord
from holdfast.optim import collectives
from holdfast.optim.checks import check_limit, check_scaler, check_tokens, distinct_scalers
from holdfast.optim.divisors import refuse_unequal_divisors
from holdfast.optim.joint import JointSums
from holdfast.optim.microbatches import (
    START_AGAIN,
    STEP_LOST,
    Microbatches,
    MicrobatchTaker,
    compare_launched,
)
from holdfast.optim.norms import GradientNorm, GradientPart, LayoutSum, share_square
from holdfast.optim.scalars import Border, ScalarWatch
from holdfast.optim.scaler import LossScaler
from holdfast.optim.step_sum import Contribution, StepSum, StepSums
from holdfast.optim.torch_interface import hyperparameters, refuse_closure
from holdfast.parallel import Layout, ModuleGroups, ProcessGroups
from holdfast.parallel.groups.crossings import Crossings, Edge

P = ParamSpec("P")
R = TypeVar("R")

ALONE = ""
"""The name of the only module, for a stepper that steps alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step; the same on every rank, whatever modules it has."""

    norm: float
    """2-norm of the whole averaged gradient, loss scale removed; NaN if it was not finite, infinite
    beyond about 1e154."""
    clipped: bool
    """True if gradients were scaled down to the largest norm allowed."""
    skipped: bool
    """True if nothing was updated, because a gradient, its norm or a loss was not finite."""
    bad_ranks: tuple[int, ...]
    """Global ranks whose share of the reduced gradients was not finite, ascending."""
    num_zeros: int | None
    """Elements of the gradient that are exactly zero; None if not requested.

    A trained parameter that no rank used has a gradient of zeros.
    """
    loss_scale: float
    """Factor of the loss of this step; 1 without a scaler."""

    # Of a MultiModuleOptimizer; empty for an optimizer that steps alone.
    module_norms: Mapping[str, float] = field(default_factory=dict)
    """2-norm of each module's gradient, scaled like `norm`; NaN if it was not finite, 0 for a
    frozen module."""
    bad_modules: tuple[str, ...] = ()
    """Modules whose gradient was not finite on some rank, in their order."""
    inactive_modules: tuple[str, ...] = ()
    """Modules that are trained and got no gradient on any rank in this step."""
    num_tokens: int | None = None
    """Tokens that gradients were divided by; None without `num_tokens`."""
    vetoed: bool = False
    """True if nothing was updated because a rank had a veto; `skipped` is True then."""


class Veto(Protocol):
    """An object that may refuse a step, such as a `RerunMachine`."""

    def vetoes(self) -> bool:
        """Return True if this rank does not want the step to be updated."""

    def take_decision(self, vetoed: bool) -> None:
        """Take whether any rank has vetoed; called on every rank, before an update."""


class Stepper(MicrobatchTaker):
    """The optimizer of one module on one rank, phase by phase; it can also step by itself.

    Methods marked as collective are so over the module's own groups: every rank of the module calls
    them, whatever happened to it before. The methods that have a body here do nothing by default,
    for kinds that have nothing to do in that phase.
    """

    is_entry = False
    """True if it steps with other modules, so never in messages of this one alone."""
    number = 0
    """Of the optimizer among all that were built on its groups, from 1; equal on all ranks."""

    _groups: ProcessGroups

    @property
    def groups(self) -> ProcessGroups:
        """Communicators of the module."""
        return self._groups

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer that has the parameter groups, and whose state is saved."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Name of the kind of optimizer, for messages; equal on all ranks of the module."""

    @property
    @abstractmethod
    def divisor(self) -> int:
        """Number that the sum of the data ranks' gradients is divided by."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank holds, or holds a part of."""
        return parameters_of(self.optimizer)

    def stage_description(self) -> str:
        """Return a text that is equal on all ranks of a pipeline stage; compared once."""
        return ""

    @abstractmethod
    def sharding_records(self) -> dict[str, dict[str, object]]:
        """Return how the state is sharded, by the name of each optimizer inside."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around one microbatch with one backward; every rank enters the same contexts.

        An error in it on some ranks ends the step on all, at the end of this microbatch: it keeps
        its type where it occurred, and the other ranks raise a HoldfastError that names it. Call
        `drop_gradients` on all ranks then, and repeat the step; what comes before that is refused.
        (A rank that waits in a collective of the model itself, as under `tp`, raises when the limit
        of that communicator is over; then start again from the last checkpoint.)

        Args:
            is_last: True if a step follows.

        Cost: the collectives of the kind, and one agreement of all ranks over `control`.
        """
        self.check_ended()
        return self._engine.microbatch(is_last=is_last)

    def orders(self) -> Mapping[str, int]:
        # Ranks that enter microbatches of several optimizers in another order reduce gradients of
        # one with those of another.
        return {"optimizers": self.number}

    def launches_on(self, communicator: str) -> Sequence[str]:
        return [f"number {self.number} of the optimizers on these groups, {self.kind}"]

    @abstractmethod
    def gradient_parts(self) -> list[GradientPart]:
        """Finish the reductions, and return this rank's shares of the gradients. Collective.

        A second call in the same step reduces nothing.
        """

    def share_norm(self) -> float:
        """Return the 2-norm of this rank's shares of the reduced gradients. Collective.

        To be called before a step, of several optimizers in the same order on all ranks, which the
        step compares. The squares of all ranks add up to the square of the whole norm; the norm is
        not finite if an element is not.
        """
        self.take_turn()
        return math.sqrt(share_square(self.gradient_parts(), layout=self.groups.layout))

    def take_turn(self) -> None:
        """Number the reductions that are made here before a step, if some are missing."""

    def turns(self) -> list[int]:
        """Return the numbers of reductions made before this step; compared by it.

        Ranks that ask two optimizers in another order add gradients of one to those of the other.
        """
        return []

    def joint_sums(self, *, num_numbers: tuple[int, int]) -> JointSums | None:
        """Return what makes a step in two messages, from now on; None if this kind cannot.

        Called once, unless it is an entry of several. Equal on all ranks.

        Args:
            num_numbers: in the sum that decides, and in the one after the update.
        """
        del num_numbers
        return None

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Count the parameters that got a gradient on this rank, and those that are trained."""

    def hyperparameters(self) -> list[dict[str, object]]:
        """Return what ranks of a pipeline stage have to have in common, by parameter group."""
        return hyperparameters(self.optimizer)

    def num_new(self) -> int:
        """Count what ranks have not compared: parameters that came later, orders of launches."""
        return 0

    def compare_new(self) -> None:
        """Compare what some rank has counted in `num_new`. Collective.

        Raises:
            ConfigError: On all ranks: some hold other parameters, or other values.
            PlanError: On all ranks: collectives met those of other units.
        """

    @abstractmethod
    def exchange_used(self) -> None:
        """Exclude parameters from the update that got a gradient on no rank. Collective."""

    @abstractmethod
    def update(self, factor: float) -> None:
        """Update this rank's shares with its gradients times `factor`; gather nothing yet."""

    def launch_gathers(self) -> None:
        """Start gathering the updated parameters, even after a failed update. Collective."""

    def publish(self) -> None:
        """Let parameters be used again; wait for those that cannot be overlapped."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget all gradients, and allow microbatches after an error; `step` does so itself.

        After an interrupt that has left a microbatch on this rank the others raise it here, once
        they have come to the end of theirs.
        """

    def borders(self) -> list[Border]:
        """Return where parameters are cut between this rank's shards and those of others."""
        return []

    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""

    def give_up_gathers(self, error: DeadlineError) -> None:
        """Let reads of parameters that are not whole yet raise `error`; wait where they cannot."""

    def close(self) -> None:
        """Remove all hooks from the model."""

    def unfinished_work(self) -> str | None:
        """Return what a save or load in the middle of a step would lose, see `state.unfinished`."""
        if self._reason_lost:
            return self._reason_lost
        if self._is_interrupted:
            return f"an error ended the last microbatch of {self.kind}; call drop_gradients() first"
        return None

    def step(
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        count_zeros: bool = False,
        is_finite: bool = True,
        veto: Veto | None = None,
    ) -> StepOutcome:
        """Finish gradients, measure, clip, update, and start gathering parameters; collective.

        If any rank's gradients or loss are not finite, nothing is updated anywhere. Gradients are
        forgotten in every case.

        Args:
            closure: not accepted; call backward before the step.
            max_norm: gradients are scaled down to this 2-norm; 0 or infinity for no limit. Equal on
                all ranks.
            scaler: the one that scaled the loss; it is updated once, by the decision of all ranks.
                Its scale is equal on all ranks.
            count_zeros: count the elements of the gradient that are exactly zero. Equal on all
                ranks.
            is_finite: True if this rank's loss is finite.
            veto: asked on each rank; if it vetoes on any, nothing is updated anywhere, and the
                loss scale stays. On all ranks or on none. The sum that the step makes carries it.

        Raises:
            ConfigError: On all ranks, before anything is updated: an argument is wrong on some rank
                or differs between ranks, hyperparameters differ between ranks of one pipeline
                stage, or no rank got a gradient for any parameter since the last step.
            HoldfastError: Gradients or the update failed on some rank; raised on all, naming the
                ranks and their messages. Before the update nothing has changed. After a failed
                update the other ranks have updated their shares, and the parameters of a sharded
                optimizer are equal on all ranks: training can continue from the last checkpoint, or
                with the next step if no rank has counted more updates than another of a parameter
                that they share. A ConfigError after the update: they have (Adam), or optimizers
                that join elements have computed other scalars from other shards.

        Cost: the reductions not made yet; one small sum over the layout of some numbers and three
        per rank, by which all is decided before anything is updated, and two numbers and one per
        rank after the update, of whether it worked and was the same (a sum is an all-reduce over
        each of `tp`, `dp_cp` and `pp` that has several ranks); an all-gather per bucket, which with
        overlap runs concurrently with the next forward. If a parameter got no gradient on some
        rank, also an all-reduce of a number per parameter. A `ShardedOptimizer` of a small model
        that is in one bucket: all of that in two messages to each other rank (`joint.py`).
        """
        return self._engine.step(
            closure,
            max_norm=max_norm,
            scaler=scaler,
            count_zeros=count_zeros,
            is_finite=is_finite,
            veto=veto,
        )

    @property
    def num_updates(self) -> int:
        """Steps of this optimizer that have changed parameters, or may have."""
        return self._engine.num_updates

    @cached_property
    def _engine(self) -> StepEngine:
        groups = self.groups
        return StepEngine(
            groups, {ALONE: groups.layout}, {ALONE: self}, name=self.kind, number=self.number
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return what is in the parameter groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _out_of_inference_mode(method: Callable[P, R]) -> Callable[P, R]:
    """Leave inference mode for a call: what an update makes there, no later one may write to."""

    @wraps(method)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return outside


class StepEngine:
    """One step of all modules at once; an optimizer that steps alone is the only module.

    Phase 1, *measure*: each module of this rank finishes its reductions; squares, zeros, usage.
    Phase 2, *sum*: one sum over all ranks carries that, settings, failures and token counts.
    Phase 3, *decide*, from the sum alone: raise on all ranks, skip, or update by which factors.
    Phase 4, *clip and update* this rank's shares, and start gathering parameters.
    Phase 5, *agree* on whether the update worked on every rank, and was the same.
    Phase 6, *publish*: parameters may be used again.

    A rank that fails in a phase still makes every collective of the others up to the next sum or
    agreement, which carries its failure; only there do ranks raise, all of them.

    For a small model (`joint.py`) the sum of phase 2 carries the gradients, which each rank then
    reduces and measures, and the agreement of phase 5 carries the parameters.

    Args:
        groups: of all ranks of all modules.
        layouts: of all modules, in one order on all ranks.
        steppers: of the modules of this rank that are trained.
        name: for messages, equal on all ranks.
        number: see `Stepper.number`; compared in each step.
        loss_module: whose ranks count the tokens of `step(num_tokens=)`.
        divisors: by trained module, what its gradients are divided by; needed with tokens, and
            compared without.
        edges: between the modules, along which gradients come.
        crossings: what the bridges of this rank have in progress.
        bridged: the groups of modules with edges between them, whose ranks may wait in a bridge.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        layouts: Mapping[str, Layout],
        steppers: Mapping[str, Stepper],
        *,
        name: str,
        number: int,
        loss_module: str | None = None,
        divisors: Mapping[str, int] | None = None,
        edges: Sequence[Edge] = (),
        crossings: Crossings | None = None,
        bridged: ModuleGroups | None = None,
    ) -> None:
        self._groups = groups
        self._layouts = layouts
        self._steppers = steppers
        self._name = name
        self._number = number
        self._loss_module = loss_module
        self._divisors = {} if divisors is None else divisors
        self._crossings = Crossings() if crossings is None else crossings
        self._sum = StepSum(
            layouts, ranks=groups.layout.ranks, loss_module=loss_module, edges=edges
        )
        self._total = LayoutSum(groups)
        self._microbatches = Microbatches(
            steppers,
            groups,
            are_alike=list(layouts) == [ALONE],
            bridged=bridged,
            layouts=[each for each in layouts.values() if groups.rank in each.ranks],
        )
        self._scalars = ScalarWatch(layouts)
        self._joint = self._make_joint()
        self._is_closed = False
        self._reason_lost = ""
        """Set once an interrupt has ended a step on this rank alone."""
        self.num_updates = 0
        """Steps that have changed parameters, or may have."""

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around one microbatch of all modules; see `Stepper.microbatch`."""
        return self._microbatches.enter(is_last=is_last)

    @_out_of_inference_mode
    def step(
        self,
        closure: None,
        *,
        max_norm: float,
        scaler: LossScaler | Mapping[str, LossScaler] | None,
        count_zeros: bool,
        is_finite: bool = True,
        num_tokens: int | None = None,
        veto: Veto | None = None,
    ) -> StepOutcome:
        """Make a step; see `Stepper.step` and `MultiModuleOptimizer.step`."""
        reason_lost = self._reason_lost or self._groups.control.reason_cut
        if reason_lost:  # not by the sum of all ranks, which they make no more together
            raise ConfigError(reason_lost)
        mine = Contribution(number=self._number)
        failure: Exception | None = None
        try:
            # Phase 1: measure. Wrong arguments, too, wait for the sum to be raised on all ranks.
            try:
                self._tell_others()
                refuse_closure(closure)
                mine.count_zeros, mine.is_finite = bool(count_zeros), bool(is_finite)
                mine.max_norm = check_limit(max_norm)
                mine.scale = check_scaler(scaler, layouts=self._layouts, trained=self._steppers)
                mine.num_tokens = check_tokens(
                    num_tokens,
                    module=self._loss_module,
                    layouts=self._layouts,
                    rank=self._groups.rank,
                )
                self._check_open()
                self._check_crossings()
                mine.carried = self._crossings.carried()
                mine.vetoes = None if veto is None else bool(veto.vetoes())
            except Exception as error:
                failure = error
            failure = failure or self._refuse_interrupted()
            joint = self._joint if self._joint is not None and self._joint.is_usable else None
            with self._groups.control.beginning_step(self._name):
                measured = self._measure(mine, joint)
                # Phase 2: sum. From here all ranks have the same numbers.
                sums = self._sum_up(mine, failure or measured, joint)

            if any(sums.num_new.values()):
                self._compare_new(sums)

            # Phase 3: decide.
            outcome, factors = self._decide(mine, sums)
            # Not earlier: a scale updated by what only some ranks know would get out of sync. Nor
            # later: so would one that an error of this rank leaves as it was.
            for each in () if outcome.vetoed else distinct_scalers(scaler):
                each.update(overflowed=outcome.skipped)
            if veto is not None:
                try:
                    veto.take_decision(outcome.vetoed)
                except Exception as error:
                    if outcome.skipped:
                        raise  # no rank waits for this one
                    failure = error

            if not outcome.skipped:
                # Phase 4: clip and update, in one multiplication by a module's factor.
                self.num_updates += 1
                updated = self._update(factors, sums, joint)
                # Phase 5: agree, while the gathers are in flight.
                self._agree(failure or updated, joint)
                # Phase 6: publish.
                for stepper in self._steppers.values():
                    stepper.publish()
        except BaseException as error:
            if not isinstance(error, Exception) and self._groups.control.size > 1:
                # An interrupt leaves at once. The others wait in collectives that the next ones of
                # this rank would meet, or have decided by the sum, and updated.
                self._reason_lost = STEP_LOST
                for stepper in self._steppers.values():
                    stepper.lose_step()
                self._groups.control.cut_off(
                    DeadlineError(
                        f"{type(error).__name__} has ended a step of {self._name} on rank "
                        f"{self._groups.rank}. {START_AGAIN}",
                        # As of a rank that the others have waited for.
                        details={"waited_s": 0.0},
                    )
                )
            with contextlib.suppress(DeadlineError):  # of a rank that the error has named
                self.drop_gradients()
            raise
        self.drop_gradients()
        for stepper in self._steppers.values():
            mark_stepped(stepper.optimizer)
        return outcome

    def drop_gradients(self) -> None:
        """Forget the gradients of all modules of this rank."""
        self._tell_others()
        self._crossings.forget()
        for stepper in self._steppers.values():
            stepper.drop_gradients()

    def _tell_others(self) -> None:
        """Let other ranks raise what has left a microbatch on this one alone."""
        for stepper in self._steppers.values():
            stepper.tell_others()

    def synchronize(self) -> None:
        """Wait until the parameters of all modules of this rank are whole and up to date."""
        for stepper in self._steppers.values():
            stepper.synchronize()

    def close(self) -> None:
        """Take all hooks off the modules of this rank, and refuse further steps."""
        self._is_closed = True
        for stepper in self._steppers.values():
            stepper.close()

    def _make_joint(self) -> JointSums | None:
        """Return what makes a step in two messages, for an optimizer that steps alone."""
        stepper = self._steppers.get(ALONE)
        if stepper is None or stepper.is_entry:
            return None
        decide = self._sum.pack(Contribution(), rank=self._groups.rank)
        update = self._pack_update(None)
        return stepper.joint_sums(num_numbers=(len(decide), len(update)))

    def _pack_update(self, failure: Exception | None) -> list[float]:
        """Return this rank's numbers of the sum after the update."""
        return [float(failure is not None), *self._scalars.pack(rank=self._groups.rank)]

    def _agree_on(
        self, failure: Exception | None, *, phase: str, payload: bytes = b""
    ) -> list[bytes]:
        """Agree with all ranks; one may be as late as in the collectives of the step."""
        with self._groups.control.in_step():
            return self._groups.control.agree(failure, phase=phase, payload=payload)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"{self._name}: it is closed; build another one")

    def _check_crossings(self) -> None:
        """Raise ConfigError if a gradient has not come back over a bridge."""
        work = self._crossings.unfinished_work()
        if work is not None:
            raise ConfigError(
                f"{self._name}: {work}, so gradients are missing. Call drop_gradients() on all "
                f"ranks to leave the batch out. Each forward over a bridge needs its backward, "
                f"with the anchor, on all ranks of the edge; evaluate under torch.no_grad()"
            )

    # ---- Phase 1: measure what this rank holds ----

    def _refuse_interrupted(self) -> Exception | None:
        """Return the error of a module of which gradients are missing, after an earlier error.

        It then makes the collectives that the other ranks make. If they know of the error, these
        are those of a whole step, and the gradients that are left are dropped. Otherwise, with
        pipeline stages, they are what is missing of those that have begun.
        """
        failure: Exception | None = None
        for module, stepper in self._steppers.items():
            try:
                stepper.check_ended()
            except ConfigError as error:
                failure = failure or _in_module(module, error)
                try:
                    if stepper.is_interrupted_alone:
                        stepper.join_reductions()
                    else:
                        stepper.drop_gradients()
                except ConfigError as lost:
                    failure = _in_module(module, lost)
        return failure

    def _measure(self, mine: Contribution, joint: JointSums | None) -> Exception | None:
        """Add this rank's gradients to its contribution; return the first failure.

        With `joint` they are not reduced yet.
        """
        failure: Exception | None = None
        for module, stepper in self._steppers.items():
            try:
                if joint is not None:
                    joint.take_gradients()
                else:
                    mine.terms[module] = self._sum.terms[module].of(
                        stepper.gradient_parts(),
                        rank=self._groups.rank,
                        count_zeros=mine.count_zeros,
                    )
                mine.usage[module] = stepper.usage()
                mine.num_new[module] = stepper.num_new()
                mine.hyperparameters[module] = stepper.hyperparameters()
                mine.turns[module] = stepper.turns()
            except Exception as raised:
                error = collectives.lost_to_others(raised, "the reduction of gradients") or raised
                failure = failure or _in_module(module, error)
                # After a deadline the communicator is broken, and no rank waits on it any more.
                if joint is None and not isinstance(error, DeadlineError):
                    with contextlib.suppress(Exception):  # the first failure is the one to report
                        stepper.join_reductions()
        return failure

    # ---- Phase 2: one sum over all ranks ----

    def _sum_up(
        self, mine: Contribution, failure: Exception | None, joint: JointSums | None
    ) -> StepSums:
        """Return the sum of all ranks' contributions; raise on all ranks if any rank failed."""
        phase = "optimizer: gradients"
        if isinstance(failure, DeadlineError):
            # The others have waited for the same rank: a second wait, in the sum, helps no rank.
            self._agree_on(self._named(failure), phase=phase)
        if failure is not None:
            mine = Contribution(has_failed=True)
        values = self._sum.pack(mine, rank=self._groups.rank)
        add_up = self._total if joint is None else joint.sum_with_gradients
        try:
            total = add_up(values, what="the sum by which all ranks decide a step")
        except DeadlineError as error:
            # Only `control` knows which ranks are missing, and why the others failed.
            named = self._named(error)
            self._agree_on(failure or named, phase=phase)
            raise
        sums = self._sum.read(total)
        if sums.failed:
            compare_launched(self._steppers, self._groups.control)
            self._agree_on(failure, phase=phase)
        if sums.differ:
            last_number = self._groups.last_number("optimizer")
            self._sum.refuse_numbers(sums, mine, last_number=last_number, name=self._name)
            # Digests show that ranks differ, but not in what: only now is it worth an exchange.
            payload = mine.described()
            answers = self._agree_on(None, phase="optimizer: settings", payload=payload)
            by_rank = dict(zip(self._groups.control.ranks, answers, strict=True))
            self._sum.refuse_differences(by_rank, name=self._name)
        if joint is not None:
            sums = replace(sums, gradients={ALONE: joint.measure(count_zeros=mine.count_zeros)})
        return sums

    def _named(self, late: DeadlineError) -> Exception:
        """Return why a wait has ended, if a rank that is elsewhere has ended it."""
        error = self._groups.control.why_freed()
        if error is None:
            return late
        error.__cause__ = late
        return error

    def _compare_new(self, sums: StepSums) -> None:
        """Raise on all ranks if what ranks have not compared yet is not the same."""
        failure: Exception | None = None
        for module, stepper in self._steppers.items():
            if sums.num_new[module]:
                try:
                    stepper.compare_new()
                except Exception as error:
                    failure = failure or _in_module(module, error)
        self._agree_on(failure, phase="optimizer: comparison")

    # ---- Phase 3: decide, from numbers that all ranks have ----

    def _decide(
        self, mine: Contribution, sums: StepSums
    ) -> tuple[StepOutcome, Mapping[str, float]]:
        """Return the outcome of the step, and what to multiply each module's gradients by."""
        if not (sums.num_bad_losses or sums.num_vetoes):
            sums.check_used(name=self._name)
        tokens = self._sum.total_tokens(sums)
        if tokens is None:
            refuse_unequal_divisors(
                self._layouts, self._divisors, edges=sums.carried, name=self._name
            )
        # With tokens each module's own division is undone, so that all gradients are sums.
        weights = {
            module: 1.0 if tokens is None else float(self._divisors.get(module, 1))
            for module in self._layouts
        }
        scale = 1.0 if mine.scale is None else mine.scale
        divisor = scale * (1 if tokens is None else tokens)
        norm, by_module = sums.norm(divisor=divisor, weights=weights)
        factor = clip_factor(norm, limit=mine.max_norm)
        is_skipped = not norm.is_finite or sums.num_bad_losses > 0 or sums.num_vetoes > 0
        outcome = StepOutcome(
            norm=norm.value,
            clipped=not is_skipped and factor != 1.0,
            skipped=is_skipped,
            bad_ranks=norm.bad_ranks,
            num_zeros=norm.num_zeros if mine.count_zeros else None,
            loss_scale=scale,
            module_norms={m: each for m, each in by_module.items() if m != ALONE},
            bad_modules=tuple(
                m for m, each in sums.gradients.items() if each.bad_ranks and m != ALONE
            ),
            inactive_modules=tuple(
                m for m, (used, trained) in sums.usage.items() if trained and not used
            ),
            num_tokens=tokens,
            vetoed=sums.num_vetoes > 0,
        )
        return outcome, {m: factor / divisor * weight for m, weight in weights.items()}

    # ---- Phase 4: clip, update, start gathering ----

    def _update(
        self, factors: Mapping[str, float], sums: StepSums, joint: JointSums | None
    ) -> Exception | None:
        """Update all modules of this rank, and return the first failure.

        Every gather is launched whatever happened: the module's other ranks launch theirs. With
        `joint` parameters are gathered in `_agree`.
        """
        failure: Exception | None = None
        self._scalars.before_update(self._steppers)
        for module, stepper in self._steppers.items():
            num_used, num_trained = sums.usage[module]
            try:
                if num_used < num_trained:
                    stepper.exchange_used()
                stepper.update(factors[module])
            except Exception as raised:
                error = collectives.lost_to_others(raised, "a collective of the update") or raised
                failure = failure or _in_module(module, error)
        if failure is None:
            try:
                self._scalars.after_update(self._steppers)
            except Exception as error:
                failure = error
        for module, stepper in self._steppers.items() if joint is None else ():
            try:
                stepper.launch_gathers()
            except Exception as error:
                failure = failure or _in_module(module, error)
        return failure

    # ---- Phase 5: agree on whether it worked ----

    def _agree(self, failure: Exception | None, joint: JointSums | None) -> None:
        """Raise on all ranks if the update failed on any, or was another one on some.

        That cannot travel in the first sum, which is over before the update. If all is well some
        numbers are summed, which is faster than `Control`. `Control` comes in if that sum would
        make the host wait for a device, and to tell all ranks what the error is.
        """
        control, phase = self._groups.control, "optimizer: update"
        mine = self._pack_update(failure)
        add_up = self._total if joint is None else joint.sum_with_parameters
        sums: list[float] | None = None
        try:
            if isinstance(failure, DeadlineError):
                failure = self._named(failure)
            if self._total.is_on_host or joint is not None:
                try:
                    sums = add_up(mine, what="the agreement on an update")
                except DeadlineError as late:
                    # Only `control` knows which ranks are missing; and it need not wait as long.
                    named = self._named(late)
                    failure = failure or named
            if sums is None or sums[0]:
                payload = json.dumps(mine).encode()
                answers = self._agree_on(failure, phase=phase, payload=payload)
                sums = [math.fsum(each) for each in zip(*map(json.loads, answers), strict=True)]
            if self._scalars.has_parted(sums[1:]):
                payload = self._scalars.described()
                answers = self._agree_on(None, phase=phase, payload=payload)
                by_rank = dict(zip(control.ranks, answers, strict=True))
                self._scalars.refuse(by_rank, name=self._name)
        except BaseException as error:
            if sums is None or sums[0]:
                self._scalars.has_missed_update = True
            if isinstance(error, DeadlineError):
                # The gathers wait for the same ranks: another limit, in which nothing can come.
                for stepper in self._steppers.values():
                    stepper.give_up_gathers(error)
            else:
                with contextlib.suppress(DeadlineError):  # the first error is the one to report
                    self.synchronize()
            raise


def clip_factor(norm: GradientNorm, *, limit: float) -> float:
    """Return the factor that brings a norm down to `limit`; 0 means no limit.

    All ranks compute it from the same number, so copies of a parameter stay equal.
    """
    return limit / norm.value if limit and norm.value > limit else 1.0


def _in_module(module: str, error: Exception) -> Exception:
    """Return an error that names the module it occurred in."""
    if module == ALONE:
        return error
    record = ErrorRecord.of(error)
    named = msgspec.structs.replace(
        record,
        message=f"module {module!r}: {record.message}",
        details={"module": module, **record.details},
    ).to_error()
    named.__cause__ = error
    return named

"""One step of several modules, each with an optimizer and a layout of its own."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import torch

from holdfast.errors import ConfigError, DeadlineError, ErrorRecord
from holdfast.optim.checks import check_limit
from holdfast.optim.module_entries import (
    check_entries,
    choose_loss_module,
    compare_ranks,
    describe,
    refuse_common_parameters,
)
from holdfast.optim.module_stepper import ModuleStepper
from holdfast.optim.norms import LayoutSum, clip_factor
from holdfast.optim.scaler import LossScaler
from holdfast.optim.step_sum import Contribution, StepSum, StepSums
from holdfast.optim.stepping import StepOutcome, agree_on_update
from holdfast.optim.torch_interface import TorchInterface, count_as_stepped, refuse_closure
from holdfast.parallel import ModuleGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModuleOutcome(StepOutcome):
    """The result of a step of several modules; the same on every rank, whatever modules it has."""

    module_norms: Mapping[str, float]
    """2-norm of each module's gradient, scaled like `norm`; NaN where it was not finite, 0 for a
    frozen module."""
    bad_modules: tuple[str, ...]
    """Modules whose gradient was not finite on some rank, in their order."""
    inactive_modules: tuple[str, ...]
    """Modules that are trained, and got no gradient on any rank in this step."""
    num_tokens: int | None
    """What gradients were divided by; None without `num_tokens`."""


class MultiModuleOptimizer(TorchInterface):
    """The optimizers of all modules as one: one norm, one decision, one failure for all ranks.

        optimizers = {}
        if groups.has("vision"):
            optimizers["vision"] = ShardedOptimizer(vision, ..., groups=groups["vision"])
        if groups.has("language"):
            optimizers["language"] = ChainedOptimizer({"dense": ..., "expert": ...})
        optimizer = MultiModuleOptimizer(groups, optimizers)
        with optimizer.microbatch(is_last=True):
            ...  # forward and backward of the modules here
        outcome = optimizer.step(max_norm=1.0)

    Every rank of every module makes the same calls. A frozen module, one without parameters on some
    rank, and one that got no gradient in a step take part in all of it.

    It is a `torch.optim.Optimizer` by type, whose parameter groups are those of the modules here,
    in the modules' order: a scheduler takes it, or each `optimizer["vision"]` takes one of its own.
    State is saved per module, under the module's name: `OptimizerState(optimizer["vision"],
    vision)`.

    Args:
        groups: of all modules.
        optimizers: one entry for each module of this rank: a `ShardedOptimizer` or a
            `ChainedOptimizer`, a `ReducedOptimizer` around a plain torch optimizer, the `stepper`
            of a `ShardedModel`, each on the module's own groups; None, on all its ranks, for a
            module that is not trained.
        loss_module: whose ranks count the tokens of `step(num_tokens=)`; by default the one
            that feeds no other, where there is one only.

    Raises:
        ConfigError: On all ranks: an entry is missing, is for a module that this rank does not
            have, is nothing that steps or is on other groups than the module's; ranks of a module
            have entries of different kinds or with different divisors; two modules have a
            parameter in common.
        LayoutError: On all ranks: there is no module of that name.

    Cost: collective over all ranks; one small agreement.
    """

    def __init__(
        self,
        groups: ModuleGroups,
        optimizers: Mapping[str, ModuleStepper | None],
        *,
        loss_module: str | None = None,
    ) -> None:
        self._module_groups = groups
        self._steppers: dict[str, ModuleStepper] = {}
        self._is_closed = False
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            self._loss_module = choose_loss_module(groups.layouts, loss_module)
            check_entries(groups, optimizers)
            self._steppers = {m: s for m in groups.modules if (s := optimizers[m]) is not None}
            refuse_common_parameters(self._steppers)
            answer = {m: describe(optimizers[m]) for m in groups.modules}
        except Exception as error:
            failure = error
        answers = groups.control.agree(
            failure, phase="multi-module optimizer", payload=json.dumps(answer).encode()
        )
        by_rank = dict(zip(groups.control.ranks, map(json.loads, answers), strict=True))
        self._divisors = compare_ranks(groups.layouts, by_rank)
        self._sum = StepSum(groups.layouts, loss_module=self._loss_module)
        self._total = LayoutSum(groups.union)
        super().__init__([stepper.optimizer for stepper in self._steppers.values()])

    def __getitem__(self, module: str) -> torch.optim.Optimizer:
        """The optimizer of a module, for its state and for schedulers.

        Raises:
            GroupError: This rank does not have the module.
            ConfigError: The module is not trained.
        """
        self._module_groups[module]
        if module not in self._steppers:
            raise ConfigError(
                f"module {module!r} is not trained and has no optimizer: its entry is None"
            )
        return self._steppers[module].optimizer

    @property
    def groups(self) -> ModuleGroups:
        """The communicators of all modules."""
        return self._module_groups

    def optimizers_by_module(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizer of each module here that is trained, in the modules' order."""
        return {module: stepper.optimizer for module, stepper in self._steppers.items()}

    @property
    def group_modules(self) -> tuple[str, ...]:
        """The module of each of `param_groups`."""
        return tuple(
            module
            for module, stepper in self._steppers.items()
            for _ in stepper.optimizer.param_groups
        )

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Around one microbatch with one backward, of all modules here.

        Cost: that of each module's own.
        """
        with contextlib.ExitStack() as stack:
            for stepper in self._steppers.values():
                stack.enter_context(stepper.microbatch(is_last=is_last))
            yield

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | Mapping[str, LossScaler] | None = None,
        num_tokens: int | None = None,
        count_zeros: bool = False,
    ) -> MultiModuleOutcome:
        """Finish gradients, measure, clip, update, and start gathering parameters; collective.

        Where any rank's gradients of any module are not finite, nothing is updated anywhere.
        Gradients are forgotten in every case.

        With `num_tokens` losses are sums over tokens, and gradients are divided by the number of
        tokens of all data ranks of the module with the loss. What the modules' own optimizers
        divide by is undone then. A token counts once: of ranks with the same samples (tensor ranks,
        pipeline stages) those that pass a count pass the same one; context ranks count their own
        positions. All other ranks pass None. `norm` is that of the gradient divided so.

        Args:
            closure: refused; call backward before the step.
            max_norm: gradients are scaled down to this 2-norm over all modules; 0 or infinity for
                no limit. Equal on all ranks.
            scaler: has scaled the loss: one for all modules, or one for each module by name. They
                get one decision, after it was made.
            num_tokens: this rank's tokens that are part of the loss, of all microbatches.
            count_zeros: whether to count the elements of the gradient that are exactly zero. Equal
                on all ranks.

        Raises:
            ConfigError: On all ranks, before anything is updated: an argument is wrong or differs
                between ranks, scalers have different scales, token counts contradict each other or
                are 0 in total, or no rank got a gradient for any parameter of any module.
            HoldfastError: Gradients or the update failed on some rank; raised on all, naming ranks
                and modules. Before the update nothing has changed. A failed update has changed
                the other ranks' shares by then, as for a `ShardedOptimizer`. In both cases the
                next step works.

        Cost: the reductions of the modules' own groups not made yet; one sum over all ranks of some
        numbers per module and seven per rank, by which all is decided, and one number after the
        update, of whether it worked; the gathers of the modules.
        """
        try:
            mine, failure = self._contribution(
                closure,
                max_norm=max_norm,
                scaler=scaler,
                num_tokens=num_tokens,
                count_zeros=count_zeros,
            )
            outcome = self._decide_and_update(mine, failure, scalers=_distinct(scaler))
        except BaseException:
            with contextlib.suppress(DeadlineError):  # of a rank that the error has named
                self.drop_gradients()
            raise
        self.drop_gradients()
        for stepper in self._steppers.values():
            count_as_stepped(stepper.optimizer)
        return outcome

    def drop_gradients(self) -> None:
        """Forget the gradients of all modules here; `step` does so."""
        for stepper in self._steppers.values():
            stepper.drop_gradients()

    def synchronize(self) -> None:
        """Wait until the parameters of all modules here are whole and up to date."""
        for stepper in self._steppers.values():
            stepper.synchronize()

    def close(self) -> None:
        """Take all hooks off the modules here; nothing happens the second time."""
        self._is_closed = True
        for stepper in self._steppers.values():
            stepper.close()

    def sharding_records(self) -> dict[str, dict[str, dict[str, object]]]:
        """How each optimizer of each module here is sharded: by module, by optimizer."""
        return {module: stepper.sharding_records() for module, stepper in self._steppers.items()}

    def state_dict(self) -> NoReturn:
        """ConfigError: state is saved per module."""
        raise ConfigError(
            f"MultiModuleOptimizer.state_dict(): save the state of each module under the module's "
            f"name, OptimizerState(optimizer[module], ...); here are {self._listed()}"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """ConfigError, as for `state_dict`."""
        del state_dict
        raise ConfigError(
            f"MultiModuleOptimizer.load_state_dict(): load the state of each module under the "
            f"module's name, OptimizerState(optimizer[module], ...); here are {self._listed()}"
        )

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """What is a default of all optimizers here; empty where no module here is trained."""
        return super().defaults if self._inners else {}

    # ---- inside ----

    def _listed(self) -> str:
        return ", ".join(map(repr, self._steppers)) or "none"

    def _contribution(
        self,
        closure: None,
        *,
        max_norm: float,
        scaler: LossScaler | Mapping[str, LossScaler] | None,
        num_tokens: int | None,
        count_zeros: bool,
    ) -> tuple[Contribution, Exception | None]:
        """Finish this rank's reductions; what it contributes to the sum, and why it cannot go on.

        Whatever fails, the module's other ranks are met in every collective.
        """
        failure: Exception | None = None
        mine = Contribution(count_zeros=bool(count_zeros))
        try:
            refuse_closure(closure)
            if self._is_closed:
                raise ConfigError("the multi-module optimizer is closed; build another one")
            mine.max_norm = check_limit(max_norm)
            mine.scale = self._scale(scaler)
            mine.num_tokens = self._tokens_here(num_tokens)
        except Exception as error:
            failure = error
        for module, stepper in self._steppers.items():
            try:
                parts = stepper.gradient_parts()
                terms = self._sum.terms[module]
                mine.terms[module] = terms.of(
                    parts, rank=self._module_groups.rank, count_zeros=mine.count_zeros
                )
                mine.usage[module] = stepper.usage()
            except Exception as error:
                failure = failure or _in_module(module, error)
                with contextlib.suppress(Exception):  # the first failure is the one to report
                    stepper.join_reductions()
        if failure is not None:
            mine = Contribution(has_failed=True)
        return mine, failure

    def _decide_and_update(
        self, mine: Contribution, failure: Exception | None, *, scalers: Sequence[LossScaler]
    ) -> MultiModuleOutcome:
        """What comes after the gradients: the sum, the decision, loss scales, and the update."""
        sums = self._sum_up(mine, failure)
        tokens = self._sum.total_tokens(sums)
        outcome, factor = self._decide(mine, sums, tokens)
        # Only now: a scale that was updated from less than all ranks know would drift.
        for scaler in scalers:
            scaler.update(overflowed=outcome.skipped)
        if not outcome.skipped:
            scale = outcome.loss_scale * (1 if tokens is None else tokens)
            self._update_together(factor / scale, sums, weights=self._weights(tokens))
        return outcome

    def _sum_up(self, mine: Contribution, failure: Exception | None) -> StepSums:
        """What all ranks contribute; raises on all ranks what any of them has."""
        phase = "multi-module step: gradients"
        values = self._sum.pack(mine, rank=self._module_groups.rank)
        try:
            total = self._total(values, what="the sum by which all modules decide a step")
        except DeadlineError as error:
            # This names the ranks that are missing, and what any of the others has failed with.
            self._module_groups.control.agree(failure or error, phase=phase)
            raise
        sums = self._sum.read(total)
        if sums.failed:
            self._module_groups.control.agree(failure, phase=phase)
        sums.check_settings()
        sums.check_used()
        return sums

    def _decide(
        self, mine: Contribution, sums: StepSums, tokens: int | None
    ) -> tuple[MultiModuleOutcome, float]:
        """The outcome of the step, from nothing but numbers that all ranks have; and the factor."""
        scale = 1.0 if mine.scale is None else mine.scale
        divisor = scale * (1 if tokens is None else tokens)
        norm, by_module = sums.norm(divisor=divisor, weights=self._weights(tokens))
        factor = clip_factor(norm, limit=mine.max_norm)
        return (
            MultiModuleOutcome(
                norm=norm.value,
                clipped=norm.is_finite and factor != 1.0,
                skipped=not norm.is_finite,
                bad_ranks=norm.bad_ranks,
                num_zeros=norm.num_zeros if mine.count_zeros else None,
                loss_scale=scale,
                module_norms=by_module,
                bad_modules=tuple(m for m, each in sums.gradients.items() if each.bad_ranks),
                inactive_modules=tuple(m for m, (used, n) in sums.usage.items() if n and not used),
                num_tokens=tokens,
            ),
            factor,
        )

    def _update_together(
        self, factor: float, sums: StepSums, *, weights: Mapping[str, float]
    ) -> None:
        """Update and gather all modules here, and agree with all ranks on whether it worked."""
        failure: Exception | None = None
        for module, stepper in self._steppers.items():
            num_used, num_trained = sums.usage[module]
            try:
                if num_used < num_trained:
                    stepper.exchange_used()
                stepper.update(factor * weights[module])
            except Exception as error:
                failure = failure or _in_module(module, error)
        for module, stepper in self._steppers.items():
            try:
                stepper.launch_gathers()
            except Exception as error:
                failure = failure or _in_module(module, error)
        try:
            agree_on_update(failure, total=self._total, groups=self._module_groups.union)
        except BaseException:
            with contextlib.suppress(DeadlineError):  # of a rank that the agreement has named
                self.synchronize()
            raise
        for stepper in self._steppers.values():
            stepper.publish()

    def _weights(self, tokens: int | None) -> dict[str, float]:
        """What each module's gradients are multiplied by, so that all are sums over tokens."""
        return {m: 1.0 if tokens is None else float(d) for m, d in self._divisors.items()}

    def _scale(self, scaler: LossScaler | Mapping[str, LossScaler] | None) -> float | None:
        """The one loss scale of all modules here; ConfigError where they have several."""
        if isinstance(scaler, Mapping):
            for module in scaler:
                self._module_groups.has(module)  # raises for a module that there is not
            missing = [module for module in self._steppers if module not in scaler]
            if missing or not scaler:
                raise ConfigError(
                    f"scaler has no LossScaler for {', '.join(map(repr, missing)) or 'any module'};"
                    f" give each trained module one, or all of them the same one"
                )
        for each in _distinct(scaler):
            if not isinstance(each, LossScaler):
                raise ConfigError(f"scaler: a {type(each).__name__} is no LossScaler")
        scales = {each.scale for each in _distinct(scaler)}
        if len(scales) > 1 and isinstance(scaler, Mapping):
            listed = ", ".join(f"{each.scale:g} of {m!r}" for m, each in scaler.items())
            raise ConfigError(
                f"the loss scales of the modules differ: {listed}; one loss is scaled once: use "
                f"one LossScaler, or load all of them from one checkpoint"
            )
        return next(iter(scales), None)

    def _tokens_here(self, num_tokens: int | None) -> int | None:
        """The count as a plain number; ConfigError for one that is none, or of no use here."""
        if num_tokens is None:
            return None
        if self._loss_module is None:
            raise ConfigError(
                "num_tokens: several modules feed no other, so the one whose tokens count is "
                "unknown; pass loss_module= to MultiModuleOptimizer"
            )
        if not self._module_groups.has(self._loss_module):
            raise ConfigError(
                f"num_tokens={num_tokens!r}: this rank does not have module {self._loss_module!r}, "
                f"whose tokens count; pass None here"
            )
        try:
            count = -1 if isinstance(num_tokens, bool) else operator.index(num_tokens)
        except TypeError:
            count = -1
        if not 0 <= count < 2**50:  # the sum of all ranks is exact in a float64
            raise ConfigError(
                f"num_tokens={num_tokens!r} is no count: it is this rank's number of tokens that "
                f"are part of the loss"
            )
        return count


def _distinct(scaler: LossScaler | Mapping[str, LossScaler] | None) -> list[LossScaler]:
    """The scalers, each once."""
    if scaler is None:
        return []
    listed = scaler.values() if isinstance(scaler, Mapping) else [scaler]
    return list({id(each): each for each in listed}.values())


def _in_module(module: str, error: Exception) -> Exception:
    """An error that says in which module it was."""
    record = ErrorRecord.of(error)
    named = msgspec.structs.replace(
        record,
        message=f"module {module!r}: {record.message}",
        details={"module": module, **record.details},
    ).to_error()
    named.__cause__ = error
    return named

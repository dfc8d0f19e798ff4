"""One step of several modules, each with an optimizer and a layout of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from holdfast.errors import ConfigError
from holdfast.optim.engine import StepEngine, StepOutcome, Stepper
from holdfast.optim.module_entries import (
    check_entries,
    choose_loss_module,
    compare_ranks,
    describe,
    refuse_common_parameters,
)
from holdfast.optim.scaler import LossScaler
from holdfast.optim.torch_interface import TorchInterface
from holdfast.parallel import ModuleGroups


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
        optimizers: Mapping[str, Stepper | None],
        *,
        loss_module: str | None = None,
    ) -> None:
        self._module_groups = groups
        self._steppers: dict[str, Stepper] = {}
        failure: Exception | None = None
        name_of_loss: str | None = None
        answer: dict[str, Any] = {}
        try:
            name_of_loss = choose_loss_module(groups.layouts, loss_module)
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
        self._engine = StepEngine(
            groups.union,
            groups.layouts,
            self._steppers,
            name="MultiModuleOptimizer",
            loss_module=name_of_loss,
            divisors=compare_ranks(groups.layouts, by_rank),
        )
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
        is_finite: bool = True,
    ) -> StepOutcome:
        """Finish gradients, measure, clip, update, and start gathering parameters; collective.

        If any rank's loss, or its gradients of any module, are not finite, nothing is updated
        anywhere. Gradients are forgotten in every case.

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
            is_finite: whether this rank's loss is finite.

        Raises:
            ConfigError: On all ranks, before anything is updated: an argument is wrong or differs
                between ranks, scalers have different scales, hyperparameters differ between ranks
                of one pipeline stage of a module, token counts contradict each other or are 0 in
                total, or no rank got a gradient for any parameter of any module.
            HoldfastError: Gradients or the update failed on some rank; raised on all, naming ranks
                and modules. Before the update nothing has changed. A failed update has changed
                the other ranks' shares by then, as for a `ShardedOptimizer`. In both cases the
                next step works.

        Cost: the reductions of the modules' own groups not made yet; one sum over all ranks of some
        numbers per module and four per rank, by which all is decided, and one number after the
        update, of whether it worked; the gathers of the modules.
        """
        return self._engine.step(
            closure,
            max_norm=max_norm,
            scaler=scaler,
            count_zeros=count_zeros,
            is_finite=is_finite,
            num_tokens=num_tokens,
        )

    def drop_gradients(self) -> None:
        """Forget the gradients of all modules here; `step` does so."""
        self._engine.drop_gradients()

    def synchronize(self) -> None:
        """Wait until the parameters of all modules here are whole and up to date."""
        self._engine.synchronize()

    def close(self) -> None:
        """Take all hooks off the modules here; nothing happens the second time."""
        self._engine.close()

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
        return super().defaults if self.inners else {}

    # ---- inside ----

    def _listed(self) -> str:
        return ", ".join(map(repr, self._steppers)) or "none"

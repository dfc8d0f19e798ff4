"""One step of several modules, each with its own optimizer and layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast.errors import ConfigError, shorten_ranks
from holdfast.optim.checks import refuse_shared
from holdfast.optim.engine import StepEngine, StepOutcome, Stepper, Veto
from holdfast.optim.scaler import LossScaler
from holdfast.optim.torch_interface import TorchInterface
from holdfast.parallel import ModuleGroups, ModuleLayouts
from holdfast.state.unfinished import set_worker


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
    in the modules' order: a scheduler takes it, or each `optimizer["vision"]` has its own one.
    State is saved per module, under the module's name: `OptimizerState(optimizer["vision"],
    vision)`.

    Args:
        groups: of all modules.
        optimizers: one entry for each module of this rank: a `ShardedOptimizer` or a
            `ChainedOptimizer`, a `ReducedOptimizer` around a plain torch optimizer, the `stepper`
            of a `ShardedModel`, each on the module's own groups; None, on all its ranks, for a
            module that is not trained.
        loss_module: whose ranks count the tokens of `step(num_tokens=)`; by default the only
            module that feeds no other.

    Raises:
        ConfigError: On all ranks: an entry is missing, is for a module that this rank does not
            have, is not a `Stepper` or is on other groups than the module's; ranks of a module
            have entries of different kinds or with different divisors; two modules have a
            parameter in common.
        LayoutError: On all ranks: `loss_module` is not a module.

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
            name_of_loss = _choose_loss_module(groups.layouts, loss_module)
            _check_entries(groups, optimizers)
            self._steppers = {m: s for m in groups.modules if (s := optimizers[m]) is not None}
            members = {module: each.parameters() for module, each in self._steppers.items()}
            refuse_shared(members, where="the optimizers of modules")
            answer = {m: _describe(optimizers[m]) for m in groups.modules}
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
            number=groups.union.next_number("optimizer"),
            loss_module=name_of_loss,
            divisors=_compare_ranks(groups.layouts, by_rank),
            edges=groups.layouts.edges,
            crossings=groups.crossings,
            bridged=groups if groups.layouts.edges else None,
        )
        for stepper in self._steppers.values():
            stepper.is_entry = True
            # What is saved of a module knows nothing of the bridges between them.
            set_worker(self, on=stepper.optimizer)
        super().__init__([stepper.optimizer for stepper in self._steppers.values()])

    def __getitem__(self, module: str) -> torch.optim.Optimizer:
        """Return the optimizer of a module, for its state and for schedulers.

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
        """Communicators of all modules."""
        return self._module_groups

    def optimizers_by_module(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizer of each trained module of this rank, in the modules' order."""
        return {module: stepper.optimizer for module, stepper in self._steppers.items()}

    @property
    def group_modules(self) -> tuple[str, ...]:
        """Module of each of `param_groups`."""
        return tuple(
            module
            for module, stepper in self._steppers.items()
            for _ in stepper.optimizer.param_groups
        )

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around one microbatch with one backward, of all modules of this rank.

        Called by all ranks. An error in it on some ranks ends the step on all ranks of all modules,
        see `Stepper.microbatch`: the others raise in the bridge where they wait, or at its end.

        Cost: that of each module's own, and one agreement over all ranks.
        """
        return self._engine.microbatch(is_last=is_last)

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | Mapping[str, LossScaler] | None = None,
        num_tokens: int | None = None,
        count_zeros: bool = False,
        is_finite: bool = True,
        veto: Veto | None = None,
    ) -> StepOutcome:
        """Finish gradients, measure, clip, update, and start gathering parameters; collective.

        If any rank's loss, or its gradients of any module, are not finite, nothing is updated
        anywhere. Gradients are forgotten in every case.

        Without `num_tokens` modules that get gradients of the same losses divide them by the same
        number, see docs/multi-module.md.

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
            veto: asked on each rank; if it vetoes on any, nothing is updated anywhere. See
                `Stepper.step`.

        Raises:
            ConfigError: On all ranks, before anything is updated: an argument is wrong or differs
                between ranks, scalers have different scales, hyperparameters differ between ranks
                of one pipeline stage of a module, a forward over a bridge has had no backward,
                modules divide gradients of the same losses by different numbers, token counts
                contradict each other or are 0 in total, or no rank got a gradient for any parameter
                of any module.
            HoldfastError: Gradients or the update failed on some rank; raised on all, naming ranks
                and modules. Before the update nothing has changed. A failed update has changed
                the other ranks' shares by then, as for a `ShardedOptimizer`.

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
            veto=veto,
        )

    @property
    def num_updates(self) -> int:
        """Steps of this optimizer that have changed parameters, or may have."""
        return self._engine.num_updates

    def unfinished_work(self) -> str | None:
        """Return a sentence on what waits for its backward over a bridge; None if nothing does."""
        return self._module_groups.crossings.unfinished_work()

    def drop_gradients(self) -> None:
        """Forget the gradients of all modules of this rank; `step` does so itself.

        Called on all ranks after a batch that is left out: forwards over bridges that had no
        backward are forgotten, too.
        """
        self._engine.drop_gradients()

    def synchronize(self) -> None:
        """Wait until the parameters of all modules of this rank are whole and up to date."""
        self._engine.synchronize()

    def close(self) -> None:
        """Take all hooks off the modules of this rank; a second call does nothing."""
        self._engine.close()

    def sharding_records(self) -> dict[str, dict[str, dict[str, object]]]:
        """Return how each optimizer is sharded, by module and by the optimizer's name."""
        return {module: stepper.sharding_records() for module, stepper in self._steppers.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults that all optimizers have in common; empty if no module here is trained."""
        return super().defaults if self.inners else {}

    def _state_hint(self, verb: str) -> str:
        listed = ", ".join(map(repr, self._steppers)) or "none"
        return (
            f"{verb} the state of each module under the module's name, "
            f"OptimizerState(optimizer[module], ...); this rank has {listed}"
        )


# ---- checks of the entries, on this rank and between ranks ----


def _choose_loss_module(layouts: ModuleLayouts, name: str | None) -> str | None:
    """Return the module whose ranks count tokens; raise LayoutError if `name` is not a module."""
    if name is not None:
        layouts[name]
        return name
    sources = {source for source, _ in layouts.edges}
    ends = [module for module in layouts if module not in sources]
    return ends[0] if len(ends) == 1 else None


def _check_entries(groups: ModuleGroups, optimizers: Mapping[str, object]) -> None:
    """Raise ConfigError unless each module of this rank has one entry, on the module's groups."""
    for module in optimizers:
        if not groups.has(module):
            raise ConfigError(
                f"an optimizer for module {module!r}, which this rank does not have: give one for "
                f"each of {', '.join(map(repr, groups.modules))}"
            )
    for module in groups.modules:
        if module not in optimizers:
            raise ConfigError(
                f"no optimizer for module {module!r}, which this rank has; give None, on all its "
                f"ranks, if it is not trained"
            )
        stepper = optimizers[module]
        if stepper is None:
            continue
        if not isinstance(stepper, Stepper):
            raise ConfigError(
                f"module {module!r}: a {type(stepper).__name__} cannot step with other modules: "
                f"give a ShardedOptimizer, a ChainedOptimizer, ReducedOptimizer(optimizer, "
                f"groups[{module!r}]) around a plain torch optimizer, the stepper(optimizer) of a "
                f"ShardedModel, or None"
            )
        if stepper.groups is not groups[module]:
            raise ConfigError(
                f"module {module!r}: its optimizer is on other process groups than "
                f"groups[{module!r}]; build it on those"
            )


def _describe(stepper: Stepper | None) -> list[Any]:
    """Return what ranks compare: kind, divisor, and a description of the pipeline stage."""
    if stepper is None:
        return ["None", None, ""]
    return [stepper.kind, stepper.divisor, stepper.stage_description()]


def _compare_ranks(
    layouts: ModuleLayouts, by_rank: Mapping[int, Mapping[str, list[Any]]]
) -> dict[str, int]:
    """Return each trained module's divisor; raise ConfigError, on all ranks, if ranks differ."""
    for module, layout in layouts.items():
        for index, what in enumerate(("kind of optimizer", "divisor", "parameters")):
            peers: dict[int, dict[int, Any]] = {}
            for rank in layout.ranks:
                # Pipeline stages have other parameters, and all else in common.
                stage = layout.coordinates(rank)["pp"] if what == "parameters" else 0
                peers.setdefault(stage, {})[rank] = by_rank[rank][module][index]
            for values in peers.values():
                first = next(iter(values))
                differing = [rank for rank, value in values.items() if value != values[first]]
                if differing:
                    raise ConfigError(
                        f"module {module!r}: ranks {shorten_ranks(differing)} differ from rank "
                        f"{first} in {what}: {values[differing[0]]} instead of {values[first]}; "
                        f"build the same on all ranks of the module"
                    )
    divisors = {module: by_rank[layout.ranks[0]][module][1] for module, layout in layouts.items()}
    return {module: divisor for module, divisor in divisors.items() if divisor is not None}

"""Microbatches and steps of a sharded model, alone and together with other modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from holdfast._torch import buffer_table, mark_eager, unsaved_buffers
from holdfast.errors import ConfigError
from holdfast.fsdp import _torch
from holdfast.fsdp.data_axes import DataAxis
from holdfast.fsdp.guards import UnitGuard
from holdfast.fsdp.joins import check_joins
from holdfast.fsdp.launch_log import LaunchLog, UnitLaunch, can_watch
from holdfast.fsdp.originals import Originals
from holdfast.fsdp.plan import Kind
from holdfast.fsdp.prefetch import Prefetch
from holdfast.fsdp.trained import TrainedParameters
from holdfast.optim import LossScaler, StepOutcome
from holdfast.optim.collectives import Pending
from holdfast.optim.engine import ALONE, Veto
from holdfast.optim.microbatches import (
    Description,
    Launched,
    Look,
    Microbatches,
    MicrobatchTaker,
    ended_comparison,
)
from holdfast.optim.norms import CopyCounts, GradientPart, gradient_parts
from holdfast.optim.reduced import JoinedOptimizer, PlainStepper
from holdfast.optim.reducer import share_backward
from holdfast.parallel import ProcessGroups
from holdfast.parallel.groups.launch_order import LaunchProgress
from holdfast.parallel.groups.order_comparison import compare_orders, pack_orders
from holdfast.state.module_tree import parameter_names
from holdfast.state.unfinished import set_worker

_IS_TRAINED = attrgetter("requires_grad")
Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
"""Nothing is sharded, or what ZeRO 1, 2 or 3 shards (Rajbhandari et al. 2020)."""
OuterReduction = Literal["microbatch", "step"]
"""With replicas, gradients are summed between slices after each microbatch, or after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySchedule:
    """The times at which a strategy gathers parameters and reduces gradients."""

    shards: bool
    """True if parameters, gradients and state are in shards between steps."""
    regathers: bool
    """True if whole parameters are freed after each use; otherwise they stay until the step."""
    reduces_each_microbatch: bool
    """True if gradients are reduced after every microbatch; otherwise whole ones add up."""


SCHEDULES: Mapping[Strategy, StrategySchedule] = MappingProxyType(
    {
        "no_shard": StrategySchedule(shards=False, regathers=False, reduces_each_microbatch=False),
        "optim": StrategySchedule(shards=True, regathers=False, reduces_each_microbatch=False),
        "optim_grads": StrategySchedule(shards=True, regathers=False, reduces_each_microbatch=True),
        "optim_grads_params": StrategySchedule(
            shards=True, regathers=True, reduces_each_microbatch=True
        ),
    }
)
"""All four run on FSDP2. `optim` and `optim_grads` gather parameters once a step and keep them
whole to its end; between steps they are in shards, as gradients and state are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchKind:
    """What decides the collectives of a microbatch, but for which units it runs."""

    settings: tuple[object, ...]
    """What is reduced and freed, what was whole before, and what is trained."""
    order: tuple[object, ...]
    """Units by which parameters are gathered ahead."""


class Programs:
    """The collectives of whole microbatches, by their kind, newest first.

    Args:
        gathers_apart: True if parameters are gathered on communicators of their own. What is
            gathered ahead decides how gathers and reductions alternate, and rarely the order of
            either.
    """

    _MOST = 4
    """Programs kept of each kind: a model may leave out units in some steps."""

    def __init__(self, *, gathers_apart: bool) -> None:
        self._gathers_apart = gathers_apart
        self._known: dict[MicrobatchKind, list[list[UnitLaunch]]] = {}

    def remember(self, kind: MicrobatchKind, launches: list[UnitLaunch]) -> None:
        """Keep the collectives of a microbatch that has ended on all ranks.

        All ranks know the same programs then, and choose the same one.
        """
        known = self._known.setdefault(kind, [])
        if not known or known[0] != launches:
            known[:] = [launches, *(each for each in known if each != launches)][: self._MOST]

    def rest(self, kind: MicrobatchKind, done: Sequence[UnitLaunch]) -> Sequence[UnitLaunch]:
        """Return what follows in the newest microbatch that started the same; else nothing.

        If none of this kind did, that is what follows in all that differ in `order` alone.
        """
        for launches in self._known.get(kind, []):
            if launches[: len(done)] == done:
                return launches[len(done) :]
        if not self._gathers_apart:
            return ()
        alike = [
            rest
            for each, known in self._known.items()
            if each.settings == kind.settings
            for launches in known
            if (rest := _rest_by_communicator(launches, done)) is not None
        ]
        is_known = bool(alike) and all(
            _by_communicator(each) == _by_communicator(alike[0]) for each in alike
        )
        return alike[0] if is_known else ()


def _rest_by_communicator(
    launches: Sequence[UnitLaunch], done: Sequence[UnitLaunch]
) -> list[UnitLaunch] | None:
    """Return what is not done; None if some communicator started differently."""
    left = _by_communicator(done)
    rest: list[UnitLaunch] = []
    for each in launches:
        before = left.get(each.group)
        if not before:
            rest.append(each)
        elif before.pop(0) != each:
            return None
    return rest if not any(left.values()) else None


def _by_communicator(
    launches: Sequence[UnitLaunch],
) -> dict[dist.ProcessGroup, list[UnitLaunch]]:
    result: dict[dist.ProcessGroup, list[UnitLaunch]] = {}
    for each in launches:
        result.setdefault(each.group, []).append(each)
    return result


class ShardedModel(MicrobatchTaker):
    """A model that `fully_shard_model` has sharded, with its microbatches and steps.

        sharded = fully_shard_model(model, groups, experts=(), units=model.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for i, batch in enumerate(batches):
            with sharded.microbatch(is_last=i == len(batches) - 1):
                loss(model(batch)).backward()
        outcome = sharded.step(optimizer, max_norm=1.0)

    Checkpoints do not need it: save the model and `OptimizerState(optimizer, model)`. Names of
    parameters are those of the bare model.

    Callers do not build it. `groups` are the communicators, `model` is the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ProcessGroups,
        *,
        guards: Sequence[UnitGuard],
        log: LaunchLog,
        originals: Originals,
        prefetch: Prefetch,
        axes: Mapping[Kind, DataAxis],
        schedule: StrategySchedule,
        outer_reduction: OuterReduction,
    ) -> None:
        self.model = model
        self.groups = groups
        self._guards = guards
        for guard in guards:
            guard.units = guards
        self._units = _torch.AllUnits(
            [guard.state for guard in guards], [guard.places for guard in guards]
        )
        self._groups = self._units.groups
        # The units have it.
        TrainedParameters(self._groups, log=log, control=groups.control)
        self._originals = originals
        self._prefetch = prefetch
        self.axes = axes
        self._log = log
        self._device = next((axis.device for axis in axes.values()), torch.device("cpu"))
        self._predicts = not all(can_watch(group, self._device) for group in self._log.counts())
        """True if this rank makes the rest of a microbatch that failed here by those before it.

        Others may wait for their devices, and then cannot look whether a rank has failed.
        """
        self._members = [
            (member, kind)
            for guard in guards
            for group in guard.groups
            for kind, axis in axes.items()
            if group.mesh_info is axis.info
            for member in _torch.members(group)
        ]
        self._copies = CopyCounts(groups)
        self._schedule = schedule
        self._outer_reduction = outer_reduction
        self._is_ready = self._is_ready_for_inference = False
        """True from the first forward."""
        self._is_pending = False
        gathers_apart = all(axis.gather is not None for axis in axes.values())
        self._programs = Programs(gathers_apart=gathers_apart)
        self._kind = MicrobatchKind(settings=(), order=())
        """Of the last microbatch."""
        self._microbatches = Microbatches({ALONE: self}, groups)
        self._microbatches.watch_outside()
        self._stepper: ShardedModelStepper | None = None
        """Stepper with the optimizer of the last `step`."""
        self.number = groups.next_number("optimizer")
        # On each module: a part of a state may be one of them, or have the model inside.
        for module in model.modules():
            set_worker(self, on=module)
        if guards:
            model.register_forward_pre_hook(self._before_forward, prepend=True)
            # After FSDP2's own hook, which leaves whole parameters where a backward needs them.
            model.register_forward_hook(self._after_forward)
            model.register_forward_hook(self._leave_forward, always_call=True)

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around forward and backward of one microbatch; every rank enters the same contexts.

        Without it every backward reduces, between slices too, and frees whole parameters.

        An error in it on some ranks ends the step on all, at the end of this microbatch: it keeps
        its type where it occurred, and the other ranks raise a HoldfastError that names it. Call
        `drop_gradients` on all ranks then, and repeat the step; what comes before that is refused.
        Ranks that wait for the one that failed in a gather or a reduction of theirs leave it, and
        all complete what was launched. Devices cannot leave: there the one that failed makes the
        remaining collectives, as they were in an earlier microbatch of the same kind. If there was
        none, and a rank waits for its device before the microbatch ends, or in collectives of the
        model itself (`tp`, `ep`), it raises when the limit of that communicator is over; then start
        again from the last checkpoint.

        Args:
            is_last: True if a step follows. Otherwise gradients are kept as the strategy says.

        Raises:
            ConfigError: The reduction of a unit was changed since the model was sharded, or an
                error ended the last microbatch.
            HoldfastError: It failed on another rank.
            DeadlineError: A collective of the body was not completed by other ranks; on all ranks,
                naming the late ones.

        Cost: the collectives of a backward, a reduction only if the strategy says so; and one
        agreement of all ranks over `control`.
        """
        return self._microbatches.enter(is_last=is_last)

    @contextlib.contextmanager
    def take_microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Set up what the backward of a microbatch does; `microbatch` without other ranks."""
        self._originals.check_writes()
        self._check_settings()
        if self._is_pending and any(map(_torch.has_other_sum, self._groups)):
            raise ConfigError(
                "parameters were thawed while gradients of others are summed over a part of the "
                "ranks; thaw after step(), or forget the gradients first with drop_gradients()"
            )
        reduces = is_last or self._schedule.reduces_each_microbatch
        reduces_outer = is_last or self._outer_reduction == "microbatch"
        reshards = is_last or self._schedule.regathers
        self._set(reduces=reduces, reduces_outer=reduces_outer, reshards=reshards)
        self._share_backward()
        if self._predicts:
            whole = tuple(guard.is_whole() for guard in self._guards)
            trained = tuple(_torch.sharded(member).requires_grad for member, _ in self._members)
            self._kind = MicrobatchKind(
                settings=(reduces, reduces_outer, reshards, whole, trained),
                order=self._prefetch.order,
            )
        self._log.start()
        self._is_pending = True
        self.groups.reducing.append(self)
        try:
            yield
            # Without a backward in the last one, gradients of those before it are not reduced.
            self._is_pending = not is_last or self._units.has_unreduced()
        except RuntimeError as error:
            _torch.explain(error)
            raise
        finally:
            self.groups.reducing.remove(self)
            self._log.stop()
            self._units.leave()  # after an error, too
            self._set(reduces=True, reduces_outer=True, reshards=True)

    def reduces_on(self, group: dist.ProcessGroup) -> bool:
        """Return True if units reduce their gradients on this communicator."""
        return self._log.launches_on(group)

    def launch_late(self, *, within: str) -> bool:
        """Return False: FSDP2 reduces in the backward, and what is within comes after it."""
        del within
        return False

    def _share_backward(self) -> None:
        """Let sharded optimizers whose microbatch this is within reduce after the backward.

        Each rank has gradients of theirs, and of the units here, in an order of its own.
        """
        if self.groups.reducing not in ([], [self]):
            share_backward(self.groups.reducing, self._log.groups(), who="the sharded model")

    def close_microbatch(self) -> None:
        if self._predicts:
            self._programs.remember(self._kind, [*self._log.launches])

    def join_microbatch(self) -> Sequence[Pending]:
        """Launch the collectives that are missing, as in the last microbatch of the same kind."""
        if not self._predicts:
            return ()
        return self._log.repeat(self._programs.rest(self._kind, self._log.launches))

    def watch_others(self, look: Look | None) -> Look | None:
        before, self._log.look = self._log.look, look
        return before

    def progress(self) -> Sequence[LaunchProgress]:
        return self._log.progress()

    def launched(self) -> dict[str, Launched]:
        return {
            group.group_name: Launched(
                ranks=dist.get_process_group_ranks(group),
                count=count,
                recent=[each.describe() for each in self._log.launches if each.group is group],
            )
            for group, count in self._log.counts().items()
        }

    def orders(self) -> Mapping[str, int]:
        return self._log.orders()

    def launches_on(self, communicator: str) -> Sequence[str]:
        return self._log.uncompared_on(communicator)

    def end_comparison(self, *, is_same: bool) -> None:
        self._log.end_comparison(is_same=is_same)

    def has_uncompared_launches(self) -> bool:
        """Return True if there are launches that the ranks have not compared yet."""
        return self._log.has_uncompared()

    def launch_missing(self, missing: Mapping[str, Sequence[Description]]) -> Sequence[Pending]:
        groups = {str(group.group_name): group for group in self._log.counts()}
        launches = [
            UnitLaunch.of(each, groups[name], self._device)
            for name, rest in missing.items()
            for each in rest
        ]
        return [*self._log.take_pending(), *self._log.repeat(launches)]

    def step(
        self,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        count_zeros: bool = False,
        is_finite: bool = True,
        veto: Veto | None = None,
    ) -> StepOutcome:
        """Measure gradients, clip, update; collective. Gradients are forgotten in every case.

        These are all gradients of the model, also those of parameters that `optimizer` does not
        have: so several optimizers that use the same backward are passed together, and one step of
        one of them is followed by another backward.

        The norm is exact: the sum over all ranks of squares, each divided by the number of ranks
        that hold the element. If any rank's gradients or loss are not finite nothing is updated
        anywhere. A parameter that no rank used keeps its value and its state, as in one process.

        Args:
            optimizer: any torch optimizer of the sharded model's parameters, or several of them
                by name, over different parameters (Muon for matrices, AdamW for the rest). One that
                joins elements is tried once on a small matrix: it must update shards like a whole.
            max_norm: gradients are scaled down to this 2-norm; 0 or infinity for no limit.
            scaler: the one that scaled the loss; it is updated by the decision of all ranks.
            count_zeros: count the elements of the gradient that are exactly zero.
            is_finite: True if this rank's loss is finite.
            veto: asked on each rank, such as a `RerunMachine`; if it vetoes on any, nothing is
                updated anywhere. On all ranks or on none.

        Raises:
            ConfigError: On all ranks, before anything is updated: the optimizer has parameters that
                are not the model's (it was built before the model was sharded), two have one in
                common, one joins elements of local shards alone, gradients of a microbatch are not
                reduced yet, no rank got a gradient, or ranks differ in an argument or a
                hyperparameter.
            HoldfastError: The optimizer failed on some rank; raised on all, naming the ranks and
                their messages. The others have updated their shards by then.

        Cost: two small sums over the layout, before and after the update.
        """
        given = [*optimizer.values()] if isinstance(optimizer, Mapping) else [optimizer]
        if self._stepper is None or [*map(id, self._stepper.inners)] != [*map(id, given)]:
            self._stepper = ShardedModelStepper(self, optimizer)
        return self._stepper.step(
            max_norm=max_norm,
            scaler=scaler,
            count_zeros=count_zeros,
            is_finite=is_finite,
            veto=veto,
        )

    def stepper(
        self, optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
    ) -> ShardedModelStepper:
        """Return the stepper of this model, to be an entry of a `MultiModuleOptimizer`.

        Args:
            optimizer: of the sharded model's parameters, as for `step`.

        Raises:
            ConfigError: The optimizer has parameters that are not the model's, or several have one
                in common.
        """
        stepper = ShardedModelStepper(self, optimizer)
        self.check_optimizer(stepper.optimizer)
        return stepper

    def drop_gradients(self) -> None:
        """Forget all gradients, including those of microbatches that are not reduced.

        After an error in a forward or a backward it makes the model ready for the next step; all
        ranks call it then.

        Raises:
            ConfigError: A whole parameter was written, which is lost; gradients are forgotten.
        """
        self.tell_others()
        interrupted = self._interrupted()
        try:
            self._check_writes()
            for guard in interrupted:
                guard.check_after_error()
        finally:
            if self._is_interrupted:
                self._prefetch.forget()
            # What was gathered ahead may have been completed from zeros.
            if self._is_interrupted or interrupted:
                _torch.reset(self.model)
            is_completed = self._is_interrupted and not self.is_interrupted_alone
            self._log.forget_orders(is_completed=is_completed)
            self._is_pending = self._is_interrupted = False
            for group in self._groups:
                group.drop_gradients()
            # After an error some ranks have whole parameters and others not: all gather again.
            # After a step that was refused, too, writes go to shards.
            _torch.reshard_idle(self._groups)

    def _interrupted(self) -> list[UnitGuard]:
        """Return the units that an error has left in the middle of a forward or a backward."""
        if self._units.is_idle():
            return []
        return [guard for guard in self._guards if _torch.is_interrupted(guard.state)]

    def unfinished_work(self) -> str | None:
        """Return what a save or load of the model would lose now, see `state.unfinished`."""
        if self._reason_lost:
            return self._reason_lost
        if self._is_interrupted or self._interrupted():
            return (
                "an error ended the last microbatch of the sharded model; call drop_gradients() "
                "of it on all ranks first"
            )
        changed = next((text for guard in self._guards if (text := guard.changed())), None)
        if changed is not None:
            return f"{changed}; put back what was there, or write its values in place"
        lost = next((text for guard in self._guards if (text := guard.lost_write())), None)
        if lost is not None:
            return f"{lost}; call drop_gradients() of the sharded model, and write again"
        if any(guard.has_unreduced() or guard.has_unused_gradients() for guard in self._guards):
            return (
                "the sharded model holds gradients that no step has used, as far as is known "
                "(functions over lists, torch._foreach_*, count no write); leave microbatch(...) "
                "and call step() first, or forget them with drop_gradients() of it on all ranks"
            )
        return None

    def compare_launches(self) -> None:
        """Check that ranks have run the same units in the same order since they last compared.

        A microbatch, a step and a save do so. Call it on all ranks after an evaluation that none of
        them follows if the model has branches that depend on its input.

        Raises:
            PlanError: On all ranks: they have not, so they have computed with weights of other
                units; it names what met.

        Cost: one small agreement.
        """
        control = self.groups.control
        payload = pack_orders(self.orders())
        payloads = control.all_gather(payload, phase="orders of collectives")
        with ended_comparison([self]):
            compare_orders(payloads, launches=self._launches_of, control=control)

    def _launches_of(self, communicator: str) -> Sequence[str] | None:
        return self.launches_on(communicator) if communicator in self.orders() else None

    def reshard(self) -> None:
        """Free whole parameters that are kept; the next forward gathers them from the shards.

        Raises:
            ConfigError: Code of the model has written to a whole parameter, which is lost.
        """
        self._check_writes()
        self.free()

    @torch.no_grad()
    def materialize(self) -> None:
        """Allocate the shards of a model that was built on the meta device; no whole tensor.

        They are filled with NaN (integers with zeros), so that anything that no load fills shows at
        once. Load a checkpoint next. Stored buffers are allocated the same way.

        Raises:
            ConfigError: A buffer on the meta device is not stored, so no load would fill it.

        Cost: memory of this rank's shards.
        """
        for name, module in self.model.named_modules():
            for key, buffer in buffer_table(module).items():
                if buffer is not None and buffer.is_meta and key in unsaved_buffers(module):
                    raise ConfigError(
                        f"materialize: buffer '{f'{name}.' if name else ''}{key}' is on the meta "
                        f"device and not stored in checkpoints (persistent=False), so its values "
                        f"would be lost; build it on a real device, or store it"
                    )
        device = self._device
        _torch.replace_tensors(self.model, lambda t: _filled(t, device) if t.is_meta else t)

    # ---- for `ShardedModelStepper` ----

    def free(self) -> None:
        """Free whole parameters; `gradient_parts` has looked at what was written to them."""
        _torch.reshard_idle(self._groups)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained, or were in this step: the same on all ranks."""
        parameters = self._parameters()
        if all(map(_IS_TRAINED, parameters)):
            return parameters
        before = self._trained_before()
        return [p for p in parameters if p.requires_grad or p in before]

    def num_used(self) -> int:
        """Count the parameters that got a gradient from this rank."""
        return len(self._units.used())

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ConfigError if an optimizer has parameters that are not the sharded model's."""
        known = {*map(id, self._parameters())}
        members = [p for group in optimizer.param_groups for p in group["params"]]
        if known.issuperset(map(id, members)):
            return
        stray = [p for p in members if id(p) not in known and p.numel()]
        if stray:
            names = parameter_names(self.model)
            named = [names[p] for p in stray if p in names]
            raise ConfigError(
                f"step: {len(stray)} parameters of the optimizer "
                f"{'(' + ', '.join(named[:3]) + ') ' if named else ''}are not those of the sharded "
                f"model, first one of shape {list(stray[0].shape)}; build the optimizer of "
                f"model.parameters() after fully_shard_model, which replaces them"
            )

    def gradient_parts(self) -> list[GradientPart]:
        """Return this rank's shards of the gradients, with the number of ranks that hold the same.

        Raises:
            ConfigError: Some are not reduced, an error ended a microbatch, or the reduction of a
                unit was changed, or a hook registered, since the model was sharded.
        """
        self.check_ended()
        self._check_writes()  # whatever else is wrong: nothing tells of a lost write later
        # A loop may have no microbatch(), and code in one changes it.
        if not self._units.is_in_place():  # a change before it a forward has refused
            for guard in self._guards:
                guard.check_places()
            self._units.note_places()
        self._check_settings()
        # They may have been forgotten, as by `zero_grad`.
        if self._is_pending and any(guard.has_gradients() for guard in self._guards):
            raise ConfigError(
                "step: gradients of the last microbatch are not reduced; run the last one of each "
                "step, with its backward, in microbatch(is_last=True). (What "
                "torch.utils.checkpoint computes again in a backward of its own may come too late: "
                "pass use_reentrant=False)"
            )
        parameters = self._parameters()
        if "experts" not in self.axes:
            return gradient_parts(parameters, copies=self._copies)
        by_num_parts: dict[int, list[nn.Parameter]] = {}
        for member, kind in self._members:
            parameter = _torch.sharded(member)
            # Ranks of other ep coordinates hold other experts under other names.
            is_one_of_many = kind == "experts" and _is_one_of_many(parameter)
            num_parts = self.groups.layout.ep if is_one_of_many else 1
            by_num_parts.setdefault(num_parts, []).append(parameter)
        return [
            part._replace(num_copies=part.num_copies // num_parts) if num_parts > 1 else part
            for num_parts, parameters in sorted(by_num_parts.items())
            for part in gradient_parts(parameters, copies=self._copies)
        ]

    # ---- inside ----

    def _parameters(self) -> list[nn.Parameter]:
        # Not kept: moving or materializing a model may replace them.
        return _torch.sharded_all(self._units.members)

    def _trained_before(self) -> set[nn.Parameter]:
        """Return the parameters that some backward since the last step was to train."""
        return {p for group in self._groups for p in _torch.sharded_all(group.trained_in_step())}

    def _check_writes(self) -> None:
        if self._units.is_written():
            for guard in self._guards:
                guard.check_writes()
            self._units.note_writes()

    def _check_settings(self) -> None:
        if not self._units.is_as_set_up():
            for guard in self._guards:
                guard.check_settings()

    @mark_eager
    def _before_forward(self, module: nn.Module, args: object) -> None:
        """Refuse a forward that cannot work before FSDP2 sets itself up for good by it."""
        del args
        if self.has_lost_communicators:
            self.check_ended()
        if not self._is_ready:
            if any(_torch.is_meta(guard.state) for guard in self._guards):
                raise ConfigError(
                    "forward of a sharded model on the meta device: its shards have no memory and "
                    "no values; call materialize() of the sharded model, and load a checkpoint, "
                    "before the first forward"
                )
            for guard in self._guards:  # FSDP2 takes for good what is there in the first forward
                guard.check_places()
            _torch.reduce_last_first(module)
            self._is_ready = True
        if not self._is_ready_for_inference and torch.is_inference_mode_enabled():
            # Also after training: some units may not have run in it.
            _torch.prepare_for_inference(module, [guard.state for guard in self._guards])
            self._is_ready_for_inference = True
        if torch.is_grad_enabled():  # maybe without a microbatch here
            if self not in self.groups.reducing:
                self._check_settings()
            self._share_backward()
        self._log.fold_orders()
        self._prefetch.begin()

    @mark_eager
    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Put shards back in the parameters' places after a forward without gradients.

        No backward would do that, and a write to `model.parameters()` would go to whole copies that
        are thrown away.
        """
        del module, args, output
        self._prefetch.end()
        if not torch.is_grad_enabled():
            self.reshard()

    @mark_eager
    def _leave_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Put shards in the parameters' places after a forward, or an error in it."""
        del module, args, output
        self._prefetch.leave()
        _torch.put_aside_if_idle(self._groups)

    def check_ended(self) -> None:
        # Dropping gradients, which a unit advises, would not help without communicators.
        for guard in () if self.has_lost_communicators else self._interrupted():
            guard.refuse_interrupted()
        super().check_ended()

    def _set(self, *, reduces: bool, reduces_outer: bool, reshards: bool) -> None:
        _torch.set_microbatch(
            self._groups, reduces=reduces, reduces_outer=reduces_outer, reshards=reshards
        )


class ShardedModelStepper(PlainStepper):
    """Steps a `ShardedModel`, alone or as an entry of a `MultiModuleOptimizer`.

    Gradients are reduced in the backward, which also tells what no rank has used, and parameters
    are gathered in the next forward. `ShardedModel.stepper` makes one.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    ) -> None:
        if isinstance(optimizer, Mapping):
            optimizer = JoinedOptimizer(optimizer, where="ShardedModel")
        super().__init__(optimizer, sharded.groups)
        self._sharded = sharded
        self.number = sharded.number
        self._is_tried = False

    @property
    def inners(self) -> tuple[torch.optim.Optimizer, ...]:
        """The torch optimizers, in their order."""
        optimizer = self.optimizer
        return optimizer.inners if isinstance(optimizer, JoinedOptimizer) else (optimizer,)

    @property
    def kind(self) -> str:
        return f"ShardedModel with {', '.join(type(each).__name__ for each in self.inners)}"

    @property
    def divisor(self) -> int:
        return self.groups.size("dp_cp")

    def sharding_records(self) -> dict[str, dict[str, object]]:
        return {"optimizer": {"type": "fully_sharded", "num_data_ranks": self.divisor}}

    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._sharded.take_microbatch(is_last=is_last)

    def close_microbatch(self) -> None:
        self._sharded.close_microbatch()

    def join_microbatch(self) -> Sequence[Pending]:
        return self._sharded.join_microbatch()

    def watch_others(self, look: Look | None) -> Look | None:
        return self._sharded.watch_others(look)

    def progress(self) -> Sequence[LaunchProgress]:
        return self._sharded.progress()

    def launched(self) -> dict[str, Launched]:
        return self._sharded.launched()

    def orders(self) -> Mapping[str, int]:
        return self._sharded.orders()

    def launches_on(self, communicator: str) -> Sequence[str]:
        return self._sharded.launches_on(communicator)

    def end_comparison(self, *, is_same: bool) -> None:
        self._sharded.end_comparison(is_same=is_same)

    def launch_missing(self, missing: Mapping[str, Sequence[Description]]) -> Sequence[Pending]:
        return self._sharded.launch_missing(missing)

    def close_communicators(self, reason: str) -> None:
        self._sharded.close_communicators(reason)

    def lose_step(self) -> None:
        self._sharded.lose_step()

    @property
    def has_lost_communicators(self) -> bool:
        return self._sharded.has_lost_communicators

    def interrupt(self, *, is_alone: bool = False, tell: Callable[[], None] | None = None) -> None:
        self._sharded.interrupt(is_alone=is_alone, tell=tell)

    def tell_others(self) -> None:
        self._sharded.tell_others()

    @property
    def is_interrupted_alone(self) -> bool:
        return self._sharded.is_interrupted_alone

    def check_ended(self) -> None:
        self._sharded.check_ended()

    def gradient_parts(self) -> list[GradientPart]:
        if not self._is_tried:  # first: other ranks may find nothing wrong, and wait in the trial
            for axis in self._sharded.axes.values():
                for optimizer in self.inners:
                    check_joins(optimizer, axis.mesh)
            self._is_tried = True
        self._sharded.check_optimizer(self.optimizer)
        return self._sharded.gradient_parts()

    def usage(self) -> tuple[int, int]:
        return self._sharded.num_used(), len(self._sharded.trained())

    def num_new(self) -> int:
        return int(self._sharded.has_uncompared_launches())

    def compare_new(self) -> None:
        self._sharded.compare_launches()

    def exchange_used(self) -> None:
        """Do nothing: what no rank has used has no gradient; see `UseCounts`."""

    def update(self, factor: float) -> None:
        self._sharded.free()
        super().update(factor)

    def drop_gradients(self) -> None:
        self._sharded.drop_gradients()


def _is_one_of_many(parameter: Tensor) -> bool:
    """Return True if a sharded expert does not declare `ep`: it was a plain tensor."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return "ep" not in (names or ())


def _filled(meta: Tensor, device: torch.device) -> Tensor:
    """Return memory for a tensor on the meta device, filled with NaN if its dtype has it."""
    new = torch.empty_like(meta, device=device)
    value = float("nan") if new.is_floating_point() or new.is_complex() else 0
    return new.fill_(value)

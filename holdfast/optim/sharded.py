"""ZeRO-1 and ZeRO-2: each rank keeps the optimizer state of its share of the parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast._torch import count_writes, parameter_table
from holdfast.errors import ConfigError, DeadlineError
from holdfast.optim.agreement import Compared, compare_ranks, entry_of
from holdfast.optim.buckets import Bucket, BucketPlan, plan_buckets
from holdfast.optim.checks import (
    check_free,
    check_inner,
    check_kind,
    check_parameter,
    check_settings,
    read_groups,
    steps_as_torch_wrote_it,
)
from holdfast.optim.collectives import Pending
from holdfast.optim.elementwise import check_elementwise
from holdfast.optim.engine import Stepper
from holdfast.optim.joint import JointSums
from holdfast.optim.microbatches import Launched
from holdfast.optim.norms import CopyCounts, GradientPart
from holdfast.optim.parameter_watch import ParameterWatch
from holdfast.optim.plain_shards import HINTS, PlainShards, Shards
from holdfast.optim.reducer import GradientReducer, Slot, Stage
from holdfast.optim.scalars import Border, numbers_of
from holdfast.optim.shard_groups import ShardGroups
from holdfast.optim.torch_interface import TorchInterface
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.state.module_tree import parameter_names
from holdfast.state.optimizer_protocol import OptimizerParameter
from holdfast.state.tensor_elements import local_of

LAST = "last microbatches"
"""Key of `orders`."""
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class ShardedOptimizer(Stepper, TorchInterface):  # type: ignore[misc]  # torch's `step` returns a loss
    """Any elementwise `torch.optim` optimizer, its state cut over data parallelism (ZeRO 1 and 2).

    Parameters, plain tensors or DTensors, are laid into flat buckets and become views of them; each
    rank of `over` updates one share of each bucket and the updated shares are gathered in place
    (Rajbhandari et al. 2020). Gradients are taken from autograd as they come: `.grad` is None after
    backward, and reading it before `step` is an error (outside of `microbatch`, a warning). In the
    last microbatch full buckets are reduce-scattered concurrently with the backward.

        optimizer = ShardedOptimizer(
            model, model.parameters(), make=lambda g: torch.optim.AdamW(g, lr=1e-3),
            groups=groups, over="dp_cp", divisor=groups.size("dp_cp"),
        )
        for i, batch in enumerate(batches):
            with optimizer.microbatch(is_last=i == len(batches) - 1):
                loss(model(batch)).backward()
        outcome = optimizer.step(max_norm=1.0)

    It is a `torch.optim.Optimizer` by type, so learning rate schedulers take it as it is. Its state
    is saved by `OptimizerState(optimizer, model)`. Parameters may be read and written at any time,
    as with any optimizer: what is written to them before the next step counts.

    If something else calls backward (a pipeline schedule, which then needs `scale_grads=False`),
    leave `microbatch` out: `step` reduces everything when it starts.

    Args:
        module: owns the parameters; its modules' forward waits for parameters in flight.
        parameters: parameters, or groups of them as torch takes them. Frozen ones are left alone.
        make: gives the torch optimizer for groups of 1-d tensors, e.g. `functools.partial`.
        groups: needs `over`, its clone for gathering and, with hybrid sharding, the `_inter` group,
            each if it has several ranks.
        over: `dp_cp` for dense parameters, `expt_dp` for experts; `dp_cp_intra` or
            `expt_dp_intra` to shard inside a slice and reduce between slices.
        divisor: the sum of gradients is divided by it. Every rank's loss is a mean over its own
            rows, so that is the size of `dp_cp`, for experts too. In a `MultiModuleOptimizer` it is
            that of the module with the loss.
        gather: communicator for parameters; by default `over` with `_ag` appended.
        stage: 1 keeps whole gradients between microbatches; 2 reduces after each microbatch and
            keeps a share, which needs `microbatch` around each.
        bucket_nbytes: gradient bytes per collective; a larger parameter has its own bucket.
        align_nbytes: parameters and shares start at multiples of this number of bytes.
        overlap: gather parameters concurrently with the next forward. No code sees one before it is
            whole: modules wait for their own when they are called, and any other read or write
            waits for the parameter's bucket. A bucket is not overlapped if some code could read it
            without waiting: one of its modules was not called through its hooks since the last step
            (compiled, scripted, functional), or other code holds views of its memory; nor is the
            only bucket of a small model, which arrives with the agreement that the step waits for
            (`joint.py`). Without `overlap` the step waits.
        elementwise: a declaration that the optimizer updates elements one by one; without it a
            trial on small tensors has to show that (about a tenth of a second, six more calls of
            `make`; for torch's own classes a hundredth, and three). A trial proves some dozens of
            steps; after every update scalars of groups and states are compared between ranks, and
            ranks that differ are refused.
        shards: by axis, plain parameters of which each rank along the axis holds another shard:
            `{"tp": [...]}`; for experts `ep` and `expt_tp`. All other plain parameters are the same
            on all ranks of their pipeline stage, or with `over="expt_dp"` experts that have a name
            of their own on each rank of `ep`. DTensors are not declared.
        name: for messages and stored records.

    Raises:
        ConfigError: On all ranks: parameters do not fit `over`, the module does not own them,
            another sharded optimizer has them, the optimizer joins elements, or ranks that hold the
            same parameters have others, other values or other buckets.
        GroupError: On all ranks: a communicator is missing or wrong.

    Cost: collective over the layout, two small agreements and one hash of the parameters. Memory
    per rank, in elements of the local parameters n over d ranks: n of parameters, n of gradients in
    float32 (stage 2: two buckets), n/d of reduced gradients, n/d of main parameters for bf16 and
    fp16, and n/d per entry of the torch optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
        *,
        make: MakeOptimizer,
        groups: ProcessGroups,
        over: str,
        divisor: int,
        gather: str | None = None,
        stage: Stage = 1,
        bucket_nbytes: int = 32 * 2**20,
        align_nbytes: int = 128,
        overlap: bool = False,
        elementwise: bool = False,
        shards: Shards | None = None,
        name: str = "optimizer",
    ) -> None:
        self.name = name
        self._groups = groups
        self._overlap, self._stage = overlap, stage
        self._bucket_nbytes, self._divisor = bucket_nbytes, divisor

        def lay_out() -> None:
            self._shard_groups = ShardGroups.of(groups, over=over, gather=gather)
            self._names = parameter_names(module)
            param_groups = read_groups(parameters)
            self._all = [(p, i) for i, group in enumerate(param_groups) for p in group["params"]]
            check_settings(
                name=name,
                divisor=divisor,
                num_averaged=groups.size("dp_cp"),
                stage=stage,
                sizes={"bucket_nbytes": bucket_nbytes, "align_nbytes": align_nbytes},
            )
            members = [p for p, _ in self._all]
            self._shards = PlainShards(shards, members, groups=groups, over=over, who=who)
            self._frozen = [p for p in members if not p.requires_grad]
            self._buckets = self._make_buckets(bucket_nbytes, align_nbytes)
            self._updated = self._updated_views()
            self.inner = self._make_inner(param_groups, make, is_elementwise=elementwise)

        who = f"optimizer '{name}'"
        # Not by its name, which is that of its pipeline stage.
        Guard[None](groups.control, "ShardedOptimizer").run(lay_out)
        super().__init__([self.inner])
        self._members = [[*map(id, group["params"])] for group in self.inner.param_groups]
        self._parameters = self._make_parameters()
        self._markers = self._bucket_markers()
        self._reducer = GradientReducer(
            self._buckets,
            shard_groups=self._shard_groups,
            stage=stage,
            divisor=divisor,
            names=self._names,
            name=name,
            reducing=groups.reducing,
        )
        self._gradients = self._gradient_views()
        for slot, updated, _ in self._gradients:
            slot.watch(updated)
        self._cut_ends = self._find_cut_ends()
        self._parts = self._make_parts()
        self._is_closed = False
        self._is_stale = self._main_requested = self._main_loaded = False
        self._watch = ParameterWatch(
            module,
            self._buckets,
            names=self._names,
            before_read=self._gather_loaded,
            after_load=self._after_load,
        )
        for bucket in self._buckets:
            bucket.set_own_uses()
        self.number = groups.next_number("optimizer")

    # ---- training ----

    @property
    def optimizer(self) -> Self:
        return self

    @property
    def kind(self) -> str:
        return f"{type(self).__name__} ({self.name})"

    @property
    def divisor(self) -> int:
        return self._divisor

    def orders(self) -> Mapping[str, int]:
        # Of stage 2 a step reduces again, alone, on a rank that has not called its last one so.
        is_last = {LAST: int(self._reducer.had_last_microbatch)} if self._stage == 2 else {}
        return {**super().orders(), **is_last}

    def launches_on(self, communicator: str) -> Sequence[str]:
        if communicator != LAST:
            return super().launches_on(communicator)
        return [f"microbatch(is_last={self._reducer.had_last_microbatch})"]

    def parameters(self) -> list[nn.Parameter]:
        return [member.parameter for member in self._parameters]

    def check_ended(self) -> None:
        self._check_open()
        super().check_ended()

    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Take gradients; the last microbatch reduces during its backward, in stage 2 every one."""
        self._check_open()
        return self._reducer.microbatch(is_last=is_last)

    def join_microbatch(self) -> Sequence[Pending]:
        if not self._is_closed:
            self.synchronize()
            self._reducer.join_microbatch()
        return ()  # `drop_gradients` waits for them

    def finish_gradients(self) -> None:
        """Reduce the gradients that are not reduced yet, and wait, as `step` does.

        Of several optimizers in the same order on all ranks, which the step compares. Cost: a
        reduce-scatter per bucket not launched yet.
        """
        self.take_turn()
        self._finish_gradients()

    def take_turn(self) -> None:
        if self._reducer.owes_reductions:
            self._reducer.turns.append(self._groups.next_number("reduction"))

    def turns(self) -> list[int]:
        return self._reducer.turns

    def _finish_gradients(self) -> None:
        if self._reducer.is_finished:
            self._check_open()
            return
        self._reducer.is_apart = True
        self._check_gradients()
        self._reducer.finish()

    def joint_sums(self, *, num_numbers: tuple[int, int]) -> JointSums | None:
        if self._stage != 1 or not JointSums.fits(
            self._buckets, self._shard_groups, self._groups.layout
        ):
            return None
        [bucket] = self._buckets
        self._reducer.is_joint = True
        return JointSums(
            bucket,
            self._reducer,
            shard_groups=self._shard_groups,
            groups=self._groups,
            num_numbers=num_numbers,
            finish=self._take_gradients,
        )

    def _take_gradients(self) -> None:
        """Take all gradients of this step into buckets, after the checks of `finish_gradients`."""
        self._check_gradients()
        self._reducer.take_all()

    def _check_gradients(self) -> None:
        """Raise ConfigError if gradients cannot be reduced; wait for parameters in flight."""
        self._check_open()
        self.synchronize()
        self._watch.check()
        self._check_groups()
        for bucket in self._buckets:
            bucket.check_views(self._names)
        for parameter in self._frozen:
            is_trained = parameter.requires_grad
            # Trained for a while, and frozen again: in one process its gradient would count.
            if is_trained or parameter.grad is not None:
                raise ConfigError(
                    f"{self._names[parameter]} was frozen when optimizer '{self.name}' was "
                    f"built and {'is trained' if is_trained else 'has a gradient'} now; build "
                    f"another optimizer"
                )

    def _check_groups(self) -> None:
        """Raise ConfigError if groups have other tensors than those that this rank updates."""
        groups = self.inner.param_groups
        if [[*map(id, group["params"])] for group in groups] == self._members:
            return
        raise ConfigError(
            f"optimizer '{self.name}': the tensors in its param_groups are not those that it was "
            f"built with (params were replaced, taken out or moved, or a group was). They are this "
            f"rank's shares of parameters, and others would not be updated; to train less set "
            f"requires_grad_(False), else close() this optimizer and build another one"
        )

    def gradient_parts(self) -> list[GradientPart]:
        self._finish_gradients()
        return self._parts

    def launched(self) -> dict[str, Launched]:
        over = self._shard_groups.over
        count = self._reducer.num_launched
        return {f"{self.name}, {over}": Launched(ranks=self._groups.ranks(over), count=count)}

    def join_reductions(self) -> None:
        """Make the remaining collectives of `finish_gradients`, after a failure of this rank.

        Its shares are useless then; forget them with `drop_gradients`. Cost: as there.
        """
        if not self._is_closed:
            self.synchronize()
            self._reducer.join()

    def usage(self) -> tuple[int, int]:
        slots = self._reducer.slots
        return sum(slot.is_used for slot in slots), len(slots)

    def exchange_used(self) -> None:
        self._reducer.exchange_used()

    @torch.no_grad()
    def update(self, factor: float) -> None:
        self._reducer.show_gradients()
        for bucket in self._buckets:
            bucket.take_written_values()
            count_writes(bucket.parameters)
            if factor != 1.0:
                bucket.gradient.mul_(factor)
        for slot, updated, gradient in self._gradients:
            updated.grad = gradient if slot.is_used else None
        self.inner.step()
        self._main_requested = self._main_loaded = False

    def borders(self) -> list[Border]:
        """Return the ends of parameters that are cut between ranks, with scalars of their state."""
        state = self.inner.state
        return [
            Border(
                place=place, is_end=is_end, numbers=numbers_of(state.get(updated, {}), name=name)
            )
            for name, updated, place, is_end in self._cut_ends
        ]

    def launch_gathers(self) -> None:
        """Start gathering the updated parameters; every rank calls this, even after a failure.

        Cost: an all-gather per bucket.
        """
        for bucket in reversed(self._buckets):
            bucket.launch_gather()

    def publish(self) -> None:
        """Let parameters be used again.

        With overlap a bucket stays in flight if no code can read it without waiting. All others are
        waited for here.
        """
        for position, bucket in enumerate(self._buckets):
            if not (self._overlap and self._hide(position)):
                bucket.finish_gather()
        self._watch.restart()

    def drop_gradients(self) -> None:
        self.tell_others()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self._is_interrupted = False
        self._reducer.drop()
        for _, updated, _ in self._gradients:
            updated.grad = None
        for parameter in self._frozen:
            parameter.grad = None

    def synchronize(self) -> None:
        self._gather_loaded()
        for bucket in self._buckets:
            bucket.finish_gather()

    def give_up_gathers(self, error: DeadlineError) -> None:
        for position, bucket in enumerate(self._buckets):
            if self._hide(position):
                bucket.give_up_gather(error)
            else:
                with contextlib.suppress(DeadlineError):  # `error` tells more
                    bucket.finish_gather()

    def _hide(self, position: int) -> bool:
        """Make reads of a bucket in flight wait; return False if some code may not wait."""
        num_other_uses = sum(map(len, self._markers[position]))
        return self._watch.was_entered(position) and self._buckets[position].hide(
            num_other_uses=num_other_uses
        )

    def close(self) -> None:
        """Remove all hooks; parameters stay views of the buckets. A second call does nothing.

        Unused gradients are forgotten, and another optimizer can be built over the parameters.
        """
        if self._is_closed:
            return
        self.synchronize()
        self._is_closed = True
        self._forget_gradients()
        self._reducer.close()
        self._watch.close()

    # ---- state (see `holdfast.state.OptimizerState`) ----

    def unfinished_work(self) -> str | None:
        if self._is_interrupted or not self._reducer.is_in_step:
            return super().unfinished_work()
        return (
            f"{self.kind} holds gradients that no step has used; leave microbatch(...) and call "
            f"step() first, or forget them with drop_gradients() on all ranks"
        )

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Return every parameter with the elements of it that this rank updates."""
        return self._parameters

    def num_groups(self) -> dict[str, int]:
        """Return the number of parameter groups, by this optimizer's name."""
        return {self.name: len(self.param_groups)}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """Return stage, bucket size and group of the shards, by this optimizer's name.

        The record has no entry that the layout decides: it is the same wherever the module is.
        """
        return {
            self.name: {
                "type": "parameter_coordinates",
                "stage": self._stage,
                "over": self._shard_groups.over,
                "bucket_nbytes": self._bucket_nbytes,
            }
        }

    def begin_load(self, *, with_main: bool) -> None:
        """Prepare for a load; its main parameters take precedence over the module's parameters."""
        self._main_requested = with_main

    def finish_load(self, *, with_main: bool) -> None:
        """Follow up a load: with main parameters, the model's are rounded from them before use."""
        self._main_requested = False
        self._main_loaded = self._is_stale = with_main
        if with_main:
            # This rank's share at once, so that what is written to it before the gather shows.
            for bucket in self._buckets:
                bucket.round_main()

    # ---- inside ----

    @torch.no_grad()
    def _gather_loaded(self) -> None:
        """Round and gather main parameters, on all ranks, after they were loaded."""
        if self._is_stale:
            self._is_stale = False
            for bucket in self._buckets:
                bucket.take_written_values()
            self.launch_gathers()
            for bucket in self._buckets:
                bucket.finish_gather()

    def _make_buckets(self, bucket_nbytes: int, align_nbytes: int) -> list[Bucket]:
        """Move the trained parameters into buckets, which are equal on all ranks of a group."""
        for parameter, _ in self._all:
            check_parameter(
                parameter,
                names=self._names,
                shard_groups=self._shard_groups,
                groups=self._groups,
                shards=self._shards,
            )
        trained = [parameter for parameter, _ in self._all if parameter.requires_grad]
        check_free(trained, names=self._names)
        plans = plan_buckets(
            trained,
            num_shares=self._shard_groups.num_shares,
            bucket_nbytes=bucket_nbytes,
            align_nbytes=align_nbytes,
            axes=self._shards.axes,
        )
        self._agree_on_plans(plans)
        keeps_whole = self._stage == 1
        with torch.no_grad():
            return [
                Bucket(plan, shard_groups=self._shard_groups, keeps_whole=keeps_whole)
                for plan in plans
            ]

    def _agree_on_plans(self, plans: Sequence[BucketPlan]) -> None:
        """Raise ConfigError on all ranks if ranks that hold the same differ in it or in buckets."""
        over = self._shard_groups.over.removesuffix("_intra")
        entries = []
        for number, plan in enumerate(plans):
            for parameter, span in zip(plan.parameters, plan.layout.spans, strict=True):
                name = self._names[parameter]
                place = {
                    "optimizer": f"{self.name}, stage {self._stage}",
                    "bucket": f"{number} of {plan.layout.numel} elements, from {span.start}",
                }
                entries.append(Compared(over=over, name=name, properties=place, aspect="buckets"))
                is_placed = isinstance(parameter, DTensor)
                entries.append(
                    entry_of(
                        parameter,
                        over=over if is_placed else self._shards.same_over(parameter),
                        name=name,
                        is_alone=self._shards.is_alone(parameter),
                    )
                )
        compare_ranks(
            entries,
            self._groups,
            who=f"optimizer '{self.name}'",
            phase="optimizer",
            # One factor of the whole gradient: pipeline stages have it in common, too.
            settings=f"divisor={self._divisor} (the ranks whose losses are averaged)",
            hints=HINTS,
        )

    def _updated_views(self) -> dict[nn.Parameter, Tensor]:
        """Return the elements that this rank updates: views of the buckets' main parameters."""
        return {
            parameter: bucket.main[owned.offset : owned.offset + owned.numel]
            for bucket in self._buckets
            for parameter, owned in bucket.all_owned()
        }

    def _find_cut_ends(self) -> list[tuple[str, Tensor, str, bool]]:
        """Return name, elements, place of the cut, and if they end there, of each cut parameter."""
        ends = []
        for bucket in self._buckets:
            for parameter, owned in bucket.all_owned():
                name, numel = self._names[parameter], local_of(parameter).numel()
                for at, is_end in ((owned.start, False), (owned.stop, True)):
                    if 0 < at < numel:
                        ends.append((name, self._updated[parameter], f"{name} at {at}", is_end))
        return ends

    def _gradient_views(self) -> list[tuple[Slot, Tensor, Tensor]]:
        """Return the elements that this rank updates, with their gradients."""
        owned = [owned for bucket in self._buckets for owned in bucket.owned]
        return [
            (slot, self._updated[slot.parameter], slot.bucket.gradient[at.offset :][: at.numel])
            for slot, at in zip(self._reducer.slots, owned, strict=True)
            if at is not None
        ]

    def _make_parts(self) -> list[GradientPart]:
        """Return this rank's shares of gradients, with the number of ranks that hold the same."""
        first = [bucket.parameters[0] for bucket in self._buckets]
        copies = CopyCounts(self._groups, num_parts=self._shards.num_parts)
        return [
            GradientPart(
                local=bucket.gradient,
                num_copies=count // self._shard_groups.num_shares,
                num_padding=bucket.layout.padding(self._shard_groups.index),
            )
            for bucket, count in zip(
                self._buckets, copies.of(zip(first, first, strict=True)), strict=True
            )
        ]

    def _make_inner(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        make: MakeOptimizer,
        *,
        is_elementwise: bool,
    ) -> torch.optim.Optimizer:
        own = [
            {**group, "params": [self._updated[p] for p in group["params"] if p in self._updated]}
            for group in param_groups
        ]
        try:
            inner = make([{**group, "params": list(group["params"])} for group in own])
        except Exception as error:
            raise ConfigError(
                f"optimizer '{self.name}': make failed for this rank's shards, which are tensors "
                f"of one dim ({type(error).__name__}: {error}). An optimizer of whole matrices "
                f"keeps its parameters whole, in a ReducedOptimizer, and is chained with the "
                f"sharded ones (ChainedOptimizer)"
            ) from error
        check_inner(inner, own, name=self.name)
        if not is_elementwise:
            check_kind(inner, name=self.name)
            kinds = [bucket.main for bucket in self._buckets]
            if kinds:
                shapes = [local_of(p).shape for bucket in self._buckets for p in bucket.parameters]
                check_elementwise(
                    make,
                    param_groups,
                    like=kinds,
                    shapes=shapes,
                    name=self.name,
                    is_known=steps_as_torch_wrote_it(inner),
                )
        return inner

    def _make_parameters(self) -> list[OptimizerParameter]:
        starts = {
            parameter: (owned.start, bucket.has_main)
            for bucket in self._buckets
            for parameter, owned in bucket.all_owned()
        }
        parameters = []
        for parameter, group in self._all:
            start, is_main = starts.get(parameter, (0, False))
            parameters.append(
                OptimizerParameter(
                    parameter=parameter,
                    group=group,
                    optimizer=self.inner,
                    updated=self._updated.get(parameter),
                    start=start,
                    over=self._shard_groups.over,
                    is_main=is_main,
                )
            )
        return parameters

    def _bucket_markers(self) -> list[list[Sized]]:
        """Return, by bucket, the views of it that saves keep and read only after `synchronize`."""
        markers = {member.parameter: member.markers for member in self._parameters}
        return [[markers[p] for p in bucket.parameters] for bucket in self._buckets]

    @torch.no_grad()
    def _after_load(self, buckets: Sequence[Bucket], owner: nn.Module) -> None:
        """Set main parameters from weights that were loaded into a module.

        If main parameters were loaded, too, those that round to the weights are kept.
        """
        exactly = not (self._main_requested or self._main_loaded)
        own = set(parameter_table(owner).values())
        for bucket in buckets:
            for number, parameter in enumerate(bucket.parameters):
                if parameter in own:
                    bucket.refresh_main(number, exactly=exactly)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"optimizer '{self.name}' is closed; build another one")

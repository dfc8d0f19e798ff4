"""ZeRO-1 and ZeRO-2: each rank keeps the optimizer state of its share of the parameters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.optim.buckets import Bucket, plan_buckets
from holdfast.optim.checks import (
    check_divisor,
    check_free,
    check_inner,
    check_kind,
    check_parameter,
    check_sizes,
    read_groups,
)
from holdfast.optim.elementwise import check_elementwise
from holdfast.optim.norms import GradientPart, num_copies
from holdfast.optim.parameter_watch import ParameterWatch
from holdfast.optim.reducer import GradientReducer, Stage
from holdfast.optim.scaler import LossScaler
from holdfast.optim.shard_groups import ShardGroups
from holdfast.optim.stepping import StepOutcome, take_step
from holdfast.optim.torch_interface import TorchFace, refuse_closure
from holdfast.parallel import ProcessGroups
from holdfast.state.module.tree import parameter_names
from holdfast.state.optimizer.protocol import OptimizerParameter

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class ShardedOptimizer(TorchFace):
    """Any elementwise `torch.optim` optimizer, its state cut over data parallelism (ZeRO 1 and 2).

    Parameters, plain tensors or DTensors, are laid into flat buckets and become views of them; each
    rank of `over` updates one share of each bucket and the updated shares are gathered in place
    (Rajbhandari et al. 2020). Gradients are taken from autograd as they come: `.grad` is None after
    backward, and reading it before `step` is an error (outside of `microbatch`: a warning). In the
    last microbatch full buckets are reduce-scattered beside the backward.

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

    Where something else calls backward (pipeline schedules, which then need `scale_grads=False`),
    `microbatch` is left out and `step` reduces everything at its beginning.

    Args:
        module: owns the parameters; its modules' forward waits for parameters under way.
        parameters: parameters, or groups of them as torch takes them. Frozen ones are left alone.
        make: gives the torch optimizer for groups of 1-d tensors, e.g. `functools.partial`.
        groups: needs `over`, its clone for gathering and, with hybrid sharding, the `_inter` group,
            each where it has several ranks.
        over: `dp_cp` for dense parameters, `expt_dp` for experts; `dp_cp_intra` or
            `expt_dp_intra` to shard inside a slice and reduce between slices.
        divisor: what the sum of gradients is divided by. Every rank's loss is a mean over its own
            rows, so that is the size of `dp_cp`, for experts too.
        gather: communicator for parameters; default `over` with `_ag` behind it.
        stage: 1 keeps whole gradients between microbatches; 2 reduces after each microbatch and
            keeps a share (needs `microbatch` around each for that).
        bucket_nbytes: gradient bytes per collective; a larger parameter has a bucket of its own.
        align_nbytes: what parameters and shares begin at multiples of.
        overlap: gather parameters beside the next forward. Nobody sees one before it is whole:
            modules wait for their own when they are called, and whoever else reads or writes one
            waits for its bucket. A bucket is not overlapped where waiting could be evaded: if a
            module of it was not called through its hooks since the last step (compiled, scripted,
            functional), or views of its memory are held elsewhere. Off: `step` waits.
        elementwise: the word that the optimizer updates elements one by one; without it a trial
            on small tensors has to show it (some milliseconds, `make` is called three times more).
        name: for messages and records.

    Raises ConfigError for parameters that do not fit `over`, a module that does not own them,
    parameters that another sharded optimizer has, an optimizer that joins elements, or other
    buckets on another rank; GroupError for a missing or wrong communicator. Collective over
    the layout: one small agreement.

    Memory per rank, in elements of the local parameters n over d ranks: n of parameters, n of
    gradients in float32 (stage 2: two buckets), n/d of reduced gradients, n/d of main parameters
    for bf16 and fp16, and n/d per entry of the torch optimizer.
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
        name: str = "optimizer",
    ) -> None:
        self.name = name
        self._groups = groups
        self._overlap = overlap
        self._stage = stage
        self._bucket_nbytes = bucket_nbytes
        self._shard_groups = ShardGroups.of(groups, over=over, gather=gather)
        self._names = parameter_names(module)
        listed = read_groups(parameters)
        self._all = [(p, i) for i, group in enumerate(listed) for p in group["params"]]
        check_divisor(divisor, stage=stage, groups=groups, name=name)
        check_sizes(name=name, bucket_nbytes=bucket_nbytes, align_nbytes=align_nbytes)
        for parameter, _ in self._all:
            check_parameter(
                parameter, names=self._names, shard_groups=self._shard_groups, groups=groups
            )
        trained = [parameter for parameter, _ in self._all if parameter.requires_grad]
        check_free(trained, names=self._names)
        plans = plan_buckets(
            trained,
            num_shares=self._shard_groups.num_shares,
            bucket_nbytes=bucket_nbytes,
            align_nbytes=align_nbytes,
        )
        self._agree_on_plans([(p.parameters, p.packing.numel) for p in plans])
        keeps_whole = stage == 1
        with torch.no_grad():
            self._buckets = [
                Bucket(plan, shard_groups=self._shard_groups, keeps_whole=keeps_whole)
                for plan in plans
            ]
        self._copies = [num_copies(b.parameters[0], groups=groups) for b in self._buckets]
        self._runs = self._make_runs()
        self.inner = self._make_inner(listed, make, is_proved=elementwise)
        super().__init__([self.inner])
        self._held = self._hold()
        self._reducer = GradientReducer(
            self._buckets,
            shard_groups=self._shard_groups,
            stage=stage,
            divisor=divisor,
            names=self._names,
            name=name,
        )
        self._is_stale = False
        self._is_closed = False
        self._main_requested = self._main_loaded = False
        self._watch = ParameterWatch(
            module,
            self._buckets,
            names=self._names,
            settle=self._settle,
            after_load=self._after_load,
        )
        for bucket in self._buckets:
            bucket.count_uses()

    # ---- training ----

    @property
    def groups(self) -> ProcessGroups:
        """The communicators in use."""
        return self._groups

    def microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around one microbatch with one backward; the last one reduces beside the backward.

        Every rank goes through the same contexts. Raises ConfigError after the last one.
        """
        self._check_open()
        return self._reducer.microbatch(is_last=is_last)

    def finish_gradients(self) -> None:
        """Reduce what is not reduced yet and wait; `step` calls it.

        Cost: a reduce-scatter per bucket not launched yet, and one all-reduce of a number per
        parameter, by which parameters without a gradient on any rank are found and left alone.
        """
        self._check_open()
        self.synchronize()
        self._watch.check()
        for bucket in self._buckets:
            bucket.check_views([self._names[p] for p in bucket.parameters])
        self._check_frozen()
        self._reducer.finish()

    def gradient_parts(self) -> list[GradientPart]:
        """This rank's shares of the reduced gradients, for `norms.measure`."""
        self.finish_gradients()
        parts = []
        for bucket, copies in zip(self._buckets, self._copies, strict=True):
            filled = sum(run.numel for n in self._numbers(bucket) if (run := bucket.run(n)))
            parts.append(
                GradientPart(
                    local=bucket.gradient,
                    num_copies=copies // self._shard_groups.num_shares,
                    num_padding=bucket.gradient.numel() - filled,
                )
            )
        return parts

    def count_gradients(self) -> tuple[int, int]:
        """On this rank: parameters that got a gradient in this step, and those that could."""
        return len(self._reducer.used), len(self._reducer.parameters)

    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        count_zeros: bool = False,
    ) -> StepOutcome:
        """One step of this optimizer alone; see `take_step`. A closure is refused."""
        refuse_closure(closure)
        return take_step(
            {self.name: self},
            groups=self._groups,
            max_norm=max_norm,
            scaler=scaler,
            count_zeros=count_zeros,
        )

    @torch.no_grad()
    def update(self, factor: float) -> None:
        """Update this rank's shares with its gradients times `factor`; nothing is gathered yet."""
        used = self._reducer.used
        self._reducer.show_gradients()
        for bucket in self._buckets:
            bucket.follow_parameters()
            bucket.count_change()
        for bucket in self._buckets:
            if factor != 1.0:
                bucket.gradient.mul_(factor)
            for number, parameter in enumerate(bucket.parameters):
                run = bucket.run(number)
                if run is None:
                    continue
                piece = self._runs[parameter]
                gradient = bucket.gradient[run.offset : run.offset + run.numel]
                piece.grad = gradient if parameter in used else None
        self.inner.step()
        self._main_requested = self._main_loaded = False

    @torch.no_grad()
    def publish(self) -> None:
        """Start gathering the updated parameters; every rank calls this, whatever happened.

        With overlap a bucket stays in flight where nobody can get at it unnoticed; any other one
        is waited for right here.
        """
        for bucket in reversed(self._buckets):
            bucket.launch_gather()
        num_known = self._count_markers() if self._overlap else []
        for position, bucket in enumerate(self._buckets):
            is_kept = (
                self._overlap
                and self._watch.was_entered(position)
                and bucket.hide(num_other_uses=num_known[position])
            )
            if not is_kept:
                bucket.finish_gather()
        self._watch.begin()

    def drop_gradients(self) -> None:
        """Forget all gradients; `step` calls it."""
        self._reducer.drop()
        for piece in self._runs.values():
            piece.grad = None

    def synchronize(self) -> None:
        """Wait until this rank's parameters are whole and up to date."""
        self._settle()
        for bucket in self._buckets:
            bucket.finish_gather()

    def close(self) -> None:
        """Take all hooks off; parameters stay views of the buckets. Nothing the second time.

        Gradients not used are forgotten, and another optimizer can be built over the parameters.
        """
        if self._is_closed:
            return
        self.synchronize()
        self._is_closed = True
        self.drop_gradients()
        self._reducer.close()
        self._watch.close()

    # ---- state (see `holdfast.state.OptimizerState`) ----

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Every parameter with this rank's run of it."""
        return self._held

    def num_groups(self) -> dict[str, int]:
        """How many parameter groups there are, by this optimizer's name."""
        return {self.name: len(self.param_groups)}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        """Stage, bucket size and group of the shards, by this optimizer's name."""
        return {
            self.name: {
                "type": "parameter_coordinates",
                "stage": self._stage,
                "over": self._shard_groups.over,
                "num_shares": self._shard_groups.num_shares,
                "bucket_nbytes": self._bucket_nbytes,
            }
        }

    def begin_load(self, *, with_main: bool) -> None:
        """A load begins; with main parameters, those are the truth and not the module's."""
        self._main_requested = with_main

    def finish_load(self, *, with_main: bool) -> None:
        """Main parameters were loaded: the model's are rounded from them before their next use."""
        self._main_requested = False
        self._main_loaded = self._is_stale = with_main

    def refresh_main(self) -> None:
        """Take over the model's parameters, after something other than a step changed them."""
        for bucket in self._buckets:
            for number in self._numbers(bucket):
                bucket.refresh_main(number, exactly=True)

    # ---- inside ----

    def _numbers(self, bucket: Bucket) -> range:
        return range(len(bucket.parameters))

    @torch.no_grad()
    def _settle(self) -> None:
        """After a load with main parameters: round and gather them, on all ranks."""
        if self._is_stale:
            self._is_stale = False
            for bucket in reversed(self._buckets):
                bucket.launch_gather()
            for bucket in self._buckets:
                bucket.finish_gather()

    def _agree_on_plans(self, plans: Sequence[tuple[Sequence[nn.Parameter], int]]) -> None:
        """ConfigError on all ranks where the ranks of one group do not build the same buckets."""
        said = [
            ([(self._names[p], list(p.shape), str(p.dtype)) for p in inside], numel)
            for inside, numel in plans
        ]
        mine = json.dumps([self.name, self._shard_groups.over, self._stage, said]).encode()
        layout, control = self._groups.layout, self._groups.control
        theirs = dict(zip(control.ranks, control.all_gather(mine, phase="optimizer"), strict=True))
        others = sorted(layout.group(self._shard_groups.over.removesuffix("_intra"), control.rank))
        odd = [rank for rank in others if theirs[rank] != mine]
        error = None
        if odd:
            error = ConfigError(
                f"optimizer '{self.name}': ranks {odd} have other parameters, stage or buckets "
                f"than rank {control.rank}, though they share {self._shard_groups.over!r}; build "
                f"it alike on all of them"
            )
        control.agree(error, phase="optimizer: buckets")

    def _make_runs(self) -> dict[nn.Parameter, Tensor]:
        """What this rank updates of each parameter: views of the buckets' main parameters."""
        runs = {}
        for bucket in self._buckets:
            for number, parameter in enumerate(bucket.parameters):
                run = bucket.run(number)
                if run is not None:
                    runs[parameter] = bucket.main[run.offset : run.offset + run.numel]
        return runs

    def _make_inner(
        self, listed: Sequence[Mapping[str, Any]], make: MakeOptimizer, *, is_proved: bool
    ) -> torch.optim.Optimizer:
        mine = [
            {**group, "params": [self._runs[p] for p in group["params"] if p in self._runs]}
            for group in listed
        ]
        inner = make([{**group, "params": list(group["params"])} for group in mine])
        check_inner(inner, mine, name=self.name)
        if not is_proved:
            check_kind(inner, name=self.name)
            kinds = [bucket.main for bucket in self._buckets]
            if kinds:
                check_elementwise(make, listed, like=kinds, name=self.name)
        return inner

    def _hold(self) -> list[OptimizerParameter]:
        starts: dict[nn.Parameter, tuple[int, bool]] = {}
        for bucket in self._buckets:
            for number, parameter in enumerate(bucket.parameters):
                run = bucket.run(number)
                if run is not None:
                    starts[parameter] = (run.start, bucket.has_main)
        return [
            OptimizerParameter(
                parameter=parameter,
                group=group,
                optimizer=self.inner,
                updated=self._runs.get(parameter),
                start=starts.get(parameter, (0, False))[0],
                over=self._shard_groups.over,
                is_main=starts.get(parameter, (0, False))[1],
            )
            for parameter, group in self._all
        ]

    def _count_markers(self) -> list[int]:
        """Per bucket, the views of it that earlier saves keep; read after `synchronize` only."""
        home = {p: i for i, bucket in enumerate(self._buckets) for p in bucket.parameters}
        counts = [0] * len(self._buckets)
        for held in self._held:
            if held.parameter in home:
                counts[home[held.parameter]] += len(held.markers)
        return counts

    @torch.no_grad()
    def _after_load(self, buckets: Sequence[Bucket], owner: nn.Module) -> None:
        """Weights were loaded into a module: main parameters follow them.

        Where main parameters were loaded, too, they are kept as far as they round to the weights.
        """
        exactly = not (self._main_requested or self._main_loaded)
        own = set(owner._parameters.values())
        for bucket in buckets:
            for number, parameter in enumerate(bucket.parameters):
                if parameter in own:
                    bucket.refresh_main(number, exactly=exactly)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"optimizer '{self.name}' is closed; build another one")

    def _check_frozen(self) -> None:
        for held in self._held:
            if held.parameter.requires_grad and held.parameter not in self._reducer.parameters:
                raise ConfigError(
                    f"{self._names[held.parameter]} was frozen when optimizer '{self.name}' was "
                    f"built and is trained now; build the optimizer anew"
                )


@contextlib.contextmanager
def microbatch_of(optimizers: Iterable[ShardedOptimizer], *, is_last: bool) -> Iterator[None]:
    """One microbatch of several optimizers."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.microbatch(is_last=is_last))
        yield

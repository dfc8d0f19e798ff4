"""A plain torch optimizer whose gradients something else reduces, in a step of all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import is_
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast._torch import count_writes, local_tensor
from holdfast.arguments import check_choice, check_int
from holdfast.errors import ConfigError
from holdfast.optim import collectives
from holdfast.optim.agreement import Compared, compare_ranks, entry_of
from holdfast.optim.checks import check_kind, refuse_shared
from holdfast.optim.engine import Stepper, parameters_of
from holdfast.optim.left_gradients import LeftGradients
from holdfast.optim.norms import CopyCounts, GradientPart, gradient_parts, scale_gradients
from holdfast.optim.plain_shards import HINTS, PlainShards, Shards
from holdfast.optim.shard_groups import mesh_lines
from holdfast.optim.torch_interface import TorchInterface, refuse_closure
from holdfast.parallel import ProcessGroups
from holdfast.state.optimizer_protocol import OptimizerParameter
from holdfast.state.optimizer_state import UnshardedOptimizer
from holdfast.state.tensor_elements import local_of
from holdfast.state.unfinished import set_worker


class JoinedOptimizer(TorchInterface):
    """Several torch optimizers over different parameters of one model, as one optimizer.

    Its parameter groups and its state are those of all of them, in their order.

    Args:
        optimizers: by name.
        where: start of messages.

    Raises:
        ConfigError: There are none, one is not a torch optimizer, or two have a parameter in
            common.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], *, where: str) -> None:
        self._by_name = dict(optimizers)
        if not self._by_name:
            raise ConfigError(f"{where}: there is no optimizer")
        for name, optimizer in self._by_name.items():
            check_plain(optimizer, where=f"{where}: '{name}'")
        members = {name: parameters_of(each) for name, each in self._by_name.items()}
        refuse_shared(members, where="optimizers")
        super().__init__(list(self._by_name.values()))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all optimizers."""
        refuse_closure(closure)
        for optimizer in self.inners:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zeros, as each of the optimizers does."""
        for optimizer in self.inners:
            optimizer.zero_grad(set_to_none=set_to_none)

    def drop_gradients(self) -> None:
        self.zero_grad()

    # ---- state (see `holdfast.state.OptimizerState`) ----

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        return in_one_numbering(self.inners, [*map(whole_parameters, self.inners)])

    def num_groups(self) -> dict[str, int]:
        return {name: len(each.param_groups) for name, each in self._by_name.items()}

    def sharding_records(self) -> dict[str, dict[str, object]]:
        return {name: {"type": "whole"} for name in self._by_name}

    def synchronize(self) -> None:
        """Nothing is in flight."""

    def begin_load(self, *, with_main: bool) -> None:
        """Nothing to prepare."""

    def finish_load(self, *, with_main: bool) -> None:
        """Nothing to follow up."""


class PlainStepper(Stepper):
    """Steps with a torch optimizer over this rank's parameters as they are.

    Args:
        optimizer: of the parameters.
        groups: the module's communicators.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: ProcessGroups) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._num_compared: list[int] = []
        """Parameters of each group that do not count as new: ranks may have different numbers."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def hyperparameters(self) -> list[dict[str, object]]:
        """Return those of the optimizer, and how many parameters each group has got."""
        counts = [len(group["params"]) for group in self.optimizer.param_groups]
        pairs = zip_longest(counts, self._num_compared[: len(counts)], fillvalue=0)
        added = [{"number of new parameters": count - before} for count, before in pairs]
        settings = super().hyperparameters()
        return [{**each, **more} for each, more in zip(settings, added, strict=True)]

    @torch.no_grad()
    def update(self, factor: float) -> None:
        parameters = self.parameters()
        scale_gradients(parameters, factor)
        self.optimizer.step()
        # An optimizer with foreach=True counts no write to a DTensor.
        count_writes([p for p in parameters if isinstance(p, DTensor) and p.grad is not None])


class ReducedOptimizer(PlainStepper):
    """A plain torch optimizer of one module whose gradients something else reduces.

        optimizer = ReducedOptimizer(torch.optim.AdamW(model.parameters()), groups, reduce=sum_up)
        loss(model(batch)).backward()
        outcome = optimizer.step(max_norm=1.0)

    It steps alone, or as an entry of a `MultiModuleOptimizer`. State and update are whole on every
    rank. After an update that failed on some rank, copies of a parameter may differ between the
    ranks: load the last checkpoint.

    Args:
        optimizer: of the module's parameters on this rank. If there are none, of one group without
            parameters.
        groups: the module's. A plain parameter is the same on all ranks of its pipeline stage,
            unless `shards` has it, which is checked; a DTensor on those that its mesh says, and on
            those that its mesh leaves out.
        reduce: makes gradients equal on all ranks that hold the parameter, once in each step; None
            if that has happened by then. It leaves parameters that no rank used without a gradient,
            or gives them zeros. Or the name of a group (`dp_cp`, `expt_dp`): gradients are added up
            over it, in float32 or wider, and divided by `divisor`.
            `step` calls it: what other code does to `.grad` before that (`clip_grad_norm_`), it
            does to the gradient of this rank alone; clip with `step(max_norm=...)`. It is
            warned of, once; what is done inside of a `microbatch` counts as part of the backward.
        divisor: the sum of gradients over data ranks is divided by it. Of modules on other layouts
            it is compared.
        shards: by axis, plain parameters of which each rank along the axis holds another shard:
            `{"tp": [...]}`; for experts `ep` and `expt_tp`. DTensors are not declared.
        name: for messages, and among the optimizers of a `ChainedOptimizer`.

    Raises:
        ConfigError: On all ranks: `divisor` is not an integer of at least 1, `optimizer` is not a
            torch optimizer, or is one that reduces gradients itself, `shards` does not fit, or
            ranks that hold the same plain parameters have others, or other values. Parameters are
            named if the optimizer was built with `model.named_parameters()`.

    Cost: collective over the layout: one small agreement, and one hash of the plain parameters.
    """

    kind = "ReducedOptimizer"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ProcessGroups,
        *,
        reduce: Callable[[], object] | str | None = None,
        divisor: int = 1,
        shards: Shards | None = None,
        name: str = "optimizer",
    ) -> None:
        self.name = name
        self._divisor = divisor
        self._reduce = reduce
        self._is_reduced = False
        self._left = LeftGradients(name)
        """Not looked at if nothing is to reduce them, or after a warning."""
        self._has_warned = False
        self._turns: list[int] = []
        self._last_used: set[nn.Parameter] | None = None
        """Parameters with a gradient in the last step, for which `reduce` made collectives."""
        failure: Exception | None = None
        entries: list[Compared] = []
        try:
            check_plain(optimizer, where="ReducedOptimizer")
            check_int(divisor, name="ReducedOptimizer: divisor", least=1)
            if isinstance(reduce, str):
                check_choice(reduce, name="ReducedOptimizer: reduce", choices=("dp_cp", "expt_dp"))
                if groups.size(reduce) > 1:
                    groups.require(reduce)
            super().__init__(optimizer, groups)
            self._shards = PlainShards(
                shards, self.parameters(), groups=groups, over=None, who="ReducedOptimizer"
            )
            self._copies = CopyCounts(groups, num_parts=self._shards.num_parts)
            if any(map(self._shards.is_declared, self.parameters())):
                check_kind(optimizer, name=name)
            entries = self._entries()
        except Exception as error:
            failure = error
        _compare(entries, groups, failure=failure)
        self._note_compared()
        self._reduced_before: Sequence[nn.Parameter] = self._compared
        """Parameters of the last reduction, the same on all ranks."""
        # What is saved is the torch optimizer, which does not know of this one.
        set_worker(self, on=optimizer)
        self._step_hook = optimizer.register_step_pre_hook(_Reduction(self))
        self._is_closed = False
        self._watch_gradients()
        self.number = groups.next_number("optimizer")

    def check_reduced(self) -> None:
        """Raise ConfigError if gradients that `reduce` makes equal are those of this rank alone."""
        if self._reduce is not None and not self._is_reduced and self.groups.layout.world_size > 1:
            raise ConfigError(
                f"the torch optimizer of ReducedOptimizer '{self.name}' was stepped by itself, "
                f"before reduce= has made its gradients equal on all ranks, which would part; call "
                f"step() of the ReducedOptimizer"
            )

    def num_new(self) -> int:
        members = self.parameters()
        if _are_same(members, self._compared):
            return 0
        known = {*map(id, self._compared)}
        return sum(id(each) not in known for each in members)

    def compare_new(self) -> None:
        """Compare all parameters again: one of a new head has the values that its rank has drawn.

        Cost: one small agreement, and one hash of the plain parameters.
        """
        _compare(self._entries(), self.groups)
        self._note_compared()

    def _note_compared(self) -> None:
        self._compared = self.parameters()
        self._num_compared = [len(group["params"]) for group in self.optimizer.param_groups]

    def _entries(self) -> list[Compared]:
        """Return what ranks compare of each plain parameter."""
        return [
            entry_of(parameter, over=self._shards.same_over(parameter), name=name)
            for name, parameter in _named(self.optimizer)
            if not isinstance(parameter, DTensor)
        ]

    @property
    def divisor(self) -> int:
        return self._divisor

    def stage_description(self) -> str:
        """Return a digest of whole shapes and dtypes, which are the same on all ranks."""
        looks = [[list(p.shape), str(p.dtype), p.requires_grad] for p in self.parameters()]
        digest = hashlib.blake2b(json.dumps(looks).encode(), digest_size=8).hexdigest()
        return f"{len(looks)} parameters of digest {digest}"

    def sharding_records(self) -> dict[str, dict[str, object]]:
        return {self.name: {"type": "whole"}}

    @contextlib.contextmanager
    def take_microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Do nothing, but note gradients at its end, which only `reduce` is to change."""
        del is_last
        self._warn_of_changes()
        yield
        self._left.note()

    def _watch_gradients(self) -> None:
        """Notice what other code does to gradients between a backward and `reduce`."""
        is_alone = self._reduce is None or self.groups.layout.world_size == 1
        is_off = is_alone or self._has_warned or self._is_closed
        self._left.watch([] if is_off else self.parameters())

    def _warn_of_changes(self) -> None:
        """Warn if gradients were changed after a backward, before they are equal on all ranks."""
        if not self._left.were_changed():
            return
        self._has_warned = True
        self._watch_gradients()
        warnings.warn(
            f"gradients of ReducedOptimizer '{self.name}' were changed after a backward, before "
            f"reduce= has made them equal on all ranks. One factor for all ranks does no harm, but "
            f"a clip (torch.nn.utils.clip_grad_norm_, clip_grad_value_) saw the gradient of this "
            f"rank alone, so training is not that of one process: clip with step(max_norm=...), "
            f"or reduce before, without reduce=",
            RuntimeWarning,
            stacklevel=2,
        )

    def gradient_parts(self) -> list[GradientPart]:
        """Reduce what is in `.grad`, once until `drop_gradients`, and return it.

        A `reduce` that fails on one rank cannot be joined there: the other ranks get the timeout of
        its communicator.
        """
        self._reduce_once()
        self._last_used = {p for p in self.parameters() if p.grad is not None}
        return gradient_parts(self.parameters(), copies=self._copies)

    def take_turn(self) -> None:
        over = self._reduce
        is_alone = over is None or (isinstance(over, str) and self.groups.size(over) == 1)
        if not is_alone and not self._is_reduced:
            self._turns.append(self.groups.next_number("reduction"))

    def turns(self) -> list[int]:
        return self._turns

    def _reduce_once(self) -> None:
        if self._is_reduced:
            return
        self._warn_of_changes()
        self._is_reduced = True  # before it: a call that failed cannot be joined by another
        if isinstance(self._reduce, str):
            self._add_up(self._reduce)
        elif self._reduce is not None:
            self._reduce()

    @torch.no_grad()
    def _add_up(self, over: str) -> None:
        """Average gradients over data ranks, of the parameters that some of them used.

        Cost: an all-reduce of a number per parameter, and one of each gradient.
        """
        group = self.groups.group(over) if self.groups.size(over) > 1 else None
        # What is frozen may have a gradient from before, which the optimizer uses.
        members = self.parameters()
        counts = self._count_used(members, group)
        sums: list[tuple[Tensor, Tensor, collectives.Pending | None]] = []
        for parameter, count in zip(members, counts, strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()  # ranks have used other rows
            grad = parameter.grad
            local = local_tensor(grad) if isinstance(grad, DTensor) else grad
            wide = local.to(torch.promote_types(local.dtype, torch.float32))
            wide = wide.resolve_conj().contiguous()
            sent = torch.view_as_real(wide) if wide.is_complex() else wide
            work = None if group is None else collectives.all_reduce(sent, group)
            sums.append((local, wide, work))
        for local, wide, work in sums:
            if work is not None:
                collectives.wait(work, f"the reduction of gradients over {over!r}")
            local.copy_(wide.div_(self._divisor))

    def _count_used(
        self, members: Sequence[nn.Parameter], group: dist.ProcessGroup | None
    ) -> list[int]:
        """Return on how many ranks each parameter has a gradient.

        Ranks send as many numbers, whatever parameters their optimizers have got or lost.

        Raises:
            ConfigError: On all ranks of the group: that is not the same on all of them.
        """
        what = "the exchange of used parameters"
        before = self._reduced_before
        is_same = _are_same(members, before)
        flags = [p.grad is not None for p in before]
        changes = _NO_CHANGE if is_same or group is None else _change(members)
        counts = collectives.count_ranks([*flags, *changes], group, what=what)
        if group is None or not any(counts[len(before) :]):
            return counts[: len(before)] if is_same else [p.grad is not None for p in members]
        if any(0 < count < group.size() for count in counts[len(before) :]):
            raise ConfigError(
                f"ReducedOptimizer '{self.name}': parameters were added to the torch optimizer, or "
                f"taken out of it, which has {len(members)} on rank {self.groups.rank}, and not "
                f"the same on all ranks (add_param_group and changes of param_groups are made on "
                f"all ranks)"
            )
        self._reduced_before = members
        return collectives.count_ranks([p.grad is not None for p in members], group, what=what)

    def _refuse_copy(self, *_: object) -> NoReturn:
        raise ConfigError(
            "a ReducedOptimizer belongs to process groups and cannot be copied or pickled; copy "
            "the model and the torch optimizer inside together, copy.deepcopy((model, "
            "optimizer.optimizer)), and build another ReducedOptimizer of the copy to train it"
        )

    __getstate__ = __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy

    # ---- state, as an entry of a `ChainedOptimizer` ----

    def optimizer_parameters(self) -> Sequence[OptimizerParameter]:
        """Return every parameter, held whole."""
        return whole_parameters(self.optimizer)

    def num_groups(self) -> dict[str, int]:
        """Return the number of parameter groups, by this optimizer's name."""
        return {self.name: len(self.optimizer.param_groups)}

    def join_reductions(self) -> None:
        """Call `reduce` as the other ranks do, after an error in a microbatch of this one.

        It sees a gradient for the same parameters as in the last step, so that one that leaves out
        parameters without a gradient makes the same collectives.
        """
        if callable(self._reduce) and not self._is_reduced:
            for parameter in self.parameters():
                is_used = self._last_used is None or parameter in self._last_used
                if parameter.requires_grad and parameter.grad is None and is_used:
                    parameter.grad = torch.zeros_like(parameter)
        self._reduce_once()

    def usage(self) -> tuple[int, int]:
        trained = [p for p in self.parameters() if p.requires_grad]
        return sum(p.grad is not None for p in trained), len(trained)

    def exchange_used(self) -> None:
        """Check that each gradient is on all ranks of its parameter's data axis, or on none.

        Ranks of `dp_cp` hold different experts, and one that no token was sent to has no gradient;
        copies of an expert are along `expt_dp`.

        Raises:
            ConfigError: On all ranks of a data axis, for a gradient that only some of them have.

        Cost: an all-reduce of one number per parameter over `dp_cp`, and over `expt_dp` if there
            are experts.
        """
        by_axis: dict[str, list[nn.Parameter]] = {"dp_cp": [], "expt_dp": []}
        for parameter in self.parameters():
            by_axis[_data_axis(parameter, self._shards)].append(parameter)
        error: ConfigError | None = None
        for over, members in by_axis.items():
            if not members or self.groups.size(over) == 1:
                continue
            counts = collectives.count_ranks(
                [p.grad is not None for p in members],
                self.groups.group(over),
                what="the exchange of used parameters",
            )
            for parameter, count in zip(members, counts, strict=True):
                if 0 < count < self.groups.size(over) and error is None:
                    error = ConfigError(
                        f"a parameter of shape {list(parameter.shape)} has a gradient on {count} "
                        f"of the {self.groups.size(over)} ranks of {over!r}, so it is not "
                        f"reduced; reduce gradients before the step, or with reduce="
                    )
        if error is not None:  # only now: ranks of the other axis wait for this one
            raise error

    def drop_gradients(self) -> None:
        self.tell_others()
        self._is_interrupted = False
        self.optimizer.zero_grad(set_to_none=True)
        self._is_reduced = False
        self._turns = []
        self._left.forget()
        self._watch_gradients()  # some may be new, or trained from now on

    def check_ended(self) -> None:
        if self._is_closed:
            raise ConfigError(f"ReducedOptimizer '{self.name}' is closed; build another one")
        super().check_ended()

    def close(self) -> None:
        """Remove all hooks: another optimizer may step the torch optimizer, or it may by itself."""
        self._is_closed = True
        self._step_hook.remove()
        self._left.watch([])

    def unfinished_work(self) -> str | None:
        if self._is_interrupted or not self._is_reduced:
            return super().unfinished_work()
        return (
            "ReducedOptimizer holds gradients that are reduced and that no step has used; call "
            "step() first, or forget them with drop_gradients() on all ranks"
        )


def _compare(
    entries: Sequence[Compared], groups: ProcessGroups, *, failure: Exception | None = None
) -> None:
    compare_ranks(
        entries,
        groups,
        who="ReducedOptimizer",
        phase="ReducedOptimizer",
        settings="",
        hints=HINTS,
        failure=failure,
    )


class _Reduction:
    """A hook of a torch optimizer, which asks the `ReducedOptimizer` around it before a step."""

    def __init__(self, around: ReducedOptimizer) -> None:
        self._around = weakref.ref(around)

    def __call__(self, *_: object) -> None:
        around = self._around()
        if around is not None:
            around.check_reduced()


def _are_same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    """Return True if these are the same parameters, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


_NO_CHANGE = (False,) * 32


def _change(members: Sequence[nn.Parameter]) -> list[bool]:
    """Return a digest of shapes and dtypes, bit by bit, of which the first is set."""
    looks = [[list(local_of(p).shape), str(p.dtype)] for p in members]
    digest = hashlib.blake2b(json.dumps(looks).encode(), digest_size=4).digest()
    bits = [bool(int.from_bytes(digest) >> i & 1) for i in range(len(_NO_CHANGE))]
    return [True, *bits[1:]]


def check_plain(optimizer: object, *, where: str) -> None:
    """Raise ConfigError unless it is a torch optimizer that leaves gradients to others."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, TorchInterface):
        raise ConfigError(
            f"{where}: a {type(optimizer).__name__} is not a plain torch optimizer; a "
            f"sharded or chained one needs no wrapper, alone or in a MultiModuleOptimizer"
        )


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[OptimizerParameter]:
    """Return each parameter of a plain optimizer, held whole."""
    return list(UnshardedOptimizer(optimizer).optimizer_parameters())


def in_one_numbering(
    optimizers: Sequence[torch.optim.Optimizer], members: Sequence[Sequence[OptimizerParameter]]
) -> list[OptimizerParameter]:
    """Return the members of several optimizers, with groups numbered from the first one's on.

    Made when it is needed: a plain optimizer may get another group at any time.
    """
    numbered: list[OptimizerParameter] = []
    first = 0
    for optimizer, own in zip(optimizers, members, strict=True):
        numbered += [replace(member, group=member.group + first) for member in own]
        first += len(optimizer.param_groups)
    return numbered


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names, which are places in the groups if torch has no names."""
    for number, group in enumerate(optimizer.param_groups):
        members, names = group["params"], group.get("param_names", ())
        if len(names) != len(members):  # some were added to the list, or taken out of it
            names = [f"{i} of group {number}" for i in range(len(members))]
        yield from zip(names, members, strict=True)


def _data_axis(parameter: nn.Parameter, shards: PlainShards) -> str:
    """Return the group of ranks whose gradients of a parameter are added up.

    One that is cut along `ep` or `expt_tp` is an expert: its copies are along `expt_dp`.
    """
    if isinstance(parameter, DTensor):
        cut = {dim for dim, placement, _ in mesh_lines(parameter) if not placement.is_replicate()}
    else:
        cut = set(shards.axes(parameter))
    return "dp_cp" if cut.isdisjoint(("ep", "expt_tp")) else "expt_dp"

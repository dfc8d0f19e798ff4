"""Moves gradients from autograd into buckets, and from buckets into shares."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, KeysView, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from holdfast.errors import ConfigError
from holdfast.optim import collectives
from holdfast.optim.buckets import Bucket
from holdfast.optim.in_flight import (
    GradientHook,
    bucketed_class,
    change_class,
    forget_gradient,
    gradient_of,
)
from holdfast.optim.shard_groups import ShardGroups

Stage = Literal[1, 2]
_MAX_IN_FLIGHT = 2
"""Whole gradient buckets under reduction at a time in stage 2, which bounds its memory."""


_MACHINERY = ("torch._", "torch.distributed.pipelining")
"""Modules that check whether `.grad` is None and work either way: compilers, schedules."""


class GradientReducer:
    """Takes the gradient of each parameter as backward makes it, and reduces full buckets.

    Buckets are launched in their order, never out of it, so that all ranks make the same
    collectives whatever order their gradients come in. One *round* reduces every bucket once.
    Stage 1 makes one round a step, stage 2 one a microbatch.

    Args:
        buckets: hold the parameters, in the order in which they are reduced.
        shard_groups: over which communicators.
        stage: 1 or 2, see `ShardedOptimizer`.
        divisor: what the sum of gradients is divided by.
        names: of the parameters, for messages.
        name: the optimizer's.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        shard_groups: ShardGroups,
        stage: Stage,
        divisor: int,
        names: dict[nn.Parameter, str],
        name: str,
    ) -> None:
        self._buckets = buckets
        self._shard_groups = shard_groups
        self._stage = stage
        self._divisor = divisor
        self._names = names
        self._location = {
            parameter: (position, number)
            for position, bucket in enumerate(buckets)
            for number, parameter in enumerate(bucket.parameters)
        }
        self._used: set[nn.Parameter] = set()
        self._next = 0
        self._arrived_parameters: list[set[nn.Parameter]] = [set() for _ in buckets]
        self._is_eager = False
        self._is_inside = False
        self._is_reduced = False
        self._is_finished = False
        self._handles: list[RemovableHandle] = [
            cast("Any", parameter).register_post_accumulate_grad_hook(
                GradientHook(
                    name,
                    self._on_gradient,
                    on_read=self._gradient_read,
                    on_clear=self._gradient_forgotten,
                )
            )
            for parameter in self._location
        ]
        self._bucketed: dict[nn.Parameter, type[Tensor]] = {}
        self._has_warned = False

    @property
    def parameters(self) -> KeysView[nn.Parameter]:
        """All parameters whose gradients are taken."""
        return self._location.keys()

    @property
    def used(self) -> frozenset[nn.Parameter]:
        """After `finish`: the parameters that got a gradient on any rank that shares them."""
        return frozenset(self._used)

    def close(self) -> None:
        """Take the hooks off, and forget gradients not used."""
        self.drop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Around the backward of one microbatch, see `ShardedOptimizer.microbatch`."""
        if self._is_inside:
            raise ConfigError(
                "microbatch(...) inside of microbatch(...): leave the first one first"
            )
        if self._is_reduced:
            raise ConfigError(
                "a microbatch after the last one of this step: its gradients would be lost; call "
                "step() or drop_gradients() first"
            )
        self._is_eager = is_last or self._stage == 2
        self._is_inside = True
        self._arrived_parameters = [set() for _ in self._buckets]
        try:
            yield
            if self._is_eager:
                with torch.no_grad():
                    self._finish_round()
                self._is_reduced = is_last
            if is_last:
                for parameter in self._location:
                    self._mark_bucketed(parameter)
        finally:
            self._is_eager = self._is_inside = False

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce what is not reduced yet and wait: shares hold the averaged gradients then.

        Nothing happens the second time in a step. Every rank makes the same calls.

        Cost: a reduce-scatter per bucket not launched yet, an all-reduce of one number per
        parameter, and with hybrid sharding or tied stages an all-reduce per bucket.
        """
        if self._is_inside:
            raise ConfigError(
                "step() inside of microbatch(...), where gradients are still taken: leave the "
                "context first"
            )
        if self._is_finished:
            return
        if not self._is_reduced:
            self._finish_round()
        self._is_reduced = True
        for parameter in self._location:
            if gradient_of(parameter) is not None:
                self._take(parameter)  # raises: its bucket has been reduced
        for bucket in self._buckets:
            bucket.finish_reduction()
        self._agree_on_used()
        self._sum_between()
        if self._divisor != 1:
            for bucket in self._buckets:
                bucket.gradient.div_(self._divisor)
        self._is_finished = True

    def drop(self) -> None:
        """Forget all gradients: the next step begins."""
        for bucket in self._buckets:
            bucket.drop_gradients()
        self.show_gradients()
        for parameter in self._location:
            forget_gradient(parameter)
        self._used.clear()
        self._next = 0
        self._is_reduced = self._is_finished = False

    def show_gradients(self) -> None:
        """Reading `.grad` is harmless from here on."""
        for parameter, kind in self._bucketed.items():
            change_class(parameter, kind)
        self._bucketed.clear()
        self._has_warned = False

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Autograd's hook: move the gradient into its bucket, and empty `.grad`."""
        if not isinstance(parameter, nn.Parameter) or gradient_of(parameter) is None:
            return
        position = self._take(parameter)
        self._mark_bucketed(parameter)
        if self._is_eager:
            self._arrived_parameters[position].add(parameter)
            while self._next < len(self._buckets) and self._is_full(self._next):
                self._launch_next()

    def _is_full(self, position: int) -> bool:
        """Whether every parameter of a bucket has got its gradient of this microbatch."""
        return len(self._arrived_parameters[position]) == len(self._buckets[position].parameters)

    def _take(self, parameter: nn.Parameter) -> int:
        """Move a gradient into its bucket; the bucket's position."""
        position, number = self._location[parameter]
        if self._is_reduced or position < self._next:
            raise ConfigError(
                f"{self._names[parameter]}: a gradient came after its bucket was reduced, and "
                f"would be lost. Make one backward call in each microbatch(...), mark only the "
                f"last one is_last=True, and step() before the next. (A model in "
                f"DistributedDataParallel is reduced twice: take it out, the sharded optimizer "
                f"reduces gradients itself)"
            )
        gradient = gradient_of(parameter)
        forget_gradient(parameter)
        if gradient is not None:
            self._used.add(parameter)
            self._buckets[position].add_gradient(number, self._local(parameter, gradient))
        return position

    def _local(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """This rank's own gradient, placed like the parameter but for what the reduction adds up.

        Autograd may produce another placement than the parameter's (a sum not yet reduced over
        tensor ranks, or a whole where the parameter is split); it is redistributed here.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        if not isinstance(parameter, DTensor):
            return gradient.full_tensor()
        mesh = parameter.device_mesh
        pairs = zip(gradient.placements, parameter.placements, strict=True)
        placements = [
            of_gradient if self._adds_up(mesh, dim) else of_parameter
            for dim, (of_gradient, of_parameter) in enumerate(pairs)
        ]
        if placements != list(gradient.placements):
            gradient = gradient.redistribute(placements=placements)
        return gradient.to_local()

    def _adds_up(self, mesh: DeviceMesh, dim: int) -> bool:
        """Whether the reduction, not autograd, adds gradients up along a dim of a mesh."""
        names = mesh.mesh_dim_names or ()
        if names and names[dim] in ("embd", self._shard_groups.over):
            return True
        along = mesh.get_group(dim)
        return set(dist.get_process_group_ranks(along)) <= self._shard_groups.data_ranks

    def _mark_bucketed(self, parameter: nn.Parameter) -> None:
        """From here to the end of the step, reading `.grad` is an error or a warning.

        It is None there, as if backward had found no gradient: torch's `clip_grad_norm_` would
        return 0 and clip nothing. Parameters of classes of their own are left as they are.
        """
        self._buckets[self._location[parameter][0]].finish_gather()
        kind = bucketed_class(type(parameter))
        if kind is not None:
            self._bucketed[parameter] = type(parameter)
            change_class(parameter, kind)

    def _gradient_read(self, parameter: Tensor) -> None:
        """Before `.grad` of a marked parameter is read.

        Outside of `microbatch` more may come into `.grad`, put there by a schedule that looks
        first: there it is a warning, once a step.
        """
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        if caller.startswith(_MACHINERY):
            return
        if self._is_reduced or self._is_inside:
            raise ConfigError(self._where_gradients_are(parameter))
        if gradient_of(cast("nn.Parameter", parameter)) is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(self._where_gradients_are(parameter), RuntimeWarning, stacklevel=3)

    def _gradient_forgotten(self, parameter: Tensor) -> None:
        """Before `.grad` of a marked parameter is set to None, which would forget nothing."""
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        if not caller.startswith(_MACHINERY):
            raise ConfigError(self._where_gradients_are(parameter))

    def _where_gradients_are(self, parameter: Tensor) -> str:
        name = self._names[cast("nn.Parameter", parameter)]
        return (
            f"{name}: its gradient is in the sharded optimizer's buckets, .grad is None; functions "
            f"that read .grad (torch.nn.utils.clip_grad_norm_, norms for logs) would find nothing. "
            f"Clip with step(max_norm=...), which returns the norm; forget gradients with "
            f"zero_grad() of the optimizer"
        )

    def _finish_round(self) -> None:
        """Launch every bucket not launched yet, with what lies in `.grad`, in order."""
        for parameter in self._location:
            if gradient_of(parameter) is not None:
                self._take(parameter)
        while self._next < len(self._buckets):
            self._launch_next()
        self._next = 0

    def _launch_next(self) -> None:
        if self._stage == 2 and self._next >= _MAX_IN_FLIGHT:
            self._buckets[self._next - _MAX_IN_FLIGHT].finish_reduction()
        self._buckets[self._next].launch_reduction()
        self._next += 1

    def _sum_between(self) -> None:
        """Add shares up over the groups that hold the same ones: hybrid slices, tied stages."""
        filled = [bucket for bucket in self._buckets if bucket.gradient.numel()]
        tied = [bucket for bucket in filled if bucket.is_tied]
        for group, buckets, what in (
            (self._shard_groups.between, filled, "between hybrid slices"),
            (self._shard_groups.tied, tied, "of a tied embedding"),
        ):
            if group is not None:
                works = [collectives.all_reduce(bucket.gradient, group) for bucket in buckets]
                for work in works:
                    collectives.wait(work, f"the reduction of gradients {what}")

    def _agree_on_used(self) -> None:
        """Find the parameters that got a gradient on any rank; the others are left alone."""
        flags = torch.tensor([float(p in self._used) for p in self._location])
        is_tied = [self._buckets[position].is_tied for position, _ in self._location.values()]
        for group in (self._shard_groups.reduce, self._shard_groups.between):
            if group is not None and len(flags):
                flags = flags.to(collectives.flag_device(group))
                collectives.wait(
                    collectives.all_reduce(flags, group), "the exchange of used parameters"
                )
        if self._shard_groups.tied is not None and any(is_tied):
            chosen = torch.tensor(is_tied)
            tied = flags[chosen].to(collectives.flag_device(self._shard_groups.tied))
            collectives.wait(
                collectives.all_reduce(tied, self._shard_groups.tied),
                "the exchange of tied parameters",
            )
            flags = flags.cpu()
            flags[chosen] = tied.cpu()
        pairs = zip(self._location, flags.tolist(), strict=True)
        self._used = {parameter for parameter, flag in pairs if flag > 0}

"""A bridge: sends the output of one module to the module that takes it as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from holdfast.bridge.bridge_plan import BridgePlan
from holdfast.bridge.bridged import Bridged
from holdfast.bridge.crossing import Crossing, Packed
from holdfast.bridge.header import Given, Header, check_headers, checked_counts, describe_given
from holdfast.bridge.route import Route
from holdfast.errors import ConfigError
from holdfast.parallel.groups.module_groups import ModuleGroups


class Bridge:
    """Sends activations from one module to another, and their gradients back.

        bridge = Bridge(groups, "vision", "language")
        bridged = bridge(tokens, counts)  # on all ranks of both modules
        (loss + bridged.anchor).backward()

    Samples of a step are in order, and data rank i of n has the i-th contiguous block of them, in
    both modules. So a source with more data ranks is concatenated, one with fewer is cut.

    *Who holds what.* Ranks with the source's last pipeline stage hold the packed tokens of their
    data rank, equal on tp and cp replicas; all of them get the gradient. Ranks with the
    destination's first stage get the tokens of their data rank, every tp and cp rank all of them.
    There, gradients are equal on tp ranks (one is taken), and each cp rank has only the share of
    its own positions (they are added). Other ranks hold nothing, and take part in agreements.

    Every rank of both modules calls the bridge once for each forward, and runs its backward once,
    in the same order as all others; several forwards may come before their backwards. Where a
    rank has several bridges, all ranks call these in one order, that of the data flow. One bridge
    for each edge.

    Args:
        groups: the communicators of all modules.
        source: the module that gives activations.
        destination: the module that takes them; the edge is one of the layouts'.
        device: where tokens arrive, which is where the edge's communicator takes tensors; by
            default the current CUDA device for NCCL, and the CPU otherwise.

    Raises:
        GroupError: There is no such edge, or this rank has neither module.

    Cost: of a forward, one agreement over the ranks of the edge, and two messages (tokens; counts)
    to each destination rank of the first stage and from each source data rank that it takes from.
    Of a backward, one agreement, and a message to each source rank of the last stage from each
    destination data rank and cp coordinate that it gave to. A rank copies what it gives to itself.
    Bytes are those of the tokens once for each such pair. Both return when this rank's messages
    have arrived, and no later use of memory waits for them.
    """

    __slots__ = ("_crossings", "_num_forwards", "_route")

    def __init__(
        self,
        groups: ModuleGroups,
        source: str,
        destination: str,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        """Plan all messages; see the class."""
        of_edge = groups.edge(source, destination)
        is_nccl = of_edge.has("dp") and "nccl" in str(dist.get_backend(of_edge.group("dp")))
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu"
        self._route = Route.of(
            BridgePlan(groups.layouts[source], groups.layouts[destination]),
            of_edge,
            edge=(source, destination),
            device=torch.device(device),
        )
        self._num_forwards = 0
        self._crossings = groups.crossings
        self._crossings.add_bridge((source, destination))
        if is_nccl:
            # NCCL connects at the first use, which has to be one of all ranks of the group.
            dist.all_reduce(torch.zeros(1, device=device), group=of_edge.group("dp"))

    def __call__(
        self, tokens: Tensor | None = None, counts: Sequence[int] | Tensor | None = None
    ) -> Bridged:
        """Exchange the activations of one forward; called by all ranks of both modules.

        Args:
            tokens: (sum(counts), *features), of one of float64, float32, bfloat16 and float16: the
                packed tokens of this source data rank's samples, on ranks with the source's last
                pipeline stage; None elsewhere. Need not be contiguous.
            counts: the tokens of each of these samples, 0 included; None elsewhere.

        Returns:
            On ranks with the destination's first stage the tokens of its samples; everywhere the
            anchor of the backward.

        Raises:
            ConfigError: Arguments of some rank are wrong or do not fit those of others (numbers of
                tokens, samples that cannot be shared out, dtype, features, autograd); on all ranks
                of the edge, naming rank and module.
            GroupError: Ranks of the edge are in different forwards or backwards; on all of them.
            DeadlineError: A rank did not arrive, or its messages did not; it is named.
        """
        route, number = self._route, self._num_forwards + 1
        control = route.groups.control
        failure: Exception | None = None
        packed, payload = None, b""
        try:
            packed, given = self._packed(tokens, counts)
            payload = Header(has_gradients=torch.is_grad_enabled(), given=given).encode()
        except Exception as error:
            failure = error
        with self._crossings.calling(route.edge):
            with control.in_step():
                rows = control.agree(failure, phase=route.phase("forward", number), payload=payload)
            self._num_forwards = number  # a forward that failed before this is counted on no rank
            headers = {r: Header.decode(row) for r, row in zip(control.ranks, rows, strict=True)}
            crossing = Crossing(
                route, check_headers(headers, route.plan, edge=route.edge), number=number
            )
            with route.agreed(direction="forward", number=number):
                return self._cross(crossing, packed)

    def unfinished_work(self) -> str | None:
        """Return a sentence on the forwards that wait for their backward; None if none do."""
        return self._crossings.unfinished_work(self._route.edge)

    def _cross(self, crossing: Crossing, packed: Packed | None) -> Bridged:
        """Exchange the activations, under autograd if a backward will be needed."""
        taken: Packed | None
        if crossing.needs_backward:
            # Autograd calls the backward of a function that has an input which needs a gradient:
            # this one, on ranks that give nothing.
            hook = torch.zeros((), device=crossing.device, requires_grad=True)
            counts = None if packed is None else packed.counts
            values = None if packed is None else packed.tokens
            anchor, *outputs = _Exchange.apply(crossing, hook, values, counts)  # type: ignore[no-untyped-call]
            crossing.open(self._crossings)
            taken = Packed(*outputs) if outputs else None
        else:
            if packed is not None:
                packed = packed._replace(tokens=packed.tokens.detach())
            taken = crossing.send_tokens(packed)
            needs = not torch.is_inference_mode_enabled()
            anchor = torch.zeros((), device=self._route.device, requires_grad=needs)
        return Bridged(
            tokens=None if taken is None else taken.tokens,
            counts=None if taken is None else taken.counts.cpu(),
            anchor=anchor,
            crossing=crossing,
        )

    def _packed(
        self, tokens: Tensor | None, counts: Sequence[int] | Tensor | None
    ) -> tuple[Packed | None, Given | None]:
        """Return the samples that this rank gives, and their description; check the arguments."""
        route = self._route
        source, destination = route.edge
        where = f"Module {source!r} on rank {route.rank}"
        if route.source_dp is None:
            if tokens is not None or counts is not None:
                raise ConfigError(
                    f"{where}: the bridge to {destination!r} got tokens or counts, but this rank "
                    f"does not have the last pipeline stage of {source!r}: call it without."
                )
            return None, None
        if not isinstance(tokens, Tensor) or counts is None:
            raise ConfigError(
                f"{where}: this rank has the last pipeline stage, so the bridge to "
                f"{destination!r} needs its tokens (a tensor) and counts (tokens of each sample); "
                f"got {type(tokens).__name__} and {type(counts).__name__}. Without any tokens, "
                f"give an empty tensor of shape (0, *features) and a count of 0 for each sample."
            )
        if isinstance(tokens, DTensor) or tokens.layout is not torch.strided:
            raise ConfigError(
                f"{where}: tokens are a {type(tokens).__name__} of layout {tokens.layout}; the "
                f"bridge to {destination!r} takes plain dense tensors, whole on each rank: "
                f"full_tensor() of a DTensor, to_dense() of others."
            )
        if tokens.device.type != route.device.type and route.groups.has("dp"):
            raise ConfigError(
                f"{where}: tokens are on {tokens.device}, but the communicator of the edge to "
                f"{destination!r} takes tensors on {route.device}."
            )
        numbers = checked_counts(counts, where=where)
        given = describe_given(
            tokens,
            numbers,
            num_parts=route.plan.num_parts,
            destination=destination,
            where=where,
        )
        return Packed(tokens, torch.tensor(numbers, dtype=torch.int64, device=route.device)), given


class _Exchange(torch.autograd.Function):
    """The exchange of activations whose backward is the exchange of gradients."""

    @staticmethod
    def forward(
        ctx: Any, crossing: Crossing, hook: Tensor, tokens: Tensor | None, counts: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return the anchor and, if this rank is a destination, its tokens and counts."""
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        own = None if tokens is None or counts is None else Packed(tokens, counts)
        taken = crossing.send_tokens(own)
        anchor = torch.zeros((), device=crossing.device)
        if taken is None:
            return (anchor,)
        ctx.mark_non_differentiable(taken.counts)
        return anchor, taken.tokens, taken.counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        """The gradient of the tokens which this rank gave."""
        with ctx.crossing.calling():
            return None, None, ctx.crossing.send_gradient(next(iter(gradients), None)), None

"""One forward of a bridge on one rank, and the backward that belongs to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.bridge.header import DTYPES, Given
from holdfast.bridge.parcels import Parcel
from holdfast.bridge.route import Route
from holdfast.errors import GroupError, HoldfastError, shorten_ranks
from holdfast.parallel.groups.crossings import Crossings

_TOKENS_TAG, _COUNTS_TAG = 0, 1


class Span(NamedTuple):
    """The place of a piece in a data rank's samples: a run of tokens, and one of samples."""

    first_token: int
    num_tokens: int
    first_sample: int
    num_samples: int


class Packed(NamedTuple):
    """Samples one after another."""

    tokens: Tensor
    """(number of tokens, *features)."""
    counts: Tensor
    """int64, tokens of each sample, on the communicator's device."""

    def cut(self, span: Span) -> Packed:
        """Return views of some of the samples."""
        return Packed(
            self.tokens.narrow(0, span.first_token, span.num_tokens),
            self.counts.narrow(0, span.first_sample, span.num_samples),
        )

    def copy(self) -> Packed:
        """Return the samples in memory of their own."""
        return Packed(self.tokens.clone(memory_format=torch.contiguous_format), self.counts.clone())

    def parcels(self, rank: int) -> list[Parcel]:
        """Return the two messages to, or from, a rank."""
        return [Parcel(self.tokens, rank, _TOKENS_TAG), Parcel(self.counts, rank, _COUNTS_TAG)]


class Crossing:
    """One forward, kept for its backward: the sizes of all pieces, and no tensors.

    Phase 1, `send_tokens`: activations go from the source to the destination. Phase 2,
    `send_gradient`: all ranks of the edge agree on the ranks that have a gradient, and gradients go
    back along the same pieces.

    Args:
        route: this rank's share of the edge.
        given: the samples of each rank with the source's last stage.
        number: number of this forward, counted from 1, the same on all ranks.
    """

    def __init__(self, route: Route, given: Mapping[int, Given], *, number: int) -> None:
        self.failure: HoldfastError | None = None
        """Set if this rank cannot take part in the backward, which then fails on all ranks."""
        self.needs_backward = any(each.needs_gradient for each in given.values())
        """True if there is a backward; the same on all ranks."""
        self._route = route
        self._number = number
        self._crossings: Crossings | None = None
        self._number_open = 0
        some = next(iter(given.values()))
        self._dtype, self._features = DTYPES[some.dtype], some.features
        self._takes_gradient = route.rank in given and given[route.rank].needs_gradient
        self._gradients = [m for m in route.gradients if given[m.taker].needs_gradient]
        plan = route.plan
        self._at_source: dict[int, Span] = {}
        """Place of each piece in the samples that this rank gives."""
        self._at_destination: dict[int, Span] = {}
        """Place of each piece in the samples that this rank takes."""
        if route.source_dp is not None:
            self._at_source = self._spans(plan.pieces_of_source(route.source_dp), given)
        if route.destination_dp is not None:
            pieces = plan.pieces_of_destination(route.destination_dp)
            self._at_destination = self._spans(pieces, given)

    @property
    def device(self) -> torch.device:
        """The device on which tokens and gradients arrive."""
        return self._route.device

    def open(self, crossings: Crossings) -> None:
        """Count as open until the backward is over."""
        self._crossings, self._number_open = crossings, crossings.open(self._route.edge)

    def calling(self) -> AbstractContextManager[None]:
        """Enter around the backward, so that it is known whether it has failed."""
        assert self._crossings is not None
        return self._crossings.calling(self._route.edge)

    def describe_destination(self) -> str:
        """Return destination and rank, for messages."""
        return f"Module {self._route.edge[1]!r} on rank {self._route.rank}"

    def send_tokens(self, own: Packed | None) -> Packed | None:
        """Exchange activations, and return the samples that this rank takes.

        Args:
            own: the samples that this rank gives, detached; None if it gives none.

        Cost: two messages to each taker (tokens; counts), and memory for the samples taken.
        """
        rank = self._route.rank
        taken = [m for m in self._route.activations if m.taker == rank]
        if own is not None and [m.giver for m in taken] == [rank]:
            # The module may change its tokens, as if they had come from another rank.
            target: Packed | None = own.cut(self._at_source[taken[0].piece]).copy()
            taken = []
        else:
            target = self._allocate() if taken else None
        # Parcels are listed in the order of the plan on every rank: messages between two ranks are
        # matched by their order.
        leaving: list[Parcel] = []
        arriving: list[Parcel] = []
        for message in self._route.activations:
            if own is not None and message.giver == rank and message.taker != rank:
                piece = own.cut(self._at_source[message.piece])
                piece = piece._replace(tokens=piece.tokens.contiguous())
                leaving += piece.parcels(message.taker)
        for message in taken:
            assert target is not None
            room = target.cut(self._at_destination[message.piece])
            if message.giver != rank:
                arriving += room.parcels(message.giver)
            elif own is not None:
                piece = own.cut(self._at_source[message.piece])
                room.tokens.copy_(piece.tokens)
                room.counts.copy_(piece.counts)
        self._route.exchange(leaving, arriving, direction="forward", number=self._number)
        return target

    def send_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Exchange gradients, and return that of the tokens which this rank gave.

        Collective over the edge; ranks without tokens call it too.

        Args:
            gradient: of the tokens that this rank took, in their shape; None if none was used.

        Returns:
            (tokens given, *features); None if this rank gave none, or needs no gradient, or if no
            rank has one of any token: then the source got none, as in one process, and is not
            updated by zeros. Zeros if its earlier pipeline stages wait for a gradient.

        Raises:
            HoldfastError: Some rank has a `failure`; on all ranks.
            GroupError: Ranks are in another backward or forward, or only some tp replicas of the
                destination have a gradient; on all ranks.
            DeadlineError: A rank did not answer; it is named.

        Cost: one agreement, and one message of a piece to each taker.
        """
        if gradient is not None and gradient.layout is not torch.strided:
            gradient = gradient.to_dense()  # of an embedding with sparse=True of the tokens
        givers = self._agree_backward(gradient)
        with self._route.agreed(direction="backward", number=self._number):
            return self._exchange_gradients(gradient, givers)

    def _exchange_gradients(self, gradient: Tensor | None, givers: set[int]) -> Tensor | None:
        """Return the gradient of what this rank gave; `givers` have one of what they took."""
        rank = self._route.rank
        shares: dict[int, list[Tensor]] = {piece: [] for piece in self._at_source}
        leaving: list[Parcel] = []
        arriving: list[Parcel] = []
        for message in self._gradients:
            if message.giver not in givers:
                continue
            if message.giver == rank:
                assert gradient is not None
                span = self._at_destination[message.piece]
                share = gradient.narrow(0, span.first_token, span.num_tokens)
                if message.taker != rank:
                    leaving.append(Parcel(share.contiguous(), message.taker))
            else:
                share = self._empty(self._at_source[message.piece].num_tokens)
                arriving.append(Parcel(share, message.giver))
            if message.taker == rank:
                shares[message.piece].append(share)
        self._route.exchange(leaving, arriving, direction="backward", number=self._number)
        if self._crossings is not None:
            self._crossings.close(self._route.edge, self._number_open, has_gradient=bool(givers))
        if not self._takes_gradient or not (givers or self._route.plan.has_earlier_stages):
            return None
        sums = [self._sum(each, self._at_source[piece]) for piece, each in shares.items()]
        if len(sums) > 1:
            return torch.cat(sums)
        # The destination may still have the gradient that it gave to this rank itself.
        is_shared = gradient is not None and _memory(sums[0]) == _memory(gradient)
        return sums[0].clone() if is_shared else sums[0]

    def _agree_backward(self, gradient: Tensor | None) -> set[int]:
        """Return the ranks that have a gradient; collective over the edge."""
        control = self._route.groups.control
        with control.in_step():
            rows = control.agree(
                self.failure,
                phase=self._route.phase("backward", self._number),
                payload=b"" if gradient is None else b"\1",
            )
        givers = {rank for rank, row in zip(control.ranks, rows, strict=True) if row}
        for by_cp in self._route.plan.takers:
            for by_tp in by_cp:
                having = givers.intersection(by_tp)
                if having and len(having) < len(by_tp):
                    _, destination = self._route.edge
                    raise GroupError(
                        f"{self._route.phase('backward', self._number)}: of the tp replicas "
                        f"{shorten_ranks(by_tp)} of {destination!r} only ranks "
                        f"{shorten_ranks(sorted(having))} have a gradient of the tokens. Only "
                        f"one of these equal gradients is sent back; run the backward on all ranks."
                    )
        return givers

    def _spans(self, pieces: Iterable[int], given: Mapping[int, Given]) -> dict[int, Span]:
        """Return the places of consecutive pieces in the samples of a data rank."""
        spans = {}
        first_token = first_sample = 0
        for index in pieces:
            piece = self._route.plan.pieces[index]
            of_source = given[self._route.plan.givers[piece.source][0][0]]
            num_tokens, num_samples = of_source.num_tokens[piece.part], of_source.samples_of_part
            spans[index] = Span(first_token, num_tokens, first_sample, num_samples)
            first_token, first_sample = first_token + num_tokens, first_sample + num_samples
        return spans

    def _allocate(self) -> Packed:
        """Return memory for the samples that this rank takes."""
        spans = self._at_destination.values()
        counts = torch.empty(
            sum(span.num_samples for span in spans), dtype=torch.int64, device=self._route.device
        )
        return Packed(self._empty(sum(span.num_tokens for span in spans)), counts)

    def _empty(self, num_tokens: int) -> Tensor:
        """Return memory for tokens or their gradient."""
        return torch.empty(
            (num_tokens, *self._features), dtype=self._dtype, device=self._route.device
        )

    def _sum(self, shares: Sequence[Tensor], span: Span) -> Tensor:
        """Add up the shares of the destination's cp ranks, in the order of their coordinates.

        Sums of 16-bit gradients are made in float32 and rounded once.
        """
        if not shares:
            return self._empty(span.num_tokens).zero_()
        if len(shares) == 1:
            return shares[0]
        wide = torch.promote_types(self._dtype, torch.float32)
        total = shares[0].to(wide, copy=True)
        for share in shares[1:]:
            total += share
        return total.to(self._dtype)


def _memory(tensor: Tensor) -> int:
    """Return an address that tensors in the same memory have in common."""
    return tensor.untyped_storage().data_ptr()

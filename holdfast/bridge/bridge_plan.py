"""Who sends whose samples to whom along an edge, forward and backward. Torch-free arithmetic.

The samples of a step are in order, and data rank i of n has the i-th contiguous block of them, at
both ends. Data widths that divide each other cut them into as many *pieces* as the wider end has
data ranks: a piece is what one source data rank has and one destination data rank takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle

from holdfast.errors import LayoutError
from holdfast.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The samples that one source data rank has and one destination data rank takes."""

    source: int
    """The source's data rank (dp coordinate)."""
    destination: int
    """The destination's data rank."""
    part: int
    """Number of this part among the equal parts of the source data rank's samples, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One piece, or its gradient, on its way from rank to rank; the two may be the same rank."""

    piece: int
    """Position in `BridgePlan.pieces`."""
    giver: int
    """The rank that has it."""
    taker: int
    """The rank that needs it."""
    cp: int = 0
    """Of a gradient: the giver's cp coordinate. The shares of all of them are to be added."""


class BridgePlan:
    """Every message of one edge, the same on all ranks.

    Forward, each rank with the destination's first pipeline stage takes each piece of its data rank
    from one rank with the source's last stage: from itself where it has the piece, without
    a message, else from the tp and cp replicas of the source in turns.

    Backward, each rank with the source's last stage, replicas too, takes the gradient of each piece
    from one tp replica of every destination cp coordinate: from itself where it can, else from the
    tp replicas in turns. So all replicas add the same numbers in the same order.

    Args:
        source: the layout whose last pipeline stage gives activations.
        destination: the layout whose first stage takes them.

    Raises:
        LayoutError: Neither of the data widths divides the other. `ModuleLayouts` refuses these.

    Cost: linear in the number of messages of all ranks.
    """

    __slots__ = (
        "activations",
        "givers",
        "gradients",
        "has_earlier_stages",
        "num_parts",
        "pieces",
        "takers",
    )

    def __init__(self, source: Layout, destination: Layout) -> None:
        """Plan both directions; see the class."""
        if source.dp % destination.dp and destination.dp % source.dp:
            raise LayoutError(
                f"Neither of the data widths divides the other: dp={source.dp} of {source}, "
                f"dp={destination.dp} of {destination}."
            )
        num_pieces = max(source.dp, destination.dp)
        self.num_parts = num_pieces // source.dp
        """Parts into which the samples of a source data rank are cut: destination ranks of each."""
        self.pieces = tuple(
            Piece(
                source=index * source.dp // num_pieces,
                destination=index * destination.dp // num_pieces,
                part=index % self.num_parts,
            )
            for index in range(num_pieces)
        )
        """All pieces in the order of the samples."""
        self.has_earlier_stages = source.pp > 1
        """True if stages of the source before the last one wait for its gradient."""
        self.givers = _ranks_of_stage(source, source.pp - 1)
        """The ranks with the source's last stage, by dp, then cp, then tp."""
        self.takers = _ranks_of_stage(destination, 0)
        """The ranks with the destination's first stage, by dp, then cp, then tp."""
        self.activations = tuple(self._plan_activations())
        """The messages of the forward; of one taker, in the order of the pieces."""
        self.gradients = tuple(self._plan_gradients())
        """The messages of the backward; of one taker, in the order of pieces, then of cp."""

    def pieces_of_source(self, dp: int) -> range:
        """The pieces into which a source data rank's samples are cut, in order."""
        return range(dp * self.num_parts, (dp + 1) * self.num_parts)

    def pieces_of_destination(self, dp: int) -> range:
        """The pieces that a destination data rank's samples are made of, in order."""
        num_each = len(self.pieces) // len(self.takers)
        return range(dp * num_each, (dp + 1) * num_each)

    def _plan_activations(self) -> Iterable[Message]:
        """One message for each piece and rank that takes it."""
        giver_for = [_in_turns(block) for block in _flat(self.givers)]
        for dp, ranks in enumerate(_flat(self.takers)):
            for taker in ranks:
                for index in self.pieces_of_destination(dp):
                    giver = giver_for[self.pieces[index].source](taker)
                    yield Message(piece=index, giver=giver, taker=taker)

    def _plan_gradients(self) -> Iterable[Message]:
        """One message for each piece, destination cp coordinate and rank of the source."""
        givers_for = [[_in_turns(by_tp) for by_tp in by_cp] for by_cp in self.takers]
        for dp, ranks in enumerate(_flat(self.givers)):
            for taker in ranks:
                for index in self.pieces_of_source(dp):
                    of_piece = givers_for[self.pieces[index].destination]
                    for cp, giver_for in enumerate(of_piece):
                        yield Message(piece=index, giver=giver_for(taker), taker=taker, cp=cp)


def _in_turns(ranks: tuple[int, ...]) -> Callable[[int], int]:
    """Return a function that gives, for a taker, the replica that gives to it.

    That is the taker itself if it is one of them. The others give in turns, so that none sends more
    than one message more than another.
    """
    turns = cycle(ranks)
    return lambda taker: taker if taker in ranks else next(turns)


def _ranks_of_stage(layout: Layout, stage: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The ranks of one pipeline stage: by dp, then cp, then tp."""
    by_place = {}
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        if at["pp"] == stage:
            by_place[at["dp"], at["cp"], at["tp"]] = rank
    return tuple(
        tuple(tuple(by_place[dp, cp, tp] for tp in range(layout.tp)) for cp in range(layout.cp))
        for dp in range(layout.dp)
    )


def _flat(ranks: tuple[tuple[tuple[int, ...], ...], ...]) -> list[tuple[int, ...]]:
    """The ranks of each data rank in one row."""
    return [tuple(rank for by_tp in by_cp for rank in by_tp) for by_cp in ranks]

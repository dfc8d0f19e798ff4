"""One rank's share of the plan of an edge, and the communicator for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from holdfast.bridge.bridge_plan import BridgePlan, Message
from holdfast.bridge.parcels import Parcel, exchange
from holdfast.errors import DeadlineError, HoldfastError

if TYPE_CHECKING:
    from holdfast.parallel.groups.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A rank's share of an edge; the same for every forward."""

    edge: tuple[str, str]
    """Source and destination module."""
    plan: BridgePlan
    groups: ProcessGroups
    """The communicators of the edge."""
    device: torch.device
    """The device of the communicator, on which tensors arrive."""
    activations: tuple[Message, ...]
    """The plan's messages that this rank gives or takes."""
    gradients: tuple[Message, ...]
    """The same of the backward."""
    source_dp: int | None
    """This rank's data rank in the source; None without the source's last stage."""
    destination_dp: int | None
    """This rank's data rank in the destination; None without the destination's first stage."""

    @classmethod
    def of(
        cls, plan: BridgePlan, groups: ProcessGroups, *, edge: tuple[str, str], device: torch.device
    ) -> Route:
        """Return the share of the rank that holds these groups. Cost: one pass over the plan."""
        rank = groups.rank
        return cls(
            edge=edge,
            plan=plan,
            groups=groups,
            device=device,
            activations=tuple(m for m in plan.activations if rank in (m.giver, m.taker)),
            gradients=tuple(m for m in plan.gradients if rank in (m.giver, m.taker)),
            source_dp=_data_rank(plan.givers, rank),
            destination_dp=_data_rank(plan.takers, rank),
        )

    @property
    def rank(self) -> int:
        """This rank."""
        return self.groups.rank

    def phase(self, direction: str, number: int) -> str:
        """Return the name of this phase; the number comes first, because long names are cut."""
        return f"{direction} {number} of {self.edge[0]} -> {self.edge[1]}"

    @contextmanager
    def agreed(self, *, direction: str, number: int) -> Iterator[None]:
        """Enter from the agreement up to the last message, for which other ranks wait from then on.

        What leaves it on one rank ends these waits. The communicator cannot be used again then.
        """
        control, phase = self.groups.control, self.phase(direction, number)
        try:
            yield
        except HoldfastError:  # of a message: the other ranks know
            raise
        except BaseException as error:
            ended = f"{type(error).__name__} has ended {phase} on rank {self.rank}"
            control.cut_off(
                DeadlineError(
                    f"{ended}. Start again from the last checkpoint",
                    # As of a rank that the others have waited for.
                    details={"missing_ranks": [self.rank], "waited_s": 0.0},
                )
            )
            if isinstance(error, Exception):
                with control.in_step():
                    self._fail_on_all(error, phase)
            control.abandon(ended)
            raise

    def exchange(
        self, leaving: Sequence[Parcel], arriving: Sequence[Parcel], *, direction: str, number: int
    ) -> None:
        """Send and receive within the groups' deadline; see `parcels.exchange`.

        If that fails, the other ranks receive the error in their next agreement.
        """
        giving, taking = self.edge if direction == "forward" else self.edge[::-1]
        phase = self.phase(direction, number)
        with self.groups.control.in_step():
            try:
                exchange(
                    leaving,
                    arriving,
                    # Not before it is needed: an edge of one rank has none, and sends nothing.
                    get_group=lambda: self.groups.group("dp"),
                    timeout_s=self.groups.control.limit_s,
                    what=f"{phase}, on rank {self.rank}",
                    giver=giving,
                    taker=taking,
                )
            except DeadlineError as error:
                self._fail_on_all(self.groups.control.why_freed() or error, phase)

    def _fail_on_all(self, error: Exception, phase: str) -> NoReturn:
        """Raise on all ranks. If this rank left at once, the others would report it as missing."""
        control = self.groups.control
        try:
            control.fail(error, phase=phase)
        except HoldfastError:
            if control.is_broken:  # a rank is missing there too: the first error says more
                raise error from None
            raise


def _data_rank(ranks: tuple[tuple[tuple[int, ...], ...], ...], rank: int) -> int | None:
    """Return the data rank that has a rank among its replicas."""
    for dp, by_cp in enumerate(ranks):
        if any(rank in by_tp for by_tp in by_cp):
            return dp
    return None

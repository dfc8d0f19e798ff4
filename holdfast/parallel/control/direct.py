"""Small tensors between the ranks of a layout, moved by the thread that waits for them.

Gloo moves bytes in a thread of its own, so each message takes two more turns of the scheduler on
both ranks, which cost more than the bytes where other programs use the cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import DeadlineError, GroupError, exchange_lost
from holdfast.parallel.control.connections import Connections, LateError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Direct:
    """Exchanges bytes with other ranks over sockets of its own; it is broken by the first failure.

    What it carries has no frames, unlike that of `Control`: a rank in another call is not named. So
    all ranks make the same exchanges in the same order, as with any communicator.

    Args:
        ranks: global ranks, in order.
        rank: this process's global rank.
        store: holds the addresses; nothing else uses it.
        timeout_s: for one exchange.

    Cost: from the first exchange on a socket, and two more for each rank exchanged with.
    """

    def __init__(self, *, ranks: Sequence[int], rank: int, store: Store, timeout_s: float) -> None:
        self.num_exchanges = 0
        self._indices = {each: index for index, each in enumerate(ranks)}
        self._rank = rank
        self._store = store
        self._timeout_s = timeout_s
        self._connections: Connections | None = None
        self._broken = ""

    def exchange(
        self, mine: memoryview, arriving: Sequence[tuple[int, memoryview]], *, what: str
    ) -> None:
        """Send the same bytes to each (global rank, memory), and fill that with the rank's own.

        Raises:
            DeadlineError: A rank is late or gone; it names `what`.
        """
        if self._broken:
            raise DeadlineError(f"{what} cannot start: {self._broken}")
        self.num_exchanges += 1
        started = time.monotonic()
        try:
            if self._connections is None:  # not earlier: an error here is one of the exchange
                self._connections = Connections(index=self._indices[self._rank], store=self._store)
            self._connections.transfer(
                [(self._indices[rank], mine) for rank, _ in arriving],
                [(self._indices[rank], memory) for rank, memory in arriving],
                started + self._timeout_s,
            )
        except (OSError, LateError, GroupError, RuntimeError) as error:  # the last is the store's
            waited_s = time.monotonic() - started
            self._broken = f"an earlier exchange failed after {waited_s:.3g} s ({error})"
            self.close()
            raise exchange_lost(what, error, waited_s=waited_s) from error

    def close(self) -> None:
        """End the connections, so that ranks that wait for this one fail; twice is once."""
        self._broken = self._broken or "it is closed"
        if self._connections is not None:
            self._connections.close()

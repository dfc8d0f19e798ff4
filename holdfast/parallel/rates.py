"""What it costs to bring bytes to the ranks of several hosts, read by each or sent by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast bytes reach the ranks of one host.

    Args:
        storage: bytes per second that they read together while other hosts read, too.
        network: bytes per second that they receive together from other ranks.
        open_s: seconds to open a data file.
    """

    storage: float
    network: float
    open_s: float

    def read_s(
        self, nbytes: int, ranks_by_host: Sequence[int], *, num_files: int, is_cached: bool
    ) -> float:
        """Seconds until all ranks have read the same bytes, each for itself.

        Args:
            nbytes: that every rank needs.
            ranks_by_host: how many of the ranks each host has.
            num_files: data files that hold the bytes.
            is_cached: whether ranks of one host share a page cache: the storage then sends bytes
                once to each host.
        """
        copies = 1 if is_cached else max(ranks_by_host)
        return nbytes * copies / self.storage + num_files * self.open_s

    def exchange_s(self, nbytes: int, ranks_by_host: Sequence[int], *, num_files: int) -> float:
        """Seconds until all ranks have the bytes if each reads an equal share and sends it to all.

        Reading and sending are added, although they overlap: both take time of the same cores.
        """
        ranks, here = sum(ranks_by_host), max(ranks_by_host)
        share = nbytes / ranks
        received = here * (ranks - 1) * share
        opens = math.ceil(num_files / ranks) * self.open_s
        return here * share / self.storage + received / self.network + opens

"""What it costs to bring bytes to the ranks of several hosts, read by each or sent by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from holdfast.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """How fast bytes come to the ranks of one host; None for what is to be measured.

    Given to `Checkpointer.load`, it decides with `exchange="auto"` what is read once and sent on.

    Args:
        storage: Bytes per second that ranks of one host read together while other hosts read, too.
        network: Bytes per second that ranks of one host receive together from other hosts.
        memory: Bytes per second that ranks of one host receive together from each other.
        open_s: Seconds to open a data file.

    Raises:
        ConfigError: A value that is not a positive finite number (`open_s` may be 0).
    """

    storage: float | None = None
    network: float | None = None
    memory: float | None = None
    open_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for each in fields(self):
            value, name = getattr(self, each.name), each.name
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            least = 0.0 if name == "open_s" else math.ulp(0.0)
            if not is_number or not least <= value < math.inf:
                unit = "seconds" if name == "open_s" else "bytes per second"
                raise ConfigError(f"Bandwidths({name}={value!r}) must be a positive number, {unit}")

    def read_s(
        self, nbytes: int, ranks_by_host: Sequence[int], *, num_files: int, is_cached: bool
    ) -> float:
        """Seconds until all ranks have read the same bytes, each for itself.

        Args:
            nbytes: That every rank needs.
            ranks_by_host: How many of the ranks each host has.
            num_files: Data files that hold the bytes.
            is_cached: Whether ranks of one host share a page cache: the storage then sends bytes
                once to each host.
        """
        copies = 1 if is_cached else max(ranks_by_host)
        return nbytes * copies / _rate(self.storage) + num_files * (self.open_s or 0.0)

    def exchange_s(self, nbytes: int, ranks_by_host: Sequence[int], *, num_files: int) -> float:
        """Seconds until all ranks have the bytes if each reads an equal share and sends it to all.

        Reading and sending are added, although they overlap: both take time of the same cores.
        """
        ranks = sum(ranks_by_host)
        share = nbytes / ranks
        return max(
            here * share / _rate(self.storage)
            + here * (ranks - here) * share / _rate(self.network)
            + here * (here - 1) * share / _rate(self.memory)
            for here in ranks_by_host
        ) + math.ceil(num_files / ranks) * (self.open_s or 0.0)


def _rate(value: float | None) -> float:
    """What could not be measured, since there is nobody to send to, costs nothing."""
    return math.inf if value is None else value

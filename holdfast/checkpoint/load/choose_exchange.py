"""With `exchange="auto"`: which bytes are read once and sent on, by what that costs here.

Neither rule alone is right: if the storage is slower than the network, reading on every host
multiplies the time by the number of hosts; if it is faster, sending to every rank multiplies it
by the ranks of a host. So the first megabytes of a large load are timed, and the rates agreed on,
so that all ranks decide the same.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.errors import HoldfastError
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.parallel.control.control import Control

ReplicaSets = Sequence[tuple[IntArray, int, int]]
"""(positions of the ranks, bytes that all of them request, data files that hold these bytes)."""

Choose = Callable[[ReplicaSets], list[bool]]
"""For each set whether its bytes are read once and sent on; called on all ranks with equal sets."""

_READ_NBYTES = 4 << 20
_SENT_NBYTES = 2 << 20
_WORTH_MEASURING = 256 << 20
"""Shared bytes from which it pays to measure; of fewer, opens and requests are what counts."""
_TIMES = struct.Struct("<q3d")


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
        """Return the seconds until all ranks have read the same bytes, each for itself.

        Args:
            nbytes: that every rank needs.
            ranks_by_host: number of the ranks on each host.
            num_files: data files that hold the bytes.
            is_cached: True if ranks of one host share a page cache: the storage then sends bytes
                once to each host.
        """
        copies = 1 if is_cached else max(ranks_by_host)
        return nbytes * copies / self.storage + num_files * self.open_s

    def exchange_s(self, nbytes: int, ranks_by_host: Sequence[int], *, num_files: int) -> float:
        """Return the seconds until all ranks have the bytes if each reads a share and sends it.

        Reading and sending are added, although they overlap: both take time of the same cores.
        """
        ranks, here = sum(ranks_by_host), max(ranks_by_host)
        share = nbytes / ranks
        received = here * (ranks - 1) * share
        opens = math.ceil(num_files / ranks) * self.open_s
        return here * share / self.storage + received / self.network + opens


def choose_exchange(
    sets: ReplicaSets,
    *,
    hosts: Sequence[str],
    is_cached: bool,
    measure: Callable[[], Rates],
) -> list[bool]:
    """Decide for each set of ranks whether its bytes are read once and sent on.

    Args:
        sets: what is shared, none within one host that has a page cache.
        hosts: of each rank, by position.
        is_cached: whether ranks of one host share a page cache of this storage.
        measure: returns the rates, the same on all ranks; collective.
    """
    if sum(nbytes for _, nbytes, _ in sets) < _WORTH_MEASURING:
        return [True] * len(sets)
    rates = measure()
    is_faster = []
    for ranks, nbytes, num_files in sets:
        here = [hosts[rank] for rank in ranks.tolist()]
        counts = [*Counter(here).values()]
        read_s = rates.read_s(nbytes, counts, num_files=num_files, is_cached=is_cached)
        sent_s = rates.exchange_s(nbytes, counts, num_files=num_files)
        # Equal if nothing could be measured: then each byte is read once.
        is_faster.append(sent_s <= read_s)
    return is_faster


def host_numbers(hosts: Sequence[str]) -> IntArray:
    """Return a number for each rank, the same for the ranks of one host. Linear in ranks."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(host, len(numbers)) for host in hosts], dtype=np.int64)


def measure_rates(files: CheckpointFiles, control: Control, hosts: Sequence[str]) -> Rates:
    """Measure what reading and sending some MiB takes on the slowest host.

    All ranks read and send at the same time, as they will. Nothing that fails to be read here is an
    error: what the load needs of it is read again, and reported then.

    Cost: on each rank a read of up to 4 MiB and a message of 2 MiB; three small collectives.
    """
    # All measure at once: what counts is what a host gets while its ranks, and others, load, too.
    pairs = _partners(hosts)
    _send(control, pairs, nbytes=4096)  # connects, and lets all start together
    sent_s = _send(control, pairs, nbytes=_SENT_NBYTES)
    nbytes, open_s, read_s = _probe_storage(files, control)
    payload = _TIMES.pack(nbytes, open_s, read_s, sent_s)
    rows = control.agree(None, phase="load: measure", payload=payload)
    columns = np.array([_TIMES.unpack(row) for row in rows])
    received = np.zeros(len(hosts))
    np.add.at(received, [to for _, to in pairs], _SENT_NBYTES)
    rates = Rates(
        storage=_slowest(hosts, columns[:, 0], columns[:, 2]),
        network=_slowest(hosts, received, columns[:, 3]),
        open_s=float(columns[:, 1].max()),
    )
    if control.is_coordinator:
        logging.getLogger("holdfast").debug("load: measured %s", rates)
    return rates


def _slowest(hosts: Sequence[str], nbytes: np.ndarray, seconds: np.ndarray) -> float:
    """Bytes per second of the slowest host, of those whose ranks moved any; inf if none did."""
    number = host_numbers(hosts)
    moved = np.bincount(number, nbytes)
    longest = np.zeros(len(moved))
    np.maximum.at(longest, number, np.where(nbytes > 0, seconds, 0.0))
    # The ranks of a host share its connection: its rate is their bytes over the longest time.
    is_measured = (moved > 0) & (longest > 0)
    return (
        float((moved[is_measured] / longest[is_measured]).min()) if is_measured.any() else math.inf
    )


def _partners(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """(from, to) of the messages to measure: a ring of the hosts, or of the ranks of a single one.

    Example, hosts a a b b b: 0→2, 1→3, 2→0, 3→1.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return list(pairwise([*range(len(hosts)), 0]))
    positions = [[i for i, host in enumerate(hosts) if host == name] for name in names]
    ring = pairwise([*positions, positions[0]])
    return [pair for ours, theirs in ring for pair in zip(ours, theirs, strict=False)]


def _send(control: Control, pairs: Sequence[tuple[int, int]], *, nbytes: int) -> float:
    """Seconds until this rank has sent and received its messages."""
    me = control.index
    outgoing = [(to, memoryview(bytearray(nbytes))) for source, to in pairs if source == me]
    incoming = [(source, memoryview(bytearray(nbytes))) for source, to in pairs if to == me]
    start = time.perf_counter()
    control.exchange(outgoing, incoming, phase="load: measure")
    return time.perf_counter() - start


def _probe_storage(files: CheckpointFiles, control: Control) -> tuple[int, float, float]:
    """Return bytes read of a data file, seconds to open it and to read them; zeros if it fails.

    Ranks read different files, or different places of one: what another rank has just read
    would come from a cache.
    """
    infos = files.manifest.files
    if not infos:
        return 0, 0.0, 0.0
    writers = [info.writer for info in infos]
    own = control.rank in writers
    number = writers.index(control.rank) if own else control.index % len(infos)
    turn = 0 if own else control.index // len(infos)
    nbytes = min(_READ_NBYTES, infos[number].nbytes)
    start = turn * _READ_NBYTES % max(infos[number].nbytes - nbytes, 1)
    try:
        begin = time.perf_counter()
        files.probe(number, start=0, nbytes=0)
        opened = time.perf_counter()
        files.probe(number, start=start, nbytes=nbytes)
    except HoldfastError:
        return 0, 0.0, 0.0
    return nbytes, opened - begin, time.perf_counter() - opened

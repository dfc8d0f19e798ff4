"""With `exchange="auto"`: which bytes are read once and sent on, by what that costs here.

The cost model is `Bandwidths`. What it is given is measured on the first megabytes of the load and
agreed on, so that all ranks decide alike.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from holdfast.arrays.types import IntArray
from holdfast.errors import HoldfastError
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.parallel.bandwidths import Bandwidths
from holdfast.parallel.control.control import Control

ReplicaSets = Sequence[tuple[IntArray, int, int]]
"""(positions of the ranks, bytes that all of them request, data files that hold these bytes)."""

Choose = Callable[[ReplicaSets], list[bool]]
"""For each set whether its bytes are read once and sent on; called on all ranks with equal sets."""

_READ_NBYTES = 4 << 20
_SENT_NBYTES = 2 << 20
_WORTH_MEASURING = 256 << 20
"""Shared bytes from which it pays to measure; of fewer, opens and requests are what counts."""
_TIMES = struct.Struct("<q4d")


def choose_exchange(
    sets: ReplicaSets,
    bandwidths: Bandwidths,
    *,
    hosts: Sequence[str],
    is_cached: bool,
    measure: Callable[[Bandwidths], Bandwidths],
) -> tuple[list[bool], Bandwidths | None]:
    """Decide for each set of ranks; and what that was decided with.

    Args:
        sets: What is shared, none within one host that has a page cache.
        bandwidths: As the caller gave them.
        hosts: Of each rank, by position.
        is_cached: Whether ranks of one host share a page cache of this storage.
        measure: Completes bandwidths; collective.
    """
    if bandwidths.storage is None or bandwidths.network is None:
        if sum(nbytes for _, nbytes, _ in sets) < _WORTH_MEASURING:
            return [True] * len(sets), None
        bandwidths = measure(bandwidths)
    is_faster = []
    for ranks, nbytes, num_files in sets:
        here = [hosts[rank] for rank in ranks.tolist()]
        counts = [here.count(host) for host in dict.fromkeys(here)]
        read_s = bandwidths.read_s(nbytes, counts, num_files=num_files, is_cached=is_cached)
        sent_s = bandwidths.exchange_s(nbytes, counts, num_files=num_files)
        # Equal where nothing could be measured: then each byte is read once.
        is_faster.append(sent_s <= read_s)
    return is_faster, bandwidths


def measure_bandwidths(
    files: CheckpointFiles, control: Control, hosts: Sequence[str], given: Bandwidths
) -> Bandwidths:
    """Complete what was given by what reading and sending some MiB takes on the slowest host.

    All ranks read and send at the same time, as they will. Messages within a host are copies through
    the loopback socket, so a copy stands for them. Nothing that fails to be read here is an error:
    what the load needs of it is read again, and reported then.

    Cost: on each rank a read of up to 4 MiB, a message of 2 MiB to a rank of another host and a
    copy of as much; three small collectives.
    """
    pairs = _partners(hosts)
    _send(control, pairs, nbytes=4096)  # connects, and lets all begin together
    sent_s = _send(control, pairs, nbytes=_SENT_NBYTES)
    copied_s = _copy(_SENT_NBYTES)
    nbytes, open_s, read_s = _probe_storage(files, control)
    payload = _TIMES.pack(nbytes, open_s, read_s, sent_s, copied_s)
    rows = control.agree(None, phase="load: measure", payload=payload)
    columns = np.array([_TIMES.unpack(row) for row in rows])
    received = np.zeros(len(hosts))
    np.add.at(received, [to for _, to in pairs], _SENT_NBYTES)
    measured = Bandwidths(
        storage=_slowest(hosts, columns[:, 0], columns[:, 2]),
        network=_slowest(hosts, received, columns[:, 3]),
        memory=_slowest(hosts, np.full(len(hosts), _SENT_NBYTES), columns[:, 4]),
        open_s=float(columns[:, 1].max()),
    )
    names = [each.name for each in fields(Bandwidths) if getattr(given, each.name) is None]
    complete = replace(given, **{name: getattr(measured, name) for name in names})
    if control.is_coordinator:
        logging.getLogger("holdfast").debug("load: measured %s; deciding by %s", measured, complete)
    return complete


def _slowest(hosts: Sequence[str], nbytes: np.ndarray, seconds: np.ndarray) -> float | None:
    """Bytes per second of the host that is slowest, of those whose ranks moved any."""
    number = np.array([hosts.index(host) for host in hosts])
    moved = np.bincount(number, nbytes)
    longest = np.zeros(len(moved))
    np.maximum.at(longest, number, np.where(nbytes > 0, seconds, 0.0))
    is_measured = (moved > 0) & (longest > 0)
    return float((moved[is_measured] / longest[is_measured]).min()) if is_measured.any() else None


def _partners(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """(from, to) of the messages to measure: a ring of the hosts.

    Example, hosts a a b b b: 0→2, 1→3, 2→0, 3→1.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return []
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


def _copy(nbytes: int) -> float:
    """Seconds to copy so many bytes into memory that is there."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def _probe_storage(files: CheckpointFiles, control: Control) -> tuple[int, float, float]:
    """Bytes read of a data file, seconds to open it, seconds to read them; zeros where it fails.

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

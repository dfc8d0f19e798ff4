"""What creating groups costs as ranks are added: counted, not timed.

For each number of real processes the groups of a layout (TP2 x PP2 x DP) are created, and every
rank counts its requests to the rendezvous store, their bytes, and the descriptors that it holds
afterwards. The growth law is the exponent of the last doubling: 0 is constant, 1 linear.

    python -m bench.groups
    python -m bench.groups --ranks 8 16
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from bench.ranks import RankContext, run_ranks
from holdfast.parallel import Layout, ProcessGroups

NUM_RANKS = (8, 16, 32, 64)
TIMEOUT_S = 300.0


class CountingStore(dist.Store):
    """Passes every request on to another store, and counts requests and bytes.

    Waiting counts as one request however long it takes. Bytes are those of keys and values, both
    ways, without the framing of the store's own protocol.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.num_requests = 0
        self.nbytes = 0

    def _count(self, *passed: str | bytes | Sequence[str]) -> None:
        self.num_requests += 1
        for value in passed:
            self.nbytes += sum(map(len, value)) if isinstance(value, list) else len(value)

    def set(self, key: str, value: Any) -> None:
        """Count and pass on."""
        self._count(key, value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Count and pass on."""
        value = self._store.get(key)
        self._count(key, value)
        return value

    def add(self, key: str, value: int) -> int:
        """Count and pass on."""
        self._count(key, b"8 bytes " * 2)
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Count and pass on."""
        value = self._store.compare_set(key, expected, desired)
        self._count(key, expected, desired, value)
        return value

    def check(self, keys: list[str]) -> bool:
        """Count and pass on."""
        self._count(keys)
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Count and pass on."""
        self._count(keys)
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count and pass on: one request for all keys."""
        values = self._store.multi_get(keys)
        self._count(keys, [bytes(value) for value in values])  # type: ignore[arg-type]
        return values

    def has_extended_api(self) -> bool:
        """As the other store."""
        return self._store.has_extended_api()

    def clone(self) -> CountingStore:
        """Itself: what a communicator asks for is counted with the rest."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Pass on."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """Of the other store."""
        return self._store.timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one rank counted."""

    requests: int
    nbytes: int
    descriptors: int
    communicators: int


def count_creation(context: RankContext, names: list[str] | None) -> Counted:
    """Create groups over a store that counts, and call `control` once, so that it connects."""
    from torch.distributed import distributed_c10d as c10d

    layout = Layout(tp=2, pp=2, dp=context.num_ranks // 4)
    store = CountingStore(c10d._get_default_store())
    num_descriptors, num_communicators = _num_descriptors(), len(c10d._world.pg_map)
    with ProcessGroups.create(layout, names=names, timeout_s=TIMEOUT_S, store=store) as groups:
        groups.control.barrier(phase="connect")
        counted = Counted(
            requests=store.num_requests,
            nbytes=store.nbytes,
            descriptors=_num_descriptors() - num_descriptors,
            communicators=len(c10d._world.pg_map) - num_communicators,
        )
        groups.control.barrier(phase="counted")
    return counted


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.groups", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=NUM_RANKS, metavar="N")
    options = parser.parse_args(arguments)
    for title, names in (("control alone", []), ("control and every group", None)):
        _print(title, {n: _mean(n, names) for n in options.ranks})
    return 0


def _mean(num_ranks: int, names: list[str] | None) -> dict[str, float]:
    """The mean over ranks of everything counted."""
    results = run_ranks(num_ranks, count_creation, names, timeout_s=TIMEOUT_S).results
    quantities = ("requests", "nbytes", "descriptors", "communicators")
    return {q: sum(getattr(r, q) for r in results) / num_ranks for q in quantities}


def _print(title: str, by_ranks: dict[int, dict[str, float]]) -> None:
    table = Table(title=f"{title}: a rank's mean")
    for column in ("quantity", *(f"{n} ranks" for n in by_ranks), "grows as N to the"):
        table.add_column(column, justify="left" if column == "quantity" else "right")
    *_, (n, before), (m, after) = [(0, {}), *by_ranks.items()]
    for quantity in after:
        values = (f"{values[quantity]:.1f}" for values in by_ranks.values())
        is_counted = before and before[quantity]
        law = f"{math.log(after[quantity] / before[quantity], m / n):.2f}" if is_counted else ""
        table.add_row(quantity, *values, law)
    Console(width=120).print(table)


if __name__ == "__main__":
    raise SystemExit(main())

"""What holds for every test: drawn examples are the same on every machine and in every run.

A red run can so be repeated anywhere, and a green one means the same everywhere. To look for new
failures, draw others: `HYPOTHESIS_PROFILE=random make test`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# torch's rendezvous asks for the name of every address that connects, 127.0.0.1 too. A name server
# that loses the question costs a second, not the five that are the default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# As under `make test`. With more threads torch's kernels spin while they wait for each other, and
# in a forked process without end, for threads that only its parent has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Neither an example nor the drawing of examples has a time: other processes would decide.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, database=None, **_UNTIMED)
settings.register_profile("random", print_blob=True, **_UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a case whose id is another one in each process: several workers could not share it."""
    unstable = [each.nodeid for each in items if " at 0x" in each.nodeid]
    if unstable:
        raise pytest.UsageError(f"the id of a case has an address: {unstable[0]}")


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave to the next file no objects to walk: what it costs would depend on what ran before.

    The rerun machine looks at every object that the collector knows, thousands of times in some
    files; syntax trees and imported frameworks of others made that ten times as slow.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Keep what stays anyway (thousands of cases, torch) out of each collection of garbage."""
    gc.collect()
    gc.freeze()

"""Asynchronous saves in a bucket whose writer process, or trainer, is killed at every request.

The writer reaches the server through a proxy, which counts its requests alone.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from holdfast import Checkpointer, HoldfastError
from holdfast.format.names import LATEST
from holdfast.writer.leftovers import repair
from tests.crash.common import state_of
from tests.ranks.pool import fork

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.proxy import Fault, fault_proxy
from tests.buckets.server import new_bucket
from tests.buckets.test_saves import versions

NEVER = 1 << 30
DONE = {False: {1: 1, 2: 2, 3: 3}, True: {1: 1, 2: 3}}
BEFORE = {1: 1, 2: 2}


def a_run(s3: str) -> str:
    """A run with two steps; its URL."""
    url = f"s3://{new_bucket(s3)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in BEFORE:
            checkpointer.save(step, state_of(step))
    return url


def check(url: str, done: dict[int, int], where: str) -> None:
    """A repair, and a save after it, find every step in one of its two versions and undo none."""
    found = versions(url)
    for step in {*BEFORE, *done}:
        assert found.get(step) in (BEFORE.get(step), done.get(step)), (where, found)
    storage = ObjectStorage(url)
    fates = repair(storage, alive_s=0.0)
    assert not [each for each in fates if each.fate in ("kept", "alive")], (where, fates)
    after = versions(url)
    for step in {*BEFORE, *done}:
        assert after.get(step) in (found.get(step), done.get(step)), (where, after)
    assert storage.read(LATEST) == b"%d\n" % max(after)
    left = [name for name in storage.list("") if name.startswith((".saving-", ".old-"))]
    assert left == [], where


def writer_killed_at(s3: str, at: int, *, overwrite: bool) -> int:
    """Save while the writer dies at a request; return how many it had sent."""
    url, seen, pids = a_run(s3), 0, list[int]()

    def choose(method: str, path: str) -> Fault:
        nonlocal seen
        seen += 1
        if seen != at:
            return ""
        os.kill(pids[0], signal.SIGKILL)
        return "cut before"

    with fault_proxy(s3, choose) as (_, address):
        storage = ObjectStorage(url)
        storage.address = lambda: (url, {"endpoint": address})  # type: ignore[method-assign]
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            checkpointer.prepare(state_of(3))
            assert checkpointer.stats.writer_pid is not None
            pids.append(checkpointer.stats.writer_pid)
            pending = checkpointer.save_async(
                2 if overwrite else 3, state_of(3), overwrite=overwrite
            )
            killed = None
            try:
                pending.result()
            except HoldfastError as error:
                killed = str(error)
            if killed is not None:
                assert "was killed by SIGKILL" in killed
    check(url, DONE[overwrite], f"writer killed at request {at}")
    Checkpointer(url, settle_s=0.0).save(4, state_of(4))
    assert versions(url)[4] == 4
    return seen


def test_the_writer_is_killed_at_its_commit(s3: str) -> None:
    writer_killed_at(s3, 9, overwrite=False)


NOT_ALL = [
    pytest.param(False, 3, marks=pytest.mark.slow),
    pytest.param(True, 5, marks=pytest.mark.slow),
    *(pytest.param(overwrite, 1, marks=pytest.mark.nightly) for overwrite in (False, True)),
]
"""Whether a step is replaced, and how far apart are the requests to kill at."""


@pytest.mark.parametrize(("overwrite", "every"), NOT_ALL)
def test_the_writer_is_killed_at_every_request(s3: str, overwrite: bool, every: int) -> None:
    num_requests = writer_killed_at(s3, NEVER, overwrite=overwrite)
    assert num_requests > 8
    # From the last one back: the commit, and what comes after it.
    for at in range(num_requests, 0, -every):
        writer_killed_at(s3, at, overwrite=overwrite)


def train(
    pipe: Connection, url: str, address: str, overwrite: bool, environment: dict[str, str]
) -> None:
    """Save as a trainer in a process group of its own; its writer's number goes into the pipe."""
    os.setsid()
    os.environ.update(environment)
    storage = ObjectStorage(url)
    storage.address = lambda: (url, {"endpoint": address})  # type: ignore[method-assign]
    checkpointer = Checkpointer(storage, settle_s=0.0)
    checkpointer.prepare(state_of(3))
    pipe.send(checkpointer.stats.writer_pid)
    checkpointer.save_async(2 if overwrite else 3, state_of(3), overwrite=overwrite).result()
    checkpointer.close()


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def trainer_killed_at(s3: str, at: int, *, overwrite: bool) -> int:
    """Save while the trainer dies at a request of its writer, which finishes the save."""
    url, seen = a_run(s3), 0

    def choose(method: str, path: str) -> Fault:
        nonlocal seen
        seen += 1
        if seen == at:
            run.kill()
        return ""

    with fault_proxy(s3, choose) as (_, address):
        environment = dict(os.environ)
        pipe, run = fork(train, url, address, overwrite, environment, environment=environment)
        with pipe:
            writer = pipe.recv()
        run.join(120)
        deadline = time.monotonic() + 120
        while not has_ended(writer):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert versions(url) == DONE[overwrite], f"trainer killed at request {at} of its writer"
    check(url, DONE[overwrite], f"trainer killed at request {at} of its writer")
    return seen


@pytest.mark.parametrize(("overwrite", "every"), NOT_ALL)
def test_the_trainer_is_killed_at_requests_of_its_writer(
    s3: str, overwrite: bool, every: int
) -> None:
    num_requests = trainer_killed_at(s3, NEVER, overwrite=overwrite)
    for at in range(1, num_requests + 1, 3 * every):
        trainer_killed_at(s3, at, overwrite=overwrite)

"""How the ranks of a save learn its end: from storage, or as their writer ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch

from bench.scale import HEADER
from holdfast import Checkpointer, Layout, PosixStorage, ProcessGroups, Sharded
from holdfast.errors import DeadlineError, ErrorRecord, StorageError
from holdfast.storage import Sink
from holdfast.storage.posix import storage_error
from holdfast.writer.client import Ticket, WriterProcess
from holdfast.writer.job import run_job
from holdfast.writer.memory import SharedMemory
from holdfast.writer.outcomes import pause_s, publish_failure, wait_for_commit
from holdfast.writer.records import DONE_DIR, SaveOutcome, WriteJob
from tests.harness import RankContext, run_ranks
from tests.writer.images import wait_until

FINAL = "iter_0000001"

JOB = WriteJob(
    directory=".saving-iter_0000001-abc", position=1, rank=1, header=HEADER, plan_digest="",
    block_nbytes=1 << 20, deadline_s=1.0,
)  # fmt: skip

FAILURE = ErrorRecord.of(StorageError("No space left on device"), foreign=StorageError)
MANIFEST_OF_JOB = b'{"save_id":"' + HEADER.save_id.encode() + b'"}'


class Counting(PosixStorage):
    """Counts the requests of the waiting thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.num_requests = 0

    def list(self, path: str) -> list[str]:
        self.num_requests += 1
        return super().list(path)

    def exists(self, path: str) -> bool:
        self.num_requests += 1
        return super().exists(path)

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        self.num_requests += 1
        return super().read(path, start=start, nbytes=nbytes)


def _looks(seconds: float) -> int:
    """How many looks a wait of so long takes."""
    waited, count = 0.0, 0
    while waited < seconds:
        waited += pause_s(waited)
        count += 1
    return count


def test_pauses_grow() -> None:
    """Short waits are as fine as the waits of before, long ones ask a tenth as often."""
    assert pause_s(0.0) == 0.002
    assert all(pause_s(waited) <= 0.002 + waited / 5 for waited in (0.001, 0.01, 0.1, 0.4))
    assert pause_s(4.0) == 0.1
    assert pause_s(500.0) == 2.0
    assert _looks(0.5) == pytest.approx(18, abs=4)
    assert _looks(600.0) < 600


def test_a_waiting_rank_makes_one_request_a_look(tmp_path: Path) -> None:
    storage = Counting(tmp_path)
    outcome = run_job(storage, JOB, memoryview(b""), plan=None)
    assert outcome.error is not None
    assert isinstance(outcome.error.to_error(), DeadlineError)
    # The rest: making the directories, and looking for the committer's own failure.
    assert storage.num_requests <= _looks(1.0) + 4


def waiting(storage: PosixStorage, job: WriteJob) -> tuple[threading.Thread, list[SaveOutcome]]:
    """A rank that has written and waits for the commit: its thread, and where its outcome goes."""
    outcomes: list[SaveOutcome] = []
    thread = threading.Thread(
        target=lambda: outcomes.append(run_job(storage, job, memoryview(b""), plan=None))
    )
    thread.start()
    while not storage.exists(f"{job.directory}/{DONE_DIR}/00001.msgpack"):
        thread.join(0.01)
    return thread, outcomes


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_wait_ends_when_the_directory_has_its_final_name(
    tmp_path: Path, is_exchanged: bool
) -> None:
    """Where a step is saved again, the version that was there gets the name of the save."""
    storage = PosixStorage(tmp_path)
    job = msgspec.structs.replace(JOB, deadline_s=300.0)
    thread, outcomes = waiting(storage, job)
    if is_exchanged:
        storage.make_dir(FINAL)
        storage.write_file(f"{FINAL}/manifest.json", b'{"save_id":"another"}')
    storage.write_file(f"{job.directory}/manifest.json", MANIFEST_OF_JOB)
    thread.join(0.3)
    assert thread.is_alive(), "it has a manifest, but not its name"
    if is_exchanged:
        storage.remove_tree(f"{job.directory}/{DONE_DIR}")
        storage.exchange_dir(job.directory, FINAL)
    else:
        storage.rename_dir(job.directory, FINAL)
    thread.join(60)
    assert [outcome.error for outcome in outcomes] == [None]


def test_a_committed_save_is_durable_for_each_rank_that_has_seen_it(tmp_path: Path) -> None:
    """P13: the committer's own sync may come later, or never.

    Its directory may be there again, by a rank that has published a failure since.
    """
    calls: list[tuple[str, str]] = []
    storage = PosixStorage(tmp_path, observer=lambda name, path, *_: calls.append((name, path)))
    storage.make_dir(FINAL)
    storage.write_file(f"{FINAL}/manifest.json", MANIFEST_OF_JOB)
    for is_there in (False, True):
        if is_there:
            publish_failure(storage, JOB, FAILURE, committer=False)
        calls.clear()
        wait_for_commit(storage, JOB, time.monotonic())
        assert calls[-1] == ("sync_dir", "")


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_end_of_a_writer_by_a_signal(tmp_path: Path, is_committed: bool) -> None:
    """E1, P2: a save is what it is on storage; one that failed names the signal, real-time or not.

    Signals that warn a trainer of its end do not end its writer, at whatever moment they come.
    """
    storage = PosixStorage(tmp_path)
    if is_committed:
        storage.make_dir(FINAL)
        storage.write_file(f"{FINAL}/manifest.json", MANIFEST_OF_JOB)
    writer, memory = WriterProcess(storage, str(tmp_path)), SharedMemory()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(writer.pid, number)
    os.kill(writer.pid, signal.SIGSTOP)
    ticket = Ticket(JOB, commits=False, nbytes=0)
    writer.submit(ticket, buffer=0, memory=memory, image=memory.reserve(0), plan=None)
    os.kill(writer.pid, signal.SIGRTMIN + 1)
    os.kill(writer.pid, signal.SIGCONT)
    assert ticket.finished.wait(30)
    assert ticket.outcome is not None
    writer.close(timeout_s=30)
    memory.close()
    if is_committed:
        assert ticket.outcome.error is None
        assert storage.list("") == [FINAL]
    else:
        assert ticket.outcome.error is not None
        name = f"signal {signal.SIGRTMIN + 1}"
        assert f"was killed by {name} during the save" in ticket.outcome.error.message


def test_a_writer_whose_messages_cannot_be_read_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: as one of another release, where the package was replaced while the run went on."""
    theirs: list[socket.socket] = []
    make_pair = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        both = make_pair()
        theirs.append(both[1].dup())
        return both

    monkeypatch.setattr(socket, "socketpair", pair)
    writer, memory = WriterProcess(PosixStorage(tmp_path), str(tmp_path)), SharedMemory()
    os.kill(writer.pid, signal.SIGSTOP)
    ticket = Ticket(JOB, commits=False, nbytes=0)
    writer.submit(ticket, buffer=0, memory=memory, image=memory.reserve(0), plan=None)
    theirs[0].sendall(struct.pack("<Q", 1) + b"\xc1")
    assert ticket.finished.wait(30)
    writer.close(timeout_s=30)
    memory.close()
    theirs[0].close()
    assert ticket.outcome is not None
    assert ticket.outcome.error is not None
    assert "has an unknown message" in ticket.outcome.error.message


class Full(PosixStorage):
    """A disk without room for any file."""

    def write_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
        raise StorageError(f"cannot write: {path}: No space left on device")


def fail(root: Path, *, position: int) -> None:
    """End the job of a rank whose disk is full; the first one commits."""
    job = msgspec.structs.replace(JOB, position=position, rank=position)
    publish_failure(Full(root), job, FAILURE, committer=position == 0)


@pytest.mark.parametrize("position", [0, 2])
def test_a_wait_ends_when_a_rank_cannot_even_record_its_failure(
    tmp_path: Path, position: int
) -> None:
    """E2: on a disk without room for a record the others learn of it long before the deadline."""
    storage = PosixStorage(tmp_path)
    thread, outcomes = waiting(storage, msgspec.structs.replace(JOB, deadline_s=300.0))
    fail(tmp_path, position=position)
    thread.join(60)
    assert not thread.is_alive(), "it waits for the deadline"
    (outcome,) = outcomes
    assert outcome.error is not None
    assert "the save was discarded" in str(outcome.error.to_error())
    assert storage.list("") == []


def test_a_save_that_may_be_committed_is_not_discarded(tmp_path: Path) -> None:
    """E2: by the done-record of the rank that fails the committer may be at its end."""
    storage = PosixStorage(tmp_path)
    storage.make_dir(f"{JOB.directory}/{DONE_DIR}")
    storage.write_file(f"{JOB.directory}/{DONE_DIR}/00002.msgpack", b"")
    fail(tmp_path, position=2)
    assert storage.list("") == [JOB.directory]


class Refusing(PosixStorage):
    """A network file system that refuses looks at some names, as long as it has an error."""

    def __init__(self, root: Path, *, prefix: str, code: int) -> None:
        super().__init__(root)
        self.prefix = prefix
        self.code: int | None = code
        self.num_refused = 0

    def _refuse(self, path: str) -> None:
        if self.code is not None and path.startswith(self.prefix):
            self.num_refused += 1
            error = OSError(self.code, os.strerror(self.code))
            raise storage_error(error, action="examine", place=Path(path)) from error

    def list(self, path: str) -> list[str]:
        self._refuse(path)
        return super().list(path)

    def size(self, path: str) -> int:
        self._refuse(path)
        return super().size(path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("prefix", [".saving-", FINAL])
def test_a_committed_save_is_committed_for_a_rank_whose_looks_are_refused_for_a_moment(
    tmp_path: Path, prefix: str, code: int
) -> None:
    """P27: a look that fails is no answer; the next one is."""
    storage = Refusing(tmp_path, prefix=prefix, code=code)
    thread, outcomes = waiting(storage, msgspec.structs.replace(JOB, deadline_s=300.0))
    storage.write_file(f"{JOB.directory}/manifest.json", MANIFEST_OF_JOB)
    if prefix == FINAL:
        storage.rename_dir(JOB.directory, FINAL)
    wait_until(lambda: storage.num_refused > 2)
    if prefix != FINAL:
        storage.rename_dir(JOB.directory, FINAL)
    storage.code = None
    thread.join(60)
    assert [outcome.error for outcome in outcomes] == [None]


@pytest.mark.parametrize("code", [errno.EACCES, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_save_whose_end_cannot_be_seen_is_not_called_discarded(tmp_path: Path, code: int) -> None:
    """P27: its directory is gone, and it may have its final name."""
    storage = Refusing(tmp_path, prefix=FINAL, code=code)
    thread, outcomes = waiting(storage, JOB)
    storage.write_file(f"{JOB.directory}/manifest.json", MANIFEST_OF_JOB)
    storage.rename_dir(JOB.directory, FINAL)
    thread.join(60)
    (outcome,) = outcomes
    assert outcome.error is not None
    message = str(outcome.error.to_error())
    assert "whether it is committed could not be seen within 1 s" in message
    assert os.strerror(code) in message
    assert storage.list("") == [FINAL], "a rank that waits makes no directory of its save again"


class Unwritable(Full):
    """A disk that is full as the data is written, when the committer has written its own."""

    def create(self, path: str, *, nbytes: int) -> Sink:
        directory = path.partition("/")[0]
        wait_until(lambda: self.exists(f"{directory}/{DONE_DIR}/00000.msgpack"))
        raise StorageError(f"cannot write: {path}: No space left on device")


def _saved_on_full_disks(context: RankContext, root: str) -> str:
    """What ranks read of a save of which a rank that does not commit can write nothing."""
    storage = (PosixStorage if context.rank == 0 else Unwritable)(root)
    state = {"w": Sharded(torch.ones(4), shape=(8,), dims={0: "dp"})}
    with (
        ProcessGroups.create(Layout(dp=2)) as groups,
        Checkpointer(storage, groups=groups, deadline_s=60) as checkpointer,
    ):
        pending = checkpointer.save_async(1, {"m": state})
        with pytest.raises(StorageError) as caught:
            pending.result()
    return str(caught.value)


def test_the_committer_learns_of_a_rank_that_can_write_nothing(tmp_path: Path) -> None:
    """E2: it waits for a record in a directory that is gone, and asks the groups' store why."""
    first, second = run_ranks(2, _saved_on_full_disks, str(tmp_path)).results
    assert first.startswith("rank 1: ")
    assert all("No space left on device" in each for each in (first, second))


def test_a_failure_is_not_published_in_another_root(tmp_path: Path) -> None:
    """R6: where the root is not mounted, no directory is made in its place."""
    for job, is_there in ((msgspec.structs.replace(JOB, root="5" * 32), False), (JOB, True)):
        publish_failure(PosixStorage(tmp_path), job, FAILURE, committer=False)
        assert any(tmp_path.iterdir()) == is_there

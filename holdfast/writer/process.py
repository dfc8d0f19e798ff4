"""The writer process, which runs the jobs of one trainer; and the messages between the two.

Run as `python -m holdfast.writer.process FD ROOT`. It is torch-free, runs in its own session, has
no communicator, and finishes every job that it has received, even if the trainer is gone. Messages
go over a local socket, together with the file descriptors of staging memory.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage import PosixStorage, Storage, is_url, open_storage
from holdfast.writer.job import run_job
from holdfast.writer.keeper import TRAINERS_SIGNALS, become_keeper, keep_newest
from holdfast.writer.records import EncodedPlan, KeepImage, SaveOutcome, WriteJob, decode_plan
from holdfast.writer.sealed_image import open_for_reading

PLANS_KEPT = 2
_PROGRESS_S = 0.2
_LENGTH = struct.Struct("<Q")


class MapMemory(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: the memory of a staging buffer; sent with its descriptor."""

    buffer: int
    nbytes: int


class KeepPlan(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: a commit plan, sent once; jobs name it by its digest."""

    digest: str
    plan: bytes


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: write the first `nbytes` of a buffer; commit the save if `commits`.

    `place` has device and inode of the root as the trainer knows it, see `RootPlace`.
    """

    job: WriteJob
    buffer: int
    nbytes: int
    commits: bool
    place: tuple[int, int] = (-1, -1)


class OpenBucket(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer, before all others: the settings of a storage that a URL leads to.

    They may have a credential, and every user of a host can read a command line.
    """

    settings: dict[str, Any]


class JobProgress(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: the bytes of a save that were passed to storage so far."""

    save_id: str
    nbytes: int


class JobWritten(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: the buffer's bytes are durable; it may be reused."""

    save_id: str


class JobFinished(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: the outcome of a save."""

    outcome: SaveOutcome


Message = (
    OpenBucket | MapMemory | KeepPlan | RunJob | KeepImage | JobProgress | JobWritten | JobFinished
)


class Connection:
    """Messages over a stream socket; one thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message and descriptors with its first byte; OSError if the peer is gone."""
        data = msgspec.msgpack.encode(message)
        head = _LENGTH.pack(len(data))
        if descriptors:
            socket.send_fds(self._socket, [head], list(descriptors))
        else:
            self._socket.sendall(head)
        self._socket.sendall(data)

    def receive(self) -> tuple[Message | None, list[int]]:
        """Return the next message and its descriptors; None if the other end is gone."""
        try:
            # Exactly the length is read here: a longer read might return bytes of the next message,
            # or merge the descriptors of two.
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 4)
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if len(head) < _LENGTH.size:
                return None, []
            data = self._read(_LENGTH.unpack(head)[0])
        except OSError:
            return None, []
        try:
            return decode_msgpack_as(data, Message), descriptors
        except msgspec.DecodeError as error:
            raise StorageError(f"the writer's socket has an unknown message: {error}") from error

    def _read(self, nbytes: int) -> bytes:
        """Return exactly `nbytes`; OSError if the stream ends before that."""
        data = bytearray()
        while len(data) < nbytes:
            chunk = self._socket.recv(min(nbytes - len(data), 1 << 20))
            if not chunk:
                raise ConnectionResetError("the other end has closed the stream")
            data += chunk
        return bytes(data)

    def shutdown(self) -> None:
        """Announce that nothing more will be sent; messages can still be received."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        """Announce that nothing more will be received: what the other end sends, fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class _MappedBuffer(NamedTuple):
    """A staging buffer as the writer has it: mapped for reading, and its descriptor."""

    memory: mmap.mmap
    fd: int


class WriterServer:
    """State of one writer process: its storage, mapped staging buffers and plans."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._buffers: dict[int, _MappedBuffer] = {}
        self._to_keep: dict[int, KeepImage] = {}
        self._plans: OrderedDict[str, EncodedPlan] = OrderedDict()

    def serve(self) -> None:
        """Receive until the trainer closes its end or dies; finish every job received."""
        while True:
            message, descriptors = self._connection.receive()
            if message is None:
                return
            if isinstance(message, MapMemory):
                self._map(message, descriptors[0])
            elif isinstance(message, KeepPlan):
                self._plans[message.digest] = decode_plan(message.plan, where="plan")
                while len(self._plans) > PLANS_KEPT:
                    self._plans.popitem(last=False)
            elif isinstance(message, RunJob):
                with ExitStack() as locks:
                    for descriptor in descriptors:
                        locks.callback(os.close, descriptor)
                    self._run(message, on_begun=locks.close)
            elif isinstance(message, KeepImage):
                self._to_keep[message.buffer] = message

    def give_images(self) -> dict[int, KeepImage]:
        """Unmap all buffers; return what the trainer wants kept of them, by descriptor."""
        images = {}
        for number, buffer in self._buffers.items():
            # A view of a failed job may be left, which is for reading and in nobody's way.
            with suppress(BufferError):
                buffer.memory.close()
            if number in self._to_keep:
                images[buffer.fd] = self._to_keep[number]
            else:
                os.close(buffer.fd)
        self._buffers.clear()
        return images

    def _map(self, message: MapMemory, fd: int) -> None:
        """Map a staging buffer so that it can be sealed, which its descriptor is kept for."""
        try:
            reader = open_for_reading(fd)
        except OSError:  # no /proc: it can be written to storage all the same
            reader = os.dup(fd)
        memory = mmap.mmap(reader, message.nbytes, prot=mmap.PROT_READ)
        os.close(reader)
        replaced = self._buffers.get(message.buffer)
        self._buffers[message.buffer] = _MappedBuffer(memory, fd)
        # What was to be kept of the old memory is not in the new one.
        self._to_keep.pop(message.buffer, None)
        if replaced is not None:
            os.close(replaced.fd)  # its memory is unmapped with its last view

    def _run(self, message: RunJob, *, on_begun: Callable[[], None]) -> None:
        """Run one job and report its outcome."""
        job = message.job
        if isinstance(self._storage, PosixStorage):
            device, inode = message.place
            self._storage.place.expect(device=device, inode=inode)
        image = memoryview(self._buffers[message.buffer].memory)[: message.nbytes]
        outcome = run_job(
            self._storage,
            job,
            image,
            plan=self._plans[job.plan_digest] if message.commits else None,
            on_begun=on_begun,
            on_progress=self._progress(job.header.save_id),
            on_written=lambda: self._report(JobWritten(job.header.save_id)),
        )
        image.release()
        if not self._report(JobFinished(outcome)):
            # The trainer is gone: the outcome goes to the log that both processes share.
            error = outcome.error
            result = "was committed" if error is None else f"failed: {error.message}"
            with suppress(OSError):
                print(f"holdfast writer: {outcome.directory} {result}", file=sys.stderr, flush=True)

    def _progress(self, save_id: str) -> Callable[[int], None]:
        """Return a callback that reports written bytes a few times a second at most."""
        last = time.monotonic()

        def report(nbytes: int) -> None:
            nonlocal last
            if time.monotonic() - last > _PROGRESS_S:
                last = time.monotonic()
                self._report(JobProgress(save_id, nbytes))

        return report

    def _report(self, message: JobProgress | JobWritten | JobFinished) -> bool:
        """Send to the trainer; return False if it is gone, which changes nothing here."""
        try:
            self._connection.send(message)
        except OSError:
            return False
        return True


def _open_storage(connection: Connection, root: str) -> Storage:
    """Return the storage of a directory, or of a URL, whose settings come first."""
    if not is_url(root):
        return PosixStorage(Path(root))
    message, _ = connection.receive()
    settings = message.settings if isinstance(message, OpenBucket) else {}
    return open_storage(root, **settings)


def main(arguments: list[str]) -> int:
    """Serve the socket with the descriptor `arguments[0]` for the root `arguments[1]`."""
    # A save must finish, and these signals are meant for the trainer.
    for number in TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINERS_SIGNALS)
    connection = Connection(socket.socket(fileno=int(arguments[0])))
    try:
        storage = _open_storage(connection, arguments[1])
        server = WriterServer(connection, storage)
        server.serve()
        images = server.give_images()
        # A process of its own, so that this one ends as if it had nothing to keep.
        if images and os.fork() == 0:
            connection.close()
            become_keeper()
            keep_newest(storage, images)
    except HoldfastError as error:
        print(f"holdfast writer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What trainer and writer process say to each other, over a local socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

import msgspec

from holdfast.errors import StorageError
from holdfast.writer.job import SaveOutcome
from holdfast.writer.write import WriteJob

_LENGTH = struct.Struct("<Q")


class ArenaGiven(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: the memory of a slot; its descriptor comes with the frame."""

    slot: int
    nbytes: int


class PlanGiven(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: a commit plan, once; jobs name it by digest."""

    digest: str
    plan: bytes


class JobGiven(msgspec.Struct, frozen=True, tag=True):
    """Trainer to writer: bring the first `nbytes` of a slot to storage; commit if told to."""

    job: WriteJob
    slot: int
    nbytes: int
    commits: bool


class Written(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: the slot's bytes are durable, it may be staged into again."""

    save_id: str


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: so many bytes of a save have been handed to storage."""

    save_id: str
    nbytes: int


class OutcomeTold(msgspec.Struct, frozen=True, tag=True):
    """Writer to trainer: what came of a save."""

    outcome: SaveOutcome


Frame = ArenaGiven | PlanGiven | JobGiven | Progressed | Written | OutcomeTold


class Connection:
    """Frames over a stream socket; one thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, frame: Frame, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, descriptors with its first byte; OSError when the other end is gone."""
        data = msgspec.msgpack.encode(frame)
        head = _LENGTH.pack(len(data))
        if descriptors:
            socket.send_fds(self._socket, [head], list(descriptors))
        else:
            self._socket.sendall(head)
        self._socket.sendall(data)

    def receive(self) -> tuple[Frame | None, list[int]]:
        """The next frame and its descriptors; None when the other end is gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 4)
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if len(head) < _LENGTH.size:
                return None, []
            data = self._read(_LENGTH.unpack(head)[0])
        except OSError:
            return None, []
        try:
            return msgspec.msgpack.decode(data, type=Frame), descriptors
        except msgspec.DecodeError as error:
            raise StorageError(f"the writer's socket carries something else: {error}") from error

    def _read(self, nbytes: int) -> bytes:
        """Exactly `nbytes`; OSError when the stream ends before."""
        parts = bytearray()
        while len(parts) < nbytes:
            part = self._socket.recv(min(nbytes - len(parts), 1 << 20))
            if not part:
                raise ConnectionResetError("the other end closed the stream")
            parts += part
        return bytes(parts)

    def shutdown(self) -> None:
        """Say that nothing more will be sent; frames can still be received."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

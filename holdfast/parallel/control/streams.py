"""Messages of one connection between two ranks, in one direction, as bytes on the wire.

A message is its length in 8 bytes, then its bytes. Both ends know the lengths before, so nothing is
allocated for what arrives, and a different length shows that the ranks are out of sync. The
receiver never answers.

A transfer that a deadline, an error or an interrupt ends midway leaves the stream inside a message:
the next bytes would be taken for something else. So such a stream refuses every further transfer,
and the other end sees the connection close.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from select import POLLIN, POLLOUT

_LENGTH = struct.Struct("<Q")
_MAX_VIEWS = 64
"""Buffers in one system call: small messages are not worth a call each."""


class OutgoingStream:
    """Messages to one rank; `IncomingStream` is the other end.

    Args:
        connection: connected, and not blocking.
    """

    events = POLLOUT
    """The event to poll its socket for."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._views: deque[memoryview] = deque()
        """Bytes that the socket has not taken."""

    def start(self, messages: Iterable[memoryview]) -> None:
        """Queue the messages of a transfer; ConnectionError if an earlier one was left midway."""
        _refuse_midway(self._views)
        for data in messages:
            self._views += (memoryview(_LENGTH.pack(len(data))), data)

    def advance(self) -> bool:
        """Send what the socket takes now; return True if everything was sent."""
        while self._views:
            try:
                nbytes = self.connection.sendmsg(list(islice(self._views, _MAX_VIEWS)))
            except BlockingIOError:
                return False
            _drop(self._views, nbytes)
        return True

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        _close(self.connection)


class IncomingStream:
    """Messages from one rank, into memory of the lengths expected."""

    events = POLLIN
    """The event to poll its socket for."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        """None until the rank has connected."""
        self._views: deque[memoryview] = deque()
        """Memory for the next bytes of the stream, in order."""
        self._lengths: deque[tuple[bytearray, int]] = deque()
        """For each message whose length has not arrived: memory for it, and the length expected."""

    def start(self, messages: Iterable[memoryview]) -> None:
        """Expect messages of a transfer; ConnectionError if an earlier one was left midway."""
        _refuse_midway(self._views)
        for data in messages:
            length = bytearray(_LENGTH.size)
            self._lengths.append((length, len(data)))
            self._views += (memoryview(length), data)

    def advance(self) -> bool:
        """Receive what the socket has now; return True if everything has arrived.

        Raises:
            ConnectionError: The stream has ended, or a message has another length.
        """
        while self._views:
            if self.connection is None:
                return False
            try:
                nbytes = self.connection.recvmsg_into(list(islice(self._views, _MAX_VIEWS)))[0]
            except BlockingIOError:
                return False
            if not nbytes:  # the end of the stream, as the buffers have room
                raise ConnectionResetError("the other rank closed the connection")
            _drop(self._views, nbytes, each=self._check_length)
        return True

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            _close(self.connection)

    def _check_length(self, view: memoryview) -> None:
        """Raise ConnectionError if this full buffer is a length, and not the one expected."""
        if self._lengths and view.obj is self._lengths[0][0]:
            received, expected = self._lengths.popleft()
            (length,) = _LENGTH.unpack(received)
            if length != expected:
                raise ConnectionError(f"a message has {length} bytes, expected {expected}")


Stream = OutgoingStream | IncomingStream


def _refuse_midway(views: deque[memoryview]) -> None:
    """Raise ConnectionError if a transfer did not finish: nothing may follow it."""
    if views:
        raise ConnectionError("an earlier transfer on this connection was left midway")


def _drop(
    views: deque[memoryview], nbytes: int, *, each: Callable[[memoryview], None] | None = None
) -> None:
    """Remove the first bytes of buffers, and call `each` with every buffer that is complete."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views[0])
        if each is not None:
            each(views[0])  # before it is removed: if it raises, the stream counts as midway
        views.popleft()
    if nbytes:
        views[0] = views[0][nbytes:]


def _close(connection: socket.socket) -> None:
    """End a connection for both sides."""
    # `close` alone would leave it open: processes forked from this one hold the descriptor, too.
    # The sending side is enough: the end follows what was sent, which still arrives.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    connection.close()

"""TCP connections between ranks, made when one first sends to another.

Why not gloo: it connects every rank with every other, which takes ranks + 3 descriptors of each,
and in its lazy mode a communicator with a failed operation cannot be destroyed: gloo waits until
its connections are silent, and one with bytes that nothing will read never is.

A connection carries messages in one direction. Nothing runs in the background:
connections are accepted while a transfer waits, so a rank that makes no call costs no thread.

A message is its length in 8 bytes, then its bytes. Both ends know the lengths before, so nothing is
allocated for what arrives, and a different length shows that the ranks are out of sync. The
receiver never answers.

A transfer that a deadline, an error or an interrupt ends midway leaves the stream inside a message:
the next bytes would be taken for something else. So such a stream refuses every further transfer,
and the other end sees the connection close.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from holdfast.errors import GroupError
from holdfast.parallel.bounded_store import BoundedStore, StoreSilentError
from holdfast.parallel.control.addresses import own_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LONG_S = 1.0
"""A wait that has lasted so long is noted for ranks that look."""
_MOST_S = 8.0
"""Up to this a wait looks twice as late each time: many ranks may wait long for one."""
_LENGTH = struct.Struct("<Q")
_MAX_VIEWS = 64
"""Buffers in one system call: small messages are not worth a call each."""
_TOKEN_NBYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_NBYTES}sI")
"""The first bytes on a connection: the receiver's token, and the sender's index."""
_MAX_UNNAMED = 128
"""Connections that have not named their rank yet; a rank does so at once."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_BACKLOG = 4096
"""Connections that wait to be accepted: all ranks may connect before this one makes a call."""


class LateError(Exception):
    """A transfer is not complete at its deadline; `indices` are those of the ranks it waits for."""

    def __init__(self, message: str, indices: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.indices = frozenset(indices)


class OutgoingStream:
    """Messages to one rank; `IncomingStream` is the other end.

    Args:
        connection: connected, and not blocking.
    """

    events = select.POLLOUT
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

    events = select.POLLIN
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


class Connections:
    """This rank's listening socket, and its connections by index in the layout.

    Args:
        index: of this rank.
        store: every rank leaves the address of its socket there.

    Cost: one descriptor, and one for each rank sent to or received from; one request to the store
    for each rank sent to.
    """

    def __init__(self, *, index: int, store: Store) -> None:
        self._index = index
        self._store = BoundedStore.of(store)
        # Only ranks that read the store know it: a scan of ports cannot pass for a rank, nor a rank
        # of another run whose peer had this port.
        self._token = secrets.token_bytes(_TOKEN_NBYTES)
        family, host = own_address(self._store.host)
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        # `_accept` takes every connection that waits, and must not wait for the next.
        self._listener.setblocking(False)
        self._unnamed: dict[socket.socket, bytearray] = {}
        """Accepted connections, with the part of their hello that has arrived."""
        self._from: dict[int, IncomingStream] = {}
        self._to: dict[int, OutgoingStream] = {}
        self.after_s = LONG_S
        """Seconds of one wait after which `when_long` is called."""
        self.when_long: Callable[[], bool] | None = None
        """Called again, later each time, if it returns False: there may be something to do yet."""
        # Last: a rank that finds the address can connect.
        port = self._listener.getsockname()[1]
        try:
            self._store.set(f"address/{index}", f"{self._token.hex()} {port} {host}")
        except RuntimeError as error:
            self._listener.close()
            raise GroupError(f"The c10d store did not take this rank's address: {error}") from error

    def close(self) -> None:
        """End all connections; what was sent still arrives."""
        streams: list[Stream] = [*self._to.values(), *self._from.values()]
        for stream in streams:
            stream.close()
        for unused in (self._listener, *self._unnamed):
            unused.close()
        self.when_long = None  # of who has these connections: no reference cycle stays

    def connect(self, indices: Iterable[int], deadline: float) -> None:
        """Connect to ranks that this one will send to.

        Raises:
            OSError: One has left, or cannot be reached.
            LateError: The deadline passed.
            RuntimeError: The store is gone.
        """
        for index in indices:
            if index not in self._to:
                self._to[index] = self._connect(index, deadline)

    def transfer(
        self,
        outgoing: Sequence[tuple[int, memoryview]],
        incoming: Sequence[tuple[int, memoryview]],
        deadline: float,
    ) -> None:
        """Send and receive each (index, bytes), all in flight at once.

        Messages of one sender arrive in the order in which they were sent. They may still be on
        their way when this returns. A connection that an error leaves midway carries nothing any
        more; `close` lets the others know before their deadlines.

        Raises:
            OSError: A connection broke, or carries a message of another length.
            LateError: The deadline passed.
        """
        sending, receiving = _by_index(outgoing), _by_index(incoming)
        self.connect(sending, deadline)
        streams: list[Stream] = []
        for index, messages in sending.items():
            streams.append(self._to[index])
            self._to[index].start(messages)
        for index, messages in receiving.items():
            streams.append(self._from.setdefault(index, IncomingStream()))
            self._from[index].start(messages)
        # All streams at once, in both directions: two ranks that both sent first would wait for
        # each other once their sockets are full.
        while streams := [stream for stream in streams if not stream.advance()]:
            if not self._wait(streams, deadline):
                indices = [
                    index
                    for table in (self._to, self._from)
                    for index, stream in table.items()
                    if stream in streams
                ]
                raise LateError("the time is over", indices)

    def _wait(self, streams: Sequence[Stream], deadline: float) -> bool:
        """Sleep until a stream of a transfer can continue, and accept connections.

        Returns False at the deadline.
        """
        poll = select.poll()  # epoll would take a descriptor for each call
        for stream in streams:
            if stream.connection is not None:
                poll.register(stream.connection, stream.events)
            else:
                # Only the hello will tell which of those who connect it is.
                for each in (self._listener, *self._unnamed):
                    poll.register(each, select.POLLIN)
        left = deadline - time.monotonic()
        after_s = self.after_s
        while self.when_long is not None and left > after_s:
            is_done = bool(poll.poll(math.ceil(after_s * 1000))) or self.when_long()
            after_s, left = min(2 * after_s, _MOST_S), deadline - time.monotonic()
            if is_done:
                break
        # Rounded up: a wait of less than a millisecond would spin.
        if left <= 0 or not poll.poll(math.ceil(left * 1000)):
            return False
        self._accept()
        return True

    def _accept(self) -> None:
        """Accept the connections that wait, and read which ranks they are from.

        Of those that do not say who they are only the newest few are kept: a host that fills
        this process's table of descriptors from outside must not end the control plane.
        """
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR or not self._drop_oldest():
                    raise
                continue
            accepted.setblocking(False)
            self._unnamed[accepted] = bytearray()
            if len(self._unnamed) > _MAX_UNNAMED:
                self._read_hellos()
                if len(self._unnamed) > _MAX_UNNAMED:
                    self._drop_oldest()
        self._read_hellos()

    def _drop_oldest(self) -> bool:
        """Close the unnamed connection that has waited longest; return False if there are none."""
        oldest = next(iter(self._unnamed), None)
        if oldest is None:
            return False
        del self._unnamed[oldest]
        oldest.close()
        return True

    def _read_hellos(self) -> None:
        """Read from unnamed connections which ranks they are from; close those of strangers."""
        for each, hello in list(self._unnamed.items()):
            try:
                # Not a byte more: the first message follows the hello, and its stream reads it.
                data = each.recv(_HELLO.size - len(hello))
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            hello += data
            if data and len(hello) < _HELLO.size:
                continue
            del self._unnamed[each]
            token, index = _HELLO.unpack(hello) if data else (b"", 0)
            if not secrets.compare_digest(token, self._token):
                each.close()  # a stranger, see `_token`
                continue
            stream = self._from.setdefault(index, IncomingStream())
            if stream.connection is None:
                stream.connection = each
            else:
                each.close()

    def _address(self, index: int, deadline: float) -> str:
        """Return the address that a rank has left; LateError if the store does not answer."""
        try:
            with self._store.within(deadline - time.monotonic()):
                return self._store.get(f"address/{index}").decode()
        except StoreSilentError as error:
            raise LateError(f"the address of the peer could not be had: {error}") from error

    def _connect(self, index: int, deadline: float) -> OutgoingStream:
        """Connect to a rank; all ranks left their addresses before they met to use `control`."""
        token, port, host = self._address(index, deadline).split()
        left = max(deadline - time.monotonic(), 0.001)  # 0 would mean a non-blocking socket
        try:
            made = socket.create_connection((host, int(port)), timeout=left)
        except TimeoutError:
            raise LateError(f"no connection to {host} port {port}") from None
        except OSError as error:
            raise ConnectionError(f"no connection to {host} port {port}: {error}") from error
        # Frames are small, and the other rank waits for each of them.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(_HELLO.pack(bytes.fromhex(token), self._index))  # fits any buffer
        made.setblocking(False)
        return OutgoingStream(made)


def _by_index(messages: Iterable[tuple[int, memoryview]]) -> Mapping[int, Sequence[memoryview]]:
    """Return the messages of each index, in order."""
    of_index: dict[int, list[memoryview]] = {}
    for index, data in messages:
        of_index.setdefault(index, []).append(data)
    return of_index

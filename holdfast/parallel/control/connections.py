"""TCP connections between ranks, made when one first sends to another.

Why not gloo: it connects every rank with every other, which takes ranks + 3 descriptors of each,
and in its lazy mode a communicator with a failed operation cannot be destroyed: gloo waits until
its connections are silent, and one with bytes that nothing will read never is.

A connection carries messages in one direction, each after its length. Nothing runs in the
background: connections are accepted while a transfer waits.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from holdfast.parallel.control.addresses import own_address

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_TOKEN_NBYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_NBYTES}sI")
"""First on a connection: the receiver's token, and the sender's index."""
_LENGTH = struct.Struct("<Q")
_BACKLOG = 4096
_MAX_VIEWS = 64
"""Buffers in one system call."""


class LateError(Exception):
    """A transfer was not complete at its deadline."""


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
        self._store = store
        self._token = secrets.token_bytes(_TOKEN_NBYTES)
        family, host = own_address(store)
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._unnamed: dict[socket.socket, bytearray] = {}
        """Accepted, but they have not sent their whole hello."""
        self._from: dict[int, socket.socket] = {}
        self._to: dict[int, socket.socket] = {}
        port = self._listener.getsockname()[1]
        store.set(f"address/{index}", f"{self._token.hex()} {port} {host}")

    def close(self) -> None:
        """End all connections; what was sent still arrives."""
        for sending in self._to.values():
            # Descriptors that a forked process inherited would keep the connection open.
            with contextlib.suppress(OSError):
                sending.shutdown(socket.SHUT_WR)
        for each in (self._listener, *self._unnamed, *self._from.values(), *self._to.values()):
            each.close()

    def connect(self, indices: Iterable[int], deadline: float) -> None:
        """Connect to ranks that this one will send to.

        Raises:
            OSError: One is not there (any more), or cannot be reached.
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

        Messages of one sender arrive in the order in which they were sent.

        Raises:
            OSError: A connection broke, or carries a message of another length.
            LateError: The deadline passed.
        """
        sending: dict[int, _Stream] = {}
        receiving: dict[int, _Stream] = {}
        for index, data in outgoing:
            sending.setdefault(index, _Outgoing()).add(data)
        for index, data in incoming:
            receiving.setdefault(index, _Incoming()).add(data)
        self.connect(sending, deadline)
        with selectors.PollSelector() as selector:  # without a descriptor of its own
            while self._advance(sending, self._to) | self._advance(receiving, self._from):
                self._wait(selector, sending, receiving, deadline)

    def _advance(self, messages: dict[int, _Stream], sockets: dict[int, socket.socket]) -> bool:
        """Move what can be moved now; whether any is left."""
        for index in [i for i in messages if i in sockets]:
            if messages[index].advance(sockets[index]):
                del messages[index]
        return bool(messages)

    def _wait(
        self,
        selector: selectors.PollSelector,
        sending: Iterable[int],
        receiving: Iterable[int],
        deadline: float,
    ) -> None:
        """Sleep until a socket of a transfer is ready, and accept."""
        watched = {self._to[index]: selectors.EVENT_WRITE for index in sending}
        if any(index not in self._from for index in receiving):
            watched |= dict.fromkeys((self._listener, *self._unnamed), selectors.EVENT_READ)
        watched |= {self._from[i]: selectors.EVENT_READ for i in receiving if i in self._from}
        for done in [key.fileobj for key in selector.get_map().values()]:
            if done not in watched:
                selector.unregister(done)
        for each, events in watched.items():
            if each not in selector.get_map():
                selector.register(each, events)
        left = deadline - time.monotonic()
        if left <= 0 or not selector.select(left):
            raise LateError("the time is over")
        self._accept()

    def _accept(self) -> None:
        """Take the connections that are there, and read who they are from."""
        with contextlib.suppress(BlockingIOError):
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                self._unnamed[accepted] = bytearray()
        for each, hello in list(self._unnamed.items()):
            try:
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
            if secrets.compare_digest(token, self._token) and index not in self._from:
                self._from[index] = each
            else:
                each.close()  # of somebody else

    def _connect(self, index: int, deadline: float) -> socket.socket:
        """A connection to a rank, which left its address before this one could use `control`."""
        token, port, host = self._store.get(f"address/{index}").decode().split()
        left = max(deadline - time.monotonic(), 0.001)
        try:
            made = socket.create_connection((host, int(port)), timeout=left)
        except TimeoutError:
            raise LateError(f"no connection to {host} port {port}") from None
        except OSError as error:
            raise ConnectionError(f"no connection to {host} port {port}: {error}") from error
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(_HELLO.pack(bytes.fromhex(token), self._index))  # fits any buffer
        made.setblocking(False)
        return made


class _Stream:
    """Messages of one connection that are not through, as the buffers that are left of them."""

    def __init__(self) -> None:
        self._views: deque[memoryview] = deque()

    def add(self, data: memoryview) -> None:
        """One more."""
        raise NotImplementedError

    def advance(self, connection: socket.socket) -> bool:
        """Move what the socket takes or has; whether all are through."""
        while self._views:
            views = list(islice(self._views, _MAX_VIEWS))
            try:
                nbytes = self._move(connection, views)
            except BlockingIOError:
                return False
            while self._views and nbytes >= len(self._views[0]):
                nbytes -= len(self._views[0])
                self._complete(self._views.popleft())
            if nbytes:
                self._views[0] = self._views[0][nbytes:]
        return True

    def _move(self, connection: socket.socket, views: Sequence[memoryview]) -> int:
        """One system call; how many bytes it moved."""
        raise NotImplementedError

    def _complete(self, view: memoryview) -> None:
        """The last byte of a buffer was moved."""


class _Outgoing(_Stream):
    """Messages to one rank."""

    def add(self, data: memoryview) -> None:
        """Queue its length and its bytes."""
        self._views += (memoryview(_LENGTH.pack(len(data))), data)

    def _move(self, connection: socket.socket, views: Sequence[memoryview]) -> int:
        """Send."""
        return connection.sendmsg(views)


class _Incoming(_Stream):
    """Messages from one rank; their lengths have to be those expected."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths: deque[tuple[bytearray, int]] = deque()

    def add(self, data: memoryview) -> None:
        """Expect its length and its bytes."""
        length = bytearray(_LENGTH.size)
        self._lengths.append((length, len(data)))
        self._views += (memoryview(length), data)

    def _move(self, connection: socket.socket, views: Sequence[memoryview]) -> int:
        """Receive; ConnectionError at the end of the stream."""
        nbytes = connection.recvmsg_into(views)[0]
        if not nbytes:
            raise ConnectionResetError("the other rank closed the connection")
        return nbytes

    def _complete(self, view: memoryview) -> None:
        """Compare a length as soon as it is there."""
        if self._lengths and view.obj is self._lengths[0][0]:
            received, expected = self._lengths.popleft()
            (length,) = _LENGTH.unpack(received)
            if length != expected:
                raise ConnectionError(f"a message of {length} bytes in place of {expected}")

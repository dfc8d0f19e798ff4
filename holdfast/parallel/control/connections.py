"""TCP connections between ranks, made when one first sends to another.

Why not gloo: it connects every rank with every other, which takes ranks + 3 descriptors of each,
and in its lazy mode a communicator with a failed operation cannot be destroyed: gloo waits until
its connections are silent, and one with bytes that nothing will read never is.

A connection carries messages in one direction (`streams`). Nothing runs in the background:
connections are accepted while a transfer waits, so a rank that makes no call costs no thread.
"""

from __future__ import annotations

import errno
import math
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import GroupError
from holdfast.parallel.bounded_store import BoundedStore, StoreSilentError
from holdfast.parallel.control.addresses import own_address
from holdfast.parallel.control.streams import IncomingStream, OutgoingStream, Stream

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

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
        family, host = own_address(store)
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        # `_accept` takes every connection that waits, and must not wait for the next.
        self._listener.setblocking(False)
        self._unnamed: dict[socket.socket, bytearray] = {}
        """Accepted connections, with the part of their hello that has arrived."""
        self._from: dict[int, IncomingStream] = {}
        self._to: dict[int, OutgoingStream] = {}
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

"""Messages of one connection between two ranks, in one direction: what is on the wire.

From the sender come frames, each after a head of 8 bytes, its kind and a length:

    DATA       the bytes of a message follow
    OFFER      where the message lies in the sender's memory follows (`cross_memory`)
    CONFIRM    nothing follows: the memory of the oldest message that was pulled, and is not
               confirmed yet, had not changed when the receiver's answer arrived

From the receiver comes one byte for each offer, in order: PULLED or REFUSED. Messages below
`LARGE_NBYTES`, those of small transfers, and all between hosts are DATA: length, bytes, no answer.

**An offered message has arrived when its CONFIRM has**, and not before. The sender writes it inside
the transfer that was given the memory, after it has read that the pull is over; and that transfer
does not return before. A sender that leaves a transfer in another way (deadline, interrupt, death)
never writes it, whatever has become of its memory or its process number in the meantime: the
receiver then sees the end of the connection, as it does where bytes are missing. A stream that was
left midway carries nothing any more.

After a refusal the receiver refuses every offer until bytes come; the sender, which sends no bytes
while an offer is open, then sends all refused messages as bytes, in order, and offers no more. Why
offers may be refused late, too: memory of some devices cannot be read by others.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from select import POLLIN, POLLOUT

from holdfast.parallel.control.cross_memory import (
    OFFER_NBYTES,
    SLICE_NBYTES,
    CrossMemory,
    Pull,
    RefusedError,
)

LARGE_NBYTES = 128 << 10
"""Messages from this size on may be offered: below it two copies take less than an offer does."""
WORTHWHILE_NBYTES = 1 << 20
"""A transfer offers large messages if it has as many bytes of them: answers take their time."""
_HEAD = struct.Struct("<Q")
_DATA, _OFFER, _CONFIRM = (kind << 62 for kind in range(3))
_LENGTH_BITS = (1 << 62) - 1
_REFUSED, _PULLED = b"\0\1"
_MAX_VIEWS = 64
"""Buffers in one system call."""
_AHEAD_NBYTES = 4096
"""Read at once where frames of a few bytes are expected; what is more is copied."""


class OutgoingStream:
    """Messages to one rank; `IncomingStream` is the other end.

    Args:
        connection: connected, and not blocking.
        memory: offers large messages, if the other rank is reached at this one's own address.
    """

    def __init__(self, connection: socket.socket, memory: CrossMemory) -> None:
        self.connection = connection
        self._memory = memory
        # Another process may still refuse; a rank elsewhere is not even given the choice.
        is_near = connection.getpeername()[0] == connection.getsockname()[0]
        self._may_offer = memory.is_on and is_near
        self._offers = False
        """In this transfer."""
        self._messages: deque[memoryview] = deque()
        """Not begun."""
        self._views: deque[memoryview] = deque()
        """What the socket has not taken."""
        self._offered: deque[memoryview] = deque()
        """Offered and not answered. While there are any, no bytes of a message follow."""
        self._refused: list[memoryview] = []
        self._is_midway = False

    @property
    def is_busy(self) -> bool:
        """Whether it can go on without its socket."""
        return False

    @property
    def events(self) -> int:
        """What its socket has to be ready for."""
        return POLLIN * bool(self._offered) | POLLOUT * bool(self._views)

    def begin(self, messages: Iterable[memoryview]) -> None:
        """Queue the messages of a transfer; ConnectionError if an earlier one was left midway."""
        _refuse_midway(self._is_midway)
        self._is_midway = True
        self._messages.extend(messages)
        large = sum(len(data) for data in self._messages if len(data) >= LARGE_NBYTES)
        self._offers = self._may_offer and large >= WORTHWHILE_NBYTES

    def advance(self) -> bool:
        """Move what the socket takes; whether all is through."""
        self._take_answers()
        while True:
            self._make_frames()
            if not self._views:
                self._is_midway = bool(self._offered)
                return not self._is_midway
            try:
                nbytes = self.connection.sendmsg(list(islice(self._views, _MAX_VIEWS)))
            except BlockingIOError:
                return False
            _drop(self._views, nbytes)

    def close(self) -> None:
        """End the connection; what was sent still arrives."""
        _close(self.connection)

    def _make_frames(self) -> None:
        """Turn messages into frames, as many as one system call takes."""
        while self._messages and len(self._views) < _MAX_VIEWS:
            data = self._messages[0]
            nbytes = len(data)
            if self._offers and nbytes >= LARGE_NBYTES:
                self._views.append(memoryview(_HEAD.pack(_OFFER | nbytes)))
                self._views.append(memoryview(self._memory.offer(data)))
                self._offered.append(data)
            elif self._offered:
                return
            else:
                self._views += (memoryview(_HEAD.pack(_DATA | nbytes)), data)
            self._messages.popleft()

    def _take_answers(self) -> None:
        """Confirm what was pulled; send as bytes what was refused, when all offers are answered."""
        if not self._offered:
            return
        try:
            answers = self.connection.recv(len(self._offered))
        except BlockingIOError:
            return
        _check_end(len(answers))
        for answer in answers:
            data = self._offered.popleft()
            if answer == _PULLED:
                self._views.append(memoryview(_HEAD.pack(_CONFIRM)))
            else:
                self._offers = self._may_offer = False
                self._refused.append(data)
        if not self._offered:
            self._messages.extendleft(reversed(self._refused))
            self._refused.clear()


class IncomingStream:
    """Messages from one rank; their lengths have to be those expected.

    Args:
        memory: reads large messages where they lie.
    """

    def __init__(self, memory: CrossMemory) -> None:
        self._memory = memory
        self.connection: socket.socket | None = None
        """None until the rank has connected."""
        self._expected: deque[memoryview] = deque()
        """Messages of whose bytes none is in `_parts`."""
        self._parts: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        """What the next bytes of the stream go to, and what to do when it is full."""
        self._offers: deque[tuple[int, bytearray]] = deque()
        """Read and not answered: length, and where the message lies."""
        self._pull: Pull | None = None
        """Of the first expected message."""
        self._ahead = memoryview(b"")
        """Received, and not in `_parts` yet."""
        self._is_frame_next = False
        """Whether `_parts` is nothing but the head of a frame, or an offer."""
        self._num_unconfirmed = 0
        self._is_refusing = False
        """Whether the first expected message is to come as bytes after all."""
        self._answers = bytearray()
        self._is_midway = False

    @property
    def is_busy(self) -> bool:
        """Whether it can go on without its socket."""
        return self._pull is not None

    @property
    def events(self) -> int:
        """What its socket has to be ready for."""
        return POLLIN * (not self._has_arrived()) | POLLOUT * bool(self._answers)

    def begin(self, messages: Iterable[memoryview]) -> None:
        """Expect messages of a transfer; ConnectionError if an earlier one was left midway."""
        _refuse_midway(self._is_midway)
        self._is_midway = True
        self._expected.extend(messages)

    def advance(self) -> bool:
        """Move what the socket has, and pull what it has offers of; whether all is through."""
        if self.connection is None:
            return False
        budget = SLICE_NBYTES  # then other connections and the deadline have their turn
        while not self._has_arrived():
            self._open_offers()
            if self._pull is not None:
                if budget <= 0:
                    break
                budget -= self._advance_pull(self._pull, budget)
                continue
            self._make_parts()
            try:
                nbytes = self._receive(self.connection)
            except BlockingIOError:
                break
            self._complete(nbytes)
        # All at once: an answer for each would wake the sender as often.
        if self._answers:
            with contextlib.suppress(BlockingIOError):
                del self._answers[: self.connection.send(self._answers)]
        self._is_midway = not self._has_arrived() or bool(self._answers)
        return not self._is_midway

    def close(self) -> None:
        """End the connection."""
        if self.connection is not None:
            _close(self.connection)

    def _has_arrived(self) -> bool:
        """Whether every expected message is there and confirmed."""
        return not (self._expected or self._parts or self._num_unconfirmed)

    def _make_parts(self) -> None:
        """Lay out memory for the next frames, as far as it is known what they are."""
        if self._parts:
            return
        while self._expected and len(self._parts) < _MAX_VIEWS:
            # The next frame of a small message is its bytes: both in one system call.
            if self._num_unconfirmed or len(self._expected[0]) >= LARGE_NBYTES:
                break
            data = self._expected.popleft()
            head = bytearray(_HEAD.size)
            self._parts.append((memoryview(head), partial(_check_head, head, data)))
            self._parts.append((data, None))
        self._is_frame_next = not self._parts
        if self._is_frame_next:
            head = bytearray(_HEAD.size)
            self._parts.append((memoryview(head), partial(self._take_head, head)))

    def _receive(self, connection: socket.socket) -> int:
        """At most one system call; how many bytes of `_parts` it filled, maybe none.

        Raises:
            BlockingIOError: There is nothing now.
            ConnectionError: The stream has ended.
        """
        if not self._ahead and not self._is_frame_next:
            views = [view for view, _ in islice(self._parts, _MAX_VIEWS)]
            return _check_end(connection.recvmsg_into(views)[0])
        if not self._ahead:
            # Frames of a few bytes follow each other: not a system call for each.
            self._ahead = memoryview(connection.recv(_AHEAD_NBYTES))
            _check_end(len(self._ahead))
        view = self._parts[0][0]
        nbytes = min(len(view), len(self._ahead))
        view[:nbytes] = self._ahead[:nbytes]
        self._ahead = self._ahead[nbytes:]
        return nbytes

    def _complete(self, nbytes: int) -> None:
        """So many bytes have been received: act on what is full."""
        while self._parts and nbytes >= len(self._parts[0][0]):
            view, act = self._parts.popleft()
            nbytes -= len(view)
            if act is not None:
                act()
        if nbytes:
            view, act = self._parts[0]
            self._parts[0] = view[nbytes:], act

    def _take_head(self, head: bytearray) -> None:
        """Act on a frame whose kind was not known before."""
        (value,) = _HEAD.unpack(head)
        kind, nbytes = value & ~_LENGTH_BITS, value & _LENGTH_BITS
        if kind == _OFFER:
            offer = bytearray(OFFER_NBYTES)
            self._parts.append((memoryview(offer), lambda: self._offers.append((nbytes, offer))))
        elif kind == _CONFIRM and self._num_unconfirmed:
            self._num_unconfirmed -= 1
        elif kind == _DATA and self._expected:
            data = self._expected.popleft()
            _check_head(head, data)
            self._is_refusing = self._is_frame_next = False
            self._parts.append((data, None))
        else:
            raise ConnectionError(f"a frame of kind {kind >> 62} that nothing waits for")

    def _open_offers(self) -> None:
        """Begin to pull the first expected message; offers of later transfers wait for these."""
        while self._offers and self._pull is None and self._expected:
            nbytes, offer = self._offers.popleft()
            if self._is_refusing:
                self._answers.append(_REFUSED)
                continue
            target = self._expected[0]
            _check_length(nbytes, target)
            try:
                self._pull = self._memory.open(offer, target)
            except RefusedError:
                self._refuse()

    def _advance_pull(self, pull: Pull, max_nbytes: int) -> int:
        """Read the next bytes of the first expected message; how many."""
        try:
            nbytes = pull.advance(max_nbytes)
        except RefusedError:
            self._refuse()
            return 0
        if pull.is_complete:
            self._pull = None
            self._expected.popleft()
            self._num_unconfirmed += 1
            self._answers.append(_PULLED)
        return nbytes

    def _refuse(self) -> None:
        """Ask for the first expected message as bytes; they overwrite what was read of it."""
        self._pull = None
        self._is_refusing = True
        self._answers.append(_REFUSED)


Stream = OutgoingStream | IncomingStream


def _check_end(nbytes: int) -> int:
    """How many bytes came; ConnectionResetError if it was the end of the stream."""
    if not nbytes:
        raise ConnectionResetError("the other rank closed the connection")
    return nbytes


def _refuse_midway(is_midway: bool) -> None:
    """ConnectionError after a transfer that did not come to its end: nothing may follow it."""
    if is_midway:
        raise ConnectionError("an earlier transfer on this connection was left midway")


def _check_head(head: bytearray, data: memoryview) -> None:
    """ConnectionError unless the frame is the message that is expected."""
    (value,) = _HEAD.unpack(head)
    _check_length(value & _LENGTH_BITS, data)
    if value & ~_LENGTH_BITS != _DATA:
        raise ConnectionError(f"a frame of kind {value >> 62} in place of bytes")


def _check_length(nbytes: int, data: memoryview) -> None:
    """ConnectionError unless a message is as long as expected."""
    if nbytes != len(data):
        raise ConnectionError(f"a message of {nbytes} bytes in place of {len(data)}")


def _drop(views: deque[memoryview], nbytes: int) -> None:
    """Remove the first bytes of buffers."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.popleft())
    if nbytes:
        views[0] = views[0][nbytes:]


def _close(connection: socket.socket) -> None:
    """End a connection for both sides."""
    # Descriptors that a forked process inherited would keep the connection open.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    connection.close()

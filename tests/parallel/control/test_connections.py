"""Connections on which `control` moves bytes: order, lengths, strangers, ends, deadlines."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from holdfast.errors import DeadlineError, GroupError
from holdfast.parallel import Layout, ProcessGroups
from holdfast.parallel.bounded_store import BoundedStore
from holdfast.parallel.control import addresses
from holdfast.parallel.control.addresses import own_address
from holdfast.parallel.control.connections import Connections, LateError
from holdfast.parallel.control.transport import Transport
from tests.harness import RankContext, run_ranks


def in_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` gives or raises for each index, all at once."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = body(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds


def views(messages: list[tuple[int, bytes]]) -> list[tuple[int, memoryview]]:
    return [(index, memoryview(data)) for index, data in messages]


def test_random_messages_arrive_whole_and_in_order() -> None:
    """Against what was sent; from nothing to more than any socket holds, several to one rank."""
    draw = random.Random(4)
    sizes = (0, 1, 7, 8, 9, 640, 65_537, 3_000_000)
    sent = [
        [(to, draw.randbytes(draw.choice(sizes))) for to in draw.choices(range(4), k=9) if to != me]
        for me in range(4)
    ]
    store = HashStore()

    def exchange(me: int) -> list[bytes]:
        connections = Connections(index=me, store=store)
        buffers = [
            (other, bytearray(len(data)))
            for other in range(4)
            for to, data in sent[other]
            if to == me
        ]
        incoming = [(other, memoryview(buffer)) for other, buffer in buffers]
        connections.transfer(views(sent[me]), incoming, soon())
        connections.close()
        return [bytes(buffer) for _, buffer in buffers]

    for me, received in enumerate(in_threads(4, exchange)):
        assert received == [data for other in sent for to, data in other if to == me]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_every_rank_gets_every_row_and_the_root_s_bytes(size: int) -> None:
    store = HashStore()
    big = random.Random(size).randbytes(300_000)

    def collect(index: int) -> tuple[list[bytes], bytes, bytes, int]:
        transport = Transport(ranks=range(10, 10 + size), rank=10 + index, store=store, name="m")
        transport.start(1, "rows", 60)
        rows = transport.all_gather(b"%d" % index, 5)
        small = transport.broadcast(b"root" if index == 0 else None, 4)
        large = transport.broadcast(big if index == 0 else None, len(big))
        transport.start(2, "over", 60)
        transport.all_gather(b"", 1)
        transport.close()
        return rows, small, large, transport.num_collectives

    expected = [(b"%d" % index).ljust(5, b"\0") for index in range(size)]
    assert in_threads(size, collect) == [(expected, b"root", big, 4)] * size


@pytest.mark.parametrize("is_used", [False, True])
def test_a_closed_transport_says_so_and_connects_nowhere(is_used: bool) -> None:
    store = HashStore()

    def use(index: int) -> Transport:
        transport = Transport(ranks=range(2), rank=index, store=store, name="m")
        if is_used:
            transport.start(1, "used", 60)
            transport.all_gather(b"row", 3)
        return transport

    first, second = in_threads(2, use)
    first.close()
    first.close()
    first.start(2, "closed", 60)
    with pytest.raises(GroupError, match="is closed"):
        first.all_gather(b"row", 3)
    second.close()


def test_a_message_of_another_length_is_noticed() -> None:
    store = HashStore()

    def differ(me: int) -> None:
        connections = Connections(index=me, store=store)
        if me == 0:
            connections.transfer(views([(1, b"three"), (1, b"more")]), [], soon())
        else:
            connections.transfer([], [(0, memoryview(bytearray(9)))], soon())

    assert "a message has 5 bytes, expected 9" in str(in_threads(2, differ)[1])


def test_strangers_are_turned_away() -> None:
    """Somebody else's bytes, a connection without any, and one with a wrong token."""
    store = HashStore()
    receiver, sender = (Connections(index=index, store=store) for index in range(2))
    _, port, host = store.get("address/0").decode().split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
    strangers[1].sendall(bytes(16) + b"\1\0\0\0")
    sender.transfer(views([(0, b"hello")]), [], soon())
    buffer = bytearray(5)
    receiver.transfer([], [(1, memoryview(buffer))], soon())
    assert buffer == b"hello"
    for stranger in strangers[:2]:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):  # an end with bytes unread
            assert not stranger.recv(1), "an end"


def test_idle_connections_do_not_end_the_control_plane() -> None:
    """More of them than this process may have descriptors for: the oldest are dropped."""
    store = HashStore()
    receiver, sender = (Connections(index=index, store=store) for index in range(2))
    _, port, host = store.get("address/0").decode().split()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    # Both ends are in this process: room for all that connect, and for half of those accepted.
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 330, limits[1]))
    buffer = bytearray(5)
    idle: list[socket.socket] = []
    try:
        idle += [socket.create_connection((host, int(port))) for _ in range(250)]
        sender.transfer(views([(0, b"hello")]), [], soon())
        receiver.transfer([], [(1, memoryview(buffer))], soon())
        assert buffer == b"hello"
        assert len(os.listdir("/proc/self/fd")) <= num_open + 330
        idle[0].settimeout(5)
        assert not idle[0].recv(1), "the oldest one has been closed"
        sender.transfer(views([(0, b"again")]), [], soon())
        receiver.transfer([], [(1, memoryview(buffer))], soon())
        assert buffer == b"again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in (*idle, receiver, sender):
            each.close()


def test_a_rank_that_has_gone_is_an_end_and_one_that_does_not_send_is_late() -> None:
    store = HashStore()
    gone, silent, own = (Connections(index=index, store=store) for index in range(3))
    gone.transfer(views([(2, b"last words")]), [], soon())
    silent.transfer(views([(2, b"hello")]), [], soon())
    gone.close()
    buffers = [bytearray(10), bytearray(5)]
    own.transfer([], [(i, memoryview(b)) for i, b in enumerate(buffers)], soon())
    assert buffers == [b"last words", b"hello"], "what was sent before the end arrives"
    with pytest.raises(ConnectionResetError):
        own.transfer([], [(0, memoryview(bytearray(1)))], soon())
    with pytest.raises(LateError):
        own.transfer([], [(1, memoryview(bytearray(1)))], soon(0.2))
    with pytest.raises(ConnectionError, match=r"no connection to 127\.0\.0\.1 port"):
        own.connect([0], soon())


def test_one_that_does_not_read_is_late() -> None:
    store = HashStore()
    sender, _reader = (Connections(index=index, store=store) for index in range(2))
    with pytest.raises(LateError):
        sender.transfer(views([(1, bytes(50_000_000))]), [], soon(0.5))


def test_one_transfer_may_be_received_in_several() -> None:
    """What was read ahead of its transfer is kept for it; sources may be read-only."""
    store = HashStore()
    draw = random.Random(7)
    messages = [draw.randbytes(n) for n in (200_000, 1_000_000, 7, 8, 200_001, 0, 9)]

    def move(me: int) -> list[bytes]:
        connections = Connections(index=me, store=store)
        received = []
        if me == 0:
            connections.transfer(views([(1, data) for data in messages]), [], soon())
        for data in messages if me else ():
            target = bytearray(len(data))
            connections.transfer([], [(0, memoryview(target))], soon())
            received.append(bytes(target))
        connections.close()
        return received

    assert in_threads(2, move) == [[], messages]


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_connection_left_midway_carries_nothing_any_more(is_sender: bool) -> None:
    """G12: what a deadline or an interrupt left is never taken for the next message."""
    store = HashStore()
    first, second = (Connections(index=index, store=store) for index in range(2))
    large = bytes(50_000_000)
    if is_sender:
        with pytest.raises(LateError):
            first.transfer(views([(1, large)]), [], soon(0.2))
        with pytest.raises(ConnectionError, match="left midway"):
            first.transfer(views([(1, b"next")]), [], soon())
    else:
        first.transfer(views([(1, b"begins")]), [], soon())
        with pytest.raises(LateError):
            second.transfer([], [(0, memoryview(bytearray(n))) for n in (6, 4)], soon(0.2))
        first.transfer(views([(1, b"late")]), [], soon())
        with pytest.raises(ConnectionError, match="left midway"):
            second.transfer([], [(0, memoryview(bytearray(4)))], soon())
    first.close()
    buffer = memoryview(bytearray(len(large)))
    with pytest.raises(ConnectionError):
        second.transfer([], [(0, buffer)], soon())
    second.close()


# The address.


def test_the_address_is_of_the_named_interface_or_the_route_to_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_address("") == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(GroupError, match="'nothing0', which has no address"):
        own_address("")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert own_address(BoundedStore(HashStore()).host) == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    assert own_address("") == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address("") == (socket.AF_INET, "127.0.0.1")

    routes = {"node1": "127.0.1.1", addresses._ELSEWHERE: "10.0.0.7", "node2": "10.0.0.8"}
    monkeypatch.setattr(
        addresses, "_towards", lambda host: (socket.AF_INET, routes[host]) if host else None
    )
    monkeypatch.setenv("MASTER_ADDR", "node1")  # knows itself as a loopback address
    assert own_address("") == (socket.AF_INET, "10.0.0.7")
    monkeypatch.setenv("MASTER_ADDR", "node2")
    assert own_address("") == (socket.AF_INET, "10.0.0.8")


# Deaths.


def dies_in_a_collective(context: RankContext, victim: int) -> float:
    """The others are told, and their communicators end, whatever was on its way."""
    layout = Layout(dp=context.num_ranks)
    payload = b"x" * 100_000
    with ProcessGroups.create(layout, timeout_s=60) as groups:
        groups.control.all_gather(payload, phase="test: whole")
        if context.rank == victim:
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL))
            timer.start()
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=rf"ranks \[{victim}\] "):
            until_it_fails(lambda: groups.control.all_gather(payload, phase="test: again"))
    return time.monotonic() - began


def dies_in_an_exchange(context: RankContext, victim: int) -> float:
    """All send to all at once, messages larger than any socket holds."""
    size = 16 << 20
    others = [i for i in range(context.num_ranks) if i != context.rank]
    source, targets = memoryview(bytearray(size)), [memoryview(bytearray(size)) for _ in others]
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=60) as groups:
        groups.control.barrier(phase="test: begin")
        began = time.monotonic()
        if context.rank == victim:
            delay = random.Random(os.getpid()).uniform(0.01, 0.2)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        incoming = list(zip(others, targets, strict=True))
        with pytest.raises(DeadlineError, match=rf"ranks \[{victim}\] "):
            until_it_fails(
                lambda: groups.control.exchange([(i, source) for i in others], incoming, phase="e")
            )
    return time.monotonic() - began


def until_it_fails(call: Callable[[], object]) -> None:
    while True:
        call()


@pytest.mark.parametrize("victim", [0, 2])
def test_those_who_outlive_a_rank_end_at_once(victim: int) -> None:
    """The coordinator and another; far from the deadline."""
    outcome = run_ranks(4, dies_in_a_collective, victim, expect_failure=True, timeout_s=60)
    assert outcome.failed == [victim], outcome.errors
    assert max(s for s in outcome.results if s is not None) < 30


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_those_who_outlive_a_rank_in_an_exchange_end_at_once(victim: int) -> None:
    """At any moment, of ranks that send and receive at once; far from the deadline."""
    outcome = run_ranks(3, dies_in_an_exchange, victim, expect_failure=True, timeout_s=90)
    assert outcome.failed == [victim], outcome.errors
    assert max(s for s in outcome.results if s is not None) < 30

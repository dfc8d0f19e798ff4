"""Large messages between processes of one host: read where they lie, or sent as bytes."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.errors import DeadlineError
from holdfast.parallel import Layout, ProcessGroups
from holdfast.parallel.control.connections import Connections, LateError
from holdfast.parallel.control.cross_memory import (
    CROSS_MEMORY,
    OFFER_NBYTES,
    SLICE_NBYTES,
    CrossMemory,
    Pull,
    RefusedError,
)
from holdfast.parallel.control.streams import LARGE_NBYTES, WORTHWHILE_NBYTES, OutgoingStream
from tests.harness import RankContext, run_ranks

PAGE = os.sysconf("SC_PAGESIZE")
_CAP_SYS_PTRACE = 19


def is_permitted() -> bool:
    """Whether this kernel lets processes of one user read each other; not by asking the library."""
    restricted = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not Path("/proc/self/status").exists() or not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return False
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.split("CapEff:")[1].split()[0], 16)
    is_free = not restricted.exists() or restricted.read_text().strip() == "0"
    return is_free or bool(capabilities >> _CAP_SYS_PTRACE & 1)


needs_permission = pytest.mark.skipif(not is_permitted(), reason="the kernel refuses")


def connections_of(context: RankContext) -> Connections:
    return Connections(index=context.rank, store=PrefixStore("test", _get_default_store()))


def soon(seconds: float = 20) -> float:
    return time.monotonic() + seconds


def meet(context: RankContext, name: str) -> None:
    """Wait for the other ranks, by the store."""
    store = PrefixStore(name, _get_default_store())
    store.set(str(context.rank), "")
    store.wait([str(rank) for rank in range(context.num_ranks)])


def until_it_fails(call: Callable[[], object]) -> None:
    while True:
        call()


def message(seed: object, nbytes: int) -> bytes:
    return random.Random(str(seed)).randbytes(nbytes)


# What arrives.

SIZES = (
    *(LARGE_NBYTES + d for d in (-1, 0, 1)),
    *(LARGE_NBYTES + PAGE + d for d in (-1, 0, 1)),
    *(WORTHWHILE_NBYTES + d for d in (-1, 0, 1)),
    *(0, 1, OFFER_NBYTES, 640, 3 * LARGE_NBYTES + 7, SLICE_NBYTES, 2 * SLICE_NBYTES + 1),
)


def exchanges_with_all(context: RankContext, seed: int) -> tuple[int, int]:
    """Large pulled, and large expected; all to all at once, several rounds, at any alignment."""
    connections = connections_of(context)
    expected = 0
    for number in range(3):
        draw = random.Random(f"{seed} {number}")
        sizes = {
            (a, b): draw.choices(SIZES, k=draw.randrange(3, 8))
            for a in range(context.num_ranks)
            for b in range(context.num_ranks)
            if a != b
        }
        outgoing: list[tuple[int, memoryview]] = []
        incoming: list[tuple[int, memoryview]] = []
        wanted: list[bytes] = []
        for (a, b), each in sizes.items():
            for i, nbytes in enumerate(each):
                data = message((seed, number, a, b, i), nbytes)
                if a == context.rank:
                    shifted = bytes(i) + data
                    outgoing.append((b, memoryview(shifted)[i:]))
                elif b == context.rank:
                    incoming.append((a, memoryview(bytearray(nbytes + i))[i:]))
                    wanted.append(data)
            if b == context.rank:
                large = sum(nbytes for nbytes in each if nbytes >= LARGE_NBYTES)
                expected += large if large >= WORTHWHILE_NBYTES else 0
        connections.transfer(outgoing, incoming, soon())
        assert [bytes(view) for _, view in incoming] == wanted
    meet(context, "end")
    connections.close()
    return connections.nbytes_pulled, expected


@needs_permission
@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_sizes_arrive_between_all_ranks_at_once(num_ranks: int, is_on: bool) -> None:
    """G12: in order, whole, around every bound; large ones are pulled only if that is on."""
    seed = num_ranks
    env = {CROSS_MEMORY: str(int(is_on))}
    for pulled, expected in run_ranks(num_ranks, exchanges_with_all, seed, env=env).results:
        assert expected > 0
        assert pulled == (expected if is_on else 0)


def sends_read_only_memory(context: RankContext) -> int:
    connections = connections_of(context)
    data = message("read only", WORTHWHILE_NBYTES + 5)
    targets = [bytearray(len(data)) for _ in range(4)]
    if context.rank == 0:
        array = np.frombuffer(data, dtype=np.uint8)
        assert not array.flags.writeable
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                views = [memoryview(data), array.data, tensor.numpy().data, memoryview(mapped)]
                connections.transfer([(1, view) for view in views], [], soon())
                for view in views:
                    view.release()
    else:
        incoming = [(0, memoryview(target)) for target in targets]
        connections.transfer([], incoming, soon())
        assert all(target == data for target in targets)
    connections.close()
    return connections.nbytes_pulled


@needs_permission
def test_sources_may_be_read_only() -> None:
    """Bytes, an array, a tensor, a mapped file of which no page has been touched."""
    results = run_ranks(2, sends_read_only_memory).results
    assert results == [0, 4 * (WORTHWHILE_NBYTES + 5)]


def receives_in_other_transfers(context: RankContext, sizes: list[int]) -> None:
    connections = connections_of(context)
    for size in (LARGE_NBYTES, 10):
        sizes = [*sizes, size]
        messages = [message(i, nbytes) for i, nbytes in enumerate(sizes)]
        if context.rank == 0:
            connections.transfer([(1, memoryview(data)) for data in messages], [], soon())
        else:
            for data in messages:
                target = bytearray(len(data))
                connections.transfer([], [(0, memoryview(target))], soon())
                assert target == data
    connections.close()


@pytest.mark.parametrize("is_refused", [False, True])
def test_one_transfer_may_be_received_in_several(is_refused: bool) -> None:
    """Offers that are read before their transfer begins are kept for it."""
    sizes = [LARGE_NBYTES, 8 * LARGE_NBYTES, 7, 8, LARGE_NBYTES, LARGE_NBYTES + 1, 0, 9]
    body = receives_in_other_transfers_and_refuses if is_refused else receives_in_other_transfers
    run_ranks(2, body, sizes)


# Refusals.


def receives_in_other_transfers_and_refuses(context: RankContext, sizes: list[int]) -> None:
    """The second message and what follows are refused, when half of it has been read."""
    fails_after(LARGE_NBYTES + LARGE_NBYTES)
    receives_in_other_transfers(context, sizes)


def fails_after(nbytes: int) -> None:
    """Let this process read so many bytes, and no more, of messages of others."""
    read = CrossMemory.read
    left = nbytes

    def refused(self: CrossMemory, pid: int, address: int, into: int, size: int) -> None:
        nonlocal left
        if size > OFFER_NBYTES:
            done = min(left, size)
            left -= done
            read(self, pid, address, into, done)
            if done < size:
                raise RefusedError("as the kernel would")
        else:
            read(self, pid, address, into, size)

    CrossMemory.read = refused  # type: ignore[method-assign]


def is_refused(context: RankContext, how: str) -> tuple[int, int]:
    """Bytes pulled by this rank, and how many offers it made in a second round."""
    if how == "turned off" and context.rank == 1:
        os.environ[CROSS_MEMORY] = "0"
    connections = connections_of(context)
    memory = connections._memory
    if context.rank == 0:
        if how == "another place":
            memory._place = bytes(16)
        elif how == "another process":
            offer = memory.offer  # its token is not the one at the address
            memory.offer = lambda data: offer(data)[:-24] + bytes(16) + offer(data)[-8:]  # type: ignore[method-assign]
        elif how == "a process that is gone":
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            os.getpid = lambda: child  # type: ignore[assignment]
    elif how == "the kernel":
        memory._read_vectors = lambda *_: -1
    elif how == "in the middle":
        fails_after(2 * LARGE_NBYTES + SLICE_NBYTES + PAGE)
    sizes = [5, LARGE_NBYTES, LARGE_NBYTES, 3 * SLICE_NBYTES, 9, LARGE_NBYTES, LARGE_NBYTES, 3]
    offers = 0
    for number in range(2):
        messages = [message((number, i), nbytes) for i, nbytes in enumerate(sizes)]
        if context.rank == 0:
            offer_now, offers = memory.offer, 0

            def counted(data: memoryview, make: Callable[..., bytes] = offer_now) -> bytes:
                nonlocal offers
                offers += 1
                return make(data)

            memory.offer = counted  # type: ignore[method-assign]
            connections.transfer([(1, memoryview(data)) for data in messages], [], soon())
        else:
            targets = [bytearray(nbytes) for nbytes in sizes]
            connections.transfer([], [(0, memoryview(target)) for target in targets], soon())
            assert targets == messages
    connections.close()
    return connections.nbytes_pulled, offers


@pytest.mark.parametrize(
    "how",
    [
        "turned off",
        "another place",
        "another process",
        "a process that is gone",
        "the kernel",
        "in the middle",
    ],
)
def test_what_is_refused_comes_as_bytes(how: str) -> None:
    """G12: every message is right and in order; after one refusal no offer is made again."""
    outcome = run_ranks(2, is_refused, how)
    (_, offers), (pulled, _) = outcome.results
    assert offers == 0, "in the second round"
    if how != "in the middle":
        assert pulled == 0
    elif is_permitted():
        assert 2 * LARGE_NBYTES < pulled < 2 * LARGE_NBYTES + 3 * SLICE_NBYTES


@needs_permission
def test_short_reads_are_continued() -> None:
    """The kernel may read less than was requested, at the end of a page for example."""
    memory = CrossMemory()
    data = message("short", LARGE_NBYTES)
    target = bytearray(len(data))
    pull = memory.open(memory.offer(memoryview(data)), memoryview(target))
    read = memory._read_vectors
    assert read is not None

    def read_less(pid: int, here: Any, _1: int, there: Any, _2: int, _3: int) -> int:
        for vector in (here._obj, there._obj):
            vector.nbytes = min(vector.nbytes, PAGE + 3)
        return read(pid, here, 1, there, 1, 0)

    memory._read_vectors = read_less
    assert pull.advance(PAGE) == PAGE
    assert not pull.is_complete
    assert pull.advance(SLICE_NBYTES) == len(data) - PAGE
    assert pull.is_complete
    assert target == data


@needs_permission
def test_a_page_that_cannot_be_read_refuses_the_message() -> None:
    """What was read before it is not the message."""
    memory = CrossMemory()
    with mmap.mmap(-1, 4 * PAGE) as mapped:
        view = memoryview(mapped)
        offer = memory.offer(view)
        address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        libc = ctypes.CDLL(None)
        for protection in (mmap.PROT_READ, 0):
            last = ctypes.c_void_p(address + 3 * PAGE)
            assert libc.mprotect(last, ctypes.c_size_t(PAGE), protection) == 0
            pull = memory.open(offer, memoryview(bytearray(4 * PAGE)))
            if protection:
                assert pull.advance(SLICE_NBYTES) == 4 * PAGE
            else:
                with pytest.raises(RefusedError, match="Bad address"):
                    pull.advance(SLICE_NBYTES)
                assert not pull.is_complete
        view.release()


# Deaths.


def patch_advance(act: Callable[[Pull], None], *, when: Callable[[Pull], bool]) -> None:
    """Let something happen once, right after a slice has been read."""
    advance = Pull.advance
    is_done = False

    def acting(self: Pull, max_nbytes: int) -> int:
        nonlocal is_done
        nbytes = advance(self, max_nbytes)
        if not is_done and when(self):
            is_done = True
            act(self)
        return nbytes

    Pull.advance = acting  # type: ignore[method-assign]


def kill(pid: int) -> None:
    """End a process, and wait until it has gone, or is a zombie without memory."""
    os.kill(pid, signal.SIGKILL)
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


def loses_the_sender(context: RankContext, moment: str) -> float:
    """Rank 0 sends to all; rank 1 kills it at some moment of its pull."""
    data = bytearray(4 * SLICE_NBYTES)
    view = memoryview(data)
    others = range(1, context.num_ranks)
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=20) as groups:
        if context.rank == 1:
            when = {
                "before": lambda pull: False,
                "while": lambda pull: not pull.is_complete,
                "after": lambda pull: pull.is_complete,
            }[moment]
            patch_advance(lambda pull: kill(pull._pid), when=when)
            if moment == "before":
                prepare = CrossMemory.open

                def kills(self: CrossMemory, offer: bytearray, target: memoryview) -> Pull:
                    kill(int.from_bytes(offer[16:24], "little"))
                    return prepare(self, offer, target)

                CrossMemory.open = kills  # type: ignore[method-assign]
        began = time.monotonic()
        outgoing = [(index, view) for index in others] if context.rank == 0 else []
        incoming = [(0, view)] if context.rank else []
        with pytest.raises(DeadlineError, match=r"ranks \[0\] "):
            until_it_fails(lambda: groups.control.exchange(outgoing, incoming, phase="test: e"))
        if context.rank == 1:
            assert groups.control.num_collectives == 2, "the frames, and the first message"
    return time.monotonic() - began


@needs_permission
@pytest.mark.parametrize("moment", ["before", "while", "after"])
def test_a_sender_that_dies_is_named(moment: str) -> None:
    """G12: nothing of it is accepted, also what was pulled to the end; far from the deadline."""
    outcome = run_ranks(3, loses_the_sender, moment, expect_failure=True, timeout_s=60)
    assert outcome.failed == [0], outcome.errors
    assert max(s for s in outcome.results if s is not None) < 10


def dies_in_exchanges(context: RankContext, victim: int) -> float:
    size = 2 * SLICE_NBYTES
    others = [i for i in range(context.num_ranks) if i != context.rank]
    source, targets = memoryview(bytearray(size)), [memoryview(bytearray(size)) for _ in others]
    began = time.monotonic()
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=20) as groups:
        groups.control.barrier(phase="test: begin")
        if context.rank == victim:
            delay = random.Random(os.getpid()).uniform(0.01, 0.2)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, delay)
        incoming = list(zip(others, targets, strict=True))
        with pytest.raises(DeadlineError, match=rf"ranks \[{victim}\] "):
            until_it_fails(
                lambda: groups.control.exchange([(i, source) for i in others], incoming, phase="e")
            )
    return time.monotonic() - began


def test_those_who_outlive_a_rank_in_an_exchange_end_at_once() -> None:
    """At any moment, of ranks that send and receive at once."""
    for victim in (0, 1, 2):
        outcome = run_ranks(3, dies_in_exchanges, victim, expect_failure=True, timeout_s=60)
        assert outcome.failed == [victim], outcome.errors
        assert max(s for s in outcome.results if s is not None) < 15


# Leaving midway.


class LeavesError(Exception):
    """As an interrupt would raise."""


def leaves_midway(context: RankContext, how: str) -> str:
    """The sender leaves while it is read, and uses the memory again."""
    connections = connections_of(context)
    data = bytearray(b"\1") * (4 * SLICE_NBYTES)
    meet(context, "begin")
    if context.rank == 0:
        deadline = soon(0.5 if how == "deadline" else 30)
        if how == "interrupt":

            def leave(*_: Any) -> None:
                raise LeavesError

            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(LateError if how == "deadline" else LeavesError):
            connections.transfer([(1, memoryview(data))], [], deadline)
        data[:] = b"\2" * len(data)
        with pytest.raises(ConnectionError, match="left midway"):
            connections.transfer([(1, memoryview(data))], [], soon())
        meet(context, "used again")
        time.sleep(0.5)  # the receiver has everything, and waits
        connections.close()
        meet(context, "raised")
        return ""
    patch_advance(lambda _: meet(context, "used again"), when=lambda pull: not pull.is_complete)
    target = memoryview(bytearray(len(data)))
    with pytest.raises(ConnectionError) as caught:
        connections.transfer([], [(0, target)], soon())
    assert target[0] == 1
    assert target[-1] == 2, "what was read of memory that is used again"
    meet(context, "raised")
    return str(caught.value)


@needs_permission
@pytest.mark.parametrize("how", ["deadline", "interrupt"])
def test_memory_that_is_used_again_is_not_accepted(how: str) -> None:
    """G12: the pull succeeds, with the wrong bytes; the receiver raises."""
    assert run_ranks(2, leaves_midway, how).results[1]


def never_confirms(context: RankContext) -> None:
    connections = connections_of(context)
    data = bytearray(WORTHWHILE_NBYTES)
    if context.rank == 0:
        # The others wait for the confirmation; this rank does not read their answers.
        OutgoingStream._take_answers = lambda self: None  # type: ignore[method-assign]
    pair = [(1 - context.rank, memoryview(data))]
    outgoing, incoming = (pair, []) if context.rank == 0 else ([], pair)
    began = time.monotonic()
    if context.rank == 0:
        with pytest.raises((LateError, ConnectionError)):
            connections.transfer(outgoing, incoming, soon(3))
    else:
        with pytest.raises(LateError):
            connections.transfer(outgoing, incoming, soon(1))
        assert 0.9 < time.monotonic() - began < 2.9


def test_a_confirmation_that_does_not_come_is_late() -> None:
    """The receiver has every byte, and does not accept them."""
    run_ranks(2, never_confirms)


def slow_pull(context: RankContext) -> float:
    """Every slice takes a fifth of a second: the deadline is between two of them."""
    connections = connections_of(context)
    data = memoryview(bytearray(10 * SLICE_NBYTES))
    meet(context, "begin")
    began = time.monotonic()
    if context.rank == 0:
        with pytest.raises((LateError, ConnectionError)):
            connections.transfer([(1, data)], [], soon(1))
    else:
        advance = Pull.advance

        def slow(self: Pull, max_nbytes: int) -> int:
            time.sleep(0.2)
            return advance(self, max_nbytes)

        Pull.advance = slow  # type: ignore[method-assign]
        with pytest.raises((LateError, ConnectionError)):
            connections.transfer([], [(0, data)], soon(1))
    return time.monotonic() - began


@needs_permission
def test_deadlines_are_kept_during_a_pull() -> None:
    assert max(run_ranks(2, slow_pull).results) < 1.9


def test_a_message_of_another_length_is_noticed_in_an_offer() -> None:
    assert "in place of" in str(run_ranks(2, differs).results[1])


def differs(context: RankContext) -> str:
    connections = connections_of(context)
    data = memoryview(bytearray(WORTHWHILE_NBYTES + context.rank))
    pair = [(1 - context.rank, data)]
    with pytest.raises(ConnectionError) as caught:
        connections.transfer(*((pair, []) if context.rank == 0 else ([], pair)), soon())
    connections.close()
    return str(caught.value)


def digests(context: RankContext) -> list[str]:
    """Rows of all ranks and the root's bytes, long enough to be offered, by `control` itself."""
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=20) as groups:
        control = groups.control
        rows = control.all_gather(message(context.rank, WORTHWHILE_NBYTES), phase="rows")
        root = message("root", 5 * WORTHWHILE_NBYTES) if control.is_coordinator else None
        gathered = control.gather(message(context.rank, WORTHWHILE_NBYTES + 1), phase="g") or []
        mine = control.scatter(rows if control.is_coordinator else None, phase="s")
        payloads = [*rows, control.broadcast(root, phase="b"), *gathered, mine]
    return [hashlib.blake2b(each).hexdigest() for each in payloads]


@pytest.mark.parametrize("is_on", [True, False])
def test_collectives_of_large_payloads(is_on: bool) -> None:
    hashed = [
        [hashlib.blake2b(message(rank, WORTHWHILE_NBYTES + extra)).hexdigest() for rank in range(3)]
        for extra in (0, 1)
    ]
    root = hashlib.blake2b(message("root", 5 * WORTHWHILE_NBYTES)).hexdigest()
    results = run_ranks(3, digests, env={CROSS_MEMORY: str(int(is_on))}).results
    for rank, found in enumerate(results):
        gathered = hashed[1] if rank == 0 else []
        assert found == [*hashed[0], root, *gathered, hashed[0][rank]]

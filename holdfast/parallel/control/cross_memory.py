"""Bytes from the memory of another process of this host, in one copy (Linux: cross-memory attach).

An *offer* states where a message lies: the process, the address, and a random token with the
address at which the process keeps it. Before its first message the reader reads the token. Nothing
is assumed about who may read whom: the kernel refuses other users, restricted tracing (Yama),
system call filters, and memory of devices; another host or pid namespace is recognised by its name,
and a process that has only the number of the right one (a copy of a virtual machine, a sandbox
with a kernel of its own) by the token. Whatever the reason, the message then goes through the
socket. `HOLDFAST_CROSS_MEMORY=0` refuses everything.

What is read may be used only when the owner has stated, after the read, that it had kept the
memory as it was. That is the business of `streams`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

CROSS_MEMORY = "HOLDFAST_CROSS_MEMORY"
"""Environment variable: 0 sends everything through sockets."""
SLICE_NBYTES = 8 << 20
"""Read in one system call: some milliseconds, between which deadlines and other ranks count."""
_TOKEN_NBYTES = 16
_PLACE_NBYTES = 16
_OFFER = struct.Struct(f"<{_PLACE_NBYTES}sQQ{_TOKEN_NBYTES}sQ")
"""Host and pid namespace, process, address of its token, token, address of the message."""
OFFER_NBYTES = _OFFER.size

_ReadVectors = Callable[[int, object, int, object, int, int], int]
"""``process_vm_readv``: pid, local vectors, how many, remote vectors, how many, flags."""


class RefusedError(Exception):
    """A message cannot be read from where it lies; nothing of it may be used."""


class _Vector(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class CrossMemory:
    """Offers messages of this process, and reads those that others offer.

    Attributes:
        is_on: Whether this process offers and reads at all.
        nbytes_pulled: Read from other processes so far.
    """

    def __init__(self) -> None:
        self.nbytes_pulled = 0
        self._proven: set[tuple[int, bytes]] = set()
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN_NBYTES), _TOKEN_NBYTES)
        self._place = _place()
        self._read_vectors = _system_call() if self._place is not None else None
        self.is_on = self._read_vectors is not None

    def offer(self, message: memoryview) -> bytes:
        """Where a message of this process lies; the caller keeps it there, unchanged.

        Args:
            message: contiguous bytes in host memory, not empty; may be read-only.
        """
        if self._place is None:
            raise ValueError("messages of this process are not offered")
        # The number of this very process: it may have been forked since the token was made.
        token = ctypes.addressof(self._token)
        return _OFFER.pack(self._place, os.getpid(), token, self._token.raw, _address(message))

    def open(self, offer: bytes | bytearray, target: memoryview) -> Pull:
        """Prove that the offer is of the process that it names, and prepare to read.

        Raises:
            RefusedError: It is not, or the kernel does not let this process read there.
        """
        place, pid, token_address, token, address = _OFFER.unpack(offer)
        if self._read_vectors is None or place != self._place:
            raise RefusedError("another host or pid namespace, or turned off")
        # Once for each process: one that still confirms what it offers has kept its number.
        if (pid, token) not in self._proven:
            seen = ctypes.create_string_buffer(_TOKEN_NBYTES)
            self.read(pid, token_address, ctypes.addressof(seen), _TOKEN_NBYTES)
            if not secrets.compare_digest(seen.raw, token):
                raise RefusedError(f"process {pid} is another one")
            self._proven.add((pid, token))
        return Pull(self, pid=pid, address=address, target=target)

    def read(self, pid: int, address: int, into: int, nbytes: int) -> None:
        """Copy bytes of another process to an address of this one.

        Raises:
            RefusedError: Not all of them could be read.
        """
        if self._read_vectors is None:
            raise RefusedError("turned off")
        done = 0
        while done < nbytes:
            here, there = (
                _Vector(into + done, nbytes - done),
                _Vector(address + done, nbytes - done),
            )
            count = self._read_vectors(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            # A short count is a page that cannot be read, or a limit; the next call says which.
            if count <= 0:
                raise RefusedError(f"process {pid}: {os.strerror(ctypes.get_errno())}")
            done += count


class Pull:
    """One message on its way from the memory of another process.

    Args:
        memory: reads.
        pid: of the owner.
        address: of the message there.
        target: contiguous memory of the message's size.
    """

    def __init__(self, memory: CrossMemory, *, pid: int, address: int, target: memoryview) -> None:
        self._memory = memory
        self._pid = pid
        self._address = address
        self._target = target
        self._into = _address(target)
        self._done = 0

    @property
    def is_complete(self) -> bool:
        """Whether every byte was read."""
        return self._done == len(self._target)

    def advance(self, max_nbytes: int) -> int:
        """Read the next bytes, at most so many; how many these were.

        Raises:
            RefusedError: They cannot be read. What was read before must not be used either.
        """
        nbytes = min(max_nbytes, len(self._target) - self._done)
        self._memory.read(self._pid, self._address + self._done, self._into + self._done, nbytes)
        self._done += nbytes
        self._memory.nbytes_pulled += nbytes
        return nbytes


def _address(view: memoryview) -> int:
    """Where contiguous bytes lie."""
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _place() -> bytes | None:
    """What distinguishes this host and pid namespace from others; None where that is unknown."""
    if os.environ.get(CROSS_MEMORY, "1") == "0":
        return None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid")
        name = f"{boot} {namespace.st_dev} {namespace.st_ino}"
        return hashlib.blake2b(name.encode(), digest_size=_PLACE_NBYTES).digest()
    return None


def _system_call() -> _ReadVectors | None:
    """``process_vm_readv``, which releases the interpreter; None where the C library has none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    pointer = ctypes.POINTER(_Vector)
    call.argtypes = (
        ctypes.c_int,
        pointer,
        ctypes.c_ulong,
        pointer,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    call.restype = ctypes.c_ssize_t
    return call

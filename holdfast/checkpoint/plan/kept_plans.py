"""Plans that one run leaves for the next: each rank reads what is its own, one reads all.

A file is a header, the share of each rank, and the claims that the plan was made from:

    length of the header, 8 bytes
    header   version; by rank the digest of its claims, the digest and the length of its share;
             digest and length of the claims; sealed
    shares   one after the other: what the coordinator sends when a plan is made
    claims   of all ranks

It is trusted in no part. Each rank proves the digest of its own claims, and that its share is the
one of the header. The coordinator makes the plan again from the claims, and proves every share and
every digest of claims. The ranks then agree on the digest of the header: all of them had the same
one, so each entry is proven, by the rank that it is about and by the coordinator. A file that is
stale, or was tampered with, costs a plan and no more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy as np

from holdfast.arrays.packed_ints import pack_ints, squeeze, unpack_ints, unsqueeze
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import CorruptionError, HoldfastError
from holdfast.format.digest import digest128
from holdfast.storage import Storage
from holdfast.storage.reading import read_at_most
from holdfast.writer.records import seal, unseal

PLANS_DIR = ".plans"
VERSION = 5
_MAX_FILES = 16
_STALE_S = 60.0
MAX_NBYTES = 1 << 26
"""Of a file, and of what is compressed in it; typically below 10 bytes a row."""
_MAX_HEADER_NBYTES = 1 << 24
_LENGTH_NBYTES = 8
_DIGEST_NBYTES = 32
_AT_ONCE = 1 << 16
"""Bytes of the first read: the header of some hundred ranks."""
_LOG = logging.getLogger("holdfast")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    claims_of_ranks: bytes
    """Digests, 32 characters each."""
    shares: bytes
    """Digests, 32 characters each."""
    share_nbytes: bytes
    """Packed integers."""
    claims_nbytes: int
    claims: str
    """Digest of the bytes of all claims, as they are in the file."""


@dataclass(frozen=True, slots=True)
class PlanNotes:
    """What a coordinator has made a plan of, and has sent; by rank."""

    claims: Sequence[bytes]
    """Messages of the ranks, see `claims_message`."""
    encoded: Sequence[bytes]
    """The claims themselves."""
    shares: Sequence[bytes]
    """Messages to the ranks."""

    def encode(self) -> tuple[bytes, str]:
        """Return the file, and the digest of its header."""
        claims = squeeze(msgspec.msgpack.encode(self.claims))
        header = msgspec.msgpack.encode(
            _Header(
                version=VERSION,
                claims_of_ranks=_digests(self.encoded),
                shares=_digests(self.shares),
                share_nbytes=pack_ints(np.array([len(each) for each in self.shares])),
                claims_nbytes=len(claims),
                claims=digest128(claims),
            )
        )
        sealed = seal(header)
        length = len(sealed).to_bytes(_LENGTH_NBYTES, "little")
        return b"".join([length, sealed, *self.shares, claims]), digest128(header)


class KeptPlan:
    """The header of a file, from which shares and claims are read.

    Args:
        storage: of the file.
        path: of the file.
        num_ranks: how many a plan is for.

    Raises:
        CorruptionError, StorageError: it cannot be read, or is of other ranks or another version.

    Cost: one or two reads, of 70 bytes for each rank; one of less than 64 KiB is read once.
    """

    def __init__(self, storage: Storage, path: str, *, num_ranks: int) -> None:
        self._storage = storage
        self._path = path
        start = read_at_most(storage, path, _AT_ONCE)
        # A file of any size may be there.
        size = len(start) if len(start) < _AT_ONCE else storage.size(path)
        if size > MAX_NBYTES:
            raise CorruptionError("it is larger than any plan that is kept")
        length = int.from_bytes(start[:_LENGTH_NBYTES], "little")
        end = _LENGTH_NBYTES + length
        if not 0 < length <= min(size - _LENGTH_NBYTES, _MAX_HEADER_NBYTES):
            raise CorruptionError(f"a header of {length} bytes")
        if end > len(start):
            start += storage.read(path, start=len(start), nbytes=end - len(start))
        self._start = start
        sealed = start[_LENGTH_NBYTES:end]
        self._header = unseal(sealed, _Header, where=path)
        self.digest = digest128(sealed[:-_DIGEST_NBYTES])
        """Of the header: it stands for all of the file."""
        header = self._header
        if header.version != VERSION:
            raise CorruptionError(f"it is of version {header.version}, this is version {VERSION}")
        nbytes = unpack_ints(header.share_nbytes).tolist()
        if len(nbytes) != num_ranks:
            raise CorruptionError(f"it is of {len(nbytes)} ranks, these are {num_ranks}")
        self._starts = list(accumulate(nbytes, initial=end))
        if min(nbytes) < 0 or self._starts[-1] + header.claims_nbytes != size:
            raise CorruptionError(f"it has {size} bytes, not those of its header")

    def is_of(self, position: int, encoded: bytes) -> bool:
        """Return True if a rank, by position, has claimed just this."""
        return _nth(self._header.claims_of_ranks, position) == digest128(encoded).encode()

    def share(self, position: int) -> bytes:
        """Read the message to a rank; CorruptionError if it is not that of the header."""
        start, end = self._starts[position : position + 2]
        data = self._read(start, end - start)
        if digest128(data).encode() != _nth(self._header.shares, position):
            raise CorruptionError("a share is not that of its header")
        return data

    def claims(self) -> list[bytes]:
        """Read the claims of all ranks; CorruptionError or ValueError if that cannot be done."""
        data = self._read(self._starts[-1], self._header.claims_nbytes)
        if digest128(data) != self._header.claims:
            raise CorruptionError("the claims are not those of its header")
        plain = unsqueeze(data, max_nbytes=MAX_NBYTES)
        return decode_msgpack_as(plain, list[bytes])

    def is_made_of(self, notes: PlanNotes) -> bool:
        """Return True if a plan that was made of its claims again is this one in every byte."""
        start, end = self._starts[0], self._starts[-1]
        shares = self._read(start, end - start)
        # The digest covers the claims; a share that only its rank would find damaged shows here.
        return notes.encode()[1] == self.digest and shares == b"".join(notes.shares)

    def _read(self, start: int, nbytes: int) -> bytes:
        """Read a range of the file, which the first read may have brought."""
        end = start + nbytes
        if end <= len(self._start):
            return self._start[start:end]
        return self._storage.read(self._path, start=start, nbytes=nbytes)


def write_plan(storage: Storage, path: str, data: bytes) -> None:
    """Leave a plan for later runs, in place of the last one of its kind; at most 16 stay.

    A failure is logged, and costs a later run a plan.

    Cost: one small file.
    """
    if len(data) > MAX_NBYTES:
        _LOG.info("the plan is not kept: it has %d bytes, more than would be read", len(data))
        return
    try:
        # Sealed, and only a help: it need not be durable.
        storage.make_dir(PLANS_DIR, durable=False)
        storage.replace_file(path, data, durable=False)
        others = [f"{PLANS_DIR}/{name}" for name in storage.list(PLANS_DIR)]
        # Files of other layouts stay useful to runs that return to them, hence by age and not all.
        by_age = sorted((storage.age_s(each), each) for each in others if each != path)
        # From 2, as the file just written is the first and is not in the list.
        for number, (age_s, each) in enumerate(by_age, start=2):
            unnamed = each.startswith(f"{PLANS_DIR}/.tmp-") and age_s > _STALE_S
            if unnamed or number > _MAX_FILES:
                storage.remove_tree(each)
    except HoldfastError as error:
        _LOG.warning("the plan was not kept: %s", error)


def _digests(parts: Sequence[bytes]) -> bytes:
    return b"".join(digest128(each).encode() for each in parts)


def _nth(digests: bytes, position: int) -> bytes:
    return digests[position * _DIGEST_NBYTES : (position + 1) * _DIGEST_NBYTES]

"""The fixed-size frame that opens every collective of `Control`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from holdfast.errors import ErrorRecord

INLINE_NBYTES = 512
"""Payloads up to this size travel in the frame itself."""

_HEADER = struct.Struct("<QQ8sBBH100s")
FRAME_NBYTES = _HEADER.size + INLINE_NBYTES
FAILED = "failed"
"""In place of any operation on a rank that cannot go on; its payload is a `FailureNotice`."""
_OPERATIONS = ("all_gather", "gather", "scatter", "broadcast", "agree", "barrier", FAILED)


class FailureNotice(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a `FAILED` frame."""

    error: ErrorRecord
    is_shared: bool
    """Whether the error is one that all ranks have raised already."""
    depth: int
    """How many guards of the rank the error has left open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a rank is (sequence number, operation, phase), and its payload if that is short."""

    sequence: int
    operation: str
    phase: str
    phase_digest: bytes
    length: int
    inline: bytes
    misuse: str
    """What is wrong with the rank's arguments; it travels in place of the payload."""

    @classmethod
    def make(
        cls, sequence: int, operation: str, phase: str, payload: bytes, misuse: str | None
    ) -> Frame:
        """The frame of a call; `misuse` fails the call on all ranks."""
        return cls(
            sequence=sequence,
            operation=operation,
            phase=phase,
            # phases are cut to 100 bytes below: only the digest tells all of them apart
            phase_digest=blake2b(phase.encode(), digest_size=8).digest(),
            length=len(payload),
            inline=payload if len(payload) <= INLINE_NBYTES else b"",
            misuse=misuse or "",
        )

    def encode(self) -> bytes:
        """`FRAME_NBYTES` bytes."""
        text = self.phase.encode()[:100]
        head = _HEADER.pack(
            self.sequence,
            self.length,
            self.phase_digest,
            _OPERATIONS.index(self.operation),
            bool(self.misuse),
            len(text),
            text,
        )
        body = self.misuse.encode()[:INLINE_NBYTES] if self.misuse else self.inline
        return (head + body).ljust(FRAME_NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Inverse of `encode`."""
        sequence, length, digest, operation, misused, text_nbytes, text = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        return cls(
            sequence=sequence,
            operation=_OPERATIONS[operation],
            phase=text[:text_nbytes].decode(errors="replace"),
            phase_digest=digest,
            length=length,
            inline=b"" if misused or length > INLINE_NBYTES else body[:length],
            misuse=body.rstrip(b"\0").decode(errors="replace") if misused else "",
        )

    @property
    def call(self) -> tuple[int, str, bytes]:
        """What has to be equal on all ranks."""
        return self.sequence, self.operation, self.phase_digest

    def __str__(self) -> str:
        """For messages."""
        return f"phase {self.phase!r} ({self.operation}, collective {self.sequence})"

"""The fixed-size record that opens every collective of `Control`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b

INLINE_NBYTES = 512
"""Payloads up to this size travel in the record itself."""

_HEADER = struct.Struct("<QQ8sBBH100s")
RECORD_NBYTES = _HEADER.size + INLINE_NBYTES
FAILED = "failed"
"""Stands in the place of any call of a rank that cannot go on; its payload is the failure."""
_OPERATIONS = ("all_gather", "gather", "scatter", "broadcast", "agree", "barrier", FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a rank is (sequence number, operation, phase), and its payload if that is short."""

    sequence: int
    operation: str
    phase: str
    phase_digest: bytes
    length: int
    inline: bytes
    fault: str

    @classmethod
    def make(
        cls, sequence: int, operation: str, phase: str, payload: bytes, fault: str | None
    ) -> Frame:
        """The record of a call; a `fault` travels in place of the payload, and fails all ranks."""
        return cls(
            sequence=sequence,
            operation=operation,
            phase=phase,
            phase_digest=blake2b(phase.encode(), digest_size=8).digest(),
            length=len(payload),
            inline=payload if len(payload) <= INLINE_NBYTES else b"",
            fault=fault or "",
        )

    def encode(self) -> bytes:
        """`RECORD_NBYTES` bytes."""
        text = self.phase.encode()[:100]
        head = _HEADER.pack(
            self.sequence,
            self.length,
            self.phase_digest,
            _OPERATIONS.index(self.operation),
            bool(self.fault),
            len(text),
            text,
        )
        body = self.fault.encode()[:INLINE_NBYTES] if self.fault else self.inline
        return (head + body).ljust(RECORD_NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Inverse of `encode`."""
        sequence, length, digest, operation, faulty, text_nbytes, text = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        return cls(
            sequence=sequence,
            operation=_OPERATIONS[operation],
            phase=text[:text_nbytes].decode(errors="replace"),
            phase_digest=digest,
            length=length,
            inline=b"" if faulty or length > INLINE_NBYTES else body[:length],
            fault=body.rstrip(b"\0").decode(errors="replace") if faulty else "",
        )

    @property
    def place(self) -> tuple[int, str, bytes]:
        """What has to be equal on all ranks."""
        return self.sequence, self.operation, self.phase_digest

    def __str__(self) -> str:
        """For messages."""
        return f"phase {self.phase!r} ({self.operation}, collective {self.sequence})"

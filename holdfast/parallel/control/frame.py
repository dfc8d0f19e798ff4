"""The fixed-size frame that opens every collective of `Control`."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from holdfast.errors import ErrorRecord

INLINE_NBYTES = 512
"""Payloads up to this size travel in the frame itself."""
FRAME_NBYTES = 128 + INLINE_NBYTES
_PHASE_NBYTES = 64
"""Bytes of a phase that are shown; the digest distinguishes longer ones."""
_LENGTH_NBYTES = 2
FAILED = "failed"
"""In place of any operation on a rank that cannot go on; its payload is a `FailureNotice`."""


class FailureNotice(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a `FAILED` frame."""

    error: ErrorRecord
    is_shared: bool
    """Whether the error is one that all ranks have raised already."""
    depth: int
    """How many guards of the rank the error has left open."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
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
        is_inline = len(payload) <= INLINE_NBYTES and not misuse
        return cls(
            sequence=sequence,
            operation=operation,
            phase=_shorten(phase, _PHASE_NBYTES),
            phase_digest=blake2b(phase.encode(), digest_size=8).digest(),
            length=len(payload),
            inline=payload if is_inline else b"",
            misuse=_shorten(misuse or "", INLINE_NBYTES),
        )

    def encode(self) -> bytes:
        """`FRAME_NBYTES` bytes."""
        data = msgspec.msgpack.encode(self)
        return (len(data).to_bytes(_LENGTH_NBYTES, "little") + data).ljust(FRAME_NBYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """Inverse of `encode`."""
        stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        return msgspec.msgpack.decode(data[_LENGTH_NBYTES:stop], type=cls)

    @property
    def call(self) -> tuple[int, str, bytes]:
        """What has to be equal on all ranks."""
        return self.sequence, self.operation, self.phase_digest

    def __str__(self) -> str:
        """For messages."""
        return f"phase {self.phase!r} ({self.operation}, collective {self.sequence})"


def _shorten(text: str, nbytes: int) -> str:
    return text.encode()[:nbytes].decode(errors="ignore")

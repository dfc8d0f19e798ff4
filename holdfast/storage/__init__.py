"""Where bytes go: a small storage protocol and the stores that keep it. Torch-free."""

from __future__ import annotations

from holdfast.storage.posix.store import PosixStorage
from holdfast.storage.protocol import Observer, Sink, Source, Storage

__all__ = ["Observer", "PosixStorage", "Sink", "Source", "Storage"]

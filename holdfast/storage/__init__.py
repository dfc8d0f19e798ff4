"""Where bytes go: a small storage protocol and the stores that keep it. Torch-free."""

from __future__ import annotations

from holdfast.storage.base import Observer, Sink, Source, Storage, split_path
from holdfast.storage.posix import PosixStorage

__all__ = ["Observer", "PosixStorage", "Sink", "Source", "Storage", "split_path"]

"""Where bytes go: a small protocol and the stores that keep it. Torch-free.

Every store passes one contract test (`tests/storage/contract.py`). The rest of the library knows no
file system: it writes to sinks, reads ranges from sources, and publishes and renames by name.

Read first: `protocol.py`, `posix/store.py`.
"""

from __future__ import annotations

from holdfast.storage.posix.store import PosixStorage
from holdfast.storage.storage_protocol import Observer, Sink, Source, Storage

__all__ = ["Observer", "PosixStorage", "Sink", "Source", "Storage"]

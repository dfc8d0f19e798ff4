"""Where bytes go: a small protocol and the stores that implement it. Torch-free.

In come names and bytes; out come files that are complete and durable, or an error. Every store
passes one contract test (`tests/storage/contract.py`). The rest of the library does not know any
file system: it writes to sinks, reads ranges from sources, and publishes and renames by name.

Read first: `storage_protocol.py`, `posix.py`. Buckets have a room of their own, `objects/`, which
is imported when a URL is opened.
"""

from __future__ import annotations

from holdfast.storage.places import is_url, open_storage, shown
from holdfast.storage.posix import PosixStorage
from holdfast.storage.storage_protocol import Observer, Sink, Source, Storage

__all__ = [
    "Observer",
    "PosixStorage",
    "Sink",
    "Source",
    "Storage",
    "is_url",
    "open_storage",
    "shown",
]

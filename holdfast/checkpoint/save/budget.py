"""The budget of a save: disk, memory and file descriptors, checked before anything is staged."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import StorageError, in_bytes
from holdfast.storage import Storage
from holdfast.writer.kept_images import end_keepers
from holdfast.writer.memory import available_memory_nbytes

_NUM_DESCRIPTORS = 16
_DISK_SLACK_NBYTES = 4 << 20


def check_budget(
    storage: Storage, *, image_nbytes: int, held_nbytes: Sequence[int], total_nbytes: int
) -> None:
    """Check disk, memory and file descriptors before anything is staged.

    Args:
        image_nbytes: this rank's image, once per buffer.
        held_nbytes: what each buffer has already.
        total_nbytes: the whole checkpoint; 0 on ranks that do not answer for the disk.

    Raises:
        StorageError: names what is short and by how much.

    Cost: a few system calls.
    """
    if total_nbytes:
        needed = total_nbytes + total_nbytes // 50 + _DISK_SLACK_NBYTES
        free = storage.free_nbytes()
        if free < needed:
            raise StorageError(
                f"{storage.describe('')}: the checkpoint needs {in_bytes(needed)}, but only "
                f"{in_bytes(free)} are free: {in_bytes(needed - free)} short; remove old "
                f"checkpoints (holdfast prune) or save elsewhere"
            )
    needed = sum(max(image_nbytes - held, 0) for held in held_nbytes)
    if needed:
        free = available_memory_nbytes()
        if free < needed and end_keepers():
            # An image that is kept for a restart must not cost a running job its save.
            free = available_memory_nbytes()
        if free < needed:
            raise StorageError(
                f"staging this rank's share needs {in_bytes(needed)} more memory in "
                f"{len(held_nbytes)} staging buffer(s), but only {in_bytes(free)} are available: "
                f"{in_bytes(needed - free)} short; use staging_buffers=1 or more ranks to save with"
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        if used + _NUM_DESCRIPTORS > soft:
            raise StorageError(
                f"{used} of {soft} file descriptors are open and a save needs {_NUM_DESCRIPTORS}: "
                f"{used + _NUM_DESCRIPTORS - soft} short; raise the limit (ulimit -n)"
            )

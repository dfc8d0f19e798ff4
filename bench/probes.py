"""What the kernel reports about a process: memory, descriptors, bytes read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def resident_nbytes(field: str = "VmRSS", pid: int | str = "self") -> int:
    """A field of `/proc/PID/status` in bytes; VmHWM is the peak since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> None:
    """Reset the peak of this process's resident memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def nbytes_read() -> int:
    """Bytes this process has asked read calls for, page cache included (mapped reads are not)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0

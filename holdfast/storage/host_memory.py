"""How much memory this process may still take on its host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_UNLIMITED_NBYTES = 1 << 60
_MACHINE = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CONTROL_GROUPS = (
    ("", Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (
        "memory",
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
)
"""Controller in `_OWN_GROUPS`, folder of all groups, files of the limit and of the use, and how
fields of `memory.stat` start, by version."""


def available_memory_nbytes() -> int:
    """Memory this process may still take: the machine's, or its control group's if that is less.

    What the page cache holds of files is available: the kernel gives it up first. A control group
    counts it as used, and one that reads data is full of it.
    """
    return _memory_nbytes()[0]


def total_memory_nbytes() -> int:
    """Memory of the machine, or the limit of this process's control group if that is less."""
    return _memory_nbytes()[1]


def _memory_nbytes() -> tuple[int, int]:
    """Bytes available, and in all; as good as unlimited where the system does not tell."""
    available = total = _UNLIMITED_NBYTES
    try:
        for line in _MACHINE.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
            elif line.startswith("MemTotal:"):
                total = int(line.split()[1]) * 1024
    except OSError:
        return available, total
    for controller, root, limit, used, prefix in _CONTROL_GROUPS:
        for folder in _groups(controller, root):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    taken = int((folder / used).read_text()) - _cached(folder, prefix)
                    available = min(available, int(most) - taken)
                    total = min(total, int(most))
            except (OSError, ValueError):
                continue
    return max(available, 0), total


def _groups(controller: str, root: Path) -> list[Path]:
    """Folders of this process's control group and of those around it, whose limits it shares.

    A container sees its own group as the root; a job of Slurm or systemd is some levels below it.
    """
    folder = root
    with suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                folder = root / path.strip("/")
    return [folder, *(above for above in folder.parents if above.is_relative_to(root))]


def _cached(folder: Path, prefix: str) -> int:
    """Bytes of files in the page cache that count as a control group's use."""
    cached = 0
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, number = line.partition(" ")
        if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
            cached += int(number)
    return cached

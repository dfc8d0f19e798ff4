"""File systems of a test's own, mounted for its duration; and cutting their power."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path
from types import TracebackType

import pytest

_GOINGDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_MEBI = 1 << 20


class Mounts:
    """A context manager that unmounts everything it mounted."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._mounted: list[Path] = []

    def __enter__(self) -> Mounts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for point in reversed(self._mounted):
            subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)

    def tmpfs(self, *, options: str) -> Path:
        """A file system in memory; skips the test where the mount is refused."""
        return self._mount(["-t", "tmpfs", "-o", options, "tmpfs"], "tmpfs")

    def overlay(self) -> Path:
        """An overlay of two directories in memory."""
        base = self.tmpfs(options="size=64m")
        lower, upper, work = (base / name for name in ("lower", "upper", "work"))
        for path in (lower, upper, work):
            path.mkdir()
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        return self._mount(["-t", "overlay", "-o", options, "overlay"], "overlay")

    def disk(self, name: str, make: list[str], *, size_mib: int) -> Disk:
        """A disk in a file with a new file system made by the command `make`; mounted."""
        if shutil.which(make[0]) is None:
            pytest.skip(f"{make[0]} is not installed")
        self._place.mkdir(parents=True, exist_ok=True)
        image = self._place / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size_mib * _MEBI)
        made = subprocess.run([*make, str(image)], check=False, capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"{make[0]} failed: {made.stderr.strip()}")
        return Disk(point=self._mount(["-o", "loop", str(image)], name), image=image)

    def _mount(self, arguments: list[str], name: str) -> Path:
        point = self._place / f"{name}-{len(self._mounted)}"
        point.mkdir(parents=True)
        done = subprocess.run(
            ["mount", *arguments, str(point)], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"mounting {name} is refused here: {done.stderr.strip()}")
        self._mounted.append(point)
        return point


class Disk:
    """A mounted file system whose power can be cut."""

    def __init__(self, *, point: Path, image: Path) -> None:
        self.point = point
        self._image = image

    def cut_power(self) -> None:
        """What is not on the disk by now never gets there; every later call fails."""
        fd = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _GOINGDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def power_up(self) -> None:
        """Mount again; the file system replays its log as after a real power loss."""
        subprocess.run(["umount", str(self.point)], check=True, capture_output=True)
        subprocess.run(
            ["mount", "-o", "loop", str(self._image), str(self.point)],
            check=True,
            capture_output=True,
        )

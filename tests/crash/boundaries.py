"""Every call that changes storage, counted, with something done before one of them.

The calls of the operating system are replaced in this process, below `PosixStorage`, so that
nothing that the storage does between two of its own operations is missed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.storage import posix

Act = Callable[[], None]
_CALLS = (
    "pwrite", "pwritev", "write", "fsync", "fdatasync", "rename", "replace", "mkdir", "unlink",
    "rmdir", "ftruncate", "open",
)  # fmt: skip
_LINUX = ("allocate", "rename_noreplace", "rename_exchange")


@dataclass(slots=True)
class Boundaries:
    """Counts storage-changing calls; before call `at` (from 1) of them `act` is called.

    `torn`: a write at the boundary first writes half of what it was asked to.
    """

    act: Act
    at: int = 0
    torn: bool = False
    names: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, monkey: pytest.MonkeyPatch) -> None:
        """Replace the calls for as long as the monkey patch lasts."""
        for name in _CALLS:
            monkey.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name in _LINUX:
            if hasattr(posix, name):
                monkey.setattr(posix, name, self._wrap(name, getattr(posix, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._changes_storage(name, args):
                with self._lock:
                    self.names.append(name)
                    due = len(self.names) == self.at
                if due:
                    if self.torn and name == "pwrite":
                        fd, data, offset = args
                        call(fd, data[: len(data) // 2], offset)
                    self.act()
            return call(*args, **kwargs)

        return watched

    @staticmethod
    def _changes_storage(name: str, args: tuple[Any, ...]) -> bool:
        if name == "open":
            return bool(args[1] & os.O_CREAT)
        if name == "ftruncate":  # staging memory is a file, too, but none of the storage's
            return "/memfd:" not in os.readlink(f"/proc/self/fd/{args[0]}")
        return name != "write" or args[0] > 2


def refuse(code: int) -> Act:
    """An act that fails the call itself."""

    def act() -> None:
        raise OSError(code, os.strerror(code))

    return act


FULL = refuse(errno.ENOSPC)
BROKEN = refuse(errno.EIO)

"""Power losses replayed: a trace of what a process did to storage, and what each loss may leave.

The recorder stands below `PosixStorage`, at the calls of the operating system. The model is the
weakest that POSIX allows: of the writes to a file that were not synced any sectors may be lost, and
its size; of the names made, changed or removed in a directory that was not synced each may be lost,
whatever came before or after it. One rename is one step.
"""

from __future__ import annotations

import itertools
import os
import random
import stat
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.format.versions import LEASES_DIR
from holdfast.storage import posix

_SECTOR = 512


@dataclass(frozen=True)
class Op:
    """One call: `node` is the file or directory it changes (or syncs)."""

    kind: str
    node: int
    name: str = ""
    other: int = -1
    to: str = ""
    to_other: int = -1
    offset: int = 0
    data: bytes = b""
    label: str = ""
    expect: Any = None


class Frozen(BaseException):
    """The process has been killed: whatever it still does to storage does not happen."""


@dataclass
class Recorder:
    """Records what this process does below `base`, which is empty at the beginning."""

    base: Path
    ops: list[Op] = field(default_factory=list)
    is_frozen: bool = False
    freeze_at: int = -1
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _count: int = 0

    def __post_init__(self) -> None:
        self._new(os.stat(self.base))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this is open, calls are recorded."""
        with pytest.MonkeyPatch.context() as monkey:
            for name in (
                "open", "mkdir", "pwrite", "ftruncate", "rename", "unlink", "rmdir", "fsync",
                "fdatasync",
            ):  # fmt: skip
                monkey.setattr(os, name, self._watch(name, getattr(os, name)))
            for name in ("allocate", "rename_noreplace", "rename_exchange"):
                monkey.setattr(posix, name, self._watch(name, getattr(posix, name)))
            yield

    def expect(self, expectation: object) -> None:
        """From here on this must hold after a power loss."""
        self.ops.append(Op("expect", -1, expect=expectation))

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        record = getattr(self, f"_{name}")

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                before = len(self.ops)
                changes = name != "open" or args[1] & os.O_CREAT
                if changes and (self.is_frozen or before == self.freeze_at):
                    self.is_frozen = True
                    raise Frozen
                result = record(call, *args, **kwargs)
                assert len(self.ops) - before <= 2
                return result

        return watched

    def _new(self, found: os.stat_result) -> int:
        self._nodes[found.st_dev, found.st_ino] = self._count
        self._count += 1
        return self._count - 1

    def _of(self, found: os.stat_result) -> int | None:
        return self._nodes.get((found.st_dev, found.st_ino))

    def _dir(self, path: Any, dir_fd: int | None) -> tuple[int | None, str]:
        if dir_fd is not None:
            return self._of(os.fstat(dir_fd)), os.fspath(path)
        parent, name = os.path.split(os.fspath(path))
        return (self._of(os.stat(parent)), name) if os.path.isdir(parent) else (None, name)

    def _child(self, path: Any, dir_fd: int | None) -> int | None:
        try:
            return self._of(os.stat(path, dir_fd=dir_fd, follow_symlinks=False))
        except OSError:
            return None

    def _open(self, call: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        before = self._child(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else 0
        fd = call(path, flags, *args, **kwargs)
        if flags & os.O_CREAT and before is None:
            where, name = self._dir(path, kwargs.get("dir_fd"))
            if where is not None:
                self.ops.append(Op("create", where, name, self._new(os.fstat(fd))))
        return int(fd)

    def _mkdir(self, call: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        call(path, *args, **kwargs)
        where, name = self._dir(path, kwargs.get("dir_fd"))
        if where is not None:
            node = self._new(os.stat(path, dir_fd=kwargs.get("dir_fd")))
            self.ops.append(Op("mkdir", where, name, node))

    def _pwrite(self, call: Any, fd: int, data: Any, offset: int) -> int:
        count = call(fd, data, offset)
        node = self._of(os.fstat(fd))
        if node is not None:
            self.ops.append(Op("write", node, offset=offset, data=bytes(data[:count])))
        return int(count)

    def _size(self, fd: int, nbytes: int) -> None:
        node = self._of(os.fstat(fd))
        if node is not None:
            self.ops.append(Op("size", node, offset=nbytes))

    def _ftruncate(self, call: Any, fd: int, nbytes: int) -> None:
        call(fd, nbytes)
        self._size(fd, nbytes)

    def _allocate(self, call: Any, fd: int, nbytes: int) -> bool:
        done = call(fd, nbytes)
        if done:
            self._size(fd, nbytes)
        return bool(done)

    def _rename(
        self, call: Any, src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None
    ) -> Any:
        node = self._child(src, src_dir_fd)
        other = self._child(dst, dst_dir_fd)
        done = call(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        (where, name), (there, to) = self._dir(src, src_dir_fd), self._dir(dst, dst_dir_fd)
        if node is not None and done is not False:
            assert where == there, "the model knows renames within one directory"
            exchanged = other if getattr(call, "__name__", "") == "rename_exchange" else None
            last = -1 if exchanged is None else exchanged
            assert where is not None
            self.ops.append(Op("rename", where, name, node, to, last))
        return done

    _rename_noreplace = _rename
    _rename_exchange = _rename

    def _unlink(self, call: Any, path: Any, *, dir_fd: int | None = None) -> None:
        where, name = self._dir(path, dir_fd)
        call(path, dir_fd=dir_fd)
        if where is not None:
            self.ops.append(Op("unlink", where, name))

    _rmdir = _unlink

    def _fsync(self, call: Any, fd: int) -> None:
        call(fd)
        node = self._of(os.fstat(fd))
        if node is not None:
            frames = [f for f in traceback.extract_stack() if "/holdfast/" in f.filename]
            names = [f"{Path(f.filename).stem}.{f.name}" for f in frames]
            is_dir = stat.S_ISDIR(os.fstat(fd).st_mode)
            label = f"{'names' if is_dir else 'bytes'} < {' < '.join(names[:-8:-1])}"
            self.ops.append(Op("sync", node, label=label))

    _fdatasync = _fsync


def pending(ops: Sequence[Op]) -> list[int]:
    """Positions of the operations that no sync has made durable."""
    last = {op.node: i for i, op in enumerate(ops) if op.kind == "sync"}
    return [
        i
        for i, op in enumerate(ops)
        if op.kind not in ("sync", "expect") and last.get(op.node, -1) < i
    ]


Tree = dict[str, Any]


def after_loss(ops: Sequence[Op], lost: set[int], torn: set[int] = frozenset()) -> Tree:  # type: ignore[assignment]
    """The tree below the base: name -> bytes or tree. `torn`: writes of which sectors are lost."""
    dirs: dict[int, dict[str, int]] = {0: {}}
    files: dict[int, bytearray] = {}
    for op in ops:  # what a node is does not depend on what was lost
        if op.kind == "mkdir":
            dirs[op.other] = {}
        elif op.kind == "create":
            files[op.other] = bytearray()
    for i, op in enumerate(ops):
        if i in lost or op.kind in ("sync", "expect"):
            continue
        if op.kind in ("write", "size"):
            content = files[op.node]
            end = op.offset + len(op.data)
            content.extend(bytes(max(end - len(content), 0)))
            if op.kind == "write":
                data = bytearray(op.data)
                for at in range(0, len(data), 2 * _SECTOR) if i in torn else ():
                    data[at : at + _SECTOR] = bytes(len(data[at : at + _SECTOR]))
                content[op.offset : end] = data
            continue
        names = dirs[op.node]
        if op.kind in ("mkdir", "create"):
            names[op.name] = op.other
        elif op.kind == "unlink":
            names.pop(op.name, None)
        elif op.kind == "rename":
            if names.get(op.name) == op.other:
                del names[op.name]
            names[op.to] = op.other
            if op.to_other >= 0:
                names[op.name] = op.to_other

    def build(node: int) -> Tree:
        return {
            name: build(child) if child in dirs else bytes(files[child])
            for name, child in sorted(dirs[node].items())
        }

    return build(0)


def losses(
    ops: Sequence[Op], generator: random.Random, *, exhaustive: int = 5, num_random: int = 3
) -> Iterator[tuple[set[int], set[int]]]:
    """What may be lost of a prefix: any subset of a few calls, else single ones and samples."""
    waiting = pending(ops)
    everything = set(waiting)
    writes = {i for i in waiting if ops[i].kind == "write"}
    if len(waiting) <= exhaustive:
        for count in range(len(waiting) + 1):
            for lost in itertools.combinations(waiting, count):
                yield set(lost), set()
    else:
        yield set(), set()
        yield everything, set()
        for i in waiting[-20:]:
            yield {i}, set()
            yield everything - {i}, set()
        for _ in range(num_random):
            yield {i for i in waiting if generator.random() < 0.5}, writes
    if writes:
        yield set(), writes


def write_tree(place: Path, tree: Tree) -> None:
    """Make a tree real, without marks: who gave them has gone with the machine."""
    place.mkdir()
    for name, content in tree.items():
        if name == LEASES_DIR:
            continue
        if isinstance(content, dict):
            write_tree(place / name, content)
        else:
            (place / name).write_bytes(content)

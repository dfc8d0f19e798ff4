"""A foreign checkpoint opened by one rank for all: what its storage answered, sent to the others.

To open a checkpoint is to ask its storage: names, sizes, headers, metadata. One rank asks, and its
`Answers` go to the other ranks, which run the same code on them and come to the same description
without a request. So each format has one way to be opened, and no description needs a form in which
it travels. What the answers do not have is asked of the storage itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec

from holdfast.decoding import decode_msgpack_as
from holdfast.errors import StorageError
from holdfast.storage import Source, Storage
from holdfast.storage.reading import is_absence

T = TypeVar("T")

_Known = dict[bytes, tuple[bool, Any]]


class Answers:
    """What storages answered while a checkpoint was opened, by question.

    Args:
        data: What `encode` returned on the rank that asked; None on that rank.
    """

    def __init__(self, data: bytes | None = None) -> None:
        self._known: _Known = {} if data is None else decode_msgpack_as(data, _Known)

    def encode(self) -> bytes:
        """Return all answers so far, about as many bytes as were read."""
        return msgspec.msgpack.encode(self._known)

    def of(self, storage: Storage, label: str) -> Storage:
        """Return a storage that answers from here what it can, and notes what it cannot.

        Args:
            storage: Is asked for the rest.
            label: Its path, which distinguishes it from others.
        """
        return cast(Storage, _Asked(storage, self, label))

    def ask(self, question: Sequence[object], find: Callable[[], T]) -> T:
        """Return the answer that is known, or note and return that of `find`.

        A StorageError is an answer, too. The answer is a number, a text, bytes or a list of these.
        """
        key = os.fsencode("\0".join(map(str, question)))
        known = self._known.get(key)
        if known is not None:
            is_good, value = known
            if is_good:
                return cast(T, value)
            message, is_absent = value
            raise StorageError(message) from (FileNotFoundError() if is_absent else None)
        try:
            answer = find()
        except StorageError as error:
            self._known[key] = False, (str(error), is_absence(error))
            raise
        self._known[key] = True, answer
        return answer


class _Asked:
    """The reading half of a storage, whose answers are noted; everything else is the storage's."""

    def __init__(self, behind: Storage, answers: Answers, label: str) -> None:
        self.behind = behind
        self.answers = answers
        self.label = label

    def __getattr__(self, name: str) -> Any:
        # A shorter way to read, which some stores have, would go around the answers.
        if name in ("read_at_most", "file_sizes"):
            raise AttributeError(name)
        return getattr(self.behind, name)

    def ask(self, find: Callable[[], T], *question: object) -> T:
        return self.answers.ask((self.label, *question), find)

    def list(self, path: str) -> list[str]:
        # As bytes: a name need not be text that can be sent.
        names = self.ask(lambda: [os.fsencode(n) for n in self.behind.list(path)], "list", path)
        return list(map(os.fsdecode, names))

    def exists(self, path: str) -> bool:
        return self.ask(lambda: self.behind.exists(path), "exists", path)

    def is_dir(self, path: str) -> bool:
        return self.ask(lambda: self.behind.is_dir(path), "is_dir", path)

    def size(self, path: str) -> int:
        return self.ask(lambda: self.behind.size(path), "size", path)

    def folders(self) -> Sequence[str]:
        # A method of some stores: of others `folders_in` asks for each name.
        names = self.ask(lambda: [os.fsencode(n) for n in folders_in(self.behind)], "folders")
        return [*map(os.fsdecode, names)]

    def modified(self, path: str) -> float:
        return self.ask(lambda: modified(self.behind, path), "modified", path)

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        def find() -> bytes:
            return bytes(self.behind.read(path, start=start, nbytes=nbytes))

        return self.ask(find, "read", path, start, nbytes)

    def open(self, path: str) -> Source:
        opened: list[Source] = []

        def find() -> bool:
            opened.append(self.behind.open(path))
            return True

        self.ask(find, "open", path)
        return _AskedSource(self, path, opened)


class _AskedSource:
    """An open file, whose answers are noted; opened when something is not known."""

    def __init__(self, storage: _Asked, path: str, opened: list[Source]) -> None:
        self._storage = storage
        self._path = path
        self._opened = opened

    @property
    def nbytes(self) -> int:
        return self._storage.ask(lambda: self._source().nbytes, "nbytes", self._path)

    def readinto(self, buffer: memoryview, *, start: int) -> None:
        def find() -> bytes:
            data = bytearray(len(buffer))
            self._source().readinto(memoryview(data), start=start)
            return bytes(data)

        buffer[:] = self._storage.ask(find, "readinto", self._path, start, len(buffer))

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def _source(self) -> Source:
        if not self._opened:
            self._opened.append(self._storage.behind.open(self._path))
        return self._opened[0]


def behind(storage: Storage) -> Storage:
    """Return the storage itself, without answers."""
    return storage.behind if isinstance(storage, _Asked) else storage


def found_once(storage: Storage, what: str, find: Callable[[], str]) -> str:
    """Return what `find` returns, which must read from `behind(storage)`: once for all ranks.

    For what takes many reads and has a short result.
    """
    return storage.ask(find, "found", what) if isinstance(storage, _Asked) else find()


def modified(storage: Storage, path: str) -> float:
    """Return when a file was written, in seconds since 1970; 0 where a storage does not say."""
    look = getattr(storage, "modified", None)
    return float(look(path)) if look is not None else 0.0


def folders_in(storage: Storage) -> Sequence[str]:
    """Return the names of folders in the root, also those that a store of objects does not list.

    Cost: where a storage has no `folders`, it is asked for each name.
    """
    look = getattr(storage, "folders", None)
    if look is not None:
        return cast(Sequence[str], look())
    return [name for name in storage.list("") if storage.is_dir(name)]

"""A path or URL that may be a foreign checkpoint: a folder, or one file of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TypeGuard, TypeVar

from holdfast.errors import ConfigError, StorageError
from holdfast.foreign.shared_opening import Answers, folders_in, modified
from holdfast.format.names import parse_step_dir
from holdfast.storage import PosixStorage, Source, Storage, is_url, open_storage
from holdfast.storage.places import Opener, as_url, is_folder
from holdfast.storage.reading import is_unknown

T = TypeVar("T")

_MAX_STEP = 10**18
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Folder(PosixStorage):
    """A folder of foreign files, in which links are followed, unlike in our own roots.

    The caches that people name (of the Hugging Face hub) consist of links. A format opens only
    names that the folder lists, so a link is as good as the file that its owner put there.
    """

    def open(self, path: str) -> Source:
        """See `Storage.open`."""
        return self._follow(path, PosixStorage.open)

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        return self._follow(path, PosixStorage.size)

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Storage.read`."""
        return self._follow(path, partial(PosixStorage.read, start=start, nbytes=nbytes))

    def folders(self) -> list[str]:
        """Return the names of folders in the root, and of links to some, sorted.

        Cost: a read of the directory, whose entries say what they are, and a look behind each link.
        """
        with self._guard("list", ""), os.scandir(self.root) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                or (entry.is_symlink() and os.path.isdir(entry))
            )

    def modified(self, path: str) -> float:
        """Return when a file was written, in seconds since 1970; 0 if it is not there."""
        try:
            return (self.root / path).stat().st_mtime
        except OSError:
            return 0.0

    def _follow(self, path: str, method: Callable[[PosixStorage, str], T]) -> T:
        """Return what a method of `PosixStorage` says of a file, or of the one behind a link."""
        target = self._target(path)
        if target is None:
            return method(self, path)
        return method(PosixStorage(target.parent), target.name)

    def _target(self, path: str) -> Path | None:
        """Return the file that a link leads to; None if the path is not a link."""
        place = self.root / path
        try:
            return place.resolve(strict=True) if place.is_symlink() else None
        except (OSError, RuntimeError) as error:  # RuntimeError: a circle, before Python 3.13
            reason = error.strerror if isinstance(error, OSError) else "it leads to itself"
            raise StorageError(f"{place} is a link that leads nowhere: {reason}") from None


@dataclass(frozen=True)
class Location:
    """A folder, or a file in it.

    Args:
        storage: The folder.
        file: Name of the file; None for the folder itself.
        label: The path, for messages.
        answers: Of the rank that opens it for all; None if each opens it for itself.
        opener: Opens the URL of a folder.
    """

    storage: Storage
    file: str | None
    label: str
    answers: Answers | None = None
    opener: Opener = open_storage

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        answers: Answers | None = None,
        *,
        opener: Opener = open_storage,
    ) -> Location:
        """Return the location of a path or URL; ConfigError if nothing is there.

        Args:
            path: A folder or a file.
            answers: Where the answers of the storage are noted, or come from.
            opener: Opens a URL.

        Cost: of a URL three requests, and one for each thousand names.
        """
        if is_url(path):
            return cls._in_bucket(as_url(path).rstrip("/"), answers, opener)
        path = Path(path)
        is_dir = is_folder(path)
        folder = path if is_dir else path.parent
        storage = _noted(Folder(folder), str(folder), answers)
        return cls(storage, None if is_dir else path.name, str(path), answers)

    @classmethod
    def _in_bucket(cls, url: str, answers: Answers | None, opener: Opener) -> Location:
        above, _, name = url.rpartition("/")
        if not above.endswith("/"):  # a name in a bucket, not a bucket
            storage = _noted(opener(above), above, answers)
            if storage.exists(name) and not storage.is_dir(name):
                return cls(storage, name, url, answers, opener)
        location = cls(_noted(opener(url), url, answers), None, url, answers, opener)
        if not location.names() and not folders_in(location.storage):
            raise ConfigError(f"nothing is at {url}")
        return location

    def inside(self, name: str) -> Location | None:
        """Return the location of a folder in this one; None if there is none of that name."""
        path = self.storage.local_path("")
        if path is not None:
            return Location.of(path / name, self.answers) if (path / name).is_dir() else None
        folder = f"{self.label}/{name}"
        if self.file is not None or not is_url(folder):
            return None
        storage = _noted(self.opener(folder), folder, self.answers)
        location = Location(storage, None, folder, self.answers, self.opener)
        return location if location.names() else None

    def or_latest(
        self, pointer: str, is_one: Callable[[Location], bool], name_in: Callable[[str], str | None]
    ) -> Location | None:
        """Return the checkpoint that this is, or that a run names as its latest; else None.

        Args:
            pointer: The file in which a run does.
            is_one: Whether a location is such a checkpoint.
            name_in: Returns the name of a folder that the file's text means; None for none.
        """
        if self.file is not None:
            return None
        if is_one(self):
            return self
        text = self.head(pointer, 256).decode("utf-8", "replace") if self.has(pointer) else ""
        name = name_in(text.strip())
        inner = self.inside(name) if name else None
        return inner if inner is not None and is_one(inner) else None

    def names(self) -> Sequence[str]:
        """Return the names in the folder, sorted."""
        return self._names

    @cached_property
    def _names(self) -> list[str]:
        return self.storage.list("")

    def has(self, name: str) -> bool:
        """Return True if the folder has a file of that name."""
        return self.file is None and self.storage.exists(name) and not self.storage.is_dir(name)

    def head(self, name: str, nbytes: int) -> bytes:
        """Return the first bytes of a file, fewer if it is shorter; empty if it is not one.

        Raises:
            StorageError: It cannot be known: the file may not be read, or the storage not reached.
        """
        try:
            return self.storage.read(name, nbytes=min(nbytes, self.storage.size(name)))
        except StorageError as error:
            if is_unknown(error):
                raise
            return b""

    @property
    def step(self) -> int:
        """The step that the folder's name states (iter_…); 0 if it states none."""
        path = self.storage.local_path("")
        name = self.label.rpartition("/")[2] if path is None else path.resolve().name
        return parse_step_dir(name) or 0

    def created(self, names: Iterable[str]) -> str:
        """Return when the newest of these files was written, ISO 8601 UTC."""
        times = [modified(self.storage, name) for name in names]
        return datetime.fromtimestamp(int(max(times, default=0.0)), UTC).isoformat()


def is_step(value: object) -> TypeGuard[int]:
    """Return True for a value of a file that can be the number of a step."""
    return type(value) is int and 0 <= value < _MAX_STEP


def _noted(storage: Storage, label: str, answers: Answers | None) -> Storage:
    return storage if answers is None else answers.of(storage, label)


def why_none(location: Location, name: str) -> str:
    """Return why a file that looks like one of a checkpoint is none, where that is known."""
    if location.head(name, len(_LFS_POINTER)) == _LFS_POINTER:
        return ", but a pointer of Git LFS, whose bytes were not downloaded (`git lfs pull`)"
    path = location.storage.local_path(name)
    if path is not None and path.is_symlink() and not path.exists():
        return ", but a link that leads nowhere"
    return ""

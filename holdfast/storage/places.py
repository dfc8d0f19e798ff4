"""From what a person writes to a storage: a path is a directory, a URL is a bucket."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.storage.posix import PosixStorage
from holdfast.storage.storage_protocol import Storage

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,2}(?=[^/])", re.ASCII)

_FILE = re.compile(r"file:/", re.ASCII | re.IGNORECASE)
_HOME = re.compile(r"~[\w.-]*(/|$)")
_ALMOST = re.compile(r"(s3a?|gs|gcs|az|azure|abfs|memory)(:|//)", re.ASCII | re.IGNORECASE)


Opener = Callable[[str], Storage]
"""Opens the storage at a path or URL, as `open_storage` does with its own settings."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return True if it is the URL of a bucket; also as a `Path`, which makes s3:/ of s3://."""
    return _URL.match(os.fspath(place)) is not None


def as_url(place: str | os.PathLike[str]) -> str:
    """Return a URL as it was written, if it went through a `Path`."""
    scheme, _, rest = os.fspath(place).partition(":")
    return f"{scheme}://{rest.lstrip('/')}"


def shown(place: str | os.PathLike[str]) -> str:
    """Return a path or URL as a person wrote it: a `Path` makes one slash of the two in a URL."""
    return as_url(place) if is_url(place) else os.fspath(place)


def check_place(place: str | os.PathLike[str]) -> None:
    """Raise ConfigError for what begins like a URL or a home directory, and is neither.

    Else a save to `s3:bucket/run` or `~/run` would go to a directory of this name below the current
    one, and a run that is started elsewhere would find nothing there.
    """
    text = os.fspath(place)
    if _HOME.match(text):
        raise ConfigError(
            f"{text!r}: only a shell makes a home directory of ~, at the start of a word; in a "
            f"program write os.path.expanduser({text!r}); for a directory of this name write its "
            f"absolute path"
        )
    if _FILE.match(text):
        raise ConfigError(f"{text!r}: a directory is written as its path, without file:")
    match = None if is_url(text) else _ALMOST.match(text)
    if match is not None:
        raise ConfigError(
            f"{text!r} is not a whole URL: write {match[1].lower()}://bucket/run; for a directory "
            f"of this name write its absolute path"
        )


def is_folder(path: Path) -> bool:
    """Return True if a path of the user's is a directory, False if it is anything else.

    Raises:
        ConfigError: Nothing is there, or it cannot be examined.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be examined: {reason}") from None


def check_local(place: str | os.PathLike[str], *, what: str) -> None:
    """Raise ConfigError for a URL where something is written that no bucket of ours holds.

    Else a directory s3: would be made below the current one, and all would look right.
    """
    if is_url(place):
        # Our names in a bucket are objects that lead to the data: no other program follows them.
        raise ConfigError(
            f"{as_url(place)}: only holdfast's own format is written to a bucket; write {what} to "
            f"a directory, and upload it with the cloud's own tools"
        )


def open_storage(place: str | os.PathLike[str], **settings: object) -> Storage:
    """Return the storage at a directory or a URL; nothing is read.

    Raises:
        ConfigError: The place is empty or starts with ~, or the URL is not whole, or not one of a
            known store, or the package for it is missing.
    """
    if not os.fspath(place):
        # As of a variable that is not set: `Path("")` would be the current directory.
        raise ConfigError("'' is not a place; for the current directory write '.'")
    check_place(place)
    if not is_url(place):
        return PosixStorage(Path(place))
    # Here and not above: most runs need no object store, and obstore may not be installed.
    from holdfast.storage.objects import ObjectStorage

    return ObjectStorage(as_url(place), **settings)  # type: ignore[arg-type]

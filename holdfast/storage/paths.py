"""Paths below the root of a storage: which are refused, in every store alike."""

from __future__ import annotations

from holdfast.errors import StorageError

_MAX_NAME = 255


def split_path(path: str) -> tuple[str, ...]:
    """Return the names of a relative path, () for the root; StorageError if it could escape."""
    if path == "":
        return ()
    names = tuple(path.split("/"))
    if any(name in ("", ".", "..") or "\0" in name or len(name) > _MAX_NAME for name in names):
        raise StorageError(
            f"path {path[:200]!r} is refused: a path must be relative and consist of plain names, "
            'without "." or ".."'
        )
    return names

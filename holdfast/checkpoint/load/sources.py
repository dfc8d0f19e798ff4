"""Where else a load may read from: another run, or a checkpoint in a foreign format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from holdfast.errors import ConfigError
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.view import CatalogStorage
from holdfast.format.names import MANIFEST, list_steps, parse_step_dir
from holdfast.storage import PosixStorage, Storage, is_url, open_storage
from holdfast.storage.places import as_url

LoadSource: TypeAlias = str | os.PathLike[str] | Storage | Catalog
"""A path, a root of checkpoints as a `Storage`, or the description of a foreign checkpoint."""


def open_source(source: LoadSource, *, step: int | None) -> tuple[Storage, int | None]:
    """Return the storage that a load reads, and the step in it; None for the newest.

    Args:
        source: Where to load from.
        step: The step asked for.

    Raises:
        ConfigError: Nothing that can be loaded is there, or the path is one checkpoint of another
            step.
        CorruptionError, StorageError: A foreign checkpoint is damaged or cannot be read.

    Cost: that of `open_catalog` for a foreign format, on this rank.
    """
    if isinstance(source, Catalog):
        return CatalogStorage(source), step
    if not isinstance(source, str | os.PathLike):
        return source, step
    if is_url(source):
        return _place_in_bucket(as_url(source).rstrip("/"), step)
    path = Path(source)
    if path.is_dir():
        storage = PosixStorage(path)
        if storage.exists(MANIFEST):
            return _one_checkpoint(path, step)
        if list_steps(storage):
            return storage, step
    return CatalogStorage(open_catalog(path)), step


def _place_in_bucket(url: str, step: int | None) -> tuple[Storage, int | None]:
    """Return the root of checkpoints at a URL, and the step that the URL or the caller names."""
    above, _, name = url.rpartition("/")
    own = parse_step_dir(name)
    if own is None:
        return open_storage(url), step
    if step not in (None, own):
        raise ConfigError(f"{url} is the checkpoint of step {own}, not of step {step}")
    return open_storage(above), own


def _one_checkpoint(path: Path, step: int | None) -> tuple[Storage, int]:
    """Return the root above a checkpoint of our own, and its step."""
    real = path.resolve()
    own = parse_step_dir(real.name)
    if own is None:
        raise ConfigError(
            f"{path} is a checkpoint without the name of a step (iter_…): load it from a directory "
            f"that has it under such a name"
        )
    if step not in (None, own):
        raise ConfigError(f"{path} is the checkpoint of step {own}, not of step {step}")
    return PosixStorage(real.parent), own

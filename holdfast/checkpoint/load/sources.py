"""Where else a load may read from: another run, or a checkpoint in a foreign format."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint.options import OnDrift
from holdfast.errors import ConfigError, CorruptionError
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.convert import open_any
from holdfast.foreign.formats import open_catalog
from holdfast.foreign.name_map import NameMap
from holdfast.foreign.name_map_presets import name_map_of
from holdfast.foreign.own_format import find_in_bucket
from holdfast.foreign.view import CatalogStorage
from holdfast.format.names import MANIFEST, list_steps, parse_step_dir, step_dir
from holdfast.storage import PosixStorage, Storage, is_url
from holdfast.storage.places import as_url

LoadSource: TypeAlias = str | os.PathLike[str] | Storage | Catalog
"""A path, a root of checkpoints as a `Storage`, or the description of a foreign checkpoint."""

NameSource: TypeAlias = NameMap | str | os.PathLike[str]
"""A map of names, the name of a preset, or the path of a TOML file."""


def open_source(
    source: LoadSource,
    stack: ExitStack,
    *,
    step: int | None,
    names: NameSource | None = None,
    on_drift: OnDrift = "raise",
) -> tuple[Storage, int | None]:
    """Return the storage that a load reads, and the step in it; None for the newest.

    Args:
        source: Where to load from.
        stack: Closes what a name map reads from.
        step: The step asked for.
        names: A map of names that comes between.
        on_drift: What to do if stored copies of a tensor differ in a foreign checkpoint.

    Raises:
        ConfigError: Nothing that can be loaded is there, or the path is one checkpoint of another
            step.
        CorruptionError, StorageError: A foreign checkpoint is damaged or cannot be read, or has
            copies that differ and `on_drift` is "raise".

    Cost: that of `open_catalog` for a foreign format, on this rank.
    """
    if names is not None:
        catalog = _catalog_of(source, stack, step)
        return _shown(name_map_of(names).apply(catalog).catalog, on_drift), step
    if isinstance(source, Catalog):
        return _shown(source, on_drift), step
    if not isinstance(source, str | os.PathLike):
        return source, step
    if is_url(source):
        return _in_bucket(as_url(source).rstrip("/"), step, on_drift)
    path = Path(source)
    if path.is_dir():
        storage = PosixStorage(path)
        if storage.exists(MANIFEST):
            return _one_checkpoint(path, step)
        if list_steps(storage):
            return storage, step
        if step is not None and storage.is_dir(step_dir(step)):
            path = path / step_dir(step)  # of a run in a foreign format
    return _shown(open_catalog(path), on_drift), step


def _shown(catalog: Catalog, on_drift: OnDrift) -> CatalogStorage:
    """Return a catalog as a storage; CorruptionError or a warning if copies in it differ."""
    if catalog.drift and on_drift == "raise":
        raise CorruptionError(
            f"{catalog.drift}. Which copy is right is not stored; on_drift='warn' loads the first "
            f"copy on all ranks"
        )
    if catalog.drift:
        logging.getLogger("holdfast").warning("%s; the first copy is loaded", catalog.drift)
    return CatalogStorage(catalog)


def _catalog_of(source: LoadSource, stack: ExitStack, step: int | None) -> Catalog:
    """Describe a source of any format; its digests, if it has any, are checked as it is read."""
    if isinstance(source, Catalog):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError("a name map needs the path of a checkpoint, or its description")
    return stack.enter_context(open_any(source, step=step))


def _in_bucket(url: str, step: int | None, on_drift: OnDrift) -> tuple[Storage, int | None]:
    """Return the root of checkpoints at a URL and the step in it, or what is foreign there."""
    own = find_in_bucket(url, step)
    if own is not None:
        storage, directory = own
        return storage, parse_step_dir(directory)
    return _shown(open_catalog(url), on_drift), step


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

"""Where else a load may read from: another run, or a checkpoint in a foreign format."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import msgspec

from holdfast.checkpoint.options import LoadSource, NameSource, OnDrift
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, CorruptionError, disagreement
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.convert import open_any
from holdfast.foreign.formats import location_of_step, open_catalog
from holdfast.foreign.location import Location
from holdfast.foreign.name_map import NameMap
from holdfast.foreign.name_map_presets import name_map_of
from holdfast.foreign.own_format import own_place
from holdfast.foreign.shared_opening import Answers
from holdfast.foreign.view import CatalogStorage
from holdfast.format.digest import digest128
from holdfast.format.names import parse_step_dir
from holdfast.parallel import Control
from holdfast.storage import Storage, is_url
from holdfast.storage.places import Opener, as_url
from holdfast.storage.posix import absolute


class _Place(msgspec.Struct, array_like=True, frozen=True):
    """What a path or URL is, found out by one rank.

    Args:
        is_own: Whether it is a root of checkpoints of our own, or one of them.
        path: Of the root, or of the foreign checkpoint.
        step: The step in it; None for the newest, or if it does not matter.
    """

    is_own: bool
    path: str
    step: int | None


def open_source(
    source: LoadSource,
    stack: ExitStack,
    *,
    control: Control,
    opener: Opener,
    step: int | None,
    names: NameSource | None = None,
    on_drift: OnDrift = "raise",
) -> tuple[Storage, int | None]:
    """Return the storage that a load reads, and the step in it; None for the newest.

    All ranks together: the coordinator looks at a path and opens what is there, and the others
    open the same from what it has read (`Answers`).

    Args:
        source: Where to load from.
        stack: Closes what a name map reads from.
        control: Of the ranks of the load.
        opener: Opens a path or URL.
        step: The step asked for.
        names: A map of names that comes between.
        on_drift: What to do if stored copies of a tensor differ in a foreign checkpoint.

    Raises:
        ConfigError: Nothing that can be loaded is there, or the path is one checkpoint of another
            step.
        CorruptionError, StorageError: A foreign checkpoint is damaged or cannot be read, or has
            copies that differ and `on_drift` is "raise".
        PlanError: Ranks name different sources, or maps that differ.

    Cost: that of `open_catalog` for a foreign format, on the coordinator. With several ranks a
    collective and a broadcast of the metadata that it has read, and the time to interpret it.
    """
    name_map = None if names is None else name_map_of(cast("NameMap | str | Path", names))
    place: _Place | None = None
    storage: Storage | None = None
    answers = Answers()
    data: bytes | None = None
    if control.is_coordinator and isinstance(source, str | os.PathLike):
        place = _find(source, step, opener, is_mapped=name_map is not None)
        noted = answers if control.size > 1 else None
        storage = _open(place, noted, opener, stack, name_map, on_drift)
        data = msgspec.msgpack.encode((place, answers.encode())) if control.size > 1 else None
    if control.size > 1:
        labels, data = control.gather_and_broadcast(
            _label_of(source, name_map).encode(), data, phase="load: source"
        )
        if len(set(labels)) > 1:
            texts = [label.decode() for label in labels]
            raise disagreement("load", "source", texts, ranks=control.ranks)
    if isinstance(source, Catalog):
        return _shown(_mapped(source, name_map), on_drift), step
    if not isinstance(source, str | os.PathLike):
        if name_map is not None:
            raise ConfigError("a name map needs the path of a checkpoint, or its description")
        return cast(Storage, source), step
    if storage is None or place is None:
        place, known = decode_msgpack_as(data or b"", tuple[_Place, bytes])
        storage = _open(place, Answers(known), opener, stack, name_map, on_drift)
    return storage, place.step


def _label_of(source: LoadSource, name_map: NameMap | None) -> str:
    """Return what all ranks must name alike."""
    if name_map is not None:
        digest = digest128(name_map.describe().encode())[:12]
        return f"{_label_of(source, None)} by {name_map.name} ({digest})"
    if isinstance(source, Catalog):
        return source.label
    if not isinstance(source, str | os.PathLike):
        return cast(Storage, source).describe("")
    label = as_url(source).rstrip("/") if is_url(source) else str(absolute(source))
    return label.encode(errors="backslashreplace").decode()


def _find(
    source: str | os.PathLike[str], step: int | None, opener: Opener, *, is_mapped: bool
) -> _Place:
    """Return what a path or URL is."""
    own = own_place(source, step, opener=opener)
    if own is not None:
        if own.directory is None:
            return _Place(True, own.root, step)
        known = parse_step_dir(own.directory)
        if known is None and not is_mapped:
            raise ConfigError(
                f"{os.fspath(source)} is a checkpoint without the name of a step (iter_…): load it "
                f"from a directory that has it under such a name"
            )
        return _Place(True, own.root, known)
    path = as_url(source).rstrip("/") if is_url(source) else os.fspath(source)
    if step is not None:
        path = location_of_step(Location.of(path, opener=opener), step).label
    return _Place(False, path, step)


def _open(
    place: _Place,
    answers: Answers | None,
    opener: Opener,
    stack: ExitStack,
    name_map: NameMap | None,
    on_drift: OnDrift,
) -> Storage:
    """Open what is at a place; a name map reads from it, digests included if it has any."""
    if not place.is_own:
        catalog = open_catalog(Location.of(place.path, answers, opener=opener))
        return _shown(_mapped(catalog, name_map), on_drift)
    if name_map is None:
        return opener(place.path)
    own = stack.enter_context(open_any(place.path, step=place.step, opener=opener))
    return _shown(_mapped(own, name_map), on_drift)


def _mapped(catalog: Catalog, name_map: NameMap | None) -> Catalog:
    """Return a catalog under other names."""
    return catalog if name_map is None else name_map.apply(catalog).catalog


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

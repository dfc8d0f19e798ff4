"""The formats that are known, and which of them a path has."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.collector import collector_paused
from holdfast.errors import ConfigError
from holdfast.foreign import (
    dcp,
    safetensors_files,
    torch_dist,
    torch_files,
    torchsnapshot,
    zero,
)
from holdfast.foreign.catalog import Catalog, require_text
from holdfast.foreign.location import Location
from holdfast.foreign.other_formats import refuse_by_name, unread_files, unread_folders
from holdfast.foreign.shared_opening import behind
from holdfast.format.names import LATEST, step_dir


class _Module(Protocol):
    """What the module of a format has."""

    FORMAT: str

    def detect(self, location: Location) -> bool:
        """Return True for a location in this format, by content."""

    def open_catalog(self, location: Location) -> Catalog:
        """Describe a location; HoldfastError if it is damaged or cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format.

    Args:
        module: Detects and opens it.
        title: As people call it, if not by the name that its catalogs have.
        own: How the names of files end that the module reads, or says why not.
        is_flat: It has no folders in its folder, so that what is in one is of another checkpoint.
    """

    module: _Module
    title: str
    own: tuple[str, ...]
    is_flat: bool

    def describe(self, location: Location) -> Catalog:
        """Describe the checkpoint at a location of this format; errors as of its module."""
        with collector_paused():  # a description has as many objects as it has chunks, and stays
            catalog = self.module.open_catalog(location)
            require_text(catalog)
        step = catalog.step or (0 if location.file else location.step)
        notes = [*catalog.left_out]
        if self.is_flat and location.file is None:
            notes += unread_files(location, self.own)
            notes += unread_folders(location, _title)
        return replace(catalog, storage=behind(catalog.storage), step=step, left_out=notes)


def _format(
    module: _Module, *, title: str = "", own: tuple[str, ...] = (), is_flat: bool = True
) -> Format:
    return Format(module=module, title=title or module.FORMAT, own=own, is_flat=is_flat)


FORMATS = (
    # Before DCP: its checkpoints are DCP directories, too.
    _format(torch_dist, own=(".distcp", torch_dist.COMMON), is_flat=False),
    _format(dcp, own=(".distcp",)),
    _format(torchsnapshot, is_flat=False),
    _format(torch_files, own=torch_files.OWN),
    _format(safetensors_files, own=safetensors_files.OWN, title="Hugging Face safetensors"),
    # Last: a run has other state next to `latest`, and a folder with whole weights is those.
    _format(zero, is_flat=False),
)
"""In the order in which they are tried: the ones with a file of their own first."""


def detect_format(location: Location) -> Format | None:
    """Return the format of a location, or None if it has none of those known."""
    return next((each for each in FORMATS if each.module.detect(location)), None)


def _title(location: Location) -> str:
    """Return the title of the format of a location; empty if it has none of those known."""
    known = detect_format(location)
    return "" if known is None else known.title


def unknown(location: Location) -> str:
    """Return the message for a place that has no known format."""
    known = ", ".join(each.title for each in FORMATS)
    none = f"{location.label} is not a checkpoint in a format that is known: {known}"
    return why_unknown(location) or none


def why_unknown(location: Location) -> str:
    """Return the message for a place whose format is known not to be read; empty for others."""
    return refuse_by_name(location, _title)


def open_catalog(path: str | os.PathLike[str] | Location) -> Catalog:
    """Describe the foreign checkpoint at a path.

    Raises:
        ConfigError: Nothing is there, or nothing in a known format.
        CorruptionError: It is damaged, or asks for what is never run.
        StorageError: It cannot be read.

    Cost: reads the metadata of the checkpoint, not its tensors.
    """
    location = path if isinstance(path, Location) else Location.of(path)
    chosen = detect_format(location)
    if chosen is None:
        raise ConfigError(unknown(location))
    return chosen.describe(location)


def find_step(location: Location, step: int | None, *, renumber: bool = False) -> Catalog | None:
    """Describe the checkpoint of a step: of a run of another program, or the one checkpoint there.

    None if nothing in a known format is there.

    Args:
        location: A run, or a checkpoint.
        step: The step; None for the newest of a run.
        renumber: The caller gives this number to the one checkpoint there, of whatever step it is.

    Raises:
        ConfigError: The checkpoint is of another step.
        CorruptionError, StorageError: As `open_catalog`.
    """
    chosen = location_of_step(location, step)
    known = detect_format(chosen)
    if known is None:
        return None
    catalog = known.describe(chosen)
    is_of_run = chosen is not location or location.has(LATEST)
    if step not in (None, catalog.step) and (is_of_run or not renumber):
        raise ConfigError(f"{chosen.label} has step {catalog.step}, not {step}")
    return catalog


def location_of_step(location: Location, step: int | None) -> Location:
    """Return the location of a step in a run of another program, or the location itself."""
    if step is None or location.file is not None:
        return location
    return location.inside(step_dir(step)) or location

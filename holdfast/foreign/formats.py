"""The formats that are known, and which of them a path has."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format.

    Args:
        name: As the command line has it.
        title: As people call it.
        detect: Whether a location has this format, by content.
        open: Its description. HoldfastError if it is damaged or cannot be read.
        own: How the names of files end that `open` reads, or says why not.
        is_flat: It has no folders in its folder, so that what is in one is of another checkpoint.
    """

    name: str
    title: str
    detect: Callable[[Location], bool]
    open: Callable[[Location], Catalog]
    own: tuple[str, ...]
    is_flat: bool = True

    def describe(self, location: Location) -> Catalog:
        """Describe the checkpoint at a location of this format; errors as of `open`."""
        with collector_paused():  # a description has as many objects as it has chunks, and stays
            catalog = self.open(location)
            require_text(catalog)
        step = catalog.step or (0 if location.file else location.step)
        notes = [*catalog.left_out]
        if self.is_flat and location.file is None:
            notes += unread_files(location, self.own)
            notes += unread_folders(location, _title)
        return replace(catalog, storage=behind(catalog.storage), step=step, left_out=notes)


FORMATS: tuple[Format, ...] = (
    # Before DCP: its checkpoints are DCP directories, too.
    Format(
        name="torch_dist",
        title="Megatron torch_dist",
        detect=torch_dist.detect,
        open=torch_dist.open_catalog,
        own=(".distcp", torch_dist.COMMON),
        is_flat=False,
    ),
    Format(
        name="dcp",
        title="PyTorch DCP",
        detect=dcp.detect,
        open=dcp.open_catalog,
        own=(".distcp",),
    ),
    Format(
        name="torchsnapshot",
        title="torchsnapshot",
        detect=torchsnapshot.detect,
        open=torchsnapshot.open_catalog,
        own=(),
        is_flat=False,
    ),
    Format(
        name="torch_save",
        title="torch.save",
        detect=torch_files.detect,
        open=torch_files.open_catalog,
        own=torch_files.OWN,
    ),
    Format(
        name="safetensors",
        title="Hugging Face safetensors",
        detect=safetensors_files.detect,
        open=safetensors_files.open_catalog,
        own=safetensors_files.OWN,
    ),
    # Last: a run has other state next to `latest`, and a folder with whole weights is those.
    Format(
        name="zero",
        title="DeepSpeed ZeRO",
        detect=zero.detect,
        open=zero.open_catalog,
        own=(),
        is_flat=False,
    ),
)
"""In the order in which they are tried: the ones with a file of their own first."""


def detect_format(location: Location) -> Format | None:
    """Return the format of a location, or None if it has none of those known."""
    return next((each for each in FORMATS if each.detect(location)), None)


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

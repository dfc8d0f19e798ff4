"""From a checkpoint in one format to one in another: streamed, proven, named at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.foreign import dcp_output, own_format, safetensors_files, torch_save_output
from holdfast.foreign.catalog import Catalog, require_tilings
from holdfast.foreign.checksums import refuse_damage
from holdfast.foreign.formats import (
    detect_format,
    find_step,
    location_of_step,
    open_catalog,
    unknown,
)
from holdfast.foreign.location import Location
from holdfast.foreign.output import (
    DEFAULT_MAX_FILE_NBYTES,
    DEFAULT_MEMORY_NBYTES,
    OnLeftover,
    OnProgress,
    Output,
    Reopen,
    refuse_existing,
    write_output,
)
from holdfast.format.names import list_steps, parse_step_dir, point_to_newest, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.versions import lease_chosen
from holdfast.storage import PosixStorage, Storage, is_url, open_storage
from holdfast.storage.places import Opener, check_local

TargetFormat = Literal["holdfast", "huggingface", "safetensors", "dcp", "torch_save"]
"""The formats that can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint is written in another format.

    Args:
        to: The format.
        part: The part that weights are taken from, for formats that hold nothing else; see
            `weights_of`.
        whole_tree: A file of `torch.save` gets all parts.
        flat_optimizer: See `dcp_output.layout`.
        max_file_nbytes: Of a folder of several files.
        config_from: See `safetensors_files.layout`.
        step: Number of the step in a root of our own; None for that of the source.
    """

    to: TargetFormat
    part: str | None = None
    whole_tree: bool = False
    flat_optimizer: bool = False
    max_file_nbytes: int = DEFAULT_MAX_FILE_NBYTES
    config_from: Path | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is laid out and not made yet.

    Args:
        catalog: The source.
        output: What is to be written.
        above: Where the result gets its name.
        name: The name.
        reopen: Opens the result, to prove it.
        is_step: The result is a new step in a root of our own.
    """

    catalog: Catalog
    output: Output
    above: Storage
    name: str
    reopen: Reopen
    is_step: bool = False

    @property
    def to(self) -> str:
        """The path or URL that the result gets, for messages."""
        return self.above.describe(self.name)

    def refuse_existing(self) -> None:
        """Raise ConfigError if the name is taken."""
        refuse_existing(self.above, self.name)

    def run(
        self,
        *,
        memory_nbytes: int = DEFAULT_MEMORY_NBYTES,
        on_progress: OnProgress = lambda nbytes: None,
        on_leftover: OnLeftover = lambda path: None,
    ) -> None:
        """Write it. Errors and cost: `refuse_damage` of the source, and `write_output`."""
        refuse_damage(self.catalog)
        write_output(
            self.catalog,
            self.output,
            self.above,
            self.name,
            reopen=self.reopen,
            memory_nbytes=memory_nbytes,
            on_progress=on_progress,
            on_leftover=on_leftover,
        )
        if self.is_step:
            with suppress(StorageError):  # for people only; a repair corrects it
                point_to_newest(self.above)


def plan_conversion(
    catalog: Catalog, to: str | os.PathLike[str], options: ConvertOptions
) -> Conversion:
    """Lay out the catalog in another format.

    Args:
        catalog: The source.
        to: The file or folder to make; for our own format a root, or the URL of one.
        options: How.

    Raises:
        ConfigError: An option does not fit or would do nothing, another program's format is to be
            in a bucket, or our own in a folder of another program.
        CorruptionError: Stored copies of a tensor differ: which one is right is not known. Or the
            chunks of a tensor do not cover each of its elements once.
        PlanError: The format cannot hold a name, a type or a value.
    """
    _refuse_idle(options)
    if catalog.drift:
        raise CorruptionError(f"{catalog.drift}. Which copy is right is not stored")
    require_tilings(catalog)
    if options.to == "holdfast":
        step = catalog.step if options.step is None else options.step
        _refuse_foreign_folder(to)
        return Conversion(
            catalog=catalog,
            output=own_format.layout(catalog, step=step),
            above=open_storage(to),
            name=step_dir(step),
            reopen=own_format.reopen,
            is_step=True,
        )
    check_local(to, what=options.to)
    path = Path(to)
    output = _layout(catalog, options)
    if not output.is_folder:
        output = replace(output, files=[replace(each, name=path.name) for each in output.files])
    return Conversion(
        catalog=catalog,
        output=replace(output, notes=[*output.notes, *_lost_step(catalog, output, path.name)]),
        above=PosixStorage(path.parent),
        name=path.name,
        reopen=reopen_foreign,
    )


def _lost_step(catalog: Catalog, output: Output, name: str) -> list[str]:
    """Say that the step is lost, unless the name of the folder states it, as a reader takes it."""
    if catalog.step == 0 or (output.is_folder and parse_step_dir(name) == catalog.step):
        return []
    known = f"; a folder named {step_dir(catalog.step)} states it" if output.is_folder else ""
    return [f"the number of the step, {catalog.step}, is left out{known}"]


def _refuse_idle(options: ConvertOptions) -> None:
    """Raise ConfigError for an option that the format has no use for: it would do nothing."""
    to = options.to
    if options.flat_optimizer and to != "dcp":
        raise ConfigError(f"{to} has no flat form of an optimizer")
    if options.config_from is not None and to != "huggingface":
        raise ConfigError(f"{to} has no place for the files of {options.config_from}")
    is_folder = to in ("huggingface", "dcp")
    is_chosen = options.max_file_nbytes != DEFAULT_MAX_FILE_NBYTES
    if is_chosen and not is_folder:
        raise ConfigError(f"the size of files cannot be chosen for {to}: only of huggingface, dcp")
    if options.max_file_nbytes < 1:
        raise ConfigError("files of 0 bytes hold no tensor; choose a larger size")


def _refuse_foreign_folder(to: str | os.PathLike[str]) -> None:
    """Raise ConfigError if a directory has the files of another program's checkpoint.

    With a step of ours in it, the directory would be read as ours, and they would be hidden.
    """
    if is_url(to) or not Path(to).is_dir() or list_steps(PosixStorage(Path(to))):
        return
    kind = detect_format(Location.of(to))
    if kind is not None:
        raise ConfigError(
            f"{to} has files of {kind.title}, which a step in it would hide; choose another name"
        )


def reopen_foreign(storage: Storage, name: str) -> Catalog:
    """Describe what was written in a foreign format, in a directory."""
    path = storage.local_path(name)
    assert path is not None
    return open_catalog(path)


def _layout(catalog: Catalog, options: ConvertOptions) -> Output:
    """Lay out the catalog in a foreign format; errors as `plan_conversion`."""
    takes_all = options.to == "dcp" or options.whole_tree
    if options.whole_tree and options.to not in ("dcp", "torch_save"):
        raise ConfigError(f"a whole tree cannot be written as {options.to}, which holds weights")
    if takes_all and options.part is not None:
        raise ConfigError(f"all parts are written, so that {options.part!r} cannot be chosen")
    if options.to == "dcp":
        return dcp_output.layout(
            catalog,
            max_file_nbytes=options.max_file_nbytes,
            flat_optimizer=options.flat_optimizer,
        )
    if options.to == "torch_save":
        return torch_save_output.layout(catalog, part=options.part, whole_tree=options.whole_tree)
    return safetensors_files.layout(
        catalog,
        part=options.part,
        max_file_nbytes=options.max_file_nbytes,
        config_from=options.config_from,
        is_folder=options.to == "huggingface",
    )


@contextmanager
def open_any(
    place: str | os.PathLike[str],
    *,
    step: int | None = None,
    renumber: bool = False,
    opener: Opener = open_storage,
) -> Iterator[Catalog]:
    """Describe the checkpoint at a path or URL, in our own format or a foreign one.

    One of our own is kept from removal in the body.

    Args:
        place: A checkpoint, or a directory of them.
        step: Which one of them; None for the newest.
        renumber: The step is the caller's number for the one foreign checkpoint at the place.
        opener: Opens a URL.

    Raises:
        ConfigError: Nothing in a known format is there, or not of this step.
        CorruptionError, StorageError: It is damaged, or cannot be read.
    """
    own = own_format.find_own(place, step, opener=opener)
    if own is None:
        location = Location.of(place, opener=opener)
        catalog = find_step(location, step, renumber=renumber)
        if catalog is None:
            raise ConfigError(unknown(location_of_step(location, step)))
        yield catalog
        return

    def look() -> own_format.OwnCheckpoint:
        chosen = own_format.find_own(place, step, opener=opener)
        if chosen is None:
            raise StorageError(f"{own.storage.describe('')} holds no committed checkpoint any more")
        return chosen

    with (
        lease_chosen(look, first=own) as (chosen, lease),
        Snapshot.open(chosen.storage, chosen.directory) as snapshot,
    ):
        lease.set_version(snapshot.manifest.save_id)
        yield own_format.catalog_of(snapshot)

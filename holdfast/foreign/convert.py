"""From a checkpoint in one format to one in another: streamed, proven, named at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from holdfast.errors import ConfigError, CorruptionError
from holdfast.foreign import dcp_output, own_format, safetensors_files, torch_save_output
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.formats import detect_format, open_catalog
from holdfast.foreign.location import Location
from holdfast.foreign.output import DEFAULT_MEMORY_NBYTES, OnProgress, Output, write_output
from holdfast.format.names import MANIFEST, list_steps, point_to_newest, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.versions import read_lease
from holdfast.storage import PosixStorage

TargetFormat = Literal["holdfast", "huggingface", "safetensors", "dcp", "torch_save"]
"""The formats that can be written."""
TARGET_FORMATS: tuple[str, ...] = get_args(TargetFormat)


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
    max_file_nbytes: int = safetensors_files.DEFAULT_MAX_FILE_NBYTES
    config_from: Path | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is laid out and not made yet.

    Args:
        catalog: The source.
        output: What is to be written.
        to: The path that it gets.
        reopen: Opens the result, to prove it.
        root: The root of our own that gets a new checkpoint.
    """

    catalog: Catalog
    output: Output
    to: Path
    reopen: Callable[[Path], Catalog]
    root: Path | None = None

    def run(
        self,
        *,
        memory_nbytes: int = DEFAULT_MEMORY_NBYTES,
        on_progress: OnProgress = lambda nbytes: None,
    ) -> None:
        """Write it. Errors and cost: `write_output`."""
        write_output(
            self.catalog,
            self.output,
            self.to,
            reopen=self.reopen,
            memory_nbytes=memory_nbytes,
            on_progress=on_progress,
        )
        if self.root is not None:
            point_to_newest(PosixStorage(self.root))


def plan_conversion(catalog: Catalog, to: Path, options: ConvertOptions) -> Conversion:
    """Lay out the catalog in another format.

    Raises:
        ConfigError: An option does not fit.
        CorruptionError: Stored copies of a tensor differ: which one is right is not known.
        PlanError: The format cannot hold a name, a type or a value.
    """
    if catalog.drift:
        raise CorruptionError(f"{catalog.drift}. Which copy is right is not stored")
    if options.to == "holdfast":
        step = catalog.step if options.step is None else options.step
        return Conversion(
            catalog=catalog,
            output=own_format.layout(catalog, step=step),
            to=to / step_dir(step),
            reopen=own_format.reopen,
            root=to,
        )
    return Conversion(catalog=catalog, output=_layout(catalog, options), to=to, reopen=open_catalog)


def _layout(catalog: Catalog, options: ConvertOptions) -> Output:
    """Lay out the catalog in a foreign format; errors as `plan_conversion`."""
    takes_all = options.to == "dcp" or options.whole_tree
    if options.whole_tree and options.to not in ("dcp", "torch_save"):
        raise ConfigError(f"a whole tree cannot be written as {options.to}, which holds weights")
    if takes_all and options.part is not None:
        raise ConfigError(f"all parts are written, so that {options.part!r} cannot be chosen")
    if options.flat_optimizer and options.to != "dcp":
        raise ConfigError(f"{options.to} has no flat form of an optimizer")
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
def open_any(path: Path, *, step: int | None = None) -> Iterator[Catalog]:
    """Describe the checkpoint at a path, in our own format or a foreign one.

    One of our own is kept from removal in the body.

    Args:
        path: A checkpoint, or a directory of them.
        step: Which one of a directory of our own; None for the newest.

    Raises:
        ConfigError: Nothing in a known format is there.
        CorruptionError, StorageError: It is damaged, or cannot be read.
    """
    own = _own(path, step) if path.is_dir() else None
    if own is None:
        location = Location.of(path)
        if detect_format(location) is None and path.is_dir():
            raise ConfigError(f"{path} is not a checkpoint in a format that is known")
        yield open_catalog(location)
        return
    storage, directory = own
    with (
        read_lease(storage, directory) as lease,
        Snapshot.open(storage, directory) as snapshot,
    ):
        lease.set_version(snapshot.manifest.save_id)
        yield own_format.catalog_of(snapshot)


def _own(path: Path, step: int | None) -> tuple[PosixStorage, str] | None:
    """Return root and directory of a checkpoint of our own; None if the path has none."""
    storage = PosixStorage(path)
    if storage.exists(MANIFEST):
        real = path.resolve()
        return PosixStorage(real.parent), real.name
    steps = list_steps(storage)
    if not steps:
        return None
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"{path} has no committed step {step}; it has {steps[-8:]}")
    return storage, step_dir(chosen)

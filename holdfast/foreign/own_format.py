"""Our own format on both sides of a conversion: described as a catalog, and laid out from one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.errors import ConfigError
from holdfast.foreign.catalog import Catalog, CatalogTensor, Chunk, OpenFiles, fill_flat
from holdfast.foreign.output import (
    Digests,
    Extent,
    Output,
    OutputFile,
    Written,
    split_by_size,
)
from holdfast.foreign.records import file_of_one_rank, index_of_one_rank, manifest_of
from holdfast.format.digest import DEFAULT_BLOCK_NBYTES
from holdfast.format.dtypes import DTYPES
from holdfast.format.index import ChunkIndex, Image, ImageEntry, encode_index, layout_image
from holdfast.format.manifest import encode_manifest
from holdfast.format.names import (
    INDEX,
    MANIFEST,
    committed_step,
    data_file,
    is_committed,
    list_steps,
    parse_step_dir,
    step_dir,
)
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage, Storage, is_url, open_storage, shown
from holdfast.storage.places import Opener, as_url
from holdfast.version import __version__

FORMAT = "holdfast"
_FILE_NBYTES = 4 << 30
"""Tensors of one data file, so that it can be copied and checked alone."""


@dataclass(frozen=True, slots=True)
class SnapshotBytes:
    """The payload of a chunk of our own checkpoint, verified as it is read."""

    snapshot: Snapshot
    key: str
    box: Box
    file: str
    order: int

    def readinto(self, out: memoryview, *, start: int, files: OpenFiles) -> None:
        """Read elements of the chunk; CorruptionError if no copy of them is good."""

        def read(part: Box, piece: memoryview) -> None:
            offset = tuple(map(sum, zip(part.offset, self.box.offset, strict=True)))
            self.snapshot.read_box(self.key, Box(offset, part.shape), piece)

        itemsize = DTYPES[self.snapshot.tensor(self.key).dtype].itemsize
        fill_flat(out, start=start, shape=self.box.shape, itemsize=itemsize, read=read)


def catalog_of(snapshot: Snapshot) -> Catalog:
    """Describe a checkpoint of our own; its digests are checked at every read."""
    manifest, index = snapshot.manifest, snapshot.index
    tensors = {}
    for info in manifest.tensors:
        rows = [row for row in snapshot.rows_of(info.key).tolist() if not index.copy[row]]
        boxes = [index.box(row, ndim=len(info.shape)) for row in rows]
        tensors[info.key] = CatalogTensor(
            key=info.key,
            dtype=info.dtype,
            shape=tuple(info.shape),
            chunks=tuple(
                Chunk(
                    box,
                    SnapshotBytes(
                        snapshot,
                        info.key,
                        box,
                        manifest.files[index.file[row]].name,
                        int(index.start[row]),
                    ),
                )
                for row, box in zip(rows, boxes, strict=True)
            ),
        )
    return Catalog(
        format=FORMAT,
        storage=snapshot.storage,
        label=snapshot.storage.describe(snapshot.directory),
        identity=snapshot.records.manifest,
        step=manifest.step,
        created=manifest.created,
        tensors=tensors,
        parts=manifest.parts,
        metadata=manifest.metadata,
        versions=manifest.versions,
        kinds=manifest.kinds,
    )


def reopen(storage: Storage, directory: str) -> Catalog:
    """Describe a checkpoint directory of our own of any name."""
    return catalog_of(Snapshot.open(storage, directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """A place with checkpoints of our own: a root of them, or one of them in its root."""

    storage: Storage
    """Of the root; of the checkpoint itself if it has not the name of a step."""
    root: str
    """Path or URL of this storage."""
    directory: str | None
    """Of the one checkpoint in it that the place is; None if it is the root."""
    steps: Sequence[int]
    """Those committed in the root, or the one that is meant; empty for a path that is one
    checkpoint: it alone is read."""


class OwnCheckpoint(NamedTuple):
    """A checkpoint of our own: storage, directory in it, and its path or URL for messages."""

    storage: Storage
    directory: str
    label: str


def own_place(
    place: str | os.PathLike[str], step: int | None, *, opener: Opener = open_storage
) -> OwnPlace | None:
    """Return what a path or URL is; None if it has no committed checkpoint of our own.

    Args:
        place: A root of checkpoints, or one of them.
        step: The one that is meant; None for any.
        opener: Opens a URL.

    Raises:
        ConfigError: The place is one checkpoint, and not of this step.
        StorageError: It cannot be read.
    """
    steps: Sequence[int] = ()
    if is_url(place):
        root, directory = as_url(place).rstrip("/"), None
        above, _, name = root.rpartition("/")
        if parse_step_dir(name) is not None:
            root, directory = above, name
        storage = opener(root)
        steps = _steps_of(storage, step if directory is None else parse_step_dir(directory))
        if not steps:
            return None
    elif not os.path.isdir(place):  # also if it may not be examined
        return None
    else:
        path = Path(place)
        root, directory, storage = str(path), None, PosixStorage(path)
        if storage.exists(MANIFEST):
            real, directory = path.resolve(), ""
            if parse_step_dir(real.name) is not None:
                root, directory, storage = str(real.parent), real.name, PosixStorage(real.parent)
        else:
            steps = _steps_of(storage, step)
            if not steps:
                return None
    if directory is not None and step is not None and directory != step_dir(step):
        known = parse_step_dir(directory)
        what = "one checkpoint" if known is None else f"the checkpoint of step {known}"
        raise ConfigError(
            f"{shown(place)} is {what}, not of step {step}; to choose a step, name the directory "
            f"above"
        )
    return OwnPlace(storage=storage, root=root, directory=directory, steps=steps)


def _steps_of(storage: Storage, step: int | None) -> Sequence[int]:
    """Return the step that is meant if it is committed, else all of them: others may be denied."""
    return [step] if step is not None and is_committed(storage, step) else list_steps(storage)


def find_own(
    place: str | os.PathLike[str], step: int | None, *, opener: Opener = open_storage
) -> OwnCheckpoint | None:
    """Return the checkpoint of our own that a path or URL means; None if there is none.

    Args:
        place: A root of checkpoints, or one of them.
        step: Which one; None for the newest.
        opener: Opens a URL.

    Raises:
        ConfigError: There are others, but not this step.
        StorageError: It cannot be read.
    """
    own = own_place(place, step, opener=opener)
    if own is None:
        return None
    if own.directory is not None and not own.steps:
        return OwnCheckpoint(own.storage, own.directory, str(place))
    step = step if own.directory is None else parse_step_dir(own.directory)
    directory = step_dir(committed_step(own.steps, step, place=own.root))
    return OwnCheckpoint(own.storage, directory, own.storage.describe(directory))


def layout(catalog: Catalog, *, step: int) -> Output:
    """Lay out everything of a catalog as a checkpoint of our own."""
    # An empty tensor has no chunk.
    sizes = {key: t.nbytes for key, t in catalog.tensors.items() if t.nbytes}
    groups = [
        [catalog.tensors[key] for key in keys]
        for keys in split_by_size(sizes, max_nbytes=_FILE_NBYTES)
    ]
    images = [
        layout_image([ImageEntry(name=t.key, dtype=t.dtype, shape=t.shape) for t in group])
        for group in groups
    ]
    files = [
        OutputFile.of_image(data_file(number), image, [(t, t.key) for t in group])
        for number, (group, image) in enumerate(zip(groups, images, strict=True))
    ]
    return Output(
        files=files,
        num_tensors=len(catalog.tensors),
        block_nbytes=DEFAULT_BLOCK_NBYTES,
        finish=lambda digests: _records(catalog, files, images, digests, step=step),
        notes=catalog.left_out,
    )


def _records(
    catalog: Catalog,
    files: Sequence[OutputFile],
    images: Sequence[Image],
    digests: Digests,
    *,
    step: int,
) -> list[OutputFile]:
    """Make index and manifest, once the digests of all data are known."""
    number = {key: i for i, key in enumerate(catalog.tensors)}
    rows = [
        (file, extent, digests[each.name, extent.start])
        for file, each in enumerate(files)
        for extent in each.extents
    ]
    index = _index(catalog, number, rows)
    data = encode_index(index)
    manifest = manifest_of(
        catalog,
        [
            file_of_one_rank(file.name, image.nbytes, image.header)
            for file, image in zip(files, images, strict=True)
        ],
        index,
        data,
        step=step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        block_nbytes=DEFAULT_BLOCK_NBYTES,
        holdfast=__version__,
        torch=f"converted from {catalog.format}",
    )
    return [OutputFile.of(INDEX, data), OutputFile.of(MANIFEST, encode_manifest(manifest))]


def _index(
    catalog: Catalog, number: dict[str, int], rows: Sequence[tuple[int, Extent, Written]]
) -> ChunkIndex:
    num_dims = max((len(t.shape) for t in catalog.tensors.values()), default=0)
    boxes = BoxTable.from_boxes(
        [number[extent.key] for _, extent, _ in rows],
        [extent.box for _, extent, _ in rows],
        num_dims=num_dims,
    )
    return index_of_one_rank(
        boxes,
        [tensor.itemsize for tensor in catalog.tensors.values()],
        file=[file for file, _, _ in rows],
        start=[extent.start for _, extent, _ in rows],
        blocks=[written.blocks for _, _, written in rows],
    )

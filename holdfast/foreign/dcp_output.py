"""Writes a PyTorch DCP directory, as `FileSystemWriter` does: `.metadata` and `.distcp` files.

Of each tensor every chunk is an archive of `torch.save`, and so is every value. The chunks are
those of the source, cut where they are large. Dicts are flattened as `flatten_state_dict` does it,
and the paths are in the metadata, so that PyTorch loads parts, shards and the whole dict alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.arrays.boxes import Box, split_box
from holdfast.errors import PlanError
from holdfast.foreign.catalog import Catalog, CatalogTensor
from holdfast.foreign.output import DEFAULT_MAX_FILE_NBYTES, Extent, Output, OutputFile
from holdfast.format.envelopes.dcp_metadata import (
    METADATA_FILE,
    DescribedTensor,
    FlatTree,
    StoredItem,
    metadata_of,
)
from holdfast.format.envelopes.optimizer_trees import to_flat, to_torch
from holdfast.format.envelopes.pickle_output import pickled
from holdfast.format.envelopes.plain_values import PlainValues, TensorRef
from holdfast.format.envelopes.torch_archive import (
    ALIGNMENT,
    Archive,
    layout_archive,
    tensor_archive,
)
from holdfast.format.values import is_tensor

DEFAULT_MAX_CHUNK_NBYTES = 512 << 20
"""PyTorch loads a chunk as a whole, for any part of it."""


def layout(
    catalog: Catalog,
    *,
    max_file_nbytes: int = DEFAULT_MAX_FILE_NBYTES,
    max_chunk_nbytes: int = DEFAULT_MAX_CHUNK_NBYTES,
    flat_optimizer: bool = False,
) -> Output:
    """Lay out all parts of a checkpoint as a DCP directory.

    Args:
        catalog: What to write.
        max_file_nbytes: A file is full beyond it.
        max_chunk_nbytes: Larger chunks are cut, so that a load needs no more memory at once.
        flat_optimizer: Write optimizers as `flatten_optimizer_state_dict=True` has them, for
            programs that load them so (TorchTitan).

    Raises:
        PlanError: Two names are one when they are joined with dots, or a value cannot be written.
        CorruptionError: A node is malformed.

    Cost: linear in the number of chunks and the size of values.
    """
    if max_file_nbytes < 1 or max_chunk_nbytes < 1:
        raise PlanError("a file and a chunk need at least one byte")
    plain = PlainValues()
    trees = {name: to_torch(node) for name, node in catalog.parts.items()}
    if flat_optimizer:
        trees = {name: to_flat(node) for name, node in trees.items()}
    flat = FlatTree(plain.notes)
    for name, value in plain.parts(trees).items():
        flat.add((name,), value)
    # The reader takes a dict of nothing but tensors for a model.
    prefix = "model." if all(map(is_tensor, trees.values())) else ""
    files = _Files(catalog, max_file_nbytes, prefix)
    for key, item in flat.items.items():
        if not isinstance(item, TensorRef):
            files.add_value(key, item)
    for key, item in flat.items.items():
        if isinstance(item, TensorRef):
            files.add_tensor(key, catalog.tensors[item.key], max_chunk_nbytes)
    output = files.finish()
    metadata = metadata_of(flat.paths, files.tensors, files.stored, flat.empty)
    notes = [*catalog.left_out, *plain.notes, *catalog.lost_versions(catalog.parts)]
    notes += catalog.lost_kinds(catalog.parts)
    if catalog.metadata:
        notes.append(f"the user's metadata is left out: {', '.join(catalog.metadata)}")
    return Output(
        files=[*output, OutputFile.of(METADATA_FILE, pickled(metadata))],
        num_tensors=len(files.tensors),
        notes=notes,
    )


@dataclass(slots=True)
class _File:
    """A file that grows."""

    name: str
    nbytes: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)


class _Files:
    """Puts archives into files, one after the other.

    Attributes:
        tensors: By flat name the tensors, with the boxes of their chunks.
        stored: Where everything lies.
    """

    def __init__(self, catalog: Catalog, max_nbytes: int, prefix: str) -> None:
        self._catalog = catalog
        self._max_nbytes = max_nbytes
        self._prefix = prefix
        self._files: list[_File] = []
        self._archives: dict[tuple[str, tuple[int, ...]], Archive] = {}
        self.tensors: dict[str, DescribedTensor] = {}
        self.stored: list[StoredItem] = []

    def add_value(self, key: str, value: Any) -> None:
        """Add a value."""
        self._add(key, None, 0, layout_archive(pickled(value), []))

    def add_tensor(self, key: str, tensor: CatalogTensor, max_chunk_nbytes: int) -> None:
        """Add a tensor, chunk by chunk."""
        boxes = list(_boxes(tensor, max_chunk_nbytes))
        self.tensors[key] = DescribedTensor(tensor.dtype, tuple(tensor.shape), boxes)
        for number, box in enumerate(boxes):
            file, archive = self._add(key, box, number, self._of_chunk(tensor.dtype, box.shape))
            if box.numel:
                file.extents.append(
                    Extent(
                        start=archive.starts[0],
                        key=tensor.key,
                        box=box,
                        crc_at=archive.crc_at[0],
                        to_key=self._prefix + key,
                    )
                )

    def finish(self) -> list[OutputFile]:
        """Return the files."""
        return [
            OutputFile(
                name=file.name, nbytes=file.nbytes, literals=file.literals, extents=file.extents
            )
            for file in self._files
        ]

    def _of_chunk(self, dtype: str, shape: tuple[int, ...]) -> Archive:
        """Return the archive of a chunk: all of one type and shape are alike."""
        archive = self._archives.get((dtype, shape))
        if archive is None:
            archive = self._archives[dtype, shape] = tensor_archive(dtype, shape)
        return archive

    def _add(
        self, key: str, box: Box | None, number: int, archive: Archive
    ) -> tuple[_File, Archive]:
        """Put an archive at the end of the last file, or of a new one."""
        if not self._files or self._files[-1].nbytes + archive.nbytes > self._max_nbytes:
            # As so many ranks would have written it.
            self._files.append(_File(f"__{len(self._files)}_0.distcp"))
        file = self._files[-1]
        archive = archive.moved(file.nbytes + -file.nbytes % ALIGNMENT)
        file.literals += archive.literals
        file.nbytes = archive.start + archive.nbytes
        self.stored.append(StoredItem(key, box, number, file.name, archive.start, archive.nbytes))
        return file, archive


def _boxes(tensor: CatalogTensor, max_nbytes: int) -> Iterator[Box]:
    """Yield the boxes of a tensor's chunks, each once, the large ones cut; one if it is empty."""
    if not tensor.nbytes:
        yield tensor.whole
        return
    boxes = dict.fromkeys(chunk.box for chunk in tensor.chunks if chunk.box.numel)
    for box in sorted(boxes, key=lambda each: each.offset):
        yield from split_box(box, max_numel=max(max_nbytes // tensor.itemsize, 1))

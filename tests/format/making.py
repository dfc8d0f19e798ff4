"""Makes small checkpoints by hand, straight from the format's parts: no planner, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.arrays.boxes import Box
from holdfast.format.digest import block_digests, digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.envelopes import layout_in
from holdfast.format.envelopes.torch_dist import extra_files
from holdfast.format.index import ChunkIndex, ImageEntry, chunk_name, encode_index, gaps
from holdfast.format.manifest import (
    WHOLE,
    Envelope,
    ExtraInfo,
    FileInfo,
    IndexInfo,
    LayoutInfo,
    Manifest,
    PlacementInfo,
    TensorInfo,
    Totals,
    encode_manifest,
)
from holdfast.format.names import INDEX, MANIFEST, data_file, step_dir
from holdfast.format.values import Node
from holdfast.storage import Storage

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One stored copy: file, box, number of the copy; `content` overrides the tensor's bytes.

    Without `holders` every rank that writes a file held it.
    """

    file: int
    box: Box
    copy: int = 0
    content: bytes | None = None
    holders: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor to store: element type, shape, its row-major bytes, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    chunks: Sequence[Chunk]
    placement: PlacementInfo = WHOLE

    def box_bytes(self, box: Box) -> bytes:
        """The row-major bytes of a box of this tensor."""
        itemsize = DTYPES[self.dtype].itemsize
        array = np.frombuffer(self.data, dtype=np.uint8).reshape((*self.shape, itemsize))
        return array[box.relative_to((0,) * len(self.shape))].tobytes()


def random_tensor(
    seed: int, *, dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk] | None = None
) -> Tensor:
    """A tensor of random bytes; without chunks it is one chunk in file 0."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    if dtype == "BOOL":
        data = bytes(b & 1 for b in data)
    whole = Chunk(file=0, box=Box((0,) * len(shape), shape))
    return Tensor(dtype=dtype, shape=shape, data=data, chunks=chunks or [whole])


@dataclass(slots=True, kw_only=True)
class Made:
    """Everything a checkpoint is made of, to be changed before it is written."""

    manifest: Manifest
    index: ChunkIndex
    files: dict[str, bytes] = field(default_factory=dict)


def make(
    tensors: Mapping[str, Tensor],
    *,
    step: int = 1,
    block_nbytes: int = 64,
    parts: Mapping[str, Node] | None = None,
    envelope: Envelope = "safetensors",
) -> Made:
    """The records and data files of a checkpoint of these tensors."""
    rows = [(i, key, chunk) for i, (key, t) in enumerate(tensors.items()) for chunk in t.chunks]
    num_files = max((chunk.file for _, _, chunk in rows), default=-1) + 1
    num_dims = max((len(t.shape) for t in tensors.values()), default=0)
    columns: dict[str, list[object]] = {
        n: [] for n in ("tensor", "file", "offset", "extent", "start", "nbytes", "copy")
    }
    digests: list[npt.NDArray[np.uint64]] = []
    sets: dict[tuple[int, ...], int] = {}
    holders: list[int] = []
    files: dict[str, bytes] = {}
    infos = []
    for number in range(num_files):
        own = [row for row in rows if row[2].file == number]
        entries = [_entry(tensors[key], key, chunk) for _, key, chunk in own]
        image = layout_in(envelope, entries)
        data = bytearray(image.nbytes)
        payloads: list[tuple[int, int]] = []
        for at, literal in ((0, image.header), *image.literals):
            data[at : at + len(literal)] = literal
        for (i, key, chunk), start in zip(own, image.starts.tolist(), strict=True):
            payload = chunk.content or tensors[key].box_bytes(chunk.box)
            data[start : start + len(payload)] = payload
            payloads.append((start, len(payload)))
            pad = num_dims - chunk.box.ndim
            values = (i, number, [*chunk.box.offset, *[0] * pad], [*chunk.box.shape, *[1] * pad],
                      start, len(payload), chunk.copy)  # fmt: skip
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
            digests.append(block_digests(payload, block_nbytes))
            held_by = chunk.holders or tuple(range(num_files))
            holders.append(sets.setdefault(held_by, len(sets)))
        name = data_file(number, envelope=envelope)
        files[name] = bytes(data)
        start_column, nbytes_column = np.array(payloads, dtype=np.int64).reshape(-1, 2).T
        between = gaps(start_column, nbytes_column, file_nbytes=len(data))
        infos.append(
            FileInfo(
                name=name,
                nbytes=len(data),
                header_nbytes=image.envelope_nbytes,
                header_digest=digest128(b"".join(data[begin:end] for begin, end in between)),
                writer=number,
                coordinate={"tp": number},
                envelope=envelope,
            )
        )
    arrays = {name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    for name in ("offset", "extent"):
        arrays[name] = arrays[name].reshape(len(rows), num_dims)
    counts = np.array([len(d) for d in digests], dtype=np.int64)
    index = ChunkIndex(
        **arrays,
        holders=np.array(holders, dtype=np.int64),
        holder_ptr=np.cumsum([0, *map(len, sets)]),
        holder=np.array([rank for ranks in sets for rank in ranks], dtype=np.int64),
        digest_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        digest=np.concatenate([np.zeros(0, dtype=np.uint64), *digests]),
    )
    placements: dict[PlacementInfo, int] = {WHOLE: 0}
    infos_t = [
        TensorInfo(
            key=key,
            dtype=t.dtype,
            shape=list(t.shape),
            layout=0,
            placement=placements.setdefault(t.placement, len(placements)),
        )
        for key, t in tensors.items()
    ]
    manifest = Manifest(
        step=step,
        save_id="0a1b2c3d",
        created="2026-01-02T03:04:05Z",
        holdfast="0.1.0",
        torch="2.13.0",
        layouts=[
            LayoutInfo(
                name="model", axes={"tp": num_files or 1}, order="tp", ranks=[*range(num_files)]
            )
        ],
        signature="00" * 16,
        placements=list(placements),
        block_nbytes=block_nbytes,
        tensors=infos_t,
        parts=dict(parts or {}),
        files=infos,
        index=IndexInfo(nbytes=8, digest="0" * 32, num_rows=len(rows)),
        totals=Totals(
            num_tensors=len(infos_t),
            nbytes=sum(t.nbytes for t in infos_t),
            stored_nbytes=int(arrays["nbytes"].sum()),
        ),
    )
    if envelope == "torch_dist":
        extras = extra_files(index, infos_t, manifest.parts, [*files]).files
        listed = [
            ExtraInfo(name=name, nbytes=len(data), digest=digest128(data))
            for name, data in extras.items()
        ]
        manifest = msgspec.structs.replace(manifest, extras=listed)
        files |= extras
    return Made(manifest=manifest, index=index, files=files)


def _entry(tensor: Tensor, key: str, chunk: Chunk) -> ImageEntry:
    box = chunk.box
    name = chunk_name(key, offset=box.offset, shape=box.shape, global_shape=tensor.shape)
    return ImageEntry(name=name, dtype=tensor.dtype, shape=box.shape)


def write(storage: Storage, made: Made, *, directory: str | None = None) -> str:
    """Put a checkpoint on storage, its records sealed anew; returns its directory."""
    place = step_dir(made.manifest.step) if directory is None else directory
    prefix = f"{place}/" if place else ""
    index_bytes = encode_index(made.index)
    info = IndexInfo(
        nbytes=len(index_bytes), digest=digest128(index_bytes), num_rows=made.index.num_rows
    )
    made.manifest = msgspec.structs.replace(made.manifest, index=info)
    storage.make_dir("")
    storage.make_dir(f"{prefix}data")
    for name, data in {
        **made.files,
        INDEX: index_bytes,
        MANIFEST: encode_manifest(made.manifest),
    }.items():
        storage.write_file(f"{prefix}{name}", data)
    return place


def sample_tensors() -> dict[str, Tensor]:
    """A little of everything: several types, splits, copies, a scalar, an empty tensor, holes."""
    grid = [
        Chunk(file=0, box=Box((0, 0), (3, 4))),
        Chunk(file=1, box=Box((0, 4), (3, 3))),
        Chunk(file=0, box=Box((3, 0), (2, 2))),
        Chunk(file=1, box=Box((3, 2), (2, 5))),
    ]
    both = [
        Chunk(file=0, box=Box((0,), (9,))),
        Chunk(file=1, box=Box((0,), (9,)), copy=1),
    ]
    return {
        "model.weight": random_tensor(1, dtype="F32", shape=(5, 7), chunks=grid),
        "model.norm": random_tensor(2, dtype="BF16", shape=(9,), chunks=both),
        "model.scale": random_tensor(3, dtype="F64", shape=()),
        "model.none": random_tensor(4, dtype="I64", shape=(0, 3)),
        "model.phase": random_tensor(5, dtype="C128", shape=(2, 3)),
        "model.mask": random_tensor(6, dtype="BOOL", shape=(11,)),
        "optimizer.moment": random_tensor(7, dtype="F8_E4M3", shape=(70, 3)),
    }

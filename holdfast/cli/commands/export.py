"""`holdfast export PATH`: tensors as one safetensors file or as npy files. Imports no torch."""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import numpy as np
import tyro

from holdfast.arrays.boxes import Box
from holdfast.cli.support.inspecting import EXIT_DAMAGED, counted, in_bytes, make_console
from holdfast.cli.support.opening import Advance, matching_keys, no_match, open_marked, progress_bar
from holdfast.cli.support.report import print_error
from holdfast.cli.support.tensor_stats import decode_elements
from holdfast.errors import ConfigError, CorruptionError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.image import ImageEntry, layout_image
from holdfast.format.manifest import TensorInfo
from holdfast.format.pieces import split_box
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage, Sink

_PIECE_NBYTES = 8 << 20
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Write tensors, whole whatever their sharding, as a safetensors file or as npy files."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    tensor: str
    """The key of a tensor, or a pattern (`*`, `?`) for many."""

    to: Path
    """A file that ends in .safetensors, or a directory, which gets one .npy file per tensor."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    as_float32: bool = False
    """Turn types that numpy lacks (bfloat16, 8-bit floats) into float32, which is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One tensor as it is to be written: under its own dtype, or as the wider one `dtype`."""

    info: TensorInfo
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.info.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements as written."""
        return self.info.numel * DTYPES[self.dtype].itemsize


def run(args: Args) -> int:
    """Write the files and say where; 1 when the checkpoint is damaged. Streams, some MiB of memory.

    A file gets its name when it is complete and durable. Nothing that exists is overwritten.
    """
    try:
        with open_marked(args.path, step=args.step) as opened:
            snapshot = opened.snapshot
            keys = matching_keys(snapshot, args.tensor)
            if not keys:
                raise no_match(args.tensor, snapshot.keys)
            outputs = [_output(snapshot.tensor(key), args) for key in keys]
            total = sum(output.info.nbytes for output in outputs)
            with progress_bar("export", total=total, quiet=False) as advance:
                if args.to.name.endswith(_SUFFIX):
                    _write_safetensors(snapshot, outputs, args.to, advance)
                else:
                    _write_npy(snapshot, outputs, args.to, advance)
    except CorruptionError as error:
        print_error(error)
        return EXIT_DAMAGED
    nbytes = sum(output.nbytes for output in outputs)
    what = counted(len(outputs), "tensor")
    make_console().print(f"{what}, {in_bytes(nbytes)}, written to {args.to}", soft_wrap=True)
    return 0


def _output(info: TensorInfo, args: Args) -> _Output:
    dtype = info.dtype
    if DTYPES[dtype].numpy is None:
        if args.as_float32:
            dtype = "C64" if dtype == "C32" else "F32"
        elif not args.to.name.endswith(_SUFFIX):
            raise ConfigError(
                f"tensor {info.key!r} is {dtype}, which npy files cannot hold: export to a "
                f"{_SUFFIX} file, which keeps it as it is, or add --as-float32"
            )
    return _Output(info=info, dtype=dtype)


def _write_safetensors(
    snapshot: Snapshot, outputs: list[_Output], to: Path, advance: Advance
) -> None:
    entries = [ImageEntry(name=x.info.key, dtype=x.dtype, shape=x.shape) for x in outputs]
    image = layout_image(entries)
    with _new_file(to, nbytes=image.nbytes) as sink:
        sink.write_at(0, memoryview(image.header))
        for output, start in zip(outputs, image.starts.tolist(), strict=True):
            _copy(snapshot, output, sink, start, advance)


def _write_npy(snapshot: Snapshot, outputs: list[_Output], to: Path, advance: Advance) -> None:
    files = [to / f"{_file_name(output.info.key)}.npy" for output in outputs]
    for file in files:
        _refuse_existing(file)
    for output, file in zip(outputs, files, strict=True):
        dtype = DTYPES[output.dtype].numpy
        if dtype is None:
            raise ConfigError(f"tensor {output.info.key!r} of {output.dtype} has no npy type")
        descr = np.lib.format.dtype_to_descr(dtype)
        buffer = io.BytesIO()
        header = {"descr": descr, "fortran_order": False, "shape": output.shape}
        np.lib.format.write_array_header_1_0(buffer, header)
        head = buffer.getvalue()
        with _new_file(file, nbytes=len(head) + output.nbytes) as sink:
            sink.write_at(0, memoryview(head))
            _copy(snapshot, output, sink, len(head), advance)


def _file_name(key: str) -> str:
    """A key as a file name: characters of trouble percent-encoded, a long one cut and marked."""
    name = quote(key, safe=" @[],=+")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    return name if len(name) <= 200 else f"{name[:160]}-{digest128(key.encode())}"


def _copy(snapshot: Snapshot, output: _Output, sink: Sink, start: int, advance: Advance) -> None:
    """All elements of a tensor in row-major order to byte `start` of a file."""
    info = output.info
    itemsize = DTYPES[info.dtype].itemsize
    whole = Box((0,) * len(output.shape), output.shape)
    for box in split_box(whole, max_numel=_PIECE_NBYTES // itemsize):
        data = bytearray(box.numel * itemsize)
        snapshot.read_box(info.key, box, memoryview(data))
        advance(len(data))
        written = memoryview(data)
        if output.dtype != info.dtype:
            wide = decode_elements(data, info.dtype).astype(DTYPES[output.dtype].numpy)
            written = memoryview(wide.tobytes())
        sink.write_at(start, written)
        start += written.nbytes


def _refuse_existing(path: Path) -> None:
    if path.is_symlink() or path.exists():
        raise ConfigError(f"{path} exists already; remove it or choose another name")


@contextmanager
def _new_file(path: Path, *, nbytes: int) -> Iterator[Sink]:
    """A file to fill; it gets its name when all went well, and is durable then."""
    _refuse_existing(path)
    storage = PosixStorage(path.parent)
    storage.make_dir("")
    temporary = f".tmp-{path.name[:200]}-{secrets.token_hex(4)}"
    try:
        with storage.create(temporary, nbytes=nbytes) as sink:
            yield sink
            sink.sync()
        storage.rename_dir(temporary, path.name)
    except BaseException:
        with suppress(StorageError):
            storage.remove_tree(temporary)
        raise

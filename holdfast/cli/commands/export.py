"""`holdfast export PATH`: tensors as one safetensors file or as npy files. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import numpy as np

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.elements import read_elements, refuse_damage, refuse_drift
from holdfast.cli.support.keys import other_names, select_keys
from holdfast.cli.support.messages import print_removed
from holdfast.cli.support.steps import open_checkpoint
from holdfast.cli.support.tables import make_console, progress_bar
from holdfast.errors import ConfigError, counted, in_bytes, some_of
from holdfast.format.digest import digest128
from holdfast.format.dtypes import DTYPES
from holdfast.format.elements import decode_elements
from holdfast.format.index import ImageEntry, layout_file
from holdfast.format.manifest import TensorInfo
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage, Sink
from holdfast.storage.places import check_local
from holdfast.storage.unnamed import remove_unnamed, unnamed

Advance = Callable[[int], object]
"""Called with the number of bytes read since the last call."""

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Write tensors, whole whatever their sharding, as a safetensors file or as npy files."""

    path: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    tensor: str
    """The key of a tensor, or a pattern (`*`, `?`) for many."""

    to: Path
    """A file that ends in .safetensors, or a directory, which gets one .npy file per tensor; a
    suffix of another kind of file is refused."""

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
    """Write the files; 1 when the checkpoint is damaged.

    A file gets its name when it is complete and durable. Nothing that exists is overwritten.

    Cost: reads each tensor once, in pieces of some MiB; before, what a foreign format states a
    CRC-32 of.
    """
    check_local(args.to, what="the files")
    _refuse_unknown_kind(args.to)
    with open_checkpoint(args.path, step=args.step) as opened:
        snapshot = opened.snapshot
        others = other_names(snapshot)
        keys = select_keys(args.tensor, snapshot.keys, others)
        refuse_drift(snapshot, keys)
        refuse_damage(snapshot, keys)
        outputs = [_output(snapshot.tensor(key), args) for key in keys]
        total = sum(output.info.nbytes for output in outputs)
        with progress_bar(quiet=False) as bar:
            advance = partial(bar.advance, bar.add_task("export", total=total))
            write = _write_safetensors if args.to.name.endswith(_SUFFIX) else _write_npy
            write(snapshot, outputs, args.to, advance)
    nbytes = sum(output.nbytes for output in outputs)
    what = counted(len(outputs), "tensor")
    console = make_console()
    console.print(f"{what}, {in_bytes(nbytes)}, written to {args.to}", soft_wrap=True)
    written = set(keys)
    tied = [f"{name} is {key}" for name, key in others.items() if key in written]
    if tied:
        console.print(
            f"tied, and written once, under the name that is stored: {some_of(tied)}",
            soft_wrap=True,
            markup=False,
        )
    return 0


def _refuse_unknown_kind(to: Path) -> None:
    """Raise ConfigError for a name that asks for a kind of file that is not written.

    A directory that is there may have any name.
    """
    if to.suffix[1:].isalpha() and to.suffix != _SUFFIX and not to.is_dir():
        raise ConfigError(
            f"--to {to}: {to.suffix} files are not written. Name a {_SUFFIX} file for all tensors "
            f"in one, or a directory (without a suffix), which gets one .npy file per tensor"
        )


def _output(info: TensorInfo, args: Args) -> _Output:
    """Return how a tensor is written; ConfigError for a type that the chosen files cannot hold."""
    dtype = info.dtype
    is_one_file = args.to.name.endswith(_SUFFIX)
    if DTYPES[dtype].numpy is None and args.as_float32:
        dtype = "C64" if dtype == "C32" else "F32"
    elif DTYPES[dtype].numpy is None and not is_one_file:
        advice = "export to a .safetensors file, which keeps it as it is, or "
        if DTYPES[dtype].since is None:
            advice = ""
        raise ConfigError(
            f"tensor {info.key!r} is {dtype}, which npy files cannot hold: {advice}add --as-float32"
        )
    if is_one_file and DTYPES[dtype].since is None:
        advice = "export to a directory, which gets .npy files"
        if DTYPES[dtype].numpy is None:
            advice = "add --as-float32"
        raise ConfigError(
            f"tensor {info.key!r} is {dtype}, which safetensors files cannot hold: {advice}"
        )
    return _Output(info=info, dtype=dtype)


def _write_safetensors(
    snapshot: Snapshot, outputs: list[_Output], to: Path, advance: Advance
) -> None:
    """One file with all tensors."""
    entries = [ImageEntry(name=x.info.key, dtype=x.dtype, shape=x.shape) for x in outputs]
    image = layout_file(entries)
    _make_room(to.parent, [to])
    storage = PosixStorage(to.parent)
    with (
        unnamed(storage, to.name, is_dir=False) as temporary,
        storage.create(temporary, nbytes=image.nbytes) as sink,
    ):
        sink.write_at(0, memoryview(image.header))
        for output, start in zip(outputs, image.starts.tolist(), strict=True):
            _copy(snapshot, output, sink, start, advance)
        sink.sync()


def _write_npy(snapshot: Snapshot, outputs: list[_Output], to: Path, advance: Advance) -> None:
    """One file per tensor; none gets its name when one exists already, or cannot be written."""
    files = [to / f"{_file_name(output.info.key)}.npy" for output in outputs]
    _make_room(to, files)
    storage = PosixStorage(to)
    with unnamed(storage, files[-1].name, is_dir=False) as last:
        folder = last.rpartition("/")[0]
        for output, file in zip(outputs, files, strict=True):
            dtype = DTYPES[output.dtype].numpy
            if dtype is None:
                raise ConfigError(f"tensor {output.info.key!r} of {output.dtype} has no npy type")
            descr = np.lib.format.dtype_to_descr(dtype)
            buffer = io.BytesIO()
            header = {"descr": descr, "fortran_order": False, "shape": output.shape}
            np.lib.format.write_array_header_1_0(buffer, header)
            head = buffer.getvalue()
            nbytes = len(head) + output.nbytes
            with storage.create(f"{folder}/{file.name}", nbytes=nbytes) as sink:
                sink.write_at(0, memoryview(head))
                _copy(snapshot, output, sink, len(head), advance)
                sink.sync()
        for file in files[:-1]:
            storage.rename_dir(f"{folder}/{file.name}", file.name)


def _file_name(key: str) -> str:
    """A key as a file name: unsafe characters percent-encoded, a long one ended by its digest."""
    name = quote(key, safe=" @[],=+")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    return name if len(name) <= 200 else f"{name[:160]}-{digest128(key.encode())}"


def _copy(snapshot: Snapshot, output: _Output, sink: Sink, start: int, advance: Advance) -> None:
    """All elements of a tensor in row-major order to byte `start` of a file."""
    info = output.info
    for data in read_elements(snapshot, info.key):
        advance(len(data))
        piece = memoryview(data)
        if output.dtype != info.dtype:
            wide = decode_elements(data, info.dtype).astype(DTYPES[output.dtype].numpy)
            piece = memoryview(wide.tobytes())
        sink.write_at(start, piece)
        start += piece.nbytes


def _make_room(folder: Path, files: list[Path]) -> None:
    """Make the folder of new files, and remove what killed exports have left of them.

    Raises:
        ConfigError: One of them exists.
    """
    for path in files:
        if path.is_symlink() or path.exists():
            raise ConfigError(f"{path} exists already; remove it or choose another name")
    storage = PosixStorage(folder)
    storage.make_dir("")
    for left in remove_unnamed(storage, {path.name for path in files}):
        print_removed(left)

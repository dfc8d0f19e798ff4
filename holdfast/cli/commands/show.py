"""`holdfast show PATH`: what is in a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.text import Text

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.elements import refuse_damage, refuse_drift
from holdfast.cli.support.holders import SavedPlacement, parts_of
from holdfast.cli.support.keys import other_names, select_keys
from holdfast.cli.support.locality_tables import locality_json, print_locality
from holdfast.cli.support.messages import (
    in_ranges,
    layout_in_words,
    metadata_in_words,
    shape_in_words,
    when,
)
from holdfast.cli.support.steps import OpenCheckpoint, open_checkpoint
from holdfast.cli.support.tables import MAX_ROWS, Listing, make_console, print_json, print_rows
from holdfast.cli.support.tensor_stats import TensorStats, tensor_stats
from holdfast.cli.support.value_tree import value_tree
from holdfast.errors import ConfigError, clean, counted, in_bytes
from holdfast.format.manifest import Manifest
from holdfast.format.reader import Snapshot
from holdfast.format.summaries import requests_in_words
from holdfast.format.values import count_values, tensor_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Show what is in a checkpoint: layouts, parts, tensors, and on request files and values."""

    path: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    tensor: str | None = None
    """Only tensors whose key is this, or matches this pattern (`*`, `?`)."""

    part: str | None = None
    """Only this part of the state."""

    files: bool = False
    """List the data files and who wrote them."""

    values: bool = False
    """Show the tree of values."""

    stats: bool = False
    """Read the tensors chosen with --tensor: least, greatest, mean, norm, first elements."""

    locality: bool = False
    """Where the bytes lie that each rank needs under the saved layout; which are stored twice."""

    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One line of the list: `writers` are global ranks, `num_copies` the most of any chunk."""

    key: str
    part: str
    dtype: str
    shape: list[int]
    num_chunks: int
    num_copies: int
    writers: list[int]
    nbytes: int
    stats: TensorStats | None = None


def run(args: Args) -> int:
    """Print the checkpoint; 1 when it is damaged."""
    if args.stats and args.tensor is None:
        raise ConfigError("--stats reads tensors: choose them with --tensor KEY or a pattern")
    with open_checkpoint(args.path, step=args.step) as opened:
        if args.locality and opened.foreign:
            raise ConfigError(
                f"{opened.label} is in the format {opened.foreign}, which does not say what each "
                f"rank held: leave out --locality"
            )
        if args.part is not None:
            opened.snapshot.read_values(args.part)
        rows = _tensor_rows(opened.snapshot, args)
        if args.json:
            print_json(_as_json(opened, args, rows))
        else:
            _print(opened, args, rows)
    return 0


def _tensor_rows(snapshot: Snapshot, args: Args) -> list[TensorRow]:
    """The tensors chosen, in the order of the manifest; reads them only for `--stats`."""
    manifest, parts = snapshot.manifest, parts_of(snapshot.manifest)
    keys: Iterable[str] = snapshot.keys
    if args.tensor is not None:
        keys = select_keys(args.tensor, snapshot.keys, other_names(snapshot))
    chosen = set(keys)
    if args.part is not None:  # what is tied between parts is of each
        chosen &= set(tensor_keys(manifest.parts[args.part]))
    if args.tensor is not None and not chosen:
        raise ConfigError(f"no tensor of part {args.part!r} matches {args.tensor!r}")
    if args.stats:
        refuse_drift(snapshot, chosen)
        refuse_damage(snapshot, chosen)
    rows = []
    for tensor in manifest.tensors:
        if tensor.key not in chosen:
            continue
        stored = snapshot.rows_of(tensor.key)
        copies = snapshot.index.copy[stored]
        files = set(snapshot.index.file[stored].tolist())
        rows.append(
            TensorRow(
                key=tensor.key,
                part=parts.get(tensor.key, ""),
                dtype=tensor.dtype,
                shape=tensor.shape,
                num_chunks=int((copies == 0).sum()),
                num_copies=int(copies.max()) + 1 if len(copies) else 0,
                writers=sorted({manifest.files[number].writer for number in files}),
                nbytes=tensor.nbytes,
                stats=tensor_stats(snapshot, tensor.key) if args.stats else None,
            )
        )
    return rows


def _as_json(opened: OpenCheckpoint, args: Args, rows: list[TensorRow]) -> dict[str, object]:
    """The document of `--json`."""
    snapshot, manifest = opened.snapshot, opened.snapshot.manifest
    document: dict[str, object] = {
        "checkpoint": opened.label,
        "step": manifest.step,
        "created": manifest.created,
        "save_id": manifest.save_id,
        "format_version": manifest.version,
        "holdfast": manifest.holdfast,
        "torch": manifest.torch,
        "layouts": [
            {"name": x.name, "axes": x.axes, "order": x.order, "ranks": x.ranks}
            for x in manifest.layouts
        ],
        "totals": {
            "num_tensors": manifest.totals.num_tensors,
            "nbytes": manifest.totals.nbytes,
            "stored_nbytes": manifest.totals.stored_nbytes,
            "num_files": len(manifest.files),
            "num_rows": manifest.index.num_rows,
        },
        "metadata": manifest.metadata,
        "requests": dict(opened.requests),
        "parts": list(manifest.parts),
        "tensors": [_row_json(row) for row in rows],
    }
    if args.files:
        document["files"] = [
            {
                "name": file.name, "nbytes": file.nbytes, "writer": file.writer,
                "coordinate": file.coordinate, "num_chunks": count,
            }
            for file, count in zip(manifest.files, _num_chunks(snapshot), strict=True)
        ]  # fmt: skip
    if args.locality:
        document["locality"] = locality_json(SavedPlacement(manifest, snapshot.index))
    if args.values:
        chosen = manifest.parts if args.part is None else {args.part: manifest.parts[args.part]}
        document["values"] = chosen
    return document


def _row_json(row: TensorRow) -> dict[str, object]:
    """A tensor as JSON, which lacks complex numbers."""
    table = asdict(row)
    stats = table.pop("stats")
    if stats is not None:
        mean = stats["mean"]
        stats["mean"] = [mean.real, mean.imag] if isinstance(mean, complex) else mean
        table["stats"] = stats
    return table


def _num_chunks(snapshot: Snapshot) -> list[int]:
    """The number of chunks in each data file."""
    num_files = len(snapshot.manifest.files)
    counts: list[int] = np.bincount(snapshot.index.file, minlength=num_files).tolist()
    return counts


def _print(opened: OpenCheckpoint, args: Args, rows: list[TensorRow]) -> None:
    """The tables that the options ask for."""
    console = make_console()
    snapshot, manifest = opened.snapshot, opened.snapshot.manifest
    is_narrow = args.tensor is not None
    if not is_narrow:
        _print_summary(console, opened, manifest)
        if args.part is None:
            _print_parts(console, manifest)
    if args.files:
        _print_files(console, snapshot)
    if args.locality:
        print_locality(console, SavedPlacement(manifest, snapshot.index))
    if not (args.values or args.locality) or is_narrow:
        _print_tensors(console, rows, is_all=is_narrow)
    for row in rows:
        if row.stats is not None:
            _print_stats(console, row.key, row.stats)
    if args.values and not is_narrow:
        tensors = {tensor.key: tensor for tensor in manifest.tensors}
        for part in manifest.parts if args.part is None else [args.part]:
            console.print(value_tree(part, manifest.parts[part], tensors=tensors))


def _print_summary(console: Console, opened: OpenCheckpoint, manifest: Manifest) -> None:
    """Name and value of what is known of the checkpoint as a whole."""
    totals = manifest.totals
    extra = totals.stored_nbytes - totals.nbytes
    copies = f" + {in_bytes(extra)} of copies" if extra else ""
    step = f"{manifest.step}, saved {when(manifest.created)} UTC, id {manifest.save_id}"
    by = ("by", f"holdfast {manifest.holdfast}, torch {manifest.torch}, format {manifest.version}")
    if opened.foreign:
        step = f"{manifest.step or '0 or not stated'}, files of {when(manifest.created)} UTC"
        by = ("format", f"{opened.foreign}; it has no digests, so nothing read can be verified")
    lines = [
        ("checkpoint", opened.label),
        ("step", step),
        by,
        ("holds", f"{counted(totals.num_tensors, 'tensor')}, {in_bytes(totals.nbytes)}{copies} "
                  f"in {counted(len(manifest.files), 'file')}"),
    ]  # fmt: skip
    lines += [
        ("layout", f"{layout_in_words(x)} ({in_ranges(x.ranks)}), order {x.order}")
        for x in manifest.layouts
        if not opened.foreign
    ]
    lines += [("left out", sentence) for sentence in opened.left_out]
    if opened.requests:
        lines.append(("its save", f"{requests_in_words(opened.requests)} of all ranks"))
    if manifest.metadata:
        lines.append(("metadata", metadata_in_words(manifest.metadata)))
    for name, text in lines:
        console.print(Text(f"{name:<11}", style="dim") + Text(clean(text)), soft_wrap=True)


def _print_parts(console: Console, manifest: Manifest) -> None:
    """Return how many tensors and values each part has."""
    table = Listing(
        [("part", "bold"), ("tensors", "right"), ("size", "right"), ("values", "right")]
    )
    sizes = {tensor.key: tensor.nbytes for tensor in manifest.tensors}
    for part, node in manifest.parts.items():
        keys = [key for key in set(tensor_keys(node)) if key in sizes]
        nbytes = sum(sizes[key] for key in keys)
        table.add_row(part, f"{len(keys):,}", in_bytes(nbytes), f"{count_values(node):,}")
    console.print(table)


def _print_files(console: Console, snapshot: Snapshot) -> None:
    """The data files, and which rank wrote each."""
    table = Listing(
        [("file", ""), ("size", "right"), ("chunks", "right"), ("rank", "right"), ("at", "")]
    )
    for file, count in zip(snapshot.manifest.files, _num_chunks(snapshot), strict=True):
        at = " ".join(f"{axis}={index}" for axis, index in file.coordinate.items())
        table.add_row(file.name, in_bytes(file.nbytes), f"{count:,}", f"{file.writer}", at)
    console.print(table)


def _print_tensors(console: Console, rows: list[TensorRow], *, is_all: bool) -> None:
    """The tensors, the first ones unless all were asked for."""
    columns = [
        ("tensor", "cyan"), ("dtype", ""), ("shape", ""), ("chunks", "right"),
        ("copies", "right"), ("written by", ""), ("size", "right"),
    ]  # fmt: skip
    print_rows(
        console,
        columns,
        rows,
        lambda row: (
            row.key, row.dtype, shape_in_words(row.shape), f"{row.num_chunks:,}",
            f"{row.num_copies}", in_ranges(row.writers), in_bytes(row.nbytes),
        ),
        noun="tensor",
        most=len(rows) if is_all else MAX_ROWS,
        rest="--tensor '*' lists all",
    )  # fmt: skip


def _print_stats(console: Console, key: str, stats: TensorStats) -> None:
    """The numbers about one tensor, one on each line."""
    console.print(Text(clean(key), style="cyan"))
    lines = [
        ("elements", f"{stats.numel:,} ({stats.num_zero:,} zero, {stats.num_nan:,} nan, "
                     f"{stats.num_inf:,} infinite)"),
        ("least", f"{stats.lowest}"), ("greatest", f"{stats.highest}"),
        ("mean", f"{stats.mean}"), ("norm", f"{stats.norm}"),
        ("first", ", ".join(stats.head) + (", …" if stats.numel > len(stats.head) else "")),
    ]  # fmt: skip
    for name, text in lines:
        console.print(Text(f"  {name:<9}", style="dim") + Text(text), soft_wrap=True)

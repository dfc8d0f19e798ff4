"""`holdfast diff A B`: what differs between two checkpoints, whatever their layouts. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.compare import (
    TensorComparer,
    TensorDifference,
    Tolerance,
    ValueDifference,
    in_words,
    value_differences,
)
from holdfast.cli.support.keys import select_keys
from holdfast.cli.support.messages import (
    EXIT_DAMAGED,
    clean,
    counted,
    in_bytes,
    layout_in_words,
    shape_in_words,
)
from holdfast.cli.support.steps import OpenCheckpoint, open_checkpoint
from holdfast.cli.support.tables import (
    MAX_ROWS,
    make_console,
    make_table,
    print_json,
    print_rows,
    progress_bar,
)
from holdfast.errors import ConfigError
from holdfast.format.reader import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Compare two checkpoints: structure, values, tensors; exit code 1 when they differ."""

    a: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    b: Annotated[Path, POSITIONAL]
    """The other one."""

    tensor: str | None = None
    """Only tensors whose key is this, or matches this pattern (`*`, `?`); no values."""

    values: bool = False
    """Only values; with --tensor, values too."""

    rtol: float = 0.0
    """Elements a, b are equal when |a - b| <= atol + rtol * |b|; 0 and 0: when bytes are equal."""

    atol: float = 0.0
    """See --rtol."""

    read: bool = False
    """Read the tensors even where fingerprints in both manifests say that they are equal."""

    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureDifference:
    """A tensor of another dtype or shape; None on the side that lacks it."""

    key: str
    a: str | None
    b: str | None


@dataclass(slots=True, kw_only=True)
class Differences:
    """All differences, and how much was compared in which way."""

    structure: list[StructureDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    num_equal: int = 0
    num_by_fingerprint: int = 0
    nbytes_read: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.structure or self.values or self.tensors)


def run(args: Args) -> int:
    """Print the differences; 1 when there are any. Tensors with equal fingerprints are not read."""
    if not (args.rtol >= 0 and args.atol >= 0):
        raise ConfigError(f"--rtol {args.rtol} --atol {args.atol}: a tolerance is not negative")
    with open_checkpoint(args.a) as a, open_checkpoint(args.b) as b:
        result = Differences()
        if args.values or args.tensor is None:
            result.values += value_differences(a.snapshot.manifest.parts, b.snapshot.manifest.parts)
        if args.tensor is not None or not args.values:
            _compare_tensors(a.snapshot, b.snapshot, args, result)
        if args.json:
            print_json(_as_json(a, b, result))
        else:
            _print(a, b, args, result)
    return 0 if result.is_equal else EXIT_DAMAGED


def _compare_tensors(a: Snapshot, b: Snapshot, args: Args, result: Differences) -> None:
    common = []
    keys = list(dict.fromkeys([*a.keys, *b.keys]))
    for key in keys if args.tensor is None else select_keys(args.tensor, keys):
        kinds = [_kind(side, key) for side in (a, b)]
        if kinds[0] != kinds[1]:
            result.structure.append(StructureDifference(key=key, a=kinds[0], b=kinds[1]))
        elif not args.read and _same_fingerprint(a, b, key):
            result.num_by_fingerprint += 1
            result.num_equal += 1
        else:
            common.append(key)
    total = sum(a.tensor(key).nbytes for key in common)
    tolerance = Tolerance(rtol=args.rtol, atol=args.atol)
    with progress_bar(quiet=args.json) as bar:
        advance = partial(bar.advance, bar.add_task("diff", total=total))
        comparer = TensorComparer(a=a, b=b, tolerance=tolerance, advance=advance)
        for key in common:
            difference = comparer.compare(key)
            if difference is None:
                result.num_equal += 1
            else:
                result.tensors.append(difference)
    result.nbytes_read = a.stats.nbytes_read + b.stats.nbytes_read


def _kind(snapshot: Snapshot, key: str) -> str | None:
    if not snapshot.has(key):
        return None
    info = snapshot.tensor(key)
    return f"{info.dtype} {shape_in_words(info.shape)}"


def _same_fingerprint(a: Snapshot, b: Snapshot, key: str) -> bool:
    one = a.tensor(key).fingerprint
    return one is not None and one == b.tensor(key).fingerprint


def _as_json(a: OpenCheckpoint, b: OpenCheckpoint, result: Differences) -> dict[str, object]:
    return {
        "a": _side_json(a),
        "b": _side_json(b),
        "equal": result.is_equal,
        "structure": [asdict(item) for item in result.structure],
        "values": [asdict(item) for item in result.values],
        "tensors": [asdict(item) for item in result.tensors],
        "num_equal_tensors": result.num_equal,
        "num_equal_by_fingerprint": result.num_by_fingerprint,
        "nbytes_read": result.nbytes_read,
    }


def _side_json(side: OpenCheckpoint) -> dict[str, object]:
    manifest = side.snapshot.manifest
    return {
        "checkpoint": side.label,
        "step": manifest.step,
        "layouts": [layout_in_words(layout) for layout in manifest.layouts],
    }


def _print(a: OpenCheckpoint, b: OpenCheckpoint, args: Args, result: Differences) -> None:
    console = make_console()
    for name, side in (("A", a), ("B", b)):
        manifest = side.snapshot.manifest
        layouts = "; ".join(layout_in_words(layout) for layout in manifest.layouts)
        console.print(f"{name}  {clean(side.label)}  step {manifest.step}, {layouts}", style="dim")
    _print_structure(console, result.structure)
    _print_values(console, result.values)
    _print_tensors(console, result.tensors)
    console.print(_summary(args, result), style="green" if result.is_equal else "bold red")


def _print_structure(console: Console, items: list[StructureDifference]) -> None:
    if not items:
        return
    table = make_table([("tensor", "cyan"), ("A", ""), ("B", "")])
    for item in items[:MAX_ROWS]:
        table.add_row(clean(item.key), item.a or "not there", item.b or "not there")
    print_rows(console, table, len(items))


def _print_values(console: Console, items: list[ValueDifference]) -> None:
    if not items:
        return
    table = make_table([("value", "cyan"), ("A", ""), ("B", "")])
    for item in items[:MAX_ROWS]:
        left = clean(in_words(item.a)) if item.in_a else "not there"
        right = clean(in_words(item.b)) if item.in_b else "not there"
        table.add_row(clean(item.path), left, right)
    print_rows(console, table, len(items))


def _print_tensors(console: Console, items: list[TensorDifference]) -> None:
    if not items:
        return
    table = make_table(
        [
            ("tensor", "cyan"), ("dtype", ""), ("shape", ""), ("differing", "right"),
            ("max |b-a|", "right"), ("norm of b-a", "right"), ("undefined", "right"),
        ]
    )  # fmt: skip
    for item in items[:MAX_ROWS]:
        undefined = f"{item.num_undefined:,}" if item.num_undefined else ""
        table.add_row(
            clean(item.key), item.dtype, shape_in_words(item.shape), f"{item.num_differing:,}",
            f"{item.max_abs:.6g}", f"{item.norm:.6g}", undefined,
        )  # fmt: skip
    print_rows(console, table, len(items))


def _summary(args: Args, result: Differences) -> str:
    how = f"{in_bytes(result.nbytes_read)} read"
    if result.num_by_fingerprint:
        how += f", {counted(result.num_by_fingerprint, 'tensor')} equal by fingerprint and not read"
    if args.rtol or args.atol:
        how += f", within rtol {args.rtol:g} and atol {args.atol:g}"
    if result.is_equal:
        what = [] if args.tensor is None and args.values else [counted(result.num_equal, "tensor")]
        what += ["all values"] if args.values or args.tensor is None else []
        return f"equal: {' and '.join(what)} ({how})"
    parts = [
        (len(result.structure), "tensor of another kind", "tensors of another kind"),
        (len(result.values), "value", "values"),
        (len(result.tensors), "tensor", "tensors"),
    ]
    counts = [f"{number:,} {one if number == 1 else many}" for number, one, many in parts if number]
    return f"different: {', '.join(counts)}; {counted(result.num_equal, 'tensor')} equal ({how})"

"""`holdfast diff A B`: what differs between two checkpoints, whatever their layouts. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from holdfast.cli.support.comparing import (
    TensorComparer,
    TensorDifference,
    Tolerance,
    ValueDifference,
    in_words,
    value_differences,
)
from holdfast.cli.support.inspecting import (
    EXIT_DAMAGED,
    clean,
    counted,
    in_bytes,
    layout_in_words,
    make_console,
    make_table,
    print_json,
)
from holdfast.cli.support.opening import Opened, matching_keys, no_match, open_marked, progress_bar
from holdfast.errors import ConfigError
from holdfast.format.reader import Snapshot

_MAX_ROWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Compare two checkpoints: structure, values, tensors; exit code 1 when they differ."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
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
    """A tensor of another dtype or shape; None on the side that has it not."""

    key: str
    a: str | None
    b: str | None


@dataclass(slots=True, kw_only=True)
class Differences:
    """All that was found; the numbers say how much was compared, and how."""

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
    """Print the differences; 1 when there are any. Reads tensors whose fingerprints do not tell."""
    if not (args.rtol >= 0 and args.atol >= 0):
        raise ConfigError(f"--rtol {args.rtol} --atol {args.atol}: a tolerance is not negative")
    with open_marked(args.a) as a, open_marked(args.b) as b:
        found = Differences()
        if args.values or args.tensor is None:
            found.values += value_differences(a.snapshot.manifest.parts, b.snapshot.manifest.parts)
        if args.tensor is not None or not args.values:
            _compare_tensors(a.snapshot, b.snapshot, args, found)
        if args.json:
            print_json(_as_json(a, b, found))
        else:
            _print(a, b, args, found)
    return 0 if found.is_equal else EXIT_DAMAGED


def _compare_tensors(a: Snapshot, b: Snapshot, args: Args, found: Differences) -> None:
    common = []
    for key in _chosen(a, b, args.tensor):
        kinds = [_kind(side, key) for side in (a, b)]
        if kinds[0] != kinds[1]:
            found.structure.append(StructureDifference(key=key, a=kinds[0], b=kinds[1]))
        elif not args.read and _same_fingerprint(a, b, key):
            found.num_by_fingerprint += 1
            found.num_equal += 1
        else:
            common.append(key)
    total = sum(a.tensor(key).nbytes for key in common)
    with progress_bar("diff", total=total, quiet=args.json) as advance:
        tolerance = Tolerance(rtol=args.rtol, atol=args.atol)
        comparer = TensorComparer(a, b, tolerance=tolerance, advance=advance)
        for key in common:
            difference = comparer.compare(key)
            if difference is None:
                found.num_equal += 1
            else:
                found.tensors.append(difference)
    found.nbytes_read = a.stats.nbytes_read + b.stats.nbytes_read


def _chosen(a: Snapshot, b: Snapshot, pattern: str | None) -> list[str]:
    """Keys of either side, in the order of A, then those that only B has."""
    if pattern is None:
        return list(dict.fromkeys([*a.keys, *b.keys]))
    keys = list(dict.fromkeys([*matching_keys(a, pattern), *matching_keys(b, pattern)]))
    if not keys:
        raise no_match(pattern, list(dict.fromkeys([*a.keys, *b.keys])))
    return keys


def _kind(snapshot: Snapshot, key: str) -> str | None:
    if not snapshot.has(key):
        return None
    info = snapshot.tensor(key)
    return f"{info.dtype} {' x '.join(map(str, info.shape)) or 'scalar'}"


def _same_fingerprint(a: Snapshot, b: Snapshot, key: str) -> bool:
    one = a.tensor(key).fingerprint
    return one is not None and one == b.tensor(key).fingerprint


def _as_json(a: Opened, b: Opened, found: Differences) -> dict[str, object]:
    return {
        "a": _side_json(a),
        "b": _side_json(b),
        "equal": found.is_equal,
        "structure": [asdict(item) for item in found.structure],
        "values": [asdict(item) for item in found.values],
        "tensors": [asdict(item) for item in found.tensors],
        "num_equal_tensors": found.num_equal,
        "num_equal_by_fingerprint": found.num_by_fingerprint,
        "nbytes_read": found.nbytes_read,
    }


def _side_json(side: Opened) -> dict[str, object]:
    manifest = side.snapshot.manifest
    return {
        "checkpoint": side.label,
        "step": manifest.step,
        "layouts": [layout_in_words(layout) for layout in manifest.layouts],
    }


def _print(a: Opened, b: Opened, args: Args, found: Differences) -> None:
    console = make_console()
    for name, side in (("A", a), ("B", b)):
        manifest = side.snapshot.manifest
        layouts = "; ".join(layout_in_words(layout) for layout in manifest.layouts)
        console.print(f"{name}  {clean(side.label)}  step {manifest.step}, {layouts}", style="dim")
    _print_structure(console, found.structure)
    _print_values(console, found.values)
    _print_tensors(console, found.tensors)
    console.print(_summary(args, found), style="green" if found.is_equal else "bold red")


def _print_structure(console: Console, items: list[StructureDifference]) -> None:
    if not items:
        return
    table = make_table([("tensor", "cyan"), ("A", ""), ("B", "")])
    for item in items[:_MAX_ROWS]:
        table.add_row(clean(item.key), item.a or "not there", item.b or "not there")
    console.print(table)
    _print_more(console, len(items))


def _print_values(console: Console, items: list[ValueDifference]) -> None:
    if not items:
        return
    table = make_table([("value", "cyan"), ("A", ""), ("B", "")])
    for item in items[:_MAX_ROWS]:
        left = clean(in_words(item.a)) if item.in_a else "not there"
        right = clean(in_words(item.b)) if item.in_b else "not there"
        table.add_row(clean(item.path), left, right)
    console.print(table)
    _print_more(console, len(items))


def _print_tensors(console: Console, items: list[TensorDifference]) -> None:
    if not items:
        return
    table = make_table(
        [
            ("tensor", "cyan"), ("dtype", ""), ("shape", ""), ("differing", "right"),
            ("max |b-a|", "right"), ("norm of b-a", "right"), ("undefined", "right"),
        ]
    )  # fmt: skip
    for item in items[:_MAX_ROWS]:
        shape = " x ".join(map(str, item.shape)) or "scalar"
        undefined = f"{item.num_undefined:,}" if item.num_undefined else ""
        table.add_row(
            clean(item.key), item.dtype, shape, f"{item.num_differing:,}",
            f"{item.max_abs:.6g}", f"{item.norm:.6g}", undefined,
        )  # fmt: skip
    console.print(table)
    _print_more(console, len(items))


def _print_more(console: Console, num_items: int) -> None:
    if num_items > _MAX_ROWS:
        console.print(f"… and {num_items - _MAX_ROWS:,} more; --json lists all", style="dim")


def _summary(args: Args, found: Differences) -> str:
    how = f"{in_bytes(found.nbytes_read)} read"
    if found.num_by_fingerprint:
        how += f", {counted(found.num_by_fingerprint, 'tensor')} told by fingerprint and not read"
    if args.rtol or args.atol:
        how += f", within rtol {args.rtol:g} and atol {args.atol:g}"
    if found.is_equal:
        what = [] if args.tensor is None and args.values else [counted(found.num_equal, "tensor")]
        what += ["all values"] if args.values or args.tensor is None else []
        return f"equal: {' and '.join(what)} ({how})"
    parts = [
        (len(found.structure), "tensor of another kind", "tensors of another kind"),
        (len(found.values), "value", "values"),
        (len(found.tensors), "tensor", "tensors"),
    ]
    said = [f"{number:,} {one if number == 1 else many}" for number, one, many in parts if number]
    return f"different: {', '.join(said)}; {counted(found.num_equal, 'tensor')} equal ({how})"

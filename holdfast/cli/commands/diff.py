"""`holdfast diff A B`: what differs between two checkpoints, whatever their layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.compare import (
    TensorDifference,
    ValueDifference,
    compare_tensors,
    in_words,
    value_differences,
)
from holdfast.cli.support.elements import refuse_damage, refuse_drift
from holdfast.cli.support.keys import other_names, select_keys
from holdfast.cli.support.messages import EXIT_DAMAGED, layout_in_words, shape_in_words
from holdfast.cli.support.steps import OpenCheckpoint, open_checkpoint
from holdfast.cli.support.tables import (
    make_console,
    print_json,
    print_rows,
    progress_bar,
)
from holdfast.errors import ConfigError, counted, in_bytes
from holdfast.format.manifest import (
    KINDS_PART,
    METADATA_PART,
    USUAL_VERSION,
    VERSIONS_PART,
    Manifest,
)
from holdfast.format.reader import Snapshot
from holdfast.format.values import Node, count_values, encode_tree, tensor_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Compare two checkpoints: structure, values, metadata, tensors; exit code 1 when they differ,
    or one has what cannot be read and so cannot be compared."""

    a: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    b: Annotated[Path, POSITIONAL]
    """The other one."""

    tensor: str | None = None
    """Only tensors whose key is this, or matches this pattern (`*`, `?`); no values."""

    values: bool = False
    """Only values and metadata; with --tensor, these too."""

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
    not_compared: list[str] = field(default_factory=list)
    """What one of the two has and its format does not show, one sentence each."""
    num_equal: int = 0
    num_by_fingerprint: int = 0
    nbytes_read: int = 0

    @property
    def is_different(self) -> bool:
        """Return True if something was found to differ."""
        return bool(self.structure or self.values or self.tensors)

    @property
    def is_equal(self) -> bool:
        """Return True if all was compared, and nothing differs."""
        return not (self.is_different or self.not_compared)


def run(args: Args) -> int:
    """Print the differences; 1 if they are not proven equal, or one of the two is damaged.

    Tensors with equal fingerprints are not read.
    """
    if not (args.rtol >= 0 and args.atol >= 0):
        raise ConfigError(f"--rtol {args.rtol} --atol {args.atol}: a tolerance is not negative")
    with open_checkpoint(args.a) as a, open_checkpoint(args.b) as b:
        result = Differences()
        if args.values or args.tensor is None:
            one, other = a.snapshot.manifest, b.snapshot.manifest
            result.values += value_differences(one.parts, other.parts)
            versions = _versions(one, other), _versions(other, one)
            result.values += value_differences(*versions)
            result.values += value_differences(_kinds(one, other), _kinds(other, one))
            metadata = [{METADATA_PART: encode_tree(each.metadata)} for each in (one, other)]
            result.values += value_differences(*metadata)
            # Named tensors are compared as they are read; nothing else was asked for.
            result.not_compared += [
                f"{name}: {sentence}"
                for name, side in (("A", a), ("B", b))
                for sentence in side.left_out
            ]
        if args.tensor is not None or not args.values:
            _compare_tensors(a.snapshot, b.snapshot, args, result)
            lacking = {each.key for each in result.structure if None in (each.a, each.b)}
            result.values = [each for each in result.values if not _is_tensors(each, lacking)]
        if args.json:
            print_json(_as_json(a, b, result))
        else:
            _print(a, b, args, result)
    return 0 if result.is_equal else EXIT_DAMAGED


def _versions(manifest: Manifest, other: Manifest) -> dict[str, Node]:
    """Return the versions of modules as a tree, of the parts of which both checkpoints know them.

    A version that one of the two has not noted is the usual one.
    """
    mine, others = manifest.versions or {}, other.versions or {}
    parts: Node = {
        part: {
            name or "(root)": mine[part].get(name, USUAL_VERSION)
            for name in {**mine[part], **others[part]}
        }
        for part in mine
        if part in others
    }
    return {VERSIONS_PART: parts}


def _kinds(manifest: Manifest, other: Manifest) -> dict[str, Node]:
    """Return the classes of objects as a tree, of those of which both checkpoints know them."""
    mine, others = manifest.kinds or {}, other.kinds or {}
    parts: Node = {
        part: {
            path or "(root)": [*names]
            for path, names in mine[part].items()
            if path in others.get(part, ())
        }
        for part in mine
        if part in others
    }
    return {KINDS_PART: parts}


def _is_tensors(difference: ValueDifference, lacking: set[str]) -> bool:
    """Return True if a value is nothing but tensors that one side lacks: these are listed."""
    if difference.in_a == difference.in_b:
        return False
    node = difference.a if difference.in_a else difference.b
    keys = set(tensor_keys(node))
    return bool(keys) and keys <= lacking and count_values(node) == 0


def _compare_tensors(a: Snapshot, b: Snapshot, args: Args, result: Differences) -> None:
    """Add what differs in structure, then in bytes; reads only what has to be read."""
    common = []
    keys = list(dict.fromkeys([*a.keys, *b.keys]))
    others = [other_names(side) for side in (a, b)]
    chosen = keys
    if args.tensor is not None:
        chosen = select_keys(args.tensor, keys, {**others[1], **others[0]})
    for side in (a, b):
        refuse_drift(side, [key for key in chosen if side.has(key)])
    for key in chosen:
        kinds = [_kind(side, key, tied) for side, tied in zip((a, b), others, strict=True)]
        if kinds[0] != kinds[1]:
            result.structure.append(StructureDifference(key=key, a=kinds[0], b=kinds[1]))
        elif not args.read and _same_fingerprint(a, b, key):
            result.num_by_fingerprint += 1
            result.num_equal += 1
        else:
            common.append(key)
    for side in (a, b):
        refuse_damage(side, common)
    total = sum(a.tensor(key).nbytes for key in common)
    with progress_bar(quiet=args.json) as bar:
        advance = partial(bar.advance, bar.add_task("diff", total=total))
        for key in common:
            difference = compare_tensors(a, b, key, rtol=args.rtol, atol=args.atol, advance=advance)
            if difference is None:
                result.num_equal += 1
            else:
                result.tensors.append(difference)
    result.nbytes_read = a.stats.nbytes_read + b.stats.nbytes_read


def _kind(snapshot: Snapshot, key: str, tied: Mapping[str, str]) -> str | None:
    """Dtype and shape of a tensor in words, or what it is tied to; None if it does not exist."""
    if not snapshot.has(key):
        return f"tied to {tied[key]}" if key in tied else None
    info = snapshot.tensor(key)
    return f"{info.dtype} {shape_in_words(info.shape)}"


def _same_fingerprint(a: Snapshot, b: Snapshot, key: str) -> bool:
    one = a.tensor(key).fingerprint
    return one is not None and one == b.tensor(key).fingerprint


def _as_json(a: OpenCheckpoint, b: OpenCheckpoint, result: Differences) -> dict[str, object]:
    """The document of `--json`."""
    return {
        "a": _side_json(a),
        "b": _side_json(b),
        "equal": result.is_equal,
        "structure": [asdict(item) for item in result.structure],
        "values": [asdict(item) for item in result.values],
        "tensors": [asdict(item) for item in result.tensors],
        "not_compared": result.not_compared,
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
    """Both checkpoints, one table per kind of difference, and a summary."""
    console = make_console()
    for name, side in (("A", a), ("B", b)):
        manifest = side.snapshot.manifest
        layouts = "; ".join(layout_in_words(layout) for layout in manifest.layouts)
        what = f"step {manifest.step}, {layouts}" if layouts else f"step {manifest.step}"
        console.print(f"{name}  {side.label}  {what}", style="dim")
    print_rows(
        console,
        [("tensor", "cyan"), ("A", ""), ("B", "")],
        result.structure,
        lambda x: (x.key, x.a or "not there", x.b or "not there"),
        noun="tensor",
    )
    print_rows(
        console,
        [("value", "cyan"), ("A", ""), ("B", "")],
        result.values,
        lambda x: (x.path, _value(x.a, x.in_a), _value(x.b, x.in_b)),
        noun="value",
    )
    print_rows(
        console,
        [
            ("tensor", "cyan"), ("dtype", ""), ("shape", ""), ("differing", "right"),
            ("max |b-a|", "right"), ("norm of b-a", "right"), ("undefined", "right"),
        ],
        result.tensors,
        lambda x: (
            x.key, x.dtype, shape_in_words(x.shape), f"{x.num_differing:,}", f"{x.max_abs:.6g}",
            f"{x.norm:.6g}", f"{x.num_undefined:,}" if x.num_undefined else "",
        ),
        noun="tensor",
    )  # fmt: skip
    style = "bold red" if result.is_different else "green" if result.is_equal else "yellow"
    console.print(_summary(args, result), style=style, soft_wrap=True)
    for sentence in result.not_compared:
        console.print(f"  {sentence}", soft_wrap=True)


def _value(node: Node, is_there: bool) -> str:
    """A value in a cell of a table."""
    return in_words(node) if is_there else "not there"


def _summary(args: Args, result: Differences) -> str:
    """The last line: equal or different, and how much was read for it."""
    how = f"{in_bytes(result.nbytes_read)} read"
    if result.num_by_fingerprint:
        how += f", {counted(result.num_by_fingerprint, 'tensor')} equal by fingerprint and not read"
    if args.rtol or args.atol:
        how += f", within rtol {args.rtol:g} and atol {args.atol:g}"
    if not result.is_different:
        what = [] if args.tensor is None and args.values else [counted(result.num_equal, "tensor")]
        what += ["all values"] if args.values or args.tensor is None else []
        compared = f"{' and '.join(what)} ({how})"
        if result.is_equal:
            return f"equal: {compared}"
        return (
            f"no difference in {compared}, but not all could be compared (--tensor '*' compares "
            f"nothing but tensors):"
        )
    only_a = sum(each.b is None for each in result.structure)
    only_b = sum(each.a is None for each in result.structure)
    others = len(result.structure) - only_a - only_b
    parts = [
        (only_a, "tensor only in A", "tensors only in A"),
        (only_b, "tensor only in B", "tensors only in B"),
        (others, "tensor of another dtype or shape", "tensors of another dtype or shape"),
        (len(result.values), "value", "values"),
        (len(result.tensors), "tensor", "tensors"),
    ]
    counts = [f"{number:,} {one if number == 1 else many}" for number, one, many in parts if number]
    rest = "; not compared:" if result.not_compared else ""
    equal = counted(result.num_equal, "tensor")
    return f"different: {', '.join(counts)}; {equal} equal ({how}){rest}"

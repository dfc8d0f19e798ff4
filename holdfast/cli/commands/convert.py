"""`holdfast convert SRC DST --to FORMAT`: a checkpoint in another format. Imports no torch."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from rich.console import Console

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import print_removed
from holdfast.cli.support.tables import Listing, make_console, print_json, progress_bar
from holdfast.errors import ConfigError, counted, in_bytes
from holdfast.foreign.casts import cast_weights, float_type
from holdfast.foreign.catalog import Catalog
from holdfast.foreign.convert import (
    Conversion,
    ConvertOptions,
    TargetFormat,
    open_any,
    plan_conversion,
)
from holdfast.foreign.name_map_presets import name_map_of
from holdfast.foreign.own_format import FORMAT
from holdfast.retention.tags import tags_left_behind

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kMGT]?)(i?)B?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_POWERS = "kmgt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Write a checkpoint in another format, streamed and compared with its source at the end."""

    src: Annotated[Path, POSITIONAL]
    """A checkpoint in any format that is known, or a directory of them (then the newest)."""

    dst: Annotated[Path, POSITIONAL]
    """The folder or file to make; for holdfast, the root that gets the step. Never overwritten."""

    to: TargetFormat
    """The format to write."""

    step: int | None = None
    """Which step of a directory of checkpoints; of one in another format, the number it gets."""

    map: str | None = None
    """How names of the source become those of the target: a preset, or a TOML file."""

    set: tuple[str, ...] = ()
    """Values of variables of the map, such as num_heads=32 num_kv_heads=8."""

    parts: str | None = None
    """The part of the state that formats of weights get, `model` if not given."""

    whole_tree: bool = False
    """All parts, for torch_save, in place of one part."""

    flat_optimizer: bool = False
    """Optimizers as `flatten_optimizer_state_dict=True` has them, for dcp (TorchTitan)."""

    dtype: str | None = None
    """Another float type for the weights: bf16, f16, f32, f64, f8_e4m3, f8_e5m2."""

    max_shard_size: str = "5GB"
    """The largest file of a folder (huggingface, dcp): a number with kB, MB, GB or MiB, GiB."""

    config_from: Path | None = None
    """A folder whose config, tokenizer and other small files are copied next to the weights."""

    memory: str = "256MiB"
    """Budget of memory for the bytes on their way; 1 to 4 KB for each tensor come on top."""

    dry_run: bool = False
    """Only say what would be written, and what would be left out."""

    json: bool = False
    """Print JSON instead of text."""


def run(args: Args) -> int:
    """Convert; 1 when the source is damaged, or the result does not read back as it.

    Cost: reads the source once, writes it once, reads the result once.
    """
    options = ConvertOptions(
        to=args.to,
        part=args.parts,
        whole_tree=args.whole_tree,
        flat_optimizer=args.flat_optimizer,
        max_file_nbytes=parse_size(args.max_shard_size, option="--max-shard-size"),
        config_from=args.config_from,
        step=args.step,
    )
    memory = parse_size(args.memory, option="--memory")
    began = time.monotonic()
    renumber = args.to == "holdfast"
    with open_any(args.src, step=args.step, renumber=renumber) as source:
        catalog, changes = _mapped(source, args)
        conversion = plan_conversion(catalog, args.dst, options)
        conversion.refuse_existing()
        if not args.dry_run:
            with progress_bar(quiet=args.json) as bar:
                # Everything is written and then compared.
                task = bar.add_task("convert", total=2 * conversion.output.nbytes)
                advance = partial(bar.advance, task)
                conversion.run(memory_nbytes=memory, on_progress=advance, on_leftover=print_removed)
        seconds = time.monotonic() - began
        if args.json:
            print_json(_as_json(conversion, args, seconds, changes))
        else:
            _print(make_console(), conversion, args, seconds, changes)
    return 0


def _mapped(catalog: Catalog, args: Args) -> tuple[Catalog, list[str]]:
    """The catalog under its new names and types, and what was done to it, line by line."""
    lines: list[str] = []
    if args.set and args.map is None:
        raise ConfigError("--set gives values to the variables of a map: add --map")
    if args.map is not None:
        mapped = name_map_of(args.map).given(**_variables(args.set)).apply(catalog)
        catalog, lines = mapped.catalog, mapped.report.lines()
    if args.dtype is not None:
        dtype = float_type(args.dtype)
        catalog = cast_weights(catalog, dtype, part=args.parts)
        lines.append(f"cast: the weights to {dtype}")
    return catalog, lines


def _variables(words: tuple[str, ...]) -> dict[str, int]:
    """The values that words such as num_heads=32 give; ConfigError for any other word."""
    values = {}
    for word in words:
        name, _, number = word.partition("=")
        if not name.isidentifier() or not _NUMBER.fullmatch(number):
            raise ConfigError(f"--set needs name=number, such as num_heads=32, not {word!r}")
        values[name] = int(number)
    return values


def parse_size(text: str, *, option: str) -> int:
    """Return the bytes that a size such as 5GB or 256MiB means; ConfigError if it is not one."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} needs a size such as 5GB or 256MiB, not {text!r}")
    number, power, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** (_POWERS.index(power.lower()) + 1 if power else 0))


def _as_json(
    conversion: Conversion, args: Args, seconds: float, changes: list[str]
) -> dict[str, object]:
    """The document of `--json`."""
    output = conversion.output
    return {
        "source": conversion.catalog.label,
        "source_format": conversion.catalog.format,
        "to": str(conversion.to),
        "format": args.to,
        "written": not args.dry_run,
        "num_tensors": output.num_tensors,
        "nbytes": output.nbytes,
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in output.files],
        "changes": changes,
        "left_out": _left_out(conversion),
        "seconds": round(seconds, 3),
    }


def _left_out(conversion: Conversion) -> list[str]:
    """What the result does not have, each sentence once."""
    catalog = conversion.catalog
    tags = tags_left_behind(catalog.storage, catalog.step) if catalog.format == FORMAT else []
    return list(dict.fromkeys([*catalog.left_out, *conversion.output.notes, *tags]))


def _print(
    console: Console, conversion: Conversion, args: Args, seconds: float, changes: list[str]
) -> None:
    """Say what was written, what was changed on the way, and what was left out."""
    output, catalog = conversion.output, conversion.catalog
    if args.dry_run:
        table = Listing([("file", ""), ("tensors", "right"), ("size", "right")])
        for file in output.files:
            table.add_row(file.name, str(len(file.extents)), in_bytes(file.nbytes))
        console.print(table)
    for line in changes if args.dry_run else ():
        console.print(f"  {line}", soft_wrap=True)
    done = "would be written" if args.dry_run else "written"
    after = "" if args.dry_run else f" and compared with the source, in {seconds:.1f} s"
    num = output.num_tensors
    console.print(
        f"{counted(num, 'tensor')}, {in_bytes(output.nbytes)}, of {catalog.label} "
        f"({catalog.format}) {done} as {args.to} to {conversion.to}{after}",
        soft_wrap=True,
    )
    if changes and not args.dry_run:
        console.print(f"{counted(len(changes), 'change')} of names and types; --dry-run lists them")
    left_out = _left_out(conversion)
    if left_out:
        console.print("Left out:", style="yellow")
    for sentence in left_out:
        console.print(f"  {sentence}", soft_wrap=True)

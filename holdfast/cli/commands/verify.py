"""`holdfast verify PATH`: read every byte of a checkpoint and name what is damaged. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.cli.support.inspecting import (
    EXIT_DAMAGED,
    clean,
    counted,
    in_bytes,
    make_console,
    make_table,
    print_json,
)
from holdfast.cli.support.opening import mark_place
from holdfast.format.verify import Damage, OnProgress, verify_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Check every byte of a checkpoint against its digests."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    json: bool = False
    """Print JSON instead of text."""


@dataclass(slots=True)
class _Tally:
    """Bytes read so far."""

    nbytes: int = 0


def run(args: Args) -> int:
    """Print the verdict; 1 when anything is damaged. Reads every byte once."""
    tally = _Tally()
    began = time.monotonic()
    with (
        mark_place(args.path, step=args.step) as (place, _),
        _progress(tally, quiet=args.json) as on_progress,
    ):
        damages = verify_snapshot(place.storage, place.directory, on_progress=on_progress)
    seconds = time.monotonic() - began
    if args.json:
        print_json(
            {
                "checkpoint": place.label,
                "whole": not damages,
                "nbytes": tally.nbytes,
                "seconds": round(seconds, 3),
                "damages": [asdict(damage) for damage in damages],
            }
        )
    else:
        _print(place.label, damages, tally.nbytes, seconds)
    return EXIT_DAMAGED if damages else 0


@contextmanager
def _progress(tally: _Tally, *, quiet: bool) -> Iterator[OnProgress]:
    """A bar on standard error while it is a terminal."""
    bar = Progress(
        BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=make_console(sys.stderr), transient=True, disable=quiet or not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("verify", total=None)

        def on_progress(done: int, total: int) -> None:
            tally.nbytes = done
            bar.update(task, completed=done, total=total)

        yield on_progress


def _print(label: str, damages: list[Damage], nbytes: int, seconds: float) -> None:
    console = make_console()
    rate = f"{in_bytes(nbytes)} read in {seconds:.2f} s"
    if not damages:
        console.print(f"{label}: whole ({rate})", style="green")
        return
    table = make_table([("file", ""), ("byte", "right"), ("tensor", "cyan"), ("damage", "")])
    for damage in damages:
        offset = "" if damage.offset is None else str(damage.offset)
        table.add_row(clean(damage.file), offset, clean(damage.key or ""), clean(damage.what))
    console.print(f"{label}: {counted(len(damages), 'damage')} ({rate})", style="bold red")
    console.print(table)

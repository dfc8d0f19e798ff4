"""`holdfast copy SRC DST`: a checkpoint to another disk or bucket, byte for byte. No torch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import print_note
from holdfast.cli.support.running import Stopped
from holdfast.cli.support.steps import lease_checkpoint
from holdfast.cli.support.tables import print_json, progress_bar
from holdfast.errors import ConfigError, clean, in_bytes
from holdfast.format.names import step_dir
from holdfast.retention.tags import tags_left_behind
from holdfast.storage import open_storage, shown
from holdfast.storage.reading import pause_of
from holdfast.writer.copying import copy_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Copy a checkpoint to another directory or bucket, as a whole or not at all."""

    src: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory or URL of checkpoints (then the newest committed step)."""

    dst: Annotated[Path, POSITIONAL]
    """The directory or URL that holds the checkpoints there; it is made if it does not exist."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    verify: bool = False
    """Read every byte back before the copy counts, also of one that is there already."""

    overwrite: bool = False
    """Replace another version of the step."""

    json: bool = False
    """Print JSON instead of text."""


def run(args: Args) -> int:
    """Copy, and print what was done; 1 if the source, or what is there already, is damaged."""
    began = time.monotonic()
    target = open_storage(args.dst)
    with lease_checkpoint(args.src, step=args.step) as (checkpoint, _):
        if checkpoint.foreign:
            raise ConfigError(
                f"{checkpoint.label} is in the format {checkpoint.foreign}; "
                f"`holdfast convert` writes it in ours"
            )
        with progress_bar(quiet=args.json) as bar:
            task = bar.add_task("copy", total=None)
            try:
                report = copy_checkpoint(
                    checkpoint.storage,
                    checkpoint.directory,
                    target,
                    overwrite=args.overwrite,
                    verify=args.verify,
                    on_progress=lambda nbytes: bar.advance(task, nbytes),
                )
            except (KeyboardInterrupt, Stopped):
                print_note(
                    f"what was copied so far stays in {shown(args.dst)}: the same command "
                    f"continues there, and `holdfast repair` removes it"
                )
                raise
        # In a bucket they would be requests; `holdfast tag` lists them.
        is_local = not pause_of(checkpoint.storage)
        left_out = tags_left_behind(checkpoint.storage, report.step) if is_local else []
    seconds = time.monotonic() - began
    where = f"{shown(args.dst).rstrip('/')}/{step_dir(report.step)}"
    if args.json:
        print_json(
            {
                "from": checkpoint.label,
                "to": where,
                "seconds": round(seconds, 3),
                "verified": args.verify,
                "left_out": left_out,
                **asdict(report),
            }
        )
    elif report.was_there:
        print(clean(f"{where} is this very version already; nothing was copied"))
    else:
        sent = (
            ""
            if report.nbytes_sent == report.nbytes
            else f", {in_bytes(report.nbytes_sent)} of it now: an earlier copy was continued,"
        )
        what = f"{in_bytes(report.nbytes)}{sent} in {seconds:.2f} s"
        print(clean(f"{checkpoint.label} -> {where} ({what})"))
    if not args.json:
        for each in left_out:
            print(clean(f"left out: {each}"))
    return 0

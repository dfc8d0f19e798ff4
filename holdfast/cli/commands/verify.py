"""`holdfast verify PATH`: read every byte of a checkpoint and name what is damaged. No torch.

Of a checkpoint without digests (a foreign format) the structure is verified, that every chunk can
be read, and the CRC-32s that files of `torch.save` and items of PyTorch DCP state.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import EXIT_DAMAGED
from holdfast.cli.support.steps import StoredCheckpoint, lease_checkpoint
from holdfast.cli.support.tables import Listing, make_console, print_json, progress_bar
from holdfast.errors import counted, in_bytes
from holdfast.foreign.checksums import compare_checksums
from holdfast.foreign.view import CatalogStorage
from holdfast.format.verifier import Damage, verify_snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Check every byte of a checkpoint against its digests; exit code 1 if any is damaged."""

    path: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints (then the newest committed step)."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    json: bool = False
    """Print JSON instead of text."""


def run(args: Args) -> int:
    """Print the verdict; 1 when anything is damaged. Reads every byte once."""
    began = time.monotonic()
    with lease_checkpoint(args.path, step=args.step) as (checkpoint, _):
        nbytes, damages = _verify(checkpoint, quiet=args.json)
        storage = checkpoint.storage
        compared = 0
        # An archive that cannot be opened is a damage already.
        if isinstance(storage, CatalogStorage) and not damages:
            result = compare_checksums(storage.catalog)
            compared, damages = result.nbytes, result.damages
    seconds = time.monotonic() - began
    if args.json:
        print_json(
            {
                "checkpoint": checkpoint.label,
                "whole": not damages,
                "has_digests": not checkpoint.foreign,
                "nbytes_with_checksums": compared,
                "nbytes": nbytes,
                "seconds": round(seconds, 3),
                "damages": [asdict(damage) for damage in damages],
            }
        )
    else:
        _print(checkpoint, damages, nbytes, seconds, compared)
    return EXIT_DAMAGED if damages else 0


def _verify(checkpoint: StoredCheckpoint, *, quiet: bool) -> tuple[int, list[Damage]]:
    """The number of bytes read, and what is damaged."""
    nbytes = 0
    with progress_bar(quiet=quiet) as bar:
        task = bar.add_task("verify", total=None)

        def on_progress(done: int, total: int) -> None:
            nonlocal nbytes
            nbytes = done
            bar.update(task, completed=done, total=total)

        damages = verify_snapshot(checkpoint.storage, checkpoint.directory, on_progress=on_progress)
    storage = checkpoint.storage
    if isinstance(storage, CatalogStorage) and storage.catalog.drift:
        damages.append(Damage(file="", key=None, offset=None, what=storage.catalog.drift))
    return nbytes, damages


def _print(
    checkpoint: StoredCheckpoint,
    damages: list[Damage],
    nbytes: int,
    seconds: float,
    compared: int,
) -> None:
    """The verdict, and a table of the damages."""
    console = make_console()
    label = checkpoint.label
    rate = f"{in_bytes(nbytes)} read in {seconds:.2f} s"
    if checkpoint.foreign:
        rate = f"{checkpoint.foreign}, {in_bytes(nbytes)}"
    if not damages and checkpoint.foreign:
        what = (
            f"The format has no digests; {in_bytes(compared)} have the CRC-32s that their files "
            f"state"
            if compared
            else "The format has no digests, so the bytes themselves cannot be verified"
        )
        console.print(
            f"{label}: complete ({rate}): every tensor is covered once and every chunk is there. "
            f"{what}",
            style="yellow",
            soft_wrap=True,
        )
        return
    if not damages:
        console.print(f"{label}: whole ({rate})", style="green", soft_wrap=True)
        return
    table = Listing([("file", ""), ("byte", "right"), ("tensor", "cyan"), ("damage", "")])
    for damage in damages:
        offset = "" if damage.offset is None else str(damage.offset)
        table.add_row(damage.file, offset, damage.key or "", damage.what)
    console.print(
        f"{label}: {counted(len(damages), 'damage')} ({rate})", style="bold red", soft_wrap=True
    )
    console.print(table)

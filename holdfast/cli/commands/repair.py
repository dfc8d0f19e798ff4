"""`holdfast repair ROOT`: finish or remove what saves have left behind. Imports no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import exit_code
from holdfast.cli.support.steps import open_steps
from holdfast.cli.support.tables import Listing, make_console, print_json
from holdfast.errors import counted
from holdfast.storage import shown
from holdfast.writer.leftovers import Fate, Leftover, repair

_WORDS_AND_STYLES: dict[Fate, tuple[str, str]] = {
    "finished": ("finished", "green"),
    "removed": ("removed", "yellow"),
    "alive": ("left alone", "dim"),
    "read": ("left to its readers", "dim"),
    "kept": ("stuck", "red"),
    "unseen": ("not looked at", "dim"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Finish saves that are complete, remove those that cannot be; checkpoints stay untouched."""

    root: Annotated[Path, POSITIONAL]
    """The directory that holds the checkpoints."""

    dry_run: bool = False
    """Only say what would be done."""

    json: bool = False
    """Print JSON instead of a table."""


def run(args: Args) -> int:
    """Print what was done with each leftover and why; 2 if one is stuck, 1 if by damage."""
    storage = open_steps(args.root, verb="repair")
    leftovers = repair(storage, dry_run=args.dry_run)
    if args.json:
        print_json(
            {
                "root": shown(args.root),
                "dry_run": args.dry_run,
                "leftovers": [asdict(leftover) for leftover in leftovers],
            }
        )
    else:
        _print(args, leftovers)
    return exit_code(
        is_damaged=any(leftover.is_damaged for leftover in leftovers),
        has_failed=any(leftover.fate == "kept" for leftover in leftovers),
    )


def _print(args: Args, leftovers: list[Leftover]) -> None:
    """A table of the leftovers, and how many of each fate."""
    console = make_console()
    if not leftovers:
        console.print(f"nothing is left behind in {shown(args.root)}", soft_wrap=True)
        return
    words = {
        fate: f"would be {word}" if args.dry_run and fate in ("finished", "removed") else word
        for fate, (word, _) in _WORDS_AND_STYLES.items()
    }
    table = Listing([("step", "right"), ("leftover", ""), ("", ""), ("why", "")])
    for leftover in leftovers:
        table.add_row(
            "" if leftover.step is None else str(leftover.step),
            leftover.name,
            words[leftover.fate],
            leftover.why,
            style=_WORDS_AND_STYLES[leftover.fate][1],
        )
    console.print(table)
    fates = Counter(leftover.fate for leftover in leftovers)
    counts = [f"{fates[fate]} {word}" for fate, word in words.items() if fate in fates]
    prefix = "nothing was changed: " if args.dry_run else ""
    console.print(f"{prefix}{counted(len(leftovers), 'leftover')}: {', '.join(counts)}")

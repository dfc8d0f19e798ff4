"""`holdfast tag ROOT [STEP NAME]`: names for steps, which `prune --keep-tagged` keeps. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.steps import open_steps
from holdfast.cli.support.tables import Listing, make_console, print_json
from holdfast.errors import ConfigError
from holdfast.format.names import list_steps
from holdfast.retention.tags import list_tags, remove_tag, set_tag
from holdfast.storage import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """List the tags of a directory of checkpoints, set one, or remove one."""

    root: Annotated[Path, POSITIONAL]
    """The directory that holds the checkpoints."""

    step: Annotated[int | None, POSITIONAL] = None
    """The committed step to name."""

    name: Annotated[str | None, POSITIONAL] = None
    """Its name; a tag of that name moves."""

    remove: str | None = None
    """Remove this tag; the checkpoint stays."""

    json: bool = False
    """Print JSON instead of a table."""


def run(args: Args) -> int:
    """Set or remove a tag if one is given, and list the tags."""
    storage = open_steps(args.root, verb="tag")
    if args.remove is not None:
        if args.step is not None:
            raise ConfigError("--remove NAME takes no step: a tag is removed by its name")
        remove_tag(storage, args.remove)
    elif args.step is not None:
        if args.name is None:
            raise ConfigError(f"what is step {args.step} to be called? give STEP and NAME")
        set_tag(storage, args.name, step=args.step)
    tags = list_tags(storage)
    if args.json:
        print_json({"root": shown(args.root), "tags": tags})
        return 0
    console = make_console()
    if not tags:
        console.print(f"no tags in {shown(args.root)}", soft_wrap=True)
        return 0
    steps = set(list_steps(storage))
    table = Listing([("tag", "cyan"), ("step", "right"), ("", "red")])
    for name, step in tags.items():
        table.add_row(name, f"{step}", "" if step in steps else "not there any more")
    console.print(table)
    return 0

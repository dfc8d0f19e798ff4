"""`holdfast ls ROOT`: the checkpoints in a directory. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.messages import exit_code, layout_in_words, metadata_in_words, when
from holdfast.cli.support.steps import find_runs, open_root, require_something, state_of
from holdfast.cli.support.tables import Listing, make_console, print_json
from holdfast.errors import ConfigError, HoldfastError, counted, in_bytes
from holdfast.foreign.formats import detect_format, unknown
from holdfast.foreign.location import Location
from holdfast.format.names import (
    LATEST,
    MANIFEST,
    list_steps,
    parse_saving_dir,
    parse_step_dir,
    step_dir,
)
from holdfast.format.summaries import Summary, read_summary
from holdfast.format.versions import read_manifest
from holdfast.storage import PosixStorage, Storage, is_url, shown
from holdfast.storage.reading import is_unknown, read_at_most

_MAX_FOREIGN = 200
"""Names in a directory that are looked at for checkpoints in other formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """List the checkpoints in a directory."""

    root: Annotated[Path, POSITIONAL] = Path()
    """The directory that holds the checkpoints."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One committed step; `damage`: what is wrong with its manifest; `problem`: why it cannot be
    read, which says nothing of what is stored."""

    step: int
    created: str = ""
    num_tensors: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0
    num_files: int = 0
    layouts: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    damage: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncommitted:
    """A directory that is not a checkpoint: a save in progress, abandoned, or being removed."""

    name: str
    step: int | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A directory of checkpoints below the one that was named; `problem`: why it cannot be read."""

    path: str
    num_steps: int = 0
    latest: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint in another format, by its metadata; `problem`: why it cannot be read."""

    path: str
    format: str
    step: int = 0
    num_tensors: int = 0
    nbytes: int = 0
    problem: str | None = None
    is_damaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What is listed; the document of `--json`."""

    root: str
    latest: int | None = None
    pointer: int | None = None
    steps: list[Step] = field(default_factory=list)
    uncommitted: list[Uncommitted] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    foreign: list[Foreign] = field(default_factory=list)


def run(args: Args) -> int:
    """Print the list, or of a directory of runs the runs; 1 if a manifest is damaged, 2 if one
    cannot be read.

    Reads manifests only, no tensor.
    """
    is_file = not is_url(args.root) and os.path.isfile(args.root)
    contents = _of_file(args.root) if is_file else _of_root(args.root)
    steps, runs, foreign = contents.steps, contents.runs, contents.foreign
    if args.json:
        print_json(asdict(contents))
    else:
        if runs:
            _print_runs(contents.root, runs)
        if foreign:
            _print_foreign(foreign)
        if contents.uncommitted or not (runs or foreign):
            _print(contents)
    lines: list[Step | Run | Foreign] = [*steps, *runs, *foreign]
    return exit_code(
        is_damaged=any(step.damage for step in steps) or any(each.is_damaged for each in foreign),
        has_failed=any(line.problem for line in lines),
    )


def _of_root(path: Path) -> Contents:
    """What a directory or URL holds."""
    storage, root = open_root(path), shown(path)
    names, steps, moved = _survey(storage)
    is_step = is_url(path) and parse_step_dir(root.rpartition("/")[2]) is not None
    if MANIFEST in names or is_step:
        raise ConfigError(f"{root} is one checkpoint; `holdfast show {root}` shows it")
    if is_url(path):
        require_something(storage, names, root)
    leftovers = _leftovers(path, storage, names, {step.step for step in steps}, moved)
    # A directory without checkpoints of our own may have some of others.
    foreign = [] if steps or is_url(path) else _find_foreign(path)
    if foreign:
        paths = {each.path for each in foreign}
        leftovers = [each for each in leftovers if str(path / each.name) not in paths]
    has_any = steps or leftovers or any(each.format and each.path == str(path) for each in foreign)
    return Contents(
        root=root,
        latest=steps[-1].step if steps else None,
        pointer=_pointer(storage),
        steps=steps,
        uncommitted=leftovers,
        runs=[] if has_any else [_run(each) for each in find_runs(path)],
        foreign=foreign,
    )


def _of_file(path: Path) -> Contents:
    """What one file is: a checkpoint in another format."""
    foreign = _describe_foreign([path])
    if not foreign:
        raise ConfigError(unknown(Location.of(path)))
    return Contents(root=shown(path), foreign=foreign)


def _find_foreign(root: Path) -> list[Foreign]:
    """Checkpoints in other formats: the directory itself, or what is in it."""
    itself = _describe_foreign([root])
    if any(each.format for each in itself):
        return itself
    # Also where it cannot be known, because of one folder in it: the others are listed.
    inside = sorted(path for path in root.iterdir() if not path.name.startswith("."))
    lines = _describe_foreign(
        path for path in inside[:_MAX_FOREIGN] if os.path.isdir(path) or os.path.isfile(path)
    )
    return lines or itself


def _describe_foreign(paths: Iterable[Path]) -> list[Foreign]:
    """Return a line of the list for each path in a known format; only metadata are read.

    Also for one of which that cannot be known.
    """
    lines = []
    for path in paths:
        title = ""
        try:
            location = Location.of(path)
            known = detect_format(location)
            if known is None:
                continue
            title = known.title
            catalog = known.describe(location)
        except HoldfastError as error:
            if os.path.lexists(path):  # else it was removed just now
                is_damaged = not (isinstance(error, ConfigError) or is_unknown(error))
                lines.append(
                    Foreign(path=str(path), format=title, problem=str(error), is_damaged=is_damaged)
                )
            continue
        lines.append(
            Foreign(
                path=str(path),
                format=catalog.format,
                step=catalog.step,
                num_tensors=len(catalog.tensors),
                nbytes=catalog.nbytes,
            )
        )
    return lines


def _survey(storage: Storage) -> tuple[Sequence[str], list[Step], Collection[str]]:
    """The names in the root, and its steps: from notes where the storage keeps them.

    And the names that are left of saves that were committed.
    """
    survey = getattr(storage, "survey", None)
    if survey is None:
        names = storage.list("")
        read = [_read_step(storage, step) for step in list_steps(storage)]
        return names, [step for step in read if step is not None], ()
    shows = survey()
    steps: dict[int, Step | None] = {}
    for name, files in shows.files.items():
        step = parse_step_dir(name)
        if step is not None and MANIFEST in files:
            summary = read_summary(shows.notes.get(name, ""), step=step)
            steps[step] = _read_step(storage, step) if summary is None else _line(summary)
    for name in shows.unread:
        if (step := parse_step_dir(name)) is not None:
            steps[step] = _read_step(storage, step)
    good = (steps[step] for step in sorted(steps))
    return shows.names, [step for step in good if step is not None], shows.moved


def _read_step(storage: Storage, step: int) -> Step | None:
    """A step from its manifest, which may be damaged; None if it was removed just now."""
    try:
        # The line is about the step: a path would take the room of its numbers.
        manifest = read_manifest(storage, step_dir(step), place=MANIFEST)[1]
        return _line(Summary.of(manifest))
    except HoldfastError as error:
        match state_of(storage, step, error):
            case "removed":
                return None
            case "unreadable":
                return Step(step=step, problem=str(error))
        return Step(step=step, damage=str(error))


def _line(summary: Summary) -> Step:
    """Return what one line of the list shows of a good checkpoint."""
    return Step(
        step=summary.step,
        created=summary.created,
        num_tensors=summary.num_tensors,
        nbytes=summary.nbytes,
        stored_nbytes=summary.stored_nbytes,
        num_files=summary.num_files,
        layouts=tuple(layout_in_words(layout) for layout in summary.layouts),
        metadata=summary.metadata,
    )


def _run(path: Path) -> Run:
    """Return what one line of the list of runs shows."""
    try:
        steps = list_steps(PosixStorage(path))
    except HoldfastError as error:
        return Run(path=str(path), problem=str(error))
    return Run(path=str(path), num_steps=len(steps), latest=steps[-1] if steps else None)


def _leftovers(
    root: str | Path,
    storage: Storage,
    names: Sequence[str],
    committed: set[int],
    moved: Collection[str],
) -> list[Uncommitted]:
    """Directories of saves and removals that are not checkpoints."""
    leftovers = []
    for name in names:
        saving, step = parse_saving_dir(name), parse_step_dir(name)
        if saving is not None:
            what = "a save in progress, or one that was not finished"
            if name in moved:
                what = "left of a save that was committed; `holdfast repair` removes it"
            leftovers.append(Uncommitted(name=name, step=saving[0], what=what))
        elif name.startswith((".trash-", ".old-")):
            leftovers.append(
                Uncommitted(name=name, step=None, what="being removed, or left from it")
            )
        elif step is not None and step not in committed and storage.exists(name):
            is_link = os.path.islink(os.path.join(root, name))
            what = f"has the name of a step, but {'is a link' if is_link else f'no {MANIFEST}'}"
            leftovers.append(Uncommitted(name=name, step=step, what=what))
    return leftovers


def _pointer(storage: Storage) -> int | None:
    """Return the step of the pointer file; None if the file is missing or unreadable."""
    try:
        text = read_at_most(storage, LATEST, 64).decode().strip()
    except (HoldfastError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _print_foreign(foreign: list[Foreign]) -> None:
    """The list of checkpoints in other formats."""
    console = make_console()
    table = Listing(
        [("path", "cyan"), ("format", ""), ("step", "right"), ("tensors", "right"),
         ("size", "right"), ("", "red")]
    )  # fmt: skip
    for each in foreign:
        step = str(each.step) if each.step else ""
        is_good = each.problem is None
        table.add_row(
            each.path, each.format, step, f"{each.num_tensors:,}" if is_good else "",
            in_bytes(each.nbytes) if is_good else "", each.problem or "",
        )  # fmt: skip
    console.print(table)


def _print_runs(root: str, runs: list[Run]) -> None:
    """The list of a directory that holds runs."""
    console = make_console()
    console.print(
        f"{root} holds {counted(len(runs), 'run')} and no checkpoint of its own:", soft_wrap=True
    )
    table = Listing([("run", "cyan"), ("steps", "right"), ("latest", "right"), ("", "red")])
    for run in runs:
        latest = "" if run.latest is None else f"{run.latest}"
        table.add_row(run.path, f"{run.num_steps}", latest, run.problem or "")
    console.print(table)
    console.print(f"`holdfast ls {runs[0].path}` lists the steps of one", soft_wrap=True)


def _print(contents: Contents) -> None:
    """The list of a directory that holds checkpoints."""
    console, steps = make_console(), contents.steps
    if steps:
        columns = [
            ("step", "right"), ("", "green"), ("created (UTC)", ""), ("tensors", "right"),
            ("size", "right"), ("files", "right"), ("layout", ""),
        ]  # fmt: skip
        has_metadata = any(step.metadata for step in steps)
        table = Listing([*columns, ("metadata", "")] if has_metadata else columns)
        for step in steps:
            mark = "latest" if step is steps[-1] else ""
            if (why := step.damage or step.problem) is not None:
                word = "unreadable" if step.damage is None else "damaged"
                table.add_row(f"{step.step}", word, "", "", "", "", why, style="red")
                continue
            table.add_row(
                f"{step.step}", mark, when(step.created), f"{step.num_tensors:,}",
                in_bytes(step.stored_nbytes), f"{step.num_files}", "; ".join(step.layouts),
                *([metadata_in_words(step.metadata)] if has_metadata else []),
            )  # fmt: skip
        console.print(table)
    else:
        console.print(f"no committed checkpoint in {contents.root}", soft_wrap=True)
    pointer, latest = contents.pointer, contents.latest
    if pointer is not None and pointer != latest:
        console.print(f"{LATEST} says {pointer}; the newest committed step is {latest}")
    if contents.uncommitted:
        console.print("uncommitted:")
        for leftover in contents.uncommitted:
            console.print(f"  {leftover.name}  {leftover.what}", style="dim")

"""Which steps of a run exist, under which tags, and which were removed where its log knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from holdfast.cli.page.html import Column, Html, element, esc, paragraph, table
from holdfast.cli.page.run_events import RunLog
from holdfast.cli.page.timeline import in_seconds, save_seconds
from holdfast.cli.support.messages import moment, when
from holdfast.cli.support.steps import StepState, state_of
from holdfast.errors import HoldfastError, in_bytes
from holdfast.format.names import list_steps, parse_saving_dir, step_dir
from holdfast.format.versions import read_manifest
from holdfast.retention.tags import list_tags
from holdfast.storage import Storage

_MAX_MANIFESTS = 200
"""Manifests that are read; of older steps only the number is shown."""
_MAX_LISTED = 1000


@dataclass(slots=True, kw_only=True)
class StepHistory:
    """What is known of one step."""

    step: int
    state: StepState | Literal["kept", "not finished"]
    saved: str = ""
    nbytes: int | None = None
    stored_nbytes: int | None = None
    num_files: int | None = None
    tags: list[str] = field(default_factory=list)
    num_saves: int = 0
    """Number of times the log has it; more than once if the run was set back."""
    seconds: float | None = None
    """What the slowest rank waited for its last save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All steps that are known, newest first; `problem`: why tags could not be read."""

    steps: list[StepHistory]
    problem: str = ""


def read_history(storage: Storage, log: RunLog) -> History:
    """The steps below a directory of checkpoints, and those that its log had.

    Cost: reads the newest 200 manifests.
    """
    committed = list_steps(storage)
    steps = {step: StepHistory(step=step, state="kept") for step in committed}
    for step in committed[-_MAX_MANIFESTS:]:
        _read(storage, steps[step])
    for name in storage.list(""):
        saving = parse_saving_dir(name)
        if saving is not None and saving[0] not in steps:
            steps[saving[0]] = StepHistory(step=saving[0], state="not finished")
    for save in log.saves:
        known = steps.setdefault(save.step, StepHistory(step=save.step, state="removed"))
        known.num_saves += 1
        known.seconds = save_seconds(save)
        if known.state == "removed":
            known.nbytes = sum(rank.nbytes for rank in save.ranks)
            known.saved = moment(save.began)
    problem = ""
    try:
        for tag, step in list_tags(storage).items():
            gone = StepHistory(step=step, state="removed")
            steps.setdefault(step, gone).tags.append(tag)
    except HoldfastError as error:
        problem = f"Tags cannot be read: {error}"
    return History(steps=[steps[step] for step in sorted(steps, reverse=True)], problem=problem)


def _read(storage: Storage, entry: StepHistory) -> None:
    """Add what the manifest of a step says; it may be damaged, or removed just now."""
    try:
        _, manifest = read_manifest(storage, step_dir(entry.step))
    except HoldfastError as error:
        entry.state = state_of(storage, entry.step, error)
        return
    entry.saved = when(manifest.created)
    entry.nbytes, entry.stored_nbytes = manifest.totals.nbytes, manifest.totals.stored_nbytes
    entry.num_files = len(manifest.files)


def history_section(history: History, *, shown_step: int, has_log: bool) -> Html:
    """The table of steps."""
    if not history.steps:
        return paragraph("This checkpoint lies alone: no directory of a run was named.")
    columns = [
        Column(heading="Step", is_number=True),
        Column(heading="State"),
        Column(heading="Saved (UTC)"),
        Column(heading="Size", is_number=True),
        Column(heading="Files", is_number=True),
        Column(heading="Tags"),
        Column(heading="Ranks waited", is_number=True),
    ]
    rows = [_row(entry, shown_step) for entry in history.steps[:_MAX_LISTED]]
    num_kept = sum(entry.state == "kept" for entry in history.steps)
    num_gone = sum(entry.state == "removed" for entry in history.steps)
    caption = f"Steps of this run: {num_kept:,} kept, {num_gone:,} known to be removed"
    parts = [table(caption, columns, rows, id_="steps")]
    if len(rows) < len(history.steps):
        parts.append(paragraph(f"The newest {len(rows):,} of {len(history.steps):,} are listed."))
    if not has_log:
        parts.append(
            paragraph("Steps that were removed are known only from a run's log, and none is here.")
        )
    if history.problem:
        parts.append(paragraph(history.problem))
    return Html("".join(parts))


def _row(entry: StepHistory, shown_step: int) -> list[Html]:
    """One step."""
    size = "-"
    if entry.nbytes is not None:
        extra = (entry.stored_nbytes or entry.nbytes) - entry.nbytes
        size = in_bytes(entry.nbytes) + (f" + {in_bytes(extra)} copies" if extra > 0 else "")
    again = f", saved {entry.num_saves} times" if entry.num_saves > 1 else ""
    state = f"{entry.state}{again}{', shown here' if entry.step == shown_step else ''}"
    return [
        esc(entry.step),
        element("span", esc(state), class_=f"state {entry.state.split()[0]}"),
        esc(entry.saved or "-"),
        esc(size),
        esc("-" if entry.num_files is None else entry.num_files),
        esc(", ".join(entry.tags) or "-"),
        esc("-" if entry.seconds is None else in_seconds(entry.seconds)),
    ]

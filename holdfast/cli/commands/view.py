"""`holdfast view PATH`: a checkpoint and its run as one HTML page that needs no network.

Torch is imported only to plan the reads of a load, by the functions that a load uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from holdfast.cli.page.build import MARK, PageData, build_page
from holdfast.cli.page.heat_map import HeatMap
from holdfast.cli.page.history import History, read_history
from holdfast.cli.page.run_events import RunEvent, RunLog, read_run_log
from holdfast.cli.support.arguments import POSITIONAL
from holdfast.cli.support.holders import SavedPlacement
from holdfast.cli.support.relayout import (
    Requests,
    parse_layout,
    relaid_requests,
    saved_requests,
)
from holdfast.cli.support.steps import OpenCheckpoint, open_checkpoint
from holdfast.errors import ConfigError, clean, in_bytes
from holdfast.format.manifest import FileInfo
from holdfast.format.names import parse_step_dir
from holdfast.format.rank_events import LoadEvent
from holdfast.storage import PosixStorage, is_url, open_storage
from holdfast.storage.places import as_url, check_local

_MAX_LOADS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """Write one HTML page about a checkpoint: tensors and how they are cut, which rank reads which
    file, how long saves took, which steps exist."""

    path: Annotated[Path, POSITIONAL]
    """A checkpoint, or a directory of checkpoints or its URL (then the newest committed step); also
    one in a foreign format."""

    out: Path = Path("holdfast-view.html")
    """The file to write; one that is not such a page is not overwritten."""

    step: int | None = None
    """Which step of a directory of checkpoints."""

    as_: str | None = None
    """Plan a load under another layout, too: sizes of axes, such as tp=4,dp=2."""


def run(args: Args) -> int:
    """Write the page; 1 when the checkpoint is damaged."""
    _check_out(args.out)
    with open_checkpoint(args.path, step=args.step) as opened:
        page = _page(opened, args)
    data = page.encode("utf-8")
    PosixStorage(args.out.parent).replace_file(args.out.name, data)
    print(f"{clean(str(args.out))}: {in_bytes(len(data))}, open it in a browser")
    return 0


def _check_out(out: Path) -> None:
    """Refuse a bucket, and to overwrite what is not a page; ConfigError."""
    check_local(out, what="the page")
    try:
        with out.open("rb") as file:
            head = file.read(len(MARK))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error
    if head and head != MARK.encode():
        raise ConfigError(
            f"--out {out} exists and is not a page of `holdfast view`; name another file"
        )


def _page(opened: OpenCheckpoint, args: Args) -> str:
    """The page of an open checkpoint and of the run that it belongs to."""
    snapshot = opened.snapshot
    saved = SavedPlacement(snapshot.manifest, snapshot.index)
    log, history = _run_of(opened, args.path)
    requests = [saved_requests(saved)]
    if args.as_ is not None:
        layout = saved.layouts[0] if saved.layouts else None
        requests.append(relaid_requests(saved, parse_layout(args.as_, saved=layout)))
    planned = list(_planned(opened, requests))
    return build_page(
        PageData(
            label=opened.label,
            saved=saved,
            heat_maps=[*_real_loads(log, saved.manifest.files), *planned],
            planned_nbytes=int(planned[0].nbytes.sum()),
            history=history,
            log=log,
        )
    )


def _run_of(opened: OpenCheckpoint, path: Path) -> tuple[RunLog, History]:
    """Return the log and the steps of the run that a checkpoint belongs to.

    A bucket keeps no log; other programs keep neither log nor steps that are ours.
    """
    if opened.foreign:
        return RunLog(), History(steps=[])
    if is_url(path):
        url = as_url(path).rstrip("/")
        above, _, name = url.rpartition("/")
        root = above if parse_step_dir(name) is not None else url
        return RunLog(), read_history(open_storage(root), RunLog())
    real = path.resolve()
    directory = real.parent if parse_step_dir(real.name) is not None else real
    log = read_run_log(directory)
    return log, read_history(PosixStorage(directory), log)


def _planned(opened: OpenCheckpoint, requests: list[Requests]) -> Iterator[HeatMap]:
    """Return what loads under the saved and other layouts would read."""
    from holdfast.checkpoint.load.forecast import forecast_reads

    files = opened.snapshot.manifest.files
    for number, each in enumerate(requests):
        how = "the saved layout" if number == 0 else "another layout"
        notes = [
            "Planned by the functions of a load, for ranks of one host or without an exchange: "
            "each rank reads for itself what it requests.",
            *each.notes,
        ]
        yield HeatMap(
            title=f"Planned load under {how}: {each.title}",
            ranks=each.ranks,
            files=[file.name for file in files],
            # Ranks of another layout are other processes: no file is theirs.
            writers=[file.writer if number == 0 else -1 for file in files],
            nbytes=forecast_reads(opened.snapshot, each.tables, ranks=each.ranks),
            notes=notes,
        )


def _real_loads(log: RunLog, files: list[FileInfo]) -> Iterator[HeatMap]:
    """Return what the newest loads of the run's log read."""
    writers = {file.name: file.writer for file in files}
    for load in log.loads[::-1][:_MAX_LOADS]:
        names = sorted({name for rank in load.ranks for name in rank.nbytes_by_file})
        nbytes = np.array(
            [[rank.nbytes_by_file.get(name, 0) for name in names] for rank in load.ranks],
            dtype=np.int64,
        ).reshape(len(load.ranks), len(names))
        axes = " ".join(f"{a}={n}" for a, n in load.axes.items() if n > 1 and a != "expt_tp")
        yield HeatMap(
            title=f"Real load of step {load.step} on {axes or 'one rank'}",
            ranks=[rank.rank for rank in load.ranks],
            files=names,
            writers=[writers.get(name, -1) for name in names],
            nbytes=nbytes,
            notes=[_what_it_cost(load)],
        )


def _what_it_cost(load: RunEvent[LoadEvent]) -> str:
    """Opens, bytes from other ranks and the time of a load."""
    received = sum(rank.nbytes_received for rank in load.ranks)
    return (
        f"From the log of the run: {load.path}, {sum(r.num_opens for r in load.ranks):,} opens of "
        f"data files, {in_bytes(received)} received from other ranks, "
        f"{max(r.seconds for r in load.ranks):.3g} s."
    )

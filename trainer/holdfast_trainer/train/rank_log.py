"""What each rank did in a save or a load, as JSON lines in the run's own directory.

`DIR/events/00003.jsonl` is of rank 3; `holdfast view DIR` draws it. Every rank appends to a file of
its own, so that a line costs no communication and no two ranks write to one file. Lines have the
form of those of `--jsonl`, which one rank writes and which has the steps, too.
"""

from __future__ import annotations

import logging
from pathlib import Path

from holdfast.checkpoint import LoadReport, SaveReport
from holdfast.parallel import Layout
from holdfast_trainer.train.config import RANK_LOG_DIR
from holdfast_trainer.train.metrics import event_line


class RankLog:
    """Appends a line for each save and load of one rank.

    A line that cannot be written is reported once and then left out: a full disk must not end one
    rank of a run between two collectives.
    """

    def __init__(self, directory: Path | None, *, layout: Layout, rank: int) -> None:
        """Note where to write; the file is made with its first line.

        Args:
            directory: of `--save`; None for a run that logs nothing.
            layout: of the run; its sizes are in each line.
            rank: this rank.
        """
        self._path = None if directory is None else directory / RANK_LOG_DIR / f"{rank:05d}.jsonl"
        axes = ("tp", "cp", "ep", "dp", "pp", "expt_tp")
        self._common = {"rank": rank, "axes": {axis: layout.size(axis) for axis in axes}}

    def save(self, report: SaveReport, *, began: float) -> None:
        """Append a committed save.

        Args:
            report: of this rank.
            began: seconds since 1970, when the rank called for it.
        """
        values = {
            "step": report.step,
            "path": report.path,
            "began": round(began, 6),
            "nbytes": report.nbytes,
            "total_nbytes": report.total_nbytes,
            "planned": report.planned,
            "phases": {name: round(value, 6) for name, value in report.seconds.items()},
        }
        self._append("save", values)

    def load(self, report: LoadReport, *, began: float) -> None:
        """Append a finished load; arguments as those of `save`."""
        values = {
            "step": report.step,
            "path": report.path,
            "began": round(began, 6),
            "seconds": round(report.seconds, 6),
            "nbytes_needed": report.nbytes_needed,
            "nbytes_read": report.nbytes_read,
            "nbytes_received": report.nbytes_received,
            "num_opens": report.num_opens,
            "nbytes_by_file": dict(report.nbytes_by_file),
        }
        self._append("load", values)

    def _append(self, name: str, values: dict[str, object]) -> None:
        """One line, in one write."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(event_line(name, {**self._common, **values}))
        except OSError as error:
            logging.getLogger("holdfast").warning(
                "%s: cannot be written (%s): what this rank saves and loads is not logged any more",
                self._path,
                error.strerror,
            )
            self._path = None

"""Log what each rank did in a save or a load, next to the checkpoints; `holdfast view` draws it.

Every rank appends to its own file, so that a line costs no communication and no two ranks
write to one file.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from holdfast.checkpoint.reports import LoadReport, SaveReport
from holdfast.errors import ConfigError
from holdfast.format.names import rank_log_file
from holdfast.format.rank_events import LoadEvent, SaveEvent, encode_event
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import SIZED_AXES
from holdfast.storage import is_url
from holdfast.storage.places import as_url


class RankLog:
    """Append a line for each save and load of one rank.

    A line that cannot be written is reported once, and the log ends there: a full disk must not end
    one rank of a run between two collectives.
    """

    def __init__(self, directory: str | Path | None, *, groups: ProcessGroups) -> None:
        """Keep the path; the file is created with its first line.

        Args:
            directory: of the run's checkpoints; None logs nothing.
            groups: of the run; their rank and the sizes of their layout's axes are in each line.

        Raises:
            ConfigError: it is a URL: an object cannot grow line by line.
        """
        if directory is not None and is_url(directory):
            raise ConfigError(
                f"the rank log needs a directory, not {as_url(directory)}: an object cannot grow "
                f"line by line"
            )
        self._path = None if directory is None else Path(directory) / rank_log_file(groups.rank)
        self._rank = groups.rank
        # Also of a layout without an expert view, which has no groups of `ep` and `expt_tp`.
        self._axes = {axis: getattr(groups.layout, axis) for axis in SIZED_AXES}

    def save(self, report: SaveReport, *, began: float) -> None:
        """Append a committed save.

        Args:
            report: of this rank.
            began: seconds since 1970, when the rank called for it.
        """
        self._append(
            SaveEvent(
                rank=self._rank,
                axes=self._axes,
                step=report.step,
                path=report.path,
                began=round(began, 6),
                time=round(time.time(), 3),
                nbytes=report.nbytes,
                total_nbytes=report.total_nbytes,
                planned=report.planned,
                phases={name: round(value, 6) for name, value in report.seconds.items()},
                starts={name: round(value, 6) for name, value in report.starts.items()},
            )
        )

    def load(self, report: LoadReport, *, began: float) -> None:
        """Append a finished load; arguments as those of `save`."""
        self._append(
            LoadEvent(
                rank=self._rank,
                axes=self._axes,
                step=report.step,
                path=report.path,
                began=round(began, 6),
                time=round(time.time(), 3),
                seconds=round(report.seconds, 6),
                nbytes_needed=report.nbytes_needed,
                nbytes_read=report.nbytes_read,
                nbytes_received=report.nbytes_received,
                num_opens=report.num_opens,
                nbytes_by_file=dict(report.nbytes_by_file),
            )
        )

    def _append(self, event: SaveEvent | LoadEvent) -> None:
        """One line, in one write; a disk that takes only a part of it raises an OSError."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(encode_event(event))
        except OSError as error:
            logging.getLogger("holdfast").warning(
                "%s: cannot be written (%s): the saves and loads of this rank are no longer logged",
                self._path,
                error.strerror,
            )
            self._path = None

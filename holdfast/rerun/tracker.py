"""The file of rejected steps, by which a step that was bad twice is skipped."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.errors import CorruptionError, StorageError
from holdfast.rerun.lines import append_line

_BEGINNING = '{"rank": '


class Tracker:
    """A text file with one JSON object a line: `{"rank": 3, "step": 1200, "job": "5f0c…"}`.

    A step that one and the same rank has rejected in two jobs is to be skipped: the data of the
    step is bad wherever it runs. Several ranks that reject it in one job share one cause, which may
    have been a fault.

    Args:
        path: the file; made by the first record. One process writes it.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is read or written yet."""
        self.path = path

    def record(self, rank: int, step: int, job: str) -> None:
        """Add that a rank has rejected a value of a step, durably.

        Args:
            rank: global rank.
            step: of the value.
            job: an id of the run of the program; other ones for other starts.

        Raises:
            StorageError: the file cannot be written.
        """
        try:
            append_line(self.path, json.dumps({"rank": rank, "step": step, "job": job}))
        except OSError as error:
            raise StorageError(
                f"the tracker file {self.path} cannot be written ({error.strerror}); name one that "
                f"can"
            ) from error

    def steps_to_skip(self) -> frozenset[int]:
        """The steps that one rank has rejected in two or more jobs.

        Raises:
            StorageError: the file is there and cannot be read.
            CorruptionError: a line before the last is no record; the message names it.
        """
        try:
            lines = self.path.read_bytes().decode(errors="replace").split("\n")
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise StorageError(
                f"the tracker file {self.path} cannot be read ({error.strerror})"
            ) from error
        jobs: dict[tuple[int, int], set[str]] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = _parse(line)
            if record is not None:
                rank, step, job = record
                jobs.setdefault((rank, step), set()).add(job)
            elif (
                not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)) or line[-1] == "}"
            ):
                # A beginning without an end is what a dying process leaves; all else is no tracker.
                raise CorruptionError(
                    f"line {number} of the tracker file {self.path} is no record of a rejected "
                    f"step: {line[:80]!r}; remove the line, or name another file"
                )
        return frozenset(step for (_, step), seen in jobs.items() if len(seen) > 1)


def _parse(line: str) -> tuple[int, int, str] | None:
    """Rank, step and job of a line; None where it is no record."""
    try:
        record = json.loads(line)
        rank, step, job = record["rank"], record["step"], record["job"]
    except (ValueError, KeyError, TypeError):
        return None
    is_record = type(rank) is int and type(step) is int and isinstance(job, str)
    return (rank, step, job) if is_record else None

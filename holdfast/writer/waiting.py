"""How the ranks that do not commit learn from storage how a save ended."""

from __future__ import annotations

import time

from holdfast.errors import DeadlineError, StorageError
from holdfast.format.names import MANIFEST, step_dir
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.writer.failure import read_failure
from holdfast.writer.records import DONE_DIR, FAILED_FILE, WriteJob

_FIRST_PAUSE_S = 0.002
_SHORT_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def wait_for_commit(storage: Storage, job: WriteJob, deadline: float) -> None:
    """Wait until the committer has committed this save, or recorded its failure, and raise that.

    Cost: one listing of a small directory a look, and more only towards the end.
    """
    final = step_dir(job.header.step)
    began = time.monotonic()
    while True:
        names = _names_in(storage, job.directory)
        # While the records are there and the manifest is not, nothing is committed.
        if names is None or MANIFEST in names or DONE_DIR not in names:
            if save_id_of(storage, final) == job.header.save_id:
                return
            if names is None:
                raise StorageError(
                    f"{storage.describe(job.directory)} is gone and step {job.header.step} was not "
                    f"committed: the save was discarded"
                )
        if FAILED_FILE in (names or ()):
            raise read_failure(storage, f"{job.directory}/{FAILED_FILE}")
        now = time.monotonic()
        if now > deadline:
            raise DeadlineError(
                f"save of step {job.header.step}: no commit within {job.deadline_s:.0f} s (phase: "
                f"commit); the committing rank's writer may be gone"
            )
        time.sleep(min(pause_s(now - began), max(deadline - now, 0.0)))


def _names_in(storage: Storage, directory: str) -> list[str] | None:
    """The names in a directory; None where it is gone."""
    try:
        return storage.list(directory)
    except StorageError:
        if storage.exists(directory):
            raise
        return None


def pause_s(waited_s: float) -> float:
    """How long to wait for the next look at storage.

    A fifth of what was waited so far, up to a tenth of a second: what comes as usual is seen with
    little delay. What has not come for long is looked at every two seconds in the end, since all
    ranks may be looking.
    """
    short = min(_FIRST_PAUSE_S + waited_s / 5, _SHORT_PAUSE_S)
    return min(max(short, waited_s / 50), _LONGEST_PAUSE_S)

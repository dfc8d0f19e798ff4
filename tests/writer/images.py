"""Keepers as tests see them: their processes, and what they offer."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from holdfast import Checkpointer, LoadReport, PosixStorage
from holdfast.format.names import step_dir
from holdfast.format.versions import read_manifest
from holdfast.writer.kept_images import KeptImages
from holdfast.writer.kept_images import _offered as all_offered
from tests.harness import wait_until

KEEP_S = 120.0
"""Longer than any test: a keeper that is gone was ended by something else."""


def processes_of(root: Path) -> list[int]:
    """Writers and keepers of a root, or of one below it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"holdfast.writer.process" in words:
                place = Path(os.fsdecode(words[-2]))
                if root in (place, *place.parents):
                    found.append(int(path.parent.name))
    return found


def end_processes_of(root: Path, number: signal.Signals = signal.SIGTERM) -> None:
    """End the keepers of a root; return when they are gone."""
    for pid in processes_of(root):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    wait_until(lambda: not processes_of(root))


def addresses(root: Path, step: int) -> list[str]:
    """The addresses of the images of a checkpoint, one for each data file."""
    data, manifest = read_manifest(PosixStorage(root), step_dir(step))
    return [KeptImages(data).address(info.name) for info in manifest.files]


def is_offered(root: Path, step: int) -> bool:
    """Return True if the images of all data files are offered."""
    return set(addresses(root, step)) <= set(all_offered())


class CountingStorage(PosixStorage):
    """Counts the bytes of data files that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, observer=self._see)
        self.nbytes_read = 0

    def _see(self, operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "read" and "data/" in path:
            self.nbytes_read += nbytes


def load(root: Path, state: dict[str, object], *, step: int | None = None) -> LoadReport:
    """Load as a restart does, by a checkpointer that takes images; its counts are the storage's."""
    storage = CountingStorage(root)
    checkpointer = Checkpointer(storage, settle_s=0.0, keep_image_s=KEEP_S)
    report = checkpointer.load(state, step=step)
    assert report.nbytes_read == storage.nbytes_read
    return report

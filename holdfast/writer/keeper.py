"""The keeper: what a writer process becomes when its trainer has gone, to keep a staged image.

A save goes past the page cache, so a restart right after it would read the disk. The bytes are
still in memory, in the staging buffer that the writer has mapped. In this order, the keeper

1. takes the image of the newest checkpoint of the root, if that is one of its trainer's;
2. seals its memory. That succeeds only if no process can write to it any more, and none can from
   then on: the trainer is gone, and so is everything that could still copy there;
3. proves the image, sealed, against the *committed* checkpoint: header and every block, as a
   verifier does a file. So a buffer into which the next save had begun to be staged is given up;
4. offers it, until its time is over, a newer checkpoint is committed, memory is short, someone asks
   for the memory, or a signal ends it.

It is forked from the writer process, which ends as ever: nobody who waits for the trainer, its
writer or their pipes waits for the keeper.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress

from holdfast.errors import HoldfastError
from holdfast.format.checkpoint_files import CheckpointFiles
from holdfast.format.names import latest_step, step_dir
from holdfast.format.verifier import verify_source
from holdfast.format.versions import save_id_of
from holdfast.storage import Storage
from holdfast.storage.host_memory import available_memory_nbytes, total_memory_nbytes
from holdfast.writer.kept_images import ANSWER_S, END, TAKE, KeptImages, is_own
from holdfast.writer.records import KeepImage
from holdfast.writer.sealed_image import SealedImage, open_for_reading, seal_memory

TRAINERS_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""By which a terminal, a launcher or a scheduler ends a trainer, or warns it of the end of its job.
Slurm and Grid Engine send them to every process of a job, whatever its session."""
_TURN_S = 0.5
"""Seconds between two looks at the clock and the memory."""
_MAX_LOOK_S = 8.0
"""Most seconds between two looks at the root: first `_TURN_S`, then each time twice as long."""
_SEAL_TURN_S = 0.01
"""The first pause between two tries to seal; each is twice as long, up to `_TURN_S`."""
_LEAST_AVAILABLE = 0.05
"""Fraction of the memory that stays available to others, or the image is given up."""
_BACKLOG = 128


def keep_newest(storage: Storage, images: Mapping[int, KeepImage]) -> None:
    """Keep the image of the newest checkpoint, if it is one of these; return when that is over.

    Never raises for a storage or an image that is not as it should be: then nothing is kept.

    Args:
        storage: The root.
        images: By a descriptor of the memory that may write, as sealing needs it. They are closed.

    Cost: one pass over the image for the proof and one copy into huge pages; while it is kept, its
    memory, a look at the memory twice a second and a listing of the root every eight.
    """
    with suppress(HoldfastError, OSError):
        newest = [fd for fd, image in images.items() if _is_newest(storage, image)]
        for fd in images:
            if fd not in newest:
                os.close(fd)
        for fd in newest:
            _keep(storage, fd, images[fd])


def _is_newest(storage: Storage, image: KeepImage) -> bool:
    """Return True if the save of an image is committed, and no newer step and version is."""
    directory = step_dir(image.step)
    return latest_step(storage) == image.step and save_id_of(storage, directory) == image.save_id


def _keep(storage: Storage, fd: int, image: KeepImage) -> None:
    """Seal, prove and offer one image, as long as nothing ends it."""
    end = KeepersEnd(storage, image)
    # The kernel tears a killed trainer down in no particular order: wait for its mapping to go.
    pause_s = _SEAL_TURN_S
    while not seal_memory(fd):
        if end.has_come():
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _TURN_S)
    reader = open_for_reading(fd)
    os.close(fd)
    sealed = SealedImage(reader, nbytes=image.nbytes, place=f"image of {image.file}")
    with (
        closing(sealed),
        CheckpointFiles.open(storage, step_dir(image.step), prove=False) as files,
    ):
        # Before the proof, which then is of the very pages that are offered.
        sealed.collapse()
        if verify_source(files, image.file, sealed):
            return
        # The manifest that it was proven against names it, whatever has its name by now.
        address = KeptImages(files.records.manifest).address(image.file)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen(_BACKLOG)
        _offer(server, reader, end)


def _offer(server: socket.socket, reader: int, end: KeepersEnd) -> None:
    """Send the image to who asks for it, until the end has come."""
    server.settimeout(_TURN_S)
    while not end.has_come():
        try:
            peer, _ = server.accept()
        except TimeoutError:
            continue
        with peer, suppress(OSError):
            peer.settimeout(ANSWER_S)
            if not is_own(peer):
                continue
            request = peer.recv(1)
            if request == TAKE:
                socket.send_fds(peer, [TAKE], [reader])
            elif request == END:
                os.close(reader)  # the last of it: the memory is free before the stream ends
                return


class KeepersEnd:
    """When a keeper has to give its image up.

    Attributes:
        why: The reason, once it has come.
    """

    def __init__(self, storage: Storage, image: KeepImage) -> None:
        self._storage = storage
        self._image = image
        now = time.monotonic()
        self._over = now + image.keep_s
        self._turn = now
        self._look_s = _TURN_S
        self._look = now + self._look_s
        self.why = ""

    def has_come(self) -> bool:
        """Return True if the image must be given up; cheap to call often.

        Raises:
            StorageError: The root is gone.
        """
        now = time.monotonic()
        if now >= self._over:
            self.why = "its time is over"
        elif now >= self._turn:
            self._turn = now + _TURN_S
            if available_memory_nbytes() < _LEAST_AVAILABLE * total_memory_nbytes():
                self.why = "memory is short"
        if not self.why and now >= self._look:
            self._look_s = min(2 * self._look_s, _MAX_LOOK_S)
            self._look = now + self._look_s
            if not _is_newest(self._storage, self._image):
                self.why = "its checkpoint is not the newest any more"
        return bool(self.why)


def become_keeper() -> None:
    """Leave everything of the trainer's behind, in a process that was just forked.

    The streams lead to the trainer's pipes and terminal: a launcher waits until all of their
    holders are gone. Signals end it now, and the kernel ends it first where memory runs out.
    """
    for number in TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")

"""Find the images that keepers of this host offer, and take one.

A keeper listens on a socket in the abstract namespace: no file of it is left, and the name goes
with its process. The name is that of the *content*: a digest of the whole manifest, which states
step, save id, files and the digest of every digest, and the file's name. So a reader asks for the
bytes of one version of one checkpoint, and no other step, save or root can answer to it. A copy of
a root has the same manifest, hence the same bytes.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing, suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.format.digest import digest128
from holdfast.writer.sealed_image import SealedImage, can_seal

TAKE, END = b"t", b"e"
"""Requests to a keeper: send the image; give it up and end."""
ANSWER_S = 5.0
"""Seconds that either side of a socket waits for the other."""

_PREFIX = "holdfast-image"
_CREDENTIALS = struct.Struct("3i")


class KeptImages:
    """The images of one version of a checkpoint that are kept on this host.

    Args:
        manifest: Its bytes.
    """

    def __init__(self, manifest: bytes) -> None:
        self._version = digest128(manifest)

    def address(self, file: str) -> str:
        """Return the name of the socket at which the image of a data file is offered."""
        content = digest128(f"{self._version} {file}".encode())
        return f"\0{_PREFIX}/{os.geteuid()}/{content}"

    def take(self, file: str, *, nbytes: int) -> SealedImage | None:
        """Return the image of a data file; None if none is kept here.

        Args:
            file: Its name in the manifest.
            nbytes: Its size there.

        Raises:
            StorageError: One is offered and cannot be used; the message says why.

        Cost: one connection; refused at once if nobody listens, else up to `ANSWER_S`.
        """
        if not can_seal():
            return None
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
            peer.settimeout(ANSWER_S)
            try:
                peer.connect(self.address(file))
            except OSError:
                return None
            try:
                if not is_own(peer):
                    raise StorageError("it is offered by another user")
                peer.sendall(TAKE)
                _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            except ConnectionError:
                return None  # its keeper has ended meanwhile
            except OSError as error:
                raise StorageError(f"its keeper does not answer: {error}") from error
        if not descriptors:
            return None
        try:
            return SealedImage(descriptors[0], nbytes=nbytes, place=f"image of {file}")
        finally:
            os.close(descriptors[0])


def is_own(peer: socket.socket) -> bool:
    """Return True if the process at the other end is of this user."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


def end_keepers() -> bool:
    """Have all keepers of this user on this host give their images up; True if there was one.

    Returns when their memory is free. Cost: `ANSWER_S` for a keeper that does not answer.
    """
    if not can_seal():
        return False
    addresses = _offered()
    for address in addresses:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
            peer.settimeout(ANSWER_S)
            with suppress(OSError):
                peer.connect(address)
                if is_own(peer):
                    peer.sendall(END)
                    peer.recv(1)  # the end of the stream, after the memory is freed
    return bool(addresses)


def _offered() -> list[str]:
    """Return the addresses at which keepers of this user listen, each once."""
    prefix = f"@{_PREFIX}/{os.geteuid()}/"
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    names = {line.rpartition(" ")[2] for line in lines}
    return [f"\0{name[1:]}" for name in sorted(names) if name.startswith(prefix)]

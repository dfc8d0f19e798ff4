"""A command line on a real terminal: a pseudo-terminal of a chosen width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def on_terminal(
    command: Sequence[str], *, width: int, env: Mapping[str, str], cwd: Path
) -> tuple[int, str]:
    """Exit code and all output of a command whose standard streams are a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env), cwd=cwd,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        result = b""
        while True:
            try:
                more = os.read(ours, 1 << 16)
            except OSError:  # the last one on the other side has closed it
                break
            if not more:
                break
            result += more
        os.close(ours)
    return process.returncode, result.decode().replace("\r\n", "\n")

"""Files of one JSON object a line that outlive the process that writes them."""

from __future__ import annotations

import os
from pathlib import Path


def append_line(path: Path, line: str) -> None:
    """Add a line, durably; the file and its directories are made if they are not there.

    What a dying process has left half written stays a line of its own.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode(errors="backslashreplace") + b"\n")
        file.flush()
        os.fsync(file.fileno())

"""Runs a printed program as `torchrun` does, in processes that have imported torch already."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.harness import RankContext, run_ranks


def launch(
    program: str,
    *words: object,
    num_ranks: int,
    directory: Path,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run the text of a program on so many ranks; what each rank printed.

    Args:
        program: executed as `__main__`.
        words: its command line.
        num_ranks: processes.
        directory: the working directory.
        env: variables that the server of ranks may be too old to have.
    """
    line = [str(word) for word in words]
    # A program leaves its process as it likes: with connections, and with torch's hooks.
    arguments = program, line, str(directory), free_port()
    return run_ranks(num_ranks, run_program, *arguments, init=False, fresh=True, env=env).outputs


def free_port() -> int:
    """Where the ranks of a program may meet.

    Below the ports that systems give to connections: one of those could go to another process
    before the program listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def launched(context: RankContext, port: int) -> dict[str, str]:
    """What a launcher puts into the environment of a process."""
    return {
        "RANK": str(context.rank),
        "LOCAL_RANK": str(context.rank),
        "WORLD_SIZE": str(context.num_ranks),
        "LOCAL_WORLD_SIZE": str(context.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_program(
    context: RankContext, program: str, words: list[str], directory: str, port: int
) -> None:
    """Be one rank of a program."""
    os.environ |= launched(context, port)
    os.chdir(directory)
    sys.argv = ["program", *words]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})

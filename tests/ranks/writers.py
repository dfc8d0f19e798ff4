"""Writer processes of live ranks: forked from a process that has imported what a writer imports.

A writer is a new interpreter to its users. It is ready after 0.17 s of CPU time, which is more than
most saves of tests take, and a test of four ranks with three checkpointers starts twelve. Ranks
that serve once (`fresh`) and the tests' own processes start writers as users do. A forked one, too,
is torch-free, has its own session and nothing of the trainer but its socket and standard output.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

_NBYTES = 1 << 17
"""Of a request: the environment is most of it."""
_ARGUMENTS = [sys.executable, "-m", "holdfast.writer.process"]


class WriterForks:
    """Stands for the module `subprocess` where the library starts a writer."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self) -> None:
        self.are_used = False
        """Whether this process is a live rank."""
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # It ends with the last process that has the other end.
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def Popen(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        **named: Any,
    ) -> subprocess.Popen[bytes] | ForkedWriter:
        """Start a writer."""
        if not self.are_used:
            return subprocess.Popen(arguments, env=env, pass_fds=pass_fds, **named)
        assert list(arguments[:3]) == _ARGUMENTS, arguments
        assert named == {"start_new_session": True, "stdin": self.DEVNULL, "cwd": "/"}, named
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([arguments[4], dict(env)]).encode()
            descriptors = [theirs.fileno(), pass_fds[0], 1, 2]
            socket.send_fds(self._server, [request], descriptors)
        return ForkedWriter(ours)


class ForkedWriter:
    """What the library uses of a `Popen`; the writer is a child of the server."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self.pid = int(server.recv(32))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, if it has."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float) -> int:
        """Return how it ended; TimeoutExpired if it has not."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(_ARGUMENTS, timeout)
            self.returncode = int(self._server.recv(32))
            self._server.close()
        return self.returncode


def install() -> None:
    """Have the library start writers by a new `WriterForks`."""
    from holdfast.writer import client

    vars(client)["subprocess"] = WriterForks()


def use() -> None:
    """From now on, fork the writers of this process."""
    from holdfast.writer import client

    forks = vars(client)["subprocess"]
    if isinstance(forks, WriterForks):
        forks.are_used = True


def serve(requests: socket.socket) -> None:
    """Fork a writer for each request, and report how it ended, until no rank is left."""
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        watched: list[socket.socket | int] = [requests, *running]
        for ready in select.select(watched, [], [])[0]:
            if isinstance(ready, int):
                pid, rank = running.pop(ready)
                _report(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                rank.close()
                os.close(ready)
                continue
            request, descriptors, _, _ = socket.recv_fds(requests, _NBYTES, 4)
            if not request:
                return
            reply, connection, *outputs = descriptors
            if (pid := os.fork()) == 0:
                _become_writer(request, connection, outputs)
            for descriptor in (connection, *outputs):
                os.close(descriptor)
            rank = socket.socket(fileno=reply)
            running[os.pidfd_open(pid)] = pid, rank
            _report(rank, pid)


def _report(rank: socket.socket, number: int) -> None:
    try:
        rank.send(str(number).encode())
    except OSError:  # the rank has gone, or dropped what it would have asked
        return


def _become_writer(request: bytes, connection: int, outputs: list[int]) -> None:
    """Run as `python -m holdfast.writer.process` would; never return."""
    code = 1
    try:
        root, environment = json.loads(request)
        os.setsid()
        os.chdir("/")
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
        # As after an exec: only the socket is kept, and under a number of its own.
        kept = os.dup2(connection, 3, inheritable=True)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        from holdfast.writer import process

        code = process.main([str(kept), root])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main(descriptor: int) -> None:
    import holdfast.writer.process  # noqa: F401

    assert "torch" not in sys.modules
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _main(int(sys.argv[1]))

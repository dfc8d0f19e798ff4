"""Runs printed programs in processes that have imported a framework already.

Importing one takes seconds of CPU time. A server imports it once, and forks for every rank; a rank
that is killed takes nothing else with it. The server itself is forked from where live ranks are,
which has imported torch and Holdfast.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.programs import free_port
from tests.ranks.pool import fork

ROOT = Path(__file__).parents[2]
TITAN_PYTHON = ROOT / ".venv-titan" / "bin" / "python"
"""The environment that `make test-integrations` makes: torchtitan wants much that we do not."""
_OF_EVERY_PROGRAM = (
    "encodings.idna",  # of an address's lookup
    "numpy.ma",  # of torch's checks of a device mesh
    "torch._dynamo",  # of an optimizer's first step
    "torch.distributed.checkpoint",
    "torch.profiler._cupti_monitor",  # of a profiler's step
    "holdfast.checkpoint.checkpointer",
    "holdfast.optim",
)
"""What programs import only when they run: half of what a start costs, where it is not here."""

_IMPORT_S = 200.0
"""How long a server may take to import what it has."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    """Its exit code, or minus the signal that killed it."""
    output: str


class ForkServer:
    """Forks ranks from a process that has imported `modules`.

    Args:
        modules: their names. Where the first one's package is not installed, the test is skipped.
        python: that of another environment than this one.
    """

    def __init__(self, *modules: str, python: Path = Path(sys.executable)) -> None:
        # Not imported here: that takes seconds of each worker's time, and the server does it, too.
        package = modules[0].split(".")[0]
        if importlib.util.find_spec(package) is None:
            import pytest  # the server itself has no use for it

            pytest.skip(f"{package} is not installed")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        }
        if python == Path(sys.executable):
            self._pipe, process = fork(serve, modules, environment, environment=environment)
            self._join: Callable[[float], object] = process.join
        else:
            self._pipe, theirs = Pipe()
            with theirs:
                self._join = subprocess.Popen(
                    [str(python), "-m", __name__, str(theirs.fileno()), *modules],
                    pass_fds=[theirs.fileno()],
                    cwd=ROOT,
                    env=environment,
                ).wait
        assert self._pipe.poll(_IMPORT_S), f"{modules}: not imported in time"
        try:
            self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{modules}: not imported") from None

    def run(
        self,
        program: str,
        *words: object,
        directory: Path,
        num_ranks: int = 1,
        prelude: str = "",
        timeout_s: float = 200,
    ) -> list[Ended]:
        """Run a program on so many ranks, in a working directory.

        Args:
            program: executed as `__main__`.
            words: its command line.
            prelude: executed before it, in a namespace of its own; it has `rank`.
        """
        with tempfile.TemporaryDirectory() as logs:
            request = {
                "program": program,
                "prelude": prelude,
                "words": [str(word) for word in words],
                "directory": str(directory),
                "num_ranks": num_ranks,
                "port": free_port(),
                "logs": logs,
                "timeout_s": timeout_s,
            }
            self._pipe.send(request)
            codes = self._pipe.recv()
            return [
                Ended(code, Path(logs, str(rank)).read_text(errors="replace"))
                for rank, code in enumerate(codes)
            ]

    def lines(self, program: str, *words: object, **named: Any) -> list[str]:
        """Run a program that must end well; the last line of each rank."""
        ends = self.run(program, *words, **named)
        for end in ends:
            assert end.code == 0, end.output[-4000:]
        return [end.output.rstrip().rsplit("\n", 1)[-1] for end in ends]

    def lines_after_kill(
        self, program: str, root: Path, *words: object, kill: str, num_ranks: int
    ) -> list[str]:
        """Run a program that the prelude `kill` ends by SIGKILL, and again without it.

        Args:
            program: its command line is the root, and `words`.
            root: of its checkpoints; it runs in the directory above.
        """
        named: dict[str, Any] = {"directory": root.parent, "num_ranks": num_ranks}
        ends = self.run(program, root, *words, prelude=kill, **named)
        assert -9 in {end.code for end in ends}, ends[0].output[-2000:]
        return self.lines(program, root, *words, **named)

    def close(self) -> None:
        """End the server."""
        self._pipe.close()
        self._join(30)


def _be_rank(request: dict[str, Any], rank: int) -> None:
    """Be one rank of a program, in a child; never returns."""
    code = 1
    try:
        log = os.open(f"{request['logs']}/{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if request["num_ranks"] > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(request["num_ranks"]),
                "LOCAL_WORLD_SIZE": str(request["num_ranks"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(request["port"]),
            }
        os.chdir(request["directory"])
        # The server may have inherited another one, whose workers would not know the program.
        multiprocessing.set_start_method(None, force=True)
        multiprocessing.current_process().name = "MainProcess"  # as that of a program
        sys.argv = ["program", *request["words"]]
        exec(compile(request["prelude"], "prelude", "exec"), {"rank": rank})
        # Not this file: what a program spawns would run it, and import torch with it.
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(request["program"], "program", "exec"), vars(program))
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for child in multiprocessing.active_children():
            child.kill()  # as an exit does, which this is not: Megatron's writers would stay
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait for children, and kill those that are late or whose neighbours failed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        failed = any(codes.values())
        if failed:  # as a launcher does
            deadline = min(deadline, time.monotonic() + 2)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def serve(pipe: Connection, modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Serve requests until the other end of the pipe is closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    for name in (*modules, *_OF_EVERY_PROGRAM):
        importlib.import_module(name)
    # A rank's collector then leaves these objects alone, and does not copy their pages.
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv()
            pids = []
            for rank in range(request["num_ranks"]):
                pid = os.fork()
                if pid == 0:
                    _be_rank(request, rank)
                pids.append(pid)
            pipe.send(_wait(pids, request["timeout_s"]))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2:], dict(os.environ))

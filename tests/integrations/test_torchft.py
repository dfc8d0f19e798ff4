"""torchft: a replica that died is replaced, and a job that ended goes on with any number."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.forks import ROOT
from tests.integrations.pages import program_of
from tests.programs import free_port

PROGRAM = program_of("torchft", "torchft")
BIN = ROOT / ".venv-torchft" / "bin"
"""The environment that `make test-integrations` makes."""
KILL = """
        if manager.current_step() == 3 and replica == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def lighthouse(num_replicas: int) -> Iterator[str]:
    """The address of a lighthouse that waits for so many replicas."""
    port = free_port()
    words = ["--bind", f"127.0.0.1:{port}", "--min_replicas", str(num_replicas)]
    words += ["--join_timeout_ms", "300"]
    process = subprocess.Popen([BIN / "torchft_lighthouse", *words], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def start(
    program: str, address: str, root: Path, replica: int, *, steps: int, num_replicas: int
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start one replica, as `torchrun` does.

    Returns:
        Its process, and the file of its output.
    """
    path = root.parent / f"{root.name}-{replica}.py"
    path.write_text(program)
    own = {"TORCHFT_LIGHTHOUSE": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["-m", "torch.distributed.run", "--nproc-per-node=1", f"--master-port={free_port()}"]
    output = path.with_name(f"{path.stem}-{address.rsplit(':', 1)[1]}-{words[-1][-5:]}.log")
    with output.open("wb") as log:
        process = subprocess.Popen(
            [BIN / "python", *words, path, root, str(replica), str(steps), str(num_replicas)],
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
        )
    return process, output


def lines_of(started: tuple[subprocess.Popen[bytes], Path]) -> list[str]:
    """What a replica prints of its own, when it has ended."""
    process, output = started
    try:
        process.wait(300)
    finally:
        process.kill()
    text = output.read_text(errors="replace")
    lines = re.findall(r"replica \d (?:starts|ends) at .*", text)
    assert lines, text[-3000:]
    return lines


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not BIN.exists(), reason="torchft is not installed: make test-integrations")
def test_a_replaced_replica_goes_on_and_so_does_another_number_of_them(tmp_path: Path) -> None:
    """X25: bitwise by as many replicas; by one, with the weights that two had."""
    killed = "import os, signal\n" + PROGRAM.replace(
        "        optimizer.step()\n", "        optimizer.step()\n" + KILL.lstrip("\n")
    )
    with lighthouse(2) as address:

        def begin(name: str, replica: int, program: str = PROGRAM) -> Any:
            return start(program, address, tmp_path / name, replica, steps=6, num_replicas=2)

        straight = [begin("a", replica) for replica in range(2)]
        ends = [line for each in straight for line in lines_of(each)[1:]]
        assert [line.split(",")[0] for line in ends] == [f"replica {i} ends at 6" for i in range(2)]
        first, second = begin("b", 0), begin("b", 1, killed)
        assert len(lines_of(second)) == 1
        again = lines_of(begin("b", 1))
        assert re.match(r"replica 1 starts at [23],", again[0])
        assert [*lines_of(first)[1:], *again[1:]] == ends
    with lighthouse(1) as address:
        alone = lines_of(start(PROGRAM, address, tmp_path / "b", 0, steps=7, num_replicas=1))
    weights = ends[0].partition("weights ")[2]
    assert alone[0] == f"replica 0 starts at 6, weights {weights}"
    assert alone[1].startswith("replica 0 ends at 7")

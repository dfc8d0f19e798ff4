"""Ray Train: a worker that died is replaced, and all go on; also by another number of workers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integrations.forks import ROOT
from tests.integrations.pages import program_of

PROGRAM = program_of("ray", "ray")
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
"""The environment that `make test-integrations` makes: half a gigabyte that nothing else needs."""

KILL = """
            if step == 3 and rank == 1 and not os.path.exists(config["root"] + ".killed"):
                open(config["root"] + ".killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def lines_of(program: str, root: Path, *, num_workers: int, steps: int) -> set[str]:
    """What the workers print, each line once."""
    path = root.parent / f"{root.name}-{num_workers}-{steps}.py"
    path.write_text(program)
    own = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        ended = subprocess.run(
            [PYTHON, path, root, str(num_workers), str(steps)],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        # On a busy machine Ray gives up, before the program has begun.
        if "node timed out during startup" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return set(re.findall(r"rank \d (?:starts|ends) at .*", ended.stdout + ended.stderr))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="Ray is not installed: make test-integrations")
def test_a_replaced_worker_goes_on_and_so_does_another_number_of_them(tmp_path: Path) -> None:
    """X23: bitwise by as many workers; by one, with the weights that two had."""
    killed = "import os, signal\n" + PROGRAM.replace(
        "            checkpointer.save_async(step, state)  # holdfast\n",
        "            checkpointer.save_async(step, state)  # holdfast\n" + KILL.lstrip("\n"),
    )
    straight = lines_of(PROGRAM, tmp_path / "a", num_workers=2, steps=6)
    ends = {line for line in straight if "ends at 6" in line}
    assert len(ends) == 2
    resumed = lines_of(killed, tmp_path / "b", num_workers=2, steps=6)
    assert (tmp_path / "b.killed").exists()
    starts = {int(line.split()[4].rstrip(",")) for line in resumed if "starts" in line}
    assert 0 in starts
    assert starts & {2, 3}, resumed
    assert ends == {line for line in resumed if "ends" in line}
    alone = lines_of(PROGRAM, tmp_path / "b", num_workers=1, steps=7)
    weights = next(iter(ends)).partition("weights ")[2]
    assert f"rank 0 starts at 6, weights {weights}" in alone
    assert any("ends at 7" in line for line in alone)

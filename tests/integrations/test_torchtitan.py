"""torchtitan: its real containers and loader under a manager of ours, killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integrations.forks import ROOT, ForkServer
from tests.integrations.kills import KILL_AT_ADAMW, check_twenty_kills
from tests.integrations.pages import lines_to_change, program_of

PROGRAM = program_of("torchtitan", "torchtitan")
STEPS = 8
PYTHON = ROOT / ".venv-titan" / "bin" / "python"
"""The environment that `make test-integrations` makes: torchtitan wants much that we do not."""

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="torchtitan is not installed: make test-integrations"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("torch.distributed.fsdp", "holdfast.integrations.torchtitan", python=PYTHON)
    yield server
    server.close()


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("torchtitan") / "straight"
    return server.lines(PROGRAM, root, STEPS, directory=root.parent, num_ranks=2)


def killed_and_resumed(server: ForkServer, root: Path, at: int) -> list[str]:
    """What two ranks print that are killed once, and started again."""
    kill = KILL_AT_ADAMW.format(at=at, rank=at % 2)
    return server.lines_after_kill(PROGRAM, root, STEPS, kill=kill, num_ranks=2)


def test_the_page_counts_its_lines() -> None:
    assert len(lines_to_change(PROGRAM)) == 2


@pytest.mark.parametrize("at", [4, 7])
def test_killed_and_resumed_bitwise(
    server: ForkServer, straight: list[str], tmp_path: Path, at: int
) -> None:
    assert killed_and_resumed(server, tmp_path / "run", at) == straight


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_twenty_random_steps(
    server: ForkServer, straight: list[str], tmp_path: Path
) -> None:
    resumed = partial(killed_and_resumed, server)
    check_twenty_kills(resumed, straight, tmp_path / "run", first=2, stop=STEPS)


OTHERS = """
manager.load()
manager.close()
full = [p.full_tensor() for p in model.parameters()]
moments = [optimizers.optimizers[0].state[p]["exp_avg"].full_tensor() for p in model.parameters()]
print(f"step {progress.step}, {sum(p.double().abs().sum().item() for p in (*full, *moments)):.12g}")
"""


def test_another_number_of_ranks_by_value(server: ForkServer, tmp_path: Path) -> None:
    """Model, optimizer and train state; torchtitan refuses another number of its loaders itself."""
    root = tmp_path / "run"
    server.lines(PROGRAM, root, STEPS, directory=tmp_path, num_ranks=2)
    start = PROGRAM[: PROGRAM.index("manager.load()")]
    start = start.replace(
        'async_mode="async"', 'async_mode="async", exclude_from_loading=["dataloader"]'
    )
    lines = [
        server.lines(start + OTHERS, root, STEPS, directory=tmp_path, num_ranks=2)[0],
        server.lines(start + OTHERS, root, STEPS, directory=tmp_path, prelude=ALONE)[0],
    ]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"step {STEPS}, ")


ALONE = """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""


def test_retention_is_keep_latest_k_and_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    few = PROGRAM.replace("interval=2", "interval=1, keep_latest_k=2")
    server.lines(few, tmp_path / "run", STEPS, directory=tmp_path, num_ranks=2)
    steps = sorted(each.name for each in (tmp_path / "run").glob("iter_*"))
    assert steps == [f"iter_{step:07d}" for step in (STEPS - 1, STEPS)]
    remote = PROGRAM.replace("folder=folder", 'folder="s3://bucket/run"')
    ends = server.run(remote, tmp_path, 1, directory=tmp_path, prelude=ALONE)
    assert "does not support a remote checkpoint.folder" in ends[0].output

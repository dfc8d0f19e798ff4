"""The guide's program runs as printed: on four ranks, resumed, and resumed on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


def launch(script: Path, num_ranks: int, root: Path, steps: int) -> dict[str, str]:
    """Run the program under torchrun; each rank's last words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(num_ranks), str(script), str(root), str(steps)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    # Ranks share one pipe: a line end may come after another rank's words.
    return dict(re.findall(r"(rank \d+): (step \d+, loss \d+\.\d{9})", done.stdout))


def written(name: str, path: Path) -> Path:
    """The guide's program of that name, as a file."""
    program = re.search(rf"guide: {name} -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) < 40
    path.write_text(program[1])
    return path


@pytest.mark.slow
def test_the_guide_trains_resumes_and_changes_layout(tmp_path: Path) -> None:
    script = written("begin", tmp_path / "train.py")
    straight = launch(script, 4, tmp_path / "a", 10)
    assert len(straight) == 4
    assert all(words.startswith("step 10, ") for words in straight.values())
    launch(script, 4, tmp_path / "b", 5)
    assert launch(script, 4, tmp_path / "b", 10) == straight
    launch(script, 4, tmp_path / "c", 5)
    other = launch(script, 2, tmp_path / "c", 10)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(other["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_whole_and_sharded_optimizers_go_on_from_each_other(tmp_path: Path) -> None:
    whole = written("begin", tmp_path / "train.py")
    sharded = written("sharded begin", tmp_path / "sharded.py")
    straight = launch(whole, 4, tmp_path / "a", 15)
    launch(whole, 4, tmp_path / "b", 5)
    launch(sharded, 4, tmp_path / "b", 10)
    mixed = launch(whole, 2, tmp_path / "b", 15)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(mixed["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)

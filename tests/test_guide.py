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
    return dict(re.findall(r"^(rank \d+): (.*)$", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_the_guide_trains_resumes_and_changes_layout(tmp_path: Path) -> None:
    program = re.search(r"guide: begin -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) < 40
    script = tmp_path / "train.py"
    script.write_text(program[1])
    straight = launch(script, 4, tmp_path / "a", 10)
    assert len(straight) == 4
    assert all(words.startswith("step 10, ") for words in straight.values())
    launch(script, 4, tmp_path / "b", 5)
    assert launch(script, 4, tmp_path / "b", 10) == straight
    launch(script, 4, tmp_path / "c", 5)
    other = launch(script, 2, tmp_path / "c", 10)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(other["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)

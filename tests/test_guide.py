"""The guide's programs run as printed: on four ranks, resumed, and resumed on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"


def last_words(text: str) -> dict[str, str]:
    """What each rank prints at its end; ranks may share one pipe, and one may interrupt another."""
    return dict(re.findall(r"(rank \d+): (step \d+, loss \d+\.\d{9})", text))


def launch(program: str, num_ranks: int, root: Path, steps: int) -> dict[str, str]:
    """Run the program; each rank's last words."""
    outputs = programs.launch(program, root, steps, num_ranks=num_ranks, directory=root.parent)
    return last_words("".join(outputs))


def printed(name: str) -> str:
    """The guide's program of that name."""
    program = re.search(rf"guide: {name} -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert program is not None
    assert len([line for line in program[1].splitlines() if line.strip()]) < 40
    return program[1]


@pytest.mark.slow
def test_the_guide_trains_resumes_and_changes_layout(tmp_path: Path) -> None:
    program = printed("begin")
    straight = launch(program, 4, tmp_path / "a", 10)
    assert len(straight) == 4
    assert all(words.startswith("step 10, ") for words in straight.values())
    launch(program, 4, tmp_path / "b", 5)
    assert launch(program, 4, tmp_path / "b", 10) == straight
    launch(program, 4, tmp_path / "c", 5)
    other = launch(program, 2, tmp_path / "c", 10)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(other["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)


README = Path(__file__).parent.parent / "README.md"
IN_THE_README = """
import sys, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
total_steps = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""
ONE_STEP = """
            print("rank", groups.rank, "makes", progress["step"], end=";", flush=True)
            model(torch.randn(2, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
"""


def test_what_the_readme_prints_goes_on_where_it_was(tmp_path: Path) -> None:
    block = re.search(r"## In your own loop\n\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    program, places = re.subn(r"\n +\.\.\. +# one step.*\n", ONE_STEP, block[1])
    assert places == 1  # the other one is the model, which is made here beforehand
    for stop, steps in ((2, ["0", "1"]), (4, ["2", "3"])):
        outputs = programs.launch(IN_THE_README + program, stop, num_ranks=2, directory=tmp_path)
        for rank in range(2):
            assert re.findall(rf"rank {rank} makes (\d+);", "".join(outputs)) == steps


@pytest.mark.slow
def test_whole_and_sharded_optimizers_go_on_from_each_other(tmp_path: Path) -> None:
    whole, sharded = printed("begin"), printed("sharded begin")
    straight = launch(whole, 4, tmp_path / "a", 15)
    launch(whole, 4, tmp_path / "b", 5)
    launch(sharded, 4, tmp_path / "b", 10)
    mixed = launch(whole, 2, tmp_path / "b", 15)
    loss = float(straight["rank 0"].split("loss ")[1])
    assert float(mixed["rank 0"].split("loss ")[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_torchrun_runs_the_guide_as_it_is_printed(tmp_path: Path) -> None:
    """The command in the guide, in processes of torchrun; it does what the tests' ranks do."""
    script = tmp_path / "train.py"
    script.write_text(printed("begin"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "4", str(script), str(tmp_path / "a"), "10"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert last_words(done.stdout) == launch(script.read_text(), 4, tmp_path / "b", 10)

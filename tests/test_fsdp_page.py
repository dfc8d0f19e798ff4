"""The program on docs/fsdp.md runs, and another layout loads what it saved."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import nn

from holdfast import Checkpointer
from tests.harness import RankContext, run_ranks

PAGE = Path(__file__).parent.parent / "docs" / "fsdp.md"


def program() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def run_program(context: RankContext, directory: str) -> tuple[float, int]:
    """The norm of the last step, and how many elements of the first matrix this rank has."""
    del context
    os.chdir(directory)
    names: dict[str, object] = {"__name__": "program"}
    exec(compile(program(), str(PAGE), "exec"), names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    weight = model.get_parameter("0.up.weight")
    return names["outcome"].norm, weight.to_local().numel()  # type: ignore[attr-defined, operator]


def test_the_program_runs_and_one_process_loads_its_checkpoint(tmp_path: Path) -> None:
    results = run_ranks(2, run_program, str(tmp_path)).results
    assert results[0] == results[1]
    norm, num_local = results[0]
    assert norm > 0
    assert num_local == 64 * 16 // 2
    layers = [nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}) for _ in range(2)]
    bare = nn.Sequential(*layers, nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter.fill_(torch.nan)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.load({"model": bare}).step == 3
    assert not any(parameter.isnan().any() for parameter in bare.parameters())

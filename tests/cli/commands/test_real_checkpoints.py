"""The tools on checkpoints of a real training state."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import holdfast as library
from holdfast.arrays.boxes import Box
from holdfast.format.fingerprint import combine, fingerprint_box
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast
from tests.format.fingerprints import snapshot_fingerprints


def test_a_run_is_compared_exported_and_pruned(holdfast: Holdfast, tmp_path: Path) -> None:
    root = tmp_path / "run"
    tensors = train(root, num_steps=4)
    one, four = root / step_dir(1), root / step_dir(4)
    assert holdfast("diff", one, one).code == 0
    found = holdfast("diff", one, four, "--json").json
    differing = {item["key"]: item for item in found["tensors"]}
    assert set(differing) >= {"model.weight", "model.bias"}
    difference = tensors[4].double() - tensors[1].double()
    assert differing["model.weight"]["num_differing"] == int((tensors[4] != tensors[1]).sum())
    assert abs(differing["model.weight"]["norm"] - float(difference.norm())) < 1e-9
    assert "progress.step" in [item["path"] for item in found["values"]]
    to = tmp_path / "weights.safetensors"
    assert holdfast("export", root, "--step", 2, "--tensor", "model.*", "--to", to).code == 0
    assert torch.equal(load_file(to)["model.weight"], tensors[2])
    assert holdfast("tag", root, 2, "dear").code == 0
    result = holdfast("prune", root, "--keep-best", "progress.loss:min", "--keep-tagged", "--yes")
    assert result.code == 0
    assert "best 1 by progress.loss (1)" in result.out
    left = [item["step"] for item in holdfast("ls", root, "--json").json["steps"]]
    assert left == [2, 3, 4]


def test_the_fingerprint_in_memory_is_that_of_the_stored_tensor(tmp_path: Path) -> None:
    tensors = train(tmp_path, num_steps=1)
    with Snapshot.open(PosixStorage(tmp_path), step_dir(1)) as snapshot:
        stored = snapshot_fingerprints(snapshot, ["model.weight"])
    weight = tensors[1]
    shape = tuple(weight.shape)
    share = fingerprint_box(
        memoryview(weight.numpy().view("u1").ravel()),
        dtype="F32", shape=shape, box=Box((0, 0), shape),
    )  # fmt: skip
    assert stored == {"model.weight": combine([share], dtype="F32", shape=shape)}


def train(root: Path, *, num_steps: int) -> dict[int, torch.Tensor]:
    """Some steps with a checkpoint after each; the loss is least at step 3. Weights by step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weights = {}
    with library.Checkpointer(root) as checkpointer:
        for step in range(1, num_steps + 1):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            progress = {"step": step, "loss": 1.0 + abs(step - 3)}
            state = {
                "model": model,
                "optimizer": library.OptimizerState(optimizer, model),
                "progress": progress,
            }
            checkpointer.save(step, state)
            weights[step] = model.weight.detach().clone()
    return weights

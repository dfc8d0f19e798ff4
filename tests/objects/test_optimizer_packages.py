"""Optimizers of packages that people use, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, OptimizerState
from tests.objects.optimizers import assert_kept, net, parts, stored, train


def test_fabrics_optimizers_are_seen_through(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)

    def make(model: nn.Module) -> Any:
        return fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))

    assert_kept(tmp_path, net, make)
    own = stored(tmp_path, 1)["optimizer"]
    assert set(own) == {"state", "groups", "membership", "parameters"}
    plain = net(5)
    optimizer = torch.optim.AdamW(plain.parameters())
    Checkpointer(tmp_path).load(parts(plain, optimizer), step=1)
    assert len(optimizer.state) == 5


def test_accelerates_optimizers_are_seen_through(tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)

    def make(model: nn.Module) -> Any:
        return accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    assert_kept(tmp_path, net, make)
    assert set(stored(tmp_path, 1)["optimizer"]) == {"state", "groups", "membership", "parameters"}


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdEMAMix8bit", "SGD8bit", "AdamW32bit"])
def test_eight_bit_optimizers_are_kept(tmp_path: Path, name: str) -> None:
    kind = getattr(pytest.importorskip("bitsandbytes").optim, name)
    options: dict[str, Any] = {"lr": 0.01, "min_8bit_size": 8}
    if name.startswith("SGD"):
        options["momentum"] = 0.9

    def wide(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))

    assert_kept(tmp_path, wide, lambda model: kind(model.parameters(), **options))
    if "8bit" in name:
        state = stored(tmp_path, 1)["optimizer"]["state"]["0.weight"]
        (nested,) = (value for value in state.values() if isinstance(value, dict))
        assert nested["state1"].dtype is torch.uint8


def test_an_eight_bit_optimizer_goes_back(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = net(0)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=8)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"optimizer": OptimizerState(optimizer, model)})
    train(model, optimizer, range(2))
    checkpointer.load({"optimizer": OptimizerState(optimizer, model)})
    assert not optimizer.state

"""Modules as other libraries make them; each test needs its library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast import (
    Checkpointer,
    FromPart,
    MismatchError,
    ModuleState,
    OptimizerState,
    Stored,
)
from holdfast.cli.main import main
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from tests.objects.modules import Fused, randomise


def keys(checkpointer: Checkpointer, step: int) -> set[str]:
    with Snapshot.open(checkpointer.storage, step_dir(step)) as snapshot:
        return {info.key for info in snapshot.manifest.tensors}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return optimizer


def agrees(module: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> None:
    """A wrapped model and the bare one save under the same names and load each other."""
    bare = net()
    kept = stepped(bare)
    checkpointer = Checkpointer(root)
    checkpointer.save(1, {"model": bare, "optimizer": OptimizerState(kept, bare)})
    state = {"model": module, "optimizer": OptimizerState(optimizer, module)}
    checkpointer.load(state)
    checkpointer.save(2, state)
    assert keys(checkpointer, 1) == keys(checkpointer, 2)
    assert not any("_forward_module" in key or "_orig" in key for key in keys(checkpointer, 2))
    for mine, theirs in zip(module.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert main(["diff", f"{root}/iter_0000001", f"{root}/iter_0000002"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_lightning_fabric(compiled: bool, tmp_path: Path) -> None:
    fabric_module = pytest.importorskip("lightning_fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    module, optimizer = fabric.setup(
        torch.compile(net(), backend="eager") if compiled else net(),
        torch.optim.AdamW([nn.Parameter(torch.ones(1))]),
        move_to_device=False,
    )
    assert type(module).__name__ == "_FabricModule"
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.3)
    agrees(module, optimizer, tmp_path)


def test_fabric_by_its_name_alone(tmp_path: Path) -> None:
    """Recognised without the library: a class of its name in a package of its name."""

    def init(self: nn.Module, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._forward_module = nn.DataParallel(module)
        self._original_module = module

    body = {
        "__module__": "lightning.fabric.wrappers",
        "__init__": init,
        "forward": lambda self, x: self._original_module(x),
        "state_dict": lambda self, *a, **k: self._original_module.state_dict(*a, **k),
        "load_state_dict": lambda self, *a, **k: self._original_module.load_state_dict(*a, **k),
    }
    module = type("_FabricModule", (nn.Module,), body)(net())
    agrees(module, stepped(module), tmp_path)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    module = accelerator.prepare(net())
    agrees(module, stepped(module), tmp_path)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_linear4bit(kind: str, nested: bool, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layer = bnb.nn.Linear4bit(64, 64, quant_type=kind, compress_statistics=nested)
        return nn.Sequential(layer, nn.Linear(64, 4)).to("cpu")

    true, twin = make(1), make(2)
    x = torch.linspace(-1, 1, 128).reshape(2, 64)
    assert not torch.equal(true(x), twin(x))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": true})
    assert "model.0.weight.absmax" in keys(checkpointer, 1)
    checkpointer.load({"model": twin})
    assert torch.equal(true(x), twin(x))
    checkpointer.save(2, {"model": twin})
    assert main(["diff", f"{tmp_path}/iter_0000001", f"{tmp_path}/iter_0000002"]) == 0
    checkpointer.save(3, {"model": ModuleState(twin, only="trainable")})
    assert keys(checkpointer, 3) == {"model.0.bias", "model.1.weight", "model.1.bias"}
    plain = nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type=kind), nn.Linear(64, 4))
    with pytest.raises(MismatchError, match=r"model\.0\.weight"):
        checkpointer.load({"model": plain}, step=1)


def test_loads_in_inference_mode_leave_tensors_that_can_be_trained(tmp_path: Path) -> None:
    """O1: also what a load makes new; and a model that was made in inference mode is loaded."""
    source, twin = net(), net()
    checkpointer = Checkpointer(tmp_path)
    with torch.inference_mode():
        checkpointer.save(0, {"model": source})
    optimizer = stepped(source)
    state = {"model": source, "optimizer": OptimizerState(optimizer, source)}
    checkpointer.save(1, {**state, "tensor": torch.ones(2)})
    fresh = torch.optim.AdamW(twin.parameters(), lr=0.01)
    with torch.inference_mode():
        kept = OptimizerState(fresh, twin)
        report = checkpointer.load({"model": twin, "optimizer": kept, "tensor": Stored()})
        assert torch.is_inference_mode_enabled()
        served, fused, made = net(), Fused(), Fused()
        randomise(fused, 1)
        randomise(made, 2)
        checkpointer.load({"model": served}, step=0)
        checkpointer.load({"model": served.bfloat16()}, step=1, cast=True)
        checkpointer.save(2, {"model": fused})
        checkpointer.load({"model": made}, step=2)
    assert not report.values["tensor"].is_inference()
    assert not any(value.is_inference() for value in fresh.state[next(twin.parameters())].values())
    for each, its in ((source, optimizer), (twin, fresh)):
        its.zero_grad()
        each(torch.ones(3, 4)).sum().backward()
        its.step()
    assert all(map(torch.equal, source.parameters(), twin.parameters()))
    assert torch.equal(made.wqkv, fused.wqkv)


def test_an_averaged_model_is_a_module_like_any(tmp_path: Path) -> None:
    """O1: its count and its buffers, also after averages and weights were swapped in place."""
    model, twin = net(), net()
    average, other = (AveragedModel(each, use_buffers=True) for each in (model, twin))
    stepped(model)
    average.update_parameters(model)
    stepped(model)
    average.update_parameters(model)
    for one, two in zip(model.parameters(), average.parameters(), strict=True):
        one.data, two.data = two.data, one.data
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model, "average": average})
    checkpointer.load({"model": twin, "average": other})
    assert int(other.n_averaged) == 2
    for ours, theirs in ((twin, model), (other, average)):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    bare = net()
    checkpointer.load({"model": FromPart("average.module", bare)})
    assert all(map(torch.equal, bare.parameters(), average.module.parameters()))

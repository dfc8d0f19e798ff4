"""Gradients in `.grad` as a part of the state: saves between two microbatches (I3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast import (
    Checkpointer,
    ConfigError,
    Gradients,
    HoldfastError,
    Layout,
    MismatchError,
    OptimizerState,
    ProcessGroups,
    declare_padding,
)
from holdfast.state.stored import StoredPart
from tests.harness import RankContext, run_ranks

ROWS = 6
"""Real ones; with padding 8."""


class Net(nn.Module):
    """A padded table that is split over tp, a plain parameter, one that nothing uses."""

    def __init__(self, groups: ProcessGroups, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        table = torch.randn(8, 4)
        table[ROWS:] = 0
        mesh = groups.mesh("tp")
        self.table = nn.Parameter(distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None))
        self.gain = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(3))
        declare_padding(self, "table", (ROWS, 4))

    def forward(self, row: int) -> Tensor:
        whole = self.table.redistribute(placements=[Replicate()]).to_local()
        return (whole[row] * self.gain).square().sum()


def names_and_gradients(net: Net) -> dict[str, Tensor | None]:
    """The gradients of whole parameters, without padding."""
    found: dict[str, Any] = {name: p.grad for name, p in net.named_parameters()}
    found["table"] = found["table"].full_tensor()[:ROWS]
    return found


def microbatch(net: Net, groups: ProcessGroups, number: int) -> None:
    net(number + 2 * groups.index("dp")).backward()


def finish(net: Net, optimizer: torch.optim.Optimizer, groups: ProcessGroups) -> None:
    """Average over data parallelism."""
    for parameter in net.parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            torch.distributed.all_reduce(local, group=groups.group("dp"))
            local /= groups.size("dp")
    optimizer.step()


def accumulate(context: RankContext, root: str) -> list[str]:
    """A save between two microbatches, and what is refused; then gradients under tp=4."""
    told = []
    with ProcessGroups.create(Layout(tp=2, dp=2, name="four")) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        net, twin = Net(groups, seed=1), Net(groups, seed=2)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, twin)]

        def state(each: Net, optimizer: Any, **options: Any) -> dict[str, object]:
            gradients = Gradients(each, **options)
            kept = OptimizerState(optimizer, each)
            return {"model": each, "optimizer": kept, "gradients": gradients}

        microbatch(net, groups, 0)
        with pytest.raises(HoldfastError, match=r"gradients\.(gain|table)"):
            checkpointer.save(1, state(net, optimizers[0]))  # ranks of dp hold others
        checkpointer.save(1, state(net, optimizers[0], unreduced="dp"))
        twin.unused.grad = torch.ones(3)
        with pytest.raises(MismatchError, match="unreduced="):
            checkpointer.load(state(twin, optimizers[1]))
        checkpointer.load(state(twin, optimizers[1], unreduced="dp"))
        assert twin.unused.grad is None  # a load replaces
        for each, optimizer in zip((net, twin), optimizers, strict=True):
            microbatch(each, groups, 1)
            finish(each, optimizer, groups)
        for ours, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            assert torch.equal(whole(ours), whole(theirs))
        checkpointer.save(2, {"gradients": Gradients(net), "model": net})
        kept = names_and_gradients(net)
    with ProcessGroups.create(Layout(tp=4, name="tp")) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        other = Net(groups, seed=3)
        checkpointer.load({"model": other, "gradients": Gradients(other)}, step=2)
        now = names_and_gradients(other)
        assert now["unused"] is None
        assert isinstance(other.table.grad, DTensor)
        assert all(torch.equal(now[name], kept[name]) for name in ("table", "gain"))  # type: ignore[arg-type]
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(
                {"gradients": Gradients(other, unreduced="dp")}, step=1, ignore_unexpected=True
            )
        told.append(str(caught.value))
    return told


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def test_a_save_between_two_microbatches_keeps_gradients(tmp_path: Path) -> None:
    """I3: bitwise; of each data rank's own ones, no coordinate is dropped; and under any layout."""
    for told in run_ranks(4, accumulate, str(tmp_path)).results:
        assert "dp=1" in told[0]


@pytest.mark.parametrize("options", [{}, {"unreduced": "dp"}])
def test_no_gradient_is_loaded_for_a_parameter_that_is_gone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """O2: it would be called loaded, and have no owner."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"g": Gradients(model, **options)})
    state = {"g": Gradients(model[:1], **options)}
    with pytest.raises(MismatchError, match=r"does not ask for: .*1\.weight"):
        checkpointer.load(state)
    report = checkpointer.load(state, ignore_unexpected=True)
    assert [path.partition(".")[2] for path in report.loaded] == ["0.weight", "0.bias"]


def test_a_load_looks_at_each_stored_gradient_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at all of them for each parameter: minutes for a model of ten thousand."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(50)])
    for parameter in model.parameters():
        parameter.grad = torch.ones(1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"g": Gradients(model)})
    looks: list[object] = []
    tensor = StoredPart.tensor
    monkeypatch.setattr(
        StoredPart, "tensor", lambda part, node: looks.append(node) or tensor(part, node)
    )
    checkpointer.load({"g": Gradients(model)})
    assert 50 <= len(looks) <= 150


def unreduced(context: RankContext, root: str) -> None:
    """Gradients that FSDP2 keeps whole until a later backward are in no `.grad`."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), mesh=groups.mesh("dp"))
        checkpointer = Checkpointer(root, groups=groups)
        state = {"model": model, "gradients": Gradients(model)}
        checkpointer.save(1, state)
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4)).sum().backward()
        for call in (lambda: checkpointer.save(2, state), lambda: checkpointer.load(state)):
            with pytest.raises(ConfigError, match="not reduced yet"):
                call()
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 4)).sum().backward()
        assert checkpointer.save(2, state).num_tensors == 2 * 4


def test_gradients_that_are_in_no_grad_are_not_dropped(tmp_path: Path) -> None:
    """I3: before, such a save stored none, and reported success."""
    run_ranks(2, unreduced, str(tmp_path))

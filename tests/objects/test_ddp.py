"""Models in DistributedDataParallel: buffers of each rank's own, and state of hooks (I6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from holdfast import (
    Checkpointer,
    Layout,
    ModuleState,
    OptimizerState,
    PlacementError,
    ProcessGroups,
)
from holdfast.errors import DriftError
from tests.harness import RankContext, run_ranks


def wrapped(groups: ProcessGroups, *, seed: int, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return DistributedDataParallel(net, process_group=groups.group("dp"), **options)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> Tensor:
    """Steps on rows of this rank's own; the last loss."""
    loss = torch.zeros(())
    for step in steps:
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def buffers_and_hooks(context: RankContext, root: str) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        model = wrapped(groups, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trained(model, optimizer, context.rank, range(3))
        # Torch's defaults: the statistics of each rank are of its own rows.
        with pytest.raises(DriftError, match=r"buffers='first_rank'"):
            checkpointer.save(1, {"model": model})
        state: dict[str, Any] = {
            "model": ModuleState(model, buffers="first_rank"),
            "optimizer": OptimizerState(optimizer, model),
        }
        checkpointer.save(1, state)
        twin = wrapped(groups, seed=2)
        other = torch.optim.AdamW(twin.parameters(), lr=0.1)
        load = {
            "model": ModuleState(twin, buffers="first_rank"),
            "optimizer": OptimizerState(other, twin),
        }
        assert checkpointer.load(load).missing == ()
        first = [b.clone() for b in model.module.buffers()]
        for buffer in first:
            torch.distributed.broadcast(buffer, src=0)
        for ours, theirs in zip(twin.module.buffers(), first, strict=True):
            assert torch.equal(ours, theirs)
        losses = [
            trained(each, its, context.rank, range(3, 6))
            for each, its in ((model, optimizer), (twin, other))
        ]
        assert torch.equal(*losses)
        if context.rank:  # what DDP does not give to all has to be equal
            model.module[1].running_mean += 1
        model.parameters_to_ignore.add("1.running_mean")
        with pytest.raises(DriftError, match=r"model\.1\.running_mean"):
            checkpointer.save(2, {"model": ModuleState(model, buffers="first_rank")})
        for odd in (wrapped(groups, seed=1, forward_sync_buffers=False), model.module):
            with pytest.raises(PlacementError, match="buffers='first_rank' declares"):
                checkpointer.save(2, {"model": ModuleState(odd, buffers="first_rank")})

        # Hooks: a state of its own is refused, or given up by a word; others have none.
        hooked = nn.Sequential(wrapped(groups, seed=1))
        compress = PowerSGDState(groups.group("dp"), matrix_approximation_rank=1)
        hooked[0].register_comm_hook(compress, powerSGD_hook)
        with pytest.raises(PlacementError, match=r"DistributedDataParallel at '0'.*powerSGD_hook"):
            checkpointer.save(3, {"model": hooked})
        checkpointer.save(3, {"model": ModuleState(hooked, hook_state="transient")})
        checkpointer.load({"model": hooked})
        plain = wrapped(groups, seed=1)
        plain.register_comm_hook(groups.group("dp"), default_hooks.fp16_compress_hook)
        checkpointer.save(4, {"model": plain})


def test_buffers_of_the_first_rank_and_state_of_hooks(tmp_path: Path) -> None:
    """I6: what names look through holds nothing that is lost silently."""
    run_ranks(2, buffers_and_hooks, str(tmp_path))

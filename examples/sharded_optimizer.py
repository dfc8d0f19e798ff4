"""ZeRO-1: each data rank keeps one share of AdamW's state. Loads under any other number of ranks.

torchrun --nproc-per-node 2 examples/sharded_optimizer.py runs/zero 20
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist

import holdfast

root, total_steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")  # "nccl" on GPUs
layout = holdfast.Layout.of_world(dist.get_world_size())

with holdfast.ProcessGroups.create(layout) as groups:
    torch.manual_seed(0)  # the same weights everywhere
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = holdfast.ShardedOptimizer(
        model,
        model.parameters(),
        make=partial(torch.optim.AdamW, lr=1e-2),
        groups=groups,
        over="dp_cp",
        divisor=groups.size("dp_cp"),  # gradients are averaged
        stage=1,
        overlap=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    progress = {"step": 0}
    state = {
        "model": model,
        "optimizer": holdfast.OptimizerState(optimizer, model),
        "schedule": schedule,
        "progress": progress,
    }
    with holdfast.Checkpointer(root, groups=groups) as checkpointer:
        if checkpointer.latest() is not None:
            progress.update(checkpointer.load(state).values["progress"])
        loss = torch.zeros(())
        while progress["step"] < total_steps:
            torch.manual_seed(100 * progress["step"] + groups.index("dp"))  # this rank's batch
            with optimizer.microbatch(is_last=True):
                rows = torch.randn(4, 8)
                loss = (model(rows) - rows.mean(1, keepdim=True)).square().mean()
                loss.backward()
            optimizer.step(max_norm=1.0)  # skips the step if a gradient is not finite on any rank
            schedule.step()
            progress["step"] += 1
            if progress["step"] % 5 == 0:
                checkpointer.save(progress["step"], state)
    print(f"rank {groups.rank}: step {progress['step']}, loss {loss.item():.9f}")
dist.destroy_process_group()

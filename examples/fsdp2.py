"""FSDP2 on the layout's own communicator. Save on two ranks, load on three, or on one.

torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2 20
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import holdfast

root, total_steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")  # "nccl" on GPUs
layout = holdfast.Layout.of_world(dist.get_world_size())  # all ranks are data parallel

with holdfast.ProcessGroups.create(layout) as groups:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(13, 13) for _ in range(3)))
    mesh = groups.mesh("dp")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding
    progress = {"step": 0}
    state = {
        "model": model,
        "optimizer": holdfast.OptimizerState(optimizer, model),
        "progress": progress,
    }
    with holdfast.Checkpointer(root, groups=groups) as checkpointer:
        if checkpointer.latest() is not None:
            progress.update(checkpointer.load(state).values["progress"])
        loss = torch.zeros(())
        while progress["step"] < total_steps:
            torch.manual_seed(100 * progress["step"] + groups.index("dp"))  # this rank's batch
            loss = model(torch.randn(4, 13)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress["step"] += 1
            if progress["step"] % 5 == 0:
                checkpointer.save(progress["step"], state)
    print(f"rank {groups.rank}: step {progress['step']}, loss {loss.item():.9f}")
dist.destroy_process_group()

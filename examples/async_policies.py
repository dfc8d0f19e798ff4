"""Asynchronous saves when a policy asks for one; old checkpoints removed; preemption by SIGTERM.

torchrun --nproc-per-node 2 examples/async_policies.py runs/async 20

Send SIGTERM to any rank: all of them stop after the same step, with that step saved. Start it again
and it continues there. `touch save_now` asks for a save at the next step.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import AtStep, EveryMinutes, EverySteps, KeepEvery, KeepLast, OnFile, OnSignal

root, total_steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")  # "nccl" on GPUs
layout = holdfast.Layout.of_world(dist.get_world_size())

with holdfast.ProcessGroups.create(layout) as groups:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net, process_group=groups.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = {"step": 0}
    state = {
        "model": model,
        "optimizer": holdfast.OptimizerState(optimizer, model),
        "progress": progress,
    }
    with holdfast.Checkpointer(
        root,
        groups=groups,
        retention=KeepLast(3) | KeepEvery(1000),
        save_when=EverySteps(5)
        | EveryMinutes(10, check_every=10)
        | OnFile("save_now")
        | OnSignal()  # SIGTERM: save and stop
        | AtStep(total_steps),
        staging_buffers=2,  # a save does not wait for the one before it
    ) as checkpointer:
        if checkpointer.latest() is not None:
            progress.update(checkpointer.load(state, max_fallbacks=None).values["progress"])
        checkpointer.prepare(state)  # makes the first save as fast as the others
        loss = torch.zeros(())
        while progress["step"] < total_steps and not checkpointer.preempted:
            torch.manual_seed(100 * progress["step"] + groups.index("dp"))  # this rank's batch
            rows = torch.randn(4, 8)
            loss = (model(rows) - rows.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["step"] += 1
            checkpointer.maybe_save(progress["step"], state, metadata={"data": "random rows"})
    # Leaving the block has waited for the saves in flight.
    if checkpointer.preempted:
        print(f"rank {groups.rank}: stopped at step {progress['step']}: {checkpointer.preempted}")
    else:
        print(f"rank {groups.rank}: step {progress['step']}, loss {loss.item():.9f}")
dist.destroy_process_group()

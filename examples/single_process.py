"""One process: model, optimizer, schedule and random streams; killed and started again at will.

python examples/single_process.py runs/one 20
"""

from __future__ import annotations

import sys

import torch

import holdfast

root, total_steps = sys.argv[1], int(sys.argv[2])

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
progress = {"step": 0, "loss": 0.0}
state = {
    "model": model,
    "optimizer": holdfast.OptimizerState(optimizer, model),
    "schedule": schedule,
    "rng": holdfast.RNG(),  # dropout continues where it stopped
    "progress": progress,
}

with holdfast.Checkpointer(root, retention=holdfast.KeepLast(3)) as checkpointer:
    if checkpointer.latest() is not None:
        progress.update(checkpointer.load(state).values["progress"])
    while progress["step"] < total_steps:
        rows = torch.randn(16, 8)
        loss = (model(rows) - rows.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.update(step=progress["step"] + 1, loss=loss.item())
        if progress["step"] % 5 == 0:
            checkpointer.save(progress["step"], state)

print(f"step {progress['step']}, loss {progress['loss']:.9f}")

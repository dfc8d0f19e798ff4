"""What the harness's fork server imports once, so that ranks do not: torch, Holdfast, test tools.

Importing these takes seconds of CPU time; a forked rank has them at once, and shares the memory.
Nothing here may start a thread or touch a device: neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib

for _name in (
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "holdfast.checkpoint.checkpointer",
    "holdfast.fsdp",
    "holdfast.optim",
    "holdfast.reference.train.loop",
    "holdfast.reference.train.multimodal",
):
    importlib.import_module(_name)
# A rank's collector then leaves these objects alone, and does not copy their pages.
gc.collect()
gc.freeze()

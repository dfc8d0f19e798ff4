"""What the harness's fork server imports once, so that ranks do not: torch, Holdfast, test tools.

Importing these takes seconds of CPU time; a forked rank has them at once, and shares the memory.
Writers of live ranks are forked, too, from a process that is started here.
Nothing here may start a thread or touch a device: neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys

from holdfast._torch import registrations
from tests.ranks import shardings, state, writers

for _name in (
    "holdfast.checkpoint.checkpointer",
    "holdfast.fsdp",
    "holdfast.optim",
    "holdfast.parallel.groups.module_groups",
):
    importlib.import_module(_name)
_LATE = {"torch._dynamo", "holdfast.foreign", "holdfast.storage.objects"}
IMPORTED_TOO_EARLY = sorted(_LATE & sys.modules.keys())
"""What importing the library has imported, of that which only some runs need."""
for _name in (
    "encodings.idna",  # of an address's lookup
    "holdfast.checkpoint.load.sources",
    "hypothesis",
    "numpy.ma",  # of torch's checks of a device mesh
    "pytest",
    "torch.distributed._tools",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "tests.ranks.process",
):
    importlib.import_module(_name)
if importlib.util.find_spec("holdfast_trainer") is not None:
    importlib.import_module("holdfast_trainer.train.loop")
    importlib.import_module("holdfast_trainer.train.multimodal")
writers.install()
shardings.keep()
# Otherwise the first save of a rank with it leaves hooks, and the rank is thrown away.
registrations()
state.keep_attributes()
# A rank's collector then leaves these objects alone, and does not copy their pages.
gc.collect()
gc.freeze()

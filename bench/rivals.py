"""PyTorch DCP, in the ways a user can call it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing import set_sharing_strategy

from bench.timing import Measured
from holdfast import ProcessGroups

SYNC = "dcp.save"
SYNC_CACHED = "dcp.save, cached plan"
ASYNC = "dcp.async_save"
ASYNC_CACHED = "dcp.async_save, cached plan and staging"
ASYNC_PROCESS = "dcp.async_save, process, cached plan and staging"


def dcp_state(state: dict[str, Any], groups: ProcessGroups | None) -> dict[str, Any]:
    """The same state as DCP takes it: the same local tensors, and plain random states.

    DTensors are on a mesh of torch's own making, which can be sent to DCP's checkpoint process.

    Args:
        state: two levels, the part "rng" apart.
        groups: of the layout; None for one process without them.
    """
    rank = 0 if groups is None else groups.rank
    python, numpy = random.getstate(), np.random.get_state()
    streams = {"torch": torch.get_rng_state(), "python": python, "numpy": numpy}
    result: dict[str, Any] = {"rng": {f"rank{rank}": streams}}
    mesh = None
    for part, entries in state.items():
        if part == "rng":
            continue
        table = result[part] = dict(entries)
        for key, value in entries.items():
            if isinstance(value, DTensor):
                names = value.device_mesh.mesh_dim_names
                if mesh is None:
                    shape = tuple(value.device_mesh.shape)
                    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
                local = value.to_local()
                table[key] = DTensor.from_local(local, mesh, value.placements, run_check=False)
    return result


class Dcp:
    """DCP's arms on one state; every save makes a new checkpoint under `root`.

    Args:
        root: where checkpoints are made.
        state: as `dcp_state` makes it.
        alone: for one process without process groups.
    """

    def __init__(self, root: Path, state: dict[str, Any], *, alone: bool = False) -> None:
        self._root = root
        self._state = state
        self._alone = alone
        self._stager: DefaultStager | None = None

    def path(self, number: int) -> Path:
        """Return where a save of that number goes."""
        return self._root / f"dcp-{number:05d}"

    def save_arms(self) -> dict[str, Callable[[int], Measured]]:
        """Name -> synchronous save."""
        return {SYNC: self.save, SYNC_CACHED: partial(self.save, cached=True)}

    def async_arms(self) -> dict[str, Callable[[int], Measured]]:
        """Name -> asynchronous save; in a process only if there are process groups."""
        arms: dict[str, Callable[[int], Measured]] = {
            ASYNC: self.save_async,
            ASYNC_CACHED: partial(self.save_async, cached=True),
        }
        if not self._alone:
            arms[ASYNC_PROCESS] = partial(self.save_async, cached=True, in_process=True)
        return arms

    def save(self, number: int, *, cached: bool = False) -> Measured:
        """`dcp.save`: seconds until durable."""
        began = time.perf_counter()
        save(
            self._state,
            checkpoint_id=str(self.path(number)),
            planner=DefaultSavePlanner(enable_plan_caching=cached),
            no_dist=self._alone,
        )
        return {"durable": time.perf_counter() - began}

    def save_async(
        self, number: int, *, cached: bool = False, in_process: bool = False
    ) -> Measured:
        """`dcp.async_save`: seconds until the caller continues, and until durable.

        Args:
            number: of the checkpoint.
            cached: use plan and staging memory again; the memory can be shared with a process.
            in_process: write in DCP's checkpoint process instead of a thread.
        """
        path = str(self.path(number))
        if cached and self._stager is None:
            # Without a descriptor for each tensor, of which a process has too few for thousands.
            set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            is_shared = not self._alone
            self._stager = DefaultStager(StagingOptions(False, is_shared, False, False))
        kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        began = time.perf_counter()
        future = async_save(
            self._state,
            checkpoint_id=path,
            async_checkpointer_type=kind,
            async_stager=self._stager if cached else None,
            planner=DefaultSavePlanner(enable_plan_caching=cached),
            no_dist=self._alone,
        )
        stall = time.perf_counter() - began
        future.result()  # type: ignore[union-attr]
        return {"stall": stall, "durable": time.perf_counter() - began}

    def load(self, path: Path) -> Measured:
        """`dcp.load` into the state."""
        began = time.perf_counter()
        load(self._state, checkpoint_id=str(path), no_dist=self._alone)
        return {"seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Give back the staging memory, and end the checkpoint process, if there is one."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if dist.is_initialized():
            dist.barrier()
        # DCP keeps its process for as long as the trainer lives; this is how it is ended.
        _async_process_executor._CHECKPOINT_PROCESS = None

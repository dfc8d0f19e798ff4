"""PyTorch DCP, in the ways a user can call it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from bench.timing import Measured

SYNC = "dcp.save"
SYNC_CACHED = "dcp.save, cached plan"
ASYNC = "dcp.async_save"
ASYNC_CACHED = "dcp.async_save, cached plan and staging"


class Dcp:
    """DCP's arms on one state; every save makes a new checkpoint under `root`."""

    def __init__(self, root: Path, state: dict[str, Any], *, alone: bool = False) -> None:
        self._root = root
        self._state = state
        self._alone = alone
        self._stager: DefaultStager | None = None

    def path(self, number: int) -> Path:
        """Where a save of that number goes."""
        return self._root / f"dcp-{number:05d}"

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

    def save_async(self, number: int, *, cached: bool = False) -> Measured:
        """`dcp.async_save`: seconds until the caller goes on, and until durable."""
        path = str(self.path(number))
        if cached and self._stager is None:
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        began = time.perf_counter()
        future = async_save(
            self._state,
            checkpoint_id=path,
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

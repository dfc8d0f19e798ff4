"""A short run, as tests of several clouds make it."""

from __future__ import annotations

import pytest
import torch

from holdfast import Checkpointer, KeepLast, StorageError
from holdfast.storage import Storage
from tests.crash.common import state_of


def save_replace_and_prune(storage: Storage) -> None:
    """Leave steps 3 (saved twice), 4 and 9, the last one of a writer process and in five parts."""
    large = torch.arange(3 << 20)
    with Checkpointer(storage, settle_s=0.0, retention=KeepLast(3)) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state_of(step))
        # By a writer process, which gets the settings.
        pending = checkpointer.save_async(9, {"t": {"large": large}}).result()
        assert checkpointer.stats.writer_pid is not None
        assert pending.requests["part"] == 5
        checkpointer.save(3, state_of(33), overwrite=True)
        with pytest.raises(StorageError, match="exists already"):
            checkpointer.save(4, state_of(0))
        target = torch.zeros_like(large)
        checkpointer.load({"t": {"large": target}})
    assert torch.equal(target, large)

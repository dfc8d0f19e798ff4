"""Saving and loading the whole training state: signature, plan, stage, write, commit; and back."""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.reports import (
    CheckpointerStats,
    CheckpointInfo,
    LoadReport,
    PartInfo,
    SaveReport,
)
from holdfast.checkpoint.save.pending import PendingSave

__all__ = [
    "CheckpointInfo",
    "Checkpointer",
    "CheckpointerStats",
    "LoadReport",
    "PartInfo",
    "PendingSave",
    "SaveReport",
]

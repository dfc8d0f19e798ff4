"""Saving and loading the whole training state: signature, plan, stage, write, commit; and back."""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.rank_log import RankLog
from holdfast.checkpoint.reports import (
    CheckpointerStats,
    LoadReport,
    SaveReport,
)
from holdfast.checkpoint.save.pending import PendingSave

__all__ = [
    "Checkpointer",
    "CheckpointerStats",
    "LoadReport",
    "PendingSave",
    "RankLog",
    "SaveReport",
]

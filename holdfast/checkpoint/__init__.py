"""Saving and loading the whole training state: signature, plan, stage, write, commit; and back."""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.reports import LoadReport, PartInfo, SaveReport
from holdfast.checkpoint.save.pending import PendingSave

__all__ = ["Checkpointer", "LoadReport", "PartInfo", "PendingSave", "SaveReport"]

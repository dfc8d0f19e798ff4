"""Saving and loading the whole training state: signature, plan, stage, write, commit; and back."""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.pending import PendingSave
from holdfast.checkpoint.report import LoadReport, PartInfo, SaveReport

__all__ = ["Checkpointer", "LoadReport", "PartInfo", "PendingSave", "SaveReport"]

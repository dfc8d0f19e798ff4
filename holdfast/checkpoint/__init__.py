"""Saving and loading the whole training state: signature, plan, stage, write, commit; and back."""

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.pending import PendingSave
from holdfast.checkpoint.report import LoadReport, SaveReport

__all__ = ["Checkpointer", "LoadReport", "PendingSave", "SaveReport"]

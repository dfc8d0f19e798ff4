"""From staged bytes to a committed checkpoint, without torch."""

from holdfast.writer.commit import Committed, commit_save, discard_save
from holdfast.writer.job import WriteJob, write_share
from holdfast.writer.records import CommitPlan, DoneRecord, SaveHeader

__all__ = [
    "CommitPlan",
    "Committed",
    "DoneRecord",
    "SaveHeader",
    "WriteJob",
    "commit_save",
    "discard_save",
    "write_share",
]

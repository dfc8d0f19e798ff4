"""From staged bytes to a committed checkpoint, without torch."""

from holdfast.writer.commit import Committed, commit_save, discard_save
from holdfast.writer.records import CommitPlan, DoneRecord, SaveHeader
from holdfast.writer.write import WriteJob, write_share

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

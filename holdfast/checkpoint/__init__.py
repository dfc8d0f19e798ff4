"""Save and load the whole training state; `Checkpointer` is the one object a loop needs.

In comes a state: part names with modules, optimizers, random streams, values. Out come committed
checkpoints and reports. The three rooms below have different readers. `plan/` is arithmetic over
arrays, runs without processes and is tested by brute force. `save/` is about time and memory.
`load/` is about matching and transport.

Every operation of all ranks runs inside a guard (`parallel/control/guard.py`): what is raised on
one rank at any line is raised on all, so no code here between two collectives has to catch
anything.

Read first: `checkpointer.py`, `save/saver.py`, `load/loader.py`.
"""

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

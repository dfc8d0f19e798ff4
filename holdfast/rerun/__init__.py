"""The rerun machine: was a bad value a transient error, a broken device, or the correct result?

What comes in: from a training loop the number of a step, its batches and the values that a rank has
computed; from a checkpoint what an earlier process has left. What goes out: a decision, the same on
all ranks (continue, or end with an exit code); a line in the report for everything that happened;
and, if a value was bad twice, a state to run the step again from, on another device.

Three files to read first:

    machine.py      what a loop sees: `attempts`, `validate`, `decision`, and the part of a state
    course.py       a step in five phases, from its first run to the decision
    attribution.py  whom to blame: what runs on sets of devices prove

Around them: `states.py` (the table of states), `judging.py` (what follows from outcomes), `team.py`
(what ranks tell each other; `journal.py`, the report; `places.py`, who feeds a value), `attempt.py`
(the calls of one run; `evidence.py`, those of all ranks), `second_opinion.py` (another data replica
runs the step; `vouching.py`, without a rejection), `replay.py` and `replayed.py` (what a run starts
with; `training_state.py`, whether that was sound; `other_modules.py`, what else a run changes),
`kept_trees.py` (the one form in which anything is kept), `entry.py` (what is in a checkpoint),
`rules.py` and `values.py` (what is judged, how).
"""

from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.injection import ErrorInjector
from holdfast.rerun.journal import read_report
from holdfast.rerun.machine import RerunMachine
from holdfast.rerun.places import Place
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import (
    IsInf,
    IsNaN,
    NotFinite,
    Rejects,
    RejectsAny,
    Rule,
    Spike,
    gradient_norm,
    update_norm,
)
from holdfast.rerun.states import (
    TRANSITIONS,
    Decision,
    Event,
    ExitCode,
    Limits,
    Mode,
    Policy,
    State,
    Verdict,
)
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.values import describe, relative_difference

__all__ = [
    "TRANSITIONS",
    "Decision",
    "DeterminismStatistics",
    "DeviceIdentity",
    "ErrorInjector",
    "Event",
    "ExitCode",
    "IsInf",
    "IsNaN",
    "Limits",
    "Mode",
    "NotFinite",
    "Place",
    "Policy",
    "Rejects",
    "RejectsAny",
    "ReplayableBatches",
    "Replayed",
    "RerunMachine",
    "Rule",
    "Spike",
    "State",
    "Verdict",
    "describe",
    "gradient_norm",
    "read_report",
    "relative_difference",
    "update_norm",
]

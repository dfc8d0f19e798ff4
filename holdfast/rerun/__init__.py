"""The rerun state machine: a transient error, a broken device, or a correct result?"""

from holdfast.rerun.comparison import describe, relative_difference
from holdfast.rerun.devices import DeviceIdentity
from holdfast.rerun.injection import ErrorInjector
from holdfast.rerun.journal import read_report
from holdfast.rerun.machine import RerunMachine
from holdfast.rerun.replay import ReplayableBatches
from holdfast.rerun.replayed import Replayed
from holdfast.rerun.rules import IsInf, IsNaN, NotFinite, Rejects, RejectsAny, Rule, Spike
from holdfast.rerun.states import (
    TRANSITIONS,
    Decision,
    Event,
    ExitCode,
    Limits,
    Mode,
    State,
    Verdict,
)
from holdfast.rerun.statistics import DeterminismStatistics
from holdfast.rerun.tracker import Tracker

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
    "Rejects",
    "RejectsAny",
    "ReplayableBatches",
    "Replayed",
    "RerunMachine",
    "Rule",
    "Spike",
    "State",
    "Tracker",
    "Verdict",
    "describe",
    "read_report",
    "relative_difference",
]

"""When to save: small policies that say at which steps, joined with `|`.

A policy is looked at after each training step. Whether it asks for a save may follow from the step
alone, from one rank's clock or files, or from a signal that any rank may get; `decided_by` says
which, and `SaveSchedule` makes one decision of it for all ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

from holdfast.errors import ConfigError, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a policy may look at besides signals and files."""

    step: int
    """The step just finished."""
    seconds_since_save: float
    """Since the last save was begun or loaded, or since the schedule was made; this rank's
    clock."""


class SavePolicy:
    """Says when to save; `a | b` saves when either says so.

    A policy of your own overrides `vote`, and `decided_by` where it looks at more than the step.
    """

    decided_by: ClassVar[Literal["step", "coordinator", "any rank"]] = "step"
    """Whose vote counts: everybody's is the same ("step": no communication), the coordinator's, or
    that of any rank that votes."""
    stop: bool = False
    """Whether the run is to stop after the save."""
    check_every: int = 1
    """Steps between looks; at the others there is nothing to communicate for this policy."""

    def vote(self, moment: Moment) -> int:
        """A number other than 0 (at most 255) to save now; for signals, the signal's number."""
        raise NotImplementedError

    def reason(self, vote: int) -> str:
        """Why it asked for a save, in words."""
        del vote
        return repr(self)

    def leaves(self) -> tuple[SavePolicy, ...]:
        """The policies that this one joins, or itself."""
        return (self,)

    def shared(self) -> str:
        """What has to be equal on all ranks; by default everything that `repr` shows."""
        return repr(self)

    def start(self) -> None:
        """Begin to watch; called once, before the first vote."""

    def close(self) -> None:
        """Stop watching, and leave the process as it was."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Save when either says so."""
        return SaveWhenAny((*self.leaves(), *other.leaves()))


@dataclass(frozen=True)
class SaveWhenAny(SavePolicy):
    """Save when any of these says so."""

    policies: tuple[SavePolicy, ...]

    def leaves(self) -> tuple[SavePolicy, ...]:
        """All of them."""
        return self.policies


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save at the steps that `n` divides, 0 apart. No communication."""

    n: int

    def __post_init__(self) -> None:
        """Refuse less than one."""
        _check_count(self, "n", self.n)

    def vote(self, moment: Moment) -> int:
        """By step number."""
        return int(moment.step > 0 and moment.step % self.n == 0)


@dataclass(frozen=True)
class AtStep(SavePolicy):
    """Save at one step: usually the last one of the run. No communication."""

    step: int

    def __post_init__(self) -> None:
        """Refuse less than one."""
        _check_count(self, "step", self.step)

    def vote(self, moment: Moment) -> int:
        """By step number."""
        return int(moment.step == self.step)


@dataclass(frozen=True)
class EveryMinutes(SavePolicy):
    """Save when so many minutes have passed since the last save, by the coordinator's clock.

    Args:
        minutes: since a save was begun for any reason, or since the checkpointer was made.
        check_every: steps between looks at the clock.

    Cost: one small collective at each look.
    """

    decided_by = "coordinator"
    minutes: float
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a time that is not positive."""
        if not self.minutes > 0:
            raise ConfigError(f"{self!r}: the time must be positive")
        _check_count(self, "check_every", self.check_every)

    def vote(self, moment: Moment) -> int:
        """By the monotonic clock."""
        return int(moment.seconds_since_save >= 60 * self.minutes)


@dataclass(frozen=True)
class AtDeadline(SavePolicy):
    """Save once when a point in time comes near, by the coordinator's clock, and stop the run.

    Args:
        at: Unix time in seconds at which the job ends, such as
            `float(os.environ["SLURM_JOB_END_TIME"])`; the coordinator's counts.
        margin_s: seconds before it, for the last step and the save.
        check_every: steps between looks at the clock.

    Cost: one small collective at each look.
    """

    decided_by = "coordinator"
    stop = True
    at: float
    margin_s: float = field(default=0.0, kw_only=True)
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse a margin that is negative."""
        if not self.margin_s >= 0:
            raise ConfigError(f"{self!r}: the margin is a number of seconds, 0 or more")
        _check_count(self, "check_every", self.check_every)

    def shared(self) -> str:
        """Ranks may have computed other times from their own clocks."""
        return f"AtDeadline, check_every={self.check_every}"

    def vote(self, moment: Moment) -> int:
        """By the wall clock."""
        return int(time.time() >= self.at - self.margin_s)

    def reason(self, vote: int) -> str:
        """The deadline is near."""
        return f"the deadline is less than {self.margin_s:.0f} s away"


@dataclass(frozen=True)
class OnFile(SavePolicy):
    """Save when a file is there, as the coordinator sees it, and remove the file.

    Args:
        path: `touch` it to ask for a save.
        stop: stop the run after the save.
        check_every: steps between looks.

    Cost: at each look one small collective, and one call of the file system on the coordinator.
    """

    decided_by = "coordinator"
    path: str | os.PathLike[str]
    stop: bool = field(default=False, kw_only=True)
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse less than one."""
        _check_count(self, "check_every", self.check_every)

    def shared(self) -> str:
        """Only the coordinator's path is looked at."""
        return f"OnFile, stop={self.stop}, check_every={self.check_every}"

    def vote(self, moment: Moment) -> int:
        """Take the file away: one file asks for one save."""
        del moment
        try:
            Path(self.path).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except OSError as error:
            raise StorageError(
                f"{os.fspath(self.path)} asks for a save and cannot be removed ({error.strerror}); "
                f"name a file in a directory that this process may write to"
            ) from error
        return 1

    def reason(self, vote: int) -> str:
        """The file's path."""
        return f"{os.fspath(self.path)} was there"


class OnSignal(SavePolicy):
    """Save when any rank gets a signal, and stop the run unless `stop=False`.

    The handlers are in force from the making of the checkpointer until its `close`, which brings
    back the earlier ones. A signal that comes again changes nothing: launchers and schedulers often
    send SIGTERM twice.

    Args:
        signals: which; SIGTERM by default, which schedulers send before they kill.
        stop: stop the run after the save (preemption). Without it, each signal asks for a save.
        check_every: steps between looks.

    Raises:
        ConfigError: there is no such signal, none can be caught, or this is not the main thread.

    Cost: one small collective at each look.
    """

    decided_by = "any rank"

    def __init__(self, *signals: int, stop: bool = True, check_every: int = 1) -> None:
        self.signals = tuple(signals) or (signal.SIGTERM,)
        self.stop = stop
        self.check_every = check_every
        for number in self.signals:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise ConfigError(f"OnSignal: {number!r} is no signal that a process can handle")
        _check_count(self, "check_every", check_every)
        self._received = 0
        self._earlier: dict[int, Any] = {}

    def __repr__(self) -> str:
        """As it is written."""
        names = ", ".join(signal.Signals(number).name for number in self.signals)
        return f"OnSignal({names}, stop={self.stop}, check_every={self.check_every})"

    def start(self) -> None:
        """Install the handlers."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{self!r}: Python lets only the main thread handle signals; make the checkpointer "
                f"there"
            )
        if self._earlier:
            raise ConfigError(f"{self!r} is in use by another checkpointer; make one for each")
        self._received = 0
        for number in self.signals:
            self._earlier[number] = signal.signal(number, self._receive)

    def close(self) -> None:
        """Bring back the earlier handlers, unless another one was set since."""
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._receive:
                # None: a handler that was not set from Python, which Python cannot set again.
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self._earlier.clear()

    def vote(self, moment: Moment) -> int:
        """The signal's number; each asks once, unless the run is to stop for it."""
        del moment
        received = self._received
        if received and not self.stop:
            # Never reset from 0: the handler may run between the two lines.
            self._received = 0
        return received

    def reason(self, vote: int) -> str:
        """The signal's name."""
        return signal.Signals(vote).name

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number


def _check_count(policy: SavePolicy, name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        kind = type(policy).__name__
        raise ConfigError(f"{kind}: {name}={number!r} is not a whole number above 0")

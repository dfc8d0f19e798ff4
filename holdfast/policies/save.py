"""When to save: small policies that say at which steps, joined with `|`.

A policy is looked at after each training step. Whether it asks for a save may follow from the step
alone, from one rank's clock or files, or from a signal that any rank may get; `decided_by` says
which, and `SaveSchedule` makes one decision of it for all ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, Self

from holdfast.arguments import check_int, check_number
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
        check_int(self.n, name="EverySteps: n", least=1)

    def vote(self, moment: Moment) -> int:
        """By step number."""
        return int(moment.step > 0 and moment.step % self.n == 0)


@dataclass(frozen=True)
class AtStep(SavePolicy):
    """Save at one step: usually the last one of the run. No communication."""

    step: int

    def __post_init__(self) -> None:
        """Refuse less than one."""
        check_int(self.step, name="AtStep: step", least=1)

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
        check_number(self.minutes, name="EveryMinutes: minutes", above=0)
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

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
        check_number(self.margin_s, name="AtDeadline: margin_s", least=0)
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

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
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

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
    back the earlier ones. `with OnSignal() as policy` has them in force earlier, for example while
    the model is built, and until the block ends. A signal that comes again changes nothing:
    launchers and schedulers often send SIGTERM twice.

    Args:
        signals: which; SIGTERM by default, which schedulers send before they kill.
        stop: stop the run after the save (preemption). Without it, each signal asks for a save.
        check_every: steps between looks.
        notice: called in a thread, as soon as a signal arrives, with its number and how many
            signals have arrived: to answer a person, or to leave at the second. A handler cannot do
            that: Python runs none while the main thread waits in a collective.

    Raises:
        ConfigError: there is no such signal, none can be caught, or this is not the main thread.

    Cost: one small collective at each look.
    """

    decided_by = "any rank"

    def __init__(
        self,
        *signals: int,
        stop: bool = True,
        check_every: int = 1,
        notice: Callable[[int, int], None] | None = None,
    ) -> None:
        self.signals = tuple(signals) or (signal.SIGTERM,)
        self.stop = stop
        self.check_every = check_every
        for number in self.signals:
            if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
                raise ConfigError(f"OnSignal: a process cannot handle signal {number!r}")
        check_int(check_every, name="OnSignal: check_every", least=1)
        self._notice = notice
        self._received = 0
        self._handlers = ExitStack()
        self._is_entered = self._is_in_use = False

    def __repr__(self) -> str:
        """As it is written."""
        names = ", ".join(signal.Signals(number).name for number in self.signals)
        return f"OnSignal({names}, stop={self.stop}, check_every={self.check_every})"

    def __enter__(self) -> Self:
        """Install the handlers before a checkpointer does."""
        self._install()
        self._is_entered = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Bring back the earlier handlers."""
        self._is_entered = False
        self._handlers.close()

    def start(self) -> None:
        """Install the handlers, unless they are in force."""
        if self._is_in_use:
            raise ConfigError(f"{self!r} is in use by another checkpointer; make one for each")
        if not self._is_entered:
            self._install()
        self._is_in_use = True

    def close(self) -> None:
        """Bring back the earlier handlers, unless another one was set since."""
        self._is_in_use = False
        if not self._is_entered:
            self._handlers.close()

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

    def _install(self) -> None:
        """Set the handlers, and start the thread that gives notice."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{self!r}: Python lets only the main thread handle signals; make the checkpointer "
                f"there"
            )
        self._received = 0
        # Callbacks run in reverse: the handlers go first, so that no signal is written to a socket
        # that is closed already.
        if self._notice is not None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._handlers.callback(reader.close)
            self._handlers.callback(writer.close)
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._handlers.callback(signal.set_wakeup_fd, before)
            threading.Thread(target=self._give_notice, args=(reader,), daemon=True).start()
        for number in self.signals:
            self._handlers.callback(self._reset, number, signal.signal(number, self._receive))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number

    def _reset(self, number: int, earlier: Any) -> None:
        """Bring back the earlier handler, unless another one was set since."""
        if signal.getsignal(number) == self._receive:
            # None: a handler that was not set from Python, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def _give_notice(self, reader: socket.socket) -> None:
        """Call `notice` for each signal; runs in a thread until the socket is closed.

        The interpreter writes the number of every signal to the socket from its C handler, without
        waiting for the main thread.
        """
        assert self._notice is not None
        num_signals = 0
        while True:
            try:
                numbers = reader.recv(64)
            except OSError:
                return
            if not numbers:
                return
            for number in numbers:
                if number in self.signals:
                    num_signals += 1
                    self._notice(number, num_signals)

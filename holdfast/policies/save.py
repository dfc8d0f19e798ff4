"""When to save: small policies that choose the steps, joined with `|`.

A policy votes after each training step. Its vote may depend on the step alone, on one rank's clock
or files, or on a signal that any rank may receive. `decided_by` states which, and `SaveSchedule`
makes one decision for all ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal, Self

from holdfast.arguments import check_int, check_number
from holdfast.errors import ConfigError, StorageError, signal_name

_CAN_NAME_SENDERS = hasattr(socket, "SO_PASSCRED")
_SENDER = struct.Struct("3i")
"""Process, user and group of who wrote to a socket, as Linux passes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The facts on which a policy may decide, besides signals and files."""

    step: int
    """The step just finished."""
    seconds_since_save: float
    """Seconds since the last save started or was loaded, or since the schedule was made, by this
    rank's clock."""


class SavePolicy:
    """Chooses when to save; `a | b` saves if either does.

    Your own policy overrides `vote`, and `decided_by` if it depends on more than the step.
    """

    decided_by: ClassVar[Literal["step", "coordinator", "any rank"]] = "step"
    """The vote that counts: any rank's, as all are equal ("step", without communication), the
    coordinator's, or that of any rank that votes."""
    stop: bool = False
    """True if the run is to stop after the save."""
    check_every: int = 1
    """Steps between votes; at other steps this policy needs no communication."""

    def vote(self, moment: Moment) -> int:
        """Return 1 to 255 to save now, else 0; for signals, the signal's number."""
        raise NotImplementedError

    def reason(self, vote: int) -> str:
        """Return why it voted for a save, for people."""
        del vote
        return repr(self)

    def leaves(self) -> tuple[SavePolicy, ...]:
        """Return the policies that this one joins, or itself."""
        return (self,)

    def shared(self) -> str:
        """Return what must be equal on all ranks; by default everything that `repr` shows."""
        return repr(self)

    def start(self) -> None:
        """Start to watch; called once, before the first vote."""

    def close(self) -> None:
        """Stop watching and leave the process as it was."""

    def __or__(self, other: SavePolicy) -> SavePolicy:
        """Save when either policy does."""
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return SaveWhenAny((*self.leaves(), *other.leaves()))


@dataclass(frozen=True)
class SaveWhenAny(SavePolicy):
    """Save when any of these policies does."""

    policies: tuple[SavePolicy, ...]

    def leaves(self) -> tuple[SavePolicy, ...]:
        return self.policies


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save at the steps that `n` divides, except 0. No communication."""

    n: int

    def __post_init__(self) -> None:
        check_int(self.n, name="EverySteps: n", least=1)

    def vote(self, moment: Moment) -> int:
        return int(moment.step > 0 and moment.step % self.n == 0)


@dataclass(frozen=True)
class AtStep(SavePolicy):
    """Save at one step: usually the last one of the run. No communication."""

    step: int

    def __post_init__(self) -> None:
        check_int(self.step, name="AtStep: step", least=1)

    def vote(self, moment: Moment) -> int:
        return int(moment.step == self.step)


@dataclass(frozen=True)
class EveryMinutes(SavePolicy):
    """Save when `minutes` have passed since the last save, by the coordinator's clock.

    Args:
        minutes: Minutes since a save started for any reason, or since the checkpointer was made.
        check_every: Steps between looks at the clock.

    Cost: one small collective at each look.
    """

    decided_by = "coordinator"
    minutes: float
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_number(self.minutes, name="EveryMinutes: minutes", above=0)
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

    def vote(self, moment: Moment) -> int:
        return int(moment.seconds_since_save >= 60 * self.minutes)


@dataclass(frozen=True)
class AtDeadline(SavePolicy):
    """Save once before a point in time, by the coordinator's clock, and stop the run.

    Args:
        at: Unix time in seconds at which the job ends, such as
            `float(os.environ["SLURM_JOB_END_TIME"])`; the coordinator's counts.
        margin_s: Seconds before it that the last step and the save need.
        check_every: Steps between looks at the clock.

    Cost: one small collective at each look.
    """

    decided_by = "coordinator"
    stop = True
    at: float
    margin_s: float = field(default=0.0, kw_only=True)
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        hint = "; it is Unix time in seconds, such as float(os.environ['SLURM_JOB_END_TIME'])"
        check_number(self.at, name="AtDeadline: at", hint=hint)
        check_number(self.margin_s, name="AtDeadline: margin_s", least=0)
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

    def shared(self) -> str:
        """Leave `at` out: ranks may have computed it from their own clocks."""
        return f"AtDeadline, check_every={self.check_every}"

    def vote(self, moment: Moment) -> int:
        return int(time.time() >= self.at - self.margin_s)

    def reason(self, vote: int) -> str:
        return f"the deadline is less than {self.margin_s:.0f} s away"


@dataclass(frozen=True)
class OnFile(SavePolicy):
    """Save when the coordinator sees a file, and remove the file.

    Args:
        path: The file; `touch` it to ask for a save.
        stop: Stop the run after the save.
        check_every: Steps between looks.

    Cost: at each look one small collective, and one file system call on the coordinator.
    """

    decided_by = "coordinator"
    path: str | os.PathLike[str]
    stop: bool = field(default=False, kw_only=True)
    check_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_int(self.check_every, name=f"{type(self).__name__}: check_every", least=1)

    def shared(self) -> str:
        """Leave `path` out: only the coordinator's counts."""
        return f"OnFile, stop={self.stop}, check_every={self.check_every}"

    def vote(self, moment: Moment) -> int:
        """Remove the file, because one file asks for one save."""
        del moment
        try:
            Path(self.path).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except OSError as error:
            raise StorageError(
                f"OnFile: {os.fspath(self.path)} cannot be removed ({error.strerror}), so it would "
                f"ask for a save at every step; use a file in a writable directory"
            ) from error
        return 1

    def reason(self, vote: int) -> str:
        return f"{os.fspath(self.path)} was there"


def _restore_in_child() -> None:
    """Leave signals to a forked process, such as a worker of a pool, as without a policy.

    It takes no part in the run, and its owner waits for it to end. A handler of Python that passes
    the signal on is too late for this: it runs when a call into C returns, which may be long.
    """
    for number in signal.valid_signals():
        policy = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(policy, OnSignal):
            policy.reset(number)


os.register_at_fork(after_in_child=_restore_in_child)


class OnSignal(SavePolicy):
    """Save when any rank receives a signal, and stop the run unless `stop=False`.

    The handlers are active from the construction of the checkpointer until its `close`, which
    restores the earlier ones. `with OnSignal() as policy` activates them earlier, for example while
    the model is built, and until the block ends. A repeated signal changes nothing, because
    launchers and schedulers often send SIGTERM twice.

    Args:
        signals: The signals; SIGTERM by default, which schedulers send before they kill.
        stop: Stop the run after the save (preemption). Otherwise each signal asks for a save.
        check_every: Steps between looks.
        notice: Called in a thread as soon as a signal arrives, with its number and the number of
            signals so far: to answer a person, or to exit at the second. A handler cannot do this,
            because Python runs no handler while the main thread waits in a collective.

    Raises:
        ConfigError: A signal does not exist or cannot be caught, or this is not the main thread.

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
                raise ConfigError(
                    f"OnSignal: a process cannot handle signal {number!r}; give numbers of signals "
                    f"that it can, such as signal.SIGTERM"
                )
        check_int(check_every, name="OnSignal: check_every", least=1)
        self._notice = notice
        self._received = 0
        self._pid = 0
        self._earlier: dict[int, Any] = {}
        self._handlers = ExitStack()
        self._is_entered = self._is_in_use = False

    def __repr__(self) -> str:
        """Return the expression that makes it."""
        names = ", ".join(signal_name(each).removeprefix("signal ") for each in self.signals)
        return f"OnSignal({names}, stop={self.stop}, check_every={self.check_every})"

    def __enter__(self) -> Self:
        """Install the handlers before a checkpointer does."""
        self._install()
        self._is_entered = True
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Restore the earlier handlers."""
        self._is_entered = False
        self._restore()

    def start(self) -> None:
        """Install the handlers, unless they are active."""
        if self._is_in_use:
            raise ConfigError(
                f"{self!r} is in use by another checkpointer; make one policy for each"
            )
        if not self._is_entered:
            self._install()
        self._is_in_use = True

    def close(self) -> None:
        """Restore the earlier handlers, unless a `with` block is still open.

        Raises:
            ConfigError: This is not the main thread, which alone can restore them.
        """
        if not self._is_entered:
            self._restore()
        self._is_in_use = False

    def vote(self, moment: Moment) -> int:
        """Return the signal's number: once, or at every look if the run is to stop."""
        del moment
        received = self._received
        if received and not self.stop:
            # Reset only after a signal: the handler may run between the two lines above, and a
            # signal that arrives then must not be lost.
            self._received = 0
        return received

    def reason(self, vote: int) -> str:
        return signal_name(vote)

    def _restore(self) -> None:
        """Restore the earlier handlers, and end the thread; nothing if that is done."""
        if self._earlier:
            self._require_main_thread("close")
        self._handlers.close()
        self._earlier = {}

    def _require_main_thread(self, verb: str) -> None:
        """Raise ConfigError in any other thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                f"{self!r}: only the main thread can handle signals in Python; {verb} the "
                f"checkpointer there"
            )

    def _install(self) -> None:
        """Set the handlers, and start the thread that calls `notice`."""
        self._require_main_thread("make")
        self._received, self._pid = 0, os.getpid()
        # Callbacks run in reverse order: the handlers are restored first, so that no signal is
        # written to a socket that is closed already.
        if self._notice is not None:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            if _CAN_NAME_SENDERS:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._handlers.callback(reader.close)
            self._handlers.callback(writer.close)
            before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            self._handlers.callback(signal.set_wakeup_fd, before)
            threading.Thread(target=self._give_notice, args=(reader,), daemon=True).start()
        for number in self.signals:
            self._earlier[number] = signal.signal(number, self._receive)
            self._handlers.callback(self.reset, number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() == self._pid:
            self._received = number
            return
        # The signal came between the fork and `_restore_in_child`, or C code forked.
        self.reset(number)
        os.kill(os.getpid(), number)

    def reset(self, number: int) -> None:
        """Restore the earlier handler, unless another one was set in the meantime."""
        if signal.getsignal(number) == self._receive:
            earlier = self._earlier[number]
            # None means a handler that was not set from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def _give_notice(self, reader: socket.socket) -> None:
        """Call `notice` for each signal; runs in a thread until the socket is closed.

        The interpreter's C handler writes the number of every signal to the socket at once, and
        does not wait for the main thread. It does so in forked processes, too, which share the
        socket: what they write does not count.
        """
        assert self._notice is not None
        num_signals = 0
        while True:
            try:
                numbers, ancillary, _, _ = reader.recvmsg(64, socket.CMSG_SPACE(_SENDER.size))
            except OSError:
                return
            if not numbers:
                return
            senders = [_SENDER.unpack(data)[0] for _, _, data in ancillary]
            if senders and self._pid not in senders:
                continue
            for number in numbers:
                if number in self.signals:
                    num_signals += 1
                    self._notice(number, num_signals)

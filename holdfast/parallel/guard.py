"""One guard around an operation of all ranks: what goes wrong on one is raised on every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.parallel.control import Control

T = TypeVar("T")
Over = Callable[[Mapping[str, list[bytes]]], bool]


class Guard:
    """One run of an operation that several ranks do together, such as a save or a load.

    The body makes the operation's calls of `Control`; between them it may do anything. Whatever it
    raises on one rank, MemoryError and KeyboardInterrupt included, takes the place of that rank's
    next call: the others meet it in theirs, wherever that is, and all ranks raise one error that
    names the failing ranks, with their messages. All are in step then, and may go on.

    The operation ends with a call of all ranks, so that an error after its last own one is met,
    too. `is_over` is for an operation that does without: it answers, from the answers to `agree` by
    phase, whether this rank has all calls of the operation behind it. An error after that is
    raised here alone, with `is_left` set, and the caller must tell the others in another way.

    `answers`: what `agree` returned, by phase. `is_left`: see above; also after success. `is_told`:
    the last call failed on all ranks, and no rank waits for another.
    """

    def __init__(self, control: Control, operation: str, *, is_over: Over | None = None) -> None:
        self._control = control
        self._operation = operation
        self._end = f"{operation}: end"
        self._has_end = is_over is None
        self._is_over = is_over if is_over is not None else self._is_ended
        self.answers: dict[str, list[bytes]] = {}
        self.is_left = False
        self.is_told = False

    def run(self, body: Callable[[], T]) -> T:
        """The body's result, if no rank failed; else all ranks raise as `Control.agree` does.

        A rank that was interrupted (KeyboardInterrupt, SystemExit) raises that, the others an error
        that says so. Guards may be nested: an error that left an inner one is not told twice.
        A function and not a context manager: between the body of a `with` and its exit is a place
        where an interrupt is met by nobody.
        Cost: without `is_over`, one collective.
        """
        control = self._control
        outer, control.running = control.running, self
        try:
            result = body()
            if self._has_end:
                control.agree(None, phase=self._end)
            self.is_left = True
            return result
        except BaseException as error:
            self._leave(error)
            raise
        finally:
            control.running = outer

    def _leave(self, error: BaseException) -> None:
        """Raise what all ranks raise; return where this rank alone is to raise its own error."""
        control = self._control
        interrupted = not isinstance(error, Exception)
        if self.is_told or control.is_broken:
            control.shared = error
            if not interrupted and not isinstance(error, HoldfastError):
                raise HoldfastError(f"{self._operation}: {type(error).__name__}: {error}") from error
            return
        if self._is_over(self.answers):
            self.is_left = True
            return
        try:
            control.fail(error, phase=self._where())
        except HoldfastError as together:
            control.shared = together
            if interrupted:
                return
            raise

    def _is_ended(self, answers: Mapping[str, list[bytes]]) -> bool:
        return self._end in answers

    def _where(self) -> str:
        last = next(reversed(self.answers), None)
        return self._operation if last is None else f"{self._operation}, after '{last}'"

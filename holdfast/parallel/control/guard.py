"""A guard around an operation of all ranks: an error on one rank is raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from threading import get_ident
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from holdfast.errors import ConfigError, HoldfastError
from holdfast.parallel.control.control import Control, GuardScope

T = TypeVar("T")
P = ParamSpec("P")

_MAX_RUNS = 8
"""The most runs of an operation that is retried."""


class Guard(Generic[T]):
    """An operation that several ranks do together, such as a save or a load.

    The body makes the operation's calls of `Control`; between them it may do anything. Whatever it
    raises on one rank, MemoryError and KeyboardInterrupt included, replaces that rank's next call.
    The others receive it in their next call, wherever that is, and all ranks raise one error that
    names the failing ranks, with their messages. Then all are in sync, and may continue.

    The operation ends with a call of all ranks, so that an error after the body's last call reaches
    the others, too.

    Args:
        control: makes the calls of these ranks.
        operation: its name, for messages and phases.
        is_complete: for an operation without the call at its end: returns, from what `agree`
            returned by phase, True if this rank has made all its calls.
        rescue: takes an error that is raised after that. It must tell the other ranks in another
            way; its result is the operation's.
        undo: called when the operation has failed on all ranks, before the error is raised here.
        retry_if: called on all ranks with the error when a run has failed on all of them: returns
            True to run the body again. It may make calls itself, and must return the same on all
            ranks. Not together with `is_complete`.
    """

    def __init__(
        self,
        control: Control,
        operation: str,
        *,
        is_complete: Callable[[Mapping[str, list[bytes]]], bool] | None = None,
        rescue: Callable[[BaseException], T] | None = None,
        undo: Callable[[], None] | None = None,
        retry_if: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self._control = control
        self._operation = operation
        self._end = f"{operation}: end"
        # Each run of a retried operation has its own end.
        self._has_end = is_complete is None and retry_if is None
        self._is_complete = is_complete if is_complete is not None else self._has_ended
        self._rescue = rescue
        self._undo = undo
        self._retry_if = retry_if
        self._attempt: Guard[T] | None = None
        self.num_done = 0
        """Number of runs that succeeded here."""
        self.num_failed = 0
        """Number of runs that raised here."""
        self._made_all_calls = False
        self._thread = 0
        self._scope = GuardScope()

    @property
    def answers(self) -> Mapping[str, list[bytes]]:
        """Payloads that `Control.agree` returned in the last run, by phase; of a gather none."""
        return self._scope.answers

    def run(self, body: Callable[[], T]) -> T:
        """Return the body's result if no rank failed; else all ranks raise as `Control.agree` does.

        A rank that was interrupted (KeyboardInterrupt, SystemExit) raises that, the others an error
        that names it. Guards may be nested, and one may be run several times, but not within itself
        (ConfigError). An error that left an inner guard on all ranks passes the outer one
        unchanged.

        This is a function and not a context manager, because an interrupt between the body of a
        `with` and its exit would escape the guard.

        Cost: without `is_complete`, one collective. With `retry_if`, one more for each failed run.
        """
        control = self._control
        control.refuse_forked(self._operation)
        outer = control.scope
        self._refuse_within(outer)
        self._thread = get_ident()
        if outer is not None:
            outer.refuse_calls_after_failure()
        depth = 1 if outer is None else outer.depth + 1
        self._scope = scope = GuardScope(guard=self, outer=outer, depth=depth)
        self._made_all_calls, self._attempt = False, None
        try:
            # Within: an interrupt after it, and before the block, would leave the guard open.
            control.scope = scope
            result = body() if self._retry_if is None else self._retried(body, self._retry_if)
            if self._has_end:
                control.agree(None, phase=self._end)
            self._made_all_calls = True
            self.num_done += 1
            return result
        except BaseException as error:
            # The error may have come after this rank's last call: then no other rank waits for it.
            if not (self._made_all_calls or scope.has_failed_on_all or control.is_broken):
                self._made_all_calls = self._is_complete(scope.answers)
            if self._made_all_calls and self._rescue is not None:
                return self._rescue(error)
            self.num_failed += 1
            if self._made_all_calls:  # the others have succeeded: the error is this rank's alone
                raise
            self._fail(error)
            raise
        finally:
            control.scope = outer
            scope.outer = scope.failure = None  # their tracebacks would keep tensors alive

    def _retried(self, body: Callable[[], T], retry_if: Callable[[BaseException], bool]) -> T:
        """Run the body, each time under its own guard, until it succeeds or `retry_if` says no.

        `retry_if` is called under this guard: a rank that is interrupted before its calls ends the
        operation for the others, too.
        """
        for _ in range(_MAX_RUNS - 1):
            self._attempt = attempt = Guard[T](self._control, self._operation)
            try:
                return attempt.run(body)
            except HoldfastError as error:
                if self._control.is_broken or not retry_if(error):
                    raise
        self._attempt = attempt = Guard[T](self._control, self._operation)
        return attempt.run(body)

    def _refuse_within(self, outer: GuardScope | None) -> None:
        """Raise ConfigError if this guard is open, or another one in a second thread."""
        while outer is not None:
            if isinstance(outer.guard, Guard) and outer.guard._thread != get_ident():
                first = outer.guard._operation
                raise ConfigError(
                    f"{self._operation} is called in a second thread while {first} runs in the "
                    f"first. All ranks make the same calls in the same order, so one "
                    f"thread makes them: call both from it, or hold a lock around each. To save "
                    f"while training continues, use save_async."
                )
            if outer.guard is self:
                raise ConfigError(
                    f"{self._operation} is called from within itself, by code that it runs "
                    f"(state_dict, load_state_dict, a codec, merge). Call it before or after."
                )
            outer = outer.outer

    def _fail(self, error: BaseException) -> None:
        """Raise what all ranks raise; return if this rank must raise its own error."""
        control = self._control
        shared = error
        if not (self._scope.has_failed_on_all or control.is_broken):
            last = next(reversed(self._scope.answers), None)
            where = self._operation if last is None else f"{self._operation}, after '{last}'"
            try:
                control.fail(error, phase=where)
            except HoldfastError as raised:
                shared = raised
        elif not isinstance(error, HoldfastError):
            # The others have raised already, or cannot be reached: nothing is sent, but the error
            # is still one of the hierarchy.
            shared = HoldfastError(f"{self._operation}: {type(error).__name__}: {error}")
        control.shared_error = shared
        if self._undo is not None:
            self._undo()
        # An interrupt stays what it is: the caller must see KeyboardInterrupt or SystemExit.
        if shared is not error and isinstance(error, Exception):
            raise shared from error

    def _has_ended(self, answers: Mapping[str, list[bytes]]) -> bool:
        """Return True if this rank has made the last call of the operation, or of its last run."""
        if self._retry_if is not None:
            return self._attempt is not None and self._attempt._made_all_calls
        return self._end in answers


class Guarded(Protocol):
    """An object with a guard for each of its methods that all ranks call together."""

    @property
    def guards(self) -> Mapping[str, Guard[object]]:
        """The guards, by the method's name."""


S = TypeVar("S", bound=Guarded)


def guarded(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Run a method under its object's guard of its name, from its first line to its last."""

    @wraps(method)
    def under_guard(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        guard: Guard[T] = self.guards[method.__name__]  # type: ignore[assignment]
        return guard.run(partial(method, self, *args, **kwargs))

    return under_guard

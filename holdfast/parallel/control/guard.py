"""One guard around an operation of all ranks: what goes wrong on one is raised on every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from holdfast.errors import ConfigError, HoldfastError

if TYPE_CHECKING:
    from holdfast.parallel.control.control import Control

T = TypeVar("T")
P = ParamSpec("P")
Over = Callable[[Mapping[str, list[bytes]]], bool]

_MAX_RUNS = 8
"""How often an operation is begun again at most."""


class Guard(Generic[T]):
    """An operation that several ranks do together, such as a save or a load.

    The body makes the operation's calls of `Control`; between them it may do anything. Whatever it
    raises on one rank, MemoryError and KeyboardInterrupt included, takes the place of that rank's
    next call: the others meet it in theirs, wherever that is, and all ranks raise one error that
    names the failing ranks, with their messages. All are in step then, and may go on.

    The operation ends with a call of all ranks, so that an error after its last own one is met,
    too. `is_over` is for an operation that does without: it answers, from the answers to `agree` by
    phase, whether this rank has all calls of the operation behind it. What is raised after that
    goes to `rescue`, which must let the others know in another way and returns for the operation.
    `undo`: called when the operation has failed on all ranks, before the error is raised here.
    `again`: asked on all ranks when a run has failed on all of them, with the error: whether to
    begin again. It may make calls of its own, and must answer alike on all ranks. Not together with
    `is_over`.

    `answers`: what `agree` returned, by phase. `is_left`: this rank has all calls of the operation
    behind it. `is_told`: the operation failed on all ranks, and no rank waits for another; it can
    make no more calls. `num_done`, `num_failed`: runs by how they ended here, those that went to
    `rescue` apart. `outer`, `depth`: the guard that this one runs in, and how many there are.
    """

    def __init__(
        self,
        control: Control,
        operation: str,
        *,
        is_over: Over | None = None,
        rescue: Callable[[BaseException], T] | None = None,
        undo: Callable[[], None] | None = None,
        again: Callable[[BaseException], bool] | None = None,
    ) -> None:
        self._control = control
        self._operation = operation
        self._end = f"{operation}: end"
        self._has_end = is_over is None and again is None  # else each run has an end of its own
        self._is_over = is_over if is_over is not None else self._is_ended
        self._rescue = rescue
        self._undo = undo
        self._again = again
        self._attempt: Guard[T] | None = None
        self.answers: dict[str, list[bytes]] = {}
        self.is_left = False
        self.is_told = False
        self.num_done = 0
        self.num_failed = 0
        self.outer: Guard[Any] | None = None
        self.depth = 1
        self._failure: BaseException | None = None

    def run(self, body: Callable[[], T]) -> T:
        """The body's result, if no rank failed; else all ranks raise as `Control.agree` does.

        A rank that was interrupted (KeyboardInterrupt, SystemExit) raises that, the others an error
        that says so. Guards may be nested, and one may be run again and again, though not within
        itself (ConfigError). An error that left an inner guard on all ranks leaves the outer one as
        it is.
        A function and not a context manager: between the body of a `with` and its exit is a place
        where an interrupt is met by nobody.
        Cost: without `is_over`, one collective. With `again`, one more for each failed run.
        """
        control = self._control
        outer = control.running
        self._refuse_within(outer)
        if outer is not None:
            outer.refuse_more()
        self.outer, self.depth = outer, 1 if outer is None else outer.depth + 1
        self.answers, self.is_left, self.is_told, self._failure = {}, False, False, None
        self._attempt = None
        control.running = self
        try:
            result = body() if self._again is None else self._attempts(body, self._again)
            if self._has_end:
                control.agree(None, phase=self._end)
            self.is_left = True
            self.num_done += 1
            return result
        except BaseException as error:
            if not (self.is_left or self.is_told or control.is_broken):
                self.is_left = self._is_over(self.answers)
            if self.is_left and self._rescue is not None:
                return self._rescue(error)
            self.num_failed += 1
            if self.is_left:
                raise
            self._fail(error)
            raise
        finally:
            control.running = self.outer
            self.outer, self._failure = None, None

    def _attempts(self, body: Callable[[], T], again: Callable[[BaseException], bool]) -> T:
        """The body under a guard of its own, until it succeeds or is not to begin again.

        The question is asked under this guard: a rank that cannot ask it any more, because it was
        interrupted, say, ends it for the others, too.
        """
        for _ in range(_MAX_RUNS - 1):
            self._attempt = attempt = Guard[T](self._control, self._operation)
            try:
                return attempt.run(body)
            except HoldfastError as error:
                if self._control.is_broken or not again(error):
                    raise
        self._attempt = attempt = Guard[T](self._control, self._operation)
        return attempt.run(body)

    def _refuse_within(self, outer: Guard[Any] | None) -> None:
        while outer is not None:
            if outer is self:
                raise ConfigError(
                    f"{self._operation} is called from within itself, by code that it runs "
                    f"(state_dict, load_state_dict, a codec, merge); call it before or after"
                )
            outer = outer.outer

    def refuse_more(self) -> None:
        """Raise the failure again, if the operation has failed on all ranks."""
        if self.is_told and self._failure is not None:
            raise self._failure

    def remember(self, error: BaseException) -> None:
        """Keep what a call under this guard, or one around it, has failed with on all ranks."""
        guard: Guard[Any] | None = self
        while guard is not None and guard.is_told:
            guard._failure = guard._failure or error
            guard = guard.outer

    def _fail(self, error: BaseException) -> None:
        """Raise what all ranks raise; return where this rank is to raise its own error."""
        control = self._control
        together = error
        if not (self.is_told or control.is_broken):
            try:
                control.fail(error, phase=self._where())
            except HoldfastError as caught:
                together = caught
        elif not isinstance(error, HoldfastError):
            together = HoldfastError(f"{self._operation}: {type(error).__name__}: {error}")
        control.shared = together
        if self._undo is not None:
            self._undo()
        if together is not error and isinstance(error, Exception):
            raise together from error

    def _is_ended(self, answers: Mapping[str, list[bytes]]) -> bool:
        if self._again is not None:
            return self._attempt is not None and self._attempt.is_left
        return self._end in answers

    def _where(self) -> str:
        last = next(reversed(self.answers), None)
        return self._operation if last is None else f"{self._operation}, after '{last}'"


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

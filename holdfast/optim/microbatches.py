"""Microbatches of a step: an error in one of them on one rank is raised on all ranks."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from holdfast.errors import ConfigError, DeadlineError, HoldfastError
from holdfast.optim import collectives
from holdfast.optim.collectives import Pending
from holdfast.parallel import ModuleGroups, ProcessGroups
from holdfast.parallel.ranks import shorten_ranks

_PHASE = "microbatch"
_MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes along which a model may have collectives of its own in forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The collectives that a rank has launched on one communicator since it was created."""

    ranks: Sequence[int]
    """Members of the communicator."""
    count: int


class MicrobatchTaker(ABC):
    """Takes the gradients of one module's microbatches on one rank."""

    _is_interrupted = False
    _is_entry = False
    _reason_closed = ""

    @abstractmethod
    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around forward and backward of one microbatch. May be collective."""

    def close_microbatch(self) -> None:  # noqa: B027
        """Note that the last microbatch has ended on all ranks."""

    def join_microbatch(self) -> Sequence[Pending]:
        """Launch the remaining collectives of a microbatch that failed on this rank.

        Other ranks may wait in them. Returns those to be waited for, once all ranks know.
        """
        return ()

    def join_reductions(self) -> None:  # noqa: B027
        """Make the remaining collectives of a step up to its update, after it failed on this rank.

        A second call makes none.
        """

    def launched(self) -> Mapping[str, Launched]:
        """Return, by communicator, what ranks compare after a failure; empty if nothing can part.

        A kind whose `join_microbatch` cannot know every collective of the other ranks says here how
        many it has made.
        """
        return {}

    def close_communicators(self, reason: str) -> None:
        """Refuse everything from now on: the ranks' collectives do not match any more."""
        self._reason_closed = reason

    def become_entry(self) -> None:
        """Leave it to the optimizer of several modules to raise an error on all ranks.

        The ranks of one module meet the others in the step of all modules, and never alone.
        """
        self._is_entry = True

    @contextlib.contextmanager
    def entered_alone(self, *, is_last: bool) -> Iterator[None]:
        """Enter around a microbatch of an entry; an error is this rank's alone."""
        self.check_ended()
        with self.take_microbatch(is_last=is_last):
            try:
                yield
            except BaseException:
                self.interrupt()
                raise

    def interrupt(self) -> None:
        """Refuse microbatches and steps until `drop_gradients`: some gradients are missing."""
        self._is_interrupted = True

    def check_ended(self) -> None:
        """Raise ConfigError if an error ended a microbatch, and nothing was dropped since."""
        if self._reason_closed:
            raise ConfigError(self._reason_closed)
        if self._is_interrupted:
            raise ConfigError(
                "an error ended the last microbatch, so the gradients of this step are "
                "incomplete; call drop_gradients() on all ranks, and repeat the step"
            )


def compare_launched(takers: Mapping[str, MicrobatchTaker], groups: ProcessGroups) -> None:
    """Close the communicators of modules on which ranks have launched different collectives.

    The next one would be answered by another one's bytes. Collective, after a failure.
    """
    mine = {
        _key(module, name): each.count
        for module, taker in takers.items()
        for name, each in taker.launched().items()
    }
    with groups.control.in_step():
        answers = groups.control.all_gather(json.dumps(mine).encode(), phase="collectives")
    by_rank = dict(zip(groups.control.ranks, map(json.loads, answers), strict=True))
    for module, taker in takers.items():
        for name, each in taker.launched().items():
            key = _key(module, name)
            others = [rank for rank in each.ranks if by_rank[rank].get(key) != each.count]
            if others:
                taker.close_communicators(
                    f"an error left the ranks in the middle of different collectives of "
                    f"{name!r} ({each.count} on rank {groups.rank}, another number on ranks "
                    f"{shorten_ranks(others)}). Create the groups and the model again, and load "
                    f"the last checkpoint"
                )


class Microbatches:
    """The microbatches of all modules of this rank.

    An exception that leaves one on some ranks ends the step on all, at the end of that microbatch:

    1. The rank that failed launches the collectives in which others may wait for it.
    2. It sends its error instead of the agreement that ends every microbatch; if modules are
       bridged, to the ranks that wait in a bridge, too. All ranks raise.
    3. All compare what they have launched, and refuse everything up to `drop_gradients`.

    The agreement is over `control`, so it waits for other ranks and never for a device. With
    pipeline stages there is none: an error is raised where it occurred, and the other ranks name
    the one that left in the schedule.
    """

    def __init__(
        self,
        takers: Mapping[str, MicrobatchTaker],
        groups: ProcessGroups,
        *,
        bridged: ModuleGroups | None = None,
    ) -> None:
        self._takers = takers
        self._groups = groups
        self._bridged = bridged
        self._is_known = False
        """True while an error would come from the agreement at the end, on all ranks."""
        # Inside of a pipeline's schedule stages enter and leave their microbatches at other times.
        self._agrees = bridged is not None or groups.layout.pp == 1
        self._may_wait_in_model = any(groups.layout.size(axis) > 1 for axis in _MODEL_AXES)

    @contextlib.contextmanager
    def enter(self, *, is_last: bool) -> Iterator[None]:
        """Enter around one microbatch of all modules; see `Stepper.microbatch`."""
        # A wrong call, such as a microbatch within another one, is not an error of a microbatch.
        with contextlib.ExitStack() as entering:
            for taker in self._takers.values():
                taker.check_ended()
                entering.enter_context(taker.take_microbatch(is_last=is_last))
            contexts = entering.pop_all()
        try:
            with contexts:
                yield
            if self._agrees:
                self._agree()
            for taker in self._takers.values():
                taker.close_microbatch()
        except BaseException as error:
            for taker in self._takers.values():
                taker.interrupt()
            if isinstance(error, Exception):  # an interrupt leaves at once
                self._end_on_all(error)
            raise

    def _agree(self) -> None:
        """Wait for all ranks; raise if one has failed."""
        self._is_known = True
        with self._groups.control.in_step():
            self._groups.control.agree(None, phase=_PHASE)
        self._is_known = False

    def _end_on_all(self, error: Exception) -> None:
        """Raise on all ranks; return if this one keeps its own error."""
        is_known, self._is_known = self._is_known, False
        control = self._groups.control
        if is_known and control.is_out_of_sync:
            # Some ranks are not in a microbatch, so none compares what this one has launched.
            for taker in self._takers.values():
                taker.close_communicators(
                    f"the last microbatch was not one of all ranks ({error}) Create the groups and "
                    f"the model again, and load the last checkpoint"
                )
            return
        if control.is_broken or control.size == 1:
            return
        lost = collectives.lost_to_others(error)
        if lost is None and not self._agrees:
            return  # the other stages wait for this one in the schedule, and see it leave
        failure = lost or error
        if isinstance(failure, DeadlineError) and failure is error and self._bridged is not None:
            return  # the others wait for the same rank
        works: list[Pending] = []
        for taker in self._takers.values():
            try:
                works += taker.join_microbatch()
            except Exception as second:
                error.add_note(f"This rank could not join the others' collectives: {second!r}")
        shared = self._fail(failure, is_known=is_known)
        if isinstance(shared, DeadlineError) or control.is_broken:
            if shared is not failure and failure is error and not isinstance(error, HoldfastError):
                error.add_note(f"Not all other ranks received it: {shared}")
                return
            raise shared from error
        for work in works:
            with contextlib.suppress(DeadlineError):  # the comparison tells
                collectives.wait(work, "the rest of a microbatch that failed on this rank")
        compare_launched(self._takers, self._groups)
        if shared is not error and (failure is not error or isinstance(error, HoldfastError)):
            raise shared from error

    def _fail(self, error: Exception, *, is_known: bool) -> BaseException:
        """Let all ranks raise, wherever they wait, and return what they raise."""
        control = self._groups.control
        # This rank does not wait as long as those do that may wait for it in a collective of the
        # model: a launcher ends the job once this process has ended.
        with contextlib.nullcontext() if self._may_wait_in_model else control.in_step():
            if self._bridged is not None:
                shared = self._bridged.fail(error, phase=_PHASE, is_known=is_known)
                self._bridged.crossings.failure = "a microbatch has failed"
                return shared
            if is_known:
                return error
            try:
                control.fail(error, phase=_PHASE)
            except HoldfastError as raised:
                return raised


def _key(module: str, communicator: str) -> str:
    return f"{module}: {communicator}" if module else communicator

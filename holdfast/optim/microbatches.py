"""Microbatches of a step: an error in one of them on one rank is raised on all ranks."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

from holdfast.errors import ConfigError, DeadlineError, HoldfastError
from holdfast.optim import collectives
from holdfast.optim.norms import LayoutSum
from holdfast.optim.step_sum import Contribution, StepSum, StepSums
from holdfast.parallel import Layout, ModuleGroups, ProcessGroups
from holdfast.parallel.groups.crossings import Edge
from holdfast.parallel.ranks import shorten_ranks

_PHASE, _MICROBATCH = "optimizer: gradients", "microbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The collectives that a rank has launched on one communicator since it was created."""

    ranks: Sequence[int]
    """Members of the communicator."""
    count: int


class MicrobatchTaker(ABC):
    """Takes the gradients of one module's microbatches on one rank."""

    _is_interrupted = False
    _reason_closed = ""

    @abstractmethod
    def take_microbatch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Enter around forward and backward of one microbatch. May be collective."""

    @property
    def communicates_each_microbatch(self) -> bool:
        """True if each microbatch makes collectives, not only the last one of a step."""
        return False

    def join_microbatch(self) -> None:  # noqa: B027
        """Make the remaining collectives of a microbatch that failed on this rank.

        The other ranks meet it at the end of that microbatch.
        """

    def join_reductions(self) -> None:  # noqa: B027
        """Make the remaining collectives of this step up to the update, after this rank failed.

        The other ranks meet it in the step. A second call makes none.
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


class Meeting:
    """The one sum in which all ranks meet: at the end of a step, or of a microbatch.

    Whatever a rank does next, its next sum has the same form, so a rank that failed in a microbatch
    meets the others wherever they come to their next sum, and all ranks raise there.

    Args:
        groups: of all ranks of all modules.
        layouts: of all modules, in one order on all ranks.
        loss_module: whose ranks count tokens.
        edges: between the modules, along which gradients come.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        layouts: Mapping[str, Layout],
        *,
        loss_module: str | None,
        edges: Sequence[Edge] = (),
    ) -> None:
        self._groups = groups
        ranks = groups.layout.ranks
        self.sum = StepSum(layouts, ranks=ranks, loss_module=loss_module, edges=edges)
        self.total = LayoutSum(groups)

    def sum_up(
        self,
        mine: Contribution,
        failure: Exception | None,
        *,
        takers: Mapping[str, MicrobatchTaker],
    ) -> StepSums:
        """Return the sum of all ranks' contributions; raise on all ranks if any rank failed."""
        if isinstance(failure, DeadlineError):
            # The others have waited for the same rank: a second wait, in the sum, helps no rank.
            self.fail(failure)
        if failure is not None:
            mine = Contribution(has_failed=True)
        values = self.sum.pack(mine, rank=self._groups.rank)
        try:
            total = self.total(values, what="the sum by which all ranks decide a step")
        except DeadlineError as error:
            # Only `control` knows which ranks are missing, and why the others failed.
            self.fail(failure or error)
        sums = self.sum.read(total)
        if sums.failed:
            for taker in takers.values():
                taker.interrupt()  # on all ranks, so that all start again from the same
            self._compare_launched(takers)
            self.agree(failure, phase=_PHASE)
        return sums

    def agree(self, failure: Exception | None, *, phase: str, payload: bytes = b"") -> list[bytes]:
        """Agree with all ranks; one may be as late as in the collectives of the step."""
        with self._groups.control.in_step():
            return self._groups.control.agree(failure, phase=phase, payload=payload)

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error on all ranks without the sum, over which ranks may not meet."""
        with self._groups.control.in_step():
            self._groups.control.fail(error, phase=_PHASE)

    @property
    def is_broken(self) -> bool:
        """True if no rank can be told of anything any more."""
        return self._groups.control.is_broken

    def _compare_launched(self, takers: Mapping[str, MicrobatchTaker]) -> None:
        """Close the communicators of modules on which ranks have launched different collectives.

        The next one would be answered by another one's bytes.
        """
        control = self._groups.control
        mine = {
            _key(module, name): each.count
            for module, taker in takers.items()
            for name, each in taker.launched().items()
        }
        payload = json.dumps(mine).encode()
        answers = self.agree(None, phase="optimizer: collectives", payload=payload)
        by_rank = dict(zip(control.ranks, map(json.loads, answers), strict=True))
        for module, taker in takers.items():
            for name, each in taker.launched().items():
                key = _key(module, name)
                others = [rank for rank in each.ranks if by_rank[rank].get(key) != each.count]
                if others:
                    taker.close_communicators(
                        f"an error left the ranks in the middle of different collectives of "
                        f"{name!r} ({each.count} on rank {self._groups.rank}, another number on "
                        f"ranks {shorten_ranks(others)}). Create the groups and the model again, "
                        f"and load the last checkpoint"
                    )


class Microbatches:
    """The microbatches of all modules of this rank.

    An exception that leaves one on some ranks ends the step on all. A rank that fails makes the
    collectives that the others still make in this microbatch, and meets them in their next sum: at
    the end of this microbatch, if some module communicates in each one, otherwise in the step.

    If modules are bridged the others may wait for activations or gradients of the rank that failed.
    Then all ranks agree at the end of each microbatch, and a failure is sent wherever they wait.
    """

    def __init__(
        self,
        takers: Mapping[str, MicrobatchTaker],
        meeting: Meeting,
        *,
        communicates: bool | None = None,
        bridged: ModuleGroups | None = None,
    ) -> None:
        self._takers = takers
        self._meeting = meeting
        self._bridged = bridged
        if communicates is None:
            communicates = any(each.communicates_each_microbatch for each in takers.values())
        self._communicates = communicates
        """Equal on all ranks."""
        self._is_known = False
        """True while an error would come from the agreement at the end, on all ranks."""

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
                if self._bridged is not None:
                    # Inside, so that no rank has reduced what the failed one has not.
                    self._agree_over_bridges(self._bridged)
        except BaseException as error:
            for taker in self._takers.values():
                taker.interrupt()
            if self._bridged is not None:
                self._end_over_bridges(error, self._bridged)
            elif isinstance(error, Exception):  # an interrupt leaves at once
                self._end_on_all(error, meets=self._communicates and not is_last)
            raise
        if self._communicates and not is_last and self._bridged is None:
            self._meet()

    def _agree_over_bridges(self, groups: ModuleGroups) -> None:
        """Wait for all ranks; raise if one has failed."""
        self._is_known = True
        with groups.control.in_step():
            groups.control.agree(None, phase=_MICROBATCH)
        self._is_known = False

    def _end_over_bridges(self, error: BaseException, groups: ModuleGroups) -> None:
        """Raise an error on all ranks, in whichever bridge each waits, and join the reductions."""
        is_known, self._is_known = self._is_known, False
        if isinstance(error, DeadlineError):
            return  # the others wait for the same rank
        shared = groups.fail(error, phase=_MICROBATCH, is_known=is_known)
        groups.crossings.failure = "a microbatch has failed"
        for taker in self._takers.values():
            with contextlib.suppress(Exception):  # the error of the microbatch says more
                taker.join_reductions()
        if shared is not error and isinstance(error, HoldfastError):
            raise shared from error

    def _meet(self) -> None:
        """Raise on this rank, too, if an error ended the microbatch on another one."""
        self._meeting.sum_up(Contribution(), None, takers=self._takers)

    def _end_on_all(self, error: Exception, *, meets: bool) -> None:
        """Let all ranks know of an error of this one; raise if others are late instead."""
        if self._meeting.is_broken:
            return
        late = collectives.lost_to_others(error)
        if late is not None:
            self._meeting.fail(late)
        self._report(error, meets=meets)

    def _report(self, error: Exception, *, meets: bool) -> None:
        """Raise an error of this rank on all others; here it keeps its type."""
        try:
            try:
                for taker in self._takers.values():
                    (taker.join_microbatch if meets else taker.join_reductions)()
            except DeadlineError:
                self._meeting.fail(error)  # the communicators are broken: no sum over them
            self._meeting.sum_up(Contribution(), error, takers=self._takers)
        except DeadlineError as late:
            error.add_note(f"Not all other ranks could be told of it: {late}")
        except HoldfastError:
            pass  # what the others raise
        except Exception as second:
            error.add_note(
                f"The other ranks wait in vain, as this one cannot join them: {second!r}"
            )


def _key(module: str, communicator: str) -> str:
    return f"{module}: {communicator}" if module else communicator

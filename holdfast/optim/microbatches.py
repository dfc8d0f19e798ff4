"""Microbatches of a step: an error in one of them on one rank is raised on all ranks."""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.errors import ConfigError, DeadlineError, HoldfastError, PlanError, shorten_ranks
from holdfast.optim import collectives
from holdfast.optim.collectives import Pending
from holdfast.parallel import Control, Layout, ModuleGroups, ProcessGroups
from holdfast.parallel.control.control import Note
from holdfast.parallel.groups.launch_order import LaunchProgress
from holdfast.parallel.groups.order_comparison import (
    change_of_some,
    compare_orders,
    missing_launch,
    mixed_orders,
    pack_orders,
)

_PHASE = "microbatch"
_OUTSIDE = "outside of microbatches"
_COMPARE_AFTER_S = 1.0
"""A wait that has lasted so long looks whether other ranks have launched something else."""
START_AGAIN = "Create the groups and the model again, and load the last checkpoint"
STEP_LOST = (
    f"an interrupt ended the last step on this rank alone, so ranks may hold parameters of "
    f"different steps. {START_AGAIN}"
)
_MODEL_AXES = ("tp", "cp", "pp", "ep")
"""Axes along which a model may have collectives of its own in forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What ranks change alike, for which this one waits until the others have."""

    key: str
    """Of the place in the program, equal on all ranks."""
    digest: int
    """Of what it is changed to."""
    what: str
    """In words."""


class Look(Protocol):
    """Looks at other ranks while this one waits for them."""

    def __call__(self, waited_s: float, change: Change | None = None) -> None:
        """Raise if what this one waits for will not come.

        Args:
            waited_s: seconds that the wait has lasted.
            change: what it waits for; None if that is in `progress`.
        """


Description = tuple[str, int, str]
"""A collective as ranks compare it: operation, elements that a rank gives, and their dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The collectives that a rank has launched on one communicator."""

    ranks: Sequence[int]
    """Members of the communicator."""
    count: int
    """Number of launches since it was created."""
    recent: Sequence[Description] = ()
    """The last of them, those of this microbatch, if `launch_missing` can repeat them."""


class MicrobatchTaker(ABC):
    """Takes the gradients of one module's microbatches on one rank."""

    _is_interrupted = False
    _is_alone = False
    _reason_closed = _reason_lost = ""
    _tell: Callable[[], None] | None = None

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

        A kind whose `join_microbatch` cannot know every collective of the other ranks says here
        which it has made.
        """
        return {}

    def orders(self) -> Mapping[str, int]:
        """Return, by communicator, a digest of the order of launches; equal on all of its ranks.

        For a kind whose launches follow the code of the model, which may differ between ranks.
        """
        return {}

    def launches_on(self, communicator: str) -> Sequence[str]:
        """Return what `orders` is of, in words."""
        del communicator
        return ()

    def end_comparison(self, *, is_same: bool) -> None:
        """Note that ranks have compared `orders`, each of its own."""
        del is_same

    def launch_missing(self, missing: Mapping[str, Sequence[Description]]) -> Sequence[Pending]:
        """Launch collectives that other ranks have launched and this one has not, by communicator.

        After it all ranks have launched the same. Returns all that are not complete, own ones, too.
        """
        del missing
        return ()

    def progress(self) -> Sequence[LaunchProgress]:
        """Return how far the launches of `orders` have come, of which ranks look at each other's.

        For a kind that calls what `watch_others` gives it.
        """
        return ()

    def watch_others(self, look: Look | None) -> Look | None:
        """Call `look` from now on while waits for other ranks last, and return what was; or None.

        It raises if another rank has failed in this microbatch. A kind needs it whose
        `join_microbatch` does not know every collective of the other ranks.
        """
        del look
        return None

    def close_communicators(self, reason: str) -> None:
        """Refuse everything from now on: the ranks' collectives do not match any more."""
        self._reason_closed = reason

    def lose_step(self) -> None:
        """Refuse everything from now on, saves too: an interrupt has ended a step midway."""
        self._reason_lost = STEP_LOST
        self.close_communicators(STEP_LOST)

    @property
    def has_lost_communicators(self) -> bool:
        """True if `close_communicators` was called: nothing may be launched any more."""
        return bool(self._reason_closed)

    def interrupt(self, *, is_alone: bool = False, tell: Callable[[], None] | None = None) -> None:
        """Refuse microbatches and steps until `drop_gradients`: some gradients are missing.

        Args:
            is_alone: True if other ranks do not know of the error.
            tell: lets them know, and calls this again.
        """
        self._is_interrupted, self._is_alone, self._tell = True, is_alone, tell

    def tell_others(self) -> None:
        """Let other ranks raise what has left a microbatch on this one alone, if they wait for it.

        Before gradients are dropped: the next microbatch here would end with the one that they are
        in. Collective then.

        Raises:
            DeadlineError: Some of them have not come to the end of that microbatch.
        """
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    @property
    def is_interrupted_alone(self) -> bool:
        """True after an error that other ranks learn of in the step, which they make as usual."""
        return self._is_interrupted and self._is_alone

    def check_ended(self) -> None:
        """Raise ConfigError if an error ended a microbatch, and nothing was dropped since."""
        if self._reason_closed:
            raise ConfigError(self._reason_closed)
        if self._is_interrupted:
            raise ConfigError(
                "an error ended the last microbatch, so the gradients of this step are "
                "incomplete; call drop_gradients() on all ranks, and repeat the step"
            )


@contextlib.contextmanager
def ended_comparison(takers: Iterable[MicrobatchTaker]) -> Iterator[None]:
    """Enter around a comparison of orders; a PlanError is the answer of all ranks."""
    try:
        yield
    except PlanError:
        for taker in takers:
            taker.end_comparison(is_same=False)
        raise
    for taker in takers:
        taker.end_comparison(is_same=True)


def compare_launched(
    takers: Mapping[str, MicrobatchTaker], control: Control, *, completes: bool = False
) -> None:
    """Close the communicators of modules on which ranks have launched different collectives.

    The next one would be answered by another one's bytes. Collective, after a failure.

    Args:
        takers: by module.
        control: of all ranks of all modules.
        completes: launch what this rank lacks, from zeros, where ranks differ only in how far they
            have come in a microbatch. Its gradients must be dropped afterwards, and whole
            parameters gathered again.
    """
    mine = {
        _key(module, name): (each.count, each.recent)
        for module, taker in takers.items()
        for name, each in taker.launched().items()
    }
    with control.in_step():
        answers = control.all_gather(json.dumps(mine).encode(), phase="collectives")
    by_rank = dict(zip(control.ranks, map(json.loads, answers), strict=True))
    for module, taker in takers.items():
        missing: dict[str, Sequence[Description]] = {}
        for name, each in taker.launched().items():
            theirs = {rank: by_rank[rank].get(_key(module, name), (-1, ())) for rank in each.ranks}
            rest = _missing(each, [*theirs.values()]) if completes else None
            if rest is not None:
                missing[name] = rest
                continue
            own = by_rank[control.rank][_key(module, name)]
            others = [
                rank
                for rank, their in theirs.items()
                if their[0] != each.count or (completes and their != own)
            ]
            if others:
                taker.close_communicators(
                    f"an error left the ranks in the middle of different collectives of "
                    f"{name!r} ({each.count} on rank {control.rank}, others on ranks "
                    f"{shorten_ranks(others)}). {START_AGAIN}"
                )
        if not completes:
            continue
        works = taker.launch_missing(missing)
        # Those on a communicator that is closed have met others, and may never be complete.
        for work in () if taker.has_lost_communicators else works:
            try:
                collectives.wait(work, "the rest of a microbatch that failed on some rank")
            except DeadlineError as error:
                taker.close_communicators(f"{error} {START_AGAIN}")


def _missing(
    own: Launched, all_ranks: Sequence[tuple[int, Sequence[Sequence[object]]]]
) -> Sequence[Description] | None:
    """Return what this rank has not launched and others have; None if one cannot come to match.

    Every rank launches the same in the same order, so each one's launches start those of the rank
    that came furthest.
    """
    before = own.count - len(own.recent)
    launched = [[*map(tuple, recent)] for _, recent in all_ranks]
    furthest = max(launched, key=len)
    for (count, _), recent in zip(all_ranks, launched, strict=True):
        if count - len(recent) != before or furthest[: len(recent)] != recent:
            return None
    rest: Any = furthest[len(own.recent) :]
    return [*rest]


class Microbatches:
    """The microbatches of all modules of this rank.

    An exception that leaves one on some ranks ends the step on all, at the end of that microbatch:

    1. The rank that failed launches the collectives in which others may wait for it, as far as it
       knows them, and announces its failure. Ranks that wait in others look, and leave.
    2. It sends its error instead of the agreement that ends every microbatch; if modules are
       bridged, to the ranks that wait in a bridge, too. All ranks raise.
    3. All compare what they have launched, complete it so that communicators can be used again, and
       refuse everything up to `drop_gradients`.

    The agreement is over `control`, so it waits for other ranks and never for a device. With
    pipeline stages there is none: an error is raised where it occurred, and the other ranks name
    the one that left in the schedule.

    A call that is refused before its microbatch begins is one error of all ranks, too, if they have
    different modules: those whose modules refuse nothing are inside by then.

    An interrupt (`KeyboardInterrupt`, `SystemExit`) leaves at once, on its own rank: who has asked
    for it may want the process to end. What is described above follows when that rank drops its
    gradients, or comes to a step.

    Args:
        takers: of the modules of this rank that are trained.
        groups: of all ranks of all modules.
        are_alike: True if all ranks have the same modules, and so refuse the same calls.
        bridged: the groups of modules with edges between them, whose ranks may wait in a bridge.
        layouts: of all modules of this rank, in whose collectives others may wait for it; that of
            `groups` if there is one module.
    """

    def __init__(
        self,
        takers: Mapping[str, MicrobatchTaker],
        groups: ProcessGroups,
        *,
        are_alike: bool = True,
        bridged: ModuleGroups | None = None,
        layouts: Iterable[Layout] | None = None,
    ) -> None:
        self._takers = takers
        self._groups = groups
        self._are_alike = are_alike
        self._bridged = bridged
        self._is_inside = False
        """True in a microbatch."""
        self._has_ended = False
        """True if all ranks raise, and this one is leaving a microbatch within another one."""
        self._is_known = False
        """True while an error would come from the agreement at the end, on all ranks."""
        self._is_victim = False
        """True if this rank has left its waits because another one has failed."""
        self._change: Change | None = None
        """What this rank waits for as it looks at others."""
        # Inside of a pipeline's schedule stages enter and leave their microbatches at other times.
        # Those of several modules are around all schedules; the layout of all ranks has no stages.
        self._agrees = groups.layout.pp == 1
        self._may_wait_in_model = any(
            layout.size(axis) > 1 for layout in (layouts or [groups.layout]) for axis in _MODEL_AXES
        )

    @contextlib.contextmanager
    def enter(self, *, is_last: bool) -> Iterator[None]:
        """Enter around one microbatch of all modules; see `Stepper.microbatch`."""
        if self._groups.control.reason_cut:
            raise ConfigError(self._groups.control.reason_cut)
        is_inner, self._is_inside = self._is_inside, True
        try:
            try:
                contexts = self._entered(is_last=is_last)
            except Exception as refusal:
                lost = any(taker.has_lost_communicators for taker in self._takers.values())
                if not self._are_alike and not lost:
                    self._end(refusal)
                raise
            except BaseException as interrupt:
                # The other ranks are inside by then, so this one has to know what they launch.
                known = contextlib.suppress(HoldfastError, type(interrupt))
                with known, self._entered(is_last=is_last):
                    raise interrupt
                self._end(interrupt)
                raise
            try:
                with self._watching(), contexts:
                    yield
                if self._agrees:
                    self._agree()
                for taker in self._takers.values():
                    taker.close_microbatch()
            except BaseException as error:
                self._end(error)
                raise
        finally:
            self._is_inside = is_inner
            self._has_ended = self._has_ended and is_inner

    def _entered(self, *, is_last: bool) -> contextlib.ExitStack:
        """Enter the microbatch of each module, or none; a refusal is not an error in one."""
        with contextlib.ExitStack() as entering:
            for taker in self._takers.values():
                taker.check_ended()
                entering.enter_context(taker.take_microbatch(is_last=is_last))
            return entering.pop_all()

    def _end(self, error: BaseException) -> None:
        """End the step on all ranks; return if this one keeps its own error."""
        if self._has_ended:
            return
        if isinstance(error, Exception):
            for taker in self._takers.values():
                taker.interrupt(is_alone=not self._agrees)
            self._has_ended = True
            self._end_on_all(error)
            return
        # Other ranks may have taken its agreement, and wait in their next one.
        self._is_known = False
        if self._agrees:
            self._groups.untold_interrupts.setdefault(self, error)
            if self._bridged is not None:
                self._bridged.control.leave_note(
                    left=f"{type(error).__name__} has left a microbatch"
                )
        for taker in self._takers.values():
            taker.interrupt(is_alone=True, tell=self._tell_all if self._agrees else None)

    def _tell_all(self) -> None:
        """Let other ranks raise the interrupts that have left microbatches on this one."""
        untold = self._groups.untold_interrupts
        while untold:
            microbatches = next(iter(untold))
            error = untold.pop(microbatches)
            assert isinstance(microbatches, Microbatches)
            microbatches.tell_interrupt(error)

    def tell_interrupt(self, error: BaseException) -> None:
        """Let other ranks raise an interrupt that has left a microbatch on this one.

        Raises:
            DeadlineError: They have not come to its end.
        """
        try:
            self._end_on_all(error)
        except HoldfastError as raised:
            if isinstance(raised, DeadlineError):
                raise
        if not self._groups.loop_control.is_broken:
            for taker in self._takers.values():
                taker.interrupt()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Let waits for other ranks end if one has failed."""
        self._is_victim = False
        if not self._agrees or self._groups.loop_control.size == 1:
            yield
            return
        self._groups.loop_control.noted.add(self)
        before = [taker.watch_others(self._look) for taker in self._takers.values()]
        try:
            yield
        finally:
            for taker, look in zip(self._takers.values(), before, strict=True):
                taker.watch_others(look)

    def watch_outside(self) -> None:
        """Let waits outside of microbatches end, too, if what they wait for will never come."""
        if self._agrees and self._groups.loop_control.size > 1:
            self._groups.loop_control.noted.add(self)
            for taker in self._takers.values():
                taker.watch_others(self._look_outside)

    def _look_outside(self, waited_s: float, change: Change | None = None) -> None:
        """Raise on all ranks if what this one waits in will never come; nothing completes it.

        Another rank may have failed in the microbatch that follows here: that ends no evaluation.
        """
        if waited_s < _COMPARE_AFTER_S:
            return
        self._is_victim = False
        try:
            rank = self._groups.loop_control.failing_rank(of=_OUTSIDE)
            if rank is not None:
                self._is_victim = True
                raise PlanError(f"rank {rank} has failed {_OUTSIDE}")
            self._compare_progress(change)
        except PlanError as error:
            shared = self._end_outside(error)
            if isinstance(shared, PlanError):  # other ranks may know more
                raise shared from error
            raise

    def _end_outside(self, error: PlanError) -> BaseException:
        """Let all ranks raise what ended a wait outside of microbatches; return what they raise."""
        control = self._groups.loop_control
        if self._is_victim:
            control.shared_error = error  # the message of all ranks is that of the rank that failed
        else:
            control.announce_failure(of=_OUTSIDE)
        shared = self._fail(error, is_known=False)
        if not control.is_broken and not control.is_out_of_sync:
            compare_launched(self._takers, control, completes=True)
        for taker in self._takers.values():
            taker.close_communicators(
                f"a forward or a backward outside of microbatches waited for launches that other "
                f"ranks do not make. {START_AGAIN}"
            )
        return shared

    def _look(self, waited_s: float, change: Change | None = None) -> None:
        """Raise HoldfastError if another rank has announced that it has failed.

        After a while also if what this rank waits in has met another collective: such waits end
        with the limit of the communicator, which is long, and name none.
        """
        rank = self._groups.loop_control.failing_rank(of=_PHASE)
        if rank is not None:
            self._is_victim = True
            raise HoldfastError(
                f"rank {rank} has failed in this microbatch", details={"failed_ranks": [rank]}
            )
        if waited_s >= _COMPARE_AFTER_S:
            self._compare_progress(change)

    def _compare_progress(self, change: Change | None) -> None:
        """Raise PlanError if launches met others on the rank before or behind this one, or nothing.

        Nothing will come from a rank that waits for this one in a call of all ranks. Only ranks
        that wait long leave a note, and of a communicator each looks at its neighbours: if any two
        differ, two neighbours do.

        Cost: a request to the store, and at most two for each neighbour.
        """
        control = self._groups.loop_control
        self._change = change
        control.leave_note()
        progress = self._progress()
        notes: dict[int, Note] = {}
        for each in progress:
            place = each.ranks.index(control.rank)
            for step in (-1, 1):
                rank = each.ranks[(place + step) % len(each.ranks)]
                if rank not in notes:
                    notes[rank] = control.note_of(rank)
                theirs = notes[rank].places.get(each.key)
                if theirs is not None and each.has_met_others(theirs):
                    first = each.first_met(theirs)
                    pair = first and dict(sorted(zip((control.rank, rank), first, strict=True)))
                    raise mixed_orders(pair, ranks=each.ranks)
        for rank, note in notes.items():
            pairs = [(each, note.places[each.key]) for each in progress if each.key in note.places]
            theirs = note.places.get(change.key, [change.digest]) if change else None
            if change is not None and theirs != [change.digest]:
                raise change_of_some(change.what, rank=control.rank, other=rank)
            missing = next((name for each, of in pairs if (name := each.awaited_from(of))), None)
            other = control.awaited_by(note) or next(
                (name for each, of in pairs if (name := each.awaited_by(of))), None
            )
            if change is not None and other is not None:
                raise change_of_some(change.what, rank=control.rank, other=rank, waits_in=other)
            missing = missing if change is None else f"a change of {change.what}"
            # Not without a look at what is missing: it may come from a third rank that is slow.
            if missing is not None and control.is_ahead(note):
                raise control.free_from_step(rank, note, waits_in=missing)
            if missing is not None and other is not None:
                raise missing_launch(missing, rank=control.rank, other=rank, waits_in=other)

    def _progress(self) -> list[LaunchProgress]:
        return [each for taker in self._takers.values() for each in taker.progress()]

    def places(self) -> dict[str, list[Any]]:
        """Return how far launches have come, for notes of other ranks' looks."""
        changes = [] if self._change is None else [self._change]
        return {each.key: each.note() for each in self._progress()} | {
            each.key: [each.digest] for each in changes
        }

    def _agree(self) -> None:
        """Wait for all ranks; raise if one has failed, or launched in another order."""
        self._is_known = True
        control = self._groups.loop_control
        orders: dict[str, int] = {}
        for module, taker in self._takers.items() if control.size > 1 else ():
            for name, order in taker.orders().items():
                orders[_key(module, name)] = order
        payload = pack_orders(orders)
        with control.in_step():
            payloads = control.agree(None, phase=_PHASE, payload=payload)
            with ended_comparison(self._takers.values()):
                if payloads.count(payload) != len(payloads):
                    compare_orders(payloads, launches=self._launches_of, control=control)
        self._is_known = False

    def _launches_of(self, key: str) -> Sequence[str] | None:
        """Return what this rank has launched on a communicator of a module, if it has it."""
        for module, taker in self._takers.items():
            for name in taker.orders():
                if _key(module, name) == key:
                    return taker.launches_on(name)
        return None

    def _end_on_all(self, error: BaseException) -> None:
        """Raise on all ranks; return if this one keeps its own error."""
        is_known, self._is_known = self._is_known, False
        control = self._groups.loop_control
        if is_known and control.is_out_of_sync:
            # Some ranks are not in a microbatch, so none compares what this one has launched.
            self._close_out_of_sync(error)
            return
        if control.is_broken or control.size == 1:
            return
        if self._bridged is not None and self._bridged.crossings.is_cut:
            return  # all ranks have raised it
        lost = None if self._is_victim else collectives.lost_to_others(error)
        if lost is None and not self._agrees:
            return  # the other stages wait for this one in the schedule, and see it leave
        failure = lost or error
        if isinstance(failure, DeadlineError) and failure is error and self._bridged is not None:
            return  # the others wait for the same rank
        if self._is_victim:
            control.shared_error = error  # the message of all ranks is that of the rank that failed
        elif not is_known:
            control.announce_failure(of=_PHASE)
        works: list[Pending] = []
        for taker in self._takers.values():
            try:
                works += taker.join_microbatch()
            except Exception as second:
                error.add_note(f"This rank could not join the others' collectives: {second!r}")
        shared = self._fail(failure, is_known=is_known)
        if isinstance(shared, DeadlineError) or control.is_broken:
            # An interrupt has left long ago, with nobody to read a note of it.
            is_leaving = isinstance(error, Exception) and not isinstance(error, HoldfastError)
            if shared is not failure and failure is error and is_leaving:
                error.add_note(f"Not all other ranks received it: {shared}")
                return
            raise shared from error
        for work in works:
            with contextlib.suppress(DeadlineError):  # the comparison tells
                collectives.wait(work, "the rest of a microbatch that failed on this rank")
        if control.is_out_of_sync:
            self._close_out_of_sync(shared)
        else:
            compare_launched(self._takers, control, completes=True)
        is_own = failure is error and not self._is_victim and not isinstance(error, HoldfastError)
        if shared is not error and not is_own:
            raise shared from error

    def _close_out_of_sync(self, error: BaseException) -> None:
        for taker in self._takers.values():
            taker.close_communicators(
                f"the last microbatch was not one of all ranks ({error}) {START_AGAIN}"
            )

    def _fail(self, error: BaseException, *, is_known: bool) -> BaseException:
        """Let all ranks raise, wherever they wait, and return what they raise."""
        control = self._groups.loop_control
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

"""The place of a `torch.utils.data.DataLoader` in its data, as a state that it saves and takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isgeneratorfunction
from types import FunctionType
from typing import Any

from holdfast.errors import MismatchError
from holdfast.integrations.fetches import (
    Draws,
    Generators,
    States,
    Streams,
    generators_of_order,
    own_states,
    replace_methods,
    set_streams,
)
from holdfast.state.data_positions import NUM_SHARES, samplers_of, set_epochs, with_measures

_PLACE = "_holdfast_place"


def place_of(loader: Any, *, num_shares: int = 1) -> LoaderPlace | None:
    """Return the place of a loader, which from now on counts its batches.

    The loader gets the methods `state_dict` and `load_state_dict` and stays an object of its class.

    Args:
        loader: A `DataLoader`.
        num_shares: Into how many shares the ranks split the data.

    Returns:
        None for an object that is not a plain `DataLoader`, or has a state of its own.
    """
    from torch.utils.data import DataLoader

    known: LoaderPlace | None = getattr(loader, "__dict__", {}).get(_PLACE)
    if known is not None:
        return known
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
        return None
    kind: Any = type(loader)
    place = LoaderPlace(loader, kind.__iter__, num_shares)
    methods: dict[str, Any] = {
        "__iter__": lambda self: self.__dict__[_PLACE].begin(),
        "state_dict": lambda self: self.__dict__[_PLACE].state_dict(),
        "load_state_dict": lambda self, state: self.__dict__[_PLACE].load_state_dict(state),
    }
    loader.__dict__[_PLACE] = place
    replace_methods(loader, methods, module=__name__)
    return place


def shares_of_data(strategy: Any) -> int:
    """Return into how many shares a strategy of Lightning splits the data.

    Ranks that share a model by tensor parallelism get the same samples.
    """
    sampler = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return int(sampler.get("num_replicas", 1))


def has_place(loader: Any) -> bool:
    """Return True for a loader whose state is the one that `place_of` has given it."""
    return _PLACE in getattr(loader, "__dict__", {})


class OwnStatePlace:
    """The place of a loader with a state of its own, as the run has it that trains its batches.

    Its state counts what a loop has fetched ahead, so that the one from before is given instead.
    Nor does it say in which order the samples of a pass come that it counts, where that follows
    from the epoch of a sampler or from what a sampler without a state draws: both are kept here.
    The loader stays an object of its class.

    Args:
        loader: An iterable with `state_dict` and `load_state_dict`.
        fetches_ahead: Returns True if the loop does that.
        ahead: Returns how many batches are fetched and not trained yet: one or none.
        num_shares: Into how many shares the ranks split the data, where the loader does not say it.
    """

    def __init__(
        self,
        loader: Any,
        *,
        fetches_ahead: Callable[[], bool],
        ahead: Callable[[], int],
        num_shares: int = 1,
    ) -> None:
        self._loader, self._kind = loader, type(loader)
        self._fetches_ahead, self._ahead = fetches_ahead, ahead
        self._num_shares = num_shares
        self._generators = generators_of_order(loader)
        self._before: Any = None
        self._order = _Order(self._generators)
        """Of the pass in progress."""
        self._measures: Mapping[str, Any] = self._measured()
        self._moved: Mapping[str, Any] | None = None
        self._begins_anew = False
        """True if the state of a load is left out."""
        self.is_held = False
        """True while an iterator is made that is not used: it is empty."""
        methods: dict[str, Any] = {
            "__iter__": lambda _: self._begin(),
            "state_dict": lambda _: self._state(),
            "load_state_dict": lambda _, state: self._take(state),
        }
        replace_methods(loader, methods, module=__name__)

    def leave_pass(self, *, has_ended: bool) -> None:
        """Leave the pass that a load has moved to, as a loop does that begins the next one.

        Without a look whether it has ended, unless the loop knew by that look: `has_ended`.
        """
        from torch.utils.data import DataLoader

        if isinstance(self._loader, DataLoader):  # whose iterator takes the place when it is made
            self._kind.__iter__(self._loader)
        elif not has_ended:
            next(self._kind.__iter__(self._loader), None)

    def order(self) -> dict[str, Any]:
        """Return what the order of this pass and of the next ones follows from."""
        return {
            "start": self._order.start,
            "num_drawn": self._order.num_drawn,
            "own": own_states(self._generators),
            **self._measures,
        }

    def move(self, saved: Mapping[str, Any], *, is_within_pass: bool) -> None:
        """Draw the order of the next pass as that of a saved one, which `order` has returned.

        Raises:
            MismatchError: within a pass over one of another number of shares of the data.
        """
        from torch.utils.data import DataLoader

        now = self._measured()[NUM_SHARES]
        if not is_within_pass:
            # Where a pass over a smaller share ends, one over a larger share does not.
            self._begins_anew = isinstance(self._loader, DataLoader) and saved[NUM_SHARES] != now
            return
        if saved[NUM_SHARES] != now:
            raise MismatchError(
                f"a {self._kind.__name__}, which has a state of its own, was within a pass over "
                f"one of {saved[NUM_SHARES]} shares of the data, and here there are {now}: samples "
                f"would be trained on twice or never; resume on as many ranks as were saved, or "
                f"from a checkpoint that was made at the end of an epoch"
            )
        set_epochs(self._loader, saved)
        self._moved = saved

    def set_generators(self, saved: Mapping[str, Any]) -> None:
        """Set the generators of the loader and of its samplers as `order` has returned them."""
        set_streams(saved["own"], self._generators)

    def remove(self) -> None:
        """Leave the loader alone."""
        self._loader.__class__ = self._kind

    def _begin(self) -> Iterator[Any]:
        """Return the batches of a pass."""
        if self.is_held:
            return iter(())
        moved, self._moved = self._moved, None
        self._measures = self._measured()
        before = None if moved is None else Streams()
        again = {} if moved is None else {name: moved[name] for name in ("start", "num_drawn")}
        self._order = _Order(self._generators, **again)
        with _drawing(samplers_of(self._loader)[1:], self._order):
            iterator = self._kind.__iter__(self._loader)
        if before is not None:
            set_streams(before.states())
        return self._counted(iterator)

    def _take(self, state: Any) -> None:
        """Load the loader's own state."""
        if not self._begins_anew:
            self._kind.load_state_dict(self._loader, state)

    def _measured(self) -> dict[str, Any]:
        """Return what a position in the data is measured by."""
        measured: Any = with_measures(self._loader, {})
        return {NUM_SHARES: self._num_shares, **measured}

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, each after a note of the state before it."""
        if not self._fetches_ahead():
            yield from iterator
            return
        while True:
            self._before = self._kind.state_dict(self._loader)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def _state(self) -> Any:
        """Return the state of the loader after what is trained."""
        return self._before if self._ahead() else self._kind.state_dict(self._loader)


class _Order:
    """The streams that the order of a pass is drawn with, by samplers without a state.

    Args:
        generators: The loader's own, by name.
        start: Those streams, of a saved pass; None to note them.
        num_drawn: How many indices the saved pass had drawn.
    """

    def __init__(
        self, generators: Generators, *, start: States | None = None, num_drawn: int = 0
    ) -> None:
        self._generators, self._saved, self._num_saved = generators, start, num_drawn
        self.start, self.num_drawn = start, 0

    def draw(self, sampler: Any, kind: Any) -> Iterator[Any]:
        """Return the indices of a sampler, which a loader asks for several times in a pass.

        It goes by the last order.
        """
        self.num_drawn = 0
        self._begin()
        order: Iterator[Any] = kind.__iter__(sampler)
        # A generator draws when it is asked for an index, which may be after these streams.
        return self._counted(order) if isgeneratorfunction(kind.__iter__) else order

    def _counted(self, order: Iterator[Any]) -> Iterator[Any]:
        if self._saved is None:
            return self._noted(order)
        return self._count(itertools.chain(list(itertools.islice(order, self._num_saved)), order))

    def _noted(self, order: Iterator[Any]) -> Iterator[Any]:
        self._begin()
        yield from self._count(order)

    def _count(self, order: Iterator[Any]) -> Iterator[Any]:
        for each in order:
            self.num_drawn += 1
            yield each

    def _begin(self) -> None:
        if self._saved is None:
            self.start = Streams(self._generators).states()
        else:
            set_streams(self._saved, self._generators)


@contextmanager
def _drawing(samplers: Sequence[Any], order: _Order) -> Iterator[None]:
    """Let samplers draw by `order` while an iterator is made; they stay objects of their classes.

    One with a state keeps its order itself, with all that are around it.
    """
    # A list of indices may be a sampler, too.
    drawing = [s for s in samplers if isinstance(getattr(type(s), "__iter__", None), FunctionType)]
    if any(hasattr(each, "state_dict") for each in samplers):
        drawing = []
    kinds = [type(each) for each in drawing]
    for each, kind in zip(drawing, kinds, strict=True):
        methods: dict[str, Any] = {"__iter__": lambda self, kind=kind: order.draw(self, kind)}
        replace_methods(each, methods, module=__name__)
    try:
        yield
    finally:
        for each, kind in zip(drawing, kinds, strict=True):
            each.__class__ = kind


class LoaderPlace:
    """The pass over a loader that is in progress, and how many of its batches are trained.

    A load moves the next pass to where the saved one was: its order is drawn with the same streams,
    what was trained is passed over, and what comes then draws as it would have. A loader with
    worker processes fetches what it passes over, so that their streams are right, too.

    Args:
        loader: The loader.
        make: Its own `__iter__`.
        num_shares: Into how many shares the ranks split the data.
    """

    def __init__(self, loader: Any, make: Callable[[Any], Iterator[Any]], num_shares: int) -> None:
        self._loader, self._make = loader, make
        self._draws = Draws(loader)
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        self._num_samples = int(size) * num_shares
        self._batches = 0
        self._pass: object | None = None
        """Another object for each pass, while it is in progress."""
        self._first: Streams | None = None
        self._moved: Mapping[str, Any] | None = None
        self.ahead: Callable[[], int] = lambda: 0
        """How many of the batches that were yielded are not trained yet."""
        self.limit: Callable[[], float] = lambda: float("inf")
        """How many batches a pass has, where it ends before the loader does."""
        self.now: Mapping[str, Any] | None = None
        """The streams of a load, with which the moved pass continues."""
        self.stays_ended: Callable[[], bool] = lambda: False
        """True while a pass that has ended is not followed by another: a longer one, over
        another loader, is in progress."""
        self.continue_with: Callable[[], States] = lambda: Streams().states()
        """Returns the streams that the rest of a pass continues with, where `now` has none."""
        self.is_held = False
        """True while an iterator is made that is not used: it is empty, and draws nothing."""
        self.is_rest = self.has_steps = self.was_left = False
        self._has_ended = False
        """True if the pass that began last went to its end."""
        self.began = 0
        self.takes: Callable[[], None] = lambda: None
        """Called when the loop takes a batch, which is counted already."""

    @property
    def num_batches(self) -> int:
        """Batches of the pass in progress that the loop has taken."""
        return self._batches

    @property
    def is_inside(self) -> bool:
        """True while a pass is in progress, and before the rest of one that a load has moved to."""
        has_started = self._pass is not None and self._moved is None
        return has_started and self._batches > 0

    @property
    def is_waiting(self) -> bool:
        """True while the rest of a pass that a load has moved to has not begun."""
        return self._moved is not None and self._batches > 0

    def begin(self) -> Iterator[Any]:
        """Return the batches of one pass: of a new one, or of the one that a load has moved to."""
        if self.is_held:
            return iter(())
        moved, self._moved = self._moved, None
        self.is_rest = moved is not None and moved["batches"] > 0
        self.has_steps = self.was_left = self._has_ended = False
        self.began = time.monotonic_ns()
        if moved is not None and moved["has_ended"]:
            return self._end_of_pass(moved)
        if moved is None or not (moved["batches"] or moved["has_begun"]):
            return self._begin_new()
        before = Streams()
        set_streams(moved["start"], self._draws.generators)
        self._draws.begin()
        self._pass = object()
        iterator = self._make(self._loader)
        first = moved["first"] if moved["first"] is not None else Streams().states()
        set_streams(before.states())
        return self._rest(iterator, {**moved, "first": first})

    def _begin_new(self) -> Iterator[Any]:
        """Return the batches of a new pass."""
        now, self.now = self.now, None
        if now is not None:
            set_streams(now)
        self._draws.begin()
        self._batches, self._pass, self._first = 0, object(), None
        return self._new(self._make(self._loader))

    def _new(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a new pass."""
        self._first = Streams(self._draws.generators)
        yield from self._counted(iterator)

    def _rest(self, iterator: Any, moved: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the rest of a pass."""
        now: Any = self.now if self.now is not None else self.continue_with()
        now, self.now = {**now, **moved["own"]}, None
        set_streams(moved["first"], self._draws.generators)
        self._first = Streams(self._draws.generators)
        if moved["fetch"] is not None:
            self._draws.watch.replay(self._batches, fetch=moved["fetch"], after=now)
        # Indices alone are passed over where fetching has no streams of its own.
        source = iterator._sampler_iter if self._draws.watch.is_watching else iterator
        for _ in itertools.islice(source, self._batches):
            pass
        if moved["fetch"] is None:
            set_streams(now, self._draws.generators)
        yield from self._counted(iterator)

    def _end_of_pass(self, moved: Mapping[str, Any]) -> Iterator[Any]:
        """Yield nothing: of the pass in which the run was saved no batch is left."""
        now, self.now = self.now, None
        set_streams({**(now or {}), **moved["own"]}, self._draws.generators)
        self._has_ended = True
        yield from ()

    def _counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield batches and count them."""
        own, has_ended = self._pass, False
        try:
            for batch in iterator:
                self._batches += 1
                self.takes()
                yield batch
            has_ended = True
        finally:  # a loop may leave a pass early, and an iterator may outlive its pass
            if self._pass is own:
                self.was_left, self._has_ended = not has_ended, has_ended
                self._draws.watch.finish()
                self._batches, self._pass, self._first = 0, None, None

    def finish_fetch(self) -> None:
        """Set the streams of a load, if a batch that was fetched ahead has had others.

        The next fetch does it, too, which may be long after: of a loader that begins again.
        """
        self._draws.watch.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the place: batches, samples, and the streams that a resume draws with."""
        if self.is_waiting and self._moved is not None:  # nothing was fetched since the load
            return dict(self._moved)
        batches = self._batches - self.ahead()
        # A loop over several loaders may begin one again, and fetch its first batch, ahead.
        has_begun = batches <= 0 < self._batches and self.limit() > 0
        is_inside = has_begun or 0 < batches < self.limit()
        first = self._first.states() if is_inside and self._first is not None else None
        return {
            "batches": max(batches, 0) if is_inside else 0,
            "has_begun": has_begun,
            "has_ended": self._has_ended and self.stays_ended(),
            "samples_per_batch": self._num_samples,
            "first": first,
            **self._draws.data(),
            **self._draws.streams(max(batches, 0) if is_inside else 0, has_begun=has_begun),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the next pass to a place.

        Raises:
            MismatchError: it is not at a whole batch of this loader.
        """
        samples = state["batches"] * state["samples_per_batch"]
        if samples % self._num_samples:
            raise MismatchError(
                f"a loader was at sample {samples}, which is not a multiple of its "
                f"{self._num_samples} samples a step now; choose a batch size that divides it"
            )
        self._draws.load(state, state, is_within_pass=samples > 0 or state["has_begun"])
        self._batches = samples // self._num_samples
        self._moved, self._has_ended = dict(state), state["has_ended"]
        self._moved |= {"batches": self._batches, "samples_per_batch": self._num_samples}

"""Random streams of the process around the fetches of a data loader.

A loader that runs in the training process draws from the process's streams: for the order of an
epoch, and for whatever the dataset and the collator draw, which may have generators of their own
besides. Loaders fetch one batch ahead, so the batch after the last trained one was fetched with
streams that are gone by the time of a save. A resume that skips batches is bitwise only if those
streams are brought back for the one fetch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast._torch import loader_iterator, start_iterator
from holdfast.errors import counted
from holdfast.state.data_positions import samplers_of
from holdfast.state.rng import Generator, State, accessors, global_accessors

States = dict[str, State]
Generators = Mapping[str, Generator]

_WATCH = "_holdfast_watch"
_END = object()
_INNER = (
    "dataset", "datasets", "transform", "transforms", "collate_fn", "data_collator",
    "func", "__self__",
)  # fmt: skip
"""Attributes by which datasets and collators wrap what may draw from a generator of its own."""


class Streams:
    """The streams of Python, NumPy, torch and the current CUDA device at one time.

    Args:
        generators: Further ones, of a loader (`generators_of`).
    """

    def __init__(self, generators: Generators | None = None) -> None:
        self._accessors = global_accessors()
        self._accessors |= {name: accessors(each) for name, each in (generators or {}).items()}
        self._raw = {name: each.read() for name, each in self._accessors.items()}

    def states(self) -> States:
        """Return them as arrays, tensors and plain values."""
        return {name: each.state_of(self._raw[name]) for name, each in self._accessors.items()}


class LoadedStreams:
    """The streams as a load has set them, with which the first pass that is resumed continues.

    What a loop draws or seeds between the load and that pass belongs to the start of an epoch,
    which the saved run had behind it.
    """

    def __init__(self) -> None:
        self._states: States | None = Streams().states()

    def take(self) -> States:
        """Return those of the load to the first who asks, and to others those of now."""
        states, self._states = self._states, None
        return Streams().states() if states is None else states


def set_streams(states: Mapping[str, State], generators: Generators | None = None) -> None:
    """Set the streams of this process, and the generators of a loader, that are in `states`."""
    known = global_accessors()
    known |= {name: accessors(each) for name, each in (generators or {}).items()}
    for name, state in states.items():
        if name in known:
            known[name].put(state)


def generators_of(loader: Any) -> dict[str, Generator]:
    """Return the generators of a loader, its samplers, its dataset and its collator.

    Those are attributes of these objects, and of what a dataset or a collator wraps (a subset's
    dataset, a method's object). Their names are the same in every run of a program.
    """
    objects: list[object] = []
    for each in [*samplers_of(loader), *_sources_of(loader)]:
        _begin_to_draw(each, loader)
        objects += [getattr(each, "generator", None), *_attributes(each)]
    return _named(objects)


def generators_of_order(loader: Any) -> dict[str, Generator]:
    """Return the generators of a loader and of its samplers, if none of these has a state.

    One that has keeps its own, and may draw with it when it is asked for the next index.
    """
    samplers = samplers_of(loader)[1:]
    if any(hasattr(each, "state_dict") for each in samplers):
        samplers = []
    return _named([getattr(each, "generator", None) for each in (loader, *samplers)])


def _named(objects: Iterable[object]) -> dict[str, Generator]:
    """Return those that are generators, each once, by a name."""
    owned: dict[str, Generator] = {}
    for each in objects:
        known = any(each is other for other in owned.values())
        if isinstance(each, Generator) and not known:
            owned[f"loader-{len(owned)}"] = each
    return owned


def own_states(generators: Generators) -> States:
    """Return the states of a loader's own generators alone."""
    return {name: accessors(each).get() for name, each in generators.items()}


def seeds_of(loader: Any) -> list[int]:
    """Return the seeds of the samplers whose order of each pass follows from one and its number."""
    return [getattr(each, name) for each, name in _seeded(loader)]


def set_seeds(loader: Any, seeds: Sequence[int]) -> None:
    """Give those samplers the seeds that they had at the save, or say that they keep their own.

    A framework may take another kind of sampler on another number of ranks.
    """
    seeded = _seeded(loader)
    if len(seeded) != len(seeds):
        logging.getLogger("holdfast").warning(
            "a loader had %s with a seed when the checkpoint was saved and has %s now: the next "
            "passes have another order than the saved run's; give the loader the samplers that it "
            "had if it must be the same",
            counted(len(seeds), "sampler"),
            counted(len(seeded), "sampler"),
        )
        return
    for (each, name), seed in zip(seeded, seeds, strict=True):
        setattr(each, name, seed)


def _seeded(loader: Any) -> list[tuple[Any, str]]:
    """Return those samplers, and the attribute in which each has its seed."""
    names = ("seed", "initial_seed")
    return [
        (each, name)
        for each in samplers_of(loader)
        if callable(getattr(each, "set_epoch", None))
        for name in names
        if type(getattr(each, "__dict__", {}).get(name)) is int
    ]


def num_rows(loader: Any) -> int | None:
    """Return the length of a loader's dataset; None of a stream."""
    from torch.utils.data import IterableDataset

    dataset: Any = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    return None if is_stream else len(dataset)


def compare_rows(saved: int | None, now: int | None) -> None:
    """Say that the rest of a pass is not the one that was saved, if the data has another length."""
    if saved is not None and now is not None and saved != now:
        logging.getLogger("holdfast").warning(
            "a loader was within a pass over %d rows when the checkpoint was saved, and its "
            "dataset has %d now: the rest of the pass has another order, in which rows are trained "
            "twice or not at all; give the loader the data that it had, until the pass ends",
            saved,
            now,
        )


def _sources_of(loader: Any) -> list[Any]:
    """Return what makes the samples and batches of a loader, each once, from outside to inside."""
    seen: list[Any] = []
    waiting = [getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        for inner in (getattr(each, name, None) for name in _INNER):
            waiting += inner if isinstance(inner, list | tuple) else [inner]
    return seen


def _attributes(each: object) -> list[object]:
    """Return the values of an object's attributes; none of an object that has none."""
    return [*getattr(each, "__dict__", {}).values()]


def _begin_to_draw(collator: Any, loader: Any) -> None:
    """Let a collator of transformers make its generator, as it does when it draws first.

    In a worker process it makes another one there.
    """
    make = getattr(collator, "create_rng", None)
    is_new = callable(make) and collator.generator is None and collator.seed is not None
    if is_new and not loader.num_workers:
        collator.create_rng()


class FetchWatch:
    """Reads the streams before each fetch of a loader, and sets them before those of a resume.

    Args:
        loader: A `torch.utils.data.DataLoader`, or an object that looks like one. A loader with
            worker processes, or over an iterable dataset, is not watched: its workers have streams
            of their own, and its fetches cannot be distinguished.
        num_fetches: Of which one batch is made, where it is not one.
    """

    def __init__(self, loader: Any, *, num_fetches: int = 1) -> None:
        self._num_fetches = num_fetches
        self.generators = generators_of(loader)
        """The loader's own, by name."""
        self._recent: dict[int, Streams] = {}
        self._passed_over = range(0)
        self._skip: int | None = None
        """While a resume is in progress: the number of the first batch that is fetched."""
        self._fetch: States | None = None
        self._after: States | None = None
        sampler = _index_sampler(loader)
        self.is_watching = sampler is not None
        if sampler is not None:
            _watch_draws(sampler, self)

    def before(self, number: int) -> States | None:
        """Return the streams as they were before batch `number` was fetched; None if unknown."""
        streams = self._recent.get(number)
        return None if streams is None else streams.states()

    def replay(
        self, skip: int, *, fetch: States | None, after: States, pass_over: range = range(0)
    ) -> None:
        """Set the streams for the next pass: `fetch` before batch `skip`, `after` from then on.

        The loader does not see the indices of the batches `pass_over`.
        """
        self._skip, self._fetch, self._after = skip, fetch, after
        self._passed_over = pass_over

    def finish(self) -> None:
        """Set the streams of after the fetch, if no fetch has done so."""
        after, self._skip, self._after = self._after, None, None
        if after is not None:
            set_streams(after, self.generators)

    def draws(self, indices: Iterable[object]) -> Iterator[object]:
        """Yield what a batch sampler yields; each fetch comes right after its indices."""
        self._recent.clear()
        passed_over, self._passed_over = self._passed_over, range(0)
        source = iter(indices)
        for index in itertools.count():
            number, fetch = divmod(index, self._num_fetches)
            if self._skip is not None and number > self._skip:
                # Before the sampler is asked: at its end one with a generator of its own draws.
                self.finish()
            each = next(source, _END)
            if each is _END:
                break
            if number not in passed_over:
                if fetch == 0:
                    self._begin_fetch(number)
                yield each
        self.finish()

    def _begin_fetch(self, number: int) -> None:
        """Set the streams that a resume has for this batch, and read those that it will have."""
        if number == self._skip and self._fetch is not None:
            set_streams(self._fetch, self.generators)
        self._recent.pop(number - 2, None)
        self._recent[number] = Streams(self.generators)


def _index_sampler(loader: Any) -> Any:
    """Return what a loader takes the indices of its next batch from; None if it is not watched."""
    from torch.utils.data import BatchSampler, IterableDataset

    if loader.num_workers or isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def _watch_draws(sampler: Any, watch: FetchWatch) -> None:
    """Let a batch sampler yield through the watch: it stays an object of its class."""
    if hasattr(sampler, _WATCH):
        setattr(sampler, _WATCH, watch)
        return
    kind = type(sampler)

    def draw(self: Any) -> Iterator[object]:
        yield from getattr(self, _WATCH).draws(kind.__iter__(self))

    setattr(sampler, _WATCH, watch)
    replace_methods(sampler, {"__iter__": draw}, module=__name__)


def replace_methods(each: Any, methods: Mapping[str, Callable[..., Any]], *, module: str) -> None:
    """Give one object methods of its own: it stays an object of its class.

    Args:
        each: of a class of Python.
        methods: by name.
        module: of the class that it gets.
    """
    kind = type(each)
    each.__class__ = type(
        kind.__name__, (kind,), {"__slots__": (), "__module__": module, **methods}
    )


class Draws:
    """What the passes over a loader are drawn with, as it is saved and brought back.

    The streams of the process at the beginning of the pass and before the fetch of its next batch,
    the loader's own generators, the seeds of its samplers, and whether its worker processes ran.

    Args:
        loader, num_fetches: As of `FetchWatch`.
        base: The `torch.utils.data.DataLoader` in a loader that is a wrapper of one.
    """

    def __init__(self, loader: Any, *, base: Any = None, num_fetches: int = 1) -> None:
        self.watch = FetchWatch(loader, num_fetches=num_fetches)
        self.generators = self.watch.generators
        self._loader, self._base = loader, loader if base is None else base
        self._start: Streams | None = None
        self._had_workers = False

    def begin(self) -> None:
        """Note what a pass begins with."""
        self._had_workers = has_workers(self._base)
        self._start = Streams(self.generators)

    def data(self) -> dict[str, Any]:
        """Return what says whether a pass is over the same data: its length, seeds of its order."""
        return {"rows": num_rows(self._base), "seeds": seeds_of(self._loader)}

    def streams(self, batches: int, *, has_begun: bool = False) -> dict[str, Any]:
        """Return the streams behind some batches of the pass in progress.

        0 is between two passes, unless the pass `has_begun`: its first batch was fetched ahead.

        The next pass begins with the loader's own generators as they are now: another loader may
        draw from the same ones since a load.
        """
        start = self._start if batches or has_begun else None
        own = own_states(self.generators)
        return {
            "start": own if start is None else start.states(),
            "own": own,
            "fetch": None if start is None else self.watch.before(batches),
            "had_workers": has_workers(self._base) if start is None else self._had_workers,
        }

    def load(
        self, data: Mapping[str, Any], streams: Mapping[str, Any], *, is_within_pass: bool
    ) -> None:
        """Bring back what a pass does not bring back when it begins.

        Args:
            data: What `data` returned.
            streams: What `streams` returned; empty on a rank that the saved run did not have.
            is_within_pass: True if the rest of a pass comes next.
        """
        if is_within_pass:
            compare_rows(data["rows"], num_rows(self._base))
        set_seeds(self._loader, data["seeds"])
        if streams.get("had_workers"):
            start_workers(self._base, self.generators)
        if not is_within_pass:
            set_streams(streams.get("own", {}), self.generators)


def has_workers(loader: Any) -> bool:
    """Return True if a loader keeps worker processes from pass to pass, and has started them."""
    return bool(loader.persistent_workers) and loader_iterator(loader) is not None


def start_workers(loader: Any, generators: Generators) -> None:
    """Start the worker processes that a loader keeps, if they are not there, and draw nothing.

    A loader draws their seed from the streams of the process when it starts them. In the run that
    was saved it had done so in an earlier pass.

    Cost: what the workers fetch ahead is dropped.
    """
    if loader.persistent_workers and loader_iterator(loader) is None:
        before = Streams(generators)
        start_iterator(loader)
        set_streams(before.states(), generators)


def set_epoch_of_samplers(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, and of every sampler inside its samplers."""
    for each in samplers_of(loader):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)

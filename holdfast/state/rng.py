"""Random streams as a part of the state: those of a process, or of one module.

A stream is stored once for each rank, or once for all ranks along the axes that share it, under the
coordinates of the ranks. States of generators are plain trees, without pickle.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.arguments import check_int
from holdfast.errors import ConfigError, MismatchError
from holdfast.format.values import is_per_rank, is_plain_dict
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES
from holdfast.state.coordinates import (
    ConsistencyCheck,
    PerRankRequest,
    PerRankSource,
    PickedPerRank,
    coordinate_label,
    parse_label,
)
from holdfast.state.generator_memory import Twister, numpy_reader, python_reader
from holdfast.state.markers import PerRank, Stored, axis_names
from holdfast.state.stored import StoredPart

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
State = dict[str, object] | torch.Tensor


class Accessors(NamedTuple):
    """How to read a stream, and how to set it.

    Reading has two halves: `read` takes what no later draw changes, in microseconds, and `state_of`
    makes arrays, tensors and plain values of it.
    """

    read: Callable[[], Any]
    state_of: Callable[[Any], State]
    put: Callable[[Any], object]

    def get(self) -> State:
        """Return the state as new arrays and tensors."""
        return self.state_of(self.read())


@dataclass(frozen=True, slots=True)
class Stream:
    """A generator of `RNG(generators=...)` that is shared along other axes than the rest.

    Args:
        generator: A `torch.Generator`, `numpy.random.Generator`, `numpy.random.RandomState` or
            `random.Random`.
        shared: As that of `RNG`: ("tp",) for one that ranks along tp share, () for one that differs
            on every rank (Megatron's model-parallel stream), None for not declared.
    """

    generator: Generator
    shared: Sequence[str] | None = None


def check_generator(name: str, generator: object) -> None:
    """Raise ConfigError unless it is a generator whose state can be stored."""
    if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
        raise ConfigError(
            f"RNG: generator '{name}' is a {type(generator).__name__}; it takes torch.Generator, "
            f"numpy.random.Generator, numpy.random.RandomState and random.Random"
        )


def accessors(generator: Any) -> Accessors:
    """Return how to read the state of a generator, as new arrays and tensors, and how to set it."""
    if isinstance(generator, torch.Generator):
        return Accessors(generator.get_state, _unchanged, generator.set_state)
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return Accessors(partial(_bits_state, bits), _unchanged, partial(_set_bits_state, bits))
    if isinstance(generator, np.random.RandomState):
        return Accessors(
            partial(generator.get_state, legacy=False),
            dict,
            lambda state: generator.set_state(dict(state)),
        )
    return Accessors(
        generator.getstate,
        _python_state,
        lambda state: generator.setstate(_python_tuple(state)),
    )


def _unchanged(state: State) -> State:
    return state


def global_accessors() -> dict[str, Accessors]:
    """Return the accessors of Python's, NumPy's, torch's and the current device's streams."""
    streams: dict[str, Accessors] = {
        "python": accessors(random),
        "numpy": Accessors(
            partial(np.random.get_state, legacy=False),
            _numpy_state,
            lambda state: np.random.set_state(_numpy_tuple(state)),
        ),
        "torch": accessors(torch.default_generator),
    }
    if torch.cuda.is_available():
        get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        streams["cuda"] = Accessors(get, _unchanged, put)
    return streams


def _quick_accessors(generators: Mapping[str, Generator]) -> dict[str, Accessors]:
    """Return the accessors of the global streams and of generators, with the fastest way to read.

    Cost: a millisecond, so it pays for streams that are read again and again.
    """
    every = global_accessors() | {name: accessors(each) for name, each in generators.items()}
    twisters: dict[str, Any] = {"python": getattr(random.getstate, "__self__", None)}
    twisters |= {n: each for n, each in generators.items() if isinstance(each, random.Random)}
    for name, generator in twisters.items():
        read = python_reader(generator)
        if read is not None:
            every[name] = every[name]._replace(read=read)
    read_numpy = numpy_reader()
    if read_numpy is not None:
        usual = every["numpy"].read
        every["numpy"] = every["numpy"]._replace(read=lambda: read_numpy() or usual())
    return every


def process_generators() -> dict[str, object]:
    """Return the generators behind the streams of `global_accessors`."""
    generators: dict[str, object] = {
        "python": _owner(random.getstate),
        "numpy": _owner(np.random.get_state),
        "torch": torch.default_generator,
    }
    if torch.cuda.is_available():
        # There are none before; `get_rng_state` does the same.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return generators


def _owner(method: Any) -> object:
    """Return the object that a module's function is a method of."""
    return method.__self__


def refuse_shared_streams(entries: Mapping[str, object], *, are_modules: bool = False) -> None:
    """Raise ConfigError if a stream of a module is another entry's, too.

    The streams of a `ModuleRNG` are the process's while it is entered.

    Args:
        entries: of a state, by name; those that are not random streams are passed over.
        are_modules: True if each entry is a module's; otherwise only a `ModuleRNG` is.
    """
    owners: dict[int, tuple[str, RNG]] = {}
    for name, value in entries.items():
        if not isinstance(value, RNG):
            continue
        for stream, generator in value.streams().items():
            other, owner = owners.setdefault(id(generator), (name, value))
            has_module = isinstance(value, ModuleRNG) or isinstance(owner, ModuleRNG)
            if other != name and (are_modules or has_module):
                raise ConfigError(
                    f"'{other}' and '{name}' are the same streams ({stream}): each would draw from "
                    f"where the other stopped. Give each module a ModuleRNG(seed=...) of its own, "
                    f"run it in `with` of that, and leave the `with` before streams of the process "
                    f"are saved or loaded"
                )


def state_digest(state: object) -> str:
    """16 hex digits, equal for equal states whatever arrays or tensors hold them."""
    digest = hashlib.blake2b(digest_size=8)
    _add_to_digest(state, digest)
    return digest.hexdigest()


def _add_to_digest(value: object, digest: hashlib.blake2b) -> None:
    """Digest a state with the names of its entries, so that no two states look alike."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype.str} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"entry {name} ".encode())
            _add_to_digest(value[name], digest)
    else:
        value = value.item() if isinstance(value, np.generic) else value
        digest.update(f"value {value!r} ".encode())


_CHILDREN = "seed_sequence"
"""Key of what the generators that `spawn` makes start from."""


def _bits_state(bits: Any) -> dict[str, object]:
    """Return the state of a bit generator, and what its children will start from."""
    sequence = bits.seed_seq
    state = dict(bits.state)
    # A class of the user's may know more of itself than these.
    if type(sequence) is np.random.SeedSequence:
        entropy: Any = sequence.entropy
        state[_CHILDREN] = {
            "entropy": entropy if entropy is None else np.asarray(entropy, dtype=object).tolist(),
            "spawn_key": [int(each) for each in sequence.spawn_key],
            "pool_size": int(sequence.pool_size),
            "n_children_spawned": int(sequence.n_children_spawned),
        }
    return state


def _set_bits_state(bits: Any, state: Mapping[str, Any]) -> None:
    """Set what `_bits_state` has returned."""
    own = dict(state)
    children = own.pop(_CHILDREN, None)
    if children is None:
        bits.state = own
        return
    if bits.seed_seq is not None and type(bits.seed_seq) is not np.random.SeedSequence:
        raise TypeError(f"its seed sequence is a {type(bits.seed_seq).__name__}, not NumPy's own")
    # The counter of children cannot be set; this is how NumPy's own copies take another sequence.
    bits.__setstate__((own, np.random.SeedSequence(**children)))


def refuse_attributes(name: str, generator: object) -> None:
    """Raise ConfigError for a generator with attributes, which are not part of its state."""
    own = sorted(vars(generator).keys() - {"gauss_next"}) if hasattr(generator, "__dict__") else []
    if own:
        raise ConfigError(
            f"RNG: generator '{name.removeprefix(_PREFIX)}' is a {type(generator).__name__} with "
            f"the attributes {', '.join(own)}, which are not in its state and would be lost; add "
            f"them to the state as values of their own, and give RNG a generator without them"
        )


def _python_state(state: tuple[Any, ...]) -> dict[str, object]:
    """Return the state of a `random.Random` as a dict."""
    if isinstance(state, Twister):
        words = np.append(np.frombuffer(state.words, dtype=np.uint32), np.uint32(state.position))
        return {"version": random.Random.VERSION, "words": words, "gauss": state.gauss}
    # 625 words as one array: as a list they would be most of a manifest.
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the argument of `setstate` from the dict of `_python_state`."""
    return state["version"], tuple(np.asarray(state["words"]).tolist()), state["gauss"]


def _numpy_state(result: Any) -> dict[str, object]:
    """Return the state of NumPy's global generator, whose bit generator may have been replaced."""
    if isinstance(result, Twister):
        has_gauss, cached = result.gauss
        return {
            "name": "MT19937",
            "keys": np.frombuffer(result.words, dtype=np.uint32).copy(),
            "position": result.position,
            "has_gauss": has_gauss,
            "cached": cached,
        }
    if result["bit_generator"] != "MT19937":
        return {"name": str(result["bit_generator"]), "state": result}
    return {
        "name": "MT19937",
        "keys": np.array(result["state"]["key"], dtype=np.uint32),
        "position": int(result["state"]["pos"]),
        "has_gauss": int(result["has_gauss"]),
        "cached": float(result["gauss"]),
    }


def _numpy_tuple(state: Mapping[str, Any]) -> Any:
    """Return the argument of `np.random.set_state` from the dict of `_numpy_state`."""
    if "state" in state:
        return dict(state["state"])
    names = ("name", "keys", "position", "has_gauss", "cached")
    return tuple(state[name] for name in names)


DIGESTS = "digests"
"""Key under which the digests of stored streams lie next to them."""
_EVERYWHERE = "everywhere"
_PREFIX = "generator-"
_REPLICATING = ("tp", "expt_tp")
"""Axes whose ranks compute the same activations, so that they have to draw the same masks."""


class CapturedStreams:
    """Streams at one time, as `RNG.capture` has read them.

    Args:
        accessors: of the streams that were read; others are states already.
        raw: what was read of each stream, or its state.
    """

    def __init__(self, accessors: Mapping[str, Accessors], raw: Mapping[str, Any]) -> None:
        self._accessors = accessors
        self._raw = dict(raw)

    def states(self) -> dict[str, State]:
        """Return the state of each stream as arrays, tensors and plain values."""
        known = self._accessors
        return {
            name: known[name].state_of(raw) if name in known else raw
            for name, raw in self._raw.items()
        }

    def is_same(self, other: CapturedStreams) -> bool:
        """Return True if no stream was drawn from between two captures of one set of streams."""
        one, two = self._raw, other._raw
        return one.keys() == two.keys() and all(_is_same(one[name], two[name]) for name in one)


def _is_same(one: Any, other: Any) -> bool:
    """Return True if what was read of a stream is the same state."""
    if one is other:
        return True
    if isinstance(one, Twister):
        return bool(one == other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return state_digest(one) == state_digest(other)


class RNG:
    """The streams of Python's `random`, NumPy's global generator, torch's CPU and CUDA device.

    A load gives each rank the streams of its coordinates, bitwise, after every other part of the
    state has been restored. What a rank keeps is in `LoadReport.kept`, with one warning; what no
    rank takes, because the layout is smaller, in `LoadReport.dropped`. Of CUDA the stream of the
    current device is kept; name others as generators.

    Args:
        axes: Along which ranks have their own streams; default: each rank.
        shared: What a stream does under other layouts. Every stream without its own declaration
            follows it.

            - `("tp",)`: ranks that differ along tp alone have the same stream, as dropout on
              replicated activations needs. It is stored once for them (a save raises PlanError if
              they differ), a rank of a grown tp gets it, and a load that would leave ranks along tp
              with different streams raises MismatchError on all ranks.
            - `()`: every rank has its own. A rank whose coordinates are not stored keeps the stream
              it has.
            - None, not declared: stored for each rank, with a digest. A rank that is not stored
              because tp (or expt_tp) has grown gets the stream of those it would share it with, if
              the stored ones are equal along that axis; otherwise, and along any other axis, it
              keeps what it has. Streams that were equal along tp when saved are checked like
              declared ones.
        generators: Further generators by name: `torch.Generator`, `numpy.random.Generator` with any
            bit generator, `numpy.random.RandomState`, `random.Random`, or a `Stream` of one. One
            that the checkpoint does not have is missing (`allow_missing=["rng.generator-NAME"]`
            lets it be); one that only the checkpoint has is unexpected.

    Raises:
        ConfigError: For an unknown axis or generator.

    Cost:
        A save hashes some kB for each stream.
    """

    def __init__(
        self,
        *,
        axes: Sequence[str] = DENSE_AXES,
        shared: Sequence[str] | None = None,
        generators: Mapping[str, Generator | Stream] | None = None,
    ) -> None:
        """Declare; nothing is read yet."""
        self._loading: _StreamLoad | None = None
        self._quick: Mapping[str, Accessors] | None = None
        """How to read each stream in the fastest way, from the first `capture` on."""
        self._axes = axis_names(axes)
        self._shared = None if shared is None else axis_names(shared)
        self._generators: dict[str, Generator] = {}
        self._shared_by_name: dict[str, tuple[str, ...] | None] = {}
        if not isinstance(generators, Mapping | None):
            raise ConfigError(
                f"RNG: generators is a {type(generators).__name__}; it takes a dict of generators "
                f"by name, as in RNG(generators={{'shuffle': generator}})"
            )
        for name, given in (generators or {}).items():
            stream = given if isinstance(given, Stream) else Stream(given, self._shared)
            check_generator(name, stream.generator)
            along = None if stream.shared is None else axis_names(stream.shared)
            self._generators[_PREFIX + name] = stream.generator
            self._shared_by_name[_PREFIX + name] = along
        for declared in (self._shared, *self._shared_by_name.values()):
            unknown = sorted(set(declared or ()) - set(self._axes))
            if unknown:
                raise ConfigError(
                    f"RNG: shared along {', '.join(unknown)}, which are not among its axes "
                    f"{', '.join(self._axes)}"
                )

    def tree(self) -> object:
        """Return the streams of this rank, by the axes along which they are stored."""
        by_axes: dict[tuple[str, ...], dict[str, object]] = {}
        for name, state in self._states().items():
            axes = tuple(axis for axis in self._axes if axis not in (self._declared(name) or ()))
            by_axes.setdefault(axes, {})[name] = state
        trees: dict[str, object] = {}
        for axes, streams in by_axes.items():
            # With digests a load can compare streams of other coordinates without reading them.
            streams[DIGESTS] = {name: state_digest(state) for name, state in streams.items()}
            if not axes:
                trees[_EVERYWHERE] = streams
                continue
            marked = PerRank(streams, axes=axes, missing="keep", surplus="drop")
            if len(by_axes) == 1:
                return marked
            trees[f"per_{'_'.join(axes)}"] = marked
        return trees

    def template(self, stored: StoredPart) -> object:
        """Ask for the streams of this rank, wherever the checkpoint has them."""
        node = stored.node
        fresh = self._states()
        self._loading = _StreamLoad(fresh=fresh, declared={n: self._declared(n) for n in fresh})
        groups: dict[str, Any] = {"": node} if is_per_rank(node) else {}
        if not groups and is_plain_dict(node):
            groups = {str(name): child for name, child in node.items()}
        where = {name: key for key, group in groups.items() for name in _streams_of(group)}
        absent = [name for name in fresh if name not in where]
        loading = self._loading
        templates: dict[str, object] = {}
        # What is missing is reported once, by the first group that is read per rank.
        for key, group in groups.items():
            mine = [name for name in fresh if where.get(name) == key]
            if is_per_rank(group):
                templates[key] = PickedPerRank(
                    Stored(),
                    axes=tuple(group["axes"]),
                    missing="keep",
                    surplus="drop",
                    pick=partial(
                        loading.pick,
                        axes=self._axes,
                        key=key,
                        names=mine,
                        absent=[name for name in absent if name == "cuda" or not key],
                    ),
                )
                absent = [name for name in absent if name != "cuda" and key]
            elif mine:
                loading.whole.update(dict.fromkeys(mine, key))
                templates[key] = {name: Stored() for name in (*mine, DIGESTS)}
        if "" in templates:
            return templates[""]
        # Streams that are stored along no axes at all are missing by their names.
        templates |= {name: Stored() for name in absent if groups and name != "cuda"}
        return templates or PerRank(Stored(), axes=self._axes, missing="keep", surplus="drop")

    def restore(self, tree: object) -> None:
        """Set every stream: to the stored one, or to what it was when the load began."""
        if self._loading is None or not isinstance(tree, Mapping):
            return
        loading, self._loading = self._loading, None
        # All are found before any is set: one that is missing must leave every stream as it was.
        states = {name: loading.loaded(name, tree) for name in loading.fresh}
        try:
            self._set_and_ask(states)
        except MismatchError:
            # The other streams took theirs; no stream of a load that fails is another one.
            self.reset(loading.fresh)
            raise

    def _set_and_ask(self, states: Mapping[str, State]) -> None:
        """Set streams; raise MismatchError for one that states another state than it was given."""
        self.reset(states)
        now = self._states()
        wrong = [name for name in states if state_digest(now[name]) != state_digest(states[name])]
        if wrong:
            raise MismatchError(
                f"rng: {', '.join(name.removeprefix(_PREFIX) for name in wrong)} did not take the "
                f"stored state: the generator states another one after it was set; mend its class, "
                f"or use one of torch, NumPy or Python"
            )

    def streams(self) -> dict[str, object]:
        """Return the generator behind each stream: two names of one stream have one object."""
        own = {n: getattr(each, "bit_generator", each) for n, each in self._generators.items()}
        return process_generators() | own

    def capture(self) -> CapturedStreams:
        """Return the streams as they are now, which `reset` takes.

        Cost: some 5 µs; a millisecond the first time.
        """
        self._check_generators()
        if self._quick is None or ("cuda" in self._quick) is not torch.cuda.is_available():
            self._quick = _quick_accessors(self._generators)
        every = self._quick
        return CapturedStreams(every, {name: each.read() for name, each in every.items()})

    def __getstate__(self) -> dict[str, object]:
        """Leave out what refers to the memory of this process, or of the original's generators."""
        return self.__dict__ | {"_quick": None}

    def reset(self, states: CapturedStreams | Mapping[str, State]) -> None:
        """Set streams to what they were, or to states; MismatchError for one of another kind."""
        if isinstance(states, CapturedStreams):
            states = states.states()
        for name, state in states.items():
            self._set_state(name, state)

    def _accessors(self) -> dict[str, Accessors]:
        """Return how to read each stream, and how to set it."""
        self._check_generators()
        own = {name: accessors(each) for name, each in self._generators.items()}
        return global_accessors() | own

    def _check_generators(self) -> None:
        """Raise ConfigError for a generator that was given attributes."""
        for name, generator in self._generators.items():
            refuse_attributes(name, generator)

    def _states(self) -> dict[str, State]:
        """Return the state of each stream."""
        return {name: each.get() for name, each in self._accessors().items()}

    def _declared(self, name: str) -> tuple[str, ...] | None:
        """Return the axes along which a stream is declared shared; None: not declared."""
        return self._shared_by_name.get(name, self._shared)

    def _set_state(self, name: str, state: Any) -> None:
        """Set a stream; raise MismatchError if the state is of another kind."""
        generator = self._generators.get(name)
        try:
            stream = global_accessors()[name] if generator is None else accessors(generator)
            stream.put(state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            kind = f"{name} generator" if generator is None else type(generator).__name__
            if isinstance(generator, np.random.Generator):
                kind = type(generator.bit_generator).__name__
            raise MismatchError(
                f"rng: the stored stream '{name.removeprefix(_PREFIX)}' is not one of a {kind}: "
                f"{error}; load it with the kind of generator that it was saved with"
            ) from error


@dataclass(slots=True, kw_only=True)
class _StreamLoad:
    """One load of streams on one rank."""

    fresh: dict[str, State]
    """The streams as they were when the load began."""
    declared: dict[str, tuple[str, ...] | None]
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Stream -> where it is stored, and the coordinate that it is taken from."""
    whole: dict[str, str] = field(default_factory=dict)
    """Stream -> where it is stored for all ranks at once."""

    def pick(
        self,
        request: PerRankRequest,
        *,
        axes: tuple[str, ...],
        key: str,
        names: Sequence[str],
        absent: Sequence[str],
    ) -> PerRankSource:
        """Return what this rank reads, what it keeps, and what must be equal on several ranks."""
        stored = _StoredStreams(request, axes=axes)
        result = PerRankSource(
            here=request.here, is_picked=True, names=frozenset((*names, DIGESTS))
        )
        labels: dict[str, None] = {}
        kept = []
        for name in names:
            declared = self.declared[name]
            candidates = stored.candidates(name, declared)
            digests = {stored.digest(label, name) for label in candidates}
            if len(digests) > 1 and declared is not None:
                problem = (
                    f"{request.path}.{name} is declared shared along {', '.join(declared)}, but "
                    f"the checkpoint holds different streams along it, for "
                    f"{'; '.join(candidates)}: load them as they are with RNG(shared=()), or "
                    f"leave the random streams out of the load and seed them"
                )
                return PerRankSource(here=request.here, problem=problem)
            if len(digests) == 1:
                self.sources[name] = (key, candidates[0])
                labels[candidates[0]] = None
                digest = digests.pop()
            else:
                kept.append(name)
                digest = state_digest(self.fresh[name])
            check = stored.check(name, declared, digest)
            result.checks += [] if check is None else [check]
        result.labels = tuple(labels)
        result.kept = ("",) if kept and len(kept) == len(names) else tuple(kept)
        result.kept += ("cuda",) if "cuda" in absent and result.kept != ("",) else ()
        result.missing = tuple(name for name in absent if name != "cuda")
        if "cuda" not in names and "cuda" in _streams_of(request.stored.get(request.here)):
            # No device here could draw from it.
            result.dropped = ("cuda",)
        if "cuda" not in names:
            result.names = frozenset((*names, DIGESTS, "cuda"))
        return result

    def loaded(self, name: str, tree: Mapping[str, Any]) -> Any:
        """Return the state that a stream is set to."""
        if name in self.whole:
            return tree[self.whole[name]][name]
        if name not in self.sources:
            return self.fresh[name]
        key, label = self.sources[name]
        return (tree[key] if key else tree)[label][name]


class _StoredStreams:
    """Streams that a checkpoint holds along the same axes, as one rank sees them."""

    def __init__(self, request: PerRankRequest, *, axes: tuple[str, ...]) -> None:
        self._request = request
        self._axes = axes
        self._at = {label: parse_label(label) for label in request.stored}
        self._mine = parse_label(request.here)

    def candidates(self, name: str, declared: tuple[str, ...] | None) -> list[str]:
        """Return the stored coordinates that this rank may take a stream from, the best first.

        If their streams differ, none of them is this rank's.
        """
        here = self._request.here
        if declared is None and self.digest(here, name):
            return [here]
        along = [axis for axis in self._replicating() if axis in self._at[next(iter(self._at))]]
        labels = self._equal_outside(along if declared is None else declared)
        return sorted((label for label in labels if self.digest(label, name)), key=here.__ne__)

    def check(
        self, name: str, declared: tuple[str, ...] | None, digest: str
    ) -> ConsistencyCheck | None:
        """Return what ranks that share the stream must have in common; None if no ranks do.

        Args:
            digest: Of the stream that this rank will have.
        """
        along, is_certain = self._found_shared(name) if declared is None else (declared, True)
        axes = [axis for axis in self._axes if axis not in along]
        if not along and any(set(view) <= set(axes) for view in (DENSE_AXES, EXPERT_AXES)):
            return None
        request = self._request
        label = coordinate_label(request.layout, request.rank, axes, path=request.path)
        shown = ", ".join(along) or f"all but {', '.join(axes)}"
        return ConsistencyCheck(f"{request.path}.{name}", shown, label, digest, is_certain)

    def _replicating(self) -> list[str]:
        """Return the axes of the streams whose ranks have to draw the same."""
        return [axis for axis in _REPLICATING if axis in self._axes]

    def _found_shared(self, name: str) -> tuple[tuple[str, ...], bool]:
        """Return the axes along which stored streams are equal, and whether two prove it."""
        first = self._at[next(iter(self._at))]
        shared = tuple(axis for axis in self._axes if axis not in first)
        if shared:
            return shared, True
        along = [axis for axis in self._replicating() if axis in first]
        if not along:
            return (), True
        by_rest: dict[tuple[int, ...], set[str]] = {}
        for label, at in self._at.items():
            rest = tuple(at[axis] for axis in sorted(at) if axis not in along)
            by_rest.setdefault(rest, set()).add(self.digest(label, name))
        if len(by_rest) == len(self._at):
            return tuple(along), False
        is_equal = all(len(digests) == 1 and "" not in digests for digests in by_rest.values())
        return (tuple(along), True) if is_equal else ((), True)

    def _equal_outside(self, along: Sequence[str]) -> list[str]:
        """Return stored coordinates that are this rank's but for the axes `along`, ascending."""
        axes = sorted(self._mine)
        rest = [axis for axis in axes if axis not in along]
        result = [
            (tuple(at[axis] for axis in axes), label)
            for label, at in self._at.items()
            if all(at[axis] == self._mine[axis] for axis in rest)
        ]
        return [label for _, label in sorted(result)]

    def digest(self, label: str, name: str) -> str:
        """Return the stored digest of a stream; empty if that coordinate does not have it."""
        digests = self._request.stored.get(label, {}).get(DIGESTS)
        result = digests.get(name) if isinstance(digests, Mapping) else None
        return result if isinstance(result, str) else ""


def _streams_of(group: Any) -> set[str]:
    """Return the names of the streams in a stored group, per rank or not."""
    trees = group["v"] if is_per_rank(group) else {"": group}
    plain = [tree for tree in trees.values() if is_plain_dict(tree)]
    return {name for tree in plain for name in tree if name != DIGESTS}


class ModuleRNG(RNG):
    """Random streams of one module: no other module, and nothing outside, draws from them.

        streams = ModuleRNG(seed=1)
        with streams:
            features = encoder(images)  # dropout draws from this module's streams

    Python's, NumPy's, torch's and the current CUDA device's global generators are what modules
    draw from. Inside `with` they are this module's; outside they are what they would be without it.
    So modules on the same ranks do not shift each other's masks, and a module has the same streams
    wherever it runs. A part of the state, like `RNG`, in whose place it is stored and loaded; a
    load sets the streams whether or not they are entered.

    Args:
        seed: what the streams start from; one for each module, and for ranks that draw
            differently (see `groups.index("dp_cp")`), equal along `shared`.
        axes: as of `RNG`.
        shared: as of `RNG`.

    Raises:
        ConfigError: If the seed is not an integer in [0, 2**64), and if it is entered twice.

    Cost: two copies of some kB at each entry and exit; on a CUDA device it waits for nothing.
    """

    def __init__(
        self,
        *,
        seed: int,
        axes: Sequence[str] = DENSE_AXES,
        shared: Sequence[str] | None = None,
    ) -> None:
        """Seed the streams; the global ones are left as they are."""
        super().__init__(axes=axes, shared=shared)
        seed = check_int(seed, name="ModuleRNG: seed", least=0, below=2**64)
        self._held: dict[str, State] = {}
        self._outer: dict[str, State] | None = None
        outer = super()._states()
        try:
            _seed_global(seed)
            self._held = super()._states()
        finally:
            self._set_global(outer)

    @property
    def is_entered(self) -> bool:
        """True if the global generators are this module's now."""
        return self._outer is not None

    def __enter__(self) -> ModuleRNG:
        """Let everything draw from these streams."""
        if self._outer is not None:
            raise ConfigError("the streams of a module were entered twice; leave them first")
        self._outer = super()._states()
        self._set_global(self._held)
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep the streams as they are, and restore the outer ones."""
        if self._outer is None:
            return
        self._held = super()._states()
        outer, self._outer = self._outer, None
        self._set_global(outer)

    def streams(self) -> dict[str, object]:
        """Return the generators: the process's while it is entered, else none but its own."""
        return super().streams() if self.is_entered else {"its own": self}

    def _states(self) -> dict[str, State]:
        """Return the streams of the module, whether entered or not."""
        return super()._states() if self.is_entered else dict(self._held)

    def capture(self) -> CapturedStreams:
        """Return the streams of the module as they are now."""
        return super().capture() if self.is_entered else CapturedStreams({}, self._held)

    def _set_state(self, name: str, state: object) -> None:
        """Set one of the module's streams; raise MismatchError if the state is of another kind."""
        if self.is_entered:
            super()._set_state(name, state)
            return
        with self:
            super()._set_state(name, state)

    def _set_global(self, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            super()._set_state(name, state)


def _seed_global(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, that of the current device included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)

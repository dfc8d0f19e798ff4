"""Random streams as a part of the state: one per rank or shared by ranks, keyed by coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from holdfast.errors import ConfigError, MismatchError
from holdfast.format.values import is_per_rank, is_plain_dict
from holdfast.parallel.layout import DENSE_AXES, EXPERT_AXES
from holdfast.state.coordinates import (
    ConsistencyCheck,
    PerRankRequest,
    PerRankSource,
    PickedPerRank,
    parse_label,
)
from holdfast.state.generators import (
    Generator,
    State,
    Stream,
    accessors,
    check_generator,
    global_accessors,
    state_digest,
)
from holdfast.state.markers import PerRank, Stored, axis_names, coordinate_label
from holdfast.state.match.nodes import StoredPart

DIGESTS = "digests"
"""Key under which the digests of stored streams lie next to them."""
_EVERYWHERE = "everywhere"
_PREFIX = "generator-"
_REPLICATING = ("tp", "expt_tp")
"""Axes whose ranks compute the same activations, so that they have to draw the same masks."""


class RNG:
    """The streams of Python's `random`, NumPy's global generator, torch's CPU and CUDA device.

    A load gives each rank the streams of its coordinates, bitwise, after every other part of the
    state has been restored. What a rank keeps is in `LoadReport.kept`, with one warning; what no
    rank takes, because the layout is smaller, in `LoadReport.dropped`. Of CUDA the stream of the
    current device is kept; name others as generators.

    Args:
        axes: Along which ranks have streams of their own; default: each rank.
        shared: What a stream does under other layouts. Every stream without declaration of its own
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
        ConfigError: For an axis or a generator that cannot be.

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
        self._axes = axis_names(axes)
        self._shared = None if shared is None else axis_names(shared)
        self._generators: dict[str, Generator] = {}
        self._shared_by_name: dict[str, tuple[str, ...] | None] = {}
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
        """The streams of this rank, by the axes along which they are stored."""
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
        for name, state in states.items():
            self._set_state(name, state)

    def capture(self) -> dict[str, State]:
        """Stream -> its state now, which `reset` takes."""
        return self._states()

    def reset(self, states: Mapping[str, State]) -> None:
        """Set streams to states of `capture`; MismatchError for one of another kind."""
        for name, state in states.items():
            self._set_state(name, state)

    def _states(self) -> dict[str, State]:
        """Stream -> its state now."""
        own = {name: accessors(each) for name, each in self._generators.items()}
        return {name: get() for name, (get, _) in (global_accessors() | own).items()}

    def _declared(self, name: str) -> tuple[str, ...] | None:
        """The axes along which a stream is declared shared; None: not declared."""
        return self._shared_by_name.get(name, self._shared)

    def _set_state(self, name: str, state: Any) -> None:
        """Set a stream; MismatchError where the state is one of another kind of generator."""
        generator = self._generators.get(name)
        try:
            _, put = global_accessors()[name] if generator is None else accessors(generator)
            put(state)
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
    """One load of streams on one rank: what is taken from where."""

    fresh: dict[str, State]
    """The streams as they were when the load began."""
    declared: dict[str, tuple[str, ...] | None]
    sources: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Stream -> where it is stored and the coordinates that it is taken from; several where only
    their bytes can show whether they are equal."""
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
        """Which stored coordinates this rank reads; what it keeps, and what must be equal."""
        stored = _StoredStreams(request, axes=axes)
        result = PerRankSource(
            here=request.here, is_picked=True, names=frozenset((*names, DIGESTS))
        )
        labels: dict[str, None] = {}
        kept = []
        for name in names:
            taken = stored.sources(name, self.declared[name])
            if isinstance(taken, str):
                return PerRankSource(here=request.here, problem=taken)
            self.sources[name] = (key, taken)
            labels.update(dict.fromkeys(taken))
            if not taken:
                kept.append(name)
            check = stored.check(name, self.declared[name], taken, self.fresh[name])
            result.checks += [] if check is None else [check]
        result.labels = tuple(labels)
        result.kept = ("",) if kept and len(kept) == len(names) else tuple(kept)
        result.kept += ("cuda",) if "cuda" in absent and result.kept != ("",) else ()
        result.missing = tuple(name for name in absent if name != "cuda")
        if "cuda" not in names and "cuda" in _streams_of(request.stored.get(request.here)):
            # There is no device here that could draw from it.
            result.dropped = ("cuda",)
        if "cuda" not in names:
            result.names = frozenset((*names, DIGESTS, "cuda"))
        return result

    def loaded(self, name: str, tree: Mapping[str, Any]) -> Any:
        """The state that a stream is set to; MismatchError where a shared one differs."""
        if name in self.whole:
            return tree[self.whole[name]][name]
        key, labels = self.sources.get(name, ("", ()))
        if not labels:
            return self.fresh[name]
        trees = tree[key] if key else tree
        states = [trees[label][name] for label in labels]
        if len({state_digest(state) for state in states}) > 1:
            if self.declared[name] is None:
                return self.fresh[name]
            raise MismatchError(_differ(f"rng.{name}", labels, self.declared[name] or ()))
        return states[0]


class _StoredStreams:
    """Streams that a checkpoint holds along the same axes, as one rank sees them."""

    def __init__(self, request: PerRankRequest, *, axes: tuple[str, ...]) -> None:
        self._request = request
        self._axes = axes
        self._at = {label: parse_label(label) for label in request.stored}
        self._mine = parse_label(request.here)

    def sources(self, name: str, declared: tuple[str, ...] | None) -> tuple[str, ...] | str:
        """The stored coordinates of a stream for this rank; none: it stays; text: a problem."""
        here = self._request.here
        if declared is None and here in self._at:
            return (here,)
        along = [axis for axis in self._replicating() if axis in self._at[next(iter(self._at))]]
        candidates = self._equal_outside(along if declared is None else declared)
        digests = {self._digest(label, name) for label in candidates}
        if None in digests:
            # A checkpoint from before digests: the streams themselves are read and compared.
            return tuple(candidates)
        if len(digests) > 1:
            if declared is None:
                return ()
            return _differ(f"{self._request.path}.{name}", candidates, declared)
        return (here,) if here in candidates else tuple(candidates[:1])

    def check(
        self,
        name: str,
        declared: tuple[str, ...] | None,
        taken: tuple[str, ...],
        fresh: object,
    ) -> ConsistencyCheck | None:
        """What ranks that share the stream must have in common; None where none do."""
        along, is_certain = self._found_shared(name) if declared is None else (declared, True)
        axes = [axis for axis in self._axes if axis not in along]
        if not along and any(set(view) <= set(axes) for view in (DENSE_AXES, EXPERT_AXES)):
            return None
        request = self._request
        label = coordinate_label(request.layout, request.rank, axes, path=request.path)
        digest = state_digest(fresh)
        if taken:
            digest = self._digest(taken[0], name) or f"of {taken[0]}"
        if len(taken) > 1 and declared is None:
            return None
        shown = ", ".join(along) or f"all but {', '.join(axes)}"
        return ConsistencyCheck(f"{request.path}.{name}", shown, label, digest, is_certain)

    def _replicating(self) -> list[str]:
        """The axes of the streams whose ranks have to draw the same."""
        return [axis for axis in _REPLICATING if axis in self._axes]

    def _found_shared(self, name: str) -> tuple[tuple[str, ...], bool]:
        """Axes along which the stored streams are equal, and whether there are two to say so."""
        first = self._at[next(iter(self._at))]
        shared = tuple(axis for axis in self._axes if axis not in first)
        if shared:
            return shared, True
        along = [axis for axis in self._replicating() if axis in first]
        if not along:
            return (), True
        by_rest: dict[tuple[int, ...], set[str | None]] = {}
        for label, at in self._at.items():
            rest = tuple(at[axis] for axis in sorted(at) if axis not in along)
            by_rest.setdefault(rest, set()).add(self._digest(label, name))
        if len(by_rest) == len(self._at):
            return tuple(along), False
        is_equal = all(len(digests) == 1 and None not in digests for digests in by_rest.values())
        return (tuple(along), True) if is_equal else ((), True)

    def _equal_outside(self, along: Sequence[str]) -> list[str]:
        """Stored coordinates that are this rank's but for the axes `along`, ascending."""
        axes = sorted(self._mine)
        rest = [axis for axis in axes if axis not in along]
        result = [
            (tuple(at[axis] for axis in axes), label)
            for label, at in self._at.items()
            if all(at[axis] == self._mine[axis] for axis in rest)
        ]
        return [label for _, label in sorted(result)]

    def _digest(self, label: str, name: str) -> str | None:
        """The stored digest of a stream; None in a checkpoint from before there were any."""
        digests = self._request.stored[label].get(DIGESTS)
        result = digests.get(name) if isinstance(digests, Mapping) else None
        return result if isinstance(result, str) else None


def _differ(what: str, labels: Sequence[str], declared: Sequence[str]) -> str:
    """That streams that are declared shared were stored different, in words."""
    return (
        f"{what} is declared shared along {', '.join(declared)}, but the checkpoint holds "
        f"different streams along it, for {'; '.join(labels)}: load them as they are with "
        f"RNG(shared=()), or leave the random streams out of the load and seed them"
    )


def _streams_of(group: Any) -> set[str]:
    """The names of the streams in a stored group, per rank or not."""
    trees = group["v"] if is_per_rank(group) else {"": group}
    plain = [tree for tree in trees.values() if is_plain_dict(tree)]
    return {name for tree in plain for name in tree if name != DIGESTS}

"""The random streams of one rank: states of generators as trees without pickle, and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, MismatchError
from holdfast.parallel.layout import DENSE_AXES
from holdfast.state.markers import PerRank, axis_names

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
State = dict[str, object] | torch.Tensor
_Accessors = tuple[Callable[[], State], Callable[[Any], object]]

DIGESTS = "digests"
"""Key under which the digests of stored streams lie next to them."""
_EVERYWHERE = "everywhere"
_PREFIX = "generator-"


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


class RandomStreams:
    """The streams of a rank by name, and along which axes each is stored: what a save needs."""

    def __init__(
        self,
        *,
        axes: Sequence[str] = DENSE_AXES,
        shared: Sequence[str] | None = None,
        generators: Mapping[str, Generator | Stream] | None = None,
    ) -> None:
        """Declare; see `RNG`. Nothing is read yet."""
        self._axes = axis_names(axes)
        self._shared = None if shared is None else axis_names(shared)
        self._generators: dict[str, Generator] = {}
        self._shared_by_name: dict[str, tuple[str, ...] | None] = {}
        for name, given in (generators or {}).items():
            stream = given if isinstance(given, Stream) else Stream(given, self._shared)
            _check_generator(name, stream.generator)
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

    def capture(self) -> dict[str, State]:
        """Stream -> its state now, which `reset` takes."""
        return self._states()

    def reset(self, states: Mapping[str, State]) -> None:
        """Set streams to states of `capture`; MismatchError for one of another kind."""
        for name, state in states.items():
            self._set_state(name, state)

    def _states(self) -> dict[str, State]:
        """Stream -> its state now."""
        own = {name: _accessors(each) for name, each in self._generators.items()}
        return {name: get() for name, (get, _) in (_global_accessors() | own).items()}

    def _declared(self, name: str) -> tuple[str, ...] | None:
        """The axes along which a stream is declared shared; None: not declared."""
        return self._shared_by_name.get(name, self._shared)

    def _set_state(self, name: str, state: Any) -> None:
        """Set a stream; MismatchError where the state is one of another kind of generator."""
        generator = self._generators.get(name)
        try:
            _, put = _global_accessors()[name] if generator is None else _accessors(generator)
            put(state)
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            kind = f"{name} generator" if generator is None else type(generator).__name__
            if isinstance(generator, np.random.Generator):
                kind = type(generator.bit_generator).__name__
            raise MismatchError(
                f"rng: the stored stream '{name.removeprefix(_PREFIX)}' is not one of a {kind}: "
                f"{error}; load it with the kind of generator that it was saved with"
            ) from error


def _check_generator(name: str, generator: object) -> None:
    """ConfigError unless it is a generator whose state can be stored."""
    if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
        raise ConfigError(
            f"RNG: generator '{name}' is a {type(generator).__name__}; it takes torch.Generator, "
            f"numpy.random.Generator, numpy.random.RandomState and random.Random"
        )


def _accessors(generator: Any) -> _Accessors:
    """How to read the state of a generator, arrays and tensors in it new, and how to set it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda: dict(bits.state), lambda state: setattr(bits, "state", dict(state))
    if isinstance(generator, np.random.RandomState):
        read = partial(generator.get_state, legacy=False)
        return lambda: dict(read()), lambda state: generator.set_state(dict(state))
    return (
        lambda: _python_state(generator.getstate()),
        lambda state: generator.setstate(_python_tuple(state)),
    )


def _global_accessors() -> dict[str, _Accessors]:
    """The streams that every process has: Python's, NumPy's, torch's, the current device's."""
    streams: dict[str, _Accessors] = {
        "python": _accessors(random),
        "numpy": (_numpy_state, lambda state: np.random.set_state(_numpy_tuple(state))),
        "torch": _accessors(torch.default_generator),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    return streams


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


def _python_state(state: tuple[Any, ...]) -> dict[str, object]:
    """The state of a `random.Random` as a dict."""
    # 625 words as one array: as a list they would be most of a manifest.
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `setstate` takes, from the dict of `_python_state`."""
    return state["version"], tuple(int(word) for word in state["words"]), state["gauss"]


def _numpy_state() -> dict[str, object]:
    """The state of NumPy's global generator, whose bit generator may have been replaced."""
    result: Any = np.random.get_state(legacy=False)
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
    """What `np.random.set_state` takes, from the dict of `_numpy_state`."""
    if "state" in state:
        return dict(state["state"])
    names = ("name", "keys", "position", "has_gauss", "cached")
    return tuple(state[name] for name in names)

"""Generators: their states as trees without pickle, and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
State = dict[str, object] | torch.Tensor
Accessors = tuple[Callable[[], State], Callable[[Any], object]]


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
    """ConfigError unless it is a generator whose state can be stored."""
    if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
        raise ConfigError(
            f"RNG: generator '{name}' is a {type(generator).__name__}; it takes torch.Generator, "
            f"numpy.random.Generator, numpy.random.RandomState and random.Random"
        )


def accessors(generator: Any) -> Accessors:
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


def global_accessors() -> dict[str, Accessors]:
    """The streams that every process has: Python's, NumPy's, torch's, the current device's."""
    streams: dict[str, Accessors] = {
        "python": accessors(random),
        "numpy": (_numpy_state, lambda state: np.random.set_state(_numpy_tuple(state))),
        "torch": accessors(torch.default_generator),
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

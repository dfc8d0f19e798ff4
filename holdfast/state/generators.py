"""Random generators of every kind: their state as a tree without pickle, its digest, and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, MismatchError

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
State = dict[str, object] | torch.Tensor


def check_generator(name: str, generator: object) -> None:
    """ConfigError unless it is a generator whose state can be stored."""
    if not isinstance(generator, Generator) or isinstance(generator, random.SystemRandom):
        raise ConfigError(
            f"RNG: generator '{name}' is a {type(generator).__name__}; it takes torch.Generator, "
            f"numpy.random.Generator, numpy.random.RandomState and random.Random"
        )


def generator_state(generator: Generator) -> State:
    """What `set_generator_state` takes; arrays and tensors in it are new."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return _python_state(generator.getstate())


def set_generator_state(generator: Generator, state: Any, *, name: str) -> None:
    """Take a state; MismatchError where it is one of another kind of generator."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = dict(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(dict(state))
        else:
            generator.setstate(_python_tuple(state))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        kind = type(generator).__name__
        if isinstance(generator, np.random.Generator):
            kind = type(generator.bit_generator).__name__
        raise MismatchError(
            f"rng: the stored stream '{name}' is not one of a {kind}: {error}; load it with the "
            f"kind of generator that it was saved with"
        ) from error


def global_states() -> dict[str, State]:
    """The streams that the process has anyway: Python's, NumPy's, torch's, the current device's."""
    streams: dict[str, State] = {
        "python": _python_state(random.getstate()),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def set_global_state(name: str, state: Any) -> None:
    """Set one of the `global_states`; MismatchError for a state of another kind."""
    try:
        if name == "python":
            random.setstate(_python_tuple(state))
        elif name == "numpy":
            np.random.set_state(_numpy_tuple(state))
        elif name == "torch":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise MismatchError(
            f"rng: the stored stream '{name}' cannot be set here: {error}"
        ) from error


def state_digest(state: object) -> str:
    """16 hex digits, equal for equal states whatever arrays or tensors hold them."""
    digest = hashlib.blake2b(digest_size=8)
    _add(state, digest)
    return digest.hexdigest()


def _add(value: object, digest: hashlib.blake2b) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype.str} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"entry {name} ".encode())
            _add(value[name], digest)
    else:
        value = value.item() if isinstance(value, np.generic) else value
        digest.update(f"value {value!r} ".encode())


def _python_state(state: tuple[Any, ...]) -> dict[str, object]:
    version, words, gauss = state
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_tuple(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(int(word) for word in state["words"]), state["gauss"]


def _numpy_state() -> dict[str, object]:
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return {"name": str(found["bit_generator"]), "state": found}
    return {
        "name": "MT19937",
        "keys": np.array(found["state"]["key"], dtype=np.uint32),
        "position": int(found["state"]["pos"]),
        "has_gauss": int(found["has_gauss"]),
        "cached": float(found["gauss"]),
    }


def _numpy_tuple(state: Mapping[str, Any]) -> Any:
    if "state" in state:
        return dict(state["state"])
    names = ("name", "keys", "position", "has_gauss", "cached")
    return tuple(state[name] for name in names)

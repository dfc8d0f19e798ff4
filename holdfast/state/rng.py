"""Random streams as a part of the state: one per rank, keyed by coordinates."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from holdfast.errors import MismatchError
from holdfast.state.markers import PerRank, Stored


class RNG:
    """The streams of Python's `random`, NumPy's global generator, torch's CPU and each CUDA device.

    Every rank's streams are stored under its coordinates along `axes`, never as a replica of
    another rank's. A load gives each rank the streams of its coordinates; a rank whose coordinates
    the checkpoint does not have (a grown axis) keeps the fresh ones it has, and the load report
    says so once.

    `generators`: further `torch.Generator`s or `numpy.random.Generator`s by name.
    """

    def __init__(
        self,
        *,
        axes: Sequence[str] = ("tp", "cp", "dp", "pp"),
        generators: Mapping[str, torch.Generator | np.random.Generator] | None = None,
    ) -> None:
        self._axes = tuple(axes)
        self._generators = dict(generators or {})

    def tree(self) -> PerRank:
        """The streams of this rank."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        streams: dict[str, object] = {
            "python": {
                "version": version,
                "words": np.array(words, dtype=np.uint32),
                "gauss": gauss,
            },
            "numpy": {
                "name": str(name),
                "keys": np.array(keys, dtype=np.uint32),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            streams["cuda"] = torch.cuda.get_rng_state()
        for label, generator in self._generators.items():
            streams[f"generator-{label}"] = _generator_state(generator)
        return PerRank(streams, axes=self._axes, missing="keep")

    def template(self, stored: object) -> PerRank:
        """Ask for whatever is stored for this rank's coordinates."""
        del stored
        return PerRank(Stored(), axes=self._axes, missing="keep")

    def restore(self, tree: object) -> None:
        """Set the streams; nothing where the checkpoint had none for this rank."""
        if not isinstance(tree, Mapping):
            return
        python, numpy = tree["python"], tree["numpy"]
        random.setstate(
            (python["version"], tuple(int(w) for w in python["words"]), python["gauss"])
        )
        np.random.set_state(
            (numpy["name"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
        )
        torch.set_rng_state(tree["torch"])
        if "cuda" in tree and torch.cuda.is_available():
            torch.cuda.set_rng_state(tree["cuda"])
        for label, generator in self._generators.items():
            if f"generator-{label}" not in tree:
                raise MismatchError(
                    f"rng: the checkpoint has no stream for generator '{label}'; it has "
                    f"{', '.join(sorted(tree))}"
                )
            _set_generator_state(generator, tree[f"generator-{label}"])


def _generator_state(generator: torch.Generator | np.random.Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state


def _set_generator_state(generator: torch.Generator | np.random.Generator, state: object) -> None:
    if isinstance(generator, torch.Generator):
        if not isinstance(state, torch.Tensor):
            raise MismatchError("rng: a torch generator's stream is stored as something else")
        generator.set_state(state)
    else:
        generator.bit_generator.state = dict(state)  # type: ignore[call-overload]

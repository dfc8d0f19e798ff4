"""Parameters as they were before a model was sharded, which other code may still hold.

A list of weights that a module has made in its constructor, or `dict(model.named_parameters())`
taken too early: a forward that uses one would compute with the initial value always, and what is
written to one reaches no shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from holdfast.errors import ConfigError
from holdfast.fsdp import _torch

_ADVICE = (
    "fully_shard_model has replaced it. Take parameters from their modules when they are used "
    "(self.layer.weight), and lists of them from model.parameters() after fully_shard_model"
)


class Originals:
    """Refuses gradients of the parameters that were replaced, and writes to them.

    Nothing else is kept of them: they go when no other code refers to them. Writes through `.data`
    count no version, and are not seen.

    Cost: none for those that are gone.

    Args:
        parameters: by name, as they were before.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        versions = _torch.versions(parameters.values())
        self._alive = {
            name: (weakref.ref(parameter), version)
            for (name, parameter), version in zip(parameters.items(), versions, strict=True)
        }
        for name, parameter in parameters.items():
            _torch.call_after_gradients(parameter, _Refusal(name))

    def check_writes(self) -> None:
        """Raise ConfigError if one of them was written; only once."""
        alive = {
            name: parameter
            for name, (reference, _) in self._alive.items()
            if (parameter := reference()) is not None
        }
        versions = dict(zip(alive, _torch.versions(alive.values()), strict=True))
        written = [name for name, now in versions.items() if now != self._alive[name][1]]
        self._alive = {name: (self._alive[name][0], now) for name, now in versions.items()}
        if written:
            raise ConfigError(
                f"{len(written)} parameters were written as they were before fully_shard_model, "
                f"first '{written[0]}', so what was written is lost: {_ADVICE}"
            )


class _Refusal:
    """Is called by autograd with a parameter that has got a gradient."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: Any) -> NoReturn:
        parameter.grad = None
        raise ConfigError(
            f"parameter '{self._name}' got a gradient as it was before fully_shard_model, so it "
            f"would never be trained: {_ADVICE}"
        )

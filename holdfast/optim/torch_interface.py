"""Makes a sharded optimizer a `torch.optim.Optimizer` for schedulers, loops and step hooks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from holdfast.errors import ConfigError

_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's optimizers that choose an implementation; the results are the same."""
_VALUES = (Real, str, tuple, list, Tensor)
"""Types of settings, bool as a Real; values of others may print differently in each process."""


class TorchInterface(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` by type, whose groups and state are those of optimizers inside.

    Learning rate schedulers take it as it is: they set entries of `param_groups` and count calls of
    `step`, and step hooks work as on any optimizer. A method that cannot do what
    it does for a torch optimizer raises ConfigError, which says what to do instead.
    """

    def __init__(self, inners: Sequence[torch.optim.Optimizer]) -> None:
        self.inners = tuple(inners)
        """The torch optimizers inside."""
        # Sets up hooks and profiling marks of the base, whose __init__ would keep its own groups.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the torch optimizers inside; setting `group["lr"]` and other entries works."""
        if len(self.inners) == 1:
            return self.inners[0].param_groups
        return [group for inner in self.inners for group in inner.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the torch optimizers inside, by the tensor of elements it belongs to."""
        return JoinedState(self.inners)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults that all torch optimizers inside have."""
        first, *others = (inner.defaults for inner in self.inners)
        return {k: v for k, v in first.items() if all(k in other for other in others)}

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__}: torch's GradScaler finds no gradients in a sharded optimizer; "
            f"scale the loss with holdfast.LossScaler and pass it to step(scaler=...)"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those in buckets too; `step` does so itself."""
        if not set_to_none:
            raise ConfigError(
                f"{type(self).__name__}.zero_grad(set_to_none=False): gradients are in buckets, "
                f"never in .grad; call zero_grad() or drop_gradients()"
            )
        self.drop_gradients()

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget all gradients."""

    def state_dict(self) -> NoReturn:
        """Raise ConfigError: no run could continue from one rank's share, numbered by position."""
        raise ConfigError(f"{type(self).__name__}.state_dict(): {self._state_hint('save')}")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise ConfigError: a torch state dict has no shares."""
        del state_dict
        raise ConfigError(f"{type(self).__name__}.load_state_dict(): {self._state_hint('load')}")

    def _state_hint(self, verb: str) -> str:
        return (
            f"this rank holds a share of the state; {verb} OptimizerState(optimizer, model) with a "
            f"Checkpointer, which loads under any layout"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise ConfigError: buckets are laid out once."""
        del param_group
        raise ConfigError(
            f"{type(self).__name__}.add_param_group(): parameters are laid into buckets when the "
            f"optimizer is built; close() it and build another one over all parameters"
        )

    def __repr__(self) -> str:
        inside = ", ".join(repr(inner) for inner in self.inners)
        return f"{type(self).__name__}({inside})"

    def _refuse_copy(self, *_: object) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} belongs to process groups and to one model and cannot be "
            f"copied or pickled; build another one over the copied model, and carry its state over "
            f"with OptimizerState(optimizer, model)"
        )

    __getstate__ = __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy


class JoinedState(MutableMapping[Any, Any]):
    """State of the optimizers inside: each tensor's entry is that of the optimizer that has it.

    A `ChainMap` would write to the first one, clear it alone, and find an empty entry there for any
    tensor, because the state of a torch optimizer is a `defaultdict`.

    Args:
        inners: the optimizers. Keys that are not tensors belong to the first one.
    """

    def __init__(self, inners: Sequence[torch.optim.Optimizer]) -> None:
        self._inners = [*torch_optimizers(inners)]

    def _of(self, key: Any) -> Any:
        """Return the state that has an entry, or is to have it.

        Raises:
            ConfigError: No optimizer has that tensor, so what is done to the entry has no effect.
        """
        for inner in self._inners:
            if key in inner.state:
                return inner.state
        if not isinstance(key, Tensor):
            if not self._inners:
                raise KeyError(key)
            return self._inners[0].state
        for inner in self._inners:
            if any(key is tensor for group in inner.param_groups for tensor in group["params"]):
                return inner.state
        raise ConfigError(
            f"optimizer.state: a tensor of shape {list(key.shape)} is not in param_groups, so it "
            f"has no state here. Those of a sharded optimizer show the elements of each parameter "
            f"that this rank updates; take the tensors from there, not from the model"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(inner.state for inner in self._inners)

    def __len__(self) -> int:
        return sum(len(inner.state) for inner in self._inners)

    def __contains__(self, key: object) -> bool:
        return key in self._of(key)

    # The mixin's own ask for an entry, and a `defaultdict` makes one.

    def get(self, key: Any, default: Any = None) -> Any:
        return self._of(key).get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._of(key).setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self._of(key).pop(key, *default)


def torch_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Any]:
    """Yield the torch optimizers in optimizers of ours, which may be chains of others of ours."""
    for optimizer in optimizers:
        if isinstance(optimizer, TorchInterface):
            yield from torch_optimizers(optimizer.inners)
        else:
            yield optimizer


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the settings of each parameter group that decide an update, by name.

    These are the declared ones, without the choice of an implementation and schedulers' notes.
    """
    return [
        {
            key: _in_full(value) if isinstance(value, tuple | list | Tensor) else value
            for key, value in group.items()
            if key in inner.defaults and key not in _WAYS and isinstance(value, _VALUES)
        }
        for inner in torch_optimizers([optimizer])
        for group in inner.param_groups
    ]


def _in_full(value: object) -> object:
    """Return a setting with the numbers of its tensors, which they show with four digits."""
    if isinstance(value, tuple | list):
        return [_in_full(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


def refuse_closure(closure: Callable[[], object] | None) -> None:
    """Raise ConfigError for a closure: backward belongs in `microbatch`, before the step."""
    if closure is not None:
        raise ConfigError(
            "step(closure): call backward yourself (inside "
            "microbatch(is_last=...) so that gradients are reduced during it), then step()"
        )

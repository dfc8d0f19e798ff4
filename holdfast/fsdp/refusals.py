"""What others do with a model as a whole, and cannot do with one in shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError


def refuse_copies(model: nn.Module, *, units: Iterable[nn.Module]) -> None:
    """Have a sharded model say what to do instead of a copy, or of a file with its weights.

    torch refuses a copy without saying what to do, `share_memory` ends the process at a DTensor,
    and `save_pretrained` of transformers fails in the middle, with a folder that has a
    configuration and no weights.
    """
    for unit in units:
        vars(unit)["__reduce_ex__"] = _refuse_pickle
    for module in model.modules():
        if next(module.parameters(), None) is not None:  # a layer inside of a unit, too
            vars(module)["__deepcopy__"] = _refuse_deepcopy
        vars(module)["share_memory"] = _refuse_share_memory
        if callable(getattr(type(module), "save_pretrained", None)):
            vars(module)["save_pretrained"] = _SavePretrained(module)


def _refuse_deepcopy(memo: object) -> NoReturn:
    raise ConfigError(
        "a fully sharded model cannot be copied, because its shards belong to communicators and to "
        "one setup of FSDP2. For a second model build it, shard it in the same way and call "
        "load_state_dict(model.state_dict()); for a moving average keep "
        "{name: parameter.detach().clone()} of model.named_parameters(), which are shards, and "
        "update them after each step"
    )


def _refuse_pickle(protocol: object) -> NoReturn:
    raise ConfigError(
        f"a fully sharded model cannot be pickled, by torch.save neither: its shards belong to "
        f"communicators, which no other process has. Save it with a Checkpointer, which loads into "
        f"the bare model and under every other layout; or {_GATHER}, and pickle that"
    )


def _refuse_share_memory() -> NoReturn:
    raise ConfigError(
        f"a fully sharded model cannot be put into shared memory, since torch ends the process at "
        f"a shard: {_GATHER}, and share that"
    )


_GATHER = (
    "gather on all ranks, whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in "
    "model.state_dict().items()}"
)


class _SavePretrained:
    """Calls `save_pretrained` of a module with whole weights alone."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save weights that are passed as `state_dict=`.

        Raises:
            ConfigError: Before anything is written: there are none, or they are in shards.
        """
        weights = kwargs.get("state_dict")
        if weights is None or any(isinstance(each, DTensor) for each in weights.values()):
            raise ConfigError(
                f"save_pretrained of a fully sharded model would write shards: {_GATHER}, and call "
                f"save_pretrained(..., state_dict=whole) on one; or save with a Checkpointer, load "
                f"into the bare model in one process, and call it there"
            )
        module: Any = type(self._module)
        return module.save_pretrained(self._module, *args, **kwargs)

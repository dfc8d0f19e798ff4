"""What a PEFT model has besides its base model: adapters, and how AdaLoRA gives out their ranks.

The base model is not in a checkpoint: the program loads it again. Digests tell whether it is the
same one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.errors import MismatchError, some_of
from holdfast.state.tensor_elements import tensor_digest

_AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""How important AdaLoRA has found each weight: by these it decides which ranks to mask."""


class Adapters:
    """The adapters of a PEFT model, and the base model that they are trained on.

    A frozen adapter, such as the random half of LoRA-FA, belongs to what is trained, and is in no
    file of the base model.

    Args:
        model: The PEFT model, without wrappers.

    Cost:
        Each frozen parameter is read once; of a sharded one, gathered, one after the other.
    """

    def __init__(self, model: nn.Module) -> None:
        own: set[int] = set()
        for layer in model.modules():
            if hasattr(layer, "adapter_layer_names"):  # PEFT's layers, and its wrappers of modules
                own |= {
                    id(each)
                    for name, each in layer.named_parameters()
                    if not name.startswith(("base_layer.", "original_module."))
                }
        frozen = {
            name: each
            for name, each in model.named_parameters()
            if not each.requires_grad and id(each) not in own
        }
        self._base = {id(each) for each in frozen.values()}
        # Whole, so that a base model that is sharded, or in another way, is the same one.
        self._digests = {name: tensor_digest(_whole(each)) for name, each in frozen.items()}
        # AdaLoRA's own model has the averages, and no tensor of it does.
        inner: Any = getattr(model, "base_model", None)
        self._allocator = getattr(inner, "rankallocator", None)
        self._model = model

    def has(self, name: str, value: object) -> bool:
        """Return True for an entry that is saved: the choice of a `ModuleState`."""
        return id(value) not in self._base

    def tree(self) -> dict[str, object]:
        """Return what is saved besides these entries."""
        ranks: dict[str, object] = {}
        if self._allocator is not None:
            ranks = {name: dict(getattr(self._allocator, name)) for name in _AVERAGES}
            ranks["pattern"] = self._allocator.peft_config.rank_pattern
        return {"base": self._digests, "ranks": ranks}

    def compare(self, base: dict[str, str]) -> None:
        """Compare the base model with that of a checkpoint.

        Raises:
            MismatchError: It has other weights.
        """
        names = [name for name, each in base.items() if self._digests.get(name) not in (None, each)]
        if names:
            raise MismatchError(
                f"the base model has other weights than the one that the saved adapters were "
                f"trained on ({some_of(names)}), and the checkpoint has adapters alone. Load the "
                f"same base model, in the same dtype; where making the adapters changes it by what "
                f"is drawn (init_lora_weights='pissa_niter_4'), or it is made and not loaded, let "
                f"the program call set_seed before get_peft_model"
            )

    def put(self, ranks: dict[str, Any]) -> None:
        """Continue with AdaLoRA's averages of a checkpoint."""
        if self._allocator is None or not ranks:
            return
        device = next(self._model.parameters()).device
        for name in _AVERAGES:
            moved = {key: each.to(device) for key, each in ranks[name].items()}
            setattr(self._allocator, name, moved)
        self._allocator.peft_config.rank_pattern = ranks["pattern"]


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """Return all elements of a parameter. Collective if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

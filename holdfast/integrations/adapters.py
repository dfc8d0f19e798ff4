"""What a PEFT model has besides its base model: adapters, and how AdaLoRA gives out their ranks.

The base model is not in a checkpoint: the program loads it again. Digests tell whether it is the
same one. A weight of it that changes as the run goes on (ReLoRA merges adapters into it again and
again) is saved from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast._torch import write_counter
from holdfast.errors import MismatchError, some_of
from holdfast.parallel import Control
from holdfast.state.tensor_elements import local_of, tensor_digest

_AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")
"""How important AdaLoRA has found each weight: by these it decides which ranks to mask."""
_NUM_SAMPLES = 4096
"""Elements of each frozen weight that every save compares."""


class Adapters:
    """The adapters of a PEFT model, and the base model that they are trained on.

    A frozen adapter, such as the random half of LoRA-FA, belongs to what is trained, and is in no
    file of the base model.

    Args:
        model: The PEFT model, without wrappers.

    Cost:
        Each frozen parameter is read once; of a sharded one, gathered, one after the other. Each
        save looks at some elements of what this rank has of it.
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
        self._base = frozen
        self._ids = {id(each) for each in frozen.values()}
        self._looks = {name: _look(each) for name, each in frozen.items()}
        self._changed: list[str] = []
        # Whole, so that a base model that is sharded, or in another way, is the same one.
        self._digests = {name: tensor_digest(_whole(each)) for name, each in frozen.items()}
        self._own = {
            name: tensor_digest(local_of(each))
            if isinstance(each, DTensor)
            else self._digests[name]
            for name, each in frozen.items()
        }
        self._model = model

    def has(self, name: str, value: object) -> bool:
        """Return True for an entry that is saved: the choice of a `ModuleState`."""
        return id(value) not in self._ids

    def note_changes(self, control: Control) -> None:
        """Take note of weights of the base model that have changed: they are saved, too.

        PEFT writes through `.data`, which counts no writes: then some elements tell. A rank whose
        shard of one has not changed, or that has none of it, learns of it from the others.

        Cost: one small collective.
        """
        changed: list[str] = []
        for name, each in self._base.items():
            before, self._looks[name] = self._looks[name], _look(each)
            was_written, differs = (a != b for a, b in zip(before, self._looks[name], strict=True))
            if differs or (was_written and tensor_digest(local_of(each)) != self._own[name]):
                changed.append(name)
        answers = control.all_gather(json.dumps(changed).encode(), phase="weights of a base model")
        self._keep(sorted({name for each in answers for name in json.loads(each)}))

    def _keep(self, names: Sequence[str]) -> None:
        """Let weights of the base model be saved and loaded."""
        for name in names:
            self._ids.discard(id(self._base.pop(name, None)))
            self._digests.pop(name, None)
        self._changed += names

    def tree(self) -> dict[str, object]:
        """Return what is saved besides these entries."""
        ranks = rank_averages(self._model)
        return {"base": self._digests, "ranks": ranks, "changed": self._changed}

    def compare(self, base: dict[str, str], changed: Sequence[str]) -> None:
        """Compare the base model with that of a checkpoint, which has those that had changed.

        Raises:
            MismatchError: It has other weights.
        """
        self._keep(changed)
        names = [name for name, each in base.items() if self._digests.get(name) not in (None, each)]
        if names:
            raise MismatchError(
                f"the base model has other weights than the one that the saved adapters were "
                f"trained on ({some_of(names)}), and the checkpoint has adapters alone. Load the "
                f"same base model, in the same dtype; where making the adapters changes it by what "
                f"is drawn (init_lora_weights='pissa_niter_4'), or it is made and not loaded, let "
                f"the program call set_seed before get_peft_model"
            )


def rank_averages(model: nn.Module) -> list[dict[str, Any]]:
    """Return how important AdaLoRA has found what it adapts in a model, and the ranks it has left.

    No state dict has it: the model of AdaLoRA keeps it in an object of its own.
    """
    return [
        {name: dict(getattr(each, name)) for name in _AVERAGES}
        | {"pattern": each.peft_config.rank_pattern}
        for each in _allocators(model)
    ]


def put_rank_averages(model: nn.Module, stored: Sequence[Mapping[str, Any]]) -> None:
    """Continue with AdaLoRA's averages of a checkpoint."""
    device = next((each.device for each in model.parameters()), None)
    for allocator, ranks in zip(_allocators(model), stored, strict=False):
        for name in _AVERAGES:
            setattr(allocator, name, {key: each.to(device) for key, each in ranks[name].items()})
        allocator.peft_config.rank_pattern = ranks["pattern"]


def _allocators(model: nn.Module) -> list[Any]:
    """Return what gives out ranks in the models of AdaLoRA inside of a model."""
    known = (getattr(each, "__dict__", {}).get("rankallocator") for each in model.modules())
    return [each for each in known if each is not None]


def _look(tensor: torch.Tensor) -> tuple[int, bytes]:
    """Return what changes with a tensor: its count of writes, and some of its elements."""
    flat = local_of(tensor).reshape(-1)
    some = flat[:: max(1, flat.numel() // _NUM_SAMPLES)].contiguous().view(torch.uint8)
    return write_counter(tensor), some.cpu().numpy().tobytes()


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """Return all elements of a parameter. Collective if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

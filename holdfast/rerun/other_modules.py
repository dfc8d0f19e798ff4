"""Modules that the machine does not know, and that a run changes: a rerun changes them twice.

An average of the parameters, a target network or a metric that is updated inside of the loop over
attempts takes the bad run in, and the good one after it. Nothing of the machine refers to it. So
all modules of the process are looked at, around one early run and around each rerun.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast._torch import module_table, storage_id, write_counter
from holdfast.state.tensor_elements import equal_bits, local_of, memory_key, tensors_of

_NUM_SAMPLES = 64


class OtherModules:
    """The tensors of all modules of this process but some, as they are now.

    Args:
        known: modules that are left out, and their tensors.

    Cost: a walk over the objects that Python's collector knows, some 50 ns each, and a copy of up
    to 64 elements of each tensor: a write through `.data` is counted nowhere.
    """

    def __init__(self, known: Iterable[nn.Module]) -> None:
        known = list(known)
        own = {id(each) for module in known for each in _tensors_in(module).values()}
        known_ids = set(map(id, known))
        self._seen = [
            (f"{type(root).__qualname__}: {name}", tensor, write_counter(tensor), _sample(tensor))
            for root in _roots()
            if id(root) not in known_ids
            for name, tensor in _all_tensors(root).items()
            if id(tensor) not in own and _is_in_memory(tensor)
        ]

    def changed(self, saved: object) -> list[str]:
        """Return the tensors that were written to since then, by class of the module and name.

        Args:
            saved: what hooks have saved, and bring back; such tensors are left out.
        """
        brought_back = {
            storage_id(local_of(each)) for _, each in tensors_of(saved) if _is_in_memory(each)
        }
        return [
            name
            for name, tensor, version, sample in self._seen
            if storage_id(local_of(tensor)) not in brought_back
            and (write_counter(tensor) != version or not equal_bits(_sample(tensor), sample))
        ]


def _roots() -> list[nn.Module]:
    """Return the modules of this process that no other module holds."""
    # Asked of the type: `isinstance` runs code of proxies. A module that is being made has no
    # tables yet.
    modules = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), nn.Module) and "_modules" in vars(each)
    ]
    inside = {id(child) for each in modules for child in module_table(each).values()}
    return [each for each in modules if id(each) not in inside]


def _all_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(root.named_parameters()), **dict(root.named_buffers())}


def _tensors_in(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _is_in_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_inference():  # whose writes are not counted
        return False
    return memory_key(local_of(tensor)) is not None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    elements = local.view(-1) if local.is_contiguous() else local.new_empty(0)
    return elements[:: max(1, elements.numel() // _NUM_SAMPLES)].clone()

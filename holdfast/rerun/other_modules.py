"""Modules that the machine does not know, and that a run changes: a rerun changes them twice.

An average of the parameters, a target network or a metric that is updated inside of the loop over
attempts takes the bad run in, and the good one after it. Nothing of the machine refers to it. So
all modules of the process are looked at, around one early run and around each rerun.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from holdfast._torch import module_table, registered_in, storage_id, write_counter
from holdfast.state.module_tree import children_of
from holdfast.state.plain_attributes import PlainAttributes
from holdfast.state.tensor_elements import equal_bits, local_of, memory_key, tensors_of

_NUM_SAMPLES = 64


@dataclass(slots=True)
class _Seen:
    """A tensor as it was. Nothing is kept alive by it but its sample."""

    path: str
    module: weakref.ref[nn.Module]
    name: str
    tensor: weakref.ref[torch.Tensor]
    num_writes: int
    sample: torch.Tensor

    def changed(self) -> torch.Tensor | None:
        """Return the tensor that is there now, if it has other elements."""
        module = self.module()
        now = None if module is None else registered_in(module).get(self.name)
        if now is None or not _is_in_memory(now):
            return None
        is_same = now is self.tensor()
        if is_same and _num_writes(now) != self.num_writes:
            return now
        if not is_same and isinstance(now, nn.Parameter | DTensor):
            return None  # FSDP2 registers a shard or the whole, by turns
        return None if equal_bits(_sample(now), self.sample) else now


class OtherModules:
    """The tensors of all modules of this process but some, as they are now.

    No code of a module is run. Modules that `gc.freeze` has hidden from the collector are not seen.

    Args:
        known: modules that are left out, and their tensors.

    Cost: a walk over the objects that Python's collector knows, some 80 ns each, and a copy of up
    to 64 elements of each tensor, some 20 µs: a write through `.data` is counted nowhere.
    """

    def __init__(self, known: Iterable[nn.Module]) -> None:
        known = list(known)
        tensors = [each for module in known for each in registered_in(module).values()]
        own = set(map(id, tensors))
        self._own_memory = _memory_of(tensors)
        modules = list(_others({id(each) for each in known}))
        self._attributes = PlainAttributes(kinds=(torch.Tensor, np.ndarray))
        self._modules = [(path, weakref.ref(module)) for path, module in modules]
        self._attributes.look_at_modules(modules, {})
        self._seen = [
            _Seen(
                path + name, weakref.ref(module), name, weakref.ref(tensor), _num_writes(tensor),
                _sample(tensor),
            )
            for path, module in modules
            for name, tensor in registered_in(module).items()
            if id(tensor) not in own and _is_in_memory(tensor)
        ]  # fmt: skip

    def changed(self, saved: object) -> list[str]:
        """Return the tensors that have changed since then, by class of the outer module and name.

        Registered ones, and those in plain attributes, where metrics have theirs.

        Args:
            saved: what hooks have saved, and bring back; such tensors are left out.
        """
        brought_back = [each for _, each in tensors_of(saved)]
        memory = _memory_of(brought_back)
        changed = [(each.path, each.changed()) for each in self._seen]
        alive = [(path, module) for path, ref in self._modules if (module := ref()) is not None]
        return [
            path
            for path, now in changed
            if now is not None
            and storage_id(local_of(now)) not in memory
            and not any(equal_bits(now, each) for each in brought_back)
        ] + self._attributes.look_at_modules(alive, {"hooks": saved}, memory=self._own_memory)


def broadcast_buffers() -> set[int]:
    """Return the ids of buffers that each forward gives all replicas from the first of them.

    A model of `Replayed` may be inside of a DistributedDataParallel that the machine does not know.
    """
    return {
        id(buffer)
        for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel) and each.broadcast_buffers
        for buffer in each.modules_buffers
    }


def _others(known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of this process that is not known, and the start of its tensors' names."""
    # Asked of the type: `isinstance` runs code of proxies. A module that is being made has no
    # tables yet.
    modules = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), nn.Module) and "_modules" in vars(each)
    ]
    inside = {id(child) for each in modules for child in module_table(each).values()}
    waiting = [(f"{type(each).__qualname__}: ", each) for each in modules if id(each) not in inside]
    done = set(known)  # with what is inside of them
    while waiting:
        path, module = waiting.pop()
        if id(module) not in done:
            done.add(id(module))
            waiting += [(f"{path}{name}.", child) for name, child in children_of(module).items()]
            yield path, module


def _memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {storage_id(local_of(each)) for each in tensors if _is_in_memory(each)}


def _num_writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else write_counter(tensor)


def _is_in_memory(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and memory_key(local_of(tensor)) is not None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    local = local_of(tensor)
    elements = local.view(-1) if local.is_contiguous() else local.new_empty(0)
    return elements[:: max(1, elements.numel() // _NUM_SAMPLES)].clone()

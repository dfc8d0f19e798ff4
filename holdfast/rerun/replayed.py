"""What is brought back before a step runs again: random streams, buffers, whatever hooks do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast._torch import buffer_table, unsaved_buffers
from holdfast.errors import ConfigError
from holdfast.format.values import Codecs
from holdfast.rerun.kept_trees import is_sparse, is_strided, keep_tree, revive_tree
from holdfast.state import RNG

Hook = tuple[Callable[[], Any], Callable[[Any], object]]
"""What takes a state of the caller's, and what brings it back; it may be brought back twice."""


class Replayed:
    """What a run of a step changes, but for batches, gradients and what the caller drops itself.

    Args:
        modules: all their buffers are brought back, with their memory: persistent or not, replaced,
            resized, removed or added meanwhile.
        rng: whether the global streams of Python, NumPy, torch and the current CUDA device are.
        streams: further random streams: `RNG(generators=…)`, `ModuleRNG`.
        hooks: pairs (save, restore) for anything else: caches, counters, queues. What `save`
            returns is copied, so it may refer to what the step changes: (model.state_dict,
            model.load_state_dict).

    Raises:
        ConfigError: an argument of another kind.

    Cost: `take` copies the buffers and some 10 kB for each set of streams.
    """

    def __init__(
        self,
        *,
        modules: Iterable[nn.Module] = (),
        rng: bool = True,
        streams: Sequence[RNG] = (),
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Nothing is taken yet."""
        if isinstance(modules, nn.Module):
            modules = (modules,)
        self._modules = tuple(modules)
        self._streams = (*((RNG(),) if rng else ()), *streams)
        self._hooks = tuple(hooks)
        for kind, members in ((nn.Module, self._modules), (RNG, self._streams)):
            for each in members:
                if not isinstance(each, kind):
                    raise ConfigError(
                        f"Replayed: a {type(each).__name__} is no {kind.__name__}; anything but "
                        f"modules and streams is brought back by hooks=[(save, restore)]"
                    )
        for hook in self._hooks:
            if len(hook) != 2 or not all(callable(half) for half in hook):
                raise ConfigError("Replayed: a hook is a pair of functions (save, restore)")
        self._taken: _Snapshot | None = None

    def take(self) -> None:
        """Take what there is now; what was taken before is forgotten.

        Raises:
            ConfigError: a lazy module has not run yet.
        """
        self._taken = _Snapshot(
            streams=[stream.capture() for stream in self._streams],
            buffers=[_Buffers(each) for each in self._submodules()],
            hooks=[_copy_of(save()) for save, _ in self._hooks],
        )

    def restore(self) -> None:
        """Bring back what was taken; may be called again.

        Raises:
            ConfigError: nothing was taken.
        """
        taken = self._taken
        if taken is None:
            raise ConfigError("Replayed.restore before take: there is nothing to bring back")
        for buffers in taken.buffers:
            buffers.restore()
        for (_, restore), state in zip(self._hooks, taken.hooks, strict=True):
            restore(_copy_of(state))
        # Last: anything above may draw.
        for stream, states in zip(self._streams, taken.streams, strict=True):
            stream.reset(states)

    def kept(self, *, codecs: Codecs) -> object:
        """What was taken of streams, and of buffers that no state dict has, as `keep_tree` does.

        For another process: the state has everything else.

        Raises:
            ConfigError: naming module, buffer and type of what cannot be kept, and the fix.

        Cost: copies of these buffers.
        """
        taken = self._taken
        if taken is None:
            raise ConfigError("Replayed.kept before take: there is nothing to keep")
        buffers = {
            str(index): {
                name: keep_tree(
                    value, path=f"buffer '{name}' of a {each.module_name}", codecs=codecs
                )
                for name, value in each.unsaved().items()
            }
            for index, each in enumerate(taken.buffers)
        }
        streams = [dict(states) for states in taken.streams]
        return {
            "streams": keep_tree(streams, path="random streams", codecs=codecs),
            "buffers": {index: each for index, each in buffers.items() if each},
        }

    def replay_kept(self, kept: Any, *, codecs: Codecs) -> None:
        """Set streams and unsaved buffers to what `kept` gave in another process.

        Streams of other generators than here, and buffers of other names or shapes, stay.
        """
        for index, each in enumerate(self._submodules()):
            stored = kept["buffers"].get(str(index), {})
            for name, buffer in each.named_buffers(recurse=False):
                if name not in stored:
                    continue
                value = revive_tree(stored[name], path=f"buffer '{name}'", codecs=codecs)
                if value.shape == _local(buffer).shape:
                    _assign(_local(buffer), value)
        streams = revive_tree(kept["streams"], path="random streams", codecs=codecs)
        if len(streams) == len(self._streams):
            for stream, states in zip(self._streams, streams, strict=True):
                known = stream.capture()
                stream.reset({name: state for name, state in states.items() if name in known})

    def _submodules(self) -> list[nn.Module]:
        """Every module once, in the order of the tree."""
        seen: dict[int, nn.Module] = {}
        for root in self._modules:
            for each in root.modules():
                seen.setdefault(id(each), each)
        return list(seen.values())


class _Snapshot:
    """What was taken at one time."""

    def __init__(
        self, *, streams: list[dict[str, Any]], buffers: list[_Buffers], hooks: list[Any]
    ) -> None:
        self.streams = streams
        self.buffers = buffers
        self.hooks = hooks


class _Buffers:
    """The buffers of one module, not of those inside of it: the tensors and copies of them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._unsaved = set(unsaved_buffers(module))
        self._tensors = dict(buffer_table(module).items())
        for name, each in self._tensors.items():
            if each is not None and is_lazy(each):
                raise ConfigError(
                    f"buffer '{name}' of a {self.module_name} has no elements yet (a lazy module): "
                    f"run the model once before its first step"
                )
        self._memory = {
            name: each.detach()
            for name, each in self._tensors.items()
            if each is not None and _is_in_memory(each)
        }
        """The memory of each buffer, also while the buffer has another one."""
        self._copies = {
            name: (self._memory[name] if name in self._memory else each.detach()).clone()
            for name, each in self._tensors.items()
            if each is not None
        }

    @property
    def module_name(self) -> str:
        """The module's class, for messages."""
        return type(self._module).__qualname__

    def restore(self) -> None:
        """The same tensors with the same values under the same names, and no others."""
        module = self._module
        buffers: Any = buffer_table(module)
        if isinstance(buffers, dict):
            buffers.clear()
            buffers.update(self._tensors)
            unsaved_buffers(module).clear()
            unsaved_buffers(module).update(self._unsaved)
        else:  # of a ScriptModule, which can neither gain nor lose one
            for name, tensor in self._tensors.items():
                if buffers[name] is not tensor:
                    setattr(module, name, tensor)
        for name, tensor in self._tensors.items():
            if tensor is None:
                continue
            saved = self._copies[name]
            memory = self._memory.get(name)
            if memory is None:
                _assign(tensor, saved)
                continue
            if not _holds(memory, saved):  # resized, released, or one element under many indices
                memory = saved.clone()
            else:
                memory.copy_(saved)
            if not _is_same_view(tensor, memory):
                tensor.data = memory

    def unsaved(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that are not persistent."""
        return {name: _local(each) for name, each in self._copies.items() if name in self._unsaved}


def _copy_of(state: Any) -> Any:
    """A copy of what a hook has returned; it never leaves the process, so it may be anything."""
    try:
        return copy.deepcopy(state)
    except Exception as error:
        raise ConfigError(
            f"what a hook of Replayed has returned, a {type(state).__qualname__}, cannot be "
            f"copied: {type(error).__name__}: {error}; return plain values and detached tensors"
        ) from error


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether a buffer is a view of one run of memory, and nothing more."""
    return type(tensor) in (torch.Tensor, nn.Buffer) and is_strided(tensor)


def _is_same_view(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether a buffer still is the view of its memory that it was."""
    return (
        tensor.data_ptr() == memory.data_ptr()
        and tensor.dtype == memory.dtype
        and tensor.shape == memory.shape
        and tensor.stride() == memory.stride()
        and tensor.is_conj() == memory.is_conj()
    )


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a buffer the elements of a copy of it, which stays what it is."""
    with torch.no_grad():
        if is_sparse(tensor):
            # `copy_` alone needs as many stored elements; `.data =` does nothing where the layout
            # is a compressed one.
            tensor.resize_as_sparse_(value).copy_(value)
        elif is_strided(tensor):
            tensor.copy_(value)
        else:
            tensor.data = value.detach().clone()


def _holds(memory: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a buffer's memory can take what it held."""
    if memory.shape != saved.shape or 0 in memory.stride():
        return False
    last = sum((n - 1) * s for n, s in zip(memory.shape, memory.stride(), strict=True))
    end = (memory.storage_offset() + last + 1) * memory.element_size()
    return memory.numel() == 0 or end <= memory.untyped_storage().nbytes()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

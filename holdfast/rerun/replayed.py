"""Restores random streams, buffers and the state of hooks before a step runs again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from holdfast._torch import (
    buffer_table,
    copy_each,
    form_check,
    registrations,
    unsaved_buffers,
)
from holdfast.errors import ConfigError
from holdfast.format.values import Codecs, join_path
from holdfast.rerun.kept_trees import is_sparse, is_strided, keep_tree, revive_tree, span_of
from holdfast.rerun.other_modules import OtherModules
from holdfast.state import RNG
from holdfast.state.plain_attributes import PlainAttributes
from holdfast.state.rng import CapturedStreams, Generator, accessors
from holdfast.state.tensor_elements import equal_trees, instances_in, local_part
from holdfast.state.tensor_memory import addresses_of

_TABLES = frozenset(vars(nn.Module()))
"""What every module has, and no user's attribute is in."""
Hook = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns a state of the caller, and one that restores it, perhaps twice."""


class Replayed:
    """Restores everything that a run of a step changes, except batches and gradients.

    Args:
        modules: all their buffers are restored, with their memory: persistent or not, even if they
            were replaced, resized, removed or added in the meantime.
        rng: True to restore the global streams of Python, NumPy, torch and the current CUDA device.
        streams: further random streams: `RNG(generators=…)`, `ModuleRNG`.
        hooks: pairs (save, restore) for anything else: caches, counters, queues. The state that
            `save` returns is copied, so it may refer to objects that the step changes:
            (model.state_dict, model.load_state_dict).

    Raises:
        ConfigError: an argument is wrong.

    Cost: `take` copies the buffers, by one call where they are where they were, and some 10 kB for
    each set of streams.
    """

    def __init__(
        self,
        *,
        modules: Iterable[nn.Module] = (),
        rng: bool = True,
        streams: Sequence[RNG] = (),
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Check the arguments; `take` comes first."""
        if isinstance(modules, nn.Module):
            modules = (modules,)
        self._modules = tuple(modules)
        self._streams = (*((RNG(),) if rng else ()), *streams)
        self._hooks = tuple(hooks)
        for kind, words, members in (
            (nn.Module, "a module", self._modules),
            (RNG, "a set of random streams", self._streams),
        ):
            for each in members:
                if not isinstance(each, kind):
                    raise ConfigError(
                        f"Replayed: a {type(each).__name__} is not {words}; to "
                        f"restore anything else, pass hooks=[(save, restore)]"
                    )
        for hook in self._hooks:
            if len(hook) != 2 or not all(callable(half) for half in hook):
                raise ConfigError("Replayed: each hook must be a pair of functions (save, restore)")
        self._taken: _Snapshot | None = None
        self._watched: PlainAttributes | None = None
        self._others: OtherModules | None = None
        self._drawn: list[tuple[str, Any, object]] = []
        self._named: set[str] = set()
        """What `changed_attributes` and `changed_others` have returned."""
        self._with_buffers: list[nn.Module] = []
        self._num_registered = -1
        """How many tensors and modules had been registered anywhere when the list was made."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules whose buffers are restored."""
        return self._modules

    @property
    def has_hooks(self) -> bool:
        """True if functions of the caller bring more back."""
        return bool(self._hooks)

    @property
    def streams(self) -> tuple[RNG, ...]:
        """The random streams that are restored."""
        return self._streams

    def take(self) -> None:
        """Take a snapshot in place of the last one.

        Raises:
            ConfigError: a lazy module has not run yet.
        """
        self._watched = self._others = None
        streams = [stream.capture() for stream in self._streams]
        hooks = [_copy_of(save()) for save, _ in self._hooks]
        taken, self._taken = self._taken, None  # an interrupt leaves no snapshot of two times
        modules = self._modules_with_buffers()
        buffers = None if taken is None else taken.buffers
        if buffers is None or not buffers.copy_again(modules):
            buffers = _AllBuffers(modules, last=buffers)
        self._taken = _Snapshot(streams=streams, buffers=buffers, hooks=hooks)

    def restore(self) -> None:
        """Restore the snapshot; may be called again.

        Raises:
            ConfigError: `take` was not called before.
        """
        taken = self._snapshot("restore")
        for buffers in taken.buffers.each:
            buffers.restore()
        known = {id(each.module) for each in taken.buffers.each}
        for module in self._submodules():
            if id(module) not in known and buffer_table(module):
                _Buffers.forget(module)  # it had none when the step began
        for (_, restore), state in zip(self._hooks, taken.hooks, strict=True):
            restore(_copy_of(state))
        # Streams come last: everything above may draw random numbers.
        for stream, states in zip(self._streams, taken.streams, strict=True):
            stream.reset(states)

    def watch(self) -> None:
        """Note what the modules keep in plain attributes, and the tensors of others, before a run.

        Cost: 2 to 7 µs for each module with code of the user's, and that of `OtherModules`.
        """
        self._watched = PlainAttributes()
        self._look(self._watched, {})
        self._drawn = self._own_generators()
        self._others = OtherModules(self._submodules())

    def changed_attributes(self) -> list[str]:
        """Return the attributes that a run has changed since `watch`, each name once.

        `restore` does not bring them back, unless a hook does: those that a hook saves are left
        out. Empty without a `watch` before.
        """
        watched, self._watched = self._watched, None
        drawn, self._drawn = self._drawn, []
        if watched is None:
            return []
        saved = self._saved()
        shown = [*saved.values()]
        shown += [inner for each in shown if isinstance(each, Mapping) for inner in each.values()]
        names = self._look(watched, saved)
        for name, generator, before in drawn:
            now = accessors(generator).get()
            if not equal_trees(before, now) and not any(equal_trees(now, each) for each in shown):
                names.append(name)
        return self._new(names)

    def changed_others(self) -> list[str]:
        """Return the tensors of modules that are not known which a run has changed, each once.

        As `changed_attributes`.
        """
        others, self._others = self._others, None
        return [] if others is None else self._new(others.changed(self._saved()))

    def _own_generators(self) -> list[tuple[str, Any, object]]:
        """Return the random generators in attributes of modules, by name, and their states.

        Without those of `streams`, which are restored.
        """
        known = {id(each) for streams in self._streams for each in streams.streams().values()}
        generators: dict[int, tuple[str, Any, object]] = {}
        for number, root in enumerate(self._modules):
            start = f"{number}." if len(self._modules) > 1 else ""
            for prefix, module in root.named_modules():
                own = {name: value for name, value in vars(module).items() if name not in _TABLES}
                for name, each in instances_in(own, Generator):
                    if id(getattr(each, "bit_generator", each)) not in known:
                        path = start + join_path(prefix, name)
                        generators.setdefault(id(each), (path, each, accessors(each).get()))
        return [*generators.values()]

    def _saved(self) -> dict[str, Any]:
        return {f"hook {number}": save() for number, (save, _) in enumerate(self._hooks)}

    def _new(self, names: Iterable[str]) -> list[str]:
        """Return the names that were not returned before."""
        names = [name for name in names if name not in self._named]
        self._named.update(names)
        return names

    def _look(self, attributes: PlainAttributes, saved: dict[str, Any]) -> list[str]:
        names = [
            name
            for number, module in enumerate(self._modules)
            for name in attributes.look(str(number), module, saved)
        ]
        return names if len(self._modules) > 1 else [name.removeprefix("0.") for name in names]

    def kept(self, *, codecs: Codecs) -> object:
        """Return the streams and the buffers that no state dict has, in the form of `keep_tree`.

        They are for another process; everything else is in the state.

        Raises:
            ConfigError: a buffer cannot be kept; the message names module, buffer, type and fix.

        Cost: copies of these buffers.
        """
        return self._as_tree(self._snapshot("kept"), codecs=codecs, with_saved=False)

    def lent(self, *, codecs: Codecs, without: Collection[int] = ()) -> object:
        """Return streams, all buffers and the states of hooks, for a replica with equal parameters.

        Args:
            codecs: the types beyond the built-in ones.
            without: ids of buffers that each replica keeps.

        Raises:
            ConfigError: a buffer, or what a hook has returned, cannot be kept.

        Cost: copies of the buffers.
        """
        taken = self._snapshot("lent")
        hooks = [
            keep_tree(state, path=f"hook {i}", codecs=codecs) for i, state in enumerate(taken.hooks)
        ]
        tree = self._as_tree(taken, codecs=codecs, with_saved=True, without=without)
        return {**tree, "hooks": hooks}

    def borrow(self, lent: Any, *, codecs: Codecs) -> None:
        """Set everything to what `lent` has returned on another rank; `restore` undoes it."""
        for number, ((_, restore), state) in enumerate(
            zip(self._hooks, lent["hooks"], strict=True)
        ):
            restore(revive_tree(state, path=f"hook {number}", codecs=codecs))
        self.replay_kept(lent, codecs=codecs)

    def _snapshot(self, caller: str) -> _Snapshot:
        if self._taken is None:
            raise ConfigError(f"Replayed.{caller} was called before take; call take first")
        return self._taken

    def _as_tree(
        self, taken: _Snapshot, *, codecs: Codecs, with_saved: bool, without: Collection[int] = ()
    ) -> dict[str, Any]:
        """Return the streams, and the buffers of a snapshot, by the number of their module."""
        numbers = {id(each): str(i) for i, each in enumerate(self._submodules())}
        buffers = {
            numbers[id(each.module)]: {
                name: keep_tree(
                    value, path=f"buffer '{name}' of a {each.module_name}", codecs=codecs
                )
                for name, value in each.copies(with_saved=with_saved, without=without).items()
            }
            for each in taken.buffers.each
            if id(each.module) in numbers
        }
        streams = [each.states() for each in taken.streams]
        return {
            "streams": keep_tree(streams, path="random streams", codecs=codecs),
            "buffers": {index: each for index, each in buffers.items() if each},
        }

    def replay_kept(self, kept: Any, *, codecs: Codecs) -> None:
        """Set streams and buffers to those that `kept` returned in another process.

        Streams of generators that do not exist here, and buffers of other names or shapes, are
        ignored.
        """
        for index, each in enumerate(self._submodules()):
            stored = kept["buffers"].get(str(index), {})
            for name, buffer in each.named_buffers(recurse=False):
                if name not in stored:
                    continue
                value = revive_tree(stored[name], path=f"buffer '{name}'", codecs=codecs)
                local = local_part(buffer)
                if value.shape == local.shape:
                    _assign(local, value)
        streams = revive_tree(kept["streams"], path="random streams", codecs=codecs)
        if len(streams) == len(self._streams):
            for stream, states in zip(self._streams, streams, strict=True):
                known = stream.capture().states()
                stream.reset({name: state for name, state in states.items() if name in known})

    def _modules_with_buffers(self) -> list[nn.Module]:
        """Return the modules that have buffers.

        Walking over all of a large model takes longer than copying its buffers. So the list is made
        again only if a tensor or a module has been registered since, with any module.
        """
        if not self._modules:
            return []
        if self._num_registered != registrations():
            self._with_buffers = [each for each in self._submodules() if buffer_table(each)]
            self._num_registered = registrations()
        return self._with_buffers

    def _submodules(self) -> list[nn.Module]:
        """Return every module once, in the order of the tree."""
        seen: dict[int, nn.Module] = {}
        for root in self._modules:
            for each in root.modules():
                seen.setdefault(id(each), each)
        return list(seen.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """Streams, buffers and states of hooks at one time."""

    streams: list[CapturedStreams]
    buffers: _AllBuffers
    hooks: list[Any]


class _AllBuffers:
    """The buffers of some modules, copied by one call as long as all are what and where they were.

    Args:
        modules: those that have buffers.
        last: the copies before, whose memory is used again.

    Attributes:
        each: by module, in their order.
    """

    def __init__(self, modules: list[nn.Module], *, last: _AllBuffers | None) -> None:
        known = {id(each.module): each for each in last.each} if last is not None else {}
        self._modules = modules
        self.each: list[_Buffers] = []
        again: list[_Buffers] = []
        for module in modules:
            each = known.get(id(module))
            if each is None or not each.can_be_copied_again():
                each = _Buffers(module)
            else:
                again.append(each)
            self.each.append(each)
        self._copy(again)
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._are_alike: Callable[[Sequence[torch.Tensor]], bool] | None = None
        self._is_again = False
        """True once they were copied again: it pays to know how to ask all tensors by one call."""

    def copy_again(self, modules: list[nn.Module]) -> bool:
        """Copy all buffers into the same memory once more; False if some module's have changed.

        Args:
            modules: those that have buffers now; another list after any registration.
        """
        if modules is not self._modules or not all(map(_Buffers.has_its_tensors, self.each)):
            return False
        is_same = (
            self._are_alike is not None
            and self._are_alike(self._tensors)
            and addresses_of(self._tensors) == self._addresses
        )
        if not is_same and not all(map(_Buffers.can_be_copied_again, self.each)):
            return False
        if not self._is_again:
            self._is_again = True
            self._tensors = [tensor for each in self.each for tensor in each.tensors]
            self._addresses = addresses_of(self._tensors)
            self._are_alike = form_check(self._tensors)
        self._copy(self.each)
        return True

    @staticmethod
    def _copy(buffers: Sequence[_Buffers]) -> None:
        targets = [copy for each in buffers for copy in each.own_copies]
        if targets:
            copy_each(targets, [memory for each in buffers for memory in each.memory])


class _Buffers:
    """The buffers of one module without its submodules: the tensors, and copies of them.

    A step may replace a buffer, or its `.data`. So three things are kept: the tensor object (others
    may refer to it), a detached tensor that keeps its memory alive, and a copy of its elements.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._unsaved = set(unsaved_buffers(module))
        self._tensors = dict(buffer_table(module).items())
        self._names, self._ids = list(self._tensors), list(map(id, self._tensors.values()))
        for name, each in self._tensors.items():
            if each is not None and is_lazy(each):
                raise ConfigError(
                    f"buffer '{name}' of a {self.module_name} has no elements yet, because the "
                    f"module is lazy; run the model once before its first step"
                )
        self._memory = {
            name: each.detach()
            for name, each in self._tensors.items()
            if each is not None and _is_in_memory(each)
        }
        """The memory of each buffer, even while the step gives the buffer another one."""
        self._copies = {
            name: (self._memory[name] if name in self._memory else each.detach()).clone()
            for name, each in self._tensors.items()
            if each is not None
        }
        self._are_in_place = len(self._memory) == len(self._copies) and not any(
            each.is_inference() for each in self._copies.values()
        )
        """False if a copy has to be made in another way than by writing to the last one."""

    def can_be_copied_again(self) -> bool:
        """Return True if the module has the same buffers, in the same memory, as at the copy.

        Then the copies can be written in place, those of all modules by one call.
        """
        tensors: dict[str, Any] = self._tensors
        return (
            self._are_in_place
            and self.has_its_tensors()
            and all(_is_same_view(tensors[name], memory) for name, memory in self._memory.items())
        )

    def has_its_tensors(self) -> bool:
        """Return True if the module has the same tensors under the same names, and no others."""
        table: Any = buffer_table(self.module)
        return (
            isinstance(table, dict)
            and list(table) == self._names
            and list(map(id, table.values())) == self._ids
            and self._unsaved == unsaved_buffers(self.module)
        )

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in the order of `memory`; for buffers that can be copied again."""
        return (each for each in self._tensors.values() if each is not None)

    @property
    def memory(self) -> Iterable[torch.Tensor]:
        """The memory of each buffer."""
        return self._memory.values()

    @property
    def own_copies(self) -> Iterable[torch.Tensor]:
        """The copy of each buffer, in the order of `memory`."""
        return self._copies.values()

    @property
    def module_name(self) -> str:
        """Name of the module's class, for messages."""
        return type(self.module).__qualname__

    def restore(self) -> None:
        """Restore the same tensors with the same values under the same names, and no others."""
        module = self.module
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

    @staticmethod
    def forget(module: nn.Module) -> None:
        """Remove the buffers that a module without any has gained."""
        buffer_table(module).clear()
        unsaved_buffers(module).clear()

    def copies(self, *, with_saved: bool, without: Collection[int]) -> dict[str, torch.Tensor]:
        """Return copies of the buffers that are not persistent, or of all, but for some ids."""
        return {
            name: local_part(each)
            for name, each in self._copies.items()
            if (with_saved or name in self._unsaved) and id(self._tensors[name]) not in without
        }


def _copy_of(state: Any) -> Any:
    """Return a deep copy of a hook's state: it never leaves the process, so it can be anything."""
    try:
        return copy.deepcopy(state)
    except Exception as error:
        raise ConfigError(
            f"Replayed: a hook has returned a {type(state).__qualname__}, which cannot be copied: "
            f"{type(error).__name__}: {error}; return plain values and detached tensors"
        ) from error


def _is_in_memory(tensor: torch.Tensor) -> bool:
    """Return True if a buffer is a plain view of one storage."""
    return type(tensor) in (torch.Tensor, nn.Buffer) and is_strided(tensor)


def _is_same_view(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Return True if a buffer is still the same view of its memory."""
    return (
        tensor.data_ptr() == memory.data_ptr()
        and tensor.dtype == memory.dtype
        and tensor.shape == memory.shape
        and tensor.stride() == memory.stride()
        and tensor.is_conj() == memory.is_conj()
    )


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a buffer the elements of a copy; the copy stays separate."""
    with torch.no_grad():
        if is_sparse(tensor):
            # `copy_` alone needs the same number of stored elements, and `.data =` does nothing for
            # a compressed layout.
            tensor.resize_as_sparse_(value).copy_(value)
        elif is_strided(tensor):
            tensor.copy_(value)
        else:
            tensor.data = value.detach().clone()


def _holds(memory: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return True if a buffer's memory still has room for the saved elements."""
    if memory.shape != saved.shape or 0 in memory.stride():
        return False
    return memory.numel() == 0 or span_of(memory)[1] <= memory.untyped_storage().nbytes()

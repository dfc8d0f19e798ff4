"""What `state_dict` shows of a module, and what each entry is: the module's own tensor, or a form.

An entry is *direct* where it is a registered parameter or buffer, or memory of one: filling it
fills the module. Everything else is a form that the module has made (hooks that split or fuse,
copies, packed weights, extra state) and comes back only through the module's `load_state_dict`.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast.errors import HoldfastError, PlacementError
from holdfast.state.markers import Marked
from holdfast.state.module.tree import (
    is_persistent,
    logical_name,
    overrides,
    registered_in,
    walk_all,
)
from holdfast.state.tensors import instances_in, local_of

_EXTRA_STATE = "_extra_state"
_DATA = torch.Tensor | Marked | np.ndarray | bytes | bytearray
"""Types that may hold what a tensor of the module does not show itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegisteredTensor:
    """A parameter or buffer of a tree of modules, under one of its names."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: torch.Tensor
    is_persistent: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateDictEntry:
    """One entry of a state dict."""

    key: str
    """torch's."""
    name: str
    """The logical one."""
    value: object
    backing: RegisteredTensor | None
    """The registered tensor that the value is, or lies in; None for a form and for extra state."""

    @property
    def is_form(self) -> bool:
        """Whether it is a tensor that only the module's `load_state_dict` can give back."""
        is_tensor = isinstance(self.value, torch.Tensor | Marked)
        return is_tensor and self.backing is None and not self.is_extra

    @property
    def is_extra(self) -> bool:
        """Whether it is what `get_extra_state` returned, which may be a tensor, too."""
        return self.backing is None and _is_extra(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleStateDict:
    """A module's state dict, each entry explained."""

    entries: Mapping[str, StateDictEntry]
    """By logical name."""
    registered: tuple[RegisteredTensor, ...]
    metadata: object
    """torch's versions of the modules."""


def read_state_dict(module: nn.Module) -> ModuleStateDict:
    """Call `state_dict` and explain every entry of it.

    Raises:
        PlacementError: It fails, is no mapping, or gives two entries one logical name.

    Cost: one pass over modules and entries, no bytes copied by this function.
    """
    state = _state_dict(module)
    # After the call: hooks may replace parameters.
    tree = list(walk_all(module))
    registered = tuple(
        RegisteredTensor(
            name=f"{logical}{attribute}",
            owner=inner,
            attribute=attribute,
            tensor=tensor,
            is_persistent=is_persistent(inner, attribute),
        )
        for logical, _, inner, is_wrapper in tree
        if not is_wrapper
        for attribute, tensor in registered_in(inner).items()
    )
    has_wrappers = any(is_wrapper for *_, is_wrapper in tree)
    memory = _Memory(registered)
    # Exact matches first, over all entries: an entry that is a slice of a tensor must not claim
    # memory which a later entry shows whole.
    own: dict[int, torch.Tensor] = {}
    if not all(map(memory.is_known, state.values())):
        for value in state.values():
            held = memory.same(value)
            if held is not None:
                own[id(value)] = held.tensor
                memory.claim(held.tensor)
    entries: dict[str, StateDictEntry] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise PlacementError(
                f"{type(module).__name__}.state_dict() has a key {key!r} that is no text"
            )
        value = own.get(id(value), value)
        logical = logical_name(module, key, value) if has_wrappers else key
        if logical in entries:
            raise PlacementError(
                f"two tensors of {type(module).__name__} are both named '{logical}'"
            )
        backing = memory.owner(value)
        if _is_extra(logical) and backing is not None and backing.name != logical:
            backing = None  # get_extra_state returned a tensor of the module: set_… wants it
        entries[logical] = StateDictEntry(key=key, name=logical, value=value, backing=backing)
    return ModuleStateDict(
        entries=entries, registered=registered, metadata=getattr(state, "_metadata", None)
    )


def same_memory(one: object, other: object) -> bool:
    """Whether two tensors are the same elements in the same memory, in the same order."""
    if one is other:
        return True
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        alike = one.device_mesh == other.device_mesh and one.placements == other.placements
        return alike and one.shape == other.shape and same_memory(local_of(one), local_of(other))
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    key = _memory_key(one)
    return key is not None and key == _memory_key(other)


def forms_of(shown: ModuleStateDict, module: nn.Module) -> list[RegisteredTensor]:
    """Registered tensors that only entries of other names can stand for (split, fused, packed)."""
    return [hidden for hidden in _hidden(shown) if _is_represented(shown, module, hidden)]


def refuse_hidden(
    shown: ModuleStateDict, module: nn.Module, is_selected: Callable[[str, torch.Tensor], bool]
) -> None:
    """Refuse a module that holds what its state dict shows in no form.

    Args:
        shown: The module's state dict.
        module: The module.
        is_selected: Whether the caller wants a tensor kept, by name and tensor.

    Raises:
        PlacementError: Naming what would be lost.
    """
    lost = [
        hidden.name
        for hidden in _hidden(shown)
        if is_selected(hidden.name, hidden.tensor) and not _is_represented(shown, module, hidden)
    ]
    if lost:
        names = ", ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
        raise PlacementError(
            f"{type(module).__name__}.state_dict() shows {names} in no form, or only in part, so "
            f"a checkpoint would lose it. Let state_dict show it; or leave it out by name: "
            f"ModuleState(module, only='trainable'), ModuleState(module, only=lambda name, value: "
            f"...); or register a buffer with persistent=False"
        )


def _state_dict(module: nn.Module) -> Mapping[object, object]:
    """The module's state dict with its own tensors, where it can give them."""
    try:
        parameters = inspect.signature(module.state_dict).parameters.values()
        takes = any(p.name == "keep_vars" or p.kind is p.VAR_KEYWORD for p in parameters)
        state: object = module.state_dict(keep_vars=True) if takes else module.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        raise PlacementError(f"{type(module).__name__}.state_dict() failed: {error!r}") from error
    if not isinstance(state, Mapping):
        raise PlacementError(
            f"{type(module).__name__}.state_dict() returned a {type(state).__name__}, no mapping"
        )
    return state


def _is_extra(name: str) -> bool:
    """Whether a name is that of extra state."""
    return name.rsplit(".", 1)[-1] == _EXTRA_STATE


def _hidden(shown: ModuleStateDict) -> Iterable[RegisteredTensor]:
    """Persistent tensors that no entry is or wholly covers, nor bears the name of; each once."""
    seen = {id(entry.value) for entry in shown.entries.values()}
    missed: list[RegisteredTensor] = []
    for held in shown.registered:
        if held.is_persistent and id(held.tensor) not in seen and not is_lazy(held.tensor):
            seen.add(id(held.tensor))
            missed.append(held)
    if not missed:
        return
    num_shown: dict[int, int] = {}
    claimed = _Memory(())
    for entry in shown.entries.values():
        if entry.backing is not None and isinstance(entry.value, torch.Tensor):
            key = id(entry.backing.tensor)
            num_shown[key] = num_shown.get(key, 0) + entry.value.numel()
            claimed.claim(entry.value)
    for held in missed:
        bearer = shown.entries.get(held.name)
        if bearer is not None and bearer.backing is None:
            continue
        size = local_of(held.tensor).numel()
        if 0 < size != num_shown.get(id(held.tensor), 0) and not claimed.covers(held.tensor):
            yield held


def _is_represented(shown: ModuleStateDict, module: nn.Module, hidden: RegisteredTensor) -> bool:
    """Whether forms made by code of its module, or of one above, may stand for a hidden tensor."""
    own = {held.name for held in shown.registered}
    methods = ("state_dict", "_save_to_state_dict")
    scopes = {
        prefix
        for prefix, _, inner, _ in walk_all(module)
        if getattr(inner, "_state_dict_hooks", None) or overrides(inner, nn.Module, methods)
    }
    for entry in shown.entries.values():
        if (
            entry.backing is None
            and entry.name not in own
            and any(instances_in(entry.value, _DATA))
        ):
            homes = [prefix for prefix in scopes if entry.name.startswith(prefix)]
            if homes and hidden.name.startswith(max(homes, key=len)):
                return True
    return False


_MemoryKey = tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def _memory_key(tensor: torch.Tensor) -> _MemoryKey | None:
    """Where and how a tensor's elements lie; None where that says nothing."""
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.is_meta or tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return None  # a wrapper without memory of its own
    return (
        tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype,
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _extent(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """Device, first byte and the one after the last of a plain tensor's elements."""
    key = None if isinstance(tensor, DTensor) else _memory_key(tensor)
    if key is None or key[1] == 0:
        return None
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), key[1], key[1] + (last + 1) * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their extent, each byte belonging to one of them."""
    extent = _extent(tensor)
    return extent is not None and extent[2] - extent[1] == tensor.numel() * tensor.element_size()


class _Memory:
    """Which registered tensor a tensor is or lies in, by identity and by address."""

    def __init__(self, registered: Iterable[RegisteredTensor]) -> None:
        self._by_id: dict[int, RegisteredTensor] = {}
        for held in registered:
            self._by_id.setdefault(id(held.tensor), held)
        self._by_memory: dict[object, RegisteredTensor] | None = None
        self._dense: dict[str, list[tuple[int, int, RegisteredTensor]]] = {}
        self._claimed: dict[str, list[tuple[int, int]]] = {}

    def is_known(self, value: object) -> bool:
        """Whether a value is known without a look at its memory; most models have no others."""
        return id(value) in self._by_id or not isinstance(value, torch.Tensor)

    def _index_memory(self) -> dict[object, RegisteredTensor]:
        """The registered tensors by memory; computed when first asked for."""
        if self._by_memory is not None:
            return self._by_memory
        by_memory: dict[object, RegisteredTensor] = {}
        for held in self._by_id.values():
            if is_lazy(held.tensor):
                continue
            key = _memory_key(local_of(held.tensor))
            if key is not None:
                by_memory.setdefault(key, held)
            extent = _extent(held.tensor)
            if extent is not None and _is_dense(held.tensor):
                self._dense.setdefault(extent[0], []).append((extent[1], extent[2], held))
        for spans in self._dense.values():
            spans.sort(key=lambda span: span[:2])
        self._by_memory = by_memory
        return by_memory

    def same(self, value: object) -> RegisteredTensor | None:
        """The registered tensor that a value is, or all of whose memory it is."""
        held = self._by_id.get(id(value))
        if held is not None or not isinstance(value, torch.Tensor) or is_lazy(value):
            return held
        result = self._index_memory().get(_memory_key(local_of(value)))
        return result if result is not None and same_memory(result.tensor, value) else None

    def owner(self, value: object) -> RegisteredTensor | None:
        """The registered tensor that a value is or lies in; claims what it has not claimed.

        A part that overlaps what another entry has claimed is a form, so that no two entries fill
        one piece of memory; so is one whose own elements overlap.
        """
        held = self.same(value)
        if held is not None or not isinstance(value, torch.Tensor):
            return held
        extent = _extent(value)
        if extent is None or not _is_dense(value) or value.is_conj() or value.is_neg():
            return None
        device, start, stop = extent
        spans = self._dense.get(device, [])
        at = bisect_right(spans, start, key=lambda span: span[0]) - 1
        if at < 0 or stop > spans[at][1] or spans[at][2].tensor.dtype != value.dtype:
            return None
        if any(start < b and a < stop for a, b in self._claimed.get(device, ())):
            return None
        self.claim(value)
        return spans[at][2]

    def claim(self, tensor: torch.Tensor) -> None:
        """Note that an entry fills this memory."""
        extent = _extent(tensor)
        if extent is not None:
            self._claimed.setdefault(extent[0], []).append(extent[1:])

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether one claimed piece of memory has all of a tensor in it."""
        extent = _extent(tensor)
        if extent is None:
            return False
        pieces = self._claimed.get(extent[0], ())
        return any(a <= extent[1] and extent[2] <= b for a, b in pieces)

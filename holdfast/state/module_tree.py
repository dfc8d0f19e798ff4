"""A module under logical names: its tree, its padding, and what each entry of its state dict is.

Names are those of the model without its wrappers.

*Padding.* A vocabulary is padded so that its rows divide over the tensor axis, and another layout
pads it differently. The declaration says the real shape. Only the elements inside it are stored,
under the real shape; a load fills them and sets the padding of its targets to zero.

*Entries.* An entry is *direct* if it is a registered parameter or buffer, or memory of one: filling
it fills the module. Everything else is a form that the module has made (hooks that split or fuse,
copies, packed weights, extra state) and returns only through the module's `load_state_dict`.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from holdfast._torch import (
    buffer_table,
    hook_states,
    module_table,
    module_version,
    parameter_table,
    registered_in,
    unsaved_buffers,
)
from holdfast.arrays.boxes import strided_span
from holdfast.errors import ConfigError, HoldfastError, PlacementError, some_of
from holdfast.format.manifest import USUAL_VERSION
from holdfast.state.markers import Marked, check_real_shape
from holdfast.state.tensor_elements import instances_in, local_of, memory_key

# Attribute names under which torch's wrappers keep the module they wrap. `module` is not here: a
# user's own module may be called that, so only wrapper *types* are looked through for it.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Wrappers of other libraries, known by the name of their type, so that nothing is imported:
# type -> (the packages it may come from, the attribute whose names are the model's own).
_FOREIGN_WRAPPERS = {
    "_FabricModule": (("lightning.fabric.", "lightning_fabric."), "_original_module"),
}

_PARALLEL = (DistributedDataParallel, nn.DataParallel)
_DECLARED = "_holdfast_wraps"
_PADDING = "_holdfast_padding"


def declare_wrapper(wrapper: type[nn.Module], attribute: str) -> None:
    """Declare that modules of a class only wrap the module in one of their attributes.

        declare_wrapper(PrecisionWrapper, "inner")

    Neither the wrapper nor the attribute then appears in names: what the wrapped model saved, the
    bare one loads, and the optimizer's names are the model's. torch's wrappers and Lightning
    Fabric's are known and need no declaration.

    Args:
        wrapper: The wrapper's class, which keeps the declaration; it holds for subclasses, too. A
            wrapper has no other parameters, persistent buffers or modules: a save or load of
            one that has raises PlacementError.
        attribute: Where its instances keep the wrapped module.

    Raises:
        ConfigError: If it is not a class of modules, or not the name of an attribute.
    """
    if not isinstance(wrapper, type) or not issubclass(wrapper, nn.Module):
        raise ConfigError(
            f"declare_wrapper: {wrapper!r} is not a class of modules; pass the wrapper's class"
        )
    if wrapper is nn.Module:
        raise ConfigError(
            "declare_wrapper: nn.Module itself is not a wrapper; pass your wrapper's class"
        )
    if not isinstance(attribute, str) or not attribute.isidentifier():
        raise ConfigError(f"declare_wrapper: {attribute!r} is not the name of one attribute")
    setattr(wrapper, _DECLARED, attribute)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules registered in a module, by attribute; script modules too."""
    return {name: child for name, child in module_table(module).items() if child is not None}


def overrides(obj: object, base: type, methods: Iterable[str]) -> bool:
    """Return True if an object or its class overrides one of these methods of the base class."""
    return any(
        name in vars(obj) or getattr(type(obj), name) is not getattr(base, name) for name in methods
    )


def wrapped(
    module: nn.Module, known: dict[type, str | None] | None = None
) -> tuple[str, nn.Module] | None:
    """Return the attribute and module inside a wrapper.

    Wrappers are DDP, compile, activation checkpointing, FSDP1, Fabric, and declared ones.

    Args:
        module: Any.
        known: For many modules, what their classes were found to declare; each is asked once.
    """
    kind = type(module)
    if known is None or kind not in known:
        declared = _attribute_of(kind)
        if known is not None:
            known[kind] = declared
    else:
        declared = known[kind]
    if declared is not None:
        inner = getattr(module, declared, None)
        if not isinstance(inner, nn.Module):
            raise PlacementError(
                f"{type(module).__name__} is declared to wrap the module in '{declared}', but has "
                f"{'no such attribute' if inner is None else f'a {type(inner).__name__} there'}; "
                f"declare_wrapper takes the attribute's name"
            )
        return declared, inner
    children = module_table(module)
    if not children:
        return None
    for name in _WRAPPER_ATTRIBUTES:
        child = children[name] if name in children else None  # noqa: SIM401 - script modules
        if child is not None:
            return name, child
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside all wrappers; the module itself if there are none."""
    while (inside := wrapped(module)) is not None:
        module = inside[1]
    return module


def walk(module: nn.Module) -> list[tuple[str, str, nn.Module]]:
    """Return (logical prefix, torch prefix, module) of a whole tree; prefixes end in a dot.

    Wrappers are looked through and not among them.

    Raises:
        PlacementError: If a wrapper holds more than the module it wraps.
    """
    return [
        (logical, actual, inner) for logical, actual, inner, wraps in walk_all(module) if not wraps
    ]


def walk_all(module: nn.Module) -> list[tuple[str, str, nn.Module, bool]]:
    """As `walk`, wrappers included: (logical prefix, torch prefix, module, whether it wraps)."""
    result: list[tuple[str, str, nn.Module, bool]] = []
    _walk_below(module, "", "", {}, result)
    return result


def _walk_below(
    module: nn.Module,
    logical: str,
    actual: str,
    known: dict[type, str | None],
    result: list[tuple[str, str, nn.Module, bool]],
) -> None:
    """Append what `walk_all` returns of a part of the tree; `known` as in `wrapped`."""
    table = module_table(module)
    if not table and known.get(type(module), "") is None:  # as most modules are
        result.append((logical, actual, module, False))
        return
    inside = wrapped(module, known)
    result.append((logical, actual, module, inside is not None))
    if inside is not None:
        name, inner = inside
        _refuse_own(module, name, inner, actual)
        _walk_below(inner, logical, f"{actual}{name}.", known, result)
        return
    for name, child in table.items():
        if child is not None:
            _walk_below(child, f"{logical}{name}.", f"{actual}{name}.", known, result)


def _refuse_own(module: nn.Module, name: str, inner: nn.Module, actual: str) -> None:
    """Raise PlacementError for a wrapper that holds more than the module it wraps."""
    own = [
        other
        for other, child in children_of(module).items()
        # Fabric keeps the same model twice, once as its strategy has wrapped it.
        if other != name and child is not inner and unwrapped(child) is not unwrapped(inner)
    ]
    own += sorted(registered_in(module).keys() - unsaved_buffers(module))
    if own:
        raise PlacementError(
            f"{type(module).__name__} at '{actual or '(root)'}' wraps a module and holds others "
            f"next to it ({', '.join(own)}); its names are not those of one logical tree"
        )


def broadcast_elsewhere(module: nn.Module) -> set[int]:
    """Return the `id` of each buffer that another rank of its DDP gives to this one.

    DDP with `broadcast_buffers`, which is the default, copies the first rank's at each forward.

    Raises:
        PlacementError: No DDP in the tree does so.
    """
    wrappers = [m for *_, m, _ in walk_all(module) if isinstance(m, DistributedDataParallel)]
    if not any(each.broadcast_buffers for each in wrappers):
        raise PlacementError(
            f"buffers='first_rank' declares that DistributedDataParallel gives the first rank's "
            f"buffers to all, but {type(module).__name__} has "
            f"{'broadcast_buffers=False' if wrappers else 'no such wrapper'}; pass the wrapped "
            f"model, or make buffers equal before a save"
        )
    return {
        id(buffer)
        for each in wrappers
        if each.broadcast_buffers and dist.get_rank(each.process_group) > 0
        for name, buffer in each.module.named_buffers()
        if name not in each.parameters_to_ignore
    }


def refuse_hook_states(module: nn.Module) -> None:
    """Raise PlacementError for a wrapper whose communication hook has a state of its own.

    Names look through DDP and FSDP1, so that nothing of them is stored.
    """
    for logical, _, inner, _ in walk_all(module):
        for name, state in hook_states(inner):
            raise PlacementError(
                f"{type(inner).__name__} at '{logical.rstrip('.') or '(root)'}' has the "
                f"communication hook {name}, whose {type(state).__name__} (error feedback, "
                f"counters) is not part of the module's state and would be lost. If a resumed run "
                f"may start it fresh, save ModuleState(module, hook_state='transient'); to keep "
                f"it, add it as a part of its own, such as PerRank({{...}}), too"
            )


def _attribute_of(kind: type) -> str | None:
    """Return where a class declares, or is known, to keep the module that it wraps; else None."""
    if issubclass(kind, _PARALLEL):
        return "module"
    declared: str | None = getattr(kind, _DECLARED, None)
    return declared or _foreign(kind)


def _foreign(kind: type) -> str | None:
    """Return the attribute of another library's wrapper that has the module; else None."""
    # By name, so that the library is not imported.
    for base in kind.__mro__:
        known = _FOREIGN_WRAPPERS.get(base.__name__)
        if known is not None and base.__module__.startswith(known[0]):
            return known[1]
    return None


def logical_name(module: nn.Module, key: str, value: object) -> str:
    """Return the logical name of a key of a model's state dict, under which `value` was found.

    Some wrappers leave their attribute in the keys (DDP, compile), some take it out (Fabric,
    activation checkpointing), so a key is followed through the tree both ways; which way is right
    is decided by the tensor that is found there. A name of no registered tensor (extra state, what
    hooks add) keeps what comes after the module that it belongs to.

    Cost: one step for each component of the key.
    """
    meanings = list(_meanings(module, key.split("."), ()))
    exact = [name for name, tensor in meanings if tensor is not None]
    same = [name for name, tensor in meanings if tensor is not None and tensor is value]
    return (same or exact or [meanings[0][0]])[0]


def _meanings(
    module: nn.Module, components: list[str], before: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield each (logical name, tensor registered there) that a key can mean; at least one."""
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        if components[0] == name and len(components) > 1:
            yield from _meanings(inner, components[1:], before)
        yield from _meanings(inner, components, before)
        return
    first, *rest = components
    child = children_of(module).get(first) if rest else None
    if child is not None:
        yield from _meanings(child, rest, (*before, first))
    else:
        tensor = None if rest else registered_in(module).get(first)
        yield ".".join((*before, *components)), tensor


def parameter_names(module: nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the first logical name of each parameter; a tied parameter has one name here."""
    result: dict[torch.nn.Parameter, str] = {}
    for logical, _, inner in walk(module):
        for name, value in parameter_table(inner).items():
            if value is not None:
                result.setdefault(value, f"{logical}{name}")
    return result


def plain_root(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers at the root that do not change its state dict.

    torch calls `load_state_dict` of the root alone, so a model that overrides it must be the root.
    Wrappers that have hooks or methods for state dicts stay.
    """
    while (inside := wrapped(module)) is not None and not _has_state_code(module):
        _refuse_own(module, *inside, "")
        module = inside[1]
    return module


def _has_state_code(module: nn.Module) -> bool:
    """Return True if a wrapper has hooks or methods for state dicts."""
    if _foreign(type(module)) is not None:
        return False  # its methods forward to the module inside
    tables = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    methods = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    has_hooks = any(getattr(module, table, None) for table in tables)
    return has_hooks or overrides(module, nn.Module, methods)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePaddings:
    """The real shapes that are declared in a tree of modules."""

    by_tensor: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By the `id` of the parameter or buffer, tied ones too."""
    by_name: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By logical name, for tensors that hooks put into a state dict instead of the module's own."""

    def find(self, tensor: torch.Tensor, name: str) -> tuple[int, ...] | None:
        """Return the declaration of a tensor of the modules, None without one."""
        return self.by_tensor.get(id(tensor), self.by_name.get(name))


def declare_padding(module: nn.Module, name: str, shape: Sequence[int]) -> None:
    """Declare that only the elements inside `shape` of one parameter or buffer are real.

        declare_padding(model.embedding, "weight", (vocabulary, width))

    The rest is padding, at the end of each dim. It is never stored, neither of the tensor nor of
    its optimizer state and main parameters, and a load sets it to zero; so a checkpoint loads under
    any other padding that declares the same shape.

    Args:
        module: The module in which the tensor itself is registered. It keeps the declaration when
            the parameter is replaced, as `to`, `deepcopy`, `parallelize_module` and `fully_shard`
            do. Of tied parameters one declaration is enough.
        name: The parameter's or buffer's attribute; a second declaration replaces the first.
        shape: The global shape without padding: as many dims as the tensor, none larger.

    Raises:
        PlacementError: For a tensor that the module does not have, or a shape that does not fit.
    """
    tensor = registered_in(module).get(name)
    if tensor is None:
        raise PlacementError(
            f"declare_padding: {type(module).__name__} has no parameter or buffer '{name}' itself; "
            f"pass the module in which it is registered"
        )
    real = tuple(int(n) for n in shape)
    if not is_lazy(tensor):
        check_real_shape(real, tuple(tensor.shape), where=f"declare_padding of '{name}'")
    kept = module.__dict__.get(_PADDING, {})
    module.__dict__[_PADDING] = {**kept, name: real}


def declared_padding(module: nn.Module) -> ModulePaddings:
    """Return all declarations in a tree of modules, each checked against the tensor as it is now.

    Raises:
        PlacementError: Naming a tensor that is gone or smaller than its real shape, and two
            declarations of one tensor that differ.

    Cost: one pass over the modules.
    """
    by_tensor: dict[int, tuple[int, ...]] = {}
    by_name: dict[str, tuple[int, ...]] = {}
    for logical, _, inner in walk(module):
        kept: Mapping[str, tuple[int, ...]] = inner.__dict__.get(_PADDING, {})
        registered = registered_in(inner) if kept else {}
        for name, shape in kept.items():
            where = f"{logical}{name}"
            tensor = registered.get(name)
            if tensor is None:
                if name in parameter_table(inner) or name in buffer_table(inner):
                    continue  # registered as None: there is nothing to store
                raise PlacementError(
                    f"{where}: its padding is declared, but {type(inner).__name__} has no such "
                    f"tensor any more; declare it in the module that has it now"
                )
            check_real_shape(shape, tuple(tensor.shape), where=where)
            first = by_tensor.setdefault(id(tensor), shape)
            if first != shape:
                raise PlacementError(
                    f"{where}: this tied tensor is declared with two real shapes, "
                    f"{list(first)} and {list(shape)}"
                )
            by_name[where] = first
    return ModulePaddings(by_tensor=by_tensor, by_name=by_name)


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
        """True if it is a tensor that only the module's `load_state_dict` can give back."""
        is_tensor = isinstance(self.value, torch.Tensor | Marked)
        return is_tensor and self.backing is None and not self.is_extra

    @property
    def is_extra(self) -> bool:
        """True if it is what `get_extra_state` returned, which may be a tensor, too."""
        return self.backing is None and _is_extra(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleStateDict:
    """A module's state dict, each entry explained."""

    entries: Mapping[str, StateDictEntry]
    """By logical name."""
    registered: tuple[RegisteredTensor, ...]
    metadata: object
    """torch's versions of the modules."""
    versions: Mapping[str, int]
    """Those that are not usual, by the modules' logical names; also without torch's metadata."""
    formed: Sequence[RegisteredTensor]
    """The registered tensors for which only entries of other names can stand."""
    lost: Sequence[RegisteredTensor]
    """Those that it shows in no form."""


def read_state_dict(module: nn.Module) -> ModuleStateDict:
    """Call `state_dict` and explain every entry of it.

    Raises:
        PlacementError: It fails, does not return a mapping, or gives two entries one logical name.

    Cost: one pass over modules and entries, no bytes copied by this function.
    """
    state = _state_dict(module)
    # After the call: hooks may replace parameters.
    tree = walk_all(module)
    modules = [(logical, inner) for logical, _, inner, is_wrapper in tree if not is_wrapper]
    registered = tuple(
        RegisteredTensor(
            name=f"{logical}{attribute}",
            owner=inner,
            attribute=attribute,
            tensor=tensor,
            is_persistent=attribute not in unsaved_buffers(inner),
        )
        for logical, inner in modules
        for attribute, tensor in registered_in(inner).items()
    )
    versions = {
        logical.rstrip("."): version
        for logical, inner in modules
        if (version := module_version(inner)) != USUAL_VERSION
    }
    has_wrappers = len(modules) < len(tree)
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
                f"{type(module).__name__}.state_dict() has a key {key!r} that is not text"
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
    hidden = _hidden(entries, registered)
    formed, lost = hidden, hidden
    if hidden:
        own_names = {held.name for held in registered}
        formed, lost = _split_by_forms(hidden, entries, own_names, tree)
    return ModuleStateDict(
        entries=entries,
        registered=registered,
        metadata=getattr(state, "_metadata", None),
        versions=versions,
        formed=formed,
        lost=lost,
    )


def same_memory(one: object, other: object) -> bool:
    """Return True if two tensors are the same elements in the same memory, in the same order."""
    if one is other:
        return True
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        alike = one.device_mesh == other.device_mesh and one.placements == other.placements
        return alike and one.shape == other.shape and same_memory(local_of(one), local_of(other))
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    key = memory_key(one)
    return key is not None and key == memory_key(other)


def refuse_empty(shown: ModuleStateDict, module: nn.Module) -> None:
    """Refuse a module that states nothing although it holds tensors in plain attributes.

    Raises:
        PlacementError: Naming some of them.
    """
    if shown.entries or shown.registered:
        return
    own = ("_parameters", "_buffers", "_modules")
    held = [
        f"{prefix}{name}"
        for prefix, _, inner, _ in walk_all(module)
        for name, value in vars(inner).items()
        if name not in own and any(instances_in(value, torch.Tensor))
    ]
    if held:
        raise PlacementError(
            f"{type(module).__name__}.state_dict() is empty, though the module holds tensors in "
            f"{some_of(held)}, so a checkpoint would lose them. Register them as buffers, or let "
            f"state_dict show them (a metric of torchmetrics does after metric.persistent(True)); "
            f"or leave the part out of the state"
        )


def refuse_lost(module: nn.Module, lost: Sequence[str]) -> NoReturn:
    """Raise PlacementError for tensors that the module's state dict does not show."""
    raise PlacementError(
        f"{type(module).__name__}.state_dict() shows {some_of(lost)} in no form, or only "
        f"in part, so a checkpoint would lose it. Let state_dict show it; or leave it out by "
        f"name: ModuleState(module, only='trainable'), ModuleState(module, only=lambda name, "
        f"value: ...); or register a buffer with persistent=False"
    )


def _state_dict(module: nn.Module) -> Mapping[object, object]:
    """Return the module's state dict with its own tensors, if it can give them."""
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
            f"{type(module).__name__}.state_dict() returned a {type(state).__name__}, not a mapping"
        )
    for key, value in state.items():
        # By name, as it is of a private package: FSDP1 without a mesh makes it.
        if type(value).__name__ == "ShardedTensor":
            raise PlacementError(
                f"{key}: {type(module).__name__}.state_dict() shows a ShardedTensor, which cannot "
                f"be stored: FSDP1 makes it without a mesh. Give it device_mesh=..., so that "
                f"shards are DTensors, or shard with fully_shard (FSDP2)"
            )
    return state


def _is_extra(name: str) -> bool:
    """Return True if a name is that of extra state."""
    return name.rsplit(".", 1)[-1] == _EXTRA_STATE


def _hidden(
    entries: Mapping[str, StateDictEntry], registered: Iterable[RegisteredTensor]
) -> list[RegisteredTensor]:
    """Return each persistent tensor that no entry is, covers wholly, or has the name of."""
    seen = {id(entry.value) for entry in entries.values()}
    missed: list[RegisteredTensor] = []
    for held in registered:
        if held.is_persistent and id(held.tensor) not in seen and not is_lazy(held.tensor):
            seen.add(id(held.tensor))
            missed.append(held)
    if not missed:
        return []
    num_shown: dict[int, int] = {}
    claimed = _Memory(())
    for entry in entries.values():
        if entry.backing is not None and isinstance(entry.value, torch.Tensor):
            key = id(entry.backing.tensor)
            num_shown[key] = num_shown.get(key, 0) + entry.value.numel()
            claimed.claim(entry.value)
    hidden = []
    for held in missed:
        bearer = entries.get(held.name)
        if bearer is not None and bearer.backing is None:
            continue
        size = local_of(held.tensor).numel()
        if 0 < size != num_shown.get(id(held.tensor), 0) and not claimed.covers(held.tensor):
            hidden.append(held)
    return hidden


def makes_forms(module: nn.Module) -> bool:
    """Return True if a module has code for its state dict."""
    methods = ("state_dict", "_save_to_state_dict")
    hooks = getattr(module, "_state_dict_hooks", None)
    return bool(hooks) or overrides(module, nn.Module, methods)


def runs_code(module: nn.Module) -> bool:
    """Return True if a load has code to run in some module of the tree, its own or torch's."""
    return any(_has_load_method(inner) or _hooks(inner) for *_, inner, _ in walk_all(module))


def has_user_loader(module: nn.Module) -> bool:
    """Return True if a module has code, other than torch's, that takes its tensors."""
    return _has_load_method(module) or any(not _is_neutral(hook) for hook in _hooks(module))


def _has_load_method(module: nn.Module) -> bool:
    """Return True if a module's class loads tensors itself; torch's layers do not count."""
    for name in ("_load_from_state_dict", "load_state_dict"):
        method = getattr(type(module), name)
        if method is not getattr(nn.Module, name) and not method.__module__.startswith("torch.nn."):
            return True
    return "load_state_dict" in module.__dict__


def _hooks(module: nn.Module) -> list[object]:
    """Return the hooks that run before and after torch loads a module's own tensors."""
    tables = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return [hook for table in tables for hook in (getattr(module, table, None) or {}).values()]


def _is_neutral(hook: object) -> bool:
    """Return True if a hook is of torch's wrappers or of this package, which change no values."""
    inner = getattr(hook, "hook", hook)
    inner = getattr(inner, "func", inner)
    where = getattr(inner, "__module__", None) or type(inner).__module__
    return where.startswith(("torch.distributed.", "holdfast."))


def prefixes_of(name: str) -> list[str]:
    """Return the prefixes of the modules around a tensor, the root's first: "", "a.", "a.b."."""
    parts = name.split(".")
    return ["".join(f"{part}." for part in parts[:i]) for i in range(len(parts))]


def _split_by_forms(
    hidden: Iterable[RegisteredTensor],
    entries: Mapping[str, StateDictEntry],
    own: AbstractSet[str],
    tree: Iterable[tuple[str, str, nn.Module, bool]],
) -> tuple[list[RegisteredTensor], list[RegisteredTensor]]:
    """Return hidden tensors that forms of their module, or of one above, may stand for; the others.

    Args:
        hidden: See `_hidden`.
        entries: Of the state dict.
        own: Names of the registered tensors.
        tree: All modules, see `walk_all`.
    """
    scopes = {prefix for prefix, _, inner, _ in tree if makes_forms(inner)}
    homes: set[str] = set()
    for entry in entries.values() if scopes else ():
        is_form = entry.backing is None and entry.name not in own
        if is_form and any(instances_in(entry.value, _DATA)):
            homes.update([each for each in prefixes_of(entry.name) if each in scopes][-1:])
    formed: list[RegisteredTensor] = []
    lost: list[RegisteredTensor] = []
    for held in hidden:
        (lost if homes.isdisjoint(prefixes_of(held.name)) else formed).append(held)
    return formed, lost


def _extent(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """Device, first byte and the one after the last of a plain tensor's elements."""
    key = None if isinstance(tensor, DTensor) else memory_key(tensor)
    if key is None:
        return None
    span = strided_span(tensor.shape, tensor.stride())
    return str(tensor.device), key[1], key[1] + span * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill their extent, each byte belonging to one of them."""
    extent = _extent(tensor)
    return extent is not None and extent[2] - extent[1] == tensor.numel() * tensor.element_size()


class _Memory:
    """The registered tensors by identity and by address."""

    def __init__(self, registered: Iterable[RegisteredTensor]) -> None:
        self._by_id: dict[int, RegisteredTensor] = {}
        for held in registered:
            self._by_id.setdefault(id(held.tensor), held)
        self._by_memory: dict[object, RegisteredTensor] | None = None
        self._dense: dict[str, list[tuple[int, int, RegisteredTensor]]] = {}
        self._claimed: dict[str, list[tuple[int, int]]] = {}

    def is_known(self, value: object) -> bool:
        """Return True if a value is known by identity; most models have no others."""
        return id(value) in self._by_id or not isinstance(value, torch.Tensor)

    def _index_memory(self) -> dict[object, RegisteredTensor]:
        """Return the registered tensors by memory; computed when first asked for."""
        if self._by_memory is not None:
            return self._by_memory
        by_memory: dict[object, RegisteredTensor] = {}
        for held in self._by_id.values():
            if is_lazy(held.tensor):
                continue
            key = memory_key(local_of(held.tensor))
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
        """Return the registered tensor that a value is, or all of whose memory it is."""
        held = self._by_id.get(id(value))
        if held is not None or not isinstance(value, torch.Tensor) or is_lazy(value):
            return held
        result = self._index_memory().get(memory_key(local_of(value)))
        return result if result is not None and same_memory(result.tensor, value) else None

    def owner(self, value: object) -> RegisteredTensor | None:
        """Return the registered tensor that a value is or lies in; claims what it has not claimed.

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
        """Return True if one claimed piece of memory has all of a tensor in it."""
        extent = _extent(tensor)
        if extent is None:
            return False
        pieces = self._claimed.get(extent[0], ())
        return any(a <= extent[1] and extent[2] <= b for a, b in pieces)

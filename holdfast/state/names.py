"""Names of a model's tensors by its logical tree: wrappers never change them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import ConfigError, PlacementError

# Attribute names under which torch's wrappers keep the module they wrap. `module` is not here: a
# user's own module may be called that, so only wrapper *types* are looked through for it.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Wrappers of other libraries, known by the name of their type, so that nothing is imported:
# type -> (the packages it may come from, the attribute whose names are the model's own).
_FOREIGN_WRAPPERS = {
    "_FabricModule": (("lightning.fabric.", "lightning_fabric."), "_original_module"),
}

_DECLARED = "_holdfast_wraps"


def declare_wrapper(wrapper: type[nn.Module], attribute: str) -> None:
    """Declare that modules of a class do nothing but wrap the module in one of their attributes.

        declare_wrapper(PrecisionWrapper, "inner")

    Neither the wrapper nor the attribute then appears in names: what the wrapped model saved, the
    bare one loads, and the optimizer's names are the model's. Holds for subclasses, too; the
    declaration is kept on the class itself. torch's wrappers and Lightning Fabric's are known and
    need none. A wrapper has no parameters, persistent buffers or modules of its own: a save or load
    of one that has raises PlacementError.

    Raises ConfigError for what is no class of modules, or no name of an attribute.
    """
    if not isinstance(wrapper, type) or not issubclass(wrapper, nn.Module):
        raise ConfigError(
            f"declare_wrapper: {wrapper!r} is not a class of modules; pass the wrapper's class"
        )
    if wrapper is nn.Module:
        raise ConfigError("declare_wrapper: nn.Module itself is no wrapper; pass a class of yours")
    if not isinstance(attribute, str) or not attribute.isidentifier():
        raise ConfigError(f"declare_wrapper: {attribute!r} is not the name of one attribute")
    setattr(wrapper, _DECLARED, attribute)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules registered in a module, by attribute; script modules have no plain dicts."""
    return {name: child for name, child in module._modules.items() if child is not None}


def registered_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers registered in a module itself, by attribute."""
    found = dict(module._parameters.items()) | dict(module._buffers.items())
    return {name: value for name, value in found.items() if value is not None}


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether torch puts a parameter or buffer of a module into state dicts."""
    return name not in getattr(module, "_non_persistent_buffers_set", ())


def wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The attribute and module inside a wrapper.

    Wrappers are DDP, compile, activation checkpointing, FSDP1, Fabric, and declared ones.
    """
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return "module", module.module
    declared = getattr(type(module), _DECLARED, None) or _foreign(type(module))
    if declared is not None:
        inner = getattr(module, declared, None)
        if not isinstance(inner, nn.Module):
            raise PlacementError(
                f"{type(module).__name__} is declared to wrap the module in '{declared}', but has "
                f"{'no such attribute' if inner is None else f'a {type(inner).__name__} there'}; "
                f"declare_wrapper takes the attribute's name"
            )
        return declared, inner
    children = module._modules
    for name in _WRAPPER_ATTRIBUTES:
        child = children[name] if name in children else None  # noqa: SIM401 - script modules
        if child is not None:
            return name, child
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside all wrappers; the module itself where there are none."""
    inside = wrapped(module)
    while inside is not None:
        module = inside[1]
        inside = wrapped(module)
    return module


def walk(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """All (logical prefix, torch prefix, module) of a tree, prefixes ending in a dot or empty.

    Wrappers are looked through and not among them. Raises PlacementError for one that holds
    something of its own.
    """
    for logical, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper:
            yield logical, actual, inner


def walk_all(module: nn.Module) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """As `walk`, wrappers included: (logical prefix, torch prefix, module, whether it wraps)."""
    yield from _walk(module, "", "")


def _walk(
    module: nn.Module, logical: str, actual: str
) -> Iterator[tuple[str, str, nn.Module, bool]]:
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        _refuse_own(module, name, inner, actual)
        yield logical, actual, module, True
        yield from _walk(inner, logical, f"{actual}{name}.")
        return
    yield logical, actual, module, False
    for name, child in children_of(module).items():
        yield from _walk(child, f"{logical}{name}.", f"{actual}{name}.")


def _refuse_own(module: nn.Module, name: str, inner: nn.Module, actual: str) -> None:
    """PlacementError for a wrapper that holds more than the module it wraps."""
    own = [
        other
        for other, child in children_of(module).items()
        # Fabric keeps the same model twice, once as its strategy has wrapped it.
        if other != name and child is not inner and unwrapped(child) is not unwrapped(inner)
    ]
    own += [tensor for tensor in registered_in(module) if is_persistent(module, tensor)]
    if own:
        raise PlacementError(
            f"{type(module).__name__} at '{actual or '(root)'}' wraps a module and has others "
            f"beside it ({', '.join(own)}); its names are not those of one logical tree"
        )


def _foreign(kind: type) -> str | None:
    for base in kind.__mro__:
        known = _FOREIGN_WRAPPERS.get(base.__name__)
        if known is not None and base.__module__.startswith(known[0]):
            return known[1]
    return None


class Names:
    """Logical names of the entries of a model's state dict, whatever its wrappers do to keys.

    Some wrappers leave their attribute in the keys (DDP, compile), some take it out (Fabric,
    activation checkpointing), so a key is followed through the tree both ways; which way is right
    is decided by the tensor that is found there.
    """

    def __init__(self, module: nn.Module, *, has_wrappers: bool) -> None:
        self._module = module
        self._has_wrappers = has_wrappers

    def logical(self, key: str, value: object) -> str:
        """The logical name of torch's key, under which `value` was found.

        Names of no registered tensor (extra state, what hooks add) keep what comes after the
        module that they belong to. Cost: one step for each part of the key, none without wrappers.
        """
        if not self._has_wrappers:
            return key
        ways = list(_ways(self._module, key.split("."), ()))
        for name, tensor in ways:
            if tensor is value:
                return name
        return ways[0][0] if ways else _roughly(self._module, key.split("."), ())


def _ways(
    module: nn.Module, parts: list[str], before: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each (logical name, registered tensor) that a key can mean."""
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        if parts[0] == name and len(parts) > 1:
            yield from _ways(inner, parts[1:], before)
        yield from _ways(inner, parts, before)
        return
    if len(parts) == 1:
        tensor = registered_in(module).get(parts[0])
        if tensor is not None:
            yield ".".join((*before, parts[0])), tensor
        return
    child = children_of(module).get(parts[0])
    if child is not None:
        yield from _ways(child, parts[1:], (*before, parts[0]))


def _roughly(module: nn.Module, parts: list[str], before: tuple[str, ...]) -> str:
    """The logical name of a key that leads to a module, but to no tensor of it."""
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        return _roughly(inner, parts[1:] if parts[0] == name and parts[1:] else parts, before)
    child = children_of(module).get(parts[0]) if len(parts) > 1 else None
    if child is not None:
        return _roughly(child, parts[1:], (*before, parts[0]))
    return ".".join((*before, *parts))


def parameter_names(module: nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameter -> its first logical name; a tied parameter has one name here."""
    found: dict[torch.nn.Parameter, str] = {}
    for logical, _, inner in walk(module):
        for name, value in inner._parameters.items():
            if value is not None:
                found.setdefault(value, f"{logical}{name}")
    return found


def plain_root(module: nn.Module) -> nn.Module:
    """The module inside wrappers at the root that have no part in its state dict (DDP, compile).

    torch calls `load_state_dict` of the root alone, so a model with one of its own must be it.
    Wrappers with hooks or methods of their own for state dicts stay.
    """
    inside = wrapped(module)
    while inside is not None and not _has_state_code(module):
        _refuse_own(module, *inside, "")
        module = inside[1]
        inside = wrapped(module)
    return module


def _has_state_code(module: nn.Module) -> bool:
    kind = type(module)
    if _foreign(kind) is not None:
        return False  # its methods forward to the module inside
    tables = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
    names = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
    return (
        any(getattr(module, table, None) for table in tables)
        or any(getattr(kind, name) is not getattr(nn.Module, name) for name in names)
        or any(name in module.__dict__ for name in names)
    )

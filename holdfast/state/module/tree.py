"""A model's logical tree: names that wrappers never change, and the padding declared in it.

A vocabulary is padded so that its rows divide over the tensor axis, and another layout pads it
otherwise. The declaration says the real shape. Only the elements inside of it are stored, under the
real shape; a load fills them and sets the padding of its targets to zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from holdfast._torch import buffer_table, module_table, parameter_table, unsaved_buffers
from holdfast.errors import ConfigError, PlacementError
from holdfast.state.markers import check_real_shape

# Attribute names under which torch's wrappers keep the module they wrap. `module` is not here: a
# user's own module may be called that, so only wrapper *types* are looked through for it.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Wrappers of other libraries, known by the name of their type, so that nothing is imported:
# type -> (the packages it may come from, the attribute whose names are the model's own).
_FOREIGN_WRAPPERS = {
    "_FabricModule": (("lightning.fabric.", "lightning_fabric."), "_original_module"),
}

_DECLARED = "_holdfast_wraps"
_PADDING = "_holdfast_padding"


def declare_wrapper(wrapper: type[nn.Module], attribute: str) -> None:
    """Declare that modules of a class do nothing but wrap the module in one of their attributes.

        declare_wrapper(PrecisionWrapper, "inner")

    Neither the wrapper nor the attribute then appears in names: what the wrapped model saved, the
    bare one loads, and the optimizer's names are the model's. torch's wrappers and Lightning
    Fabric's are known and need no declaration.

    Args:
        wrapper: The wrapper's class, which keeps the declaration; it holds for subclasses, too. A
            wrapper has no parameters, persistent buffers or modules of its own: a save or load of
            one that has raises PlacementError.
        attribute: Where its instances keep the wrapped module.

    Raises:
        ConfigError: For what is no class of modules, or no name of an attribute.
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
    return {name: child for name, child in module_table(module).items() if child is not None}


def registered_in(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers registered in a module itself, by attribute."""
    result = dict(parameter_table(module).items()) | dict(buffer_table(module).items())
    return {name: value for name, value in result.items() if value is not None}


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether torch puts a parameter or buffer of a module into state dicts."""
    return name not in unsaved_buffers(module)


def overrides(obj: object, base: type, methods: Iterable[str]) -> bool:
    """Whether an object, or its class, has other methods of these names than the base class."""
    return any(
        name in vars(obj) or getattr(type(obj), name) is not getattr(base, name) for name in methods
    )


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
    children = module_table(module)
    for name in _WRAPPER_ATTRIBUTES:
        child = children[name] if name in children else None  # noqa: SIM401 - script modules
        if child is not None:
            return name, child
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside all wrappers; the module itself where there are none."""
    while (inside := wrapped(module)) is not None:
        module = inside[1]
    return module


def walk(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """All (logical prefix, torch prefix, module) of a tree, prefixes ending in a dot or empty.

    Wrappers are looked through and not among them.

    Raises:
        PlacementError: A wrapper holds something of its own.
    """
    for logical, actual, inner, is_wrapper in walk_all(module):
        if not is_wrapper:
            yield logical, actual, inner


def walk_all(
    module: nn.Module, logical: str = "", actual: str = ""
) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """As `walk`, wrappers included: (logical prefix, torch prefix, module, whether it wraps)."""
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        _refuse_own(module, name, inner, actual)
        yield logical, actual, module, True
        yield from walk_all(inner, logical, f"{actual}{name}.")
        return
    yield logical, actual, module, False
    for name, child in children_of(module).items():
        yield from walk_all(child, f"{logical}{name}.", f"{actual}{name}.")


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
            f"{type(module).__name__} at '{actual or '(root)'}' wraps a module and holds others "
            f"next to it ({', '.join(own)}); its names are not those of one logical tree"
        )


def _foreign(kind: type) -> str | None:
    """The attribute in which another library's wrapper keeps the module; None for other classes."""
    # By name, so that the library is not imported.
    for base in kind.__mro__:
        known = _FOREIGN_WRAPPERS.get(base.__name__)
        if known is not None and base.__module__.startswith(known[0]):
            return known[1]
    return None


def logical_name(module: nn.Module, key: str, value: object) -> str:
    """The logical name of a key of a model's state dict, under which `value` was found.

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
    """Each (logical name, tensor registered there) that a key can mean; at least one."""
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
    """Parameter -> its first logical name; a tied parameter has one name here."""
    result: dict[torch.nn.Parameter, str] = {}
    for logical, _, inner in walk(module):
        for name, value in parameter_table(inner).items():
            if value is not None:
                result.setdefault(value, f"{logical}{name}")
    return result


def plain_root(module: nn.Module) -> nn.Module:
    """The module inside wrappers at the root that have no part in its state dict (DDP, compile).

    torch calls `load_state_dict` of the root alone, so a model with one of its own must be it.
    Wrappers with hooks or methods of their own for state dicts stay.
    """
    while (inside := wrapped(module)) is not None and not _has_state_code(module):
        _refuse_own(module, *inside, "")
        module = inside[1]
    return module


def _has_state_code(module: nn.Module) -> bool:
    """Whether a wrapper has hooks or methods of its own for state dicts."""
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
        """The declaration of a tensor of the modules, None without one."""
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
            f"declare_padding: {type(module).__name__} has no parameter or buffer '{name}' of its "
            f"own; pass the module in which it is registered"
        )
    real = tuple(int(n) for n in shape)
    if not is_lazy(tensor):
        check_real_shape(real, tuple(tensor.shape), where=f"declare_padding of '{name}'")
    kept = module.__dict__.get(_PADDING, {})
    module.__dict__[_PADDING] = {**kept, name: real}


def declared_padding(module: nn.Module) -> ModulePaddings:
    """All declarations in a tree of modules, each checked against the tensor as it is now.

    Raises:
        PlacementError: Naming a tensor that is gone or smaller than its real shape, and two
            declarations of one tensor that differ.

    Cost: one pass over the modules.
    """
    by_tensor: dict[int, tuple[int, ...]] = {}
    by_name: dict[str, tuple[int, ...]] = {}
    for logical, _, inner in walk(module):
        kept: Mapping[str, tuple[int, ...]] = inner.__dict__.get(_PADDING, {})
        for name, shape in kept.items():
            where = f"{logical}{name}"
            tensor = registered_in(inner).get(name)
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

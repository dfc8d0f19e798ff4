"""Names of a model's tensors by its logical tree: wrappers never change them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import PlacementError

# Attribute names under which torch's wrappers keep the module they wrap. `module` is not here: a
# user's own module may be called that, so only wrapper *types* are looked through for it.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The attribute and module inside a wrapper (DDP, compile, activation checkpointing, FSDP1)."""
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        return "module", module.module
    for name in _WRAPPER_ATTRIBUTES:
        inner = module._modules.get(name)
        if inner is not None:
            return name, inner
    return None


def walk(module: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """All (logical prefix, torch prefix, module) of a tree, prefixes ending in a dot or empty."""
    yield from _walk(module, "", "")


def _walk(module: nn.Module, logical: str, actual: str) -> Iterator[tuple[str, str, nn.Module]]:
    inside = wrapped(module)
    if inside is not None:
        name, inner = inside
        yield from _walk(inner, logical, f"{actual}{name}.")
        own = [n for n, child in module._modules.items() if child is not None and n != name]
        if own:
            raise PlacementError(
                f"{type(module).__name__} at '{actual or '(root)'}' wraps a module and has others "
                f"beside it ({', '.join(own)}); its names are not those of one logical tree"
            )
        return
    yield logical, actual, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{logical}{name}.", f"{actual}{name}.")


def without_wrappers(name: str) -> str:
    """A torch name without the attributes that only wrappers have; their hooks may strip them."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_ATTRIBUTES)


def logical_names(module: nn.Module) -> dict[str, str]:
    """`without_wrappers` of torch's name of every parameter and buffer -> its logical name."""
    found: dict[str, str] = {}
    for logical, actual, inner in walk(module):
        for table in (inner._parameters, inner._buffers):
            for name, value in table.items():
                if value is not None:
                    found[without_wrappers(f"{actual}{name}")] = f"{logical}{name}"
    return found


def parameter_names(module: nn.Module) -> dict[torch.nn.Parameter, str]:
    """Parameter -> its first logical name; a tied parameter has one name here."""
    found: dict[torch.nn.Parameter, str] = {}
    for logical, _, inner in walk(module):
        for name, value in inner._parameters.items():
            if value is not None:
                found.setdefault(value, f"{logical}{name}")
    return found

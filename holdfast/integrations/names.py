"""Names of parts: for entries that a framework names by one path, and for its lists of objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from holdfast.errors import ConfigError

TOP = "top"
"""The part of entries whose path has a single name."""


def part_of(path: Sequence[Any]) -> str:
    """Return the part that an entry belongs to: the first name on its path."""
    return str(path[0]) if len(path) > 1 else TOP


def member_of(path: Sequence[Any]) -> str:
    """Return the name of an entry within its part."""
    return ".".join(map(str, path[1:] if len(path) > 1 else path))


def numbered(name: str, objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield objects by name: the first one by the name alone."""
    for index, each in enumerate(objects):
        yield (name if index == 0 else f"{name}{index}"), each


def owners_of(
    optimizer: Any, modules: Iterable[tuple[str, nn.Module]], *, name: str
) -> nn.Module | dict[str, nn.Module]:
    """Return the module whose parameters an optimizer has, those by name if there are several.

    Args:
        optimizer: the optimizer.
        modules: by name, all that the framework has.
        name: of the optimizer, for messages.

    Raises:
        ConfigError: no module has any of them.
    """
    updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
    owners = {
        module_name: module
        for module_name, module in modules
        if any(id(parameter) in updated for parameter in module.parameters())
    }
    if not owners:
        raise ConfigError(f"{name}: no module that is saved with it has its parameters")
    return next(iter(owners.values())) if len(owners) == 1 else owners

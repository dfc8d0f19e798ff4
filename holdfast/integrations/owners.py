"""Which modules an optimizer is of, for frameworks that keep both in lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def owners_of(
    optimizer: Any, modules: Iterable[tuple[str, nn.Module]]
) -> nn.Module | dict[str, nn.Module] | None:
    """Return the module whose parameters an optimizer has, those by name if there are several.

    None if no module has any.
    """
    updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
    owners = {
        name: module
        for name, module in modules
        if any(id(parameter) in updated for parameter in module.parameters())
    }
    return next(iter(owners.values())) if len(owners) == 1 else owners or None

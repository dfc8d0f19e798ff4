"""What a `MultiModuleOptimizer` is given for each module, checked here and between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.errors import ConfigError
from holdfast.optim.engine import Stepper
from holdfast.parallel import ModuleGroups, ModuleLayouts
from holdfast.parallel.ranks import shorten_ranks

_FROZEN = "None"
"""In the place of the kind of an optimizer."""


def choose_loss_module(layouts: ModuleLayouts, name: str | None) -> str | None:
    """The module whose ranks count tokens; LayoutError for an unknown one."""
    if name is not None:
        layouts[name]  # raises for a module that there is not
        return name
    sources = {source for source, _ in layouts.edges}
    ends = [module for module in layouts if module not in sources]
    return ends[0] if len(ends) == 1 else None


def check_entries(groups: ModuleGroups, optimizers: Mapping[str, object]) -> None:
    """ConfigError unless there is exactly one entry for each module here, on its groups."""
    for module in optimizers:
        if not groups.has(module):
            raise ConfigError(
                f"an optimizer for module {module!r}, which this rank does not have: give one for "
                f"each of {', '.join(map(repr, groups.modules))}"
            )
    for module in groups.modules:
        if module not in optimizers:
            raise ConfigError(
                f"no optimizer for module {module!r}, which this rank has; give None, on all its "
                f"ranks, if it is not trained"
            )
        stepper = optimizers[module]
        if stepper is None:
            continue
        if not isinstance(stepper, Stepper):
            raise ConfigError(
                f"module {module!r}: a {type(stepper).__name__} is nothing that steps with others: "
                f"give a ShardedOptimizer, a ChainedOptimizer, ReducedOptimizer(optimizer, "
                f"groups[{module!r}]) around a plain torch optimizer, the stepper(optimizer) of a "
                f"ShardedModel, or None"
            )
        if stepper.groups is not groups[module]:
            raise ConfigError(
                f"module {module!r}: its optimizer is on other process groups than "
                f"groups[{module!r}]; build it on those"
            )


def refuse_common_parameters(steppers: Mapping[str, Stepper]) -> None:
    """ConfigError for a parameter that two modules would update."""
    owners: dict[nn.Parameter, str] = {}
    for module, stepper in steppers.items():
        for parameter in stepper.parameters():
            owner = owners.setdefault(parameter, module)
            if owner != module:
                raise ConfigError(
                    f"a parameter of shape {list(parameter.shape)} is in the optimizers of modules "
                    f"{owner!r} and {module!r}; it belongs to one of them"
                )


def describe(stepper: Stepper | None) -> list[Any]:
    """What other ranks compare: kind, divisor, and what is equal on a pipeline stage."""
    if stepper is None:
        return [_FROZEN, 1, ""]
    return [stepper.kind, stepper.divisor, stepper.stage_description()]


def compare_ranks(
    layouts: ModuleLayouts, by_rank: Mapping[int, Mapping[str, list[Any]]]
) -> dict[str, int]:
    """Each module's divisor; the same ConfigError on all ranks where those of a module differ."""
    for module, layout in layouts.items():
        for index, what in enumerate(("kind of optimizer", "divisor", "parameters")):
            peers: dict[int, dict[int, Any]] = {}
            for rank in layout.ranks:
                # Pipeline stages have other parameters, and all else in common.
                stage = layout.coordinates(rank)["pp"] if what == "parameters" else 0
                peers.setdefault(stage, {})[rank] = by_rank[rank][module][index]
            for values in peers.values():
                first = next(iter(values))
                differing = [rank for rank, value in values.items() if value != values[first]]
                if differing:
                    raise ConfigError(
                        f"module {module!r}: ranks {shorten_ranks(differing)} differ from rank "
                        f"{first} in {what}: {values[differing[0]]} instead of {values[first]}; "
                        f"build it alike on all ranks of the module"
                    )
    return {module: by_rank[layout.ranks[0]][module][1] for module, layout in layouts.items()}

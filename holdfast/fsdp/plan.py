"""The unit that gathers each parameter, and its kind; planning changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast._torch import local_tensor, module_table, parameter_table
from holdfast.errors import ConfigError
from holdfast.fsdp import _torch
from holdfast.state.module_tree import parameter_names

Kind = Literal["dense", "experts"]
Chain = tuple[nn.Module, ...]
"""Units around a place in the module tree, outermost first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedParameter:
    """One parameter, the unit that gathers it, and the places where it is registered."""

    name: str
    parameter: nn.Parameter
    kind: Kind
    unit: nn.Module
    places: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that has it; several if it is tied."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitPlan:
    """The units, outermost first, and every parameter."""

    units: dict[nn.Module, str]
    """Unit -> its name; the model itself is the first, named ''."""
    parameters: tuple[PlannedParameter, ...]

    def of(self, unit: nn.Module) -> dict[tuple[Kind, torch.dtype], list[PlannedParameter]]:
        """Return the parameters that a unit gathers, by kind and dtype; one collective for each."""
        result: dict[tuple[Kind, torch.dtype], list[PlannedParameter]] = {}
        for each in self.parameters:
            if each.unit is unit:
                result.setdefault((each.kind, each.parameter.dtype), []).append(each)
        return result


def plan_units(
    model: nn.Module,
    *,
    units: Iterable[nn.Module],
    experts: Iterable[nn.Module | nn.Parameter],
) -> UnitPlan:
    """Plan which unit gathers each parameter, from the caller's declarations.

    A parameter belongs to the innermost unit around it. One that is tied between units belongs to
    the innermost unit around all of its places, so that it is whole whenever one of them is used.

    Raises:
        ConfigError: Naming a unit or expert that is not the model's, a unit that FSDP2 cannot hook
            (a container without `forward`), or a parameter that FSDP2 cannot shard.
    """
    names = parameter_names(model)
    for parameter, name in names.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(
                f"fully_shard_model: parameter '{name}' has no shape yet; run a forward before the "
                f"model is sharded"
            )
    chosen = _read_experts(model, experts, names=names)
    known = _read_units(model, units)
    chains: dict[nn.Parameter, list[Chain]] = {}
    places: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    for module, attribute, parameter, chain in _places(model, frozenset(known), ()):
        chains.setdefault(parameter, []).append(chain)
        places.setdefault(parameter, {})[module, attribute] = None
    parameters = tuple(
        PlannedParameter(
            name=names[parameter],
            parameter=parameter,
            kind="experts" if parameter in chosen else "dense",
            unit=_innermost(chains[parameter]),
            places=tuple(places[parameter]),
        )
        for parameter in names
        if parameter.numel()  # one without elements stays as it is: nothing of it can differ
    )
    for each in parameters:
        _check_parameter(each)
    return UnitPlan(units=known, parameters=parameters)


def _read_experts(
    model: nn.Module,
    experts: Iterable[nn.Module | nn.Parameter],
    *,
    names: dict[nn.Parameter, str],
) -> set[nn.Parameter]:
    """Return the declared parameters, including those of declared modules."""
    inside = set(model.modules())
    chosen: set[nn.Parameter] = set()
    for each in experts:
        if isinstance(each, nn.Module) and each in inside:
            chosen.update(each.parameters())
        elif isinstance(each, nn.Parameter) and each in names:
            chosen.add(each)
        else:
            what = (
                f"a {type(each).__name__} of shape {list(each.shape)}"
                if isinstance(each, torch.Tensor)
                else f"{type(each).__name__} {each if isinstance(each, str) else ''}".strip()
            )
            raise ConfigError(
                f"fully_shard_model: experts= has {what}, which is not a module or a parameter of "
                f"the model; pass the modules or parameters themselves, not names"
            )
    return chosen


def _read_units(model: nn.Module, units: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return units in the order of the module tree, outermost first, with their names."""
    declared = set(units)
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if _torch.is_sharded_module(module):
            raise ConfigError(
                f"fully_shard_model: module '{name}' is sharded already; wrap a model once, and "
                f"leave torch's fully_shard to this call"
            )
        if module in declared or module is model:
            names[module] = name
    for unit in declared - set(names):
        raise ConfigError(
            f"fully_shard_model: units= has a {type(unit).__name__} that is not a module of the "
            f"model"
        )
    for unit, name in names.items():
        # A compiled module has its forward as an attribute.
        if type(unit).forward is nn.Module.forward and "forward" not in vars(unit):
            raise ConfigError(
                f"fully_shard_model: unit '{name}' is a {type(unit).__name__} without a forward, "
                f"so nothing tells when its parameters are needed; pass the modules inside it"
            )
    return names


def _places(
    module: nn.Module, units: frozenset[nn.Module], chain: Chain
) -> Iterator[tuple[nn.Module, str, nn.Parameter, Chain]]:
    """Yield every place of every parameter, with the units around it; a shared module repeats."""
    if module in units:
        chain = (*chain, module)
    for attribute, parameter in parameter_table(module).items():
        if parameter is not None:
            yield module, attribute, parameter, chain
    for child in module_table(module).values():
        if child is not None:
            yield from _places(child, units, chain)


def _innermost(chains: list[Chain]) -> nn.Module:
    """Return the innermost unit around all places: the last one common to all chains."""
    first = chains[0]
    if all(chain[-1] is first[-1] for chain in chains):
        return first[-1]
    common = first
    for chain in chains[1:]:
        length = 0
        while length < min(len(common), len(chain)) and common[length] is chain[length]:
            length += 1
        common = common[:length]
    return common[-1]  # never empty: the model itself is a unit


def _check_parameter(each: PlannedParameter) -> None:
    """Raise ConfigError for a parameter that FSDP2 would refuse later, without its name."""
    parameter = each.parameter
    where = f"fully_shard_model: parameter '{each.name}'"
    if parameter.ndim == 0:
        raise ConfigError(
            f"{where} is a scalar, which has no dim to shard; make it a tensor of shape (1,), or "
            f"register it as a buffer"
        )
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    if not local.numel():
        raise ConfigError(
            f"{where} is split so that this rank has no element of it, which FSDP2 cannot reduce; "
            f"split it over fewer ranks, or not at all"
        )
    if type(local) not in (torch.Tensor, nn.Parameter):
        raise ConfigError(f"{where} is a {type(local).__name__}, which cannot be cut into shards")
    if local.layout is not torch.strided or not local.is_contiguous():
        raise ConfigError(
            f"{where} is not contiguous (shape {list(local.shape)}); make it so with "
            f"nn.Parameter(p.contiguous())"
        )
    if parameter.grad is not None:
        raise ConfigError(
            f"{where} has a gradient, which would be lost; call model.zero_grad() before"
        )
    if _torch.has_hooks_after_gradients(parameter):
        raise ConfigError(
            f"{where} has a hook of register_post_accumulate_grad_hook, which would see the whole "
            f"gradient of this rank before it is reduced, at a copy that no optimizer has; remove "
            f"it, and read parameter.grad after the last backward, or update in "
            f"ShardedModel.step"
        )

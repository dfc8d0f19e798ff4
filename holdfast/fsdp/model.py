"""`fully_shard_model`: a model on torch's FSDP2, on exactly the communicators it is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from holdfast.arguments import check_choice, check_int
from holdfast.errors import ConfigError
from holdfast.fsdp import _torch
from holdfast.fsdp.agreement import check_declarations, compare_ranks
from holdfast.fsdp.data_axes import (
    DataAxis,
    is_overlap_requested,
    make_axis,
    put_on_mesh,
)
from holdfast.fsdp.guards import UnitGuard
from holdfast.fsdp.plan import Kind, UnitPlan, plan_units
from holdfast.fsdp.sharded_model import SCHEDULES, OuterReduction, ShardedModel, Strategy
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard


def fully_shard_model(
    model: nn.Module,
    groups: ProcessGroups,
    *,
    experts: Iterable[nn.Module | nn.Parameter],
    units: Iterable[nn.Module] = (),
    strategy: Strategy = "optim_grads_params",
    outer_reduction: OuterReduction = "step",
    precision: MixedPrecisionPolicy | None = None,
    num_prefetched: int = 1,
) -> ShardedModel:
    """Shard a model over data parallelism with FSDP2; called by all ranks of the layout.

    Dense parameters are sharded over `dp_cp`, experts over `expt_dp`. If the layout has replicas,
    these are `dp_cp_intra` and `expt_dp_intra`, and gradients are also summed over `dp_cp_inter`
    and `expt_dp_inter`. Parameters are gathered on the `_ag` clone of the same group if the groups
    have it (they do by default), concurrently with reductions; there is no other switch for that.
    Gradients are averaged over dp * cp, those of experts too. For an example see `ShardedModel`.

    Ranks that share shards first compare names, shapes and values: a model that a rank initialised
    differently, or an expert that was not declared, is refused by name.

    Args:
        model: changed in place; its parameters become DTensors, so optimizers are built afterwards.
            Parameters split over `tp` or `ep` are DTensors already, on a slice of
            `groups.mesh("dp_cp", "tp")` or `groups.mesh("expt_dp", "ep")`. On the meta device
            nothing is allocated: see `ShardedModel.materialize`.
        groups: the communicators; each data axis of several ranks is needed.
        experts: modules and parameters of experts, also under other names; () for none.
        units: modules of the model whose parameters are gathered and freed together, such as its
            layers. Each runs on all ranks of the data axis or on none, and must be called for its
            parameters to be used. The model itself is always a unit, for all other parameters.
        strategy: the tensors to shard, see `Strategy`.
        outer_reduction: with replicas, when to sum gradients between slices.
        precision: dtypes of computation and reduction; shards keep the parameters' own.
        num_prefetched: number of units to gather ahead, in the order of the module tree in forward,
            and against it in backward. 0 gathers none ahead in forward, and in backward the unit
            that ran before.

    Raises:
        ConfigError: On all ranks: a parameter cannot be sharded, a declaration does not fit, or
            ranks that share shards differ; with the parameter's name.
        GroupError: On all ranks: a communicator is missing, or has other members or another order
            than the one whose ranks it repeats.

    Cost: one hash of the parameters; two small agreements over the layout.
    """
    units, experts = list(units), list(experts)
    return Guard[ShardedModel](groups.control, "fully_shard_model").run(
        lambda: _shard(
            model,
            groups,
            experts=experts,
            units=units,
            strategy=strategy,
            outer_reduction=outer_reduction,
            precision=precision or MixedPrecisionPolicy(),
            num_prefetched=num_prefetched,
        )
    )


def _shard(
    model: nn.Module,
    groups: ProcessGroups,
    *,
    experts: list[nn.Module | nn.Parameter],
    units: list[nn.Module],
    strategy: Strategy,
    outer_reduction: OuterReduction,
    precision: MixedPrecisionPolicy,
    num_prefetched: int,
) -> ShardedModel:
    """Check everything, compare ranks, and only then change the model."""
    _torch.check_version()
    who = "fully_shard_model"
    check_choice(strategy, name=f"{who}: strategy", choices=get_args(Strategy))
    check_choice(outer_reduction, name=f"{who}: outer_reduction", choices=get_args(OuterReduction))
    num_prefetched = check_int(num_prefetched, name=f"{who}: num_prefetched", least=0)
    schedule = SCHEDULES[strategy]
    plan = plan_units(model, units=units, experts=experts)
    check_declarations(plan, groups)
    kinds: list[Kind] = list(dict.fromkeys(each.kind for each in plan.parameters))
    # A stage without parameters gathers nothing, but is set up like the others.
    overlaps = is_overlap_requested(kinds or ["dense"], groups, shards=schedule.shards)
    axes = {
        kind: make_axis(
            kind,
            [each for each in plan.parameters if each.kind == kind],
            groups=groups,
            shards=schedule.shards,
            overlaps=overlaps,
        )
        for kind in kinds
    }
    _check_devices(plan, axes)
    compare_ranks(
        plan,
        groups,
        settings=(
            f"strategy={strategy!r}, outer_reduction={outer_reduction!r}, precision={precision}, "
            f"num_prefetched={num_prefetched}, gathering apart={overlaps}"
        ),
    )
    plan = replace(
        plan,
        parameters=tuple(put_on_mesh(each, axes[each.kind]) for each in plan.parameters),
    )
    log = _torch.LaunchLog()
    guards = _make_units(plan, axes, precision=precision, regathers=schedule.regathers, log=log)
    _set_prefetch(list(plan.units), num_prefetched)
    return ShardedModel(
        model,
        groups,
        guards=guards,
        log=log,
        axes=axes,
        schedule=schedule,
        outer_reduction=outer_reduction,
    )


def _make_units(
    plan: UnitPlan,
    axes: dict[Kind, DataAxis],
    *,
    precision: MixedPrecisionPolicy,
    regathers: bool,
    log: _torch.LaunchLog,
) -> list[UnitGuard]:
    """Make every unit, innermost first, and give it its parameters."""
    guards = []
    root = next(iter(plan.units))
    if not axes:
        return []
    mesh = next(iter(axes.values())).mesh
    for unit, name in reversed(plan.units.items()):
        # The model's own parameters are used to the end of its forward, and first in backward.
        frees = regathers and unit is not root
        _torch.make_unit(unit, mesh=mesh, precision=precision, regathers=frees)
        for (kind, _), members in plan.of(unit).items():
            axis = axes[kind]
            group = _torch.add_parameters(
                unit,
                [each.parameter for each in members],
                info=axis.info,
                device=axis.device,
                precision=precision,
                regathers=frees,
            )
            _torch.set_reduction(group, divisor=axis.divisor)
            if axis.gather is not None:
                _torch.set_gather(group, axis.gather)
            _torch.log_launches(group, log)
        guards.append(UnitGuard(unit, name=name))
    return guards


def _set_prefetch(units: list[nn.Module], num_prefetched: int) -> None:
    """Gather the next units while one computes.

    FSDP2's own choice in backward, the unit before in the order in which they ran, leaves out all
    but one of the groups of that unit if this one has a single group.
    """
    if not num_prefetched or len(units) < 2:
        return
    root, *inner = units
    _torch.set_prefetch(
        root, ahead=inner[:num_prefetched], behind=inner[: -num_prefetched - 1 : -1]
    )
    for number, unit in enumerate(inner):
        ahead = inner[number + 1 : number + 1 + num_prefetched]
        behind = inner[max(0, number - num_prefetched) : number][::-1]
        _torch.set_prefetch(unit, ahead=ahead, behind=behind)


def _check_devices(plan: UnitPlan, axes: dict[Kind, DataAxis]) -> None:
    """Raise ConfigError unless parameters are on the communicators' or on the meta device."""
    for each in plan.parameters:
        actual, expected = each.parameter.device, axes[each.kind].device
        if actual != expected and actual.type != "meta":
            raise ConfigError(
                f"fully_shard_model: parameter '{each.name}' is on {actual}, the communicators are "
                f"of {expected}; move the model there, or build it on the meta device"
            )

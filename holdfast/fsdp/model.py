"""`fully_shard_model`: a model on torch's FSDP2, on exactly the communicators it is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import torch
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
from holdfast.fsdp.launch_log import LaunchLog
from holdfast.fsdp.originals import Originals
from holdfast.fsdp.plan import Kind, UnitPlan, plan_units
from holdfast.fsdp.prefetch import Prefetch
from holdfast.fsdp.refusals import refuse_copies
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
    precision: MixedPrecisionPolicy | torch.dtype | None = None,
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
        precision: dtypes of computation and reduction; shards keep the parameters' own. A dtype
            alone is that of the computation, and gradients are reduced in float32.
        num_prefetched: number of units to gather ahead, in the order in which they ran in the last
            forward, and against it in backward; none ahead in the first forward. 0 gathers none
            ahead in forward, and in backward the unit that ran before.

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
            precision=precision,
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
    precision: MixedPrecisionPolicy | torch.dtype | None,
    num_prefetched: int,
) -> ShardedModel:
    """Check everything, compare ranks, and only then change the model."""
    _torch.check_version()
    who = "fully_shard_model"
    check_choice(strategy, name=f"{who}: strategy", choices=get_args(Strategy))
    check_choice(outer_reduction, name=f"{who}: outer_reduction", choices=get_args(OuterReduction))
    num_prefetched = check_int(num_prefetched, name=f"{who}: num_prefetched", least=0)
    policy = _policy(precision)
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
            f"strategy={strategy!r}, outer_reduction={outer_reduction!r}, precision={policy}, "
            f"num_prefetched={num_prefetched}, gathering apart={overlaps}"
        ),
    )
    replaced = {each.name: each.parameter for each in plan.parameters}
    plan = replace(
        plan,
        parameters=tuple(put_on_mesh(each, axes[each.kind]) for each in plan.parameters),
    )
    log = LaunchLog(groups.launch_order)
    hooks = _make_units(plan, axes, precision=policy, regathers=schedule.regathers, log=log)
    names = plan.units if axes else {}
    refuse_copies(model, units=names)
    prefetch = Prefetch([_torch.state_of(unit) for unit in names], num_prefetched)
    return ShardedModel(
        model,
        groups,
        guards=[
            UnitGuard(unit, name=name, hooks=hooks, prefetch=prefetch)
            for unit, name in names.items()
        ],
        log=log,
        originals=Originals(replaced),
        prefetch=prefetch,
        axes=axes,
        schedule=schedule,
        outer_reduction=outer_reduction,
    )


def _policy(precision: object) -> MixedPrecisionPolicy:
    """Return the policy that an argument means; raise ConfigError for anything else."""
    if precision is None:
        return MixedPrecisionPolicy()
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if isinstance(precision, torch.dtype) and precision.is_floating_point:
        # A sum of many ranks in 16 bits loses what each of them adds.
        return MixedPrecisionPolicy(
            param_dtype=precision,
            reduce_dtype=torch.float32 if precision.itemsize < 4 else None,
        )
    raise ConfigError(
        f"fully_shard_model: precision is {precision!r}; pass a torch.distributed.fsdp."
        f"MixedPrecisionPolicy, or a floating-point dtype such as torch.bfloat16 to compute in it"
    )


def _make_units(
    plan: UnitPlan,
    axes: dict[Kind, DataAxis],
    *,
    precision: MixedPrecisionPolicy,
    regathers: bool,
    log: LaunchLog,
) -> dict[Any, Any]:
    """Make every unit, innermost first, and give it its parameters.

    Returns:
        The hooks that users have registered, by FSDP2's parameter.
    """
    hooks: dict[Any, Any] = {}
    root = next(iter(plan.units))
    if not axes:
        return {}
    mesh = next(iter(axes.values())).mesh
    for unit in reversed(plan.units):
        # The model's own parameters are used to the end of its forward, and first in backward.
        frees = regathers and unit is not root
        _torch.make_unit(unit, mesh=mesh, precision=precision, regathers=frees)
        for (kind, dtype), members in plan.of(unit).items():
            axis = axes[kind]
            group = _torch.add_parameters(
                unit,
                [each.parameter for each in members],
                info=axis.info,
                device=axis.device,
                precision=precision,
                regathers=frees,
            )
            group.names = [each.name for each in members]
            _torch.set_reduction(group, divisor=axis.divisor)
            if axis.gather is not None:
                _torch.set_gather(group, axis.gather)
            name = plan.units[unit] or "(the model)"
            _torch.log_launches(group, log, name=f"unit '{name}' ({kind}, {dtype})")
            for each, member in zip(members, _torch.members(group), strict=True):
                if _torch.hooks_of(each.parameter):
                    hooks[member] = _torch.hooks_of(each.parameter)
    return hooks


def _check_devices(plan: UnitPlan, axes: dict[Kind, DataAxis]) -> None:
    """Raise ConfigError unless parameters are on the communicators' or on the meta device."""
    for each in plan.parameters:
        actual, expected = each.parameter.device, axes[each.kind].device
        if actual != expected and actual.type != "meta":
            raise ConfigError(
                f"fully_shard_model: parameter '{each.name}' is on {actual}, the communicators are "
                f"of {expected}; move the model there, or build it on the meta device"
            )

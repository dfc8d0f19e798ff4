"""What ranks compare before a model is sharded: structure, and the bytes of parameters."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError
from holdfast.fsdp.data_axes import WHOLE
from holdfast.fsdp.plan import PlannedParameter, UnitPlan
from holdfast.optim.agreement import Compared, Hints, entry_of
from holdfast.optim.agreement import compare_ranks as compare_entries
from holdfast.optim.shard_groups import mesh_lines
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import EXPERT_AXES

_WHO = "fully_shard_model"
_HINTS = Hints(
    missing="if it is an expert, pass it in experts=[...]",
    values=(
        "Experts, which differ between ranks, belong in experts=[...]; all other parameters must "
        "have the same initial values (one seed, or a broadcast)"
    ),
    shards=(
        "If each holds a shard of one tensor, make it a DTensor on groups.mesh('dp_cp', 'tp')['tp']"
    ),
    alone="make it a DTensor on groups.mesh('expt_dp', 'ep')['ep'], or give each its own name",
)


def check_declarations(plan: UnitPlan, groups: ProcessGroups) -> None:
    """Raise ConfigError for a parameter whose placement does not fit its kind.

    If a dense parameter is cut over ranks of its data axis, other ranks hold other parts of it, so
    it is an undeclared expert.
    """
    layout = groups.layout
    for each in plan.parameters:
        parameter = each.parameter
        if not isinstance(parameter, DTensor):
            if each.kind == "experts" and layout.expt_tp > 1:
                raise ConfigError(
                    f"fully_shard_model: expert '{each.name}' is a plain tensor, which does not "
                    f"say how expt_tp = {layout.expt_tp} splits it; make it a DTensor on "
                    f"groups.mesh('expt_dp', 'ep', 'expt_tp')['ep', 'expt_tp']"
                )
            continue
        over = WHOLE[each.kind]
        reduced = set(groups.ranks(over))
        for name, placement, line in mesh_lines(parameter):
            shared = reduced.intersection(line) - {groups.rank}
            is_apart = not shared and not (each.kind == "dense" and name in EXPERT_AXES[:2])
            if placement.is_replicate() or (placement.is_shard() and is_apart):
                continue
            hint = (
                "an expert belongs in experts=[...]"
                if each.kind == "dense"
                else "it is declared as an expert, but is split as dense parameters are"
            )
            raise ConfigError(
                f"fully_shard_model: parameter '{each.name}' is {placement} along mesh dim "
                f"'{name}' (ranks {line}), and cannot be sharded and reduced over {over!r} (ranks "
                f"{sorted(reduced)}): {hint}"
            )


def compare_ranks(plan: UnitPlan, groups: ProcessGroups, *, settings: str) -> None:
    """Raise ConfigError on all ranks unless those that share shards have the same model and values.

    Args:
        plan: of this rank.
        groups: all ranks of the layout take part.
        settings: the arguments, as text; equal on all ranks.

    Cost: one hash of this rank's parameters; one all-gather of some hundred bytes over the layout,
    and another one of all names if something differs.
    """
    compare_entries(
        [_entry(each, plan, groups) for each in plan.parameters],
        groups,
        who=_WHO,
        phase=_WHO,
        settings=settings,
        hints=_HINTS,
    )


def _entry(each: PlannedParameter, plan: UnitPlan, groups: ProcessGroups) -> Compared:
    """Return what ranks compare of one parameter, and which ranks hold the same."""
    is_plain = not isinstance(each.parameter, DTensor)
    return entry_of(
        each.parameter,
        over="tp-cp-dp" if is_plain and each.kind == "dense" else WHOLE[each.kind],
        name=each.name,
        properties={"unit": plan.units[each.unit]},
        is_alone=each.kind == "experts" and is_plain and groups.layout.ep > 1,
    )

"""Comparison of ranks before a model is sharded: structure, and the bytes of parameters.

Shards are cut by position from what each rank holds. If ranks had other values (another seed, an
undeclared expert), one tensor would silently consist of pieces of several.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError
from holdfast.format.digest import digest128
from holdfast.fsdp.plan import PlannedParameter, UnitPlan
from holdfast.optim.shard_groups import mesh_lines
from holdfast.parallel import ProcessGroups
from holdfast.parallel.layout import EXPERT_AXES
from holdfast.state.tensor_elements import tensor_digest

_PHASE = "fully_shard_model"
_OVER = {"plain": "tp-cp-dp", "dense": "dp_cp", "experts": "expt_dp"}
"""Groups of ranks that must hold the same, by section of the description."""
_MAX_NAMED = 3

Section = dict[str, list[object]]
Description = dict[str, Section]
"""Section -> name of a parameter -> its properties to compare."""


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
        over = "expt_dp" if each.kind == "experts" else "dp_cp"
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
    described = _describe(plan, groups)
    control = groups.control
    asks_names = any(
        each.kind == "experts" and not isinstance(each.parameter, DTensor)
        for each in plan.parameters
    ) and (groups.layout.ep > 1)
    own = {name: digest128(_json(section)) for name, section in described.items()}
    answers = [
        json.loads(answer)
        for answer in control.all_gather(_json([settings, own, asks_names]), phase=_PHASE)
    ]
    by_rank = dict(zip(control.ranks, answers, strict=True))
    for rank, (other, _, _) in by_rank.items():
        if other != answers[0][0]:
            raise ConfigError(
                f"fully_shard_model: rank {rank} was called with {other}, rank "
                f"{control.ranks[0]} with {answers[0][0]}; call it with the same "
                f"arguments on all ranks"
            )
    differs = any(
        by_rank[rank][1][section] != by_rank[members[0]][1][section]
        for section, members in _peers(groups)
        for rank in members
    )
    if differs or any(asks for _, _, asks in answers):
        _compare_names(described, groups)


def _compare_names(described: Description, groups: ProcessGroups) -> None:
    """Exchange all names, and raise ConfigError with those of parameters that differ."""
    control = groups.control
    payloads = control.all_gather(_json(described), phase=f"{_PHASE}: names")
    by_rank: dict[int, Description] = {
        rank: json.loads(payload) for rank, payload in zip(control.ranks, payloads, strict=True)
    }
    problems: list[str] = []
    for section, members in _peers(groups):
        first = by_rank[members[0]][section]
        for rank in members[1:]:
            problems += _differences(first, by_rank[rank][section], ranks=(members[0], rank))
    problems += _same_experts(by_rank, groups)
    if problems:
        listed = "; ".join(dict.fromkeys(problems[:_MAX_NAMED]))
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ConfigError(f"fully_shard_model: {listed}{more}")


def _differences(first: Section, other: Section, *, ranks: tuple[int, int]) -> list[str]:
    """Describe what two ranks have that should be the same."""
    problems = []
    for name in first.keys() | other.keys():
        mine, theirs = first.get(name), other.get(name)
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            has, lacks = ranks if theirs is None else ranks[::-1]
            problems.append(
                f"parameter '{name}' is on rank {has} but not on rank {lacks}, though they share "
                f"shards; if it is an expert, pass it in experts=[...]"
            )
        elif mine[:-1] != theirs[:-1]:
            problems.append(
                f"parameter '{name}' is {mine[:-1]} on rank {ranks[0]} and {theirs[:-1]} on rank "
                f"{ranks[1]} (shape, dtype, trained, unit, placement)"
            )
        else:
            problems.append(
                f"parameter '{name}' has other values on rank {ranks[1]} than on rank {ranks[0]}, "
                f"though they would hold shards of one tensor. Experts, which differ "
                f"between ranks, belong in experts=[...]; all other parameters must have the "
                f"same initial values (one seed, or a broadcast)"
            )
    return sorted(problems)


def _same_experts(by_rank: Mapping[int, Description], groups: ProcessGroups) -> list[str]:
    """Describe plain experts that several expt_dp groups have under one name."""
    layout = groups.layout
    if layout.ep == 1 or not layout.has_expert_view:
        return []
    problems = []
    for stage in layout.groups("tp-cp-dp"):
        owners: dict[str, tuple[int, ...]] = {}
        for rank in stage:
            for name, entry in by_rank[rank]["experts"].items():
                own = layout.group("expt_dp", rank)
                first = owners.setdefault(name, own)
                if entry[-2] is None and first != own:
                    problems.append(
                        f"expert '{name}' is a plain tensor on ranks {list(first)} and on ranks "
                        f"{list(own)}, which hold different experts; make it a DTensor on "
                        f"groups.mesh('expt_dp', 'ep')['ep'], or give each expert its own name"
                    )
    return sorted(set(problems))


def _describe(plan: UnitPlan, groups: ProcessGroups) -> Description:
    """Return this rank's parameters by section; the last entry is the digest of the bytes."""
    described: Description = {"plain": {}, "dense": {}, "experts": {}}
    for each in plan.parameters:
        is_plain = each.kind == "dense" and not isinstance(each.parameter, DTensor)
        described["plain" if is_plain else each.kind][each.name] = _entry(each, plan, groups)
    return described


def _entry(each: PlannedParameter, plan: UnitPlan, groups: ProcessGroups) -> list[object]:
    """Return the properties of one parameter that ranks compare."""
    parameter = each.parameter
    placement = None
    if isinstance(parameter, DTensor):
        placement = [str(p) for p in parameter.placements]
    return [
        list(parameter.shape),
        str(parameter.dtype),
        parameter.requires_grad,
        plan.units[each.unit],
        placement,
        tensor_digest(parameter),
    ]


def _peers(groups: ProcessGroups) -> Iterable[tuple[str, Sequence[int]]]:
    """Yield (section, ranks that must have the same), for all ranks, so that all raise the same."""
    for section, over in _OVER.items():
        if section != "experts" or groups.layout.has_expert_view:
            for members in groups.layout.groups(over):
                yield section, members


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

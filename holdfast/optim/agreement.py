"""Comparison of ranks before parameters are sharded or trained: structure, and bytes.

Shards are cut by position from what each rank holds, and copies count once in a norm. If ranks had
other values (another seed, an undeclared shard or expert), one tensor would silently consist of
pieces of several, or its norm would be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.errors import ConfigError, some_sentences
from holdfast.format.digest import digest128
from holdfast.parallel import Layout, ProcessGroups
from holdfast.state.tensor_elements import tensor_digest

_MAX_NAMED = 3

Section = dict[str, tuple[dict[str, object], str, bool]]
"""Name of a parameter -> properties, digest, `Compared.is_alone`."""
Description = dict[str, Section]
"""Aspect and group whose ranks must have the same, as `Compared.key` -> its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the ranks of one group compare of a parameter."""

    over: str
    """The group."""
    name: str
    properties: Mapping[str, object]
    """By their names in messages, such as "shape"."""
    digest: str = ""
    """Of the bytes of this rank; empty if they are not compared."""
    is_alone: bool = False
    """True if other groups must not have a parameter of this name: it would be another tensor."""
    aspect: Literal["parameter", "buckets"] = "parameter"
    """What is compared: buckets by fewer ranks than the parameter itself."""

    @property
    def key(self) -> str:
        """The section that it belongs to."""
        return f"{self.aspect}:{self.over}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What to do about ranks that differ, as ends of messages."""

    missing: str
    """If only some ranks have a parameter."""
    values: str
    """If its values differ."""
    shards: str
    """If ranks differ that do not share data, and so may hold shards of one tensor."""
    alone: str
    """If ranks of several groups have a parameter that `Compared.is_alone`."""


def entry_of(
    parameter: Tensor,
    *,
    over: str,
    name: str,
    properties: Mapping[str, object] = MappingProxyType({}),
    is_alone: bool = False,
) -> Compared:
    """Return what ranks that hold the same parameter compare of it.

    Cost: one hash of what this rank holds.
    """
    placement = None
    if isinstance(parameter, DTensor):
        placement = [str(each) for each in parameter.placements]
    return Compared(
        over=over,
        name=name,
        properties={
            "shape": list(parameter.shape),
            "dtype": str(parameter.dtype),
            "requires_grad": parameter.requires_grad,
            "placement": placement,
            **properties,
        },
        digest=tensor_digest(parameter),
        is_alone=is_alone,
    )


def compare_ranks(
    entries: Iterable[Compared],
    groups: ProcessGroups,
    *,
    who: str,
    phase: str,
    settings: str,
    hints: Hints,
    failure: Exception | None = None,
) -> None:
    """Raise ConfigError on all ranks unless those that hold the same parameters are alike.

    Args:
        entries: of this rank.
        groups: all ranks of the layout take part.
        who: start of messages.
        phase: of the agreement; equal on all ranks.
        settings: arguments as text; equal on all ranks.
        hints: ends of messages.
        failure: of this rank, before it could describe anything; raised on all ranks.

    Cost: one all-gather of some hundred bytes over the layout, and another one of all names if
        something differs.
    """
    described = _by_section(entries)
    control = groups.control
    own = {key: digest128(_json(section)) for key, section in described.items()}
    asks_names = any(is_alone for s in described.values() for *_, is_alone in s.values())
    payload = _json([settings, own, asks_names])
    answers = [json.loads(a) for a in control.agree(failure, phase=phase, payload=payload)]
    by_rank = dict(zip(control.ranks, answers, strict=True))
    first = answers[0][0]
    for rank, (other, _, _) in by_rank.items():
        if other != first:
            raise ConfigError(
                f"{who}: rank {rank} was called with {other}, rank {control.ranks[0]} with "
                f"{first}; call it with the same arguments on all ranks"
            )
    differs = any(
        by_rank[rank][1].get(key) != by_rank[members[0]][1].get(key)
        for key in {key for _, each, _ in answers for key in each}
        for members in groups.layout.groups(_over(key))
        for rank in members
    )
    if differs or any(asks for _, _, asks in answers):
        _compare_names(described, groups, who=who, phase=phase, hints=hints)


def _by_section(entries: Iterable[Compared]) -> Description:
    """Return entries by section and name."""
    described: Description = {}
    for each in entries:
        section = described.setdefault(each.key, {})
        section[each.name] = (dict(each.properties), each.digest, each.is_alone)
    return described


def _over(key: str) -> str:
    """Return the group of a section."""
    return key.partition(":")[2]


def _compare_names(
    described: Description, groups: ProcessGroups, *, who: str, phase: str, hints: Hints
) -> None:
    """Exchange all names, and raise ConfigError with those of parameters that differ."""
    control, layout = groups.control, groups.layout
    payloads = control.all_gather(_json(described), phase=f"{phase}: names")
    by_rank: dict[int, Description] = {
        rank: json.loads(payload) for rank, payload in zip(control.ranks, payloads, strict=True)
    }
    problems: list[str] = []
    for key in sorted({key for each in by_rank.values() for key in each}, reverse=True):
        for members in layout.groups(_over(key)):
            for rank in members[1:]:
                peers = layout.group("dp_cp", rank)
                # Of ranks that share data, first: others may hold shards.
                first = next(each for each in members if each in peers)
                pair = (members[0] if first == rank else first, rank)
                problems += _differences(by_rank, key, pair, layout, hints)
        problems += _shared_names(by_rank, key, layout, hints)
    problems = list(dict.fromkeys(problems))
    if problems:
        raise ConfigError(f"{who}: {some_sentences(problems, most=_MAX_NAMED)}")


def _differences(
    by_rank: Mapping[int, Description],
    key: str,
    ranks: tuple[int, int],
    layout: Layout,
    hints: Hints,
) -> list[str]:
    """Describe what two ranks have that should be the same."""
    first, other = (by_rank[rank].get(key, {}) for rank in ranks)
    may_be_shards = ranks[1] not in layout.group("dp_cp", ranks[0])
    problems = []
    for name in first.keys() | other.keys():
        mine, theirs = first.get(name), other.get(name)
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            has, lacks = ranks if theirs is None else ranks[::-1]
            problems.append(_missing(name, by_rank, key, has=has, lacks=lacks, hints=hints))
            continue
        hint = f". {hints.shards}" if may_be_shards else ""
        if mine[0] != theirs[0]:
            here, there = (
                ", ".join(f"{k} {v}" for k, v in each.items() if v != to[k])
                for each, to in ((mine[0], theirs[0]), (theirs[0], mine[0]))
            )
            problems.append(
                f"parameter '{name}' has {here} on rank {ranks[0]} and {there} on rank "
                f"{ranks[1]}, which hold the same parameters{hint}"
            )
        else:
            problems.append(
                f"parameter '{name}' has other values on rank {ranks[1]} than on rank {ranks[0]}, "
                f"which hold the same parameters{hint}. {hints.values}"
            )
    return sorted(problems)


def _missing(
    name: str,
    by_rank: Mapping[int, Description],
    key: str,
    *,
    has: int,
    lacks: int,
    hints: Hints,
) -> str:
    """Describe a parameter that one of two ranks does not have, or has declared otherwise."""
    aspect = key.partition(":")[0]
    for other, section in by_rank[lacks].items():
        if name in section and other != key and other.startswith(aspect):
            return (
                f"parameter '{name}' is declared to be the same along {_over(key)!r} on rank {has} "
                f"and along {_over(other)!r} on rank {lacks}; declare it alike on all ranks"
            )
    return (
        f"parameter '{name}' is on rank {has} but not on rank {lacks}, which hold the same "
        f"parameters; {hints.missing}"
    )


def _shared_names(
    by_rank: Mapping[int, Description], key: str, layout: Layout, hints: Hints
) -> list[str]:
    """Describe parameters that are alone and that several groups of a stage have."""
    problems = []
    for stage in layout.groups("tp-cp-dp"):
        owners: dict[str, Sequence[int]] = {}
        for rank in stage:
            for name, (_, _, is_alone) in by_rank[rank].get(key, {}).items():
                own = layout.group(_over(key), rank)
                first = owners.setdefault(name, own)
                if is_alone and first != own:
                    problems.append(
                        f"parameter '{name}' is a plain tensor on ranks {list(first)} and on ranks "
                        f"{list(own)}, which hold different experts; {hints.alone}"
                    )
    return sorted(set(problems))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

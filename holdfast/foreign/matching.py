"""Which rule takes which names, and what it makes of them; every name and every rule is checked."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.arrays.boxes import Box, split_box
from holdfast.errors import ConfigError, MismatchError, some_of
from holdfast.foreign.catalog import OpenFiles
from holdfast.foreign.rules import MapRule
from holdfast.foreign.tensor_expressions import Expression

_COMPARED_NBYTES = 4 << 20
_NUM_NAMED = 8


@dataclass(frozen=True, slots=True)
class RuleUse:
    """One use of a rule: the names it takes and makes, in order. Without rule: a name is kept."""

    rule: MapRule | None
    sources: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(slots=True)
class _Group:
    """The names that one use of a rule takes: by source pattern, and by the wildcard `over`."""

    rule: MapRule
    values: dict[str, str]
    names: dict[tuple[int, int], str]


def uses_of(
    rules: Sequence[MapRule], names: Mapping[str, tuple[int, ...] | None], *, unmatched: str
) -> list[RuleUse]:
    """Return how rules are used on names, in the order of the names.

    Args:
        rules: Of one stage.
        names: The names that there are, with the shapes of those that are tensors.
        unmatched: "error" or "keep".

    Raises:
        ConfigError: Two rules take one name, or make one name.
        MismatchError: A rule matches nothing, or only some of the names it needs; or no rule
            matches a name.
    """
    groups: dict[object, _Group | str] = {}
    lost = []
    for name in names:
        use = _use_of(rules, name, names)
        if use is not None:
            rule, index, values = use
            at = int(values.pop(rule.over)) if rule.kind == "stack" and rule.over else 0
            key = (id(rule), tuple(sorted(values.items())))
            group = groups.setdefault(key, _Group(rule, values, {}))
            assert isinstance(group, _Group)
            group.names[index, at] = name
        elif unmatched == "keep":
            groups[name] = name
        else:
            lost.append(name)
    if lost:
        raise MismatchError(
            f"no rule matches {len(lost)} names: {_some(lost)}; add rules that rename or drop "
            f"them, or set unmatched to keep",
            details={"keys": lost},
        )
    _require_use(rules, groups.values())
    uses = [
        RuleUse(None, (group,), (group,)) if isinstance(group, str) else _use(group, names)
        for group in groups.values()
    ]
    _refuse_doubles(uses)
    return uses


def not_undone(
    rules: Sequence[MapRule],
    uses: Sequence[RuleUse],
    results: Mapping[str, tuple[int, ...] | None],
    *,
    unmatched: str,
) -> str:
    """Return what the inverse of the rules would do otherwise; empty if it undoes their uses.

    A pattern may match in several ways the name that it has made, and one that is kept may look
    like one that was made. An inverse that does not exist, or refuses the names, does nothing.

    Args:
        rules: Of one stage.
        uses: What they did.
        results: The names that there are after it, as for `uses_of`.
        unmatched: "error" or "keep".
    """
    try:
        undone = uses_of([rule.inverse() for rule in rules], results, unmatched=unmatched)
    except (ConfigError, MismatchError):
        return ""
    before = {use.results: use.sources for use in uses if use.results}
    odd = [use for use in undone if before.get(use.sources) != use.results]
    texts = [f"{', '.join(use.results) or 'nothing'} of {', '.join(use.sources)}" for use in odd]
    if not texts:
        return ""
    was = some_of([name for use in odd for name in before.get(use.sources, ())])
    return f"its inverse would make {_some(texts)}" + (f", which was {was}" if was else "")


def _some(names: Sequence[str]) -> str:
    return some_of(names, most=_NUM_NAMED)


def _use_of(
    rules: Sequence[MapRule], name: str, names: Container[str]
) -> tuple[MapRule, int, dict[str, str]] | None:
    """Return the rule that takes a name, as which of its sources, and what its wildcards are."""
    uses = [
        (rule, index, values)
        for rule in rules
        for index, pattern in enumerate(rule.sources)
        if (values := pattern.match(name)) is not None
        and (rule.where is None or rule.where.fill(values) in names)
    ]
    if len(uses) > 1:
        both = " and ".join(str(rule) for rule, _, _ in uses[:2])
        raise ConfigError(f"name {name!r} is matched by {both}: only one may take it")
    return uses[0] if uses else None


def _require_use(rules: Sequence[MapRule], groups: object) -> None:
    used = {id(group.rule) for group in groups if isinstance(group, _Group)}  # type: ignore[attr-defined]
    idle = [rule for rule in rules if id(rule) not in used and not rule.optional]
    if idle:
        raise MismatchError(
            f"{'; '.join(map(str, idle[:_NUM_NAMED]))}: matched nothing; if that is not a mistake, "
            f"set optional = true"
        )


def _use(group: _Group, names: Mapping[str, tuple[int, ...] | None]) -> RuleUse:
    rule = group.rule
    count = 1
    if rule.kind == "stack":
        # With a gap, one more than there are is enough to name a missing one.
        count = min(max(at for _, at in group.names), len(group.names)) + 1
    needed = [(index, at) for index in range(len(rule.sources)) for at in range(count)]
    sources = [group.names.get(each) for each in needed]
    missing = [
        rule.sources[index].fill({**group.values, rule.over or "": str(at)})
        for (index, at), name in zip(needed, sources, strict=True)
        if name is None
    ]
    if missing:
        have = _some(list(group.names.values()))
        raise MismatchError(f"{rule}: {_some(missing)} is missing, but there is {have}")
    taken = tuple(name for name in sources if name is not None)
    return RuleUse(rule, taken, _results(rule, group.values, taken, names))


def _results(
    rule: MapRule,
    values: dict[str, str],
    sources: Sequence[str],
    names: Mapping[str, tuple[int, ...] | None],
) -> tuple[str, ...]:
    if rule.kind != "unstack" or rule.over is None:
        return tuple(pattern.fill(values) for pattern in rule.results)
    shape = names[sources[0]]
    if shape is None:
        raise MismatchError(f"{rule}: {sources[0]!r} is not a tensor")
    try:
        count = rule.num_results(shape)
    except MismatchError as error:
        raise MismatchError(f"{rule}: {sources[0]}: {error}") from None
    return tuple(rule.results[0].fill({**values, rule.over: str(i)}) for i in range(count))


def _refuse_doubles(uses: Sequence[RuleUse]) -> None:
    makers: dict[str, RuleUse] = {}
    for use in uses:
        for name in use.results:
            other = makers.setdefault(name, use)
            if other is not use or use.results.count(name) > 1:
                ways = " and ".join(
                    f"{each.rule or 'a name that is kept'} from {_some(each.sources)}"
                    for each in (other, use)
                )
                raise ConfigError(f"name {name!r} is made twice: by {ways}")


def require_equal(
    tensors: Sequence[Expression], names: Sequence[str], files: OpenFiles, *, place: str
) -> None:
    """Raise MismatchError if tensors of one type and shape do not have equal bytes.

    Cost: reads them in pieces of some MiB, unless they are the same ranges of files.
    """
    first = tensors[0]
    whole = Box((0,) * len(first.shape), first.shape)
    for other, name in zip(tensors[1:], names[1:], strict=True):
        pieces = first.pieces()
        if other is first or (
            other.pieces() == pieces and all(piece.payload is not None for piece in pieces)
        ):
            continue
        for box in split_box(whole, max_numel=_COMPARED_NBYTES // first.itemsize):
            one, two = first.read(box, files), other.read(box, files)
            if not np.array_equal(one, two):
                raise MismatchError(f"{place}: {names[0]} and {name} must be equal, and differ")

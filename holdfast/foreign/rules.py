"""The rules of a name map: which names become which, and what happens to the tensors.

A rule takes the tensors whose names its source patterns match, with one value of the wildcards, and
makes those of its result patterns:

| rule | sources -> results | settings |
|---|---|---|
| rename | 1 -> 1 | |
| join, split | n -> 1, 1 -> n: along a dim | dim, shares, groups |
| stack, unstack | one per value of the wildcard `over` -> 1, and back: a new dim | over, dim |
| transpose | 1 -> 1: dims in another order | dims |
| rotary | 1 -> 1: rows of each head, the other order | order, dim, head_dim or heads, rotary_dim |
| pad, trim | 1 -> 1: zeros at the end of a dim, and without it | dim, unpadded, padded |
| tie, untie | n equal ones -> 1, 1 -> n | |
| cast | 1 -> 1: another float type | dtype, saturate, back |
| drop | 1 -> 0 | recomputed |
| absent | 0 -> 0: what the inverse drops | |

Any rule may state in `where` another name that must be there: a layer's norm is taken by one rule
where the layer has a router, and by another where it has none. `where_to` is that of the inverse.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.decoding import convert_as
from holdfast.errors import ConfigError, MismatchError
from holdfast.foreign.patterns import NamePattern
from holdfast.foreign.tensor_expressions import (
    Cast,
    Concat,
    DropDim,
    ExpandDim,
    Expression,
    MergeDims,
    Permute,
    SliceDim,
    SplitDim,
    Zeros,
    dim_of,
)
from holdfast.foreign.variables import Variables
from holdfast.format.elements import FLOATS

Number = int | str
"""A whole number, or an expression of variables."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "rename": (),
    "join": ("dim", "shares", "groups"),
    "split": ("dim", "shares", "groups"),
    "stack": ("over", "dim"),
    "unstack": ("over", "dim"),
    "transpose": ("dims",),
    "rotary": ("order", "dim", "head_dim", "heads", "rotary_dim"),
    "pad": ("dim", "unpadded", "padded"),
    "trim": ("dim", "unpadded", "padded"),
    "tie": (),
    "untie": (),
    "cast": ("dtype", "saturate", "back"),
    "drop": ("recomputed",),
    "absent": (),
}
"""The settings of each kind of rule."""
_TYPES: Mapping[str, Any] = {
    "dim": int,
    **dict.fromkeys(("over", "order", "dtype", "back"), str),
    **dict.fromkeys(("groups", "heads", "head_dim", "rotary_dim", "unpadded", "padded"), Number),
    **dict.fromkeys(("saturate", "recomputed", "optional"), bool),
    "dims": list[int],
    "shares": list[Number],
}
_INVERSE = {
    "join": "split", "split": "join", "stack": "unstack", "unstack": "stack", "tie": "untie",
    "untie": "tie", "pad": "trim", "trim": "pad",
}  # fmt: skip
_CONDITIONS = ("where", "where_to")
_MANY_SOURCES = ("join", "tie")
_MANY_RESULTS = ("split", "untie")
ORDERS = ("interleaved-to-half", "half-to-interleaved")


class _Use(NamedTuple):
    """What a rule is applied to: tensors, and their names."""

    tensors: Sequence[Expression]
    variables: Variables
    names: Sequence[str]

    @property
    def one(self) -> Expression:
        """The tensor of a rule that takes one."""
        (tensor,) = self.tensors
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRule:
    """One rule. Made by `rename`, `join`, … below, or from a table of TOML by `rule_of`.

    Args:
        kind: One of `KINDS`.
        sources: Patterns of the names it takes.
        results: Patterns of the names it makes.
        settings: Of its kind.
        optional: It may match nothing.
        where: It takes only names for which a name of this pattern is there, too.
        where_to: The same for its inverse.
        label: For messages: its number in the map.
    """

    kind: str
    sources: tuple[NamePattern, ...]
    results: tuple[NamePattern, ...]
    settings: Mapping[str, Any]
    optional: bool = False
    where: NamePattern | None = None
    where_to: NamePattern | None = None
    label: str = "rule"

    def __str__(self) -> str:
        """Return the rule in words."""
        made = f" -> {', '.join(map(repr, self.results))}" if self.results else ""
        where = f" where {self.where!r}" if self.where is not None else ""
        return f"{self.label} ({self.kind} {', '.join(map(repr, self.sources))}{made}{where})"

    @property
    def over(self) -> str | None:
        """The wildcard that a stack or unstack runs over."""
        over: str | None = self.settings.get("over")
        return over

    def inverse(self) -> MapRule:
        """Return the rule that undoes this one; of a drop of what is recomputed, that it is absent.

        Raises:
            ConfigError: Nothing undoes it.
        """
        settings = dict(self.settings)
        undoing = partial(replace, self, where=self.where_to, where_to=self.where)
        if self.kind == "drop":
            if not settings.get("recomputed"):
                raise ConfigError(
                    f"{self}: what is dropped cannot come back, so the map has no inverse; set "
                    f"recomputed = true if the program that loads it computes it itself"
                )
            return undoing(
                kind="absent", sources=(), results=self.sources, settings={}, optional=True
            )
        if self.kind == "absent":
            settings["recomputed"] = True
            return undoing(kind="drop", sources=self.results, results=(), settings=settings)
        if self.kind == "cast":
            if "back" not in settings:
                raise ConfigError(
                    f"{self}: the map has no inverse; set back to the type from which it casts, if "
                    f"the cast back is to round"
                )
            settings["dtype"], settings["back"] = settings["back"], settings["dtype"]
        elif self.kind == "rotary":
            settings["order"] = ORDERS[1 - ORDERS.index(settings["order"])]
        elif self.kind == "transpose" and "dims" in settings:
            dims = list(settings["dims"])
            settings["dims"] = [dims.index(i) for i in range(len(dims))]
        kind = _INVERSE.get(self.kind, self.kind)
        return undoing(kind=kind, sources=self.results, results=self.sources, settings=settings)

    def transform(
        self, tensors: Sequence[Expression], variables: Variables, names: Sequence[str]
    ) -> list[Expression]:
        """Return the tensors that the rule makes of others, in the order of its results.

        Raises:
            MismatchError: Shapes or types do not fit the rule.
            ConfigError: A setting has no value.
        """
        try:
            use = _Use(tensors, variables, names)
            return getattr(self, f"_{self.kind}")(use)  # type: ignore[no-any-return]
        except MismatchError as error:
            raise MismatchError(f"{self}: {', '.join(names)}: {error}") from None

    # ---- one to one ----

    def _rename(self, use: _Use) -> list[Expression]:
        return list(use.tensors)

    def _drop(self, use: _Use) -> list[Expression]:
        return []

    def _transpose(self, use: _Use) -> list[Expression]:
        tensor = use.one
        ndim = len(tensor.shape)
        last_two = [*range(ndim - 2), ndim - 1, ndim - 2] if ndim >= 2 else None
        dims = self.settings.get("dims", last_two)
        if dims is None or sorted(dims) != list(range(ndim)):
            raise MismatchError(f"dims {dims} do not permute a tensor with {ndim} dims")
        return [Permute(tensor, dims=dims)]

    def _rotary(self, use: _Use) -> list[Expression]:
        tensor = use.one
        dim = self._dim(tensor.shape)
        size = tensor.shape[dim]
        if "heads" in self.settings:
            heads = self._number(self.settings["heads"], use)
            head_dim = size // heads if heads else 0
        else:
            head_dim = self._number(self.settings["head_dim"], use)
            heads = size // head_dim if head_dim else 0
        if heads * head_dim != size or head_dim % 2:
            raise MismatchError(
                f"dim {dim} has {size} entries, not {heads} heads of an even number {head_dim}"
            )
        turned = head_dim
        if "rotary_dim" in self.settings:
            turned = self._number(self.settings["rotary_dim"], use)
            if not 0 < turned <= head_dim or turned % 2:
                raise MismatchError(f"rotary_dim {turned} is not an even part of {head_dim}")
        by_head = SplitDim(tensor, dim=dim, sizes=[heads, head_dim])
        rows: Expression = by_head
        if turned < head_dim:  # the others are not turned by the position: they stay
            rows = SliceDim(by_head, dim=dim + 1, start=0, size=turned)
        to_half = self.settings["order"] == ORDERS[0]
        sizes = [turned // 2, 2] if to_half else [2, turned // 2]
        split = SplitDim(rows, dim=dim + 1, sizes=sizes)
        order = list(range(len(split.shape)))
        order[dim + 1], order[dim + 2] = order[dim + 2], order[dim + 1]
        rows = MergeDims(Permute(split, dims=order), dim=dim + 1, count=2)
        if turned < head_dim:
            rest = SliceDim(by_head, dim=dim + 1, start=turned, size=head_dim - turned)
            rows = Concat([rows, rest], dim=dim + 1)
        return [MergeDims(rows, dim=dim, count=2)]

    def _pad(self, use: _Use) -> list[Expression]:
        dim, unpadded, padded = self._padding(use, "unpadded")
        if padded == unpadded:
            return [use.one]
        zeros = Zeros(use.one, dim=dim, size=padded - unpadded)
        return [Concat([use.one, zeros], dim=dim)]

    def _trim(self, use: _Use) -> list[Expression]:
        dim, unpadded, padded = self._padding(use, "padded")
        if padded == unpadded:
            return [use.one]
        return [SliceDim(use.one, dim=dim, start=0, size=unpadded)]

    def _padding(self, use: _Use, now: Literal["unpadded", "padded"]) -> tuple[int, int, int]:
        """Return the dim, and its sizes without and with padding, of which it has one now."""
        dim = self._dim(use.one.shape)
        unpadded = self._number(self.settings["unpadded"], use)
        padded = self._number(self.settings["padded"], use)
        if not 0 < unpadded <= padded:
            raise MismatchError(f"{unpadded} entries cannot be padded to {padded}")
        size = padded if now == "padded" else unpadded
        if use.one.shape[dim] != size:
            raise MismatchError(f"dim {dim} has {use.one.shape[dim]} entries, not {size}")
        return dim, unpadded, padded

    def _cast(self, use: _Use) -> list[Expression]:
        tensor = use.one
        dtype = self.settings["dtype"]
        back = self.settings.get("back")
        if back is not None and tensor.dtype != back:
            raise MismatchError(f"it is {tensor.dtype}, but the rule casts from {back}")
        if tensor.dtype == dtype:
            return [tensor]
        saturate = self.settings.get("saturate", False)
        return [Cast(tensor, dtype=dtype, saturate=saturate, name=use.names[0])]

    # ---- several ----

    def _tie(self, use: _Use) -> list[Expression]:
        first = use.tensors[0]
        for other in use.tensors[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise MismatchError("tensors of different types or shapes cannot be tied")
        return [first]

    def _untie(self, use: _Use) -> list[Expression]:
        # Copies of the expression: what follows treats them as tensors of their own.
        return [copy.copy(use.tensors[0]) for _ in self.results]

    def _join(self, use: _Use) -> list[Expression]:
        dim = _common_dim(use.tensors, self.settings.get("dim", 0), except_there=True)
        shares = self._shares(len(use.tensors), use)
        sizes = [tensor.shape[dim] for tensor in use.tensors]
        if any(
            size * sum(shares) != share * sum(sizes)
            for size, share in zip(sizes, shares, strict=True)
        ):
            raise MismatchError(
                f"their sizes {sizes} along dim {dim} are not in the proportion of the shares "
                f"{shares}: a split could not undo the join"
            )
        groups = self._groups(use)
        if groups is None:
            return [Concat(use.tensors, dim=dim)]
        for size in sizes:
            _require_groups(size, groups, dim)
        parts = [
            SplitDim(tensor, dim=dim, sizes=[groups, size // groups])
            for tensor, size in zip(use.tensors, sizes, strict=True)
        ]
        return [MergeDims(Concat(parts, dim=dim + 1), dim=dim, count=2)]

    def _split(self, use: _Use) -> list[Expression]:
        tensor = use.one
        dim = self._dim(tensor.shape)
        shares = self._shares(len(self.results), use)
        groups = self._groups(use)
        _require_groups(tensor.shape[dim], groups or 1, dim)
        size = tensor.shape[dim] // (groups or 1)
        if not sum(shares) or any(size * share % sum(shares) for share in shares):
            raise MismatchError(f"{size} entries along dim {dim} do not split by shares {shares}")
        cut = SplitDim(tensor, dim=dim, sizes=[groups, size]) if groups is not None else tensor
        at = dim if groups is None else dim + 1
        results: list[Expression] = []
        start = 0
        for share in shares:
            length = size * share // sum(shares)
            part: Expression = SliceDim(cut, dim=at, start=start, size=length)
            results.append(part if groups is None else MergeDims(part, dim=dim, count=2))
            start += length
        return results

    def _stack(self, use: _Use) -> list[Expression]:
        _common_dim(use.tensors, 0, except_there=False)
        dim = dim_of(self.settings.get("dim", 0), len(use.tensors[0].shape) + 1)
        return [Concat([ExpandDim(tensor, dim=dim) for tensor in use.tensors], dim=dim)]

    def _unstack(self, use: _Use) -> list[Expression]:
        tensor = use.one
        dim = self._dim(tensor.shape)
        return [
            DropDim(SliceDim(tensor, dim=dim, start=i, size=1), dim=dim)
            for i in range(tensor.shape[dim])
        ]

    def num_results(self, shape: tuple[int, ...]) -> int:
        """Return how many tensors an unstack makes of one; MismatchError if it lacks the dim."""
        return shape[self._dim(shape)]

    def _dim(self, shape: tuple[int, ...]) -> int:
        return dim_of(self.settings.get("dim", 0), len(shape))

    def _number(self, value: Number, use: _Use) -> int:
        return use.variables.evaluate(value, place=str(self))

    def _shares(self, count: int, use: _Use) -> list[int]:
        shares = [self._number(s, use) for s in self.settings.get("shares", [1] * count)]
        if len(shares) != count or min(shares) < 0:
            raise MismatchError(f"shares {shares} are not one for each of {count} tensors")
        return shares

    def _groups(self, use: _Use) -> int | None:
        groups = self.settings.get("groups")
        return None if groups is None else self._number(groups, use)


def _common_dim(tensors: Sequence[Expression], dim: int, *, except_there: bool) -> int:
    """Return the dim; MismatchError if types or shapes differ, there or elsewhere."""
    first = tensors[0]
    dim = dim_of(dim, len(first.shape)) if except_there else -1
    forms = {
        (each.dtype, tuple(n for d, n in enumerate(each.shape) if d != dim), len(each.shape))
        for each in tensors
    }
    if len(forms) > 1:
        shapes = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors[:8])
        raise MismatchError(f"their types or shapes do not fit together: {shapes}")
    return dim


def _require_groups(size: int, groups: int, dim: int) -> None:
    if groups < 1 or size % groups:
        raise MismatchError(f"{size} entries along dim {dim} are not {groups} groups")


# ---- making rules ----


def rename(source: str, to: str, *, optional: bool = False) -> MapRule:
    """Another name."""
    return rule_of({"rename": source, "to": to, "optional": optional})


def join(sources: Sequence[str], to: str, *, optional: bool = False, **settings: Any) -> MapRule:
    """Several tensors, one after the other along `dim` (default 0).

    Args:
        sources: Patterns with the same wildcards.
        to: NamePattern of the result.
        optional: The rule may match nothing.
        settings: `dim`; `shares`, the proportion of their sizes (default: equal), by which a split
            undoes the join; `groups`, the number of groups that each is cut into, the results
            being group by group (query, key and value of each group of heads).
    """
    return rule_of({"join": list(sources), "to": to, "optional": optional, **settings})


def split(source: str, to: Sequence[str], *, optional: bool = False, **settings: Any) -> MapRule:
    """Several parts of a tensor along `dim`; undoes `join`."""
    return rule_of({"split": source, "to": list(to), "optional": optional, **settings})


def stack(source: str, to: str, *, over: str, dim: int = 0, optional: bool = False) -> MapRule:
    """The tensors of all values of the wildcard `over` (0, 1, 2, …) in one, along a new dim."""
    return rule_of({"stack": source, "to": to, "over": over, "dim": dim, "optional": optional})


def unstack(source: str, to: str, *, over: str, dim: int = 0, optional: bool = False) -> MapRule:
    """One tensor for each entry of a dim; undoes `stack`."""
    return rule_of({"unstack": source, "to": to, "over": over, "dim": dim, "optional": optional})


def transpose(
    source: str, to: str = "", *, dims: Sequence[int] | None = None, optional: bool = False
) -> MapRule:
    """The dims in another order; by default the last two are exchanged."""
    chosen = {} if dims is None else {"dims": list(dims)}
    return rule_of({"transpose": source, "to": to or source, "optional": optional, **chosen})


def rotary(
    source: str, to: str = "", *, order: str, optional: bool = False, **settings: Any
) -> MapRule:
    """The rows of each head in the other rotary layout.

    Args:
        source: NamePattern.
        to: NamePattern of the result; by default the same name.
        order: "interleaved-to-half" or "half-to-interleaved".
        optional: The rule may match nothing.
        settings: `dim` (default 0), and `head_dim` or `heads`; `rotary_dim` if only so many rows
            at the start of each head are turned.
    """
    return rule_of(
        {"rotary": source, "to": to or source, "order": order, "optional": optional, **settings}
    )


def pad(
    source: str,
    to: str = "",
    *,
    unpadded: Number,
    padded: Number,
    dim: int = 0,
    optional: bool = False,
) -> MapRule:
    """Zeros at the end of a dim, from `unpadded` entries up to `padded`: of a vocabulary."""
    return rule_of(
        {"pad": source, "to": to or source, "unpadded": unpadded, "padded": padded, "dim": dim,
         "optional": optional}
    )  # fmt: skip


def trim(
    source: str,
    to: str = "",
    *,
    unpadded: Number,
    padded: Number,
    dim: int = 0,
    optional: bool = False,
) -> MapRule:
    """The first `unpadded` of `padded` entries of a dim; undoes `pad`, whatever the others hold."""
    undone = pad(to or source, source, unpadded=unpadded, padded=padded, dim=dim, optional=optional)
    return undone.inverse()


def tie(sources: Sequence[str], to: str, *, optional: bool = False) -> MapRule:
    """One name for tensors that are equal; their bytes are compared."""
    return rule_of({"tie": list(sources), "to": to, "optional": optional})


def untie(source: str, to: Sequence[str], *, optional: bool = False) -> MapRule:
    """A tensor under several names; undoes `tie`."""
    return rule_of({"untie": source, "to": list(to), "optional": optional})


def cast(
    source: str,
    to: str = "",
    *,
    dtype: str,
    saturate: bool = False,
    back: str | None = None,
    optional: bool = False,
) -> MapRule:
    """Another float type, rounded to nearest; too large a value is an error or saturates.

    With `back`, the type that the source must have, the rule has an inverse: the cast back.
    """
    return rule_of(
        {"cast": source, "to": to or source, "dtype": dtype, "saturate": saturate,
         "optional": optional, **({} if back is None else {"back": back})}
    )  # fmt: skip


def drop(source: str, *, recomputed: bool = False, optional: bool = False) -> MapRule:
    """Nothing. If the program that loads it recomputes it, the inverse simply has it not."""
    return rule_of({"drop": source, "recomputed": recomputed, "optional": optional})


def absent(name: str) -> MapRule:
    """What this side does not have, and the inverse drops if there is any."""
    return rule_of({"absent": name})


def rule_of(table: Mapping[str, Any], *, label: str = "rule") -> MapRule:
    """Return the rule that a table states, as in TOML.

    Raises:
        ConfigError: It states none, or one with other settings than its kind has, or one that is
            not the same for every name.
    """
    kinds = [kind for kind in KINDS if kind in table]
    if len(kinds) != 1:
        raise ConfigError(
            f"{label}: {dict(table)} states {kinds or 'no'} operation; it must be one of "
            f"{', '.join(KINDS)}"
        )
    kind = kinds[0]
    unknown = set(table) - {kind, "to", "optional", *_CONDITIONS, *KINDS[kind]}
    if unknown:
        raise ConfigError(f"{label} ({kind}) has the unknown settings {sorted(unknown)}")
    for name in table.keys() & _TYPES.keys():
        typed(table[name], _TYPES[name], place=f"{label} ({kind}): {name}")
    settings = {name: table[name] for name in KINDS[kind] if name in table}
    sources = _texts(table[kind], kind in _MANY_SOURCES, f"{label}: {kind}")
    results: list[str] = []
    if kind == "absent":
        sources, results = [], sources
    elif kind == "drop":
        if "to" in table:
            raise ConfigError(f"{label} (drop) makes nothing; leave out to")
    elif "to" in table or kind in ("transpose", "rotary", "cast", "pad", "trim"):
        to = table.get("to", table[kind])
        results = _texts(to, kind in _MANY_RESULTS, f"{label}: to")
    else:
        raise ConfigError(f"{label} ({kind}) lacks the name to which it leads: to")
    conditions = {
        name: _texts(table[name], False, f"{label}: {name}")[0]
        for name in _CONDITIONS
        if name in table
    }
    patterns = _patterns(sources + results + [*conditions.values()], settings.get("over"))
    stated = dict(zip(conditions, patterns[len(sources + results) :], strict=True))
    rule = MapRule(
        kind=kind,
        sources=patterns[: len(sources)],
        results=patterns[len(sources) : len(sources + results)],
        settings=settings,
        optional=table.get("optional", kind == "absent"),
        where=stated.get("where"),
        where_to=stated.get("where_to"),
        label=label,
    )
    _check(rule)
    return rule


def typed(value: object, kind: Any, *, place: str) -> Any:
    """Return a value of TOML as a type that msgspec knows; ConfigError if it is of another."""
    try:
        return convert_as(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None


def _texts(value: Any, many: bool, place: str) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts) or not texts:
        raise ConfigError(f"{place} is {value!r}, not the pattern of a name")
    if isinstance(value, list) != many:
        raise ConfigError(f"{place} must be {'a list of patterns' if many else 'one pattern'}")
    return texts


def _patterns(texts: Sequence[str], over: str | None) -> tuple[NamePattern, ...]:
    """Return patterns in which a wildcard has one kind, stated in any of them."""
    kinds = {} if over is None else {over: "int"}
    for text in texts:
        stated = NamePattern(text).kinds
        kinds |= {name: kind for name, kind in stated.items() if kind != "name"}
    return tuple(NamePattern(text, kinds) for text in texts)


def _check(rule: MapRule) -> None:
    """Refuse wildcards that are not on both sides, and settings without sense."""
    over = {rule.over} if rule.over else set()
    if rule.kind in ("stack", "unstack"):
        if not over:
            raise ConfigError(f"{rule}: set over to the wildcard that it runs over")
        many, one = (
            rule.sources + rule.results if rule.kind == "stack" else rule.results + rule.sources
        )
        if not over <= many.wildcards or over & one.wildcards:
            raise ConfigError(
                f"{rule}: the wildcard {rule.over!r} must be in the pattern of the many tensors, "
                f"and not in that of the one"
            )
    sides = {frozenset(p.wildcards - over) for p in (*rule.sources, *rule.results)}
    if len(sides) > 1:
        raise ConfigError(f"{rule}: all its patterns must have the same wildcards")
    for condition in (rule.where, rule.where_to):
        if condition is not None and not all(condition.wildcards <= side for side in sides):
            raise ConfigError(f"{rule}: {condition!r} has wildcards that its names do not have")
    settings = rule.settings
    if rule.kind == "rotary":
        if settings.get("order") not in ORDERS:
            raise ConfigError(f"{rule}: order must be one of {', '.join(ORDERS)}")
        if ("heads" in settings) == ("head_dim" in settings):
            raise ConfigError(f"{rule}: set one of heads and head_dim")
    if rule.kind in ("pad", "trim") and not {"unpadded", "padded"} <= set(settings):
        raise ConfigError(f"{rule}: set unpadded and padded, the sizes of the dim")
    if rule.kind == "cast":
        for name in ("dtype", "back"):
            if (name == "dtype" or name in settings) and settings.get(name) not in FLOATS:
                raise ConfigError(f"{rule}: {name} must be one of {' '.join(FLOATS)}")
    if rule.kind in ("join", "split"):
        count = max(len(rule.sources), len(rule.results))
        if len(settings.get("shares", [1] * count)) != count:
            raise ConfigError(f"{rule}: shares must be {count} numbers, one for each tensor")

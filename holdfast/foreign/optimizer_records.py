"""Optimizer state by parameter, which goes where its parameter goes.

State that has an element for each element of the parameter is made by the same rule. A value of the
whole parameter (a step) must be equal for parameters that are joined. Any other state can only be
renamed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.errors import MismatchError
from holdfast.foreign.catalog import OpenFiles
from holdfast.foreign.matching import RuleUse, require_equal
from holdfast.foreign.rules import MapRule
from holdfast.foreign.state_tree import Held, Item, TreeTensors
from holdfast.foreign.tensor_expressions import Expression
from holdfast.foreign.variables import Variables
from holdfast.format.values import is_container, is_plain_dict, node_bytes

Entry = tuple[str, ...]
"""Where an item is in the optimizer's tree, without the name: ("state", "exp_avg"), ("main",)."""
Record = dict[Entry, Item]
"""What the tree has of one parameter."""
Shapes = Mapping[str, tuple[int, ...]]

_TABLES = ("state", "parameters")
"""Members of the tree that have a dict for each parameter."""
_SINGLES = ("main", "membership")
"""Members that have one node for each parameter."""
_SHAPE: Entry = ("parameters", "shape")
_ORDER: Entry = ("parameters", "order")
"""Of the memory of the state's tensors; it has no meaning for tensors that are made of others."""


class OptimizerRecords:
    """The state of one optimizer.

    Args:
        tree: Its part of the state; Holdfast's form of an optimizer.
        part: Its name.
        tensors: Of the catalog.
        files: For values that must be compared.

    Raises:
        MismatchError: The part does not have this form.
    """

    def __init__(self, tree: Any, part: str, tensors: TreeTensors, files: OpenFiles) -> None:
        if not is_plain_dict(tree) or not is_plain_dict(tree.get("state")) or "inner" in tree:
            raise MismatchError(
                f"part {part!r} is not the state of one optimizer by name of parameter, so that a "
                f"map cannot take it along; set optimizer = false and leave the part out"
            )
        self._tree = tree
        self._part = part
        self._files = files
        self._records: dict[str, Record] = {}
        for member in _TABLES:
            for name, entries in self._member(member).items():
                record = self._records.setdefault(name, {})
                if is_plain_dict(entries) and entries:
                    for entry, node in entries.items():
                        record[member, entry] = tensors.item(node)
                else:
                    record[(member,)] = tensors.item(entries)
        for member in _SINGLES:
            for name, node in self._member(member).items():
                self._records.setdefault(name, {})[(member,)] = tensors.item(node)

    def _member(self, name: str) -> dict[str, Any]:
        member = self._tree.get(name, {})
        if not is_plain_dict(member):
            raise MismatchError(f"part {self._part!r}: {name} is not a dict by name of parameter")
        return member

    def untouched(self) -> list[Any]:
        """Return the nodes that are moved as they are, with what they refer to."""
        nodes = [node for name, node in self._tree.items() if name not in (*_TABLES, *_SINGLES)]
        items = (item for record in self._records.values() for item in record.values())
        return nodes + [item.node for item in items if isinstance(item, Held)]

    @property
    def names(self) -> list[str]:
        """The parameters that there is state of."""
        return list(self._records)

    def apply(
        self,
        uses: Sequence[RuleUse],
        before: Shapes,
        after: Shapes,
        variables: Variables,
        *,
        refuse_others: bool,
    ) -> None:
        """Take the state along with the parameters.

        Args:
            uses: What happened to the parameters.
            before: Their shapes before, by name.
            after: Their shapes now.
            variables: Of the map.
            refuse_others: State of names that no use is about is an error; else it is kept.

        Raises:
            MismatchError: The state cannot follow: a part of the joined parameters has none, values
                that must be equal differ, or a tensor of another shape than its parameter.
        """
        result: dict[str, Record] = {}
        taken: set[str] = set()
        for use in uses:
            taken.update(use.sources)
            if any(name in self._records for name in use.sources):
                made = self._made(use, before, after, variables)
                result.update({name: record for name, record in made.items() if record})
        others = {name: record for name, record in self._records.items() if name not in taken}
        if others and refuse_others:
            raise MismatchError(
                f"part {self._part!r} has state of {', '.join(list(others)[:8])}, which no rule "
                f"is about: the model does not have these names"
            )
        for name, record in others.items():
            if name in result:
                raise MismatchError(f"part {self._part!r} would have the state of {name!r} twice")
            result[name] = record
        self._records = result

    def _made(
        self, use: RuleUse, before: Shapes, after: Shapes, variables: Variables
    ) -> dict[str, Record]:
        rule = use.rule
        if rule is None or rule.kind in ("rename", "cast"):
            return {use.results[0]: self._records[use.sources[0]]}
        if rule.kind == "drop":
            return {}
        records = [self._records.get(name, {}) for name in use.sources]
        if rule.kind == "untie":
            return {use.results[0]: records[0]}
        if rule.kind == "tie":
            return {use.results[0]: self._tied(rule, use, records)}
        self._require_same_entries(rule, use, records)
        made: dict[str, Record] = {name: {} for name in use.results}
        for entry in records[0]:
            if entry == _ORDER:
                continue
            if entry == _SHAPE:
                for name in use.results:
                    made[name][entry] = Held(list(after[name]))
                continue
            items = [record[entry] for record in records]
            values = self._items(rule, use, entry, items, before, variables)
            for name, value in zip(use.results, values, strict=True):
                made[name][entry] = value
        return made

    def _tied(self, rule: MapRule, use: RuleUse, records: Sequence[Record]) -> Record:
        """Return the state of tied parameters, of which usually one has any; equal if several."""
        result: Record = {}
        for record in records:
            for entry, item in record.items():
                if entry in result:
                    self._require_equal(rule, use, entry, [result[entry], item])
                else:
                    result[entry] = item
        return result

    def _require_same_entries(self, rule: MapRule, use: RuleUse, records: Sequence[Record]) -> None:
        first = set(records[0]) - {_ORDER}
        for name, record in zip(use.sources[1:], records[1:], strict=True):
            differing = first ^ (set(record) - {_ORDER})
            if differing:
                entries = ", ".join(sorted(".".join(entry) for entry in differing))
                raise MismatchError(
                    f"{rule}: part {self._part!r} has {entries} of one of {use.sources[0]} and "
                    f"{name}, and not of the other: the state of both is needed"
                )

    def _items(
        self, rule: MapRule, use: RuleUse, entry: Entry, items: Sequence[Item], before: Shapes,
        variables: Variables,
    ) -> list[Item]:  # fmt: skip
        """Return one entry of the state for each result."""
        shapes = [before.get(name) for name in use.sources]
        tensors = [item for item in items if isinstance(item, Expression)]
        is_elementwise = [tensor.shape for tensor in tensors] == shapes
        if is_elementwise and () not in shapes:
            return list(rule.transform(tensors, variables, use.sources))
        if not all(map(_is_of_the_whole, items)) or () in shapes:
            raise MismatchError(
                f"{rule}: part {self._part!r}: {'.'.join(entry)} of {use.sources[0]} does not "
                f"have an element for each one of the parameter, so that it can only be renamed"
            )
        self._require_equal(rule, use, entry, items)
        return [copy.copy(items[0]) for _ in use.results]

    def _require_equal(
        self, rule: MapRule, use: RuleUse, entry: Entry, items: Sequence[Item]
    ) -> None:
        """Raise MismatchError unless all items are equal."""
        place = f"{rule}: part {self._part!r}, {'.'.join(entry)}"
        tensors = [item for item in items if isinstance(item, Expression)]
        nodes = [item.node for item in items if isinstance(item, Held)]
        forms = {(each.dtype, each.shape) for each in tensors}
        if (tensors and nodes) or len(forms) > 1 or len({node_bytes(n) for n in nodes}) > 1:
            raise MismatchError(f"{place}: it must be equal for {', '.join(use.sources)}")
        if tensors:
            names = use.sources if len(use.sources) == len(tensors) else ["it"] * len(tensors)
            require_equal(tensors, names, self._files, place=place)

    def tree(self, node_of: Callable[[Item, str], Any]) -> dict[str, Any]:
        """Return the tree of the state, with nodes that `node_of` makes of items and their keys."""
        tree = dict(self._tree)
        for member in (*_TABLES, *_SINGLES):
            if member in tree:
                tree[member] = {}
        for name, record in self._records.items():
            for entry, item in record.items():
                member, *inner = entry
                path = ".".join((self._part, member, name, *inner))
                if inner:
                    tree[member].setdefault(name, {})[inner[0]] = node_of(item, path)
                else:
                    tree[member][name] = node_of(item, path)
        return tree


def _is_of_the_whole(item: Item) -> bool:
    """Return True for a value of a whole parameter: one element, a plain value, nothing."""
    if isinstance(item, Expression):
        return item.shape == ()
    return not is_container(item.node) or item.node == {}

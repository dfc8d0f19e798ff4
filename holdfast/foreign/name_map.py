"""Name maps: one catalog into another, renamed, split, joined, permuted, cast, by rules.

A map is a list of stages, each a list of rules. In a stage every name is taken by one rule, and the
next stage sees the names that it makes. The same rules are applied to the state that an optimizer
keeps of the parameters. Nothing is read, but for values that must be equal: the result is a catalog
whose tensors are ranges of the same files, or are computed when they are read.

    [[rule]]
    join = ["layers.{i:int}.mlp.gate.weight", "layers.{i:int}.mlp.up.weight"]
    to = "layers.{i}.mlp.linear_fc1.weight"
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.errors import ConfigError, MismatchError
from holdfast.foreign.catalog import (
    Catalog,
    CatalogTensor,
    OpenFiles,
    free_key,
    require_tilings,
)
from holdfast.foreign.computed_chunks import chunks_of
from holdfast.foreign.matching import RuleUse, not_undone, require_equal, uses_of
from holdfast.foreign.optimizer_records import OptimizerRecords
from holdfast.foreign.rules import MapRule, rule_of, typed
from holdfast.foreign.state_tree import Held, Item, TreeTensors, leaves_of
from holdfast.foreign.tensor_expressions import Expression
from holdfast.foreign.variables import Value, Variables
from holdfast.format.manifest import MAX_MANIFEST_NBYTES
from holdfast.format.values import fill_implied_keys, is_plain_dict, tensor_keys

Unmatched = Literal["error", "keep"]


@dataclass(frozen=True, slots=True)
class MapChange:
    """What a rule has done: its kind and itself in words, the names before and after."""

    kind: str
    rule: str
    sources: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(slots=True)
class MapReport:
    """What a map has done, in the order of its stages. A name that no rule took is in `kept`.

    `not_undone` has a sentence for each stage that the inverse of the map, which has one, would not
    undo with these names.
    """

    changes: list[MapChange] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    not_undone: list[str] = field(default_factory=list)
    optimizer_parameters: int = 0
    """Parameters whose optimizer state went along."""

    def of_kind(self, kind: str) -> list[MapChange]:
        """Return the changes of one kind of rule: "rename", "join", "drop", …"""
        return [change for change in self.changes if change.kind == kind]

    def lines(self) -> list[str]:
        """Return the report as text, one line for each change."""
        lines = [
            f"{each.kind}: {', '.join(each.sources)} -> {', '.join(each.results) or 'nothing'}"
            for each in self.changes
        ]
        lines += [f"kept: {name}" for name in self.kept]
        lines += self.not_undone
        if self.optimizer_parameters:
            lines.append(f"optimizer state of {self.optimizer_parameters} parameters went along")
        return lines


@dataclass(frozen=True, slots=True)
class MappedCatalog:
    """A catalog that a map has made, and what it did."""

    catalog: Catalog
    report: MapReport


@dataclass(frozen=True, slots=True)
class MapStage:
    """Rules that are applied together; `unmatched` is what happens to other names."""

    rules: tuple[MapRule, ...]
    unmatched: Unmatched = "error"


class NameMap:
    """A description of how names and tensors of one program become those of another.

    Args:
        rules: Applied together, as one stage; `then` adds stages.
        unmatched: What happens to a name that no rule takes: "error", or "keep" it.
        variables: Whole numbers that rules use, by name: a value, an expression, a list of
            expressions of which the first counts whose tensors there are, or None: to be passed to
            `apply`.
        part: The part of the state whose names are mapped.
        optimizer: The parts with optimizer state of the same parameters, which goes along, as far
            as the state has them; True: the part "optimizer"; False: none.
        name: For messages.

    Raises:
        ConfigError: A setting is none of the above.
    """

    def __init__(
        self,
        rules: Sequence[MapRule],
        *,
        unmatched: Unmatched = "error",
        variables: Mapping[str, Value] | None = None,
        part: str = "model",
        optimizer: bool | str | Sequence[str] = True,
        name: str = "name map",
    ) -> None:
        labelled = [
            replace(rule, label=f"rule {i}") if rule.label == "rule" else rule
            for i, rule in enumerate(rules, 1)
        ]
        if unmatched not in ("error", "keep"):
            raise ConfigError(f"{name}: unmatched is {unmatched!r}; set it to 'error' or 'keep'")
        self.stages: tuple[MapStage, ...] = (MapStage(tuple(labelled), unmatched),)
        self.variables: dict[str, Value] = dict(variables or {})
        self.part = part
        self.name = name
        if isinstance(optimizer, bool):
            self.optimizers: tuple[str, ...] = ("optimizer",) if optimizer else ()
        else:
            self.optimizers = (optimizer,) if isinstance(optimizer, str) else tuple(optimizer)

    @classmethod
    def from_toml(cls, source: str | Path, *, name: str = "name map") -> NameMap:
        """Return the map that a TOML text or file states.

        Args:
            source: A path, or a text with at least one line break.
            name: Of a text, for messages.

        Raises:
            ConfigError: The file cannot be read, or does not state a map.
        """
        if isinstance(source, str) and "\n" in source:
            text = source
        else:
            name = Path(source).stem
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"name map {str(source)!r} cannot be read: {error}") from None
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name}: this is not TOML: {error}") from None
        return _map_of(table, name)

    def then(self, other: NameMap) -> NameMap:
        """Return the map that applies this one, and the other to what it makes.

        Sizes in variables of both are those of the tensors that the whole map is applied to.
        """
        if (other.part, other.optimizers) != (self.part, self.optimizers):
            raise ConfigError(f"{self.name} and {other.name} are of different parts")
        differing = {
            name for name, value in other.variables.items()
            if self.variables.get(name, value) != value
        }  # fmt: skip
        if differing:
            raise ConfigError(
                f"{self.name} and {other.name} state different values of {sorted(differing)}"
            )
        return self._with(
            self.stages + other.stages, self.variables | other.variables,
            f"{self.name}, then {other.name}",
        )  # fmt: skip

    def given(self, **variables: int) -> NameMap:
        """Return the map with values for its variables; ConfigError for one that it has not."""
        unknown = sorted(set(variables) - set(self.variables))
        if unknown:
            raise ConfigError(
                f"{self.name} has no variables {unknown}; it has {sorted(self.variables)}"
            )
        return self._with(self.stages, {**self.variables, **variables}, self.name)

    def inverse(self) -> NameMap:
        """Return the map that undoes this one.

        Raises:
            ConfigError: A rule cannot be undone: a drop, or a cast that does not state the type to
                cast back to.
        """
        stages = []
        for stage in reversed(self.stages):
            rules = tuple(rule.inverse() for rule in stage.rules)
            stages.append(MapStage(rules, stage.unmatched))
        return self._with(tuple(stages), self.variables, f"inverse of {self.name}")

    @property
    def has_inverse(self) -> bool:
        """Return True if `inverse` returns a map."""
        try:
            self.inverse()
        except ConfigError:
            return False
        return True

    def _with(
        self, stages: tuple[MapStage, ...], variables: Mapping[str, Value], name: str
    ) -> NameMap:
        result = NameMap(
            (), variables=variables, part=self.part, optimizer=self.optimizers, name=name
        )
        result.stages = stages
        return result

    def apply(
        self, catalog: Catalog, *, variables: Mapping[str, int] | None = None
    ) -> MappedCatalog:
        """Return the mapped catalog, and a report.

        Args:
            catalog: Any catalog with the part.
            variables: Values for variables of the map, in place of those that it states.

        Raises:
            MismatchError: A rule matches nothing, no rule matches a name, some of the tensors of a
                rule are missing, or shapes, types or values do not fit.
            ConfigError: Two rules take or make one name; a variable is unknown or has no value.
            CorruptionError: The chunks of a tensor do not cover each of its elements once.
            StorageError: A file cannot be read, where values must be compared.

        Cost: linear in names times rules, and in chunks. Of tensors only those are read that are
        tied, and optimizer state of one element per parameter.
        """
        require_tilings(catalog)
        with OpenFiles(catalog.storage) as files:
            return _Application(self.given(**(variables or {})), catalog, files).run()

    def describe(self) -> str:
        """Return the map as text: maps of equal text do the same to a catalog."""
        stages = [
            [stage.unmatched, [[str(r), repr(r.where_to), dict(r.settings)] for r in stage.rules]]
            for stage in self.stages
        ]
        return json.dumps([self.part, self.optimizers, self.variables, stages])


class _Stage(msgspec.Struct, forbid_unknown_fields=True):
    """A [[stage]] of TOML."""

    rule: list[dict[str, Any]]
    name: str = ""
    unmatched: Unmatched | None = None


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """A name map as TOML states it."""

    rule: list[dict[str, Any]] = []
    stage: list[_Stage] = []
    name: str | None = None
    description: str = ""
    part: str = "model"
    optimizer: bool | str | list[str] = True
    unmatched: Unmatched = "error"
    variables: dict[str, Any] = {}


def _map_of(table: Mapping[str, Any], name: str) -> NameMap:
    """Return the map that a table of TOML states."""
    stated: _Table = typed(table, _Table, place=name)
    if bool(stated.rule) == bool(stated.stage):
        raise ConfigError(f"{name}: a name map has either [[rule]] or [[stage]]")
    name = stated.name or name
    variables = {
        key: typed(value, int | str | list[int | str], place=f"{name}: variable {key!r}")
        for key, value in stated.variables.items()
    }
    result: NameMap | None = None
    count = 0
    for stage in stated.stage or [_Stage(stated.rule)]:
        rules = [
            rule_of(rule, label=f"{name}: rule {number}")
            for number, rule in enumerate(stage.rule, count + 1)
        ]
        count += len(rules)
        one = NameMap(
            rules,
            unmatched=stage.unmatched or stated.unmatched,
            # An empty text stands for a value that the caller must pass.
            variables={key: None if value == "" else value for key, value in variables.items()},
            part=stated.part,
            optimizer=stated.optimizer,
            name=name,
        )
        result = one if result is None else result.then(one)
    assert result is not None
    result.name = name
    return result


class _Application:
    """One application of a map to a catalog."""

    def __init__(self, name_map: NameMap, catalog: Catalog, files: OpenFiles) -> None:
        self._map = name_map
        self._catalog = catalog
        self._files = files
        self._report = MapReport()
        # A copy in which every tensor names its key: nodes get other paths.
        self._parts: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(catalog.parts))
        fill_implied_keys(self._parts, limit=MAX_MANIFEST_NBYTES)
        part = self._parts.get(name_map.part)
        if not is_plain_dict(part):
            raise MismatchError(
                f"{catalog.label}: it has no part {name_map.part!r} that is a dict of names; its "
                f"parts are {', '.join(self._parts) or 'none'}"
            )
        self._tensors = TreeTensors(catalog)
        self._items: dict[str, Item] = leaves_of(part, self._tensors)
        self._optimizers = {
            name: OptimizerRecords(self._parts[name], name, self._tensors, files)
            for name in name_map.optimizers
            if name in self._parts
        }
        self._variables = Variables(name_map.variables, _shapes(self._items))

    def run(self) -> MappedCatalog:
        """Apply all stages."""
        for stage in self._map.stages:
            self._apply_stage(stage)
        kept = self._keys_elsewhere()
        tensors = {
            key: tensor
            for key, tensor in self._catalog.tensors.items()
            if key in kept or not self._tensors.is_taken(key)
        }
        parts = dict(self._parts)
        emitter = _Emitter(tensors, self._tensors, kept)
        part = self._map.part
        parts[part] = {
            name: emitter.node(item, f"{part}.{name}") for name, item in self._items.items()
        }
        for name, records in self._optimizers.items():
            parts[name] = records.tree(emitter.node)
            self._report.optimizer_parameters += len(records.names)
        versions = self._catalog.versions  # of modules by the names that they had
        dropped = [
            f"{change.sources[0]} was dropped by {change.rule}"
            for change in self._report.of_kind("drop")
        ]
        catalog = replace(
            self._catalog,
            identity=self._catalog.identity + self._map.describe().encode(),
            tensors=tensors,
            parts=parts,
            left_out=[
                *self._catalog.left_out,
                *dropped,
                *self._report.not_undone,
                *self._catalog.lost_versions([part]),
            ],
            versions=None if versions is None else {n: versions[n] for n in versions if n != part},
        )
        return MappedCatalog(catalog, self._report)

    def _keys_elsewhere(self) -> set[str]:
        """Return the keys of the tensors that nodes refer to which the map does not touch."""
        mapped = {self._map.part, *self._optimizers}
        nodes = [node for name, node in self._parts.items() if name not in mapped]
        nodes += [item.node for item in self._items.values() if isinstance(item, Held)]
        for records in self._optimizers.values():
            nodes += records.untouched()
        return {key for node in nodes for key in tensor_keys(node)}

    def _apply_stage(self, stage: MapStage) -> None:
        before = self._items
        uses = uses_of(stage.rules, _names_and_shapes(before), unmatched=stage.unmatched)
        after: dict[str, Item] = {}
        for use in uses:
            made = self._make(use, [before[name] for name in use.sources])
            for name, item in zip(use.results, made, strict=True):
                after[name] = item
            self._note(use)
        self._items = after
        shapes = _names_and_shapes(after)
        odd = not_undone(stage.rules, uses, shapes, unmatched=stage.unmatched)
        if odd and self._map.has_inverse:
            self._report.not_undone.append(f"{self._map.name} loses the names that were: {odd}")
        for records in self._optimizers.values():
            records.apply(
                uses, _shapes(before), _shapes(after), self._variables,
                refuse_others=stage.unmatched == "error",
            )  # fmt: skip

    def _make(self, use: RuleUse, items: Sequence[Item]) -> list[Item]:
        rule = use.rule
        if rule is None or rule.kind == "rename":
            return list(items)
        if rule.kind == "drop":
            return []
        tensors = [item for item in items if isinstance(item, Expression)]
        if len(tensors) != len(items):
            raise MismatchError(
                f"{rule}: {', '.join(use.sources)}: not all are tensors; values can be renamed or "
                f"dropped, nothing else"
            )
        made = rule.transform(tensors, self._variables, use.sources)
        if rule.kind == "tie":
            require_equal(tensors, use.sources, self._files, place=str(rule))
        return list(made)

    def _note(self, use: RuleUse) -> None:
        if use.rule is None:
            self._report.kept += use.sources
        else:
            change = MapChange(use.rule.kind, str(use.rule), use.sources, use.results)
            self._report.changes.append(change)


class _Emitter:
    """Makes the tensors of the result, and the nodes that name them."""

    def __init__(
        self, tensors: dict[str, CatalogTensor], sources: TreeTensors, kept: set[str]
    ) -> None:
        self._tensors = tensors
        self._sources = sources
        # A tensor that is referred to elsewhere, too, keeps its key, and is not there twice.
        self._keys = sources.keys_of(kept)

    def node(self, item: Item, key: str) -> Any:
        """Return the node of an item; a tensor is added under the key, if it has none yet.

        Another part may have the tensor that this one was made of, under the same key.
        """
        if isinstance(item, Held):
            return item.node
        known = self._keys.get(id(item))
        if known is None:
            self._keys[id(item)] = known = free_key(key, self._tensors)
            chunks = self._sources.chunks(item)
            self._tensors[known] = CatalogTensor(
                key=known,
                dtype=item.dtype,
                shape=item.shape,
                chunks=chunks_of(item) if chunks is None else chunks,
            )
        return self._sources.node(item, known)


def _names_and_shapes(items: Mapping[str, Item]) -> dict[str, tuple[int, ...] | None]:
    return {
        name: item.shape if isinstance(item, Expression) else None for name, item in items.items()
    }


def _shapes(items: Mapping[str, Item]) -> dict[str, tuple[int, ...]]:
    return {name: item.shape for name, item in items.items() if isinstance(item, Expression)}

"""Merge the nodes that several ranks supply for one value.

What several ranks supply must be equal, with two exceptions: `per_rank` maps are joined by their
labels, and a mapping that a rank declares a union is joined by its members. Between the ranks and
the commit a union is a node, `{"$": "union", "v": mapping}`; it never reaches a manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from holdfast.errors import CorruptionError, HoldfastError, PlanError, some_of
from holdfast.format.values.codecs import decode_tree
from holdfast.format.values.value_nodes import (
    MAPPINGS,
    METADATA_MEMBER,
    SEQUENCES,
    TAG,
    UNION,
    Node,
    is_plain_dict,
    join_path,
    node_bytes,
    pairs_of,
    shorten,
)

Named = Sequence[tuple[str, Node]]
_Groups = Sequence[tuple[tuple[str, ...], Any]]
"""Nodes that differ, each with the labels of the ranks that supply it."""

_MAX_NAMED = 4
_ADVICE = (
    "make it equal on all ranks, mark it PerRank if each rank has its own, or wrap the dict that "
    "holds it in Union(...) if its members are spread over the ranks"
)


def merge_nodes(named: Named, *, path: str) -> Node:
    """Merge (label, node) pairs into one node; a label is such as "rank 3".

    Members of unions and `per_rank` maps are joined; everything else must be equal in type and
    value. Dicts, Counters and defaultdicts are equal in any order of their members, and the order
    of the first label is kept; the order of an OrderedDict is part of its value.

    Raises:
        PlanError: Nodes differ. The message names the path, the labels, and what each has or lacks.

    Cost: one comparison of bytes for ranks that supply equal nodes.
    """
    if not named:
        raise PlanError(f"{path}: no rank supplies a value")
    merged: Node = _merge([((label,), node) for label, node in named], path)
    return merged


def without_unions(node: Any) -> Any:
    """Return a node with its unions unwrapped; the node itself if it has none."""
    if _UNION_BYTES not in node_bytes(node):
        return node
    return _unwrapped(node)


_UNION_BYTES = node_bytes({TAG: UNION})[:-1]


def _unwrapped(node: Any) -> Any:
    if isinstance(node, list):
        return [_unwrapped(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get(TAG) == UNION:
        return _unwrapped(node["v"])
    return {name: _unwrapped(item) for name, item in node.items()}


def _merge(supplied: _Groups, path: str) -> Any:
    groups = _distinct(supplied)
    if len(groups) == 1:
        return without_unions(groups[0][1])
    kinds = {_kind(node) for _, node in groups}
    if len(kinds) != 1:
        _raise_conflict(groups, path)
    kind = kinds.pop()
    if kind == UNION:
        return _merge_union(groups, path)
    if kind == "list":
        return _merge_lists(groups, path)
    if kind in MAPPINGS:
        return _merge_mappings(groups, kind, path)
    # Everything but the payload "v" says what kind of value it is, and must be the same.
    if kind is None or len({_frame(node) for _, node in groups}) != 1:
        _raise_conflict(groups, path)
    first: dict[str, Any] = groups[0][1]
    payloads = [(labels, node.get("v")) for labels, node in groups]
    if kind == "per_rank" and all(isinstance(table, dict) for _, table in payloads):
        return {**first, "v": _merge_members(payloads, path, "[{}]")}
    if (
        kind == "dataclass"
        and all(isinstance(table, dict) for _, table in payloads)
        and len({frozenset(table) for _, table in payloads}) == 1
    ):
        return {**first, "v": _merge_members(payloads, path, ".{}")}
    if kind in SEQUENCES and all(isinstance(items, list) for _, items in payloads):
        return {**first, "v": _merge_lists(payloads, path)}
    if kind != "codec":
        _raise_conflict(groups, path)
    return {**first, "v": _merge(payloads, path)}


def _distinct(supplied: _Groups) -> _Groups:
    """Return each distinct node once, with all its labels, in the order of the first."""
    labels: dict[bytes, tuple[str, ...]] = {}
    nodes: dict[bytes, Any] = {}
    names: dict[int, bytes] = {}  # ranks with equal values share one object
    for ranks, node in supplied:
        name = names.get(id(node))
        if name is None:
            name = names[id(node)] = node_bytes(node)
        labels[name] = labels.get(name, ()) + ranks
        nodes.setdefault(name, node)
    return [(labels[name], node) for name, node in nodes.items()]


def _kind(node: Any) -> str | None:
    """Return tag, "list" or "dict"; None for a node that must be equal as it is."""
    if isinstance(node, list):
        return "list"
    if isinstance(node, dict):
        tag = node.get(TAG, "dict")
        return tag if isinstance(tag, str) else None
    return None


def _frame(node: Any, *, but_for: str = "") -> bytes:
    return node_bytes({name: item for name, item in node.items() if name not in ("v", but_for)})


def _merge_members(groups: _Groups, path: str, place: str) -> dict[str, Any]:
    supplied: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
    for labels, table in groups:
        for key, node in table.items():
            supplied.setdefault(key, []).append((labels, node))
    return {
        key: _merge(nodes, (path + place.format(key)).removeprefix("."))
        for key, nodes in supplied.items()
    }


def _merge_lists(groups: _Groups, path: str) -> list[Any]:
    lengths = {len(node) for _, node in groups}
    if len(lengths) != 1:
        (one, here), (other, there) = groups[0], groups[1]
        raise PlanError(
            f"{path}: ranks supply sequences of different lengths for one value: {_ranks(one)} "
            f"{_has(one)} {len(here)} items, {_ranks(other)} {len(there)}; {_ADVICE}"
        )
    return [
        _merge([(labels, node[i]) for labels, node in groups], join_path(path, i))
        for i in range(lengths.pop())
    ]


def _merge_union(groups: _Groups, path: str) -> Any:
    inner = [(labels, node.get("v")) for labels, node in groups]
    if not all(_kind(node) in MAPPINGS for _, node in inner) or not _is_one_kind(inner):
        _raise_conflict(groups, path)
    return _joined(inner, [(labels, _table(node, path)) for labels, node in inner], path)


def _merge_mappings(groups: _Groups, kind: str | None, path: str) -> Any:
    if not _is_one_kind(groups) or (kind == "odict" and len({_frame(n) for _, n in groups}) > 1):
        _raise_conflict(groups, path)
    tables = [(labels, _table(node, path)) for labels, node in groups]
    for labels, table in tables[1:]:
        _require_same_members(tables[0], (labels, table), path)
        if kind == "odict" and list(table) != list(tables[0][1]):
            raise PlanError(
                f"{path}: ranks supply one OrderedDict with its members in different orders: "
                f"{_ranks(tables[0][0])} {_has(tables[0][0])} {_names(tables[0][1])}, "
                f"{_ranks(labels)} {_has(labels)} {_names(table)}; {_ADVICE}"
            )
    return _joined(groups, tables, path)


def _is_one_kind(groups: _Groups) -> bool:
    """Return True if mappings are of one type; the two stored forms of a dict are one."""
    frames = (
        _PLAIN if is_plain_dict(node) else _frame(node, but_for=METADATA_MEMBER)
        for _, node in groups
    )
    return len(set(frames)) == 1


_PLAIN = node_bytes({TAG: "dict"})


def _table(node: Any, path: str) -> dict[bytes, tuple[Node, Any]]:
    """Return bytes of a key -> key and member of a mapping's node, in order."""
    try:
        return {node_bytes(key): (key, item) for key, item in pairs_of(node) or ()}
    except CorruptionError:
        text = shorten(node_bytes(node).decode())
        raise PlanError(f"{path}: {text} is not a mapping") from None


def _joined(
    groups: _Groups,
    tables: Sequence[tuple[tuple[str, ...], dict[bytes, tuple[Node, Any]]]],
    path: str,
) -> Any:
    """Join the members of all ranks in one mapping, each merged from those that have it."""
    keys: dict[bytes, Node] = {}
    supplied: dict[bytes, list[tuple[tuple[str, ...], Any]]] = {}
    for labels, table in tables:
        for name, (key, item) in table.items():
            keys.setdefault(name, key)
            supplied.setdefault(name, []).append((labels, item))
    _refuse_equal_keys(supplied, keys, path)
    merged = [
        [key, _merge(supplied[name], join_path(path, _key_name(key)))] for name, key in keys.items()
    ]
    tagged = next((node for _, node in groups if TAG in node), None)
    if tagged is None:
        return {key: item for key, item in merged if isinstance(key, str)}
    return {**tagged, "v": merged, **_joined_metadata(groups, path)}


def _joined_metadata(groups: _Groups, path: str) -> dict[str, Any]:
    """Return what modules have noted at one state dict on all ranks, each of its own members."""
    noted = [
        (labels, {TAG: UNION, "v": node[METADATA_MEMBER]})
        for labels, node in groups
        if METADATA_MEMBER in node
    ]
    return {METADATA_MEMBER: _merge(noted, join_path(path, "_metadata"))} if noted else {}


def _refuse_equal_keys(
    supplied: dict[bytes, list[tuple[tuple[str, ...], Any]]], keys: dict[bytes, Node], path: str
) -> None:
    """PlanError for keys such as 1 and True, of which one dict can hold only one."""
    seen: dict[object, bytes] = {}
    for name, key in keys.items():
        if isinstance(key, str):
            continue
        try:
            value = decode_tree(key)
            other = seen.setdefault(value, name)
        except (HoldfastError, TypeError):
            continue  # a registered type: only a reader with its codec can compare it
        if other is not name and value == value:
            raise PlanError(
                f"{path}: {_ranks(supplied[other][0][0])} has the key "
                f"{_key_name(keys[other])}, {_ranks(supplied[name][0][0])} the key "
                f"{_key_name(key)}, which are equal in Python: a dict cannot have both; use one "
                f"type of key"
            )


def _key_name(key: Node) -> str:
    return key if isinstance(key, str) else shorten(node_bytes(key).decode())


def _require_same_members(
    one: tuple[tuple[str, ...], dict[bytes, tuple[Node, Any]]],
    other: tuple[tuple[str, ...], dict[bytes, tuple[Node, Any]]],
    path: str,
) -> None:
    if one[1].keys() == other[1].keys():
        return
    clauses = []
    for (having, here), (lacking, there) in ((one, other), (other, one)):
        extra = {name: here[name] for name in here if name not in there}
        if extra:
            lacks = "lacks" if len(lacking) == 1 else "lack"
            clauses.append(
                f"{_ranks(having)} {_has(having)} {_names(extra)}, which {_ranks(lacking)} {lacks}"
            )
    raise PlanError(
        f"{path}: ranks supply different members of one mapping: {'; '.join(clauses)}; {_ADVICE}"
    )


def _names(table: dict[bytes, tuple[Node, Any]]) -> str:
    return some_of([_key_name(key) for key, _ in table.values()], most=_MAX_NAMED)


def _ranks(labels: tuple[str, ...]) -> str:
    return some_of(labels, most=_MAX_NAMED)


def _raise_conflict(groups: _Groups, path: str) -> NoReturn:
    unions = {_kind(node) == UNION for _, node in groups}
    declared = " (some ranks declare it a Union, others do not)" if len(unions) > 1 else ""
    raise PlanError(
        f"{path}: ranks supply different values for one value{declared}: "
        f"{_supplied(*groups[0])}, {_supplied(*groups[1])}; {_ADVICE}"
    )


def _supplied(labels: tuple[str, ...], node: Any) -> str:
    return f"{_ranks(labels)} {_has(labels)} {shorten(node_bytes(node).decode())}"


def _has(labels: tuple[str, ...]) -> str:
    return "has" if len(labels) == 1 else "have"

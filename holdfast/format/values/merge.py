"""One node from the nodes that several ranks supplied for the same value."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import PlanError
from holdfast.format.values.nodes import TAG, Node, join_path, node_bytes, shorten

Named = Sequence[tuple[str, Node]]

_MAPPINGS = ("dict", "odict", "counter", "defaultdict")
_SEQUENCES = ("tuple", "deque")


def merge_nodes(named: Named, *, path: str) -> Node:
    """The union of what ranks supplied: (label, node) pairs, labels such as "rank 3".

    Dicts, `per_rank` maps and fields are joined member by member, sequences of equal length item
    by item; everything else must be equal to the byte. Raises PlanError naming path, two labels
    and their values. Ranks that supply equal nodes cost one comparison of bytes.
    """
    distinct: dict[bytes, tuple[str, Node]] = {}
    for label, node in named:
        distinct.setdefault(node_bytes(node), (label, node))
    if not distinct:
        raise PlanError(f"{path}: no rank supplies it")
    nodes = list(distinct.values())
    if len(nodes) == 1:
        return nodes[0][1]
    first = nodes[0][1]
    if isinstance(first, dict):
        return _merge_objects(nodes, first, path)
    if isinstance(first, list):
        return _merge_lists(nodes, path)
    raise _conflict(nodes, path)


def _merge_objects(nodes: Named, first: dict[str, Node], path: str) -> Node:
    tag = first.get(TAG)
    objects = [(label, node) for label, node in nodes if isinstance(node, dict)]
    if len(objects) != len(nodes):
        raise _conflict(nodes, path)
    if tag is None:
        if any(TAG in node for _, node in objects):
            raise _conflict(nodes, path)
        return _merge_members(objects, path)
    # Everything but the payload "v" says what kind of value it is, and must be the same.
    kinds = {node_bytes({k: v for k, v in node.items() if k != "v"}) for _, node in objects}
    if len(kinds) != 1 or not all("v" in node for _, node in objects):
        raise _conflict(nodes, path)
    payloads: list[tuple[str, Node]] = [(label, node["v"]) for label, node in objects]
    if tag in ("per_rank", "dataclass"):
        tables = [(label, table) for label, table in payloads if isinstance(table, dict)]
        same_fields = tag == "per_rank" or len({frozenset(table) for _, table in tables}) == 1
        if len(tables) == len(payloads) and same_fields:
            if tag == "per_rank":
                return {**first, "v": _merge_members(tables, path, "[{}]")}
            return {**first, "v": _merge_members(tables, path)}
    elif tag in _MAPPINGS:
        return {**first, "v": _merge_pairs(payloads, path)}
    elif tag in _SEQUENCES:
        return {**first, "v": _merge_lists(payloads, path)}
    raise _conflict(nodes, path)


def _merge_members(
    objects: Sequence[tuple[str, dict[str, Node]]], path: str, place: str = ".{}"
) -> dict[str, Node]:
    supplied: dict[str, list[tuple[str, Node]]] = {}
    for label, table in objects:
        for key, node in table.items():
            supplied.setdefault(key, []).append((label, node))
    return {
        key: merge_nodes(v, path=(path + place.format(key)).removeprefix("."))
        for key, v in supplied.items()
    }


def _merge_pairs(payloads: Named, path: str) -> list[Node]:
    keys: dict[bytes, Node] = {}
    supplied: dict[bytes, list[tuple[str, Node]]] = {}
    for label, pairs in payloads:
        if not isinstance(pairs, list):
            raise _conflict(payloads, path)
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _conflict(payloads, path)
            name = node_bytes(pair[0])
            keys.setdefault(name, pair[0])
            supplied.setdefault(name, []).append((label, pair[1]))
    return [
        [key, merge_nodes(supplied[name], path=join_path(path, shorten(name.decode())))]
        for name, key in keys.items()
    ]


def _merge_lists(nodes: Named, path: str) -> list[Node]:
    lists = [(label, node) for label, node in nodes if isinstance(node, list)]
    if len(lists) != len(nodes) or len({len(node) for _, node in lists}) != 1:
        raise _conflict(nodes, path)
    return [
        merge_nodes([(label, node[i]) for label, node in lists], path=join_path(path, i))
        for i in range(len(lists[0][1]))
    ]


def _conflict(nodes: Named, path: str) -> PlanError:
    (one, here), (other, there) = nodes[0], nodes[1]
    return PlanError(
        f"{path}: ranks supply different values for what must be one: {one} has "
        f"{shorten(node_bytes(here).decode())}, {other} has {shorten(node_bytes(there).decode())}; "
        "make them equal, or mark the value PerRank"
    )

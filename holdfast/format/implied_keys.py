"""Keys of tensors in the tree of a manifest, left out where the place in the tree says them.

From format version 2 on, a `tensor` or `array` node has no `k` where its key is its path: the
part's name, the names of dict members and the positions in lists on the way to it, joined with
dots. Only plain dicts and lists count; below any other node every `k` is written.
"""

from __future__ import annotations

from typing import Any

from holdfast.format.values import TAG

_LEAVES = ("tensor", "array")
_KEY = "k"


def without_implied_keys(parts: dict[str, Any]) -> dict[str, Any]:
    """A tree as it is written. Cost: linear; dicts and lists are made again, leaves are shared."""
    return {name: _shrink(node, name) for name, node in parts.items()}


def _shrink(node: Any, path: str) -> Any:
    if isinstance(node, list):
        return [_shrink(item, f"{path}.{i}") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    tag = node.get(TAG)
    if tag is None:
        return {name: _shrink(item, f"{path}.{name}") for name, item in node.items()}
    if tag in _LEAVES and node.get(_KEY) == path:
        return {name: value for name, value in node.items() if name != _KEY}
    return node


class _Place:
    """A place in the tree: its last name, and the place above; the path is joined when needed."""

    __slots__ = ("above", "length", "name")

    def __init__(self, name: str, above: _Place | None) -> None:
        self.name = name
        self.above = above
        self.length: int = len(name) + (above.length + 1 if above is not None else 0)

    def path(self) -> str:
        names: list[str] = []
        place = self
        while place.above is not None:
            names.append(place.name)
            place = place.above
        return ".".join([place.name, *reversed(names)])


def fill_implied_keys(parts: dict[str, Any], *, limit: int) -> None:
    """Put every key in that was left out, in place; any depth.

    Raises ValueError when these keys would have more than `limit` characters together. Cost:
    linear in the tree and in these characters.
    """
    num_chars = 0
    waiting: list[tuple[Any, _Place]] = [
        (node, _Place(name, None)) for name, node in parts.items() if isinstance(node, dict | list)
    ]
    while waiting:
        node, place = waiting.pop()
        tag = node.get(TAG) if isinstance(node, dict) else None
        if tag is None:
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            waiting += [
                (item, _Place(str(name), place))
                for name, item in inner
                if isinstance(item, dict | list)
            ]
        elif tag in _LEAVES and _KEY not in node:
            num_chars += place.length
            if num_chars > limit:
                raise ValueError(f"the keys that its tree implies have more than {limit} letters")
            node[_KEY] = place.path()

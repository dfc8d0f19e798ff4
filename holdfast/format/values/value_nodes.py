"""Nodes of a stored tree: what kind each is, how it is made, and the one walk through all of them.

A *container* has members: a list, a dict, and what is stored as one of them with a tag. A *wrapper*
is a tag around one node: a codec's, a union. All other nodes are leaves: tensors, which are
references to keys, and plain values. Only this room knows how a tag is written; other rooms ask
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

import msgspec

from holdfast.errors import CorruptionError

Node: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"
"""What JSON can hold; see the package text."""

TAG = "$"
UNION = "union"
"""Tag of a mapping whose members are spread over ranks; removed where ranks are merged."""
MAPPINGS = ("dict", "odict", "counter", "defaultdict")
"""Tags of mappings that are stored as pairs."""
SEQUENCES = ("tuple", "deque")
SETS = ("set", "frozenset")
TENSORS = ("tensor", "array")
SCALARS = ("int", "float", "str", "bytes", "bytearray", "complex", "numpy", "enum")
_KEY = "k"
_TABLES = ("per_rank", "dataclass")
_WRAPPERS = ("codec", UNION)
_CONTAINERS = frozenset((*MAPPINGS, *SEQUENCES, *SETS, *_TABLES))


def tag_of(node: Any) -> str | None:
    """The tag of a node; None for a list, a plain dict, a plain value."""
    tag = node.get(TAG) if isinstance(node, dict) else None
    return tag if isinstance(tag, str) else None


def is_plain_dict(node: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a node is a dict with text keys, which is stored as it is."""
    return isinstance(node, dict) and TAG not in node


def is_like_a_tag(key: str) -> bool:
    """Whether a key would be read as a tag in a plain dict."""
    return key.startswith(TAG)


def is_tensor(node: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a node refers to a tensor or an array by its key."""
    return tag_of(node) in TENSORS


def is_per_rank(node: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a node is a value per coordinate."""
    return tag_of(node) == "per_rank"


def is_container(node: Any) -> TypeGuard[list[Any] | dict[str, Any]]:
    """Whether a node has members of its own, though it may be empty."""
    return isinstance(node, list) or is_plain_dict(node) or tag_of(node) in _CONTAINERS


def tensor_node(key: str, *, tag: str = "tensor") -> dict[str, Node]:
    """A reference to a tensor, or with its tag to an array."""
    return {TAG: tag, "k": key}


def leaf_node(tag: str, **attributes: Any) -> dict[str, Any]:
    """Return the node of a leaf that a caller's `on_leaf` writes and reads in its own way."""
    return {TAG: tag, **attributes}


def per_rank_node(axes: Iterable[str], values: Mapping[str, Node]) -> dict[str, Node]:
    """A value per coordinate along axes, by the coordinates' labels."""
    return {TAG: "per_rank", "axes": [*axes], "v": dict(values)}


def union_node(mapping: Node) -> dict[str, Node]:
    """A mapping whose members are spread over ranks."""
    return {TAG: UNION, "v": mapping}


def transient_node() -> dict[str, Node]:
    """The place of a value that is not stored."""
    return {TAG: "transient"}


def attributes_of(node: dict[str, Any]) -> dict[str, Any]:
    """What a tagged node states besides its payload: a codec's name, the axes of a value per rank,
    the longest that a deque may be.
    """
    return {name: item for name, item in node.items() if name not in (TAG, "v")}


def wrapped(node: Any) -> Any:
    """The node in a wrapper; the node itself if it is none."""
    while tag_of(node) in _WRAPPERS:
        node = _payload(node)
    return node


def pairs_of(node: Any) -> list[tuple[Node, Any]] | None:
    """The (key, member) pairs of a stored mapping, keys as nodes; None for anything else.

    Raises:
        CorruptionError: a malformed node; as do `items_of`, `members` and `walk`.
    """
    if is_plain_dict(node):
        return list(node.items())
    if tag_of(node) not in MAPPINGS:
        return None
    try:
        return [(key, member) for key, member in _payload(node, list)]
    except (TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint holds a malformed {tag_of(node)}: {error!r}"
        ) from error


def items_of(node: Any) -> list[Any] | None:
    """The items of a stored list, tuple or deque; None for anything else."""
    if isinstance(node, list):
        return node
    items: list[Any] | None = _payload(node, list) if tag_of(node) in SEQUENCES else None
    return items


def members(node: Any) -> list[tuple[Node, Any]]:
    """The (name, node) of each member of a container, in order; empty for any other node.

    A name is the key's node in a mapping, else a position, a coordinate's label or a field.
    """
    pairs = pairs_of(node)
    if pairs is not None:
        return pairs
    tag = tag_of(node)
    if tag in _TABLES:
        return list(_payload(node, dict).items())
    items = _payload(node, list) if tag in SETS else items_of(node)
    return [] if items is None else list(enumerate(items))


def walk(node: Any) -> Iterator[Any]:
    """A node and every node below it, an outer one before its members, in stored order.

    Any depth: trees of users may be deeper than Python's stack.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if tag_of(node) in _WRAPPERS:
            waiting.append(_payload(node))
        elif isinstance(node, list | dict):
            waiting += [member for _, member in reversed(members(node))]


def tensor_keys(node: Any) -> Iterator[str]:
    """The keys of the tensors to which a tree refers, each as often as it does."""
    return (str(each["k"]) for each in walk(node) if is_tensor(each) and "k" in each)


def count_values(node: Any) -> int:
    """The plain values of a tree: leaves that are stored and are not tensors."""
    return sum(
        not (is_container(each) or is_tensor(each))
        and tag_of(each) not in ("transient", *_WRAPPERS)
        for each in walk(node)
    )


def kind_in_words(node: Any) -> str:
    """What a stored node is, for a message."""
    tag = tag_of(node)
    if tag == "per_rank":
        return f"a value per {','.join(node['axes'])}"
    if isinstance(node, list):
        return f"a list of {len(node)}"
    name = tag or ("mapping" if isinstance(node, dict) else type(node).__name__)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _payload(node: dict[str, Any], kind: type = object) -> Any:
    """What is in a tagged node."""
    payload = node.get("v")
    if "v" not in node or not isinstance(payload, kind):
        raise CorruptionError(f"the checkpoint holds a malformed {tag_of(node)}")
    return payload


def without_implied_keys(parts: dict[str, Any]) -> dict[str, Any]:
    """A tree as it is written.

    Cost: linear; dicts and lists are copied, leaves are shared.
    """
    return {name: _shrink(node, name) for name, node in parts.items()}


def _shrink(node: Any, path: str) -> Any:
    """A node without the keys that its path implies."""
    if isinstance(node, list):
        return [_shrink(item, f"{path}.{i}") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    tag = node.get(TAG)
    if tag is None:
        return {name: _shrink(item, f"{path}.{name}") for name, item in node.items()}
    if tag in TENSORS and node.get(_KEY) == path:
        node = node.copy()
        del node[_KEY]
    return node


class _TreePath:
    """A path in the tree: its last name, and the path above; joined only when needed."""

    __slots__ = ("above", "length", "name")

    def __init__(self, name: str, above: _TreePath | None) -> None:
        self.name = name
        self.above = above
        self.length: int = len(name) + (above.length + 1 if above is not None else 0)

    def path(self) -> str:
        """All names, joined."""
        names: list[str] = []
        tree_path = self
        while tree_path.above is not None:
            names.append(tree_path.name)
            tree_path = tree_path.above
        return ".".join([tree_path.name, *reversed(names)])


def fill_implied_keys(parts: dict[str, Any], *, limit: int) -> None:
    """Put every key in that was left out, in place; any depth.

    Raises:
        ValueError: these keys would have more than `limit` characters together.

    Cost: linear in the tree and in these characters.
    """
    num_chars = 0
    waiting: list[tuple[Any, _TreePath]] = [
        (node, _TreePath(name, None))
        for name, node in parts.items()
        if isinstance(node, dict | list)
    ]
    while waiting:
        node, tree_path = waiting.pop()
        tag = node.get(TAG) if isinstance(node, dict) else None
        if tag is None:
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            path = ""
            for name, item in inner:
                if type(item) is dict and item.get(TAG) in TENSORS:
                    if _KEY in item:
                        continue
                    num_chars += tree_path.length + len(str(name)) + 1
                    _refuse_long_keys(num_chars, limit)
                    # Joined once for all leaves of a node: that is where most of them are.
                    path = path or tree_path.path()
                    item[_KEY] = f"{path}.{name}"
                elif isinstance(item, dict | list):
                    waiting.append((item, _TreePath(str(name), tree_path)))
        elif tag in TENSORS and _KEY not in node:
            num_chars += tree_path.length
            _refuse_long_keys(num_chars, limit)
            node[_KEY] = tree_path.path()


def _refuse_long_keys(num_chars: int, limit: int) -> None:
    """ValueError where the keys that a tree implies are too long together."""
    if num_chars > limit:
        raise ValueError(f"the keys that its tree implies have more than {limit} letters")


def join_path(path: str, name: object) -> str:
    """The path of a child: names are joined with dots."""
    return f"{path}.{name}" if path else str(name)


def node_bytes(node: Node) -> bytes:
    """A node as compact JSON: equal bytes mean equal types, values and key order."""
    return msgspec.json.encode(node)


def shorten(value: object, *, limit: int = 80) -> str:
    """A value for a message, cut in the middle when it is long."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # the repr of a foreign type, or of an integer of thousands of digits
        text = f"<{type(value).__qualname__}>"
    half = limit // 2 - 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def key_name(key: object) -> str:
    """A dict key as a part of a path: text as it is, anything else as Python writes it.

    A type whose text is its address in memory, which differs between ranks, gives its name.
    """
    if type(key) is str:
        return key
    text = shorten(key)
    return f"<{type(key).__qualname__}>" if " at 0x" in text else text


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

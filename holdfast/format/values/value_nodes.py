"""Nodes of a stored tree: their kinds, how they are made, walked and keyed.

A *container* has members: a list, a dict, or a type that is stored as one of them with a tag. A
*wrapper* is a tag around one node: a codec's value, a union. All other nodes are leaves: tensors,
which are references to keys, and plain values. Only this room knows how a tag is written; other
rooms ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from types import MappingProxyType
from typing import Any, TypeAlias, TypeGuard

import msgspec

from holdfast.errors import CorruptionError

Node: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"
"""A JSON value; see the text of the package."""

TAG = "$"
UNION = "union"
"""Tag of a mapping whose members are spread over ranks; merging the ranks removes it."""
MAPPINGS = ("dict", "odict", "counter", "defaultdict")
"""Tags of mappings that are stored as pairs."""
SEQUENCES = ("tuple", "deque")
SETS = ("set", "frozenset")
TENSORS = ("tensor", "array")
SCALARS = ("int", "float", "str", "bytes", "bytearray", "complex", "numpy", "enum")
METADATA_MEMBER = "m"
"""Member of an OrderedDict's node: what a module has noted at the state dict that it made."""
_KEY = "k"
_TABLES = ("per_rank", "dataclass")
_WRAPPERS = ("codec", UNION)
_CONTAINERS = frozenset((*MAPPINGS, *SEQUENCES, *SETS, *_TABLES))
_TEXT = frozenset((str,))
_PLAIN_KINDS = frozenset((bool, int, float, str, type(None)))


def tag_of(node: Any) -> str | None:
    """Return the tag of a node; None for a list, a plain dict or a plain value."""
    tag = node.get(TAG) if isinstance(node, dict) else None
    return tag if isinstance(tag, str) else None


def is_plain_dict(node: Any) -> TypeGuard[dict[str, Any]]:
    """Return True for a dict with string keys, which is stored as it is."""
    return isinstance(node, dict) and TAG not in node


is_like_a_tag: Callable[[str], bool] = methodcaller("startswith", TAG)
"""Returns True if a key would be read as a tag in a plain dict; in C, as every key is asked."""


def are_plain_keys(keys: Collection[Any]) -> bool:
    """Return True if all keys are text that a plain dict can have."""
    if not set(map(type, keys)) <= _TEXT or any(map(is_like_a_tag, keys)):
        return False
    return all(map(str.isascii, keys)) or all(map(is_unicode, keys))


def is_tensor(node: Any) -> TypeGuard[dict[str, Any]]:
    """Return True if a node refers to a tensor or an array by its key."""
    return tag_of(node) in TENSORS


def keys_of_tensors(nodes: Sequence[Any]) -> list[Any] | None:
    """Return the keys of nodes that all refer to tensors or arrays; None if one does not."""
    try:
        tags = {node[TAG] for node in nodes}
        return [node[_KEY] for node in nodes] if tags.issubset(TENSORS) else None
    except (LookupError, TypeError):  # a list, a plain dict or a plain value
        return None


def are_plain(nodes: Collection[Any]) -> bool:
    """Return True if all nodes are plain values: numbers, texts, truth values and nulls."""
    return _PLAIN_KINDS.issuperset(map(type, nodes))


def is_per_rank(node: Any) -> TypeGuard[dict[str, Any]]:
    """Return True if a node is a value per coordinate."""
    return tag_of(node) == "per_rank"


def is_container(node: Any) -> TypeGuard[list[Any] | dict[str, Any]]:
    """Return True if a node is a container, even if it is empty."""
    return isinstance(node, list) or is_plain_dict(node) or tag_of(node) in _CONTAINERS


def tensor_node(key: str, *, tag: str = "tensor") -> dict[str, Node]:
    """Return a reference to a tensor, or with that tag to an array."""
    return {TAG: tag, "k": key}


def leaf_node(tag: str, **attributes: Any) -> dict[str, Any]:
    """Return the node of a leaf that a caller's `on_leaf` writes and reads in its own way."""
    return {TAG: tag, **attributes}


def codec_node(name: str, node: Node) -> dict[str, Node]:
    """Return a value of a type that a program has to know by that name, and its plain form."""
    return {TAG: "codec", "n": name, "v": node}


def enum_node(name: str, *, member: str | None, value: Node) -> dict[str, Node]:
    """Return a member of an enum: by its own name, else by its value."""
    if member is not None:
        return {TAG: "enum", "n": name, "v": member}
    return {TAG: "enum", "n": name, "i": value}


def per_rank_node(axes: Iterable[str], values: Mapping[str, Node]) -> dict[str, Node]:
    """Return a value per coordinate along axes, by the coordinates' labels."""
    return {TAG: "per_rank", "axes": [*axes], "v": dict(values)}


def union_node(mapping: Node) -> dict[str, Node]:
    """Return a mapping whose members are spread over ranks."""
    return {TAG: UNION, "v": mapping}


def transient_node() -> dict[str, Node]:
    """Return the node of a value that is not stored."""
    return {TAG: "transient"}


def attributes_of(node: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a tagged node except its payload: a codec's name, the axes of a value
    per rank, the maximal length of a deque.
    """
    return {name: item for name, item in node.items() if name not in (TAG, "v")}


def wrapped(node: Any) -> Any:
    """Return the node in a wrapper, or the node itself if it is not one."""
    while tag_of(node) in _WRAPPERS:
        node = _payload(node)
    return node


def pairs_of(node: Any) -> list[tuple[Node, Any]] | None:
    """Return the (key, member) pairs of a stored mapping, keys as nodes; None for any other node.

    Raises:
        CorruptionError: The node is malformed; `items_of`, `members` and `walk` raise it, too.
    """
    if is_plain_dict(node):
        return list(node.items())
    if tag_of(node) not in MAPPINGS:
        return None
    try:
        return [(key, member) for key, member in _payload(node, list)]
    except (TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint has a malformed {tag_of(node)}: {error!r}"
        ) from error


def items_of(node: Any) -> list[Any] | None:
    """Return the items of a stored list, tuple or deque; None for any other node."""
    if isinstance(node, list):
        return node
    items: list[Any] | None = _payload(node, list) if tag_of(node) in SEQUENCES else None
    return items


def members(node: Any) -> list[tuple[Node, Any]]:
    """Return (name, node) of each member of a container, in order; empty for other nodes.

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
    """Yield a node and every node below it, an outer one before its members, in stored order.

    Any depth works: a user's tree may be deeper than Python's stack.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, list | dict):
            continue
        if isinstance(node, list):
            waiting += reversed(node)
        elif is_plain_dict(node):
            waiting += reversed(node.values())
        elif tag_of(node) in _WRAPPERS:
            waiting.append(_payload(node))
        else:
            waiting += [member for _, member in reversed(members(node))]


def tensor_keys(node: Any) -> Iterator[str]:
    """Yield the keys of the tensors in a tree, one for each reference."""
    return (str(each["k"]) for each in walk(node) if is_tensor(each) and "k" in each)


def tensor_paths(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and key of each tensor in a tree, one pair for each reference.

    A tied tensor has one key and several paths. What is below the key of a mapping that is not a
    plain value, such as a tuple, has no path.
    """
    waiting = [(path, node)]
    while waiting:
        path, node = waiting.pop()
        node = wrapped(node)
        if is_tensor(node) and _KEY in node:
            yield path, str(node[_KEY])
        waiting += [
            (join_path(path, key_name(name)), member)
            for name, member in reversed(members(node))
            if not isinstance(name, dict | list)
        ]


def count_values(node: Any) -> int:
    """Count the plain values of a tree: stored leaves that are not tensors."""
    return sum(
        not (is_container(each) or is_tensor(each))
        and tag_of(each) not in ("transient", *_WRAPPERS)
        for each in walk(node)
    )


def kind_in_words(node: Any) -> str:
    """Describe the kind of a stored node, for a message."""
    tag = tag_of(node)
    if tag == "per_rank":
        return f"a value per {','.join(node['axes'])}"
    if isinstance(node, list):
        return f"a list of {len(node)}"
    name = tag or ("mapping" if isinstance(node, dict) else type(node).__name__)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _payload(node: dict[str, Any], kind: type = object) -> Any:
    """Return the payload of a tagged node; CorruptionError if it is not of this kind."""
    payload = node.get("v")
    if "v" not in node or not isinstance(payload, kind):
        raise CorruptionError(f"the checkpoint has a malformed {tag_of(node)}")
    return payload


def without_implied_keys(parts: dict[str, Any]) -> dict[str, Any]:
    """Return a tree without the keys that it implies, as a manifest has it.

    A `tensor` or `array` node has no `k` if its key is its path: the part's name, the names of dict
    members and the positions in lists on the way to it, joined with dots. Only plain dicts and
    lists count; below any other node every `k` is written.

    Cost: linear; dicts and lists are copied, leaves are shared.
    """
    return {name: _shrink(node, name) for name, node in parts.items()}


_IMPLIED = MappingProxyType({tag: {TAG: tag} for tag in TENSORS})


def _shrink(node: Any, path: str) -> Any:
    """Return a node without the keys that its path implies."""
    if isinstance(node, list):
        return [_shrink(item, f"{path}.{i}") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    tag = node.get(TAG)
    if tag is None:
        # A tensor with nothing but its implied key is one node for all: most leaves are such.
        return {
            name: _IMPLIED[item[TAG]]
            if type(item) is dict
            and len(item) == 2
            and item.get(_KEY) == f"{path}.{name}"
            and item.get(TAG) in _IMPLIED
            else _shrink(item, f"{path}.{name}")
            for name, item in node.items()
        }
    if tag in TENSORS and node.get(_KEY) == path:
        node = node.copy()
        del node[_KEY]
    return node


class _TreePath:
    """A path in the tree: its last name and the path above; joined only when needed."""

    __slots__ = ("above", "length", "name")

    def __init__(self, name: str, above: _TreePath | None) -> None:
        self.name = name
        self.above = above
        self.length: int = len(name) + (above.length + 1 if above is not None else 0)

    def path(self) -> str:
        """Return all names, joined."""
        names: list[str] = []
        tree_path = self
        while tree_path.above is not None:
            names.append(tree_path.name)
            tree_path = tree_path.above
        return ".".join([tree_path.name, *reversed(names)])


def fill_implied_keys(parts: dict[str, Any], *, limit: int) -> None:
    """Add every key that `without_implied_keys` left out, in place, at any depth.

    Raises:
        ValueError: These keys would have more than `limit` characters together. A small file must
            not be able to fill the memory: names may be long and nested.

    Cost: linear in the tree and in these characters.
    """
    num_chars = 0
    waiting: list[tuple[Any, _TreePath]] = [
        (node, _TreePath(name, None)) for name, node in parts.items() if _may_hold_tensors(node)
    ]
    while waiting:
        node, tree_path = waiting.pop()
        tag = node.get(TAG) if isinstance(node, dict) else None
        if tag is None:
            inner = node.items() if isinstance(node, dict) else enumerate(node)
            path = ""
            if isinstance(node, dict) and _are_implied(node.values()):
                # All at once: most leaves are in such a dict.
                num_chars += (tree_path.length + 1) * len(node) + sum(map(len, node))
                _refuse_long_keys(num_chars, limit)
                path = tree_path.path()
                for name, item in node.items():
                    item[_KEY] = f"{path}.{name}"
                continue
            for name, item in inner:
                if type(item) is dict and item.get(TAG) in TENSORS:
                    if _KEY in item:
                        continue
                    num_chars += tree_path.length + len(str(name)) + 1
                    _refuse_long_keys(num_chars, limit)
                    # Joined once for all leaves of a container: most leaves have many siblings.
                    path = path or tree_path.path()
                    item[_KEY] = f"{path}.{name}"
                elif _may_hold_tensors(item):
                    waiting.append((item, _TreePath(str(name), tree_path)))
        elif tag in TENSORS and _KEY not in node:
            num_chars += tree_path.length
            _refuse_long_keys(num_chars, limit)
            node[_KEY] = tree_path.path()


def _may_hold_tensors(node: Any) -> bool:
    """Return False for a plain value, and for containers of them: shapes, words of a stream."""
    kind = type(node)
    if kind is list:
        return not are_plain(node)
    # A tensor without its key has one member, its tag.
    return kind is dict and (TAG in node or not are_plain(node.values()))


def _are_implied(nodes: Collection[Any]) -> bool:
    """Return True if all are tensors or arrays with nothing but a tag."""
    listed = [*nodes]
    return bool(listed) and sum(map(listed.count, _IMPLIED.values())) == len(listed)


def _refuse_long_keys(num_chars: int, limit: int) -> None:
    if num_chars > limit:
        raise ValueError(f"the keys that its tree implies have more than {limit} characters")


def join_path(path: str, name: object) -> str:
    """Return the path of a child: names are joined with dots."""
    return f"{path}.{name}" if path else str(name)


def node_bytes(node: Node) -> bytes:
    """Encode a node as compact JSON: equal bytes mean equal types, values and key order."""
    return msgspec.json.encode(node)


def shorten(value: object, *, limit: int = 80) -> str:
    """Return a value as text for a message; a long one is cut in the middle."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # the repr of a foreign type, or of an integer of thousands of digits
        text = f"<{type(value).__qualname__}>"
    half = limit // 2 - 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def key_name(key: object) -> str:
    """Return a dict key as a part of a path: a string as it is, anything else by its repr.

    If the repr is an address in memory, which differs between ranks, the type's name is returned.
    """
    if type(key) is str:
        return key
    text = shorten(key)
    return f"<{type(key).__qualname__}>" if " at 0x" in text else text


def is_unicode(text: str) -> bool:
    """Return True if UTF-8 can encode the text: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

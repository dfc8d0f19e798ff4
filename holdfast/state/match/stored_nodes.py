"""Looking into stored nodes: members of mappings by exact key, items of sequences, leaf paths.

Keys are the same only if type and value are: Python holds 1, True, 1.0 and np.int64(1) to be equal,
and 0.0 and -0.0; a checkpoint distinguishes them. So keys are compared by a *token*: a text key is
its own, any other one has the bytes of its node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.errors import CorruptionError, HoldfastError, PlacementError
from holdfast.format.values import Codecs, decode_tree, encode_tree, key_name, node_bytes, shorten

Token = str | bytes
Members = dict[Token, tuple[Any, Any]]
"""Token -> (key, node) of each member of a stored mapping, in order."""

_MAPPINGS = ("dict", "odict", "counter", "defaultdict")
_SEQUENCES = ("tuple", "deque")


def tag_of(node: Any) -> str | None:
    """The tag of a node; None for a list, a plain dict, a plain value."""
    tag = node.get("$") if isinstance(node, dict) else None
    return tag if isinstance(tag, str) else None


def key_token(key: object, codecs: Codecs) -> Token | None:
    """What distinguishes a key from all others; None for one that no checkpoint can hold."""
    if type(key) is str:
        return key
    try:
        return node_bytes(encode_tree(key, codecs=codecs))
    except PlacementError:
        return None


def members_of(node: Any, codecs: Codecs) -> Members | None:
    """The members of a stored dict, OrderedDict, Counter or defaultdict; None for no mapping.

    Raises MismatchError for a key of a type that is not registered, CorruptionError for a
    malformed node.
    """
    return _members(node, lambda raw: decode_tree(raw, codecs=codecs))


def _members(node: Any, key_of: Callable[[Any], Any]) -> Members | None:
    if not isinstance(node, dict):
        return None
    tag = node.get("$")
    if tag is None:
        return {key: (key, child) for key, child in node.items()}
    if tag not in _MAPPINGS:
        return None
    result: Members = {}
    try:
        for raw, child in node["v"]:
            key = raw if type(raw) is str else key_of(raw)
            result[key if type(key) is str else node_bytes(raw)] = (key, child)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"the checkpoint holds a malformed {tag}: {error!r}") from error
    return result


def items_of(node: Any) -> list[Any] | None:
    """The items of a stored list, tuple or deque, or None for anything else."""
    if isinstance(node, list):
        return node
    tag = tag_of(node)
    if tag not in _SEQUENCES:
        return None
    if not isinstance(node.get("v"), list):
        raise CorruptionError(f"the checkpoint holds a malformed {tag}")
    children: list[Any] = node["v"]
    return children


def leaf_paths(node: Any, path: str, codecs: Codecs | None = None) -> list[str]:
    """The paths of everything under a node, dict keys and list positions joined by dots."""
    known = codecs if codecs is not None else Codecs()

    def key_of(raw: Any) -> Any:
        try:
            return decode_tree(raw, codecs=known)
        except HoldfastError:
            return shorten(node_bytes(raw).decode())

    result: list[str] = []
    _add_leaf_paths(node, path, result, key_of)
    return result


def _add_leaf_paths(node: Any, path: str, result: list[str], key_of: Callable[[Any], Any]) -> None:
    if not isinstance(node, dict | list):
        result.append(path)
        return
    if isinstance(node, dict) and node.get("$") == "per_rank":
        for label, child in node["v"].items():
            _add_leaf_paths(child, f"{path}[{label}]", result, key_of)
        return
    named = _members(node, key_of)
    if named is None:
        inner = [(str(i), child) for i, child in enumerate(items_of(node) or ())]
    else:
        inner = [(key_name(key), child) for key, child in named.values()]
    if not inner:
        result.append(path)
    for name, child in inner:
        if isinstance(child, dict) and child.get("$") == "tensor":
            result.append(f"{path}.{name}")
        else:
            _add_leaf_paths(child, f"{path}.{name}", result, key_of)


def kind_in_words(node: Any) -> str:
    """What a stored node is, for a message."""
    tag = tag_of(node)
    if tag == "per_rank":
        return f"a value per {','.join(node['axes'])}"
    if isinstance(node, list):
        return f"a list of {len(node)}"
    name = tag or ("mapping" if isinstance(node, dict) else type(node).__name__)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def stored_kind(node: Any) -> str:
    """What is stored, and how to ask for it where it is a value per coordinate."""
    message = kind_in_words(node)
    return (
        message
        if tag_of(node) != "per_rank"
        else f"{message}; ask for it with PerRank(..., axes=...)"
    )

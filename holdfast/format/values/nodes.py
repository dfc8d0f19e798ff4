"""What a node is, and the few helpers every user of nodes shares."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Node: TypeAlias = "bool | int | float | str | list[Node] | dict[str, Node] | None"
"""What JSON can hold; see the package text."""

TAG = "$"
UNION = "union"
"""Tag of a mapping whose members are spread over ranks; removed where ranks are merged."""
MAX_DEPTH = 100
MAX_PLAIN_INT = 2**53


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

"""A user's own JSON object in a checkpoint: what may be in it, and how it is stored.

It is kept in the manifest's `parts` under a name that no part can have, so that a reader that does
not know it sees one more tree of plain values, and the manifest's digest covers it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import ConfigError, CorruptionError, HoldfastError
from holdfast.format.values import TAG, Node, decode_tree, encode_tree

METADATA_PART = "$metadata"
"""Where it is in `parts`; the name of a part of the state does not begin with `$`."""
MAX_METADATA_NBYTES = 64 * 1024
"""Bytes of JSON text. The manifest is read by `ls` and broadcast by every load."""


def encode_metadata(metadata: Mapping[str, object] | None) -> bytes:
    """The JSON of the node that stands for a user's object; empty for None and for `{}`.

    Args:
        metadata: texts, finite numbers, booleans, None, and lists and dicts of them with texts as
            keys: what comes back from JSON as it was.

    Raises:
        ConfigError: anything else, or more than `MAX_METADATA_NBYTES`.
    """
    if metadata is None:
        return b""
    if not isinstance(metadata, Mapping):
        raise ConfigError(f"metadata must be a dict, got {type(metadata).__name__}")
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata cannot be written as JSON: {error}") from error
    if len(text) > MAX_METADATA_NBYTES:
        raise ConfigError(
            f"metadata has {len(text):,} bytes of JSON, the limit is {MAX_METADATA_NBYTES:,}; what "
            f"is larger belongs into a part of the state"
        )
    if value != metadata:
        raise ConfigError(
            "metadata would not come back from JSON as it is: use lists instead of tuples, and "
            "texts as keys"
        )
    return msgspec.json.encode(encode_tree(value, path="metadata")) if value else b""


def decode_metadata(node: Node) -> dict[str, Any]:
    """The user's object of a stored node; CorruptionError where it is none."""
    try:
        if not isinstance(node, dict) or (TAG in node and node[TAG] != "dict"):
            raise CorruptionError("not an object")
        value: Any = decode_tree(node, path=METADATA_PART)
        if json.loads(json.dumps(value, allow_nan=False)) != value:
            raise CorruptionError("it holds what JSON does not")
    except (HoldfastError, TypeError, ValueError, RecursionError) as error:
        raise CorruptionError(f"{METADATA_PART!r} is not a JSON object: {error}") from None
    return dict(value)

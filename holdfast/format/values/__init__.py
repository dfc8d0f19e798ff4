"""Plain values as JSON without loss and without pickle: the tree of a checkpoint.

A *node* is what JSON can hold. JSON objects without a "$" member are dicts with string keys; what
JSON lacks is an object whose "$" member, its tag, says how to read the others. Types are exact: a
bool is no int, an IntEnum is an enum, a subclass of dict is refused unless it has a tag.
"""

from __future__ import annotations

from holdfast.format.values.codecs import Codec, Codecs
from holdfast.format.values.decode import dataclass_of, decode_tree, mapping_of, sequence_of
from holdfast.format.values.encode import (
    MAX_DEPTH,
    TAG,
    UNION,
    Node,
    encode_tree,
    is_unicode,
    join_path,
    key_name,
    kind_in_words,
    node_bytes,
    shorten,
    tag_of,
)
from holdfast.format.values.merge import merge_nodes

__all__ = [
    "MAX_DEPTH",
    "TAG",
    "UNION",
    "Codec",
    "Codecs",
    "Node",
    "dataclass_of",
    "decode_tree",
    "encode_tree",
    "is_unicode",
    "join_path",
    "key_name",
    "kind_in_words",
    "mapping_of",
    "merge_nodes",
    "node_bytes",
    "sequence_of",
    "shorten",
    "tag_of",
]

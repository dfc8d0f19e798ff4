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
    encode_tree,
    is_unicode,
    join_path,
    key_name,
    node_bytes,
    shorten,
)
from holdfast.format.values.merge import merge_nodes
from holdfast.format.values.nodes import (
    MAPPINGS,
    SCALARS,
    SEQUENCES,
    SETS,
    TAG,
    Node,
    attributes_of,
    count_values,
    is_container,
    is_like_a_tag,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    kind_in_words,
    leaf_node,
    members,
    pairs_of,
    per_rank_node,
    tag_of,
    tensor_keys,
    tensor_node,
    transient_node,
    union_node,
    walk,
    wrapped,
)

__all__ = [
    "MAPPINGS",
    "MAX_DEPTH",
    "SCALARS",
    "SEQUENCES",
    "SETS",
    "TAG",
    "Codec",
    "Codecs",
    "Node",
    "attributes_of",
    "count_values",
    "dataclass_of",
    "decode_tree",
    "encode_tree",
    "is_container",
    "is_like_a_tag",
    "is_per_rank",
    "is_plain_dict",
    "is_tensor",
    "is_unicode",
    "items_of",
    "join_path",
    "key_name",
    "kind_in_words",
    "leaf_node",
    "mapping_of",
    "members",
    "merge_nodes",
    "node_bytes",
    "pairs_of",
    "per_rank_node",
    "sequence_of",
    "shorten",
    "tag_of",
    "tensor_keys",
    "tensor_node",
    "transient_node",
    "union_node",
    "walk",
    "wrapped",
]

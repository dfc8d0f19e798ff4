"""The values of a state as JSON, without loss and without pickle: the tree of a checkpoint.

In come trees of Python values; out come nodes, and back. A *node* is a JSON value. A JSON object
without a "$" member is a dict with string keys. A type that JSON lacks is an object whose "$"
member, its tag, states how to read the others. Types are exact: a bool is not an int, an IntEnum is
an enum, and a subclass of dict is refused unless it has a tag.

Read first: `value_nodes.py`, `codecs.py`.
"""

from __future__ import annotations

from holdfast.format.values.codecs import (
    MAX_DEPTH,
    Codec,
    Codecs,
    dataclass_of,
    decode_tree,
    encode_tree,
    mapping_of,
    sequence_of,
)
from holdfast.format.values.merge import merge_nodes
from holdfast.format.values.value_nodes import (
    MAPPINGS,
    SCALARS,
    SEQUENCES,
    SETS,
    TAG,
    Node,
    attributes_of,
    count_values,
    fill_implied_keys,
    is_container,
    is_like_a_tag,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    is_unicode,
    items_of,
    join_path,
    key_name,
    kind_in_words,
    leaf_node,
    members,
    node_bytes,
    pairs_of,
    per_rank_node,
    shorten,
    tag_of,
    tensor_keys,
    tensor_node,
    transient_node,
    union_node,
    walk,
    without_implied_keys,
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
    "fill_implied_keys",
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
    "without_implied_keys",
    "wrapped",
]

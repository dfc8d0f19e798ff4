"""The walk through stored trees, against a recursive one over the values that they are of."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptionError
from holdfast.format.values import (
    Codec,
    Codecs,
    Node,
    count_values,
    encode_tree,
    is_per_rank,
    members,
    per_rank_node,
    tensor_keys,
    tensor_node,
    transient_node,
    walk,
)


class Boxed:
    """What a codec wraps."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


class PerRank(dict[str, Any]):
    """A value per coordinate, by label."""


CODECS = Codecs(codecs=[Codec(type=Boxed, name="boxed", encode=lambda b: b.inner, decode=Boxed)])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
TREES = st.recursive(
    SCALARS | st.builds(lambda: np.zeros(1)) | st.just(...),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.lists(below, max_size=3).map(deque)
        | st.dictionaries(st.text(max_size=2), below, max_size=3)
        | st.dictionaries(st.integers(), below, max_size=3)
        | st.dictionaries(st.integers(), below, max_size=3).map(OrderedDict)
        | st.dictionaries(st.text(max_size=2), below, max_size=3).map(Counter)
        | st.dictionaries(st.text(max_size=2), below, max_size=3).map(lambda d: defaultdict(int, d))
        | st.sets(st.integers(), max_size=3)
        | below.map(Boxed)
        | st.dictionaries(st.sampled_from(["dp=0", "dp=1"]), below).map(PerRank)
    ),
    max_leaves=15,
)


def _leaf(path: str, value: object) -> Node | None:
    if isinstance(value, np.ndarray):
        return tensor_node(path)
    if isinstance(value, PerRank):
        return per_rank_node(
            ["dp"], {label: _encode(below, f"{path}[{label}]") for label, below in value.items()}
        )
    return transient_node() if value is ... else None


def _encode(tree: object, path: str) -> Node:
    return encode_tree(tree, path=path, codecs=CODECS, on_leaf=_leaf)


def _leaves(tree: Any) -> Iterator[object]:
    if isinstance(tree, Boxed):
        yield from _leaves(tree.inner)
    elif isinstance(tree, dict):
        for below in tree.values():
            yield from _leaves(below)
    elif isinstance(tree, list | tuple | deque | set):
        for below in tree:
            yield from _leaves(below)
    else:
        yield tree


@given(TREES)
def test_tensors_and_values_are_those_of_the_tree(tree: Any) -> None:
    node = _encode(tree, "p")
    leaves = list(_leaves(tree))
    tensors = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
    keys = list(tensor_keys(node))
    assert len(keys) == len(set(keys)) == len(tensors)
    assert count_values(node) == len(leaves) - len(tensors) - sum(leaf is ... for leaf in leaves)


@given(TREES)
def test_an_outer_node_comes_before_its_members_in_stored_order(tree: Any) -> None:
    nodes = list(walk(_encode([tree], "p")))
    places = {id(node): i for i, node in enumerate(nodes)}
    for node in nodes:
        inside = [places[id(m)] for _, m in members(node) if isinstance(m, list | dict)]
        assert inside == sorted(inside)
        assert all(place > places[id(node)] for place in inside)


def test_a_tree_may_be_deeper_than_the_stack() -> None:
    node: Node = tensor_node("a")
    for _ in range(50_000):
        node = [per_rank_node(["dp"], {"dp=0": node})]
    assert list(tensor_keys(node)) == ["a"]
    assert sum(map(is_per_rank, walk(node))) == 50_000
    while isinstance(node, list):  # freed level by level
        node = node.pop()["v"].pop("dp=0")  # type: ignore[index, call-overload, union-attr]


@pytest.mark.parametrize(
    "node",
    [
        {"$": "tuple"}, {"$": "tuple", "v": 1}, {"$": "dict", "v": {"a": 1}}, {"$": "set", "v": 3},
        {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [1]}, {"$": "per_rank", "v": [1]},
        {"$": "dataclass", "n": "D"}, {"$": "codec", "n": "c"},
    ],
)  # fmt: skip
def test_a_malformed_container_is_damage(node: Node) -> None:
    with pytest.raises(CorruptionError, match="malformed"):
        count_values([node])

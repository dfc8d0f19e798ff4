"""Pickles are written as Python reads them, and as PyTorch's restricted loader does."""

from __future__ import annotations

import io
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import _weights_only_unpickler as restricted

from holdfast.errors import PlanError
from holdfast.foreign.pickles import read_pickle
from holdfast.format.envelopes.pickle_output import Global, Made, Pairs, pickled
from holdfast.format.envelopes.plain_values import PlainValues, TensorRef
from holdfast.format.values import (
    Codec,
    Codecs,
    encode_tree,
    per_rank_node,
    tensor_node,
    transient_node,
)


@dataclass
class Point:
    x: Any
    y: Any


class Mode(Enum):
    FAST = 1


SAFE: list[Any] = [
    None, True, False, 0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**80),
    0.5, -0.0, float("inf"), "", "a" * 300, "ü\ud800", 1 + 2j, b"", b"\x00\xffab", bytearray(b"x"),
    (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, (4,)), [], [1, [2, []]], {}, {"a": {1: (2,)}, None: "a"},
    OrderedDict(b=1, a=[]), OrderedDict(), Counter("aab"), {1, "a"}, set(), ["a", "a", "a"],
]  # fmt: skip
OTHERS: list[Any] = [
    frozenset({1, 2}), range(3), range(9, 1, -2), slice(1, None, 2), deque([1, 2], maxlen=4),
    deque([3]), defaultdict(int, a=1), defaultdict(None, {1: 2}), defaultdict(list), 2**3000,
    -(2**3000), np.float32(0.1), np.int64(-5), np.bool_(True), np.complex64(1j), np.str_("añ"),
    np.bytes_(b"ab"), np.datetime64("2020-01-02", "ns"), np.float16(2),
]  # fmt: skip


@pytest.mark.parametrize("value", [*SAFE, *OTHERS], ids=lambda value: type(value).__name__)
def test_python_reads_what_is_written(value: Any) -> None:
    result = pickle.loads(pickled([value]))[0]
    assert type(result) is type(value)
    assert result == value
    assert repr(result) == repr(value) or isinstance(value, set | frozenset)


@pytest.mark.parametrize("value", SAFE, ids=lambda value: type(value).__name__)
def test_the_restricted_loader_reads_what_is_safe(value: Any) -> None:
    result = restricted.load(io.BytesIO(pickled([value])))[0]
    assert type(result) is type(value)
    assert result == value


@pytest.mark.parametrize("value", [*SAFE, *OTHERS], ids=lambda value: type(value).__name__)
def test_our_own_reader_reads_it(value: Any) -> None:
    read_pickle(pickled([value]), place="here")


def test_versions_of_modules_are_written_as_torch_does() -> None:
    state = OrderedDict(w=1)
    state._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    data = pickled([state])
    for result in (pickle.loads(data)[0], restricted.load(io.BytesIO(data))[0]):
        assert result == state
        assert result._metadata == state._metadata  # type: ignore[attr-defined]
    read_pickle(data, place="here")


def test_nan_keeps_its_bits() -> None:
    (odd,) = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))
    assert struct.pack(">d", pickle.loads(pickled(odd))).hex() == "7ff8000000000123"


def test_arrays() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    result = pickle.loads(pickled(array))
    assert result.dtype == array.dtype.newbyteorder("=")  # as NumPy reads its own pickles
    np.testing.assert_array_equal(result, array)


def test_described_objects() -> None:
    size = Made(by=Global("torch", "Size"), args=((1, 2),))
    made = pickle.loads(pickled(Pairs([(size, Global("torch", "float32"))])))
    assert made == {torch.Size([1, 2]): torch.float32}
    point = Made(
        by=Global("tests.foreign.test_pickle_output", "Point"), is_new=True, state={"x": 1, "y": 2}
    )
    assert pickle.loads(pickled(point)) == Point(1, 2)


def test_names_and_texts_are_written_once() -> None:
    size = Made(by=Global("torch", "Size"), args=((1,),))
    data = pickled([[size, "some text"]] * 600 + [f"{i} here" for i in range(300)] * 2)
    assert data.count(b"Size") == data.count(b"some text") == data.count(b"299 here") == 1
    assert pickle.loads(data)[0] == [torch.Size([1]), "some text"]
    assert pickle.loads(data)[-1] == "299 here"


def test_what_is_shared_is_one_object() -> None:
    point = Global("tests.foreign.test_pickle_output", "Point")
    shared = Made(by=point, is_new=True, state={"x": 1, "y": 2}, is_shared=True)
    alone = Made(by=point, is_new=True, state={"x": 1, "y": 2})
    one, two, three, four = pickle.loads(pickled([shared, shared, alone, alone]))
    assert one is two
    assert three == four == one
    assert len({id(one), id(three), id(four)}) == 3


def test_other_types_are_refused() -> None:
    with pytest.raises(PlanError, match="Point cannot be written"):
        pickled({"a": Point(1, 2)})
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(PlanError, match="deeper"):
        pickled(deep)


CODECS = Codecs(
    dataclasses=[Point],
    enums=[Mode],
    codecs=[
        Codec(
            name="bytes-io",
            type=io.BytesIO,
            encode=lambda value: [value.getvalue()],
            decode=lambda value: io.BytesIO(value[0]),
        )
    ],
)


def plain_of(tree: object) -> tuple[Any, PlainValues]:
    plain = PlainValues()
    parts: Any = encode_tree(tree, codecs=CODECS)
    return plain.parts(parts), plain


@pytest.mark.parametrize("value", [*SAFE, *OTHERS], ids=lambda value: type(value).__name__)
def test_stored_values_become_themselves(value: Any) -> None:
    result, plain = plain_of({"a": {"b": value}})
    result = pickle.loads(pickled(result))["a"]["b"]
    assert type(result) is type(value)
    assert result == value
    assert plain.notes == []
    assert (plain.unsafe == []) == any(value is each for each in SAFE)


def test_what_cannot_be_written_is_noted() -> None:
    tree: dict[str, Any] = {
        "p": Point(1, [Mode.FAST]),
        "io": {"x": io.BytesIO(b"a")},
        "set": {"s": {Mode.FAST}, "t": 1},
        "keys": {Mode.FAST: 1},
    }
    result, plain = plain_of(tree)
    assert result == {
        "p": {"x": 1, "y": ["FAST"]},
        "io": {"x": [b"a"]},
        "set": {"t": 1},
        "keys": {"FAST": 1},
    }
    assert plain.notes == [
        "p is a dataclass 'Point': it is written as a dict",
        "p.y.0 is a member of the enum 'Mode', by its name",
        "io.x is written in the plain form that the codec 'bytes-io' made",
        "set.s is left out: it is a value of a registered type in a set or a key",
        "keys is a member of the enum 'Mode', by its name",
    ]


def test_what_has_no_single_value_is_left_out() -> None:
    plain = PlainValues()
    parts: dict[str, Any] = {
        "rng": per_rank_node(["dp"], {"dp=0": 1}),
        "a": {"b": transient_node(), "c": [1, [transient_node()]], "d": 2},
        "t": {"x": tensor_node("k"), "y": {**tensor_node("l", tag="array"), "d": ">f4"}},
    }
    assert plain.parts(parts) == {"a": {"d": 2}, "t": {"x": TensorRef("k"), "y": TensorRef("l")}}
    assert plain.notes == [
        "rng is left out: it is a value per rank",
        "a.b is left out: it is not stored",
        "a.c is left out: a.c.1.0 is not stored",
        "t.y is a NumPy array of >f4: it is written as a tensor",
    ]

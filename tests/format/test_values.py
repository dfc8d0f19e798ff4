"""Values come back as they were: exact types, order, odd numbers; and nothing is executed."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, CorruptionError, MismatchError, PlacementError, PlanError
from holdfast.format.values import (
    Codec,
    Codecs,
    Node,
    decode_tree,
    encode_tree,
    merge_nodes,
    node_bytes,
)
from tests.drawn import drawn


class Colour(Enum):
    RED = 1
    GREEN = "g"
    SCARLET = 1  # noqa: PIE796 - an alias, on purpose


class Level(IntEnum):
    LOW = 1


class Access(Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True)
class Position:
    epoch: int
    seen: tuple[int, ...] = ()


@dataclass
class Schedule:
    name: str
    position: Position | None = None
    cached: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.cached = -1


class Pair(NamedTuple):
    a: int
    b: int


CODECS = Codecs(
    dataclasses=[Position, Schedule],
    enums=[Colour, Level, Access],
    codecs=[Codec(name="pair", type=Pair, encode=lambda p: [p.a, p.b], decode=lambda v: Pair(*v))],
)


def equal(a: object, b: object) -> bool:
    """Same types all the way down, same order of keys, same bits of floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    if isinstance(a, np.generic) and isinstance(b, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(
            equal(k, m) and equal(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def through_disk(node: Node) -> Node:
    result: Node = msgspec.json.decode(msgspec.json.encode(node))
    return result


def round_trip(value: object) -> object:
    return decode_tree(through_disk(encode_tree(value, codecs=CODECS)), codecs=CODECS)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**53, 2**53 + 1, -(2**53), -(2**53) - 1, 2**64]),
    st.floats(),
    st.complex_numbers(allow_nan=True),
    st.text(st.characters(exclude_categories=[]), max_size=5),
    st.sampled_from(["$", "$x", "", "\ud800", "a\0b", "é"]),
    st.binary(max_size=5),
    st.sampled_from([Colour.RED, Colour.GREEN, Level.LOW, Access.READ, Access.READ | Access.WRITE]),
    st.builds(Position, st.integers(), st.tuples(st.integers())),
    st.builds(Pair, st.integers(), st.integers()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
    st.sampled_from(
        [np.float32(0.1), np.float64("nan"), np.int8(-3), np.uint64(2**63), np.bool_(True),
         np.complex64(1 - 2j), np.float16(-0.0), np.datetime64("2026-01-02T03:04"),
         np.timedelta64(5, "ns"), np.str_("hé\ud800"), np.str_(""), np.bytes_(b"a\0b")]
    ),
)  # fmt: skip
HASHABLE = SCALARS.filter(lambda v: v == v and not isinstance(v, complex | np.generic))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.dictionaries(st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(), inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=5)),
        st.builds(Schedule, st.text(max_size=3), st.none()),
    ),
    max_leaves=12,
)


def test_every_nan_keeps_its_bits() -> None:
    for bits in (0x7FF8 << 48, 0xFFF8 << 48, (0x7FF8 << 48) + 0xABC, (0xFFFF << 48) + 1):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        assert equal(round_trip([value, complex(1, value)]), [value, complex(1, value)])
    for text in ("nan:7ff0000000000000", "nan:3ff0000000000000", "nan:7ff8", "nan:", "NaN"):
        with pytest.raises(CorruptionError):
            decode_tree({"$": "float", "v": text})


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_every_tree_comes_back_with_exact_types_and_order(tree: object) -> None:
    back = round_trip(tree)
    assert equal(tree, back), back


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_encoding_is_deterministic_and_stable(tree: object) -> None:
    node = encode_tree(tree, codecs=CODECS)
    assert node_bytes(node) == node_bytes(encode_tree(tree, codecs=CODECS))
    again = encode_tree(decode_tree(through_disk(node), codecs=CODECS), codecs=CODECS)
    assert node_bytes(again) == node_bytes(node)


@given(st.sets(st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers()))))
def test_sets_are_stored_in_one_order(members: set[object]) -> None:
    node = encode_tree(members)
    shuffled: set[object] = set()
    for member in sorted(members, key=repr, reverse=True):
        shuffled.add(member)
    assert node_bytes(encode_tree(shuffled)) == node_bytes(node)
    assert equal(decode_tree(through_disk(node)), members)
    frozen = round_trip(frozenset(members))
    assert type(frozen) is frozenset
    assert frozen == members


@pytest.mark.parametrize(
    "value",
    [
        {}, [], (), set(), frozenset(), b"", bytearray(b"x"), OrderedDict(), Counter("hello"),
        {"a": {}, "b": [[]], "c": ((),)}, {1: 2, "1": 3}, {(): None}, {None: 1}, {True: 1},
        slice(None), slice(1, -2, 3), range(0), deque(maxlen=0), deque([1]),
        defaultdict(None, {"a": 1}), [1, True, 1.0, -0.0], {"$": 1}, {"$": {"$": "tuple"}},
        {"z": 1, "a": 2}, [float("inf"), float("-inf"), 5e-324, 1e16, 1.7976931348623157e308],
        (1, [2, (3, {"x": (4,)})]), -(10**5000), np.str_("a\0"), np.bytes_(b"a\0"),
    ],
    ids=lambda v: str(v)[:30] if not isinstance(v, int) else "huge",
)  # fmt: skip
def test_cases_that_are_easily_lost(value: object) -> None:
    assert equal(round_trip(value), value)


def test_a_slice_with_odd_members() -> None:
    assert round_trip(slice("a", 2.0, None)) == slice("a", 2.0, None)


def test_a_dataclass_is_restored_without_running_its_initialiser() -> None:
    schedule = Schedule("cosine", Position(3, (1, 2)))
    schedule.cached = 17
    back = round_trip(schedule)
    assert isinstance(back, Schedule)
    assert back == schedule
    assert back.cached == 17


class Subclass(dict[str, int]):
    pass


class Loss(np.float64):
    pass


UNREGISTERED: list[tuple[object, str, str]] = [
    (object(), "object", "Codec"),
    (Subclass(a=1), "Subclass", "Codec"),
    (lambda: 0, "function", "Codec"),
    (Colour.RED, "Colour", r"Codecs\(enums=\[Colour\]\)"),
    (Position(1), "Position", r"Codecs\(dataclasses=\[Position\]\)"),
    (Pair(1, 2), "Pair", "Codec"),
    (np.zeros(3), "ndarray", "Codec"),
    (memoryview(b""), "memoryview", "Codec"),
    (Position, "type", "Codec"),
    (defaultdict(lambda: 0), "defaultdict", "convert it to a dict"),
    (np.longdouble(1), "longdouble", "Codec"),
    (Loss(1.5), "Loss", "Codec"),
    (iter([]), "iterator", "Codec"),
]


@pytest.mark.parametrize(("value", "name", "hint"), UNREGISTERED, ids=[u[1] for u in UNREGISTERED])
def test_what_has_no_form_is_refused_with_its_path_and_a_way_out(
    value: object, name: str, hint: str
) -> None:
    with pytest.raises(PlacementError, match=rf"^state\.a\.1\.b: .*{name}.*{hint}"):
        encode_tree({"a": [0, {"b": value}]}, path="state")


def test_attributes_that_are_no_fields_are_not_dropped() -> None:
    schedule = Schedule("x")
    schedule.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(PlacementError, match="extra"):
        encode_tree(schedule, codecs=CODECS)
    partial = object.__new__(Position)
    with pytest.raises(PlacementError, match="epoch"):
        encode_tree(partial, codecs=CODECS)


class Slotted:
    __slots__ = ("cached",)


@dataclass(slots=True)
class Counted(Slotted):
    n: int


@dataclass
class Fields(dict[str, int]):
    a: int = 1


def test_what_a_dataclass_or_a_mapping_holds_besides_is_not_dropped() -> None:
    """O11: slots of a base, contents of a built-in base, attributes of an instance."""
    counted, codecs = Counted(1), Codecs(dataclasses=[Counted])
    assert decode_tree(encode_tree(counted, codecs=codecs), codecs=codecs) == counted
    counted.cached = 2
    with pytest.raises(PlacementError, match="cached"):
        encode_tree(counted, codecs=codecs)
    with pytest.raises(ConfigError, match=r"Fields in `dataclasses` is a dict, too.*Codec"):
        Codecs(dataclasses=[Fields])
    for mapping in (OrderedDict(a=1), Counter("a")):
        mapping.unit = "m"  # type: ignore[union-attr]
        with pytest.raises(PlacementError, match=r"^x\.0: this .* has attributes \(unit\)"):
            encode_tree([mapping], path="x")


def versioned(**versions: int) -> OrderedDict[str, int]:
    """What `state_dict` of modules with these versions returns."""
    made = OrderedDict.fromkeys(versions, 0)
    made._metadata = OrderedDict((n, {"version": v}) for n, v in versions.items())  # type: ignore[attr-defined]
    return made


def test_versions_of_modules_stay_with_their_state_dict() -> None:
    """O11: of ranks that hold different members, each has noted its own."""
    one, two = versioned(a=1, b=2), versioned(b=2, c=3)
    back: Any = round_trip([one])
    assert back[0]._metadata == one._metadata  # type: ignore[attr-defined]
    joined: Any = decode_tree(merged(*(union(encode_tree(each)) for each in (one, two))))
    assert joined._metadata == {n: {"version": v} for n, v in zip("abc", (1, 2, 3), strict=True)}
    without = OrderedDict(one)
    for other in (without, versioned(a=1, b=3)):
        with pytest.raises(PlanError):
            merged(encode_tree(one), encode_tree(other))
    assert decode_tree(encode_tree(without)) == without


def test_cycles_and_depth_are_refused_and_twins_are_not() -> None:
    cycle: list[object] = []
    cycle.append({"again": cycle})
    with pytest.raises(PlacementError, match=r"0\.again: it contains itself"):
        encode_tree(cycle)
    twin = [1]
    assert decode_tree(encode_tree([twin, twin])) == [[1], [1]]
    deep: object = 1
    for _ in range(100):
        deep = ({"k": deep},) if _ % 2 else [deep]
    with pytest.raises(PlacementError, match="deeper than 100"):
        encode_tree([deep])
    flat: object = 1
    for _ in range(100):
        flat = {1: flat}
    assert round_trip(flat) == flat


def test_the_caller_looks_at_every_object_but_numbers_first_with_its_path() -> None:
    seen: list[str] = []

    def on_leaf(path: str, value: object) -> Node:
        seen.append(path)
        return {"$": "tensor", "k": path} if isinstance(value, np.ndarray) else None

    tree = {"w": np.zeros(2), "l": [1, (np.ones(1),)], 3: {"x": np.ones(1)}, "p": Pair(1, 2)}
    node = encode_tree(tree, path="m", codecs=CODECS, on_leaf=on_leaf)
    assert {"m", "m.w", "m.l", "m.l.1", "m.l.1.0", "m.3", "m.3.x", "m.p"} <= set(seen)
    assert "m.l.0" not in seen
    found: list[tuple[str, Node]] = []

    def restore(path: str, leaf: dict[str, Node]) -> object:
        found.append((path, leaf["k"]))
        return path

    back = decode_tree(through_disk(node), path="m", codecs=CODECS, on_leaf=restore)
    assert found == [("m.w", "m.w"), ("m.l.1.0", "m.l.1.0"), ("m.3.x", "m.3.x")]
    assert back == {"w": "m.w", "l": [1, ("m.l.1.0",)], 3: {"x": "m.3.x"}, "p": Pair(1, 2)}


MALFORMED: list[Node] = [
    {"$": "tuple"}, {"$": "tuple", "v": 1}, {"$": "tuple", "v": [], "x": 1}, {"$": 7},
    {"$": "nonsense", "v": 1}, {"$x": 1}, {"$": ["tuple"]}, {"$": None},
    {"$": "int", "v": "1x"}, {"$": "int", "v": 3}, {"$": "int", "v": "9" * 5000},
    {"$": "int", "v": "0x"}, {"$": "int", "v": " 5"}, {"$": "float", "v": "1.5"},
    {"$": "float", "v": "infinity"}, {"$": "bytes", "v": "!!"}, {"$": "bytes", "v": None},
    {"$": "complex", "v": [1.0]}, {"$": "complex", "v": [1.0, "2"]}, {"$": "complex", "v": "12"},
    {"$": "set", "v": [1, 1]}, {"$": "set", "v": [[1]]}, {"$": "range", "v": [1, 2]},
    {"$": "range", "v": [1, 2, 0]}, {"$": "range", "v": [1.0, 2, 1]}, {"$": "slice", "v": [1]},
    {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [1]}, {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": [[1, 2], [1, 3]]}, {"$": "dict", "v": {"a": 1}},
    {"$": "defaultdict", "f": "eval", "v": []}, {"$": "defaultdict", "f": ["list"], "v": []},
    {"$": "deque", "max": "3", "v": []}, {"$": "deque", "max": -1, "v": []},
    {"$": "deque", "max": 1, "v": [1, 2]}, {"$": "deque", "v": []},
    {"$": "numpy", "d": "O", "v": ""}, {"$": "numpy", "d": "<f4", "v": "AAA="},
    {"$": "numpy", "d": "<f4,<f4", "v": ""}, {"$": "numpy", "d": "<V8", "v": ""},
    {"$": "numpy", "d": "(1000000000,)f8", "v": ""}, {"$": "numpy", "d": 4, "v": ""},
    {"$": "numpy", "d": "<m8[bogus]", "v": "AAAAAAAAAAA="},
    {"$": "dataclass", "n": "Position", "v": []}, {"$": "dataclass", "n": 3, "v": {}},
    {"$": "enum", "n": "Colour"}, {"$": "codec", "n": "pair"}, {"$": "str", "v": "/w=="},
]  # fmt: skip


@pytest.mark.parametrize("node", MALFORMED, ids=lambda n: str(n)[:40])
def test_malformed_nodes_are_named_by_their_path(node: Node) -> None:
    with pytest.raises(CorruptionError, match=r"^state\.a: "):
        decode_tree({"a": node}, path="state", codecs=CODECS)


@drawn(
    quick=60,
    slow=200,
    node=st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.text(max_size=4),
            st.sampled_from(["tuple", "dict", "numpy", "enum", "dataclass", "codec", "<f4"]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from(["$", "v", "n", "d", "f", "max", "i", "a"]), inner),
        ),
    ),
)
def test_arbitrary_json_is_decoded_or_refused_but_never_breaks(node: Node) -> None:
    try:
        decode_tree(node, codecs=CODECS)
    except (CorruptionError, MismatchError):
        pass
    except TypeError:  # a codec's own decode may reject what it is given
        assert "codec" in str(node)


def test_a_hostile_depth_is_refused() -> None:
    node: Node = None
    for _ in range(500):
        node = [node]
    with pytest.raises(CorruptionError, match="nested deeper"):
        decode_tree(node)


@pytest.mark.parametrize(
    ("node", "match"),
    [
        ({"$": "dataclass", "n": "Gone", "v": {}}, r"^p: .*dataclass 'Gone'.*not registered"),
        ({"$": "enum", "n": "Gone", "v": "A"}, r"^p: .*enum 'Gone'.*not registered"),
        ({"$": "codec", "n": "gone", "v": 1}, r"^p: .*codec 'gone'.*not registered"),
        ({"$": "dataclass", "n": "Position", "v": {"epoch": 1}}, r"^p: .*Position has the fields"),
        ({"$": "enum", "n": "Colour", "v": "BLUE"}, r"^p: .*Colour has no member BLUE"),
        ({"$": "enum", "n": "Level", "i": 9}, r"^p: .*Level has no member 9"),
    ],
)
def test_names_this_program_does_not_know(node: Node, match: str) -> None:
    with pytest.raises(MismatchError, match=match):
        decode_tree(node, path="p", codecs=CODECS)


def test_codecs_refuse_ambiguity() -> None:
    def make_class() -> type:
        @dataclass
        class Twin:
            a: int

        return Twin

    one, two = make_class(), make_class()
    with pytest.raises(ConfigError, match="Twin"):
        Codecs(dataclasses=[one, two])
    with pytest.raises(ConfigError, match="Twin"):
        Codecs(dataclasses=[one]).joined(Codecs(dataclasses=[two]))
    assert (
        Codecs(dataclasses=[one])
        .joined(Codecs(dataclasses=[one]))
        .dataclass_named(one.__qualname__)
    )
    with pytest.raises(ConfigError, match="is not a dataclass"):
        Codecs(dataclasses=[Pair])
    codec = Codec(name="a", type=Pair, encode=list, decode=tuple)
    with pytest.raises(ConfigError, match="one type"):
        Codecs(codecs=[codec, Codec(name="b", type=Pair, encode=list, decode=tuple)])
    # Equal names are not enough: the type must be the very one.
    with pytest.raises(PlacementError, match="Twin"):
        encode_tree(two(1), codecs=Codecs(dataclasses=[one]))


# Merging


def merged(*nodes: Node) -> Node:
    return merge_nodes([(f"rank {i}", node) for i, node in enumerate(nodes)], path="state")


def per_rank(**values: Node) -> Node:
    return {"$": "per_rank", "axes": ["dp"], "v": dict(values)}


def test_equal_nodes_merge_to_themselves() -> None:
    node = encode_tree({"a": [1, (2.5, {"b": None})], 3: {4}})
    assert merged(node, node, through_disk(node)) == node


def union(node: Node) -> Node:
    return {"$": "union", "v": node}


def test_unions_are_joined_and_keep_the_first_order() -> None:
    result = merged(union({"b": 1, "a": {"x": 1}}), union({"a": {"x": 1}, "c": 3}))
    assert list(result) == ["b", "a", "c"]  # type: ignore[arg-type]
    assert result == {"b": 1, "a": {"x": 1}, "c": 3}
    assert merged(union({}), union({"a": 1})) == {"a": 1}
    nested = merged(union({"a": union({"x": 1})}), union({"a": union({"y": 2}), "b": 0}))
    assert nested == {"a": {"x": 1, "y": 2}, "b": 0}
    assert merged([union({"a": 1})]) == [{"a": 1}], "no union reaches a manifest"
    assert merged(union({"a": 1}), union({"a": 1})) == {"a": 1}


def test_dicts_are_equal_in_any_order_and_ordered_dicts_are_not() -> None:
    assert merged({"a": 1, "b": 2}, {"b": 2, "a": 1}) == {"a": 1, "b": 2}
    one, two = Counter(a=1, b=2), Counter(b=2, a=1)
    assert merged(encode_tree(one), encode_tree(two)) == encode_tree(one)
    with pytest.raises(PlanError, match=r"different orders: rank 0 has a, b, rank 1 has b, a"):
        merged(encode_tree(OrderedDict(a=1, b=2)), encode_tree(OrderedDict(b=2, a=1)))


@pytest.mark.parametrize(
    "wrap", [dict, lambda d: {"$": "counter", "v": [[*pair] for pair in d.items()]}]
)
def test_a_plain_mapping_has_the_same_members_on_all_ranks(wrap: Callable[[Node], Node]) -> None:
    one, two = wrap({"a": 1, "b": 2}), wrap({"b": 2, "c": 3})
    lacking = r"^state\.x: .*rank 0 has a, which rank 1 lacks; rank 1 has c, which rank 0 lacks; "
    with pytest.raises(PlanError, match=lacking + ".*PerRank.*Union"):
        merged({"x": one}, {"x": two})
    with pytest.raises(PlanError, match="some ranks declare it a Union"):
        merged(union(one), one)
    if isinstance(one, dict) and "$" in one:
        expected: Node = {"$": "counter", "v": [["a", 1], ["b", 2], ["c", 3]]}
    else:
        expected = {"a": 1, "b": 2, "c": 3}
    assert merged(union(one), union(two)) == expected


def test_per_rank_maps_are_joined_wherever_they_are() -> None:
    for wrap in (
        lambda n: n,
        lambda n: [1, n],
        lambda n: {"$": "tuple", "v": [n]},
        lambda n: {"$": "dict", "v": [[3, n]]},
        lambda n: {"$": "dataclass", "n": "D", "v": {"a": n}},
    ):
        result = merged(wrap(per_rank(a=1)), wrap(per_rank(b=2)), wrap(per_rank(a=1)))
        assert result == wrap(per_rank(a=1, b=2))


def test_unions_with_any_keys_are_joined() -> None:
    def of(table: dict[object, object]) -> Node:
        return union(encode_tree(table))

    assert decode_tree(merged(of({1: "a", 2: "b"}), of({2: "b", 3: "c"}))) == {
        1: "a", 2: "b", 3: "c",
    }  # fmt: skip
    assert decode_tree(merged(of({"x": 0}), of({(1, 2): "b"}))) == {"x": 0, (1, 2): "b"}
    assert merged(of({}), of({"x": 0})) == {"x": 0}
    for one, two in ((1, True), (0.0, -0.0), (1, np.int64(1)), ((1,), (1.0,))):
        with pytest.raises(PlanError, match=r"^state: .*equal in Python"):
            merged(of({one: "a"}), of({two: "a"}))


CONFLICTS: list[tuple[Node, Node, str]] = [
    ({"a": {"b": 1}}, {"a": {"b": 2}}, r"state\.a\.b"),
    (1, True, "state"),
    (1, 1.0, "state"),
    (0.0, -0.0, "state"),
    ([1, 2], [1, 3], r"state\.1"),
    ([1], [1, 2], "state"),
    ([1], {"a": 1}, "state"),
    ({"a": 1}, {"$": "dict", "v": []}, "state"),
    ({"$": "dict", "v": []}, {"a": 1}, "state"),
    ({"$": "set", "v": [1]}, {"$": "set", "v": [2]}, "state"),
    ({"$": "bytes", "v": "YQ=="}, {"$": "bytes", "v": "Yg=="}, "state"),
    ({"$": "tensor", "k": "a"}, {"$": "tensor", "k": "b"}, "state"),
    ({"$": "transient"}, {"$": "tensor", "k": "b"}, "state"),
    (per_rank(a=1), per_rank(a=2), r"state\[a\]"),
    (per_rank(a=1), {"$": "per_rank", "axes": ["tp"], "v": {"b": 1}}, "state"),
    ({"$": "dataclass", "n": "D", "v": {"a": 1}}, {"$": "dataclass", "n": "D", "v": {"b": 1}},
     "state"),
    ({"$": "dataclass", "n": "D", "v": {"a": 1}}, {"$": "dataclass", "n": "E", "v": {"a": 1}},
     "state"),
    ({"$": "deque", "max": 1, "v": [1]}, {"$": "deque", "max": 2, "v": [1]}, "state"),
    ({"$": "dict", "v": [[1, 2]]}, {"$": "dict", "v": [[1, 3]]}, r"state\.1"),
    ("x" * 1000, "y" * 1000, "state"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two", "path"), CONFLICTS, ids=lambda v: str(v)[:30])
def test_differences_are_named_with_both_ranks_and_values(one: Node, two: Node, path: str) -> None:
    for nodes, labels in (
        ((one, two), ("rank 0", "rank 1")),
        ((one, one, two), ("rank 0, rank 1", "rank 2")),
    ):
        with pytest.raises(PlanError, match=rf"^{path}: .*PerRank.*Union") as e:
            merged(*nodes)
        assert all(label in str(e.value) for label in labels)
        assert len(str(e.value)) < 500


def test_many_equal_ranks_cost_one_look_each() -> None:
    big: Node = {str(i): i for i in range(1000)}
    nodes: list[Node] = [dict(big) for _ in range(64)]  # type: ignore[arg-type]
    assert merged(*map(union, nodes), union({"extra": 1})) == {**big, "extra": 1}  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="rank 3 and 60 more have 0, 1, 2, 3 and 996 more, which"):
        merged(*nodes, {"extra": 1})


def test_nobody_supplies_it() -> None:
    with pytest.raises(PlanError, match="state"):
        merged()


@pytest.mark.parametrize("encode", [encode_tree])
def test_numpy_scalars_keep_their_width(encode: Callable[..., Node]) -> None:
    for value in (np.float32(1), np.int64(1), np.float64(1), np.uint8(1)):
        back = decode_tree(through_disk(encode(value)))
        assert type(back) is type(value)

"""Values of all kinds: loaded by template, Stored() or load_all, they are what was saved."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from holdfast import (
    Checkpointer,
    Codec,
    Codecs,
    FromPart,
    HoldfastError,
    MismatchError,
    PerRank,
    PerRankValues,
    PlacementError,
    StorageError,
    Stored,
    Union,
)
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import node_bytes
from holdfast.format.versions import read_manifest
from holdfast.state.tensor_elements import TORCH_TO_NAME
from tests.drawn import drawn


class Phase(Enum):
    WARM = "warm"
    COLD = "cold"


class Level(IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Place:
    epoch: int
    name: str = ""


@dataclass
class Buffer:
    data: torch.Tensor
    notes: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    a: Any
    b: Any


class Ring:
    """A class of a user's own, known by a codec whose decoder looks at what it is given."""

    def __init__(self, data: torch.Tensor, at: int) -> None:
        assert data.ndim == 1
        assert data.numel() > at
        self.data, self.at = data, at


CODECS = Codecs(
    dataclasses=[Place, Buffer],
    enums=[Phase, Level],
    codecs=[
        Codec(name="pair", type=Pair, encode=lambda p: [p.a, p.b], decode=lambda v: Pair(*v)),
        Codec(name="ring", type=Ring, encode=lambda r: {"data": r.data, "at": r.at},
              decode=lambda v: Ring(v["data"], v["at"])),
    ],
)  # fmt: skip
DTYPE_LIST = list(TORCH_TO_NAME)


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes, whatever its strides and dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in type, order, bits of floats, dtype, shape and bytes, all the way down."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
            and raw(a) == raw(b)
        )  # fmt: skip
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        noted = getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        return factory and noted and len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )  # fmt: skip
    if isinstance(a, list | tuple | deque):
        lengths = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return lengths and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Buffer | Ring):
        return same(vars(a), vars(b))
    return bool(a == b)


def blank(tree: Any) -> Any:
    """A twin: the same structure, its tensors other memory with other contents."""
    if isinstance(tree, torch.Tensor):
        return torch.full(tree.shape, True, dtype=torch.bool) if tree.dtype == torch.bool else (
            torch.zeros(tree.shape, dtype=torch.float32).to(tree.dtype)
        )  # fmt: skip
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, {k: blank(v) for k, v in tree.items()})
    if isinstance(tree, Counter):
        return Counter({k: blank(v) for k, v in tree.items()})
    if isinstance(tree, dict):
        return type(tree)((k, blank(v)) for k, v in tree.items())
    if isinstance(tree, deque):
        return deque(map(blank, tree), maxlen=tree.maxlen)
    if isinstance(tree, Pair):
        return Pair(blank(tree.a), blank(tree.b))
    if isinstance(tree, list | tuple):
        return type(tree)(map(blank, tree))
    if isinstance(tree, Buffer):
        return Buffer(blank(tree.data), blank(tree.notes))
    if isinstance(tree, Ring):
        return Ring(blank(tree.data), 0)
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for v in tree.values() for t in tensors_of(v)]
    if isinstance(tree, list | tuple | deque):
        return [t for v in tree for t in tensors_of(v)]
    return tensors_of(vars(tree)) if isinstance(tree, Buffer | Ring) else []


def node_of(checkpointer: Checkpointer, step: int) -> bytes:
    """The stored tree, as bytes."""
    _, manifest = read_manifest(checkpointer.storage, f"iter_{step:07d}")
    return node_bytes(manifest.parts["x"])


def round_trip(root: Path, tree: Any) -> None:
    """Save → load in three ways → save again; nothing differs."""
    checkpointer = Checkpointer(root, codecs=CODECS)
    checkpointer.save(1, {"x": tree}, overwrite=True)
    stored = checkpointer.load({"x": Stored()}, step=1).values["x"]
    assert same(tree, stored), stored
    everything = checkpointer.load_all(step=1).values["x"]
    assert same(tree, everything), everything
    twin = blank(tree)
    loaded = checkpointer.load({"x": twin}, step=1).values["x"]
    assert same(tree, loaded), loaded
    # What was loaded is in the twin's own tensors, which were not replaced.
    held = tensors_of(twin)
    assert len(held) == len(tensors_of(tree))
    assert all(map(same, held, tensors_of(tree)))
    for again in (stored, everything, loaded):
        checkpointer.save(2, {"x": again}, overwrite=True)
        assert node_of(checkpointer, 2) == node_of(checkpointer, 1)
        assert same(tree, checkpointer.load({"x": Stored()}, step=2).values["x"])


def of_tensordict() -> OrderedDict[str, Any]:
    """What TensorDict notes at its state dicts."""
    made: Any = OrderedDict(a=torch.ones(2))
    noted = {
        "batch_size": torch.Size([2]),
        "device": torch.device("cpu"),
        "_non_tensor": {"n": "x"},
    }
    made._metadata = OrderedDict({"": noted})
    return made


# One by one

T = torch.arange(6.0).view(2, 3)
TREES: dict[str, Callable[[], Any]] = {
    "enum keys": lambda: {Phase.WARM: T + 0, Phase.COLD: {"n": 1}, Level.LOW: T + 1},
    "dataclass keys": lambda: {Place(1): T + 0, Place(2, "x"): [T + 1]},
    "defaultdict": lambda: defaultdict(list, a=T + 0, b=[T + 1]),
    "defaultdict without": lambda: defaultdict(None, {1: T + 0}),
    "ordered": lambda: OrderedDict(b=T + 0, a=OrderedDict(z=T + 1, y=3)),
    "state dict": lambda: {"s": torch.nn.BatchNorm1d(2).state_dict(),
                           "t": OrderedDict(torch.nn.Linear(2, 1).state_dict()),
                           "d": of_tensordict()},
    "counter": lambda: Counter({"a": 3, 7: 2}),
    "counter of tensors": lambda: Counter({"a": T + 0}),
    "deque": lambda: deque([T + 0, {"x": T + 1}, 3], maxlen=4),
    "tuples": lambda: (T + 0, [(T + 1, "x"), ()], ((T + 2,),)),
    "namedtuple": lambda: {"p": Pair(T + 0, [1, Pair(T + 1, None)])},
    "dataclass": lambda: [Buffer(T + 0, {"k": T + 1, "n": (1, 2)}), Buffer(T + 2)],
    "codec": lambda: {"r": Ring(torch.arange(1.0, 9.0), 3), "s": (Ring(torch.ones(4), 0),)},
    "codec in dataclass": lambda: Buffer(T + 0, {"r": Ring(torch.ones(4), 2)}),
    "odd keys": lambda: {1: T + 0, "2": T + 1, (3, "x"): T + 2, None: [T + 3], 2.5: {b"y": T + 4},
                         np.int16(9): T + 5, True and "t": 1, frozenset({1}): T + 6},
    "dict in list": lambda: [{"a": T + 0}, {"b": 1, "c": T + 1}],
    "empty": lambda: {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": deque(), "t": T + 0},
    "zeros": lambda: {"a": torch.empty(0), "b": torch.empty(2, 0, 3, dtype=torch.int8),
                      "c": torch.tensor(3.0), "d": torch.tensor([], dtype=torch.bool)},
    "arrays": lambda: {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "z": np.array(5),
                       "e": np.zeros((0, 3), dtype=np.uint8), "b": np.arange(4, dtype=">f8"),
                       "c": np.array([1 + 2j], dtype=">c8"), "s": np.arange(10)[::-2],
                       "u": np.array([2**64 - 1], dtype=np.uint64), "h": np.float16([-0.0, 1]),
                       "t": np.array(["2026-01-02", "NaT"], dtype="M8[ns]"),
                       "d": np.array([[3]], dtype=">m8[s]"), "o": np.array([True]),
                       "z2": np.array("2020", dtype="M8[Y]"), "i": np.arange(3, dtype=">u2")},
    "strides": lambda: {"t": torch.randn(3, 4).t(), "s": torch.randn(8)[::3],
                        "c": torch.randn(3, dtype=torch.complex64).conj(),
                        "n": torch.randn(3, dtype=torch.complex64).conj().imag,
                        "p": torch.randn(2, 3, 4).permute(2, 0, 1)},
    "nan payloads": lambda: torch.tensor([0x7FC00001, -1, 0x7F800001, -(2**31)],
                                         dtype=torch.int32).view(torch.float32),
    "scalars": lambda: {"n": np.float64("nan"), "d": np.datetime64("2020-01-01"), "i": 10**400,
                        "r": range(3, 9, 2), "s": slice(1, None), "b": bytearray(b"x")},
}  # fmt: skip


@pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())
def test_what_is_saved_loads_with_type_and_order(tmp_path: Path, make: Callable[[], Any]) -> None:
    round_trip(tmp_path, make())
    round_trip(tmp_path / "below", {"in": [make()], "also": (make(),)})


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    assert set(TORCH_TO_NAME.values()) == set(DTYPES)
    generator = torch.Generator().manual_seed(1)
    tree = {}
    for dtype in DTYPE_LIST:
        data = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        if dtype == torch.bool:
            data = data % 2
        tree[str(dtype)] = data.view(dtype).view(2, 3)
        tree[f"{dtype} 0-d"] = data.view(dtype)[0].clone()
    round_trip(tmp_path, tree)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.ma.masked_array([1, 2], mask=[0, 1]), "MaskedArray.*mask"),
        (np.matrix([[1]]), "matrix"),
        (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "recarray"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype"),
        (np.array([None]), "object"),
        (np.array(["a"]), "<U1"),
        (np.zeros(2, dtype=np.longdouble), "longdouble|float128"),
        (np.array([b"ab"]), "S2"),
        (np.random.default_rng(1), r"RNG\(generators="),
        (np.random.RandomState(1), r"RNG\(generators="),
        (random.Random(1), r"RNG\(generators="),
        (torch.Generator(), r"RNG\(generators="),
        ({1.0: 0, float("nan"): 1, float("nan"): 2}, "same stored form"),
    ],
    ids=lambda each: type(each).__name__ if " at 0x" in str(each) else str(each),
)
def test_what_would_lose_something_is_refused_by_path(
    tmp_path: Path, value: object, why: str
) -> None:
    with pytest.raises(PlacementError, match=rf"(?s)^x\.a.*{why}"):
        Checkpointer(tmp_path).save(1, {"x": {"a": value}})


def test_memmaps_and_codecs_of_array_types(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", dtype=np.float32, mode="w+", shape=(3,))
    with pytest.raises(PlacementError, match=r"x\.m: a numpy\.memmap .*np\.asarray"):
        Checkpointer(tmp_path / "a").save(1, {"x": {"m": mapped}})
    codec = Codec(
        name="masked",
        type=np.ma.MaskedArray,
        encode=lambda m: {"data": m.data, "mask": np.ma.getmaskarray(m)},
        decode=lambda v: np.ma.MaskedArray(v["data"], mask=v["mask"]),
    )
    checkpointer = Checkpointer(tmp_path / "b", codecs=Codecs(codecs=[codec]))
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    checkpointer.save(1, {"x": {"m": masked}})
    loaded = checkpointer.load({"x": Stored()}).values["x"]["m"]
    assert type(loaded) is np.ma.MaskedArray
    assert loaded.mask.tolist() == [False, True]


def test_a_cycle_through_markers_is_refused(tmp_path: Path) -> None:
    tree: dict[str, object] = {}
    tree["again"] = PerRank(tree)
    with pytest.raises(PlacementError, match="contains itself"):
        Checkpointer(tmp_path).save(1, {"x": tree})
    nested: dict[str, object] = {}
    nested["again"] = Union(nested)
    with pytest.raises(PlacementError, match="contains itself"):
        Checkpointer(tmp_path).save(1, {"x": nested})
    with pytest.raises(PlacementError, match="Union"):
        Union([1])  # type: ignore[arg-type]


# Keys

ALIKE: list[object] = [1, True, 1.0, np.int64(1), np.float32(1), Level.LOW, 1 + 0j]
ZEROS: list[object] = [0, False, 0.0, -0.0, np.float64(-0.0)]


@pytest.mark.parametrize(
    "keys", [ALIKE, ZEROS, [(1, "x"), (True, "x")], [(0.0,), (-0.0,)]], ids=repr
)
def test_keys_that_are_equal_in_python_are_told_apart(tmp_path: Path, keys: list[Any]) -> None:
    checkpointer = Checkpointer(tmp_path, codecs=CODECS)
    w = torch.ones(2)
    for step, key in enumerate(keys):
        checkpointer.save(step, {"x": {key: w}, "y": {"z": {key: 1}}})
        for loaded in (checkpointer.load({"x": Stored()}), checkpointer.load({"x": {key: w}})):
            (back,) = loaded.values["x"]
            assert same(back, key), step
    for (step, _), (_, asked) in itertools.permutations(enumerate(keys), 2):
        for allow_missing in ([], ["x.*"]):
            with pytest.raises(MismatchError, match=r"x.*equal, but they are not the same"):
                checkpointer.load({"x": {asked: w}}, step=step, allow_missing=allow_missing)


def test_nan_keys_find_their_values(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": {float("nan"): torch.ones(2)}})
    target = torch.zeros(2)
    loaded = checkpointer.load({"x": {float("nan"): target}}).values["x"]
    assert target.tolist() == [1, 1]
    assert len(loaded) == 1


def test_a_key_of_a_subclass_of_str_is_no_text(tmp_path: Path) -> None:
    class Name(str):
        __slots__ = ()

    with pytest.raises(PlacementError, match="Name"):
        Checkpointer(tmp_path).save(1, {"x": {Name("a"): torch.ones(1)}})
    Checkpointer(tmp_path).save(1, {"x": {"a": torch.ones(1)}})
    with pytest.raises(MismatchError, match=r"lacks.*x\.a"):
        Checkpointer(tmp_path).load({"x": {Name("a"): torch.ones(1)}})


# What a template leaves out


def test_entries_a_template_does_not_name_come_back_at_any_depth(tmp_path: Path) -> None:
    def tree() -> dict[str, Any]:
        return {
            "l": [{"a": T + 0, "b": T + 1, "n": 1}],
            "d": Buffer(T + 2, {"x": T + 3, "y": T + 4}),
            "p": PerRank({"q": (T + 5, {"r": T + 6, "s": T + 7})}),
            "u": Union({"m": T + 8, "n": T + 9}),
        }

    checkpointer = Checkpointer(tmp_path, codecs=CODECS)
    checkpointer.save(1, {"x": tree()})
    part = tree()
    del part["l"][0]["b"], part["d"].notes["y"], part["p"].tree["q"][1]["s"], part["u"].mapping["n"]
    whole = tree()
    whole["p"], whole["u"] = whole["p"].tree, whole["u"].mapping
    loaded = checkpointer.load({"x": part}).values["x"]
    assert list(loaded) == list(whole)
    assert same(loaded["l"][0]["b"], T + 1)
    assert same(loaded["d"].notes["y"], T + 4)
    assert same(loaded["p"]["q"][1]["s"], T + 7)
    assert same(loaded["u"]["n"], T + 9)


def test_a_template_of_another_kind_is_named(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, codecs=CODECS)
    checkpointer.save(1, {"x": {"a": Buffer(T + 0), "b": [T + 1], "c": {"k": T + 2}}})
    for name, template, why in (
        ("a", Ring(torch.ones(3), 1), "has a ring here, the checkpoint a dataclass"),
        ("b", Buffer(T + 0), "has a Buffer here, the checkpoint a list of 1"),
        ("c", [T + 0], "sequence of 1 here, the checkpoint a mapping"),
        ("c", deque([T + 0]), "sequence of 1 here, the checkpoint a mapping"),
        ("b", {"k": T + 0}, "has a mapping here, the checkpoint a list"),
    ):
        with pytest.raises(MismatchError, match=rf"x\.{name}: .*{why}"):
            checkpointer.load({"x": {name: template}})


def test_codecs_see_tensors_only_when_they_are_there(tmp_path: Path) -> None:
    """A decoder that checks what it is given is not called with empty tensors before the read."""
    seen: list[float] = []

    def decode(value: Any) -> Ring:
        seen.append(float(value["data"].sum()))
        return Ring(value["data"], value["at"])

    codec = Codec(name="ring", type=Ring, encode=lambda r: {"data": r.data, "at": r.at},
                  decode=decode)  # fmt: skip
    checkpointer = Checkpointer(tmp_path, codecs=Codecs(codecs=[codec]))
    checkpointer.save(1, {"x": [Ring(torch.ones(4), 0)]})
    checkpointer.load({"x": Stored()})
    checkpointer.load({"x": [Ring(torch.zeros(4), 0)]})
    assert seen == [4.0, 4.0]


# Casts


def test_a_refused_cast_is_named_and_touches_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": {"c": torch.ones(2, dtype=torch.complex64), "n": torch.tensor(5)}})
    target = torch.zeros(2)
    for cast in (True, False):
        with pytest.raises(MismatchError, match=r"x\.c: .*F32.*C64; F32 has no imaginary part"):
            checkpointer.load({"x": {"c": target}}, cast=cast)
    with pytest.raises(MismatchError, match=r"x\.n: .*F32.*I64.*exactly.*Stored\(\)"):
        checkpointer.load({"x": {"n": torch.tensor(0.0)}}, cast=True)
    assert target.eq(0).all()
    wide = torch.zeros(2, dtype=torch.complex128)
    assert checkpointer.load({"x": {"c": wide}}, cast=True).cast == ("x.c",)
    assert wide.tolist() == [1, 1]


# Without templates


def test_everything_of_a_checkpoint_by_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    checkpointer = Checkpointer(tmp_path, codecs=CODECS)
    with pytest.raises(StorageError, match="no committed checkpoint"):
        checkpointer.inspect()
    state = {
        "model": model,
        "same": {"w": model.weight.detach(), "n": (1, 2)},
        "own": PerRank({"seed": 3}, axes=("dp", "tp")),
        "phase": Phase.COLD,
    }
    checkpointer.save(3, state)
    checkpointer.save(4, {"other": 1})
    parts = checkpointer.inspect(3).parts
    assert list(parts) == list(state)
    assert (parts["model"].num_tensors, parts["model"].nbytes) == (2, 9 * 4)
    assert (parts["same"].num_tensors, parts["same"].num_values) == (1, 2)
    assert parts["own"].kind == "value per dp,tp"
    assert list(checkpointer.inspect().parts) == ["other"]
    report = checkpointer.load_all(step=3)
    assert list(report.values) == list(state)
    loaded: Any = report.values
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert loaded["same"]["w"] is loaded["model"]["weight"], "ties stay"
    assert loaded["own"] == PerRankValues(axes=("dp", "tp"), values={"dp=0,tp=0": {"seed": 3}})
    assert loaded["phase"] is Phase.COLD
    assert report.not_requested == ()
    with pytest.raises(MismatchError, match="Phase"):
        Checkpointer(tmp_path).load_all(step=3)
    with pytest.raises(StorageError):
        checkpointer.inspect(9)


# Generated

FLOATS = st.floats(width=64) | st.sampled_from([math.nan, -0.0, math.inf, 5e-324])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**80), 2**80), FLOATS,
    st.complex_numbers(allow_nan=True), st.text(max_size=4), st.binary(max_size=4),
    st.sampled_from([Phase.WARM, Level.LOW, Place(1), np.float16(-0.0), np.uint64(2**63),
                     np.bool_(True), np.complex64(1j), np.datetime64("2026-01-02"), range(3),
                     slice(1, 2), frozenset({1, "a"}), Counter("aab"), np.str_("x")]),
)  # fmt: skip
KEYS = st.one_of(
    st.text(max_size=3), st.integers(-2, 2), st.booleans(), st.none(), st.sampled_from(
        [Phase.WARM, Phase.COLD, Place(1), Place(2), (1, "x"), 0.5, -0.0, np.int8(1), b"k", "$v"]),
).filter(lambda key: key == "" or "." not in str(key))  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPE_LIST))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.binary(min_size=64, max_size=64)) * (27 * 16 // 64 + 1)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
    tensor = (flat % 2 if dtype == torch.bool else flat).clone().view(dtype).view(shape)
    if draw(st.booleans()):
        tensor = tensor.transpose(0, -1) if tensor.ndim > 1 else tensor
    if dtype.is_complex and dtype != torch.complex32 and draw(st.booleans()):
        tensor = tensor.conj()
    return tensor


LEAVES = st.one_of(SCALARS, tensors(), st.builds(lambda n: np.arange(n, dtype=">i2"),
                                                 st.integers(0, 3)))  # fmt: skip
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab$", max_size=2), inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(dict, d)),
        st.lists(inner, max_size=3).map(lambda v: deque(v, maxlen=3)),
        st.builds(Pair, inner, inner),
        st.builds(Buffer, tensors(), st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)),
    ),
    max_leaves=8,
)  # fmt: skip


@drawn(quick=8, slow=60, tree=NESTED)
def test_generated_trees_round_trip(tmp_path: Path, tree: Any) -> None:
    try:
        round_trip(tmp_path, tree)
    except PlacementError as error:
        # The one thing that is refused: two tensors of which the paths are the same (1 and "1").
        if "have this key" not in str(error):
            raise


def test_a_part_may_be_none(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": None, "y": {"z": None}})
    for state in ({"x": None, "y": {"z": None}}, {"x": Stored(), "y": Stored()}):
        report = checkpointer.load(state)
        assert report.values == {"x": None, "y": {"z": None}}
        assert (report.missing, report.not_requested) == ((), ())
    assert checkpointer.load({"v": FromPart("y.z", 3)}).values == {"v": None}
    for absent in ("w", "x.z", "y.w"):
        with pytest.raises(MismatchError, match="the checkpoint lacks"):
            checkpointer.load({"v": FromPart(absent, 3)})
        with pytest.raises(MismatchError, match="the checkpoint lacks"):
            checkpointer.load({absent: None})


class Wound:
    """A user's type whose codec can fail."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("error", [KeyError("k"), TypeError("t"), RuntimeError("r")])
def test_a_failing_codec_is_named_with_its_path_and_is_no_damage(
    tmp_path: Path, error: Exception
) -> None:
    def failing(value: Any) -> Any:
        raise error

    def with_codec(**of: Any) -> Checkpointer:
        how = {"encode": lambda w: {"v": w.value}, "decode": lambda v: Wound(v["v"])} | of
        codec = Codec(name="wound", type=Wound, **how)
        return Checkpointer(tmp_path, codecs=Codecs(codecs=[codec]))

    state = {"x": {"a": [Wound(torch.ones(2))]}}
    with pytest.raises(
        PlacementError, match=r"x\.a\.0: the codec 'wound' cannot encode this Wound"
    ):
        with_codec(encode=failing).save(1, state)
    with_codec().save(1, state)
    with_codec().save(2, state)
    broken = with_codec(decode=failing)
    for load in (
        lambda: broken.load(state, max_fallbacks=None),
        lambda: broken.load({"x": Stored()}, max_fallbacks=None),
        lambda: broken.load_all(max_fallbacks=None),
    ):
        with pytest.raises(MismatchError, match=r"x\.a\.0: the codec 'wound' cannot decode"):
            load()


def test_names_that_are_no_text_are_refused_where_they_name_tensors(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(PlacementError, match=r"x\.\\ud800.*surrogate"):
        checkpointer.save(1, {"x": {"\ud800": torch.ones(1)}})
    with pytest.raises(HoldfastError, match=r"\\ud800.*surrogate"):
        checkpointer.save(1, {"\ud800": 1})
    checkpointer.save(1, {"x": {"\ud800": 1, "é": torch.ones(1)}})
    assert list(checkpointer.load({"x": Stored()}).values["x"]) == ["\ud800", "é"]

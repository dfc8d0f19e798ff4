"""Name maps against numpy: every box of what a map makes, and back.

Prevents that a converted model has a permuted head, a swapped gate or a lost layer, and that a rule
that does nothing goes unnoticed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.arrays.boxes import Box
from holdfast.errors import ConfigError, MismatchError, PlacementError
from holdfast.foreign import catalog as catalog_module
from holdfast.foreign import computed_chunks, tensor_expressions
from holdfast.foreign.catalog import FileBytes, HeldBytes, OpenFiles, TensorReader
from holdfast.foreign.computed_chunks import ComputedBytes, grid
from holdfast.foreign.name_map import NameMap
from holdfast.foreign.rules import (
    MapRule,
    absent,
    cast,
    drop,
    join,
    pad,
    rename,
    rotary,
    rule_of,
    split,
    stack,
    tie,
    transpose,
    trim,
    unstack,
    untie,
)
from holdfast.foreign.variables import Variables
from holdfast.format.values import node_bytes, tensor_keys, tensor_node
from tests.foreign.name_map_oracle import Array, assert_equal, catalog_of, model_of, read

# ---- random maps on random catalogs ----


@dataclass
class Family:
    """Tensors of one shape: `{name}.{i}.w` for each array, or the only one, `{name}.w`."""

    name: str
    arrays: list[Array]
    numbered: bool = True

    @property
    def pattern(self) -> str:
        return f"{self.name}.{{i:int}}.w" if self.numbered else f"{self.name}.w"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    def named(self) -> dict[str, Array]:
        if not self.numbered:
            return {f"{self.name}.w": self.arrays[0]}
        return {f"{self.name}.{i}.w": array for i, array in enumerate(self.arrays)}


class RandomMap:
    """A random map and, made with numpy alone, what it must give."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.count = 0
        self.dtype = rng.choice(["f4", "f8", "u1", "c16", "i2"])
        self.families = [self.random_family() for _ in range(rng.integers(2, 5))]
        self.before = self.named()

    def random_family(self) -> Family:
        shape = tuple(self.rng.choice([1, 2, 4, 6, 12], size=self.rng.integers(1, 4)).tolist())
        arrays = [self.random_array(shape) for _ in range(self.rng.integers(1, 4))]
        return Family(self.new_name(), arrays)

    def random_array(self, shape: tuple[int, ...]) -> Array:
        codes = self.rng.integers(0, 256, size=math.prod(shape) * np.dtype(self.dtype).itemsize)
        return codes.astype(np.uint8).view(self.dtype).reshape(shape)

    def new_name(self) -> str:
        self.count += 1
        return f"f{self.count}"

    def named(self) -> dict[str, Array]:
        return {name: array for family in self.families for name, array in family.named().items()}

    def stage(self) -> NameMap:
        rules: list[MapRule] = []
        after: list[Family] = []
        waiting = list(self.families)
        while waiting:
            family = waiting.pop()
            makers: list[Callable[[Family, list[Family]], tuple[MapRule, list[Family]] | None]] = [
                self.rename, self.transpose, self.rotary, self.split, self.join, self.stack,
                self.pad,
            ]  # fmt: skip
            made = None
            while made is None:
                made = makers[self.rng.integers(len(makers))](family, waiting)
            rules.append(made[0])
            after += made[1]
        self.families = after
        return NameMap(rules)

    def rename(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]]:
        new = Family(self.new_name(), family.arrays, family.numbered)
        return rename(family.pattern, new.pattern), [new]

    def transpose(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]]:
        dims = self.rng.permutation(len(family.shape)).tolist()
        new = Family(
            self.new_name(), [array.transpose(dims) for array in family.arrays], family.numbered
        )
        return transpose(family.pattern, new.pattern, dims=dims), [new]

    def rotary(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]] | None:
        dims = [dim for dim, size in enumerate(family.shape) if size % 2 == 0]
        if not dims:
            return None
        dim = dims[self.rng.integers(len(dims))]
        size = family.shape[dim]
        head_dim = self.rng.choice([n for n in (2, 4, 6, 12) if size % n == 0])
        turned = int(self.rng.choice(range(2, head_dim + 1, 2)))
        order = []
        to_half = bool(self.rng.integers(2))
        for head in range(0, size, head_dim):
            pairs = [head + i for i in (*range(0, turned, 2), *range(1, turned, 2))]
            order += pairs if to_half else [0] * turned
            if not to_half:
                for at, source in enumerate(pairs):
                    order[source] = head + at
            order += range(head + turned, head + head_dim)
        new = Family(
            self.new_name(), [array.take(order, axis=dim) for array in family.arrays],
            family.numbered,
        )  # fmt: skip
        name = "interleaved-to-half" if to_half else "half-to-interleaved"
        settings = {"dim": dim, "head_dim": int(head_dim)}
        if turned < head_dim or self.rng.integers(2):
            settings["rotary_dim"] = turned
        return rotary(family.pattern, new.pattern, order=name, **settings), [new]

    def pad(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]]:
        dim = int(self.rng.integers(len(family.shape)))
        before = family.shape[dim]
        after = before + int(self.rng.integers(0, 7))
        edges = [(0, after - before if d == dim else 0) for d in range(len(family.shape))]
        arrays = [np.pad(array, edges) for array in family.arrays]
        new = Family(self.new_name(), arrays, family.numbered)
        return pad(family.pattern, new.pattern, dim=dim, unpadded=before, padded=after), [new]

    def split(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]] | None:
        dim = int(self.rng.integers(len(family.shape)))
        size = family.shape[dim]
        groups = int(self.rng.choice([n for n in (1, 2, 3) if size % n == 0]))
        rest = size // groups
        shares = [[1], [1, 1], [1, 2], [1, 0, 1], [3, 1, 2]][self.rng.integers(5)]
        if rest % sum(shares):
            return None
        unit = rest // sum(shares)
        edges = np.cumsum([0, *shares]) * unit
        news = [Family(self.new_name(), [], family.numbered) for _ in shares]
        for array in family.arrays:
            for new, start, stop in zip(news, edges[:-1], edges[1:], strict=True):
                index = [g * rest + i for g in range(groups) for i in range(start, stop)]
                new.arrays.append(array.take(np.array(index, dtype=int), axis=dim))
        settings = {"groups": groups} if groups > 1 or self.rng.integers(2) else {}
        patterns = [new.pattern for new in news]
        return split(family.pattern, patterns, dim=dim, shares=shares, **settings), news

    def join(self, family: Family, waiting: list[Family]) -> tuple[MapRule, list[Family]] | None:
        for other in waiting:
            if (other.numbered, len(other.arrays), len(other.shape)) != (
                family.numbered, len(family.arrays), len(family.shape),
            ):  # fmt: skip
                continue
            differing = [d for d, n in enumerate(family.shape) if other.shape[d] != n]
            if len(differing) > 1:
                continue
            dim = differing[0] if differing else 0
            waiting.remove(other)
            sizes = [family.shape[dim], other.shape[dim]]
            groups = int(self.rng.choice([n for n in (1, 2) if all(s % n == 0 for s in sizes)]))
            arrays = []
            for pair in zip(family.arrays, other.arrays, strict=True):
                parts = [part for g in range(groups) for a in pair
                         for part in [np.split(a, groups, axis=dim)[g]]]  # fmt: skip
                arrays.append(np.concatenate(parts, axis=dim))
            new = Family(self.new_name(), arrays, family.numbered)
            settings: dict[str, Any] = {"groups": groups} if groups > 1 else {}
            rule = join(
                [family.pattern, other.pattern], new.pattern, dim=dim, shares=sizes, **settings
            )
            return rule, [new]
        return None

    def stack(self, family: Family, _: list[Family]) -> tuple[MapRule, list[Family]] | None:
        new = Family(self.new_name(), [], not family.numbered)
        if family.numbered:
            dim = int(self.rng.integers(len(family.shape) + 1))
            new.arrays = [np.stack(family.arrays, axis=dim)]
            return stack(family.pattern, new.pattern, over="i", dim=dim), [new]
        dim = int(self.rng.integers(len(family.shape)))
        if family.shape[dim] == 0 or len(family.shape) == 1:
            return None
        new.arrays = [family.arrays[0].take(i, axis=dim) for i in range(family.shape[dim])]
        return unstack(family.pattern, new.pattern, over="i", dim=dim), [new]


@pytest.fixture(params=["as it is", "many runs", "tiny pieces"])
def thresholds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors take the ways of large ones, too."""
    if request.param != "as it is":
        monkeypatch.setattr(catalog_module, "_SMALL_NBYTES", 0)
        monkeypatch.setattr(computed_chunks, "_CHUNK_NBYTES", 64)
        monkeypatch.setattr(computed_chunks, "_PIECE_NBYTES", 32)
    if request.param == "tiny pieces":
        monkeypatch.setattr(tensor_expressions, "_MANY_RUNS", 1)


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))]
)
def test_a_random_map_makes_what_numpy_makes_and_its_inverse_undoes_it(
    seed: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(seed)
    random_map = RandomMap(rng)
    name_map = random_map.stage()
    for _ in range(rng.integers(3)):
        name_map = name_map.then(random_map.stage())
    catalog = catalog_of(
        tmp_path, random_map.before, cuts=int(rng.integers(1, 4)), held=bool(rng.integers(2))
    )
    mapped = name_map.apply(catalog).catalog
    expected = random_map.named()
    assert_equal(model_of(mapped), expected)
    for name, array in expected.items():
        for _ in range(3):
            low = [int(rng.integers(n + 1)) for n in array.shape]
            size = [int(rng.integers(n - o + 1)) for n, o in zip(array.shape, low, strict=True)]
            box = Box(tuple(low), tuple(size))
            part = array[box.relative_to((0,) * array.ndim)]
            assert read(mapped, f"model.{name}", box).tobytes() == part.tobytes()
        for chunk in mapped.tensors[f"model.{name}"].chunks:
            check_ranges(
                chunk.payload, array[chunk.box.relative_to((0,) * array.ndim)], mapped, rng
            )
    back = name_map.inverse().apply(mapped).catalog
    assert_equal(model_of(back), random_map.before)


def random_pattern(rng: random.Random, kinds: Mapping[str, str]) -> str:
    """The wildcards in any order, with text between some of them."""
    pieces = []
    for name in rng.sample(list(kinds), len(kinds)):
        pieces += [rng.choice("abc")] * (rng.random() < 0.4)
        pieces.append(f"{{{name}:{kinds[name]}}}" if kinds[name] != "name" else f"{{{name}}}")
    pieces += [rng.choice("abz")] * (rng.random() < 0.5)
    return rng.choice("._").join(pieces)


def test_an_inverse_gives_the_names_back_or_the_map_says_that_it_does_not(tmp_path: Path) -> None:
    """X5: `{a:path}.{b:path}` to `{b}.{a}`, and a kept name like those that were made.

    Each was undone to other names, silently.
    """
    outcomes: Counter[str] = Counter()
    for seed in range(500):
        rng = random.Random(seed)
        words = ["a", "b", "c", "0", "1", "a_b"]
        names = {".".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(4)}
        model = {name: np.array([i], dtype="u1") for i, name in enumerate(sorted(names))}
        rules = []
        for _ in range(rng.randint(1, 2)):
            wildcards = "xy"[: rng.choice((1, 2))]
            kinds = {each: rng.choice(["path", "path", "name", "int"]) for each in wildcards}
            patterns = [random_pattern(rng, kinds) for _ in range(2)]
            rules.append(rename(*patterns, optional=True))
        name_map = NameMap(rules, unmatched="keep")
        try:
            mapped = name_map.apply(catalog_of(tmp_path, model, held=True))
            back = name_map.inverse().apply(mapped.catalog).catalog
        except ConfigError:
            outcomes["refused"] += 1
            continue
        is_undone = model_of(back) == model
        assert is_undone == (not mapped.report.not_undone), (seed, mapped.report.lines())
        assert mapped.report.not_undone == list(mapped.catalog.left_out)
        outcomes["undone" if is_undone else "stated"] += bool(mapped.report.changes)
    assert min(outcomes[each] for each in ("undone", "stated", "refused")) > 2, outcomes
    twice = NameMap([rename("{a:path}.{b:path}", "{b}.{a}")], name="swap")
    mapped = twice.apply(catalog_of(tmp_path, {"x.y.z": np.zeros(1)}, held=True))
    assert mapped.report.not_undone == [
        "swap loses the names that were: its inverse would make y.z.x of z.x.y, which was x.y.z"
    ]


def check_ranges(payload: Any, array: Array, catalog: Any, rng: np.random.Generator) -> None:
    """Any range of a chunk's bytes, also one that starts within an element."""
    content = np.ascontiguousarray(array).tobytes()
    start = int(rng.integers(len(content) + 1))
    out = bytearray(int(rng.integers(len(content) - start + 1)))
    with OpenFiles(catalog.storage) as files:
        payload.readinto(memoryview(out), start=start, files=files)
    assert out == content[start : start + len(out)]


# ---- what stays in files ----


def payload_kinds(catalog: Any, key: str) -> set[type]:
    return {type(chunk.payload) for chunk in catalog.tensors[key].chunks}


def test_a_rearranged_tensor_remains_ranges_of_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = ("q", "k", "v", "gate", "up", "old")
    model = {f"{i}.{name}": rng.normal(size=(8, 4)) for i in range(2) for name in names}
    model |= {"fused": rng.normal(size=(12, 4)), "layers": rng.normal(size=(3, 4, 2))}
    name_map = NameMap([
        join(["{i}.q", "{i}.k", "{i}.v"], "{i}.qkv", groups=2),
        join(["{i}.gate", "{i}.up"], "{i}.fc1", dim=1),
        stack("{i:int}.old", "new", over="i", dim=1),
        split("fused", ["a", "b"], shares=[1, 2]),
        unstack("layers", "layer.{i}", over="i"),
    ])  # fmt: skip
    mapped = name_map.apply(catalog_of(tmp_path, model, cuts=2)).catalog
    for key in mapped.tensors:
        assert payload_kinds(mapped, key) == {FileBytes}, key
    assert (model_of(mapped)["1.fc1"] == np.hstack([model["1.gate"], model["1.up"]])).all()


def test_a_transposed_tensor_is_computed_in_chunks_of_equal_parts(tmp_path: Path) -> None:
    array = np.arange(2048 * 1024, dtype="<f4").reshape(2048, 1024)
    catalog = catalog_of(tmp_path, {"w": array})
    mapped = NameMap([transpose("w")]).apply(catalog).catalog
    assert payload_kinds(mapped, "model.w") == {ComputedBytes}
    assert max(chunk.box.numel for chunk in mapped.tensors["model.w"].chunks) * 4 <= 4 << 20
    assert (read(mapped, "model.w", Box((256, 7), (128, 2000))) == array.T[256:384, 7:2007]).all()


def test_a_part_of_a_computed_tensor_reads_not_much_more_than_the_part(tmp_path: Path) -> None:
    array = np.arange(4096 * 2048, dtype="<f4").reshape(4096, 2048)
    catalog = catalog_of(tmp_path, {"w": array})
    mapped = NameMap([transpose("w")]).apply(catalog).catalog

    class Counting(OpenFiles):
        nbytes = 0

        def source(self, name: str) -> Any:
            inner = super().source(name)

            class Source:
                def readinto(_, out: memoryview, *, start: int) -> None:
                    Counting.nbytes += len(out)
                    inner.readinto(out, start=start)

            return Source()

    tensor = mapped.tensors["model.w"]
    for box in (Box((0, 0), (256, 4096)), Box((0, 512), (2048, 512))):
        Counting.nbytes = 0
        out = np.empty(box.shape, dtype="<f4")
        with Counting(mapped.storage) as files:
            TensorReader(tensor, files).read_box(box, memoryview(out.reshape(-1).view(np.uint8)))
        assert (out == array.T[box.relative_to((0, 0))]).all()
        assert Counting.nbytes <= 2.5 * box.numel * 4


def test_a_grid_tiles_its_box() -> None:
    box = Box((3, 0, 5), (7, 1, 9))
    seen = np.zeros((10, 1, 14), dtype=int)
    for part in grid(box, max_numel=4, fine_numel=4):
        assert 0 < part.numel <= 4
        seen[part.relative_to((0, 0, 0))] += 1
    assert (seen[3:, :, 5:] == 1).all()
    assert seen.sum() == box.numel


# ---- errors ----


def messages(name_map: NameMap, catalog: Any, error: type[Exception], **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        name_map.apply(catalog, **kwargs)
    return str(caught.value)


def test_every_name_and_every_rule_is_checked(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path, {"a": np.ones(2), "b": np.ones(2), "l.0": np.ones(2), "l.2": np.ones(2)}
    )
    others = [rename("l.{i}", "m.{i}")]
    text = messages(NameMap([rename("a", "x"), *others]), catalog, MismatchError)
    assert "no rule matches 1 names: b" in text
    text = messages(NameMap([rename("{n}", "x.{n}"), *others, drop("c")]), catalog, MismatchError)
    assert "rule 3 (drop c): matched nothing" in text
    NameMap([rename("{n}", "x.{n}"), *others, drop("c", optional=True)]).apply(catalog)
    text = messages(NameMap([rename("{n}", "x.{n}"), drop("b"), *others]), catalog, ConfigError)
    assert "rule 1 (rename {n} -> x.{n})" in text
    assert "rule 2 (drop b)" in text
    text = messages(NameMap([rename("a", "x"), rename("b", "x"), *others]), catalog, ConfigError)
    assert "'x' is made twice: by rule 1" in text
    assert "and rule 2" in text
    keep = NameMap([rename("a", "b")], unmatched="keep")
    assert "made twice" in messages(keep, catalog, ConfigError)
    text = messages(
        NameMap([join(["a", "c"], "x"), rename("b", "b"), *others]), catalog, MismatchError
    )
    assert "c is missing, but there is a" in text
    text = messages(
        NameMap([stack("l.{i:int}", "x", over="i"), rename("{n}", "{n}")]), catalog, MismatchError
    )
    assert "l.1 is missing" in text


def test_names_that_no_rule_takes_are_kept_if_asked(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"a": np.ones(2), "b": np.zeros(3)})
    mapped = NameMap([rename("a", "x")], unmatched="keep").apply(catalog)
    assert sorted(model_of(mapped.catalog)) == ["b", "x"]
    assert mapped.report.kept == ["b"]
    assert mapped.report.lines() == ["rename: a -> x", "kept: b"]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (join(["a", "b"], "x"), "not in the proportion of the shares"),
        (join(["a", "b"], "x", dim=1), "no dim 1"),
        (join(["a", "c"], "x"), "do not fit together"),
        (split("a", ["x", "y", "z"]), "do not split by shares [1, 1, 1]"),
        (split("a", ["x", "y"], groups=3), "are not 3 groups"),
        (rotary("a", "x", order="half-to-interleaved", head_dim=3), "heads of an even number"),
        (rotary("a", "x", order="half-to-interleaved", heads=1, rotary_dim=6), "not an even part"),
        (pad("a", "x", unpadded=3, padded=8), "has 4 entries, not 3"),
        (trim("a", "x", unpadded=2, padded=8), "has 4 entries, not 8"),
        (pad("a", "x", unpadded=4, padded=3), "cannot be padded to 3"),
        (transpose("a", "x"), "do not permute a tensor with 1 dims"),
        (tie(["a", "b"], "x"), "different types or shapes"),
    ],
)
def test_shapes_that_do_not_fit_a_rule_are_refused_with_its_name(
    rule: MapRule, text: str, tmp_path: Path
) -> None:
    catalog = catalog_of(tmp_path, {"a": np.ones(4), "b": np.ones(2), "c": np.ones((1, 4))})
    text_of = messages(NameMap([rule], unmatched="keep"), catalog, MismatchError)
    assert text in text_of
    assert "rule 1 (" in text_of


@pytest.mark.parametrize(
    "table",
    [
        {"rename": "a"},
        {"rename": "a.{i}", "to": "b"},
        {"rename": "a", "to": "b", "dim": 0},
        {"rename": "a", "join": ["b"], "to": "c"},
        {"rename": ["a"], "to": "b"},
        {"rename": "a{", "to": "b"},
        {"rename": "a{i:int}{i:path}", "to": "b{i}"},
        {"to": "b"},
        {"join": "a", "to": "b"},
        {"join": ["a.{i}", "b.{j}"], "to": "b.{i}"},
        {"join": ["a", "b"], "to": "c", "shares": [1]},
        {"stack": "a.{i}", "to": "b"},
        {"stack": "a.{i}", "to": "b.{i}", "over": "i"},
        {"cast": "a", "dtype": "I64"},
        {"rotary": "a", "order": "half-to-interleaved"},
        {"rotary": "a", "order": "other", "heads": 1},
        {"drop": "a", "to": "b"},
        {"pad": "a", "padded": 8},
    ],
)
def test_a_malformed_rule_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rule_of(table)


# ---- tie, drop, cast ----


def test_tied_tensors_must_be_equal(tmp_path: Path) -> None:
    name_map = NameMap([tie(["embed", "head"], "both")])
    equal = catalog_of(tmp_path, {"embed": np.ones(4), "head": np.ones(4)})
    mapped = name_map.apply(equal).catalog
    assert list(model_of(mapped)) == ["both"]
    assert_equal(
        model_of(name_map.inverse().apply(mapped).catalog),
        {"embed": np.ones(4), "head": np.ones(4)},
    )
    assert len(NameMap([untie("both", ["a", "b", "c"])]).apply(mapped).catalog.tensors) == 3
    other = catalog_of(tmp_path, {"embed": np.ones(4), "head": np.array([1.0, 1, 1, 2])})
    assert "embed and head must be equal" in messages(name_map, other, MismatchError)


def test_two_nodes_of_one_tensor_stay_so_when_renamed(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"embed": np.ones(4)}, extra={"head": None})
    part = catalog.parts["model"]
    assert isinstance(part, dict)
    part["head"] = part["embed"]
    mapped = NameMap([rename("{n}", "m.{n}")]).apply(catalog).catalog
    assert list(mapped.tensors) == ["model.m.embed"]
    assert set(tensor_keys(mapped.parts["model"])) == {"model.m.embed"}


def test_a_drop_has_an_inverse_only_if_it_is_recomputed(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"a": np.ones(2), "freq": np.ones(3)})
    name_map = NameMap([rename("a", "b"), drop("freq")])
    mapped = name_map.apply(catalog)
    assert list(mapped.catalog.tensors) == ["model.b"]
    assert "freq was dropped by rule 2" in mapped.catalog.left_out[0]
    with pytest.raises(ConfigError, match=r"rule 2 \(drop freq\).*recomputed = true"):
        name_map.inverse()
    back = NameMap([rename("a", "b"), drop("freq", recomputed=True)]).inverse()
    assert_equal(model_of(back.apply(mapped.catalog).catalog), {"a": np.ones(2)})
    assert_equal(model_of(back.inverse().apply(catalog).catalog), {"b": np.ones(2)})
    there = NameMap([rename("b", "a"), absent("freq")])
    assert_equal(model_of(there.apply(mapped.catalog).catalog), {"a": np.ones(2)})
    assert_equal(model_of(there.inverse().apply(catalog).catalog), {"b": np.ones(2)})


def test_a_cast_is_rounded_and_undone_where_it_states_the_type(tmp_path: Path) -> None:
    values = np.array([1.0, 1.00390625, -3e38, np.inf, np.nan, 0.1], dtype="<f4")
    catalog = catalog_of(tmp_path, {"w": values})
    plain = NameMap([cast("w", "x", dtype="F64")])
    np.testing.assert_array_equal(
        model_of(plain.apply(catalog).catalog)["x"], values.astype(np.float64)
    )
    with pytest.raises(ConfigError, match=r"rule 1 \(cast w -> x\).*set back"):
        plain.inverse()
    both = NameMap([cast("w", "x", dtype="F64", back="F32")])
    mapped = both.apply(catalog).catalog
    assert_equal(model_of(both.inverse().apply(mapped).catalog), {"w": values})
    assert "casts from F32" in messages(both, mapped_name(mapped), MismatchError)
    small = NameMap([cast("w", dtype="F16")]).apply(catalog).catalog
    with pytest.raises(PlacementError, match=r"tensor 'w'.*1 values are too large for F16"):
        model_of(small)
    full = NameMap([cast("w", dtype="F16", saturate=True)]).apply(catalog).catalog
    assert model_of(full)["w"][2] == np.finfo(np.float16).min
    assert np.isposinf(model_of(full)["w"][3])


def mapped_name(catalog: Any) -> Any:
    return NameMap([rename("x", "w")]).apply(catalog).catalog


def test_an_integer_is_not_cast(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"w": np.ones(2, dtype=np.int64)})
    assert "cast from I64 to F32" in messages(
        NameMap([cast("w", dtype="F32")]), catalog, PlacementError
    )


# ---- values, other parts ----


def test_values_are_renamed_and_dropped_like_tensors(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path, {"a": np.ones(2)}, extra={"a_extra": {"version": 2}, "nothing": None}
    )
    mapped = NameMap([rename("a{n:path}", "b{n}"), rename("a", "b"), drop("nothing")]).apply(
        catalog
    )
    part = mapped.catalog.parts["model"]
    assert isinstance(part, dict)
    assert part["b_extra"] == {"version": 2}
    assert list(part) == ["b", "b_extra"]
    text = messages(NameMap([transpose("a_extra"), rename("{n}", "{n}")]), catalog, ConfigError)
    assert "matched by" in text
    text = messages(
        NameMap([cast("a_extra", dtype="F16")], unmatched="keep"), catalog, MismatchError
    )
    assert "not all are tensors" in text


def test_an_array_that_is_renamed_keeps_its_numpy_type(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"a": np.ones(2, dtype=np.int64)})
    part: Any = catalog.parts["model"]
    part["a"] = {**tensor_node("model.a", tag="array"), "d": "<M8[ns]"}
    mapped: Any = NameMap([rename("a", "b")]).apply(catalog).catalog.parts["model"]
    assert mapped["b"] == {**tensor_node("model.b", tag="array"), "d": "<M8[ns]"}


def test_a_tensor_that_another_part_has_too_keeps_its_key(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"a": np.ones(2)})
    catalog.parts["other"] = [catalog.parts["model"]["a"]]  # type: ignore[index]
    mapped = NameMap([rename("a", "b")]).apply(catalog).catalog
    assert list(mapped.tensors) == ["model.a"]
    assert list(tensor_keys(mapped.parts["model"])) == ["model.a"]


# ---- conditions ----


def test_a_rule_takes_a_name_where_another_is_there(tmp_path: Path) -> None:
    """A mixture of layers: the norm goes where its layer has it, and back to one name."""
    model = {f"{i}.norm": np.full(2, i) for i in range(4)}
    model |= {f"{i}.{'mlp' if i % 2 else 'router'}": np.ones(i) for i in range(4)}
    name_map = NameMap.from_toml("""
unmatched = "keep"
[[rule]]
rename = "{i:int}.norm"
to = "{i}.mlp.norm"
where = "{i}.mlp"
[[rule]]
rename = "{i:int}.norm"
to = "{i}.pre_norm"
where = "{i}.router"
""")
    mapped = name_map.apply(catalog_of(tmp_path, model)).catalog
    named = {name for name in model_of(mapped) if name.endswith("norm")}
    assert named == {"0.pre_norm", "1.mlp.norm", "2.pre_norm", "3.mlp.norm"}
    assert_equal(model_of(name_map.inverse().apply(mapped).catalog), model)
    # The inverse of the inverse has the condition again, and what no rule takes is an error.
    alone = NameMap(list(name_map.inverse().inverse().stages[0].rules))
    text = messages(alone, catalog_of(tmp_path, {"0.norm": np.ones(1)}), MismatchError)
    assert "no rule matches 1 names: 0.norm;" in text
    with pytest.raises(ConfigError, match="wildcards that its names do not have"):
        NameMap.from_toml("[[rule]]\nrename = 'a'\nto = 'b'\nwhere = '{i}.c'\n")


# ---- optimizer state ----


def optimizer_of(model: dict[str, Array], steps: dict[str, float]) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        "state": {
            name: {
                "exp_avg": rng.normal(size=array.shape).astype(np.float32),
                "step": np.array(steps.get(name, 3.0), dtype=np.float32),
                "flag": True,
            }
            for name, array in model.items()
        },
        "groups": [{"lr": 0.1}],
        "membership": dict.fromkeys(model, 0),
        "parameters": {name: {"shape": list(array.shape)} for name, array in model.items()},
    }


def test_optimizer_state_goes_where_its_parameter_goes(tmp_path: Path) -> None:
    model = {f"l.{i}.{n}": np.full((4, 2), i + ord(n) / 256) for i in range(2) for n in "abw"}
    optimizer = optimizer_of(model, {})
    catalog = catalog_of(tmp_path, model, optimizer=optimizer)
    name_map = NameMap([
        join(["l.{i}.a", "l.{i}.b"], "L.{i}.ab"), transpose("l.{i}.w", "L.{i}.w"),
    ]).then(NameMap([stack("L.{i:int}.{n}", "L.{n}", over="i")]))  # fmt: skip
    mapped = name_map.apply(catalog)
    parts = mapped.catalog.parts
    tree: Any = parts["optimizer"]
    assert mapped.report.optimizer_parameters == 2
    assert tree["membership"] == {"L.ab": 0, "L.w": 0}
    assert tree["parameters"]["L.ab"] == {"shape": [2, 8, 2]}
    assert tree["state"]["L.w"]["flag"] is True
    assert tree["groups"] == [{"lr": 0.1}]
    moments = read(mapped.catalog, "optimizer.state.L.ab.exp_avg")
    state = optimizer["state"]
    for i in range(2):
        both = [state[f"l.{i}.a"]["exp_avg"], state[f"l.{i}.b"]["exp_avg"]]
        assert (moments[i] == np.concatenate(both)).all()
        transposed = read(mapped.catalog, "optimizer.state.L.w.exp_avg")[i]
        assert (transposed == state[f"l.{i}.w"]["exp_avg"].T).all()
    assert read(mapped.catalog, "optimizer.state.L.w.step") == 3
    back = name_map.inverse().apply(mapped.catalog).catalog
    assert sorted(back.tensors) == sorted(catalog.tensors)
    for key in catalog.tensors:
        assert read(back, key).tobytes() == read(catalog, key).tobytes()
    trees: list[Any] = [back.parts["optimizer"], catalog.parts["optimizer"]]
    assert len({node_bytes(sorted_node(tree)) for tree in trees}) == 1


def sorted_node(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: sorted_node(node[name]) for name in sorted(node)}
    return node


def test_optimizer_state_that_cannot_follow_is_refused(tmp_path: Path) -> None:
    model = {"a": np.ones((2, 2)), "b": np.ones((2, 2))}
    both = NameMap([join(["a", "b"], "ab")])
    unequal = catalog_of(tmp_path, model, optimizer=optimizer_of(model, {"a": 4.0}))
    text = messages(both, unequal, MismatchError)
    assert "state.step: a and b must be equal" in text
    optimizer = optimizer_of(model, {})
    del optimizer["state"]["b"]
    text = messages(both, catalog_of(tmp_path, model, optimizer=optimizer), MismatchError)
    assert "of one of a and b, and not of the other" in text
    optimizer = optimizer_of(model, {})
    optimizer["membership"]["b"] = 1
    text = messages(both, catalog_of(tmp_path, model, optimizer=optimizer), MismatchError)
    assert "membership: it must be equal for a, b" in text
    optimizer = optimizer_of(model, {})
    for name in model:
        optimizer["state"][name]["row"] = np.ones(2)
    factored = catalog_of(tmp_path, model, optimizer=optimizer)
    text = messages(both, factored, MismatchError)
    assert "state.row of a does not have an element for each" in text
    renamed = NameMap([rename("{n}", "m.{n}")]).apply(factored).catalog
    assert (read(renamed, "optimizer.state.m.a.row") == 1).all()
    optimizer = optimizer_of({**model, "c": np.ones(1)}, {})
    text = messages(both, catalog_of(tmp_path, model, optimizer=optimizer), MismatchError)
    assert "state of c, which no rule is about" in text
    alone = NameMap([join(["a", "b"], "ab")], optimizer=False).apply(unequal).catalog
    assert "optimizer.state.a.step" in alone.tensors


def test_state_of_tied_parameters_is_that_of_one(tmp_path: Path) -> None:
    model = {"a": np.ones(2), "b": np.ones(2)}
    catalog = catalog_of(tmp_path, model, optimizer=optimizer_of({"a": model["a"]}, {}))
    name_map = NameMap([tie(["a", "b"], "x")])
    mapped = name_map.apply(catalog).catalog
    tree: Any = mapped.parts["optimizer"]
    assert list(tree["state"]) == ["x"]
    back: Any = name_map.inverse().apply(mapped).catalog.parts["optimizer"]
    assert list(back["state"]) == ["a"]


def test_a_cast_leaves_optimizer_state_alone(tmp_path: Path) -> None:
    model = {"a": np.ones(2, dtype=np.float32)}
    catalog = catalog_of(tmp_path, model, optimizer=optimizer_of(model, {}))
    mapped = NameMap([cast("a", "b", dtype="BF16")]).apply(catalog).catalog
    assert mapped.tensors["model.b"].dtype == "BF16"
    assert mapped.tensors["optimizer.state.b.exp_avg"].dtype == "F32"


# ---- TOML and variables ----

TOML = """
name = "example"
[variables]
num_heads = ""
head_dim = "size('l.{i}.q', 0) // num_heads"
num_kv_heads = ["size('l.{i}.k', 0) // head_dim", "size('L.{i}.qkv', 0) // 4 - num_heads"]

[[stage]]
[[stage.rule]]
join = ["l.{i:int}.q", "l.{i:int}.k"]
to = "L.{i}.qk"
shares = ["num_heads", "num_kv_heads"]
groups = "num_kv_heads"
[[stage]]
unmatched = "keep"
[[stage.rule]]
drop = "none"
optional = true
recomputed = true
"""


def test_a_map_is_stated_in_toml(tmp_path: Path) -> None:
    (tmp_path / "example.toml").write_text(TOML)
    model = {"l.0.q": np.arange(16.0).reshape(8, 2), "l.0.k": np.arange(8.0).reshape(4, 2)}
    catalog = catalog_of(tmp_path / "c", model)
    for name_map in (NameMap.from_toml(TOML), NameMap.from_toml(tmp_path / "example.toml")):
        mapped = name_map.apply(catalog, variables={"num_heads": 4}).catalog
        q, k = model["l.0.q"].reshape(2, 4, 2), model["l.0.k"].reshape(2, 2, 2)
        expected = np.concatenate([q, k], axis=1).reshape(12, 2)
        assert_equal(model_of(mapped), {"L.0.qk": expected})
        back = name_map.inverse().apply(mapped, variables={"num_heads": 4, "num_kv_heads": 2})
        assert_equal(model_of(back.catalog), model)
    assert name_map.describe() == NameMap.from_toml(TOML).describe()
    text = messages(NameMap.from_toml(TOML), catalog, ConfigError)
    assert "example: rule 1" in text
    assert "'num_heads' has no value" in text
    text = messages(NameMap.from_toml(TOML), catalog, ConfigError, variables={"heads": 4})
    assert "no variables ['heads']" in text


def test_the_map_of_the_page_is_one(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/name-maps.md"
    name_map = NameMap.from_toml(page.read_text().split("```toml")[1].split("```")[0])
    model = {"tok_embeddings.weight": np.ones(3)}
    model |= {f"layers.0.mlp.{name}.weight": np.ones((2, 3)) for name in ("gate", "up")}
    catalog = catalog_of(tmp_path, model)
    mapped = name_map.apply(catalog).catalog
    assert sorted(model_of(mapped)) == ["embed.weight", "layers.0.mlp.fc1.weight"]
    assert_equal(model_of(name_map.inverse().apply(mapped).catalog), model)


@pytest.mark.parametrize(
    "text",
    ["a = \n", "name = 'x'\n", "other = 1\n[[rule]]\ndrop = 'a'\n", "[[stage]]\nrule = 1\n",
     "[variables]\nx = 1.5\n[[rule]]\ndrop = 'a'\n", "unmatched = 'no'\n[[rule]]\ndrop = 'a'\n",
     "variables = 3\n[[rule]]\ndrop = 'a'\n", "rule = ['a']\n", "stage = 3\n",
     "optimizer = 3\n[[rule]]\ndrop = 'a'\n", "[[rule]]\ndrop = 'a'\nrecomputed = 'false'\n",
     "[[rule]]\njoin = ['a', 'b']\nto = 'c'\nshares = 3\n",
     "[[rule]]\ncast = 'a'\ndtype = 'BF16'\nsaturate = 'false'\n"],
)  # fmt: skip
def test_what_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        NameMap.from_toml(text)


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        NameMap.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("x + 1", "no variable 'x'"), ("a", "in terms of itself"), ("2 ** 3", "not allowed"),
        ("1 // 0", "divides by 0"), ("size('z', 0)", "no tensor is named 'z'"),
        ("size('w', 2)", "no dim 2"), ("(", "not an expression"),
        ("__import__('os')", "not allowed"),
    ],
)  # fmt: skip
def test_an_expression_without_value_is_refused(expression: str, text: str) -> None:
    variables = Variables({"a": "b", "b": "a"}, {"w": (2, 3)})
    with pytest.raises((ConfigError, MismatchError), match=text.replace("'", ".")):
        variables.evaluate(expression, place="here")


def test_held_bytes_are_cut(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"w": np.arange(6.0)}, held=True)
    mapped = NameMap([split("w", ["a", "b"])]).apply(catalog).catalog
    (chunk,) = mapped.tensors["model.b"].chunks
    assert isinstance(chunk.payload, HeldBytes)
    assert len(chunk.payload.data) == 24

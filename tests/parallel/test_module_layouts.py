"""Layouts of several modules (M18): what they derive, and every refusal with its spans."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import LayoutError
from holdfast.parallel import Layout, ModuleLayouts

VISION = Layout(dp=2)
LANGUAGE = Layout(tp=2, ranks=(2, 3))
EDGE = [("vision", "language")]
BOTH = {"vision": VISION, "language": LANGUAGE}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no modules": (lambda: ModuleLayouts({}), r"No modules were given: pass at least one layout"),
    "name with a dot": (
        lambda: ModuleLayouts({"a.b": VISION}),
        r"must be a Python identifier, got 'a\.b'",
    ),
    "name with a space": (
        lambda: ModuleLayouts({"a b": VISION}),
        r"starts its keys .* 'a b'",
    ),
    "empty name": (lambda: ModuleLayouts({"": VISION}), r"must be a Python identifier, got ''"),
    "number as name": (lambda: ModuleLayouts({3: VISION}), r"must be a Python identifier, got 3"),  # type: ignore[dict-item]
    "no layout": (lambda: ModuleLayouts({"vision": 2}), r"'vision': expected a Layout, got 2"),  # type: ignore[dict-item]
    "overlapping spans": (
        lambda: ModuleLayouts({"vision": Layout(dp=3), "language": Layout(tp=3, ranks=(2, 3, 4))}),
        r"'vision' on ranks 0-2 and 'language' on ranks 2-4 share ranks 2, but not all",
    ),
    "span within another": (
        lambda: ModuleLayouts({"vision": Layout(dp=4), "language": Layout(tp=2, ranks=(1, 2))}),
        r"'vision' on ranks 0-3 and 'language' on ranks 1, 2 share ranks 1, 2, but not all",
    ),
    "third module overlaps": (
        lambda: ModuleLayouts({**BOTH, "speech": Layout(ranks=(3, 4), dp=2)}),
        r"'language' on ranks 2, 3 and 'speech' on ranks 3, 4 share ranks 3",
    ),
    "gap": (
        lambda: ModuleLayouts({"vision": VISION, "language": Layout(tp=2, ranks=(4, 5))}),
        r"Ranks 2, 3 have no module: 'vision' on ranks 0, 1, 'language' on ranks 4, 5.* ranks=",
    ),
    "gap at the end": (
        lambda: ModuleLayouts(BOTH, ranks=range(6)),
        r"Ranks 4, 5 have no module: 'vision' on ranks 0, 1, 'language' on ranks 2, 3",
    ),
    "rank too many": (
        lambda: ModuleLayouts(BOTH, ranks=range(3)),
        r"Ranks 3 have a module, but are not among ranks=0-2: 'vision' on .* 'language' on",
    ),
    "equal names of layouts": (
        lambda: ModuleLayouts({"a": Layout(name="x"), "b": Layout(ranks=(1,), name="x")}),
        r"The layouts of modules 'a' and 'b' have the same name, 'x'",
    ),
    "the name of another module": (
        lambda: ModuleLayouts({"a": Layout(), "b": Layout(ranks=(1,), name="a")}),
        r"The layouts of modules 'a' and 'b' have the same name, 'a'",
    ),
    "the name of all": (
        lambda: ModuleLayouts({"modules": Layout()}),
        r"'modules' has the name of all modules together",
    ),
    "unknown source": (
        lambda: ModuleLayouts(BOTH, edges=[("audio", "language")]),
        r"Edge audio -> language: unknown module 'audio'; the modules are 'vision' on ranks 0, 1, "
        r"'language' on ranks 2, 3",
    ),
    "unknown destination": (
        lambda: ModuleLayouts(BOTH, edges=[("vision", "text")]),
        r"Edge vision -> text: unknown module 'text'; the modules are 'vision' on ranks 0, 1",
    ),
    "widths that do not divide": (
        lambda: ModuleLayouts(
            {"vision": VISION, "language": Layout(dp=3, ranks=(2, 3, 4))}, edges=EDGE
        ),
        r"vision -> language: neither .* dp=2 of layout 'vision' .*ranks 0, 1\) and dp=3 of "
        r"layout 'language' .*ranks 2-4\)",
    ),
    "edge twice": (
        lambda: ModuleLayouts(BOTH, edges=EDGE * 2),
        r"Edge vision -> language is given twice",
    ),
    "edge to itself": (
        lambda: ModuleLayouts(BOTH, edges=[("vision", "vision")]),
        r"vision -> vision form a cycle",
    ),
    "one pair for all edges": (
        lambda: ModuleLayouts(BOTH, edges=("vision", "language")),  # type: ignore[arg-type]
        r"An edge is a pair of modules.* got 'vision' as an edge",
    ),
    "edge of a list": (
        lambda: ModuleLayouts(BOTH, edges=[(["vision"], "language")]),  # type: ignore[list-item]
        r"got \(\['vision'\], 'language'\) as an edge",
    ),
    "edge of three": (
        lambda: ModuleLayouts(BOTH, edges=[("vision", "language", "x")]),  # type: ignore[list-item]
        r"got \('vision', 'language', 'x'\) as an edge",
    ),
    "cycle": (
        lambda: ModuleLayouts(
            {"a": Layout(), "b": Layout(ranks=(1,)), "c": Layout(ranks=(2,))},
            edges=[("a", "b"), ("b", "c"), ("c", "a")],
        ),
        r"form a cycle",
    ),
    "looked up": (
        lambda: ModuleLayouts(BOTH)["audio"],
        r"Unknown module 'audio' of 'modules'; the modules are 'vision' on ranks 0, 1",
    ),
    "other fields": (
        lambda: ModuleLayouts.from_dict({"layouts": []}),
        r"Not the fields of module layouts: \['layouts'\]; expected \['edges'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_spans(case: str) -> None:
    """M18: at construction, before any communicator."""
    build, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        build()


def test_a_cycle_is_named_along_its_edges() -> None:
    layouts = {m: Layout(ranks=(i,)) for i, m in enumerate("abcd")}
    edges = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]
    with pytest.raises(LayoutError) as raised:
        ModuleLayouts(layouts, edges=edges)
    named = str(raised.value).split("edges ")[1].split(" form")[0].split(" -> ")
    assert set(itertools.pairwise(named)) == set(edges[:3])


def random_layouts(seed: int) -> ModuleLayouts:
    """Two to four modules on disjoint or equal spans, offset, with the edges that are allowed."""
    choose = random.Random(seed)
    start = choose.randrange(5)
    layouts: dict[str, Layout] = {}
    spans: list[list[int]] = []
    for module in ["vision", "audio", "language", "head"][: choose.randint(2, 4)]:
        if spans and choose.random() < 0.4:
            span = choose.choice(spans)
        else:
            span = list(range(start, start + choose.choice((1, 2, 4, 6))))
            start += len(span)
            spans.append(span)
        sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
        rest = len(span)
        while rest > 1:
            factor = next(p for p in (2, 3) if rest % p == 0)
            sizes[choose.choice(list(sizes))] *= factor
            rest //= factor
        layouts[module] = Layout(**sizes, ranks=choose.sample(span, len(span)))
    names = list(layouts)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    widths = {m: layout.dp for m, layout in layouts.items()}
    edges = [
        (a, b)
        for a, b in pairs
        if choose.random() < 0.7 and not (widths[a] % widths[b] and widths[b] % widths[a])
    ]
    return ModuleLayouts(layouts, edges=edges, name=choose.choice(("modules", "actor")))


@given(st.integers(0, 10**9))
def test_roles_and_union_are_those_of_the_layouts(seed: int) -> None:
    """Every rank's modules, coordinates and stages, against a search through all layouts."""
    layouts = random_layouts(seed)
    everywhere = {rank for layout in layouts.values() for rank in layout.ranks}
    assert layouts.union.ranks == tuple(sorted(everywhere))
    assert layouts.union.dp == len(everywhere)
    for rank in range(max(everywhere) + 2):
        modules = [m for m in layouts if rank in layouts[m].ranks]
        assert list(layouts.modules_of(rank)) == modules
        roles = layouts.roles_of(rank)
        assert list(roles) == modules
        for module, role in roles.items():
            pipeline = layouts[module].group("pp", rank)
            assert role.module == module
            assert role.coordinates == layouts[module].coordinates(rank)
            assert role.is_first_stage == (pipeline[0] == rank)
            assert role.is_last_stage == (pipeline[-1] == rank)
    for one in layouts:
        for other in layouts:
            shared = set(layouts[one].ranks) & set(layouts[other].ranks)
            assert layouts.are_colocated(one, other) == bool(shared)


@given(st.integers(0, 10**9))
def test_module_layouts_come_back_from_json(seed: int) -> None:
    layouts = random_layouts(seed)
    again = ModuleLayouts.from_dict(json.loads(json.dumps(layouts.to_dict())))
    assert again == layouts
    assert hash(again) == hash(layouts)
    assert again.digest() == layouts.digest()
    assert again.edges == layouts.edges
    assert list(again.items()) == list(layouts.items())
    assert repr(again) == repr(layouts)


def test_digests_differ_where_anything_does() -> None:
    """Order of modules too: it decides the order of communicators."""
    several = [
        ModuleLayouts(BOTH),
        ModuleLayouts(BOTH, edges=EDGE),
        ModuleLayouts(BOTH, name="actor"),
        ModuleLayouts({"language": LANGUAGE, "vision": VISION}),
        ModuleLayouts({"vision": VISION, "text": LANGUAGE}),
        ModuleLayouts({"vision": VISION, "language": Layout(tp=2, ranks=(3, 2))}),
        ModuleLayouts({"vision": VISION, "language": Layout(tp=2, ranks=(2, 3), name="llm")}),
    ]
    assert len({layouts.digest() for layouts in several}) == len(several)
    assert len(set(several)) == len(several)
    assert ModuleLayouts(BOTH) == ModuleLayouts(dict(BOTH))
    assert ModuleLayouts(BOTH) != "modules"


def test_layouts_take_the_names_of_their_modules() -> None:
    """Ranks find each other by them, so those of two models in one program must differ."""
    assert [layout.name for layout in ModuleLayouts(BOTH).values()] == ["vision", "language"]
    actor = ModuleLayouts({**BOTH, "reward": Layout(name="own", ranks=(4,))}, name="actor")
    names = [layout.name for layout in actor.values()]
    assert names == ["actor: vision", "actor: language", "own"]
    assert actor.union.name == "actor"
    assert "vision" in actor
    assert "audio" not in actor
    assert len(actor) == 3


def test_ranks_that_take_no_part_are_listed_out() -> None:
    layouts = ModuleLayouts({"vision": VISION, "language": Layout(ranks=(5,))}, ranks=(5, 0, 1))
    assert layouts.union.ranks == (0, 1, 5)
    assert layouts.modules_of(3) == ()
    assert layouts.roles_of(3) == {}


def test_module_layouts_need_no_torch() -> None:
    code = "import sys, holdfast.parallel as p; p.ModuleLayouts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Random streams: bitwise after every load, equal where they are shared, never silently fresh."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import (
    RNG,
    Checkpointer,
    ConfigError,
    Layout,
    MismatchError,
    PlanError,
    ProcessGroups,
    Stream,
)
from holdfast.checkpoint.load.requests import check_consistency
from holdfast.format.values import Codecs
from holdfast.state import rng
from holdfast.state.flatten import flatten_state
from holdfast.state.matcher import Matcher
from holdfast.state.rng import accessors, global_accessors, state_digest
from holdfast.state.stored import StoredPart
from tests.drawn import drawn
from tests.harness import RankContext, run_ranks

BITS = (
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.SFC64,
    np.random.Philox,
)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> tuple[float, ...]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]
    return (random.random(), float(np.random.random()), torch.rand(()).item(), *gauss)


def generators(seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        kind.__name__: np.random.Generator(kind(seed))  # type: ignore[abstract]
        for kind in BITS
    }
    found["torch"] = torch.Generator().manual_seed(seed)
    found["legacy"] = np.random.RandomState(seed)
    found["sfc legacy"] = np.random.RandomState(np.random.SFC64(seed))
    found["own"] = random.Random(seed)
    return found


def draw_each(found: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, each in found.items():
        if isinstance(each, torch.Generator):
            values[name] = torch.randn(3, generator=each).tolist()
        elif isinstance(each, random.Random):
            values[name] = [each.gauss(0, 1), each.random()]
        else:
            # An odd number of 32-bit draws leaves half a word in the generator.
            small = each.integers(0, 9, 3) if isinstance(each, np.random.Generator) else [1]
            values[name] = [
                float(each.standard_normal()),
                list(map(int, small)),
                float(each.random()),
            ]
    return values


def test_generators_of_every_kind_go_on_bitwise(tmp_path: Path) -> None:
    seed_all(1)
    saved = generators(1)
    draw_each(saved)
    random.gauss(0, 1)
    np.random.standard_normal()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rng": RNG(generators=saved)})
        expected = draw(), draw_each(saved)
        seed_all(2)
        fresh = generators(2)
        report = checkpointer.load({"rng": RNG(generators=fresh)})
        assert (draw(), draw_each(fresh)) == expected
        assert (report.kept, report.dropped) == ((), ())
        before = RNG(generators=fresh).capture()
        for name in ("SFC64", "torch", "own", "MT19937"):
            other = dict(fresh)
            other[name] = fresh["Philox"] if name == "torch" else torch.Generator()
            with pytest.raises(MismatchError, match=f"'{name}' is not one of a"):
                checkpointer.load({"rng": RNG(generators=other)})
            assert RNG(generators=fresh).capture().is_same(before)  # no other stream was set
        other = {**fresh, "PCG64": fresh["SFC64"]}
        with pytest.raises(MismatchError, match="'PCG64' is not one of a SFC64"):
            checkpointer.load({"rng": RNG(generators=other)})


def test_a_generator_that_one_side_lacks_is_an_error(tmp_path: Path) -> None:
    def one(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    for shared in (None, ("tp",), ("tp", "cp", "dp", "pp")):
        root = tmp_path / str(shared)
        with Checkpointer(root) as checkpointer:
            rng = RNG(shared=shared, generators={"a": one(1), "b": one(2)})
            checkpointer.save(1, {"rng": rng})
            more = RNG(shared=shared, generators={"a": one(3), "b": one(3), "c": one(5)})
            with pytest.raises(MismatchError, match=r"rng\.generator-c"):
                checkpointer.load({"rng": more})
            fresh = one(5)
            more = RNG(shared=shared, generators={"a": one(3), "b": one(3), "c": fresh})
            report = checkpointer.load({"rng": more}, allow_missing=["rng.generator-c"])
            assert (*report.kept, *report.missing) == ("rng.generator-c",)
            assert torch.equal(fresh.get_state(), one(5).get_state())
            less = RNG(shared=shared, generators={"a": one(3)})
            with pytest.raises(MismatchError, match="generator-b"):
                checkpointer.load({"rng": less})
            checkpointer.load({"rng": less}, ignore_unexpected=True)


def test_wrong_declarations_are_refused() -> None:
    for generator in (random.SystemRandom(), object(), "x"):
        with pytest.raises(ConfigError, match="generator 'g'"):
            RNG(generators={"g": generator})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="ep"):
        RNG(shared=("ep",))
    with pytest.raises(ConfigError, match="dp"):
        RNG(axes=("tp",), generators={"g": Stream(torch.Generator(), shared=("dp",))})


class Drawing:
    """A stateful object that draws while it says what it holds, and while it takes it back."""

    def state_dict(self) -> dict[str, object]:
        draw()
        return {"x": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        del state
        draw()


@pytest.mark.parametrize("names", [("rng", "a", "z"), ("a", "rng", "z"), ("a", "z", "rng")])
def test_streams_are_exact_whatever_the_order_of_parts(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    def state() -> dict[str, object]:
        return {name: RNG() if name == "rng" else Drawing() for name in names}

    seed_all(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state())
        expected = draw()
        for order in (names, names[::-1]):
            seed_all(2)
            whole = state()
            checkpointer.load({name: whole[name] for name in order})
            assert draw() == expected


# Every rank of a layout in one process: which stored streams a rank takes.


def saved_node(layout: Layout, rng: Any, seeds: dict[int, int]) -> tuple[Any, dict[str, Any]]:
    """What all ranks save together, ranks being seeded as given, and the tensors by key."""
    trees: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    node: Any = None
    for rank in layout.ranks:
        seed_all(seeds[rank])
        flat = flatten_state({"rng": rng}, layout=layout, rank=rank, codecs=Codecs())
        tensors |= {key: (leaf, flat.local(key, 0)) for key, leaf in flat.leaves.items()}
        node = flat.nodes["rng"]
        for label, tree in node["v"].items():
            assert trees.setdefault(label, tree) == tree
    return {**node, "v": trees}, tensors


grids = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in ("tp", "cp", "dp")})


def value_at(at: dict[str, int], leave_out: str = "") -> int:
    return 1 + sum(
        at[axis] * 10**i for i, axis in enumerate(("tp", "cp", "dp")) if axis != leave_out
    )


@drawn(
    quick=10,
    slow=60,
    saved=grids,
    loaded=grids,
    equal_along_tp=st.booleans(),
    declared_before=st.booleans(),
    declared=st.sampled_from([None, (), ("tp",)]),
    alike=st.booleans(),
)
def test_every_rank_takes_what_brute_force_says(
    saved: dict[str, int],
    loaded: dict[str, int],
    equal_along_tp: bool,
    declared_before: bool,
    declared: tuple[str, ...] | None,
    alike: bool,
) -> None:
    """`alike`: fresh streams are seeded alike along tp."""
    before, after = Layout(**saved), Layout(**loaded)
    declared_before = declared_before and equal_along_tp
    rng = RNG(shared=("tp",) if declared_before else None)
    leave_out = "tp" if equal_along_tp else ""
    seeds = {r: value_at(before.coordinate(r), leave_out) for r in before.ranks}
    node, leaves = saved_node(before, rng, seeds)
    by_place = {tuple(before.coordinate(r).values()): seeds[r] for r in before.ranks}
    table = {key: (leaf.dtype, leaf.shape) for key, (leaf, _) in leaves.items()}
    got: dict[int, int] = {}
    claims = []
    refused = False
    for rank in after.ranks:
        at = after.coordinate(rank)
        fresh = 5000 + value_at(at, "tp" if alike else "")
        seed_all(fresh)
        matcher = Matcher(tensors=table, layout=after, rank=rank, codecs=Codecs())
        part = RNG(shared=declared)
        template = part.template(StoredPart(node, table))
        matcher.match(template, node, "rng")
        here = [seed for place, seed in by_place.items() if place[1:] == tuple(at.values())[1:]]
        own = by_place.get(tuple(at.values()))
        # The definition of what this rank has after the load; None: its own fresh stream.
        if declared == ("tp",):
            contradiction = len(set(here)) > 1
            wanted = here[0] if here else None
        else:
            contradiction = False
            wanted = own
            if declared_before and here:
                wanted = here[0]
            if own is None and declared is None and here and len(set(here)) == 1:
                wanted = here[0]
        if contradiction:
            assert "declared shared along tp" in matcher.result.mismatched[0]
            refused = True
            continue
        assert not matcher.result.mismatched
        for entry in matcher.result.tensors:
            key = list(table)[entry.tensor]
            entry.locals[0].copy_(leaves[key][1])
        draw()  # what other parts may do while they are restored
        matcher.move_to(after, closed=True)
        tree = matcher.build(template, node, "rng")
        part.restore(tree)
        claims.append(matcher.result.checks)
        assert bool(matcher.result.kept) == (wanted is None)
        mine = draw()
        got[rank] = wanted or fresh
        seed_all(got[rank])
        assert mine == draw()
    if refused:
        return
    differs = any(len({got[r] for r in group}) > 1 for group in after.groups("tp"))
    stored_tp = {place[0] for place in by_place}
    found = equal_along_tp and (declared_before or len(stored_tp) > 1)
    if differs and (declared == ("tp",) or (declared is None and found)):
        with pytest.raises(MismatchError, match="shared by ranks that would have different"):
            check_consistency(after.ranks, claims, warn=False)
    else:
        check_consistency(after.ranks, claims, warn=False)
    if declared == ("tp",) and (alike or not differs):
        assert not differs


# Real saves and loads.


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def megatron(seed: int, declared: bool) -> tuple[RNG, torch.Generator]:
    """A default stream that ranks along tp share, and one for each rank of the model."""
    own = torch.Generator().manual_seed(seed)
    if declared:
        return RNG(shared=("tp",), generators={"model": Stream(own, shared=())}), own
    return RNG(generators={"model": own}), own


def growing(
    context: RankContext, root: str, step: int, sizes: dict[str, int], save: bool, declared: bool
) -> Any:
    log = Log()
    logging.getLogger("holdfast").addHandler(log)
    with ProcessGroups.create(Layout(**sizes)) as groups:
        at = groups.layout.coordinate(context.rank)
        seed_all(7 + at["dp"] if save else 1000 + context.rank)
        rng, own = megatron(context.rank + (0 if save else 500), declared)
        checkpointer = Checkpointer(root, groups=groups)
        report = None
        if save:
            checkpointer.save(step, {"rng": rng}, check_replicas=True)
        else:
            try:
                report = checkpointer.load({"rng": rng}, step=step)
            except MismatchError as error:
                return str(error)
        kept = () if report is None else report.kept
        dropped = () if report is None else report.dropped
        if not save:
            checkpointer.save(step + 100, {"rng": rng}, check_replicas=True)
        return draw(), torch.rand(2, generator=own).tolist(), kept, dropped, log.lines


@pytest.mark.parametrize("declared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_default_and_a_model_parallel_stream(tmp_path: Path, declared: bool) -> None:
    """(10): one tensor rank, then two: the default stream is copied."""
    root = str(tmp_path)
    one = run_ranks(1, growing, root, 1, {}, True, declared).results[0]
    two = run_ranks(2, growing, root, 1, {"tp": 2}, False, declared).results
    assert two[0][0] == two[1][0] == one[0]
    assert two[0][1] == one[1]
    if declared:
        fresh = torch.rand(2, generator=torch.Generator().manual_seed(501)).tolist()
        assert two[1][1] == fresh
        (kept,) = two[1][2]
        assert kept.endswith("per_tp_cp_dp_pp[cp=0,dp=0,pp=0,tp=1]")
        assert len(two[1][4]) == 1
        assert kept in two[1][4][0]
    else:
        assert two[1][1] == one[1]
        assert two[1][2] == ()
    # The two are saved again as step 101; four ranks, of which data ranks have nothing stored.
    four = run_ranks(4, growing, root, 101, {"tp": 2, "dp": 2}, False, declared).results
    assert len(set(four)) == 1
    assert "rng" in four[0]
    assert "shared by ranks that would have different ones" in four[0]
    back = run_ranks(1, growing, root, 101, {}, False, declared).results[0]
    assert back[0] == one[0]
    assert any("tp=1" in name for name in back[3])


def unequal(context: RankContext, root: str) -> str:
    with ProcessGroups.create(Layout(tp=2)) as groups:
        seed_all(context.rank)
        checkpointer = Checkpointer(root, groups=groups)
        with pytest.raises(PlanError) as caught:
            checkpointer.save(1, {"rng": RNG(shared=("tp",))})
        assert checkpointer.latest() is None
        # Two that differ along tp, undeclared, are stored for each; then asked for as shared.
        checkpointer.save(2, {"rng": RNG()})
        before = torch.get_rng_state()
        with pytest.raises(MismatchError, match="declared shared along tp"):
            checkpointer.load({"rng": RNG(shared=("tp",))})
        assert torch.equal(before, torch.get_rng_state())
        return str(caught.value)


def test_shared_streams_that_differ_are_not_saved(tmp_path: Path) -> None:
    for said in run_ranks(2, unequal, str(tmp_path)).results:
        assert "rng[cp=0,dp=0,pp=0]" in said
        assert "ranks 0 | ranks 1" in said


def test_a_stream_that_one_coordinate_lacks_is_kept_there() -> None:
    """As the stream of a CUDA device, which ranks without a device do not store."""
    layout = Layout(dp=2)
    generator = torch.Generator()
    rng = RNG(generators={"own": generator})
    node, leaves = saved_node(layout, rng, {0: 1, 1: 2})
    lacking = node["v"]["cp=0,dp=1,pp=0,tp=0"]
    del lacking["generator-own"], lacking["digests"]["generator-own"]
    table = {key: (leaf.dtype, leaf.shape) for key, (leaf, _) in leaves.items()}
    generator.manual_seed(7)
    expected = generator.get_state()
    matcher = Matcher(tensors=table, layout=layout, rank=1, codecs=Codecs())
    template = rng.template(StoredPart(node, table))
    matcher.match(template, node, "rng")
    assert matcher.result.kept == ["rng[cp=0,dp=1,pp=0,tp=0].generator-own"]
    for entry in matcher.result.tensors:
        entry.locals[0].copy_(leaves[list(table)[entry.tensor]][1])
    matcher.move_to(layout, closed=True)
    rng.restore(matcher.build(template, node, "rng"))
    assert torch.equal(generator.get_state(), expected)


DRAWS: dict[str, Callable[[random.Random], object]] = {
    "python": lambda own: random.random(),
    "python, normal": lambda own: random.gauss(0, 1),
    "numpy": lambda own: np.random.random(),
    "numpy, normal": lambda own: np.random.standard_normal(),
    "numpy, seed": lambda own: np.random.seed(3),
    "torch": lambda own: torch.rand(()),
    "own": lambda own: own.getrandbits(32),
    "own, normal": lambda own: own.gauss(0, 1),
}


@pytest.mark.parametrize("is_known", [True, False], ids=["from memory", "by their functions"])
@given(names=st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_a_capture_is_the_state_and_shows_every_draw(is_known: bool, names: list[str]) -> None:
    own = random.Random(5)
    streams = RNG(generators={"own": own})
    with pytest.MonkeyPatch.context() as patch:
        if not is_known:  # on an interpreter whose layout is another one
            patch.setattr(rng, "python_reader", lambda generator: None)
            patch.setattr(rng, "numpy_reader", lambda: None)
        seed_all(1)
        for name in names:
            before, again = streams.capture(), streams.capture()
            assert before.is_same(again)
            DRAWS[name](own)
            now = streams.capture()
            assert not before.is_same(now) or name == "numpy, seed"
            stated = {**global_accessors(), "generator-own": accessors(own)}
            assert {n: state_digest(each) for n, each in now.states().items()} == {
                n: state_digest(each.get()) for n, each in stated.items()
            }
        drawn = [draw() for _ in range(2)]
        streams.reset(now)
        assert [draw() for _ in range(2)] == drawn
        copied = copy.deepcopy(streams)  # its generators are its own
        here = copied.capture()
        own.random()
        assert copied.capture().is_same(here)


def test_streams_that_numpy_was_given_another_generator_for_are_captured() -> None:
    outer = np.random.get_bit_generator()  # type: ignore[attr-defined]
    streams = RNG()
    before = streams.capture()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
        other = streams.capture()
        assert not before.is_same(other)
        assert other.is_same(streams.capture())
        drawn = np.random.random()
        assert not other.is_same(streams.capture())
        streams.reset(other)
        assert np.random.random() == drawn
    finally:
        np.random.set_bit_generator(outer)  # type: ignore[attr-defined]

"""Values per rank under other layouts: taken, merged, kept or dropped by consent, never lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler

from holdfast import (
    RNG,
    AppliesLater,
    Checkpointer,
    FromPart,
    Layout,
    LayoutError,
    MismatchError,
    OnLayout,
    PerRank,
    PlacementError,
    ProcessGroups,
    Stored,
    Union,
)
from holdfast.checkpoint.load.requests import LoadRequest, find_dropped, taken_of
from holdfast.format.values import Codecs
from holdfast.state.flatten import flatten_state
from holdfast.state.matcher import Matcher
from holdfast.state.tensor_elements import tensors_of
from tests.drawn import drawn
from tests.harness import RankContext, run_ranks

AXES = ("tp", "cp", "dp", "pp")


# Every rank of a layout in one process: who gets what, against a definition without labels.


def stored_node(layout: Layout, axes: tuple[str, ...]) -> Any:
    """The node that all ranks of a layout together save for a value per `axes`."""
    trees: dict[str, Any] = {}
    node: Any = None
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        state = {"p": PerRank([[axis, at[axis]] for axis in sorted(axes)], axes=axes)}
        node = flatten_state(state, layout=layout, rank=rank, codecs=Codecs()).nodes["p"]
        trees |= node["v"]
    return {**node, "v": trees}


def place_of(layout: Layout, rank: int, axes: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    at = layout.coordinate(rank)
    return tuple((axis, at[axis]) for axis in sorted(axes))


sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3]) for axis in ("tp", "cp", "dp")})
some_axes = st.sets(st.sampled_from(AXES), min_size=1).map(lambda found: tuple(sorted(found)))


@drawn(
    quick=70,
    slow=200,
    saved=sizes,
    loaded=sizes,
    stored_axes=some_axes,
    same=st.booleans(),
    other=some_axes,
    missing=st.sampled_from(["error", "keep"]),
    surplus=st.sampled_from(["error", "drop"]),
    merging=st.booleans(),
    consent=st.booleans(),
)
def test_who_gets_what_is_what_brute_force_says(
    saved: dict[str, int],
    loaded: dict[str, int],
    stored_axes: tuple[str, ...],
    same: bool,
    other: tuple[str, ...],
    missing: str,
    surplus: str,
    merging: bool,
    consent: bool,
) -> None:
    before, after = Layout(**saved), Layout(**loaded)
    asked = stored_axes if same else other
    node = stored_node(before, stored_axes)
    there = {place_of(before, rank, stored_axes) for rank in before.ranks}
    mine = {rank: place_of(after, rank, asked) for rank in after.ranks}
    # The definition: what is stored at this rank's place, where left-out axes leave no choice.
    by_place: dict[Any, set[Any]] = {}
    for place in there:
        by_place.setdefault(tuple(p for p in place if p[0] in asked), set()).add(place)
    extra = {tuple(p for p in place if p[0] not in asked) for place in there}
    is_clear = set(asked) <= set(stored_axes) and len(extra) == 1
    is_merged = merging and (not is_clear or set(mine.values()) != set(by_place))
    requests, kept = [], []
    problems = 0
    for rank in after.ranks:
        merge = (lambda trees: list(trees.values())) if merging else None
        marker = PerRank(
            ["local"] if missing == "keep" else Stored(),
            axes=asked,
            missing=missing,
            surplus=surplus,
            merge=merge,
        )
        matcher = Matcher(tensors={}, layout=after, rank=rank, codecs=Codecs())
        matcher.match(marker, node, "p")
        result = matcher.result
        if not is_clear and not is_merged:
            assert len(result.mismatched) == 1
            assert "a value per" in result.mismatched[0]
            problems += 1
            continue
        taken = taken_of(result.per_rank_uses, {"p": ("q", node)})
        allow = ["p"] if consent else []
        requests.append(LoadRequest(used={"q": None}, boxes=b"", taken=taken, drops=allow))
        if not is_merged and mine[rank] not in by_place:
            assert (len(result.kept), len(result.missing)) == (
                (1, 0) if missing == "keep" else (0, 1)
            )
            kept.append(rank)
            continue
        assert result.kept + result.missing + result.mismatched == []
        built = matcher.build(marker, node, "p")
        if is_merged:
            order = [axis for axis in asked if axis in stored_axes]
            order += sorted(set(stored_axes) - set(asked))
            expected = sorted(there, key=lambda place: [dict(place)[axis] for axis in order])
            assert built == [[list(pair) for pair in place] for place in expected]
        else:
            (place,) = by_place[mine[rank]]
            assert built == [list(pair) for pair in place]
    if problems:
        assert problems == after.world_size
        return
    lost = set() if is_merged else {p for p in by_place if p not in mine.values()}
    names = sorted(
        f"p[{','.join(f'{axis}={index}' for axis, index in place)}]"
        for key in lost
        for place in by_place[key]
    )
    if lost and surplus == "error" and not consent:
        with pytest.raises(MismatchError, match="no rank of this layout takes") as caught:
            find_dropped({"q": node}, requests)
        assert all(name[2:-1] in str(caught.value) for name in names[:3])
    else:
        assert sorted(find_dropped({"q": node}, requests)) == names


# Real saves and loads.


class Loader:
    """A user's data loader: its state is one value per data rank."""

    def __init__(self, at: int, **policy: Any) -> None:
        self.tree: Any = {"at": at}
        self.policy = policy
        self.got: Any = None

    def state_dict(self) -> dict[str, object]:
        return {
            "epoch": 3,
            "workers": [PerRank(self.tree, axes=("dp",), **self.policy), "w"],
        }

    def load_state_dict(self, state: Any) -> None:
        self.got, self.tree = state, state["workers"][0]


class WholeLoader(Loader):
    def state_dict(self) -> Any:
        return PerRank(self.tree, axes=("dp",), **self.policy)

    def load_state_dict(self, state: Any) -> None:
        self.got = self.tree = state


def save_four(context: RankContext, root: str) -> None:
    layout = Layout(dp=2, tp=2)
    half = Layout(dp=2, name="half", ranks=[0, 1] if context.rank < 2 else [2, 3])
    with ProcessGroups.create(layout) as groups, Checkpointer(root, groups=groups) as checkpointer:
        dp, tp = groups.index("dp"), groups.index("tp")
        state: dict[str, object] = {
            "plain": {"n": PerRank({"x": torch.full((3,), float(dp)), "dp": dp}, axes=("dp",))},
            "all": PerRank({"dp": dp, "tp": tp}),
            "loader": Loader(10 + dp),
            "whole": WholeLoader(20 + dp),
            "tpwise": PerRank(tp, axes=("tp",)),
            "nested": PerRank({"in": PerRank([tp], axes=("tp",))}, axes=("dp",)),
        }
        if context.rank < 2:
            state["sub"] = OnLayout(half, PerRank(100 + context.rank, axes=("dp",)))
        checkpointer.save(1, state)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four")
    run_ranks(4, save_four, str(root))
    return root


def one(root: Path, state: dict[str, object], **options: Any) -> Any:
    with Checkpointer(root) as checkpointer:
        return checkpointer.load(state, **options)


def test_a_part_under_another_name_loses_no_value_either(four: Path) -> None:
    """What is loaded from a part of another name, or from a branch, is looked up there.

    It was looked up under the name in the state: an error by a number, or the coordinates of
    another part of that name.
    """
    lost = PerRank(Stored(), axes=("dp",))
    dropped = PerRank(Stored(), axes=("dp",), surplus="drop")
    for name in ("new", "tpwise"):  # the second is a part of other coordinates
        for source, asked in (("plain", {"n": lost}), ("plain.n", lost)):
            with pytest.raises(MismatchError, match=r"no rank of this layout takes.*dp=1"):
                one(four, {name: FromPart(source, asked)})
        report = one(four, {name: FromPart("plain", {"n": dropped}), "plain": {"n": dropped}})
        assert report.dropped == (f"{name}.n[dp=1]",)
        assert report.values[name]["n"]["dp"] == report.values["plain"]["n"]["dp"] == 0
    # What one of two takes is not lost.
    merged = PerRank(Stored(), axes=("dp",), merge=lambda trees: len(trees))
    report = one(four, {"a": FromPart("plain.n", merged), "plain": {"n": lost}})
    assert (report.dropped, report.values["a"]) == ((), 2)


def test_a_smaller_layout_loses_no_value_without_consent(four: Path) -> None:
    def asked(**policy: Any) -> dict[str, object]:
        return {"plain": {"n": PerRank({"x": torch.zeros(3), "dp": 5}, axes=("dp",), **policy)}}

    with pytest.raises(MismatchError) as caught:
        one(four, asked())
    for said in ("plain.n", "dp=1", "merge=", "surplus='drop'", "allow_dropped"):
        assert said in str(caught.value)
    untouched = asked()
    with pytest.raises(MismatchError):
        one(four, untouched)
    assert untouched["plain"]["n"].tree["x"].eq(0).all()  # type: ignore[index]
    report = one(four, asked(surplus="drop"))
    assert report.dropped == ("plain.n[dp=1]",)
    assert "1 dropped" in report.summary()
    assert report.values["plain"]["n"]["dp"] == 0
    for pattern in ("plain.n", "plain.n[dp=1]", "plain.*", "*", ["plain.n"]):
        assert one(four, asked(), allow_dropped=pattern).dropped == ("plain.n[dp=1]",)
    with pytest.raises(MismatchError):
        one(four, asked(), allow_dropped=["other"])
    with pytest.raises(MismatchError):
        one(four, asked(), ignore_unexpected=True, allow_missing=["*"])


def test_open_requests_drop_nothing_silently(four: Path) -> None:
    for state in (
        {"plain": Stored()},
        {"plain": {}},
        {"plain": {"n": Stored()}},
        {"plain": {"n": PerRank(Stored(), axes=("dp",))}},
        {"loader": Loader(0)},
        {"loader": Stored()},
        {"whole": WholeLoader(0)},
    ):
        with pytest.raises(MismatchError, match="no rank of this layout takes"):
            one(four, dict(state))
        report = one(four, dict(state), allow_dropped="*")
        assert len(report.dropped) == 1
        assert report.dropped[0].endswith("[dp=1]")
    loader, whole = Loader(0, surplus="drop"), WholeLoader(0, surplus="drop")
    report = one(four, {"loader": loader, "whole": whole})
    assert loader.got == {"epoch": 3, "workers": [{"at": 10}, "w"]}
    assert whole.got == {"at": 20}
    assert report.dropped == ("loader.workers.0[dp=1]", "whole[dp=1]")


@dataclass
class Sums:
    """A record of the user's."""

    x: torch.Tensor


def test_merge_makes_one_of_all(four: Path) -> None:
    seen: list[Any] = []

    def merge(trees: dict[str, Any]) -> Any:
        seen.append(list(trees))
        return {"at": [tree["at"] for tree in trees.values()]}

    loader, whole = Loader(0, merge=merge), WholeLoader(0, merge=merge)
    report = one(four, {"loader": loader, "whole": whole})
    assert loader.got == {"epoch": 3, "workers": [{"at": [10, 11]}, "w"]}
    assert whole.got == {"at": [20, 21]}
    assert seen == [["dp=0", "dp=1"]] * 2
    assert report.dropped == report.kept == ()

    target = torch.zeros(3)
    adding = lambda trees: {"x": sum(tree["x"] for tree in trees.values()), "dp": -1}  # noqa: E731
    state = {"plain": {"n": PerRank({"x": target, "dp": 0}, axes=("dp",), merge=adding)}}
    report = one(four, state)
    assert report.values["plain"]["n"]["x"] is target
    assert target.tolist() == [1, 1, 1]
    assert report.values["plain"]["n"]["dp"] == -1

    # In sequences, too, of whatever length, and in what is a union elsewhere.
    for tree, made in (
        ((target, 1), lambda each: (each, 2)),
        ([target], lambda each: [each, each]),
        ([target, 1, 2], lambda each: [each]),
        ([[target]], lambda each: [[each], "more"]),
        (Union({"y": target}), lambda each: {"y": each}),
    ):
        target.zero_()
        merge = lambda trees, made=made: made(sum(tree["x"] for tree in trees.values()))  # noqa: E731
        report = one(four, {"plain": {"n": PerRank(tree, axes=("dp",), merge=merge)}})
        assert target.tolist() == [1, 1, 1]
        value = report.values["plain"]["n"]
        assert len(value) == len(made(target))
        assert next(tensors_of(value))[1] is target
    target.zero_()
    merge = lambda trees: [Sums(sum(tree["x"] for tree in trees.values()))]  # noqa: E731
    with Checkpointer(four, codecs=Codecs(dataclasses=[Sums])) as checkpointer:
        asked = {"plain": {"n": PerRank([Sums(target)], axes=("dp",), merge=merge)}}
        assert checkpointer.load(asked).values["plain"]["n"][0].x is target
    assert target.tolist() == [1, 1, 1]

    for bad, said in (
        (lambda trees: trees["dp=7"], "merge of 2 stored values failed: KeyError"),
        (lambda trees: {"x": torch.zeros(4)}, "shape"),
        (lambda trees: {"x": 1}, "merge returned 1"),
        (lambda trees: {"dp": 1}, r"n\.x: merge returned nothing for this tensor"),
        (lambda trees: None, r"n\.x: merge returned nothing for this tensor"),
        (lambda trees: {"x": (target,)}, "merge returned "),
        (lambda trees: {"x": torch.full((3,), 0.1).double()}, None),
        (lambda trees: {"x": torch.full((3,), 0.1, dtype=torch.float64)}, "cannot hold"),
        (lambda trees: {"x": torch.full((3,), 1j)}, "cannot hold"),
    ):
        whole = WholeLoader(0)
        state = {
            "whole": WholeLoader(0, surplus="drop"),
            "plain": {"n": PerRank({"x": target}, axes=("dp",), merge=bad)},
        }
        if said is None:
            one(four, state)
            continue
        with pytest.raises(MismatchError, match=said):
            one(four, state)
        assert whole.got is None


def test_axes_that_differ(four: Path) -> None:
    with pytest.raises(MismatchError, match="not clear which to take along") as caught:
        one(four, {"all": PerRank(Stored(), axes=("dp",), surplus="drop")})
    assert "merge=" in str(caught.value)
    with pytest.raises(
        MismatchError, match="a value per dp,tp here, the checkpoint a value per tp"
    ):
        one(four, {"tpwise": PerRank(Stored(), axes=("dp", "tp"), surplus="drop")})
    report = one(
        four, {"all": PerRank(Stored(), axes=("dp", "tp"), surplus="drop")}
    )  # cp and pp had one coordinate each
    assert report.values["all"] == {"dp": 0, "tp": 0}
    assert len(report.dropped) == 3
    merged = one(four, {"all": PerRank(Stored(), axes=("dp",), merge=list)}).values["all"]
    assert merged == [f"cp=0,dp={dp},pp=0,tp={tp}" for dp, tp in itertools.product((0, 1), (0, 1))]
    by_tp = one(four, {"all": PerRank(Stored(), axes=("tp", "dp"), merge=list)}).values["all"]
    assert by_tp == [f"cp=0,dp={dp},pp=0,tp={tp}" for tp, dp in itertools.product((0, 1), (0, 1))]
    with pytest.raises(MismatchError, match="a value per dp here, the checkpoint a mapping"):
        one(four, {"plain": PerRank(Stored(), axes=("dp",))})
    with pytest.raises(PlacementError, match="nonsense"):
        one(four, {"tpwise": PerRank(Stored(), axes=("nonsense",))})


def test_nested_values_and_sub_layouts(four: Path) -> None:
    def asked(outer: str, inner: str) -> dict[str, object]:
        tree = {"in": PerRank(Stored(), axes=("tp",), surplus=inner)}
        return {"nested": PerRank(tree, axes=("dp",), surplus=outer)}

    with pytest.raises(MismatchError, match=r"nested: 1 \(dp=1\)"):
        one(four, asked("error", "drop"))
    with pytest.raises(MismatchError, match=r"nested\[dp=0\]\.in: 1 \(tp=1\)"):
        one(four, asked("drop", "error"))
    report = one(four, asked("drop", "drop"))
    assert sorted(report.dropped) == ["nested[dp=0].in[tp=1]", "nested[dp=1]"]
    assert report.values["nested"] == {"in": [0]}
    alone = Layout(name="half")
    with pytest.raises(MismatchError, match="sub"):
        one(four, {"sub": OnLayout(alone, PerRank(0, axes=("dp",)))})
    report = one(four, {"sub": OnLayout(alone, PerRank(0, axes=("dp",), surplus="drop"))})
    assert report.values["sub"] == 100
    assert report.dropped == ("sub[dp=1]",)


def load_four(context: RankContext, root: str) -> list[Any]:
    """dp 2 -> 4: two coordinates are not stored; and two ranks of four take no part in `sub`."""
    found: list[Any] = []
    with ProcessGroups.create(Layout(dp=4)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        rank = context.rank

        def asked(**policy: Any) -> dict[str, object]:
            return {"whole": WholeLoader(rank, **policy)}

        for state in (asked(), {"whole": Stored()}, {"plain": {}}):
            with pytest.raises(MismatchError) as caught:
                checkpointer.load(state)
            found.append(str(caught.value))
        keeping, allowing = asked(missing="keep"), asked()
        kept = checkpointer.load(keeping).kept
        allowed = checkpointer.load(allowing, allow_missing=["whole"]).kept
        for each in (keeping["whole"], allowing["whole"]):  # what stays is handed back to its owner
            assert each.got == {"at": 20 + rank if rank < 2 else rank}  # type: ignore[attr-defined]
        stored = checkpointer.load({"whole": Stored()}, allow_missing=["whole"])
        merging = asked(merge=lambda trees: sorted(trees))
        checkpointer.load(merging)
        merged = merging["whole"].got  # type: ignore[attr-defined]
        half = Layout(dp=2, name="half", ranks=[0, 1])
        parts: dict[str, object] = (
            {"sub": OnLayout(half, PerRank(0, axes=("dp",)))} if rank < 2 else {}
        )
        sub = checkpointer.load(parts)
        # Ranks with different policies: one that does not agree is enough.
        with pytest.raises(MismatchError, match="no rank of this layout takes"):
            checkpointer.load(
                {"all": PerRank(Stored(), missing="keep", surplus="error" if rank == 3 else "drop")}
            )
        report = checkpointer.load({"all": PerRank(Stored(), missing="keep", surplus="drop")})
        return [found, kept, allowed, stored.values["whole"], merged, sub.values, report.dropped]


def test_a_grown_layout(four: Path) -> None:
    results = run_ranks(4, load_four, str(four)).results
    for rank, (said, kept, allowed, stored, merged, sub, dropped) in enumerate(results):
        assert all("whole[dp=2]" in text or "plain.n[dp=2]" in text for text in said)
        assert all("missing='keep'" in text for text in said)
        expected = () if rank < 2 else (f"whole[dp={rank}]",)
        assert kept == allowed == expected
        assert stored == ({"at": 20 + rank} if rank < 2 else None)
        assert merged == ["dp=0", "dp=1"]
        assert sub == ({"sub": 100 + rank} if rank < 2 else {})
        assert dropped == tuple(f"all[cp=0,dp={dp},pp=0,tp=1]" for dp in (0, 1))


def test_an_open_part_gets_what_its_values_per_rank_do_not_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        tree = {"a": torch.ones(1), "t": torch.full((2,), 7.0), "n": 4}
        checkpointer.save(1, {"p": PerRank(dict(tree)), "q": [PerRank(dict(tree)), dict(tree)]})
        asked = {
            "p": PerRank({"a": torch.zeros(1)}),
            "q": [PerRank({"n": 0}), {"a": torch.zeros(1)}],
        }
        values = checkpointer.load(asked).values
        for found in (values["p"], *values["q"]):
            assert found["a"].tolist() == [1]
            assert found["t"].tolist() == [7, 7]
            assert found["n"] == 4


def test_wrong_policies_are_refused() -> None:
    for policy in ({"missing": "drop"}, {"surplus": "keep"}, {"merge": 1}):
        with pytest.raises(PlacementError, match=next(iter(policy))):
            PerRank(1, **policy)  # type: ignore[arg-type]
    assert PerRank(1, axes="dp").axes == ("dp",)


def test_expert_axes_where_there_is_no_expert_view() -> None:
    layout = Layout(cp=2, pp=2, order="cp-pp-dp")
    with pytest.raises(LayoutError, match="expert view"):
        flatten_state({"p": PerRank(1, axes=("ep",))}, layout=layout, rank=0, codecs=Codecs())
    flat = flatten_state({"p": PerRank(1)}, layout=layout, rank=3, codecs=Codecs())
    assert flat.nodes["p"]["v"] == {"cp=1,dp=0,pp=1,tp=0": 1}  # type: ignore[index]


class CountingSampler(DistributedSampler[int]):
    """A sampler that continues where a run has stopped, as a state counts the samples of a rank."""

    taken = 0

    def __iter__(self) -> Iterator[int]:
        first, self.taken = self.taken, 0
        for index in list(super().__iter__())[first:]:
            self.taken = first = first + 1
            yield index
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


SAMPLES: Any = list(range(24))


def of_torchdata(num_shares: int, index: int, batch_size: int, num_workers: int = 0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = DistributedSampler(SAMPLES, num_shares, index, seed=1)
    return StatefulDataLoader(SAMPLES, batch_size, sampler=sampler, num_workers=num_workers)


POSITIONS: dict[str, Callable[[int, int, int], Any]] = {
    "sampler": lambda num_shares, index, _: CountingSampler(SAMPLES, num_shares, index, seed=1),
    "loader": of_torchdata,
}


def taken_of_one(source: Any, most: int = 24) -> list[int]:
    """The samples of some batches of a loader, or of a sampler."""
    return [int(sample) for batch in itertools.islice(source, most) for sample in np.ravel(batch)]


@pytest.mark.parametrize("kind", POSITIONS)
def test_no_sample_is_lost_or_taken_twice_under_another_number_of_ranks(
    tmp_path: Path, kind: str
) -> None:
    """O5: a count of a rank's samples is equal on all ranks, and another place under others."""
    if kind == "loader":
        pytest.importorskip("torchdata")
    make = POSITIONS[kind]
    checkpointer = Checkpointer(tmp_path)
    for number, (num_shares, most) in enumerate(itertools.product((1, 2, 4), (0, 2))):
        seen = []
        for index in range(num_shares):
            iterator = iter(source := make(num_shares, index, 2))
            seen += taken_of_one(iterator, most)
        checkpointer.save(number, {"data": source})
        for others, batch_size in ((1, 3), (2, 1), (4, 2)):
            rest = []
            twins = [make(others, index, batch_size) for index in range(others)]
            if others != num_shares and (most or kind == "sampler"):
                for state in ({"data": twins[0]}, {"data": AppliesLater(twins[0])}):
                    with pytest.raises(MismatchError, match=f"data: .* one of {num_shares} shares"):
                        checkpointer.load(state, step=number)
                continue
            for twin in twins:
                checkpointer.load({"data": twin}, step=number)
                rest += taken_of_one(twin)
            assert sorted(seen + rest) == SAMPLES


def test_positions_are_stored_with_the_shares_of_the_data(tmp_path: Path) -> None:
    """O5: also of a loader with workers; a state without them, as of before, is taken."""
    pytest.importorskip("torchdata")
    checkpointer = Checkpointer(tmp_path)
    loader = of_torchdata(2, 0, 2, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    checkpointer.save(1, {"data": loader})
    with pytest.raises(MismatchError, match="one of 2 shares of the data, and here there are 1"):
        checkpointer.load({"data": AppliesLater(of_torchdata(1, 0, 2, num_workers=1))})
    old = of_torchdata(2, 0, 2)
    checkpointer.save(2, {"data": old.state_dict()})
    checkpointer.load({"data": of_torchdata(4, 0, 2)})


@pytest.mark.parametrize("marker", [lambda loader: loader, AppliesLater])
@pytest.mark.parametrize("num_batches", [3, 8, 12])
def test_a_loader_continues_in_the_order_of_its_epoch(
    tmp_path: Path, num_batches: int, marker: Any
) -> None:
    """O5: a load makes the iterator before the loop can set the epoch of the pass."""
    pytest.importorskip("torchdata")
    checkpointer = Checkpointer(tmp_path)

    def epochs(first: int, loader: Any) -> Iterator[tuple[int, list[int]]]:
        for epoch in range(first, 3):
            loader.sampler.set_epoch(epoch)
            yield from ((epoch, taken_of_one([batch])) for batch in loader)

    run = epochs(0, loader := of_torchdata(2, 0, 2))
    *_, (epoch, _) = itertools.islice(run, num_batches)
    checkpointer.save(1, {"data": marker(loader)})
    checkpointer.load({"data": marker(twin := of_torchdata(2, 0, 2))})
    assert list(epochs(epoch, twin)) == list(run)


class Indices(Sequence[int]):
    """What a sampler draws, as the wrapper of Lightning Fabric sees it."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getitem__(self, index: Any) -> Any:
        return [*self._sampler][index]

    def __len__(self) -> int:
        return len(self._sampler)


def test_an_order_that_no_checkpoint_has_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """O5: torchdata skips as many samples of whatever order a sampler draws after a load."""
    loader_of = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    generator = torch.Generator()
    loaders = {
        "drawn": loader_of(SAMPLES, sampler=SubsetRandomSampler(SAMPLES)),
        "batches": loader_of(
            SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 2, drop_last=True)
        ),
        "shuffled": loader_of(SAMPLES, shuffle=True),
        "own": loader_of(SAMPLES, shuffle=True, generator=generator),
        "wrapped": loader_of(
            SAMPLES,
            sampler=DistributedSampler(Indices(loader_of(SAMPLES, shuffle=True).sampler), 2, 0),
        ),
        "by epoch": of_torchdata(2, 0, 2),
        "in order": loader_of(SAMPLES),
        "counting": loader_of(SAMPLES, sampler=CountingSampler(SAMPLES, 2, 0)),
    }
    checkpointer = Checkpointer(tmp_path)
    report = checkpointer.save(1, {**loaders, "rng": RNG()})
    assert report.unstored == [
        "drawn.sampler",
        "batches.sampler",
        "own.generator",
        "wrapped.sampler",
    ]
    named = [record.getMessage() for record in caplog.records]
    assert all(any(path in each for each in named) for path in report.unstored), named
    assert not checkpointer.save(2, {**loaders, "rng": RNG()}).unstored
    kept = {"own": loaders["own"], "rng": RNG(generators={"data": generator})}
    assert not Checkpointer(tmp_path).save(3, kept).unstored


def rows_of(shards: list[int]) -> Iterator[tuple[int, dict[str, int]]]:
    for shard in shards:
        yield from ((row, {"n": row}) for row in range(6 * shard, 6 * shard + 6))


def test_a_dataset_that_is_split_by_node_is_no_other_share(tmp_path: Path) -> None:
    """O5: its state has a place among the shards of a rank, and not how many ranks there are."""
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    checkpointer = Checkpointer(tmp_path)
    shards = datasets.iterable_dataset.ExamplesIterable(rows_of, {"shards": list(range(4))})
    whole = datasets.IterableDataset(shards)

    def of_node(world_size: int) -> Any:
        return split(whole, 0, world_size)

    rows = of_node(4)
    iterator = iter(rows)
    assert next(iterator) == {"n": 0}
    checkpointer.save(2, {"data": rows})
    with pytest.raises(MismatchError, match="one of 4 shares"):
        checkpointer.load({"data": AppliesLater(of_node(2))})
    assert checkpointer.load({"data": AppliesLater(of_node(4))}).handed_over == ("data",)

"""Values that several ranks supply: equal, declared per rank, or declared a union; else refused."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from holdfast import (
    Checkpointer,
    Layout,
    OptimizerState,
    PerRank,
    PerRankValues,
    PlanError,
    ProcessGroups,
    Stored,
    Transient,
    Union,
)
from holdfast.format.values import Node, merge_nodes
from tests.drawn import drawn
from tests.harness import RankContext, run_ranks


class Counts:
    """A user's object whose state dict is what each rank has seen."""

    def __init__(self, seen: dict[str, int]) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, object]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = dict(state)


REFUSED: list[tuple[Callable[[int], object], str]] = [
    (lambda r: {"a": 1} if r else {"b": 1}, r"x: .*rank 0 has b, which rank 1 lacks; rank 1 has a"),
    (lambda r: {"n": Counter(a=1) if r else Counter(a=1, b=2)}, r"x\.n: .*rank 0 has b, which"),
    (lambda r: Counts({"a": 1, "b": 1} if r else {"a": 1}), r"x: .*rank 1 has b, which rank 0"),
    (lambda r: {"l": [{"a": 1}, {"b": r}]}, r"x\.l\.1\.b: .*rank 0 has 0, rank 1 has 1"),
    (lambda r: Union({"m": {"a": 1} if r else {"b": 1}}), r"x\.m: .*rank 0 has b, which rank 1"),
    (lambda r: Union({"m": r}), r"x\.m: .*rank 0 has 0, rank 1 has 1"),
    (lambda r: Union({"a": 1}) if r else {"b": 1}, r"x: .*some ranks declare it a Union"),
    (lambda r: {"t": torch.ones(2) if r else 3}, r"x\.t: .*rank 0 has 3, rank 1 has"),
    (lambda r: OrderedDict([("a", 1), ("b", 2)][:: 1 - 2 * r]), r"x: .*different orders"),
    (lambda r: {"k": {True: 1} if r else {1: 1}}, r"x\.k: .*rank 0 has 1, which rank 1 lacks"),
    (lambda r: Union({True: 1} if r else {1: 1}), r"x: .*equal in Python"),
    (lambda r: {"v": Transient() if r else 1}, r"x\.v: .*rank 0 has 1"),
    (lambda r: PerRank({"v": r}, axes=("tp",)), r"x\[tp=0\]\.v: .*rank 0 has 0, rank 1 has 1"),
]


def united(rank: int) -> dict[str, object]:
    return {
        "x": Union({"both": torch.ones(2), f"only {rank}": [rank, torch.full((2,), float(rank))]}),
        "y": [Union(OrderedDict({rank: {"a": rank}})), (Union({}),)],
        "z": {"deep": Union({"in": Union({str(rank): 1}), "own": PerRank({"r": rank})})},
        f"part {rank}": {"v": rank},
        "order": {"a": 1, "b": 2} if rank else {"b": 2, "a": 1},
    }


def merging(context: RankContext, root: str) -> list[str]:
    rank = context.rank
    layout = Layout(dp=2)
    messages = []
    with ProcessGroups.create(layout) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        for number, (make, _) in enumerate(REFUSED):
            try:
                checkpointer.save(100 + number, {"x": make(rank)})
                messages.append("saved")
            except PlanError as error:
                messages.append(str(error))
        assert checkpointer.steps() == []
        for step in (1, 2):
            checkpointer.save(step, united(rank))
        names = ("x", "y", "z", "part 0", "part 1", "order")
        for loaded in (checkpointer.load(dict.fromkeys(names, Stored())), checkpointer.load_all()):
            values: Any = loaded.values
            assert list(values["x"]) == ["both", "only 0", "only 1"]
            assert values["x"]["only 1"][1].tolist() == [1, 1]
            assert values["y"] == [OrderedDict({0: {"a": 0}, 1: {"a": 1}}), ({},)]
            assert values["z"]["deep"]["in"] == {"0": 1, "1": 1}
            assert (values["part 0"], values["part 1"]) == ({"v": 0}, {"v": 1})
            assert list(values["order"]) == ["b", "a"]
        own = values["z"]["deep"]["own"]
        assert isinstance(own, PerRankValues)
        assert [tree["r"] for tree in own.values.values()] == [0, 1]
        # Templates are unions, too: each rank fills the members that it has.
        target = {"both": torch.zeros(2), f"only {rank}": [0, torch.full((2,), 9.0)]}
        back: Any = checkpointer.load({"x": Union(target)}).values["x"]
        assert target["both"].tolist() == [1, 1]
        assert back[f"only {rank}"][1] is target[f"only {rank}"][1]  # type: ignore[index]
        assert target[f"only {rank}"][1].tolist() == [rank, rank]  # type: ignore[index]
        checkpointer.save(3, {"x": Union({n: back[n] for n in target})})
        return messages


def test_ranks_are_united_only_where_they_say_so(tmp_path: Path) -> None:
    one, other = run_ranks(2, merging, str(tmp_path)).results
    assert one == other, "every rank hears the same"
    for message, (_, pattern) in zip(one, REFUSED, strict=True):
        assert message != "saved", pattern

        assert re.search(pattern, message), message
        if "equal in Python" not in message:
            assert "PerRank" in message
            assert "Union" in message
    # A lone process sees everything: nothing of a union reaches the manifest as such.
    alone = Checkpointer(tmp_path)
    assert list(alone.load_all(step=2).values["x"]) == ["both", "only 0", "only 1"]
    assert [*alone.inspect(2).parts] == ["x", "y", "z", "part 0", "order", "part 1"]
    assert '"union"' not in (tmp_path / "iter_0000002" / "manifest.json").read_text()


# Against brute force

Tree = Any
"""("u", {name: tree}), ("p", label, tree), ("d", {name: tree}), ("l", [tree]), or a scalar."""

SCALARS = st.sampled_from([0, 1, True, 1.0, None, "a"])
NAMES = st.sampled_from(["a", "b", "c", 1, True])


def _trees(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    table = st.lists(st.tuples(NAMES, inner), max_size=3).map(
        lambda pairs: {(type(k), k): v for k, v in pairs}
    )
    return st.one_of(
        st.tuples(st.just("u"), table),
        st.tuples(st.just("d"), table),
        st.tuples(st.just("l"), st.lists(inner, max_size=2)),
        st.tuples(st.just("p"), st.sampled_from(["dp=0", "dp=1"]), inner),
    )


TREES = st.recursive(SCALARS, _trees, max_leaves=8)


@st.composite
def variants(draw: st.DrawFn) -> list[Tree]:
    """One tree as several ranks have it: members left out, labels and scalars changed."""
    whole = draw(TREES)

    def vary(tree: Tree, level: int) -> Tree:
        if not isinstance(tree, tuple):
            return draw(SCALARS) if draw(st.integers(0, 12)) == 0 else tree
        kind = tree[0]
        if kind == "p":
            return ("p", draw(st.sampled_from(["dp=0", "dp=1"])), vary(tree[2], level + 1))
        if kind == "l":
            return ("l", [vary(item, level + 1) for item in tree[1]])
        drop = 2 if kind == "u" else 10
        kept = {k: vary(v, level + 1) for k, v in tree[1].items() if draw(st.integers(0, drop)) > 0}
        return (kind, dict(reversed(kept.items())) if draw(st.booleans()) else kept)

    return [vary(whole, 0) for _ in range(draw(st.integers(1, 3)))]


def encode(tree: Tree) -> Node:
    if not isinstance(tree, tuple):
        return tree  # type: ignore[no-any-return]
    if tree[0] == "p":
        return {"$": "per_rank", "axes": ["dp"], "v": {tree[1]: encode(tree[2])}}
    if tree[0] == "l":
        return [encode(item) for item in tree[1]]
    if all(kind is str for kind, _ in tree[1]):
        table: Node = {k: encode(v) for (_, k), v in tree[1].items()}
    else:
        table = {"$": "dict", "v": [[k, encode(v)] for (_, k), v in tree[1].items()]}
    return {"$": "union", "v": table} if tree[0] == "u" else table


class Conflict(Exception):
    pass


def expected(trees: list[Tree]) -> Tree:
    """What is stored, by going through everything; Conflict where ranks differ."""
    kinds = {tree[0] if isinstance(tree, tuple) else type(tree) for tree in trees}
    if len(kinds) != 1:
        raise Conflict
    kind = kinds.pop()
    if not isinstance(kind, str):
        if any(tree != trees[0] for tree in trees):
            raise Conflict
        return trees[0]
    if kind == "l":
        if len({len(tree[1]) for tree in trees}) != 1:
            raise Conflict
        return ("l", [expected(list(items)) for items in zip(*(t[1] for t in trees), strict=True)])
    if kind == "p":
        labels = {tree[1] for tree in trees}
        return {name: expected([t[2] for t in trees if t[1] == name]) for name in labels}
    names = list(dict.fromkeys(name for tree in trees for name in tree[1]))
    if kind == "d" and any(set(tree[1]) != set(names) for tree in trees):
        raise Conflict
    if {(int, 1), (bool, True)} <= set(names) and len({frozenset(t[1]) for t in trees}) > 1:
        raise Conflict  # no dict can hold both
    return ("d", {n: expected([t[1][n] for t in trees if n in t[1]]) for n in names})


def plain(node: Any) -> Tree:
    """A node in the oracle's words."""
    if isinstance(node, list):
        return ("l", [plain(item) for item in node])
    if not isinstance(node, dict):
        return node
    assert node.get("$") != "union"
    if node.get("$") == "per_rank":
        return {label: plain(item) for label, item in node["v"].items()}
    pairs = node["v"] if "$" in node else node.items()
    return ("d", {(type(key), key): plain(item) for key, item in pairs})


def exactly(tree: Tree) -> Any:
    """With types, of which Python's == knows nothing."""
    if isinstance(tree, tuple):
        inner = tree[1].items() if tree[0] == "d" else enumerate(tree[1])
        return (tree[0], {k: exactly(v) for k, v in inner})
    if isinstance(tree, dict):
        return {k: exactly(v) for k, v in tree.items()}
    return (type(tree), tree)


@drawn(quick=150, slow=500, trees=variants())
def test_merging_equals_brute_force(trees: list[Tree]) -> None:
    named = [(f"rank {i}", encode(tree)) for i, tree in enumerate(trees)]
    if any(_clashes(tree) for tree in trees):
        return  # no rank can hold it
    try:
        want = expected(trees)
    except Conflict:
        with pytest.raises(PlanError, match="rank"):
            merge_nodes(named, path="x")
        return
    assert exactly(plain(merge_nodes(named, path="x"))) == exactly(want)


def _clashes(tree: Tree) -> bool:
    """Whether a dict has both 1 and True."""
    if not isinstance(tree, tuple):
        return False
    if tree[0] in "ud" and {(int, 1), (bool, True)} <= set(tree[1]):
        return True
    inner = [tree[2]] if tree[0] == "p" else tree[1] if tree[0] == "l" else tree[1].values()
    return any(map(_clashes, inner))


# Tensor-parallel rows and FSDP, more ranks than rows or columns


def empty_locals(context: RankContext, root: str, tp: int) -> None:
    layout = Layout(tp=tp, dp=4 // tp)

    def make(seed: int, num_rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(1, num_rows))
        parallelize_module(net, mesh["tp"], {"0": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        return net, torch.optim.AdamW(net.parameters())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    with ProcessGroups.create(layout) as groups:
        mesh = groups.mesh("dp", "tp")
        checkpointer = Checkpointer(root, groups=groups)
        for number, num_rows in enumerate((1, 3)):
            (a, one), (b, other) = make(0, num_rows), make(1, num_rows)
            step(a, one)
            checkpointer.save(
                10 * tp + number, {"m": a, "o": OptimizerState(one, a)}, overwrite=True
            )
            for _ in range(2):
                checkpointer.load({"m": b, "o": OptimizerState(other, b)}, step=10 * tp + number)
                for p, q in zip(a.parameters(), b.parameters(), strict=True):
                    assert torch.equal(p.to_local(), q.to_local())  # type: ignore[attr-defined]
                step(b, other)
            step(a, one)
            checkpointer.load({"m": a, "o": OptimizerState(one, a)}, step=10 * tp + number)


def test_locals_without_elements_save_and_load(tmp_path: Path) -> None:
    """A weight of one column, split over two ranks by columns and over two by rows."""
    run_ranks(4, empty_locals, str(tmp_path), 2)
    whole = Checkpointer(tmp_path).load_all(step=21).values
    assert whole["m"]["0.weight"].shape == (3, 1)  # type: ignore[index]

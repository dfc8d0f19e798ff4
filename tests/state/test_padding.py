"""Declared padding: which elements are real, against brute force, and who keeps a declaration."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import holdfast
from holdfast import Codecs, Layout, Padded, PlacementError, Replicated, Sharded, declare_padding
from holdfast.state import FlatShard, OptimizerState, flatten_state
from holdfast.state.flatten import LeafCache
from holdfast.state.leaves import FlatState, TensorLeaf, padding_views, tensor_leaf
from holdfast.state.module_tree import declared_padding

LONE = Layout()


def check(padded: Padded, full: torch.Tensor, layout: Layout, rank: int) -> list[int]:
    """The leaf holds the real elements of this rank's piece, each once; the padding is the rest.

    `full`: element i has the value i. Returns the real elements held.
    """
    whole = tensor_leaf(padded.value, key="k", layout=layout, rank=rank)
    leaf = tensor_leaf(padded, key="k", layout=layout, rank=rank)
    assert leaf.shape == padded.shape
    assert leaf.replica_set == whole.replica_set
    held: list[int] = []
    for box, local in zip(leaf.boxes, leaf.locals, strict=True):
        assert tuple(local.shape) == box.shape
        assert all(stop <= n for stop, n in zip(box.stop, padded.shape, strict=True))
        where = tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))
        assert torch.equal(full[where], local)
        held.extend(local.flatten().tolist())
    mine = [v for local in whole.locals for v in local.flatten().tolist()]
    corner = full[tuple(slice(n) for n in padded.shape)]
    real = set(corner.flatten().tolist())
    assert sorted(held) == sorted(real & set(mine))
    rest = [v for view in padding_views(whole, padded.shape) for v in view.flatten().tolist()]
    assert sorted(rest) == sorted(set(mine) - real)
    if held:
        assert all(local.numel() for local in leaf.locals)
        memory = padded.local.untyped_storage().data_ptr()
        assert all(local.untyped_storage().data_ptr() == memory for local in leaf.locals)
    return held


@st.composite
def shapes(draw: st.DrawFn, most: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A padded shape and a real one inside of it, dims of zero and none at all among them."""
    whole = draw(st.lists(st.integers(0, 6), max_size=most))
    return tuple(whole), tuple(draw(st.integers(0, n)) for n in whole)


@settings(deadline=None)
@given(pair=shapes(most=3), data=st.data())
def test_pieces_cut_over_any_dims(
    pair: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    whole, real = pair
    layout = Layout(tp=data.draw(st.integers(1, 4)), dp=data.draw(st.integers(1, 3)))
    axes = data.draw(st.permutations(["tp", "dp"]))
    dims = data.draw(st.permutations(range(len(whole))))
    split = dict(zip(dims, axes, strict=False))
    full = torch.arange(math.prod(whole)).reshape(whole)
    found: list[int] = []
    for rank in range(layout.world_size):
        local = full
        for dim, axis in split.items():
            members = layout.group(axis, rank)
            size = -(-whole[dim] // len(members))
            start = min(size * members.index(rank), whole[dim])
            local = local.narrow(dim, start, min(size, whole[dim] - start))
        piece = Sharded(local.clone(), whole, dims=cast("Any", split))
        found += check(Padded(piece, real), full, layout, rank)
    copies = layout.world_size // math.prod(getattr(layout, axis) for axis in split.values())
    corner = full[tuple(slice(n) for n in real)].flatten().tolist()
    assert sorted(found) == sorted(corner * copies)


@settings(deadline=None)
@given(pair=shapes(), data=st.data())
def test_runs_of_elements(
    pair: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    whole, real = pair
    full = torch.arange(math.prod(whole)).reshape(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, full.numel()), max_size=3)))
    found: list[int] = []
    for start, stop in itertools.pairwise([0, *cuts, full.numel()]):
        run = full.flatten()[start:stop].clone()
        found += check(Padded(FlatShard(run, start, full, "dp"), real), full, LONE, 0)
    assert sorted(found) == sorted(full[tuple(slice(n) for n in real)].flatten().tolist())


@settings(deadline=None)
@given(pair=shapes(), data=st.data())
def test_whole_tensors_with_any_strides(
    pair: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    whole, real = pair
    full = torch.arange(math.prod(whole)).reshape(whole)
    order = data.draw(st.permutations(range(len(whole))))
    back = [order.index(d) for d in range(len(whole))]
    strided = full.permute(list(order)).contiguous().permute(back)
    assert check(Padded(strided, real), full, LONE, 0) == check(
        Padded(Replicated(strided), real), full, LONE, 0
    )


def test_a_real_part_without_elements_is_one_empty_box() -> None:
    """Held by the replicas that hold the first element, so that their declaration covers it."""
    layout, full = Layout(tp=2, dp=2), torch.ones(3, 4)
    for real in [(0, 4), (3, 0), (0, 0)]:
        for rank in range(4):
            tp = layout.coordinate(rank)["tp"]
            rows = full[2 * tp : 2 * tp + 2]
            run = FlatShard(full.flatten()[5 * tp : 5 + 5 * tp], 5 * tp, full, "tp")
            for value in (Sharded(rows, (3, 4), dims={0: "tp"}), run):
                leaf = tensor_leaf(Padded(value, real), key="k", layout=layout, rank=rank)
                expected = [] if tp else [((0, 0), real)]
                assert [(box.offset, box.shape) for box in leaf.boxes] == expected
                assert [tuple(local.shape) for local in leaf.locals] == [b[1] for b in expected]


def test_shapes_that_are_no_part() -> None:
    for shape in [(4, 2), (3,), (3, 2, 1), (-1, 2)]:
        with pytest.raises(PlacementError, match=r"not a part of the tensor's \[3, 2\]"):
            Padded(torch.zeros(3, 2), shape)
    inner = Padded(torch.zeros(3), (2,))
    for value in (inner, [1, 2]):
        with pytest.raises(PlacementError, match="cannot be padded"):
            Padded(cast("Any", value), (2,))
    tensor = torch.zeros(6)
    shrunk = Padded(tensor, (5,))
    tensor.resize_(4)
    with pytest.raises(PlacementError, match=r"where: .*not a part of the tensor's \[4\]"):
        tensor_leaf(shrunk, key="where", layout=LONE, rank=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 3)
        self.head = nn.Linear(3, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.zeros(8))


def test_declarations_that_cannot_be() -> None:
    net = Tied()
    for name in ("nothing", "embed.weight"):
        with pytest.raises(PlacementError, match="no parameter or buffer"):
            declare_padding(net, name, (5, 3))
    with pytest.raises(PlacementError, match=r"'weight': a real shape of \[9, 3\]"):
        declare_padding(net.embed, "weight", (9, 3))
    declare_padding(net.embed, "weight", (5, 3))
    declare_padding(net.head, "weight", (6, 3))
    with pytest.raises(PlacementError, match=r"head.weight: this tied .*two real shapes"):
        declared_padding(net)
    declare_padding(net.head, "weight", (5, 3))
    assert len(declared_padding(net).by_tensor) == 1
    net.embed.weight = net.head.weight = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(PlacementError, match=r"^embed.weight: a real shape"):
        declared_padding(net)
    del net.embed.weight
    with pytest.raises(PlacementError, match=r"embed\.weight: its padding is declared"):
        declared_padding(net)
    net.embed.register_parameter("weight", None)
    net.head.register_parameter("weight", None)
    assert declared_padding(net).by_tensor == {}


def test_a_declaration_outlives_the_parameter() -> None:
    net = Tied()
    declare_padding(net.embed, "weight", (5, 3))
    declare_padding(net, "mask", (5,))
    first = flatten(net)
    assert first["m.embed.weight"].shape == (5, 3)
    assert first["m.mask"].shape == (5,)
    assert "m.head.weight" not in first  # tied: once, under its first name
    others = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net.to(torch.float64)]
    replaced = copy.deepcopy(net)
    replaced.embed.weight = replaced.head.weight = nn.Parameter(torch.zeros(7, 3))
    for other in [*others, replaced]:
        assert {k: leaf.shape for k, leaf in flatten(other).items()} == {
            k: leaf.shape for k, leaf in first.items()
        }
    # a declaration of a copy is its own
    declare_padding(others[0].embed, "weight", (4, 3))
    assert flatten(net)["m.embed.weight"].shape == (5, 3)


def flatten(net: nn.Module, cache: LeafCache | None = None) -> dict[str, TensorLeaf]:
    flat = flatten_state({"m": net}, layout=LONE, rank=0, codecs=Codecs(), cache=cache)
    return dict(flat.leaves)


def test_a_hook_of_the_state_dict_hides_no_declaration() -> None:
    class Detaching(nn.Embedding):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}weight"] = self.weight.detach()

    net = nn.Sequential(Detaching(8, 3))
    declare_padding(net[0], "weight", (5, 3))
    assert flatten(net)["m.0.weight"].shape == (5, 3)


def test_what_was_worked_out_is_used_again() -> None:
    """The same leaf objects for unchanged state, though parts are new; others after a change."""
    net = Tied()
    declare_padding(net.embed, "weight", (5, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    net.embed.weight.grad = torch.ones(8, 3)
    optimizer.step()
    cache = LeafCache()

    def flat() -> FlatState:
        state = {"m": net, "o": OptimizerState(optimizer, net)}
        return flatten_state(state, layout=LONE, rank=0, codecs=Codecs(), cache=cache)

    first = flat()
    assert first.leaves["o.state.embed.weight.exp_avg"].shape == (5, 3)
    again = flat()
    assert again.structure is first.structure
    assert all(again.leaves[key] is leaf for key, leaf in first.leaves.items())
    declare_padding(net.embed, "weight", (4, 3))
    changed = flat()
    assert changed.structure is not first.structure
    assert changed.leaves["m.embed.weight"].shape == (4, 3)
    moved = StorageWeakRef(net.embed.weight.data.untyped_storage())
    net.embed.weight.data = torch.ones(8, 3)
    now = flat()
    assert now.structure is changed.structure
    assert now.local("m.embed.weight", 0).data_ptr() == net.embed.weight.data_ptr()
    # nothing but the last pass keeps replaced tensors alive
    assert not moved.expired()
    del first, again, changed
    gc.collect()
    assert moved.expired()


def test_names_of_the_package() -> None:
    assert holdfast.Padded is Padded
    assert "declare_padding" in dir(holdfast)

"""Collectives carry values and gradients as one process does that has every rank's tensors.

All values are small whole numbers, so that sums are exact in every dtype and nothing is compared
with a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import GroupError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.collectives import (
    Axis,
    all_to_all,
    copy_to,
    gather_dim,
    gather_sum,
    reduce_from,
    scatter_sum,
    split_dim,
    split_sizes,
    sum_over,
)
from tests.harness import RankContext, run_ranks

LAYOUTS = (
    Layout(tp=4),
    Layout(tp=4, ranks=(2, 0, 3, 1)),
    Layout(tp=3, ranks=(3, 0, 1), name="without rank 2"),
    Layout(tp=2, dp=2, order="dp-tp"),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass
class Case:
    """What one collective is called with on every rank, and what one process makes of it."""

    name: str
    inputs: list[Tensor]
    """By index; one tensor several times where the ranks hold replicas."""
    call: Callable[..., Tensor]
    """The collective with all arguments but x and axis; a rank's own are made by `own`."""
    own: Callable[[int], dict[str, object]]
    expected: Callable[[list[Tensor]], list[Tensor]]
    is_same_use: bool = False
    """Whether all ranks use the result alike, so that its loss counts once."""


def whole_numbers(draw: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(2**30))
    values = torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)
    return values.transpose(0, -1).contiguous().transpose(0, -1) if draw.random() < 0.4 else values


def make_case(draw: random.Random, *, name: str, num_ranks: int, dtype: torch.dtype) -> Case:
    dim = draw.randrange(3)
    shape = [draw.randrange(1, 4) for _ in range(3)]
    sizes = [draw.choice((0, 1, 1, 2, 3)) for _ in range(num_ranks)]
    if draw.random() < 0.3:
        sizes = [draw.randrange(3)] * num_ranks
    given_dim = dim - 3 if draw.random() < 0.3 else dim

    def tensor(length: int | None = None, at: int = dim) -> Tensor:
        sized = [length if d == at and length is not None else n for d, n in enumerate(shape)]
        return whole_numbers(draw, sized, dtype)

    parts = partial(torch.split, split_size_or_sections=sizes, dim=dim)
    if name == "copy_to":
        return Case(name, [tensor()] * num_ranks, copy_to, lambda i: {}, lambda xs: xs)
    if name == "reduce_from":
        inputs = [tensor() for _ in sizes]
        return Case(name, inputs, reduce_from, lambda i: {}, lambda xs: [sum_all(xs)], True)
    if name == "sum_over":
        inputs = [tensor() for _ in sizes]
        total = partial(lambda xs: [sum_all(xs)] * num_ranks)
        return Case(name, inputs, sum_over, lambda i: {}, total)
    if name == "split_dim":
        whole = tensor(draw.randrange(2 * num_ranks + 1))
        cut = partial(lambda xs: list(torch.tensor_split(xs[0], num_ranks, dim=dim)))
        return Case(name, [whole] * num_ranks, split_dim, lambda i: {"dim": given_dim}, cut)
    if name == "scatter_sum":
        inputs = [tensor(sum(sizes)) for _ in sizes]
        arguments = {"dim": given_dim, "sizes": sizes}
        return Case(name, inputs, scatter_sum, lambda i: arguments, lambda xs: parts(sum_all(xs)))
    if name in ("gather_dim", "gather_sum"):
        inputs = [tensor(size) for size in sizes]
        arguments = {"dim": given_dim, "sizes": sizes}
        alike = name == "gather_dim"
        joined = partial(lambda xs: [torch.cat(xs, dim=dim)] * (1 if alike else num_ranks))
        call = gather_dim if alike else gather_sum
        return Case(name, inputs, call, lambda i: arguments, joined, alike)
    counts = [[draw.choice((0, 0, 1, 2)) for _ in sizes] for _ in sizes]
    back = [[counts[sender][index] for sender in range(num_ranks)] for index in range(num_ranks)]

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        runs = [x.split(counts[index]) for index, x in enumerate(xs)]
        return [torch.cat([run[index] for run in runs]) for index in range(num_ranks)]

    inputs = [tensor(sum(row), at=0) for row in counts]
    own = partial(lambda i: {"send": counts[i], "receive": back[i]})
    return Case(name, inputs, all_to_all, own, exchanged)


def sum_all(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def check(case: Case, axis: Axis, draw: random.Random) -> None:
    """Compare this rank's result and gradient with those of one process, for sums of losses."""
    leaves = {id(x): x.detach().clone().requires_grad_() for x in case.inputs}
    wanted = case.expected([leaves[id(x)] for x in case.inputs])
    weights = [whole_numbers(draw, out.shape, out.dtype) for out in wanted]
    sum(((w * out).double().sum() for w, out in zip(weights, wanted, strict=True))).backward()
    place = 0 if case.is_same_use else axis.index

    x = case.inputs[axis.index].detach().clone().requires_grad_()
    got = case.call(x, axis=axis, **case.own(axis.index))
    where = f"{case.name} at {axis}, {case.own(axis.index)}, shape {list(x.shape)}, {x.dtype}"
    assert torch.equal(got, wanted[place]), where
    assert got.dtype == x.dtype
    gradient = weights[place].clone()
    got.backward(gradient)
    assert torch.equal(x.grad, leaves[id(case.inputs[axis.index])].grad), where
    assert torch.equal(x, case.inputs[axis.index]), f"x was written to by {where}"
    assert torch.equal(gradient, weights[place]), f"the gradient was written to by {where}"


NAMES = (
    "copy_to",
    "reduce_from",
    "sum_over",
    "split_dim",
    "gather_dim",
    "gather_sum",
    "scatter_sum",
    "all_to_all",
)

REPEATS = 4
"""Generated cases of each collective, dtype and layout."""


def compare_with_one_process(rank: RankContext) -> int:
    done = 0
    for layout in LAYOUTS:
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            axis = Axis.of(groups, "tp")
            assert axis.ranks[axis.index] == rank.rank
            draw = random.Random(len(layout.ranks))
            for dtype in DTYPES:
                for name in NAMES * REPEATS:
                    case = make_case(draw, name=name, num_ranks=axis.size, dtype=dtype)
                    check(case, axis, draw)
                    done += 1
    return done


def misuse(rank: RankContext) -> None:
    """Every refusal is local: no rank has started to communicate when it is raised."""
    layout = Layout(tp=2)
    with ProcessGroups.create(layout, names=["dp_cp"]) as groups, pytest.raises(GroupError):
        Axis.of(groups, "tp")
    with ProcessGroups.create(layout) as groups:
        axis = Axis.of(groups, "tp")
        x = torch.ones(3, 2, requires_grad=True)
        with pytest.raises(GroupError, match="dim 0"):
            gather_dim(x, axis=axis, dim=0, sizes=(2, 2))
        with pytest.raises(GroupError, match="dim 1"):
            gather_sum(x, axis=axis, dim=1, sizes=(2,))
        with pytest.raises(GroupError, match="sum 3"):
            scatter_sum(x, axis=axis, dim=0, sizes=(2, 2))
        with pytest.raises(GroupError, match="sum 3"):
            all_to_all(x, axis=axis, send=(4, -1), receive=(1, 1))
        with pytest.raises(GroupError, match="receive"):
            all_to_all(x, axis=axis, send=(2, 1), receive=(3,))
        with pytest.raises(GroupError, match="once, not twice"):
            torch.autograd.grad(copy_to(x, axis=axis).square().sum(), x, create_graph=True)


@pytest.mark.slow
def test_values_and_gradients_are_those_of_one_process() -> None:
    done = run_ranks(4, compare_with_one_process).results
    assert done == [3 * REPEATS * 8 * (4 - (rank == 2)) for rank in range(4)]


def test_misuse_is_refused_before_anything_is_sent() -> None:
    run_ranks(2, misuse)


def test_on_one_rank_each_returns_its_argument() -> None:
    axis = Axis.of(ProcessGroups.single(rank=5), "tp")
    assert (axis.size, axis.index, axis.ranks) == (1, 0, (5,))
    x = torch.ones(3, 2, requires_grad=True)
    for call in (copy_to, reduce_from, sum_over):
        assert call(x, axis=axis) is x
    assert split_dim(x, axis=axis, dim=1) is x
    for sized in (gather_dim, gather_sum, scatter_sum):
        assert sized(x, axis=axis, dim=0, sizes=(3,)) is x
        with pytest.raises(GroupError):
            sized(x, axis=axis, dim=0, sizes=(2,))
    assert all_to_all(x, axis=axis, send=(3,), receive=(3,)) is x
    with pytest.raises(GroupError, match="receive"):
        all_to_all(x, axis=axis, send=(3,), receive=(2,))
    with pytest.raises(GroupError, match="one rank"):
        _ = axis.group


@given(length=st.integers(0, 300), num_parts=st.integers(1, 70))
def test_split_sizes_are_those_of_tensor_split(length: int, num_parts: int) -> None:
    parts = torch.empty(length).tensor_split(num_parts)
    assert split_sizes(length, num_parts=num_parts) == tuple(len(part) for part in parts)

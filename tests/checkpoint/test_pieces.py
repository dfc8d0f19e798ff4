"""Several boxes of one tensor on a rank (`Pieces`), against the tensor that they are cut from."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from holdfast import Checkpointer, MismatchError
from holdfast.errors import HoldfastError, PlacementError
from holdfast.state import Pieces
from tests.drawn import drawn
from tests.harness import RankContext, run_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """A shape, and two ways to cut it, by any cuts of boxes, not of whole dims alone."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, cut(draw, shape), cut(draw, shape)


def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        for start, length in ((0, at), (at, size[dim] - at)):
            if length:
                boxes.append(
                    (
                        (*offset[:dim], offset[dim] + start, *offset[dim + 1 :]),
                        (*size[:dim], length, *size[dim + 1 :]),
                    )
                )
    return draw(st.permutations(boxes))


def pieces_of(whole: torch.Tensor, boxes: list[Box], *, strided: bool = False) -> Pieces:
    """Cut a tensor; `strided` pieces are views, others copies."""
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        for offset, size in boxes
    ]
    if not strided:
        parts = [each.clone(memory_format=torch.contiguous_format) for each in parts]
    return Pieces(tuple(parts), tuple(offset for offset, _ in boxes), tuple(whole.shape))


@drawn(quick=10, slow=60, cutting=cuttings(), strided=st.booleans())
def test_any_cutting_loads_into_any_other(
    cutting: tuple[tuple[int, ...], list[Box], list[Box]], strided: bool
) -> None:
    shape, ones, others = cutting
    whole = torch.randn(shape)
    with tempfile.TemporaryDirectory() as root:
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, {"s": {"w": pieces_of(whole, ones, strided=strided)}})
        with Checkpointer(root) as checkpointer:
            target = torch.zeros(shape)
            checkpointer.load({"s": {"w": target}})
            assert torch.equal(target, whole)
            there = torch.zeros(shape)
            checkpointer.load({"s": {"w": pieces_of(there, others, strided=True)}})
            assert torch.equal(there, whole)


class Owner:
    """Holds a tensor of (4, 3) as two pieces behind `state_dict`, and may forget the second one."""

    def __init__(self, fill: float, *, num_taken: int = 2) -> None:
        self.held, self.num_taken = [torch.full((2, 3), fill), torch.full((2, 3), -fill)], num_taken

    def state_dict(self) -> dict[str, Any]:
        return {"w": Pieces(tuple(map(torch.clone, self.held)), ((0, 0), (2, 0)), (4, 3))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held[: self.num_taken] = state["w"][: self.num_taken]


def test_an_owner_is_asked_for_each_of_its_pieces(tmp_path: Any) -> None:
    """R1."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"o": Owner(2.0)})
        there = Owner(0.0)
        checkpointer.load({"o": there})
        assert [each.unique().tolist() for each in there.held] == [[2.0], [-2.0]]
        with pytest.raises(MismatchError, match=r"o\.w\.1: the Owner has other values"):
            checkpointer.load({"o": Owner(0.0, num_taken=1)})


def test_one_piece_of_each_of_many(tmp_path: Any) -> None:
    """They are matched together, and each has its own place."""
    wholes = {f"w{i}": torch.randn(4, 3) for i in range(24)}
    boxes: dict[str, Box] = {name: ((i % 3, 0), (2, 3)) for i, name in enumerate(wholes)}
    there = {name: torch.zeros(4, 3) for name in wholes}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"s": wholes})
        pieces = {name: pieces_of(there[name], [boxes[name]], strided=True) for name in wholes}
        checkpointer.load({"s": pieces})
    for i, (name, whole) in enumerate(wholes.items()):
        rows = slice(i % 3, i % 3 + 2)
        assert torch.equal(there[name][rows], whole[rows])
        assert not there[name].sum(1)[: rows.start].any()


@pytest.mark.parametrize("num_boxes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_save_takes_the_pieces_that_it_is_given(tmp_path: Any, num_boxes: int) -> None:
    """X11. In other memory than at the save before, with other elements, or cut at other places."""
    cuts: dict[int, tuple[list[Box], list[Box]]] = {
        1: ([((0, 0), (6, 4))], [((0, 0), (6, 4))]),
        2: ([((0, 0), (2, 4)), ((2, 0), (4, 4))], [((0, 0), (6, 1)), ((0, 1), (6, 3))]),
    }
    boxes, turned = cuts[num_boxes]
    wholes = [{f"w{i}": torch.randn(6, 4) for i in range(3)} for _ in range(5)]
    with Checkpointer(tmp_path) as checkpointer:
        kept = []
        for step, whole in enumerate(wholes):
            pieces = {name: pieces_of(each, boxes) for name, each in whole.items()}
            kept.append(pieces)  # their memory is not used again
            checkpointer.save(step, {"s": pieces})
        for piece in kept[-1].values():  # in place
            for local in piece.locals:
                local += 1
        checkpointer.save(5, {"s": kept[-1]})
        last = {name: each + 1 for name, each in wholes[-1].items()}
        checkpointer.save(6, {"s": {n: pieces_of(each, turned) for n, each in last.items()}})
        for step, whole in enumerate([*wholes, last, last]):
            target = {name: torch.zeros(6, 4) for name in whole}
            checkpointer.load({"s": target}, step=step)
            assert all(torch.equal(target[name], each) for name, each in whole.items()), step


@pytest.mark.parametrize("lost", [0, 2])
def test_an_element_in_no_piece_is_refused(tmp_path: Any, lost: int) -> None:
    whole = torch.arange(12.0).view(3, 4)
    boxes: list[Box] = [((0, 0), (1, 4)), ((1, 0), (2, 2)), ((1, 2), (2, 2))]
    del boxes[lost]
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(HoldfastError, match=r"s/w|s\.w"):
        checkpointer.save(1, {"s": {"w": pieces_of(whole, boxes)}})


def test_what_is_no_piece_is_refused() -> None:
    one, two = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    for locals_, offsets in (((), ()), ((one, two), ((0,), (2,))), ((one,), ((3,),))):
        with pytest.raises(PlacementError):
            Pieces(locals_, offsets, (4,))


def over_two(context: RankContext, root: str) -> list[Any]:
    """Each rank has pieces that interleave with the other's; a copy that differs is named."""
    from holdfast import Layout, ProcessGroups

    whole = torch.arange(24.0).view(6, 4)
    rows: list[Box] = [((row, 0), (1, 4)) for row in range(context.rank, 6, 2)]
    both: list[Box] = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    out: list[Any] = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        with Checkpointer(root, groups=groups) as checkpointer:
            checkpointer.save(1, {"s": {"w": pieces_of(whole, rows)}})
            target = torch.zeros(6, 4)
            mine = pieces_of(target, both[context.rank :], strided=True)
            checkpointer.load({"s": {"w": mine}})
            out.append(torch.equal(target[3 * context.rank :], whole[3 * context.rank :]))
        spoiled = whole.clone()
        spoiled[5, 3] += context.rank
        with Checkpointer(root, groups=groups) as checkpointer:
            try:
                checkpointer.save(2, {"s": {"w": pieces_of(spoiled, both)}})
                out.append("saved")
            except HoldfastError as error:
                out.append("w" in str(error) and type(error).__name__)
    return out


def test_over_ranks(tmp_path: Any) -> None:
    for good in run_ranks(2, over_two, str(tmp_path)).results:
        assert good == [True, "DriftError"]


def test_a_shape_that_is_not_the_stored_one_is_refused(tmp_path: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"s": {"w": torch.zeros(4)}})
        pieces = Pieces((torch.zeros(3), torch.zeros(2)), ((0,), (3,)), (5,))
        with pytest.raises(MismatchError, match="w"):
            checkpointer.load({"s": {"w": pieces}})

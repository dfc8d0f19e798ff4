"""Tensors that share memory: stored once where they are one, refused where loads would collide."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from holdfast import (
    Checkpointer,
    MismatchError,
    OptimizerState,
    Padded,
    PlacementError,
    Replicated,
    Sharded,
    Stored,
)
from holdfast.arrays.boxes import Box
from holdfast.checkpoint.load.target_memory import without_ties
from holdfast.state import shared_memory as overlaps
from holdfast.state.matcher import TensorRequest
from holdfast.state.shared_memory import shared_memory
from tests.drawn import drawn


def save_apart(root: Path, **tensors: torch.Tensor) -> Checkpointer:
    """A checkpoint in which each of the tensors is one of its own."""
    checkpointer = Checkpointer(root)
    checkpointer.save(1, {"x": {name: t.clone() for name, t in tensors.items()}})
    return checkpointer


# Refused


Aliased = Callable[[torch.Tensor], dict[str, torch.Tensor]]
OVERLAPPING: dict[str, Aliased] = {
    "the same memory": lambda b: {"a": b, "b": b.data},
    "a view of the whole": lambda b: {"a": b, "b": b.view(-1)},
    "a row": lambda b: {"a": b, "b": b[2]},
    "overlapping slices": lambda b: {"a": b[:3], "b": b[2:]},
    "overlapping columns": lambda b: {"a": b[:, :4], "b": b[:, 3:]},
    "a transpose": lambda b: {"a": b[:, ::2], "b": b.t()},
    "other bits": lambda b: {"a": b, "b": b.view(torch.int32)},
    "a column and a row": lambda b: {"a": b[:, 1], "b": b[1]},
    "three, of which two overlap": lambda b: {"a": b[:2], "b": b[4:], "c": b[3:5]},
    "numpy": lambda b: {"a": b, "b": torch.from_numpy(b.numpy()[1:])},
    "expanded": lambda b: {"a": torch.as_strided(b, (3, 6), (0, 1))},
    "overlapping windows": lambda b: {"a": b.view(-1).unfold(0, 4, 2)},
}


@pytest.mark.parametrize("alias", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_targets_that_overlap_are_refused_before_one_is_touched(
    tmp_path: Path, alias: Aliased
) -> None:
    base = torch.arange(36.0).view(6, 6)
    checkpointer = save_apart(tmp_path, **alias(base + 1))
    before = base.clone()
    targets = alias(base)
    names = [f"x.{name}" for name in targets]
    with pytest.raises(MismatchError, match="share memory") as caught:
        checkpointer.load({"x": targets})
    assert sum(name in str(caught.value) for name in names) >= min(2, len(names))
    assert torch.equal(base, before)


def test_overlaps_are_found_across_parts(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model, "ema": {"w": other.weight.detach()}})
    with pytest.raises(MismatchError, match=r"model\.weight and ema\.w: .*share memory"):
        checkpointer.load({"model": model, "ema": {"w": model.weight.detach()}})


def test_padding_that_is_cleared_is_a_target_too(tmp_path: Path) -> None:
    base = torch.ones(8, 2)
    checkpointer = Checkpointer(tmp_path)
    state = {"a": Padded(base, (6, 2)), "b": torch.full((2, 2), 5.0)}
    checkpointer.save(1, {"x": state})
    with pytest.raises(MismatchError, match=r"x\.b.*padding of x\.a|padding of x\.a.*x\.b"):
        checkpointer.load({"x": {"a": Padded(base, (6, 2)), "b": base[6:]}})
    checkpointer.load({"x": {"a": Padded(base, (6, 2)), "b": torch.empty(2, 2)}})
    assert base[6:].eq(0).all()


# Not refused


DISJOINT: dict[str, Aliased] = {
    "columns": lambda b: {"a": b[:, :2], "b": b[:, 2:4], "c": b[:, 4:]},
    "interleaved columns": lambda b: {"a": b[:, ::2], "b": b[:, 1::2]},
    "interleaved rows": lambda b: {"a": b[::2], "b": b[1::2]},
    "runs": lambda b: {"a": b.view(-1)[:10], "b": b.view(-1)[10:35], "c": b.view(-1)[35:]},
    "blocks": lambda b: {f"{i}{j}": b[3 * i : 3 * i + 3, 2 * j : 2 * j + 2]
                         for i in range(2) for j in range(3)},
    "transposed blocks": lambda b: {"a": b[:3].t(), "b": b[3:].t()},
    "real and imaginary": lambda b: {"a": torch.view_as_complex(b.view(6, 3, 2)).real,
                                     "b": torch.view_as_complex(b.view(6, 3, 2)).imag},
    "empty": lambda b: {"a": b, "b": b[2:2], "c": b[:, 6:]},
    "diagonal and triangle": lambda b: {"a": b.diagonal(), "b": b[0, 1:], "c": b[1:, 0]},
}  # fmt: skip


@pytest.mark.parametrize("alias", DISJOINT.values(), ids=DISJOINT.keys())
@pytest.mark.parametrize("by_map", [False, True])
def test_disjoint_views_of_one_base_load(
    tmp_path: Path, alias: Aliased, by_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_map:
        monkeypatch.setattr(overlaps, "_MAX_RUNS", 0)
    truth = torch.arange(36.0).view(6, 6)
    checkpointer = save_apart(tmp_path, **alias(truth))
    base = torch.zeros(6, 6)
    checkpointer.load({"x": alias(base)})
    for name, value in alias(base).items():
        assert torch.equal(value, alias(truth)[name]), name


def test_one_object_under_several_names_is_no_overlap(tmp_path: Path) -> None:
    w = torch.arange(4.0)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": {"a": w, "b": [w]}, "y": {"c": w}})
    target = torch.zeros(4)
    checkpointer.load({"x": {"a": target, "b": [target]}, "y": {"c": target}})
    assert torch.equal(target, w)
    views = {"x": {"a": target.zero_(), "b": [target.view(4)]}, "y": {"c": target.data}}
    checkpointer.load(views)
    assert torch.equal(target, w)


def test_lstm_and_fused_weights_load(tmp_path: Path) -> None:
    """Parameters that are views of one flat buffer, as CUDA's RNNs and sharded optimizers have."""

    def make() -> nn.LSTM:
        lstm = nn.LSTM(3, 4)
        flat = torch.randn(sum(p.numel() for p in lstm.parameters()))
        at = 0
        for p in lstm.parameters():
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()
        return lstm

    model, twin = make(), make()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model})
    checkpointer.load({"model": twin})
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


# Stored once


class Tied(nn.Module):
    """Two parameters that are one memory."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight.data = self.embed.weight.data


def test_a_model_tied_by_data_round_trips(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    model, twin, untied = Tied(), Tied(), Tied(tied=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embed(torch.tensor([1]))).sum().backward()
    optimizer.step()
    report = checkpointer.save(1, {"model": model, "optimizer": OptimizerState(optimizer, model)})
    assert report.num_tensors == 1 + 2 * 3, "one weight; of each parameter two moments and a step"
    other = torch.optim.AdamW(twin.parameters())
    for _ in range(2):
        checkpointer.load({"model": twin, "optimizer": OptimizerState(other, twin)})
        assert torch.equal(twin.head.weight, model.head.weight)
        assert twin.head.weight.data_ptr() == twin.embed.weight.data_ptr()
    checkpointer.load({"model": untied})
    assert torch.equal(untied.head.weight, untied.embed.weight)
    again = Checkpointer(tmp_path / "again").save(1, {"model": twin})
    assert again.num_tensors == 1
    checkpointer.save(2, {"model": Tied(tied=False)})
    with pytest.raises(MismatchError, match=r"embed\.weight and .*head\.weight: .*share memory"):
        checkpointer.load({"model": twin})


ONE: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "view": lambda w: w.view(w.shape),
    "slice": lambda w: w[:],
    "expanded": lambda w: w.expand(w.shape),
    "numpy": lambda w: w.numpy(),
    "replicated": Replicated,
}


@pytest.mark.parametrize("again", ONE.values(), ids=ONE.keys())
def test_identical_memory_is_stored_once(
    tmp_path: Path, again: Callable[[torch.Tensor], object]
) -> None:
    w = torch.randn(3, 4)
    checkpointer = Checkpointer(tmp_path)
    for step in range(3):  # also from the cache
        assert checkpointer.save(step, {"a": {"w": w}, "b": {"v": again(w)}}).num_tensors == 1
    loaded = checkpointer.load({"a": Stored(), "b": Stored()}).values
    assert torch.equal(loaded["a"]["w"], w)
    assert torch.equal(torch.as_tensor(loaded["b"]["v"]), w)


def test_markers_around_one_memory_are_one(tmp_path: Path) -> None:
    w = torch.randn(3, 4)
    checkpointer = Checkpointer(tmp_path)

    def state(w: torch.Tensor) -> dict[str, object]:
        return {
            "x": {
                "a": Sharded(w, (3, 4), dims={0: "dp"}),
                "b": Sharded(w.data, (3, 4), dims={0: "dp"}),
                "c": Padded(w, (2, 4)),
                "d": Padded(w.data, (2, 4)),
            }
        }

    # The padding of one is the last row of the other: two tensors, of which neither is whole.
    with pytest.raises(PlacementError, match=r"x\.a and x\.c: the state's tensors share memory"):
        checkpointer.save(1, state(w))
    zeros = Padded(torch.zeros(3, 4), (2, 4))
    apart = {name: zeros if name in "cd" else each for name, each in state(w)["x"].items()}  # type: ignore[attr-defined]
    assert checkpointer.save(1, {"x": apart}).num_tensors == 2
    with pytest.raises(MismatchError, match="share memory"):
        checkpointer.load(state(torch.zeros(3, 4)))


class Shows:
    """An object that is given new tensors by a load."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def test_what_only_looks_alike_is_stored_apart(tmp_path: Path) -> None:
    w = torch.randn(4, 4)
    c = torch.randn(3, dtype=torch.complex64)
    other = {
        "w": w, "t": w.t(), "bits": w.view(torch.int32), "row": w[0], "flat": w.view(-1),
        "e1": torch.empty(0), "e2": torch.empty(0), "e3": torch.empty(0, 3), "c": c,
        "conj": c.conj(),
    }  # fmt: skip
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        assert checkpointer.save(step, {"x": Shows(other)}).num_tensors == len(other)
    loaded = checkpointer.load({"x": Stored()}).values["x"]
    for name, value in other.items():
        assert torch.equal(loaded[name], value), name


def test_the_cache_forgets_memory_that_parted(tmp_path: Path) -> None:
    """Ties that come and go between saves of the same objects."""
    a, b, c = torch.randn(3), torch.randn(3), torch.randn(3)
    checkpointer = Checkpointer(tmp_path)
    state = {"x": {"a": a, "b": b}, "y": {"c": c, "n": 1}}
    assert checkpointer.save(1, state).num_tensors == 3
    b.data, c.data = a.data, a.data
    assert checkpointer.save(2, state).num_tensors == 1
    c.data = torch.full((3,), 7.0)
    assert checkpointer.save(3, state).num_tensors == 2
    b.data = torch.full((3,), 8.0)
    assert checkpointer.save(4, state).num_tensors == 3
    for step, want in ((1, None), (2, a), (3, torch.full((3,), 7.0)), (4, torch.full((3,), 7.0))):
        loaded = checkpointer.load({"x": Stored(), "y": Stored()}, step=step).values
        assert want is None or torch.equal(loaded["y"]["c"], want)
    assert loaded["x"]["b"].tolist() == [8.0] * 3


def test_a_cached_dict_met_before_its_tie_is_not_used_again(tmp_path: Path) -> None:
    """A dict of tensors that was stored under its own keys, behind a new part with its memory."""
    w = torch.randn(3)
    checkpointer = Checkpointer(tmp_path)
    late = {"w": w}
    assert checkpointer.save(1, {"late": late}).num_tensors == 1
    assert checkpointer.save(2, {"early": {"v": [w.data]}, "late": late}).num_tensors == 1
    loaded = checkpointer.load({"early": Stored(), "late": Stored()}).values
    assert loaded["early"]["v"][0] is loaded["late"]["w"]


# Against brute force


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some strided views of one buffer."""
    base = torch.zeros(draw(st.integers(1, 40)), dtype=torch.int16)
    found = []
    for _ in range(draw(st.integers(1, 5))):
        offset = draw(st.integers(0, len(base) - 1))
        room = len(base) - 1 - offset
        shape, strides = [], []
        for _ in range(draw(st.integers(0, 3))):
            size, step = draw(st.integers(1, 4)), draw(st.integers(0, 12))
            if (size - 1) * step <= room:
                room -= (size - 1) * step
                shape.append(size)
                strides.append(step)
        view = base.as_strided(shape, strides, offset)
        if draw(st.booleans()) and view.ndim and view.stride(-1) == 1 and view.shape[-1] == 4:
            view = view.view(torch.int8)
        found.append(view)
    return found


def elements(view: torch.Tensor) -> list[int]:
    """The byte address of each byte of each element."""
    size, place = view.element_size(), [view.storage_offset() * view.element_size()]
    for n, step in zip(view.shape, view.stride(), strict=True):
        place = [p + i * step * size for p in place for i in range(n)]
    return [p + i for p in place for i in range(size)]


@drawn(quick=100, slow=400, found=views(), by_map=st.booleans())
def test_overlaps_equal_brute_force(found: list[torch.Tensor], by_map: bool) -> None:
    kept = overlaps._MAX_RUNS
    overlaps._MAX_RUNS = 0 if by_map else kept
    try:
        wanted = [TensorRequest(f"t{i}", i, None, (view,)) for i, view in enumerate(found)]
        sentences = shared_memory(wanted)
    finally:
        overlaps._MAX_RUNS = kept
    taken = [elements(view) for view in found]
    alone = {i for i, mine in enumerate(taken) if len(set(mine)) != len(mine)}
    pairs = {(i, j) for i in range(len(found)) for j in range(i) if set(taken[i]) & set(taken[j])}
    assert bool(sentences) == bool(alone or pairs)
    for sentence in sentences:  # every one is true
        names = [int(part[1]) for part in sentence.split(":")[0].split(" and ")]
        if len(names) == 1:
            assert names[0] in alone
        else:
            assert (max(names), min(names)) in pairs


def test_ties_are_filled_once() -> None:
    w = torch.zeros(4, 4)
    half = Box((0, 0), (2, 4))
    wanted = [
        TensorRequest("a", 0, None, (w,)),
        TensorRequest("b", 0, (Box((0, 0), (4, 4)),), (w.view(4, 4),)),
        TensorRequest("c", 1, (half,), (torch.zeros(2, 4),)),
        TensorRequest("fresh", 0, None, (torch.zeros(4, 4),), True),
    ]
    assert [len(entry.locals) for entry in without_ties(wanted)] == [1, 0, 1, 1]
    other = [wanted[0], TensorRequest("b", 1, None, (w,))]
    assert [len(entry.locals) for entry in without_ties(other)] == [1, 1]
    assert len(shared_memory(without_ties(other))) == 1


def test_many_targets_cost_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at element by element where ranges do not overlap."""
    monkeypatch.setattr(overlaps, "_common_bytes", lambda tensors: pytest.fail("looked closely"))
    flat = torch.zeros(10_000)
    wanted = [TensorRequest(f"t{i}", i, None, (flat[10 * i : 10 * i + 10],)) for i in range(1000)]
    random.Random(0).shuffle(wanted)
    assert shared_memory(wanted) == []


@pytest.mark.parametrize("nbytes", [0, 100, 3996])
@pytest.mark.parametrize("form", ["whole", "columns", "last rows"])
def test_a_tensor_whose_memory_was_freed_or_cut_is_refused(
    tmp_path: Path, nbytes: int, form: str
) -> None:
    """O13: it was stored as what lay behind its storage, or ended the process.

    Wrappers free the weights of layers between two uses like this; the tensor keeps its shape.
    """
    weight = torch.ones(40, 25)
    held = {"whole": weight, "columns": weight[:, ::2], "last rows": weight[30:]}[form]
    state = {"model": {"w": held, "other": torch.ones(2)}}
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    weight.untyped_storage().resize_(nbytes)
    with pytest.raises(PlacementError, match=r"model\.w.*freed or cut to"):  # known from before
        checkpointer.save(2, state)
    with pytest.raises(PlacementError, match=r"model\.w.*freed or cut to"):
        Checkpointer(tmp_path).save(2, state)
    with pytest.raises(MismatchError, match=r"model\.w.*freed or cut to"):
        checkpointer.load(state)
    assert checkpointer.steps() == [1]
    weight.untyped_storage().resize_(4000)
    weight.fill_(7)
    checkpointer.load(state)
    assert held.unique().tolist() == [1]


def test_a_tensor_that_never_had_memory_is_refused(tmp_path: Path) -> None:
    """O13: a zero of forward-mode differentiation has a shape, and no address."""
    zero = torch._efficientzerotensor((3,))
    shown = _Shows({"w": torch.zeros(3)})
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": shown})
    shown.entries = {"w": zero}
    for state in ({"model": {"w": zero}}, {"model": shown}):
        with pytest.raises(PlacementError, match=r"model\.w"):
            checkpointer.save(2, state)


class _Shows:
    """An object whose state dict is new at each save."""

    def __init__(self, entries: dict[str, torch.Tensor]) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.entries)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.entries = state

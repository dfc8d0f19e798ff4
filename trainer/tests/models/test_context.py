"""Attention over the shards of a sequence is attention over the sequence."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from holdfast.errors import ConfigError, GroupError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models import context
from holdfast_trainer.models.collectives import Axis
from tests.harness import RankContext, run_ranks

VARIANTS = ("gather", "ring")


def axis_at(index: int, size: int) -> Axis:
    return Axis(name="cp", size=size, index=index, ranks=tuple(range(10, 10 + size)))


# Which positions lie where.


@given(size=st.integers(1, 6), chunk=st.integers(1, 5), dim=st.integers(-2, 1))
def test_positions_are_dealt_out_once_in_two_balanced_chunks(
    size: int, chunk: int, dim: int
) -> None:
    length = 2 * size * chunk
    axes = [axis_at(index, size) for index in range(size)]
    held = [context.positions(length, axis=axis) for axis in axes]
    assert sorted(torch.cat(held).tolist()) == list(range(length))
    assert {part.dtype for part in held} == {torch.int64}
    # Keys that a rank's queries see: as many for each.
    assert len({int((part + 1).sum()) for part in held}) == 1
    if size > 1:
        for index, part in enumerate(held):
            first, last = part.split(chunk)
            assert first.tolist() == list(range(index * chunk, (index + 1) * chunk))
            assert last.tolist() == [length - 1 - p for p in reversed(first.tolist())]
    x = torch.rand(3, 3).unsqueeze(dim).expand(*([-1] * 3)).repeat_interleave(length, dim % 3)
    x = x + torch.arange(length).view([length if d == dim % 3 else 1 for d in range(3)])
    shards = [context.take_positions(x, axis=axis, dim=dim % 3) for axis in axes]
    for shard, part in zip(shards, held, strict=True):
        assert torch.equal(shard, x.index_select(dim % 3, part))
    joined = torch.cat(shards, dim=dim % 3)
    assert torch.equal(context.restore_order(joined, axis=axes[0], dim=dim % 3), x)
    assert torch.equal(context.shard_order(x, axis=axes[-1], dim=dim % 3), joined)


@pytest.mark.parametrize("length", [0, 6, 9])
def test_a_sequence_that_does_not_divide_is_refused_by_name(length: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4, or set another --cp"):
        context.positions(length, axis=axis_at(0, 2))
    assert context.positions(length, axis=axis_at(0, 1)).tolist() == list(range(length))


def test_tensors_that_cannot_be_attended_are_refused() -> None:
    def attend(*shapes: tuple[int, ...], variant: Any = "ring") -> Tensor:
        tensors = [torch.rand(shape) for shape in shapes]
        return context.causal_attention(*tensors, axis=axis_at(0, 2), variant=variant)

    good = (1, 2, 4, 8)
    with pytest.raises(ConfigError, match="no variant 'rings'"):
        attend(good, good, good, variant="rings")
    with pytest.raises(ConfigError, match="three equal ones"):
        attend(good, good, (1, 2, 6, 8))
    with pytest.raises(ConfigError, match="multiple of 4"):
        attend((1, 2, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8))


# What it computes.


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, with its whole matrix."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(later, -math.inf).softmax(dim=-1) @ value


def differences(
    axis: Axis, *, variant: Any, dtype: torch.dtype, shape: tuple[int, ...], scale: float
) -> list[float]:
    """How far output and three gradients are from the definition in float64, relative."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    drawn[0] *= scale
    drawn = [x.to(dtype) for x in drawn]
    whole = [x.to(torch.float64, copy=True).requires_grad_() for x in drawn[:3]]
    expected = by_hand(*whole)
    expected.backward(drawn[3].double())
    local = [context.take_positions(x, axis=axis, dim=2).clone() for x in drawn[:3]]
    for x in local:
        x.requires_grad_()
    out = context.causal_attention(*local, axis=axis, variant=variant)
    out.backward(context.take_positions(drawn[3], axis=axis, dim=2))
    assert out.dtype is dtype
    pairs = [(out.detach(), expected.detach())]
    pairs += [(x.grad, y.grad) for x, y in zip(local, whole, strict=True)]
    return [
        (x.double() - context.take_positions(y, axis=axis, dim=2)).abs().max().item()
        / max(1.0, y.abs().max().item())
        for x, y in pairs
    ]


LAYOUTS = (
    Layout(cp=2, tp=2, name="strided"),
    Layout(cp=2, dp=2, order="dp-cp", ranks=(3, 1, 2, 0), name="permuted"),
    Layout(cp=3, ranks=(1, 3, 2), name="three, not the first"),
    Layout(cp=4, name="four"),
    Layout(cp=4, ranks=(2, 0, 3, 1), name="four, permuted"),
)
# A chunk of one position; widths that no kernel likes; scores that overflow without a maximum.
SHAPES = (((2, 3, 24, 5), 1.0), ((1, 1, 24, 8), 2000.0), ((1, 2, 48, 8), 1.0))


def on_layouts(rank: RankContext) -> list[tuple[str, str, float, float]]:
    found = []
    for layout in LAYOUTS:
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout, names=["cp"]) as groups:
            axis = Axis.of(groups, "cp")
            cases = [(shape, scale) for shape, scale in SHAPES]
            cases.append(((1, 2, 2 * axis.size, 4), 1.0))
            for variant in VARIANTS:
                for dtype, bound in (
                    (torch.float64, 1e-12),
                    (torch.float32, 1e-6),
                    # What is computed wide is rounded once: half of 2**-7.
                    (torch.bfloat16, 4e-3 if variant == "ring" else 2e-2),
                ):
                    for shape, scale in cases:
                        if scale > 1 and dtype is not torch.float64:
                            continue  # a score's own rounding is then larger than the bound
                        worst = max(
                            differences(
                                axis, variant=variant, dtype=dtype, shape=shape, scale=scale
                            )
                        )
                        found.append((str(layout), f"{variant} {dtype} {shape}", worst, bound))
    return found


def test_outputs_and_gradients_are_those_of_one_process() -> None:
    results = run_ranks(4, on_layouts).results
    assert [len(found) for found in results] == [80, 100, 100, 100]
    for found in results:
        assert [case for case in found if not case[2] <= case[3]] == []


def test_on_one_rank_it_is_the_definition() -> None:
    for variant in VARIANTS:
        worst = differences(
            Axis.of(ProcessGroups.single(), "cp"),
            variant=variant,
            dtype=torch.float64,
            shape=(2, 3, 7, 5),
            scale=1.0,
        )
        assert max(worst) <= 1e-12


# What it costs.


SIZES = (3, 4)


class Peak(TorchDispatchMode):
    """Counts the bytes of storages that operations make, and the most that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor):
                self.note(made)
                if function is torch.ops.aten.bmm.default:
                    self.types.add(made.dtype)
        return out

    def note(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key = storage.data_ptr()
        if key and key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.forget, key, storage.nbytes())

    def forget(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def cost(rank: RankContext) -> dict[str, Any]:
    """Bytes, products and messages of the ring, at 8 local positions on 3 and on 4 ranks."""
    seen: dict[str, Any] = {}
    for size in SIZES:
        layout = Layout(cp=size, name=f"{size}")
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout, names=["cp"]) as groups:
            axis = Axis.of(groups, "cp")
            for variant in VARIANTS:
                tensors = [torch.rand(1, 2, 8, 16, requires_grad=True) for _ in range(3)]

                def attend(
                    tensors: list[Tensor] = tensors, axis: Axis = axis, variant: Any = variant
                ) -> Tensor:
                    return context.causal_attention(*tensors, axis=axis, variant=variant)

                attend().sum().backward()  # what is made once only is made here
                with Peak() as forward:
                    out = attend()
                with Peak() as backward:
                    out.sum().backward()
                seen[f"bytes {variant} {size}"] = (forward.most, backward.most)
                with FlopCounterMode(display=False) as counter:
                    out = attend()
                seen[f"flops {variant} {size}"] = counter.get_total_flops()
                events = messages(attend)
                seen[f"messages {variant} {size}"] = events
            with torch.autocast("cpu", dtype=torch.bfloat16), Peak() as mode:
                attend().sum().backward()
            seen["types"] = mode.types
    return seen


def messages(attend: Callable[[], Tensor]) -> tuple[list[str], list[str]]:
    """In which order messages begin, products are computed and messages are waited for."""
    real, events = dist.batch_isend_irecv, []
    product = torch.Tensor.__matmul__

    class Waited:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append("wait")
            self.work.wait()

    def send(operations: list[Any]) -> list[Any]:
        assert [operation.op for operation in operations] == [dist.isend, dist.irecv]
        events.append(f"send {operations[0].tensor.numel()}")
        works = real(operations)
        return [Waited(works[0]), *works[1:]]

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        if not events or events[-1] != "compute":
            events.append("compute")
        return product(x, y)

    dist.batch_isend_irecv, torch.Tensor.__matmul__ = send, multiply
    try:
        out = attend()
        forward, events[:] = list(events), []
        out.sum().backward()
        return forward, list(events)
    finally:
        dist.batch_isend_irecv, torch.Tensor.__matmul__ = real, product


def test_the_ring_costs_what_it_says() -> None:
    results = run_ranks(4, cost).results
    block = 2 * 2 * 8 * 16
    for way in (0, 1):
        # Memory does not grow with the number of ranks; all keys and values at once would.
        names = [f"bytes {variant} {size}" for variant in VARIANTS for size in SIZES]
        most = {name: max(seen[name][way] for seen in results[:3]) for name in names}
        assert most["bytes ring 4"] == most["bytes ring 3"]
        assert most["bytes gather 4"] > most["bytes gather 3"]
    for seen in results[:3]:
        for size in SIZES:
            # Products of two 4 x 4 chunks over 2 heads of width 16, twice: scores and values.
            pair = 2 * (2 * 4 * 4 * 16) * 2
            assert seen[f"flops ring {size}"] == (3 + 2 * (size - 1)) * pair
            forward, backward = seen[f"messages ring {size}"]
            step = [f"send {block}", "compute", "wait"]
            assert forward == step * (size - 1) + ["compute"]
            assert sum(event == f"send {block}" for event in backward) == 2 * (size - 1)
            assert backward.index("compute") == 1  # the first block is sent before it is used
            assert seen[f"messages gather {size}"] == ([], [])
        assert seen["types"] == {torch.float32}


def twice(rank: RankContext) -> None:
    with ProcessGroups.create(Layout(cp=2)) as groups:
        x = torch.rand(1, 1, 4, 4, requires_grad=True)
        out = context.causal_attention(x, x, x, axis=Axis.of(groups, "cp"), variant="ring")
        with pytest.raises(GroupError, match="differentiated once"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


def test_the_ring_refuses_a_second_derivative() -> None:
    run_ranks(2, twice)

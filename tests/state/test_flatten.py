"""A pass over a state knows what the last one has met by what is claimed, not by object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import (
    RNG,
    Codecs,
    Layout,
    Padded,
    PerRank,
    PlacementError,
    ProcessGroups,
    Replicated,
    Sharded,
)
from holdfast.optim.in_flight import change_class
from holdfast.state import FlatShard, flatten_state
from holdfast.state.flatten import LeafCache
from holdfast.state.leaves import FlatState
from tests.harness import RankContext, run_ranks

LONE = Layout()


class Passes:
    """Passes over states of one part, with one cache."""

    def __init__(self, layout: Layout = LONE, rank: int = 0) -> None:
        self._layout, self._rank = layout, rank
        self._cache = LeafCache()

    def flat(self, tree: object, layout: Layout | None = None) -> FlatState:
        found = flatten_state(
            {"p": tree}, layout=layout or self._layout, rank=self._rank, codecs=Codecs(),
            cache=self._cache,
        )  # fmt: skip
        again = flatten_state(
            {"p": tree}, layout=layout or self._layout, rank=self._rank, codecs=Codecs()
        )
        # Whatever was taken from the pass before, the outcome is that of a pass without one.
        assert list(found.leaves) == list(again.leaves)
        assert found.nodes == again.nodes
        for key, leaf in again.leaves.items():
            mine = found.leaves[key]
            assert mine._replace(locals=()) == leaf._replace(locals=())
            for number in range(len(leaf.boxes)):
                one, other = found.local(key, number), again.local(key, number)
                assert (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
                    other.data_ptr(), other.shape, other.stride(), other.dtype,
                )  # fmt: skip
        return found


def grid() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


SAME: dict[str, Callable[[], object]] = {
    "plain": grid,
    "parameter": lambda: nn.Parameter(grid()),
    "transposed": lambda: grid().reshape(6, 4).t(),
    "empty": lambda: torch.zeros(0, 6),
    "0-d": lambda: torch.tensor(1.0),
    "sharded": lambda: Sharded(grid(), (4, 6), dims={0: "tp"}),
    "offset": lambda: Sharded(grid(), (8, 6), offset=(4, 0), over=("tp",)),
    "replicated": lambda: Replicated(grid()),
    "padded": lambda: Padded(grid(), (3, 5)),
    "run": lambda: FlatShard(torch.arange(11.0), 2, grid(), "dp"),
    "in lists": lambda: [grid(), {"a": grid(), "b": 1}],
    "per rank": lambda: PerRank({"a": grid()}),
    "numbers as keys": lambda: {1: grid(), "x": grid()},
}


@pytest.mark.parametrize("kind", SAME)
def test_what_is_made_again_is_known(kind: str) -> None:
    """New objects in new memory claim what the old ones did."""
    passes = Passes()
    first = {"t": SAME[kind](), "u": SAME[kind]()}
    then = {"t": SAME[kind](), "u": SAME[kind]()}
    structure = passes.flat(first).structure
    assert passes.flat(first).structure is structure
    assert passes.flat(then).structure is structure
    assert passes.flat(first).structure is structure


def test_random_streams_are_known() -> None:
    cache = LeafCache()
    found = [
        flatten_state({"rng": RNG()}, layout=LONE, rank=0, codecs=Codecs(), cache=cache).structure
        for _ in range(3)
    ]
    assert found[0] is found[1] is found[2]


def strided() -> torch.Tensor:
    return grid().t().contiguous().t()


OTHERS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (grid, lambda: grid().double()),
    "same size, other dtype": (grid, lambda: grid().int()),
    "shape": (grid, lambda: grid().reshape(6, 4)),
    "declared": (grid, lambda: Replicated(grid())),
    "marker": (lambda: Replicated(grid()), lambda: Sharded(grid(), (4, 6), dims={0: "tp"})),
    "global shape": (
        lambda: Sharded(grid(), (8, 6), offset=(0, 0), over=("dp",)),
        lambda: Sharded(grid(), (9, 6), offset=(0, 0), over=("dp",)),
    ),
    "offset": (
        lambda: Sharded(grid(), (8, 6), offset=(0, 0), over=("dp",)),
        lambda: Sharded(grid(), (8, 6), offset=(4, 0), over=("dp",)),
    ),
    "replicas": (
        lambda: Sharded(grid(), (8, 6), offset=(0, 0), over=("dp",)),
        lambda: Sharded(grid(), (8, 6), offset=(0, 0), over=("tp",)),
    ),
    "dim": (
        lambda: Sharded(grid(), (4, 6), dims={0: "tp"}),
        lambda: Sharded(grid(), (4, 6), dims={1: "tp"}),
    ),
    "padding": (lambda: Padded(grid(), (3, 5)), lambda: Padded(grid(), (3, 4))),
    "no padding": (lambda: Padded(grid(), (3, 5)), grid),
    "run": (
        lambda: FlatShard(torch.arange(11.0), 2, grid(), "dp"),
        lambda: FlatShard(torch.arange(11.0), 3, grid(), "dp"),
    ),
    "length of a run": (
        lambda: FlatShard(torch.arange(11.0), 2, grid(), "dp"),
        lambda: FlatShard(torch.arange(10.0), 2, grid(), "dp"),
    ),
    "parameter of a run": (
        lambda: FlatShard(torch.arange(11.0), 2, grid(), "dp"),
        lambda: FlatShard(torch.arange(11.0), 2, grid().reshape(6, 4), "dp"),
    ),
    "key": (lambda: {"a": grid()}, lambda: {"b": grid()}),
    "order": (lambda: {"a": grid(), "b": grid()}, lambda: {"b": grid(), "a": grid()}),
    "one more": (lambda: {"a": grid()}, lambda: {"a": grid(), "b": grid()}),
    "one less": (lambda: {"a": grid(), "b": grid()}, lambda: {"a": grid()}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_every_change_of_what_is_claimed_is_noticed(what: str) -> None:
    """There and back, next to tensors that stay; `Passes` compares with a pass without cache."""
    passes = Passes()
    before, after = OTHERS[what]
    stays = {"first": grid(), "second": [grid()]}
    first = passes.flat({**stays, "t": before()}).structure
    second = passes.flat({**stays, "t": after()}).structure
    third = passes.flat({**stays, "t": before()}).structure
    assert first is not second
    assert second is not third


@pytest.mark.parametrize("wrap", ["plain", "padded", "sharded", "run"])
def test_other_memory_and_other_strides_are_read(wrap: str) -> None:
    """Of one object, too, whose memory was exchanged; what is claimed stays the same."""
    held = grid()
    flat = torch.arange(24.0)
    marked: dict[str, Callable[[], object]] = {
        "plain": lambda: held,
        "padded": lambda: Padded(held, (3, 5)),
        "sharded": lambda: Sharded(held, (4, 6), dims={0: "tp"}),
        "run": lambda: FlatShard(flat, 0, torch.zeros(4, 6), "dp"),
    }
    obj: Any = marked[wrap]()
    passes = Passes()
    structure = passes.flat({"t": obj}).structure
    for other in (strided(), grid() + 1, strided() + 2):
        held.data = other
        flat.data = other.flatten()
        for again in (obj, marked[wrap]()):
            found = passes.flat({"t": again})
            assert found.structure is structure
            whole = found.local("p.t", 0)
            assert torch.equal(whole.flatten()[:3], other.flatten()[:3])


def test_ties_that_come_and_go_are_noticed() -> None:
    """A tensor met again is stored once; whether that is so is asked at every pass."""
    passes = Passes()
    x, y = grid(), grid()
    apart = passes.flat({"a": x, "b": y})
    assert list(apart.leaves) == ["p.a", "p.b"]
    tied = passes.flat({"a": x, "b": x.detach()})
    assert list(tied.leaves) == ["p.a"]
    assert tied.nodes["p"] == {
        "a": {"$": "tensor", "k": "p.a"},
        "b": {"$": "tensor", "k": "p.a"},
    }
    assert tied.structure is not apart.structure
    assert passes.flat({"a": y, "b": nn.Parameter(y)}).structure is tied.structure
    again = passes.flat({"a": y, "b": x})
    assert list(again.leaves) == ["p.a", "p.b"]
    # a pass that fails after it has met a tie leaves nothing of it to the next one
    with pytest.raises(PlacementError, match=r"p\.c: a tensor on the meta device"):
        passes.flat({"a": y, "b": y, "c": torch.zeros(1, device="meta")})
    assert passes.flat({"a": y, "b": x}).structure is again.structure
    # the same memory in another order of elements is another tensor
    assert list(passes.flat({"a": torch.ones(3, 3), "b": strided()}).leaves) == ["p.a", "p.b"]
    square = torch.arange(9.0).reshape(3, 3)
    # elements that have become one, at the same address, are no state that a load could fill
    passes.flat({"a": square})
    with pytest.raises(PlacementError, match=r"p\.a: several elements of the state's tensor share"):
        passes.flat({"a": square.as_strided((3, 3), (0, 1))})
    with pytest.raises(PlacementError, match=r"p\.a and p\.b: the state's tensors share memory"):
        passes.flat({"a": square, "b": square.t()})


def test_what_becomes_unreadable_is_refused() -> None:
    for bad in (
        torch.zeros(4, 6, device="meta"),
        grid().to_sparse(),
        torch.nested.nested_tensor([torch.ones(4, 6)]),
        torch.quantize_per_tensor(grid(), 1.0, 0, torch.qint8),
        nn.UninitializedParameter(),
    ):
        passes = Passes()
        passes.flat({"t": grid()})
        for _ in range(2):
            with pytest.raises(PlacementError, match=r"^p\.t: "):
                passes.flat({"t": bad})
        passes.flat({"t": grid()})


def test_another_layout_is_another_structure() -> None:
    passes = Passes()
    tree = {"t": Replicated(grid())}
    first = passes.flat(tree, LONE)
    second = passes.flat(tree, Layout(dp=2))
    assert first.structure is not second.structure
    assert passes.flat(tree, Layout(dp=2)).structure is second.structure


def on_meshes(context: RankContext) -> None:
    with ProcessGroups.create(Layout(tp=2)) as groups:
        mesh, other = groups.mesh("tp"), groups.mesh("tp")
        passes = Passes(groups.layout, groups.rank)

        def made(local: torch.Tensor, placement: Any, on: Any = mesh) -> dict[str, Any]:
            tensor = DTensor.from_local(local, on, [placement], run_check=False)
            return {"t": tensor, "u": grid()}

        def strided_shard() -> dict[str, Any]:
            tensor = DTensor.from_local(
                torch.zeros(4, 6), mesh, [_StridedShard(0, split_factor=2)], run_check=False
            )
            return {"t": tensor, "u": grid()}

        def sharded() -> dict[str, Any]:
            return made(torch.rand(4, 6), Shard(0))

        structure = passes.flat(sharded()).structure
        assert passes.flat(sharded()).structure is structure
        kept = sharded()
        assert passes.flat(kept).structure is passes.flat(kept).structure is structure
        for changed in (
            strided_shard(),
            made(torch.rand(4, 6), Shard(1)),
            made(torch.rand(4, 6), Replicate()),
            made(torch.rand(4, 6).double(), Shard(0)),
            made(torch.rand(5, 6), Shard(0)),
            *([made(torch.rand(4, 6), Shard(0), other)] if other is not mesh else []),
        ):
            last = passes.flat(sharded()).structure
            now = passes.flat(changed)
            assert now.structure is not last
            assert passes.flat(changed).structure is now.structure
        # a sharded optimizer gives its parameters classes of its own
        structures = []
        for tree in (sharded(), strided_shard(), sharded()):
            change_class(tree["t"], Bucketed)
            structures.append(passes.flat(tree).structure)
        assert len(set(map(id, structures))) == 3
        # torch computes the ranks of a mesh again at each read
        assert [num_reads_of_a_mesh(groups, num_tensors=count) for count in (1, 20)] == [1, 1]


def num_reads_of_a_mesh(groups: ProcessGroups, *, num_tensors: int) -> int:
    """Count how often a pass reads the ranks of a mesh that tensors are on.

    They have many shapes, and several placements.
    """
    mesh = groups.mesh("tp")
    placements = (Shard(0), Replicate(), Shard(1))
    tensors = [
        DTensor.from_local(
            torch.zeros(4, 1 + number), mesh, [placements[number % 3]], run_check=False
        )
        for number in range(num_tensors)
    ]
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        ranks = DeviceMesh.mesh
        assert isinstance(ranks, property)
        patch.setattr(
            DeviceMesh, "mesh", property(lambda self: (reads.append(self), ranks.fget(self))[1])
        )
        flatten_state({"p": tensors}, layout=groups.layout, rank=groups.rank, codecs=Codecs())
    return len(reads)


class Bucketed(DTensor):
    __slots__ = ()


def test_placements_of_distributed_tensors() -> None:
    """New DTensors are known by mesh and placements; a strided shard is not a plain one."""
    run_ranks(2, on_meshes)

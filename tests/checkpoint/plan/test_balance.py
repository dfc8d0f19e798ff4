"""Large replicated tensors are written in parts by several ranks: balance, and every element."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Checkpointer, Codecs, Layout, ProcessGroups, Replicated, Sharded, Stored
from holdfast.checkpoint.plan.assign_writers import (
    MIN_PIECE_NBYTES,
    HeldBoxes,
    WriterAssignment,
    assign_writers,
)
from holdfast.checkpoint.plan.claims import claims_of
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.state import flatten_state
from holdfast.storage import PosixStorage
from holdfast.writer.records import CommitPlan
from tests.harness import RankContext, run_ranks

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""(extent in bytes-sized elements, holders) of each box."""


def held_boxes(boxes: Boxes, num_ranks: int) -> HeldBoxes:
    holders = np.array([h for _, who in boxes for h in who], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum([len(who) for _, who in boxes])]).astype(np.int64)
    num_dims = max(len(extent) for extent, _ in boxes)
    extent = np.array([e + (1,) * (num_dims - len(e)) for e, _ in boxes], dtype=np.int64)
    return HeldBoxes(
        holders=holders, holder_ptr=first, nbytes=extent.prod(axis=1), extent=extent,
        row=np.arange(len(holders)), num_ranks=num_ranks,
    )  # fmt: skip


def least_possible(boxes: Boxes, num_ranks: int) -> float:
    """The lowest highest load of any division, by brute force: over all sets of ranks, what only
    they hold, divided among them (the maximum flow is the minimum cut)."""
    best = 0.0
    sizes = [(math.prod(extent), set(who)) for extent, who in boxes]
    for count in range(1, num_ranks + 1):
        for chosen in itertools.combinations(range(num_ranks), count):
            inside = sum(nbytes for nbytes, who in sizes if who <= set(chosen))
            best = max(best, inside / count)
    return best


def loads(held: HeldBoxes, pieces: WriterAssignment) -> np.ndarray:
    found = np.zeros(held.num_ranks)
    who = held.holders[held.holder_ptr[pieces.box] + pieces.holder]
    np.add.at(found, who, pieces.extent.prod(axis=1))
    return found


def check_tiled(held: HeldBoxes, pieces: WriterAssignment) -> None:
    """Each box is covered by its parts once, by sorted corners along its row-major order."""
    for box in range(len(held.nbytes)):
        mine = np.flatnonzero(pieces.box == box)
        shape = held.extent[box]
        assert (pieces.holder[mine] < held.holder_ptr[box + 1] - held.holder_ptr[box]).all()
        assert (pieces.offset[mine] + pieces.extent[mine] <= shape).all()
        assert (pieces.extent[mine] > 0).all()
        if len(mine) == 1:
            assert (pieces.extent[mine[0]] == shape).all()
            continue
        paint = np.zeros(shape, dtype=np.int8)
        for i in mine:
            where = zip(pieces.offset[i], pieces.offset[i] + pieces.extent[i], strict=True)
            paint[tuple(slice(a, b) for a, b in where)] += 1
        assert (paint == 1).all()


SMALL = MIN_PIECE_NBYTES
SHAPES = [
    (SMALL // 16, 8), (3, SMALL, 2), (1, 1, 40 * SMALL), (2, 5, SMALL // 2), (9 * SMALL, 1),
    (SMALL - 1, 2), (100, 7), (64,), (6 * SMALL, 4),
]  # fmt: skip


@given(st.integers(2, 6), st.data())
@settings(max_examples=80, deadline=None)
def test_the_highest_load_is_close_to_the_least_possible(
    num_ranks: int, data: st.DataObject
) -> None:
    """Any holders of any boxes: within 2 % and one piece a set of holders of the best division."""
    sets = data.draw(
        st.lists(
            st.sets(st.integers(0, num_ranks - 1), min_size=1).map(lambda s: tuple(sorted(s))),
            min_size=1, max_size=4, unique=True,
        )
    )  # fmt: skip
    boxes = data.draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(sets)), min_size=1, max_size=8)
    )
    held = held_boxes(boxes, num_ranks)
    pieces = assign_writers(held)
    check_tiled(held, pieces)
    again = assign_writers(held)
    assert all(
        np.array_equal(getattr(pieces, n), getattr(again, n))
        for n in ("box", "holder", "offset", "extent")
    )
    bound = least_possible(boxes, num_ranks)
    assert loads(held, pieces).max() <= 1.02 * bound + 2 * SMALL * len(sets)
    cut = [i for i in range(len(pieces.box)) if (pieces.box == pieces.box[i]).sum() > 1]
    assert all(held.nbytes[pieces.box[i]] >= 2 * SMALL for i in cut), "a small tensor was cut"


def test_one_large_tensor_is_divided_evenly() -> None:
    """The case that whole boxes cannot balance: one embedding on eight ranks, and small ones."""
    everyone = tuple(range(8))
    boxes: Boxes = [((800_000, 16), everyone), *[((1000,), everyone)] * 50]
    held = held_boxes(boxes, 8)
    pieces = assign_writers(held)
    check_tiled(held, pieces)
    found = loads(held, pieces)
    assert found.max() / found.mean() <= 1.02
    parts = np.flatnonzero(pieces.box == 0)
    assert len(parts) == 8
    assert (pieces.extent[parts, 1] == 16).all()
    # Where one rank's own bytes are the highest load whatever is done, nothing is cut.
    held = held_boxes([((800_000, 16), everyone), ((1_600_000, 16), (3,))], 8)
    assert len(assign_writers(held).box) == 2


def test_what_balances_whole_is_not_cut() -> None:
    everyone = tuple(range(4))
    boxes: Boxes = [((1000, 1000), everyone)] * 8 + [((100,), everyone)] * 40
    pieces = assign_writers(held_boxes(boxes, 4))
    assert len(pieces.box) == len(boxes)


def plan_of(layout: Layout, states: list[dict[str, object]]) -> CommitPlan:
    tables = [
        claims_of(flatten_state(state, layout=layout, rank=rank, codecs=Codecs()))[0]
        for rank, state in zip(layout.ranks, states, strict=True)
    ]
    return make_plan(
        tables, ranks=layout.ranks, coordinates=[layout.coordinate(r) for r in layout.ranks],
        signature="0" * 32, block_nbytes=1 << 20,
    )[0]  # fmt: skip


def file_nbytes(plan: CommitPlan, num_ranks: int) -> np.ndarray:
    found = np.zeros(num_ranks)
    np.add.at(found, np.array(plan.writers)[plan.row_file], plan.row_nbytes)
    return found


def test_tensor_parallel_2_data_parallel_4_is_balanced() -> None:
    """The row of the performance table: a transformer, its embedding replicated on all ranks."""
    layout = Layout(tp=2, dp=4)

    def state(rank: int) -> dict[str, object]:
        tree: dict[str, object] = {
            "embedding": Replicated(torch.empty(50_257, 256)),
            "position": torch.zeros(1024, 256),
        }  # fmt: skip
        for layer in range(6):
            for name, rows in (("qkv", 768), ("up", 1024), ("down", 1024)):
                tree[f"{layer}.{name}"] = Sharded(
                    torch.zeros(rows // 2, 256), (rows, 256), dims={0: "tp"}
                )
            tree[f"{layer}.norm"] = Replicated(torch.zeros(256))
        return {"m": tree}

    plan = plan_of(layout, [state(rank) for rank in layout.ranks])
    found = file_nbytes(plan, 8)
    assert found.max() / found.mean() <= 1.02
    whole = found.sum() / (6 * (768 + 2048 + 1) * 256 * 4 + (50_257 + 1024) * 256 * 4)
    assert whole == 1


def _truth(rank: int, layout: Layout) -> dict[str, object]:
    wide = torch.arange(1_200_000, dtype=torch.float64).reshape(2, 3, 200_000)
    tall = torch.arange(900_000, dtype=torch.int32).reshape(300_000, 3)
    rows = torch.arange(40.0).reshape(10, 4)
    start = 5 * layout.coordinate(rank)["tp"]
    return {
        "wide": Replicated(wide.transpose(0, 1)),  # not contiguous
        "tall": tall,  # undeclared: compared whole
        "odd": Replicated(torch.arange(101.0)),
        "rows": Sharded(rows[start : start + 5].clone(), (10, 4), dims={0: "tp"}),
    }


def _cut(context: RankContext, root: str) -> list[int]:
    layout = Layout(tp=2, dp=2)
    with (
        ProcessGroups.create(layout) as groups,
        Checkpointer(root, groups=groups, fingerprints=True) as checkpointer,
    ):
        state = {"m": _truth(context.rank, layout)}
        report = checkpointer.save(1, state, check_replicas=True)
        nbytes = [report.nbytes, checkpointer.save_async(2, state).result(60).nbytes]
        target = {"m": _truth(context.rank, layout)}
        for step in (1, 2):
            for value in target["m"].values():
                tensor = value if isinstance(value, torch.Tensor) else value.local  # type: ignore[attr-defined]
                tensor.fill_(-1)
            checkpointer.load(target, step=step)
            for key, value in _truth(context.rank, layout).items():
                loaded = target["m"][key]
                a = value if isinstance(value, torch.Tensor) else value.local  # type: ignore[attr-defined]
                b = loaded if isinstance(loaded, torch.Tensor) else loaded.local  # type: ignore[attr-defined]
                assert torch.equal(a, b), key
        return nbytes


def test_tensors_in_parts_come_back_bitwise(tmp_path: Path) -> None:
    """Four ranks, of which each writes a part; strided memory; read whole by one process."""
    results = run_ranks(4, _cut, str(tmp_path)).results
    for nbytes in zip(*results, strict=True):
        mean = sum(nbytes) / 4
        assert max(nbytes) <= 1.02 * mean + MIN_PIECE_NBYTES
    for name in ("iter_0000001", "iter_0000002"):
        assert verify_snapshot(PosixStorage(tmp_path), name) == []
        with Snapshot.open(PosixStorage(tmp_path), name) as snapshot:
            number = next(
                i for i, info in enumerate(snapshot.manifest.tensors) if info.key == "m.wide"
            )
            assert (snapshot.index.tensor == number).sum() > 1
    loaded = Checkpointer(tmp_path).load({"m": Stored()}).values["m"]
    assert isinstance(loaded, dict)
    truth = _truth(0, Layout(tp=2, dp=2, ranks=(0, 1, 2, 3)))
    wide = truth["wide"]
    assert isinstance(wide, Replicated)
    assert torch.equal(loaded["wide"], wide.local)
    assert torch.equal(loaded["tall"], truth["tall"])

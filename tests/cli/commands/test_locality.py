"""`holdfast show --locality` and planned loads against what real ranks held and read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from holdfast import Checkpointer, Layout, ProcessGroups, Sharded
from holdfast.arrays.boxes import Box
from holdfast.checkpoint.load.forecast import forecast_reads
from holdfast.cli.support.holders import SavedPlacement
from holdfast.cli.support.relayout import parse_layout, relaid_requests, saved_requests
from holdfast.errors import ConfigError
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.checkpoint.common import make_state
from tests.cli.conftest import Holdfast
from tests.format.making import Chunk, make, random_tensor, write
from tests.harness import RankContext, run_ranks

SAVED = {"tp": 2, "dp": 2}
Boxes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def held_boxes(layout: Layout, rank: int) -> Boxes:
    """What a rank truly holds: key -> offset and shape, from the state itself."""
    boxes: Boxes = {}
    state = make_state(layout, rank)
    for part in ("model", "moments"):
        for name, value in state[part].mapping.items():  # type: ignore[attr-defined]
            if not isinstance(value, Sharded):
                boxes[f"{part}.{name}"] = ((0,) * value.ndim, tuple(value.shape))
                continue
            offset = [0] * len(value.shape)
            for dim, axes in value.dims.items():
                members = layout.group("-".join(axes), rank)
                length = -(-value.shape[dim] // len(members))
                offset[dim] = min(length * members.index(rank), value.shape[dim])
            boxes[f"{part}.{name}"] = (tuple(offset), tuple(value.local.shape))
    label = ",".join(f"{a}={n}" for a, n in sorted(layout.coordinate(rank).items()))
    boxes[f"own[{label}].t"] = ((), ())
    return boxes


def save_and_load(context: RankContext, root: str, loads: list[dict[str, int]]) -> list[Any]:
    """Save under one layout, load under several: bytes by file of each load."""
    layout = Layout(**SAVED)
    with (
        ProcessGroups.create(layout, backend="gloo") as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        checkpointer.save(1, make_state(layout, context.rank))
    reports = []
    for sizes in loads:
        other = Layout(**sizes)
        with ProcessGroups.create(other, backend="gloo") as groups:
            state = make_state(other, context.rank, blank=True)
            if sizes != SAVED:
                del state["own"]
            report = Checkpointer(root, groups=groups).load(state)
            assert sum(report.nbytes_by_file.values()) == report.nbytes_read
            assert len(report.nbytes_by_file) == report.num_opens
            reports.append(dict(report.nbytes_by_file))
    reports.append(load_near(context, f"{root}-copies"))
    return reports


def load_near(context: RankContext, root: str) -> dict[str, int]:
    """Bytes by file of a load where replicated tensors were stored for each coordinate of dp."""
    layout = Layout(**SAVED)
    with (
        ProcessGroups.create(layout, backend="gloo") as groups,
        Checkpointer(root, groups=groups, replicate_over=("dp",)) as checkpointer,
    ):
        checkpointer.save(1, make_state(layout, context.rank))
        state = make_state(layout, context.rank, blank=True)
        return dict(checkpointer.load(state).nbytes_by_file)


LOADS = [SAVED, {"tp": 4}, {"dp": 4}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint of four ranks, and what each of them read in each of `LOADS`."""
    root = tmp_path_factory.mktemp("locality") / "run"
    return root, run_ranks(4, save_and_load, str(root), LOADS).results


def open_saved(root: Path) -> Snapshot:
    return Snapshot.open(PosixStorage(root), "iter_0000001")


def overlaps(a: Box, b: Box) -> bool:
    return a.intersect(b) is not None


def test_locality_is_what_each_rank_holds(holdfast: Holdfast, real: tuple[Path, list[Any]]) -> None:
    """Against a count by brute force: every chunk, every box that a rank truly holds."""
    root, _ = real
    shown = {
        r["rank"]: r
        for r in holdfast("show", root, "--locality", "--json").json["locality"]["ranks"]
    }
    layout = Layout(**SAVED)
    with open_saved(root) as snapshot:
        index, files = snapshot.index, snapshot.manifest.files
        for rank in range(4):
            own = other = 0
            opened = set()
            for key, (offset, shape) in held_boxes(layout, rank).items():
                for row in snapshot.rows_of(key).tolist():
                    ndim = len(offset)
                    chunk = Box(
                        tuple(index.offset[row, :ndim].tolist()),
                        tuple(index.extent[row, :ndim].tolist()),
                    )
                    if not overlaps(Box(offset, shape), chunk):
                        continue
                    opened.add(int(index.file[row]))
                    if files[int(index.file[row])].writer == rank:
                        own += int(index.nbytes[row])
                    else:
                        other += int(index.nbytes[row])
            assert shown[rank]["own_nbytes"] == own
            assert shown[rank]["other_nbytes"] == other
            assert shown[rank]["num_files"] == len(opened)
            assert shown[rank]["unsure_nbytes"] == shown[rank]["perhaps_nbytes"] == 0


def test_a_planned_load_reads_what_a_real_one_read(real: tuple[Path, list[Any]]) -> None:
    """Rank by rank and file by file, under the saved layout and cut again for others."""
    root, results = real
    with open_saved(root) as snapshot:
        names = [file.name for file in snapshot.manifest.files]
        saved = SavedPlacement(snapshot.manifest, snapshot.index)
        for number, sizes in enumerate(LOADS):
            requests = [relaid_requests(saved, Layout(**sizes))] if number else []
            for each in requests or [saved_requests(saved)]:
                nbytes = forecast_reads(snapshot, each.tables, ranks=each.ranks)
                for rank in range(4):
                    planned = {n: int(b) for n, b in zip(names, nbytes[rank], strict=True) if b}
                    assert planned == results[rank][number], (sizes, rank)


def test_stored_copies_are_read_and_counted_as_near(
    holdfast: Holdfast, real: tuple[Path, list[Any]]
) -> None:
    """With `replicate_over` a planned load chooses the copies that a real one chose."""
    root, results = real
    near = Path(f"{root}-copies")
    with open_saved(near) as snapshot:
        assert snapshot.has_copies
        names = [file.name for file in snapshot.manifest.files]
        requests = saved_requests(SavedPlacement(snapshot.manifest, snapshot.index))
        nbytes = forecast_reads(snapshot, requests.tables, ranks=requests.ranks)
        totals = snapshot.manifest.totals
    shown = holdfast("show", near, "--locality", "--json").json["locality"]
    assert shown["extra_nbytes"] == totals.stored_nbytes - totals.nbytes > 0
    assert sum(kind["extra_nbytes"] for kind in shown["kinds"]) == shown["extra_nbytes"]
    for rank in range(4):
        read = results[rank][len(LOADS)]
        assert {n: int(b) for n, b in zip(names, nbytes[rank], strict=True) if b} == read
        own = names[rank]
        locality = shown["ranks"][rank]
        # Chunks are smaller than a block here, so that what is read is what is needed.
        assert locality["own_nbytes"] == read[own]
        assert locality["other_nbytes"] == sum(read.values()) - read[own]
        assert locality["num_files"] == len(read)


def test_what_was_left_out_and_assumed_is_stated(real: tuple[Path, list[Any]]) -> None:
    root, _ = real
    with open_saved(root) as snapshot:
        saved = SavedPlacement(snapshot.manifest, snapshot.index)
        notes = " ".join(relaid_requests(saved, Layout(tp=2, pp=2)).notes)
    for text in ("tp cuts dim 1 of 8 tensors", "4 tensors are stored per coordinate: left out",
                 "5 tensors were one box", "stages of equal length"):  # fmt: skip
        assert text in notes


def test_the_tables_say_how_holders_are_known(
    holdfast: Holdfast, real: tuple[Path, list[Any]]
) -> None:
    root, _ = real
    result = holdfast("show", root, "--locality")
    assert result.code == 0
    for text in ("in its own file", "stored per coordinate", "not who held it", "times stored"):
        assert text in result.out
    counts = holdfast("show", root, "--locality", "--json").json["locality"]["inferred"]
    assert {c["basis"]: c["num_tensors"] for c in counts} == {"label": 4, "cut": 12, "whole": 5}


def on_layout(root: Path, tensors: Any, axes: dict[str, int]) -> SavedPlacement:
    """The placement of a checkpoint made by hand, on a layout of these sizes."""
    made = make(tensors)
    num_ranks = int(np.prod(list(axes.values())))
    info = msgspec.structs.replace(
        made.manifest.layouts[0], axes=axes, order="tp-cp-ep-dp-pp", ranks=[*range(num_ranks)]
    )
    made.manifest = msgspec.structs.replace(made.manifest, layouts=[info])
    write(PosixStorage(root), made)
    with open_saved(root) as snapshot:
        return SavedPlacement(snapshot.manifest, snapshot.index)


def rows_chunks(parts: list[tuple[int, int, int]], width: int) -> list[Chunk]:
    """(file, first row, number of rows) of each chunk."""
    return [Chunk(file=f, box=Box((a, 0), (n, width))) for f, a, n in parts]


def test_copies_count_as_near_and_as_extra_bytes(holdfast: Holdfast, tmp_path: Path) -> None:
    """A chunk with a copy in the rank's own file is not read from another one."""
    both = [Chunk(file=0, box=Box((0,), (9,))), Chunk(file=1, box=Box((0,), (9,)), copy=1)]
    tensors = {
        "model.a": random_tensor(1, dtype="F32", shape=(9,), chunks=both),
        "model.b": random_tensor(2, dtype="F32", shape=(3,)),
    }
    on_layout(tmp_path, tensors, {"dp": 2})
    shown = holdfast("show", tmp_path, "--locality", "--json").json["locality"]
    assert [(r["own_nbytes"], r["other_nbytes"], r["num_files"]) for r in shown["ranks"]] == [
        (48, 0, 1),
        (36, 12, 2),
    ]
    kinds = {kind["kind"]: kind for kind in shown["kinds"]}
    assert (kinds["a"]["extra_nbytes"], kinds["a"]["min_copies"], kinds["a"]["max_copies"]) == (
        36,
        2,
        2,
    )
    assert kinds["b"]["extra_nbytes"] == 0
    assert shown["extra_nbytes"] == 36


def test_runs_of_a_sharded_optimizer_are_not_taken_for_replicas(tmp_path: Path) -> None:
    """Irregular small boxes, and moments that have one writer each, belong to that writer."""
    runs = rows_chunks([(0, 0, 3), (1, 3, 7)], 4)
    tensors = {"optimizer.w.exp_avg": random_tensor(0, dtype="F32", shape=(10, 4), chunks=runs)}
    tensors["optimizer.v.exp_avg"] = random_tensor(1, dtype="F32", shape=(10, 4))
    saved = on_layout(tmp_path / "cut", tensors, {"dp": 2})
    assert [h.basis for h in saved.holders] == ["written", "written"]
    assert saved.is_held(0).tolist() == [True, False, True]
    whole = partial(random_tensor, dtype="F32", shape=(4, 4))
    pairs = {
        f"optimizer.{i}.{kind}": whole(i, chunks=rows_chunks([(i // 2, 0, 4)], 4))
        for i in range(4)
        for kind in ("exp_avg", "exp_avg_sq")
    }
    saved = on_layout(tmp_path / "shares", pairs, {"dp": 2})
    assert {h.basis for h in saved.holders} == {"written"}
    assert not any(h.is_sure for h in saved.holders), "four parameters may agree by chance"
    turns = {
        f"optimizer.{i}.{kind}": whole(i, chunks=rows_chunks([((i + n) % 2, 0, 4)], 4))
        for i in range(4)
        for n, kind in enumerate(("exp_avg", "exp_avg_sq"))
    }
    saved = on_layout(tmp_path / "turns", turns, {"dp": 2})
    assert {h.basis for h in saved.holders} == {"whole"}


def test_what_cannot_be_inferred_is_called_unsure(tmp_path: Path) -> None:
    """Large equal pieces: a cut along dp, or a replicated tensor that the planner divided."""
    half = rows_chunks([(0, 0, 1000), (1, 1000, 1000)], 20)
    tensors = {"model.table": random_tensor(0, dtype="F32", shape=(2000, 20), chunks=half)}
    saved = on_layout(tmp_path, tensors, {"dp": 2})
    assert [(h.basis, h.is_sure) for h in saved.holders] == [("unsure", False)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("tp=x", "tp=4,dp=2"), ("xp=2", "xp=2"), ("tp=2,tp=4", "each axis once"), ("tp=0", "tp"),
     ("dp=4096", "at most"), ("ep=3,dp=4", "ep"), ("", "tp=4,dp=2")],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_layout(text, saved=None)
    assert str(caught.value).startswith(f"--as {text}")


def test_relaid_requests_tile_what_is_cut(tmp_path: Path) -> None:
    """Whatever the layout: the ranks' boxes of a tensor cover it, equally often everywhere."""
    grid = [Chunk(file=f, box=Box((7 * (f // 2), 5 * (f % 2)), (7 if f < 2 else 6, 5)))
            for f in range(4)]  # fmt: skip
    runs = [Chunk(file=f, box=Box((a, 0), (n, 10))) for f, a, n in ((0, 0, 1), (2, 1, 12))]
    tensors = {
        "moments.m": random_tensor(0, dtype="F32", shape=(13, 10), chunks=grid),
        "flat.f": random_tensor(1, dtype="F32", shape=(13, 10), chunks=runs),
    }
    saved = on_layout(tmp_path, tensors, {"tp": 2, "dp": 2})
    for sizes in ({"tp": 4}, {"dp": 3}, {"tp": 3, "dp": 5}, {"dp": 16}, {"tp": 2, "cp": 2}):
        requests = relaid_requests(saved, Layout(**sizes))
        count = torch.zeros(2, 13, 10, dtype=torch.int64)
        for table in requests.tables:
            for row in range(len(table)):
                (a, b), (m, n) = table.offset[row].tolist(), table.extent[row].tolist()
                count[int(table.tensor[row]), a : a + m, b : b + n] += 1
        for tensor in range(2):
            assert count[tensor].min() == count[tensor].max() > 0, (sizes, tensor)

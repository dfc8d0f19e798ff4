"""`holdfast show --locality` and planned loads against what real ranks held and read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import (
    Checkpointer,
    Layout,
    OptimizerState,
    Padded,
    PerRank,
    ProcessGroups,
    Replicated,
    Sharded,
)
from holdfast.arrays.box_table import BoxTable
from holdfast.arrays.boxes import Box
from holdfast.arrays.intervals import shard_intervals
from holdfast.checkpoint.load.forecast import forecast_reads
from holdfast.cli.support.holders import SavedPlacement, placement_in_words
from holdfast.cli.support.relayout import parse_layout, relaid_requests, saved_requests
from holdfast.errors import ConfigError
from holdfast.format.manifest import IRREGULAR, WHOLE, CutInfo, PlacementInfo
from holdfast.format.reader import Snapshot
from holdfast.state import FlatShard
from holdfast.storage import PosixStorage
from tests.checkpoint.common import make_state
from tests.cli.conftest import Holdfast
from tests.format.making import Chunk, make, random_tensor, write
from tests.fsdp import common as fsdp
from tests.harness import RankContext, run_ranks
from tests.optim import experts
from tests.optim.common import adamw

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


def rich_state(groups: ProcessGroups) -> dict[str, object]:
    """One tensor of every kind of holding, on two stages of two ranks with an expert each."""
    layout, rank = groups.layout, groups.rank
    at = layout.coordinates(rank)

    def filled(*shape: int) -> torch.Tensor:
        return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)

    mesh = groups.mesh("dp")
    half = at["dp"]
    run = filled(30)[11 * half : 11 + 19 * half]
    return {
        "model": {
            "large": filled(600, 100),
            "norm": Replicated(filled(9)),
            "rows": DTensor.from_local(filled(6, 4)[3 * half : 3 * half + 3], mesh, [Shard(0)]),
            "copies": DTensor.from_local(filled(5), mesh, [Replicate()]),
            "experts": Sharded(filled(4, 3)[2 * at["ep"] : 2 * at["ep"] + 2], (4, 3), {0: "ep"}),
            "stages": Sharded(filled(8)[4 * at["pp"] : 4 * at["pp"] + 4], (8,), {0: "pp"}),
            "uneven": Sharded(filled(7)[5 * half : 5 + 2 * half], (7,), offset=(5 * half,),
                              over=("dp",)),
        },
        # Of an own expert and an own layer a module receives no more than it has.
        "module": torch.nn.ParameterDict(
            {f"expert{at['ep']}": filled(12), f"layer{at['pp']}": filled(3, 3)}
        ),
        "optimizer": {"moment": FlatShard(run, 11 * half, filled(5, 6), "dp_cp")},
        "rank": PerRank({"t": filled(2)}),
    }  # fmt: skip


def zero_state(groups: ProcessGroups) -> dict[str, object]:
    """ZeRO over dense weights and over experts, after a step: runs of buffers as shards."""
    net = experts.build_sparse(groups)
    optimizer = experts.chain(net, adamw, groups)
    with optimizer.microbatch(is_last=True):
        net(experts.rows_of(0, groups)).mean().backward()
    optimizer.step()
    optimizer.synchronize()
    return {"model": net, "optimizer": OptimizerState(optimizer, net)}


def hybrid_state(groups: ProcessGroups) -> dict[str, object]:
    """Parameters sharded within each of two slices of the data ranks, after a step."""
    net = fsdp.place(fsdp.build(num_layers=2), groups)
    sharded = fsdp.shard(net, groups, strategy="optim_grads_params")
    optimizer = fsdp.adamw(net.parameters())
    fsdp.train(sharded, optimizer, steps=1)
    return {"model": net, "optimizer": OptimizerState(optimizer, net)}


Make = Callable[[ProcessGroups], dict[str, object]]
HOLDINGS: dict[str, tuple[Layout, Make, tuple[str, ...]]] = {
    "rich": (Layout(dp=2, ep=2, pp=2), rich_state, ("", "dp", "pp ep")),
    "zero": (Layout(tp=2, dp=2, ep=2, expt_tp=1), zero_state, ("", "dp", "tp")),
    "hybrid": (Layout(dp=4, ep=2, replicas=2), hybrid_state, ("", "dp")),
}
"""Name -> layout, state, and over which axes its replicated tensors are stored, in turn."""


def save_and_load_holdings(context: RankContext, root: str) -> dict[str, dict[str, int]]:
    """Bytes by file of loads under the saved layout, by what holds and what is stored twice."""
    loads = {}
    for name, (layout, make_it, all_axes) in HOLDINGS.items():
        with ProcessGroups.create(layout, backend="gloo") as groups:
            state = make_it(groups)
            for axes in all_axes:
                with Checkpointer(
                    f"{root}-{name} {axes}", groups=groups, replicate_over=tuple(axes.split()),
                    max_copy_fraction=9.0,
                ) as checkpointer:  # fmt: skip
                    checkpointer.save(1, state)
                    loads[f"{name} {axes}"] = dict(checkpointer.load(state).nbytes_by_file)
    return loads


@pytest.mark.slow
def test_the_saved_layout_is_exact_for_every_kind_of_holding(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    """B10: runs of a buffer, experts, stages, DTensors, undeclared replicas; with copies, too.

    ZeRO with experts that tensor parallelism does not cut, and hybrid sharding, are of real models.
    """
    results = run_ranks(4, save_and_load_holdings, str(tmp_path / "run")).results
    kinds: dict[str, set[str]] = {}
    for name, axes in ((name, axes) for name, each in HOLDINGS.items() for axes in each[2]):
        root = Path(f"{tmp_path / 'run'}-{name} {axes}")
        shown = holdfast("show", root, "--locality", "--json").json["locality"]
        assert (shown["extra_nbytes"] > 0) == bool(axes)
        with open_saved(root) as snapshot:
            names = [file.name for file in snapshot.manifest.files]
            requests = saved_requests(SavedPlacement(snapshot.manifest, snapshot.index))
            nbytes = forecast_reads(snapshot, requests.tables, ranks=requests.ranks)
            writer = {file.name: file.writer for file in snapshot.manifest.files}
        for rank in range(4):
            read = results[rank][f"{name} {axes}"]
            planned = {n: int(b) for n, b in zip(names, nbytes[rank], strict=True) if b}
            assert planned == read, (name, axes, rank)
            own = sum(b for file, b in read.items() if writer[file] == rank)
            locality = shown["ranks"][rank]
            assert locality["own_nbytes"] == own, (name, axes, rank)
            assert locality["other_nbytes"] == sum(read.values()) - own
            assert locality["num_files"] == len(read)
            assert sum(locality["nbytes_by_part"].values()) == sum(read.values())
        kinds.setdefault(name, set()).update(each["placement"] for each in shown["placements"])
    assert kinds["rich"] == {
        "whole", "irregular", "per coordinate", "dp cuts dim 0", "ep cuts dim 0", "pp cuts dim 0",
        "runs over dp_cp",
    }  # fmt: skip
    assert {"runs over dp_cp", "ep cuts dim 0, runs over expt_dp"} <= kinds["zero"]
    assert {"dp_cp_intra cuts dim 0"} <= kinds["hybrid"], kinds["hybrid"]


def save_on_meshes(context: RankContext, root: str) -> None:
    """Shards that meshes declare, on TP2 and DP2: of the layout's groups, and of others."""
    layout = Layout(tp=2, dp=2)
    with (
        ProcessGroups.create(layout, backend="gloo") as groups,
        Checkpointer(root, groups=groups) as checkpointer,
    ):
        mesh = groups.mesh("dp_cp", "tp")
        # Its dims have names of groups, and the ranks of the other ones.
        swapped = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        unnamed = init_device_mesh("cpu", (4,))
        at = layout.coordinate(context.rank)
        stride = _StridedShard(0, split_factor=2)
        rows = shard_intervals(((0, 10),), num_chunks=2, index=at["dp"], split_factor=2)
        ours = torch.cat([torch.arange(a, b) for a, b in rows]).chunk(2)[at["tp"]]
        whole = Replicated(torch.zeros(7))
        both = [Shard(0), Replicate()]
        state = {
            "strided": DTensor.from_local(
                ours.float(), mesh, [stride, Shard(0)], run_check=False, shape=(10,), stride=(1,)
            ),
            "odd": DTensor.from_local(
                torch.zeros(4), mesh, [_StridedShard(0, split_factor=4), Replicate()],
                run_check=False, shape=(8,), stride=(1,),
            ),
            "inner": DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(0), Shard(0)]),
            "columns": DTensor.from_local(torch.zeros(6, 2), mesh, [Shard(1), Replicate()]),
            "swapped": DTensor.from_local(torch.zeros(4), swapped, both),
            "unnamed": DTensor.from_local(torch.zeros(2), unnamed, [Shard(0)]),
            "padded": Padded(Sharded(torch.zeros(4), (8,), {0: "tp"}), (7,)),
            # Of ranks that declare differently: the same, in other words, and another placement.
            "differs": whole if context.rank else whole.local,
            "declared": Sharded(torch.zeros(4), (8,), {0: "tp" if at["dp"] else ("tp",)}),
            "mixed": Sharded(torch.zeros(4), (8,), {0: "tp"})
            if at["dp"]
            else Sharded(torch.zeros(4), (8,), offset=(4 * at["tp"],), over=("tp",)),
        }  # fmt: skip
        checkpointer.save(1, {"t": state})


def test_placements_are_what_meshes_and_markers_declare(tmp_path: Path) -> None:
    """Cut again under the saved layout, a tensor gives every rank what it truly held."""
    run_ranks(4, save_on_meshes, str(tmp_path))
    with open_saved(tmp_path) as snapshot:
        saved = SavedPlacement(snapshot.manifest, snapshot.index)
    words = {
        info.key.removeprefix("t."): placement_in_words(saved.placement(number))[0]
        for number, info in enumerate(saved.manifest.tensors)
    }
    assert words == {
        "strided": "dp_cp cuts pieces of dim 0, tp cuts dim 0",
        "inner": "dp_cp cuts dim 0, tp cuts dim 0",
        "columns": "dp_cp cuts dim 1",
        "declared": "tp cuts dim 0",
        "differs": "whole",
        **dict.fromkeys(("odd", "swapped", "unnamed", "padded", "mixed"), "irregular"),
    }
    again = relaid_requests(saved, Layout(tp=2, dp=2)).tables
    held = saved_requests(saved).tables
    known = [number for number, kind in enumerate(words.values()) if kind != "irregular"]
    for one, other in zip(again, held, strict=True):
        assert elements(one) == {each for each in elements(other) if each[0] in known}


def elements(table: BoxTable) -> set[tuple[int, ...]]:
    """(tensor, index of each element) of all boxes."""
    found: set[tuple[int, ...]] = set()
    for row, tensor in enumerate(table.tensor.tolist()):
        box = table.box(row)
        ranges = [range(a, b) for a, b in zip(box.offset, box.stop, strict=True)]
        found.update((tensor, *index) for index in itertools.product(*ranges))
    return found


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


def notes_under(root: Path, layout: Layout) -> str:
    with open_saved(root) as snapshot:
        saved = SavedPlacement(snapshot.manifest, snapshot.index)
        return " ".join(relaid_requests(saved, layout).notes)


def test_what_was_left_out_is_stated(real: tuple[Path, list[Any]]) -> None:
    root, _ = real
    notes = notes_under(root, Layout(tp=4))
    for text in ("Cut again by the stored placements", "4 tensors are stored per coordinate"):
        assert text in notes
    assert "stages" not in notes.partition("Left out")[2]
    notes = notes_under(root, Layout(tp=2, pp=2))
    assert "17 tensors are of pipeline stages" in notes


def test_the_tables_say_how_tensors_are_placed(
    holdfast: Holdfast, real: tuple[Path, list[Any]]
) -> None:
    root, _ = real
    result = holdfast("show", root, "--locality")
    assert result.code == 0
    for text in ("in its own file", "per coordinate", "tp cuts dim 1", "times stored"):
        assert text in result.out
    counts = holdfast("show", root, "--locality", "--json").json["locality"]["placements"]
    assert sum(count["num_tensors"] for count in counts) == 21
    assert {c["placement"]: c["num_tensors"] for c in counts}["per coordinate"] == 4


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


@pytest.mark.parametrize(
    ("text", "problem"),
    [("tp=x", "tp=4,dp=2"), ("xp=2", "xp=2"), ("tp=2,tp=4", "each axis once"), ("tp=0", "tp"),
     ("dp=4096", "at most"), ("ep=3,dp=4", "ep"), ("", "tp=4,dp=2"),
     ("tp=" + "9" * 5000, "tp=4,dp=2")],
)  # fmt: skip
def test_layouts_that_cannot_be_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_layout(text, saved=None)
    assert str(caught.value).startswith(f"--as {text}")


STRIDED = PlacementInfo(kind="cut", cuts=(CutInfo(0, "dp", True), CutInfo(0, "tp")))
PLAIN = PlacementInfo(kind="cut", cuts=(CutInfo(1, "tp"), CutInfo(0, "dp")))
RUNS = PlacementInfo(kind="runs", cuts=(CutInfo(1, "tp"),), over="dp_cp")


def placed(root: Path, placements: list[PlacementInfo]) -> SavedPlacement:
    """One tensor of each placement, on TP2 and DP2; all ranks held all of them."""
    tensors = {
        f"model.{i}": random_tensor(
            i, dtype="F32", shape=(13, 10), chunks=rows_chunks([(i % 4, 0, 13)], 10)
        )
        for i in range(4)
    }
    saved = on_layout(root, tensors, {"tp": 2, "dp": 2})
    infos = [
        msgspec.structs.replace(info, placement=number % len(placements))
        for number, info in enumerate(saved.manifest.tensors)
    ]
    manifest = msgspec.structs.replace(saved.manifest, placements=placements, tensors=infos)
    return SavedPlacement(manifest, saved.index)


def test_relaid_requests_tile_what_is_cut(tmp_path: Path) -> None:
    """Whatever the layout: the ranks' boxes of a tensor cover it, equally often everywhere."""
    saved = placed(tmp_path, [WHOLE, PLAIN, STRIDED])
    for sizes in ({"tp": 4}, {"dp": 3}, {"tp": 3, "dp": 5}, {"dp": 16}, {"tp": 2, "cp": 2}):
        layout = Layout(**sizes)
        requests = relaid_requests(saved, layout)
        count = torch.zeros(4, 13, 10, dtype=torch.int64)
        for table in requests.tables:
            for row in range(len(table)):
                (a, b), (m, n) = table.offset[row].tolist(), table.extent[row].tolist()
                count[int(table.tensor[row]), a : a + m, b : b + n] += 1
        times = [layout.world_size, layout.cp, layout.cp]
        for tensor in range(3):
            assert count[tensor].min() == count[tensor].max() == times[tensor], (sizes, tensor)
        assert "Left out" not in " ".join(requests.notes)


def test_strided_cuts_are_made_inside_of_the_later_ones(tmp_path: Path) -> None:
    """As FSDP2 on tensor parallelism has them: dp cuts each of the slices that tp gives."""
    requests = relaid_requests(placed(tmp_path, [STRIDED]), Layout(tp=2, dp=2))
    rows = [[table.offset[0, 0], table.extent[0, 0]] for table in requests.tables]
    assert rows == [[0, 4], [7, 3], [4, 3], [10, 3]]


def test_runs_are_known_on_one_data_rank_alone(tmp_path: Path) -> None:
    saved = placed(tmp_path, [RUNS, IRREGULAR])
    requests = relaid_requests(saved, Layout(tp=5))
    assert [table.extent.tolist() for table in requests.tables] == [[[13, 2]] * 2] * 5
    assert "2 tensors have boxes that follow from no axes" in " ".join(requests.notes)
    requests = relaid_requests(saved, Layout(tp=2, dp=4))
    assert [len(table) for table in requests.tables] == [0] * 8
    assert "2 tensors are runs of flat buffers" in " ".join(requests.notes)

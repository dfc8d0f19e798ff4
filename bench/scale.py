"""Planning past one machine: thousands of virtual ranks through plan and index, in one process."""

from __future__ import annotations

import pickle
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from bench.ranks import RankContext, run_ranks
from bench.results import BenchResults, Target
from bench.sharded import TIMEOUT_S, RankMeasurements
from bench.timing import Measured, Series, interleave, median_of, values_of
from holdfast import RNG, Codecs, Layout, Sharded
from holdfast.checkpoint.plan.claims import (
    RankClaims,
    claims_message,
    claims_of,
    decode_claims,
    encode_claims,
    read_claims_messages,
)
from holdfast.checkpoint.plan.kept_plans import write_plan
from holdfast.checkpoint.plan.make_plan import make_plan
from holdfast.checkpoint.plan.planner import Planner
from holdfast.checkpoint.plan.rank_plan import RankPlan
from holdfast.format.digest import DEFAULT_BLOCK_NBYTES, digest128
from holdfast.format.index import ChunkIndex, decode_index, encode_index, validate_index
from holdfast.format.manifest import FileInfo, IndexInfo, Manifest, TensorInfo, Totals
from holdfast.format.names import data_file
from holdfast.parallel.layout import DENSE_AXES
from holdfast.state import flatten_state
from holdfast.state.coordinates import coordinate_label
from holdfast.storage import PosixStorage
from holdfast.writer.commit import assemble, build_index
from holdfast.writer.records import CommitPlan, DoneRecord, SaveHeader, column

_HEADER_NBYTES = 4096
HEADER = SaveHeader(
    step=1, save_id="0" * 12, created="2000-01-01T00:00:00+00:00", holdfast="0", torch="0",
    overwrite=False,
)  # fmt: skip


def measure(
    results: BenchResults,
    *,
    num_ranks: list[int],
    tensors_a_rank: int,
    dcp_ranks: list[int],
    repeats: int,
    scratch: Path,
) -> None:
    """Plan for growing numbers of ranks, each in the same fresh process; DCP up to `dcp_ranks`."""
    del scratch
    largest = max(num_ranks)
    for number in sorted({*num_ranks, *dcp_ranks}):
        result = run_ranks(
            1, _simulate, number, tensors_a_rank, number in dcp_ranks, repeats,
            init=False, timeout_s=TIMEOUT_S,
        ).results[0]  # fmt: skip
        series, counted = result.series, result.counted
        point = {"ranks": float(number), "rows": float(number * tensors_a_rank), **counted}
        point |= {name: median_of(series, "holdfast", name) for name in series["holdfast"][0]}
        if "dcp" in series:
            point |= {f"dcp {n}": median_of(series, "dcp", n) for n in series["dcp"][0]}
        results.curves.setdefault("scale", []).append(point)
        _report(results, f"scale, {number} ranks x {tensors_a_rank}", series, counted,
                bound=number == largest)  # fmt: skip


def _report(
    results: BenchResults, case: str, series: Series, counted: dict[str, float], *, bound: bool
) -> None:
    """The rows of one number of ranks; bars only for the largest."""

    def targets(value: float) -> tuple[Target, ...]:
        return (Target(against="value", bound=value),) if bound else ()

    has_dcp = "dcp" in series
    results.compare(
        case, "first plan", unit="s", holdfast=values_of(series, "holdfast", "plan"),
        dcp={"global plan": values_of(series, "dcp", "plan")} if has_dcp else None,
        targets=targets(2.0),
    )  # fmt: skip
    results.compare(
        case, "open the index", unit="s", holdfast=values_of(series, "holdfast", "open"),
        dcp={"unpickle": values_of(series, "dcp", "open")} if has_dcp else None,
        targets=targets(0.1),
    )  # fmt: skip
    results.state(
        case, "index, a row", counted["row nbytes"], unit="B", dcp=counted.get("dcp row nbytes"),
        targets=targets(80.0),
    )  # fmt: skip
    results.state(
        case, "received by the coordinator, a row", counted["received nbytes a row"], unit="B",
        targets=targets(64.0),
    )  # fmt: skip
    results.state(
        case, "resumed run: CPU of a rank", counted["resumed"], unit="s", targets=targets(0.02)
    )
    results.state(
        case, "resumed run: read by a rank", counted["resumed nbytes"], unit="B",
    )  # fmt: skip
    results.state(
        case, "resumed run: memory of a rank", counted["resumed peak nbytes"], unit="B",
        targets=targets(20e6),
    )  # fmt: skip
    results.compare(
        case, "commit: index out of all records", unit="s",
        holdfast=values_of(series, "holdfast", "build"), targets=targets(0.2),
    )  # fmt: skip
    if bound:
        for name in ("decode tables", "encode", "prove", "assemble"):
            results.compare(
                case, f"index and tables: {name}", unit="s",
                holdfast=values_of(series, "holdfast", name),
            )  # fmt: skip


def _simulate(
    context: RankContext, num_ranks: int, tensors_a_rank: int, with_dcp: bool, repeats: int
) -> RankMeasurements:
    """Plan again and again for one number of ranks, Holdfast and DCP in turns."""
    del context
    layout = simulated_layout(num_ranks)
    encoded = claims_messages(simulated_tables(layout, tensors_a_rank))
    counted: dict[str, float] = {}
    with TemporaryDirectory() as directory:
        resumed = Resumed(layout, encoded, tensors_a_rank, Path(directory))
        counted["resumed peak nbytes"] = resumed.peak_nbytes()
        measured = [resumed.measure() for _ in range(max(repeats, 3))]
    counted["resumed nbytes"] = resumed.nbytes_read
    counted["resumed"] = sorted(measured)[len(measured) // 2]

    def holdfast(_: int) -> Measured:
        return _plan_once(layout, encoded, counted)

    arms = {"holdfast": holdfast}
    if with_dcp:
        plans = _dcp_plans(layout, tensors_a_rank)

        def dcp(_: int) -> Measured:
            return _dcp_once(plans, counted)

        arms["dcp"] = dcp
    series = interleave(arms, repeats=repeats, before_each=lambda: None)
    return RankMeasurements(series=series, counted=counted)


def claims_messages(tables: list[RankClaims]) -> list[bytes]:
    """Return what the ranks send to the coordinator: each distinct set of names once."""
    sent: set[bytes] = set()
    messages = []
    for table in tables:
        names = None if table.names in sent else table.names
        sent.add(table.names)
        messages.append(claims_message(encode_claims(table), names))
    return messages


class _Counting(PosixStorage):
    """Counts what is read."""

    nbytes = 0

    def read(self, path: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(path, start=start, nbytes=nbytes)
        self.nbytes += len(data)
        return data


class Resumed:
    """The first save of a resumed run on a rank that is not the coordinator: it finds its plan.

    Args:
        layout: of all ranks.
        encoded: their claims, see `claims_messages`.
        tensors_a_rank: of the simulated state.
        directory: for the kept plan.
    """

    def __init__(
        self, layout: Layout, encoded: list[bytes], tensors_a_rank: int, directory: Path
    ) -> None:
        self._layout, self._storage = layout, _Counting(directory)
        coordinator = self._planner(0)
        self._rank = next((r for r in layout.ranks if layout.coordinate(r)["pp"] == 1), 0)
        state = simulated_state(layout, layout.coordinate(self._rank)["pp"], tensors_a_rank)
        _, notes = coordinator.plan_from_claims(encoded, compare_all=False)
        planner = self._planner(self._rank)
        self._local = planner.flatten(state)
        write_plan(self._storage, planner.path(compare_all=False), notes.encode()[0])
        self.nbytes_read = 0.0

    def _planner(self, rank: int) -> Planner:
        ranks = self._layout.ranks
        control = SimpleNamespace(
            rank=rank, ranks=ranks, size=len(ranks), index=rank, is_coordinator=rank == 0
        )
        groups: Any = SimpleNamespace(layout=self._layout, rank=rank, control=control)
        return Planner(self._storage, groups, codecs=Codecs(), block_nbytes=DEFAULT_BLOCK_NBYTES)

    def measure(self) -> float:
        """Return the CPU seconds that it takes."""
        planner = self._planner(self._rank)
        self._storage.nbytes, began = 0, time.process_time()
        plan = planner.lookup(self._local, compare_all=False)
        seconds = time.process_time() - began
        assert isinstance(plan, RankPlan), plan
        self.nbytes_read = float(self._storage.nbytes)
        return seconds

    def peak_nbytes(self) -> float:
        """Return the memory that it takes at most."""
        tracemalloc.start()
        try:
            self.measure()
            return float(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()


def simulated_layout(num_ranks: int) -> Layout:
    """TP4 x PP4 x DP, or as much of it as fits."""
    tp = min(4, num_ranks)
    pp = min(4, num_ranks // tp)
    return Layout(tp=tp, pp=pp, dp=num_ranks // (tp * pp))


def _shape(layout: Layout, tensor: int) -> tuple[int, int]:
    """The global shape of a simulated tensor."""
    return layout.tp * (8 + tensor % 5), layout.dp * (4 + tensor % 3)


def simulated_state(layout: Layout, stage: int, tensors_a_rank: int) -> dict[str, object]:
    """Return the state of the first rank of a stage."""
    shapes = [_shape(layout, i) for i in range(tensors_a_rank)]
    model = {
        f"stage{stage}.layers.t{i}.weight": Sharded(
            # A tensor of its own for each name: shared memory would be a tied parameter.
            torch.zeros(rows // layout.tp, columns // layout.dp),
            (rows, columns),
            dims={0: "tp", 1: "dp"},
        )
        for i, (rows, columns) in enumerate(shapes)
    }
    return {"model": model, "rng": RNG()}


def simulated_tables(layout: Layout, tensors_a_rank: int) -> list[RankClaims]:
    """Return what each rank holds: its random streams, and every tensor of its stage.

    Dim 0 of the tensors is cut along tp, dim 1 along dp.

    The state of the first rank of a stage is flattened as for a save; the others hold the boxes
    next to its own.
    """
    shapes = [_shape(layout, i) for i in range(tensors_a_rank)]
    extent = np.array([(a // layout.tp, b // layout.dp) for a, b in shapes], dtype=np.int64)
    of_stage: dict[int, RankClaims] = {}
    tables = []
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        stage = at["pp"]
        if stage not in of_stage:
            whole = simulated_state(layout, stage, tensors_a_rank)
            flat = flatten_state(whole, layout=layout, rank=rank, codecs=Codecs())
            of_stage[stage] = claims_of(flat)[0]
        first = of_stage[stage]
        replica_sets = tuple(
            replace(replica_set, replicas=(rank,)) for replica_set in first.replica_sets
        )
        # Random streams come behind the model's tensors; each rank has its own, whole.
        offset = np.zeros_like(first.offset)
        offset[:tensors_a_rank] = extent * np.array([at["tp"], at["dp"]])
        labels = (coordinate_label(layout, rank, DENSE_AXES, path="rng"),)
        tables.append(replace(first, offset=offset, replica_sets=replica_sets, labels=labels))
    return tables


def _plan_once(layout: Layout, encoded: list[bytes], counted: dict[str, float]) -> Measured:
    """Return what the coordinator does at a first save, step by step."""
    marks = [time.perf_counter()]

    def mark() -> float:
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    received, names = read_claims_messages(encoded, layout.ranks)
    tables = [decode_claims(data, rank=rank, names=names) for rank, data in enumerate(received)]
    measured = {"decode tables": mark()}
    plan, _ = make_plan(
        tables, ranks=layout.ranks,
        coordinates=[layout.coordinate(rank) for rank in layout.ranks],
        signature="0" * 32, block_nbytes=DEFAULT_BLOCK_NBYTES,
    )  # fmt: skip
    measured["plan"] = mark()
    index = index_of(plan)
    records = records_of(plan, index)
    files = [data_file(number) for number in range(len(plan.writers))]
    mark()
    build_index(plan, records, files, planned=plan.row_nbytes)
    measured["build"] = mark()
    assemble(plan, records, HEADER)
    measured["assemble"] = mark()
    data = encode_index(index)
    measured["encode"] = mark()
    opened = decode_index(data)
    measured["open"] = mark()
    manifest = _manifest_of(plan, opened, data)
    mark()
    validate_index(opened, manifest)
    measured["prove"] = mark()
    counted["row nbytes"] = len(data) / index.num_rows
    num_rows = len(plan.row_tensor)
    counted["received nbytes a row"] = sum(map(len, encoded)) / num_rows
    return measured


def index_of(plan: CommitPlan) -> ChunkIndex:
    """The index as the commit makes it, with invented digests."""
    nbytes = plan.row_nbytes
    order = np.argsort(plan.row_file, kind="stable")
    ends = np.cumsum(nbytes[order])
    first = np.searchsorted(plan.row_file[order], np.arange(len(plan.writers)))
    base = np.concatenate([[0], ends])[first]
    starts = np.zeros_like(nbytes)
    starts[order] = ends - nbytes[order] - base[plan.row_file[order]] + _HEADER_NBYTES
    counts = -(-nbytes // plan.block_nbytes)
    words = np.random.default_rng(0).integers(0, 2**63, int(counts.sum()), dtype=np.uint64)
    return ChunkIndex(
        tensor=plan.row_tensor, file=plan.row_file, offset=plan.row_offset,
        extent=plan.row_extent, start=starts, nbytes=nbytes, copy=plan.row_copy,
        holders=plan.row_holders, holder_ptr=plan.holder_ptr, holder=plan.holder,
        digest_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), digest=words,
    )  # fmt: skip


def records_of(plan: CommitPlan, index: ChunkIndex) -> list[DoneRecord]:
    """The done-records of all ranks for an index whose rows lie file by file."""
    bounds = np.searchsorted(plan.row_file, np.arange(len(plan.writers) + 1))
    records = []
    for position, number in zip(plan.writers, range(len(plan.writers)), strict=True):
        rows = slice(int(bounds[number]), int(bounds[number + 1]))
        pointers = index.digest_ptr[rows.start : rows.stop + 1]
        nbytes = index.nbytes[rows]
        records.append(
            DoneRecord(
                position=position, plan_digest="", save_id=HEADER.save_id, file=data_file(number),
                nbytes=_HEADER_NBYTES + int(nbytes.sum()), header_nbytes=_HEADER_NBYTES,
                header_digest="0" * 32, starts=column(index.start[rows]), row_nbytes=column(nbytes),
                digest_ptr=column(pointers - pointers[0]),
                digests=column(index.digest[pointers[0] : pointers[-1]]),
                checks=b"", lanes=b"", values=b"{}",
            )
        )  # fmt: skip
    return sorted(records, key=lambda record: record.position)


def _manifest_of(plan: CommitPlan, index: ChunkIndex, data: bytes) -> Manifest:
    """The manifest as the commit makes it, with invented digests."""
    sizes = np.bincount(index.file, weights=index.nbytes).astype(np.int64) + _HEADER_NBYTES
    return Manifest(
        step=1, save_id="0" * 12, created="2000-01-01T00:00:00+00:00", holdfast="0", torch="0",
        layouts=list(plan.layouts), signature=plan.signature, block_nbytes=plan.block_nbytes,
        placements=list(plan.placements),
        tensors=[
            TensorInfo(key=key, dtype=dtype, shape=list(shape), layout=0, placement=placement)
            for key, dtype, shape, placement in zip(
                plan.keys, plan.dtypes, plan.shapes, plan.tensor_placements, strict=True
            )
        ],
        parts={},
        files=[
            FileInfo(name=data_file(number), nbytes=int(sizes[number]),
                     header_nbytes=_HEADER_NBYTES, header_digest="0" * 32,
                     writer=plan.ranks[writer], coordinate=plan.coordinates[writer])
            for number, writer in enumerate(plan.writers)
        ],
        index=IndexInfo(nbytes=len(data), digest=digest128(data), num_rows=index.num_rows),
        totals=Totals(num_tensors=len(plan.keys), nbytes=int(index.nbytes.sum()),
                      stored_nbytes=int(index.nbytes.sum())),
    )  # fmt: skip


def _dcp_plans(layout: Layout, tensors_a_rank: int) -> list[SavePlan]:
    """The same claims as the plans that DCP's ranks send to its coordinator."""
    plans = []
    for rank in layout.ranks:
        at = layout.coordinate(rank)
        items = []
        for i in range(tensors_a_rank):
            shape = _shape(layout, i)
            extent = shape[0] // layout.tp, shape[1] // layout.dp
            offset = torch.Size((extent[0] * at["tp"], extent[1] * at["dp"]))
            items.append(
                WriteItem(
                    index=MetadataIndex(f"model.stage{at['pp']}.layers.t{i}.weight", offset),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offset, sizes=torch.Size(extent)),
                        properties=TensorProperties(dtype=torch.float32),
                        size=torch.Size(shape),
                    ),
                )
            )
        plans.append(SavePlan(items, planner_data={}))
    return plans


def _dcp_once(plans: list[SavePlan], counted: dict[str, float]) -> Measured:
    """Return what DCP's coordinator does at a save, and each rank at a load."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    began = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    planned = time.perf_counter()
    data = pickle.dumps(metadata)
    pickled = time.perf_counter()
    pickle.loads(data)  # noqa: S301
    opened = time.perf_counter()
    num_rows = sum(len(plan.items) for plan in plans)
    counted["dcp row nbytes"] = len(data) / num_rows
    return {"plan": planned - began, "encode": pickled - planned, "open": opened - pickled}

"""Loads of several ranks: each byte from storage once, sent on to whoever asks for it, bitwise."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from holdfast import (
    Checkpointer,
    CorruptionError,
    DeadlineError,
    HoldfastError,
    Layout,
    LoadReport,
    PosixStorage,
    ProcessGroups,
    Replicated,
    Sharded,
    StorageError,
)
from holdfast.checkpoint.load import read_plan, transfers
from holdfast.format import byte_ranges
from holdfast.format.reader import Snapshot
from tests.checkpoint.common import assert_equal, full, make_state
from tests.harness import RankContext, run_ranks

BLOCK = 4096
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "wide": ((64, 1024), torch.float32),
    "tall": ((2048, 24), torch.bfloat16),
    "cube": ((16, 12, 40), torch.float64),
    "waves": ((30, 10), torch.complex128),
    "small": ((5,), torch.float32),
    "scalar": ((), torch.int64),
    "hollow": ((0, 3), torch.float32),
}


def truth(name: str) -> torch.Tensor:
    """The global value of a tensor of `SHAPES`."""
    shape, dtype = SHAPES[name]
    return (full(name, shape) * 100).to(dtype)


def nbytes(names: list[str] | None = None) -> int:
    """Bytes of these tensors, or of all."""
    return sum(truth(name).nbytes for name in names or list(SHAPES))


class CountingStorage(PosixStorage):
    """Counts what is read of data files, by path."""

    def __init__(self, root: str) -> None:
        self.read_nbytes: Counter[str] = Counter()
        super().__init__(root, observer=self._observe_read)

    def _observe_read(self, operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "read" and "/data/" in path:
            self.read_nbytes[path] += nbytes


def blank(kind: str, layout: Layout, rank: int) -> dict[str, object]:
    """Targets: everything on every rank, rows or columns cut over tp, or strided and cast."""
    state: dict[str, object] = {}
    for name in SHAPES:
        whole = torch.full_like(truth(name), 77)
        dim = {"rows": 0, "columns": 1}.get(kind, -1)
        if dim < 0 or whole.ndim <= dim:
            if kind == "strided" and whole.ndim == 2:
                whole = torch.full(whole.shape[::-1], 77, dtype=whole.dtype).t()
            state[name] = Replicated(whole) if whole.ndim else whole
            continue
        size = -(-whole.shape[dim] // layout.tp)
        index = layout.group("tp", rank).index(rank)
        start = min(size * index, whole.shape[dim])
        local = whole.narrow(dim, start, min(size, whole.shape[dim] - start)).clone()
        state[name] = Sharded(local, tuple(whole.shape), dims={dim: "tp"})
    return state


def check(state: dict[str, object], kind: str, layout: Layout, rank: int) -> None:
    """Every target is bitwise the truth."""
    for name, value in state.items():
        expected = truth(name)
        got = value.local if isinstance(value, Sharded | Replicated) else value
        assert isinstance(got, torch.Tensor)
        if isinstance(value, Sharded):
            dim = 0 if kind == "rows" else 1
            size = -(-expected.shape[dim] // layout.tp)
            start = min(size * layout.group("tp", rank).index(rank), expected.shape[dim])
            expected = expected.narrow(dim, start, got.shape[dim])
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), (kind, name)


def _save(context: RankContext, root: str, kind: str, layout: Layout) -> None:
    with ProcessGroups.create(layout) as groups:
        state = blank(kind, layout, context.rank)
        for name, value in state.items():
            expected = truth(name)
            if isinstance(value, Sharded):
                dim = 0 if kind == "rows" else 1
                size = -(-expected.shape[dim] // layout.tp)
                start = min(size * groups.index("tp"), expected.shape[dim])
                value.local.copy_(expected.narrow(dim, start, value.local.shape[dim]))
            else:
                whole = value.local if isinstance(value, Replicated) else value
                assert isinstance(whole, torch.Tensor)
                whole.copy_(expected)
        Checkpointer(root, groups=groups, block_nbytes=BLOCK).save(1, {"t": state})


def _load(context: RankContext, roots: list[str], layout: Layout) -> list[dict[str, float | None]]:
    """Load every root as every kind, exchanging and not; what the reports say."""
    found = []
    with ProcessGroups.create(layout) as groups:
        for root in roots:
            # The second time runs of a block and more go unpacked, straight to their places.
            transfers._LARGE_NBYTES = BLOCK if root == roots[-1] else 1 << 30
            for kind in ("whole", "rows", "columns", "strided"):
                for exchange in (True, False):
                    storage = CountingStorage(root)
                    state = blank(kind, layout, context.rank)
                    before = groups.control.num_collectives
                    report = Checkpointer(storage, groups=groups).load(
                        {"t": state}, exchange=exchange, verify=kind != "strided" or exchange
                    )
                    check(state, kind, layout, context.rank)
                    assert report.nbytes_read == sum(storage.read_nbytes.values())
                    found.append(
                        {
                            "kind": ("whole", "rows", "columns", "strided").index(kind),
                            "exchange": exchange,
                            "needed": report.nbytes_needed,
                            "read": report.nbytes_read,
                            "received": report.nbytes_received,
                            "opens": report.num_opens,
                            "job read": report.job.nbytes_read,
                            "job max": report.job.max_nbytes_read,
                            "unique": report.job.nbytes_unique,
                            "amplification": report.job.amplification,
                            "collectives": groups.control.num_collectives - before,
                        }
                    )
    return found


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (4, Layout(tp=2, dp=2)),
        pytest.param(4, Layout(tp=4), marks=pytest.mark.slow),
        pytest.param(8, Layout(tp=2, dp=4), marks=pytest.mark.slow),
    ],
)
def test_each_byte_is_read_once_over_the_job(
    tmp_path: Path, num_ranks: int, layout: Layout
) -> None:
    """P7, B9, R4: asked for whole, by rows, by columns, strided; written by one rank that does not
    load, or by three that do, and read for themselves what they wrote."""
    roots = [str(tmp_path / "one"), str(tmp_path / "three")]
    with Checkpointer(
        roots[0], groups=ProcessGroups.single(rank=40), block_nbytes=BLOCK
    ) as checkpointer:
        checkpointer.save(1, {"t": {name: truth(name) for name in SHAPES}})
    run_ranks(3, _save, roots[1], "rows", Layout(tp=3))
    results = run_ranks(num_ranks, _load, roots, layout).results
    total = nbytes()
    largest = max(truth(name).nbytes for name in SHAPES)
    for number, said in enumerate(zip(*results, strict=True)):
        first = said[0]
        assert sum(each["read"] for each in said) == first["job read"], number
        assert max(each["read"] for each in said) == first["job max"]
        assert {each["unique"] for each in said} == {total if first["exchange"] else None}
        assert {each["amplification"] for each in said} == {first["amplification"]}
        if first["exchange"]:
            assert first["amplification"] is not None
            assert first["job read"] is not None
            if number < len(results[0]) // 2:
                assert first["amplification"] == 1.0, first
                assert first["job max"] <= -(-total // num_ranks) + largest
            else:
                # The writers read at most everything once, and so do the others.
                assert 1.0 <= first["amplification"] <= 2.0
                assert said[-1]["read"] <= -(-first["job read"] // num_ranks) + largest
            for each in said:
                assert number >= len(results[0]) // 2 or each["received"] > 0
                assert each["collectives"] < 400
        else:
            assert all(each["received"] == 0 for each in said)
            assert first["amplification"] is None
            # Find, records, match (in two where a message is long), read, end.
            assert {each["collectives"] for each in said} <= {5, 6}
            if first["kind"] == 0:
                assert first["job read"] == num_ranks * total


def _on_hosts(context: RankContext, root: str, hosts: str) -> tuple[list[int], list[int | None]]:
    """Load with the default.

    Returns:
        Bytes read by this rank, and collectives; bytes read, received and requested by the job.
    """
    os.environ["HOLDFAST_HOST_ID"] = hosts[context.rank]
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        local = torch.zeros(32, 1024)
        cut = Sharded(local, (64, 1024), dims={0: "tp"})
        whole = torch.zeros(8, 1024)
        before = groups.control.num_collectives
        report = Checkpointer(root, groups=groups).load({"t": {"cut": cut, "whole": whole}})
        collectives = groups.control.num_collectives - before
        assert torch.equal(local, full("cut", (64, 1024))[32 * groups.index("tp") :][:32])
        assert torch.equal(whole, full("whole", (8, 1024)))
        job = report.job
        own = [report.nbytes_read, collectives]
        return own, [job.nbytes_read, job.nbytes_received, job.nbytes_unique]


HOSTS = ["abab", "abcd", *(pytest.param(h, marks=pytest.mark.slow) for h in ("aabb", "aaaa"))]
"""Of four ranks."""


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_ranks_of_one_host_request_each_of_them_reads(tmp_path: Path, hosts: str) -> None:
    """P7: by default bytes are read once over the job where ranks of several hosts request them."""
    state = {"cut": full("cut", (64, 1024)), "whole": full("whole", (8, 1024))}
    # By a rank that does not load: none finds anything in its own file.
    groups = ProcessGroups.single(rank=40)
    Checkpointer(tmp_path, groups=groups, block_nbytes=BLOCK).save(1, {"t": state})
    results = run_ranks(4, _on_hosts, str(tmp_path), hosts).results
    cut, whole = (tensor.nbytes for tensor in state.values())
    assert {tuple(job) for _, job in results} == {
        {
            # One host: each rank reads for itself, and none knows what the others request.
            "aaaa": (2 * cut + 4 * whole, 0, None),
            # Ranks 0 and 2 request the same half, as 1 and 3 do. Here they are on one host each.
            "abab": (2 * cut + whole, 3 * whole, cut + whole),
            "aabb": (cut + whole, cut + 3 * whole, cut + whole),
            "abcd": (cut + whole, cut + 3 * whole, cut + whole),
        }[hosts]
    }
    read = [own for (own, _), _ in results]
    if hosts == "aaaa":  # find, records, match, read, end
        assert {collectives for (_, collectives), _ in results} == {5}
    assert sum(read) == results[0][1][0]
    assert max(read) - min(read) <= 2 * BLOCK


def _balance(context: RankContext, root: str) -> tuple[int, int]:
    with ProcessGroups.create(Layout(dp=8)) as groups:
        state = {f"w{i}": Replicated(torch.zeros(40, 1024)) for i in range(5)}
        report = Checkpointer(root, groups=groups).load({"t": state}, exchange=True)
        for i in range(5):
            assert torch.equal(state[f"w{i}"].local, full(f"w{i}", (40, 1024)))
        return report.nbytes_read, report.num_opens


def test_one_writers_checkpoint_is_read_by_eight_in_equal_shares(tmp_path: Path) -> None:
    """B9, and every writer but rank 0's is one that does not exist now."""
    state = {f"w{i}": full(f"w{i}", (40, 1024)) for i in range(5)}
    Checkpointer(tmp_path, groups=ProcessGroups.single(rank=40), block_nbytes=BLOCK).save(
        1, {"t": state}
    )
    results = run_ranks(8, _balance, str(tmp_path)).results
    total = 5 * 40 * 4096
    assert sum(read for read, _ in results) == total
    assert max(read for read, _ in results) <= total // 8 + 2 * BLOCK
    assert all(opens == 1 for _, opens in results)


def _same_layout(context: RankContext, root: str) -> tuple[int, int, bool]:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        state = {
            f"w{i}": Sharded(
                full(f"w{i}", (64, 256))[groups.index("tp") * 32 :][:32].clone(),
                (64, 256),
                dims={0: "tp"},
            )
            for i in range(8)
        }
        storage = CountingStorage(root)
        with Checkpointer(storage, groups=groups, block_nbytes=BLOCK) as checkpointer:
            checkpointer.save(1, {"t": state})
            report = checkpointer.load({"t": state}, exchange=True)
        own = f"data/{context.rank:05d}"
        return report.nbytes_read, report.num_opens, all(own in p for p in storage.read_nbytes)


def test_a_load_under_the_same_layout_reads_own_files_only(tmp_path: Path) -> None:
    """B2: locality goes with balance where the writers were balanced."""
    for read, opens, own in run_ranks(4, _same_layout, str(tmp_path)).results:
        assert read == 8 * 64 * 256 * 4 // 4
        assert opens == 1
        assert own


def _own_bytes(context: RankContext, root: str, hosts: str) -> list[tuple[int, int, int, int]]:
    """Under every `exchange`: stored in this rank's file, read of it, received, requested."""
    os.environ["HOLDFAST_HOST_ID"] = hosts[context.rank]
    state = {"t": {f"w{i}": Replicated(full(f"w{i}", (64, 256))) for i in range(8)}}
    with ProcessGroups.create(Layout(dp=4)) as groups:
        Checkpointer(root, groups=groups, block_nbytes=BLOCK).save(1, state)
    (file,) = Path(root).glob(f"iter_*/data/{context.rank:05d}.safetensors")
    stored = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
    found = []
    # In another order than that of the files, so that equal shares alone are not those of before.
    with ProcessGroups.create(Layout(dp=4, ranks=(3, 0, 2, 1), name="other")) as groups:
        for exchange in ("auto", True, False):
            report = Checkpointer(root, groups=groups).load(state, exchange=exchange)
            own = report.nbytes_by_file.get(f"data/{file.name}", 0)
            found.append((stored, own, report.nbytes_received, report.nbytes_needed))
    return found


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_whose_own_file_has_the_bytes_receives_none_of_them(
    tmp_path: Path, hosts: str
) -> None:
    """B2: under every `exchange`, when the ranks that saved in equal shares load."""
    for found in run_ranks(4, _own_bytes, str(tmp_path), hosts).results:
        for stored, own, received, needed in found:
            assert own == stored > 0
            assert received <= needed - own


def _own_ranges(root: str, rank: int) -> int:
    """Bytes of all chunks in a rank's own file."""
    with Snapshot.open(PosixStorage(root), "iter_0000001") as snapshot:
        writers = np.array([file.writer for file in snapshot.manifest.files])
        return int(snapshot.index.nbytes[writers[snapshot.index.file] == rank].sum())


_Loads = list[tuple[int, int, LoadReport]]
"""(bytes in the rank's own file, those of them that it read, the report) of each load."""


def _with_copies(context: RankContext, root: str) -> dict[str, _Loads]:
    """Save with copies over tp, each rank a host, and load under every `exchange`; then load what
    rank 0 wrote alone."""
    os.environ["HOLDFAST_HOST_ID"] = "abcdefgh"[context.rank]
    found: dict[str, _Loads] = {}
    for name, layout in (
        ("tp8", Layout(tp=8)),
        ("tp4", Layout(tp=4, dp=2, name="both")),
        ("one", Layout(dp=8, name="flat")),
    ):
        with ProcessGroups.create(layout) as groups:
            there = f"{root}/{name}"
            rows = full("cut", (64, 256)).chunk(layout.tp)[groups.index("tp")].clone()
            state: dict[str, object] = {
                f"w{i}": Replicated(full(f"w{i}", (40, 1024))) for i in range(5)
            }
            if layout.tp > 1:
                state["cut"] = Sharded(rows, (64, 256), {0: "tp"})
                Checkpointer(
                    there,
                    groups=groups,
                    block_nbytes=BLOCK,
                    replicate_over="tp",
                    max_copy_fraction=9,
                ).save(1, {"t": state})
            own = _own_ranges(there, context.rank) if layout.tp > 1 or not context.rank else 0
            for exchange in (True, "auto", False):
                for value in state.values():
                    assert isinstance(value, Replicated | Sharded)
                    value.local.fill_(float("nan"))
                report = Checkpointer(there, groups=groups).load({"t": state}, exchange=exchange)
                for key, value in state.items():
                    assert isinstance(value, Replicated | Sharded)
                    expected = rows if key == "cut" else full(key, (40, 1024))
                    assert torch.equal(value.local, expected), (name, key)
                file = f"data/{context.rank:05d}.safetensors"
                is_there = layout.tp > 1 or context.rank == 0
                read = report.nbytes_by_file.get(file, 0) if is_there else 0
                found.setdefault(name, []).append((own, read, report))
    return found


def test_between_hosts_a_rank_receives_nothing_that_its_own_file_has(tmp_path: Path) -> None:
    """R4: with copies, and where one rank wrote everything: it reads its own file, and what the
    others have to read is balanced between them."""
    state = {f"w{i}": full(f"w{i}", (40, 1024)) for i in range(5)}
    with Checkpointer(tmp_path / "one", block_nbytes=BLOCK) as checkpointer:
        checkpointer.save(1, {"t": state})
    results = run_ranks(8, _with_copies, str(tmp_path)).results
    for found in results:
        for loads in found.values():
            for own, read, report in loads:
                assert read == own
                assert report.nbytes_received <= report.nbytes_needed - own
        # Eight copies on eight hosts: everything is there.
        for _, read, report in found["tp8"]:
            assert report.nbytes_received == 0
            assert report.nbytes_read == read == report.nbytes_needed
        # What a rank's own file lacks its twin along dp has, and sends most of it.
        for _, read, report in found["tp4"][:2]:
            assert 0 <= report.nbytes_read - read <= report.nbytes_needed // 16
            assert report.nbytes_received == report.nbytes_needed - report.nbytes_read > 0
    # Rank 0 sends twice its share; the others read the rest in equal parts.
    rest = sum(tensor.nbytes for tensor in state.values()) * 6 // 8
    for report in (found["one"][0][2] for found in results[1:]):
        assert abs(report.nbytes_read - rest // 7) <= 2 * BLOCK


_LATE_S = 3.0
"""The deadline while a rank has stopped; what others do in it takes some milliseconds."""


class _FailingReads(PosixStorage):
    """Fails at the n-th read of a data file, or stops there until the others have raised."""

    def __init__(self, root: str, *, at: int, wait: Callable[[], object] | None = None) -> None:
        count = 0

        def observe(operation: str, path: str, start: int, nbytes: int) -> None:
            nonlocal count
            if operation == "read" and "/data/" in path:
                count += 1
                if count >= at:
                    if wait is not None:
                        wait()
                    raise StorageError(f"{path}: read error (EIO)")

        super().__init__(root, observer=observe)


def _one_fails(context: RankContext, root: str) -> list[tuple[str, str, float]]:
    read_plan._ROUND_NBYTES = 8 * BLOCK
    byte_ranges.PIECE_NBYTES = BLOCK
    found = []
    layout = Layout(dp=4)
    store = PrefixStore("over", _get_default_store())
    others = [f"{rank}" for rank in range(4) if rank != 2]
    with ProcessGroups.create(layout, timeout_s=60) as groups:
        for at in (1, 3, 5, 2):
            stops = at == 2
            wait = partial(store.wait, others) if stops else None
            bad = context.rank == 2
            storage = _FailingReads(root, at=at, wait=wait) if bad else PosixStorage(root)
            state = blank("whole", layout, context.rank)
            groups.control.barrier(phase="begin")
            if stops:
                groups.control.timeout_s = _LATE_S
            began = time.monotonic()
            with pytest.raises(HoldfastError) as caught:
                Checkpointer(storage, groups=groups).load({"t": state}, exchange=True)
            kind = type(caught.value).__name__
            found.append((kind, str(caught.value), time.monotonic() - began))
    store.set(f"{context.rank}", "raised")
    return found


def test_a_rank_that_fails_or_stops_reading_fails_all_in_time(tmp_path: Path) -> None:
    """In the first round, in later ones, and one that never comes back."""
    run_ranks(1, _save, str(tmp_path), "whole", Layout())
    results = run_ranks(4, _one_fails, str(tmp_path), timeout_s=100).results
    for rank, said in enumerate(results):
        for kind, message, seconds in said[:3]:
            assert kind == CorruptionError.__name__
            assert "rank 2: " in message
            assert "EIO" in message
            assert "already written on this rank" in message
            assert seconds < 30
        kind, message, seconds = said[3]
        if rank != 2:
            assert kind == DeadlineError.__name__, message
            assert _LATE_S <= seconds < 30


def _mixed(context: RankContext, root: str) -> int:
    """Parts with layouts of their own, stages that ask for different layers, no common box."""
    layout = Layout(tp=2, pp=2)
    with ProcessGroups.create(layout) as groups:
        Checkpointer(root, groups=groups).save(1, make_state(layout, context.rank))
        for exchange in (False, True):
            target = make_state(layout, context.rank, blank=True)
            report = Checkpointer(root, groups=groups).load(target, exchange=exchange)
            assert_equal(target, layout, context.rank)
        assert report.job.nbytes_unique is not None
        return report.job.nbytes_unique


def test_stages_and_common_tensors_load_alike(tmp_path: Path) -> None:
    assert len(set(run_ranks(4, _mixed, str(tmp_path)).results)) == 1


def test_a_cast_and_a_strided_target_of_one_process(tmp_path: Path) -> None:
    values = full("x", (300, 70))
    with Checkpointer(tmp_path, block_nbytes=BLOCK) as checkpointer:
        checkpointer.save(1, {"t": {"x": values, "y": values.clone(), "z": values[:0]}})
        tall = torch.zeros(70, 300).t()
        half = torch.zeros(300, 70, dtype=torch.bfloat16)
        report = checkpointer.load(
            {"t": {"x": half, "y": tall, "z": torch.zeros(0, 70)}}, cast=True
        )
    assert report.cast == ("t.x",)
    assert torch.equal(half, values.bfloat16())
    assert torch.equal(tall, values)
    assert report.nbytes_needed == report.nbytes_read == 2 * values.nbytes
    assert report.job.amplification == 1.0
    assert report.num_opens == 1

"""Nothing wrong looks right: damage, disagreement between ranks, failing storage."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from holdfast import (
    RNG,
    Checkpointer,
    CorruptionError,
    HoldfastError,
    Layout,
    MismatchError,
    PerRank,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Replicated,
    Sharded,
    StorageError,
    Stored,
    Union,
)
from holdfast.checkpoint.plan.kept_plans import PLANS_DIR
from holdfast.state.markers import Pieces
from tests.checkpoint.common import assert_equal, files_of, make_state
from tests.harness import RankContext, run_ranks


def _damaged_loads(context: RankContext, root: str) -> list[str]:
    layout = Layout(tp=2, dp=2)
    messages = []
    with ProcessGroups.create(layout) as groups:
        for case in ("flip", "truncate", "delete", "swap"):
            target = make_state(layout, context.rank, blank=True)
            with pytest.raises(HoldfastError) as caught:
                Checkpointer(f"{root}/{case}", groups=groups).load(target)
            assert isinstance(caught.value, CorruptionError), caught.value
            messages.append(str(caught.value))
        target = make_state(layout, context.rank, blank=True)
        Checkpointer(f"{root}/good", groups=groups).load(target)
        assert_equal(target, layout, context.rank)
    return messages


def _save_good(context: RankContext, root: str) -> None:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        for case in ("good", "flip", "truncate", "delete", "swap"):
            Checkpointer(f"{root}/{case}", groups=groups).save(1, make_state(layout, context.rank))


def test_damaged_files_are_named_on_all_ranks(tmp_path: Path) -> None:
    """E4: one bit flipped, truncated, deleted, two files swapped."""
    run_ranks(4, _save_good, str(tmp_path))

    def data(case: str, number: int) -> Path:
        return tmp_path / case / "iter_0000001" / "data" / f"{number:05d}.safetensors"

    content = bytearray(data("flip", 2).read_bytes())
    content[-3] ^= 0x10
    data("flip", 2).write_bytes(content)
    os.truncate(data("truncate", 1), data("truncate", 1).stat().st_size - 1)
    data("delete", 3).unlink()
    data("swap", 0).rename(data("swap", 9))
    data("swap", 1).rename(data("swap", 0))
    data("swap", 9).rename(data("swap", 1))
    for messages in run_ranks(4, _damaged_loads, str(tmp_path)).results:
        for message, file in zip(messages, ("00002", "00001", "00003", ""), strict=True):
            assert file in message
            assert "model." in message or "moments." in message or "own" in message


def test_targets_that_were_read_with_a_damaged_one_are_named(tmp_path: Path) -> None:
    """Small tensors are read together, each into its own memory, before a digest is looked at."""
    num = 1 << 14
    stored = {"big": torch.ones(2 * num)}  # read alone, before
    stored |= {f"t{i}": torch.full((8,), i + 1.0) for i in range(20)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"p": stored})
        (file,) = tmp_path.glob("*/data/*")
        data = bytearray(file.read_bytes())
        data[data.index(stored["t2"].numpy().tobytes())] ^= 1
        file.write_bytes(data)
        target = {name: torch.zeros(8) for name in stored}
        halves = [torch.zeros(num, dtype=torch.float64) for _ in range(2)]
        big = Pieces(tuple(halves), offsets=((0,), (num,)), shape=(2 * num,))
        with pytest.raises(CorruptionError, match=r"p\.t2") as caught:
            checkpointer.load({"p": {**target, "big": big}}, cast=True)
    written = str(caught.value).partition("Targets already written on this rank:")[2]
    assert torch.equal(target["t0"], stored["t0"])
    assert "p.t0" in written
    assert torch.equal(torch.cat(halves), stored["big"].double())
    assert " and 11 more; " in written  # each name once, also of a tensor in two places


def test_every_block_of_tensors_that_a_step_reads_together_is_checked(tmp_path: Path) -> None:
    """A step has bytes of several tensors, and a tensor may have blocks in several steps."""
    reads: list[int] = []

    def observe(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "read" and "/data/" in path:
            reads.append(nbytes)

    sizes = (330_000, 8, 75_000, 8, 75_000, 8, 75_000, 8, 330_000)
    stored = {f"t{i}": torch.arange(i << 24, (i << 24) + n).int() for i, n in enumerate(sizes)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"p": stored})
    (file,) = tmp_path.glob("*/data/*")
    with Checkpointer(PosixStorage(tmp_path, observer=observe)) as checkpointer:
        target = {name: torch.zeros_like(each) for name, each in stored.items()}
        checkpointer.load({"p": target})
        assert all(torch.equal(target[name], each) for name, each in stored.items())
        assert sum(reads) == 4 * sum(sizes)
        assert len(reads) <= sum(reads) // (512 << 10) + 1
        data = file.read_bytes()
        for name, each in stored.items():
            byte = data.index(each.numpy().tobytes()) + each.nbytes - 1
            with file.open("r+b", buffering=0) as opened:
                os.pwrite(opened.fileno(), bytes([data[byte] ^ 1]), byte)
                with pytest.raises(CorruptionError, match=rf"p\.{name}\b"):
                    checkpointer.load({"p": target})
                os.pwrite(opened.fileno(), data[byte : byte + 1], byte)


@pytest.mark.parametrize("apart", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_a_small_checkpoint_is_found(tmp_path: Path, apart: int) -> None:
    """Each byte of each file, one at a time: the load raises, or returns the true values."""
    checkpointer = Checkpointer(tmp_path)
    state = {"t": {"x": torch.arange(5), "y": torch.ones(2, 2).bfloat16()}, "v": {"lr": 0.25}}
    checkpointer.save(1, state)
    directory = tmp_path / "iter_0000001"
    checked = 0
    for name, content in files_of(directory).items():
        path = directory / name
        header_end = 4096 if name.startswith("data/") else len(content)
        for position in range(0, len(content), apart):
            if name.startswith("data/") and 300 < position < header_end - 4:
                continue  # the header's padding: covered by `verify`, no load reads it
            path.write_bytes(
                content[:position] + bytes([content[position] ^ 0x04]) + content[position + 1 :]
            )
            checked += 1
            try:
                loaded = checkpointer.load({"t": Stored(), "v": Stored()}).values
            except (CorruptionError, StorageError):
                continue
            assert name.startswith("data/"), f"{name}: byte {position} went unnoticed"
            assert position < header_end, f"{name}: payload byte {position} went unnoticed"
            assert loaded["v"] == {"lr": 0.25}
            tensors = loaded["t"]
            assert isinstance(tensors, dict)
            assert torch.equal(tensors["x"], torch.arange(5))
        path.write_bytes(content)
    assert checked > 1000 / apart


def _disagreements(context: RankContext, root: str) -> list[str]:
    layout = Layout(tp=2, dp=2)
    rank = context.rank
    messages = []
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        checkpointer = Checkpointer(root, groups=groups)

        def refused(state: dict[str, object], step: int = 1) -> None:
            began = time.monotonic()
            with pytest.raises(PlanError) as caught:
                checkpointer.save(step, state)
            assert time.monotonic() - began < 30
            messages.append(str(caught.value))

        # A slice that looks like the whole: each rank's expert under one name.
        refused({"m": {"expert": torch.full((3,), float(rank))}})
        refused({"m": {"x": torch.zeros(3 + (rank == 2))}})
        refused({"m": {"x": torch.zeros(3).to(torch.half if rank == 1 else torch.float)}})
        refused({"v": {"lr": 0.1 if rank == 3 else 0.2}})
        refused({"m": {"x": torch.zeros(3) if rank == 0 else 5}})
        refused({"m": {"x": Sharded(torch.zeros(2, 2), (4, 2), offset=(0, 0), over=("tp",))}})
        row = layout.coordinate(rank)["tp"]
        refused({"m": {"x": Sharded(torch.zeros(1, 2), (4, 2), offset=(row, 0), over=("tp",))}})
        refused({"m": {"x": torch.zeros(2)}}, step=1 + (rank == 1))
        refused({"p": PerRank(rank, axes=("tp",))})
        assert checkpointer.latest() is None
        only = {"seen": rank} if rank == 2 else {}
        checkpointer.save(
            9,
            {
                "m": {"same": torch.arange(3), "trusted": Replicated(torch.arange(3))},
                "some": Union({"common": 1, **only}),
                "mine": PerRank({"rank": rank, "empty": {}}),
                "per tp": PerRank(rank % 2, axes=("tp",)),
            },
        )
        loaded = checkpointer.load(
            {"some": Stored(), "mine": PerRank(Stored()), "per tp": PerRank(Stored(), axes=("tp",))}
        ).values
        assert loaded == {
            "some": {"common": 1, "seen": 2},
            "mine": {"rank": rank, "empty": {}},
            "per tp": rank % 2,
        }
    return messages


def test_ranks_that_disagree_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    """A10, E10, K2: experts under one name, shapes, dtypes, values, kinds, owners, steps."""
    expected = [
        ("m.expert", "ranks 0"),
        ("m.x", "rank 2"),
        ("m.x", "rank 1", "F16", "F32"),
        ("v.lr", "rank 3", "0.1", "0.2"),
        ("m.x", "rank 0"),
        ("m.x", "no rank holds"),
        ("m.x", "no rank holds", "[2:4, 0:2]"),
        ("step", "1 on ranks 0, 2, 3; 2 on rank 1"),
        ("p[tp=0]",),
    ]
    for messages in run_ranks(4, _disagreements, str(tmp_path)).results:
        for message, words in zip(messages, expected, strict=True):
            for word in words:
                assert word in message, message
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".saving")] == []


class _FailingStorage(PosixStorage):
    """Fails with a full disk when it is asked to create a data file."""

    def create(self, path: str, *, nbytes: int) -> object:  # type: ignore[override]
        raise StorageError(f"{self.describe(path)}: no space left on device")


def _full_disk(context: RankContext, root: str) -> str:
    layout = Layout(dp=2)
    with ProcessGroups.create(layout, timeout_s=20) as groups:
        Checkpointer(root, groups=groups).save(1, make_state(layout, context.rank))
        kind = _FailingStorage if context.rank == 1 else PosixStorage
        with pytest.raises(StorageError) as caught:
            Checkpointer(kind(root), groups=groups).save(2, make_state(layout, context.rank))
        assert Checkpointer(root, groups=groups).latest() == 1
    return str(caught.value)


def test_a_full_disk_on_one_rank_fails_all(tmp_path: Path) -> None:
    """E2: PyTorch DCP reports success here and loses half of the tensors."""
    for message in run_ranks(2, _full_disk, str(tmp_path)).results:
        assert "rank 1" in message
        assert "no space left" in message
        assert "data/0000" in message
    assert not list(tmp_path.glob(".saving*"))


def _save_one(context: RankContext, roots: list[str]) -> None:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for root in roots:
            with Checkpointer(root, groups=groups) as checkpointer:
                checkpointer.save(1, make_state(Layout(dp=2), context.rank))


def _die_in_save(context: RankContext, roots: dict[str, int]) -> int:
    """Save step 2 in pairs of ranks, one for each root; how many storage operations there were.

    The coordinator of a pair is killed at the operation that its root names; 0 for none.
    """
    pair = context.rank // 2
    layout = Layout(dp=2, ranks=(2 * pair, 2 * pair + 1))
    root, instant = list(roots.items())[pair]
    count = 0

    def observe(operation: str, path: str, start: int, nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == instant and context.rank == layout.ranks[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    # Survivors wait this long for a rank that is gone; what they say is tested elsewhere.
    with ProcessGroups.create(layout, timeout_s=10) as groups:
        storage = PosixStorage(root, observer=observe)
        state = make_state(layout, context.rank)
        Checkpointer(storage, groups=groups).save(2, state)
    return count


def _check_after_crash(context: RankContext, roots: list[str]) -> set[int]:
    """Whatever is committed loads, and the next save works; the newest steps before it."""
    layout = Layout(dp=2)
    newest = set()
    with ProcessGroups.create(layout) as groups:
        for root in roots:
            checkpointer = Checkpointer(root, groups=groups)
            steps = checkpointer.steps()
            for step in steps:
                target = make_state(layout, context.rank, blank=True)
                checkpointer.load(target, step=step)
                assert_equal(target, layout, context.rank)
            checkpointer.save(3, make_state(layout, context.rank))
            assert checkpointer.latest() == 3
            newest.add(max(steps))
    return newest


@pytest.mark.slow
def test_killed_at_any_storage_operation_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """E1: the coordinator is killed at each of its storage operations in turn."""
    whole = str(tmp_path / "whole")
    run_ranks(2, _save_one, [whole])
    shutil.rmtree(Path(whole) / PLANS_DIR)  # of one pair alone: all plan, so all counts are equal
    num_operations = run_ranks(2, _die_in_save, {whole: 0}).results[0]
    instants = sorted({round(1 + i * (num_operations - 1) / 9) for i in range(10)})
    roots = {str(tmp_path / str(instant)): instant for instant in instants}
    run_ranks(2, _save_one, list(roots))
    for root in roots:
        shutil.rmtree(Path(root) / PLANS_DIR)
    outcome = run_ranks(2 * len(roots), _die_in_save, roots, expect_failure=True, timeout_s=60)
    killed = [error.signal if error is not None else None for error in outcome.errors]
    assert killed[::2] == [signal.SIGKILL] * len(roots)
    for newest in run_ranks(2, _check_after_crash, list(roots)).results:
        assert newest == {1, 2}


def _rng(context: RankContext, root: str, save: bool, dp: int) -> tuple[list[float], int]:
    with ProcessGroups.create(Layout(ep=2, dp=dp)) as groups:
        torch.manual_seed(100 + context.rank + (0 if save else 50))
        checkpointer = Checkpointer(root, groups=groups)
        kept = 0
        if save:
            checkpointer.save(1, {"rng": RNG()})
        else:
            kept = len(checkpointer.load({"rng": RNG()}).kept)
        return torch.rand(10).tolist(), kept


def test_every_rank_goes_on_with_its_own_random_stream(tmp_path: Path) -> None:
    """A11: streams are per rank, and a grown axis keeps fresh streams where none is stored."""
    saved = run_ranks(2, _rng, str(tmp_path), True, 2).results
    same = run_ranks(2, _rng, str(tmp_path), False, 2).results
    assert [draws for draws, _ in same] == [draws for draws, _ in saved]
    assert saved[0][0] != saved[1][0]
    grown = run_ranks(4, _rng, str(tmp_path), False, 4).results
    assert [draws for draws, _ in grown[:2]] == [draws for draws, _ in saved]
    assert [kept for _, kept in grown] == [0, 0, 1, 1]


def test_a_value_asked_for_per_rank_must_be_stored_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"v": {"x": 1}, "p": PerRank(2)})
    with pytest.raises(MismatchError, match="per"):
        checkpointer.load({"v": PerRank(Stored())})
    with pytest.raises(MismatchError, match="per"):
        checkpointer.load({"p": PerRank(Stored(), axes=("tp", "ep"))})
    assert checkpointer.load({"p": PerRank(Stored(), axes=("tp",))}).values["p"] == 2
    assert checkpointer.load({"p": PerRank(Stored())}).values["p"] == 2

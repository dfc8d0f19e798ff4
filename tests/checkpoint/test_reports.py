"""What reports say of time and bytes, against a storage that counts and delays."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import torch

from holdfast import (
    Checkpointer,
    ConfigError,
    Layout,
    PosixStorage,
    ProcessGroups,
    Replicated,
    StorageError,
)
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

_DELAY_S = 0.4
BLOCK = 4096


class _Watched(PosixStorage):
    """Delays the rename that commits, counts the bytes asked for, fails a read on demand."""

    def __init__(self, root: str) -> None:
        super().__init__(Path(root), observer=self._watch)
        self.nbytes: Counter[str] = Counter()
        self.num_delays = 0
        self.fails = False

    def _watch(self, operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "rename" and "/" not in path:
            self.num_delays += 1
            time.sleep(_DELAY_S)
        if "/data/" in path and operation in ("read", "write_at"):
            self.nbytes[operation] += nbytes
            if operation == "read" and self.fails:
                self.fails = False
                raise StorageError(f"{path}: read error (EIO)")


_Times = tuple[float, float, float, float]


def _reports(context: RankContext, root: str) -> tuple[_Times, int, list[tuple[int, int]]]:
    """(total, commit, measured, load's seconds), delays of this rank, bytes (said, asked)."""
    storage = _Watched(root)
    with ProcessGroups.create(Layout(dp=2)) as groups:
        state = {"t": {f"w{i}": Replicated(full(f"w{i}", (64, 256))) for i in range(2)}}
        checkpointer = Checkpointer(storage, groups=groups, block_nbytes=BLOCK, replicate_over="dp")
        groups.control.barrier(phase="test")
        began = time.perf_counter()
        saved = checkpointer.save(1, state)
        took = time.perf_counter() - began
        (file,) = Path(root).glob(f"iter_*/data/{context.rank:05d}.safetensors")
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        said = [(saved.nbytes, storage.nbytes["write_at"] - header)]
        # A copy replaces what cannot be read: both were asked for.
        storage.fails = context.rank == 1
        began = time.perf_counter()
        loaded = checkpointer.load(state, exchange=False)
        load_took = time.perf_counter() - began
        said += [
            (loaded.nbytes_read, storage.nbytes["read"]),
            (sum(loaded.nbytes_by_file.values()), storage.nbytes["read"]),
        ]
        assert loaded.seconds <= load_took
        assert torch.equal(state["t"]["w1"].local, full("w1", (64, 256)))
        times = (saved.seconds["total"], saved.seconds["commit"], took, loaded.seconds)
        return times, storage.num_delays, said


def test_totals_are_wall_times_and_bytes_are_what_storage_was_asked_for(tmp_path: Path) -> None:
    """R3: a commit that takes long is in the total of every rank, and a failed read is counted."""
    results = run_ranks(2, _reports, str(tmp_path)).results
    delays = sum(num for _, num, _ in results)
    assert delays >= 1
    for (total, commit, took, _), _, said in results:
        assert delays * _DELAY_S <= commit <= total <= took
        for stated, asked in said:
            assert stated == asked
    # A failed read was made again.
    assert results[1][2][1][0] > results[0][2][1][0]


def _empty_states(context: RankContext, root: str) -> tuple[list[str], list[int]]:
    """What is said of a state without parts on one rank, and on all; the committed steps."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(Path(root), groups=groups)
        some = {"v": {"x": 1}} if context.rank else {}
        said = [str(checkpointer.save(1, some))]
        for call in (checkpointer.save, checkpointer.save_async):
            try:
                call(2, {})
            except ConfigError as error:
                said.append(str(error))
        said.append(str(checkpointer.load(some)))
        checkpointer.close()
        return said, checkpointer.steps()


def test_a_checkpoint_of_nothing_is_refused_and_reports_print_as_one_line(tmp_path: Path) -> None:
    """A state may be empty on some ranks; on all of them it is a mistake that would be `latest`."""
    for said, steps in run_ranks(2, _empty_states, str(tmp_path)).results:
        saved, refused, refused_async, loaded = said
        assert steps == [1]
        assert saved.startswith(f"step 1 in {tmp_path}/iter_0000001: 0 tensors, 0 B, saved in ")
        assert saved.endswith(" s, a new plan, the first of its root")
        for text in (refused, refused_async):
            assert "ranks 0, 1: the state has no part on any rank" in text
        assert loaded.startswith(f"step 1 from {tmp_path}/iter_0000001: 0 tensors, 0 B read in ")

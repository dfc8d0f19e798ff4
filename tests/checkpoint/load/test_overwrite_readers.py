"""O9: whoever reads a step that is saved again meanwhile gets one version of it, whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer, Layout, PosixStorage, ProcessGroups, Replicated, StorageError
from holdfast.arrays.boxes import Box
from holdfast.checkpoint.load import read_executor
from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.names import parse_replaced_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import read_lease
from holdfast.policies.keep import KeepLast
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.writer.leftovers import repair
from tests.harness import RankContext, run_ranks

SHAPES = {"a": (400, 100), "b": (7,), "c": (64, 1025), "d": ()}
VERIFY = pytest.mark.parametrize("verify", [True, False])


def state_of(version: int) -> dict[str, object]:
    tensors = {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}
    return {"t": {**tensors, "n": version}, "v": {"version": version}}


def blank() -> dict[str, object]:
    tensors = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    return {"t": {**tensors, "n": 0}, "v": {}}


def version_in(state: dict[str, object], values: object) -> int:
    """The one version that all of a loaded state is of."""
    assert isinstance(values, dict)
    version = values["v"]["version"]
    found = {version, values["t"]["n"]}
    tensors = state["t"]
    assert isinstance(tensors, dict)
    for name in SHAPES:
        held = tensors[name]
        local = held.local if isinstance(held, Replicated) else held
        found |= set(local.unique().tolist())
    assert found == {version}, f"versions {found} in one load"
    return int(version)


def save(root: Path, version: int, *, step: int = 1) -> None:
    Checkpointer(root, settle_s=0.0).save(step, state_of(version), overwrite=True)


@contextmanager
def amid_load(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """Do something once, between the matching of a load and its first byte."""
    real = read_executor.LoadExecutor.run
    done: list[bool] = []

    def run(self: read_executor.LoadExecutor) -> None:
        if not done:
            done.append(True)
            act()
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(read_executor.LoadExecutor, "run", run)
        yield
    assert done


@VERIFY
@pytest.mark.parametrize("max_fallbacks", [None, 0])
@pytest.mark.parametrize("times", [1, 3])
def test_a_load_keeps_the_version_it_began_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: bool,
    max_fallbacks: int | None,
    times: int,
) -> None:
    save(tmp_path, 9, step=0)
    save(tmp_path, 1)

    def overwrite() -> None:
        for version in range(2, 2 + times):
            save(tmp_path, version)

    state = blank()
    with amid_load(monkeypatch, overwrite):
        report = Checkpointer(tmp_path).load(state, verify=verify, max_fallbacks=max_fallbacks)
    assert version_in(state, report.values) == 1
    assert (report.step, report.fell_back) == (1, ())
    again = blank()
    assert version_in(again, Checkpointer(tmp_path).load(again).values) == 1 + times
    # Kept for a reader who has gone: a repair, or the next replacement, takes it away.
    kept = [p.name for p in tmp_path.iterdir() if parse_replaced_dir(p.name) is not None]
    assert len(kept) == 1
    assert [(f.name, f.fate) for f in repair(PosixStorage(tmp_path))] == [(kept[0], "removed")]
    assert not (tmp_path / kept[0]).exists()


class _ReadOnly(PosixStorage):
    """A reader that can put down no mark."""

    def make_dir(self, path: str, *, durable: bool = True) -> None:
        raise StorageError("read-only file system")


@VERIFY
@pytest.mark.parametrize("max_fallbacks", [None, 0])
def test_without_a_mark_the_load_begins_again_with_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool, max_fallbacks: int | None
) -> None:
    save(tmp_path, 9, step=0)
    save(tmp_path, 1)
    state = blank()
    with amid_load(monkeypatch, lambda: save(tmp_path, 2)):
        reader = Checkpointer(_ReadOnly(tmp_path), settle_s=0.0)
        report = reader.load(state, verify=verify, max_fallbacks=max_fallbacks)
    assert version_in(state, report.values) == 2
    assert (report.step, report.fell_back) == (1, ())


def _load_in_two(context: RankContext, root: str, *, has_lease: bool) -> set[float]:
    """Load some of a step, let it be saved again, and load the rest."""
    with ProcessGroups.create(Layout(dp=context.num_ranks), timeout_s=60) as groups:
        return _versions_found(groups, root, has_lease=has_lease)


def _versions_found(groups: ProcessGroups, root: str, *, has_lease: bool) -> set[float]:
    storage = PosixStorage(root) if has_lease else _ReadOnly(root)
    reader = Checkpointer(storage, groups=groups, settle_s=0.0)
    tensors = {name: Replicated(torch.full(shape, -1.0)) for name, shape in SHAPES.items()}
    first, *others = SHAPES
    with reader.one_version():
        some = {name: tensors[name] for name in others}
        reader.load({"t": {**some, "n": 0}}, ignore_unexpected=True)
        if groups.control.is_coordinator:
            for step in (1, 2):
                saver = Checkpointer(root, groups=ProcessGroups.single("saver"), settle_s=0.0)
                saver.save(step, state_of(1 + step), overwrite=True)
        groups.control.all_gather(b"", phase="saved")
        with pytest.raises(ConfigError, match=r"a load of step 2, where .* the one of step 1"):
            reader.load({"v": {}}, step=2)
        with pytest.raises(ConfigError, match="of another one are in progress"):
            reader.one_version().__enter__()
        rest = {"v": {}, "t": {first: tensors[first]}}
        report = reader.load(rest, ignore_unexpected=True)
        values: Any = report.values
        assert (report.step, report.num_opens) == (1, 0)  # its data file is open
        after: Any = reader.load({"v": {}}, step=1).values
        assert after == {"v": {"version": 1}}
    after = reader.load({"v": {}}).values
    assert after == {"v": {"version": 3}}
    found = {each for name in SHAPES for each in tensors[name].local.unique().tolist()}
    return {values["v"]["version"], *found}


@pytest.mark.parametrize("has_lease", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_loads_of_one_version_are_of_the_first(
    tmp_path: Path, num_ranks: int, has_lease: bool
) -> None:
    """O9. A state that is loaded piece by piece; afterwards the newest is loaded again."""
    save(tmp_path, 1)
    load = partial(_load_in_two, has_lease=has_lease)
    assert run_ranks(num_ranks, load, str(tmp_path)).results == [{1.0}] * num_ranks


@pytest.mark.parametrize("max_fallbacks", [None, 0])
def test_a_step_removed_amid_the_load_gives_way_to_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_fallbacks: int | None
) -> None:
    save(tmp_path, 1)

    def supersede() -> None:
        save(tmp_path, 2, step=2)
        storage = PosixStorage(tmp_path)
        assert apply_retention(storage, plan_retention(storage, KeepLast(1))).removed == [1]

    state = blank()
    with amid_load(monkeypatch, supersede):
        reader = Checkpointer(_ReadOnly(tmp_path), settle_s=0.0)
        report = reader.load(state, max_fallbacks=max_fallbacks)
    assert version_in(state, report.values) == 2
    assert (report.step, report.fell_back) == (2, ())


def test_real_damage_is_still_damage(tmp_path: Path) -> None:
    save(tmp_path, 9, step=0)
    save(tmp_path, 1)
    data = next((tmp_path / "iter_0000001" / "data").iterdir())
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptionError, match="damaged"):
        Checkpointer(tmp_path).load(blank())
    state = blank()
    report = Checkpointer(tmp_path).load(state, max_fallbacks=None)
    assert (version_in(state, report.values), report.step) == (9, 0)
    assert [each.step for each in report.fell_back] == [1]


def test_an_open_snapshot_and_a_verification_are_of_one_version(tmp_path: Path) -> None:
    save(tmp_path, 1)
    storage = PosixStorage(tmp_path)
    out = bytearray(7 * 4)
    with (
        read_lease(storage, "iter_0000001"),
        Snapshot.open(storage, "iter_0000001") as snapshot,
    ):
        save(tmp_path, 2)
        snapshot.read_box("t.b", Box((0,), (7,)), memoryview(out))
        assert torch.frombuffer(out, dtype=torch.float32).unique().tolist() == [1.0]
    with Snapshot.open(storage, "iter_0000001") as snapshot:
        save(tmp_path, 3)
        with pytest.raises(StorageError, match="replaced or removed while it was read"):
            snapshot.read_box("t.b", Box((0,), (7,)), memoryview(out))
    first = True

    def overwrite(done: int, total: int) -> None:
        nonlocal first
        if first:
            first = False
            save(tmp_path, 4)

    assert verify_snapshot(storage, "iter_0000001", on_progress=overwrite) == []


def test_retention_never_removes_a_version_saved_since_it_judged(tmp_path: Path) -> None:
    """The step loses its name first; what is then there is judged again."""
    for step in (1, 2):
        save(tmp_path, step, step=step)

    def at_the_last_moment(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation == "remove" and path == "iter_0000001":
            save(tmp_path, 7)

    storage = PosixStorage(tmp_path, observer=at_the_last_moment)
    result = apply_retention(storage, plan_retention(storage, KeepLast(1)))
    assert result.removed == []
    assert "saved again" in result.spared[1]
    state = blank()
    report = Checkpointer(tmp_path).load(state, step=1)
    assert version_in(state, report.values) == 7


def _write_on(context: RankContext, root: str, stop: str) -> int:
    version = 1
    while not Path(stop).exists():
        version += 1
        save(Path(root), version)
    return version


@contextmanager
def overwriting(root: Path) -> Iterator[None]:
    """Another process saves step 1 again and again."""
    stop = root.parent / "stop"
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(run_ranks, 1, _write_on, str(root), str(stop), init=False)
        try:
            yield
        finally:
            stop.touch()
            assert writer.result().results[0] > 1


def _read_on(context: RankContext, root: str, seconds: float) -> list[int]:
    found: list[int] = []
    layout = Layout(dp=context.num_ranks)
    with ProcessGroups.create(layout, timeout_s=60) as groups:
        began = time.monotonic()
        while True:
            # All ranks go on as long as the first one does: until it has seen some versions.
            spent = time.monotonic() - began
            go_on = b"%d" % (spent < seconds or (len(set(found)) < 4 and spent < 60))
            if groups.control.all_gather(go_on, phase="on")[0] == b"0":
                return found
            number = len(found)
            state = blank()
            tensors = state["t"]
            assert isinstance(tensors, dict)
            for name in SHAPES:
                if SHAPES[name]:
                    tensors[name] = Replicated(tensors[name])
            report = Checkpointer(root, groups=groups, settle_s=0.0).load(
                state,
                verify=number % 2 == 0,
                exchange=number % 3 != 0,
                max_fallbacks=None if number % 4 < 2 else 0,
            )
            assert (report.step, report.fell_back) == (1, ())
            found.append(version_in(state, report.values))


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_loads_while_a_step_is_saved_over_and_over(tmp_path: Path, num_ranks: int) -> None:
    root = tmp_path / "run"
    save(root, 9, step=0)
    save(root, 1)
    problems: list[str] = []

    def verify_on(stop: threading.Event) -> None:
        storage = PosixStorage(root)
        while not stop.is_set():
            problems.extend(map(str, verify_snapshot(storage, "iter_0000001")))

    stop = threading.Event()
    offline = threading.Thread(target=verify_on, args=(stop,))
    with overwriting(root):
        offline.start()
        try:
            results = run_ranks(num_ranks, _read_on, str(root), 1.0).results
        finally:
            stop.set()
            offline.join()
    assert problems == []
    assert all(each == results[0] for each in results)
    assert results[0] == sorted(results[0])
    assert len(set(results[0])) > 1, "nothing was overwritten between the loads"
    repair(PosixStorage(root), alive_s=0.0)
    assert [p.name for p in root.iterdir() if parse_replaced_dir(p.name) is not None] == []

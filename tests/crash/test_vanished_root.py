"""A root whose volume goes during a run is named, and nothing is made in its place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from holdfast import Checkpointer, HoldfastError, KeepLast, Layout, PosixStorage, ProcessGroups
from holdfast.checkpoint.save.executor import SaveExecutor
from holdfast.cli.main import main
from holdfast.errors import StorageError
from holdfast.format.names import ROOT_ID
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import set_tag
from holdfast.writer.leftovers import repair
from tests.harness import RankContext, run_ranks


def state(value: float) -> dict[str, object]:
    return {"t": {"x": torch.full((64,), float(value))}}


def said(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()!r}"
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"


def alone(context: RankContext, action: Callable[[], object]) -> None:
    """Rank 0 acts while the other waits."""
    dist.barrier()
    if context.rank == 0:
        action()
    dist.barrier()


def unmount(root: Path, *, leave: bool) -> None:
    """Another directory, an empty one, appears under the same path; or none."""
    root.rename(root.with_name("away"))
    if leave:
        root.mkdir()


def mount(root: Path) -> None:
    if root.exists():
        root.rmdir()  # fails if anything was written there
    root.with_name("away").rename(root)


def volume_goes(context: RankContext, place: str) -> Mapping[str, list[str]]:
    heard: dict[str, list[str]] = {}
    root = Path(place) / "root"
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        new = [checkpointer.save(step, state(step)).new_root for step in (1, 2)]
        checkpointer.save_async(3, state(3)).result()
        heard["new"] = [str(new)]
        for leave in (True, False):
            alone(context, lambda leave=leave: unmount(root, leave=leave))  # type: ignore[misc]
            heard["replaced" if leave else "vanished"] = [
                said(lambda: checkpointer.save(4, state(4))),
                said(lambda: checkpointer.save_async(4, state(4)).result()),
                said(lambda: checkpointer.load(state(0))),
                said(checkpointer.latest),
            ]
            alone(context, lambda: mount(root))
        # The writer has the job when the volume goes.
        pid = checkpointer.stats.writer_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        pending = checkpointer.save_async(4, state(4))
        alone(context, lambda: unmount(root, leave=True))
        os.kill(pid, signal.SIGCONT)
        heard["writer"] = [said(pending.result)]
        alone(context, lambda: mount(root))
        heard["back"] = [said(lambda: checkpointer.save(5, state(5)).step)]
        checkpointer.close()
    return heard


def test_a_volume_that_goes_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """R6: save, asynchronous save, load and `latest`; and all continues when it is back."""
    for heard in run_ranks(2, volume_goes, str(tmp_path), timeout_s=90).results:
        assert heard["new"] == ["[True, False]"]
        for words in heard["replaced"]:
            assert words.startswith("StorageError"), words
            assert "is another directory than before" in words
        for words in heard["vanished"]:
            assert words.startswith("StorageError"), words
            assert "has vanished" in words
        assert "is another directory than before" in heard["writer"][0]
        assert heard["back"] == ["returned 5"]
    assert {f"iter_000000{n}" for n in (1, 2, 3)} <= {p.name for p in (tmp_path / "root").iterdir()}


def goes_on_some(
    context: RankContext, place: str, num_ranks: int, bad: Sequence[int], is_staged: bool
) -> tuple[str, list[int] | None, int]:
    """What the save says that writers have when the volume goes on some ranks, one after another.

    Without `is_staged` those ranks fail before their writers have the job.
    """
    view, volume = Path(place) / f"view{context.rank}", Path(place) / "volume"
    alone(context, volume.mkdir)
    view.symlink_to(volume)
    words: list[Any] = []

    def go(*_: object, **__: object) -> None:
        view.unlink()
        view.mkdir()
        if not is_staged:
            raise StorageError("nothing is staged")

    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessGroups.create(Layout(dp=num_ranks)) as groups,
    ):
        patch.setattr("holdfast.checkpoint.save.pending._FIRST_LOOK_S", 0.05)
        with Checkpointer(view, groups=groups) as checkpointer:
            checkpointer.save_async(1, state(1)).result()
            pid = checkpointer.stats.writer_pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.MonkeyPatch.context() as staging:
                if context.rank in bad and not is_staged:
                    staging.setattr(SaveExecutor, "submit", go)
                pending = checkpointer.save_async(2, state(2))
            if context.rank in bad and is_staged:
                go()
            for rank in (*bad, None):
                if context.rank == rank or (rank is None and context.rank not in bad):
                    os.kill(pid, signal.SIGCONT)
                    with pytest.raises(StorageError) as caught:
                        pending.result()
                    words = [str(caught.value), caught.value.details.get("failed_ranks")]
                dist.barrier()
            if context.rank in bad:
                view.rmdir()  # nothing was written there
                view.symlink_to(volume)
            dist.barrier()
            step = checkpointer.save_async(3, state(3)).result().step
    return words[0], words[1], step


@pytest.mark.parametrize(
    ("num_ranks", "bad", "is_staged"),
    [
        (2, (1,), True),
        pytest.param(2, (0,), True, marks=pytest.mark.slow),
        # Those of one host: of the other ranks only the committing one hears what rank 1 leaves.
        pytest.param(3, (0, 1), True, marks=pytest.mark.slow),
        pytest.param(2, (1,), False, marks=pytest.mark.slow),
    ],
)
def test_a_volume_that_goes_on_some_ranks_after_the_call_ends_the_wait_of_the_others(
    num_ranks: int, bad: tuple[int, ...], is_staged: bool, tmp_path: Path
) -> None:
    """R6: they cannot say so on storage; before, the others waited for the save's deadline."""
    results = run_ranks(
        num_ranks, goes_on_some, str(tmp_path), num_ranks, bad, is_staged, timeout_s=90
    ).results
    for rank, (words, failed, step) in enumerate(results):
        cause = f"view{bad[0]} is another directory than before"
        if rank in bad:
            cause = cause.replace(str(bad[0]), str(rank))
        assert (cause if is_staged else "nothing is staged") in words
        assert rank in bad or (f"rank {bad[0]}: " in words and failed == [bad[0]])
        assert step == 3


def two_roots(context: RankContext, place: str) -> list[str]:
    """Each rank sees another volume under the path: it is not mounted on one of them, or absent."""
    heard = []
    with pytest.MonkeyPatch.context() as patch, ProcessGroups.create(Layout(dp=2)) as groups:
        patch.setattr("holdfast.format.root_identity._SETTLE_S", 0.2)
        for names in (("new", "empty"), ("new", "absent"), ("empty", "used")):
            checkpointer = Checkpointer(Path(place) / names[context.rank], groups=groups)
            for save in (checkpointer.save, lambda *a, c=checkpointer: c.save_async(*a).result()):
                heard.append(said(lambda save=save: save(1, state(1))))  # type: ignore[misc]
            checkpointer.close()
    return heard


def test_a_rank_with_another_root_is_named(tmp_path: Path) -> None:
    """R6: at the first save already, long before the deadline; nothing is made in its place."""
    (tmp_path / "empty").mkdir()
    with Checkpointer(tmp_path / "used") as checkpointer:
        checkpointer.save(1, state(1))
    for heard in run_ranks(2, two_roots, str(tmp_path)).results:
        for name, said_of_it in (("empty", heard[:2]), ("absent", heard[2:4])):
            for words in said_of_it:
                assert words.startswith("StorageError"), words
                assert "rank 1" in words
                assert f"{tmp_path}/{name} is not the root of this run: it has no " in words
        for words in heard[4:]:
            assert words.startswith("StorageError"), words
            assert f"different roots, by the id in {ROOT_ID}: none on rank 0; " in words
    assert not (tmp_path / "absent").exists()
    assert list((tmp_path / "empty").iterdir()) == []


def test_commands_refuse_a_root_that_was_replaced(tmp_path: Path) -> None:
    """R6: `prune`, `repair` and `tag` act on the root that they have looked at, or not at all."""
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step))
    storage = PosixStorage(root)
    plan = plan_retention(storage, KeepLast(1))
    root.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", root)
    before = sorted(path.name for path in root.rglob("*"))
    assert "is another directory" in apply_retention(storage, plan).failed[1]
    for call in (lambda: repair(storage), lambda: set_tag(storage, "best", step=1)):
        assert "is another directory" in said(call)
    assert sorted(path.name for path in root.rglob("*")) == before
    # To a new process the copy is a root like any other.
    with Checkpointer(root) as checkpointer:
        assert checkpointer.load({"t": {"x": torch.zeros(64)}}).step == 2
        checkpointer.save(3, state(3))
    assert (root / ROOT_ID).read_bytes() == (tmp_path / "away" / ROOT_ID).read_bytes()


def test_a_root_without_an_id_is_adopted_and_a_load_writes_none(tmp_path: Path) -> None:
    """R6: what an earlier version has left is loaded, and gets its id at the first save."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
    (tmp_path / ROOT_ID).unlink()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(state(0))
        assert not (tmp_path / ROOT_ID).exists()
        assert not checkpointer.save(2, state(2)).new_root
        identity = (tmp_path / ROOT_ID).read_bytes()
        # The same directory, emptied and filled again by somebody: its inode says nothing.
        (tmp_path / ROOT_ID).write_bytes(b"0" * 32 + b"\n")
        assert "is not the root of this run" in said(lambda: checkpointer.save(3, state(3)))
        (tmp_path / ROOT_ID).unlink()
        assert "it has no .root-id" in said(lambda: checkpointer.save(3, state(3)))
        # An id that was never finished is not an id.
        (tmp_path / ROOT_ID).write_bytes(identity)
    (tmp_path / ROOT_ID).write_bytes(b"\0" * 33)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("holdfast.format.root_identity._SETTLE_S", 0.1)
            checkpointer.save(3, state(3))
    assert len((tmp_path / ROOT_ID).read_bytes().strip()) == 32


def save_where_an_id_was_begun(context: RankContext, place: str) -> bool:
    with pytest.MonkeyPatch.context() as patch, ProcessGroups.create(Layout(dp=2)) as groups:
        patch.setattr("holdfast.format.root_identity._SETTLE_S", 1.0)
        with Checkpointer(place, groups=groups) as checkpointer:
            return checkpointer.save(1, state(1)).new_root


def test_an_id_that_a_killed_run_has_begun_holds_up_no_rank(tmp_path: Path) -> None:
    """R6: the coordinator waits for its content, gives it up, and writes its own in time."""
    for content in (b"", b"\0" * 33):
        place = tmp_path / str(len(content))
        place.mkdir()
        (place / ROOT_ID).write_bytes(content)
        assert run_ranks(2, save_where_an_id_was_begun, str(place)).results == [True, True]
        assert len((place / ROOT_ID).read_bytes().strip()) == 32


_UNMOUNTED = """
import subprocess, sys
from pathlib import Path
from holdfast import PosixStorage, StorageError
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
storage = PosixStorage(root)
storage.make_dir("a")
storage.write_file("a/f", b"kept")
with storage.holding_dirs(), storage.pin("a") as pinned:
    storage.read("a/f")
    subprocess.run(["umount", "--lazy", root], check=True)
    assert pinned.read("a/f") == b"kept"
    calls = {
        "write": lambda: storage.write_file("g", b""), "make": lambda: storage.make_dir("a"),
        "root": lambda: storage.make_dir(""), "exists": lambda: storage.exists("a"),
        "is_dir": lambda: storage.is_dir(""), "list": lambda: storage.list(""),
        "size": lambda: storage.size("a/f"), "remove": lambda: storage.remove_tree("a"),
        "rename": lambda: storage.rename_dir("a", "b"), "sync": lambda: storage.sync_dir(""),
        "age": lambda: storage.age_s(""), "free": lambda: storage.free_nbytes(),
    }
    for name, call in calls.items():
        try:
            call()
        except StorageError as error:
            assert "is another directory than before (device" in str(error), error
        else:
            raise AssertionError(name)
assert not list(root.iterdir())
"""


def test_a_real_unmount_is_noticed_by_every_call(tmp_path: Path) -> None:
    """R6: a volume in memory, mounted and unmounted in a namespace of the test's own."""
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("namespaces are refused here")
    command = ["unshare", "-rm", sys.executable, "-c", _UNMOUNTED, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_a_root_that_never_existed_is_no_error(tmp_path: Path) -> None:
    """R6: an empty answer before the first save, which alone makes the root."""
    checkpointer = Checkpointer(tmp_path / "root")
    assert checkpointer.latest() is None
    with pytest.raises(StorageError, match="has no checkpoint"):
        checkpointer.load(state(0))
    with pytest.raises(StorageError, match="No such file"):
        checkpointer.storage.make_dir("below")
    assert not (tmp_path / "root").exists()
    assert checkpointer.save(1, state(1)).new_root
    checkpointer.close()


def test_what_is_not_a_root_is_named_and_not_saved_into(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """E14: a directory inside of a checkpoint is none, and a link to a step is not a step."""
    root, linked = tmp_path / "run", tmp_path / "linked"
    for where, step in ((root, 2), (linked, 1)):
        with Checkpointer(where) as checkpointer:
            checkpointer.save(step, state(1))
    for inside in ("iter_0000002", "iter_0000002/data", "iter_0000002/data/deeper"):
        with Checkpointer(root / inside) as checkpointer:
            for call in (
                lambda: checkpointer.save(3, state(3)),
                lambda: checkpointer.load(state(0)),
            ):
                assert f"{root}" in (words := said(call))
                assert "not the root of a run" in words
    assert main(["verify", str(root)]) == 0
    (linked / "iter_0000002").symlink_to(root / "iter_0000002")
    with Checkpointer(linked) as checkpointer:
        assert checkpointer.load(state(0)).step == 1
        assert "iter_0000002 is a link" in caplog.text
        shutil.rmtree(linked / "iter_0000001")
        assert "iter_0000002 is a link" in said(lambda: checkpointer.load(state(0)))
    assert main(["show", str(linked)]) == 2
    assert "iter_0000002 is a link" in capsys.readouterr().err
    assert main(["ls", str(linked)]) == 0
    assert "iter_0000002  has the name of a step, but is a link" in capsys.readouterr().out

"""Leases of readers and removers, and tags: also between processes, and when owners die."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.errors import ConfigError, StorageError
from holdfast.format import versions
from holdfast.format.versions import (
    DEFAULT_LEASE_S,
    LEASES_DIR,
    announce_removal,
    read_lease,
    readers_of,
)
from holdfast.policies.keep import KeepLast
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import list_tags, remove_tag, set_tag
from holdfast.storage import PosixStorage
from tests.harness import wait_until
from tests.retention.common import fill, put, steps_of

ONE = "iter_0000001"

READER = """
import sys, time
from holdfast.format.versions import read_lease
from holdfast.storage import PosixStorage
with read_lease(PosixStorage(sys.argv[1]), "iter_0000001", life_s=float(sys.argv[2])):
    print("reading", flush=True)
    time.sleep(60)
"""


REMOVER = """
import sys, time
from holdfast.format.versions import announce_removal
from holdfast.storage import PosixStorage
with announce_removal(PosixStorage(sys.argv[1]), "iter_0000001"):
    print("reading", flush=True)
    time.sleep(60)
"""


def refused(*args: object) -> None:
    raise PermissionError


def test_a_killed_remover_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this host: its lease of ten minutes is taken over. One of elsewhere, or alive, is kept."""
    storage = fill(tmp_path, [1, 2])
    remover = subprocess.Popen(
        [sys.executable, "-c", REMOVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert remover.stdout is not None
        assert remover.stdout.readline() == "reading\n"
        with (
            pytest.raises(StorageError, match=f"about to be removed by process {remover.pid}"),
            read_lease(storage, ONE, wait_s=0.1),
        ):
            pass
        seen = versions._origin
        with monkeypatch.context() as hiding:  # another user's, on a system that hides them
            hiding.setattr(versions, "_origin", lambda n: seen(n) if n == os.getpid() else "")
            hiding.setattr(os.path, "exists", lambda path: False)
            hiding.setattr(os, "kill", refused)
            with (
                pytest.raises(StorageError, match="about to be removed"),
                read_lease(storage, ONE, wait_s=0.1),
            ):
                pass
        remover.kill()
        (path,) = (tmp_path / LEASES_DIR).iterdir()
        content = path.read_bytes()
        remover.wait(60)
        path.write_bytes(content.replace(b'"origin":"', b'"origin":"elsewhere-'))
        with (
            pytest.raises(StorageError, match="about to be removed"),
            read_lease(storage, ONE, wait_s=0.1),
        ):
            pass
        path.write_bytes(content)
        with read_lease(storage, ONE, wait_s=0.1) as lease:
            assert lease.problem is None
        assert storage.list(LEASES_DIR) == []
    finally:
        remover.kill()
        remover.wait(60)


def start_reader(root: Path, *, life_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(root), str(life_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    return process


def test_a_reader_in_another_process_protects_until_it_dies(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    reader = start_reader(tmp_path, life_s=16.0)
    try:
        (mark,) = (tmp_path / LEASES_DIR).iterdir()
        first = mark.read_bytes()
        wait_until(lambda: mark.read_bytes() != first)  # it is renewed, after an eighth of its life
        result = apply_retention(storage, plan_retention(storage, KeepLast(1)))
        assert str(reader.pid) in result.spared[1]
        reader.send_signal(signal.SIGKILL)
        reader.wait(60)
        assert readers_of(storage, ONE)  # nobody can tell yet
        by_owner = json.loads(mark.read_bytes())
        by_owner["origin"] = "elsewhere"  # on another host, whose time since boot says nothing here
        by_owner["renewed"] -= 16.0
        by_owner["since_boot"] -= 16.0
        mark.write_bytes(json.dumps(by_owner).encode())
        assert readers_of(storage, ONE)  # by the clock of the storage
        os.utime(mark, (by_owner["renewed"],) * 2)
        assert not readers_of(storage, ONE)
        assert storage.list(LEASES_DIR) == []
        assert apply_retention(storage, plan_retention(storage, KeepLast(1))).removed == [1]
    finally:
        reader.kill()
        reader.wait(60)


def test_a_lease_is_renewed_after_an_error_of_any_class(tmp_path: Path) -> None:
    """E14, P14: a storage of a user's own may raise others than it should; so may a heartbeat."""
    asked: list[str] = []

    class Odd(PosixStorage):
        def replace_file(self, path: str, data: bytes, *, durable: bool = True) -> None:
            asked.append(path)
            if len(asked) == 3:  # the first lease of all makes the directory, and asks twice
                raise TimeoutError("no answer")
            super().replace_file(path, data, durable=durable)

    fill(tmp_path, [1])
    with read_lease(Odd(tmp_path), ONE, life_s=0.4):
        wait_until(lambda: len(asked) > 4)


def test_a_lease_that_a_power_loss_has_emptied_expires(tmp_path: Path) -> None:
    """E14: leases are not synced; an owner that lives writes its own again within minutes."""
    storage = fill(tmp_path, [1, 2])
    mark = tmp_path / LEASES_DIR / f"{ONE}.read-{'0' * 16}"
    mark.parent.mkdir(exist_ok=True)
    mark.write_bytes(b"")
    assert "cannot be decoded" in readers_of(storage, ONE)[0]
    then = time.time() - DEFAULT_LEASE_S - 60
    os.utime(mark, (then, then))
    assert not readers_of(storage, ONE)
    assert not mark.exists()


@pytest.mark.parametrize("hours", [5, -5])
def test_a_reader_on_this_host_protects_whatever_the_clock_is_set_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """E14: its files look as old as if the clock had jumped; its time since boot tells."""
    storage = fill(tmp_path, [1, 2])
    with read_lease(storage, ONE):
        (mark,) = (tmp_path / LEASES_DIR).iterdir()
        jumped = time.time() + hours * 3600
        monkeypatch.setattr(time, "time", lambda: jumped)
        then = mark.stat().st_mtime - hours * 3600
        os.utime(mark, (then, then))
        result = apply_retention(storage, plan_retention(storage, KeepLast(1)))
        assert str(os.getpid()) in result.spared[1]
        # And a lease that is not renewed expires, also with a time in the future.
        content = json.loads(mark.read_bytes())
        content["since_boot"] -= content["life_s"]
        mark.write_bytes(json.dumps(content).encode())
        os.utime(mark, (then, then))
        assert not readers_of(storage, ONE)


def test_many_may_read_and_a_mark_is_of_one_checkpoint(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    with read_lease(storage, ONE):
        with read_lease(storage, ONE):
            assert len(readers_of(storage, ONE)) == 2
            assert readers_of(storage, "iter_0000002") == []
            assert readers_of(storage, "iter_00000010") == []
        assert len(readers_of(storage, ONE)) == 1
        assert f"process {os.getpid()} on " in readers_of(storage, ONE)[0]
    assert readers_of(storage, ONE) == []


def test_a_reader_waits_for_a_remover_that_gives_up(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1])
    entered = threading.Event()
    with announce_removal(storage, ONE) as readers:
        assert readers == []

        def read() -> None:
            with read_lease(storage, ONE):
                entered.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert not entered.wait(0.5)
        # The reader's mark is there already: whoever comes to remove now gives up.
        with announce_removal(storage, ONE) as others:
            assert len(others) == 1
    assert entered.wait(60)
    reader.join()


def test_a_reader_is_told_that_its_checkpoint_has_gone(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1])
    with announce_removal(storage, ONE):
        storage.remove_tree(ONE)
        said = r"just removed by process \d+.*another step"
        with pytest.raises(StorageError, match=said), read_lease(storage, ONE):
            pass
    assert storage.list(LEASES_DIR) == []


def test_a_reader_does_not_wait_for_ever(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1])
    said = "about to be removed"
    with (
        announce_removal(storage, ONE),
        pytest.raises(StorageError, match=said),
        read_lease(storage, ONE, wait_s=0.2),
    ):
        pass
    with announce_removal(storage, ONE, life_s=0.0), read_lease(storage, ONE, wait_s=0.0):
        pass  # an expired mark counts for nothing


def test_readers_and_removers_at_once_never_collide(tmp_path: Path) -> None:
    """Whoever has got past its own look has not been overlooked by the other side."""
    storage = fill(tmp_path, [1])
    inside = {"read": 0, "remove": 0}
    lock = threading.Lock()
    collisions: list[dict[str, int]] = []
    counts = {"read": 0, "remove": 0}

    def enter(kind: str, by: int) -> None:
        with lock:
            inside[kind] += by
            counts[kind] += by > 0
            if inside["read"] and inside["remove"]:
                collisions.append(dict(inside))

    def read() -> None:
        while min(counts.values()) < 40:
            with read_lease(storage, ONE):
                enter("read", 1)
                time.sleep(0.002)
                enter("read", -1)
            time.sleep(0.01)

    def remove() -> None:
        while min(counts.values()) < 40:
            with announce_removal(storage, ONE) as readers:
                if not readers:
                    enter("remove", 1)
                    time.sleep(0.002)
                    enter("remove", -1)
            time.sleep(0.01)

    threads = [threading.Thread(target=target) for target in (read, remove)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collisions == []


@pytest.mark.parametrize("words", [("copy",), ("convert", "--to", "holdfast")])
def test_a_command_takes_the_newer_step_if_retention_removes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Between the look for the newest step and the lease on it a run goes on, twice."""
    storage = fill(tmp_path / "run", [1])
    later = iter([2, 3])
    lease = versions.read_lease

    def lease_late(*args: Any, **kwargs: Any) -> Any:
        for step in later:
            put(storage, step)
            apply_retention(storage, plan_retention(storage, KeepLast(1)))
            break
        return lease(*args, **kwargs)

    monkeypatch.setattr(versions, "read_lease", lease_late)
    verb, *rest = words
    assert main([verb, str(tmp_path / "run"), str(tmp_path / "made"), *rest]) == 0
    assert steps_of(PosixStorage(tmp_path / "made")) == [3]


def test_a_copy_names_the_tags_that_stay_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The root has them, so that a copy is not protected as its source is."""
    storage = fill(tmp_path / "run", [1, 2])
    for name, step in (("best", 1), ("last", 2)):
        set_tag(storage, name, step=step)
    words = ["copy", str(tmp_path / "run"), str(tmp_path / "made"), "--step", "1"]
    for _ in range(2):  # also of what is there already
        assert main(words) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "left out: tags of the step, which its root has: best" in said
        assert "last" not in said
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"][0].endswith(": best")


def test_a_place_that_cannot_be_written_to_is_read_without_a_mark(tmp_path: Path) -> None:
    def refuse(operation: str, path: str, start: int, nbytes: int) -> None:
        if operation in ("replace", "make_dir"):
            raise StorageError("read-only")

    fill(tmp_path, [1])
    storage = PosixStorage(tmp_path, observer=refuse)
    with read_lease(storage, ONE) as reading:
        assert reading.problem == "read-only"
    for directory in ("", "iter_1", f"x/{ONE}", ".."):
        with read_lease(storage, directory) as reading:
            assert "not the name of a step" in str(reading.problem)


def test_a_lease_is_one_write_where_the_directory_of_leases_is_there(tmp_path: Path) -> None:
    """Without that directory it is made; if that is removed meanwhile, a renewal makes it again."""
    fill(tmp_path, [1])
    operations: list[str] = []
    storage = PosixStorage(tmp_path, observer=lambda operation, *_: operations.append(operation))
    for writes in (["replace", "make_dir", "replace"], ["replace"]):
        with read_lease(storage, ONE) as lease:
            assert [each for each in operations if each in ("replace", "make_dir")] == writes
            assert lease.problem is None
            assert readers_of(storage, ONE)
        operations.clear()
    with read_lease(storage, ONE) as lease:
        shutil.rmtree(tmp_path / LEASES_DIR)
        lease.set_version("abc")
        assert readers_of(storage, ONE, save_id="abc")
        assert not readers_of(storage, ONE, save_id="another")


def test_a_mark_that_cannot_be_understood_protects(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    storage.make_dir(LEASES_DIR)
    name = f"{LEASES_DIR}/{ONE}.read-{'0' * 16}"
    storage.write_file(name, b"\xff")
    storage.write_file(f"{LEASES_DIR}/README", b"")
    result = apply_retention(storage, plan_retention(storage, KeepLast(1)))
    assert name in result.spared[1]


# Tags


def test_tags_are_set_moved_listed_and_removed(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    assert list_tags(storage) == {}
    set_tag(storage, "best", step=1)
    set_tag(storage, "v1.0", step=1)
    set_tag(storage, "best", step=2)
    assert list_tags(storage) == {"best": 2, "v1.0": 1}
    assert (tmp_path / "tags/best").read_bytes() == b"2\n"
    remove_tag(storage, "best")
    assert list_tags(storage) == {"v1.0": 1}
    assert steps_of(storage) == [1, 2]
    (tmp_path / "tags/v1.0").write_bytes(b"")
    set_tag(storage, "v1.0", step=2)  # what the message advises for a tag that is damaged
    assert list_tags(storage) == {"v1.0": 2}


def test_a_tag_that_is_removed_while_they_are_listed_is_none(tmp_path: Path) -> None:
    """Else a prune, a listing or a job's retention would fail by what it does not need."""

    class Late(PosixStorage):
        def list(self, path: str) -> builtins.list[str]:
            names = super().list(path)
            if path == "tags" and "gone" in names:
                remove_tag(fill(tmp_path, []), "gone")
            return names

    storage = fill(tmp_path, [1, 2])
    set_tag(storage, "dear", step=1)
    set_tag(storage, "gone", step=2)
    assert list_tags(Late(tmp_path)) == {"dear": 1}


def test_tags_that_cannot_be(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1])
    for name in ("", ".", "..", "a/b", "a b", "-x", "x" * 101, "ä", ".tmp-x"):
        with pytest.raises(ConfigError, match="must be 1 to 100"):
            set_tag(storage, name, step=1)
        with pytest.raises(ConfigError, match="must be 1 to 100"):
            remove_tag(storage, name)
    with pytest.raises(ConfigError, match="no committed step 7; it has 1"):
        set_tag(storage, "x", step=7)
    with pytest.raises(ConfigError, match="no tag 'x'; it has none"):
        remove_tag(storage, "x")
    assert list_tags(storage) == {}


def test_a_tag_is_set_before_or_after_a_removal_never_amid_it(tmp_path: Path) -> None:
    storage = fill(tmp_path, [1, 2])
    done = threading.Event()

    def tag() -> None:
        set_tag(storage, "dear", step=1)
        done.set()

    with announce_removal(storage, ONE):
        tagger = threading.Thread(target=tag)
        tagger.start()
        assert not done.wait(0.3)
        assert list_tags(storage) == {}
    assert done.wait(60)
    tagger.join()
    assert list_tags(storage) == {"dear": 1}
    with announce_removal(storage, ONE):
        storage.remove_tree(ONE)
        with pytest.raises(StorageError, match="just removed"):
            set_tag(storage, "late", step=1)
    assert list_tags(storage) == {"dear": 1}

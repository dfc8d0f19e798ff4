"""The POSIX store: the contract, links, broken disks, and what error messages say."""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from holdfast.arrays.memory import memory_at
from holdfast.errors import StorageError
from holdfast.storage import PosixStorage, Storage, posix
from holdfast.storage.reading import read_views
from tests.storage.contract import StorageContract


class TestPosix(StorageContract):
    """On this machine's file system, with every system call it has."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return PosixStorage(tmp_path)


class TestPosixWithoutNewSystemCalls(StorageContract):
    """As on network storage: no renameat2, no fallocate."""

    @pytest.fixture
    def storage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
        monkeypatch.setattr(posix, "rename_noreplace", lambda *args, **kwargs: False)
        monkeypatch.setattr(posix, "rename_exchange", lambda *args, **kwargs: False)
        monkeypatch.setattr(posix, "allocate", lambda fd, nbytes: False)
        return PosixStorage(tmp_path)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the store, with something worth protecting."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "secret").write_bytes(b"secret")
    return place


@pytest.fixture
def store(tmp_path: Path) -> PosixStorage:
    (tmp_path / "root").mkdir()
    return PosixStorage(tmp_path / "root")


def test_links_below_the_root_are_never_followed(store: PosixStorage, outside: Path) -> None:
    (store.root / "file").symlink_to(outside / "secret")
    (store.root / "dir").symlink_to(outside)
    assert store.exists("file")
    assert not store.is_dir("dir")
    for call in (
        lambda: store.read("file"),
        lambda: store.open("file"),
        lambda: store.size("file"),
        lambda: store.read("dir/secret"),
        lambda: store.open("dir/secret"),
        lambda: store.list("dir"),
        lambda: store.write_file("dir/new", b""),
        lambda: store.create("dir/new", nbytes=1).__enter__(),
        lambda: store.create("file", nbytes=1).__enter__(),
        lambda: store.make_dir("dir/new"),
        lambda: store.make_dir("dir"),
        lambda: store.rename_dir("dir/secret", "here"),
        lambda: store.remove_tree("dir/secret"),
        lambda: store.sync_dir("dir"),
    ):
        with pytest.raises(StorageError):
            call()
    assert sorted(os.listdir(outside)) == ["secret"]
    with pytest.raises(StorageError, match="links are not followed"):
        store.read("file")
    with pytest.raises(StorageError, match="links are not followed"):
        store.list("dir")


def test_removing_a_link_leaves_what_it_points_to(store: PosixStorage, outside: Path) -> None:
    (store.root / "link").symlink_to(outside)
    store.make_dir("tree")
    (store.root / "tree" / "inner").symlink_to(outside)
    store.remove_tree("link")
    store.remove_tree("tree")
    assert store.list("") == []
    assert (outside / "secret").read_bytes() == b"secret"


def test_writing_replaces_a_link_instead_of_its_target(store: PosixStorage, outside: Path) -> None:
    (store.root / "latest").symlink_to(outside / "secret")
    store.replace_file("latest", b"7")
    assert (outside / "secret").read_bytes() == b"secret"
    assert store.read("latest") == b"7"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    PosixStorage(tmp_path / "link").write_file("f", b"1")
    assert (tmp_path / "real" / "f").read_bytes() == b"1"


def test_a_missing_root_is_made_by_make_dir_only(tmp_path: Path) -> None:
    store = PosixStorage(tmp_path / "a" / "b")
    assert store.free_nbytes() > 0
    assert not store.is_dir("")
    with pytest.raises(StorageError, match="No such file"):
        store.list("")
    store.make_dir("")
    assert store.list("") == []


def test_pipes_and_devices_are_not_opened(store: PosixStorage) -> None:
    """A pipe laid where a data file should be must not hang the reader."""
    os.mkfifo(store.root / "pipe")
    for call in (store.open, store.read, store.size):
        with pytest.raises(StorageError, match="not a regular file"):
            call("pipe")


def test_the_observer_sees_every_operation(tmp_path: Path) -> None:
    seen: list[tuple[str, str, int, int]] = []
    store = PosixStorage(tmp_path, observer=lambda *what: seen.append(what))
    store.write_file("f", b"12345")
    source = store.open("f")
    source.readinto(memoryview(bytearray(2)), start=1)
    source.close()
    assert ("write", "f", 0, 5) in seen
    assert ("open", "f", 0, 0) in seen
    assert ("read", "f", 1, 2) in seen


def test_short_reads_and_writes_are_continued(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(posix.os, "pwrite", lambda fd, b, at: real_write(fd, b[:3], at))
    monkeypatch.setattr(posix.os, "preadv", lambda fd, bs, at: real_read(fd, [bs[0][:2]], at))
    payload = bytes(range(100))
    store.write_file("f", payload)
    with store.create("g", nbytes=100) as sink:
        sink.write_at(0, memoryview(payload))
    assert store.read("f") == store.read("g") == payload


def test_views_of_memory_are_filled_in_order_however_little_a_call_reads(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More views than one call takes, some empty; then calls that end within one."""
    draw = np.random.default_rng(11)
    nbytes = draw.integers(0, 9, 3000)
    payload = draw.bytes(int(nbytes.sum()) + 7)
    store.write_file("f", payload)
    source = store.open("f")
    real = os.preadv

    def few(fd: int, views: Sequence[memoryview], start: int) -> int:
        some = next(view for view in views if len(view))
        return real(fd, [some[:5]], start)

    for call in (real, few):
        monkeypatch.setattr(posix.os, "preadv", call)
        memory = np.zeros(2 * len(payload), dtype=np.uint8)
        place = np.cumsum(nbytes) - nbytes + np.arange(len(nbytes))  # a gap after each
        views = [memory.data[at : at + n] for at, n in zip(place, nbytes, strict=True)]
        read_views(source, views, start=7)
        assert b"".join(views) == payload[7:]
        assert np.count_nonzero(memory) == np.count_nonzero(np.frombuffer(payload[7:], np.uint8))
    with pytest.raises(StorageError, match="it is truncated"):
        read_views(source, views, start=8)
    monkeypatch.setattr(posix.os, "preadv", real)
    with pytest.raises(StorageError, match="Bad address"):
        read_views(source, [memory_at(8, 4)], start=0)
    source.close()


def test_a_write_that_makes_no_progress_is_an_error(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix.os, "pwrite", lambda fd, b, at: 0)
    with pytest.raises(StorageError, match="wrote nothing"):
        store.write_file("f", b"123")
    assert store.list("") == []


@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_failing_disk_is_named_with_what_to_do(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write() -> None:
        with store.create("f", nbytes=3) as sink:
            sink.write_at(0, memoryview(b"123"))
            sink.sync()

    monkeypatch.setattr(posix.os, call, fail)
    with pytest.raises(StorageError, match=r"/f: No space left.* [kMGT]?B and .*free.*make room"):
        write()


def test_a_small_file_that_cannot_be_written_leaves_the_old_one_and_no_litter(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace_file("latest", b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"latest: Input/output error \(the device"):
        store.replace_file("latest", b"new")
    assert store.read("latest") == b"old"
    assert store.list("") == ["latest"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EINVAL])
def test_a_name_is_not_durable_where_the_file_system_gave_up(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """P13: ext4, mounted read-only by an error, answers EROFS; EINVAL says that none is synced."""
    store.make_dir("a")

    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError) if code == errno.EROFS else nullcontext():
        store.rename_dir("a", "b")


def test_a_file_that_another_process_cuts_is_noticed_at_sync(store: PosixStorage) -> None:
    with store.create("f", nbytes=10) as sink:
        os.truncate(store.root / "f", 4)
        with pytest.raises(StorageError, match="has 4 bytes after writing, not 10"):
            sink.sync()


def test_a_real_size_limit_shows_before_anything_is_written(store: PosixStorage) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match=r"reserve 8192 bytes.*/f.*File too large.*ulimit"):
            store.create("f", nbytes=8192).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.list("") == []


def test_a_real_full_file_system_shows_before_anything_is_written() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or os.statvfs(shm).f_blocks == 0 or not os.access(shm, os.W_OK):
        pytest.skip("no memory file system here")
    total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    root = shm / f"holdfast-test-{os.getpid()}"
    store = PosixStorage(root)
    store.make_dir("")
    try:
        with pytest.raises(StorageError, match="No space left"):
            store.create("f", nbytes=total + (1 << 20)).__enter__()
        assert store.list("") == []
    finally:
        root.rmdir()


def test_permission_denied_says_who_and_whose(tmp_path: Path) -> None:
    """In a process that is not the super-user, whom permissions do not bind."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    program = (
        "import os, sys\n"
        "from holdfast.storage import PosixStorage\n"
        "from holdfast.errors import StorageError\n"
        "store = PosixStorage(sys.argv[1])\n"
        "if os.geteuid() == 0:\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "else:\n"
        "    os.chmod(sys.argv[1], 0)\n"
        "try:\n"
        "    store.write_file('f', b'1')\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(locked)], capture_output=True, text=True, timeout=240
    )
    locked.chmod(0o700)
    # A directory is removed by those who may write to the one that it is in.
    refusal = PermissionError(errno.EACCES, "Permission denied")
    for action in ("remove", "rename to b", "exchange with b"):
        (locked / "a").mkdir(exist_ok=True)
        (locked / "a").chmod(0o755)
        locked.chmod(0o500)
        words = str(posix.storage_error(refusal, action=action, place=locked / "a"))
        assert re.search(rf"{locked} belongs to .* mode 500, {locked}/a belongs .* mode 755", words)
        locked.chmod(0o700)
    assert "Permission denied" in done.stdout, done.stderr
    assert "this process runs as uid" in done.stdout
    assert "belongs to uid" in done.stdout
    # Where the owner and the mode of a place allow what its directory does not.
    refusal = PermissionError(errno.EPERM, "Operation not permitted")
    assert "sticky" not in str(posix.storage_error(refusal, action="rename", place=locked / "a"))
    locked.chmod(0o1777)
    assert f"{locked} has the sticky bit" in str(
        posix.storage_error(refusal, action="rename", place=locked / "a")
    )


def test_only_one_of_many_renames_to_one_name_wins(store: PosixStorage) -> None:
    for i in range(8):
        store.make_dir(f"src{i}")
    outcomes: list[bool] = []

    def rename(i: int) -> None:
        try:
            store.rename_dir(f"src{i}", "dst")
            outcomes.append(True)
        except StorageError:
            outcomes.append(False)

    threads = [threading.Thread(target=rename, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def test_what_need_not_be_durable_is_not_synced(
    store: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what must be is, each directory once; content and names are the same in both cases."""
    synced: list[str] = []
    real = os.fsync

    def watched(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    for durable in (False, True):
        store.make_dir("a/b", durable=durable)
        store.write_file("a/b/f", b"1", durable=durable)
        store.replace_file("a/b/f", b"22", durable=durable)
        assert store.read("a/b/f") == b"22"
        store.remove_tree("a", durable=durable)
        assert store.list("") == []
        if not durable:
            assert synced == []
    names = ["f" if name.startswith(".tmp-f-") else name for name in synced]
    assert names == ["root", "a", "f", "b", "f", "b", "root"]
    synced.clear()
    for name in ("src", "dst", "in/src"):
        store.make_dir(name, durable=False)
    store.exchange_dir("src", "dst")
    assert synced == ["root"]
    store.exchange_dir("in/src", "dst")
    assert synced == ["root", "root", "in"]
    store.rename_dir("src", "new")
    assert synced == ["root", "root", "in", "root"]


def test_no_descriptor_is_left_open(store: PosixStorage) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    store.write_file("f", b"1")
    before = count()
    for _ in range(3):
        store.read("f")
        store.write_file("g", b"1")
        store.list("")
        store.make_dir("a/b")
        store.open("f").close()
        for bad in ("missing", "a", "a/b/missing"):
            with pytest.raises(StorageError):
                store.read(bad)
            with pytest.raises(StorageError):
                store.open(bad)
        with pytest.raises(StorageError):
            store.create("f", nbytes=1).__enter__()
        with store.create("h", nbytes=1) as sink:
            sink.sync()
        store.remove_tree("h")
    assert count() == before


def test_new_files_obey_the_umask(store: PosixStorage) -> None:
    before = os.umask(0o027)
    try:
        store.write_file("f", b"1")
        with store.create("g", nbytes=1):
            pass
    finally:
        os.umask(before)
    for name in ("f", "g"):
        assert stat.S_IMODE((store.root / name).stat().st_mode) == 0o640

"""`holdfast copy`: disk to bucket and back, byte for byte, continued after a kill."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import (
    Checkpointer,
    ConfigError,
    CorruptionError,
    HoldfastError,
    PosixStorage,
    StorageError,
)
from holdfast.checkpoint.options import CkptFormat
from holdfast.cli.main import main
from holdfast.format.names import step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import read_lease
from holdfast.storage import Storage, posix
from holdfast.storage.posix import PosixSink
from holdfast.writer import copying
from holdfast.writer.copying import copy_checkpoint
from tests.crash.common import state_of, version_of

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.server import new_bucket


def files_of(storage: Storage, directory: str) -> dict[str, bytes]:
    names = [n for n in storage.list(directory) if n != "data"]
    names += [f"data/{name}" for name in storage.list(f"{directory}/data")]
    return {name: storage.read(f"{directory}/{name}") for name in names}


def test_disk_to_bucket_and_back_is_byte_for_byte(s3: str, tmp_path: Path) -> None:
    url = f"s3://{new_bucket(s3)}/run"
    for step in (1, 2):
        Checkpointer(tmp_path / "a", settle_s=0.0).save(step, state_of(step))
    assert main(["copy", str(tmp_path / "a"), url, "--step", "1", "--verify"]) == 0
    assert main(["copy", str(tmp_path / "a" / step_dir(2)), url]) == 0
    assert main(["copy", url, str(tmp_path / "b"), "--step", "1"]) == 0
    assert main(["copy", f"{url}/{step_dir(2)}", str(tmp_path / "b"), "--verify"]) == 0
    bucket, a, b = ObjectStorage(url), PosixStorage(tmp_path / "a"), PosixStorage(tmp_path / "b")
    for step in (1, 2):
        files = files_of(a, step_dir(step))
        assert files == files_of(bucket, step_dir(step)) == files_of(b, step_dir(step))
        assert version_of(tmp_path / "b", step) == step
    assert main(["copy", url, str(tmp_path / "b")]) == 0  # it is there


def test_another_version_is_replaced_only_on_request(tmp_path: Path) -> None:
    Checkpointer(tmp_path / "a", settle_s=0.0).save(1, state_of(1))
    url = "memory://copied/run"
    Checkpointer(url, settle_s=0.0).save(1, state_of(2))
    source, target = PosixStorage(tmp_path / "a"), ObjectStorage(url)
    with pytest.raises(ConfigError, match="--overwrite"):
        copy_checkpoint(source, step_dir(1), target)
    copy_checkpoint(source, step_dir(1), target, overwrite=True)
    assert files_of(target, step_dir(1)) == files_of(source, step_dir(1))


@pytest.mark.parametrize(
    ("byte", "ckpt_format"), [(-40, "holdfast"), (60, "holdfast"), (-1, "torch_dist")]
)
def test_damage_is_not_copied(tmp_path: Path, byte: int, ckpt_format: CkptFormat) -> None:
    """P21: of payloads, and of what is around them, which only other programs read."""
    Checkpointer(tmp_path / "a", settle_s=0.0, ckpt_format=ckpt_format).save(1, state_of(1))
    (file,) = (tmp_path / "a" / step_dir(1) / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    file.write_bytes(data)
    target = ObjectStorage("memory://damaged/run")
    with pytest.raises(CorruptionError, match="damaged: the"):
        copy_checkpoint(PosixStorage(tmp_path / "a"), step_dir(1), target)
    assert not target.exists(step_dir(1))


@pytest.mark.parametrize("how", ["cut", "missing", "flipped"])
def test_what_is_there_and_damaged_is_no_copy(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P21: another tool was killed while it copied; the same manifest is not the same version."""
    Checkpointer(tmp_path / "a", settle_s=0.0).save(1, state_of(1))
    source, target = PosixStorage(tmp_path / "a"), PosixStorage(tmp_path / "b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (file,) = (tmp_path / "b" / step_dir(1) / "data").iterdir()
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-8] if how == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    is_seen_without = how != "flipped"  # this takes a look at every byte
    if not is_seen_without:
        assert copy_checkpoint(source, step_dir(1), target).was_there
    with pytest.raises(ConfigError, match="this version, damaged"):
        copy_checkpoint(source, step_dir(1), target, verify=not is_seen_without)
    with monkeypatch.context() as patch:
        for name in ("rename_exchange", "rename_noreplace"):
            patch.setattr(posix, name, refuse(errno.EACCES))
        with pytest.raises(StorageError) as caught:
            copy_checkpoint(source, step_dir(1), target, verify=True, overwrite=True)
    assert "in place" not in str(caught.value), "it has the save id of what is damaged"
    copy_checkpoint(source, step_dir(1), target, verify=True, overwrite=True)
    assert files_of(target, step_dir(1)) == files_of(source, step_dir(1))
    assert copy_checkpoint(source, step_dir(1), target, verify=True).was_there


def refuse(code: int) -> Callable[..., bool]:
    def refused(*args: object, **kwargs: object) -> bool:
        raise OSError(code, os.strerror(code))

    return refused


def test_what_fails_at_its_rename_is_advised_to_be_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P21: not to be saved again, which no command of a copy does."""
    for name in "ab":
        Checkpointer(tmp_path / name, settle_s=0.0).save(1, state_of(1))
    real, undo = posix.rename_exchange, refuse(errno.EIO)
    calls = iter((real, undo))
    monkeypatch.setattr(posix, "rename_exchange", lambda *a, **k: next(calls)(*a, **k))
    monkeypatch.setattr(posix, "_sync_dir_fds", refuse(errno.EIO))
    source, target = PosixStorage(tmp_path / "a"), PosixStorage(tmp_path / "b")
    with pytest.raises(StorageError, match=r"in place and complete.*check the storage, then copy"):
        copy_checkpoint(source, step_dir(1), target, overwrite=True)


def test_files_that_other_programs_have_put_there_come_along(tmp_path: Path) -> None:
    """P21: `common.pt`, with which Megatron begins; what is not there is no error."""
    names = ["common.pt", "metadata.json", "manifest.json", "../out", "/etc/passwd"]
    with Checkpointer(tmp_path / "a", settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1), metadata={"other_files": names})
    (tmp_path / "a" / step_dir(1) / "common.pt").write_bytes(b"common")
    source, bucket = PosixStorage(tmp_path / "a"), ObjectStorage("memory://others/run")
    for one, other in ((source, bucket), (bucket, PosixStorage(tmp_path / "b"))):
        copy_checkpoint(one, step_dir(1), other, verify=True)
        assert other.read(f"{step_dir(1)}/common.pt") == b"common"
        assert files_of(other, step_dir(1)) == files_of(source, step_dir(1))


def test_what_another_tool_has_copied_meanwhile_stays(tmp_path: Path) -> None:
    """P21: the same version, whole: it is not taken away to make room for itself."""
    Checkpointer(tmp_path / "a", settle_s=0.0).save(1, state_of(1))
    theirs = tmp_path / "b" / step_dir(1)

    def copy(_: int) -> None:
        shutil.copytree(tmp_path / "a" / step_dir(1), theirs, dirs_exist_ok=True)

    source, target = PosixStorage(tmp_path / "a"), PosixStorage(tmp_path / "b")
    inodes = []

    def note(name: str, *_: object) -> None:
        if name == "rename":
            inodes.append(theirs.stat().st_ino)

    observed = PosixStorage(tmp_path / "b", observer=note)
    copy_checkpoint(source, step_dir(1), observed, on_progress=copy)
    assert inodes == [theirs.stat().st_ino]
    assert files_of(target, step_dir(1)) == files_of(source, step_dir(1))


class _KilledError(BaseException):
    """The process ends here."""


def test_an_interrupted_copy_is_continued_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that goes on is named; one that ended, or whose process is gone, is not waited for."""
    Checkpointer(tmp_path / "a", settle_s=0.0).save(1, state_of(1))
    source, url = PosixStorage(tmp_path / "a"), f"memory://{secrets.token_hex(8)}/run"

    def at_its_end(act: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(copying, "annotate", lambda *_: act())
            copy_checkpoint(source, step_dir(1), target)

    def interrupt() -> None:
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* copies this"):
            copy_checkpoint(source, step_dir(1), target)
        raise KeyboardInterrupt

    for target in (PosixStorage(tmp_path / "b"), ObjectStorage(url)):
        with pytest.raises(KeyboardInterrupt):
            at_its_end(interrupt)
        assert not target.exists(step_dir(1))
        report = copy_checkpoint(source, step_dir(1), target)
        assert report.nbytes_sent == 0  # all of it was there but for the name
        assert files_of(target, step_dir(1)) == files_of(source, step_dir(1))
        assert target.list(".reading") == []

    def die(*request: object) -> None:
        raise _KilledError

    target = ObjectStorage(url := f"memory://{secrets.token_hex(8)}/run")
    with pytest.raises(_KilledError):
        at_its_end(lambda: setattr(target._bucket, "_observer", die) or die())
    target = ObjectStorage(url)
    (lease,) = target.list(".reading")
    with pytest.raises(ConfigError, match=r"wait for it, or try again in 10 s"):
        copy_checkpoint(source, step_dir(1), target)
    dead = subprocess.Popen(["true"])
    dead.wait()
    content = target.read(f".reading/{lease}")
    of_dead = content.replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % dead.pid)
    target.write_file(f".reading/{lease}", of_dead)
    assert copy_checkpoint(source, step_dir(1), target).nbytes_sent == 0
    assert target.list(".reading") == []


def test_a_source_that_is_replaced_meanwhile_is_not_called_damaged() -> None:
    """P21: between the look at its records and that at its data."""
    source, url = (
        ObjectStorage(f"memory://{secrets.token_hex(8)}/run"),
        f"memory://{secrets.token_hex(8)}/run",
    )
    Checkpointer(source, settle_s=0.0).save(1, state_of(1))
    before = files_of(source, step_dir(1))
    done: list[str] = []

    def replace(kind: str, key: str, start: int, nbytes: int) -> None:
        if kind == "put" and key.startswith(".saving-") and not done:
            done.append(key)
            Checkpointer(source.url, settle_s=0.0).save(1, state_of(2), overwrite=True)

    with read_lease(source, step_dir(1)):  # as the command does
        copy_checkpoint(source, step_dir(1), ObjectStorage(url, observer=replace))
    assert done
    assert files_of(ObjectStorage(url), step_dir(1)) == before


def test_two_copies_of_one_version_never_take_from_each_other(tmp_path: Path) -> None:
    """They begin at once, so that neither sees the other's heartbeat; then one of them is killed
    after the other has committed."""
    Checkpointer(tmp_path / "a", settle_s=0.0).save(1, state_of(1))
    source, url = PosixStorage(tmp_path / "a"), f"memory://{secrets.token_hex(8)}/run"
    is_ready, may_commit = threading.Event(), threading.Event()
    deleted: list[str] = []

    def first(kind: str, key: str, start: int, nbytes: int) -> None:
        if kind == "put" and key == f"{step_dir(1)}.dir":
            is_ready.set()
            assert may_commit.wait(60)

    other = threading.Thread(
        target=copy_checkpoint, args=(source, step_dir(1), ObjectStorage(url, observer=first))
    )

    def second(kind: str, key: str, start: int, nbytes: int) -> None:
        if deleted:
            raise _KilledError
        if kind == "put" and key.endswith(".dir") and not other.ident:
            other.start()
            assert is_ready.wait(60)
        is_removal = kind == "delete" and "/data/" in key
        if is_removal or (kind == "put" and key == f"{step_dir(1)}.dir"):
            may_commit.set()
            other.join(60)
        if is_removal:
            deleted.append(key)

    with contextlib.suppress(_KilledError, HoldfastError):
        copy_checkpoint(source, step_dir(1), ObjectStorage(url, observer=second))
    may_commit.set()
    other.join(60)
    assert deleted == []
    assert verify_snapshot(ObjectStorage(url), step_dir(1)) == []


def test_a_copy_reads_into_the_same_memory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row P21: some pages, at whose start a write past the page cache can begin."""
    run = {"w": torch.arange(100_000), "v": torch.arange(100_000) + 7}
    Checkpointer(tmp_path / "run").save(1, {"state": run})
    monkeypatch.setattr(copying, "_PIECE_NBYTES", 16 << 10)
    written: list[int] = []
    write_at = PosixSink.write_at

    def noted(sink: PosixSink, offset: int, buffer: memoryview) -> None:
        if len(buffer) == 16 << 10:
            written.append(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
        write_at(sink, offset, buffer)

    monkeypatch.setattr(PosixSink, "write_at", noted)
    source, target = PosixStorage(tmp_path / "run"), PosixStorage(tmp_path / "copy")
    copy_checkpoint(source, step_dir(1), target)
    assert files_of(target, step_dir(1)) == files_of(source, step_dir(1))
    assert len(written) > 90
    assert len(set(written)) <= 6
    assert not any(address % mmap.PAGESIZE for address in written)

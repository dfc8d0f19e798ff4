"""Kept images: a restart finds the bytes in memory, the right ones or none."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, ConfigError, PosixStorage, StorageError
from holdfast.checkpoint.save import handshake
from holdfast.format.names import step_dir
from holdfast.format.versions import read_manifest, save_id_of
from holdfast.writer import keeper, kept_images
from holdfast.writer.keeper import KeepersEnd
from holdfast.writer.kept_images import KeptImages, end_keepers
from holdfast.writer.memory import SharedMemory
from holdfast.writer.process import Connection, MapMemory, WriterServer
from holdfast.writer.records import KeepImage
from holdfast.writer.sealed_image import SealedImage, is_sealed, open_for_reading, seal_memory
from tests.harness import wait_until
from tests.writer.images import (
    KEEP_S,
    addresses,
    end_processes_of,
    is_offered,
    load,
    processes_of,
)

NUMEL = 300_000


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root whose keepers are ended with the test."""
    yield tmp_path / "root"
    end_processes_of(tmp_path)


def state_of(value: float, *, numel: int = NUMEL) -> dict[str, object]:
    x = torch.arange(numel, dtype=torch.float32) + value
    return {"t": {"x": x, "n": torch.tensor(value)}}


def nbytes_of(state: dict[str, object]) -> int:
    return sum(tensor.nbytes for tensor in state["t"].values())  # type: ignore[attr-defined]


def assert_loads(root: Path, value: float, *, from_images: bool, step: int | None = None) -> None:
    """A restart gets this value, all of it from images or none."""
    state = state_of(-1.0)
    report = load(root, state, step=step)
    truth = state_of(value)
    for name, tensor in truth["t"].items():  # type: ignore[attr-defined]
        assert torch.equal(state["t"][name], tensor)  # type: ignore[index]
    assert report.refused_images == ()
    assert report.nbytes_from_images == (nbytes_of(truth) if from_images else 0)
    assert (report.nbytes_read == 0) is from_images


def run(root: Path, *steps: int, asynchronous: bool = True, **options: object) -> None:
    """A run that saves these steps, each with its number as its value, and ends."""
    options = {"keep_image_s": KEEP_S, "settle_s": 0.0} | options
    with Checkpointer(root, **options) as checkpointer:  # type: ignore[arg-type]
        for step in steps:
            if asynchronous:
                checkpointer.save_async(step, state_of(float(step)))
            else:
                checkpointer.save(step, state_of(float(step)))


# What is kept


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_newest_image_is_kept_and_taken(root: Path, asynchronous: bool) -> None:
    """P15: of either kind of save; older steps are read from storage."""
    run(root, 1, 2, asynchronous=asynchronous)
    wait_until(lambda: is_offered(root, 2))
    assert_loads(root, 2.0, from_images=True)
    assert_loads(root, 1.0, from_images=False, step=1)
    assert_loads(root, 2.0, from_images=True)  # as often as it is asked for


@pytest.mark.parametrize("steps", [(1, 2), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_the_newest_of_two_buffers_is_kept(root: Path, steps: tuple[int, ...]) -> None:
    """P15: whichever of the two it was staged in."""
    run(root, *steps, staging_buffers=2)
    wait_until(lambda: is_offered(root, steps[-1]))
    assert_loads(root, float(steps[-1]), from_images=True)


def test_nothing_is_kept_unless_it_is_asked_for(root: Path) -> None:
    run(root, 1, keep_image_s=0)
    assert processes_of(root) == []
    for wrong in ({"keep_image_s": -1}, {"max_kept_nbytes": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Checkpointer(root, **wrong)  # type: ignore[arg-type]


def test_an_image_beyond_the_budget_is_not_kept(root: Path) -> None:
    """P16: the image is the data file, header included."""
    run(root, 1, max_kept_nbytes=nbytes_of(state_of(0.0)))
    wait_until(lambda: not processes_of(root))
    run(root, 2, max_kept_nbytes=nbytes_of(state_of(0.0)) + 4096)
    wait_until(lambda: is_offered(root, 2))


def test_a_storage_of_this_process_alone_keeps_nothing_and_says_so(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unshared(PosixStorage):
        """A storage that no other process can open."""

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run(Unshared(root), 1)  # type: ignore[arg-type]
    assert "keep_image_s=120 has no effect" in caplog.text
    assert processes_of(root) == []
    assert_loads(root, 1.0, from_images=False)


# What is never taken


def test_bytes_that_changed_after_the_save_are_not_offered(root: Path) -> None:
    """P15: as those of a buffer into which the next save had begun to be staged."""
    checkpointer = Checkpointer(root, keep_image_s=KEEP_S)
    checkpointer.save_async(1, state_of(1.0)).result(60)
    memory = checkpointer._saver._buffers[0].memory
    memory.reserve(memory.nbytes)[NUMEL * 2] ^= 1
    checkpointer.close()
    wait_until(lambda: not processes_of(root))
    assert_loads(root, 1.0, from_images=False)


def test_a_save_that_failed_leaves_no_image(root: Path) -> None:
    """P15: nor does it make the image of the last good one wrong."""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.writer.job.commit_save", _fail)
        with Checkpointer(root, keep_image_s=KEEP_S) as checkpointer, pytest.raises(StorageError):
            checkpointer.save(2, state_of(2.0))
    assert_loads(root, 1.0, from_images=True)


def _fail(*args: object, **kwargs: object) -> None:
    raise StorageError("no commit")


def test_an_image_of_another_root_or_version_is_not_taken(root: Path) -> None:
    """P15: the address is that of the content: of the same step elsewhere, and of a step that was
    saved again, there is none."""
    other = root.with_name("other")
    run(other, 1)
    wait_until(lambda: is_offered(other, 1))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(7.0))
    assert_loads(root, 7.0, from_images=False)
    with Checkpointer(other) as checkpointer:
        checkpointer.save(1, state_of(8.0), overwrite=True)
    assert_loads(other, 8.0, from_images=False)
    wait_until(lambda: not processes_of(other))


@contextmanager
def offered(root: Path, fd: int | None) -> Iterator[None]:
    """A process that offers this memory as the image of step 1; None: it never answers."""
    (address,) = addresses(root, 1)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as server:
        server.bind(address)
        server.listen()

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(1)
                    if fd is not None:
                        socket.send_fds(peer, [b"t"], [fd])
                    else:
                        peer.recv(1)  # until the other end has given up

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    return fd


@pytest.mark.parametrize("numel", [NUMEL, 100])
def test_what_is_wrong_about_an_image_is_named_and_storage_is_read(
    root: Path, numel: int, caplog: pytest.LogCaptureFixture
) -> None:
    """P15: one bit, memory that can still change, memory that is short, no answer."""
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, state_of(1.0, numel=numel))
    (file,) = (root / step_dir(1) / "data").iterdir()
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[-numel * 2] ^= 4
    wrong = {
        "do not have the digests": memory_file(damaged),
        "not sealed": memory_file(good),
        "shorter": memory_file(good[:-1]),
        "does not answer": None,
    }
    for why, fd in wrong.items():
        if fd is not None and why != "not sealed":
            assert seal_memory(fd)
        state = state_of(-1.0, numel=numel)
        caplog.clear()
        with (
            pytest.MonkeyPatch.context() as patch,
            offered(root, fd),
            caplog.at_level(logging.WARNING, logger="holdfast"),
        ):
            if fd is None:
                patch.setattr(kept_images, "ANSWER_S", 0.1)
            report = load(root, state)
        assert torch.equal(state["t"]["x"], state_of(1.0, numel=numel)["t"]["x"])  # type: ignore[index]
        (said,) = report.refused_images
        assert why in said
        assert said in caplog.text
        assert report.nbytes_read > 0
        if fd is not None:
            os.close(fd)
    with offered(root, fd := memory_file(good)):
        assert seal_memory(fd)
        assert load(root, state_of(-1.0, numel=numel)).nbytes_read == 0
    os.close(fd)


def test_an_image_of_another_user_is_not_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: asked by the kernel's word, at both ends."""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    monkeypatch.setattr("holdfast.writer.kept_images.is_own", lambda peer: False)
    (said,) = load(root, state_of(-1.0)).refused_images
    assert "another user" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_keeper_sends_nothing_to_another_user(root: Path) -> None:
    """P15"""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    (address,) = addresses(root, 1)
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
            peer.connect(address)
            try:
                peer.sendall(b"t")
                os._exit(len(socket.recv_fds(peer, 1, 1)[1]))
            except OSError:
                os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_loads(root, 1.0, from_images=True)


# When it ends


def test_it_ends_after_its_time(root: Path) -> None:
    """P16"""
    run(root, 1, keep_image_s=0.2)
    wait_until(lambda: not processes_of(root))


def test_it_ends_after_a_newer_step(root: Path) -> None:
    """P16"""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    with Checkpointer(root) as checkpointer:
        checkpointer.save(2, state_of(2.0))
    wait_until(lambda: not processes_of(root))


def test_it_ends_by_a_signal_and_holds_nothing_of_the_trainers(root: Path) -> None:
    """P16: no pipe or terminal that a launcher waits for; out of memory it ends first."""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    (pid,) = processes_of(root)
    held = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = {name for name in held if name.startswith("socket:")}
    assert len(sockets) == 1
    assert {name.split(" ")[0] for name in held - sockets} == {
        "/dev/null", "/memfd:holdfast-staging",
    }  # fmt: skip
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
    end_processes_of(root, signal.SIGTERM)
    assert_loads(root, 1.0, from_images=False)


def test_it_ends_where_memory_is_short(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: at the next look, and not before."""
    run(root, 1, keep_image_s=0)
    save_id = save_id_of(PosixStorage(root), step_dir(1))
    assert save_id is not None
    image = KeepImage(buffer=0, nbytes=1, step=1, save_id=save_id, file="", keep_s=KEEP_S)
    monkeypatch.setattr(keeper, "_TURN_S", 0.0)
    monkeypatch.setattr(keeper, "total_memory_nbytes", lambda: 1000)
    monkeypatch.setattr(keeper, "available_memory_nbytes", lambda: 50)
    end = KeepersEnd(PosixStorage(root), image)
    assert not end.has_come()
    monkeypatch.setattr(keeper, "available_memory_nbytes", lambda: 49)
    assert end.has_come()
    assert end.why == "memory is short"


def test_a_save_that_lacks_memory_gets_that_of_images(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P16: before it is refused; the memory is free when the keepers have been asked."""
    run(root, 1)
    wait_until(lambda: is_offered(root, 1))
    asked = []

    def end() -> bool:
        asked.append(end_keepers())
        return asked[-1]

    # It ends all keepers of the user, and other tests run at the same time.
    monkeypatch.setattr(kept_images, "_offered", partial(addresses, root, 1))
    monkeypatch.setattr(handshake, "end_keepers", end)
    monkeypatch.setattr(handshake, "available_memory_nbytes", lambda: 10 if not asked else 10**6)
    storage = PosixStorage(root)
    handshake.check_budget(storage, image_nbytes=1000, held_nbytes=[0], total_nbytes=0)
    assert asked == [True]
    wait_until(lambda: not processes_of(root))
    with pytest.raises(StorageError, match="more memory"):
        handshake.check_budget(storage, image_nbytes=10**7, held_nbytes=[0], total_nbytes=0)


# Sealed memory


def test_a_forked_child_frees_what_it_has_inherited_and_nothing_else() -> None:
    """Memory of its own lies where the parent's was, if that was kept from it."""
    memory = SharedMemory()
    memory.reserve(1 << 20)
    child = os.fork()
    if child == 0:
        own = [mmap.mmap(-1, 1 << 20) for _ in range(200)]  # they fill every hole
        memory.close()
        for each in own:
            each[:] = bytes(1 << 20)  # SIGSEGV, if it was unmapped
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    memory.close()


def test_memory_is_sealed_once_nobody_can_write_to_it() -> None:
    """P15: the kernel's word, for every process and for ever."""
    memory = SharedMemory()
    memory.reserve(10_000)[:5] = b"bytes"
    fd = os.dup(memory.fd)
    reader = open_for_reading(fd)
    with pytest.raises(StorageError, match="not sealed"):
        SealedImage(reader, nbytes=10_000, place="x")
    assert not seal_memory(fd)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    memory.close()
    assert not seal_memory(fd)  # the child has inherited a mapping of it
    os.close(theirs)
    os.close(ours)
    os.waitpid(child, 0)
    assert seal_memory(fd)
    assert seal_memory(fd)
    assert is_sealed(reader)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    with pytest.raises(StorageError, match="shorter"):
        SealedImage(reader, nbytes=1 << 20, place="x")
    image = SealedImage(reader, nbytes=10_000, place="x")
    os.close(fd)
    os.close(reader)
    buffer = bytearray(5)
    image.readinto(memoryview(buffer), start=0)
    assert buffer == b"bytes"
    for start in (-1, 9_996):
        with pytest.raises(StorageError, match="no 5 bytes"):
            image.readinto(memoryview(buffer), start=start)
    image.close()
    image.close()
    with pytest.raises(StorageError):
        image.readinto(memoryview(buffer), start=0)


def test_what_a_failed_job_has_left_does_not_keep_memory_from_being_sealed(root: Path) -> None:
    """P15: a traceback may hold a view of the writer's mapping for as long as it likes."""
    memory = SharedMemory()
    memory.reserve(10_000)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = WriterServer(Connection(ours), PosixStorage(root))
        trainer = Connection(theirs)
        trainer.send(MapMemory(0, memory.nbytes), [memory.fd])
        image = KeepImage(buffer=0, nbytes=1, step=1, save_id="", file="", keep_s=KEEP_S)
        trainer.send(image)
        trainer.shutdown()
        server.serve()
    view = memoryview(server._buffers[0].memory)
    memory.close()
    ((fd, kept),) = server.give_images().items()
    assert kept == image
    assert seal_memory(fd)
    assert view[0] == 0
    os.close(fd)


def test_only_memory_files_can_be_sealed(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        assert not is_sealed(file.fileno())
        with pytest.raises(OSError) as caught:
            seal_memory(file.fileno())
        assert caught.value.errno == errno.EINVAL


def test_huge_pages_change_no_byte() -> None:
    """P15: where the kernel has them and where it declines."""
    data = os.urandom((5 << 20) + 123)
    fd = memory_file(data)
    assert seal_memory(fd)
    reader = open_for_reading(fd)
    image = SealedImage(reader, nbytes=len(data), place="x")
    image.collapse()
    found = bytearray(len(data))
    image.readinto(memoryview(found), start=0)
    assert found == data
    image.close()
    os.close(fd)
    os.close(reader)


def test_an_address_is_of_one_version_and_file(root: Path) -> None:
    run(root, 1, keep_image_s=0)
    data, manifest = read_manifest(PosixStorage(root), step_dir(1))
    (info,) = manifest.files
    kept = KeptImages(data)
    assert kept.address(info.name) == KeptImages(bytes(data)).address(info.name)
    assert len({kept.address("a"), kept.address("b"), KeptImages(data + b" ").address("a")}) == 3
    assert kept.take(info.name, nbytes=info.nbytes) is None

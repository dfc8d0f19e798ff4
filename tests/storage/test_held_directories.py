"""Directories held open during an operation: fewer opens, and what each name leads to now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer, PosixStorage, StorageError


@contextmanager
def counted_opens() -> Iterator[list[str]]:
    """The directories that are opened in the body."""
    opened: list[str] = []
    real = os.open

    def watch(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECTORY:
            opened.append(os.fspath(path))
        return real(path, flags, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watch)
        yield opened


def test_a_steady_save_opens_few_directories(tmp_path: Path) -> None:
    """It opened 84 when each call walked from the root."""
    state = {"m": {"w": torch.ones(8)}, "progress": {"step": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
        before = len(os.listdir("/proc/self/fd"))
        with counted_opens() as opened:
            checkpointer.save(3, state)
        assert len(opened) <= 30, opened
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    storage = PosixStorage(tmp_path / "root")
    storage.make_dir("")
    storage.make_dir("a/b")
    storage.write_file("a/b/f", b"old")
    return storage


def test_a_name_that_leads_elsewhere_is_followed_there(
    storage: PosixStorage, tmp_path: Path
) -> None:
    with storage.holding_dirs():
        assert storage.read("a/b/f") == b"old"
        os.rename(tmp_path / "root/a", tmp_path / "root/moved")
        with pytest.raises(StorageError, match="No such file"):
            storage.read("a/b/f")
        with pytest.raises(StorageError, match="No such file"):
            storage.write_file("a/b/g", b"lost")
        (tmp_path / "root/a/b").mkdir(parents=True)
        (tmp_path / "root/a/b/f").write_bytes(b"new")
        assert storage.read("a/b/f") == b"new"
        assert storage.read("moved/b/f") == b"old"
    assert not (tmp_path / "root/moved/b/g").exists()


def test_a_link_in_the_place_of_a_held_directory_is_not_followed(
    storage: PosixStorage, tmp_path: Path
) -> None:
    (tmp_path / "outside/b").mkdir(parents=True)
    (tmp_path / "outside/b/f").write_bytes(b"secret")
    with storage.holding_dirs():
        assert storage.list("a/b") == ["f"]
        os.rename(tmp_path / "root/a", tmp_path / "root/moved")
        (tmp_path / "root/a").symlink_to(tmp_path / "outside")
        for call in (storage.read, storage.list, storage.size, storage.remove_tree):
            with pytest.raises(StorageError):
                call("a/b/f" if call is not storage.list else "a/b")
        with pytest.raises(StorageError):
            storage.write_file("a/b/g", b"")
    assert sorted(os.listdir(tmp_path / "outside/b")) == ["f"]


def test_few_directories_are_held_at_once(storage: PosixStorage) -> None:
    """A root with thousands of steps takes no more descriptors than one with few."""
    before = len(os.listdir("/proc/self/fd"))
    with storage.holding_dirs():
        for number in range(40):
            storage.make_dir(f"d{number}/below")
            storage.write_file(f"d{number}/below/f", b"")
            assert storage.exists(f"d{number}/below/f")
        assert len(os.listdir("/proc/self/fd")) <= before + 8
        with storage.holding_dirs():
            assert storage.exists("d39/below/f")
    assert len(os.listdir("/proc/self/fd")) == before

"""Ranks that never come, indexes that do not tile, copies elsewhere, and unlike file systems."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch.distributed.distributed_c10d import _get_default_store

from holdfast import (
    Checkpointer,
    CorruptionError,
    DeadlineError,
    HoldfastError,
    Layout,
    PlanError,
    PosixStorage,
    ProcessGroups,
    Sharded,
)
from holdfast.format.digest import digest128
from holdfast.format.index import ChunkIndex, decode_index, encode_index
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.format.names import INDEX, MANIFEST
from holdfast.storage import posix
from holdfast.writer.leftovers import repair
from tests.checkpoint.common import make_state
from tests.crash.common import assert_recovers, state_of, versions
from tests.crash.mounts import Mounts
from tests.harness import RankContext, run_ranks


def _absent(context: RankContext, root: str) -> str:
    store = _get_default_store()
    layout = Layout(dp=3)
    with ProcessGroups.create(layout, timeout_s=60) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        groups.control.timeout_s = 2.0
        if context.rank == 1:
            store.wait(["0", "2"])  # until they have raised
            return ""
        began = time.monotonic()
        with pytest.raises(DeadlineError) as caught:
            checkpointer.save(1, state_of(1))
        assert time.monotonic() - began < 30
        assert checkpointer.latest() is None
        store.set(f"{context.rank}", "raised")
        return str(caught.value)


def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    """P9: the others raise in time, with rank and phase; nothing is committed."""
    messages = run_ranks(3, _absent, str(tmp_path)).results
    for rank in (0, 2):
        assert "save: begin" in messages[rank]
        assert "1" in messages[rank].replace("save: begin", "")
        assert "rank" in messages[rank]


def _spoil(index: ChunkIndex, how: str, shapes: list[list[int]]) -> ChunkIndex:
    """The same rows with a hole, an overlap, or a chunk beyond its tensor."""
    sizes = np.array([[*shape, *[1] * (index.num_dims - len(shape))] for shape in shapes])
    cut = np.flatnonzero((index.offset.sum(axis=1) > 0) & (index.nbytes > 0))
    row = int(cut[0])
    dim = int(np.flatnonzero(index.offset[row])[0])
    offset = index.offset.copy()
    if how == "hole":  # everybody claims the beginning: nobody has the rest
        offset[row, dim] = 0
    elif how == "overlap":
        offset[row, dim] -= 1
    else:
        offset[row, dim] = sizes[index.tensor[row], dim]
    return dataclasses.replace(index, offset=offset)


def _rewrite(directory: Path, how: str) -> None:
    """Spoil the index and make every digest that covers it anew."""
    manifest = decode_manifest((directory / MANIFEST).read_bytes())
    index = decode_index((directory / INDEX).read_bytes())
    data = encode_index(_spoil(index, how, [list(t.shape) for t in manifest.tensors]))
    info = msgspec.structs.replace(manifest.index, nbytes=len(data), digest=digest128(data))
    (directory / INDEX).write_bytes(data)
    (directory / MANIFEST).write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, index=info))
    )


def _save_irregular(context: RankContext, root: str) -> None:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        Checkpointer(root, groups=groups).save(1, make_state(layout, context.rank))


def _load_spoilt(context: RankContext, root: str) -> list[str]:
    layout = Layout(tp=2, dp=2) if context.num_ranks == 4 else Layout()
    messages = []
    with ProcessGroups.create(layout) as groups:
        for how in ("hole", "overlap", "out_of_bounds"):
            target = make_state(layout, context.rank, blank=True)
            with pytest.raises(CorruptionError) as caught:
                Checkpointer(f"{root}/{how}", groups=groups).load(target)
            messages.append(str(caught.value))
    return messages


def test_an_index_that_does_not_tile_is_refused_on_load(tmp_path: Path) -> None:
    """E5: hole, overlap, out of bounds, all digests right, on one rank and on four."""
    run_ranks(4, _save_irregular, str(tmp_path / "good"))
    for how in ("hole", "overlap", "out_of_bounds"):
        shutil.copytree(tmp_path / "good", tmp_path / how)
        _rewrite(tmp_path / how / "iter_0000001", how)
    for num_ranks in (1, 4):
        for messages in run_ranks(num_ranks, _load_spoilt, str(tmp_path)).results:
            for message in messages:
                assert "tile" in message
                assert "model." in message or "moments." in message


def test_a_state_that_does_not_tile_is_refused_on_save(tmp_path: Path) -> None:
    """E5 on one rank; tests/checkpoint has it for four."""
    import torch

    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(PlanError, match=r"t\.x"):
        checkpointer.save(1, {"t": {"x": Sharded(torch.zeros(2, 2), (4, 2), offset=(0, 0))}})
    with pytest.raises(HoldfastError, match="outside the global size 4"):
        checkpointer.save(1, {"t": {"x": Sharded(torch.zeros(2, 2), (4, 2), offset=(3, 0))}})
    assert checkpointer.latest() is None


def _moved_load(context: RankContext, root: str) -> None:
    layout = Layout(tp=2, dp=2)
    with ProcessGroups.create(layout) as groups:
        target = make_state(layout, context.rank, blank=True)
        Checkpointer(root, groups=groups).load(target)


def test_a_copy_made_by_cp_is_a_checkpoint(tmp_path: Path) -> None:
    """P11: `cp -r` to another file system; it loads, and `holdfast verify` proves it."""
    from holdfast.cli.main import main

    source, target = tmp_path / "source", tmp_path / "tier"
    run_ranks(4, _save_irregular, str(source))
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    shutil.rmtree(source)
    run_ranks(4, _moved_load, str(target))
    assert main(["verify", str(target)]) == 0
    alone = tmp_path / "renamed"
    (target / "iter_0000001").rename(alone)
    assert main(["verify", str(alone)]) == 0
    content = bytearray((alone / "data/00000.safetensors").read_bytes())
    content[-1] ^= 1
    (alone / "data/00000.safetensors").write_bytes(content)
    assert main(["verify", str(alone)]) == 1


def _use(root: Path) -> None:
    """Everything that a training run does with storage, with default settings."""
    with Checkpointer(root, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save_async(2, state_of(2)).result(60)
        checkpointer.save(2, state_of(3), overwrite=True)
        checkpointer.save_async(3, state_of(4)).result(60)
        checkpointer.save_async(3, state_of(5), overwrite=True).result(60)
    assert versions(root) == {1: 1, 2: 3, 3: 5}
    assert repair(PosixStorage(root), alive_s=0.0) == []
    assert_recovers(root, step=4, version=6)


def test_memory(fast_dir: Path) -> None:
    """P12: tmpfs has no direct I/O of its own and syncs nothing."""
    _use(fast_dir / "run")


def test_a_file_system_that_can_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: no reservation, no renameat2, no directory sync, no direct I/O."""
    real_open, real_fsync = os.open, os.fsync

    def no_direct(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_open(path, flags, *args, **kwargs)

    def no_dir_sync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "directories are not synced")
        real_fsync(fd)

    for name in ("allocate", "rename_noreplace", "rename_exchange"):
        monkeypatch.setattr(posix, name, lambda *args, **kwargs: False)
    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(os, "fsync", no_dir_sync)
    _use(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "ext2", "xfs", "overlay", "tmpfs"])
def test_real_file_systems(mounts: Mounts, kind: str) -> None:
    """P12: ext2 with small inodes has whole seconds, no reservation and no journal."""
    if kind == "overlay":
        point = mounts.overlay()
    elif kind == "tmpfs":
        point = mounts.tmpfs(options="size=64m")
    else:
        make = {
            "ext4": (["mkfs.ext4", "-q"], 48),
            "ext2": (["mkfs.ext4", "-q", "-t", "ext2", "-I", "128"], 48),
            "xfs": (["mkfs.xfs", "-q"], 320),
        }[kind]
        point = mounts.disk(kind, make[0], size_mib=make[1]).point
    _use(point / "run")
    if kind == "ext2":
        assert (point / "run" / "iter_0000001").stat().st_mtime % 1 == 0

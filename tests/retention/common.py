"""Small checkpoints in a directory, and ways to harm them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.arrays.boxes import Box
from holdfast.format.names import list_steps, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.storage import PosixStorage
from tests.format.making import Chunk, make, random_tensor, write

LATEST = "latest_checkpointed_iteration.txt"


def put(
    storage: PosixStorage, step: int, *, created: str | None = None, progress: Any = None
) -> None:
    chunks = [Chunk(file=0, box=Box((0,), (3,))), Chunk(file=1, box=Box((3,), (2,)))]
    tensors = {"w": random_tensor(step, dtype="F32", shape=(5,), chunks=chunks)}
    made = make(tensors, step=step, parts={"progress": progress or {"step": step}})
    if created is not None:
        made.manifest = msgspec.structs.replace(made.manifest, created=created)
    write(storage, made)


def fill(root: Path, steps: Iterable[int]) -> PosixStorage:
    storage = PosixStorage(root)
    storage.make_dir("")
    newest = None
    for step in steps:
        put(storage, step)
        newest = step if newest is None else max(step, newest)
    if newest is not None:
        storage.write_file(LATEST, f"{newest}\n".encode())
    return storage


def damage(root: Path, step: int, kind: str) -> None:
    place = root / step_dir(step)
    if kind == "data cut off":
        path = place / "data/00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    elif kind == "data missing":
        (place / "data/00000.safetensors").unlink()
    else:
        path = place / {"manifest": "manifest.json", "index": "index.safetensors"}[kind]
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


DAMAGES = ("manifest", "index", "data missing", "data cut off")


def steps_of(storage: PosixStorage) -> list[int]:
    return list_steps(PosixStorage(storage.root))


def is_whole(storage: PosixStorage, step: int) -> bool:
    return verify_snapshot(PosixStorage(storage.root), step_dir(step)) == []


def trash(storage: PosixStorage) -> list[str]:
    return [name for name in storage.list("") if name.startswith(".trash-")]

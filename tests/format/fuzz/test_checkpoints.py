"""Spoilt manifests, indexes and data files: refused by name, or harmless; never anything else."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from holdfast import Checkpointer, PosixStorage, Stored
from holdfast.errors import PlanError
from holdfast.format.digest import digest128
from holdfast.format.names import INDEX, MANIFEST
from tests.drawn import drawn
from tests.format.fuzz.making import (
    ALLOWED,
    DIRECTORY,
    ENVELOPES,
    HOSTILE,
    byte_changes,
    opened,
    put,
    sample,
    seal_manifest,
    spoil_tree,
)
from tests.format.making import sample_tensors
from tests.harness import RankContext, run_ranks

_TRUTH = {key: tensor.data for key, tensor in sample_tensors().items()}
_EXTREMES = [0, 1, 2, 3, 7, 255, 256, 2**31, 2**32, 2**62, 2**63 - 1]


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    made = PosixStorage(tmp_path)
    put(made, sample())
    return made


def _manifest(storage: PosixStorage) -> Any:
    tree = msgspec.json.decode(storage.read(f"{DIRECTORY}/{MANIFEST}"))
    del tree["digest"]
    return tree


def _write(storage: PosixStorage, name: str, data: bytes) -> None:
    (storage.root / DIRECTORY / name).write_bytes(data)


@drawn(quick=40, slow=120, data=st.data())
def test_changed_bytes_are_refused_or_harmless(storage: PosixStorage, data: st.DataObject) -> None:
    """Any file, any change: the true values come out, or a proper refusal."""
    made = sample(data.draw(st.sampled_from(ENVELOPES)))
    put(storage, made)
    name = data.draw(st.sampled_from([MANIFEST, INDEX, *made.files]))
    path = storage.root / DIRECTORY / name
    before = path.read_bytes()
    path.write_bytes(data.draw(byte_changes(before)))
    found = opened(storage)
    assert found in (None, _TRUTH)
    if name in (MANIFEST, INDEX):
        assert found is None or path.read_bytes() == before, "no byte of a record is free"


@drawn(quick=40, slow=120, data=st.data())
def test_manifests_that_lie_under_a_right_digest(
    storage: PosixStorage, data: st.DataObject
) -> None:
    """Semantic checks: whatever a manifest states, no wrong value is loaded under a true name."""
    put(storage, sample(data.draw(st.sampled_from(ENVELOPES))))
    spoilt = spoil_tree(data.draw, _manifest(storage))
    _write(storage, MANIFEST, seal_manifest(spoilt))
    found = opened(storage)
    if found is not None:
        assert {**_TRUTH, **found} == _TRUTH or set(_TRUTH) - set(found)
    try:
        Checkpointer(storage.root, settle_s=0.0).load({"t": Stored(), "v": Stored()})
    except ALLOWED:
        return


@drawn(quick=40, slow=120, data=st.data())
def test_indexes_that_lie_under_a_right_digest(storage: PosixStorage, data: st.DataObject) -> None:
    """E5: holes, overlaps, chunks out of bounds, other files, other digests: never wrong bytes."""
    made = sample(data.draw(st.sampled_from(ENVELOPES)))
    name = data.draw(st.sampled_from(["tensor", "file", "offset", "extent", "start", "nbytes",
                                      "copy", "digest_ptr", "digest"]))  # fmt: skip
    column = getattr(made.index, name).copy()
    place = data.draw(st.integers(0, column.size - 1))
    old = int(column.flat[place])
    near = st.integers(-3, 3).map(lambda delta: max(old + delta, 0))
    column.flat[place] = data.draw(near | st.sampled_from(_EXTREMES))
    if data.draw(st.booleans()):
        other = data.draw(st.integers(0, column.size - 1))
        column.flat[[place, other]] = column.flat[[other, place]]
    made.index = dataclasses.replace(made.index, **{name: column})
    put(storage, made)
    assert opened(storage) in (None, _TRUTH)


@drawn(quick=40, slow=120, data=st.data())
def test_headers_that_lie_under_a_right_digest(storage: PosixStorage, data: st.DataObject) -> None:
    """The safetensors headers of the index and of a data file, the digests made anew."""
    put(storage, sample())
    name = data.draw(st.sampled_from([INDEX, "data/00000.safetensors"]))
    content = (storage.root / DIRECTORY / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    spoilt = spoil_tree(data.draw, msgspec.json.decode(content[8 : 8 + length]))
    text = msgspec.json.encode(spoilt)
    text = text.ljust(length)
    stated = data.draw(st.sampled_from([len(text), len(text) + 8, 2**40, 2**63, 2**64 - 1]))
    header = stated.to_bytes(8, "little") + text
    _write(storage, name, header + content[8 + length :])
    tree = _manifest(storage)
    if name == INDEX:
        whole = header + content[8 + length :]
        tree["index"].update(nbytes=len(whole), digest=digest128(whole))
    else:
        tree["files"][0]["header_digest"] = digest128(header)
    _write(storage, MANIFEST, seal_manifest(tree))
    assert opened(storage) in (None, _TRUTH)


def _hostile_sizes(context: RankContext, root: str) -> list[float]:
    """Everything that states a size states enormous ones, with little memory to be had."""
    storage = PosixStorage(root)
    put(storage, sample())
    tree = _manifest(storage)
    trees = [("deep", b"[" * 200_000), ("values", b'{"format":"holdfast","version":1')]
    huge = 2**40
    for part, name in (("index", "nbytes"), ("index", "num_rows"), ("totals", "nbytes"),
                       ("totals", "num_tensors"), ("totals", "stored_nbytes")):  # fmt: skip
        spoilt = msgspec.json.decode(msgspec.json.encode(tree))
        spoilt[part][name] = huge
        trees.append((f"{part}.{name}", seal_manifest(spoilt)))
    for name in ("nbytes", "header_nbytes"):
        spoilt = msgspec.json.decode(msgspec.json.encode(tree))
        spoilt["files"][0][name] = huge
        trees.append((f"files.{name}", seal_manifest(spoilt)))
    for shape in ([huge], [huge, huge], [2**20, 2**20], [0, huge], [1] * 100_000):
        spoilt = msgspec.json.decode(msgspec.json.encode(tree))
        spoilt["tensors"][0][2] = shape
        trees.append((f"shape {shape[:2]}", seal_manifest(spoilt)))
    spoilt = msgspec.json.decode(msgspec.json.encode(tree))
    node: Any = []
    for _ in range(400):
        node = [node]
    spoilt["parts"]["v"] = node
    trees.append(("nested", seal_manifest(spoilt)))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    seconds = []
    for what, data in trees:
        _write(storage, MANIFEST, data)
        began = time.process_time()
        found = opened(storage)
        assert found is None or what == "nested", what
        seconds.append(time.process_time() - began)
    return seconds


def test_hostile_sizes_take_neither_memory_nor_time(tmp_path: Path) -> None:
    """With 256 MiB to be had, nothing raises MemoryError, and each refusal takes a moment."""
    (seconds,) = run_ranks(1, _hostile_sizes, str(tmp_path), init=False).results
    assert len(seconds) >= 14
    assert max(seconds) < 2.0


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self.path, os.O_CREAT | os.O_WRONLY)


def test_no_file_is_ever_unpickled(tmp_path: Path) -> None:
    """E11: a payload in place of, behind, or inside any file does not run."""
    import torch

    root, trap = tmp_path / "run", tmp_path / "ran"
    plain = pickle.dumps(_Payload(str(trap)))
    with_torch = io.BytesIO()
    torch.save(_Payload(str(trap)), with_torch)
    storage = PosixStorage(root)
    names = [MANIFEST, INDEX, "data/00000.safetensors", "data/00001.safetensors"]
    for payload in (plain, with_torch.getvalue()):
        for name in names:
            for place in ("instead", "before", "behind"):
                put(storage, sample())
                path = root / DIRECTORY / name
                content = path.read_bytes() if place != "instead" else b""
                path.write_bytes(payload + content if place == "before" else content + payload)
                assert opened(storage) in (None, _TRUTH)
                with pytest.raises(ALLOWED):
                    Checkpointer(root, settle_s=0.0).load({"t": Stored(), "v": Stored()})
    for extra in ("common.pt", "rng.pkl", ".metadata", "data/__0_0.distcp"):
        put(storage, sample())
        (root / DIRECTORY / extra).write_bytes(plain)
        Checkpointer(root, settle_s=0.0).load({"t": Stored(), "v": Stored()})
    assert not trap.exists()
    pickle.loads(plain)
    assert trap.exists(), "the payload is a dud: the test proved nothing"


def test_the_mutations_reach_what_lies_behind_the_digests(storage: PosixStorage) -> None:
    """Unchanged, a sealed manifest is accepted: what the tests above refuse is the lie in it."""
    _write(storage, MANIFEST, seal_manifest(_manifest(storage)))
    assert opened(storage) == _TRUTH
    assert len(HOSTILE) > 20
    made = sample()
    made.index.start[0] = np.int64(-5)
    with pytest.raises(PlanError, match="negative"):
        put(storage, made)

"""The manifest: every byte covered, newer versions named, hostile content refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptionError, PlanError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.manifest import (
    CutInfo,
    Manifest,
    PlacementInfo,
    decode_manifest,
    encode_manifest,
)
from holdfast.format.names import (
    data_file,
    latest_step,
    list_steps,
    parse_saving_dir,
    parse_step_dir,
    saving_dir,
    step_dir,
)
from holdfast.format.values import Node
from holdfast.storage import PosixStorage
from tests.format.making import make, sample_tensors, write

DATA_FILE = re.compile(r"data/[0-9]{5,9}\.safetensors", re.ASCII)
PARTS: dict[str, Node] = {
    "progress": {"step": 3, "loss": 1.5},
    "model": {
        "weight": {"$": "tensor", "k": "model.weight"},
        "tied": {"$": "tensor", "k": "model.weight"},
        "pair": {"$": "tuple", "v": [{"$": "tensor", "k": "model.pair.0"}]},
        "list": [{"$": "array", "k": "model.list.0"}, [{"$": "tensor", "k": "model.list.1.0"}]],
        "a.b": {"$": "tensor", "k": "model.a.b"},
        "a": {"b": {"$": "tensor", "k": "model.a.b"}},
    },
    "whole": {"$": "tensor", "k": "whole"},
}


def sample() -> Manifest:
    manifest = make(sample_tensors(), parts=PARTS).manifest
    return msgspec.structs.replace(
        manifest,
        index=msgspec.structs.replace(manifest.index, nbytes=5000),
        tensors=[
            msgspec.structs.replace(manifest.tensors[0], fingerprint="00ff"),
            *manifest.tensors[1:],
        ],
    )


def reseal(table: dict[str, object]) -> bytes:
    """A manifest somebody else wrote: right digest, whatever content, JSON with spaces."""
    table = {k: v for k, v in table.items() if k != "digest"}
    body = json.dumps(table, indent=1).encode().removesuffix(b"\n}")
    return body + b',"digest":"' + digest128(body).encode() + b'"}\n'


def as_table(manifest: Manifest) -> dict[str, object]:
    table: dict[str, object] = json.loads(encode_manifest(manifest))
    return table


def test_manifests_come_back_and_are_plain_json() -> None:
    manifest = sample()
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    table = json.loads(data)
    assert table["format"] == "holdfast"
    assert table["version"] == 1
    assert list(table)[-1] == "digest"
    assert encode_manifest(decode_manifest(data)) == data


def test_what_is_0_null_or_implied_is_left_out() -> None:
    """Of a tiny tensor, its name, type and shape are all that is written."""
    manifest = sample()
    layouts = [*manifest.layouts, *manifest.layouts]
    cut = PlacementInfo(kind="cut", cuts=(CutInfo(0, "tp"),))
    second = msgspec.structs.replace(manifest.tensors[1], layout=1)
    fourth = msgspec.structs.replace(manifest.tensors[3], placement=1)
    manifest = msgspec.structs.replace(
        manifest,
        layouts=layouts,
        placements=[*manifest.placements, cut],
        tensors=[
            manifest.tensors[0], second, manifest.tensors[2], fourth, *manifest.tensors[4:]
        ],
    )  # fmt: skip
    data = encode_manifest(manifest)
    table = json.loads(data)
    assert table["tensors"][:4] == [
        ["model.weight", "F32", [5, 7], 0, 0, "00ff"],
        ["model.norm", "BF16", [9], 1],
        ["model.scale", "F64", []],
        ["model.none", "I64", [0, 3], 0, 1],
    ]
    assert table["placements"] == [
        {"kind": "whole", "cuts": [], "over": ""},
        {"kind": "cut", "cuts": [[0, "tp", False]], "over": ""},
    ]
    assert table["parts"]["model"] == {
        "weight": {"$": "tensor"},
        "tied": {"$": "tensor", "k": "model.weight"},
        "pair": PARTS["model"]["pair"],  # type: ignore[index, call-overload]
        "list": [{"$": "array"}, [{"$": "tensor"}]],
        "a.b": {"$": "tensor"},
        "a": {"b": {"$": "tensor"}},
    }
    assert table["parts"]["whole"] == {"$": "tensor"}
    assert decode_manifest(data) == manifest
    assert manifest.parts == PARTS
    body = data[: -len(b',"digest":""}\n') - 32]
    more = body.replace(b'["model.norm","BF16",[9],1]', b'["model.norm","BF16",[9],1,0,null]')
    assert decode_manifest(more + b',"digest":"' + digest128(more).encode() + b'"}\n') == manifest


@pytest.mark.parametrize("has_names", [False, True])
def test_implied_keys_take_no_more_memory_than_a_manifest_may(has_names: bool) -> None:
    """A long name above many tensors would be copied into the key of each."""
    name = "x" * 2_000_000
    leaves: list[Node] = [{"$": "tensor"} for _ in range(1000)]
    named: Node = {str(i): leaf for i, leaf in enumerate(leaves)}
    parts: dict[str, Node] = {"p": {name: named if has_names else leaves}}
    manifest = msgspec.structs.replace(sample(), parts=parts)
    with pytest.raises(CorruptionError, match="implies"):
        decode_manifest(encode_manifest(manifest))


def test_the_digest_is_over_the_bytes_before_it() -> None:
    data = encode_manifest(sample())
    body, digest = re.fullmatch(rb'(.*),"digest":"([0-9a-f]{32})"}\n', data, re.S).groups()  # type: ignore[union-attr]
    assert digest.decode() == digest128(body)


def test_a_stranger_may_write_it_with_other_white_space() -> None:
    manifest = sample()
    data = reseal(as_table(manifest))
    assert b"\n " in data
    assert decode_manifest(data) == manifest


def test_any_changed_byte_is_found() -> None:
    data = encode_manifest(sample())
    for at in range(len(data)):
        for bit in (1, 1 << (at % 8)):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(CorruptionError):
                decode_manifest(bytes(damaged))
    for wrong in (b"", b"{}", data[:-1], data + b"\n", data[1:], data[:100]):
        with pytest.raises(CorruptionError, match=r"here: damaged"):
            decode_manifest(wrong, place="here")


def test_a_newer_version_is_refused_by_name() -> None:
    table = as_table(sample()) | {"version": 2, "novelty": {"a": 1}, "tensors": "elsewhere"}
    match = r"written by a newer Holdfast with format version 2, this one reads 1; update"
    with pytest.raises(CorruptionError, match=match):
        decode_manifest(reseal(table))
    # Its way of sealing may be new as well: the version is looked at all the same.
    with pytest.raises(CorruptionError, match=r"format version 2, this one reads 1 \(or damaged"):
        decode_manifest(json.dumps(table).encode())


def change(path: str, value: object) -> Callable[[dict[str, object]], None]:
    def apply(table: dict[str, object]) -> None:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        place: object = table
        for name in parents:
            place = place[name]  # type: ignore[index]
        place[last] = value  # type: ignore[index]

    return apply


HOSTILE = [
    ("format", "other"), ("version", 0), ("version", "1"), ("version", True), ("step", -1),
    ("step", 1.0), ("step", 10**30), ("block_nbytes", 0), ("block_nbytes", 3000),
    ("block_nbytes", 1 << 40), ("unknown", 1), ("tensors", None), ("tensors", {}),
    ("tensors.0.key", ""), ("tensors.0.key", "model.norm"), ("tensors.0.key", 5),
    ("tensors.0.dtype", "F12"), ("tensors.0.shape", [1] * 65), ("tensors.0.shape", [-1, 4]),
    ("tensors.0.shape", [2**62, 2**62]), ("tensors.3.shape", [0, 2**62, 2**62]),
    ("tensors.0.shape", [1.5]), ("tensors.0.layout", 1), ("tensors.0.layout", -1),
    ("tensors.0.shape", [5, 8]), ("tensors.0.extra", 1), ("tensors.0.placement", 1),
    ("tensors.0.placement", -1), ("placements", []), ("placements.0.kind", "elsewhere"),
    ("placements.0.cuts", [[5, "tp", False]]), ("placements.0.cuts", [[-1, "tp", False]]),
    ("placements.0.cuts", [["tp", 0]]), ("placements.0.over", 1),
    ("files.0.name", "../../etc/passwd"), ("files.0.name", "/etc/passwd"),
    ("files.0.name", "data/../manifest.json"), ("files.0.name", "data/00001.safetensors"),
    ("files.0.name", "data/00000.safetensors\n"),
    ("files.0.name", "data/\u0660\u0661234.safetensors"),
    ("files.0.nbytes", -1), ("files.0.nbytes", 2**70), ("files.0.nbytes", 10),
    ("files.0.header_nbytes", 0), ("files.0.header_nbytes", 10**9),
    ("files.0.header_digest", "zz"), ("files.0.coordinate", {"tp": "x"}),
    ("index.nbytes", 2**40), ("index.nbytes", 0), ("index.digest", ""),
    ("totals.num_tensors", 3), ("totals.nbytes", 3), ("layouts", []), ("parts", []),
]  # fmt: skip


NAMES = {"key": "0", "dtype": "1", "shape": "2", "layout": "3", "placement": "4", "extra": "6"}


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=lambda v: str(v)[:40])
def test_hostile_content_is_refused_even_with_a_right_digest(path: str, value: object) -> None:
    table = as_table(sample())
    rows = table["tensors"]
    assert isinstance(rows, list)
    rows = [[*row, *[0, 0, None][len(row) - 3 :]] for row in rows]
    if path.endswith("extra"):
        rows[0].append(None)
    table["tensors"] = rows
    if path.startswith("tensors."):
        head, _, last = path.rpartition(".")
        path = f"{head}.{NAMES[last]}"
    change(path, value)(table)
    with pytest.raises(CorruptionError, match="here: "):
        decode_manifest(reseal(table), place="here")


@pytest.mark.parametrize("name", ["format", "version", "step", "parts", "totals", "placements"])
def test_every_member_must_be_there(name: str) -> None:
    table = as_table(sample())
    del table[name]
    with pytest.raises(CorruptionError, match="here: "):
        decode_manifest(reseal(table), place="here")


def test_hostile_depth_is_refused() -> None:
    body = encode_manifest(sample())[: -len(b',"digest":""}\n') - 32]
    deep = body.replace(b'"parts":{', b'"parts":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b",", 1)
    data = deep + b',"digest":"' + digest128(deep).encode() + b'"}\n'
    with pytest.raises(CorruptionError):
        decode_manifest(data)


def test_what_would_not_be_accepted_is_not_written() -> None:
    manifest = sample()
    for wrong in (
        msgspec.structs.replace(manifest, block_nbytes=3),
        msgspec.structs.replace(manifest, tensors=[*manifest.tensors, manifest.tensors[0]]),
        msgspec.structs.replace(manifest, save_id="\ud800"),
        msgspec.structs.replace(manifest, parts={"p": object()}),
    ):
        with pytest.raises(PlanError, match="step 1"):
            encode_manifest(wrong)


def test_mutated_manifests_with_right_digests_never_break_the_decoder() -> None:
    data = encode_manifest(sample())
    body = data[: -len(b',"digest":""}\n') - 32]
    rng = random.Random(11)
    accepted = 0
    for _ in range(3000):
        changed = bytearray(body)
        for _ in range(rng.randint(1, 2)):
            changed[rng.randrange(len(changed))] = rng.choice(b'{}[]",:0123456789-.eE\\\x00\xff')
        sealed = bytes(changed) + b',"digest":"' + digest128(bytes(changed)).encode() + b'"}\n'
        try:
            manifest = decode_manifest(sealed)
        except CorruptionError:
            continue
        accepted += 1
        assert all(DATA_FILE.fullmatch(file.name) for file in manifest.files)
    assert accepted, "some changes, as of a letter in a name, are valid content"


# Names


@given(st.integers(0, 10**18 - 1))
def test_steps_and_their_directories(step: int) -> None:
    name = step_dir(step)
    assert len(name) >= len("iter_0000000")
    assert parse_step_dir(name) == step
    assert parse_saving_dir(saving_dir(step, "a1B2")) == (step, "a1B2")
    assert parse_step_dir(saving_dir(step, "a1")) is None


@pytest.mark.parametrize(
    "name",
    ["iter_1", "iter_00000001", "iter_0000001 ", "iter_000000x", "xiter_0000001", "iter_-000001",
     "iter_0000001\n", "iter_\u0661\u0661\u0661\u0661\u0661\u0661\u0661", ".saving-iter_0000001-a"],
)  # fmt: skip
def test_names_that_are_no_steps(name: str) -> None:
    assert parse_step_dir(name) is None


def test_impossible_names_are_refused() -> None:
    for step in (-1, 10**18):
        with pytest.raises(StorageError, match="step"):
            step_dir(step)
    for save_id in ("", "a/b", "a-b", "x" * 65, ".." + "/"):
        with pytest.raises(StorageError, match="save id"):
            saving_dir(1, save_id)
    assert parse_saving_dir(".saving-iter_1-a") is None
    assert data_file(3) == "data/00003.safetensors"
    assert DATA_FILE.fullmatch(data_file(123456))


def test_only_committed_steps_are_listed(tmp_path: PosixStorage) -> None:
    store = PosixStorage(tmp_path)  # type: ignore[arg-type]
    assert list_steps(store) == []
    assert latest_step(store) is None
    for step in (120, 7, 100):
        made = make({})
        made.manifest = msgspec.structs.replace(made.manifest, step=step)
        write(store, made)
    store.make_dir("iter_0000130")  # no manifest
    store.write_file("iter_0000140", b"")  # not a directory
    write(store, make({}), directory=saving_dir(150, "abc"))  # not renamed
    write(store, make({}), directory="iter_160")  # not a step's name
    store.write_file("latest_checkpointed_iteration.txt", b"100\n")
    (store.root / "iter_0000170").symlink_to(store.root / "iter_0000120")
    assert list_steps(store) == [7, 100, 120]
    assert latest_step(store) == 120


def test_steps_that_go_while_they_are_listed_hide_no_newer_one(tmp_path: Path) -> None:
    """O9: a run that always has a checkpoint is never found empty, nor at an older step."""
    other = PosixStorage(tmp_path)

    def commit(step: int) -> None:
        made = make({})
        made.manifest = msgspec.structs.replace(made.manifest, step=step)
        write(other, made)

    class RemovedMeanwhile(PosixStorage):
        num_left = 3

        def list(self, path: str) -> list[str]:
            names = super().list(path)
            if self.num_left and path == "":
                self.num_left -= 1
                newest = max(map(parse_step_dir, names))
                commit(newest + 1)
                other.remove_tree(step_dir(newest))
            return names

    commit(1)
    commit(2)
    assert list_steps(RemovedMeanwhile(tmp_path)) == [1, 5]
    storage = RemovedMeanwhile(tmp_path)
    storage.num_left = 1000
    with pytest.raises(StorageError, match="removed faster than that"):
        latest_step(storage)

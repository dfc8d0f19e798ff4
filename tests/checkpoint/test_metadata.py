"""A user's own JSON object: what comes back, what is refused, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import Checkpointer, HoldfastError, Layout, ProcessGroups
from holdfast.cli.main import main
from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.digest import digest128
from holdfast.format.manifest import (
    MAX_METADATA_NBYTES,
    METADATA_PART,
    decode_manifest,
    encode_manifest,
    encode_metadata,
)
from tests.harness import RankContext, run_ranks

STATE: dict[str, object] = {"t": {"x": torch.ones(4)}, "progress": {"step": 3}}
MINE = {"commit": "3f2a", "loss": 1.25, "tags": ["a", None, True], "$x": {"": 2**70}}

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def sealed(body: bytes) -> bytes:
    return body + b',"digest":"' + digest128(body).encode() + b'"}\n'


@pytest.fixture
def manifest(tmp_path: Path) -> bytes:
    Checkpointer(tmp_path).save(1, STATE)
    return (tmp_path / "iter_0000001" / "manifest.json").read_bytes()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(metadata=st.dictionaries(st.text(), _JSON, max_size=4))
def test_any_json_comes_back_and_nothing_else_changes(
    manifest: bytes, metadata: dict[str, Any]
) -> None:
    plain = decode_manifest(manifest)
    given_ = msgspec.structs.replace(plain, metadata=metadata)
    data = encode_manifest(given_)
    found = decode_manifest(data)
    assert found == given_
    assert repr(found.metadata) == repr(metadata)
    stored = json.loads(data)["parts"]
    assert (METADATA_PART in stored) == bool(metadata)
    assert "metadata" not in json.loads(data)


def test_without_metadata_no_byte_is_other_than_before(manifest: bytes) -> None:
    assert encode_manifest(decode_manifest(manifest)) == manifest
    assert METADATA_PART.encode() not in manifest


def test_what_is_given_is_reported_by_load_inspect_ls_and_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE, metadata=MINE)
        checkpointer.save_async(3, STATE, metadata={"n": 3}).result(60)
        for step, metadata in ((1, {}), (2, MINE), (3, {"n": 3})):
            report = checkpointer.load(STATE, step=step)
            assert report.metadata == metadata
            assert report.not_requested == ()
            everything = checkpointer.load_all(step=step)
            assert (everything.metadata, set(everything.values)) == (metadata, set(STATE))
            info = checkpointer.inspect(step)
            assert (info.step, info.metadata, set(info.parts)) == (step, metadata, set(STATE))
            assert (info.num_tensors, info.total_nbytes) == (1, 16)
    assert main(["verify", f"{tmp_path}/iter_0000002"]) == 0
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    assert "commit=3f2a, loss=1.25" in capsys.readouterr().out
    assert main(["ls", "--json", str(tmp_path)]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step["metadata"] for step in steps] == [{}, MINE, {"n": 3}]
    assert main(["show", f"{tmp_path}/iter_0000002"]) == 0
    assert "metadata   commit=3f2a, loss=1.25" in capsys.readouterr().out
    assert main(["show", "--json", f"{tmp_path}/iter_0000002"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["metadata"], shown["parts"]) == (MINE, list(STATE))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ([1], "must be a dict, got list"),
        ({"a": {1, 2}}, "cannot be written as JSON"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        ({"a": torch.ones(1)}, "cannot be written as JSON"),
        ({"a": (1, 2)}, "lists instead of tuples"),
        ({1: 2}, "strings as keys"),
        ({"a": "x" * MAX_METADATA_NBYTES}, "the limit is 65,536"),
    ],
)
def test_what_json_does_not_hold_is_refused_before_anything_is_written(
    tmp_path: Path, metadata: Any, text: str
) -> None:
    checkpointer = Checkpointer(tmp_path / "root")
    for save in (checkpointer.save, checkpointer.save_async):
        with pytest.raises(ConfigError, match=text):
            save(1, STATE, metadata=metadata)
    assert not (tmp_path / "root").exists()


def test_none_and_an_empty_object_are_none(tmp_path: Path) -> None:
    assert encode_metadata({}) == b""
    with Checkpointer(tmp_path) as checkpointer:
        for step, metadata in ((1, None), (2, {})):
            checkpointer.save(step, {"t": {"x": 1}}, metadata=metadata)
            assert checkpointer.inspect(step).metadata == {}


@pytest.mark.parametrize(
    "node",
    [b"3", b"[]", b'{"$":"tuple","v":[]}', b'{"$":"tensor","k":"t.x"}', b'{"a":{"$":"tensor"}}',
     b'{"a":{"$":"float","v":"nan"}}', b'{"a":{"$":"codec","n":"x","v":1}}'],
)  # fmt: skip
def test_a_stored_node_that_is_no_json_object_is_corruption(manifest: bytes, node: bytes) -> None:
    body = manifest[: manifest.rindex(b',"digest":')]
    bad = body.replace(b'"parts":{', b'"parts":{"$metadata":' + node + b",", 1)
    assert bad != body
    with pytest.raises(CorruptionError, match=r"\$metadata"):
        decode_manifest(sealed(bad))
    named = body.replace(b'"parts":{', b'"metadata":{"a":1},"parts":{', 1)
    with pytest.raises(CorruptionError, match="metadata"):
        decode_manifest(sealed(named))  # no member of that name: older readers refuse one, too


def give_different(context: RankContext, root: str) -> list[str]:
    found = []
    with ProcessGroups.create(Layout(dp=2), timeout_s=30) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        state = {"progress": {"step": 1}}
        for metadata in ({"rank": context.rank}, {"a": 1} if context.rank else None, {1: 1}):
            for save in (checkpointer.save, checkpointer.save_async):
                try:
                    save(1, state, metadata=metadata)  # type: ignore[arg-type]
                except HoldfastError as error:
                    found.append(f"{type(error).__name__}: {error}")
        checkpointer.save(1, state, metadata={"same": [1, 2]})
        found.append(json.dumps(checkpointer.load({"progress": {}}).metadata))
        checkpointer.close()
    return found


def test_ranks_must_give_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(2, give_different, str(tmp_path)).results
    assert first == second
    assert all("PlanError" in text and "disagree on metadata" in text for text in first[:4])
    assert all(text.startswith("ConfigError") for text in first[4:6])
    assert first[6:] == ['{"same": [1, 2]}']

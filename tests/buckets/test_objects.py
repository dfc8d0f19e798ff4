"""Object stores: the contract over memory and S3, and what only they do."""

from __future__ import annotations

import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, ProcessGroups
from holdfast.checkpoint import RankLog
from holdfast.cli.main import main
from holdfast.errors import ConfigError, StorageError
from holdfast.storage import Storage, is_url
from tests.storage.contract import StorageContract

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.server import new_bucket, open_uploads


class TestMemory(StorageContract):
    """In the memory of this process."""

    is_tree = False
    shows_open_files = False

    @pytest.fixture
    def storage(self) -> Storage:
        return ObjectStorage(f"memory://{secrets.token_hex(8)}/run")


class TestS3(TestMemory):
    """By HTTP, from a server with conditional puts."""

    @pytest.fixture
    def storage(self, s3: str) -> Storage:
        return ObjectStorage(f"s3://{new_bucket(s3)}/a/run")


@pytest.fixture
def store(s3: str) -> ObjectStorage:
    return ObjectStorage(f"s3://{new_bucket(s3)}/run", part_nbytes=5 << 20)


def test_a_large_file_is_uploaded_in_parts_and_read_by_ranges(store: ObjectStorage) -> None:
    payload = secrets.token_bytes(1 << 20) * 18 + b"end"
    store.make_dir("d")
    store.requests.clear()
    kept: list[bytearray] = []
    with store.create("d/f", nbytes=len(payload)) as sink:
        for start in range(0, len(payload), 3 << 20):
            # By turns from memory that may change at once, and from memory that stays.
            write = sink.write_kept if start % (6 << 20) else sink.write_at  # type: ignore[attr-defined]
            piece = bytearray(payload[start : start + (3 << 20)])
            kept.append(piece)
            write(start, memoryview(piece))
            if not start % (6 << 20):
                piece[:] = bytes(len(piece))
        sink.sync()
    assert store.requests["upload"] == 1
    buffer = bytearray(len(payload))
    store.readinto("d/f", memoryview(buffer))
    assert buffer == payload
    assert store.requests["get"] == 2 + 3  # the name, twice; ranges of 8 MiB


def test_a_save_that_fails_leaves_no_upload_open(store: ObjectStorage, s3: str) -> None:
    store.make_dir("d")

    def fail() -> None:
        with store.create("d/f", nbytes=20 << 20) as sink:
            sink.write_at(0, memoryview(bytes(12 << 20)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not store.exists("d/f")
    assert open_uploads(s3, store.url.split("/")[2]) == []


def test_pieces_out_of_order_and_holes_become_one_object(store: ObjectStorage) -> None:
    store.make_dir("d")
    with store.create("d/f", nbytes=12 << 20) as sink:
        sink.write_at(7 << 20, memoryview(b"b" * 10))
        sink.write_at(0, memoryview(bytes(5) + b"a" * 10))
        for start in (0, 14, 7 << 20):  # the bytes there would be lost without an error
            with pytest.raises(StorageError, match=r"d/f: the byte at offset .* written before"):
                sink.write_at(start, memoryview(b"x"))
    data = store.read("d/f")
    assert len(data) == 12 << 20
    assert data[:20] == bytes(5) + b"a" * 10 + bytes(5)
    assert data[(7 << 20) - 1 : (7 << 20) + 11] == b"\0" + b"b" * 10 + b"\0"


def test_a_sink_that_has_failed_is_never_whole() -> None:
    """P2: a caller that catches the first error does not take the second call for success."""
    store = ObjectStorage(f"memory://{secrets.token_hex(4)}")
    store.make_dir("d")

    def make(name: str, *pieces: tuple[int, bytes]) -> None:
        with store.create(name, nbytes=8) as sink:
            for start, piece in pieces:
                sink.write_at(start, memoryview(piece))
            store.write_file("d/f", b"mine")
            with suppress(StorageError):
                sink.sync()

    with pytest.raises(StorageError, match="d/f could not be written before"):
        make("d/f")
    assert store.read("d/f") == b"mine"
    with pytest.raises(StorageError, match="offset 2 was written before"):
        make("d/g", (1, b"aa"), (2, b"b"))
    assert not store.exists("d/g")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///run", "s4://bucket", "s3://user:secret@bucket/run", "s3://b/a/../x"]
)
def test_a_wrong_url_is_refused_without_quoting_a_password(url: str) -> None:
    with pytest.raises((ConfigError, StorageError)) as caught:
        ObjectStorage(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://user:pw@bucket/run", "has a user or password, which are given by the environment"),
        ("s3://bucket/run?region=x", r"has a '\?', which ends a URL; options are given to Obj"),
        ("s3://bucket/run#1", "has a '#', which ends a URL"),
        ("s3://bucket/a\tb", "has a control character"),
        ("s3://bucket/a\u00a0b", r"'s3://bucket/a\\xa0b' has .* sign that cannot be seen"),
        ("s3://bucket/run/.store/data", r"is inside of \.store, where a run keeps its data"),
        ("file:///data/run", "a directory is written as its path, without file:"),
        (
            "s3:bucket/run",
            "is not a whole URL: write s3://bucket/run; for a directory of this name write its abs",
        ),
        ("s3:///run", "is not a whole URL"),
        ("gs//bucket/run", "is not a whole URL: write gs://bucket/run"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(
    url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        Checkpointer(url)
    assert "pw" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_prefix_is_no_empty_run(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = f"s3://{new_bucket(s3)}"
    with Checkpointer(f"{bucket}/team/run", settle_s=0.0) as checkpointer:
        checkpointer.save(1, {"v": {"n": 1}})
    for words in (["ls"], ["prune", "--keep-last", "1", "--yes"], ["repair"]):
        assert main([words[0], f"{bucket}/tem/run", *words[1:]]) == 2
        assert f"nothing is at {bucket}/tem/run" in capsys.readouterr().err
        assert main([words[0], bucket, *words[1:]]) == 2
        assert f"{bucket} holds no checkpoints; below it are team/" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["a b/ü", "e\u0301/%20", "+&=;@!'()*~", '[]{}|\\^`"<>:,$'])
def test_any_sign_may_be_in_a_prefix(prefix: str) -> None:
    url = f"memory://{secrets.token_hex(8)}/{prefix}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        checkpointer.save(1, {"t": {"a": torch.zeros(3)}})
        checkpointer.save(1, {"t": {"a": torch.ones(3)}}, overwrite=True)
    storage = ObjectStorage(url)
    assert [key.split("/")[3] for key in storage._bucket.list_all(".store/data")] == ["data"]
    storage.remove_tree("iter_0000001")
    assert storage._bucket.list_all(".store/data") == {}


def test_what_is_wrong_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL is not a URL: write http://host:port"):
        ObjectStorage("s3://bucket/run")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-only")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
        ObjectStorage("s3://bucket/run")
    assert "AKIA-only" not in str(caught.value)
    # Not a directory `S3:` in the working directory.
    assert ObjectStorage("S3://bucket/run", secret_access_key="x").url == "s3://bucket/run"
    assert is_url("S3://bucket/run")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"holdfast\[cloud\]"):
        ObjectStorage("s3://bucket/run")


def test_what_needs_a_directory_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://refused/run"
    with pytest.raises(ConfigError, match=r"keep_image_s=60.*memory://refused/run"):
        Checkpointer(url, keep_image_s=60)
    with pytest.raises(ConfigError, match="rank log needs a directory, not s3://b/run"):
        RankLog(Path("s3://b/run"), groups=ProcessGroups.single())
    assert main(["faults", url]) == 2
    assert f"{url}: reports of faults are kept in directories" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Checkpointer("run", settle_s=0.0).save(1, {"t": {"a": torch.zeros(3)}})
    for words in (
        ["export", "run", "--tensor", "*", "--to", "s3://b/all.safetensors"],
        ["export", "run", "--tensor", "*", "--to", "s3://b/all"],
        ["view", "run", "--out", "s3://b/page.html"],
    ):  # a directory s3: would be made here, and the command report success
        assert main(words) == 2
        assert f"{words[-1]}: only holdfast's own format is written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_directory_never_imports_it(tmp_path: Path) -> None:
    script = (
        "import sys, holdfast.cli.main; holdfast.cli.main.main(['ls', sys.argv[1]]); "
        "assert not {'obstore', 'holdfast.storage.objects', 'torch'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr

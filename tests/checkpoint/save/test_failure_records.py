"""A failure record on storage becomes an error of the hierarchy, whatever name it holds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from holdfast import PosixStorage, StorageError
from holdfast.errors import CorruptionError, ErrorRecord, HoldfastError
from holdfast.writer.job import run_job
from holdfast.writer.records import FAILED_FILE, SaveHeader, WriteJob, seal

DIRECTORY = ".saving-iter_0000005-abc"
JOB = WriteJob(
    directory=DIRECTORY,
    position=1,
    rank=1,
    header=SaveHeader(
        step=5, save_id="abc", created="", holdfast="0", torch="0", overwrite=False
    ),
    plan_digest="0" * 32,
    block_nbytes=1 << 20,
    deadline_s=5.0,
)  # fmt: skip


def _run(root: Path, record: bytes) -> HoldfastError:
    """What the job of a rank that does not commit makes of the committer's failure record."""
    storage = PosixStorage(root)
    storage.make_dir(DIRECTORY)
    storage.write_file(f"{DIRECTORY}/{FAILED_FILE}", record)
    outcome = run_job(storage, JOB, memoryview(b""), plan=None)
    assert outcome.error is not None
    return outcome.error.to_error()


@pytest.mark.parametrize(
    "name",
    ["annotations", "HoldfastError", "errors", "__class__", "ValueError", "Mapping", "msgspec",
     "ErrorRecord", "_TYPES", "", "x" * 10_000],
)  # fmt: skip
def test_a_record_with_any_name_raises_an_error_of_the_hierarchy(tmp_path: Path, name: str) -> None:
    """`annotations` once left `run_job` as a TypeError, which never raises."""
    sealed = seal(msgspec.msgpack.encode({"error_type": name, "message": "the disk is full"}))
    error = _run(tmp_path, sealed)
    assert type(error) is HoldfastError
    assert "the disk is full" in str(error)


def test_a_record_of_a_known_class_is_raised_as_it(tmp_path: Path) -> None:
    record = ErrorRecord.of(StorageError("rank 3: the disk is full"))
    error = _run(tmp_path, seal(msgspec.msgpack.encode(record)))
    assert type(error) is StorageError
    assert str(error) == "rank 3: the disk is full"


@pytest.mark.parametrize("payload", [{"error_type": 5, "message": "x"}, [], {"message": "x"}, "x"])
def test_what_is_no_record_is_damage(tmp_path: Path, payload: object) -> None:
    assert type(_run(tmp_path, seal(msgspec.msgpack.encode(payload)))) is CorruptionError
    (tmp_path / "other").mkdir()
    assert type(_run(tmp_path / "other", b"not sealed")) is CorruptionError

"""Falling back to the last good checkpoint, and from one stored copy of a box to another."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from holdfast import (
    Checkpointer,
    ConfigError,
    CorruptionError,
    Layout,
    MismatchError,
    PosixStorage,
    ProcessGroups,
    Replicated,
    StorageError,
    Stored,
)
from holdfast.cli.main import main
from holdfast.cli.support.messages import EXIT_MISTAKE
from holdfast.format.digest import digest128
from holdfast.format.index import ChunkIndex, decode_index, encode_index
from holdfast.format.manifest import Manifest, decode_manifest, encode_manifest
from holdfast.retention.tags import set_tag
from tests.checkpoint.common import full, make_state
from tests.harness import RankContext, run_ranks

STEPS = (10, 20, 30)
LAYOUT = Layout(tp=2, dp=2)


def _values(step: int) -> dict[str, object]:
    return {"model": {"w": full(f"w{step}", (64, 64)), "b": torch.full((3,), float(step))}}


def _blank() -> dict[str, object]:
    return {"model": {"w": torch.zeros(64, 64), "b": torch.zeros(3)}, "values": {}}


def _save(context: RankContext, root: str) -> None:
    with (
        ProcessGroups.create(LAYOUT) as groups,
        Checkpointer(root, groups=groups, block_nbytes=4096) as checkpointer,
    ):
        for step in STEPS:
            checkpointer.save(step, {**_values(step), "values": {"step": step}})


def harm(root: Path, step: int, how: str) -> None:
    """Damage one checkpoint."""
    directory = root / f"iter_{step:07d}"
    data = max((directory / "data").iterdir(), key=lambda path: path.stat().st_size)
    if how == "flip":
        content = bytearray(data.read_bytes())
        content[-3] ^= 0x10
        data.write_bytes(content)
    elif how == "truncate":
        os.truncate(data, data.stat().st_size - 5)
    elif how == "remove":
        data.unlink()
    elif how == "manifest":
        path = directory / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"', 1))
    elif how == "index":
        path = directory / "index.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")


class _OneSided(PosixStorage):
    """A storage on which this rank alone cannot read data files of one step."""

    def __init__(
        self,
        root: str,
        step: int,
        error: StorageError | None = None,
        *,
        where: str = "data/",
    ) -> None:
        def observe(operation: str, path: str, start: int, nbytes: int) -> None:
            if operation == "read" and f"iter_{step:07d}/{where}" in path:
                raise error or StorageError(f"{path}: stale file handle")

        super().__init__(root, observer=observe)


def _fall(context: RankContext, root: str, cases: list[tuple[str, int]]) -> list[list[str]]:
    """Load every damaged root with fallback; steps given up, or the error."""
    found = []
    log = _Log()
    logging.getLogger("holdfast").addHandler(log)
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:
        for name, expected in cases:
            storage: PosixStorage = PosixStorage(f"{root}/{name}")
            if name == "one rank" and context.rank == 3:
                storage = _OneSided(f"{root}/{name}", 30)
            checkpointer = Checkpointer(storage, groups=groups)
            for exchange in (True, False):
                state = _blank()
                for tensor in state["model"].values():  # type: ignore[attr-defined]
                    tensor.fill_(float("nan"))
                log.lines.clear()
                report = checkpointer.load(state, max_fallbacks=None, exchange=exchange)
                assert report.step == expected
                assert report.values["values"] == {"step": expected}
                truth = _values(expected)["model"]
                for key, tensor in state["model"].items():  # type: ignore[attr-defined]
                    assert torch.equal(tensor, truth[key]), (name, key)  # type: ignore[index]
                given_up = [str(each.step) for each in report.fell_back]
                assert given_up == [str(s) for s in STEPS[::-1] if s > expected]
                assert all(each.why for each in report.fell_back)
                warned = [line for line in log.lines if "instead of a newer one" in line]
                assert len(warned) == (context.rank == 0 and bool(given_up)), log.lines
                assert all(
                    f"step {step} is damaged" in line for line in warned for step in given_up
                )
            found.append([each.why for each in report.fell_back])
    return found


class _Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_newest_good_checkpoint_is_loaded_on_all_ranks(tmp_path: Path) -> None:
    good = tmp_path / "good"
    run_ranks(4, _save, str(good))
    cases = [("good", 30)]
    for how in ("flip", "truncate", "remove", "manifest", "index"):
        shutil.copytree(good, tmp_path / how)
        harm(tmp_path / how, 30, how)
        cases.append((how, 20))
    shutil.copytree(good, tmp_path / "two")
    harm(tmp_path / "two", 30, "manifest")
    harm(tmp_path / "two", 20, "flip")
    shutil.copytree(good, tmp_path / "one rank")
    cases += [("two", 10), ("one rank", 20)]
    results = run_ranks(4, _fall, str(tmp_path), cases).results
    words = {"flip": "damaged", "truncate": "bytes", "manifest": "manifest.json"}
    words |= {"index": "index.safetensors", "remove": ".safetensors", "one rank": "stale"}
    for said in results:
        for (name, _), why in zip(cases, said, strict=True):
            assert words.get(name, "") in "".join(why)
            assert "rank 3" in why[0] if name == "one rank" else True


def _refused(context: RankContext, root: str) -> list[str]:
    """Load where one rank may not read a file of the newest step."""
    messages = []
    refusal = StorageError("Permission denied", details={"is_unknown": True})
    with ProcessGroups.create(LAYOUT, timeout_s=20) as groups:
        for rank, where in ((3, "data/"), (0, "manifest"), (2, "manifest")):
            storage = PosixStorage(root)
            if rank == context.rank:
                storage = _OneSided(root, 30, refusal, where=where)
            for max_fallbacks in (None, 0):
                with pytest.raises(StorageError, match="Permission denied") as caught:
                    Checkpointer(storage, groups=groups).load(_blank(), max_fallbacks=max_fallbacks)
                assert caught.value.details["failed_ranks"] == [rank]
                messages.append(str(caught.value))
    return messages


def test_what_one_rank_may_not_read_is_neither_damaged_nor_gone(tmp_path: Path) -> None:
    """P27: whichever rank and file it is, no rank takes an older step in its place."""
    run_ranks(4, _save, str(tmp_path))
    for messages in run_ranks(4, _refused, str(tmp_path)).results:
        assert not [text for text in messages if "damaged" in text or "was replaced" in text]


def test_a_step_that_may_not_be_read_stands_in_the_way_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P27: a step is loaded, shown, verified, copied and tagged by its number; none is guessed."""
    checkpointer = _alone(tmp_path / "run", *STEPS)
    open_, denied = os.open, {"iter_0000020"}

    def refuse(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if os.path.basename(path) in denied:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open_(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse)
    root = str(tmp_path / "run")
    for step in (10, 30):
        assert checkpointer.load(_blank(), step=step).step == step
        assert checkpointer.load(_blank(), step=step, source=root).step == step
        assert checkpointer.inspect(step).step == step
        set_tag(PosixStorage(root), "best", step=step)
        at = [root, "--step", str(step)]
        for command in (["show", *at], ["verify", *at], ["copy", *at, str(tmp_path / "copied")]):
            assert main(command) == 0, capsys.readouterr().err
    assert checkpointer.load(_blank()).step == 30
    with pytest.raises(StorageError, match="Permission denied"):
        set_tag(PosixStorage(root), "best", step=20)
    capsys.readouterr()
    assert main(["ls", root, "--json"]) == EXIT_MISTAKE
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(each["step"], "denied" in (each["problem"] or "")) for each in steps] == [
        (10, False), (20, True), (30, False),
    ]  # fmt: skip
    denied.add("iter_0000030")
    for step in (20, None):
        with pytest.raises(StorageError, match="Permission denied"):
            checkpointer.load(_blank(), step=step, max_fallbacks=2 if step is None else 0)


def _alone(root: Path, *steps: int) -> Checkpointer:
    checkpointer = Checkpointer(root, block_nbytes=4096)
    for step in steps:
        checkpointer.save(step, {**_values(step), "values": {"step": step}})
    return checkpointer


def test_how_many_may_be_tried_and_what_is_said_when_none_is_good(tmp_path: Path) -> None:
    checkpointer = _alone(tmp_path, *STEPS)
    for step, how in ((30, "flip"), (20, "remove")):
        harm(tmp_path, step, how)
    with pytest.raises(CorruptionError, match="step 30 is damaged"):
        checkpointer.load(_blank(), max_fallbacks=1)
    with pytest.raises(CorruptionError):
        checkpointer.load(_blank())
    assert checkpointer.load(_blank(), max_fallbacks=2).step == 10
    harm(tmp_path, 10, "manifest")
    with pytest.raises(CorruptionError) as caught:
        checkpointer.load(_blank(), max_fallbacks=None)
    for step in STEPS:
        assert f"step {step} is damaged" in str(caught.value)
    with pytest.raises(ConfigError, match="max_fallbacks"):
        checkpointer.load(_blank(), step=10, max_fallbacks=None)
    with pytest.raises(ConfigError, match="max_fallbacks"):
        checkpointer.load(_blank(), max_fallbacks=-1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="no committed checkpoint"):
        Checkpointer(tmp_path / "empty").load(_blank(), max_fallbacks=None)


def test_a_state_in_pieces_falls_back_once(tmp_path: Path) -> None:
    """O9: later loads of one version take the step that the first one has fallen back to.

    They took the newest, damaged or saved since, which `one_version` then refused.
    """
    checkpointer = _alone(tmp_path, 10, 20)
    harm(tmp_path, 20, "flip")
    model, values = _blank(), {"values": {"step": 0}}
    with checkpointer.one_version():
        report = checkpointer.load({"model": model["model"]}, max_fallbacks=1)
        assert (report.step, [each.step for each in report.fell_back]) == (10, [20])
        _alone(tmp_path, 30)
        report = checkpointer.load(values, max_fallbacks=1)
        assert (report.step, report.fell_back, report.values["values"]) == (10, (), {"step": 10})
        # Of the one version there is no older one.
        harm(tmp_path, 10, "flip")
        with pytest.raises(CorruptionError, match=r"no checkpoint .*: step 10 is damaged"):
            checkpointer.load({"model": model["model"]}, max_fallbacks=None)
    assert checkpointer.load(values, max_fallbacks=1).step == 30


def test_a_request_that_does_not_fit_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    checkpointer = _alone(tmp_path, 10)
    checkpointer.save(20, {"model": {"w": torch.zeros(3)}, "values": {}})
    with pytest.raises(MismatchError, match="shape"):
        checkpointer.load(_blank(), max_fallbacks=None)
    checkpointer.save(30, {**_values(30), "values": {}})
    harm(tmp_path, 30, "flip")
    with pytest.raises(MismatchError, match="step 30 is damaged"):
        checkpointer.load(_blank(), max_fallbacks=None)


def test_nothing_of_a_damaged_checkpoint_stays_behind(tmp_path: Path) -> None:
    """An older one without an entry that the damaged one has written is not taken."""
    num = 1 << 16  # large enough to be read on their own, one after the other
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10, {"m": {"a": torch.ones(num)}})
    checkpointer.save(30, {"m": {"b": torch.ones(num) * 3, "a": torch.ones(num) * 3}})
    data = next((tmp_path / "iter_0000030" / "data").iterdir())
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    for _ in range(2):
        state = {"m": {"a": torch.zeros(num), "b": torch.zeros(num)}}
        with pytest.raises(CorruptionError, match=r"lacks 1 entry.*m\.b"):
            checkpointer.load(state, max_fallbacks=None, allow_missing=["m.b"])
    fits = {"m": {"a": torch.zeros(num)}}
    report = checkpointer.load({"m": fits["m"], "n": {}}, max_fallbacks=None, allow_missing=["n"])
    assert report.step == 10
    assert torch.equal(fits["m"]["a"], torch.ones(num))


def with_copy(root: Path, step: int) -> None:
    """Give a checkpoint of one process a second copy of every row, in a file of its own."""
    directory = root / f"iter_{step:07d}"
    first = directory / "data" / "00000.safetensors"
    manifest = decode_manifest((directory / "manifest.json").read_bytes(), place="")
    index = decode_index((directory / "index.safetensors").read_bytes(), place="")
    shutil.copy(first, directory / "data" / "00001.safetensors")
    num = index.num_rows
    doubled = ChunkIndex(
        tensor=np.tile(index.tensor, 2),
        file=np.concatenate([index.file, index.file + 1]),
        offset=np.tile(index.offset, (2, 1)),
        extent=np.tile(index.extent, (2, 1)),
        start=np.tile(index.start, 2),
        nbytes=np.tile(index.nbytes, 2),
        copy=np.concatenate([index.copy, index.copy + 1]),
        holders=np.tile(index.holders, 2),
        holder_ptr=index.holder_ptr,
        holder=index.holder,
        digest_ptr=np.concatenate([index.digest_ptr, index.digest_ptr[1:] + len(index.digest)]),
        digest=np.tile(index.digest, 2),
    )
    data = encode_index(doubled)
    (directory / "index.safetensors").write_bytes(data)
    second = msgspec.structs.replace(manifest.files[0], name="data/00001.safetensors", writer=1)
    totals = msgspec.structs.replace(
        manifest.totals, stored_nbytes=2 * manifest.totals.stored_nbytes
    )
    info = msgspec.structs.replace(
        manifest.index, nbytes=len(data), digest=digest128(data), num_rows=2 * num
    )
    changed: Manifest = msgspec.structs.replace(
        manifest, files=[manifest.files[0], second], index=info, totals=totals
    )
    (directory / "manifest.json").write_bytes(encode_manifest(changed))


def _copies(context: RankContext, root: str) -> list[tuple[int, tuple[str, ...], int, int]]:
    found = []
    log = _Log()
    logging.getLogger("holdfast").addHandler(log)
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for name in ("good", "flip", "remove"):
            for exchange in (True, False):
                log.lines.clear()
                state = {"model": {k: Replicated(torch.zeros_like(v)) for k, v in _good().items()}}
                report = Checkpointer(f"{root}/{name}", groups=groups).load(
                    state, exchange=exchange, ignore_unexpected=True
                )
                for key, value in _good().items():
                    assert torch.equal(state["model"][key].local, value)
                replaced = sum("replaced by good ones" in line for line in log.lines)
                found.append((report.num_opens, report.replaced, report.nbytes_read, replaced))
        state = {"model": {k: Replicated(torch.zeros_like(v)) for k, v in _good().items()}}
        with pytest.raises(CorruptionError, match=r"model\.w"):
            Checkpointer(f"{root}/both", groups=groups).load(state)
    return found


def _good() -> dict[str, torch.Tensor]:
    model = _values(10)["model"]
    assert isinstance(model, dict)
    return model


def test_a_damaged_copy_is_replaced_with_one_warning(tmp_path: Path) -> None:
    """B8: each rank reads its own copy; a bad one costs a warning; all bad fail all ranks."""
    good = tmp_path / "good"
    _alone(good, 10)
    with_copy(good, 10)
    for how in ("flip", "remove", "both"):
        shutil.copytree(good, tmp_path / how)
    data = tmp_path / "flip" / "iter_0000010" / "data" / "00001.safetensors"
    content = bytearray(data.read_bytes())
    content[5000] ^= 2
    data.write_bytes(content)
    (tmp_path / "remove" / "iter_0000010" / "data" / "00001.safetensors").unlink()
    for number in (0, 1):
        path = tmp_path / "both" / "iter_0000010" / "data" / f"0000{number}.safetensors"
        content = bytearray(path.read_bytes())
        content[5000] ^= 2
        path.write_bytes(content)
    first, second = run_ranks(2, _copies, str(tmp_path)).results
    total = sum(tensor.nbytes for tensor in _good().values())
    for found in (first, second):
        assert found[0][:2] == (1, ())
        assert found[1] == (1, (), total, 0)
    # Each has a copy in its own file, and receives none of it (R4).
    assert first[0][2] == second[0][2] == total
    assert not any(replaced for _, replaced, _, _ in first)
    for opens, replaced, _, warnings in second[3:6:2]:
        assert replaced
        assert "00001.safetensors" in replaced[0]
        assert warnings == 1
        assert opens <= 2


def test_plain_values_fall_back_too(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, make_state(Layout(), 0))
    checkpointer.save(2, {"values": {"step": 9, "t": torch.ones(1)}})
    harm(tmp_path, 2, "manifest")
    report = checkpointer.load({"values": Stored()}, max_fallbacks=None)
    assert (report.step, [each.step for each in report.fell_back]) == (1, [2])
    assert "newer checkpoints given up" in report.summary()

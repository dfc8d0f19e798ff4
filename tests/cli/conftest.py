"""A directory of checkpoints, and the command run inside this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.main import main
from holdfast.storage import PosixStorage
from tests.format.making import Made, make, sample_tensors, write


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command answered: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Holdfast = Callable[..., CommandResult]


@pytest.fixture
def holdfast(capsys: pytest.CaptureFixture[str]) -> Holdfast:
    def run(*words: object) -> CommandResult:
        capsys.readouterr()
        code = main([str(word) for word in words])
        streams = capsys.readouterr()
        return CommandResult(code=code, out=streams.out, err=streams.err)

    return run


def at_step(made: Made, step: int) -> Made:
    made.manifest = msgspec.structs.replace(made.manifest, step=step)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 5 and 120, a save under way, and a directory without a manifest."""
    store = PosixStorage(tmp_path / "run")
    parts: dict[str, Any] = {
        "model": [{"$": "tensor", "k": "model.weight"}, {"$": "tensor", "k": "model.norm"}],
        "progress": {"step": 120, "best": {"$": "float", "v": "-inf"}, "seen": [1, 2, 3]},
    }  # fmt: skip
    for step in (5, 120):
        write(store, at_step(make(sample_tensors(), parts=parts), step))
    store.make_dir(".saving-iter_0000130-ab12")
    store.make_dir("iter_0000140")
    store.write_file("latest_checkpointed_iteration.txt", b"120\n")
    return store.root

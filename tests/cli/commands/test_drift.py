"""Commands that read tensors, where the stored copies of one differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.arrays.boxes import Box
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast
from tests.format.making import Chunk, Tensor, make, random_tensor, write


def _tensors(*, drifts: bool) -> dict[str, Tensor]:
    """A norm in two copies and a tensor without any."""
    whole = Box((0,), (9,))
    other = bytes(36) if drifts else None
    copies = [Chunk(file=0, box=whole), Chunk(file=1, box=whole, copy=1, content=other)]
    return {
        "model.norm": random_tensor(1, dtype="F32", shape=(9,), chunks=copies),
        "model.head": random_tensor(2, dtype="F32", shape=(9,)),
    }


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose copies are equal, and one of which they differ."""
    parts: dict[str, Any] = {
        part: [{"$": "tensor", "k": f"model.{part}"}] for part in ("norm", "head")
    }
    for name in ("equal", "drifted"):
        made = make(_tensors(drifts=name == "drifted"), step=3, parts=parts)
        write(PosixStorage(tmp_path / name), made)
    return tmp_path / "equal", tmp_path / "drifted"


def test_what_has_no_one_value_is_not_shown_as_if_it_had(
    holdfast: Holdfast, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    """B8: `export`, `diff` and `show --stats` end with 1 and name tensor and files; other tensors
    are in nobody's way."""
    equal, drifted = roots
    to = tmp_path / "out.safetensors"
    for words in (
        ("export", drifted, "--tensor", "*", "--to", to),
        ("diff", equal, drifted),
        ("diff", drifted, equal, "--tensor", "model.norm"),
        ("diff", drifted, drifted),
        ("show", drifted, "--tensor", "model.*", "--stats"),
    ):
        result = holdfast(*words)
        assert result.code == 1, words
        assert "model.norm" in result.err
        assert "copies differ" in result.err
        assert "data/00001" in result.err
        assert "memory" not in result.err
    assert not to.exists()
    for words in (
        ("export", drifted, "--tensor", "model.head", "--to", to),
        ("diff", equal, drifted, "--tensor", "model.head"),
        ("show", drifted, "--tensor", "model.head", "--stats"),
        ("show", drifted, "--tensor", "*", "--part", "head", "--stats"),
        ("show", drifted, "--tensor", "*"),
        ("diff", equal, equal),
    ):
        assert holdfast(*words).code == 0, words


def test_a_kind_of_file_that_is_not_written_is_refused(
    holdfast: Holdfast, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in ("out.pt", "out.npz", "out.npy", "out.safetensor"):
        result = holdfast("export", roots[0], "--tensor", "*", "--to", tmp_path / name)
        assert result.code == 2
        assert Path(name).suffix in result.err
        assert ".safetensors" in result.err
        assert not (tmp_path / name).exists()
    for name in ("run.2", "plain"):
        assert holdfast("export", roots[0], "--tensor", "*", "--to", tmp_path / name).code == 0

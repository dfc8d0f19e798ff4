"""What the commands print fits a terminal of 80 columns, and nothing of it is lost."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.arrays.boxes import Box
from holdfast.format.manifest import CutInfo, LayoutInfo, PlacementInfo
from holdfast.storage import PosixStorage
from tests.cli.conftest import CommandResult, Holdfast, at_step
from tests.format.making import Chunk, Made, make, random_tensor, write

STEM = "model.language_model.decoder.layers.{}.mixture_of_experts.shared_expert.linear_{}.weight"
LONG_TAG = "the-best-one-by-the-loss-of-the-validation-set-of-the-second-stage"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
NUMBER = re.compile(r"[-+]?[0-9][0-9,.:e+%-]*")


def wide_made(step: int, *, seed: int = 0) -> Made:
    """Long keys, cut many times on 16 files, with copies; a long layout and metadata."""
    cut = [Chunk(file=f, box=Box((0, 64 * f), (1, 64))) for f in range(16)]
    cut += [Chunk(file=(f + 1) % 16, box=Box((0, 64 * f), (1, 64)), copy=1) for f in range(16)]
    keys = [STEM.format(i, name) for i in range(2) for name in ("query_key_value", "dense")]
    tensors = {
        key: random_tensor(seed + i, dtype="F64", shape=(1, 1024), chunks=cut)
        for i, key in enumerate(keys)
    }
    parts: dict[str, Any] = {
        "model": [{"$": "tensor", "k": key} for key in keys],
        "a_part_of_the_state_with_a_long_name": {
            "learning_rate": 0.0001234567 + seed,
            "step": step,
        },
    }
    made = at_step(make(tensors, parts=parts), step)
    layout = LayoutInfo(
        name="language_model", axes={"tp": 2, "ep": 2, "dp": 4, "pp": 2}, order="tp-cp-ep-dp-pp",
        ranks=[*range(16)],
    )  # fmt: skip
    placements = [PlacementInfo.of([CutInfo(1, "dp"), CutInfo(0, "tp"), CutInfo(0, "pp")])]
    made.manifest = msgspec.structs.replace(
        made.manifest, layouts=[layout], placements=placements,
        metadata={"commit": "0123456789abcdef0123456789abcdef01234567", "loss": 1.234567},
    )  # fmt: skip
    return made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs that differ, leftovers, a tag, and a run with damage."""
    for name, seed in (("one", 0), ("other-run-with-a-long-name-" + 40 * "x", 10)):
        store = PosixStorage(tmp_path / name)
        for step in (100_000, 1_200_000):
            write(store, wide_made(step, seed=seed))
        store.make_dir(".saving-iter_1200001-ab12cd34ef56")
    write(PosixStorage(tmp_path / "damaged"), wide_made(1_000_000))
    file = tmp_path / "damaged/iter_1000000/data/00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    (tmp_path / "damaged/iter_0000002").mkdir()
    (tmp_path / "damaged/iter_0000002/manifest.json").write_text("{" + 100 * "x")
    return tmp_path


def headings(text: str) -> set[str]:
    """The words of all headings of tables that are wide enough for one line of them."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if set(line.strip()) == {"─"}]
    return {word for number in rules for word in lines[number - 1].split()}


def on_terminal(holdfast: Holdfast, width: int, *words: object) -> CommandResult:
    """Run a command whose standard output is a terminal of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("COLUMNS", f"{width}"), ("TERM", "xterm"), ("NO_COLOR", "1")):
            patch.setenv(name, value)
        patch.setattr(sys.stdout, "isatty", lambda: True)
        result = holdfast(*words)
    return dataclasses.replace(result, out=ANSI.sub("", result.out))


def test_each_heading_and_number_is_there_on_80_columns(holdfast: Holdfast, runs: Path) -> None:
    """Every table of every command has the numbers and headings that it has in a wide pipe."""
    one, other = runs / "one", next(runs.glob("other*"))
    assert holdfast("tag", one, 100_000, LONG_TAG).code == 0
    commands: list[tuple[int, list[object]]] = [
        (0, ["ls", one]),
        (0, ["ls", runs]),
        (1, ["ls", runs / "damaged"]),
        (0, ["show", one]),
        (0, ["show", one, "--files"]),
        (0, ["show", one, "--locality"]),
        (0, ["show", one, "--tensor", "*dense*", "--stats"]),
        (0, ["show", one, "--values"]),
        (0, ["verify", one]),
        (1, ["verify", runs / "damaged", "--step", "1000000"]),
        (1, ["diff", one, other]),
        (1, ["diff", one, other, "--tensor", "*dense*"]),
        (0, ["prune", one, "--keep-last", "1", "--dry-run"]),
        (0, ["tag", one]),
        (0, ["repair", one, "--dry-run"]),
    ]
    for code, words in commands:
        wide, narrow = holdfast(*words), on_terminal(holdfast, 80, *words)
        assert (wide.code, narrow.code) == (code, code), (words, wide.err)
        text = re.sub(r"in [0-9.]+ s", "", wide.out)  # how long a command took differs
        tokens = Counter(narrow.out.split())
        lost = headings(wide.out) - set(tokens)
        assert not lost, (words, lost, narrow.out)
        numbers = Counter(word for word in text.split() if NUMBER.fullmatch(word))
        assert not numbers - tokens, (words, numbers - tokens, narrow.out)
        assert "…" not in narrow.out.replace(", …", "").replace("… and", ""), (words, narrow.out)
        rules = [line for line in narrow.out.splitlines() if "──" in line and "└" not in line]
        assert max(map(len, rules), default=0) <= 80, words


def test_where_a_table_has_no_room_its_rows_are_lines(holdfast: Holdfast, runs: Path) -> None:
    """On 40 columns seven columns of numbers do not fit: each cell comes with its heading."""
    result = on_terminal(holdfast, 40, "show", runs / "one", "--locality")
    assert "copies that are stored" in result.out
    assert "times stored: 2" in result.out
    assert "size: 32.8 kB" in result.out

"""`holdfast ls`, `show` and `verify` as a person and as a script use them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast, at_step
from tests.format.making import make, random_tensor, sample_tensors, write


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def assert_one_clear_line(err: str) -> None:
    assert err.startswith("holdfast: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


# ls


def test_ls_lists_steps_the_latest_and_leftovers(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("ls", root)
    assert result.code == 0
    lines = result.out.splitlines()
    assert sum("2026-01-02 03:04:05" in line for line in lines) == 2
    assert [line.split()[0] for line in lines if "latest" in line] == ["120"]
    assert "model tp2 on 2 ranks" in result.out
    assert ".saving-iter_0000130-ab12" in result.out
    assert "iter_0000140" in result.out
    assert "says" not in result.out


def test_ls_as_json(holdfast: Holdfast, root: Path) -> None:
    found = holdfast("ls", root, "--json").json
    assert found["latest"] == found["pointer"] == 120
    assert [step["step"] for step in found["steps"]] == [5, 120]
    assert found["steps"][0]["num_tensors"] == 7
    assert found["steps"][0]["stored_nbytes"] == 501
    assert [left["name"] for left in found["uncommitted"]] == [
        ".saving-iter_0000130-ab12", "iter_0000140",
    ]  # fmt: skip
    assert found["uncommitted"][0]["step"] == 130


def test_ls_says_when_the_pointer_is_wrong(holdfast: Holdfast, root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("130\n")
    assert "says 130; the newest committed step is 120" in holdfast("ls", root).out
    for nonsense in (b"release\n", b"\xff", b""):
        (root / "latest_checkpointed_iteration.txt").write_bytes(nonsense)
        assert holdfast("ls", root).code == 0


def test_ls_names_a_damaged_manifest_and_lists_the_others(holdfast: Holdfast, root: Path) -> None:
    flip(root / "iter_0000005" / "manifest.json", 100)
    result = holdfast("ls", root)
    assert result.code == 1
    assert "damaged" in result.out
    assert "120" in result.out
    assert holdfast("ls", root, "--json").json["steps"][0]["damage"]


def test_ls_of_nothing(holdfast: Holdfast, tmp_path: Path) -> None:
    result = holdfast("ls", tmp_path)
    assert result.code == 0
    assert "no committed checkpoint" in result.out
    assert holdfast("ls", tmp_path, "--json").json["latest"] is None


# show


def test_show_takes_the_newest_step_of_a_root(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("show", root)
    assert result.code == 0
    for text in ("iter_0000120", "model tp2 on 2 ranks (0, 1)", "7 tensors", "model.weight",
                 "5 x 7", "BF16", "progress"):  # fmt: skip
        assert text in result.out
    assert holdfast("show", root / "iter_0000005", "--json").json["step"] == 5
    assert holdfast("show", root, "--step", "5", "--json").json["step"] == 5


def test_show_as_json(holdfast: Holdfast, root: Path) -> None:
    found = holdfast("show", root, "--files", "--values", "--json").json
    rows = {row["key"]: row for row in found["tensors"]}
    weight, norm = rows["model.weight"], rows["model.norm"]
    assert (weight["num_chunks"], weight["num_copies"], weight["writers"]) == (4, 1, [0, 1])
    assert (norm["num_chunks"], norm["num_copies"], norm["part"]) == (1, 2, "model")
    assert [file["writer"] for file in found["files"]] == [0, 1]
    assert found["values"]["progress"]["step"] == 120
    assert found["totals"]["num_rows"] == 11


def test_show_narrows_by_key_pattern_and_part(holdfast: Holdfast, root: Path) -> None:
    def keys(*words: object, code: int = 0) -> list[str]:
        result = holdfast("show", root, *words, "--json")
        assert result.code == code
        return [] if code else [row["key"] for row in result.json["tensors"]]

    assert keys("--tensor", "model.norm") == ["model.norm"]
    assert keys("--tensor", "*.m*") == ["model.mask", "optimizer.moment"]
    assert keys("--tensor", "model.[n]*", code=2) == []
    assert keys("--part", "model") == ["model.weight", "model.norm"]
    tied: dict[str, Any] = {"$": "tensor", "k": "model.norm"}
    parts = {"model": [tied], "average": {"norm": tied}}
    write(PosixStorage(root), at_step(make(sample_tensors(), parts=parts), 121))
    for part in parts:  # it was in none but the last of them
        assert keys("--part", part) == keys("--part", part, "--tensor", "*norm") == ["model.norm"]


def test_show_values_as_a_tree(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("show", root, "--values", "--part", "progress")
    assert "step: 120" in result.out
    assert "best: -inf" in result.out
    assert "seen: [1, 2, 3]" in result.out
    assert "model.weight" not in result.out


def test_show_files(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("show", root, "--files")
    assert "data/00001.safetensors" in result.out
    assert "tp=1" in result.out


def test_show_reads_no_data_file_without_stats(holdfast: Holdfast, root: Path) -> None:
    for path in (root / "iter_0000120" / "data").iterdir():
        path.unlink()
    assert holdfast("show", root, "--files", "--values").code == 0
    result = holdfast("show", root, "--tensor", "model.weight", "--stats")
    assert result.code == 1
    assert_one_clear_line(result.err)
    assert "model.weight" in result.err


def test_show_lists_only_so_many_tensors_unless_asked(holdfast: Holdfast, tmp_path: Path) -> None:
    store = PosixStorage(tmp_path)
    tensors = {f"layer.{i}": random_tensor(i, dtype="U8", shape=(2,)) for i in range(60)}
    write(store, at_step(make(tensors), 1))
    result = holdfast("show", tmp_path)
    assert "10 more tensors" in result.out
    assert "layer.59" not in result.out
    assert "layer.59" in holdfast("show", tmp_path, "--tensor", "*").out


def test_a_hostile_key_cannot_steer_the_terminal(holdfast: Holdfast, tmp_path: Path) -> None:
    store = PosixStorage(tmp_path)
    key = "w\x1b[2J[red]x[/red]\n\x9b2J\u202e"
    tensors = {key: random_tensor(1, dtype="U8", shape=(2,))}
    parts = {"p\x1b[2J": {key: "\x1b[2J", "t": {"$": "tensor", "k": key}}}
    write(store, at_step(make(tensors, parts=parts), 1))
    for words in (["show"], ["show", "--values"], ["show", "--tensor", "w*", "--stats"], ["ls"]):
        result = holdfast(words[0], tmp_path, *words[1:])
        assert result.code == 0
        assert all(line.isprintable() for line in result.out.splitlines())
    result = holdfast("show", tmp_path, "--values", "--json")
    assert all(line.isprintable() for line in result.out.split("\n"))
    assert result.json["tensors"][0]["key"] == key
    assert r"w\x1b[2J[red]x[/red]\n" in holdfast("show", tmp_path).out
    flip(tmp_path / "iter_0000001/data/00000.safetensors", 4096)
    result = holdfast("verify", tmp_path)
    assert result.code == 1
    assert "\x1b" not in result.out


# verify


def test_verify_says_whole(holdfast: Holdfast, root: Path) -> None:
    result = holdfast("verify", root)
    assert result.code == 0
    assert "iter_0000120: whole" in result.out
    found = holdfast("verify", root, "--step", "5", "--json").json
    assert found["whole"] is True
    assert found["damages"] == []
    assert found["nbytes"] > 3 * 4096


def test_verify_names_each_damage(holdfast: Holdfast, root: Path) -> None:
    place = root / "iter_0000120"
    flip(place / "data/00000.safetensors", 4096)
    (place / "data/00001.safetensors").unlink()
    (place / "stray").write_bytes(b"")
    result = holdfast("verify", root)
    assert result.code == 1
    assert "3 damages" in result.out
    for text in (
        "data/00000.safetensors",
        "4096",
        "model.phase",
        "data/00001.safetensors",
        "stray",
    ):
        assert text in result.out
    found = holdfast("verify", place, "--json")
    assert found.code == 1
    assert found.json["whole"] is False
    first = found.json["damages"][0]
    assert (first["file"], first["offset"], first["key"]) == (
        "data/00000.safetensors", 4096, "model.phase",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["manifest.json", "index.safetensors"])
def test_damaged_records_are_damage_not_a_mistake(
    holdfast: Holdfast, root: Path, name: str
) -> None:
    flip(root / "iter_0000120" / name, -40)
    result = holdfast("verify", root)
    assert result.code == 1
    assert name in result.out
    result = holdfast("show", root)
    assert result.code == 1
    assert_one_clear_line(result.err)
    assert name in result.err


# Mistakes


def test_mistakes_are_one_line_and_code_2(holdfast: Holdfast, root: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases: list[tuple[list[object], str]] = [
        (["ls", tmp_path / "nothing"], "does not exist"),
        (["show", tmp_path / "nothing"], "does not exist"),
        (["verify", root / "latest_checkpointed_iteration.txt"], "in a format that is known"),
        (["show", empty], "neither a manifest.json nor an iter_*/manifest.json"),
        (["verify", empty], "neither a manifest.json nor an iter_*/manifest.json"),
        (["verify", root / ".saving-iter_0000130-ab12"], "a save that was not finished"),
        (["verify", root, "--step", "7"], "no committed step 7; it has 5, 120"),
        (["show", root / "iter_0000005", "--step", "120"], "the directory above"),
        (["show", root, "--tensor", "model.wieght"], "did you mean model.weight"),
        (["show", root, "--part", "optimiser"], "it has model, progress"),
        (["show", root, "--stats"], "--tensor"),
        (["ls", root / "iter_0000005"], "holdfast show"),
        (["show", root, "--stpe", "3"], "--step"),
        (["verify"], "path"),
    ]
    for words, text in cases:
        result = holdfast(*words)
        assert result.code == 2, words
        assert_one_clear_line(result.err)
        assert text.lower() in result.err.lower(), (words, result.err)
        assert result.out == ""


@pytest.mark.parametrize("verb", ["ls", "show", "verify"])
def test_the_verbs_never_import_torch_and_answer_at_once(verb: str, root: Path) -> None:
    program = (
        "import sys\n"
        "from holdfast.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'safetensors.torch', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, verb, str(root)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    # About 0.25 s on an idle machine; importing torch alone would take several seconds.
    assert time.monotonic() - began < 20

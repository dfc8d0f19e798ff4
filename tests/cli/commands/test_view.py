"""`holdfast view`: the page is one valid HTML file, fetches nothing, escapes keys, and is right."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.arrays.boxes import Box
from holdfast.cli.support.messages import in_bytes
from holdfast.format.manifest import CutInfo, PlacementInfo
from holdfast.format.reader import Snapshot
from holdfast.storage import PosixStorage
from tests.cli.conftest import Holdfast, at_step
from tests.format.making import Chunk, make, random_tensor, write

_VOID = {"meta", "input", "link", "br", "img", "hr"}
HOSTILE = [
    "model.</script><script>alert(1)</script>",
    'model."><img src=x onerror=alert(1)>',
    "model.'quote' & <!-- comment",
    "model.\u202egnp.evil",
    "model.größe.重み",
]


class Page(HTMLParser):
    """A page as a test reads it: elements, tables by id, scripts; fails on unbalanced tags."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.captions: list[str] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._table = ""
        self._in = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "table":
            self._table = str(attributes["id"])
            self.tables[self._table] = []
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if "script" in self._open:
            self.scripts[-1] += data
        elif "td" in self._open or "th" in self._open:
            self.tables[self._table][-1][-1] += data
        elif "caption" in self._open:
            self.captions.append(data)

    def column(self, table: str, heading: str) -> list[str]:
        rows = self.tables[table]
        return [row[rows[0].index(heading)] for row in rows[1:]]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Steps 2 and 4 of two ranks (tp=2): a cut tensor, a replicated one, one with two copies."""
    cut = [Chunk(file=f, box=Box((4 * f, 0), (4, 6)), holders=(f,)) for f in range(2)]
    by_tp = PlacementInfo.of([CutInfo(0, "tp")])
    both = [Chunk(file=0, box=Box((0,), (9,))), Chunk(file=1, box=Box((0,), (9,)), copy=1)]
    tensors = {
        f"model.{i}.w": replace(
            random_tensor(i, dtype="F32", shape=(8, 6), chunks=cut), placement=by_tp
        )
        for i in range(2)
    } | {
        "model.norm": random_tensor(2, dtype="F32", shape=(7,)),
        "model.twice": random_tensor(3, dtype="F32", shape=(9,), chunks=both),
    }
    parts: dict[str, Any] = {"model": [{"$": "tensor", "k": key} for key in tensors]}
    for step in (2, 4):
        write(PosixStorage(tmp_path / "run"), at_step(make(tensors, parts=parts), step))
    return tmp_path / "run"


def log(root: Path, rank: int, *events: dict[str, Any]) -> None:
    """Append events as `holdfast train` does."""
    (root / "events").mkdir(exist_ok=True)
    with (root / "events" / f"{rank:05d}.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"rank": rank, "time": 0, "path": "", "axes": {"tp": 2}} | event))
            file.write("\n")


def save_event(step: int, began: float, **phases: float) -> dict[str, Any]:
    return {"event": "save", "step": step, "began": began, "nbytes": 100, "phases": phases}


def view(holdfast: Holdfast, path: Path, *words: object) -> Page:
    out = path.parent / "page.html"
    result = holdfast("view", path, "--out", out, *words)
    assert result.code == 0, result.err
    assert str(out) in result.out
    return Page(out.read_text())


def test_the_page_needs_nothing_from_outside(holdfast: Holdfast, run_directory: Path) -> None:
    """No address, no element that fetches; the policy allows this one script and no other."""
    page = view(holdfast, run_directory, "--as", "tp=4")
    tags = Counter(tag for tag, _ in page.elements)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(tags)
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    text = (run_directory.parent / "page.html").read_text()
    namespace = "http://www.w3.org/2000/svg"  # a name, which nothing is fetched from
    assert not re.findall(r"https?://|//\w+\.\w+/|@import|url\(", text.replace(namespace, ""))
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_the_page_is_made_for_keyboard_and_screen_reader(
    holdfast: Holdfast, run_directory: Path
) -> None:
    """Landmarks, one main heading, a skip link, captions, scopes, names of regions and drawings."""
    log(run_directory, 0, save_event(4, 1.0, write=0.5, total=0.7))
    page = view(holdfast, run_directory)
    tags = Counter(tag for tag, _ in page.elements)
    ids = [str(a["id"]) for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for tag in ("header", "nav", "main", "footer", "h1", "noscript"):
        assert tags[tag] == 1, tag
    assert next(a for t, a in page.elements if t == "html")["lang"] == "en"
    first_link = next(a for t, a in page.elements if t == "a")
    assert first_link["class"] == "skip"
    for tag, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert (attributes.get(name) or ids[0]) in ids
        if tag == "a":
            assert str(attributes["href"]).removeprefix("#") in ids
        if tag == "th":
            assert attributes["scope"] in ("row", "col")
        if attributes.get("role") in ("region", "img"):
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")
        if attributes.get("role") == "region":
            assert attributes["tabindex"] == "0", "what scrolls is reached by keyboard"
    assert tags["caption"] == tags["table"] == len(page.tables) > 5
    assert "prefers-color-scheme: dark" in (run_directory.parent / "page.html").read_text()


def test_keys_cannot_become_markup(holdfast: Holdfast, tmp_path: Path) -> None:
    tensors = {key: random_tensor(i, dtype="F32", shape=(2,)) for i, key in enumerate(HOSTILE)}
    parts: dict[str, Any] = {
        "model": [{"$": "tensor", "k": key} for key in HOSTILE[1:]],
        "<b>part</b>": {"$": "tensor", "k": HOSTILE[0]},
    }
    made = make(tensors, parts=parts)
    made.manifest = msgspec.structs.replace(
        made.manifest, metadata={"note": "</dd><script>alert(2)</script>"}
    )
    write(PosixStorage(tmp_path / "run"), made)
    log(tmp_path / "run", 0, save_event(1, 1.0, **{"</svg><script>": 1.0}))
    page = view(holdfast, tmp_path / "run")
    tags = Counter(tag for tag, _ in page.elements)
    assert tags["script"] == 2
    assert not {"img", "b"} & set(tags)
    data = json.loads(page.scripts[0])
    keys = [tensor[0] for tensor in data["tensors"]]
    assert keys == [key.replace("\u202e", "\\u202e") for key in HOSTILE]
    assert "<b>part</b>" in data["parts"]
    assert "</dd><script>alert(2)</script>" in page.text
    assert "\u202e" not in (tmp_path / "page.html").read_text()


def test_planned_reads_and_copies_are_those_of_the_index(
    holdfast: Holdfast, run_directory: Path
) -> None:
    """Against a count by brute force over the index of who holds what in this small state."""
    page = view(holdfast, run_directory, "--step", "2", "--as", "tp=4")
    with Snapshot.open(PosixStorage(run_directory), "iter_0000002") as snapshot:
        index, tensors = snapshot.index, snapshot.manifest.tensors
        expected = np.zeros((2, 2), dtype=int)
        relaid = np.zeros((4, 2), dtype=int)
        for row in range(index.num_rows):
            key = tensors[int(index.tensor[row])].key
            file, nbytes = int(index.file[row]), int(index.nbytes[row])
            is_cut = key.endswith(".w")
            for rank in range(2):
                nearest = rank if key == "model.twice" else file
                expected[rank, file] += nbytes * (rank == file if is_cut else file == nearest)
            for rank in range(4):
                # Blocks of 64 bytes, of a chunk of 96: rows 0 and 1 end in the first one. Of two
                # copies in files that are open anyway ranks take turns.
                nearest = rank % 2 if key == "model.twice" else file
                block = 64 if rank % 2 == 0 else 96
                relaid[rank, file] += (rank // 2 == file) * block if is_cut else (
                    nbytes * (file == nearest)
                )  # fmt: skip
    for id_, matrix in (("heat-0", expected), ("heat-1", relaid)):
        rows = page.tables[id_][1:-1]
        cells = [[cell.removesuffix(" ◆") for cell in row[1:3]] for row in rows]
        shown = [[in_bytes(n) if n else "0" for n in row] for row in matrix.tolist()]
        assert cells == shown, id_
        assert [row[3] for row in rows] == [in_bytes(n) for n in matrix.sum(axis=1).tolist()]
    assert page.column("ranks", "In its own file") == ["256 B", "228 B"]
    assert page.column("ranks", "In files of others") == ["-", "28 B"]
    assert page.column("copies", "Extra")[:3] == ["-", "-", "36 B"]
    assert "Planned load under another layout: tp=4, 4 ranks" in page.captions
    assert ["tp cuts dim 0", "2", "384 B"] in [row[:3] for row in page.tables["placements"]]


def test_real_loads_and_saves_come_from_the_log(holdfast: Holdfast, run_directory: Path) -> None:
    """Ranks of one save together; a step saved again is another save; cut lines are counted."""
    files = {"data/00000.safetensors": 500, "data/00001.safetensors": 20}
    for rank in range(2):
        log(
            run_directory, rank,
            save_event(1, 10.0 + rank / 100, stage=0.25, write=0.5 + rank, total=0.75 + rank),
            save_event(2, 20.0, stage=0.125, stall=0.125, write=2.0),
            {"event": "load", "step": 2, "began": 30.0, "num_opens": 2, "seconds": 1.5,
             "nbytes_by_file": dict(list(files.items())[: 2 - rank])},
            save_event(2, 40.0 + rank, stage=0.5, total=0.5),
        )  # fmt: skip
    with (run_directory / "events" / "00001.jsonl").open("a") as file:
        file.write('{"event": "save", "ra')
    page = view(holdfast, run_directory)
    assert page.captions.count("Real load of step 2 on tp=2") == 1
    assert [row[:5] for row in page.tables["heat-0"][1:]] == [
        ["0", "500 B ◆", "20 B", "520 B", "2"],
        ["1", "500 B", "0 ◆", "500 B", "1"],
        ["Sum", "1 kB", "20 B", "1.02 kB", ""],
    ]  # fmt: skip
    saves = sorted(id_ for id_ in page.tables if id_.startswith("save-"))
    assert saves == ["save-0", "save-1", "save-2"], "newest first"
    assert page.tables["save-2"] == [
        ["Rank", "stage", "write", "total"],
        ["0", "250 ms", "500 ms", "750 ms"],
        ["1", "250 ms", "1.5 s", "1.75 s"],
    ]
    assert page.column("save-0", "stage") == ["500 ms", "500 ms"]
    assert "1 lines of the log cannot be read" in page.text


def test_the_history_has_what_is_kept_and_what_is_gone(
    holdfast: Holdfast, run_directory: Path
) -> None:
    assert holdfast("tag", run_directory, 2, "dear").code == 0
    log(run_directory, 0, save_event(1, 10.0, total=0.5), save_event(4, 20.0, total=0.25))
    PosixStorage(run_directory).make_dir(".saving-iter_0000005-ab12")
    flipped = run_directory / "iter_0000002" / "manifest.json"
    page = view(holdfast, run_directory)
    assert page.column("steps", "Step") == ["5", "4", "2", "1"]
    assert page.column("steps", "State") == ["not finished", "kept, shown here", "kept", "removed"]
    assert page.column("steps", "Tags") == ["-", "-", "dear", "-"]
    assert page.column("steps", "Size") == [
        "-",
        "448 B + 36 B copies",
        "448 B + 36 B copies",
        "100 B",
    ]
    assert page.column("steps", "Ranks waited") == ["-", "250 ms", "-", "500 ms"]
    flipped.write_bytes(flipped.read_bytes().replace(b'"step":2', b'"step":3'))
    assert view(holdfast, run_directory).column("steps", "State")[2] == "damaged"


def test_any_of_three_paths_is_taken(holdfast: Holdfast, run_directory: Path) -> None:
    """A run, one checkpoint of it, and one that lies alone."""
    log(run_directory, 0, save_event(4, 20.0, total=0.25))
    assert "Checkpoint of step 4" in view(holdfast, run_directory).text
    page = view(holdfast, run_directory / "iter_0000002")
    assert "Checkpoint of step 2" in page.text
    assert page.column("steps", "Step") == ["4", "2"]
    assert "save-0" in page.tables
    alone = run_directory.parent / "alone"
    (run_directory / "iter_0000002").rename(alone)
    page = view(holdfast, alone)
    assert "steps" not in page.tables
    assert "lies alone" in page.text


def test_mistakes_and_damage(holdfast: Holdfast, run_directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.html"
    other.write_text("<p>my notes</p>")
    cases: list[tuple[list[object], str]] = [
        ([run_directory, "--out", other], "is not a page of"),
        ([run_directory, "--out", tmp_path / "no" / "page.html"], "cannot be written"),
        ([run_directory, "--out", tmp_path / "page.html", "--as", "tp=x"], "write tp=4,dp=2"),
        ([run_directory, "--out", tmp_path / "page.html", "--step", "3"], "no committed step 3"),
    ]
    for words, text in cases:
        result = holdfast("view", *words)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert text in result.err
    assert other.read_text() == "<p>my notes</p>"
    assert not (tmp_path / "page.html").exists()
    index = run_directory / "iter_0000004" / "index.safetensors"
    index.write_bytes(index.read_bytes()[:-1] + b"x")
    assert holdfast("view", run_directory, "--out", tmp_path / "page.html").code == 1


def test_many_tensors_make_a_small_page(holdfast: Holdfast, tmp_path: Path) -> None:
    """Rows are made by the script when they are shown: the page grows by their data alone."""
    halves = [Chunk(file=f, box=Box((f,), (1,))) for f in range(2)]
    tensors = {
        f"model.layers.{i}.attention.query.weight": random_tensor(
            0, dtype="F32", shape=(2,), chunks=halves
        )
        for i in range(3000)
    }
    write(PosixStorage(tmp_path / "run"), make(tensors, block_nbytes=1 << 20))
    page = view(holdfast, tmp_path / "run")
    assert len(json.loads(page.scripts[0])["tensors"]) == 3000
    assert len(json.loads(page.scripts[0])["placements"]) == 1
    assert (tmp_path / "page.html").stat().st_size < 3000 * 80 + 60_000
    assert len(page.elements) < 1000

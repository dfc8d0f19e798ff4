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
from holdfast.errors import in_bytes
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
        self.source = text
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
    # Nor can times that no save takes keep the page from being made.
    log(tmp_path / "run", 0, save_event(2, 2.0, stage=1.7e308, write=1.7e308, commit=-1.0))
    log(tmp_path / "run", 0, save_event(3, 3.0, write=5e-324) | {"starts": {"write": -1.7e308}})
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
        ["Rank", "stage", "write", "total", "written per second"],
        ["0", "250 ms", "500 ms", "750 ms", "200 B/s"],
        ["1", "250 ms", "1.5 s", "1.75 s", "66 B/s"],
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
    log(run_directory, 0, save_event(7, 1e300, total=0.5))  # no time, and no end of the page
    page = view(holdfast, run_directory)
    assert page.column("steps", "State")[3] == "damaged"
    assert page.column("steps", "Saved (UTC)")[0] == "-"
    assert "Step 7, unknown UTC: took 500 ms" in page.text


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
        ([run_directory, "--out", tmp_path / "no" / "page.html"], "cannot write: "),
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


def findings(page: Page, kind: str) -> list[str]:
    """The sentences of the verdict of one kind."""
    items = re.findall(rf'<li class="{kind}">(.*?)</li>', page.source)
    return [re.sub("<[^>]+>", "", item) for item in items]


def test_the_verdict_says_what_the_records_support(holdfast: Holdfast, run_directory: Path) -> None:
    """Without a log times are not judged; slower saves, stragglers and gaps of a log are named."""
    page = view(holdfast, run_directory)
    assert "Nothing that is known here asks for a closer look. 2 things cannot be judged." in (
        page.text
    )
    assert findings(page, "look") == []
    facts, unknown = findings(page, "fact"), findings(page, "unknown")
    assert "95 % of the bytes that ranks need are in their own files" in facts[0]
    assert "(least: rank 1 with 89 %); each rank opens 1-2 files" in facts[0]
    assert facts[1] == (
        "1 of 4 tensors are stored more than once, up to 2 times; the copies cost 36 B, 8.04 % on "
        "top."
    )
    assert "cannot judge how long saves take" in unknown[0]
    assert "cannot judge what loads read" in unknown[1]
    # Two steady ranks, whose last save is slower by the write of one.
    for rank in range(2):
        for step in range(1, 5):
            write_s = 0.5 + rank * (step == 4)
            event = save_event(step, 10.0 * step, stage=0.1, write=write_s, total=0.6 + (step == 4))
            log(run_directory, rank, event)
    page = view(holdfast, run_directory)
    slower, straggler = findings(page, "look")
    assert "ranks waited up to 1.6 s (rank 0), 2.7 times the median of the 3 before it" in slower
    assert slower.endswith("600 ms: saves got slower.")
    assert "rank 1 worked longest, 1.5 s: most of it in write, 1.5 s (the median" in straggler
    assert straggler.endswith("it wrote 100 B in 1.5 s, 66 B/s.")
    assert "2 things to look at. 1 thing cannot be judged." in page.text
    # A save of which one rank has no line, and a line that was cut off.
    log(run_directory, 0, save_event(6, 60.0, total=0.5))
    with (run_directory / "events" / "00001.jsonl").open("a") as file:
        file.write('{"event": "save", "ra')
    looks = findings(view(holdfast, run_directory), "look")
    assert "of step 6, has 1 of 2 ranks (0)" in looks[0]
    assert "1 line of the log cannot be read" in looks[1]
    # A log of other steps than the one that is shown.
    assert "the log has no save" not in view(holdfast, run_directory).text
    for rank in range(2):
        (run_directory / "events" / f"{rank:05d}.jsonl").unlink()
    log(run_directory, 0, save_event(9, 90.0, total=0.5))
    unknown = findings(view(holdfast, run_directory), "unknown")
    assert "the log has no save of step 4, which is shown" in unknown[0]


def test_a_load_is_judged_by_its_plan(holdfast: Holdfast, run_directory: Path) -> None:
    """More than planned is told; a load of another layout, step or age has no plan here."""

    def load(began: float, more: int, **members: Any) -> Page:
        (run_directory / "events" / "00000.jsonl").unlink(missing_ok=True)
        (run_directory / "events" / "00001.jsonl").unlink(missing_ok=True)
        for rank, own in enumerate((256, 228)):
            files = {f"data/{rank:05d}.safetensors": own + more}
            if rank:
                files["data/00000.safetensors"] = 28
            event = {"event": "load", "step": 4, "began": began, "seconds": 0.5,
                     "nbytes_by_file": files, "nbytes_needed": 256}  # fmt: skip
            log(run_directory, rank, event | members)
        return view(holdfast, run_directory)

    late = 2e9
    good, bad = load(late, 0), load(late, 4)
    assert findings(good, "look") == []
    assert "read 512 B in 500 ms; planned under the saved layout are 512 B." in good.text
    (text,) = findings(bad, "look")
    assert "read 520 B in 500 ms, more than the 512 B planned under the saved layout." in text
    for page in (load(1.0, 4), load(late, 4, step=2), load(late, 4, axes={"dp": 2})):
        assert findings(page, "look") == []
        assert "520 B in 500 ms, 1.02 times the 512 B that its ranks needed" in page.text
        assert "no plan is here to compare it with" in findings(page, "unknown")[-1]


def test_lanes_are_drawn_at_their_times(holdfast: Holdfast, run_directory: Path) -> None:
    """The rank's lane ends with its stall, the writer's starts there; older lines are marked."""
    for rank in range(2):
        log(run_directory, rank, save_event(1, 10.0, stage=0.2, write=1.0, stall=0.3))
        log(run_directory, rank, async_event(4, rank) | {"axes": {"tp": 2}})
    page = view(holdfast, run_directory)
    new, old = (bars(svg) for svg in re.findall(r"<svg .*?</svg>", page.source))
    event = async_event(4, 0)
    lanes = {phase: y for phase, _, y, _ in new[:6]}
    assert lanes == dict.fromkeys(("flatten", "plan", "stage", "submit"), 4) | dict.fromkeys(
        ("write", "commit"), 20
    )
    scale = next(width for phase, _, _, width in new if phase == "write")  # of one second
    for phase, x, _, width in new[:6]:
        assert (x - 72) / scale == pytest.approx(event["starts"][phase], abs=1e-2)
        assert width / scale == pytest.approx(event["phases"][phase], abs=1e-2)
    assert "waited 230 ms" in page.texts
    assert page.texts.count("2 GB in 1 s, 2 GB/s") >= 2
    # Without starts: end to end in one lane, and the page says so.
    assert [(phase, y) for phase, _, y, _ in old] == [
        ("stage", 4), ("write", 4), ("stage", 28), ("write", 28),
    ]  # fmt: skip
    assert old[1][1] == pytest.approx(old[0][1] + old[0][3], abs=0.1)
    assert page.text.count("do not say when their phases started") == 1


def bars(svg: str) -> list[tuple[str, float, int, float]]:
    """(phase, x, y, width) of each bar of a drawing."""
    found = re.findall(r'x="([0-9.]+)" y="([0-9]+)" width="([0-9.]+)"[^>]*class="p-(.*?)"', svg)
    return [(phase, float(x), int(y), float(width)) for x, y, width, phase in found]


NUM_MANY = 512


def async_event(step: int, rank: int, *, stage: float = 0.2, write: float = 1.0) -> dict[str, Any]:
    """A save in the background whose line says when each phase started."""
    starts = {"flatten": 0.0, "plan": 0.01, "stage": 0.02, "submit": 0.02 + stage}
    starts["write"] = starts["submit"] + 0.01
    starts["commit"] = starts["write"] + write
    phases = {"flatten": 0.01, "plan": 0.01, "stage": stage, "submit": 0.005, "write": write}
    phases |= {"commit": 3.0 - write, "stall": 0.03 + stage}
    began = 1000.0 * step + rank / 1e5
    return {
        "event": "save", "step": step, "began": began, "nbytes": 2_000_000_000, "phases": phases,
        "starts": starts, "rank": rank, "axes": {"tp": NUM_MANY},
    }  # fmt: skip


@pytest.fixture
def many_ranks(tmp_path: Path) -> Path:
    """A run of 512 ranks: each wrote a row; rank 300 writes slowly, rank 77 needs other files."""
    rows = [
        Chunk(file=f, box=Box((f, 0), (1, 16)), holders=(f,) if f % 7 else (f, 77))
        for f in range(NUM_MANY)
    ]
    tensors = {
        "model.w": random_tensor(0, dtype="F32", shape=(NUM_MANY, 16), chunks=rows),
        "model.norm": random_tensor(1, dtype="F32", shape=(9,)),
        "optimizer.m": random_tensor(2, dtype="F32", shape=(NUM_MANY, 16), chunks=rows),
    }
    parts: dict[str, Any] = {
        "model": [{"$": "tensor", "k": "model.w"}, {"$": "tensor", "k": "model.norm"}],
        "optimizer": [{"$": "tensor", "k": "optimizer.m"}],
    }
    root = tmp_path / "run"
    write(PosixStorage(root), at_step(make(tensors, parts=parts), 7))
    for rank in range(NUM_MANY):
        events = [
            async_event(step, rank, write=2.5 if rank == 300 else 1 + (rank * 7 % 512) / 1e4)
            for step in range(4, 8)
        ]
        names = [f"data/{(rank + i) % NUM_MANY:05d}.safetensors" for i in range(2)]
        names += [f"data/{i:05d}.safetensors" for i in range(0, NUM_MANY, 7)] * (rank == 77)
        events.append(
            {"event": "load", "step": 7, "began": 2e9, "rank": rank, "axes": {"tp": NUM_MANY},
             "seconds": 1.0, "nbytes_by_file": dict.fromkeys(names, 1000)}
        )  # fmt: skip
        log(root, rank, *events)
    return root


def test_a_page_of_512_ranks_is_legible(holdfast: Holdfast, many_ranks: Path) -> None:
    """Summaries and outliers by name come first; no open wall of rows; a page of few megabytes."""
    page = view(holdfast, many_ranks)
    assert (many_ranks.parent / "page.html").stat().st_size < 2_000_000
    # Who stands out is named on the first screen, in tables, and beside the heat maps.
    assert "In the save of step 7 rank 300 worked longest" in page.text
    assert "it wrote 2 GB in 2.5 s, 800 MB/s" in page.text
    assert page.column("save-0", "Rank")[0] == "300"
    assert page.column("ranks", "Rank") == ["0", "1-76", "77", "78-511"], "equal ones are joined"
    assert page.column("ranks-summary", "Files to open")[-1] == "77"
    assert page.column("save-0-summary", "write") == ["1 s", "1.03 s", "2.5 s", "300"]
    assert "Most is read by rank 77 (75 kB, 75 files)" in page.text
    assert "read 1.1 MB in 1 s, more than the 93" in " ".join(findings(page, "look"))
    # What is open at first has few rows; the numbers of all ranks are there for the newest save.
    few = {id_: len(rows) for id_, rows in page.tables.items() if not id_.endswith("-all")}
    assert max(few.values()) <= 40
    numbers = page.tables["save-0-all"][1:]
    assert sum(_num_ranks(row[0]) for row in numbers) == NUM_MANY
    assert sum(_num_ranks(rank) for rank in page.column("parts", "Rank")) == NUM_MANY
    heat = page.tables["heat-0"]
    assert [heat[1][0], heat[2][0]] == ["0-15", "16-31"]
    assert len(heat[0]) <= 40
    # 16 ranks of two lanes each are drawn of every save.
    drawn = [a for t, a in page.elements if t == "svg" and a.get("class") == "timeline"]
    assert len(drawn) == 4
    assert sum(text.startswith("rank ") and text[5:].isdigit() for text in page.texts) == 4 * 16


def _num_ranks(words: str) -> int:
    """How many ranks are in "0-3, 7"."""
    ends = [part.split("-") for part in words.split(", ")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

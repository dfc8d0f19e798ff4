"""Trees that somebody made to hurt: no command takes long, much memory, or fails in other words."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from holdfast import Checkpointer
from holdfast.arrays.packed_ints import squeeze
from holdfast.checkpoint.plan.kept_plans import PLANS_DIR
from holdfast.format.digest import digest128
from holdfast.format.names import INDEX, LATEST, MANIFEST, ROOT_ID
from holdfast.format.versions import LEASES_DIR
from holdfast.storage import PosixStorage
from holdfast.writer.leftovers import repair
from holdfast.writer.records import DONE_DIR, HEADER_FILE, PLAN_FILE, seal
from tests.checkpoint.common import plan_notes
from tests.format.making import make, sample_tensors, write

STEP = "iter_0000130"
SAVING = ".saving-iter_0000140-0123456789ab"
HUGE = 3 << 30
NESTED = b"\x81\xa1x" + b"\x91" * 200_000 + b"\x00"  # a member that is skipped
NESTED_JSON = b"[" * 200_000 + b"]" * 200_000
COMMANDS = (
    ("ls", "ROOT"), ("ls", "ROOT", "--json"), ("show", "ROOT"), ("verify", "ROOT"),
    ("diff", "ROOT", "ROOT"), ("tag", "ROOT"), ("tag", "ROOT", "best", "--step", "130"),
    ("prune", "ROOT", "--keep-last", "1", "--dry-run"), ("prune", "ROOT", "--keep-last", "1"),
    ("repair", "ROOT", "--dry-run"), ("repair", "ROOT"),
    ("export", "ROOT", "--tensor", "*", "--to", "ROOT.out.safetensors"),
)  # fmt: skip


def sparse(path: Path, nbytes: int = HUGE, start: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(start)
    os.truncate(path, nbytes)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def digested(body: bytes) -> bytes:
    """A manifest of these members, under a right digest."""
    return body + f',"digest":"{digest128(body)}"}}\n'.encode()


def lying_index(root: Path, *, num_rows: int) -> None:
    """A manifest that vouches for a huge index."""
    path = root / STEP / MANIFEST
    manifest = json.loads(path.read_bytes())
    del manifest["digest"]
    manifest["index"] |= {"nbytes": HUGE, "num_rows": num_rows}
    path.write_bytes(digested(msgspec.json.encode(manifest)[:-1]))
    sparse(root / STEP / INDEX)


def lease(root: Path) -> Path:
    return root / LEASES_DIR / f"{STEP}.read-0123456789abcdef"


TREES: dict[str, Callable[[Path], object]] = {
    "nested plan": lambda r: put(r / SAVING / PLAN_FILE, seal(NESTED)),
    "huge plan": lambda r: sparse(r / SAVING / PLAN_FILE),
    "plan of many": lambda r: put(r / SAVING / PLAN_FILE, seal(b"\xdd\xff\xff\xff\xff")),
    "plan as a pipe": lambda r: pipe(r / SAVING / PLAN_FILE),
    "nested header": lambda r: (
        put(r / SAVING / PLAN_FILE, seal(NESTED)), put(r / SAVING / HEADER_FILE, seal(NESTED)),
        put(r / SAVING / DONE_DIR / "00000", seal(NESTED)),
    ),
    "huge index": lambda r: sparse(r / STEP / INDEX),
    "huge index, vouched for": lambda r: lying_index(r, num_rows=3),
    "huge index of many rows": lambda r: lying_index(r, num_rows=HUGE // 100),
    "huge manifest": lambda r: sparse(r / STEP / MANIFEST),
    "nested manifest": lambda r: put(
        r / STEP / MANIFEST, digested(b'{"format":"holdfast","version":1,"x":' + NESTED_JSON)
    ),
    "manifest as a pipe": lambda r: pipe(r / STEP / MANIFEST),
    "nested lease": lambda r: put(lease(r), NESTED_JSON[:4000]),
    "huge lease": lambda r: sparse(lease(r)),
    "huge tag": lambda r: sparse(r / "tags" / "best"),
    "huge pointer": lambda r: sparse(r / LATEST),
    "huge identity": lambda r: sparse(r / ROOT_ID),
    "huge data": lambda r: sparse(r / STEP / "data" / "00000.safetensors"),
}  # fmt: skip

_RUN = """
import contextlib, io, json, re, resource, sys, time
from pathlib import Path
from holdfast.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
rows = []
for root, command in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([word.replace("ROOT", root) for word in command])
        except BaseException as error:
            code = repr(error)
    rows.append([code, err.getvalue(), time.process_time() - began,
                 # Not ru_maxrss, which a process has from the one that started it.
                 int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])])
json.dump(rows, sys.stdout)
"""


def complete(root: Path) -> None:
    """A save in progress has a header, too: without one nobody reads its plan."""
    if (root / SAVING).is_dir() and not (root / SAVING / HEADER_FILE).exists():
        put(root / SAVING / HEADER_FILE, b"")


def age(root: Path) -> None:
    """Everything is an hour old: nobody is alive."""
    then = time.time() - 3600
    for path in (root, *root.rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)


def test_no_tree_hurts_a_command(tmp_path: Path) -> None:
    """R8: 17 trees, every command: an exit code, a line, 2 s of work, 300 MB."""
    jobs = []
    for number, (name, spoil) in enumerate(TREES.items()):
        root = tmp_path / str(number)
        write(PosixStorage(root), make(sample_tensors()), directory=STEP)
        spoil(root)
        complete(root)
        age(root)
        jobs += [(name, str(root), command) for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps([job[1:] for job in jobs]),
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    wrong = []
    for (name, _, command), (code, err, seconds, peak_kib) in zip(jobs, rows, strict=True):
        is_good = code in (0, 1, 2) and seconds < 2 and peak_kib < 300_000
        is_good &= "Traceback" not in err and err.count("\n") <= 1
        if not is_good:
            wrong.append(f"{name}, {command}: {code}, {seconds:.1f} s, {peak_kib} KiB, {err[:300]}")
    assert not wrong, "\n".join(wrong)
    codes = {(name, command[0]): row[0] for (name, _, command), row in zip(jobs, rows, strict=True)}
    for name in TREES:
        if any(word in name for word in ("index", "manifest", "data")):
            assert codes[name, "verify"] in (1, 2), name


def test_saves_and_loads_pass_hostile_leftovers(tmp_path: Path) -> None:
    """R8: each is named by a repair, and neither the next save nor the load ends by one."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"t": {"x": torch.ones(8)}})
    bomb = squeeze(b"\0" * (256 << 20))
    for path in (tmp_path / PLANS_DIR).iterdir():
        good = plan_notes(path.read_bytes())
        path.write_bytes(dataclasses.replace(good, claims=[bomb], shares=[bomb]).encode()[0])
    for number, name in enumerate(("nested plan", "huge plan", "plan of many", "nested header")):
        place = tmp_path / "made" / str(number)
        TREES[name](place)
        complete(place)
        (place / SAVING).rename(tmp_path / f".saving-iter_000014{number}-0123456789ab")
        place.rmdir()
    (tmp_path / "made").rmdir()
    age(tmp_path)
    fates = {each.name: each for each in repair(PosixStorage(tmp_path), dry_run=True)}
    for number in range(4):
        each = fates[f".saving-iter_000014{number}-0123456789ab"]
        assert each.fate == "removed"
        assert each.why
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load({"t": {"x": torch.zeros(8)}}).step == 1
        checkpointer.save(2, {"t": {"x": torch.ones(8)}})
        assert checkpointer.latest() == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".saving")]

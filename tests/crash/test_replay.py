"""Every legal power loss of a recorded trace, and every sync: without it some loss does harm."""

from __future__ import annotations

import copy
import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from holdfast import Checkpointer, KeepLast, PosixStorage
from holdfast.checkpoint.options import CkptFormat
from holdfast.errors import HoldfastError
from holdfast.format.names import LATEST, list_steps, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import LEASES_DIR, read_lease
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import TAGS_DIR, list_tags, remove_tag, set_tag
from holdfast.storage import posix
from holdfast.writer.leftovers import repair
from tests.crash.common import leftovers
from tests.crash.replay import Frozen, Op, Recorder, after_loss, losses, pending, write_tree

RUN = "a/run"


class Unshared(PosixStorage):
    """A storage that no other process can open: asynchronous saves are written by a thread."""


@dataclass
class Expect:
    """What may be there: step -> versions (0: it may be missing), the pointer, tag -> steps."""

    steps: dict[int, set[int]] = field(default_factory=dict)
    pointer: set[int] = field(default_factory=lambda: {0})
    tags: dict[str, set[int]] = field(default_factory=dict)


class Scenario:
    """Does things to one root, recorded; before and after each says what a power loss may leave."""

    def __init__(self, base: Path, ckpt_format: CkptFormat) -> None:
        base.mkdir()
        self.recorder = Recorder(base)
        self.storage = Unshared(base / RUN)
        self.now = Expect()
        self.ckpt_format = ckpt_format
        self.restart()

    def restart(self) -> None:
        """Go on as another process would, which knows nothing."""
        self.checkpointer = Checkpointer(self.storage, settle_s=0.0, ckpt_format=self.ckpt_format)

    @contextmanager
    def change(self, after: Callable[[Expect], None]) -> Iterator[None]:
        """What `after` says may hold from now on, and must when the body is over."""
        then = copy.deepcopy(self.now)
        after(then)
        both = Expect(
            {s: self.now.steps.get(s, {0}) | then.steps.get(s, {0})
             for s in {*self.now.steps, *then.steps}},
            self.now.pointer | then.pointer,
            {t: self.now.tags.get(t, {0}) | then.tags.get(t, {0})
             for t in {*self.now.tags, *then.tags}},
        )  # fmt: skip
        self.recorder.expect(both)
        yield
        self.recorder.expect(then)
        self.now = then

    def save(self, step: int, version: int, *, mode: str = "sync") -> None:
        def after(then: Expect) -> None:
            then.steps[step] = {version}
            then.pointer = {max(s for s, v in then.steps.items() if v != {0})}

        with self.change(after):
            state = {"t": {"a": torch.full((700,), float(version))}, "v": {"version": version}}
            if mode == "sync":
                self.checkpointer.save(step, state, overwrite=True)
            else:
                self.checkpointer.save_async(step, state, overwrite=True).result(60)

    def tag(self, name: str, step: int) -> None:
        with self.change(lambda then: then.tags.update({name: {step}})):
            set_tag(self.storage, name, step=step)

    def untag(self, name: str) -> None:
        with self.change(lambda then: then.tags.update({name: {0}})):
            remove_tag(self.storage, name)

    def keep_last(self, number: int) -> None:
        def after(then: Expect) -> None:
            there = sorted(s for s, v in then.steps.items() if v != {0})
            then.steps.update({s: {0} | then.steps[s] for s in there[:-number]})

        with self.change(after):
            plan = plan_retention(self.storage, KeepLast(number))
            assert apply_retention(self.storage, plan).failed == {}


def saves(scenario: Scenario) -> None:
    """New, replaced, tagged, asynchronous, replaced under a reader, removed."""
    scenario.save(1, 11)
    scenario.tag("best", 1)
    scenario.save(1, 12)
    scenario.save(2, 21, mode="async")
    scenario.tag("best", 2)
    with read_lease(scenario.storage, step_dir(2)):
        scenario.save(2, 22, mode="async")
    scenario.untag("best")
    scenario.keep_last(1)


def killed(scenario: Scenario) -> None:
    """A save that is killed where its process finds its way, and what a repair makes of it."""
    scenario.save(1, 11)
    recorder = scenario.recorder
    before = len(recorder.ops)
    scenario.save(1, 12)
    length = len(recorder.ops) - before
    for version, part in enumerate((0.2, 0.5, 0.8, 0.86, 0.9, 0.94, 0.97), start=13):
        recorder.freeze_at = len(recorder.ops) + int(length * part)
        scenario.restart()
        with suppress(Frozen, HoldfastError):
            scenario.save(1, version)
        recorder.is_frozen, recorder.freeze_at = False, -1
        was = scenario.now.steps[1]
        scenario.now.steps[1] = was | {version}
        recorder.expect(copy.deepcopy(scenario.now))
        fates = repair(PosixStorage(scenario.storage.root), alive_s=0.0)
        assert "kept" not in {each.fate for each in fates}
    scenario.restart()
    scenario.save(1, 99)


SCENARIOS = {
    "saves": saves,
    "killed": killed,
    "no exchange": saves,
    "killed, no exchange": killed,
    "torch_dist": saves,
    "torch_dist, killed": killed,
}


class Judge:
    """Makes what a loss leaves real, and says what is wrong with it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._known: dict[bytes, str] = {}
        self._versions: dict[tuple[int, bytes], int] = {}
        self.num_states = 0

    def problem(self, tree: dict[str, object], expect: Expect) -> str:
        """What is wrong; empty for nothing. Equal trees are looked at once."""
        key = hashlib.blake2b(repr((_brief(tree), expect)).encode()).digest()
        if key not in self._known:
            self.num_states += 1
            place = self._place / str(self.num_states)
            write_tree(place, tree)
            try:
                self._known[key] = self._look(place / RUN, expect)
            except HoldfastError as error:
                self._known[key] = f"{type(error).__name__}: {error}"
            shutil.rmtree(place)
        return self._known[key]

    def _look(self, root: Path, expect: Expect) -> str:
        storage = PosixStorage(root)
        for is_repaired in (False, True):
            if is_repaired and root.is_dir():
                fates = repair(storage, alive_s=0.0)
                if any(each.fate == "kept" for each in fates):
                    return f"a repair is stuck: {fates}"
                if left := [name for name in leftovers(root) if name != TAGS_DIR]:
                    return f"a repair leaves {left}"
            found = {step: self._version(storage, step) for step in _steps(storage)}
            named = {path.parent.name for path in root.glob("iter_*/.metadata")}
            if other := named - {step_dir(step) for step in found}:
                return f"{other} are for PyTorch alone"
            for step in {*found, *expect.steps}:
                version = found.get(step, 0)
                # Without an exchange of names, only a repair finds what was between two renames.
                excused = not version and not is_repaired and list(root.glob(".old-*"))
                if version not in expect.steps.get(step, {0}) and not excused:
                    return f"step {step} has version {version}, not {expect.steps.get(step)}"
            pointer = root / LATEST
            text = pointer.read_text() if pointer.exists() else "0\n"
            is_good = text.strip().isdigit() and int(text) in {0, *found}
            if not is_good and not list(root.glob(".old-*")):
                return f"the pointer says {text!r}, there is {list(found)}"
        tags = list_tags(storage) if root.is_dir() else {}
        for name, steps in expect.tags.items():
            if tags.get(name, 0) not in steps:
                return f"tag {name} names {tags.get(name)}, not {steps}"
        return ""

    def _version(self, storage: PosixStorage, step: int) -> int:
        """As `_version`, which reads nothing but the step's files: equal ones are read once."""
        key = step, _content(storage.root / step_dir(step))
        if key not in self._versions:
            self._versions[key] = _version(storage, step)
        return self._versions[key]


def _content(place: Path) -> bytes:
    """A digest of the names, kinds and bytes of everything in a directory."""
    found = hashlib.blake2b()
    for path in sorted(place.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        found.update(f"{path.relative_to(place)} {path.is_file()} {len(data)} ".encode() + data)
    return found.digest()


def pointer_problem(tree: dict[str, object], expect: Expect) -> str:
    """What the pointer says before any repair."""
    for name in RUN.split("/"):
        below = tree.get(name, {})
        assert isinstance(below, dict)
        tree = below
    text = tree.get(LATEST, b"0\n")
    if text not in {b"%d\n" % step for step in expect.pointer}:
        return f"the pointer says {text!r}, not one of {expect.pointer}"
    return ""


def _brief(tree: object) -> object:
    if isinstance(tree, dict):
        return {
            name: _brief(content) for name, content in tree.items() if name not in (LEASES_DIR,)
        }
    assert isinstance(tree, bytes)
    return hashlib.blake2b(tree, digest_size=16).digest()


def _steps(storage: PosixStorage) -> list[int]:
    return list_steps(storage) if storage.root.is_dir() else []


def _version(storage: PosixStorage, step: int) -> int:
    damages = verify_snapshot(storage, step_dir(step))
    if damages:
        return -1
    with Snapshot.open(storage, step_dir(step)) as snapshot:
        version = snapshot.read_values("v")["version"]
        is_torch = any(file.envelope == "torch_dist" for file in snapshot.manifest.files)
    assert isinstance(version, int)
    return version if not is_torch or _in_torch(storage.root / step_dir(step)) == version else -2


def _in_torch(place: Path) -> int:
    """The version that PyTorch's reader finds; negative for anything that is not one."""
    state = {"t": {"a": torch.zeros(700)}, "v": {"version": -1}}
    try:
        dcp.load(state, checkpoint_id=place, no_dist=True)
    except Exception:  # whatever it raises, it cannot open what ours opens
        return -3
    version = int(state["v"]["version"])
    return version if bool((state["t"]["a"] == version).all()) else -4


def record(base: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Op]:
    """The trace of a scenario."""
    if "no exchange" in name:
        monkeypatch.setattr(posix, "rename_exchange", lambda *args, **kwargs: False)
    scenario = Scenario(base, "torch_dist" if "torch_dist" in name else "holdfast")
    with scenario.recorder.recording():
        SCENARIOS[name](scenario)
    scenario.checkpointer.close()
    return scenario.recorder.ops


def search(
    ops: list[Op], judge: Judge, prefixes: Iterator[int] | range, *, seed: int, num_random: int = 3
) -> str:
    """The first harm that any legal loss at these prefixes does; empty for none."""
    generator = random.Random(seed)
    for end in prefixes:
        done = ops[:end]
        expect = next((op.expect for op in reversed(done) if op.kind == "expect"), Expect())
        for lost, torn in losses(done, generator, num_random=num_random):
            tree = after_loss(done, lost, torn)
            problem = pointer_problem(tree, expect) or judge.problem(tree, expect)
            if problem:
                said = [f"{ops[i].kind} {ops[i].name}>{ops[i].to}" for i in sorted(lost)][-12:]
                return f"after {end} of {len(ops)} calls, without {said}: {problem}"
    return ""


@pytest.mark.parametrize(
    "name",
    [
        "saves, a sixth",
        *(
            pytest.param(f"{name}, a sixth", marks=pytest.mark.slow)
            for name in ("no exchange", "torch_dist", "killed")
        ),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "saves",
                "killed",
                "no exchange",
                "killed, no exchange",
                "torch_dist",
                "torch_dist, killed",
            )
        ),
    ],
)
def test_no_legal_loss_does_harm(
    fast_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was acknowledged is there and whole; the rest is old, new or nothing, and repairable.

    "A sixth": at every sixth call that changes storage, and wherever something was acknowledged.
    """
    name, _, is_sample = name.partition(", a ")
    ops = record(fast_dir / "base", name, monkeypatch)
    (fast_dir / "judge").mkdir()
    judge = Judge(fast_dir / "judge")
    # A sync only takes losses away: what may be lost after it may be lost before it.
    ends = [i for i in range(1, len(ops) + 1) if ops[i - 1].kind != "sync"]
    if is_sample:
        ends = [i for n, i in enumerate(ends) if n % 6 == 0 or ops[i - 1].kind == "expect"]
    assert search(ops, judge, iter(ends), seed=1) == ""
    print(f"{name}: {len(ops)} calls, {judge.num_states} different states")
    assert judge.num_states > (25 if is_sample else 100)


def harms_of_skipped_syncs(ops: list[Op], judge: Judge) -> dict[str, list[str]]:
    """Label of each sync -> the harm that its absence does, "" for none, one for each time."""
    harms: dict[str, list[str]] = {}
    for at, op in enumerate(ops):
        if op.kind != "sync":
            continue
        without = ops[:at] + ops[at + 1 :]
        if not set(pending(without[:at])) - set(pending(ops[: at + 1])):
            continue  # there was nothing to sync
        again = (i for i in range(at, len(without)) if _is_sync(without[i], op.node))
        end = next(again, len(without))
        # The places where most is promised first: where something was acknowledged.
        promised = [i + 1 for i in range(at, end) if without[i].kind == "expect"]
        ends = [*promised, *(i + 1 for i in range(at, end)), end]
        harm = search(without, judge, iter(dict.fromkeys(ends)), seed=at)
        harms.setdefault(op.label, []).append(harm)
    return harms


def _is_sync(op: Op, node: int) -> bool:
    return op.kind == "sync" and op.node == node


JUSTIFIED: dict[str, str] = {
    "posix._sync_dir_fd < posix.exchange_dir": "between the first two of three renames: only if "
    "a rename itself may be torn, which the model does not do, neither name would be left",
}


def _judged(
    base: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[str], dict[str, list[str]]]:
    ops = record(base / "base", name, monkeypatch)
    (base / "judge").mkdir()
    harms = harms_of_skipped_syncs(ops, Judge(base / "judge"))
    return {label for label, found in harms.items() if not any(found)}, harms


@pytest.mark.parametrize(
    "name",
    [
        "saves",
        pytest.param("no exchange", marks=pytest.mark.nightly),
        pytest.param("torch_dist", marks=pytest.mark.slow),
    ],
)
def test_without_any_one_sync_some_loss_does_harm(
    fast_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivors, harms = _judged(fast_dir, name, monkeypatch)
    for label, found in harms.items():
        print(f"{label}: {found[0][:150] if any(found) else 'NO HARM'}")
    assert len(harms) >= 10
    assert {s for s in survivors if not any(known in s for known in JUSTIFIED)} == set()

"""Random programs of several clients through a network that fails, against a plain model.

In each round up to three clients do one operation each, at once. Each client's clock is hours off,
at every look another one. In some programs a process stands still in the middle of an operation
while the others go on and its lease expires; requests are late, and caches answer with what was.
Whatever happens, a step has one of the versions that the operations allow, whole; what a save has
reported as committed is there, and what is tagged where tagged steps are kept; no command calls
anything damaged; and every round ends.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, HoldfastError, Stored
from holdfast.cli.main import main
from holdfast.cli.support.messages import EXIT_DAMAGED, EXIT_MISTAKE
from holdfast.format import versions
from holdfast.format.names import list_steps, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.policies.keep import KeepLast
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import list_tags
from holdfast.storage import Storage
from holdfast.writer import job
from holdfast.writer.copying import copy_checkpoint
from holdfast.writer.leftovers import repair

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage, bucket
from holdfast.storage.objects import storage as storage_module
from tests.buckets.proxy import at_random, fault_proxy
from tests.buckets.server import new_bucket

NUM_ROUNDS = 4
STEPS = (1, 2, 3)
KINDS = ("save", "save", "async", "replace", "replace", "copy", "prune", "repair", "load")
LOOKS = {
    "ls": (), "show": ("--stats", "--tensor", "t.a"), "verify": (), "diff": ("URL",),
    "view": ("--out", "OUT.html"), "export": ("--tensor", "t.a", "--to", "OUT"),
    "copy out": ("OUT", "--verify"), "convert": ("OUT", "--to", "safetensors", "--parts", "t"),
    "tag": ("STEP", "best"),
}  # fmt: skip
"""Commands, and what comes after the URL."""
SAVES = ("save", "async", "replace", "copy")
REPLACES = ("replace", "copy")
_ROUND_S = 90.0
Version = int | None


def state_of(version: int) -> dict[str, object]:
    return {"t": {"a": torch.arange(300) + version}, "v": {"version": version}}


def version_of(storage: Storage, step: int | None = None) -> tuple[int, int]:
    """Load a step, or the newest; prove that all of it is of one version."""
    loaded = Checkpointer(storage, settle_s=0.0).load({"t": Stored(), "v": Stored()}, step=step)
    version = loaded.values["v"]["version"]  # type: ignore[index,call-overload]
    tensor = loaded.values["t"]["a"]  # type: ignore[index,call-overload]
    assert torch.equal(tensor, torch.arange(300) + version), "mixed"
    return loaded.step, int(version)


@dataclass
class Operation:
    """What one client does in a round, and its outcome."""

    kind: str
    step: int
    version: int
    is_done: bool = False
    loaded: tuple[int, int] | None = None
    crash: BaseException | None = None

    @property
    def is_command(self) -> bool:
        """Whether it is done by the terminal."""
        return self.kind in LOOKS or (self.kind in ("prune", "repair") and self.version % 2 == 1)

    @property
    def keeps_tagged(self) -> bool:
        """Whether a prune keeps tagged steps."""
        return self.is_command


@dataclass
class Model:
    """What each step may have; and versions of failed saves, which a repair may still finish."""

    may_be: dict[int, set[Version]] = field(default_factory=lambda: defaultdict(lambda: {None}))
    unknown: dict[int, set[Version]] = field(default_factory=lambda: defaultdict(set))
    ever: dict[int, set[Version]] = field(default_factory=lambda: defaultdict(set))
    """All versions that a step has had, which a cache may show."""
    tag: set[int | None] = field(default_factory=lambda: {None})
    """The steps that the one tag may name; None if there may be none."""
    ever_tagged: set[int | None] = field(default_factory=lambda: {None})
    has_caches: bool = False

    def allows(self, step: int, version: Version) -> bool:
        allowed = self.may_be[step]
        return version in allowed or (None in allowed and version in self.unknown[step])

    def apply(self, operations: list[Operation]) -> None:
        """Take in a round; operations at once count in any order."""
        before = {step: set(self.may_be[step]) for step in STEPS}
        saves = [each for each in operations if each.kind in SAVES]
        for each in saves:
            self.may_be[each.step].add(each.version)
            self.ever[each.step].add(each.version)
            if not each.is_done:
                self.unknown[each.step].add(each.version)
        for step in STEPS:
            here = [each for each in saves if each.step == step]
            done = [each for each in here if each.is_done]
            if done:
                # Something is there now, and what was there before is not, unless one of these
                # was followed by another.
                self.may_be[step] = {each.version for each in here}
            created = [each for each in done if each.kind not in REPLACES]
            others = [each for each in operations if each.kind in ("prune", *REPLACES)]
            if created and None not in before[step] and not others:
                raise AssertionError(f"step {step} was there, and was created")
            if len(created) > 1 and not others:
                raise AssertionError(f"step {step} was created twice")
        safe = self.tagged(operations)
        prunes = [each for each in operations if each.kind == "prune"]
        if prunes:
            # Any step but the newest may go, and the tagged one if they are to keep it.
            for step in STEPS:
                if step == safe and all(each.keeps_tagged for each in prunes):
                    continue
                if any(self.may_be[later] != {None} for later in STEPS if later > step):
                    self.may_be[step].add(None)
        for each in operations:
            if each.loaded is not None:
                step, version = each.loaded
                allowed = before[step] | self.may_be[step] | self.unknown[step]
                if self.has_caches:
                    allowed |= self.ever[step]
                assert version in allowed, f"a load gave {each.loaded}"

    def tagged(self, operations: list[Operation]) -> int | None:
        """Take in what a round does to the tag; return the step that it names throughout."""
        tags = [each for each in operations if each.kind == "tag"]
        if any(each.is_done for each in tags):
            self.tag = set()
        self.tag |= {each.step for each in tags}
        self.ever_tagged |= self.tag
        if any(each.kind == "prune" and not each.keeps_tagged for each in operations):
            self.tag.add(None)
        if self.has_caches:
            # A request that comes late may set it once more.
            self.tag |= self.ever_tagged
        return min(self.tag) if len(self.tag) == 1 else None  # type: ignore[type-var]


class SkewedTime:
    """The module `time`, with a clock that is hours off, at each look in another direction."""

    def __init__(self, seed: int) -> None:
        self._generator = random.Random(seed)

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() + self._generator.choice((-5, -1, 0, 1, 5)) * 3600 + 0.5


class Process:
    """Stands still at one of its requests, with all its threads, until it is to go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = -1
        self._may_go_on = threading.Event()
        self.stands = threading.Event()

    def stop_after(self, num_requests: int) -> None:
        with self._lock:
            self._may_go_on.clear()
            self._left = num_requests

    def go_on(self) -> None:
        with self._lock:
            self._left = -1
            self.stands.clear()
            self._may_go_on.set()

    def observe(self, *request: object) -> None:
        with self._lock:
            if self._left < 0:
                return
            self._left = max(self._left - 1, 0)
            if self._left:
                return
            self.stands.set()
        assert self._may_go_on.wait(_ROUND_S)


def command(operation: Operation, url: str, out: Path) -> None:
    """Run a command of the terminal, which finds nothing damaged, whatever else it meets."""
    words = {
        "prune": ("--keep-last", "1", "--keep-tagged", "--yes"), "repair": (), **LOOKS,
    }[operation.kind]  # fmt: skip
    said = {"URL": url, "OUT": str(out), "OUT.html": f"{out}.html", "STEP": str(operation.step)}
    code = main([operation.kind.split()[0], url, *(said.get(word, word) for word in words)])
    # A step that was saved or replaced between the looks at both sides of a diff does differ.
    allowed = (0, EXIT_MISTAKE, *((EXIT_DAMAGED,) if operation.kind == "diff" else ()))
    assert code in allowed, f"{operation.kind} ends with {code}"
    operation.is_done = code == 0


def perform(operation: Operation, checkpointer: Checkpointer, out: Path) -> None:
    storage, step = checkpointer.storage, operation.step
    assert isinstance(storage, ObjectStorage)
    try:
        if operation.kind == "async":
            checkpointer.save_async(step, state_of(operation.version)).result()
        elif operation.kind in ("save", "replace"):
            overwrite = operation.kind == "replace"
            checkpointer.save(step, state_of(operation.version), overwrite=overwrite)
        elif operation.kind == "copy":
            source = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
            Checkpointer(source, settle_s=0.0).save(step, state_of(operation.version))
            copy_checkpoint(source, step_dir(step), storage, overwrite=True, verify=True)
        elif operation.is_command:
            command(operation, storage.url, out)
            return
        elif operation.kind == "prune":
            apply_retention(storage, plan_retention(storage, KeepLast(1)))
        elif operation.kind == "repair":
            repair(storage, alive_s=0.0)
        else:
            operation.loaded = version_of(storage)
        operation.is_done = True
    except HoldfastError:
        return
    except BaseException as error:
        operation.crash = error


def run_program(s3: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(bucket, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr("tests.buckets.proxy._DELAY_S", 0.01)
    for module in (versions, job, storage_module):
        monkeypatch.setattr(module, "time", SkewedTime(seed))
    generator = random.Random(seed)
    url = f"s3://{new_bucket(s3)}/run"
    lags, stops = seed % 4 in (1, 2), seed % 4 in (2, 3)
    direct, model, version = ObjectStorage(url), Model(has_caches=lags), 0
    # A third of the programs gives up at once: saves fail, or their outcome is unknown.
    rate, retry_s = (0.03, 0.0) if seed % 3 == 0 else (0.12, 5.0)
    with fault_proxy(s3, at_random(seed, rate, lags=lags)) as (proxy, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)  # for commands
        processes = [Process() for _ in range(generator.randint(1, 3))]
        clients = [
            # With an observer the writer is a thread.
            Checkpointer(
                ObjectStorage(url, endpoint=address, retry_s=retry_s, observer=process.observe),
                settle_s=0.0,
            )
            for process in processes
        ]
        stand: dict[int, threading.Thread] = {}
        unseen: list[Operation] = []  # by the model, until all of them have ended
        for _ in range(NUM_ROUNDS):
            threads = {}
            for number, client in enumerate(clients):
                if number in stand:
                    continue
                version += 1
                kinds = KINDS if generator.random() < 0.6 else [*LOOKS]
                kind, step = generator.choice(kinds), generator.choice(STEPS)
                unseen.append(Operation(kind, step, version))
                if stops and generator.random() < 0.4:
                    processes[number].stop_after(generator.randint(1, 25))
                threads[number] = threading.Thread(
                    target=perform,
                    args=(unseen[-1], client, tmp_path / str(version)),
                    daemon=True,
                )
            for thread in threads.values():
                thread.start()
            stopped = {
                number: thread
                for number, thread in threads.items()
                if not join([thread], [processes[number]], go_on=False)
            }
            join([*stand.values()], [processes[number] for number in stand], go_on=True)
            stand = stopped
            if not stand:
                take_in(model, unseen, seed)
            for name in direct.list(".reading"):  # of a process that could not give it back
                direct.remove_tree(f".reading/{name}")
        join([*stand.values()], [processes[number] for number in stand], go_on=True)
        take_in(model, unseen, seed)
        for process in processes:
            process.go_on()
        for client in clients:
            try:
                client.close()
            except HoldfastError:
                continue
        proxy.settle()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    compare(model, ObjectStorage(url), seed)
    left = repair(ObjectStorage(url), alive_s=0.0)
    assert not [each for each in left if each.fate == "kept"], f"seed {seed}: {left}"
    compare(model, ObjectStorage(url), seed)


def join(threads: list[threading.Thread], processes: list[Process], *, go_on: bool) -> bool:
    """Wait until operations have ended, or, unless they are to go on, their process stands still.

    False for the latter.
    """
    for thread, process in zip(threads, processes, strict=True):
        if go_on:
            process.go_on()
        deadline = time.monotonic() + _ROUND_S
        while thread.is_alive():
            thread.join(0.005)
            if process.stands.is_set():
                return False
            assert time.monotonic() < deadline, "an operation hangs"
        process.go_on()  # it may not have come to that request
    return True


def take_in(model: Model, operations: list[Operation], seed: int) -> None:
    """Give the model operations that were at work at one time."""
    for each in operations:
        assert each.crash is None, f"seed {seed}: {each}"
    model.apply(operations)
    operations.clear()


def compare(model: Model, storage: ObjectStorage, seed: int) -> None:
    steps = list_steps(storage)
    for step in STEPS:
        version = version_of(storage, step)[1] if step in steps else None
        assert model.allows(step, version), (
            f"seed {seed}: step {step} is {version}, not of {model.may_be[step]}"
        )
        if version is not None:
            assert verify_snapshot(storage, f"iter_{step:07d}") == []
    tag = list_tags(storage).get("best")
    assert tag in model.tag, f"seed {seed}: the tag is at {tag}, not at {model.tag}"


@pytest.mark.parametrize("seed", range(3))
def test_programs_through_a_bad_network(
    s3: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P19, P27."""
    run_program(s3, seed, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 25)),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(25, 206)),
    ],
)
def test_more_programs_through_a_bad_network(
    s3: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_program(s3, seed, monkeypatch, tmp_path)

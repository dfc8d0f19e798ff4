"""Random programs of three processes that change names, in a random order of their requests.

Processes are killed, requests and answers are lost, requests come late, a cache gives old answers,
deletions are denied. Whatever happens, some order of the operations explains what was reported and
what is there: each directory has one name, or none after its removal.
"""

from __future__ import annotations

import itertools
import random
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from holdfast.errors import StorageError

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage, bucket, names
from tests.buckets.test_names import BEFORE, NEW, OLD, A, B, Killed, Old

Call = tuple[str, ...]
"""An operation and its arguments."""
State = dict[str, str]
"""Name -> content of the directory with that name."""
NEVER = 1 << 30
STEPS = (OLD, NEW)
KINDS = (
    "publish", "publish", "exchange", "exchange", "aside", "claim", "remove", "remove_if",
    "create", "create", "tidy",
)  # fmt: skip
FAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "kills": {"killed": 0.04},
    "lost": {"killed": 0.02, "before": 0.08, "after": 0.12},
    "late": {"killed": 0.02, "before": 0.05, "after": 0.1, "late": 0.12},
    "old": {"killed": 0.01, "before": 0.03, "after": 0.15, "late": 0.05, "old": 0.6},
    "denied": {"killed": 0.01, "after": 0.05, "late": 0.03, "old": 0.08, "denied": 0.2},
}
"""Rates of what goes wrong with a request: as in `tests.buckets.proxy`."""
TELLING = {"old": (484,), "denied": (151, 160)}
"""Seeds that find what the first ones do not: moves of before that a name no longer states, a name
that is taken by a look alone, and a removal whose look failed."""


@dataclass
class Outcome:
    """What became of an operation: when it began and ended, and whether it was reported as done."""

    call: Call
    began: int
    ended: int = NEVER
    is_done: bool = False


class Network:
    """Carries out one request at a time, or does to it what the rates say."""

    def __init__(self, library: Any, generator: random.Random, rates: Mapping[str, float]) -> None:
        self.library, self._generator, self._rates = library, generator, rates
        self._before: dict[str, list[Old | None]] = defaultdict(list)
        self.late: list[Callable[[], object]] = []

    def request(self, kind: str, key: str, ask: Callable[[], Any], look: Callable[[], Any]) -> Any:
        number = self._generator.random()
        fault = ""
        for fault, rate in self._rates.items():  # noqa: B007 (used after the loop)
            if (number := number - rate) < 0:
                break
        else:
            fault = ""
        if fault == "killed":
            raise Killed
        error = self.library.exceptions.GenericError
        if fault == "denied" and kind == "delete":
            raise error("status code: 403 <Code>AccessDenied</Code>")
        if fault == "old" and kind == "get" and self._before[key]:
            old = self._generator.choice(self._before[key][-3:])
            if old is None:
                raise FileNotFoundError(key)
            return old

        def carry_out() -> Any:
            before = None
            with suppress(FileNotFoundError):
                there = look()
                before = Old(bytes(there.bytes()), dict(there.meta))
            answer = ask()
            self._before[key].append(before)
            return answer

        is_change = kind in ("put", "delete")
        if fault == "late" and is_change:
            self.late.append(carry_out)
        if fault in ("before", "late"):
            raise error("reset by peer")
        answer = carry_out() if is_change else ask()
        if fault == "after":
            raise error("reset by peer")
        return answer

    def land(self) -> None:
        """Carry out a request that is late."""
        carry_out = self.late.pop(self._generator.randrange(len(self.late)))
        with suppress(FileNotFoundError, self.library.exceptions.BaseError):
            carry_out()


class Process:
    """Does its calls in a thread that stops before every request until `step`.

    It is obstore for its storage, too.
    """

    def __init__(self, network: Network, storage: ObjectStorage, calls: list[Call]) -> None:
        self._network, self._storage, self._calls = network, storage, calls
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.outcomes: list[Outcome] = []
        self.is_over = False
        self.problem: BaseException | None = None
        self.now = 0
        storage._bucket._obstore = self
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._network.library, name)
        kind = "list" if name == "list_with_delimiter" else name
        if kind not in ("get", "put", "head", "list", "delete"):
            return function

        def call(store: object, where: Any, *args: object, **options: object) -> Any:
            self._has_stopped.release()
            self._may_go.acquire()
            key = where if isinstance(where, str) else where[-1] if where else ""
            return self._network.request(
                kind, key, lambda: function(store, where, *args, **options),
                lambda: self._network.library.get(store, key),
            )  # fmt: skip

        return call

    def step(self, now: int) -> None:
        self.now = now
        self._may_go.release()
        assert self._has_stopped.acquire(timeout=240)

    def _run(self) -> None:
        self._may_go.acquire()
        try:
            for call in self._calls:
                self.outcomes.append(outcome := Outcome(call, self.now))
                with suppress(StorageError):
                    carry_out(call, self._storage)
                    outcome.is_done, outcome.ended = True, self.now
        except Killed:
            pass
        except BaseException as error:  # for the thread of the test
            self.problem = error
        self.is_over = True
        self._has_stopped.release()


def carry_out(call: Call, storage: ObjectStorage) -> None:
    match call:
        case ("move", source, target):
            storage.rename_dir(source, target)
        case ("exchange", first, second):
            storage.exchange_dir(first, second)
        case ("remove", name):
            storage.remove_tree(name)
        case ("remove_if", name, content):
            storage.remove_tree(
                name, only_if=lambda place: storage.read(f"{place}/f").decode() == content
            )
        case ("create", name, content):
            storage.make_dir_with(name, {"f": content.encode()})
        case _:
            storage.collect_garbage()


def program_of(generator: random.Random) -> list[list[Call]]:
    """The calls of each process. Names with a dot are used once."""
    program: list[list[Call]] = []
    for process in range(3):
        calls: list[Call] = []
        mine = [A, B]
        for number in range(generator.randint(1, 2)):
            kind, step, one = generator.choice(KINDS), generator.choice(STEPS), f"{process}{number}"
            source = generator.choice(mine)
            if kind == "publish":
                calls.append(("move", source, step))
            elif kind == "exchange":
                calls.append(("exchange", source, step))
            elif kind == "aside":
                calls.append(("move", step, f".replaced-{one}"))
            elif kind == "claim":
                calls.append(("move", source, f"{source}.{one}"))
            elif kind == "remove":
                calls.append(("remove", generator.choice([step, step, source])))
            elif kind == "remove_if":
                calls.append(("remove_if", step, generator.choice([*BEFORE.values()])))
            elif kind == "tidy":
                calls.append(("tidy",))
            else:
                made = f".saving-{step}-{one}"
                mine.append(made)
                calls.append(("create", made, one))
                calls.append((generator.choice(["move", "exchange"]), made, step))
        program.append(calls)
    return program


def changes_of(outcome: Outcome, number: int) -> list[Call]:
    """The changes of which a call consists: others may come between them."""
    match outcome.call:
        case ("remove_if", name, content):
            # If the look at the content fails, the name is given back, and that is an error.
            last = "decide" if outcome.is_done else "decide or return"
            aside = f".old-{number}"
            return [("move", name, aside), (last, aside, name, content)]
        case ("tidy",):
            return []
    return [outcome.call]


def states_after(state: State, change: Call) -> list[State]:
    """The states that a change may lead to."""
    changes = [change]
    if change[0] == "decide or return":
        _, aside, name, content = change
        changes = [("decide", aside, name, content), ("move", aside, name)]
    return [later for each in changes if (later := after(state, each)) is not None]


def after(state: State, change: Call) -> State | None:
    """The state after a change; None if it is not possible."""
    state = dict(state)
    match change:
        case ("create", name, content) if name not in state:
            state[name] = content
        case ("move", source, target) if source in state and target not in state:
            state[target] = state.pop(source)
        case ("exchange", first, second) if first in state and second in state:
            state[first], state[second] = state[second], state[first]
        case ("remove", name) if name in state:
            del state[name]
        case ("decide", aside, name, content) if aside in state:
            if state[aside] == content:
                del state[aside]
            elif name not in state:
                state[name] = state.pop(aside)
        case _:
            return None
    return state


def is_explained(outcomes: list[Outcome], end: State) -> bool:
    """Whether some order of the operations leads to this end.

    What was reported as done was done, between its beginning and its end; what was not may have
    been done, in part or later, or not.
    """
    changes = [changes_of(each, number) for number, each in enumerate(outcomes)]
    seen: set[object] = set()

    def plain(state: State) -> State:
        return {f".old: {v}" if k.startswith(".old-") else k: v for k, v in state.items()}

    def leads(done: tuple[int, ...], state: State) -> bool:
        if (key := (done, *sorted(state.items()))) in seen:
            return False
        seen.add(key)
        left = [number for number, each in enumerate(changes) if done[number] < len(each)]
        if plain(state) == plain(end) and not any(outcomes[number].is_done for number in left):
            return True
        first = min((outcomes[number].ended for number in left), default=NEVER)
        for number in left:
            if outcomes[number].began > first:
                continue
            more = (*done[:number], done[number] + 1, *done[number + 1 :])
            for later in states_after(state, changes[number][done[number]]):
                if leads(more, later):
                    return True
        return False

    return leads((0,) * len(outcomes), dict(BEFORE))


def state_of(storage: ObjectStorage) -> State:
    state = {}
    for name in storage.list(""):
        if storage.is_dir(name):
            try:
                state[name] = storage.read(f"{name}/f").decode()
            except StorageError:
                # A late put makes a removed name again: a leftover without files.
                assert name.startswith(".")
    return state


def without_late_names(state: State) -> list[State]:
    """The states in which each directory has one of its names.

    A put that comes after a name with a dot was deleted makes it again.
    """
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, content in state.items():
        names_of[content].append(name)
    one_of = []
    for each in names_of.values():
        steps = [name for name in each if not name.startswith(".")]
        assert len(steps) < 2, state
        one_of.append(steps or each)
    return [dict(zip(choice, names_of, strict=True)) for choice in itertools.product(*one_of)]


def explore(seed: int, faults: str) -> None:
    generator = random.Random(seed)
    maker = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    for name, content in BEFORE.items():
        maker.make_dir(name)
        maker.write_file(f"{name}/f", content.encode())
    network = Network(maker._bucket._obstore, generator, FAULTS[faults])
    processes = []
    for calls in program_of(generator):
        storage = ObjectStorage(maker.url) if processes else maker
        storage._is_proven = True
        processes.append(Process(network, storage, calls))
    now, current = 0, processes[0]
    while alive := [each for each in processes if not each.is_over]:
        now += 1
        if network.late and generator.random() < 0.15:
            network.land()
            continue
        if current.is_over or generator.random() < 0.5:
            current = generator.choice(alive)
        current.step(now)
    for process in processes:
        process.thread.join(60)
        assert process.problem is None
    while network.late:
        network.land()
    end = state_of(ObjectStorage(maker.url))
    ObjectStorage(maker.url).collect_garbage()
    assert state_of(ObjectStorage(maker.url)) == end
    outcomes = sorted(
        (each for process in processes for each in process.outcomes), key=lambda each: each.began
    )
    ends = without_late_names(end)
    assert any(is_explained(outcomes, each) for each in ends), f"seed {seed}: {outcomes}: {end}"
    for name in end:  # as a repair removes what is left
        if name.startswith("."):
            with suppress(StorageError):
                ObjectStorage(maker.url).remove_tree(name)
    steps = {name: content for name, content in end.items() if not name.startswith(".")}
    assert state_of(ObjectStorage(maker.url)) == steps, f"seed {seed}: {outcomes}"


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(bucket, pause, 1e-6)
    monkeypatch.setattr(names, "_NUM_THREADS", 1)  # a process has one request at a time


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("faults", FAULTS)
def test_some_order_explains_what_processes_do_at_once(faults: str) -> None:
    """P18."""
    for seed in (*range(20), *TELLING.get(faults, ())):
        explore(seed, faults)


@pytest.mark.nightly
@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("faults", FAULTS)
def test_some_order_explains_what_thousands_of_programs_do(faults: str) -> None:
    """P18."""
    for seed in range(20, 4000):
        explore(seed, faults)

"""Names in a bucket: killed at every request, and two processes in every order of requests.

Every outcome must be one that the same operations have one after the other, in some order.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from holdfast.errors import StorageError

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage, bucket

Operation = Callable[[ObjectStorage], None]
State = dict[str, str]
"""Name -> content of the directory with that name."""

# The name of the first states the step that it is made for: its move is an early one.
A, B = ".saving-iter_0000002-a", ".saving-b"
OLD, NEW = "iter_0000001", "iter_0000002"
BEFORE = {OLD: "old", A: "new", B: "other"}


class Killed(BaseException):
    """The process ends here."""


def fill(root: str) -> ObjectStorage:
    """Make the directories; the storage of the process that has made them."""
    storage = ObjectStorage(root)
    for name, content in BEFORE.items():
        storage.make_dir(name)
        storage.write_file(f"{name}/f", content.encode())
    return storage


def process_of(
    name: str, maker: ObjectStorage, observer: Callable[..., None] | None = None
) -> ObjectStorage:
    """The process that does an operation: the one that made the directories, or another."""
    if name not in MAKERS:
        return ObjectStorage(maker.url, observer=observer)
    maker._bucket._observer = observer
    return maker


def state_of(storage: ObjectStorage) -> State:
    """What a new process sees; listings may have names in them that stand for nothing any more."""
    names = [name for name in storage.list("") if storage.is_dir(name)]
    for name in names:
        assert storage.exists(name)
    return {
        ".old" if name.startswith(".old-") else name: storage.read(f"{name}/f").decode()
        for name in names
    }


def move(source: str, target: str) -> Operation:
    return lambda storage: storage.rename_dir(source, target)


def exchange(first: str, second: str) -> Operation:
    return lambda storage: storage.exchange_dir(first, second)


def remove(name: str) -> Operation:
    return lambda storage: storage.remove_tree(name)


def remove_if(name: str, content: str) -> Operation:
    def run(storage: ObjectStorage) -> None:
        storage.remove_tree(
            name, only_if=lambda place: storage.read(f"{place}/f").decode() == content
        )

    return run


OPERATIONS: dict[str, Operation] = {
    "publish a": move(A, NEW),
    "publish b": move(B, NEW),
    "publish over": move(B, OLD),
    "claim a": move(A, f"{A}.1"),
    "finish a": move(A, NEW),
    "aside": move(OLD, ".replaced"),
    "replace by a": exchange(A, OLD),
    "replace by b": exchange(B, OLD),
    "remove": remove(OLD),
    "remove if old": remove_if(OLD, "old"),
    "remove a": remove(A),
}


def copy_of(maker: ObjectStorage) -> ObjectStorage:
    """Another process that has seen what the maker has seen."""
    twin = ObjectStorage(maker.url)
    twin._names._seen = dict(maker._names._seen)
    return twin


MAKERS = {"publish a", "replace by a"}


def attempt(operation: Operation, storage: ObjectStorage) -> bool:
    """Whether it was done; a StorageError says that it was not."""
    try:
        operation(storage)
    except StorageError:
        return False
    return True


def one_after_the_other(*names: str) -> tuple[tuple[bool, ...], State]:
    root = f"memory://{secrets.token_hex(8)}/run"
    maker = fill(root)
    done = tuple(attempt(OPERATIONS[name], process_of(name, maker)) for name in names)
    return done, state_of(ObjectStorage(root))


def count_requests(name: str) -> int:
    root = f"memory://{secrets.token_hex(8)}/run"
    seen: list[str] = []
    storage = process_of(name, fill(root), lambda kind, *rest: seen.append(kind))
    attempt(OPERATIONS[name], storage)
    return len(seen)


@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_every_request_it_was_done_or_was_not(name: str) -> None:
    (is_possible,), done = one_after_the_other(name)  # a name that is taken is refused
    outcomes = []
    for at in range(1, count_requests(name) + 1):
        root = f"memory://{secrets.token_hex(8)}/run"
        maker = fill(root)
        number = itertools.count(1)

        def watch(*request: object, number: Iterator[int] = number, at: int = at) -> None:
            if next(number) >= at:  # a dead process sends nothing more
                raise Killed

        with suppress(Killed):
            OPERATIONS[name](process_of(name, maker, watch))
        state = state_of(ObjectStorage(root))
        # Between the two renames of a conditional removal it has the name of a leftover.
        middle = {k: v for k, v in BEFORE.items() if k != OLD} | {".old": "old"}
        assert state in (BEFORE, done, middle)
        outcomes.append(state == done)
        # Whatever is left of it, the next process works, and its own operation is whole.
        storage = ObjectStorage(root)
        storage.collect_garbage()
        assert state_of(storage) == state
        if state == BEFORE:
            assert attempt(OPERATIONS[name], storage) == is_possible
            assert state_of(storage) == done
    assert not (is_possible and outcomes[0])
    assert sorted(outcomes) == outcomes, "it was undone"


def in_between(first: str, second: str, at: int) -> tuple[tuple[bool, bool], State]:
    """Run the first up to a request, then all of the second, then the rest of the first."""
    root = f"memory://{secrets.token_hex(8)}/run"
    maker = fill(root)
    number = itertools.count(1)
    is_there, may_go_on = threading.Event(), threading.Event()

    def watch(*request: object) -> None:
        if next(number) == at:
            is_there.set()
            assert may_go_on.wait(20)

    done: list[bool] = []

    def run() -> None:
        done.append(attempt(OPERATIONS[first], process_of(first, maker, watch)))
        is_there.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_there.wait(20)
    # Two operations of one process are those of two that were given its memory.
    twin = maker if first not in MAKERS else copy_of(maker)
    other = attempt(OPERATIONS[second], process_of(second, twin))
    may_go_on.set()
    thread.join(20)
    return (done[0], other), state_of(ObjectStorage(root))


PAIRS = list(itertools.product(OPERATIONS, repeat=2))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_at_once_are_as_one_after_the_other(first: str, second: str) -> None:
    (a, b), state = one_after_the_other(first, second)
    allowed = [((a, b), state)]
    (b, a), state = one_after_the_other(second, first)
    allowed.append(((a, b), state))
    if (first, second) == ("publish a", "replace by a"):
        # Its name stands for what was replaced by then, and a process publishes what it has made.
        allowed.append(((False, True), one_after_the_other(second)[1]))
    for at in range(1, count_requests(first) + 2):
        outcome = in_between(first, second, at)
        assert outcome in allowed, f"{first}, at its request {at} {second}"


@pytest.mark.parametrize(("first", "second"), [p for p in PAIRS if p[0] != "remove if old"])
def test_after_a_killed_one_the_next_is_whole(first: str, second: str) -> None:
    """What a dead process has left half-done is completed or prevented, never both."""
    (_, alone), (_, both) = one_after_the_other(second), one_after_the_other(first, second)
    for at in range(1, count_requests(first) + 1):
        root = f"memory://{secrets.token_hex(8)}/run"
        maker = fill(root)
        number = itertools.count(1)

        def watch(*request: object, number: Iterator[int] = number, at: int = at) -> None:
            if next(number) >= at:
                raise Killed

        with suppress(Killed, StorageError):
            OPERATIONS[first](process_of(first, maker, watch))
        attempt(OPERATIONS[second], ObjectStorage(root))
        state = state_of(ObjectStorage(root))
        assert state in (alone, both), f"{first}, killed at its request {at}, then {second}"
        ObjectStorage(root).collect_garbage()
        assert state_of(ObjectStorage(root)) == state


class Old:
    """What a cache on the way gives: an object as it was, or that it is not there."""

    def __init__(self, data: bytes, meta: dict[str, object]) -> None:
        self._data, self.meta = data, meta

    def bytes(self) -> bytes:
        return self._data


class Cached:
    """obstore's functions: the answer to one put is lost, and then a cache gives what was before.

    Args:
        library: obstore.
        at: Which put.
        num_old: How many looks at that object find the old one.
    """

    def __init__(self, library: Any, at: int, num_old: int) -> None:
        self._library, self._at, self._left = library, at, num_old
        self._key, self._before = "", None
        self.num_puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def put(self, store: object, key: str, *args: object, **options: object) -> object:
        self.num_puts += 1
        if self.num_puts != self._at:
            return self._library.put(store, key, *args, **options)
        self._key = key
        with suppress(FileNotFoundError):
            answer = self._library.get(store, key)
            self._before = Old(bytes(answer.bytes()), dict(answer.meta))
        self._library.put(store, key, *args, **options)
        raise self._library.exceptions.GenericError("after: reset by peer")

    def get(self, store: object, key: str, **options: object) -> object:
        if key != self._key or not self._left:
            return self._library.get(store, key, **options)
        self._left -= 1
        if self._before is None:
            raise FileNotFoundError(key)
        return self._before


@pytest.mark.parametrize("name", OPERATIONS)
def test_old_answers_after_a_lost_one_give_no_data_two_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that removes one name takes the data from the other."""
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.0001)
    _, done = one_after_the_other(name)
    for at, num_old in itertools.product(range(1, 30), range(1, 4)):
        root = f"memory://{secrets.token_hex(8)}/run"
        storage = process_of(name, fill(root))
        storage._bucket._obstore = Cached(storage._bucket._obstore, at, num_old)
        attempt(OPERATIONS[name], storage)
        later = ObjectStorage(root)
        later.collect_garbage()
        state = state_of(later)
        middle = {k: v for k, v in BEFORE.items() if k != OLD} | {".old": "old"}
        assert state in (BEFORE, done, middle), f"put {at}, {num_old} old answers"
        if storage._bucket._obstore.num_puts < at:
            return
    raise AssertionError("more puts than were tried")

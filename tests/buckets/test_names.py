"""Names in a bucket: killed at every request, and two processes in every order of requests.

Every outcome must be one that the same operations have one after the other, in some order.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
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
REPLACING = {"replace by a": A, "replace by b": B}
MOVED = {
    "publish a": A, "claim a": A, "finish a": A, "publish b": B, "publish over": B, **REPLACING,
}  # fmt: skip


def attempt(operation: Operation, storage: ObjectStorage) -> bool:
    """Whether it was done; a StorageError says that it was not."""
    try:
        operation(storage)
    except StorageError:
        return False
    return True


def one_after_the_other(
    *names: str, operations: Mapping[str, Operation] = OPERATIONS
) -> tuple[tuple[bool, ...], State]:
    root = f"memory://{secrets.token_hex(8)}/run"
    maker = fill(root)
    done = tuple(attempt(operations[name], process_of(name, maker)) for name in names)
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
            assert may_go_on.wait(60)

    done: list[bool] = []

    def run() -> None:
        done.append(attempt(OPERATIONS[first], process_of(first, maker, watch)))
        is_there.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_there.wait(60)
    # Two operations of one process are those of two that were given its memory.
    twin = maker if first not in MAKERS else copy_of(maker)
    other = attempt(OPERATIONS[second], process_of(second, twin))
    may_go_on.set()
    thread.join(60)
    return (done[0], other), state_of(ObjectStorage(root))


def outcomes_of(first: str, second: str) -> list[tuple[tuple[bool, ...], State]]:
    """What two at once may report and leave behind."""
    (b, a), state = one_after_the_other(second, first)
    allowed = [one_after_the_other(first, second), ((a, b), state)]
    # A process moves what it has seen at a name with a dot. If that was exchanged since, it moves
    # nothing else; and what it wanted is done, if it wanted the same.
    is_same = first == second
    if MOVED.get(first, "") == REPLACING.get(second):
        replaced = one_after_the_other(second)[1]
        allowed += [((each, True), replaced) for each in {is_same, False}]
    if MOVED.get(second, "") == REPLACING.get(first):
        replaced = one_after_the_other(first)[1]
        allowed += [((True, each), replaced) for each in {is_same, False}]
    if (first, second) == ("publish a", "publish a"):
        allowed.append(((True, True), state))  # both make the one move that the name states
    return allowed


NUM_OLD = (0, 2, 3, 6)
PAIRS = [
    pytest.param(*pair, marks=() if sum(places) % 5 == 0 else pytest.mark.slow)
    for pair, places in zip(
        itertools.product(OPERATIONS, repeat=2),
        itertools.product(range(len(OPERATIONS)), repeat=2),
        strict=True,
    )
]
"""Each operation is the first of two or three quick pairs, and the second of as many."""


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_at_once_are_as_one_after_the_other(first: str, second: str) -> None:
    allowed = outcomes_of(first, second)
    for at in range(1, count_requests(first) + 2):
        outcome = in_between(first, second, at)
        assert outcome in allowed, f"{first}, at its request {at} {second}"


@pytest.mark.parametrize(("first", "second"), [p for p in PAIRS if p.values[0] != "remove if old"])
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
        self._data, self.meta, self.range = data, meta, (0, len(data))

    def bytes(self) -> bytes:
        return self._data


class Cached:
    """obstore's functions: the answer to one put is lost, and then a cache gives what was before.

    Args:
        library: obstore.
        at: Which put.
        num_old: How many looks at each object that was put find the one before.
        then: Called when that put was carried out.
    """

    def __init__(
        self, library: Any, at: int, num_old: int, then: Callable[[], object] = lambda: None
    ) -> None:
        self._library, self._at, self._num_old = library, at, num_old
        self._then = then
        self._before: dict[str, Old | None] = {}
        self._left: dict[str, int] = {}
        self.num_puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def put(self, store: object, key: str, *args: object, **options: object) -> object:
        self.num_puts += 1
        if self.num_puts > self._at:
            return self._library.put(store, key, *args, **options)
        self._before[key] = None
        with suppress(FileNotFoundError):
            answer = self._library.get(store, key)
            self._before[key] = Old(bytes(answer.bytes()), dict(answer.meta))
        answer = self._library.put(store, key, *args, **options)
        if self.num_puts < self._at:
            return answer
        self._left = dict.fromkeys(self._before, self._num_old)
        self._then()
        raise self._library.exceptions.GenericError("after: reset by peer")

    def get(self, store: object, key: str, **options: object) -> object:
        if not self._left.get(key):
            return self._library.get(store, key, **options)
        self._left[key] -= 1
        before = self._before[key]
        if before is None:
            raise FileNotFoundError(key)
        return before


class SameCache:
    """obstore's functions for another process that gets the old answers of a cache, too."""

    def __init__(self, cache: Cached) -> None:
        self._cache = cache
        self.put = cache._library.put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def test_notes_are_of_a_directory_and_not_of_its_name() -> None:
    """A repair has finished the save: its name stands for the version that it has replaced."""
    maker = fill(f"memory://{secrets.token_hex(8)}/run")
    maker.annotate(A, "of the new one", ["f", "held"], held={"held": b"new"}, aside=["f"])
    for number in range(17):  # so many that it does not know the first any more
        maker.make_dir(f".saving-c{number}")
    exchange(A, OLD)(ObjectStorage(maker.url))
    exchange(A, OLD)(maker)
    later = ObjectStorage(maker.url)
    assert later.list(OLD) == ["f"]
    assert later.read(f"{OLD}/f") == b"old"
    assert later.note(OLD) == ""


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
        is_done = attempt(OPERATIONS[name], storage)
        later = ObjectStorage(root)
        later.collect_garbage()
        state = state_of(later)
        middle = {k: v for k, v in BEFORE.items() if k != OLD} | {".old": "old"}
        allowed = (done,) if is_done else (BEFORE, done, middle)
        assert state in allowed, f"put {at}, {num_old} old answers"
        if storage._bucket._obstore.num_puts < at:
            return
    raise AssertionError("more puts than were tried")


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_that_lost_an_answer_learns_what_became_of_it(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the other has changed the names since, and a cache shows both what was before.

    What is reported as done was done; each directory has one name, or none after a removal.
    """
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.0001)
    (_, alone), (_, other) = one_after_the_other(first), one_after_the_other(second)
    exact = outcomes_of(first, second)
    both = [state for _, state in exact]
    middle = [{k: v for k, v in BEFORE.items() if k != OLD} | {".old": "old"}]
    part = OPERATIONS | {"remove if old": move(OLD, ".old-0")}
    parts = [one_after_the_other(first, second, operations=part)[1]]
    for at, num_old, is_shared in itertools.product(range(1, 30), NUM_OLD, (False, True)):
        root = f"memory://{secrets.token_hex(8)}/run"
        maker = fill(root)
        storage = process_of(first, maker)
        twin = maker if first not in MAKERS else copy_of(maker)
        late = process_of(second, twin)
        done: list[bool] = []
        cache = Cached(
            storage._bucket._obstore,
            at,
            num_old,
            lambda late=late, done=done: done.append(attempt(OPERATIONS[second], late)),
        )
        storage._bucket._obstore = cache
        if is_shared:
            late._bucket._obstore = SameCache(cache)
        a = attempt(OPERATIONS[first], storage)
        if cache.num_puts < at:
            return
        if not done:
            continue  # that put was refused
        later = ObjectStorage(root)
        later.collect_garbage()
        state = state_of(later)
        allowed = [*both]
        if not a:
            allowed += [other, *middle, *parts]
        if not done[0]:
            allowed += [alone, *middle]
        if not a and not done[0]:
            allowed.append(BEFORE)
        case = f"put {at} of {first} ({a}), then {second} ({done}); {num_old} old answers"
        assert state in allowed, case + " to both" * is_shared
        # A cache may hide from the removal, between its two moves, what it has moved.
        if num_old < (1 if first == "remove if old" else 3):
            assert ((a, done[0]), state) in exact, case
    raise AssertionError("more puts than were tried")


@pytest.mark.parametrize("name", REPLACING)
def test_a_move_is_not_tried_again_with_what_its_source_got_from_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is lost, and the step is removed and saved so often that its name does not state
    the move any more: the version that it has replaced does not come back over the newest."""
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.0001)
    for at in range(1, 30):
        storage = process_of(name, fill(f"memory://{secrets.token_hex(8)}/run"))

        contents = ["newest", "later"]

        def save_again(url: str = storage.url, contents: list[str] = contents) -> None:
            other = ObjectStorage(url)
            while contents:
                content = contents.pop()
                other.remove_tree(OLD)
                other.make_dir(f".saving-{content}")
                other.write_file(f".saving-{content}/f", content.encode())
                other.rename_dir(f".saving-{content}", OLD)

        cache = Cached(storage._bucket._obstore, at, 0, save_again)
        storage._bucket._obstore = cache
        is_done = attempt(OPERATIONS[name], storage)
        if cache.num_puts < at:
            return
        if contents:
            continue  # that put was refused
        source = REPLACING[name]
        end = {**BEFORE, OLD: "newest"}
        first, last = {**end, source: "old"}, {**end, source: "newest", OLD: BEFORE[source]}
        allowed = (first, last) if is_done else (first, end)
        assert state_of(ObjectStorage(storage.url)) in allowed, f"put {at}, {is_done}"


def killed_at_put(operation: Operation, storage: ObjectStorage, at: int) -> Cached:
    """Do an operation whose process dies when this put was carried out; what a cache has then."""

    def die() -> None:
        raise Killed

    storage._is_proven = True
    cache = Cached(storage._bucket._obstore, at, 3, die)
    storage._bucket._obstore = cache
    with suppress(Killed):
        operation(storage)
    return cache


def test_a_removal_that_gets_old_answers_brings_no_name_back() -> None:
    """The process that moved the directory was killed before it freed the first name."""
    root = f"memory://{secrets.token_hex(8)}/run"
    fill(root)
    cache = killed_at_put(move(OLD, ".replaced"), ObjectStorage(root), 2)
    remover = ObjectStorage(root)
    remover._bucket._obstore = SameCache(cache)
    cache._left = {key: 3 for key in cache._left if key.endswith(f"{OLD}.dir")}
    assert cache._left
    attempt(remove(".replaced"), remover)
    assert OLD not in ObjectStorage(root).list("")
    assert not ObjectStorage(root).is_dir(OLD)


class Between:
    """obstore's functions: something happens after the first read."""

    def __init__(self, library: Any, then: Callable[[], object]) -> None:
        self._library, self._then = library, then
        self._num_reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def get(self, *args: object, **options: object) -> object:
        self._num_reads += 1
        if self._num_reads == 2:
            self._then()
        return self._library.get(*args, **options)


def test_a_look_at_a_name_that_was_moved_waits_for_no_other_moment() -> None:
    """Between its two requests the new name is freed so often that it states the move no more."""
    root = f"memory://{secrets.token_hex(8)}/run"
    fill(root)
    killed_at_put(move(B, NEW), ObjectStorage(root), 2)

    def change() -> None:
        other = ObjectStorage(root)
        for number in range(3):
            other.remove_tree(NEW)
            other.make_dir(f".saving-{number}")
            other.rename_dir(f".saving-{number}", NEW)

    reader = ObjectStorage(root)
    reader._bucket._obstore = Between(reader._bucket._obstore, change)
    assert not reader.is_dir(B)
    assert reader._bucket._obstore._num_reads > 2

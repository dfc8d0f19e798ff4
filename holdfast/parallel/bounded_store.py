"""A c10d store of which no request lasts longer than a limit.

torch bounds the waiting for a key, but not the waiting for the store's answer: if the link to its
host is cut, or the store's process stops, any request may wait without end, and that within a lock.
So each request is made in a thread, and given up by the one who asked when its limit has passed.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_LIMIT_S = 60.0
_MAX_POSTED = 16
"""Requests that wait for the thread, up to which another one may be posted."""
_GRACE_S = 0.5
"""Time that the answer to a wait may take beyond the wait itself."""


class StoreSilentError(RuntimeError):
    """The store has not answered a request within its limit; RuntimeError as from torch."""


class _Request:
    """One request: made by the line's thread, while another one waits for it."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make
        self.result: object = None
        self.error: BaseException | None = None
        self.is_over = threading.Event()

    def run(self) -> None:
        """Make the request, and keep its result or error."""
        try:
            self.result = self.make()
        except BaseException as error:  # raised by the one who asked
            self.error = error
        self.is_over.set()


class _Later:
    """Requests that the line's thread makes once they are due, unless they are withdrawn by then.

    It looks whether there are any, so that none of them has to wake it.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, Callable[[], object]]] = {}
        """By key: when to make it, and how. Each change is one call in C, so needs no lock."""
        self._every_s: float | None = None
        """How often to look; None if nothing was ever held."""

    def hold(self, key: str, make: Callable[[], object], *, after_s: float) -> bool:
        """Hold a request; return True if the thread is to be woken, or it would look too late.

        It is made in the place of one that is held under the key already, when that one is due.
        """
        due = time.monotonic() + after_s
        self._held[key] = min(due, self._held.get(key, (due, make))[0]), make
        before, self._every_s = self._every_s, after_s
        return before is None or after_s < before

    def withdraw(self, key: str) -> None:
        """Forget what is held under a key, if it was not made yet."""
        self._held.pop(key, None)

    def due_in_s(self) -> float | None:
        """Return the seconds up to the next look; None if there is nothing to look for."""
        dues = [due for due, _ in [*self._held.values()]]
        return max(min(dues) - time.monotonic(), 0.0) if dues else self._every_s

    def make_due(self) -> None:
        """Make what is due."""
        now = time.monotonic()
        for key, (due, _) in [*self._held.items()]:
            # Either this finds it, or who withdraws it: what that one asks for next comes after it.
            if due <= now and (taken := self._held.pop(key, None)) is not None:
                _Request(taken[1]).run()


class _Line:
    """The thread that makes the requests to one store, one after another."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._later = _Later()
        self._given_up: _Request | None = None
        self._threads: list[threading.Thread] = []
        """None or one."""
        at_exit = partial(_end, self._requests, self._threads)
        atexit.register(at_exit)
        # Without a wait: the collector of cyclic garbage may run this in the middle of any code,
        # and a wait there would let another thread start a second collection, which crashes.
        weakref.finalize(self, _stop, self._requests, at_exit).atexit = False

    def ask(self, make: Callable[[], object], *, what: str, limit_s: float) -> object:
        """Return the result of a request, or raise its error; StoreSilentError at the limit."""
        if self._is_stuck():
            raise StoreSilentError(f"{what}: the store is silent since an earlier request")
        request = self._put(make)
        if not request.is_over.wait(limit_s):
            self._given_up = request
            raise StoreSilentError(f"{what}: the store has not answered for {limit_s:.3g} s")
        if request.error is not None:
            raise request.error
        return request.result

    def post(self, make: Callable[[], object]) -> None:
        """Make a request after those before it, without a wait; its error is lost."""
        # What a silent store does not take does not pile up.
        if not self._is_stuck() and self._requests.qsize() < _MAX_POSTED:
            self._put(make)

    def post_later(self, key: str, make: Callable[[], object], *, after_s: float) -> None:
        """Make a request as `post` does, but after that time, and not if it is withdrawn."""
        if self._later.hold(key, make, after_s=after_s):
            self._put(lambda: None)

    def withdraw(self, key: str) -> None:
        """Withdraw what `post_later` holds under a key."""
        self._later.withdraw(key)

    def _is_stuck(self) -> bool:
        """Return True if a request that was given up still holds the store's lock."""
        if self._given_up is not None and self._given_up.is_over.is_set():
            self._given_up = None
        return self._given_up is not None  # any other request would only wait behind it

    def _put(self, make: Callable[[], object]) -> _Request:
        if not self._threads:
            thread = threading.Thread(
                target=_serve,
                args=(self._requests, self._later),
                name="holdfast-store",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
        request = _Request(make)
        self._requests.put(request)
        return request


def _serve(requests: queue.SimpleQueue[_Request | None], later: _Later) -> None:
    """Make requests until None comes."""
    # What the line has, and not the line: the thread must not keep it alive.
    while True:
        try:
            request = requests.get(timeout=later.due_in_s())
        except queue.Empty:
            later.make_due()
            continue
        if request is None:
            return
        request.run()
        del request


def _stop(requests: queue.SimpleQueue[_Request | None], at_exit: Callable[[], None]) -> None:
    """End the thread after the requests that it has."""
    requests.put(None)
    atexit.unregister(at_exit)


def _end(requests: queue.SimpleQueue[_Request | None], threads: Sequence[threading.Thread]) -> None:
    """Before the interpreter ends: end the thread and wait for it, but not for a silent store."""
    requests.put(None)
    # The interpreter must not end while the thread is in a request: it would abort the process.
    for thread in threads:
        thread.join(_GRACE_S)


class BoundedStore(Store):
    """Passes requests on to another store, and gives up those that are not answered in time.

    What is given up may still be done later. Until then each further request fails at once. All
    views of one store (`prefixed`) share its thread.

    Args:
        store: where the requests go.
        limit_s: for the answer to one request; `within` sets one for several.
    """

    def __init__(self, store: Store, *, limit_s: float = _LIMIT_S) -> None:
        super().__init__()
        self.raw = store
        self._limit_s = limit_s
        self._deadline = float("inf")
        self._prefix = ""
        self._line = _Line()

    @classmethod
    def of(cls, store: Store, *, limit_s: float | None = None) -> BoundedStore:
        """Return a view of the store with this limit; None for the one it has, or 60 s."""
        view = store.prefixed("") if isinstance(store, cls) else cls(store)
        if limit_s is not None:
            view._limit_s = limit_s
        return view

    def prefixed(self, prefix: str) -> BoundedStore:
        """Return a view of the store with every key under `prefix`."""
        view = BoundedStore(self.raw, limit_s=self._limit_s)
        view._line = self._line
        view._prefix = f"{self._prefix}{prefix}/" if prefix else self._prefix
        return view

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Give all requests of this view in the body so many seconds together."""
        before, self._deadline = self._deadline, time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = before

    @property
    def host(self) -> str:
        """The host of the store; empty if it has none."""
        store: Any = self.raw
        while not hasattr(store, "host") and hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(getattr(store, "host", ""))

    def _ask(
        self, name: str, *args: Any, what: str | Sequence[str], limit_s: float | None = None
    ) -> Any:
        """Make a request of this name; StoreSilentError if it is not answered in time."""
        call = getattr(self.raw, name)
        limit_s = self._limit_s if limit_s is None else limit_s + _GRACE_S
        limit_s = max(min(limit_s, self._deadline - time.monotonic()), 0.0)
        return self._line.ask(lambda: call(*args), what=f"{name} {what!r}", limit_s=limit_s)

    def set(self, key: str, value: Any) -> None:
        """See torch."""
        self._ask("set", self._prefix + key, value, what=key)

    def post(self, key: str, value: str) -> None:
        """Set a key at once or soon, without a wait: for what may get lost.

        Later requests come after it.
        """
        key, raw = self._prefix + key, self.raw  # not `self`, which the thread must not keep alive
        self._line.post(lambda: raw.set(key, value))

    def post_later(self, key: str, value: str, *, after_s: float) -> None:
        """Set a key as `post` does, but after that time, and not if it is withdrawn before.

        What comes under the same key meanwhile takes its place, and is set at its time.

        Cost, if it is withdrawn: neither a request nor a turn of the thread, which looks by itself
        from the first call on, every `after_s` seconds.
        """
        key, raw = self._prefix + key, self.raw
        self._line.post_later(key, lambda: raw.set(key, value), after_s=after_s)

    def withdraw(self, key: str) -> None:
        """Withdraw what `post_later` was to set, if it has not yet."""
        self._line.withdraw(self._prefix + key)

    def get(self, key: str) -> bytes:
        """See torch; a key that is not there within the limit is an error."""
        return bytes(self._ask("get", self._prefix + key, what=key))

    def add(self, key: str, value: int) -> int:
        """See torch."""
        return int(self._ask("add", self._prefix + key, value, what=key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """See torch."""
        return bytes(self._ask("compare_set", self._prefix + key, expected, desired, what=key))

    def check(self, keys: list[str]) -> bool:
        """See torch."""
        return bool(self._ask("check", [self._prefix + key for key in keys], what=keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See torch."""
        values = self._ask("multi_get", [self._prefix + key for key in keys], what=keys[:3])
        return [bytes(value) for value in values]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch."""
        names = [self._prefix + key for key in keys]
        limit = timedelta(seconds=self._limit_s) if timeout is None else timeout
        self._ask("wait", names, limit, what=keys, limit_s=limit.total_seconds())

    def delete_key(self, key: str) -> bool:
        """See torch."""
        return bool(self._ask("delete_key", self._prefix + key, what=key))

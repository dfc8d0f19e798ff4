"""A proxy between the library and its server, that fails as networks and stores do."""

from __future__ import annotations

import http.client
import random
import re
import secrets
import socket
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal[
    "", "500 before", "500 after", "200 error", "cut before", "cut after", "cut midway",
    "reset after", "slow down", "delay", "late", "old", "denied", "silent before", "silent after",
    "silent midway", "dripping", "too long", "too short", "no range", "no xml", "no ETag",
    "weak ETag", "new ETag", "404",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    "500 before", "500 after", "cut before", "cut after", "cut midway", "reset after", "slow down",
    "delay",
)  # fmt: skip
"""Before: the server never sees the request. After: it does, and its answer is lost; midway: of
which the second half is. Not among these, since no store of its own does so: late, the request
fails and yet comes to the server, when a second try may have been answered; old, a cache gives the
answer of some changes before. Nor 200 error, which only the end of an upload is answered with; nor
denied, which no second try changes; nor those after which the connection stays open: silent,
nothing more comes, and dripping, the answer comes byte by byte; nor what broken proxies do: too
long and too short, the answer's length is not that of its range; no range, the whole object comes;
no xml, its first bytes are others; no ETag, it is left out; weak ETag, it is marked as weak; new
ETag, each answer has another one; 404, the server never sees the request."""
_DELAY_S = 0.05
_DRIP_S = 0.2
_STAY_S = 60.0
_NUM_OLD = 12
"""How many changes of the server an old answer may lag behind."""


Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and body."""


@dataclass(frozen=True)
class Request:
    """What a client has asked; its handler goes on to the next one."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class FaultProxy:
    """Forwards requests to a server; `choose` says what goes wrong with each.

    Attributes:
        requests: By method.
        faults: By kind.
    """

    def __init__(self, server: str, choose: Callable[[str, str], Fault]) -> None:
        self._address = server.removeprefix("http://")
        self._choose = choose
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._late: list[threading.Thread] = []
        self._num_changes = 0
        # By what was asked: answers, and after how many changes.
        self._answers: dict[tuple[str, str, str], list[tuple[int, Answer]]] = defaultdict(list)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        nbytes = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(nbytes) if nbytes else b""
        with self._lock:
            self.requests[handler.command] += 1
            fault = self._choose(handler.command, handler.path)
            if fault:
                self.faults[fault] += 1
        if fault == "delay":
            time.sleep(_DELAY_S)
        if fault in ("500 before", "slow down", "200 error", "404"):
            status = {"slow down": 503, "200 error": 200, "404": 404}.get(fault, 500)
            return self._refuse(handler, status)
        if fault == "denied":
            return self._deny(handler, body)
        if fault == "cut before":
            return self._cut(handler)
        if fault == "silent before":
            return self._stay(handler)
        asked = dict(handler.headers.items())
        if fault == "no range":
            asked = {name: value for name, value in asked.items() if name.lower() != "range"}
        request = Request(handler.command, handler.path, asked, body)
        if fault == "late":
            thread = threading.Thread(target=self._forward_later, args=(request,), daemon=True)
            self._late.append(thread)
            thread.start()
            return self._refuse(handler, 500)
        status, headers, data = self._old_or_new(request, is_old=fault == "old")
        if fault == "too long":
            data += b"more"
        elif fault == "too short":
            data = data[: len(data) // 2]
        elif fault == "no xml":
            data = b"<<<<" + data[4:]
        if fault == "500 after":
            return self._refuse(handler, 500)
        if fault == "reset after":
            # Closed with bytes that were not sent: the client's system sees a reset.
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if fault in ("cut after", "reset after"):
            return self._cut(handler)
        if fault == "silent after":
            return self._stay(handler)
        if fault.endswith("ETag"):
            headers = _with_etag(headers, fault)
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        length = {k.lower(): v for k, v in headers}.get("content-length")
        handler.send_header(
            "Content-Length", length if handler.command == "HEAD" and length else str(len(data))
        )
        handler.end_headers()
        if fault == "dripping":
            return self._drip(handler, data)
        is_half = fault in ("cut midway", "silent midway")
        if handler.command != "HEAD":
            handler.wfile.write(data[: len(data) // 2] if is_half else data)
        if fault == "silent midway":
            self._stay(handler)
        if fault == "cut midway":
            self._cut(handler)
        return None

    def settle(self) -> None:
        """Return when the late requests have come to the server."""
        for thread in self._late:
            thread.join()

    def _old_or_new(self, request: Request, *, is_old: bool) -> Answer:
        """Return an answer: with `is_old` one of before, if there was one."""
        if request.method not in ("GET", "HEAD"):
            answer = self._forward(request)
            with self._lock:
                self._num_changes += 1
            return answer
        with self._lock:
            now = self._num_changes
            key = (request.method, request.path, request.headers.get("range", ""))
            before = self._answers[key]
            old = [answer for changes, answer in before if now - changes <= _NUM_OLD]
        if is_old and old:
            return old[0]
        answer = self._forward(request)
        with self._lock:
            before[:] = [*before[-8:], (now, answer)]
        return answer

    def _forward_later(self, request: Request) -> None:
        time.sleep(_DELAY_S)
        with suppress(OSError, http.client.HTTPException):
            self._old_or_new(request, is_old=False)

    def _forward(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "connection"}
        connection.request(request.method, request.path, body=request.body, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int) -> None:
        code = {503: "SlowDown", 403: "AccessDenied", 404: "NoSuchKey"}.get(status, "InternalError")
        data = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode()
        self._answer(handler, status, data)

    def _deny(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """As S3 does: a request that deletes many is answered, with an error for each object."""
        if handler.command != "POST" or not body.startswith(b"<Delete"):
            return self._refuse(handler, 403)
        errors = [
            b"<Error>%s<Code>AccessDenied</Code><Message>of the test</Message></Error>" % key
            for key in re.findall(rb"<Key>[^<]*</Key>", body)
        ]
        data = b"<DeleteResult>%s</DeleteResult>" % b"".join(errors)
        return self._answer(handler, 200, data)

    def _answer(self, handler: BaseHTTPRequestHandler, status: int, data: bytes) -> None:
        handler.send_response_only(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def _stay(self, handler: BaseHTTPRequestHandler) -> None:
        """Say nothing more until the client leaves."""
        handler.connection.settimeout(_STAY_S)
        with suppress(OSError):
            handler.connection.recv(1)
        self._cut(handler)

    def _drip(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        """Send byte by byte, each in time, until the client leaves."""
        for at in range(len(data)):
            handler.wfile.write(data[at : at + 1])
            time.sleep(_DRIP_S)

    def _cut(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.close()


def _with_etag(headers: list[tuple[str, str]], fault: Fault) -> list[tuple[str, str]]:
    if fault == "no ETag":
        return [(name, value) for name, value in headers if name.lower() != "etag"]
    new = {"new ETag": f'"{secrets.token_hex(16)}"'}.get(fault)
    return [
        (name, (new or f"W/{value}") if name.lower() == "etag" else value)
        for name, value in headers
    ]


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], object]) -> Iterator[str]:
    """Start an HTTP server in threads, which answers by a function; give its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two writes: the second would wait 40 ms for the client's delayed ACK.
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            return

        def _any(self) -> None:
            try:
                answer(self)
            except OSError:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            return

    http_server = Server(("127.0.0.1", 0), Handler)
    # It looks so often whether it is to end.
    thread = threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http_server.server_port}"
    finally:
        http_server.shutdown()
        http_server.server_close()


@contextmanager
def fault_proxy(
    server: str, choose: Callable[[str, str], Fault]
) -> Iterator[tuple[FaultProxy, str]]:
    """Start a proxy; give it and its address."""
    proxy = FaultProxy(server, choose)
    with serving(proxy.handle) as address:
        yield proxy, address


def at_random(seed: int, rate: float, *, lags: bool = False) -> Callable[[str, str], Fault]:
    """Choose a fault for one request in so many, the same for each run of a seed.

    With `lags`, requests are late and answers old as often as anything else fails.
    """
    generator = random.Random(seed)

    def choose(method: str, path: str) -> Fault:
        if lags and generator.random() < rate:
            return "old" if method in ("GET", "HEAD") else "late"
        return generator.choice(FAULTS) if generator.random() < rate else ""

    return choose

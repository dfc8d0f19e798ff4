"""A proxy between the library and its server, that fails as networks and stores do."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Fault = Literal[
    "", "500 before", "500 after", "cut before", "cut after", "cut midway", "reset after",
    "slow down", "delay",
]  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    "500 before", "500 after", "cut before", "cut after", "cut midway", "reset after", "slow down",
    "delay",
)  # fmt: skip
"""Before: the server never sees the request. After: it does, and its answer is lost; midway: of
which the second half is."""
_DELAY_S = 0.05


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
        if fault in ("500 before", "slow down"):
            return self._refuse(handler, 503 if fault == "slow down" else 500)
        if fault == "cut before":
            return self._cut(handler)
        status, headers, data = self._forward(handler, body)
        if fault == "500 after":
            return self._refuse(handler, 500)
        if fault == "reset after":
            # Closed with bytes that were not sent: the client's system sees a reset.
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if fault in ("cut after", "reset after"):
            return self._cut(handler)
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        length = {k.lower(): v for k, v in headers}.get("content-length")
        handler.send_header(
            "Content-Length", length if handler.command == "HEAD" and length else str(len(data))
        )
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data[: len(data) // 2] if fault == "cut midway" else data)
        if fault == "cut midway":
            self._cut(handler)
        return None

    def _forward(
        self, handler: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        headers = {k: v for k, v in handler.headers.items() if k.lower() != "connection"}
        connection.request(handler.command, handler.path, body=body, headers=headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), data

    def _refuse(self, handler: BaseHTTPRequestHandler, status: int) -> None:
        code = "SlowDown" if status == 503 else "InternalError"
        data = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode()
        handler.send_response_only(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def _cut(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        handler.connection.close()


@contextmanager
def fault_proxy(
    server: str, choose: Callable[[str, str], Fault]
) -> Iterator[tuple[FaultProxy, str]]:
    """Start a proxy; give it and its address."""
    proxy = FaultProxy(server, choose)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            return

        def _any(self) -> None:
            try:
                proxy.handle(self)
            except OSError:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            return

    http_server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy, f"http://127.0.0.1:{http_server.server_port}"
    finally:
        http_server.shutdown()
        http_server.server_close()


def at_random(seed: int, rate: float) -> Callable[[str, str], Fault]:
    """Choose a fault for one request in so many, the same for each run of a seed."""
    generator = random.Random(seed)

    def choose(method: str, path: str) -> Fault:
        return generator.choice(FAULTS) if generator.random() < rate else ""

    return choose

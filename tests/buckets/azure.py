"""Azurite, a server that speaks Azure's blob protocol: a process of its own, where it is installed.

It comes with npm (`npm install -g azurite`), not with Python, so its tests are skipped without it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from tests.programs import free_port

ACCOUNT = "devstoreaccount1"
# The key that every Azurite has, from its documentation; no secret of anybody's.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-08-06"


@contextmanager
def azurite() -> Iterator[str]:
    """Start a server; give the address of its account. Skips the test if it is not installed."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the path: npm install -g azurite")
    port = free_port()
    server = subprocess.Popen(
        [program, "--inMemoryPersistence", "--disableTelemetry", "--loose", "--silent",
         "--blobHost", "127.0.0.1", "--blobPort", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for left in reversed(range(300)):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert left, "azurite does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        server.terminate()
        server.wait(60)


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which any process reaches the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": endpoint,
    }


def new_container(endpoint: str) -> str:
    """Make a container, by a request that is signed with the account's key; return its name."""
    name, date = f"c{secrets.token_hex(6)}", formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": _VERSION}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{endpoint}/{name}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request).close()
    return name

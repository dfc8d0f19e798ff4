"""An S3 server in a thread, and buckets in it."""

from __future__ import annotations

import logging
import os
import secrets
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

ACCESS_KEY = "AKIAHOLDFASTTEST0001"
SECRET_KEY = "hf-secret-5d2c7e0b9a1f4e63"
TOKEN = "hf-token-90b1c4ad77"


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which any process reaches the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's server in this process; give its address, in the environment too."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    before = dict(os.environ)
    os.environ.update(environment(endpoint))
    try:
        yield endpoint
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def new_bucket(endpoint: str) -> str:
    """Make a bucket; return its name."""
    name = f"b{secrets.token_hex(6)}"
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request).close()
    return name


def keys_in(endpoint: str, bucket: str) -> list[str]:
    """The keys of a bucket, from the server's own answer."""
    import re

    with urllib.request.urlopen(f"{endpoint}/{bucket}?list-type=2") as answer:
        return re.findall(r"<Key>([^<]*)</Key>", answer.read().decode())


def open_uploads(endpoint: str, bucket: str) -> list[str]:
    """The keys of uploads that were neither completed nor aborted."""
    import re

    with urllib.request.urlopen(f"{endpoint}/{bucket}?uploads") as answer:
        return re.findall(r"<Key>([^<]*)</Key>", answer.read().decode())

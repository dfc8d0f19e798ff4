"""An S3 server in a thread, and buckets in it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
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
    """Start moto's server in this process; give its address, in the environment too.

    Its application for S3 serves alone. The one that asks of each request which of Amazon's
    services it is for lists the folders of all of them each time: most of a small request's cost.
    """
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        disable_nagle_algorithm = True  # as in `tests.buckets.proxy`

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    before = dict(os.environ)
    os.environ.update(environment(endpoint))
    try:
        yield endpoint
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.shutdown()
        thread.join()
        server.server_close()


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

"""A small server that speaks what obstore asks of Google Cloud Storage, in a thread.

No emulator that can be installed here does: fake-gcs-server lacks the puts of the XML interface,
gcp-storage-emulator ETags and looks at objects. This one has the XML interface's objects, listings
and uploads in parts, in memory. It is strict where it matters: a put on condition is refused unless
the generation is the one that is there, a generation is never used twice, and the ETag of an object
is that of its content, as Google's is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.buckets.proxy import serving

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PART = re.compile(
    r"<Part>\s*<ETag>\W*(?:quot;)?(?P<tag>\w{32})[^<]*</ETag>\s*"
    r"<PartNumber>(?P<number>\d+)</PartNumber>\s*</Part>"
)
_MAX_KEYS = 1000
KEY_ID = "hf-gcs-key-id-7d1f"


@dataclass(frozen=True)
class Stored:
    """One version of an object."""

    data: bytes
    generation: int
    changed: float

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": f'"{hashlib.md5(self.data).hexdigest()}"',
            "Last-Modified": formatdate(self.changed, usegmt=True),
            "x-goog-generation": str(self.generation),
        }


class Answered(Exception):
    """The answer to a request: status, headers, body."""

    def __init__(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


def refused(status: int, code: str) -> Answered:
    return Answered(status, f"<Error><Code>{code}</Code></Error>".encode())


class Server:
    """Buckets in memory; one request at a time.

    Attributes:
        buckets: Objects by bucket and key.
        uploads: Unfinished uploads by id: bucket, key, and parts by number.
        now: Its clock.
    """

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
        self.now: Callable[[], float] = time.time
        self._generations = itertools.count(time.time_ns())
        self._lock = threading.Lock()

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> Answered:
        url = urlsplit(target)
        _, bucket, *rest = url.path.split("/", 2)
        key = unquote(rest[0]) if rest else ""
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        with self._lock:
            objects = self.buckets.get(bucket)
            if objects is None:
                return refused(404, "NoSuchBucket")
            if not key:
                return self._list(objects, query)
            if "uploads" in query or "uploadId" in query:
                return self._upload(method, bucket, key, query, body)
            if method == "PUT":
                return self._put(objects, key, body, headers)
            if key not in objects:
                return refused(404, "NoSuchKey")
            if method == "DELETE":
                del objects[key]
                return Answered(204)
            return self._get(objects[key], headers)

    def _put(self, objects: dict[str, Stored], key: str, data: bytes, headers: Any) -> Answered:
        wanted = headers.get("x-goog-if-generation-match")
        there = objects[key].generation if key in objects else 0
        if wanted is not None and int(wanted) != there:
            return refused(412, "PreconditionFailed")
        stored = objects[key] = Stored(data, next(self._generations), self.now())
        return Answered(200, headers=stored.headers)

    def _get(self, stored: Stored, headers: Any) -> Answered:
        match = _RANGE.fullmatch(headers.get("Range") or "")
        if match is None:
            return Answered(200, stored.data, stored.headers)
        start, size = int(match[1]), len(stored.data)
        if start >= size:
            return refused(416, "InvalidRange")
        end = min(int(match[2]) + 1 if match[2] else size, size)
        place = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        return Answered(206, stored.data[start:end], stored.headers | place)

    def _list(self, objects: dict[str, Stored], query: dict[str, str]) -> Answered:
        prefix, mark = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, str] = {}
        for key in sorted(key for key in objects if key.startswith(prefix)):
            cut = key.find(mark, len(prefix)) if mark else -1
            if cut >= 0:
                name = key[: cut + 1]
                text = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                name, stored = key, objects[key]
                when = datetime.fromtimestamp(stored.changed, UTC).isoformat(
                    timespec="milliseconds"
                )
                text = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size>"
                    f"<LastModified>{when.replace('+00:00', 'Z')}</LastModified>"
                    f"<ETag>{escape(stored.headers['ETag'])}</ETag></Contents>"
                )
            if name > after:
                entries[name] = text
        page = [*entries][:_MAX_KEYS]
        listed = "".join(entries[name] for name in page)
        if len(entries) > len(page):
            listed += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return Answered(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())

    def _upload(
        self, method: str, bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> Answered:
        if "uploads" in query:
            name = secrets.token_hex(8)
            self.uploads[name] = (bucket, key, {})
            text = f"<UploadId>{name}</UploadId>"
            return Answered(
                200,
                f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode(),
            )
        upload = self.uploads.get(query["uploadId"])
        if upload is None or upload[:2] != (bucket, key):
            return refused(404, "NoSuchUpload")
        parts = upload[2]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return Answered(200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if method == "DELETE":
            del self.uploads[query["uploadId"]]
            return Answered(204)
        stated = {int(each["number"]): each["tag"] for each in _PART.finditer(body.decode())}
        if stated != {number: hashlib.md5(part).hexdigest() for number, part in parts.items()}:
            return refused(400, "InvalidPart")
        del self.uploads[query["uploadId"]]
        data = b"".join(part for _, part in sorted(parts.items()))
        stored = self.buckets[bucket][key] = Stored(data, next(self._generations), self.now())
        tag = escape(stored.headers["ETag"])
        text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        return Answered(200, text.encode(), stored.headers)


def options(address: str) -> dict[str, Any]:
    """Settings by which obstore comes to the server."""
    account = {
        "gcs_base_url": address, "disable_oauth": True, "client_email": "",
        "private_key": "", "private_key_id": KEY_ID,
    }  # fmt: skip
    return {"service_account_key": json.dumps(account), "client_options": {"allow_http": True}}


@contextmanager
def gcs_server() -> Iterator[tuple[Server, str]]:
    """Start a server; give it and its address."""
    server = Server()

    def handle(handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        answer = server.answer(handler.command, handler.path, handler.headers, body)
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer.body)

    with serving(handle) as address:
        yield server, address

"""Unfinished uploads of killed processes on S3: uploads and aborted, which obstore cannot.

They are asked for by two requests of S3's own, signed here. Where, as whom and in which region is
taken from a URL that obstore signs, so that it is the same account and endpoint as for all other
requests; only the secret key is looked up again, where obstore finds it first: in the options, then
in the environment. If that is not the key that obstore signs with, nothing is asked.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import http.client
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from holdfast.storage.objects._obstore import library

_UPLOAD = re.compile(r"<Upload>.*?</Upload>", re.DOTALL)
_MAX_ANSWER_NBYTES = 8 << 20
_SIGNED_S = 300


class UploadsUnknown(Exception):
    """Unfinished uploads cannot be listed or aborted; the text says why, without any secret."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished upload: the key that it would write, and its id."""

    key: str
    id: str


@dataclass(frozen=True, slots=True)
class _Account:
    """As whom and where to ask."""

    base: str
    """URL of the bucket."""
    key_id: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)
    region: str


class S3Uploads:
    """Unfinished uploads in one bucket of S3.

    Args:
        store: obstore's store for the root of the bucket.
        options: Those that it was made with.
    """

    def __init__(self, store: Any, options: Mapping[str, Any]) -> None:
        self._store, self._options = store, options

    def list(self, prefix: str, *, timeout_s: float) -> list[Upload]:
        """Return the unfinished uploads of keys that begin with `prefix`; UploadsUnknown.

        Each page of them is waited for `timeout_s` seconds.
        """
        account = self._account()
        uploads: list[Upload] = []
        markers: dict[str, str] = {}
        while True:
            query = {"uploads": "", "prefix": prefix, **markers}
            text = _ask(account, "GET", "", query, timeout_s=timeout_s)
            for each in _UPLOAD.findall(text):
                uploads.append(Upload(_text(each, "Key"), _text(each, "UploadId")))
            if _text(text, "IsTruncated") != "true":
                return uploads
            after = {
                "key-marker": _text(text, "NextKeyMarker"),
                "upload-id-marker": _text(text, "NextUploadIdMarker"),
            }
            if after == markers:
                raise UploadsUnknown("the store lists one page of them again and again")
            markers = after

    def abort(self, upload: Upload, *, timeout_s: float) -> None:
        """Abort an upload, so that nothing is stored or charged for it; UploadsUnknown."""
        query = {"uploadId": upload.id}
        _ask(self._account(), "DELETE", upload.key, query, timeout_s=timeout_s)

    def _account(self) -> _Account:
        account = self._known_account()
        # Here no variable has anything secret, which a traceback might show.
        if account is None:
            raise UploadsUnknown(
                "the credentials are neither in the environment nor in the options"
            )
        return account

    def _known_account(self) -> _Account | None:
        url = ""
        with suppress(library().exceptions.BaseError, NotImplementedError):
            url = library().sign(self._store, "GET", "x", timedelta(seconds=_SIGNED_S))
        signed = urlsplit(url)
        query = {name: values[0] for name, values in parse_qs(signed.query).items()}
        key_id, _, region, *_ = (*query.get("X-Amz-Credential", "").split("/"), "", "", "")
        secret = self._secret(key_id)
        base = f"{signed.scheme}://{signed.netloc}{signed.path.removesuffix('/x')}"
        token = query.get("X-Amz-Security-Token", "")
        return _Account(base, key_id, secret, token, region) if secret else None

    def _secret(self, key_id: str) -> str:
        """Return the secret key that belongs to a key id; empty if it is not at hand."""
        options = {name.lower().removeprefix("aws_"): each for name, each in self._options.items()}
        places = (
            (options.get("access_key_id"), options.get("secret_access_key")),
            (os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")),
        )
        for given, secret in places:
            if key_id and given == key_id and isinstance(secret, str) and secret:
                return secret
        return ""


def _ask(
    account: _Account, method: str, key: str, query: Mapping[str, str], *, timeout_s: float
) -> str:
    """Send one signed request; return the text of its answer. UploadsUnknown."""
    answers: list[str | UploadsUnknown] = []
    request = urllib.request.Request(_signed(account, method, key, query), method=method)

    def ask() -> None:
        answers.append(_answer_of(request, timeout_s))

    # In a thread that is left behind: the time-out of urllib is one for each byte.
    thread = threading.Thread(target=ask, name="holdfast-uploads", daemon=True)
    thread.start()
    thread.join(timeout_s)
    answer = answers[0] if answers else UploadsUnknown("the store did not answer in time")
    if isinstance(answer, UploadsUnknown):
        raise answer
    return answer


def _answer_of(request: urllib.request.Request, timeout_s: float) -> str | UploadsUnknown:
    """Return the text of the answer to a request; or why there is none, without any secret."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read(_MAX_ANSWER_NBYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if request.get_method() == "DELETE" and error.code == 404:
            return ""
        return UploadsUnknown(f"the store refuses it (status {error.code})")
    except (OSError, http.client.HTTPException) as error:
        # Not from the error: its own text may quote the signed URL.
        return UploadsUnknown(f"the store cannot be reached ({type(error).__name__})")


def _signed(account: _Account, method: str, key: str, query: Mapping[str, str]) -> str:
    """Return a URL with a signature of version 4 in its query, as S3 defines it."""
    base = urlsplit(f"{account.base}/{quote(key, safe='/~')}" if key else account.base)
    now = time.gmtime()
    day, stamp = time.strftime("%Y%m%d", now), time.strftime("%Y%m%dT%H%M%SZ", now)
    scope = f"{day}/{account.region}/s3/aws4_request"
    values = {
        **query,
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{account.key_id}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(_SIGNED_S),
        "X-Amz-SignedHeaders": "host",
    }
    if account.token:
        values["X-Amz-Security-Token"] = account.token
    words = "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~')}"
        for name, value in sorted(values.items())
    )
    path = base.path or "/"
    canonical = "\n".join(
        (method, path, words, f"host:{base.netloc}\n", "host", "UNSIGNED-PAYLOAD")
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    secret = f"AWS4{account.secret}".encode()
    for word in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"):
        secret = hmac.digest(secret, word.encode(), "sha256")
    return f"{base.scheme}://{base.netloc}{path}?{words}&X-Amz-Signature={secret.hex()}"


def _text(xml: str, name: str) -> str:
    """Return the text of the first element of a name; empty if there is none."""
    match = re.search(rf"<{name}>([^<]*)</{name}>", xml)
    return html.unescape(match[1]) if match is not None else ""

"""URLs of places in object stores: `s3://bucket/run`, `gs://`, `az://`, `memory://name`."""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.errors import ConfigError, StorageError
from holdfast.storage.objects._obstore import SCHEMES
from holdfast.storage.objects.names import INNER
from holdfast.storage.storage_protocol import split_path

_URL = re.compile(r"([A-Za-z0-9]{2,12})://([^/?#]*)(?:/([^?#]*))?", re.ASCII)
_BUCKET = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,254}", re.ASCII)
_OTHER_NAMES = {"gcs": "gs", "azure": "az", "s3a": "s3", "abfs": "az"}


class BucketPlace(NamedTuple):
    """Where a URL leads: the cloud, the bucket, and the prefix of the run in it."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The URL again, without anything that it does not need."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def _why(url: str) -> str:
    """Return what is wrong with a URL, as far as that is known, without what may be a secret."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        return (
            ": it has a user or password, which are given by the environment or to ObjectStorage, "
            "not in a URL"
        )
    for sign, what in (("?", "options are given to ObjectStorage"), ("#", "it has no parts")):
        if sign in url:
            return f": it has a {sign!r}, which ends a URL; {what}, and no prefix has that sign"
    return ""


def parse_url(url: str) -> BucketPlace:
    """Take a URL apart; ConfigError for any other, which is not quoted if it has a password."""
    match = _URL.fullmatch(url)
    if match is None or "@" in match[2]:
        shown = url.split("@")[-1].split("?")[0][:200]
        raise ConfigError(f"{shown!r} is not a URL of a bucket, such as s3://bucket/run{_why(url)}")
    scheme = _OTHER_NAMES.get(match[1].lower(), match[1].lower())
    if scheme not in SCHEMES and scheme != "memory":
        known = ", ".join(f"{each}://" for each in (*SCHEMES, "memory"))
        raise ConfigError(f"{match[1]}:// is not a known kind of object store; known are {known}")
    if _BUCKET.fullmatch(match[2]) is None:
        raise ConfigError(f"{url[:200]!r} names no bucket: write {scheme}://bucket/run")
    prefix = (match[3] or "").strip("/")
    if INNER in prefix.split("/"):
        raise ConfigError(
            f"{url[:200]!r} is inside of {INNER}, where a run keeps its data, and removes what is "
            f"not its own: give a place of its own"
        )
    if not prefix.isprintable():
        raise ConfigError(
            f"{url[:200]!r} has a control character, or a space or other sign that cannot be seen, "
            f"which no key can have here"
        )
    try:
        split_path(prefix)
    except StorageError:
        raise ConfigError(
            f"{url[:200]!r} has an empty name (//), a '.' or '..', or one of more than 255 "
            f"characters between two slashes, which no prefix can have here"
        ) from None
    return BucketPlace(scheme, match[2], prefix)

"""All that depends on obstore itself: making its stores, and what its errors mean.

obstore states the reason of a failure only in the text of an exception, so this file reads texts.
What it gives to the rest of the room is a `Failure`, with words of ours: the text itself may quote
a request, and with it a credential.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Literal

from holdfast.errors import ConfigError

Kind = Literal["absent", "exists", "changed", "range", "again", "untagged", "final"]
"""What a failed request means: nothing is there; the name is taken; it is another version by now;
it ends before the range; it may be asked again, and may have been carried out; it was carried out,
and the answer does not say which version it has made; it is refused."""

SCHEMES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""The clouds, and how the variables begin that hold their credentials."""
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with boto3 installed",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of a key file, or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ANY_NUMBER = 1_000_000
_LONGEST_RETRY_S = 170.0
"""A signature of a request that obstore repeats must be valid to its end: three minutes."""
_PATH = re.compile(r"(https?://[^/\s]+)/\S*|(at location ).*(?= not found)")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(
    r"<Code>(\w{1,60})</Code>|\"code\": ?\"(\w{1,60})\"|\(code: (\w{1,60})\)$", re.MULTILINE
)
"""The last one of a request that deletes many: it is answered with 200, and with a code for each
object that was not deleted."""
_HAS_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_IS_UNKNOWN = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed"}
)
_NOT_GIVEN = frozenset(
    {"NoAuthenticationInformation", "PublicAccessNotPermitted", "AuthenticationRequired"}
)
_ASKED_MACHINE = ("169.254.169.254", "metadata.google", "token request")
"""Words of errors of the machine's metadata service, which is asked if no credentials are given."""
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "NoSuchContainer"})
_OTHER_REGION = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_DENIED = frozenset({"AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch"})
_ABSENT = frozenset({"NoSuchKey", "BlobNotFound"})
_TAKEN = frozenset({"", "BlobAlreadyExists", "PreconditionFailed"})
"""With these codes a name is taken. Azure has the same status for refusals, and S3 for another
request for the name that is in progress."""
_DISABLED = "the account of {place} is disabled: see its billing, or ask the provider"
_HELD = (
    "a retention policy, a legal hold or immutability of {place} keeps the object as it is: use a "
    "place without one, since names and small files of a run are written again"
)
_REQUESTER_PAYS = (
    "{place} charges who asks (requester pays): name the project that pays, by the option "
    "client_options={{'default_headers': {{'x-goog-user-project': PROJECT}}}}"
)
_NO_NAME = "{place} is not a name that a bucket may have: correct the URL"
_REFUSALS = {
    "RequestTimeTooSkewed": "the clock of this machine is too far from that of {place}, which "
    "accepts no request that is signed so: set it, or let NTP",
    "ContainerBeingDeleted": "{place} is being deleted: make it again in some minutes, or correct "
    "its name",
    "KeyBasedAuthenticationNotPermitted": "{place} accepts no account keys: give a SAS token "
    "(AZURE_STORAGE_SAS_TOKEN) or an identity (AZURE_CLIENT_ID, AZURE_TENANT_ID, "
    "AZURE_CLIENT_SECRET)",
    "AuthorizationSourceIPMismatch": "{place} accepts no requests from this machine's address: "
    "let its firewall, or the SAS token, have it",
    "LeaseIdMissing": "another program holds an Azure lease of the object: break it",
    "UserProjectMissing": _REQUESTER_PAYS, "UserProjectAccessDenied": _REQUESTER_PAYS,
    **dict.fromkeys(
        ("AccountIsDisabled", "ContainerDisabled", "AllAccessDisabled", "AccountProblem"), _DISABLED
    ),
    **dict.fromkeys(
        ("BlobImmutableDueToPolicy", "RetentionPolicyNotMet", "ObjectUnderActiveHold"), _HELD
    ),
    "NoSuchUpload": "the upload of the object to {place} was aborted meanwhile: by a lifecycle "
    "rule that gives uploads too little time, or by another program; write it again",
    "InvalidPart": "{place} does not know a part of an upload by the ETag that came with it: check "
    "the endpoint, and proxies on the way, which may change ETags",
    **dict.fromkeys(("InvalidBucketName", "InvalidResourceName"), _NO_NAME),
}  # fmt: skip
"""What else a store refuses for good, by its code, whatever the status: the words."""
_ODD_ANSWERS = {
    "non-partial response": "the answer has the whole object, where a range was asked for",
    "invalid list response": "the answer cannot be read",
}
"""What an answer is that no store gives, by words of obstore's."""
_SLOW_DOWN = frozenset({"SlowDown", "ServerBusy", "RequestLimitExceeded", "TooManyRequests"})


class Options(dict[str, Any]):
    """Settings that may be secret: shown by their names alone, as in tracebacks with variables."""

    def __repr__(self) -> str:
        """Return the names."""
        return f"Options({', '.join(sorted(self))})"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request: what it means for the caller, and the reason in words for a person."""

    kind: Kind
    words: str
    is_unsupported: bool = False
    """The store does not know a conditional put."""


def library() -> Any:
    """Return the module obstore; ConfigError that names the extra if it is not installed."""
    try:
        import obstore
    except ImportError:
        raise ConfigError(
            "checkpoints in an object store need the package obstore: install holdfast[cloud]"
        ) from None
    return obstore


@cache
def memory_store(name: str) -> Any:
    """Return the store of `memory://name`, the same for the whole process."""
    return library().store.MemoryStore()


def make_store(
    scheme: str,
    bucket: str,
    options: Mapping[str, Any],
    *,
    retry_s: float,
    timeout_s: float,
    most_s: float | None = None,
) -> Any:
    """Return an obstore store for the root of a bucket.

    Args:
        scheme: A key of `SCHEMES`.
        bucket: Name of the bucket or container.
        options: obstore's own settings; what is absent is taken from the environment.
        retry_s: Seconds for which obstore itself asks again, for a request or a part of an upload.
        timeout_s: Seconds for one request, unless the options have another number.
        most_s: Seconds for one request, whatever the options say.

    Raises:
        ConfigError: obstore is missing, or refuses the options.
    """
    from_url = library().store.from_url
    settings = Options(options)
    client: dict[str, Any] = {"timeout": f"{timeout_s:g}s", "connect_timeout": "5s"}
    client |= settings.pop("client_options", {})
    if most_s is not None:
        client["timeout"] = f"{most_s:g}s"
    if _endpoint(scheme, settings).startswith("http://"):
        client.setdefault("allow_http", True)
    retries = {
        # By the time alone: ten tries with these pauses may be over in three seconds.
        "max_retries": _ANY_NUMBER if retry_s else 0,
        "retry_timeout": timedelta(seconds=min(retry_s, _LONGEST_RETRY_S)),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "base": 2,
                    "max_backoff": timedelta(seconds=min(10.0, max(retry_s / 4, 0.1)))},
    }  # fmt: skip
    if (provider := _provider(scheme, settings)) is not None:
        settings["credential_provider"] = provider
    problem = ""
    try:
        # Its overloads are by cloud, which only the URL says.
        make: Any = from_url
        return make(f"{scheme}://{bucket}", client_options=client, retry_config=retries, **settings)
    except Exception as error:  # obstore raises errors of its own and TypeError
        problem = type(error).__name__
    # Outside of the block, and without its text: that may quote an option.
    raise ConfigError(
        f"obstore refuses the options of {scheme}://{bucket} ({problem}); given are "
        f"{sorted(options) or 'none'}, the rest is from the environment ({SCHEMES[scheme]}_…)"
        f"{_missing(scheme, settings)}"
    )


_RIGHTS = {
    "list": ("list", {
        "s3": "s3:ListBucket", "gs": "storage.objects.list",
        "az": "the role Storage Blob Data Reader, or l in a SAS token",
    }),
    "get": ("read", {
        "s3": "s3:GetObject; without s3:ListBucket, too, if nothing is stored there",
        "gs": "storage.objects.get",
        "az": "the role Storage Blob Data Reader, or r in a SAS token",
    }),
    "put": ("write", {
        "s3": "s3:PutObject",
        "gs": "storage.objects.create, and storage.objects.delete to write an object again",
        "az": "the role Storage Blob Data Contributor, or c and w in a SAS token",
    }),
    "delete": ("delete", {
        "s3": "s3:DeleteObject", "gs": "storage.objects.delete",
        "az": "the role Storage Blob Data Contributor, or d in a SAS token",
    }),
}  # fmt: skip
"""By the kind of a request: the right to do it, and what each cloud calls it."""


def _denied(scheme: str, place: str, kind: str) -> str:
    """Return the words for a request that the store denies, with the right that it takes."""
    right, names = _RIGHTS[{"head": "get", "upload": "put"}.get(kind, kind)]
    name = f" ({names[scheme]})" if scheme in names else ""
    wall = "; or a firewall of the account does not let this machine in" if scheme == "az" else ""
    # The answer to a head has no reason in it.
    old = "; or they have expired" if kind == "head" else ""
    return (
        f"{place} denies the request to {right}: the credentials need the right to {right} below "
        f"this place{name}{old}{wall}"
    )


def _endpoint(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return the endpoint that is set, empty for the cloud's own; ConfigError if not a URL."""
    given = {"the option endpoint": str(settings.get("endpoint", ""))}
    given |= {name: os.environ.get(name, "") for name in _ENDPOINTS.get(scheme, ())}
    for name, endpoint in given.items():
        # obstore would end in a panic at the first request.
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"{name} is not a URL: write http://host:port or https://host")
    return next(filter(None, given.values()), "")


def _missing(scheme: str, settings: Mapping[str, Any]) -> str:
    """Return what a store is not made without, as far as obstore's error does not say it."""
    if scheme == "az":
        return "; a storage account is needed (AZURE_STORAGE_ACCOUNT_NAME)"
    names = ("access_key_id", "secret_access_key")
    is_given = [
        f"AWS_{name.upper()}" in os.environ or {name, f"aws_{name}"} & {*settings} for name in names
    ]
    if scheme == "s3" and any(is_given) and not all(is_given):
        missing = names[bool(is_given[0])]
        return f"; {missing} is missing (AWS_{missing.upper()})"
    return ""


def _provider(scheme: str, settings: Mapping[str, Any]) -> Any | None:
    """Return boto3's credentials for S3 (profiles, SSO), if the plain variables are not set.

    None if boto3 is not installed or has none: obstore then asks the machine's metadata service.
    """
    given = ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature")
    if scheme != "s3" or any(key in settings for key in given):
        return None
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_PROFILE" not in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except Exception:  # boto3 is missing, or the profile has no credentials
        return None


def untagged(place: str) -> Failure:
    """Return the failure of a store that does not say which version of an object it has."""
    return Failure(
        "untagged",
        f"{place} answers without an ETag, so no change can be on condition of a version: use a "
        f"store that sends it, or check the endpoint, and proxies on the way, which may remove it",
    )


def explain(error: Exception, *, scheme: str, bucket: str, kind: str, key: str) -> Failure:
    """Say what a failed request means; the result has nothing of the error's own text.

    Args:
        error: As obstore raised it.
        scheme: Of the store.
        bucket: Its name.
        kind: Of the request, as `BucketClient` counts it.
        key: What it was for. It is in the text, too, and may have any words.
    """
    exceptions = library().exceptions
    text = _PATH.sub(r"\1\2", str(error).partition("\n\nDebug source:")[0]).replace(key or "\0", "")
    status, codes = _STATUS.search(text), _CODE.search(text)
    number = int(status[1]) if status is not None else 0
    code = next(filter(None, codes.groups())) if codes is not None else ""
    place = f"{scheme}://{bucket}"
    variables = f"{SCHEMES.get(scheme, 'AWS')}_…"
    if code in _NO_BUCKET or "bucket does not exist" in text:
        return Failure("final", f"{place} does not exist: make the bucket, or correct its name")
    # Before any status: it is the one of the machine's metadata service, if that answered.
    if code in _NOT_GIVEN or any(words in text for words in _ASKED_MACHINE):
        variables = _CREDENTIALS.get(scheme, "")
        return Failure("final", f"no credentials for {place}: set {variables}")
    if code in _REFUSALS:
        return Failure("final", _REFUSALS[code].format(place=place))
    if isinstance(error, FileNotFoundError) or code in _ABSENT:
        return Failure("absent", "nothing is stored there")
    if isinstance(error, exceptions.AlreadyExistsError) and kind == "put" and code in _TAKEN:
        return Failure("exists", "an existing name is never overwritten")
    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return Failure("changed", "another process has changed it")
    if number == 416 or "Invalid range" in text or "StartTooLarge" in text:
        return Failure("range", "it ends before these bytes")
    if code in _HAS_EXPIRED:
        return Failure("final", f"the credentials have expired: renew them ({variables})")
    if code in _IS_UNKNOWN or number == 401:
        # Azure says the same of a request that a wrong clock has dated.
        clock = ", and this machine's clock" if scheme == "az" else ""
        words = f"{place} does not accept these credentials: check {variables}{clock}"
        return Failure("final", words)
    is_elsewhere = number in (301, 302, 307, 308) or "configured region" in text
    if is_elsewhere and scheme != "s3":
        return Failure(
            "final",
            f"{place} is not at this address, which leads to another one: check the endpoint, and "
            f"proxies on the way",
        )
    if is_elsewhere or code in _OTHER_REGION:
        return Failure(
            "final", f"{place} is in another region: set AWS_REGION, or the option region, to it"
        )
    if number == 403 or code in _DENIED:
        return Failure("final", _denied(scheme, place, kind))
    if number == 501 or isinstance(error, exceptions.NotSupportedError | NotImplementedError):
        return Failure("final", "the store does not support this request", is_unsupported=True)
    if code in _SLOW_DOWN or number in (429, 503):
        return Failure(
            "again",
            "the store asks for fewer requests (SlowDown): save from fewer ranks at once, or ask "
            "the provider for a higher rate",
        )
    if number == 409 or isinstance(error, exceptions.AlreadyExistsError):
        return Failure("again", "another request for the same name was in progress")
    if code == "InvalidRequest" and "x-amz-checksum" in text:
        return Failure(
            "final",
            f"{place} has an object lock, with which each object must come with a checksum: set "
            f"AWS_CHECKSUM_ALGORITHM=SHA256, or the option checksum_algorithm",
        )
    if 400 <= number < 500 and number not in (408, 425):
        return Failure("final", f"{place} refuses the request (status {number} {code})")
    if number or code:  # an upload that cannot be completed is answered with 200, and with a code
        words = f"status {number} {code}" if number else code
        return Failure("again", f"the store failed ({words.strip()})")
    for sign, words in _ODD_ANSWERS.items():
        if sign in text:
            return Failure("again", f"{words}: check the endpoint, and proxies on the way")
    if "ETag Header missing" in text:
        return untagged(place)
    names = _ENDPOINTS.get(scheme, ())
    is_set = any(os.environ.get(name) for name in names)
    own = "" if is_set or not names else f"; for another store than the cloud's set {names[-2]}"
    return Failure(
        "again",
        f"the store cannot be reached, or did not answer in time: check the network, and the "
        f"endpoint if one is set{own}",
    )

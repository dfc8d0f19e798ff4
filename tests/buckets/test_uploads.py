"""Unfinished uploads of killed saves: a repair finds and aborts them, and no others."""

from __future__ import annotations

import calendar
import time
import urllib.request
from urllib.parse import parse_qs, urlsplit

import pytest

from holdfast import Checkpointer, StorageError
from holdfast.cli.main import main
from holdfast.format.names import saving_dir
from holdfast.writer.leftovers import repair
from tests.crash.common import state_of

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage, uploads
from tests.buckets.proxy import Fault, fault_proxy
from tests.buckets.server import ACCESS_KEY, SECRET_KEY, TOKEN, new_bucket, open_uploads


def begin_upload(endpoint: str, bucket: str, key: str) -> None:
    """Begin an upload, as a process does that is killed then."""
    request = urllib.request.Request(f"{endpoint}/{bucket}/{key}?uploads", method="POST")
    urllib.request.urlopen(request).close()


def a_save_in_progress(storage: ObjectStorage, step: int) -> str:
    """Make the directory of a save; the key of its data file."""
    directory = saving_dir(step, "abc")
    storage.make_dir(directory)
    key = storage._names.data_key(storage._resolve(directory, "look", directory))
    return f"run/{key}/data/00000.safetensors"


def test_uploads_of_saves_that_are_gone_are_aborted(s3: str) -> None:
    """P19: what a killed save has left is removed, also where no listing of objects shows it."""
    bucket = new_bucket(s3)
    storage = ObjectStorage(f"s3://{bucket}/run")
    Checkpointer(storage, settle_s=0.0).save(1, state_of(1))
    killed, other = a_save_in_progress(storage, 2), "elsewhere/.store/data/a-b/data/00000"
    begin_upload(s3, bucket, killed)
    begin_upload(s3, bucket, other)
    # While its save may live, an upload is left alone.
    assert [each.fate for each in repair(ObjectStorage(storage.url))] == ["alive"]
    assert sorted(open_uploads(s3, bucket)) == sorted([killed, other])
    time.sleep(0.01)
    reader = ObjectStorage(storage.url)
    would = repair(reader, alive_s=0.0, dry_run=True)
    assert [each.fate for each in would] == ["removed"]
    fates = repair(reader, alive_s=0.0)
    assert [each.fate for each in fates] == ["removed", "removed"]
    assert fates[1].name == killed.removeprefix("run/")
    # What is below another run is not ours.
    assert open_uploads(s3, bucket) == [other]
    living = a_save_in_progress(storage, 3)
    begin_upload(s3, bucket, living)
    repair(ObjectStorage(storage.url))
    assert sorted(open_uploads(s3, bucket)) == sorted([living, other])


def test_without_the_secret_nothing_is_asked_and_the_rule_is_named(
    s3: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{new_bucket(s3)}/run"
    given = {"access_key_id": "another", "secret_access_key": "s3cret-of-another"}
    storage = ObjectStorage(url, credential_provider=lambda: {**given, "expires_at": None})
    Checkpointer(storage, settle_s=0.0).save(1, state_of(1))
    (left,) = repair(storage)
    assert left.fate == "unseen"
    assert "neither in the environment nor in the options; a lifecycle rule" in left.why
    # One that may not list uploads, or cannot.
    monkeypatch.setattr(uploads, "_signed", lambda *of: "http://127.0.0.1:9/none?key=hf-secret")
    assert main(["repair", url]) == 0
    shown = capsys.readouterr().out
    assert "cannot be reached" in shown.replace("\n", " ")
    assert "hf-secret" not in shown
    # One whose list has no end.
    endless = "<Answer><IsTruncated>true</IsTruncated></Answer>"
    monkeypatch.setattr(uploads, "_answer_of", lambda *of: endless)
    assert main(["repair", url]) == 0
    assert "one page of them again and again" in " ".join(capsys.readouterr().out.split())


def test_a_store_that_answers_byte_by_byte_is_not_waited_for(s3: str) -> None:
    """P27: each byte comes in time, and the last one never would."""
    url = f"s3://{new_bucket(s3)}/run"
    Checkpointer(url, settle_s=0.0).save(1, state_of(1))

    def choose(method: str, path: str) -> Fault:
        return "dripping" if "uploads=" in path else ""

    with fault_proxy(s3, choose) as (proxy, address):
        (left,) = repair(ObjectStorage(url, endpoint=address, timeout_s=0.5))
        assert proxy.faults["dripping"] == 1
    assert left.fate == "unseen"
    assert "the store did not answer in time" in left.why


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize(
    ("key", "query"),
    [
        ("", {"uploads": "", "prefix": "run a/.store/data/", "key-marker": "ä+~&="}),
        ("run a/ü~(1)/00000.safetensors", {"uploadId": "a/b+c=="}),
    ],
)
def test_signatures_are_those_of_botocore(
    key: str, query: dict[str, str], token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    account = uploads._Account(
        "https://example.com/bucket", ACCESS_KEY, SECRET_KEY, token, "eu-west-1"
    )
    ours = urlsplit(uploads._signed(account, "DELETE", key, query))
    request = AWSRequest("DELETE", f"https://example.com{ours.path}", params=query)
    credentials = Credentials(ACCESS_KEY, SECRET_KEY, token or None)
    auth.S3SigV4QueryAuth(credentials, "s3", "eu-west-1", expires=300).add_auth(request)
    theirs = parse_qs(urlsplit(request.url).query)
    now = calendar.timegm(time.strptime(theirs["X-Amz-Date"][0], "%Y%m%dT%H%M%SZ"))
    at = time.gmtime(now)
    monkeypatch.setattr(uploads.time, "gmtime", lambda: at)
    ours = urlsplit(uploads._signed(account, "DELETE", key, query))
    assert parse_qs(ours.query)["X-Amz-Signature"] == theirs["X-Amz-Signature"]


@pytest.mark.parametrize("num_errors", [2, 1 << 30])
def test_an_upload_whose_end_is_answered_with_an_error_is_not_there(
    s3: str, num_errors: int
) -> None:
    """P19: S3 begins its answer, with status 200, before it knows whether it can put the parts
    together."""
    bucket, ends = new_bucket(s3), list[str]()

    def choose(method: str, path: str) -> Fault:
        if method != "POST" or "uploadId=" not in path:
            return ""
        ends.append(path)
        return "200 error" if len(ends) <= num_errors else ""

    with fault_proxy(s3, choose) as (_, address):
        storage = ObjectStorage(
            f"s3://{bucket}/run", endpoint=address, part_nbytes=5 << 20, retry_s=1.0
        )
        if num_errors == 2:
            write_zeros(storage, 6 << 20)
        else:
            with pytest.raises(StorageError, match=r"the store failed \(InternalError\)"):
                write_zeros(storage, 6 << 20)
    assert len(ends) > 2
    assert open_uploads(s3, bucket) == []
    assert ObjectStorage(f"s3://{bucket}/run").exists("f") == (num_errors == 2)


def test_rights_that_end_during_an_upload_are_named_for_the_upload(s3: str) -> None:
    """P27: not for the look after it, which is denied, too, and has no reason in its answer."""

    denied = list[str]()

    def choose(method: str, path: str) -> Fault:
        if "uploadId=" in path or denied:
            denied.append(method)
        return "denied" if denied else ""

    with fault_proxy(s3, choose) as (_, address):
        storage = ObjectStorage(f"s3://{new_bucket(s3)}/run", endpoint=address, part_nbytes=5 << 20)
        with pytest.raises(StorageError, match="denies the request to write"):
            write_zeros(storage, 6 << 20)
        assert "HEAD" in denied
        with pytest.raises(StorageError, match=r"denies the request to read.*; or they hav"):
            storage.size("f")


def write_zeros(storage: ObjectStorage, nbytes: int) -> None:
    with storage.create("f", nbytes=nbytes) as sink:
        sink.write_at(0, memoryview(bytes(nbytes)))

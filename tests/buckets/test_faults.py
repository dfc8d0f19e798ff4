"""Requests that fail in every way, saves killed at every request, and what errors say."""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import (
    Checkpointer,
    CorruptionError,
    HoldfastError,
    Layout,
    ProcessGroups,
    Sharded,
    StorageError,
)
from holdfast.cli.main import main
from holdfast.cli.support.messages import EXIT_DAMAGED, EXIT_MISTAKE
from holdfast.format import versions as versions_of_steps
from holdfast.format.names import LATEST, list_steps, step_dir
from holdfast.format.versions import read_lease
from holdfast.policies.keep import KeepLast
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import list_tags, set_tag
from holdfast.storage import Storage
from holdfast.storage.reading import is_unknown
from holdfast.writer import job, leftovers
from holdfast.writer.copying import copy_checkpoint
from holdfast.writer.leftovers import repair
from tests.crash.common import state_of
from tests.harness import RankContext, run_ranks

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage, bucket
from tests.buckets import gcs
from tests.buckets.proxy import FAULTS, Fault, at_random, fault_proxy, serving
from tests.buckets.server import environment, new_bucket, open_uploads
from tests.buckets.test_names import Old
from tests.buckets.test_saves import version_of, versions

NEVER = 1 << 30
QUICK = ("PUT", "500 after")
CASES = [
    pytest.param(m, f, marks=[] if (m, f) == QUICK else pytest.mark.slow)
    for m, f in itertools.product(("PUT", "GET"), FAULTS)
]


@pytest.mark.parametrize(("method", "fault"), CASES)
def test_each_request_of_a_kind_fails_once_and_the_save_is_whole(
    s3: str, fault: Fault, method: str
) -> None:
    name = new_bucket(s3)
    seen: set[str] = set()

    def choose(asked: str, path: str) -> Fault:
        if asked != method or path in seen:
            return ""
        seen.add(path)
        return fault

    with fault_proxy(s3, choose) as (proxy, address):
        storage = ObjectStorage(f"s3://{name}/run", endpoint=address, timeout_s=5, retry_s=20)
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            checkpointer.save(1, state_of(1))
            checkpointer.save(1, state_of(2), overwrite=True)
        assert proxy.faults[fault] > 3
    assert versions(f"s3://{name}/run") == {1: 2}
    assert open_uploads(s3, name) == []


class Unreliable:
    """obstore's functions, which fail at random: before the store has done it, or after."""

    def __init__(self, library: Any, seed: int, rate: float) -> None:
        self._library = library
        self._generator = random.Random(seed)
        self._rate = rate
        self.num_faults = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name not in ("get", "put", "head", "list_with_delimiter", "list", "delete"):
            return function

        def call(*args: Any, **options: Any) -> Any:
            fault = self._generator.random()
            if fault < self._rate / 2:
                self.num_faults += 1
                raise self._library.exceptions.GenericError("before: status code: 503")
            result = function(*args, **options)
            if fault < self._rate:
                self.num_faults += 1
                raise self._library.exceptions.GenericError("after: reset by peer")
            return result

        return call


def run_sequence(
    url: str,
    open_storage: Callable[[], ObjectStorage],
    seed: int,
    *,
    later: Callable[[], ObjectStorage] | None = None,
) -> None:
    """Saves, replacements and removals through a bad network, against what was promised.

    `later` opens the place without that network; by its URL alone if it is not given.
    """
    open_later = later or (lambda: ObjectStorage(url))
    may_be: dict[int, set[int | None]] = {}
    for number in range(1, 6):
        storage = open_storage()
        step = number % 3
        try:
            Checkpointer(storage, settle_s=0.0).save(step, state_of(number), overwrite=True)
            may_be[step] = {number}
        except HoldfastError:
            may_be.setdefault(step, {None}).add(number)
        if number == 4:
            with suppress(HoldfastError):
                apply_retention(storage, plan_retention(storage, KeepLast(2)))
            for gone in sorted(may_be)[:-1]:
                may_be[gone].add(None)
        with suppress(HoldfastError):
            repair(storage, alive_s=0.0)
    direct = open_later()
    for name in direct.list(".reading"):  # a lease that could not be given back has expired
        direct.remove_tree(f".reading/{name}")
    after = versions(open_later())
    for step, allowed in may_be.items():
        assert after.get(step) in allowed, f"seed {seed}: step {step}"
    assert not [each for each in repair(open_later(), alive_s=0.0) if each.fate == "kept"]
    assert versions(open_later()) == after


def _in_memory(seed: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.0001)
    monkeypatch.setattr(bucket, "_LONGEST_PAUSE_S", 0.001)
    url = f"memory://{secrets.token_hex(8)}/run"

    def open_storage() -> ObjectStorage:
        # No patience at all for a third of the time: then a save fails, or its outcome is unknown.
        storage = ObjectStorage(url, retry_s=0.0 if seed % 3 == 0 else 5.0)
        storage._bucket._obstore = Unreliable(storage._bucket._obstore, seed, rate)
        return storage

    run_sequence(url, open_storage, seed)


@pytest.mark.parametrize("seed", range(20))
def test_sequences_through_a_bad_network(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_memory(seed, 0.02 if seed % 3 == 0 else 0.15, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20, 320))
def test_more_sequences_through_a_bad_network(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_memory(seed, 0.02 if seed % 3 == 0 else 0.15, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(200))
def test_sequences_over_http_through_a_bad_network(s3: str, seed: int) -> None:
    url = f"s3://{new_bucket(s3)}/run"
    with fault_proxy(s3, at_random(seed, 0.08)) as (_, address):
        run_sequence(
            url, lambda: ObjectStorage(url, endpoint=address, timeout_s=5, retry_s=15), seed
        )


def test_an_outage_ends_within_the_time_and_is_named(
    s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bucket, "_WARN_S", 0.0)
    with fault_proxy(s3, lambda method, path: "slow down") as (_, address):
        storage = ObjectStorage(f"s3://{new_bucket(s3)}/run", endpoint=address, retry_s=1.0)
        began = time.monotonic()
        with pytest.raises(StorageError, match="SlowDown"):
            storage.write_file("f", b"1")
        assert time.monotonic() - began < 30
    storage = ObjectStorage("s3://b/run", endpoint="http://127.0.0.1:9", retry_s=0.5)
    with pytest.raises(StorageError, match="cannot be reached"):
        storage.list("")
    # While it lasts a person reads why nothing happens, once for each client.
    assert [each.getMessage().split(";")[1] for each in caplog.records] == [
        " trying again, for 1 s at most", " trying again, for 0 s at most",
    ]  # fmt: skip


def test_an_answer_that_no_store_gives_is_asked_for_again_and_named(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2, P19: a proxy on the way miscounts, ignores ranges, or spoils what it passes on."""
    monkeypatch.setattr(bucket, "_FIRST_PAUSE_S", 0.01)
    url, payload = f"s3://{new_bucket(s3)}/run", bytes(range(250)) * 4
    ObjectStorage(url).write_file("f", payload)
    faults: list[Fault] = []

    def choose(method: str, path: str) -> Fault:
        return faults.pop() if faults else ""

    with fault_proxy(s3, choose) as (_, address):
        patient, hasty = (ObjectStorage(url, endpoint=address, retry_s=s) for s in (9.0, 0.0))

        def filled(storage: ObjectStorage) -> bytes:
            buffer = bytearray(100)
            storage.readinto("f", memoryview(buffer), start=7)
            return bytes(buffer)

        of_a_range: dict[Fault, str] = {
            "too long": r"has 104 bytes and states 100: check the endpoint, and proxies",
            "too short": r"has 50 bytes and states 100: check the endpoint, and proxies",
            "no range": "has the whole object, where a range was asked for",
        }
        for fault, words in of_a_range.items():
            for read in (filled, lambda storage: storage.read("f", start=7, nbytes=100)):
                faults.append(fault)
                assert read(patient) == payload[7:107]
                faults.append(fault)
                with pytest.raises(StorageError, match=rf"cannot read: .*/f: the answer {words}"):
                    read(hasty)
        faults.append("no xml")
        assert patient.list("") == ["f"]
        faults.append("no xml")
        with pytest.raises(StorageError, match=r"cannot list: .*: the answer cannot be read"):
            hasty.list("")


def _store_that_fails(context: RankContext, url: str, proxy: str) -> list[str]:
    messages = []
    os.environ.update(environment(proxy))
    with ProcessGroups.create(Layout(dp=2), timeout_s=4) as groups:
        storage = ObjectStorage(url, endpoint=proxy)
        with Checkpointer(storage, groups=groups, settle_s=0.0) as checkpointer:
            other = f"{url}-of-before"
            for call in (
                checkpointer.load,
                partial(checkpointer.load, source=other),
                partial(checkpointer.load, source=ObjectStorage(other)),
                partial(checkpointer.save, 1),
            ):
                with pytest.raises(StorageError) as failure:
                    call({"v": {"x": 1}})
                messages.append(str(failure.value))
        assert dict(storage.address()[1])["retry_s"] == 120.0  # of the writer process
    return messages


@pytest.mark.slow
def test_ranks_learn_of_an_outage_before_they_give_each_other_up(s3: str) -> None:
    """P2."""
    url = f"s3://{new_bucket(s3)}/run"
    with fault_proxy(s3, lambda method, path: "500 before") as (_, proxy):
        results = run_ranks(2, _store_that_fails, url, proxy).results
    for message in itertools.chain(*results):
        assert "the store failed (status 500 InternalError)" in message


def _store_that_is_silent(context: RankContext, url: str, proxies: list[str]) -> str:
    os.environ.update(environment(proxies[context.rank]))
    with ProcessGroups.create(Layout(dp=2), timeout_s=10) as groups:
        storage = ObjectStorage(url, part_nbytes=5 << 20, timeout_s=1)
        with Checkpointer(storage, groups=groups, settle_s=0.0) as checkpointer:
            shard = Sharded(torch.ones(3 << 20), (6 << 20,), dims={0: "dp"})
            with pytest.raises(StorageError) as failure:
                checkpointer.save(1, {"t": {"a": shard}})
    return str(failure.value)


@pytest.mark.slow
def test_ranks_learn_of_an_upload_without_an_answer_before_they_give_each_other_up(s3: str) -> None:
    """P2: its parts, the request that aborts it and the look for its object all wait in vain."""
    url, parts = f"s3://{new_bucket(s3)}/run", list[str]()

    def choose(method: str, path: str) -> Fault:
        parts.extend([path] if "partNumber=" in path else [])
        return "silent before" if parts else ""

    with fault_proxy(s3, choose) as (_, address):
        messages = run_ranks(2, _store_that_is_silent, url, [s3, address]).results
    assert messages[0] == messages[1]
    assert "1 of 2 ranks failed (save: written)" in messages[0]
    assert f"rank 1: cannot write: {url}/.saving-iter_0000001-" in messages[0]
    assert "the store cannot be reached, or did not answer in time" in messages[0]
    assert list_steps(ObjectStorage(url)) == []


def test_after_a_request_in_vain_the_next_ones_are_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P2: the looks and the cleaning after a failure take no more of the time of other ranks."""
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(bucket, pause, 1e-4)
    asked: list[tuple[object, ...]] = []
    storage = ObjectStorage(
        f"memory://{secrets.token_hex(8)}/run", retry_s=0.5, observer=lambda *of: asked.append(of)
    )
    state = _small(1)
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state)
        library = storage._bucket._obstore
        storage._bucket._obstore = unreliable = Unreliable(library, 1, 2.0)
        for call in (
            partial(checkpointer.save, 2, state),
            partial(checkpointer.load, _small(0), step=1),
        ):
            asked.clear()
            with pytest.raises(StorageError, match=r"SlowDown|cannot be reached"):
                call()
            runs = [len([*run]) for _, run in itertools.groupby(asked)]
            assert sorted(runs)[-2:-1] in ([], [1])
        assert unreliable.num_faults > 10
        # One that is answered ends that: a failure is waited for again.
        storage._bucket._obstore = library
        checkpointer.load(state, step=1)
        storage._bucket._obstore = Unreliable(library, 1, 2.0)
        asked.clear()
        with pytest.raises(StorageError):
            storage.write_file("f", b"1")
        assert len(asked) > 1


def test_a_heartbeat_or_lease_without_an_answer_holds_up_no_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P2: a save that is committed, and a load that has all bytes, do not wait for it to fail."""
    monkeypatch.setattr(versions_of_steps, "_LEAVE_S", 0.01)
    monkeypatch.setattr(job, "HEARTBEAT_S", 0.001)
    names = ("holdfast-heartbeat", "holdfast-lease")
    is_asked, is_answered = threading.Event(), threading.Event()

    def watch(kind: str, key: str, *_: int) -> None:
        if kind == "put" and key.startswith(".reading/"):
            is_asked.set()
            assert is_answered.wait(60)
        elif kind == "put" and "/data/0" in key:
            assert is_asked.wait(60)

    def waiting() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name in names]

    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run", observer=watch)
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, _small(1))
    assert [each.name for each in waiting()] == ["holdfast-heartbeat"]
    is_asked.clear()
    with read_lease(storage, step_dir(1), after_s=0.001):
        assert is_asked.wait(60)
    assert len(waiting()) == 2
    assert storage.list(".reading") == []
    is_answered.set()
    for thread in waiting():
        thread.join(60)
    assert storage.list(".reading") == []


@pytest.mark.slow
def test_a_part_of_an_upload_is_sent_again_as_long_as_any_request(s3: str) -> None:
    """P19: an outage of more than the some three seconds that ten tries take."""
    began = time.monotonic()

    def choose(method: str, path: str) -> Fault:
        is_part = method == "PUT" and "partNumber=" in path
        return "500 before" if is_part and time.monotonic() < began + outage_s else ""

    name, outage_s = new_bucket(s3), 8.0
    with fault_proxy(s3, choose) as (proxy, address):
        storage = ObjectStorage(f"s3://{name}/run", endpoint=address, part_nbytes=5 << 20)
        with storage.create("f", nbytes=11 << 20) as sink:
            began = time.monotonic()
            sink.write_at(0, memoryview(bytes(11 << 20)))
            sink.sync()
        assert proxy.faults["500 before"] > 3
    assert ObjectStorage(f"s3://{name}/run").size("f") == 11 << 20


ANSWERS = [
    ("s3", 404, "NoSuchBucket", "does not exist: make the bucket"),
    ("s3", 403, "AccessDenied", "denies the request"),
    ("s3", 403, "InvalidAccessKeyId", "does not accept these credentials"),
    ("s3", 403, "SignatureDoesNotMatch", "does not accept these credentials"),
    ("s3", 400, "ExpiredToken", "have expired: renew them"),
    ("s3", 403, "RequestTimeTooSkewed", "the clock of this machine is too far from that of s3:"),
    ("s3", 301, "PermanentRedirect", "is in another region: set AWS_REGION"),
    ("s3", 400, "AuthorizationHeaderMalformed", "is in another region: set AWS_REGION"),
    ("s3", 400, "InvalidRequest", "set AWS_CHECKSUM_ALGORITHM=SHA256"),
    ("s3", 404, "NoSuchUpload", "was aborted meanwhile: by a lifecycle rule"),
    ("s3", 400, "InvalidPart", "by the ETag that came with it: check the endpoint, and proxies"),
    ("s3", 503, "SlowDown", "asks for fewer requests"),
    ("s3", 501, "NotImplemented", "does not do conditional puts"),
    ("az", 404, "ContainerNotFound", "does not exist: make the bucket"),
    ("az", 409, "ContainerBeingDeleted", "is being deleted: make it again"),
    ("az", 409, "PublicAccessNotPermitted", "no credentials for az://bucket: set AZURE_STORAGE_AC"),
    ("az", 403, "AuthenticationFailed", "check AZURE_…, and this machine's clock"),
    ("az", 403, "AuthorizationPermissionMismatch", "the role Storage Blob Data Contributor"),
    ("az", 403, "AccountIsDisabled", "the account of az://bucket is disabled"),
    ("az", 409, "BlobImmutableDueToPolicy", "use a place without one"),
    ("az", 412, "LeaseIdMissing", "another program holds an Azure lease"),
    ("az", 503, "ServerBusy", "asks for fewer requests"),
    ("az", 301, "", "check the endpoint, and proxies"),
    ("gs", 404, "NoSuchBucket", "does not exist: make the bucket"),
    ("gs", 403, "AccessDenied", "storage.objects.create, and storage.objects.delete to write"),
    ("gs", 401, "AuthenticationRequired", "no credentials for gs://bucket: set GOOGLE_SERVICE_AC"),
    ("gs", 400, "UserProjectMissing", "name the project that pays"),
    ("gs", 403, "RetentionPolicyNotMet", "use a place without one"),
    ("gs", 429, "TooManyRequests", "asks for fewer requests"),
    ("gs", 307, "", "check the endpoint, and proxies"),
]


@pytest.mark.parametrize(("scheme", "status", "code", "words"), ANSWERS)
def test_each_refusal_says_what_to_do(scheme: str, status: int, code: str, words: str) -> None:
    """P27: in the words of each cloud, and nothing of the answer's own text."""
    text = "hf-secret"
    if code == "InvalidRequest":  # S3 says it only in words
        text += ": Content-MD5 OR x-amz-checksum- HTTP header is required"
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        handler.send_response_only(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with serving(answer) as address:
        options = {
            "s3": {"endpoint": address, "access_key_id": "a", "secret_access_key": "b",
                   "region": "us-east-1"},
            "az": {"endpoint": f"{address}/a", "account_name": "a", "account_key": "d3Jvbmc="},
            "gs": gcs.options(address),
        }[scheme]  # fmt: skip
        storage = ObjectStorage(f"{scheme}://bucket/run", retry_s=0.3, **options)
        with pytest.raises(StorageError) as caught:
            storage.make_dir("d")
    assert words in str(caught.value)
    assert "hf-secret" not in str(caught.value)


RIGHTS: dict[str, Callable[[str, str], bool]] = {
    "list": lambda method, path: method == "GET" and "list-type=2" in path,
    "read": lambda method, path: method in ("GET", "HEAD") and "/data/0" in path,
    "write": lambda method, path: method in ("PUT", "POST") and "?delete" not in path,
    "delete": lambda method, path: method == "DELETE" or path.endswith("?delete"),
}
COMMANDS: dict[tuple[str, ...], dict[str, int]] = {
    ("ls",): {"list": 2},
    ("verify",): {"list": 2, "read": 2},
    ("export", "--tensor", "t.a", "--to", "OUT"): {"list": 2, "read": 2},
    ("copy", "OUT"): {"list": 2, "read": 2},
    ("tag", "2", "best"): {"list": 2, "write": 2},
    ("prune", "--keep-last", "1", "--yes"): {"list": 2, "write": 2, "delete": 2},
}
"""A command, and its exit code if a right is missing; 0 if it needs none of it."""


@pytest.mark.parametrize(
    # Without a listing no command begins: the least telling one.
    "right",
    [pytest.param("list", marks=pytest.mark.slow), *list(RIGHTS)[1:]],
)
def test_who_lacks_a_right_does_what_goes_without_and_is_told(
    s3: str,
    right: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P27: nothing is taken for damaged, no older step for the newest, and no denial is silent."""
    url = f"s3://{new_bucket(s3)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _small(step))
    state = _small(0)

    def choose(method: str, path: str) -> Fault:
        return "denied" if RIGHTS[right](method, path) else ""

    with fault_proxy(s3, choose) as (_, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        words = f"denies the request to {right}: the credentials need the right to {right} below"
        for number, (command, codes) in enumerate(COMMANDS.items()):
            caplog.clear()
            out = str(tmp_path / str(number))
            verb, *rest = (out if word == "OUT" else word for word in command)
            assert main([verb, url, *rest]) == codes.get(right, 0), command
            shown = capsys.readouterr()
            told = " ".join((shown.out + shown.err).split()) + caplog.text
            assert (words in told) == (right in codes or (right, verb != "ls") == ("delete", True))
        with Checkpointer(url, settle_s=0.0) as checkpointer:
            needs = {"save": ("list", "write"), "load": ("list", "read")}
            for name, call in (
                ("load", partial(checkpointer.load, state, max_fallbacks=None)),
                ("save", partial(checkpointer.save, 3, _small(3))),
            ):
                with (
                    pytest.raises(StorageError, match=words)
                    if right in needs[name]
                    else nullcontext()
                ):
                    call()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    steps = [2] if right in ("read", "delete") else [1, 2]
    assert list_steps(ObjectStorage(url)) == [*steps, *([3] if right in ("read", "delete") else [])]
    repair(ObjectStorage(url), alive_s=0.0)
    left = ObjectStorage(url).list("")
    assert [name for name in left if name.startswith((".saving-", ".old-"))] == []


def test_who_may_not_delete_replaces_and_a_repair_removes_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P27: the names of the saves before, too, of which a replacement has to free the last."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    library = storage._bucket._obstore

    class Denying:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def delete(self, *of: object) -> None:
            raise library.exceptions.GenericError("status code: 403 <Code>AccessDenied</Code>")

    storage._bucket._obstore = Denying()
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        for version in (1, 2, 3):
            checkpointer.save(1, _small(version), overwrite=version > 1)
        assert _version(storage, 1) == 3
        checkpointer.save(2, _small(4))
        assert apply_retention(storage, plan_retention(storage, KeepLast(1))).failed.keys() == {1}
    storage._bucket._obstore = library
    direct = ObjectStorage(storage.url)
    repair(direct, alive_s=0.0)
    monkeypatch.setattr("holdfast.storage.objects.storage._GARBAGE_S", -1.0)
    for _ in range(2):  # data without a name is marked first
        repair(direct, alive_s=0.0)
    names = [key for key in direct._bucket.list("").objects if key.endswith(".dir")]
    assert names == ["iter_0000001.dir", "iter_0000002.dir"]
    assert len(direct._bucket.list(".store/data").dirs) == 1
    assert _version(direct, 2) == 4


@pytest.mark.parametrize("nbytes", [0, 48, 150])
def test_a_name_that_is_cut_on_its_way_is_never_a_free_one(nbytes: int) -> None:
    """P19: the newest step would look removed, and a run continue from the one before."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _small(step))
    library = storage._bucket._obstore

    class Cutting:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def get(self, store: Any, path: str, **settings: Any) -> Any:
            answer = library.get(store, path, **settings)
            if not path.endswith(f"{step_dir(2)}.dir"):
                return answer
            return Old(bytes(answer.bytes())[:nbytes], answer.meta)

    reader = ObjectStorage(storage.url)
    reader._bucket._obstore = Cutting()
    assert Checkpointer(reader).latest() == 2
    with pytest.raises(CorruptionError, match=r"iter_0000002\.dir is not the name of a dir"):
        Checkpointer(reader).load_all()


def test_one_name_that_cannot_be_read_stands_in_the_way_of_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """P19, P27: no list, save or removal ends by it, and its data stays until it is mended."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _small(step))
    good = storage._bucket.get("iter_0000002.dir")
    assert good is not None
    storage._bucket.put("x.dir", b"of another program" * 9)
    assert main(["ls", storage.url]) == 0
    storage._bucket.put("iter_0000002.dir", bytes(good[0])[:150])
    capsys.readouterr()
    assert main(["ls", storage.url, "--json"]) == EXIT_DAMAGED
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(each["step"], bool(each["damage"])) for each in steps] == [
        (1, False), (2, True), (3, False),
    ]  # fmt: skip
    with Checkpointer(ObjectStorage(storage.url), settle_s=0.0) as checkpointer:
        checkpointer.save(4, _small(4))
    # Its data has no other name, and is not garbage for that.
    kept = [each for each in repair(ObjectStorage(storage.url), alive_s=0.0) if each.is_damaged]
    assert "iter_0000002.dir" in kept[0].why
    assert main(["prune", storage.url, "--keep-last", "1", "--yes"]) == EXIT_DAMAGED
    storage._bucket.put("iter_0000002.dir", bytes(good[0]))
    assert {step: _version(storage, step) for step in list_steps(storage)} == {2: 2, 4: 4}


def test_what_was_gone_already_is_deleted() -> None:
    """Garage names each object that was absent in its answer, where S3 is silent."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    library = storage._bucket._obstore

    class Garage:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def delete(self, store: Any, paths: list[str]) -> None:
            present = {each["path"] for chunk in library.list(store) for each in chunk}
            for path in paths:
                if path not in present:
                    raise library.exceptions.GenericError(
                        f"Generic S3 error: DeleteObjects request failed for key {path}: Key not "
                        f"found (code: NoSuchKey)"
                    )
                library.delete(store, path)

    storage._bucket._obstore = Garage()
    storage.write_file("f", b"1")
    storage._bucket.delete(["gone", "f"])
    storage._bucket.delete(["gone"])
    assert not storage.exists("f")


def test_an_object_that_is_said_to_be_gone_and_is_not_is_an_error(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P27: a gateway without the request for many answers it with 404, and nothing is deleted."""
    url = f"s3://{new_bucket(s3)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, _small(step))
    with fault_proxy(s3, lambda method, path: "404" if "?delete" in path else "") as (_, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        assert main(["prune", url, "--keep-last", "1", "--yes"]) == EXIT_MISTAKE
    said = " ".join(capsys.readouterr().out.split())
    assert "files of it remain" in said
    assert "answers a deletion with 404, and still shows the object" in said


@pytest.mark.slow
def test_a_listed_object_that_reads_do_not_find_is_neither_gone_nor_passed_over(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """P27: a load took the step before, and a prune removed steps whose tags it could not read."""
    monkeypatch.setattr(bucket, "_REFUSED_S", 0.0)
    url = f"s3://{new_bucket(s3)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _small(step))
    set_tag(ObjectStorage(url), "dear", step=2)
    hidden = ""

    def choose(method: str, path: str) -> Fault:
        return "404" if method in ("GET", "HEAD") and path.endswith(hidden) else ""

    with fault_proxy(s3, choose) as (_, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        hidden = "/iter_0000003.dir"
        with pytest.raises(StorageError, match=r"shows run/iter_0000003\.dir in a listing") as info:
            Checkpointer(url).load_all(max_fallbacks=3)
        assert is_unknown(info.value)
        prune = ["prune", url, "--keep-last", "1", "--keep-tagged", "--yes"]
        for command in (["ls", url], prune):
            assert main(command) == EXIT_MISTAKE, command
        hidden = "/tags/dear"
        assert main(prune) == EXIT_MISTAKE
        assert list_steps(ObjectStorage(url)) == [1, 2, 3]
        hidden = "/iter_0000001.dir"
        capsys.readouterr()
        assert main(prune) == EXIT_MISTAKE
        assert "answers reads of it with 404" in " ".join(capsys.readouterr().out.split())


def test_the_random_streams_of_the_process_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are part of the training state: a request that drew from them would change a run."""
    monkeypatch.setattr(bucket, "_LONGEST_PAUSE_S", 0.001)
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    unreliable = storage._bucket._obstore = Unreliable(storage._bucket._obstore, 1, 0.2)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        checkpointer.save(1, state_of(2), overwrite=True)
        checkpointer.load(state_of(0))
    repair(storage)
    assert unreliable.num_faults > 3
    assert (
        random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    ) == before  # fmt: skip


class LastWins:
    """obstore's functions over a store that ignores the condition of a put."""

    def __init__(self, library: object) -> None:
        self._library = library

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def put(self, *args: object, mode: object = None, **options: object) -> object:
        return self._library.put(*args, **options)  # type: ignore[attr-defined]


def test_a_store_without_conditional_puts_is_refused_by_name() -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    storage._bucket._obstore = LastWins(storage._bucket._obstore)
    with pytest.raises(StorageError, match=r"memory://.*single_writer=True"):
        storage.make_dir("d")
    alone = ObjectStorage(storage.url, single_writer=True)
    alone._bucket._obstore = storage._bucket._obstore
    for name in ("a", "b"):
        alone.make_dir(name)
        alone.write_file(f"{name}/f", name.encode())
    alone.exchange_dir("a", "b")
    alone.rename_dir("a", "c")
    assert alone.read("b/f") == b"a"
    assert alone.read("c/f") == b"b"
    with pytest.raises(StorageError, match="never overwritten"):
        alone.rename_dir("b", "c")


class Refuses(LastWins):
    """A store that never finds an object to be of the version that the condition names."""

    def put(self, *args: object, mode: object = None, **options: object) -> object:
        if isinstance(mode, dict):
            raise self._library.exceptions.PreconditionError("412")  # type: ignore[attr-defined]
        return self._library.put(*args, mode=mode, **options)  # type: ignore[attr-defined]


def test_a_store_that_refuses_what_it_shows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """P20."""
    monkeypatch.setattr(bucket, "_REFUSED_S", 0.0)
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    storage._bucket._obstore = Refuses(storage._bucket._obstore)
    for name in ("a", "b"):
        storage.make_dir(name)
    with pytest.raises(StorageError, match=r"memory://.* refuses a put on condition that an objec"):
        storage.exchange_dir("a", "b")


def test_a_store_without_etags_is_refused_at_once_and_weak_ones_do(s3: str) -> None:
    """P20: proxies remove ETags, or mark them as weak, and no condition on a weak one holds.

    None is waited for as if the store had not answered, nor tried without end.
    """
    faults: list[Fault] = []
    url = f"s3://{new_bucket(s3)}/run"
    with fault_proxy(s3, lambda method, path: faults[-1]) as (_, address):
        storage = ObjectStorage(url, endpoint=address)
        faults.append("no ETag")
        with pytest.raises(StorageError, match=r"cannot write: .* answers without an ETag, so no"):
            Checkpointer(storage, settle_s=0.0).save(1, _small(1))
        faults.append("weak ETag")
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, _small(step))
            checkpointer.save(1, _small(11), overwrite=True)
            assert checkpointer.latest() == 2
        faults.append("no ETag")
        reader = ObjectStorage(url, endpoint=address)
        assert [_version(reader, step) for step in (1, 2)] == [11, 2]
        faults.append("new ETag")
        assert storage.update_file("f", lambda content: b"1")
        with pytest.raises(StorageError, match="the store gives each answer another ETag"):
            storage.update_file("f", lambda content: b"2")
        assert storage.read("f") == b"1"


class Killed(BaseException):
    """The process ends here."""


def _small(version: int) -> dict[str, object]:
    return {"t": {"a": torch.arange(500) + version}, "v": {"version": version}}


def _version(storage: Storage, step: int) -> int:
    state = _small(0)
    loaded = Checkpointer(storage, settle_s=0.0).load(state, step=step)
    version = loaded.values["v"]["version"]  # type: ignore[index]
    assert torch.equal(state["t"]["a"], torch.arange(500) + version)  # type: ignore[index]
    return int(version)


def _replace(storage: ObjectStorage) -> None:
    Checkpointer(storage, settle_s=0.0).save(2, _small(22), overwrite=True)


def _create(storage: ObjectStorage) -> None:
    Checkpointer(storage, settle_s=0.0).save(3, _small(3))


def _prune(storage: ObjectStorage) -> None:
    apply_retention(storage, plan_retention(storage, KeepLast(1)))


def _copy(storage: ObjectStorage) -> None:
    source = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    Checkpointer(source, settle_s=0.0).save(3, _small(3))
    copy_checkpoint(source, step_dir(3), storage, verify=True)


def _tag(storage: ObjectStorage) -> None:
    set_tag(storage, "best", step=1)


def _repair(storage: ObjectStorage) -> None:
    repair(storage, alive_s=0.0)


ACTIONS = {
    "create": (_create, {1: 1, 2: 2, 3: 3}),
    "replace": (_replace, {1: 1, 2: 22}),
    "prune": (_prune, {2: 2}),
    "copy": (_copy, {1: 1, 2: 2, 3: 3}),
    "tag": (_tag, {1: 1, 2: 2}),
}


def _two_steps() -> str:
    url = f"memory://{secrets.token_hex(8)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        checkpointer.save(1, _small(1))
        checkpointer.save(2, _small(2))
    return url


def _killed_at(url: str, act: Callable[[ObjectStorage], None], at: int) -> int:
    """Run an action in which the process dies at a request; return how many there were."""
    number = itertools.count(1)
    seen = 0

    def watch(*request: object) -> None:
        nonlocal seen
        seen = next(number)
        if seen >= at:
            raise Killed

    with suppress(Killed, HoldfastError):
        act(ObjectStorage(url, observer=watch))
    # Of a dead process, by which a reader would know them for stale; this one lives.
    storage = ObjectStorage(url)
    for name in storage.list(".reading"):
        storage.remove_tree(f".reading/{name}")
    return seen


def _check_after_kill(url: str, action: str, where: str, patch: pytest.MonkeyPatch) -> None:
    """Each step is in one of its versions, and a repair finishes it or removes it."""
    before, done = {1: 1, 2: 2}, ACTIONS[action][1]
    storage = ObjectStorage(url)
    found = {step: _version(storage, step) for step in list_steps(storage)}
    for step in {*before, *done}:
        assert found.get(step) in (before.get(step), done.get(step)), where
    tags = list_tags(storage)
    fates = repair(storage, alive_s=0.0)
    assert not [each for each in fates if each.fate in ("kept", "alive")], (where, fates)
    after = {step: _version(storage, step) for step in list_steps(storage)}
    for step in {*before, *done}:
        allowed = (before.get(step), done.get(step))
        assert after.get(step) in allowed, where
        # A removal that waits for its last look may be undone, and is then made again.
        if found.get(step) == done.get(step) and action != "prune":
            assert after.get(step) == done.get(step), f"{where}: undone"
    names = [n for n in storage.list("") if n.startswith((".saving-", ".old-", ".replaced-"))]
    assert names == [], where
    assert storage.read(LATEST) == b"%d\n" % max(after)
    assert list_tags(storage) == tags, where
    # Data of nothing goes, too, as soon as it is old enough.
    with patch.context() as old:
        old.setattr("holdfast.storage.objects.storage._GARBAGE_S", -1.0)
        repair(storage, alive_s=0.0)
    assert len(storage._bucket.list(".store/data").dirs) == len(after), where
    Checkpointer(url, settle_s=0.0).save(2, _small(7), overwrite=True)
    assert _version(storage, 2) == 7


@pytest.mark.parametrize(
    ("action", "every"),
    [
        *((action, 1 if action == "tag" else 5) for action in ACTIONS),
        *(pytest.param(action, 1, marks=pytest.mark.slow) for action in ACTIONS if action != "tag"),
    ],
)
def test_killed_at_every_request_nothing_is_lost_or_mixed(
    action: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "ALIVE_S", 0.0)
    act = ACTIONS[action][0]
    num_requests = _killed_at(_two_steps(), act, NEVER)
    assert num_requests > 3
    for at in range(1, num_requests + 1, every):
        _killed_at(url := _two_steps(), act, at)
        _check_after_kill(url, action, f"{action}, killed at request {at}", monkeypatch)


@pytest.mark.parametrize(
    ("action", "every"),
    [
        ("replace", 11),
        *(
            pytest.param(action, every, marks=mark)
            for every, mark in ((2, pytest.mark.slow), (1, pytest.mark.nightly))
            for action in ACTIONS
            if action != "tag"
        ),
    ],
)
def test_a_repair_that_is_killed_leaves_it_to_the_next_one(
    action: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P19: at each of its requests, after a process that was killed at one of its last."""
    monkeypatch.setattr(leftovers, "ALIVE_S", 0.0)
    act = ACTIONS[action][0]
    num_requests = _killed_at(_two_steps(), act, NEVER)
    for first in range(num_requests, num_requests - 14, -1 - every // 3):
        _killed_at(url := _two_steps(), act, first)
        for at in range(1, _killed_at(url, _repair, NEVER) + 1, every):
            _killed_at(url := _two_steps(), act, first)
            _killed_at(url, _repair, at)
            where = f"{action}, killed at request {first}, and a repair at {at}"
            _check_after_kill(url, action, where, monkeypatch)


def test_an_abandoned_step_dir_is_what_it_was(s3: str) -> None:
    url = f"s3://{new_bucket(s3)}/run"
    Checkpointer(url, settle_s=0.0).save(1, state_of(1))
    reader = ObjectStorage(url)
    with reader.pin(step_dir(1)) as held:
        before = held.read(f"{step_dir(1)}/manifest.json")
        (file,) = held.list(f"{step_dir(1)}/data")
        Checkpointer(url, settle_s=0.0).save(1, state_of(2), overwrite=True)
        assert version_of(url, 1) == 2
        # Its data is gone by now: never the other version's.
        assert held.read(f"{step_dir(1)}/manifest.json") == before
        with pytest.raises(StorageError):
            held.read(f"{step_dir(1)}/data/{file}")

"""Clocks that are hours apart, listings of an earlier moment, and uploads that end late."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Checkpointer, HoldfastError, StorageError
from holdfast.format import versions
from holdfast.format.names import list_steps, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import LEASES_DIR, Lease, readers_of
from holdfast.writer.leftovers import repair

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from holdfast.storage.objects import storage as storage_module
from tests.buckets.gcs import gcs_server, options
from tests.buckets.proxy import Fault, fault_proxy
from tests.buckets.server import new_bucket, open_uploads
from tests.crash.common import state_of

SLOW = pytest.mark.slow
DIRECTORY = step_dir(1)
LEASE = f"{LEASES_DIR}/{DIRECTORY}.read-{'0' * 16}"


class Clock:
    """The module `time` of a process whose clock is off by some seconds."""

    def __init__(self, off_s: float) -> None:
        self._off_s = off_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return time.time() + self._off_s


def lease_of(storage: ObjectStorage, *, life_s: float, off_s: float) -> None:
    """A lease as a process writes it whose clock is off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "time", Clock(off_s))
        Lease(storage=storage, directory=DIRECTORY, path=LEASE, life_s=life_s).renew()


@pytest.mark.parametrize("owner_s", [-5 * 3600.0, 0.0, 5 * 3600.0])
@pytest.mark.parametrize("remover_s", [-5 * 3600.0, 0.0, 5 * 3600.0])
def test_one_clock_rules_a_lease(
    owner_s: float, remover_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    lease_of(storage, life_s=60.0, off_s=owner_s)
    for module in (versions, storage_module):
        monkeypatch.setattr(module, "time", Clock(remover_s))
    assert readers_of(storage, DIRECTORY) != []
    # It has expired, whatever its owner's clock said when it was renewed last.
    lease_of(storage, life_s=0.05, off_s=remover_s + 0.1)
    time.sleep(0.1)
    assert readers_of(ObjectStorage(storage.url), DIRECTORY) == []
    assert not storage.exists(LEASE)


@pytest.mark.parametrize("jump_s", [-30 * 3600.0, 30 * 3600.0])
def test_a_clock_of_the_store_that_is_set_makes_nothing_old(
    jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: a lease lives until it was not renewed for as long as it says, in whatever year."""
    monkeypatch.setattr(versions, "_origin", lambda pid: "")  # its reader is on another host
    passed_s, off_s = 0.0, 0.0
    monkeypatch.setattr(
        storage_module, "_since_boot", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + passed_s
    )
    with gcs_server() as (server, address):
        server.now = lambda: time.time() + off_s + passed_s
        for year in (1901, 1960, 2026, 2100):
            server.buckets[f"b{year}"] = {}
            off_s = (year - 2026) * 365.25 * 86400
            storage = ObjectStorage(f"gs://b{year}/run", **options(address))
            lease = Lease(storage=storage, directory=DIRECTORY, path=LEASE, life_s=600.0)
            lease.renew()
            remover = ObjectStorage(storage.url, **options(address))
            assert readers_of(remover, DIRECTORY) != []
            # The lease is renewed just before the clock is set forward, and the remover reads it
            # anew; or again after it was set back, and the remover goes by what it has read.
            passed_s += 580.0
            lease.renew()
            off_s += jump_s
            if jump_s < 0:
                lease.renew()
            passed_s += 30.0 if jump_s > 0 else 10.0
            for _ in range(2):
                assert readers_of(remover, DIRECTORY) != [], year
                assert 0.0 <= remover.age_s(LEASE) < 600.0
            lease.renew()
            passed_s += 700.0
            assert readers_of(remover, DIRECTORY) == [], year


def test_while_the_clock_cannot_be_read_nothing_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run", retry_s=0.0)
    lease_of(storage, life_s=60.0, off_s=0.0)
    monkeypatch.setattr(storage_module, "time", Clock(5 * 3600.0))
    library = storage._bucket._obstore

    class Busy:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def put(self, *args: Any, **options: Any) -> Any:
            raise library.exceptions.GenericError("status code: 503")

    storage._bucket._obstore = Busy()
    with pytest.raises(StorageError, match="SlowDown"):
        storage.age_s(LEASE)
    assert readers_of(storage, DIRECTORY) != []
    assert storage.exists(LEASE)


class OldListings:
    """obstore's functions; the listings of the root are of an earlier moment."""

    def __init__(self, library: Any, root: str, listing: Any) -> None:
        self._library, self._root, self._listing = library, root, listing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def list_with_delimiter(self, store: object, prefix: str, **options: object) -> Any:
        if prefix == self._root:
            return self._listing
        return self._library.list_with_delimiter(store, prefix, **options)


def test_no_old_listing_makes_garbage_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever earlier moment the listings of a repair show, and however old the data is."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    library, store = storage._bucket._obstore, storage._bucket._store
    moments: list[Any] = []

    def note(kind: str, *rest: object) -> None:
        moments.append(library.list_with_delimiter(store, "run"))

    storage._bucket._observer = note
    storage.make_dir(".saving-iter_0000001-a")
    storage.write_file(".saving-iter_0000001-a/f", b"first")
    storage.rename_dir(".saving-iter_0000001-a", DIRECTORY)
    storage.make_dir(".saving-iter_0000001-b")
    storage.write_file(".saving-iter_0000001-b/f", b"second")
    storage.exchange_dir(".saving-iter_0000001-b", DIRECTORY)
    storage.rename_dir(".saving-iter_0000001-b", ".replaced-iter_0000001-c")
    storage.remove_tree(DIRECTORY, only_if=lambda aside: False)
    storage._bucket._observer = None

    def look(listing: Any) -> None:
        late = ObjectStorage(storage.url)
        late._bucket._obstore = OldListings(library, "run", listing)
        late.collect_garbage()
        assert storage.read(f"{DIRECTORY}/f") == b"second"
        assert storage.read(".replaced-iter_0000001-c/f") == b"first"

    monkeypatch.setattr(ObjectStorage, "_now", lambda self, *_: time.time() + 7200)
    for listing in moments:
        look(listing)
        # A repair that sees it as it is takes back what another one thought of it.
        ObjectStorage(storage.url).collect_garbage()
        assert [key for key in storage._bucket.list_all(".store/data") if ".unnamed" in key] == []


def test_garbage_goes_when_it_has_had_no_name_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    storage.make_dir("d")
    storage.write_file("d/f", b"1")
    storage._bucket.delete(["d.dir"])
    now = time.time()
    for later_s, is_there in ((0.0, True), (3700.0, True), (7500.0, False)):
        monkeypatch.setattr(ObjectStorage, "_now", lambda self, *_, s=later_s: now + s)
        monkeypatch.setattr(storage_module, "_GARBAGE_S", 3600.0)
        ObjectStorage(storage.url).collect_garbage()
        assert bool(storage._bucket.list_all(".store/data")) == is_there


class LatePut:
    """obstore's functions: of one object the first put seems lost, and comes with `land`."""

    def __init__(self, library: Any, part: str) -> None:
        self._library, self._part = library, part
        self.late: list[Callable[[], object]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def put(self, store: object, key: str, *args: object, **options: object) -> Any:
        if self._part in key and not self.late:
            self.late.append(lambda: self._library.put(store, key, *args, **options))
            raise self._library.exceptions.GenericError("reset by peer")
        return self._library.put(store, key, *args, **options)


def test_a_name_that_comes_after_its_removal_makes_no_checkpoint() -> None:
    """P22: it has manifest and index in it, and the data is gone."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    library = LatePut(storage._bucket._obstore, "/.old-")
    storage._bucket._obstore = library
    storage.remove_tree(step_dir(2), only_if=lambda aside: True)
    library.late[0]()
    (name,) = (name for name in storage.list("") if name.startswith(".old-"))
    assert [(each.name, each.fate) for each in repair(storage, alive_s=0.0)][:1] == [
        (name, "removed")
    ]
    assert list_steps(ObjectStorage(storage.url)) == [1]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_save_whose_name_comes_late_again_takes_no_data_from_its_checkpoint(
    is_removed: bool,
) -> None:
    """P22: the step was there before, so another move than the one it states has made it."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        if is_removed:
            storage.remove_tree(DIRECTORY)
    other = ObjectStorage(storage.url)
    library = LatePut(other._bucket._obstore, "/.saving-")
    other._bucket._obstore = library
    with Checkpointer(other, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(2), overwrite=True)
    library.late[0]()
    assert any(name.startswith(".saving-") for name in storage.list(""))
    repair(ObjectStorage(storage.url), alive_s=0.0)
    assert not any(name.startswith(".saving-") for name in ObjectStorage(storage.url).list(""))
    assert verify_snapshot(ObjectStorage(storage.url), DIRECTORY) == []


def upload(storage: ObjectStorage, payload: bytes) -> bool:
    """Write a file in parts; whether that was reported as done."""
    try:
        with storage.create("d/f", nbytes=len(payload)) as sink:
            sink.write_at(0, memoryview(payload))
    except HoldfastError:
        return False
    return True


ENDS = [
    pytest.param(phase, fault, marks=[] if (phase, fault) == ("?uploadId", "late") else SLOW)
    for phase in ("?uploads", "partNumber=2", "?uploadId")
    for fault in ("500 before", "500 after", "cut after", "late")
]


@pytest.mark.parametrize(("phase", "fault"), ENDS)
def test_an_upload_that_ends_late_is_whole_or_nothing(s3: str, phase: str, fault: Fault) -> None:
    seen: list[str] = []

    def choose(method: str, path: str) -> Fault:
        is_it = phase in path and (method == "POST" or "partNumber" in phase) and not seen
        seen.extend([path] if is_it else [])
        return fault if is_it else ""

    name, payload = new_bucket(s3), secrets.token_bytes(1 << 20) * 12
    direct = ObjectStorage(f"s3://{name}/run")
    direct.make_dir("d")
    with fault_proxy(s3, choose) as (proxy, address):
        storage = ObjectStorage(direct.url, endpoint=address, part_nbytes=5 << 20, retry_s=5)
        assert upload(storage, payload)
        proxy.settle()
        assert seen
    assert direct.read("d/f") == payload
    # An upload whose beginning was not answered is nobody's: a repair aborts it with its data.
    direct.remove_tree("d")
    direct.collect_garbage()
    assert open_uploads(s3, name) == []


def test_a_save_that_was_removed_meanwhile_leaves_nothing_that_counts(s3: str) -> None:
    """Its last requests come to the store after a repair took it for dead."""
    url = f"s3://{new_bucket(s3)}/run"
    Checkpointer(url, settle_s=0.0).save(1, state_of(1))

    def choose(method: str, path: str) -> Fault:
        if method == "PUT" and path.endswith("/iter_0000002.dir"):
            repair(ObjectStorage(url), alive_s=0.0)
            return "late"
        return ""

    with fault_proxy(s3, choose) as (proxy, address):
        storage = ObjectStorage(url, endpoint=address, retry_s=0.0)
        with pytest.raises(StorageError):
            Checkpointer(storage, settle_s=0.0).save(2, state_of(2))
        proxy.settle()
    assert list_steps(ObjectStorage(url)) == [1]
    assert [each.fate for each in repair(ObjectStorage(url), alive_s=0.0)] == []

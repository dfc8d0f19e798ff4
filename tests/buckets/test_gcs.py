"""`gs://`: what holds in a bucket of S3, by obstore's own client for Google's store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from holdfast import StorageError
from holdfast.format.names import list_steps
from holdfast.storage import Storage
from holdfast.writer.leftovers import repair
from tests.buckets import test_objects
from tests.buckets.gcs import Server, gcs_server, options
from tests.buckets.runs import save_replace_and_prune

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.proxy import at_random, fault_proxy
from tests.buckets.test_faults import run_sequence


@pytest.fixture(scope="module")
def gcs() -> Iterator[tuple[Server, str]]:
    with gcs_server() as server:
        yield server


def new_url(server: Server) -> str:
    bucket = f"g{secrets.token_hex(6)}"
    server.buckets[bucket] = {}
    return f"gs://{bucket}/team/run"


class TestGoogle(test_objects.TestMemory):
    """By HTTP, with conditions on generations."""

    @pytest.fixture
    def storage(self, gcs: tuple[Server, str]) -> Storage:
        return ObjectStorage(new_url(gcs[0]), **options(gcs[1]))


def test_a_run_is_saved_replaced_and_pruned(gcs: tuple[Server, str]) -> None:
    server, address = gcs
    url = new_url(server)
    storage = ObjectStorage(url, part_nbytes=5 << 20, **options(address))
    save_replace_and_prune(storage)
    again = ObjectStorage(url, **options(address))
    assert list_steps(again) == [3, 4, 9]
    assert repair(again) == []
    assert server.uploads == {}
    with pytest.raises(StorageError, match=r"gs://absent9 does not exist: make the bucket"):
        ObjectStorage("gs://absent9/run", **options(address)).list("")


def test_of_many_that_are_deleted_some_may_be_absent(gcs: tuple[Server, str]) -> None:
    """Each is a request of its own there, and obstore ends with the first that is absent."""
    server, address = gcs
    bucket = ObjectStorage(new_url(server), **options(address))._bucket
    keys = [f"x/{number:02d}" for number in range(40)]
    for key in keys[::2]:
        bucket.put(key, b"1")
    bucket.delete(keys)
    assert bucket.list_all("") == {}


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.nightly), pytest.param(1, marks=pytest.mark.slow)]
)
def test_sequences_on_google_through_a_bad_network(gcs: tuple[Server, str], seed: int) -> None:
    server, direct = gcs
    url = new_url(server)
    with fault_proxy(direct, at_random(seed, 0.08, lags=seed % 2 == 1)) as (proxy, address):
        run_sequence(
            url,
            lambda: ObjectStorage(url, timeout_s=5, retry_s=15, **options(address)),
            seed,
            later=lambda: ObjectStorage(url, **options(direct)),
        )
        proxy.settle()

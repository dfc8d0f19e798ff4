"""`az://`: what holds in a bucket of S3, with Azurite as the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Checkpointer, ConfigError, StorageError
from holdfast.cli.main import main
from holdfast.format.names import list_steps
from holdfast.storage import Storage
from holdfast.writer.leftovers import repair
from tests.buckets import test_objects
from tests.buckets.azure import KEY, azurite, environment, new_container
from tests.buckets.runs import save_replace_and_prune
from tests.crash.common import state_of

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.proxy import at_random, fault_proxy
from tests.buckets.test_faults import run_sequence
from tests.buckets.test_saves import version_of, versions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def azure() -> Iterator[str]:
    with azurite() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(endpoint).items():
            patch.setenv(name, value)
        yield endpoint


@pytest.fixture
def url(azure: str) -> str:
    return f"az://{new_container(azure)}/team/run"


class TestAzure(test_objects.TestMemory):
    """By HTTP, from Azurite, with conditional puts."""

    @pytest.fixture
    def storage(self, url: str) -> Storage:
        return ObjectStorage(url)


def test_a_run_is_saved_replaced_pruned_and_copied(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = ObjectStorage(url, part_nbytes=5 << 20)
    save_replace_and_prune(storage)
    assert list_steps(ObjectStorage(url)) == [3, 4, 9]
    assert (version_of(url, 3), version_of(url, 4)) == (33, 4)
    assert repair(ObjectStorage(url)) == []
    copied = str(tmp_path / "run")
    for words in (
        ["ls", url], ["show", url], ["verify", url], ["tag", url, "4", "best"],
        ["copy", url, copied, "--step", "4", "--verify"], ["copy", copied, f"{url}-2"],
        ["diff", f"{url}/iter_0000004", f"{url}-2/iter_0000004"],
    ):  # fmt: skip
        assert main(words) == 0, capsys.readouterr().err
    output = capsys.readouterr()
    assert KEY not in output.out + output.err


@pytest.mark.parametrize("seed", range(2))
def test_sequences_on_azure_through_a_bad_network(azure: str, seed: int) -> None:
    container = new_container(azure)
    with fault_proxy(azure.rpartition("/")[0], at_random(seed, 0.08)) as (_, address):
        endpoint = f"{address}/{azure.rpartition('/')[2]}"

        def open_storage() -> ObjectStorage:
            return ObjectStorage(
                f"az://{container}/run", endpoint=endpoint, timeout_s=5, retry_s=15
            )

        run_sequence(f"az://{container}/run", open_storage, seed)
    assert versions(f"az://{container}/run")


def test_refusals_say_what_to_do(azure: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"az://absent9 does not exist: make the bucket"):
        ObjectStorage("az://absent9/run").list("")
    with pytest.raises(StorageError, match=r"az://absent9 does not exist: make the bucket"):
        Checkpointer("az://absent9/run").save(1, state_of(1))
    with pytest.raises(StorageError, match="denies the request"):
        ObjectStorage(url, account_key="d3Jvbmc=").list("")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectStorage(url)

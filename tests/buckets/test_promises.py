"""Promises of group P in a bucket; docs/object-stores.md says which tests prove the others."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

import pytest
import torch

from holdfast import (
    Checkpointer,
    ConfigError,
    DriftError,
    HoldfastError,
    KeepLast,
    Layout,
    ProcessGroups,
    Sharded,
    StorageError,
    Stored,
)
from holdfast.format.names import MANIFEST, list_steps, saving_dir, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.format.versions import read_manifest
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.retention.tags import set_tag
from holdfast.writer.leftovers import repair
from holdfast.writer.outcomes import discard_save
from tests.crash.common import ROWS, state_of, whole
from tests.harness import RankContext, run_ranks

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from tests.buckets.proxy import Fault, fault_proxy
from tests.buckets.server import environment, new_bucket

WHOLE = torch.arange(1 << 12, dtype=torch.float32)


def _two_ranks(context: RankContext, url: str, endpoint: str) -> float | None:
    os.environ.update(environment(endpoint))
    half = len(WHOLE) // 2
    mine = WHOLE[context.rank * half : (context.rank + 1) * half].clone()
    alike = torch.ones(64)

    def state() -> dict[str, object]:
        return {"t": {"a": Sharded(mine, (len(WHOLE),), dims={0: "dp"}), "b": alike}}

    with (
        ProcessGroups.create(Layout(dp=2), timeout_s=60) as groups,
        Checkpointer(url, groups=groups, settle_s=0.0, fingerprints=True) as checkpointer,
    ):
        checkpointer.save(1, state())
        # P4: a replica that differs by one bit.
        if context.rank:
            alike.view(torch.int32)[5] ^= 1
        with pytest.raises(DriftError, match=r"t\.b"):
            checkpointer.save(2, state(), check_replicas=True)
        alike.fill_(1.0)
        # P2: the writer of one rank dies; no rank reports success.
        checkpointer.prepare(state())
        pid = checkpointer.stats.writer_pid
        assert pid is not None
        if context.rank:
            os.kill(pid, signal.SIGSTOP)
        pending = checkpointer.save_async(3, state())
        if context.rank:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(HoldfastError, match="was killed by SIGKILL"):
            pending.result()
        assert checkpointer.steps() == [1]
        # P7: what both ranks need is read once.
        report = checkpointer.load(
            {"t": {"a": torch.zeros(len(WHOLE)), "b": torch.zeros(64)}}, exchange=True
        )
        return report.job.amplification


def test_ranks_that_drift_or_lose_their_writer_commit_nothing(s3: str) -> None:
    """P2, P3, P4, P7."""
    url = f"s3://{new_bucket(s3)}/run"
    assert run_ranks(2, _two_ranks, url, s3, fresh=True).results == [1.0, 1.0]
    repair(ObjectStorage(url), alive_s=0.0)
    assert list_steps(ObjectStorage(url)) == [1]
    # P3: a fingerprint does not depend on the sharding.
    other = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(other, settle_s=0.0, fingerprints=True) as checkpointer:
        checkpointer.save(1, {"t": {"a": WHOLE, "b": torch.ones(64)}})
    prints = [
        {tensor.key: tensor.fingerprint for tensor in read_manifest(place, step_dir(1))[1].tensors}
        for place in (ObjectStorage(url), other)
    ]
    assert prints[0] == prints[1]
    assert None not in prints[0].values()


def test_a_copy_by_any_tool_is_a_run() -> None:
    """P11: what copies objects one by one copies names and data; neither states a place."""
    source = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    for version in (1, 2):
        Checkpointer(source, settle_s=0.0).save(7, state_of(version), overwrite=True)
    target = ObjectStorage(f"memory://{secrets.token_hex(8)}/elsewhere/run2")
    for key in source._bucket.list_all(""):
        answer = source._bucket.get(key)
        assert answer is not None
        target._bucket.put(key, bytes(answer[0]))
    assert list_steps(target) == [7]
    assert verify_snapshot(target, step_dir(7)) == []
    loaded = Checkpointer(target, settle_s=0.0).load({"t": Stored(), "v": Stored()})
    assert cast("dict[str, int]", loaded.values["v"])["version"] == 2
    Checkpointer(target, settle_s=0.0).save(7, state_of(3), overwrite=True)
    assert list_steps(source) == list_steps(target) == [7]


def test_the_newest_sound_checkpoint_stays() -> None:
    """P8: of a newest step whose data is gone nothing is kept in its place, and none removed."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step))
    (name,) = storage.list(f"{step_dir(3)}/data")
    storage.remove_tree(f"{step_dir(3)}/data/{name}")
    apply_retention(storage, plan_retention(storage, KeepLast(1)))
    assert list_steps(storage) == [2, 3]
    assert verify_snapshot(storage, step_dir(2)) == []


def test_retention_looks_at_several_steps_at_once() -> None:
    """One after the other, a look at each of a hundred steps would take seconds at every save."""
    url = f"memory://{secrets.token_hex(8)}/run"
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in range(9):
            checkpointer.save(step, {"v": {"n": step}})
    both = threading.Barrier(2)

    def meet(kind: str, key: str, start: int, nbytes: int) -> None:
        if kind == "get" and key in older:
            both.wait(60)

    older = {f"{step_dir(step)}.dir" for step in range(8)}
    storage = ObjectStorage(url, observer=meet)
    storage.dirs_with(MANIFEST)
    assert plan_retention(storage, KeepLast(9)).remove == ()
    assert storage.requests["head"] == 0  # a listing has the sizes of all files


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_load_that_loses_its_step_at_once_starts_again(is_replaced: bool) -> None:
    """O9: in its first seconds it has no lease, and writes none if it is over by then."""
    other = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(other, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        leases: list[bool] = []

        def remove_at_first_range(kind: str, key: str, start: int, nbytes: int) -> None:
            if kind != "get" or "/data/0" not in key:
                return
            leases.append(bool(other.list(".reading")))
            if len(leases) > 1:
                return
            if is_replaced:
                checkpointer.save(1, state_of(2), overwrite=True)
            else:
                checkpointer.save(2, state_of(2))
                apply_retention(other, plan_retention(other, KeepLast(1)))

        reader = ObjectStorage(other.url, observer=remove_at_first_range)
        loaded = Checkpointer(reader, settle_s=0.0).load({"t": Stored(), "v": Stored()})
    # What it starts again with is not taken from it.
    assert leases[0] is False
    assert leases[-1] is True
    assert loaded.step == (1 if is_replaced else 2)
    assert cast("dict[str, int]", loaded.values["v"])["version"] == 2
    assert other.list(".reading") == []


def test_a_step_removed_between_any_two_requests_is_no_end_of_a_load() -> None:
    """O9: whatever a load asks for when retention comes, it finds the newer step that is there."""
    state = {"t": Stored(), "v": Stored()}
    for max_fallbacks, at in itertools.product((0, None), range(1, 10)):
        other = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
        number = itertools.count(1)
        with Checkpointer(other, settle_s=0.0) as checkpointer:
            checkpointer.save(1, state_of(1))

            def replace_at(*request: object, checkpointer: Checkpointer = checkpointer) -> None:
                if next(number) == at:  # noqa: B023 (called within the same round)
                    checkpointer.save(2, state_of(2))
                    apply_retention(other, plan_retention(other, KeepLast(1)))  # noqa: B023

            reader = Checkpointer(ObjectStorage(other.url, observer=replace_at), settle_s=0.0)
            loaded = reader.load(state, max_fallbacks=max_fallbacks)
        version = cast("dict[str, int]", loaded.values["v"])["version"]
        assert loaded.step == version, at
        assert loaded.fell_back == ()


def test_a_tag_set_between_any_two_requests_of_a_removal_keeps_its_step() -> None:
    """E14: or the step was gone, and the tag is refused. Nothing but requests is in common."""
    outcomes, first = set[bool](), ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(first, settle_s=0.0) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": {"a": torch.zeros(2)}})
    objects = {key: first._bucket.get(key) for key in first._bucket.list_all("")}
    for at in itertools.count(1):
        other = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
        number, is_tagged = itertools.count(1), list[bool]()
        for key, answer in objects.items():
            assert answer is not None
            other._bucket.put(key, answer[0])

        def tag_at(*request: object) -> None:
            if next(number) == at:  # noqa: B023 (called within the same round)
                is_tagged.append(False)  # noqa: B023
                with suppress(ConfigError):
                    set_tag(other, "dear", step=1)  # noqa: B023
                    is_tagged[:] = [True]  # noqa: B023

        plan = plan_retention(other, KeepLast(1))
        result = apply_retention(ObjectStorage(other.url, observer=tag_at), plan)
        if not is_tagged:
            break
        assert list_steps(other) == ([1, 2] if is_tagged[0] else [2]), at
        assert result.failed == {}
        assert ("tagged dear" in result.spared.get(1, "")) == is_tagged[0], at
        outcomes |= {*is_tagged}
    assert outcomes == {True, False}


ROUNDS = [
    (action, rank, at, exchange)
    for action in ("replace", "again", "prune")
    for rank, at in ((0, 2), (0, 4), (1, 1), (1, 2))
    for exchange in (True, False)
]


def _load_while_it_goes(
    context: RankContext, url: str, proxies: list[str]
) -> list[tuple[int, list[int]]]:
    """What each round has loaded: the step, and the versions of what this rank got of it."""
    os.environ.update(environment(proxies[context.rank]))
    loaded = []
    with ProcessGroups.create(Layout(dp=2), timeout_s=60) as groups:
        for number, (action, rank, at, exchange) in enumerate(ROUNDS):
            if context.rank == 0:
                with suppress(urllib.error.HTTPError):  # the server itself has no such object
                    urllib.request.urlopen(f"{proxies[rank]}/arm/{number}/{action}/{at}").close()
            groups.control.agree(None, phase="armed", payload=b"")
            mine, rows = torch.zeros(ROWS // 2, 8, dtype=torch.float64), ROWS // 2
            small = torch.zeros(17, dtype=torch.int32)
            split = Sharded(mine, (ROWS, 8), dims={0: "dp"})
            state = {"t": {"a": split, "b": small, "c": torch.tensor(0)}, "v": Stored()}
            with Checkpointer(f"{url}{number}", groups=groups, settle_s=0.0) as checkpointer:
                report = checkpointer.load(state, exchange=exchange)
            version = cast("dict[str, int]", report.values["v"])["version"]
            assert torch.equal(mine, whole(version)["a"].narrow(0, rows * context.rank, rows))
            loaded.append((report.step, [version, int(small[0])]))
    return loaded


@pytest.mark.slow
def test_two_ranks_load_one_version_of_a_step_that_goes_between_their_requests(s3: str) -> None:
    """O9: without a lease yet; whichever rank's request it is, both load one version, whole."""
    url = f"s3://{new_bucket(s3)}/run"
    going: list[tuple[ObjectStorage, str, list[int]]] = []

    def go(storage: ObjectStorage, action: str) -> None:
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            if action == "replace":
                checkpointer.save(2, state_of(3), overwrite=True)
            elif action == "again":
                storage.remove_tree(step_dir(2))
                checkpointer.save(2, state_of(4))
            else:
                checkpointer.save(3, state_of(5))
                apply_retention(storage, plan_retention(storage, KeepLast(1)))

    def chooser(rank: int) -> Callable[[str, str], Fault]:
        def choose(method: str, path: str) -> Fault:
            del method
            if path.startswith("/arm/"):
                number, action, at = path.split("/")[2:]
                storage = ObjectStorage(f"{url}{number}")
                Checkpointer(storage, settle_s=0.0).save(2, state_of(2))
                going[:] = [(storage, action, [rank, int(at)])]
            elif going and going[0][2][0] == rank:
                storage, action, left = going[0]
                left[1] -= 1
                if left[1] == 0:
                    going.clear()
                    go(storage, action)
            return ""

        return choose

    with fault_proxy(s3, chooser(0)) as (_, first), fault_proxy(s3, chooser(1)) as (_, second):
        ranks = run_ranks(2, _load_while_it_goes, url, [first, second], fresh=True).results
    assert ranks[0] == ranks[1]
    assert all(small == version for _, (version, small) in ranks[0])
    assert {step for step, _ in ranks[0]} == {2, 3}
    assert {version for _, (version, _) in ranks[0]} == {2, 3, 4, 5}


def test_a_load_that_lasts_takes_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """E14: what it reads is spared from then on, and it gives the lease back."""
    monkeypatch.setattr("holdfast.checkpoint.load.finding._UNLEASED_S", 0.01)
    other = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(other, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(1))
        spared: dict[int, str] = {}

        def prune(kind: str, key: str, start: int, nbytes: int) -> None:
            if kind == "get" and "/data/0" in key and not spared:
                while not other.list(".reading"):
                    time.sleep(0.005)
                checkpointer.save(2, state_of(2))
                spared.update(apply_retention(other, plan_retention(other, KeepLast(1))).spared)

        reader = ObjectStorage(other.url, observer=prune)
        assert Checkpointer(reader, settle_s=0.0).load({"t": Stored(), "v": Stored()}).step == 1
    assert "being read by" in spared[1]
    assert other.list(".reading") == []


class Killed(BaseException):
    """The process ends here."""


class KilledAfterExchange(ObjectStorage):
    """The process ends when the new version has the name of the step."""

    def exchange_dir(self, first: str, second: str) -> None:
        super().exchange_dir(first, second)
        raise Killed


class NotAnswering(ObjectStorage):
    """The manifest of step 1 cannot be read now."""

    def read_at_most(self, path: str, nbytes: int, *, start: int = 0) -> bytes:
        if path == f"{step_dir(1)}/{MANIFEST}":
            raise StorageError("no answer", details={"is_unknown": True})
        return super().read_at_most(path, nbytes, start=start)


def test_a_replaced_version_stays_until_it_is_known_what_has_replaced_it() -> None:
    """P27: neither a save that is given up nor a repair takes no answer for no checkpoint."""
    url = f"memory://{secrets.token_hex(8)}/run"
    Checkpointer(ObjectStorage(url), settle_s=0.0).save(1, state_of(1))
    with suppress(Killed):
        checkpointer = Checkpointer(KilledAfterExchange(url), settle_s=0.0)
        checkpointer.save(1, state_of(2), overwrite=True)
    (left,) = [name for name in ObjectStorage(url).list("") if name.startswith(".saving-")]
    for give_up in (lambda storage: discard_save(storage, left), partial(repair, alive_s=0.0)):
        give_up(NotAnswering(url))
        assert ObjectStorage(url).is_dir(left)
    assert [each.fate for each in repair(ObjectStorage(url), alive_s=0.0)] == ["removed"]
    loaded = Checkpointer(ObjectStorage(url), settle_s=0.0).load({"v": Stored()})
    assert cast("dict[str, object]", loaded.values["v"])["version"] == 2


def test_a_save_in_progress_is_left_alone() -> None:
    """P14: by the store's own clock, and until it is silent for long."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    Checkpointer(storage, settle_s=0.0).save(1, state_of(1))
    directory = saving_dir(2, "abc")
    storage.make_dir(directory)
    assert [each.fate for each in repair(ObjectStorage(storage.url))] == ["alive"]
    assert storage.is_dir(directory)
    time.sleep(0.01)
    assert [each.fate for each in repair(ObjectStorage(storage.url), alive_s=0.0)] == ["removed"]

"""Whole saves and loads in a bucket: real ranks, a real server, a writer process of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
import torch

from holdfast import (
    Checkpointer,
    HoldfastError,
    KeepLast,
    Layout,
    ProcessGroups,
    Sharded,
    StorageError,
    Stored,
)
from holdfast.cli.main import main
from holdfast.format.names import list_steps, step_dir
from holdfast.format.verifier import verify_snapshot
from holdfast.writer.leftovers import repair
from tests import programs
from tests.crash.common import state_of, whole
from tests.harness import RankContext, run_ranks, wait_until

pytest.importorskip("obstore")

from holdfast.storage.objects import ObjectStorage
from holdfast.storage.objects import storage as object_storage
from tests.buckets.proxy import Fault, fault_proxy
from tests.buckets.server import ACCESS_KEY, SECRET_KEY, TOKEN, environment, new_bucket


@pytest.fixture
def url(s3: str) -> str:
    return f"s3://{new_bucket(s3)}/team/run"


def version_of(place: str | ObjectStorage, step: int) -> int:
    """Load a step and prove that it is one version, bitwise, and that nothing in it is damaged."""
    storage = ObjectStorage(place) if isinstance(place, str) else place
    loaded = Checkpointer(storage, settle_s=0.0).load({"t": Stored(), "v": Stored()}, step=step)
    values, tensors = loaded.values["v"], loaded.values["t"]
    assert isinstance(values, dict)
    assert isinstance(tensors, dict)
    for name, tensor in whole(values["version"]).items():
        assert torch.equal(tensors[name], tensor)
    assert verify_snapshot(storage, step_dir(step)) == []
    return cast("int", values["version"])


class AnswerLost(ObjectStorage):
    """The exchange of two names is made, and the process never learns it."""

    def exchange_dir(self, first: str, second: str) -> None:
        super().exchange_dir(first, second)
        raise StorageError("no answer within 120 s")


def test_a_replacement_of_which_the_answer_was_lost_is_not_undone() -> None:
    """What can be seen is durable. An exchange back might be with a version of another save."""
    url = f"memory://{secrets.token_hex(8)}/run"
    Checkpointer(ObjectStorage(url), settle_s=0.0).save(1, state_of(1))
    with Checkpointer(AnswerLost(url), settle_s=0.0) as checkpointer:
        checkpointer.save(1, state_of(2), overwrite=True)
    assert version_of(ObjectStorage(url), 1) == 2
    assert not [name for name in ObjectStorage(url).list("") if name.startswith(".saving")]


def versions(place: str | ObjectStorage) -> dict[int, int]:
    storage = ObjectStorage(place) if isinstance(place, str) else place
    return {step: version_of(storage, step) for step in list_steps(storage)}


def _two_ranks(context: RankContext, url: str, endpoint: str) -> list[dict[str, int]]:
    os.environ.update(environment(endpoint))
    object_storage._RESOLVED_S = 1e9  # a slow machine looks for the save's name again
    counts: list[dict[str, int]] = []
    requests: Counter[str] = Counter()

    def watch(kind: str, key: str, start: int, nbytes: int) -> None:
        if not key.startswith(".reading/"):  # heartbeats: as many as a slow machine needs
            is_data = kind == "get" and key.endswith(".safetensors") and "/data/0" in key
            is_name = kind == "get" and key.startswith(".saving-")
            is_record = kind == "put" and "/done/" in key
            name = "range" if is_data else "name" if is_name else "record" if is_record else kind
            requests[name] += 1

    storage = ObjectStorage(url, part_nbytes=5 << 20, observer=watch)
    big = torch.arange(11 << 17, dtype=torch.float64) + context.rank

    def state(version: int) -> dict[str, object]:
        held = state_of(version, index=context.rank, size=2)
        tensors = cast("dict[str, object]", held["t"])
        tensors["big"] = Sharded(big + version, (22 << 17,), dims={0: "dp"})
        return held

    def counted() -> None:
        counts.append(dict(requests))
        requests.clear()

    with (
        ProcessGroups.create(Layout(dp=2), timeout_s=30) as groups,
        Checkpointer(storage, groups=groups, settle_s=0.0) as checkpointer,
    ):
        checkpointer.save(1, state(1))
        requests.clear()
        checkpointer.save(2, state(2))
        counted()
        loaded = state(0)
        report = checkpointer.load(loaded)
        counted()
        assert report.step == 2
        target = cast("dict[str, Sharded]", loaded["t"])["big"]
        assert torch.equal(target.local, big + 2)
        with pytest.raises(HoldfastError, match="exists already"):
            checkpointer.save(2, state(3))
        checkpointer.save(1, state(4), overwrite=True)
    with (
        ProcessGroups.create(Layout(dp=2), timeout_s=30) as groups,
        Checkpointer(url, groups=groups, settle_s=0.0) as checkpointer,
    ):
        checkpointer.save_async(3, state(5)).result()
        writer = checkpointer.stats.writer_pid
        assert writer is not None
        if not context.rank:
            os.kill(writer, signal.SIGSTOP)
        pending = checkpointer.save_async(4, state(6))
        if not context.rank:
            while not _has_record(storage):
                time.sleep(0.02)
            os.kill(writer, signal.SIGCONT)
        counts.append(dict(pending.result().requests))
    return counts


def _has_record(storage: ObjectStorage) -> bool:
    """Whether the rank that does not commit has written its record of a save in progress."""
    names = [name for name in storage.list("") if name.startswith(".saving-")]
    return any("00001.msgpack" in storage.list(f"{name}/done") for name in names)


def test_two_ranks_save_load_and_replace(url: str, s3: str) -> None:
    counts = run_ranks(2, _two_ranks, url, s3, fresh=True).results
    state: dict[str, object] = {"t": Stored(), "v": Stored()}
    loaded = Checkpointer(url, settle_s=0.0).load(state, step=1)
    assert cast("dict[str, int]", loaded.values["v"])["version"] == 4
    assert list_steps(ObjectStorage(url)) == [1, 2, 3, 4]
    assert repair(ObjectStorage(url)) == []
    # 11 MiB in 3 parts of 5 MiB, which obstore sends, with two requests more; an upload here.
    (own, first_load, own_async), (save, load, _) = (map(Counter, each) for each in counts)
    assert own["upload"] == save["upload"] == 1
    parts = 3 + 2
    # The rank that does not commit looks for the save's name, at most twice, and makes it if the
    # other rank is late: three more for each of them, of which two prove once that this rank's
    # conditions count. Its record goes by message. See docs/object-stores.md for what each is.
    is_late = own["name"] > 0
    assert save["put"] == 3 * is_late
    assert sum(save.values()) - 1 + parts <= parts + 3 + 3 * is_late
    assert save["record"] == own["record"] == own["list"] == own["get"] == 0
    assert sum(own.values()) - 1 + parts <= parts + 4 + 3 * is_late
    # Asynchronously, that record is read as soon as it is there, and nothing is listed for it.
    assert own_async["list"] == 0
    assert sum(first_load.values()) - first_load["range"] <= 2
    # The name, which has the records; then ranges alone.
    assert load["get"] == 1
    assert load["range"] >= 3
    assert load["list"] == load["put"] == load["head"] == 0
    assert main(["verify", url, "--step", "1"]) == 0


def test_the_commands_take_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, state_of(step), metadata={"loss": step})
    commands = [
        ["ls", url], ["show", url], ["show", f"{url}/iter_0000002"], ["verify", url],
        ["tag", url, "2", "best"], ["tag", url], ["repair", url],
        ["prune", url, "--keep-last", "1", "--keep-tagged", "--yes"],
    ]  # fmt: skip
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err
    assert main(["diff", f"{url}/iter_0000002", f"{url}/iter_0000004"]) == 1
    output = capsys.readouterr().out
    assert f"{url}/iter_0000002: whole" in output or f"{url}/iter_0000004: whole" in output
    assert versions(url) == {2: 2, 4: 4}
    assert main(["ls", f"{url}/iter_0000002/none"]) == 2
    assert main(["ls", f"{url}/iter_0000002"]) == 2
    assert main(["show", f"{url}/iter_0000003"]) == 2
    assert "no committed step 3" in capsys.readouterr().err


def test_a_list_of_a_hundred_steps_takes_three_requests() -> None:
    url = "memory://hundred/run"
    writer = ObjectStorage(url)
    with Checkpointer(writer, settle_s=0.0) as checkpointer:
        for step in range(100):
            checkpointer.save(step, {"t": {"a": torch.zeros(2)}}, metadata={"loss": step})
    reader = ObjectStorage(url)
    found = reader.survey()
    reader.read("latest_checkpointed_iteration.txt")
    assert len(found.notes) == 100
    assert sum(reader.requests.values()) <= 3
    reader.requests.clear()
    assert list_steps(ObjectStorage(url)) == list(range(100))


def test_a_list_calls_no_committed_save_one_in_progress(
    url: str, s3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """P27: its name stays where deletions are denied."""

    def choose(method: str, path: str) -> Fault:
        return "denied" if method == "DELETE" or path.endswith("?delete") else ""

    with (
        fault_proxy(s3, choose) as (_, address),
        Checkpointer(ObjectStorage(url, endpoint=address), settle_s=0.0) as checkpointer,
    ):
        for version, num_left in ((1, 1), (2, 0)):  # a replacement frees the name of the save
            checkpointer.save(1, state_of(version), overwrite=version > 1)
            assert main(["ls", url]) == 0
            text = " ".join(capsys.readouterr().out.split())
            assert text.count("left of a save that was committed") == num_left
            assert "in progress" not in text
    assert versions(url) == {1: 2}


REQUESTS = {
    ("ls",): 3, ("show",): 5, ("show", "--step", "5"): 4, ("verify", "--step", "5"): 6 + 1,
    ("tag", "5", "best"): 9, ("tag",): 4 + 1, ("copy", "OUT", "--step", "5"): 4 + 2,
    ("prune", "--keep-last", "10", "--yes"): 9 + 10, ("repair",): 8 + 1,
}  # fmt: skip
"""Of commands, with ten steps of one small file each: what is added is for ranges, tags and steps,
and for unfinished uploads."""


def test_the_requests_of_commands(
    url: str, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stated in docs/object-stores.md."""
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        for step in range(10):
            checkpointer.save(step, {"t": {"a": torch.zeros(9)}})
    with fault_proxy(s3, lambda method, path: "") as (proxy, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        counts = {}
        for (verb, *rest), most in REQUESTS.items():
            proxy.requests.clear()
            words = [str(tmp_path / "out") if word == "OUT" else word for word in rest]
            assert main([verb, url, *words]) == 0
            counts[verb, *rest] = proxy.requests.total(), most
    assert [each for each in counts.items() if each[1][0] > each[1][1]] == []


def test_the_requests_of_one_rank() -> None:
    """Each beyond the parts and ranges keeps a promise, and is named in docs/object-stores.md."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    state = {"t": {"a": torch.zeros(9)}}
    # The first save in a new root, and that of a later process.
    for step, most in ((0, 4 + 11 + 7), (1, 4 + 11)):
        storage = ObjectStorage(storage.url)
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            checkpointer.save(step, state)
        assert sum(storage.requests.values()) <= 1 + most
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(2, state)
        for overwrite, most in ((False, 4), (True, 15)):
            storage.requests.clear()
            checkpointer.save(3, state, overwrite=overwrite)
            assert sum(storage.requests.values()) <= 1 + most
            assert storage.requests["head"] == 0
        # The name and the range; for the newest step a list of the root.
        for step, listed in ((None, Counter(list=1)), (3, Counter())):
            storage.requests.clear()
            checkpointer.load(state, step=step)
            assert storage.requests - listed <= Counter(get=2)
    # The first load of a process, too, which also looks for writers of an earlier run.
    reader = ObjectStorage(storage.url)
    with Checkpointer(reader) as checkpointer:
        assert checkpointer.load(state).step == 3
        assert reader.requests <= Counter(get=2, list=1)


def test_a_small_plan_of_an_earlier_run_is_read_once() -> None:
    """By the first save of a process, which proves all of it."""
    url, state = f"memory://{secrets.token_hex(8)}/run", {"t": {"a": torch.zeros(9)}}
    with Checkpointer(url, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state)
    asked: list[str] = []

    def note(kind: str, key: str, *rest: int) -> None:
        asked.extend([kind] if key.startswith(".plans/") else [])

    with Checkpointer(ObjectStorage(url, observer=note), settle_s=0.0) as checkpointer:
        checkpointer.save(2, state)
        assert checkpointer.stats.num_plans == 0
    assert asked == ["get"]


def test_what_is_not_part_of_a_checkpoint_is_named() -> None:
    """By one list, in a bucket as in a directory."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, {"t": {"a": torch.zeros(9)}})
    place = step_dir(1)
    assert verify_snapshot(storage, place) == []
    for name in ("more", "deep/in/it", "data/other"):
        storage.write_file(f"{place}/{name}", b"")
    damages = verify_snapshot(storage, place)
    assert sorted(each.file for each in damages) == ["data/other", "deep", "more"]


def test_a_name_without_a_checkpoint_is_passed_over() -> None:
    """The newest name is opened without a look at it: what is not a checkpoint is not loaded."""
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    state = {"t": {"a": torch.zeros(9)}}
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, state)
        storage.make_dir("iter_0000005")
        storage.write_file("iter_0000005/note", b"by hand")
        assert checkpointer.load(state).step == 1


def test_notes_of_a_save_that_a_name_cannot_hold_go_with_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.storage.objects.storage.MAX_HELD_NBYTES", 0)
    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run")
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        checkpointer.save(1, {"t": {"a": torch.zeros(9)}})
    assert {key.split("/")[3] for key in storage._bucket.list_all(".store/data")} == {
        "data", "index.safetensors", "manifest.json",
    }  # fmt: skip


def test_a_range_is_as_large_as_leaves_work_for_all_threads() -> None:
    """Small tensors are joined, large ones are cut; no range is larger than is stated."""
    ranges: list[int] = []

    def watch(kind: str, key: str, start: int, nbytes: int) -> None:
        if kind == "get" and "/data/0" in key:
            ranges.append(nbytes)

    storage = ObjectStorage(f"memory://{secrets.token_hex(8)}/run", observer=watch)
    small = {f"small{i}": torch.full((30_000 + i,), float(i)) for i in range(100)}  # 11 MiB
    for large_nbytes, bound in ((9 << 20, 4 << 20), (130 << 20, 16 << 20)):
        state = {"t": {**small, "large": torch.arange(large_nbytes >> 3)}}
        with Checkpointer(storage, settle_s=0.0) as checkpointer:
            checkpointer.save(1, state, overwrite=True)
            ranges.clear()
            into = {"t": {name: torch.zeros_like(each) for name, each in state["t"].items()}}
            checkpointer.load(into)
        assert all(torch.equal(into["t"][name], each) for name, each in state["t"].items())
        assert max(ranges) <= bound + bound // 4
        assert sum(ranges) == sum(each.nbytes for each in state["t"].values())
        # One for each file, and where a joined one ends before a large piece.
        assert len(ranges) <= sum(ranges) // bound + 3


def test_reports_and_show_state_the_requests(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = ObjectStorage(url, part_nbytes=5 << 20)
    state = {"t": {"a": torch.zeros(3 << 20)}}
    with Checkpointer(storage, settle_s=0.0) as checkpointer:
        before = Counter(storage.requests)
        report = checkpointer.save(1, state)
        assert Counter(report.requests) == storage.requests - before
        assert (report.requests["part"], report.requests["complete"]) == (3, 1)
        pending = checkpointer.save_async(2, state).result()
        assert pending.requests["part"] == 3
        before = Counter(storage.requests)
        loaded = checkpointer.load(state)
    assert Counter(loaded.requests) == storage.requests - before
    assert sum(loaded.job.requests.values()) <= sum(loaded.requests.values())
    assert main(["show", url, "--step", "2"]) == 0
    # Those of the writer process until it gives the checkpoint its name: three puts are left.
    assert f"{sum(pending.requests.values())} requests" not in (shown := capsys.readouterr().out)
    assert "requests (" in shown
    assert "part 3" in shown


def test_retention_removes_names_and_data(url: str) -> None:
    with Checkpointer(url, settle_s=0.0, retention=KeepLast(2)) as checkpointer:
        for step in range(5):
            checkpointer.save(step, state_of(step))
    assert versions(url) == {3: 3, 4: 4}
    storage = ObjectStorage(url)
    assert len(storage._bucket.list(".store/data").dirs) == 2


def save_and_be_killed(context: RankContext, url: str) -> None:
    del context
    checkpointer = Checkpointer(url, settle_s=0.0)
    state = {"t": {"a": torch.full((2_000_000,), 7.0)}}
    checkpointer.prepare(state)
    checkpointer.save_async(9, state)
    print(checkpointer.stats.writer_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_is_committed_after_its_trainer_was_killed(s3: str, url: str) -> None:
    run = run_ranks(
        1, save_and_be_killed, url, init=False, expect_failure=True, env=environment(s3)
    )
    (killed,) = run.errors
    assert killed is not None
    assert killed.signal == signal.SIGKILL, killed
    # No secret is in the command line of the writer, while it lives.
    with_arguments = Path(f"/proc/{run.outputs[0].strip()}/cmdline")
    if with_arguments.exists():
        words = with_arguments.read_bytes()
        assert SECRET_KEY.encode() not in words
    wait_until(lambda: list_steps(ObjectStorage(url)) == [9])
    loaded = Checkpointer(url, settle_s=0.0).load({"t": Stored()})
    assert torch.equal(
        cast("dict[str, torch.Tensor]", loaded.values["t"])["a"], torch.full((2_000_000,), 7.0)
    )


RACER = """
import sys, torch
from holdfast import Checkpointer, HoldfastError
from tests.crash.common import state_of
checkpointer = Checkpointer(sys.argv[1], settle_s=0.0)
print("ready", flush=True)
sys.stdin.readline()
try:
    checkpointer.save(5, state_of(int(sys.argv[2])))
    print("won")
except HoldfastError as error:
    print(error)
"""


@pytest.mark.slow
def test_of_two_jobs_that_save_one_step_exactly_one_wins(url: str) -> None:
    Checkpointer(url, settle_s=0.0).save(1, state_of(1))
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, url, str(version)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for version in (10, 20)
    ]  # fmt: skip
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    outputs = [job.communicate(timeout=240) for job in jobs]
    lines = [out.strip() for out, _ in outputs]
    assert sorted(line == "won" for line in lines) == [False, True], outputs
    (loser,) = [line for line in lines if line != "won"]
    assert "exists already" in loser
    assert versions(url)[5] == (10, 20)[lines.index("won")]


def test_no_credential_is_in_any_output(s3: str, url: str, tmp_path: Path) -> None:
    script = f"""
import logging, sys, torch, traceback
logging.basicConfig(level=logging.DEBUG)
from holdfast import Checkpointer, HoldfastError
from holdfast.cli.main import main
from holdfast.storage.objects import ObjectStorage
def show_variables(error):  # as tools that report errors do: those of each frame of ours
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    while shown is not None:
        print("variables", [each.locals for each in shown.stack if "/holdfast/" in each.filename])
        shown = shown.__cause__ or shown.__context__
url = {url!r}
storage = ObjectStorage(url)
with Checkpointer(storage, settle_s=0.0) as checkpointer:
    print(checkpointer.save(1, {{"t": {{"a": torch.zeros(9)}}}}), repr(storage))
    print(checkpointer.save_async(2, {{"t": {{"a": torch.zeros(9)}}}}).result())
    print(checkpointer.load({{"t": {{"a": torch.zeros(9)}}}}), checkpointer, storage._bucket)
for words in (
    ["ls", url], ["show", url, "--json"], ["verify", url], ["ls", "s3://no-bucket/x"],
    ["repair", url], ["tag", url, "1", "a"], ["prune", url, "--keep-last", "1", "--yes"],
    ["copy", url, "copied"], ["copy", "copied", url + "-2"], ["export", url + "/iter_0000002"],
):
    main(words)
for options in (
    {{"access_key_id": "AKIA-other", "secret_access_key": "{SECRET_KEY}"}},
    {{"endpoint": "http://127.0.0.1:9", "secret_access_key": "{SECRET_KEY}"}},
    {{"secret_access_key": "{SECRET_KEY}", "no_such_option": "{SECRET_KEY}"}},
    {{"secret_access_key": ["{SECRET_KEY}"]}},
):
    try:
        broken = ObjectStorage(url + "/none", retry_s=0.2, **options)
        Checkpointer(broken, settle_s=0.0).load({{}})
    except HoldfastError as error:
        traceback.print_exc()
        show_variables(error)
given = ObjectStorage(url, access_key_id="{ACCESS_KEY}", secret_access_key="{SECRET_KEY}")
print(vars(given), vars(given._bucket), given.address())
for key_id in ("{ACCESS_KEY}", "other"):
    broken = ObjectStorage(
        url, access_key_id=key_id, secret_access_key="", endpoint="http://127.0.0.1:9"
    )
    try:
        broken._bucket.unfinished("a")
    except Exception as error:
        show_variables(error)
"""
    (written,) = programs.launch(script, num_ranks=1, directory=tmp_path, env=environment(s3))
    assert "refuses the options" in written
    assert "cannot be reached" in written
    assert written.count("variables [") > 4
    storage = ObjectStorage(url)
    for key in storage._bucket.list_all(""):
        answer = storage._bucket.get(key)
        assert answer is not None
        written += bytes(answer[0]).decode(errors="replace")
    for secret in (SECRET_KEY, TOKEN, ACCESS_KEY):
        assert secret not in written

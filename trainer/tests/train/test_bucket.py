"""`holdfast train --save` and `--load` with a bucket, and what the commands then do there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.format.names import list_steps
from holdfast.storage import open_storage

pytest.importorskip("obstore")

from tests.buckets.server import ACCESS_KEY, SECRET_KEY, environment, new_bucket, s3_server
from trainer.tests import launches
from trainer.tests.launches import SMALL, TRAIN, run_on_ranks


@pytest.fixture
def endpoint() -> Iterator[str]:
    pytest.importorskip("moto")
    with s3_server() as address:
        yield address


def words_for(url: str, steps: int, *more: str) -> list[str]:
    words = [*SMALL, "--data", "text", "--steps", str(steps), "--save-interval", "2"]
    return [*words, "--save", url, "--load", url, *more]


@pytest.mark.slow
def test_a_run_saves_to_a_bucket_and_continues_from_it_under_another_layout(
    endpoint: str, unlaunched: Path
) -> None:
    url = f"s3://{new_bucket(endpoint)}/run"
    # Ranks of one data coordinate hold one random stream: a request must not draw from it.
    for steps, layout in ((2, ()), (4, ("--tp", "2"))):
        words = words_for(url, steps, *layout)
        # The server of ranks may be older than the credentials in this process's environment.
        run = run_on_ranks(2, words, directory=unlaunched, **environment(endpoint))
        assert run.codes == [0, 0], run.printed
        assert list_steps(open_storage(url)) == list(range(2, steps + 1, 2))
    assert f"loaded step 2 from {url}:" in run.printed


def descendants(pid: int) -> list[int]:
    """The processes below one, itself included, but for writers, which outlive a run on purpose."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            names = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
            found += [child for child, name in names.items() if b"holdfast.writer" not in name]
    return found


@pytest.mark.slow
def test_the_whole_life_of_a_run_in_a_bucket(
    endpoint: str, unlaunched: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, continued under another layout, looked at, tagged, pruned, copied and converted."""
    url = f"s3://{new_bucket(endpoint)}/team/run"
    words = words_for(url, 100_000, "--nproc", "2", "--async-save")
    with open("train.log", "w") as log:
        run = subprocess.Popen(
            [*TRAIN, *words], env=launches.environment(**environment(endpoint)), stdout=log,
            stderr=log,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while len(list_steps(open_storage(url))) < 3:
            assert run.poll() is None, Path("train.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for pid in descendants(run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait(30)
    # What a writer still had is committed, or removed; then the run is what it was.
    assert main(["repair", url]) == 0
    newest = max(list_steps(open_storage(url)))
    ended = run_on_ranks(
        2, words_for(url, newest + 4, "--tp", "2"), directory=unlaunched, **environment(endpoint)
    )
    assert ended.codes == [0, 0], ended.printed
    last = max(list_steps(open_storage(url)))
    assert last == newest + 4
    first = f"{url}/iter_{newest:07d}"

    def do(*line: str, code: int = 0, says: str = "") -> None:
        assert main(list(line)) == code, capfd.readouterr()
        captured = capfd.readouterr()
        printed = captured.out + captured.err
        assert says in printed, printed
        assert "s3:/b" not in printed
        assert not {ACCESS_KEY, SECRET_KEY} & {*printed.split()}

    do("ls", url, says="latest")
    do("show", url, says=f"{url}/iter_{last:07d}")
    do("verify", url, says="whole")
    do("diff", first, f"{url}/iter_{last:07d}", code=1, says="different")
    do("tag", url, str(newest), "best", says="best")
    do("prune", url, "--keep-last", "1", "--keep-tagged", "--yes", says="removed")
    assert list_steps(open_storage(url)) == [newest, last]
    do("repair", url, says="nothing is left behind")
    do("copy", url, "copied", "--step", str(newest), "--verify", says=f"{first} -> copied")
    do("copy", "copied", f"{url}-back", says=f"-> {url}-back")
    do("diff", first, f"{url}-back/iter_{newest:07d}", says="equal")
    do("convert", url, "weights", "--to", "safetensors", says="compared with the source")
    do("convert", "weights", f"{url}-again", "--to", "holdfast", says=f"{url}-again")
    do("export", url, "--tensor", "*weight*", "--to", "out.safetensors", says="written to")
    do("view", url, "--as", "dp=2", "--out", "page.html", says="page.html")
    page = Path("page.html").read_text()
    assert url in page
    assert SECRET_KEY not in page
    # The copy is a run of its own, from which one process goes on.
    ended = run_on_ranks(
        1, words_for(f"{url}-back", newest + 2), directory=unlaunched, **environment(endpoint)
    )
    assert ended.codes == [0], ended.printed
    assert SECRET_KEY not in Path("train.log").read_text() + ended.printed

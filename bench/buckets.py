"""Saves and loads in a bucket next to the bare client and DCP: `python -m bench.buckets`.

One process and one state. In turns within one run: obstore alone, which uploads one object of the
same bytes in the same parts and reads it back by ranges; a `Checkpointer`; and DCP through fsspec
(`FsspecWriter`, needs the package s3fs). Without `--url` the bucket is in a moto server, a process
of its own on the same cores.

Two ratios to the bare client: of seconds, which on a busy machine say little, and of CPU seconds of
this process, which are the client's and hold anywhere.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import obstore
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from bench.timing import Measured, interleave, median_of, timed_with_cpu, values_of
from holdfast import Checkpointer, KeepLast
from holdfast.format.summaries import requests_in_words
from holdfast.retention.removal import apply_retention, plan_retention
from holdfast.storage.objects import ObjectStorage

BARE, HOLDFAST, DCP = "obstore alone", "holdfast", "dcp over s3fs"
BARS = {"save": 1.15, "load": 1.25}
_PART_NBYTES = 16 << 20
_AT_ONCE = 8


@contextmanager
def moto_server() -> Iterator[str]:
    """Start a server with one bucket, in the environment; give the bucket's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "bench", "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        for left in reversed(range(300)):
            try:
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bench", method="PUT"))
                break
            except OSError:
                if not left:
                    raise
                time.sleep(0.1)
        yield "s3://bench"
    finally:
        server.terminate()
        server.wait(10)


class Bare:
    """The same bytes by the client alone."""

    def __init__(self, url: str, nbytes: int) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._store = obstore.store.from_url(
            f"s3://{bucket}", client_options={"allow_http": True, "timeout": "60s"}
        )
        self._key = f"{prefix}/bare" if prefix else "bare"
        self._data = np.random.default_rng(0).bytes(nbytes)

    def save(self) -> None:
        """Upload one object in parts."""
        obstore.put(
            self._store, self._key, self._data, use_multipart=True, chunk_size=_PART_NBYTES,
            max_concurrency=_AT_ONCE,
        )  # fmt: skip

    def load(self) -> None:
        """Read it by ranges, several at once, into memory."""
        memory = memoryview(bytearray(len(self._data)))

        def read(start: int) -> None:
            stop = min(start + step, len(memory))
            data = obstore.get_range(self._store, self._key, start=start, end=stop)
            memory[start:stop] = memoryview(data)

        step = max(min(len(memory) // _AT_ONCE, ObjectStorage.range_nbytes), 4 << 20)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(read, range(0, len(memory), step)))


class DcpOverFsspec:
    """DCP's storage for any file system of fsspec."""

    def __init__(self, url: str, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        self._url, self._state = f"{url}/dcp", state
        self._writer, self._reader = FsspecWriter, FsspecReader

    def save(self) -> None:
        """Save over the last one."""
        dcp.save(self._state, storage_writer=self._writer(self._url), no_dist=True)

    def load(self) -> None:
        """Load into the same tensors."""
        dcp.load(self._state, storage_reader=self._reader(self._url), no_dist=True)


def measure(url: str, megabytes: int, num_rounds: int, console: Console) -> int:
    """Measure all arms and print; 0 if the bars are met."""
    count = 8
    state = {"model": {f"w{i}": torch.randn((megabytes << 18) // count) for i in range(count)}}
    url = f"{url}/{secrets.token_hex(4)}"
    bare, rival = Bare(url, megabytes << 20), None
    if find_spec("s3fs") is not None:
        rival = DcpOverFsspec(url, state)
    else:
        console.print(f"left out: {DCP} (the package s3fs is not installed)")
    keeper = ObjectStorage(f"{url}/run")
    counts: dict[str, Mapping[str, int]] = {}
    storage = ObjectStorage(f"{url}/run", part_nbytes=_PART_NBYTES, uploads_at_once=_AT_ONCE)
    with Checkpointer(storage, settle_s=0.0) as checkpointer:

        def both(save: Callable[[int], object], load: Callable[[], object]) -> Any:
            def arm(number: int) -> Measured:
                measured: Measured = {}
                for name, action in (("save", lambda: save(number)), ("load", load)):
                    for quantity, value in timed_with_cpu(action).items():
                        measured[name if quantity == "seconds" else f"{name} {quantity}"] = value
                # Outside of the times: the others save over what they have saved before.
                apply_retention(keeper, plan_retention(keeper, KeepLast(1)))
                return measured

            return arm

        def save_and_count(number: int) -> None:
            counts["save"] = checkpointer.save(number, state).requests

        def load_and_count() -> None:
            counts["load"] = checkpointer.load(state).requests

        arms: dict[str, Any] = {
            BARE: both(lambda _: bare.save(), bare.load),
            HOLDFAST: both(save_and_count, load_and_count),
        }
        if rival is not None:
            arms[DCP] = both(lambda _: rival.save(), rival.load)
        series = interleave(arms, repeats=num_rounds, before_each=lambda: None)
    table = Table(
        "", "save, s", "x bare", "least x", "cpu, s", "x bare",
        "load, s", "x bare", "least x", "cpu, s", "x bare",
        title=f"{megabytes} MiB, one process, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}, {num_rounds} rounds",
    )  # fmt: skip
    is_met = True
    for name in arms:
        row = [name]
        for quantity in ("save", "load"):
            median = median_of(series, name, quantity)
            ratio = median / median_of(series, BARE, quantity)
            least = min(values_of(series, name, quantity)) / min(values_of(series, BARE, quantity))
            cpu = median_of(series, name, f"{quantity} cpu")
            of_bare = cpu / median_of(series, BARE, f"{quantity} cpu")
            row += [f"{median:.2f}", f"{ratio:.2f}", f"{least:.2f}", f"{cpu:.2f}", f"{of_bare:.2f}"]
            if name == HOLDFAST:
                is_met &= min(ratio, least) <= BARS[quantity]
            elif name == DCP:
                is_met &= median_of(series, HOLDFAST, quantity) <= median
        table.add_row(*row)
    console.print(table)
    for name, requests in counts.items():
        console.print(f"{HOLDFAST}, one {name}: {requests_in_words(requests)}")
    console.print(
        f"Bars: save {BARS['save']} x, load {BARS['load']} x of {BARE}, and ahead of {DCP}: "
        f"{'met' if is_met else 'missed'}"
    )
    return 0 if is_met else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.buckets", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--url", help="an own bucket, s3://…; by default a local test server")
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    console = Console(width=130)
    if options.url is not None:
        return measure(options.url.rstrip("/"), options.megabytes, options.rounds, console)
    with moto_server() as url:
        return measure(url, options.megabytes, options.rounds, console)


if __name__ == "__main__":
    raise SystemExit(main())

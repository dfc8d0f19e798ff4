"""What is read once and sent on, and what each host reads: by measured cost."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast import (
    Checkpointer,
    Layout,
    PosixStorage,
    ProcessGroups,
    Replicated,
    Sharded,
)
from holdfast.checkpoint.load import choose_exchange, read_executor
from holdfast.checkpoint.load.choose_exchange import Rates
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

MIB = 1 << 20
FAST, SLOW = 1e12, 1e6

RATES = st.floats(1e3, 1e12)


@st.composite
def hosts_of_ranks(draw: st.DrawFn) -> list[str]:
    """Two to eight ranks on one to four hosts, in any order."""
    return draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=8))


@settings(max_examples=300, deadline=None)
@given(
    hosts=hosts_of_ranks(),
    storage=RATES,
    network=RATES,
    open_s=st.floats(0, 1),
    num_files=st.integers(1, 9),
    is_cached=st.booleans(),
)
def test_the_cost_is_that_of_the_busiest_host(
    hosts: list[str],
    storage: float,
    network: float,
    open_s: float,
    num_files: int,
    is_cached: bool,
) -> None:
    """P7: against adding up every message between two ranks."""
    share, ranks = choose_exchange._WORTH_MEASURING, len(hosts)
    rates = Rates(storage=storage, network=network, open_s=open_s)
    counts = list(Counter(hosts).values())
    seconds = dict.fromkeys(hosts, 0.0)
    for receiver, host in enumerate(hosts):
        seconds[host] += share / storage
        seconds[host] += sum(share / network for reader in range(ranks) if reader != receiver)
    opens = math.ceil(num_files / ranks) * open_s
    sent_s = rates.exchange_s(share * ranks, counts, num_files=num_files)
    assert sent_s == pytest.approx(max(seconds.values()) + opens)
    reads = 1 if is_cached else max(counts)
    read_s = rates.read_s(share * ranks, counts, num_files=num_files, is_cached=is_cached)
    assert read_s == pytest.approx(reads * share * ranks / storage + num_files * open_s)
    assume(not math.isclose(sent_s, read_s, rel_tol=1e-9))
    chosen = choose_exchange.choose_exchange(
        [(np.arange(ranks), share * ranks, num_files)],
        hosts=hosts,
        is_cached=is_cached,
        measure=lambda: rates,
    )
    assert chosen == [sent_s < read_s]


def use(rates: Rates) -> None:
    """Let loads of this process find these rates, however little is shared."""
    choose_exchange._WORTH_MEASURING = 0
    read_executor.measure_rates = lambda *_: rates


def _with_rates(
    context: RankContext, root: str, hosts: str, rates: list[Rates]
) -> list[tuple[int, int]]:
    """(bytes read, bytes received) of the job, for each of the rates."""
    os.environ["HOLDFAST_HOST_ID"] = hosts[context.rank]
    results = []
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        for each in rates:
            use(each)
            local, whole = torch.zeros(32, 1024), torch.zeros(8, 1024)
            state = {"t": {"cut": Sharded(local, (64, 1024), dims={0: "tp"}), "whole": whole}}
            report = Checkpointer(root, groups=groups).load(state)
            assert torch.equal(local, full("cut", (64, 1024))[32 * groups.index("tp") :][:32])
            assert torch.equal(whole, full("whole", (8, 1024)))
            results.append((report.job.nbytes_read, report.job.nbytes_received))
    return results


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
def test_each_set_of_ranks_does_what_is_faster_for_it(tmp_path: Path, hosts: str) -> None:
    """P7: a fast network, a slow one, and one that is fast enough for two ranks, not for four."""
    state = {"cut": full("cut", (64, 1024)), "whole": full("whole", (8, 1024))}
    Checkpointer(tmp_path, groups=ProcessGroups.single(rank=40), block_nbytes=4096).save(
        1, {"t": state}
    )
    # Of two ranks on two hosts each reads half and receives half: 0.5 + 0.5/0.9 is more than 1,
    # 0.5 + 0.5/1.1 is less. Of four on two hosts a host reads half and receives three halves, of
    # four on four hosts each receives three quarters.
    rates = [
        Rates(storage=SLOW, network=FAST, open_s=0),
        Rates(storage=FAST, network=SLOW, open_s=0),
        Rates(storage=1e6, network=1.1e6, open_s=0),
        Rates(storage=1e6, network=0.9e6, open_s=0),
        Rates(storage=1e6, network=1.1e6, open_s=1e3),
    ]
    results = run_ranks(4, _with_rates, str(tmp_path), hosts, rates).results
    assert all(result == results[0] for result in results)
    cut, whole = (tensor.nbytes for tensor in state.values())
    # Who shares a half of `cut`: ranks 0 and 2, and ranks 1 and 3; in `abab` these share a host.
    two, four = ((cut, cut), (whole, 3 * whole))
    alone, all_alone = ((2 * cut, 0), (4 * whole, 0))
    if hosts == "abab":
        two = alone
    expected = [
        (two, four),
        (alone, all_alone),
        (two, four if hosts == "abcd" else all_alone),
        (alone, all_alone),
        # One file: a rank opens it whether it reads a share or all of it.
        (two, four if hosts == "abcd" else all_alone),
    ]
    assert results[0] == [tuple(map(sum, zip(*each, strict=True))) for each in expected]


def _measured(context: RankContext, root: str, nbytes: int) -> tuple[str, int, int]:
    """The rates, if measured; what the job read, and this rank."""
    os.environ["HOLDFAST_HOST_ID"] = "aabb"[context.rank]
    choose_exchange._WORTH_MEASURING = 16 * MIB
    measured: list[Rates] = []
    measure = read_executor.measure_rates

    def record(*args: Any) -> Rates:
        measured.append(measure(*args))
        return measured[-1]

    read_executor.measure_rates = record
    with ProcessGroups.create(Layout(dp=4)) as groups:
        target = torch.zeros(nbytes // 4)
        report = Checkpointer(root, groups=groups).load({"t": {"w": Replicated(target)}})
        assert torch.equal(target, (torch.arange(nbytes // 4) % 1021).float())
    for rates in measured:
        # Wide: this is whatever machine it is. A rate of nothing, or in MB, is far outside.
        assert 1e5 < rates.storage < 1e13
        assert 1e5 < rates.network < 1e13
        assert 0 < rates.open_s < 60
    return repr(measured), report.job.nbytes_read, report.nbytes_read


def test_what_much_depends_on_is_measured_and_agreed(tmp_path: Path) -> None:
    """P7: rates of storage and network."""
    nbytes = 18 * MIB
    whole = (torch.arange(nbytes // 4) % 1021).float()
    Checkpointer(tmp_path, groups=ProcessGroups.single(rank=40)).save(1, {"t": {"w": whole}})
    results = run_ranks(4, _measured, str(tmp_path), nbytes).results
    assert len({(measured, job_read) for measured, job_read, _ in results}) == 1
    measured, job_read, _ = results[0]
    assert measured.count("Rates") == 1
    # Once and sent, or once on each rank; and on each rank a few MiB for the measurement.
    probes = 4 * 4 * MIB
    assert job_read in (nbytes + probes, 4 * nbytes + probes)
    assert sum(read for _, _, read in results) == job_read


def test_little_is_exchanged_without_measuring(tmp_path: Path) -> None:
    nbytes = 4 * MIB
    whole = (torch.arange(nbytes // 4) % 1021).float()
    Checkpointer(tmp_path, groups=ProcessGroups.single(rank=40)).save(1, {"t": {"w": whole}})
    results = run_ranks(4, _measured, str(tmp_path), nbytes).results
    assert {(measured, job_read) for measured, job_read, _ in results} == {("[]", nbytes)}


def _with_copies(context: RankContext, root: str, hurt: str) -> tuple[int, list[str]]:
    """Two ranks save; a third one, which has nothing in a file of its own, loads with them."""
    os.environ["HOLDFAST_HOST_ID"] = "abb"[context.rank]
    choose_exchange._WORTH_MEASURING = 16 * MIB
    whole = (torch.arange(18 * MIB // 4) % 1021).float()
    with ProcessGroups.create(Layout(tp=3)) as groups:
        if context.rank < 2:
            with (
                ProcessGroups.create(Layout(tp=2, name="two")) as two,
                Checkpointer(root, groups=two, replicate_over=("tp",)) as checkpointer,
            ):
                checkpointer.save(1, {"t": {"w": Replicated(whole)}})
        groups.control.barrier(phase="saved")
        if context.rank == 0:
            (file,) = Path(root).glob("iter_*/data/00001.safetensors")
            file.unlink() if hurt == "gone" else os.truncate(file, 100)
        groups.control.barrier(phase="hurt")
        target = torch.zeros_like(whole)
        measured: list[object] = []
        measure = read_executor.measure_rates
        read_executor.measure_rates = lambda *args: measured.append(args) or measure(*args)
        report = Checkpointer(root, groups=groups).load({"t": {"w": Replicated(target)}})
        assert torch.equal(target, whole)
        assert len(measured) == 1
        return report.nbytes_read, list(report.replaced)


@pytest.mark.parametrize("hurt", [pytest.param("gone", marks=pytest.mark.slow), "short"])
def test_a_file_that_cannot_be_measured_is_no_error_yet(tmp_path: Path, hurt: str) -> None:
    """B8: the load itself reads another copy, and says so."""
    results = run_ranks(3, _with_copies, str(tmp_path), hurt).results
    assert any("00001.safetensors" in line for _, replaced in results for line in replaced)


class _Uncached(PosixStorage):
    """As a client of an object store: each process gets its own bytes."""

    is_cached_on_host = False


def _uncached(context: RankContext, root: str, rates: list[Rates]) -> list[tuple[int, int]]:
    results = []
    with ProcessGroups.create(Layout(dp=4)) as groups:
        for each in (None, *rates):
            if each is not None:
                use(each)
            target = torch.zeros(64, 1024)
            checkpointer = Checkpointer(_Uncached(root), groups=groups)
            report = checkpointer.load({"t": {"w": Replicated(target)}})
            assert torch.equal(target, full("w", (64, 1024)))
            results.append((report.job.nbytes_read, report.job.nbytes_received))
    return results


def test_without_a_page_cache_ranks_of_one_host_share(tmp_path: Path) -> None:
    whole = full("w", (64, 1024))
    Checkpointer(tmp_path, groups=ProcessGroups.single(rank=40)).save(1, {"t": {"w": whole}})
    rates = [
        Rates(storage=SLOW, network=FAST, open_s=0),
        Rates(storage=FAST, network=SLOW, open_s=0),
    ]
    results = run_ranks(4, _uncached, str(tmp_path), rates).results
    sent, alone = (whole.nbytes, 3 * whole.nbytes), (4 * whole.nbytes, 0)
    assert all(result == [sent, sent, alone] for result in results)

"""A link between two hosts that is cut in the middle of a save, a load or a step (R7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.main import main
from tests.crash.two_hosts import ACTIONS, DEADLINE_S, NUM_RANKS

NEVER_S = 60.0
"""A rank that has not ended by then waits without a limit, however busy the machine is."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "num_instants",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)],
)
def test_a_link_cut_at_any_instant_ends_on_all_ranks(tmp_path: Path, num_instants: int) -> None:
    """R7: each rank finishes or raises what it waited for; what is committed stays whole."""
    probe = ["unshare", "-rn", "sh", "-c", "nsenter --version && ip link add a0 type bridge"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("namespaces with a network are refused here")
    command = ["unshare", "-rn", sys.executable, "-m", "tests.crash.two_hosts"]
    done = subprocess.run(
        [*command, str(tmp_path), str(num_instants)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(ACTIONS)
    num_raised = 0
    for action, runs in found.items():
        assert len(runs) == 1 + num_instants
        assert [end["error"] for end in runs[0]] == [""] * NUM_RANKS, action
        for ends in runs[1:]:
            for end in ends:
                assert end["seconds"] < NEVER_S
                assert end["error"] == "" or "rank" in end["error"] or "store" in end["error"]
            num_raised += any(end["error"] for end in ends)
        assert main(["verify", str(tmp_path / action)]) == 0
    assert num_raised >= len(ACTIONS)  # the link was cut
    longest = max(end["seconds"] for runs in found.values() for ends in runs for end in ends)
    print(f"longest {longest:.1f} s with a limit of {DEADLINE_S} s")

"""Plays one seed again, with words: `python -m tests.rerun.spread SEED`."""

from __future__ import annotations

import sys
import tempfile

from tests.harness import run_ranks
from tests.rerun.spread.job import MAX_STARTS, play_all
from tests.rerun.spread.oracle import judge
from tests.rerun.spread.scenario import draw


def main(seed: int) -> int:
    """Play the scenario of a seed, print what happened, and return 1 if something is wrong."""
    scenario = draw(seed)
    print(scenario)
    with tempfile.TemporaryDirectory() as directory:
        size = scenario.layout.world_size
        results = run_ranks(size, play_all, directory, [seed], MAX_STARTS, {}).results
    records = [each[0] for each in results]
    for number, start in enumerate(records[0].starts):
        print(f"start {number} on {' '.join(start.devices)}, from step {start.first_step}")
        for message in start.messages:
            print(f"    {message}")
        print(f"    exit code {start.exit_code}, {start.verdict}, save {start.save}")
    finding = judge(scenario, records)
    for text in finding.told_by_one_fault:
        print(f"open, though one fault explains it: {text}")
    for text in finding.wrong:
        print(f"WRONG {text}")
    return 1 if finding.wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""Run single programs again: `python -m tests.campaign [--irregular] [--ranks N] SEED...`."""

from __future__ import annotations

import argparse
import sys
import tempfile

from tests.campaign.programs import draw, draw_irregular
from tests.campaign.runs import run_irregular_programs, run_programs
from tests.harness import run_ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("seeds", nargs="+", type=int, metavar="SEED")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--irregular", action="store_true", help="those of test_actions.py")
    options = parser.parse_args()
    for seed in options.seeds:
        print((draw_irregular if options.irregular else draw)(seed, num_ranks=options.ranks))
    run = run_irregular_programs if options.irregular else run_programs
    with tempfile.TemporaryDirectory() as root:
        outcome = run_ranks(options.ranks, run, root, options.seeds, timeout_s=600)
    wrong = sorted({each for found in outcome.results for each in found.wrong})
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

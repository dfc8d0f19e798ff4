"""Plays many scenarios, and has the oracle judge each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.harness import run_ranks
from tests.rerun.spread.job import MAX_STARTS, play_all
from tests.rerun.spread.oracle import Finding, judge
from tests.rerun.spread.scenario import draw


def play(
    root: Path, seeds: Iterable[int], *, max_starts: int = MAX_STARTS, **options: Any
) -> list[Finding]:
    """Play the scenarios of some seeds; all that have as many ranks in one set of processes.

    Args:
        root: of checkpoints and reports.
        seeds: of the scenarios.
        max_starts: of each job.
        options: of `draw`.
    """
    by_size: dict[int, list[int]] = defaultdict(list)
    for seed in seeds:
        by_size[draw(seed, **options).layout.world_size].append(seed)
    findings = []
    for size, mine in sorted(by_size.items()):
        mine.sort(key=lambda seed: draw(seed, **options).layout_name)
        where = str(root / f"{size} ranks")
        results = run_ranks(size, play_all, where, mine, max_starts, options, timeout_s=600).results
        for number, seed in enumerate(mine):
            records = [each[number] for each in results]
            findings.append(judge(draw(seed, **options), records))
    return findings


def summary(findings: Iterable[Finding]) -> str:
    """Return in words what some jobs have shown."""
    found = list(findings)
    verdicts = Counter(verdict for each in found for verdict in each.verdicts)
    return (
        f"{len(found)} jobs, {sum(each.num_starts for each in found)} starts, "
        f"{sum(each.num_opinions for each in found)} second opinions, "
        f"{sum(each.num_open for each in found)} left open "
        f"({sum(len(each.told_by_one_fault) for each in found)} of which one fault would explain); "
        f"verdicts: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    )


def complaints(findings: Iterable[Finding]) -> str:
    """Return what is wrong with some jobs; empty if nothing is."""
    lines = []
    for each in findings:
        if each.wrong:
            lines.append(str(each.scenario))
            lines += [f"    {text}" for text in each.wrong]
    return "\n".join(lines)

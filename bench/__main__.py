"""The command: `python -m bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import report
from bench.results import BenchResults

BASELINE = Path(__file__).with_name("baseline.json")
Case = Callable[[BenchResults, Path], None]


def cases(*, quick: bool, megabytes: int | None, repeats: int | None) -> Mapping[str, Case]:
    """Name -> what to run, in the order of the table. Imports torch in the ranks only.

    Args:
        quick: small sizes, few rounds.
        megabytes: of the dense states, instead of their own sizes.
        repeats: rounds after the warm-up.
    """
    from bench import replicated, restart, scale, sharded, states, step, tiny

    times = repeats or (1 if quick else 5)
    large, medium = (megabytes or size for size in ((8, 4) if quick else (1740, 600)))
    num_small, num_tiny, num_steady = (100, 100, 100) if quick else (20_000, 20_000, 10_000)

    def dense(results: BenchResults, scratch: Path, *, size: int, bars: sharded.Bars) -> None:
        spec, case = states.gpt_spec(size), f"dense {size / 1000:.3g} GB"
        sharded.measure(
            results, case, spec=spec, bars=bars, repeats=times, scratch=scratch,
            counts_memory=size == medium,
        )  # fmt: skip
        restart.measure(results, case, spec=spec, repeats=times, scratch=scratch)

    return {
        "large": partial(dense, size=large, bars=sharded.Bars(save=1.0, load=1.5)),
        "medium": partial(dense, size=medium, bars=sharded.Bars(save=1.25, load=1.5)),
        "small": lambda results, scratch: sharded.measure(
            results,
            f"{num_small:,} small tensors",
            spec=states.small_spec(num_small),
            bars=sharded.Bars(save=1.6, load=2.5, async_save=1.6),
            repeats=times,
            scratch=scratch,
        ),
        "replicated": lambda results, scratch: replicated.measure(
            results, megabytes=megabytes or (8 if quick else 1024), repeats=times, scratch=scratch
        ),
        "tiny": lambda results, scratch: tiny.measure(
            results, num_tensors=num_tiny, repeats=times, scratch=scratch
        ),
        "steady": lambda results, scratch: tiny.measure_steady(
            results, num_tensors=num_steady, repeats=times, scratch=scratch
        ),
        "training": lambda results, scratch: step.add_rows(
            results, cases=step.QUICK if quick else step.CASES
        ),
        "scale": lambda results, scratch: scale.measure(
            results,
            num_ranks=[4, 16] if quick else [16, 64, 256, 1024],
            tensors_a_rank=20 if quick else 1000,
            dcp_ranks=[4] if quick else [16, 64],
            repeats=times,
            scratch=scratch,
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, draw, write; 0 unless a case could not be run."""
    options = _parse(arguments)
    console = Console(width=None if os.isatty(1) else 190)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    chosen = cases(quick=options.quick, megabytes=options.megabytes, repeats=options.repeats)
    if options.only and options.only not in chosen:
        console.print(f"--only {options.only}: there are {', '.join(chosen)}")
        return 2
    results = BenchResults()
    for name, case in chosen.items():
        if options.only in (None, name):
            began = time.monotonic()
            _run(case, results, out.resolve().parent / "tmp")
            console.print(f"[dim]{name}: {time.monotonic() - began:.0f} s[/]")
    baseline_path = Path(options.baseline) if options.baseline else BASELINE
    comparable = bool(options.baseline) or (not options.quick and baseline_path.exists())
    baseline = report.read_baseline(baseline_path) if comparable else {}
    report.print_table(results, console, baseline=baseline)
    report.print_phases(results, console)
    document = {"machine": _machine(), "quick": options.quick, **results.to_dict()}
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    report.draw(results, out / "bench.png")
    console.print(f"written: {out / 'bench.json'}, {out / 'bench.png'}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: a check, no claim")
    parser.add_argument("--only", metavar="CASE", help="one of the cases; see docs/performance.md")
    parser.add_argument("--out", default="bench/out", help="where table, plot and JSON go")
    parser.add_argument("--baseline", metavar="FILE", help="bench.json of an earlier run")
    parser.add_argument("--megabytes", type=int, help="size of both dense states")
    parser.add_argument("--repeats", type=int, help="rounds after the warm-up")
    return parser.parse_args(arguments)


def _run(case: Case, results: BenchResults, parent: Path) -> None:
    """One case in a scratch directory next to the output, removed in any case."""
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        case(results, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not any(parent.iterdir()):
            parent.rmdir()


def _machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    import torch

    return {
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    raise SystemExit(main())

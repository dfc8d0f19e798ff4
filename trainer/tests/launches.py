"""`holdfast train` in processes of its own, and in ranks that have imported torch already.

Starting Python and torch takes seconds for each process. What a launcher does is tested with real
ones; what a run does before and after, in the tests' ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_trainer.command import main
from tests import programs
from tests.harness import RankContext, run_ranks

TRAIN = (sys.executable, "-m", "holdfast_trainer")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "holdfast_trainer"),
)
"""Two processes."""
SMALL = [
    *("--num-layers", "1", "--model-dim", "16", "--num-heads", "2"),
    *("--seq-len", "16", "--global-batch-size", "4", "--device", "cpu"),
]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
"""Variables that only a launcher sets."""


def environment(**extra: str) -> dict[str, str]:
    """This process's, as if no launcher had started it."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return own | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | extra


def run(
    words: Sequence[str],
    *,
    launcher: Sequence[str] = TRAIN,
    directory: Path | None = None,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Start a run and wait for its end; `extra` is added to its environment."""
    return subprocess.run(
        [*launcher, *words],
        cwd=directory,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended on the tests' ranks."""

    codes: list[int]
    """What the processes would have exited with."""
    printed: str
    """By the first rank."""


def run_on_ranks(num_ranks: int, words: Sequence[str], *, directory: Path, **extra: str) -> Ended:
    """The same run as of `run`, in as many of the tests' ranks, as if torchrun had started them."""
    arguments = (list(words), str(directory), extra, programs.free_port())
    outcome = run_ranks(num_ranks, _be_a_rank, *arguments, init=False, fresh=True)
    return Ended(codes=outcome.results, printed=outcome.outputs[0])


def _be_a_rank(
    context: RankContext, words: list[str], directory: str, extra: dict[str, str], port: int
) -> int:
    os.environ |= programs.launched(context, port) | extra
    os.chdir(directory)
    return main(words)

"""What the demonstration runs, and what it promises."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 4
NUM_STEPS = 60
SAVE_INTERVAL = 15
KILL_RANK = 2
KILL_STEP = 36
"""The worker is killed when this step is reported: six steps after a save, all of them lost."""
RESUME_STEP = KILL_STEP // SAVE_INTERVAL * SAVE_INTERVAL

LOSS_BOUND = 1e-5
"""How far losses under another layout may be from the reference's, in nats per token.

Another layout adds the same float32 numbers in another order, and training carries the rounding
on. 4e-8 was the most seen on two cores; the bound leaves room for other processors' kernels. A
wrong shard, moment or batch is off by more than 1e-3 within a few steps.
"""

TRAIN_FLAGS = (
    *("--steps", str(NUM_STEPS)),
    *("--save-interval", str(SAVE_INTERVAL)),
    *("--num-layers", "4"),
    *("--model-dim", "128"),
    *("--num-heads", "4"),
    *("--seq-len", "128"),
    *("--global-batch-size", "8"),
    *("--lr", "3e-3"),
    *("--min-lr", "3e-4"),
    *("--warmup-steps", "6"),
    *("--end-weight-decay", "0.2"),
    *("--bucket-nbytes", "500000"),
    *("--device", "cpu"),
    "--deterministic",
)
"""The run that every part of the demonstration trains: a small model on real text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One curve of the picture."""

    name: str
    """Directory under the runs."""
    title: str
    """For people."""
    tp: int = 1
    """Tensor ranks; the ranks that these and `pp` leave are data ranks."""
    pp: int = 1
    """Pipeline stages."""
    zero: int = 0
    """ZeRO stage of the optimizer; 0 for state whole on every data rank."""
    is_resumed: bool = False
    """True if it starts with the killed run's checkpoint, in its own directory."""
    num_steps: int = NUM_STEPS
    """Steps in all."""

    @property
    def layout(self) -> str:
        """`TP2 x DP2`, for people."""
        first = f"PP{self.pp}" if self.pp > 1 else f"TP{self.tp}"
        dp = NUM_RANKS // (self.tp * self.pp)
        sharding = f" ZeRO-{self.zero}" if self.zero else ""
        return f"{first}\N{MULTIPLICATION SIGN}DP{dp}{sharding}"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which this scenario's ranks differ."""
        return ("pp", "dp") if self.pp > 1 else ("tp", "dp")

    def flags(self, runs: Path) -> list[str]:
        """The command line of this scenario's trainer."""
        directory = runs / self.name
        return [
            *TRAIN_FLAGS,
            *("--tp", str(self.tp), "--pp", str(self.pp), "--zero", str(self.zero)),
            *("--save", str(directory / "checkpoints")),
            *("--jsonl", str(directory / "events.jsonl")),
        ]


REFERENCE = Scenario(name="reference", title="uninterrupted", tp=2)
KILLED = Scenario(name="killed", title="killed and resumed", tp=2)
RESHARDED = (
    Scenario(name="resumed-tp1-dp4", title="resumed", tp=1, is_resumed=True),
    Scenario(name="resumed-tp4-dp1", title="resumed", tp=4, is_resumed=True),
    Scenario(name="resumed-pp2-dp2", title="resumed", pp=2, zero=1, is_resumed=True),
)
SCENARIOS = (REFERENCE, KILLED, *RESHARDED)

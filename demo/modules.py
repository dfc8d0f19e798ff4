"""The end of the demonstration: a model of several modules, whose encoder moves between ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.plan import LOSS_BOUND, NUM_RANKS, Scenario
from demo.results import Check, Curve, check_bytes, compare_checkpoints, read_curve
from demo.supervisor import RunOutcome

MODULE_STEPS = 120
MODULE_SAVE_INTERVAL = 60
MODULE_KILL_RANK = 0
"""An encoder's rank."""
MODULE_KILL_STEP = 66
MODULE_RESUME_STEP = MODULE_KILL_STEP // MODULE_SAVE_INTERVAL * MODULE_SAVE_INTERVAL

MIN_ACCURACY = 0.8
"""Of held-out digits, the share that is named rightly after these few steps."""

MODULE_FLAGS = (
    "multimodal",
    *("--steps", str(MODULE_STEPS)),
    *("--save-interval", str(MODULE_SAVE_INTERVAL)),
    *("--device", "cpu"),
    *("--tp", "2"),
    "--deterministic",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleScenario(Scenario):
    """A run of several modules."""

    placement: tuple[str, ...] = ()
    """Flags that say where modules are."""
    shown: str = ""
    """The placement, for people."""
    num_steps: int = MODULE_STEPS

    @property
    def layout(self) -> str:
        """The placement, for people."""
        return self.shown

    def flags(self, runs: Path) -> list[str]:
        """The command line of this scenario's trainer."""
        directory = runs / self.name
        return [
            *MODULE_FLAGS,
            *self.placement,
            *("--save", str(directory / "checkpoints")),
            *("--jsonl", str(directory / "events.jsonl")),
        ]


BEFORE = "encoder DP2 on ranks 0, 1"
AFTER = "encoder TP2 on ranks 2, 3"
MODULE_REFERENCE = ModuleScenario(
    name="modules-reference", title="modules, uninterrupted", shown=BEFORE
)
MODULE_KILLED = ModuleScenario(name="modules-killed", title="modules, killed", shown=BEFORE)
MODULE_MOVED = ModuleScenario(
    name="modules-moved",
    title="modules, resumed",
    shown=AFTER,
    placement=("--vision-tp", "2", "--language-first"),
    is_resumed=True,
)
MODULE_SCENARIOS = (MODULE_REFERENCE, MODULE_KILLED, MODULE_MOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResults:
    """The results of the runs of several modules."""

    curves: dict[str, Curve]
    """By scenario."""
    accuracy: dict[str, float]
    """By scenario that ended: share of held-out digits that are named rightly."""
    num_images: int
    """Held-out images."""
    checks: list[Check]


def collect_modules(runs: Path, *, killed: RunOutcome) -> ModuleResults:
    """Read everything back from files and check it."""
    curves = {item.name: read_curve(item, runs=runs) for item in MODULE_SCENARIOS}
    finished = (MODULE_REFERENCE, MODULE_MOVED)
    evaluations = {item.name: read_evaluation(item, runs=runs) for item in finished}
    accuracy = {name: float(event["word_accuracy"]) for name, event in evaluations.items()}
    num_images = min(int(event["num_images"]) for event in evaluations.values())
    return ModuleResults(
        curves=curves,
        accuracy=accuracy,
        num_images=num_images,
        checks=[
            _check_kill(killed),
            _check_loaded(runs),
            _check_losses(curves),
            _check_accuracy(accuracy, num_images=num_images),
            check_bytes(runs, scenarios=MODULE_SCENARIOS, of="every checkpoint of modules"),
        ],
    )


def read_evaluation(scenario: ModuleScenario, *, runs: Path) -> dict[str, Any]:
    """The last evaluation of a run; with nothing right if there is none."""
    found: dict[str, Any] = {"word_accuracy": 0.0, "num_images": 0}
    for line in (runs / scenario.name / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "eval":
            found = event
    return found


def module_gaps(curves: dict[str, Curve]) -> list[float]:
    """By step after the resume, how far the moved run's loss is from the reference's."""
    ours, reference = curves[MODULE_MOVED.name], curves[MODULE_REFERENCE.name]
    return [
        abs(ours.losses.get(step, float("inf")) - loss)
        for step, loss in reference.losses.items()
        if step > MODULE_RESUME_STEP
    ]


def _check_kill(killed: RunOutcome) -> Check:
    """The kill was a kill."""
    code = killed.exit_codes[MODULE_KILL_RANK]
    last = killed.killed_at
    return Check(
        what=f"Modules: rank {MODULE_KILL_RANK}, of the encoder, died of SIGKILL",
        found=f"exit code {code}, last reported step {last}",
        is_kept=code == -9 and last is not None and last >= MODULE_KILL_STEP,
    )


def _check_loaded(runs: Path) -> Check:
    """The moved modules have the bits that were saved."""
    differing, num_tensors = compare_checkpoints(
        runs / MODULE_KILLED.name / "checkpoints",
        runs / MODULE_MOVED.name / "as-loaded",
        step=MODULE_RESUME_STEP,
    )
    return Check(
        what=f"Modules: weights and optimizers as loaded with the {AFTER} are bitwise equal",
        found=f"{num_tensors - len(differing)} of {num_tensors} tensors",
        is_kept=not differing and num_tensors > 0,
    )


def _check_losses(curves: dict[str, Curve]) -> Check:
    """The moved run continues as the one that was not interrupted."""
    gaps = module_gaps(curves)
    loads = curves[MODULE_MOVED.name].loads
    return Check(
        what=f"Modules: losses of steps {MODULE_RESUME_STEP + 1} to {MODULE_STEPS} are within "
        f"{LOSS_BOUND:g}",
        found=f"largest difference {max(gaps):.1e}",
        is_kept=max(gaps) <= LOSS_BOUND and loads[-1]["step"] == MODULE_RESUME_STEP,
    )


def _check_accuracy(accuracy: dict[str, float], *, num_images: int) -> Check:
    """Both runs learnt to see."""
    ours, reference = accuracy[MODULE_MOVED.name], accuracy[MODULE_REFERENCE.name]
    return Check(
        what=f"Modules: of {num_images} held-out digits {MIN_ACCURACY:.0%} are named rightly, with "
        f"and without the move",
        found=f"{ours:.1%} and {reference:.1%}",
        is_kept=min(ours, reference) >= MIN_ACCURACY and num_images > 0,
    )


def describe() -> str:
    """Return what is trained, for people."""
    return (
        f"a vision encoder, a projector and a language model with experts on {NUM_RANKS} "
        f"processes, each module with its own layout, learn to describe handwritten digits"
    )

"""The results of the runs: read back from their events and checkpoints, and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.plan import (
    KILL_RANK,
    KILL_STEP,
    KILLED,
    LOSS_BOUND,
    NUM_STEPS,
    REFERENCE,
    RESHARDED,
    RESUME_STEP,
    SCENARIOS,
    Scenario,
)
from demo.supervisor import RunOutcome
from holdfast.arrays.boxes import Box
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import list_steps, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.storage import PosixStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The losses of one scenario, and its saves and loads."""

    scenario: Scenario
    losses: dict[int, float]
    """By step; what was trained twice counts the second time."""
    norms: dict[int, float]
    """Gradient norms by step."""
    lost: dict[int, float]
    """Losses of the steps that a kill made useless, by step."""
    saves: list[dict[str, Any]]
    loads: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise, and whether it held."""

    what: str
    found: str
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What one rank wrote of a checkpoint: bytes by kind of state."""

    rank: int
    coordinate: dict[str, int]
    nbytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that the report shows."""

    curves: dict[str, Curve]
    checks: list[Check]
    writers: dict[str, list[Writer]]
    """By scenario, of its last checkpoint."""
    num_parameters: int
    seconds: float

    @property
    def is_good(self) -> bool:
        """Return True if every check held."""
        return all(check.is_kept for check in self.checks)


KINDS = ("weights", "first moments", "second moments", "other")


def collect(runs: Path, *, killed: RunOutcome, seconds: float) -> Results:
    """Read everything back from files and check it; nothing comes from the running processes."""
    curves = {item.name: read_curve(item, runs=runs) for item in SCENARIOS}
    checks = [check_kill(killed), *check_same_layout(curves, runs=runs)]
    for scenario in RESHARDED:
        checks += check_other_layout(scenario, curves=curves, runs=runs)
    checks.append(check_bytes(runs))
    return Results(
        curves=curves,
        checks=checks,
        writers={item.name: read_writers(runs / item.name / "checkpoints") for item in SCENARIOS},
        num_parameters=_num_parameters(runs / REFERENCE.name / "checkpoints"),
        seconds=seconds,
    )


def read_curve(scenario: Scenario, *, runs: Path) -> Curve:
    """A scenario's events in order; a load drops the steps after it."""
    curve = Curve(scenario=scenario, losses={}, norms={}, lost={}, saves=[], loads=[])
    for line in (runs / scenario.name / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            curve.losses[event["step"]] = event["loss"]
            curve.norms[event["step"]] = event["grad_norm"]
        elif event["event"] == "save":
            curve.saves.append(event)
        elif event["event"] == "load":
            curve.loads.append(event)
            for step in [step for step in curve.losses if step > event["step"]]:
                curve.lost[step] = curve.losses.pop(step)
                del curve.norms[step]
    return curve


def check_kill(killed: RunOutcome) -> Check:
    """The kill was a kill."""
    code = killed.exit_codes[KILL_RANK]
    return Check(
        what=f"Rank {KILL_RANK} died of SIGKILL, {KILL_STEP - RESUME_STEP} steps after a save",
        found=f"exit code {code}, last reported step {killed.killed_at}",
        is_kept=code == -9 and killed.killed_at is not None and killed.killed_at >= KILL_STEP,
    )


def check_same_layout(curves: dict[str, Curve], *, runs: Path) -> list[Check]:
    """Killed and resumed under the same layout: nothing at all may differ."""
    ours, reference = curves[KILLED.name], curves[REFERENCE.name]
    gap = largest_difference(ours, reference)
    norm_gap = max(
        abs(ours.norms[step] - reference.norms[step]) for step in _compared_steps(reference)
    )
    differing, num_tensors = compare_checkpoints(
        runs / REFERENCE.name / "checkpoints", runs / KILLED.name / "checkpoints", step=NUM_STEPS
    )
    return [
        Check(
            what=f"Same layout: losses of steps {RESUME_STEP + 1} to {NUM_STEPS} are equal",
            found=f"largest difference {gap:g}, of gradient norms {norm_gap:g}",
            is_kept=gap == 0 and norm_gap == 0 and ours.loads[-1]["step"] == RESUME_STEP,
        ),
        Check(
            what=f"Same layout: weights and optimizer after step {NUM_STEPS} are bitwise equal",
            found=f"{num_tensors - len(differing)} of {num_tensors} tensors",
            is_kept=not differing and num_tensors > 0,
        ),
    ]


def check_other_layout(scenario: Scenario, *, curves: dict[str, Curve], runs: Path) -> list[Check]:
    """Resumed under another layout: the same bits were loaded, and training continues alike."""
    ours, reference = curves[scenario.name], curves[REFERENCE.name]
    differing, num_tensors = compare_checkpoints(
        runs / KILLED.name / "checkpoints", runs / scenario.name / "as-loaded", step=RESUME_STEP
    )
    gap = largest_difference(ours, reference)
    return [
        Check(
            what=f"{scenario.layout}: weights and optimizer as loaded are bitwise equal",
            found=f"{num_tensors - len(differing)} of {num_tensors} tensors",
            is_kept=not differing and num_tensors > 0,
        ),
        Check(
            what=f"{scenario.layout}: losses of steps {RESUME_STEP + 1} to {NUM_STEPS} are within "
            f"{LOSS_BOUND:g}",
            found=f"largest difference {gap:.1e}",
            is_kept=gap <= LOSS_BOUND and ours.loads[-1]["step"] == RESUME_STEP,
        ),
    ]


def check_bytes(
    runs: Path, *, scenarios: Sequence[Scenario] = SCENARIOS, of: str = "every checkpoint"
) -> Check:
    """Every byte of every committed checkpoint is the byte that was saved."""
    num_snapshots, damages = 0, []
    for scenario in scenarios:
        storage = PosixStorage(runs / scenario.name / "checkpoints")
        for step in list_steps(storage):
            num_snapshots += 1
            damages += verify_snapshot(storage, step_dir(step))
    return Check(
        what=f"Every byte of {of} has the digest it was saved with",
        found=f"{num_snapshots} checkpoints, {len(damages)} damages",
        is_kept=num_snapshots > 0 and not damages,
    )


def largest_difference(curve: Curve, reference: Curve) -> float:
    """Largest difference of losses over the steps after the resume; infinite if one is missing."""
    return max(
        abs(curve.losses.get(step, float("inf")) - reference.losses[step])
        for step in _compared_steps(reference)
    )


def compare_checkpoints(left: Path, right: Path, *, step: int) -> tuple[list[str], int]:
    """Keys of tensors that differ in bytes, dtype, shape or presence, and how many there are."""
    with (
        Snapshot.open(PosixStorage(left), step_dir(step)) as a,
        Snapshot.open(PosixStorage(right), step_dir(step)) as b,
    ):
        ours = {t.key: (t.dtype, tuple(t.shape)) for t in a.manifest.tensors}
        theirs = {t.key: (t.dtype, tuple(t.shape)) for t in b.manifest.tensors}
        keys = sorted(key for key in ours.keys() | theirs.keys() if not _is_stream(key))
        differing = [
            key
            for key in keys
            if ours.get(key) != theirs.get(key) or read_whole(a, key) != read_whole(b, key)
        ]
    return differing, len(keys)


def _is_stream(key: str) -> bool:
    """Return True if it is a random stream, of the run or of a module; these follow the ranks."""
    return any(part.partition("[")[0] == "rng" for part in key.split(".")[:2])


def read_whole(snapshot: Snapshot, key: str) -> bytes:
    """One tensor's bytes, whatever files and chunks they are in."""
    info = snapshot.tensor(key)
    shape = tuple(info.shape)
    out = bytearray(int(np.prod(shape, dtype=np.int64)) * DTYPES[info.dtype].itemsize)
    if out:
        snapshot.read_box(key, Box((0,) * len(shape), shape), memoryview(out))
    return bytes(out)


def read_writers(directory: Path) -> list[Writer]:
    """Who wrote which bytes of the last checkpoint in a directory, from its index."""
    storage = PosixStorage(directory)
    with Snapshot.open(storage, step_dir(list_steps(storage)[-1])) as snapshot:
        writers = [
            Writer(
                rank=info.writer, coordinate=dict(info.coordinate), nbytes=dict.fromkeys(KINDS, 0)
            )
            for info in snapshot.manifest.files
        ]
        index = snapshot.index
        for tensor, file, nbytes in zip(index.tensor, index.file, index.nbytes, strict=True):
            kind = _kind(snapshot.manifest.tensors[int(tensor)].key)
            writers[int(file)].nbytes[kind] += int(nbytes)
    return sorted(writers, key=lambda writer: writer.rank)


def _kind(key: str) -> str:
    if key.startswith("model."):
        return "weights"
    if key.endswith(".exp_avg"):
        return "first moments"
    return "second moments" if key.endswith(".exp_avg_sq") else "other"


def _num_parameters(directory: Path) -> int:
    """Parameters of the model in the newest checkpoint."""
    storage = PosixStorage(directory)
    with Snapshot.open(storage, step_dir(list_steps(storage)[-1])) as snapshot:
        return sum(
            int(np.prod(info.shape, dtype=np.int64))
            for info in snapshot.manifest.tensors
            if info.key.startswith("model.")
        )


def _compared_steps(reference: Curve) -> list[int]:
    return [step for step in reference.losses if step > RESUME_STEP]

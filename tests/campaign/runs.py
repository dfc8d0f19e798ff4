"""Runs programs on real ranks, and compares every step with that of the twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import Checkpointer, Layout, ProcessGroups
from tests.campaign.programs import Program, draw
from tests.campaign.twin import TwinStep, run_twin
from tests.campaign.ways import Trained
from tests.harness import RankContext


def run_programs(context: RankContext, root: str, seeds: list[int]) -> list[str]:
    """Run programs one after the other; what is wrong on this rank, in words."""
    programs = [draw(seed, num_ranks=context.num_ranks) for seed in seeds]
    wrong: list[str] = []
    truths = _truths(context, programs)
    for number, (program, truth) in enumerate(zip(programs, truths, strict=True)):
        try:
            found = _run(context, Path(root) / str(number), program, truth)
        except BaseException as error:
            error.add_note(f"in {program}")
            raise
        wrong += [f"program {program.seed}: {each}" for each in found]
    return wrong


def _truths(context: RankContext, programs: list[Program]) -> list[list[TwinStep]]:
    """Run the twins, each on one of the ranks, and share them."""
    mine = {
        number: run_twin(program)
        for number, program in enumerate(programs)
        if number % context.num_ranks == context.rank
    }
    shared: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(shared, mine)
    joined = {number: truth for each in shared for number, truth in each.items()}
    return [joined[number] for number in range(len(programs))]


def _run(context: RankContext, root: Path, program: Program, truth: list[TwinStep]) -> list[str]:
    wrong: list[str] = []
    done = 0
    shared: list[dict[str, Tensor]] = [{}]
    """The parameters that the way before has saved."""
    for number, way in enumerate(program.ways):
        steps = range(done, done + way.num_steps)
        # Ranks that have no part in a layout agree on none, and so need a name for each.
        layout = Layout(**way.layout, name=f"program {program.seed} way {number}")
        values: dict[str, Tensor] = {}
        if context.rank in layout.ranks:
            with ProcessGroups.create(layout) as groups:
                # Of other values: what a load misses shows.
                trained = Trained(program, way, groups, values=number or None)
                if number:
                    Checkpointer(root / str(number - 1), groups=groups).load(trained.state())
                    before = shared[0]
                    after = trained.whole()
                    missed = [name for name in before if not torch.equal(before[name], after[name])]
                    if missed:
                        wrong.append(f"way {number} loaded these wrong: {missed}")
                wrong += _train(trained, steps, truth, f"way {number}")
                if number + 1 < len(program.ways):
                    Checkpointer(root / str(number), groups=groups).save(1, trained.state())
                    values = trained.whole()
                trained.close()
        done = steps.stop
        if number + 1 < len(program.ways):
            # The ranks of the next way wait here until this one has saved.
            shared = [values]
            dist.broadcast_object_list(shared, src=layout.ranks[0])
    return wrong


def _train(trained: Trained, steps: range, truth: list[TwinStep], where: str) -> list[str]:
    wrong = []
    index = trained.groups.index("dp_cp")
    for number in steps:
        expected, found = truth[number], trained.step(number)
        outcome = found.outcome
        at = f"{where} step {number}"
        if not _is_near(found.loss, expected.losses[index], 1e-5):
            wrong.append(f"{at}: loss {found.loss}, not {expected.losses[index]}")
        if not _is_near(outcome.norm, expected.norm, 1e-5):
            wrong.append(f"{at}: norm {outcome.norm}, not {expected.norm}")
        if outcome.num_zeros != expected.num_zeros:
            wrong.append(f"{at}: {outcome.num_zeros} zeros, not {expected.num_zeros}")
        if outcome.clipped != expected.clipped or outcome.skipped:
            wrong.append(f"{at}: {outcome}")
        gaps = {
            name: float((value - expected.parameters[name]).abs().max())
            for name, value in trained.whole().items()
            if value.numel()
        }
        off = {name: gap for name, gap in gaps.items() if not gap < 1e-6}
        if off:
            wrong.append(f"{at}: {len(off)} of {len(gaps)} parameters are off: {off}")
    return wrong[:3]  # the rest follows from the first


def _is_near(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * max(1.0, abs(expected))

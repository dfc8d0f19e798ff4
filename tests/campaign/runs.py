"""Runs programs on real ranks, and then has each one judged on one of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast import Checkpointer, Layout, ProcessGroups
from tests.campaign.actions import Action
from tests.campaign.programs import Program, draw, draw_irregular
from tests.campaign.twin import Twin
from tests.campaign.verdicts import Answer, Verdict, judge
from tests.campaign.ways import Interrupt, Trained
from tests.harness import RankContext


@dataclass(kw_only=True)
class Trace:
    """What happened on one rank."""

    answers: list[list[Answer]] = field(default_factory=list)
    """By way and action; of a way that the rank has no part in, none."""
    wrong: list[str] = field(default_factory=list)
    """What the rank found itself: values of a load that were not those saved."""


def run_programs(context: RankContext, root: str, seeds: list[int]) -> Verdict:
    """Run regular programs one after the other."""
    return _run_all(context, root, seeds, draw)


def run_irregular_programs(context: RankContext, root: str, seeds: list[int]) -> Verdict:
    """Run irregular programs one after the other."""
    return _run_all(context, root, seeds, draw_irregular)


def _run_all(
    context: RankContext, root: str, seeds: list[int], draw: Callable[..., Program]
) -> Verdict:
    programs = [draw(seed, num_ranks=context.num_ranks) for seed in seeds]
    traces = []
    with ExitStack() as stack:
        communicators = Communicators(stack)
        for number, program in enumerate(programs):
            print(f"program {program.seed}", flush=True)  # shown if a rank is late
            try:
                traces.append(_run(context, Path(root) / str(number), program, communicators))
            except BaseException as error:
                error.add_note(f"in {program}")
                raise
    shared = _shared(context, traces)
    verdict = Verdict()
    for number, program in enumerate(programs):
        if number % context.num_ranks == context.rank:
            _judge(program, [each[number] for each in shared], verdict)
    return verdict


def _shared(context: RankContext, traces: list[Trace]) -> list[list[Trace]]:
    """Return the traces of all ranks."""
    if context.num_ranks == 1:
        return [traces]
    file = io.BytesIO()
    torch.save(traces, file)  # pickle alone makes a file of each tensor
    files = [b""] * context.num_ranks
    dist.all_gather_object(files, file.getvalue())
    return [torch.load(io.BytesIO(each), weights_only=False) for each in files]


class Communicators:
    """The communicators of each layout, made once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, ProcessGroups | None] = {}

    def of(self, sizes: Mapping[str, Any], *, rank: int) -> ProcessGroups | None:
        """Return those of a layout; None on a rank that is not in it."""
        # Ranks that have no part in a layout agree on none, and so need a name for each.
        name = str(sorted(sizes.items()))
        if name not in self._made:
            layout = Layout(**sizes, name=name)
            self._made[name] = (
                self._stack.enter_context(
                    ProcessGroups.create(layout, data_timeout_s=60, timeout_s=60)
                )
                if rank in layout.ranks
                else None
            )
        return self._made[name]


def _run(context: RankContext, root: Path, program: Program, communicators: Communicators) -> Trace:
    trace = Trace()
    shared: list[dict[str, Tensor]] = [{}]
    """The parameters that the way before has saved."""
    for number, way in enumerate(program.ways):
        values: dict[str, Tensor] = {}
        groups = communicators.of(way.layout, rank=context.rank)
        answers: list[Answer] = []
        if groups is not None:
            # Of other values: what a load misses shows.
            trained = Trained(
                program,
                way,
                groups,
                root=root / f"in {number}",
                before=root / str(number - 1) if number else None,
                values=number or None,
            )
            if number:
                Checkpointer(root / str(number - 1), groups=groups).load(trained.state())
                before = shared[0]
                after = trained.whole()
                missed = [name for name in before if not torch.equal(before[name], after[name])]
                if missed:
                    trace.wrong.append(f"way {number} loaded these wrong: {missed}")
            answers = _do_all(trained, way.actions)
            if number + 1 < len(program.ways):
                Checkpointer(root / str(number), groups=groups).save(1, trained.state())
                values = trained.whole()
            trained.close()
        trace.answers.append(answers)
        if number + 1 < len(program.ways):
            # The ranks of the next way wait here until this one has saved.
            shared = [values]
            dist.broadcast_object_list(shared, src=Layout(**way.layout).ranks[0])
    return trace


def _do_all(trained: Trained, actions: tuple[Action, ...]) -> list[Answer]:
    """Do one action after the other, and recover from each error."""
    answers: list[Answer] = []
    for action in actions:
        try:
            answers.append(Answer(values=trained.do(action)))
        except (Exception, Interrupt) as error:
            answers.append(Answer.of(error))
            try:
                trained.recover(action, answers[-1].error)
            except Exception as another:
                answers[-1] = Answer.of(another, after=answers[-1].error)
    return answers


def _judge(program: Program, traces: list[Trace], verdict: Verdict) -> None:
    found = Verdict(ends=verdict.ends, wrong=[each for trace in traces for each in trace.wrong])
    twin = Twin(program)
    for number, way in enumerate(program.ways):
        if found.wrong:
            break  # the rest follows from the first
        ranks = Layout(**way.layout).ranks
        answers = [traces[rank].answers[number] for rank in ranks]
        judge(twin, way, answers, where=f"way {number} ({way.kind})", verdict=found)
        if number + 1 < len(program.ways):
            twin.end_way()
    verdict.wrong += [f"program {program.seed}: {each}" for each in found.wrong]

"""Every sequence of outcomes up to a bound, on one to three ranks, against the page's rules.

The oracle below knows nothing of the machine's code: it is docs/rerun.md once more, in Python.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.rerun import (
    DeviceIdentity,
    Limits,
    NotFinite,
    Replayed,
    RerunMachine,
    Verdict,
    read_report,
)
from tests.rerun.job import load_entry, save_entry
from tests.rerun.threads import ThreadGroups, run_threads

GOOD, BAD, OTHER, UNREACHED = "good", "bad", "other", "unreached"
VALUES = {GOOD: 1.0, BAD: math.nan, OTHER: math.inf}
IS_BAD = (BAD, OTHER)
AT, NUM_STEPS = 1, 3
LIMITS = Limits(max_restarts=2, max_reruns=2)
CODES = {"transient_error": 17, "persistent_error": 18, "correct_result": 19, "undecided": 20}
WEIGHT = ["transient_error", "correct_result", "undecided", "persistent_error"]

Run = tuple[str, ...]
"""The outcome of one run of the step, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The runs of the one step in which something happens; good ones follow them."""

    fatal: tuple[bool, ...]
    moves: tuple[bool, ...] = ()
    """Of each restart: whether it is on other devices than the first start."""
    runs: tuple[Run, ...] = ()


@dataclass(slots=True, kw_only=True)
class Ending:
    """How the starts of a job ended, up to the first that does not ask for another."""

    codes: list[int | None] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    """Of the report: those that stand for a step."""
    num_runs: int = 0
    """Of the step."""
    num_restarts: int = 0


def verdict_of(before: str, trials: Sequence[tuple[bool, str]]) -> str | None:
    """The verdict on a value of one device, from all restarts; None if it is open."""
    is_other, last = trials[-1]
    good_on = {where for where, value in trials if value == GOOD}
    bad_on = [False, *(where for where, value in trials if value in IS_BAD)]
    if last == UNREACHED:
        return None
    if good_on:
        return "transient_error" if good_on.intersection(bad_on) else "persistent_error"
    if (True, before) in trials:
        return "correct_result"
    return "undecided" if is_other else None


def expected(script: Script) -> Ending:
    """What docs/rerun.md says of a script."""
    end = Ending()
    runs = itertools.chain(script.runs, itertools.repeat((GOOD,) * len(script.fatal)))
    moves = iter(script.moves)

    def take() -> Run:
        end.num_runs += 1
        return next(runs)

    def conclude(verdicts: dict[int, str]) -> int | None:
        """The exit code of the heaviest fatal verdict; the heaviest of all is in the report."""
        end.verdicts.append(max(verdicts.values(), key=WEIGHT.index))
        fatal = [verdict for rank, verdict in verdicts.items() if script.fatal[rank]]
        return CODES[max(fatal, key=WEIGHT.index)] if fatal else None

    suspects: dict[int, str] = {}
    confirmed: set[int] = set()
    trials: dict[int, list[tuple[bool, str]]] = {}
    """Of each suspect, whether a restart was on another device than its first run, and outcome."""
    # Of this start, and of the one in which the suspects were bad twice.
    has_moved = bad_when_moved = False

    def new_ones(run: Run) -> dict[int, str]:
        known = suspects.keys() | confirmed
        return {r: value for r, value in enumerate(run) if value in IS_BAD and r not in known}

    def in_place() -> int | None:
        nonlocal suspects, bad_when_moved
        for number in itertools.count(1):
            run = take()
            again = {rank: value for rank, value in suspects.items() if run[rank] in IS_BAD}
            if again:
                suspects, bad_when_moved = again, has_moved
                trials.clear()
                return 16
            new = new_ones(run)
            kinds = {GOOD: "transient_error", UNREACHED: "undecided"}
            code = conclude({rank: kinds[run[rank]] for rank in suspects})
            if not new or code == 17:
                return code
            if code is None and number < LIMITS.max_reruns:
                suspects = new
                continue
            end.verdicts.append("undecided")
            return code or (20 if any(script.fatal[rank] for rank in new) else None)
        raise AssertionError

    def restarted(number: int) -> int | None:
        nonlocal suspects, has_moved
        run, has_moved = take(), next(moves, True)
        is_other = has_moved != bad_when_moved
        end.num_restarts += 1
        verdicts: dict[int, str | None] = {}
        for rank, before in suspects.items():
            trials.setdefault(rank, []).append((is_other, run[rank]))
            verdicts[rank] = verdict_of(before, trials[rank])
        if None in verdicts.values() and number < LIMITS.max_restarts:
            return 16
        code = conclude({rank: verdict or "undecided" for rank, verdict in verdicts.items()})
        new = new_ones(run)
        if not new:
            return code
        if code is not None:
            end.verdicts += ["undecided"] if code == 20 else []
            return code
        confirmed.update(rank for rank in suspects if run[rank] != GOOD)
        suspects = new
        return in_place()

    suspects = new_ones(take())
    end.codes.append(in_place() if suspects else None)
    number = 1
    while end.codes[-1] == 16:
        end.codes.append(restarted(number))
        # A fault of its own, found by the rerun: the next start is the first from its checkpoint.
        number = 1 if end.codes[-1] == 16 and confirmed else number + 1
    return end


def play(script: Script, directory: Path) -> Ending:
    """What a machine makes of a script, on as many threads as ranks."""
    end = Ending()
    size = len(script.fatal)
    entries: list[Any] = [None] * size
    first, restarts = 0, iter(script.moves)
    device = "first"
    while True:
        begin, on, held, done = first, device, list(entries), end.num_runs

        def start(
            groups: ThreadGroups,
            begin: int = begin,
            on: str = on,
            held: Sequence[Any] = held,
            done: int = done,
        ) -> tuple[int | None, Any, int, int]:
            return _start(groups, script, directory, begin, on, held[groups.rank], done)

        rows = run_threads(size, start)
        assert len({row[0] for row in rows}) == 1
        assert len({row[2:] for row in rows}) == 1
        code, _, first, end.num_runs = rows[0]
        end.codes.append(code)
        if code != 16:
            break
        entries = [row[1] for row in rows]
        device = "other" if next(restarts) else "first"
        end.num_restarts += 1
    events = read_report(directory) if (directory / "report.jsonl").exists() else []
    end.verdicts = [each["verdict"] for each in events if each["event"] == "verdict"]
    return end


def _start(
    groups: ThreadGroups,
    script: Script,
    directory: Path,
    first: int,
    device: str,
    entry: torch.Tensor | None,
    num_runs: int,
) -> tuple[int | None, Any, int, int]:
    """One start on one rank: exit code, what it leaves, at which step, runs of the step so far."""
    machine = RerunMachine(
        groups,  # type: ignore[arg-type]
        directory=directory,
        replayed=Replayed(rng=False),
        device=DeviceIdentity(host="host", uuid=f"{device}-{groups.rank}"),
        limits=LIMITS,
        note=lambda text: None,
    )
    if entry is not None:
        load_entry(machine, entry)
    source: Iterator[torch.Tensor] = (torch.tensor(float(i)) for i in itertools.count(first))
    batches = machine.replayable(source, is_rewound=True)
    for step in range(first, NUM_STEPS):
        for _ in machine.attempts(step, batches):
            assert next(batches).item() == step  # neither skipped nor repeated
            outcome = GOOD
            if step == AT:
                outcome = (
                    script.runs[num_runs][groups.rank] if num_runs < len(script.runs) else GOOD
                )
                num_runs += 1
            if outcome != UNREACHED:
                machine.validate(
                    "loss", VALUES[outcome], NotFinite(), fatal=script.fatal[groups.rank]
                )
        code = machine.decision.exit_code
        if code is not None:
            return int(code), save_entry(machine), step, num_runs
    return None, None, NUM_STEPS, num_runs


def is_first_of_its_kind(script: Script) -> bool:
    """Of scripts that differ only by which of two equal ranks is which: one is.

    Ranks but the coordinator are equal if their values are fatal alike. A script that is not the
    first of its kind does not become it by further runs.
    """
    columns = [tuple(run[rank] for run in script.runs) for rank in range(len(script.fatal))]
    return all(
        columns[one] <= columns[other]
        for one, other in itertools.pairwise(range(1, len(columns)))
        if script.fatal[one] == script.fatal[other]
    )


@pytest.mark.parametrize(
    ("size", "outcomes", "depth"),
    [
        (1, (GOOD, BAD, OTHER, UNREACHED), 3),
        pytest.param(1, (GOOD, BAD, OTHER, UNREACHED), 5, marks=pytest.mark.slow),
        (2, (GOOD, BAD), 2),
        pytest.param(3, (GOOD, BAD), 2, marks=pytest.mark.slow),
        pytest.param(2, (GOOD, BAD), 4, marks=pytest.mark.nightly),
        pytest.param(2, (GOOD, BAD, UNREACHED), 3, marks=pytest.mark.nightly),
        pytest.param(3, (GOOD, BAD), 3, marks=pytest.mark.nightly),
    ],
)
def test_every_sequence_of_outcomes_ends_as_the_page_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    outcomes: tuple[str, ...],
    depth: int,
) -> None:
    """A script is only made longer while the job would have used another run or restart."""
    monkeypatch.setattr("os.fsync", lambda fd: None)  # tens of thousands of lines
    alphabet = list(itertools.product(outcomes, repeat=size))
    fatals = itertools.product((True, False), repeat=size)
    # Of three ranks: none, the last, the last two, all; the first is the coordinator.
    waiting = [Script(fatal=each) for each in fatals if size < 3 or sorted(each) == [*each]]
    num_jobs = 0
    while waiting:
        script = waiting.pop()
        wanted = expected(script)
        if wanted.num_restarts > len(script.moves):
            waiting += [replace(script, moves=(*script.moves, move)) for move in (True, False)]
            continue
        num_jobs += 1
        assert play(script, tmp_path / str(num_jobs)) == wanted, script
        if wanted.num_runs > len(script.runs) < depth:
            longer = (replace(script, runs=(*script.runs, run)) for run in alphabet)
            waiting += filter(is_first_of_its_kind, longer)
    assert num_jobs > 40
    assert {*CODES, "spoiled_state"} == {verdict.value for verdict in Verdict}

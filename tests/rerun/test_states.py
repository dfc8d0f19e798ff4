"""The transition table and the verdicts, against the documents and against brute force."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.rerun.attribution import ValueRun
from holdfast.rerun.judging import (
    Recheck,
    heaviest,
    judge_rerun_from_checkpoint,
    judge_rerun_in_place,
    judge_second_opinion,
)
from holdfast.rerun.states import (
    EXIT_CODES,
    TRANSITIONS,
    Event,
    ExitCode,
    Limits,
    Outcome,
    Policy,
    State,
    Verdict,
    next_state,
)

PAGE = Path(__file__).parents[2] / "docs" / "rerun.md"
LIMITS = Limits(max_restarts=2, max_reruns=2)


def test_the_table_of_the_page_is_the_table_of_the_code() -> None:
    """D2: a reader of docs/rerun.md sees every transition there is, and no other."""
    section = PAGE.read_text().split("## States")[1].split("## ")[0]
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| ([A-Z_]+) \|$", section, re.MULTILINE)
    listed = {(State[a], Event[e]): State[b] for a, e, b in rows}
    assert listed == TRANSITIONS
    assert len(rows) == len(TRANSITIONS)


def test_every_other_transition_is_an_error() -> None:
    """A machine that is driven in another order says so."""
    for state, event in itertools.product(State, Event):
        if (state, event) in TRANSITIONS:
            assert next_state(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(ConfigError, match=state.name):
                next_state(state, event)


def test_every_state_is_reached_and_left() -> None:
    """But for the one after which only another process can go on."""
    reached = {after for _, after in TRANSITIONS.items()} | {State.NOT_RUNNING_YET}
    assert reached == set(State)
    left = {state for state, _ in TRANSITIONS}
    assert set(State) - left == {State.RERUNNING_AGAIN_FROM_CHECKPOINT}


def test_codes_are_distinct_and_each_verdict_has_one() -> None:
    """A scheduler can tell the ends of a run apart."""
    assert len(set(ExitCode)) == 6
    assert ExitCode.RESUME_TO_DISAMBIGUATE == 16
    assert set(EXIT_CODES) == set(Verdict)
    assert len(set(EXIT_CODES.values())) == len(Verdict)


POLICY = Policy()


def recheck(outcome: Outcome, *, fatal: bool, is_same: bool) -> Recheck:
    """A value that one device feeds, after a run on the same device or on another one."""
    now = "a" if is_same else "b"
    trials = (
        ValueRun(devices={"here": "a"}, outcome=Outcome.REPRODUCED),
        ValueRun(devices={"here": now}, outcome=outcome),
    )
    return Recheck(outcome=outcome, fatal=fatal, trials=trials)


RECHECKS = [
    recheck(outcome, fatal=fatal, is_same=is_same)
    for outcome in Outcome
    for fatal in (False, True)
    for is_same in (False, True)
]


@pytest.mark.parametrize("num_values", [1, 2])
def test_judgements_in_place(num_values: int) -> None:
    """All outcomes of up to two rejected values, with and without new ones, at both limits."""
    news = [(), (False,), (True,), (False, True)]
    for rechecks in itertools.product(RECHECKS, repeat=num_values):
        for new, num_reruns in itertools.product(news, (1, 2)):
            made = judge_rerun_in_place(
                rechecks,
                new_is_fatal=new,
                num_reruns=num_reruns,
                limits=LIMITS,
                policy=POLICY,
            )
            is_bad = [each.outcome in (Outcome.REPRODUCED, Outcome.CHANGED) for each in rechecks]
            if any(is_bad):
                assert made.event is Event.BAD_AGAIN
                assert made.exit_code == 16
                assert [verdict is None for verdict in made.verdicts] == is_bad
                continue
            good = {Outcome.GOOD: Verdict.TRANSIENT_ERROR, Outcome.UNREACHED: Verdict.UNDECIDED}
            assert list(made.verdicts) == [good[each.outcome] for each in rechecks]
            fatal = [v for each, v in zip(rechecks, made.verdicts, strict=True) if each.fatal]
            if fatal:
                # A fatal value ends the run, whatever else there is.
                assert made.event is Event.JUDGED
                is_undecided = Verdict.UNDECIDED in fatal
                assert made.exit_code == (20 if is_undecided else 17)
            elif new and num_reruns < LIMITS.max_reruns:
                assert (made.event, made.exit_code) == (Event.REJECTED, None)
            else:
                assert made.event is Event.JUDGED
                assert made.exit_code == (20 if any(new) else None)


@pytest.mark.parametrize("num_values", [1, 2])
def test_judgements_after_a_restart(num_values: int) -> None:
    """The same for a new process, on the same devices or others."""

    def expected(each: Recheck) -> Verdict | None:
        if each.outcome is Outcome.UNREACHED:
            return None
        if each.trials[0].devices == each.trials[1].devices:
            return Verdict.TRANSIENT_ERROR if each.outcome is Outcome.GOOD else None
        return {
            Outcome.GOOD: Verdict.PERSISTENT_ERROR,
            Outcome.REPRODUCED: Verdict.CORRECT_RESULT,
            Outcome.CHANGED: Verdict.UNDECIDED,
        }[each.outcome]

    for rechecks in itertools.product(RECHECKS, repeat=num_values):
        for new, num_restarts in itertools.product([(), (True,)], (1, 2, 3)):
            made = judge_rerun_from_checkpoint(
                rechecks,
                new_is_fatal=new,
                num_restarts=num_restarts,
                limits=LIMITS,
                policy=POLICY,
            )
            verdicts = [expected(each) for each in rechecks]
            if Verdict.PERSISTENT_ERROR in verdicts:
                # Whatever else device `a` feeds, and was bad on it, is explained by that.
                verdicts = [
                    Verdict.PERSISTENT_ERROR if verdict is None and _is_explained(each) else verdict
                    for each, verdict in zip(rechecks, verdicts, strict=True)
                ]
            elif Verdict.CORRECT_RESULT in verdicts:
                verdicts = [
                    Verdict.CORRECT_RESULT
                    if verdict is None and each.outcome is not Outcome.UNREACHED
                    else verdict
                    for each, verdict in zip(rechecks, verdicts, strict=True)
                ]
            if None in verdicts and num_restarts < LIMITS.max_restarts:
                assert made.event is Event.NOTHING_LEARNED
                assert made.exit_code == 16
                continue
            final = [verdict or Verdict.UNDECIDED for verdict in verdicts]
            assert list(made.verdicts) == final
            fatal = [v for each, v in zip(rechecks, final, strict=True) if each.fatal]
            worst = heaviest(fatal)
            assert made.exit_code == (None if worst is None else EXIT_CODES[worst])
            is_run_again = bool(new) and not fatal
            assert made.event is (Event.REJECTED if is_run_again else Event.JUDGED)


def _is_explained(each: Recheck) -> bool:
    return each.outcome.is_bad and each.trials[0].devices == each.trials[1].devices


@pytest.mark.parametrize("num_values", [1, 2])
def test_judgements_of_another_replica(num_values: int) -> None:
    """D23: a verdict only if all values have one; the broken device ends the run in any case."""
    lenient = Policy(on_persistent="continue", on_correct="continue")
    others = [each for each in RECHECKS if each.trials[0].devices != each.trials[1].devices]
    for rechecks in itertools.product(others, repeat=num_values):
        made = judge_second_opinion(rechecks, policy=POLICY)
        is_open = [each.outcome in (Outcome.UNREACHED, Outcome.CHANGED) for each in rechecks]
        if any(is_open):
            assert made.exit_code == 16
            assert made.event is Event.BAD_AGAIN
            continue
        fatal = {v for each, v in zip(rechecks, made.verdicts, strict=True) if each.fatal}
        codes = {EXIT_CODES[verdict] for verdict in fatal if verdict is not None}
        assert made.exit_code == (18 if 18 in codes else 19 if codes else None)
        assert (made.event is Event.BAD_AGAIN) == bool(codes)
        made = judge_second_opinion(rechecks, policy=lenient)
        assert made.exit_code == (18 if 18 in codes else None)


def test_a_policy_lets_a_run_continue_by_verdict() -> None:
    """The verdict is the same; only the exit code goes."""
    for outcome, is_same, name in (
        (Outcome.GOOD, True, "on_transient"),
        (Outcome.GOOD, False, "on_persistent"),
        (Outcome.REPRODUCED, False, "on_correct"),
        (Outcome.CHANGED, False, "on_undecided"),
    ):
        rechecks = [recheck(outcome, fatal=True, is_same=is_same)]
        for other in ("on_transient", "on_persistent", "on_correct", "on_undecided"):
            made = judge_rerun_from_checkpoint(
                rechecks,
                new_is_fatal=(),
                num_restarts=1,
                limits=LIMITS,
                policy=Policy(**{other: "continue"}),
            )
            (verdict,) = made.verdicts
            assert verdict is not None
            assert made.exit_code == (None if other == name else EXIT_CODES[verdict])
    with pytest.raises(ConfigError, match="on_correct"):
        Policy(on_correct="ignore")


def test_the_heaviest_verdict_stands_for_several() -> None:
    """A persistent error is never hidden by another verdict."""
    assert heaviest([]) is None
    for others in itertools.permutations(Verdict):
        assert heaviest(others) is Verdict.PERSISTENT_ERROR
    assert heaviest([Verdict.TRANSIENT_ERROR, Verdict.CORRECT_RESULT]) is Verdict.CORRECT_RESULT
    assert heaviest([Verdict.UNDECIDED, Verdict.CORRECT_RESULT]) is Verdict.UNDECIDED


@pytest.mark.parametrize("limits", [{"max_restarts": 0}, {"max_reruns": 0}, {"max_restarts": True}])
def test_limits_are_counted_from_one(limits: dict[str, int]) -> None:
    """A machine that never gives up, or never tries, is refused."""
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)

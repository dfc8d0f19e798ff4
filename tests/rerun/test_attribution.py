"""Whom trials blame, against all worlds that could have made them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from holdfast.rerun.attribution import ValueRun, attribute
from holdfast.rerun.states import Outcome, Verdict

DEVICES = "ABCD"
ROLES = ("pp=0", "pp=1")
PAIRS = tuple(itertools.product(ROLES, DEVICES))
FIRST = ValueRun(devices=dict(zip(ROLES, "AB", strict=True)), outcome=Outcome.REPRODUCED)
World = tuple[bool, frozenset[tuple[str, str]]]
"""Whether the data is bad, and which devices are broken in which roles."""
WORLDS: list[World] = [
    (is_bad, frozenset(broken))
    for is_bad in (False, True)
    for number in range(len(PAIRS) + 1)
    for broken in itertools.combinations(PAIRS, number)
]


def is_bad_in(world: World, trial: ValueRun) -> bool:
    """What a run on these devices shows in a world without transient errors."""
    is_data_bad, broken = world
    return is_data_bad or not broken.isdisjoint(trial.devices.items())


def histories(num_trials: int) -> Iterator[tuple[ValueRun, ...]]:
    """Every sequence of runs on two of four devices, after the first one on A and B."""
    runs = [
        ValueRun(devices=dict(zip(ROLES, devices, strict=True)), outcome=outcome)
        for devices in itertools.permutations(DEVICES, 2)
        for outcome in (Outcome.GOOD, Outcome.REPRODUCED)
    ]
    for each in itertools.product(runs, repeat=num_trials):
        yield (FIRST, *each)


def worlds_of(trials: Sequence[ValueRun], among: Sequence[World]) -> list[World]:
    """The worlds in which all runs come out as they did."""
    return [
        world
        for world in among
        if all(is_bad_in(world, each) == each.outcome.is_bad for each in trials)
    ]


def test_no_device_is_blamed_or_cleared_that_a_world_contradicts() -> None:
    """D19: every verdict holds in every world with these runs, and nothing is open without need.

    Several devices may be broken, each in some of its roles.
    """
    seen: dict[Verdict | None, int] = {}
    for number in (1, 2):
        for trials in histories(number):
            (made,) = attribute([trials])
            seen[made.verdict] = seen.get(made.verdict, 0) + 1
            worlds = worlds_of(trials, WORLDS)
            broken = [frozenset(device for _, device in pairs) for _, pairs in worlds]
            always = frozenset.intersection(*broken) if broken else frozenset()
            has_good = any(each.outcome is Outcome.GOOD for each in trials)
            is_apart = any(
                not {*one.devices.values()} & {*other.devices.values()}
                for one, other in itertools.combinations(trials, 2)
            )
            if made.verdict is Verdict.PERSISTENT_ERROR:
                assert worlds, trials
                assert made.convicted <= always, trials
            elif made.verdict is Verdict.TRANSIENT_ERROR:
                assert not worlds, trials
            elif made.verdict is Verdict.CORRECT_RESULT:
                assert not has_good, trials
                assert is_apart, trials
            else:
                # A world is left in which the data is bad, or several with other devices broken.
                assert made.verdict is None
                assert not always, trials
                assert has_good or not is_apart, trials
                assert worlds or not any(
                    one.devices == other.devices and one.outcome is not other.outcome
                    for one, other in itertools.combinations(trials, 2)
                )
    assert set(seen) == {
        None,
        Verdict.TRANSIENT_ERROR,
        Verdict.CORRECT_RESULT,
        Verdict.PERSISTENT_ERROR,
    }


def trial(devices: str, outcome: Outcome) -> ValueRun:
    """A run of a value that as many ranks feed as devices are named."""
    return ValueRun(devices={f"rank {i}": each for i, each in enumerate(devices)}, outcome=outcome)


def test_the_cases_that_people_meet() -> None:
    """D19: hosts that come back in another order clear nobody; a swap of one decides."""
    bad, good, other = Outcome.REPRODUCED, Outcome.GOOD, Outcome.CHANGED
    cases: list[tuple[list[ValueRun], Verdict | None, str]] = [
        ([trial("AB", bad), trial("BA", bad)], None, ""),
        ([trial("AB", bad), trial("BA", good)], None, ""),
        ([trial("AB", bad), trial("CD", good)], None, ""),
        ([trial("AB", bad), trial("CD", bad)], Verdict.CORRECT_RESULT, ""),
        ([trial("AB", bad), trial("CD", other)], Verdict.UNDECIDED, ""),
        ([trial("AB", bad), trial("CB", good)], Verdict.PERSISTENT_ERROR, "A"),
        ([trial("AB", bad), trial("AC", good)], Verdict.PERSISTENT_ERROR, "B"),
        ([trial("AB", bad), trial("CB", bad)], None, ""),
        ([trial("AB", bad), trial("BA", bad), trial("CB", good)], Verdict.PERSISTENT_ERROR, "A"),
        ([trial("AB", bad), trial("CD", good), trial("AD", good)], Verdict.PERSISTENT_ERROR, "B"),
        ([trial("AB", bad), trial("AB", good)], Verdict.TRANSIENT_ERROR, ""),
        ([trial("A", bad), trial("B", good)], Verdict.PERSISTENT_ERROR, "A"),
        ([trial("AA", bad), trial("BB", good)], Verdict.PERSISTENT_ERROR, "A"),
    ]
    for trials, verdict, blamed in cases:
        (made,) = attribute([trials])
        assert (made.verdict, "".join(sorted(made.convicted))) == (verdict, blamed), trials


def trial_in(devices: str, outcome: Outcome) -> ValueRun:
    """A run of a value that both stages feed."""
    return ValueRun(devices=dict(zip(ROLES, devices, strict=True)), outcome=outcome)


def test_a_stage_that_validates_its_own_work_explains_the_others() -> None:
    """D19: the earliest rejection names the device; what follows from it is not open."""
    bad, good = Outcome.REPRODUCED, Outcome.GOOD
    own = [
        ValueRun(devices={"pp=0": "A"}, outcome=bad),
        ValueRun(devices={"pp=0": "C"}, outcome=good),
    ]
    loss = [
        ValueRun(devices={"pp=0": "A", "pp=1": "B"}, outcome=bad),
        ValueRun(devices={"pp=0": "C", "pp=1": "D"}, outcome=good),
    ]
    assert [each.verdict for each in attribute([loss])] == [None]
    made = attribute([own, loss])
    assert [each.verdict for each in made] == [Verdict.PERSISTENT_ERROR] * 2
    assert made[0].convicted == {"A"}
    # Bad data explains what it feeds; not a value that was good elsewhere on that data.
    both = [FIRST, trial_in("CD", Outcome.REPRODUCED)]
    everyone = {"all=0": "A", "all=1": "B", **FIRST.devices}
    reduced = [ValueRun(devices=everyone, outcome=bad), ValueRun(devices=everyone, outcome=bad)]
    verdicts = [each.verdict for each in attribute([both, reduced])]
    assert verdicts == [Verdict.CORRECT_RESULT] * 2
    moved = ValueRun(devices=everyone | {"all=0": "E", "pp=0": "F"}, outcome=good)
    later = [reduced[0], ValueRun(devices=everyone | {"all=1": "G"}, outcome=good), moved]
    assert attribute([both, later])[1].verdict is None
    # What the convicted device does not feed stays open.
    elsewhere = [
        ValueRun(devices={"pp=0": "E", "pp=1": "B"}, outcome=bad),
        ValueRun(devices={"pp=0": "C", "pp=1": "D"}, outcome=good),
    ]
    assert [each.verdict for each in attribute([own, elsewhere])][1] is None

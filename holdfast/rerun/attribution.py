"""Whom to blame: what the runs of a step prove about devices and data.

A *trial* is one run of a rejected value: which device was in which role (the coordinate of a rank
that feeds it), and how the value came out. Nothing else is known of a device. So:

- A good trial clears the data, and each device in the role that it had. In another role a device
  computes something else, and a broken one may get that right.
- What a good trial has not cleared of a bad one are its suspects. Some device among them was wrong.
  If there is one, it is convicted.
- Data is proved bad by the same value on two sets of devices that have none in common.

Everything else stays open. Several devices may be broken at once: nothing here supposes that one
cause explains all bad trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import combinations

import msgspec

from holdfast.rerun.states import Outcome, Verdict


class ValueRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a value.

    Args:
        devices: by role, the key of the device, see `DeviceIdentity.key`.
        outcome: of the value; `REPRODUCED` for the run that was bad first.
    """

    devices: dict[str, str]
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What trials prove.

    Args:
        verdict: None if it is open.
        convicted: devices that are proved broken.
        suspects: devices that it lies between while it is open.
        is_data_cleared: True once a trial was good.
    """

    verdict: Verdict | None
    convicted: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    is_data_cleared: bool = False


def attribute(values: Sequence[Sequence[ValueRun]]) -> list[Attribution]:
    """Return what the trials of each value prove, the last trial being that of this run.

    A value may be left open by its own trials, and yet be explained by another value of the step: a
    device that one convicts, or data that one proves bad, makes all values bad that it feeds.
    """
    alone = [_of_one(trials) for trials in values]
    convicted = frozenset(device for each in alone for device in each.convicted)
    bad_data = [
        trials[0].devices.keys()
        for each, trials in zip(alone, values, strict=True)
        if each.verdict is Verdict.CORRECT_RESULT
    ]
    return [
        _explained(each, trials, convicted, bad_data)
        for each, trials in zip(alone, values, strict=True)
    ]


def _of_one(trials: Sequence[ValueRun]) -> Attribution:
    good = [each for each in trials if each.outcome is Outcome.GOOD]
    bad = [each for each in trials if each.outcome.is_bad]
    if trials[-1].outcome is Outcome.UNREACHED:
        return Attribution(verdict=None, suspects=_suspects(bad), is_data_cleared=bool(good))
    if not good:
        return _without_good(bad)
    left = _left(bad, good)
    if not all(left):
        # A bad run of devices that are all cleared in their roles: it came and went, so that no
        # other run can be explained either.
        arrangements = [each.devices for each in good]
        has_gone = any(each.devices in arrangements for each in bad)
        return Attribution(
            verdict=Verdict.TRANSIENT_ERROR if has_gone else None,
            suspects=frozenset() if has_gone else _suspects(bad),
            is_data_cleared=True,
        )
    convicted = frozenset(device for each in left if len(each) == 1 for device in each)
    return Attribution(
        verdict=Verdict.PERSISTENT_ERROR if convicted else None,
        convicted=convicted,
        suspects=frozenset() if convicted else frozenset().union(*left),
        is_data_cleared=True,
    )


def _without_good(bad: Sequence[ValueRun]) -> Attribution:
    """Return what trials prove that were all bad: at most that it is the data."""
    same = [each for each in bad if each.outcome is Outcome.REPRODUCED]
    if any(_is_disjoint(one, other) for one, other in combinations(same, 2)):
        return Attribution(verdict=Verdict.CORRECT_RESULT)
    if bad[-1].outcome is Outcome.CHANGED and _is_disjoint(bad[0], bad[-1]):
        return Attribution(verdict=Verdict.UNDECIDED, suspects=_suspects(bad[:1]))
    return Attribution(verdict=None, suspects=_suspects(bad))


def _explained(
    alone: Attribution,
    trials: Sequence[ValueRun],
    convicted: frozenset[str],
    bad_data: Sequence[AbstractSet[str]],
) -> Attribution:
    """Return the verdict of a value that another value of the step explains.

    Args:
        alone: what its own trials prove.
        trials: these.
        convicted: devices that other values convict.
        bad_data: the roles that feed each value whose data is proved bad.
    """
    if alone.verdict is not None or trials[-1].outcome is Outcome.UNREACHED:
        return alone
    good = [each for each in trials if each.outcome is Outcome.GOOD]
    left = _left([each for each in trials if each.outcome.is_bad], good)
    if all(each & convicted for each in left):
        return Attribution(verdict=Verdict.PERSISTENT_ERROR, is_data_cleared=bool(good))
    roles = trials[0].devices.keys()
    if not good and any(each <= roles for each in bad_data):
        return Attribution(verdict=Verdict.CORRECT_RESULT)
    return alone


def _left(bad: Sequence[ValueRun], good: Sequence[ValueRun]) -> list[frozenset[str]]:
    """Return of each bad trial the devices that no good one has cleared."""
    cleared = {pair for each in good for pair in each.devices.items()}
    return [
        frozenset(device for role, device in each.devices.items() if (role, device) not in cleared)
        for each in bad
    ]


def _suspects(bad: Sequence[ValueRun]) -> frozenset[str]:
    """Return the devices to name while nothing is proved: those of all bad trials, if any.

    That is whom to look at first, as one cause is likelier than two; it is not a verdict.
    """
    sets = [frozenset(each.devices.values()) for each in bad]
    common = frozenset.intersection(*sets)
    return common or sets[0]


def _is_disjoint(one: ValueRun, other: ValueRun) -> bool:
    return not set(one.devices.values()) & set(other.devices.values())

"""What a machine may say of a scenario, from where each run was and what it truly computed.

The oracle knows nothing of the machine's code. It is given the devices of every rank, the values
that each has validated, whether they were bad, and the truth: which device is broken, if any. From
the same trials that a machine has it works out by brute force which explanations are left:

- the data is bad: then every trial of a value is bad, on whatever devices;
- a device is broken in some of its roles: then a trial is bad if the device is in one of these.

Several devices may be broken at once, as far as a machine knows. So whoever is blamed has to be
broken in *every* explanation, and whoever can be told so has to be blamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from holdfast import Layout
from tests.rerun.spread.job import Record, Run, Start
from tests.rerun.spread.scenario import NUM_MICROBATCHES, Scenario, role_of

CODES = {
    "transient_error": 17,
    "persistent_error": 18,
    "correct_result": 19,
    "undecided": 20,
    "spoiled_state": 21,
}
MAX_RESTARTS = 3
_TRUE = {
    "transient": "transient_error",
    "persistent": "persistent_error",
    "persistent in its role": "persistent_error",
    "data": "correct_result",
    "state": "spoiled_state",
}

Key = tuple[Any, ...]
"""A value of a step: the role of the rank that validates it, its name and its occurrence."""
Devices = dict[tuple[Any, ...], str]
"""The device in each role that feeds a value."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a value."""

    devices: Devices
    is_bad: bool


@dataclass(kw_only=True)
class Finding:
    """What is wrong with a job, in words, and what it has shown."""

    scenario: Scenario
    wrong: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    num_starts: int = 0
    num_opinions: int = 0
    num_open: int = 0
    told_by_one_fault: list[str] = field(default_factory=list)
    """Starts left open that a machine could judge if it knew that only one thing is broken."""


def judge(scenario: Scenario, records: Sequence[Record]) -> Finding:
    """Return what is wrong with a job, of which every rank has a record."""
    return _Judge(scenario, records).finding


class _Judge:
    def __init__(self, scenario: Scenario, records: Sequence[Record]) -> None:
        self.scenario = scenario
        self.layout = scenario.layout
        self.finding = Finding(scenario=scenario, num_starts=len(records[0].starts))
        self.broken = f"d{scenario.rank}" if scenario.kind.startswith("persistent") else None
        for record in records:
            self.finding.wrong += record.wrong
        self.trials: dict[Key, list[Trial]] | None = None
        """Of the fault that waits for a verdict; None if there is none to follow."""
        self.num_restarts = 0
        self.was_given_up = False
        """True once this fault was undecided."""
        starts = list(zip(*(each.starts for each in records), strict=True))
        for number, start in enumerate(starts):
            self._number = number
            self._check_batches(start)
            self._check_truth(start)
            self._check_verdicts(start[0])
            self._follow(start)
        self._check_end(starts)

    def _blame(self, text: str) -> None:
        self.finding.wrong.append(f"start {self._number}: {text}")

    # What the ranks did

    def _check_batches(self, start: Sequence[Start]) -> None:
        """No batch is skipped or used twice."""
        for rank, mine in enumerate(start):
            replica = self.layout.coordinate(rank)["dp"]
            last = {run.step: run for run in mine.runs}
            steps = sorted(mine.applied + mine.skipped)
            if steps != list(range(mine.first_step, mine.first_step + len(steps))):
                self._blame(f"rank {rank} made steps {mine.applied}, skipped {mine.skipped}")
            for run in mine.runs:
                first = run.step * NUM_MICROBATCHES
                if run.indices != list(range(first, first + NUM_MICROBATCHES)):
                    self._blame(f"rank {rank}, step {run.step}: batches {run.indices}")
            for step in mine.applied:
                if last[step].replica != replica:
                    self._blame(f"rank {rank} made step {step} with batches of another rank")

    def _check_truth(self, start: Sequence[Start]) -> None:
        """The fault is seen wherever it is, and nothing else is: else the test tests nothing."""
        scenario = self.scenario
        if scenario.kind == "state":
            return
        for runs in zip(*(each.runs for each in start), strict=True):
            is_data = scenario.kind == "data" and runs[0].step == scenario.step
            is_hit = is_data or sum(run.num_strikes for run in runs) > 0
            is_seen = any(value[2] for run in runs for value in run.values)
            if is_hit != is_seen:
                self._blame(f"step {runs[0].step}: hit {is_hit}, but seen {is_seen}")

    # What the machine said

    def _check_verdicts(self, start: Start) -> None:
        """Nobody is blamed or cleared wrongly."""
        said = [event for event in start.events if event["event"] == "verdict"]
        self.finding.verdicts += [event["verdict"] for event in said]
        for event in said:
            blamed = [each["device"] for each in event["convicted"]]
            if any(each != self.broken for each in blamed):
                self._blame(f"blames {blamed}, though {self.broken} is broken")
            if event["verdict"] == "persistent_error" and not blamed:
                self._blame("a persistent error of nothing")
            between = [each["device"] for each in event["suspects"]]
            is_open = event["verdict"] == "undecided" and event["values"]
            if is_open and self.broken and self.broken not in between:
                self._blame(f"undecided between {between}, but {self.broken} is broken")
        words: set[str | None] = {event["verdict"] for event in said} | {start.verdict}
        for event in start.events:
            words |= {each.get("verdict") for each in event.get("values", ())}
        for word in words - {None, "undecided", _TRUE[self.scenario.kind]}:
            self._blame(f"says {word}")
        if start.skipped and (
            self.scenario.kind != "data" or {*start.skipped} != {self.scenario.step}
        ):
            self._blame(f"skips {start.skipped}")

    def _follow(self, start: Sequence[Start]) -> None:
        """Compare what a start has decided with what its trials and those before prove."""
        events = start[0].events
        if self.scenario.kind == "state":
            self._expect_spoiled(start[0])
            return
        num_rejected = sum(event["event"] == "rejected" for event in events)
        is_restart = any(event["event"] == "restart" for event in events)
        if is_restart:
            self.num_restarts += 1
        elif num_rejected:
            self.trials, self.num_restarts, self.was_given_up = {}, 0, False
        if num_rejected > (0 if is_restart else 1):
            # A second fault on top of the one that waits: its trials begin in the middle.
            self.trials = None
        if self.trials is None or not (is_restart or num_rejected):
            return
        self._add_trials(start)
        certain = self._certain()
        decided = start[0].verdict
        if certain is None:
            self._expect_open(start[0])
        elif decided != certain:
            self._blame(f"is {decided}, but it is certain: {certain}; {self._shown()}")
        if decided is not None and decided != "undecided":
            code = CODES[decided] if self.scenario.fatal else None
            if start[0].exit_code != code:
                self._blame(f"{decided} with exit code {start[0].exit_code}, not {code}")
            self.trials = None

    def _is_good_now(self) -> bool:
        """Return True if no value of the last trials was bad."""
        assert self.trials is not None
        return all(not trials[-1].is_bad for trials in self.trials.values())

    def _expect_spoiled(self, start: Start) -> None:
        if start.exit_code is not None and (start.exit_code, start.verdict, start.save) != (
            21,
            "spoiled_state",
            False,
        ):
            self._blame(f"exit code {start.exit_code}, {start.verdict}, save {start.save}")

    def _expect_open(self, start: Start) -> None:
        is_last = self.num_restarts >= MAX_RESTARTS
        if start.verdict in (None, "undecided"):
            self.finding.num_open += 1
            if self.was_given_up and start.exit_code is None and self._is_good_now():
                self.trials = None  # after an undecided end a job continues on good values
                return
            self.was_given_up |= start.exit_code == 20
            code = 20 if is_last else 16
            if is_last and not self.scenario.fatal:
                code = None  # type: ignore[assignment]
            if start.exit_code != code:
                self._blame(f"open with exit code {start.exit_code}, not {code}")
            if is_last:  # from now on starts are counted again
                self.num_restarts = 0
            told = self._told_by_one_fault()
            if told:
                self.finding.told_by_one_fault.append(f"{told}: {self._shown()}")

    # What trials prove

    def _add_trials(self, start: Sequence[Start]) -> None:
        assert self.trials is not None
        for runs in zip(*(each.runs for each in start), strict=True):
            if runs[0].step != self.scenario.step:
                continue
            self.finding.num_opinions += any(
                run.replica != self.layout.coordinate(rank)["dp"] for rank, run in enumerate(runs)
            )
            values = trials_of(self.layout, runs, start[0].devices)
            if not self.trials:
                self.trials = {key: [each] for key, each in values.items() if each.is_bad}
                continue
            for key, known in self.trials.items():
                if key in values:
                    known.append(values[key])

    def _certain(self) -> str | None:
        """The verdict that every explanation of the trials has, if there is one for all values.

        A value of its own is open even if another one is certain, unless that one explains it: a
        device that feeds both, or data that does.
        """
        assert self.trials is not None
        known = [(each, _certain_of(each)) for each in self.trials.values()]
        broken = {
            d for each, verdict in known if verdict == "persistent_error" for d in _told(each)
        }
        data = [each[0].devices.keys() for each, verdict in known if verdict == "correct_result"]
        for each, verdict in known:
            good = [trial for trial in each if not trial.is_bad]
            left = [_left(trial, good) for trial in each if trial.is_bad]
            is_explained = all(devices & broken for devices in left) or (
                not good and any(roles <= each[0].devices.keys() for roles in data)
            )
            if verdict is None and not is_explained:
                return None
        verdicts = [verdict for _, verdict in known]
        for verdict in ("persistent_error", "correct_result", "transient_error"):
            if verdict in verdicts:
                return verdict
        return None

    def _told_by_one_fault(self) -> str | None:
        """What it is if one thing at most is broken and explains all trials of all values."""
        assert self.trials is not None
        left: list[str] = []
        devices = {d for each in self.trials.values() for t in each for d in t.devices.values()}
        for device in sorted(devices):
            if all(_explains(device, each) for each in self.trials.values()):
                left.append(device)
        if all(trial.is_bad for each in self.trials.values() for trial in each):
            left.append("data")
        return left[0] if len(left) == 1 else None

    def _shown(self) -> str:
        """The trials in words."""
        assert self.trials is not None
        lines = []
        for key, each in self.trials.items():
            shown = [
                f"{'bad' if trial.is_bad else 'good'} on "
                + " ".join(f"{'.'.join(map(str, r))}:{d}" for r, d in trial.devices.items())
                for trial in each
            ]
            lines.append(f"{key}: {'; '.join(shown)}")
        return " | ".join(dict.fromkeys(lines))

    def _check_end(self, starts: Sequence[Sequence[Start]]) -> None:
        """Whatever has struck has a verdict at the end."""
        num_strikes = sum(
            run.num_strikes for start in starts for each in start for run in each.runs
        )
        has_struck = num_strikes > 0 or self.scenario.kind == "data"
        is_through = starts[-1][0].exit_code is None
        if has_struck and is_through and not self.finding.verdicts:
            self._blame("no verdict at all")


def trials_of(layout: Layout, runs: Sequence[Run], devices: Sequence[str]) -> dict[Key, Trial]:
    """Return the trial that one run of a step is of each value, for the runs of all ranks."""
    roles = [role_of(layout, rank, replica=run.replica) for rank, run in enumerate(runs)]
    found = {}
    for rank, run in enumerate(runs):
        for name, occurrence, is_bad, fed in run.values:
            feeders = _feeders(layout, rank, fed)
            placed = {roles[each]: devices[each] for each in feeders}
            found[(*roles[rank], name, occurrence)] = Trial(devices=placed, is_bad=is_bad)
    return found


def _feeders(layout: Layout, rank: int, fed: str) -> list[int]:
    """Return the ranks whose devices have a part in a value.

    Data ranks meet only in the reduction of gradients, but those of one exchange of experts meet in
    every layer. Of the layouts here the experts' ranks are neighbours along the data axis.
    """
    if fed == "local":
        return [rank]
    if fed == "all":
        return list(layout.ranks)
    mine = layout.coordinate(rank)["dp"] // layout.ep
    return [each for each in layout.ranks if layout.coordinate(each)["dp"] // layout.ep == mine]


def _certain_of(trials: Sequence[Trial]) -> str | None:
    """Return the verdict on one value that every explanation of its trials has.

    An explanation is a set of devices broken in some roles, or bad data. With a good trial the data
    is right, and no device of it is broken in the role that it had; then a bad trial with one
    device left convicts it, however many others may be broken, too. That two sets of devices with
    none in common are both broken, and give the same bad value, is taken to be out of the question.
    """
    bad = [each for each in trials if each.is_bad]
    good = [each for each in trials if not each.is_bad]
    if not good:
        sets = [set(each.devices.values()) for each in bad]
        is_data = any(not one & other for one, other in combinations(sets, 2))
        return "correct_result" if is_data else None
    if _told(trials):
        return "persistent_error"
    if any(each.devices == other.devices for each in bad for other in good):
        return "transient_error"
    return None


def _told(trials: Sequence[Trial]) -> set[str]:
    """Return the devices that the trials of one value convict."""
    good = [each for each in trials if not each.is_bad]
    left = [_left(each, good) for each in trials if each.is_bad]
    return {device for each in left if len(each) == 1 for device in each}


def _left(bad: Trial, good: Sequence[Trial]) -> set[str]:
    """Return the devices of a bad trial that may be broken in a role that they have there."""
    return {
        device
        for role, device in bad.devices.items()
        if all(each.devices.get(role) != device for each in good)
    }


def _explains(device: str, trials: Sequence[Trial]) -> bool:
    """Return True if a device that is broken in some roles explains every trial by itself."""
    good = [each for each in trials if not each.is_bad]
    return all(device in _left(each, good) for each in trials if each.is_bad)

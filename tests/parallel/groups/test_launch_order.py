"""Orders of launches on one communicator, without a communicator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from holdfast.parallel.groups import launch_order
from holdfast.parallel.groups.launch_order import LaunchOrder, LaunchProgress, OrderMark

NUMBERS = range(4)
MANY = 50
"""As many launches are folded; in a run more are."""
SHOWN = 32
"""Launches by which the first that met another is named."""


@dataclass(eq=False)
class Launched:
    """One launch, as lists know it."""

    number: int


@dataclass
class ListedOrder:
    """A `LaunchOrder` of one rank beside what it stands for: a list for each user."""

    order: LaunchOrder = field(default_factory=lambda: LaunchOrder(is_shared=True))
    marks: list[OrderMark] = field(default_factory=list)
    lists: list[list[Launched]] = field(default_factory=list)
    """By mark, launches behind it; the first is `LaunchOrder.unsaved`."""
    kept: list[Launched] = field(default_factory=list)
    """Those of all users that are not folded."""
    num_forgotten: Counter[int] = field(default_factory=Counter)
    """By mark: other ranks' notes from before mean other launches."""

    def __post_init__(self) -> None:
        assert [self.order.add(f"unit {number}") for number in NUMBERS] == [*NUMBERS]
        self.marks.append(self.order.unsaved)
        self.lists.append([])

    def launch(self, numbers: list[int]) -> None:
        for number in numbers:
            each = Launched(number)
            self.order.note(number)
            self.kept.append(each)
            for listed in self.lists:
                listed.append(each)

    def mark(self) -> None:
        self.marks.append(self.order.mark())
        self.lists.append([])

    def compare(self, user: int) -> None:
        self.order.note_compared(self.marks[user])
        behind = {*map(id, self.lists[user])} & {*map(id, self.kept)}
        self.lists[user] = []
        self.lists = [[x for x in each if id(x) not in behind] for each in self.lists]
        self.kept = []

    def forget(self, user: int) -> None:
        self.order.forget(self.marks[user])
        self.lists[user], self.lists[0] = [], []
        self.num_forgotten[user] += 1
        self.num_forgotten[0] += 1

    def take_back(self, user: int, numbers: set[int]) -> None:
        self.order.take_back(self.marks[user], numbers)
        kept = {*map(id, self.kept)}
        gone = {id(x) for x in self.lists[user] if id(x) in kept and x.number in numbers}
        self.lists = [[x for x in each if id(x) not in gone] for each in self.lists]
        self.kept = [x for x in self.kept if id(x) not in gone]

    def fold(self) -> None:
        self.order.fold()
        if len(self.kept) >= MANY:
            self.kept = []

    def last(self, user: int) -> list[Launched]:
        """Launches behind a mark that are not folded."""
        kept = {*map(id, self.kept)}
        return [x for x in self.lists[user] if id(x) in kept]

    def progress(self, user: int, *, at: int | None = None) -> LaunchProgress:
        """As seen by a rank that waits in one of `last`, or in none."""
        waited = 0
        if at is not None:
            waited = self.order.num_launches() - len(self.last(user)) + at + 1
        return self.order.progress(self.marks[user], communicator="dp", ranks=(0, 1), waited=waited)

    def check(self) -> None:
        for user, (mark, listed) in enumerate(zip(self.marks, self.lists, strict=True)):
            assert self.order.has_uncompared(mark) == bool(listed)
            assert self.order.names(mark) == [f"unit {x.number}" for x in self.last(user)]
            assert self.progress(user).key == f"dp/{user}/{self.num_forgotten[user]}"


def numbers_of(launches: list[Launched]) -> list[int]:
    return [each.number for each in launches]


def check_notes(rank: ListedOrder, user: int, note: list[object], other: ListedOrder) -> None:
    """What is known of another rank's note, which was left when its launches were these."""
    own, theirs = rank.last(user), other.last(user)
    num_folded = len(rank.lists[user]) - len(own)
    is_alike = numbers_of(rank.lists[user][:num_folded]) == numbers_of(
        other.lists[user][:num_folded]
    ) and num_folded == len(other.lists[user]) - len(theirs)
    first = numbers_of(own)[: len(theirs)]
    shown = [*zip(numbers_of(own), numbers_of(theirs), strict=False)][max(len(theirs) - SHOWN, 0) :]
    if len(theirs) <= len(own):
        has_met = is_alike and first != numbers_of(theirs)
    else:
        has_met = is_alike and any(a != b for a, b in shown)
    progress = rank.progress(user)
    assert progress.has_met_others(note) == has_met
    borders = {len(own) - 1, len(theirs)}
    for at in borders & {*range(len(own))}:
        waits = rank.progress(user, at=at)
        is_awaited = is_alike and at >= len(theirs)
        assert waits.awaited_from(note) == (f"unit {own[at].number}" if is_awaited else None)
    borders = {len(own), len(theirs) - 1, len(theirs) - SHOWN, len(theirs) - SHOWN - 1}
    for at in borders & {*range(len(theirs))}:
        name = f"unit {theirs[at].number}" if at >= len(theirs) - SHOWN else "something"
        is_awaited = is_alike and at >= len(own)
        waited = other.progress(user, at=at).note()
        assert progress.awaited_by(waited) == (name if is_awaited else None)
    assert progress.awaited_from(note) is progress.awaited_by(note) is None  # none waits
    if has_met:
        pairs = shown
        met = next(((f"unit {a}", f"unit {b}") for a, b in pairs if a != b), None)
        assert progress.first_met(note) == met


@pytest.mark.parametrize("is_mixed", [False, True])
def test_any_program_of_several_users_is_compared_as_lists(
    is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1, against lists: what each user still has to compare, and what has met another launch.

    Two ranks make the same calls; if they are mixed one launches another unit now and then.
    """
    monkeypatch.setattr(launch_order, "_MOST", MANY)
    num_met = 0
    for seed in range(40):
        randoms = random.Random(f"{is_mixed} {seed}")
        pair = ListedOrder(), ListedOrder()
        for _ in range(randoms.randrange(4, 30)):
            user = randoms.randrange(len(pair[0].marks))
            call = randoms.choice(["launch"] * 6 + ["mark", "compare", "forget", "take", "fold"])
            units = {*randoms.sample(([0, 1], [2, 3]), 1)[0]}
            count = randoms.choice([1, 2, 3, 20, MANY])
            numbers = [randoms.choice(NUMBERS) for _ in range(count)]
            other = [*numbers]
            if is_mixed and randoms.random() < 0.2:
                other[randoms.randrange(count)] ^= 1  # of the same `units`
            for rank, launched in zip(pair, (numbers, other), strict=True):
                if call == "launch":
                    rank.launch(launched)
                elif call == "mark":
                    rank.mark()
                elif call == "fold":
                    rank.fold()
                elif user and call == "compare":
                    rank.compare(user)
                elif user and call == "forget":
                    rank.forget(user)
                elif user and call == "take":
                    rank.take_back(user, units)
                if call == "launch" and rank is pair[0]:
                    # The second rank has not launched these yet.
                    for each in range(len(rank.marks)):
                        check_notes(rank, each, pair[1].progress(each).note(), pair[1])
                        check_notes(pair[1], each, rank.progress(each).note(), rank)
            pair[0].check()
            pair[1].check()
            for each in range(len(pair[0].marks)):
                check_notes(pair[0], each, pair[1].progress(each).note(), pair[1])
                digests = {rank.order.digest(rank.marks[each]) for rank in pair}
                listed = [numbers_of(rank.lists[each]) for rank in pair]
                assert (len(digests) == 1) == (listed[0] == listed[1])
                num_met += listed[0] != listed[1]
    assert bool(num_met) == is_mixed


def test_long_orders_differ_by_one_launch() -> None:
    """I1: an evaluation of any length keeps little, and hides no launch in another order."""
    randoms = random.Random(0)
    launches = [randoms.randrange(4) for _ in range(20_000)]
    swapped = [*launches]
    at = next(i for i in range(100, 20_000) if launches[i] != launches[i + 1])
    swapped[at : at + 2] = reversed(launches[at : at + 2])
    digests = []
    for each in (launches, launches, swapped):
        order = LaunchOrder(is_shared=True)
        for number in range(4):
            order.add(f"unit {number}")
        early, late = order.mark(), None
        for place, number in enumerate(each):
            order.note(number)
            if place == 15_000:
                late = order.mark()
            if place % 10 == 0:
                order.fold()
        assert late is not None
        assert len(order.names(early)) < 5000
        digests.append((order.digest(early), order.digest(late)))
        order.note_compared(late)
        assert not order.has_uncompared(late)
        assert order.has_uncompared(early)
        order.forget(early)
        assert not order.has_uncompared(early)
    assert digests[0] == digests[1]
    assert digests[0][0] != digests[2][0]
    assert digests[0][1] == digests[2][1]


def test_what_one_user_has_compared_the_other_one_still_has_to() -> None:
    """I1: a comparison of one model hides nothing of what was launched before its own mark."""
    digests = []
    for first in [0, 1] * 8:
        order = LaunchOrder(is_shared=True)
        for number in range(2):
            order.add(f"unit {number}")
        early = order.mark()
        order.note(first)
        late = order.mark()
        order.note(0)
        order.note_compared(late)
        assert order.has_uncompared(early)
        digests.append(order.digest(early))
        assert order.digest(order.unsaved) == order.digest(early)  # nor does it for a save
        order.forget(late)
        assert not order.digest(order.unsaved)
    # Marks are kept in no order, which is another one on each rank.
    assert len({*digests[::2]}) == len({*digests[1::2]}) == 1
    assert digests[0] != digests[1]

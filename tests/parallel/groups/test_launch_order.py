"""Orders of launches on one communicator, without a communicator."""

from __future__ import annotations

import random

from holdfast.parallel.groups.launch_order import LaunchOrder


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

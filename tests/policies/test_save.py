"""Each policy on its own: when it asks, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import (
    AtDeadline,
    AtStep,
    Checkpointer,
    EveryMinutes,
    EverySteps,
    OnFile,
    OnSignal,
    SavePolicy,
    StorageError,
)
from holdfast.errors import ConfigError, HoldfastError
from holdfast.parallel import Control
from holdfast.policies.save import Moment
from holdfast.policies.schedule import SaveSchedule
from tests.harness import wait_until


def alone(policy: SavePolicy, clock: Callable[[], float] = time.monotonic) -> SaveSchedule:
    return SaveSchedule(policy, control=Control.single(), clock=clock)


def saves(policy: SavePolicy, num_steps: int) -> list[int]:
    schedule = alone(policy)
    return [step for step in range(num_steps) if schedule.decide(step).save]


@given(n=st.integers(1, 30), last=st.integers(1, 60))
def test_policies_of_the_step_are_their_definition(n: int, last: int) -> None:
    steps = range(61)
    assert saves(EverySteps(n), 61) == [s for s in steps if s and s % n == 0]
    assert saves(AtStep(last), 61) == [last]
    assert saves(AtStep(last) | EverySteps(n), 61) == [
        s for s in steps if s and (s % n == 0 or s == last)
    ]


@given(
    minutes=st.floats(0.01, 3),
    gaps=st.lists(st.floats(0, 120), min_size=1, max_size=30),
    check_every=st.integers(1, 4),
)
def test_minutes_count_from_the_last_save_of_any_kind(
    minutes: float, gaps: list[float], check_every: int
) -> None:
    now = 0.0
    schedule = alone(EveryMinutes(minutes, check_every=check_every) | EverySteps(7), lambda: now)
    last = 0.0
    for step, gap in enumerate(gaps, start=1):
        now += gap
        is_due = step % check_every == 0 and now - last >= 60 * minutes
        expected = is_due or step % 7 == 0
        assert schedule.decide(step).save == expected
        last = now if expected else last


def test_a_save_or_a_load_by_the_caller_starts_the_minutes_again() -> None:
    now = 0.0
    schedule = alone(EveryMinutes(1), lambda: now)
    now = 50.0
    schedule.saved(1)
    now = 70.0
    assert not schedule.decide(2).save
    now = 110.0
    assert schedule.decide(3).save


def test_a_step_is_saved_once() -> None:
    schedule = alone(EverySteps(5))
    assert schedule.decide(5).save
    assert not schedule.decide(5).save
    schedule.saved(10)
    assert not schedule.decide(10).save
    assert schedule.decide(15).save
    schedule.saved(20)
    assert not schedule.decide(1).save  # begun again at 0 from what was loaded
    assert schedule.decide(20).save


def test_a_file_asks_for_one_save(tmp_path: Path) -> None:
    path = tmp_path / "save-now"
    schedule = alone(OnFile(path, check_every=2))
    path.touch()
    assert [schedule.decide(step).save for step in (1, 2, 3, 4)] == [False, True, False, False]
    assert not path.exists()
    path.touch()
    decision = schedule.decide(6)
    assert decision.save
    assert not decision.stop
    assert decision.reason == f"{path} was there"
    assert alone(OnFile(tmp_path / "no" / "such")).decide(1).save is False


def test_what_asks_once_asks_again_if_its_save_is_skipped(tmp_path: Path) -> None:
    """The file was gone, the minutes began again, and the step counted as saved."""
    now = 0.0
    ask = tmp_path / "save"
    policy = OnFile(ask, check_every=2) | EveryMinutes(1) | EverySteps(100)
    schedule = alone(policy, clock=lambda: now)

    def decide(step: int, *, is_skipped: bool) -> str:
        decision = schedule.decide(step)
        if is_skipped:
            schedule.not_saved()
        assert decision.save == bool(decision.reason)
        return decision.reason

    ask.touch()
    assert "was there" in decide(2, is_skipped=True)
    assert "was there" in decide(2, is_skipped=True), "the step is not saved"
    assert decide(3, is_skipped=False) == "", "it is looked at every second step"
    assert "was there" in decide(4, is_skipped=False)
    assert decide(6, is_skipped=False) == ""
    now = 61.0
    for step in (7, 8):
        assert "EveryMinutes" in decide(step, is_skipped=step == 7)
    assert decide(9, is_skipped=False) == "", "the minutes count from the save"
    now = 122.0
    assert "EveryMinutes" in decide(11, is_skipped=True)
    schedule.saved(12)
    schedule.not_saved()
    assert decide(13, is_skipped=False) == "", "a save by hand has answered it, whatever came later"
    assert "EverySteps" in decide(100, is_skipped=True)
    assert decide(101, is_skipped=False) == "", "a step's turn is over"


def test_a_save_that_fails_is_asked_for_again(tmp_path: Path) -> None:
    """Its step counted as saved: a retry did nothing, and a run that was to stop saved no more."""
    ask = tmp_path / "stop"
    policy = EverySteps(2) | OnFile(ask, stop=True)
    with Checkpointer(tmp_path / "run", save_when=policy) as checkpointer:
        whole: dict[str, Any] = {"x": torch.arange(3.0)}
        with pytest.raises(HoldfastError, match="object"):
            checkpointer.maybe_save(2, {"x": object()})
        assert checkpointer.maybe_save(2, whole)
        ask.touch()
        with pytest.raises(HoldfastError, match="object"):
            checkpointer.maybe_save(3, {"x": object()})
        assert checkpointer.maybe_save(3, whole), "the file is gone, and its save was not made"
        assert checkpointer.maybe_save(3, whole) is None
        assert checkpointer.should_save(4)
        with pytest.raises(HoldfastError, match="object"):
            checkpointer.save(4, {"x": object()})
        assert checkpointer.should_save(4)


def test_a_file_may_stop_the_run(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    schedule = alone(OnFile(path, stop=True) | EverySteps(3))
    path.touch()
    assert (schedule.decide(1).save, schedule.decide(2).stop) == (True, False)
    path.touch()  # one that stopped the run asks for nothing any more
    assert [schedule.decide(step).save for step in (3, 4)] == [True, False]


def test_a_file_that_cannot_be_taken_away_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match="cannot be removed"):
        alone(OnFile(tmp_path / "directory")).decide(1)


def test_a_deadline_saves_once_before_it_and_stops() -> None:
    far = alone(AtDeadline(time.time() + 1000, margin_s=500))
    assert not far.decide(1).stop
    near = alone(AtDeadline(time.time() + 100, margin_s=500) | EverySteps(3))
    decision = near.decide(1)
    assert (decision.save, decision.stop) == (True, True)
    assert "deadline is less than 500 s away" in decision.reason
    # Who goes on all the same loses no save of another policy.
    assert [near.decide(step).save for step in (2, 3, 4)] == [False, True, False]


def test_signals_are_caught_once_and_the_handlers_come_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        schedule = alone(OnSignal(signal.SIGUSR1, signal.SIGUSR2))
        assert not schedule.decide(1).stop
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
        decision = schedule.decide(2)
        assert (decision.save, decision.stop, decision.stop_vote) == (True, True, signal.SIGUSR1)
        assert decision.reason == "SIGUSR1"
        assert not schedule.decide(3).save
        schedule.close()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGRTMIN + 1, "35")]
)
def test_a_signal_may_ask_for_a_save_each_time(number: int, name: str) -> None:
    """One without a name failed at the first step, by a ValueError on all ranks."""
    policy = OnSignal(number, stop=False)
    assert repr(policy) == f"OnSignal({name}, stop=False, check_every=1)"
    schedule = alone(policy)
    found = []
    for step in range(1, 7):
        if step in (2, 5):
            os.kill(os.getpid(), number)
        decision = schedule.decide(step)
        assert not decision.stop
        word = name if number == signal.SIGUSR1 else f"signal {name}"
        assert decision.reason == (word if decision.save else "")
        found.append(decision.save)
    schedule.close()
    assert found == [False, True, False, False, True, False]


def test_a_handler_that_somebody_sets_later_is_left_in_place() -> None:
    schedule = alone(OnSignal(signal.SIGUSR1))
    other = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR1, other)
    schedule.close()
    assert signal.getsignal(signal.SIGUSR1) is other
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_one_that_cannot_start_leaves_no_other_watching() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    used = OnSignal(signal.SIGUSR2)
    with pytest.raises(ConfigError, match="in use by another checkpointer"):
        alone(OnSignal(signal.SIGUSR1) | used | used)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_handlers_may_be_in_force_before_the_checkpointer_and_after_it() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with OnSignal(signal.SIGUSR1) as policy:
        os.kill(os.getpid(), signal.SIGUSR1)
        schedule = alone(policy)
        with pytest.raises(ConfigError, match="in use by another checkpointer"):
            alone(policy)
        assert schedule.decide(1).stop_vote == signal.SIGUSR1
        schedule.close()
        assert signal.getsignal(signal.SIGUSR1) is not before
        assert alone(policy).decide(1).stop
    assert signal.getsignal(signal.SIGUSR1) is before


def test_notice_is_given_while_the_main_thread_is_busy() -> None:
    """A rank that waits in a collective answers the first signal, and leaves at the second."""
    noticed: list[tuple[int, int]] = []
    seen: list[list[tuple[int, int]]] = []
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)

    def send() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
            with suppress(AssertionError):
                wait_until(lambda: len(noticed) > len(seen), timeout_s=30.0)
            seen.append([*noticed])
        libc.pthread_mutex_unlock(mutex)

    wakeup_before = signal.set_wakeup_fd(-1)
    schedule = alone(
        OnSignal(signal.SIGUSR1, signal.SIGUSR2, notice=lambda *by: noticed.append(by))
    )
    libc.pthread_mutex_lock(mutex)
    sender = threading.Thread(target=send)
    sender.start()
    # One call into C, without the lock of the interpreter and without a look at signals.
    libc.pthread_mutex_lock(mutex)
    sender.join()
    assert seen == [[(signal.SIGUSR1, 1)], [(signal.SIGUSR1, 1), (signal.SIGUSR2, 2)]]
    assert schedule.decide(1).stop_vote in (signal.SIGUSR1, signal.SIGUSR2)
    schedule.close()
    assert signal.set_wakeup_fd(wakeup_before) == -1


def test_signals_need_the_main_thread() -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            alone(OnSignal())
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "make the checkpointer there" in str(found[0])


def test_a_checkpointer_that_is_closed_in_another_thread_closes_all_but_the_handlers(
    tmp_path: Path,
) -> None:
    """It left the writer, and later in the main thread the handlers, too."""
    before = signal.getsignal(signal.SIGUSR1)
    checkpointer = Checkpointer(tmp_path, save_when=OnSignal(signal.SIGUSR1) | EverySteps(2))
    assert checkpointer.maybe_save(np.int64(2), {"values": {"step": 2}}), "a number of numpy"  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="close the checkpointer"):
        pool.submit(checkpointer.close).result()
    assert checkpointer.stats.writer_pid is None
    assert checkpointer.steps() == [2]
    assert signal.getsignal(signal.SIGUSR1) is not before
    checkpointer.close()
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EverySteps(0), "n must be an integer of at least 1, got 0"),
        (lambda: EverySteps(True), "n must be an integer of at least 1, got True"),
        (lambda: AtStep(-1), "step must be an integer of at least 1, got -1"),
        (lambda: EveryMinutes(0), "minutes must be a number above 0"),
        (lambda: EveryMinutes(float("nan")), "minutes must be a number above 0"),
        (
            lambda: EveryMinutes(1, check_every=0),
            "check_every must be an integer",
        ),
        (lambda: AtDeadline(float("nan")), "at must be a number, got nan; it is Unix time"),
        (lambda: AtDeadline("1700000000"), "at must be a number, got '17"),  # type: ignore[arg-type]
        (lambda: AtDeadline(1.0, margin_s=-1), "margin_s must be a number of at least 0"),
        (
            lambda: OnFile("x", check_every=1.5),
            "check_every must be an integer",
        ),  # type: ignore[arg-type]
        (lambda: OnSignal(signal.SIGKILL), "a process cannot handle signal"),
        (lambda: OnSignal(9999), "a process cannot handle signal"),
        (lambda: alone("x"), "is not a save policy"),  # type: ignore[arg-type]
        (lambda: alone(EverySteps(1)).decide(2.0), "step must be an integer of at least 0, got 2"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_meant_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_a_policy_of_ones_own_joins_the_others() -> None:
    class AtPrimes(SavePolicy):
        def vote(self, moment: Moment) -> int:
            return int(moment.step in (2, 3, 5, 7))

    assert saves(AtPrimes() | EverySteps(4), 10) == [2, 3, 4, 5, 7, 8]

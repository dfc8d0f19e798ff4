"""All ranks decide alike, whatever their clocks, files and signals are."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import (
    AtStep,
    Checkpointer,
    EveryMinutes,
    EverySteps,
    HoldfastError,
    Layout,
    OnFile,
    OnSignal,
    ProcessGroups,
    SavePolicy,
)
from holdfast.policies.save import Moment
from holdfast.policies.schedule import SaveDecision, SaveSchedule
from tests.harness import RankContext, run_ranks

NUM_RANKS = 3
NUM_STEPS = 12


class Scripted(SavePolicy):
    """Votes as a list says, on this rank."""

    decided_by = "any rank"

    def __init__(self, script: list[bool], *, stop: bool, check_every: int) -> None:
        self.script, self.stop, self.check_every = script, stop, check_every

    def __repr__(self) -> str:
        return f"Scripted(stop={self.stop})"

    def vote(self, moment: Moment) -> int:
        return int(self.script[moment.step])


class ThreadControl:
    """What a schedule needs of `Control`, between threads of one process."""

    ranks = tuple(range(NUM_RANKS))
    scope = shared_error = None
    is_broken = False

    def __init__(self, rank: int, payloads: list[bytes], barrier: threading.Barrier) -> None:
        self.is_coordinator = rank == 0
        self.num_collectives = 0
        self._rank, self._payloads, self._barrier = rank, payloads, barrier

    def refuse_forked(self, operation: str) -> None: ...

    def agree(self, error: object, *, phase: str, payload: bytes) -> list[bytes]:
        assert error is None
        self.num_collectives += 1
        self._payloads[self._rank] = payload
        self._barrier.wait(60)
        answers = list(self._payloads)
        self._barrier.wait(60)
        return answers


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_three_ranks_decide_what_brute_force_says(data: Any) -> None:
    every, last = data.draw(st.integers(1, 8)), data.draw(st.integers(1, NUM_STEPS))
    minutes, look = data.draw(st.sampled_from([0.5, 2.0])), data.draw(st.integers(1, 3))
    stop, ask = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    flags = st.lists(st.booleans(), min_size=NUM_STEPS + 1, max_size=NUM_STEPS + 1)
    scripts = [data.draw(flags) for _ in range(NUM_RANKS)]
    ticks = st.lists(st.floats(0, 90), min_size=NUM_STEPS + 1, max_size=NUM_STEPS + 1)
    clocks = [data.draw(ticks) for _ in range(NUM_RANKS)]

    payloads, barrier = [b""] * NUM_RANKS, threading.Barrier(NUM_RANKS)
    controls = [ThreadControl(rank, payloads, barrier) for rank in range(NUM_RANKS)]
    found: list[list[SaveDecision]] = [[] for _ in range(NUM_RANKS)]

    def run(rank: int) -> None:
        now = 0.0
        schedule = SaveSchedule(
            EverySteps(every)
            | AtStep(last)
            | EveryMinutes(minutes, check_every=look)
            | Scripted(scripts[rank], stop=stop, check_every=ask),
            control=controls[rank],  # type: ignore[arg-type]
            clock=lambda: now,
        )
        for step in range(1, NUM_STEPS + 1):
            now += clocks[rank][step]
            found[rank].append(schedule.decide(step))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    now = saved_at = 0.0
    has_stopped = False
    num_collectives = 0
    for step in range(1, NUM_STEPS + 1):
        now += clocks[0][step]
        is_asked = step % ask == 0 and any(script[step] for script in scripts)
        stops = is_asked and stop and not has_stopped
        expected = (
            step % every == 0
            or step == last
            or (step % look == 0 and now - saved_at >= 60 * minutes)
            or (is_asked and not (stop and has_stopped))
        )
        looks = step % look == 0 or (step % ask == 0 and not has_stopped)
        num_collectives += looks or step == 1
        has_stopped |= stops
        saved_at = now if expected else saved_at
        for decisions in found:
            assert (decisions[step - 1].save, decisions[step - 1].stop) == (expected, stops)
    assert {control.num_collectives for control in controls} == {num_collectives}


def message(action: Callable[[], object]) -> str:
    try:
        action()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def decide_together(context: RankContext, root: str) -> dict[str, Any]:
    rank, found = context.rank, {}
    with ProcessGroups.create(Layout(dp=2), timeout_s=30) as groups:
        control = groups.control

        def run(policy: SavePolicy, num_steps: int, at_step: Callable[[int], None]) -> list[int]:
            schedule = SaveSchedule(policy, control=control, clock=lambda: clock[0])
            saved = []
            for step in range(1, num_steps + 1):
                at_step(step)
                decision = schedule.decide(step)
                saved += [step] if decision.save else []
                if decision.stop:
                    break
            schedule.close()
            return saved

        clock = [0.0]

        def tick(step: int) -> None:
            clock[0] += 20.0 if rank == 0 else 3000.0 * step

        found["minutes"] = run(EveryMinutes(1), 7, tick)

        def signal_one(step: int) -> None:
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        found["signal"] = run(OnSignal() | EverySteps(2), 9, signal_one)

        def touch(step: int) -> None:
            if step == 2:
                Path(root, f"of-{rank}").touch()

        found["file"] = run(OnFile(Path(root, f"of-{rank}")), 4, touch)
        found["left"] = Path(root, f"of-{rank}").exists()

        before = control.num_collectives
        found["steps"] = run(EverySteps(2) | AtStep(5), 6, lambda step: None)
        found["collectives"] = control.num_collectives - before

        schedule = SaveSchedule(OnSignal(), control=control)
        schedule.decide(1)
        found["another step"] = message(lambda: schedule.decide(2 + rank))
        found["again"] = schedule.decide(4).save
        schedule.close()
        other = SaveSchedule(EverySteps(2 + rank), control=control)
        found["another policy"] = message(lambda: other.decide(1))
        Path(root, "directory").mkdir(exist_ok=True)
        bad = SaveSchedule(OnFile(Path(root, "directory")), control=control)
        found["an error"] = message(lambda: bad.decide(1))
        found["handler"] = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return found


def test_clocks_signals_and_files_of_two_ranks_may_differ(tmp_path: Path) -> None:
    (tmp_path / "of-1").touch()
    first, second = run_ranks(2, decide_together, str(tmp_path)).results
    assert first.pop("left") is False
    assert second.pop("left") is True
    assert first == second
    assert first["minutes"] == [3, 6]  # by the coordinator's clock
    assert first["signal"] == [2, 3]
    assert first["file"] == [2]
    assert first["steps"] == [2, 4, 5, 6]
    assert first["collectives"] == 1  # that of the first call
    assert "PlanError" in first["another step"]
    assert "disagree on step: 2 on rank 0; 3 on rank 1" in first["another step"]
    assert "disagree on save_when: EverySteps(n=2) on rank 0; " in first["another policy"]
    assert "StorageError" in first["an error"]
    assert first["handler"]


def preempt(context: RankContext, root: str) -> dict[str, Any]:
    """A loop as users write it: rank 1 is asked to end during step 3, with a save every 2."""
    found: dict[str, Any] = {"saved": [], "before": signal.getsignal(signal.SIGTERM)}
    with ProcessGroups.create(Layout(dp=2), timeout_s=30) as groups:
        state: dict[str, object] = {"progress": {"step": 0}}
        with Checkpointer(
            root, groups=groups, save_when=EverySteps(2) | AtStep(6) | OnSignal()
        ) as checkpointer:
            for step in range(1, 7):
                state["progress"] = {"step": step}
                if context.rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                pending = checkpointer.maybe_save(step, state, when_busy="skip")
                found["saved"] += [step] if pending is not None else []
                if checkpointer.preempted:
                    break
            found["why"] = checkpointer.preempted
        found["before"] = signal.getsignal(signal.SIGTERM) == found["before"]
        with Checkpointer(root, groups=groups, save_when=EverySteps(3)) as again:
            found["loaded"] = again.load({"progress": {}}).step
            found["twice"] = again.maybe_save(3, state)
            found["next"] = again.maybe_save(6, state) is not None
    return found


def test_a_signal_to_one_rank_saves_and_ends_both_at_one_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, preempt, str(tmp_path)).results
    assert first == second
    assert first["saved"] in ([2, 3], [3])  # the save of step 2 may be skipped, that of 3 is not
    assert first["why"] == "SIGTERM"
    assert first["before"]
    assert (first["loaded"], first["twice"], first["next"]) == (3, None, True)

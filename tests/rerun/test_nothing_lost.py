"""Around a fault: states that were bad before, batches without a machine, loops that go wrong."""

from __future__ import annotations

import itertools
import math
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from holdfast import Checkpointer, Layout, ProcessGroups
from holdfast.errors import ConfigError, FaultError, MismatchError, StorageError
from holdfast.rerun import (
    DeviceIdentity,
    Limits,
    NotFinite,
    Policy,
    Replayed,
    RerunMachine,
    State,
    read_report,
)
from tests.harness import RankContext, run_ranks
from tests.rerun.job import SavedLoop
from tests.rerun.threads import ThreadGroups, run_threads


class Loop(SavedLoop):
    """A loop over numbered batches that can be told what goes wrong."""

    def __init__(
        self, groups: ProcessGroups, root: Path, *, device: str = "A", **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.groups, self.root = groups, root
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.lines: list[str] = []
        options.setdefault("replayed", Replayed(modules=[self.model]))
        self.machine = RerunMachine(
            groups,
            directory=root / "rerun",
            optimizers=[self.optimizer],
            device=DeviceIdentity(host="h", uuid=device),
            note=self.lines.append,
            **options,
        )
        self.step = 0
        self.taken: list[int] = []

    def source(self, first: int = 0) -> Iterator[torch.Tensor]:
        for number in itertools.count(first):
            yield torch.tensor([[float(number), 1.0]])

    def run(self, until: int, batches: Any, bad: Mapping[int, int] | None = None) -> None:
        """Run to a step; `bad` says in how many runs of a step the loss is NaN."""
        while self.step < until:
            for number in self.machine.attempts(self.step, batches):
                self.optimizer.zero_grad()
                batch = next(batches)
                self.taken.append(int(batch[0, 0]))
                loss = self.model(batch).square().mean()
                loss.backward()
                is_bad = number < (bad or {}).get(self.step, 0)
                self.machine.validate("loss", math.nan if is_bad else loss, NotFinite())
            if self.machine.decision.exit_code is not None:
                return
            self.optimizer.step()
            self.step += 1

    def save(self, root: Path) -> None:
        with Checkpointer(root, groups=self.groups) as checkpointer:
            checkpointer.save(self.step, self.state(), overwrite=True)

    def load(self, root: Path, **options: Any) -> None:
        with Checkpointer(root, groups=self.groups) as checkpointer:
            self.step = checkpointer.load(self.state(), **options).values["progress"]["step"]


def with_fault(groups: ProcessGroups, root: Path, **options: Any) -> Loop:
    """A loop whose fault of step 3 was saved; its source has passed the batch of the step."""
    loop = Loop(groups, root, **options)
    loop.run(4, loop.machine.replayable(loop.source()), {3: 2})
    assert loop.machine.decision.exit_code == 16
    loop.save(loop.machine.checkpoints)
    return loop


@pytest.mark.parametrize("what", ["parameter", "optimizer", "buffer"])
def test_a_state_that_was_bad_before_the_step_has_its_own_verdict(
    groups: ProcessGroups, tmp_path: Path, what: str
) -> None:
    """D20: no device is blamed, no checkpoint of it is kept or preferred; the one before is."""

    def make() -> Loop:
        loop = Loop(groups, tmp_path)
        if what == "buffer":
            loop.model.append(nn.BatchNorm1d(1).eval())
            loop.model.register_buffer("unset", torch.full((2,), math.nan))
        return loop

    loop = make()
    batches = loop.machine.replayable(loop.source())
    good = tmp_path / "good"
    loop.run(2, batches)
    loop.save(good)
    loop.run(3, batches)
    # The update of step 2 has spoiled one element: each run of step 3 is bad, on any device.
    name = "2.running_var" if what == "buffer" else "1.weight"
    parameter = loop.model.get_parameter("1.weight")
    with torch.no_grad():
        if what == "buffer":
            loop.model.get_buffer(name)[0] = math.nan
        elif what == "parameter":
            parameter[0, 1] = math.inf
        else:
            loop.optimizer.state[parameter]["exp_avg"][0, 1] = math.nan
    loop.save(good)  # nothing has been noticed yet
    loop.run(4, batches, {3: 2} if what == "optimizer" else None)
    decision = loop.machine.decision
    assert (decision.exit_code, decision.save) == (21, False)
    assert decision.verdict == "spoiled_state"
    assert name in decision.message
    assert loop.machine.state is State.NOT_RUNNING_YET
    (verdict,) = [each for each in read_report(tmp_path / "rerun") if each["event"] == "verdict"]
    assert (verdict["convicted"], verdict["values"][0]["num_tensors"]) == ([], 1)
    # The next start leaves the step out; one that loads it all the same ends before it runs.
    after = make()
    with (
        Checkpointer(good, groups=groups) as checkpoints,
        Checkpointer(after.machine.checkpoints, groups=groups) as faults,
    ):
        assert checkpoints.steps() == [2, 3]
        assert after.machine.resume_point(checkpoints, faults) == (checkpoints, 2)
    after.load(good, step=3)
    after.run(4, after.machine.replayable(after.source(3)))
    assert after.machine.decision.exit_code == 21
    assert after.taken == []


@pytest.mark.parametrize(
    ("size", "bit", "odd"), [(2, 22, [0, 1]), (3, 22, [1]), (3, 0, [1]), (3, 29, [1])]
)
def test_a_parameter_that_has_changed_on_one_replica_blames_no_data_and_no_device(
    tmp_path: Path, size: int, bit: int, odd: list[int]
) -> None:
    """D20: one bit of it, before the step. A checkpoint of the step would hold one of the copies,

    so that what a restart shows says nothing of the data or of the devices.
    """

    def run(groups: ThreadGroups) -> Loop:
        loop = Loop(groups, tmp_path, device=f"GPU {groups.rank}")  # type: ignore[arg-type]
        with torch.no_grad():  # threads draw from one random stream
            for each in loop.model.parameters():
                each.copy_(torch.linspace(-1, 1, each.numel()).view_as(each))
        batches = loop.machine.replayable(loop.source())
        loop.run(2, batches)
        if groups.rank == 1:
            loop.model.get_parameter("1.weight").data.view(torch.int32)[0, 1] ^= 1 << bit
        loop.run(3, batches, {2: 2} if groups.rank == 1 else None)
        return loop

    for loop in run_threads(size, run):
        decision = loop.machine.decision
        assert (decision.exit_code, decision.save, decision.verdict) == (21, False, "spoiled_state")
        assert "second_opinion=False" in decision.message
        assert loop.machine.fault is None
    events = read_report(tmp_path / "rerun")
    (drift,) = [each for each in events if each["event"] == "drift"]
    assert [each["rank"] for each in drift["values"]] == odd
    assert [each["verdict"] for each in events if each["event"] == "verdict"] == ["spoiled_state"]


@pytest.mark.parametrize("becomes", [None, math.nan, -math.inf])
def test_masks_of_infinities_are_no_fault(
    groups: ProcessGroups, tmp_path: Path, becomes: float | None
) -> None:
    """D20: buffers may hold them, and frozen parameters from the first step on, but no NaN."""
    loop = Loop(groups, tmp_path)
    loop.model.register_buffer("mask", torch.full((3,), -math.inf))
    for name, value in (("frozen mask", -math.inf), ("frozen", 1.0)):
        loop.model.register_parameter(
            name, nn.Parameter(torch.full((3,), value), requires_grad=False)
        )
    batches = loop.machine.replayable(loop.source())
    loop.run(2, batches)
    assert loop.step == 2
    if becomes is None:
        loop.run(3, batches, {2: 2})
        assert loop.machine.decision.exit_code == 16
        return
    changed = "frozen mask" if math.isnan(becomes) else "frozen"
    loop.model.get_parameter(changed).data[1] = becomes
    loop.run(3, batches, {2: 2})
    assert loop.machine.decision.exit_code == 21
    assert f"'{changed}'" in loop.machine.decision.message
    # The state of that step does not become the first one by a new start.
    fresh = Loop(groups, tmp_path, replayed=Replayed(modules=[loop.model]))
    fresh.step = 2
    fresh.run(3, fresh.machine.replayable(fresh.source()))
    assert fresh.machine.decision.exit_code == 21


@pytest.mark.parametrize(
    "convert",
    [
        lambda t: t.to(torch.float8_e4m3fn),
        torch.Tensor.to_sparse,
        lambda t: TwoTensor(torch.ones(2), t),  # type: ignore[no-untyped-call]
        lambda t: torch.nested.nested_tensor([t, t[:1]]),
    ],
    ids=["one byte", "sparse", "several tensors", "nested"],
)
def test_parameters_of_other_forms_are_looked_at(
    groups: ProcessGroups, tmp_path: Path, convert: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """D20: as others are."""
    loop = Loop(groups, tmp_path)
    loop.model.register_parameter(
        "scale", nn.Parameter(convert(torch.ones(2)), requires_grad=False)
    )
    loop.run(2, loop.machine.replayable(loop.source()))
    assert loop.step == 2
    loop.model.scale = nn.Parameter(convert(torch.tensor([1.0, math.nan])), requires_grad=False)
    fresh = Loop(groups, tmp_path / "fresh", replayed=Replayed(modules=[loop.model]))
    fresh.run(1, fresh.machine.replayable(fresh.source()))
    assert fresh.machine.decision.exit_code == 21


def test_the_batches_of_a_fault_are_not_lost_without_a_machine(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D21: a disabled machine uses them; a state without one is refused by name."""
    undisturbed = Loop(groups, tmp_path / "undisturbed")
    undisturbed.run(6, undisturbed.machine.replayable(undisturbed.source()))
    loop = with_fault(groups, tmp_path)
    faults = loop.machine.checkpoints
    disabled = Loop(groups, tmp_path, mode="disabled")
    disabled.load(faults)
    disabled.run(6, disabled.machine.replayable(disabled.source(4)))  # behind the step
    assert disabled.taken == [3, 4, 5]
    pairs = zip(disabled.model.parameters(), undisturbed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    plain = Loop(groups, tmp_path, mode="disabled")
    plain.load(faults)
    with pytest.raises(ConfigError, match=r"step 3.*replayable"):
        plain.run(6, plain.source(4))
    without = Loop(groups, tmp_path / "without")
    with Checkpointer(faults, groups=groups) as checkpointer:
        with pytest.raises(MismatchError, match=r"'rerun'.*batches of that step"):
            checkpointer.load(without.state(has_machine=False))
        report = checkpointer.load(without.state(has_machine=False), ignore_unexpected=["rerun"])
        assert report.not_requested == ("rerun",)


def test_a_source_that_repeats_the_step_needs_no_machine(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D4, D21: nothing would be lost, so nothing is refused."""
    loop = Loop(groups, tmp_path)
    loop.run(4, loop.machine.replayable(loop.source(), is_rewound=True), {3: 2})
    loop.save(loop.machine.checkpoints)
    without = Loop(groups, tmp_path / "without")
    with Checkpointer(loop.machine.checkpoints, groups=groups) as checkpointer:
        assert checkpointer.load(without.state(has_machine=False)).not_requested == ("rerun",)
    disabled = Loop(groups, tmp_path, mode="disabled")
    disabled.load(loop.machine.checkpoints)
    disabled.run(6, disabled.machine.replayable(disabled.source(3), is_rewound=True))
    assert disabled.taken == [3, 4, 5]


def test_an_exception_that_is_caught_keeps_the_batches_of_its_step(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D9: the same step starts with them again; another step goes on behind them."""
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(loop.source())
    for step, wanted in ((0, [0, 1]), (0, [0, 1, 2]), (1, [3]), (1, [3]), (2, [4])):
        try:
            for _ in loop.machine.attempts(step, batches):
                assert [int(next(batches)[0, 0]) for _ in wanted] == wanted
                if (step, len(wanted)) == (0, 2) or (step == 1 and not loop.taken):
                    loop.taken.append(step)
                    raise MemoryError
        except MemoryError:
            loop.taken = [] if step == 0 else loop.taken
    assert loop.machine.decision.exit_code is None


def test_parameters_that_change_inside_the_loop_are_refused(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """The step could not run again as it was; in the first step, not at the first fault."""
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(loop.source())

    def steps_inside() -> None:
        for _ in loop.machine.attempts(0, batches):
            loop.model(next(batches)).mean().backward()
            loop.optimizer.step()

    with pytest.raises(ConfigError, match=r"inside the loop.*0.weight.*veto=machine"):
        steps_inside()


def test_a_model_with_buffers_that_the_machine_does_not_know_is_not_run_again(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """A rerun would start with the statistics of the bad run."""
    machine = RerunMachine(groups, directory=tmp_path)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def run(step: int, value: float) -> None:
        for _ in machine.attempts(step):
            model(torch.ones(4, 2))
            machine.validate("loss", value, NotFinite())

    run(0, 1.0)
    with pytest.raises(ConfigError, match=r"BatchNorm1d.*Replayed\(modules=\[model\]\)"):
        run(1, math.nan)
    plain = RerunMachine(groups, directory=tmp_path / "plain")
    for number in plain.attempts(0):
        nn.Linear(2, 2)(torch.ones(1, 2))
        plain.validate("loss", math.nan if number == 0 else 1.0, NotFinite(), fatal=False)
    assert plain.decision.verdict == "transient_error"


def test_two_machines_do_not_share_a_directory(groups: ProcessGroups, tmp_path: Path) -> None:
    """D16: the second that writes is refused; one after another is a restart."""
    first = RerunMachine(groups, directory=tmp_path, replayed=Replayed())
    second = RerunMachine(groups, directory=tmp_path, replayed=Replayed())

    def fail(machine: RerunMachine, step: int) -> None:
        for number in machine.attempts(step):
            machine.validate("loss", math.nan if number == 0 else 1.0, NotFinite(), fatal=False)

    fail(first, 0)
    with pytest.raises(ConfigError, match="belongs to another machine"):
        fail(second, 0)
    # A job on another host has taken it since: seen in the directory itself.
    third = RerunMachine(groups, directory=tmp_path, replayed=Replayed())
    fail(third, 0)
    (tmp_path / "owner").write_text("another job")
    with pytest.raises(ConfigError, match="belongs to another machine"):
        fail(third, 1)


def test_starts_on_the_same_device_do_not_use_up_the_fault(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D10: bounded, and yet a later start elsewhere gets the verdict; one more there goes on."""
    loop = with_fault(groups, tmp_path)
    faults = loop.machine.checkpoints
    codes = []
    for device in ("A", "A", "B"):
        again = Loop(groups, tmp_path, device=device, limits=Limits(max_restarts=2))
        again.load(faults)
        again.run(4, again.machine.replayable(again.source(4)), {3: device == "A"})
        codes.append(again.machine.decision.exit_code)
    assert codes == [16, 20, 18]
    tried = with_fault(groups, tmp_path / "tried")
    for code in (16, 20, None):
        again = Loop(groups, tmp_path / "tried", limits=Limits(max_restarts=2))
        again.load(tried.machine.checkpoints)
        again.run(5, again.machine.replayable(again.source(4)), {3: 1 if code else 0})
        assert again.machine.decision.exit_code == code
    assert any("its verdict is known: undecided" in line for line in again.lines)
    assert again.taken == [3, 4]


def two_stages(context: RankContext, directory: str) -> list[int | None]:
    """Exit codes of starts of two pipeline stages, each on devices that were never used before."""
    codes: list[int | None] = []
    with ProcessGroups.create(Layout(pp=2)) as groups:
        for start in range(8):
            machine = RerunMachine(
                groups,
                directory=directory,
                replayed=Replayed(),
                limits=Limits(max_restarts=2),
                device=DeviceIdentity(host="h", uuid=f"{start}-{context.rank}"),
                note=lambda line: None,
            )
            state = {"rerun": machine}
            with Checkpointer(machine.checkpoints, groups=groups) as faults:
                if start:
                    faults.load(state)
                batches = machine.replayable(itertools.repeat(1.0), is_rewound=True)
                for _ in machine.attempts(3, batches):
                    next(batches)
                    machine.validate("loss", math.nan if start == 0 else 1.0, NotFinite())
                if machine.decision.save:
                    faults.save(3, state)
            code = machine.decision.exit_code
            codes.append(None if code is None else int(code))
            if code is None:
                break
    return codes


def test_fresh_devices_at_every_start_do_not_hold_a_job_up_for_ever(tmp_path: Path) -> None:
    """D10: who of the first two was broken stays open; after an undecided end good values count."""
    for codes in run_ranks(2, two_stages, str(tmp_path)).results:
        assert codes == [16, 16, 20, None]


def test_a_fault_that_is_over_is_not_preferred_any_more(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """Training has passed its step: a good checkpoint is newer, whatever its number is."""
    loop = with_fault(groups, tmp_path)
    good, faults = tmp_path / "good", loop.machine.checkpoints

    def resume_point(device: str) -> tuple[Loop, int | None, bool]:
        start = Loop(groups, tmp_path, device=device)
        with (
            Checkpointer(good, groups=groups) as ordinary,
            Checkpointer(faults, groups=groups) as kept,
        ):
            point = start.machine.resume_point(ordinary, kept)
            return start, point and point[1], point is not None and point[0] is kept

    start, step, is_fault = resume_point("B")
    assert (step, is_fault) == (3, True)
    start.load(faults)
    start.run(4, start.machine.replayable(start.source(4)))
    assert start.machine.decision.exit_code == 18
    start, step, is_fault = resume_point("B")
    assert (step, is_fault) == (3, True)  # the verdict is known, and the step is still to be done
    start.load(faults)
    start.run(4, start.machine.replayable(start.source(4)))
    assert start.step == 4
    start.step = 2  # someone has gone back to an older state
    start.save(good)
    _, step, is_fault = resume_point("B")
    assert (step, is_fault) == (2, False)


def test_verdicts_reach_the_caller_and_diagnostics_the_report(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """A hook that fails says so in the report; a caller's function that fails is an error."""
    seen: list[Mapping[str, Any]] = []
    loop = with_fault(groups, tmp_path, diagnose=lambda: "memory ok", on_verdict=seen.append)
    assert seen == []
    again = Loop(groups, tmp_path, device="B", on_verdict=seen.append)
    again.load(loop.machine.checkpoints)
    again.run(4, again.machine.replayable(again.source(4)))
    assert [(each["verdict"], each["step"]) for each in seen] == [("persistent_error", 3)]
    assert seen[0]["convicted"] == [{"host": "h", "device": "A"}]
    (event,) = [e for e in read_report(tmp_path / "rerun") if e["event"] == "diagnostics"]
    assert [(each["device"], each["text"]) for each in event["results"]] == [("A", "memory ok")]

    def fail(*arguments: object) -> str:
        raise RuntimeError("no such tool")

    with_fault(groups, tmp_path / "failing", diagnose=fail)
    (event,) = [e for e in read_report(tmp_path / "failing/rerun") if e["event"] == "diagnostics"]
    assert "no such tool" in event["results"][0]["text"]
    loud = Loop(groups, tmp_path / "loud", on_verdict=fail)
    with pytest.raises(Exception, match="no such tool"):
        loud.run(2, loud.machine.replayable(loud.source()), {1: 1})


def test_a_report_that_has_no_room_is_not_taken_for_that_of_another_machine(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D24: an error that names the disk, and once there is room the fault gets its verdict."""
    first = Loop(groups, tmp_path)
    first.run(2, first.machine.replayable(first.source()), {1: 1})
    loop = Loop(groups, tmp_path)
    batches = loop.machine.replayable(loop.source())
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(StorageError, match=r"report.*cannot be written"):
            loop.run(2, batches, {1: 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    loop.run(2, batches, {1: 1})
    assert loop.machine.decision.exit_code == 17
    verdicts = [e["job"] for e in read_report(tmp_path / "rerun") if e["event"] == "verdict"]
    assert len({*verdicts}) == len(verdicts) == 2


def test_a_policy_trains_on_what_is_right(groups: ProcessGroups, tmp_path: Path) -> None:
    """D7: with "continue" a transient error costs one more run, and no bit."""
    plain = Loop(groups, tmp_path / "plain")
    plain.run(4, plain.machine.replayable(plain.source()))
    loop = Loop(groups, tmp_path, policy=Policy(on_transient="continue"))
    loop.run(4, loop.machine.replayable(loop.source()), {2: 1})
    assert (loop.step, loop.machine.decision.exit_code) == (4, None)
    pairs = zip(plain.model.parameters(), loop.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert loop.taken == [0, 1, 2, 2, 3]


def test_who_feeds_a_value_is_checked_at_its_first_call(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D19: ranks outside of the layout, axes that it does not have, or without this rank."""
    machine = RerunMachine(groups, directory=tmp_path, replayed=Replayed())
    for _ in machine.attempts(0):
        for fed_by in ("all", "tp", "tp-cp", [0], (0,), None):
            machine.validate("loss", 1.0, NotFinite(), fed_by=fed_by)
        machine.validate("loss", 1.0, NotFinite(), local=True)
        for wrong in ("rows", [], [1], [0, 7], 3, ["x"]):
            with pytest.raises(ConfigError, match="fed_by"):
                machine.validate("loss", 1.0, NotFinite(), fed_by=wrong)  # type: ignore[arg-type]


def test_a_disabled_machine_refuses_at_once(groups: ProcessGroups, tmp_path: Path) -> None:
    """A value that would wait for the end of the step elsewhere does not here."""
    loop = Loop(groups, tmp_path, mode="disabled")
    with pytest.raises(FaultError, match="NaN"):
        loop.run(1, loop.machine.replayable(loop.source()), {0: 1})


def test_a_resume_waits_for_what_a_killed_process_has_saved(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D9: its writer may still commit a checkpoint, which is the one to continue from."""

    class Root:
        committed = False

        def latest(self) -> int:
            self.committed = True
            return 4

        def steps(self) -> list[int]:
            return [2, 4] if self.committed else [2]

    good, faults = Root(), Root()
    assert Loop(groups, tmp_path).machine.resume_point(good, faults) == (faults, 4)

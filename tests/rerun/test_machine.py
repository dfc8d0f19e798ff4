"""A machine, its checkpoints and its loop, with real checkpoints of one process."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import (
    Checkpointer,
    Layout,
    ModuleGroups,
    ModuleLayouts,
    PerRank,
    ProcessGroups,
)
from holdfast.arrays.boxes import Box
from holdfast.errors import ConfigError, CorruptionError, DriftError, FaultError
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.verifier import verify_snapshot
from holdfast.parallel.layout import DENSE_AXES
from holdfast.rerun import (
    DeviceIdentity,
    ErrorInjector,
    Limits,
    Mode,
    NotFinite,
    Policy,
    Rejects,
    RejectsAny,
    Replayed,
    RerunMachine,
    Spike,
    State,
    read_report,
)
from holdfast.storage import PosixStorage
from tests.harness import RankContext, run_ranks
from tests.rerun.threads import ThreadGroups, run_threads


class Loop:
    """A small training loop with a machine, as a user writes one; values are bad on request."""

    def __init__(self, groups: ProcessGroups, root: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.root = root
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lines: list[str] = []
        device = options.pop("device", "A")
        wrapped = options.pop("wrapped", True)
        options.setdefault("directory", root / "rerun")
        self.machine = RerunMachine(
            groups,
            replayed=Replayed(modules=[self.model]),
            device=DeviceIdentity(host="h", uuid=device),
            note=self.lines.append,
            **options,
        )
        self.step = 0
        self.taken: list[float] = []
        self.batches: Any = None
        self.wrapped = wrapped
        self.checkpointer = Checkpointer(root / "good", groups=groups)
        self.groups = groups

    def state(self) -> dict[str, object]:
        from holdfast import RNG

        progress = {"step": self.step, "position": self.step}
        return {
            "model": self.model,
            "rng": RNG(),
            "progress": progress,
            "rerun": self.machine,
        }

    def source(self) -> Iterator[torch.Tensor]:
        for index in itertools.count(self.step):
            self.taken.append(index)
            yield torch.full((8, 4), float(index + 1))

    def run(
        self, until: int, bad: dict[int, list[float]] | None = None, *, fatal: bool = True
    ) -> None:
        """Run to a step; `bad` has the values of the first runs of some steps."""
        if self.batches is None:
            source = self.source()
            self.batches = self.machine.replayable(source) if self.wrapped else source
        while self.step < until:
            runs = iter((bad or {}).get(self.step, []))
            for _ in self.machine.attempts(self.step, self.batches):
                self.optimizer.zero_grad()
                inputs = next(self.batches)
                loss = self.model(inputs).square().mean()
                loss.backward()
                inputs.fill_(math.nan)  # a program may do with its batch as it likes
                value = next(runs, loss.item())
                self.machine.validate("loss", value, NotFinite(), fatal=fatal)
                self.machine.validate("spike", 1.0, Spike(num_samples=2, window=7))
            if self.machine.decision.exit_code is not None:
                return
            self.optimizer.step()
            self.step += 1

    def save_fault(self) -> None:
        with Checkpointer(self.machine.checkpoints, groups=self.groups) as faults:
            faults.save(self.step, self.state(), overwrite=True)

    def load(self, root: Path) -> Any:
        with Checkpointer(root, groups=self.groups) as checkpointer:
            report = checkpointer.load(self.state())
        self.step = report.values["progress"]["step"]
        return report

    def params(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self.model.state_dict().values()]


def equal(first: Loop, second: Loop) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.params(), second.params(), strict=True))


def entry_leaves(root: Path, step: int) -> dict[str, list[Any]]:
    """Key -> dtype and shape of a machine's leaves in a checkpoint."""
    manifest = json.loads((root / step_dir(step) / "manifest.json").read_bytes())
    return {each[0]: each[1:3] for each in manifest["tensors"] if each[0].startswith("rerun")}


def test_a_steady_and_a_fault_save_of_one_step(groups: ProcessGroups, tmp_path: Path) -> None:
    """D1, D2: both are there; the entry has the same leaves but the fault's; one plan for all."""
    loop = Loop(groups, tmp_path)
    for step in (1, 2, 3):
        loop.run(step)
        loop.checkpointer.save(step, loop.state())
    assert loop.checkpointer.stats.num_plan_reuses == 2
    loop.run(5, {3: [math.nan, math.nan]})
    assert loop.machine.state is State.WILL_RERUN_FROM_CHECKPOINT
    assert (loop.machine.decision.exit_code, loop.machine.decision.save) == (16, True)
    loop.save_fault()
    # The same checkpointer takes it as well: its plan is made again once, for the leaves of the
    # fault, and once more when the fault has gone.
    loop.checkpointer.save(3, loop.state(), overwrite=True)
    assert loop.checkpointer.stats.num_plan_reuses == 2
    after = Loop(groups, tmp_path, device="B")
    after.load(tmp_path / "good")
    assert after.machine.fault is not None
    after.run(4, {3: [math.nan]})
    assert after.machine.decision.exit_code == 19
    after.checkpointer.save(5, after.state())
    good = [entry_leaves(tmp_path / "good", step) for step in (2, 3, 5)]
    assert good[0] == good[2]
    assert set(good[0]) == {"rerun[cp=0,dp=0,pp=0,tp=0].learned.spike"}
    for leaves in (good[1], entry_leaves(loop.machine.checkpoints, 3)):
        assert {key: leaves[key] for key in good[0]} == good[0]
        (batch,) = [key for key in leaves if ".fault.batches." in key]
        assert batch == "rerun[cp=0,dp=0,pp=0,tp=0].fault.batches.0.batch.v"
        assert leaves[batch] == ["F32", [8, 4]]
    resumed = Loop(groups, tmp_path, device="B")
    resumed.load(loop.machine.checkpoints)
    assert resumed.machine.state is State.WILL_RERUN_FROM_CHECKPOINT
    assert resumed.machine.fault is not None
    assert (resumed.machine.fault.step, resumed.machine.fault.device) == (3, "A")
    loop.checkpointer.close()


def test_kept_batches_are_leaves_with_digests(groups: ProcessGroups, tmp_path: Path) -> None:
    """D2: `verify` and a load find a damaged byte of a batch, by the batch's key."""
    loop = Loop(groups, tmp_path)
    loop.run(4, {3: [math.nan, math.nan]})
    loop.save_fault()
    storage = PosixStorage(loop.machine.checkpoints)
    key = "rerun[cp=0,dp=0,pp=0,tp=0].fault.batches.0.batch.v"
    with Snapshot.open(storage, step_dir(3)) as snapshot:
        kept = bytearray(8 * 4 * 4)
        snapshot.read_box(key, Box((0, 0), (8, 4)), memoryview(kept))
    assert kept == torch.full((8, 4), 4.0).numpy().tobytes()
    assert not verify_snapshot(storage, step_dir(3))
    (data,) = (loop.machine.checkpoints / step_dir(3) / "data").iterdir()
    content = bytearray(data.read_bytes())
    at = content.index(kept)
    content[at] ^= 1
    data.write_bytes(content)
    (damage,) = verify_snapshot(storage, step_dir(3))
    assert damage.key == key
    with pytest.raises(CorruptionError):
        Loop(groups, tmp_path, device="B").load(loop.machine.checkpoints)


def test_a_persistent_error_names_its_device(groups: ProcessGroups, tmp_path: Path) -> None:
    """D8, D9: bad twice on A, good on B; the batches are the saved ones wherever the loader is."""
    undisturbed = Loop(groups, tmp_path / "undisturbed")
    undisturbed.run(6)
    loop = Loop(groups, tmp_path)
    loop.run(6, {3: [math.nan, math.nan]})
    loop.save_fault()
    resumed = Loop(groups, tmp_path, device="B")
    resumed.load(loop.machine.checkpoints)
    resumed.step = 50  # where the loader begins, which the saved batches make irrelevant
    resumed.batches = resumed.machine.replayable(resumed.source())
    resumed.step = 3
    resumed.run(4, fatal=False)
    assert resumed.taken == []
    assert resumed.machine.decision.exit_code == 18
    events = read_report(tmp_path / "rerun")
    verdicts = [each for each in events if each["event"] == "verdict"]
    assert [each["verdict"] for each in verdicts] == ["persistent_error"]
    assert verdicts[0]["devices"] == ["h, A (rank 0 then)"]
    (value,) = verdicts[0]["values"]
    assert (value["before"], value["first_device"], value["device"]) == ("nan", "A", "B")
    # The next start goes on as from any checkpoint, and ends as if nothing had been.
    last = Loop(groups, tmp_path, device="B")
    last.load(loop.machine.checkpoints)
    last.step = 4
    last.batches = last.machine.replayable(last.source())  # behind the batches of the step
    last.step = 3
    last.run(6)
    assert last.machine.decision.exit_code is None
    assert last.taken == [4, 5]
    assert equal(last, undisturbed)
    assert sum("dropped" in line for line in last.lines) == 1


def test_a_transient_error_that_is_not_fatal(groups: ProcessGroups, tmp_path: Path) -> None:
    """D7: the run goes on with the good run, and no bit differs."""
    undisturbed = Loop(groups, tmp_path / "u")
    undisturbed.run(6)
    loop = Loop(groups, tmp_path)
    loop.run(6, {2: [math.inf]}, fatal=False)
    assert loop.taken == list(range(6))
    assert equal(loop, undisturbed)
    assert not loop.machine.checkpoints.exists()
    assert [e["verdict"] for e in read_report(tmp_path / "rerun") if e["event"] == "verdict"] == [
        "transient_error"
    ]


def test_the_entry_is_optional(groups: ProcessGroups, tmp_path: Path) -> None:
    """D2, D3, D4: present, absent, unknown, disabled: no load is refused."""
    with_entry, without = (
        Loop(groups, tmp_path / "with"),
        Loop(groups, tmp_path / "without", mode="disabled"),
    )
    for loop in (with_entry, without):
        loop.run(2)
        loop.checkpointer.save(2, loop.state())
    manifest = (tmp_path / "without" / "good" / step_dir(2) / "manifest.json").read_text()
    assert '"rerun"' not in manifest
    for mode, root in itertools.product(("disabled", "validate_results"), ("with", "without")):
        loop = Loop(groups, tmp_path / f"{mode}{root}", mode=mode)
        report = loop.load(tmp_path / root / "good")
        is_missing = mode != "disabled" and root == "without"
        assert report.missing == (("rerun",) if is_missing else ())
        loop.run(3)
    unknown = Loop(groups, tmp_path / "unknown")
    with Checkpointer(tmp_path / "with" / "good", groups=groups) as checkpointer:
        report = checkpointer.load({k: v for k, v in unknown.state().items() if k != "rerun"})
    assert report.not_requested == ("rerun",)


def test_an_iterator_that_is_not_wrapped(groups: ProcessGroups, tmp_path: Path) -> None:
    """D6: it will do for steady saves, and is refused by name when a rerun needs it."""
    loop = Loop(groups, tmp_path, wrapped=False)
    loop.run(2)
    loop.checkpointer.save(2, loop.state())
    with pytest.raises(ConfigError, match=r"'loss' on rank 0 .* nan.*generator.*replayable"):
        loop.run(4, {3: [math.nan]})
    watched = RerunMachine(groups, directory=tmp_path / "o", note=print, replayed=Replayed())
    watched.observe("update", math.nan, NotFinite())
    assert len([*watched.attempts(0, iter("ab"))]) == 1
    # The step whose optimizer carries what was observed would be used on other batches.
    watched.observe("update", math.nan, NotFinite())
    runs = iter(watched.attempts(1, iter("ab")))
    next(runs)
    watched.take_decision(watched.vetoes())
    with pytest.raises(ConfigError, match=r"step 1: .*observed before it.*str_\w*iterator.*replay"):
        next(runs)
    wrapped = Loop(groups, tmp_path / "w")
    wrapped.run(4, {3: [math.nan, math.nan]})
    wrapped.save_fault()
    resumed = Loop(groups, tmp_path / "w", wrapped=False, device="B")
    resumed.load(wrapped.machine.checkpoints)
    with pytest.raises(ConfigError, match=r"pending fault.*replayable"):
        resumed.run(4)


def test_starts_that_reach_no_call_are_bounded(groups: ProcessGroups, tmp_path: Path) -> None:
    """D10: a start that dies, or does not validate, counts; then the outcome is undecided."""
    loop = Loop(groups, tmp_path)
    loop.run(4, {3: [math.nan, math.nan]})
    loop.save_fault()
    limits = Limits(max_restarts=2)
    for _ in range(2):  # starts that die within the step
        died = Loop(groups, tmp_path, device="B", limits=limits)
        died.load(loop.machine.checkpoints)
        died.batches = died.machine.replayable(died.source())
        next(iter(died.machine.attempts(3, died.batches)))
    third = Loop(groups, tmp_path, device="B", limits=limits)
    third.load(loop.machine.checkpoints)
    third.run(4)
    assert third.machine.decision.exit_code == 20
    fourth = Loop(groups, tmp_path, device="B", limits=limits)
    fourth.load(loop.machine.checkpoints)
    fourth.run(5)
    assert fourth.machine.decision.exit_code is None
    silent = Loop(groups, tmp_path / "silent")
    silent.run(4, {3: [math.nan, math.nan]})
    silent.save_fault()
    for code in (16, 20):
        again = Loop(groups, tmp_path / "silent", device="B", limits=limits)
        again.load(silent.machine.checkpoints)
        again.batches = again.machine.replayable(again.source())
        for _ in again.machine.attempts(3, again.batches):
            next(again.batches)
        assert again.machine.decision.exit_code == code
        assert not again.machine.decision.save


def _grow(context: RankContext, root: str, layout: Layout) -> list[str]:
    """Load a fault checkpoint of two ranks under another layout, and go on."""
    del context
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with ProcessGroups.create(layout) as groups:
        lines: list[str] = []
        machine = RerunMachine(groups, directory=Path(root) / "rerun", note=lines.append)
        weight = torch.zeros(3)
        state = {"model": {"weight": weight}, "rerun": machine}
        if layout.dp == 2 and not (Path(root) / "rerun").exists():
            batches = machine.replayable(itertools.repeat(1.0))
            for _ in machine.attempts(7, batches):
                next(batches)
                value = math.nan if groups.rank == 1 else 1.0
                machine.validate("loss", value, NotFinite())
            assert machine.decision.exit_code == 16
            with Checkpointer(machine.checkpoints, groups=groups) as faults:
                faults.save(7, state)
            return lines
        with Checkpointer(machine.checkpoints, groups=groups) as faults:
            faults.load(state)
        if layout.dp == 2:
            assert machine.fault is not None
            assert machine.state is State.WILL_RERUN_FROM_CHECKPOINT
            assert len(machine.fault.suspects) == groups.rank
            return lines
        assert machine.state is State.NOT_RUNNING_YET
        batches = machine.replayable(itertools.repeat(1.0))
        for _ in machine.attempts(7, batches):
            next(batches)
            machine.validate("loss", 1.0, NotFinite())
        assert machine.decision.exit_code is None
        return lines


def test_another_layout_drops_the_context_and_goes_on(tmp_path: Path) -> None:
    """D1, D5: each rank has its own context under the same layout; under others it is dropped."""
    run_ranks(2, _grow, str(tmp_path), Layout(dp=2))
    run_ranks(2, _grow, str(tmp_path), Layout(dp=2))
    for layout in (Layout(dp=3), Layout(tp=2)):
        results = run_ranks(layout.world_size, _grow, str(tmp_path), layout).results
        lines = [line for rank_lines in results for line in rank_lines]
        assert len(lines) == 1
        assert "another layout" in lines[0]
        assert "step 7" in lines[0]


def _rearrange(context: RankContext, root: str) -> list[tuple[list[str], list[float], list[int]]]:
    """Load a fault checkpoint where the same coordinates are other parts of the model.

    Returns:
        For each arrangement lines, what was learned of two calls, and the batches of the step.
    """
    del context
    vision, language = Layout(), Layout(ranks=(1,))
    edges = [("vision", "language")]
    layouts: list[Any] = [
        ModuleLayouts({"vision": vision, "language": language}, edges=edges, name="before"),
        ModuleLayouts({"vision": language, "language": vision}, edges=edges, name="after"),
        Layout(dp=2),
        Layout(dp=2, ep=2),
    ]
    seen = []
    with contextlib.ExitStack() as stack:
        for number, layout in enumerate(layouts):
            is_first = number % 2 == 0
            if isinstance(layout, ModuleLayouts):
                modules = stack.enter_context(ModuleGroups.create(layout))
                groups, has_fault = modules.union, modules.has("language")
            else:
                groups, has_fault = stack.enter_context(ProcessGroups.create(layout)), True
            lines: list[str] = []
            directory = Path(root) / str(number // 2)
            machine = RerunMachine(groups, directory=directory, note=lines.append)
            taken: list[int] = []
            batches = machine.replayable(itertools.count(0 if is_first else 10))
            with Checkpointer(machine.checkpoints, groups=groups) as faults:
                if not is_first:
                    faults.load({"rerun": machine})
                learned = [*machine.learned.of("$x"), *machine.learned.of("$y")]
                for step in range(0 if is_first else 1, 2):
                    for _ in machine.attempts(step, batches):
                        taken.append(next(batches))
                        value = math.nan if is_first and step and has_fault else 2.0
                        rule = RejectsAny(NotFinite(), Spike(num_samples=1, window=3))
                        machine.validate("$x" if has_fault else "$y", value, rule)
                if is_first:
                    assert machine.decision.exit_code == 16
                    faults.save(1, {"rerun": machine})
                else:
                    assert machine.decision.exit_code is None
                    seen.append((lines, learned, taken))
    return seen


def test_other_parts_of_a_model_at_the_same_coordinates_drop_the_context(tmp_path: Path) -> None:
    """D5, D15, D19: modules on other ranks, whose batches are others'; experts laid out otherwise,

    where a good run would clear devices that have not done the work.
    """
    results = run_ranks(2, _rearrange, str(tmp_path)).results
    for rank, (modules, experts) in enumerate(results):
        # A union numbers its ranks: the batches at a coordinate may be those of another module.
        assert modules[1:] == ([2.0, 2.0], [10])
        assert experts[1:] == ([2.0], [1])
        assert ["another layout" in line for line in modules[0]] == [True] * (rank == 0)
        assert ["experts are laid out otherwise" in each for each in experts[0]] == [True] * (
            rank == 0
        )


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_determinism_is_measured(groups: ProcessGroups, tmp_path: Path, noise: float) -> None:
    """D13: injected noise of 1e-3 is reported; without it both runs are identical."""
    loop = Loop(groups, tmp_path, mode="report_determinism_stats", report_every=5)
    undisturbed = Loop(groups, tmp_path / "u")
    undisturbed.run(10)
    generator = torch.Generator().manual_seed(1)
    loop.batches = loop.machine.replayable(loop.source())
    torch.manual_seed(0)
    loop = Loop(groups, tmp_path, mode="report_determinism_stats", report_every=5)
    loop.batches = loop.machine.replayable(loop.source())
    while loop.step < 10:
        for _ in loop.machine.attempts(loop.step, loop.batches):
            loop.optimizer.zero_grad()
            loss = loop.model(next(loop.batches)).square().mean()
            loss.backward()
            factor = 1 + noise * (1 + torch.rand((), generator=generator).item())
            loop.machine.validate("loss", 1.0 + loss.item() * 0 + factor, NotFinite())
        loop.optimizer.step()
        loop.step += 1
    assert equal(loop, undisturbed)
    reports = [e for e in read_report(tmp_path / "rerun") if e["event"] == "determinism"]
    assert [each["num_steps"] for each in reports] == [5, 10]
    calls = reports[-1]["calls"]["loss"]
    assert calls["num_compared"] == 10
    assert calls["num_identical"] == (10 if noise == 0 else 0)
    assert calls["largest"] == 0 if noise == 0 else 1e-6 < calls["largest"] < 1e-3
    assert ("identical" if noise == 0 else "differ") in loop.lines[-1].splitlines()[-1]


@pytest.mark.parametrize(
    "odd",
    [
        {"learned": {"loss": "text"}},
        {"statistics": {"loss": 3}},
        {"statistics": {"loss": {"num_compared": 1}}},
        {"injector": {"settled": []}},
        {"injector": {"settled": [], "devices": {"1:dp=0": {"name": "A"}}}},
        {"fault": {"fault": "x"}},
        None,
    ],
)
def test_an_entry_that_cannot_be_read_is_left_with_one_line(
    groups: ProcessGroups, tmp_path: Path, odd: dict[str, Any] | None
) -> None:
    """As a later version may write it: the run resumes, and is told."""
    faulty = Loop(groups, tmp_path / "faulty")
    faulty.run(1, {0: [math.nan, math.nan]})
    faulty.save_fault()
    first = Loop(groups, tmp_path)
    first.run(2)
    tree = {"version": 1, "fault": None} | odd if odd is not None else {"version": 9}
    entry = PerRank(tree, axes=DENSE_AXES)
    with Checkpointer(tmp_path / "good", groups=groups) as checkpointer:
        checkpointer.save(2, first.state() | {"rerun": entry})
    injector = ErrorInjector(10**9)
    resumed = Loop(groups, tmp_path, injector=injector)
    resumed.load(faulty.machine.checkpoints)  # another state: its fault ends with it
    resumed.load(tmp_path / "good")
    (line,) = resumed.lines
    assert "cannot be read, and is ignored" in line
    assert resumed.machine.state is State.NOT_RUNNING_YET
    assert not resumed.machine.learned.state_dict()
    resumed.run(4)
    assert resumed.machine.decision.exit_code is None


def test_both_runs_of_a_compared_step_need_the_same_batches(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D13: an iterator that is not wrapped would give the second run others."""
    loop = Loop(groups, tmp_path, mode="report_determinism_stats", wrapped=False)
    with pytest.raises(ConfigError, match=r"runs twice.*generator.*replayable"):
        loop.run(1)


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_is_accepted_by_its_name(
    groups: ProcessGroups, tmp_path: Path, mode: Mode
) -> None:
    """D13: and by nothing else."""
    loop = Loop(groups, tmp_path, mode=mode.value)
    loop.run(2)
    assert loop.machine.mode is mode
    with pytest.raises(ConfigError, match="disabled, validate_results, report_determinism_stats"):
        RerunMachine(groups, mode="report_stats", directory=tmp_path)


def test_a_spike_is_measured_by_what_was_learned_before_a_resume(
    groups: ProcessGroups, tmp_path: Path
) -> None:
    """D15: the baseline is in the checkpoint, and a rerun learns nothing twice."""
    spike = Spike(factor=3, num_samples=4, window=4)

    def values(machine: RerunMachine, steps: range, value: float) -> None:
        for step in steps:
            for _ in machine.attempts(step):
                machine.validate("loss", value, spike, fatal=False)

    first = RerunMachine(groups, directory=tmp_path / "a", note=print)
    values(first, range(4), 1.0)
    with Checkpointer(tmp_path / "c", groups=groups) as checkpointer:
        checkpointer.save(4, {"rerun": first})
        second = RerunMachine(groups, directory=tmp_path / "b", note=print)
        checkpointer.load({"rerun": second})
    values(second, range(4, 5), 2.5)
    assert second.decision.exit_code is None
    assert not (tmp_path / "b" / "report.jsonl").exists()
    values(second, range(5, 6), 9.0)
    assert second.decision.exit_code == 16
    fresh = RerunMachine(groups, directory=tmp_path / "f", note=print)
    values(fresh, range(4, 5), 9.0)
    assert fresh.decision.exit_code is None


def test_two_machines_know_nothing_of_each_other(groups: ProcessGroups, tmp_path: Path) -> None:
    """D16: a fault of one model does not rerun the other."""

    def body(own: ThreadGroups) -> tuple[int, int]:
        # Rank 0 and 1 hold one model together; each holds a second one alone.
        together = RerunMachine(
            own,  # type: ignore[arg-type]
            name="together",
            directory=tmp_path / "together",
            replayed=Replayed(rng=False),
            note=print,
        )
        alone = RerunMachine(
            groups,
            name="alone",
            directory=tmp_path / f"alone{own.rank}",
            replayed=Replayed(rng=False),
            note=print,
        )
        runs = [0, 0]
        for step in range(3):
            for number in together.attempts(step):
                runs[0] += 1
                bad = step == 1 and own.rank == 0 and number == 0
                together.validate("loss", math.nan if bad else 1.0, NotFinite(), fatal=False)
            for _ in alone.attempts(step):
                runs[1] += 1
                alone.validate("loss", 1.0, NotFinite())
        return runs[0], runs[1]

    assert run_threads(2, body) == [(4, 3), (4, 3)]

    assert (tmp_path / "together" / "report.jsonl").exists()
    assert not (tmp_path / "alone0").exists()
    assert not (tmp_path / "alone1").exists()


@pytest.mark.parametrize("mode", [Mode.VALIDATE_RESULTS, Mode.DISABLED])
def test_attempts_inside_of_those_of_another_machine_are_refused(
    groups: ProcessGroups, tmp_path: Path, mode: Mode
) -> None:
    """D16: a fault of the outer one would lose batches of the inner one, in whatever mode it is."""
    outer = RerunMachine(groups, name="outer", directory=tmp_path / "outer", note=print)
    inner = RerunMachine(groups, name="inner", directory=tmp_path / "inner", note=print, mode=mode)
    batches = inner.replayable(range(9))

    def nest() -> None:
        for _ in outer.attempts(0):
            for _ in inner.attempts(0, batches):
                next(batches)

    with pytest.raises(ConfigError, match=r"'inner' was started inside .*'outer'"):
        nest()
    # A loop that was left is not inside any more; what was refused has taken no batch.
    for _ in outer.attempts(0):
        break
    for _ in inner.attempts(0, batches):
        assert next(batches) == 0
    for number in outer.attempts(1):
        outer.validate("loss", math.nan if number == 0 else 1.0, NotFinite(), fatal=False)
    for _ in inner.attempts(1, batches):
        assert next(batches) == 1


def test_one_small_collective_a_step(tmp_path: Path) -> None:
    """Nothing else is sent while nothing is wrong."""

    def body(own: ThreadGroups) -> int:
        machine = RerunMachine(
            own,  # type: ignore[arg-type]
            directory=tmp_path,
            replayed=Replayed(rng=False),
            note=print,
        )
        batches = machine.replayable(itertools.count())
        before = own.control._meeting.num_collectives
        for step in range(10):
            for _ in machine.attempts(step, batches):
                for _ in range(4):
                    machine.validate("loss", float(next(batches)), NotFinite())
        own.control.all_gather(b"", phase="end")
        return own.control._meeting.num_collectives - before

    assert run_threads(3, body)[0] in (12, 13)


@pytest.mark.parametrize("place", ["activation", "value"])
@pytest.mark.parametrize("kind", ["transient_error", "persistent_error", "correct_result"])
def test_injected_errors_drive_it_all(
    groups: ProcessGroups, tmp_path: Path, kind: str, place: str
) -> None:
    """D17: at most three starts; what was injected where is in the checkpoint."""
    undisturbed = Loop(groups, tmp_path / "u")
    undisturbed.run(6)
    points = [f"{step}:cp=0,dp=0,pp=0,tp=0" for step in range(6)]
    seed = next(
        seed
        for seed in range(1000)
        if [p for p in points if ErrorInjector(6, seed=seed).is_hit(p)] == [points[3]]
    )
    codes = []
    for device in ("A", "B", "C"):
        injector = ErrorInjector(6, kind, seed=seed)  # type: ignore[arg-type]
        loop = Loop(groups, tmp_path, device=device, injector=injector)
        if place == "activation":
            injector.modules = (loop.model[0],)
        if loop.machine.checkpoints.exists():
            loop.load(loop.machine.checkpoints)
            step, loop.step = loop.step, loop.step + 1
            loop.batches = loop.machine.replayable(loop.source())
            loop.step = step
        loop.run(6)
        codes.append(loop.machine.decision.exit_code)
        if loop.machine.decision.save:
            loop.save_fault()
        if codes[-1] is None:
            break
    expected = {
        "transient_error": [17, None],
        "persistent_error": [16, 18, None],
        "correct_result": [16, 19, None],
    }
    assert codes == expected[kind]
    assert equal(loop, undisturbed)
    assert not loop.model[0]._forward_hooks


def test_a_step_that_is_bad_everywhere_is_skipped(groups: ProcessGroups, tmp_path: Path) -> None:
    """D18: rejected in two jobs on one rank; several ranks in one job are not enough."""
    loop = Loop(groups, tmp_path, skip_rejected=True)
    loop.run(4, {3: [math.nan, math.nan]})
    loop.save_fault()
    again = Loop(groups, tmp_path, skip_rejected=True, device="B")
    again.load(loop.machine.checkpoints)
    assert not again.machine.skips(3)
    again.run(4, {3: [math.nan]})
    assert again.machine.decision.exit_code == 19
    third = Loop(groups, tmp_path, skip_rejected=True, device="B")
    assert [step for step in range(6) if third.machine.skips(step)] == [3]
    for is_rewound in (False, True):
        # The scheduler starts the job again: it goes on from the fault checkpoint, behind the step.
        fourth = Loop(groups, tmp_path, skip_rejected=True, device="B")
        fourth.load(loop.machine.checkpoints)
        assert fourth.step == 3
        source = iter([torch.full((8, 4), float(i)) for i in range(4 if is_rewound else 5, 9)])
        fourth.batches = fourth.machine.replayable(source, is_rewound=is_rewound)
        evaluated = fourth.machine.replayable(iter([]))
        with pytest.raises(ConfigError, match=r"2 iterators .*machine\.skips\(step, batches\)"):
            fourth.machine.skips(3)
        assert fourth.machine.skips(3, fourth.batches)
        assert fourth.machine.skips(3)
        del evaluated
        assert next(fourth.batches)[0, 0] == 4.0  # as it was kept: the batch of step 3
        fourth.step = 4
        for _ in fourth.machine.attempts(4, fourth.batches):
            assert next(fourth.batches)[0, 0] == 5.0
        assert fourth.machine.decision.exit_code is None

    def several(own: ThreadGroups) -> bool:
        machine = RerunMachine(
            own,  # type: ignore[arg-type]
            directory=tmp_path / "several",
            skip_rejected=True,
            replayed=Replayed(rng=False),
            note=print,
        )
        for _ in machine.attempts(0):
            machine.validate("loss", math.nan, NotFinite())
        return machine.skips(0)

    run_threads(2, several)
    rejected = [e for e in read_report(tmp_path / "several") if e["event"] == "rejected"]
    assert [len(each["values"]) for each in rejected] == [2]
    assert run_threads(2, lambda own: _skips(own, tmp_path)) == [False, False]


def _skips(own: ThreadGroups, tmp_path: Path) -> bool:
    machine = RerunMachine(
        own,  # type: ignore[arg-type]
        directory=tmp_path / "several",
        skip_rejected=True,
        note=print,
    )
    return machine.skips(0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "disabled"}, r"disagree on mode: validate_results on ranks 0, 1; disabled on ra"),
        ({"name": "other"}, "disagree on name"),
        ({"limits": Limits(max_restarts=1)}, "disagree on limits"),
        ({"policy": Policy(on_transient="continue")}, "disagree on policy"),
        ({"device": "cpu"}, "rank 2: device must be a device, got 'cpu'"),
        ({"report_every": 7}, "disagree on report_every: 100 on ranks 0, 1; 7 on rank 2"),
        ({"skip_rejected": True}, "disagree on skip_rejected"),
        ({"mode": "report_determinism_stats", "directory": None}, "disagree on mode"),
    ],
)
def test_ranks_with_machines_of_other_settings_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    def make(own: ThreadGroups) -> str:
        own_options = {"directory": tmp_path} | (options if own.rank == 2 else {})
        with pytest.raises(ConfigError, match=expected) as refused:
            RerunMachine(own, note=print, **own_options)  # type: ignore[arg-type]
        return str(refused.value)

    assert len(set(run_threads(3, make))) == 1


def test_a_disabled_machine_still_refuses(groups: ProcessGroups) -> None:
    """Without a rerun a fatal rejected value is an error, and one that is not, a line."""
    lines: list[str] = []
    machine = RerunMachine(groups, mode="disabled", note=lines.append)
    for _ in machine.attempts(0, iter([1])):
        machine.validate("grad", math.inf, NotFinite(), fatal=False)
        with pytest.raises(FaultError, match="'loss' on rank 0"):
            machine.validate("loss", math.nan, NotFinite())
    assert len(lines) == 1


def test_loops_that_cannot_be_right_are_refused(groups: ProcessGroups, tmp_path: Path) -> None:
    """By name, and before anything is trained on."""
    machine = RerunMachine(groups, directory=tmp_path, note=print)
    with pytest.raises(ConfigError, match="outside of a run"):
        machine.validate("loss", 1.0, NotFinite())
    for _ in machine.attempts(0):
        machine.validate("loss", math.nan, NotFinite())
    assert machine.decision.exit_code == 16
    with pytest.raises(ConfigError, match="exit code 16"):
        next(iter(machine.attempts(1)))
    with pytest.raises(ConfigError, match="directory"):
        RerunMachine(groups)
    batches = RerunMachine(groups, directory=tmp_path / "b", note=print)
    wrapped = batches.replayable(iter([lambda: None]))
    next(batches.attempts(0, wrapped))
    with pytest.raises(ConfigError, match="function"):
        next(wrapped)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, "is nan (it is NaN)"),
        (torch.tensor([1.0, math.nan]), "is 1, nan (1 of its 2 elements is NaN"),
        (torch.full((64,), -math.inf), "is -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, "),
    ],
)
def test_rejected_values_are_readable(
    groups: ProcessGroups, tmp_path: Path, value: Any, shown: str
) -> None:
    lines: list[str] = []
    machine = RerunMachine(groups, directory=tmp_path, note=lines.append)
    for _ in machine.attempts(0):
        machine.validate("value", value, NotFinite())
    assert shown in lines[0]


def test_a_loop_that_is_left_can_be_entered_again(groups: ProcessGroups, tmp_path: Path) -> None:
    """An exception in a step, that the caller catches, does not wedge the machine."""
    machine = RerunMachine(groups, directory=tmp_path, note=print)
    for _ in machine.attempts(0):
        break
    for _ in machine.attempts(1):
        machine.validate("loss", 1.0, Rejects(lambda value: value > 2, "too large"))
    assert machine.state is State.NOT_RUNNING_YET


def _drift(context: RankContext, root: str) -> list[dict[str, Any]]:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with ProcessGroups.create(Layout(dp=3)) as groups:
        machine = RerunMachine(
            groups,
            directory=Path(root) / "rerun",
            device=DeviceIdentity(host="h", uuid=f"gpu{context.rank}"),
            note=print,
        )
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0 if context.rank != 1 else 1.0 + 2**-20)
        nn.init.zeros_(model.bias)
        with Checkpointer(Path(root) / "c", groups=groups) as checkpointer:
            try:
                checkpointer.save(1, {"model": model}, check_replicas=True)
            except DriftError as error:
                machine.record_drift(error)
    return read_report(Path(root) / "rerun")


def test_a_rank_whose_replicas_drift_is_in_the_report(tmp_path: Path) -> None:
    """Wrong but finite values: the odd rank is named with its device."""
    events = run_ranks(3, _drift, str(tmp_path)).results[0]
    (event,) = [each for each in events if each["event"] == "drift"]
    assert [(each["rank"], each["device"]) for each in event["values"]] == [(1, "gpu1")]
    assert "model.weight" in event["message"]

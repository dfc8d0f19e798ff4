"""Another data replica runs what was bad twice: the verdict falls within the step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import (
    RNG,
    Bridge,
    Checkpointer,
    Layout,
    ModuleGroups,
    ModuleLayouts,
    OptimizerState,
    ProcessGroups,
)
from holdfast.errors import ConfigError
from holdfast.optim import ShardedOptimizer, collectives
from holdfast.rerun import (
    DeviceIdentity,
    NotFinite,
    Rejects,
    RejectsAny,
    Replayed,
    RerunMachine,
    Spike,
    read_report,
)
from tests.harness import RankContext, run_ranks
from tests.rerun.job import load_entry, save_entry

NUM_STEPS, AT = 4, 2
RULE = RejectsAny(NotFinite(), Rejects(lambda loss: loss > 1e3, "is a spike"))


def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """What a broken multiplier does to an activation."""
    del module, inputs
    return output.index_fill(1, torch.tensor([1]), math.nan)


class Running(nn.Module):
    """Follows the mean of its inputs, per rank, in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x - self.mean


class Job:
    """Two data replicas of a model with dropout and a running mean, each on a device of its own.

    Args:
        groups: of two ranks.
        root: of everything.
        kind: of the fault of rank 1's device or data at step `AT`; empty for none.
        devices: by rank.
        has_veto: whether the optimizer's sum carries what ranks reject.
        options: of the machine.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        root: Path,
        *,
        kind: str,
        devices: tuple[str, str] = ("A", "B"),
        has_veto: bool = False,
        fatal: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.groups, self.root, self.kind, self.fatal = groups, root, kind, fatal
        self.has_veto = has_veto
        self.device = devices[groups.rank]
        self.model = nn.Sequential(nn.Linear(4, 8), Running(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = ShardedOptimizer(
            self.model,
            self.model.parameters(),
            make=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            groups=groups,
            over="dp_cp",
            divisor=2,
            elementwise=True,
        )
        torch.manual_seed(1 + groups.rank)
        self.lines: list[str] = []
        self.machine = RerunMachine(
            groups,
            directory=root / "rerun",
            replayed=Replayed(modules=[self.model]),
            optimizers=[self.optimizer],
            device=DeviceIdentity(host=f"host {self.device}", uuid=self.device),
            note=self.lines.append,
            **options,
        )
        self.step = 0
        self.taken: list[int] = []
        self.first_bad = True

    def source(self) -> Iterator[torch.Tensor]:
        """Batches of this rank; NaN in one if the data is what is bad."""
        for number in itertools.count(2 * self.step):
            self.taken.append(number)
            generator = torch.Generator().manual_seed(1000 * self.groups.rank + number)
            batch = torch.randn(6, 4, generator=generator)
            if self.kind == "correct_result" and (self.groups.rank, number) == (1, 2 * AT):
                batch[3] = 1e5  # finite: only who rejects it knows
            yield batch

    def is_broken(self) -> bool:
        """Whether this rank's device computes wrong now."""
        if self.step != AT or self.device != "B":
            return False
        if self.kind == "transient_error" and self.first_bad:
            self.first_bad = False
            return True
        return self.kind == "persistent_error"

    def run(self, until: int = NUM_STEPS) -> int | None:
        """Train; the exit code."""
        batches = self.machine.replayable(self.source(), is_rewound=True)
        while self.step < until:
            for _ in self.machine.attempts(self.step, batches):
                self.optimizer.drop_gradients()
                hook = self.model[0].register_forward_hook(spoil) if self.is_broken() else None
                for number in range(2):
                    with self.optimizer.microbatch(is_last=number == 1):
                        loss = self.model(next(batches)).square().mean()
                        loss.backward()
                    self.machine.validate("loss", loss, RULE, fatal=self.fatal)
                if hook is not None:
                    hook.remove()
                if self.has_veto:
                    self.optimizer.step(veto=self.machine)
            decision = self.machine.decision
            if decision.exit_code is not None:
                if decision.save:
                    self.optimizer.drop_gradients()
                    with Checkpointer(self.machine.checkpoints, groups=self.groups) as faults:
                        faults.save(self.step, self.state(), overwrite=True)
                return int(decision.exit_code)
            if not self.has_veto:
                self.optimizer.step()
            self.step += 1
        return None

    def state(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": OptimizerState(self.optimizer, self.model),
            "rng": RNG(),
            "progress": {"step": self.step},
            "rerun": self.machine,
        }

    def resume(self) -> None:
        """Load the fault's checkpoint."""
        with Checkpointer(self.machine.checkpoints, groups=self.groups) as faults:
            self.step = faults.load(self.state()).values["progress"]["step"]

    def params(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()
        return [each.detach().clone() for each in self.model.state_dict().values()]


def same(first: Job, second: Job) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.params(), second.params(), strict=True))


def verdicts(root: Path) -> list[tuple[str, list[str]]]:
    """Verdicts of the report, with the devices they blame."""
    return [
        (each["verdict"], [device["device"] for device in each["convicted"]])
        for each in read_report(root / "rerun")
        if each["event"] == "verdict"
    ]


def play(context: RankContext, directory: str, has_veto: bool) -> list[str]:
    """Every kind of fault on two ranks; what was not as it should be."""
    del context
    wrong: list[str] = []
    root = Path(directory)

    def check(is_right: bool, what: str) -> None:
        if not is_right:
            wrong.append(what)

    with ProcessGroups.create(Layout(dp=2)) as groups:
        good = Job(groups, root / "good", kind="", has_veto=has_veto)
        check(good.run() is None, "good")
        before = Job(groups, root / "before", kind="", has_veto=has_veto)
        before.run(AT)
        for kind, code in (("persistent_error", 18), ("correct_result", 19)):
            job = Job(groups, root / kind, kind=kind, has_veto=has_veto)
            check(job.run() == code, f"{kind}: code {job.machine.decision}")
            check(job.machine.decision.save, f"{kind}: save")
            blamed = ["B"] if kind == "persistent_error" else []
            check(verdicts(root / kind) == [(kind, blamed)], f"{kind}: {verdicts(root / kind)}")
            after = Job(groups, root / kind, kind="", devices=("A", "C"), has_veto=has_veto)
            after.resume()
            check(after.step == AT, f"{kind}: resumed at {after.step}")
            check(same(after, before), f"{kind}: the state is not that before the step")
            if kind == "persistent_error":
                check(after.run() is None, f"{kind}: {after.machine.decision}")
                check(same(after, good), f"{kind}: other bits")
        for kind in ("transient_error", "persistent_error"):
            # Not fatal: the verdict is known, and the run goes on with its own batches.
            name = f"{kind} not fatal"
            job = Job(groups, root / name, kind=kind, fatal=False, has_veto=has_veto)
            job.run(AT + 1)
            check(job.machine.decision.exit_code is None, name)
            check([each[0] for each in verdicts(root / name)] == [kind], f"{name} {job.lines}")
            if kind == "transient_error":
                job.run()
                check(same(job, good), f"{name}: other bits")
        shared = Job(groups, root / "one", kind="persistent_error", devices=("B", "B"))
        check(shared.run() == 16, "one device for both replicas: nothing to ask")
        unasked = Job(groups, root / "off", kind="persistent_error", second_opinion=False)
        check(unasked.run() == 16, "not asked")
    return wrong


@pytest.mark.parametrize("has_veto", [False, True])
def test_a_verdict_falls_within_the_step(tmp_path: Path, has_veto: bool) -> None:
    """D23: where another data replica has devices of its own; bits are those of a good run."""
    results = run_ranks(2, play, str(tmp_path), has_veto).results
    assert results == [[], []]


def count(context: RankContext, directory: str) -> tuple[int, int]:
    """Collectives of control in ten steps with a machine, with a veto and without."""
    del context
    made = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for has_veto in (True, False):
            job = Job(groups, Path(directory) / str(has_veto), kind="", has_veto=has_veto)
            job.run(2)  # the first step looks at the state
            sums: list[int] = []
            reduce = collectives.all_reduce

            def counted(*args: Any, reduce: Any = reduce, sums: list[int] = sums, **kw: Any) -> Any:
                sums.append(args[0].nbytes)
                return reduce(*args, **kw)

            collectives.all_reduce = counted
            before = groups.control.num_collectives
            try:
                job.run(12)
            finally:
                collectives.all_reduce = reduce
            made.append((groups.control.num_collectives - before, sums.count(8)))
    return made[0][0] * 1000 + made[0][1], made[1][0] * 1000 + made[1][1]


def test_nothing_is_sent_while_nothing_is_wrong(tmp_path: Path) -> None:
    """The optimizer's own sum carries the word of each rank; else one sum of 8 bytes does."""
    plain = run_ranks(2, count, str(tmp_path)).results[0]
    with_veto, without = (divmod(each, 1000) for each in plain)
    assert without[0] == with_veto[0]
    assert (with_veto[1], without[1]) == (0, 10)


def inside(context: RankContext, directory: str) -> str:
    del context
    with ProcessGroups.create(Layout(dp=2)) as groups:
        job = Job(groups, Path(directory), kind="")
        batches = job.machine.replayable(job.source())
        try:
            for _ in job.machine.attempts(0, batches):
                job.model(next(batches)).mean().backward()
                job.optimizer.step()
        except ConfigError as error:
            return str(error)
    return ""


def test_a_sharded_optimizer_that_steps_inside_the_loop_has_to_ask(tmp_path: Path) -> None:
    """Its writes show in no counter of autograd."""
    for message in run_ranks(2, inside, str(tmp_path)).results:
        assert "by a step of ShardedOptimizer" in message


def compared(context: RankContext, directory: str) -> tuple[bool, float]:
    """Train in the mode that runs every step twice, with a veto, and without a machine's word."""
    del context
    with ProcessGroups.create(Layout(dp=2)) as groups:
        plain = Job(groups, Path(directory) / "plain", kind="", has_veto=True)
        plain.run()
        job = Job(
            groups,
            Path(directory) / "twice",
            kind="",
            has_veto=True,
            mode="report_determinism_stats",
            report_every=1,
        )
        job.run()
        return same(job, plain), job.machine.statistics.report()["loss"]["largest"]


def test_a_step_that_runs_twice_is_updated_once(tmp_path: Path) -> None:
    """D13: the first of both runs has a veto, whatever it has shown."""
    assert run_ranks(2, compared, str(tmp_path)).results == [(True, 0.0)] * 2


def misuse(context: RankContext, directory: str) -> str:
    del context
    with ProcessGroups.create(Layout(dp=2)) as groups:
        job = Job(groups, Path(directory), kind="")
        veto = job.machine if groups.rank == 0 else None
        job.model(torch.ones(2, 4)).mean().backward()
        try:
            job.optimizer.step(veto=veto)
        except ConfigError as error:
            return str(error)
    return ""


def test_a_veto_is_asked_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    for message in run_ranks(2, misuse, str(tmp_path)).results:
        assert "veto" in message


class Level(nn.Module):
    """Divides by what its last input was, per rank, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) / self.level
        self.level.copy_(x.detach().mean())
        return out


def with_broadcast(context: RankContext, directory: str) -> tuple[int | None, str]:
    """Steps of torch's DDP; in the third one all ranks divide by the zero that rank 0 has seen."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = Level()
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=groups.group("dp_cp"))
        machine = RerunMachine(
            groups,
            directory=directory,
            replayed=Replayed(modules=[model]),
            device=DeviceIdentity(host="h", uuid=f"GPU {context.rank}"),
            note=lambda line: None,
        )
        numbers = [1.0, float(context.rank), 1.0]
        batches = machine.replayable(torch.full((2, 1), each) for each in numbers)
        for step in range(3):
            for _ in machine.attempts(step, batches):
                loss = wrapped(next(batches)).sum().item()
                machine.validate("loss", loss, NotFinite(), local=True)
        return machine.decision.exit_code, machine.decision.message


def test_buffers_that_a_forward_has_from_the_first_replica_are_not_those_of_another(
    tmp_path: Path,
) -> None:
    """D23: with those of the other one all values were good, and both devices convicted."""
    for code, message in run_ranks(2, with_broadcast, str(tmp_path)).results:
        assert code == 19, message


def plain_loop(context: RankContext, directory: str, case: str) -> tuple[int | None, list[str]]:
    """One step of a loop without an optimizer; rank 1 rejects its value twice."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0 + (context.rank if case == "parameters" else 0))
        first = {"count": 10 * context.rank}
        counter = dict(first)

        def save() -> object:
            return object() if case == "kept" else counter

        def restore(saved: Any) -> None:
            counter.update(first if case == "kept" else saved)

        hook = save, restore
        lines: list[str] = []
        machine = RerunMachine(
            groups,
            directory=directory,
            replayed=Replayed(modules=[model], hooks=[hook]),
            device=DeviceIdentity(host="h", uuid=f"GPU {context.rank}"),
            note=lines.append,
        )
        source = iter([torch.full((1, 1), float(context.rank))] * 5)
        batches: Any = source if case == "batches" else machine.replayable(source)
        magnitude = Spike(num_samples=1, window=3)
        for _ in machine.attempts(0, None if case == "batches" else batches):
            machine.validate("magnitude", 1.0 + context.rank, magnitude)
        for _ in machine.attempts(1, None if case == "batches" else batches):
            machine.validate("magnitude", 1.0 + context.rank, magnitude)
            # Whose step it is shows in the batch and in the state of the hook alike.
            value = model(next(batches)).item() + counter["count"]
            counter["count"] += 100
            machine.validate("loss", value, Rejects(lambda each: each > 10, "too large"))
        assert machine.learned.of("magnitude") == [1.0 + context.rank]
        return machine.decision.exit_code, lines


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("", 19, "another data replica runs it"),
        ("parameters", 16, "hold other parameters"),
        ("batches", 16, "do not come from machine.replayable"),
        ("kept", 16, "hook 0"),
    ],
)
def test_a_second_opinion_is_given_only_where_runs_are_the_same(
    tmp_path: Path, case: str, code: int, words: str
) -> None:
    """D23: equal parameters, batches that can be sent, states of hooks as well."""
    results = run_ranks(2, plain_loop, str(tmp_path), case).results
    assert [each[0] for each in results] == [code, code]
    assert any(words in line for line in results[0][1]), results[0][1]


def of_modules(context: RankContext, directory: str, kind: str) -> list[tuple[int | None, str]]:
    """Starts of a job of two modules, one replica of whose encoder has bad data or a bad device.

    Returns:
        Of each start the exit code, and the convicted devices.
    """
    rank = context.rank
    layouts = ModuleLayouts(
        {"vision": Layout(dp=2), "language": Layout(dp=2, ranks=(2, 3))},
        edges=[("vision", "language")],
    )
    endings: list[tuple[int | None, str]] = []
    entry: Any = None
    with ModuleGroups.create(layouts) as groups:
        bridge = Bridge(groups, "vision", "language")
        for devices in ("ABCD", "ABCX", "AYCX"):
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            machine = RerunMachine(
                groups.union,
                directory=directory,
                replayed=Replayed(modules=[model]),
                device=DeviceIdentity(host="h", uuid=devices[rank]),
                note=lambda line: None,
            )
            if entry is not None:
                load_entry(machine, entry)
            has_data = kind == "data" and rank == 1
            source = (torch.full((2, 4), math.nan if has_data else 1.0) for _ in range(3))
            batches = machine.replayable(source)
            for _ in machine.attempts(1, batches):
                inputs, tokens, loss = next(batches), None, torch.zeros(())
                if groups.has("vision"):
                    tokens = model(inputs)
                    if (kind, devices[rank]) == ("device", "B"):
                        tokens = tokens * math.nan
                bridged = bridge(tokens, None if tokens is None else [1, 1])
                if groups.has("language"):
                    loss = model(bridged.tokens).square().mean()
                    machine.validate("loss", loss, NotFinite())
                (loss + bridged.anchor).backward()
                model.zero_grad()
            entry = save_entry(machine)
            verdict = verdicts(Path(directory).parent)[-1:] or [("", [])]
            endings.append((machine.decision.exit_code, "".join(verdict[0][1])))
            if endings[-1][0] != 16:
                return endings
    return endings


@pytest.mark.parametrize(
    ("kind", "expected"), [("device", [(16, ""), (16, ""), (18, "B")]), ("data", [(19, "")])]
)
def test_a_module_that_feeds_another_feeds_its_values(
    tmp_path: Path, kind: str, expected: list[tuple[int | None, str]]
) -> None:
    """D19, D23: the language model's devices alone are neither convicted nor proof for the data."""
    results = run_ranks(4, of_modules, str(tmp_path / "rerun"), kind).results
    assert results == [expected] * 4


def fully_sharded(context: RankContext, directory: str) -> list[str]:
    """Errors of loops over a model of torch's FSDP2 with one step that runs again."""
    errors = []
    with ProcessGroups.create(Layout(dp=2)) as groups:
        for drops in (True, False):
            model = nn.Linear(4, 4)
            fully_shard(model, mesh=groups.mesh("dp_cp"))
            root = Path(directory) / str(drops)
            machine = RerunMachine(groups, directory=root, replayed=Replayed(modules=[model]))
            error = ""
            try:
                for step in range(2):
                    for number in machine.attempts(step, None):
                        if drops:
                            model.zero_grad()
                        loss = model(torch.ones(2, 4)).square().mean()
                        loss.backward()
                        is_bad = (step, number) == (1, 0)
                        machine.validate(
                            "loss", math.nan if is_bad else loss, NotFinite(), fatal=False
                        )
            except ConfigError as reason:
                error = str(reason)
            errors.append(error)
    return errors


def test_gradients_of_a_fully_sharded_model_are_not_in_an_update_twice(tmp_path: Path) -> None:
    """D7: autograd calls no hook at a shard, so the loop has to drop them before the forward."""
    for dropped, kept in run_ranks(2, fully_sharded, str(tmp_path)).results:
        assert not dropped
        assert "were there before the step (bias, weight)" in kept


def sharded_from_zeros(context: RankContext, directory: str) -> tuple[int | None, str]:
    """Decision on a value that is bad twice, of a model whose shards are equal at first."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = nn.Linear(4, 4)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        fully_shard(model, mesh=groups.mesh("dp_cp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        machine = RerunMachine(
            groups,
            directory=directory,
            replayed=Replayed(modules=[model]),
            device=DeviceIdentity(host="h", uuid=f"GPU {context.rank}"),
            note=lambda line: None,
        )
        batches = machine.replayable(itertools.repeat(torch.ones(2, 4)))
        for step in range(2):
            for _ in machine.attempts(step, batches):
                optimizer.zero_grad()
                loss = (model(next(batches)) - torch.arange(4.0)).square().mean()
                loss.backward()
                is_bad = step == 1 and context.rank == 1
                machine.validate("loss", math.nan if is_bad else loss, NotFinite())
            optimizer.step()
        return machine.decision.exit_code, machine.decision.message


def test_shards_are_not_replicas_that_have_drifted(tmp_path: Path) -> None:
    """D20: not even if they were equal before the first step, as zeros are."""
    for code, message in run_ranks(2, sharded_from_zeros, str(tmp_path)).results:
        assert code == 16, message

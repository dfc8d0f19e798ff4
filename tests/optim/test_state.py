"""Sharded optimizer state: saved under one layout, loaded under every other, bitwise (row E7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import Checkpointer, Layout, MismatchError, OptimizerState, ProcessGroups
from holdfast.optim import ChainedOptimizer, ShardedOptimizer
from holdfast.state.module_tree import parameter_names
from tests.checkpoint.common import files_of, full
from tests.harness import RankContext, run_ranks
from tests.optim.common import Net, adamw, build, groups_of, sharded, train, whole
from tests.optim.experts import build_sparse, chain, rows_of

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"tp": 1, "dp": 1},
    "dp2": {"tp": 1, "dp": 2, "stage": 1},
    "dp3": {"tp": 1, "dp": 3, "stage": 2, "bucket_nbytes": 4096, "align_nbytes": 128},
    "dp4": {"tp": 1, "dp": 4, "stage": 1},
    "tp2dp2": {"tp": 2, "dp": 2, "stage": 2, "bucket_nbytes": 4096},
    "hybrid": {"tp": 1, "dp": 4, "replicas": 2, "over": "dp_cp_intra"},
    "whole dtensors": {"tp": 2, "dp": 2, "torch": True},
    "dp2 plain": {"tp": 1, "dp": 2, "declared": False},
    "dp1": {"tp": 1, "dp": 1, "stage": 1},
}
"""How a run is laid out; "plain" and "whole dtensors" use the torch optimizer itself."""


def ranks_of(way: str) -> int:
    return int(WAYS[way]["tp"] * WAYS[way]["dp"])


class Run:
    """One rank's model and optimizer, laid out one way."""

    def __init__(self, way: str, *, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        options = dict(WAYS[way])
        layout = Layout(
            tp=options.pop("tp"), dp=options.pop("dp"), replicas=options.pop("replicas", 1)
        )
        self.groups = (
            ProcessGroups.create(layout) if layout.world_size > 1 else ProcessGroups.single()
        )
        if options.get("over") == "dp_cp_intra":
            self.groups.clone("dp_cp_intra", purpose="dp_cp_intra_ag")
        declared = options.pop("declared", True)
        self.net = build(self.groups if declared else None, seed=seed, dtype=dtype)
        self.optimizer: Any
        if way == "plain" or options.pop("torch", False):
            self.optimizer = adamw(groups_of(self.net))
        else:
            self.optimizer = sharded(self.net, adamw, self.groups, **options)

    def state(self) -> dict[str, object]:
        return {"model": self.net, "optimizer": OptimizerState(self.optimizer, self.net)}

    def moments(self) -> dict[str, Tensor]:
        """Every entry of the state as a whole tensor of its own run of elements, by name."""
        names = parameter_names(self.net)
        found: dict[str, Tensor] = {}
        if not isinstance(self.optimizer, ShardedOptimizer):
            for parameter, entries in self.optimizer.state.items():
                for entry, value in entries.items():
                    found[f"{names[cast('nn.Parameter', parameter)]}.{entry}"] = value
            return found
        for held in self.optimizer.optimizer_parameters():
            if held.updated is not None:
                for entry, value in held.optimizer.state.get(held.updated, {}).items():
                    found[f"{names[held.parameter]}.{entry}"] = value
        return found


def truth(name: str, shape: torch.Size, entry: str) -> Tensor:
    """The one true value of an entry, from its name."""
    value = full(f"{name}.{entry}", tuple(shape))
    return value.abs() if entry == "exp_avg_sq" else value


def fill(run: Run) -> None:
    """Give model and state the true values, as a torch run of seven steps could have."""
    for held, name in named(run):
        local = local_part(held.parameter, truth(name, held.parameter.shape, "value"))
        if held.updated is None:
            continue
        state: dict[str, Tensor] = {"step": torch.tensor(7.0)}
        for entry in ("exp_avg", "exp_avg_sq"):
            part = local_part(held.parameter, truth(name, held.parameter.shape, entry))
            state[entry] = cut(held, part).clone()
        held.optimizer.state[held.updated] = state
        del local
    with torch.no_grad():
        for name, parameter in run.net.named_parameters():
            storage = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            storage.copy_(local_part(parameter, truth(name, parameter.shape, "value")))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.125


def named(run: Run) -> list[tuple[Any, str]]:
    """Held parameters that are trained, with names; torch optimizers hold them whole."""
    from holdfast.state.optimizer_state import UnshardedOptimizer

    optimizer = run.optimizer
    holder = optimizer if isinstance(optimizer, ShardedOptimizer) else UnshardedOptimizer(optimizer)
    names = parameter_names(run.net)
    held = [h for h in holder.optimizer_parameters() if h.parameter.requires_grad]
    return [(h, names[h.parameter]) for h in held]


def local_part(parameter: Tensor, value: Tensor) -> Tensor:
    """What this rank holds of a whole value placed like a parameter; cut by torch itself."""
    if not isinstance(parameter, DTensor):
        return value
    placed = distribute_tensor(
        value, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return placed.to_local()


def cut(held: Any, local: Tensor) -> Tensor:
    """The run that is held of a local tensor; the placement of the parameter where it is whole."""
    if held.over is None:
        parameter = held.parameter
        if isinstance(parameter, DTensor):
            return DTensor.from_local(
                local.clone(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return local
    return local.reshape(-1)[held.start : held.start + held.updated.numel()]


def save_as(context: RankContext, root: str, way: str, step: int) -> list[str]:
    run = Run(way)
    with run.groups:
        fill(run)
        Checkpointer(root, groups=run.groups).save(step, run.state())
        return sorted(run.moments())


def load_as(context: RankContext, root: str, way: str, steps: list[int]) -> int:
    """Load these steps into a run that began elsewhere, and compare with the truth, bit by bit."""
    compared = 0
    run = Run(way, seed=9)
    with run.groups:
        checkpointer = Checkpointer(root, groups=run.groups)
        for step in steps:
            scramble(run)
            checkpointer.load(run.state(), step=step)
            for group in run.optimizer.param_groups:
                assert group["lr"] == 0.125
            for name, parameter in run.net.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                expected = local_part(parameter, truth(name, parameter.shape, "value"))
                assert torch.equal(local.detach(), expected), (step, name)
            for held, name in named(run):
                if held.updated is None:
                    continue
                entries = held.optimizer.state[held.updated]
                assert float(entries["step"]) == 7.0
                for entry in ("exp_avg", "exp_avg_sq"):
                    part = local_part(held.parameter, truth(name, held.parameter.shape, entry))
                    got, expected = entries[entry], cut(held, part)
                    if isinstance(got, DTensor):
                        got, expected = got.to_local(), cast("DTensor", expected).to_local()
                    assert torch.equal(got, expected), (way, step, name, entry)
                    compared += got.numel()
    return compared


def scramble(run: Run) -> None:
    """Nothing of an earlier load may pass for this one."""
    for held, _ in named(run):
        if held.updated is not None:
            for value in held.optimizer.state.get(held.updated, {}).values():
                value.fill_(-1.0)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)],
)
def test_every_layout_loads_what_every_other_saved(tmp_path: Path, stride: int) -> None:
    """dp 2 -> 3 -> 4 -> 1, tp at the same time, sharded to whole and back; in two rings.

    The truth is known element by element, so a right load proves its save, too. That any box
    of any split is read right is proved without processes: `test_reader`, `test_assign_readers`.
    """
    for step, way in enumerate(WAYS):
        num_ranks = ranks_of(way)
        entries = run_ranks(
            num_ranks, save_as, str(tmp_path), way, step, init=num_ranks > 1
        ).results
        assert any("embed.exp_avg" in found for found in entries)
    numel = 2 * sum(p.numel() for p in Net().parameters() if p.requires_grad)
    for number, way in enumerate(WAYS):
        num_ranks = ranks_of(way)
        steps = [(number - stride) % len(WAYS)]
        args = (str(tmp_path), way, steps)
        compared = run_ranks(num_ranks, load_as, *args, init=num_ranks > 1).results
        if WAYS[way]["tp"] == 1 and "torch" not in WAYS[way] and way != "hybrid":
            assert sum(compared) == numel * len(steps), way  # each element on one rank only


def low_precision(context: RankContext, root: str) -> dict[str, Any]:
    """bf16 with float32 main parameters: numerics, state, and what follows a load."""
    reports: dict[str, Any] = {}
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = build(groups, dtype=torch.bfloat16)
        optimizer = sharded(net, adamw, groups, stage=2)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        train(net, optimizer, groups, steps=range(3))
        checkpointer = Checkpointer(root, groups=groups)
        checkpointer.save(1, state)
        mains = {
            id(h): h.updated.clone()
            for h in optimizer.optimizer_parameters()
            if h.updated is not None
        }
        assert any((main.bfloat16().float() != main).any() for main in mains.values())
        after = [p.to_local().clone() for p in net.parameters()]  # type: ignore[attr-defined]
        train(net, optimizer, groups, steps=range(3, 5))
        optimizer.synchronize()
        reports["on"] = [p.to_local().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]

        def check_mains(expected: dict[int, Tensor]) -> None:
            for held in optimizer.optimizer_parameters():
                if held.updated is not None:
                    assert torch.equal(held.updated, expected[id(held)])

        for names in (["model", "optimizer"], ["optimizer", "model"], ["optimizer"]):
            train(net, optimizer, groups, steps=range(5, 6))
            checkpointer.load({name: state[name] for name in names}, step=1)
            check_mains(mains)
            optimizer.synchronize()
            for parameter, value in zip(net.parameters(), after, strict=True):
                if parameter.requires_grad or "model" in names:
                    assert torch.equal(parameter.to_local(), value), names  # type: ignore[attr-defined]
        # the resumed run goes on bitwise
        checkpointer.load(state, step=1)
        train(net, optimizer, groups, steps=range(3, 5))
        optimizer.synchronize()
        reports["again"] = [p.to_local().detach().clone() for p in net.parameters()]  # type: ignore[attr-defined]
        # weights alone: main parameters follow them exactly
        checkpointer.load({"model": net}, step=1)
        check_mains({key: main.bfloat16().float() for key, main in mains.items()})
    return reports


def into_other_precisions(context: RankContext, root: str) -> None:
    """What bf16 saved loads where parameters are their own main ones, and where none are kept."""
    with ProcessGroups.create(Layout(dp=3)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        wide = build(groups, seed=4)
        optimizer = sharded(wide, adamw, groups)
        checkpointer.load(
            {"model": wide, "optimizer": OptimizerState(optimizer, wide)}, step=1, cast=True
        )
        optimizer.synchronize()
        plain = build(groups, seed=5)
        torch_optimizer = adamw(groups_of(plain))
        checkpointer.load(
            {"model": plain, "optimizer": OptimizerState(torch_optimizer, plain)}, step=1, cast=True
        )
        differs = False
        for a, b in zip(wide.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(a), whole(b))
            differs = differs or bool((whole(a).bfloat16().float() != whole(a)).any())
        assert differs  # more than the bf16 weights came back
        narrow = build(groups, seed=6, dtype=torch.bfloat16)
        narrow_optimizer = adamw(groups_of(narrow))
        checkpointer.load(
            {"model": narrow, "optimizer": OptimizerState(narrow_optimizer, narrow)}, step=1
        )
        for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
            assert torch.equal(whole(a).bfloat16(), whole(b)), a.shape


def test_main_parameters_of_low_precision(tmp_path: Path) -> None:
    for reports in run_ranks(2, low_precision, str(tmp_path)).results:
        for a, b in zip(reports["on"], reports["again"], strict=True):
            assert torch.equal(a, b)
    run_ranks(3, into_other_precisions, str(tmp_path))


class Largest(TorchDispatchMode):
    """The largest new memory that any operator inside asks for, in bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def measure_save(context: RankContext, root: str) -> tuple[int, int, int]:
    """Bytes of this rank's state, bytes it writes, and the largest tensor made while saving."""
    with ProcessGroups.create(Layout(dp=4)) as groups:
        net = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 250))
        optimizer = ShardedOptimizer(
            net,
            net.parameters(),
            make=adamw,
            groups=groups,
            over="dp_cp",
            divisor=4,
            elementwise=True,
        )
        with optimizer.microbatch(is_last=True):
            net(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        state = {"optimizer": OptimizerState(optimizer, net)}
        checkpointer = Checkpointer(root, groups=groups)
        with Largest() as largest:
            report = checkpointer.save(1, state)
        held = sum(
            value.numel() * value.element_size()
            for entries in optimizer.inner.state.values()
            for value in entries.values()
        )
        # equal state, equal bytes: padding and whatever memory held before are not in the files
        checkpointer.save(2, state)
        return held, report.nbytes, largest.nbytes


def test_a_save_needs_no_more_than_the_own_shard(tmp_path: Path) -> None:
    whole_nbytes = 2 * 4 * (200 * 300 + 300 + 300 * 250 + 250)
    total = 0
    for held, written, largest in run_ranks(4, measure_save, str(tmp_path)).results:
        assert held < whole_nbytes / 4 + 1024
        assert written <= held + 64
        assert largest <= held  # no gather, no copy of more than the shard
        total += written
    assert whole_nbytes <= total <= whole_nbytes + 1024
    first, second = (files_of(tmp_path / f"iter_{step:07d}" / "data") for step in (1, 2))
    assert first == second


def with_experts(
    context: RankContext, root: str, ep: int, dp: int, stage: int
) -> dict[str, Tensor]:
    """Load the newest step if there is one, else train three; then save, and show the state."""
    with ProcessGroups.create(Layout(dp=dp, ep=ep)) as groups:
        net = build_sparse(groups)
        optimizer = chain(net, adamw, groups, stage=stage)
        state = {"model": net, "optimizer": OptimizerState(optimizer, net)}
        checkpointer = Checkpointer(root, groups=groups)
        last = checkpointer.latest()
        if last is None:
            for step in range(3):
                with optimizer.microbatch(is_last=True):
                    net(rows_of(step, groups)).mean().backward()
                optimizer.step()
        else:
            checkpointer.load(state)
        checkpointer.save((last or 0) + 1, state)
        optimizer.close()
        fewer = ChainedOptimizer(
            {
                "dense": ShardedOptimizer(
                    net, [net.dense, net.bias], make=adamw, groups=groups, over="dp_cp",
                    divisor=dp, name="dense", elementwise=True,
                )
            }
        )  # fmt: skip
        with pytest.raises(
            MismatchError, match=r"optimizer 'dense' has 1 parameter groups.* has 2"
        ):
            checkpointer.load({"optimizer": OptimizerState(fewer, net)})
        return {}


def one_process(context: RankContext, root: str) -> dict[str, Tensor]:
    """The same checkpoints in one process, with the torch optimizer."""
    found: dict[str, Tensor] = {}
    for step in Checkpointer(root).steps():
        net = build_sparse()
        optimizer = adamw(
            [{"params": [net.dense, net.mixers]}, {"params": [net.bias], "weight_decay": 0.0}]
        )
        report = Checkpointer(root).load(
            {"model": net, "optimizer": OptimizerState(optimizer, net)}, step=step
        )
        assert not report.unexpected
        for name, parameter in net.named_parameters():
            found[f"{step}.{name}"] = parameter.detach()
            for entry, value in optimizer.state[parameter].items():
                found[f"{step}.{name}.{entry}"] = value
    return found


def test_experts_move_between_expert_layouts(tmp_path: Path) -> None:
    for dp, ep, stage in ((4, 2, 1), (4, 4, 2), (2, 1, 1), (3, 1, 2)):
        run_ranks(dp, with_experts, str(tmp_path), ep, dp, stage)
    (found,) = run_ranks(1, one_process, str(tmp_path), init=False).results
    assert len(found) == 4 * 3 * 4
    for name, value in found.items():
        step, _, rest = name.partition(".")
        assert torch.equal(value, found[f"1.{rest}"]), name
        assert step == "1" or value.numel() == 1 or bool(value.abs().sum() > 0)

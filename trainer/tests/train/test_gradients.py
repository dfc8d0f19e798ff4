"""The gradient norm counts every element once, and everyone hears of a bad one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from holdfast.errors import FaultError
from holdfast.optim import GradientNorm, gradient_norm
from holdfast.optim.engine import clip_factor
from holdfast.optim.norms import scale_gradients
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.train.loop import Trainer, mean_over_rows
from tests.harness import RankContext, run_ranks
from trainer.tests.train.test_resume import config_of, text, workplace

__all__ = ["workplace"]

PLACEMENTS: tuple[tuple[Placement, ...], ...] = (
    (Replicate(), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    (Shard(0), Shard(1)),
)


# Their sum depends on the order: 1 is lost beside 1e16.
ROWS = [1.0, 1e16, 1.0, 1.0, -1e16, 1.0]


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 4, generator=generator) * 10**i for i in range(len(PLACEMENTS) + 1)]


def expected() -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients()))


def measure(rank: RankContext) -> dict[str, object]:
    seen: dict[str, object] = {}
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        mesh = groups.mesh("dp_cp", "tp")
        parameters = []
        for full, placements in zip(gradients(), (*PLACEMENTS, None), strict=True):
            value = full if placements is None else distribute_tensor(full, mesh, placements)
            parameter = nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
            parameters.append(parameter)
        seen["norm"] = gradient_norm(parameters, groups=groups)
        for limit in (0.0, 1e9, 2.0):
            norm = gradient_norm(parameters, groups=groups)
            scale_gradients(parameters, clip_factor(norm, limit=limit))
            seen[f"clipped {limit:g}"] = gradient_norm(parameters, groups=groups).value
        share = torch.tensor(ROWS, dtype=torch.float64).view(2, -1)[groups.index("dp_cp")]
        seen["mean"] = mean_over_rows(share, num_rows=len(share), groups=groups)
        bad = parameters[0].grad
        assert isinstance(bad, DTensor)
        for name, value in (("nan", math.nan), ("inf", math.inf)):
            if rank.rank == 3:
                bad.to_local()[0, 0] = value
            seen[name] = gradient_norm(parameters, groups=groups)
    return seen


def test_the_norm_is_exact_whatever_the_placements() -> None:
    results = run_ranks(4, measure).results
    for seen in results:
        norm = seen["norm"]
        assert isinstance(norm, GradientNorm)
        assert norm.value == pytest.approx(expected(), rel=1e-12)
        assert norm.is_finite
        alone = mean_over_rows(
            torch.tensor(ROWS, dtype=torch.float64),
            num_rows=len(ROWS),
            groups=ProcessGroups.single(),
        )
        assert seen["mean"] == alone
        assert seen["clipped 0"] == norm.value
        assert seen["clipped 1e+09"] == norm.value
        assert seen["clipped 2"] == pytest.approx(2.0, rel=1e-6)
        for name in ("nan", "inf"):
            bad = seen[name]
            assert isinstance(bad, GradientNorm)
            assert not bad.is_finite
            assert bad.bad_ranks == (3,)
            assert math.isnan(bad.value)
        assert seen["norm"] == results[0]["norm"]


def poison_each(rank: RankContext, directory: str) -> list[str]:
    return [poison(rank, directory, zero) for zero in ("0", "1", "2")]


def poison(rank: RankContext, directory: str, zero: str) -> str:
    """One rank's weight goes bad; every rank has to hear of it, before any update."""
    config = config_of("--tp", "2", "--zero", zero)
    with (
        ProcessGroups.create(config.check(world_size=4)) as groups,
        Trainer(config, groups=groups, corpus=text(directory)) as trainer,
    ):
        trainer.train_step()
        trainer.update.synchronize()
        if rank.rank == 1:
            with torch.no_grad():
                weight = trainer.model.module.get_parameter("blocks.0.mlp.up.weight")
                assert isinstance(weight, DTensor)
                weight.to_local()[0, 0] = math.nan
        try:
            trainer.train_step()
        except FaultError as error:
            return f"{trainer.progress.step}: {error}"
    return "nothing"


def test_a_fault_of_one_rank_stops_all_before_the_update(workplace: object) -> None:
    for messages in run_ranks(4, poison_each, str(workplace)).results:
        for zero, message in enumerate(messages):
            assert message.startswith("1: step 2: the loss is nan"), zero
            assert "of 4 ranks" in message, zero


def overflow(rank: RankContext, directory: str) -> list[dict[str, object]]:
    """A loss scale that no float16 holds, with whole and with sharded optimizer state."""
    found = []
    for zero in ("0", "1", "2"):
        config = config_of("--precision", "fp16", "--zero", zero)
        with (
            ProcessGroups.create(config.check(world_size=2)) as groups,
            Trainer(config, groups=groups, corpus=text(directory)) as trainer,
        ):
            scaler = trainer.scaler
            assert scaler is not None
            scaler.load_state_dict({"scale": 2.0**24, "num_good_steps": 5})
            names = dict(trainer.model.module.named_parameters())
            before = {name: p.detach().clone() for name, p in names.items()}
            lr = trainer.schedule.lr
            first = trainer.train_step()
            trainer.update.synchronize()
            kept = all(torch.equal(before[name], p.detach()) for name, p in names.items())
            left_out = 1
            while trainer.train_step().skipped:
                left_out += 1
            trainer.update.synchronize()
            moved = not torch.equal(
                before["norm.weight"], trainer.model.module.get_parameter("norm.weight").detach()
            )
            found.append({
                "first": (first.skipped, first.loss_scale, math.isnan(first.grad_norm)),
                "kept": kept, "moved": moved, "scale": scaler.scale * 2.0**left_out,
                "steps": (trainer.progress.step - left_out, trainer.schedule.num_steps),
                "lr": trainer.schedule.settings.lr_at(0) == lr,
            })  # fmt: skip
    return found


def test_a_step_that_overflows_is_left_out_on_all_ranks(workplace: object) -> None:
    for found in run_ranks(2, overflow, str(workplace)).results:
        for said in found:
            assert said == {
                "first": (True, 2.0**24, True),
                "kept": True,
                "moved": True,
                "scale": 2.0**24,
                "steps": (1, 1),
                "lr": True,
            }

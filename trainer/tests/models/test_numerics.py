"""A model split over any layout computes what it computes in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.parallelize import ParallelGPT
from tests.harness import RankContext, run_ranks

LAYOUTS = ((2, 2), (1, 4), (4, 1))
NUM_STEPS = 2
"""The second one has a momentum, and weights that the first one has changed."""
ROWS = 8
SMALL = {"num_layers": 2, "model_dim": 32, "num_heads": 4}
# Tied SwiGLU with a split vocabulary, untied GELU with one that no layout divides, and an untied
# head whose vocabulary is split.
CONFIGS = (
    GPTConfig(**SMALL),
    GPTConfig(**SMALL, mlp="gelu", norm="layer", tied_head=False, vocab_size=257),
    GPTConfig(**SMALL, norm="layer", tied_head=False, mlp_dim=48),
)
# SGD shows a wrong factor of a gradient that AdamW, which divides it out again, hides.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass
class Trained:
    losses: list[float]
    parameters: dict[str, Tensor]


def train(
    config: GPTConfig, groups: ProcessGroups, *, optimizer: str, dtype: torch.dtype
) -> Trained:
    model = ParallelGPT(config, groups=groups, seed=3)
    model.module.to(dtype)
    update = OPTIMIZERS[optimizer](model.module.parameters())
    share = ROWS // groups.size("dp_cp")
    first = groups.index("dp_cp") * share
    losses = []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(config.vocab_size, (ROWS, 17), generator=generator)
        rows = rows[first : first + share]
        found = model.forward_backward(rows[:, :-1], rows[:, 1:])
        model.reduce_gradients()
        update.step()
        update.zero_grad()
        losses.append(found.loss.mean().item())
    return Trained(losses=losses, parameters=whole(model))


def whole(model: ParallelGPT) -> dict[str, Tensor]:
    named = model.module.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}


def distances(
    rank: RankContext, dtype: torch.dtype, optimizers: list[str]
) -> list[tuple[str, float]]:
    found = []
    truths = {
        (number, optimizer): train(config, ProcessGroups.single(), optimizer=optimizer, dtype=dtype)
        for number, config in enumerate(CONFIGS)
        for optimizer in optimizers
    }
    for tp, dp in LAYOUTS:
        with ProcessGroups.create(Layout(tp=tp, dp=dp)) as groups:
            for number, config in enumerate(CONFIGS):
                for optimizer in optimizers:
                    split = train(config, groups, optimizer=optimizer, dtype=dtype)
                    alone = truths[number, optimizer]
                    assert split.parameters.keys() == alone.parameters.keys()
                    gap = max(
                        (split.parameters[name] - value).abs().max().item()
                        for name, value in alone.parameters.items()
                    )
                    found.append((f"tp{tp} dp{dp} config {number} {optimizer}", gap))
    return found


@pytest.mark.parametrize(
    ("dtype", "bound", "optimizers"),
    [
        # In float32 a wrong factor of 1e-7 could hide in the rounding; in float64 it cannot.
        pytest.param(torch.float64, 1e-12, ["sgd"], marks=pytest.mark.slow),
        pytest.param(torch.float32, 1e-6, [*OPTIMIZERS], marks=pytest.mark.nightly),
        pytest.param(torch.float64, 1e-12, [*OPTIMIZERS], marks=pytest.mark.nightly),
    ],
)
def test_every_layout_trains_like_one_process(
    dtype: torch.dtype, bound: float, optimizers: list[str]
) -> None:
    for found in run_ranks(4, distances, dtype, optimizers).results:
        assert len(found) == len(LAYOUTS) * len(CONFIGS) * len(optimizers)
        assert [case for case in found if not case[1] <= bound] == []


def short(rank: RankContext) -> dict[str, object]:
    """What is worth knowing about two layouts at step 0 and after one gradient."""
    alone = ParallelGPT(CONFIGS[0], groups=ProcessGroups.single(), seed=7)
    seen: dict[str, object] = {}
    for tp, dp in ((2, 2), (1, 4)):
        with ProcessGroups.create(Layout(tp=tp, dp=dp)) as groups:
            model = ParallelGPT(CONFIGS[0], groups=groups, seed=7)
            here, there = whole(model), whole(alone)
            seen[f"equal {tp}"] = all(torch.equal(here[name], there[name]) for name in there)
            seen[f"placements {tp}"] = {
                name: (p.device_mesh.mesh_dim_names, p.placements)
                for name, p in model.module.named_parameters()
                if isinstance(p, DTensor)
            }
            seen[f"averaged {tp}"] = averages(model, groups)
            gap = train(CONFIGS[0], groups, optimizer="sgd", dtype=torch.float32)
            single = train(CONFIGS[0], ProcessGroups.single(), optimizer="sgd", dtype=torch.float32)
            seen[f"gap {tp}"] = max(
                (gap.parameters[name] - single.parameters[name]).abs().max().item()
                for name in single.parameters
            )
    return seen


def averages(model: ParallelGPT, groups: ProcessGroups) -> bool:
    """Give each data rank its own gradient, and one parameter none; look for the mean."""
    parameters = list(model.module.parameters())
    index, size = groups.index("dp_cp"), groups.size("dp_cp")
    for parameter in parameters[1:]:
        parameter.grad = torch.full_like(parameter, 4.0 * index)
    model.reduce_gradients()
    mean = 4.0 * sum(range(size)) / size
    local = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    return bool((local[0] == 0).all()) and all(bool((g == mean).all()) for g in local[1:])


@pytest.mark.slow
def test_a_split_model_begins_equal_is_declared_and_averages() -> None:
    for seen in run_ranks(4, short).results:
        assert seen["equal 2"] is True
        assert seen["equal 1"] is True
        assert seen["averaged 2"] is True
        assert seen["averaged 1"] is True
        assert seen["gap 2"] <= 1e-6
        assert seen["gap 1"] <= 1e-6
        names = ("dp_cp", "tp")
        declared = seen["placements 2"]
        assert declared["embed.weight"] == (names, (Replicate(), Shard(0)))
        assert declared["blocks.0.attn.out.weight"] == (names, (Replicate(), Shard(1)))
        assert declared["blocks.1.mlp.gate.weight"] == (names, (Replicate(), Shard(0)))
        assert declared["norm.weight"] == (names, (Replicate(), Replicate()))
        replicated = {placements for _, placements in seen["placements 1"].values()}
        assert replicated == {(Replicate(), Replicate())}

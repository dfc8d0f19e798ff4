"""Programs drawn from a seed: a model, the ways in which it is held, and what is done."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from holdfast import Layout, LayoutError
from tests.campaign.models import ROWS, Traits

Kind = Literal["plain", "zero", "chained", "fsdp"]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# torch's foreach functions refuse a list of DTensors and plain tensors, and a load brings the saved
# flag into the next way.
OPTIMIZERS: Mapping[str, Any] = {
    # Momentum and decay show a gradient of zeros that one process does not have.
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.5, weight_decay=0.1, foreach=False),
    "plain sgd": partial(torch.optim.SGD, lr=0.1, foreach=False),
    # A large eps: else the rounding errors of a gradient near zero would become whole steps.
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, foreach=False),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the ranks of a layout hold model and optimizer, and how many steps they do so."""

    kind: Kind
    layout: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """As `fully_shard_model` or `ShardedOptimizer` takes them."""
    is_declared: bool = False
    """True if dense parameters are DTensors on the mesh of their layout."""
    num_microbatches: int = 1
    has_contexts: bool = True
    """False if backwards run without `microbatch` around them."""
    num_steps: int = 2


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one run does: ways that follow each other, each from the checkpoint of the last."""

    seed: int
    traits: Traits
    optimizer: str
    max_norm: float
    ways: tuple[Way, ...]

    @property
    def num_steps(self) -> int:
        return sum(way.num_steps for way in self.ways)


def draw(seed: int, *, num_ranks: int) -> Program:
    """Draw a program for at most `num_ranks` ranks."""
    chance = random.Random(f"{seed} of {num_ranks}")
    dtype = chance.choice([*[torch.float64] * 3, *[torch.float32] * 2, torch.bfloat16])
    kinds: tuple[Kind, ...] = ("plain", "zero", "chained", "chained", "fsdp", "fsdp", "fsdp")
    is_odd = dtype == torch.bfloat16 or chance.random() < 0.3
    if is_odd:  # FSDP2 shards neither scalars nor complex parameters
        kinds = ("plain", "zero", "chained", "chained")
    if dtype == torch.bfloat16:  # main parameters in float32 are the sharded optimizer's alone
        kinds = ("zero",)
    has_tp = dtype != torch.bfloat16 and chance.random() < 0.4
    has_experts = dtype != torch.bfloat16
    ways = tuple(
        _draw_way(chance, chance.choice(kinds), num_ranks, has_tp=has_tp, is_odd=is_odd)
        for _ in range(chance.choice((1, 2, 2, 3)))
    )
    return Program(
        seed=seed,
        traits=Traits(dtype=dtype, has_tp=has_tp, has_experts=has_experts, is_odd=is_odd),
        optimizer=chance.choice([*OPTIMIZERS]),
        max_norm=chance.choice((0.0, 0.1, 0.1, 1e6)),
        ways=ways,
    )


def _draw_way(
    chance: random.Random, kind: Kind, num_ranks: int, *, has_tp: bool, is_odd: bool
) -> Way:
    layout = _draw_layout(chance, num_ranks, has_tp=has_tp, has_experts=kind != "zero")
    made = Layout(**layout)
    num_rows = ROWS // (made.dp * made.cp)
    counts = [count for count in (1, 2, 3, 4, 8) if num_rows % count == 0]
    options: dict[str, Any] = {}
    if kind == "fsdp":
        options = {
            "strategy": chance.choice(STRATEGIES),
            "num_prefetched": chance.randrange(3),
            "outer_reduction": chance.choice(("step", "microbatch")),
        }
    elif kind in ("zero", "chained"):
        options = {
            "stage": chance.choice((1, 2)),
            "overlap": chance.random() < 0.5,
            "bucket_nbytes": chance.choice((64, 300, 4096, 1 << 20)),
            "align_nbytes": chance.choice((16, 128)),
        }
    return Way(
        kind=kind,
        layout=layout,
        options=options,
        is_declared=kind in ("zero", "chained") and (is_odd or chance.random() < 0.5),
        num_microbatches=chance.choice(counts),
        has_contexts=kind == "fsdp" or chance.random() < 0.8,
        num_steps=chance.choice((1, 2, 3)),
    )


def _draw_layout(
    chance: random.Random, num_ranks: int, *, has_tp: bool, has_experts: bool
) -> dict[str, Any]:
    """Draw sizes, maybe an order of axes, and maybe a permutation of some of the ranks."""
    while True:
        sizes: dict[str, Any] = {}
        left = chance.choice([n for n in (1, 2, 2, 3, 4, 4, 4, 8, 8, 8, 8) if n <= num_ranks])
        sizes["dp"] = sizes["cp"] = sizes["tp"] = 1
        while left > 1:
            factor = 3 if left == 3 else 2
            axes = ["dp", "dp", "cp"] + ["tp"] * (has_tp and factor == 2)
            sizes[chance.choice(axes)] *= factor
            left //= factor
        data = sizes["dp"] * sizes["cp"]
        if has_experts and chance.random() < 0.6:
            sizes["ep"] = chance.choice((1, 2, 4))
            if sizes["tp"] > 1:
                sizes["expt_tp"] = chance.choice((1, sizes["tp"]))
        if data % 2 == 0 and chance.random() < 0.4:
            sizes["replicas"] = 2
        if chance.random() < 0.3:
            sizes["order"] = chance.choice(("dp-cp-ep-tp-pp", "tp-cp-dp-ep-pp", "dp-tp-ep-cp-pp"))
        size = data * sizes["tp"]
        if chance.random() < 0.4:
            sizes["ranks"] = tuple(chance.sample(range(num_ranks), size))
        try:
            Layout(**sizes)
        except LayoutError:  # sizes that do not fit each other
            continue
        return sizes

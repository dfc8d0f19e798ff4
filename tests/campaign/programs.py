"""Programs drawn from a seed: a model, the ways in which it is held, and what is done.

A program of `draw` has regular steps, in several ways that follow each other; one of
`draw_irregular` has a small model, one way, and something unusual in each step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from holdfast import Layout, LayoutError
from tests.campaign.actions import (
    CLIPS,
    COPIES,
    DETOURS,
    FORMS,
    FORMS_OF_ONE_GRADIENT,
    GRADIENT_WRITES,
    HOOKS,
    MODES,
    OWN_STEPS,
    STEP_MODES,
    Action,
    Limits,
    StepMode,
    draw_actions,
    regular_actions,
)
from tests.campaign.models import NORMS, ROWS, Traits

Kind = Literal["plain", "zero", "chained", "fsdp"]
ScheduleKind = Literal["exponential", "chained", "one cycle", "plateau"]
SCHEDULES: tuple[ScheduleKind, ...] = ("exponential", "chained", "one cycle", "plateau")
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
    """How the ranks of a layout hold model and optimizer, and what they do."""

    kind: Kind
    layout: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """As `fully_shard_model` or `ShardedOptimizer` takes them."""
    is_declared: bool = False
    """True if dense parameters are DTensors on the mesh of their layout."""
    has_contexts: bool = True
    """False if backwards run without `microbatch` around them."""
    has_two: bool = False
    """True if each parameter group has an optimizer of its own."""
    has_scaler: bool = False
    """True if losses are scaled."""
    has_late: bool = False
    """True if the second block is frozen, and the optimizer built without it."""
    has_tensor_rates: bool = False
    """True if the learning rate of each parameter group is a tensor."""
    schedule: ScheduleKind = "exponential"
    keeps_schedule: bool = False
    """True if the learning rate scheduler is a part of the state."""
    actions: tuple[Action, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one run does: ways that follow each other, each from the checkpoint of the last."""

    seed: int
    traits: Traits
    optimizer: str
    ways: tuple[Way, ...]


def draw(seed: int, *, num_ranks: int) -> Program:
    """Draw a program of regular steps for at most `num_ranks` ranks."""
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
    drawn = [
        _draw_way(chance, chance.choice(kinds), num_ranks, has_tp=has_tp, is_odd=is_odd)
        for _ in range(chance.choice((1, 2, 2, 3)))
    ]
    optimizer = chance.choice([*OPTIMIZERS])
    max_norm = chance.choice((0.0, 0.1, 0.1, 1e6))
    ways: list[Way] = []
    done = 0
    for way, num_microbatches, num_steps in drawn:
        actions = regular_actions(
            first=done, num_steps=num_steps, num_microbatches=num_microbatches, max_norm=max_norm
        )
        ways.append(replace(way, actions=actions))
        done += num_steps
    return Program(
        seed=seed,
        traits=Traits(dtype=dtype, has_tp=has_tp, has_experts=has_experts, is_odd=is_odd),
        optimizer=optimizer,
        ways=tuple(ways),
    )


def draw_irregular(seed: int, *, num_ranks: int) -> Program:
    """Draw a program with something unusual in each step, for exactly `num_ranks` ranks."""
    chance = random.Random(f"irregular {seed} of {num_ranks}")
    kind = chance.choice(("plain", "zero", "zero", "chained", "chained", *["fsdp"] * 4))
    is_narrow = kind == "zero" and chance.random() < 0.4
    dtype = torch.bfloat16 if is_narrow else chance.choice((torch.float64, torch.float32))
    is_odd = is_narrow or (kind != "fsdp" and chance.random() < 0.2)
    layout = _draw_small_layout(chance, kind, num_ranks, is_narrow=is_narrow)
    before = None
    if chance.random() < 0.2:  # leaves a checkpoint that is loaded first, and maybe again
        kinds: tuple[Kind, ...] = (
            "plain",
            "zero",
            "chained",
            *[each for each in ("fsdp",) if not is_odd],
        )
        before = _draw_before(
            chance,
            "zero" if is_narrow else chance.choice(kinds),
            num_ranks,
            is_odd=is_odd,
            is_narrow=is_narrow,
        )
    has_contexts = chance.random() < 0.85
    # Other ranks would wait for one that fails in a forward with collectives of its own, or learn
    # nothing of an error outside of a microbatch.
    is_plain = {*layout} <= {"dp", "replicas", "ranks"}
    is_shared = is_plain and has_contexts
    # What `reduce` has not made equal yet is clipped on each rank by itself; torch's own clipping
    # takes DTensors of one mesh.
    is_clipped = num_ranks == 1 or (kind != "plain" and is_plain)
    # A hook on what was added up is not called on a rank that adds nothing.
    may_idle = is_shared and kind != "fsdp" and chance.random() < 0.5
    is_declared = kind in ("zero", "chained") and (is_odd or chance.random() < 0.3)
    has_late = kind in ("plain", "fsdp") and before is None and chance.random() < 0.25
    # Torch ignores an assignment to `.data` of a DTensor, if nothing refuses it; and buckets hold
    # parameters, which another dtype does not fit.
    detours = DETOURS if is_declared or kind == "fsdp" else (*DETOURS, "data")
    traits = Traits(
        dtype=dtype,
        has_tp=any(each.get("tp", 1) > 1 for each in (layout, before.layout if before else {})),
        has_experts=not is_narrow,
        is_odd=is_odd,
        is_small=True,
        # Ranks have the same buffers if they make the same number of forwards; a twin of narrow
        # parameters makes one for each rank.
        norm=chance.choice((None, *(NORMS[:2] if is_narrow or may_idle else NORMS))),
        has_running=not may_idle and not is_narrow and chance.random() < 0.5,
        # One narrow gradient for each place rounds otherwise than their sum.
        is_reentrant=not is_narrow and chance.random() < 0.3,
    )
    modes = [*MODES]
    # A fully sharded model cannot be copied, a layer that keeps what it has computed neither, and
    # experts of a copy get gradients of the same rows from several ranks.
    if kind != "fsdp" and traits.norm != "weight by a hook":
        modes += COPIES if is_plain else COPIES[:1]
    # Only in a microbatch an error of torch can be explained.
    forms = FORMS if kind != "fsdp" or has_contexts else FORMS_OF_ONE_GRADIENT
    if traits.is_reentrant:  # torch refuses gradients of something alone
        forms = tuple(each for each in forms if each not in ("saliency", "penalty"))
    has_scaler = chance.random() < 0.3
    optimizer = chance.choice([*OPTIMIZERS])
    own_steps: tuple[StepMode, ...] = ("closure",)
    if kind == "fsdp":
        # Torch's own step does not take the loss scale from gradients, and reads one that comes too
        # late only after it has updated the groups before it.
        own_steps = () if has_scaler or traits.is_reentrant else OWN_STEPS
    way = Way(
        kind=kind,
        layout=layout,
        options=_draw_options(chance, kind),
        is_declared=is_declared,
        has_late=has_late,
        has_contexts=has_contexts,
        actions=draw_actions(
            chance,
            Limits(
                num_ranks=num_ranks,
                num_failing=num_ranks - 1 if is_shared else 0,
                # Buckets hold gradients; outside of a microbatch a hook gets a warning alone.
                hooks=HOOKS
                if (has_contexts or kind in ("plain", "fsdp")) and not may_idle
                else HOOKS[:2],
                may_move=kind in ("plain", "fsdp"),  # buckets hold parameters
                has_before=before is not None,
                modes=tuple(modes),
                forms=forms,
                step_modes=(*STEP_MODES, *own_steps),
                gradient_writes=GRADIENT_WRITES + (CLIPS if is_clipped else ()),
                detours=(*detours, "dtype") if kind in ("plain", "fsdp") else detours,
                has_late=has_late,
                num_idle=num_ranks - 1 if may_idle else 0,
            ),
        ),
        # A user's reduction of one group of several does not know what is added to it.
        has_two=kind != "chained" and not (has_late and kind == "plain") and chance.random() < 0.3,
        has_scaler=has_scaler,
        # Others have values for each group that there was at first.
        schedule="exponential" if has_late else chance.choice(SCHEDULES),
        keeps_schedule=chance.random() < 0.5,
        # A load brings the saved kind of rate into the next way.
        has_tensor_rates=before is None and chance.random() < 0.3,
    )
    if before is not None:
        before = replace(before, schedule=way.schedule, keeps_schedule=way.keeps_schedule)
    return Program(
        seed=seed,
        traits=traits,
        optimizer=optimizer,
        ways=(way,) if before is None else (before, way),
    )


def _draw_before(
    chance: random.Random, kind: Kind, num_ranks: int, *, is_odd: bool, is_narrow: bool
) -> Way:
    """Draw a way that makes one regular step."""
    return Way(
        kind=kind,
        layout=_draw_small_layout(chance, kind, num_ranks, is_narrow=is_narrow),
        options=_draw_options(chance, kind),
        is_declared=kind in ("zero", "chained") and is_odd,
        actions=regular_actions(first=0, num_steps=1, num_microbatches=1, max_norm=0.0),
    )


def _draw_small_layout(
    chance: random.Random, kind: Kind, num_ranks: int, *, is_narrow: bool
) -> Mapping[str, Any]:
    layout = chance.choice(_SMALL_LAYOUTS[num_ranks])
    if kind == "zero":  # the optimizer of dense parameters alone
        layout = {axis: size for axis, size in layout.items() if axis not in ("ep", "expt_tp")}
    if is_narrow and layout.get("tp", 1) > 1:
        layout = {"dp": num_ranks}
    return layout


_SMALL_LAYOUTS: Mapping[int, Sequence[Mapping[str, Any]]] = {
    1: [{"dp": 1}],
    2: [{"dp": 2}, {"dp": 2, "ranks": (1, 0)}, {"cp": 2}, {"tp": 2}, {"dp": 2, "ep": 2}],
    3: [{"dp": 3}],
    4: [
        {"dp": 4},
        {"dp": 4, "replicas": 2},
        {"dp": 4, "ep": 2},
        {"dp": 4, "ep": 2, "replicas": 2},
        {"dp": 2, "tp": 2},
        {"dp": 2, "cp": 2, "ranks": (2, 0, 3, 1)},
    ],
}
"""Few, so that programs share communicators."""


def _draw_way(
    chance: random.Random, kind: Kind, num_ranks: int, *, has_tp: bool, is_odd: bool
) -> tuple[Way, int, int]:
    """Draw a way without actions, and how many microbatches a step has, and how many steps."""
    layout = _draw_layout(chance, num_ranks, has_tp=has_tp, has_experts=kind != "zero")
    made = Layout(**layout)
    num_rows = ROWS // (made.dp * made.cp)
    options = _draw_options(chance, kind)
    is_declared = kind in ("zero", "chained") and (is_odd or chance.random() < 0.5)
    num_microbatches = chance.choice([n for n in (1, 2, 3, 4, 8) if num_rows % n == 0])
    has_contexts = kind == "fsdp" or chance.random() < 0.8
    way = Way(
        kind=kind,
        layout=layout,
        options=options,
        is_declared=is_declared,
        has_contexts=has_contexts,
    )
    return way, num_microbatches, chance.choice((1, 2, 3))


def _draw_options(chance: random.Random, kind: Kind) -> dict[str, Any]:
    if kind == "fsdp":
        return {
            "strategy": chance.choice(STRATEGIES),
            "num_prefetched": chance.randrange(3),
            "outer_reduction": chance.choice(("step", "microbatch")),
        }
    if kind in ("zero", "chained"):
        return {
            "stage": chance.choice((1, 2)),
            "overlap": chance.random() < 0.5,
            "bucket_nbytes": chance.choice((64, 300, 4096, 1 << 20)),
            "align_nbytes": chance.choice((16, 128)),
        }
    return {}


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

"""Every axis and every product of axes trains like one process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.parallelize import ParallelGPT
from holdfast_trainer.models.stages import Pipeline, Variant
from holdfast_trainer.train.config import OptimConfig
from holdfast_trainer.train.update import make_update
from tests.harness import RankContext, run_ranks

Parameters = dict[str, Tensor]
NUM_STEPS = 2
"""The second one has a momentum, and weights that the first one has changed."""
ROWS = 8
DENSE: dict[str, Any] = {"num_layers": 4, "model_dim": 32, "num_heads": 4}
MOE: dict[str, Any] = {**DENSE, "feeds": "de", "num_experts": 4, "expert_dim": 16}
HYBRID: dict[str, Any] = {**MOE, "mixers": "sa", "state_dim": 4}
# SGD shows a wrong factor of a gradient that AdamW, which divides it out again, hides.
OPTIMIZERS = {
    "sgd": OptimConfig(optimizer="sgd", lr=0.5, momentum=0.9, weight_decay=0.0),
    "adamw": OptimConfig(optimizer="adamw", lr=1e-4, weight_decay=0.01, beta2=0.999),
}


@dataclass(frozen=True)
class Case:
    """A layout and a model on it."""

    layout: dict[str, Any]
    model: dict[str, Any] = field(default_factory=lambda: HYBRID)
    pipeline: Pipeline | None = None
    num_microbatches: int = 1
    variant: Variant = "gather"
    zero: Literal[0, 1, 2] = 0


ONE_F_ONE_B = {"pipeline": Pipeline(), "num_microbatches": 4}
ON_TWO = (
    Case({"pp": 2}, DENSE, **ONE_F_ONE_B),
    Case({"pp": 2}, {**DENSE, "tied_head": False}, Pipeline(schedule="gpipe"), 2),
    Case({"pp": 2}, DENSE, Pipeline(schedule="interleaved", stages_per_rank=2), 4),
    Case({"pp": 2}, DENSE, Pipeline(schedule="looped-bfs", stages_per_rank=2), 4),
    Case({"pp": 2}, DENSE, Pipeline(schedule="zero-bubble", stages_per_rank=2), 4),
    Case({"pp": 2}, DENSE, Pipeline(schedule="zbv", stages_per_rank=2), 4),
    Case({"pp": 2}, DENSE, Pipeline(schedule="dualpipev", stages_per_rank=2), 4),
    Case({"pp": 2}, DENSE, Pipeline(stage_layers=(1, 3)), 4),
    Case({"cp": 2}, DENSE),
    Case({"cp": 2}, variant="ring"),
    Case({"tp": 2}),
    Case({"tp": 2, "expt_tp": 1, "ep": 2}),
    Case({"dp": 2, "expt_tp": 2}),
    Case({"dp": 2, "ep": 2}, MOE, None, 2),
    Case({"dp": 2, "ep": 2}, HYBRID, None, 2, zero=1),
    Case({"dp": 2}, HYBRID, None, 4, zero=2),
)
ON_FOUR = (
    Case({"tp": 2, "pp": 2}, **ONE_F_ONE_B),
    Case({"tp": 2, "dp": 2, "ep": 2}),
    Case({"tp": 2, "dp": 2, "ep": 2}, HYBRID, None, 2, zero=2),
    Case({"dp": 2, "pp": 2, "ep": 2}, zero=1, **ONE_F_ONE_B),
    Case({"cp": 2, "pp": 2, "ep": 2}, variant="ring", **ONE_F_ONE_B),
    Case({"dp": 2, "pp": 2, "ep": 2, "order": "pp-dp-ep"}, **ONE_F_ONE_B),
    Case({"tp": 2, "cp": 2, "expt_tp": 1, "ep": 4}),
    Case({"dp": 4, "ep": 2, "order": "dp-ep"}),
    Case({"pp": 4}, DENSE, **ONE_F_ONE_B),
)
ON_SIX = (
    # Two of six ranks have nothing to do with it.
    Case({"tp": 2, "dp": 2, "ep": 2, "ranks": [2, 3, 4, 5]}),
    Case({"tp": 2, "dp": 2, "ranks": [5, 3, 2, 4]}, zero=1),
    Case({"cp": 2, "pp": 2, "ep": 2, "ranks": [5, 3, 2, 4]}, **ONE_F_ONE_B),
)
ON_EIGHT = (
    Case({"tp": 2, "cp": 2, "pp": 2, "ep": 2}, **ONE_F_ONE_B),
    Case({"tp": 2, "dp": 2, "pp": 2, "ep": 2, "expt_tp": 1, "order": "tp-ep-dp-pp"}, **ONE_F_ONE_B),
    Case({"tp": 2, "cp": 2, "dp": 2, "ep": 4, "order": "tp-cp-ep-dp"}, variant="ring"),
    Case(
        {"cp": 2, "dp": 2, "pp": 2, "ep": 4},
        HYBRID,
        Pipeline(schedule="zero-bubble", stages_per_rank=2),
        4,
        zero=2,
    ),
    Case({"tp": 2, "cp": 2, "dp": 2, "ep": 4, "order": "tp-cp-ep-dp"}, zero=1),
)


def train(case: Case, groups: ProcessGroups, *, optimizer: str, dtype: torch.dtype) -> Parameters:
    model = ParallelGPT(
        GPTConfig(**case.model),
        groups=groups,
        seed=3,
        pipeline=case.pipeline,
        variant=case.variant,
    )
    model.module.to(dtype)
    optim = replace(OPTIMIZERS[optimizer], zero=case.zero, bucket_nbytes=8192)
    update = make_update(model, optim=optim)
    share = ROWS // groups.size("dp")
    first = groups.index("dp") * share
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(256, (ROWS, 17), generator=generator)[first : first + share]
        found = model.forward_backward(
            rows[:, :-1],
            rows[:, 1:],
            num_microbatches=case.num_microbatches,
            around=update.microbatch,
        )
        assert len(found.loss) == (share if any(stage.is_last for stage in model.stages) else 0)
        assert not update.step(max_norm=0.0).skipped
    update.close()
    named = model.module.named_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in named}


def key_of(case: Case, optimizer: str) -> str:
    return f"{sorted(case.model.items())} {optimizer}"


def distances(
    rank: RankContext,
    cases: tuple[Case, ...],
    optimizers: tuple[str, ...],
    dtype: torch.dtype,
    references: dict[str, Parameters],
) -> dict[str, float]:
    """The largest difference of any parameter from the one-process model's, by case."""
    found = {}
    for number, case in enumerate(cases):
        layout = Layout(**case.layout)
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            for optimizer in optimizers:
                split = train(case, groups, optimizer=optimizer, dtype=dtype)
                alone = references[key_of(case, optimizer)]
                assert split.keys() <= alone.keys()
                found[f"{number} {case.layout} {optimizer}"] = max(
                    (value - alone[name]).abs().max().item() for name, value in split.items()
                )
    return found


def check(
    num_ranks: int,
    cases: tuple[Case, ...],
    *optimizers: str,
    dtype: torch.dtype,
    bound: float,
) -> None:
    references = {
        key_of(case, name): train(
            Case({}, case.model),
            ProcessGroups.single(),
            optimizer=name,
            dtype=dtype,
        )
        for case in {str(case.model): case for case in cases}.values()
        for name in optimizers
    }
    results = run_ranks(
        num_ranks, distances, cases, optimizers, dtype, references, timeout_s=300
    ).results
    assert len({name for found in results for name in found}) == len(cases) * len(optimizers)
    for found in results:
        assert {case: gap for case, gap in found.items() if not gap <= bound} == {}


def test_some_products_of_axes_train_like_one_process() -> None:
    cases = ON_FOUR[3:4]
    check(4, cases, "sgd", dtype=torch.float32, bound=1e-6)


@pytest.mark.slow
def test_all_axes_together_train_like_one_process() -> None:
    check(8, ON_EIGHT[:1], "sgd", dtype=torch.float32, bound=1e-6)


def _slow(num_ranks: int, *cases: Case) -> Any:
    return pytest.param(num_ranks, cases, ("sgd",), marks=pytest.mark.slow)


def _nightly(num_ranks: int, cases: tuple[Case, ...]) -> Any:
    return pytest.param(num_ranks, cases, ("sgd", "adamw"), marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("num_ranks", "cases", "optimizers"),
    [
        _slow(2, *ON_TWO),
        # Those of the tests above are not here again.
        _slow(4, ON_FOUR[0], ON_FOUR[2], ON_FOUR[4], ON_FOUR[6]),
        # Gradients know nothing of their optimizer: the second one is for its own arithmetic.
        *(_nightly(n, all_of) for n, all_of in ((2, ON_TWO), (4, ON_FOUR), (6, ON_SIX))),
        _nightly(8, ON_EIGHT),
    ],
)
def test_every_layout_trains_like_one_process(
    num_ranks: int, cases: tuple[Case, ...], optimizers: tuple[str, ...]
) -> None:
    # In float32 a wrong factor of 1e-7 could hide in the rounding; in float64 it cannot. The
    # products of axes above, and test_numerics, train in float32.
    check(num_ranks, cases, *optimizers, dtype=torch.float64, bound=1e-12)

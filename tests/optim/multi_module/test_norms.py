"""One norm, one clip and one update over modules of any placement (M10, M12)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast.optim import MultiModuleOptimizer
from holdfast.parallel import ModuleGroups
from tests.harness import RankContext, run_ranks
from tests.optim.multi_module.common import (
    Spec,
    Twin,
    build,
    layouts_of,
    rows_of,
    train_module,
)

DP2, DP2B = {"dp": 2, "ranks": (0, 1)}, {"dp": 2, "ranks": (2, 3)}
MIXES: dict[str, dict[str, Spec]] = {
    "disjoint": {
        "vision": Spec(sizes=DP2),
        "language": Spec(sizes={"tp": 2, "ranks": (2, 3)}, kind="chained"),
    },
    "one and three": {
        "vision": Spec(sizes={"dp": 1, "ranks": (2,)}, kind="reduced"),
        "language": Spec(sizes={"dp": 3, "ranks": (0, 1, 3)}),
    },
    "colocated": {
        "vision": Spec(sizes={"dp": 4}),
        "language": Spec(sizes={"dp": 2, "tp": 2}, kind="chained", options={"stage": 2}),
        "speech": Spec(sizes={"dp": 2, "pp": 2}, empty_stages=(1,)),
    },
    "experts and stages": {
        "vision": Spec(sizes={**DP2, "ep": 2}, kind="chained"),
        "language": Spec(sizes={"pp": 2, "ranks": (3, 2)}, empty_stages=(0,)),
    },
}
SHARDED_MODELS: dict[str, dict[str, Spec]] = {
    "fully sharded and tensor parallel": {
        "vision": Spec(sizes={**DP2B, "ep": 2}, kind="fsdp"),
        "language": Spec(sizes={"tp": 2, "ranks": (1, 0)}, kind="fsdp"),
    },
    "fully sharded on all": {
        "vision": Spec(sizes={"dp": 2, "tp": 2}, kind="fsdp"),
        "language": Spec(sizes={"dp": 4, "ep": 2}, kind="chained"),
        "speech": Spec(sizes={"dp": 2, "cp": 2, "ep": 2}, kind="reduced"),
    },
    "fully sharded stages": {
        "vision": Spec(sizes={"dp": 4}, kind="frozen"),
        "language": Spec(sizes={"dp": 2, "pp": 2}, kind="fsdp", empty_stages=(1,)),
    },
}
STEPS = 3


def every_mix(context: RankContext, mixes: Mapping[str, Mapping[str, Spec]]) -> dict[str, Any]:
    report = {}
    for mix, specs in mixes.items():
        twin = Twin(specs)
        with ModuleGroups.create(layouts_of(specs, tag=f"{mix}: ")) as groups:
            modules = build(groups, specs)
            optimizer = MultiModuleOptimizer(groups, {n: m.stepper for n, m in modules.items()})
            outcomes = []
            for step in range(STEPS):
                rows = {name: rows_of(step, name) for name in specs}
                limit = 0.5 if step else 0.0
                norms = twin.step(rows, max_norm=limit)
                with optimizer.microbatch(is_last=True):
                    for name, each in modules.items():
                        train_module(each, rows[name])
                outcome = optimizer.step(max_norm=limit, count_zeros=True)
                assert outcome.norm == pytest.approx(norms.pop(""), rel=1e-6), mix
                assert outcome.module_norms == pytest.approx(norms, rel=1e-6), mix
                assert outcome.clipped == (0 < limit < outcome.norm), mix
                assert outcome.num_zeros == twin.num_zeros, mix
                assert not outcome.skipped
                outcomes.append(outcome)
            optimizer.synchronize()
            assert twin.difference(modules) < 1e-6, mix
            report[mix] = outcomes
            optimizer.close()
    return report


@pytest.mark.slow
def test_norm_clip_and_update_of_any_mix_equal_one_process() -> None:
    """M12, M10: each element counts once, wherever its module is."""
    first, *others = run_ranks(4, every_mix, MIXES | SHARDED_MODELS).results
    assert all(other == first for other in others)


def generate(seed: int) -> dict[str, Spec]:
    """Two to four modules on four ranks: on spans of their own or the same ones, each its way."""
    dice = random.Random(seed)
    ranks = dice.sample(range(4), 4)
    cut = dice.choice((1, 2, 3, 4))
    spans = [ranks[:cut], ranks[cut:] or ranks]
    spans += [dice.choice(spans) for _ in range(dice.choice((0, 0, 1, 2)))]
    return {f"{chr(97 + i) * (i + 1)}": random_spec(dice, span) for i, span in enumerate(spans)}


def random_spec(dice: random.Random, span: list[int]) -> Spec:
    kind = dice.choice(("sharded", "chained", "reduced", "fsdp", "frozen", "chained"))
    sizes: dict[str, Any] = {"ranks": tuple(span)}
    rest = len(span)
    for axis in ("pp", "tp", "cp"):
        sizes[axis] = dice.choice([n for n in (1, 2) if rest % n == 0])
        rest //= sizes[axis]
    sizes["dp"] = rest
    width = sizes["tp"] * sizes["cp"] * rest
    sizes["ep"] = dice.choice([n for n in (1, 2, 4) if width % n == 0])
    sizes["expt_tp"] = dice.choice([n for n in (1, 2) if width // sizes["ep"] % n == 0])
    empty = (dice.randrange(2),) if sizes["pp"] == 2 and dice.random() < 0.5 else ()
    stage = dice.choice((1, 2))
    options = {"stage": stage} if kind in ("sharded", "chained") else {}
    return Spec(sizes=sizes, kind=kind, options=options, empty_stages=empty)


@pytest.mark.parametrize(
    "seeds",
    [
        range(1),
        pytest.param(range(1, 8), marks=pytest.mark.slow),
        pytest.param(range(8, 70), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_generated_mixes_equal_one_process(seeds: range) -> None:
    """M12, M10, over layouts that nobody has thought of."""
    mixes = {f"seed {seed}": generate(seed) for seed in seeds}
    mixes = {n: m for n, m in mixes.items() if any(s.kind != "frozen" for s in m.values())}
    first, *others = run_ranks(4, every_mix, mixes).results
    assert all(other == first for other in others)

"""Experts give every token what its experts give, wherever they and it are.

One process against a loop over tokens; then layouts of 2, 4 and 8 ranks against one process that
has the joint batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from holdfast.errors import ConfigError, GroupError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.moe import MoE
from tests.harness import RankContext, run_ranks

CONFIG = GPTConfig(
    model_dim=8, num_heads=2, feeds="e", num_experts=4, top_k=2, expert_dim=8, load_balance=0.5
)


@dataclass(frozen=True)
class Case:
    """One module and batch; a batch has `rows` rows per data share, `positions` per part of cp."""

    config: GPTConfig = CONFIG
    rows: int = 2
    positions: int = 3
    favourite: float = 0.0
    """How much every token prefers expert 1 to all others."""


CASES = {
    "swiglu": Case(),
    "gelu": Case(config=replace(CONFIG, mlp="gelu", num_experts=8, top_k=3)),
    "one token": Case(config=replace(CONFIG, num_experts=8), rows=1, positions=1),
    "all experts": Case(config=replace(CONFIG, top_k=4)),
    "one expert has all": Case(config=replace(CONFIG, top_k=1), favourite=100.0),
}

LAYOUTS_OF_2 = (
    Layout(tp=2),
    Layout(dp=2, ep=2),
    Layout(tp=2, expt_tp=1, ep=2),
    Layout(dp=2, expt_tp=2),
    Layout(cp=2, ep=2, expt_tp=1),
)
LAYOUTS_OF_4 = (
    Layout(tp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=2, expt_tp=1),
    Layout(tp=4, ep=4, expt_tp=1),
    Layout(dp=4, ep=2, expt_tp=2, order="ep-tp-dp-cp-pp"),
    Layout(tp=2, cp=2, expt_tp=4, ranks=(2, 0, 3, 1)),
    Layout(tp=2, cp=2, ep=2, expt_tp=2, order="cp-dp-ep-tp-pp"),
    Layout(cp=3, ep=1, expt_tp=1, ranks=(1, 2, 3), name="offset"),
    Layout(tp=2, ep=2, expt_tp=1, ranks=(3, 2), name="offset, backwards"),
)
LAYOUTS_OF_8 = (
    Layout(tp=2, cp=2, dp=2, ep=2),
    Layout(tp=2, cp=2, dp=2, ep=4, expt_tp=1, order="dp-ep-tp-cp-pp"),
)


def make_module(case: Case, dtype: torch.dtype) -> MoE:
    torch.manual_seed(5)
    module = MoE(case.config, groups=ProcessGroups.single()).to(torch.float64)
    with torch.no_grad():
        module.router[min(1, case.config.num_experts - 1), 0] += case.favourite
    return module.to(dtype)


def make_batch(case: Case, dtype: torch.dtype, *, dp: int, cp: int) -> tuple[Tensor, Tensor]:
    """The joint input and the weights of the joint loss."""
    shape = (dp * case.rows, cp * case.positions, case.config.model_dim)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[..., 0] = x[..., 0].abs() + 1
    return x.to(dtype), torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(out: Tensor, aux: Tensor, weights: Tensor) -> Tensor:
    """A data rank's loss: means over its own positions and rows."""
    return (out * weights).sum(2).mean() + aux.mean()


# --- one process against a loop over tokens


def by_loop(module: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and balance loss, token by token."""
    config = module.config
    out, aux = torch.zeros_like(x), x.new_zeros(len(x))
    for r, row in enumerate(x):
        num_chosen = [0] * config.num_experts
        probability = x.new_zeros(config.num_experts)
        for p, token in enumerate(row):
            logits = module.router @ token
            probability = probability + logits.softmax(0) / len(row)
            order = sorted(range(config.num_experts), key=lambda e: (-logits[e].item(), e))
            chosen = order[: config.top_k]
            total = sum(logits[e].exp() for e in chosen)
            for e in chosen:
                num_chosen[e] += 1
                inner = module.up[e] @ token
                if config.mlp == "swiglu":
                    inner = functional.silu(module.gate[e] @ token) * inner
                else:
                    inner = functional.gelu(inner)
                out[r, p] += logits[e].exp() / total * (module.down[e] @ inner)
        for e in range(config.num_experts):
            share = num_chosen[e] / (len(row) * config.top_k)
            aux[r] += config.load_balance * config.num_experts * share * probability[e]
    return out, aux


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_process_computes_what_a_loop_over_tokens_does(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 5))
    config = replace(
        CONFIG,
        num_experts=num_experts,
        top_k=data.draw(st.integers(1, num_experts)),
        mlp=data.draw(st.sampled_from(["swiglu", "gelu"])),
    )
    module = make_module(Case(config=config), torch.float64)
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), config.model_dim)
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    # Whole numbers of little size, so that many logits are equal.
    x = torch.randint(-1, 2, shape).double().requires_grad_()
    with torch.no_grad():
        module.router.copy_(torch.randint(-1, 2, module.router.shape))
    wanted, got = by_loop(module, x), module(x)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    weights = torch.randn(shape, dtype=torch.float64)
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(loss_of(*wanted, weights), leaves, allow_unused=True)
    gradients = torch.autograd.grad(loss_of(*got, weights), leaves)
    for gradient, other in zip(gradients, expected, strict=True):
        other = torch.zeros_like(gradient) if other is None else other
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)


def test_the_balance_loss_is_a_rows_own_and_one_where_all_is_even() -> None:
    module = make_module(CASES["gelu"], torch.float64)
    x, _ = make_batch(CASES["gelu"], torch.float64, dp=2, cp=4)
    together = module(x)[1]
    apart = torch.cat([module(row[None])[1] for row in x])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0)
    assert together.std() > 0
    even = make_module(Case(config=replace(CONFIG, top_k=4)), torch.float64)
    with torch.no_grad():
        even.router.zero_()
    torch.testing.assert_close(even(x)[1], torch.full((4,), 0.5, dtype=torch.float64))


def test_nothing_comes_of_nothing() -> None:
    module = make_module(CASES["swiglu"], torch.float32)
    for shape in ((0, 3, 8), (2, 0, 8)):
        out, aux = module(torch.ones(shape))
        assert out.shape == shape
        assert torch.equal(aux, torch.zeros(shape[0]))


def test_names_shapes_and_refusals() -> None:
    module = make_module(CASES["swiglu"], torch.float32)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "router": (4, 8),
        "gate": (4, 8, 8),
        "up": (4, 8, 8),
        "down": (4, 8, 8),
    }
    assert "gate" not in dict(make_module(CASES["gelu"], torch.float32).named_parameters())
    assert {name: dict(dims) for name, dims in MoE.SPLITS.items()} == {
        "gate": {0: "ep", 1: "expt_tp"},
        "up": {0: "ep", 1: "expt_tp"},
        "down": {0: "ep", 2: "expt_tp"},
    }
    short = {"up": module.up[:2]}
    with pytest.raises(ConfigError, match=re.escape("`up` has 2 experts")):
        functional_call(module, short, (torch.ones(1, 1, 8),))


# --- layouts against one process


def shard(module: MoE, groups: ProcessGroups) -> dict[str, Tensor]:
    """This rank's shards, as leaves of their own."""
    shards = {}
    for name, parameter in module.named_parameters():
        local = parameter.detach()
        for dim, axis in MoE.SPLITS.get(name, {}).items():
            local = local.chunk(groups.size(axis), dim=dim)[groups.index(axis)]
        shards[name] = local.clone().requires_grad_()
    return shards


def add_over(x: Tensor, groups: ProcessGroups, name: str) -> Tensor:
    total = x.clone()
    if groups.size(name) > 1:
        dist.all_reduce(total, group=groups.group(name))
    return total


def check_replicas(x: Tensor, axis: Axis) -> None:
    """Bitwise equal on all ranks of the axis."""
    if axis.size > 1:
        others = [torch.empty_like(x) for _ in axis.ranks]
        dist.all_gather(others, x.contiguous(), group=axis.group)
        assert all(torch.equal(x, other) for other in others), axis.name


def compare(case: Case, groups: ProcessGroups, dtype: torch.dtype) -> None:
    dp, cp = groups.size("dp"), groups.size("cp")
    plain = make_module(case, dtype)
    joint, weights = make_batch(case, dtype, dp=dp, cp=cp)
    joint.requires_grad_()
    wanted = plain(joint)
    loss_of(*wanted, weights).backward()

    def part(whole: Tensor) -> Tensor:
        rows = whole.chunk(dp)[groups.index("dp")]
        return rows[:, groups.index("cp") :: cp]

    module = MoE(case.config, groups=groups)
    shards = shard(plain, groups)
    x = part(joint).detach().clone().requires_grad_()
    out, aux = functional_call(module, shards, (x,))
    loss_of(out, aux, part(weights)).backward()

    def close(got: Tensor | None, expected: Tensor | None) -> None:
        assert got is not None
        assert expected is not None
        tolerance = 1e-11 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)

    close(out, part(wanted[0]))
    close(aux, wanted[1].chunk(dp)[groups.index("dp")])
    assert aux.dtype == dtype
    close(x.grad, part(joint.grad) * (dp * cp))
    tp = Axis.of(groups, "tp")
    for replica in (out.detach(), x.grad, shards["router"].grad):
        check_replicas(replica, tp)
    for axis in (tp, Axis.of(groups, "cp")):
        check_replicas(aux.detach(), axis)
    close(add_over(shards["router"].grad, groups, "dp_cp") / (dp * cp), plain.router.grad)
    for name in set(shards) - {"router"}:
        expected = plain.get_parameter(name).grad
        for dim, axis_name in MoE.SPLITS[name].items():
            expected = expected.chunk(groups.size(axis_name), dim=dim)[groups.index(axis_name)]
        close(add_over(shards[name].grad, groups, "expt_dp") / (dp * cp), expected)


def compare_layouts(rank: RankContext, layouts: tuple[Layout, ...]) -> int:
    done = 0
    for layout in layouts:
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            # In float64 a wrong factor cannot hide; one case shows what a dtype changes.
            for name, dtype in (
                *((name, torch.float64) for name in CASES),
                ("gelu", torch.float32),
            ):
                try:
                    compare(CASES[name], groups, dtype)
                except AssertionError as error:
                    raise AssertionError(f"{layout}, {name}, {dtype}: {error}") from error
                done += 1
    return done


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(LAYOUTS_OF_2, id="2", marks=pytest.mark.slow),
        pytest.param(LAYOUTS_OF_4, id="4"),
        pytest.param(LAYOUTS_OF_8, id="8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_layouts_compute_what_one_process_does(layouts: tuple[Layout, ...]) -> None:
    num_ranks = max(layout.world_size for layout in layouts)
    done = run_ranks(num_ranks, compare_layouts, layouts).results
    for rank, number in enumerate(done):
        assert number == (len(CASES) + 1) * sum(rank in layout.ranks for layout in layouts)


def record_traffic(log: list[tuple[str, int, torch.dtype]]) -> None:
    """Note every tensor that a collective of this process is handed to send."""
    for name in (
        "all_reduce",
        "all_to_all_single",
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ):
        original = getattr(dist, name, None)
        if original is None:
            continue

        def noted(*tensors: Tensor, name: str = name, call: Any = original, **rest: Any) -> Any:
            sent = [tensor for tensor in tensors if isinstance(tensor, Tensor)][-1]
            log.append((name.rsplit("_", 1)[0], sent.numel(), sent.dtype))
            return call(*tensors, **rest)

        setattr(dist, name, noted)


def traffic(rank: RankContext) -> tuple[tuple[int, ...], list[tuple[str, int, torch.dtype]]]:
    """The rank's `expt_tp` group, and what a forward and a backward under autocast send."""
    case = CASES["swiglu"]
    log: list[tuple[str, int, torch.dtype]] = []
    with ProcessGroups.create(Layout(tp=2, cp=2, ep=2, expt_tp=2)) as groups:
        module = MoE(case.config, groups=groups)
        x, weights = make_batch(case, torch.float32, dp=1, cp=1)
        x.requires_grad_()
        shards = shard(make_module(case, torch.float32), groups)
        record_traffic(log)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, aux = functional_call(module, shards, (x,))
        loss_of(out, aux, weights).backward()
        return groups.ranks("expt_tp"), log


def autocast(rank: RankContext) -> float:
    """bf16 through both exchanges: the distance from float32, relative to its size."""
    case = CASES["swiglu"]
    plain = make_module(case, torch.float32)
    joint, weights = make_batch(case, torch.float32, dp=1, cp=1)
    wanted, _ = plain(joint)
    with ProcessGroups.create(Layout(tp=2, expt_tp=1, ep=2)) as groups:
        module = MoE(case.config, groups=groups)
        shards = shard(plain, groups)
        joint.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, aux = functional_call(module, shards, (joint,))
        assert (out.dtype, aux.dtype) == (torch.float32, torch.float32)
        loss_of(out, aux, weights).backward()
        for leaf in (joint, *shards.values()):
            assert leaf.grad.dtype == torch.float32
            assert leaf.grad.isfinite().all()
            assert leaf.grad.any()
    distance: float = ((out - wanted).norm() / wanted.norm()).item()
    return distance


def refusals(rank: RankContext) -> None:
    with ProcessGroups.create(Layout(dp=2, ep=2)) as groups:
        with pytest.raises(ConfigError, match="--ep 2 does not divide --num-experts 3"):
            MoE(replace(CONFIG, num_experts=3), groups=groups)
        with pytest.raises(ConfigError, match=r"MoE\.SPLITS"):
            MoE(CONFIG, groups=groups)(torch.ones(1, 1, 8))
    wide = ProcessGroups.create(Layout(dp=2, expt_tp=2))
    with wide, pytest.raises(ConfigError, match="--expt-tp 2 does not divide"):
        MoE(replace(CONFIG, expert_dim=7), groups=wide)
    bare = ProcessGroups.create(Layout(dp=2, ep=2), names=["dp_cp"])
    with bare, pytest.raises(GroupError, match="'ep'"):
        MoE(CONFIG, groups=bare)


def test_autocast_sends_bf16_and_stays_near() -> None:
    for distance in run_ranks(2, autocast).results:
        assert 1e-5 < distance < 2e-2


def test_what_is_sent_is_what_the_docstring_says() -> None:
    """On every rank 2 rows of 3 tokens of width 8, of which it takes 3 on, each 2 ways."""
    wide, half, number = torch.float32, torch.bfloat16, torch.int64
    results = run_ranks(4, traffic).results
    for members, log in results:
        there, back = log[3][1], log[6][1]
        longest = max(results[member][1][6][1] for member in members)
        assert there == 3 * 2 * 8
        assert log == [
            ("all", 2 * 2 * 4, wide),
            ("all_to_all", 4, number),
            ("all_gather", 4, number),
            ("all_to_all", there, half),
            ("all_gather", longest, half),
            ("reduce_scatter", 2 * longest, half),
            ("all_to_all", back, half),
            ("all_gather", 3 * 8, wide),
            ("all_to_all", there, half),
            ("all_gather", longest, half),
            ("reduce_scatter", 2 * longest, half),
            ("all_to_all", back, half),
            ("all_gather", 3 * 2, wide),
            ("all_gather", 3 * 8, half),
            ("all", 2 * 2 * 4, wide),
        ]


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(2, refusals)

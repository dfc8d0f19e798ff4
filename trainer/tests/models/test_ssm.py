"""The state-space mixer: its recurrence, step by step, and the same on every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import ConfigError
from holdfast.parallel import Layout, ProcessGroups
from holdfast_trainer.models import context
from holdfast_trainer.models.collectives import Axis
from holdfast_trainer.models.config import GPTConfig
from holdfast_trainer.models.ssm import StateSpace, chunked_scan, initial_state_space
from tests.harness import RankContext, run_ranks

# Heads share groups, and no two sizes are equal.
CONFIG = GPTConfig(
    mixers="s", model_dim=24, num_heads=2, state_heads=8, state_groups=4, state_dim=3, conv_width=4
)


def build(groups: ProcessGroups, config: GPTConfig = CONFIG) -> StateSpace:
    with torch.device("meta"):
        return StateSpace(config, groups=groups)


def whole_parameters(module: StateSpace, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter in full, with none at a value that hides it."""
    generator = torch.Generator().manual_seed(3)
    drawn = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        value = initial_state_space(name, shape=shape, generator=generator)
        if value is None:
            value = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
        value = value + 0.1 * torch.randn(shape, generator=generator)
        drawn[name] = value.to(dtype)
    return drawn


# The recurrence.


def step_by_step(x: Tensor, dt: Tensor, decay: Tensor, B: Tensor, C: Tensor) -> Tensor:
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    state = x.new_zeros((*x.shape[:1], *x.shape[2:], B.shape[3]))
    out = []
    for t in range(x.shape[1]):
        kept = torch.exp(dt[:, t] * decay)[..., None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = kept * state + added
        out.append((state * C[:, t, :, None, :]).sum(dim=-1))
    return torch.stack(out, dim=1)


def operands(
    positions: int, *, groups: int, dtype: torch.dtype, fast: float = 1.0
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(positions)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dt = draw(2, positions, 4, 5), functional.softplus(draw(2, positions, 4)) * fast
    B, C = draw(2, positions, groups, 3), draw(2, positions, groups, 3)
    return tuple(part.to(dtype) for part in (x, dt, -draw(4).exp(), B, C))


@pytest.mark.parametrize("positions", [1, 5, 16, 33, 65])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_scan_is_the_recurrence(positions: int, groups: int) -> None:
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        given = operands(positions, groups=groups, dtype=dtype)
        weight = torch.randn(2, positions, 4, 5, generator=torch.Generator().manual_seed(1))
        right = with_gradients(step_by_step, [part.double() for part in given], weight)
        for chunk in (1, 4, 16, 64):
            found = with_gradients(partial(chunked_scan, chunk=chunk), given, weight)
            for one, other in zip(found, right, strict=True):
                assert one.dtype is dtype
                assert (one - other).abs().max() <= bound * max(1.0, float(other.abs().max()))


def with_gradients(
    scan: Callable[..., Tensor], given: Sequence[Tensor], weight: Tensor
) -> list[Tensor]:
    leaves = [part.clone().requires_grad_() for part in given]
    out = scan(*leaves)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def test_fast_and_slow_decays_stay_exact_and_finite() -> None:
    # Differences of running sums would lose slow decays beside fast ones, and overflow.
    x, dt, decay, B, C = operands(200, groups=2, dtype=torch.float32, fast=30.0)
    dt[:, ::2] /= 1e5
    given = [part.clone().requires_grad_() for part in (x, dt, decay, B, C)]
    out = chunked_scan(*given)
    expected = step_by_step(*(part.double() for part in (x, dt, decay, B, C)))
    assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()
    out.sum().backward()
    assert all(bool(part.grad.isfinite().all()) for part in given)


# The whole mixer in one process.


def mixer_by_hand(weights: dict[str, Tensor], x: Tensor, config: GPTConfig) -> Tensor:
    width = config.conv_width

    def convolved(name: str) -> Tensor:
        channels = x @ weights[f"in_{name}"].T
        out = []
        for t in range(x.shape[1]):
            total = weights[f"conv_{name}_bias"]
            for back in range(min(width, t + 1)):
                tap = weights[f"conv_{name}"][:, width - 1 - back]
                total = total + tap * channels[:, t - back]
            out.append(total * torch.sigmoid(total))
        return torch.stack(out, dim=1)

    rows, length = x.shape[:2]
    heads, groups = config.num_state_heads, config.num_state_groups
    inputs = convolved("x").view(rows, length, heads, -1)
    B, C = (convolved(name).view(rows, length, groups, -1) for name in "BC")
    dt = torch.log1p(torch.exp(x @ weights["in_dt"].T + weights["dt_bias"]))
    mixed = step_by_step(inputs, dt, -torch.exp(weights["A_log"]), B, C)
    mixed = (mixed + weights["D"][:, None] * inputs).flatten(2)
    gate = x @ weights["in_z"].T
    gated = (mixed * gate * torch.sigmoid(gate)).view(rows, length, groups, -1)
    normed = gated / (gated.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    return (normed.flatten(2) * weights["norm"]) @ weights["out"].T


@pytest.mark.parametrize(("heads", "groups"), [(8, 4), (4, 1), (0, 0)])
def test_the_mixer_is_its_definition(heads: int, groups: int) -> None:
    config = GPTConfig(
        mixers="s", model_dim=24, num_heads=2, state_heads=heads, state_groups=groups, state_dim=3
    )
    module = build(ProcessGroups.single(), config)
    weights = whole_parameters(module, torch.float64)
    x = torch.randn(2, 70, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = functional_call(module, weights, (x,))
    expected = mixer_by_hand(weights, x, config)
    assert found.shape == x.shape
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_position_never_changes_what_came_before_it() -> None:
    module = build(ProcessGroups.single())
    weights = whole_parameters(module, torch.float32)
    x = torch.randn(1, 150, 24, generator=torch.Generator().manual_seed(1))
    before = functional_call(module, weights, (x,))
    for t in (0, 1, 63, 64, 100, 149):
        changed = x.clone()
        changed[0, t] += 1
        after = functional_call(module, weights, (changed,))
        assert torch.equal(after[0, :t], before[0, :t])
        assert not torch.allclose(after[0, t], before[0, t])
    far = x.clone()
    far[0, 60] += 10  # a chunk and more away: only the carried state can tell
    assert not torch.equal(functional_call(module, weights, (far,))[0, 140], before[0, 140])


class Products(TorchDispatchMode):
    """The types in which batched products are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.bmm.default:
            self.types.add(out.dtype)
        return out


def test_under_autocast_the_scan_stays_wide() -> None:
    module = build(ProcessGroups.single())
    weights = whole_parameters(module, torch.float32)
    x = torch.randn(1, 70, 24, generator=torch.Generator().manual_seed(1))
    exact = functional_call(module, weights, (x,))
    with torch.autocast("cpu", dtype=torch.bfloat16), Products() as products:
        out = functional_call(module, weights, (x,))
    assert products.types == {torch.float32}
    assert out.dtype is torch.bfloat16
    assert (out - exact).abs().max() <= 0.05 * exact.abs().max()


# How parameters begin and how they are cut.


def test_initial_values_are_those_of_mamba_2_and_come_from_the_generator() -> None:
    module = build(ProcessGroups.single(), GPTConfig(mixers="s", state_heads=64, state_groups=8))
    values: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        drawn = [
            initial_state_space(
                f"blocks.3.mixer.{name}", shape=shape, generator=torch.Generator().manual_seed(seed)
            )
            for seed in (1, 1, 2)
        ]
        values[name] = drawn[0]
        if drawn[0] is not None:
            assert drawn[0].shape == shape
            assert drawn[0].dtype is torch.float32
            assert torch.equal(drawn[0], drawn[1])
            constant = name in ("D", "norm") or (name.endswith("_bias") and name != "dt_bias")
            assert torch.equal(drawn[0], drawn[2]) == constant
    matrices = {"in_z", "in_x", "in_B", "in_C", "in_dt", "out"}
    assert {name for name, value in values.items() if value is None} == matrices
    rates, steps = values["A_log"].exp(), functional.softplus(values["dt_bias"])
    assert 1 <= rates.min() < 3 < 14 < rates.max() <= 16.001
    assert 0.000999 <= steps.min() < 0.002 < 0.05 < steps.max() <= 0.1001
    # Log-uniform: half of the steps below the geometric middle.
    assert 16 < int((steps < 0.01).sum()) < 48
    assert 0.45 < values["conv_x"].abs().max() <= 0.5
    assert bool((values["D"] == 1).all() and (values["conv_B_bias"] == 0).all())


def test_every_parameter_is_split_over_tp() -> None:
    module = build(ProcessGroups.single())
    assert {name for name, _ in module.named_parameters()} == set(StateSpace.SPLITS)
    assert {tuple(split.values()) for split in StateSpace.SPLITS.values()} == {("tp",)}


# Layouts.

LAYOUTS = (
    Layout(tp=2, ranks=(3, 6), name="tp2"),
    Layout(tp=4, ranks=(7, 2, 1, 0), name="tp4"),
    Layout(cp=2, ranks=(1, 0), name="cp2"),
    Layout(cp=4, ranks=(2, 3, 4, 5), name="cp4"),
    Layout(tp=2, cp=2, order="cp-tp-dp", ranks=(7, 2, 5, 4), name="other order"),
    Layout(tp=2, cp=2, dp=2, name="all"),
)


def cut(value: Tensor, name: str, groups: ProcessGroups) -> Tensor:
    for dim, axis in StateSpace.SPLITS[name].items():
        value = torch.chunk(value, groups.size(axis), dim=dim)[groups.index(axis)]
    return value


def gap(found: Tensor, right: Tensor, *, whole: Tensor) -> float:
    """The largest difference of a part, relative to the largest number of the whole."""
    assert found.shape == right.shape
    return float((found - right).abs().max() / whole.abs().max())


@dataclass(frozen=True)
class Alone:
    """One process's mixer: its input, the weights of its loss, and output and gradients."""

    x: Tensor
    weight: Tensor
    parameters: dict[str, Tensor]
    output: Tensor


def alone(dtype: torch.dtype, positions: int) -> Alone:
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(2, positions, 24, generator=generator).to(dtype) for _ in range(2))
    module = build(ProcessGroups.single())
    full = {k: v.requires_grad_() for k, v in whole_parameters(module, dtype).items()}
    output = functional_call(module, full, (x.requires_grad_(),))
    (output * weight).sum().backward()
    return Alone(x, weight, full, output.detach())


def gaps(groups: ProcessGroups, whole: Alone) -> dict[str, float]:
    """How far this rank's output and gradients are from those of one process."""
    cp = Axis.of(groups, "cp")
    full = whole.parameters

    def mine(value: Tensor) -> Tensor:
        rows = torch.chunk(value.detach(), groups.size("dp"))[groups.index("dp")]
        return context.take_positions(rows, axis=cp, dim=1).clone()

    module = build(groups)
    local = {k: cut(v.detach(), k, groups).clone().requires_grad_() for k, v in full.items()}
    own = mine(whole.x).requires_grad_()
    out = functional_call(module, local, (own,))
    (out * mine(whole.weight)).sum().backward()
    found = {
        "output": gap(out.detach(), mine(whole.output), whole=whole.output),
        "input": gap(own.grad, mine(whole.x.grad), whole=whole.x.grad),
    }
    for name, parameter in local.items():
        gradient = parameter.grad
        if name.startswith(("conv", "A_log", "D", "dt_bias")):
            others = gradient.clone()
            torch.chunk(others, cp.size)[cp.index].zero_()
            assert not others.any()
            assert gradient.any()
        if groups.size("dp_cp") > 1:
            dist.all_reduce(gradient, group=groups.group("dp_cp"))
        found[name] = gap(gradient, cut(full[name].grad, name, groups), whole=full[name].grad)
    return found


def on_layouts(rank: RankContext) -> dict[str, Any]:
    seen: dict[str, Any] = {"gaps": [], "refused": ""}
    # A few positions are one chunk, and many are several.
    wholes = [
        (dtype, positions, bound, alone(dtype, positions))
        for dtype, positions, bound in (
            (torch.float64, 8, 1e-12),
            (torch.float64, 88, 1e-12),
            (torch.float32, 88, 1e-6),
        )
    ]
    for layout in LAYOUTS:
        if rank.rank not in layout.ranks:
            continue
        with ProcessGroups.create(layout) as groups:
            for dtype, positions, bound, whole in wholes:
                for name, value in gaps(groups, whole).items():
                    case = f"{layout.name} {dtype} {positions} {name}"
                    seen["gaps"].append((case, value, bound))
    with ProcessGroups.create(Layout(tp=4, cp=2, name="too many")) as groups:
        try:
            build(groups)
        except ConfigError as error:
            seen["refused"] = str(error)
    return seen


@pytest.mark.slow
def test_every_layout_mixes_like_one_process() -> None:
    results = run_ranks(8, on_layouts).results
    num_layouts = [sum(rank in layout.ranks for layout in LAYOUTS) for rank in range(8)]
    for seen, number in zip(results, num_layouts, strict=True):
        assert len(seen["gaps"]) == number * 3 * (2 + len(StateSpace.SPLITS))
        assert [case for case in seen["gaps"] if not case[1] <= case[2]] == []
        assert "--tp 4 x --cp 2 = 8 does not divide the 4 groups" in seen["refused"]
        assert "--state-groups" in seen["refused"]

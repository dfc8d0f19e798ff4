"""Complex parameters: norms, NaN, zeros, clipping and steps are those of one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

from holdfast import Layout, ProcessGroups
from holdfast.optim import ShardedOptimizer, gradient_norm
from holdfast.optim.engine import clip_factor
from holdfast.optim.norms import scale_gradients
from tests.harness import RankContext, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_norms_are_torchs(data: st.DataObject) -> None:
    groups = ProcessGroups.single()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9999)))
    parameters = []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        wide = torch.complex128 if dtype.is_complex else torch.float64
        value = torch.randn(shape, generator=generator, dtype=wide)
        value = torch.where(value.real > 0.8, torch.zeros_like(value), value).to(dtype)
        if dtype.is_complex and data.draw(st.booleans()):
            value = value.conj()  # a lazy conjugate is a view with a flag
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = value.resolve_conj() if not value.is_conj() else value
        parameters.append(p)
    expected = math.sqrt(
        sum(float(p.grad.to(torch.complex128).abs().square().sum()) for p in parameters)
    )
    norm = gradient_norm(parameters, groups=groups, count_zeros=True)
    assert norm.value == pytest.approx(expected, rel=1e-12)
    zeros = sum(int((p.grad == 0).sum()) for p in parameters)
    assert norm.num_zeros == zeros
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, copies, strict=True):
        q.grad = p.grad.clone()
    torch_norm = nn.utils.clip_grad_norm_(copies, 0.5)
    assert norm.value == pytest.approx(float(torch_norm), rel=2e-2)
    scale_gradients(parameters, clip_factor(norm, limit=0.5))
    for p, q in zip(parameters, copies, strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    "value", [complex(0, math.nan), complex(0, math.inf), complex(math.nan, 0)]
)
def test_nothing_that_is_not_finite_hides_in_a_part(value: complex) -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.complex64))
    p.grad = torch.ones(5, dtype=torch.complex64)
    p.grad[2] = value
    norm = gradient_norm([p], groups=ProcessGroups.single())
    assert math.isnan(norm.value)
    assert norm.bad_ranks == (0,)


class Net(nn.Module):
    """Real, narrow and complex parameters; the loss is real."""

    def __init__(self, groups: ProcessGroups | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        for name, shape, dtype in (
            ("real", (5, 3), torch.float32),
            ("phase", (7, 3), torch.complex64),
            ("shift", (3,), torch.complex128),
        ):
            value = torch.randn(shape, generator=generator, dtype=dtype)
            if groups is not None:
                mesh = groups.mesh("dp_cp", "tp")
                value = distribute_tensor(value, mesh, [Replicate()] * 2, src_data_rank=None)
            setattr(self, name, nn.Parameter(value))

    def forward(self, rows: Tensor) -> Tensor:
        real, phase, shift = (
            p.to_local() if hasattr(p, "to_local") else p
            for p in (self.real, self.phase, self.shift)
        )
        x = torch.sin(rows[:, None] * torch.arange(1, 6)) @ real
        z = (x * torch.exp(1j * x)) @ phase.T
        z = z @ phase + shift
        return z.abs().square().mean(dim=1)


def make(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def trained(context: RankContext, declared: bool) -> list[Any]:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        net = Net(groups if declared else None)
        optimizer = ShardedOptimizer(
            net, net.parameters(), make=make, groups=groups, over="dp_cp", divisor=2,
            overlap=True, bucket_nbytes=64, align_nbytes=16, elementwise=True,
        )  # fmt: skip
        norms = []
        for step in range(3):
            rows = (torch.arange(8) + step).reshape(2, -1)[groups.index("dp_cp")]
            with optimizer.microbatch(is_last=True):
                net(rows).mean().backward()
            outcome = optimizer.step(max_norm=1.0, count_zeros=True)
            norms.append((outcome.norm, outcome.num_zeros, outcome.clipped))
        handle = None
        if groups.rank == 1:
            handle = net.phase.register_hook(partial(torch.add, other=complex(0, math.nan)))
        with optimizer.microbatch(is_last=True):
            net(torch.arange(4)).mean().backward()
        outcome = optimizer.step()
        assert outcome.skipped
        assert outcome.bad_ranks
        if handle is not None:
            handle.remove()
        optimizer.synchronize()
        whole = [p.to_local() if declared else p for p in net.parameters()]  # type: ignore[attr-defined]
        return [norms, [p.detach().clone() for p in whole]]


@pytest.mark.parametrize("declared", [False, True])
def test_steps_of_complex_parameters_equal_one_process(declared: bool) -> None:
    net = Net()
    optimizer = make(net.parameters())
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        net(torch.arange(8) + step).mean().backward()
        expected.append(float(nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        optimizer.step()
    for norms, values in run_ranks(2, trained, declared).results:
        for (norm, zeros, clipped), true in zip(norms, expected, strict=True):
            assert norm == pytest.approx(true, rel=1e-5)
            assert zeros == 0
            assert clipped == (true > 1)
        for value, p in zip(values, net.parameters(), strict=True):
            assert torch.allclose(value, p, atol=1e-5)

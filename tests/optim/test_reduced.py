"""A plain optimizer whose gradients something else reduces: which ranks must have a gradient."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast import Layout, ProcessGroups
from holdfast.errors import ConfigError, HoldfastError
from holdfast.fsdp import fully_shard_model
from holdfast.optim import ChainedOptimizer, ReducedOptimizer
from tests.harness import RankContext, run_ranks


def sparse(
    context: RankContext, sizes: dict[str, Any], used_by: tuple[int, ...]
) -> tuple[str, bool]:
    """The error of a step in which some ranks have a gradient of their expert; if it changed."""
    with ProcessGroups.create(Layout(**sizes)) as groups:
        mesh = groups.mesh("expt_dp", "ep", "expt_tp")
        placed = [Replicate(), Shard(0), Replicate()]
        whole = torch.arange(8.0).reshape(4, 2)
        expert = nn.Parameter(distribute_tensor(whole, mesh, placed, src_data_rank=None))
        dense = nn.Parameter(torch.ones(3))
        optimizer = ReducedOptimizer(torch.optim.SGD([dense, expert], lr=0.5), groups)
        dense.grad = torch.ones(3)
        if context.rank in used_by:
            expert.grad = DTensor.from_local(
                torch.ones_like(local(expert)), mesh, placed, run_check=False
            )
        before = local(expert).clone()
        message = ""
        try:
            outcome = optimizer.step()
        except HoldfastError as error:
            message = str(error)
        else:
            copies = groups.size("expt_dp")
            assert outcome.norm == pytest.approx((3 + 4 * len(used_by) / copies) ** 0.5)
        return message, not torch.equal(before, local(expert))


def local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


@pytest.mark.parametrize(
    ("sizes", "used_by"),
    [
        ({"dp": 4, "ep": 2}, (1, 3)),
        ({"tp": 2, "dp": 2, "ep": 2, "expt_tp": 1}, (0, 2)),
    ],
)
def test_an_expert_that_no_token_was_sent_to_needs_no_gradient(
    sizes: dict[str, Any], used_by: tuple[int, ...]
) -> None:
    """Ranks of one `dp_cp` hold different experts: before, this was refused as not reduced."""
    results = run_ranks(4, sparse, sizes, used_by).results
    assert results == [("", rank in used_by) for rank in range(4)]


@pytest.mark.parametrize(
    ("sizes", "used_by"),
    [
        ({"dp": 4, "ep": 2}, (1,)),
        # All ranks of `tp`, none of which shares its dense gradients with another.
        ({"tp": 4, "ep": 2, "expt_tp": 1}, (1,)),
    ],
)
def test_a_gradient_of_an_expert_that_only_some_of_its_ranks_have_is_refused(
    sizes: dict[str, Any], used_by: tuple[int, ...]
) -> None:
    """Before, with `dp_cp` of one rank nothing was compared, and copies became different."""
    results = run_ranks(4, sparse, sizes, used_by).results
    expected = r"a parameter of shape [4, 2] has a gradient on 1 of the 2 ranks of 'expt_dp'"
    for message, _ in results:
        assert message == results[0][0]
        assert expected in message
    assert not results[1][1]
    assert not results[3][1]


def num_hooks(parameter: Any) -> int:
    return len(parameter._post_accumulate_grad_hooks or {})


def halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(2)


class Unfinished(torch.autograd.Function):
    """The sum of a tensor, which has no backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def averaged(context: RankContext) -> None:
    def one(value: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.full((3,), value))
        return parameter, torch.optim.SGD([parameter], lr=0.5)

    with ProcessGroups.create(Layout(dp=2)) as groups:
        parameter, inner = one(1.0)
        optimizer = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        # Frozen after its backward: in one process the optimizer uses its gradient all the same.
        (parameter * (1 + context.rank)).sum().backward()
        parameter.requires_grad_(False)
        assert optimizer.step().norm == pytest.approx(3**0.5 * 1.5)
        assert torch.equal(parameter, torch.full((3,), 1 - 0.5 * 1.5))
        parameter.requires_grad_(True)
        (parameter * (1 + context.rank)).sum().backward()
        with pytest.raises(ConfigError, match="stepped by itself, before reduce= has made its"):
            inner.step()
        assert optimizer.step().norm > 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with optimizer.microbatch(is_last=True):
                    parameter.sum().backward()
            optimizer.step(max_norm=1.0)
            with optimizer.microbatch(is_last=True):
                parameter.sum().backward()
            inner.zero_grad()
            with optimizer.microbatch(is_last=True):
                parameter.sum().backward()
                nn.utils.clip_grad_norm_([parameter], 1.0)  # as part of the backward
        nn.utils.clip_grad_norm_([parameter], 1.0)
        with pytest.warns(RuntimeWarning, match=r"clip with step\(max_norm="):
            optimizer.step()
        assert num_hooks(parameter) == 0  # it warns once
        parameter, inner = one(1.0)
        optimizer = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        with optimizer.microbatch(is_last=False):
            parameter.sum().backward()
        nn.utils.clip_grad_value_([parameter], 0.1)
        with pytest.warns(RuntimeWarning, match=r"clip with step\(max_norm="):
            optimizer.microbatch(is_last=True).__enter__()
        optimizer.drop_gradients()
        parameter, inner = one(1.0)
        optimizer = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        in_place = parameter.register_post_accumulate_grad_hook(halve_gradient)  # of the backward
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                parameter.sum().backward()
            optimizer.step()
            # A backward that never ends; that of what was computed last comes first.
            unfinished = Unfinished.apply(torch.ones(3, requires_grad=True))
            with pytest.raises(ZeroDivisionError):
                (unfinished + parameter.sum()).backward()
            assert parameter.grad is not None
            optimizer.drop_gradients()
        in_place.remove()
        parameter.sum().backward()
        nn.utils.clip_grad_norm_([parameter], 1.0)
        with pytest.warns(RuntimeWarning, match=r"clip with step\(max_norm="):
            optimizer.step()
        parameter, inner = one(2.0)
        ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)  # gone at once
        parameter.sum().backward()
        inner.step()
        before = num_hooks(parameter)
        closed = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        chained = ChainedOptimizer({"optimizer": closed})
        closed.close()
        assert num_hooks(parameter) == before
        for optimizer in (closed, chained):
            with pytest.raises(ConfigError, match="'optimizer' is closed; build another one"):
                optimizer.step()
        assert num_hooks(parameter) == before
        optimizer = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        (parameter * (1 + context.rank)).sum().backward()
        assert optimizer.step().norm == pytest.approx(3**0.5 * 1.5)
        parameter, inner = one(1.0)
        optimizer = ReducedOptimizer(inner, groups, reduce="dp_cp", divisor=2)
        # Of another element on each rank, as of an embedding with sparse=True.
        index = torch.tensor([[context.rank]])
        parameter.grad = torch.sparse_coo_tensor(index, [2.0], (3,), check_invariants=True)
        optimizer.step()
        assert parameter.tolist() == [0.5, 0.5, 1.0]
        phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = ReducedOptimizer(
            torch.optim.SGD([phase], lr=0.5), groups, reduce="dp_cp", divisor=2
        )
        torch.view_as_real(phase.conj().resolve_conj()).sum().mul(1 + context.rank).backward()
        assert phase.grad is not None
        assert phase.grad.is_conj()  # a view, which no backend can add up
        optimizer.step()
        assert torch.equal(phase, torch.full_like(phase, 1 - 0.75 * (1 - 1j)))


def test_an_optimizer_never_steps_with_the_gradients_of_one_rank() -> None:
    """I1: ranks would part, silently."""
    run_ranks(2, averaged)


def extended(context: RankContext) -> None:
    def refusal(optimizer: ReducedOptimizer) -> str:
        with pytest.raises(ConfigError) as refused:
            optimizer.step()
        return str(refused.value)

    with ProcessGroups.create(Layout(dp=2)) as groups:
        for reduce in ("dp_cp", None):
            for is_chained in (False, True):
                first = nn.Parameter(torch.ones(3))
                inner = torch.optim.SGD([first], lr=0.5)
                alone = ReducedOptimizer(inner, groups, reduce=reduce, divisor=2)
                optimizer = ChainedOptimizer({"optimizer": alone}) if is_chained else alone
                for values in (1.0, 2.0 + context.rank):
                    new = nn.Parameter(torch.full((2,), values))
                    inner.add_param_group({"params": [new]})
                    first.grad, new.grad = torch.ones(3), torch.ones(2)
                    if values == 1.0:
                        assert optimizer.step().norm == pytest.approx(5**0.5)
                        assert torch.equal(new, torch.full((2,), 0.5))
                    else:
                        assert "other values on rank 1 than on rank 0" in refusal(optimizer)
                        assert torch.equal(new, torch.full((2,), values))
                    inner.param_groups.pop()

        for reduce in ("dp_cp", None):
            first, same, other = (nn.Parameter(torch.ones(3)) for _ in range(3))
            inner = torch.optim.SGD([("first", first)], lr=0.5)
            optimizer = ReducedOptimizer(inner, groups, reduce=reduce, divisor=2)
            members = inner.param_groups[0]["params"]
            members.append(same)
            if context.rank == 1:
                members.append(other)
            for _ in range(2):  # nothing was taken for granted after the first
                first.grad = torch.ones(3)
                assert " parameters" in refusal(optimizer)
                assert torch.equal(first, torch.ones(3))
            if context.rank == 1:
                members.pop()
            first.grad = torch.ones(3)
            assert optimizer.step().norm == pytest.approx(3**0.5)
            assert num_hooks(first) == num_hooks(same) == (reduce is not None)  # one in all
            with pytest.raises(ConfigError, match="cannot be copied or pickled; copy the model"):
                copy.deepcopy(optimizer)

        net = nn.Linear(3, 3)
        sharded = fully_shard_model(net, groups, experts=(), units=())
        inner = torch.optim.SGD([net.weight], lr=0.5)
        if context.rank == 1:
            inner.param_groups[0]["params"].append(net.bias)  # its shard of it alone would train
        with sharded.microbatch(is_last=True):
            net(torch.ones(3)).sum().backward()
        with pytest.raises(ConfigError, match="ranks differ in number of new parameters"):
            sharded.step(inner)


def test_parameters_that_an_optimizer_gets_later_are_the_same_on_all_ranks() -> None:
    """I1: a head that each rank drew by itself made ranks part; one too many ended the process."""
    run_ranks(2, extended)

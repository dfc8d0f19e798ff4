"""Plain tensors of which ranks hold shards: found out if undeclared, exact if declared."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from holdfast import ConfigError, Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from holdfast.optim import ReducedOptimizer, ShardedOptimizer, gradient_norm
from tests.harness import RankContext, run_ranks

WEIGHT = torch.arange(24.0).reshape(6, 4) / 24
PULL = torch.sin(torch.arange(24.0)).reshape(6, 4)
"""The gradient of the whole weight on data rank 0; three times that on data rank 1."""
LR = 0.1
EXPERTS = [torch.full((2, 3), float(number)) for number in range(4)]


class Half(nn.Module):
    """Half of the rows of a weight as a plain tensor, as Megatron has it, and a whole bias."""

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.index = groups.index("tp")
        self.weight = nn.Parameter(WEIGHT.chunk(2)[self.index].clone())
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, groups: ProcessGroups) -> Tensor:
        """A loss whose gradients are those of the whole model."""
        factor = 1 + 2 * groups.index("dp_cp")
        return factor * ((self.weight * PULL.chunk(2)[self.index]).sum() + self.bias.sum())


def summed(net: nn.Module, groups: ProcessGroups, over: str = "dp_cp") -> Callable[[], None]:
    def reduce() -> None:
        for p in net.parameters():
            if groups.size(over) > 1:
                dist.all_reduce(p.grad, group=groups.group(over))
            p.grad.div_(groups.size("dp_cp"))  # type: ignore[union-attr]

    return reduce


def kinds(
    net: nn.Module, groups: ProcessGroups, over: str = "dp_cp"
) -> dict[str, Callable[..., Any]]:
    """Both ways to step a model, given `shards`."""
    parameters = list(net.named_parameters())
    sgd = partial(torch.optim.SGD, lr=LR)
    return {
        "sharded": lambda **options: ShardedOptimizer(
            net, net.parameters(), make=sgd, groups=groups, over=over, bucket_nbytes=4000,
            divisor=groups.size("dp_cp"), elementwise=True, **options,
        ),
        "reduced": lambda **options: ReducedOptimizer(
            sgd(parameters), groups, reduce=summed(net, groups, over), **options
        ),
    }  # fmt: skip


def refusal(build: Callable[..., Any], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(**options)
    return str(caught.value)


def tensor_parallel(context: RankContext) -> list[str]:
    messages = []
    with ProcessGroups.create(Layout(tp=2, dp=2)) as groups:
        for kind in ("sharded", "reduced"):
            net = Half(groups)
            build = kinds(net, groups)[kind]
            messages.append(refusal(build))
            some = {"tp": [net.weight]} if context.rank < 2 else None
            messages.append(refusal(build, shards=some))
            if groups.index("dp_cp") == 1:
                net.bias.data[0] = 7
            messages.append(refusal(build, shards={"tp": [net.weight]}))
            net = Half(groups)
            optimizer = kinds(net, groups)[kind](shards={"tp": [net.weight]})
            with optimizer.microbatch(is_last=True):
                net(groups).backward()
            outcome = optimizer.step(max_norm=1.0, count_zeros=True)
            norm = 2 * math.sqrt(float(PULL.square().sum()) + 4)
            assert outcome.norm == pytest.approx(norm)
            assert outcome.num_zeros == 1  # the sine of 0
            if kind == "sharded":
                optimizer.synchronize()
            after = (WEIGHT - LR * 2 * PULL / norm).chunk(2)[net.index]
            torch.testing.assert_close(net.weight.detach(), after)
            wrong(kinds(net, groups)[kind], net, groups)
        messages.append(refusal(partial(fully_shard_model, Half(groups), groups, experts=())))
        net = Half(groups)
        net.weight.grad, net.bias.grad = net.weight.detach().clone(), torch.zeros(4)
        twice = [net.weight, net.weight]  # as each of the names of a tied one
        exact = gradient_norm(net.parameters(), groups=groups, shards={"tp": twice})
        assert exact.value == pytest.approx(float(WEIGHT.norm()))
    return messages


def wrong(build: Callable[..., Any], net: Half, groups: ProcessGroups) -> None:
    """Declarations that do not fit, and a `make` that fails, on one rank: raised on all."""
    good = {"tp": [net.weight]}
    placed = DTensor.from_local(net.bias, groups.mesh("dp_cp"), [Replicate()], run_check=False)
    for shards, expected in (
        ([net.weight], "must be a dict of axes"),
        ({"dp": [net.weight]}, "must be 'tp', 'ep' or 'expt_tp', got 'dp'"),
        ({"tp": ["weight"]}, "has a str that is not a parameter.*not names"),
        ({"tp": torch.ones(3)}, r"has a Tensor of shape \[3\] that is not"),
        ({"tp": [nn.Parameter(placed)]}, "has a DTensor of shape"),
    ):
        with pytest.raises(ConfigError, match=rf"rank 2: .*{expected}"):
            build(shards=shards if groups.rank == 2 else good)

    def make(listed: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if groups.rank == 2:
            raise ValueError("too late")
        return torch.optim.SGD(listed, lr=LR)

    net = Half(groups)
    with pytest.raises(ConfigError, match=r"rank 2: .*: make failed .* too late"):
        ShardedOptimizer(
            net, net.parameters(), make=make, groups=groups, over="dp_cp", divisor=1,
            shards={"tp": [net.weight]},
        )  # fmt: skip


def test_shards_that_are_plain_tensors_are_refused_or_declared() -> None:
    """M12, S4: before, the norm counted half of each half, without an error."""
    results = run_ranks(4, tensor_parallel).results
    assert all(messages == results[0] for messages in results)
    *both, sharded_model = results[0]
    for undeclared, in_part, unequal in (both[:3], both[3:]):
        assert "parameter 'weight' has other values on rank 1 than on rank 0" in undeclared
        assert "shards={'tp': [parameter, ...]}" in undeclared
        assert "DTensor on groups.mesh('dp_cp', 'tp')" in undeclared
        assert "parameter 'weight' is declared to be the same along 'dp_cp' on rank 0" in in_part
        assert "declare it alike on all ranks" in in_part
        assert "parameter 'bias' has other values on rank 2 than on rank 0" in unequal
        assert "same initial values" in unequal
        assert "shards=" not in unequal
    assert "If each holds a shard of one tensor, make it a DTensor on groups" in sharded_model


class Own(nn.Module):
    """Two of the four experts, under their own names or under those of their places."""

    def __init__(self, groups: ProcessGroups, *, named: bool) -> None:
        super().__init__()
        self.numbers = [2 * groups.index("ep") + i for i in range(2)]
        for place, number in enumerate(self.numbers):
            parameter = nn.Parameter(EXPERTS[number].clone())
            self.register_parameter(f"expert{number if named else place}", parameter)

    def pull(self) -> Tensor:
        """Each expert gets rows from all data ranks, on the ranks that hold it."""
        pairs = zip(self.numbers, self.parameters(), strict=True)
        return torch.stack([(1 + number) * p.sum() for number, p in pairs]).sum()


def experts(context: RankContext) -> list[str]:
    messages = []
    norm = math.sqrt(sum(6 * (1 + number) ** 2 for number in range(4))) / 2
    with ProcessGroups.create(Layout(dp=4, ep=2)) as groups:
        for kind, named, declares in (
            ("sharded", True, False),
            ("sharded", True, True),
            ("sharded", False, True),
            ("reduced", True, True),
            ("reduced", False, True),
        ):
            net = Own(groups, named=named)
            shards = {"ep": list(net.parameters())} if declares else None
            optimizer = kinds(net, groups, "expt_dp")[kind](shards=shards)
            with optimizer.microbatch(is_last=True):
                net.pull().backward()
            outcome = optimizer.step(count_zeros=True)
            assert outcome.norm == pytest.approx(norm), (kind, named)
            if kind == "sharded":
                optimizer.synchronize()
            for number, p in zip(net.numbers, net.parameters(), strict=True):
                after = EXPERTS[number] - LR * (1 + number) / 2
                torch.testing.assert_close(p.detach(), after)
        for kind in ("sharded", "reduced"):
            net = Own(groups, named=False)
            messages.append(refusal(kinds(net, groups, "expt_dp")[kind]))
        messages.append(refusal(kinds(net, groups)["sharded"], shards={"ep": [net.expert0]}))
    return messages


def test_plain_experts_have_names_of_their_own_or_are_declared() -> None:
    """M12, S4: what `fully_shard_model` accepts, a sharded optimizer accepts."""
    results = run_ranks(4, experts).results
    assert all(messages == results[0] for messages in results)
    sharded, reduced, dense = results[0]
    assert "'expert0' is a plain tensor on ranks [0, 2] and on ranks [1, 3]" in sharded
    assert "give each expert its own name" in sharded
    assert "parameter 'expert0' has other values on rank 1" in reduced
    assert "shards= has 'ep', but gradients are added up over 'dp_cp'" in dense

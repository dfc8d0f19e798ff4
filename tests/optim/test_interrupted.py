"""An error in a microbatch on one rank, where others wait in collectives that are not ours."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from holdfast import HoldfastError, Layout, ProcessGroups
from holdfast.optim import ReducedOptimizer
from tests.harness import RankContext, run_ranks


class Trouble(Exception):
    """An error that a user's model raises."""


def waiting_in_the_model(context: RankContext) -> str:
    with ProcessGroups.create(Layout(tp=2), timeout_s=1, data_timeout_s=1) as groups:
        torch.manual_seed(0)
        inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer = ReducedOptimizer(inner, groups)

        def run() -> None:
            with optimizer.microbatch(is_last=True):
                if context.rank == 1:
                    raise Trouble("before a sum over tp")
                dist.all_reduce(torch.ones(3), group=groups.group("tp"))

        with pytest.raises((Trouble, HoldfastError)) as caught:
            run()
    return f"{caught.typename}: {caught.value}"


def test_ranks_that_wait_in_the_models_own_collectives_name_the_one_that_failed() -> None:
    """I1: before, they raised the backend's text after its limit, and named no rank."""
    first, second = run_ranks(2, waiting_in_the_model, fresh=True, timeout_s=60).results
    assert "rank 1" in first
    assert second.startswith("Trouble: before a sum over tp")

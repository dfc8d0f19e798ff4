"""What code written for torch optimizers does with a sharded one: it works, or it says so."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from holdfast import Checkpointer, ConfigError, HoldfastError, OptimizerState, ProcessGroups
from holdfast.optim import ChainedOptimizer, LossScaler, ReducedOptimizer, ShardedOptimizer
from tests.optim.common import adamw, momentum


def net_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sharded(net: nn.Module, parameters: Any = None, **options: Any) -> ShardedOptimizer:
    options = {"make": momentum, "bucket_nbytes": 64, "groups": ProcessGroups.single(), **options}
    return ShardedOptimizer(
        net, list(net.parameters()) if parameters is None else parameters,
        over="dp_cp", divisor=1, **options,
    )  # fmt: skip


def chained(net: nn.Sequential) -> ChainedOptimizer:
    groups = ProcessGroups.single()
    return ChainedOptimizer(
        {
            "a": sharded(net, list(net[0].parameters()), name="a", groups=groups),
            "b": sharded(net, list(net[2].parameters()), name="b", make=adamw, groups=groups),
        }
    )


def backward(net: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
    with optimizer.microbatch(is_last=True):
        (net(torch.ones(3, 4)).square().mean() * scale).backward()


def backward_twice(net: nn.Module, optimizer: Any) -> None:
    with optimizer.microbatch(is_last=True):
        loss = net(torch.ones(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()


SCHEDULES: dict[str, Any] = {
    "step": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 5),
    "onecycle": lambda o: lrs.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "sequence": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1), lrs.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_take_it_as_it_is(name: str, tmp_path: Any) -> None:
    net, other = net_of(), net_of()
    optimizer = sharded(net)
    whole = momentum([{"params": list(other.parameters())}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "scheduler before optimizer": step has to be counted
        schedules = [SCHEDULES[name](optimizer), SCHEDULES[name](whole)]
        for _ in range(6):
            backward(net, optimizer)
            outcome = optimizer.step()
            assert not outcome.skipped
            other(torch.ones(3, 4)).square().mean().backward()
            whole.step()
            whole.zero_grad()
            for schedule in schedules:
                schedule.step()
            assert [g["lr"] for g in optimizer.param_groups] == [
                g["lr"] for g in whole.param_groups
            ]
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    state = {"model": net, "optimizer": OptimizerState(optimizer, net), "schedule": schedules[0]}
    Checkpointer(tmp_path).save(1, state)
    fresh = net_of(5)
    again = sharded(fresh)
    schedule = SCHEDULES[name](again)
    into = {"model": fresh, "optimizer": OptimizerState(again, fresh), "schedule": schedule}
    Checkpointer(tmp_path).load(into, step=1)
    for _ in range(3):
        for model, opt, plan in ((net, optimizer, schedules[0]), (fresh, again, schedule)):
            backward(model, opt)
            opt.step()
            plan.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), fresh.parameters(), strict=True))
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_schedulers_take_a_chain() -> None:
    net = net_of()
    optimizer = chained(net)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = lrs.LambdaLR(optimizer, [lambda s: 0.5**s, lambda s: 0.1**s])
    before = [group["lr"] for group in optimizer.param_groups]
    backward(net, optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer["a"].inner.param_groups[0]["lr"] == before[0] * 0.5
    assert optimizer["b"].inner.param_groups[0]["lr"] == pytest.approx(before[1] * 0.1)
    assert len(optimizer.state) == 4
    plateau = lrs.ReduceLROnPlateau(optimizer["a"], patience=0)
    plateau.step(1.0), plateau.step(2.0)
    assert optimizer["a"].param_groups[0]["lr"] == pytest.approx(before[0] * 0.05)


@pytest.mark.parametrize("make", [sharded, chained])
def test_state_is_read_and_written_where_it_is(make: Any) -> None:
    """S4: an entry is that of the optimizer that has the tensor, and a parameter has none here."""
    net = net_of()
    optimizer = make(net)
    assert not [
        p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state
    ]
    for _ in range(2):
        backward(net, optimizer)
        optimizer.step()
    shares = [p for group in optimizer.param_groups for p in group["params"]]
    names = [{*optimizer.state[p]} for p in shares]
    assert all(names)
    assert {*optimizer.state} == {*shares}
    assert optimizer.state.pop(shares[-1], None)
    assert shares[-1] not in optimizer.state
    assert optimizer.state.get(shares[-1]) is None
    optimizer.state[shares[-1]] = {"mine": 1}
    assert optimizer.inners[-1].state[shares[-1]] == {"mine": 1}
    del optimizer.state[shares[-1]]
    assert optimizer.state.setdefault(shares[-1], {"mine": 2}) == {"mine": 2}
    parameter = next(net.parameters())
    untaken: Any = (
        lambda: optimizer.state[parameter],
        lambda: parameter in optimizer.state,
        lambda: optimizer.state.pop(parameter, None),
        lambda: optimizer.state.update({parameter: {}}),
    )
    for call in untaken:
        with pytest.raises(ConfigError, match="not in param_groups"):
            call()
    optimizer.state.clear()
    assert not any(inner.state for inner in optimizer.inners)


@pytest.mark.parametrize("make", [sharded, chained])
def test_a_gradient_after_the_last_microbatch_is_refused(make: Any, tmp_path: Path) -> None:
    """I1: its bucket is reduced; I3: one that was put into `.grad` by hand is not saved over."""
    net = net_of()
    optimizer = make(net)
    backward(net, optimizer)
    with pytest.raises(ConfigError, match="a gradient came after its bucket was reduced"):
        net(torch.ones(3, 4)).sum().backward()
    optimizer.drop_gradients()
    with pytest.raises(ConfigError, match="a gradient came after its bucket was reduced"):
        backward_twice(net, optimizer)
    optimizer.drop_gradients()
    backward(net, optimizer)
    net[0].weight.grad = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="a gradient came after its bucket was reduced"):
        optimizer.step()
    with optimizer.microbatch(is_last=False):
        net(torch.ones(3, 4)).sum().backward()
    mine = torch.ones(4, 4)
    net[0].weight.grad = mine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert net[0].weight.grad is mine
    optimizer.drop_gradients()
    backward(net, optimizer)
    optimizer.step()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    state = {"optimizer": OptimizerState(optimizer, net)}
    with pytest.raises(HoldfastError, match="holds gradients that no step has used"):
        Checkpointer(tmp_path).save(1, state)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, net.parameters()))
    Checkpointer(tmp_path).save(1, state)
    for wrong in (optimizer, net):
        with pytest.raises(ConfigError, match="is not a plain torch optimizer"):
            ReducedOptimizer(wrong, ProcessGroups.single())


@pytest.mark.parametrize("make", [sharded, chained])
def test_what_means_something_else_here_is_refused(make: Any) -> None:
    net = net_of()
    optimizer = make(net)
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ConfigError, match=r"OptimizerState\(optimizer, model\)"):
            call()
    with pytest.raises(ConfigError, match="build another one"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="call backward yourself"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(ConfigError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=False)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    backward(net, optimizer)
    with pytest.raises(ConfigError, match="LossScaler"):
        scaler.step(optimizer)
    for limit in (-1.0, math.nan, -math.inf, "1", True):
        with pytest.raises(ConfigError, match="max_norm"):
            optimizer.step(max_norm=limit)
    backward(net, optimizer)  # a step forgets gradients in every case
    assert optimizer.step(max_norm=math.inf).clipped is False
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    backward(net, optimizer)
    optimizer.step(max_norm=1e-3)
    assert called == [1]


@pytest.mark.parametrize("make", [sharded, chained])
def test_zero_grad_forgets_what_lies_in_buckets(make: Any) -> None:
    net, other = net_of(), net_of()
    optimizer, straight = make(net), make(other)
    backward(net, optimizer, scale=100.0)
    net[0].weight.grad = torch.ones(4, 4)  # by hand: in no bucket yet
    optimizer.zero_grad()
    backward(net, optimizer)
    backward(other, straight)
    assert optimizer.step() == straight.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_a_chain_of_other_divisors_is_refused() -> None:
    """S4: the guard was asked by a `MultiModuleOptimizer` alone."""
    net = net_of()
    common: dict[str, Any] = {"make": momentum, "groups": ProcessGroups.single(), "over": "dp_cp"}
    parts = {
        name: ShardedOptimizer(net, part.parameters(), divisor=divisor, name=name, **common)
        for divisor, (name, part) in enumerate(net.named_children(), 1)
        if [*part.parameters()]
    }
    with pytest.raises(ConfigError, match=r"divide gradients by different numbers, \{'0': 1"):
        ChainedOptimizer(parts)


@pytest.mark.parametrize("make", [sharded, chained])
def test_a_step_without_backward_says_so(make: Any) -> None:
    net = net_of()
    optimizer = make(net)
    with pytest.raises(ConfigError, match=r"no parameter got a gradient.*call backward first"):
        optimizer.step()
    backward(net, optimizer)
    with (
        pytest.raises(ConfigError, match="a microbatch after the last one of this step"),
        optimizer.microbatch(is_last=True),
    ):
        pass
    assert optimizer.step().norm > 0
    with pytest.raises(ConfigError, match="no parameter got a gradient"):
        optimizer.step()
    for p in net.parameters():
        p.requires_grad_(False)
    frozen = sharded(net_of().requires_grad_(False))
    assert frozen.step().norm == 0.0  # nothing could get one


def test_reading_gradients_before_the_step_says_where_they_are() -> None:
    net = net_of()
    optimizer = sharded(net)
    clip = nn.utils.clip_grad_norm_
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    shares = [p for group in optimizer.param_groups for p in group["params"]]
    with optimizer.microbatch(is_last=False):
        net(torch.ones(3, 4)).mean().backward()
    backward(net, optimizer)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters())
    for read in (
        lambda: clip(net.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(net.parameters(), 1.0),
        lambda: [p.grad for p in net.parameters()],
        lambda: clip(shares, 1.0),  # what a loop over param_groups gets
        lambda: scaler.unscale_(optimizer),
        net.zero_grad,
        lambda: net.zero_grad(set_to_none=False),
    ):
        with pytest.raises(
            ConfigError, match=r"0\.weight: its gradient is in the sharded.*max_norm"
        ):
            read()
    assert not net(torch.ones(1, 4)).isnan().any()
    assert optimizer.step(max_norm=1e-4).clipped
    assert all(type(p) is nn.Parameter and p.grad is None for p in net.parameters())
    assert all(type(p) is torch.Tensor and p.grad is None for p in shares)
    assert clip(net.parameters(), 1.0) == 0  # after the step there are none, as after zero_grad
    # without microbatch nobody knows which backward was the last one
    net(torch.ones(3, 4)).mean().backward()
    with pytest.warns(RuntimeWarning, match=r"clip_grad_norm_.*find nothing") as warned:
        clip(net.parameters(), 1.0)
    assert len(warned) == 1
    net(torch.ones(3, 4)).mean().backward()
    assert optimizer.step().norm > 0
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_reading_gradients_inside_of_microbatch_says_so_too() -> None:
    """As is usual, right after backward, in the context; and between two microbatches."""
    net = net_of()
    optimizer = sharded(net)
    for is_last in (False, True):
        with optimizer.microbatch(is_last=is_last):
            net(torch.ones(3, 4)).mean().backward()
            with pytest.raises(ConfigError, match=r"its gradient is in the sharded.*max_norm"):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if not is_last:
            with pytest.warns(RuntimeWarning, match="find nothing"):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert optimizer.step().norm > 0
    # After the last one also of a parameter without any here: another rank may have some.
    with optimizer.microbatch(is_last=True):
        net[0](torch.ones(3, 4)).mean().backward()
    with pytest.raises(ConfigError, match=r"2\.weight: its gradient is in the sharded"):
        nn.utils.clip_grad_norm_(net[2].parameters(), 1.0)
    optimizer.drop_gradients()
    # a hook of the user's that comes after ours
    net[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad)
    with (
        optimizer.microbatch(is_last=True),
        pytest.raises(ConfigError, match=r"0\.weight: its gradient is in the sharded"),
    ):
        net(torch.ones(3, 4)).mean().backward()
    optimizer.drop_gradients()
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_gradients_in_buckets_are_not_forgotten_by_hand() -> None:
    """`p.grad = None` would leave them there; where there are none, it is what it always is."""
    net = net_of()
    optimizer = sharded(net)
    net[0].weight.grad = None
    net(torch.ones(3, 4)).mean().backward()
    with pytest.raises(ConfigError, match=r"forget gradients with zero_grad\(\) of the opt"):
        net[0].weight.grad = None
    with pytest.raises(ConfigError, match=r"forget gradients with zero_grad\(\) of the opt"):
        del net[0].weight.grad
    net[0].weight.grad = torch.ones_like(net[0].weight)  # more may come
    optimizer.zero_grad()
    net[0].weight.grad = None
    del net[0].weight.grad
    with pytest.raises(ConfigError, match="no parameter got a gradient"):
        optimizer.step()


@pytest.mark.parametrize("is_closed", [True, False])
def test_parameters_outlive_their_optimizer_in_the_middle_of_a_step(is_closed: bool) -> None:
    """What was in buckets is gone with them; from there on parameters are plain ones."""
    net = net_of()
    optimizer = sharded(net)
    backward(net, optimizer)
    assert not any(type(p) is nn.Parameter for p in net.parameters())
    if is_closed:
        optimizer.close()
        assert all(type(p) is nn.Parameter for p in net.parameters())
    rest = nn.ParameterList(net.parameters())
    gone = weakref.ref(optimizer)
    del net, optimizer
    gc.collect()
    assert gone() is None
    assert all(p.grad is None for p in rest)
    rest.zero_grad()
    for parameter in rest:
        parameter.grad = None
        parameter.sum().backward()
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
        del parameter.grad
        assert parameter.grad is None


def test_contexts_do_not_nest_and_steps_are_outside() -> None:
    net = net_of()
    optimizer = sharded(net)
    with optimizer.microbatch(is_last=True):
        net(torch.ones(3, 4)).mean().backward()
        with pytest.raises(ConfigError, match=r"step\(\) inside of microbatch"):
            optimizer.step()
    optimizer.drop_gradients()
    with (
        optimizer.microbatch(is_last=True),
        pytest.raises(ConfigError, match="leave the first"),
        optimizer.microbatch(is_last=True),
    ):
        pass
    optimizer.drop_gradients()
    backward(net, optimizer)
    assert optimizer.step().norm > 0
    # Alone nothing is reduced, so there is no order in which others are left.
    outer, inner = optimizer.microbatch(is_last=True), sharded(net_of()).microbatch(is_last=True)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"bucket_nbytes": size} for size in (0, -1, math.nan, "8")),
        *({"align_nbytes": size} for size in (0, True)),
    ],
)
def test_sizes_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} must be an integer of at least 1"):
        sharded(net_of(), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"initial": math.inf}, {"growth": math.inf}, {"initial": "x"}, {"backoff": math.nan}],
)
def test_a_scaler_takes_numbers_that_work(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LossScaler(**wrong)


def test_parameters_that_are_not_the_models_any_more_are_found() -> None:
    def assign(net: Any) -> None:
        net[0].weight = nn.Parameter(net[0].weight.detach().clone())

    def tie(net: Any) -> None:
        net[2].bias = nn.Parameter(torch.zeros(2))

    changes: dict[str, tuple[Any, str]] = {
        "assigned": (assign, r"0\.weight: the module has another parameter"),
        "another": (tie, r"2\.bias: the module has another parameter"),
        "load": (
            lambda net: net.load_state_dict(
                {k: v.clone() for k, v in net.state_dict().items()}, assign=True
            ),
            "the module has another parameter",
        ),
        "cast": (lambda net: net.to(torch.bfloat16), "memory was replaced"),
        "double": (lambda net: net.double(), "memory was replaced"),
        "data": (
            lambda net: setattr(net[0].weight, "data", net[0].weight.data.clone()),
            r"0\.weight: its memory was replaced",
        ),
        "transposed": (
            lambda net: setattr(net[0].weight, "data", net[0].weight.data.t()),
            r"0\.weight: its memory was replaced or reshaped",
        ),
        "cut": (
            lambda net: setattr(net[0].weight, "data", net[0].weight.data[:1]),
            r"0\.weight: its memory was replaced or reshaped",
        ),
        "moved": (lambda net: net.share_memory(), "its memory was replaced or reshaped"),
    }
    for name, (change, message) in changes.items():
        net = net_of()
        optimizer = sharded(net)
        backward(net, optimizer)
        optimizer.step()
        change(net)
        dtype = net[0].weight.dtype
        with optimizer.microbatch(is_last=True):
            made = net[0].weight if name == "cut" else net(torch.ones(3, 4, dtype=dtype))
            made.mean().backward()
        with pytest.raises(ConfigError, match=message):
            optimizer.step()


def test_groups_of_other_tensors_are_refused() -> None:
    """S4: what was taken out is in the buckets still; what was put in has no gradient."""

    def clear(optimizer: Any, net: Any) -> None:
        optimizer.param_groups[0]["params"] = list(net.parameters())

    def take_out(optimizer: Any, net: Any) -> None:
        del optimizer.param_groups[0]["params"][1:]

    def remove(optimizer: Any, net: Any) -> None:
        optimizer.param_groups.pop()

    for change in (clear, take_out, remove):
        net = net_of()
        optimizer = sharded(net)
        before = [[*group["params"]] for group in optimizer.param_groups]
        groups = [*optimizer.param_groups]
        backward(net, optimizer)
        change(optimizer, net)
        with pytest.raises(ConfigError, match="tensors in its param_groups are not those"):
            optimizer.step()
        optimizer.param_groups[:] = groups
        for group, members in zip(groups, before, strict=True):
            group["params"] = members
        backward(net, optimizer)
        assert optimizer.step().norm > 0


def test_a_gradient_of_what_was_trained_for_a_while_is_not_lost() -> None:
    """S4: frozen when the optimizer was built, and again at the step."""
    net = net_of()
    net[0].weight.requires_grad_(False)
    optimizer = sharded(net)
    net[0].weight.requires_grad_(True)
    backward(net, optimizer)
    net[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"0\.weight was frozen when .* has a gradient now"):
        optimizer.step()
    optimizer.drop_gradients()
    backward(net, optimizer)
    assert optimizer.step().norm > 0


def test_two_optimizers_share_no_parameter() -> None:
    net = net_of()
    first = sharded(net, list(net[0].parameters()), name="first")
    with pytest.raises(ConfigError, match=r"0\.bias is in sharded optimizer 'first' already"):
        sharded(net, [net[2].weight, net[0].bias], name="second")
    second = sharded(net, list(net[2].parameters()), name="second")
    backward(net, first)
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="'first' is closed"):
        first.step()
    with pytest.raises(ConfigError, match="'first' is closed"):
        first.microbatch(is_last=True)
    second.close()
    both = sharded(net)
    backward(net, both)
    assert both.step().norm > 0
    both.close()
    assert all(type(p) is nn.Parameter for p in net.parameters())
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    plain.step()


@pytest.mark.slow
def test_a_compiled_model_runs_between_backward_and_step() -> None:
    """Compilers look at `.grad` and at classes by name; whole graphs pass the hooks, too."""
    net, other = net_of(), net_of()
    optimizer, straight = sharded(net, overlap=True), sharded(other)
    fast = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(2):
        backward(fast, optimizer)
        backward(other, straight)
        assert torch.equal(fast(torch.ones(3, 4)), other(torch.ones(3, 4)))
        assert optimizer.step() == straight.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))

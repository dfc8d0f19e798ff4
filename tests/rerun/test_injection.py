"""Injected errors: which runs of which step on which device they are in, and what they spoil."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.errors import ConfigError
from holdfast.rerun import DeviceIdentity, ErrorInjector, NotFinite
from holdfast.rerun.injection import point_of
from holdfast.rerun.values import Value
from tests.harness import RankContext, run_ranks

A, B = DeviceIdentity(host="h", uuid="A"), DeviceIdentity(host="h", uuid="B")
KINDS = ["transient_error", "persistent_error", "correct_result"]
Pair = namedtuple("Pair", "first second")


def run_is_bad(
    injector: ErrorInjector,
    step: int,
    coordinate: str = "dp=0",
    *,
    is_rerun: bool = False,
    device: DeviceIdentity = A,
) -> bool:
    """Whether a run of a step has an error, in the only module or in the first value."""
    injector.begin_run(step=step, coordinate=coordinate, is_rerun=is_rerun, device=device)
    outputs = [module(torch.ones(2)) for module in injector.modules]
    values = [injector.injected(1.5), injector.injected(2.5)]
    injector.end_run()
    assert not any(math.isnan(value) for value in values[1:])  # type: ignore[arg-type]
    return math.isnan(values[0]) or any(bool(each.isnan().any()) for each in outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("modules", [(), (nn.Identity(),)], ids=["value", "activation"])
@pytest.mark.parametrize("kind", KINDS)
def test_injected_errors_are_of_their_kind(kind: Any, modules: tuple[nn.Module, ...]) -> None:
    """D17: also after their state went through a checkpoint; one run in `rate` is hit."""
    injector = ErrorInjector(10, kind, seed=3, modules=modules)
    points = [(step, f"dp={rank}") for step in range(1000) for rank in range(4)]
    hits = [point for point in points if injector.is_hit(point_of(*point))]
    assert 300 < len(hits) < 500
    assert {coordinate for _, coordinate in hits} == {"dp=0", "dp=1", "dp=2", "dp=3"}
    (point, other), missed = hits[:2], next(p for p in points if p not in hits)
    assert not run_is_bad(injector, *missed)
    assert run_is_bad(injector, *point)
    again = ErrorInjector(10, kind, seed=3, modules=modules)
    again.load_state_dict(injector.state_dict())
    assert run_is_bad(again, *point, is_rerun=True) is (kind != "transient_error")
    assert run_is_bad(again, *point) is (kind != "transient_error")
    assert run_is_bad(again, *point, is_rerun=True, device=B) is (kind == "correct_result")
    again.leave_out([point_of(*point)])
    assert not run_is_bad(again, *point, is_rerun=True)
    assert run_is_bad(again, *other)
    with pytest.raises(ConfigError, match="kind"):
        ErrorInjector(10, "noise")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rate"):
        ErrorInjector(-1)


def test_a_rerun_on_the_batches_of_another_rank() -> None:
    """A second opinion: a broken device stays broken, a correct result goes with its batches."""
    for kind in ("persistent_error", "correct_result"):
        injector, neighbour = (ErrorInjector(10, kind, seed=3) for _ in range(2))
        step = next(s for s in range(99) if injector.is_hit(f"{s}:dp=0")
                    and not injector.is_hit(f"{s}:dp=1"))  # fmt: skip
        assert run_is_bad(injector, step, "dp=0")
        assert not run_is_bad(neighbour, step, "dp=1", device=B)
        is_persistent = kind == "persistent_error"
        assert run_is_bad(injector, step, "dp=1", is_rerun=True) is is_persistent
        assert run_is_bad(neighbour, step, "dp=0", is_rerun=True, device=B) is not is_persistent
        if is_persistent:  # in that step alone
            assert not run_is_bad(injector, step + 100, "dp=1", is_rerun=True)


@pytest.mark.parametrize("value", [1.0, (1.0, 2.0)])
def test_without_a_module_the_first_value_of_a_run_is_replaced_by_nan(value: Value) -> None:
    injector = ErrorInjector(1)
    injector.begin_run(step=1, coordinate="dp=0", is_rerun=False, device=A)
    made = injector.injected(value)
    assert NotFinite().rejects(made, ()) is not None
    assert isinstance(made, tuple) == isinstance(value, tuple)
    assert injector.injected(value) is value


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.make(inputs)


def tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    members = output.values() if isinstance(output, dict) else output
    return [t for each in members if each is not None for t in tensors_in(each)]


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "bf16": lambda x: x.to(torch.bfloat16),
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, 4),
    "scalar": lambda x: x.sum(),
    "tuple": lambda x: (torch.arange(3), x, x + 1),
    "named tuple": lambda x: Pair(None, x),
    "torch's": lambda x: torch.topk(x, 2),
    "list": lambda x: [x],
    "dict": lambda x: OrderedDict(mask=x > 0, hidden=x, other=x),
    "nested": lambda x: {"a": [torch.empty(0), (None, x)]},
}


@pytest.mark.parametrize("form", FORMS)
def test_one_element_of_an_output_is_spoiled(form: str) -> None:
    """Of a copy, in the same containers, with gradients; in the first forward of a run alone."""
    inputs = torch.randn(3, 4, requires_grad=True)
    held: list[Any] = []  # a module may keep what it returns

    def keep(x: torch.Tensor) -> Any:
        held.append(FORMS[form](x))
        return held[-1]

    module = Returns(keep)
    expected = FORMS[form](inputs)
    injector = ErrorInjector(1, modules=[module])
    injector.begin_run(step=1, coordinate="dp=0", is_rerun=False, device=A)
    assert injector.injected(1.5) == 1.5
    output = module(inputs)
    assert not any(bool(each.isnan().any()) for each in tensors_in(held[0]))
    assert not torch.stack([each.isnan().any() for each in tensors_in(module(inputs))]).any()
    injector.end_run()
    assert not module._forward_hooks
    assert type(output) is type(expected)
    assert not inputs.isnan().any()
    pairs = list(zip(tensors_in(output), tensors_in(expected), strict=True))
    assert sum(int(spoiled.isnan().sum()) for spoiled, _ in pairs) == 1
    for spoiled, good in pairs:
        assert (spoiled.shape, spoiled.dtype) == (good.shape, good.dtype)
        assert torch.equal(spoiled.nan_to_num(7)[~spoiled.isnan()], good[~spoiled.isnan()])
    (spoiled,) = [each for each, _ in pairs if each.isnan().any()]
    torch.autograd.backward(spoiled.sum())
    assert inputs.grad is not None
    assert inputs.grad.count_nonzero() > 0 or form == "scalar"


def test_an_output_without_numbers_is_left_alone() -> None:
    """The run has no error then, and none is noted."""
    for make in (lambda x: x > 0, lambda x: None, lambda x: {"n": 3, "empty": x[:0]}):
        injector = ErrorInjector(1, modules=[Returns(make)])
        injector.begin_run(step=1, coordinate="dp=0", is_rerun=False, device=A)
        injector.modules[0](torch.ones(2))
        injector.end_run()
        assert injector.state_dict()["devices"] == {}


def test_the_seed_chooses_module_and_element() -> None:
    """All of them over many steps, and the same ones in a rerun."""
    modules = [nn.Identity() for _ in range(3)]
    places: list[list[int]] = []
    for is_rerun in (False, True):
        injector = ErrorInjector(1, "correct_result", seed=5, modules=modules)
        places.append([])
        for step in range(60):
            injector.begin_run(step=step, coordinate="dp=0", is_rerun=is_rerun, device=A)
            spoiled = torch.stack([module(torch.ones(4)) for module in modules]).isnan()
            assert spoiled.sum() == 1
            places[-1].append(int(spoiled.flatten().int().argmax()))
    assert places[0] == places[1]
    assert set(places[0]) == set(range(12))
    hits = [
        [step for step in range(99) if ErrorInjector(9, seed=seed).is_hit(point_of(step, "dp=0"))]
        for seed in (0, 1)
    ]
    assert hits[0] != hits[1]


def test_a_model_under_autocast_has_a_bad_loss_and_gradients() -> None:
    """The error reaches every parameter, as that of a device would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    injector = ErrorInjector(1, modules=[model[1]])
    for is_rerun in (False, True):
        model.zero_grad()
        injector.begin_run(step=1, coordinate="dp=0", is_rerun=is_rerun, device=A)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        injector.end_run()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        assert bool(loss.isnan()) is not is_rerun
        assert any(bool(each.isnan().any()) for each in grads) is not is_rerun


def spoil_shards(rank: RankContext) -> list[Any]:
    """DTensors of each placement, spoiled on rank 1 alone."""
    mesh = init_device_mesh("cpu", (2,))
    seen = []
    for placement in (Shard(0), Replicate(), Partial()):
        module = Returns(lambda x: x * 2)
        injector = ErrorInjector(1, modules=[module])
        local = torch.ones(3, 2, requires_grad=True)
        inputs = DTensor.from_local(local, mesh, [placement], run_check=False)
        if rank.rank == 1:
            injector.begin_run(step=1, coordinate="dp=0", is_rerun=False, device=A)
        output = module(inputs)
        injector.end_run()
        output.to_local().sum().backward()
        assert isinstance(output, DTensor)
        assert (output.placements, output.shape) == (inputs.placements, inputs.shape)
        assert local.grad is not None
        assert local.grad.count_nonzero() >= 5
        seen.append(
            (int(output.to_local().isnan().sum()), bool(output.full_tensor().isnan().any()))
        )
    return seen


def test_the_local_part_of_a_dtensor_is_spoiled() -> None:
    """On the rank with the error; others have it from the collectives of the model."""
    others, mine = run_ranks(2, spoil_shards).results
    assert others == [(0, True), (0, False), (0, True)]
    assert mine == [(1, True)] * 3

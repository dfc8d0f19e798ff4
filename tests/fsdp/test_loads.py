"""What a load leaves in a sharded model: fresh weights, untouched rest, no whole tensor."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import Checkpointer, ConfigError, HoldfastError, Layout, OptimizerState, ProcessGroups
from holdfast.fsdp import ShardedModel, fully_shard_model
from tests.fsdp.common import ROWS, STRATEGIES, adamw, build, full, place, rows_of, shard, train
from tests.harness import RankContext, run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS: list[dict[str, Any]] = [{"dp": 4}, {"dp": 4, "ep": 2}, {"dp": 4, "replicas": 2}]
SIZE = (2048, 1024)
"""Of each large weight: 8 MiB in float32."""
NUM_LARGE = 3


def losses(sharded: ShardedModel) -> Tensor:
    """Of all rows, by one forward."""
    return cast("Tensor", sharded.model(torch.arange(ROWS))).detach().clone()


def keep_whole(sharded: ShardedModel, how: str) -> None:
    """Use the old weights, and stop where FSDP2 may hold them whole."""
    if how == "forward without backward":
        losses(sharded)
    elif how == "evaluation":
        with torch.no_grad():
            losses(sharded)
    elif how == "between microbatches":
        with sharded.microbatch(is_last=False):
            sharded.model(rows_of(0)[0]).mean().backward()
    else:
        train(sharded, adamw(sharded.model.parameters()), steps=1)


HOW = ("forward without backward", "evaluation", "between microbatches", "after a step")


def cases(strategies: tuple[str, ...], *, every_pair: bool) -> list[tuple[str, str, Any]]:
    """Strategies, uses and precisions: all of them, or each pair of two once or more."""
    found = []
    for (i, strategy), (j, how) in itertools.product(enumerate(strategies), enumerate(HOW)):
        precisions = (None, BF16)
        chosen = precisions[(i + j) % 2 :][:1] if every_pair else precisions
        found += [(strategy, how, precision) for precision in chosen]
    return found


def loaded_then_used(
    context: RankContext,
    root: str,
    layouts: list[dict[str, Any]],
    strategies: tuple[str, ...],
    every_pair: bool,
) -> list[tuple[str, str]]:
    """(case, what came of it) where weights were whole when a load came: right, or refused."""
    found = []
    for number, sizes in enumerate(layouts):
        with ProcessGroups.create(Layout(**sizes)) as groups:
            checkpointer = Checkpointer(f"{root}/{number}", groups=groups)
            source = place(build(seed=2), groups)
            checkpointer.save(1, {"model": source})
            expected: dict[Any, Tensor] = {}
            for strategy, how, precision in cases(strategies, every_pair=every_pair):
                options = {"strategy": strategy, "precision": precision}
                if (strategy, precision) not in expected:
                    twin = shard(place(build(seed=2), groups), groups, **options)
                    expected[strategy, precision] = losses(twin)
                sharded = shard(place(build(seed=1), groups), groups, **options)
                before = losses(sharded)
                sharded.reshard()
                keep_whole(sharded, how)
                case = f"{sizes} {strategy} {how} {'bf16' if precision else ''}"
                try:
                    if how == "between microbatches":
                        with pytest.raises(ConfigError, match=r"load in the middle of a step"):
                            checkpointer.load({"model": sharded.model})
                        sharded.drop_gradients()
                    checkpointer.load({"model": sharded.model})
                    actual = losses(sharded)
                except HoldfastError as error:
                    found.append((case, f"refused: {error}"))
                    continue
                assert not torch.equal(expected[strategy, precision], before), "cannot fail"
                same = torch.equal(actual, expected[strategy, precision])
                found.append((case, "right" if same else "stale" * torch.equal(actual, before)))
    return found


def check_loaded(
    tmp_path: Path,
    layouts: list[dict[str, Any]],
    strategies: tuple[str, ...] = STRATEGIES,
    *,
    every_pair: bool = False,
) -> None:
    outcome = run_ranks(
        4, loaded_then_used, str(tmp_path), layouts, strategies, every_pair, timeout_s=280
    )
    for found in outcome.results:
        assert len(found) == len(layouts) * len(cases(strategies, every_pair=every_pair))
        for case, came in found:
            assert came == "right", (case, came)


@pytest.mark.slow
def test_whole_weights_from_before_a_load_are_never_used(tmp_path: Path) -> None:
    """F13: whole weights that were alive are made again, in the dtype of computation too.

    A load takes the model's state dict first, and FSDP2's hook before that frees them.
    """
    check_loaded(tmp_path, LAYOUTS[1:2], ("optim", "optim_grads_params"), every_pair=True)


@pytest.mark.nightly
def test_whole_weights_from_before_a_load_on_every_layout(tmp_path: Path) -> None:
    """F13: dense and with replicas as well, under every strategy."""
    check_loaded(tmp_path, LAYOUTS)


def loaded_as_a_tree(context: RankContext, root: str) -> list[bool]:
    """Whether the first forward was refused, for each strategy."""
    with ProcessGroups.create(Layout(dp=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        source = shard(build(seed=2), groups)
        checkpointer.save(1, {"weights": dict(source.model.named_parameters())})
        found = []
        for strategy in STRATEGIES:
            expected = losses(shard(build(seed=2), groups, strategy=strategy))
            sharded = shard(build(seed=1), groups, strategy=strategy)
            keep_whole(sharded, "forward without backward")
            # A load of a module takes its state dict first, for which FSDP2 frees whole weights.
            checkpointer.load({"weights": dict(sharded.model.named_parameters())})
            is_refused = False
            try:
                actual = losses(sharded)
            except ConfigError as error:
                is_refused = "were changed (a step, a load) while whole copies" in str(error)
                sharded.reshard()
                actual = losses(sharded)
            assert torch.equal(actual, expected), strategy
            found.append(is_refused)
        return found


def test_whole_weights_from_before_a_load_of_parameters_as_a_tree_are_refused(
    tmp_path: Path,
) -> None:
    """F13: nothing frees them then, so the guard of a unit is alone."""
    for refused in run_ranks(2, loaded_as_a_tree, str(tmp_path)).results:
        assert any(refused)


def optimizer_alone(context: RankContext, root: str) -> None:
    """Load the optimizer's state into one that never stepped, and one that stepped further."""
    with ProcessGroups.create(Layout(dp=4, ep=2)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        net = place(build(seed=1), groups)
        sharded = shard(net, groups)
        optimizer = adamw(net.parameters())
        checkpointer.save(1, {"optimizer": OptimizerState(optimizer, net)})
        train(sharded, optimizer, steps=2)
        checkpointer.save(2, {"optimizer": OptimizerState(optimizer, net)})
        saved = {name: optimizer.state[p] for name, p in net.named_parameters()}
        for steps in (0, 3):
            other = place(build(seed=4), groups)
            again = shard(other, groups, strategy="optim")
            fresh = torch.optim.AdamW(other.parameters(), lr=7.0, weight_decay=0.5, foreach=False)
            if steps:
                train(again, fresh, steps=steps)
            before = {name: full(p) for name, p in other.named_parameters()}
            state = {"optimizer": OptimizerState(fresh, other)}
            checkpointer.load(state, step=2)
            for name, parameter in other.named_parameters():
                assert torch.equal(full(parameter), before[name]), name
                mine, theirs = fresh.state[parameter], saved[name]
                assert mine.keys() == theirs.keys(), name
                for entry, value in theirs.items():
                    assert torch.equal(full(mine[entry]), full(value)), (name, entry)
                    assert float(theirs["step"]) == 2.0
            for group, other_group in zip(fresh.param_groups, optimizer.param_groups, strict=True):
                for key in group.keys() - {"params"}:
                    assert group[key] == other_group[key], key
            # Nothing was stepped when it was saved: what is loaded has no state either.
            checkpointer.load(state, step=1)
            assert not any(fresh.state[p] for p in other.parameters() if p in fresh.state)
            for name, parameter in other.named_parameters():
                assert torch.equal(full(parameter), before[name]), name


@pytest.mark.slow
def test_state_of_an_optimizer_is_allocated_by_shape(tmp_path: Path) -> None:
    """F12: parameters keep their values, counters and hyperparameters are those stored."""
    run_ranks(4, optimizer_alone, str(tmp_path))


class Large(nn.Module):
    """A few weights, each far larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE[1], SIZE[0]) for _ in range(NUM_LARGE))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))[:, : SIZE[1]]
        return x


class Watch(TorchDispatchMode):
    """The largest memory that any operation made on a real device, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations come here next
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        for each in made:
            # DTensor tries shapes on fake tensors, which have no memory.
            is_real = isinstance(each, Tensor) and not isinstance(each, FakeTensor)
            if is_real and each.device.type != "meta":
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


def from_meta(context: RankContext, root: str, strategy: str) -> tuple[int, int, int]:
    """Build on the meta device, materialize, load; largest tensor, peak of other memory, limit."""
    whole = math.prod(SIZE) * 4
    with ProcessGroups.create(Layout(dp=4)) as groups:
        checkpointer = Checkpointer(root, groups=groups)
        tracemalloc.start()
        with Watch() as watch:
            with torch.device("meta"):
                model = Large()
            sharded = fully_shard_model(
                model, groups, experts=(), units=list(model.layers), strategy=cast("Any", strategy)
            )
            sharded.materialize()
            assert all(torch.isnan(local(p)).all() for p in model.parameters())
            checkpointer.load({"model": model})
            optimizer = adamw(model.parameters())
            checkpointer.load(
                {"model": model, "optimizer": OptimizerState(optimizer, model)}, step=1
            )
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for number, layer in enumerate(cast("list[nn.Linear]", list(model.layers))):
            assert torch.equal(full(layer.weight), weight_of(number))
            assert float(optimizer.state[layer.weight]["step"]) == 1.0
        assert torch.equal(cast("Tensor", model.seen), torch.full((3,), 3.0))
        return watch.largest, peak, whole


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def weight_of(number: int) -> Tensor:
    return torch.arange(math.prod(SIZE), dtype=torch.float32).reshape(SIZE) + number


def save_large(root: str) -> None:
    """One process saves the bare model and its optimizer after a step."""
    model = Large()
    model.seen.fill_(3)
    optimizer = adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for number, layer in enumerate(cast("list[nn.Linear]", list(model.layers))):
            layer.weight.copy_(weight_of(number))
    state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
    Checkpointer(root).save(1, state)


def test_no_memory_holds_a_whole_weight_of_a_meta_model(tmp_path: Path) -> None:
    """F11: no operation of torch makes a whole weight, and no memory of Python could hold it."""
    save_large(str(tmp_path))
    for largest, peak, whole in run_ranks(
        4, from_meta, str(tmp_path), "optim_grads_params"
    ).results:
        assert whole / 4 <= largest < whole / 2  # the shard was seen
        assert peak < whole

"""What is refused, on all ranks and by name: F2, F3, F5, and FSDP2's silent traps."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from holdfast import ConfigError, GroupError, HoldfastError, Layout, ProcessGroups
from holdfast.fsdp import fully_shard_model
from tests.fsdp.common import Layer, build, place, rows_of, sgd, shard, specialists, train
from tests.harness import RankContext, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"dp": 4},
    "experts": {"dp": 4, "ep": 2},
    "hybrid": {"dp": 4, "replicas": 2},
    "tensor": {"dp": 2, "tp": 2},
}


def own_experts(groups: ProcessGroups) -> nn.Module:
    """Each ep rank has its own specialists as plain tensors, under the same names."""
    net = build()
    half = groups.index("ep")
    for layer in net.layers:
        assert isinstance(layer, Layer)
        mine = layer.special.mix.detach()[2 * half : 2 * half + 2].clone()
        layer.special.mix = nn.Parameter(mine)
    return net


def undeclared_plain(groups: ProcessGroups) -> None:
    net = own_experts(groups)
    fully_shard_model(net, groups, experts=())


def undeclared_dtensor(groups: ProcessGroups) -> None:
    fully_shard_model(place(build(), groups), groups, experts=())


def one_forgotten(groups: ProcessGroups) -> None:
    net = place(build(), groups)
    fully_shard_model(net, groups, experts=specialists(net)[:1])


def declared_without_ep(groups: ProcessGroups) -> None:
    net = own_experts(groups)
    fully_shard_model(net, groups, experts=[layer.special.mix for layer in net.layers])  # type: ignore[union-attr, attr-defined]


def a_name(groups: ProcessGroups) -> None:
    fully_shard_model(build(), groups, experts=["layers.0.special"])  # type: ignore[list-item]


def another_seed(groups: ProcessGroups) -> None:
    net = build()
    if groups.rank == 3:
        with torch.no_grad():
            net.layers[1].up.weight[0, 0] += 1  # type: ignore[union-attr, index, operator]
    fully_shard_model(net, groups, experts=())


def another_strategy(groups: ProcessGroups) -> None:
    shard(build(), groups, strategy="optim" if groups.rank == 2 else "optim_grads")


def one_rank_without(groups: ProcessGroups) -> None:
    net = build()
    if groups.rank == 1:
        net.layers[1].gain = None  # type: ignore[union-attr, assignment]
    fully_shard_model(net, groups, experts=())


def a_scalar(groups: ProcessGroups) -> None:
    net = build()
    net.layers[0].scale = nn.Parameter(torch.ones(()))  # type: ignore[union-attr, assignment]
    fully_shard_model(net, groups, experts=())


def a_container(groups: ProcessGroups) -> None:
    net = build()
    fully_shard_model(net, groups, experts=(), units=[net.layers])


def a_stranger(groups: ProcessGroups) -> None:
    fully_shard_model(build(), groups, experts=(), units=[nn.Linear(2, 2)])


def transposed(groups: ProcessGroups) -> None:
    net = build()
    net.table = nn.Parameter(net.table.detach().T)
    fully_shard_model(net, groups, experts=())


def a_subclass(groups: ProcessGroups) -> None:
    class Quantized(torch.Tensor):
        pass

    net = build()
    net.table = nn.Parameter(net.table.detach().as_subclass(Quantized))
    fully_shard_model(net, groups, experts=())


def with_a_gradient(groups: ProcessGroups) -> None:
    net = build()
    if groups.rank == 2:
        net.table.grad = torch.ones_like(net.table)
    fully_shard_model(net, groups, experts=())


def twice(groups: ProcessGroups) -> None:
    net = build()
    shard(net, groups)
    shard(net, groups)


def torchs_own(groups: ProcessGroups) -> None:
    net = build()
    fully_shard(net.layers[0], mesh=groups.mesh("dp_cp"))
    shard(net, groups)


def unknown_strategy(groups: ProcessGroups) -> None:
    shard(build(), groups, strategy="zero3")


def stale_weights(groups: ProcessGroups) -> None:
    """torch's own switch left on while stepping: FSDP2 computes with the old weights."""
    net = build()
    sharded = shard(net, groups)
    optimizer = sgd(net.parameters())
    train(sharded, optimizer, steps=1)
    net.set_reshard_after_backward(False)  # type: ignore[operator]
    for rows in rows_of(0):
        net(rows).mean().backward()
        optimizer.step()


def stale_root(groups: ProcessGroups) -> None:
    """A forward without backward leaves the model's own parameters whole."""
    net = build()
    shard(net, groups)
    net(rows_of(0)[0])
    with torch.no_grad():
        for unit in net.modules():
            if hasattr(unit, "_get_fsdp_state"):
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    for each in group.fsdp_params:
                        each.sharded_param._local_tensor.mul_(2)
        net(rows_of(0)[0])


def other_divisor(groups: ProcessGroups) -> None:
    net = build()
    sharded = shard(net, groups)
    net.layers[0].set_gradient_divide_factor(1.0)  # type: ignore[operator, union-attr]
    train(sharded, sgd(net.parameters()), steps=1)


def other_divisor_without_microbatch(groups: ProcessGroups) -> None:
    net = build()
    sharded = shard(net, groups)
    net.layers[0].set_gradient_divide_factor(1.0)  # type: ignore[operator, union-attr]
    net(rows_of(0)[0]).mean().backward()
    sharded.step(sgd(net.parameters()))


def other_gather(groups: ProcessGroups) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = fully_shard_model(net, groups, units=net, experts=())
    net[1].set_custom_all_gather(object())  # type: ignore[operator]
    with sharded.microbatch(is_last=True):
        pass


def module_after(groups: ProcessGroups) -> None:
    net = build()
    sharded = shard(net, groups)
    net.head_after = nn.Linear(2, 2)
    train(sharded, sgd(net.parameters()), steps=1)


def no_optimizer(groups: ProcessGroups) -> None:
    train(shard(build(), groups), {}, steps=1)


def no_torch_optimizer(groups: ProcessGroups) -> None:
    net = build()
    sharded = shard(net, groups)
    train(sharded, {"a": sharded.stepper(sgd(net.parameters()))}, steps=1)


def optimizer_before(groups: ProcessGroups) -> None:
    net = build()
    optimizer = sgd(net.parameters())
    train(shard(net, groups), optimizer, steps=1)


def no_last_microbatch(groups: ProcessGroups) -> None:
    net = build()
    sharded = shard(net, groups, strategy="optim")
    optimizer = sgd(net.parameters())
    with sharded.microbatch(is_last=False):
        net(rows_of(0)[0]).mean().backward()
    sharded.step(optimizer)


def no_backward(groups: ProcessGroups) -> None:
    net = build()
    shard(net, groups).step(sgd(net.parameters()))


def on_mesh(groups: ProcessGroups, mesh: DeviceMesh) -> None:
    """A parameter on a mesh that a caller has made, replicated."""
    net = build()
    whole = [Replicate()] * mesh.ndim
    net.table = nn.Parameter(distribute_tensor(net.table.detach(), mesh, whole, src_data_rank=None))
    fully_shard_model(net, groups, experts=())


def on_the_data_axis_twice(groups: ProcessGroups) -> None:
    on_mesh(groups, groups.mesh("dp"))


def on_other_communicators(groups: ProcessGroups) -> None:
    on_mesh(groups, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_cp", "tp"))["tp"])


def on_nameless_dims(groups: ProcessGroups) -> None:
    on_mesh(groups, DeviceMesh("cpu", torch.arange(4)))


CASES: list[tuple[str, Callable[[ProcessGroups], None], type[HoldfastError], tuple[str, ...]]] = [
    ("experts", undeclared_plain, ConfigError, ("layers.0.special.mix", "experts=")),
    ("experts", undeclared_dtensor, ConfigError, ("layers.0.special.mix", "experts=")),
    ("experts", one_forgotten, ConfigError, ("layers.1.special.mix", "experts=")),
    ("experts", declared_without_ep, ConfigError, ("layers.0.special.mix", "'ep'")),
    ("dense", a_name, ConfigError, ("layers.0.special", "not names")),
    ("dense", another_seed, ConfigError, ("layers.1.up.weight", "rank 3", "seed")),
    ("dense", another_strategy, ConfigError, ("rank 2", "optim_grads", "with the same")),
    ("dense", one_rank_without, ConfigError, ("layers.1.gain", "rank 1")),
    ("dense", a_scalar, ConfigError, ("layers.0.scale", "(1,)")),
    ("dense", a_container, ConfigError, ("'layers'", "ModuleList", "forward")),
    ("dense", a_stranger, ConfigError, ("Linear", "not a module of the model")),
    ("dense", transposed, ConfigError, ("'table'", "contiguous")),
    ("dense", a_subclass, ConfigError, ("'table'", "Quantized", "cannot be cut")),
    ("dense", on_the_data_axis_twice, ConfigError, ("'table'", "dims dp", "with dp_cp")),
    ("tensor", on_other_communicators, ConfigError, ("'table'", "not a slice", "mesh['tp']")),
    ("dense", on_nameless_dims, ConfigError, ("'table'", "without names", "groups.mesh")),
    ("dense", with_a_gradient, ConfigError, ("rank 2", "'table'", "has a gradient")),
    ("dense", twice, ConfigError, ("already",)),
    ("dense", torchs_own, ConfigError, ("layers.0", "already")),
    ("dense", unknown_strategy, ConfigError, ("zero3", "optim_grads_params")),
    ("dense", stale_weights, ConfigError, ("(the model)", "microbatch", "reshard")),
    ("dense", stale_root, ConfigError, ("(the model)", "reshard")),
    ("dense", other_divisor, ConfigError, ("layers.0", "divisor", "layout")),
    ("dense", other_divisor_without_microbatch, ConfigError, ("layers.0", "divisor", "layout")),
    ("dense", other_gather, ConfigError, ("unit '1'", "all-gather was replaced")),
    ("dense", module_after, ConfigError, ("head_after.weight", "after fully_shard_model")),
    ("dense", no_optimizer, ConfigError, ("there is no optimizer",)),
    ("dense", no_torch_optimizer, ConfigError, ("'a'", "is not a plain torch optimizer")),
    ("dense", optimizer_before, ConfigError, ("after fully_shard_model",)),
    ("dense", no_last_microbatch, ConfigError, ("is_last=True",)),
    ("dense", no_backward, ConfigError, ("backward",)),
]


def refused(context: RankContext) -> list[str]:
    """What each case raised on this rank."""
    del context
    found = []
    for name, cases in itertools.groupby(CASES, key=lambda each: each[0]):
        with ProcessGroups.create(Layout(**LAYOUTS[name])) as groups:
            for _, case, kind, _ in cases:
                with pytest.raises(kind) as caught:
                    case(groups)
                found.append(str(caught.value))
                groups.control.barrier(phase="next case")  # all ranks are in step again
    return found


def test_what_is_wrong_is_refused_on_all_ranks_by_name() -> None:
    """F2, F3: nothing is launched for it; the message names the parameter and the fix."""
    for found in run_ranks(4, refused, timeout_s=280).results:
        for (_, case, _, expected), message in zip(CASES, found, strict=True):
            for text in expected:
                assert text in message, (case.__name__, text, message)


def test_a_torch_with_another_fsdp2_is_refused_by_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, not by an error deep inside; what needs no FSDP2 can be imported all the same."""
    import holdfast.fsdp as room

    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._fully_shard._fsdp_state", None)
    monkeypatch.delitem(sys.modules, "holdfast.fsdp._torch")
    monkeypatch.setattr(room, "_torch", None)  # put back, as the module is
    monkeypatch.setattr("holdfast.fsdp.model._torch", import_module("holdfast.fsdp._torch"))
    with pytest.raises(
        ConfigError, match=rf"as torch 2\.13 has it; this is torch {re.escape(torch.__version__)}"
    ):
        fully_shard_model(nn.Linear(2, 2), ProcessGroups.single(), experts=())


def one_update_fails(context: RankContext) -> list[str]:
    """What each rank raised; training goes on after it."""
    messages = []

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError("no memory for the update")
            return super().step(closure)

    with ProcessGroups.create(Layout(dp=4)) as groups:
        net = build()
        sharded = shard(net, groups)
        optimizer = Failing(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.fails = step == 1 and context.rank == 2
            for i, rows in enumerate(batches := rows_of(step)):
                with sharded.microbatch(is_last=i == len(batches) - 1):
                    net(rows).mean().backward()
            try:
                sharded.step(optimizer)
            except HoldfastError as error:
                messages.append(str(error))
    return messages


def test_an_update_that_fails_on_one_rank_is_raised_on_all() -> None:
    """M15: no rank goes on alone, and the next step works."""
    for messages in run_ranks(4, one_update_fails).results:
        (message,) = messages
        assert "rank 2" in message
        assert "no memory for the update" in message


def missing(context: RankContext) -> dict[str, str]:
    """Gathering groups that are there for some and not for others."""
    del context
    found = {}
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "experts": ({"dp": 4, "ep": 2}, ("dp_cp", "expt_dp", "ep", "dp_cp_ag")),
        "dense": ({"dp": 4, "ep": 2}, ("dp_cp", "expt_dp", "ep", "expt_dp_ag")),
        "main": ({"dp": 4}, ("expt_dp",)),
        "hybrid": (
            {"dp": 4, "replicas": 2},
            ("dp_cp_intra", "dp_cp_inter", "expt_dp_intra", "expt_dp_inter", "dp_cp_intra_ag"),
        ),
        "inter": ({"dp": 4, "replicas": 2}, ("dp_cp_intra", "expt_dp_intra", "expt_dp_inter")),
    }
    for name, (sizes, names) in cases.items():
        with ProcessGroups.create(Layout(**sizes), names=names) as groups:
            net = place(build(), groups) if name != "main" else build()
            with pytest.raises(GroupError) as caught:
                shard(net, groups)
            found[name] = str(caught.value)
    return found


def test_overlap_that_is_not_possible_is_an_error() -> None:
    """F5: never silently one communicator for both; hybrid, too."""
    for found in run_ranks(4, missing).results:
        assert "'expt_dp_ag' is missing" in found["experts"]
        assert "'dp_cp_ag' is missing" in found["dense"]
        assert "dp_cp" in found["main"]
        assert "'expt_dp_intra_ag' is missing" in found["hybrid"]
        assert "dp_cp_inter" in found["inter"]


def adopted(context: RankContext, kind: str) -> str:
    """Groups of the caller's own, one of them wrong for gathering."""
    ranks = list(range(4))
    make = functools.partial(torch.distributed.new_group, sort_ranks=False)
    supplied: dict[str, Any] = {"dp_cp": make(ranks), "expt_dp": make(ranks)}
    supplied["expt_dp_ag"] = make(ranks)
    wrong = {"order": lambda: make([1, 0, 2, 3]), "members": lambda: make([0, 1]),
             "none": lambda: None, "same": lambda: supplied["dp_cp"]}  # fmt: skip
    supplied["dp_cp_ag"] = wrong[kind]()
    with pytest.raises(GroupError) as caught:
        shard(build(), ProcessGroups.adopt(Layout(dp=4), supplied, timeout_s=20))
    del context
    return str(caught.value)


@pytest.mark.parametrize("kind", ["order", "members", "none", "same"])
def test_a_wrong_gathering_group_is_refused(kind: str) -> None:
    """F5: before the first collective on it, with both lists of ranks."""
    for message in run_ranks(4, adopted, kind).results:
        assert "dp_cp_ag" in message

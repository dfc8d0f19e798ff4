"""An optimizer's state in the forms of both libraries: compared with what real optimizers show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from holdfast.errors import CorruptionError, PlanError
from holdfast.format.envelopes.optimizer_trees import (
    from_torch,
    is_by_name,
    to_flat,
    to_torch,
)
from holdfast.format.values import Node, encode_tree, tensor_node
from holdfast.state.optimizer_state import OptimizerState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)])
        self.head = nn.Linear(3, 2)


class Factored(torch.optim.Optimizer):
    """State as Adafactor has it: nested, factored, with plain values and lists."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "scales": (0.5, None), "name": "a"})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "RMS": 0.25,
                    "step": 3,
                    "rows": param.detach().sum(0),
                    "moments": {"0": param.detach() * 2, "1": {"x": torch.ones(2)}},
                }


def node_of(tree: object) -> Any:
    """Encode a tree; a tensor's key is its memory, so that both libraries' views are equal."""

    def leaf(path: str, value: object) -> Node:
        return tensor_node(str(value.data_ptr())) if isinstance(value, torch.Tensor) else None

    return encode_tree(tree, on_leaf=leaf)


def trained(make: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = make(model)
    model.head(model.blocks[1](model.blocks[0](torch.ones(2, 3)))).sum().backward()
    optimizer.step()
    return model, optimizer


def two_groups(model: Net, cls: Any, **settings: Any) -> Any:
    # In an order that is not that of the names.
    return cls(
        [
            {"params": [model.head.weight, model.blocks[0].weight], "lr": 0.5},
            {"params": [model.blocks[1].bias, model.head.bias]},
        ],
        **settings,
    )


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "groups": lambda m: two_groups(m, torch.optim.AdamW, lr=torch.tensor(0.1)),
    "factored": lambda m: two_groups(m, Factored),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(param.shape) for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_both_forms_are_those_of_real_optimizers(kind: str) -> None:
    model, optimizer = trained(OPTIMIZERS[kind])
    own = node_of(OptimizerState(optimizer, model).tree())
    # Taken second: torch initialises state that an optimizer does not have yet.
    torchs = node_of(get_optimizer_state_dict(model, optimizer))
    assert is_by_name(own)
    assert from_torch(own) is own
    assert to_torch(own) == torchs
    assert from_torch(torchs, shapes_of(model)) == own
    assert from_torch(torchs)["parameters"] == {}


@pytest.mark.parametrize("kind", ["sgd", "adamw", "factored"])
def test_the_flat_form_is_read(kind: str) -> None:
    model, optimizer = trained(OPTIMIZERS[kind])
    own = node_of(OptimizerState(optimizer, model).tree())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = node_of(get_optimizer_state_dict(model, optimizer, options=options))
    assert from_torch(flat, shapes_of(model)) == own
    assert to_flat(to_torch(own)) == flat
    assert to_flat(own) is own


def test_numbers_need_names() -> None:
    model, optimizer = trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    own = node_of(OptimizerState(optimizer, model).tree())
    unnamed = node_of(optimizer.state_dict())
    assert from_torch(unnamed) is unnamed
    names = list(model.named_parameters())
    optimizer = torch.optim.SGD(names, lr=0.1, momentum=0.9)
    optimizer.step()
    numbered = optimizer.state_dict()
    result = from_torch(node_of(numbered), shapes_of(model))
    assert result["membership"] == own["membership"]
    assert result["state"].keys() == own["state"].keys()
    assert result["groups"] == own["groups"]
    # As DCP writes it: keys are strings.
    numbered["state"] = {str(key): value for key, value in numbered["state"].items()}
    assert from_torch(node_of(numbered), shapes_of(model)) == result


def test_what_pytorch_lacks_stays() -> None:
    tree: dict[str, Any] = {
        "state": {"a": {"step": 1}},
        "groups": [{"lr": 0.1}],
        "membership": {"a": 0, "b": 0},
        "parameters": {"a": {"shape": [2]}, "b": {"shape": [], "frozen": True}},
        "others": {"shared": [1, 2]},
        "extra": {"k": 7},
        "main": {"a": tensor_node("optimizer.main.a")},
        "num_groups": {"x": 1},
        "param_state_sharding_type": {"x": {"dp": 2}},
    }
    tree["inner"] = {"base": {key: tree[key] for key in ("state", "groups", "membership")}}
    tree["inner"]["base"]["parameters"] = {"a": {"shape": [2]}, "b": {"shape": []}}
    form = to_torch(tree)
    assert form["k"] == 7
    assert form["state"]["shared"] == [1, 2]
    assert form["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}]
    assert form["parameters"] == {"b": {"frozen": True}}
    assert form["inner"]["base"]["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}]
    assert from_torch(form, {"a": [2], "b": []}) == tree
    tree["extra"] = {"main": 1}
    assert from_torch(to_torch(tree), {"a": [2], "b": []}) == tree
    tree["others"] = node_of({3: "x"})
    assert from_torch(to_torch(tree), {"a": [2], "b": []}) == tree


@pytest.mark.parametrize(
    "node", [{}, [], None, 3, {"state": {}, "groups": []}, {"param_groups": [{"lr": 1}]}]
)
def test_other_nodes_stay_as_they_are(node: Any) -> None:
    assert to_torch(node) is node
    assert from_torch(node) is node


def test_the_flat_form_keeps_what_pytorch_lacks() -> None:
    tree = {
        "state": {"a.b": {"step": 1}},
        "groups": [{"lr": 0.1}, {"lr": 0.2}],
        "membership": {"a.b": 1, "c": 0},
        "parameters": {"a.b": {"shape": [2]}, "c": {"shape": [], "frozen": True}},
        "main": {"a.b": tensor_node("optimizer.main.a.b")},
        "extra": {"k": 7},
    }
    result = from_torch(to_flat(to_torch(tree)), {"a.b": [2], "c": []})
    assert result == tree
    for odd in ({"others": {"x": 1}}, {"membership": {"a.b": 1}}):
        with pytest.raises(PlanError, match="flat name"):
            to_flat(to_torch(tree | odd))


def test_an_optimizer_without_state_has_only_groups() -> None:
    result = from_torch({"param_groups": [{"params": ["a"], "lr": 1.0}]})
    assert result == {
        "state": {}, "groups": [{"lr": 1.0}], "membership": {"a": 0}, "parameters": {}
    }  # fmt: skip


def test_damage_is_refused() -> None:
    tree = {"state": {}, "groups": [], "membership": {"a": 0}, "parameters": {}}
    with pytest.raises(CorruptionError, match="group 0, which is not there"):
        to_torch(tree)
    flat = {"param_groups.a.lr": 1, "state.a.x": 1, "state.a.x.y": 2}
    with pytest.raises(CorruptionError, match="both at 'x' and below"):
        from_torch(flat)

"""Parts by choice and under other names, stateful objects that place their tensors, wrappers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast import (
    RNG,
    Checkpointer,
    ConfigError,
    FromPart,
    MismatchError,
    ModuleState,
    OptimizerState,
    PerRank,
    PlacementError,
    Stored,
    declare_padding,
    declare_wrapper,
)
from holdfast.format.names import step_dir
from holdfast.format.reader import Snapshot
from tests.objects.modules import WIDTH, ExtraTensor, Fused, randomise


def keys(checkpointer: Checkpointer, step: int) -> set[str]:
    with Snapshot.open(checkpointer.storage, step_dir(step)) as snapshot:
        return {info.key for info in snapshot.manifest.tensors}


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank addition, a buffer, and a frozen fused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.attention = Fused().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.base(x) + self.up(self.down(x)) + self.seen)


def test_trainable_only(tmp_path: Path) -> None:
    true, twin = Adapted(), Adapted()
    randomise(true, 1)
    randomise(twin, 2)
    frozen = {n: p.detach().clone() for n, p in twin.named_parameters() if not p.requires_grad}
    checkpointer = Checkpointer(tmp_path)
    part = ModuleState(true, only="trainable")
    optimizer = OptimizerState(torch.optim.SGD([true.up.weight, true.down.weight]), true)
    checkpointer.save(1, {"model": part, "optimizer": optimizer})
    assert keys(checkpointer, 1) == {"model.down.weight", "model.up.weight", "model.seen"}
    assert part.left_out == ("attention.norm", "attention.wqkv", "base.bias", "base.weight")
    report = checkpointer.load({"model": ModuleState(twin, only="trainable")})
    assert report.missing == report.unexpected == ()
    assert torch.equal(twin.up.weight, true.up.weight)
    assert torch.equal(twin.seen, true.seen)
    for name, value in twin.named_parameters():
        assert name not in frozen or torch.equal(value, frozen[name])
    with pytest.raises(MismatchError, match=r"base\.weight"):
        checkpointer.load({"model": twin})


def test_trainable_only_is_strict_over_what_it_chooses(tmp_path: Path) -> None:
    model = Adapted()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": model})
    with pytest.raises(MismatchError, match=r"does not ask for.*base\.bias"):
        checkpointer.load({"model": ModuleState(model, only="trainable")})
    chosen = {"model": ModuleState(model, only="trainable")}
    report = checkpointer.load(chosen, ignore_unexpected=True)
    assert "model.base.bias" in report.unexpected
    checkpointer.save(2, {"model": ModuleState(model, only=lambda name, value: "up" in name)})
    with pytest.raises(MismatchError, match=r"down\.weight"):
        checkpointer.load({"model": ModuleState(model, only="trainable")})


def test_thawed_forms_are_trainable(tmp_path: Path) -> None:
    model = Adapted()
    model.attention.requires_grad_(True)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": ModuleState(model, only="trainable")})
    assert {f"model.attention.w{name}" for name in "qkv"} < keys(checkpointer, 1)


@pytest.mark.parametrize("options", [{"only": "frozen"}, {"only": 3}, {"prefix": "a"}])
def test_arguments_of_a_choice_are_checked(options: Any) -> None:
    with pytest.raises(ConfigError, match="ModuleState"):
        ModuleState(nn.Linear(2, 2), **options)
    with pytest.raises(ConfigError, match="takes a module"):
        ModuleState(torch.optim.SGD([torch.ones(1)]))  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Fused(), ExtraTensor("dict"))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def saved_model(root: Path) -> tuple[Model, Checkpointer]:
    model = Model()
    randomise(model, 1)
    checkpointer = Checkpointer(root)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": OptimizerState(optimizer, model), "rng": RNG()}
    checkpointer.save(1, {**state, "data": {"a.b": {"c": [1, {"d": torch.arange(3)}]}}})
    return model, checkpointer


def test_a_branch_of_a_part_fills_a_module_of_its_own(tmp_path: Path) -> None:
    model, checkpointer = saved_model(tmp_path)
    student, teacher = Model().encoder, Model().encoder
    report = checkpointer.load(
        {"student": FromPart("model.encoder", student), "t": FromPart("model.encoder", teacher)}
    )
    assert report.unexpected == report.missing == ()
    assert set(report.not_requested) == {"optimizer", "rng", "data"}
    assert "student.0.wq" in report.loaded
    for encoder in (student, teacher):
        for name, value in model.encoder.named_parameters():
            assert torch.equal(dict(encoder.named_parameters())[name], value)
    student[1].scale.zero_()  # extra state is not shared between the two
    assert torch.equal(teacher[1].scale, model.encoder[1].scale)


def test_a_part_under_another_name(tmp_path: Path) -> None:
    model, checkpointer = saved_model(tmp_path)
    twin = Model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=7.0, momentum=0.1)
    checkpointer.load(
        {
            "ema": FromPart("model", twin),
            "opt": FromPart("optimizer", OptimizerState(optimizer, twin)),
        }
    )
    assert torch.equal(twin.head.weight, model.head.weight)
    assert optimizer.param_groups[0]["lr"] == 0.5
    report = checkpointer.load({"x": FromPart("data.a.b.c.1", {"d": torch.zeros(3, dtype=int)})})
    assert torch.equal(report.values["x"]["d"], torch.arange(3))


def test_a_branch_is_judged_by_itself(tmp_path: Path) -> None:
    _, checkpointer = saved_model(tmp_path)
    with pytest.raises(MismatchError, match=r"head\.bias.*|does not ask"):
        checkpointer.load({"head": FromPart("model.head", nn.Linear(WIDTH, WIDTH, bias=False))})
    with pytest.raises(MismatchError, match=r"head\.weight"):
        checkpointer.load({"head": FromPart("model.encoder", nn.Linear(WIDTH, WIDTH))})
    with pytest.raises(MismatchError, match=r"lacks.*x \(from model\.nothing\)"):
        checkpointer.load({"x": FromPart("model.nothing", nn.Linear(2, 2))})
    with pytest.raises(ConfigError, match="where a load finds"):
        checkpointer.save(2, {"x": FromPart("model", nn.Linear(2, 2))})
    with pytest.raises(PlacementError, match="is not a path"):
        FromPart("", nn.Linear(2, 2))


def test_a_module_under_a_prefix(tmp_path: Path) -> None:
    model, checkpointer = saved_model(tmp_path)
    head = nn.Linear(WIDTH, WIDTH)
    part = {"model": ModuleState(head, prefix="head.")}
    checkpointer.load(part, ignore_unexpected=True)
    assert torch.equal(head.weight, model.head.weight)
    checkpointer.save(2, part)
    assert keys(checkpointer, 2) == {"model.head.weight", "model.head.bias"}


class Recipe:
    """A plain object with the two methods; keeps whatever it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_stateful_object_gets_plain_tensors_as_stored(tmp_path: Path) -> None:
    kept = OrderedDict(a=torch.arange(3), b=[torch.ones(2), 3], c=OrderedDict(d=(1, None)))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"x": Recipe(kept)})
    mine = torch.zeros(7)
    twin = Recipe({"a": mine, "z": 1})
    checkpointer.load({"x": twin})
    assert type(twin.state) is OrderedDict
    assert list(twin.state) == ["a", "b", "c"]
    assert torch.equal(twin.state["a"], kept["a"])
    assert twin.state["c"] == kept["c"]
    assert torch.equal(mine, torch.zeros(7))  # given, not filled


class Holder(nn.Module):
    """A wrapper of a user's own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Stripping(Holder):
    """One that takes its attribute out of the keys itself."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.load_state_dict(*args, **kwargs)


class Net(nn.Module):
    """Has a child under the wrapper's attribute name, and a tensor of the child's name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.odd = Fused()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(self.net(x) * self.weight)


def test_declared_wrappers_never_appear_in_names(tmp_path: Path) -> None:
    declare_wrapper(Holder, "net")
    bare = Net()
    randomise(bare, 1)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    bare(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"model": bare, "optimizer": OptimizerState(optimizer, bare)})
    wrappers = {
        "one": Holder,
        "two": lambda m: Holder(Holder(m)),
        "stripping": Stripping,
        "mixed": lambda m: torch.compile(Stripping(checkpoint_wrapper(Holder(m))), backend="eager"),
    }
    for step, (name, wrap) in enumerate(wrappers.items(), start=1):
        twin = wrap(Net())
        randomise(twin, 2)
        moved = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
        state = {"model": twin, "optimizer": OptimizerState(moved, twin)}
        checkpointer.load(state, step=0)
        for mine, theirs in zip(twin.parameters(), bare.parameters(), strict=True):
            assert torch.equal(mine, theirs), name
            kept, given = moved.state[mine], optimizer.state[theirs]
            assert torch.equal(kept["momentum_buffer"], given["momentum_buffer"])
        checkpointer.save(step, state)
        assert keys(checkpointer, step) == keys(checkpointer, 0), name


class Greedy(Holder):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.own = nn.Parameter(torch.ones(2))


class Elsewhere(nn.Module):
    pass


def test_wrappers_that_are_none_are_refused(tmp_path: Path) -> None:
    declare_wrapper(Holder, "net")
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(PlacementError, match=r"Greedy.*next to it \(own\)"):
        checkpointer.save(1, {"model": Greedy(nn.Linear(2, 2))})
    declare_wrapper(Elsewhere, "inner")
    with pytest.raises(PlacementError, match="no such attribute"):
        checkpointer.save(1, {"model": Elsewhere()})
    for kind, attribute in ((int, "x"), (nn.Module, "x"), (Holder, "a.b"), (Holder, 3)):
        with pytest.raises(ConfigError, match="declare_wrapper"):
            declare_wrapper(kind, attribute)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["list", "dict", "optimizer"])
def test_a_module_inside_of_a_tree_is_named_with_the_remedy(place: str, tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    optimizer = OptimizerState(torch.optim.SGD(module.parameters()), module)
    inside: dict[str, object] = {"list": [module], "dict": {"a": module}, "optimizer": [optimizer]}
    with pytest.raises(PlacementError, match=r"x\.\w+: a \w+ inside of a tree.*part of its own"):
        Checkpointer(tmp_path).save(1, {"x": inside[place]})
    with pytest.raises(PlacementError, match=r"PerRank takes values.*whose state_dict\(\) returns"):
        Checkpointer(tmp_path).save(1, {"x": PerRank(inside[place])})
    with pytest.raises(ConfigError, match=r"is a class; pass an object"):
        Checkpointer(tmp_path).save(1, {"x": nn.Linear})


def test_an_object_inside_of_a_tree_is_named_with_the_remedy(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for tree in ({"a": [schedule]}, PerRank(schedule)):
        with pytest.raises(PlacementError, match=r"StepLR.*make it a part of its own.*PerRank\("):
            Checkpointer(tmp_path).save(1, {"x": tree})


class Cloning(nn.Module):
    """Shows a copy of a padded weight, and takes it back by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        declare_padding(self, "weight", (6, 4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach().clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.weight.copy_(state_dict[prefix + "weight"])


def test_a_form_whose_padding_is_declared_comes_back(tmp_path: Path) -> None:
    module, twin = Cloning(), Cloning()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"m": module})
    checkpointer.load({"m": twin})
    assert torch.equal(twin.weight[:6], module.weight[:6])
    assert not twin.weight[6:].any()
    checkpointer.save(2, {"m": twin})
    one, two = (checkpointer.load({"m": Stored()}, step=n).values["m"] for n in (1, 2))
    assert torch.equal(one["weight"], two["weight"])  # type: ignore[call-overload]


def test_what_a_resumed_run_begins_anew_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """O4: an optimizer that is made after the load, and one that no state has any more."""
    old = {"model": nn.Linear(1, 1), "late": {"n": 1}, "gone": {"n": 1}, "asked": {"n": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, old)
        checkpointer.save(2, old)
    now = {name: old[name] for name in ("model", "late", "asked")}
    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING, "holdfast"):
        report = checkpointer.load({"model": old["model"]})
        assert "without the parts asked, gone, late" in str(report)
        checkpointer.load({"asked": old["asked"]})
        checkpointer.save(3, now)
        checkpointer.save_async(4, now).result()
        assert [record.args[1:] for record in caplog.records] == [(2, "late")]  # type: ignore[index]
        checkpointer.load(now, step=1)
        checkpointer.save(5, now)
        checkpointer.load({"model": old["model"]}, source=tmp_path)
        checkpointer.save(6, now)
    assert len(caplog.records) == 1

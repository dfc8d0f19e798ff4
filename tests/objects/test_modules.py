"""Modules whose state dict is not simply their tensors: what is called loaded has arrived."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from holdfast import Checkpointer, MismatchError, ModuleState, OptimizerState, PlacementError
from holdfast.cli.main import main
from tests.drawn import drawn
from tests.objects.modules import ODD, ROOTS, WIDTH, Container, Fused, Renamed, randomise


def held(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all tensors are bitwise equal, and the outputs."""
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    pairs = list(zip(held(one), held(other), strict=True))
    persistent = [(a, b) for a, b in pairs if a.shape != (3,)]  # Tied's buffer is not
    alike = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in persistent)
    with torch.no_grad():
        return alike and torch.equal(one(x), other(x))


def round_trip(root: Path, true: nn.Module, twin: nn.Module) -> None:
    """Save one, load it into the other, save that: the checkpoints do not differ."""
    before = [id(p) for p in twin.parameters()]
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"model": true})
        report = checkpointer.load({"model": twin}, step=1)
        assert (report.missing, report.unexpected, report.cast) == ((), (), ())
        assert same(true, twin)
        assert [id(p) for p in twin.parameters()] == before  # an optimizer holds them
        checkpointer.save(2, {"model": twin})


@pytest.mark.parametrize("name", ODD)
def test_a_fresh_twin_becomes_the_original(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    true, twin = ODD[name](), ODD[name]()
    randomise(true, 1)
    if name != "observer":  # its twin is as it was made
        randomise(twin, 2)
        assert not same(true, twin)
    round_trip(tmp_path, true, twin)
    capsys.readouterr()
    assert main(["diff", f"{tmp_path}/iter_0000001", f"{tmp_path}/iter_0000002"]) == 0


@pytest.mark.parametrize("name", ["fused", "splits", "replaces", "filled", "clones"])
def test_the_next_steps_are_the_original_s(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)

    def steps(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()

    pairs = []
    for seed in (1, 2):
        module = ODD[name]()
        randomise(module, seed)
        pairs.append((module, torch.optim.AdamW(module.parameters(), lr=0.01)))
    (true, optimizer), (twin, fresh) = pairs
    steps(true, optimizer)
    checkpointer = Checkpointer(tmp_path)
    # The optimizer first: it must hold what the module holds after the load, too.
    checkpointer.save(1, {"optimizer": OptimizerState(optimizer, true), "model": true})
    checkpointer.load({"optimizer": OptimizerState(fresh, twin), "model": twin})
    steps(true, optimizer)
    steps(twin, fresh)
    assert same(true, twin)


@drawn(
    quick=10,
    slow=25,
    plan=st.recursive(
        st.sampled_from(sorted(set(ODD) - {*ROOTS, "observer", "scripted", "compiled"})),
        lambda inner: st.lists(inner, min_size=1, max_size=3),
        max_leaves=5,
    ),
)
def test_compositions_of_odd_modules(tmp_path_factory: pytest.TempPathFactory, plan: Any) -> None:
    def build(plan: Any) -> nn.Module:
        return ODD[plan]() if isinstance(plan, str) else nn.Sequential(*map(build, plan))

    true, twin = build(plan), build(plan)
    randomise(true, 1)
    randomise(twin, 2)
    round_trip(tmp_path_factory.mktemp("composed"), true, twin)


class NoWayBack(Fused):
    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in "qkv":
            state.pop(f"{prefix}w{name}")


class Unknown(Fused):
    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None: ...


class HalfBack(Fused):
    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}wk"] = torch.zeros_like(state[f"{prefix}wk"])
        super().fuse(state, prefix, *rest)


class Rounded(Fused):
    def fuse(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        super().fuse(state, prefix, *rest)
        state[f"{prefix}wqkv"] = state[f"{prefix}wqkv"].bfloat16()


class Forgets(Fused):
    """Shows the pieces, and drops another weight on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Parameter(torch.empty(4))

    def split(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        super().split(state, prefix, metadata)
        state.pop(f"{prefix}dropped")


class Meddles(nn.Linear):
    """Shows its own tensors, and changes them when it loads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        with torch.no_grad():
            self.weight.mul_(2)


class Random(nn.Linear):
    """Shows other names each time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.count = 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.count += 1
        destination[f"{prefix}weight{self.count}"] = self.weight.detach().clone()
        destination[f"{prefix}bias"] = self.bias


class NoSetter(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.extra = torch.rand(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra.clone()


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (NoWayBack, "wq"),
        (Unknown, "wq"),
        (HalfBack, "wk"),
        (Rounded, "wq"),
        (Meddles, "weight"),
        (Random, "weight"),
        (NoSetter, "_extra_state"),
    ],
)
def test_what_has_not_arrived_is_named(kind: type[nn.Module], key: str, tmp_path: Path) -> None:
    true, twin = nn.Sequential(kind()), nn.Sequential(kind())
    randomise(true, 1)
    randomise(twin, 2)
    Checkpointer(tmp_path).save(1, {"model": true})
    with pytest.raises(MismatchError, match=rf"0\.{key}"):
        Checkpointer(tmp_path).load({"model": twin})


def test_what_no_form_is_made_from_is_refused_at_save(tmp_path: Path) -> None:
    """R2."""
    with pytest.raises(PlacementError, match=r"0\.dropped in no form"):
        Checkpointer(tmp_path).save(1, {"model": nn.Sequential(Forgets())})


class Drops(nn.Sequential):
    """Leaves something out of its state dict."""

    def __init__(self, what: str) -> None:
        super().__init__(Renamed(), Fused(), nn.BatchNorm1d(WIDTH), nn.Linear(2, 2))
        self.what = what

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name not in self.what}


@pytest.mark.parametrize("what", ["0.weight", "3.bias", "2.running_mean", "2.weight"])
def test_what_a_state_dict_shows_in_no_form_is_refused_at_save(what: str, tmp_path: Path) -> None:
    module = Drops(what)
    # `Renamed` shows its weight as 'bias', and the other way round.
    named = {"0.weight": "0.bias"}.get(what, what)
    with pytest.raises(PlacementError, match=rf"{named} in no form.*ModuleState"):
        Checkpointer(tmp_path).save(1, {"model": module})
    kept = ModuleState(module, only=lambda name, value: name not in (what, named))
    Checkpointer(tmp_path).save(1, {"model": kept})


class Average(nn.Module):
    """A metric: its state is in plain attributes, which its state dict shows only on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = {"total": torch.zeros(2)}
        self.is_shown = False

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        return {f"{prefix}total": self.sums["total"]} if self.is_shown else {}

    def load_state_dict(self, state: Any, strict: bool = True) -> None:
        self.sums["total"] = state["total"].clone()


def test_a_module_that_states_nothing_of_its_tensors_is_refused_at_save(tmp_path: Path) -> None:
    """R2, O3: as metrics do that are not persistent; modules without tensors are parts like any."""
    metric, twin = Average(), Average()
    metric.sums["total"] += 3
    checkpointer = Checkpointer(tmp_path)
    for part in (metric, nn.ModuleDict({"mean": metric})):
        with pytest.raises(PlacementError, match=r"state_dict\(\) is empty.*sums.*leave the part"):
            checkpointer.save(1, {"metric": part})
    assert checkpointer.latest() is None
    metric.is_shown = twin.is_shown = True
    checkpointer.save(1, {"metric": metric, "nothing": nn.Sequential(nn.Identity())})
    checkpointer.load({"metric": twin, "nothing": nn.Sequential(nn.Identity())})
    assert torch.equal(twin.sums["total"], metric.sums["total"])


class HalfShown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}top"] = self.w[:2].detach()


def test_a_tensor_shown_in_part_is_refused_at_save(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"0\.w in no form, or only in part"):
        Checkpointer(tmp_path).save(1, {"model": nn.Sequential(HalfShown())})


@pytest.mark.parametrize("name", ["filled", "inner", "inner itself"])
def test_a_module_that_loads_twice_is_not_suspected(name: str, tmp_path: Path) -> None:
    module = ODD["inner"]()[0] if name == "inner itself" else ODD[name]()
    randomise(module, 1)
    expected = copy.deepcopy(list(module.parameters()))
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": module})
    checkpointer.load({"model": module})
    checkpointer.load({"model": module})
    assert all(map(torch.equal, module.parameters(), expected))


def test_a_form_that_may_be_missing_stays_as_it_is(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": nn.Sequential(nn.Linear(2, 2))})
    module = nn.Sequential(nn.Linear(2, 2), Fused(), ODD["extra tensor"]())
    randomise(module, 3)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(MismatchError, match=r"1\.wq"):
        checkpointer.load({"model": module})
    report = checkpointer.load({"model": module}, allow_missing=["model.1.*", "model.2.*"])
    assert "model.1.wq" in report.missing
    after = module.state_dict()
    assert all(torch.equal(after[n], v) for n, v in before.items() if not n.startswith("0."))


def test_forms_are_cast_only_when_asked(tmp_path: Path) -> None:
    true, twin = Fused().double(), Fused()
    randomise(true, 1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": true})
    with pytest.raises(MismatchError, match=r"wq.*F64.*cast=True"):
        checkpointer.load({"model": twin})
    checkpointer.load({"model": twin}, cast=True)
    assert torch.equal(twin.wqkv, true.wqkv.float())


def test_not_a_number_survives_the_proof(tmp_path: Path) -> None:
    true, twin = Fused(), Fused()
    randomise(true, 1)
    with torch.no_grad():
        true.wqkv[0, 0], true.wqkv[1, 1], true.norm[0] = float("nan"), -0.0, float("nan")
    Checkpointer(tmp_path).save(1, {"model": true})
    Checkpointer(tmp_path).load({"model": twin})
    assert torch.equal(twin.wqkv.view(torch.int32), true.wqkv.view(torch.int32))


def test_load_hooks_run_for_plain_tensors_too(tmp_path: Path) -> None:
    calls: list[str] = []
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_load_state_dict_pre_hook(lambda *a: calls.append("before"))
    module.register_load_state_dict_post_hook(lambda *a: calls.append("after"))
    Checkpointer(tmp_path).save(1, {"model": module})
    Checkpointer(tmp_path).load({"model": module})
    assert calls == ["before", "after"]


@pytest.mark.parametrize("kind", ["lazy", "nested", "jagged"])
@pytest.mark.parametrize("place", ["module", "tree", "target"])
def test_lazy_and_nested_tensors_are_refused_by_key(kind: str, place: str, tmp_path: Path) -> None:
    if kind == "lazy":
        module: nn.Module = nn.Sequential(nn.LazyLinear(3))
        tensor: torch.Tensor = module[0].weight
    else:
        layout = torch.jagged if kind == "jagged" else torch.strided
        parts = [torch.ones(2), torch.ones(3)]
        tensor = torch.nested.nested_tensor(parts, layout=layout)
        module = nn.Sequential(nn.Module())
        module[0].register_buffer("weight", tensor)
    word = "lazy parameter" if kind == "lazy" else "nested tensor"
    checkpointer = Checkpointer(tmp_path)
    if place == "target":
        checkpointer.save(1, {"t": {"weight": torch.ones(3)}, "model": nn.Linear(2, 2)})
        with pytest.raises(PlacementError, match=rf"t\.weight: a {word}"):
            checkpointer.load({"t": {"weight": tensor}})
    else:
        state: object = module if place == "module" else {"0": {"weight": tensor}}
        with pytest.raises(PlacementError, match=rf"x\.0\.weight: a {word}"):
            checkpointer.save(1, {"x": state})


def test_a_stream_is_given_back_as_one(tmp_path: Path) -> None:
    true = ODD["extra stream"]()
    randomise(true, 1)
    seen: list[object] = []
    twin = ODD["extra stream"]()
    twin.set_extra_state = seen.append  # type: ignore[method-assign]
    Checkpointer(tmp_path).save(1, {"model": true})
    Checkpointer(tmp_path).load({"model": ModuleState(twin, extra_state="applies_later")})
    assert isinstance(seen[0], io.BytesIO)
    assert seen[0].read() == true.get_extra_state().getvalue()


def test_a_container_under_ddp_s_names(tmp_path: Path) -> None:
    true, twin = Container(), Container()
    randomise(true, 1)
    Checkpointer(tmp_path).save(1, {"model": nn.DataParallel(true)})
    Checkpointer(tmp_path).load({"model": twin})
    assert same(true, twin)

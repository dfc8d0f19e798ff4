"""What an owner was given it states: the load asks for the state again.

Prevents loads that call something loaded because it was given to an object that dropped it.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.optim import lr_scheduler as schedules

from holdfast import (
    RNG,
    AppliesLater,
    Checkpointer,
    ConfigError,
    Layout,
    MismatchError,
    ModuleState,
    OptimizerState,
    PlacementError,
    ProcessGroups,
)
from tests.harness import RankContext, run_ranks


class Wrapper:
    """Models behind `state_dict`, loaded without strictness, as torchtitan does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state, strict=False)


class Counter:
    """An object with a few entries."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def state_dict(self) -> dict[str, Any]:
        return dict(self.entries)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = dict(state)


class Forgetful(Counter):
    """Keeps its own `n`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries |= {name: value for name, value in state.items() if name != "n"}


class InTensors(Counter):
    """Keeps numbers as tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made = ((name, float(value)) for name, value in state.items())
        self.entries = {name: torch.tensor(each, dtype=torch.float64) for name, each in made}


class InNumbers(Counter):
    """Keeps tensors of one element as numbers, and one of them wrongly."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = {name: value.item() for name, value in state.items()} | {"k": 1}


class Lazy(Counter):
    """Applies its state when it is started."""

    waiting: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = state


def scheduler(kind: Callable[..., Any], *args: Any) -> Any:
    return kind(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), *args)


def renamed(name: str) -> Wrapper:
    return Wrapper(
        nn.Sequential(nn.Linear(2, 2)) if name == "0" else nn.ModuleDict({name: nn.Linear(2, 2)})
    )


LOSSES: dict[str, tuple[Any, Any, str]] = {
    "a renamed layer": (renamed("0"), renamed("head"), r"owner\.0\.weight: the Wrapper does not"),
    "a disabled scaler": (
        torch.amp.GradScaler("cpu", init_scale=8.0),
        torch.amp.GradScaler("cpu", enabled=False),
        r"owner\.scale: the GradScaler does not take it",
    ),
    "another schedule": (
        scheduler(schedules.StepLR, 3),
        scheduler(schedules.CosineAnnealingLR, 9),
        r"owner\.T_max: the CosineAnnealingLR still has it, the checkpoint has not",
    ),
    "a forgotten entry": (
        Counter(n=1, m=2),
        Forgetful(n=0, m=0),
        r"owner\.n: stored is 1, the Forgetful has 0",
    ),
    "a tensor of other values": (
        Counter(n=torch.ones(3)),
        Forgetful(n=torch.zeros(3)),
        r"owner\.n: the Forgetful has other values than the stored ones",
    ),
    "an array": (
        Counter(n=np.ones(3)),
        Forgetful(n=np.zeros(3)),
        r"owner\.n: the Forgetful has other values than the stored ones",
    ),
    "an integer of more digits": (
        Counter(n=2**70 + 1),
        InTensors(),
        r"owner\.n: stored is 11805916",
    ),
    "a state applied later": (Counter(n=1), Lazy(n=0), r"AppliesLater\(obj\)"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_an_object_does_not_take_is_named(name: str, tmp_path: Path) -> None:
    """R1."""
    saved, other, message = LOSSES[name]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"owner": saved})
    with pytest.raises(MismatchError, match=message):
        checkpointer.load({"owner": other})


def test_a_number_is_the_tensor_that_holds_it(tmp_path: Path) -> None:
    """R1: a float of 64 bits was compared with one of 32, and refused."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"owner": Counter(n=0.1, m=2**40 + 1, k=float("inf"))})
    owner = InTensors()
    checkpointer.load({"owner": owner})
    assert [each.item() for each in owner.entries.values()] == [0.1, 2**40 + 1, float("inf")]
    tensors = {"n": torch.tensor(0.1), "m": torch.tensor([2**40 + 1]), "k": torch.tensor(2)}
    checkpointer.save(2, {"owner": Counter(**tensors)})
    with pytest.raises(MismatchError, match=r"\(1 entry\): owner\.k: stored is a tensor"):
        checkpointer.load({"owner": InNumbers()})


def test_what_is_applied_later_is_handed_over_and_not_loaded(tmp_path: Path) -> None:
    """R1: by name, and saved as any other; what is none is refused."""
    checkpointer = Checkpointer(tmp_path)
    lazy = Lazy(n=0, weight=torch.zeros(2))
    kept = Counter(weight=torch.ones(2))
    saved = {"loader": AppliesLater(Counter(n=1, weight=torch.ones(2))), "kept": kept}
    checkpointer.save(1, saved)
    report = checkpointer.load({"loader": AppliesLater(lazy), "kept": kept})
    assert report.handed_over == ("loader",)
    assert report.loaded == ("kept.weight",)
    assert "1 handed over" in report.summary()
    assert report.of("loader").handed_over == ("loader",)
    assert lazy.waiting is not None
    assert lazy.waiting["n"] == 1
    for wrong in (AppliesLater(nn.Linear(1, 1).weight), AppliesLater(ModuleState(nn.Linear(1, 1)))):
        with pytest.raises(ConfigError, match="AppliesLater takes an object with state_dict"):
            checkpointer.save(2, {"loader": wrong})


def test_what_is_new_in_an_object_keeps_its_value_by_consent(tmp_path: Path) -> None:
    """R1."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"owner": Counter(m=2)})
    newer = Forgetful(n=7, m=0)
    report = checkpointer.load({"owner": newer}, allow_missing=["owner.n"])
    assert newer.entries == {"n": 7, "m": 2}
    assert report.missing == ("owner.n",)


class Extra(nn.Module):
    """Takes its extra state only once it is set up, and shows it always."""

    def __init__(self, *, is_set_up: bool = True) -> None:
        super().__init__()
        self.is_set_up, self.scales = is_set_up, {"amax": 0.0}

    def get_extra_state(self) -> dict[str, float]:
        return self.scales

    def set_extra_state(self, state: dict[str, float]) -> None:
        if self.is_set_up:
            self.scales = state


class Statistics(nn.Linear):
    """Shows NumPy statistics, and drops them at a load."""

    def __init__(self, mean: float) -> None:
        super().__init__(2, 2)
        self.mean = np.full(3, mean)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"mean": self.mean}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({k: v for k, v in state.items() if k != "mean"}, **kwargs)


@pytest.mark.parametrize("kind", ["extra state", "arrays"])
def test_what_a_module_does_not_take_is_named(kind: str, tmp_path: Path) -> None:
    """R1: extra state and other values, as tensors are; extra state may be declared as applied
    later."""
    checkpointer = Checkpointer(tmp_path)
    if kind == "arrays":
        checkpointer.save(1, {"model": Statistics(3.0)})
        checkpointer.load({"model": Statistics(3.0)})
        with pytest.raises(MismatchError, match=r"does not show what was loaded|shows mean"):
            checkpointer.load({"model": Statistics(0.0)})
        return
    saved, twin, late = Extra(), Extra(), Extra(is_set_up=False)
    saved.scales = {"amax": 2.5}
    checkpointer.save(1, {"model": nn.Sequential(saved)})
    report = checkpointer.load({"model": nn.Sequential(twin)})
    assert twin.scales == {"amax": 2.5}
    assert report.handed_over == ()
    with pytest.raises(MismatchError, match=r"0\._extra_state"):
        checkpointer.load({"model": nn.Sequential(late)})
    lenient = ModuleState(nn.Sequential(late), extra_state="applies_later")
    report = checkpointer.load({"model": lenient})
    assert report.handed_over == ("model.0._extra_state",)


def test_a_save_notices_a_parameter_that_no_form_is_made_from(tmp_path: Path) -> None:
    """R2: a hook may replace a parameter, not remove it and add something else."""
    checkpointer = Checkpointer(tmp_path)

    def drop(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        del state[f"{prefix}weight"]
        state[f"{prefix}version"] = torch.ones(3)

    def negate(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}negative"] = -state.pop(f"{prefix}weight").detach()

    for hook, is_lost in ((drop, True), (negate, False)):
        layer = nn.Linear(2, 3)
        layer._register_state_dict_hook(hook)
        model, before = nn.Sequential(layer), layer.weight.detach().clone()
        loss = model(torch.ones(1, 2)).sum()
        if is_lost:
            with pytest.raises(PlacementError, match=r"shows 0\.weight in no form"):
                checkpointer.save(1, {"model": model})
        else:
            checkpointer.save(1, {"model": model})
        assert torch.equal(layer.weight, before)
        loss.backward()  # the trial has not been noticed by autograd


def test_a_save_refuses_what_its_own_state_could_not_load(tmp_path: Path) -> None:
    """R2: tensors that overlap in part, and two mappings of one file."""
    checkpointer = Checkpointer(tmp_path / "root")
    whole = torch.arange(10.0)
    state = {"tree": {"a": whole[:6], "b": whole[4:]}}
    with pytest.raises(PlacementError, match=r"tree\.a and tree\.b: the state's tensors share mem"):
        checkpointer.save(1, state)
    model = nn.Module()
    model.register_buffer("a", whole[:6])
    model.register_buffer("b", whole[4:])
    with pytest.raises(PlacementError, match=r"model\.a and model\.b"):
        checkpointer.save(1, {"model": model})
    # Apart in the same memory, twice the same, and in an object that is given new tensors.
    kept = {"tree": {"a": whole[:5], "b": whole[5:], "c": whole[:5]}}
    checkpointer.save(1, kept | {"owner": Counter(a=whole[:6], b=whole[4:])})
    checkpointer.load(kept)
    file = tmp_path / "mapped"
    file.write_bytes(bytes(8 * 4096))
    one, two = (torch.from_file(str(file), shared=True, size=4096) for _ in range(2))
    assert one.data_ptr() != two.data_ptr()
    with pytest.raises(PlacementError, match=r"two mappings of one file"):
        checkpointer.save(2, {"tree": {"a": one, "b": two[100:]}})
    checkpointer.save(2, {"tree": {"a": one[:100], "b": two[100:]}})
    checkpointer.load({"tree": {"a": one[:100], "b": two[100:]}})
    checkpointer.save(3, {"tree": {"a": torch.ones(4096), "b": torch.zeros(4096)}})
    with pytest.raises(MismatchError, match=r"two mappings of one file"):
        checkpointer.load({"tree": {"a": one, "b": two}})


def test_an_optimizer_of_parameters_that_begin_with_a_dollar_is_kept(tmp_path: Path) -> None:
    """R2."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Module()
        model.register_parameter("$w", nn.Parameter(torch.randn(3)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        next(model.parameters()).square().sum().backward()
        optimizer.step()
        return model, optimizer

    checkpointer = Checkpointer(tmp_path)
    (model, optimizer), (twin, other) = made(0), made(1)
    checkpointer.save(1, {"m": model, "o": OptimizerState(optimizer, model)})
    checkpointer.load({"m": twin, "o": OptimizerState(other, twin)})
    mine, theirs = (next(iter(each.state.values())) for each in (optimizer, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq", "step"))


class Tagged(torch.Tensor):
    """A tensor with attributes."""


class Biased(random.Random):
    """A generator with a field that its state lacks."""

    bias: int


def test_attributes_that_a_checkpoint_would_lose_are_refused_by_name(tmp_path: Path) -> None:
    """R2: of tensors of which a load makes new ones, and of generators."""
    checkpointer = Checkpointer(tmp_path)
    tagged = torch.ones(2).as_subclass(Tagged)
    checkpointer.save(1, {"tree": {"t": tagged}, "owner": Counter(t=tagged)})
    tagged.unit = "m"  # type: ignore[attr-defined]
    model = nn.Module()
    model.register_buffer("t", tagged)
    checkpointer.save(2, {"model": model})  # it keeps the object
    for state in ({"tree": {"t": tagged}}, {"owner": Counter(t=tagged)}):
        with pytest.raises(PlacementError, match=r"\.t: a Tagged is more than its elements \(unit"):
            checkpointer.save(3, state)
    generator = Biased(1)
    rng = RNG(generators={"mine": generator})
    checkpointer.save(3, {"rng": rng})
    generator.bias = 3
    with pytest.raises(ConfigError, match=r"'mine' is a Biased with the attributes bias"):
        checkpointer.save(4, {"rng": rng})


def test_children_of_numpy_generators_are_those_of_the_saved_run(tmp_path: Path) -> None:
    """R1: a generator spawns the children that the saved one would have spawned next."""
    checkpointer = Checkpointer(tmp_path)
    ours = np.random.default_rng(5)
    ours.spawn(2)
    checkpointer.save(1, {"rng": RNG(generators={"g": ours})})
    for number, seed in ((0, 5), (7, 5), (1, [6, 2**70])):
        theirs = np.random.default_rng(seed)
        theirs.spawn(number)
        checkpointer.load({"rng": RNG(generators={"g": theirs})})
        kept = copy.deepcopy(ours)
        assert theirs.spawn(1)[0].integers(2**60) == kept.spawn(1)[0].integers(2**60)
        assert theirs.integers(2**60) == kept.integers(2**60)


def test_a_module_that_was_frozen_does_not_take_moments_silently(tmp_path: Path) -> None:
    """R1: moments that no part takes are unexpected, not loaded."""
    checkpointer = Checkpointer(tmp_path)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpointer.save(1, {"model": model, "optimizer": OptimizerState(optimizer, model)})
    with pytest.raises(MismatchError, match=r"does not ask for: optimizer\.state\.weight\.step"):
        checkpointer.load({"model": model, "optimizer": {}})
    report = checkpointer.load({"model": model, "optimizer": {}}, ignore_unexpected=["optimizer*"])
    assert report.loaded == ("model.weight", "model.bias")
    assert "optimizer.state.weight.exp_avg" in report.unexpected
    assert checkpointer.load({"model": model}).not_requested == ("optimizer",)


class Owner:
    """A generated owner: entries of many kinds, and one fault."""

    def __init__(self, entries: dict[str, Any], fault: str, victims: list[str]) -> None:
        self.entries, self.fault, self.victims = entries, fault, victims
        self.ticks = 0
        self.waiting: dict[str, Any] | None = None

    def start(self) -> None:
        """Apply what was taken, as an owner that applies its state later does."""
        self.entries = self.waiting or self.entries

    def state_dict(self) -> dict[str, Any]:
        if self.fault == "counts reads":
            self.entries["reads"] = self.entries.get("reads", 0) + 1
        shown = dict(self.entries)
        if self.fault == "clock":
            self.ticks += 1
            shown["clock"] = torch.tensor([self.ticks])
        if self.fault == "counts reads after":
            self.entries["reads"] = self.entries.get("reads", 0) + 1
        if self.fault == "writes on reads":
            self.entries["reads"] = self.entries.get("reads", torch.zeros(1)).add_(1)
        return shown

    def load_state_dict(self, state: dict[str, Any]) -> None:
        first, second = self.victims
        if self.fault == "later":
            self.waiting = state
            return
        if self.fault == "forgets":
            state = state | {first: self.entries[first]}
        elif self.fault == "drops":
            state = {name: value for name, value in state.items() if name != first}
        elif self.fault == "swaps":
            state = state | {first: state[second], second: state[first]}
        elif self.fault == "keeps more":
            state = self.entries | state
        elif self.fault == "writes" and isinstance(state[first], torch.Tensor):
            state[first].fill_(-1)
        elif self.fault == "nests":
            state = state | {first: [state[first]]}
        self.entries = copy.deepcopy(state) if len(first) % 2 else state


FAULTS = (
    "none", "later", "forgets", "drops", "swaps", "keeps more", "writes", "nests",
    "counts reads", "counts reads after", "writes on reads", "clock",
)  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """A value of any kind that a checkpoint holds."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.randrange(3),
        lambda: rng.choice([0.0, -0.0, float("nan"), float("inf"), 0.5]),
        lambda: rng.choice([None, True, False, "", "text", b"bytes", 2**80, 1j]),
        lambda: torch.tensor([rng.random() for _ in range(3)]),
        lambda: torch.tensor(rng.randrange(3)),
        lambda: np.array([rng.random() for _ in range(2)]),
        lambda: np.float32(rng.random()),
        lambda: {rng.randrange(3), "x"},
        lambda: deque([rng.randrange(3)], maxlen=4),
    ]
    if depth < 2:
        kinds += [
            lambda: {rng.choice(["a", 1, (2, "b")]): value(rng, depth + 1)},
            lambda: [value(rng, depth + 1) for _ in range(rng.randrange(3))],
            lambda: (value(rng, depth + 1),),
        ]
    return rng.choice(kinds)()


def same(one: Any, other: Any) -> bool:
    """An independent comparison: equal types, and equal bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) or (isinstance(one, set) and one == other)


@pytest.mark.parametrize("num", [110, pytest.param(220, marks=pytest.mark.slow)])
def test_no_generated_owner_differs_silently(num: int, tmp_path: Path) -> None:
    """R1: an owner has what was stored, or the load raises, or the report calls it handed over."""
    rng = random.Random(11)
    checkpointer = Checkpointer(tmp_path)
    saved: list[Owner] = []
    for number in range(num):
        entries = {name: value(rng) for name in ("a", "bb", "c", "dd")}
        fault = FAULTS[number % len(FAULTS)]
        saved.append(Owner(entries, fault, rng.sample(list(entries), 2)))
    # Ten owners in a checkpoint: with all in one, each load would read the tree of all.
    for step in range(0, num, 10):
        kept = {
            f"o{i}": Owner(saved[i].entries, "none", ["a", "c"]) for i in range(step, step + 10)
        }
        checkpointer.save(step, kept)
    num_refused = num_right = 0
    for number, owner in enumerate(saved):
        name, step = f"o{number}", number // 10 * 10
        fresh = {each: value(rng) for each in owner.entries}
        if owner.fault == "keeps more":
            fresh["new"] = value(rng)
        twin = Owner(fresh, owner.fault, owner.victims)
        is_declared = owner.fault == "later" and rng.random() < 0.5
        try:
            report = checkpointer.load(
                {name: AppliesLater(twin) if is_declared else twin}, step=step
            )
        except MismatchError:
            num_refused += 1
            assert owner.fault not in ("none", "counts reads", "counts reads after", "clock"), name
            continue
        assert report.handed_over == ((name,) if is_declared else ())
        if is_declared:
            twin.start()
        assert same(owner.entries, twin.entries), (name, owner.fault)
        num_right += 1
    assert num_refused > num // 4
    assert num_right > num // 3


def test_a_second_thread_is_refused_as_one(tmp_path: Path) -> None:
    """R2: while one thread saves, another one neither saves nor loads."""
    checkpointer = Checkpointer(tmp_path)
    said: list[str] = []

    class Meanwhile(Counter):
        def state_dict(self) -> dict[str, Any]:
            for call in (lambda: checkpointer.save(2, {}), lambda: checkpointer.load({})):
                with ThreadPoolExecutor(1) as pool:
                    said.append(str(pool.submit(call).exception()))
            return super().state_dict()

    checkpointer.save(1, {"owner": Meanwhile(n=1)})
    assert [text.partition(". ")[0] for text in said] == [
        f"{name} is called in a second thread while save runs in the first"
        for name in ("save", "load")
    ]
    assert checkpointer.load({"owner": Counter(n=0)}).step == 1


def save_fsdp1(context: RankContext, root: str) -> str:
    with ProcessGroups.create(Layout(dp=2)) as groups:
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        with pytest.raises(PlacementError) as caught:
            Checkpointer(root, groups=groups).save(1, {"model": model})
        return str(caught.value)


def test_fsdp1_without_a_mesh_is_refused_in_plain_words(tmp_path: Path) -> None:
    """R2."""
    for said in run_ranks(2, save_fsdp1, str(tmp_path)).results:
        assert "weight: FullyShardedDataParallel.state_dict() shows a ShardedTensor" in said
        assert "device_mesh" in said

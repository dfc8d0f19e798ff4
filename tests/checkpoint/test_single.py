"""One process: what is kept, what is refused, and what a report says."""

from __future__ import annotations

import collections
import copy
import enum
import math
import pickle
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import (
    RNG,
    Checkpointer,
    Codecs,
    ConfigError,
    EverySteps,
    KeepLast,
    Layout,
    MismatchError,
    OptimizerState,
    PerRank,
    PlacementError,
    PosixStorage,
    Sharded,
    StorageError,
    Stored,
    Transient,
)
from holdfast.format.names import step_dir
from holdfast.integrations.world import newest_step
from holdfast.storage import Storage, open_storage
from holdfast.writer.copying import copy_checkpoint


@dataclass
class Position:
    """A user's value."""

    epoch: int
    offset: float


class Phase(enum.Enum):
    """A user's enumeration."""

    WARM = "warm"
    COLD = "cold"


class Net(nn.Module):
    """Tied weights, a buffer that is not kept, and extra state."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.embed(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(7, (5,))).square().mean() * random.random() * np.random.rand()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(lr: float = 1e-2) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=lr
    )
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    """20 further steps: losses, parameters, moments, hyperparameters, random draws."""
    model, optimizer, scheduler = make()
    train(model, optimizer, 3)
    scheduler.step()
    checkpointer = Checkpointer(tmp_path)
    rng = RNG(generators={"data": torch.Generator().manual_seed(5)})

    def state(m: Net, o: torch.optim.Optimizer, s: Any) -> dict[str, object]:
        return {"model": m, "optimizer": OptimizerState(o, m), "scheduler": s, "rng": rng}

    checkpointer.save(3, state(model, optimizer, scheduler))
    want = train(model, optimizer, 20)
    final = copy.deepcopy(model.state_dict())

    fresh, other, later = make(lr=7.0)
    before = {name: p.clone() for name, p in fresh.named_parameters()}
    report = checkpointer.load(state(fresh, other, later))
    assert report.step == 3
    assert "model.embed.weight" in report.loaded
    assert other.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0]
    assert any(not torch.equal(before[n], p) for n, p in fresh.named_parameters())
    assert fresh.calls == 3
    assert train(fresh, other, 20) == want
    for name, value in fresh.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, final[name]), name


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    codecs = Codecs(dataclasses=[Position], enums=[Phase])
    tree = {
        "empty": [{}, [], (), set()],
        1: {"int key": True, (2, "x"): None},
        "floats": [0.1, -0.0, math.inf, -math.inf],
        "nan": math.nan,
        "big": 2**80,
        "bytes": b"\x00\xff",
        "complex": 1 - 2j,
        "position": Position(3, 0.5),
        "phase": Phase.COLD,
        "ordered": collections.OrderedDict(b=1, a=2),
        "scalar": np.float32(1.5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "tensor in a tuple": (torch.arange(3), "x"),
        "range": range(3, 9, 2),
    }
    checkpointer = Checkpointer(tmp_path, codecs=codecs)
    checkpointer.save(1, {"user": tree})
    loaded = checkpointer.load({"user": Stored()}).values["user"]
    assert isinstance(loaded, dict)
    assert list(loaded) == list(tree)
    assert math.isnan(loaded.pop("nan"))
    array, pair = loaded.pop("array"), loaded.pop("tensor in a tuple")
    assert array.dtype == np.int16
    assert np.array_equal(array, np.arange(6).reshape(2, 3).T)
    assert isinstance(pair, tuple)
    assert torch.equal(pair[0], torch.arange(3))
    rest = {k: v for k, v in tree.items() if k not in ("nan", "array", "tensor in a tuple")}
    assert loaded == rest
    assert [type(v) for v in loaded.values()] == [type(v) for v in rest.values()]
    assert math.copysign(1, loaded["floats"][1]) == -1


def test_the_saved_state_is_not_changed_and_serves_as_a_template(tmp_path: Path) -> None:
    """E18; a target inside a tuple or under an integer key is filled in place."""
    tensors = [torch.randn(3), torch.randn(2, 2)]
    state = {"tree": {3: (tensors[0], {"deep": tensors[1]}), "n": 5, "skip": Transient(object())}}
    checkpointer = Checkpointer(tmp_path)
    before = [t.clone() for t in tensors]
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    for t in tensors:
        t.zero_()
    report = checkpointer.load(state, step=1)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    tree = report.values["tree"]
    assert isinstance(tree, dict)
    assert tree[3][0] is tensors[0]
    assert tree["skip"] is state["tree"]["skip"].value
    one, two = ((tmp_path / f"iter_000000{i}/data/00000.safetensors").read_bytes() for i in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "part.bad"),
        (lambda: 0, "part.bad"),
        (torch.nn.Parameter(torch.ones(2)).to("meta"), "part.bad"),
        (torch.ones(2, 2).to_sparse(), "part.bad"),
        (np.array([object()]), "part.bad"),
        (Stored(), "part.bad"),
        (torch.nn.Linear(1, 1), "part.bad"),
        (PerRank(1, axes=("nonsense",)), "nonsense"),
        (Position(1, 2.0), "part.bad"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(
    tmp_path: Path, value: object, words: str
) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(PlacementError, match=words):
        checkpointer.save(1, {"part": {"bad": value, "good": 1}})
    assert checkpointer.latest() is None
    assert not list(tmp_path.glob("*iter*"))


def test_wrong_declarations_are_refused() -> None:
    """E19: at declaration, with the library's own exceptions."""
    local = torch.ones(2, 3)
    for arguments in (
        {"dims": {0: "tp", 1: "tp"}},
        {"dims": {2: "tp"}},
        {"dims": {0: "tp", -2: "dp"}},
        {"offset": (5, 0)},
        {"offset": (0,)},
        {"offset": (0, 0), "dims": {0: "tp"}},
        {},
        {"offset": (0, 0), "over": ("tp", "tp")},
        {"dims": {0: "tp"}, "over": ("tp",)},
    ):
        with pytest.raises(PlacementError):
            Sharded(local, (4, 3), **arguments)  # type: ignore[arg-type]
    with pytest.raises(PlacementError):
        PerRank(1, axes=("tp", "tp"))


def test_two_entries_under_one_key_are_refused(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for tree in (
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {1: torch.ones(1), "1": torch.zeros(1)},
    ):
        with pytest.raises(PlacementError, match="two tensors"):
            checkpointer.save(1, {"t": tree})
    with pytest.raises(ConfigError, match="OptimizerState"):
        checkpointer.save(1, {"o": torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)})
    with pytest.raises(ConfigError, match="part"):
        checkpointer.save(1, {"": 1})


def test_a_copy_of_a_checkpointer_is_refused(tmp_path: Path) -> None:
    """R9: also inside of what is copied, as a trainer that has one."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_async(1, {"model": nn.Linear(3, 2)}).result()
        holder = {"trainer": [checkpointer]}
        copies: list[Callable[[], object]] = [lambda: copy.copy(checkpointer)]
        for make in (copy.deepcopy, pickle.dumps):
            copies += [partial(make, checkpointer), partial(make, holder)]
        for make_copy in copies:
            with pytest.raises(ConfigError, match="cannot be copied or pickled; make another"):
                make_copy()
        checkpointer.save(2, {"model": nn.Linear(3, 2)})


def test_strict_matching_names_every_difference(tmp_path: Path) -> None:
    """Missing, unexpected, shape, dtype, kind: before any target is touched (E9)."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": nn.Linear(3, 2), "tree": {"x": torch.ones(2), "v": 1}})

    class Other(nn.Module):
        def __init__(self, dtype: torch.dtype = torch.float32, rows: int = 2) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((rows, 3), 9.0, dtype=dtype))

    def refused(state: dict[str, object], *words: str, **options: Any) -> None:
        with pytest.raises(MismatchError) as caught:
            checkpointer.load(state, **options)
        for word in words:
            assert word in str(caught.value)

    target = Other()
    refused({"model": target}, "model.bias", "ignore_unexpected")
    refused({"model": Other(rows=4)}, "model.weight", "[4, 3]", "[2, 3]")
    refused({"model": Other(torch.float64)}, "model.weight", "F64", "F32", "cast=True")
    refused({"model": nn.Linear(3, 2), "more": {"a": 1}}, "more")
    refused({"tree": {"x": torch.zeros(2), "y": torch.zeros(1), "v": 1}}, "tree.y")
    refused({"tree": {"v": torch.zeros(1)}}, "tree.v")
    refused({"tree": {"x": 3}}, "tree.x")
    everything = {"model": Other(rows=4), "tree": {"x": 3, "y": 1}, "more": {"a": 1}}
    refused(everything, "model.weight", "model.bias", "tree.x", "tree.y", "more")
    assert torch.equal(target.weight, torch.full((2, 3), 9.0))

    report = checkpointer.load({"model": target}, ignore_unexpected=True)
    assert report.unexpected == ("model.bias",)
    assert report.not_requested == ("tree",)
    wide = Other(torch.float64)
    report = checkpointer.load({"model": wide}, ignore_unexpected=True, cast=True)
    assert report.cast == ("model.weight",)
    assert torch.equal(wide.weight, target.weight.double())
    extra = {"x": torch.zeros(2), "y": torch.full((1,), 4.0)}
    report = checkpointer.load({"tree": extra}, allow_missing=["tree.y"])
    assert report.missing == ("tree.y",)
    assert extra["y"].item() == 4.0
    assert extra["x"].tolist() == [1.0, 1.0]


def test_a_dict_of_targets_takes_what_it_names_where_the_rest_may_be_left(tmp_path: Path) -> None:
    """E9: of what may be left no tensor is read; values come back, and what no target is in."""
    checkpointer = Checkpointer(tmp_path)
    inner = {"w": torch.full((2,), 2.0), "large": torch.ones(4000), "n": 5}
    tree = {"w": torch.ones(3), "large": torch.ones(5000), "in": inner, "v": [1], 3: torch.ones(1)}
    checkpointer.save(1, {"tree": {**tree, "any": {"x": torch.ones(2)}}, "more": torch.ones(6000)})
    left = ("tree.in.large", "tree.large", "tree.3")
    for ignored, unexpected in ((True, left), (["tree.*large"], left[:2]), (["tree.*e"], left[:2])):
        weight = torch.zeros(3)
        target = {"w": weight, "in": {"w": torch.zeros(2)}, "any": {}}
        report = checkpointer.load({"tree": target}, ignore_unexpected=ignored)
        assert sorted(report.unexpected) == sorted(unexpected)
        assert report.nbytes_read < 100
        values = report.values["tree"]
        assert values["w"] is weight
        assert (weight.tolist(), values["v"]) == ([1.0] * 3, [1])
        assert values["any"]["x"].tolist() == [1.0, 1.0]
        assert list(values["in"]) == ["w", "n"]
        assert (3 in values) == (ignored is not True)
    whole = checkpointer.load({"tree": {"w": torch.zeros(3)}}).values["tree"]
    assert (whole["large"].sum().item(), whole["in"]["large"].sum().item()) == (5000, 4000)
    assert checkpointer.load({"tree": {}}, ignore_unexpected=True).values["tree"].keys() == {
        *tree, "any",
    }  # fmt: skip


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """K8: compile, activation checkpointing and DDP; a user's own attribute `module` stays."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    bare = Holder()
    checkpointer = Checkpointer(tmp_path)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = torch.compile(DistributedDataParallel(checkpoint_wrapper(bare)))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        bare.module.weight.grad = torch.ones(2, 2)
        optimizer.step()
        state = {"model": wrapped, "optimizer": OptimizerState(optimizer, wrapped)}
        checkpointer.save(1, state)
    finally:
        torch.distributed.destroy_process_group()
    plain = Holder()
    fresh = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    report = checkpointer.load({"model": plain, "optimizer": OptimizerState(fresh, plain)})
    assert report.loaded == (
        "model.module.weight",
        "model.module.bias",
        "optimizer.state.module.weight.momentum_buffer",
    )
    assert torch.equal(plain.module.weight, bare.module.weight)
    assert fresh.state[plain.module.weight]["momentum_buffer"].sum() == 4
    assert fresh.param_groups[0]["lr"] == 0.1


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    model = Net()
    report = checkpointer.save(1, {"model": model})
    untied = Net(tied=False)
    checkpointer.load({"model": untied})
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert report.num_tensors == len(model.state_dict()) - 2
    checkpointer.save(2, {"model": untied})
    untied.head.weight.data.add_(1)
    checkpointer.save(3, {"model": untied})
    with pytest.raises(MismatchError, match=r"head\.weight"):
        checkpointer.load({"model": model})


def test_frozen_and_unused_parameters_have_no_state(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"o": OptimizerState(optimizer, model)})
    fresh = torch.optim.Adam(model.parameters())
    checkpointer.load({"o": OptimizerState(fresh, model)})
    assert set(fresh.state) == set(model[1].parameters())
    assert all(entry["step"].item() == 1 for entry in fresh.state.values())

    started = torch.optim.Adam(model.parameters())
    model[0].requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    started.step()
    with pytest.raises(MismatchError, match=r"o\.state\.0\.weight"):
        checkpointer.load({"o": OptimizerState(started, model)})


def test_groups_are_found_by_their_members(tmp_path: Path) -> None:
    """Hyperparameters follow identity, not position; a different grouping is refused."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def optimizer(*groups: tuple[list[nn.Parameter], float]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": p, "lr": lr} for p, lr in groups], lr=1)

    first, second = list(model[0].parameters()), list(model[1].parameters())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"o": OptimizerState(optimizer((first, 0.1), (second, 0.2)), model)})
    swapped = optimizer((second, 5.0), (first, 6.0))
    checkpointer.load({"o": OptimizerState(swapped, model)})
    assert [g["lr"] for g in swapped.param_groups] == [0.2, 0.1]
    with pytest.raises(MismatchError, match="group 0"):
        checkpointer.load({"o": OptimizerState(optimizer((first + second, 1.0)), model)})


def test_steps_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "not yet there")
    assert checkpointer.latest() is None
    with pytest.raises(StorageError, match="no checkpoint"):
        checkpointer.load({"t": Stored()})
    checkpointer.save(5, {"t": {"x": torch.ones(1)}})
    with pytest.raises(StorageError, match="overwrite=True"):
        checkpointer.save(5, {"t": {"x": torch.zeros(1)}})
    assert checkpointer.load({"t": Stored()}).values["t"] == {"x": torch.ones(1)}
    checkpointer.save(5, {"t": {"x": torch.full((1,), 3.0)}}, overwrite=True)
    assert checkpointer.load({"t": Stored()}).values["t"]["x"].item() == 3.0  # type: ignore[index]
    checkpointer.save(4, {"t": 1})
    assert checkpointer.steps() == [4, 5]
    assert (tmp_path / "not yet there" / "latest_checkpointed_iteration.txt").read_text() == "5\n"
    hidden = {".reading", ".plans", ".root-id"}
    names = {p.name for p in (tmp_path / "not yet there").iterdir()} - hidden
    assert names == {"iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"}
    with pytest.raises(StorageError, match="step 9"):
        checkpointer.load({"t": Stored()}, step=9)


def _names_at(storage: Storage) -> list[str]:
    return storage.list("") if storage.is_dir("") else []


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("in_bucket", [False, True])
def test_one_checkpoint_is_no_root(in_bucket: bool, is_saved: bool, tmp_path: Path) -> None:
    """R6: else a run would find nothing there, start afresh, and save into the checkpoint.

    Or, in a bucket, next to it; and of a step that is not saved yet, in its way.
    """
    root = f"memory://{secrets.token_hex(8)}/run" if in_bucket else str(tmp_path / "run")
    state = {"t": {"x": torch.ones(2)}}
    if is_saved:
        Checkpointer(root).save(5, state)
    inside = Checkpointer(f"{root}/iter_0000005")
    before = _names_at(inside.storage)
    words = re.escape(f"the directory above, {root}, and step=5")
    for call in (
        inside.latest,
        inside.steps,
        inside.inspect,
        partial(inside.load, state),
        partial(inside.save, 6, state),
        partial(inside.save_async, 6, state),
        partial(inside.prepare, state),
    ):
        with pytest.raises(StorageError, match=words):
            call()
    assert _names_at(inside.storage) == before


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_root_that_is_in_use_may_have_the_name_of_a_step(in_bucket: bool, tmp_path: Path) -> None:
    """R6: a run that was copied to there is read and continued, with an id of a root and without.

    "Give the directory above" would be wrong: nothing is there.
    """
    source, state = Checkpointer(tmp_path / "run"), {"t": {"x": torch.ones(2)}}
    source.save(5, state)
    root = (
        f"memory://{secrets.token_hex(8)}/iter_0000001" if in_bucket else tmp_path / "iter_0000001"
    )
    target = open_storage(root)
    copy_checkpoint(source.storage, step_dir(5), target)
    for step in (6, 7):
        assert Checkpointer(root).load(state).step == step - 1
        Checkpointer(root).save(step, state)
    for each in (5, 6, 7):
        target.remove_tree(step_dir(each))
    assert newest_step(root) is None
    assert Checkpointer(root).latest() is None


@pytest.mark.parametrize(
    "place", ["file", "link to file", "link to nothing", "file/run", "link to nothing/a/run"]
)
def test_a_file_is_no_root(tmp_path: Path, place: str) -> None:
    """R6: and was none before, so it has not vanished. Nothing advises to remove a user's file.

    `latest` found nothing: a run would have started afresh, and failed at its first save.
    """
    (tmp_path / "file").write_text("")
    first = place.split("/")[0]
    if first != "file":
        (tmp_path / first).symlink_to(first.removeprefix("link to "))
    checkpointer = Checkpointer(tmp_path / place)
    for call in (
        checkpointer.latest,
        checkpointer.steps,
        partial(checkpointer.load, {"t": 1}),
        partial(checkpointer.save, 1, {"t": 1}),
    ):
        with pytest.raises(StorageError, match=r"not a directory|link to nothing, which") as raised:
            call()
        assert "remove it" not in str(raised.value)


def test_a_relative_root_needs_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was removed, below a process that is still in it, was a FileNotFoundError."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for make in (Checkpointer, PosixStorage):
        with pytest.raises(StorageError, match=r"^run is relative, and"):
            make("run")
    Checkpointer(tmp_path / "run").save(1, {"t": 1})


@pytest.mark.parametrize(
    ("root", "words"),
    [
        *[(root, "root must be a path") for root in (None, 3, b"run", PosixStorage, ["run"])],
        ("", "'' is not a place"),
        *[(root, "expanduser") for root in ("~/run", Path("~/run"), "~", "~ana/run")],
    ],
)
def test_what_is_no_place_is_refused_at_once(root: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Checkpointer(root)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("retention", 3, r"retention must be a KeepPolicy, got 3, such as KeepLast\(3\)"),
        ("retention", KeepLast, "retention must be a KeepPolicy, got <class"),
        ("save_when", EverySteps, "save_when=.* is not a save policy"),
        ("groups", Layout(tp=1), "groups must be a ProcessGroups, got Layout"),
        ("codecs", [int], r"codecs must be a Codecs, got \[<class 'int'>\]"),
        ("block_nbytes", 5000, "block_nbytes=5000 must be a power of two"),
        ("block_nbytes", 1 << 27, r"must be a power of two, at most 67108864 \(64 MiB\)"),
    ],
)
def test_an_argument_of_another_kind_is_refused_at_once(
    tmp_path: Path, argument: str, value: Any, words: str
) -> None:
    """A wrong `retention` failed after the commit: a save that is committed was called failed.

    A block that no manifest may state failed every save at its commit.
    """
    with pytest.raises(ConfigError, match=words):
        Checkpointer(tmp_path, **{argument: value})


def test_a_part_that_is_misspelled_is_answered_with_those_stored(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 1), "rng": RNG(), "progress": {"step": 1}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        for part in ("modle", "mode", "models"):
            with pytest.raises(MismatchError, match=r"; its parts are model, rng, progress$"):
                checkpointer.load({part: state["model"]})
        with pytest.raises(MismatchError, match=r"progress\.epoch.* agrees to that\)$"):
            checkpointer.load({"progress": {"step": 1, "epoch": 1}})


def test_advice_on_shapes_is_given_once(tmp_path: Path) -> None:
    advice = "differ by padding alone"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"t": {"a": torch.ones(2), "b": torch.ones(3)}})
        for a, count in ((torch.ones(4), 1), (torch.ones(2, 2), 0)):
            with pytest.raises(MismatchError, match=r"t\.a: .*; t\.b: ") as error:
                checkpointer.load({"t": {"a": a, "b": a}})
            assert str(error.value).count(advice) == count


def test_generators_have_names() -> None:
    with pytest.raises(ConfigError, match="it takes a dict of generators by name"):
        RNG(generators=torch.Generator())  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [KeepLast(1), EverySteps(1)])
def test_a_policy_is_joined_to_policies_only(policy: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = policy | 3


def test_a_closed_checkpointer_saves_nothing(tmp_path: Path) -> None:
    """Nothing would raise a failure of an asynchronous save after `close`."""
    state = {"t": {"x": torch.ones(2)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    for call in (
        partial(checkpointer.save, 2, state),
        partial(checkpointer.save_async, 2, state),
        partial(checkpointer.prepare, state),
    ):
        with pytest.raises(ConfigError, match=r"is closed, and saves nothing any more"):
            call()
    checkpointer.close()
    assert checkpointer.latest() == checkpointer.load(state).step == 1


def test_one_plan_serves_equal_structures_and_any_change_is_seen(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    tensors: dict[str, object] = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    seen = []
    for step, change in enumerate(
        [None, None, ("c", torch.ones(1)), None, ("a", torch.ones(4)), ("a", torch.ones(4).half()),
         ("b", 5), None]
    ):  # fmt: skip
        if change is not None:
            tensors[change[0]] = change[1]
        report = checkpointer.save(step, {"t": tensors})
        seen.append(report.planned)
        loaded = checkpointer.load({"t": Stored()}).values["t"]
        assert isinstance(loaded, dict)
        assert loaded.keys() == tensors.keys()
        for name, value in tensors.items():
            got = loaded[name]
            equal = got == value if not isinstance(value, torch.Tensor) else torch.equal(got, value)
            assert equal, (step, name)
    assert seen == [True, False, True, False, True, True, True, False]
    assert checkpointer.stats.num_plans == 5


def test_a_run_that_goes_back_is_told_what_a_restart_would_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, by the first save below the newest step; and by the step that is there already."""
    state: dict[str, Any] = {"progress": {"step": 0}}
    with Checkpointer(tmp_path) as before:
        for step in (100, 200, 300):
            before.save(step, state)
    assert not caplog.records
    with Checkpointer(tmp_path) as again:
        assert again.load(state, step=100).step == 100
        again.save(150, state)
        again.save(160, state)
        with pytest.raises(StorageError, match=rf"holdfast prune {tmp_path} --after 199$"):
            again.save(200, state)
    (record,) = caplog.records
    assert "step 150 is saved below step 300, the newest checkpoint" in record.getMessage()
    assert record.getMessage().endswith(f"holdfast prune {tmp_path} --after 150")

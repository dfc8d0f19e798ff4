"""Many tensors are compared and matched by columns; the outcome is that of one after another."""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast import (
    Checkpointer,
    Codecs,
    HoldfastError,
    Layout,
    ModuleState,
    OptimizerState,
    Padded,
    Replicated,
    Sharded,
)
from holdfast._torch import set_local_tensor, spec_of
from holdfast.checkpoint.load.read_executor import requested_boxes
from holdfast.collector import collector_paused
from holdfast.format.manifest import TensorForms, TensorInfo
from holdfast.state import FlatShard, flatten_state
from holdfast.state import matcher as matching
from holdfast.state.flatten import LeafCache
from holdfast.state.matcher import LocalMemory, Matcher, MatchResult, TensorRequest
from holdfast.state.shared_memory import are_of_no_file, files_mapped_twice
from holdfast.state.traits import Traits, held_tensors, traits_of
from tests.harness import RankContext, run_ranks
from tests.objects.modules import Fused

LONE = Layout()


class Named(torch.Tensor):
    """A tensor with an attribute of its own, at most."""


class Answering(torch.Tensor):
    """A class that answers for its tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def grid(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape or (1,)))).reshape(shape)


ODD: dict[str, Callable[[], Any]] = {
    "plain": lambda: grid(4, 6),
    "parameter": lambda: nn.Parameter(grid(4, 6)),
    "double": lambda: grid(4, 6).double(),
    "0-d": lambda: grid(),
    "empty": lambda: torch.zeros(0, 6),
    "view": lambda: grid(8, 6)[2:6],
    "strided": lambda: grid(6, 4).t(),
    "expanded": lambda: grid(1, 6).expand(4, 6),
    "conjugated": lambda: torch.zeros(4, 6, dtype=torch.complex64).conj(),
    "meta": lambda: torch.zeros(4, 6, device="meta"),
    "sparse": lambda: grid(4, 6).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([grid(2), grid(3)]),
    "lazy": lambda: nn.LazyLinear(3).weight,
    "quantized": lambda: torch.quantize_per_tensor(grid(4, 6), 1.0, 0, torch.qint8),
    "subclass": lambda: grid(4, 6).as_subclass(Named),
    "padded": lambda: Padded(grid(4, 6), (3, 5)),
    "sharded": lambda: Sharded(grid(4, 6), (4, 6), dims={0: "tp"}),
    "replicated": lambda: Replicated(grid(4, 6)),
    "run": lambda: FlatShard(torch.arange(11.0), 2, grid(4, 6), "dp"),
}


def traits(objects: list[Any]) -> Traits:
    return Traits(objects, held_tensors(objects))


@pytest.mark.parametrize("seed", range(20))
def test_traits_by_column_are_those_of_each(seed: int) -> None:
    choose = random.Random(seed)
    kinds = choose.choices(sorted(ODD), k=choose.choice([0, 1, 5, 40]))
    if choose.random() < 0.3:
        kinds = ["plain", "parameter"] * len(kinds)
    objects = [ODD[kind]() for kind in kinds]
    columns = traits(objects)
    assert columns.of_each() == [traits_of(each, {}) for each in objects]
    assert [id(each) for each in held_tensors(objects)] == [
        id(matching.local_tensor(each) if isinstance(each, DTensor) else held_of(each))
        for each in objects
    ]
    again = traits([ODD[kind]() for kind in kinds])
    assert columns.same_as(again)
    if objects:
        at = choose.randrange(len(objects))
        other = choose.choice([kind for kind in sorted(ODD) if kind != kinds[at]])
        changed = traits([*objects[:at], ODD[other](), *objects[at + 1 :]])
        # What columns do not tell apart must be the same one by one, too.
        assert not changed.same_as(columns) or changed.of_each() == columns.of_each()


def held_of(each: Any) -> Any:
    while not isinstance(each, torch.Tensor):
        each = each.value if isinstance(each, Padded) else each.local
    return each


@pytest.mark.parametrize("change", ["data", "resize", "dtype", "memory", "set"])
def test_a_tensor_that_is_changed_as_it_stays_is_noticed(change: str) -> None:
    """The same objects at every pass: nothing is known by identity."""
    cache = LeafCache()
    state = {"p": {f"t{i}": grid(4, 6) for i in range(40)}}

    def flat() -> Any:
        return flatten_state(state, layout=LONE, rank=0, codecs=Codecs(), cache=cache)

    first, second = flat(), flat()
    assert first.structure is second.structure
    victim = state["p"]["t17"]
    if change == "data":
        victim.data = grid(3, 6)
    elif change == "resize":
        victim.resize_(2, 6)
    elif change == "dtype":
        victim.data = grid(4, 6).double()
    elif change == "memory":
        victim.data = grid(4, 6) + 1
    else:
        victim.set_(grid(6, 4))
    third = flat()
    assert (third.structure is second.structure) == (change == "memory")
    assert third.leaves["p.t17"].shape == tuple(victim.shape)
    assert torch.equal(third.local("p.t17", 0), victim)
    assert third.local("p.t17", 0).data_ptr() == victim.data_ptr()


def test_ties_among_many_come_and_go() -> None:
    cache = LeafCache()
    tensors = {f"t{i}": grid(4) for i in range(40)}

    def nodes() -> Any:
        return flatten_state(
            {"p": tensors}, layout=LONE, rank=0, codecs=Codecs(), cache=cache
        ).nodes["p"]

    plain = nodes()
    assert plain["t30"]["k"] == "p.t30"
    tensors["t30"] = tensors["t7"]
    assert nodes()["t30"]["k"] == "p.t7"
    assert nodes()["t30"]["k"] == "p.t7"
    tensors["t30"] = grid(4)
    assert nodes()["t30"]["k"] == "p.t30"


# ---- Matching ----


def match(
    template: Mapping[str, Any],
    stored: Mapping[str, tuple[str, tuple[int, ...]]],
    node: Any,
    **options: Any,
) -> tuple[MatchResult | HoldfastError, Matcher]:
    closed = options.pop("closed", False)
    matcher = Matcher(
        tensors={f"p.{name}": info for name, info in stored.items()},
        layout=LONE, rank=0, codecs=Codecs(), **options,
    )  # fmt: skip
    matcher.move_to(LONE, closed=closed)
    try:
        matcher.match(template, node, "p")
    except HoldfastError as error:
        return error, matcher
    return matcher.result, matcher


def described(result: MatchResult | HoldfastError) -> Any:
    """All of a result, with each tensor by its place in memory unless it was made for the load."""
    if isinstance(result, HoldfastError):
        return str(result)
    requests = [
        (each.path, each.tensor, each.boxes, each.is_fresh,
         [(each.is_fresh or local.data_ptr(), local.shape, local.stride(), local.dtype)
          for local in each.locals])
        for each in result.tensors
    ]  # fmt: skip
    return (
        requests, result.missing, result.mismatched, result.cast, result.allowed, result.touched,
    )  # fmt: skip


STORED: dict[str, tuple[str, tuple[int, ...]]] = {
    "same": ("F32", (4, 6)),
    "double": ("F64", (4, 6)),
    "half": ("F16", (4, 6)),
    "integers": ("I64", (4, 6)),
    "other shape": ("F32", (6, 4)),
    "0-d": ("F32", ()),
    "empty": ("F32", (0, 6)),
}


def grouped(tree: dict[Any, Any]) -> dict[Any, Any]:
    """The entries in dicts of three, as an optimizer's state is by parameter."""
    groups: dict[Any, Any] = {f"g{i}": {} for i in range(10)}
    for name, each in tree.items():
        groups[f"g{int(str(name).strip('t')) // 3}"][name] = each
    return groups


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_dict_of_tensors_is_matched_as_each_of_them(
    seed: int, is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_MIN_COLUMNAR", 10)
    choose = random.Random(seed)
    names = [f"t{i}" for i in range(30)]
    template: dict[Any, Any] = {name: ODD["plain"]() for name in names}
    stored = dict.fromkeys(names, STORED["same"])
    most = [0] if is_grouped and choose.random() < 0.7 else [0, 0, 1, 3]
    for name in choose.sample(names, choose.choice(most)):
        template[name] = ODD[choose.choice(sorted(ODD))]()
    for name in choose.sample(names, choose.choice(most)):
        stored[name] = STORED[choose.choice(sorted(STORED))]
    if choose.random() < 0.3:  # as for a whole model in half precision
        stored = dict.fromkeys(names, choose.choice([STORED["half"], STORED["double"]]))
    if choose.random() < 0.2:  # a target under two names
        template[names[choose.randrange(30)]] = template[names[3]]
    node: dict[str, Any] = {name: {"$": "tensor", "k": f"p.{name}"} for name in names}
    if choose.random() < 0.3:  # two names of one stored tensor
        node[names[5]] = {"$": "tensor", "k": f"p.{names[6]}"}
        stored[names[5]] = stored[names[6]]
    if choose.random() < 0.2:
        node[names[9]] = choose.choice([1, None, "text", [1], {"a": 1}, {"$": "tuple", "v": []}])
    if choose.random() < 0.3:
        del node[names[2]]
    if choose.random() < 0.3:
        del template[names[4]]
    if choose.random() < 0.2:
        template[7] = grid(4, 6)
    choose.shuffle(names)
    node = {name: node[name] for name in names if name in node}
    if is_grouped:
        template, node = grouped(template), grouped(node)
        if choose.random() < 0.2:
            node[f"g{choose.randrange(10)}"] = choose.choice([{}, [], 1, {"$": "tuple", "v": []}])
        if choose.random() < 0.2:
            template[f"g{choose.randrange(10)}"] = choose.choice([{}, grid(4, 6), 1, {1: grid()}])
        if choose.random() < 0.2:
            node["more"] = {"t0": {"$": "tensor", "k": "p.t0"}}
    options = {
        "cast": choose.random() < 0.5,
        "allow_missing": choose.choice([(), ("p.*t2",)]),
        "closed": choose.random() < 0.5,
    }
    by_column, _ = match(template, stored, node, **options)
    monkeypatch.setattr(matching, "_MIN_COLUMNAR", sys.maxsize)
    one_by_one, _ = match(template, stored, node, **options)
    assert described(by_column) == described(one_by_one)


@pytest.mark.parametrize("closed", [True, False])
def test_what_groups_of_tensors_do_not_name_is_requested_unless_they_are_closed(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_MIN_COLUMNAR", 5)
    names = [f"t{i}" for i in range(30)]
    node = grouped({name: {"$": "tensor", "k": f"p.{name}"} for name in names})
    whole = grouped({name: grid(4, 6) for name in names})
    for template in (
        {name: whole[name] for name in list(whole)[:7]},
        {name: {t: each for t, each in whole[name].items() if t != "t1"} for name in whole},
    ):
        named = {t for group in template.values() for t in group}
        result, _ = match(template, dict.fromkeys(names, STORED["same"]), node, closed=closed)
        assert isinstance(result, MatchResult)
        assert len(result.tensors) == (len(named) if closed else 30)


@pytest.mark.parametrize("closed", [True, False])
def test_what_a_dict_does_not_name_is_requested_unless_it_is_closed(closed: bool) -> None:
    names = [f"t{i}" for i in range(30)]
    node = {name: {"$": "tensor", "k": f"p.{name}"} for name in names}
    template = {name: grid(4, 6) for name in names[:20]}
    result, _ = match(template, dict.fromkeys(names, STORED["same"]), node, closed=closed)
    assert isinstance(result, MatchResult)
    assert len(result.tensors) == (20 if closed else 30)
    assert result.touched == {f"p.{name}" for name in (names[:20] if closed else names)}


@pytest.mark.parametrize("is_grouped", [False, True])
def test_the_same_dict_is_matched_by_columns(
    is_grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above is one of two ways, and not of one with itself."""
    names = [f"t{i}" for i in range(30)]
    node = {name: {"$": "tensor", "k": f"p.{name}"} for name in names}
    template = {name: grid(4, 6) for name in names}
    if is_grouped:
        template, node = grouped(template), grouped(node)
    stored = dict.fromkeys(names, STORED["same"])
    calls: dict[int, int] = {}
    for least in (10, sys.maxsize):
        monkeypatch.setattr(matching, "_MIN_COLUMNAR", least)
        calls[least] = count_calls(lambda: match(template, stored, node))
    assert calls[sys.maxsize] - calls[10] > 30 * 5
    result, matcher = match(template, stored, node)
    assert isinstance(result, MatchResult)
    assert len(result.tensors) == 30
    assert count_calls(lambda: matcher.build(template, node, "p")) < (90 if is_grouped else 30)
    assert matcher.build(template, node, "p") == template


def on_a_mesh(context: RankContext) -> None:
    ranks = torch.arange(4).view(2, 2)
    mesh, other = DeviceMesh("cpu", ranks), DeviceMesh("cpu", ranks)
    layout = Layout(dp=4)

    def dtensor(*placements: Any, on: DeviceMesh = mesh, rows: int = 2) -> DTensor:
        local = torch.zeros(rows, 2)
        return DTensor.from_local(local, on, placements or (Shard(0), Shard(1)), run_check=False)

    # Some of one shape and yet with other boxes.
    makers: list[Callable[[], Any]] = [
        dtensor,
        lambda: dtensor(on=other),
        lambda: dtensor(Shard(1), Shard(0)),
        lambda: dtensor(Replicate(), Replicate()),
        lambda: dtensor(Shard(0), Replicate()),
        lambda: dtensor(Replicate(), Shard(0)),
        lambda: dtensor(_StridedShard(0, split_factor=1), Shard(1)),
        lambda: dtensor(rows=3),
        lambda: torch.zeros(4, 6),
    ]
    names = [f"t{i}" for i in range(40)]
    for seed in range(12):
        choose = random.Random(seed)
        template = {name: choose.choice(makers)() for name in names}
        objects = list(template.values())
        columns = traits(objects)
        assert columns.of_each() == [traits_of(each, {}) for each in objects]
        assert columns.same_as(traits(objects))
        at = choose.randrange(len(objects))
        changed = [*objects]
        changed[at] = choose.choice(makers)()
        # New placements are not known by identity: then one by one decides.
        assert not columns.same_as(traits(changed)) or (
            traits(changed).of_each() == columns.of_each()
        )
        stored = {name: ("F32", tuple(each.shape)) for name, each in template.items()}
        node = {name: {"$": "tensor", "k": name} for name in names}
        results = []
        for least in (1, sys.maxsize):
            matching._MIN_COLUMNAR = least  # in a process of its own
            matcher = Matcher(tensors=stored, layout=layout, rank=context.rank, codecs=Codecs())
            matcher.match(template, node, "p")
            results.append(described(matcher.result))
        assert results[0] == results[1]
        assert len(results[0][0]) == 40

    # The same DTensor, of which something is another one now.
    one = dtensor()
    before, spec = traits([one]), spec_of(one)
    held = [torch.zeros(2, 2).double(), torch.zeros(1, 2), torch.zeros(2, 2).as_subclass(Named)]
    for local in held:
        set_local_tensor(one, local)
        assert not traits([one]).same_as(before)
    set_local_tensor(one, torch.zeros(2, 2))
    assert traits([one]).same_as(before)
    change: Any = one
    change._spec = replace(spec, mesh=other)
    assert not traits([one]).same_as(before)
    change._spec = spec
    assert traits([one]).same_as(before)
    one.data = dtensor(rows=3)  # leaves the local tensor as it is
    assert not traits([one]).same_as(before)


def test_distributed_tensors_by_column() -> None:
    """Meshes count by identity and placements by type, in one dict with plain tensors."""
    run_ranks(4, on_a_mesh, fresh=True)


@pytest.mark.parametrize("kind", sorted(set(ODD) - {"sparse", "nested", "lazy"}))
def test_local_memory_is_what_each_tensor_says(kind: str) -> None:
    tensors = [held_of(each()) for each in (ODD["plain"], ODD[kind], ODD["strided"])] * 200
    memory = LocalMemory([TensorRequest(str(i), 0, None, (t,)) for i, t in enumerate(tensors)])
    assert memory.address.tolist() == [t.data_ptr() for t in tensors]
    assert memory.nbytes.tolist() == [t.nbytes for t in tensors]
    assert memory.is_plain.tolist() == [
        t.is_cpu and t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in tensors
    ]


def test_requested_boxes_are_those_of_each_request() -> None:
    choose = random.Random(0)
    shapes = [(4, 6), (8,), (), (0, 6)]
    infos = [TensorInfo(key=str(i), dtype="F32", shape=[*s]) for i, s in enumerate(shapes)]
    forms_stored = TensorForms(infos)
    box = matching.Box
    shared = (box((2, 0), (2, 6)),)
    forms: list[tuple[int, Any]] = [
        (0, None), (1, None), (2, None), (3, None), (0, shared), (0, shared), (0, ()),
        (0, (box((0, 0), (1, 6)), box((3, 0), (1, 2)))), (1, (box((5,), (3,)),)),
        (2, (box((), ()),)),
    ]  # fmt: skip
    requests = []
    for number, boxes in choose.choices(forms, k=100):
        held = [torch.zeros(1)] * (1 if boxes is None else len(boxes))
        requests.append(TensorRequest("", number, boxes, tuple(held)))
    table = requested_boxes(requests, forms_stored)
    expected = []
    for each in requests:
        shape = shapes[each.tensor]
        for one in (box((0,) * len(shape), shape),) if each.boxes is None else each.boxes:
            pad = 2 - len(shape)
            expected.append((each.tensor, [*one.offset, *[0] * pad], [*one.shape, *[1] * pad]))
    assert expected == list(
        zip(table.tensor.tolist(), table.offset.tolist(), table.extent.tolist(), strict=True)
    )


# ---- Files that are mapped twice ----


def test_two_parts_of_a_file_are_not_the_same_bytes(tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    (tmp_path / "file").write_bytes(bytes(4 * page))
    before = set(files_mapped_twice())
    with (tmp_path / "file").open("r+b") as file:
        parts = [mmap.mmap(file.fileno(), page, offset=i * page) for i in (0, 2)]
        assert set(files_mapped_twice()) == before
        whole = mmap.mmap(file.fileno(), 2 * page)
        assert len(set(files_mapped_twice()) - before) == 2  # the whole, and its first part
        for each in (*parts, whole):
            each.close()


def test_memory_that_torch_allocated_is_no_file_whatever_else_is_mapped(tmp_path: Path) -> None:
    path, size = str(tmp_path / "file"), mmap.PAGESIZE
    (tmp_path / "file").write_bytes(bytes(size))
    own = [torch.zeros(4), nn.Parameter(torch.zeros(2, 3)), torch.zeros(9)[3:6]]
    one, other = (torch.from_file(path, shared=True, size=size) for _ in range(2))
    assert are_of_no_file(own)
    assert not are_of_no_file([*own, one, other])
    mapped = [np.memmap(path, dtype=np.uint8, mode="r+") for _ in range(2)]
    assert not are_of_no_file([torch.from_numpy(each) for each in mapped])
    assert not are_of_no_file([torch.from_dlpack(each[3:]) for each in mapped])


# ---- The gain ----


def count_calls(work: Callable[[], object]) -> int:
    """Python functions that are entered, generators resumed included."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        del frame, argument
        count += event == "call"

    with collector_paused():  # others may have functions called by the collector
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count


def test_no_python_runs_for_a_tensor_that_has_not_changed() -> None:
    """Of ten times as many tensors a steady pass enters few more functions: some for a hundred."""

    def steady(num: int) -> int:
        cache = LeafCache()
        state = {"p": {f"t{i}": torch.zeros(3) for i in range(num)}}

        def work() -> None:
            flatten_state(state, layout=LONE, rank=0, codecs=Codecs(), cache=cache)

        work()
        return max(count_calls(work) for _ in range(3))

    assert (steady(2000) - steady(200)) / 1800 < 0.08


def test_forms_cost_a_save_as_much_each_however_many_there_are() -> None:
    """Prevents a walk over all modules and entries for each tensor that is shown as another."""

    def steady(num: int) -> int:
        part = ModuleState(nn.Sequential(*(Fused() for _ in range(num))))
        for each in part.module.parameters():
            nn.init.ones_(each)
        part.tree()  # the first one tries what each form is made from
        return count_calls(part.tree)

    assert steady(40) < 2.2 * steady(20)


def test_a_load_enters_few_functions_for_many_tensors(tmp_path: Path) -> None:
    """None for each: what is read at once goes to its places by one call, and is checked by one."""

    def state(num: int) -> dict[str, Any]:
        return {"p": {f"t{i}": torch.full((64,), float(i)) for i in range(num)}}

    def load(num: int) -> int:
        blank = state(num)
        with Checkpointer(tmp_path / str(num)) as checkpointer:
            checkpointer.save(1, state(num))
            for each in blank["p"].values():
                each.zero_()
            checkpointer.load(blank)
            calls = count_calls(lambda: checkpointer.load(blank))
        assert all(torch.equal(each, blank["p"][name]) for name, each in state(num)["p"].items())
        return calls

    assert (load(2000) - load(200)) / 1800 < 0.1


def test_an_optimizer_and_its_module_enter_few_functions_for_a_tensor(tmp_path: Path) -> None:
    """Steady saves and loads of what nearly every job has: a module and AdamW's moments."""

    def calls(num_layers: int) -> np.ndarray:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        state = {"model": model, "optimizer": OptimizerState(optimizer, model)}
        cache = LeafCache()

        def flatten() -> None:
            flatten_state(state, layout=LONE, rank=0, codecs=Codecs(), cache=cache)

        flatten()
        flatten()
        with Checkpointer(tmp_path / str(num_layers)) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.load(state)
            return np.array([count_calls(flatten), count_calls(lambda: checkpointer.load(state))])

    per_tensor = (calls(40) - calls(8)) / (32 * 8)
    assert np.all(per_tensor < (18, 46)), per_tensor

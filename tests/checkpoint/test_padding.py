"""Row E8: what one padding saved loads under every other; padding is zero and never stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from holdfast import (
    Checkpointer,
    CorruptionError,
    Layout,
    MismatchError,
    OptimizerState,
    Padded,
    ProcessGroups,
    Replicated,
    Sharded,
    ShardedOptimizer,
    Stored,
    declare_padding,
)
from holdfast.state import OptimizerParameter
from holdfast.state.module_tree import parameter_names
from holdfast.state.optimizer_state import UnshardedOptimizer
from tests.checkpoint.common import full
from tests.harness import RankContext, run_ranks

VOCABULARY, WIDTH = 100, 6
GARBAGE = 3.0

WAYS: dict[str, dict[str, Any]] = {
    "whole": {"rows": VOCABULARY},
    "tp2": {"rows": 128, "tp": 2},
    "tp4": {"rows": 192, "tp": 4},  # rank 2 holds 4 real rows, rank 3 none
    "ddp": {"rows": 120, "dp": 2, "wrap": True},
    "sharded dp2": {"rows": 104, "dp": 2, "sharded": True, "declared": False},
    "sharded tp2 dp2": {"rows": 256, "tp": 2, "dp": 2, "sharded": True},  # two ranks hold none
    "sharded tp4": {"rows": 192, "tp": 4, "sharded": True},
}
"""How the vocabulary is padded and laid out. `declared`: parameters are DTensors."""
NARROW = [step for step, way in enumerate(WAYS.values()) if way.get("sharded")]
"""Steps that are saved in bf16, too."""


class Net(nn.Module):
    """An embedding tied to its head, a head of its own cut over dim 1, a mask, and no padding."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH, dtype=dtype)
        self.tied = nn.Linear(WIDTH, rows, bias=False, dtype=dtype)
        self.tied.weight = self.embed.weight
        self.across = nn.Linear(rows, WIDTH, bias=False, dtype=dtype)
        self.norm = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.register_buffer("mask", torch.zeros(rows))

    def declare(self, rows: int = VOCABULARY) -> None:
        declare_padding(self.embed, "weight", (rows, WIDTH))
        declare_padding(self.across, "weight", (WIDTH, rows))
        declare_padding(self, "mask", (rows,))


class Run:
    """One rank's model and optimizer, laid out one way; everything is full of garbage."""

    def __init__(
        self, way: str, *, dtype: torch.dtype = torch.float32, declare: int | None = VOCABULARY
    ) -> None:
        self.way = WAYS[way]
        self.is_sharded = bool(self.way.get("sharded"))
        layout = Layout(tp=self.way.get("tp", 1), dp=self.way.get("dp", 1))
        self.groups = (
            ProcessGroups.create(layout) if layout.world_size > 1 else ProcessGroups.single()
        )
        self.rows = int(self.way["rows"])
        self.net = Net(self.rows, dtype)
        if declare is not None:
            self.net.declare(declare)
        if layout.world_size > 1 and self.way.get("declared", not self.way.get("wrap")):
            self._distribute(layout)
        self.model: nn.Module = self.net
        if self.way.get("wrap"):
            group = self.groups.group("dp_cp")
            self.model = DistributedDataParallel(self.net, process_group=group)
        self.optimizer = self._make_optimizer()
        self.pollute()

    def _distribute(self, layout: Layout) -> None:
        names = ("dp_cp", "tp") if layout.dp > 1 else ("tp",)
        mesh = self.groups.mesh(*names)

        def place(value: Tensor, dim: int | None) -> DTensor:
            last: Placement = Replicate() if dim is None else Shard(dim)
            placed = [*[Replicate()] * (len(names) - 1), last]
            return distribute_tensor(value.detach(), mesh, placed, src_data_rank=None)

        net = self.net
        net.embed.weight = net.tied.weight = nn.Parameter(place(net.embed.weight, 0))
        net.across.weight = nn.Parameter(place(net.across.weight, 1))
        net.norm.weight = nn.Parameter(place(net.norm.weight, None))
        net.norm.bias = nn.Parameter(place(cast("Tensor", net.norm.bias), None))
        net.mask = place(cast("Tensor", net.mask), 0)

    def _make_optimizer(self) -> Any:
        parameters = list(self.net.parameters())
        if not self.is_sharded:
            return torch.optim.AdamW(parameters, lr=0.1, foreach=False)
        return ShardedOptimizer(
            self.net, parameters, make=lambda g: torch.optim.AdamW(g, lr=0.1), groups=self.groups,
            over="dp_cp", divisor=self.groups.size("dp_cp"), bucket_nbytes=2000, align_nbytes=4,
            elementwise=True,
        )  # fmt: skip

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": OptimizerState(self.optimizer, self.model)}

    def held(self) -> Iterator[tuple[str, OptimizerParameter]]:
        holder = self.optimizer if self.is_sharded else UnshardedOptimizer(self.optimizer)
        names = parameter_names(self.net)
        for each in holder.optimizer_parameters():
            if each.updated is not None:
                yield names[each.parameter], each

    def tensors(self) -> dict[str, Tensor]:
        """All that a load fills, as local tensors, by key."""
        found = {f"model.{n}": local(p) for n, p in self.net.named_parameters()}
        found["model.mask"] = local(cast("Tensor", self.net.mask))
        for name, held in self.held():
            assert held.updated is not None
            for entry, value in held.optimizer.state.get(held.updated, {}).items():
                if value.ndim:
                    found[f"optimizer.state.{name}.{entry}"] = local(value)
            if held.is_main:
                found[f"optimizer.main.{name}"] = held.updated
        return found

    def snapshot(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.tensors().items()}

    @torch.no_grad()
    def pollute(self) -> None:
        for value in self.tensors().values():
            value.fill_(GARBAGE)

    def truth(self, *, padding: float) -> dict[str, Tensor]:
        """What `tensors` has to be: the true values of the real elements, and this padding."""
        narrow = next(self.net.parameters()).dtype
        found: dict[str, Tensor] = {}
        for name, tensor in [*self.net.named_parameters(), ("mask", cast("Tensor", self.net.mask))]:
            value = self._cut(f"main.{name}", tensor, padding)
            found[f"model.{name}"] = value if name == "mask" else value.to(narrow)
        for name, held in self.held():
            runs = {f"optimizer.state.{name}.{e}": e for e in ("exp_avg", "exp_avg_sq")}
            if held.is_main:
                runs[f"optimizer.main.{name}"] = "main"
            for key, entry in runs.items():
                value = self._cut(f"{entry}.{name}", held.parameter, padding)
                if held.over is not None and held.updated is not None:
                    value = value.reshape(-1)[held.start : held.start + held.updated.numel()]
                found[key] = value
        return found

    def _cut(self, name: str, like: Tensor, padding: float) -> Tensor:
        """This rank's piece of a padded tensor; values of its real part depend on the name alone"""
        shape = [VOCABULARY if n == self.rows else n for n in like.shape]
        value = torch.full(like.shape, padding)
        value[tuple(slice(n) for n in shape)] = full(name, tuple(shape)).abs()
        if not isinstance(like, DTensor):
            return value
        mesh = like.device_mesh
        return distribute_tensor(value, mesh, like.placements, src_data_rank=None).to_local()

    @torch.no_grad()
    def fill(self) -> None:
        """The true values everywhere, and garbage for padding, as a run could have it."""
        for _, held in self.held():
            assert held.updated is not None
            held.optimizer.state[held.updated] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.zeros_like(held.updated, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(held.updated, dtype=torch.float32),
            }
        truth = self.truth(padding=GARBAGE)
        for key, value in self.tensors().items():
            value.copy_(truth[key])

    def check(self, parts: tuple[str, ...] = ("model", "optimizer")) -> None:
        """Real elements are bitwise right and all padding is zero."""
        if self.is_sharded:
            self.optimizer.synchronize()
        truth, found = self.truth(padding=0.0), self.tensors()
        assert truth.keys() == found.keys()
        for key, value in found.items():
            if key.startswith(parts):
                assert torch.equal(value, truth[key]), key


def local(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def ranks_of(way: str) -> int:
    return int(WAYS[way].get("tp", 1) * WAYS[way].get("dp", 1))


def ways_of(context: RankContext) -> list[str]:
    """All ways of this number of ranks: one spawn goes through them."""
    return [way for way in WAYS if ranks_of(way) == context.num_ranks]


def save(context: RankContext, root: str) -> None:
    """Save in float32, and for sharded ways in bf16 with float32 main parameters."""
    for way in ways_of(context):
        dtypes = (torch.float32, torch.bfloat16) if WAYS[way].get("sharded") else (torch.float32,)
        for dtype in dtypes:
            save_as(f"{root}/{dtype}", way, list(WAYS).index(way), dtype)


def save_as(root: str, way: str, step: int, dtype: torch.dtype) -> None:
    run = Run(way, dtype=dtype)
    with run.groups:
        run.fill()
        before = run.snapshot()
        saver = Checkpointer(root, groups=run.groups)
        planned = saver.save(step, run.state).planned
        # It finds the plan of a way before it where the pieces are the same.
        assert planned or way == "sharded tp4"
        assert not saver.save(1000 + step, run.state).planned
        later = Checkpointer(root, groups=run.groups)
        assert not later.save(1000 + step, run.state, overwrite=True).planned, "not proven again"
        for key, value in run.tensors().items():
            assert torch.equal(value, before[key]), "a save changed the state"


def load(context: RankContext, root: str) -> None:
    """Load what two others saved, in rings, into fresh state and into state full of garbage."""
    for way in ways_of(context):
        load_wide(root, way)
        if WAYS[way].get("sharded"):
            load_narrow(f"{root}/torch.bfloat16", way)


def load_wide(root: str, way: str) -> None:
    run = Run(way)
    with run.groups:
        loader = Checkpointer(f"{root}/torch.float32", groups=run.groups)
        number = list(WAYS).index(way)
        for step in [(number - stride) % len(WAYS) for stride in (1, 3)]:
            loader.load(run.state, step=step)
            run.check()
            run.pollute()
    if not run.is_sharded:
        # Main parameters of bf16 into parameters of float32 that are their own main ones.
        run = Run(way)
        with run.groups:
            loader = Checkpointer(f"{root}/torch.bfloat16", groups=run.groups)
            loader.load(run.state, step=NARROW[0], cast=True)
            run.check()


def load_narrow(root: str, way: str) -> None:
    """Float32 main parameters of bf16, however they were cut, and weights alone."""
    run = Run(way, dtype=torch.bfloat16)
    with run.groups:
        loader = Checkpointer(root, groups=run.groups)
        for step in NARROW:
            both = ("model", "optimizer")
            for names in (both, both[::-1], both[1:]) if step == NARROW[0] else (both,):
                run.pollute()
                loader.load({name: run.state[name] for name in names}, step=step)
                run.check(names)
        run.optimizer.synchronize()
        for name, parameter in run.net.named_parameters():
            # Rounded from the main parameters alone, which were loaded last.
            assert torch.equal(local(parameter), run.truth(padding=0.0)[f"model.{name}"]), name
        # Weights alone: main parameters follow them, padding too.
        run.pollute()
        loader.load({"model": run.model}, step=NARROW[0])
        run.check(("model",))
        for name, held in run.held():
            assert held.updated is not None
            piece = local(held.parameter).reshape(-1)[held.start :][: held.updated.numel()]
            assert torch.equal(held.updated, piece.float()), name


@pytest.mark.slow
def test_every_padding_loads_every_other(tmp_path: Path) -> None:
    """TP 2 with 128 rows, TP 4 with 192, none, replicas, runs of elements; the truth is stored."""
    save(RankContext(rank=0, num_ranks=1), str(tmp_path))
    for n in (2, 4):
        run_ranks(n, save, str(tmp_path))
    root = tmp_path / "torch.float32"
    for step in range(len(WAYS)):
        report = Checkpointer(root).load({"model": Stored(), "optimizer": Stored()}, step=step)
        assert_true(report.values, step)
    file = next((root / "iter_0000000/data").glob("*.safetensors"))
    with safe_open(file, "pt") as opened:
        assert opened.get_slice("model.embed.weight").get_shape() == [VOCABULARY, WIDTH]
        moment = opened.get_slice("optimizer.state.across.weight.exp_avg")
        assert moment.get_shape() == [WIDTH, VOCABULARY]
        mask = opened.get_tensor("model.mask")
        assert torch.equal(mask, full("main.mask", (VOCABULARY,)).abs())
    load(RankContext(rank=0, num_ranks=1), str(tmp_path))
    for n in (2, 4):
        run_ranks(n, load, str(tmp_path))


def assert_true(values: Any, step: int) -> None:
    """A checkpoint read as it is holds the real tensors and nothing else."""
    model, optimizer = values["model"], values["optimizer"]
    shapes = {"embed.weight": (VOCABULARY, WIDTH), "across.weight": (WIDTH, VOCABULARY)}
    for name, shape in shapes.items():
        assert torch.equal(model[name], full(f"main.{name}", shape).abs()), (step, name)
        for entry in ("exp_avg", "exp_avg_sq"):
            wanted = full(f"{entry}.{name}", shape).abs()
            assert torch.equal(optimizer["state"][name][entry], wanted), (step, name, entry)
    assert model["mask"].shape == (VOCABULARY,)


def refused(context: RankContext, root: str) -> list[str]:
    """Loads that must not be, on all ranks, and what they leave of the targets."""
    said: list[str] = []
    for way, dtype in (("tp2", torch.float32), ("sharded dp2", torch.float32)):
        for declare in (None, 90, VOCABULARY):
            # The third: only rank 1 lacks the declaration.
            if declare == VOCABULARY and context.rank == 1:
                declare = None
            run = Run(way, dtype=dtype, declare=declare)
            with run.groups:
                loader = Checkpointer(root, groups=run.groups)
                before = run.snapshot()
                with pytest.raises(MismatchError) as caught:
                    loader.load(run.state, step=1)
                said.append(str(caught.value))
                if declare == 90:
                    with pytest.raises(MismatchError, match=r"real one of \[1[02]\d, 6\]"):
                        loader.load({"optimizer": run.state["optimizer"]}, step=1)
                    with pytest.raises(MismatchError, match=r"shape is \[90, 6\], .*'s \[100, 6\]"):
                        loader.load({"model": run.model}, step=1)
                assert_unchanged(run, before)
    run = Run("tp2")
    with run.groups:
        loader = Checkpointer(root, groups=run.groups)
        run.fill()
        run.pollute()
        before = run.snapshot()
        with pytest.raises(CorruptionError):
            loader.load(run.state, step=2)
        truth = run.truth(padding=GARBAGE)
        for key, value in run.tensors().items():
            padding = truth[key] == GARBAGE
            assert torch.equal(value[padding], before[key][padding]), key
        # What is not there and may be missing stays as it is, in its own place; state that the
        # saved optimizer did not have of a parameter that it knew is gone.
        run.pollute()
        held = {key: value.data_ptr() for key, value in run.tensors().items()}
        report = loader.load(run.state, step=3, allow_missing=["model.embed.*", "model.tied.*"])
        assert "model.embed.weight" in report.missing
        assert report.fresh == ()
        after = run.tensors()
        gone = held.keys() - after.keys()
        assert gone == {f"optimizer.state.embed.weight.{e}" for e in ("exp_avg", "exp_avg_sq")}
        assert {key: held[key] for key in after} == {
            key: value.data_ptr() for key, value in after.items()
        }
        for key, value in after.items():
            if "embed" in key:
                assert bool((value == GARBAGE).all()), key
            else:
                assert torch.equal(value, run.truth(padding=0.0)[key]), key
    return said


def assert_unchanged(run: Run, before: dict[str, Tensor]) -> None:
    for key, value in run.tensors().items():
        assert torch.equal(value, before[key]), key


def prepare_refused(root: str) -> None:
    run = Run("whole")
    run.fill()
    saver = Checkpointer(root)
    saver.save(1, run.state)
    saver.save(2, run.state)
    optimizer = cast("dict[str, Any]", OptimizerState(run.optimizer, run.net).tree())
    del optimizer["state"]["embed.weight"]
    model = {n: p for n, p in run.net.named_parameters() if n != "embed.weight"}
    saver.save(3, {"model": {**model, "mask": run.net.mask}, "optimizer": optimizer})
    file = next(Path(root, "iter_0000002/data").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_what_is_not_declared_or_is_another_shape_is_refused(tmp_path: Path) -> None:
    prepare_refused(str(tmp_path))
    for said in run_ranks(2, refused, str(tmp_path)).results:
        for missing, other, one_rank in zip(said[::3], said[1::3], said[2::3], strict=True):
            assert re.search(
                r"embed.weight.*shape.* \[1(28|04), 6\].*differ by padding alone", missing
            )
            assert "[100, 6]" in missing
            assert "declare_padding(module, name, shape)" in missing
            assert "of a parameter of shape [100, 6], the optimizer's has [90, 6]" in other
            assert "differ by padding alone" in one_rank


def tree(groups: ProcessGroups, *, blank: bool) -> dict[str, Any]:
    """Markers of all kinds in a plain tree; how much is padding depends on the ranks."""
    n, index = groups.size("tp"), groups.index("tp")
    rows = 8 * n

    def padded(name: str, real: tuple[int, ...], whole: tuple[int, ...]) -> Tensor:
        value = torch.full(whole, GARBAGE)
        if not blank:
            value[tuple(slice(k) for k in real)] = full(name, real)
        return value

    row = padded("row", (5, 4), (rows, 4))
    column = padded("column", (4, 7), (4 + n, rows))
    made: dict[str, Any] = {
        "row": Padded(Sharded(row.chunk(n)[index].clone(), (rows, 4), dims={0: "tp"}), (5, 4)),
        "column": Padded(
            Sharded(
                column[:, 8 * index : 8 * index + 8],
                tuple(column.shape),
                offset=(0, 8 * index),
                over=("tp",),
            ),
            (4, 7),
        ),
        "replicated": Padded(Replicated(padded("replicated", (3, 3), (3 + n, 3))), (3, 3)),
        "plain": Padded(padded("plain", (3, 3, 2), (3, 3 + n, 2 * n)).transpose(0, 1), (3, 3, 2)),
        "scalar": Padded(padded("scalar", (), ()), ()),
        "nothing": Padded(padded("nothing", (0, 4), (n, 4)), (0, 4)),
        "no rows": Padded(Sharded(torch.full((2, 4), GARBAGE), (2 * n, 4), dims={0: "tp"}), (0, 4)),
        "no padding": Padded(padded("none", (4,), (4,)), (4,)),
    }
    return {"tree": made}


def save_tree(context: RankContext, root: str, tp: int) -> None:
    layout = Layout(tp=tp)
    with ProcessGroups.create(layout) if tp > 1 else ProcessGroups.single() as groups:
        saver, state = Checkpointer(root, groups=groups), tree(groups, blank=False)
        assert saver.save(tp, state).planned
        assert not saver.save(10 + tp, tree(groups, blank=False)).planned
        later = Checkpointer(root, groups=groups)
        assert not later.save(20 + tp, tree(groups, blank=False)).planned, "not proven again"


def load_tree(context: RankContext, root: str, tp: int) -> None:
    layout = Layout(tp=tp)
    with ProcessGroups.create(layout) if tp > 1 else ProcessGroups.single() as groups:
        for step in (1, 2, 3):
            target = tree(groups, blank=True)
            report = Checkpointer(root, groups=groups).load(target, step=step)
            truth = tree(groups, blank=False)["tree"]
            got = cast("dict[str, Tensor]", report.values["tree"])
            for name, marker in target["tree"].items():
                wanted = truth[name].local
                wanted[wanted == GARBAGE] = 0.0
                assert got[name] is marker.local
                assert torch.equal(got[name], wanted), (step, name)
                if name not in ("scalar", "no padding"):
                    assert tp == 1 or bool((wanted == 0.0).any())


def test_markers_in_plain_trees(tmp_path: Path) -> None:
    for tp in (1, 2, 3):
        run_ranks(tp, save_tree, str(tmp_path), tp, init=tp > 1)
    for tp in (1, 2, 3):
        run_ranks(tp, load_tree, str(tmp_path), tp, init=tp > 1)
    values = cast("Any", Checkpointer(tmp_path).load({"tree": Stored()}, step=3).values["tree"])
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    assert shapes == {
        "row": (5, 4), "column": (4, 7), "replicated": (3, 3), "plain": (3, 3, 2), "scalar": (),
        "nothing": (0, 4), "no rows": (0, 4), "no padding": (4,),
    }  # fmt: skip

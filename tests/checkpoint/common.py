"""A small global state, and the pieces of it that each rank of a layout holds."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import torch

from holdfast import Checkpointer, Layout, PendingSave, PerRank, Sharded, Union
from holdfast.arrays.packed_ints import unpack_ints, unsqueeze
from holdfast.checkpoint.plan.claims import read_claims_messages
from holdfast.checkpoint.plan.kept_plans import PlanNotes

NUM_LAYERS = 4


def full(key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The one true value of a tensor, from its key alone."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def layers_of(layout: Layout, rank: int) -> range:
    """The layers of this rank's pipeline stage."""
    stage, per_stage = layout.coordinate(rank)["pp"], NUM_LAYERS // layout.pp
    return range(stage * per_stage, (stage + 1) * per_stage)


def piece(
    key: str, shape: tuple[int, ...], dims: dict[int, str], layout: Layout, rank: int
) -> Sharded:
    """This rank's piece of `full(key, shape)`, cut as `torch.chunk` cuts."""
    local = full(key, shape)
    for dim, axis in dims.items():
        members = layout.group(axis, rank)
        size = -(-shape[dim] // len(members))
        start = min(size * members.index(rank), shape[dim])
        local = local.narrow(dim, start, min(size, shape[dim] - start))
    return Sharded(local.clone(), shape, dims=dims)


def make_state(layout: Layout, rank: int, *, blank: bool = False) -> dict[str, object]:
    """Model, moments, values and a per-rank value of one rank; `blank`: NaN for the truth."""
    model: dict[str, object] = {"norm": full("model.norm", (6,))}
    for layer in layers_of(layout, rank):
        name = f"layers.{layer}"
        model[f"{name}.column"] = piece(f"model.{name}.column", (10, 6), {0: "tp"}, layout, rank)
        model[f"{name}.row"] = piece(f"model.{name}.row", (6, 10), {1: "tp"}, layout, rank)
        model[f"{name}.bias"] = full(f"model.{name}.bias", (5,), torch.bfloat16)
    coordinate = layout.coordinate(rank)
    moments: dict[str, object] = {}
    for layer in layers_of(layout, rank):
        name = f"layers.{layer}.column"
        moments[name] = piece(f"moments.{name}", (13, 6), {0: "dp", 1: "tp"}, layout, rank)
    state: dict[str, object] = {
        "model": Union(model),
        "moments": Union(moments),
        "values": {"step": 7, "schedule": [1, 2.5, None, {"empty": {}}], "pair": (1, "a")},
        "own": PerRank({"name": "-".join(map(str, coordinate.values())), "t": torch.tensor(rank)}),
    }
    if blank:
        for tree in (model, moments):
            for value in tree.values():
                tensor = value.local if isinstance(value, Sharded) else value
                assert isinstance(tensor, torch.Tensor)
                tensor.fill_(float("nan"))
        state["values"] = {}
    return state


def assert_equal(loaded: Mapping[str, object], layout: Layout, rank: int) -> None:
    """Every tensor of a state filled by a load is bitwise the truth."""
    truth = make_state(layout, rank)
    for part in ("model", "moments"):
        wanted, got = truth[part], loaded[part]
        assert isinstance(wanted, Union)
        wanted = wanted.mapping
        got = got.mapping if isinstance(got, Union) else got
        assert isinstance(wanted, dict)
        assert isinstance(got, dict)
        assert list(wanted) == list(got)
        for name, value in wanted.items():
            mine = got[name]
            a = value.local if isinstance(value, Sharded) else value
            b = mine.local if isinstance(mine, Sharded) else mine
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"{part}.{name} on rank {rank}"


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, themselves, by their keys in a checkpoint."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"model.{name}": each for name, each in model.state_dict().items()} | {
        f"optimizer.state.{names[id(p)]}.{entry}": each
        for p, entries in optimizer.state.items()
        for entry, each in entries.items()
    }


def stored_tensors(checkpointer: Checkpointer, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of parts `model` and `optimizer`, by key."""
    values = checkpointer.load_all(step=step).values
    state = values["optimizer"]["state"]
    return {f"model.{name}": each for name, each in values["model"].items()} | {
        f"optimizer.state.{name}.{entry}": each
        for name, entries in state.items()
        for entry, each in entries.items()
    }


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by relative name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def wait(pending: PendingSave, timeout: float = 60.0) -> None:
    """Until it is done, without raising what it failed with."""
    done = threading.Event()
    pending.add_done_callback(lambda _: done.set())
    assert done.wait(timeout), pending


def plan_notes(data: bytes) -> PlanNotes:
    """What a file of a kept plan is made of."""
    start = int.from_bytes(data[:8], "little") + 8
    _, _, _, share_nbytes, claims_nbytes, _ = msgspec.msgpack.decode(data[8 : start - 32])
    ends = list(accumulate(unpack_ints(share_nbytes).tolist(), initial=start))
    claims = msgspec.msgpack.decode(unsqueeze(data[-claims_nbytes:]), type=list[bytes])
    encoded, _ = read_claims_messages(claims, range(len(claims)))
    return PlanNotes(claims, encoded, [data[i:j] for i, j in pairwise(ends)])

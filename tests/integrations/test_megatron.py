"""Megatron-core: its sharded state dicts in our format, killed and resumed, on other layouts."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.arrays.boxes import Box
from holdfast.cli.main import main
from holdfast.format.reader import Snapshot
from holdfast.state.tensor_elements import torch_dtype
from holdfast.storage import PosixStorage
from tests.integrations.forks import ForkServer
from tests.integrations.kills import KILL_AT_ADAMW, check_kills, in_new_root, many_kills
from tests.integrations.pages import program_of

pytestmark = pytest.mark.slow  # the import of the package alone takes seconds

PROGRAM = program_of("megatron", "megatron")
STEPS = 8
ON_CPU = """
from tests.foreign.megatron_on_cpu import cuda_on_cpu
import holdfast.integrations.megatron as kept
kept.on_cpu = cuda_on_cpu()
kept.on_cpu.__enter__()
"""
ALONE = """
import os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""
KILL = ON_CPU + KILL_AT_ADAMW


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(
        "megatron.core.models.gpt", "megatron.core.optimizer", "holdfast.integrations.megatron"
    )
    yield server
    server.close()


DENSE, SPARSE = (2, 0), (1, 4)
"""Tensor-parallel ranks and experts."""


def killed_and_resumed(
    server: ForkServer, root: Path, at: int, layout: tuple[int, int]
) -> list[str]:
    """What two ranks print that are killed once, and started again."""
    named = {"directory": root.parent, "num_ranks": 2}
    kill = KILL.format(at=at, rank=at % 2)
    ends = server.run(PROGRAM, root, STEPS, *layout, prelude=kill, **named)
    assert -9 in {end.code for end in ends}, ends[0].output[-2000:]
    return server.lines(PROGRAM, root, STEPS, *layout, prelude=ON_CPU, **named)


class Straight(dict[tuple[int, int], list[str]]):
    """By layout, what a run prints that is not killed: each runs when it is asked for."""

    def __init__(self, server: ForkServer, base: Path) -> None:
        self._server, self._base = server, base

    def root(self, layout: tuple[int, int]) -> Path:
        """Return where the checkpoints are of a run that has ended."""
        assert self[layout]
        return self._base / str(layout[0])

    def __missing__(self, layout: tuple[int, int]) -> list[str]:
        named: dict[str, Any] = {"prelude": ON_CPU, "directory": self._base, "num_ranks": 2}
        words = self._base / str(layout[0]), STEPS, *layout
        self[layout] = self._server.lines(PROGRAM, *words, **named)
        return self[layout]


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    return Straight(server, tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize(
    ("at", "layout"), [(6, DENSE), pytest.param(9, SPARSE, marks=pytest.mark.slow)]
)
def test_killed_and_resumed_bitwise(
    server: ForkServer, straight: Straight, tmp_path: Path, at: int, layout: tuple[int, int]
) -> None:
    assert killed_and_resumed(server, tmp_path / "run", at, layout) == straight[layout]


@pytest.mark.parametrize("layout", [DENSE, SPARSE])
@many_kills
def test_killed_at_random_steps(
    server: ForkServer,
    straight: Straight,
    tmp_path: Path,
    layout: tuple[int, int],
    num_kills: int,
) -> None:
    num_optimizers = 2 if layout == SPARSE else 1  # experts have one of their own
    run = partial(killed_and_resumed, server, layout=layout)
    resumed = partial(in_new_root, run, tmp_path / "run")
    stop = STEPS * num_optimizers
    check_kills(resumed, straight[layout], num_kills, first=2, stop=stop)


def test_another_layout_by_value(server: ForkServer, straight: Straight, tmp_path: Path) -> None:
    """Two tensor-parallel ranks, then one: loaded there and saved, nothing differs."""
    saved = straight.root(DENSE) / f"iter_{STEPS:07d}"
    again = PROGRAM.replace("while step < total_steps:", AGAIN)
    root = tmp_path / "2"
    shutil.copytree(saved, root / saved.name)
    server.lines(again, root, STEPS, 1, 0, prelude=ON_CPU + ALONE, directory=tmp_path)
    one, other = whole(saved), whole(tmp_path / "again" / saved.name)
    assert one.keys() == other.keys()
    assert [key for key in one if one[key] != other[key]] == []


AGAIN = """
path = root.parent / "again" / f"iter_{step:07d}"
path.mkdir(parents=True)
dist_checkpointing.save(
    state(), str(path), saving, preprocess_common_before_consistancy_check=saving.common)
while step < total_steps:"""


def whole(directory: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a checkpoint but for the file that Megatron made."""
    tensors = {}
    with Snapshot.open(PosixStorage(directory.parent), directory.name) as snapshot:
        for key in snapshot.keys:
            shape = tuple(snapshot.tensor(key).shape)
            itemsize = torch_dtype(snapshot.tensor(key).dtype).itemsize
            data = bytearray(math.prod(shape) * itemsize)
            if data:
                snapshot.read_box(key, Box((0,) * len(shape), shape), memoryview(data))
            if not key.startswith("megatron.files."):
                tensors[key] = bytes(data)
    return tensors


PIPELINE = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from holdfast.integrations.megatron import HoldfastLoad, HoldfastSave, groups_of, latest

root, again, total_steps, tp, pp, vp = *map(Path, sys.argv[1:3]), *map(int, sys.argv[3:7])
dist.init_process_group("gloo")
sizes = {
    "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
    "virtual_pipeline_model_parallel_size": vp if vp > 1 else None}
parallel_state.initialize_model_parallel(**sizes)
groups = ProcessGroupCollection.use_mpu_process_groups()
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
    pipeline_dtype=torch.float32, attention_dropout=0.0, hidden_dropout=0.0, **sizes)

def chunk(at):
    return DistributedDataParallel(config, DistributedDataParallelConfig(), GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8,
        pg_collection=groups, share_embeddings_and_output_weights=False,
        pre_process=groups.pp.rank() == at == 0,
        post_process=groups.pp.rank() == pp - 1 and at == vp - 1,
        vp_stage=at if vp > 1 else None))

chunks = [chunk(at) for at in range(vp)]
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01), chunks)
step, saving = 0, HoldfastSave(groups_of(groups))

def state(is_loading=False):
    weights = {f"model{at}": each.module.sharded_state_dict() for at, each in enumerate(chunks)}
    return {**weights, "iteration": step,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading)}

def save(root):
    path = root / f"iter_{step:07d}"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(
        state(), str(path), saving, preprocess_common_before_consistancy_check=saving.common)

def forward(batches, model):
    tokens = next(batches)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    output = model(
        tokens[:, :-1], torch.arange(8).expand(2, 8), mask, labels=tokens[:, 1:])
    return output, lambda output: (output.mean(), {})

def train():
    for each in chunks:
        each.zero_grad_buffer()
    optimizer.zero_grad()
    torch.manual_seed(step)
    batches = [torch.randint(0, 64, (2, 9)) for _ in range(2)]
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=[iter(batches) for _ in chunks], model=chunks,
        num_microbatches=2, seq_length=8, micro_batch_size=2, forward_only=False)
    finalize_model_grads(chunks)
    optimizer.step()

if (newest := latest(saving.groups, root)) is not None:
    loaded = dist_checkpointing.load(state(True), newest, **HoldfastLoad(saving.groups).strategies)
    for at, each in enumerate(chunks):
        each.module.load_state_dict(loaded[f"model{at}"])
    with torch.no_grad():
        optimizer.load_state_dict(loaded["optimizer"])
    step = loaded["iteration"]
if step == total_steps:
    save(again)
while step < total_steps:
    train()
    step += 1
    if step % 2 == 0:
        save(root)
saving.close()
weights = sum(p.double().abs().sum().item() for each in chunks for p in each.parameters())
print(f"step {step}, weights {weights:.17g}")
"""


def test_pipelines_on_other_layouts(server: ForkServer, tmp_path: Path) -> None:
    """Two stages of two tensor-parallel ranks, killed and resumed; one rank, and an interleaved
    pipeline of two, load what they have saved and save it: nothing differs."""

    def lines(root: Path, ranks: int, *layout: int, prelude: str = ON_CPU) -> list[str]:
        words = (root, tmp_path / f"on{ranks}", 4, *layout)
        return server.lines(PIPELINE, *words, directory=tmp_path, num_ranks=ranks, prelude=prelude)

    straight = lines(tmp_path / "straight", 4, 2, 2, 1)
    assert len(set(straight)) == 4
    root = tmp_path / "run"
    ends = server.run(
        PIPELINE, root, root, 4, 2, 2, 1,
        directory=tmp_path, num_ranks=4, prelude=KILL.format(at=4, rank=3),
    )  # fmt: skip
    assert -9 in {end.code for end in ends}, ends[0].output[-2000:]
    assert lines(root, 4, 2, 2, 1) == straight
    lines(root, 1, 1, 1, 1, prelude=ON_CPU + ALONE)
    lines(root, 2, 1, 2, 2)
    saved = whole(root / "iter_0000004")
    for ranks in (1, 2):
        other = whole(tmp_path / f"on{ranks}" / "iter_0000004")
        assert saved.keys() == other.keys()
        assert [key for key in saved if saved[key] != other[key]] == []


# ---- sharded state dicts by hand ----

BY_HAND = """
import argparse, io, random, sys
from pathlib import Path
import torch, torch.distributed as dist
from megatron.core import dist_checkpointing as dc, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.process_groups_config import ProcessGroupCollection
from holdfast import HoldfastError
from holdfast.integrations.megatron import (
    HoldfastLoad, HoldfastSave, groups_of, latest, register)

root = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
groups = groups_of(ProcessGroupCollection.use_mpu_process_groups())
saving, loading = HoldfastSave(groups), HoldfastLoad(groups)
both = loading.strategies
tensor = ShardedTensor.from_rank_offsets

def halves(key, data, replica_id, _):
    return [tensor(key, part, (0, 2 * half + rank, 4)) for half, part in enumerate(data.chunk(2))]

def state(value, *, size=5, drift=0.0, lr=0.1):
    torch.manual_seed(value)
    whole = torch.randn(3, 4)
    return {
        "same": tensor("norm.weight", whole.clone() + drift * rank, replica_id=rank),
        "layers": [tensor("layers.weight", torch.randn(2, 3) + rank, (0, layer, 2), (1, rank, 2),
                          prepend_axis_num=1) for layer in range(2)],
        "swiglu": ShardedTensorFactory("fc1", torch.randn(6, 2) + rank, halves, torch.cat),
        "padded": tensor("vocabulary", torch.full((size, 2), value + rank).float(), (0, rank, 2),
                         allow_shape_mismatch=True),
        "rng": ShardedObject("rng_state", [{"python": random.Random(value).getstate()}], (2,),
                             (rank,)),
        "extra": ShardedObject("extra", io.BytesIO(bytes([value])), (1,), (0,), replica_id=rank),
        "odd": ShardedObject("odd", {(torch.float32, 0): torch.bfloat16}, (1,), (0,), rank),
        "local": LocalNonpersistentObject(value),
        "lr": lr, "names": ("a", None),
        "args": argparse.Namespace(
            path=Path("/a"), size=torch.Size([2]), kinds={torch.float32: io.BytesIO(b"x")}),
    }

def path_of(step):
    path = root / f"iter_{step:07d}"
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(path)

def save(step, sharded, strategy=saving, **options):
    options = {"preprocess_common_before_consistancy_check": strategy.common, **options}
    return dc.save(sharded, path_of(step), strategy, **options)

def refused(words, call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        assert words in str(error), str(error)
        return
    raise AssertionError(f"not refused: {words}")

def check(loaded, value):
    twin = state(value)
    assert torch.equal(loaded["same"], twin["same"].data)
    assert all(map(torch.equal, loaded["layers"], [each.data for each in twin["layers"]]))
    assert torch.equal(loaded["swiglu"], twin["swiglu"].data)
    assert loaded["rng"] == twin["rng"].data and loaded["odd"] == twin["odd"].data
    assert loaded["extra"].getvalue() == bytes([value])
    assert loaded["names"] == ("a", None)
    assert loaded["args"].path == Path("/a") and torch.float32 in loaded["args"].kinds
"""


def by_hand(server: ForkServer, tmp_path: Path, program: str) -> None:
    """Run a program on two ranks after the definitions, which must end well."""
    end = "\nsaving.close(); groups.close(); print('ok')\n"
    lines = server.lines(
        BY_HAND + program + end, tmp_path / "run",
        prelude=ON_CPU, directory=tmp_path, num_ranks=2,
    )  # fmt: skip
    assert lines == ["ok", "ok"]


def test_every_kind_of_entry(server: ForkServer, tmp_path: Path) -> None:
    """Saved, saved in the background, loaded with other paddings and under each `strict`."""
    by_hand(server, tmp_path, """
save(1, state(1))
queue = AsyncCallsQueue()
for step in (2, 3):
    queue.schedule_async_request(save(step, state(step), async_sharded_save=True))
queue.close()
for step in (1, 2, 3):
    loaded = dc.load(state(7), path_of(step), **both)
    check(loaded, step)
    assert loaded["local"] == 7
assert latest(groups, root) == path_of(3)
for size in (3, 9):
    padded = dc.load(state(7, size=size), path_of(1), **both)["padded"]
    rows = range(rank * size, (rank + 1) * size)
    assert padded[:, 0].tolist() == [
        1.0 if row < 5 else 2.0 if row < 10 else 7.0 + rank for row in rows]
more = {**state(7), "new": tensor("norm.new", torch.zeros(2), replica_id=rank)}
refused("norm.new", dc.load, dict(more), path_of(1), **both)
refused("norm.new", dc.load, dict(more), path_of(1), **both, strict="raise_all")
less = state(7)
del less["same"]
loaded, missing, unexpected = dc.load({**less, "new": more["new"]}, path_of(1), **both,
                                      strict="return_all")
assert (missing, unexpected) == ({"norm.weight"}, {"norm.new"})
for strict in ("log_all", "log_unexpected", "ignore_all"):
    loaded = dc.load(dict(more), path_of(1), **both, strict=strict)
    assert torch.equal(loaded["same"], state(1)["same"].data) and "new" not in loaded
refused("norm.new", dc.load, dict(more), path_of(1), **both, strict="raise_unexpected")
refused("norm.weight", dc.load, dict(less), path_of(1), **both, strict="raise_all")
assert "same" not in dc.load(dict(less), path_of(1), **both, strict="raise_unexpected")
_, missing, unexpected = dc.load(
    {**less, "new": more["new"]}, path_of(1), **both, strict="return_unexpected")
assert (missing, unexpected) == (set(), {"norm.new"})
assert set(dc.load_tensors_metadata(path_of(1), loading)) == {
    "norm.weight", "layers.weight", "fc1", "vocabulary"}
""")  # fmt: skip


def test_several_saves_before_the_first_is_finalized(server: ForkServer, tmp_path: Path) -> None:
    """A step of them is not removed before Megatron has written its file; callers may spawn.

    What tells the process of a caller that a save has ended leaves no file behind.
    """
    by_hand(server, tmp_path, """
import multiprocessing, pickle, tempfile
from holdfast import KeepLast
tempfile.tempdir = "/a directory that is not there"

keeping = HoldfastSave(groups, retention=KeepLast(1))
queue = AsyncCallsQueue()
for step in (1, 2, 3):
    queue.schedule_async_request(save(step, state(step), keeping, async_sharded_save=True))
queue.close()
assert latest(groups, root) == path_of(3)
request = save(4, state(4), keeping, async_sharded_save=True)
waits = pickle.loads(pickle.dumps(request.async_fn))
child = multiprocessing.get_context("fork").Process(target=waits)
child.start()
child.join()
assert (root / "iter_0000004" / "manifest.json").is_file()
request = request._replace(async_fn=None)
request.execute_sync()
dist.barrier()
assert [each.name for each in sorted(root.glob("iter_*"))] == ["iter_0000004"]
check(dc.load(state(7), path_of(4), **both), 4)
queue = AsyncCallsQueue()
for value in (5, 6, 7):  # one step, of which an earlier save replaces the directory meanwhile
    queue.schedule_async_request(save(5, state(value), keeping, async_sharded_save=True))
queue.close()
check(dc.load(state(1), path_of(5), **both), 7)
keeping.close()

class Replaced(HoldfastSave):  # right after Megatron has written its file
    def save(self, sharded, directory):
        if rank == 0:
            (Path(directory) / "common.pt").unlink()
        super().save(sharded, directory)

replaced = Replaced(groups)
save(6, state(6), replaced)
check(dc.load(state(1), path_of(6), **both), 6)
replaced.close()
""")  # fmt: skip


def test_what_is_refused(server: ForkServer, tmp_path: Path) -> None:
    by_hand(server, tmp_path, """
trusting_common = HoldfastSave(groups, common=lambda state: {})
save(1, state(1))
refused("norm.weight: different bytes on ranks", save, 2, state(1, drift=1.0))
refused("megatron.common.lr", save, 2, state(1, lr=0.1 + rank))
refused("saving.common", save, 2, state(1), preprocess_common_before_consistancy_check=None)
refused("saving.common", save, 2, state(1), validate_access_integrity=False)
refused("give a directory", latest, groups, "s3://bucket/run")
refused("of a step", dc.save, state(1), str(root), saving,
        preprocess_common_before_consistancy_check=saving.common)
class Own:
    pass
refused("could not load it again: ", save, 2, {**state(1), "own": Own()}, trusting_common)
pair = {"pair": (tensor("a", torch.ones(2)), 1)} if rank else {}
refused("rank 1: HoldfastSave: a is inside of a tuple", save, 2, {**state(1), **pair})
refused("pass both strategies", dc.load, state(7), path_of(1), HoldfastLoad(groups))
different = state(1)
different["extra"].data = io.BytesIO(bytes([rank]))
refused("extra/shard_0_1", save, 2, different)
assert latest(groups, root) == path_of(1)
check(dc.load(state(7), path_of(1), **both), 1)
trusting = HoldfastSave(groups, main_replica_only=("*",), common=lambda state: {})
different["same"].data.add_(rank)
save(2, {**different, "lr": rank}, trusting)
loaded = dc.load(state(7), path_of(2), **both)
assert torch.equal(loaded["same"], state(1)["same"].data) and loaded["lr"] == 0
trusting.close()
trusting_common.close()
""")  # fmt: skip


def test_calls_that_name_no_strategy(server: ForkServer, tmp_path: Path) -> None:
    """Those of Megatron-LM; and its wrappers that spread saves and loads over the ranks."""
    by_hand(server, tmp_path, """
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy, load_content_metadata, remove_sharded_tensors)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper)

register(loading, saving)
register(loading, saving)
own = ("holdfast", 1)
dc.save(state(1), path_of(1), own, content_metadata={"form": 3, "dp_cp_group": None})
loaded = dc.load(state(7), path_of(1))
check(loaded, 1)
assert load_content_metadata(preloaded_state_dict=loaded) == {"form": 3}
assert load_content_metadata(path_of(1)) == {"form": 3}
assert dc.load_common_state_dict(path_of(1))["names"] == ("a", None)
plain = dc.load_plain_tensors(path_of(1))
assert torch.equal(plain["norm.weight"], state(1)["same"].data)
assert plain["layers.weight"].shape == (2, 4, 3) and plain["vocabulary"].shape == (10, 2)
refused("does not support remove_sharded_tensors", remove_sharded_tensors, path_of(1), "norm")
refused("megatron.common.lr", dc.save, state(1, lr=rank), path_of(2), own)

queue = AsyncCallsQueue()
for step, is_async in ((2, False), (3, True), (4, True)):
    spread = FullyParallelSaveStrategyWrapper(saving)
    request = dc.save(state(step), path_of(step), spread, async_sharded_save=is_async)
    if is_async:
        queue.schedule_async_request(request)
queue.close()
for step in (2, 3, 4):
    spread = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(path_of(step)))
    check(dc.load(state(7), path_of(step), spread, strict="raise_all"), step)

load_common = loading.common.load_common
def saved_again(path):
    common = load_common(path)
    save(4, state(5))
    return common
loading.common.load_common = saved_again
refused("was saved again while it was loaded", dc.load, state(7), path_of(4))
loading.common.load_common = load_common
check(dc.load(state(7), path_of(4)), 5)

other = root / "torch_dist"
other.mkdir(exist_ok=True)
dist.barrier()
dc.save({"same": state(6)["same"], "lr": 0.3}, str(other))
loaded = dc.load({"same": state(7)["same"]}, str(other))
assert loaded["lr"] == 0.3 and torch.equal(loaded["same"], state(6)["same"].data)
""")  # fmt: skip


def test_the_files_of_megatron_are_those_of_the_checkpoint(
    server: ForkServer, tmp_path: Path
) -> None:
    """Damaged, which a load does not notice; or not there, since a run was killed before that."""
    by_hand(server, tmp_path, """
save(1, state(1))
common, config = (Path(path_of(1)) / name for name in ("common.pt", "metadata.json"))
dist.barrier()
if rank == 0:
    content = common.read_bytes()
    torch.save({"lr": 3.0, "names": ("a", None)}, common)
dist.barrier()
loaded = dc.load(state(7), path_of(1), **both)
check(loaded, 1)
assert loaded["lr"] == 0.1
dist.barrier()
save(2, state(2))
if rank == 0:
    config.unlink()
assert latest(groups, root) == path_of(2)
check(dc.load(state(7), path_of(1), **both), 1)
if rank == 0:
    assert common.read_bytes() == content
""")  # fmt: skip
    assert main(["verify", str(tmp_path / "run" / "iter_0000001")]) == 0
    (tmp_path / "run" / "iter_0000001" / "other.pt").touch()
    assert main(["verify", str(tmp_path / "run" / "iter_0000001")]) == 1


DISTRIBUTED = """
from tests.foreign import megatron_writing as written
class Context:
    rank = 0
def trained(seed):
    torch.manual_seed(seed)
    model = written._gpt(Context, is_sparse=False, is_bf16=True)
    torch.manual_seed(seed)
    return model, written._trained(model, is_distributed=True, is_bf16=True)
def sharded(model, optimizer, form):
    options = {"distrib_optim_sharding_type": form}
    weights = model.module.sharded_state_dict(metadata=options)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, metadata=options)}
def held(optimizer):
    inner = optimizer.chained_optimizers[0].optimizer
    return [each for group in inner.param_groups for p in group["params"]
            for each in (p, *(inner.state[p][name] for name in ("exp_avg", "exp_avg_sq")))]
"""


@pytest.mark.parametrize("form", ["dp_reshardable", "fully_reshardable"])
def test_the_distributed_optimizer(server: ForkServer, tmp_path: Path, form: str) -> None:
    """Its formats, over two data-parallel ranks."""
    by_hand(server, tmp_path, f"form = {form!r}\n" + DISTRIBUTED + """
parallel_state.destroy_model_parallel()
parallel_state.initialize_model_parallel()
groups.close()
groups = groups_of(ProcessGroupCollection.use_mpu_process_groups())
saving, both = HoldfastSave(groups), HoldfastLoad(groups).strategies
model, optimizer = trained(1)
save(1, sharded(model, optimizer, form), saving)
_, twin = model_twin = trained(2)
assert not all(map(torch.equal, held(optimizer), held(twin)))
loaded = dc.load(sharded(*model_twin, form), path_of(1), **both)
inner = twin.chained_optimizers[0]
state_of = inner._set_main_param_and_optimizer_states
def with_step(param, tensors):  # torch's Adam has a step of its own, which Megatron forgets here
    group, order = inner.model_param_group_index_map[param]
    step = inner.optimizer.state[inner.optimizer.param_groups[group]["params"][order]]["step"]
    state_of(param, {"step": step.clone(), **tensors})
inner._set_main_param_and_optimizer_states = with_step
with torch.no_grad():
    twin.load_state_dict(loaded["optimizer"])
assert all(map(torch.equal, held(optimizer), held(twin)))
""")  # fmt: skip

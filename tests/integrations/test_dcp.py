"""PyTorch DCP on Holdfast's format: any client's save and load, digests and commit included."""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict,
    _load_state_dict_from_keys,
)
from torch.distributed.fsdp import fully_shard

from holdfast import (
    Checkpointer,
    ConfigError,
    CorruptionError,
    Layout,
    OptimizerState,
    ProcessGroups,
    StorageError,
)
from holdfast.arrays.boxes import Box
from holdfast.format.reader import Snapshot
from holdfast.integrations import dcp as own
from holdfast.integrations import world
from holdfast.integrations.dcp import HoldfastReader, HoldfastWriter
from holdfast.integrations.world import committed_steps, step_of_coordinator
from holdfast.state.tensor_elements import equal_bits, local_of
from tests.harness import RankContext, run_ranks
from tests.integrations.forks import ForkServer
from tests.integrations.kills import KILL_AT_ADAMW, Resumed, check_kills, many_kills, resumed_by
from tests.integrations.pages import program_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

PROGRAM = program_of("dcp", "dcp")
STEPS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("torch.distributed.fsdp", "holdfast.integrations.dcp")
    yield server
    server.close()


@resumed_by
def resumed(server: ForkServer, root: Path, at: int) -> list[str]:
    """What two ranks print that are killed once, and started again."""
    kill = KILL_AT_ADAMW.format(at=at, rank=at % 2)
    return server.lines_after_kill(PROGRAM, root, STEPS, kill=kill, num_ranks=2)


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("dcp") / "straight"
    return server.lines(PROGRAM, root, STEPS, directory=root.parent, num_ranks=2)


@pytest.mark.parametrize("at", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_killed_and_resumed_bitwise(resumed: Resumed, straight: list[str], at: int) -> None:
    assert resumed(at) == straight


@many_kills
def test_killed_at_random_steps(resumed: Resumed, straight: list[str], num_kills: int) -> None:
    check_kills(resumed, straight, num_kills, first=2, stop=STEPS)


def trained(seed: int, *, sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    if sharded:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(seed: int, *, sharded: bool = False) -> dict[str, Any]:
    """A state dict of many kinds of entries."""
    model, optimizer = get_state_dict(*trained(seed, sharded=sharded))
    shared = torch.full((4,), float(seed))
    return {
        "tied": {"embedding": shared, "head": shared},
        "model": model,
        "optimizer": optimizer,
        "tagged": {"$dict": torch.full((2,), float(seed))},
        "step": seed,
        "scalar": torch.tensor(float(seed)),
        "half": torch.full((3, 2), seed, dtype=torch.bfloat16).t(),
        "list": [torch.ones(2) * seed, {"name": f"seed {seed}", "empty": torch.empty(0)}],
    }


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by path, tensors as this rank's own."""
    if isinstance(tree, dict | list):
        for name, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(each, f"{path}.{name}")
    else:
        yield path, local_of(tree) if isinstance(tree, torch.Tensor) else tree


def unlike(one: Any, other: Any) -> list[str]:
    """Paths at which two state dicts differ."""
    one, other = dict(flat(one)), dict(flat(other))
    assert one.keys() == other.keys()
    return [path for path in one if not equal_bits(one[path], other[path])]


def write_and_read(context: RankContext, root: str, sharded: bool) -> None:
    saved = state_of(1, sharded=sharded)
    writer = HoldfastWriter()
    dcp.save(saved, checkpoint_id=f"{root}/step-1", storage_writer=writer)
    dcp.async_save(saved, checkpoint_id=f"{root}/step-2", storage_writer=writer).result()
    own.save(saved, checkpoint_id=f"{root}/own/3")
    writer.close()
    for load in (
        lambda state: dcp.load(state, storage_reader=HoldfastReader(f"{root}/step-1")),
        lambda state: dcp.load(state, checkpoint_id=root, storage_reader=HoldfastReader()),
        lambda state: own.load(state, checkpoint_id=f"{root}/own"),
    ):
        loaded = state_of(2, sharded=sharded)
        assert "step" in "".join(unlike(saved, loaded))
        load(loaded)
        assert unlike(saved, loaded) == []


def test_one_process(tmp_path: Path) -> None:
    write_and_read(RankContext(rank=0, num_ranks=1), str(tmp_path), False)


def test_two_saves_at_a_time_keep_their_own_places(tmp_path: Path) -> None:
    """Each is made in a thread of its own, by one writer."""
    writer = HoldfastWriter()
    saves = [
        dcp.async_save(
            {"weight": torch.full((1 << 20,), float(step))},
            checkpoint_id=f"{tmp_path}/step-{step}",
            storage_writer=writer,
        )
        for step in (1, 2)
    ]
    for each in saves:
        each.result()
    writer.close()
    for step in (1, 2):
        loaded = {"weight": torch.zeros(1 << 20)}
        dcp.load(loaded, storage_reader=HoldfastReader(f"{tmp_path}/step-{step}"))
        assert loaded["weight"].unique().tolist() == [step]


class _OneByOne(HoldfastReader):
    """Lets the second rank open a checkpoint when the first one has, and something has changed."""

    def __init__(self, root: str, change: Callable[[], object]) -> None:
        super().__init__(root)
        self._change = change

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata of what is there by then."""
        if dist.get_rank() == 1:
            dist.barrier()
            self._change()
        metadata = super().read_metadata(*args, **kwargs)
        if dist.get_rank() == 0:
            dist.barrier()
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    """Makes the plans of all ranks anew."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The same items."""
        return [LoadPlan(plan.items) for plan in global_plan]


def refusals_of_two_versions(context: RankContext, root: str) -> list[str]:
    """What loads are refused with while a step is saved, and then saved again."""

    def load(change: Callable[[], object], planner: LoadPlanner | None = None) -> str:
        target = {"v": {"weight": torch.zeros(3)}}
        with pytest.raises(dcp.api.CheckpointException) as refused:
            dcp.load(target, storage_reader=_OneByOne(root, change), planner=planner)
        assert target["v"]["weight"].tolist() == [0.0] * 3
        return str(refused.value)

    with Checkpointer(root, groups=ProcessGroups.single("saver")) as saver:
        state = {"v": {"weight": torch.ones(3)}}
        if context.rank == 0:
            saver.save(1, state)
        newer = load(partial(saver.save, 2, state))
        again = load(partial(saver.save, 2, state, overwrite=True))
    return [newer, again, load(lambda: None, _Planner())]


def test_ranks_that_open_different_versions_are_refused(tmp_path: Path) -> None:
    """O9. Each rank opens the newest step for itself; a planner that hides it is refused, too."""
    for newer, again, hidden in run_ranks(2, refusals_of_two_versions, str(tmp_path)).results:
        assert "iter_0000001 (" in newer
        assert "iter_0000002 (" in newer
        assert "the ranks disagree on the checkpoint: iter_0000002 (" in again
        assert "create_global_plan of the planner drops storage_data" in hidden


def test_two_ranks_and_then_one(tmp_path: Path) -> None:
    run_ranks(2, write_and_read, str(tmp_path), True)
    for load in (
        lambda state: dcp.load(state, storage_reader=HoldfastReader(f"{tmp_path}/iter_0000001")),
        lambda state: own.load(state, checkpoint_id=f"{tmp_path}/own/3"),
    ):
        loaded = state_of(2)
        load(loaded)
        assert unlike(loaded, state_of(1)) == []  # the ranks averaged equal gradients


def test_what_dcp_writes_a_checkpointer_loads_and_the_other_way(tmp_path: Path) -> None:
    """X21. Tied tensors and lists of values included."""
    model, optimizer = trained(1)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0]}, checkpoint_id=tmp_path / "1", storage_writer=HoldfastWriter())
    twin, _ = trained(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load({"model": twin})
        assert unlike(model.state_dict(), twin.state_dict()) == []
        progress = {"step": 5, "losses": [1.0, 2.0], "seen": [model[0].bias.detach(), {"rows": 3}]}
        tied = nn.ModuleList([model[0], model[0]])
        checkpointer.save(2, {"model": model, "optimizer": OptimizerState(optimizer, model),
                              "progress": progress, "tied": tied})  # fmt: skip
    twin = trained(3)[0]
    other: dict[str, Any] = {
        "model": twin.state_dict(),
        "progress": {"step": 0, "losses": [], "seen": [torch.zeros(9), {"rows": 0}]},
        "tied": nn.ModuleList([twin[0], twin[0]]).state_dict(),
    }
    dcp.load(other, storage_reader=HoldfastReader(tmp_path / "iter_0000002"))
    assert unlike(other["model"], model.state_dict()) == []
    assert unlike(other["tied"], tied.state_dict()) == []
    assert unlike(other["progress"], progress) == []
    whole: dict[str, Any] = {}
    # What a conversion to another program's format calls: it loads whatever is offered.
    _load_state_dict(
        whole,
        storage_reader=HoldfastReader(tmp_path / "iter_0000002"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert whole["tied"].keys() == other["tied"].keys()
    assert unlike(whole["progress"], progress) == []
    assert "groups" in whole["optimizer"]
    part = _load_state_dict_from_keys(
        {"tied"}, storage_reader=HoldfastReader(tmp_path / "iter_0000002")
    )
    assert unlike(part, {"tied": whole["tied"]}) == []  # it was empty
    short: dict[str, Any] = {"progress": {"step": 0, "losses": [], "seen": progress["seen"]}}
    own.load(short, checkpoint_id=tmp_path / "iter_0000002")
    assert short["progress"]["losses"] == [1.0, 2.0]


def refusals_without_the_other_rank(context: RankContext, root: str) -> list[str]:
    """What saves of one rank alone, and of a group of one, are refused with."""
    writer, alone = HoldfastWriter(), dist.new_group([0])
    words = []
    for lonely in ({"no_dist": True}, {"process_group": alone}):
        if context.rank == 0 or "no_dist" in lonely:
            with pytest.raises(dcp.api.CheckpointException) as refused:
                dcp.save({"a": torch.ones(1)}, checkpoint_id=f"{root}/1", storage_writer=writer,
                         **lonely)  # fmt: skip
            words.append(str(refused.value.failures[0][0]))
    writer.close()
    return words


def test_a_save_without_the_other_ranks_is_refused_on_each(tmp_path: Path) -> None:
    """X21. Before any of them waits for the others."""
    results = run_ranks(2, refusals_without_the_other_rank, str(tmp_path)).results
    assert [len(words) for words in results] == [2, 1]
    for words in results:
        assert all("does not support no_dist or groups of some ranks" in each for each in words)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("has no bytes")


def refusals_of_one_rank(context: RankContext, root: str) -> str:
    """What each rank raises where one cannot give what it has; the next save works."""
    with closing(HoldfastWriter()) as writer:
        state: dict[str, Any] = {"a": torch.ones(1)}
        state |= {"b": Unpicklable()} if context.rank == 1 else {}
        with pytest.raises(dcp.api.CheckpointException) as refused:
            dcp.save(state, checkpoint_id=f"{root}/1", storage_writer=writer)
        dcp.save({"a": torch.ones(1)}, checkpoint_id=f"{root}/2", storage_writer=writer)
    return str(refused.value)


def test_what_one_rank_cannot_give_every_rank_raises(tmp_path: Path) -> None:
    """X21. At once: the other rank does not wait for it in the save."""
    for words in run_ranks(2, refusals_of_one_rank, str(tmp_path)).results:
        assert "ValueError: has no bytes" in words
    assert committed_steps(tmp_path) == [2]


def refusals_of_the_first_rank(context: RankContext, root: str) -> list[str]:
    """What each rank raises where the first one looks, and cannot; a look that lasts longer."""
    words = []
    for look in (
        lambda: own.load({"a": torch.ones(1)}, checkpoint_id=f"{root}/newest"),
        lambda: own.latest(f"{root}/link"),
    ):
        with pytest.raises((ConfigError, StorageError)) as refused:
            look()
        words.append(str(refused.value))

    def look_again() -> int:
        time.sleep(0.6)
        return 7

    with ProcessGroups.create(Layout(dp=2), timeout_s=0.3) as groups:
        assert step_of_coordinator(groups, look_again, phase="look") == 7
    return words


def test_what_the_first_rank_cannot_look_up_every_rank_raises(tmp_path: Path) -> None:
    """X21. With its reason, and not that the first rank is missing."""
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for words in run_ranks(2, refusals_of_the_first_rank, str(tmp_path)).results:
        assert "rank 0: checkpoint_id" in words[0]
        assert "has no step" in words[0]
        assert "nothing, which does not exist" in words[1]


@pytest.mark.parametrize("load", [own.load, dcp.load])
def test_the_newest_of_a_root_is_looked_for_behind_the_writers_of_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any]
) -> None:
    """P14. Its writer may commit while another program looks, which would load an older step."""
    for step in (1, 2):
        state = {"a": torch.full((1,), float(step))}
        own.save(state, checkpoint_id=tmp_path / str(step), no_dist=True)
    late = (tmp_path / "iter_0000002").rename(tmp_path / "late")
    commit = lambda *args, **named: late.rename(tmp_path / "iter_0000002")  # noqa: E731
    monkeypatch.setattr(world, "wait_for_writers", commit)
    reader = {"storage_reader": HoldfastReader()} if load is dcp.load else {}
    state["a"].zero_()
    load(state, checkpoint_id=tmp_path, no_dist=True, **reader)
    assert state["a"].item() == 2


def test_in_a_bucket() -> None:
    """X21. By URL and by `Path`; the newest was looked for in a directory of this name."""
    pytest.importorskip("obstore")
    root = f"memory://{secrets.token_hex(8)}/run"
    assert own.latest(root) is None
    with closing(HoldfastWriter()) as writer:
        dcp.save({"m": {"a": torch.ones(1)}}, checkpoint_id=f"{root}/step-1", storage_writer=writer)
    own.save({"m": {"a": torch.ones(1) * 2}}, checkpoint_id=Path(root) / "2")
    assert own.latest(root) == own.latest(Path(root)) == f"{root}/iter_0000002"
    a = torch.zeros(1)
    for place, value in ((f"{root}/step-1", 1), (root, 2), (Path(root), 2)):
        for load in (own.load, partial(dcp.load, storage_reader=HoldfastReader())):
            a.zero_()
            load({"m": {"a": a}}, checkpoint_id=place)
            assert a.item() == value
    with pytest.raises(StorageError, match=f"{root} has no committed checkpoint of step 3"):
        HoldfastReader(f"{root}/step-3").read_metadata()


BOXES = [[((0, 0), (2, 3)), ((5, 3), (3, 4))], [((0, 3), (5, 4))], [((2, 0), (6, 3))]]
"""Of each of three ranks: two of them have one box of `[8, 7]`, one has two."""


def sharded_tensor(rank: int, fill: torch.Tensor, *, turn: int = 0) -> ShardedTensor:
    """A tensor of which the ranks hold the boxes above, or those of other ranks."""
    shards = [
        Shard.from_tensor_and_offsets(
            fill[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].contiguous(), list(o), rank
        )
        for o, n in BOXES[(rank + turn) % 3]
    ]
    return init_from_local_shards(shards, 8, 7)


def write_and_read_several_boxes(context: RankContext, root: str) -> None:
    whole = torch.arange(56.0).view(8, 7)
    saved = {"model": {"table": sharded_tensor(context.rank, whole)}}
    writer = HoldfastWriter()
    dcp.save(saved, checkpoint_id=f"{root}/1", storage_writer=writer)
    writer.close()
    loaded = {"model": {"table": sharded_tensor(context.rank, whole * 0, turn=1)}}
    dcp.load(loaded, checkpoint_id=f"{root}/1", storage_reader=HoldfastReader())
    for shard in loaded["model"]["table"].local_shards():
        rows, columns = (slice(o, o + n) for o, n in zip(
            shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True))  # fmt: skip
        assert torch.equal(shard.tensor, whole[rows, columns])
    write_and_read_dicts_of_one_rank(root, context.rank)


def write_and_read_dicts_of_one_rank(root: str, rank: int) -> None:
    """As `full_state_dict` with `cpu_offload` gives them: with entries on the first rank alone."""
    whole = {"w": torch.arange(3.0), "v": torch.ones(4), "n": 5}
    own.save({"model": whole if rank == 0 else {}, "none": {}}, checkpoint_id=f"{root}/2")
    part: dict[str, Any] = {"model": {"w": torch.zeros(3)}} if rank == 0 else {}
    report = own.load({**part, "none": {}}, checkpoint_id=f"{root}/2")
    assert report.unexpected == ("model.v",)
    assert rank != 0 or torch.equal(part["model"]["w"], torch.arange(3.0))


def test_several_boxes_of_one_tensor_on_a_rank(tmp_path: Path) -> None:
    """Of a `ShardedTensor`, by other ranks and by a process that has it whole.

    X21. And a dict that only one rank has: the others leave it to that, and to what it reads.
    """
    run_ranks(3, write_and_read_several_boxes, str(tmp_path))
    loaded = {"model": {"table": torch.zeros(8, 7)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "1", storage_reader=HoldfastReader())
    assert torch.equal(loaded["model"]["table"], torch.arange(56.0).view(8, 7))


def test_a_part_of_a_dict_is_read_alone(tmp_path: Path) -> None:
    """X21: as by DCP; all the other tensors were read, too, and added."""
    saved = {"model": {"w": torch.ones(3), "v": torch.ones(4), "n": 5}, "step": 7}
    own.save(saved, checkpoint_id=tmp_path / "1", no_dist=True)
    part: dict[str, Any] = {"model": {"w": torch.zeros(3)}}
    report = own.load(part, checkpoint_id=tmp_path / "1", no_dist=True)
    assert part.keys() == {"model"}
    assert part["model"].keys() == {"w", "n"}
    assert torch.equal(part["model"]["w"], saved["model"]["w"])  # type: ignore[index]
    assert report.unexpected == ("model.v",)
    assert report.nbytes_read == 12


def test_saved_loaded_saved_without_a_difference(tmp_path: Path) -> None:
    writer = HoldfastWriter()
    dcp.save(state_of(1), checkpoint_id=tmp_path / "1", storage_writer=writer)
    loaded = state_of(2)
    dcp.load(loaded, checkpoint_id=tmp_path / "1", storage_reader=HoldfastReader())
    dcp.save(loaded, checkpoint_id=tmp_path / "2", storage_writer=writer)
    writer.close()
    data = [sorted((tmp_path / f"iter_000000{n}/data").iterdir()) for n in (1, 2)]
    assert [a.read_bytes() for a in data[0]] == [b.read_bytes() for b in data[1]]


def test_a_target_that_torch_fills_needs_no_second_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P26: columns of a matrix, as a planner asks for them, went through memory of their size."""
    whole = torch.arange(1000.0 * 7).reshape(1000, 7)
    saved = {"w": whole, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}
    dcp.save(saved, checkpoint_id=tmp_path / "1", storage_writer=HoldfastWriter())
    monkeypatch.setattr("holdfast.integrations.dcp._PIECE_NBYTES", 4096)
    read: list[int] = []
    read_box = Snapshot.read_box

    def counted(self: Snapshot, key: str, box: Box, out: memoryview, **options: Any) -> None:
        read.append(len(out))
        read_box(self, key, box, out, **options)

    monkeypatch.setattr(Snapshot, "read_box", counted)
    for target in (
        torch.zeros(7, 1000).t(),
        torch.zeros(1000, 20)[:, 3:10],
        torch.zeros(1000, 7, dtype=torch.float64),
    ):
        read.clear()
        state = {"w": target, "scalar": torch.zeros(()), "empty": torch.zeros(3, 0).t()}
        dcp.load(state, storage_reader=HoldfastReader(tmp_path / "1"))
        assert torch.equal(target, whole.to(target.dtype))
        assert state["scalar"].item() == 3.0
        assert max(read) <= 4096
        assert sum(read) == whole.nbytes + 4


def test_damage_is_found_and_a_step_is_not_overwritten(tmp_path: Path) -> None:
    writer = HoldfastWriter()
    dcp.save(state_of(1), checkpoint_id=tmp_path / "1", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException) as refused:
        dcp.save(state_of(1), checkpoint_id=tmp_path / "1", storage_writer=writer)
    assert "already" in str(refused.value.failures[0][0])
    writer.close()
    data = next((tmp_path / "iter_0000001" / "data").iterdir())
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(dcp.api.CheckpointException) as found:
        dcp.load(state_of(2), checkpoint_id=tmp_path / "1", storage_reader=HoldfastReader())
    assert isinstance(found.value.failures[0][0], CorruptionError)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no step"):
        own.save({"a": 1}, checkpoint_id=tmp_path / "newest")
    with pytest.raises(ConfigError, match="does not support planner="):
        own.save({"a": 1}, checkpoint_id=tmp_path / "1", planner=dcp.DefaultSavePlanner())
    with pytest.raises(StorageError):
        own.load({"a": 1}, checkpoint_id=tmp_path / "1")
    assert own.latest(tmp_path) is None
    writer = HoldfastWriter()
    with pytest.raises(ConfigError, match="does not support async_checkpointer_type=PROCESS"):
        pickle.dumps(writer)  # which DCP does in a thread, for the result of the save
    writer.close()

"""PyTorch Distributed Checkpoint (DCP) on Holdfast's format: digests and atomic commit.

A storage writer and reader, with DCP's planners as they are:

    dcp.save(state_dict, checkpoint_id="checkpoints/100", storage_writer=HoldfastWriter())
    dcp.load(state_dict, checkpoint_id="checkpoints/100", storage_reader=HoldfastReader())

and `save` and `load` with DCP's signatures, which plan as a `Checkpointer` does:

    from holdfast.integrations import dcp
"""

from __future__ import annotations

import glob
import io
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.arrays.boxes import Box, split_box
from holdfast.arrays.types import AnyArray
from holdfast.checkpoint import Checkpointer, LoadReport, SaveReport
from holdfast.checkpoint.load.target_memory import Target
from holdfast.errors import ConfigError, MismatchError, StorageError, disagreement
from holdfast.format.names import parse_step_dir, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import (
    MAPPINGS,
    decode_tree,
    is_per_rank,
    is_plain_dict,
    is_tensor,
    items_of,
    key_name,
    members,
    tag_of,
    tensor_keys,
    walk,
)
from holdfast.integrations.names import member_of, part_of
from holdfast.integrations.world import (
    CheckpointerAt,
    agreed_newest_step,
    committed_steps,
    groups_of_world,
    newest_step,
    on_all_ranks,
    put_values,
    text_of_coordinator,
)
from holdfast.parallel import ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.state import Pieces, Sharded, Union
from holdfast.state.tensor_elements import torch_dtype
from holdfast.storage import open_storage, shown

PathLike = str | os.PathLike[str]

_OWN = "dcp"
"""The part with what DCP keeps besides tensors: paths, and values as its planner pickles them."""
_NUMBER = re.compile(r"(\d+)$")
_PIECE_NBYTES = 16 << 20
"""Far above a block of digests: those at the ends of a piece are read twice."""


def place_of(checkpoint_id: PathLike) -> tuple[Path, int]:
    """Return the root and the step that a checkpoint's id names: `runs/step-100` is step 100.

    Raises:
        ConfigError: its last part does not end with a number.
    """
    path = Path(checkpoint_id)
    own = parse_step_dir(path.name)
    if own is not None:
        return path.parent, own
    number = _NUMBER.search(path.name)
    if number is None:
        raise ConfigError(
            f"checkpoint_id {str(checkpoint_id)!r} has no step: let its last part end with the "
            f"number of the step, as in '{path / 'step-100'}'"
        )
    return path.parent, int(number[1])


def latest(root: PathLike) -> str | None:
    """Return the path of the newest committed checkpoint, the same on all ranks; None without one.

    Called by all ranks of the default process group.
    """
    with groups_of_world("dcp-latest") as groups:
        step = agreed_newest_step(groups, root)
        return None if step is None else shown(Path(root) / step_dir(step))


class HoldfastWriter(StorageWriter):
    """Writes what `dcp.save` and `dcp.async_save` plan as a checkpoint of Holdfast.

    All ranks of the default process group take part, whatever group the planner used. One writer is
    made for the run, and takes one save after another.

    Args:
        checkpoint_id: where to save, if `dcp.save` is not given it: a path whose last part ends
            with the number of the step. `runs/step-100` is written as `runs/iter_0000100`.
        overwrite: replace a checkpoint of the step, which survives until the new one is durable.
        options: further arguments of `Checkpointer`.

    Made by all ranks.

    Raises:
        GroupError, DeadlineError: a rank does not arrive.
    """

    def __init__(
        self, checkpoint_id: PathLike | None = None, *, overwrite: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.checkpoint_id = checkpoint_id
        # DCP saves each in a thread of its own, and a second one may begin before the first ends.
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._overwrite = overwrite
        self._groups = groups_of_world("dcp-writer")
        self._checkpointer = CheckpointerAt(self._groups, options)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Take the place of the next save, which this thread makes."""
        self.checkpoint_id = checkpoint_id if checkpoint_id is not None else self.checkpoint_id
        self._of_thread.checkpoint_id = self.checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ConfigError for a save that is not collective."""
        place_of(self._id())
        if kwargs.get("rank", self._groups.rank) != self._groups.rank:
            raise ConfigError("HoldfastWriter does not support no_dist or groups of some ranks")
        if not kwargs.get("use_collectives", True):
            raise ConfigError("HoldfastWriter does not support use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, if they are those of all ranks.

        Raises:
            ConfigError: they are not: of `no_dist=True`, or of a group of some of the ranks.
        """
        size = len(self._groups.layout.ranks)
        if len(plans) != size:
            raise ConfigError(
                f"HoldfastWriter does not support no_dist or groups of some ranks: DCP has planned "
                f"for {len(plans)} of the {size} ranks that have made the writer. Let all ranks "
                f"save; to save from one alone, use Checkpointer with ProcessGroups.single()"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of all ranks, and commit.

        Raises:
            HoldfastError: on all ranks, as of `Checkpointer.save`; nothing is committed.
        """
        root, step = place_of(self._id())

        def prepare() -> tuple[Checkpointer, dict[str, object]]:
            return self._checkpointer(root), _parts(plan, planner)

        with self._lock:
            # Under a guard: what one rank cannot give (a value that cannot be pickled), all raise.
            guard = Guard[tuple[Checkpointer, dict[str, object]]](self._groups.control, "save")
            checkpointer, parts = guard.run(prepare)
            checkpointer.save(step, parts, overwrite=self._overwrite)
        results = [
            WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the checkpoint is committed, and describes itself."""

    def close(self) -> None:
        """Stop the process that writes, and destroy the communicator made here."""
        try:
            self._checkpointer.close()
        finally:
            self._groups.close()

    def __reduce__(self) -> Any:
        """Raise ConfigError: another process has none of this one's communicators."""
        raise ConfigError(
            "HoldfastWriter does not support async_checkpointer_type=PROCESS; leave it out: what "
            "dcp.async_save does in a thread ends soon, the process that writes is Holdfast's own"
        )

    def storage_meta(self) -> StorageMeta | None:
        """Return where it saves."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Return True if the id names a step."""
        return bool(_NUMBER.search(Path(checkpoint_id).name))

    def _id(self) -> PathLike:
        own = getattr(self._of_thread, "checkpoint_id", self.checkpoint_id)
        if own is None:
            raise ConfigError("HoldfastWriter: pass checkpoint_id= to dcp.save, or to the writer")
        place: PathLike = own
        return place


def _parts(plan: SavePlan, planner: SavePlanner) -> dict[str, object]:
    """Return what this rank writes, under the names that DCP gives it."""
    paths = plan.planner_data or {}
    names = {item.index.fqn: paths.get(item.index.fqn, (item.index.fqn,)) for item in plan.items}
    names = {**{fqn: tuple(path) for fqn, path in paths.items()}, **names}
    tensors: dict[str, dict[str, object]] = {part_of(path): {} for path in names.values()}
    if _OWN in tensors:
        raise ConfigError(f"HoldfastWriter: a state dict may not have an entry {_OWN!r}")
    pickled: dict[str, torch.Tensor] = {}
    # A rank may hold several boxes of one tensor, and another rank one: `ShardedTensor` allows it.
    pieces: dict[str, list[tuple[torch.Tensor, tuple[int, ...]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for item in plan.items:
        fqn = item.index.fqn
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            pickled[fqn] = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
            continue
        if item.tensor_data is None:
            raise ConfigError(f"HoldfastWriter: the planner does not describe the tensor {fqn}")
        offset = tuple(item.tensor_data.chunk.offsets)
        pieces.setdefault(fqn, []).append((data.detach(), offset))
        shapes[fqn] = tuple(item.tensor_data.size)
    for fqn, held in pieces.items():
        locals_, offsets = zip(*held, strict=True)
        part, member = part_of(names[fqn]), member_of(names[fqn])
        if member in tensors[part]:
            raise ConfigError(f"HoldfastWriter: two entries of the state dict are {part}.{member}")
        tensors[part][member] = (
            Pieces(locals_, offsets, shapes[fqn])
            if len(held) > 1
            else Sharded(locals_[0], shapes[fqn], offset=offsets[0], over=("dp",))
        )
    paths = {fqn: list(path) for fqn, path in names.items()}
    own = {"paths": Union(paths), "pickled": Union(pickled)}
    return {**{part: Union(each) for part, each in tensors.items()}, _OWN: own}


class HoldfastReader(StorageReader):
    """Reads checkpoints of Holdfast for `dcp.load`: those of `HoldfastWriter` and all others.

    Only the bytes that a rank's plan asks for are read, and every block of them is checked. Names
    are those that the writer was given; in other checkpoints the paths of tensors and of values, as
    DCP flattens a state dict: a list without tensors is one value. Values of each rank, and those
    of a `Codec` or of a class of yours, are not among them: only a `Checkpointer` loads these.

    Args:
        checkpoint_id: as of `HoldfastWriter`; a root instead of a checkpoint is its newest one.
    """

    def __init__(self, checkpoint_id: PathLike | None = None) -> None:
        super().__init__()
        self.checkpoint_id = checkpoint_id
        self._snapshot: Snapshot | None = None
        self._keys: dict[str, str] = {}
        self._values: dict[str, object] = {}

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Take the place of the next load."""
        self.checkpoint_id = checkpoint_id if checkpoint_id is not None else self.checkpoint_id
        self._keys, self._values = {}, {}
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is stored, as DCP describes it.

        Raises:
            StorageError: there is no such checkpoint.
            CorruptionError: its manifest or index is damaged.
        """
        snapshot = self._open()
        node: Any = snapshot.manifest.parts.get(_OWN)
        paths = self._names(snapshot, node)
        entries: dict[str, Any] = {
            fqn: _described(snapshot, key) for fqn, key in self._keys.items() if snapshot.has(key)
        }
        pickled = [fqn for fqn in entries if self._keys[fqn].startswith(f"{_OWN}.pickled.")]
        entries |= dict.fromkeys([*pickled, *self._values], BytesStorageMetadata())
        return Metadata(entries, planner_data=paths, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the version that this rank has opened."""
        snapshot = self._open()
        return replace(plan, storage_data=(snapshot.directory, snapshot.manifest.save_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, if all ranks have opened the same version.

        Raises:
            PlanError: they have not: a step was committed after one of them had looked. Load again.
            ConfigError: the planner has dropped which version a rank has opened.
        """
        versions = [plan.storage_data for plan in plans]
        if len(versions) > 1 and None in versions:
            raise ConfigError(
                "HoldfastReader: create_global_plan of the planner drops storage_data of the "
                "plans, by which ranks compare what they have opened; let it keep them "
                "(dataclasses.replace(plan, items=...))"
            )
        if len(set(versions)) > 1:
            opened = [f"{directory} ({save_id})" for directory, save_id in versions]
            raise disagreement("dcp.load", "the checkpoint", opened, ranks=range(len(opened)))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan.

        Raises:
            CorruptionError: a block is damaged; the message names file and tensor.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._bytes_of(item.storage_index.fqn)))
            else:
                self._read_tensor(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        """Return True if a checkpoint of Holdfast is there."""
        try:
            _existing(checkpoint_id)
        except (ConfigError, StorageError):
            return False
        return True

    def _open(self) -> Snapshot:
        """Return the checkpoint, open."""
        if self._snapshot is None:
            if self.checkpoint_id is None:
                raise ConfigError("HoldfastReader: pass checkpoint_id= to dcp.load or the reader")
            root, step = _existing(self.checkpoint_id)
            self._snapshot = Snapshot.open(open_storage(root), step_dir(step))
        return self._snapshot

    def _names(self, snapshot: Snapshot, node: Any) -> dict[str, tuple[Any, ...]]:
        """Set the key of each name, and return the path of each in the state dict."""
        stored: Any = decode_tree(node, on_leaf=lambda *_: None) if node is not None else None
        if not isinstance(stored, dict) or "paths" not in stored:
            self._keys = {key: key for key in snapshot.keys}
            self._values = {}
            loaded: dict[str, tuple[Any, ...]] = {}
            for part, tree in snapshot.manifest.parts.items():
                for place, each in _leaves((part,), tree):
                    fqn = ".".join(map(str, place))
                    self._add(fqn, each)
                    loaded[fqn] = place
            return {fqn: loaded.get(fqn, (fqn,)) for fqn in (*self._keys, *self._values)}
        paths = {fqn: tuple(path) for fqn, path in stored["paths"].items()}
        pickled = stored["pickled"]
        nodes = {
            (part, key_name(name)): child
            for part, tree in snapshot.manifest.parts.items()
            for name, child in members(tree)
        }
        self._keys = {
            # Tensors that share their memory are stored once, under the key of the first of them.
            fqn: f"{_OWN}.pickled.{fqn}"
            if fqn in pickled
            else next(tensor_keys(nodes[part_of(path), member_of(path)]))
            for fqn, path in paths.items()
        }
        return paths

    def _add(self, path: str, node: Any) -> None:
        """Offer what is stored at a path of a checkpoint that is not of `HoldfastWriter`."""
        if is_tensor(node):
            self._keys[path] = next(tensor_keys(node))
        elif not any(map(is_per_rank, walk(node))):
            with suppress(MismatchError):  # of a class that is not known here
                self._values[path] = decode_tree(node, path=path)

    def _bytes_of(self, fqn: str) -> bytes:
        """Return a value as DCP's planner has pickled it, or would have."""
        if fqn in self._values:
            buffer = io.BytesIO()
            torch.save(self._values[fqn], buffer)
            return buffer.getvalue()
        snapshot = self._open()
        shape = tuple(snapshot.tensor(self._keys[fqn]).shape)
        data = bytearray(math.prod(shape))
        snapshot.read_box(self._keys[fqn], Box((0,) * len(shape), shape), memoryview(data))
        return bytes(data)

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Read one box into where the planner wants it.

        Cost: a buffer of at most 16 MiB, if torch has to fill the target.
        """
        snapshot, key = self._open(), self._keys[item.storage_index.fqn]
        target = planner.resolve_tensor(item).detach()
        origin = item.storage_index.offset or torch.Size([0] * len(item.lengths))
        at = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
        box, stored = Box(at, tuple(item.lengths)), snapshot.tensor(key).dtype
        memory = Target(target, path=item.dest_index.fqn, stored=stored)
        if memory.is_direct and box.numel:
            snapshot.read_box(key, box, memory.region(0, target.nbytes))
        elif box.numel:
            # Columns of a larger target, another device or dtype: by pieces, which torch copies.
            itemsize, start = torch_dtype(stored).itemsize, 0
            buffer: AnyArray = np.empty(min(box.numel * itemsize, _PIECE_NBYTES), dtype=np.uint8)
            for piece in split_box(box, max_numel=_PIECE_NBYTES // itemsize):
                data = buffer[: piece.numel * itemsize].data
                snapshot.read_box(key, piece, data)
                memory.put(start, data)
                start += len(data)
        planner.commit_tensor(item, target)


def _existing(checkpoint_id: PathLike) -> tuple[Path, int]:
    """Return the root and the step of a checkpoint that is to be read."""
    path = Path(checkpoint_id)
    if committed_steps(path) and (newest := newest_step(path)) is not None:
        return path, newest
    root, step = place_of(checkpoint_id)
    if not open_storage(root).is_dir(step_dir(step)):
        raise StorageError(f"{shown(root)} has no committed checkpoint of step {step}")
    return root, step


def _described(snapshot: Snapshot, key: str) -> TensorStorageMetadata:
    """Return the chunks of a tensor as DCP describes them."""
    info = snapshot.tensor(key)
    index, ndim = snapshot.index, len(info.shape)
    boxes = [index.box(int(row), ndim=ndim) for row in snapshot.rows_of(key) if not index.copy[row]]
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
    properties = TensorProperties(dtype=torch_dtype(info.dtype))
    return TensorStorageMetadata(properties, torch.Size(info.shape), chunks)


def _leaves(path: tuple[Any, ...], node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what DCP would flatten a state dict to, by paths: numbers are places in a list."""
    is_mapping = is_plain_dict(node) or tag_of(node) in MAPPINGS
    if is_mapping or (items_of(node) is not None and any(map(is_tensor, walk(node)))):
        for name, child in members(node):
            yield from _leaves(
                (*path, key_name(name) if is_mapping else int(key_name(name))), child
            )
    else:
        yield path, node


# ---- DCP's functions, with Holdfast's own planner ----


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_writer: None = None,
    planner: None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    overwrite: bool = False,
) -> SaveReport:
    """Save a state dict as `torch.distributed.checkpoint.save` does, by Holdfast's own planner.

    Args:
        state_dict: entries by name: objects with `state_dict`, modules, trees of DTensors, tensors
            and values. Plain tensors of several ranks must be equal. A rank whose dict is empty,
            as `full_state_dict` with `cpu_offload` leaves it, leaves the entry to the others.
        checkpoint_id: a path whose last part ends with the number of the step.
        storage_writer, planner: not supported: `HoldfastWriter` takes a planner.
        process_group: None, or the default group.
        no_dist: save as a process on its own.
        use_collectives: must be True.
        overwrite: replace a checkpoint of the step.

    Called by all ranks.

    Raises:
        ConfigError: an argument that is not supported, by name.
        HoldfastError: on all ranks, as of `Checkpointer.save`.
    """
    _refuse(storage_writer=storage_writer, planner=planner, process_group=process_group)
    if not use_collectives:
        raise ConfigError("holdfast.integrations.dcp does not support use_collectives=False")
    root, step = place_of(_given(checkpoint_id))
    with _groups(no_dist) as groups:
        own = _plain_dicts(state_dict)
        filled = _named_by_any(groups, [key for key in own if state_dict[key]])
        state = {
            key: each
            for key, each in state_dict.items()
            if key not in own or key not in filled or each
        }
        with Checkpointer(root, groups=groups) as checkpointer:
            return checkpointer.save(step, state, overwrite=overwrite)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: PathLike | None = None,
    storage_reader: None = None,
    planner: None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load into a state dict in place, as `torch.distributed.checkpoint.load` does.

    Tensors are filled, objects take their state, and plain values in the dict are replaced. A dict
    within it that has tensors takes those alone, as with DCP, and the report says what it leaves;
    values that it lacks are added to it, which DCP leaves out.

    Args:
        state_dict: as of `save`.
        checkpoint_id: as of `save`; a root instead of a checkpoint is its newest one.
        storage_reader, planner: not supported: `HoldfastReader` takes a planner.
        process_group: None, or the default group.
        no_dist: load as a process on its own.

    Called by all ranks.

    Raises:
        ConfigError: an argument that is not supported, by name.
        HoldfastError: on all ranks, as of `Checkpointer.load`.
    """
    _refuse(storage_reader=storage_reader, planner=planner, process_group=process_group)
    with _groups(no_dist) as groups:
        root, step = _agreed(groups, _given(checkpoint_id))
        # An object is given all that it has saved, or refuses what it does not know.
        dicts = sorted(_named_by_any(groups, _plain_dicts(state_dict)))
        left = [glob.escape(f"{key}.") + "*" for key in dicts]
        with Checkpointer(root, groups=groups) as checkpointer:
            report = checkpointer.load(state_dict, step=step, ignore_unexpected=left)
    put_values(state_dict, report.values)
    return report


def _plain_dicts(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the names of entries that are dicts, and not objects with a state."""
    return [
        key
        for key, each in state_dict.items()
        if isinstance(key, str)
        and isinstance(each, Mapping)
        and not hasattr(each, "load_state_dict")
    ]


def _named_by_any(groups: ProcessGroups, names: Sequence[str]) -> set[str]:
    """Return the names that any rank gives, on all of them. Cost: one small collective."""
    control, own = groups.control, json.dumps(names).encode()

    def gather() -> set[str]:
        return {
            name for each in control.all_gather(own, phase="names") for name in json.loads(each)
        }

    return on_all_ranks(control, gather, phase="names")


def _agreed(groups: ProcessGroups, checkpoint_id: PathLike) -> tuple[Path, int]:
    """Return the root and the step, by the first rank's view of the storage."""
    path = Path(checkpoint_id)

    def place() -> str:
        try:
            root, step = _existing(path)
        except StorageError:  # the load waits for a writer of it, or says that it is missing
            root, step = place_of(path)
        return json.dumps([root == path, step])

    is_root, step = json.loads(text_of_coordinator(groups, place, phase="load"))
    return (path if is_root else path.parent), step


def _groups(no_dist: bool) -> ProcessGroups:
    """Return the groups of one save or load."""
    return ProcessGroups.single("dcp") if no_dist else groups_of_world("dcp")


def _given(checkpoint_id: PathLike | None) -> PathLike:
    """Return the id; ConfigError without one."""
    if checkpoint_id is None:
        raise ConfigError("holdfast.integrations.dcp needs checkpoint_id=")
    return checkpoint_id


def _refuse(**arguments: Any) -> None:
    """Raise ConfigError for arguments that are not supported."""
    group = arguments.pop("process_group")
    if group is not None and group is not dist.group.WORLD:
        arguments["process_group"] = group
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ConfigError(f"holdfast.integrations.dcp does not support {', '.join(given)}=")

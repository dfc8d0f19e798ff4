"""Megatron-core: strategies of `dist_checkpointing` that write and read Holdfast's format.

    saving = HoldfastSave(groups_of(ProcessGroupCollection.use_mpu_process_groups()))
    dist_checkpointing.save(
        state, path, saving, preprocess_common_before_consistancy_check=saving.common
    )
    state = dist_checkpointing.load(state, path, HoldfastLoad(saving.groups))

A checkpoint of Megatron is a directory with `common.pt`, what a sharded strategy writes, and
`metadata.json`. Here the directory is a committed checkpoint of Holdfast, which has the bytes of
`common.pt` in it, under digests; the two files are made from it after the commit, and again by
`latest` if a run was killed in between.

`pip install holdfast[megatron]`.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import fnmatch
import io
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
)
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.rerun_state_machine import (
    Call,
    Caller,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    RerunValidationStatus,
)

from holdfast.arrays.boxes import Box
from holdfast.checkpoint import Checkpointer, PendingSave
from holdfast.errors import (
    ConfigError,
    CorruptionError,
    MismatchError,
    PlanError,
    StorageError,
)
from holdfast.format.names import OTHER_FILES, parse_step_dir, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import decode_tree
from holdfast.integrations.names import TOP, member_of, part_of
from holdfast.integrations.world import agreed_newest_step, text_of_coordinator
from holdfast.parallel import Layout, ProcessGroups
from holdfast.state import Pieces, Stored, StoredPart, Union
from holdfast.state.tensor_elements import equal_bits, torch_dtype
from holdfast.storage import PosixStorage

_BACKEND, _VERSION = "holdfast", 1
_OWN = "megatron"
"""The part with what is not a tensor of the model or the optimizer."""
_COMMON = "common.pt"
_METADATA = "metadata.json"
_EXPECTED = {OTHER_FILES: [_COMMON, _METADATA]}
"""Metadata of a checkpoint: the files that are put into its directory after the commit."""
_AXES = ("tp", "cp", "dp", "pp", "dp_cp", "mp", "tp_cp", "ep", "expt_tp", "expt_dp", "tp_ep",
         "tp_ep_pp")  # fmt: skip
_BYTES_IO, _DTYPE, _PAIRS, _OBJECT = "$io.BytesIO", "$torch.dtype", "$dict", "$megatron"
_ENUMS = (RerunDiagnostic, RerunMode, RerunState, RerunValidationStatus)
_TUPLES = (Call, Caller)
"""What the rerun machine has in its state, besides plain values."""

Sharded = ShardedTensor | ShardedObject


def groups_of(collection: Any, *, layout: Layout | None = None) -> ProcessGroups:
    """Return Megatron's own communicators as groups of a layout, each checked member by member.

    Args:
        collection: a `ProcessGroupCollection`; of `parallel_state`,
            `ProcessGroupCollection.use_mpu_process_groups()`.
        layout: what they are checked against; by default that of their sizes in Megatron's order,
            `tp-cp-ep-dp-pp`, over all ranks.

    Called by all ranks. One communicator is made, for agreement; close the groups in the end.

    Raises:
        ConfigError: the collection lacks a group that the layout is made from.
        GroupError: on all ranks: members are not those of the layout.
    """
    given = {name: getattr(collection, name, None) for name in _AXES}
    held = {name: group for name, group in given.items() if group is not None}
    missing = {"tp", "dp", "pp"} - held.keys()
    if missing:
        raise ConfigError(f"groups_of: the ProcessGroupCollection has no {', '.join(missing)}")
    if layout is None:
        sizes: dict[str, Any] = {
            axis: dist.get_world_size(held[axis]) if axis in held else 1
            for axis in ("tp", "cp", "dp", "pp", "ep")
        }
        expt_tp = dist.get_world_size(held["expt_tp"]) if "expt_tp" in held else None
        layout = Layout(**sizes, expt_tp=expt_tp, name="megatron")
    return ProcessGroups.adopt(layout, held)


def latest(groups: ProcessGroups, root: str | os.PathLike[str]) -> str | None:
    """Return the directory of the newest committed checkpoint, on all ranks; None without one.

    Its `common.pt` and `metadata.json` are made again from the checkpoint if a run was killed
    before they were there, or while it replaced them.

    Called by all ranks of the groups.

    Raises:
        StorageError: on all ranks; they cannot be written, or nothing of Megatron's is stored.
    """
    step = agreed_newest_step(groups, Path(root))
    if step is None:
        return None
    directory = Path(root) / step_dir(step)
    _on_first_rank(groups, lambda: _restore_files(directory))
    return str(directory)


class HoldfastSave(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Saves sharded state dicts as checkpoints of Holdfast. One is made for the run.

    The directory's name is Megatron's: `iter_0000100` is step 100. A checkpoint of the step is
    replaced; it survives until the new one is durable.

    Every rank gives what it holds, replicas too: which one writes is planned, and the others are
    compared with it by digest, so that ranks that are out of sync are named and nothing is
    committed.

    Args:
        groups: of all ranks, by `groups_of`.
        common: what the run would pass as `preprocess_common_before_consistancy_check`: returns the
            common state without what differs between ranks on purpose (`args.rank`).
        main_replica_only: patterns of keys of which the replica that Megatron calls the main one is
            taken, and the others are not looked at: `("rng_state",)` if data ranks have other
            streams that may be lost; `("*",)` trusts every `replica_id`.
        options: further arguments of `Checkpointer`.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        *,
        common: Callable[[dict[str, Any]], Any] | None = None,
        main_replica_only: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(_BACKEND, _VERSION)
        self.groups = groups
        self._options = options
        self._main_replica_only = tuple(main_replica_only)
        self._preprocess = common
        self._common: dict[str, Any] | None = None
        self._opened: tuple[Path, Checkpointer] | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def common(self, state: dict[str, Any]) -> Any:
        """Take note of this rank's common state; `preprocess_common_before_consistancy_check`.

        Megatron writes the first rank's alone. The save compares all of them, and is refused with
        the paths of what differs.
        """
        self._common = self._preprocess(state) if self._preprocess is not None else state
        return self._common

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save and commit.

        Raises:
            ConfigError: the directory's name is not a step, or the common state was not passed.
            HoldfastError: on all ranks, as of `Checkpointer.save`; nothing is committed.
        """
        directory = _directory(checkpoint_dir)
        checkpointer, step, state = self._prepared(sharded_state_dict, directory)
        checkpointer.save(step, state, overwrite=True, metadata=_EXPECTED)
        self._finish(directory)

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy the state, and save it in the background.

        Returns:
            A request for an `AsyncCallsQueue` whose callers fork (`persistent=False`); its
            finalization waits for the commit, and raises what failed.

        Raises:
            ConfigError, HoldfastError: as of `save`.
        """
        directory = _directory(checkpoint_dir)
        checkpointer, step, state = self._prepared(sharded_state_dict, directory)
        pending = checkpointer.save_async(step, state, overwrite=True, metadata=_EXPECTED)

        def finish() -> None:
            pending.result()
            self._finish(directory)

        return AsyncRequest(_Until(pending), (), [finish])

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; the groups stay open."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened[1].close()

    def _prepared(
        self, sharded: dict[str, Any], directory: Path
    ) -> tuple[Checkpointer, int, dict[str, object]]:
        """Return the checkpointer, the step and the state to save."""
        common, self._common = self._common, None
        if common is None and len(self.groups.layout.ranks) > 1:
            raise ConfigError(
                "HoldfastSave: Megatron keeps the common state of the first rank alone, and the "
                "others' would be lost unseen; call dist_checkpointing.save(..., "
                "preprocess_common_before_consistancy_check=saving.common) with "
                "validate_access_integrity=True"
            )
        values = [each for each in nested_values(sharded) if self._is_taken(each)]
        objects = {
            each.unique_key: _packed(each.data)
            for each in values
            if isinstance(each, ShardedObject)
        }
        own = {"objects": Union(objects), "common": _comparable(common)}
        state: dict[str, object] = {
            **_tensor_parts(each for each in values if isinstance(each, ShardedTensor)),
            _OWN: _OwnPart(own, directory),
        }
        return self._checkpointer(directory.parent), _step_of(directory), state

    def _is_taken(self, each: Any) -> bool:
        """Return True if this rank gives an entry; ConfigError for one of no known kind."""
        if not isinstance(each, Sharded):
            raise ConfigError(f"HoldfastSave does not support a {type(each).__name__} ({each})")
        is_trusted = any(fnmatch.fnmatchcase(each.key, p) for p in self._main_replica_only)
        return not is_trusted or is_main_replica(each.replica_id)

    def _checkpointer(self, root: Path) -> Checkpointer:
        """Return the checkpointer of a root; the same one as long as the root is."""
        if self._opened is None or self._opened[0] != root:
            self.close()
            self._opened = root, Checkpointer(root, groups=self.groups, **self._options)
        return self._opened[1]

    def _finish(self, directory: Path) -> None:
        """Make the file that Megatron begins a load with; the other one it writes itself."""
        _on_first_rank(self.groups, lambda: _restore_files(directory, with_metadata=False))


class HoldfastLoad(LoadShardedStrategy):  # type: ignore[misc]
    """Loads checkpoints of `HoldfastSave` into a sharded state dict, under any layout.

    Tensors are filled in place. Keys that are requested and not stored raise MismatchError; what
    else `strict` says, Megatron does itself, by `load_sharded_metadata`. With
    `allow_shape_mismatch` the elements that both shapes have are filled.

    Args:
        groups: as of `HoldfastSave`.
        cast: convert dtypes that differ.
    """

    def __init__(self, groups: ProcessGroups, *, cast: bool = False) -> None:
        super().__init__()
        self.groups = groups
        self._cast = cast

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise ConfigError for a checkpoint that another strategy wrote."""
        if loaded_backend != _BACKEND:
            raise ConfigError(
                f"HoldfastLoad reads what HoldfastSave wrote, and not '{loaded_backend}'; load it "
                f"with Megatron's own strategy, or Checkpointer.load(source=...)"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise ConfigError for a newer version."""
        if loaded_version != _VERSION:
            raise ConfigError(f"HoldfastLoad: version {loaded_version} is not known")

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path
    ) -> dict[str, Any]:
        """Load, and return the state dict with tensors and objects in place.

        Raises:
            ConfigError: the directory's name is not a step.
            CorruptionError: damage, that of `common.pt` included.
            HoldfastError: on all ranks, as of `Checkpointer.load`.
        """
        directory = _directory(checkpoint_dir)
        tensors, objects, copies = [], {}, _Copies()
        for each in nested_values(sharded_state_dict):
            if isinstance(each, ShardedTensor):
                each.init_data("cpu")
                tensors.append(each)
            elif isinstance(each, ShardedObject):
                objects[each.unique_key] = Stored()
        state = _tensor_parts(tensors, copies.target)
        state[_OWN] = {"objects": Union(objects), "files": Union({"common": Stored()})}
        with Checkpointer(directory.parent, groups=self.groups) as checkpointer:
            report = checkpointer.load(
                state, step=_step_of(directory), ignore_unexpected=True, cast=self._cast
            )
        copies.finish()
        own: Any = report.values[_OWN]
        _check_common(directory, own["files"]["common"])

        def loaded(each: Any) -> Any:
            if isinstance(each, ShardedTensor):
                return each.data
            return _unpacked(own["objects"][each.unique_key])

        result: dict[str, Any] = dict_list_map_outplace(loaded, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the stored tensors by key, without data."""
        with _snapshot(_directory(checkpoint_dir)) as snapshot:
            return {
                name: ShardedTensor.from_rank_offsets(
                    name,
                    torch.empty(
                        snapshot.tensor(key).shape,
                        dtype=torch_dtype(snapshot.tensor(key).dtype),
                        device="meta",
                    ),
                ).without_data()
                for key in snapshot.keys
                if not key.startswith(f"{_OWN}.") and (name := _name_of(key))
            }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the stored tensors and objects by key, without data."""
        with _snapshot(_directory(checkpoint_dir)) as snapshot:
            objects = _members(snapshot, "objects")
        return {
            **self.load_tensors_metadata(checkpoint_dir),
            **{name: ShardedObject.empty_from_unique_key(name) for name in objects},
        }

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Raise ConfigError: a committed checkpoint is not changed."""
        raise ConfigError("HoldfastLoad does not support remove_sharded_tensors")


class _OwnPart:
    """What a save keeps besides tensors: objects, and the common state as values and as a file."""

    def __init__(self, tree: Mapping[str, object], directory: Path) -> None:
        self._tree, self._directory = tree, directory

    def tree(self) -> object:
        """Return it; the first rank reads the file that Megatron has just written."""
        files = {}
        if dist.get_rank() == 0:
            content = (self._directory / _COMMON).read_bytes()
            files["common"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return {**self._tree, "files": Union(files)}

    def template(self, stored: StoredPart) -> object:
        """Nothing: a load has a template of its own."""
        return {}

    def restore(self, tree: object) -> None:
        """Nothing."""


class _Tensors:
    """The tensors of one part, each as the pieces that this rank has of it.

    Args:
        members: by name within the part.
        name: of the part.
        target: what is filled instead of a piece.
    """

    def __init__(
        self,
        members: Mapping[str, Sequence[ShardedTensor]],
        name: str,
        target: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._members, self._name, self._target = members, name, target

    def tree(self) -> object:
        """Return the pieces; one that the rank has twice is given once."""
        return Union({name: Pieces(*_cut(_distinct(each))) for name, each in self._members.items()})

    def template(self, stored: StoredPart) -> object:
        """Return the pieces to fill, cut at the stored shape where shapes may differ."""
        targets = {}
        for name, entries in self._members.items():
            shape = entries[0].global_shape
            if entries[0].allow_shape_mismatch:
                shape = stored.tensors.get(f"{self._name}.{name}", ("", shape))[1]
            locals_, offsets, shape = _cut(entries, shape)
            if locals_:
                targets[name] = Pieces(tuple(map(self._target, locals_)), offsets, shape)
        return Union(targets)

    def restore(self, tree: object) -> None:
        """Nothing: the tensors are filled."""


def _tensor_parts(
    tensors: Iterable[ShardedTensor],
    target: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[str, object]:
    """Return sharded tensors as parts: the key of each stored tensor is Megatron's."""
    parts: dict[str, dict[str, list[ShardedTensor]]] = {}
    for each in tensors:
        path = each.key.split(".", 1)
        if path[0] in (_OWN, TOP):
            raise ConfigError(f"HoldfastSave does not support the key {each.key!r}; rename it")
        parts.setdefault(part_of(path), {}).setdefault(member_of(path), []).append(each)
    return {name: _Tensors(members, name, target) for name, members in parts.items()}


def _distinct(entries: Sequence[ShardedTensor]) -> list[ShardedTensor]:
    """Return the entries of one key without repetitions.

    Raises:
        PlanError: two have other elements in one place.
    """
    places: dict[object, ShardedTensor] = {}
    for each in entries:
        known = places.setdefault((each.global_offset, each.local_shape), each)
        if known is not each and not equal_bits(known.data.detach(), each.data.detach()):
            raise PlanError(
                f"{each.key}: this rank has two different pieces at {list(each.global_offset)}"
            )
    return list(places.values())


def _cut(
    entries: Sequence[ShardedTensor], shape: Sequence[int] | None = None
) -> tuple[tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the tensors of one key with the dims that Megatron prepends, cut at a shape.

    Returns:
        Those that are not outside of the shape; the offset of each; the shape.
    """
    whole = tuple(entries[0].global_shape)
    shape = whole if shape is None or len(shape) != len(whole) else tuple(shape)
    locals_, offsets = [], []
    for each in entries:
        if tuple(each.global_shape) != whole:
            raise PlanError(
                f"{each.key}: this rank has pieces of {list(whole)} and of "
                f"{list(each.global_shape)}"
            )
        local = each.data.detach()
        if each.prepend_axis_num:
            local = local[(None,) * each.prepend_axis_num]
        ends = zip(each.global_offset, local.shape, shape, strict=True)
        sizes = [min(start + size, real) - start for start, size, real in ends]
        if all(size > 0 for size in sizes) or 0 in local.shape:
            if sizes != list(local.shape):
                local = local[tuple(slice(size) for size in sizes)]
            locals_.append(local)
            offsets.append(tuple(each.global_offset))
    return tuple(locals_), tuple(offsets), shape


class _Copies:
    """Targets whose memory another one has, too: filled next to it, and copied in the end.

    Megatron asks for a parameter and for the main parameter that is a view of it.
    """

    def __init__(self) -> None:
        self._taken: dict[int, list[tuple[int, int]]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or one like it if some of its memory is a target already."""
        if not tensor.numel():
            return tensor
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + int(last + 1) * tensor.element_size()
        taken = self._taken.setdefault(tensor.untyped_storage().data_ptr(), [])
        at = bisect.bisect(taken, (start, stop))
        neighbours = taken[max(at - 1, 0) : at + 1]
        if all(stop <= first or end <= start for first, end in neighbours):
            taken.insert(at, (start, stop))
            return tensor
        copy = torch.empty_like(tensor)
        self._copies.append((tensor, copy))
        return copy

    def finish(self) -> None:
        """Copy."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)


class _Until:
    """Runs in a process that Megatron forks, which it holds for the save: ends with the save."""

    def __init__(self, pending: PendingSave) -> None:
        self._pid, (self._read, self._write) = os.getpid(), os.pipe()
        pending.add_done_callback(self._done)

    def __call__(self) -> None:
        """Wait; in the training process itself the finalization does."""
        if os.getpid() != self._pid:
            os.close(self._write)
            os.read(self._read, 1)

    def __reduce__(self) -> Any:
        """Raise ConfigError: a spawned process has none of this one's descriptors."""
        raise ConfigError(
            "HoldfastSave does not support persistent callers: AsyncCallsQueue(persistent=False). "
            "The process that writes is Holdfast's own"
        )

    def _done(self, pending: PendingSave) -> None:
        os.write(self._write, b".")
        os.close(self._write)
        os.close(self._read)


def _directory(checkpoint_dir: str | Path) -> Path:
    """Return the directory of a checkpoint.

    Raises:
        ConfigError: it is not named as a step, or in a bucket.
    """
    path = Path(checkpoint_dir)
    if MultiStorageClientFeature.is_enabled():
        raise ConfigError("Holdfast does not support Megatron's MultiStorageClient")
    if parse_step_dir(path.name) is None:
        raise ConfigError(
            f"checkpoint_dir {str(path)!r}: the last part is Megatron's name of a step, as in "
            f"'{path / step_dir(100)}'"
        )
    return path


def _step_of(directory: Path) -> int:
    step = parse_step_dir(directory.name)
    assert step is not None
    return step


def _name_of(key: str) -> str:
    """Return Megatron's key of a stored tensor."""
    return key.removeprefix(f"{TOP}.")


def _snapshot(directory: Path) -> Snapshot:
    """Return a checkpoint, open."""
    return Snapshot.open(PosixStorage(directory.parent), directory.name)


def _members(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """Return a dict of what is kept besides tensors, without its tensors."""
    node: Any = snapshot.manifest.parts.get(_OWN)
    tree: Any = decode_tree(node, on_leaf=lambda *_: None) if node is not None else {}
    members: dict[str, Any] = tree.get(name, {})
    return members


def _restore_files(directory: Path, *, with_metadata: bool = True) -> None:
    """Write the files that Megatron begins a load with, if they are not as the checkpoint has them.

    Raises:
        StorageError: the checkpoint has nothing of Megatron's.
    """
    path = directory / _COMMON
    content = _stored_common(directory)
    if not path.is_file() or path.read_bytes() != content:
        new = path.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, path)
    if with_metadata and not (directory / _METADATA).is_file():
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(directory))


def _stored_common(directory: Path) -> bytes:
    """Return the bytes of `common.pt` that a checkpoint has."""
    key = f"{_OWN}.files.common"
    with _snapshot(directory) as snapshot:
        if not snapshot.has(key):
            raise StorageError(f"{directory} is not a checkpoint of Megatron-core")
        shape = tuple(snapshot.tensor(key).shape)
        data = bytearray(shape[0])
        snapshot.read_box(key, Box((0,), shape), memoryview(data))
    return bytes(data)


def _check_common(directory: Path, stored: torch.Tensor) -> None:
    """Raise CorruptionError if the file that Megatron has read is not the one that was saved."""
    if (directory / _COMMON).read_bytes() != stored.numpy().tobytes():
        raise CorruptionError(
            f"{directory / _COMMON} is not the file that was saved; "
            f"holdfast.integrations.megatron.latest makes it again from the checkpoint"
        )


def _on_first_rank(groups: ProcessGroups, action: Callable[[], None]) -> None:
    """Do something on the first rank; StorageError on all ranks if it fails."""
    text = ""
    if groups.control.is_coordinator:
        try:
            action()
        except Exception as error:
            text = str(error) or repr(error)
    text = text_of_coordinator(groups, text, phase="files of Megatron")
    if text:
        raise StorageError(text)


def _comparable(value: Any) -> Any:
    """Return common state as values that ranks are compared by and that tools show."""
    if isinstance(value, dict):
        return {name: _comparable(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_comparable, value))
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return _comparable(vars(value))
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return _comparable(fields)
    if isinstance(value, type | types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return value


def _packed(value: Any) -> Any:
    """Return an object's data as values without classes.

    The extra states of Transformer Engine are streams; a distributed optimizer has dtypes as keys,
    and the rerun machine calls.
    """
    if isinstance(value, _ENUMS):
        return {_OBJECT: [type(value).__name__, value.name]}
    if isinstance(value, _TUPLES):
        return {_OBJECT: [type(value).__name__, [_packed(each) for each in value]]}
    if isinstance(value, io.BytesIO):
        return {_BYTES_IO: value.getvalue()}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if type(value) is dict:
        if all(type(name) in (str, int) for name in value):
            return {name: _packed(each) for name, each in value.items()}
        return {_PAIRS: [[_packed(name), _packed(each)] for name, each in value.items()]}
    return type(value)(map(_packed, value)) if type(value) in (list, tuple) else value


def _unpacked(value: Any) -> Any:
    """Return an object's data as it was saved."""
    if type(value) is dict:
        match value:
            case {"$io.BytesIO": content}:
                return io.BytesIO(content)
            case {"$torch.dtype": name}:
                return getattr(torch, name)
            case {"$dict": pairs}:
                return {_unpacked(name): _unpacked(each) for name, each in pairs}
            case {"$megatron": [kind, content]}:
                return _rerun_object(kind, content)
        return {name: _unpacked(each) for name, each in value.items()}
    return type(value)(map(_unpacked, value)) if type(value) in (list, tuple) else value


def _rerun_object(kind: str, content: Any) -> Any:
    """Return a member of an enumeration, or a named tuple, of the rerun machine."""
    for each in _ENUMS:
        if each.__name__ == kind:
            return each[content]
    for made in _TUPLES:
        if made.__name__ == kind:
            return made(*map(_unpacked, content))
    raise MismatchError(f"HoldfastLoad: {kind} is not a class of Megatron's rerun machine")

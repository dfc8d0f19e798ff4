"""Megatron-core: strategies of `dist_checkpointing` that write and read Holdfast's format.

    saving = HoldfastSave(groups_of(ProcessGroupCollection.use_mpu_process_groups()))
    dist_checkpointing.save(
        state, path, saving, preprocess_common_before_consistancy_check=saving.common
    )
    state = dist_checkpointing.load(state, path, **HoldfastLoad(saving.groups).strategies)

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
import secrets
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
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
from holdfast.decoding import decode_msgpack_as
from holdfast.errors import ConfigError, MismatchError, PlanError, StorageError
from holdfast.format.names import OTHER_FILES, parse_step_dir, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.values import decode_tree
from holdfast.integrations.names import TOP, member_of, part_of
from holdfast.integrations.world import (
    CheckpointerAt,
    agreed_newest_step,
    committed_steps,
    refuse_bucket,
    text_of_coordinator,
)
from holdfast.parallel import Layout, ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.policies.keep import KeepPolicy
from holdfast.retention.removal import Candidate
from holdfast.state import Pieces, Stored, StoredPart, Union
from holdfast.state.shared_memory import span_nbytes
from holdfast.state.tensor_elements import equal_bits, torch_dtype
from holdfast.storage import PosixStorage

_BACKEND, _VERSION = "holdfast", 1
_COMMON_BACKEND, _COMMON_VERSION = "torch", 1
"""Of `common.pt`, as Megatron notes them in every checkpoint."""
_OWN = "megatron"
"""The part with what is not a tensor of the model or the optimizer."""
_COMMON = "common.pt"
_METADATA = "metadata.json"
_EXPECTED = {OTHER_FILES: [_COMMON, _METADATA]}
"""Metadata of a checkpoint: the files that are put into its directory after the commit."""
_AXES = ("tp", "cp", "dp", "pp", "dp_cp", "mp", "tp_cp", "ep", "expt_tp", "expt_dp", "tp_ep",
         "tp_ep_pp")  # fmt: skip
_BYTES_IO, _DTYPE, _PAIRS, _OBJECT = "$io.BytesIO", "$torch.dtype", "$dict", "$megatron"
_LOOK_S = 0.02
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
    before they were there, or while it replaced them. Those of older ones are, if one is missing.

    Called by all ranks of the groups.

    Raises:
        ConfigError: the root is in a bucket.
        StorageError: on all ranks; they cannot be written, or nothing of Megatron's is stored.
    """
    refuse_bucket(root, why="Megatron begins a load with files of its own")
    step = agreed_newest_step(groups, root)
    if step is None:
        return None
    directory = Path(root) / step_dir(step)

    def restore() -> None:
        for each in committed_steps(Path(root)):
            older = Path(root) / step_dir(each)
            if each != step and not all((older / name).is_file() for name in (_COMMON, _METADATA)):
                _restore_files(older)
        _restore_files(directory)

    _on_first_rank(groups, restore)
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
        self._unfinished: set[int] = set()
        retention = options.get("retention")
        if isinstance(retention, KeepPolicy):
            options["retention"] = retention | _KeepUnfinished(self._unfinished)
        self._main_replica_only = tuple(main_replica_only)
        self._preprocess = common
        self._common: tuple[Any, Any] | None = None
        """Of this rank: the common state, and what of it is compared."""
        self._checkpointer = CheckpointerAt(groups, options)

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def common(self, state: dict[str, Any]) -> Any:
        """Take note of this rank's common state; `preprocess_common_before_consistancy_check`.

        Megatron writes the first rank's alone. The save compares all of them, and is refused with
        the paths of what differs.
        """
        compared = self._preprocess(state) if self._preprocess is not None else state
        self._common = (state, compared)
        return compared

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
            A request for an `AsyncCallsQueue`; its finalization waits for the commit, and raises
            what failed.

        Raises:
            ConfigError, HoldfastError: as of `save`.
        """
        directory = _directory(checkpoint_dir)
        checkpointer, step, state = self._prepared(sharded_state_dict, directory)
        self._unfinished.add(step)
        pending = checkpointer.save_async(step, state, overwrite=True, metadata=_EXPECTED)

        def finish() -> None:
            try:
                pending.result()
                self._finish(directory)
            finally:
                self._unfinished.discard(step)

        return AsyncRequest(_Until(pending), (), [finish])

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; the groups stay open."""
        self._checkpointer.close()

    def _prepared(
        self, sharded: dict[str, Any], directory: Path
    ) -> tuple[Checkpointer, int, dict[str, object]]:
        """Return the checkpointer, the step and the state to save; an error is raised on all ranks.

        Cost: one small collective.
        """
        prepare = partial(self._prepare, sharded, directory)
        guard = Guard[tuple[Checkpointer, int, dict[str, object]]](self.groups.control, "save")
        return guard.run(prepare)

    def _prepare(
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
        whole, compared = common if common is not None else (None, None)
        own = {"objects": Union(objects), "common": _comparable(compared)}
        state: dict[str, object] = {
            **_tensor_parts(each for each in values if isinstance(each, ShardedTensor)),
            _OWN: _OwnPart(own, directory / _COMMON, common=whole),
        }
        return self._checkpointer(directory.parent), _step_of(directory), state

    def _is_taken(self, each: Any) -> bool:
        """Return True if this rank gives an entry; ConfigError for one of no known kind."""
        if not isinstance(each, Sharded):
            raise ConfigError(f"HoldfastSave does not support a {type(each).__name__} ({each})")
        is_trusted = any(fnmatch.fnmatchcase(each.key, p) for p in self._main_replica_only)
        return not is_trusted or is_main_replica(each.replica_id)

    def _finish(self, directory: Path) -> None:
        """Make the file that Megatron begins a load with; the other one it writes itself."""
        _on_first_rank(self.groups, lambda: _restore_files(directory, with_metadata=False))


@dataclasses.dataclass(frozen=True, slots=True)
class _KeepUnfinished(KeepPolicy):
    """Keep what Megatron has yet to finalize: it writes a file into the directory then."""

    steps: set[int]

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """See `KeepPolicy.keep`."""
        return {c.step: "not finalized yet" for c in candidates if c.step in self.steps}


class HoldfastLoad(LoadShardedStrategy):  # type: ignore[misc]
    """Loads checkpoints of `HoldfastSave` into a sharded state dict, under any layout.

    Tensors are filled in place. Keys that are requested and not stored raise MismatchError; what
    else `strict` says, Megatron does itself, by `load_sharded_metadata`. With
    `allow_shape_mismatch` the elements that both shapes have are filled.

    Megatron asks for the common state first, by a strategy of its own: `strategies` has both.

    Args:
        groups: as of `HoldfastSave`.
        cast: convert dtypes that differ.
    """

    def __init__(self, groups: ProcessGroups, *, cast: bool = False) -> None:
        super().__init__()
        self.groups = groups
        self.common = HoldfastLoadCommon(groups)
        """Loads the common state: the `common_strategy` of a load."""
        self._cast = cast

    @property
    def strategies(self) -> dict[str, Any]:
        """The arguments of `dist_checkpointing.load` that name a strategy."""
        return {"sharded_strategy": self, "common_strategy": self.common}

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
            ConfigError: the directory's name is not a step, or Megatron has read the common state
                by itself.
            StorageError: on all ranks; the step was saved again since the common state was read.
            HoldfastError: on all ranks, as of `Checkpointer.load`.
        """
        directory = _directory(checkpoint_dir)

        def load() -> Any:
            self.common.refuse_unread(directory)
            tensors, objects, copies = [], {}, _Copies()
            for each in nested_values(sharded_state_dict):
                if isinstance(each, ShardedTensor):
                    each.init_data("cpu")
                    tensors.append(each)
                elif isinstance(each, ShardedObject):
                    objects[each.unique_key] = Stored()
            state = _tensor_parts(tensors, copies.target)
            state[_OWN] = {"objects": Union(objects)}
            with Checkpointer(directory.parent, groups=self.groups) as checkpointer:
                report = checkpointer.load(
                    state, step=_step_of(directory), ignore_unexpected=True, cast=self._cast
                )
            self.common.refuse_other(directory, report.save_id)
            copies.finish()
            return report.values[_OWN]

        # Under one guard: each rank compares what it has seen itself.
        own = Guard[Any](self.groups.control, "load").run(load)

        def loaded(each: Any) -> Any:
            if isinstance(each, ShardedTensor):
                return each.data
            return _unpacked(own["objects"][each.unique_key])

        result: dict[str, Any] = dict_list_map_outplace(loaded, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the stored tensors by key, without data."""
        return self._stored(checkpoint_dir, with_objects=False)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the stored tensors and objects by key, without data."""
        return self._stored(checkpoint_dir, with_objects=True)

    def _stored(self, checkpoint_dir: str | Path, *, with_objects: bool) -> dict[str, Any]:
        """Return what is stored, as Megatron describes it."""
        directory = _directory(checkpoint_dir)
        with _snapshot(directory) as snapshot:
            self.common.note(directory, snapshot.manifest.save_id)
            stored: dict[str, Any] = {
                name: ShardedTensor.from_rank_offsets(
                    name,
                    torch.empty(
                        snapshot.tensor(key).shape,
                        dtype=torch_dtype(snapshot.tensor(key).dtype),
                        device="meta",
                    ),
                ).without_data()
                for key in snapshot.keys
                if not key.startswith(f"{_OWN}.") and (name := key.removeprefix(f"{TOP}."))
            }
            if with_objects:
                node: Any = snapshot.manifest.parts.get(_OWN)
                own: Any = decode_tree(node, on_leaf=lambda *_: None) if node is not None else {}
                names = own.get("objects", ())
                stored |= {name: ShardedObject.empty_from_unique_key(name) for name in names}
        return stored

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Raise ConfigError: a committed checkpoint is not changed."""
        raise ConfigError("HoldfastLoad does not support remove_sharded_tensors")


class HoldfastLoadCommon(LoadCommonStrategy):  # type: ignore[misc]
    """Loads the common state of checkpoints of `HoldfastSave` for a `HoldfastLoad`, which has one.

    One rank reads it from the checkpoint, and checks its digests before anything is unpickled.
    Megatron's own strategy reads `common.pt` before the checkpoint is opened: if the step is saved
    again in between, the two would be of different versions.

    Args:
        groups: as of `HoldfastSave`.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self._groups = groups
        self._seen: tuple[Path, set[str]] | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """False: `HoldfastLoad` does."""
        return False

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise ConfigError for a common state of another kind."""
        if loaded_backend != _COMMON_BACKEND:
            raise ConfigError(f"HoldfastLoad: a common state of '{loaded_backend}' is not known")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise ConfigError for a newer version."""
        if loaded_version != _COMMON_VERSION:
            raise ConfigError(f"HoldfastLoad: common state of version {loaded_version}: not known")

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Return the common state.

        Called by all ranks.

        Raises:
            StorageError, CorruptionError: on all ranks; nothing of Megatron's is stored, or damage.
        """
        directory, control = _directory(checkpoint_dir), self._groups.control

        def read() -> bytes:
            data = _version_and_common(directory) if control.is_coordinator else None
            encoded = None if data is None else msgspec.msgpack.encode(data)
            return control.broadcast(encoded, phase="common state")

        data = Guard[bytes](control, "load: common state").run(read)
        save_id, content = decode_msgpack_as(data, tuple[str, bytes])
        self._seen = (directory.absolute(), {save_id})
        return _unpickled(content)

    def load_sharded_objects(self, sharded: Any, checkpoint_dir: str | Path) -> Any:
        """Raise ConfigError: `HoldfastLoad` loads them."""
        raise ConfigError("HoldfastLoad loads sharded objects itself; pass it as sharded_strategy")

    def note(self, directory: Path, save_id: str) -> None:
        """Note a version of which Megatron has seen more than the common state."""
        if self._seen is not None and self._seen[0] == directory.absolute():
            self._seen[1].add(save_id)

    def refuse_unread(self, directory: Path) -> None:
        """Raise ConfigError if the common state of a checkpoint was not read here."""
        if self._seen is None or self._seen[0] != directory.absolute():
            raise ConfigError(
                "HoldfastLoad: Megatron has read the common state by itself, which may be of "
                "another version of the step than the rest; pass both strategies, "
                "dist_checkpointing.load(..., **loading.strategies), or call register(loading)"
            )

    def refuse_other(self, directory: Path, save_id: str) -> None:
        """Raise StorageError if another version was seen than the one that is loaded."""
        if self._seen is not None and self._seen[1] != {save_id}:
            raise StorageError(f"{directory} was saved again while it was loaded; load it again")


def register(loading: HoldfastLoad, saving: HoldfastSave | None = None) -> None:
    """Let Megatron take these where a call names no strategy, as those of Megatron-LM do not.

    `get_default_load_sharded_strategy`, `get_default_save_sharded_strategy("holdfast")`,
    `load_common_state_dict`, `load_content_metadata` and `load_plain_tensors` then know checkpoints
    of Holdfast; with `saving`, common state is compared without a hook, too. What other strategies
    have saved is loaded as before.

    Args:
        loading: for all loads.
        saving: for all saves in the format "holdfast".
    """
    register_default_strategy(StrategyAction.LOAD_SHARDED, _BACKEND, _VERSION, loading)
    common = (_COMMON_BACKEND, _COMMON_VERSION)
    inner = get_default_strategy(StrategyAction.LOAD_COMMON, *common)
    register_default_strategy(StrategyAction.LOAD_COMMON, *common, _LoadsCommon(loading, inner))
    if saving is not None:
        register_default_strategy(StrategyAction.SAVE_SHARDED, _BACKEND, _VERSION, saving)
        inner = get_default_strategy(StrategyAction.SAVE_COMMON, *common)
        register_default_strategy(StrategyAction.SAVE_COMMON, *common, _SavesCommon(saving, inner))


class _LoadsCommon(LoadCommonStrategy):  # type: ignore[misc]
    """Loads the common state of every checkpoint: of Holdfast's by its strategy."""

    def __init__(self, loading: HoldfastLoad, inner: Any) -> None:
        super().__init__()
        self._loading = loading
        self._inner: Any = inner._inner if isinstance(inner, _LoadsCommon) else inner

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As Megatron's own."""
        return bool(self._inner.can_handle_sharded_objects)

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """As Megatron's own."""
        self._inner.check_backend_compatibility(loaded_backend)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """As Megatron's own."""
        self._inner.check_version_compatibility(loaded_version)

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Return the common state."""
        config = maybe_load_config(str(checkpoint_dir))
        is_own = config is not None and config.sharded_backend == _BACKEND
        strategy = self._loading.common if is_own else self._inner
        return strategy.load_common(checkpoint_dir)

    def load_sharded_objects(self, sharded: Any, checkpoint_dir: str | Path) -> Any:
        """As Megatron's own."""
        return self._inner.load_sharded_objects(sharded, checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """As Megatron's own."""
        return self._inner.load_sharded_metadata(checkpoint_dir)


class _SavesCommon(SaveCommonStrategy):  # type: ignore[misc]
    """Saves the common state as Megatron does, and takes note of each rank's."""

    def __init__(self, saving: HoldfastSave, inner: Any) -> None:
        super().__init__(_COMMON_BACKEND, _COMMON_VERSION)
        self._saving = saving
        self._inner: Any = inner._inner if isinstance(inner, _SavesCommon) else inner

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As Megatron's own."""
        return bool(self._inner.can_handle_sharded_objects)

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save it."""
        self._saving.common(common_state_dict)
        self._inner.save_common(common_state_dict, checkpoint_dir)

    def save_sharded_objects(self, sharded: Any, checkpoint_dir: str | Path) -> None:
        """As Megatron's own."""
        self._inner.save_sharded_objects(sharded, checkpoint_dir)


class _OwnPart:
    """What a save keeps besides tensors: objects, and the common state as values and as a file."""

    def __init__(self, tree: Mapping[str, object], path: Path, *, common: Any) -> None:
        self._tree, self._path, self._common = tree, path, common

    def tree(self) -> object:
        """Return it; of the first rank, with the bytes of the common state."""
        files = {}
        if dist.get_rank() == 0:
            content = _written(self._path, self._common)
            _refuse_unloadable(content)
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
        if shape != whole:
            ends = zip(each.global_offset, local.shape, shape, strict=True)
            sizes = [min(start + size, real) - start for start, size, real in ends]
            if min(sizes) <= 0 and 0 not in local.shape:
                continue
            local = local[tuple(map(slice, sizes))]
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
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + span_nbytes(tensor)
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
    """Runs in a process that Megatron starts, which it holds for the save: ends with the save."""

    def __init__(self, pending: PendingSave) -> None:
        # A process that Megatron has spawned before has no descriptors of this one, and sees them
        # in /proc. A memory file goes with this process, where a file would be left behind.
        self._pid, name = os.getpid(), f"holdfast-save-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        self._path = f"/proc/{self._pid}/fd/{descriptor}"
        self._target = os.readlink(self._path)
        pending.add_done_callback(lambda _: os.close(descriptor))

    def __call__(self) -> None:
        """Wait; in the training process itself the finalization does."""
        while os.getpid() != self._pid and self._is_open():
            time.sleep(_LOOK_S)

    def _is_open(self) -> bool:
        """Return False once the save or the training process has ended."""
        try:
            return os.readlink(self._path) == self._target
        except OSError:
            return False


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


def _snapshot(directory: Path, *, prove: bool = True) -> Snapshot:
    """Return a checkpoint, open.

    Args:
        directory: of the checkpoint.
        prove: prove that its tensors are whole; digests of what is read are checked in any case.
    """
    return Snapshot.open(PosixStorage(directory.parent), directory.name, prove=prove)


def _restore_files(directory: Path, *, with_metadata: bool = True) -> None:
    """Write the files that Megatron begins a load with, if they are not as the checkpoint has them.

    Raises:
        StorageError: the checkpoint has nothing of Megatron's.
    """
    path = directory / _COMMON
    _, content = _version_and_common(directory)
    if not path.is_file() or path.read_bytes() != content:
        new = path.with_suffix(".new")
        new.write_bytes(content)
        os.replace(new, path)
    if with_metadata and not (directory / _METADATA).is_file():
        save_config(CheckpointingConfig(_BACKEND, _VERSION), str(directory))


def _version_and_common(directory: Path) -> tuple[str, bytes]:
    """Return the version of a checkpoint, and the bytes of `common.pt` that it has.

    Raises:
        StorageError: it has nothing of Megatron's.
    """
    key = f"{_OWN}.files.common"
    with _snapshot(directory, prove=False) as snapshot:
        if not snapshot.has(key):
            raise StorageError(f"{directory} is not a checkpoint of Megatron-core")
        shape = tuple(snapshot.tensor(key).shape)
        data = bytearray(shape[0])
        snapshot.read_box(key, Box((0,), shape), memoryview(data))
        return snapshot.manifest.save_id, bytes(data)


def _written(path: Path, common: Any) -> bytes:
    """Return the bytes of `common.pt`, which Megatron has just written.

    Args:
        path: of the file. It is gone if an earlier save of the step was committed since.
        common: the common state; None if it was not passed.

    Raises:
        StorageError: it is gone, and was not passed.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        if common is None:
            raise StorageError(
                f"HoldfastSave: an earlier save of the step has replaced {path}, which Megatron "
                f"had written; save again, or pass "
                f"preprocess_common_before_consistancy_check=saving.common"
            ) from error
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


def _unpickled(content: bytes) -> Any:
    """Return the common state that is in the bytes of `common.pt`, as Megatron unpickles it."""
    return torch.load(io.BytesIO(content), map_location="cpu")


def _refuse_unloadable(content: bytes) -> None:
    """Raise ConfigError if Megatron could write the common state, and no load could read it."""
    try:
        _unpickled(content)
    except Exception as error:
        lines = str(error).splitlines() or [repr(error)]
        # torch explains at length what a pickle is; one line names the class.
        cause = next((each for each in lines if "Unpickler error" in each), lines[0]).strip()
        raise ConfigError(
            f"HoldfastSave: Megatron has written the common state, and could not load it again: "
            f"{cause}"
        ) from error


def _on_first_rank(groups: ProcessGroups, action: Callable[[], None]) -> None:
    """Do something with files on the first rank; StorageError on all ranks if it fails."""

    def done() -> str:
        try:
            action()
        except OSError as error:
            raise StorageError(str(error)) from error
        return ""

    text_of_coordinator(groups, done, phase="files of Megatron")


def _comparable(value: Any) -> Any:
    """Return common state as values that ranks are compared by and that tools show.

    Raises:
        ConfigError: a shard is among them, which Megatron does not look for inside of tuples.
    """
    if isinstance(value, ShardedBase):
        raise ConfigError(
            f"HoldfastSave: {value.key} is inside of a tuple or an object, where Megatron does not "
            f"look for shards: one rank's would be kept; put it into dicts and lists"
        )
    if isinstance(value, dict):
        return {_comparable(name): _comparable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(map(_comparable, value))
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return _comparable(vars(value))
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return _comparable(fields)
    if isinstance(value, type | types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.dtype | torch.device | PurePath):
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

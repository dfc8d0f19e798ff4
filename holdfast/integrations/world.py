"""A framework's own world, in which every rank holds a replica or a shard, and its checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

from holdfast.checkpoint import Checkpointer, LoadReport, PendingSave
from holdfast.errors import ConfigError, GroupError
from holdfast.format.names import list_steps, require_root_of_checkpoints
from holdfast.parallel import Control, Layout, ProcessGroups
from holdfast.parallel.control.guard import Guard
from holdfast.policies.keep import KeepLast, KeepPolicy, KeepTagged
from holdfast.state import PerRank
from holdfast.storage import Storage, is_url, open_storage, shown
from holdfast.writer.leftovers import wait_for_writers

T = TypeVar("T")

_SETTLE_S = 60.0
_ALIVE_S = 5.0
"""A writer whose heartbeat is older is dead."""


def groups_of_world(name: str) -> ProcessGroups:
    """Return groups over all ranks of the default process group, or those of a lone process.

    One communicator is made, and that for agreement: the framework has its own for tensors.

    Args:
        name: of the layout; each integration that is used in a program has its own.

    Called by all ranks.

    Raises:
        GroupError: several processes were launched, and the framework runs each by itself.
        GroupError, DeadlineError: a rank does not arrive.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and launched > 1:
        raise GroupError(
            f"{launched} processes were launched, and the framework runs each by itself: they "
            f"would overwrite each other's checkpoints; let it use all of them (devices={launched})"
        )
    if size == 1:
        return ProcessGroups.single(name)
    layout = Layout.of_world(size, name=name)
    return ProcessGroups.create(layout, names=("dp",))


class CheckpointsOfWorld(ABC):
    """A `Checkpointer` on all ranks of a framework, a count of steps, and how a run is resumed.

    A subclass saves and loads what its framework has.
    """

    def __init__(self, root: str | os.PathLike[str], *, name: str, **options: Any) -> None:
        self._root = Path(root)
        self._groups = groups_of_world(name)
        self._checkpointer = Checkpointer(root, groups=self._groups, **options)
        self._overwrite = False
        self.step = 0
        """Steps that were made so far, those before a resume included."""

    @property
    def checkpointer(self) -> Checkpointer:
        """The `Checkpointer` in use."""
        return self._checkpointer

    @abstractmethod
    def load(self, step: int | None = None, **options: Any) -> LoadReport:
        """Load a checkpoint into everything that the framework has; by default the newest."""

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed; destroy the communicators made here."""
        try:
            self._checkpointer.close()
        finally:
            self._groups.close()

    def _resumed(self) -> Self:
        """Load the newest checkpoint, if there is one."""
        newest = agreed_newest_step(self._groups, self._root)
        if newest is not None:
            self.load(newest)
        # A writer that has outlived the last run may still commit a step that this run makes again.
        self._overwrite = True
        return self

    def _save(
        self, make: Callable[[], Mapping[str, object]], options: Mapping[str, Any]
    ) -> PendingSave:
        """Save the parts that are made as checkpoint `step`, in the background.

        Under a guard: what one rank refuses while it makes them, all raise.
        """
        parts = Guard[Mapping[str, object]](self._groups.control, "save").run(make)
        return self._checkpointer.save_async(
            self.step, parts, **{"overwrite": self._overwrite, **options}
        )


class CheckpointerAt:
    """A `Checkpointer` for calls that each name their root: the same one as long as the root is.

    Args:
        groups: of all ranks; they stay the caller's.
        options: further arguments of `Checkpointer`.
    """

    def __init__(self, groups: ProcessGroups, options: Mapping[str, Any]) -> None:
        self._groups, self._options = groups, options
        self._opened: tuple[Path, Checkpointer] | None = None

    def __call__(self, root: Path) -> Checkpointer:
        """Return the one of a root; that of another root is closed."""
        if self._opened is None or self._opened[0] != root:
            self.close()
            self._opened = root, Checkpointer(root, groups=self._groups, **self._options)
        return self._opened[1]

    def close(self) -> None:
        """Wait for saves in flight, and raise what failed."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()


def text_of_coordinator(groups: ProcessGroups, make: Callable[[], str], *, phase: str) -> str:
    """Return the text that the coordinator makes, on every rank.

    Called by all ranks. What the coordinator raises instead, all of them raise. They wait for it as
    long as for a rank that is late in a step: it may wait for writers of an earlier run.

    Cost: two small collectives.
    """
    control = groups.control

    def text() -> str:
        own = make().encode() if control.is_coordinator else None
        return control.broadcast(own, phase=phase).decode()

    return on_all_ranks(control, text, phase=phase)


def on_all_ranks(control: Control, call: Callable[[], T], *, phase: str) -> T:
    """Call on every rank, and raise on all of them what it raises on one.

    They wait for each other as long as for a rank that is late in a step.
    """
    with control.in_step():
        return Guard[T](control, phase).run(call)


def newest_step(root: str | os.PathLike[str]) -> int | None:
    """Return the newest committed step under a root, a directory or a bucket; None without one.

    Waits for writers that have outlived a run that was killed: what they write is committed soon,
    and is what the next run continues from.

    Raises:
        StorageError: the root is a file, a link to nothing, or in a checkpoint: a run would start
            afresh, and fail at its first save.
    """
    storage = open_storage(root)
    if storage.is_dir(""):
        wait_for_writers(storage, alive_s=_ALIVE_S, timeout_s=_SETTLE_S)
    steps = _steps_in(storage)
    if not steps:
        require_root_of_checkpoints(storage)
    return max(steps, default=None)


def committed_steps(root: str | os.PathLike[str]) -> list[int]:
    """Return the committed steps under a root, ascending; none if it is not a directory."""
    return _steps_in(open_storage(root))


def _steps_in(storage: Storage) -> list[int]:
    return list_steps(storage) if storage.is_dir("") else []


def refuse_bucket(root: str | os.PathLike[str], *, why: str) -> None:
    """Raise ConfigError for a root in a bucket, for a framework that looks at files itself.

    Else it would make a directory named s3: below the current one, or find no checkpoint there.
    """
    if is_url(root):
        raise ConfigError(f"{shown(root)}: {why}, and none in a bucket; give a directory")


def agreed_newest_step(groups: ProcessGroups, root: str | os.PathLike[str]) -> int | None:
    """Return the newest committed step by the first rank's view, on every rank.

    Called by all ranks; see `text_of_coordinator`.
    """
    return step_of_coordinator(groups, lambda: newest_step(root), phase="newest step")


def step_of_coordinator(
    groups: ProcessGroups, find: Callable[[], int | None], *, phase: str
) -> int | None:
    """Return the step that the coordinator finds, on every rank; see `text_of_coordinator`."""

    def text() -> str:
        step = find()
        return "" if step is None else str(step)

    answer = text_of_coordinator(groups, text, phase=phase)
    return int(answer) if answer else None


def refuse_other_run(checkpointer: Checkpointer, root: Path, *, continues: bool, how: str) -> None:
    """Raise ConfigError if there are checkpoints, for a run that does not continue from them.

    Called by all ranks: what one of them finds, all raise.

    Args:
        checkpointer: of the run.
        root: where it saves.
        continues: True for a run that would have continued, had there been one: none is refused.
        how: to continue from them, for the message.
    """

    def refuse() -> None:
        newest = None if continues else checkpointer.latest()
        if newest is not None:
            raise ConfigError(
                f"{root} has checkpoints, the newest of step {newest}, and this run does not "
                f"continue from them: it would be resumed from them later. {how}, or choose "
                f"another root"
            )

    # It may wait for writers of an earlier run.
    on_all_ranks(checkpointer.groups.control, refuse, phase="newest step")


def keep_newest(limit: int) -> KeepPolicy:
    """Return the policy that a framework's own limit stands for; a step that is tagged stays."""
    return KeepLast(limit) | KeepTagged()


def put_values(state: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Put loaded plain values in the place of those in a program's state."""
    for name in state.keys() & values.keys():
        state[name] = _replaced(state[name], values[name])


def _replaced(before: Any, value: Any) -> Any:
    """Return a loaded value; dicts and lists that are there already stay the same objects."""
    if isinstance(before, dict) and isinstance(value, dict):
        loaded = {name: _replaced(before.pop(name, None), each) for name, each in value.items()}
        for name, each in loaded.items():  # in their order; `update` of a Counter would add
            before[name] = each
        return before
    if isinstance(before, list) and isinstance(value, list):
        known = [_replaced(a, b) for a, b in zip(before, value, strict=False)]
        before[:] = [*known, *value[len(known) :]]
        return before
    return value


def of_each_rank(tree: object) -> PerRank:
    """Return a value of each rank; under a larger layout the new ranks have none."""
    return PerRank(tree, missing="keep", surplus="drop")


def of_each_rank_or_first(tree: object) -> PerRank:
    """Return a value of each rank; under another number of ranks all take the first one's."""
    return PerRank(tree, axes=("dp",), merge=_first)


def _first(stored: dict[str, Any]) -> Any:
    return next(iter(stored.values()))

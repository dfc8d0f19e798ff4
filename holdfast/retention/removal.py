"""Removing old checkpoints by a policy, without ever risking the one a run would restart from.

Whatever fails, this stays: the newest checkpoint that proves sound and everything newer (saves
in progress, damaged or uncommitted steps), every checkpoint that is being read, that cannot be
judged, or that has changed since the plan was made; and nothing is followed or removed through a
link. A checkpoint is renamed before it is removed, so that it is either whole or gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from holdfast.errors import CorruptionError, HoldfastError
from holdfast.format.digest import digest128
from holdfast.format.names import LATEST, latest_step, list_steps, parse_step_dir, step_dir
from holdfast.format.reader import Snapshot
from holdfast.format.versions import announce_removal, read_lease, read_manifest
from holdfast.retention.policies import (
    AnyOf,
    Candidate,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepTagged,
    KeepWithin,
    Policy,
)
from holdfast.retention.tags import list_tags
from holdfast.storage import Storage

__all__ = [
    "AnyOf",
    "Candidate",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepTagged",
    "KeepWithin",
    "Policy",
    "Removal",
    "RetentionPlan",
    "RetentionResult",
    "apply_retention",
    "plan_retention",
    "prove_sound",
    "read_lease",
]

Prove = Callable[[Storage, str], str | None]
"""Says what is wrong with the checkpoint in a directory; None when it is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One checkpoint to remove, as it was when the plan was made."""

    step: int
    directory: str
    stamp: str
    """Digest of its manifest."""
    stored_nbytes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What a policy keeps and what it removes."""

    keep: Mapping[int, str]
    """Step -> why it stays."""
    remove: tuple[Removal, ...]
    """Oldest first."""
    spared: Mapping[str, str]
    """Directory -> why no policy was asked about it: damaged, uncommitted, unreadable, a link."""
    newest: int | None
    """The newest sound step, which stays in any case; without one, nothing is removed."""
    newest_stamp: str
    """Digest of the newest sound step's manifest."""


@dataclass(slots=True, kw_only=True)
class RetentionResult:
    """The outcome of a plan."""

    removed: list[int] = field(default_factory=list)
    spared: dict[int, str] = field(default_factory=dict)
    """Step -> why it was not removed, though planned."""
    failed: dict[int, str] = field(default_factory=dict)
    """Step -> why its removal failed."""
    pointer_problem: str | None = None
    """Why the pointer file may name a step that is gone; None when it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Committed:
    """A step whose manifest is good."""

    stamp: str
    candidate: Candidate
    stored_nbytes: int


def prove_sound(storage: Storage, directory: str) -> str | None:
    """What is wrong with a checkpoint, or None: records prove out, files have their sizes.

    Reads manifest and index, no tensor; see `verify_snapshot` for every byte.
    """
    try:
        with Snapshot.open(storage, directory) as snapshot:
            step = snapshot.manifest.step
            if step_dir(step) != directory:
                return f"its manifest is of step {step}"
            for file in snapshot.manifest.files:
                nbytes = storage.size(f"{directory}/{file.name}")
                if nbytes != file.nbytes:
                    return f"{file.name} has {nbytes} bytes, the manifest states {file.nbytes}"
    except HoldfastError as error:
        return str(error)
    return None


def plan_retention(
    storage: Storage,
    policy: Policy,
    *,
    now: datetime | None = None,
    prove: Prove = prove_sound,
) -> RetentionPlan:
    """Decide what stays and what goes; touches nothing.

    Args:
        storage: The directory of checkpoints.
        policy: Chooses among the newest sound step and the older ones.
        now: The time that ages are counted from; by default this machine's.
        prove: Called from the newest step down until one is sound.

    Raises:
        CorruptionError: A tag cannot be read: what it protects is unknown.
        StorageError: The directory cannot be listed.

    Cost: every manifest once, the index of the newest step or steps.
    """
    if not storage.is_dir(""):
        return RetentionPlan(keep={}, remove=(), spared={}, newest=None, newest_stamp="")
    steps = list_steps(storage)
    spared = _not_committed(storage, set(steps))
    tags = _tags_of_steps(storage)
    newest = _newest_sound(storage, steps, prove, spared)
    judged: dict[int, _Committed] = {}
    for step in steps:
        try:
            judged[step] = _read_step(storage, step, tags)
        except HoldfastError as error:
            spared.setdefault(step_dir(step), f"cannot be judged: {error}")
    if newest is None or newest not in judged:
        for step in judged:
            spared.setdefault(step_dir(step), "no checkpoint here proves sound")
        return RetentionPlan(keep={}, remove=(), spared=spared, newest=None, newest_stamp="")
    old = [committed for step, committed in judged.items() if step <= newest]
    keep = policy.keep([c.candidate for c in old], now=now or datetime.now(UTC))
    reason = "the newest sound checkpoint"
    keep[newest] = f"{reason}; {keep[newest]}" if newest in keep else reason
    remove = tuple(
        Removal(
            step=committed.candidate.step,
            directory=step_dir(committed.candidate.step),
            stamp=committed.stamp,
            stored_nbytes=committed.stored_nbytes,
            tags=committed.candidate.tags,
        )
        for committed in old
        if committed.candidate.step not in keep
    )
    return RetentionPlan(
        keep=dict(sorted(keep.items())),
        remove=remove,
        spared=spared,
        newest=newest,
        newest_stamp=judged[newest].stamp,
    )


def apply_retention(
    storage: Storage,
    plan: RetentionPlan,
    *,
    on_step: Callable[[Removal], None] | None = None,
) -> RetentionResult:
    """Remove what a plan says, oldest first, checking each again before it is removed.

    A checkpoint that is being read, was saved again or tagged since, or has become a link is
    spared; so is every one when the newest sound checkpoint is no longer as it was. One that cannot
    be removed does not stop the others; nothing is raised: see `failed`.

    Args:
        storage: The directory of checkpoints.
        plan: From `plan_retention`.
        on_step: Called before each removal.

    Cost: per removal two small files, one rename, the deletions.
    """
    result = RetentionResult()
    for removal in plan.remove:
        if on_step is not None:
            on_step(removal)
        try:
            obstacle = _remove(storage, plan, removal)
        except (HoldfastError, OSError) as error:
            result.failed[removal.step] = str(error)
            continue
        if obstacle is None:
            result.removed.append(removal.step)
        else:
            result.spared[removal.step] = obstacle
    gone = {*result.removed, *result.failed}
    if gone:
        try:
            _repoint(storage, gone)
        except (HoldfastError, OSError) as error:
            result.pointer_problem = str(error)
    return result


def _not_committed(storage: Storage, committed: set[int]) -> dict[str, str]:
    """Names of steps that are no checkpoints, and why: never touched, but reported."""
    spared = {}
    for name in storage.list(""):
        step = parse_step_dir(name)
        if step is None or step in committed:
            continue
        is_dir = storage.is_dir(name)
        spared[name] = "not committed" if is_dir else "a link or a file: not followed"
    return spared


def _tags_of_steps(storage: Storage) -> dict[int, tuple[str, ...]]:
    tags: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for name, step in list_tags(storage).items():
        tags[step] += (name,)
    return dict(tags)


def _newest_sound(
    storage: Storage, steps: list[int], prove: Prove, spared: dict[str, str]
) -> int | None:
    for step in reversed(steps):
        problem = prove(storage, step_dir(step))
        if problem is None:
            return step
        spared[step_dir(step)] = f"newer than the newest sound checkpoint, and damaged: {problem}"
    return None


def _stamp(storage: Storage, directory: str) -> str:
    return digest128(read_manifest(storage, directory)[0])


def _read_step(storage: Storage, step: int, tags: Mapping[int, tuple[str, ...]]) -> _Committed:
    data, manifest = read_manifest(storage, step_dir(step))
    if manifest.step != step:
        raise CorruptionError(f"its manifest is of step {manifest.step}")
    candidate = Candidate(
        step=step, created=manifest.created, parts=manifest.parts, tags=tags.get(step, ())
    )
    return _Committed(
        stamp=digest128(data), candidate=candidate, stored_nbytes=manifest.totals.stored_nbytes
    )


def _remove(storage: Storage, plan: RetentionPlan, removal: Removal) -> str | None:
    """Remove one checkpoint, or say why it must not be removed."""
    directory = removal.directory
    if plan.newest is None or removal.step >= plan.newest:
        return "not older than the newest sound checkpoint"
    with announce_removal(storage, directory) as readers:
        if readers:
            return f"being read by {', '.join(readers)}"
        if not storage.exists(directory):
            return "gone already: another process removed it"
        if not storage.is_dir(directory):
            return "a link or a file: not followed"
        if _stamp(storage, directory) != removal.stamp:
            return "saved again since the plan was made"
        tags = set(_tags_of_steps(storage).get(removal.step, ())) - set(removal.tags)
        if tags:
            return f"tagged {', '.join(sorted(tags))} since the plan was made"
        if _stamp(storage, step_dir(plan.newest)) != plan.newest_stamp:
            return f"step {plan.newest}, which would be restarted from, has changed meanwhile"
        # Checked once more when it has lost its name: a version saved since must not be removed.
        storage.remove_tree(
            directory, only_if=lambda aside: _stamp(storage, aside) == removal.stamp
        )
        if storage.exists(directory):
            return "saved again since the plan was made"
    return None


def _repoint(storage: Storage, gone: set[int]) -> None:
    """Let the pointer file not name a step that is gone; any other content is left alone."""
    # Repeated, as the step that it is pointed to may be removed by another process meanwhile.
    while True:
        if not storage.exists(LATEST):
            return
        text = storage.read(LATEST, nbytes=min(storage.size(LATEST), 64)).strip()
        newest = latest_step(storage)
        if not text.isdigit() or int(text) not in gone or newest is None or newest in gone:
            return
        storage.replace_file(LATEST, f"{newest}\n".encode())
        if latest_step(storage) == newest:
            return
        gone = gone | {newest}

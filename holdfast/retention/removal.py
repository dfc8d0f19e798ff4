"""Removing old checkpoints by a policy, without ever risking the one a run would restart from.

Whatever fails, this stays: the newest checkpoint that proves sound and everything newer (saves
under way, damaged or uncommitted steps), every checkpoint that somebody reads, that cannot be
judged, or that has changed since the plan was made; and nothing is followed or removed through a
link. A checkpoint goes by a rename first, so that it is either whole or gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from holdfast.errors import CorruptionError, HoldfastError
from holdfast.format.digest import digest128
from holdfast.format.leases import mark_reading, mark_removing
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from holdfast.format.names import (
    LATEST,
    MANIFEST,
    latest_step,
    list_steps,
    parse_step_dir,
    step_dir,
)
from holdfast.format.reader import Snapshot
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
    "mark_reading",
    "plan_retention",
    "prove_sound",
]

Prove = Callable[[Storage, str], str | None]
"""Says what is wrong with the checkpoint in a directory; None when it is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One checkpoint to remove; `stamp` is the digest of its manifest, `tags` those it had then."""

    step: int
    directory: str
    stamp: str
    stored_nbytes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What stays and goes: `keep` step -> why; `remove`, oldest first; `spared` name -> why.

    `spared` are directories no policy is asked about: damaged, uncommitted, unreadable, links.
    `newest` is the newest sound step, which stays in any case, and `newest_stamp` the digest of its
    manifest; None when there is none, and then nothing is removed.
    """

    keep: Mapping[int, str]
    remove: tuple[Removal, ...]
    spared: Mapping[str, str]
    newest: int | None
    newest_stamp: str


@dataclass(slots=True, kw_only=True)
class RetentionResult:
    """What became of a plan: steps `removed`; step -> why, of those `spared` and `failed`.

    `pointer_problem`: why the pointer file may name a step that is gone; None when it does not.
    """

    removed: list[int] = field(default_factory=list)
    spared: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    pointer_problem: str | None = None


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

    `prove` is asked from the newest step down until one is sound; policies choose among that one
    and the older ones. Raises CorruptionError for a tag that cannot be read, StorageError when the
    directory cannot be listed. Cost: every manifest once, the index of the newest step or steps.
    """
    if not storage.is_dir(""):
        return RetentionPlan(keep={}, remove=(), spared={}, newest=None, newest_stamp="")
    steps = list_steps(storage)
    spared = _not_committed(storage, set(steps))
    tags = _tags_of_steps(storage)
    newest = _newest_sound(storage, steps, prove, spared)
    found: dict[int, _Committed] = {}
    for step in steps:
        try:
            found[step] = _read_step(storage, step, tags)
        except HoldfastError as error:
            spared.setdefault(step_dir(step), f"cannot be judged: {error}")
    if newest is None or newest not in found:
        for step in found:
            spared.setdefault(step_dir(step), "no checkpoint here proves sound")
        return RetentionPlan(keep={}, remove=(), spared=spared, newest=None, newest_stamp="")
    old = [committed for step, committed in found.items() if step <= newest]
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
        newest_stamp=found[newest].stamp,
    )


def apply_retention(
    storage: Storage,
    plan: RetentionPlan,
    *,
    on_step: Callable[[Removal], None] | None = None,
) -> RetentionResult:
    """Remove what a plan says, oldest first; look again at each before it goes.

    A checkpoint that is being read, was saved anew or tagged since, or has become a link is spared;
    so is every one when the newest sound checkpoint is no longer as it was. One that cannot be
    removed does not stop the others. `on_step` is called before each. Raises nothing itself: see
    `failed`. Cost per removal: two small files, one rename, the deletions.
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
    """Names of steps that are no checkpoints: never touched, but said."""
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


def _read_manifest(storage: Storage, directory: str) -> tuple[str, Manifest]:
    """Digest of the manifest's file, and the manifest."""
    path = f"{directory}/{MANIFEST}"
    if storage.size(path) > MAX_MANIFEST_NBYTES:
        raise CorruptionError(f"{storage.describe(path)}: larger than any manifest may be")
    data = storage.read(path)
    return digest128(data), decode_manifest(data, place=storage.describe(path))


def _read_step(storage: Storage, step: int, tags: Mapping[int, tuple[str, ...]]) -> _Committed:
    stamp, manifest = _read_manifest(storage, step_dir(step))
    if manifest.step != step:
        raise CorruptionError(f"its manifest is of step {manifest.step}")
    candidate = Candidate(
        step=step, created=manifest.created, parts=manifest.parts, tags=tags.get(step, ())
    )
    nbytes = manifest.totals.stored_nbytes
    return _Committed(stamp=stamp, candidate=candidate, stored_nbytes=nbytes)


def _remove(storage: Storage, plan: RetentionPlan, removal: Removal) -> str | None:
    """Remove one checkpoint, or say what stands against it."""
    directory = removal.directory
    if plan.newest is None or removal.step >= plan.newest:
        return "not older than the newest sound checkpoint"
    with mark_removing(storage, directory) as readers:
        if readers:
            return f"being read by {', '.join(readers)}"
        if not storage.exists(directory):
            return "gone already: somebody else removed it"
        if not storage.is_dir(directory):
            return "a link or a file: not followed"
        if _read_manifest(storage, directory)[0] != removal.stamp:
            return "saved anew since the plan was made"
        tags = set(_tags_of_steps(storage).get(removal.step, ())) - set(removal.tags)
        if tags:
            return f"tagged {', '.join(sorted(tags))} since the plan was made"
        if _read_manifest(storage, step_dir(plan.newest))[0] != plan.newest_stamp:
            return f"step {plan.newest}, which would be restarted from, has changed meanwhile"
        # Judged once more when it has lost its name: what goes is that, and no version saved since.
        storage.remove_tree(
            directory, only_if=lambda aside: _read_manifest(storage, aside)[0] == removal.stamp
        )
        if storage.exists(directory):
            return "saved again since the plan was made"
    return None


def _repoint(storage: Storage, gone: set[int]) -> None:
    """The pointer file must not name a step that has gone; another pointer is left alone."""
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

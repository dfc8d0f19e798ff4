"""Remove old checkpoints by a policy, and never the one from which a run would restart.

Whatever fails, these stay: the newest checkpoint that proves sound and everything newer (saves in
progress, damaged or uncommitted steps), unless the caller gives up what is above a step; then the
newest sound one up to that step stays. So does every checkpoint that is being read, that cannot be
judged, or that has changed since the plan was made. Links are never followed. A checkpoint is
renamed before it is removed, so that it is either whole or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.names import (
    LATEST,
    is_committed,
    list_steps,
    parse_step_dir,
    point_to_newest,
    step_dir,
)
from holdfast.format.reader import Snapshot
from holdfast.format.values import Node
from holdfast.format.versions import announce_removal, read_manifest, readers_of
from holdfast.retention.tags import list_tags, remove_tag
from holdfast.storage import Storage
from holdfast.storage.reading import for_each, is_unknown, read_at_most, sizes_below

_REMOVED_BY_ANOTHER = "another process removed it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint as a policy sees it: step, time, the trees of its values, its tags."""

    step: int
    created: str
    parts: Mapping[str, Node]
    tags: tuple[str, ...] = ()


class ChoosesKept(Protocol):
    """The method of a policy that a removal calls; `holdfast.policies.keep` has policies."""

    def keep(self, candidates: Sequence[Candidate], *, now: datetime) -> dict[int, str]:
        """Return step -> why it stays, for the steps that stay."""
        ...


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
    """The checkpoints that stay and those that go."""

    keep: Mapping[int, str]
    """Step -> why it stays."""
    remove: tuple[Removal, ...]
    """Oldest first."""
    spared: Mapping[str, str]
    """Directory -> why the policy does not decide on it: damaged, uncommitted, a link, …"""
    newest: int | None
    """The newest sound step (up to `after`), which always stays; if None, nothing is removed."""
    newest_stamp: str
    """Digest of the newest sound step's manifest."""
    after: int | None = None
    """The steps above this one are given up."""
    is_damaged: bool = False
    """Some step is spared because it is damaged."""
    has_unknown: bool = False
    """Some step is spared because it cannot be read now, in a way that says nothing of it."""

    def gives_up(self, step: int) -> bool:
        """Return True for a step that goes because it is above `after`."""
        return self.after is not None and step > self.after


@dataclass(slots=True, kw_only=True)
class RetentionResult:
    """The outcome of a plan."""

    removed: list[int] = field(default_factory=list)
    spared: dict[int, str] = field(default_factory=dict)
    """Step -> why it was not removed as planned."""
    failed: dict[int, str] = field(default_factory=dict)
    """Step -> why its removal failed."""
    is_damaged: bool = False
    """One of them failed because something stored is damaged."""
    pointer_problem: str | None = None
    """Why the pointer file may name a step that is gone; None if it does not."""


def prove_sound(storage: Storage, directory: str) -> str | None:
    """Return what is wrong with a checkpoint's records or file sizes, or None.

    Reads manifest and index, and no tensor; `verify_snapshot` checks every byte. Raises
    StorageError if it cannot be read in a way that says nothing of what is stored.
    """
    try:
        with Snapshot.open(storage, directory) as snapshot:
            # Of the version that was opened, whatever has its name by now.
            view, sizes = snapshot.storage, sizes_below(snapshot.storage, directory) or {}
            for name, stated in snapshot.manifest.file_sizes.items():
                nbytes = sizes[name] if name in sizes else view.size(f"{directory}/{name}")
                if nbytes != stated:
                    return f"{name} has {nbytes} bytes, the manifest states {stated}"
    except HoldfastError as error:
        if is_unknown(error):
            raise
        return str(error)
    return None


def plan_retention(
    storage: Storage,
    policy: ChoosesKept,
    *,
    now: datetime | None = None,
    saved: Callable[[], Collection[int]] = tuple,
    after: int | None = None,
) -> RetentionPlan:
    """Decide what stays and what goes; change nothing.

    Args:
        storage: The directory of checkpoints.
        policy: Policy that chooses among the newest sound step and older ones.
        now: The present time, for ages; by default this machine's.
        saved: Returns the steps that were saved just now, which stay whatever the policy chooses:
            a run that has gone back to an older step saves steps that are not among the newest.
            Called when the checkpoints have been listed, so that it knows of each save of them.
        after: Give up all steps above this one, tagged ones too, as a run that goes back does. If
            no checkpoint up to this step proves sound, nothing is removed.

    Raises:
        CorruptionError: A tag cannot be read, so that the step that it protects is unknown.
        StorageError: The directory cannot be listed, or it cannot be known which step is sound.

    Cost: every manifest once, the index of the newest step or steps.
    """
    if not storage.is_dir(""):
        return RetentionPlan(keep={}, remove=(), spared={}, newest=None, newest_stamp="")
    steps = list_steps(storage)
    spared = _not_committed(storage, set(steps))
    tags = _tags_of_steps(storage)
    given_up = [step for step in steps if after is not None and step > after]
    up_to = steps[: len(steps) - len(given_up)]
    newest = _newest_sound(storage, up_to, spared)
    # What was removed meanwhile does not prove sound either.
    unsound = (step for step in up_to if newest is None or step > newest)
    is_damaged = any(is_committed(storage, step) for step in unsound)
    has_unknown = False
    judged: dict[int, tuple[Candidate, Removal]] = {}

    def judge(step: int) -> tuple[Candidate, Removal] | HoldfastError:
        try:
            return _read_step(storage, step, tags.get(step, ()))
        except HoldfastError as error:
            return error

    for step, judgement in zip(steps, for_each(storage, judge, steps), strict=True):
        if isinstance(judgement, HoldfastError):
            spared.setdefault(step_dir(step), f"cannot be judged: {judgement}")
            is_damaged |= isinstance(judgement, CorruptionError)
            has_unknown |= is_unknown(judgement)
        else:
            judged[step] = judgement
    if newest is None or newest not in judged:
        for step in judged:
            where = "here" if after is None else f"up to step {after}"
            spared.setdefault(step_dir(step), f"no checkpoint {where} proves sound")
        return RetentionPlan(
            keep={},
            remove=(),
            spared=spared,
            newest=None,
            newest_stamp="",
            is_damaged=is_damaged,
            has_unknown=has_unknown,
        )
    old = [both for step, both in judged.items() if step <= newest]
    keep = policy.keep([candidate for candidate, _ in old], now=now or datetime.now(UTC))
    always = {newest: "the newest sound checkpoint"}
    for step in saved():
        if step in judged:
            always.setdefault(step, "saved just now")
    for step, reason in always.items():
        keep[step] = f"{reason}; {keep[step]}" if step in keep else reason
    return RetentionPlan(
        keep=dict(sorted(keep.items())),
        remove=tuple(
            removal
            for step, (_, removal) in judged.items()
            if step in given_up or (step <= newest and step not in keep)
        ),
        spared=spared,
        newest=newest,
        newest_stamp=judged[newest][1].stamp,
        after=after,
        is_damaged=is_damaged,
        has_unknown=has_unknown,
    )


def apply_retention(storage: Storage, plan: RetentionPlan) -> RetentionResult:
    """Remove the checkpoints of a plan, oldest first, and check each again before.

    A checkpoint is spared if it is being read, was saved again or tagged since the plan, or has
    become a link. All are spared if the newest sound checkpoint has changed. The tags of one that
    was given up go with it. A failed removal does not stop the others and is not raised: see
    `failed` of the result.

    Args:
        storage: The directory of checkpoints.
        plan: The result of `plan_retention`.

    Cost: for each removal two small files, one rename, and the deletions.
    """
    result = RetentionResult()
    for removal in plan.remove:
        try:
            obstacle = _remove(storage, plan, removal)
        except (HoldfastError, OSError) as error:
            result.failed[removal.step] = _why_failed(storage, removal, error)
            result.is_damaged |= isinstance(error, CorruptionError)
            continue
        if obstacle is not None:
            result.spared[removal.step] = obstacle
            continue
        result.removed.append(removal.step)
        try:
            if plan.gives_up(removal.step):  # the run will save another step of this number
                _untag(storage, removal)
        except (HoldfastError, OSError) as error:
            result.failed[removal.step] = f"it is gone, and a tag still names it: {error}"
            result.is_damaged |= isinstance(error, CorruptionError)
    gone = {*result.removed, *result.failed}
    if gone:
        try:
            _repoint(storage, gone)
        except (HoldfastError, OSError) as error:
            result.pointer_problem = str(error)
    return result


def _not_committed(storage: Storage, committed: set[int]) -> dict[str, str]:
    """Return names of steps that are not checkpoints, and why; they are only reported."""
    spared = {}
    for name in storage.list(""):
        step = parse_step_dir(name)
        if step is None or step in committed:
            continue
        is_dir = storage.is_dir(name)
        spared[name] = "not committed" if is_dir else "a link or a file: not followed"
    return spared


def _tags_of_steps(storage: Storage) -> dict[int, tuple[str, ...]]:
    """Return the tags of each step that has any."""
    tags: dict[int, tuple[str, ...]] = {}
    for name, step in list_tags(storage).items():
        tags[step] = (*tags.get(step, ()), name)
    return tags


def _newest_sound(storage: Storage, steps: list[int], spared: dict[str, str]) -> int | None:
    """Return the newest step that proves sound; add the newer ones to `spared`."""
    # Newest first, and no further than the first sound one: an index is large.
    for step in reversed(steps):
        problem = prove_sound(storage, step_dir(step))
        if problem is None:
            return step
        spared[step_dir(step)] = f"newer than the newest sound checkpoint, and damaged: {problem}"
    return None


def _stamp(storage: Storage, directory: str) -> str:
    """Return the digest of a manifest, by which a checkpoint is known to be the same."""
    return digest128(read_manifest(storage, directory)[0])


def _read_step(storage: Storage, step: int, tags: tuple[str, ...]) -> tuple[Candidate, Removal]:
    """Read the manifest of a step; return its candidate for policies and its removal."""
    data, manifest = read_manifest(storage, step_dir(step))
    removal = Removal(
        step=step,
        directory=step_dir(step),
        stamp=digest128(data),
        stored_nbytes=manifest.totals.stored_nbytes,
        tags=tags,
    )
    return Candidate(step=step, created=manifest.created, parts=manifest.parts, tags=tags), removal


def _remove(storage: Storage, plan: RetentionPlan, removal: Removal) -> str | None:
    """Remove one checkpoint, or return why it must not be removed."""
    directory = removal.directory
    newest = plan.newest
    if newest is None or (removal.step >= newest and not plan.gives_up(removal.step)):
        return "not older than the newest sound checkpoint"
    renamed: list[str] = []
    # Everything is checked after the announcement: a reader that comes later sees it and waits.
    with announce_removal(storage, directory) as readers:
        if readers:
            return f"being read by {', '.join(readers)}"
        if not storage.is_dir(directory):
            is_there = storage.exists(directory)
            return "a link or a file: not followed" if is_there else _REMOVED_BY_ANOTHER

        # Checked once more after it has lost its name: from here on no save can replace it and no
        # reader find it. A version saved between the check below and the renaming must not be
        # removed, nor one that a reader has opened. Tags after readers: who sets one has a lease
        # until the tag is there.
        def may_go(aside: str) -> bool:
            renamed.append(aside)
            readers.extend(readers_of(storage, directory))
            if not readers:
                tags.extend(_new_tags(storage, removal))
            return not (readers or tags) and _stamp(storage, aside) == removal.stamp

        try:
            if _stamp(storage, directory) != removal.stamp:
                return "saved again since the plan was made"
            if tags := _new_tags(storage, removal):
                return _tagged(tags)
            if _stamp(storage, step_dir(newest)) != plan.newest_stamp:
                return f"step {newest}, from which a run would restart, has changed since"
            storage.remove_tree(directory, only_if=may_go)
        except StorageError:
            # Two processes may remove old checkpoints, one of which finds this one gone between
            # two of these looks.
            if renamed or storage.exists(directory):
                raise
            return _REMOVED_BY_ANOTHER
        if readers:
            return f"being read by {', '.join(readers)}"
        if tags:
            return _tagged(tags)
        if storage.exists(directory):
            return "saved again since the plan was made"
    return None


def _new_tags(storage: Storage, removal: Removal) -> list[str]:
    """Return the tags that a checkpoint has got since its removal was planned."""
    return sorted(set(_tags_of_steps(storage).get(removal.step, ())) - set(removal.tags))


def _tagged(tags: Sequence[str]) -> str:
    return f"tagged {', '.join(tags)} since the plan was made"


def _why_failed(storage: Storage, removal: Removal, error: Exception) -> str:
    """Return why a removal failed, and whether the step is a checkpoint all the same."""
    is_there = True
    with suppress(HoldfastError):
        is_there = storage.exists(removal.directory)
    if is_there:
        return str(error)
    return (
        f"it is not a checkpoint any more, but files of it remain, which `holdfast repair` "
        f"removes when it may: {error}"
    )


def _untag(storage: Storage, removal: Removal) -> None:
    """Remove the tags of a step that is gone."""
    for tag in removal.tags:
        if list_tags(storage).get(tag) == removal.step:
            remove_tag(storage, tag)


def _repoint(storage: Storage, gone: set[int]) -> None:
    """Correct the pointer file if it names a step that is gone; other content is left alone."""
    if storage.exists(LATEST):
        text = read_at_most(storage, LATEST, 64).strip()
        if text.isdigit() and int(text) in gone:
            point_to_newest(storage)

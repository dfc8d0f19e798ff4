"""Leftovers of saves: finish or remove them, and leave saves alone that are alive."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.names import (
    LATEST,
    MANIFEST,
    claimed_dir,
    list_steps,
    parse_aside_dir,
    parse_replaced_dir,
    parse_saving_dir,
    point_to_newest,
    step_dir,
    unclaimed,
)
from holdfast.format.versions import (
    known_save_id,
    read_manifest,
    readers_of,
    retire,
    save_id_of,
)
from holdfast.retention.tags import TAGS_DIR
from holdfast.storage import Storage
from holdfast.storage.reading import is_locked, locking
from holdfast.storage.unnamed import STARTING_S
from holdfast.writer.commit import commit_save
from holdfast.writer.job import heartbeat
from holdfast.writer.outcomes import discard_save
from holdfast.writer.records import (
    DONE_DIR,
    FAILED_FILE,
    HEADER_FILE,
    PLAN_FILE,
    DoneRecord,
    SaveHeader,
    clear_heartbeats,
    decode_plan,
    done_file,
    missing_ranks,
    read_record,
    read_sealed,
    silent_s,
)

_PAUSE_S = 0.1
ALIVE_S = 30.0
"""Seconds without a heartbeat of any process, after which a save counts as abandoned."""

_UNLOCKED_S = 24 * 3600.0
"""Age at which a conversion counts as abandoned where no kernel knows who writes it."""

Fate = Literal["finished", "removed", "alive", "read", "kept", "unseen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    """How long a save may be silent and still counts as alive; 0 for a save that no one writes."""

    alive_s: float
    unlocked_s: float
    """If the kernel knows that no process has it locked."""

    def reason(self, storage: Storage, name: str) -> str:
        """Return why a save counts as alive; empty if it does not."""
        has_lock = is_locked(storage, name)
        if has_lock and self.alive_s > 0:
            return "a process has it locked"
        quiet_s = silent_s(storage, name)
        limit_s = self.unlocked_s if has_lock is False else self.alive_s
        return f"last heartbeat {quiet_s:.0f} s ago" if quiet_s < limit_s else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One leftover and what was done with it, or would be in a dry run.

    Args:
        name: Name of the directory or file under the root.
        step: The step in its name.
        fate: "finished" or "removed"; "alive" or "read" if it was left alone for its owner or its
            readers; "kept" if it cannot be removed; "unseen" if it cannot be looked at.
        why: The reason, for people.
        is_damaged: It is kept because something stored is damaged; otherwise an operation failed.
    """

    name: str
    step: int | None
    fate: Fate
    why: str
    is_damaged: bool = False


def repair(storage: Storage, *, alive_s: float = ALIVE_S, dry_run: bool = False) -> list[Leftover]:
    """Finish, remove or leave everything under the root that a save made and did not commit.

    A save is left alone if any of its processes had a heartbeat within `alive_s`, by the storage's
    clock. Otherwise it is committed if it has all done-records, and removed if not. Half-removed
    directories, files that never got their name, and replaced versions without readers are removed
    too. A committed checkpoint is not touched, unless a later, complete save was to replace it. A
    checkpoint that lost its name in an interrupted replacement gets it back. The pointer file is
    replaced if it does not name the newest committed step. Safe to run at any time and again, also
    while jobs save, load and remove here.
    """
    leftovers = _treat_all(storage, alive_s=alive_s, dry_run=dry_run)
    return [*leftovers, *_treat_pointer(storage, dry_run=dry_run)]


def repair_root(storage: Storage) -> list[int]:
    """Do what `repair` does, before the first save of a process; return the committed steps."""
    _treat_all(storage, alive_s=ALIVE_S, dry_run=False)
    steps = list_steps(storage)
    _treat_pointer(storage, steps=steps, dry_run=False)
    return steps


def _treat_all(storage: Storage, *, alive_s: float, dry_run: bool) -> list[Leftover]:
    """Treat every leftover under the root but the pointer file."""
    leftovers = []
    patience = _Patience(alive_s=alive_s, unlocked_s=alive_s)
    for name in storage.list(""):
        leftovers += _look(storage, name, patience, dry_run=dry_run)
    # A bucket has no temporary files, and to look for them is a request.
    is_local = storage.local_path(TAGS_DIR) is not None
    for name in storage.list(TAGS_DIR) if is_local and storage.is_dir(TAGS_DIR) else ():
        if name.startswith(".tmp-"):
            path = f"{TAGS_DIR}/{name}"
            leftovers += _treat_file(storage, path, alive_s=alive_s, dry_run=dry_run)
    if not dry_run:
        clear_heartbeats(storage)
    return [*leftovers, *_collect(storage, dry_run=dry_run)]


def _collect(storage: Storage, *, dry_run: bool) -> list[Leftover]:
    """Remove data that no name stands for, where names and data are two things (a bucket)."""
    collect = getattr(storage, "collect_garbage", None)
    if collect is None:
        return []
    try:
        removed, problem = collect(dry_run=dry_run)
    except (StorageError, CorruptionError) as error:
        is_damaged = isinstance(error, CorruptionError)
        return [
            Leftover(
                name="data without a name", step=None, fate="kept", why=str(error),
                is_damaged=is_damaged,
            )
        ]  # fmt: skip
    leftovers = [Leftover(name=n, step=None, fate="removed", why=why) for n, why in removed.items()]
    if problem:
        why = f"{problem}; a lifecycle rule of the bucket removes them (see docs/object-stores.md)"
        leftovers.append(Leftover(name="unfinished uploads", step=None, fate="unseen", why=why))
    return leftovers


def give_up(storage: Storage, *, after: int, dry_run: bool = False) -> list[Leftover]:
    """Remove the saves above a step that no process continues, complete ones, too.

    Otherwise the next load would commit those, as the newest steps. So are versions removed that an
    interrupted replacement or removal took the name from: a load would give it back. What is alive
    is left alone.
    """
    patience = _Patience(alive_s=ALIVE_S, unlocked_s=STARTING_S)
    leftovers = []
    why = f"above step {after}"
    for name in storage.list(""):
        step, save_id = parse_saving_dir(name) or (parse_aside_dir(name), "")
        if step is None or step <= after or not storage.is_dir(name):
            continue
        try:
            if save_id:
                alive = patience.reason(storage, name)
            else:
                alive = _why_to_be_replaced(storage, step, patience)
            is_save = bool(save_id) and known_save_id(storage, step_dir(step)) != unclaimed(save_id)
            if alive:
                leftovers.append(Leftover(name=name, step=step, fate="alive", why=alive))
            elif is_save:
                leftovers.append(_remove(storage, name, step, why, dry_run))
            else:  # an older version, which may be read
                leftovers.append(_retire(storage, name, step, why, dry_run))
                if not dry_run:
                    storage.sync_dir("")
        except HoldfastError as error:
            leftovers.append(_stuck(storage, name, step, error))
    return leftovers


def wait_for_writers(storage: Storage, *, alive_s: float, timeout_s: float) -> list[str] | None:
    """Wait for writers that outlived their run, and commit the saves that they left complete.

    Returns the names under the root as the last look has shown them, None if they may be others by
    now. Returns at once if nothing is being written, or was given to a writer that is about to, and
    after `timeout_s` at the latest. Removes nothing, because it waits only shortly. A read-only
    storage is left as it is.

    Args:
        storage: The directory of checkpoints.
        alive_s: Where the kernel does not know whether a save has a writer, one that is silent for
            so long has none. Where it knows, only a save that may just be starting is waited for.
        timeout_s: The limit of the whole wait.
    """
    deadline = time.monotonic() + timeout_s
    patience = _Patience(alive_s=alive_s, unlocked_s=min(alive_s, STARTING_S))
    has_finished = False
    while True:
        # Before the look at what has begun, which is what comes after it.
        is_to_begin = bool(is_locked(storage, ""))
        names = storage.list("")
        leftovers = [
            each
            for name in names
            if not name.startswith(".tmp-")
            for each in _look(storage, name, patience, dry_run=True)
        ]
        # A writer that has been given a save, and has not begun it, has the root locked.
        if is_to_begin or any(each.fate == "alive" for each in leftovers):
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)
            continue
        # Another process may do the same: then its lock is seen in the next look, and waited for.
        done = [
            result.fate
            for each in leftovers
            if each.fate == "finished"
            for result in _look(storage, each.name, patience, dry_run=False)
        ]
        has_finished = has_finished or "finished" in done
        # One that was there a moment ago has another name now: this one says more.
        is_gone = len(done) < sum(each.fate == "finished" for each in leftovers)
        is_over = not (is_gone or {"finished", "alive"}.intersection(done))
        if is_over or time.monotonic() > deadline:
            break
    if has_finished:
        _treat_pointer(storage, dry_run=False)
    return names if is_over else None


def _look(storage: Storage, name: str, patience: _Patience, *, dry_run: bool) -> list[Leftover]:
    """Treat one name under the root; the result is empty if it is not a leftover."""
    if name.startswith(".tmp-"):
        return _treat_file(storage, name, alive_s=patience.alive_s, dry_run=dry_run)
    step = parse_aside_dir(name)
    if step is not None and storage.is_dir(name):
        return [_put_back(storage, name, step, patience, dry_run=dry_run)]
    if name.startswith((".trash-", ".old-")):
        return [_remove(storage, name, None, "half removed", dry_run)]
    step = parse_replaced_dir(name)
    if step is not None and storage.is_dir(name):
        return [_retire(storage, name, step, "replaced", dry_run)]
    parsed = parse_saving_dir(name)
    if parsed is not None and storage.is_dir(name):
        return [_treat(storage, name, *parsed, patience, dry_run=dry_run)]
    return []


def _treat(
    storage: Storage, name: str, step: int, save_id: str, patience: _Patience, *, dry_run: bool
) -> Leftover:
    """Finish, remove or leave one save in progress."""
    try:
        if known_save_id(storage, step_dir(step)) == unclaimed(save_id):
            return _retire(storage, name, step, "its save is committed", dry_run)
        if storage.exists(f"{name}/{FAILED_FILE}"):
            return _remove(storage, name, step, "its save failed", dry_run)
        alive = patience.reason(storage, name)
        try:
            why = _why_not(storage, name, step)
        except HoldfastError as error:
            if not alive:
                raise
            why = str(error)  # its owner is committing it: files come and go
        if alive:
            return Leftover(name=name, step=step, fate="alive", why=f"{why or 'complete'}, {alive}")
        if why:
            return _remove(storage, name, step, f"abandoned: {why}", dry_run)
        if dry_run:
            return Leftover(name=name, step=step, fate="finished", why="all records are present")
        return _finish(storage, name, step)
    except HoldfastError as error:
        return _stuck(storage, name, step, error)


def _stuck(storage: Storage, name: str, step: int, error: HoldfastError) -> Leftover:
    """Report a leftover for which an operation failed."""
    if not storage.exists(name):
        return Leftover(name=name, step=step, fate="finished", why="another process finished it")
    is_damaged = isinstance(error, CorruptionError)
    return Leftover(name=name, step=step, fate="kept", why=str(error), is_damaged=is_damaged)


def _retire(storage: Storage, name: str, step: int, why: str, dry_run: bool) -> Leftover:
    """Remove a replaced version, unless it has readers."""
    try:
        if dry_run:
            version = save_id_of(storage, name)
            readers = ", ".join(readers_of(storage, step_dir(step), save_id=version))
        else:
            # Until the replacement is durable, a crash may leave this as the only version.
            storage.sync_dir("")
            readers = retire(storage, name, step)
    except StorageError as error:
        return _stuck(storage, name, step, error)
    if readers:
        return Leftover(name=name, step=step, fate="read", why=f"{why}, but read by {readers}")
    return Leftover(name=name, step=step, fate="removed", why=why)


def _put_back(
    storage: Storage, name: str, step: int, patience: _Patience, *, dry_run: bool
) -> Leftover:
    """Give a version its name back that an interrupted replacement or removal took from it.

    If the file system cannot exchange names, a replacement is several renames. Between two of them
    the step has no version under its name.
    """
    final = step_dir(step)
    try:
        if known_save_id(storage, final) is not None:
            return _retire(storage, name, step, "replaced", dry_run)
        if why := _why_to_be_replaced(storage, step, patience):
            return Leftover(name=name, step=step, fate="alive", why=why)
        if _has_no_data(storage, name):
            return _remove(storage, name, step, "half removed", dry_run)
        if not dry_run:
            storage.rename_dir(name, final)
    except StorageError as error:
        return _stuck(storage, name, step, error)
    return Leftover(
        name=name, step=step, fate="finished", why="its replacement or removal was interrupted"
    )


def _why_to_be_replaced(storage: Storage, step: int, patience: _Patience) -> str:
    """Return which save in progress is about to replace the version of a step; empty if none is."""
    for name in storage.list(""):
        parsed = parse_saving_dir(name)
        if parsed is not None and parsed[0] == step and (alive := patience.reason(storage, name)):
            return f"{name} is to replace it, {alive}"
    return ""


def _has_no_data(storage: Storage, name: str) -> bool:
    """Return True if all data files of a checkpoint are gone.

    In a bucket a request that comes late may write a name again after the removal, with manifest
    and index in it.
    """
    try:
        files = read_manifest(storage, name)[1].file_sizes
    except CorruptionError:
        return False
    return bool(files) and not any(storage.exists(f"{name}/{file}") for file in files)


def _treat_pointer(
    storage: Storage, *, dry_run: bool, steps: Sequence[int] | None = None
) -> list[Leftover]:
    """Correct the pointer, after a save that failed to replace it or a removal by hand."""
    try:
        step = point_to_newest(storage, steps=steps, dry_run=dry_run)
    except StorageError as error:
        return [Leftover(name=LATEST, step=None, fate="kept", why=str(error))]
    if step is None:
        return []
    return [Leftover(name=LATEST, step=step, fate="finished", why="it named another step")]


def _treat_file(storage: Storage, name: str, *, alive_s: float, dry_run: bool) -> list[Leftover]:
    """Remove a temporary file of a dead process; a living one renames it in an instant.

    A directory is that of a conversion, which may write for hours, and keeps it locked.
    """
    try:
        age_s = storage.age_s(name)
        has_lock = is_locked(storage, name) if storage.is_dir(name) else False
    except StorageError:
        return []
    if has_lock and alive_s > 0:
        return [Leftover(name=name, step=None, fate="alive", why="a process has it locked")]
    if has_lock is None and alive_s > 0:
        alive_s = max(alive_s, _UNLOCKED_S)
    if age_s < alive_s:
        why = f"made {age_s:.0f} s ago; it may be about to get its name"
        return [Leftover(name=name, step=None, fate="alive", why=why)]
    return [_remove(storage, name, None, "it never got its name", dry_run)]


def _finish(storage: Storage, name: str, step: int) -> Leftover:
    """Commit a save whose records are complete.

    The directory is renamed first. So a process of the save that was only slow finds it gone, and
    no other repair finishes it at the same time.
    """
    claimed = claimed_dir(name, secrets.token_hex(4))
    with locking(storage, name):
        storage.rename_dir(name, claimed, durable=False)
        # It may have to read all data: meanwhile no repair on another host takes it for abandoned.
        with heartbeat(storage, claimed, position=0):
            return _commit_claimed(storage, name, claimed, step)


def _commit_claimed(storage: Storage, name: str, claimed: str, step: int) -> Leftover:
    """Commit a save under the name by which this process has claimed it."""
    try:
        data = read_record(storage, f"{claimed}/{PLAN_FILE}")
        plan = decode_plan(data, where=storage.describe(f"{claimed}/{PLAN_FILE}"))
        header = read_sealed(storage, f"{claimed}/{HEADER_FILE}", SaveHeader)
        commit_save(storage, claimed, plan=plan, header=header, is_repair=True)
    except StorageError as error:
        with suppress(StorageError):
            storage.rename_dir(claimed, name, durable=False)
        return Leftover(name=name, step=step, fate="kept", why=str(error))
    except HoldfastError as error:
        discard_save(storage, claimed)
        return Leftover(name=name, step=step, fate="removed", why=f"cannot be committed: {error}")
    return Leftover(name=name, step=step, fate="finished", why="all records were present")


def _why_not(storage: Storage, name: str, step: int) -> str:
    """Return why a save cannot be committed; empty if it can be."""
    try:
        return _why_incomplete(storage, name) or _why_superseded(storage, name, step)
    except CorruptionError as error:
        return str(error)


def _why_superseded(storage: Storage, name: str, step: int) -> str:
    """Return why a save must not replace the committed version of its step, if so."""
    final = f"{step_dir(step)}/{MANIFEST}"
    if not storage.exists(final):
        return ""
    path = f"{name}/{HEADER_FILE}"
    header = read_sealed(storage, path, SaveHeader)
    if not header.overwrite:
        return f"step {step} was committed by another save"
    # By times only where it is not known what the save replaces: in a bucket, which has one clock,
    # and for a save of an earlier release. The age of the committed one is taken first: if the
    # times are equal, it counts as newer.
    if header.replaces is None:
        is_later = storage.age_s(final) <= storage.age_s(path)
    else:
        # Never by an answer that did not come: a save that is complete would be removed.
        is_later = known_save_id(storage, step_dir(step)) != header.replaces
    return f"step {step} was saved again later" if is_later else ""


def _why_incomplete(storage: Storage, name: str) -> str:
    """Return what a save lacks to be committed; empty if it is complete."""
    for path in (PLAN_FILE, HEADER_FILE):
        if not storage.exists(f"{name}/{path}"):
            return f"{path} was not written"
    data = read_record(storage, f"{name}/{PLAN_FILE}")
    plan = decode_plan(data, where=storage.describe(f"{name}/{PLAN_FILE}")).plan
    has_records = storage.is_dir(f"{name}/{DONE_DIR}")
    names = storage.list(f"{name}/{DONE_DIR}") if has_records else []
    # Each by itself, too: a listing may be of an earlier moment than what is removed by it.
    missing = [
        rank
        for rank in missing_ranks(names, plan.ranks)
        if not storage.exists(f"{name}/{done_file(plan.ranks.index(rank))}")
    ]
    if missing:
        return f"ranks {missing} did not finish writing"
    for position, rank in enumerate(plan.ranks):
        record = read_sealed(storage, f"{name}/{done_file(position)}", DoneRecord)
        file = f"{name}/{record.file}"
        if record.file is not None and not (
            storage.exists(file) and storage.size(file) == record.nbytes
        ):
            return f"{record.file} of rank {rank} has another size than the rank wrote"
    return ""


def _remove(storage: Storage, name: str, step: int | None, why: str, dry_run: bool) -> Leftover:
    """Remove one leftover, unless this is a dry run."""
    if not dry_run:
        try:
            storage.remove_tree(name)
        except StorageError as error:
            if storage.exists(name):
                return Leftover(name=name, step=step, fate="kept", why=str(error))
    return Leftover(name=name, step=step, fate="removed", why=why)

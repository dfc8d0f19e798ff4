"""Leftovers of saves: finish what can be finished, remove what cannot, leave what is alive."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.names import (
    LATEST,
    MANIFEST,
    claimed_dir,
    parse_aside_dir,
    parse_replaced_dir,
    parse_saving_dir,
    step_dir,
    unclaimed,
)
from holdfast.format.versions import readers_of, retire, save_id_of
from holdfast.storage import Storage
from holdfast.writer.commit import commit_save, point_to_newest
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
    silent_s,
    unseal,
)

_PAUSE_S = 0.1
ALIVE_S = 30.0
"""A save without a heartbeat of any of its processes for so long is abandoned."""

Fate = Literal["finished", "removed", "alive", "read", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One leftover and what was (or would be) done with it.

    Args:
        name: of the directory or file, under the root.
        step: that its name states.
        fate: "finished", "removed"; left alone because its owner is "alive" or it is being "read";
            "kept" because nothing could be done.
        why: in words.
    """

    name: str
    step: int | None
    fate: Fate
    why: str


def repair(storage: Storage, *, alive_s: float = ALIVE_S, dry_run: bool = False) -> list[Leftover]:
    """Go through everything under the root that is no checkpoint but was made by a save.

    A save with all its done-records is committed now; one with a heartbeat of any of its processes
    within `alive_s`, by the storage's clock, is left alone; any other is removed, as are
    half-removed directories, files that were never given their name, and replaced versions that
    nobody reads any more. A committed checkpoint is not touched, unless a complete save that began
    after it was to replace it; one that an interrupted replacement left without its name gets it
    back. A pointer file that does not name the newest committed step is replaced. Safe to run
    while jobs save, load and remove here, and at any time again.
    """
    leftovers = []
    for name in storage.list(""):
        leftovers += _look(storage, name, alive_s=alive_s, dry_run=dry_run)
    if not dry_run:
        clear_heartbeats(storage)
    return [*leftovers, *_treat_pointer(storage, dry_run=dry_run)]


def wait_for_writers(storage: Storage, *, alive_s: float, timeout_s: float) -> None:
    """Wait while writers that outlived their run finish a save; finish what they left complete.

    Returns at once where nothing is being written, and after `timeout_s` at the latest. Removes
    nothing: `alive_s` is short here. A storage that cannot be written to is left as it is.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        leftovers = [
            each
            for name in storage.list("")
            for each in _look(storage, name, alive_s=alive_s, dry_run=True)
            if not name.startswith(".tmp-")
        ]
        if not any(each.fate == "alive" for each in leftovers):
            break
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_S)
    complete = [each.name for each in leftovers if each.fate == "finished"]
    for name in complete:
        _look(storage, name, alive_s=alive_s, dry_run=False)
    if complete:
        _treat_pointer(storage, dry_run=False)


def _look(storage: Storage, name: str, *, alive_s: float, dry_run: bool) -> list[Leftover]:
    """What is done with one name under the root; nothing for one that is no leftover."""
    if name.startswith(".tmp-"):
        return _treat_file(storage, name, alive_s=alive_s, dry_run=dry_run)
    step = parse_aside_dir(name)
    if step is not None and storage.is_dir(name):
        return [_put_back(storage, name, step, alive_s=alive_s, dry_run=dry_run)]
    if name.startswith((".trash-", ".old-")):
        return [_remove(storage, name, None, "half removed", dry_run)]
    step = parse_replaced_dir(name)
    if step is not None and storage.is_dir(name):
        return [_retire(storage, name, step, "replaced", dry_run)]
    parsed = parse_saving_dir(name)
    if parsed is not None and storage.is_dir(name):
        return [_treat(storage, name, *parsed, alive_s=alive_s, dry_run=dry_run)]
    return []


def _treat(
    storage: Storage, name: str, step: int, save_id: str, *, alive_s: float, dry_run: bool
) -> Leftover:
    """Finish, remove or leave one save in progress."""
    try:
        if save_id_of(storage, step_dir(step)) == unclaimed(save_id):
            return _retire(storage, name, step, "its save is committed", dry_run)
        if storage.exists(f"{name}/{FAILED_FILE}"):
            return _remove(storage, name, step, "its save failed", dry_run)
        quiet_s = silent_s(storage, name)
        why = _why_not(storage, name, step)
        if quiet_s < alive_s:
            why_alive = f"{why or 'complete'}, last heartbeat {quiet_s:.0f} s ago"
            return Leftover(name=name, step=step, fate="alive", why=why_alive)
        if why:
            return _remove(storage, name, step, f"abandoned: {why}", dry_run)
        if dry_run:
            return Leftover(name=name, step=step, fate="finished", why="all records are there")
        return _finish(storage, name, step)
    except StorageError as error:
        return _stuck(storage, name, step, error)


def _stuck(storage: Storage, name: str, step: int, error: StorageError) -> Leftover:
    """What is reported of a leftover with which nothing could be done."""
    if not storage.exists(name):
        return Leftover(name=name, step=step, fate="finished", why="another process did it")
    return Leftover(name=name, step=step, fate="kept", why=str(error))


def _retire(storage: Storage, name: str, step: int, why: str, dry_run: bool) -> Leftover:
    """A version that was replaced: it goes once nobody reads it."""
    try:
        if dry_run:
            version = save_id_of(storage, name)
            readers = ", ".join(readers_of(storage, step_dir(step), save_id=version))
        else:
            storage.sync_dir("")  # this may be all there is if the replacement is not durable
            readers = retire(storage, name, step)
    except StorageError as error:
        return _stuck(storage, name, step, error)
    if readers:
        return Leftover(name=name, step=step, fate="read", why=f"{why}, but read by {readers}")
    return Leftover(name=name, step=step, fate="removed", why=why)


def _put_back(storage: Storage, name: str, step: int, *, alive_s: float, dry_run: bool) -> Leftover:
    """A version that lost its name to another one, by renames, because no exchange was to be had.

    Where those were interrupted between the two, the step has no version under its name.
    """
    final = step_dir(step)
    try:
        if save_id_of(storage, final) is not None:
            return _retire(storage, name, step, "replaced", dry_run)
        for other in storage.list(""):
            parsed = parse_saving_dir(other)
            if parsed is None or parsed[0] != step:
                continue
            if (quiet_s := silent_s(storage, other)) < alive_s:
                why = f"{other} is to replace it, last heartbeat {quiet_s:.0f} s ago"
                return Leftover(name=name, step=step, fate="alive", why=why)
        if not dry_run:
            storage.rename_dir(name, final)
    except StorageError as error:
        return _stuck(storage, name, step, error)
    return Leftover(
        name=name, step=step, fate="finished", why="its replacement or removal was interrupted"
    )


def _treat_pointer(storage: Storage, *, dry_run: bool) -> list[Leftover]:
    """The pointer of a save that could not replace it, or of checkpoints removed by hand."""
    try:
        step = point_to_newest(storage, dry_run=dry_run)
    except StorageError as error:
        return [Leftover(name=LATEST, step=None, fate="kept", why=str(error))]
    if step is None:
        return []
    return [Leftover(name=LATEST, step=step, fate="finished", why="it named another step")]


def _treat_file(storage: Storage, name: str, *, alive_s: float, dry_run: bool) -> list[Leftover]:
    """A temporary file of a replacement: gone in an instant, unless its process is."""
    try:
        age_s = storage.age_s(name)
    except StorageError:
        return []
    if age_s < alive_s:
        why = f"made {age_s:.0f} s ago, and may be about to get its name"
        return [Leftover(name=name, step=None, fate="alive", why=why)]
    return [_remove(storage, name, None, "never given its name", dry_run)]


def _finish(storage: Storage, name: str, step: int) -> Leftover:
    """Commit a save whose records are all there.

    Under a name of its own: a process of the save that was only slow finds its directory gone, and
    nobody else finishes it at the same time.
    """
    claimed = claimed_dir(name, secrets.token_hex(4))
    storage.rename_dir(name, claimed, durable=False)
    try:
        data = storage.read(f"{claimed}/{PLAN_FILE}")
        plan = decode_plan(data, where=storage.describe(f"{claimed}/{PLAN_FILE}"))
        path = f"{claimed}/{HEADER_FILE}"
        header = unseal(storage.read(path), SaveHeader, where=storage.describe(path))
        commit_save(storage, claimed, plan=plan, header=header)
    except StorageError as error:
        with suppress(StorageError):
            storage.rename_dir(claimed, name, durable=False)
        return Leftover(name=name, step=step, fate="kept", why=str(error))
    except HoldfastError as error:
        discard_save(storage, claimed)
        return Leftover(name=name, step=step, fate="removed", why=f"cannot be committed: {error}")
    return Leftover(name=name, step=step, fate="finished", why="all records were there")


def _why_not(storage: Storage, name: str, step: int) -> str:
    """Why a save cannot be committed; empty if it can be."""
    try:
        return _why_incomplete(storage, name) or _why_superseded(storage, name, step)
    except CorruptionError as error:
        return str(error)


def _why_superseded(storage: Storage, name: str, step: int) -> str:
    """Whether its step was committed by another save since, which it must not replace."""
    final = f"{step_dir(step)}/{MANIFEST}"
    if not storage.exists(final):
        return ""
    path = f"{name}/{HEADER_FILE}"
    header = unseal(storage.read(path), SaveHeader, where=storage.describe(path))
    if not header.overwrite:
        return f"step {step} was committed by another save"
    # The committed one is looked at first: of equal times, it counts as the newer.
    if storage.age_s(final) <= storage.age_s(path):
        return f"step {step} was saved again since"
    return ""


def _why_incomplete(storage: Storage, name: str) -> str:
    """What a save lacks to be committed; empty for nothing."""
    for path in (PLAN_FILE, HEADER_FILE):
        if not storage.exists(f"{name}/{path}"):
            return f"{path} was not written"
    data = storage.read(f"{name}/{PLAN_FILE}")
    plan = decode_plan(data, where=storage.describe(f"{name}/{PLAN_FILE}")).plan
    has_records = storage.is_dir(f"{name}/{DONE_DIR}")
    present = set(storage.list(f"{name}/{DONE_DIR}")) if has_records else set()
    missing = [
        plan.ranks[position]
        for position in range(len(plan.ranks))
        if done_file(position).rpartition("/")[2] not in present
    ]
    if missing:
        return f"ranks {missing} did not finish writing"
    for position, rank in enumerate(plan.ranks):
        path = f"{name}/{done_file(position)}"
        record = unseal(storage.read(path), DoneRecord, where=storage.describe(path))
        file = f"{name}/{record.file}"
        if record.file is not None and not (
            storage.exists(file) and storage.size(file) == record.nbytes
        ):
            return f"{record.file} of rank {rank} is not what the rank wrote"
    return ""


def _remove(storage: Storage, name: str, step: int | None, why: str, dry_run: bool) -> Leftover:
    """Remove one leftover."""
    if not dry_run:
        try:
            storage.remove_tree(name)
        except StorageError as error:
            if storage.exists(name):
                return Leftover(name=name, step=step, fate="kept", why=str(error))
    return Leftover(name=name, step=step, fate="removed", why=why)

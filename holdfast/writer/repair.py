"""Leftovers of saves: finish what can be finished, remove what cannot, leave what is alive."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import CorruptionError, HoldfastError, StorageError
from holdfast.format.digest import digest128
from holdfast.format.names import LATEST, MANIFEST, parse_saving_dir, step_dir
from holdfast.storage import Storage
from holdfast.writer.commit import (
    commit_save,
    committed_save_id,
    discard_save,
    point_to_newest,
)
from holdfast.writer.records import (
    ALIVE_FILE,
    DONE_DIR,
    FAILED_FILE,
    HEADER_FILE,
    PLAN_FILE,
    SaveHeader,
    decode_plan,
    done_file,
    unseal,
)

_PAUSE_S = 0.1
ALIVE_S = 30.0
"""A save whose committer has given no sign for so long is abandoned."""

Fate = Literal["finished", "removed", "alive", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One leftover and what was (or would be) done with it."""

    name: str
    step: int | None
    fate: Fate
    why: str


def repair(storage: Storage, *, alive_s: float = ALIVE_S, dry_run: bool = False) -> list[Leftover]:
    """Go through everything under the root that is no checkpoint but was made by a save.

    A save with all its done-records is committed now; one whose committer gave a sign of life
    within `alive_s` is left alone; any other is removed, as are half-removed directories and files
    that were never given their name. A committed checkpoint is not touched, unless a complete save
    that began after it was to replace it. A pointer file that does not name the newest committed
    step is replaced. Safe to run beside a training job, and at any time again.
    """
    found = []
    for name in storage.list(""):
        if name.startswith((".trash-", ".old-")):
            found.append(_remove(storage, name, None, "half removed", dry_run))
            continue
        if name.startswith(".tmp-"):
            found += _treat_file(storage, name, alive_s=alive_s, dry_run=dry_run)
            continue
        parsed = parse_saving_dir(name)
        if parsed is not None and storage.is_dir(name):
            found.append(_treat(storage, name, *parsed, alive_s=alive_s, dry_run=dry_run))
    return [*found, *_treat_pointer(storage, dry_run=dry_run)]


def settle(storage: Storage, *, alive_s: float, timeout_s: float) -> None:
    """Wait while writers that outlived their run finish a save; finish what they left complete.

    Returns at once where nothing is under way, and after `timeout_s` at the latest. A storage that
    cannot be written to is left as it is.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = repair(storage, alive_s=alive_s, dry_run=True)
        fates = {each.fate for each in found if each.name != LATEST}
        if "alive" not in fates:
            break
        if time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_S)
    if "finished" in fates:
        repair(storage, alive_s=alive_s)


def _treat(
    storage: Storage, name: str, step: int, save_id: str, *, alive_s: float, dry_run: bool
) -> Leftover:
    try:
        if committed_save_id(storage, step_dir(step)) == save_id:
            if not dry_run:
                storage.sync_dir("")  # this may be all there is if the replacement is not durable
            return _remove(storage, name, step, "its save is committed", dry_run)
        if storage.exists(f"{name}/{FAILED_FILE}"):
            return _remove(storage, name, step, "its save failed", dry_run)
        quiet_s = _quiet_s(storage, name)
        why = _why_not(storage, name, step)
        if quiet_s < alive_s:
            sign = f"last sign {quiet_s:.0f} s ago"
            return Leftover(name=name, step=step, fate="alive", why=f"{why or 'complete'}, {sign}")
        if why:
            return _remove(storage, name, step, f"abandoned: {why}", dry_run)
        if dry_run:
            return Leftover(name=name, step=step, fate="finished", why="all records are there")
        return _finish(storage, name, step)
    except StorageError as error:
        if not storage.exists(name):
            return Leftover(name=name, step=step, fate="finished", why="another process did it")
        return Leftover(name=name, step=step, fate="kept", why=str(error))


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
        return []
    return [_remove(storage, name, None, "never given its name", dry_run)]


def _finish(storage: Storage, name: str, step: int) -> Leftover:
    """Commit a save whose records are all there."""
    try:
        data = storage.read(f"{name}/{PLAN_FILE}")
        plan = decode_plan(data, where=storage.describe(f"{name}/{PLAN_FILE}"))
        path = f"{name}/{HEADER_FILE}"
        header = unseal(storage.read(path), SaveHeader, where=storage.describe(path))
        commit_save(storage, name, plan=plan, plan_digest=digest128(data), header=header)
    except StorageError:
        raise
    except HoldfastError as error:
        discard_save(storage, name)
        return Leftover(name=name, step=step, fate="removed", why=f"cannot be committed: {error}")
    return Leftover(name=name, step=step, fate="finished", why="all records were there")


def _why_not(storage: Storage, name: str, step: int) -> str:
    """What stands against committing a save; empty for nothing."""
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
    plan = decode_plan(data, where=storage.describe(f"{name}/{PLAN_FILE}"))
    present = set(storage.list(f"{name}/{DONE_DIR}"))
    missing = [
        plan.ranks[position]
        for position in range(len(plan.ranks))
        if done_file(position).rpartition("/")[2] not in present
    ]
    return f"ranks {missing} did not finish writing" if missing else ""


def _quiet_s(storage: Storage, name: str) -> float:
    """Seconds since the committer's last sign of life, or since the directory was made.

    By the storage's clock or by the committer's, whichever says less: the clock of a file server
    may be minutes off, and may count in seconds.
    """
    path = f"{name}/{ALIVE_FILE}"
    if not storage.exists(path):
        return storage.age_s(name)
    quiet_s = storage.age_s(path)
    with suppress(ValueError, StorageError):
        quiet_s = min(quiet_s, max(time.time() - float(storage.read(path)), 0.0))
    return quiet_s


def _remove(storage: Storage, name: str, step: int | None, why: str, dry_run: bool) -> Leftover:
    if not dry_run:
        try:
            storage.remove_tree(name)
        except StorageError as error:
            if storage.exists(name):
                return Leftover(name=name, step=step, fate="kept", why=str(error))
    return Leftover(name=name, step=step, fate="removed", why=why)

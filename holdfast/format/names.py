"""Names on disk: steps, saves in progress, records, data files, and the pointer.

A step is committed if its directory has its final name and holds a manifest. Nothing else counts,
least of all the pointer file, which is for people and other tools.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from holdfast.errors import ConfigError, StorageError, counted
from holdfast.storage import Storage
from holdfast.storage.reading import is_unknown, read_tail

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
DATA_DIR = "data"
OTHER_FILES = "other_files"
"""Entry of a checkpoint's metadata: names of files in its directory that other programs need and
that are made from it after the commit. `verify` expects them, and does not read them."""
LATEST = "latest_checkpointed_iteration.txt"
ROOT_ID = ".root-id"
FAULT_CHECKPOINTS = "checkpoints"
"""The root of fault checkpoints, below a rerun machine's directory."""
RANK_LOG_DIR = "events"
"""The logs of a run's ranks, below the root of its checkpoints."""
SAVING_PREFIX = ".saving-"
REPLACED_PREFIX = ".replaced-"

UpdateFile = Callable[[str, Callable[[bytes | None], bytes | None]], bool]
"""`update_file` of a storage; see `ObjectStorage`."""

_NUM_LOOKS = 3
_NUM_LISTINGS = 20
_MAX_ABOVE = 3
_MAX_NAMED = 8
_STEP = re.compile(r"iter_([0-9]{7,18})", re.ASCII)
_SAVING = re.compile(r"\.saving-(iter_[0-9]{7,18})-([0-9A-Za-z_.]{1,64})", re.ASCII)
_ASIDE = re.compile(r"\.old-(iter_[0-9]{7,18})-[0-9a-f]{8}", re.ASCII)
_REPLACED = re.compile(r"\.replaced-(iter_[0-9]{7,18})-[0-9a-f]{12}", re.ASCII)


def step_dir(step: int) -> str:
    """Return the directory name of a committed step, such as `iter_0000100`."""
    if not 0 <= step < 10**18:
        raise StorageError(f"step {step} cannot be stored: a step must be in [0, 10**18)")
    return f"iter_{step:07d}"


def parse_step_dir(name: str) -> int | None:
    """Return the step of a directory name, or None if it is not the name of a step."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step_dir(step) == name else None


def saving_dir(step: int, save_id: str) -> str:
    """Return the directory name of a save in progress: `.saving-iter_0000120-<save id>`."""
    name = f"{SAVING_PREFIX}{step_dir(step)}-{save_id}"
    if _SAVING.fullmatch(name) is None:
        raise StorageError(f"save id {save_id!r} must be 1 to 64 characters of 0-9 A-Z a-z _ .")
    return name


def parse_saving_dir(name: str) -> tuple[int, str] | None:
    """Return step and save id of a save in progress, or None for any other name."""
    match = _SAVING.fullmatch(name)
    if match is None:
        return None
    step = parse_step_dir(match[1])
    return None if step is None else (step, match[2])


def claimed_dir(name: str, token: str) -> str:
    """Return the name under which a repair finishes a save, unknown to the save's processes."""
    step, save_id = parse_saving_dir(name) or (-1, "")
    return saving_dir(step, f"{unclaimed(save_id)}.{token}")


def unclaimed(save_id: str) -> str:
    """Return the save id of a save, also if a repair has claimed it."""
    return save_id.partition(".")[0]


def parse_aside_dir(name: str) -> int | None:
    """Return the step of a checkpoint that has a `.old-…` name for an instant, or None."""
    match = _ASIDE.fullmatch(name)
    return None if match is None else parse_step_dir(match[1])


def replaced_dir(step: int, token: str) -> str:
    """Return the name of a replaced version kept for its readers: `.replaced-iter_…-<token>`."""
    return f"{REPLACED_PREFIX}{step_dir(step)}-{token}"


def parse_replaced_dir(name: str) -> int | None:
    """Return the step of a version kept for its readers, or None for any other name."""
    match = _REPLACED.fullmatch(name)
    return None if match is None else parse_step_dir(match[1])


def data_file(number: int, *, envelope: str = "safetensors") -> str:
    """Return the name of a data file in a checkpoint directory: `data/00000.safetensors`."""
    suffix = "distcp" if envelope == "torch_dist" else envelope
    return f"{DATA_DIR}/{number:05d}.{suffix}"


def rank_log_file(rank: int) -> str:
    """Return the path of a rank's log below the root of its run's checkpoints."""
    return f"{RANK_LOG_DIR}/{rank:05d}.jsonl"


def list_steps(storage: Storage) -> list[int]:
    """Return the committed steps, ascending; links are not followed. Errors of `survey_steps`."""
    return survey_steps(storage)[0]


def survey_steps(storage: Storage) -> tuple[list[int], list[int]]:
    """Return the committed steps, and those of names that hold no checkpoint, both ascending.

    Raises:
        StorageError: The storage cannot be read, or steps are removed at each of many looks.
    """
    before: set[int] = set()
    for _ in range(_NUM_LISTINGS):
        listed = _find_steps(storage)
        missing = {step for step, is_committed in listed.items() if not is_committed}
        # One that is listed and not there was removed in between: a newer one may have come, which
        # this listing does not show. What lacks its manifest for longer is listed again.
        if missing <= before:
            return sorted(listed.keys() - missing), sorted(missing)
        before = missing
    raise StorageError(
        f"{storage.describe('')} cannot be listed: its checkpoints are removed faster than that; "
        f"wait for the process that removes them"
    )


def _find_steps(storage: Storage) -> dict[int, bool]:
    """Return the steps whose names a listing shows, and whether each is committed after it."""
    # A storage where each look is a request knows of all directories whether they have a file.
    dirs_with = getattr(storage, "dirs_with", None)
    if dirs_with is not None:
        shown: dict[str, bool] = dirs_with(MANIFEST)
        steps = ((parse_step_dir(name), has_manifest) for name, has_manifest in shown.items())
        return {step: has_manifest for step, has_manifest in steps if step is not None}
    return {
        step: _is_listed(storage, step)
        for name in storage.list("")
        if (step := parse_step_dir(name)) is not None
    }


def _is_listed(storage: Storage, step: int) -> bool:
    """Return True if a step is committed, or may not be examined: a read of it has the reason.

    So it stands in the way of no other step, and no older one is taken for it.
    """
    try:
        return is_committed(storage, step)
    except StorageError as error:
        if not is_unknown(error):
            raise
        return True


def is_committed(storage: Storage, step: int) -> bool:
    """Return True if a step is committed; what the root has besides does not matter.

    Raises:
        StorageError: It cannot be known now.
    """
    return storage.exists(f"{step_dir(step)}/{MANIFEST}")


def linked_steps(storage: Storage, steps: Iterable[int]) -> str:
    """Say of names of steps that are links that they are not followed; empty if there are none.

    Args:
        storage: Of the root.
        steps: Those whose names hold no checkpoint, see `survey_steps`.
    """
    if storage.local_path("") is None:
        return ""  # a bucket has no links
    links = [name for name in map(step_dir, steps) if not storage.is_dir(name)]
    if not links:
        return ""
    return (
        f"{', '.join(links[-_MAX_NAMED:])} is a link or a file, and links to steps are not "
        f"followed: name the checkpoint that is meant itself, or copy it with `holdfast copy`"
    )


def _require_dir_if_any(root: Path) -> None:
    """Raise StorageError if something else than a directory has the name of a root.

    Or of a directory above: no save could make the root.
    """
    for place in (root, *root.parents):
        try:
            if stat.S_ISDIR(os.stat(place).st_mode):
                return
            raise StorageError(f"{place} is not a directory, so no checkpoint is in it")
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(place):
                raise StorageError(
                    f"{place} is a link to {os.readlink(place)}, which does not exist; if it is a "
                    f"volume, mount it"
                ) from None
        except OSError:
            return  # the first read of it raises this by name


def require_root_of_checkpoints(storage: Storage) -> None:
    """Raise StorageError if the storage is at one checkpoint, not at the root of a run's.

    A directory inside of one counts, too, in a file system: what is saved there damages it. So does
    a file: a run would find no checkpoint, start afresh, and fail at its first save. And so does
    the name of a step that has no checkpoint, or whose data is elsewhere, as in a bucket: the run
    above would find there what it has not saved. What a run has used already is its root, whatever
    it is called: it has an id or steps.
    """
    local = storage.local_path("")
    if local is not None:
        _require_dir_if_any(local)
    whole = None if local is None else Path(os.path.abspath(local))
    inside = [] if whole is None else [whole, *whole.parents][:_MAX_ABOVE]
    checkpoints = [
        each
        for each in inside
        if parse_step_dir(each.name) is not None and (each / MANIFEST).is_file()
    ]
    place = str(whole or storage.describe("")).rstrip("/")
    is_checkpoint = bool(checkpoints) or storage.exists(MANIFEST)
    if not is_checkpoint and (
        parse_step_dir(place.rpartition("/")[2]) is None or _is_used_root(storage)
    ):
        return
    where = str(checkpoints[0]) if checkpoints else place
    if checkpoints and checkpoints[0] != whole:
        raise StorageError(
            f"{whole} is inside of a checkpoint, {where}, and not the root of a run's checkpoints: "
            f"give the directory above that, {checkpoints[0].parent}"
        )
    above, _, name = where.rpartition("/")
    step = parse_step_dir(name)
    meant = "" if step is None else f", and step={step} to load this one"
    has = "is" if is_checkpoint else "has the name of"
    raise StorageError(
        f"{where} {has} one checkpoint, not the root of a run's checkpoints: "
        f"give the directory above{above and f', {above}'}{meant}"
    )


def _is_used_root(storage: Storage) -> bool:
    """Return True if a run has saved here, or a checkpoint was copied to here."""
    return storage.exists(ROOT_ID) or (storage.is_dir("") and bool(list_steps(storage)))


def committed_step(steps: Sequence[int], step: int | None, *, place: str) -> int:
    """Return a step if it is among those committed; the last of them for None.

    Args:
        steps: As of `list_steps`; with None there is at least one.
        step: The one that is meant.
        place: Of the checkpoints, for the message.

    Raises:
        ConfigError: It is not committed.
    """
    if step is None or step in steps:
        return steps[-1] if step is None else step
    known = ", ".join(map(str, steps[-_MAX_NAMED:])) or "none"
    older = len(steps) - _MAX_NAMED
    more = f", and {counted(older, 'older one')}" if older > 0 else ""
    raise ConfigError(f"{place} has no committed step {step}; it has {known}{more}")


def newest_step_dir(names: Iterable[str]) -> int | None:
    """Return the highest step with a directory among these names, committed or not; or None."""
    steps = map(parse_step_dir, names)
    return max((step for step in steps if step is not None), default=None)


def latest_step(storage: Storage) -> int | None:
    """Return the newest committed step, or None; the pointer file is not consulted."""
    return max(list_steps(storage), default=None)


def is_file_with(storage: Storage, path: str, data: bytes) -> bool:
    """Return True if a file has just this content; reads no more than that."""
    try:
        return read_tail(storage, path, nbytes=len(data), file_nbytes=len(data)) == data
    except StorageError:
        if storage.exists(path):
            raise
        return False


def _update_pointer(
    storage: Storage, update: UpdateFile, committed: int | None, looks: Iterator[int | None]
) -> int | None:
    """`point_to_newest` where a file can be replaced on condition that it has not changed."""
    newest: int | None = None

    def text(own: bytes | None) -> bytes | None:
        nonlocal newest
        before = own.strip() if own is not None else b""
        if committed is not None and before.isdigit() and int(before) < committed:
            # This process wrote the pointer last, and to the newest step of then.
            newest = committed
        else:
            newest = next(looks)
        return f"{newest}\n".encode() if newest is not None else None

    return newest if update(LATEST, text) else None


def _looks_for_newest(storage: Storage, steps: Sequence[int] | None) -> Iterator[int | None]:
    """Yield the newest committed step again and again, at first what a look has just shown."""
    if steps is not None:
        yield max(steps, default=None)
    while True:
        yield latest_step(storage)


def point_to_newest(
    storage: Storage,
    *,
    committed: int | None = None,
    steps: Sequence[int] | None = None,
    dry_run: bool = False,
) -> int | None:
    """Make the pointer file name the newest committed step, if any step is committed.

    Args:
        storage: The directory of checkpoints.
        committed: A step that this process has just committed. Where a look at all steps is a
            request, it is the newest if it is newer than the step to which this process was the
            last to point.
        steps: The committed ones, if a look has just shown them.
        dry_run: Only look.

    Returns:
        The newest step if the pointer named another one, else None.
    """
    changed: int | None = None
    update = getattr(storage, "update_file", None)
    looks = _looks_for_newest(storage, steps)
    if update is not None and not dry_run:
        return _update_pointer(storage, update, committed, looks)
    # Several looks: a save may commit between the listing and the writing.
    for newest in islice(looks, _NUM_LOOKS):
        if newest is None:
            return changed
        text = f"{newest}\n".encode()
        if is_file_with(storage, LATEST, text):
            return changed
        changed = newest
        if dry_run:
            return changed
        storage.replace_file(LATEST, text)
    return changed

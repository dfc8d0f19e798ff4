"""Tags: names for steps, kept as small files `tags/<name>` next to the checkpoints."""

from __future__ import annotations

import re

from holdfast.errors import ConfigError, CorruptionError, HoldfastError, StorageError, some_of
from holdfast.format.names import committed_step, is_committed, list_steps, step_dir
from holdfast.format.versions import read_lease
from holdfast.storage import Storage
from holdfast.storage.reading import read_at_most

TAGS_DIR = "tags"

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,99}", re.ASCII)
_STEP = re.compile(rb"([0-9]{1,18})\n", re.ASCII)


def set_tag(storage: Storage, name: str, *, step: int) -> None:
    """Give a committed step a name; a tag of that name moves.

    It is durable when this returns. A reader sees the old or the new step. A removal at the same
    time either sees the tag, or has removed the step before.

    Raises:
        ConfigError: The name is not allowed, or the step is not committed.
    """
    path = _path(name)
    # A lease like a reader's: a removal that started before is waited for, a later one sees it.
    with read_lease(storage, step_dir(step)):
        if not is_committed(storage, step):  # other steps do not matter
            committed_step(list_steps(storage), step, place=storage.describe(""))
        storage.make_dir(TAGS_DIR)
        storage.replace_file(path, f"{step}\n".encode())


def remove_tag(storage: Storage, name: str) -> None:
    """Remove a tag, not the checkpoint; ConfigError if no tag has that name."""
    path = _path(name)
    if not storage.exists(path):
        known = ", ".join(list_tags(storage)) or "none"
        raise ConfigError(f"{storage.describe('')} has no tag {name!r}; it has {known}")
    storage.remove_tree(path)
    # `remove_tree` syncs the names of directories only; a tag is a file.
    storage.sync_dir(TAGS_DIR)


def list_tags(storage: Storage) -> dict[str, int]:
    """Return every tag and its step, by name; a step may have several tags, or be gone.

    Raises:
        CorruptionError: A tag cannot be read, so that the step that it protects is unknown.
        StorageError: `tags` is a link or a file.
    """
    if not storage.exists(TAGS_DIR):
        return {}
    tags = {}
    for name in storage.list(TAGS_DIR):
        if _NAME.fullmatch(name) is None:
            continue
        path = _path(name)
        try:
            data = read_at_most(storage, path, 64)
        except StorageError:
            # By a listing, too: a store that answers a read with 404 may still show the tag.
            if storage.exists(path) or name in storage.list(TAGS_DIR):
                raise
            continue  # another process has removed it since the listing
        match = _STEP.fullmatch(data)
        if match is None:
            raise CorruptionError(
                f"{storage.describe(path)}: {data[:40]!r} is not a step; set the tag again or "
                f"remove it"
            )
        tags[name] = int(match[1])
    return tags


def tags_left_behind(storage: Storage, step: int) -> list[str]:
    """Say which tags of a step a copy of it does not have, since its root has them; cannot fail."""
    try:
        tags = [tag for tag, each in list_tags(storage).items() if each == step]
    except HoldfastError as error:  # it says nothing of the checkpoint
        return [f"tags of the step, if it has any: {error}"]
    return [f"tags of the step, which its root has: {some_of(tags)}"] if tags else []


def _path(name: str) -> str:
    """Return the file of a tag; ConfigError if the name is not allowed."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"tag {name!r} must be 1 to 100 characters of 0-9 A-Z a-z _ . + - "
            "and start with a letter, a digit or _"
        )
    return f"{TAGS_DIR}/{name}"

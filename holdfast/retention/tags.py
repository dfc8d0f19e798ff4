"""Tags: names for steps, kept as small files `tags/<name>` next to the checkpoints."""

from __future__ import annotations

import re

from holdfast.errors import ConfigError, CorruptionError
from holdfast.format.names import list_steps, step_dir
from holdfast.format.versions import read_lease
from holdfast.storage import Storage

TAGS_DIR = "tags"

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,99}", re.ASCII)
_STEP = re.compile(rb"([0-9]{1,18})\n", re.ASCII)


def set_tag(storage: Storage, name: str, *, step: int) -> None:
    """Give a committed step a name; a tag of that name moves.

    Durable when it returns; a reader sees the old or the new step, and a retention at the same
    time either sees the tag or has removed the step before.

    Raises:
        ConfigError: No tag can have that name, or the step is not committed.
    """
    path = _path(name)
    with read_lease(storage, step_dir(step)):
        steps = list_steps(storage)
        if step not in steps:
            known = ", ".join(map(str, steps[-8:])) or "none"
            raise ConfigError(
                f"{storage.describe('')} has no committed step {step}; it has {known}"
            )
        storage.make_dir(TAGS_DIR)
        storage.replace_file(path, f"{step}\n".encode())


def remove_tag(storage: Storage, name: str) -> None:
    """Remove a tag, not the checkpoint; ConfigError when there is none of that name."""
    path = _path(name)
    if not storage.exists(path):
        known = ", ".join(list_tags(storage)) or "none"
        raise ConfigError(f"{storage.describe('')} has no tag {name!r}; it has {known}")
    storage.remove_tree(path)
    storage.sync_dir(TAGS_DIR)


def list_tags(storage: Storage) -> dict[str, int]:
    """Every tag and its step, by name; a step may have several names, or be gone.

    Raises:
        CorruptionError: The file of a tag cannot be read: what it protects is unknown.
        StorageError: `tags` is a link or a file.
    """
    if not storage.exists(TAGS_DIR):
        return {}
    tags = {}
    for name in storage.list(TAGS_DIR):
        if _NAME.fullmatch(name) is None:
            continue
        path = _path(name)
        data = storage.read(path, nbytes=min(storage.size(path), 64))
        match = _STEP.fullmatch(data)
        if match is None:
            raise CorruptionError(
                f"{storage.describe(path)}: {data[:40]!r} is no step; set the tag again or "
                f"remove it"
            )
        tags[name] = int(match[1])
    return tags


def _path(name: str) -> str:
    """The file of a tag; ConfigError for a name that no tag can have."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"tag {name!r} must be 1 to 100 of the characters 0-9 A-Z a-z _ . + - "
            "and begin with a letter, a digit or _"
        )
    return f"{TAGS_DIR}/{name}"

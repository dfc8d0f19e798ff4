"""The process groups of a framework's own world, in which every rank holds a replica or a shard."""

from __future__ import annotations

import os

import torch.distributed as dist

from holdfast.errors import GroupError
from holdfast.parallel import Layout, ProcessGroups


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


def text_of_coordinator(groups: ProcessGroups, text: str, *, phase: str) -> str:
    """Return the coordinator's text on every rank. Cost: one small collective."""
    control = groups.control
    own = text.encode() if control.is_coordinator else None
    return control.broadcast(own, phase=phase).decode()

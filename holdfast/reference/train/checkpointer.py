"""The checkpointer that a run's options describe."""

from __future__ import annotations

from holdfast.checkpoint import Checkpointer
from holdfast.parallel import ProcessGroups
from holdfast.reference.train.config import CheckpointConfig
from holdfast.retention.policies import KeepEvery, KeepLast, Policy


def make_checkpointer(config: CheckpointConfig, *, groups: ProcessGroups) -> Checkpointer | None:
    """What saves are made with; None for a run that makes none."""
    if config.save is None:
        return None
    return Checkpointer(
        config.save,
        groups=groups,
        retention=_retention(config),
        replicate_over=config.replicate_over,
        max_copy_fraction=config.max_copy_fraction,
        check_replicas_every=config.check_replicas_every,
    )


def _retention(config: CheckpointConfig) -> Policy | None:
    """Which checkpoints to keep; None keeps all."""
    if config.keep_last == 0:
        return None
    policy: Policy = KeepLast(config.keep_last)
    return policy | KeepEvery(config.keep_every) if config.keep_every else policy
